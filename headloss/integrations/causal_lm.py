"""What headloss must know of a causal language model of Transformers: head, logits, labels; or else an error."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import headloss as hl
from headloss.integrations.forward_code import After, after_head, before_head, mentions, other_use
from headloss.module import check_objective, own_forward


def unwrapped(model: Any) -> Any:
    """The model inside a wrapper of torch.compile and of PEFT."""
    model = getattr(model, "_orig_mod", model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"model: wanted a Transformers model, got {type(base).__name__}; patch it before it is wrapped")
    return base


def check_head(model: Any, head: nn.Module) -> None:
    """Check that the head is still the one that was patched, or FSDP1's wrapper around it."""
    now = model.get_output_embeddings()
    if now is not head and not (type(now).__name__ == "FullyShardedDataParallel" and now.module is head):
        raise ValueError(
            f"model: its head has changed since it was patched ({type(now).__name__}): "
            f"resized, or wrapped by an adapter such as LoRA, which the loss would leave out; unpatch(model) "
            f"and patch it again, or keep adapters off the head"
        )


_INSTEAD = {
    "trl": "TRL's trainers bring a head of their own: give the model unpatched to SFTTrainer or GRPOTrainer of "
    "headloss.integrations.trl with objective=, or make the trainer inside its swap_kernels()",
    "liger_kernel": "Let Liger leave the head alone: fused_linear_cross_entropy=False, in TrainingArguments "
    "liger_kernel_config={'fused_linear_cross_entropy': False}",
}


def bypassed(forward: Any) -> RuntimeError:
    """The error for a forward that made a loss without the patched head."""
    function = getattr(forward, "__func__", forward)
    module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)  # wraps() hides the others
    name = getattr(getattr(function, "__code__", None), "co_name", type(function).__name__)
    instead = _INSTEAD.get(module.partition(".")[0], "Undo that, or keep the logits and use loss_function(objective)")
    return RuntimeError(
        f"model: {module}.{name} runs in place of the forward that patch(model, ...) took over, and makes a loss "
        f"without its head, so the objective was not computed.  {instead}"
    )


SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
NAMED = {"scale": (*SCALES, "logits_scaling"), "softcap": SOFTCAPS}  # as configs call them


def _number(config: Any, names: tuple[str, ...]) -> float | None:
    """The first of these that is a number: MPT's `logit_scale` may be a word, and its model goes by none of them."""
    return next((float(x) for name in names if isinstance(x := getattr(config, name, None), int | float)), None)


def logits_transform(config: Any) -> dict[str, Any]:
    """scale, softcap and vocab, as the configs of Transformers have them."""
    text = config.get_text_config()
    found: dict[str, Any] = {}
    scale = _number(text, SCALES)
    divisor = getattr(text, "logits_scaling", None)
    if scale is None and divisor is not None:
        scale = float(divisor) if text.model_type == "hyperclovax" else 1 / divisor
    if scale is not None:
        found["scale"] = scale
    softcap = _number(text, SOFTCAPS)
    if softcap is not None:
        found["softcap"] = softcap
    unpadded = getattr(text, "unpadded_vocab_size", None)
    if unpadded is not None:
        found["vocab"] = min(int(unpadded), int(text.vocab_size))
    return found


def transform_of(model: Any, from_backbone: bool = False, instead: str = "") -> dict[str, Any]:
    """`logits_transform` of hidden states as the head gets them or, `from_backbone`, as the backbone gives them."""
    found, steps = logits_transform(model.config), before_head(model)
    for option, names in NAMED.items():
        if option in found and not mentions(model, names):  # a model with images may leave out what its text model does
            del found[option]
    if any(step.named == "logits_scaling" for step in steps):  # MiniCPM's, which divides hidden states by it
        found.pop("scale", None)
    after = after_head(model) if from_backbone else After(None, None)  # elsewhere a number goes through the model
    line = None if "softcap" in found else after.other or (None if "scale" in found else after.factor)
    if line is not None:
        raise TypeError(
            f"model: {type(model).__name__}.forward has `{line}`, which its config does not tell, and which would be "
            f"left out; {instead}"
        )
    for line, factor, _ in steps:
        if from_backbone and factor is None:
            raise TypeError(
                f"model: {type(model).__name__}.forward has `{line}` between backbone and head, which would be left "
                f"out; {instead}"
            )
        if from_backbone and factor is not None:
            found["scale"] = found.get("scale", 1.0) * factor
    return found


KEEP_LOGITS = "keep the logits: model.loss_function = loss_function(objective)"


def check_model(
    model: Any, *, takes_loss: bool = True, vocab: int | None = None, instead: str = KEEP_LOGITS
) -> nn.Linear:
    """The head of a causal language model that can be patched, or an error; `vocab`: the columns that are its own.

    `instead`: what can be done where it cannot.
    """
    name = type(model).__name__
    if "headloss" in vars(model):
        raise ValueError(f"model: {name} is patched already; unpatch(model) first")
    kind = getattr(model, "loss_type", None)
    causal = LOSS_MAPPING.get(kind) is ForCausalLMLoss or (
        kind is None and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )
    if not causal or getattr(model.config, "is_encoder_decoder", False):
        raise TypeError(f"model: {name} is not a causal language model; headloss shifts labels for those only")
    head = model.get_output_embeddings()
    if head is None:
        raise TypeError(f"model: {name} has no output embedding (get_output_embeddings() is None)")
    if takes_loss and "loss_function" not in inspect.unwrap(type(model).forward).__code__.co_names:
        raise TypeError(
            f"model: {name}.forward does not go through self.loss_function, so its loss cannot be taken over; "
            f"call hl.Objective on hl.Logits(outputs.logits) instead"
        )
    cut = vocab is not None or "vocab" in logits_transform(model.config)
    if line := other_use(model, cut):
        hint = "" if cut else "; where it only leaves out columns from V on, pass vocab=V"
        raise TypeError(
            f"model: {name}.forward has `{line}`, but a patched head makes a loss and no logits, and the loss would be "
            f"without that; {instead}{hint}"
        )
    if not isinstance(head, nn.Linear):
        kind = f"{type(head).__module__.partition('.')[0]}'s {type(head).__name__}"  # PEFT calls its own a Linear too
        one = "several heads" if isinstance(head, nn.ModuleList | list | tuple) else kind
        raise TypeError(f"model: the head of {name} is {one}, wanted one nn.Linear without adapters; {instead}")
    packed = is_traceable_wrapper_subclass(head.weight) and not hasattr(head.weight, "device_mesh")
    if packed or not head.weight.is_floating_point():
        held = type(head.weight).__name__ if packed else head.weight.dtype
        raise TypeError(
            f"model: the head of {name} is a {type(head).__name__} with {held} weights (quantised?), wanted a plain "
            f"nn.Linear; leave the head out of quantisation, or {instead}"
        )
    if more := own_forward(head):
        raise TypeError(
            f"model: the head of {name} has {more}, which a patched head would leave out; patch the model before that "
            f"(a device map, a parametrization), leave the head out of it (quantisation, adapters), or {instead}"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise TypeError(
            f"model: {name} is tensor parallel; its head holds a part of the vocabulary: use hl.HeadParallel"
        )
    return head


def check_kept(model: Any) -> None:
    """Check that the labels a model passes to our loss function are not shifted yet: Transformers' own shifts them."""
    kind = getattr(model, "loss_type", None)
    if LOSS_MAPPING.get(kind, ForCausalLMLoss) is not ForCausalLMLoss:
        raise TypeError(
            f"model.loss_function: the labels of {type(model).__name__} ({kind}) are not to be shifted, and "
            f"loss_function(objective) shifts them; call hl.Objective on hl.Logits(outputs.logits) instead"
        )


def objective_or_default(objective: object) -> hl.Objective:
    return hl.Objective(ce=hl.losses.cross_entropy) if objective is None else check_objective(objective)


def targets_of(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int | None = None) -> Tensor:
    """`ignore_index`: which label is ignored, as Transformers' own loss takes it; by default -100."""
    if shift_labels is not None:
        targets = shift_labels
    elif not isinstance(labels, Tensor):
        raise TypeError(f"labels: wanted an integer tensor, got {type(labels).__name__}")
    else:
        targets = hl.shift_labels(labels)
    if ignore_index is None or ignore_index == -100:
        return targets
    return targets.masked_fill(targets == ignore_index, -100)


def lines_of(targets: Tensor, kwargs: Mapping[str, Any]) -> hl.Segments:
    """The sequences of a batch: the documents that attention keeps apart, or else its lines.

    Like Transformers, positions are read as marks of documents where no mask is given or the batch is one line; of four
    per token, for models with images, the first is the token's place in its document.
    """
    _check_whole_lines()
    positions, offsets, ids = (kwargs.get(name) for name in ("position_ids", "cu_seq_lens_q", "seq_idx"))
    alone = len(targets) == 1
    if isinstance(positions, Tensor) and positions.shape == (4, *targets.shape):
        positions = positions[0]
    if isinstance(positions, Tensor) and positions.shape == targets.shape:
        if alone or kwargs.get("attention_mask") is None:
            return hl.Segments.from_position_ids(positions)
    elif alone and isinstance(offsets, Tensor):
        packed = hl.Segments.from_cu_seqlens(offsets, targets.shape[1])
        return hl.Segments(packed.ids[None], packed.num_segments)
    elif isinstance(ids, Tensor) and ids.shape == targets.shape:
        return hl.Segments.from_ids(ids)
    return hl.Segments.from_batch(targets)


def _check_whole_lines() -> None:
    """Ranks that share the tokens of a sequence, as accelerate lays them out, have a part of each line."""
    state = sys.modules.get("accelerate.state")
    ranks = None if state is None else state.AcceleratorState._shared_state.get("parallelism_config")
    if getattr(ranks, "cp_enabled", False) or getattr(ranks, "sp_enabled", False):
        raise ValueError(
            "parallelism_config: ranks share the tokens of a sequence, and the objective has a loss or a mean over "
            "whole sequences; use losses of tokens with reduction='token_mean', or leave cp_size and sp_size at 1"
        )


def check_shape(targets: Tensor, rows: Tensor) -> None:
    if tuple(targets.shape) != tuple(rows.shape[:-1]):
        raise ValueError(
            f"labels: wanted shape {tuple(rows.shape[:-1])}, one for each position of the model's output, got "
            f"{tuple(targets.shape)}; with logits_to_keep the labels must be cut too"
        )


def count_of(num_items: int | Tensor | None) -> int | Tensor | None:
    if isinstance(num_items, Tensor) and num_items.ndim:
        return num_items.reshape(-1)[0]
    return num_items
