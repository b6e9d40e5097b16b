"""Calls that lose something in ways of their own: tangents, tokens that a backward reads, numbers of odd types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import headloss as hl
from headloss.losses import cross_entropy, forward_kl

D = torch.float64
N, V, H = 6, 9, 4
torch.manual_seed(0)
Z, Y = torch.randn(N, V, dtype=D), torch.randint(V, (N,))
CE = hl.Objective(ce=cross_entropy)

# ---------------------------------------------------------------- tangents


def of_table(logprob, targets, a):
    return -logprob * a[targets]


def by_segment(logprob, segments, a):
    return -logprob * segments.spread(a)


TANGENTS: dict[str, Any] = {
    "per row": lambda dual: hl.Objective(it=lambda logprob, a: -a * logprob)(
        hl.Logits(Z), Y, a=hl.PerRow(dual(torch.ones(N, dtype=D)))
    ),
    "whole": lambda dual: hl.Objective(it=of_table)(hl.Logits(Z), Y, a=hl.Whole(dual(torch.ones(V, dtype=D)))),
    "per segment": lambda dual: hl.Objective(it=by_segment)(
        hl.Logits(Z), Y, a=hl.PerSegment(dual(torch.ones(2, dtype=D))),
        segments=hl.Segments.from_ids(torch.tensor([0, 0, 0, 1, 1, 1])),
    ),
    "class_weight": lambda dual: CE(hl.Logits(Z), Y, class_weight=dual(torch.ones(V, dtype=D))),
    "the weight of term 'ce'": lambda dual: hl.Objective(ce=hl.Term(cross_entropy, weight=dual(torch.tensor(1.0))))(
        hl.Logits(Z), Y
    ),
    "captured": lambda dual: _capturing(dual(torch.tensor(1.0, dtype=D)))(hl.Logits(Z), Y),
    "captured by a row weight": lambda dual: _weighing(dual(torch.tensor(1.0, dtype=D)))(hl.Logits(Z), Y),
}  # fmt: skip


def _capturing(held: Tensor) -> hl.Objective:
    return hl.Objective(it=lambda logprob: -logprob * held)


def _weighing(held: Tensor) -> hl.Objective:
    return hl.Objective(it=hl.Term(cross_entropy, row_weight=lambda entropy: entropy * held))


@pytest.mark.parametrize("name", TANGENTS)
def test_a_tangent_wherever_it_is(name: str) -> None:
    TANGENTS[name](lambda x: x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode tangent"):
        TANGENTS[name](lambda x: forward_ad.make_dual(x, torch.ones_like(x)))


# ---------------------------------------------------------------- tokens of a head, which a dense teacher is read at


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("teacher", ["Logits", "Linear"])
def test_tokens_changed_in_place(kind: str, teacher: str) -> None:
    hidden, weight = torch.randn(N, H, dtype=D), torch.randn(V, H, dtype=D)
    wide, guide = torch.randn(N, H, dtype=D), torch.randn(2 * V + 1, H, dtype=D)
    objective = hl.Objective(ce=cross_entropy, kl=forward_kl)

    def call(ids: Tensor) -> tuple[Any, Tensor]:
        x = hidden.clone().requires_grad_()
        source = hl.Linear(x, weight, vocab_ids=ids) if kind == "Linear" else hl.Logits(x @ weight.T, vocab_ids=ids)
        teacher_source = hl.Linear(wide, guide) if teacher == "Linear" else hl.Logits(wide @ guide.T)
        return objective(source, 2 * Y + 1, teacher=teacher_source), x

    ids = torch.arange(V) * 2 + 1
    out, x = call(ids)
    (want,) = torch.autograd.grad(out.loss, x)
    out, x = call(ids)
    ids.copy_(ids.flip(0))
    try:
        (got,) = torch.autograd.grad(out.loss, x)
    except RuntimeError as error:
        assert str(error).startswith("vocab_ids: modified by an inplace operation"), error
    else:
        assert kind == "Linear"  # whose gradient was made in the forward
        torch.testing.assert_close(got, want)


def by_numpy(x: Tensor, y: Tensor) -> None:
    x.numpy()[:] = y.numpy()


def by_data(x: Tensor, y: Tensor) -> None:
    x.data = y


def through_data(x: Tensor, y: Tensor) -> None:
    x.data.copy_(y)


@pytest.mark.parametrize("write", [by_numpy, by_data, through_data, Tensor.copy_])
def test_tokens_that_change_between_calls(write: Any) -> None:
    """Also by writes that torch does not count."""
    ids, targets = torch.arange(V), torch.tensor([0, 3, 5, 8, 1, 2])
    for other in (torch.arange(V), torch.arange(V).flip(0), torch.arange(V) + 1, torch.arange(V)):
        write(ids, other.clone())
        got = CE(hl.Logits(Z, vocab_ids=ids), targets).loss
        torch.testing.assert_close(got, CE(hl.Logits(Z, vocab_ids=other.clone()), targets).loss)


# ---------------------------------------------------------------- numbers of odd types


@pytest.mark.parametrize("x", [torch.tensor(2 + 1j), torch.tensor(True)], ids=["complex", "bool"])
def test_weights_are_real(x: Tensor) -> None:
    for call in (
        lambda: CE(hl.Logits(Z), Y, weights={"ce": x}),
        lambda: CE(hl.Logits(Z), Y, grad_scale=x),
        lambda: hl.Term(cross_entropy, weight=x),
    ):
        with pytest.raises(TypeError, match="wanted a real number, got a tensor of torch"):
            call()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.uint16, torch.uint64])
def test_temperatures_and_counts_are_real(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="temperature: wanted real numbers, got a tensor of torch"):
        hl.Logits(Z, temperature=torch.ones(N).to(dtype))
    with pytest.raises(TypeError, match="num_items: "):
        CE(hl.Logits(Z), Y, num_items=torch.tensor(6).to(dtype))


# ---------------------------------------------------------------- a divergence that is said to be pure


def test_pure_does_not_hide_a_lost_gradient() -> None:
    held = torch.tensor(2.0, dtype=D, requires_grad=True)
    term = hl.Term(lambda logp, logq: logp.exp() * (logp - logq) * held, pure=True)
    with pytest.raises(ValueError, match="that it captures requires grad"):
        hl.Objective(it=term)(hl.Logits(Z.clone().requires_grad_()), Y, teacher=hl.Logits(Z.flip(0)))
