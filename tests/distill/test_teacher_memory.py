"""A Linear teacher's logits never exist whole, at a real size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_memory import MiB, Trace, gemm_workspace

import headloss as hl
from headloss.losses import cross_entropy, forward_kl, jsd

N, V, D = 4096, 32000, 16
TILES = 32 * MiB  # tiles of the sweeps, and what a divergence makes of them


@pytest.mark.parametrize("student, rows, loss", [("Linear", N, forward_kl), ("Linear", 512, jsd), ("Logits", 512, jsd)])
def test_budget_holds_with_a_teacher(student: str, rows: int, loss: Any) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, D).requires_grad_(), torch.randn(V, D).requires_grad_()
    teacher = hl.Linear(torch.randn(rows, 24), torch.randn(V, 24), memory=8 * MiB)
    targets = torch.randint(V, (rows,))
    objective = hl.Objective(ce=cross_entropy, kd=loss, backend="torch")
    source: Any = hl.Linear(hidden, weight, memory=16 * MiB)
    own, budget = 4 * (rows * D + V * D), 16 * MiB
    if student == "Logits":
        source = hl.Logits((hidden @ weight.T).detach().requires_grad_())
        own, budget = 4 * rows * V, 8 * MiB  # the gradient, and the teacher's own budget
    small = hl.Linear(teacher.hidden[:4], teacher.weight)
    objective(hl.Logits(torch.randn(4, V)), targets[:4], teacher=small)  # tracing is not part of the step
    with Trace() as seen:
        objective(source, targets, teacher=teacher).loss.backward()
    workspace = TILES + gemm_workspace(hidden.detach(), weight.detach(), 128)
    assert seen.peak <= budget + own + workspace, f"{seen.peak / MiB:.1f} MiB"
    assert seen.largest <= max(budget, own), "neither student's nor teacher's logits exist whole"
    assert budget + workspace < 4 * rows * V, "or the bound would say nothing"
    planned = objective.explain(source, targets, teacher=teacher).bytes
    teacher_bytes = next(n for what, n in planned.items() if what.startswith("teachers' logits"))
    assert 0 < teacher_bytes <= budget
