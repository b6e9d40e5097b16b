"""The compact layout of a support's columns, side by side per row; computed once per support and targets.

Dimension key:  N rows   E kept columns of all rows, and one entry per row for its target   C rows of a block
                W places of a row of a block, as many as its longest set has

The kept logits of a block are (C, W), in the order of their columns, followed by -inf.  A target that its row does not
keep is inserted at its place.  All ranks have the same places, and each has the logits of its own columns.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.deferred_checks import is_capturing
from headloss.nested import nest
from headloss.support import IGNORE, SHIFT, Known, Support, check_counted
from headloss.writes import snapshot, unchanged

ALIGNED = 16  # a row's places are a multiple of this, so that rows are aligned
ZERO, NONE = -1, -2  # in place of a column: its logit does not matter; it is another rank's, or there is none


def places_of(support: Support, targets: Tensor | None, find: Any = None) -> Places:
    """The places for these targets, from an earlier call if the targets have not been written to since.

    `find`: a backend's function that finds them in one launch.
    """
    of, before, cached = support.cache.get("places", (None, None, None))
    same = cached is not None and of() is targets and (targets is None or unchanged(before, targets))
    if same and not _captures(support):
        places: Places = cached
        return places
    places = Places.make(support, targets) if find is None else Places.found(support, targets, find)
    remember(support, targets, places)
    return places


def remember(support: Support, targets: Tensor | None, places: Places) -> None:
    """Cache the places for the next call, except during graph capture or if nothing counts writes to the targets."""
    if _captures(support) or (targets is not None and targets.is_inference()):
        return
    of: Any = (lambda: None) if targets is None else weakref.ref(targets)
    support.cache["places"] = of, None if targets is None else snapshot(targets), places


def _captures(support: Support) -> bool:
    return support.keys.is_cuda and is_capturing()


class Entries(NamedTuple):
    """The kept columns of a block's rows, row by row; some entries may be empty."""

    rows: int
    width: int
    numbers: slice | Tensor  # the rows' indices among all rows
    number_E: Tensor  # the row's index among all rows
    id_E: Tensor  # the column in the whole vocabulary; -1 if empty
    place_E: Tensor  # flat index in the block; one past its end if empty
    cache: dict[Any, Any]  # results of `columns` and `by_column`, by their arguments

    def spread(self, x_E: Tensor, fill: float) -> Tensor:
        """(C, W) from a value per entry."""
        flat = torch.full((self.rows * self.width + 1,), fill, dtype=x_E.dtype, device=x_E.device)
        return flat.scatter_(0, self.place_E, x_E)[:-1].view(self.rows, self.width)

    def columns(self, shard: tuple[int, int] | None, single_N: Tensor | None) -> Tensor:
        """Each entry's column in the head, or in a shard (first column, width); else `ZERO` or `NONE`.

        `single_N`: rows with one column, whose probability is 1 whatever its logit is.
        """
        key = shard, single_N is None
        if key not in self.cache:
            start, columns = shard or (0, 1 << SHIFT)
            column_E = self.id_E - start
            column_E = column_E.masked_fill((self.id_E < 0) | (column_E < 0) | (column_E >= columns), NONE)
            if single_N is not None:
                column_E = torch.where((column_E >= 0) & single_N[self.number_E], ZERO, column_E)
            self.cache[key] = column_E
        found: Tensor = self.cache[key]
        return found

    def by_column(self, shard: tuple[int, int] | None, single_N: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The entries sorted by their `columns`: the columns, the rows' indices and the places."""
        key = "sorted", shard, single_N is None
        if key not in self.cache:
            column_E, order_E = self.columns(shard, single_N).to(torch.int32).sort(stable=True)
            self.cache[key] = column_E.long(), self.number_E[order_E], self.place_E[order_E]
        found: tuple[Tensor, Tensor, Tensor] = self.cache[key]
        return found


class Places:
    """The places of each row's kept columns and of its target."""

    keys: Tensor  # row << 32 | column, in order
    offsets: Tensor  # (N + 1,) of the keys
    lengths_N: Tensor  # columns of each row, including an inserted target
    single_N: Tensor  # whether there is only one column
    target_N: Tensor | None
    marked_N: Tensor | None  # the place of a row's target; -100 if the row is ignored
    missing_N: Tensor | None  # whether a target was inserted
    number_E: Tensor
    id_E: Tensor  # -1: none
    place_E: Tensor  # within the row
    TENSORS = (
        "keys", "offsets", "lengths_N", "single_N", "target_N", "marked_N", "missing_N", "number_E", "id_E", "place_E",
    )  # fmt: skip

    def __init__(self, known: Known, tensors: dict[str, Tensor | None], every_row: Entries | None = None) -> None:
        self.known, self._every_row = known, every_row
        self.__dict__ |= tensors
        self.N = len(self.offsets) - 1
        self.extra = 0 if self.target_N is None else 1  # a row's entries beyond its set: its target

    @classmethod
    def make(cls, support: Support, targets: Tensor | None) -> Places:
        known = support.known()
        keys_E, offsets = support.keys[: known.total], support.offsets
        number_N, lengths_N = torch.arange(support.rows, device=keys_E.device), support.lengths
        number_E, id_E = keys_E >> SHIFT, keys_E & ((1 << SHIFT) - 1)
        at_E = torch.arange(known.total, device=keys_E.device)
        place_E = at_E - offsets[number_E]
        own: dict[str, Tensor | None] = dict.fromkeys(("target_N", "marked_N", "missing_N"))
        check_counted(support, targets)
        if targets is not None:
            target_N = targets.reshape(-1)
            ignored_N = target_N == IGNORE
            place_N, kept_N = _find(keys_E, offsets, number_N, target_N)
            missing_N = ~(ignored_N | kept_N)
            lengths_N = lengths_N + missing_N
            own = {"target_N": target_N, "marked_N": place_N.masked_fill(ignored_N, IGNORE), "missing_N": missing_N}
            target_E = target_N[number_E]
            place_E = place_E + (missing_N[number_E] & (id_E > target_E))
            id_E = id_E.masked_fill(target_E == IGNORE, -1)
            # a row's target follows its set, so that the entries of a row are contiguous
            at = at_E + number_E, offsets[1:] + number_N
            number_E = _woven(number_E, number_N, *at)
            id_E = _woven(id_E, torch.where(missing_N, target_N, -1), *at)
            place_E = _woven(place_E, place_N, *at)
        own |= {"lengths_N": lengths_N, "single_N": lengths_N == 1, "keys": keys_E, "offsets": offsets}
        return cls(known, {**own, "number_E": number_E, "id_E": id_E, "place_E": place_E})

    @classmethod
    def found(cls, support: Support, targets: Tensor | None, find: Any) -> Places:
        """Like `make`, by a backend's kernel: `find` takes keys, offsets, targets and the number of places per row."""
        check_counted(support, targets)
        known, target_N = support.known(), None if targets is None else targets.reshape(-1)
        keys_E, width = support.keys[: known.total], aligned(known.longest + (targets is not None))
        entries, rows = find(keys_E, support.offsets, target_N, width)
        own = {"keys": keys_E, "offsets": support.offsets, "target_N": target_N, "marked_N": None, "missing_N": None}
        number_E, id_E, place_E, flat_E, column_E = entries
        every_row = Entries(
            support.rows, width, slice(0, support.rows), number_E, id_E, flat_E, {(None, False): column_E}
        )
        return cls(known, {**own, **rows, "number_E": number_E, "id_E": id_E, "place_E": place_E}, every_row)

    def find(self, number: Tensor, ids_CK: Tensor) -> Tensor:
        """The places of these columns of each row; -1 for columns that the row does not keep."""
        number = number[:, None].expand_as(ids_CK).contiguous()
        place, kept = _find(self.keys, self.offsets, number, ids_CK.contiguous())
        if self.target_N is not None and self.missing_N is not None:
            missing, target = self.missing_N[number], self.target_N[number]
            place, kept = place + (missing & (ids_CK > target)), kept | (missing & (ids_CK == target))
        return torch.where(kept, place, -1)

    def entries(self, keep: Tensor | None, part: slice) -> Entries:
        """The entries of the rows `part` of the rows in `keep`, or of all rows."""
        if keep is None and (part.start, part.stop) == (0, self.N):
            if self._every_row is None:
                self._every_row = self._entries(None, part)
            return self._every_row
        return self._entries(keep, part)

    def _entries(self, keep: Tensor | None, part: slice) -> Entries:
        a, b = (part.start, part.stop) if keep is None else (0, self.N)
        of = slice(*(int(self.known.offsets[n]) + n * self.extra for n in (a, b)))
        number_E, id_E, place_E = self.number_E[of], self.id_E[of], self.place_E[of]
        C, width, row_E = part.stop - part.start, self.width(keep is None, part), number_E - a
        if keep is not None:
            row_N = torch.full((self.N,), -1, dtype=torch.int64, device=number_E.device)
            row_E = row_N.index_copy_(0, keep[part], torch.arange(C, device=number_E.device))[number_E]
            id_E = id_E.masked_fill(row_E < 0, -1)
            number_E = number_E.masked_fill(row_E < 0, -1)  # another block's rows, whose gradient is not written here
        place_E = (row_E * width + place_E).masked_fill(id_E < 0, C * width)
        return Entries(C, width, part if keep is None else keep[part], number_E, id_E, place_E, {})

    def width(self, in_order: bool, part: slice) -> int:
        return width_of(self.known, self.extra, self.N, in_order, part)

    def prepared(self) -> Places:
        """Computes in advance all that a call on an unsharded head needs; returns self."""
        if self.N:
            self.entries(None, slice(0, self.N)).by_column(None, self.single_N)
        return self

    def to(self, device: torch.device | str, non_blocking: bool) -> Places:
        tensors = {name: getattr(self, name) for name in self.TENSORS}
        return Places(self.known, *nest((tensors, self._every_row), lambda x: x.to(device, non_blocking=non_blocking)))


def width_of(known: Known, extra: int, N: int, in_order: bool, part: slice) -> int:
    """Places per row for these rows: the size of their longest set, and one more for an inserted target."""
    longest = known.longest
    if in_order and (part.start, part.stop) != (0, N):
        longest = int(known.offsets[part.start : part.stop + 1].diff().max())
    return aligned(longest + extra)


def aligned(n: int) -> int:
    return max(1, -(-n // ALIGNED)) * ALIGNED


def _find(keys_E: Tensor, offsets: Tensor, number: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """A column's place among its row's kept columns, and whether it is one of them."""
    key = (number << SHIFT) + column.clamp(min=0)
    at = torch.searchsorted(keys_E, key)
    found = keys_E[at.clamp(max=len(keys_E) - 1)] == key if len(keys_E) else torch.zeros_like(at).bool()
    return at - offsets[number], found & (column >= 0)


def _woven(x_E: Tensor, x_N: Tensor, at_E: Tensor, at_N: Tensor) -> Tensor:
    out = torch.empty(len(x_E) + len(x_N), dtype=x_E.dtype, device=x_E.device)
    return out.scatter_(0, at_E, x_E).scatter_(0, at_N, x_N.to(x_E.dtype))
