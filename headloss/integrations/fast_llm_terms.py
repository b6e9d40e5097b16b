"""Checks a block of Fast-LLM's losses, and makes a term of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import headloss as hl
from headloss.losses import LOSSES
from headloss.trace.signature import suggest

SILENT = ("type", "weight", "logits_scale_factor", "use_triton", "implementation", "entropy_chunk_size")
KEYS = {
    "label": ("loss_type",),
    "z_loss": (),
    "distillation": ("loss_type", "reference_model", "temperature"),
    "grpo": ("epsilon_low", "epsilon_high", "metrics", "temperature"),
    "gspo": ("epsilon_low", "epsilon_high", "metrics", "temperature"),
    "dpo": ("beta", "reference_model"),
}
DIVERGENCES = {"cross_entropy": "soft_cross_entropy", "forward_kl": "forward_kl", "reverse_kl": "reverse_kl"}
LEVELS = ("none", "basic", "auto", "with_entropy")  # all but none are equivalent by now; `few` is what basic used to be


def flat(losses: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The losses, with a monolithic one replaced by its children, whose weights and scale factors it multiplies."""
    for name, block in losses.items():
        if block.get("type") != "monolithic":
            yield name, block
            continue
        for key in set(block) - {"type", "losses", "weight", "logits_scale_factor", "use_triton"}:
            raise ValueError(f"{name}: no field {key!r} of monolithic; there are losses, weight, logits_scale_factor")
        for child, inner in flat(block.get("losses", {})):
            both = {k: float(block.get(k, 1.0)) * float(inner.get(k, 1.0)) for k in ("weight", "logits_scale_factor")}
            yield child, {**inner, **both}


def blocks_of(losses: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each loss by its name, checked."""
    found: dict[str, dict[str, Any]] = {}
    for name, block in flat(losses):
        if name in found:
            raise ValueError(f"{name}: two losses have this name, and one would be lost; rename one")
        found[name] = checked(name, block)
    return found


def checked(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """A block without unknown fields; the older spellings of gspo and of metrics are understood."""
    block = dict(block)
    kind = block.setdefault("type", "label")
    if kind not in KEYS:
        raise ValueError(f"{name}: no loss type {kind!r}; there are {', '.join(KEYS)}{suggest(str(kind), KEYS)}")
    if kind == "grpo":
        older = {"policy_loss", "compute_extra_metrics", "compute_entropy_metric"} & set(block)
        block["type"] = kind = block.pop("policy_loss", "grpo")
        extra, entropy = block.pop("compute_extra_metrics", False), block.pop("compute_entropy_metric", False)
        if older:
            block["metrics"] = "with_entropy" if entropy else "few" if extra else "none"
        if block.pop("normalize_by_documents", False):
            raise ValueError(f"{name}: normalize_by_documents is not read; use type gspo, or Term(reduction=...)")
    if kind in ("grpo", "gspo"):
        block.setdefault("metrics", "auto")
    for key in block:
        if key not in (*SILENT, *KEYS[kind]):
            known = (*SILENT[:2], *KEYS[kind])
            raise ValueError(f"{name}: no field {key!r} of {kind}; there are {', '.join(known)}{suggest(key, known)}")
    if block.get("metrics", "none") not in (*LEVELS, "few"):
        raise ValueError(f"{name}: metrics: wanted one of {', '.join(LEVELS)}, got {block['metrics']!r}")
    if not temperature_of(block) > 0:
        raise ValueError(f"{name}: logits_scale_factor and temperature: wanted positive numbers")
    if kind == "dpo" and "reference_model" not in block:
        raise ValueError(f"{name}: reference_model: missing")
    return block


def temperature_of(block: Mapping[str, Any]) -> float:
    """The temperature of the student: a policy loss's own, divided by the loss's own scale factor."""
    own = float(block.get("temperature", 1.0)) if block["type"] in ("grpo", "gspo") else 1.0
    factor = float(block.get("logits_scale_factor", 1.0))
    return own / factor if factor > 0 else -1.0


def options_at(block: Mapping[str, Any]) -> dict[str, Any]:
    T = temperature_of(block)
    return {} if T == 1.0 else {"temperature": T}


def term_of(name: str, block: Mapping[str, Any], factor: float) -> hl.Term:
    kind, at = block["type"], options_at(block)
    weight: float | Tensor = factor * float(block.get("weight", 1.0))
    if weight == 0:  # a literal 0 would switch the term off; Fast-LLM computes and logs it
        weight = torch.zeros((), dtype=torch.float32, device="cpu")
    loss_type = block.get("loss_type", "cross_entropy")
    if kind == "label":
        if loss_type not in ("cross_entropy", "forward_kl"):  # the same for a label, whose own entropy is 0
            raise ValueError(f"loss_type: {loss_type!r} to a label is infinite; use cross_entropy")
        return hl.Term(LOSSES["cross_entropy"], weight=weight, **at)
    if kind == "z_loss":
        return hl.Term(LOSSES["z_loss"], weight=weight, **at)
    if kind == "distillation":
        if loss_type not in DIVERGENCES:
            raise ValueError(f"loss_type: wanted one of {', '.join(DIVERGENCES)}, got {loss_type!r}")
        return hl.Term(LOSSES[DIVERGENCES[loss_type]], weight=weight, teacher=name, **at)
    if kind == "dpo":
        return hl.Term(LOSSES["dpo"], weight=weight, beta=float(block.get("beta", 1.0)), **at)
    how: dict[str, Any] = {"low": float(block.get("epsilon_low", 0.2)), "high": float(block.get("epsilon_high", 0.2))}
    if kind == "gspo":
        how["reduction"] = "seq_mean_token_sum"
    return hl.Term(LOSSES[kind], weight=weight, **how, **at)
