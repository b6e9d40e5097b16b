"""Every divergence x every kind of teacher x every source and budget, against the dense float64 truth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import teaching
import torch
from teaching import CASES, DIVERGENCES, FORMULAS, TAILS, check, make, run, truth, values
from torch import Tensor

import headloss as hl
from headloss import divergence
from headloss.divergence import Element
from headloss.trace import trace

TEACHERS = [("Logits", "bucket"), ("Linear", "bucket"), *(("Sparse", tail) for tail in TAILS)]


def test_every_divergence_has_a_formula() -> None:
    assert set(DIVERGENCES) == set(FORMULAS), "write each divergence once more in teaching.py"


# Options of a divergence meet one dense and one sparse teacher; with its defaults it meets all of them.
PAIRS = [
    (case, teacher)
    for case in CASES
    for teacher in TEACHERS
    if not case[2] or teacher in (("Linear", "bucket"), ("Sparse", "bucket"))
]


@pytest.mark.parametrize(
    "case, teacher_source", PAIRS, ids=[f"{c[0].__name__}{c[2] or ''}-{'-'.join(t)}" for c, t in PAIRS]
)
def test_value_and_gradient(case: Any, teacher_source: tuple[str, str]) -> None:
    (fn, formula, options), (teacher, tail) = case, teacher_source
    objective = hl.Objective(kd=hl.Term(fn, tail=tail, **options))
    turn = len(fn.__name__)  # ways to run take turns
    for student in ("Logits", "Linear"):
        for shape in ((13,), (3, 5)):
            problem = make(student, teacher, shape, seed=len(shape))
            want = truth(problem, lambda leaves: values(problem, leaves, formula, options, tail))
            for rows in (None, None) if student == "Logits" else (1, 4, 1000):
                turn += 1
                got = run(objective, problem, rows=rows, host_read=turn % 2 == 0)
                check(*got, want, what=f"{student} {shape} rows={rows} host_read={turn % 2 == 0}")
                assert not any(x.isnan().any() for x in got[0].facts.values())  # -inf at an id of -1


def on_dense_facts(teacher_cross_entropy: Tensor, reverse_cross_entropy: Tensor, teacher_entropy: Tensor) -> Tensor:
    return teacher_cross_entropy**2 + (0.3 * reverse_cross_entropy).tanh() * teacher_entropy


def on_sparse_facts(ids_logprob: Tensor, tail_logprob: Tensor, teacher_ids: Tensor, teacher_logprob: Tensor) -> Tensor:
    held = teacher_ids >= 0
    gap = torch.where(held, ids_logprob - teacher_logprob.clamp(min=-9.0), 0.0)
    return (gap**2 * (teacher_ids % 3 + 1)).sum(-1) + tail_logprob.exp()


@pytest.mark.parametrize("student, rows", [("Logits", None), ("Linear", 1), ("Linear", 4), ("Linear", 99)])
def test_losses_of_the_users_own(student: str, rows: int | None) -> None:
    problem = make(student, "Linear")

    def dense(leaves: Mapping[str, Tensor]) -> Tensor:
        logp, logq = problem.dense(leaves)
        p, q = logp.exp(), logq.exp()
        return on_dense_facts(-(q * logp).sum(-1), -(p * logq).sum(-1), -(q * logq).sum(-1))

    check(*run(hl.Objective(mine=on_dense_facts), problem, rows=rows), truth(problem, dense))
    problem = make(student, "Sparse")

    def sparse(leaves: Mapping[str, Tensor]) -> Tensor:
        found = []
        for s_V, named in zip(problem.student_scores(leaves), problem.named()):
            p_V = s_V.softmax(-1)
            gaps = [(p_V[i].log() - max(-9.0, math.log(q) if q else -9.0)) ** 2 * (i % 3 + 1) for i, q in named.items()]
            found.append(sum(gaps) + 1 - sum(p_V[i] for i in named))
        return torch.stack(found)

    objective = hl.Objective(mine=on_sparse_facts)
    check(*run(objective, problem, rows=rows), truth(problem, sparse))
    check(*run(objective, problem, rows=rows, host_read=False), truth(problem, sparse))
    assert (
        objective.explain(problem.student.source(), problem.targets, teacher=problem.teacher_source()).terms[0].kind
        == "row"
    )


def test_several_at_once_equal_their_sum() -> None:
    """Dense and sparse teachers, tails and temperatures, and losses of the student alone, in one objective."""
    problem = make("Linear", "Linear", (3, 5))
    ids, logprobs = teaching.sparse_teacher((3, 5), 23)
    teachers = {"big": problem.teacher_source(), "served": hl.Sparse(ids, logprobs)}
    sparse = teaching.replace(problem, teacher=None, ids=ids, logprobs=logprobs)
    losses = hl.losses
    parts = {
        "ce": (hl.Term(losses.cross_entropy), None),
        "a": (
            hl.Term(losses.forward_kl, teacher="big", temperature=2.0),
            (problem, teaching.forward_kl, "bucket", 2.0),
        ),
        "b": (hl.Term(losses.jsd, teacher="big"), (problem, teaching.jsd, "bucket", None)),
        "c": (hl.Term(losses.tvd, teacher="big", temperature=0.5), (problem, teaching.tvd, "bucket", 0.5)),
        "d": (hl.Term(losses.reverse_kl, teacher="served"), (sparse, teaching.reverse_kl, "bucket", None)),
        "e": (
            hl.Term(losses.forward_kl, teacher="served", tail="renormalise", temperature=2.0),
            (sparse, teaching.forward_kl, "renormalise", 2.0),
        ),
        "f": (hl.Term(losses.skew_kl, teacher="served", tail="none"), (sparse, teaching.skew_kl, "none", None)),
    }

    def total(leaves: Mapping[str, Tensor]) -> Tensor:
        rows = problem.targets.reshape(-1)[problem.valid]
        found = torch.nn.functional.cross_entropy(problem.student_scores(leaves), rows, reduction="none")
        for _, part in parts.values():
            if part is not None:
                which, formula, tail, T = part
                found = found + values(which, leaves, formula, {}, tail, T)
        return found

    objective = hl.Objective(**{name: term for name, (term, _) in parts.items()})
    want = truth(problem, total)
    for rows in (1, 4, 99):
        for host_read in (True, False):
            check(*run(objective, problem, rows=rows, teacher=teachers, host_read=host_read), want)
    leaves = problem.leaves()
    out = objective.forward_backward(problem.student.source(leaves), problem.targets, teacher=teachers)
    check(out, {n: getattr(out.grads, n) for n in leaves}, want)


def test_second_looks_at_several_temperatures() -> None:
    """Each finds its own sums, in whatever order the temperatures come: here the student's own fact brings 2 first."""
    problem = make("Logits", "Logits", (13,))
    losses = hl.losses
    parts = {
        "z": (hl.Term(losses.z_loss, weight=1.0, temperature=2.0), None),
        "a": (hl.Term(losses.jsd), (teaching.jsd, None)),
        "b": (hl.Term(losses.tvd, temperature=2.0), (teaching.tvd, 2.0)),
        "c": (hl.Term(losses.jsd, temperature=2.0), (teaching.jsd, 2.0)),
    }

    def total(leaves: Mapping[str, Tensor]) -> Tensor:
        found = (problem.student_scores(leaves) / 2.0).logsumexp(-1) ** 2
        for _, part in parts.values():
            if part is not None:
                found = found + values(problem, leaves, part[0], {}, "bucket", part[1])
        return found

    want = truth(problem, total)
    for names in (list(parts), list(parts)[::-1]):
        check(*run(hl.Objective(**{name: parts[name][0] for name in names}), problem), want)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda logp, logq: logp.exp() * (logp - logq),  # p and log p both have a slope
        lambda logp, logq: logq.exp() * (logq - logp),  # log p alone has
        lambda logp, logq: (logp.exp() - logq.exp()) ** 2,
        lambda logp, logq: logq.exp() * logq,  # nothing has
    ],
)
def test_a_pull_where_p_and_q_are_known(fn, known, monkeypatch):
    """Of functions of headloss too, whatever they read of log p: as autograd on the logits has it."""
    monkeypatch.setattr("headloss.divergence.is_ours", lambda _: known)
    torch.manual_seed(0)
    z, u = torch.randn(3, 11, dtype=torch.float64, requires_grad=True), torch.randn(3, 11, dtype=torch.float64)
    logp, logq = z.log_softmax(-1), u.log_softmax(-1)
    right = fn(logp, logq).sum(-1)
    (want,) = torch.autograd.grad(right.sum() + 0 * z.sum(), z)
    logp, room = logp.detach(), torch.full((3, 40), torch.nan, dtype=torch.float64)
    for out in (torch.empty_like(logp), room[:, 2:13], room[:, 18:].unflatten(1, (11, 2))[..., 0]):
        fresh = lambda name, dtype: torch.empty(3, 11, dtype=dtype)
        value = Element(fn, {}).sum_and_pull(lambda: logp.clone(), logq.clone, logp.exp(), logq.exp(), out, fresh)
        torch.testing.assert_close(value, right.detach())
        torch.testing.assert_close(out, want)
    assert room[:, 13:18].isnan().all()


@pytest.mark.parametrize(
    ("fn", "most"),
    [(hl.losses.tvd, 2), (hl.losses.jsd, 3), (hl.losses.skew_kl, 5), (hl.losses.reverse_kl, 2)],
)
def test_our_own_divergences_work_in_few_buffers(fn, most):
    """What a later step reads is not overwritten, and what none reads is: fresh memory costs more than arithmetic."""
    torch.manual_seed(0)
    z, u = torch.randn(3, 11, requires_grad=True), torch.randn(3, 11)
    logp, logq = z.log_softmax(-1), u.log_softmax(-1)
    right = fn(logp, logq).sum(-1)
    (want,) = torch.autograd.grad(right.sum(), z)
    made: dict[str, Tensor] = {}

    def buffer(name: str, dtype: torch.dtype) -> Tensor:
        return made.setdefault(name, torch.empty(3, 11, dtype=dtype))

    for _ in range(2):  # the second time, with what the first has left
        logs, out = (logp.detach().clone, logq.clone), torch.empty(3, 11)
        value = Element(fn, {}).sum_and_pull(*logs, logp.detach().exp(), logq.exp(), out, buffer)
        torch.testing.assert_close(value, right.detach())
        torch.testing.assert_close(out, want)
    assert 0 < len(made) <= most


def triangular(logp, logq):
    p, q = logp.exp(), logq.exp()
    return (p - q) ** 2 / (p + q)


@pytest.mark.parametrize("tail", ["bucket", "none", "renormalise"])
def test_padding_makes_no_nan_of_a_function_that_is_none_at_zero(tail):
    """0 / 0 where neither has any probability: rows with and without ids, and one whose ids are few."""
    z = (torch.randn(4, 9, dtype=torch.float64) - 6).requires_grad_()
    ids = torch.tensor([[1, 2, 3], [1, 2, -1], [7, -1, -1], [-1, -1, -1]])
    logq = torch.tensor([[0.5, 0.3, 0.1]] * 4).double().log()
    out = hl.Objective(kd=hl.Term(triangular, tail=tail))(hl.Logits(z), teacher=hl.Sparse(ids, logq))
    out.loss.backward()
    logp, want = z.detach().log_softmax(-1), []
    for n, row in enumerate(ids):
        named = row[row >= 0]
        p, q = logp[n, named].exp(), logq[n, : len(named)].exp()
        if tail == "renormalise":
            p, q = p / p.sum(), q / q.sum()
        elif tail == "bucket":
            p, q = torch.cat([p, 1 - p.sum()[None]]), torch.cat([q, 1 - q.sum()[None]])
        want.append(((p - q) ** 2 / (p + q)).sum())
    torch.testing.assert_close(out.loss.detach(), torch.stack(want).mean())
    assert not z.grad.isnan().any()


@pytest.mark.parametrize("T", [1.0, 1e-3])
@pytest.mark.parametrize("offset", [0.0, -3e4])
def test_renormalised_ids_do_not_know_where_the_logits_lie(offset, T):
    """However cold, and however far below 0; a padding has no probability there either."""
    z = torch.tensor([[-12.0, -11.999, 3.0, 1.0]], dtype=torch.float64)
    z = (z + offset).requires_grad_()
    ids, logq = torch.tensor([[0, 1, -1]]), torch.tensor([[0.3, 0.7, 1.0]]).double().log()
    out = hl.Objective(kd=hl.Term(hl.losses.forward_kl, tail="renormalise"))(
        hl.Logits(z, temperature=T), teacher=hl.Sparse(ids, logq)
    )
    (got,) = torch.autograd.grad(out.loss, z)
    logp, q = (z / T)[:, :2].log_softmax(-1), logq[:, :2].exp()
    want = (q * (logq[:, :2] - logp)).sum()
    torch.testing.assert_close(out.loss.detach(), want.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got, torch.autograd.grad(want, z)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_function_made_anew_in_every_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is traced and tried once for each number that it captures; the numbers are its own."""
    torch.manual_seed(0)
    made: list[str] = []
    once, check = trace._trace, Element.check
    monkeypatch.setattr(trace, "_trace", lambda *a: made.append("traced") or once(*a))
    monkeypatch.setattr(Element, "check", lambda *a, **k: made.append("tried") or check(*a, **k))
    for module, cache in ((trace, "_TRACES"), (divergence, "_CHECKED")):
        monkeypatch.setattr(module, cache, {})
    z, u = torch.randn(2, 6, 9, dtype=torch.float64)
    targets, log_p, log_q = torch.randint(9, (6,)), z.log_softmax(-1), u.log_softmax(-1)
    teacher: Any = hl.Logits(u)
    if kind == "sparse":
        ids = u.topk(4).indices
        log_p, log_q = log_p.gather(-1, ids), log_q.gather(-1, ids)
        teacher = hl.Sparse(ids, log_q)
    for step in range(6):
        power = 2 + step % 2
        fn = lambda logp, logq: (logp.exp() - logq.exp()).abs() ** power
        objective = hl.Objective(kd=hl.Term(fn, tail="none" if kind == "sparse" else "bucket"))
        out = objective(hl.Logits(z.clone().requires_grad_()), targets, teacher=teacher)
        out.loss.backward()
        torch.testing.assert_close(out.loss.detach(), (log_p.exp() - log_q.exp()).abs().pow(power).sum(-1).mean())
        assert made.count("traced") == made.count("tried") == (2 if step else 1), (step, made)
