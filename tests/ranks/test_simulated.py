"""Shards without ranks: each part of the vocabulary is swept alone, the partials merged, the gradients written apart.

What a sharded sweep does, in one process, so that it can run on whatever device and backend there is.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.backends import MODULES
from headloss.facts import CONSTANT, Fact, Want, coefficients, finish, merge
from headloss.parallel.shard import _fields, _refill

FINITE = ("lse", "logprob", "entropy", "sum_p2", "max_logprob", "argmax", ("entropy", 2.0))  # also with -inf logits


def simulate(
    backend: str, logits: Tensor, targets: Tensor, want: Want, held: list[int], **transform: float
) -> tuple[dict[Fact, Tensor], Tensor]:
    """Facts, and the gradient of the sum of all of them, from shards of `held` columns."""
    sweep = import_module(MODULES[backend])
    vocab, temperatures = logits.shape[1], [1.0 if T is None else T for T in want.temperatures]
    starts = [sum(held[:i]) for i in range(len(held))]
    shards = [logits[:, start : start + width].contiguous() for start, width in zip(starts, held)]
    parts = [sweep.sums(x, targets, want, temperatures, start=s, **transform) for x, s in zip(shards, starts)]
    packed = torch.stack([torch.stack(list(_fields(part))) for part in parts])
    merged = merge(_refill(parts[0], iter(packed.unbind(1))), temperatures)
    facts, softmax = finish(merged, want, temperatures, vocab)
    ones = {f: torch.ones_like(x) for f, x in facts.items() if f.name not in CONSTANT}
    pulls = coefficients(facts, ones, want, vocab)
    grads = []
    for x, start in zip(shards, starts):
        out = torch.empty_like(x)
        sweep.pull(x, targets, softmax, pulls, temperatures, out, start=start, **transform)
        grads.append(out)
    return facts, torch.cat(grads, 1)


def check(backend: str, device: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(13, 97, device=device, dtype=torch.float64)).to(dtype)
    masked = logits.clone()
    masked[:, 60:75] = -torch.inf  # one whole shard of the third layout
    targets = torch.randint(60, (13,), device=device)
    cases = [(logits, (*FINITE, "mean_logprob"), {"scale": 0.7, "softcap": 5.0}), (masked, FINITE, {})]
    for held in ([49, 48], [97, 0], [60, 15, 22], [7, 0, 60, 30]):
        for whole, names, transform in cases:
            x = whole.double().clone().requires_grad_()
            truth = hl.row_facts(hl.Logits(x, **transform), targets, want=names, backend="torch")
            (true_grad,) = torch.autograd.grad(sum(v.sum() for n, v in truth.items() if n not in CONSTANT), x)
            want = Want([Fact(n) if isinstance(n, str) else Fact(*n) for n in names])
            facts, grad = simulate(backend, whole, targets, want, held, **transform)
            for fact, value in facts.items():
                known = truth[fact.name if fact.temperature is None else (fact.name, fact.temperature)]
                torch.testing.assert_close(value.double(), known.double(), rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(grad.double(), true_grad, rtol=tolerance, atol=tolerance)


def test_shards_in_one_process() -> None:
    check("torch", "cpu", torch.float64, 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_shards_on_a_gpu(backend: str) -> None:
    check(backend, "cuda", torch.float32, 2e-5)
