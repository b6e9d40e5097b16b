"""torch.compile around the head: what stands before and after is compiled, the head itself runs as it is."""

from __future__ import annotations

import pytest
import torch

import headloss as hl
from headloss.losses import cross_entropy, z_loss

OBJECTIVE = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=0.1), metrics=["entropy"])


def step(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return OBJECTIVE(hl.Linear(hidden.tanh(), weight), targets).loss * 2


def test_compiled_around_the_head() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager")
    for rows, ignored in ((7, 0), (7, 3), (12, 5)):
        hidden = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(31, 5, dtype=torch.float64, requires_grad=True)
        targets = torch.randint(31, (rows,)).index_fill(0, torch.arange(ignored), -100)
        want, found = step(hidden, weight, targets), compiled(hidden, weight, targets)
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(
            torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(want, (hidden, weight))
        )


def test_a_whole_graph_is_refused_with_the_reason() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="headloss runs its own sweeps"):
        compiled(torch.randn(4, 5), torch.randn(31, 5), torch.randint(31, (4,)))
