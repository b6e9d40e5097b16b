"""Tiny multimodal models with random weights, and a batch for each: an image, then a ragged line of text."""

from __future__ import annotations

from typing import Any

import tiny_models as tiny
import torch
import transformers as T
from torch import nn

IMAGE = 60  # the token that stands for a patch
TEXT = {
    "vocab_size": tiny.V, "hidden_size": tiny.D, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EYE = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "num_channels": 3,
}  # fmt: skip
QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
QWEN_EYE = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 1, "temporal_patch_size": 1}
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": 57, "vision_end_token_id": 58}
MLLAMA_EYE = {
    **EYE, "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 16, "intermediate_layers_indices": [0],
    "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]],
}  # fmt: skip
CLIP = {"image_token_index": IMAGE, "vision_feature_layer": -1}
GEMMA = {**TEXT, "head_dim": 8}
LLAMA_EYES = {"image_token_id": IMAGE, "scale_factor": 1, "pad_token_id": 0}

MODELS: dict[str, Any] = {  # the family, its config
    "llava": ("Llava", lambda: dict(
        vision_config=T.CLIPVisionConfig(**EYE), text_config=T.LlamaConfig(**TEXT), **CLIP)),
    "llava_next": ("LlavaNext", lambda: dict(
        vision_config=T.CLIPVisionConfig(**EYE), text_config=T.LlamaConfig(**TEXT), image_grid_pinpoints=[[8, 8]],
        **CLIP)),
    "gemma3": ("Gemma3", lambda: dict(
        vision_config=T.SiglipVisionConfig(**EYE), text_config=T.Gemma3TextConfig(**GEMMA), mm_tokens_per_image=4,
        image_token_index=IMAGE, boi_token_index=58, eoi_token_index=59)),
    "paligemma": ("PaliGemma", lambda: dict(
        vision_config=T.SiglipVisionConfig(**EYE, projection_dim=tiny.D), text_config=T.GemmaConfig(**GEMMA),
        image_token_index=IMAGE, projection_dim=tiny.D, hidden_size=tiny.D)),
    "idefics3": ("Idefics3", lambda: dict(vision_config=EYE, text_config=T.LlamaConfig(**TEXT), **LLAMA_EYES)),
    "smolvlm": ("SmolVLM", lambda: dict(vision_config=EYE, text_config=T.LlamaConfig(**TEXT), **LLAMA_EYES)),
    "qwen2_vl": ("Qwen2VL", lambda: dict(
        vision_config={**QWEN_EYE, "embed_dim": 8, "hidden_size": tiny.D, "mlp_ratio": 2}, text_config=QWEN_TEXT,
        **QWEN_IDS)),
    "qwen2_5_vl": ("Qwen2_5_VL", lambda: dict(
        vision_config={**QWEN_EYE, "hidden_size": 8, "out_hidden_size": tiny.D, "intermediate_size": 12,
                       "window_size": 8, "fullatt_block_indexes": [0]},
        text_config=QWEN_TEXT, **QWEN_IDS)),
    "mllama": ("Mllama", lambda: dict(
        vision_config=MLLAMA_EYE, text_config={**TEXT, "num_hidden_layers": 2, "cross_attention_layers": [1]},
        image_token_index=IMAGE)),
    "internvl": ("InternVL", lambda: dict(
        vision_config={**EYE, "image_size": [8, 8], "patch_size": [4, 4]}, text_config=T.Qwen2Config(**TEXT),
        image_token_id=IMAGE, downsample_ratio=0.5)),
}  # fmt: skip


def model(name: str) -> nn.Module:
    family, options = MODELS[name]
    config = getattr(T, f"{family}Config")(**options())
    torch.manual_seed(0)
    made = getattr(T, f"{family}ForConditionalGeneration")(config).train()
    with torch.no_grad():
        for p in made.parameters():
            if not p.any():  # a gate or a projection that begins closed: the image would not be seen
                p.normal_(0, 0.3)
        made.get_output_embeddings().weight.normal_(0, 4 / tiny.D)
    return made


def batch(name: str, lines: int = 3) -> dict[str, torch.Tensor]:
    text = tiny.batch(lines)
    patches = {"llava_next": 10, "internvl": 1, "mllama": 1}.get(name, 4)
    before = lambda value, x: torch.cat([torch.full((lines, patches), value), x], 1)
    found = {"input_ids": before(IMAGE, text["input_ids"]), "attention_mask": before(1, text["attention_mask"])}
    found["labels"] = before(-100, text["labels"])
    torch.manual_seed(7)
    shape: tuple[int, ...] = (lines, 3, 8, 8)
    if name in ("idefics3", "smolvlm", "llava_next"):
        shape = (lines, 2 if name == "llava_next" else 1, 3, 8, 8)
        found |= {"image_sizes": torch.full((lines, 2), 8)} if name == "llava_next" else {}
    elif name.startswith("qwen"):
        shape = (4 * lines, 3 * 16)
        found["image_grid_thw"] = torch.tensor([[1, 2, 2]] * lines)
        found["mm_token_type_ids"] = (found["input_ids"] == IMAGE).long()
    elif name == "mllama":
        shape = (lines, 1, 1, 3, 8, 8)
        found |= {"aspect_ratio_ids": torch.ones(lines, 1).long(), "aspect_ratio_mask": torch.ones(lines, 1, 1).long()}
        found["cross_attention_mask"] = torch.ones(*found["input_ids"].shape, 1, 1).long()
    elif name in ("gemma3", "paligemma"):
        image = found["input_ids"] == IMAGE
        found["token_type_ids"] = (image if name == "gemma3" else ~image).long()
    return {**found, "pixel_values": torch.randn(shape)}
