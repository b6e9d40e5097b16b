"""A head and its losses in dense float64: what `headloss check` compares with.

Dimension key:  N rows   R rows that count   S segments   V vocabulary   D hidden size   K ids

Every logit is in memory; nothing here calls headloss to compute a number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import headloss as hl
from headloss.divergence import is_divergence
from headloss.facts import FACTS

APART = ("top_logprob", "class_weight", "class_mean", "class_cross_entropy")  # of a Term or a call that says so
STUDENT = ("lse", "logprob", "mean_logprob", "entropy", "sum_p2")


class Result(NamedTuple):
    values: dict[str, Tensor]  # a loss, facts
    scales: dict[str, float]  # what an error in them is measured by
    grads: dict[str, Tensor]


class Problem(NamedTuple):
    """The tensors of all checks, in float64."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    segments: hl.Segments
    teacher: Tensor
    ids: Tensor
    ids_logprob: Tensor
    pulls: Tensor  # what the facts' gradients are asked with
    noise: Tensor

    @classmethod
    def make(cls, device: str, seed: int, N: int, V: int, D: int) -> Problem:
        random = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
        hidden, weight, teacher = normal(N, D), normal(V, D) * 2 / D**0.5, normal(N, V) * 2
        hidden, weight = hidden.bfloat16().double(), weight.bfloat16().double()  # the same numbers in every type
        teacher = teacher.bfloat16().double()
        targets = torch.randint(V, (N,), generator=random)
        targets[torch.rand(N, generator=random) < 0.2] = -100
        targets[:2] = torch.tensor([0, V - 1])
        S = max(4, N // 12)
        bounds = torch.linspace(0, N, S + 1).round().int()
        top = teacher.log_softmax(-1).topk(5)
        ids = top.indices.masked_fill(torch.rand(N, 5, generator=random) < 0.1, -1)
        put = lambda x: x.to(device)
        return cls(
            put(hidden), put(weight), put(targets), hl.Segments.from_cu_seqlens(put(bounds)), put(teacher), put(ids),
            put(top.values.float()), put(normal(8, N)), put(normal(8, N)),
        )  # fmt: skip

    @property
    def valid(self) -> Tensor:
        return self.targets != -100

    def inputs(self, fn: Callable[..., Any]) -> dict[str, Tensor]:
        """Whatever a loss asks for besides facts; log-probabilities are the true ones, a little off."""
        names = [p.name for p in inspect.signature(fn).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        N, S = len(self.targets), self.segments.num_segments
        logp = (self.hidden @ self.weight.T).log_softmax(-1).gather(-1, self.targets.clamp(min=0)[:, None])[:, 0]
        found: dict[str, Tensor] = {}
        for i, name in enumerate(n for n in names if n not in (*FACTS, *APART, "segments", "targets", "logp", "logq")):
            if name == "pairs":
                found[name] = torch.arange(S // 2 * 2, device=logp.device).view(-1, 2)
            elif name == "desirable":
                found[name] = torch.arange(S, device=logp.device) % 2 == 0
            elif name == "optimal_advantage":
                found[name] = self.noise[i][:S].float()
            elif name == "kl":
                found[name] = logp.new_tensor(0.3)
            elif name == "foreign_logprob":
                found[name] = self.ids_logprob
            elif name.endswith("logprob"):
                found[name] = (logp + 0.1 * self.noise[i]).clamp(max=-1e-3).float()
            else:
                found[name] = self.noise[i][:N].float()
        return found

    def guide(self, teacher: str | None, dtype: torch.dtype) -> Any:
        if teacher == "sparse":
            return hl.Sparse(self.ids, self.ids_logprob)
        return None if teacher is None else hl.Logits(self.teacher.to(dtype))


class _Segments:
    """`hl.Segments` of the rows that count as a matrix."""

    def __init__(self, ids_R: Tensor, S: int, dtype: torch.dtype) -> None:
        self.member_SR = (ids_R[None] == torch.arange(S, device=ids_R.device)[:, None]).to(dtype)
        self.num_segments = S

    def totals(self, x: Tensor) -> Tensor:
        return self.member_SR.to(x.dtype) @ x

    def means(self, x: Tensor) -> Tensor:
        return self.totals(x) / self.member_SR.sum(1).clamp(min=1).to(x.dtype)

    def spread(self, y: Tensor) -> Tensor:
        return self.member_SR.to(y.dtype).T @ y

    def mean(self, x: Tensor) -> Tensor:
        return self.spread(self.means(x))


def dense_facts(logits_RV: Tensor, targets_R: Tensor, teacher_RV: Tensor) -> dict[str, Callable[[], Tensor]]:
    logp = logits_RV.log_softmax(-1)
    logq = teacher_RV.log_softmax(-1)
    return {
        "lse": lambda: logits_RV.logsumexp(-1),
        "logprob": lambda: logp.gather(-1, targets_R[:, None])[:, 0],
        "mean_logprob": lambda: logp.mean(-1),
        "entropy": lambda: -(logp.exp() * logp).sum(-1),
        "sum_p2": lambda: logp.exp().square().sum(-1),
        "max_logprob": lambda: logp.detach().amax(-1),
        "argmax": lambda: logits_RV.argmax(-1),
        "min_logit": lambda: logits_RV.detach().amin(-1),
        "teacher_cross_entropy": lambda: -(logq.exp() * logp).sum(-1),
        "reverse_cross_entropy": lambda: -(logp.exp() * logq).sum(-1),
        "teacher_entropy": lambda: -(logq.exp() * logq).sum(-1),
        "logit_dot": lambda: (logits_RV * teacher_RV).sum(-1),
        "logit_square": lambda: logits_RV.square().sum(-1),
        "teacher_logit_square": lambda: teacher_RV.square().sum(-1),
    }


def _dense_divergence(fn: Callable[..., Any], p: Problem, logits_RV: Tensor, teacher: str) -> Tensor:
    logp = logits_RV.log_softmax(-1)
    if teacher == "dense":
        return fn(logp, p.teacher[p.valid].to(logp.dtype).log_softmax(-1)).sum(-1)
    ids, logq = p.ids[p.valid], p.ids_logprob[p.valid].to(logp.dtype)
    held = ids >= 0
    named = torch.zeros_like(logp, dtype=torch.bool)
    named[held.nonzero()[:, 0], ids[held]] = True
    inside = torch.where(held, fn(logp.gather(-1, ids.clamp(min=0)), logq), 0.0).sum(-1)
    tail_p = logp.masked_fill(named, -torch.inf).logsumexp(-1)
    tail_q = torch.log1p(-torch.where(held, logq.exp(), 0.0).sum(-1).clamp(max=1.0))
    return inside + fn(tail_p, tail_q)


def dense_loss(p: Problem, fn: Callable[..., Any], teacher: str | None, kind: str, dtype: torch.dtype) -> Result:
    """The mean of a loss over rows, segments or pairs, and its gradients, with every logit in memory."""
    leaves, logits = leaves_of(p, kind, dtype)
    valid = p.valid
    logits_RV = logits[valid]
    if teacher is not None and is_divergence(fn):
        values = _dense_divergence(fn, p, logits_RV, teacher)
    else:
        segments = _Segments(p.segments.ids[valid], p.segments.num_segments, logits.dtype)
        facts = dense_facts(logits_RV, p.targets[valid], p.teacher[valid].to(logits.dtype))
        facts["targets"] = lambda: p.targets[valid]
        given: dict[str, Any] = {}
        inputs = p.inputs(fn)
        for name, parameter in inspect.signature(fn).parameters.items():
            if name == "top_logprob" and hasattr(fn, "top"):
                given[name] = logits_RV.log_softmax(-1).topk(fn.top).values
            if parameter.kind is parameter.KEYWORD_ONLY or name in APART:
                continue
            x = inputs.get(name)
            if x is not None:
                x = x[valid] if x.shape == valid.shape or name == "foreign_logprob" else x
                given[name] = x.to(logits.dtype) if x.is_floating_point() else x
            else:
                given[name] = segments if name == "segments" else facts[name]()
        found = fn(**given)
        values = found[0] if isinstance(found, tuple) else found
    loss = values.mean()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    scale = float(values.detach().abs().mean())
    return Result({"loss": loss.detach()}, {"loss": scale}, dict(zip(leaves, grads, strict=True)))


def leaves_of(p: Problem, kind: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    if kind == "Logits":
        logits = _logits(p, dtype).requires_grad_()
        return {"logits": logits}, logits
    leaves = {n: getattr(p, n).to(dtype, copy=True).requires_grad_() for n in ("hidden", "weight")}
    return leaves, leaves["hidden"] @ leaves["weight"].T


def _logits(p: Problem, dtype: torch.dtype) -> Tensor:
    return (p.hidden @ p.weight.T).bfloat16().to(dtype, copy=True)
