"""A head over some tokens of a larger vocabulary, `vocab_ids=`: targets and teachers stay on the larger one."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreting import BACKEND, DTYPE, INSIDE, TOLERANCE, interpreted
from torch import Tensor

import headloss as hl
from headloss.engine import budget
from headloss.losses import cross_entropy, forward_kl, jsd, reverse_kl

N, V, U, D = 8, 29, 11, 5  # rows, the larger vocabulary, columns of the head


test_under_the_interpreter = interpreted(__file__, "-k", "bucket and runs or small_tail")


class Batch:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=DTYPE)
        self.hidden, self.weight = draw(N, D), draw(U, D)
        self.guide, self.head = draw(N, D), draw(V, D)
        self.ids = torch.randperm(V, generator=generator)[:U]  # in no order
        self.targets = self.ids[torch.randint(0, U, (N,), generator=generator)]
        others = torch.tensor([i for i in range(V) if i not in self.ids.tolist()])
        self.targets[1], self.targets[4], self.targets[6] = -100, others[0], others[3]
        self.rows = [n for n in range(N) if n not in (1, 4, 6)]


def divergence(logp: Tensor, logq: Tensor, loss: str) -> Tensor:
    if loss == "forward_kl":
        return logq.exp() * (logq - logp)
    if loss == "reverse_kl":
        return logp.exp() * (logp - logq)
    logm = torch.logaddexp(logp, logq) - torch.log(torch.tensor(2.0, dtype=logp.dtype))
    return 0.5 * logq.exp() * (logq - logm) + 0.5 * logp.exp() * (logp - logm)


def _double(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.double()


@pytest.mark.parametrize("how", ["logits", "chunks", "runs"])
@pytest.mark.parametrize("tail", ["none", "bucket", "renormalise"])
def test_against_a_teacher_on_the_larger_vocabulary(tail: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, T = Batch(), 1.5
    hidden, weight = (x.double().clone().requires_grad_() for x in (batch.hidden, batch.weight))
    u = batch.guide.double() @ batch.head.double().T
    s = hidden @ weight.T
    at = batch.ids[None].expand(N, -1)
    want = torch.zeros(N, dtype=torch.float64)
    for temperature, name in ((1.0, "forward_kl"), (T, "reverse_kl"), (1.0, "jsd")):
        logp, logq = (s / temperature).log_softmax(-1), (u / temperature).log_softmax(-1).gather(1, at)
        if tail == "renormalise":
            logq = logq.log_softmax(-1)
        want = want + divergence(logp, logq, name).sum(-1)
        if tail == "bucket":
            left = torch.log1p(-logq.exp().sum(-1))
            want = want + divergence(torch.full_like(left, -1e4), left, name)
    column = {int(token): c for c, token in enumerate(batch.ids)}
    target = torch.tensor([column.get(int(y), 0) for y in batch.targets])
    want = want - s.log_softmax(-1).gather(1, target[:, None])[:, 0]
    loss = want[batch.rows].mean()
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))

    objective = hl.Objective(
        ce=cross_entropy,
        forward=hl.Term(forward_kl, tail=tail),
        reverse=hl.Term(reverse_kl, tail=tail, temperature=T),
        jsd=hl.Term(jsd, tail=tail),
        metrics=["accuracy"],
        backend=BACKEND,
    )
    mine, head = batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()
    memory = 4 * (V + 2 * U) * 8
    if how == "runs":  # all of the student's logits, and the teacher's of two rows at a time
        monkeypatch.setattr(budget, "FEWEST", 1)
        theirs = 2 * U + U * D if tail == "renormalise" else 2 * (V + U)
        memory = (5 * (U + 3 * D) + theirs) * DTYPE.itemsize
    source: Any = hl.Linear(mine, head, vocab_ids=batch.ids, memory=memory)
    teacher: Any = hl.Linear(batch.guide, batch.head)
    if how == "logits":
        source = hl.Logits(mine @ head.T, vocab_ids=batch.ids)
        teacher = hl.Logits(batch.guide @ batch.head.T)
    if how == "runs":
        plan = objective.explain(source, batch.targets, teacher=teacher)
        assert plan.chunks == 3 and any(what.startswith("chunk of 5 rows") for what in plan.bytes)
        assert plan.beyond <= memory + plan.bytes["facts, cotangents and coefficients"]
    out = objective(source, batch.targets, teacher=teacher)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach().double(), loss.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(_double(mine.grad), dhidden, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(_double(head.grad), dweight, rtol=TOLERANCE, atol=TOLERANCE)
    assert float(out.metrics["vocab_missing"]) == pytest.approx(2 / 7)
    likeliest = batch.ids[s.argmax(-1)]
    assert out.facts.argmax[batch.rows].tolist() == likeliest[batch.rows].tolist()


@pytest.mark.parametrize("mass", [0.0, 1e-6])
def test_a_small_tail_keeps_its_digits(mass: float) -> None:
    """What the teacher gives tokens that the head lacks is no difference of two sums, which float32 rounds away."""
    s, u = torch.randn(4, 20), torch.randn(4, 30) + 100.0
    u[:, 20:] = u[:, :20].logsumexp(-1, keepdim=True) + (math.log(mass / 10) if mass else -math.inf)
    objective = hl.Objective(kl=forward_kl, top=hl.Term(forward_kl, top=3, tail="none"), backend=BACKEND)
    out = objective(hl.Logits(s, vocab_ids=torch.arange(20)), teacher=hl.Logits(u))
    logp, logq = s.double().log_softmax(-1), u.double().log_softmax(-1)
    kl, left = logq[:, :20].exp() * (logq[:, :20] - logp), logq[:, 20:].logsumexp(-1)
    want = {"kl": kl.sum(-1) + torch.where(left > -1e4, left.exp() * (left + 1e4), 0.0)}
    want["top"] = kl.gather(1, s.topk(3).indices).sum(-1)
    for name, value in want.items():
        torch.testing.assert_close(out.terms[name].double(), value.mean(), rtol=2e-5, atol=2e-5)


def test_candidates_top_and_a_sparse_teacher_are_tokens() -> None:
    batch = Batch()
    s = batch.hidden @ batch.weight.T
    source = hl.Linear(batch.hidden, batch.weight, vocab_ids=batch.ids)
    ids = torch.stack([batch.ids.roll(-n)[:3] for n in range(N)])
    ids[0, 1] = next(i for i in range(V) if i not in batch.ids.tolist())
    facts = hl.row_facts(source, want=("ids_logprob", "top_ids", "argmax"), ids=ids, top=3, backend=BACKEND)
    column = {int(token): c for c, token in enumerate(batch.ids)}
    for n in range(N):
        for k in range(3):
            token = int(ids[n, k])
            at = s.log_softmax(-1)[n, column[token]] if token in column else torch.full((), -torch.inf, dtype=DTYPE)
            torch.testing.assert_close(facts.ids_logprob[n, k], at)
    assert torch.equal(facts.top_ids, batch.ids[s.topk(3).indices])
    found = hl.topk(hl.Logits(s, vocab_ids=batch.ids), 2)
    assert torch.equal(found.ids, facts.top_ids[:, :2])
    teacher_source = hl.Objective(kl=hl.Term(forward_kl, tail="none"))(source, batch.targets, teacher=found)
    torch.testing.assert_close(teacher_source.loss, torch.zeros((), dtype=DTYPE), atol=1e-6, rtol=0)


def test_a_terms_own_targets_are_tokens() -> None:
    """One that the head lacks leaves the row out of that term; a target that it lacks, out of both."""
    batch = Batch()
    own = batch.ids[torch.arange(N) % U].clone()
    own[1], own[2], own[3] = -100, -100, batch.targets[4]  # no target; left out; missing
    made = hl.Objective(a=cross_entropy, b=hl.Term(cross_entropy, targets="own", reduction="token_sum"))
    weight = batch.weight.clone().requires_grad_()
    logp = (batch.hidden.double() @ weight.double().T).log_softmax(-1)
    columns = {int(x): i for i, x in enumerate(batch.ids)}
    truth = -sum(logp[n, columns[int(own[n])]] for n in batch.rows if n not in (2, 3))
    truth = truth - torch.stack([logp[n, columns[int(batch.targets[n])]] for n in batch.rows]).mean()
    for targets in (batch.targets, hl.prepare(batch.targets, vocab_ids=batch.ids)):
        source = hl.Linear(batch.hidden, weight, vocab_ids=batch.ids)
        out = made(source, targets, own=own)
        for x, y in (
            (out.loss, truth),
            *zip(*(torch.autograd.grad(z, weight, retain_graph=True) for z in (out.loss, truth))),
        ):
            torch.testing.assert_close(x.double(), y.double(), rtol=TOLERANCE, atol=TOLERANCE)
        assert hl.verify(made, source, targets, own=own).ok


@pytest.mark.parametrize("tail", ["none", "renormalise"])
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_top_columns_against_a_teacher_on_the_larger_vocabulary(kind: str, tail: str) -> None:
    """`none`: what the teacher gives them of all that it has, at two temperatures, some rows nearly nothing."""
    batch = Batch()
    u = (batch.guide @ batch.head.T).clone()
    u[0, batch.ids] -= 120  # less than the smallest number of float32
    z = (batch.hidden @ batch.weight.T).requires_grad_()
    terms = {f"t{T:g}": hl.Term(reverse_kl, top=3, tail=tail, temperature=T) for T in (1.0, 2.0)}
    objective = hl.Objective(**terms, backend=BACKEND)
    total = torch.zeros((), dtype=torch.float64)
    for T in (1.0, 2.0):
        logp = (z.double() / T).log_softmax(-1)
        at = z.topk(3).indices
        p, q = logp.gather(1, at), (u.double() / T).log_softmax(-1)[:, batch.ids].gather(1, at)
        p, q = (p, q) if tail == "none" else (p.log_softmax(-1), q.log_softmax(-1))
        total = total + (p.exp() * (p - q)).sum(-1)[batch.rows].mean()
    (want,) = torch.autograd.grad(total, z)
    eye = torch.eye(U, dtype=DTYPE)
    leaf = z.detach().clone().requires_grad_()
    head = hl.Logits(leaf, vocab_ids=batch.ids) if kind == "Logits" else hl.Linear(leaf, eye, vocab_ids=batch.ids)
    out = objective(head, batch.targets, teacher=hl.Logits(u))
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach().double(), total.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(leaf.grad.double(), want.double(), rtol=TOLERANCE, atol=TOLERANCE)
    if BACKEND == "torch":
        assert hl.verify(objective, head, batch.targets, teacher=hl.Logits(u)).ok


def test_in_one_graph() -> None:
    batch, objective = Batch(), hl.Objective(ce=cross_entropy)

    def step(hidden: Tensor) -> Tensor:
        return objective(hl.Linear(hidden, batch.weight, vocab_ids=batch.ids), batch.targets).loss

    torch.testing.assert_close(torch.compile(step, backend="eager", fullgraph=True)(batch.hidden), step(batch.hidden))
    facts = lambda x: hl.row_facts(hl.Linear(x, batch.weight, vocab_ids=batch.ids), batch.targets).logprob
    torch.testing.assert_close(torch.compile(facts, backend="eager", fullgraph=True)(batch.hidden), facts(batch.hidden))


def test_prepared_targets_in_one_graph() -> None:
    batch, objective = Batch(), hl.Objective(ce=cross_entropy)
    ids = batch.ids.clone()

    def step(hidden: Tensor, ids: Tensor, targets: Any) -> Tensor:
        return objective(hl.Linear(hidden, batch.weight, vocab_ids=ids), targets).loss

    compiled, ready = torch.compile(step, backend="eager", fullgraph=True), hl.prepare(batch.targets, vocab_ids=ids)
    want = step(batch.hidden, batch.ids, batch.targets)
    torch.testing.assert_close(compiled(batch.hidden, ids, ready), want)
    ids.copy_(ids.flip(0))  # a graph sees no version counter
    with pytest.raises((ValueError, RuntimeError), match="targets: were prepared with vocab_ids other than those"):
        compiled(batch.hidden, ids, ready)


@pytest.mark.parametrize("tail", ["none", "bucket", "renormalise"])
def test_a_teacher_next_to_a_compiled_step(tail: str) -> None:
    batch, objective = Batch(), hl.Objective(kl=hl.Term(forward_kl, tail=tail))

    def step(hidden: Tensor) -> Tensor:
        source = hl.Linear(hidden, batch.weight, vocab_ids=batch.ids)
        return objective(source, batch.targets, teacher=hl.Linear(batch.guide, batch.head)).loss

    torch.testing.assert_close(torch.compile(step, backend="eager")(batch.hidden), step(batch.hidden))


def test_token_0_is_one_that_a_head_can_lack() -> None:
    source = hl.Logits(torch.randn(2, 3), vocab_ids=torch.tensor([1, 2, 5]))
    out = hl.Objective(ce=cross_entropy)(source, torch.tensor([0, 5]))
    assert float(out.metrics["vocab_missing"]) == 0.5 and out.facts.logprob[0] == 0 != out.facts.logprob[1]


def test_the_teacher_counts_in_the_budget() -> None:
    batch = Batch()
    teacher, row = hl.Linear(batch.guide, batch.head), (V + 2 * U) * batch.head.itemsize
    objective = hl.Objective(kl=hl.Term(forward_kl, tail="none"))
    for memory in (row, row - 1):
        source = hl.Linear(batch.hidden, batch.weight, vocab_ids=batch.ids, memory=memory)
        if memory == row:
            objective(source, batch.targets, teacher=teacher)
            continue
        with pytest.raises(ValueError, match=f"memory: one row of {U} logits takes {row} bytes"):
            objective(source, batch.targets, teacher=teacher)


def test_refusals() -> None:
    batch = Batch()
    twice = batch.ids.clone()
    twice[7] = twice[2]
    with pytest.raises(ValueError, match=f"vocab_ids: wanted each token once, but rows 2 and 7 are both {twice[2]}"):
        hl.Linear(batch.hidden, batch.weight, vocab_ids=twice)
    with pytest.raises(ValueError, match="vocab_ids: wanted each token once"):  # what was refused once stays refused
        hl.Logits(batch.hidden @ batch.weight.T, vocab_ids=twice)
    with pytest.raises(ValueError, match="vocab_ids: wanted each token once"):
        hl.prepare(batch.targets, vocab_ids=twice)
    with pytest.raises(ValueError, match=r"vocab_ids: wanted one token per column, shape \(11,\), got \(10,\)"):
        hl.Linear(batch.hidden, batch.weight, vocab_ids=batch.ids[:-1])
    with pytest.raises(ValueError, match="vocab_ids: wanted tokens of .*, got -5 in row"):
        hl.Linear(batch.hidden, batch.weight, vocab_ids=batch.ids - batch.ids.min() - 5)
    source = hl.Linear(batch.hidden, batch.weight, vocab_ids=batch.ids)
    small = hl.Logits(torch.zeros(N, 12, dtype=DTYPE))
    with pytest.raises(ValueError, match="vocab_ids: row . is token .*, but teacher has 12 tokens"):
        hl.Objective(kl=forward_kl)(source, batch.targets, teacher=small)
    with pytest.raises(ValueError, match="vocab_ids: .*asks for 'targets', which would be columns of this head"):
        hl.Objective(own=lambda logprob, targets: logprob * targets)(source, batch.targets)
    for given in (hl.Logits(batch.hidden @ batch.weight.T), source):
        own = hl.Logits(batch.hidden @ batch.weight.T, vocab_ids=batch.ids)  # whose columns are tokens of their own
        with pytest.raises(ValueError, match="teacher: has vocab_ids, but a dense teacher is on the whole vocabulary"):
            hl.Objective(kl=forward_kl)(given, batch.targets.clamp(max=U - 1), teacher=own)
    wrong = batch.targets.clone()
    wrong[3] = -7
    with pytest.raises(ValueError, match="targets: wanted tokens of the whole vocabulary or -100, but row 3 has -7"):
        hl.Objective(ce=cross_entropy)(source, wrong)
    with pytest.raises(ValueError, match="targets: wanted tokens .* but row 3 has -7"):
        hl.prepare(wrong, vocab_ids=batch.ids)
    ce, prepared = hl.Objective(ce=cross_entropy), hl.prepare(batch.targets, vocab_ids=batch.ids)
    with pytest.raises(ValueError, match="targets: were prepared without vocab_ids"):
        ce(source, hl.prepare(batch.targets))
    with pytest.raises(ValueError, match="targets: were prepared with vocab_ids other than those of the source"):
        ce(hl.Linear(batch.hidden, batch.weight, vocab_ids=batch.ids.roll(1)), prepared)
    with pytest.raises(ValueError, match="targets: were prepared with vocab_ids, but the source has none"):
        ce(hl.Linear(batch.hidden, batch.weight), prepared)
    with pytest.raises(ValueError, match="vocab_ids: wanted one token per column"):
        hl.prepare(batch.targets, vocab_ids=batch.ids[None])


def test_prepared_targets_and_tokens_that_are_written_to() -> None:
    batch = Batch()
    objective = hl.Objective(ce=cross_entropy, kl=hl.Term(forward_kl, tail="renormalise"), metrics=["accuracy"])

    def call(ids: Tensor, targets: Any) -> hl.Output:
        teacher = hl.Linear(batch.guide, batch.head)
        return objective(hl.Linear(batch.hidden, batch.weight, vocab_ids=ids), targets, teacher=teacher)

    want = call(batch.ids.clone(), batch.targets)
    prepared = hl.prepare(batch.targets, vocab_ids=batch.ids)
    for way in (prepared, pickle.loads(pickle.dumps(prepared)), prepared.to("cpu")):
        out = call(batch.ids, way)
        assert torch.equal(out.loss, want.loss)
        assert {k: float(x) for k, x in out.metrics.items()} == {k: float(x) for k, x in want.metrics.items()}
    batch.ids.copy_(batch.ids.roll(1))  # whose order was kept
    with pytest.raises(ValueError, match="vocab_ids: were written to after hl.prepare read them"):
        call(batch.ids, prepared)
    source = hl.Linear(batch.hidden, batch.weight, vocab_ids=batch.ids)
    assert torch.equal(call(batch.ids, batch.targets).loss, call(batch.ids.clone(), batch.targets).loss)
    batch.ids[0] = batch.ids[1]
    with pytest.raises(ValueError, match="vocab_ids: wanted each token once"):
        call(batch.ids, batch.targets)
    with pytest.raises(ValueError, match="vocab_ids: wanted each token once"):  # a source that was right when made
        hl.Objective(ce=cross_entropy)(source, batch.targets)


def split() -> None:
    batch = Batch()
    whole = hl.Objective(ce=cross_entropy)
    want = whole(hl.Linear(batch.hidden, batch.weight, vocab_ids=batch.ids), batch.targets).loss
    start, end = (0, 6) if dist.get_rank() == 0 else (6, U)
    source = hl.Linear(
        batch.hidden, batch.weight[start:end], shard=hl.VocabShard(dist.group.WORLD, start, U), vocab_ids=batch.ids
    )
    torch.testing.assert_close(whole(source, batch.targets).loss, want, rtol=1e-10, atol=1e-10)
    # a dense teacher is refused, on every rank alike, and what the message tells to do does it
    kl, teacher = hl.Objective(kl=hl.Term(forward_kl, tail="none")), hl.Linear(batch.guide, batch.head)
    with pytest.raises(ValueError, match=r"vocab_ids: a dense teacher by a head whose .* hl.topk\(teacher, K\)"):
        kl(source, batch.targets, teacher=teacher)
    alone, top = hl.Linear(batch.hidden, batch.weight, vocab_ids=batch.ids), hl.topk(teacher, 6)
    want = kl(alone, batch.targets, teacher=top).loss
    torch.testing.assert_close(kl(source, batch.targets, teacher=top).loss, want, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(INSIDE, reason="ranks run on torch")
def test_over_ranks(ranks: Any) -> None:
    ranks(2, split)
