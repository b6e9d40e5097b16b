"""Repeated calls that differ only in their tensors: they check how the tensors are aligned, and launch.

Dimension key:  C rows passed in   V columns passed in
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.backends.triton import second_read, sweeps
from headloss.backends.triton import teachers as teacher_sweeps
from headloss.backends.triton.given_numbers import Number, specialization_of
from headloss.backends.triton.kernels.records import Given
from headloss.backends.triton.printer.program import Program
from headloss.backends.triton.settle import Settled, Settling, Spans, Weights, in_order, packed, settle_all
from headloss.backends.triton.settled_pull import pull_settled
from headloss.backends.triton.tiles import address
from headloss.backends.triton.totals import launch_totals, totals_kernel_for
from headloss.backends.triton.visit import NO_TEACHER, Arguments, launch_visit, spec_of, teacher_arguments, visit
from headloss.backends.triton.visit_records import Visited
from headloss.facts import finish
from headloss.nested import nest
from headloss.teachers import DenseChunk, SparseChunk, TeacherChunk

Repeat = Callable[..., Any]  # launches the same kernels again, on other tensors of the same sizes


class Visits:
    """Visits with the same program, dtypes, sizes, strides and devices, and the sums of their terms.

    All tensors are contiguous and on the logits' device; a dense teacher has the student's columns.
    """

    __slots__ = ("cached", "how", "means", "spec", "teacher_how", "temperatures")

    def __init__(
        self,
        program: Program,
        temperatures: tuple[float, ...],
        scale: float,
        softcap: float | None,
        means: tuple[bool, ...],  # per term, whether its rows have the weight `mean`; otherwise 1
        teacher_how: Sequence[tuple[float, float | None, tuple[float, ...]]],  # scale, softcap, temperatures
    ) -> None:
        self.spec, self.temperatures, self.how = spec_of(program), temperatures, (scale, softcap)
        self.means, self.teacher_how = None if all(means) else means, teacher_how
        self.cached: dict[Any, tuple[Any, ...]] = {}  # kernels and their numbers

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
        spec, y = self.spec, raw_CV if out_CV is None else out_CV
        begin = address(raw_CV) | address(y)  # to be on a line of 128 bytes; others, shifted by 3, on a vector of 16
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
            in_order = teacher.in_order() if spec.flags["TAIL"] else ids
            begin |= (ids.data_ptr() | in_order.data_ptr()) << 3
        bases = (mean,) * len(weights) if self.means is None else tuple([mean if m else 1.0 for m in self.means])
        key = (ignore, out_CV is None, type(mean))
        cached = self.cached.get(key)
        if cached is None or begin & 127:
            call = raw_CV, target_C, inputs, bases, factors, weights, out_CV, ignore, teacher
            return self._make(*call, None if begin & 127 else key)
        kernel, places, sums_kernel, temperatures_t, numbers = cached
        given = Given(self.temperatures, temperatures_t, inputs, bases, factors, *numbers)
        target = target_C if spec.targets or ignore else None
        visited = launch_visit(spec, kernel, places, raw_CV.shape[0], given, raw_CV, y, target, z, ids, in_order)
        return visited, *launch_totals(sums_kernel, visited.found, weights)

    def _make(self, *call: Any) -> tuple[Visited, Tensor, Tensor]:
        """The same by the full path, which checks everything.  `call` ends with the key to cache it under, or None."""
        raw_CV, target_C, inputs, bases, factors, weights, out_CV, ignore, teacher, key = call
        spec, program, recorded = self.spec, self.spec.program, list[Any]()
        arguments = Arguments(dict(zip(program.inputs, inputs, strict=True)), bases, factors)
        (scale, cap), columns = self.how, raw_CV.shape[1]
        if isinstance(teacher, Tensor):
            teachers: list[TeacherChunk] = [DenseChunk(teacher, *self.teacher_how[0], columns)]
        else:
            teachers = [] if teacher is None else [teacher]
        visited = visit(
            raw_CV, target_C, program.want, self.temperatures, program, arguments, out_CV,
            teachers=teachers, scale=scale, softcap=cap, ignore=ignore, recorded=recorded,
        )  # fmt: skip
        found, first = visited.term_values
        kernel = totals_kernel_for(first, weights)
        if recorded and key is not None:
            found_t = teacher_arguments(spec, columns, teachers[0]) if teachers else NO_TEACHER
            own = (float(columns), float(scale), 1.0 if cap is None else float(cap))
            numbers = (program.numbers, spec.divergence_numbers, *own, found_t.scale, found_t.cap)
            self.cached[key] = (*recorded, kernel, found_t.temperatures, numbers)
        return visited, *launch_totals(kernel, found, weights)


class Settles:
    """The same for calls that have losses of segments, few rows, or several teachers: launches that read, one that
    settles all segments or rows, one that writes, and the sums of the terms.  Tensors are as in `Visits`."""

    __slots__ = ("cached", "how", "means", "program", "teacher_how", "temperatures")

    def __init__(
        self,
        program: Program,
        temperatures: tuple[float, ...],
        scale: float,
        softcap: float | None,
        means: tuple[bool, ...],  # per term, whether its weight is divided by the segment's length
        teacher_how: Sequence[tuple[float, float | None, tuple[float, ...]]],
    ) -> None:
        self.program, self.temperatures, self.means, self.teacher_how = program, temperatures, means, teacher_how
        self.how: dict[str, Any] = {"scale": scale, "softcap": softcap}
        self.cached: dict[Any, tuple[Any, ...]] = {}  # kernels and their numbers

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
        """As in `Visits`.  `bases`: per term, the weight of rows or segments.  No `spans`: rows are settled alone."""
        begin = address(raw_CV) | address(raw_CV if out_CV is None else out_CV)
        if target_C is not None:
            begin |= target_C.data_ptr() << 3
        for x in inputs:
            begin |= x.data_ptr() << 3
        for x in teachers:
            begin |= address(x)
        order = None if spans is None else spans.order is None
        key = (ignore, out_CV is None, order, sweeps.BATCH_INVARIANT, specialization_of(bases))
        cached = self.cached.get(key)
        call = (raw_CV, target_C, inputs, bases, factors, weights, out_CV, ignore, teachers, spans)
        if cached is None or begin & 127:
            return self._make(*call, None if begin & 127 else key)
        read, write, settling, numbers, sums_kernel = cached
        given = Given(self.temperatures, (), inputs, bases, factors, *numbers)
        sums_FC = read(raw_CV, target_C, teachers)
        settled, rows_FC = settle_all(settling, sums_FC, target_C, spans, given)
        if rows_FC is not None:
            write(raw_CV, target_C, settled, rows_FC, out_CV, teachers)
        return settled, *launch_totals(sums_kernel, settled.by_segment, weights)

    def _make(self, *call: Any) -> tuple[Settled, Tensor, Tensor]:
        """The same by the full path, which checks everything.  `call` ends with the key to cache it under, or None."""
        raw_CV, target_C, inputs, bases, factors, weights, out_CV, ignore, teachers, spans, key = call
        program, own = self.program, self.temperatures
        (C, V), gradient = raw_CV.shape, out_CV is not None
        named = lambda xs: dict(zip(program.terms, xs, strict=True))
        given = dict(zip(program.inputs, inputs, strict=True))
        chunks = [DenseChunk(x, *how, V) for x, how in zip(teachers, self.teacher_how, strict=True)]
        sums_FC, read = self._read(raw_CV, target_C, chunks)
        settling = Settling(
            program, spans, Weights(given, named(bases), named(self.means), named(factors)), target_C, C, own,
            vocab=V, device=raw_CV.device, ignore=ignore, gradient=gradient,
        )  # fmt: skip
        rows_FC = settling.settle(sums_FC)
        write = None
        if out_CV is not None and rows_FC is not None:
            write = self._write(raw_CV, target_C, settling.settled, rows_FC, out_CV, chunks)
        kernel = totals_kernel_for(0, weights)
        whole = target_C is None or target_C.is_contiguous()
        if key is not None and read is not None and (write is not None or not gradient) and whole:
            groups = settling.groups
            settle = (settling.spec, settling.launch, gradient, groups, (C, C, 0, 0, groups, 1, 0))
            numbers = (program.numbers, (), float(V), 1.0, 1.0, 1.0, 1.0)
            self.cached[key] = (read, write, settle, numbers, kernel)
        return settling.settled, *launch_totals(kernel, settling.settled.by_segment, weights)

    def _read(self, raw_CV: Tensor, target_C: Tensor | None, chunks: list[DenseChunk]) -> tuple[Tensor, Repeat | None]:
        """What settling reads, and a function that computes it for other tensors."""
        want, own, V = self.program.want, self.temperatures, raw_CV.shape[1]
        recorded, second_reads = list[Any](), list[Any]()
        if not chunks:
            sums_FC = sweeps.sums_matrix(raw_CV, target_C, want, own, recorded=recorded, **self.how)
            return sums_FC, (lambda x, y, _: sweeps.launch_sums(recorded[0], x, y)) if recorded else None
        partial = teacher_sweeps.sums(raw_CV, target_C, want, own, teachers=chunks, recorded=recorded, **self.how)
        divergence_pass = lambda softmax: second_read.divergence_pass(
            raw_CV, want, softmax, chunks, self._paired(), recorded=second_reads, **self.how
        )
        sums_FC = packed(partial, want, own, V, divergence_pass)
        if len(recorded) < len(chunks):
            return sums_FC, None
        launches, at = [launch for launch, _ in recorded], row_numbers([whole for _, whole in recorded])
        places = nest(partial, lambda x: at[x.data_ptr()])
        pairs = [(i, i + 1) for i in range(len(at), len(at) + 2 * len(want.all_divergences), 2)]
        pick = operator.itemgetter(*in_order(places, want, pairs))

        def repeat(x: Tensor, y: Tensor | None, teachers: tuple[Tensor, ...]) -> Tensor:
            sums = [teacher_sweeps.launch_dense_sums(launch, x, y, z) for launch, z in zip(launches, teachers)]
            rows = [row for sums_FC in sums for row in sums_FC.unbind()]
            if second_reads:
                _, softmax = finish(nest(places, rows.__getitem__, leaf=int), want, own, V, only_softmax=True)
                for second in second_reads:
                    rows += second_read.launch_divergences(second, x, teachers[second[0]], softmax).unbind()
            return torch.stack(pick(rows))

        return sums_FC, repeat

    def _write(
        self,
        raw_CV: Tensor,
        target_C: Tensor | None,
        settled: Settled,
        rows_FC: Tensor,
        out_CV: Tensor,
        chunks: list[DenseChunk],
    ) -> Repeat | None:
        """Write the gradient; returns a function that does so for other tensors."""
        recorded, softmax = list[Any](), settled.softmax if chunks else None
        pull_settled(
            self.program, softmax, rows_FC, raw_CV, target_C, self.temperatures, out_CV, teachers=chunks,
            teacher_temperatures=self._paired(), recorded=recorded, **self.how,
        )  # fmt: skip
        if not recorded:
            return None
        launch = recorded[0]
        if not chunks:
            return lambda x, y, _, rows, out, teachers: sweeps.launch_pull(launch, x, y, rows, out)
        at = row_numbers([settled.found, rows_FC])
        pick = operator.itemgetter(*[at[x.data_ptr()] for x in recorded[1]])

        def repeat(
            x: Tensor, y: Tensor | None, settled: Settled, rows: Tensor, out: Tensor, teachers: tuple[Tensor, ...]
        ) -> None:
            numbers = torch.stack(pick((*settled.found.unbind(), *rows.unbind())))
            sweeps.launch_pull(launch, x, y, numbers, out, teachers)

        return repeat

    def _paired(self) -> list[list[float]]:
        """For each teacher, the student's temperatures at which they are compared."""
        want = self.program.want
        own = dict(zip(want.temperatures, self.temperatures, strict=True))
        return [[own[T] for T in want.temperatures_of(name)] for name in want.teachers]


def row_numbers(matrices: Sequence[Tensor]) -> dict[int, int]:
    """The index of each row, by its address."""
    return {row.data_ptr(): i for i, row in enumerate(row for x in matrices for row in x.unbind())}
