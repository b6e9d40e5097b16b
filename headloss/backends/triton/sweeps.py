"""The two sweeps as Triton kernels: bf16, fp16 or float32 in, float32 inside, any vocabulary, stride and alignment.

Dimension key:  C rows handed in   V columns in hand   P parts a row is swept in   F numbers per row

    sums   one launch, each program a part of a row, and one small launch that merges the parts
    pull   one launch, each program some columns of a row

Teachers have kernels of their own, `teachers.py` and `pulls.py`.

Nothing is tuned at run time and nothing is atomic, so a call gives the same bits each time.  Into how many parts a row
is cut depends on V alone, so a row's facts do not depend on how many rows stand around it; `BATCH_INVARIANT = False`
lets the count of rows decide too, which is faster for a handful of rows.  How rows are laid out: `tiles.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore
from torch import Tensor

from headloss.backends.triton.kernels.pull import pull_kernel
from headloss.backends.triton.kernels.records import PullAt, PullFlags, PullGiven, SweepFlags
from headloss.backends.triton.kernels.scale import scale_kernel
from headloss.backends.triton.kernels.sums import merge_kernel, sums_kernel
from headloss.backends.triton.launch import Launch, launch_kernel, place
from headloss.backends.triton.tiles import (
    LAUNCH,
    Shape,
    chains,
    check_dtype,
    per_row,
    plain_temperature,
    row_shape,
    rows_of,
)
from headloss.facts import Moments, Partial, Pull, Softmax, Want

BATCH_INVARIANT = True
PROGRAMS = 1024  # enough to fill a GPU, where the count of rows may decide on the parts


# by columns in hand: the first line whose bound is not below V.  Measured on an H200; see benchmarks/gpu_kernels.py
SUMS = (
    (2048, Shape(2048, 128, 1, 1, 4)),
    (131072, Shape(32768, 128, 4, 1, 4)),
    (1 << 31, Shape(16384, 128, 2, 1, 4)),  # more parts, for few rows
)
PULL = (
    (2048, Shape(2048, 128, 1, 1, 4)),
    (65536, Shape(8192, 128, 2, 3, 4)),
    (1 << 31, Shape(4096, 128, 4, 1, 4)),
)


def sums(
    raw_CV: Tensor,
    target_C: Tensor | None,
    want: Want,
    temperatures: Sequence[float | Tensor],
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    start: int = 0,
    batch_invariant: bool | None = None,
    shape: Shape | None = None,
) -> Partial:
    """The partial of these columns; `start` is the first column's place in the whole vocabulary."""
    how: dict[str, Any] = {"scale": scale, "softcap": softcap, "start": start, "shape": shape}
    return named(sums_matrix(raw_CV, target_C, want, temperatures, batch_invariant=batch_invariant, **how), want)


def sums_matrix(
    raw_CV: Tensor,
    target_C: Tensor | None,
    want: Want,
    temperatures: Sequence[float | Tensor],
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    start: int = 0,
    batch_invariant: bool | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """The same as a matrix, in the order of `named`."""
    check_dtype(raw_CV)
    C, V = raw_CV.shape
    x_flags, q_flags = (tuple(want.sums(x, T) for T in want.temperatures) for x in "XQ")
    slots = 1 + want.target + 2 * want.total + want.argmax + sum(1 + x + q for x, q in zip(x_flags, q_flags))
    if C == 0 or V == 0:
        return _identity(slots, want, raw_CV)
    raw = rows_of(raw_CV)
    shape = shape or row_shape(SUMS, V)
    width, block = shape.width, shape.block(raw_CV)
    if not (BATCH_INVARIANT if batch_invariant is None else batch_invariant):
        width = _width_for(C, V, block)
    parts = triton.cdiv(V + raw.skew, width)
    given = tuple(plain_temperature(T) for T in temperatures)
    split = parts > 1
    chained = chains(raw_CV.device)
    options = {**LAUNCH, "launch_pdl": True} if chained else LAUNCH
    wanted = SweepFlags(
        per_row(given), scale != 1.0, softcap is not None, TARGET=want.target, TOTAL=want.total, BEST=want.argmax,
        WANT_X=x_flags, WANT_Q=q_flags, CHAINED=chained,
    )  # fmt: skip
    target = target_C if want.target else None
    places = (raw.x_CV.stride(0), raw.lead, 0 if target is None else target.stride(0), start)
    how = (float(scale), softcap or 1.0)
    out = torch.empty(slots - (split and want.target), parts, C, dtype=torch.float32, device=raw_CV.device)
    flags = wanted._replace(
        TARGET=want.target and not split, LINE=raw.line, VEC=raw.vector, K=shape.loads if raw.vector > 1 else 1,
        L=shape.lanes, J=16 // raw_CV.element_size(),
    )  # fmt: skip
    launch_kernel(
            sums_kernel, C * parts,
        raw.x_CV, target, out, given, C, V, parts, width, *places, how, F=flags, num_warps=shape.warps, **options,
    )  # fmt: skip
    if split:
        whole = torch.empty(slots, 1, C, dtype=torch.float32, device=raw_CV.device)
        padded = triton.next_power_of_2(parts)
        rows = max(1, 32 // padded)
        launch_kernel(
            merge_kernel, triton.cdiv(C, rows),
            raw.x_CV, target, out, whole, given, C, V, parts, *places, how,
            F=wanted._replace(PADDED=padded, ROWS=rows), num_warps=1, **options,
        )  # fmt: skip
        out = whole
    return out[:, 0]


def pull(
    raw_CV: Tensor,
    target_C: Tensor | None,
    softmax: Softmax,
    pulls: Sequence[Pull],
    temperatures: Sequence[float | Tensor],
    out_CV: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    start: int = 0,
    shape: Shape | None = None,
) -> None:
    """Write the gradient with respect to the raw logits into `out_CV`, which may be `raw_CV` itself."""
    used = [i for i, k in enumerate(pulls) if any(x is not None for x in k)]
    numbers = [softmax.max]
    for i in used:
        numbers += [softmax.log_sums[i], *(x for x in pulls[i] if x is not None)]
    # stacked: a coefficient may be a stride-0 expand straight from a sum's backward
    rows_FC = torch.stack([x.to(torch.float32) for x in numbers])
    there = [tuple(x is not None for x in pulls[i]) for i in used]
    given = [temperatures[i] for i in used]
    how: dict[str, Any] = {"scale": scale, "softcap": softcap, "start": start, "shape": shape}
    pull_rows(raw_CV, target_C, rows_FC, there, given, out_CV, **how)


def pull_rows(
    raw_CV: Tensor,
    target_C: Tensor | None,
    rows_FC: Tensor,
    there: Sequence[tuple[bool, ...]],
    temperatures: Sequence[float | Tensor],
    out_CV: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    start: int = 0,
    shape: Shape | None = None,
) -> None:
    """The same from numbers per row: the maximum, and of each temperature that pulls the log_sum and the coefficients
    that are there."""
    check_dtype(raw_CV)
    C, V = raw_CV.shape
    if C == 0 or V == 0:
        return
    if not there:
        out_CV.zero_()
        return
    if out_CV.stride(-1) != 1 and V > 1:  # rare: write into another tensor, then copy
        other_CV = torch.empty_like(out_CV, memory_format=torch.contiguous_format)
        how: dict[str, Any] = {"scale": scale, "softcap": softcap, "start": start, "shape": shape}
        pull_rows(raw_CV, target_C, rows_FC, there, temperatures, other_CV, **how)
        out_CV.copy_(other_CV)
        return
    raw, out = rows_of(raw_CV), rows_of(out_CV)
    # rows of both at the same place of a vector, or no wide loads: the stores decide
    apart = (raw.x_CV.stride(0) - out.x_CV.stride(0), raw.lead - out.lead)
    together = raw.vector == out.vector and not any(x % raw.vector for x in apart)
    shape = shape or row_shape(PULL, V)
    pulls = dict(zip("ABECY", zip(*there, strict=True), strict=True))
    given = tuple(plain_temperature(T) for T in temperatures)
    target = target_C if any(pulls["Y"]) else None
    parts = triton.cdiv(V + out.skew, shape.width)
    flags = PullFlags(
        **pulls, PER_ROW=per_row(given), TARGET=target is not None, SCALED=scale != 1.0, CAPPED=softcap is not None,
        WIDTH=shape.width, LINE=out.line, VEC=out.vector, RAW_VEC=raw.vector if together else 1,
        BLOCK=shape.block(out_CV), STAGES=shape.stages,
    )  # fmt: skip
    stride = raw.x_CV.stride(0)
    launch_kernel(
            pull_kernel, C * parts,
        PullAt(raw.x_CV, raw.x_CV, rows_FC, out.x_CV), target,
        PullGiven(given, (), (), (), float(scale), softcap or 1.0, 1.0, 1.0), C, V, parts, stride, raw.lead,
        stride, raw.lead, out.x_CV.stride(0), out.lead, 0 if target is None else target.stride(0), start,
        ELEMENT=None, F=flags, num_warps=shape.warps, **LAUNCH,
    )  # fmt: skip


def scale_(x: Tensor, scale: Tensor) -> None:
    """x *= scale in place, in float32, without asking the host what it is; times 1 costs a launch."""
    if not x.is_contiguous() or x.dtype == torch.float64:
        x.mul_(scale)
    elif x.numel():
        n = x.numel()
        aligned = (x.data_ptr() & 15 == 0, scale.data_ptr() & 15 == 0)
        form = (x.dtype, scale.dtype, *aligned, n == 1, n & 15 == 0, n >> 31 == 0)
        _SCALE.run(form, place(x), min(-(-n // 8192), PROGRAMS), (x, scale, n))


_SCALE = Launch(scale_kernel, {"BLOCK": 8192, "num_warps": 8})


def _width_for(C: int, V: int, block: int) -> int:
    """Columns of a part where the rows may decide: as many as leave PROGRAMS programs, a whole number of blocks."""
    parts = min(triton.cdiv(PROGRAMS, C), triton.cdiv(V, block))
    parts = 1 << (parts - 1).bit_length()
    return triton.cdiv(triton.cdiv(V, parts), block) * block


def _identity(slots: int, want: Want, raw_CV: Tensor) -> Tensor:
    out = torch.zeros(slots, len(raw_CV), dtype=torch.float32, device=raw_CV.device)
    out[: 1 + want.target] = -math.inf
    return out


def named(out: Tensor, want: Want) -> Partial:
    """The kernels' (F, C) numbers, by name and in their order."""
    slots = iter(out)
    return Partial(
        max=next(slots),
        target=next(slots) if want.target else None,
        total=next(slots) if want.total else None,
        columns=next(slots) if want.total else None,
        argmax=next(slots) if want.argmax else None,
        moments=tuple(
            Moments(next(slots), *(next(slots) if want.sums(x, T) else None for x in "XQ")) for T in want.temperatures
        ),
    )
