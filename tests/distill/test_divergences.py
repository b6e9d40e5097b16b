"""Every divergence x every kind of teacher x every source and budget, against the dense float64 truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import teaching
import torch
from teaching import CASE_NAMES, CASES, DIVERGENCES, FORMULAS, TAILS, check, make, run, truth, values

import headloss as hl

TEACHERS = [("Logits", "bucket"), ("Linear", "bucket"), *(("Sparse", tail) for tail in TAILS)]


def test_every_divergence_has_a_formula() -> None:
    assert set(DIVERGENCES) == set(FORMULAS), "write each divergence once more in teaching.py"


@pytest.mark.parametrize("teacher, tail", TEACHERS, ids=lambda x: str(x))
@pytest.mark.parametrize("fn, formula, options", CASES, ids=CASE_NAMES)
def test_value_and_gradient(
    fn: Callable[..., Any], formula: Callable[..., Any], options: Mapping[str, Any], teacher: str, tail: str
) -> None:
    objective = hl.Objective(kd=hl.Term(fn, tail=tail, **options))
    for student in ("Logits", "Linear"):
        for shape in ((13,), (3, 5)):
            problem = make(student, teacher, shape, seed=len(shape))
            want = truth(problem, lambda leaves: values(problem, leaves, formula, options, tail))
            for rows in (None,) if student == "Logits" else (1, 4, 1000):
                for host_read in (True, False):
                    got = run(objective, problem, rows=rows, host_read=host_read)
                    check(*got, want, what=f"{student} {shape} rows={rows} host_read={host_read}")
                    assert all(x.isfinite().all() for x in got[0].facts.values())
