"""`segments.max` and `min` where a segment's rows lie on two ranks, ties across them included."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import headloss as hl


def extremes() -> None:
    ids = torch.tensor([0, 0, 1, 0, 1, 1])
    x = torch.tensor([1.0, 4.0, -2.0, 4.0, -3.0, -2.5], dtype=torch.float64)
    mine = [0, 1, 2] if dist.get_rank() == 0 else [3, 4, 5]
    segments = hl.Segments.from_ids(ids[mine], 2, group=dist.group.WORLD)
    leaf = x[mine].clone().requires_grad_()
    assert segments.maxima(leaf).tolist() == [4.0, -2.0]
    assert segments.minima(leaf).tolist() == [1.0, -3.0]
    (grad,) = torch.autograd.grad((segments.max(leaf) * 1.0).sum(), leaf)  # each rank's loss is a share of one
    want = torch.tensor([0.0, 1.5, 3.0, 1.5, 0.0, 0.0], dtype=torch.float64)[mine]
    torch.testing.assert_close(grad, want)


def test_extremes_over_two_ranks(ranks: Any) -> None:
    ranks(2, extremes)
