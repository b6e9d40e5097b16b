from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from spawn import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`ranks(2, function, ...)`: run a function on that many ranks; a rank that waits alone gives up soon."""
    pools: dict[int, Ranks] = {}

    def run(size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        return pools.setdefault(size, Ranks(size, group_timeout=8.0)).run(function, *arguments, **options)

    yield run
    for pool in pools.values():
        pool.stop()
