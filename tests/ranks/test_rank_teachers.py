"""Divergences over a sharded vocabulary, dense and sparse teachers: the same as in one process."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from test_collectives import counted, explained
from test_shards import SPLITS, V, cut, shard_of, whole_grads
from torch import Tensor

import headloss as hl
from headloss.divergence import is_divergence
from headloss.losses import LOSSES

DIVERGENCES = [name for name, fn in LOSSES.items() if is_divergence(fn)]
N, D, K = 21, 5, 4


def teachers() -> dict[str, tuple[Any, list[dict[str, Any]]]]:
    """Each teacher as one process sees it, and the terms' options to try with it."""
    torch.manual_seed(5)
    logits = torch.randn(N, V).double() * 2
    linear = hl.Linear(torch.randn(N, D + 1).double(), torch.randn(V, D + 1).double(), scale=0.7)
    ids = torch.rand(N, V).argsort(-1)[:, :K]
    named = logits.log_softmax(-1).gather(-1, ids)
    ids[3, 2:] = -1
    tails = [{"tail": tail} for tail in ("bucket", "none", "renormalise")]
    return {"Logits": (hl.Logits(logits), [{}, {"temperature": 2.0}]), "Linear": (linear, [{}]),
            "Sparse": (hl.Sparse(ids, named), tails)}  # fmt: skip


def mine_of(teacher: Any, split: str) -> Any:
    """The teacher as this rank holds it, in the student's shards."""
    shard, columns = shard_of(split)
    if isinstance(teacher, hl.Logits):
        return hl.Logits(padded(teacher.logits.T, split)[columns].T.contiguous(), shard=shard)
    if isinstance(teacher, hl.Linear):
        return hl.Linear(teacher.hidden, padded(teacher.weight, split)[columns], scale=0.7, shard=shard)
    return teacher


def padded(x: Tensor, split: str) -> Tensor:
    return torch.cat([x, torch.full((SPLITS[split][1], x.shape[1]), torch.nan).double()])


def one_divergence(name: str, split: str) -> None:
    for kind, (teacher, options) in teachers().items():
        for more in options:
            objective = hl.Objective(kd=hl.Term(LOSSES[name], **more), ce=LOSSES["cross_entropy"], backend="torch")
            for source in ("Logits", "Linear"):
                problem = oracle.make(source, (N,), V, num_segments=1)
                want = oracle.run(objective, problem, teacher=teacher)
                own, shard, _ = cut(problem, split)
                for memory in (10**4, 10**7) if source == "Linear" else (None,):
                    call = {"teacher": mine_of(teacher, split), "source": {"shard": shard}, "memory": memory}
                    got = whole_grads(oracle.run(objective, own, **call), split)
                    oracle.check(got, want, what=f"{name} {kind} {more} {source} {memory}")


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences(ranks: Any, name: str) -> None:
    for split in ("uneven", "padded"):
        ranks(2, one_divergence, name, split)


def at_two_temperatures(split: str) -> None:
    """Each divergence pulls with its own sum of slopes; a fact before them has the temperatures in another order."""
    teacher, _ = teachers()["Logits"]
    warm = [hl.Term(LOSSES[name], temperature=2.0, weight=0.5) for name in ("z_loss", "jsd")]
    objective = hl.Objective(z=warm[0], js=LOSSES["jsd"], warm=warm[1], tv=LOSSES["tvd"], backend="torch")
    for source in ("Logits", "Linear"):
        problem = oracle.make(source, (N,), V, num_segments=1)
        own, shard, _ = cut(problem, split)
        found = oracle.run(objective, own, teacher=mine_of(teacher, split), source={"shard": shard})
        oracle.check(whole_grads(found, split), oracle.run(objective, problem, teacher=teacher), what=source)


def test_divergences_at_two_temperatures(ranks: Any) -> None:
    ranks(2, at_two_temperatures, "uneven")


def compiled(split: str) -> None:
    """A graph keeps what a pull needs of a second read: over a shard, the sums of slopes too."""
    torch.manual_seed(5)
    shard, columns = shard_of(split)
    mine, theirs = (x[:, columns].contiguous() for x in torch.randn(2, N, V).double().unbind())
    mine.requires_grad_()
    objective = hl.Objective(js=LOSSES["jsd"], kl=LOSSES["reverse_kl"], backend="torch")

    def step(mine: Tensor, theirs: Tensor) -> Tensor:
        return objective(hl.Logits(mine, shard=shard), teacher=hl.Logits(theirs, shard=shard)).loss

    found = torch.compile(step, backend="aot_eager", fullgraph=True)(mine, theirs)
    want = step(mine, theirs)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(torch.autograd.grad(found, mine), torch.autograd.grad(want, mine))


def test_compiled(ranks: Any) -> None:
    ranks(2, compiled, "uneven")


def collectives() -> None:
    """One pass: the same single gather.  A second read at the row: one all-reduce more."""
    for name in DIVERGENCES:
        objective = hl.Objective(kd=LOSSES[name], ce=LOSSES["cross_entropy"])
        for kind, (teacher, _) in teachers().items():
            for source in ("Logits", "Linear"):
                problem = oracle.make(source, (N,), V, num_segments=1, bad=False)
                own, shard, _ = cut(problem, "uneven")
                memory = {"memory": 10**4} if source == "Linear" else {}
                said = own.source(own.leaves(torch.float64), shard=shard, **memory)
                call = {"teacher": mine_of(teacher, "uneven")}
                found, _ = counted(lambda: objective(said, own.targets, **call).loss.backward())
                assert found == explained(objective, said, own.targets, **call), (name, kind, source)
                if source == "Logits":
                    second = kind != "Sparse" and not hasattr(LOSSES[name], "one_pass")
                    assert found == {"all_gather": 1, **({"all_reduce": 1} if second else {})}, (name, kind)


def test_collectives(ranks: Any) -> None:
    ranks(2, collectives)


def routed(split: str) -> None:
    """A teacher for each row, its rows apart: ranks of unlike widths walk the same chunks, whatever they hold."""
    torch.manual_seed(5)
    heads = [(torch.randn(N, D).double(), torch.randn(V, D).double()) for _ in range(2)]
    route = torch.arange(N) % 3 - 1
    shard, columns = shard_of(split)
    whole = hl.Routed({str(i): hl.Linear(*head) for i, head in enumerate(heads)}, route)
    mine = {str(i): hl.Linear(h, padded(w, split)[columns], shard=shard) for i, (h, w) in enumerate(heads)}
    for name in ("forward_kl", "jsd"):
        objective = hl.Objective(kd=LOSSES[name], ce=LOSSES["cross_entropy"], backend="torch")
        for source, memory in (("Logits", None), ("Linear", 10**4), ("Linear", 10**7)):
            problem = oracle.make(source, (N,), V, num_segments=1)
            want = oracle.run(objective, problem, teacher=whole)
            own, shard, _ = cut(problem, split)
            call = {"teacher": hl.Routed(mine, route), "source": {"shard": shard}, "memory": memory}
            oracle.check(whole_grads(oracle.run(objective, own, **call), split), want, what=f"{name} {source} {memory}")


@pytest.mark.parametrize("split", ["uneven", "padded", "empty first"])
def test_routed_teachers(ranks: Any, split: str) -> None:
    ranks(2, routed, split)
