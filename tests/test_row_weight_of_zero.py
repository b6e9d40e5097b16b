"""A row weight of 0 leaves the row out: whatever it holds, neither the sum, nor a gradient, nor a metric knows of it.

The truth is a float64 formula on the rows that are left alone; only the normaliser still counts the others.
"""

import math

import pytest
import torch
from interpreting import INSIDE, interpreted
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, grpo, gspo
from headloss.row_weights import band

N, V, D = 9, 23, 6
OUT = (1, 4, 8)
BACKENDS = ["triton"] if INSIDE else ["torch"]


test_under_the_interpreter = interpreted(__file__, "-k", "not ranks and not compiled")


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)
    weight = draw(N).abs() + 0.5
    weight[list(OUT)] = 0.0
    found = {
        "hidden": draw(N, D), "weight": draw(V, D), "targets": torch.randint(0, V, (N,), generator=generator),
        "advantage": draw(N), "old_logprob": -3 + draw(N) / 4, "token_weight": weight,
    }  # fmt: skip
    found["advantage"][1], found["old_logprob"][4], found["old_logprob"][8] = math.nan, -math.inf, math.nan
    return found


def truth(given: dict[str, Tensor], reduction: str) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The loss, the gradient of the logits, and two metrics, from the rows that count."""
    keep = [i for i in range(N) if i not in OUT]
    logits = (given["hidden"].double() @ given["weight"].double().T).requires_grad_()
    logprob = torch.log_softmax(logits[keep], -1)[range(len(keep)), given["targets"][keep]]
    advantage, w = given["advantage"][keep].double(), given["token_weight"][keep].double()
    ratio = (logprob - given["old_logprob"][keep].double()).exp()
    values = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = (values * w).sum() / (w.sum() if reduction == "weighted_mean" else N)
    (grad,) = torch.autograd.grad(loss, logits)
    assert not grad[list(OUT)].any()
    ratio = ratio.detach()
    return loss.detach(), grad, {"ratio_mean": float(ratio.mean()), "ratio_max": float(ratio.max())}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["token_mean", "weighted_mean"])
@pytest.mark.parametrize("how", ["logits", "linear", "chunks", "beside a batch loss", "function"])
def test_a_row_of_weight_0(how: str, reduction: str, backend: str) -> None:
    dtype, tolerance = (torch.float32, 2e-5) if backend == "triton" else (torch.float64, 1e-10)
    given = batch(dtype)
    want, grad, metrics = truth(given, reduction)
    row_weight = "token_weight" if how != "function" else (lambda token_weight: token_weight)
    terms = {"rl": hl.Term(grpo, row_weight=row_weight, reduction=reduction)}
    if how == "beside a batch loss":
        terms["b"] = hl.Term(lambda logprob: (logprob - logprob.mean()) ** 2, weight=torch.tensor(0.0))
    objective = hl.Objective(**terms, backend=backend)
    inputs = {n: given[n] for n in ("advantage", "old_logprob", "token_weight")}
    if how in ("logits", "beside a batch loss", "function"):
        leaf = (given["hidden"] @ given["weight"].T).requires_grad_()
        out = objective(hl.Logits(leaf), given["targets"], **inputs)
        wanted = grad
    else:
        leaf = given["weight"].clone().requires_grad_()
        source = hl.Linear(given["hidden"], leaf, memory="1GiB" if how == "linear" else 3 * V * leaf.itemsize)
        out = objective(source, given["targets"], **inputs)
        wanted = grad.T @ given["hidden"].double()
    out.loss.backward()
    close = lambda a, b: torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)
    close(out.loss.detach(), want)
    close(leaf.grad, wanted)
    for name, number in metrics.items():
        assert float(out.metrics[f"rl/{name}"]) == pytest.approx(number, rel=tolerance)
    assert all(math.isfinite(float(m)) for m in out.metrics.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_a_segment_loss_the_values_are_left_out(backend: str) -> None:
    """Its row still takes part in the segment's mean: only its value, and its place in the metrics, are gone."""
    given = batch(torch.float32 if backend == "triton" else torch.float64)
    given["advantage"][1], given["old_logprob"][4], given["old_logprob"][8] = 0.5, -2.0, -3.0
    segments = hl.Segments.from_cu_seqlens(torch.tensor([0, 4, 9]))
    objective = hl.Objective(rl=hl.Term(gspo, low=0.1, high=0.1, row_weight="token_weight"), backend=backend)
    leaf = (given["hidden"] @ given["weight"].T).requires_grad_()
    inputs = {n: given[n] for n in ("advantage", "old_logprob", "token_weight")}
    out = objective(hl.Logits(leaf), given["targets"], segments=segments, **inputs)
    logits = leaf.detach().double().requires_grad_()
    d = torch.log_softmax(logits, -1)[range(N), given["targets"]] - given["old_logprob"].double()
    spread = lambda x: torch.cat([x[:4].mean().expand(4), x[4:].mean().expand(5)])
    ratio, advantage = spread(d).exp(), spread(given["advantage"].double())
    values = -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
    want = (values * given["token_weight"].double()).mean()
    tolerance = 2e-5 if backend == "triton" else 1e-10
    torch.testing.assert_close(out.loss.detach().double(), want.detach(), rtol=tolerance, atol=tolerance)
    out.loss.backward()
    (grad,) = torch.autograd.grad(want, logits)
    torch.testing.assert_close(leaf.grad.double(), grad, rtol=tolerance, atol=tolerance)
    kept = [i for i in range(N) if i not in OUT]
    assert float(out.metrics["rl/ratio_mean"]) == pytest.approx(float(ratio.detach()[kept].mean()), rel=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_weight_reports_counts_every_row(backend: str) -> None:
    logits, targets = torch.randn(4, 7), torch.tensor([2, -100, 3, 1])
    old = torch.tensor([-1.0, -2.0, -3.0, -1.5])
    given = {"advantage": torch.ones(4), "old_logprob": old, "sampler_logprob": old - torch.tensor([0.5, 0, 2.0, 0.1])}
    objective = hl.Objective(rl=hl.Term(grpo, row_weight=band(0.0, 2.0)), backend=backend)
    out = objective(hl.Logits(logits), targets, **given)
    w = torch.tensor([0.5, 2.0, 0.1]).exp()
    assert float(out.metrics["rl/banded/cut_fraction"]) == pytest.approx(1 / 3)
    assert float(out.metrics["rl/banded/sampler_ratio_mean"]) == pytest.approx(float(w.mean()), rel=1e-5)
    assert float(out.metrics["rl/banded/weight_mean"]) == pytest.approx(float(w[[0, 2]].sum() / 3), rel=1e-5)
    ratio = (torch.log_softmax(logits, -1)[[0, 3], [2, 1]] - old[[0, 3]]).exp()
    assert float(out.metrics["rl/ratio_mean"]) == pytest.approx(float(ratio.mean()), rel=1e-5)


@pytest.mark.parametrize("host_read", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_rows_stay_out_too(backend: str, host_read: bool) -> None:
    logits = torch.randn(4, 7)
    targets, weight = torch.tensor([2, -100, 3, 1]), torch.tensor([0.0, 0.0, -1.0, 1.0])
    objective = hl.Objective(ce=hl.Term(cross_entropy, row_weight=lambda w: w + 1), backend=backend)
    out = objective(hl.Logits(logits), targets, w=weight, host_read=host_read)
    nll = -torch.log_softmax(logits, -1)[[0, 3], [2, 1]]
    torch.testing.assert_close(out.loss, (nll * torch.tensor([1.0, 2.0])).sum() / 3)
    assert float(out.metrics["ce/perplexity"]) == pytest.approx(float(nll.mean().exp()), rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_inputs_gradient_and_unweighted_terms(backend: str) -> None:
    """The gradient of an input is 0 in a row that is left out; a term without the weight still sees the row."""
    given = batch(torch.float32 if backend == "triton" else torch.float64)
    advantage = given["advantage"].clone().requires_grad_()
    objective = hl.Objective(
        rl=hl.Term(lambda logprob, advantage: (logprob * advantage).exp(), row_weight="token_weight"),
        ce=cross_entropy,
        backend=backend,
    )
    leaf = (given["hidden"] @ given["weight"].T).requires_grad_()
    out = objective(hl.Logits(leaf), given["targets"], advantage=advantage, token_weight=given["token_weight"])
    out.loss.backward()
    assert advantage.grad.isfinite().all() and leaf.grad.isfinite().all()
    assert not advantage.grad[list(OUT)].any() and advantage.grad.any()
    assert leaf.grad[list(OUT)].any(1).all(), "the other term's gradient"


def test_compiled() -> None:
    given = batch()
    want, grad, metrics = truth(given, "token_mean")
    objective = hl.Objective(rl=hl.Term(grpo, row_weight="token_weight"), backend="torch")
    inputs = {n: given[n] for n in ("advantage", "old_logprob", "token_weight")}
    leaf = (given["hidden"] @ given["weight"].T).requires_grad_()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(leaf: Tensor) -> tuple[Tensor, Tensor]:
        out = objective(hl.Logits(leaf), given["targets"], **inputs)
        return out.loss, out.metrics["rl/ratio_mean"].value

    loss, ratio = step(leaf)
    loss.backward()
    torch.testing.assert_close(loss.detach(), want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(leaf.grad, grad, rtol=1e-10, atol=1e-10)
    assert float(ratio) == pytest.approx(metrics["ratio_mean"], rel=1e-10)


def test_a_metric_needs_a_name() -> None:
    source = hl.Logits(torch.randn(3, 5))
    for name in ("", "a/"):
        objective = hl.Objective(ce=lambda logprob, name=name: (-logprob, {name: logprob}))
        with pytest.raises(TypeError, match="wanted names for its metrics"):
            objective(source, torch.tensor([0, 1, 2]))
