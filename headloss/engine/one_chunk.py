"""A linear head whose rows fit in one chunk and all count: its three products, and nothing else.

Dimension key:  N rows   V vocabulary   D hidden size
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headloss.engine.heads import even_parts, make_logits, pull_hidden, pull_weight
from headloss.record import Grads
from headloss.sources import Linear, padded


class OneChunk:
    """What heads have in common that are alike: of one dtype, without a bias, with a column for each row of the weight.

    Their gradients are of that dtype too; nothing is accumulated.
    """

    __slots__ = ("flat", "parts", "size", "whole")

    def __init__(self, source: Linear) -> None:
        self.parts = even_parts(source.weight)
        self.flat = source.hidden.ndim == 2
        self.size = math.prod(source.leading), padded(source.columns, source.hidden.is_cpu)
        self.whole = len(self.parts) == 1  # nothing is cut, and products make their own results: to ask for room costs

    def read(self, source: Linear) -> Tensor:
        """The logits of all rows."""
        hidden_ND, weight_VD = source.hidden, source.weight
        if not self.flat:
            hidden_ND = hidden_ND.reshape(self.size[0], -1)
        if self.whole and self.size[1] == weight_VD.shape[0]:
            return torch.nn.functional.linear(hidden_ND, weight_VD)
        raw_NV = torch.empty(self.size, dtype=hidden_ND.dtype, device=hidden_ND.device)[:, : weight_VD.shape[0]]
        make_logits(hidden_ND, weight_VD, self.parts, raw_NV)
        return raw_NV

    def write(self, source: Linear, grad_NV: Tensor, needs: tuple[bool, ...]) -> Grads:
        """The gradients that are wanted, from that of the logits."""
        hidden_ND, weight_VD, dhidden, dweight = source.hidden, source.weight, None, None
        if not self.flat:
            hidden_ND = hidden_ND.reshape(self.size[0], -1)
        if needs[0] and self.whole:
            dhidden = torch.mm(grad_NV, weight_VD)
        elif needs[0]:
            dhidden = torch.empty_like(hidden_ND, memory_format=torch.contiguous_format)
            pull_hidden(grad_NV, weight_VD, self.parts, dhidden)
        if needs[1] and self.whole:
            dweight = torch.mm(grad_NV.t(), hidden_ND)
        elif needs[1]:
            dweight = torch.empty_like(weight_VD, memory_format=torch.contiguous_format)
            pull_weight(grad_NV, hidden_ND, self.parts, dweight)
        return Grads(None, dhidden if self.flat or dhidden is None else dhidden.view(source.hidden.shape), dweight)
