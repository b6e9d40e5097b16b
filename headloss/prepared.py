"""`prepare`: reads what the host must know about targets and segments before a call, so that the call need not wait.

Dimension key:  N rows, flat   S segments
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.deferred_checks import HostCopy, HostSlots, check_later, readable, should_defer
from headloss.segments import Segments, integers
from headloss.support import IGNORE, Support, check_counted, check_kind
from headloss.support_layout import Places, places_of, remember
from headloss.vocab_ids import Tokens, count, to_columns
from headloss.writes import is_untracked, snapshot, tracked, unchanged

SEGMENTS_TWICE = (
    "segments: given to the call, but its targets are prepared; give them to hl.prepare(targets, segments) alone"
)
WRITTEN = "were written to after hl.prepare read them; prepare them again"


class Stats(NamedTuple):
    """The numbers that one host read returns."""

    valid: int  # rows that are not ignored
    low: int  # smallest and largest target among them
    high: int
    unassigned: int  # valid rows without a segment
    extreme_id: int  # the largest segment id, or one below -1 if there is any
    sorted: bool  # whether the segment ids of the valid rows never decrease
    lengths: tuple[int, ...]  # valid rows of each segment

    @property
    def present(self) -> int:  # segments that have valid rows
        return len(self.lengths) - self.lengths.count(0)

    @classmethod
    def read(cls, numbers: Tensor) -> Stats:
        """From the numbers that `target_numbers` makes; this waits for the device."""
        valid, low, high, *by_segment = numbers.tolist()
        unassigned, extreme_id, *order = by_segment or (0, -1, 0)
        unsorted, *lengths = order or (1,)  # a kernel that counts does not check the order
        return cls(valid, low, high, unassigned, extreme_id, not unsorted, tuple(lengths))


class Prepared:
    """Targets and segments with the numbers that the host needs, or a copy of these on its way.  See `prepare`."""

    __slots__ = ("_copy", "_stats", "places", "segments", "snapshots", "support", "targets", "tokens")

    def __init__(
        self,
        targets: Tensor,
        segments: Any,
        numbers: Tensor | HostCopy,
        support: Support | None = None,
        places: Places | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self.tokens = tokens  # if given, targets are columns of a head with these
        self.targets, self.segments, self.support, self.places = targets, segments, support, places
        if support is not None and places is not None:
            remember(support, targets, places)
        self._copy = numbers if isinstance(numbers, HostCopy) else HostCopy(numbers)
        self._stats: Stats | None = None
        tensors = [("targets", targets)]
        tensors += [] if segments is None else [("segments", segments.ids)]
        tensors += [] if tokens is None else [("vocab_ids", tokens.vocab_ids)]
        self.snapshots = tuple([(name, x, snapshot(x)) for name, x in tensors])

    def __reduce__(self) -> Any:
        self.check()
        return Prepared, (self.targets, self.segments, self.numbers, self.support, self.places, self.tokens)

    def in_columns(self) -> Prepared:
        """The same targets for a call whose targets are columns of the head, not tokens."""
        self.check()
        return Prepared(self.targets, self.segments, self._copy)

    @property
    def numbers(self) -> Tensor:
        """The numbers as a CPU tensor; waits for them if they are still on their way."""
        return self._copy.wait()

    @property
    def stats(self) -> Stats:
        if self._stats is None:
            self._stats = Stats.read(self.numbers)
        return self._stats

    def known(self) -> Stats:
        """`stats`; raises if the tensors have been written to since they were read."""
        self.check()
        return self._stats or self.stats

    def check(self) -> None:  # does not wait for the numbers
        if torch.compiler.is_compiling():  # a graph reads no version: see `check_prepared`
            return
        for name, x, before in self.snapshots:
            if not unchanged(before, x):
                raise ValueError(f"{name}: {WRITTEN}")

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Prepared:
        self.check()
        if (segments := self.segments) is not None:
            moved = segments.ids.to(device, non_blocking=non_blocking)
            segments = Segments(moved, segments.num_segments, group=segments.group)
        support = None if self.support is None else self.support.to(device, non_blocking)
        places = None if self.places is None else self.places.to(device, non_blocking)
        tokens = None if self.tokens is None else self.tokens.to(device, non_blocking)
        targets = self.targets.to(device, non_blocking=non_blocking)
        return Prepared(targets, segments, self._copy, support, places, tokens)


def prepare(
    targets: Tensor,
    segments: Segments | None = None,
    *,
    support: Support | None = None,
    vocab_ids: Tensor | None = None,
    non_blocking: bool = False,
) -> Prepared:
    """Read now what the host must know about the targets, so that the training step need not wait for it.

    In a data loader, on the CPU:

    >>> batch = hl.prepare(targets, segments).to("cuda")
    >>> out = objective(hl.Linear(hidden, weight), batch)

    For targets on a GPU, `non_blocking=True` starts a copy and returns; the call that needs the numbers waits for that
    copy alone.  Start it before the model's forward, and it is done by the time the head runs.

    `vocab_ids`: those of the head, if it has any.
    """
    targets, tokens = integers("targets", targets), None
    if support is not None:
        check_kind(support)
        support.check_written()
    targets = tracked(targets)
    if vocab_ids is not None:
        if support is not None:
            raise ValueError("support: a head with vocab_ids has its own vocabulary; leave out one of the two")
        ids = integers("vocab_ids", vocab_ids)
        if ids.ndim != 1 or ids.device != targets.device:
            got = f"shape {tuple(ids.shape)} on {ids.device}"
            raise ValueError(f"vocab_ids: wanted one token per column on {targets.device}, got {got}")
        counted = count(targets != IGNORE)
        targets, lost = to_columns(ids, targets, IGNORE, "targets")
        tokens = Tokens(tracked(ids), count(lost), counted, lost, ids.clone())
    if segments is not None:
        if not isinstance(segments, Segments):
            raise TypeError(f"segments: wanted hl.Segments, got {type(segments).__name__}")
        segments = segments.fitted(tuple(targets.shape), targets.device)
        if is_untracked(segments.ids):
            segments = Segments(tracked(segments.ids), segments.num_segments, None, segments.group, segments.anywhere)
    numbers = target_numbers(targets, segments)
    copy, places = HostCopy(numbers) if non_blocking else numbers.cpu(), None
    if support is not None and non_blocking and support.keys.is_cuda:  # places would wait for the support's sizes
        check_counted(support, targets)
    elif support is not None:
        places = places_of(support, targets).prepared()
    return Prepared(targets, segments, copy, support, places, tokens)


def target_numbers(targets: Tensor, segments: Segments | None) -> Tensor:
    """The numbers that `Stats.read` takes, on the targets' device."""
    ids = None if segments is None else segment_ids(segments, targets)
    flat = targets.reshape(-1)
    valid = flat != IGNORE
    big = torch.iinfo(flat.dtype).max
    low_high = [
        flat.masked_fill(~valid, big).min() if len(flat) else valid.sum(),
        flat.masked_fill(~valid, 0).max() if len(flat) else valid.sum(),
    ]
    parts = [torch.stack([x.long() for x in (valid.sum(), *low_high)])]
    if ids is not None and segments is not None:
        valid_ids = ids.masked_fill(~valid, -1)
        falls = (valid_ids.clamp(min=0).cummax(0).values > valid_ids) & (valid_ids >= 0) if len(flat) else valid
        low, high = ids.aminmax() if len(ids) else (ids.new_full((), -1), ids.new_full((), -1))
        extreme_id = torch.where(low < -1, low, high)
        parts.append(torch.stack([(valid & (ids < 0)).sum(), extreme_id.long(), falls.any().long()]))
        inside = valid_ids.clamp(max=segments.num_segments - 1)
        parts.append(Segments(inside, segments.num_segments).counts.long())
    return torch.cat(parts)


def check_prepared(numbers: Tensor, targets: Tensor, segments: Segments | None) -> None:
    """In a graph, where nothing notices writes to a tensor: check that the numbers still are those of the targets."""

    def check(current: Tensor) -> None:
        if not torch.equal(current, numbers[: len(current)]):
            raise ValueError(f"targets or segments: {WRITTEN}")

    if should_defer(targets.device):  # only the targets' range and count, which are cheap
        check_later(target_numbers(targets, None), check)
    elif targets.device.type == "cpu":
        check(target_numbers(targets, segments))


def check_targets_later(
    numbers: Tensor | HostSlots, vocab: int, segments: Segments | None = None, needed: str | None = None
) -> None:
    """Check what `target_numbers` made: once it reaches the host, or on the device while a CUDA graph is captured."""
    count = None if segments is None else segments.num_segments
    if isinstance(numbers, HostSlots) or should_defer(numbers.device):
        check_later(numbers, lambda x: check_stats(Stats.read(x), vocab, count, needed))
        return
    if readable(numbers):
        check_stats(Stats.read(numbers), vocab, count, needed)
        return
    in_range = (numbers[0] == 0) | ((numbers[1] >= 0) & (numbers[2] < vocab))
    torch._assert_async(in_range, "targets: out of range")
    if segments is not None:
        inside = (numbers[4] >= -1) & (numbers[4] < segments.num_segments)
        torch._assert_async(inside, "segments: an id is out of range")
        if needed is not None:
            torch._assert_async(numbers[3] == 0, "segments: rows that are not ignored have no segment (id -1)")


def segment_ids(segments: Segments, targets: Tensor) -> Tensor:
    """The ids as a vector, checked against the targets' shape; ids or targets may be flat already."""
    ids = segments.fitted(tuple(targets.shape), targets.device).ids
    if ids.shape != targets.shape and not (ids.ndim == 1 and ids.numel() == targets.numel()):
        raise ValueError(
            f"segments: ids have shape {tuple(ids.shape)}, the targets {tuple(targets.shape)}; they must agree "
            f"(from_cu_seqlens(..., rows=N) pads with rows of no segment)"
        )
    return ids.reshape(-1)


def check_stats(stats: Stats, vocab: int, num_segments: int | None = None, needed: str | None = None) -> None:
    if stats.valid and not 0 <= stats.low <= stats.high < vocab:
        bad = stats.low if stats.low < 0 else stats.high
        hint = f"; ignored rows are marked {IGNORE}" if stats.low < 0 else ""
        raise ValueError(f"targets: wanted values in [0, {vocab}) or {IGNORE}, got {bad}{hint}")
    if num_segments is not None and not -1 <= stats.extreme_id < num_segments:
        raise ValueError(f"segments: id {stats.extreme_id} is outside [-1, {num_segments})")
    if num_segments is not None and needed is not None and stats.unassigned:
        raise ValueError(
            f"segments: {stats.unassigned} rows that are not ignored have no segment (id -1), "
            f"but term {needed!r} needs one for each"
        )
