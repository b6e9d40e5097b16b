"""The contract again, with the vocabulary in shards: every loss, every layout, against the dense oracle in float64."""

from __future__ import annotations

import inspect
import math
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from oracle import LOSSES
from torch import Tensor

import headloss as hl

V = 37
SPLITS: dict[str, tuple[list[int], int]] = {  # columns held by each rank, and by how many the last ones are padding
    "even": ([19, 19], 1),
    "uneven": ([5, 32], 0),
    "empty": ([37, 0], 0),
    "empty first": ([0, 37], 0),
    "padded": ([24, 24], 11),
    "four": ([7, 0, 17, 13], 0),
    "four padded": ([16, 16, 16, 16], 27),  # two ranks hold nothing but padding
}


def shard_of(split: str) -> tuple[hl.VocabShard, slice]:
    """This rank's shard of a vocabulary of V, and its columns in a vocabulary that is padded."""
    held, _ = SPLITS[split]
    rank = dist.get_rank()
    start = sum(held[:rank])
    shard = hl.VocabShard(dist.group.WORLD, start, V, width=max(held))
    return shard, slice(start, start + held[rank])


def cut(problem: oracle.Problem, split: str) -> tuple[oracle.Problem, hl.VocabShard, int]:
    """The problem as this rank holds it; padding holds NaN, which must not be seen."""
    shard, mine = shard_of(split)

    def columns(x: Tensor, dim: int) -> Tensor:
        padding = list(x.shape)
        padding[dim] = SPLITS[split][1]
        return torch.cat([x, torch.full(padding, math.nan, dtype=x.dtype)], dim).movedim(dim, 0)[mine].movedim(0, dim)

    dims = {"logits": -1, "weight": 0, "bias": 0}
    tensors = {name: columns(x, dims[name]) if name in dims else x for name, x in problem.tensors.items()}
    teacher = None if problem.teacher is None else columns(problem.teacher, -1)
    return oracle.replace(problem, tensors=tensors, teacher=teacher), shard, mine.stop - mine.start


def whole_grads(got: oracle.Answer, split: str) -> oracle.Answer:
    """Gradients of the whole vocabulary from those of the shards; hidden's must be the same everywhere already."""
    held, padding = SPLITS[split]
    grads: dict[str, Tensor] = {}
    for name, g in got.grads.items():
        everyone: list[Any] = [None] * len(held)
        dist.all_gather_object(everyone, g)
        if name in ("logits", "weight", "bias"):
            dim = -1 if name == "logits" else 0
            joined = torch.cat(everyone, dim)
            real, rest = joined.split([V, padding], dim)
            assert (rest == 0).all(), f"padding has a gradient of {name}"
            grads[name] = real
        else:
            assert all(torch.equal(g, other) for other in everyone), f"ranks disagree about the gradient of {name}"
            grads[name] = g
    return got._replace(grads=grads)


def compare(objective: hl.Objective, problem: oracle.Problem, split: str, what: str = "", **call: Any) -> None:
    want = oracle.answer(objective, problem, **call)
    mine, shard, _ = cut(problem, split)
    width = max(SPLITS[split][0])
    rows = (1, 4, 1000) if split == "uneven" else (4,)
    both_models = 1 if problem.teacher is None else 2
    budgets = [2 * 8 * width * n * both_models for n in rows] if problem.kind == "Linear" else [None]
    learned = any(
        isinstance(x, Tensor) and x.requires_grad for x in problem.inputs.values()
    )  # which autograd alone serves
    for memory in budgets:
        both = memory == budgets[0] and split == "uneven" and not learned
        for how in ["autograd", "forward_backward"] if both else ["autograd"]:
            if problem.teacher is not None:
                call["teacher"] = hl.Logits(mine.teacher, shard=shard)
            got = oracle.run(objective, mine, memory=memory, how=how, source={"shard": shard}, **call)
            oracle.check(whole_grads(got, split), want, what=f"{what} {split} {how} {memory}")


def one_loss(name: str, splits: list[str]) -> None:
    for split in splits:
        one_loss_in(name, split)


def one_loss_in(name: str, split: str) -> None:
    fn = LOSSES[name]
    smooth = {"label_smoothing": 0.1} if "label_smoothing" in inspect.signature(fn).parameters else None
    for kind in ("Logits", "Linear"):
        transform = {"softcap": 5.0, "scale": 0.7} if kind == "Linear" else {"temperature": 0.8}
        problem = oracle.problem_for(fn, kind, (3, 7), vocab=V, peaked=kind == "Logits", transform=transform)
        for options in [{}, smooth] if smooth else [{}]:
            compare(hl.Objective(term=hl.Term(fn, **options), backend="torch"), problem, split, f"{name} {kind}")


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(ranks: Any, name: str) -> None:
    ranks(2, one_loss, name, [split for split, (held, _) in SPLITS.items() if len(held) == 2])


def plain_losses() -> list[str]:
    teacher = oracle.DENSE_TEACHER | oracle.SPARSE_TEACHER
    return [n for n in LOSSES if not set(inspect.signature(LOSSES[n]).parameters) & teacher]


# The plain ones meet four ranks together, below.
ALONE = [n for i, n in enumerate(LOSSES) if i % 3 == 0 or n in ("cross_entropy", "gspo") or n not in plain_losses()]


@pytest.mark.parametrize("name", [n if n in ALONE else pytest.param(n, marks=pytest.mark.slow) for n in LOSSES])
def test_four_ranks(ranks: Any, name: str) -> None:
    ranks(4, one_loss, name, ["four", "four padded"] if name in ("cross_entropy", "gspo") else ["four"])


def many_losses(split: str) -> None:
    """All losses at once, at several temperatures, every reduction among them, with facts nobody else asks for."""
    names = plain_losses()
    terms: dict[str, Any] = {
        n: hl.Term(LOSSES[n], weight=0.1 + 0.2 * i, temperature=2.0 if i % 3 == 1 else None)
        for i, n in enumerate(names)
    }
    terms["cross_entropy"] = hl.Term(LOSSES["cross_entropy"], label_smoothing=0.2)
    objective = hl.Objective(
        **terms,
        peak=lambda max_logprob, sum_p2, entropy, mean_logprob: sum_p2 * entropy - mean_logprob + max_logprob,
        metrics=["entropy", "accuracy", "perplexity", "argmax", "sum_p2"],
        backend="torch",
    )
    temperature = torch.linspace(0.5, 1.5, 23, dtype=torch.float64)
    for kind in ("Logits", "Linear"):
        transform = {"temperature": temperature, "scale": 0.5, "softcap": 3.0}
        inputs = oracle.inputs_of(*(LOSSES[n] for n in names))
        problem = oracle.make(kind, (23,), V, transform=transform, inputs=inputs)
        compare(objective, problem, split, kind, grad_scale=3.0, num_items=50, num_segments=9)


@pytest.mark.parametrize("split", SPLITS)
def test_all_losses_together(ranks: Any, split: str) -> None:
    ranks(len(SPLITS[split][0]), many_losses, split)


def masked_columns() -> None:
    """Rank 1's columns are all -inf: its partial is the identity, its gradient 0, and the rest as if it were not."""
    objective = hl.Objective(
        ce=LOSSES["cross_entropy"],
        h=hl.Term(LOSSES["entropy_bonus"], weight=0.3),
        z=hl.Term(LOSSES["z_loss"], weight=0.1),
        f=LOSSES["focal"],
        metrics=["accuracy", "sum_p2"],
        backend="torch",
    )
    rank = dist.get_rank()
    for kind in ("Logits", "Linear"):
        problem = oracle.make(kind, (23,), 19)
        want = oracle.answer(objective, problem)
        tensors = dict(problem.tensors)
        if rank == 1 and kind == "Logits":
            tensors["logits"] = torch.full((23, 18), -math.inf, dtype=torch.float64)
        elif rank == 1:
            tensors |= {"weight": torch.randn(18, 5).double(), "bias": torch.full((18,), -math.inf).double()}
        mine = oracle.replace(problem, tensors=tensors)
        shard = hl.VocabShard(dist.group.WORLD, 19 * rank, 37)
        for memory in (2 * 8 * 19 * 3, 10**6) if kind == "Linear" else (None,):
            got = oracle.run(objective, mine, memory=memory, source={"shard": shard})
            if rank == 1:
                for name in got.grads.keys() - {"hidden"}:
                    assert (got.grads.pop(name) == 0).all(), name
            oracle.check(got, want, what=kind)


def test_a_shard_of_minus_infinity(ranks: Any) -> None:
    ranks(2, masked_columns)


def no_rows_at_all() -> None:
    objective = hl.Objective(ce=LOSSES["cross_entropy"], h=LOSSES["entropy_bonus"], backend="torch")
    for kind in ("Logits", "Linear"):
        for shape, ignored in (((0,), 0.0), ((2, 0), 0.0), ((5,), 1.1)):
            problem = oracle.make(kind, shape, V, ignored=ignored, num_segments=1)
            compare(objective, problem, "even", f"{kind} {shape}")


def test_no_rows(ranks: Any) -> None:
    ranks(2, no_rows_at_all)


def facts_by_hand(split: str) -> None:
    """`row_facts` of a shard, then ordinary PyTorch; upstream gradients are scaled, expanded and absent for some."""
    wanted = ["lse", "logprob", "mean_logprob", "entropy", "sum_p2", "max_logprob", "argmax"]
    for kind in ("Logits", "Linear"):
        problem = oracle.make(kind, (3, 7), V, transform={"softcap": 4.0})
        mine, shard, _ = cut(problem, split)

        def loss(facts: Any, valid: Tensor) -> Tensor:
            return (facts["entropy"] * facts["logprob"] * valid).sum() * 3 + facts["mean_logprob"][valid].sum() * 2

        v = oracle.view(problem, leaves := problem.leaves(), {})
        dense = {n: oracle.FACTS[n](v.softmax(None)) for n in wanted}
        want = loss(dense, torch.ones(v.R, dtype=torch.bool))
        truth = torch.autograd.grad(want, list(leaves.values()), allow_unused=True)
        valid = problem.targets != -100
        own = mine.leaves()
        source = mine.source(own, shard=shard, **({"memory": 4000} if kind == "Linear" else {}))
        facts = hl.row_facts(source, problem.targets, want=wanted)
        for name, x in dense.items():
            torch.testing.assert_close(facts[name][valid], x.detach(), rtol=1e-10, atol=1e-10)
        got = loss(facts, valid)
        got.backward()
        grads = {n: x.grad for n, x in own.items()}
        answer = oracle.Answer(got.detach(), {}, {}, grads)
        wanted_answer = oracle.Answer(want.detach(), {}, {}, dict(zip(leaves, truth)))
        oracle.check(whole_grads(answer, split), wanted_answer, what=f"{kind} {split}")


@pytest.mark.parametrize("split", ["uneven", "padded", "four"])
def test_row_facts(ranks: Any, split: str) -> None:
    ranks(len(SPLITS[split][0]), facts_by_hand, split)


def frozen_parts() -> None:
    """Frozen hidden with a trainable weight, and the reverse; a second backward; evaluation."""
    objective = hl.Objective(ce=LOSSES["cross_entropy"], h=hl.Term(LOSSES["entropy_bonus"], weight=0.1))
    problem = oracle.make("Linear", (23,), V)
    want = oracle.answer(objective, problem)
    mine, shard, _ = cut(problem, "uneven")
    for trained in ("hidden", "weight"):
        leaves = mine.leaves()
        for name, x in leaves.items():
            x.requires_grad_(name == trained)
        out = objective(mine.source(leaves, shard=shard, memory=2 * 8 * 32 * 4), problem.targets)
        out.loss.backward(retain_graph=True)
        first = leaves[trained].grad.clone()
        answer = whole_grads(oracle.Answer(out.loss.detach(), {}, {}, {trained: first}), "uneven")
        torch.testing.assert_close(answer.loss, want.loss)
        torch.testing.assert_close(answer.grads[trained], want.grads[trained], rtol=1e-10, atol=1e-10)
        out.loss.backward()
        torch.testing.assert_close(leaves[trained].grad, 2 * first)
    with torch.no_grad():
        out = objective(mine.source(mine.leaves(), shard=shard, memory=2 * 8 * 32 * 4), problem.targets)
    torch.testing.assert_close(out.loss, want.loss)


def test_frozen_parts_and_second_backward(ranks: Any) -> None:
    ranks(2, frozen_parts)


def left_partial() -> None:
    """`partial_hidden` leaves the sum over ranks to a caller who reduce-scatters; each rank then has its rows."""
    objective = hl.Objective(ce=LOSSES["cross_entropy"])
    problem = oracle.make("Linear", (22,), V, num_segments=1)
    want = oracle.answer(objective, problem).grads["hidden"]
    mine, shard, _ = cut(problem, "uneven")
    shard = hl.VocabShard(shard.group, shard.start, V, width=32, partial_hidden=True)
    leaves = mine.leaves()
    objective(mine.source(leaves, shard=shard), problem.targets).loss.backward()
    part = leaves["hidden"].grad
    assert not torch.allclose(part, want)
    own = torch.empty(11, 5, dtype=torch.float64)
    dist.reduce_scatter_tensor(own, part.contiguous())
    torch.testing.assert_close(own, want[11 * dist.get_rank() :][:11], rtol=1e-10, atol=1e-10)


def test_partial_hidden(ranks: Any) -> None:
    ranks(2, left_partial)


def low_precision() -> None:
    """bfloat16 and float16 shards: no worse than twice the error of the same without shards."""
    for dtype in (torch.bfloat16, torch.float16):
        objective = hl.Objective(ce=LOSSES["cross_entropy"], h=hl.Term(LOSSES["entropy_bonus"], weight=0.1))
        problem = oracle.make("Linear", (23,), V, bias=False, num_segments=1, bad=False)
        problem = oracle.replace(problem, tensors={n: x.to(dtype).double() for n, x in problem.tensors.items()})
        want = oracle.answer(objective, problem)
        mine, shard, _ = cut(problem, "uneven")
        alone = oracle.run(objective, problem, dtype=dtype, memory=2 * 37 * 4)
        got = whole_grads(
            oracle.run(objective, mine, dtype=dtype, memory=2 * 2 * 32 * 4, source={"shard": shard}), "uneven"
        )
        assert got.loss.dtype == torch.float32
        for name, g in want.grads.items():
            ours, theirs = (float((a.grads[name].double() - g).abs().max()) for a in (got, alone))
            assert ours <= 2 * theirs + 1e-5, (dtype, name, ours, theirs)


def test_low_precision(ranks: Any) -> None:
    ranks(2, low_precision)
