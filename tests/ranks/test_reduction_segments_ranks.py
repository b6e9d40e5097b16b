"""Prompts whose responses lie on two ranks: the ranks' losses and gradients add up to those of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import headloss as hl
from headloss.losses import gspo

N, V, D = 12, 11, 4
RESPONSES = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 4, 4])
PROMPTS = torch.tensor([0, 0, 0, 1, 1, 0, 1, 1, 2, 2, 2, 2])


def summed() -> None:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    hidden, weight, advantage = draw(N, D), draw(V, D), draw(N)
    targets = torch.randint(0, V, (N,), generator=generator)
    old = torch.log_softmax(hidden @ weight.T, -1)[range(N), targets] + draw(N) / 8
    targets[[1, 7]] = -100
    rank = dist.get_rank()
    for reduction in ("seq_mean_token_mean", "seq_mean_token_sum"):
        made = hl.Objective(rl=hl.Term(gspo, low=0.2, high=0.2, reduction=reduction, reduction_segments="prompts"))
        whole = weight.clone().requires_grad_()
        given: dict[str, Any] = {"segments": hl.Segments.from_ids(RESPONSES), "prompts": hl.Segments.from_ids(PROMPTS)}
        want = made(hl.Linear(hidden, whole), targets, advantage=advantage, old_logprob=old, **given)
        want.loss.backward()
        mine = slice(0, 6) if rank == 0 else slice(6, 12)
        own = weight.clone().requires_grad_()
        prompts = hl.Segments.from_ids(PROMPTS[mine], 3, group=dist.group.WORLD)
        given = {"segments": hl.Segments.from_ids(RESPONSES[mine], 5), "prompts": prompts}
        given |= {"advantage": advantage[mine], "old_logprob": old[mine]}
        source = hl.Linear(hidden[mine], own)
        out = made(source, targets[mine], **given)
        out.loss.backward()
        loss = out.loss.detach().clone()
        for x in (loss, own.grad):
            dist.all_reduce(x)
        torch.testing.assert_close(loss, want.loss.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(own.grad, whole.grad, rtol=1e-10, atol=1e-10)
        if rank == 0:  # asks nobody
            plan = made.explain(source, targets[mine], **given)
            assert plan.collectives == {"all-reduce of the counts of reduction segments": 1}


def test_prompts_on_two_ranks(ranks: Any) -> None:
    ranks(2, summed)
