"""A linear head whose rows fit in one chunk and all count: its three products.

Dimension key:  N rows   V vocabulary   D hidden size

`heads.LinearHead` makes the same of any head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headloss.engine.heads import even_parts
from headloss.record import Grads
from headloss.sources import Linear, padded


class OneChunk:
    """What heads have in common that are alike: of one dtype, without a bias, with a column for each row of the weight.

    Their gradients are of that dtype too; nothing is accumulated.
    """

    __slots__ = ("flat", "parts", "size")

    def __init__(self, source: Linear) -> None:
        parts = even_parts(source.weight)
        self.parts = parts if len(parts) > 1 else ()
        self.flat, self.size = source.hidden.ndim == 2, (math.prod(source.leading), padded(source.columns))

    def read(self, source: Linear) -> Tensor:
        """The logits of all rows."""
        hidden_ND, weight_VD = self._hidden(source), source.weight
        raw_NV = torch.empty(self.size, dtype=hidden_ND.dtype, device=hidden_ND.device)
        if self.size[1] != source.columns:
            raw_NV = raw_NV[:, : source.columns]
        if not self.parts:
            return torch.mm(hidden_ND, weight_VD.t(), out=raw_NV)
        for part in self.parts:
            torch.mm(hidden_ND, weight_VD[part].t(), out=raw_NV[:, part])
        return raw_NV

    def write(self, source: Linear, grad_NV: Tensor, needs: tuple[bool, ...]) -> Grads:
        """The gradients that are wanted, from that of the logits."""
        hidden_ND, weight_VD, dhidden, dweight = self._hidden(source), source.weight, None, None
        if needs[0]:
            dhidden = torch.empty_like(hidden_ND, memory_format=torch.contiguous_format)
            if self.parts:  # the few columns first: what is rounded twice is small
                most, few = self.parts
                torch.mm(grad_NV[:, few], weight_VD[few], out=dhidden)
                torch.addmm(dhidden, grad_NV[:, most], weight_VD[most], out=dhidden)
            else:
                torch.mm(grad_NV, weight_VD, out=dhidden)
            dhidden = dhidden if self.flat else dhidden.view(source.hidden.shape)
        if needs[1]:
            dweight = torch.empty_like(weight_VD, memory_format=torch.contiguous_format)
            if not self.parts:
                torch.mm(grad_NV.t(), hidden_ND, out=dweight)
            for part in self.parts:
                torch.mm(grad_NV[:, part].t(), hidden_ND, out=dweight[part])
        return Grads(None, dhidden, dweight)

    def _hidden(self, source: Linear) -> Tensor:
        return source.hidden if self.flat else source.hidden.reshape(self.size[0], -1)
