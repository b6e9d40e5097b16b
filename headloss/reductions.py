"""Reductions, such as a mean over tokens or over segments, written as one weight per row (or segment).

Dimension key:  R rows that count   S segments

A term's value is always sum(weight * value).  The weight is made once, here, from the counts; no loss and no kernel
knows the reduction.  With global counts (`count`) the same weights serve micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from headloss.parallel.shard import process_group
from headloss.parallel.shared_segments import sum_counts
from headloss.prepared import segment_ids
from headloss.rows import IGNORE, Rows
from headloss.segments import Segments, group_sum, integers

REDUCTIONS: Mapping[str, str] = {
    "token_mean": "sum over tokens / number of tokens",
    "token_sum": "sum over tokens",
    "seq_mean_token_mean": "mean over segments of the mean over the segment's tokens",
    "seq_mean_token_sum": "mean over segments of the sum over the segment's tokens",
    "seq_mean_token_sum_norm": "mean over segments of the sum over the segment's tokens / length",
    "weighted_mean": "sum of row_weight * loss / sum of row_weight, both of this call",
}
NEEDS_SEGMENTS = frozenset(name for name in REDUCTIONS if name.startswith("seq_"))


def check_reduced(fn: Callable[..., Any], label: str, reduction: str, name: object, taken: Container[object]) -> None:
    """Check a term's `reduction_segments`: the name of the segments to reduce over in place of the call's."""
    if not (isinstance(name, str) and name and name not in taken):
        got = repr(name) if isinstance(name, str) else type(name).__name__
        raise TypeError(f"reduction_segments: wanted the name of an input that holds hl.Segments, got {got}")
    if reduction not in NEEDS_SEGMENTS:
        wanted = ", ".join(sorted(NEEDS_SEGMENTS))
        raise ValueError(f"reduction_segments: goes with {wanted}; {reduction!r} does not use segments")
    if getattr(fn, "returns", None) in ("segment", "pair"):
        raise ValueError(rows_only(label, fn.returns))  # type: ignore[attr-defined]


def rows_only(of: str, kind: str) -> str:
    """The message for values per segment or pair that are to be reduced over segments of rows."""
    kind = "pair" if kind == "other" else kind
    return (
        f"reduction_segments: {of} has one value per {kind}, and these segments are made of rows; weigh each {kind} by "
        f"row_weight= and use reduction='token_sum'"
    )


class Counts(Mapping[str, Tensor]):
    """Global counts, to be passed on: `objective(..., **hl.count(targets, segments))`."""

    def __init__(self, num_items: Tensor, num_segments: Tensor | None) -> None:
        self.num_items, self.num_segments = num_items, num_segments

    def __getitem__(self, key: str) -> Tensor:
        return {name: getattr(self, name) for name in self}[key]

    def __iter__(self) -> Iterator[str]:
        yield "num_items"
        if self.num_segments is not None:
            yield "num_segments"

    def __len__(self) -> int:
        return 1 if self.num_segments is None else 2

    def __repr__(self) -> str:
        return f"Counts({', '.join(f'{k}={v}' for k, v in self.items())})"


def count(targets: Tensor, segments: Segments | None = None, group: Any = None) -> Counts:
    """Count the tokens that are not ignored, and the segments that have any, on the device, over the ranks of `group`.

    One collective.  If segments lie on several ranks but not on all of `group` (context parallelism inside data
    parallelism), one more over the segments' own group.  Nothing is read back.
    """
    targets = integers("targets", targets)
    group = process_group(group)
    valid = targets.reshape(-1) != IGNORE
    tokens = valid.sum()
    if segments is None:
        return Counts(tokens if group is None else group_sum(tokens, group), None)
    if not isinstance(segments, Segments):
        raise TypeError(f"segments: wanted hl.Segments, got {type(segments).__name__}")
    ids = segment_ids(segments, targets).masked_fill(~valid, -1)
    rows_S, sharing = Segments(ids, segments.num_segments).counts.long(), segments.group
    if sharing is not None and (group is None or _ranks(group) == _ranks(sharing)):
        rows_S, tokens = sum_counts(rows_S, tokens, sharing)
        return Counts(tokens.long(), (rows_S > 0).sum())
    if sharing is not None:
        rows_S, _ = sum_counts(rows_S, tokens, sharing)
    packed = torch.stack([tokens, (rows_S > 0).sum() * segments.counts_here])
    packed = packed if group is None else group_sum(packed, group)
    return Counts(packed[0], packed[1])


def _ranks(group: Any) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)


def weights(
    reduction: str,
    kind: str,
    length: int,
    rows: Rows,
    *,
    num_items: int | Tensor | None,
    num_segments: int | Tensor | None,
    norm: float | None,
    denominator: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """One weight for each of a term's `length` values, which belong to rows, segments or neither (`kind`).

    Values per segment or per pair are averaged over their own number, or summed by `token_sum`.
    """

    def scalar(x: int | float | Tensor) -> Tensor:
        if isinstance(x, Tensor):
            return x.to(device=device, dtype=dtype)
        return torch.full((), x, device=device, dtype=dtype)  # filled on the device: a CUDA graph cannot hold a copy

    counts = {"num_items": num_items, "num_segments": num_segments, "norm": norm, "denominator": denominator}
    if kind == "row":
        shared = shared_weight(reduction, kind, rows, **counts)  # type: ignore[arg-type]
        weight = scalar(shared).expand(length) if rows.valid is None else rows.valid * scalar(shared)
        return weight if reduction != "seq_mean_token_mean" else weight / lengths(rows, dtype)
    one = scalar(1.0).expand(length)
    if kind == "other" and rows.segments is not None and not rows.segments.counts_here:
        one = one * 0  # all ranks of the group have the values of pairs; only one counts them
    if kind == "segment" and rows.segments is not None:
        one = (rows.segments.counts > 0).to(dtype) * rows.segments.counts_here
    if kind == "other" and reduction not in ("weighted_mean", "token_sum"):
        return one / max(1, length)
    return one * scalar(shared_weight(reduction, kind, rows, **counts))  # type: ignore[arg-type]


def shares(
    reduction: str,
    length: float | None,
    ids: Tensor,
    num: int,
    num_segments: int | Tensor | None,
    over_ranks: Callable[[Tensor], Tensor],
) -> Tensor:
    """How much each row counts in a reduction over the segments of `ids`; -1 marks rows that do not count.

    `over_ranks` sums counts over the ranks that share these segments.
    """
    place = torch.where(ids < 0, num, ids)
    counts = over_ranks(place.new_zeros(num + 1).index_add_(0, place, torch.ones_like(place)))
    rows = counts[place] if reduction == "seq_mean_token_mean" else torch.ones_like(place)
    one = reciprocal((counts[:num] > 0).sum() if num_segments is None else num_segments)
    return torch.where(ids < 0, 0.0, reciprocal(rows) * (one if length is None else one / length))


def lengths(rows: Rows, dtype: torch.dtype) -> Tensor:
    """For each row, how many rows its segment has; at least 1."""
    assert rows.segments is not None, "checked before: a segment reduction needs segments"
    return rows.segments.spread(rows.segments.counts.to(dtype)).clamp(min=1)


def over_segments(reduction: str, kind: str) -> bool:
    """Whether the weights depend on how many segments have rows."""
    return reduction not in ("token_sum", "weighted_mean") and (reduction, kind) != ("token_mean", "row")


def shared_weight(
    reduction: str,
    kind: str,
    rows: Rows,
    *,
    num_items: int | Tensor | None = None,
    num_segments: int | Tensor | None = None,
    norm: float | None = None,
    denominator: Tensor | None = None,
) -> float | Tensor:
    """The factor common to the weights of all rows, or of all segments that have rows.  Only `seq_mean_token_mean` also
    divides each row's weight by the length of its segment.
    """
    if reduction == "token_mean" and kind == "row":
        if num_items is None and rows.num_items is None and rows.one_token is not None:
            return rows.one_token
        if num_items is None:
            num_items = rows.tokens if rows.num_items is None else rows.num_items
        return reciprocal(num_items)
    if reduction == "token_sum":
        return 1.0
    if reduction == "weighted_mean":
        assert denominator is not None
        return denominator.reciprocal()
    assert over_segments(reduction, kind)
    if num_segments is None:
        assert rows.segments is not None, "checked before: a segment reduction needs segments"
        known = rows.stats is not None and rows.segments.group is None
        num_segments = rows.stats.present if known else (rows.segments.counts > 0).sum()  # type: ignore[union-attr]
    return reciprocal(num_segments) if norm is None or kind != "row" else reciprocal(num_segments) / norm


def reciprocal(count: int | float | Tensor) -> float | Tensor:
    if not isinstance(count, Tensor):
        return 1.0 / max(1, count)
    wide = torch.float32 if count.device.type == "mps" else torch.float64
    return count.clamp(min=1).to(wide).reciprocal()
