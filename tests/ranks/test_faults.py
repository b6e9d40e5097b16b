"""A rank that fails: it raises before any collective, and the others end in an error, not in silence."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import Calls, RankError, Ranks, own_group

import headloss as hl
from headloss.losses import cross_entropy, forward_kl, gspo

TIMEOUT = 2.0  # of the group's collectives
V = 12


def call(kind: str, group: Any, spoil: bool = False) -> None:
    """One step of a sharded head, or of documents split over ranks; rank 1's targets may be out of range."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    targets = torch.randint(V, (10,))
    if spoil and rank == 1:
        targets[3] = V
    hidden, weight = torch.randn(10, 4).requires_grad_(), torch.randn(V, 4).requires_grad_()
    if kind == "documents":
        segments = hl.Segments.from_ids(torch.zeros(10).long(), 1, group=group)
        out = hl.Objective(rl=gspo)(hl.Linear(hidden, weight), targets, segments=segments, advantage=torch.ones(10))
    else:
        shard = hl.VocabShard(group, 6 * rank, V)
        mine = weight[6 * rank :][:6]
        source = hl.Logits(hidden @ mine.T, shard=shard) if kind == "Logits" else hl.Linear(hidden, mine, shard=shard)
        out = hl.Objective(ce=cross_entropy)(source, targets)
    out.loss.backward()


def invalid_target(kind: str) -> tuple[str, float]:
    group = own_group(timeout=timedelta(seconds=TIMEOUT))
    call(kind, dist.group.WORLD)
    dist.barrier()
    start, told = time.monotonic(), "no error"
    with Calls() as calls:
        try:
            call(kind, group, spoil=True)
        except (ValueError, RuntimeError) as error:
            told = f"{type(error).__name__}: {error}"
    if dist.get_rank() == 1:
        assert calls.count == {}, "a collective came before the check"
    took = time.monotonic() - start
    dist.barrier()  # rank 1 is still there, but never joined
    return told, took


@pytest.mark.parametrize("kind", ["Logits", "Linear", "documents"])
def test_invalid_target_on_one_rank(ranks: Any, kind: str) -> None:
    (alone, took), (spoilt, _) = ranks(2, invalid_target, kind)
    assert spoilt.startswith("ValueError: targets: wanted values in [0, 12) or -100, got 12")
    assert alone.startswith("RuntimeError:")
    assert "did not join in time" in alone and "its own error came first" in alone
    assert took < TIMEOUT + 5


def disagreement(what: str) -> None:
    """Each rank is right by itself, together they are wrong: every rank says so, and none is left waiting."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(10, 4), torch.randn(V, 4), torch.randint(V, (10,))
    ids, logprobs = torch.randint(V, (10, 3)), torch.randn(10, 3).log_softmax(-1)
    mine, start = slice(6 * rank, 6 * rank + 6), 6 * rank
    if what == "whole weight":
        mine = slice(0, V)
    elif what == "same start":
        start = 0
    elif what == "gap" and rank == 0:
        mine = slice(0, 5)
    elif what == "targets" and rank == 1:
        targets[4] = (targets[4] + 1) % V
    elif what == "ids" and rank == 1:
        ids = ids.flip(0)
    objective = hl.Objective(ce=cross_entropy, kd=forward_kl)
    shard = hl.VocabShard(dist.group.WORLD, start, V, width=V)
    held = weight[mine].clone().requires_grad_()
    message = "shard: each of the 12 columns must be on one rank of the group, but the ranks hold 0 to"
    for source in (
        hl.Logits(hidden @ held.T, shard=shard),
        hl.Linear(hidden, held, shard=shard, memory=2 * 4 * V * 3),  # four chunks
    ):
        told = {"targets": "targets: they differ", "ids": "teacher: the ids"}.get(what, message)
        with pytest.raises(ValueError, match=told):
            objective(source, targets, teacher=hl.Sparse(ids, logprobs))
    dist.barrier()


@pytest.mark.parametrize("what", ["whole weight", "same start", "gap", "targets", "ids"])
def test_ranks_that_disagree(ranks: Any, what: str) -> None:
    ranks(2, disagreement, what)


def killed() -> None:
    """Rank 1 dies between two chunks of the second step."""
    call("Linear", dist.group.WORLD)
    if dist.get_rank() == 1:
        torch.mm = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    call("Linear", dist.group.WORLD)


def test_a_rank_killed_in_the_middle_of_a_step() -> None:
    pair = Ranks(2, group_timeout=10)  # of its own: it does not survive
    try:
        with pytest.raises(RankError) as failed:
            pair.run(killed, timeout=60)
    finally:
        pair.stop()
    told, gone = failed.value.errors
    assert gone is not None and "exit code -9" in gone
    assert told is not None and "did not join in time, or died" in told
