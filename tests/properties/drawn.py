"""What the property tests draw: problems and objectives from a hypothesis `Random`, which shrinks."""

from __future__ import annotations

import collections
import math
import random as standard
from typing import Any

import oracle
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

import headloss as hl
from proof import objectives

TALLY: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
RANDOM = st.randoms(use_true_random=False)
KINDS = ("Logits", "Linear")
OF_SEGMENTS = objectives.OF_SEGMENTS


def tally(**what: Any) -> None:
    for name, value in what.items():
        TALLY[name].update(map(str, value) if isinstance(value, list | tuple | set) else [str(value)])


def transform(random: standard.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if random.random() < 0.3:
        found["temperature"] = round(random.uniform(0.4, 2.5), 3)
    if random.random() < 0.2:
        found["scale"] = random.choice((0.3, -1.2, 2.0))
    if random.random() < 0.2:
        found["softcap"] = random.choice((3.0, 30.0))
    return found


def problem(
    random: standard.Random,
    objective: hl.Objective,
    kind: str | None = None,
    *,
    shapes: tuple[tuple[int, ...], ...] = ((5,), (1,), (2,), (23,), (3, 7), (2, 3, 4), (17,)),
    plain: bool = False,
    bad: bool = True,
    most_ignored: float = 0.8,
) -> oracle.Problem:
    """Rows, vocabulary, values, masks and inputs for an objective.  Ignored rows hold NaN and infinities."""
    names = objectives.inputs_wanted(objective)
    if names & set(OF_SEGMENTS):
        shapes = tuple(s for s in shapes if math.prod(s) >= 17)  # as many rows as pairs would be told apart by nobody
    made = oracle.make(
        kind or random.choice(KINDS),
        random.choice(shapes),
        random.choice((7, 1, 2, 3, 19, 37, 64)),
        peaked=random.random() < 0.3,
        ignored=0.3 if names & set(OF_SEGMENTS) else round(random.uniform(0.0, most_ignored), 2),
        bias=random.random() < 0.5,
        transform={} if plain else transform(random),
        inputs=tuple(sorted(names)),
        seed=random.randint(0, 9999),
        bad=False,
    )
    made = oracle.replace(made, tensors=extreme(random, made.tensors) if not plain else made.tensors)
    made = oracle.replace(made, inputs={name: oracle.input_for(name, made) for name in made.inputs})
    tally(kind=made.kind, rows=math.prod(made.shape), vocabulary=made.vocab)
    return oracle.poison(made) if bad else made


def extreme(random: standard.Random, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Offsets, gaps and steps that a flat softmax never shows."""
    how = random.choice(("as it is", "offset", "far below", "gap", "sharp"))
    tally(values=how)
    x = tensors.get("logits")
    if x is None:  # the bias moves a column as a whole
        return tensors if how == "as it is" else {n: 3 * y if n == "hidden" else y for n, y in tensors.items()}
    if how == "offset":
        x = x + 1e3 * torch.randn((*x.shape[:-1], 1), dtype=x.dtype)
    elif how == "far below":
        x = x - 5e3
    elif how == "gap":
        x = torch.where(torch.rand_like(x) < 0.3, x - 300.0, x)
    elif how == "sharp":
        x = 40 * x
    return {"logits": x}


def objective(random: standard.Random, names: tuple[str, ...] = objectives.STUDENT, **more: Any) -> hl.Objective:
    made = objectives.objective(random, names, backend="torch", **more)
    tally(losses=list(made.terms), reductions=[t.reduction for t in made.terms.values()], terms=len(made.terms))
    return made


def spread(answer: oracle.Answer) -> oracle.Answer:
    """Without standard deviations that are rounding: of ratios near e^20, say, which are all the same."""
    large = {n.rsplit("_", 1)[0]: abs(x) for n, x in answer.metrics.items() if n.endswith("_max")}
    nothing = {n for n, x in answer.metrics.items() if n.endswith("_std") and x < 1e-6 * large.get(n[:-4], 1.0)}
    return answer._replace(metrics={n: 0.0 if n in nothing else x for n, x in answer.metrics.items()})


def way(random: standard.Random, objective: hl.Objective, problem: oracle.Problem) -> str:
    """How to run it: an objective that mixes rows cannot leave ignored ones in."""
    ways = ["autograd", "forward_backward", "prepared", "masked"]
    how = random.choice(ways)
    if how == "masked":
        plan = objective.explain(
            problem.source(problem.leaves()),
            problem.targets,
            segments=problem.segments,
            **oracle.call_arguments(problem),
        )
        how = "autograd" if any(t.kind == "batch" for t in plan.terms) else how
    tally(way=how)
    return how


def memory(random: standard.Random, problem: oracle.Problem) -> int:
    """A budget of one row, of a few, or of all of them."""
    rows = random.choice((1, 2, 3, 5, 8, 1000))
    tally(budget=f"{rows} rows")
    return problem.budget(rows)


def without(random: standard.Random, facts: tuple[str, ...], **more: Any) -> hl.Objective:
    """An objective none of whose losses looks at these facts."""
    names = tuple(n for n in objectives.STUDENT if not objectives.asks(hl.losses.LOSSES[n]) & set(facts))
    return objective(random, names, metrics=("entropy", "accuracy", "perplexity", "sum_p2", "max_logprob"), **more)


def permuted(problem: oracle.Problem, columns: Tensor) -> oracle.Problem:
    """The same problem with its vocabulary in another order: column j is what column `columns[j]` was."""
    back = torch.empty_like(columns)
    back[columns] = torch.arange(len(columns))
    tensors = {n: x if n == "hidden" else x[columns] for n, x in problem.tensors.items() if n != "logits"}
    if "logits" in problem.tensors:
        tensors = {"logits": problem.tensors["logits"][..., columns]}
    targets = torch.where(problem.targets == -100, -100, back[problem.targets.clamp(min=0)])
    return oracle.replace(problem, tensors=tensors, targets=targets)


def near(got: oracle.Answer, want: oracle.Answer, dtype: torch.dtype) -> None:
    """Of logits that are exact numbers: the loss to float32's digits, the gradient rounded once."""
    size = max(1.0, float(want.loss.abs()), *(float(t.abs()) for t in want.terms.values()))
    torch.testing.assert_close(got.loss.double() / size, want.loss.double() / size, rtol=2e-4, atol=2e-4)
    truth, grad = want.grads["logits"], got.grads["logits"].double()
    largest = float(truth.abs().amax()) if truth.numel() else 0.0
    assume(largest < torch.finfo(dtype).max)
    room = 2 * torch.finfo(dtype).eps * truth.abs() + 2e-4 * largest + 1e-6
    assert grad.isfinite().all() and ((grad - truth).abs() <= room).all()
