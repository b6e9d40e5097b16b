"""Low precision, autocast and loss scalers."""

from __future__ import annotations

import copy

import oracle
import pytest
import torch
import torch.nn.functional as F
from calls import BATCH_LOSS, CE_Z, KINDS, objective
from torch import Tensor, nn

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, value_loss, z_loss


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("rows", [7, 1000], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision(kind: str, dtype: torch.dtype, rows: int) -> None:
    """Not worse than twice eager's error in the same dtype, against float64 on the same rounded numbers."""
    torch.manual_seed(4)
    N, V, D = 65, 97, 48
    tensors = {"logits": 4 * torch.randn(N, V)} if kind == "Logits" else {
        "hidden": torch.randn(N, D), "weight": 0.5 * torch.randn(V, D)
    }  # fmt: skip
    tensors = {n: x.to(dtype).double() for n, x in tensors.items()}
    problem = oracle.Problem(kind, tensors, torch.randint(V, (N,)))
    obj = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=1e-2), h=hl.Term(entropy_bonus, weight=0.1))
    want = oracle.answer(obj, problem)
    got = oracle.run(obj, problem, dtype=dtype, memory=problem.budget(rows, 2))
    leaves = problem.leaves(dtype)
    logits = (leaves["logits"] if kind == "Logits" else leaves["hidden"] @ leaves["weight"].T).float()
    logp = logits.log_softmax(-1)
    eager = F.nll_loss(logp, problem.targets) + 1e-2 * (logits.logsumexp(-1) ** 2).mean()
    eager = eager + 0.1 * (logp.exp() * logp).sum(-1).mean()
    eager.backward()
    assert got.loss.dtype == torch.float32
    assert abs(got.loss.double() - want.loss) <= 2 * abs(eager.double() - want.loss) + 1e-5 * abs(want.loss)
    for name, x in leaves.items():
        assert got.grads[name].dtype == dtype
        ours, theirs = relative(got.grads[name], want.grads[name]), relative(x.grad, want.grads[name])
        assert ours <= 2 * theirs + 1e-6, (name, ours, theirs)


def test_weight_gradient_is_summed_in_float32() -> None:
    """Two hundred chunks in bf16: a bf16 accumulator would lose most of the later ones."""
    torch.manual_seed(5)
    N, V, D = 400, 11, 16
    hidden, weight = torch.randn(N, D).bfloat16(), torch.randn(V, D).bfloat16()
    problem = oracle.Problem("Linear", {"hidden": hidden.double(), "weight": weight.double()}, torch.randint(V, (N,)))
    obj = hl.Objective(ce=cross_entropy)
    want = oracle.answer(obj, problem).grads["weight"]
    got = oracle.run(obj, problem, dtype=torch.bfloat16, memory=problem.budget(2, 2)).grads["weight"]
    one = oracle.run(obj, problem, dtype=torch.bfloat16, memory=problem.budget(1000, 2)).grads["weight"]
    assert relative(got, want) <= 1.5 * relative(one, want) + 1e-6
    wide = oracle.run(
        obj, problem, dtype=torch.bfloat16, memory=problem.budget(2, 6), source={"logits_dtype": torch.float32}
    )
    assert relative(wide.grads["weight"], want) <= 1.5 * relative(one, want) + 1e-6


def test_logits_dtype() -> None:
    """float32 logits of bf16 tensors: the rounding of |z| around 30, worth 0.06 nat, is gone."""
    torch.manual_seed(6)
    hidden, weight = (5 * torch.randn(33, 24)).bfloat16(), torch.randn(61, 24).bfloat16()
    tensors = {"hidden": hidden.double(), "weight": weight.double()}
    problem = oracle.Problem("Linear", tensors, torch.randint(61, (33,)))
    obj = hl.Objective(ce=cross_entropy)
    want = oracle.answer(obj, problem)
    for memory in (problem.budget(5, 6), problem.budget(100, 6)):
        got = oracle.run(obj, problem, dtype=torch.bfloat16, memory=memory, source={"logits_dtype": torch.float32})
        plain = oracle.run(obj, problem, dtype=torch.bfloat16, memory=memory)
        assert abs(got.loss.double() - want.loss) < 1e-5 * want.loss
        assert abs(plain.loss.double() - want.loss) > 1e-4 * want.loss  # else the test shows nothing


def test_facts_loss_and_gradient_agree_on_the_logits() -> None:
    """A recomputing backward sees the same rounded logits as the forward: p_y - 1 sums to 0 over the columns."""
    torch.manual_seed(7)
    hidden, weight = torch.randn(9, 24).bfloat16(), torch.randn(61, 24).bfloat16()
    bias = torch.zeros(61).bfloat16().requires_grad_()
    facts = hl.row_facts(hl.Linear(hidden, weight, bias, memory=61 * 2 * 2), torch.arange(9), ("logprob",))
    facts.logprob.sum().backward()
    assert abs(float(bias.grad.float().sum())) < 0.05


def test_fp16_with_a_loss_scaler() -> None:
    """1 / tokens underflows in fp16; whether the scale is known at forward or comes later, the digits are kept."""
    torch.manual_seed(8)
    N, V, D = 96, 64, 32
    tensors = {"hidden": torch.randn(N, D).half().double(), "weight": (0.3 * torch.randn(V, D)).half().double()}
    problem = oracle.Problem("Linear", tensors, torch.randint(V, (N,)))
    obj = hl.Objective(ce=cross_entropy)
    count = 2_000_000  # a large global batch
    want = oracle.answer(obj, problem, num_items=count)
    for rows in (8, 1000):
        for scale in (2.0**16, 1024.0):
            leaves = problem.leaves(torch.float16)
            out = obj(problem.source(leaves, memory=problem.budget(rows, 2)), problem.targets, num_items=count)
            (out.loss * scale).backward()
            for name, x in leaves.items():
                assert relative(x.grad.double() / scale, want.grads[name]) < 3e-3, (name, rows, scale)
            leaves = problem.leaves(torch.float16)
            known = obj(
                problem.source(leaves, memory=problem.budget(rows, 2)), problem.targets,
                num_items=count, grad_scale=scale,
            )  # fmt: skip
            known.loss.backward()
            for name, x in leaves.items():
                assert relative(x.grad.double() / scale, want.grads[name]) < 3e-3, (name, rows, scale)


def test_grad_scaler() -> None:
    torch.manual_seed(9)
    head = nn.Linear(16, 33, bias=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    hidden, targets = torch.randn(10, 16), torch.randint(33, (10,))
    other = copy.deepcopy(head)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = hl.Objective(ce=cross_entropy)(hl.Linear(hidden, head.weight), targets).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    F.cross_entropy(other(hidden), targets).backward()
    with torch.no_grad():
        other.weight -= 0.1 * other.weight.grad
    torch.testing.assert_close(head.weight, other.weight, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """float32 parameters, GEMMs in autocast's dtype, the same numbers as casting by hand; backward runs outside."""
    problem = oracle.make("Linear", (29,), 43, hidden=16, bad=False, bias=False)
    for terms in (CE_Z, {"b": BATCH_LOSS}):
        obj = objective(**terms)
        leaves, cast = problem.leaves(torch.float32), problem.leaves(torch.float32)
        with torch.autocast("cpu", dtype=dtype):
            out = obj(problem.source(leaves, memory=problem.budget(6, 2)), problem.targets)
        (out.loss + out.facts.entropy.mean()).backward()
        by_hand = {n: x.to(dtype) for n, x in cast.items()}
        same = obj(problem.source(by_hand, memory=problem.budget(6, 2)), problem.targets)
        (same.loss + same.facts.entropy.mean()).backward()
        assert out.loss.dtype == torch.float32
        torch.testing.assert_close(out.loss, same.loss, rtol=1e-6, atol=1e-6)
        for name, x in leaves.items():
            assert x.grad.dtype == torch.float32
            torch.testing.assert_close(x.grad, cast[name].grad, rtol=2e-2, atol=1e-3)
            # the same rounded logits in forward and backward: nearer to each other than to a float32 run
            assert relative(x.grad, cast[name].grad.double()) < 2e-2


def test_autocast_backward_sees_the_forwards_logits() -> None:
    """The recomputed logits of a backward outside autocast are those of the forward inside it."""
    torch.manual_seed(10)
    hidden, weight = 6 * torch.randn(9, 24), torch.randn(61, 24)
    bias = torch.zeros(61, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        source = hl.Linear(hidden, weight, bias, logits_dtype=torch.float32)
        facts = hl.row_facts(source, torch.arange(9), ("logprob",))
    facts.logprob.sum().backward()
    # sum_j (1[j=y] - p_j) = 0 holds only if p is a softmax of the logits that lse came from
    assert abs(float(bias.grad.sum())) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_inputs_of_our_losses_are_computed_with_in_float32(dtype: torch.dtype) -> None:
    """300^2 is no float16, and a square in bfloat16 has two digits."""
    value = torch.linspace(-301, 777, 7).to(dtype).requires_grad_()
    returns, targets = torch.linspace(3, -99, 7).to(dtype), torch.arange(7)
    out = hl.Objective(v=value_loss)(hl.Logits(torch.zeros(7, 9)), targets, value=value, returns=returns)
    wanted = (value.double() - returns.double()).square().mean() / 2
    torch.testing.assert_close(out.loss.double(), wanted, rtol=1e-6, atol=0.0)
    got, truth = (torch.autograd.grad(x, value)[0] for x in (out.loss, wanted))
    assert got.dtype == dtype
    torch.testing.assert_close(got, truth)
