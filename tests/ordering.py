"""The order in which tests run."""

from __future__ import annotations

import pytest


def longest_first(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Tests with a time limit of their own, which take long, begin each process's equal share of all tests.

    `--dist worksteal` gives every process one run of the list, and moves tests from the ends of them when one is done.
    Were a long one among the last, the other process would wait for it.
    """
    long = [item for item in items if item.get_closest_marker("timeout")] if processes > 1 else []
    short, ordered = [item for item in items if item not in long], []
    for i in range(processes):
        mine = long[i::processes]
        left = max((len(items) - len(ordered)) // (processes - i) - len(mine), 0)
        ordered += mine + short[:left]
        short = short[left:]
    return ordered
