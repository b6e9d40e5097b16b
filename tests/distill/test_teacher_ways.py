"""Teachers through the module, in place, prepared, strided, under autocast, in half precision."""

from __future__ import annotations

from typing import Any

import pytest
import teaching
import torch
from teaching import check, close, make, run, truth, values

import headloss as hl
from headloss.losses import cross_entropy, forward_kl, jsd

OBJECTIVE = hl.Objective(a=forward_kl, b=hl.Term(jsd, temperature=2.0))


def true(problem: teaching.Problem) -> Any:
    return truth(
        problem,
        lambda leaves: (
            values(problem, leaves, teaching.forward_kl, {}) + values(problem, leaves, teaching.jsd, {}, "bucket", 2.0)
        ),
    )


def test_through_the_module() -> None:
    problem = make("Linear", "Linear", (3, 5))
    want, leaves = true(problem), problem.leaves()
    head = hl.FusedLMHead(5, 23, bias=True, dtype=torch.float64, memory=3000)
    head.load_state_dict({"weight": leaves["weight"].detach(), "bias": leaves["bias"].detach()})
    inputs = hl.Inputs(teacher=problem.teacher_source())
    out = head(leaves["hidden"], targets=problem.targets, objective=OBJECTIVE, inputs=inputs)
    out.loss.backward()
    check(out, {"hidden": leaves["hidden"].grad, "weight": head.weight.grad, "bias": head.bias.grad}, want)


@pytest.mark.parametrize("teacher", ["Logits", "Linear", "Sparse"])
def test_in_place_and_prepared(teacher: str) -> None:
    problem = make("Logits", teacher, (3, 5))
    want, leaf = true(problem), problem.leaves()["logits"]
    out = OBJECTIVE(hl.Logits(leaf * 1, inplace=True), hl.prepare(problem.targets), teacher=problem.teacher_source())
    out.loss.backward()
    valid = problem.targets != -100
    close(out.loss.detach(), want[0])
    close(leaf.grad[valid], want[1]["logits"][valid])


def test_strided_teachers() -> None:
    problem = make("Linear", "Logits", (3, 5))
    wide = problem.teacher.tensors["logits"].repeat_interleave(2, -1)[..., ::2]
    flipped = wide.transpose(0, 1).contiguous().transpose(0, 1)
    for logits in (wide, flipped):
        assert not logits.is_contiguous()
        check(*run(OBJECTIVE, problem, teacher=hl.Logits(logits), rows=3), true(problem))
    problem = make("Linear", "Sparse", (3, 5))
    ids, logprobs = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (problem.ids.int(), problem.logprobs))
    check(*run(OBJECTIVE, problem, teacher=hl.Sparse(ids, logprobs), rows=3), true(problem))


@pytest.mark.parametrize("teacher", ["Linear", "Sparse"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype, teacher: str) -> None:
    """A half-precision head with chunks, and autocast over a float32 one, come as close as their dtype allows."""
    problem = make("Linear", teacher, (40,), 23, ignored=False, sharp=1.0)
    want = true(problem)
    ids = {} if teacher == "Linear" else {"teacher": hl.Sparse(problem.ids, problem.logprobs.float())}
    loose = 2e-2 if dtype == torch.bfloat16 else 3e-3
    size = {n: float(g.abs().max()) for n, g in want[1].items()}
    for cast in (False, True):
        leaves = problem.leaves(torch.float32 if cast else dtype)
        with torch.autocast("cpu", dtype, enabled=cast):
            source = problem.student.source(leaves, memory=teaching.budget(problem, 2))
            teacher_source = ids.get("teacher") or problem.teacher.source(
                {n: x.float() for n, x in problem.teacher.tensors.items()}
            )
            out = OBJECTIVE(source, problem.targets, teacher=teacher_source)
        (2 * out.loss).backward()
        assert out.loss.dtype == torch.float32
        assert abs(float(out.loss.detach()) - float(want[0])) < loose * max(1.0, float(want[0]))
        for n, x in leaves.items():
            assert float((x.grad.double() - 2 * want[1][n]).abs().max()) < 4 * loose * size[n], (cast, n)


def test_segments_and_reductions_with_a_teacher() -> None:
    """A divergence is a loss like any other: reduced over segments, with a row weight, next to a sequence loss."""
    problem = make("Linear", "Linear", (3, 5))
    weight = torch.rand(3, 5, dtype=torch.float64)
    objective = hl.Objective(kd=hl.Term(jsd, reduction="seq_mean_token_mean", row_weight="w"), ce=cross_entropy)
    leaves = problem.leaves()
    found = values(problem, leaves, teaching.jsd, {}) * weight.reshape(-1)[problem.valid]
    line = torch.arange(3)[:, None].expand(3, 5).reshape(-1)[problem.valid]
    kd = torch.stack([found[line == i].mean() for i in range(3) if (line == i).any()]).mean()
    rows = problem.targets.reshape(-1)[problem.valid]
    total = kd + torch.nn.functional.cross_entropy(problem.student_scores(leaves), rows)
    grads = torch.autograd.grad(total, list(leaves.values()))
    for count in (1, 6, 99):
        got = run(objective, problem, rows=count, segments=hl.Segments.from_batch(problem.targets), w=weight)
        check(*got, (total.detach(), dict(zip(leaves, grads))))
