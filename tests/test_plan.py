"""How terms are traced and classified, with losses that exist only here: the same numbers at every budget."""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import headloss as hl
from headloss.trace import trace as plan

BUDGETS = (1, 3, 7, 1000)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that were traced, each time one is."""
    seen: list[str] = []
    real = plan._trace
    monkeypatch.setattr(plan, "_trace", lambda call, *more: (seen.append(call.signature.name), real(call, *more))[1])
    plan._TRACES.clear()
    return seen


def explain(objective: hl.Objective, problem: oracle.Problem, **more: Any) -> Any:
    source = problem.source(problem.leaves(), **more)
    return objective.explain(source, problem.targets, segments=problem.segments, **oracle.call_arguments(problem))


def assert_same_everywhere(term: Any, kind: str, inputs: tuple[str, ...] = (), **more: Any) -> Any:
    """The class is `kind`, and value, metrics and gradients are the oracle's on every source and budget."""
    objective = hl.Objective(term=term, ce=hl.losses.cross_entropy, backend="torch")
    for source in ("Logits", "Linear"):
        problem = oracle.make(source, (23,), 17, inputs=inputs, **more)
        found = explain(objective, problem).terms[0]
        assert found.kind == kind, found
        want = oracle.answer(objective, problem)
        for rows in BUDGETS if source == "Linear" else BUDGETS[-1:]:
            for how in ("autograd", "forward_backward", *(["masked"] if kind != "batch" else [])):
                got = oracle.run(objective, problem, memory=problem.budget(rows), how=how)
                oracle.check(got, want, what=f"{source} {rows} rows {how}")
    return found


# Row losses


def gated(logprob, entropy, advantage, *, low=-3.0):
    gate = torch.sigmoid(entropy - 1)
    return torch.where(logprob < low, -advantage * logprob, gate * logprob.exp()), {"gate": gate}


ROW: dict[str, tuple[Any, tuple[str, ...]]] = {
    "where and sigmoid": (gated, ("advantage",)),
    "option": (hl.Term(gated, low=-2.0), ("advantage",)),
    "lambda": (lambda logprob, lse: F.softplus(-logprob) + 0.1 * lse.abs(), ()),
    "huber": (lambda logprob: F.huber_loss(logprob, torch.zeros_like(logprob), reduction="none"), ()),
    "binary cross-entropy": (
        lambda logprob, lse: F.binary_cross_entropy_with_logits(logprob, lse.detach().sigmoid(), reduction="none"), ()
    ),
    "whole quotient": (lambda logprob, targets: -logprob * (targets // 3), ()),
    "logsigmoid": (lambda logprob, advantage: -F.logsigmoid(logprob * advantage), ("advantage",)),
    "masked_fill": (lambda logprob, advantage: (-logprob).masked_fill(advantage > 0, 0.0), ("advantage",)),
    "targets": (lambda logprob, targets: torch.where(targets % 2 == 0, -logprob, -2 * logprob), ()),
    "detach": (lambda logprob: -logprob.detach().exp() * logprob, ()),
    "clamp, minimum": (lambda logprob, old_logprob: logprob.minimum(old_logprob).clamp(-5, -1), ("old_logprob",)),
    "zeros_like": (lambda logprob, lse: torch.maximum(lse, torch.zeros_like(lse)) - logprob, ()),
    "dtype change": (lambda logprob: -(logprob.to(torch.float64) ** 2).to(logprob.dtype), ()),
    "constant facts": (lambda logprob, argmax, targets: -logprob * (argmax == targets), ()),
    "a fact held constant": (lambda logprob, max_logprob: max_logprob.detach() - logprob, ()),
    "constant": (lambda logprob: torch.full_like(logprob, 3.0), ()),
    "in-place on a copy": (lambda logprob: logprob.clone().mul_(-1.0).add_(2.0), ()),
    "row weight by name": (hl.Term(lambda lse: lse, row_weight="token_weight"), ("token_weight",)),
    "row weight by function": (hl.Term(lambda lse: lse, row_weight=lambda entropy: entropy.exp()), ()),
}  # fmt: skip


@pytest.mark.parametrize("term, inputs", ROW.values(), ids=ROW)
def test_row_losses(term: Any, inputs: tuple[str, ...]) -> None:
    assert_same_everywhere(term, "row", inputs)


# Segment losses


def per_segment(logprob, segments, advantage):
    return -segments.means(logprob) * segments.means(advantage), {"length": segments.counts}


SEGMENT: dict[str, tuple[Any, tuple[str, ...]]] = {
    "values of segments": (per_segment, ("advantage",)),
    "spread back": (lambda logprob, segments: (logprob - segments.mean(logprob)) ** 2, ()),
    "totals": (lambda entropy, segments: torch.tanh(segments.totals(entropy)), ()),
    "softmax in a segment": (
        lambda logprob, segments: -logprob * logprob.exp() / segments.spread(segments.totals(logprob.exp())), ()
    ),
    "segment reduction": (hl.Term(per_segment, reduction="seq_mean_token_mean"), ("advantage",)),
}  # fmt: skip


@pytest.mark.parametrize("term, inputs", SEGMENT.values(), ids=SEGMENT)
def test_segment_losses(term: Any, inputs: tuple[str, ...]) -> None:
    found = assert_same_everywhere(term, "segment", inputs)
    assert "segments." in found.reason


def test_segment_inputs() -> None:
    """An input of (S,) values meets the segments of its chunk."""

    def loss(logprob, segments, reward):
        return -segments.spread(reward) * logprob

    for requires_grad in (False, True):
        reward = torch.randn(6, dtype=torch.float64, requires_grad=requires_grad)
        objective = hl.Objective(term=loss, backend="torch")
        problem = oracle.make("Linear", (23,), 17, inputs={"reward": reward})
        assert explain(objective, problem).terms[0].kind == "segment"
        want = oracle.answer(objective, problem)
        for rows in BUDGETS:
            oracle.check(oracle.run(objective, problem, memory=problem.budget(rows)), want, what=f"{rows} rows")


# Losses that mix rows, openly or in disguise


def pair_loss(logprob, segments, pairs):
    y = segments.totals(logprob)
    return -F.logsigmoid(y[pairs[:, 0]] - y[pairs[:, 1]])


def by_target(logprob, targets):
    own = hl.Segments(targets % 3, 3)
    return -own.spread(own.totals(logprob).exp()) * logprob


CAPTURED = torch.linspace(0.5, 2.0, 17, dtype=torch.float64)
BATCH: dict[str, tuple[Any, tuple[str, ...]]] = {
    "batch mean": (lambda logprob, advantage: -(advantage - advantage.mean()) * logprob, ("advantage",)),
    "fact mean": (lambda logprob: (logprob - logprob.mean()) ** 2, ()),
    "pairs": (pair_loss, ("pairs",)),
    "sum": (lambda logprob: logprob / logprob.sum(), ()),
    "view": (lambda logprob: logprob.view(-1, 1).view(-1) * 2, ()),
    "reshape and sum": (lambda logprob: logprob * logprob.reshape(1, -1).sum(), ()),
    "expand": (lambda logprob: logprob * logprob[:1].expand_as(logprob), ()),
    "roll": (lambda logprob: logprob * logprob.roll(1), ()),
    "cumsum": (lambda logprob: logprob.cumsum(0), ()),
    "flip": (lambda logprob: logprob * logprob.flip(0), ()),
    "len": (lambda logprob: logprob / len(logprob), ()),
    "shape": (lambda logprob: logprob / logprob.shape[0], ()),
    "numel": (lambda logprob: -logprob * logprob.numel() ** 0.5, ()),
    "ones of the shape, summed": (lambda logprob: logprob / torch.ones(logprob.shape[0]).sum(), ()),
    "filled with the number of rows": (lambda logprob: logprob / torch.full_like(logprob, logprob.shape[0]), ()),
    "one number of rows": (lambda logprob: logprob / logprob.new_full((1,), logprob.numel()), ()),
    "arange": (lambda logprob: logprob * torch.arange(logprob.shape[0]), ()),
    "softmax over rows": (lambda logprob: torch.softmax(logprob, 0) * logprob, ()),
    "first row": (lambda logprob: logprob - logprob[0], ()),
    "max": (lambda logprob: logprob - logprob.max(), ()),
    "amax": (lambda logprob: logprob - logprob.amax(0, keepdim=True), ()),
    "std": (lambda logprob, advantage: -advantage / (advantage.std() + 1e-3) * logprob, ("advantage",)),
    "quantile": (lambda logprob, entropy: -logprob * (entropy > entropy.detach().quantile(0.5)), ()),
    "sort": (lambda logprob: logprob.sort().values * logprob, ()),
    "index": (lambda logprob, advantage: -logprob[advantage.argsort()] * advantage, ("advantage",)),
    "mask index": (lambda logprob: logprob * logprob[logprob < -1.0].sum(), ()),
    "gather": (lambda logprob, targets: logprob * logprob.gather(0, targets % 3), ()),
    "matrix of rows": (lambda logprob: (logprob[:, None] - logprob[None, :]).relu().mean(1), ()),
    "dot": (lambda logprob: logprob * (logprob @ logprob), ()),
    "norm": (lambda logprob: logprob / logprob.norm(), ()),
    "layer_norm": (lambda logprob: F.layer_norm(logprob, logprob.shape), ()),
    "diff": (lambda logprob: F.pad(logprob.diff(), (1, 0)) * logprob, ()),
    "outer broadcast": (lambda logprob, lse: (logprob + lse[:, None]).mean(0), ()),
    "segment ids": (lambda logprob, segments: logprob * (segments.ids % 2), ()),
    "number of segments": (lambda logprob, segments: segments.totals(logprob) / segments.num_segments, ()),
    "len of segments": (lambda logprob, segments: segments.totals(logprob) / len(segments), ()),
    "segments of its own": (by_target, ()),
    "segments of its own, traced": (hl.Term(by_target, pure=True), ()),
    "mean over segments": (lambda logprob, segments: segments.means(logprob) - segments.means(logprob).mean(), ()),
    "branch on the number of rows": (lambda logprob: -logprob if logprob.shape[0] < 1000 else logprob, ()),
    "branch on a value": (lambda logprob: -logprob if logprob.sum() < 0 else logprob, ()),
    "item": (lambda logprob: -logprob * logprob.detach().min().item(), ()),
    "tolist": (lambda logprob: -logprob * sum(logprob.detach().tolist()), ()),
    "numpy": (lambda logprob: -logprob * float(logprob.detach().numpy().sum()), ()),
    "captured tensor": (lambda logprob, targets: -logprob * CAPTURED[targets], ()),
    "weighted mean of facts": (
        hl.Term(lambda lse: lse, row_weight=lambda entropy: entropy.exp(), reduction="weighted_mean"), ()
    ),
    "row weight that mixes": (
        hl.Term(lambda lse: lse, row_weight=lambda advantage: advantage / advantage.max()), ("advantage",)
    ),
    "partial of an object": (functools.partial(lambda logprob, *, a: -a[0] * logprob, a=[2.0]), ()),
    "object": (type("Loss", (), {"__call__": lambda self, logprob: -logprob})(), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCH)
def test_batch_losses(name: str) -> None:
    term, inputs = BATCH[name]
    assert_same_everywhere(term, "batch", inputs)


def test_reasons_are_given() -> None:
    problem = oracle.make("Linear", (23,), 17, inputs=("advantage",))
    said = {
        "mean": (BATCH["batch mean"][0], r"mean|sum"),
        "roll": (BATCH["roll"][0], "roll"),
        "branch": (BATCH["branch on a value"][0], "cannot be traced"),
        "captured": (BATCH["captured tensor"][0], "reads.*CAPTURED .a tensor."),
        "size": (BATCH["shape"][0], "number of rows"),
    }
    for term, why in said.values():
        own = oracle.replace(problem, inputs={n: problem.inputs[n] for n in oracle.inputs_of(term)})
        found, whole = (explain(hl.Objective(term=term), own, memory=own.budget(n)) for n in (4, 1000))
        assert re.search(why, found.terms[0].reason), found.terms[0]
        assert found.gemms == 4 and found.terms[0].name in found.grade
        assert whole.gemms == 3 and "all rows fit into one chunk" in whole.grade


def test_one_batch_term_takes_the_others_with_it() -> None:
    problem = oracle.make("Linear", (23,), 17, inputs=("advantage",))
    mixed = hl.Objective(ce=hl.losses.cross_entropy, mix=BATCH["batch mean"][0])
    how = {"memory": problem.budget(4)}
    assert [t.kind for t in explain(mixed, problem, **how).terms] == ["row", "batch"]
    assert explain(mixed, problem, **how).gemms == 4
    plain = oracle.replace(problem, inputs={})
    assert explain(hl.Objective(ce=hl.losses.cross_entropy), plain, **how).gemms == 3


def test_metrics_never_change_the_class() -> None:
    def loss(logprob):
        mixed = {"spread_max": logprob - logprob.mean(), "first": logprob[0], "total": logprob.sum()}
        return -logprob, mixed | {"median": logprob.detach().median()}

    objective = hl.Objective(term=loss, backend="torch")
    problem = oracle.make("Linear", (23,), 17)
    assert explain(objective, problem).terms[0].kind == "row"
    for rows in BUDGETS:
        got = oracle.run(objective, problem, memory=problem.budget(rows))
        oracle.check(got, oracle.answer(objective, problem), what=f"{rows} rows")


# What a trace freezes, and what it must not


def branched(logprob, *, mode="sum", power=2.0, extra=0.0):
    loss = -logprob if mode == "sum" else logprob.abs() ** power
    return loss + extra * logprob**2 if extra > 0 else loss


@pytest.mark.parametrize("options", [{}, {"mode": "pow"}, {"extra": 0.5}, {"mode": "pow", "extra": 0.5, "power": 3.0}])
def test_branch_on_an_option(options: dict[str, Any]) -> None:
    assert_same_everywhere(hl.Term(branched, **options), "row")


def test_a_mode_that_watches_operations_does_not_change_the_class() -> None:
    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                self.largest = max(self.largest, x.numel()) if isinstance(x, torch.Tensor) else self.largest
            return out

    problem = oracle.make("Linear", (23,), 17)
    objective = hl.Objective(ce=lambda logprob: -logprob * (logprob < -0.1), backend="torch")
    with Sizes() as seen:
        oracle.run(objective, problem)
    assert seen.largest and explain(objective, problem).terms[0].kind == "row"


def test_a_source_that_is_not_there_has_a_reason() -> None:
    hidden, weight = torch.empty(5, 3, device="meta"), torch.empty(17, 3, device="meta")
    plan = hl.Objective(ce=hl.losses.cross_entropy, backend="torch").explain(
        hl.Linear(hidden, weight), torch.empty(5, dtype=torch.long, device="meta"), source=True
    )
    assert plan.code.startswith("# no source: backend torch") and plan.code in str(plan)


def test_another_value_of_an_option_costs_a_trace(traces: list[str]) -> None:
    problem = oracle.make("Linear", (23,), 17, inputs=("advantage",))
    for low in (-2.0, -3.0, -2.0, -3.0):
        objective = hl.Objective(term=hl.Term(gated, low=low), backend="torch")
        oracle.check(oracle.run(objective, problem, memory=problem.budget(3)), oracle.answer(objective, problem))
    assert traces == ["gated", "gated"]
    for extra in (0.0, 0.5, 0.7, 0.5):
        own = oracle.replace(problem, inputs={})
        objective = hl.Objective(term=hl.Term(branched, extra=extra), backend="torch")
        oracle.check(oracle.run(objective, own, memory=problem.budget(3)), oracle.answer(objective, own))
    assert traces.count("branched") == 3


def test_an_option_that_python_computes_with() -> None:
    def loss(logprob, *, a=0.5, b=2.0):
        return -logprob * math.exp(a) + b * logprob**2

    for a in (0.5, 0.9):
        assert_same_everywhere(hl.Term(loss, a=a), "row")


def test_what_is_kept_of_traces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MOST_TRACES", 3)
    plan._TRACES.clear()
    problem = oracle.make("Linear", (23,), 17)
    for beta in (0.1, 0.2, 0.3, 0.4, 0.5, 0.1):  # a new function each time, as far as a trace is concerned
        objective = hl.Objective(term=lambda logprob: -beta * logprob, backend="torch")
        oracle.check(oracle.run(objective, problem, memory=problem.budget(3)), oracle.answer(objective, problem))
    assert len(plan._TRACES) <= 3


def test_equal_options_stay_apart() -> None:
    """Two options that happen to be equal now are not one."""

    def loss(logprob, *, a=0.5, b=0.5):
        return a * logprob - b * logprob**2

    problem = oracle.make("Linear", (23,), 17)
    for a, b in ((0.5, 0.5), (0.5, 2.0), (3.0, 0.5), (1.0, 1.0)):
        objective = hl.Objective(term=hl.Term(loss, a=a, b=b), backend="torch")
        oracle.check(oracle.run(objective, problem, memory=problem.budget(3)), oracle.answer(objective, problem))


def test_short_circuit_between_options() -> None:
    def loss(logprob, *, a=0.0, b=0.0, c=1.0):
        if a > 0 and b > 0:
            return -c * logprob * a
        return c * logprob**2

    problem = oracle.make("Linear", (23,), 17)
    for _ in range(2):
        for a, b in ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0), (2.0, 1.0)):
            objective = hl.Objective(term=hl.Term(loss, a=a, b=b, c=0.3), backend="torch")
            oracle.check(oracle.run(objective, problem, memory=problem.budget(3)), oracle.answer(objective, problem))


def test_a_lambda_made_anew_is_not_traced_again(traces: list[str]) -> None:
    problem = oracle.make("Linear", (23,), 17)
    for _ in range(4):
        objective = hl.Objective(term=lambda logprob: -2 * logprob)
        oracle.run(objective, problem)
    assert len(traces) == 1
    for beta in (0.1, 0.2, 0.1):
        objective = hl.Objective(term=lambda logprob: -beta * logprob, backend="torch")
        oracle.check(oracle.run(objective, problem, memory=problem.budget(3)), oracle.answer(objective, problem))
    assert len(traces) == 3  # once for each value captured


def test_one_trace_serves_all_sizes(traces: list[str]) -> None:
    objective = hl.Objective(term=hl.losses.gspo, backend="torch")
    for rows in (23, 9, 40):
        problem = oracle.problem_for(hl.losses.gspo, "Linear", (rows,))
        for memory in (problem.budget(1), problem.budget(9)):
            oracle.check(oracle.run(objective, problem, memory=memory), oracle.answer(objective, problem))
    assert traces == ["gspo"]


GLOBAL = 1.0
SETTINGS = types.ModuleType("settings")
SETTINGS.beta = 1.0  # type: ignore[attr-defined]


class Base:
    beta = 1.0


class Config(Base):
    kind = "inherits its beta"


def _helper(x):
    return GLOBAL * x


def annotated(logprob):
    return -annotated.beta * logprob


annotated.beta = 1.0  # type: ignore[attr-defined]


def set_global(value: float) -> None:
    globals()["GLOBAL"] = value


def set_module(value: float) -> None:
    SETTINGS.beta = value  # type: ignore[attr-defined]


def set_class(value: float) -> None:
    Base.beta = value


BOX = {"beta": 1.0}
CHANGES: dict[str, tuple[Callable[..., Tensor], Callable[[float], None]]] = {
    "global": (lambda logprob: -GLOBAL * logprob, set_global),
    "global of a helper": (lambda logprob: -_helper(logprob), set_global),
    "dict": (lambda logprob: -BOX["beta"] * logprob, lambda v: BOX.update(beta=v)),
    "module attribute": (lambda logprob: -SETTINGS.beta * logprob, set_module),
    "class attribute": (lambda logprob: -Config.beta * logprob, set_class),
    "attribute of the function": (annotated, lambda v: setattr(annotated, "beta", v)),
    "attribute of a helper": (
        lambda logprob: annotated(logprob) * annotated.beta,
        lambda v: setattr(annotated, "beta", v),
    ),
    "captured tensor": (lambda logprob: -CAPTURED[0] * logprob, CAPTURED[:1].fill_),
}


@pytest.mark.parametrize("name", CHANGES)
def test_numbers_that_change_between_calls(name: str) -> None:
    """What a function reads from elsewhere is read at every call, never frozen by a trace."""
    fn, change = CHANGES[name]
    problem = oracle.make("Linear", (23,), 17)
    objective = hl.Objective(term=fn, backend="torch")
    for value in (1.0, 2.5, 1.0, 0.3):
        change(value)
        got = oracle.run(objective, problem, memory=problem.budget(3))
        oracle.check(got, oracle.answer(objective, problem), what=f"{value}")
    change(1.0)


def test_closure_over_a_changing_number() -> None:
    problem = oracle.make("Linear", (23,), 17)
    beta = 1.0

    def loss(logprob):
        return -beta * logprob

    objective = hl.Objective(term=loss, backend="torch")
    for beta in (1.0, 3.0, 0.5):  # noqa: B007
        oracle.check(oracle.run(objective, problem, memory=problem.budget(3)), oracle.answer(objective, problem))


@pytest.mark.parametrize("said", [lambda x: x, hl.Whole], ids=["plain", "Whole"])
def test_any_number_of_pairs_is_one_trace(said: Callable[[Tensor], Any], traces: list[str]) -> None:
    """Every batch has another number of them."""

    def hinge(logprob: Tensor, segments: hl.Segments, pairs: Tensor, margin: Tensor) -> Any:
        gain = segments.totals(logprob)
        return (margin - gain[pairs[:, 0]] + gain[pairs[:, 1]]).relu(), {"margin": margin}

    logits = torch.randn(8, 13, dtype=torch.float64, requires_grad=True)
    targets, objective = torch.randint(13, (8,)), hl.Objective(h=hinge)
    gain = -F.cross_entropy(logits, targets, reduction="none").view(4, 2).sum(1)
    for P in (3, 1, 5, 2, 9):
        pairs, margin = torch.randint(4, (P, 2)), torch.rand(P, dtype=torch.float64)
        call = {"segments": hl.Segments.from_ids(torch.arange(8) // 2, 4), "pairs": pairs, "margin": said(margin)}
        out = objective(hl.Logits(logits), targets, **call)
        want = (margin - gain[pairs[:, 0]] + gain[pairs[:, 1]]).relu().mean()
        torch.testing.assert_close(out.loss, want)
        torch.testing.assert_close(*(torch.autograd.grad(x, logits, retain_graph=True) for x in (out.loss, want)))
        assert float(out.metrics["h/margin"]) == pytest.approx(float(margin.mean()))
    assert traces == ["hinge"]


def test_the_same_function_with_other_inputs_is_another_trace() -> None:
    """With and without an optional input, with other dtypes, with gradients: one function, several traces."""
    full = oracle.problem_for(hl.losses.grpo, "Linear")
    for names in (("advantage",), ("advantage", "old_logprob"), ("advantage",)):
        problem = oracle.replace(full, inputs={n: full.inputs[n] for n in names})
        objective = hl.Objective(term=hl.losses.grpo, backend="torch")
        oracle.check(oracle.run(objective, problem), oracle.answer(objective, problem), what=str(names))
    learned = full.inputs["advantage"].clone().requires_grad_()
    problem = oracle.replace(full, inputs={**full.inputs, "advantage": learned})
    want = oracle.answer(hl.Objective(term=hl.losses.grpo), problem)
    got = oracle.run(hl.Objective(term=hl.losses.grpo, backend="torch"), problem, memory=problem.budget(3))
    assert "input:advantage" in got.grads
    oracle.check(got, want)


def test_functions_are_called_as_they_are_in_a_notebook() -> None:
    logprob = torch.log(torch.tensor([0.5, 0.25]))
    values, metrics = hl.losses.cross_entropy(logprob, mean_logprob=None)
    torch.testing.assert_close(values, -logprob)
    assert set(metrics) == {"perplexity"}


# explain


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_explain_takes_meta_tensors() -> None:
    objective = hl.Objective(
        ce=hl.losses.cross_entropy,
        z=hl.Term(hl.losses.z_loss, weight=1e-4),
        off=hl.Term(hl.losses.focal, weight=0.0),
        metrics=["entropy", "accuracy"],
    )
    hidden, weight = meta(2, 4096, 512, dtype=torch.bfloat16), meta(128256, 512, dtype=torch.bfloat16)
    found = objective.explain(hl.Linear(hidden, weight, memory="512MiB"), meta(2, 4096, dtype=torch.long))
    assert (found.rows, found.vocab, found.gemms) == (8192, 128256, 3)
    assert found.facts == ("lse", "logprob", "entropy", "argmax")
    assert found.off == ("off",)
    assert [t.kind for t in found.terms] == ["row", "row"]
    bounded = sum(n for what, n in found.bytes.items() if what.startswith(("chunk", "accumulator")))
    assert 256 << 20 < bounded <= 512 << 20
    text = str(found)
    for word in ("lse", "row", "GEMM", "switched off", "chunk"):
        assert word in text, text
    found = objective.explain(hl.Logits(meta(7, 1000)), meta(7, dtype=torch.long))
    assert found.gemms == 0 and found.bytes["gradient of logits"] == 28000


def test_explain_of_segments_on_meta_tensors() -> None:
    segments = hl.Segments(meta(64, dtype=torch.long), 4)
    objective = hl.Objective(rl=hl.Term(hl.losses.gspo, reduction="seq_mean_token_mean"))
    found = objective.explain(
        hl.Linear(meta(64, 8), meta(100, 8)), meta(64, dtype=torch.long), segments=segments,
        advantage=meta(64), old_logprob=meta(64),
    )  # fmt: skip
    assert found.terms[0].kind == "segment"


def test_explain_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import headloss.objective

    monkeypatch.setattr(headloss.objective, "run", lambda *a: pytest.fail("explain ran a sweep"))
    problem = oracle.make("Linear")
    explain(hl.Objective(ce=hl.losses.cross_entropy), problem)


def test_unused_facts_are_not_computed() -> None:
    """cross_entropy asks for mean_logprob and, without smoothing, never looks at it."""
    problem = oracle.make("Linear")
    assert explain(hl.Objective(ce=hl.losses.cross_entropy), problem).facts == ("logprob",)
    smooth = hl.Objective(ce=hl.Term(hl.losses.cross_entropy, label_smoothing=0.1))
    assert explain(smooth, problem).facts == ("logprob", "mean_logprob")


def class_weight(targets: Tensor, table: Tensor) -> Tensor:
    return table[targets]


def test_a_look_up_in_a_table_stays_within_rows() -> None:
    """Class weights passed as an input: a row loss, equal to torch's own, at every budget."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, 5, dtype=torch.float64), torch.randn(31, 5, dtype=torch.float64)
    targets, table = torch.randint(31, (13,)), torch.rand(31, dtype=torch.float64)
    targets[4] = -100
    objective = hl.Objective(ce=hl.Term(hl.losses.cross_entropy, row_weight=class_weight, reduction="weighted_mean"))
    want = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, weight=table)
    for rows in (1, 4, 99):
        source = hl.Linear(hidden, weight, memory=rows * 31 * 8)
        assert objective.explain(source, targets, table=table).terms[0].kind == "row"
        torch.testing.assert_close(objective(source, targets, table=table, num_items=7).loss, want)


def test_a_look_up_among_rows_is_batch() -> None:
    def first(logprob: Tensor, targets: Tensor) -> Tensor:
        return logprob[targets % 3]

    plan = hl.Objective(a=first).explain(hl.Logits(torch.randn(9, 31)), torch.randint(31, (9,)))
    assert plan.terms[0].kind == "batch"


def test_a_loss_that_is_traced_anew_in_every_call_is_reported_once():
    source, targets = hl.Logits(torch.randn(3, 5)), torch.tensor([0, 1, 2])

    def step(beta):
        return hl.Objective(term=lambda logprob: -beta * logprob)(source, targets)

    with pytest.warns(UserWarning, match="keeps changing; make it an input") as seen:
        for i in range(25):
            step(1.0 + i / 100)
    assert len(seen) == 1
    with pytest.warns(UserWarning, match="_scaled.*keeps changing; make it an input"):
        for i in range(25):
            hl.Objective(term=hl.Term(_scaled, beta=1.0 + i / 100))(source, targets)
    scaled = hl.Objective(term=lambda logprob, beta: -beta * logprob)
    for i in range(25):  # the same number as an input: one trace, and no warning, which would be an error here
        scaled(source, targets, beta=1.0 + i / 100)


def _scaled(logprob, *, beta=1.0):
    return -beta * logprob


def last_column(ids_logprob, teacher_logprob):
    weight = teacher_logprob.exp()
    weight[:, -1] = 0.0
    return -(weight * ids_logprob).sum(-1)


def first_row(logprob, advantage):
    weight = advantage.clone()
    weight[0] = 0.0
    return weight * logprob


def centred(logprob, advantage):
    weight = advantage.clone()
    weight.view(-1).sub_(advantage.mean())
    return weight * logprob


def under_another_name(logprob, advantage):
    weight = advantage.clone()
    weight.detach().mul_(2)
    return weight * logprob


def seen_before(logprob, advantage):
    weight = advantage.clone()
    shown = weight[:]
    weight.mul_(2)
    return shown * logprob


def out_of_a_slice(logprob, advantage):
    weight = torch.zeros_like(advantage)
    torch.mul(advantage, 2, out=weight[:])
    return weight * logprob


def out_seen_before(logprob, advantage):
    weight = advantage.clone()
    shown = weight.detach()
    torch.exp(advantage, out=weight)
    return shown * logprob


def part_of_it(ids_logprob, teacher_logprob):
    weight = teacher_logprob.exp()
    first, _ = weight.split([1, 3], 1)
    first.zero_()
    return -(weight * ids_logprob).sum(-1)


def one_of_its_columns(ids_logprob, teacher_logprob):
    weight = teacher_logprob.exp()
    weight.unbind(1)[2].mul_(5)
    return -(weight * ids_logprob).sum(-1)


OF_IDS = (last_column, part_of_it, one_of_its_columns)
OF_ROWS = (first_row, centred, under_another_name, seen_before, out_of_a_slice, out_seen_before)


@pytest.mark.parametrize("fn", [*OF_IDS, *OF_ROWS])
def test_what_is_changed_in_place_through_a_view_counts(fn):
    """A graph that is cut down to its outputs would lose the change: such a function runs as it is."""
    torch.manual_seed(0)
    draw = lambda *size: torch.randn(*size, dtype=torch.float64)
    hidden, weight, advantage = draw(9, 8), draw(23, 8), draw(9)
    targets, ids = torch.randint(23, (9,)), torch.stack([torch.randperm(23)[:4] for _ in range(9)])
    logq = draw(9, 4).log_softmax(-1)
    leaf = hidden.clone().requires_grad_()
    logp = (leaf @ weight.T).log_softmax(-1)
    value = fn(logp.gather(1, ids), logq) if fn in OF_IDS else fn(logp.gather(1, targets[:, None])[:, 0], advantage)
    (want,) = torch.autograd.grad(value.mean(), leaf)
    more = {"teacher": hl.Sparse(ids, logq)} if fn in OF_IDS else {"advantage": advantage}
    mine = hidden.clone().requires_grad_()
    out = hl.Objective(u=fn)(hl.Linear(mine, weight, memory=600), targets, **more)
    out.loss.backward()
    torch.testing.assert_close(out.loss, value.mean())
    torch.testing.assert_close(mine.grad, want)


def test_ids_are_not_rows():
    """How many ids a row has, a column of them, and `x[:, None]` leave rows apart."""
    ids = hl.Sparse(torch.arange(20).view(5, 4), torch.full((5, 4), -1.5))
    hidden, weight = torch.randn(5, 8), torch.randn(23, 8)
    for fn in (
        lambda ids_logprob: -ids_logprob.mean(-1),
        lambda ids_logprob: -ids_logprob.sum(-1) / ids_logprob.shape[-1],
        lambda ids_logprob: -ids_logprob[:, 0],
        lambda ids_logprob, entropy: (ids_logprob * entropy[:, None]).sum(-1),
    ):
        plan = hl.Objective(u=fn).explain(hl.Linear(hidden, weight), torch.zeros(5, dtype=torch.long), teacher=ids)
        assert plan.terms[0].kind == "row", plan.terms[0]
