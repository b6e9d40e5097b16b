"""Class weights, with label smoothing too, as `F.cross_entropy(weight=, label_smoothing=)` has them."""

import pytest
import torch
import torch.nn.functional as F

import headloss as hl
from headloss.losses import cross_entropy, soft_cross_entropy

N, V, D, E = 6, 9, 4, 0.1


@pytest.mark.parametrize("how", ["logits", "linear", "chunks"])
def test_class_weights_with_smoothing_as_torch_has_them(how: str) -> None:
    """torch sums (1 - e) w[y] nll + e / V sum_j w_j nll_j, and divides by the sum of w[y]; some weights are 0."""
    hidden, weight = (torch.randn(n, D, dtype=torch.float64) for n in (N, V))
    w = torch.rand(V, dtype=torch.float64)
    w[[2, 5]] = 0.0
    targets = torch.tensor([0, 2, 3, -100, 8, 1])
    truth = weight.clone().requires_grad_()
    want = F.cross_entropy(hidden @ truth.T, targets, weight=w, label_smoothing=E)
    want.backward()

    objective = hl.Objective(
        ce=hl.Term(cross_entropy, row_weight=lambda targets, w: w[targets], reduction="weighted_mean", weight=1 - E),
        smooth=hl.Term(soft_cross_entropy, reduction="token_sum"),
    )
    leaf = weight.clone().requires_grad_()
    source = hl.Logits(hidden @ leaf.T)
    if how != "logits":
        source = hl.Linear(hidden, leaf, memory="1GiB" if how == "linear" else 2 * V * 8)
    mass = w[targets[targets != -100]].sum()
    out = objective(
        source, targets, w=hl.Whole(w),
        teacher=hl.Logits(w.log().expand(N, V)), weights={"smooth": E * w.mean() / mass},
    )  # fmt: skip
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(leaf.grad, truth.grad, rtol=1e-10, atol=1e-10)
