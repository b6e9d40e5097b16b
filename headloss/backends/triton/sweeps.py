"""The two passes over the vocabulary as Triton launches, for any vocabulary size, stride and alignment.

Dimension key:  C rows passed in   V columns passed in   P parts a row is swept in   F numbers per row

    sums   one launch, in which a program reads a part of a row, and one small launch that merges the parts
    pull   one launch, in which a program writes some columns of a row

They read bf16, fp16 or float32 and compute in float32.  Teachers have other kernels, `teachers.py` and
`teacher_pulls.py`.  Nothing is tuned at run time and nothing is atomic, so a call gives the same bits each time.  The
number of parts per row depends on V alone, so a row's facts do not depend on the number of rows.  With `BATCH_INVARIANT
= False` it depends on both, which is faster for a handful of rows.  How rows are laid out: `tiles.py`.
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
from headloss.backends.triton.launch import MOST_KNOWN, Launch
from headloss.backends.triton.tiles import (
    Shape,
    chains,
    check_dtype,
    per_row,
    plain_temperature,
    row_shape,
    rows_of,
)
from headloss.bounded_cache import store
from headloss.facts import Moments, Partial, Pull, Softmax, Want

BATCH_INVARIANT = True
PROGRAMS = 1024  # enough to fill a GPU, where the parts of a row depend on the number of rows


# by number of columns: the first entry whose bound is not below V.  Measured on an H200; see benchmarks/gpu_kernels.py
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
    raw_CV: Tensor, target_C: Tensor | None, want: Want, temperatures: Sequence[float | Tensor], **how: Any
) -> Partial:
    """The partial of these columns; `how` as in `sums_matrix`."""
    return named(sums_matrix(raw_CV, target_C, want, temperatures, **how), want)


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
    recorded: list[Any] | None = None,
) -> Tensor:
    """The same as a matrix, in the order of `named`; `start` is the first column's index in the whole vocabulary.

    `recorded` receives what repeated calls need: see `cached_launches.py`.
    """
    C, V = raw_CV.shape
    if C == 0 or V == 0 or not want.facts:  # a maximum alone is never read, and Triton 3.6 cannot compile it
        check_dtype(raw_CV)
        return _identity(_sum_slots(want), want, raw_CV)
    raw, size, device = rows_of(raw_CV), raw_CV.element_size(), raw_CV.device
    shape = shape or row_shape(SUMS, V)
    width = shape.width
    if not (BATCH_INVARIANT if batch_invariant is None else batch_invariant):
        width = _width_for(C, V, shape.block(raw_CV))
    parts = -(-(V + raw.skew) // width)
    given = tuple([T if type(T) is float else plain_temperature(T) for T in temperatures])
    transforms = scale != 1.0, softcap is not None
    variant = (want, shape, size, raw.line, raw.vector, per_row(given), *transforms, parts, device)
    launches = _SUMS.get(variant)
    if launches is None:
        check_dtype(raw_CV)
        launches = store(_SUMS, variant, _sums_launches(*variant), MOST_KNOWN)
    target = target_C if want.target else None
    places = (raw.x_CV.stride(0), raw.lead, 0 if target is None else target.stride(0), start)
    # all that a compiled kernel depends on, read once: see launch.py
    key = (*argument_kinds(raw.x_CV, target, *given), C == 1, C & 15, C >> 31, V, width, places)
    found = (*launches, want.target, key, (C, V, parts), width, given, (*places, (float(scale), softcap or 1.0)))
    if recorded is not None and raw.x_CV is raw_CV:
        recorded.append(found)
    return launch_sums(found, raw.x_CV, target_C)


def launch_sums(recorded: tuple[Any, ...], x: Tensor, target: Tensor | None) -> Tensor:
    """Launch the kernels of `sums_matrix`."""
    launch, merge, slots, rows, picks, key, sizes, width, given, how = recorded
    (C, _, parts), device, where = sizes, x.device, x.get_device()
    target = target if picks else None
    if merge is None:
        out = torch.empty(slots, C, dtype=torch.float32, device=device)
        launch.run(key, where, C, (x, target, out, given, *sizes, width, *how))
        return out
    each = torch.empty(slots - picks, parts, C, dtype=torch.float32, device=device)
    launch.run(key, where, C * parts, (x, target, each, given, *sizes, width, *how))
    out = torch.empty(slots, C, dtype=torch.float32, device=device)
    merge.run(key, where, -(-C // rows), (x, target, each, out, given, *sizes, *how))
    return out


_SUMS: dict[Any, tuple[Launch, Launch | None, int, int]] = {}  # kernels, numbers per row, rows per merging program


def _sum_slots(want: Want) -> int:
    sums = sum(1 + want.sums("X", T) + want.sums("Q", T) for T in want.temperatures)
    return 1 + want.target + 2 * want.total + want.argmax + sums


def _sums_launches(
    want: Want, shape: Shape, size: int, line: int, vector: int, per_row: tuple[bool, ...], scaled: bool, capped: bool,
    parts: int, device: torch.device,
) -> tuple[Launch, Launch | None, int, int]:  # fmt: skip
    chained = chains(device)
    options = {"launch_pdl": True} if chained else {}
    x_flags, q_flags = (tuple(want.sums(x, T) for T in want.temperatures) for x in "XQ")
    wanted = SweepFlags(
        per_row, scaled, capped, TARGET=want.target, TOTAL=want.total, BEST=want.argmax,
        WANT_X=x_flags, WANT_Q=q_flags, CHAINED=chained,
    )  # fmt: skip
    flags = wanted._replace(
        TARGET=want.target and parts == 1, LINE=line, VEC=vector, K=shape.loads if vector > 1 else 1,
        L=shape.lanes, J=16 // size,
    )  # fmt: skip
    launch = Launch(sums_kernel, {"F": flags, "num_warps": shape.warps, **options})
    if parts == 1:
        return launch, None, _sum_slots(want), 1
    padded = triton.next_power_of_2(parts)
    rows = max(1, 32 // padded)
    merge = Launch(merge_kernel, {"F": wanted._replace(PADDED=padded, ROWS=rows), "num_warps": 1, **options})
    return launch, merge, _sum_slots(want), rows


def argument_kinds(*xs: Any) -> list[Any]:
    """What a compiled kernel depends on: of a tensor its dtype and alignment, of a number or None its type."""
    return [(x.dtype, x.data_ptr() & 15 == 0) if isinstance(x, Tensor) else type(x) for x in xs]


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
    present = [tuple(x is not None for x in pulls[i]) for i in used]
    given = [temperatures[i] for i in used]
    how: dict[str, Any] = {"scale": scale, "softcap": softcap, "start": start, "shape": shape}
    pull_rows(raw_CV, target_C, rows_FC, present, given, out_CV, **how)


def pull_rows(
    raw_CV: Tensor,
    target_C: Tensor | None,
    rows_FC: Tensor,
    present: Sequence[tuple[bool, ...]],
    temperatures: Sequence[float | Tensor],
    out_CV: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    start: int = 0,
    shape: Shape | None = None,
    recorded: list[Any] | None = None,
) -> None:
    """The same from numbers per row: the maximum and, for each temperature that pulls, the log_sum and the coefficients
    that are `present`.  `recorded`: see `sums_matrix`."""
    check_dtype(raw_CV)
    C, V = raw_CV.shape
    if C == 0 or V == 0:
        return
    if not present:
        out_CV.zero_()
        return
    if out_CV.stride(-1) != 1 and V > 1:  # rare: write to another tensor, then copy
        other_CV = torch.empty_like(out_CV, memory_format=torch.contiguous_format)
        how: dict[str, Any] = {"scale": scale, "softcap": softcap, "start": start, "shape": shape}
        pull_rows(raw_CV, target_C, rows_FC, present, temperatures, other_CV, **how)
        out_CV.copy_(other_CV)
        return
    raw, out = rows_of(raw_CV), rows_of(out_CV)
    stride, out_stride = raw.x_CV.stride(0), out.x_CV.stride(0)
    # wide loads only if both rows have the same offset in a vector: the stores decide
    apart, lead_apart = stride - out_stride, raw.lead - out.lead
    together = raw.vector == out.vector and not apart % raw.vector and not lead_apart % raw.vector
    shape = shape or row_shape(PULL, V)
    given = tuple([T if type(T) is float else plain_temperature(T) for T in temperatures])
    variant = (
        tuple(present), shape, out_CV.element_size(), out.line, out.vector, raw.vector if together else 1,
        per_row(given), scale != 1.0, softcap is not None, target_C is not None,
    )  # fmt: skip
    launches = _PULLS.get(variant) or store(_PULLS, variant, _pull_launch(*variant), MOST_KNOWN)
    has_target = launches.constants["F"].TARGET
    target = target_C if has_target else None
    parts = -(-(V + out.skew) // shape.width)
    numbers = PullGiven(given, float(scale), softcap or 1.0)
    places = (stride, raw.lead, out_stride, out.lead, 0 if target is None else target.stride(0), start)
    key = (*argument_kinds(raw.x_CV, rows_FC, out.x_CV, target, *given), C == 1, C & 15, C >> 31, V, parts, places)
    found = (launches, has_target, key, C * parts, (numbers, C, V, parts, *places))
    if recorded is not None and raw.x_CV is raw_CV and out.x_CV is out_CV:
        recorded.append(found)
    launch_pull(found, raw.x_CV, target_C, rows_FC, out.x_CV)


def launch_pull(
    recorded: tuple[Any, ...],
    x: Tensor,
    target: Tensor | None,
    rows_FC: Tensor,
    out: Tensor,
    teachers: tuple[Tensor, ...] = (),
) -> None:
    """Launch the kernel of `pull_rows`, or of a pull with teachers."""
    launch, has_target, key, programs, how = recorded
    launch.run(key, x.get_device(), programs, (PullAt(x, teachers, rows_FC, out), target if has_target else None, *how))


_PULLS: dict[Any, Launch] = {}


def _pull_launch(
    present: tuple[tuple[bool, ...], ...], shape: Shape, size: int, line: int, vector: int, raw_vector: int,
    per_row: tuple[bool, ...], scaled: bool, capped: bool, has_target: bool,
) -> Launch:  # fmt: skip
    pulls = dict(zip("ABECY", zip(*present, strict=True), strict=True))
    flags = PullFlags(
        **pulls, PER_ROW=per_row, TARGET=has_target and any(pulls["Y"]), SCALED=scaled, CAPPED=capped,
        WIDTH=shape.width, LINE=line, VEC=vector, RAW_VEC=raw_vector, BLOCK=shape.block_of(size), STAGES=shape.stages,
    )  # fmt: skip
    return Launch(pull_kernel, {"ELEMENT": None, "F": flags, "num_warps": shape.warps})


def scale_(x: Tensor, scale: Tensor) -> None:
    """x *= scale in place, in float32, without reading the scale on the host; a scale of 1 costs one launch."""
    if not x.is_contiguous() or x.dtype == torch.float64:
        x.mul_(scale)
    elif x.numel():
        n = x.numel()
        aligned = (x.data_ptr() & 15 == 0, scale.data_ptr() & 15 == 0)
        key = (x.dtype, scale.dtype, *aligned, n == 1, n & 15 == 0, n >> 31 == 0)
        _SCALE.run(key, x.get_device(), min(-(-n // 8192), PROGRAMS), (x, scale, n))


_SCALE = Launch(scale_kernel, {"BLOCK": 8192, "num_warps": 8})


def _width_for(C: int, V: int, block: int) -> int:
    """Columns per part if not BATCH_INVARIANT: enough for PROGRAMS programs, in whole blocks."""
    parts = min(triton.cdiv(PROGRAMS, C), triton.cdiv(V, block))
    parts = 1 << (parts - 1).bit_length()
    return triton.cdiv(triton.cdiv(V, parts), block) * block


def _identity(slots: int, want: Want, raw_CV: Tensor) -> Tensor:
    out = torch.zeros(slots, len(raw_CV), dtype=torch.float32, device=raw_CV.device)
    out[: 1 + want.target] = -math.inf
    return out


def named(out: Tensor, want: Want) -> Partial:
    """The kernels' numbers (F, C) by name, in the order in which they are stored."""
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
