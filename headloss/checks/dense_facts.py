"""Facts of dense logits, for `hl.verify`: each is written as its definition and shares no code with what runs a call.

A fact that is not defined here takes its value from `FACTS`, over dense sums, and its derivative from autograd.

Dimension key:  R rows that count   S segments   V vocabulary   K ids per row
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from headloss.facts import FACTS
from headloss.segments import Segments

FLOOR = -1.0e4  # least log p and log q: an outcome of probability 0 then adds 0, not NaN
COMPARING = (
    "teacher_cross_entropy", "reverse_cross_entropy", "teacher_entropy", "shared_entropy", "teacher_argmax",
    "ids_logprob", "tail_logprob", "ids_logit", "topk_overlap", "teacher_ids", "teacher_logprob",
    "logit_dot", "logit_square", "teacher_logit_square",
)  # fmt: skip


class DenseSegments(Segments):
    """`hl.Segments` as a matrix: member_SR[s, r] is 1 if row r is in segment s."""

    __slots__ = ("member_SR",)
    member_SR: Tensor

    def __init__(self, ids_R: Tensor, num_segments: int) -> None:
        super().__init__(ids_R, num_segments)
        member = ids_R[None] == torch.arange(num_segments, device=ids_R.device)[:, None]
        object.__setattr__(self, "member_SR", member.double())
        object.__setattr__(self, "_counts", member.double().sum(1))

    def totals(self, x: Tensor) -> Tensor:
        x = x if x.is_floating_point() and x.dtype.itemsize > 2 else x.double()
        return self.member_SR.to(x.dtype) @ x

    def means(self, x: Tensor) -> Tensor:
        total = self.totals(x)
        return total / self.counts.clamp(min=1).to(total.dtype)

    def maxima(self, x: Tensor) -> Tensor:
        x = x if x.is_floating_point() else x.double()
        return x.where(self.member_SR != 0, -math.inf).amax(1).where(self.counts > 0, 0.0)  # ties share its gradient

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
        case "argmax":
            return s.detach().argmax(-1)
        case "min_logit":
            return s.detach().amin(-1)
    most = s.detach().amax(-1)
    x = s - most.masked_fill(most == -math.inf, 0.0)[:, None]
    e, bounded = x.exp(), x.clamp(min=FLOOR)
    row: dict[str, Any] = {
        "max": most,
        "total": x.sum(-1),
        "S": e.sum(-1),
        "X": (e * bounded).sum(-1),
        "Q": (e * e).sum(-1),
        "least": s.detach().amin(-1),
    }
    row |= {"T": 1.0, "log_S": row["S"].log(), "vocab": s.shape[-1], "argmax": s.detach().argmax(-1)}
    row |= {} if targets is None else {"target": x.gather(-1, targets[:, None])[:, 0]}
    return FACTS[name].value(row)


def as_passed(fn: Any, name: str, x: Tensor) -> Tensor:
    """An input as a function gets it: our formulas get real numbers, those of users what was passed."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    ours = str(getattr(fn, "__module__", "")).startswith("headloss.") and name not in ("pairs", "targets")
    return x.double() if ours and not x.is_floating_point() else x


CLASSES = ("class_weight", "class_mean", "class_cross_entropy")


def class_fact(name: str, w: Tensor, s: Tensor, targets: Tensor | None) -> Tensor:
    """The facts that a loss with class weights w (V,) asks for."""
    if name == "class_mean":
        return w.mean()
    return w[targets] if name == "class_weight" else -(s.log_softmax(-1).clamp(min=FLOOR) @ (w / w.sum()).to(s.dtype))


def dense_fact(name: str, z: Tensor, u: Tensor, logp: Tensor, logq: Tensor) -> Tensor:
    """A fact of a dense teacher, over the columns that both have; z and u are the logits before the temperature."""
    p, q = logp.exp(), logq.exp()
    match name:
        case "teacher_argmax":
            return u.argmax(-1)
        case "logit_dot":
            return (z * u).sum(-1)
        case "logit_square":
            return z.square().sum(-1)
        case "teacher_logit_square":
            return u.square().sum(-1)
    weights, logs = {
        "teacher_cross_entropy": (q, logp), "reverse_cross_entropy": (p, logq), "teacher_entropy": (q, logq),
        "shared_entropy": (p, logp),
    }[name]  # fmt: skip
    return -(weights * logs.clamp(min=FLOOR)).sum(-1)


def merged(ids: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """A sparse teacher without repeated ids: the first occurrence of an id gets all its probability."""
    same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    first = ~(same & torch.ones_like(same).tril(-1)).any(-1) & (ids >= 0)
    total = logq[:, None, :].masked_fill(~same, -math.inf).logsumexp(-1)
    return ids.masked_fill(~first, -1), total.masked_fill(~first, -math.inf)


def sparse_fact(name: str, s: Tensor, ids: Tensor, logq: Tensor) -> Tensor:
    present, logp = ids >= 0, s.log_softmax(-1)
    match name:
        case "teacher_ids":
            return ids
        case "teacher_logprob":
            return logq
        case "ids_logprob":
            return logp.gather(1, ids.clamp(min=0)).masked_fill(~present, -math.inf)
        case "ids_logit":
            return s.gather(1, ids.clamp(min=0)).masked_fill(~present, -math.inf)
        case "tail_logprob":
            named = torch.zeros_like(s).scatter_add(1, ids.clamp(min=0), present.to(s.dtype)) > 0
            return logp.masked_fill(named, -math.inf).logsumexp(-1)
    number = present.sum(-1)
    best = s.detach().sort(-1, descending=True).values.gather(1, (number - 1).clamp(min=0)[:, None])
    among = (s.detach().gather(1, ids.clamp(min=0)) >= best) & present
    return among.sum(-1).to(s.dtype) / number.clamp(min=1)
