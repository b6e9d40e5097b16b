"""The teachers of a call, bound to its rows: each brings its logits, or its columns, to every chunk.

Dimension key:  C rows of a chunk   V the teacher's vocabulary   U columns that the student has
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headloss.draft import Draft
from headloss.engine.heads import open_source
from headloss.engine.teachers import DenseTeacherRows, SparseTeacherRows, TopRows
from headloss.facts import Fact, Want
from headloss.rows import Rows
from headloss.sources import Linear, Source, Sparse, Teacher, padded, with_tensors
from headloss.teachers import DenseChunk, TeacherChunk
from headloss.top import Top


def bind_teachers(
    teachers: Mapping[str, Teacher], names: tuple[str, ...], source: Source, rows: Rows, backend: Any = None
) -> dict[str, Any]:
    """The teachers that some fact needs, for these rows."""
    found: dict[str, Any] = {}
    for name in sorted(names, key=lambda x: isinstance(teachers[x], Top)):  # those at the top may look at another
        teacher: Any = teachers[name]
        if isinstance(teacher, Sparse):
            found[name] = SparseTeacherRows(teacher, rows, source.fact_dtype, backend)
        elif not isinstance(teacher, Top):
            found[name] = _dense(teacher, source, rows, backend)
        elif teacher.of is None:
            found[name] = TopRows(teacher.k, None, 0)
        else:
            of = found.get(teacher.of) or _dense(teachers[teacher.of], source, rows, backend)
            found[name] = TopRows(teacher.k, of, 0 if teacher.of in found else of.row_bytes)
    return {name: found[name] for name in names}


def _dense(teacher: Any, source: Source, rows: Rows, backend: Any) -> DenseTeacherRows:
    if not isinstance(teacher, Draft):
        return DenseTeacherRows(teacher, source, rows)
    if isinstance(teacher.teacher, Linear) and not teacher.whole:  # only the rows of its weight that count
        head, ids = teacher.teacher, teacher.ids
        bias = None if head.bias is None else head.bias.detach()[ids]
        held = with_tensors(head, {"weight": head.weight.detach()[ids], "bias": bias})
        object.__setattr__(held, "vocab", len(ids))
        return DenseTeacherRows(held, source, rows)
    return DraftRows(teacher, source, rows, backend)


class DraftRows(DenseTeacherRows):
    """A dense teacher on a larger vocabulary, read at the tokens that the student has."""

    def __init__(self, draft: Draft, source: Source, rows: Rows, backend: Any) -> None:
        super().__init__(draft.teacher, source, rows)
        self.ids, self.sums_whole, self.backend = draft.ids, draft.whole, backend
        self.columns = len(draft.ids)
        self.held_CU: dict[int, Tensor] = {}

    @property
    def row_bytes(self) -> int:
        item = self.teacher.chunk_dtype if isinstance(self.teacher, Linear) else self.teacher.logits.dtype
        return super().row_bytes + padded(len(self.ids)) * item.itemsize

    def chunk(self, part: slice, keys: tuple[float | None, ...], slot: int) -> TeacherChunk:
        self.head = self.head or open_source(self.teacher)
        raw_CV = self.head.read(self.rows.numbers(part), slot)[:, : self.teacher.columns]
        C, temperatures = len(raw_CV), tuple(self.own(key, part) for key in keys)
        if slot not in self.held_CU or len(self.held_CU[slot]) < C:
            self.held_CU[slot] = torch.empty(C, len(self.ids), dtype=raw_CV.dtype, device=raw_CV.device)
        held_CU = torch.index_select(raw_CV, 1, self.ids, out=self.held_CU[slot][:C])
        chunk = DenseChunk(held_CU, self.teacher.scale, self.teacher.softcap, temperatures, self.columns)
        if not self.sums_whole:
            return chunk
        want = Want([Fact("lse", float(i + 1)) for i in range(len(keys))])  # at temperatures that it is told
        how = {"scale": self.teacher.scale, "softcap": self.teacher.softcap}
        found = self.backend.sums(raw_CV, None, want, temperatures, **how)
        sums = zip(found.moments, temperatures, strict=True)
        return chunk._replace(whole=tuple(found.max / T + moments.S.log() for moments, T in sums))

    def close(self) -> None:
        super().close()
        self.held_CU = {}

    def strip(self) -> None:
        super().strip()
        self.held_CU = {}

    def whole(self, tensors: Mapping[str, Tensor], source: Source, rows: Rows) -> DraftRows:
        draft = Draft(with_tensors(self.teacher, tensors), self.ids, self.sums_whole)
        return DraftRows(draft, source, rows, self.backend)
