"""Guards: the dictionary entries, attributes and cells that a walk over a function read, and the objects found there.

As long as the same immutable objects are there, another walk would give the same result.  Every call needs the result
of `reads_of`, and checking the guards costs a tenth of a walk.
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
    """Where a walk looked, and what it found there."""

    def __init__(self) -> None:
        self.lookups: list[Callable[[], Any]] = []  # read a dictionary entry or attribute again
        self.found: list[Any] = []  # what each of them found
        self.cells: list[tuple[Any, Any]] = []
        self.dicts: list[Any] = []  # dictionaries of which every entry was read
        self.lengths: list[int] = []  # of these dictionaries
        self.checkable = True  # False if the walk read something that guards cannot check

    def entry(self, mapping: Mapping[Any, Any], name: Any) -> None:
        self._record(functools.partial(mapping.get, name, _MISSING))

    def attribute(self, of: Any, name: str) -> None:
        self._record(functools.partial(getattr, of, name, _MISSING))

    def _record(self, lookup: Callable[[], Any]) -> None:
        self.lookups.append(lookup)
        self.found.append(lookup())

    def all_of(self, mapping: Mapping[Any, Any] | None) -> None:
        """Guard a whole dictionary: its length and every entry."""
        if mapping is not None:
            self.dicts.append(mapping)
            self.lengths.append(len(mapping))
            for name in mapping:
                self.entry(mapping, name)

    def function(self, fn: Any) -> None:
        """Guard the parts of a function other than the globals and cells that its code names."""
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
        """Whether every place still holds the same object.  This runs on every call, so `map` loops over `lookups`."""
        if not all(map(operator.is_, map(operator.call, self.lookups), self.found)):
            return False
        for cell, value in self.cells:
            try:
                if cell.cell_contents is not value:
                    return False
            except ValueError:  # the cell is empty now
                return False
        if list(map(len, self.dicts)) != self.lengths:
            return False
        return self.checkable


def builtins_of(fn: Any) -> dict[str, Any]:
    within = fn.__globals__.get("__builtins__", builtins)
    return within if isinstance(within, dict) else vars(within)


def is_fixed(x: Any) -> bool:
    """Whether neither a value nor its type can change."""
    return type(x) in _FIXED or (type(x) in (tuple, torch.Size) and all(map(is_fixed, x)))


@contextlib.contextmanager
def record_guards() -> Iterator[Guards]:
    """Collect the guards of all walks inside this context, in this thread."""
    outer, guards = active_guards(), Guards()
    _RECORDING.guards = guards
    try:
        yield guards
    finally:
        _RECORDING.guards = outer


def active_guards() -> Guards | None:
    return getattr(_RECORDING, "guards", None)
