"""The leaf tensors of `hl.verify`: fresh copies of a call's tensors, for which it takes gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from headloss.checks.dense_records import DenseCall
from headloss.sources import Linear, Logits, Source


def tensors_of(source: Source) -> dict[str, Tensor]:
    """The source's tensors by name."""
    names = ("logits",) if isinstance(source, Logits) else ("hidden", "weight", "bias")
    return {n: getattr(source, n) for n in names if getattr(source, n) is not None}


def leaves_of(call: DenseCall, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Fresh copies of the source's tensors and of inputs that require grad, in this dtype or, if None, their own."""
    own = tensors_of(call.source)
    wanted = {n for n, x in own.items() if x.requires_grad} or set(own)
    found = {n: x.detach().to(dtype or x.dtype, copy=True).requires_grad_(n in wanted) for n, x in own.items()}
    for name, x in call.inputs.items():
        x = getattr(x, "value", x)
        if isinstance(x, Tensor) and x.requires_grad:
            found[f"input {name}"] = x.detach().to(dtype or x.dtype, copy=True).requires_grad_()
    return found


def nudged_leaves(call: DenseCall, wide: torch.dtype) -> dict[str, Tensor]:
    """The leaves with each number changed by a few roundings, to which another order of summation amounts.

    If logits are made in a narrow dtype, the change is half a step of it, which is what rounding the logits does.
    """
    source, side = call.source, torch.Generator().manual_seed(0)
    few = 4 * torch.finfo(source.fact_dtype).eps
    half = torch.finfo(source.chunk_dtype).eps / 2 if isinstance(source, Linear) else 0.0
    leaves = leaves_of(call, wide)
    for name, x in leaves.items():
        up = torch.randint(2, x.shape, generator=side, device="cpu").to(x) * 2 - 1
        x.data.mul_(1 + up * (max(few, half) if name in tensors_of(source) else few))
    return leaves
