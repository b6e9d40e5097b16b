"""The likeliest columns of each row, `hl.Term(loss, top=K)`: exact, in order, differentiable, found by the sweep."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreting import BACKEND, DTYPE, INSIDE, TOLERANCE, interpreted
from torch import Tensor

import headloss as hl
from headloss.backends.torch_teachers import top_columns
from headloss.losses import cross_entropy, forward_kl, reverse_kl, uld

N, V, D, K = 7, 19, 5, 4


test_under_the_interpreter = interpreted(__file__, "-k", "chunks or ties")


def margin(top_logprob: Tensor) -> Tensor:
    return top_logprob[:, 1] - top_logprob[:, 0]


def own_kl(top_logprob: Tensor, teacher_top_logprob: Tensor, top_ids: Tensor) -> Tensor:
    even = (top_ids % 2 == 0).to(top_logprob.dtype)
    return (even * top_logprob.exp() * (top_logprob - teacher_top_logprob)).sum(-1)


OBJECTIVE = hl.Objective(
    ce=cross_entropy,
    margin=hl.Term(margin, top=2),
    own=hl.Term(own_kl, top=K, temperature=2.0),
    top=hl.Term(reverse_kl, top=K, tail="renormalise", weight=0.5),
    none=hl.Term(reverse_kl, top=K, tail="none", weight=0.7),
    kl=hl.Term(forward_kl, weight=0.3),
    backend=BACKEND,
)


class Batch:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=DTYPE)
        self.hidden, self.weight = draw(N, D), draw(V, D)
        self.guide, self.head = draw(N, D), draw(V, D)
        self.targets = torch.randint(0, V, (N,), generator=generator)
        self.targets[2] = -100

    def truth(self) -> tuple[Tensor, ...]:
        hidden, weight = (x.double().clone().requires_grad_() for x in (self.hidden, self.weight))
        rows = [n for n in range(N) if n != 2]
        s, u = (hidden @ weight.T)[rows], (self.guide.double() @ self.head.double().T)[rows]
        logp, logq = s.log_softmax(-1), u.log_softmax(-1)
        ids = logp.topk(K).indices
        top, theirs = logp.gather(1, ids), logq.gather(1, ids)
        hot, hot_theirs = (s / 2).log_softmax(-1).gather(1, ids), (u / 2).log_softmax(-1).gather(1, ids)
        loss = -logp.gather(1, self.targets[rows, None])[:, 0] + top[:, 1] - top[:, 0]
        loss = loss + ((ids % 2 == 0) * hot.exp() * (hot - hot_theirs)).sum(-1)
        p, q = top.log_softmax(-1), theirs.log_softmax(-1)
        loss = loss + 0.5 * (p.exp() * (p - q)).sum(-1) + 0.7 * (top.exp() * (top - theirs)).sum(-1)
        loss = loss + 0.3 * (logq.exp() * (logq - logp)).sum(-1)
        return loss.mean().detach(), *torch.autograd.grad(loss.mean(), (hidden, weight))


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(a).double(), b.double(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("how", ["logits", "linear", "chunks", "no host read"])
def test_values_and_gradients(how: str) -> None:
    batch = Batch()
    loss, dhidden, dweight = batch.truth()
    hidden, weight = batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()
    source: Any = hl.Linear(hidden, weight, memory=6 * V * weight.itemsize if how == "chunks" else "1GiB")
    if how in ("logits", "no host read"):
        source = hl.Logits(hidden @ weight.T)
    teacher = hl.Linear(batch.guide, batch.head)
    out = OBJECTIVE(source, batch.targets, teacher=teacher, host_read=how != "no host read")
    out.loss.backward()
    close(out.loss.detach(), loss)
    close(hidden.grad, dhidden)
    close(weight.grad, dweight)
    assert out.facts["top_logprob", None, f"top={K} of teacher"].shape == (N, K)


def test_ties_go_to_the_lower_column() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 3, (9, 700), generator=generator).to(DTYPE)
    logits[0], logits[1, 600:], logits[2, :650] = 1.0, -torch.inf, -torch.inf
    logits[3, 5], logits[4] = 40.0, torch.arange(700)
    for k in (1, 3, 60, 400):
        found = hl.topk(hl.Logits(logits), k, backend=BACKEND)
        order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(found.ids, order)
        close(found.logprobs, logits.log_softmax(-1).gather(1, order))
        flipped = hl.topk(hl.Logits(logits[3:], scale=-0.5, softcap=30.0), k, backend=BACKEND)
        assert torch.equal(flipped.ids, (-logits[3:]).sort(dim=-1, descending=True, stable=True).indices[:, :k])


def test_row_facts() -> None:
    batch = Batch()
    weight = batch.weight.clone().requires_grad_()
    want = ("top_logprob", "entropy", ("top_logprob", 0.5), "teacher_top_logprob")
    facts = hl.row_facts(
        hl.Linear(batch.hidden, weight), want=want, top=K, teacher=hl.Logits(batch.guide @ batch.head.T)
    )
    logits = batch.hidden @ weight.T
    logp = logits.log_softmax(-1)
    close(facts.top_logprob, logp.topk(K).values)
    assert torch.equal(facts.top_ids, logp.topk(K).indices)
    close(facts["top_logprob", 0.5], (logits / 0.5).log_softmax(-1).topk(K).values)
    close(facts.teacher_top_logprob, (batch.guide @ batch.head.T).log_softmax(-1).gather(1, facts.top_ids))
    (grad,) = torch.autograd.grad((facts.top_logprob[:, 1:].exp().sum(-1) + facts.entropy).sum(), weight)
    value = logp.topk(K).values[:, 1:].exp().sum(-1) - (logp.exp() * logp).sum(-1)
    (want_grad,) = torch.autograd.grad(value.sum(), weight)
    close(grad, want_grad)
    distilled = hl.Objective(kl=forward_kl)(
        hl.Logits(batch.guide @ batch.head.T), teacher=hl.topk(hl.Logits(logits), K)
    )
    assert distilled.loss > 0
    given: dict[str, Any] = {"teacher": hl.Linear(batch.guide, batch.head)}
    hl.verify(OBJECTIVE, hl.Linear(batch.hidden, batch.weight), batch.targets, **given).check()


@pytest.mark.parametrize("K, J", [(V, V + 4), (V, 11), (5, 9), (9, 5)])
def test_uld_sorts_the_probabilities_of_another_vocabulary(K: int, J: int) -> None:
    """Whole vocabularies give the whole sum; fewer columns give what they hold and the rest as one.  Rows stay apart,
    whatever K and J are."""
    batch = Batch()
    weight, rows = batch.weight.clone().requires_grad_(), [n for n in range(N) if n != 2]
    u = 2 * torch.randn(N, J if K == V else 23, generator=torch.Generator().manual_seed(3), dtype=DTYPE)
    q = hl.topk(hl.Logits(u), J).logprobs
    spoiled = q[:, torch.randperm(J)].index_fill(0, torch.tensor([2]), torch.nan)
    objective = hl.Objective(d=hl.Term(uld, top=K), ce=cross_entropy)
    source = hl.Linear(batch.hidden, weight, memory=2 * V * weight.itemsize)
    out = objective(source, batch.targets, foreign_logprob=spoiled)
    p, q = (x.softmax(-1).sort(-1, descending=True).values[rows] for x in (batch.hidden @ weight.T, u))
    if K == V:
        longest = max(p.shape[1], J)
        p, q = (torch.nn.functional.pad(x, (0, longest - x.shape[1])) for x in (p, q))
        want = (p - q).abs().sum(-1)
    else:
        M = min(K, J)
        want = (p[:, :M] - q[:, :M]).abs().sum(-1) + (p[:, M:].sum(-1) - q[:, M:].sum(-1)).abs()
    close(out.terms["d"], want.mean())
    ce = torch.nn.functional.cross_entropy((batch.hidden @ weight.T)[rows], batch.targets[rows])
    close(*(torch.autograd.grad(x, weight)[0] for x in (out.loss, want.mean() + ce)))
    plan = objective.explain(source, batch.targets, foreign_logprob=q[:0].new_zeros(N, J))
    assert plan.terms[0].kind == "row"


def test_uld_refuses_one_number_per_row() -> None:
    batch = Batch()
    with pytest.raises(ValueError, match="foreign_logprob: wanted J log-probabilities per row"):
        hl.Objective(d=uld)(hl.Linear(batch.hidden, batch.weight), batch.targets, foreign_logprob=torch.zeros(N))


def test_a_loss_that_sorts_rows_is_none_of_rows() -> None:
    def ranked(logprob: Tensor) -> Tensor:
        return logprob.sort().values

    plan = hl.Objective(it=ranked).explain(hl.Logits(torch.zeros(3, 4)), torch.zeros(3).long())
    assert plan.terms[0].kind == "batch"

    def wide(logprob: Tensor, table: Tensor) -> Tensor:
        return logprob * table[:, : min(table.shape)].sum(-1)

    plan = hl.Objective(it=wide).explain(hl.Logits(torch.zeros(3, 4)), torch.zeros(3).long(), table=torch.zeros(3, 5))
    assert plan.terms[0].kind == "batch"  # how many rows there are decides


def test_refusals() -> None:
    batch = Batch()
    source = hl.Linear(batch.hidden, batch.weight)
    with pytest.raises(TypeError, match=r"margin: asks for 'top_logprob'; say of how many columns, hl.Term\(margin"):
        hl.Objective(margin=margin)
    with pytest.raises(ValueError, match="top: wanted a number of columns, at least 1, got 0"):
        hl.Term(margin, top=0)
    with pytest.raises(ValueError, match=f"k: wanted at most {V} columns, which the vocabulary has, got {V + 1}"):
        hl.topk(source, V + 1)
    with pytest.raises(ValueError, match="k: wanted a number of columns, at least 1, got 0"):
        hl.topk(source, 0)
    with pytest.raises(ValueError, match=f"top: wanted at most {V} columns, which the vocabulary has, got {V + 1}"):
        hl.row_facts(source, want="top_ids", top=V + 1)
    with pytest.raises(ValueError, match="top: none of the wanted facts takes a number of columns"):
        hl.row_facts(source, batch.targets, top=2)
    with pytest.raises(ValueError, match="top: cross_entropy asks for none of top_ids, top_logprob"):
        hl.Term(cross_entropy, top=2)
    with pytest.raises(ValueError, match="top: needed by the fact 'top_ids'; say of how many columns"):
        hl.row_facts(source, want="top_ids")
    with pytest.raises(ValueError, match="tail: with top=, the columns left out are not counted"):
        hl.Term(reverse_kl, top=3)
    with pytest.raises(ValueError, match="teacher: term 'own'.*needs one for 'teacher_top_logprob'; pass teacher="):
        hl.Objective(own=hl.Term(own_kl, top=3))(source, batch.targets)


def split() -> None:
    batch = Batch()
    loss, dhidden, dweight = batch.truth()
    start, end = (0, 16) if dist.get_rank() == 0 else (16, V)  # the second has fewer columns than K
    hidden, mine = batch.hidden.clone().requires_grad_(), batch.weight[start:end].clone().requires_grad_()
    shard = hl.VocabShard(dist.group.WORLD, start, V, width=16)
    teacher = hl.Linear(batch.guide, batch.head[start:end], shard=shard)
    for memory in (6 * 8 * 16, "1GiB"):
        hidden.grad = mine.grad = None
        out = OBJECTIVE(hl.Linear(hidden, mine, shard=shard, memory=memory), batch.targets, teacher=teacher)
        out.loss.backward()
        close(out.loss.detach(), loss)
        close(hidden.grad, dhidden)
        close(mine.grad, dweight[start:end])
    ties = torch.zeros(3, V, dtype=DTYPE)
    ties[1, 17] = 1.0
    found = hl.topk(hl.Logits(ties[:, start:end], shard=shard), K)
    assert found.ids.tolist() == [[0, 1, 2, 3], [17, 0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.skipif(INSIDE, reason="ranks run on torch")
def test_over_ranks(ranks: Any) -> None:
    ranks(2, split)


@pytest.mark.parametrize("k", [1, 3, 20])
@pytest.mark.parametrize("width", [1003, 1024])
def test_the_lower_of_equal_columns_in_a_wide_row(k: int, width: int) -> None:
    """Whether a row is read in groups of columns or not, and whatever stands in it."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(12, width, generator=generator)
    x[1] = x[1].round()
    x[2, 7:] = -torch.inf
    x[3] = 0.0
    x[4] = torch.arange(width) % 2  # equals in all groups
    x[5, -5:] = 9.0  # in the columns that are left over
    x[6, ::50] = 9.0
    x[7, : width // 2] = -torch.inf
    x[8] = -torch.inf
    right = torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :k]
    torch.testing.assert_close(top_columns(x, k), right)
    x[9, 3] = torch.nan
    assert top_columns(x, k).shape == (12, k)
