"""Bind the teachers of a call to its rows, with classes for routed teachers and those with a larger vocabulary.

Dimension key:  C rows of a chunk   V the teacher's vocabulary   U columns that the student has
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.deferred_checks import check_now_or_later
from headloss.derived_teachers import AtIds, Top
from headloss.engine.heads import Head, LinearHead, open_source
from headloss.engine.teachers import DenseTeacherRows, SparseTeacherRows, TopRows
from headloss.routed import Routed
from headloss.rows import IGNORE, Rows
from headloss.sources import Linear, Source, Sparse, Teacher, padded, with_tensors
from headloss.support import Support
from headloss.support_layout import places_of
from headloss.teachers import DenseChunk, TeacherChunk
from headloss.trace.signature import CANDIDATES


def bind_teachers(
    teachers: Mapping[str, Teacher], names: tuple[str, ...], source: Source, rows: Rows, backend: Any = None
) -> dict[str, Any]:
    """Bind the teachers that some fact needs to these rows."""
    found: dict[str, Any] = {}
    for name in sorted(names, key=lambda x: isinstance(teachers[x], Top)):  # a Top may need another
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
    if isinstance(teacher, Routed):
        each = [DenseTeacherRows(t, source, rows) for t in teacher.teachers.values()]
        return RoutedRows(each, teacher.route, rows, teacher.known(), source.fact_dtype)
    if not isinstance(teacher, AtIds):
        return DenseTeacherRows(teacher, source, rows)
    if isinstance(teacher.teacher, Linear) and not teacher.whole:
        return GatheredRows(teacher.teacher, teacher.ids, source, rows)
    return AtIdsRows(teacher, source, rows, backend)


VOCAB_IDS = "vocab_ids"  # the name of the student's, which a pull reads again


def _and_ids(tensors: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    return {**tensors, VOCAB_IDS: ids}


def _but_ids(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if name != VOCAB_IDS}


class GatheredRows(DenseTeacherRows):
    """A linear teacher with a larger vocabulary: only the rows of its weight that the student has are gathered."""

    def __init__(self, teacher: Source, ids: Tensor, source: Source, rows: Rows) -> None:
        super().__init__(with_tensors(teacher, {"vocab": len(ids)}), source, rows)
        self.ids = ids

    @property
    def fixed_bytes(self) -> int:
        weight = self.teacher.weight  # type: ignore[union-attr]
        return super().fixed_bytes + len(self.ids) * weight.shape[1] * weight.element_size()

    def _open(self) -> Head:
        named = {"weight": self.teacher.weight, "bias": self.teacher.bias}  # type: ignore[union-attr]
        held = {name: x.detach()[self.ids] for name, x in named.items() if x is not None}
        return open_source(with_tensors(self.teacher, held))

    def tensors(self) -> dict[str, Tensor]:
        return _and_ids(super().tensors(), self.ids)

    def restored(self, tensors: Mapping[str, Tensor], source: Source, rows: Rows) -> GatheredRows:
        return GatheredRows(with_tensors(self.teacher, _but_ids(tensors)), tensors[VOCAB_IDS], source, rows)


class AtIdsRows(DenseTeacherRows):
    """An `AtIds`: a dense teacher with a larger vocabulary, read at the tokens that the student has."""

    def __init__(self, at_ids: AtIds, source: Source, rows: Rows, backend: Any) -> None:
        super().__init__(at_ids.teacher, source, rows)
        self.ids, self.sums_tail, self.backend = at_ids.ids, at_ids.whole, backend
        self.columns = len(at_ids.ids)
        self.held_CU: dict[int, Tensor] = {}

    @property
    def row_bytes(self) -> int:
        item = self.teacher.chunk_dtype if isinstance(self.teacher, Linear) else self.teacher.logits.dtype
        return super().row_bytes + padded(len(self.ids)) * item.itemsize

    def chunk(self, part: slice, keys: tuple[float | None, ...], slot: int) -> TeacherChunk:
        self.head = self.head or self._open()
        raw_CV = self.head.read(self.rows.numbers(part), slot)[:, : self.teacher.columns]
        C, temperatures = len(raw_CV), tuple(self.own(key, part) for key in keys)
        if slot not in self.held_CU or len(self.held_CU[slot]) < C:
            U = len(self.ids)
            self.held_CU[slot] = torch.empty(C, padded(U), dtype=raw_CV.dtype, device=raw_CV.device)[:, :U]
        held_CU = self.held_CU[slot][:C]
        how = self.teacher.scale, self.teacher.softcap
        tail = self.backend.take(raw_CV, self.ids, held_CU, temperatures if self.sums_tail else (), *how)
        return DenseChunk(held_CU, *how, temperatures, self.columns, tail)

    def close(self) -> None:
        super().close()
        self.held_CU = {}

    def tensors(self) -> dict[str, Tensor]:
        return _and_ids(super().tensors(), self.ids)

    def restored(self, tensors: Mapping[str, Tensor], source: Source, rows: Rows) -> AtIdsRows:
        at_ids = AtIds(with_tensors(self.teacher, _but_ids(tensors)), tensors[VOCAB_IDS], self.sums_tail)
        return AtIdsRows(at_ids, source, rows, self.backend)


class RoutedRows(DenseTeacherRows):
    """A dense teacher for each row: each teacher's head makes the logits of its own rows only."""

    def __init__(
        self, each: Sequence[DenseTeacherRows], route: Tensor, rows: Rows, host_N: Tensor, dtype: torch.dtype
    ) -> None:
        first = each[0]
        self.teacher, self.rows, self.columns = first.teacher, rows, first.columns  # same scale and softcap in all
        self.head = self.made = None
        self.each, self.route, self.held_CV = each, route, dict[int, Tensor]()
        route_R = rows.take(route)
        self.route_R = route_R if rows.valid is None else route_R.masked_fill(~rows.valid, -1)
        self.none_R = self.route_R < 0
        self.host_N = host_N
        if rows.by_route is not None or (rows.keep is None and rows.valid is None):
            self.host_R = host_N if rows.by_route is None else rows.by_route
        else:
            self.host_R = self.route_R.cpu()  # the host must know which rows each has
        self.temperature = first.temperature
        if any(isinstance(x.temperature, Tensor) or x.temperature != first.temperature for x in each):
            T_R = torch.ones(rows.count, dtype=dtype, device=route.device)
            for i, x in enumerate(each):
                own = torch.as_tensor(x.temperature, dtype=dtype, device=T_R.device)
                T_R = torch.where(self.route_R == i, own, T_R)
            self.temperature = T_R

    @property
    def row_bytes(self) -> int:
        """Bytes per row of a chunk; rows of a teacher that are not contiguous exist twice: as made, and copied."""
        apart = bool((self.host_R.diff() < 0).any())
        return self.width * self._dtype.itemsize * (2 if apart else 1)

    @property
    def _dtype(self) -> torch.dtype:
        """A dtype that holds the logits of all teachers without rounding."""
        each = [t.chunk_dtype if isinstance(t, Linear) else t.logits.dtype for t in (x.teacher for x in self.each)]
        return functools.reduce(torch.promote_types, each)

    def hides(self, fact: str, part: slice) -> Tensor | None:
        return self.none_R[part]

    def chunk(self, part: slice, keys: tuple[float | None, ...], slot: int) -> TeacherChunk:
        if self.made is None or self.made[:2] != (part, slot):
            self.made = part, slot, self._read(part, slot)
        temperatures = tuple(self.own(key, part) for key in keys)
        return DenseChunk(self.made[2], self.teacher.scale, self.teacher.softcap, temperatures, self.columns)

    def _read(self, part: slice, slot: int) -> Tensor:
        host_C, V, device = self.host_R[part], self.teacher.columns, self.route.device
        if slot not in self.held_CV or len(self.held_CV[slot]) < len(host_C):
            self.held_CV[slot] = torch.empty(len(host_C), padded(V), dtype=self._dtype, device=device)[:, :V]
        held_CV, numbers = self.held_CV[slot][: len(host_C)], self.rows.numbers(part)
        held_CV.masked_fill_((self.route_R[part] < 0)[:, None], 0) if bool((host_C < 0).any()) else None
        for i, teacher in enumerate(self.each):
            mine = (host_C == i).nonzero()[:, 0]
            if not len(mine):
                continue
            head = teacher.head = teacher.head or teacher._open()
            first, end = int(mine[0]), int(mine[-1]) + 1
            here: Any = slice(first, end) if end - first == len(mine) else mine.to(device)
            if isinstance(numbers, Tensor):
                at: Any = numbers[here]
            else:
                start = numbers.start
                at = slice(start + first, start + end) if isinstance(here, slice) else start + here
            if isinstance(head, LinearHead) and isinstance(here, slice) and teacher.teacher.chunk_dtype == self._dtype:  # type: ignore[union-attr]
                own, head.buffers_CV = head.buffers_CV, {slot: held_CV[here]}  # write the product here
                head.read(at, slot)
                head.buffers_CV = own  # or a later chunk of scattered rows would overwrite others
            else:
                held_CV[here] = head.read(at, slot).to(self._dtype)
        return held_CV

    def close(self) -> None:
        self.made, self.held_CV = None, {}
        for teacher in self.each:
            teacher.close()

    def tensors(self) -> dict[str, Tensor]:
        own = {f"{i}:{n}": x for i, teacher in enumerate(self.each) for n, x in teacher.tensors().items()}
        return {"route": self.route, **own}

    def strip(self) -> None:
        self.close()
        for teacher in self.each:
            teacher.strip()
        self.teacher, self.temperature = self.each[0].teacher, 1.0
        self.route = self.route_R = torch.empty(0, dtype=torch.int64, device="cpu")

    def restored(self, tensors: Mapping[str, Tensor], source: Source, rows: Rows) -> RoutedRows:
        each = []
        for i, teacher in enumerate(self.each):
            own = {n.split(":", 1)[1]: x for n, x in tensors.items() if n.startswith(f"{i}:")}
            each.append(teacher.restored(own, source, rows))
        return RoutedRows(each, tensors["route"], rows, self.host_N, source.fact_dtype)


def restrict_teachers(
    teachers: Mapping[str, Teacher], support: Support, targets: Tensor | None, source: Source, backend: Any
) -> dict[str, Teacher]:
    """The teachers for kept columns: sparse ones lose the ids that a row does not keep."""
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
        if name == CANDIDATES:
            check_candidates(ids_NK, outside_NK, targets)
        ids = ids_NK.masked_fill(outside_NK, -1).view(teacher.ids.shape)
        found[name] = Sparse(ids, teacher.logprobs)
    return found


def check_candidates(ids_NK: Tensor, outside_NK: Tensor, targets: Tensor | None) -> None:
    """Raise if a row names a column that its support does not keep: it has no log-probability in that row."""
    lost_N = (outside_NK & (ids_NK >= 0)).any(-1)
    lost_N = lost_N if targets is None else lost_N & (targets.reshape(-1) != IGNORE)
    if not len(lost_N):
        return

    def check(found: Tensor) -> None:
        some, row = found.tolist()
        if some:
            raise ValueError(
                f"ids: row {row} names a column that its support does not keep; name only kept columns, or -1"
            )

    first = torch.stack([lost_N.any().long(), lost_N.int().argmax()])
    check_now_or_later(first, first[:1], check, "ids: a column that its row's support does not keep")
