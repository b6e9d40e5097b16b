"""The likeliest columns of each row: found by a kernel that leaves a few more, and put in order.

Dimension key:  C rows handed in   V columns in hand   K columns wanted   M room for those that are found
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton  # type: ignore
from torch import Tensor

from headloss.backends.triton.kernels.top import cut_kernel, top_kernel
from headloss.backends.triton.launch import launch_kernel
from headloss.backends.triton.sweeps import sums as student_sums
from headloss.backends.triton.tiles import LAUNCH, Transform, check_dtype, readable, rows_of
from headloss.facts import Fact, Want
from headloss.teachers import DenseChunk, SparsePartial, Theirs, TopChunk

BEYOND = 1 << 24  # a column that no vocabulary has, and float32 holds


def top_partial(raw_CV: Tensor, max_C: Tensor, chunk: TopChunk, how: Transform, start: int) -> SparsePartial:
    """The largest logits of each row, in order, of equals the lower column first, and what a teacher says there."""
    V, k = raw_CV.shape[1], chunk.k
    values_CK, column_CK = largest(raw_CV, min(k, V), how)
    fill = (0, k - values_CK.shape[-1])
    origin_C1 = max_C.masked_fill(max_C == -math.inf, 0.0)[:, None]
    ids_CK = torch.nn.functional.pad(values_CK - origin_C1, fill, value=-math.inf)
    columns_CK = torch.nn.functional.pad((column_CK + start).float(), fill, value=BEYOND)
    theirs = None if chunk.of is None else _theirs(chunk.of, column_CK, fill)
    return SparsePartial(ids_CK, None, (), None, columns_CK, theirs)


def lanes(k: int) -> int:
    """Many more than k, so that the k-th largest of their maxima is little below that of the row."""
    return min(4096, max(256, triton.next_power_of_2(4 * k)))  # 3520 x 151936, k = 64: 0.88 ms with 256, 1.16 with 512


def largest(raw_CV: Tensor, k: int, how: Transform) -> tuple[Tensor, Tensor]:
    """(C, k) logits and columns."""
    check_dtype(raw_CV)
    C, V = raw_CV.shape
    room = triton.next_power_of_2(max(256, 2 * k))
    values_CM = torch.full((C, room), -math.inf, dtype=torch.float32, device=raw_CV.device)
    columns_CM = torch.full((C, room), BEYOND, dtype=torch.int32, device=raw_CV.device)
    if C and k:
        raw, L = rows_of(raw_CV), lanes(k)
        counts_C = torch.empty(C, dtype=torch.int32, device=raw_CV.device)
        given = (values_CM, columns_CM, counts_C, V, raw.x_CV.stride(0), raw.lead, k, *how.numbers)
        flags = {**how.flags(), **LAUNCH, "LINE": raw.line, "L": L, "J": 16 // raw_CV.element_size(), "M": room}
        launch_kernel(top_kernel, C, raw.x_CV, *given, **flags, num_warps=max(4, L // 128))
        launch_kernel(cut_kernel, C, raw.x_CV, *given, **flags, num_warps=max(4, L // 128))
    order_CK = values_CM.argsort(dim=-1, descending=True, stable=True)[:, :k]
    column_CK = columns_CM.gather(-1, order_CK).long().clamp(max=max(0, V - 1))
    return values_CM.gather(-1, order_CK), column_CK


def _theirs(of: DenseChunk, column_CK: Tensor, fill: Sequence[int]) -> Theirs:
    raw_CU, how = readable(of.raw_CV[:, : of.columns]), Transform(of.scale, of.softcap)
    facts = [Fact("lse", float(i + 1)) for i in range(len(of.temperatures))]  # any names will do
    found = student_sums(raw_CU, None, Want(facts), of.temperatures, scale=of.scale, softcap=of.softcap)
    origin_C1 = found.max.masked_fill(found.max == -math.inf, 0.0)[:, None]
    here_CK = column_CK < of.columns
    if of.columns:
        y_CK = how(raw_CU.gather(-1, column_CK.clamp(max=of.columns - 1))) - origin_C1
    else:
        y_CK = torch.zeros(column_CK.shape, dtype=torch.float32, device=column_CK.device)
    y_CK = torch.nn.functional.pad(y_CK.masked_fill(~here_CK, -math.inf), list(fill), value=-math.inf)
    at = tuple(y_CK / (T[:, None] if isinstance(T, Tensor) else T) for T in of.temperatures)
    return Theirs(found.max, at, tuple(m.S for m in found.moments))
