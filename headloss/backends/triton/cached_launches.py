"""Repeated calls that differ only in their tensors: a later one only checks the tensors' alignment, and launches.

Dimension key:  C rows handed in   V columns in hand
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headloss.backends.triton import sweeps
from headloss.backends.triton.kernels.records import Given
from headloss.backends.triton.printer.program import Program
from headloss.backends.triton.printer.segments import SegmentProgram
from headloss.backends.triton.settle import Settled, Settling, Spans, Weights, settle_all
from headloss.backends.triton.tiles import address
from headloss.backends.triton.totals import fire_totals, totals_launch
from headloss.backends.triton.visit import (
    UNTAUGHT,
    Arguments,
    Number,
    fire,
    forms_of,
    plan_of,
    taught_by,
    visit,
)
from headloss.backends.triton.visit_records import Visited
from headloss.teachers import DenseChunk, SparseChunk, TeacherChunk


class Visits:
    """Visits with the same program, dtypes, sizes, strides and devices, and the sums of their terms.

    All tensors are contiguous and on the logits' device; a dense teacher has the student's columns.
    """

    __slots__ = ("how", "known", "means", "plan", "temperatures", "theirs")

    def __init__(
        self,
        program: Program,
        temperatures: tuple[float, ...],
        scale: float,
        softcap: float | None,
        means: tuple[bool, ...],  # per term, whether its rows have the weight `mean`; otherwise 1
        theirs: tuple[float, float | None, tuple[float, ...]] | None,  # a teacher's scale, softcap and temperatures
    ) -> None:
        self.plan, self.temperatures, self.how = plan_of(program), temperatures, (scale, softcap)
        self.means, self.theirs = None if all(means) else means, theirs
        self.known: dict[Any, tuple[Any, ...]] = {}  # kernels and their numbers

    def __call__(
        self,
        raw_CV: Tensor,
        target_C: Tensor | None,
        inputs: tuple[Tensor, ...],
        mean: Number,
        factors: tuple[Number, ...],
        weights: tuple[Number, ...],
        out_CV: Tensor | None,
        ignore: bool,
        teacher: Tensor | SparseChunk | None,
    ) -> tuple[Visited, Tensor, Tensor]:
        """The results of the visit, each term's sum over the rows, and the loss; see `visit`."""
        plan, y = self.plan, raw_CV if out_CV is None else out_CV
        begin = address(raw_CV) | address(y)  # on a line of 128 bytes; the others, shifted by 3, on a vector of 16
        if target_C is not None:
            begin |= target_C.data_ptr() << 3
        for x in inputs:
            begin |= x.data_ptr() << 3
        z = ids = in_order = None
        if isinstance(teacher, Tensor):
            z = teacher
            begin |= address(z)
        elif teacher is not None:
            ids = teacher.ids_CK
            in_order = teacher.in_order() if plan.flags["TAIL"] else ids
            begin |= (ids.data_ptr() | in_order.data_ptr()) << 3
        bases = (mean,) * len(weights) if self.means is None else tuple([mean if m else 1.0 for m in self.means])
        key = (ignore, out_CV is None, type(mean))
        known = self.known.get(key)
        if known is None or begin & 127:
            return self._look(raw_CV, target_C, inputs, bases, factors, weights, out_CV, ignore, teacher, key, begin)
        kernel, places, sums_kernel, theirs, numbers = known
        given = Given(self.temperatures, theirs, inputs, bases, factors, *numbers)
        target = target_C if plan.targets or ignore else None
        visited = fire(plan, kernel, places, raw_CV.shape[0], given, raw_CV, y, target, None, z, ids, in_order)
        return visited, *fire_totals(sums_kernel, visited.found, weights)

    def _look(
        self,
        raw_CV: Tensor,
        target_C: Tensor | None,
        inputs: tuple[Tensor, ...],
        bases: tuple[Number, ...],
        factors: tuple[Number, ...],
        weights: tuple[Number, ...],
        out_CV: Tensor | None,
        ignore: bool,
        teacher: Tensor | SparseChunk | None,
        key: Any,
        begin: int,
    ) -> tuple[Visited, Tensor, Tensor]:
        """The same by the full path, which checks everything."""
        plan, program, noted = self.plan, self.plan.program, list[Any]()
        arguments = Arguments(dict(zip(program.inputs, inputs, strict=True)), bases, factors)
        (scale, cap), columns = self.how, raw_CV.shape[1]
        if isinstance(teacher, Tensor):
            assert self.theirs is not None
            teachers: list[TeacherChunk] = [DenseChunk(teacher, *self.theirs, columns)]
        else:
            teachers = [] if teacher is None else [teacher]
        visited = visit(
            raw_CV, target_C, program.want, self.temperatures, program, arguments, out_CV,
            teachers=teachers, scale=scale, softcap=cap, ignore=ignore, noted=noted,
        )  # fmt: skip
        found, first = visited.term_values
        kernel = totals_launch(first, weights)
        if noted and not begin & 127:
            taught = taught_by(plan, columns, teachers[0]) if teachers else UNTAUGHT
            own = (float(columns), float(scale), 1.0 if cap is None else float(cap))
            numbers = (program.numbers, plan.look_numbers, *own, taught.scale, taught.cap)
            self.known[key] = (*noted, kernel, taught.temperatures, numbers)
        return visited, *fire_totals(kernel, found, weights)


class Settles:
    """The same for calls whose rows meet in segments, or are few: a sweep that reads, one launch that settles all
    segments or rows, a sweep that writes, and the sums of the terms.  Tensors are as in `Visits`."""

    __slots__ = ("how", "known", "means", "program", "temperatures")

    def __init__(
        self,
        program: SegmentProgram,
        temperatures: tuple[float, ...],
        scale: float,
        softcap: float | None,
        means: tuple[bool, ...],  # per term, whether its weight is divided by the segment's length
    ) -> None:
        self.program, self.temperatures, self.means = program, temperatures, means
        self.how: dict[str, Any] = {"scale": scale, "softcap": softcap}
        self.known: dict[Any, tuple[Any, ...]] = {}  # kernels and their numbers

    def __call__(
        self,
        raw_CV: Tensor,
        target_C: Tensor,
        inputs: tuple[Tensor, ...],
        bases: tuple[Number, ...],
        factors: tuple[float, ...],
        weights: tuple[float, ...],
        out_CV: Tensor | None,
        ignore: bool,
        spans: Spans | None,
    ) -> tuple[Settled, Tensor, Tensor]:
        """As in `Visits`; `bases`: per term, the weight of a row or of a segment.  Without `spans` no rows meet."""
        begin = address(raw_CV) | address(raw_CV if out_CV is None else out_CV) | target_C.data_ptr() << 3
        for x in inputs:
            begin |= x.data_ptr() << 3
        order = None if spans is None else spans.order is None
        key = (ignore, out_CV is None, order, sweeps.BATCH_INVARIANT, forms_of(bases))
        known = self.known.get(key)
        if known is None or begin & 127:
            return self._look(raw_CV, target_C, inputs, bases, factors, weights, out_CV, ignore, spans, key, begin)
        (read, *write), settling, numbers, sums_kernel = known
        given = Given(self.temperatures, (), inputs, bases, factors, *numbers)
        sums_FC = sweeps.fire_sums(read, raw_CV, target_C)
        settled, rows_FC = settle_all(settling, sums_FC, target_C, spans, given)
        if out_CV is not None and rows_FC is not None:
            sweeps.fire_pull(write[0], raw_CV, target_C, rows_FC, out_CV)
        return settled, *fire_totals(sums_kernel, settled.by_segment, weights)

    def _look(
        self,
        raw_CV: Tensor,
        target_C: Tensor,
        inputs: tuple[Tensor, ...],
        bases: tuple[Number, ...],
        factors: tuple[float, ...],
        weights: tuple[float, ...],
        out_CV: Tensor | None,
        ignore: bool,
        spans: Spans | None,
        key: Any,
        begin: int,
    ) -> tuple[Settled, Tensor, Tensor]:
        """The same by the full path, which checks everything."""
        program, own, noted = self.program, self.temperatures, list[Any]()
        (C, V), gradient = raw_CV.shape, out_CV is not None
        named = lambda xs: dict(zip(program.terms, xs, strict=True))
        given = dict(zip(program.inputs, inputs, strict=True))
        sums_FC = sweeps.sums_matrix(raw_CV, target_C, program.want, own, noted=noted, **self.how)
        call = Settling(
            program, spans, Weights(given, named(bases), named(self.means), named(factors)), target_C, C, own,
            vocab=V, device=raw_CV.device, ignore=ignore, gradient=gradient,
        )  # fmt: skip
        rows_FC = call.settle(sums_FC)
        if out_CV is not None and rows_FC is not None:
            used = [i for i, there in enumerate(program.there) if any(there)]
            there, at = [program.there[i] for i in used], [own[i] for i in used]
            sweeps.pull_rows(raw_CV, target_C, rows_FC, there, at, out_CV, noted=noted, **self.how)
        kernel = totals_launch(0, weights)
        if len(noted) == 1 + gradient and target_C.is_contiguous() and not begin & 127:
            settling = (call.plan, call.launch, gradient, call.groups, (C, C, 0, 0, call.groups, 1, 0))
            numbers = (program.numbers, (), float(V), 1.0, 1.0, 1.0, 1.0)
            self.known[key] = (noted, settling, numbers, kernel)
        return call.settled, *fire_totals(kernel, call.settled.by_segment, weights)
