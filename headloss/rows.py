"""`Rows`: which rows of a call count, where they are, and what the host knows about them.

Dimension key:  N rows, flat   R rows that count   S segments

A row whose target is -100 is ignored.  If the host may read the targets (always on a CPU; on other devices this is one
small packed read, or none after `prepare`), ignored rows are dropped before any work; otherwise they are masked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.deferred_checks import host_slots, should_defer
from headloss.deferred_checks import may_read as may_read
from headloss.parallel.shared_segments import sum_counts
from headloss.prepared import (
    SEGMENTS_TWICE,
    Prepared,
    Stats,
    check_stats,
    check_targets_later,
    segment_ids,
    target_numbers,
)
from headloss.segments import Segments, check_device, integers, shallow
from headloss.support import IGNORE as IGNORE


class Rows:
    """The rows of one call: `keep` has the indices of those that count (None: all), or `valid` is a mask of them.

    `skipped`: no row is dropped, because a kernel skips those with target -100; `valid` is then made on first use.
    """

    by_route: Tensor | None = None  # each row's teacher, on the host, if rows are ordered by teacher
    num_items: Tensor | None = None  # over the whole group, set by `join`
    one_token: Tensor | None = None  # 1 / how many rows count, if a kernel computed it

    def __init__(
        self,
        shape: tuple[int, ...],
        targets: Tensor | None,
        keep: Tensor | None,
        valid: Tensor | None,
        segments: Segments | None,
        stats: Stats | None,
        skipped: bool = False,
        by_segment: bool = False,
    ) -> None:
        self.shape, self.keep, self.stats = shape, keep, stats
        self.by_segment = by_segment  # whether the rows that count are ordered by segment
        self.total = math.prod(shape)
        self.count = self.total if keep is None else keep.numel()
        self.given, self.skipped, self._valid, self.segments = targets, skipped, valid, segments

    @property
    def valid(self) -> Tensor | None:
        if self._valid is None and self.skipped:
            assert self.given is not None
            self._valid = self.given.reshape(-1) != IGNORE
        return self._valid

    @functools.cached_property
    def targets(self) -> Tensor | None:
        """Targets of the rows that count; 0 for a masked row."""
        return None if self.given is None else self.take(self.given)

    @property
    def tokens(self) -> int | Tensor:
        """How many rows count."""
        if self.stats is not None:
            return self.stats.valid
        return self.count if self.valid is None else self.valid.sum()

    def take(self, x: Tensor) -> Tensor:
        """(shape, ...) to (R, ...): the rows that count."""
        flat = x if len(self.shape) == 1 else x.reshape(self.total, *x.shape[len(self.shape) :])
        if self.keep is not None:
            return flat.index_select(0, self.keep)
        if self.valid is not None:  # padding may hold -inf or NaN: replace it before a loss sees it
            return flat.masked_fill(~self.valid.view(-1, *(1 for _ in flat.shape[1:])), 0)
        return flat

    def put(self, x: Tensor, held: bool = False) -> Tensor:
        """(R, ...) to (shape, ...), with 0 in the ignored rows; `held`: the 0s are in `x` already."""
        if self.keep is not None:
            x = x.new_zeros(self.total, *x.shape[1:]).index_copy_(0, self.keep, x)
        elif not held and not self.skipped and self.valid is not None:
            x = x.masked_fill(~self.valid.view(-1, *(1 for _ in x.shape[1:])), 0)
        return x.reshape(self.shape + tuple(x.shape[1:]))

    def strip(self) -> None:
        """Drop the references to the caller's tensors, while autograd keeps them."""
        self.given = self.segments = None
        if self.keep is None:
            self.__dict__.pop("targets", None)  # they may be the caller's own memory

    def with_targets(self, targets: Tensor | None) -> Rows:
        """The same rows with their targets back, for a backward pass."""
        other = shallow(self)
        other.given = targets
        return other

    def numbers(self, part: slice) -> slice | Tensor:
        """The indices, among all rows, of rows `part` of those that count."""
        return part if self.keep is None else self.keep[part]

    def ignored(self) -> Tensor | None:
        """The indices of the rows that were dropped."""
        if self.keep is None:
            return None
        mask = torch.ones(self.total, dtype=torch.bool, device=self.keep.device)
        return mask.index_fill_(0, self.keep, False).argsort(descending=True, stable=True)[: self.total - self.count]

    def join(self, said: str, same: Sequence[Tensor]) -> None:
        """Count the rows of segments that lie on several ranks over all of them: one collective.

        It also checks that what these ranks have `said` and the numbers in `same` are equal.
        """
        segments = self.segments
        assert segments is not None
        local = segments.local_counts()
        mine = local.new_full((), self.count) if self.valid is None else self.valid.sum()
        counts, self.num_items = sum_counts(local, mine, segments.group, said, same)
        self.segments = Segments(segments.ids, segments.num_segments, counts, segments.group)

    def aligned(self, most: int) -> list[tuple[slice, slice]] | None:
        """Runs of at most `most` rows that hold whole segments, each with its segments; None if a segment is longer."""
        assert self.stats is not None
        runs: list[tuple[slice, slice]] = []
        row = first_row = first_segment = 0
        for segment, length in enumerate(self.stats.lengths):
            if length > most:
                return None
            if row + length - first_row > most:
                runs.append((slice(first_row, row), slice(first_segment, segment)))
                first_row, first_segment = row, segment
            row += length
        if row > first_row:
            runs.append((slice(first_row, row), slice(first_segment, len(self.stats.lengths))))
        return runs


Count = Callable[..., Any]  # a backend's; see `totals.count_targets`


def count_rows(
    flat: Tensor,
    vocab: int,
    host_read: bool,
    count: Count,
    segments: Segments | None = None,
    ids: Tensor | None = None,
    needed: str | None = None,
) -> tuple[Stats | None, Any]:
    """Count the targets: what the host knows of them, if it may wait for that, and what the device knows.

    `ids`: the segment of each row; the host does not wait for these.
    """
    flat, ids = flat.contiguous(), None if ids is None else ids.contiguous()
    if not host_read and should_defer(flat.device):
        numbers = host_slots(flat.device, 3 if ids is None else 5)
        counted = count(flat, ids, numbers.host)
        check_targets_later(numbers, vocab, segments, needed)
        return None, counted
    counted = count(flat, ids)
    if not host_read:
        check_targets_later(counted.numbers, vocab, segments, needed)
        return None, counted
    stats = Stats.read(counted.numbers)
    check_stats(stats, vocab)
    return stats, counted


def bind_rows(
    shape: tuple[int, ...],
    targets: Tensor | Prepared | None,
    segments: Segments | None,
    *,
    vocab: int,
    device: torch.device,
    host_read: bool = True,
    by_segment: bool = False,
    skips: bool = False,
    needed: str | None = None,
    count: Count | None = None,
) -> Rows:
    """Check targets and segments against the source and find the rows that count.

    `by_segment`: order them by segment; `skips`: a kernel will skip ignored rows, which then need not be dropped;
    `needed`: the name of a term that needs a segment for every row; `count`: counts the rows in one launch.
    """
    stats = ids = None
    if isinstance(targets, Prepared):
        if segments is not None and segments is not targets.segments:
            raise ValueError(SEGMENTS_TWICE)
        stats, segments, targets = targets.known(), targets.segments, targets.targets
    elif targets is None:
        if segments is not None:
            raise ValueError("targets: needed when segments are given (they say which rows count)")
        return Rows(shape, None, None, None, None, None)
    else:
        targets = integers("targets", targets)
    if targets.shape != shape:
        raise ValueError(f"targets: wanted shape {shape} to match the source, got {tuple(targets.shape)}")
    check_device("targets", targets, device)
    if segments is not None:
        check_device("segments", segments.ids, device)
        ids = segment_ids(segments, targets)
    flat = targets if targets.ndim == 1 else targets.reshape(-1)
    if device.type == "meta":
        return Rows(shape, targets, None, None, segments, None)
    one = valid = held = None
    alone = segments is None or (not host_read and segments.group is None)  # only a host that reads uses lengths
    if stats is None and count is not None and alone and flat.shape[0]:
        stats, (_, one, valid, held) = count_rows(flat, vocab, host_read, count, segments, ids, needed)
    else:
        if stats is None:
            numbers = target_numbers(targets, segments)
            stats = Stats.read(numbers) if host_read else None
        if stats is None:
            check_targets_later(numbers, vocab, segments, needed)
        else:
            check_stats(stats, vocab, None if segments is None else segments.num_segments, needed)
    if skips:  # keep all rows: the kernel skips ignored ones
        skipped = stats is None or stats.valid < flat.shape[0]
        if segments is not None and ids is not None:
            if held is None:
                held = ids.masked_fill(flat == IGNORE, -1) if skipped else ids
            segments = Segments(held, segments.num_segments, group=segments.group)
        rows = Rows(shape, targets, None, None, segments, stats, skipped, stats is not None and stats.sorted)
        if stats is None:
            rows.one_token, rows._valid = one, valid
        return rows
    valid = flat != IGNORE if valid is None else valid
    if stats is None:
        if segments is not None and ids is not None:
            held = ids.masked_fill(~valid, -1) if held is None else held
            segments = Segments(held, segments.num_segments, group=segments.group)
        rows = Rows(shape, targets, None, valid, segments, None)
        rows.one_token = one
        return rows
    keep = None
    if segments is not None and by_segment and not stats.sorted:
        assert ids is not None
        keep = ids.masked_fill(~valid, segments.num_segments).argsort(stable=True)[: stats.valid]
    elif stats.valid < len(flat):
        keep = valid.logical_not().argsort(stable=True)[: stats.valid]  # nonzero() would be another host read
    if segments is not None and ids is not None:
        ids = ids if keep is None else ids.index_select(0, keep)
        segments = Segments(ids, segments.num_segments, group=segments.group)
    return Rows(shape, targets, keep, None, segments, stats, by_segment=by_segment or stats.sorted)
