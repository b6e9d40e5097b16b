"""Rows that keep some columns of a vocabulary that ranks share: each has its own of them, and one collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import RankError
from test_collectives import counted

import headloss as hl
from headloss.losses import forward_kl, grpo, jsd

N, V, D = 7, 13, 4


def problem() -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(5)
    hidden, weight, other = (torch.randn(n, D, generator=g, dtype=torch.float64) for n in (N, V, V))
    targets = torch.randint(V, (N,), generator=g)
    targets[3] = -100
    rows = [torch.randperm(V, generator=g)[:k] for k in (3, 1, V, 0, 5, 2, 1)]
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    inputs = {"advantage": torch.randn(N, generator=g).double(), "old_logprob": -torch.rand(N, generator=g).double()}
    return hidden, weight, other, targets, hl.Support.from_csr(torch.cat(rows), offsets), inputs


def kept(kind: str) -> None:
    hidden, weight, other, targets, support, inputs = problem()
    objective = hl.Objective(rl=grpo, kl=forward_kl, js=jsd, metrics=["entropy", "accuracy", "mean_logprob"])
    make = lambda h, w, **more: hl.Linear(h, w, **more) if kind == "Linear" else hl.Logits(h @ w.T, **more)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    want = objective(make(*leaves), targets, support=support, teacher=make(hidden, other), **inputs)
    want.loss.backward()
    rank, size = dist.get_rank(), dist.get_world_size()
    cuts = [0, 6, V] if size == 2 else [0, 6, 6, 9, V]  # one rank has none
    start, end = cuts[rank : rank + 2]
    shard = hl.VocabShard(dist.group.WORLD, start, V, width=7)
    mine = hidden.clone().requires_grad_(), weight[start:end].clone().requires_grad_()
    teacher = make(hidden, other[start:end], shard=shard)
    out = objective(make(*mine, shard=shard), targets, support=support, teacher=teacher, **inputs)
    out.loss.backward()
    torch.testing.assert_close(out.loss, want.loss, rtol=1e-10, atol=1e-10)
    for name, metric in want.metrics.items():
        assert float(out.metrics[name]) == pytest.approx(float(metric), abs=1e-10)
    torch.testing.assert_close(mine[1].grad, leaves[1].grad[start:end], rtol=1e-10, atol=1e-10)
    calls, _ = counted(
        lambda: hl.Objective(rl=grpo)(make(*mine, shard=shard), targets, support=support, **inputs).loss.detach()
    )
    assert calls == {"all_gather": 1}, calls
    if kind == "Linear":
        torch.testing.assert_close(mine[0].grad, leaves[0].grad, rtol=1e-10, atol=1e-10)


def other_sets() -> None:
    hidden, weight, _, targets, _, inputs = problem()
    start, end = ((0, 6), (6, V))[dist.get_rank()]
    ids = torch.tensor([[1, 2 + dist.get_rank()]] * N)
    shard = hl.VocabShard(dist.group.WORLD, start, V, width=7)
    source = hl.Linear(hidden, weight[start:end], shard=shard)
    hl.Objective(rl=grpo)(source, targets, support=hl.Support.from_padded(ids), **inputs)


@pytest.mark.parametrize("size, kind", [(2, "Linear"), (2, "Logits"), (4, "Linear")])
def test_each_rank_keeps_its_own_columns(ranks: Any, size: int, kind: str) -> None:
    ranks(size, kept, kind)


def test_ranks_that_keep_other_columns_are_told(ranks: Any) -> None:
    with pytest.raises(RankError, match="support: the kept columns differ"):
        ranks(2, other_sets)
