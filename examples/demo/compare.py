"""Fused against separate losses on one head: time, peak memory, largest difference.

Dimension key:  N rows   V vocabulary   D hidden size
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import headloss as hl
from headloss.cli.memory import peak_bytes
from headloss.losses import cross_entropy, entropy_bonus, z_loss

Z, BONUS = 1e-4, 1e-2
OBJECTIVE = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=Z), bonus=hl.Term(entropy_bonus, weight=BONUS))


class Way(NamedTuple):
    """One way to the loss and its gradients, and what it took."""

    name: str
    seconds: float
    peak: int  # bytes allocated at the same time, beyond the inputs
    loss_error: float  # relative, against float64
    grad_error: float  # of the largest gradient, against float64


def separate(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    """Cross-entropy, z-loss and entropy bonus as three losses on the logits."""
    logits_NV = hidden_ND @ weight_VD.t()
    ce = F.cross_entropy(logits_NV, target_N)
    z = torch.logsumexp(logits_NV, -1).square().mean()
    logp_NV = F.log_softmax(logits_NV, -1)
    entropy = -(logp_NV.exp() * logp_NV).sum(-1).mean()
    return ce + Z * z - BONUS * entropy


def shared(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    """The same three losses as a careful hand writes them: one log-softmax for all."""
    logits_NV = hidden_ND @ weight_VD.t()
    logp_NV = F.log_softmax(logits_NV, -1)
    at = target_N[:, None]
    ce = -logp_NV.gather(1, at).mean()
    z = (logits_NV.gather(1, at) - logp_NV.gather(1, at)).square().mean()
    entropy = -(logp_NV.exp() * logp_NV).sum(-1).mean()
    return ce + Z * z - BONUS * entropy


def on_logits(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    return OBJECTIVE(hl.Logits(hidden_ND @ weight_VD.t()), target_N).loss


def on_linear(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    return OBJECTIVE(hl.Linear(hidden_ND, weight_VD, memory="16MiB"), target_N).loss


WAYS = {
    "separate losses": separate,
    "one softmax, by hand": shared,
    "headloss, logits": on_logits,
    "headloss, hidden": on_linear,
}


def compare(N: int, V: int, D: int, rounds: int, seed: int, tick: Callable[[], None] = lambda: None) -> list[Way]:
    """Every way on the same head, taking turns; `tick` is called `steps(rounds)` times."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=random).requires_grad_()
    weight = (torch.randn(V, D, generator=random) * 3 / D**0.5).requires_grad_()
    targets = torch.randint(V, (N,), generator=random)
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact_loss, *exact = _step(separate, doubles[0], doubles[1], targets)
    tick()
    found: dict[str, Way] = {}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for name, way in WAYS.items():
        loss, *grads = _step(way, hidden, weight, targets)
        errors = [float((g - e).abs().amax() / e.abs().amax()) for g, e in zip(grads, exact, strict=True)]
        peak = peak_bytes(partial(_step, way, hidden, weight, targets))
        found[name] = Way(name, 0.0, peak, float((loss - exact_loss).abs() / exact_loss.abs()), max(errors))
        tick()
    for _ in range(rounds):
        for name, way in WAYS.items():
            start = time.perf_counter()
            _step(way, hidden, weight, targets)
            seconds[name].append(time.perf_counter() - start)
            tick()
    return [way._replace(seconds=statistics.median(seconds[name])) for name, way in found.items()]


def steps(rounds: int) -> int:
    return 1 + len(WAYS) * (1 + rounds)


def _step(way: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    loss = way(hidden, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))
