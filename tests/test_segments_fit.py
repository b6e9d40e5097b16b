"""Segments fit rows laid out as (B, T) or flat, and lines of a shape alone go to the device of the rows."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, gspo

B, T, V, D = 3, 5, 17, 4
TARGETS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
TARGETS[0, :2] = -100
LINES = hl.Segments.from_batch((B, T))
FLAT = hl.Segments.from_ids(torch.arange(B).repeat_interleave(T), B)
OBJECTIVE = hl.Objective(
    rl=hl.Term(gspo, reduction="seq_mean_token_mean"), ce=hl.Term(cross_entropy, reduction="seq_mean_token_sum")
)
WAYS = {"(B, T) segments, flat rows": (LINES, (B * T,)), "flat segments, (B, T) rows": (FLAT, (B, T))}


def problem(rows: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(B, T, D).view(*rows, D), torch.randn(V, D)
    inputs = {"advantage": torch.randn(B, T).view(rows), "old_logprob": -2 - torch.rand(B, T).view(rows)}
    return hidden.requires_grad_(), weight, TARGETS.view(rows), inputs


def result(segments: hl.Segments, rows: tuple[int, ...], linear: bool, prepared: bool = False) -> tuple[Tensor, Tensor]:
    hidden, weight, targets, inputs = problem(rows)
    source = hl.Linear(hidden, weight, memory="1KiB") if linear else hl.Logits(hidden @ weight.T)
    given = {"targets": hl.prepare(targets, segments)} if prepared else {"targets": targets, "segments": segments}
    loss = OBJECTIVE(source, **given, **inputs).loss
    return loss.detach(), torch.autograd.grad(loss, hidden)[0].view(B * T, D)


@pytest.mark.parametrize("prepared", (False, True), ids=("call", "prepare"))
@pytest.mark.parametrize("linear", (False, True), ids=("Logits", "Linear"))
@pytest.mark.parametrize("way", WAYS)
def test_either_layout_gives_the_same(way: str, linear: bool, prepared: bool) -> None:
    wanted = result(LINES, (B, T), linear)
    torch.testing.assert_close(result(*WAYS[way], linear, prepared), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_everything_else_that_takes_segments(way: str) -> None:
    segments, rows = WAYS[way]
    hidden, weight, targets, inputs = problem(rows)
    source = hl.Logits((hidden @ weight.T).detach())
    assert "segment" in str(OBJECTIVE.explain(source, targets, segments=segments, **inputs))
    assert hl.verify(OBJECTIVE, source, targets, segments=segments, **inputs)
    assert hl.count(targets, segments)["num_segments"] == B
    ends = hl.shift_labels(targets, segments).view(B, T)[:, -1]
    assert (ends == -100).all()


@pytest.mark.parametrize("way", WAYS)
def test_the_compiled_form(way: str) -> None:
    segments, rows = WAYS[way]
    hidden, weight, targets, inputs = problem(rows)

    def loss(hidden: Tensor) -> Tensor:
        return OBJECTIVE(hl.Linear(hidden, weight), targets, segments=segments, **inputs).loss

    (wanted,) = torch.autograd.grad(loss(hidden), hidden)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(hidden), hidden)[0], wanted)


def test_two_layouts_that_are_not_flat_must_agree() -> None:
    hidden, weight, targets, inputs = problem((B, T))
    turned = hl.Segments.from_batch((T, B))
    with pytest.raises(ValueError, match=r"segments: ids have shape \(5, 3\), the targets \(3, 5\)"):
        OBJECTIVE(hl.Linear(hidden, weight), targets, segments=turned, **inputs)
    with pytest.raises(ValueError, match=r"segments: ids have shape \(3, 5\), the targets \(14,\)"):
        hl.prepare(targets.flatten()[:-1], LINES)


@pytest.mark.parametrize("rows", ((B, T), (B * T,)), ids=str)
@pytest.mark.parametrize("device", ("meta", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_lines_of_a_shape_follow_the_rows(device: str, rows: tuple[int, ...]) -> None:
    hidden, weight, targets, inputs = problem(rows)
    source = hl.Linear(hidden.detach().to(device), weight.to(device))
    targets, inputs = targets.to(device), {name: x.to(device) for name, x in inputs.items()}
    for segments in (LINES, pickle.loads(pickle.dumps(LINES))):
        OBJECTIVE.explain(source, targets, segments=segments, **inputs)
        if device != "meta":
            out = OBJECTIVE(source, targets, segments=segments, **inputs)
            again = OBJECTIVE(source, hl.prepare(targets, segments), **inputs)
            torch.testing.assert_close(out.loss, again.loss)
            torch.testing.assert_close(out.loss.cpu(), result(LINES, (B, T), True)[0], rtol=1e-4, atol=1e-5)
    for segments in (hl.Segments.from_batch(TARGETS), FLAT):  # made of tensors: where they are is the caller's word
        with pytest.raises(ValueError, match=f"segments: is on cpu, but the source is on {device}"):
            OBJECTIVE.explain(source, targets, segments=segments, **inputs)


@pytest.mark.parametrize("memory", ["1GiB", 4 * 50 * 6])
@pytest.mark.parametrize("loss", ["gspo", "own"])
def test_metrics_see_rows_in_their_order(loss, memory):
    """Chunks hold whole segments, whose rows may lie anywhere."""
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(12, 16, requires_grad=True), torch.randn(50, 16), torch.arange(12) % 3
    targets, advantage = torch.randint(50, (12,)), torch.randn(12)
    jump = lambda logprob: (logprob * logprob.roll(1)).mean()
    found = lambda x: {"jump": jump(x), "sum_of_rows": x.cumsum(0)}
    own = lambda logprob, segments: (-logprob * segments.mean(logprob).detach(), found(logprob))
    logprob = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0].detach()
    given = {} if loss == "own" else {"advantage": advantage, "old_logprob": logprob - 0.1}
    source, segments = hl.Linear(hidden, weight, memory=memory), hl.Segments.from_ids(ids, 3)
    objective = hl.Objective(it=own if loss == "own" else gspo, metrics={"jump": jump})
    out = objective(source, targets, segments=segments, **given)
    for name in [x for x in out.metrics if x.endswith("jump")]:
        torch.testing.assert_close(out.metrics[name].value.float(), jump(logprob), rtol=1e-5, atol=1e-5)
    if loss == "own":
        wanted = logprob.cumsum(0).mean()
        torch.testing.assert_close(out.metrics["it/sum_of_rows"].value.float(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.facts.logprob, logprob, rtol=1e-5, atol=1e-5)
    out.loss.backward()
    whole = hidden.detach().clone().requires_grad_()
    other = hl.Objective(it=objective.terms["it"])(hl.Logits(whole @ weight.T), targets, segments=segments, **given)
    other.loss.backward()
    torch.testing.assert_close(hidden.grad, whole.grad, rtol=1e-4, atol=1e-6)
    grade = objective.explain(source, targets, segments=segments, **given).grade
    assert ("all rows fit into one chunk" if memory == "1GiB" else "interleaved") in grade
