"""`Routed`: several dense teachers, one of them for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headloss.deferred_checks import HostCopy, should_defer
from headloss.segments import integers
from headloss.sources import Linear, Logits
from headloss.writes import snapshot, tracked, unchanged


class Routed:
    """One teacher per row: `route` has the index of each row's teacher in `teachers`, or -1 for none.

    Each teacher's head runs on its own rows alone.  A row without a teacher has weight 0 in terms that use one.
    Each teacher comes with hidden states, or logits, for all rows; in rows of other teachers they may be anything.

    >>> teacher = hl.Routed({"math": hl.Linear(h1, w1), "code": hl.Linear(h2, w2)}, route)
    """

    __slots__ = ("_copy", "_snapshot", "route", "teachers")

    def __init__(self, teachers: Mapping[str, Logits | Linear], route: Tensor) -> None:
        if not isinstance(teachers, Mapping) or not teachers:
            raise TypeError(f"teachers: wanted teachers by name, got {type(teachers).__name__}")
        for name, x in teachers.items():
            if not isinstance(x, (Logits, Linear)):
                raise TypeError(f"teachers[{name!r}]: wanted hl.Logits or hl.Linear, got {type(x).__name__}")
        self.teachers, self.route = dict(teachers), tracked(integers("route", route))
        first = self.first
        for name, x in self.teachers.items():
            for option in ("vocab", "columns", "scale", "softcap"):
                if getattr(x, option) != getattr(first, option):
                    got = f"{getattr(x, option)}, that of the first {getattr(first, option)}"
                    raise ValueError(f"teachers[{name!r}]: its {option} is {got}; routed teachers share it")
            if x.leading != tuple(self.route.shape) or x.device != self.route.device:
                raise ValueError(
                    f"route: wanted one number per row, shape {x.leading} on {x.device} like teachers[{name!r}], got "
                    f"{tuple(self.route.shape)} on {self.route.device}"
                )
        self._start()
        if self.route.device.type == "cpu" and not torch.compiler.is_compiling():
            self.known()

    def _start(self) -> None:
        """Start a copy of the route to the host, which must know how many rows each teacher has."""
        self._snapshot = snapshot(self.route, copied=False)  # on the CPU the copy below is the route itself
        device = self.route.device
        self._copy: HostCopy | None = HostCopy(self.route) if device.type == "cpu" or should_defer(device) else None

    def known(self) -> Tensor:
        """The route of all rows, on the host.  This waits for its copy alone, not for work queued after it."""
        if self._copy is None or not unchanged(self._snapshot, self.route):
            self._start()
        host_N = (self.route.cpu() if self._copy is None else self._copy.wait()).reshape(-1)
        wrong = (host_N < -1) | (host_N >= len(self.teachers))
        if bool(wrong.any()):
            row = int(wrong.int().argmax())
            known = f"there are {len(self.teachers)}, numbered from 0, and -1 for none"
            raise ValueError(f"route: row {row} has teacher {int(host_N[row])}, but {known}")
        return host_N

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
    """The name of the row weight that is 0 for rows without a teacher in this `Routed`."""
    return f"route of {name} that count"
