"""Numbers that a kernel takes: known when it is launched, or in a tensor, with one for all rows or one per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Number = float | Tensor
Kinds = tuple[int, ...]  # see `kinds_of`


def as_number(x: Number, device: torch.device) -> Number:
    """As the kernel takes it: a float, or a contiguous tensor on its device with one value or one per row."""
    if not isinstance(x, Tensor):
        return float(x)
    if x.device == device and x.is_contiguous():
        return x
    if x.device != device:  # a scalar on the host; as a float it would be rounded to float32
        return float(x) if x.dtype.is_floating_point and x.dtype != torch.float64 else x.to(device)
    if x.ndim and x.stride(0) == 0 and x.shape[0]:
        return x[0]
    return x.contiguous() if x.ndim else x


def specialization_of(xs: Sequence[Number]) -> tuple[Any, ...]:
    """For each number -1; for each tensor all that a compiled kernel depends on."""
    return tuple([(x.ndim, x.dtype, x.data_ptr() & 15 == 0) if isinstance(x, Tensor) else -1 for x in xs])


def kinds_of(xs: Sequence[Number]) -> Kinds:
    """-1 for a number, 0 for one value on the device, 1 for one per row."""
    return tuple([x.ndim if isinstance(x, Tensor) else -1 for x in xs])


def kinds_in(specialization: tuple[Any, ...], per_row: bool = False) -> tuple[Any, ...]:
    """`kinds_of`, from a result of `specialization_of`; or, with `per_row`, whether there is one value per row."""
    kinds = tuple([x if x == -1 else x[0] for x in specialization])
    return tuple(n >= 0 for n in kinds) if per_row else kinds
