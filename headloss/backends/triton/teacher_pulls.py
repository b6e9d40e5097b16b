"""The Triton backend's gradient when rows are compared with teachers; see `teachers.py`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore
from torch import Tensor

from headloss.backends.triton.kernels.pull import pull_kernel
from headloss.backends.triton.kernels.records import PullFlags, PullGiven
from headloss.backends.triton.kernels.sparse import gather_kernel, store_kernel
from headloss.backends.triton.launch import launch_kernel, launch_of
from headloss.backends.triton.printer.elements import printed
from headloss.backends.triton.sweeps import argument_kinds, launch_pull
from headloss.backends.triton.tiles import (
    Shape,
    Transform,
    check_dtype,
    is_as_given,
    per_row,
    plain_temperature,
    readable,
    row_shape,
    rows_of,
    vector_along,
)
from headloss.facts import Pull, Softmax
from headloss.teachers import (
    DenseChunk,
    DensePull,
    DenseSoftmax,
    SparseChunk,
    SparsePull,
    SparseSoftmax,
    TeacherChunk,
    TeacherPulls,
    Temperature,
    column,
    places,
)

# by number of columns, as in `sweeps.py`; measured on an H200, see benchmarks/gpu_teachers.py
WITH_TEACHER = ((2048, Shape(2048, 128, 1, 1, 4)), (1 << 31, Shape(4096, 256, 1, 1, 8)))
WITH_DIVERGENCE = ((2048, Shape(2048, 128, 1, 1, 4)), (1 << 31, Shape(8192, 128, 2, 1, 4)))  # with a divergence's slope


class Entry(NamedTuple):
    """A softmax that the pull needs: the student's at a temperature, or a tail's."""

    T: Temperature
    max: Tensor
    log_sum: Tensor
    pull: Pull


class DenseEntry(NamedTuple):
    """A dense teacher's pulls, at each temperature that has one."""

    chunk: DenseChunk
    own_max: Tensor  # the student's
    max: Tensor
    log_S: tuple[Tensor, ...]
    log_St: tuple[Tensor, ...]
    T: tuple[Temperature, ...]  # the student's
    pulls: tuple[DensePull, ...]

    def cut(self, low: int, high: int) -> DenseEntry:
        """The same for these columns alone."""
        chunk = self.chunk._replace(raw_CV=self.chunk.raw_CV[:, low:], columns=high - low)
        return self._replace(chunk=chunk)


class SparseEntry(NamedTuple):
    """A sparse teacher's pulls."""

    ids_CK: Tensor
    softmax: SparseSoftmax
    T: tuple[Temperature, ...]
    pulls: tuple[SparsePull, ...]


def pull(
    raw_CV: Tensor,
    target_C: Tensor | None,
    softmax: Softmax,
    pulls: Sequence[Pull],
    temperatures: Sequence[Temperature],
    out_CV: Tensor,
    *,
    teachers: Sequence[TeacherChunk],
    teacher_pulls: Sequence[TeacherPulls],
    teacher_temperatures: Sequence[Sequence[Temperature]],
    scale: float = 1.0,
    softcap: float | None = None,
    start: int = 0,
    shape: Shape | None = None,
    recorded: list[Any] | None = None,
) -> None:
    """Write the gradient with respect to the raw logits into `out_CV`, which may be `raw_CV` itself.

    `recorded` receives what repeated calls need, and the numbers per row that the kernel reads: see
    `cached_launches.py`.
    """
    if 0 in raw_CV.shape:
        return
    how = Transform(scale, softcap)
    entries = [
        Entry(T, softmax.max, log_sum, k)
        for T, log_sum, k in zip(temperatures, softmax.log_sums, pulls, strict=True)
        if any(x is not None for x in k)
    ]
    dense, sparse = [], []
    for chunk, softmax_t, own, Ts in zip(teachers, softmax.teachers, teacher_pulls, teacher_temperatures, strict=True):
        if isinstance(chunk, SparseChunk):
            if any(x is not None for k in own for x in k):
                sparse.append(SparseEntry(chunk.ids_CK, softmax_t, tuple(Ts), own))  # type: ignore[arg-type]
        elif chunk.columns:
            assert isinstance(softmax_t, DenseSoftmax)
            kept = [i for i, k in enumerate(own) if any(x is not None for x in k[:4]) or k.divergences]  # type: ignore[attr-defined]
            if kept:
                at = lambda xs, kept=kept: tuple(xs[i] for i in kept)
                chunk = chunk._replace(temperatures=at(chunk.temperatures))
                logs = at(softmax_t.log_S), at(softmax_t.log_St)
                dense.append(DenseEntry(chunk, softmax.max, softmax_t.max, *logs, at(Ts), at(own)))
    apart = _at_ids(raw_CV, target_C, entries, dense, sparse, how, start) if sparse else None
    for entry in sparse:
        assert entry.softmax.tail_max is not None or all(k.tail is None for k in entry.pulls)
        for T, k, log_sum in zip(entry.T, entry.pulls, entry.softmax.tail_log_sums, strict=False):
            if k.tail is not None and entry.softmax.tail_max is not None:
                entries.append(Entry(T, entry.softmax.tail_max, log_sum, Pull(k.tail, None, None, None, None)))
    if out_CV.stride(-1) != 1 and out_CV.shape[-1] > 1:  # rare: write to a buffer, then copy
        into_CV = torch.empty_like(out_CV, memory_format=torch.contiguous_format)
        _everywhere(raw_CV, target_C, into_CV, entries, dense, how, start, shape)
        out_CV.copy_(into_CV)
    else:
        _everywhere(raw_CV, target_C, out_CV, entries, dense, how, start, shape, recorded if apart is None else None)
    if apart is not None:
        ids_CK, values_CK = apart
        K = ids_CK.shape[-1]
        launch_kernel(
            store_kernel,
            len(ids_CK),
            out_CV,
            ids_CK,
            values_CK,
            out_CV.shape[-1],
            *out_CV.stride(),
            start,
            K,
            IDS=triton.next_power_of_2(K),
        )


def _everywhere(
    raw_CV: Tensor,
    target_C: Tensor | None,
    out_CV: Tensor,
    entries: list[Entry],
    dense: list[DenseEntry],
    how: Transform,
    start: int,
    shape: Shape | None,
    recorded: list[Any] | None = None,
) -> None:
    """The gradient at every column, except at the ids of sparse teachers: one launch per range of columns that the same
    dense teachers have."""
    V = raw_CV.shape[1]
    cuts = sorted({0, V, *(entry.chunk.columns for entry in dense)})
    for low, high in itertools.pairwise(cuts):
        sharing = [entry.cut(low, high) for entry in dense if entry.chunk.columns >= high]
        _write(raw_CV[:, low:high], target_C, out_CV[:, low:high], entries, sharing, how, start + low, shape, recorded)


def _write(
    raw_CV: Tensor,
    target_C: Tensor | None,
    out_CV: Tensor,
    entries: Sequence[Entry],
    dense: Sequence[DenseEntry],
    how: Transform,
    start: int,
    shape: Shape | None,
    recorded: list[Any] | None = None,
) -> None:
    check_dtype(raw_CV)
    C, V = raw_CV.shape
    if not entries and not dense:
        out_CV.zero_()
        return
    raw, out = rows_of(raw_CV), rows_of(out_CV)
    divergent = any(k.divergences for entry in dense for k in entry.pulls)
    shape = shape or row_shape(WITH_DIVERGENCE if divergent else WITH_TEACHER, V)
    numbers = [x for e in entries for x in (e.max, e.log_sum, *e.pull) if x is not None]
    given = tuple(plain_temperature(e.T) for e in entries)
    pulls = lambda i: tuple(e.pull[i] is not None for e in entries)
    target = target_C if any(pulls(4)) else None
    flags = PullFlags(
        pulls(0), pulls(1), pulls(2), pulls(3), pulls(4), per_row(given), target is not None, **how.flags(),
        WIDTH=shape.width, LINE=out.line, VEC=out.vector, RAW_VEC=vector_along(out, raw), BLOCK=shape.block(out_CV),
        STAGES=shape.stages, MAXIMA=True,
    )  # fmt: skip
    element, numbers_given = None, PullGiven(given, *how.numbers)
    rows_t = [rows_of(readable(entry.chunk.raw_CV[:, :V])) for entry in dense]
    if dense:
        every = [(t, i, k) for t, entry in enumerate(dense) for i, k in enumerate(entry.pulls)]
        others = [Transform(entry.chunk.scale, entry.chunk.softcap) for entry in dense]
        compared_given = tuple(plain_temperature(T) for entry in dense for T in entry.T)
        teacher_given = tuple(plain_temperature(T) for entry in dense for T in entry.chunk.temperatures)
        numbers += [dense[0].own_max, *(entry.max for entry in dense)]
        for t, i, k in every:
            numbers += [dense[t].log_S[i], dense[t].log_St[i], *(x for x in k[:4] if x is not None)]
        divergences = [(n, at) for n, (_, _, k) in enumerate(every) for at in k.divergences]
        numbers += [x for _, at in divergences for x in (at.g, at.C)]
        on = lambda n: tuple(k[n] is not None for _, _, k in every)
        flags = flags._replace(
            TEACHER_OF=tuple(t for t, _, _ in every), TA=on(0), TB=on(1), TC=on(2), TD=on(3),
            DIVERGENCES=tuple(n for n, _ in divergences),
            COMPARED_PER_ROW=per_row(compared_given), TEACHER_PER_ROW=per_row(teacher_given),
            TEACHER_SCALED=tuple(x.flags()["SCALED"] for x in others),
            TEACHER_CAPPED=tuple(x.flags()["CAPPED"] for x in others),
            TEACHER_VEC=tuple(vector_along(out, x) for x in rows_t),
        )  # fmt: skip
        options: tuple[float, ...] = ()
        if divergences:
            element, options = printed(tuple((n, at.element) for n, at in divergences), len(every))
        numbers_given = numbers_given._replace(
            compared_temperatures=compared_given, teacher_temperatures=teacher_given, numbers=options,
            teacher_scales=tuple(x.numbers[0] for x in others), teacher_caps=tuple(x.numbers[1] for x in others),
            teacher_strides=tuple(x.x_CV.stride(0) for x in rows_t), teacher_leads=tuple(x.lead for x in rows_t),
        )  # fmt: skip
    # stacked: a coefficient may be a stride-0 expand straight from a sum's backward
    rows, each = torch.stack([x.to(torch.float32) for x in numbers]), tuple([x.x_CV for x in rows_t])
    parts = triton.cdiv(V + out.skew, shape.width)
    launch = launch_of(pull_kernel, ELEMENT=element, F=flags, num_warps=shape.warps)
    target_stride = 0 if target is None else target.stride(0)
    places = (raw.x_CV.stride(0), raw.lead, out.x_CV.stride(0), out.lead, target_stride, start)
    # all that a compiled kernel depends on: see launch.py
    own = *given, *numbers_given.compared_temperatures, *numbers_given.teacher_temperatures
    key = (
        *argument_kinds(raw.x_CV, rows, out.x_CV, target, *each, *own), C == 1, C & 15, C >> 31, V, parts, places,
        numbers_given.teacher_strides, numbers_given.teacher_leads,
    )  # fmt: skip
    found = (launch, target is not None, key, C * parts, (numbers_given, C, V, parts, *places))
    pairs = [(raw, raw_CV), (out, out_CV), *((x, entry.chunk.raw_CV) for x, entry in zip(rows_t, dense, strict=True))]
    if recorded is not None and all(is_as_given(*pair) for pair in pairs):
        recorded += [found, numbers]
    launch_pull(found, raw.x_CV, target, rows, out.x_CV, each)


def _at_ids(
    raw_CV: Tensor,
    target_C: Tensor | None,
    entries: list[Entry],
    dense: list[DenseEntry],
    sparse: list[SparseEntry],
    how: Transform,
    start: int,
) -> tuple[Tensor, Tensor]:
    """The ids of all sparse teachers, and the whole gradient there in float32: that of all columns, computed at these
    few, plus that of ids alone.  A column named twice gets the same value twice."""
    ids_CK = torch.cat([entry.ids_CK for entry in sparse], -1).contiguous()
    C, K = ids_CK.shape
    column_CK, _ = places(ids_CK, start, raw_CV.shape[-1])
    raw_CK = raw_CV.gather(-1, column_CK)
    grad_CK = torch.empty(C, K, dtype=torch.float32, device=raw_CV.device)
    _write(raw_CK, None, grad_CK, [e._replace(pull=e.pull._replace(y=None)) for e in entries], (), how, 0, None)
    for entry in dense:
        U = entry.chunk.columns
        teacher_CK = entry.chunk.raw_CV[:, :U].gather(-1, column_CK.clamp(max=U - 1))
        own = entry._replace(chunk=entry.chunk._replace(raw_CV=teacher_CK, columns=K))
        more_CK = torch.empty_like(grad_CK)
        _write(raw_CK, None, more_CK, [], [own], how, 0, None)
        grad_CK += more_CK.masked_fill_(column_CK >= U, 0.0)
    z_CK = how(raw_CK)
    own_CK = torch.zeros_like(grad_CK)  # d/dz
    for e in entries:
        if e.pull.y is not None and target_C is not None:
            own_CK += torch.where(ids_CK == target_C[:, None], (e.pull.y / e.T)[:, None], 0.0)
    for teacher in sparse:
        values = torch.zeros(teacher.ids_CK.shape, dtype=torch.float32, device=raw_CV.device)
        for T, k in zip(teacher.T, teacher.pulls, strict=True):
            if k.ids is not None:
                values += k.ids / column(T)
        total_CK, inside_CK = torch.empty_like(grad_CK), torch.empty_like(ids_CK, dtype=torch.bool)
        launch_kernel(
            gather_kernel, C,
            ids_CK, teacher.ids_CK.contiguous(), values, total_CK, inside_CK, K, values.shape[-1],
            IDS=triton.next_power_of_2(K),
        )  # fmt: skip
        own_CK += total_CK
        if len(sparse) > 1 and teacher.softmax.tail_max is not None:  # its tail may have another's ids
            for T, k, log_sum in zip(teacher.T, teacher.pulls, teacher.softmax.tail_log_sums, strict=True):
                if k.tail is not None:
                    p_CK = ((z_CK - teacher.softmax.tail_max[:, None]) / column(T) - log_sum[:, None]).exp()
                    own_CK += (p_CK * (k.tail[:, None] / column(T))).masked_fill_(inside_CK, 0.0)
    return ids_CK, grad_CK + own_CK * how.slope(z_CK)
