"""Some columns of each row of a linear head on a GPU: what `headloss.backends.torch_columns` says, in kernels.

Dimension key:  E kept columns of all rows in hand   D hidden size
"""

from __future__ import annotations

import triton  # type: ignore
from torch import Tensor

from headloss.backends.triton.kernels.columns import combine_kernel, project_kernel, take_kernel
from headloss.backends.triton.launch import launch_kernel

# Measured on an H200 with 61,000 entries of 4096; a BLOCK that leaves a warp without a row of its own takes ten times
# as long, because sums then cross warps.
PROJECT = {"ENTRIES": 4, "BLOCK": 1024, "num_warps": 4}
COMBINE = {"ENTRIES": 2, "BLOCK": 2048, "num_warps": 4}
TAKE = {"ROWS": 4, "BLOCK": 1024, "num_warps": 4}


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
    """out[into] = sum over its entries of scale grad[place] x[of], in float32; entries of one `into` stand together."""
    E, D = len(into_E), x_ND.shape[1]
    x_ND = _lined(x_ND)
    if E and D:
        launch_kernel(
            combine_kernel, E * triton.cdiv(D, COMBINE["BLOCK"]), out_SD, into_E, of_E, place_E, grad_P, x_ND,
            float(scale), E, D, out_SD.stride(0), x_ND.stride(0), ADD=add, **COMBINE,
        )  # fmt: skip


def take(raw_CV: Tensor, ids: Tensor, out_CU: Tensor) -> None:
    """out = raw[:, ids].  Tokens in rising order are read four times as fast as others."""
    raw_CV, (C, U) = _lined(raw_CV), out_CU.shape
    if C and U:
        programs = triton.cdiv(C, TAKE["ROWS"]) * triton.cdiv(U, TAKE["BLOCK"])
        given = (raw_CV, ids, out_CU, C, U, raw_CV.stride(0), out_CU.stride(0))
        launch_kernel(take_kernel, programs, *given, **TAKE)


def _lined(x: Tensor) -> Tensor:
    """Rows whose elements lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
