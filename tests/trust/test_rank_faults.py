"""Ranks that share a vocabulary: an empty shard is like any other, and ranks that disagree all raise, none waits."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import own_group
from torch import Tensor

import headloss as hl
from headloss import losses
from headloss.parallel.shard import SAME

N, V, D, K = 7, 11, 5, 3
SPLITS = {2: ([0, V], [V, 0]), 3: ([0, V, 0], [4, 0, V - 4], [0, 0, V])}
LAYOUTS = [(size, i) for size in SPLITS for i in range(len(SPLITS[size]))]


def columns(split: list[int]) -> tuple[hl.VocabShard, slice]:
    """This rank's shard, and its columns."""
    rank = dist.get_rank()
    start = sum(split[:rank])
    return hl.VocabShard(dist.group.WORLD, start, V, width=max(split)), slice(start, start + split[rank])


def problem(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = {
        n: torch.randn(*shape, generator=g, dtype=torch.float64).half().double()
        for n, shape in {
            "logits": (N, V),
            "hidden": (N, D),
            "weight": (V, D),
            "bias": (V,),
            "t_logits": (N, V),
            "t_hidden": (N, D),
            "t_weight": (V, D),
            "t_bias": (V,),
            "advantage": (N,),
            "old_logprob": (N,),
        }.items()
    }
    targets = torch.randint(V, (N,), generator=g)
    targets[2] = -100
    ids = torch.rand(N, V, generator=g).argsort(-1)[:, :K]
    ids[1, 2] = -1  # padding
    logprobs = x["t_logits"].log_softmax(-1).gather(-1, ids.clamp(min=0))
    return {**x, "targets": targets, "ids": ids, "logprobs": logprobs}


def sharded(x: Tensor, name: str, mine: slice) -> Tensor:
    return x[:, mine] if name.endswith("logits") else x if name.endswith("hidden") else x[mine]


SOURCES = {"Logits": ("logits",), "Linear": ("hidden", "weight"), "bias": ("hidden", "weight", "bias")}


def source_of(
    kind: str,
    x: dict[str, Tensor],
    split: list[int] | None,
    dtype: torch.dtype,
    frozen: tuple[str, ...] = (),
    before: str = "",
    **options: Any,
) -> tuple[Any, dict[str, Tensor]]:
    shard, mine = (None, slice(None)) if split is None else columns(split)
    leaves = {}
    for name in SOURCES[kind]:
        leaf = sharded(x[before + name], name, mine).clone().to(dtype)
        leaves[name] = leaf.requires_grad_(not before and name not in frozen)
    made = hl.Logits if kind == "Logits" else hl.Linear
    return made(*leaves.values(), shard=shard, **options), leaves


def teacher_of(kind: str | None, x: dict[str, Tensor], split: list[int] | None, dtype: torch.dtype) -> Any:
    if kind is None:
        return None
    if kind == "sparse":
        return hl.Sparse(x["ids"], x["logprobs"].to(torch.promote_types(dtype, torch.float32)))
    return source_of(kind, x, split, dtype, before="t_")[0]


OBJECTIVES: dict[str, tuple[str | None, Any]] = {
    "ce": (
        None,
        hl.Objective(
            ce=hl.Term(losses.cross_entropy, label_smoothing=0.1), z=losses.z_loss, metrics=["entropy", "accuracy"]
        ),
    ),
    "gspo": (None, hl.Objective(rl=losses.gspo)),
    "batch": (None, hl.Objective(b=lambda logprob: -(logprob - logprob.mean()) * logprob)),
    **{
        f"{name} {tail}": ("sparse", hl.Objective(k=hl.Term(losses.LOSSES[name], tail=tail), ce=losses.cross_entropy))
        for name in ("jsd",)
        for tail in ("bucket", "none", "renormalise")
    },
    **{
        f"{name} alone {tail}": ("sparse", hl.Objective(k=hl.Term(losses.LOSSES[name], tail=tail)))
        for name in ("reverse_kl",)
        for tail in ("bucket", "none", "renormalise")
    },
    "forward_kl of logits": ("Logits", hl.Objective(k=losses.forward_kl, metrics=["teacher_agreement"])),
    "tvd of a head": ("bias", hl.Objective(k=losses.tvd)),
    "jsd of a head": ("Linear", hl.Objective(k=losses.jsd, ce=losses.cross_entropy)),
}


def answer(
    name: str, kind: str, split: list[int] | None, dtype: torch.dtype, way: str, frozen: tuple[str, ...], ignored: bool
) -> dict[str, Tensor]:
    """Loss, metrics and gradients, of the whole vocabulary or of this rank's part of it."""
    x = problem()
    if ignored:
        x["targets"] = torch.full((N,), -100)
    teacher, objective = OBJECTIVES[name]
    options: dict[str, Any] = {} if kind == "Logits" else {"memory": 3 * 4 * V * 8}  # a few chunks
    source, leaves = source_of(kind, x, split, dtype, frozen, **options)
    call: dict[str, Any] = {}
    if name == "gspo":
        call["segments"] = hl.Segments.from_ids(torch.arange(N) // 3)
        call |= {n: x[n].to(torch.promote_types(dtype, torch.float32)) for n in ("advantage", "old_logprob")}
    guide = teacher_of(teacher, x, split, dtype)
    if way == "direct":
        out = objective.forward_backward(source, x["targets"], teacher=guide, **call)
        grads = {n: getattr(out.grads, n) for n in leaves}
    else:
        out = objective(source, x["targets"], teacher=guide, **call)
        if way == "twice":
            out.loss.backward(retain_graph=True)
            for leaf in leaves.values():
                leaf.grad = None
        out.loss.backward()
        grads = {n: leaf.grad for n, leaf in leaves.items() if n not in frozen}
    found = {"loss": out.loss.detach()} | {f"metric {n}": m.value for n, m in out.metrics.items()}
    return found | {f"grad {n}": g for n, g in grads.items()}


@functools.cache
def whole(name: str, kind: str, way: str, frozen: tuple[str, ...], ignored: bool) -> dict[str, Tensor]:
    """The answer of one rank that has all columns, whatever the layout."""
    return answer(name, kind, None, torch.float64, way, frozen, ignored)


def compare(got: dict[str, Tensor], want: dict[str, Tensor], split: list[int], dtype: torch.dtype, label: str) -> None:
    _, mine = columns(split)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}[dtype]
    assert got.keys() == want.keys(), label
    for name, y in want.items():
        y = sharded(y, name.split()[-1], mine) if name.startswith("grad") else y
        assert got[name].shape == y.shape, f"{label}, {name}"
        torch.testing.assert_close(
            got[name].double(),
            y.double(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m: f"{label}, {name}: {m}",
        )


def cases(kind: str) -> Iterator[tuple[str, torch.dtype, str, tuple[str, ...], bool]]:
    """Every objective as it is; a few in every way and dtype, with anything frozen, and without a row that counts."""
    few = ("ce", "jsd renormalise", "reverse_kl alone renormalise", "tvd of a head")
    held = SOURCES[kind]
    for name in OBJECTIVES if dist.get_world_size() == 2 else few:
        yield name, torch.float64, "autograd", (), False
    for name in few:
        yield name, torch.float64, "autograd", (), True
        yield name, torch.float64, "direct", (), False
        yield name, torch.float64, "twice", (), False
        yield name, torch.float16, "autograd", (), False
        yield name, torch.bfloat16, "direct", (), True
        if kind != "Logits":
            for frozen in dict.fromkeys((held[:1], held[1:2], held[1:], held[2:])):
                yield name, torch.float64, "autograd", frozen, False


def empty(size: int, layout: int, kind: str) -> None:
    split = SPLITS[size][layout]
    for name, dtype, way, frozen, ignored in cases(kind):
        label = f"{name}, {kind}, {split}, {way}, {dtype}, frozen {frozen}, all ignored {ignored}"
        try:
            got = answer(name, kind, split, dtype, way, frozen, ignored)
        except Exception as error:
            raise AssertionError(label) from error
        compare(got, whole(name, kind, way, frozen, ignored), split, dtype, label)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=str)
def test_an_empty_shard_is_like_any_other(ranks: Any, size: int, layout: int, kind: str) -> None:
    ranks(size, empty, size, layout, kind, timeout=280.0)  # the first of them makes the traces


def facts_of_ids(size: int, layout: int, kind: str) -> None:
    """`row_facts` of what a sparse teacher names, and their gradients."""
    split = SPLITS[size][layout]
    found = []
    for part in (split, None):
        x = problem()
        source, leaves = source_of(kind, x, part, torch.float64)
        want = ("ids_logprob", "tail_logprob", "logprob", "entropy")
        facts = hl.row_facts(source, x["targets"], want, teacher=teacher_of("sparse", x, part, torch.float64))
        sum((facts[n] ** 2).sum() for n in want).backward()
        grads = {f"grad {n}": leaf.grad for n, leaf in leaves.items()}
        found.append({n: facts[n].detach() for n in want} | grads)
        only = hl.row_facts(source, x["targets"], ("ids_logit",), teacher=teacher_of("sparse", x, part, torch.float64))
        found[-1] |= {"ids": only["ids_logit"].detach()}
        (only["ids_logit"] ** 2).sum().backward()
        found[-1] |= {f"grad of ids {n}": leaf.grad for n, leaf in leaves.items()}
    compare(found[0], found[1], split, torch.float64, f"{kind}, {split}")


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=str)
def test_facts_of_an_empty_shard(ranks: Any, size: int, layout: int, kind: str) -> None:
    ranks(size, facts_of_ids, size, layout, kind)


def exchanged(x: Tensor, i: int = 0, j: int = 1) -> Tensor:
    order = list(range(len(x)))
    order[i], order[j] = j, i
    return x[order]


# What one rank does otherwise, each right by itself, and what all ranks then say.
OTHERWISE: dict[str, tuple[Any, str]] = {
    "targets permuted": (lambda x: x.update(targets=x["targets"].roll(1)), "targets: they differ"),
    "two targets exchanged": (lambda x: x.update(targets=exchanged(x["targets"])), "targets: they differ"),
    "an ignored row exchanged with its neighbour": (
        lambda x: x.update(targets=exchanged(x["targets"], 2, 3)),
        "targets: they differ",
    ),
    "one more row ignored": (
        lambda x: x.update(targets=x["targets"].index_fill(0, torch.tensor([4]), -100)),
        "targets: they differ",
    ),
    "all rows ignored": (lambda x: x.update(targets=torch.full_like(x["targets"], -100)), "targets: they differ"),
    "the same sum of products": (
        lambda x: x.update(targets=torch.tensor([2, 3, 1, 0, 0, 0, 0])),
        "targets: they differ",
    ),
    "ids of two rows exchanged": (lambda x: x.update(ids=exchanged(x["ids"], 3, 4)), "teacher: the ids"),
    "ids of a row in another order": (
        lambda x: x.update(ids=torch.cat([x["ids"][:3], x["ids"][3:].flip(-1)])),
        "teacher: the ids",
    ),
    "one id fewer": (lambda x: x.update(ids=x["ids"].index_fill(0, torch.tensor([4]), -1)), "teacher: the ids"),
    "segments permuted": (lambda x: x.update(segments=x["segments"].flip(0)), "segments: they differ"),
    "a mask of integers": (lambda x: x.update(mask=exchanged(x["mask"], 3, 4)), "inputs: integers"),
    "another temperature": (lambda x: x.update(temperature=2.0), "source: its dtype"),
    "another softcap": (lambda x: x.update(softcap=5.0), "source: its dtype"),
    "another scale": (lambda x: x.update(scale=2.0), "source: its dtype"),
    "another dtype": (lambda x: x.update(dtype=torch.bfloat16), "source: its dtype"),
    "shards exchanged": (
        lambda x: x.update(exchange=True),
        "shard: each of the 11 columns .* in the order of the ranks",
    ),
    "the start of another": (lambda x: x.update(start=0), "shard: each of the 11 columns"),
    "all columns": (lambda x: x.update(whole=True), "shard: each of the 11 columns"),
    "another weight": (lambda x: x["more"].update(weights={"k": 3.0}), "objective: its terms"),
    "another count": (lambda x: x["more"].update(num_items=3), "objective: its terms"),
    "another scale of the gradient": (lambda x: x["more"].update(grad_scale=2.0), "objective: its terms"),
    "a tensor: weight": (lambda x: x["more"].update(weights={"k": torch.tensor(3.0)}), "weights: not the same"),
    "a tensor: count": (lambda x: x["more"].update(num_items=torch.tensor(3)), "inputs: integers"),
    "a tensor: count of floats": (lambda x: x["more"].update(num_items=torch.tensor(3.0)), "num_items: not the same"),
    "a tensor: scale": (lambda x: x["more"].update(grad_scale=torch.tensor(3.0)), "grad_scale: not the same"),
    "a tensor: temperature": (lambda x: x.update(temperature=torch.tensor(3.0)), "temperature: not the same"),
    "another option": (lambda x: x.update(swap=other(m=hl.Term(masked, by=2.0))), "objective: its terms"),
    "another reduction": (lambda x: x.update(swap=other(m=hl.Term(masked, reduction="token_sum"))), "objective: "),
    "another function": (lambda x: x.update(swap=other(m=lambda logprob, mask: -logprob * (1 - mask))), "objective: "),
    "another operation": (lambda x: x.update(swap=other(m=lambda logprob, mask: logprob / mask)), "objective: "),
    "another captured number": (lambda x: x.update(swap=other(m=captured(2.0))), "objective: its terms"),
    "another name": (lambda x: x.update(swap=lambda terms: {f"{n}_": t for n, t in terms.items()}), "objective: "),
    "a smaller budget": (lambda x: x.update(memory=8 * V), "objective: .* memory"),
    "hidden without a gradient": (lambda x: x.update(frozen=True), "objective: .* whether hidden's gradient is summed"),
    "a gradient of hidden that is not summed": (
        lambda x: x.update(partial=True),
        "objective: .* whether hidden's gradient is summed",
    ),
    "one more column that nobody has": (lambda x: x.update(vocab=V + 1), "source: .* vocab|shard: each of the 12"),
}
TENSORS: dict[str, Any] = {  # what the others then give
    "a tensor: weight": lambda x: x["more"].update(weights={"k": torch.tensor(1.0)}),
    "a tensor: count": lambda x: x["more"].update(num_items=torch.tensor(5)),
    "a tensor: count of floats": lambda x: x["more"].update(num_items=torch.tensor(5.0)),
    "a tensor: scale": lambda x: x["more"].update(grad_scale=torch.tensor(1.0)),
    "a tensor: temperature": lambda x: x.update(temperature=torch.tensor(1.0)),
}
OF_LINEAR = ("a smaller budget", "hidden without a gradient", "a gradient of hidden that is not summed")


def other(**terms: Any) -> Any:
    return lambda before: before | terms


def captured(number: float) -> Any:
    return lambda logprob, mask: -number * logprob * mask


def masked(logprob: Tensor, mask: Tensor, *, by: float = 1.0) -> Tensor:
    return -by * logprob * mask


ASKED: dict[str, dict[str, Any]] = {
    "ids alone": {"k": hl.Term(losses.forward_kl, tail="renormalise"), "m": hl.Term(masked, weight=0.0)},
    "a row": {"k": hl.Term(losses.forward_kl, tail="none"), "m": masked},
    "a batch": {"k": losses.forward_kl, "m": masked, "b": lambda logprob: logprob - logprob.mean()},
}


def disagreement(size: int, kind: str, asked: str) -> None:
    """The last rank does something otherwise; every rank hears of it, and the group still works."""
    rank = dist.get_rank()
    split = {2: [5, 6], 3: [4, 0, 7]}[size]
    for what, (spoil, message) in {"nothing": (None, ""), **OTHERWISE}.items():
        terms = {**ASKED[asked]}
        if what in OF_LINEAR and (kind == "Logits" or asked != "a row"):
            continue
        if what.startswith("another") and asked == "ids alone" and message.startswith("objective"):
            terms["m"] = masked  # and no longer ids alone
        if what == "another operation":
            terms["m"] = lambda logprob, mask: logprob * mask
        if what == "another captured number":
            terms["m"] = captured(1.0)
        x: dict[str, Any] = {**problem(), "more": {}, "swap": lambda terms: terms}
        x |= {"segments": torch.arange(N) // 3, "mask": torch.arange(N) % 2, "dtype": torch.float32}
        if what == "the same sum of products":
            x["targets"] = torch.tensor([3, 1, 2, 0, 0, 0, 0])
        if what in TENSORS:
            TENSORS[what](x)
        if spoil is not None and (rank == size - 1 or what == "shards exchanged"):
            spoil(x)
        _, mine = columns(split)
        width = mine.stop - mine.start
        start = x.get("start", mine.start)
        if "exchange" in x:  # the first and the last rank, each with as many columns as before
            start = {0: V - split[0], size - 1: 0}.get(rank, split[-1])
        if "whole" in x:
            mine, start = slice(None), 0
        # A group of its own: the second chunk may be on its way when the first one's note is read.
        shard = hl.VocabShard(own_group(), start, x.get("vocab", V), width=V, partial_hidden="partial" in x)
        leaves = [sharded(x[n], n, mine).to(x["dtype"]).requires_grad_() for n in SOURCES[kind]]
        assert "whole" in x or kind == "Logits" or len(leaves[1]) == width
        options = {n: x[n] for n in ("temperature", "softcap", "scale") if n in x}
        options |= (
            {} if kind == "Logits" else {"memory": x.get("memory", 3 * 8 * V)}
        )  # two rows of a chunk, which are gathered; or one
        if "frozen" in x:
            leaves[0] = leaves[0].detach()
        source = (hl.Logits if kind == "Logits" else hl.Linear)(*leaves, shard=shard, **options)
        call = lambda: hl.Objective(**x["swap"](terms))(
            source,
            x["targets"],
            **x["more"],
            teacher=hl.Sparse(x["ids"], x["logprobs"].float()),
            mask=x["mask"],
            segments=hl.Segments.from_ids(x["segments"], 3),
        )
        if what == "nothing":
            call().loss.backward()
            continue
        try:
            call()
        except ValueError as error:
            assert re.search(message, str(error)), f"{what}: {error}"
        else:
            raise AssertionError(f"{what}: no error")
    dist.barrier()


def other_chunks() -> None:
    """Budgets that make as many chunks, of other rows: the chunks' numbers would be taken for each other's."""
    rank, columns = dist.get_rank(), slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 4), torch.randn(12, 4)[columns].requires_grad_()
    given = {"advantage": torch.randn(10), "segments": hl.Segments.from_cu_seqlens(torch.tensor([0, 2, 5, 7, 10]))}
    for budgets in ((5, 5), (5, 7)):
        shard = hl.VocabShard(own_group(), columns.start, 12)
        source = hl.Linear(hidden, weight, shard=shard, memory=4 * 6 * 2 * budgets[rank])
        call = lambda source=source: hl.Objective(rl=losses.gspo)(source, torch.arange(10), **given)
        if budgets[0] == budgets[1]:
            call()
        else:
            with pytest.raises(ValueError, match="^objective: .* memory"):
                call()


def other_gradients() -> None:
    """Facts without an objective: their backward sums the gradient of hidden over the ranks, or waits for it."""
    columns, last = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6), dist.get_rank() == 1
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4), torch.randn(12, 4)[columns].requires_grad_()
    for what in ("nothing", "frozen", "partial"):
        shard = hl.VocabShard(own_group(), columns.start, 12, partial_hidden=last and what == "partial")
        source = hl.Linear(hidden.clone().requires_grad_(not (last and what == "frozen")), weight, shard=shard)
        if what == "nothing":
            hl.row_facts(source, torch.arange(5)).logprob.sum().backward()
        else:
            with pytest.raises(ValueError, match="whether hidden's gradient is summed"):
                hl.row_facts(source, torch.arange(5))


@pytest.mark.parametrize("disagree", [other_chunks, other_gradients])
def test_ranks_that_would_wait_for_each_other_all_raise(ranks: Any, disagree: Any) -> None:
    ranks(2, disagree)


def test_what_ranks_hear_of_is_short_enough_for_a_device():
    """On CUDA torch takes messages of less than 255 bytes, and refuses the check of a longer one."""
    assert max(len(text.encode()) for text in SAME.values()) < 255


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("size", "kind"), [(2, "Logits"), (2, "bias"), (3, "Linear")])
def test_ranks_that_disagree_all_raise(ranks: Any, size: int, kind: str, asked: str) -> None:
    ranks(size, disagreement, size, kind, asked)
