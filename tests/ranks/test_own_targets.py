"""A term's own targets where two ranks share the vocabulary: each picks from the columns it holds."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import headloss as hl
from headloss.losses import cross_entropy, z_loss

N, V, D = 6, 11, 4


def picked() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, V))
    targets, own = (torch.randint(0, V, (N,), generator=generator) for _ in range(2))
    own[:2] = torch.tensor([0, V - 1])  # one column of each rank
    own[3] = -100
    objective = hl.Objective(
        ce=cross_entropy, nll=hl.Term(cross_entropy, targets="own", weight=0.5), z=z_loss, backend="torch"
    )
    leaf = weight.clone().requires_grad_()
    logp = torch.log_softmax(hidden @ leaf.T, -1)
    kept = [i for i in range(N) if i != 3]
    want = -logp[range(N), targets].mean() - 0.5 * logp[kept, own[kept]].sum() / N
    want = want + (hidden @ leaf.T).logsumexp(-1).square().mean()
    want.backward()
    rank, cut = dist.get_rank(), 7
    start, end = (0, cut) if rank == 0 else (cut, V)
    mine = weight[start:end].clone().requires_grad_()
    for memory in ("1GiB", 2 * 8 * cut):
        mine.grad = None
        shard = hl.VocabShard(dist.group.WORLD, start, V)
        out = objective(hl.Linear(hidden, mine, shard=shard, memory=memory), targets, own=own)
        out.loss.backward()
        torch.testing.assert_close(out.loss.detach(), want.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(mine.grad, leaf.grad[start:end], rtol=1e-10, atol=1e-10)

        w = torch.rand(V, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        alone = weight.clone().requires_grad_()
        want_w = torch.nn.functional.cross_entropy(hidden @ alone.T, targets, weight=w, label_smoothing=0.1)
        weighed = hl.Objective(ce=hl.Term(cross_entropy, label_smoothing=0.1, reduction="weighted_mean"))
        source = hl.Linear(hidden, mine, shard=shard, memory="1GiB")
        out = weighed(source, targets, class_weight=w)
        torch.testing.assert_close(out.loss, want_w, rtol=1e-10, atol=1e-10)
        (got,), (whole,) = torch.autograd.grad(out.loss, mine), torch.autograd.grad(want_w, alone)
        torch.testing.assert_close(got, whole[start:end], rtol=1e-10, atol=1e-10)


def test_picked_from_two_ranks(ranks: Any) -> None:
    ranks(2, picked)
