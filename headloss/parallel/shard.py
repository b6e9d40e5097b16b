"""`VocabShard`: a vocabulary split over ranks, whose partial sums are merged after one collective.

Dimension key:  N rows   W ranks of the group   k numbers in a packed partial

Each rank sweeps its own columns.  Whatever facts are wanted, it packs its partial into one (k, N) tensor, which is
all-gathered once and merged by the rule that also merges blocks and splits.  All ranks of the group have the same
targets and inputs, so every rank then knows every fact and the loss needs no collective of its own.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headloss.facts import Partial, merge
from headloss.nested import nest
from headloss.teachers import Pairs, Temperature

T = TypeVar("T")


def process_group(group: Any) -> Any:
    """A process group, or that of a one-dimensional DeviceMesh; None stays None."""
    if group is None or isinstance(group, dist.ProcessGroup):  # first: while compiling, a group can do nothing else
        return group
    if not hasattr(group, "get_group"):  # of a DeviceMesh, without importing it
        raise TypeError(f"group: wanted a ProcessGroup or a 1-D DeviceMesh, got {type(group).__name__}")
    if group.ndim != 1:
        raise ValueError(
            f"group: wanted a DeviceMesh of one dimension, got {group.ndim}; pass mesh[name of the dimension]"
        )
    return group.get_group()


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of a vocabulary that the ranks of `group` share.

    group           the process group (or one-dimensional DeviceMesh) that shares the vocabulary
    start           the first column this rank holds
    vocab           the size of the whole vocabulary; columns from there on are padding
    width           for uneven shards: the most columns any rank holds, the same number on every rank.  It decides how
                    many rows a chunk has.  By default vocab / ranks, rounded up
    partial_hidden  leave the gradient of hidden unreduced, for a caller who reduce-scatters it over the group
    """

    group: Any
    start: int
    vocab: int
    width: int | None = None
    partial_hidden: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", process_group(self.group))
        if self.group is None:
            raise TypeError("group: wanted a ProcessGroup or a 1-D DeviceMesh, got None")
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
        """How many of the `held` columns of this rank count; the rest are padding."""
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
    """An asynchronous all-gather of a partial, or of numbers already packed as (k, N); `merged` waits for the result.

    A `note` travels along, see `note_of`.  Until a note has been checked, the buffer is padded to all `rows`, ignored
    rows included: ranks that disagree on which rows count can only find out in a collective of equal length.
    """

    def __init__(self, partial: Partial | Tensor, shard: VocabShard, note: Tensor | None = None, rows: int = 0) -> None:
        self.like, self.shard, self.note = partial, shard, note
        packed_kN = partial if isinstance(partial, Tensor) else torch.stack(list(_fields(partial)))
        self.shape = packed_kN.shape
        packed = packed_kN.flatten()
        if rows > self.shape[1] or note is not None:
            padding = packed.new_zeros(self.shape[0] * (max(rows, self.shape[1]) - self.shape[1]))
            packed = torch.cat([packed, padding, *([] if note is None else [note.to(packed)])])
        self.all_W = packed.new_empty(shard.size, len(packed))
        self.work = None
        if packed_kN.numel() or rows:
            with collective("gathering the partials of a sharded vocabulary"):
                self.work = all_gather(self.all_W, packed, shard.group)

    def merged(self, temperatures: Sequence[Temperature], paired: Sequence[Pairs] = ()) -> Partial:
        return merge(_refill(self.like, iter(self.gathered().unbind(1))), temperatures, paired)

    def wait(self) -> None:
        """Wait for the other ranks and check their notes, before another collective that they might never begin."""
        work, note, self.work, self.note = self.work, self.note, None, None
        if work is not None:  # without rows there is nothing to gather, on any rank of the group
            with collective("gathering the partials of a sharded vocabulary"):
                work.wait()
            if note is not None:
                check_notes(self.all_W[:, -len(note) :], self.shard.vocab)

    def gathered(self) -> Tensor:
        """(W, k, N): the numbers of all ranks."""
        self.wait()
        return self.all_W[:, : self.shape.numel()].unflatten(1, self.shape)


def gather_each(
    parts: Iterable[tuple[T, Partial | Tensor]], shard: VocabShard, first: Callable[[int], tuple[Tensor | None, int]]
) -> Iterator[tuple[T, Gathering]]:
    """Each part with its partial on the way; the next is made meanwhile.  `first`: the note and rows of a part."""
    travelling: list[tuple[T, Gathering]] = []
    for i, (part, partial) in enumerate(parts):
        if i == 1:
            travelling[0][1].wait()
        travelling.append((part, Gathering(partial, shard, *first(i))))
        if len(travelling) == 2:
            yield travelling.pop(0)
    yield from travelling


SAME = {  # what must be equal on ranks that share a vocabulary, in the order of a note; each text below 255 bytes
    "targets": "targets: they differ between ranks that share a vocabulary",
    "segments": "segments: they differ between ranks that share a vocabulary",
    "support": "support: the kept columns differ between ranks that share a vocabulary",
    "teacher": "teacher: the ids of a sparse teacher, or those of ids=, differ between ranks that share a vocabulary",
    "inputs": "inputs: integers passed to the call differ between ranks that share a vocabulary",
    "call": "source: its dtype, rows, vocab, temperature, scale or softcap, or the facts that the objective asks for, "
    "differ between ranks that share a vocabulary",
    "terms": "objective: its terms, their functions, options, weights or reductions, its inputs, num_items, "
    "num_segments, grad_scale, memory, whether hidden's gradient is summed, or whose products run differ between ranks "
    "that share a vocabulary",
}
NEAR = ("temperature", "grad_scale", "weights", "num_items", "num_segments")  # floats, compared with a tolerance
_BITS = 22  # bits of an integer per float32, which holds 24
_PRIMES = (-7046029254386353131, -4417276706812531889, -8663945395140668459)  # odd, of 64 bits (Steele et al. 2014)


def note_of(
    shard: VocabShard,
    columns: int,
    tensors: Mapping[str, Sequence[Tensor]],
    texts: Sequence[str],
    near: Sequence[float | Tensor] = (0.0,) * len(NEAR),
) -> Tensor:
    """What other ranks check about this one: its first column, its number of columns, digests of `tensors` and `texts`,
    which must be equal, and the numbers in `near`, which must be equal up to each rank's own rounding.

    A digest is a sum of hashes, see `hashed`.  One pass over the values makes all digests on the device, and nothing is
    read back to the host.
    """
    device = next(x.device for xs in tensors.values() for x in (*xs, None) if x is not None)
    parts = {name: [x.reshape(-1).long() for x in xs] for name, xs in tensors.items()}
    values = torch.cat([x for xs in parts.values() for x in xs])
    sums = [x.sum() for x in hashed(values).split([sum(map(len, xs)) for xs in parts.values()])]
    crcs = [zlib.crc32(text.encode()) for text in texts]
    start, held, *text_sums = (torch.full_like(sums[0], x) for x in (shard.start, columns, *crcs))
    numbers = torch.stack([start, held, *sums, *text_sums])
    numbers = (numbers[:, None] >> torch.arange(0, 3 * _BITS, _BITS, device=device)) & ((1 << _BITS) - 1)
    wide: dict[str, Any] = {"dtype": torch.float64, "device": device}
    floats = [x.to(**wide).reshape(1) if isinstance(x, Tensor) else torch.full((1,), x, **wide) for x in near]
    return torch.cat([numbers.flatten().double(), *floats])


def hashed(values: Tensor) -> Tensor:
    """A hash of each value and its position, whose sum changes under a permutation too."""
    found = values * _PRIMES[0] + torch.arange(len(values), device=values.device) * _PRIMES[1]
    found = (found ^ (found >> 31)) * _PRIMES[2]
    return found ^ (found >> 29)


def check_notes(notes_Wm: Tensor, vocab: int) -> None:
    """Check that every column is on one rank and that all ranks have the same rows; else the loss is silently wrong."""
    shifts = torch.arange(0, 3 * _BITS, _BITS, device=notes_Wm.device)
    whole_Wm, near_Wm = notes_Wm[:, : -len(NEAR)], notes_Wm[:, -len(NEAR) :]
    start_W, columns_W, *digests = (whole_Wm.unflatten(1, (-1, 3)).long() << shifts).sum(-1).unbind(1)
    before_W = columns_W.cumsum(0) - columns_W
    whole = (columns_W.sum() == vocab) & ((columns_W == 0) | (start_W == before_W)).all()
    checks = [(whole, f"shard: each of the {vocab} columns must be on one rank of the group")]
    checks += [((x == x[0]).all(), text) for x, text in zip(digests, SAME.values(), strict=True)]
    differ = (near_Wm.amax(0) - near_Wm.amin(0)) > 1e-2 * near_Wm.abs().amax(0)  # false for NaN, which shows anyway
    checks += [(~x, f"{name}: not the same on all ranks that share a vocabulary") for x, name in zip(differ, NEAR)]
    if notes_Wm.device.type != "cpu":
        for holds, message in checks:
            torch._assert_async(holds, message)
        return
    for holds, message in checks:
        if not holds:
            held = ", ".join(f"{int(a)} to {int(a + b)}" for a, b in zip(start_W, columns_W, strict=True))
            order = f", but the ranks hold {held}; shards must be in the order of the ranks" if holds is whole else ""
            raise ValueError(f"{message}{order}")


def all_gather(out: Tensor, x: Tensor, group: Any) -> Any:
    """Start gathering every rank's `x` into `out`, whose first dimension is the ranks."""
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
    fill = lambda x: torch.stack([next(tensors) for _ in range(x.shape[-1])], -1) if x.ndim > 1 else next(tensors)
    return nest(like, fill)


def sum_pairs(pairs: Sequence[tuple[Tensor, Any]], shard: VocabShard | None) -> Sequence[tuple[Tensor, Any]]:
    """Sum pairs of (N,) tensors over the ranks that share the vocabulary, in one collective for all of them."""
    if shard is None or not pairs or not pairs[0][0].numel():
        return pairs
    packed = torch.stack([x for pair in pairs for x in pair])
    with collective("summing divergences over a sharded vocabulary"):
        dist.all_reduce(packed, group=shard.group)
    return list(zip(packed[::2], packed[1::2], strict=True))


def max_over(x_RK: Tensor, shard: VocabShard | None, note: Tensor | None, rows: int) -> Tensor:
    """The maximum over the ranks that share the vocabulary; all but one hold -inf.  For `note`, see `Gathering`."""
    if shard is None or not rows:
        return x_RK
    packed = x_RK.flatten()
    if note is not None:
        slots_Wm = packed.new_full((shard.size, len(note)), -math.inf)
        slots_Wm[dist.get_rank(shard.group)] = note.to(packed)
        padding = packed.new_full(((rows - len(x_RK)) * x_RK.shape[1],), -math.inf)
        packed = torch.cat([packed, padding, slots_Wm.flatten()])
    with collective("finding the logits at a teacher's ids"):
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=shard.group)
    if note is not None:
        check_notes(packed[-shard.size * len(note) :].unflatten(0, (shard.size, -1)), shard.vocab)
    return packed[: x_RK.numel()].view_as(x_RK)


def reduce_hidden(grad: Tensor | None, shard: VocabShard | None) -> None:
    """Sum the gradient of hidden over the ranks that share the vocabulary, in place."""
    if grad is not None and shard is not None and not shard.partial_hidden:
        with collective("summing the gradient of hidden over a sharded vocabulary"):
            dist.all_reduce(grad, group=shard.group)


@contextlib.contextmanager
def collective(what: str) -> Iterator[None]:
    """Wraps a collective; if it fails, the error says that a rank is missing."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what} failed: a rank of the group did not join in time, or died; its own error came first. ({error})"
        ) from error
