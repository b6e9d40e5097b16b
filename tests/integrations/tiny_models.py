"""Tiny causal language models with random weights, and ragged batches for them.

Dimension key:  B lines   T tokens   V vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

V, D = 61, 16
_LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}
_GROUPED = {**_LAYERS, "num_key_value_heads": 1}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "llama_tied": ("Llama", {**_GROUPED, "tie_word_embeddings": True}),
    "mistral": ("Mistral", _GROUPED),
    "qwen2": ("Qwen2", _GROUPED),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 8}),
    "gemma": ("Gemma", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2", {**_GROUPED, "head_dim": 8, "final_logit_softcapping": 1.5}),
    "gemma3": ("Gemma3Text", {**_GROUPED, "head_dim": 8, "final_logit_softcapping": 2.0}),
    "phi": ("Phi", _LAYERS),  # its head has a bias
    "phi3": ("Phi3", {**_GROUPED, "pad_token_id": 0}),
    "cohere": ("Cohere", {**_GROUPED, "logit_scale": 0.25}),
    "granite": ("Granite", {**_GROUPED, "logits_scaling": 3.0}),
    "olmo2": ("Olmo2", _GROUPED),
    "gpt_neox": ("GPTNeoX", _LAYERS),
    "gpt2": ("GPT2", {"n_layer": 1, "n_head": 2, "n_embd": D, "n_positions": 64, "resid_pdrop": 0.0,
                      "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "mixtral": ("Mixtral", {**_GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2,
                            "output_router_logits": True, "router_aux_loss_coef": 0.1}),
}  # fmt: skip


def model(name: str, seed: int = 0, spread: float = 1.0, **more: Any) -> nn.Module:
    """A model with a peaked head: the logits have a spread of about 1 and the softmax is not flat."""
    family, options = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": V,
            "hidden_size": D,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **options,
            **more,
        }
    )
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        made.get_output_embeddings().weight.normal_(0, spread * 4 / D)
        if made.get_output_embeddings().bias is not None:
            made.get_output_embeddings().bias.normal_()
    return made


def batch(lines: int = 3, tokens: int = 9, seed: int = 1) -> dict[str, torch.Tensor]:
    """Right-padded lines of different lengths, with a prompt that is not trained on."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, V, (lines, tokens), generator=generator)
    lengths = torch.randint(3, tokens + 1, (lines, 1), generator=generator)
    prompts = torch.randint(0, 4, (lines, 1), generator=generator)
    position = torch.arange(tokens)[None]
    mask = (position < lengths).long()
    labels = ids.masked_fill((position < prompts) | (mask == 0), -100)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}
