"""Every loss, every way of running it, against the dense oracle in float64.

The losses are found, not listed: a new file in `headloss/losses` is tested here without a change.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import oracle
import pytest
import torch
from oracle import LOSSES

import headloss as hl
from headloss.reductions import REDUCTIONS

SHAPES = [(23,), (3, 7)]
BUDGETS = {"one row": 1, "a few rows": 4, "all rows": 1000}


def options_of(fn: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """The defaults, and every float a little off its default."""
    options = {p.name: p.default for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY}
    yield {}
    moved = {k: 0.9 * v if v else 0.1 for k, v in options.items() if isinstance(v, float) and math.isfinite(v)}
    if moved:
        yield moved


def value_kind(fn: Callable[..., Any], problem: oracle.Problem) -> str:
    v = oracle.view(problem, problem.tensors, problem.inputs)
    result = fn(**v.arguments(fn, hl.Term(fn)))
    values = result[0] if isinstance(result, tuple) else result
    S = problem.segments.num_segments if problem.segments is not None else -1
    said = getattr(fn, "returns", "row")
    return {v.R: "row", S: "segment"}.get(len(values), "other") if said == "row" else said


def term_for(fn: Callable[..., Any], reduction: str, problem: oracle.Problem, **options: Any) -> hl.Term:
    more: dict[str, Any] = {"length": 7.0} if reduction == "seq_mean_token_sum_norm" else {}
    if reduction == "weighted_mean" and value_kind(fn, problem) == "row":
        more["row_weight"] = "token_weight"
    return hl.Term(fn, reduction=reduction, **more, **options)


def needs_inputs(term: hl.Term, problem: oracle.Problem) -> oracle.Problem:
    """The same problem without inputs that this term does not know."""
    known = {*oracle.inputs_of(term.fn), *([term.row_weight] if isinstance(term.row_weight, str) else [])}
    return oracle.replace(problem, inputs={n: x for n, x in problem.inputs.items() if n in known})


def assert_contract(
    fn: Callable[..., Any], kind: str, shape: tuple[int, ...], peaked: bool, backend: str = "torch", full: bool = True
) -> None:
    """The contract of one loss on one kind of source; used for losses that are not in the package, too.

    The full product of options, reductions, budgets and ways to run is large.  Without `full` every reduction meets
    every budget, and options and ways take turns, beginning elsewhere for each shape and sharpness.
    """
    problem = oracle.problem_for(fn, kind, shape, peaked=peaked, extra_inputs=("token_weight",))
    budgets = BUDGETS if kind == "Linear" else {"no budget": 0}
    turn = len(shape) + 2 * peaked
    for options in options_of(fn):
        possible: list[str] = []  # the same for every reduction
        for reduction in REDUCTIONS:
            term = term_for(fn, reduction, problem, **options)
            own = needs_inputs(term, problem)
            objective = hl.Objective(term=term, backend=backend)
            want = oracle.answer(objective, own)
            possible = possible or ways(objective, own)
            for budget, rows in budgets.items():
                memory = own.budget(rows) if rows else None
                turn += 1
                for how in possible if full else [possible[turn % len(possible)]]:
                    if how == "row_facts":
                        got = oracle.run_by_facts(fn, term, own, memory=memory, backend=backend)
                    else:
                        got = oracle.run(objective, own, memory=memory, how=how)
                    oracle.check(got, want, what=f"{how}, {reduction}, {budget}, {options}")


def ways(objective: hl.Objective, problem: oracle.Problem) -> list[str]:
    plan = objective.explain(
        problem.source(problem.leaves()), problem.targets, segments=problem.segments, **oracle.call_arguments(problem)
    )
    mixes = any(t.kind == "batch" for t in plan.terms)
    by_facts = ["row_facts", "forward_backward"] if plan.facts else []  # neither gives a gradient to an input alone
    return ["autograd", "prepared", *by_facts] + ["masked"] * (not mixes)


def objective_ways(objective: hl.Objective, problem: oracle.Problem) -> list[str]:
    return [how for how in ways(objective, problem) if how != "row_facts"]


SHAPE_AND_SHARPNESS = [
    pytest.param(shape, peaked, id=f"{'BT' if len(shape) > 1 else 'N'}-{'peaked' if peaked else 'flat'}", marks=marks)
    for peaked in (False, True)
    for shape in SHAPES
    for marks in ([] if peaked == (len(shape) > 1) else [pytest.mark.slow],)
]


@pytest.mark.parametrize("shape, peaked", SHAPE_AND_SHARPNESS)
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name: str, kind: str, shape: tuple[int, ...], peaked: bool, request: pytest.FixtureRequest) -> None:
    assert_contract(LOSSES[name], kind, shape, peaked, full=request.config.getoption("--slow"))


def optional_inputs(fn: Callable[..., Any]) -> list[str]:
    facts = {*oracle.FACTS, *oracle.APART, "segments", "targets"}
    return [
        p.name
        for p in inspect.signature(fn).parameters.values()
        if p.kind is not p.KEYWORD_ONLY and p.default is None and p.name not in facts
    ]


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("name", [n for n in LOSSES if optional_inputs(LOSSES[n])])
def test_without_optional_inputs(name: str, kind: str) -> None:
    fn = LOSSES[name]
    problem = oracle.problem_for(fn, kind, (3, 7))
    for gone in optional_inputs(fn):
        own = oracle.replace(problem, inputs={n: x for n, x in problem.inputs.items() if n != gone})
        objective = hl.Objective(term=hl.Term(fn), backend="torch")
        want = oracle.answer(objective, own)
        for how in objective_ways(objective, own):
            oracle.check(oracle.run(objective, own, memory=own.budget(5), how=how), want, what=f"{how} without {gone}")


TRANSFORMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "scale and softcap": {"scale": 0.3, "softcap": 4.0},
    "negative scale": {"scale": -1.3},
    "row temperature": {"temperature": torch.rand(23, dtype=torch.float64) + 0.5},
    "everything": {"temperature": torch.rand(23, dtype=torch.float64) + 0.5, "scale": 0.5, "softcap": 3.0},
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_all_losses_together(kind: str, transform: dict[str, Any]) -> None:
    """One objective of every loss, at several temperatures, with weights, scales and global counts."""
    plain = [n for n in LOSSES if not set(inspect.signature(LOSSES[n]).parameters) & oracle.DENSE_TEACHER]
    plain = [n for n in plain if not set(inspect.signature(LOSSES[n]).parameters) & oracle.SPARSE_TEACHER]
    plain = [n for n in plain if set(inspect.signature(LOSSES[n]).parameters) & set(oracle.FACTS)]
    inputs = oracle.inputs_of(*(LOSSES[n] for n in plain))
    problem = oracle.make(kind, (23,), transform=transform, inputs=inputs)
    terms: dict[str, Any] = {
        n: hl.Term(LOSSES[n], weight=0.1 + 0.2 * i, temperature=2.0 if i % 3 == 1 else None)
        for i, n in enumerate(plain)
    }
    objective = hl.Objective(
        **terms,
        several=hl.Term(
            lambda entropy, hot, cold: hot - cold * entropy, facts={"hot": ("entropy", 3.0), "cold": ("lse", 0.7)}
        ),
        metrics=["entropy", "accuracy", "perplexity"],
        backend="torch",
    )
    call = {"weights": {plain[0]: 0.7}, "grad_scale": 3.0, "num_items": 50, "num_segments": 9}
    want = oracle.answer(objective, problem, **call)
    for rows in BUDGETS.values():
        for how in objective_ways(objective, problem):
            got = oracle.run(objective, problem, memory=problem.budget(rows), how=how, **call)
            oracle.check(got, want, what=f"{how} {rows} rows")


@pytest.mark.parametrize("shape", [(1,), (2,), (1, 1), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("vocab", [1, 2, 5])
def test_tiny(shape: tuple[int, ...], kind: str, vocab: int) -> None:
    objective = hl.Objective(
        ce=LOSSES["cross_entropy"], z=hl.Term(LOSSES["z_loss"], weight=0.5), h=LOSSES["entropy_bonus"], backend="torch"
    )
    problem = oracle.make(kind, shape, vocab, ignored=0.0, num_segments=1)
    want = oracle.answer(objective, problem)
    for how in objective_ways(objective, problem):
        oracle.check(oracle.run(objective, problem, how=how), want, what=how)


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_rows_without_a_segment(kind: str) -> None:
    """Segments may leave rows out as long as no term needs one for each; with optional segments too."""

    def centred(logprob, segments=None):
        return -logprob if segments is None else segments.mean(logprob) - 2 * logprob

    problem = oracle.make(kind, (23,), loose=True)
    objective = hl.Objective(ce=LOSSES["cross_entropy"], mine=centred, backend="torch")
    want = oracle.answer(objective, problem)
    for rows in (1, 4, 12, 1000):
        for how in objective_ways(objective, problem):
            oracle.check(
                oracle.run(objective, problem, memory=problem.budget(rows), how=how), want, what=f"{how} {rows}"
            )
