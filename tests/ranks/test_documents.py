"""Documents split across ranks: shares of the loss, gradients and metrics, against the whole batch in one process.

Each rank holds some of the rows and the whole vocabulary.  Its loss is its share: the shares sum to the loss of the
whole batch, the gradients of its hidden rows are those of the whole batch, the weight's sum to that of the whole batch.
"""

from __future__ import annotations

import inspect
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from oracle import LOSSES
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import headloss as hl
from headloss.reductions import REDUCTIONS

N, V = 23, 19


def rows_of(layout: str, size: int, rank: int) -> Tensor:
    """The numbers of the rows that a rank holds."""
    if layout == "contiguous":
        return torch.arange(N).tensor_split(size)[rank]
    if layout == "zigzag":  # rank r has pieces r and 2 size - 1 - r, so that causal attention costs the same everywhere
        pieces = torch.arange(N).tensor_split(2 * size)
        return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])
    ends = {
        "ragged": {2: [19], 4: [2, 13, 19]},
        "no rows": {2: [N], 4: [9, 9, 17]},
        "as segments": {2: [6], 4: [6, 9, 17]},
    }
    return torch.arange(N).tensor_split(ends[layout][size])[rank]


def long_documents(problem: oracle.Problem) -> oracle.Problem:
    """Six segments: 0 on three of four ranks, 1 has one row, 2 none, 3 on two ranks, 5 ignored rows, 4 the rest."""
    ids = torch.tensor([4] * 2 + [0] * 13 + [1] + [3] * 4 + [5] + [4] * 2)
    targets = problem.targets.clone()
    targets[ids == 5] = -100
    targets[15] = 3
    return oracle.replace(problem, segments=hl.Segments.from_ids(ids, 6), targets=targets)


def cut(problem: oracle.Problem, mine: Tensor, group: Any) -> oracle.Problem:
    by_row = lambda x: isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == N
    assert problem.segments is not None
    whole = hl.Segments.from_ids(problem.segments.ids, problem.segments.num_segments, group=group)
    return oracle.replace(
        problem,
        tensors={n: x[mine] if n in ("hidden", "logits") else x for n, x in problem.tensors.items()},
        targets=problem.targets[mine],
        segments=whole.select(mine),
        inputs={n: x[mine] if by_row(x) and n != "pairs" else x for n, x in problem.inputs.items()},
        teacher=None if problem.teacher is None else problem.teacher[mine],
        ids=None if problem.ids is None else problem.ids[mine],
    )


def call(objective: hl.Objective, problem: oracle.Problem, **more: Any) -> tuple[hl.Output, dict[str, Tensor]]:
    leaves = problem.leaves()
    source = problem.source(leaves, **more)
    out = objective(source, problem.targets, segments=problem.segments, **oracle.call_arguments(problem))
    out.loss.backward()
    return out, {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items()}


def total(x: Tensor, group: Any) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def compare(
    objective: hl.Objective, problem: oracle.Problem, layout: str, what: str, chunks: tuple[int, ...] = (4,)
) -> None:
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    want = oracle.answer(objective, problem)
    mine = rows_of(layout, size, rank)
    own = cut(problem, mine, group)
    for memory in [problem.budget(rows) for rows in chunks] if problem.kind == "Linear" else [None]:
        out, grads = call(objective, own, **({"memory": memory} if memory else {}))
        shares = oracle.Answer(
            loss=total(out.loss.detach(), group),
            terms={n: total(x, group) for n, x in out.terms.items()},
            metrics=hl.Meter().add(out.metrics).compute(group),
            grads={n: total(g, group) for n, g in grads.items() if n not in ("hidden", "logits")},
        )
        oracle.check(shares, want, what=f"{what} {layout} {memory}")
        for n in grads.keys() & {"hidden", "logits"}:
            torch.testing.assert_close(
                grads[n], want.grads[n][mine], rtol=1e-10, atol=1e-10, msg=f"{what} {layout} {n}"
            )


def one_loss(name: str, layouts: list[str], full: bool = True) -> None:
    """Without `full`, layouts take turns with the reductions."""
    fn = LOSSES[name]
    for kind in ("Logits", "Linear"):
        extra = ("token_weight",)
        problem = long_documents(oracle.problem_for(fn, kind, (N,), vocab=V, extra_inputs=extra, bad=False))
        problem = oracle.poison(problem)
        by_segment = inspect.signature(fn).parameters.keys() & {"segments"}
        for reduction in REDUCTIONS if kind == "Logits" else ("token_mean", "seq_mean_token_mean", "weighted_mean"):
            more: dict[str, Any] = {"length": 7.0} if reduction == "seq_mean_token_sum_norm" else {}
            if reduction == "weighted_mean" and not by_segment:
                more["row_weight"] = "token_weight"
            term = hl.Term(fn, reduction=reduction, **more)
            known = {*oracle.inputs_of(fn), *more.values()}
            own = oracle.replace(problem, inputs={n: x for n, x in problem.inputs.items() if n in known})
            objective = hl.Objective(term=term, metrics=["entropy"], backend="torch")
            turn = list(REDUCTIONS).index(reduction) % len(layouts)
            for layout in layouts if full or reduction == "token_mean" else layouts[turn : turn + 1]:
                chunks = (1, 4, 1000) if reduction == "token_mean" and layout == layouts[0] else (4,)
                compare(objective, own, layout, f"{name} {kind} {reduction}", chunks)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"clip_cov", "kl_cov"}))  # of the rows of one call
def test_every_loss(ranks: Any, name: str, request: pytest.FixtureRequest) -> None:
    ranks(2, one_loss, name, ["ragged", "no rows", "zigzag"], request.config.getoption("--slow"))


@pytest.mark.parametrize("name", ["cross_entropy", "gspo", "dpo", "kto"])
def test_documents_on_three_ranks(ranks: Any, name: str) -> None:
    ranks(4, one_loss, name, ["zigzag", "ragged", "no rows", "as segments"])


def both_ways(layout: str) -> None:
    """2 x 2: documents over one dimension of the mesh, the vocabulary over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = mesh["cp"].get_group(), mesh["tp"].get_group()
    names = ["cross_entropy", "gspo", "dpo", "kto", "entropy_bonus"]
    terms: dict[str, Any] = {n: hl.Term(LOSSES[n], weight=0.5 + i) for i, n in enumerate(names)}
    terms["w"] = hl.Term(LOSSES["grpo"], reduction="weighted_mean", row_weight="token_weight")
    objectives = [
        hl.Objective(**terms, metrics=["entropy", "accuracy"], backend="torch"),
        hl.Objective(ce=terms["cross_entropy"], w=terms["w"], backend="torch"),  # of rows only: visits chunks
    ]
    start = 10 * mesh["tp"].get_local_rank()
    shard = hl.VocabShard(tp, start, V)
    mine = rows_of(layout, 2, mesh["cp"].get_local_rank())
    columns = slice(start, start + 10)
    for objective in objectives:
        fns = [t.fn for t in objective.terms.values()]
        for kind in ("Logits", "Linear"):
            inputs = (*oracle.inputs_of(*fns), "token_weight")
            problem = oracle.poison(long_documents(oracle.make(kind, (N,), V, inputs=inputs, bad=False)))
            want = oracle.answer(objective, problem)
            own = cut(problem, mine, cp)
            tensors = {n: x[columns] if n in ("weight", "bias") else x for n, x in own.tensors.items()}
            if kind == "Logits":
                tensors["logits"] = tensors["logits"][:, columns]
            own = oracle.replace(own, tensors=tensors)
            out, grads = call(objective, own, shard=shard, **({"memory": 2 * 8 * 10 * 3} if kind == "Linear" else {}))
            found = oracle.Answer(
                loss=total(out.loss.detach(), cp),
                terms={n: total(x, cp) for n, x in out.terms.items()},
                metrics=hl.Meter().add(out.metrics).compute(cp),
                grads={},
            )
            oracle.check(found, want, what=f"{kind} {layout}")
            for n, g in grads.items():
                truth = want.grads[n]
                if n == "logits":
                    truth = truth[mine][:, columns]
                elif n == "hidden":
                    truth = truth[mine]
                else:
                    g, truth = total(g, cp), truth[columns]
                torch.testing.assert_close(g, truth, rtol=1e-10, atol=1e-10, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("layout", ["ragged", "no rows", "zigzag"])
def test_with_a_sharded_vocabulary(ranks: Any, layout: str) -> None:
    ranks(4, both_ways, layout)


def unsaid() -> None:
    """Refused on both ranks, though on one of them there is a single reading: the other would be waited for."""
    scored = lambda logprob, score, segments: -score * logprob * segments.mean(logprob.detach())
    objective, rank = hl.Objective(it=scored), dist.get_rank()
    rows = 7 if rank == 0 else 3  # as many as there are segments
    logits, targets, score = torch.randn(rows, 9), torch.zeros(rows).long(), torch.randn(rows)
    segments = hl.Segments.from_ids(torch.arange(rows) * 3 // rows, 3, dist.group.WORLD)
    with pytest.raises(ValueError, match=r"score: .*hl.PerRow\(score\)"):
        objective(hl.Logits(logits), targets, segments=segments, score=score)
    spread = hl.Objective(it=lambda lse, score, segments: lse * segments.spread(score))
    for fn, given in ((objective, hl.PerRow(score)), (spread, hl.PerSegment(score[:3]))):
        assert fn(hl.Logits(logits), targets, segments=segments, score=given).loss.isfinite()
    lines = hl.Segments.from_ids(segments.ids[:, None], 3, dist.group.WORLD)
    objective(hl.Logits(logits[:, None]), targets[:, None], segments=lines, score=score[:, None])  # (B, T): rows


def test_an_input_that_nobody_says_what_it_is(ranks: Any) -> None:
    ranks(2, unsaid)


def by_mean(logprob, segments, advantage):
    return (logprob - segments.mean(logprob)) * advantage


ANOTHER = {  # what the last rank does otherwise, and what all ranks then say
    "nothing": "",
    "more segments": "num_segments: ",
    "another loss": "objective: ",
    "one more term": "objective: ",
    "a term switched off": "objective: ",
    "another reduction": "objective: ",
    "a metric that sums": "objective: ",
    "a weighted mean": "objective: ",
    "another dtype": "objective: ",
    "no gradient": "objective: ",
    "frozen": "objective: ",
    "other pairs": "inputs: ",
    "more pairs": "inputs: ",
    "other flags": "inputs: ",
    "a metric of rows, and no autograd": "",
}


def ranks_that_disagree() -> None:
    """Every rank hears of it in the first collective, and the group still works."""
    for what, message in ANOTHER.items():
        last, dtype = dist.get_rank() == 1 and what, torch.float32
        gspo, dpo, kto = (hl.losses.LOSSES[name] for name in ("gspo", "dpo", "kto"))
        terms, metrics, more = {"a": gspo, "b": by_mean}, {}, {}
        given = {"advantage": torch.randn(6)}
        number = 4 if last == "more segments" else 3
        if last == "another loss":
            terms = {"a": gspo, "b": hl.Term(by_mean, inputs={"advantage": "advantage"}), "c": gspo}
        if last == "one more term":
            terms["c"] = gspo
        if last == "a term switched off":
            more["weights"] = {"b": 0.0}
        if last == "another reduction":
            terms["a"] = hl.Term(gspo, reduction="seq_mean_token_mean")
        if last == "a metric that sums":
            metrics["m"] = lambda logprob, segments: segments.mean(logprob)
        if last == "a metric of rows, and no autograd":
            metrics["m"] = lambda logprob: logprob
        if last == "a weighted mean":
            terms["c"] = hl.Term(hl.losses.cross_entropy, reduction="weighted_mean")
        if last == "another dtype":
            dtype = torch.float64
        if what in ("other pairs", "more pairs"):
            pairs = [[0, 1], [1, 2]] if last == "more pairs" else [[1, 0] if last else [0, 1]]
            terms, given = {"a": dpo}, {"ref_logprob": torch.randn(6), "pairs": torch.tensor(pairs)}
        if what == "other flags":
            flags = torch.tensor([True, False, bool(last)])
            terms, given = {"a": kto}, {"ref_logprob": torch.randn(6), "desirable": flags}
        segments = hl.Segments.from_ids(torch.arange(6) // 2, number, dist.group.WORLD)
        given = {n: hl.PerRow(x.to(dtype)) if x.is_floating_point() else x for n, x in given.items()}
        source = hl.Logits(torch.randn(6, 9, dtype=dtype, requires_grad=last != "frozen"))
        objective, direct = hl.Objective(**terms, metrics=metrics), last == "a metric of rows, and no autograd"
        call = objective.forward_backward if direct else objective
        with torch.set_grad_enabled(last != "no gradient"):
            if not message:
                call(source, torch.arange(6), segments=segments, **given, **more)
                continue
            with pytest.raises(ValueError, match=f"^{message}.*that share segments"):
                call(source, torch.arange(6), segments=segments, **given, **more)
    numbers = hl.Segments.from_ids(torch.zeros(3).long(), 2 + dist.get_rank(), dist.group.WORLD)
    with pytest.raises(ValueError, match=r"^num_segments: .*that share segments"):
        hl.count(torch.arange(3), numbers)


def test_ranks_that_share_segments_and_disagree_all_raise(ranks: Any) -> None:
    ranks(2, ranks_that_disagree)
