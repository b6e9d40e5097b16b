"""`keep`: a cache of bounded size, which several threads may fill at once."""

from __future__ import annotations

import contextlib
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep(kept: dict[K, V], key: K, value: V, most: int) -> V:
    """Store a value in a dict that holds at most `most`, first in first out; returns the value.

    Without a lock, which a process forked meanwhile would find locked for ever.
    """
    while key not in kept and len(kept) >= most:
        with contextlib.suppress(KeyError, RuntimeError, StopIteration):  # another thread was here first
            del kept[next(iter(kept))]
    kept[key] = value
    return value
