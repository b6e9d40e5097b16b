"""Models that see: two steps of a patched one and of the stock one, losses and gradients within 1e-6."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
import tiny_vision as tiny

import headloss as hl
from headloss.integrations.transformers import patch
from headloss.losses import cross_entropy, z_loss


@pytest.mark.parametrize("name", list(tiny.MODELS))
def test_two_steps(name: str) -> None:
    stock, batch = tiny.model(name), tiny.batch(name)
    ours = patch(copy.deepcopy(stock), hl.Objective(ce=cross_entropy, metrics=["entropy"]))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (stock, ours)]
    for _ in range(2):
        losses = []
        for model, optimizer in zip((stock, ours), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(model(**batch).loss)
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
        for (key, p), q in zip(stock.named_parameters(), ours.parameters(), strict=True):
            if p.grad is None:
                assert q.grad is None, key
            else:
                error, scale = (q.grad - p.grad).abs().max(), p.grad.abs().max()
                assert error <= 1e-6 * max(scale, 1.0), (key, error, scale)
        for optimizer in optimizers:
            optimizer.step()
    eyes = [p for key, p in stock.named_parameters() if "vis" in key and p.grad is not None]
    assert max(p.grad.abs().max() for p in eyes) > 1e-4  # the image was seen
    assert float(ours.headloss.last.metrics["entropy"]) > 0 and ours(**batch).logits.shape[-1] == 0
    other = patch(copy.deepcopy(stock), hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=0.1)))
    assert other(**batch).loss > stock(**batch).loss + 0.1  # the hook is no decoration
