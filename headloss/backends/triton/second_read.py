"""The second read of a row, next to dense teachers: each divergence's sum over the columns, and that of its slopes.

Dimension key:  C rows passed in   V columns passed in   U columns shared with the teacher   F numbers per row
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore
from torch import Tensor

from headloss.backends.triton.kernels.divergence_sums import divergence_kernel
from headloss.backends.triton.kernels.records import PullAt, SweepFlags
from headloss.backends.triton.launch import launch_of
from headloss.backends.triton.printer.elements import printed
from headloss.backends.triton.sweeps import argument_kinds
from headloss.backends.triton.teachers import columns_a_load
from headloss.backends.triton.tiles import (
    Shape,
    Transform,
    check_dtype,
    per_row,
    plain_temperature,
    readable,
    row_shape,
    rows_of,
    vector_along,
)
from headloss.facts import Softmax, Want
from headloss.teachers import DenseChunk, DenseSoftmax, TeacherChunk, Temperature

# by number of columns, as in `sweeps.py`; measured on an H200, see benchmarks/gpu_teachers.py
DIVERGENCE = ((2048, Shape(2048, 128, 1, 1, 4)), (1 << 31, Shape(32768, 128, 2, 1, 4)))


def divergence_pass(
    raw_CV: Tensor,
    want: Want,
    softmax: Softmax,
    teachers: Sequence[TeacherChunk],
    teacher_temperatures: Sequence[Sequence[Temperature]],
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    whole: bool = False,
    shape: Shape | None = None,
    recorded: list[Any] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """The second read: for every divergence asked for, in order, its sum over these columns and that of its slopes.

    `recorded` receives what `launch_divergences` needs, for each teacher and temperature: see `cached_launches.py`.
    """
    found: list[tuple[Tensor, Tensor]] = []
    how = Transform(scale, softcap)
    for t, (name, chunk, Ts) in enumerate(zip(want.teachers, teachers, teacher_temperatures, strict=True)):
        if isinstance(chunk, DenseChunk):
            for i, key in enumerate(want.temperatures_of(name)):
                elements = [f.element for f in want.divergences(name, key)]
                if elements:
                    call, x_CU, u_CU = _divergence_sums(
                        raw_CV[:, : chunk.columns], chunk, i, Ts[i], elements, how, shape
                    )
                    sums_FC = launch_divergences((t, i, call), x_CU, u_CU, softmax)
                    found += zip(sums_FC[::2], sums_FC[1::2], strict=True)
                    if recorded is not None:
                        recorded.append((t, i, call))
    return found


def _divergence_sums(
    raw_CU: Tensor, chunk: DenseChunk, i: int, T: Any, elements: list[Any], how: Any, shape: Shape | None
) -> tuple[Any, Tensor, Tensor]:
    """A launch, and the student's and the teacher's logits as it reads them."""
    check_dtype(raw_CU)
    C, U = raw_CU.shape
    if C == 0 or U == 0:
        return (len(elements), C), raw_CU, raw_CU
    element, options = printed(tuple((0, e) for e in elements), 1)
    raw, teacher = rows_of(raw_CU), rows_of(readable(chunk.raw_CV[:, :U]))
    shape, other = shape or row_shape(DIVERGENCE, U), Transform(chunk.scale, chunk.softcap)
    given = (plain_temperature(T), plain_temperature(chunk.temperatures[i]))
    parts = triton.cdiv(U + raw.skew, shape.width)
    flags = SweepFlags(
        per_row(given[:1]), **how.flags(), **other.flags("TEACHER_"), DIVERGENCE_SUMS=2 * len(elements),
        TEACHER_PER_ROW=per_row(given[1:]), LINE=raw.line, VEC=raw.vector, TEACHER_VEC=vector_along(raw, teacher),
        K=shape.loads, L=shape.lanes, J=columns_a_load(raw_CU, teacher.x_CV, shape),
    )  # fmt: skip
    launch = launch_of(divergence_kernel, ELEMENT=element, F=flags, num_warps=shape.warps)
    places = (raw.x_CV.stride(0), raw.lead, teacher.x_CV.stride(0), teacher.lead)
    # all that a compiled kernel depends on: see launch.py
    key = (*argument_kinds(raw.x_CV, teacher.x_CV, *given), C == 1, C & 15, C >> 31, U, shape.width, places)
    sizes = (C, U, parts, shape.width, *places)
    call = (len(elements), C, launch, key, parts, (given, options, *sizes, (*how.numbers, *other.numbers)))
    return call, raw.x_CV, teacher.x_CV


def launch_divergences(recorded: tuple[int, int, Any], x: Tensor, teacher: Tensor, softmax: Softmax) -> Tensor:
    """Launch the kernel of `divergence_pass` at one teacher and temperature, given by their numbers."""
    t, i, (count, C, *call) = recorded
    if not call:
        return torch.zeros(2 * count, C, dtype=torch.float32, device=x.device)
    (launch, key, parts, how), softmax_t = call, softmax.teachers[t]
    assert isinstance(softmax_t, DenseSoftmax)
    rows = torch.stack([softmax.max, softmax_t.log_S[i], softmax_t.max, softmax_t.log_St[i]]).float()
    out = torch.empty(2 * count, parts, C, dtype=torch.float32, device=x.device)
    launch.run(key, x.get_device(), C * parts, (PullAt(x, teacher, rows, out), *how))
    return out.sum(1)
