"""A linear head at a few columns per row on a GPU: the launches that match `headloss.backends.torch_columns`.

Dimension key:  E kept columns of all rows passed in   D hidden size
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore
from torch import Tensor

from headloss.backends.triton.kernels.columns import (
    combine_kernel,
    merge_kernel,
    places_kernel,
    project_kernel,
    take_kernel,
)
from headloss.backends.triton.kernels.records import TakeFlags
from headloss.backends.triton.launch import launch_kernel
from headloss.backends.triton.tiles import Transform, per_row, plain_temperature

# Measured on an H200 with 61,000 entries of 4096; with a BLOCK for which several warps share a row, it takes ten
# times as long, because sums then cross warps.
PROJECT = {"ENTRIES": 4, "BLOCK": 1024, "num_warps": 4}
COMBINE = {"ENTRIES": 2, "BLOCK": 2048, "num_warps": 4}
PLACES = {"BLOCK": 32, "num_warps": 1}
TAKE = {"ROWS": 2, "PART": 4096, "BLOCK": 1024, "num_warps": 4}


def project(
    out_P: Tensor,
    row_E: Tensor,
    column_E: Tensor,
    place_E: Tensor,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    scale: float,
) -> None:
    """out[place] = scale (hidden[row] . weight[column] + bias[column]), in float32; 0 where the column is -1."""
    E, D = len(row_E), hidden_ND.shape[1]
    hidden_ND, weight_VD = _lined(hidden_ND), _lined(weight_VD)
    bias = hidden_ND if bias_V is None else bias_V.contiguous()
    if E:
        launch_kernel(
            project_kernel, triton.cdiv(E, PROJECT["ENTRIES"]), out_P, row_E, column_E, place_E, hidden_ND, weight_VD,
            bias, float(scale), E, D, hidden_ND.stride(0), weight_VD.stride(0), BIAS=bias_V is not None, **PROJECT,
        )  # fmt: skip


def combine(
    out_SD: Tensor,
    into_E: Tensor,
    of_E: Tensor,
    place_E: Tensor,
    grad_P: Tensor,
    x_ND: Tensor,
    scale: float,
    add: bool,
) -> None:
    """out[into] = sum of scale grad[place] x[of] over the entries with that `into`, which are adjacent; float32."""
    E, D = len(into_E), x_ND.shape[1]
    x_ND = _lined(x_ND)
    if E and D:
        launch_kernel(
            combine_kernel, E * triton.cdiv(D, COMBINE["BLOCK"]), out_SD, into_E, of_E, place_E, grad_P, x_ND,
            float(scale), E, D, out_SD.stride(0), x_ND.stride(0), ADD=add, **COMBINE,
        )  # fmt: skip


def find_places(
    keys_E: Tensor, offsets: Tensor, target_N: Tensor | None, width: int
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """For `support_layout.Places.found`: what its entries are made of, and the tensors with one value per row."""
    N, device = len(offsets) - 1, keys_E.device
    E = len(keys_E) + (0 if target_N is None else N)
    entries = torch.empty(5, E, dtype=torch.int64, device=device)
    rows, flags = (
        torch.empty(2, N, dtype=torch.int64, device=device),
        torch.empty(2, N, dtype=torch.bool, device=device),
    )
    if N:
        target = offsets if target_N is None else target_N.contiguous()
        given = keys_E, offsets.contiguous(), target, entries, rows, flags, E, N, width
        launch_kernel(places_kernel, N, *given, TARGET=target_N is not None, **PLACES)
    named = {"lengths_N": rows[0], "single_N": flags[0]}
    if target_N is not None:
        named |= {"marked_N": rows[1], "missing_N": flags[1]}
    return entries.unbind(), named


def take(
    raw_CV: Tensor,
    ids: Tensor,
    out_CU: Tensor,
    temperatures: Sequence[float | Tensor],
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, ...]:
    """See `torch_columns.take`.  Tokens in rising order are read three times as fast as others."""
    raw_CV, given, how = _lined(raw_CV), tuple([plain_temperature(T) for T in temperatures]), Transform(scale, softcap)
    (C, V), U = raw_CV.shape, len(ids)
    parts = triton.cdiv(V, TAKE["PART"])
    sums = torch.empty(len(given), parts, C, dtype=torch.float32, device=raw_CV.device)
    if C and V:
        stride, limit = raw_CV.stride(0), -(-V // 16) * 16  # loads are wide if rows are padded, as a chunk's are
        stored = raw_CV.untyped_storage().nbytes() // raw_CV.element_size() - raw_CV.storage_offset()
        wide = limit <= stride and (C - 1) * stride + limit <= stored and stride * raw_CV.element_size() % 16 == 0
        others = torch.ones(V if given else 0, dtype=torch.int8, device=raw_CV.device)
        others = others.index_fill_(0, ids.long(), 0) if given else others
        width = triton.cdiv(triton.cdiv(U, parts), 8) * 8
        shape = {name: n for name, n in TAKE.items() if name != "num_warps"}
        vector = 16 // raw_CV.element_size() if wide else 1
        flags = TakeFlags(per_row(given), **how.flags(), VEC=vector, **shape)
        launch_kernel(
            take_kernel, triton.cdiv(C, TAKE["ROWS"]) * parts, raw_CV, ids, others, out_CU, sums, given, how.numbers,
            C, V, U, stride, out_CU.stride(0), limit if wide else V, parts, width, F=flags,
            num_warps=TAKE["num_warps"],
        )  # fmt: skip
    if not given:
        return ()
    found = torch.empty(len(given), C, dtype=torch.float32, device=raw_CV.device)
    if C:
        padded = triton.next_power_of_2(parts)
        launch_kernel(
            merge_kernel, len(given) * triton.cdiv(C, 64), sums, found, C, parts, PADDED=padded, ROWS=64, num_warps=4,
        )  # fmt: skip
    return found.unbind()


def _lined(x: Tensor) -> Tensor:
    """The same matrix with contiguous rows."""
    return x if x.stride(-1) == 1 else x.contiguous()
