"""Teachers on two ranks: the vocabulary in shards, uneven, of unequal size, with ids on the other rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import teaching
import torch
import torch.distributed as dist
from spawn import Calls
from teaching import CASES, TAILS, check, close, make, run, truth, values
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, forward_kl, jsd, reverse_kl, tvd

V, CUT = 23, 14  # rank 0 holds 14 columns, rank 1 the rest


def shard(vocab: int = V, cut: int = CUT) -> tuple[hl.VocabShard, slice]:
    rank = dist.get_rank()
    mine = slice(0, min(cut, vocab)) if rank == 0 else slice(min(cut, vocab), vocab)
    return hl.VocabShard(dist.group.WORLD, mine.start, vocab, width=max(cut, vocab - cut)), mine


def local(model: teaching.Model, cut: int = CUT) -> tuple[teaching.Model, dict[str, slice]]:
    """This rank's part of a model, and where it stands in each tensor."""
    own, mine = shard(model.vocab, cut)
    where = {"logits": (..., mine), "weight": mine, "bias": mine, "hidden": ...}
    tensors = {n: x[where[n]].clone() for n, x in model.tensors.items()}
    return teaching.Model(tensors, model.transform | {"shard": own}), where


def halves(problem: teaching.Problem) -> tuple[teaching.Problem, Any]:
    student, where = local(problem.student)
    teacher = None if problem.teacher is None else local(problem.teacher)[0]
    return teaching.replace(problem, student=student, teacher=teacher), where


def cut_truth(want: Any, where: Mapping[str, Any]) -> Any:
    value, grads = want
    return value, {n: g[where[n]] for n, g in grads.items()}


def divergences(student: str, teacher: str, tail: str, names: list[str]) -> None:
    for fn, formula, options in CASES:
        if fn.__name__ not in names or (options and teacher == "Sparse"):
            continue
        problem = make(student, teacher, (3, 5), teacher_vocab=V if fn is not jsd else 19)
        here, where = halves(problem)
        want = cut_truth(truth(problem, lambda leaves: values(problem, leaves, formula, options, tail)), where)
        objective = hl.Objective(kd=hl.Term(fn, tail=tail, **options))
        for rows in (None,) if student == "Logits" else (2, 99):
            got = run(objective, here, rows=rows)
            check(*got, want, what=f"{fn.__name__} {student} {teacher} {tail} rows={rows}")


NAMES = list(dict.fromkeys(fn.__name__ for fn, _, _ in CASES))


@pytest.mark.parametrize("student", ["Logits", "Linear"])
@pytest.mark.parametrize("teacher", ["Logits", "Linear"])
def test_dense_teachers(ranks: Any, student: str, teacher: str) -> None:
    ranks(2, divergences, student, teacher, "bucket", NAMES)


@pytest.mark.parametrize("student", ["Logits", "Linear"])
@pytest.mark.parametrize("tail", TAILS)
def test_sparse_teachers(ranks: Any, student: str, tail: str) -> None:
    ranks(2, divergences, student, "Sparse", tail, NAMES)


def mixed() -> None:
    """Everything at once, ignored rows masked, at several temperatures, one shard empty of teacher columns."""
    for teacher_vocab in (V, 9, 40):
        problem = make("Linear", "Linear", (3, 5), teacher_vocab=teacher_vocab, teacher_transform={"softcap": 5.0})
        ids, logprobs = teaching.sparse_teacher((3, 5), V)
        sparse = teaching.replace(problem, teacher=None, ids=ids, logprobs=logprobs)
        student, where = local(problem.student)
        assert problem.teacher is not None
        teacher_source = local(problem.teacher)[0].source()
        objective = hl.Objective(
            ce=cross_entropy,
            a=hl.Term(reverse_kl, teacher="a", temperature=2.0),
            b=hl.Term(jsd, teacher="a"),
            c=hl.Term(tvd, teacher="b", tail="renormalise"),
            d=hl.Term(jsd, teacher="b", temperature=2.0),
            metrics=["accuracy", hl.Term(forward_kl, teacher="a")],
        )

        def true(leaves: Mapping[str, Tensor]) -> Tensor:
            rows = problem.targets.reshape(-1)[problem.valid]
            found = torch.nn.functional.cross_entropy(problem.student_scores(leaves), rows, reduction="none")
            found = found + values(problem, leaves, teaching.reverse_kl, {}, "", 2.0)
            found = found + values(problem, leaves, teaching.jsd, {})
            found = found + values(sparse, leaves, teaching.tvd, {}, "renormalise")
            return found + values(sparse, leaves, teaching.jsd, {}, "bucket", 2.0)

        want = cut_truth(truth(problem, true), where)
        here = teaching.replace(problem, student=student, teacher=None)
        teachers = {"a": teacher_source, "b": hl.Sparse(ids, logprobs)}
        for host_read in (True, False):
            got = run(objective, here, rows=12, teacher=teachers, host_read=host_read)
            check(*got, want, what=f"{teacher_vocab} {host_read}")
        kl = values(problem, problem.leaves(), teaching.forward_kl, {}).mean().detach()
        close(float(got[0].metrics["forward_kl"]), kl)


def test_everything_at_once(ranks: Any) -> None:
    ranks(2, mixed)


def overlap() -> None:
    problem = make("Logits", "Sparse", (3, 5))
    here, _ = halves(problem)
    objective = hl.Objective(kd=forward_kl, metrics=["topk_overlap", "teacher_agreement"])
    whole, parts = run(objective, problem)[0], run(objective, here)[0]
    for name in ("topk_overlap", "teacher_agreement", "kd/student_mass", "kd/teacher_mass"):
        close(float(parts.metrics[name]), float(whole.metrics[name]), what=name)


def test_metrics(ranks: Any) -> None:
    ranks(2, overlap)


def collectives() -> None:
    """One all-gather, one more collective for a second read, and what `explain` said beforehand."""
    one = {"all_gather": 1}
    for student in ("Logits", "Linear"):
        hidden = {"all_reduce": 1} if student == "Linear" else {}
        look = {"all_reduce": 1 + len(hidden)}
        for teacher, terms, want in (
            ("Linear", {"a": forward_kl, "b": reverse_kl, "ce": cross_entropy}, one | hidden),
            ("Linear", {"a": jsd, "b": tvd, "c": hl.Term(jsd, temperature=2.0), "ce": cross_entropy}, one | look),
            ("Sparse", {"a": jsd, "b": tvd, "c": hl.Term(forward_kl, tail="none")}, one | hidden),
            ("Sparse", {"a": hl.Term(jsd, tail="renormalise")}, look),
        ):
            here, _ = halves(make(student, teacher, (3, 5)))
            objective = hl.Objective(**terms)
            source, teacher_source = here.student.source(here.leaves()), here.teacher_source()
            plan = objective.explain(source, here.targets, teacher=teacher_source)
            with Calls() as calls:
                objective(source, here.targets, teacher=teacher_source).loss.backward()
            assert calls.count == want, (student, teacher, calls.count)
            planned = {"all_gather": 0, "all_reduce": 0}
            for what, n in plan.collectives.items():
                planned["all_gather" if what.startswith("all-gather") else "all_reduce"] += n
            assert {k: n for k, n in planned.items() if n} == calls.count, (student, teacher)


def test_collectives(ranks: Any) -> None:
    ranks(2, collectives)


def ruled_out() -> None:
    """All of rank 1's columns are -inf for one of the two: as large a divergence as in one piece."""
    logits, other = torch.randn(2, 4, 20).double()
    logits[:, 10:] = -torch.inf
    mine = slice(10 * dist.get_rank(), 10 * dist.get_rank() + 10)
    shard, targets = hl.VocabShard(dist.group.WORLD, mine.start, 20), torch.zeros(4, dtype=torch.long)
    for student, teacher in ((logits, other), (other, logits)):
        for loss in (forward_kl, reverse_kl, jsd):
            objective = hl.Objective(a=loss)
            want = objective(hl.Logits(student), targets, teacher=hl.Logits(teacher)).loss
            part = hl.Logits(student[:, mine], shard=shard), hl.Logits(teacher[:, mine], shard=shard)
            torch.testing.assert_close(objective(part[0], targets, teacher=part[1]).loss, want, rtol=1e-10, atol=1e-10)


def test_a_shard_that_is_ruled_out(ranks: Any) -> None:
    ranks(2, ruled_out)


def gemms() -> None:
    """A batch loss has all facts made first; over a shard a second read then makes the logits once more, as is said.

    A teacher's are still there where one chunk holds all rows.
    """
    here, _ = halves(make("Linear", "Linear", (20,), ignored=False))
    for loss, look in ((jsd, 1), (forward_kl, 0)):
        objective = hl.Objective(a=loss, b=lambda logprob: logprob - logprob.mean())
        source, teacher_source = here.student.source(here.leaves()), here.teacher_source()
        plan = objective.explain(source, here.targets, teacher=teacher_source)
        with Calls() as calls:
            objective(source, here.targets, teacher=teacher_source).loss.backward()
        assert (plan.gemms, plan.teacher_gemms) == (4 + look, 2)
        assert calls.events.count("gemm") == plan.gemms + plan.teacher_gemms, calls.events


def test_gemms_of_a_batch_loss(ranks: Any) -> None:
    ranks(2, gemms)


def chunks() -> None:
    """Shards of unequal size walk the same chunks, though the teacher's columns differ even more."""
    problem = make("Linear", "Linear", (20,), V, teacher_vocab=17)
    here, _ = halves(problem)
    objective = hl.Objective(a=jsd, ce=cross_entropy)
    source = here.student.source(here.leaves(), memory=3 * 8 * 2 * 30)
    planned = objective.explain(source, here.targets, teacher=here.teacher_source()).chunks
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, planned)
    assert everyone[0] == everyone[1] > 3
    objective(source, here.targets, teacher=here.teacher_source()).loss.backward()


def test_ranks_walk_the_same_chunks(ranks: Any) -> None:
    ranks(2, chunks)


def misaligned() -> None:
    problem = make("Linear", "Linear", (3, 5))
    student, _ = local(problem.student)
    assert problem.teacher is not None
    for teacher, message in (
        (local(problem.teacher, cut=12)[0].source(), "a rank must hold the same columns of both"),
        (problem.teacher.source(), "the student has a vocabulary shard, the teacher has none"),
    ):
        for objective in (hl.Objective(a=forward_kl), hl.Objective(a=jsd)):
            with pytest.raises(ValueError, match="^teacher: ") as error, Calls() as calls:
                objective(student.source(), problem.targets, teacher=teacher)
            assert message in str(error.value) and not calls.count
    with pytest.raises(ValueError, match="the teacher has a vocabulary shard, the student has none"):
        hl.Objective(a=jsd)(problem.student.source(), problem.targets, teacher=local(problem.teacher)[0].source())


def test_a_misaligned_teacher_is_refused_on_every_rank(ranks: Any) -> None:
    ranks(2, misaligned)


def dtensors() -> None:
    """Student and teacher as DTensors on one mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    problem = make("Linear", "Linear", (3, 5), ignored=False)
    assert problem.teacher is not None

    def spread(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: distribute_tensor(x, mesh, [Replicate() if n == "hidden" else Shard(0)]) for n, x in tensors.items()}

    leaves = {n: x.requires_grad_() for n, x in spread(problem.student.tensors).items()}
    teacher = problem.teacher.source(spread(problem.teacher.tensors))
    out = hl.Objective(kd=jsd)(problem.student.source(leaves), problem.targets, teacher=teacher)
    out.loss.backward()
    want = truth(problem, lambda found: values(problem, found, teaching.jsd, {}))
    check(out, {n: x.grad.full_tensor() for n, x in leaves.items()}, want)
    facts = hl.row_facts(problem.student.source(leaves), want=["teacher_entropy"], teacher=teacher)
    assert facts.teacher_entropy.shape == (3, 5)


def test_dtensor_teachers(ranks: Any) -> None:
    ranks(2, dtensors)
