"""What a call does with the tensors it is given: ignored rows, strange layouts, memory that is the caller's."""

from __future__ import annotations

import contextlib
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from calls import BATCH_LOSS, KINDS, close, objective
from torch._subclasses.fake_tensor import FakeTensorMode

import headloss as hl
from headloss import metrics
from headloss.losses import cross_entropy, forward_kl, grpo, gspo

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


def test_metrics_are_of_the_numbers_that_the_call_was_given() -> None:
    """They are reduced when they are read, and the inputs may be written to before that."""

    def paid(logprob: torch.Tensor, reward: torch.Tensor) -> Any:
        return -logprob, {"reward": reward, "reward_max": reward}

    logits, reward = torch.randn(5, 7), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    for host_read in (True, False):
        for last, mean in ((4, 3.0), (-100, 2.5)):
            given, y = reward.clone(), torch.tensor([0, 1, 2, 3, last])
            out = hl.Objective(a=paid)(hl.Logits(logits), y, host_read=host_read, reward=given)
            given.fill_(-1.0)
            y.fill_(0)
            assert float(out.metrics["a/reward"]) == mean
            assert float(out.metrics["a/reward_max"]) == (5.0 if last == 4 else 4.0)


def test_metrics_that_nobody_reads_are_not_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.MetricGroup, "_reduce", lambda *a: 1 / 0)
    out = objective(ce=cross_entropy)(hl.Logits(torch.randn(5, 7)), torch.arange(5))
    with pytest.raises(ZeroDivisionError):
        float(out.metrics["ce/perplexity"])


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.inference_mode, FakeTensorMode])
def test_metrics_of_every_step_that_are_kept_hold_no_rows(around: Any) -> None:
    """Whatever is on around the call that finds them unread."""
    trained = hl.Objective(ce=cross_entropy, metrics=["entropy", "dead_rows"], backend="torch")
    logits, y = [torch.randn(5, 7) for _ in range(30)], torch.arange(5)
    kept = [trained(hl.Logits(x.requires_grad_()), y).metrics for x in logits]
    for other in (around, contextlib.nullcontext):
        with other():
            for _ in range(20):
                trained(hl.Logits(torch.randn(5, 7)), torch.zeros(5, dtype=torch.long))
    groups = {part for of_call in kept for m in of_call.values() for part in m._parts if not isinstance(part, str)}
    assert len(groups) == 60 and all(group.unreduced is None for group in groups)
    for x, found in zip(logits, kept, strict=True):
        torch.testing.assert_close(found["ce/perplexity"].value.float(), F.cross_entropy(x, y).exp())
        assert type(found["entropy"].value) is torch.Tensor and not found["entropy"].value.is_inference()


@pytest.mark.parametrize("padded", [False, True])
def test_ids_that_numpy_writes_to_after_the_forward(padded: bool) -> None:
    """No counter tells of such writes: the backward has a copy of the ids."""
    torch.manual_seed(0)
    logits, ids = torch.randn(5, 7).requires_grad_(), torch.stack([torch.randperm(7)[:3] for _ in range(5)])
    ids[2, 1] = -1 if padded else ids[2, 1]
    teacher = hl.Sparse(ids, torch.randn(5, 3).log_softmax(-1).masked_fill(ids < 0, -torch.inf))
    term = hl.Objective(kd=hl.Term(forward_kl, tail="renormalise"))
    (want,) = torch.autograd.grad(term(hl.Logits(logits), teacher=teacher).loss, logits)
    loss = term(hl.Logits(logits), teacher=teacher).loss
    ids.numpy()[:] = ids.flip(0).numpy().copy()
    (got,) = torch.autograd.grad(loss, logits)
    assert torch.equal(got, want) and (want != 0).any()
