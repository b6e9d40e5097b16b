"""What seeded faults showed missing; see `proof/faults.py`."""

from __future__ import annotations

import math

import torch

import headloss as hl


def test_a_tensor_made_in_a_loss_belongs_to_its_rows() -> None:
    """One weight for each of seven rows, written in the loss: such a loss cannot be cut into chunks."""

    def weighted(logprob):
        return -logprob * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], dtype=logprob.dtype)

    torch.manual_seed(0)
    hidden = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 3, dtype=torch.float64)
    targets = torch.randint(11, (7,))
    source = hl.Linear(hidden, weight, memory=3 * 11 * 8)
    objective = hl.Objective(mine=weighted)
    assert objective.explain(source, targets).terms[0].kind == "batch"
    logp = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    want = (-logp * torch.arange(1.0, 8.0)).mean()
    got = objective(source, targets).loss
    torch.testing.assert_close(got, want)
    (a,), (b,) = torch.autograd.grad(got, hidden), torch.autograd.grad(want, hidden)
    torch.testing.assert_close(a, b)


def test_padding_ids_count_for_nothing() -> None:
    """Also in a divergence of one's own that is not 0 where both probabilities are 1."""

    def teacher_mass(logp, logq):
        return logq.exp() + 0 * logp

    logits = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 4, -1], [2, -1, -1], [0, 7, 8]])
    probabilities = torch.tensor([[0.5, 0.2, 0.9], [0.3, 0.9, 0.9], [0.1, 0.2, 0.3]], dtype=torch.float64)
    out = hl.Objective(mass=hl.Term(teacher_mass, tail="none", reduction="token_sum"))(
        hl.Logits(logits), torch.zeros(3, dtype=torch.long), teacher=hl.Sparse(ids, probabilities.log())
    )
    assert math.isclose(float(out.loss.detach()), 0.5 + 0.2 + 0.3 + 0.1 + 0.2 + 0.3)
