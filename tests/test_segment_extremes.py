"""`segments.max`, `min`, `maxima` and `minima`: values, gradients, classes, chunks, and segments on two ranks."""

from typing import Any

import pytest
import torch
from interpreting import INSIDE, interpreted
from torch import Tensor

import headloss as hl

N, V, D, S = 8, 13, 4, 4
IDS = torch.tensor([0, 0, 0, 1, 1, 3, 3, 3])  # segment 2 is empty


test_under_the_interpreter = interpreted(__file__, "-k", "loss_of_extremes")


def test_values_and_gradients_by_hand() -> None:
    segments = hl.Segments.from_ids(torch.tensor([1, 0, 1, -1, 0, 1]), 3)
    x = torch.tensor([1.0, -2.0, 3.0, 9.0, -5.0, 3.0], dtype=torch.float64, requires_grad=True)
    assert segments.maxima(x).tolist() == [-2.0, 3.0, 0.0]
    assert segments.minima(x).tolist() == [-5.0, 1.0, 0.0]
    assert segments.max(x).tolist() == [3.0, -2.0, 3.0, 0.0, -2.0, 3.0]
    assert segments.min(x).tolist() == [1.0, -5.0, 1.0, 0.0, -5.0, 1.0]
    (grad,) = torch.autograd.grad((segments.maxima(x) * torch.tensor([2.0, 10.0, 7.0])).sum(), x)
    assert grad.tolist() == [0.0, 2.0, 5.0, 0.0, 0.0, 5.0], "rows that tie share it"
    (grad,) = torch.autograd.grad((segments.minima(x) * torch.tensor([2.0, 10.0, 7.0])).sum(), x)
    assert grad.tolist() == [10.0, 0.0, 0.0, 0.0, 2.0, 0.0]
    low = torch.tensor([-torch.inf, 0.0, 1.0, 2.0, -torch.inf, -torch.inf], requires_grad=True)
    assert segments.maxima(low).tolist() == [0.0, 1.0, 0.0]
    (grad,) = torch.autograd.grad(segments.maxima(low).sum(), low)
    assert grad.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def worst(logprob: Tensor, segments: hl.Segments) -> Tensor:
    return -segments.min(logprob) + 0.3 * segments.max(logprob) * logprob


def worst_in_parts(logprob: Tensor, segments: hl.Segments) -> Tensor:
    return -segments.spread(segments.minima(logprob)) + 0.3 * segments.spread(segments.maxima(logprob)) * logprob


@pytest.mark.parametrize("loss", [worst, worst_in_parts])
@pytest.mark.parametrize("how", ["logits", "chunks"])
def test_a_loss_of_extremes(how: str, loss: Any) -> None:
    """The least likely token of each segment: a segment loss, in chunks of whole segments."""
    backend, dtype, tolerance = ("triton", torch.float32, 2e-5) if INSIDE else ("torch", torch.float64, 1e-10)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, D, generator=generator, dtype=dtype) for n in (N, V))
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[6] = -100
    leaf = weight.clone().requires_grad_()
    source = hl.Logits(hidden @ leaf.T) if how == "logits" else hl.Linear(hidden, leaf, memory=3 * V * leaf.itemsize)
    segments = hl.Segments.from_ids(IDS, S)
    objective = hl.Objective(w=loss, backend=backend)
    out = objective(source, targets, segments=segments)
    out.loss.backward()
    truth = weight.double().clone().requires_grad_()
    logp = torch.log_softmax(hidden.double() @ truth.T, -1)
    values = []
    for rows in ([0, 1, 2], [3, 4], [5, 7]):
        own = logp[rows, targets[rows]]
        values.append(-own.min() + 0.3 * own.max() * own)
    want = torch.cat(values).mean()
    (grad,) = torch.autograd.grad(want, truth)
    torch.testing.assert_close(out.loss.detach().double(), want.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(leaf.grad.double(), grad, rtol=tolerance, atol=tolerance)
    plan = objective.explain(source, targets, segments=segments).terms[0]
    assert plan.kind == "segment" and "segments.maxima" in plan.reason
