"""How many collectives a call makes, when they are waited for, and that `explain` says so beforehand."""

from __future__ import annotations

import sys
from typing import Any

import oracle
import pytest
import test_documents
import torch
import torch.distributed as dist
from spawn import Calls
from torch.distributed.device_mesh import DeviceMesh

import headloss as hl
from headloss.engine import heads
from headloss.losses import LOSSES

N, V, D = 23, 37, 5
FACTS = ("lse", "logprob", "mean_logprob", "entropy", "sum_p2", "max_logprob", "argmax", "min_logit")
FEW = hl.Objective(ce=LOSSES["cross_entropy"])
MANY = hl.Objective(
    ce=hl.Term(LOSSES["cross_entropy"], label_smoothing=0.1),
    z=hl.Term(LOSSES["z_loss"], weight=1e-4),
    h=hl.Term(LOSSES["entropy_bonus"], weight=0.1),
    hot=hl.Term(LOSSES["entropy_bonus"], temperature=2.0),
    f=LOSSES["focal"],
    metrics=["entropy", "accuracy", "perplexity", "sum_p2", "argmax"],
)


def source(kind: str, chunks: int = 1, **more: Any) -> Any:
    torch.manual_seed(1)
    rank = dist.get_rank()
    mine = slice(19 * rank, min(V, 19 * (rank + 1)))
    shard = hl.VocabShard(dist.group.WORLD, mine.start, V, **more)
    if kind == "Logits":
        return hl.Logits(torch.randn(N, V)[:, mine].clone().requires_grad_(), shard=shard)
    hidden, weight = torch.randn(N, D).requires_grad_(), torch.randn(V, D)[mine].clone().requires_grad_()
    rows = -(-N // chunks)
    return hl.Linear(hidden, weight, shard=shard, memory=rows * 2 * 4 * 19)


def counted(function: Any) -> tuple[dict[str, int], list[str]]:
    """What `function` sent, seen twice: by the functions of torch.distributed, and by the backend's own counter."""
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    with Calls() as calls:
        function()
    assert group._get_sequence_number_for_group() - before == sum(calls.count.values()), calls.count
    return calls.count, calls.events


def explained(objective: hl.Objective, said: Any, targets: Any, **call: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for what, n in objective.explain(said, targets, **call).collectives.items():
        kind = "all_gather" if what.startswith("all-gather") else "all_reduce"
        found[kind] = found.get(kind, 0) + n
    return found


def one_gather() -> None:
    targets = torch.randint(V, (N,))
    targets[::5] = -100
    for wanted in (["logprob"], ["entropy"], FACTS, [*FACTS, ("entropy", 2.0), ("lse", 0.5)]):
        for kind in ("Logits", "Linear"):
            for chunks in (1, 6) if kind == "Linear" else (1,):
                said = source(kind, chunks)

                def forward() -> None:
                    nonlocal facts
                    facts = hl.row_facts(said, targets, want=wanted)

                facts: Any = None
                assert counted(forward)[0] == {"all_gather": 1}, (kind, wanted)
                total = sum(x.sum() for name, x in facts.items() if name not in ("argmax", "max_logprob", "min_logit"))
                reduced = {"all_reduce": 1} if kind == "Linear" else {}  # of the gradient of hidden
                assert counted(total.backward)[0] == reduced, (kind, wanted)
    for objective in (FEW, MANY):
        said = source("Logits")
        calls, _ = counted(lambda: objective(said, targets).loss.backward())
        assert calls == explained(objective, said, targets) == {"all_gather": 1}


def test_one_gather_whatever_is_wanted(ranks: Any) -> None:
    ranks(2, one_gather)


def one_gather_a_chunk() -> None:
    targets = torch.randint(V, (N,))
    for chunks in (1, 2, 6, N):
        for objective in (FEW, MANY):
            said = source("Linear", chunks)
            plan = objective.explain(said, targets)
            calls, _ = counted(lambda: objective(said, targets).loss.backward())
            assert calls == {"all_gather": plan.chunks, "all_reduce": 1}
            assert calls == explained(objective, said, targets)
            assert plan.chunks >= chunks
            said = source("Linear", chunks)
            calls, _ = counted(lambda: objective.forward_backward(said, targets))
            assert calls == {"all_gather": plan.chunks, "all_reduce": 1}
            with torch.no_grad():  # evaluation has nothing to overlap: all partials travel at once
                said = source("Linear", chunks)
                assert counted(lambda: objective(said, targets))[0] == {"all_gather": 1}
    said = source("Linear", 4, partial_hidden=True)
    calls, _ = counted(lambda: MANY(said, targets).loss.backward())
    assert calls == explained(MANY, said, targets) == {"all_gather": 4}
    frozen = source("Linear", 4)
    frozen.hidden.requires_grad_(False)
    assert counted(lambda: MANY(frozen, targets).loss.backward())[0] == {"all_gather": 4}


def test_one_gather_a_visited_chunk(ranks: Any) -> None:
    ranks(2, one_gather_a_chunk)


def batch_losses() -> None:
    """A loss that needs every fact first reads all chunks, and still gathers once."""
    centred = hl.Objective(mine=lambda logprob: -((logprob - logprob.mean()) ** 2))
    targets = torch.randint(V, (N,))
    said = source("Linear", 6)
    calls, _ = counted(lambda: centred(said, targets).loss.backward())
    assert calls == explained(centred, said, targets) == {"all_gather": 1, "all_reduce": 1}


def test_losses_that_mix_rows(ranks: Any) -> None:
    ranks(2, batch_losses)


def overlap() -> None:
    """Chunk i + 1's GEMM is issued before chunk i's gather is waited for, and two chunks fit the budget.

    The second gather waits for the first, which tells what differs between ranks.
    """
    targets = torch.randint(V, (N,))
    said = source("Linear", 5)
    _, events = counted(lambda: FEW(said, targets).loss.backward())
    logits = [i for i, e in enumerate(events) if e == "gemm"]
    gathers = [i for i, e in enumerate(events) if e.startswith("all_gather")]
    waits = [i for i, e in enumerate(events) if e == "wait"]
    chunks = said_chunks = FEW.explain(said, targets).chunks
    assert len(gathers) == chunks == 5
    visible = [e for e in events if e == "wait" or e.startswith("all_gather")]
    assert [e == "wait" for e in visible] == [False, True, False, *([False, True] * (said_chunks - 2)), True]
    for i in range(chunks - 1):
        assert gathers[i] < gathers[i + 1] < waits[i] if i else gathers[0] < waits[0] < gathers[1]
        assert any(gathers[i] < g < waits[i] for g in logits), "a gather is waited for before the next chunk is made"
        between = [g for g in logits if gathers[i] < g < gathers[i + 1]]
        assert between, "no GEMM between one gather and the next"
    held: list[int] = []
    real = torch.empty

    def watched(*size: Any, **options: Any) -> Any:
        made = real(*size, **options)
        of_a_head = sys._getframe(1).f_code.co_filename == heads.__file__  # sweeps have tiles of their own
        if of_a_head and made.ndim == 2 and made.shape[-1] >= said.weight.shape[0]:
            held.append(made.shape[0] * said.weight.shape[0] * made.element_size())
        return made

    torch.empty = watched
    try:
        FEW(said, targets)
    finally:
        torch.empty = real
    assert len(held) == 2 and sum(held) <= said.memory, (held, said.memory)


def test_gathers_overlap_with_the_next_chunk(ranks: Any) -> None:
    ranks(2, overlap)


def refused(how: str) -> None:
    """One rank has more chunks than the other: both hear of it, and neither is left in a collective by itself."""
    targets = torch.arange(N) % V
    want = float(FEW(source("Linear", 4), targets).loss.detach())
    for _ in range(2):
        mine = source("Linear", 1 if dist.get_rank() and how == "memory" else 4)
        with (
            pytest.raises(ValueError, match="differ between ranks"),
            torch.set_grad_enabled(not (dist.get_rank() and how == "no grad")),
        ):
            FEW(mine, targets)
        assert float(FEW(source("Linear", 4), targets).loss.detach()) == want


@pytest.mark.parametrize("how", ["memory", "no grad"])
def test_a_call_after_a_refusal(ranks: Any, how: str) -> None:
    ranks(2, refused, how)


def on_documents(name: str) -> None:
    """Segments across ranks: one all-reduce of counts, and one for each sum over segments, each way."""
    fn = LOSSES[name]
    for kind in ("Logits", "Linear"):
        problem = test_documents.long_documents(oracle.problem_for(fn, kind, (23,), vocab=19))
        mine = test_documents.rows_of("no rows", dist.get_world_size(), dist.get_rank())
        own = test_documents.cut(problem, mine, dist.group.WORLD)
        for reduction in ("token_mean", "seq_mean_token_mean", "weighted_mean"):
            objective = hl.Objective(term=hl.Term(fn, reduction=reduction))
            calls, _ = counted(lambda: test_documents.call(objective, own))
            arguments = oracle.call_arguments(own)
            said = own.source(own.leaves())
            assert calls == explained(objective, said, own.targets, segments=own.segments, **arguments), (name, kind)


@pytest.mark.parametrize("name", ["grpo", "gspo", "vespo", "dpo", "kto", "gmpo"])
def test_segments_across_ranks(ranks: Any, name: str) -> None:
    ranks(2, on_documents, name)


def counting() -> None:
    targets = torch.randint(V, (N,))
    targets[: 3 + dist.get_rank()] = -100
    segments = hl.Segments.from_ids(torch.arange(N) // 4)
    group = dist.group.WORLD
    found: Any = None

    def count(*args: Any) -> None:
        nonlocal found
        found = hl.count(*args)

    assert counted(lambda: count(targets, segments, group))[0] == {"all_reduce": 1}
    assert found["num_items"] == 20 + 19 and found["num_segments"] == 6 + 5
    assert counted(lambda: count(targets, None, group))[0] == {"all_reduce": 1}
    assert dict(found) == {"num_items": 39}
    assert counted(lambda: count(targets, segments))[0] == {}
    split = hl.Segments.from_ids(torch.arange(N) // 4 + 6 * dist.get_rank() // 2, 9, group=group)
    for arguments in ((targets, split, group), (targets, split)):
        assert counted(lambda: count(*arguments))[0] == {"all_reduce": 1}
        ids = torch.cat([torch.arange(3, N) // 4, torch.arange(4, N) // 4 + 3])
        assert found["num_items"] == 39 and found["num_segments"] == len(ids.unique())


def test_count_is_one_collective(ranks: Any) -> None:
    ranks(2, counting)


def metering() -> None:
    """Nothing in the step, one all-gather when it is time to log, and one read."""
    targets = torch.randint(V, (N,))
    targets[::7] = -100
    torch.manual_seed(dist.get_rank())
    logits = torch.randn(3, N, V).double()
    meter, alone = hl.Meter(), []
    assert counted(lambda: [meter.add(MANY(hl.Logits(x), targets).metrics) for x in logits])[0] == {}
    alone = [MANY(hl.Logits(x), targets).metrics for x in logits]
    found: Any = None

    def compute() -> None:
        nonlocal found
        found = meter.compute(dist.group.WORLD)

    reads: list[str] = []
    kept = {name: getattr(torch.Tensor, name) for name in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy")}
    for name, method in kept.items():
        setattr(torch.Tensor, name, lambda self, *a, n=name, m=method: reads.append(n) or m(self, *a))
    try:
        calls, _ = counted(compute)
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)
    assert calls == {"all_gather": 1}
    assert reads == ["tolist"], reads
    everything: list[Any] = [None, None]
    dist.all_gather_object(everything, alone)
    whole = hl.Meter()
    for one in everything:
        for metrics in one:
            whole.add(metrics)
    truth = whole.compute()
    assert truth.keys() == found.keys()
    for name, x in truth.items():
        assert found[name] == pytest.approx(x, rel=1e-12), name
    mixed = hl.Meter().add({f"{name}{dist.get_rank()}": m for name, m in alone[0].items()})
    with pytest.raises(ValueError, match="different metrics"):
        mixed.compute(dist.group.WORLD)
    fewer = dict([*alone[0].items()][: 1 + dist.get_rank()])
    for held in (fewer, fewer if dist.get_rank() else {}):  # not even as many, or nothing at all
        with pytest.raises(ValueError, match=f"different metrics: this one has .*, rank {1 - dist.get_rank()} of"):
            hl.Meter().add(held).compute(dist.group.WORLD)
    assert hl.Meter().compute(dist.group.WORLD) == {}
    turned = [*truth] if dist.get_rank() else [*truth][::-1]
    again = hl.Meter()
    for one in alone:
        again.add({name: one[name] for name in turned})
    found = again.compute(dist.group.WORLD)
    assert [*found] == turned and all(found[name] == pytest.approx(x, rel=1e-12) for name, x in truth.items())


def test_meter_is_one_collective(ranks: Any) -> None:
    ranks(2, metering)


def test_a_mesh_is_taken_for_its_group():
    """Wherever a group goes: counts, segments, a meter; of several dimensions, one must be named."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, square = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "cp"))
        targets = torch.tensor([3, -100, 1, 2])
        for group in (mesh, square["cp"]):
            segments = hl.Segments.from_ids(torch.tensor([0, 0, 1, 1]), 2, group=group)
            assert segments.group is group.get_group()
            counts = hl.count(targets, segments, group)
            assert (int(counts.num_items), int(counts.num_segments)) == (3, 2)
            out = hl.Objective(gspo=hl.Term(LOSSES["gspo"], reduction="seq_mean_token_mean"))(
                hl.Logits(torch.randn(4, 5)), targets, segments=segments, advantage=torch.ones(4), **counts
            )
            assert set(hl.Meter().add(out.metrics).compute(group)) == set(out.metrics)
        for make in (lambda: hl.count(targets, group=square), lambda: hl.Meter().compute(square)):
            with pytest.raises(ValueError, match=r"group: wanted a DeviceMesh of one dimension, got 2; pass mesh\["):
                make()
    finally:
        dist.destroy_process_group()
