"""Facts of dense logits, for `dense.py`: each written as its definition, and shared with nothing that runs a call.

Dimension key:  R rows that count   S segments   V vocabulary   K ids per row
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headloss.segments import Segments

FLOOR = -1.0e4  # of log p and log q: an outcome of probability 0 counts for nothing, not NaN
STUDENT = ("lse", "logprob", "mean_logprob", "entropy", "sum_p2", "max_logprob", "argmax")
COMPARING = (
    "teacher_cross_entropy", "reverse_cross_entropy", "teacher_entropy", "shared_entropy", "teacher_argmax",
    "ids_logprob", "tail_logprob", "ids_logit", "topk_overlap", "teacher_ids", "teacher_logprob",
)  # fmt: skip


class DenseSegments(Segments):
    """`hl.Segments` as a matrix: member_SR is 1 where row r is in segment s."""

    __slots__ = ("member_SR",)
    member_SR: Tensor

    def __init__(self, ids_R: Tensor, num_segments: int) -> None:
        super().__init__(ids_R, num_segments)
        member = ids_R[None] == torch.arange(num_segments, device=ids_R.device)[:, None]
        object.__setattr__(self, "member_SR", member.double())
        object.__setattr__(self, "_counts", member.double().sum(1))

    def totals(self, x: Tensor) -> Tensor:
        x = x if x.is_floating_point() else x.double()
        return self.member_SR.to(x.dtype) @ x

    def means(self, x: Tensor) -> Tensor:
        total = self.totals(x)
        return total / self.counts.clamp(min=1).to(total.dtype)

    def spread(self, y: Tensor) -> Tensor:
        return y[self.ids.clamp(min=0)].masked_fill(self.ids < 0, 0)


def student_fact(name: str, s: Tensor, targets: Tensor | None) -> Tensor:
    logp = s.log_softmax(-1)
    match name:
        case "lse":
            return s.logsumexp(-1)
        case "logprob":
            assert targets is not None
            return logp.gather(-1, targets[:, None])[:, 0]
        case "mean_logprob":
            return logp.mean(-1)
        case "entropy":
            return -(logp.exp() * logp.clamp(min=FLOOR)).sum(-1)
        case "sum_p2":
            return logp.exp().square().sum(-1)
        case "max_logprob":
            return logp.detach().amax(-1)
    return s.detach().argmax(-1)


def sparse_fact(name: str, s: Tensor, ids: Tensor, logq: Tensor) -> Tensor:
    held, logp = ids >= 0, s.log_softmax(-1)
    match name:
        case "teacher_ids":
            return ids
        case "teacher_logprob":
            return logq
        case "ids_logprob":
            return logp.gather(1, ids.clamp(min=0)).masked_fill(~held, -math.inf)
        case "ids_logit":
            return s.gather(1, ids.clamp(min=0)).masked_fill(~held, 0.0)
        case "tail_logprob":
            named = torch.zeros_like(s).scatter_add(1, ids.clamp(min=0), held.to(s.dtype)) > 0
            return logp.masked_fill(named, -math.inf).logsumexp(-1)
    number = held.sum(-1)
    best = s.detach().sort(-1, descending=True).values.gather(1, (number - 1).clamp(min=0)[:, None])
    among = (s.detach().gather(1, ids.clamp(min=0)) >= best) & held
    return among.sum(-1).to(s.dtype) / number.clamp(min=1)
