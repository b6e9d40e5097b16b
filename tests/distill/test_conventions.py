"""TRL's beta means the same here: 0 is forward_kl, 1 is reverse_kl, anything between is jsd; no T^2 anywhere."""

from __future__ import annotations

import pytest
import torch

import headloss as hl
from headloss.losses import forward_kl, jsd, reverse_kl


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_trl(beta: float, temperature: float) -> None:
    trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 7, 23).double().requires_grad_(), torch.randn(2, 7, 23).double()
    labels = torch.randint(23, (2, 7))
    labels[:, :3] = -100
    want = trainer.generalized_jsd_loss(student, teacher, labels=labels, beta=beta, temperature=temperature)
    (grad,) = torch.autograd.grad(want, student)
    term = {0.0: hl.Term(forward_kl, temperature=temperature), 1.0: hl.Term(reverse_kl, temperature=temperature)}.get(
        beta, hl.Term(jsd, beta=beta or 0.5, temperature=temperature) if 0 < beta < 1 else None
    )
    out = hl.Objective(kd=term)(hl.Logits(student), labels, teacher=hl.Logits(teacher))
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(student.grad, grad, rtol=1e-10, atol=1e-12)
