"""Several dense teachers, one for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headloss.segments import integers, readable
from headloss.sources import Linear, Logits


class Routed:
    """A teacher for each row: `route` has the number of a row's teacher, in their order, or -1 for none.

    Each teacher's head runs on its own rows alone.  A row without a teacher has weight 0 in terms that look at one.
    Teachers have hidden states, or logits, for all rows; those of rows that are not theirs may be anything.

    >>> teacher = hl.Routed({"math": hl.Linear(h1, w1), "code": hl.Linear(h2, w2)}, route)
    """

    __slots__ = ("route", "teachers")

    def __init__(self, teachers: Mapping[str, Logits | Linear], route: Tensor) -> None:
        if not isinstance(teachers, Mapping) or not teachers:
            raise TypeError(f"teachers: wanted teachers by name, got {type(teachers).__name__}")
        for name, x in teachers.items():
            if not isinstance(x, Logits | Linear):
                raise TypeError(f"teachers[{name!r}]: wanted hl.Logits or hl.Linear, got {type(x).__name__}")
        self.teachers, self.route = dict(teachers), integers("route", route)
        first = self.first
        for name, x in self.teachers.items():
            for what in ("vocab", "columns", "scale", "softcap"):
                if getattr(x, what) != getattr(first, what):
                    got = f"{getattr(x, what)}, that of the first {getattr(first, what)}"
                    raise ValueError(f"teachers[{name!r}]: its {what} is {got}; routed teachers share it")
            if x.leading != tuple(self.route.shape) or x.device != self.route.device:
                raise ValueError(
                    f"route: wanted one number per row, shape {x.leading} on {x.device} like teachers[{name!r}], got "
                    f"{tuple(self.route.shape)} on {self.route.device}"
                )
        count = len(self.teachers)
        wrong = ((self.route < -1) | (self.route >= count)).reshape(-1)
        if readable(self.route) and bool(wrong.any()):
            row = int(wrong.int().argmax())
            there = f"there are {count}, numbered from 0, and -1 for none"
            raise ValueError(f"route: row {row} has teacher {int(self.route.reshape(-1)[row])}, but {there}")
        if self.route.device.type == "cuda":
            torch._assert_async(~wrong.any(), f"route: wanted -1 or a number below {count}")

    @property
    def first(self) -> Any:
        return next(iter(self.teachers.values()))

    @property
    def vocab(self) -> int:
        return self.first.vocab

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for t in self.teachers.values() for x in t.tensors)


def routes_of(name: str) -> str:
    """The name of the row weight that is 0 where a row has none of a routed teacher's."""
    return f"route of {name} that count"
