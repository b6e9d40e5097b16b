"""A mix of policy terms over a sharded vocabulary makes no more collectives than its first term alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from test_collectives import N, V, counted, explained, source

import headloss as hl
from headloss.losses import entropy_bonus, gspo, kl_to_reference, z_loss

ALONE = hl.Objective(rl=gspo, backend="torch")
MIX = hl.Objective(
    rl=gspo, z=hl.Term(z_loss, weight=1e-3), bonus=hl.Term(entropy_bonus, weight=1e-2),
    kl=hl.Term(kl_to_reference, weight=0.1), metrics=["entropy", "accuracy", "perplexity"], backend="torch",
)  # fmt: skip


def step(objective: hl.Objective, *arguments: Any, **call: Any) -> None:
    objective(*arguments, **call).loss.backward()


def mix() -> None:
    torch.manual_seed(2)
    targets = torch.randint(V, (N,))
    segments = hl.Segments.from_ids(torch.arange(N) // 4)
    given = {"advantage": torch.randn(N), "old_logprob": -torch.rand(N), "segments": segments}
    for kind, chunks in (("Logits", 1), ("Linear", 1), ("Linear", 5)):
        found = []
        for objective, more in ((ALONE, {}), (MIX, {"ref_logprob": -torch.rand(N)})):
            said = source(kind, chunks)
            calls, _ = counted(partial(step, objective, said, targets, **given, **more))
            assert calls == explained(objective, said, targets, **given, **more)
            found.append(calls)
        assert found[0] == found[1]
        assert found[0]["all_gather"] >= chunks


def test_a_mix_makes_no_more_collectives_than_one_loss(ranks: Any) -> None:
    ranks(2, mix)
