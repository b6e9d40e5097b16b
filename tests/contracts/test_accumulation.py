"""Micro-batches add up to one batch: losses, gradients, counts and metrics."""

from __future__ import annotations

import oracle
import pytest
import torch
from calls import KINDS, close

import headloss as hl
from headloss.losses import cross_entropy, gspo


def parts(n: int, pieces: int) -> list[slice]:
    return [slice(n * i // pieces, n * (i + 1) // pieces) for i in range(pieces)]


REDUCED = ["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


@pytest.mark.parametrize("reduction", REDUCED)
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_equals_one_batch(kind: str, reduction: str) -> None:
    """Micro-batches with global counts add up to the big batch: loss, gradients, metrics."""
    torch.manual_seed(2)
    lengths = [3, 5, 1, 4, 6, 2]
    N = sum(lengths)
    cuts = torch.tensor([0, *lengths]).cumsum(0)
    base = oracle.make(kind, (N,), inputs=("advantage", "old_logprob"), num_segments=1)
    segments = hl.Segments.from_cu_seqlens(cuts)
    problem = oracle.replace(base, segments=segments)
    length = {"length": 5.0} if reduction.endswith("norm") else {}
    obj = hl.Objective(
        rl=hl.Term(gspo, low=0.05, high=0.05, reduction=reduction, **length),
        ce=hl.Term(cross_entropy, reduction=reduction, **length),
        metrics=["entropy", "accuracy", "perplexity"],
        backend="torch",
    )
    counts = hl.count(problem.targets, segments)
    whole = oracle.run(obj, problem, memory=problem.budget(6), **counts)
    oracle.check(whole, oracle.answer(obj, problem))
    leaves = problem.leaves()
    meter, total = hl.Meter(), torch.zeros((), dtype=torch.float64)
    for part in (slice(0, 9), slice(9, 13), slice(13, 21)):  # whole segments
        inside = [i for i, c in enumerate(cuts[:-1].tolist()) if part.start <= c < part.stop]
        own = hl.Segments.from_cu_seqlens(cuts[inside[0] : inside[-1] + 2] - part.start)
        first = "logits" if kind == "Logits" else "hidden"
        cut = {n: x[part] if n == first else x for n, x in leaves.items()}
        out = obj(
            problem.source(cut, memory=problem.budget(6)), problem.targets[part], segments=own,
            **counts, **{n: x[part] for n, x in problem.inputs.items()},
        )  # fmt: skip
        out.loss.backward()
        total += out.loss.detach()
        meter.add(out.metrics)
    close(total, whole.loss)
    for name, x in leaves.items():
        close(x.grad, whole.grads[name])
    met = meter.compute()
    assert met.keys() == whole.metrics.keys()
    for name, value in met.items():
        assert value == pytest.approx(whole.metrics[name], rel=1e-12), name
    assert meter.compute() == {}


def test_meter_of_endings() -> None:
    """Every way of combining, over micro-batches of unequal size, one of them all ignored."""

    def loss(logprob, entropy):
        return -logprob, {
            "a_min": entropy, "a_max": entropy, "a_std": entropy, "a": entropy, "perplexity": -logprob,
            "effective_sample_size": logprob.exp(), "flag": entropy > 1, "number": 3.0,
        }  # fmt: skip

    problem = oracle.make("Logits", (23,))
    problem.targets[5:8] = -100
    obj = hl.Objective(term=loss, backend="torch")
    whole = oracle.run(obj, problem)
    oracle.check(whole, oracle.answer(obj, problem))
    meter = hl.Meter()
    for part in (slice(0, 5), slice(5, 8), slice(8, 23)):
        meter.add(obj(hl.Logits(problem.tensors["logits"][part]), problem.targets[part]).metrics)
    for name, value in meter.compute().items():
        assert value == pytest.approx(whole.metrics[name], rel=1e-12), name


def test_a_metric_is_formatted_as_a_number() -> None:
    out = hl.Objective(ce=hl.losses.cross_entropy, metrics=["accuracy"])(hl.Logits(torch.eye(4)), torch.arange(4))
    assert f"{out.metrics['accuracy']:.2f}" == "1.00"


def test_no_rows_and_no_segments() -> None:
    """A micro-batch or a rank may have neither."""
    weight, segments = torch.randn(7, 5, requires_grad=True), hl.Segments.from_cu_seqlens(torch.tensor([0]))
    none = torch.zeros(0)
    out = hl.Objective(rl=hl.losses.gspo)(
        hl.Linear(torch.randn(0, 5), weight), none.long(), segments=segments, advantage=none
    )
    out.loss.backward()
    assert out.loss == 0 and weight.grad is not None and not weight.grad.any()


def test_count() -> None:
    targets = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    assert int(hl.count(targets)["num_items"]) == 3
    counts = hl.count(targets, hl.Segments.from_ids(torch.tensor([[0, 0, 0], [1, 2, 2]]), 5))
    assert (int(counts.num_items), int(counts.num_segments)) == (3, 2)
    assert dict(**counts).keys() == {"num_items", "num_segments"}
