"""The places that a walk over a function read, and what stood there.

As long as the same things stand there, and are things that cannot change, the walk would find the same again: `reads`
is asked on every call, and to look at a few places costs a tenth of the walk.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_MISSING = object()
_RECORDING = threading.local()
_FIXED = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device})


class Guards:
    """What a walk read, by where it stood."""

    def __init__(self) -> None:
        self.looks: list[Callable[[], Any]] = []  # at dictionaries and attributes, and what stood there
        self.seen: list[Any] = []
        self.cells: list[tuple[Any, Any]] = []
        self.held: list[Any] = []  # dictionaries with everything in them, and their sizes
        self.sizes: list[int] = []
        self.steady = True  # whether it is enough to look there again

    def entry(self, held: Mapping[Any, Any], name: Any) -> None:
        self._look(functools.partial(held.get, name, _MISSING))

    def attribute(self, of: Any, name: str) -> None:
        self._look(functools.partial(getattr, of, name, _MISSING))

    def _look(self, at: Callable[[], Any]) -> None:
        self.looks.append(at)
        self.seen.append(at())

    def all_of(self, held: Mapping[Any, Any] | None) -> None:
        """A dictionary with everything in it."""
        if held is not None:
            self.held.append(held)
            self.sizes.append(len(held))
            for name in held:
                self.entry(held, name)

    def function(self, fn: Any) -> None:
        """What makes up a function, apart from what its code names."""
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self.attribute(fn, name)
        self.all_of(fn.__kwdefaults__)
        self.all_of(vars(fn))
        self.entry(fn.__globals__, "__name__")

    def global_of(self, fn: Any, name: str) -> None:
        self.entry(fn.__globals__, name)
        if name not in fn.__globals__:
            self.entry(fn.__globals__, "__builtins__")
            self.entry(builtins_of(fn), name)

    def hold(self) -> bool:
        """Whether the same things stand in all of them.  It is asked in every call: no loop of Python's."""
        if not all(map(operator.is_, map(operator.call, self.looks), self.seen)):
            return False
        for cell, value in self.cells:
            try:
                if cell.cell_contents is not value:
                    return False
            except ValueError:  # nothing is in it any more
                return False
        if list(map(len, self.held)) != self.sizes:
            return False
        return self.steady


def builtins_of(fn: Any) -> dict[str, Any]:
    within = fn.__globals__.get("__builtins__", builtins)
    return within if isinstance(within, dict) else vars(within)


def is_fixed(x: Any) -> bool:
    """Whether a value is all there is to it: it cannot change, nor can its type."""
    return type(x) in _FIXED or (type(x) in (tuple, torch.Size) and all(map(is_fixed, x)))


@contextlib.contextmanager
def recorded() -> Iterator[Guards]:
    """The places that walks inside look at, in this thread."""
    before, guards = current(), Guards()
    _RECORDING.guards = guards
    try:
        yield guards
    finally:
        _RECORDING.guards = before


def current() -> Guards | None:
    return getattr(_RECORDING, "guards", None)
