"""The likeliest columns of each row: one kernel finds them and a few more, another puts them in order.

Dimension key:  C rows passed in   V columns passed in   K columns wanted   M columns found, at most   G groups
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton  # type: ignore
from torch import Tensor

from headloss.backends.triton.kernels.records import TopFlags
from headloss.backends.triton.kernels.top import cut_kernel, order_kernel, top_kernel
from headloss.backends.triton.launch import launch_kernel
from headloss.backends.triton.sweeps import sums as student_sums
from headloss.backends.triton.tiles import Transform, check_dtype, readable, rows_of
from headloss.facts import Fact, Want
from headloss.teachers import DenseChunk, SparsePartial, TeacherTop, TopChunk, column

BEYOND = 1 << 24  # a column beyond any vocabulary, which float32 represents exactly


def top_partial(raw_CV: Tensor, max_C: Tensor, chunk: TopChunk, how: Transform, start: int) -> SparsePartial:
    """The largest logits of each row in order (the lower column first if equal), and a teacher's logits there."""
    V, k = raw_CV.shape[1], chunk.k
    values_CK, column_CK = largest(raw_CV, min(k, V), how)
    fill = (0, k - values_CK.shape[-1])
    origin_C1 = max_C.masked_fill(max_C == -math.inf, 0.0)[:, None]
    ids_CK = torch.nn.functional.pad(values_CK - origin_C1, fill, value=-math.inf)
    columns_CK = torch.nn.functional.pad((column_CK + start).float(), fill, value=BEYOND)
    teacher_top = None if chunk.of is None else _teacher_top(chunk.of, column_CK, fill)
    return SparsePartial(ids_CK, None, (), None, columns_CK, teacher_top)


L = 256  # lanes of a program
SORTED = 1024  # keys that one program can sort


def loads(V: int, k: int, J: int) -> int:
    """Loads per group, few enough for several times k groups: their k-th largest is then little below the row's."""
    return max(1, min(16, triton.next_power_of_2(max(1, V // (4 * k * J)) + 1) // 2))


def largest(raw_CV: Tensor, k: int, how: Transform) -> tuple[Tensor, Tensor]:
    """(C, k) logits and columns."""
    check_dtype(raw_CV)
    C, V = raw_CV.shape
    device = raw_CV.device
    values_CK = torch.empty(C, k, dtype=torch.float32, device=device)
    columns_CK = torch.empty(C, k, dtype=torch.int64, device=device)
    if C and k:
        raw, J = rows_of(raw_CV), 16 // raw_CV.element_size()
        B, M = loads(V, k, J), triton.next_power_of_2(max(256, 2 * k))
        G = triton.next_power_of_2(triton.cdiv(V + raw.line, L * J * B) * L)
        found_CM = torch.empty(C, M, dtype=torch.int64, device=device)
        groups_CG = torch.empty(C, G, dtype=torch.int32, device=device)
        counts_C = torch.empty(C, dtype=torch.int32, device=device)
        given = (V, raw.x_CV.stride(0), raw.lead, k, how.numbers)
        cut = TopFlags(**how.flags(), LINE=raw.line, L=L, J=J, M=M)
        flags, warps = cut._replace(B=B, G=G), min(32, L // 32 * max(1, G // 8192))
        launch_kernel(top_kernel, C, raw.x_CV, found_CM, counts_C, groups_CG, *given, F=flags, num_warps=warps)
        launch_kernel(cut_kernel, C, raw.x_CV, found_CM, counts_C, *given, F=cut, num_warps=L // 32)
        if M <= SORTED:
            order = (found_CM, counts_C, values_CK, columns_CK, k)
            launch_kernel(order_kernel, C, *order, M=M, num_warps=max(1, M // 256))
        else:
            found_CM.masked_fill_(torch.arange(M, device=device) >= counts_C[:, None], torch.iinfo(torch.int64).min)
            found_CK = found_CM.sort(dim=-1, descending=True).values[:, :k]
            key_CK = (found_CK >> 32).to(torch.int32)
            values_CK = torch.where(key_CK < 0, key_CK ^ 0x7FFFFFFF, key_CK).view(torch.float32)
            columns_CK = 0x7FFFFFFF - (found_CK & 0x7FFFFFFF)
    return values_CK, columns_CK


def _teacher_top(of: DenseChunk, column_CK: Tensor, fill: Sequence[int]) -> TeacherTop:
    raw_CU, how = readable(of.raw_CV[:, : of.columns]), Transform(of.scale, of.softcap)
    facts = [Fact("lse", float(i + 1)) for i in range(len(of.temperatures))]  # any distinct temperatures will do
    found = student_sums(raw_CU, None, Want(facts), of.temperatures, scale=of.scale, softcap=of.softcap)
    max_C, sums = found.max, tuple(m.S for m in found.moments)
    for lse_C, T in zip(of.tail, of.temperatures, strict=bool(of.tail)):  # relative to this no sum overflows
        max_C = torch.maximum(max_C, lse_C * T)
    origin_C1 = max_C.masked_fill(max_C == -math.inf, 0.0)[:, None]
    if of.tail:
        lost_C, tails = found.max - origin_C1[:, 0], zip(sums, of.tail, of.temperatures, strict=True)
        sums = tuple(S * (lost_C / T).exp() + (lse_C - origin_C1[:, 0] / T).exp() for S, lse_C, T in tails)
    here_CK = column_CK < of.columns
    if of.columns:
        y_CK = how(raw_CU.gather(-1, column_CK.clamp(max=of.columns - 1))) - origin_C1
    else:
        y_CK = torch.zeros(column_CK.shape, dtype=torch.float32, device=column_CK.device)
    y_CK = torch.nn.functional.pad(y_CK.masked_fill(~here_CK, -math.inf), list(fill), value=-math.inf)
    at = tuple(y_CK / column(T) for T in of.temperatures)
    return TeacherTop(max_C, at, sums)
