"""Columns that a call names of each row, `ids=`: their log-probabilities and logits, without a teacher."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreting import BACKEND, DTYPE, INSIDE, TOLERANCE, interpreted
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, forward_kl

N, V, D, K = 7, 19, 5, 4


test_under_the_interpreter = interpreted(__file__, "-k", "values and chunks")


def choice(ids_logprob: Tensor, ids: Tensor, ids_logit: Tensor) -> Tensor:
    """The first candidate among the candidates, and a pull on their logits."""
    return -ids_logprob.log_softmax(-1)[:, 0] + 0.1 * ids_logit.masked_fill(ids < 0, 0.0).square().sum(-1)


class Batch:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=DTYPE)
        self.hidden, self.weight, self.teacher = draw(N, D), draw(V, D), draw(N, V)
        self.targets = torch.randint(0, V, (N,), generator=generator)
        self.targets[2] = -100
        self.ids = torch.stack([torch.randperm(V, generator=generator)[:K] for _ in range(N)])
        self.ids[:2, 0] = torch.tensor([0, V - 1])  # one of each rank
        self.ids[1, 2:] = -1

    def truth(self) -> tuple[Tensor, ...]:
        hidden, weight = (x.double().clone().requires_grad_() for x in (self.hidden, self.weight))
        rows = [n for n in range(N) if n != 2]
        logits = (hidden @ weight.T)[rows]
        logp, held = logits.log_softmax(-1), self.ids[rows] >= 0
        at = logp.gather(1, self.ids[rows].clamp(min=0))
        ce = -logp.gather(1, self.targets[rows, None]).mean()
        raw = torch.where(held, logits.gather(1, self.ids[rows].clamp(min=0)), 0.0)
        pick = (-at.masked_fill(~held, -torch.inf).log_softmax(-1)[:, 0] + 0.1 * raw.square().sum(-1)).mean()
        q = self.teacher.double()[rows].log_softmax(-1)
        kl = (q.exp() * (q - logp)).sum(-1).mean()
        loss = ce + 0.5 * pick + 0.25 * kl
        return loss.detach(), pick.detach(), *torch.autograd.grad(loss, (hidden, weight))


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(a).double(), b.double(), rtol=TOLERANCE, atol=TOLERANCE)


OBJECTIVE = hl.Objective(
    ce=cross_entropy,
    pick=hl.Term(choice, weight=0.5),
    kl=hl.Term(forward_kl, weight=0.25),
    backend=BACKEND,
)


@pytest.mark.parametrize("how", ["logits", "linear", "chunks", "no host read"])
def test_values_and_gradients(how: str) -> None:
    batch = Batch()
    loss, pick, dhidden, dweight = batch.truth()
    hidden, weight = batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()
    memory = 5 * V * weight.itemsize if how == "chunks" else "1GiB"
    source: Any = hl.Linear(hidden, weight, memory=memory)
    if how in ("logits", "no host read"):
        source = hl.Logits(hidden @ weight.T)
    given = {"teacher": hl.Logits(batch.teacher), "ids": batch.ids, "host_read": how != "no host read"}
    out = OBJECTIVE(source, batch.targets, **given)
    out.loss.backward()
    close(out.loss.detach(), loss)
    close(out.terms["pick"], pick)
    close(hidden.grad, dhidden)
    close(weight.grad, dweight)
    assert out.facts.ids_logprob.shape == (N, K) and (out.facts.ids_logprob[1, 2:] == -torch.inf).all()


def test_row_facts_and_verify() -> None:
    batch = Batch()
    weight = batch.weight.clone().requires_grad_()
    facts = hl.row_facts(hl.Linear(batch.hidden, weight), want=("ids_logprob", "ids_logit"), ids=batch.ids[:, :2])
    logits = batch.hidden @ weight.T
    close(facts.ids_logprob, logits.log_softmax(-1).gather(1, batch.ids[:, :2]))
    close(facts.ids_logit, logits.gather(1, batch.ids[:, :2]))
    (grad,) = torch.autograd.grad(facts.ids_logprob[:, 0].sum(), weight)
    (want,) = torch.autograd.grad(logits.log_softmax(-1).gather(1, batch.ids[:, :1]).sum(), weight)
    close(grad, want)
    given: dict[str, Any] = {"teacher": hl.Logits(batch.teacher), "ids": batch.ids}
    hl.verify(OBJECTIVE, hl.Linear(batch.hidden, batch.weight), batch.targets, **given).check()


def test_beside_a_sparse_teacher() -> None:
    """The loss that takes the teacher's log-probabilities has the teacher's ids, the other the call's."""

    def own(ids_logprob: Tensor, teacher_logprob: Tensor) -> Tensor:
        return -(teacher_logprob.exp() * ids_logprob).sum(-1)

    batch = Batch()
    logp = (batch.hidden @ batch.weight.T).log_softmax(-1)
    teacher = hl.Sparse(batch.ids[:, :1].flip(0).clamp(min=0), torch.full((N, 1), -0.5, dtype=DTYPE))
    objective = hl.Objective(own=own, pick=lambda ids_logprob: ids_logprob.sum(-1), backend="torch")
    out = objective(hl.Logits(batch.hidden @ batch.weight.T), teacher=teacher, ids=batch.ids[:, :2])
    close(out.terms["own"], -torch.tensor(-0.5, dtype=DTYPE).exp() * logp.gather(1, teacher.ids).mean())
    close(out.terms["pick"], logp.gather(1, batch.ids[:, :2]).sum(-1).mean())
    assert ("ids_logprob", None, "teacher") in out.facts


def test_refusals() -> None:
    batch = Batch()
    source, objective = hl.Logits(batch.hidden @ batch.weight.T), hl.Objective(pick=hl.Term(choice))
    twice, outside = batch.ids.clone(), batch.ids.clone()
    twice[3, 1], outside[4, 2] = twice[3, 0], V
    for ids, message in [
        (twice, "ids: wanted each column of a row once, but row 3 names one twice"),
        (outside, rf"ids: wanted columns in \[0, {V}\) or -1 for none, but row 4 has others"),
        (batch.ids[:-1], r"ids: wanted shape \(7, K\), K columns of each row, got \(6, 4\)"),
        (None, "teacher: term 'pick'.*needs one for 'ids_logprob'; pass teacher=... or, for columns of your own, ids="),
    ]:
        with pytest.raises(ValueError, match=message):
            objective(source, batch.targets, ids=ids)
    with pytest.raises(TypeError, match="ids: wanted an integer tensor, got torch.float64"):
        objective(source, batch.targets, ids=batch.ids.double())
    with pytest.raises(ValueError, match="ids: passed, but no term or metric asks"):
        hl.Objective(ce=cross_entropy)(source, batch.targets, ids=batch.ids)
    with pytest.raises(ValueError, match="want needs one for 'ids_logprob'; pass teacher=... or, for columns"):
        hl.row_facts(source, want=("ids_logprob",))


def split() -> None:
    batch = Batch()
    loss, _, dhidden, dweight = batch.truth()
    start, end = (0, 11) if dist.get_rank() == 0 else (11, V)
    hidden, mine = batch.hidden.clone().requires_grad_(), batch.weight[start:end].clone().requires_grad_()
    shard = hl.VocabShard(dist.group.WORLD, start, V)
    teacher = hl.Logits(batch.teacher[:, start:end], shard=shard)
    source = hl.Linear(hidden, mine, shard=shard, memory=400)
    out = OBJECTIVE(source, batch.targets, teacher=teacher, ids=batch.ids)
    out.loss.backward()
    close(out.loss.detach(), loss)
    close(hidden.grad, dhidden)
    close(mine.grad, dweight[start:end])


@pytest.mark.skipif(INSIDE, reason="ranks run on torch")
def test_over_ranks(ranks: Any) -> None:
    ranks(2, split)
