"""`store`: put a value into a dict of bounded size; several threads may fill the same dict at once."""

from __future__ import annotations

import contextlib
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def store(cache: dict[K, V], key: K, value: V, most: int) -> V:
    """Store a value in a dict that holds at most `most`, first in, first out; returns the value.

    There is no lock: a process forked while another thread held it would wait for it forever.
    """
    while key not in cache and len(cache) >= most:
        with contextlib.suppress(KeyError, RuntimeError, StopIteration):  # another thread was here first
            del cache[next(iter(cache))]
    cache[key] = value
    return value
