"""Repeated calls that differ only in their tensors: a later one only checks the tensors' alignment, and launches.

Dimension key:  C rows handed in   V columns in hand
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.backends.triton import second_read, sweeps
from headloss.backends.triton import teachers as compared
from headloss.backends.triton.given_numbers import Number, forms_of
from headloss.backends.triton.kernels.records import Given
from headloss.backends.triton.printer.program import Program
from headloss.backends.triton.settle import Settled, Settling, Spans, Weights, in_order, packed, settle_all
from headloss.backends.triton.settled_pull import pull_settled
from headloss.backends.triton.tiles import address
from headloss.backends.triton.totals import fire_totals, totals_launch
from headloss.backends.triton.visit import (
    NO_TEACHER,
    Arguments,
    fire,
    plan_of,
    teacher_arguments,
    visit,
)
from headloss.backends.triton.visit_records import Visited
from headloss.facts import finish
from headloss.nested import nest
from headloss.teachers import DenseChunk, SparseChunk, TeacherChunk

Again = Callable[..., Any]  # launches what was launched before, on other tensors of the same form


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
        theirs: Sequence[tuple[float, float | None, tuple[float, ...]]],  # teachers' scale, softcap and temperatures
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
        teachers: tuple[Tensor | SparseChunk, ...],
    ) -> tuple[Visited, Tensor, Tensor]:
        """The results of the visit, each term's sum over the rows, and the loss; see `visit`."""
        teacher = teachers[0] if teachers else None
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
            call = raw_CV, target_C, inputs, bases, factors, weights, out_CV, ignore, teacher
            return self._make(*call, None if begin & 127 else key)
        kernel, places, sums_kernel, theirs, numbers = known
        given = Given(self.temperatures, theirs, inputs, bases, factors, *numbers)
        target = target_C if plan.targets or ignore else None
        visited = fire(plan, kernel, places, raw_CV.shape[0], given, raw_CV, y, target, z, ids, in_order)
        return visited, *fire_totals(sums_kernel, visited.found, weights)

    def _make(self, *call: Any) -> tuple[Visited, Tensor, Tensor]:
        """The same by the full path, which checks everything; last comes the key to keep it under, or None."""
        raw_CV, target_C, inputs, bases, factors, weights, out_CV, ignore, teacher, key = call
        plan, program, noted = self.plan, self.plan.program, list[Any]()
        arguments = Arguments(dict(zip(program.inputs, inputs, strict=True)), bases, factors)
        (scale, cap), columns = self.how, raw_CV.shape[1]
        if isinstance(teacher, Tensor):
            teachers: list[TeacherChunk] = [DenseChunk(teacher, *self.theirs[0], columns)]
        else:
            teachers = [] if teacher is None else [teacher]
        visited = visit(
            raw_CV, target_C, program.want, self.temperatures, program, arguments, out_CV,
            teachers=teachers, scale=scale, softcap=cap, ignore=ignore, noted=noted,
        )  # fmt: skip
        found, first = visited.term_values
        kernel = totals_launch(first, weights)
        if noted and key is not None:
            taught = teacher_arguments(plan, columns, teachers[0]) if teachers else NO_TEACHER
            own = (float(columns), float(scale), 1.0 if cap is None else float(cap))
            numbers = (program.numbers, plan.divergence_numbers, *own, taught.scale, taught.cap)
            self.known[key] = (*noted, kernel, taught.temperatures, numbers)
        return visited, *fire_totals(kernel, found, weights)


class Settles:
    """The same for calls whose rows meet in segments, are few, or have several teachers: launches that read, one that
    settles all segments or rows, one that writes, and the sums of the terms.  Tensors are as in `Visits`."""

    __slots__ = ("how", "known", "means", "program", "temperatures", "theirs")

    def __init__(
        self,
        program: Program,
        temperatures: tuple[float, ...],
        scale: float,
        softcap: float | None,
        means: tuple[bool, ...],  # per term, whether its weight is divided by the segment's length
        theirs: Sequence[tuple[float, float | None, tuple[float, ...]]],
    ) -> None:
        self.program, self.temperatures, self.means, self.theirs = program, temperatures, means, theirs
        self.how: dict[str, Any] = {"scale": scale, "softcap": softcap}
        self.known: dict[Any, tuple[Any, ...]] = {}  # kernels and their numbers

    def __call__(
        self,
        raw_CV: Tensor,
        target_C: Tensor | None,
        inputs: tuple[Tensor, ...],
        bases: tuple[Number, ...],
        factors: tuple[float, ...],
        weights: tuple[float, ...],
        out_CV: Tensor | None,
        ignore: bool,
        teachers: tuple[Tensor, ...],
        spans: Spans | None = None,
    ) -> tuple[Settled, Tensor, Tensor]:
        """As in `Visits`; `bases`: per term, the weight of a row or of a segment.  Without `spans` no rows meet."""
        begin = address(raw_CV) | address(raw_CV if out_CV is None else out_CV)
        if target_C is not None:
            begin |= target_C.data_ptr() << 3
        for x in inputs:
            begin |= x.data_ptr() << 3
        for x in teachers:
            begin |= address(x)
        order = None if spans is None else spans.order is None
        key = (ignore, out_CV is None, order, sweeps.BATCH_INVARIANT, forms_of(bases))
        known = self.known.get(key)
        call = (raw_CV, target_C, inputs, bases, factors, weights, out_CV, ignore, teachers, spans)
        if known is None or begin & 127:
            return self._make(*call, None if begin & 127 else key)
        read, write, settling, numbers, sums_kernel = known
        given = Given(self.temperatures, (), inputs, bases, factors, *numbers)
        sums_FC = read(raw_CV, target_C, teachers)
        settled, rows_FC = settle_all(settling, sums_FC, target_C, spans, given)
        if rows_FC is not None:
            write(raw_CV, target_C, settled, rows_FC, out_CV, teachers)
        return settled, *fire_totals(sums_kernel, settled.by_segment, weights)

    def _make(self, *call: Any) -> tuple[Settled, Tensor, Tensor]:
        """The same by the full path, which checks everything; last comes the key to keep it under, or None."""
        raw_CV, target_C, inputs, bases, factors, weights, out_CV, ignore, teachers, spans, key = call
        program, own = self.program, self.temperatures
        (C, V), gradient = raw_CV.shape, out_CV is not None
        named = lambda xs: dict(zip(program.terms, xs, strict=True))
        given = dict(zip(program.inputs, inputs, strict=True))
        chunks = [DenseChunk(x, *how, V) for x, how in zip(teachers, self.theirs, strict=True)]
        sums_FC, read = self._read(raw_CV, target_C, chunks)
        settling = Settling(
            program, spans, Weights(given, named(bases), named(self.means), named(factors)), target_C, C, own,
            vocab=V, device=raw_CV.device, ignore=ignore, gradient=gradient,
        )  # fmt: skip
        rows_FC = settling.settle(sums_FC)
        write = None
        if out_CV is not None and rows_FC is not None:
            write = self._write(raw_CV, target_C, settling.settled, rows_FC, out_CV, chunks)
        kernel = totals_launch(0, weights)
        whole = target_C is None or target_C.is_contiguous()
        if key is not None and read is not None and (write is not None or not gradient) and whole:
            groups = settling.groups
            again = (settling.plan, settling.launch, gradient, groups, (C, C, 0, 0, groups, 1, 0))
            numbers = (program.numbers, (), float(V), 1.0, 1.0, 1.0, 1.0)
            self.known[key] = (read, write, again, numbers, kernel)
        return settling.settled, *fire_totals(kernel, settling.settled.by_segment, weights)

    def _read(self, raw_CV: Tensor, target_C: Tensor | None, chunks: list[DenseChunk]) -> tuple[Tensor, Again | None]:
        """What settling reads, and how to make it again."""
        want, own, V, noted, passed = self.program.want, self.temperatures, raw_CV.shape[1], list[Any](), list[Any]()
        if not chunks:
            sums_FC = sweeps.sums_matrix(raw_CV, target_C, want, own, noted=noted, **self.how)
            return sums_FC, (lambda x, y, _: sweeps.fire_sums(noted[0], x, y)) if noted else None
        partial = compared.sums(raw_CV, target_C, want, own, teachers=chunks, noted=noted, **self.how)
        divergence_pass = lambda softmax: second_read.divergence_pass(
            raw_CV, want, softmax, chunks, self._paired(), noted=passed, **self.how
        )
        sums_FC = packed(partial, want, own, V, divergence_pass)
        if len(noted) < len(chunks):
            return sums_FC, None
        launches, at = [known for known, _ in noted], numbered([whole for _, whole in noted])
        places = nest(partial, lambda x: at[x.data_ptr()])
        pairs = [(i, i + 1) for i in range(len(at), len(at) + 2 * len(want.all_divergences), 2)]
        pick = operator.itemgetter(*in_order(places, want, pairs))

        def again(x: Tensor, y: Tensor | None, teachers: tuple[Tensor, ...]) -> Tensor:
            rows = [row for known, z in zip(launches, teachers) for row in compared.fire_dense(known, x, y, z).unbind()]
            if passed:
                _, softmax = finish(nest(places, rows.__getitem__, leaf=int), want, own, V, only_softmax=True)
                for seen in passed:
                    rows += second_read.launch_divergences(seen, x, teachers[seen[0]], softmax).unbind()
            return torch.stack(pick(rows))

        return sums_FC, again

    def _write(
        self,
        raw_CV: Tensor,
        target_C: Tensor | None,
        settled: Settled,
        rows_FC: Tensor,
        out_CV: Tensor,
        chunks: list[DenseChunk],
    ) -> Again | None:
        """Write the gradient; returns how to do so again."""
        noted, softmax = list[Any](), settled.softmax if chunks else None
        pull_settled(
            self.program, softmax, rows_FC, raw_CV, target_C, self.temperatures, out_CV, teachers=chunks,
            teacher_temperatures=self._paired(), noted=noted, **self.how,
        )  # fmt: skip
        if not noted:
            return None
        known = noted[0]
        if not chunks:
            return lambda x, y, _, rows, out, teachers: sweeps.fire_pull(known, x, y, rows, out)
        at = numbered([settled.found, rows_FC])
        pick = operator.itemgetter(*[at[x.data_ptr()] for x in noted[1]])

        def again(
            x: Tensor, y: Tensor | None, settled: Settled, rows: Tensor, out: Tensor, teachers: tuple[Tensor, ...]
        ) -> None:
            numbers = torch.stack(pick((*settled.found.unbind(), *rows.unbind())))
            sweeps.fire_pull(known, x, y, numbers, out, teachers)

        return again

    def _paired(self) -> list[list[float]]:
        """For each teacher, the student's temperatures at which they are compared."""
        want = self.program.want
        own = dict(zip(want.temperatures, self.temperatures, strict=True))
        return [[own[T] for T in want.temperatures_of(name)] for name in want.teachers]


def numbered(matrices: Sequence[Tensor]) -> dict[int, int]:
    """The number of each row, by where it lies."""
    return {row.data_ptr(): i for i, row in enumerate(row for x in matrices for row in x.unbind())}
