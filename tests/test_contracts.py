"""What a caller may do with the record that comes back, and with what goes in."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, grpo, gspo, z_loss
from headloss.trace import trace as plan

KINDS = ["Logits", "Linear"]
BATCH_LOSS = lambda logprob: (logprob - logprob.mean()) ** 2
CE_Z = {"ce": cross_entropy, "z": hl.Term(z_loss, weight=0.1)}


def objective(**terms: Any) -> hl.Objective:
    return hl.Objective(**(terms or CE_Z), metrics=["entropy"], backend="torch")


def close(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def grads(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.grad.clone() for n, x in leaves.items() if x.grad is not None}


# Upstream gradients


@pytest.mark.parametrize("terms", [CE_Z, {"b": BATCH_LOSS}], ids=["row", "batch"])
@pytest.mark.parametrize("kind", KINDS)
class TestUpstream:
    def test_scaled(self, kind: str, terms: dict[str, Any]) -> None:
        problem, obj = oracle.make(kind), objective(**terms)
        want = oracle.answer(obj, problem)
        leaves = problem.leaves()
        out = obj(problem.source(leaves, memory=problem.budget(4)), problem.targets, segments=problem.segments)
        (2 * out.loss).backward()
        for name, g in grads(leaves).items():
            close(g, 2 * want.grads[name])

    def test_loss_on_facts(self, kind: str, terms: dict[str, Any]) -> None:
        """A further loss on the facts, with and without the loss itself; each alone and both together."""
        problem, obj = oracle.make(kind), objective(**terms)
        v = oracle.view(problem, dense := problem.leaves(), {})
        d = v.dense(None)
        extra = (oracle.FACTS["entropy"](d) ** 2).sum() + oracle.FACTS["entropy"](d).sum()
        extra_grads = dict(zip(dense, torch.autograd.grad(extra, list(dense.values()))))
        loss_grads = oracle.answer(obj, problem).grads
        for a, b in ((1.0, 0.0), (0.0, 1.0), (3.0, 0.5), (1.0, 1.0)):
            leaves = problem.leaves()
            out = obj(problem.source(leaves, memory=problem.budget(4)), problem.targets)
            more = (out.facts.entropy**2).sum() + out.facts.entropy.sum()
            total = (a * out.loss if a else 0) + (b * more if b else 0)
            total.backward()
            for name, g in grads(leaves).items():
                close(g, a * loss_grads[name] + b * extra_grads[name])

    def test_second_backward_equals_the_first(self, kind: str, terms: dict[str, Any]) -> None:
        problem, obj = oracle.make(kind), objective(**terms)
        want = oracle.answer(obj, problem)
        leaves = problem.leaves()
        out = obj(problem.source(leaves, memory=problem.budget(4)), problem.targets)
        for factor in (1.0, 1.0, 2.5, -1.0):
            for x in leaves.values():
                x.grad = None
            (factor * out.loss).backward(retain_graph=True)
            for name, g in grads(leaves).items():
                close(g, factor * want.grads[name])
        first = grads(leaves)
        out.loss.backward(retain_graph=True)  # into .grad that is there: it adds, and only once
        for name, g in grads(leaves).items():
            close(g, first[name] + want.grads[name])

    def test_handed_out_gradients_are_not_touched_again(self, kind: str, terms: dict[str, Any]) -> None:
        problem, obj = oracle.make(kind), objective(**terms)
        leaves = problem.leaves()
        out = obj(problem.source(leaves, memory=problem.budget(4)), problem.targets)
        first = torch.autograd.grad(out.loss, list(leaves.values()), retain_graph=True)
        kept = [g.clone() for g in first]
        torch.autograd.grad(3 * out.loss + out.facts.entropy.sum(), list(leaves.values()), retain_graph=True)
        for a, b in zip(first, kept, strict=True):
            assert torch.equal(a, b)

    def test_weight_changed_between_forward_and_backward(self, kind: str, terms: dict[str, Any]) -> None:
        problem, obj = oracle.make(kind), objective(**terms)
        leaves = problem.leaves()
        out = obj(problem.source(leaves), problem.targets)
        with torch.no_grad():
            next(reversed(leaves.values())).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.loss.backward()


def test_expanded_and_missing_gradients() -> None:
    """Gradients of facts arrive with stride 0, transposed, or not at all."""
    problem = oracle.make("Linear", (3, 7))
    names = ("lse", "logprob", "entropy")

    def pull(make: Any) -> dict[str, Tensor]:
        leaves = problem.leaves()
        facts = hl.row_facts(problem.source(leaves, memory=problem.budget(4)), problem.targets, names)
        torch.autograd.backward([facts.logprob, facts.entropy], make(facts))  # lse's gradient is None
        return grads(leaves)

    ones = pull(lambda f: [torch.ones(3, 7, dtype=torch.float64)] * 2)
    expanded = pull(lambda f: [torch.ones((), dtype=torch.float64).expand(3, 7)] * 2)
    strided = pull(lambda f: [torch.ones(7, 6, dtype=torch.float64)[:, ::2].t()] * 2)
    for other in (expanded, strided):
        for name, g in ones.items():
            assert torch.equal(g, other[name])
    weights = torch.randn(3, 7, dtype=torch.float64)
    valid = problem.targets != -100
    poisoned = weights.masked_fill(~valid, math.nan)  # gradients of ignored rows are not looked at
    a, b = pull(lambda f: [weights] * 2), pull(lambda f: [poisoned] * 2)
    for name, g in a.items():
        assert torch.equal(g, b[name])


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_alone(kind: str) -> None:
    problem = oracle.make(kind, ignored=0.0)
    leaves = problem.leaves()
    facts = hl.row_facts(problem.source(leaves, memory=problem.budget(4)), problem.targets, ("logprob",))
    facts.logprob[5].backward()
    first = leaves["logits" if kind == "Logits" else "hidden"].grad
    assert (first[5] != 0).any()
    assert (first[:5] == 0).all() and (first[6:] == 0).all()


# What requires a gradient and what does not


@pytest.mark.parametrize(
    "frozen", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("weight", "bias")], ids=str
)
@pytest.mark.parametrize("terms", [CE_Z, {"b": BATCH_LOSS}], ids=["row", "batch"])
def test_frozen(frozen: tuple[str, ...], terms: dict[str, Any]) -> None:
    problem, obj = oracle.make("Linear"), objective(**terms)
    want = oracle.answer(obj, problem).grads
    leaves = problem.leaves()
    for name in frozen:
        leaves[name].requires_grad_(False)
    out = obj(problem.source(leaves, memory=problem.budget(4)), problem.targets)
    (out.loss + out.facts.entropy.sum() * 0).backward()
    for name, x in leaves.items():
        if name in frozen:
            assert x.grad is None
        else:
            close(x.grad, want[name])


def test_inputs_that_require_grad() -> None:
    """One value a row, one a segment, and a scalar: each gets its gradient."""

    def loss(logprob, advantage, reward, temperature_like, segments):
        return -(advantage + segments.spread(reward)) * logprob * temperature_like

    problem = oracle.make("Linear", (3, 7), inputs=("advantage",), bad=False)
    for reward in (True, False):
        for scalar in (True, False):
            inputs = {
                "advantage": problem.inputs["advantage"].clone().requires_grad_(),
                "reward": torch.randn(6, dtype=torch.float64, requires_grad=reward),
                "temperature_like": torch.tensor(1.5, dtype=torch.float64, requires_grad=scalar),
            }
            own = oracle.poison(oracle.replace(problem, inputs=inputs))
            obj = objective(term=hl.Term(loss, weight=0.3), ce=cross_entropy)
            want = oracle.answer(obj, own, grad_scale=2.0)
            for rows in (1, 4, 1000):
                got = oracle.run(obj, own, memory=own.budget(rows), grad_scale=2.0)
                assert len(got.grads) == 4 + reward + scalar
                oracle.check(got, want, what=f"{rows} rows, reward {reward}, scalar {scalar}")


def test_input_gradient_with_frozen_source() -> None:
    problem = oracle.make("Linear", inputs=("advantage",))
    advantage = problem.inputs["advantage"].requires_grad_()
    out = hl.Objective(rl=grpo)(problem.source(problem.tensors), problem.targets, advantage=advantage)
    out.loss.backward()
    valid = problem.targets != -100
    close(advantage.grad[valid], torch.full_like(advantage[valid], -1 / int(valid.sum())).detach())
    assert (advantage.grad[~valid] == 0).all()


def test_nothing_requires_grad() -> None:
    problem = oracle.make("Linear")
    out = objective()(problem.source(problem.tensors), problem.targets)
    assert not out.loss.requires_grad and not out.facts.logprob.requires_grad


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that any operation makes, in elements."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves
        given = {x.untyped_storage().data_ptr() for x in leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_no_grad_pays_for_no_gradient(kind: str) -> None:
    """Evaluation allocates neither d logits, nor dH, nor dW."""
    problem = oracle.make(kind, (64,), 128, hidden=70, bias=False, ignored=0.0)
    leaves = problem.leaves()
    source = problem.source(leaves, memory=problem.budget(2))
    with torch.no_grad(), Allocations() as seen:
        out = objective()(source, problem.targets)
    limit = 128 * 64 if kind == "Logits" else 2 * 128
    assert seen.largest <= limit, seen.largest
    assert not out.loss.requires_grad
    with Allocations() as seen:
        objective()(source, problem.targets)
    if kind == "Linear":
        assert seen.largest >= 64 * 70  # with gradients they are there: the check can fail


def test_logits_without_grad_are_not_copied() -> None:
    problem = oracle.make("Logits", (64,), 90, ignored=0.0)
    with torch.no_grad(), Allocations() as seen:
        objective()(problem.source(problem.leaves()), problem.targets)
    # the torch backend walks the rows in tiles; nothing larger than a tile is made
    assert seen.largest <= 64 * 90


# Accumulation


def parts(n: int, pieces: int) -> list[slice]:
    return [slice(n * i // pieces, n * (i + 1) // pieces) for i in range(pieces)]


REDUCED = ["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


@pytest.mark.parametrize("reduction", REDUCED)
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_equals_one_batch(kind: str, reduction: str) -> None:
    """Micro-batches with global counts add up to the big batch: loss, gradients, metrics."""
    torch.manual_seed(2)
    lengths = [3, 5, 1, 4, 6, 2]
    N = sum(lengths)
    cuts = torch.tensor([0, *lengths]).cumsum(0)
    base = oracle.make(kind, (N,), inputs=("advantage", "old_logprob"), num_segments=1)
    segments = hl.Segments.from_cu_seqlens(cuts)
    problem = oracle.replace(base, segments=segments)
    length = {"length": 5.0} if reduction.endswith("norm") else {}
    obj = hl.Objective(
        rl=hl.Term(gspo, low=0.05, high=0.05, reduction=reduction, **length),
        ce=hl.Term(cross_entropy, reduction=reduction, **length),
        metrics=["entropy", "accuracy", "perplexity"],
        backend="torch",
    )
    counts = hl.count(problem.targets, segments)
    whole = oracle.run(obj, problem, memory=problem.budget(6), **counts)
    oracle.check(whole, oracle.answer(obj, problem))
    leaves = problem.leaves()
    meter, total = hl.Meter(), torch.zeros((), dtype=torch.float64)
    for part in (slice(0, 9), slice(9, 13), slice(13, 21)):  # whole segments
        inside = [i for i, c in enumerate(cuts[:-1].tolist()) if part.start <= c < part.stop]
        own = hl.Segments.from_cu_seqlens(cuts[inside[0] : inside[-1] + 2] - part.start)
        first = "logits" if kind == "Logits" else "hidden"
        cut = {n: x[part] if n == first else x for n, x in leaves.items()}
        out = obj(
            problem.source(cut, memory=problem.budget(6)), problem.targets[part], segments=own,
            **counts, **{n: x[part] for n, x in problem.inputs.items()},
        )  # fmt: skip
        out.loss.backward()
        total += out.loss.detach()
        meter.add(out.metrics)
    close(total, whole.loss)
    for name, x in leaves.items():
        close(x.grad, whole.grads[name])
    met = meter.compute()
    assert met.keys() == whole.metrics.keys()
    for name, value in met.items():
        assert value == pytest.approx(whole.metrics[name], rel=1e-12), name
    assert meter.compute() == {}


def test_meter_of_endings() -> None:
    """Every way of combining, over micro-batches of unequal size, one of them all ignored."""

    def loss(logprob, entropy):
        return -logprob, {
            "a_min": entropy, "a_max": entropy, "a_std": entropy, "a": entropy, "perplexity": -logprob,
            "effective_sample_size": logprob.exp(), "flag": entropy > 1, "number": 3.0,
        }  # fmt: skip

    problem = oracle.make("Logits", (23,))
    problem.targets[5:8] = -100
    obj = hl.Objective(term=loss, backend="torch")
    whole = oracle.run(obj, problem)
    oracle.check(whole, oracle.answer(obj, problem))
    meter = hl.Meter()
    for part in (slice(0, 5), slice(5, 8), slice(8, 23)):
        meter.add(obj(hl.Logits(problem.tensors["logits"][part]), problem.targets[part]).metrics)
    for name, value in meter.compute().items():
        assert value == pytest.approx(whole.metrics[name], rel=1e-12), name


def test_a_metric_is_formatted_as_a_number() -> None:
    out = hl.Objective(ce=hl.losses.cross_entropy, metrics=["accuracy"])(hl.Logits(torch.eye(4)), torch.arange(4))
    assert f"{out.metrics['accuracy']:.2f}" == "1.00"


def test_no_rows_and_no_segments() -> None:
    """A micro-batch or a rank may have neither."""
    weight, segments = torch.randn(7, 5, requires_grad=True), hl.Segments.from_cu_seqlens(torch.tensor([0]))
    none = torch.zeros(0)
    out = hl.Objective(rl=hl.losses.gspo)(
        hl.Linear(torch.randn(0, 5), weight), none.long(), segments=segments, advantage=none
    )
    out.loss.backward()
    assert out.loss == 0 and weight.grad is not None and not weight.grad.any()


def test_count() -> None:
    targets = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    assert int(hl.count(targets)["num_items"]) == 3
    counts = hl.count(targets, hl.Segments.from_ids(torch.tensor([[0, 0, 0], [1, 2, 2]]), 5))
    assert (int(counts.num_items), int(counts.num_segments)) == (3, 2)
    assert dict(**counts).keys() == {"num_items", "num_segments"}


# Ignored rows


@pytest.mark.parametrize("how", ["autograd", "masked", "prepared", "forward_backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ignored(kind: str, how: str) -> None:
    """A differentiable 0, stored zeros for gradients, and no NaN."""
    problem = oracle.problem_for(gspo, kind, (3, 7))
    problem = oracle.poison(oracle.replace(problem, targets=torch.full((3, 7), -100)))
    obj = objective(rl=hl.Term(gspo, reduction="seq_mean_token_mean"), ce=cross_entropy)
    got = oracle.run(obj, problem, memory=problem.budget(4), how=how)
    assert got.loss == 0 and all(t == 0 for t in got.terms.values())
    assert all((g == 0).all() for g in got.grads.values())
    assert all((x == 0).all() for x in got.facts.values())


@pytest.mark.parametrize("loss", [cross_entropy, BATCH_LOSS], ids=["row", "batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_ignored_rows_get_stored_zeros(kind: str, loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is filled with NaN, so that a row nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        problem = oracle.make(kind, (3, 7), ignored=0.5)
        for how in ("autograd", "forward_backward"):
            got = oracle.run(objective(a=loss), problem, memory=problem.budget(4), how=how)
            first = got.grads["logits" if kind == "Logits" else "hidden"]
            gone = problem.targets == -100
            assert (first[gone] == 0).all() and first.isfinite().all() and (first[~gone] != 0).any()
            assert all(g.isfinite().all() for g in got.grads.values())
            assert all((x[gone] == 0).all() for x in got.facts.values())
    finally:
        torch.use_deterministic_algorithms(False)


# The caller's tensors


@pytest.mark.parametrize("loss", [cross_entropy, BATCH_LOSS], ids=["row", "batch"])
def test_callers_tensors_are_never_overwritten(loss: Any) -> None:
    for kind in KINDS:
        problem = oracle.make(kind, bad=False)
        leaves = problem.leaves()
        before = {n: (x.detach().clone(), x._version) for n, x in leaves.items()}
        targets = problem.targets.clone()
        out = objective(a=loss)(problem.source(leaves, temperature=2.0), targets)
        out.loss.backward()
        objective(a=loss).forward_backward(problem.source(leaves), targets)
        for name, (value, version) in before.items():
            assert torch.equal(leaves[name], value) and leaves[name]._version == version
        assert torch.equal(targets, problem.targets)


@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_inplace(ignored: float) -> None:
    """The gradient lies where the logits lay; the version counter says so; a second backward is refused."""
    problem = oracle.make("Logits", ignored=ignored)
    want = oracle.answer(objective(), problem)
    leaf = problem.leaves()["logits"]
    logits = leaf * 1.0
    place, version = logits.data_ptr(), logits._version
    out = objective()(hl.Logits(logits, inplace=True), problem.targets)
    close(out.loss.detach(), want.loss)
    out.loss.backward(retain_graph=True)
    close(leaf.grad, want.grads["logits"])
    assert logits.data_ptr() == place and logits._version > version
    close(logits.detach(), want.grads["logits"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_inplace_without_grad_overwrites_nothing() -> None:
    logits = torch.randn(5, 7)
    kept = logits.clone()
    objective()(hl.Logits(logits, inplace=True), torch.arange(5))
    with torch.no_grad():
        objective()(hl.Logits(logits.clone().requires_grad_() * 1, inplace=True), torch.arange(5))
    assert torch.equal(logits, kept)


def test_inplace_forward_backward() -> None:
    problem = oracle.make("Logits", ignored=0.3, bad=False)
    logits = problem.tensors["logits"].clone()
    want = oracle.answer(objective(), problem)
    out = objective().forward_backward(hl.Logits(logits, inplace=True), problem.targets)
    close(out.grads.logits, want.grads["logits"])
    assert out.grads.logits.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_strange_layouts(kind: str) -> None:
    """Sliced, transposed, expanded and int32 inputs; gradients come back in the inputs' own shape."""
    problem = oracle.make(kind, (3, 7), inputs=("advantage", "old_logprob"), bad=False)
    obj = objective(rl=grpo, ce=cross_entropy)
    want = oracle.answer(obj, problem)
    leaves = problem.leaves()
    wide = {n: torch.stack([x, x], -1).detach().requires_grad_() for n, x in leaves.items()}
    views = {n: x[..., 0] for n, x in wide.items()}
    packed = torch.zeros(3, 9, dtype=torch.int32)
    packed[:, 2:] = problem.targets
    inputs = {n: x.t().contiguous().t() for n, x in problem.inputs.items()}
    out = obj(problem.source(views, memory=problem.budget(4)), packed[:, 2:], **inputs)
    out.loss.backward()
    close(out.loss.detach(), want.loss)
    for name, x in wide.items():
        close(x.grad[..., 0], want.grads[name])
        assert (x.grad[..., 1] == 0).all()


def test_expanded_hidden() -> None:
    row = torch.randn(1, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 5, dtype=torch.float64)
    targets = torch.tensor([1, 2, -100, 4])
    objective()(hl.Linear(row.expand(4, 5), weight), targets).loss.backward()
    logits = row.detach().clone().requires_grad_()
    z = (logits.expand(4, 5) @ weight.T)[[0, 1, 3]]
    (F.cross_entropy(z, targets[[0, 1, 3]]) + 0.1 * (z.logsumexp(-1) ** 2).mean()).backward()
    close(row.grad, logits.grad)


# Terms and their weights


def test_weight_zero_is_dropped() -> None:
    """A term that is off asks for nothing, is not called, and costs no fact; its place in the record stays."""

    def never(entropy, missing_input):
        raise AssertionError("a switched-off loss was called")

    problem = oracle.make("Linear")
    obj = hl.Objective(ce=cross_entropy, off=hl.Term(never, weight=0), backend="torch")
    out = obj(problem.source(problem.leaves()), problem.targets)
    assert out.terms["off"] == 0 and list(out.terms) == ["ce", "off"]
    assert list(out.facts) == ["logprob"]
    both = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=0.3), backend="torch")
    got = oracle.run(both, problem, weights={"z": 0.0})
    oracle.check(got, oracle.answer(both, problem, weights={"z": 0.0}))
    assert "lse" not in got.facts


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_call(kind: str) -> None:
    """Floats and device scalars; a tensor of 0 is a weight like any other."""
    problem = oracle.make(kind)
    obj = objective(ce=cross_entropy, z=hl.Term(z_loss, weight=torch.tensor(0.5)), h=hl.Term(entropy_bonus, weight=0))
    for weights in ({}, {"z": 2}, {"z": torch.tensor(0.7)}, {"h": 0.1}, {"ce": torch.tensor(0.0), "h": 1e-3}):
        for how in ("autograd", "masked", "forward_backward"):
            got = oracle.run(obj, problem, memory=problem.budget(4), how=how, weights=weights)
            oracle.check(got, oracle.answer(obj, problem, weights=weights))
    assert obj.terms["h"].weight == 0


@pytest.mark.parametrize("kind", KINDS)
def test_grad_scale(kind: str) -> None:
    problem = oracle.make(kind)
    for scale in (1024.0, torch.tensor(1024.0), 0.0):
        for terms in (CE_Z, {"b": BATCH_LOSS}):
            for how in ("autograd", "forward_backward"):
                obj = objective(**terms)
                got = oracle.run(obj, problem, memory=problem.budget(4), how=how, grad_scale=scale)
                oracle.check(got, oracle.answer(obj, problem, grad_scale=float(scale)))


def test_the_same_record_comes_back() -> None:
    problem = oracle.make("Linear")
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            source = problem.source(problem.leaves())
            outs = [
                objective()(source, problem.targets),
                objective()(source, hl.prepare(problem.targets)),
                objective()(source, problem.targets, host_read=False),
                objective().forward_backward(source, problem.targets),
            ]
        for out in outs:
            assert out._fields == ("loss", "terms", "metrics", "facts", "grads")
            assert list(out.terms) == ["ce", "z"] and set(out.metrics) == {"ce/perplexity", "z/lse", "entropy"}
            assert out.loss.ndim == 0 and out.loss.dtype == torch.float64
            assert not any(t.requires_grad for t in out.terms.values())


def test_objectives_and_terms_are_immutable() -> None:
    for thing, name in ((objective(), "terms"), (hl.Term(z_loss), "weight"), (hl.Segments.from_batch((2, 3)), "ids")):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(thing, name, None)


# Precision


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("rows", [7, 1000], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision(kind: str, dtype: torch.dtype, rows: int) -> None:
    """Not worse than twice eager's error in the same dtype, against float64 on the same rounded numbers."""
    torch.manual_seed(4)
    N, V, D = 65, 97, 48
    tensors = {"logits": 4 * torch.randn(N, V)} if kind == "Logits" else {
        "hidden": torch.randn(N, D), "weight": 0.5 * torch.randn(V, D)
    }  # fmt: skip
    tensors = {n: x.to(dtype).double() for n, x in tensors.items()}
    problem = oracle.Problem(kind, tensors, torch.randint(V, (N,)))
    obj = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=1e-2), h=hl.Term(entropy_bonus, weight=0.1))
    want = oracle.answer(obj, problem)
    got = oracle.run(obj, problem, dtype=dtype, memory=problem.budget(rows, 2))
    leaves = problem.leaves(dtype)
    logits = (leaves["logits"] if kind == "Logits" else leaves["hidden"] @ leaves["weight"].T).float()
    logp = logits.log_softmax(-1)
    eager = F.nll_loss(logp, problem.targets) + 1e-2 * (logits.logsumexp(-1) ** 2).mean()
    eager = eager + 0.1 * (logp.exp() * logp).sum(-1).mean()
    eager.backward()
    assert got.loss.dtype == torch.float32
    assert abs(got.loss.double() - want.loss) <= 2 * abs(eager.double() - want.loss) + 1e-5 * abs(want.loss)
    for name, x in leaves.items():
        assert got.grads[name].dtype == dtype
        ours, theirs = relative(got.grads[name], want.grads[name]), relative(x.grad, want.grads[name])
        assert ours <= 2 * theirs + 1e-6, (name, ours, theirs)


def test_weight_gradient_is_summed_in_float32() -> None:
    """Two hundred chunks in bf16: a bf16 accumulator would lose most of the later ones."""
    torch.manual_seed(5)
    N, V, D = 400, 11, 16
    hidden, weight = torch.randn(N, D).bfloat16(), torch.randn(V, D).bfloat16()
    problem = oracle.Problem("Linear", {"hidden": hidden.double(), "weight": weight.double()}, torch.randint(V, (N,)))
    obj = hl.Objective(ce=cross_entropy)
    want = oracle.answer(obj, problem).grads["weight"]
    got = oracle.run(obj, problem, dtype=torch.bfloat16, memory=problem.budget(2, 2)).grads["weight"]
    one = oracle.run(obj, problem, dtype=torch.bfloat16, memory=problem.budget(1000, 2)).grads["weight"]
    assert relative(got, want) <= 1.5 * relative(one, want) + 1e-6
    wide = oracle.run(
        obj, problem, dtype=torch.bfloat16, memory=problem.budget(2, 6), source={"logits_dtype": torch.float32}
    )
    assert relative(wide.grads["weight"], want) <= 1.5 * relative(one, want) + 1e-6


def test_logits_dtype() -> None:
    """float32 logits of bf16 tensors: the rounding of |z| around 30, worth 0.06 nat, is gone."""
    torch.manual_seed(6)
    hidden, weight = (5 * torch.randn(33, 24)).bfloat16(), torch.randn(61, 24).bfloat16()
    tensors = {"hidden": hidden.double(), "weight": weight.double()}
    problem = oracle.Problem("Linear", tensors, torch.randint(61, (33,)))
    obj = hl.Objective(ce=cross_entropy)
    want = oracle.answer(obj, problem)
    for memory in (problem.budget(5, 6), problem.budget(100, 6)):
        got = oracle.run(obj, problem, dtype=torch.bfloat16, memory=memory, source={"logits_dtype": torch.float32})
        plain = oracle.run(obj, problem, dtype=torch.bfloat16, memory=memory)
        assert abs(got.loss.double() - want.loss) < 1e-5 * want.loss
        assert abs(plain.loss.double() - want.loss) > 1e-4 * want.loss  # else the test shows nothing


def test_facts_loss_and_gradient_agree_on_the_logits() -> None:
    """A recomputing backward sees the same rounded logits as the forward: p_y - 1 sums to 0 over the columns."""
    torch.manual_seed(7)
    hidden, weight = torch.randn(9, 24).bfloat16(), torch.randn(61, 24).bfloat16()
    bias = torch.zeros(61).bfloat16().requires_grad_()
    facts = hl.row_facts(hl.Linear(hidden, weight, bias, memory=61 * 2 * 2), torch.arange(9), ("logprob",))
    facts.logprob.sum().backward()
    assert abs(float(bias.grad.float().sum())) < 0.05


def test_fp16_with_a_loss_scaler() -> None:
    """1 / tokens underflows in fp16; whether the scale is known at forward or comes later, the digits are kept."""
    torch.manual_seed(8)
    N, V, D = 96, 64, 32
    tensors = {"hidden": torch.randn(N, D).half().double(), "weight": (0.3 * torch.randn(V, D)).half().double()}
    problem = oracle.Problem("Linear", tensors, torch.randint(V, (N,)))
    obj = hl.Objective(ce=cross_entropy)
    count = 2_000_000  # a large global batch
    want = oracle.answer(obj, problem, num_items=count)
    for rows in (8, 1000):
        for scale in (2.0**16, 1024.0):
            leaves = problem.leaves(torch.float16)
            out = obj(problem.source(leaves, memory=problem.budget(rows, 2)), problem.targets, num_items=count)
            (out.loss * scale).backward()
            for name, x in leaves.items():
                assert relative(x.grad.double() / scale, want.grads[name]) < 3e-3, (name, rows, scale)
            leaves = problem.leaves(torch.float16)
            known = obj(
                problem.source(leaves, memory=problem.budget(rows, 2)), problem.targets,
                num_items=count, grad_scale=scale,
            )  # fmt: skip
            known.loss.backward()
            for name, x in leaves.items():
                assert relative(x.grad.double() / scale, want.grads[name]) < 3e-3, (name, rows, scale)


def test_grad_scaler() -> None:
    torch.manual_seed(9)
    head = nn.Linear(16, 33, bias=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    hidden, targets = torch.randn(10, 16), torch.randint(33, (10,))
    other = copy.deepcopy(head)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = hl.Objective(ce=cross_entropy)(hl.Linear(hidden, head.weight), targets).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    F.cross_entropy(other(hidden), targets).backward()
    with torch.no_grad():
        other.weight -= 0.1 * other.weight.grad
    torch.testing.assert_close(head.weight, other.weight, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """float32 parameters, GEMMs in autocast's dtype, the same numbers as casting by hand; backward runs outside."""
    problem = oracle.make("Linear", (29,), 43, hidden=16, bad=False, bias=False)
    for terms in (CE_Z, {"b": BATCH_LOSS}):
        obj = objective(**terms)
        leaves, cast = problem.leaves(torch.float32), problem.leaves(torch.float32)
        with torch.autocast("cpu", dtype=dtype):
            out = obj(problem.source(leaves, memory=problem.budget(6, 2)), problem.targets)
        (out.loss + out.facts.entropy.mean()).backward()
        by_hand = {n: x.to(dtype) for n, x in cast.items()}
        same = obj(problem.source(by_hand, memory=problem.budget(6, 2)), problem.targets)
        (same.loss + same.facts.entropy.mean()).backward()
        assert out.loss.dtype == torch.float32
        torch.testing.assert_close(out.loss, same.loss, rtol=1e-6, atol=1e-6)
        for name, x in leaves.items():
            assert x.grad.dtype == torch.float32
            torch.testing.assert_close(x.grad, cast[name].grad, rtol=2e-2, atol=1e-3)
            # the same rounded logits in forward and backward: nearer to each other than to a float32 run
            assert relative(x.grad, cast[name].grad.double()) < 2e-2


def test_autocast_backward_sees_the_forwards_logits() -> None:
    """The recomputed logits of a backward outside autocast are those of the forward inside it."""
    torch.manual_seed(10)
    hidden, weight = 6 * torch.randn(9, 24), torch.randn(61, 24)
    bias = torch.zeros(61, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        source = hl.Linear(hidden, weight, bias, logits_dtype=torch.float32)
        facts = hl.row_facts(source, torch.arange(9), ("logprob",))
    facts.logprob.sum().backward()
    # sum_j (1[j=y] - p_j) = 0 holds only if p is a softmax of the logits that lse came from
    assert abs(float(bias.grad.sum())) < 1e-4


# Modules and other machinery


def test_activation_checkpointing() -> None:
    problem = oracle.make("Linear", bad=False)
    want = oracle.answer(objective(), problem)
    for reentrant in (False, True):
        leaves = problem.leaves()
        plan._TRACES.clear()  # a loss that is first seen inside a checkpoint

        def head(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            source = problem.source({"hidden": hidden, "weight": weight, "bias": bias}, memory=problem.budget(4))
            return objective()(source, problem.targets).loss

        loss = checkpoint(head, *leaves.values(), use_reentrant=reentrant)
        loss.backward()
        for name, x in leaves.items():
            close(x.grad, want.grads[name])


def test_fused_head_is_a_linear_layer() -> None:
    linear = nn.Linear(6, 11)
    head = hl.FusedLMHead.from_linear(linear, memory=11 * 4 * 3, softcap=5.0)
    assert head.weight is linear.weight and head.bias is linear.bias
    assert list(head.state_dict()) == list(linear.state_dict()) == ["weight", "bias"]
    head.load_state_dict(linear.state_dict())
    hidden = torch.randn(2, 5, 6)
    assert torch.equal(head(hidden), linear(hidden))
    assert isinstance(head, nn.Linear)
    fresh = hl.FusedLMHead(6, 11)
    assert fresh.bias is None and fresh(hidden).shape == (2, 5, 11)
    assert "memory" in repr(head)
    copy.deepcopy(head)(hidden)


def test_fused_head_tied_to_an_embedding() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(11, 6), "head": nn.Linear(6, 11, bias=False)})
    model["head"].weight = model["embed"].weight
    keys = list(model.state_dict())
    model["head"] = hl.FusedLMHead.from_linear(model["head"])
    assert model["head"].weight is model["embed"].weight and list(model.state_dict()) == keys
    tokens = torch.randint(11, (3, 4))
    out = model["head"](model["embed"](tokens), targets=tokens, objective=objective())
    out.loss.backward()
    eager = copy.deepcopy(model)
    eager.zero_grad()
    logits = eager["head"](eager["embed"](tokens))
    (F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + 0.1 * (logits.logsumexp(-1) ** 2).mean()).backward()
    torch.testing.assert_close(model["embed"].weight.grad, eager["embed"].weight.grad, rtol=1e-5, atol=1e-6)


def test_fused_head_with_inputs() -> None:
    problem = oracle.problem_for(gspo, "Linear", (3, 7))
    obj = hl.Objective(rl=gspo, backend="torch")
    want = oracle.answer(obj, problem)
    linear = nn.Linear(5, 37, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(problem.tensors["weight"])
        linear.bias.copy_(problem.tensors["bias"])
    head = hl.FusedLMHead.from_linear(linear, memory=problem.budget(4))
    hidden = problem.leaves()["hidden"]
    inputs = hl.Inputs(**problem.inputs, segments=problem.segments)
    out = head(hidden, targets=problem.targets, objective=obj, inputs=inputs)
    out.loss.backward()
    close(out.loss.detach(), want.loss)
    close(hidden.grad, want.grads["hidden"])
    close(linear.weight.grad, want.grads["weight"])
    close(linear.bias.grad, want.grads["bias"])
    out = head(hidden, targets=hl.prepare(problem.targets, problem.segments), objective=obj, inputs=problem.inputs)
    close(out.loss.detach(), want.loss)


def test_from_and_to_config() -> None:
    def mine(logprob, *, power=2.0):
        return logprob.abs() ** power

    config = {
        "terms": {
            "ce": {"loss": "cross_entropy", "label_smoothing": 0.1},
            "z": {"loss": "z_loss", "weight": 1e-4},
            "rl": {
                "loss": "gspo",
                "low": 3e-4,
                "reduction": "seq_mean_token_sum_norm",
                "length": 9,
                "temperature": 2.0,
            },
            "own": {"loss": "mine", "power": 3.0, "row_weight": "token_weight"},
        },
        "metrics": ["entropy", "accuracy"],
        "backend": "torch",
    }
    obj = hl.Objective.from_config(config, losses={"mine": mine})
    assert obj.to_config() == config
    again = hl.Objective.from_config(obj.to_config(), losses={"mine": mine})
    assert repr(again) == repr(obj)
    problem = oracle.make("Linear", inputs=("advantage", "old_logprob", "token_weight"))
    oracle.check(oracle.run(again, problem), oracle.answer(obj, problem))
    assert json.loads(json.dumps(obj.to_config())) == config
    short = hl.Objective.from_config({"terms": {"ce": "cross_entropy"}})
    assert short.to_config() == {"terms": {"ce": {"loss": "cross_entropy"}}}
    hot = lambda hot: hot
    several = hl.Objective(t=hl.Term(hot, facts={"hot": ("entropy", 2.0)}))
    assert several.to_config(losses={"hot": hot})["terms"]["t"]["facts"] == {"hot": ["entropy", 2.0]}


def test_shift_labels() -> None:
    labels = torch.tensor([[5, 6, 7], [-100, 8, 9]])
    assert hl.shift_labels(labels).tolist() == [[6, 7, -100], [8, 9, -100]]
    segments = hl.Segments.from_ids(torch.tensor([[0, 0, 1], [2, 3, 3]]))
    assert hl.shift_labels(labels, segments).tolist() == [[6, -100, -100], [-100, 9, -100]]
    packed = hl.shift_labels(torch.tensor([1, 2, 3, 4, 5]), hl.Segments.from_cu_seqlens(torch.tensor([0, 2, 5])))
    assert packed.tolist() == [2, -100, 4, 5, -100]


def test_ways_to_make_segments() -> None:
    same = [
        hl.Segments.from_cu_seqlens(torch.tensor([0, 2, 3, 6])),
        hl.Segments.from_ids(torch.tensor([0, 0, 1, 2, 2, 2])),
        hl.Segments.from_position_ids(torch.tensor([0, 1, 0, 0, 1, 2])),
    ]
    x = torch.arange(6.0)
    for segments in same:
        assert segments.counts.tolist() == [2, 1, 3] and len(segments) == 3
        assert segments.totals(x).tolist() == [1, 2, 12]
        assert segments.means(x).tolist() == [0.5, 2, 4]
        assert segments.mean(x).tolist() == [0.5, 0.5, 2, 4, 4, 4]
    padded = hl.Segments.from_cu_seqlens(torch.tensor([0, 2, 2, 3]), rows=5)
    assert padded.ids.tolist() == [0, 0, 2, -1, -1] and padded.counts.tolist() == [2, 0, 1]
    assert padded.means(torch.ones(5)).tolist() == [1, 0, 1]
    assert padded.spread(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1, 1, 3, 0, 0]
    batch = hl.Segments.from_batch(torch.zeros(2, 3))
    assert batch.totals(torch.arange(6.0).view(2, 3)).tolist() == [3, 12]
    assert batch.spread(torch.tensor([1.0, 2.0])).shape == (2, 3)


def test_segments_are_differentiable() -> None:
    segments = hl.Segments.from_ids(torch.tensor([2, 0, -1, 2, 0, 0]), 4)
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for fn, leaf in ((segments.totals, x), (segments.means, x), (segments.mean, x), (segments.spread, y)):
        assert torch.autograd.gradcheck(fn, (leaf,))
        assert torch.autograd.gradgradcheck(fn, (leaf,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_loss_without_a_derivative_at_zero_does_not_reach_masked_rows(dtype: torch.dtype) -> None:
    """Masked rows show the loss zeros, where this one has no derivative: nothing of that may reach a gradient."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 5).to(dtype), torch.randn(31, 5).to(dtype)
    targets = torch.randint(31, (9,)).index_fill(0, torch.tensor([2, 7]), -100)
    found = []
    for host_read in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = hl.Objective(root=lambda logprob: (-logprob).sqrt(), backend="torch")(
            hl.Linear(h, w), targets, host_read=host_read
        )
        first = torch.autograd.grad(out.loss, (h, w), retain_graph=True)  # made in the visit
        found.append((out.loss.detach(), *first, *torch.autograd.grad(out.loss, (h, w))))  # and made again
    assert all(x.isfinite().all() for x in found[1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


def test_an_objective_travels_to_other_processes() -> None:
    given = hl.Objective(
        pg=hl.Term(grpo, weight=0.5, low=0.1, reduction="token_sum"), z=z_loss, metrics=["entropy", "accuracy"]
    )
    again = pickle.loads(pickle.dumps(given))
    assert repr(again) == repr(given) and again.to_config() == given.to_config()
    logits, targets, advantage = torch.randn(4, 6), torch.arange(4), torch.randn(4)
    ours, theirs = (o(hl.Logits(logits), targets, advantage=advantage) for o in (again, given))
    assert torch.equal(ours.loss, theirs.loss) and list(ours.metrics) == list(theirs.metrics)
    moved = pickle.loads(pickle.dumps(theirs.metrics))
    assert all(float(moved[name]) == float(metric) or math.isnan(metric) for name, metric in theirs.metrics.items())
