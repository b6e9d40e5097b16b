"""A linear head at a few columns per row in plain PyTorch: the logits there, and the sums of rows for the gradients.

Dimension key:  E kept columns of all rows passed in   D hidden size   P places where logits stand, or their gradient
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headloss.backends.torch_tile import divide

BAND = 32 << 20  # bytes of rows that are gathered at a time


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
    """out[place] = scale (hidden[row] . weight[column] + bias[column]) in float32 or better; 0 where the column is -1.

    Nothing is written for a column of -2.  The last element of `out` gets an arbitrary value.
    """
    dtype = out_P.dtype
    for part in _bands(len(row_E), hidden_ND.shape[1], dtype):
        here, column = column_E[part] >= 0, column_E[part].clamp(min=0)
        value = torch.zeros(len(here), dtype=dtype, device=out_P.device)
        if len(weight_VD):
            hidden = hidden_ND[row_E[part]].to(dtype).masked_fill(~here[:, None], 0)  # an ignored row may hold NaN
            value = torch.linalg.vecdot(hidden, weight_VD[column].to(dtype))
            if bias_V is not None:
                value = value + bias_V[column].masked_fill(~here, 0)
        out_P.scatter_(0, place_E[part].masked_fill(column_E[part] < -1, len(out_P) - 1), value * scale)


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
    """out[into] = sum of scale grad[place] x[of] over the entries with that `into`, which are adjacent; float32 or
    better.

    Entries with a negative `into` or `of` are skipped.  `add`: to what `out` holds.
    """
    dtype = torch.promote_types(grad_P.dtype, torch.float32)
    here_E = (into_E >= 0) & (of_E >= 0)
    if x_ND.device.type == "cpu":
        into_E, of_E, place_E = into_E[here_E], of_E[here_E], place_E[here_E]
        grad_E = grad_P[place_E]
    else:  # the host does not know how many entries count
        grad_E = torch.nn.functional.pad(grad_P, (0, 1))[place_E].masked_fill(~here_E, 0)
        into_E, of_E = into_E.clamp(min=0), of_E.clamp(min=0)
    grad_E = grad_E * scale
    if not len(x_ND) or not len(out_SD):
        return
    total_SD = out_SD if out_SD.dtype == dtype else out_SD.to(dtype)
    for part in _bands(len(into_E), x_ND.shape[1], dtype):
        own = x_ND[of_E[part]].to(dtype) * grad_E[part, None].to(dtype)
        if x_ND.device.type == "cpu":
            total_SD.index_add_(0, into_E[part], own)
        else:  # sorted and summed in order; index_add_ would add atomically
            own = own.masked_fill(~here_E[part, None], 0)
            total_SD.index_put_((into_E[part],), own, accumulate=True)
    if total_SD is not out_SD:
        out_SD.copy_(total_SD)


def take(
    raw_CV: Tensor,
    ids: Tensor,
    out_CU: Tensor,
    temperatures: Sequence[float | Tensor],
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, ...]:
    """out = raw[:, ids].  Returns the log-sum-exp of each row over its other columns, per temperature."""
    torch.index_select(raw_CV, 1, ids, out=out_CU)
    dtype = torch.promote_types(raw_CV.dtype, torch.float32)
    found = [torch.empty(len(raw_CV), dtype=dtype, device=raw_CV.device) for _ in temperatures]
    for rows in _bands(len(raw_CV) if found else 0, raw_CV.shape[1], dtype):
        z = raw_CV[rows].to(dtype) * scale
        z = z if softcap is None else (z / softcap).tanh() * softcap
        z.index_fill_(1, ids.long(), -math.inf)  # their own sum: whole - shared would lose a small one to rounding
        for lse, T in zip(found, temperatures, strict=True):
            lse[rows] = divide(z, T, rows).logsumexp(-1)
    return tuple(found)


def _bands(E: int, D: int, dtype: torch.dtype) -> list[slice]:
    step = max(1, BAND // max(1, 2 * D * dtype.itemsize))
    return [slice(i, min(i + step, E)) for i in range(0, E, step)]
