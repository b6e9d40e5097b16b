"""First mistakes: each error says what to write instead."""

from __future__ import annotations

import re

import pytest
import torch

import headloss as hl
from headloss.losses import cross_entropy, grpo, gspo

LOGITS, TARGETS = torch.randn(2, 5, 11), torch.randint(11, (2, 5))


def test_a_term_without_a_name() -> None:
    with pytest.raises(TypeError, match=r"each needs a name, as in Objective\(ce=cross_entropy\)"):
        hl.Objective(cross_entropy)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_one_advantage_a_line(shape: tuple[int, ...]) -> None:
    advantage = torch.ones(shape)
    with pytest.raises(ValueError, match=r"advantage\.view\(-1, 1\)\.expand\(2, 5\)"):
        hl.Objective(rl=grpo)(hl.Logits(LOGITS), TARGETS, advantage=advantage)
    hl.Objective(rl=grpo)(hl.Logits(LOGITS), TARGETS, advantage=advantage.view(-1, 1).expand(2, 5))


def test_one_advantage_a_segment() -> None:
    segments, advantage = hl.Segments.from_batch(TARGETS), torch.ones(2)
    with pytest.raises(ValueError, match=r"advantage: has one value (a|per) segment.*segments.spread\(advantage\)"):
        hl.Objective(rl=gspo)(hl.Logits(LOGITS), TARGETS, segments=segments, advantage=advantage)


def test_a_loss_that_fails_says_what_it_was_called_with() -> None:
    with pytest.raises(RuntimeError) as error:
        hl.Objective(mine=lambda logprob: logprob + torch.ones(3))(hl.Logits(LOGITS), TARGETS)
    (note,) = error.value.__notes__
    assert "was called with logprob (10,)" in note


def test_offsets_instead_of_segments() -> None:
    with pytest.raises(TypeError, match="from_cu_seqlens"):
        hl.Objective(rl=gspo)(hl.Logits(LOGITS), TARGETS, advantage=torch.ones(2, 5), segments=torch.tensor([0, 5, 10]))


class Scaled(torch.nn.Module):
    """A loss as a module: its forward says what it asks for."""

    def __init__(self, learned: bool = False) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0)) if learned else 2.0

    def forward(self, logprob: torch.Tensor, *, power: float = 1.0) -> torch.Tensor:
        return self.scale * (-logprob) ** power


def test_a_module_is_read_through_its_forward() -> None:
    logits, targets = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.tensor([1, 2, -100, 3])
    objective = hl.Objective(a=hl.Term(Scaled(), power=2.0))
    out = objective(hl.Logits(logits), targets)
    wanted = (2 * logits.log_softmax(-1)[[0, 1, 3], [1, 2, 3]] ** 2).mean()
    torch.testing.assert_close(out.loss, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in (out.loss, wanted)))
    assert hl.verify(objective, hl.Logits(logits.detach()), targets).ok
    with pytest.raises((TypeError, ValueError), match="requires grad"):
        hl.Objective(a=Scaled(learned=True))(hl.Logits(logits), targets)


def test_what_was_meant_is_suggested() -> None:
    logits, targets = torch.randn(4, 6), torch.tensor([1, 2, -100, 3])

    def call(*functions: object, **given: object) -> None:
        hl.Objective(**{f"t{i}": fn for i, fn in enumerate(functions)})(hl.Logits(logits), targets, **given)

    with pytest.raises(TypeError, match="log_prob: missing; term 't0'.*did you mean 'logprob'"):
        call(lambda log_prob: -log_prob)
    with pytest.raises(TypeError, match=r"old_lp: missing.*did you mean 'old_lps'"):
        call(lambda logprob, old_lp, old_lps=None: logprob - old_lp, old_lps=torch.zeros(4))
    with pytest.raises(TypeError, match=r"advantage: missing; .*passed: none$"):
        call(grpo)
    with pytest.raises(TypeError, match=r"low: an option of term 't1'.*: hl\.Term\(grpo, low=\.\.\.\)"):
        call(cross_entropy, grpo, advantage=torch.zeros(4), low=0.1)
    with pytest.raises(TypeError, match=r"\*\*more in a loss's signature"):
        call(lambda logprob, **more: logprob)
    with pytest.raises(TypeError, match=r"\(values, a dict of metrics\), got a tuple of \(tensor, tensor\)"):
        call(lambda logprob: (-logprob, logprob))
    with pytest.raises(ValueError, match=r"is 'lss' the loss\? \(at terms\.ce\)"):
        hl.Objective.from_config({"terms": {"ce": {"lss": "cross_entropy"}}})


def test_sizes_of_a_trace_go_by_what_they_are() -> None:
    """Its numbers stand for any, and its symbols mean nothing to a reader."""
    segments, logits, targets = hl.Segments.from_batch((2, 3)), hl.Logits(torch.randn(6, 7)), torch.arange(6)
    for fn, said in (
        (lambda logprob, segments: segments.spread(logprob), r"per segment, shape \(segments,\), got shape \(rows,\)"),
        (lambda logprob, segments: segments.mean(logprob[1:]), r"per row, shape \(rows,\), got shape \(n,\)"),
        (lambda logprob, segments: logprob[:, None], r"\(a vector\), got shape \(n, 1\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=said) as raised:
            hl.Objective(a=fn)(logits, targets, segments=segments)
        assert not re.search(r"\bs\d+", str(raised.value) + " ".join(getattr(raised.value, "__notes__", ())))


def test_metrics_of_other_things_do_not_add_up() -> None:
    values = torch.rand(4)
    per_token, per_segment = (hl.Metric.of("entropy", values, None, per) for per in ("token", "segment"))
    with pytest.raises(ValueError, match="one is per token and the other per segment"):
        per_token + per_segment
    meter = hl.Meter().add({"entropy": per_token})
    with pytest.raises(ValueError, match="'entropy' is a mean per segment here and was a mean per token before"):
        meter.add({"entropy": per_segment})
    with pytest.raises(ValueError, match="'entropy' is a max per token here and was a mean per token before"):
        meter.add({"entropy": hl.Metric.of("entropy_max", values, None, "token")})
