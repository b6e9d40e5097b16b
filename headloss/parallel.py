"""Ranks: a vocabulary in shards, merged after one collective.

Dimension key:  N rows   W ranks of the group   k numbers in a packed partial

Each rank sweeps its own columns.  Its partial is packed into one (k, N) tensor, all-gathered once, and merged by the
same rule that merges blocks and splits, whatever facts are wanted.  Targets and inputs are the same on all ranks of the
group; every rank then knows every fact, and the loss needs no collective of its own.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headloss.facts import Partial, merge
from headloss.teachers import Pairs, Temperature


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of a vocabulary that the ranks of `group` share.

    group           the process group (or one-dimensional DeviceMesh) that shares the vocabulary
    start           the first column this rank holds
    vocab           the size of the whole vocabulary; columns from there on are padding and do not count
    width           the most columns any rank holds, the same number everywhere, where shards are uneven: the rows of a
                    chunk follow from it.  By default vocab / ranks, rounded up
    partial_hidden  leave the gradient of hidden unreduced, for a caller who reduce-scatters it over the group
    """

    group: Any
    start: int
    vocab: int
    width: int | None = None
    partial_hidden: bool = False

    def __post_init__(self) -> None:
        if hasattr(self.group, "get_group"):  # a DeviceMesh, without importing it
            object.__setattr__(self, "group", self.group.get_group())
        if not isinstance(self.group, dist.ProcessGroup):
            raise TypeError(f"group: wanted a ProcessGroup or a 1-D DeviceMesh, got {type(self.group).__name__}")
        for name, value, least in (("start", self.start, 0), ("vocab", self.vocab, 1), ("width", self.width, 1)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: wanted an integer, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name}: wanted at least {least}, got {value}")

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def even_width(self) -> int:
        return self.width or -(-self.vocab // self.size)

    def columns(self, held: int) -> int:
        """How many of the columns this rank holds count; the rest is padding."""
        return max(0, min(held, self.vocab - self.start))

    def check_width(self, held: int) -> None:
        if self.columns(held) > self.even_width:
            if self.width is not None:
                raise ValueError(f"width: this rank holds {self.columns(held)} columns, more than width={self.width}")
            warnings.warn(
                f"headloss: this rank holds {self.columns(held)} columns, more than vocab / ranks = {self.even_width}, "
                f"so its chunks exceed the memory budget; give VocabShard(width=...) the largest shard's size",
                stacklevel=2,
            )


class Gathering:
    """A partial on its way: packed, being gathered, merged when asked for.  A `note` travels along; see `note_of`."""

    def __init__(self, partial: Partial, shard: VocabShard, note: Tensor | None = None) -> None:
        self.like, self.shard, self.note = partial, shard, note
        packed_kN = torch.stack(list(_fields(partial)))
        self.shape = packed_kN.shape
        packed = packed_kN.flatten() if note is None else torch.cat([packed_kN.flatten(), note.to(packed_kN)])
        self.all_W = packed.new_empty(shard.size, len(packed))
        self.work = None
        if packed_kN.numel():
            with together("gathering the partials of a sharded vocabulary"):
                self.work = all_gather(self.all_W, packed, shard.group)

    def merged(self, temperatures: Sequence[Temperature], paired: Sequence[Pairs] = ()) -> Partial:
        if self.work is not None:  # without rows there is nothing to gather, on any rank of the group
            with together("gathering the partials of a sharded vocabulary"):
                self.work.wait()
            if self.note is not None:
                check_notes(self.all_W[:, self.shape.numel() :], self.shard.vocab)
        all_WkN = self.all_W[:, : self.shape.numel()].unflatten(1, self.shape)
        return merge(_refill(self.like, iter(all_WkN.unbind(1))), temperatures, paired)


def note_of(shard: VocabShard, columns: int, same: Sequence[Tensor], device: torch.device) -> Tensor:
    """What the others check of this rank: its first column, how many, and a digest of what must be the `same`."""
    digest = torch.zeros((), dtype=torch.long, device=device)
    for x in same:
        digest = digest * 31 + (x.flatten() * torch.arange(1, x.numel() + 1, device=device)).sum()
    digest = digest % 16777213  # the largest prime that float32 holds
    return torch.stack([torch.full_like(digest, shard.start), torch.full_like(digest, columns), digest])


def check_notes(notes_W3: Tensor, vocab: int) -> None:
    """Every column on one rank, and the same rows everywhere: whatever else comes out is wrong without a sound."""
    start_W, columns_W, digest_W = notes_W3.unbind(1)
    end_W = start_W + columns_W
    meets_WW = torch.maximum(start_W[:, None], start_W) < torch.minimum(end_W[:, None], end_W)
    whole = (columns_W.sum() == vocab) & (meets_WW.sum() == (columns_W > 0).sum())  # each meets itself alone
    same = (digest_W == digest_W[0]).all()
    for holds, message in (
        (whole, f"shard: each of the {vocab} columns must be on one rank of the group"),
        (same, "targets: they, or the ids of a sparse teacher, differ between ranks that share a vocabulary"),
    ):
        if notes_W3.device.type != "cpu":
            torch._assert_async(holds, message)
        elif not holds:
            held = ", ".join(f"{int(a)} to {int(b)}" for a, b in zip(start_W, end_W, strict=True))
            raise ValueError(message if holds is same else f"{message}, but the ranks hold {held}")


def all_gather(out: Tensor, x: Tensor, group: Any) -> Any:
    """Begin to gather `x` of every rank into `out`, whose first dimension is the ranks."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return gather(out.flatten(0, 1) if x.ndim > 1 else out.flatten(), x, group=group, async_op=True)


def _fields(x: Any) -> Iterator[Tensor]:
    """The tensors of a partial, in order."""
    if isinstance(x, Tensor):
        yield from x.unbind(-1) if x.ndim > 1 else (x,)
    elif isinstance(x, tuple):
        for y in x:
            yield from _fields(y)


def _refill(like: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(like, Tensor):
        return torch.stack([next(tensors) for _ in range(like.shape[-1])], -1) if like.ndim > 1 else next(tensors)
    if not isinstance(like, tuple):
        return None
    filled = [_refill(y, tensors) for y in like]
    return type(like)(*filled) if hasattr(like, "_fields") else tuple(filled)


def sum_over(tensors: Sequence[Tensor], shard: VocabShard | None) -> list[Tensor]:
    """Each (N,) tensor summed over the ranks that share the vocabulary: one collective for all of them."""
    if shard is None or not tensors or not tensors[0].numel():
        return list(tensors)
    packed = torch.stack(list(tensors))
    with together("summing divergences over a sharded vocabulary"):
        dist.all_reduce(packed, group=shard.group)
    return list(packed.unbind())


def max_over(x: Tensor, shard: VocabShard | None) -> Tensor:
    """The largest over the ranks that share the vocabulary, where all but one hold -inf."""
    if shard is not None and x.numel():
        with together("finding the logits at a teacher's ids"):
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=shard.group)
    return x


def reduce_hidden(grad: Tensor | None, shard: VocabShard | None) -> None:
    """Sum the gradient of hidden over the ranks that share the vocabulary, in place."""
    if grad is not None and shard is not None and not shard.partial_hidden:
        with together("summing the gradient of hidden over a sharded vocabulary"):
            dist.all_reduce(grad, group=shard.group)


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Something that all ranks of a group do; the error of one that was left alone says so."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what} failed: a rank of the group did not join in time, or died; its own error came first. ({error})"
        ) from error
