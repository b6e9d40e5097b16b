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


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([True, True, False, True, False, True]),
        torch.tensor([200, 200, 3, 4, 5, 6], dtype=torch.uint8),
        torch.tensor([-128, -127, 3, -4, 5, 6], dtype=torch.int8),
        torch.tensor([1 << 60, 1, 2, -3, 5, 6]),
    ],
    ids=lambda x: str(x.dtype),
)
def test_whole_numbers_and_bools(x: Tensor) -> None:
    """Sums do not wrap around, and a share of bools is a share."""
    segments = hl.Segments.from_ids(torch.tensor([0, 0, 0, 2, 2, -1]), 3)  # segment 1 is empty
    first, third = x[:3].tolist(), x[3:5].tolist()
    assert segments.totals(x).tolist() == [sum(first), 0, sum(third)]
    assert segments.means(x).tolist() == [sum(first) / 3, 0.0, sum(third) / 2]
    assert segments.mean(x).tolist() == [sum(first) / 3] * 3 + [sum(third) / 2] * 2 + [0.0]
    assert segments.maxima(x).tolist() == [max(first), 0, max(third)]
    assert segments.min(x).tolist() == [min(first)] * 3 + [min(third)] * 2 + [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_over_many_rows(dtype: torch.dtype) -> None:
    """Added row by row in their own dtype, bfloat16 would stop at 256, and float32 drift."""
    x = torch.full((100_000,), 0.7, dtype=dtype)
    segments = hl.Segments.from_ids(torch.arange(len(x)) // 50_000)
    torch.testing.assert_close(segments.totals(x).double(), x.double().view(2, -1).sum(1), rtol=1e-7, atol=0)
    torch.testing.assert_close(segments.means(x).double(), x[:2].double(), rtol=1e-7, atol=0)


def test_the_extreme_of_rows_that_tie_is_their_value() -> None:
    segments = hl.Segments.from_ids(torch.arange(8).repeat_interleave(torch.arange(2, 10)))
    x = segments.spread(torch.randn(8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(segments.max(x), x) and torch.equal(segments.min(x), x)
    x[0] = torch.nan
    assert segments.maxima(x).isnan().tolist() == [True] + [False] * 7


def share_of_hits(logprob: Tensor, argmax: Tensor, targets: Tensor, advantage: Tensor, segments: hl.Segments) -> Tensor:
    return -logprob * (1 + segments.mean(argmax == targets)) * (advantage >= segments.max(advantage))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8], ids=str)
def test_a_loss_of_bools_and_of_narrow_inputs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(N, V, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = logits.argmax(-1)
    targets[[1, 4]] = 0
    targets[6] = -100
    advantage = torch.tensor([3, 3, 1, -2, -2, 5, 9, 4]).to(dtype)
    call: dict[str, Any] = {"segments": hl.Segments.from_ids(IDS, S), "advantage": advantage}
    out = hl.Objective(l=share_of_hits)(hl.Logits(logits), targets, **call)
    logp = torch.log_softmax(logits, -1)
    own = -logp.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    want = (own[0] * (5 / 3) + own[1] * (5 / 3) + own[3] * 1.5 + own[4] * 1.5 + own[5] * 2) / 7
    torch.testing.assert_close(out.loss, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits, retain_graph=True) for x in (out.loss, want)))
    assert hl.verify(hl.Objective(l=share_of_hits), hl.Logits(logits), targets, **call).ok


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
