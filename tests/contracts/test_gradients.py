"""What comes back through a call: upstream gradients, and what requires a gradient and what does not."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from calls import BATCH_LOSS, CE_Z, KINDS, close, grads, objective
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, grpo

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
        d = v.softmax(None)
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
    """One value per row, one per segment, and a scalar: each gets its gradient."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_loss_whose_terms_are_all_off_has_a_gradient_of_0_every_time(kind: str, dtype: torch.dtype) -> None:
    """Not None, which would leave a parameter out of an optimizer's step in one dtype or one backward alone."""
    shapes = {"Logits": [(6, 9)], "Linear": [(6, 4), (9, 4), (9,)]}[kind]
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    out = hl.Objective(ce=cross_entropy)(getattr(hl, kind)(*leaves), torch.arange(6), weights={"ce": 0.0})
    for _ in range(2):
        for x, g in zip(leaves, torch.autograd.grad(out.loss, leaves, retain_graph=True), strict=True):
            assert torch.equal(g, torch.zeros_like(x))
