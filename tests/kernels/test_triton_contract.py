"""Every loss and every divergence on the Triton backend, under the interpreter, against the dense oracles in float64.

The losses are found, not listed.  What is given is rounded to float32 first, so that both see the same numbers.
"""

import math
import sys
from pathlib import Path

import oracle
import pytest
import torch
from interpreting import INSIDE, inside, rerun
from oracle import LOSSES
from test_contract import needs_inputs, objective_ways, options_of, term_for

import headloss as hl
from headloss.reductions import REDUCTIONS

sys.path.append(str(Path(__file__).parents[1] / "distill"))
import teaching
from teaching import CASES, TAILS, check, make, run, truth, values

pytest.importorskip("triton")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["every_loss", "not every_loss"])
@pytest.mark.skipif(INSIDE, reason="this is the other process")
def test_under_the_interpreter(part):
    rerun(__file__, "-k", part)


def rounded(x):
    return x.float().double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def in_float32(problem):
    return oracle.replace(
        problem,
        tensors={n: rounded(x) for n, x in problem.tensors.items()},
        inputs={n: rounded(x).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) and x.is_floating_point()
                else x for n, x in problem.inputs.items()},
        teacher=rounded(problem.teacher),
    )  # fmt: skip


# ---------------------------------------------------------------- every loss


@inside
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name):
    """Reductions, ways to run, budgets, options and sharpness take turns."""
    fn, turn = LOSSES[name], len(name)
    options = list(options_of(fn))
    for kind in ("Logits", "Linear"):
        turn += 1
        problem = in_float32(
            oracle.problem_for(
                fn, kind, ((11,), (3, 4))[turn % 2], peaked=kind == "Logits", extra_inputs=("token_weight",)
            )
        )
        term = term_for(fn, sorted(REDUCTIONS)[turn % len(REDUCTIONS)], problem, **options[turn % len(options)])
        own = needs_inputs(term, problem)
        objective = hl.Objective(term=term, backend="triton")
        ways = objective_ways(hl.Objective(term=term, backend="torch"), own)
        memory = own.budget(4, itemsize=4) if kind == "Linear" else None
        how = ways[turn % len(ways)]
        got = oracle.run(objective, own, memory=memory, how=how, dtype=torch.float32)
        oracle.check(got, oracle.answer(objective, own), 5e-5, what=f"{kind}, {term.reduction}, {how}")


# ---------------------------------------------------------------- every divergence, every kind of teacher


def in_float32_with_teacher(problem):
    """Sparse masses stay below 1: what a mass of 1 leaves for the tail is a rounding, of another size in float64."""
    if problem.logprobs is not None:
        mass = torch.where(problem.ids >= 0, problem.logprobs.exp(), 0.0).sum(-1, keepdim=True)
        problem = teaching.replace(problem, logprobs=problem.logprobs - mass.clamp(min=0.8).log() + math.log(0.8))
    narrow = lambda m: teaching.replace(m, tensors={n: rounded(x) for n, x in m.tensors.items()})
    return teaching.replace(
        problem,
        student=narrow(problem.student),
        teacher=None if problem.teacher is None else narrow(problem.teacher),
        logprobs=rounded(problem.logprobs),
    )


def only_here(logp, logq, *, sharpness=1.3):
    """A divergence that exists in this file: (sqrt p - sqrt q)^2, with a softened gap."""
    return ((logp / 2).exp() - (logq / 2).exp()) ** 2 * (1 + torch.sigmoid(sharpness * (logp - logq)))


def _only_here(p, q, *, sharpness=1.3):
    return ((p.sqrt() - q.sqrt()) ** 2 * (1 + torch.sigmoid(sharpness * (p.log() - q.log())))).sum(-1)


EVERY = [*CASES, (only_here, _only_here, {}), (only_here, _only_here, {"sharpness": 0.7})]


@inside
@pytest.mark.parametrize("case", EVERY, ids=[f"{c[0].__name__}{c[2] or ''}" for c in EVERY])
def test_every_divergence(case):
    fn, formula, options = case
    turn = len(fn.__name__)
    kinds = [("Logits", "bucket"), ("Linear", "bucket"), *(("Sparse", tail) for tail in TAILS)]
    for teacher, tail in kinds if not options else kinds[1:2]:
        turn += 1
        student = ("Logits", "Linear")[turn % 2]
        wide = {"teacher_vocab": 29} if teacher == "Linear" else {}
        problem = in_float32_with_teacher(make(student, teacher, ((5,), (2, 3))[turn % 2], seed=turn, **wide))
        T = (None, 2.0)[turn % 2] if teacher != "Sparse" else None
        objective = hl.Objective(kd=hl.Term(fn, tail=tail, temperature=T, **options), backend="triton")
        want = truth(problem, lambda leaves, p=problem, t=tail, T=T: values(p, leaves, formula, options, t, T))
        got = run(
            objective, problem, dtype=torch.float32, rows=None if student == "Logits" else 3, host_read=turn % 3 == 0
        )
        check(*got, want, 5e-5, what=f"{student} of {teacher} {tail} T={T}")


@inside
def test_transforms_of_both_models_and_several_teachers():
    own = lambda T: T * (0.5 + torch.rand(4))
    torch.manual_seed(5)
    problem = in_float32_with_teacher(
        make(
            "Linear", "Linear", (4,),
            transform={"temperature": own(1.4), "scale": 0.7, "softcap": 4.0},
            teacher_transform={"temperature": own(0.6), "scale": 1.3, "softcap": 6.0},
        )
    )  # fmt: skip
    ids, logprobs = teaching.sparse_teacher((4,), 23)
    logprobs = rounded(logprobs - 0.7)
    sparse = teaching.replace(problem, teacher=None, ids=ids, logprobs=logprobs)
    teachers = {"big": problem.teacher_source(), "served": hl.Sparse(ids, logprobs), "again": problem.teacher_source()}
    parts = [
        (hl.Term(hl.losses.reverse_kl, teacher="big"), problem, teaching.reverse_kl, "bucket", None),
        (hl.Term(hl.losses.jsd, teacher="again", temperature=2.0), problem, teaching.jsd, "bucket", 2.0),
        (hl.Term(hl.losses.tvd, teacher="big", temperature=0.5), problem, teaching.tvd, "bucket", 0.5),
        (hl.Term(hl.losses.forward_kl, teacher="served"), sparse, teaching.forward_kl, "bucket", None),
        (
            hl.Term(hl.losses.skew_kl, teacher="served", tail="none", temperature=2.0),
            sparse,
            teaching.skew_kl,
            "none",
            2.0,
        ),
    ]

    def total(leaves):
        rows = problem.targets[problem.valid]
        found = torch.nn.functional.cross_entropy(problem.student_scores(leaves), rows, reduction="none")
        return found + sum(values(which, leaves, formula, {}, tail, T) for _, which, formula, tail, T in parts)

    terms = {f"t{i}": part[0] for i, part in enumerate(parts)}
    objective = hl.Objective(ce=hl.losses.cross_entropy, **terms, backend="triton")
    for rows, host_read in ((2, True), (99, False)):
        got = run(objective, problem, dtype=torch.float32, rows=rows, teacher=teachers, host_read=host_read)
        check(*got, truth(problem, total), 5e-5, what=f"{rows} rows")


# ---------------------------------------------------------------- what cannot be printed


def special(logp, logq):
    return torch.special.bessel_j0(logp) * logq.exp()


def branching(logp, logq):
    return logp.exp() * (logp - logq) if float(logp.sum()) < 0 else logq - logp


@inside
@pytest.mark.parametrize("fn, operation", [(special, "special_bessel_j0"), (branching, "cannot be traced")])
def test_a_divergence_without_a_triton_form(fn, operation):
    x, u = torch.randn(3, 11), torch.randn(3, 11)
    objective = hl.Objective(kd=fn, backend="triton")
    with pytest.raises(ValueError, match=rf'backend: "triton" cannot run {fn.__name__}.*{operation}.*backend="torch"'):
        objective(hl.Logits(x), teacher=hl.Logits(u))
    assert hl.Objective(kd=fn)(hl.Logits(x), teacher=hl.Logits(u)).loss.isfinite()  # "auto" is torch on a CPU


@inside
def test_other_options_are_the_same_function():
    from headloss.backends.triton.printer.elements import printed
    from headloss.divergence import Element

    (one, numbers), (two, others) = (printed(((0, Element(hl.losses.jsd, {"beta": b})),), 1) for b in (0.3, 0.6))
    assert one is two and numbers != others
