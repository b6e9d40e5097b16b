"""Ranks that share a vocabulary: an empty shard is like any other, and ranks that disagree all raise, none waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import headloss as hl
from headloss import losses

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
    x = {n: torch.randn(*shape, generator=g, dtype=torch.float64).half().double() for n, shape in {
        "logits": (N, V), "hidden": (N, D), "weight": (V, D), "bias": (V,), "t_logits": (N, V), "t_hidden": (N, D),
        "t_weight": (V, D), "t_bias": (V,), "advantage": (N,), "old_logprob": (N,),
    }.items()}  # fmt: skip
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
    kind: str, x: dict[str, Tensor], split: list[int] | None, dtype: torch.dtype, frozen: tuple[str, ...] = (),
    before: str = "", **options: Any,
) -> tuple[Any, dict[str, Tensor]]:  # fmt: skip
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
    "ce": (None, hl.Objective(ce=hl.Term(losses.cross_entropy, label_smoothing=0.1), z=losses.z_loss, metrics=["entropy", "accuracy"])),
    "gspo": (None, hl.Objective(rl=losses.gspo)),
    "batch": (None, hl.Objective(b=lambda logprob: -(logprob - logprob.mean()) * logprob)),
    **{
        f"{name} {tail}": ("sparse", hl.Objective(k=hl.Term(losses.LOSSES[name], tail=tail), ce=losses.cross_entropy))
        for name in ("forward_kl", "jsd")
        for tail in ("bucket", "none", "renormalise")
    },
    **{f"{name} alone {tail}": ("sparse", hl.Objective(k=hl.Term(losses.LOSSES[name], tail=tail)))
       for name in ("reverse_kl",) for tail in ("bucket", "none", "renormalise")},
    "forward_kl of logits": ("Logits", hl.Objective(k=losses.forward_kl, metrics=["teacher_agreement"])),
    "tvd of a head": ("bias", hl.Objective(k=losses.tvd)),
    "jsd of a head": ("Linear", hl.Objective(k=losses.jsd, ce=losses.cross_entropy)),
}  # fmt: skip


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


def compare(got: dict[str, Tensor], want: dict[str, Tensor], split: list[int], dtype: torch.dtype, label: str) -> None:
    _, mine = columns(split)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}[dtype]
    assert got.keys() == want.keys(), label
    for name, y in want.items():
        y = sharded(y, name.split()[-1], mine) if name.startswith("grad") else y
        assert got[name].shape == y.shape, f"{label}, {name}"
        torch.testing.assert_close(
            got[name].double(), y.double(), rtol=tolerance, atol=tolerance, equal_nan=True,
            msg=lambda m: f"{label}, {name}: {m}",
        )  # fmt: skip


def cases(kind: str) -> Iterator[tuple[str, torch.dtype, str, tuple[str, ...], bool]]:
    """Every objective as it is; a few of them in every way, dtype, with anything frozen, and without a row that counts."""
    few = ("ce", "jsd renormalise", "reverse_kl alone renormalise", "tvd of a head")
    held = SOURCES[kind]
    for name in OBJECTIVES:
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
        compare(got, answer(name, kind, None, torch.float64, way, frozen, ignored), split, dtype, label)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=str)
def test_an_empty_shard_is_like_any_other(ranks: Any, size: int, layout: int, kind: str) -> None:
    ranks(size, empty, size, layout, kind)
