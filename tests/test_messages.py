"""First mistakes: each error says what to write instead."""

from __future__ import annotations

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
