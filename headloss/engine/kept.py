"""Rows that keep some columns: a sweep over those alone; the rest of the vocabulary is neither made nor read.

Dimension key:  N rows   C rows of a block   M places: the kept columns of all rows, and one per row for its target
                W places of a row of a block, as many as its longest set has   V vocabulary   D hidden size

The kept logits of a block stand side by side, (C, W), in the order of their columns and with -inf behind them, so every
sum, fact and loss runs on them as on a whole row; columns are numbered by their place.  A target that its row does not
keep is put in at its place.  Over ranks the places are the same, and a rank has the logits of its own columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headloss.engine.brought import now_or_later
from headloss.routed import Routed
from headloss.rows import IGNORE, Rows
from headloss.sources import Linear, Source, Sparse, Teacher, parse_bytes
from headloss.support import SHIFT, Known, Support, check_counted
from headloss.trace.signature import IDS

LOGITS_BYTES = 1 << 28  # of kept logits at a time where the source is logits, which has no budget
EVEN = 16  # places of a row, so that rows start on a boundary


class Kept:
    """The support of one call: where each row's kept columns and its target stand."""

    def __init__(self, support: Support, known: Known, targets: Tensor | None, skips_single: bool) -> None:
        self.known, self.offsets, self.skips_single = known, support.offsets, skips_single
        N, device = support.rows, support.keys.device
        self.keys = support.keys[: known.total]
        self.number_N = torch.arange(N, device=device)
        lengths_N = support.lengths
        self.target_N = self.missing_N = None
        if targets is not None:
            self.target_N = targets.reshape(-1)
            counted_N = self.target_N != IGNORE
            self.place_N, here_N = self._find(self.number_N, self.target_N)
            self.missing_N = counted_N & ~here_N
            check_counted(support, targets)
            lengths_N = lengths_N + self.missing_N
        self.lengths_N = lengths_N

    def _find(self, number: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """The place of a column among those that its row was given, and whether it is one of them."""
        key = (number << SHIFT) + column.clamp(min=0)
        at = torch.searchsorted(self.keys, key)
        here = self.keys[at.clamp(max=len(self.keys) - 1)] == key if len(self.keys) else torch.zeros_like(at).bool()
        return at - self.offsets[number], here & (column >= 0)

    def places_of(self, number: Tensor, ids_CK: Tensor) -> Tensor:
        """The places of columns that each row names; -1 for those that it does not keep."""
        number = number[:, None].expand_as(ids_CK).contiguous()
        place, here = self._find(number, ids_CK.contiguous())
        if self.target_N is not None and self.missing_N is not None:
            missing, target = self.missing_N[number], self.target_N[number]
            place, here = place + (missing & (ids_CK > target)), here | (missing & (ids_CK == target))
        return torch.where(here, place, -1)

    def entries(self, rows: Rows, part: slice, width: int) -> Entries:
        """What a block of rows keeps."""
        device, N = self.keys.device, len(self.number_N)
        numbers = rows.numbers(part)
        a, b = (part.start, part.stop) if isinstance(numbers, slice) else (0, N)
        ends = self.known.offsets[a].item(), self.known.offsets[b].item()
        key_E = self.keys[ends[0] : ends[1]]
        number_E, id_E = key_E >> SHIFT, key_E & ((1 << SHIFT) - 1)
        place_E = torch.arange(*ends, device=device) - self.offsets[number_E]
        if self.target_N is not None and self.missing_N is not None:
            own_N = slice(a, b)
            target_E = self.target_N[number_E]
            place_E = place_E + (self.missing_N[number_E] & (id_E > target_E))
            # a row's target comes behind its set, so that the entries of a row stand together
            at_E = torch.arange(len(key_E), device=device) + number_E - a
            at_N = self.offsets[a + 1 : b + 1] - ends[0] + self.number_N[: b - a]
            both = lambda x_E, x_N: _woven(x_E, x_N, at_E, at_N)
            number_E = both(number_E, self.number_N[own_N])
            id_E = both(id_E, torch.where(self.missing_N[own_N], self.target_N[own_N], -1))
            place_E = both(place_E, self.place_N[own_N])
        row_E, here_E = number_E - a, id_E >= 0
        if not isinstance(numbers, slice):
            row_N = torch.full((N,), -1, device=device).index_copy_(0, numbers, self.number_N[: len(numbers)])
            row_E = row_N[number_E]
            here_E = here_E & (row_E >= 0)
        elif rows.valid is not None:
            here_E = here_E & rows.valid[number_E]
        if device.type == "cpu":
            row_E, number_E, id_E, place_E = (x[here_E] for x in (row_E, number_E, id_E, place_E))
            here_E = here_E[here_E]
        C = part.stop - part.start
        place_E = torch.where(here_E, row_E * width + place_E, C * width)
        return Entries(C, width, numbers, number_E, torch.where(here_E, id_E, -1), place_E)

    def projected(self, entries: Entries) -> Tensor:
        """Columns whose logits matter: a softmax over one column is 1 whatever its logit is."""
        if not self.skips_single:
            return entries.id_E
        return entries.id_E.masked_fill(self.lengths_N[entries.number_E] == 1, -1)


class Entries(NamedTuple):
    """The kept columns of a block's rows, row by row; on a GPU some may be none."""

    rows: int
    width: int
    numbers: slice | Tensor  # where the rows stand among all rows
    number_E: Tensor  # the row's number among all rows
    id_E: Tensor  # the column in the whole vocabulary; -1: none
    place_E: Tensor  # where it stands in the block, flat; behind its end if it is none

    def spread(self, x_E: Tensor, fill: float) -> Tensor:
        """(C, W) from a value per entry."""
        flat = torch.full((self.rows * self.width + 1,), fill, dtype=x_E.dtype, device=x_E.device)
        return flat.scatter_(0, self.place_E, x_E)[:-1].view(self.rows, self.width)


def parts_of(known: Known, rows: Rows, source: Source, dense: int = 0) -> list[slice]:
    """Runs of the rows that count whose kept logits, and those of so many dense teachers, fit into the budget."""
    row_bytes, budget = source.fact_dtype.itemsize * (1 + dense), budget_of(source)
    widest = width_of(known, rows, slice(0, rows.count))
    if widest * row_bytes > budget:
        raise ValueError(
            f"memory: a row keeps {known.longest} columns, whose logits take {widest * row_bytes} bytes, the budget is "
            f"{budget}; give at least that"
        )
    if rows.count * widest * row_bytes <= budget:
        return [slice(0, rows.count)]
    if rows.keep is not None:
        step = budget // (widest * row_bytes)
        return [slice(i, min(i + step, rows.count)) for i in range(0, rows.count, step)]
    found, first, width = [], 0, EVEN
    for n, length in enumerate(known.offsets.diff().tolist()):
        wide = max(width, _even(length + (rows.given is not None)))
        if n > first and (n + 1 - first) * wide * row_bytes > budget:
            found.append(slice(first, n))
            first, wide = n, _even(length + (rows.given is not None))
        width = wide
    return [*found, slice(first, rows.count)]


def width_of(known: Known, rows: Rows, part: slice) -> int:
    """Places of a row of these: as many as their longest set has, with a target that it does not."""
    longest = known.longest
    if rows.keep is None and part != slice(0, rows.count):
        longest = int(known.offsets[part.start : part.stop + 1].diff().max())
    return _even(longest + (rows.given is not None))


def _even(n: int) -> int:
    return max(1, -(-n // EVEN)) * EVEN


def budget_of(source: Source) -> int:
    """Bytes of kept logits at a time."""
    return parse_bytes(source.memory) if isinstance(source, Linear) else LOGITS_BYTES


def _woven(x_E: Tensor, x_N: Tensor, at_E: Tensor, at_N: Tensor) -> Tensor:
    out = torch.empty(len(x_E) + len(x_N), dtype=x_E.dtype, device=x_E.device)
    return out.scatter_(0, at_E, x_E).scatter_(0, at_N, x_N.to(x_E.dtype))


def restrict_teachers(
    teachers: Mapping[str, Teacher], support: Support, targets: Tensor | None, source: Source
) -> dict[str, Teacher]:
    """Teachers over kept columns: ids of a sparse one that a row does not keep are left out."""
    found: dict[str, Teacher] = {}
    kept: Kept | None = None
    for name, teacher in teachers.items():
        if isinstance(teacher, Routed):
            raise ValueError('teacher: with support=, routed teachers are for terms that say support="all"')
        if not isinstance(teacher, Sparse):
            if teacher.vocab < source.vocab:
                raise ValueError(
                    f"teacher: has {teacher.vocab} columns, the student {source.vocab}; with support= a teacher has as "
                    f'many, or its term says support="all"'
                )
            found[name] = teacher
            continue
        kept = kept or Kept(support, support.known(), targets, False)
        ids_NK = teacher.ids.reshape(-1, teacher.ids.shape[-1])
        outside_NK = kept.places_of(kept.number_N, ids_NK) < 0
        if name == IDS:
            check_candidates(ids_NK, outside_NK, targets)
        ids = ids_NK.masked_fill(outside_NK, -1).view(teacher.ids.shape)
        found[name] = Sparse(ids, teacher.logprobs)
    return found


def check_candidates(ids_NK: Tensor, outside_NK: Tensor, targets: Tensor | None) -> None:
    """A column that a row does not keep has no log-probability in it."""
    lost_N = (outside_NK & (ids_NK >= 0)).any(-1)
    lost_N = lost_N if targets is None else lost_N & (targets.reshape(-1) != IGNORE)
    if not len(lost_N):
        return

    def check(found: Tensor) -> None:
        some, row = found.tolist()
        if some:
            raise ValueError(f"ids: row {row} names a column that its support does not keep; wanted kept ones, or -1")

    first = torch.stack([lost_N.any().long(), lost_N.int().argmax()])
    now_or_later(first, first[:1], check, "ids: a column that its row's support does not keep")
