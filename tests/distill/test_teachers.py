"""Facts of teachers, temperatures, vocabularies of different size, several teachers, metrics, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import teaching
import torch
from teaching import check, close, make, run, truth, values
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import headloss as hl
import headloss.backends.torch as engine
from headloss.losses import (
    cross_entropy,
    entropy_bonus,
    forward_kl,
    grpo,
    jsd,
    reverse_kl,
    soft_cross_entropy,
    tvd,
    z_loss,
)

DENSE = ("teacher_cross_entropy", "reverse_cross_entropy", "teacher_entropy")


@contextmanager
def counted(*names: str) -> Iterator[dict[str, int]]:
    """How often each function of the torch backend is called."""
    calls = dict.fromkeys(names, 0)
    saved = {name: getattr(engine, name) for name in names}

    def count(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return saved[name](*args, **kwargs)

        return call

    for name in names:
        setattr(engine, name, count(name))
    try:
        yield calls
    finally:
        for name, fn in saved.items():
            setattr(engine, name, fn)


# Facts


@pytest.mark.parametrize("student, rows", [("Logits", None), ("Linear", 3)])
@pytest.mark.parametrize("host_read", [True, False])
def test_dense_facts(student: str, rows: int | None, host_read: bool) -> None:
    problem = make(student, "Linear", (3, 5))
    leaves = problem.leaves()
    source = problem.student.source(leaves, **({} if rows is None else {"memory": teaching.budget(problem, rows)}))
    wanted = [*DENSE, ("teacher_cross_entropy", 2.0), ("reverse_cross_entropy", 2.0), "entropy"]
    facts = hl.row_facts(source, problem.targets, want=wanted, teacher=problem.teacher_source(), host_read=host_read)

    def true(leaves: Mapping[str, Tensor]) -> dict[Any, Tensor]:
        found: dict[Any, Tensor] = {}
        for T in (None, 2.0):
            logp, logq = problem.dense(leaves, T)
            key = lambda name: name if T is None else (name, T)
            found[key("teacher_cross_entropy")] = -(logq.exp() * logp).sum(-1)
            found[key("reverse_cross_entropy")] = -(logp.exp() * logq).sum(-1)
            if T is None:
                found["teacher_entropy"] = -(logq.exp() * logq).sum(-1)
                found["entropy"] = -(logp.exp() * logp).sum(-1)
        return found

    want = true(leaves)
    assert set(facts) == set(want)
    for key, x in want.items():
        assert facts[key].shape == (3, 5)
        assert (facts[key][problem.targets == -100] == 0).all()
        close(facts[key].detach().reshape(-1)[problem.valid], x.detach(), what=str(key))
    assert not facts.teacher_entropy.requires_grad
    mixed = lambda facts: sum((i + 1) * (x**2).sum() for i, (k, x) in enumerate(sorted(facts.items(), key=str)))
    mixed(facts).backward()
    again = problem.leaves()
    grads = torch.autograd.grad(mixed(true(again)), list(again.values()))
    for (name, x), g in zip(leaves.items(), grads):
        close(x.grad, g, what=name)


@pytest.mark.parametrize("host_read", [True, False])
def test_sparse_facts(host_read: bool) -> None:
    problem = make("Logits", "Sparse", (3, 5))
    wanted = ("ids_logprob", "tail_logprob", ("tail_logprob", 3.0))
    leaves = problem.leaves()
    source = problem.student.source(leaves)
    facts = hl.row_facts(source, problem.targets, want=wanted, teacher=problem.teacher_source(), host_read=host_read)
    assert facts.ids_logprob.shape == (3, 5, 6) and facts.tail_logprob.shape == (3, 5)
    none = (problem.ids < 0) & (problem.targets != -100)[..., None]
    assert (facts.ids_logprob[none] == -torch.inf).all(), "padding"
    for x in facts.values():
        assert (x[problem.targets == -100] == 0).all() and not x.isnan().any()
    ids, logp = problem.ids.reshape(-1, 6)[problem.valid], facts.ids_logprob.reshape(-1, 6)[problem.valid]
    for s_V, row_ids, row_logp, tails in zip(
        problem.student_scores(problem.leaves()).detach(),
        ids,
        logp,
        zip(facts["tail_logprob"].reshape(-1)[problem.valid], facts["tail_logprob", 3.0].reshape(-1)[problem.valid]),
    ):
        firsts: set[int] = set()
        for i, x in zip(row_ids.tolist(), row_logp.tolist()):
            if i >= 0:  # a repeated id speaks once
                assert x == pytest.approx(float(s_V.log_softmax(-1)[i]) if i not in firsts else -math.inf, abs=1e-12)
                firsts.add(i)
        rest = [j for j in range(23) if j not in firsts]
        for T, tail in zip((1.0, 3.0), tails):
            assert float(tail) == pytest.approx(float((s_V / T).log_softmax(-1)[rest].logsumexp(-1)), abs=1e-12)


@pytest.mark.parametrize("teacher", ["Logits", "Sparse"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradcheck(teacher: str, softcap: float | None) -> None:
    transform = {"softcap": softcap, "scale": 0.8, "temperature": 1.3}
    problem = make("Linear", teacher, (4,), 7, ignored=False, transform=transform)
    wanted = DENSE[:2] if teacher == "Logits" else ("ids_logprob", "tail_logprob", ("ids_logit", 2.0))
    wanted = (*wanted, ("reverse_cross_entropy", 2.0)) if teacher == "Logits" else wanted

    def facts(*tensors: Tensor) -> tuple[Tensor, ...]:
        source = problem.student.source(dict(zip(problem.student.tensors, tensors)), memory=200)
        found = hl.row_facts(source, problem.targets, want=wanted, teacher=problem.teacher_source())
        return tuple(torch.where(x > -torch.inf, x, 0.0) for x in found.values())

    assert torch.autograd.gradcheck(facts, tuple(problem.leaves().values()))


def test_a_fact_and_the_loss_pull_together() -> None:
    """A scaled loss, a fact's own gradient, and a second backward over the same graph."""
    problem = make("Linear", "Linear")
    objective = hl.Objective(kd=jsd, ce=cross_entropy, fk=hl.Term(forward_kl, temperature=2.0))

    def true(leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        rows = problem.targets[problem.valid]
        loss = values(problem, leaves, teaching.jsd, {}) + values(problem, leaves, teaching.forward_kl, {}, "", 2.0)
        loss = loss + torch.nn.functional.cross_entropy(problem.student_scores(leaves), rows, reduction="none")
        logp, logq = problem.dense(leaves, 2.0)
        return loss.mean(), -(logq.exp() * logp).sum(-1)

    leaves = problem.leaves()
    loss, fact = true(leaves)
    want = torch.autograd.grad(2 * loss + (fact**2).sum(), list(leaves.values()), retain_graph=True)
    alone = torch.autograd.grad(loss, list(leaves.values()))
    leaves = problem.leaves()
    out = objective(problem.student.source(leaves, memory=2000), problem.targets, teacher=problem.teacher_source())
    inputs = list(leaves.values())
    got = torch.autograd.grad(
        2 * out.loss + (out.facts["teacher_cross_entropy", 2.0] ** 2).sum(), inputs, retain_graph=True
    )
    for g, w in zip(got, want):
        close(g, w)
    for _ in range(2):  # gradients made in the visit are gone by now
        for g, w in zip(torch.autograd.grad(out.loss, inputs, retain_graph=True), alone):
            close(g, w)


# Temperatures, scale, softcap, bias


@pytest.mark.parametrize("student, rows", [("Logits", None), ("Linear", 3)])
@pytest.mark.parametrize("per_row", [False, True])
def test_each_model_has_its_own_transform(student: str, rows: int | None, per_row: bool) -> None:
    torch.manual_seed(1)
    own = lambda T: T * (0.5 + torch.rand(3, 5, dtype=torch.float64)) if per_row else T
    problem = make(
        student, "Linear", (3, 5),
        transform={"temperature": own(1.4), "scale": 0.7, "softcap": 4.0},
        teacher_transform={"temperature": own(0.6), "scale": 1.3, "softcap": 6.0},
    )  # fmt: skip
    for fn, formula in ((forward_kl, teaching.forward_kl), (reverse_kl, teaching.reverse_kl), (jsd, teaching.jsd)):
        for T in (None, 2.0):  # a term's temperature replaces both
            want = truth(problem, lambda leaves: values(problem, leaves, formula, {}, "", T))
            for host_read in (True, False):
                check(*run(hl.Objective(kd=hl.Term(fn, temperature=T)), problem, rows=rows, host_read=host_read), want)


def test_no_hidden_square_of_the_temperature() -> None:
    """T^2 is the user's to say, as the term's weight: it then scales loss and gradient alike."""
    problem = make()
    plain, grads = run(hl.Objective(kd=hl.Term(forward_kl, temperature=3.0)), problem)
    check(plain, grads, truth(problem, lambda leaves: values(problem, leaves, teaching.forward_kl, {}, "", 3.0)))
    scaled, more = run(hl.Objective(kd=hl.Term(forward_kl, temperature=3.0, weight=9.0)), problem)
    close(scaled.loss.detach(), 9 * plain.loss.detach())
    close(more["logits"], 9 * grads["logits"])


def hot_and_cold(hot: Tensor, teacher_cross_entropy: Tensor, warm_entropy: Tensor, logprob: Tensor) -> Tensor:
    return hot * warm_entropy + teacher_cross_entropy - logprob


@pytest.mark.parametrize("student, rows", [("Logits", None), ("Linear", 3)])
def test_one_function_at_several_temperatures(student: str, rows: int | None) -> None:
    problem = make(student, "Linear")
    objective = hl.Objective(
        mine=hl.Term(hot_and_cold, facts={"hot": ("teacher_cross_entropy", 2.0), "warm_entropy": ("entropy", 1.5)})
    )

    def true(leaves: Mapping[str, Tensor]) -> Tensor:
        ce = [-(q.exp() * p).sum(-1) for p, q in (problem.dense(leaves, 2.0), problem.dense(leaves))]
        warm = problem.student_scores(leaves, 1.5).log_softmax(-1)
        logp = problem.student_scores(leaves).log_softmax(-1)
        target = logp.gather(-1, problem.targets[problem.valid][:, None])[:, 0]
        return hot_and_cold(ce[0], ce[1], -(warm.exp() * warm).sum(-1), target)

    with counted("sums") as calls:
        got = run(objective, problem, rows=rows)
    check(*got, truth(problem, true))
    plan = objective.explain(
        problem.student.source(**({} if rows is None else {"memory": teaching.budget(problem, rows)})),
        problem.targets,
        teacher=problem.teacher_source(),
    )
    assert calls["sums"] == plan.chunks and plan.forward_sweeps == 1


@pytest.mark.parametrize("teacher", ["Logits", "Linear", "Sparse"])
def test_one_sweep_of_the_student(teacher: str) -> None:
    """CE + z-loss + KL at T=2 + entropy: the student's softmax is read once, and its GEMMs are those of CE alone."""
    mix = hl.Objective(
        ce=cross_entropy,
        z=hl.Term(z_loss, weight=1e-4),
        kd=hl.Term(forward_kl, temperature=2.0),
        h=hl.Term(entropy_bonus, weight=0.01),
        metrics=["entropy", "teacher_agreement"],
    )
    alone = hl.Objective(ce=cross_entropy)
    N, V, D = 40, 23, 5
    problem = make("Linear", teacher, (N,), V, ignored=False)
    once = 2 * N * V * D
    for rows in (3, 1000):
        memory = teaching.budget(problem, rows)
        flops = []
        for objective, source_t in ((alone, None), (mix, problem.teacher_source())):
            source = problem.student.source(problem.leaves(), memory=memory)
            with counted("sums", "divergence_pass") as calls, FlopCounterMode(display=False) as counter:
                objective(source, problem.targets, teacher=source_t).loss.backward()
            flops.append(counter.get_total_flops())
            plan = objective.explain(source, problem.targets, teacher=source_t)
            assert calls == {"sums": plan.chunks, "divergence_pass": 0}
            assert (plan.forward_sweeps, plan.sweeps, plan.gemms) == (1, 2, 3)
            assert "2 passes over the vocabulary (1 without grad)" in str(plan)
        theirs = 2 * N * V * 4 if teacher == "Linear" else 0  # one GEMM of the teacher's own
        assert flops == [3 * once, 3 * once + theirs]
        with torch.no_grad(), counted("sums", "divergence_pass") as calls:
            mix(problem.student.source(memory=memory), problem.targets, teacher=problem.teacher_source())
        assert calls["divergence_pass"] == 0


def test_the_second_look_is_counted() -> None:
    """JSD and TVD read each chunk once more, in the same visit: no GEMM is repeated, of student or teacher."""
    problem = make("Linear", "Linear", (40,), 23, ignored=False)
    for terms, divergences in (({"a": jsd, "b": tvd, "c": forward_kl}, 1), ({"c": forward_kl, "d": reverse_kl}, 0)):
        objective = hl.Objective(**terms)
        source = problem.student.source(problem.leaves(), memory=teaching.budget(problem, 9))
        with counted("sums", "divergence_pass") as calls, FlopCounterMode(display=False) as counter:
            objective(source, problem.targets, teacher=problem.teacher_source()).loss.backward()
        plan = objective.explain(source, problem.targets, teacher=problem.teacher_source())
        assert plan.chunks == 5 and calls == {"sums": 5, "divergence_pass": 5 * divergences}
        assert counter.get_total_flops() == 3 * 2 * 40 * 23 * 5 + 2 * 40 * 23 * 4
        assert ("read twice for a divergence" in plan.grade) == bool(divergences)
        assert plan.teacher_gemms == 1
    # With a sparse teacher only K + 1 numbers enter the function: no divergence needs a second read.
    problem = make("Linear", "Sparse", (40,), 23, ignored=False)
    with counted("divergence_pass") as calls:
        run(hl.Objective(a=jsd, b=tvd), problem)
    assert calls["divergence_pass"] == 0


# Vocabularies of different size


@pytest.mark.parametrize("teacher_vocab", [17, 31])
@pytest.mark.parametrize("student, rows", [("Logits", None), ("Linear", 3)])
def test_vocabularies_of_different_size(student: str, rows: int | None, teacher_vocab: int) -> None:
    """Divergences see the common prefix, renormalised; the other facts the student's whole vocabulary."""
    problem = make(student, "Linear", (13,), 23, teacher_vocab=teacher_vocab)
    objective = hl.Objective(
        ce=cross_entropy, h=entropy_bonus, z=z_loss, a=hl.Term(forward_kl, temperature=2.0), b=reverse_kl, c=jsd
    )

    def true(leaves: Mapping[str, Tensor]) -> Tensor:
        logp = problem.student_scores(leaves).log_softmax(-1)
        found = -logp.gather(-1, problem.targets[problem.valid][:, None])[:, 0]
        found = found + (logp.exp() * logp).sum(-1) + problem.student_scores(leaves).logsumexp(-1) ** 2
        found = found + values(problem, leaves, teaching.forward_kl, {}, "", 2.0)
        return found + values(problem, leaves, teaching.reverse_kl, {}) + values(problem, leaves, teaching.jsd, {})

    check(*run(objective, problem, rows=rows), truth(problem, true))
    p, q = problem.dense(problem.leaves())
    assert p.shape == q.shape == (problem.rows, min(23, teacher_vocab))


# Several teachers


def test_named_teachers() -> None:
    one, two = make(seed=1), make(seed=1, teacher="Linear")
    assert torch.equal(one.targets, two.targets)
    two = teaching.replace(two, student=one.student)
    objective = hl.Objective(
        a=hl.Term(forward_kl, teacher="one"), b=hl.Term(forward_kl, teacher="two of them", weight=0.5)
    )

    def true(leaves: Mapping[str, Tensor]) -> Tensor:
        return values(one, leaves, teaching.forward_kl, {}) + 0.5 * values(two, leaves, teaching.forward_kl, {})

    teachers = {"one": one.teacher_source(), "two of them": two.teacher_source()}
    out, grads = run(objective, one, teacher=teachers)
    check(out, grads, truth(one, true))
    for name, problem in (("one", one), ("two of them", two)):  # the record keeps them apart
        p, q = problem.dense(problem.leaves())
        got = out.facts["teacher_cross_entropy", None, name].detach()[problem.valid]
        close(got, (-(q.exp() * p).sum(-1)).detach())
    facts = hl.row_facts(
        one.student.source(), one.targets, want=[("teacher_entropy", None, n) for n in teachers], teacher=teachers
    )
    assert set(facts) == {("teacher_entropy", None, n) for n in teachers}


def test_several_sparse_teachers_on_their_ids_alone() -> None:
    for student in ("Logits", "Linear"):
        problem = make(student, "Sparse")
        ids, logprobs = teaching.sparse_teacher((13,), 23, K=3 + 3)
        other = teaching.replace(problem, ids=ids[..., :5], logprobs=logprobs[..., :5])
        objective = hl.Objective(
            a=hl.Term(forward_kl, teacher="a of x", tail="renormalise"),
            b=hl.Term(jsd, teacher="b", tail="renormalise", temperature=2.0),
        )

        def true(leaves: Mapping[str, Tensor]) -> Tensor:
            a = values(problem, leaves, teaching.forward_kl, {}, "renormalise")
            return a + values(other, leaves, teaching.jsd, {}, "renormalise", 2.0)

        for host_read in (True, False):
            got = run(
                objective,
                problem,
                teacher={"a of x": problem.teacher_source(), "b": other.teacher_source()},
                host_read=host_read,
            )
            check(*got, truth(problem, true))


def test_two_divergences_stand_apart_in_the_record() -> None:
    out, _ = run(hl.Objective(a=jsd, b=tvd, c=hl.Term(jsd, beta=0.9)), make())
    assert set(out.facts) == {"jsd(beta=0.5)", "jsd(beta=0.9)", "tvd()"}


# Ids alone


def test_renormalise_needs_no_full_gemm() -> None:
    problem = make("Linear", "Sparse", (40,), 23, ignored=False)
    objective = hl.Objective(kd=hl.Term(forward_kl, tail="renormalise"))
    K, D = 6, 5
    with counted("sums", "pull") as calls, FlopCounterMode(display=False) as counter:
        run(objective, problem)
    assert calls == {"sums": 0, "pull": 0}
    assert counter.get_total_flops() <= 3 * 2 * 40 * K * D, "K products a row, not V"
    plan = objective.explain(problem.student.source(), problem.targets, teacher=problem.teacher_source())
    assert plan.gemms == 0 and plan.sweeps == 0 and "no full GEMM" in plan.grade
    mixed = hl.Objective(kd=hl.Term(forward_kl, tail="renormalise"), ce=cross_entropy)

    def true(leaves: Mapping[str, Tensor]) -> Tensor:
        ce = torch.nn.functional.cross_entropy(problem.student_scores(leaves), problem.targets, reduction="none")
        return ce + values(problem, leaves, teaching.forward_kl, {}, "renormalise")

    check(*run(mixed, problem, rows=7), truth(problem, true))
    assert mixed.explain(problem.student.source(), problem.targets, teacher=problem.teacher_source()).gemms == 3


@pytest.mark.parametrize("student", ["Logits", "Linear"])
def test_ids_alone_with_a_transform_and_a_budget(student: str) -> None:
    torch.manual_seed(2)
    T = 0.5 + torch.rand(13, dtype=torch.float64)
    problem = make(student, "Sparse", transform={"temperature": T, "softcap": 3.0, "scale": 0.7})
    objective = hl.Objective(
        kd=hl.Term(reverse_kl, tail="renormalise"), hot=hl.Term(tvd, tail="renormalise", temperature=2.0)
    )

    def true(leaves: Mapping[str, Tensor]) -> Tensor:
        a = values(problem, leaves, teaching.reverse_kl, {}, "renormalise")
        return a + values(problem, leaves, teaching.tvd, {}, "renormalise", 2.0)

    for rows in (None, 1):
        check(*run(objective, problem, rows=rows), truth(problem, true))


# Inside reinforcement learning


@pytest.mark.parametrize("student, rows", [("Logits", None), ("Linear", 3)])
def test_exact_kl_to_a_reference_policy(student: str, rows: int | None) -> None:
    problem = make(student, "Linear", (3, 5))
    advantage = torch.randn(3, 5, dtype=torch.float64)
    old = -2 + 0.1 * torch.randn(3, 5, dtype=torch.float64)
    objective = hl.Objective(
        rl=hl.Term(grpo, reduction="seq_mean_token_mean"), kl=hl.Term(reverse_kl, weight=0.05), metrics=["entropy"]
    )
    segments = hl.Segments.from_batch(problem.targets)
    leaves = problem.leaves()
    logp = problem.student_scores(leaves).log_softmax(-1)
    chosen = logp.gather(-1, problem.targets.reshape(-1)[problem.valid][:, None])[:, 0]
    ratio, A = (chosen - old.reshape(-1)[problem.valid]).exp(), advantage.reshape(-1)[problem.valid]
    loss = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    line = torch.arange(3)[:, None].expand(3, 5).reshape(-1)[problem.valid]
    rl = torch.stack([loss[line == i].mean() for i in range(3) if (line == i).any()]).mean()
    total = rl + 0.05 * values(problem, leaves, teaching.reverse_kl, {}).mean()
    grads = torch.autograd.grad(total, list(leaves.values()))
    out, got = run(objective, problem, rows=rows, segments=segments, advantage=advantage, old_logprob=old)
    check(out, got, (total.detach(), dict(zip(leaves, grads))))
    close(out.terms["kl"], values(problem, leaves, teaching.reverse_kl, {}).mean().detach())


# Metrics


@pytest.mark.parametrize("host_read", [True, False])
def test_sparse_metrics(host_read: bool) -> None:
    problem = make("Linear", "Sparse", (3, 5))
    objective = hl.Objective(
        kd=forward_kl, metrics=["topk_overlap", "teacher_agreement", "tail_logprob", "reverse_kl", "accuracy"]
    )
    out, _ = run(objective, problem, host_read=host_read)
    leaves = problem.leaves()
    student, teacher, overlap, agreement = [], [], [], []
    for s_V, named in zip(problem.student_scores(leaves).detach(), problem.named()):
        p_V = s_V.softmax(-1)
        student.append(float(sum(p_V[i] for i in named)))
        teacher.append(math.fsum(named.values()))
        overlap.append(len(set(p_V.topk(len(named)).indices.tolist()) & set(named)) / len(named))
        agreement.append(float(int(p_V.argmax()) == max(named, key=lambda i: named[i])))
    mean = lambda xs: sum(xs) / len(xs)
    assert float(out.metrics["kd/student_mass"]) == pytest.approx(mean(student), abs=1e-12)
    assert float(out.metrics["kd/teacher_mass"]) == pytest.approx(mean(teacher), abs=1e-12)
    assert float(out.metrics["topk_overlap"]) == pytest.approx(mean(overlap), abs=1e-12)
    assert float(out.metrics["teacher_agreement"]) == pytest.approx(mean(agreement), abs=1e-12)
    reverse = values(problem, leaves, teaching.reverse_kl, {}).mean().detach()
    assert float(out.metrics["reverse_kl"]) == pytest.approx(float(reverse), rel=1e-10)


def test_dense_metrics() -> None:
    problem = make("Linear", "Linear", (3, 5))
    hot = hl.Term(tvd, temperature=2.0)
    metrics: dict[str, Any] = {"kl": forward_kl, "hot": hot, "agree": "teacher_agreement", "h": "teacher_entropy"}
    objective = hl.Objective(ce=cross_entropy, metrics={k: v for k, v in metrics.items() if not isinstance(v, str)})
    out, _ = run(objective, problem)
    leaves = problem.leaves()
    want = values(problem, leaves, teaching.forward_kl, {}).mean()
    assert float(out.metrics["kl"]) == pytest.approx(float(want.detach()), abs=1e-12)
    want = values(problem, leaves, teaching.tvd, {}, "", 2.0).mean()
    assert float(out.metrics["hot"]) == pytest.approx(float(want.detach()), abs=1e-12)
    out, _ = run(hl.Objective(ce=cross_entropy, metrics=["teacher_agreement", "teacher_entropy", "jsd"]), problem)
    p, q = problem.dense(leaves)
    assert float(out.metrics["teacher_agreement"]) == pytest.approx(
        float((p.argmax(-1) == q.argmax(-1)).double().mean())
    )
    config = hl.Objective(ce=cross_entropy, kd=hl.Term(jsd, beta=0.3), metrics=["forward_kl"]).to_config()
    assert hl.Objective.from_config(config).to_config() == config


def test_metrics_of_a_teacher_leave_gradients_alone() -> None:
    problem = make("Linear", "Linear")
    plain, grads = run(hl.Objective(ce=cross_entropy), problem, teacher=None)
    out, more = run(hl.Objective(ce=cross_entropy, metrics=["forward_kl", "jsd"]), problem)
    close(out.loss.detach(), plain.loss.detach())
    for name, g in grads.items():
        close(more[name], g)


# Evaluation


def test_without_gradients() -> None:
    for teacher in ("Linear", "Sparse"):
        problem = make("Linear", teacher)
        objective = hl.Objective(a=jsd, b=forward_kl)
        want = truth(
            problem,
            lambda leaves: values(problem, leaves, teaching.jsd, {}) + values(problem, leaves, teaching.forward_kl, {}),
        )
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                out = objective(problem.student.source(memory=3000), problem.targets, teacher=problem.teacher_source())
                close(out.loss, want[0])
                assert not out.loss.requires_grad
                out = objective.forward_backward(
                    problem.student.source(), problem.targets, teacher=problem.teacher_source()
                )
                for name, g in want[1].items():
                    close(getattr(out.grads, name), g, what=f"{mode.__name__} {name}")


def test_all_rows_ignored() -> None:
    for student in ("Logits", "Linear"):
        for teacher in ("Logits", "Linear", "Sparse"):
            problem = make(student, teacher)
            targets = torch.full_like(problem.targets, -100)
            problem = teaching.replace(problem, targets=targets)
            for host_read in (True, False):
                for tail in teaching.TAILS:
                    objective = hl.Objective(a=hl.Term(jsd, tail=tail), b=hl.Term(forward_kl, tail=tail))
                    out, grads = run(objective, problem, host_read=host_read)
                    assert float(out.loss) == 0 and all((g == 0).all() for g in grads.values())


def test_the_teacher_gets_no_gradient() -> None:
    problem = make("Linear", "Linear", ignored=False)
    teacher = {n: x.clone().requires_grad_() for n, x in problem.teacher.tensors.items()}
    with pytest.warns(UserWarning, match="a teacher is constant"):
        run(hl.Objective(a=jsd, b=reverse_kl), problem, teacher=problem.teacher.source(teacher))
    assert all(x.grad is None for x in teacher.values())


def test_switched_off_costs_nothing() -> None:
    problem = make("Linear", "Linear")
    objective = hl.Objective(ce=cross_entropy, kd=jsd)
    with counted("divergence_pass") as calls, FlopCounterMode(display=False) as counter:
        out, _ = run(objective, problem, weights={"kd": 0.0})
    assert calls["divergence_pass"] == 0 and counter.get_total_flops() == 3 * 2 * problem.rows * 23 * 5
    assert float(out.terms["kd"]) == 0


def test_soft_labels_are_a_sparse_teacher() -> None:
    """Weights from sampling: counts of drawn tokens, which sum to more than 1 and repeat."""
    problem = make("Logits", "Sparse", ignored=False)
    counts = torch.randint(1, 4, problem.ids.shape).double()
    problem = teaching.replace(problem, logprobs=counts.log())
    objective = hl.Objective(kd=hl.Term(soft_cross_entropy, tail="none"))

    def true(leaves: Mapping[str, Tensor]) -> Tensor:
        logp = problem.student_scores(leaves).log_softmax(-1)
        held = problem.ids >= 0
        return -(counts * held * logp.gather(-1, problem.ids.clamp(min=0))).sum(-1)

    check(*run(objective, problem), truth(problem, true))


@pytest.mark.parametrize("tail", ["bucket", "none", "renormalise"])
def test_repeated_ids_without_padding(tail: str) -> None:
    """An id that a row names twice has the sum of its probabilities, wherever the row names it."""
    torch.manual_seed(0)
    logits, ids = torch.randn(4, 9, dtype=torch.float64).requires_grad_(), torch.tensor([[3, 5, 3], [1, 2, 4]] * 2)
    logprobs = torch.tensor([[0.2, 0.3, 0.1]] * 4, dtype=torch.float64).log()
    once, of_once = ids.clone(), logprobs.clone()
    once[::2, 2], of_once[::2, 0], of_once[::2, 2] = -1, math.log(0.3), -math.inf
    term = hl.Objective(kd=hl.Term(forward_kl, tail=tail))
    found = [term(hl.Logits(logits), teacher=hl.Sparse(*x)).loss for x in ((ids, logprobs), (once, of_once))]
    grads = [torch.autograd.grad(x, logits)[0] for x in found]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)
