"""Some columns of each row of a linear head in plain PyTorch: their logits, and sums of rows for the gradients.

Dimension key:  E kept columns of all rows in hand   D hidden size
"""

from __future__ import annotations

import torch
from torch import Tensor

BAND = 32 << 20  # bytes of rows that are gathered at a time


def project(hidden_ND: Tensor, weight_VD: Tensor, row_E: Tensor, column_E: Tensor) -> Tensor:
    """hidden[row] . weight[column] of each entry, in float32 or better; 0 where the column is -1."""
    dtype = torch.promote_types(torch.promote_types(hidden_ND.dtype, weight_VD.dtype), torch.float32)
    out_E = torch.zeros(len(row_E), dtype=dtype, device=row_E.device)
    if not len(weight_VD):
        return out_E
    for part in _bands(len(row_E), hidden_ND.shape[1], dtype):
        here, column = column_E[part] >= 0, column_E[part].clamp(min=0)
        hidden = hidden_ND[row_E[part]].to(dtype).masked_fill(~here[:, None], 0)  # a row that is ignored may hold NaN
        out_E[part] = torch.linalg.vecdot(hidden, weight_VD[column].to(dtype))
    return out_E


def combine(out_SD: Tensor, into_E: Tensor, of_E: Tensor, grad_E: Tensor, x_ND: Tensor, add: bool) -> None:
    """out[into] = sum over its entries of grad x[of], in float32 or better; entries of one `into` stand together.

    An entry whose `into` or `of` is -1 is none.  `add`: to what is there.
    """
    dtype = torch.promote_types(grad_E.dtype, torch.float32)
    here_E = (into_E >= 0) & (of_E >= 0)
    if x_ND.device.type == "cpu":
        into_E, of_E, grad_E = into_E[here_E], of_E[here_E], grad_E[here_E]
    else:  # the host does not know how many there are
        grad_E, into_E, of_E = grad_E.masked_fill(~here_E, 0), into_E.clamp(min=0), of_E.clamp(min=0)
    if not len(x_ND) or not len(out_SD):
        return
    total_SD = out_SD if out_SD.dtype == dtype else out_SD.to(dtype)
    for part in _bands(len(into_E), x_ND.shape[1], dtype):
        own = x_ND[of_E[part]].to(dtype) * grad_E[part, None].to(dtype)
        if x_ND.device.type == "cpu":
            total_SD.index_add_(0, into_E[part], own)
        else:  # sorted and summed in order, where index_add_ would add atomically
            own = own.masked_fill(~here_E[part, None], 0)
            total_SD.index_put_((into_E[part],), own, accumulate=True)
    if total_SD is not out_SD:
        out_SD.copy_(total_SD)


def _bands(E: int, D: int, dtype: torch.dtype) -> list[slice]:
    step = max(1, BAND // max(1, 2 * D * dtype.itemsize))
    return [slice(i, min(i + step, E)) for i in range(0, E, step)]
