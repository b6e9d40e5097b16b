"""`Immutable`: a record whose attributes are set once, when it is made; and how records of tensors are printed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor


class Immutable:
    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; make a new one to change {name!r}")

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


def summary(record: Any) -> str:
    """The repr of a dataclass, with the shape and dtype of a tensor in place of its values, and without defaults."""
    said = []
    for f in fields(record):
        x = getattr(record, f.name)
        if isinstance(x, Tensor):
            said.append(f"{f.name}: {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}")
        elif x is not f.default and x != f.default:
            said.append(f"{f.name}={x!r}")
    return f"{type(record).__name__}({', '.join(said)})"
