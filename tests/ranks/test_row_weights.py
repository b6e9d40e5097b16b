"""Row weights that meet through segments, where the segments' rows lie on several ranks."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
from test_documents import N, V, compare, long_documents

import headloss as hl
from headloss.losses import grpo
from headloss.row_weights import band, drop_segments, off_policy_mask, truncate

WEIGHTS = {
    "truncate": lambda: truncate(1.1, level="segment"),
    "band": lambda: band(0.9, 1.065, level="segment_mean"),
    "drop": lambda: drop_segments(0.9, 1.065),
    "drop by token": lambda: drop_segments(0.59, 1.39, level="token"),
    "off policy": lambda: off_policy_mask(0.0),
}


def weighted(name: str, layouts: list[str]) -> None:
    weight = WEIGHTS[name]()
    for kind in ("Logits", "Linear"):
        inputs = ("sampler_logprob",)
        problem = long_documents(oracle.problem_for(grpo, kind, (N,), vocab=V, extra_inputs=inputs, bad=False))
        problem = oracle.poison(problem)
        for reduction in ("token_mean", "weighted_mean"):
            objective = hl.Objective(rl=hl.Term(grpo, row_weight=weight, reduction=reduction), backend="torch")
            for layout in layouts:
                compare(objective, problem, layout, f"{name} {kind} {reduction}")


@pytest.mark.parametrize("name", WEIGHTS)
def test_row_weights_over_ranks(ranks: Any, name: str) -> None:
    ranks(2, weighted, name, ["ragged", "zigzag"])
