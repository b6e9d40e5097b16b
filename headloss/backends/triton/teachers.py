"""The Triton backend's sums that compare rows with teachers; see `headloss.teachers` for what is summed.

Dimension key:  C rows passed in   V columns passed in   U columns shared with the teacher   K ids   P parts   F numbers

    sums   the first dense teacher in the student's launch, every further teacher in a separate launch
    divergence_pass   one launch per teacher and temperature, if a divergence needs both softmaxes (`second_read.py`)
    pull   one launch for the student, the tails and all dense teachers (`teacher_pulls.py`); the gradient at the ids of
           sparse teachers is computed separately and stored last

Columns that only some teachers have take a separate launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore
from torch import Tensor

from headloss.backends.triton.kernels.dense import dense_sums_kernel
from headloss.backends.triton.kernels.dense_merge import dense_merge_kernel
from headloss.backends.triton.kernels.records import SweepFlags
from headloss.backends.triton.kernels.sparse import merge_ids_kernel, tail_kernel
from headloss.backends.triton.kernels.sums import merge_kernel
from headloss.backends.triton.launch import Launch, launch_kernel, launch_of
from headloss.backends.triton.sweeps import SUMS, argument_kinds
from headloss.backends.triton.sweeps import sums as student_sums
from headloss.backends.triton.tiles import (
    Shape,
    Transform,
    chains,
    check_dtype,
    is_as_given,
    per_row,
    plain_temperature,
    readable,
    row_shape,
    rows_of,
    vector_along,
)
from headloss.backends.triton.top import top_partial
from headloss.facts import Moments, Partial, Want, merge
from headloss.nested import nest
from headloss.teachers import (
    DenseChunk,
    DensePartial,
    JointMoments,
    SparseChunk,
    SparsePartial,
    TeacherChunk,
    TeacherPartial,
    Temperature,
    TopChunk,
    merge_teacher,
    places,
)

# by number of columns, as in `sweeps.py`; measured on an H200, see benchmarks/gpu_teachers.py
DENSE = ((2048, Shape(2048, 128, 1, 1, 4)), (1 << 31, Shape(16384, 64, 2, 1, 2)))


def sums(
    raw_CV: Tensor,
    target_C: Tensor | None,
    want: Want,
    temperatures: Sequence[Temperature],
    *,
    teachers: Sequence[TeacherChunk | TopChunk],
    scale: float = 1.0,
    softcap: float | None = None,
    start: int = 0,
    shape: Shape | None = None,
    recorded: list[Any] | None = None,
) -> Partial:
    """The student's partial and every teacher's.

    `recorded` receives, for each dense teacher, what repeated calls need, and its matrix of sums: see
    `cached_launches.py`.
    """
    V, how = raw_CV.shape[1], Transform(scale, softcap)
    student = dict(zip(want.temperatures, temperatures, strict=True))
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "shape": shape}
    found: dict[int, TeacherPartial] = {}
    first = next((i for i, t in enumerate(teachers) if isinstance(t, DenseChunk) and t.columns and len(raw_CV)), None)
    if first is None:
        partial = student_sums(raw_CV, target_C, want, temperatures, start=start, **options)
    else:
        chunk = teachers[first]
        assert isinstance(chunk, DenseChunk)
        U, name = chunk.columns, want.teachers[first]
        partial, dense = _pair_sums(raw_CV[:, :U], target_C, want, name, chunk, student, how, start, shape, recorded)
        shared_C = partial.max
        if U < V:
            rest = student_sums(raw_CV[:, U:], target_C, want, temperatures, start=start + U, **options)
            partial = merge(_stacked(partial, rest), temperatures)
        found[first] = _rebased(dense, shared_C, partial.max, _pairs(want, name, chunk, student))
    for i, (name, chunk) in enumerate(zip(want.teachers, teachers, strict=True)):
        if isinstance(chunk, SparseChunk):
            found[i] = _sparse(raw_CV, partial.max, want, name, chunk, student, how, start, shape)
        elif isinstance(chunk, TopChunk):
            found[i] = top_partial(raw_CV, partial.max, chunk, how, start)
        elif i != first:
            raw_CU = raw_CV[:, : chunk.columns]
            other, dense = _pair_sums(raw_CU, None, want, name, chunk, student, how, start, shape, recorded, alone=True)
            shared_C = partial.max if chunk.columns == V else other.max
            found[i] = _rebased(dense, shared_C, partial.max, _pairs(want, name, chunk, student))
    return partial._replace(teachers=tuple(found[i] for i in range(len(teachers))))


def _pairs(want: Want, name: str, chunk: DenseChunk, student: dict[Any, Temperature]) -> list[Any]:
    return [(student[key], Tt) for key, Tt in zip(want.temperatures_of(name), chunk.temperatures, strict=True)]


def _rebased(dense: DensePartial, shared_C: Tensor, max_C: Tensor, pairs: list[Any]) -> TeacherPartial:
    """Sums relative to the maximum of the shared columns, made relative to that of all the student's columns."""
    if shared_C is max_C:
        return dense
    shift = torch.where(shared_C == -math.inf, -math.inf, shared_C - max_C)
    return merge_teacher(nest(dense, lambda x: x[None]), shift[None], pairs)


def _stacked(*parts: Partial) -> Any:
    return nest(parts[0], lambda x, *others: torch.stack([x, *others]), *parts[1:])


def columns_a_load(raw_CU: Tensor, teacher_CU: Tensor, shape: Shape) -> int:
    """Columns per lane and load: 16 bytes of the wider dtype, because a lane must hold the same columns of both."""
    J = 16 // max(raw_CU.element_size(), teacher_CU.element_size())
    block = J * shape.lanes * shape.loads
    assert shape.width % block == 0 and block * raw_CU.element_size() >= 128, "whole blocks, none below a line"
    return J


def _pair_sums(
    raw_CU: Tensor,
    target_C: Tensor | None,
    want: Want,
    name: str,
    chunk: DenseChunk,
    student: dict[Any, Temperature],
    how: Transform,
    start: int,
    shape: Shape | None,
    recorded: list[Any] | None,
    alone: bool = False,
) -> tuple[Partial, DensePartial]:
    """The partials of the shared columns; `alone`: without the facts of the student itself."""
    check_dtype(raw_CU)
    C, U = raw_CU.shape
    compared_keys = want.temperatures_of(name)
    keys = compared_keys if alone else want.temperatures
    compared = tuple(key in compared_keys for key in keys)
    own = lambda x: tuple(not alone and want.sums(x, key) for key in keys)
    shared = lambda x: tuple(want.sums(x, key, name) for key in keys)
    target = target_C if want.target and not alone else None
    given = tuple(plain_temperature(student[key]) for key in keys)
    teacher_T = dict(zip(compared_keys, chunk.temperatures, strict=True))
    given_teacher_T = tuple(plain_temperature(teacher_T.get(key, 1.0)) for key in keys)
    other, chained = Transform(chunk.scale, chunk.softcap), chains(raw_CU.device)
    wanted = SweepFlags(
        per_row(given), **how.flags(), **other.flags("TEACHER_"), TARGET=target is not None,
        TOTAL=want.total and not alone, BEST=want.argmax and not alone,
        WANT_X=tuple(a or b for a, b in zip(own("X"), shared("X"), strict=True)), WANT_Q=own("Q"),
        TEACHER_BEST=want.sums("argmax", teacher=name), COMPARED=compared, WANT_Y=shared("Y"), WANT_F=shared("F"),
        WANT_G=shared("G"), TEACHER_PER_ROW=per_row(given_teacher_T), CHAINED=chained,
    )  # fmt: skip
    pairs = sum(wanted.WANT_F) + sum(wanted.WANT_G)
    swept = 2 + 2 * wanted.TOTAL + wanted.BEST + wanted.TEACHER_BEST + len(keys) + sum(compared) + 2 * pairs
    swept += sum(wanted.WANT_X) + sum(wanted.WANT_Q) + sum(wanted.WANT_Y)
    slots = swept - pairs + (target is not None)
    if C == 0 or U == 0:
        out_FC = torch.zeros(slots, C, dtype=torch.float32, device=raw_CU.device)
        partial, dense = _by_name(out_FC, wanted, own("X"), shared("X"))
        for x in (partial.max, dense.max, *([] if partial.target is None else [partial.target])):
            x.fill_(-math.inf)
        return partial, dense
    raw, teacher = rows_of(raw_CU), rows_of(readable(chunk.raw_CV[:, :U]))
    shape = shape or row_shape(DENSE, U)
    J = columns_a_load(raw_CU, teacher.x_CV, shape)
    parts = triton.cdiv(U + raw.skew, shape.width)
    options = {"launch_pdl": True} if chained else {}
    flags = wanted._replace(
        LINE=raw.line, VEC=raw.vector, TEACHER_VEC=vector_along(raw, teacher), K=shape.loads, L=shape.lanes, J=J
    )
    padded = triton.next_power_of_2(parts)
    rows = max(1, 32 // padded)
    sweep = launch_of(dense_sums_kernel, F=flags, num_warps=shape.warps, **options)
    merging = launch_of(dense_merge_kernel, F=wanted._replace(PADDED=padded, ROWS=rows), num_warps=1, **options)
    raw_place, temperatures = (raw.x_CV.stride(0), raw.lead), (given, given_teacher_T)
    teacher_place, at = (teacher.x_CV.stride(0), teacher.lead), (0 if target is None else target.stride(0), start)
    # all that a compiled kernel depends on: see launch.py
    kinds = argument_kinds(raw.x_CV, teacher.x_CV, target, *given, *given_teacher_T)
    key = (*kinds, C == 1, C & 15, C >> 31, U, shape.width, raw_place, teacher_place, at)
    found = (
        sweep, merging, swept, slots, rows, target is not None, key,
        (*temperatures, C, U, parts, shape.width, *raw_place, *teacher_place, start, (*how.numbers, *other.numbers)),
        (*temperatures, C, U, parts, *raw_place, *at, how.numbers),
    )  # fmt: skip
    whole = launch_dense_sums(found, raw.x_CV, target, teacher.x_CV)
    if recorded is not None and is_as_given(raw, raw_CU) and is_as_given(teacher, chunk.raw_CV):
        recorded.append((found, whole))
    return _by_name(whole, wanted, own("X"), shared("X"))


def launch_dense_sums(recorded: tuple[Any, ...], x: Tensor, target: Tensor | None, teacher: Tensor) -> Tensor:
    """Launch the kernels of `_pair_sums`; the numbers come in the order of `_by_name`."""
    sweep, merging, swept, slots, rows, has_target, key, swept_how, merged_how = recorded
    (_, _, C, _, parts, *_), device, where = swept_how, x.device, x.get_device()
    each = torch.empty(swept, parts, C, dtype=torch.float32, device=device)
    sweep.run(key, where, C * parts, (x, teacher, each, *swept_how))
    whole = torch.empty(slots, C, dtype=torch.float32, device=device)
    merging.run(key, where, -(-C // rows), (x, target if has_target else None, each, whole, *merged_how))
    return whole


def _by_name(out_FC: Tensor, wanted: SweepFlags, entropy: Any, shared: Any) -> tuple[Partial, DensePartial]:
    """The kernels' numbers by name, in the order in which they are stored."""
    slots = iter(out_FC)
    take = lambda present: next(slots) if present else None
    best, at, total, columns = next(slots), take(wanted.TARGET), take(wanted.TOTAL), take(wanted.TOTAL)
    argmax, teacher_max, teacher_argmax = take(wanted.BEST), next(slots), take(wanted.TEACHER_BEST)
    moments, joint = [], []
    for i, compared in enumerate(wanted.COMPARED):
        S, X, Q = next(slots), take(wanted.WANT_X[i]), take(wanted.WANT_Q[i])
        moments.append(Moments(S, X if entropy[i] else None, Q))
        if compared:
            St, Y, F, G = next(slots), take(wanted.WANT_Y[i]), take(wanted.WANT_F[i]), take(wanted.WANT_G[i])
            joint.append(JointMoments(S, X if shared[i] else None, St, Y, F, G))
    partial = Partial(best, argmax, at, total, columns, tuple(moments))
    return partial, DensePartial(teacher_max, teacher_argmax, tuple(joint))


def _sparse(
    raw_CV: Tensor,
    max_C: Tensor,
    want: Want,
    name: str,
    chunk: SparseChunk,
    student: dict[Any, Temperature],
    how: Transform,
    start: int,
    shape: Shape | None,
) -> SparsePartial:
    (C, V), ids_CK = raw_CV.shape, chunk.ids_CK
    K = ids_CK.shape[-1]
    origin_C1 = max_C.masked_fill(max_C == -math.inf, 0.0)[:, None]
    tail_max = top = None
    tails: tuple[Tensor, ...] = ()
    if want.sums("tail_max", teacher=name):
        given = tuple(plain_temperature(student[key]) for key in want.temperatures_of(name))
        tail_max, *rest = _tail(raw_CV, chunk, given, how, start, shape)
        tails = tuple(rest)
    if want.sums("top", teacher=name):
        top = how(raw_CV.topk(min(K, V), -1, largest=how.scale >= 0).values) - origin_C1
        top = torch.nn.functional.pad(top, (0, K - top.shape[-1]), value=-math.inf)
    column_CK, here_CK = places(ids_CK, start, V)
    if V == 0:
        ids = torch.full((C, K), -math.inf, dtype=torch.float32, device=raw_CV.device)
    else:
        ids = (how(raw_CV.gather(-1, column_CK)) - origin_C1).masked_fill_(~here_CK, -math.inf)
    return SparsePartial(ids, tail_max, tails, top)


def merge_repeated(
    ids_RK: Tensor, logprob_RK: Tensor, valid_R: Tensor | None, checked: tuple[Tensor | None, int] = (None, 0)
) -> tuple[Tensor, Tensor, Tensor]:
    """`engine.teachers.merge_repeated` in one launch; also returns the ids in order.

    `checked`: where to write an id that is not a column, and how many columns there are.
    """
    R, K = ids_RK.shape
    ids_RK, logprob_RK = ids_RK.contiguous(), logprob_RK.contiguous()
    out = torch.empty_like(ids_RK), torch.empty_like(logprob_RK), torch.empty_like(ids_RK)
    if R and K:
        # all that a compiled kernel depends on: see launch.py
        aligned = (ids_RK.data_ptr() & 15 == 0, logprob_RK.data_ptr() & 15 == 0)
        key = (ids_RK.dtype, logprob_RK.dtype, *aligned)
        wrong, vocab = checked
        launch = _merge_launch(K, None if valid_R is None else valid_R.dtype, wrong is not None)
        launch.run(key, ids_RK.get_device(), R, (ids_RK, logprob_RK, valid_R, *out, wrong, K, vocab))
    return out


@functools.lru_cache(256)
def _merge_launch(K: int, valid: torch.dtype | None, checks: bool) -> Launch:
    flags = {"VALID": valid is not None, "CHECK": checks, "IDS": triton.next_power_of_2(K)}
    return Launch(merge_ids_kernel, {**flags, "num_warps": 1})


def _tail(raw_CV: Tensor, chunk: SparseChunk, given: Any, how: Transform, start: int, shape: Shape | None) -> Tensor:
    """(1 + temperatures, C): the maximum of the columns that are not ids, and their sums."""
    check_dtype(raw_CV)
    C, V = raw_CV.shape
    out = torch.zeros(1 + len(given), C, dtype=torch.float32, device=raw_CV.device)
    if C == 0 or V == 0:
        out[0] = -math.inf
        return out
    raw, shape = rows_of(raw_CV), shape or row_shape(SUMS, V)
    parts, K = triton.cdiv(V + raw.skew, shape.width), chunk.ids_CK.shape[-1]
    raw_place = (raw.x_CV.stride(0), raw.lead)
    off = (False,) * len(given)
    wanted = SweepFlags(per_row(given), **how.flags(), WANT_X=off, WANT_Q=off)
    found = out[:, None] if parts == 1 else torch.empty(len(out), parts, C, dtype=out.dtype, device=out.device)
    flags = wanted._replace(
        IDS=triton.next_power_of_2(max(1, K)), LINE=raw.line, VEC=raw.vector, K=shape.loads, L=shape.lanes,
        J=16 // raw_CV.element_size(),
    )  # fmt: skip
    launch_kernel(
            tail_kernel, C * parts,
        raw.x_CV, chunk.in_order(), found, given, C, V, parts, shape.width, *raw_place, start, K, how.numbers,
        F=flags, num_warps=shape.warps,
    )  # fmt: skip
    if parts > 1:
        padded = triton.next_power_of_2(parts)
        rows = max(1, 32 // padded)
        launch_kernel(
            merge_kernel, triton.cdiv(C, rows),
            raw.x_CV, None, found, out, given, C, V, parts, *raw_place, 0, start, how.numbers,
            F=wanted._replace(PADDED=padded, ROWS=rows), num_warps=1,
        )  # fmt: skip
    return out
