"""fp16: wherever eager's value and gradients are finite ours are too, and no worse than twice its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headloss as hl
from headloss import losses

V, D, K = 19, 8, 3
Loss = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]


def picked(z: Tensor, targets: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def kl(x: Tensor, y: Tensor) -> Tensor:
    return (y.exp() * (y - x)).sum(-1)


# Each as an objective and as a plain function of logits (float32 or better), targets and inputs, one value per row.
TERMS: dict[str, tuple[hl.Objective, Loss]] = {
    "cross-entropy": (hl.Objective(a=losses.cross_entropy), lambda z, t, x: -picked(z, t)),
    "smoothed": (
        hl.Objective(a=hl.Term(losses.cross_entropy, label_smoothing=0.2)),
        lambda z, t, x: F.cross_entropy(z, t, label_smoothing=0.2, reduction="none"),
    ),
    "z-loss": (hl.Objective(a=losses.z_loss), lambda z, t, x: z.logsumexp(-1) ** 2),
    "reinforce": (hl.Objective(a=losses.reinforce), lambda z, t, x: -picked(z, t) * x["advantage"]),
    "slopes beyond fp16": (
        hl.Objective(a=lambda logprob, advantage: -logprob * advantage * 2000.0),
        lambda z, t, x: -picked(z, t) * x["advantage"] * 2000.0,
    ),
    "a batch": (
        hl.Objective(a=lambda logprob: (logprob - logprob.mean()) ** 2),
        lambda z, t, x: (picked(z, t) - picked(z, t).mean()) ** 2,
    ),
    "forward KL": (
        hl.Objective(a=losses.forward_kl),
        lambda z, t, x: kl(z.log_softmax(-1), x["teacher"].log_softmax(-1)),
    ),
    "ids alone": (
        hl.Objective(a=hl.Term(losses.forward_kl, tail="renormalise")),
        lambda z, t, x: kl(z.gather(-1, x["ids"]).log_softmax(-1), x["teacher"].gather(-1, x["ids"]).log_softmax(-1)),
    ),
}

# How large the hidden rows, the weight and the bias are, and over how many rows the mean goes.
SIZES: dict[str, tuple[float, float, float | None, int]] = {
    "plain": (1.0, 1.0, 1.0, 40),
    "confident": (8.0, 8.0, None, 40),
    "a large weight": (1e-3, 4e4, None, 200),
    "a large weight and a bias": (1e-3, 4e4, 30.0, 200),
    "large hidden rows": (4e4, 1e-3, None, 200),
    "large logits": (30.0, 300.0, None, 40),
    "products beyond fp16 that a bias brings back": (1.0, 1.2e4, 3e4, 1),
    "many rows": (50.0, 1.0, 1.0, 3000),
    "one row": (1.0, 2e4, None, 1),
}
WAYS = ("autograd", "again", "direct", "a scaler", "known scale", "facts")


def problem(size: str, seed: int) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    hidden, weight, bias, rows = SIZES[size]
    g = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).clamp(-1.5, 1.5)
    tensors = {"hidden": hidden * randn(1 if seed % 2 else rows, D).expand(rows, D), "weight": weight * randn(V, D)}
    if bias is not None:
        tensors["bias"] = bias * randn(V)
    tensors = {n: x.half().double() for n, x in tensors.items()}
    inputs = {"advantage": 200 * randn(rows), "teacher": 2 * randn(rows, V)}
    inputs["ids"] = torch.rand(rows, V, generator=g).argsort(-1)[:, :K]
    return tensors, torch.randint(V, (rows,), generator=g), inputs


def eager(
    term: Loss, tensors: dict[str, Tensor], targets: Tensor, inputs: dict[str, Tensor], dtype: torch.dtype, up: float
) -> dict[str, Tensor]:
    leaves = {n: x.detach().to(dtype).clone().requires_grad_() for n, x in tensors.items()}
    z = F.linear(*leaves.values()).to(torch.promote_types(dtype, torch.float32))
    value = term(z, targets, {n: x if n == "ids" else x.to(z.dtype) for n, x in inputs.items()}).mean()
    (value * up).backward()
    return {"loss": value.detach()} | {n: leaf.grad for n, leaf in leaves.items()}


def ours(
    name: str,
    tensors: dict[str, Tensor],
    targets: Tensor,
    inputs: dict[str, Tensor],
    way: str,
    up: float,
    **options: Any,
) -> dict[str, Tensor]:
    leaves = {n: x.detach().half().clone().requires_grad_() for n, x in tensors.items()}
    source = hl.Linear(*leaves.values(), **options)
    objective, _ = TERMS[name]
    call: dict[str, Any] = {}
    if name in ("reinforce", "slopes beyond fp16"):
        call["advantage"] = inputs["advantage"].float()
    if name == "forward KL":
        call["teacher"] = hl.Logits(inputs["teacher"].float())
    if name == "ids alone":
        call["teacher"] = hl.Sparse(inputs["ids"], inputs["teacher"].float().log_softmax(-1).gather(-1, inputs["ids"]))
    if way == "direct":
        out = objective.forward_backward(source, targets, grad_scale=up, **call)
        return {"loss": out.loss} | {n: getattr(out.grads, n) for n in leaves}
    if way == "facts":
        value = -hl.row_facts(source, targets).logprob.mean()
        (value * up).backward()
    else:
        value = objective(source, targets, grad_scale=up if way == "known scale" else 1.0, **call).loss
        up = 1.0 if way == "known scale" else up
        if way == "again":
            (value * up).backward(retain_graph=True)
            for leaf in leaves.values():
                leaf.grad = None
        (value * up).backward()
    return {"loss": value.detach()} | {n: leaf.grad for n, leaf in leaves.items()}


def no_worse(got: dict[str, Tensor], plain: dict[str, Tensor], want: dict[str, Tensor], label: str) -> int:
    """How many of the tensors could be compared: those that eager has finite."""
    count = 0
    for name, x in plain.items():
        if not x.isfinite().all():
            continue
        assert got[name].isfinite().all(), f"{label}: {name} is not finite, eager's is"
        assert got[name].dtype == (torch.float32 if name == "loss" else torch.float16), f"{label}: {name}"
        scale = want[name].abs().max().clamp(min=1e-30)
        theirs, mine = (float((y.double() - want[name]).abs().max() / scale) for y in (x, got[name]))
        assert mine <= 2 * theirs + 3e-3, f"{label}: {name} is off by {mine:.1e}, eager's by {theirs:.1e}"
        count += 1
    return count


# A divergence knows no log-probability below -1e4 (see divergence.py); eager does.
BEYOND = ("large logits", "products beyond fp16 that a bias brings back", "one row")
CASES = [(n, s) for n in TERMS for s in SIZES if n not in ("forward KL", "ids alone") or s not in BEYOND]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_finite_where_eager_is(name: str, size: str) -> None:
    compared = 0
    for seed in range(4):
        tensors, targets, inputs = problem(size, seed)
        rows = len(targets)
        chunks = {"memory": max(1, rows // 3) * 2 * V}
        term = TERMS[name][1]
        theirs = {
            up: [eager(term, tensors, targets, inputs, t, up) for t in (torch.float64, torch.float16)]
            for up in (1.0, 1024.0)
        }
        for way, up, options in (
            ("autograd", 1.0, {}),
            ("autograd", 1.0, chunks),
            ("autograd", 1.0, {**chunks, "weight_grad_dtype": torch.float16}),
            ("again", 1.0, chunks),
            ("direct", 1.0, chunks),
            ("a scaler", 1024.0, chunks),
            ("known scale", 1024.0, {}),
            ("facts", 1.0, chunks),
        ):
            if way == "facts" and name != "cross-entropy":
                continue
            if name == "forward KL":
                options = {n: 4 * x if n == "memory" else x for n, x in options.items()}
            want, plain = theirs[up]
            got = ours(name, tensors, targets, inputs, way, up, **options)
            compared += no_worse(got, plain, want, f"{name}, {size}, {way}, seed {seed}, {options}")
    assert compared > 8  # a case that eager cannot do says nothing


@pytest.mark.parametrize("name", ["cross-entropy", "smoothed", "z-loss", "a batch"])
@pytest.mark.parametrize("size", [1.0, 100.0, 2e4])
def test_logits_in_fp16(name: str, size: float) -> None:
    for rows, up in ((1, 1.0), (50, 1.0), (3000, 1024.0)):
        g = torch.Generator().manual_seed(rows)
        logits = (size * torch.randn(rows, V, generator=g, dtype=torch.float64).clamp(-1.5, 1.5)).half()
        targets = torch.randint(V, (rows,), generator=g)
        found = []
        for dtype in (torch.float64, torch.float16):
            leaf = logits.clone().to(dtype).requires_grad_()
            value = TERMS[name][1](leaf.to(torch.promote_types(dtype, torch.float32)), targets, {}).mean()
            (value * up).backward()
            found.append({"loss": value.detach(), "logits": leaf.grad})
        leaf = logits.clone().requires_grad_()
        value = TERMS[name][0](hl.Logits(leaf), targets).loss
        (value * up).backward()
        got = {"loss": value.detach(), "logits": leaf.grad}
        assert no_worse(got, found[1], found[0], f"{name}, {size}, {rows} rows") == 2


@pytest.mark.parametrize("targets", [0, 1])
def test_a_bias_brings_a_product_back_into_fp16(targets: int) -> None:
    """300 * 240 is 72000, beyond float16's 65504; with a bias of -20000 the logit is not."""
    tensors = {
        "hidden": torch.tensor([[300.0, 1.0]]),
        "weight": torch.tensor([[240.0, 0.0], [173.0, 80.0]]),
        "bias": torch.tensor([-20000.0, 16.0]),
    }
    term, y = TERMS["cross-entropy"][1], torch.tensor([targets])
    want, plain = (eager(term, tensors, y, {}, dtype, 1.0) for dtype in (torch.float64, torch.float16))
    assert no_worse(ours("cross-entropy", tensors, y, {}, "autograd", 1.0), plain, want, "a bias") == 4


def test_a_bias_beside_wider_logits() -> None:
    """Where the product is made in another dtype than the bias, it is added after it."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8).bfloat16(), torch.randn(11, 8).bfloat16()
    bias, targets = 3 * torch.randn(11).bfloat16(), torch.randint(11, (6,))
    out = hl.Objective(ce=hl.losses.cross_entropy)(hl.Linear(hidden, weight, bias, logits_dtype=torch.float32), targets)
    want = torch.nn.functional.cross_entropy(hidden.float() @ weight.float().T + bias.float(), targets)
    torch.testing.assert_close(out.loss, want)


def test_a_loss_scale_beyond_fp16_reaches_fp16_logits() -> None:
    torch.manual_seed(0)
    z = torch.randn(64, 11).half()
    targets = torch.randint(11, (64,))
    x, y = z.clone().requires_grad_(), z.float().requires_grad_()
    (hl.Objective(ce=hl.losses.cross_entropy)(hl.Logits(x), targets).loss * 1e5).backward()
    (torch.nn.functional.cross_entropy(y, targets) * 1e5).backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
    torch.testing.assert_close(x.grad.float(), y.grad, rtol=2e-3, atol=1.0)


def test_a_scaled_loss_scales_its_gradient_in_float32():
    """The gradient was made in the forward pass: a factor that bfloat16 would round is applied before rounding."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16).bfloat16(), torch.randn(30, 16).bfloat16()
    targets, found = torch.randint(30, (40,)), []
    for factor in (1.0, 0.3337):
        x = hidden.clone().requires_grad_()
        out = hl.Objective(ce=losses.cross_entropy)(hl.Linear(x, weight), targets)
        (out.loss * factor).backward()
        found.append(x.grad)
    assert torch.equal(found[1], (found[0].float() * torch.tensor(0.3337)).bfloat16())


@pytest.mark.parametrize("how", ["in the call", "in the term"])
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_call_with_every_term_off_still_measures(kind, how):
    """A gradient of float16 has a scale of its own, which no term is there to set."""
    hidden, weight, logits = (torch.randn(*n).half().requires_grad_() for n in ((13, 8), (53, 8), (13, 53)))
    term = hl.Term(losses.cross_entropy, weight=0.0 if how == "in the term" else 1.0)
    objective = hl.Objective(ce=term, metrics=["entropy"])
    source = hl.Logits(logits) if kind == "Logits" else hl.Linear(hidden, weight, memory=4 * 53 * 8)
    weights = {"ce": 0.0} if how == "in the call" else None
    out = objective(source, torch.randint(53, (13,)), weights=weights)
    assert float(out.loss.detach()) == 0 and float(out.metrics["entropy"]) > 0
    if out.loss.requires_grad:
        out.loss.backward()
    assert all(x.grad is None or not x.grad.any() for x in (hidden, weight, logits))


def test_small_gradients_of_a_loss_whose_rows_meet() -> None:
    """They are written at order 1, also where all rows fit into one chunk, and scaled in float32."""
    tensors, targets, _ = problem("plain", 0)
    objective, term = TERMS["a batch"]
    leaves = {n: x.half().requires_grad_() for n, x in tensors.items()}
    (objective(hl.Linear(*leaves.values()), targets, num_items=10**7).loss * 1e7).backward()
    want = eager(term, tensors, targets, {}, torch.float64, float(len(targets)))
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert (leaf.grad.double() - want[name]).abs().amax() <= 0.01 * want[name].abs().amax(), name
