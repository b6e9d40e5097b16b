from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from spawn import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`ranks(2, function, ...)`: run a function on that many ranks, see `spawn.py`."""
    pools: dict[int, Ranks] = {}

    def run(size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        return pools.setdefault(size, Ranks(size)).run(function, *arguments, **options)

    yield run
    for pool in pools.values():
        pool.stop()
