"""What the tests of this folder share: kinds of sources, and an objective or two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, z_loss

KINDS = ["Logits", "Linear"]
BATCH_LOSS = lambda logprob: (logprob - logprob.mean()) ** 2
CE_Z = {"ce": cross_entropy, "z": hl.Term(z_loss, weight=0.1)}


def objective(**terms: Any) -> hl.Objective:
    return hl.Objective(**(terms or CE_Z), metrics=["entropy"], backend="torch")


def close(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def grads(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.grad.clone() for n, x in leaves.items() if x.grad is not None}
