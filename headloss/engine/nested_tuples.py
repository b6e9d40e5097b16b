"""Cut and join nested tuples and mappings of tensors, such as the partials of a sweep, along the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def cut(x: Any, part: slice) -> Any:
    """Rows `part` of every tensor in nested tuples."""
    return x[part] if isinstance(x, Tensor) else _rebuild(x, [cut(y, part) for y in x]) if isinstance(x, tuple) else x


def join(*xs: Any) -> Any:
    """Nested tuples and mappings of the same structure with their tensors concatenated."""
    if len(xs) == 1:
        return xs[0]
    if isinstance(xs[0], Tensor):
        return torch.cat(xs)
    if isinstance(xs[0], Mapping):
        return {key: join(*[x[key] for x in xs]) for key in xs[0]}
    if not isinstance(xs[0], tuple | list):
        return xs[0]
    return _rebuild(xs[0], [join(*ys) for ys in zip(*xs, strict=True)])


def _rebuild(like: Any, items: list[Any]) -> Any:
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
