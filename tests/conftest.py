from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ordering import longest_first

sys.path.append(str(Path(__file__).parent / "ranks"))
# Which vector instructions there are takes a compiler half a minute to find out, and only speed depends on it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
gc.set_threshold(50_000, 20, 10)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: give --slow"))
    items[:] = longest_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def pytest_collection_finish() -> None:
    """Imports stay, but trainers and tracing collect garbage often, and looked at all that was imported each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or a binding takes what is frozen at the end for a leak


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`ranks(2, function, ...)`: run a function on that many ranks, see `ranks/spawn.py`."""
    from spawn import Ranks

    pools: dict[int, Ranks] = {}

    def run(size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        return pools.setdefault(size, Ranks(size)).run(function, *arguments, **options)

    yield run
    for pool in pools.values():
        pool.stop()


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _each_test_counts_its_own_traces() -> None:
    """A loss that is traced too often is warned of, and warnings are errors here."""
    from headloss.trace import trace as plan

    plan._TRACED.clear()
