"""Fused against separate losses on one head: time, peak memory, largest difference.

Dimension key:  N rows   V vocabulary   D hidden size
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import headloss as hl
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


def on_logits(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    return OBJECTIVE(hl.Logits(hidden_ND @ weight_VD.t()), target_N).loss


def on_linear(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    return OBJECTIVE(hl.Linear(hidden_ND, weight_VD, memory="16MiB"), target_N).loss


WAYS = {"separate losses": separate, "fused, on logits": on_logits, "fused, on hidden": on_linear}


def compare(N: int, V: int, D: int, rounds: int, seed: int) -> Iterator[Way]:
    """Each way in turn, measured on the same head; a generator, so that a progress bar can follow."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=random).requires_grad_()
    weight = (torch.randn(V, D, generator=random) * 3 / D**0.5).requires_grad_()
    targets = torch.randint(V, (N,), generator=random)
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact_loss, *exact = _step(separate, doubles[0], doubles[1], targets)
    for name, way in WAYS.items():
        step = partial(_step, way, hidden, weight, targets)
        loss, *grads = step()
        errors = [float((g - e).abs().amax() / e.abs().amax()) for g, e in zip(grads, exact, strict=True)]
        seconds = statistics.median(_seconds(step) for _ in range(rounds))
        yield Way(name, seconds, peak_bytes(step), float((loss - exact_loss).abs() / exact_loss.abs()), max(errors))


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of tensors that `work` held at one time, from every allocation and release on the CPU."""
    with _no_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def _step(way: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    loss = way(hidden, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def _no_stderr() -> Iterator[None]:
    """The profiler announces itself on the file descriptor, not on sys.stderr."""
    saved = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
