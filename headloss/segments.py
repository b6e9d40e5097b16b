"""Segments: which rows belong together (a document, a response), and sums over them.

Dimension key:  N rows   S segments

Row n belongs to segment `ids[n]`; id -1 is no segment.  Losses receive a `Segments` whose ignored rows are already -1,
so `totals`, `means`, `maxima`, `minima`, `spread`, `mean`, `max` and `min` see valid tokens only.  All are
differentiable, and ids may come in any order.  `totals` and `spread` are torch operators, each the other's adjoint;
these and `largest` tell a trace that rows are combined within segments and in no other way.  Sums of bools and whole
numbers are int64, those of narrow floats float32.

With a `group`, a segment's rows may lie on several ranks (context or sequence parallelism): ids and their number are
then global, sums run over the group, forward and backward, and each rank's loss is its share of the total.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.deferred_checks import readable
from headloss.immutable import Immutable
from headloss.parallel.shard import collective, process_group
from headloss.writes import Snapshot, is_untracked, snapshot, unchanged

_library = torch.library.Library("headloss", "DEF")
_library.define("segment_totals(Tensor x, Tensor ids, SymInt num_segments) -> Tensor")
_library.define("segment_spread(Tensor y, Tensor ids) -> Tensor")
_library.define("segment_largest(Tensor x, Tensor ids, SymInt num_segments) -> Tensor")


def _totals(x: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    dtype = torch.float64 if x.is_floating_point() else x.dtype  # added row by row: in float32, 131072 tokens drift
    out = x.new_zeros(num_segments + 1, dtype=dtype)  # the last place takes rows without a segment
    place = torch.where(ids < 0, num_segments, ids)
    if x.device.type == "cuda":  # sorts; index_add_ is atomic, and its bits differ from run to run
        out.index_put_((place,), x.to(dtype), accumulate=True)
    else:
        out.index_add_(0, place, x.to(dtype))
    return out[:num_segments].to(x.dtype, copy=True)


def _spread(y: Tensor, ids: Tensor) -> Tensor:
    return torch.cat([y, y.new_zeros(1)])[torch.where(ids < 0, y.shape[0], ids)]


def _largest(x: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    """The largest x of each segment, without a gradient; the dtype's least number for a segment without rows."""
    out = x.new_full((num_segments + 1,), -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min)
    place = torch.where(ids >= 0, ids, num_segments)
    return out.scatter_reduce_(0, place, x, "amax")[:num_segments].clone()


def _totals_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _totals_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.headloss.segment_spread(grad, *ctx.saved_tensors), None, None


def _spread_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.num_segments = inputs[0].shape[0]
    ctx.save_for_backward(inputs[1])


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.headloss.segment_totals(grad, *ctx.saved_tensors, ctx.num_segments), None


for _name, _real in (("totals", _totals), ("spread", _spread), ("largest", _largest)):
    _library.impl(f"segment_{_name}", _real, "CompositeExplicitAutograd")
torch.library.register_fake("headloss::segment_totals", lambda x, ids, n: x.new_empty(n), lib=_library)
torch.library.register_fake("headloss::segment_spread", lambda y, ids: y.new_empty(ids.shape[0]), lib=_library)
torch.library.register_fake("headloss::segment_largest", lambda x, ids, n: x.new_empty(n), lib=_library)
_differentiable = functools.partial(torch.library.register_autograd, lib=_library)
_differentiable("headloss::segment_totals", _totals_backward, setup_context=_totals_context)
_differentiable("headloss::segment_spread", _spread_backward, setup_context=_spread_context)


class _GroupSum(torch.autograd.Function):
    """Sum over ranks; each rank's loss is a share of one loss, so the gradient is the sum over ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return group_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _GroupSum.apply(grad, ctx.group), None


def group_sum(x: Tensor, group: Any) -> Tensor:
    x = x.clone()
    with collective("summing over the ranks that share segments or counts"):
        torch.distributed.all_reduce(x, group=group)
    return x


class WrongLengthError(ValueError):
    """A vector's length is neither the number of rows nor the number of segments."""


def sizes(shape: Sequence[Any], known: Mapping[str, str] = {}) -> str:
    """A shape as text.  Under a tracer sizes are symbols: those in `known` are written by name, the others as n."""
    words = [str(n) if type(n) is int else known.get(str(n), "n") for n in shape]
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def shallow(x: Any) -> Any:
    """Another record with the same fields, at a fifth of the cost of `copy.copy`."""
    other = object.__new__(type(x))
    other.__dict__.update(x.__dict__)
    return other


class Segments(Immutable):
    """Which segment each row belongs to.  Immutable; make one with a `from_...` constructor.

    >>> segments = Segments.from_ids(torch.tensor([0, 0, 1, -1]))
    >>> segments.totals(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([3., 3.])
    """

    __slots__ = ("_counts", "_snapshot", "anywhere", "group", "ids", "num_segments")
    ids: Tensor
    num_segments: int
    group: Any
    anywhere: bool  # made from a shape alone, so it can be on whatever device the rows are
    _counts: Tensor | None
    _snapshot: Snapshot | None  # of the ids, when they were counted

    def __init__(
        self,
        ids: Tensor,
        num_segments: int,
        counts: Tensor | None = None,
        group: Any = None,
        anywhere: bool = False,
    ) -> None:
        group = process_group(group)
        counted = None if counts is None else snapshot(ids, copied=False)
        self._set(ids=ids, num_segments=num_segments, _counts=counts, group=group, anywhere=anywhere, _snapshot=counted)

    def __reduce__(self) -> Any:
        return Segments, (self.ids, self.num_segments, None, self.group, self.anywhere)

    @classmethod
    def from_ids(cls, ids: Tensor, num_segments: int | None = None, group: Any = None) -> Segments:
        """One id per row, in the targets' shape, in any order; -1 for none.  Without `num_segments` ids are read."""
        ids = integers("ids", ids)
        if num_segments is None and group is not None:
            raise ValueError("num_segments: needed with a group, where no rank sees all ids")
        if num_segments is None:
            num_segments = max(0, int(ids.max()) + 1) if ids.numel() else 0
        check_size("num_segments", num_segments)
        if readable(ids) and ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < num_segments:
            raise ValueError(
                f"ids: segment ids must lie in [-1, {num_segments}), got {int(ids.min())} to {int(ids.max())}"
            )
        return cls(ids, num_segments, group=group)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, rows: int | None = None, group: Any = None) -> Segments:
        """Packed sequences: segment i is rows cu_seqlens[i] to cu_seqlens[i+1].  Later rows, up to `rows`, have none.

        With a group these are the whole batch's offsets; `select` then takes the rows of this rank.
        """
        ends = integers("cu_seqlens", cu_seqlens)
        if ends.ndim != 1 or ends.numel() < 1:
            raise ValueError(f"cu_seqlens: wanted a vector [0, n1, n1+n2, ...], got shape {tuple(ends.shape)}")
        rising = (ends[0] == 0) & (ends.diff() >= 0).all()
        _require(rising, lambda: f"cu_seqlens: wanted 0 and then rising offsets, got {ends.tolist()[:8]}")
        if rows is None:
            rows = int(ends[-1])
        else:
            check_size("rows", rows)
            _require(ends[-1] <= rows, lambda: f"rows: wanted at least {int(ends[-1])}, got {rows}")
        num_segments = ends.numel() - 1
        position = torch.arange(rows, device=ends.device)
        ids = torch.searchsorted(ends[1:].contiguous(), position, right=True)
        return cls(ids.masked_fill(ids >= num_segments, -1), num_segments, group=group)

    @classmethod
    def from_position_ids(cls, position_ids: Tensor, group: Any = None) -> Segments:
        """Packed sequences marked by positions: a segment begins where a position is not the last one plus 1.

        With a group these are the whole batch's positions; `select` then takes the rows of this rank.
        """
        position_ids = integers("position_ids", position_ids)
        if position_ids.ndim < 1:
            raise ValueError("position_ids: wanted one per row, got a scalar")
        starts = torch.ones_like(position_ids, dtype=torch.bool)
        starts[..., 1:] = position_ids[..., 1:] != position_ids[..., :-1] + 1
        ids = starts.flatten().cumsum(0) - 1
        return cls(ids.view(position_ids.shape), int(ids[-1]) + 1 if ids.numel() else 0, group=group)

    @classmethod
    def from_batch(cls, like: Tensor | tuple[int, int], group: Any = None) -> Segments:
        """Each line of a (B, T) batch is a segment; give the targets, or the shape, which fits any device."""
        shape: Any = tuple(like) if isinstance(like, list | tuple) else getattr(like, "shape", None)
        if shape is None or len(shape) != 2:
            got = type(like).__name__ if shape is None else f"shape {tuple(shape)}"
            raise ValueError(f"like: wanted a (B, T) tensor or shape, got {got}")
        device = like.device if isinstance(like, Tensor) else None
        return cls(_lines(shape, device), shape[0], group=group, anywhere=not isinstance(like, Tensor))

    def select(self, rows: slice | Tensor | tuple[Any, ...]) -> Segments:
        """These rows only, with the same numbering: `ids[rows]`.  For a rank's part of a batch, zig-zag or not."""
        return Segments(self.ids[rows], self.num_segments, group=self.group)

    def fitted(self, shape: tuple[int, ...], device: torch.device) -> Segments:
        """The same for rows of this shape on this device: flat if the rows are, moved if made from a shape alone."""
        flatten = self.ids.ndim != 1 and len(shape) == 1 and self.ids.numel() == shape[0]
        move = self.anywhere and self.ids.device != device
        if not flatten and not move:
            return self
        ids = _lines(tuple(self.ids.shape), device) if move else self.ids
        ids = ids.reshape(-1) if flatten else ids
        return Segments(ids, self.num_segments, group=self.group, anywhere=self.anywhere and not flatten)

    @property
    def counts(self) -> Tensor:
        """Rows in each segment, (S,), on all ranks of the group."""
        if self._counts is not None and self._snapshot is not None and unchanged(self._snapshot, self.ids):
            return self._counts
        counts = self.local_counts() if self.group is None else group_sum(self.local_counts(), self.group)
        if not is_untracked(self.ids):
            self._set(_counts=counts, _snapshot=snapshot(self.ids))
        return counts

    def local_counts(self) -> Tensor:
        """Rows in each segment on this rank, (S,)."""
        ids, S = _flat(self.ids), self.num_segments
        counts = torch.zeros(S + 1, dtype=torch.float64, device=ids.device)  # integers: the same bits in any order
        return counts.index_add_(0, torch.where(ids < 0, S, ids), counts.new_ones(len(ids)))[:S]

    @property
    def counts_here(self) -> bool:
        """Whether values per segment or pair count on this rank: they do on the first rank of the group only."""
        return self.group is None or torch.distributed.get_rank(self.group) == 0

    def totals(self, x: Tensor) -> Tensor:
        """Sum of `x` over each segment: (N,) to (S,)."""
        self._check_rows("totals", x)
        sums = torch.ops.headloss.segment_totals(_wide(_flat(x)), _flat(self.ids), self.num_segments)
        return sums if self.group is None else _GroupSum.apply(sums, self.group)

    def means(self, x: Tensor) -> Tensor:
        """Mean of `x` over each segment: (N,) to (S,); 0 for a segment without rows."""
        self._check_rows("means", x)
        sums, counts = self.totals(x), self.counts.clamp(min=1)
        return sums / (counts.to(sums.dtype) if sums.is_floating_point() else counts)

    def spread(self, y: Tensor) -> Tensor:
        """The value of each row's segment: (S,) to (N,); 0 for a row without a segment."""
        if tuple(y.shape) != (self.num_segments,):
            raise WrongLengthError(
                f"spread: wanted one value per segment, shape {self._sizes((self.num_segments,))}, got shape "
                f"{self._sizes(y.shape)}"
            )
        x = torch.ops.headloss.segment_spread(y, _flat(self.ids))
        return x if self.ids.ndim == 1 else x.view(self.ids.shape)

    def mean(self, x: Tensor) -> Tensor:
        """The mean of `x` over each row's segment: (N,) to (N,)."""
        return self.spread(self.means(x))

    def maxima(self, x: Tensor) -> Tensor:
        """The largest `x` of each segment: (N,) to (S,); 0 for one without rows.  Equal rows share the gradient."""
        self._check_rows("maxima", x)
        flat = _wide(_flat(x))
        largest = self._largest(flat.detach())
        if not flat.is_floating_point():
            return largest.masked_fill(self.counts == 0, 0)
        ties = (flat.detach() == torch.ops.headloss.segment_spread(largest, _flat(self.ids))).to(flat.dtype)
        share = ties / torch.ops.headloss.segment_spread(self.totals(ties), _flat(self.ids)).clamp(min=1)
        shared = self.totals(torch.where(ties != 0, flat, 0.0) * share)  # off by a rounding where rows tie
        return torch.where(largest.isinf(), shared, largest + (shared - shared.detach()))

    def minima(self, x: Tensor) -> Tensor:
        """The smallest `x` of each segment: (N,) to (S,); 0 for a segment without rows."""
        return -self.maxima(-_wide(x))

    def max(self, x: Tensor) -> Tensor:
        """The maximum of `x` in each row's segment: (N,) to (N,)."""
        return self.spread(self.maxima(x))

    def min(self, x: Tensor) -> Tensor:
        """The minimum of `x` in each row's segment: (N,) to (N,)."""
        return self.spread(self.minima(x))

    def _largest(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.headloss.segment_largest(x, _flat(self.ids), self.num_segments)
        if self.group is not None:
            with collective("taking the maximum over the ranks that share segments"):
                torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.group)
        return found

    def _check_rows(self, method: str, x: Tensor) -> None:
        shape, wanted = tuple(x.shape), tuple(self.ids.shape)
        if shape != wanted and ((len(shape) != 1 and len(wanted) != 1) or x.numel() != self.ids.numel()):
            want, got = self._sizes(wanted), self._sizes(shape)
            raise WrongLengthError(f"{method}: wanted one value per row, shape {want}, got shape {got}")

    def _sizes(self, shape: Sequence[Any]) -> str:
        return sizes(shape, {str(self.num_segments): "segments", str(self.ids.shape[0]): "rows"})

    def __len__(self) -> int:
        return self.num_segments

    def __repr__(self) -> str:
        return f"Segments({self.num_segments} over rows of shape {tuple(self.ids.shape)})"


def _lines(shape: tuple[int, ...], device: torch.device | None) -> Tensor:
    return torch.arange(shape[0], device=device)[:, None].expand(shape)


def _wide(x: Tensor) -> Tensor:
    """The same numbers in a dtype whose sums neither wrap around nor stop growing."""
    return x.long() if not x.is_floating_point() else x.float() if x.dtype.itemsize < 4 else x


def _flat(x: Tensor) -> Tensor:
    return x if x.ndim == 1 else x.reshape(-1)  # a reshape that changes nothing would still appear in a trace


_INTEGERS = frozenset({getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)})


def integers(name: str, x: Tensor) -> Tensor:
    """The same numbers in int64, where -100 is -100 and no sum wraps around."""
    if not isinstance(x, Tensor) or x.dtype not in _INTEGERS:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: wanted an integer tensor, got {got}")
    check_dense(name, x)
    if x.dtype == torch.uint64:
        raise TypeError(f"{name}: torch.uint64 holds numbers that int64 does not; pass {name}.long()")
    return x if x.dtype == torch.int64 else x.long()


def check_dense(name: str, x: Tensor) -> None:
    """Raise for a nested or sparse tensor."""
    if x.is_nested or x.layout is not torch.strided:
        way = "nested; pass its values()" if x.is_nested else f"of {x.layout}; pass {name}.to_dense()"
        raise TypeError(f"{name}: wanted a dense tensor, got one that is {way}")


def check_device(name: str, x: Any, device: torch.device, of: str = "the source") -> None:
    if x.device != device:
        raise ValueError(f"{name}: is on {x.device}, but {of} is on {device}")


def check_size(name: str, n: object) -> None:
    if isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)):
        raise TypeError(f"{name}: wanted an int, got {type(n).__name__}")
    if n < 0:
        raise ValueError(f"{name}: wanted at least 0, got {n}")


def _require(true: Tensor, message: Callable[[], str]) -> None:
    """Raise ValueError now if the host can read without waiting; otherwise assert on the device."""
    if not readable(true):
        torch._assert_async(true, "cu_seqlens: wanted 0 and then rising offsets, the last of them at most `rows`")
    elif not true:
        raise ValueError(message())
