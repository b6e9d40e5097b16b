"""The demo's task: sort a few digits.  Made on the spot, and anybody can check an answer.

    <bos> 4 1 7 0 1 9 <sep> 0 1 1 4 7 9 <eos>
    prompt, ignored         answer, one target each

Dimension key:  B sequences   P prompt   A answer   T = P + A - 1 positions of a model's input
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

BOS, SEP, EOS = 10, 11, 12
NAMES = [*map(str, range(10)), "<bos>", "<sep>", "<eos>"]


@dataclass(frozen=True)
class Sorting:
    """Sorting `digits` digits.  Prompts divisible by 11 are held out of training.

    Labels are written by a careless hand: each digit is any digit at all with probability `noise`.  A teacher learns
    how sure one can be, and its softmax then says more than the label of the moment.
    """

    digits: int
    noise: float = 0.0

    vocab: ClassVar[int] = len(NAMES)

    @property
    def P(self) -> int:
        return self.digits + 2

    @property
    def A(self) -> int:
        return self.digits + 1

    @property
    def T(self) -> int:
        return self.P + self.A - 1

    def prompts(self, count: int, random: torch.Generator, held_out: bool = False) -> Tensor:
        """(B, P): digits between `<bos>` and `<sep>`."""
        number = 11 * torch.randint(10**self.digits // 11, (count,), generator=random)
        if not held_out:
            number += torch.randint(1, 11, (count,), generator=random)
        places = 10 ** torch.arange(self.digits - 1, -1, -1)
        digits = number[:, None] // places % 10
        return torch.cat([torch.full((count, 1), BOS), digits, torch.full((count, 1), SEP)], 1)

    def answers(self, prompts_BP: Tensor) -> Tensor:
        """(B, A): the digits in order, and `<eos>`."""
        ordered = prompts_BP[:, 1:-1].sort(1).values
        return torch.cat([ordered, torch.full((len(ordered), 1), EOS)], 1)

    def labels(self, prompts_BP: Tensor, random: torch.Generator) -> Tensor:
        """(B, A): answers as they come for training, with their mistakes."""
        answers = self.answers(prompts_BP)
        careless = torch.rand(answers.shape, generator=random) < self.noise
        anything = torch.randint(10, answers.shape, generator=random)
        return torch.where(careless & (answers != EOS), anything, answers)

    def reward(self, prompts_BP: Tensor, answers_BA: Tensor) -> Tensor:
        """(B,): the fraction of an answer's tokens that are right."""
        return (answers_BA == self.answers(prompts_BP)).float().mean(1)

    def rows(self, prompts_BP: Tensor, answers_BA: Tensor) -> tuple[Tensor, Tensor]:
        """What the model reads and what it should say next, both (B, T); targets inside the prompt are ignored."""
        whole = torch.cat([prompts_BP, answers_BA], 1)
        targets = whole[:, 1:].clone()
        targets[:, : self.P - 1] = -100
        return whole[:, :-1], targets
