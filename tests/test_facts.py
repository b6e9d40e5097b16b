"""Facts against dense log_softmax, the merge of partial sweeps, and the gradients of `row_facts`."""

from __future__ import annotations

import itertools
import math
from importlib import import_module
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.facts import CONSTANT, NEEDS_TARGET, Fact, Moments, Partial, Want, finish, merge
from headloss.nested import nest

backend = import_module("headloss.backends.torch")  # `headloss.backends` has torch itself under that name

STUDENT = ("lse", "logprob", "mean_logprob", "entropy", "sum_p2", "max_logprob", "argmax", "min_logit")
SHIFTED = ("lse", "min_logit")  # change by as much as all logits; the others do not change
SMOOTH = tuple(f for f in STUDENT if f not in CONSTANT)


def dense(problem: oracle.Problem, temperature: float | None = None) -> dict[str, Tensor]:
    v = oracle.view(problem, problem.tensors, {})
    out = {}
    for name in STUDENT:
        x = oracle.FACTS[name](v.softmax(temperature))
        out[name] = torch.zeros(problem.targets.numel(), dtype=x.dtype)
        out[name][v.valid] = x
        out[name] = out[name].view(problem.shape)
    return out


@pytest.mark.parametrize("peaked", [False, True])
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("host_read", [True, False])
def test_facts(kind: str, peaked: bool, host_read: bool) -> None:
    row_T = torch.rand(3, 7, dtype=torch.float64) + 0.5
    for transform in ({}, {"temperature": 0.7}, {"scale": 0.4, "softcap": 7.0, "temperature": row_T}):
        problem = oracle.make(kind, (3, 7), 29, peaked=peaked, transform=transform)
        source = problem.source(problem.tensors, memory=problem.budget(4))
        facts = hl.row_facts(source, problem.targets, [*STUDENT, *((f, 2.5) for f in STUDENT)], host_read=host_read)
        assert len(facts) == 2 * len(STUDENT)
        for name in STUDENT:
            for key, T in ((name, None), ((name, 2.5), 2.5)):
                want = dense(problem, T)[name]
                assert facts[key].shape == problem.shape
                torch.testing.assert_close(facts[key], want, rtol=1e-12, atol=1e-12)


def test_only_what_is_asked_for() -> None:
    """No target, no maximum's place, no second moment is computed that nobody wants."""
    partial = backend.sums(torch.randn(4, 9), None, Want([Fact("lse")]), [1.0])
    assert partial.argmax is None and partial.target is None and partial.total is None
    assert partial.moments[0].X is None and partial.moments[0].Q is None
    facts = hl.row_facts(hl.Logits(torch.randn(4, 9)), None, ("lse",))
    assert list(facts) == ["lse"]
    with pytest.raises(AttributeError, match="entropy"):
        _ = facts.entropy


def test_without_targets() -> None:
    problem = oracle.make("Linear", (11,), 13, ignored=0.0)
    leaves = problem.leaves()
    free = [f for f in STUDENT if f not in NEEDS_TARGET]
    facts = hl.row_facts(problem.source(leaves), want=free)
    for name in free:
        torch.testing.assert_close(facts[name].detach(), dense(problem)[name], rtol=1e-12, atol=1e-12)
    (facts.entropy.sum() + facts.lse.sum()).backward()
    assert leaves["weight"].grad is not None
    out = hl.Objective(z=hl.losses.z_loss, h=hl.losses.entropy_bonus)(problem.source(problem.leaves()))
    torch.testing.assert_close(out.terms["h"], -dense(problem)["entropy"].mean())


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("fact", SMOOTH)
def test_gradcheck(kind: str, fact: str) -> None:
    """Every fact at two temperatures, through scale and softcap, with ignored rows."""
    row_T = torch.rand(5, dtype=torch.float64) + 0.5
    for transform in ({}, {"temperature": row_T, "scale": -0.7, "softcap": 2.0}):
        problem = oracle.make(kind, (5,), 7, hidden=3, transform=transform, num_segments=1, bad=False)
        problem.targets[1] = -100
        names = list(problem.tensors)

        def both(*tensors: Tensor) -> Any:
            source = problem.source(dict(zip(names, tensors)), memory=problem.budget(2))
            facts = hl.row_facts(source, problem.targets, (fact, (fact, 3.0)))
            return facts[fact], facts[fact, 3.0]

        assert torch.autograd.gradcheck(both, tuple(problem.leaves().values()), eps=1e-6, atol=1e-7)


def test_constant_facts_carry_no_gradient() -> None:
    logits = torch.randn(4, 9, requires_grad=True)
    facts = hl.row_facts(hl.Logits(logits), None, ("lse", "argmax", "max_logprob"))
    assert facts.lse.requires_grad and not facts.argmax.requires_grad and not facts.max_logprob.requires_grad
    assert facts.argmax.dtype == torch.long


def test_backward_is_once_differentiable() -> None:
    logits = torch.randn(4, 9, requires_grad=True)
    facts = hl.row_facts(hl.Logits(logits), None, ("lse",))
    (grad,) = torch.autograd.grad(facts.lse.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(grad.sum(), logits)


# Numerics


@pytest.mark.parametrize("shift", [-1e4, -200.0, 200.0, 1e4])
def test_a_shift_of_all_logits_changes_only_facts_of_logits(shift: float) -> None:
    problem = oracle.make("Logits", (9,), 41, peaked=False, ignored=0.0)
    moved = oracle.replace(problem, tensors={"logits": problem.tensors["logits"] + shift})
    a = hl.row_facts(problem.source(problem.tensors), problem.targets, STUDENT)
    b = hl.row_facts(moved.source(moved.tensors), problem.targets, STUDENT)
    for name in STUDENT:
        offset = shift if name in SHIFTED else 0
        torch.testing.assert_close(b[name], a[name] + offset, rtol=1e-10, atol=1e-10)


def test_float32_entropy_survives_an_offset() -> None:
    """Uncentred sums lose three digits here: with logits offset by 200, sum p z cancels against lse."""
    torch.manual_seed(1)
    exact = torch.randint(-(2**12), 2**12, (6, 4096)) / 1024.0  # the offset rounds nothing away
    facts = hl.row_facts(hl.Logits((exact + 200).float()), None, ("entropy", "lse", "sum_p2"))
    logp = exact.double().log_softmax(-1)
    want = -(logp.exp() * logp).sum(-1)
    assert ((facts.entropy.double() - want) / want).abs().max() < 2e-6
    assert ((facts.sum_p2.double() / logp.exp().square().sum(-1)) - 1).abs().max() < 1e-5


def test_all_logits_far_below_zero() -> None:
    """A running maximum that starts at 0 instead of -inf gives +inf here."""
    logits = torch.randn(3, 17) - 500
    facts = hl.row_facts(hl.Logits(logits), torch.tensor([1, 2, 3]), ("lse", "logprob"))
    torch.testing.assert_close(facts.lse, logits.logsumexp(-1))
    torch.testing.assert_close(facts.logprob, logits.log_softmax(-1)[range(3), [1, 2, 3]])


def test_confident_tokens_keep_their_digits() -> None:
    """logprob of a sure token is -e^-20, not 0: `lse - z_y` would round it away at an offset."""
    logits = torch.zeros(1, 2, dtype=torch.float32)
    logits[0, 0] = 20.0
    for offset in (0.0, 64.0):
        fact = hl.row_facts(hl.Logits(logits + offset), torch.tensor([0]), ("max_logprob",))
        assert fact.max_logprob.item() == pytest.approx(0.0, abs=1e-7)
    leaf = logits.double().requires_grad_()
    facts = hl.row_facts(hl.Logits(leaf), torch.tensor([0]), ("logprob",))
    facts.logprob.sum().backward()
    p = math.exp(-20) / (1 + math.exp(-20))
    assert facts.logprob.item() == pytest.approx(-math.log1p(math.exp(-20)), rel=1e-6)
    torch.testing.assert_close(leaf.grad, torch.tensor([[p, -p]], dtype=torch.float64), rtol=1e-6, atol=0)


def test_label_smoothing_with_a_wide_gap() -> None:
    """A gap of 120 nats overflows float32's exp; the smoothed loss stays finite and right."""
    logits = torch.randn(4, 11)
    logits[:, 3] += 120
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    targets = torch.tensor([3, 1, 3, 2])
    out = hl.Objective(ce=hl.Term(hl.losses.cross_entropy, label_smoothing=0.1))(hl.Logits(leaf), targets)
    out.loss.backward()
    want = torch.nn.functional.cross_entropy(exact, targets, label_smoothing=0.1)
    want.backward()
    torch.testing.assert_close(out.loss.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["some columns", "all but the target"])
@pytest.mark.parametrize("T", [1.0, 0.5])
def test_masked_vocabulary(kind: str, T: float) -> None:
    """-inf logits: entropy without 0 * -inf, gradients without NaN."""
    torch.manual_seed(3)
    logits = torch.randn(6, 19, dtype=torch.float64)
    targets = torch.arange(6)
    logits[:, 7:] = -math.inf
    if kind == "all but the target":
        logits[2] = -math.inf
        logits[2, 2] = 0.3
    leaf = logits.clone().requires_grad_()
    want = ("lse", "logprob", "entropy", "sum_p2", "max_logprob", "argmax")
    facts = hl.row_facts(hl.Logits(leaf, temperature=T), targets, want)
    ours = facts.lse + 2 * facts.logprob + 3 * facts.entropy + 5 * facts.sum_p2
    ours.sum().backward()
    exact = logits[:, :7].clone().requires_grad_()  # the same softmax without the masked columns
    d = oracle.Dense(exact / T, targets)
    for name in want:
        torch.testing.assert_close(facts[name].detach(), oracle.FACTS[name](d).detach())
    finite = logits[:, :7].isfinite()
    dense_ = oracle.FACTS
    total = dense_["lse"](d) + 2 * dense_["logprob"](d) + 5 * dense_["sum_p2"](d)
    if kind == "some columns":
        total = total + 3 * dense_["entropy"](d)
        total.sum().backward()
        torch.testing.assert_close(leaf.grad[:, :7][finite], exact.grad[finite])
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[:, 7:] == 0).all()


def test_masked_target_is_minus_infinity() -> None:
    logits = torch.randn(2, 5)
    logits[0, 3] = -math.inf
    facts = hl.row_facts(hl.Logits(logits), torch.tensor([3, 3]), ("logprob", "mean_logprob"))
    assert facts.logprob[0] == -math.inf and facts.mean_logprob[0] == -math.inf
    assert facts.logprob[1].isfinite() and facts.mean_logprob[1].isfinite()


def test_row_of_minus_infinity_stays_alone() -> None:
    """A row whose every logit is -inf has lse -inf, and neither NaN nor a word in the others' gradients."""
    logits = torch.randn(3, 7)
    logits[1] = -math.inf
    leaf = logits.requires_grad_()
    facts = hl.row_facts(hl.Logits(leaf), None, ("lse", "entropy", "sum_p2", "max_logprob"))
    assert facts.lse[1] == -math.inf
    assert not any(facts[f].isnan().any() for f in facts)
    (facts.lse[[0, 2]].sum() + facts.entropy.sum() + facts.sum_p2.sum()).backward()
    assert leaf.grad.isfinite().all() and (leaf.grad[1] == 0).all()


def test_low_precision_facts_are_float32() -> None:
    logits = torch.randn(4, 9)
    for dtype in (torch.bfloat16, torch.float16):
        facts = hl.row_facts(hl.Logits(logits.to(dtype)), torch.arange(4), STUDENT)
        assert {x.dtype for n, x in facts.items() if n != "argmax"} == {torch.float32}
        want = logits.to(dtype).double().logsumexp(-1)
        torch.testing.assert_close(facts.lse.double(), want, rtol=1e-6, atol=1e-6)


# The merge


TEMPERATURES: list[float | None] = [None, 0.5]
WANT = Want([Fact(f, T) for f in STUDENT for T in TEMPERATURES])


def split(logits: Tensor, targets: Tensor, cuts: list[int]) -> list[Partial]:
    edges = [0, *cuts, logits.shape[-1]]
    return [backend.sums(logits[:, a:b], targets, WANT, [1.0, 0.5], start=a) for a, b in itertools.pairwise(edges)]


def stack(parts: list[Partial]) -> Partial:
    return nest(parts[0], lambda *xs: torch.stack(xs), *parts[1:])


def fold(parts: list[Partial]) -> Partial:
    return merge(stack(parts), [1.0, 0.5])


def facts_of(partial: Partial, vocab: int) -> dict[Fact, Tensor]:
    return finish(partial, WANT, [1.0, 0.5], vocab)[0]


def same(a: Partial, b: Partial, vocab: int, finite: bool = True) -> None:
    got, want = facts_of(a, vocab), facts_of(b, vocab)
    for fact in WANT.facts:
        torch.testing.assert_close(got[fact], want[fact], rtol=1e-12, atol=1e-12, msg=lambda m: f"{fact}: {m}")
        assert not got[fact].isnan().any(), fact


@pytest.mark.parametrize("seed", range(8))
def test_merge_of_any_split(seed: int) -> None:
    torch.manual_seed(seed)
    V = int(torch.randint(1, 30, ()))
    logits = 8 * torch.randn(5, V, dtype=torch.float64) + 300 * torch.randn(())
    if seed % 2:
        logits[1, : V // 2] = -math.inf
        logits[2] = -math.inf
        logits[3, 1:] = -math.inf
    targets = torch.randint(V, (5,))
    whole = split(logits, targets, [])[0]
    cuts = sorted(torch.randint(0, V + 1, (4,)).tolist())  # equal cuts make empty parts
    parts = split(logits, targets, cuts)
    same(fold(parts), whole, V)
    same(fold([fold(parts[:2]), *parts[2:]]), whole, V)
    same(fold([*parts[:2], fold(parts[2:])]), whole, V)
    same(fold([fold([parts[0]]), fold([fold(parts[1:3]), fold(parts[3:])])]), whole, V)


def test_identity_of_the_merge() -> None:
    """A part with no columns, in front or behind, changes nothing; neither do two of them."""
    logits, targets = torch.randn(4, 9, dtype=torch.float64), torch.arange(4)
    whole = split(logits, targets, [])[0]
    empty = backend.sums(logits[:, :0], targets, WANT, [1.0, 0.5], start=9)
    assert (empty.max == -math.inf).all() and all((m.S == 0).all() for m in empty.moments)
    for parts in ([empty, whole], [whole, empty], [empty, empty, whole, empty]):
        same(fold(parts), whole, 9)
    both = fold([empty, empty])
    assert (both.max == -math.inf).all() and all(not m.S.isnan().any() and (m.S == 0).all() for m in both.moments)


def test_the_first_of_equal_maxima_wins() -> None:
    """argmax does not depend on how the vocabulary was cut."""
    logits = torch.zeros(1, 6, dtype=torch.float64)
    logits[0, [1, 4]] = 5.0
    for cuts in ([], [3], [2, 4], [5]):
        facts = facts_of(fold(split(logits, torch.tensor([0]), cuts)), 6)
        assert facts[Fact("argmax")].item() == 1


def test_moments_are_measured_from_the_maximum() -> None:
    partial = split(torch.full((1, 8), 700.0, dtype=torch.float64), torch.tensor([0]), [])[0]
    assert isinstance(partial.moments[0], Moments)
    assert partial.moments[0].S.item() == 8.0 and partial.max.item() == 700.0
