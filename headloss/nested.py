"""Nested tuples, lists and mappings of tensors, such as the partials of a sweep: mapped, cut and joined by rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def nest(x: Any, fn: Callable[..., Any], *others: Any, leaf: type = Tensor) -> Any:
    """`fn` of each tensor (or other `leaf`) and of those in the same place of `others`; anything else is kept."""
    if x is None:
        return None
    if isinstance(x, leaf):
        return fn(x, *others)
    if isinstance(x, _SEQUENCES):
        items = [nest(*ys, leaf=leaf) for ys in zip(x, itertools.repeat(fn, len(x)), *others, strict=True)]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, Mapping):
        return {key: nest(y, fn, *[z[key] for z in others], leaf=leaf) for key, y in x.items()}
    return x


_SEQUENCES = (tuple, list)  # `tuple | list` would be made in every call


def cut(x: Any, part: slice) -> Any:
    """Rows `part` of every tensor."""
    return nest(x, lambda y: y[part])


def join(*xs: Any) -> Any:
    """Structures of the same form, with their tensors concatenated."""
    return xs[0] if len(xs) == 1 else nest(xs[0], lambda *ys: torch.cat(ys), *xs[1:])
