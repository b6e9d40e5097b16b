"""Rows that keep some columns: how they are walked, and what their teachers are.

Dimension key:  N rows   K ids per row
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headloss.places import EVEN, even, places_of, width_of
from headloss.routed import Routed
from headloss.rows import IGNORE, Rows
from headloss.segments import now_or_later
from headloss.sources import Linear, Source, Sparse, Teacher, parse_bytes
from headloss.support import Known, Support
from headloss.trace.signature import IDS

LOGITS_BYTES = 1 << 28  # of kept logits at a time where the source is logits, which has no budget


def parts_of(known: Known, rows: Rows, source: Source, dense: int = 0) -> list[slice]:
    """Runs of the rows that count whose kept logits, and those of so many dense teachers, fit into the budget."""
    row_bytes, budget = source.fact_dtype.itemsize * (1 + dense), budget_of(source)
    widest = width(known, rows, slice(0, rows.count))
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
    found, first, widest = [], 0, EVEN
    for n, length in enumerate(known.offsets.diff().tolist()):
        wide = max(widest, even(length + (rows.given is not None)))
        if n > first and (n + 1 - first) * wide * row_bytes > budget:
            found.append(slice(first, n))
            first, wide = n, even(length + (rows.given is not None))
        widest = wide
    return [*found, slice(first, rows.count)]


def width(known: Known, rows: Rows, part: slice) -> int:
    """Places of a row of these."""
    return width_of(known, int(rows.given is not None), rows.count, rows.keep is None, part)


def budget_of(source: Source) -> int:
    """Bytes of kept logits at a time."""
    return parse_bytes(source.memory) if isinstance(source, Linear) else LOGITS_BYTES


def restrict_teachers(
    teachers: Mapping[str, Teacher], support: Support, targets: Tensor | None, source: Source, backend: Any
) -> dict[str, Teacher]:
    """Teachers over kept columns: ids of a sparse one that a row does not keep are left out."""
    found: dict[str, Teacher] = {}
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
        places = places_of(support, targets, getattr(backend, "find_places", None))
        ids_NK = teacher.ids.reshape(-1, teacher.ids.shape[-1])
        outside_NK = places.find(torch.arange(len(ids_NK), device=ids_NK.device), ids_NK) < 0
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
