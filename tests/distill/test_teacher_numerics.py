"""Where others lose digits: tails that underflow, ruled-out columns, low precision, the ends of K."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import teaching
import torch
import torch.nn.functional as F
from teaching import CASES, TAILS, check, close, make, run, truth, values
from torch import Tensor

import headloss as hl
from headloss.losses import forward_kl, jsd, reverse_kl, skew_kl, soft_cross_entropy, tvd

# A peaked student


def peaked(gap: float, student: str = "Logits") -> teaching.Problem:
    """The ids hold all of the student's mass but e^-gap; the teacher leaves a fifth of its own outside."""
    torch.manual_seed(3)
    N, V, K = 7, 23, 6
    logits = torch.randn(N, V).double()
    ids = torch.rand(N, V).argsort(-1)[:, :K]
    logits.scatter_add_(-1, ids, torch.full((N, K), gap, dtype=torch.float64))
    logprobs = torch.randn(N, K).double().log_softmax(-1) + math.log(0.8)
    logits, logprobs = logits.float().double(), logprobs.float().double()
    tensors = {"logits": logits} if student == "Logits" else {"hidden": logits, "weight": torch.eye(V).double()}
    return teaching.Problem(teaching.Model(tensors), torch.zeros(N, dtype=torch.long), None, ids, logprobs)


@pytest.mark.parametrize("gap", [32.0, 120.0])
@pytest.mark.parametrize("tail", TAILS)
def test_a_tail_that_underflows(gap: float, tail: str) -> None:
    """tau < 1e-12, and a gap of 120 nats: nothing NaN, no gradient lost, in float64 and in float32."""
    problem = peaked(gap)
    tau = [float(p[-1]) for p, _ in problem.sparse(problem.leaves(), "bucket")]
    assert max(tau) < 1e-12
    outside = torch.ones(7, 23, dtype=torch.bool).scatter_(-1, problem.ids, False)
    for fn, formula, options in CASES:
        if options:
            continue
        objective = hl.Objective(kd=hl.Term(fn, tail=tail))
        want = truth(problem, lambda leaves: values(problem, leaves, formula, {}, tail))
        out, grads = run(objective, problem)
        check(out, grads, want, what=fn.__name__)
        if tail != "bucket" and fn not in (forward_kl, reverse_kl):
            continue
        single, narrow = run(
            objective, problem, dtype=torch.float32, teacher=hl.Sparse(problem.ids, problem.logprobs.float())
        )
        assert single.loss.dtype == torch.float32 and narrow["logits"].isfinite().all()
        close(single.loss.detach(), want[0], 1e-5, fn.__name__)
        close(narrow["logits"], want[1]["logits"], 1e-5, fn.__name__)
        if tail == "bucket" and fn in (forward_kl, soft_cross_entropy):
            tail_grad = narrow["logits"][outside]
            assert (tail_grad < 0).all(), "the teacher wants mass in the tail: every column there must be pulled up"
            relative = tail_grad.double() / want[1]["logits"][outside]
            assert float((relative - 1).abs().max()) < 1e-5


@pytest.mark.parametrize("gap", [32.0, 120.0])
def test_a_tail_that_underflows_through_a_head(gap: float) -> None:
    problem = peaked(gap, "Linear")
    for fn, formula in ((forward_kl, teaching.forward_kl), (reverse_kl, teaching.reverse_kl), (jsd, teaching.jsd)):
        want = truth(problem, lambda leaves: values(problem, leaves, formula, {}))
        check(*run(hl.Objective(kd=fn), problem, rows=3), want, what=fn.__name__)
        narrow = run(hl.Objective(kd=fn), problem, dtype=torch.float32, rows=3)
        check(*narrow, want, 1e-5, what=fn.__name__)


@pytest.mark.parametrize("gap", [32.0, 120.0])
def test_a_sure_student_and_a_dense_teacher(gap: float) -> None:
    """The teacher's likeliest column is one that the student gives e^-gap."""
    torch.manual_seed(4)
    logits = torch.randn(7, 23).double()
    logits[:, 0] += gap
    teacher = torch.randn(7, 23).double()
    teacher[:, 1] += 5
    student = teaching.Model({"logits": logits.float().double()})
    problem = teaching.Problem(
        student, torch.zeros(7, dtype=torch.long), teaching.Model({"logits": teacher.float().double()})
    )
    for fn, formula, options in CASES:
        want = truth(problem, lambda leaves: values(problem, leaves, formula, options))
        objective = hl.Objective(kd=hl.Term(fn, **options))
        check(*run(objective, problem), want, what=fn.__name__)
        check(*run(objective, problem, dtype=torch.float32), want, 1e-5, what=fn.__name__)


# The gradient of a sparse loss, as a table: a p_j everywhere, and something at the ids


def tables(p: Tensor, t: Tensor, tp: Tensor, tt: Tensor) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """(a, what stands at the ids) for probabilities p and t at the ids, and tp and tt in the tail."""
    ratio = (p / t).log()
    truncated = (p * ratio).sum(-1, keepdim=True)
    bucketed = truncated + tp * (tp / tt).log()
    M = t.sum(-1, keepdim=True)
    c = torch.where(p > t, 0.5, -0.5)
    c_tail = torch.where(tp > tt, 0.5, -0.5)
    C = (p * c).sum(-1, keepdim=True) + tp * c_tail
    renormalised = p / p.sum(-1, keepdim=True) - t / M
    return {
        ("forward_kl", "renormalise"): (torch.zeros_like(M), renormalised),
        ("forward_kl", "none"): (M, -t),
        ("forward_kl", "bucket"): (1 - tt / tp, tt / tp * p - t),
        ("reverse_kl", "bucket"): ((tp / tt).log() - bucketed, p * (ratio - (tp / tt).log())),
        ("reverse_kl", "none"): (-(truncated + p.sum(-1, keepdim=True)), p * (ratio + 1)),
        ("tvd", "bucket"): (c_tail - C, p * (c - c_tail)),
        ("soft_cross_entropy", "none"): (M, -t),
    }


@pytest.mark.parametrize("name, tail", tables(*torch.ones(4, 1, 1)), ids=lambda x: str(x))
def test_the_table_of_gradients(name: str, tail: str) -> None:
    torch.manual_seed(5)
    N, V, K = 6, 17, 6
    logits = torch.randn(N, V).double().requires_grad_()
    ids = torch.rand(N, V).argsort(-1)[:, :K]
    t = torch.randn(N, K).double().softmax(-1) * 0.7
    p_V = logits.detach().softmax(-1)
    p = p_V.gather(-1, ids)
    a, at_ids = tables(p, t, 1 - p.sum(-1, keepdim=True), 1 - t.sum(-1, keepdim=True))[name, tail]
    objective = hl.Objective(kd=hl.Term(hl.losses.LOSSES[name], tail=tail, reduction="token_sum"))
    objective(hl.Logits(logits), torch.zeros(N, dtype=torch.long), teacher=hl.Sparse(ids, t.log())).loss.backward()
    close(logits.grad, (a * p_V).scatter_add(-1, ids, at_ids))


# What other systems get wrong


def test_a_truncated_kl_may_be_negative_and_still_pulls() -> None:
    ids = torch.tensor([[0, 1]])
    logits = torch.tensor([[3.0, 2.9, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    teacher = hl.Sparse(ids, torch.tensor([[0.3, 0.3]], dtype=torch.float64).log())
    out = hl.Objective(kd=hl.Term(forward_kl, tail="none"))(hl.Logits(logits), torch.tensor([0]), teacher=teacher)
    out.loss.backward()
    assert float(out.loss.detach()) < 0 and logits.grad.abs().min() > 1e-3


def test_ruled_out_ids_weigh_nothing() -> None:
    """A teacher's log-probability of -inf: the same as if the id were not there (but for the tail it belongs to)."""
    torch.manual_seed(6)
    logits = torch.randn(5, 9).double()
    ids, logprobs = torch.rand(5, 9).argsort(-1)[:, :3], torch.randn(5, 3).double().log_softmax(-1)
    more = torch.cat([logprobs, torch.full((5, 1), -math.inf, dtype=torch.float64)], -1)
    padded = torch.cat([ids, torch.full((5, 1), -1)], -1)
    other = torch.cat([ids, (ids.sum(-1, keepdim=True) * 0 + 8)], -1)
    other[(ids == 8).any(-1), -1] = -1
    for fn in (forward_kl, soft_cross_entropy):
        for tail in ("none", "renormalise") if fn is soft_cross_entropy else ("none",):
            found = []
            for i, x in ((ids, logprobs), (padded, more), (other, more)):
                if tail == "renormalise" and i is other:
                    continue  # there the id is one of the student's outcomes
                leaf = logits.clone().requires_grad_()
                objective = hl.Objective(kd=hl.Term(fn, tail=tail))
                out = objective(hl.Logits(leaf), torch.zeros(5, dtype=torch.long), teacher=hl.Sparse(i, x))
                out.loss.backward()
                found.append((out.loss.detach(), leaf.grad))
            for value, grad in found[1:]:
                close(value, found[0][0])
                close(grad, found[0][1])


def test_a_mass_that_rounds_to_one() -> None:
    """A sure teacher's K probabilities sum to 1 in float32; what it leaves is then small, not nothing."""
    torch.manual_seed(3)
    teacher = torch.randn(6, 64)
    teacher[:, 3] += 22
    logprobs, ids = teacher.log_softmax(-1).topk(8)
    assert (logprobs.exp().sum(-1) >= 1).any()
    student, targets = torch.randn(6, 64), torch.zeros(6, dtype=torch.long)
    for fn in (forward_kl, reverse_kl, jsd, tvd, skew_kl):
        found = []
        for teacher_source in (hl.Sparse(ids, logprobs), hl.Logits(teacher)):
            leaf = student.clone().requires_grad_()
            out = hl.Objective(kd=fn)(hl.Logits(leaf), targets, teacher=teacher_source)
            out.loss.backward()
            found.append((out.loss.detach(), leaf.grad))
        (value, grad), (whole, whole_grad) = found
        assert 0.6 * whole < value < whole + 1e-5, (fn.__name__, value, whole)  # a coarser partition diverges less
        assert grad.abs().max() < 2 * whole_grad.abs().max(), fn.__name__


def test_order_and_repetition_do_not_matter() -> None:
    problem = make("Linear", "Sparse", ignored=False)
    order = torch.rand(13, 6).argsort(-1)
    shuffled = hl.Sparse(problem.ids.gather(-1, order), problem.logprobs.gather(-1, order))
    half = torch.cat([problem.logprobs, problem.logprobs], -1) - math.log(2)
    doubled = hl.Sparse(torch.cat([problem.ids, problem.ids], -1).int(), half)
    for tail in TAILS:
        objective = hl.Objective(kd=hl.Term(reverse_kl, tail=tail))
        out, grads = run(objective, problem)
        for teacher in (shuffled, doubled):
            check(*run(objective, problem, teacher=teacher), (out.loss.detach(), grads))


@pytest.mark.parametrize("K", [1, 9, 12])
def test_the_ends_of_k(K: int) -> None:
    """One id; every column an id, so that there is no tail; more places than columns."""
    torch.manual_seed(7)
    N, V = 5, 9
    logits = torch.randn(N, V).double()
    ids = torch.rand(N, V).argsort(-1)[:, :K]
    ids = torch.cat([ids, torch.full((N, max(0, K - V)), -1)], -1)
    logprobs = torch.randn(N, K).double().masked_fill(ids < 0, -math.inf).log_softmax(-1)
    if K == 1:
        logprobs = torch.full((N, 1), -0.4, dtype=torch.float64)
    problem = teaching.Problem(
        teaching.Model({"logits": logits}), torch.zeros(N, dtype=torch.long), None, ids, logprobs
    )
    for fn, formula in ((forward_kl, teaching.forward_kl), (tvd, teaching.tvd)):
        for tail in TAILS:
            out, grads = run(hl.Objective(kd=hl.Term(fn, tail=tail), metrics=["topk_overlap"]), problem)
            check(out, grads, truth(problem, lambda leaves: values(problem, leaves, formula, {}, tail)), 1e-9)
            if K >= V:
                assert float(out.metrics["topk_overlap"]) == 1.0


def test_rows_without_a_teacher() -> None:
    """All ids -1: renormalised there is nothing to learn; otherwise the whole vocabulary is the tail."""
    logits = torch.randn(3, 7).double()
    ids, logprobs = torch.full((3, 6), -1), torch.full((3, 6), math.nan).double()
    for tail in TAILS:
        for fn in (forward_kl, reverse_kl, jsd, tvd):
            leaf = logits.clone().requires_grad_()
            objective = hl.Objective(kd=hl.Term(fn, tail=tail), metrics=["topk_overlap", "teacher_agreement"])
            out = objective(hl.Logits(leaf), torch.zeros(3, dtype=torch.long), teacher=hl.Sparse(ids, logprobs))
            out.loss.backward()
            close(out.loss.detach(), 0.0)
            close(leaf.grad, torch.zeros(3, 7))
            assert float(out.metrics["topk_overlap"]) == float(out.metrics["teacher_agreement"]) == 0


# Columns of probability 0


def masked_out(student: bool, teacher: bool, kind: str = "Logits") -> teaching.Problem:
    problem = make(kind, "Logits", ignored=False)
    for model, gone in ((problem.student, student), (problem.teacher, teacher)):
        if gone:
            model.tensors["logits"][:, 3:9] = -math.inf
    return problem


def test_columns_that_both_rule_out_do_not_count() -> None:
    problem = masked_out(True, True)
    kept = [j for j in range(23) if not 3 <= j < 9]
    small = lambda m: teaching.Model({"logits": m.tensors["logits"][:, kept]})
    other = teaching.replace(problem, student=small(problem.student), teacher=small(problem.teacher))
    for fn, formula, options in CASES:
        value, grads = truth(other, lambda leaves: values(other, leaves, formula, options))
        whole = torch.zeros(13, 23, dtype=torch.float64)
        whole[:, kept] = grads["logits"]
        check(*run(hl.Objective(kd=hl.Term(fn, **options)), problem), (value, {"logits": whole}), what=fn.__name__)


@pytest.mark.parametrize("student, teacher", [(True, False), (False, True)])
def test_columns_that_one_rules_out(student: bool, teacher: bool) -> None:
    """The truth is infinite for one of the KLs: it stays a large number, and nothing becomes NaN."""
    problem = masked_out(student, teacher)
    for fn, formula, options in CASES:
        out, grads = run(hl.Objective(kd=hl.Term(fn, **options)), problem)
        assert out.loss.isfinite() and grads["logits"].isfinite().all(), fn.__name__
        infinite = fn is reverse_kl if teacher else fn in (forward_kl, soft_cross_entropy) or options == {"alpha": 0.0}
        if infinite:
            assert out.loss > 100
        elif not student:
            check(out, grads, truth(problem, lambda leaves: values(problem, leaves, formula, options)))
        assert grads["logits"].sum(-1).abs().max() < 1e-9 * max(1.0, float(out.loss)), "a gradient of logits sums to 0"


def test_a_student_that_rules_out_ids() -> None:
    logits = torch.randn(4, 9).double()
    logits[:, :3] = -math.inf
    ids = torch.tensor([[0, 1, 5], [0, 4, 5], [0, 1, 2], [3, 4, 5]])
    logprobs = torch.randn(4, 3).double().log_softmax(-1) - 0.2
    ids, logprobs = F.pad(ids, (0, 3), value=-1), F.pad(logprobs, (0, 3))
    for tail in TAILS:
        for fn in (forward_kl, reverse_kl, jsd, tvd):
            leaf = logits.clone().requires_grad_()
            out = hl.Objective(kd=hl.Term(fn, tail=tail))(
                hl.Logits(leaf), torch.full((4,), 5), teacher=hl.Sparse(ids, logprobs)
            )
            out.loss.backward()
            assert out.loss.isfinite() and leaf.grad.isfinite().all(), (fn.__name__, tail)


# Low precision, judged by eager in the same precision


def eager(name: str, logits: Tensor, teacher: Tensor) -> Tensor:
    logp, logq = logits.float().log_softmax(-1), teacher.float().log_softmax(-1)
    if name == "forward_kl":
        return F.kl_div(logp, logq, log_target=True, reduction="none").sum(-1)
    if name == "reverse_kl":
        return F.kl_div(logq, logp, log_target=True, reduction="none").sum(-1)
    if name == "tvd":
        return (logp.exp() - logq.exp()).abs().sum(-1) / 2
    logm = torch.logaddexp(logp, logq) - math.log(2)
    halves = [F.kl_div(logm, x, log_target=True, reduction="none").sum(-1) for x in (logp, logq)]
    return (halves[0] + halves[1]) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset, apart", [(0.0, 3.0), (200.0, 3.0), (0.0, 0.03)], ids=["plain", "offset", "near"])
def test_low_precision(dtype: torch.dtype, offset: float, apart: float) -> None:
    torch.manual_seed(8)
    N, V = 16, 4000
    base = 3 * torch.randn(N, V)
    logits = (base + offset).to(dtype)
    teacher = (base + apart * torch.randn(N, V) - offset).to(dtype)
    formulas: Mapping[str, Callable[..., Any]] = teaching.FORMULAS
    for name in ("forward_kl", "reverse_kl", "jsd", "tvd"):
        exact = logits.double().requires_grad_()
        want = formulas[name](exact.softmax(-1), teacher.double().softmax(-1))
        want.mean().backward()
        errors = []
        for way in ("ours", "eager"):
            leaf = logits.clone().requires_grad_()
            if way == "ours":
                objective = hl.Objective(kd=hl.losses.LOSSES[name])
                out = objective(hl.Logits(leaf), torch.zeros(N, dtype=torch.long), teacher=hl.Logits(teacher))
                out.loss.backward()
                value = out.loss
            else:
                value = eager(name, leaf, teacher).mean()
                value.backward()
            grad = (leaf.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
            errors.append((abs(float(value.detach()) - float(want.mean().detach())), float(grad)))
        for ours, theirs in zip(*errors):
            assert ours <= 2 * theirs + 1e-6, (name, errors)


@pytest.mark.parametrize("teacher", (False, True), ids=("student", "teacher"))
def test_masked_columns_stay_masked_at_the_next_temperature(teacher: bool) -> None:
    """A logit of -inf is a large negative number for the sums of one temperature, and -inf again for the next."""
    torch.manual_seed(0)
    z, u = torch.randn(2, 3, 7, dtype=torch.float64).unbind()
    z[:, 2:4] = u[:, 2:4] = -torch.inf
    kept, targets = [0, 1, 4, 5, 6], torch.zeros(3, dtype=torch.long)
    wanted = torch.zeros((), dtype=torch.float64)
    for T in (1.0, 5000.0):
        logp, logq = ((x[:, kept] / T).log_softmax(-1) for x in (z, u))
        wanted += (logp.exp() * (logp - logq if teacher else -logp)).sum(-1).mean()
    if teacher:
        terms = {f"at{T}": hl.Term(hl.losses.reverse_kl, temperature=T) for T in (1.0, 5000.0)}
        out = hl.Objective(**terms)(hl.Logits(z), targets, teacher=hl.Logits(u))
    else:
        both = hl.Term(lambda entropy, hot: entropy + hot, facts={"hot": ("entropy", 5000.0)})
        out = hl.Objective(both=both)(hl.Logits(z), targets)
    torch.testing.assert_close(out.loss, wanted, rtol=1e-9, atol=1e-12)
