"""Rows that keep some columns, against dense float64 logits with nothing outside the kept ones."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from test_contract import needs_inputs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import headloss as hl
from headloss.losses import cosine, cross_entropy, dft, forward_kl, grpo, jsd, reverse_kl, tvd, z_loss

NOWHERE = -1.0e30  # of a logit that is not kept: -inf, but 0 times its gradient is 0
V, D = 29, 5
T = torch.tensor
TRANSFORM = {"temperature": 0.7, "scale": 1.3, "softcap": 4.0}


def sets(targets: Tensor, vocab: int, seed: int = 0) -> list[Tensor]:
    """Unsorted; of one column, of all, empty where the row does not count; two rows that do miss their target."""
    generator = torch.Generator().manual_seed(seed)
    missing, found = missing_of(targets), []
    for n, target in enumerate(targets.reshape(-1).tolist()):
        size = 0 if target < 0 else (3, 1, vocab, 7, 2, 1, 12, 1)[n % 8]
        own = torch.randperm(vocab, generator=generator)[:size]
        if n in missing:
            own = own[own != target] if size > 1 else T([(target + 1) % vocab])
        elif size and not (own == target).any():
            own[0] = target
        found.append(own)
    return found


def missing_of(targets: Tensor) -> list[int]:
    return (targets.reshape(-1) >= 0).nonzero()[[2, 5], 0].tolist()


def csr(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0)


def mask_of(rows: list[Tensor], targets: Tensor, vocab: int) -> Tensor:
    """What is kept, targets included."""
    mask = torch.zeros(len(rows), vocab, dtype=torch.bool)
    for n, own in enumerate(rows):
        mask[n, own] = True
    counted = targets.reshape(-1) >= 0
    mask[counted, targets.reshape(-1)[counted]] = True
    return mask


@dataclass(frozen=True)
class Keeping(oracle.Problem):
    mask: Tensor | None = None

    def logits(self, leaves: Any) -> Tensor:
        assert self.mask is not None
        return super().logits(leaves).masked_fill(~self.mask[self.targets.reshape(-1) >= 0], NOWHERE)


def _mean(d: oracle.Dense) -> Tensor:
    kept = d.s_RV > NOWHERE / 10
    return torch.where(kept, d.logp_RV, 0.0).sum(-1) / kept.sum(-1)


LOSSES = [n for n, fn in oracle.LOSSES.items() if not fn.__code__.co_varnames[0].startswith(("logit_", "top_"))]


@pytest.mark.parametrize("turn, name", [*enumerate(LOSSES)])
def test_every_loss(turn: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(oracle.FACTS, "mean_logprob", _mean)
    fn, kind = oracle.LOSSES[name], ("Linear", "Logits")[turn % 2]
    plain = oracle.problem_for(fn, kind, (13,))
    rows = sets(plain.targets, plain.vocab)
    support = hl.Support.from_csr(*csr(rows))
    held = Keeping(**vars(plain), mask=mask_of(rows, plain.targets, plain.vocab))
    objective = hl.Objective(term=fn, metrics=["entropy", "accuracy", "sum_p2"], backend="torch")
    own = needs_inputs(objective.terms["term"], held)
    want = oracle.answer(objective, own)
    direct = turn // 2 % 2 and name != "value_loss"  # which has no gradient but that of an input
    how = "forward_backward" if direct else "autograd"
    got = oracle.run(objective, own, memory=800, how=how, support=support)
    counted = int((plain.targets >= 0).sum())
    assert got.metrics.pop("support_missing") == pytest.approx(2 / counted)
    oracle.check(got, want, what=how)


@dataclass
class Batch:
    """Rows with a head, in float64, and what they keep."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    rows: list[Tensor]

    @property
    def support(self) -> hl.Support:
        return hl.Support.from_csr(*csr(self.rows))

    @property
    def mask(self) -> Tensor:
        return mask_of(self.rows, self.targets, V)

    def leaves(self) -> list[Tensor]:
        return [x.clone().requires_grad_() for x in (self.hidden, self.weight, self.bias)]

    def kept(self, leaves: list[Tensor], transform: dict[str, Any], mask: Tensor | None = None) -> Tensor:
        """s of every row, NOWHERE outside what it keeps."""
        z = torch.nn.functional.linear(*leaves) * transform.get("scale", 1.0)
        cap = transform.get("softcap")
        z = z if cap is None else cap * torch.tanh(z / cap)
        T = transform.get("temperature", 1.0)
        return z.masked_fill(~(self.mask if mask is None else mask), NOWHERE) / (
            T[:, None] if isinstance(T, Tensor) else T
        )


@pytest.fixture
def batch() -> Batch:
    g = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, D, generator=g, dtype=torch.float64) for n in (11, V))
    targets = torch.randint(V, (11,), generator=g)
    targets[[0, 6]] = -100
    return Batch(hidden, weight, torch.randn(V, generator=g, dtype=torch.float64), targets, sets(targets, V))


def same(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def as_source(kind: str, leaves: list[Tensor], **more: Any) -> Any:
    if kind == "Logits":
        more.pop("memory", None)
        return hl.Logits(torch.nn.functional.linear(*leaves), **more)
    return hl.Linear(*leaves, **more)


WANT = ("lse", "logprob", "mean_logprob", "entropy", "sum_p2", "max_logprob", "argmax")


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("transform", [{}, TRANSFORM, {"temperature": torch.linspace(0.5, 2, 11).double()}], ids=str)
def test_facts(batch: Batch, kind: str, transform: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, other = batch.leaves(), batch.leaves()
    source = as_source(kind, leaves, **transform, memory=700)
    facts = hl.row_facts(source, batch.targets, WANT, support=batch.support)
    valid = batch.targets >= 0
    dense = oracle.Dense(batch.kept(other, transform)[valid], batch.targets[valid])
    monkeypatch.setitem(oracle.FACTS, "mean_logprob", _mean)
    total = want = torch.zeros((), dtype=torch.float64)
    for i, name in enumerate(WANT):
        true = oracle.FACTS[name](dense)
        same(facts[name][valid].detach(), true.detach())
        assert not facts[name][~valid].any()
        if true.requires_grad:
            total, want = total + (i + 1) * facts[name].cos().sum(), want + (i + 1) * true.cos().sum()
    for x, y in zip(torch.autograd.grad(total, leaves), torch.autograd.grad(want, other), strict=True):
        same(x, y)


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("fn", [forward_kl, reverse_kl, jsd, tvd])
def test_a_dense_teacher_is_renormalised_over_what_a_row_keeps(batch: Batch, kind: str, fn: Any) -> None:
    leaves, other = batch.leaves(), batch.leaves()
    teacher = Batch(batch.hidden.flip(0) * 2, batch.weight.flip(0), batch.bias, batch.targets, batch.rows)
    objective = hl.Objective(kl=hl.Term(fn, reduction="token_sum"), metrics=["teacher_agreement"])
    source = as_source(kind, leaves, **TRANSFORM, memory=700)
    told = as_source(kind, [x.detach() for x in teacher.leaves()], **TRANSFORM)
    out = objective(source, batch.targets, support=batch.support, teacher=told)
    valid, mask = batch.targets >= 0, batch.mask
    s, u = batch.kept(other, TRANSFORM)[valid], teacher.kept(teacher.leaves(), TRANSFORM, mask)[valid].detach()
    logp, logq = s.log_softmax(-1), u.log_softmax(-1)
    want = torch.where(mask[valid], fn(logp.clamp(min=-1e4), logq.clamp(min=-1e4)), 0.0).sum()
    same(out.loss, want)
    assert float(out.metrics["teacher_agreement"]) == float((s.argmax(-1) == u.argmax(-1)).double().mean())
    for x, y in zip(torch.autograd.grad(out.loss, leaves), torch.autograd.grad(want, other), strict=True):
        same(x, y)


@pytest.mark.parametrize("tail", ["bucket", "none", "renormalise"])
def test_ids_of_a_sparse_teacher_that_are_not_kept_are_left_out(batch: Batch, tail: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(V, generator=generator)[:6] for _ in range(11)])
    logprobs = torch.randn(11, 6, generator=generator, dtype=torch.float64).log_softmax(-1) - 0.2
    objective = hl.Objective(kl=hl.Term(forward_kl, tail=tail))
    leaves, other = batch.leaves(), batch.leaves()
    out = objective(hl.Linear(*leaves), batch.targets, support=batch.support, teacher=hl.Sparse(ids, logprobs))
    inside = ids.masked_fill(~batch.mask.gather(1, ids), -1)
    assert (inside < 0).any() and (inside >= 0).any()
    dense = batch.kept(other, {})
    want = objective(hl.Logits(dense), batch.targets, teacher=hl.Sparse(inside, logprobs))
    same(out.loss, want.loss)
    for x, y in zip(torch.autograd.grad(out.loss, leaves), torch.autograd.grad(want.loss, other), strict=True):
        same(x, y)


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_term_on_the_whole_vocabulary_beside_one_on_kept_columns(batch: Batch, kind: str) -> None:
    inputs = {"advantage": torch.linspace(-1, 1, 11).double(), "old_logprob": -torch.linspace(0, 1, 11).double()}
    teacher = hl.Logits(torch.randn(11, V - 4, dtype=torch.float64))  # narrower than what a row may keep
    kl = {"kl": hl.Term(forward_kl, weight=0.3, support="all"), "z": hl.Term(z_loss, weight=0.1, support="all")}
    both = hl.Objective(rl=grpo, **kl, metrics=["entropy"])
    leaves, other = batch.leaves(), batch.leaves()
    source = as_source(kind, leaves)
    out = both(source, batch.targets, support=batch.support, teacher=teacher, **inputs)
    own = as_source(kind, other)
    policy = hl.Objective(rl=grpo, metrics=["entropy"])(own, batch.targets, support=batch.support, **inputs)
    whole = hl.Objective(**kl)(own, batch.targets, teacher=teacher)
    same(out.loss, policy.loss + whole.loss)
    same(out.terms, {**policy.terms, **whole.terms})
    assert {n: float(m) for n, m in out.metrics.items()} == {
        n: float(m) for n, m in {**policy.metrics, **whole.metrics}.items()
    }
    same(out.facts.logprob, policy.facts.logprob)
    for x, y in zip(
        torch.autograd.grad(out.loss, leaves), torch.autograd.grad(policy.loss + whole.loss, other), strict=True
    ):
        same(x, y)
    off = both(source, batch.targets, support=batch.support, teacher=teacher, weights={"kl": 0, "z": 0}, **inputs)
    same(off.loss, policy.loss)
    direct = both.forward_backward(source, batch.targets, support=batch.support, teacher=teacher, **inputs)
    same(direct.loss, out.loss.detach())


def test_the_ways_to_say_it(batch: Batch) -> None:
    ids, offsets = csr(batch.rows)
    padded = torch.nn.utils.rnn.pad_sequence(batch.rows, batch_first=True, padding_value=-1)
    padded = padded[:, torch.randperm(padded.shape[1])]
    given = torch.zeros(11, V, dtype=torch.bool)
    for n, own in enumerate(batch.rows):
        given[n, own] = True
    ways = [hl.Support.from_csr(ids, offsets), hl.Support.from_padded(padded), hl.Support.from_mask(given)]
    ways.append(pickle.loads(pickle.dumps(ways[1])).to("cpu"))
    head = hl.FusedLMHead(D, V, bias=True, dtype=torch.float64)
    head.weight.data, head.bias.data = batch.weight, batch.bias
    objective = hl.Objective(ce=cross_entropy)
    losses = [objective(hl.Linear(*batch.leaves()), batch.targets, support=way).loss for way in ways]
    losses.append(objective(hl.Linear(*batch.leaves()), hl.prepare(batch.targets, support=ways[0])).loss)
    inputs = hl.Inputs(support=ways[0])
    losses.append(head(batch.hidden, targets=batch.targets, objective=objective, inputs=inputs).loss)
    shaped = hl.Linear(batch.hidden[1:].view(2, 5, D), batch.weight, batch.bias)
    flat = hl.Support.from_csr(ids, offsets[1:])
    assert all(torch.equal(x, losses[0]) for x in losses)
    same(objective(shaped, batch.targets[1:].view(2, 5), support=flat).loss, losses[0])


def test_what_it_was_made_of_is_written_to(batch: Batch) -> None:
    """It says what the tensors said when it was made, or the call says that they have changed."""
    ids, offsets = csr(batch.rows)
    given = torch.zeros(11, V, dtype=torch.bool)
    padded = torch.nn.utils.rnn.pad_sequence(batch.rows, batch_first=True, padding_value=-1)
    ways = {
        "ids": (hl.Support.from_csr(ids, offsets), lambda: ids.copy_(ids.flip(0))),
        "offsets": (hl.Support.from_csr(ids.clone(), offsets), lambda: offsets.zero_()),
        "padded": (hl.Support.from_padded(padded), lambda: padded[0].fill_(-1)),
        "mask": (hl.Support.from_mask(given.index_fill(1, T([3]), True)), lambda: None),
    }
    objective = hl.Objective(ce=cross_entropy)
    for name, (support, write) in ways.items():
        call = lambda support=support: objective(hl.Linear(*batch.leaves()), batch.targets, support=support)
        want, sent = call().loss, pickle.loads(pickle.dumps(support))
        write()
        if name != "mask":  # nobody has it any more
            with pytest.raises(ValueError, match="(ids|offsets): was written to after hl.Support was made from it"):
                call()
            with pytest.raises(ValueError, match="was written to after hl.Support was made"):
                hl.prepare(batch.targets, support=support)
        assert torch.equal(call(sent).loss, want)
    held = hl.Support.from_mask(given)
    given[0, 0] = True
    with pytest.raises(ValueError, match="mask: was written to"):
        held.check_written()


def test_weights_of_classes_in_a_term_on_the_whole_vocabulary(batch: Batch) -> None:
    w = torch.rand(V).double()
    ce = hl.Term(cross_entropy, support="all", label_smoothing=0.2)
    leaves, other = batch.leaves(), batch.leaves()
    out = hl.Objective(ce=ce, d=dft)(hl.Linear(*leaves), batch.targets, support=batch.support, class_weight=w)
    valid = batch.targets >= 0
    z, y = torch.nn.functional.linear(*other), batch.targets
    want = torch.nn.functional.cross_entropy(z[valid], y[valid], w, reduction="sum", label_smoothing=0.2) / valid.sum()
    logp = batch.kept(other, {})[valid].log_softmax(-1).gather(1, y[valid, None])
    want = want - (logp.detach().exp() * logp).mean()
    same(out.loss, want)
    for x, y in zip(torch.autograd.grad(out.loss, leaves), torch.autograd.grad(want, other), strict=True):
        same(x, y)


def test_odd_shapes(batch: Batch) -> None:
    nothing = hl.Support.from_padded(torch.zeros(3, 0, dtype=torch.long))
    assert nothing.rows == 3 and nothing.known().total == 0
    out = hl.Objective(ce=cross_entropy)(hl.Logits(torch.randn(3, V)), torch.full((3,), -100), support=nothing)
    assert out.loss == 0
    meta = hl.Linear(batch.hidden.to("meta"), batch.weight.to("meta"))
    plan = hl.Objective(ce=cross_entropy).explain(meta, batch.targets.to("meta"), support=batch.support)
    assert "kept logits" in str(plan)


def test_what_a_later_call_finds_ready(batch: Batch) -> None:
    """Where columns stand is found once for a support and its targets, and anew for others or after a write."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    objective, support, found = hl.Objective(ce=cross_entropy), batch.support, []

    def grads(targets: Any, **more: Any) -> list[Tensor]:
        leaves = batch.leaves()
        return [*torch.autograd.grad(objective(hl.Linear(*leaves), targets, **more).loss, leaves)]

    prepared = hl.prepare(batch.targets.clone(), support=batch.support)
    for way in (batch.targets, prepared, pickle.loads(pickle.dumps(prepared)), prepared.to("cpu")):
        more = {} if isinstance(way, hl.Prepared) else {"support": support}
        first = grads(way, **more)
        with Watch():
            again = grads(way, **more)
        assert found and "aten::searchsorted" not in found
        for x, y, z in zip(first, again, grads(batch.targets.clone(), support=batch.support), strict=True):
            assert torch.equal(x, y) and torch.equal(x, z)
        found.clear()
    mine = batch.targets.clone()
    batch.hidden[8] = torch.nan  # of a row that is ignored from now on, though it keeps columns
    for turn in range(4):
        mine = mine.clone() if turn == 1 else mine
        mine.copy_(mine.roll(3))
        mine[[0, 6, 8]], mine[[1, 3]] = -100, torch.tensor([4, 9])
        more = {"host_read": False} if turn % 2 else {}
        for x, y in zip(grads(mine, support=support, **more), grads(mine, support=batch.support), strict=True):
            assert torch.equal(x, y) and x.isfinite().all()


def test_a_row_of_one_column_is_not_even_read(batch: Batch) -> None:
    single = torch.tensor([len(x) == 1 for x in batch.rows]) & (batch.targets >= 0)
    single[missing_of(batch.targets)] = False  # there the target makes two
    assert single.any()
    batch.hidden[single] = torch.nan
    hidden, weight, bias = batch.leaves()
    out = hl.Objective(ce=cross_entropy, metrics=["entropy"])(
        hl.Linear(hidden, weight, bias), batch.targets, support=batch.support
    )
    out.loss.backward()
    assert not out.facts.logprob[single].any() and not hidden.grad[single].any()
    assert out.loss.isfinite() and weight.grad.isfinite().all() and hidden.grad.isfinite().all()


def test_nothing_else_is_made(batch: Batch) -> None:
    """No matrix product, and no buffer of rows x vocabulary."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func._schema.name not in ("aten::mm", "aten::addmm", "aten::matmul", "aten::bmm"), func
            out = func(*args, **(kwargs or {}))
            assert not (isinstance(out, Tensor) and tuple(out.shape) == (11, V)), func
            return out

    rows = [x[:7] if len(x) == V else x for x in batch.rows]
    objective, support = hl.Objective(ce=cross_entropy, z=z_loss), hl.Support.from_csr(*csr(rows))
    leaves = batch.leaves()
    with Watch():
        objective(hl.Linear(*leaves), batch.targets, support=support).loss.backward()


def test_logits_that_are_overwritten(batch: Batch) -> None:
    logits = torch.nn.functional.linear(batch.hidden, batch.weight, batch.bias)
    plain, mine = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    objective = hl.Objective(ce=cross_entropy)
    objective(hl.Logits(plain), batch.targets, support=batch.support).loss.backward()
    objective(
        hl.Logits(mine.clone(), inplace=True), batch.targets, support=batch.support, host_read=False
    ).loss.backward()
    same(mine.grad, plain.grad)


def test_half_precision_is_nearer_than_eager(batch: Batch) -> None:
    def loss(leaves: list[Tensor]) -> Tensor:
        z = torch.nn.functional.linear(*leaves).masked_fill(~batch.mask, -torch.inf)[batch.targets >= 0]
        return torch.nn.functional.cross_entropy(
            z.to(torch.promote_types(z.dtype, torch.float32)), batch.targets[batch.targets >= 0]
        )

    half = [x.bfloat16() for x in (batch.hidden, batch.weight, batch.bias)]
    leaves = lambda dtype: [x.to(dtype).detach().clone().requires_grad_() for x in half]
    true, eager, ours = leaves(torch.float64), leaves(torch.bfloat16), leaves(torch.bfloat16)
    want, plain = loss(true), loss(eager)
    out = hl.Objective(ce=cross_entropy)(hl.Linear(*ours), batch.targets, support=batch.support)
    for x in (want, plain, out.loss):
        x.backward()
    assert (out.loss - want).abs() <= (plain - want).abs()
    for x, y, z in zip(ours, eager, true, strict=True):
        assert (x.grad - z.grad).norm() <= (y.grad - z.grad).norm() + 1e-9


def test_between_two_graphs(batch: Batch) -> None:
    objective, support = hl.Objective(ce=cross_entropy), batch.support

    def step(hidden: Tensor) -> Tensor:
        return objective(hl.Linear(hidden * 2, batch.weight), batch.targets, support=support).loss * 3

    same(torch.compile(step, backend="eager")(batch.hidden), step(batch.hidden))


def test_what_a_call_will_do(batch: Batch) -> None:
    objective = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, support="all"))
    plan = objective.explain(hl.Linear(*batch.leaves()), batch.targets, support=batch.support)
    assert (plan.gemms, plan.sweeps, plan.whole.gemms) == (0, 0, 3)
    assert "kept logits of 9 rows x 32" in str(plan) and "and on the whole vocabulary, Linear" in str(plan)


def margin(top_logprob: Tensor) -> Tensor:
    return top_logprob[:, 1] - top_logprob[:, 0]


def not_zero(logp: Tensor, logq: Tensor) -> Tensor:
    return (logp - logq) ** 2


REFUSED = {
    "falling offsets": (lambda b: hl.Support.from_csr(T([1, 2, 3]), T([0, 2, 1, 3])), "row 1 goes from 2 to 1; wanted"),
    "offsets beyond": (lambda b: hl.Support.from_csr(T([1, 2, 3]), T([0, 2, 4])), "offsets: row 1 goes from 2 to 4"),
    "offsets before the end": (
        lambda b: hl.Support.from_csr(T([1, 2, 3]), T([0, 2])),
        "row 0 goes from 0 to 2; wanted",
    ),
    "repeated": (lambda b: hl.Support.from_csr(T([1, 2, 3, 2]), T([0, 1, 4])), "ids: row 1 names column 2"),
    "far beyond": (lambda b: hl.Support.from_csr(T([1 << 33, 1 << 34]), T([0, 2])), "row 0 .* or one beyond; no vocab"),
    "negative": (lambda b: hl.Support.from_padded(T([[1, -1], [-3, 2]])), "ids: row 1 names column -3"),
    "beyond": (lambda b: call(b, support=replaced(b, 3, T([1, V]))), rf"support: row 3 names column {V}"),
    "empty": (lambda b: call(b, support=replaced(b, 3, T([]).long())), "support: row 3 counts and keeps no columns"),
    "empty, prepared": (lambda b: hl.prepare(b.targets, support=replaced(b, 3, T([]).long())), "support: row 3 counts"),
    "rows": (lambda b: call(b, support=hl.Support.from_padded(T([[1]]))), "support: has 1 rows, the source has 11"),
    "a mask": (lambda b: call(b, support=b.mask), "support: wanted hl.Support, got Tensor"),
    "a mask, prepared": (lambda b: hl.prepare(b.targets, support=b.mask), "support: wanted hl.Support, got Tensor"),
    "empty, without targets": (
        lambda b: hl.row_facts(hl.Linear(*b.leaves()), want="entropy", support=b.support),
        "support: row 0 keeps no columns; wanted at least one, since without targets every row counts",
    ),
    "empty, explained": (
        lambda b: hl.Objective(x=cross_entropy).explain(
            hl.Linear(*b.leaves()), b.targets, support=replaced(b, 3, T([]).long())
        ),
        "support: row 3 counts and keeps no columns",
    ),
    "a meta mask": (lambda b: hl.Support.from_mask(b.mask.to("meta")), "mask: is on meta"),
    "the likeliest": (
        lambda b: call(b, hl.Term(margin, top=2)),
        "support: term 'x' has top=, but a row may keep fewer columns",
    ),
    "a metric of the likeliest": (
        lambda b: hl.Objective(x=cross_entropy, metrics=[hl.Term(margin, top=2)])(
            hl.Linear(*b.leaves()), b.targets, support=b.support
        ),
        "support: metric 'margin' has top=",
    ),
    "weights of classes": (
        lambda b: call(b, class_weight=torch.ones(V).double()),
        "class_weight: support= leaves columns out of the softmax of term 'x'.*support=\"all\"",
    ),
    "twice": (
        lambda b: hl.Objective(ce=cross_entropy)(
            hl.Linear(*b.leaves()), hl.prepare(b.targets, support=b.support), support=b.support
        ),
        "support: given both",
    ),
    "own targets": (
        lambda b: call(b, hl.Term(cross_entropy, targets="own"), own=b.targets),
        "support: term 'x' has targets of its own",
    ),
    "a term's word": (lambda b: hl.Term(cross_entropy, support="some"), 'support: wanted "all"'),
    "candidates": (
        lambda b: hl.row_facts(
            hl.Linear(*b.leaves()), b.targets, ("ids_logprob",), ids=T([[28]] * 11), support=replaced(b, 3, T([1]))
        ),
        "ids: row 1 names a column that its support",
    ),
    "a divergence of nothing": (
        lambda b: call(b, not_zero, teacher=hl.Logits(torch.randn(11, V).double())),
        "is not 0 where both",
    ),
    "logits themselves": (
        lambda b: call(b, cosine, teacher=hl.Logits(torch.randn(11, V).double())),
        "support: 'logit_dot' is a fact of logits themselves",
    ),
    "a narrow teacher": (
        lambda b: call(b, forward_kl, teacher=hl.Logits(torch.randn(11, 9).double())),
        "teacher: has 9 columns",
    ),
    "both in place": (
        lambda b: hl.Objective(x=cross_entropy, y=hl.Term(z_loss, support="all"))(
            hl.Logits(torch.randn(11, V), inplace=True), b.targets, support=b.support
        ),
        "inplace: the gradient of kept",
    ),
}


def call(b: Batch, term: Any = cross_entropy, support: Any = None, **more: Any) -> Any:
    support = b.support if support is None else support
    return hl.Objective(x=term)(hl.Linear(*b.leaves()), b.targets, support=support, **more)


def replaced(b: Batch, row: int, own: Tensor) -> hl.Support:
    return hl.Support.from_csr(*csr([*b.rows[:row], own, *b.rows[row + 1 :]]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(batch: Batch, name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make(batch)
