"""Terms, their weights, and the record that comes back."""

from __future__ import annotations

import oracle
import pytest
import torch
from calls import BATCH_LOSS, CE_Z, KINDS, objective

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, z_loss


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
