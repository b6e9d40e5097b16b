"""What the torch backend keeps between its two sweeps changes no gradient, whoever else reads the logits.

Dimension key:  N rows   V vocabulary   D hidden size
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headloss as hl
from headloss import divergence
from headloss.backends import choose
from headloss.losses import cross_entropy, entropy_bonus, forward_kl, jsd, reverse_kl, skew_kl, tvd, z_loss

N, V, D = 13, 37, 5
WITH_TEACHER = (forward_kl, jsd, reverse_kl, skew_kl, tvd)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of four rows."""
    monkeypatch.setitem(choose("torch", torch.device("cpu")).TILE_BYTES, "cpu", 4 * V * 8)


def ce(z: Tensor, y: Tensor, T: float = 1.0, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(z / T, y, label_smoothing=smoothing)


def entropy(z: Tensor) -> Tensor:
    logp = z.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1).mean()


def reverse(z: Tensor, u: Tensor, T: float = 1.0) -> Tensor:
    logp, logq = (z / T).log_softmax(-1), (u / T).log_softmax(-1)
    return (logp.exp() * (logp - logq)).sum(-1).mean()


def forward(z: Tensor, u: Tensor, T: float = 1.0) -> Tensor:
    return reverse(u, z, T)


def shannon(z: Tensor, u: Tensor) -> Tensor:
    p, q = z.softmax(-1), u.softmax(-1)
    m = (p + q) / 2
    return ((p * (p / m).log() + q * (q / m).log()).sum(-1) / 2).mean()


def skewed(z: Tensor, u: Tensor) -> Tensor:
    p, q = z.softmax(-1), u.softmax(-1)
    return (q * (q / (0.1 * q + 0.9 * p)).log()).sum(-1).mean()


def cap(z: Tensor) -> Tensor:
    return 2 * (z / 2).tanh()


Formula = Callable[[Tensor, Tensor, Tensor], Tensor]  # of student's logits, teacher's and targets
Case = tuple[hl.Objective, Formula, dict[str, Any]]
CASES: dict[str, Case] = {
    "ce": (hl.Objective(a=cross_entropy), lambda z, u, y: ce(z, y), {}),
    "ce and z": (
        hl.Objective(a=cross_entropy, b=z_loss),
        lambda z, u, y: ce(z, y) + z.logsumexp(-1).square().mean(),
        {},
    ),
    "ce and entropy": (hl.Objective(a=cross_entropy, b=entropy_bonus), lambda z, u, y: ce(z, y) - entropy(z), {}),
    "two temperatures": (
        hl.Objective(a=cross_entropy, b=hl.Term(cross_entropy, temperature=3.0)),
        lambda z, u, y: ce(z, y) + ce(z, y, 3.0),
        {},
    ),
    "smoothed": (hl.Objective(a=hl.Term(cross_entropy, label_smoothing=0.3)), lambda z, u, y: ce(z, y, 1.0, 0.3), {}),
    "softcap": (hl.Objective(a=cross_entropy), lambda z, u, y: ce(cap(z), y), {"softcap": 2.0}),
    "softcap, smoothed": (
        hl.Objective(a=hl.Term(cross_entropy, label_smoothing=0.3)),
        lambda z, u, y: ce(cap(z), y, 1.0, 0.3),
        {"softcap": 2.0},
    ),
    "softcap, entropy": (hl.Objective(a=entropy_bonus), lambda z, u, y: -entropy(cap(z)), {"softcap": 2.0}),
    "forward KL": (hl.Objective(a=forward_kl), lambda z, u, y: forward(z, u), {}),
    "jsd": (hl.Objective(a=jsd), lambda z, u, y: shannon(z, u), {}),
    "skew": (hl.Objective(a=skew_kl), lambda z, u, y: skewed(z, u), {}),
    "tvd": (hl.Objective(a=tvd), lambda z, u, y: (z.softmax(-1) - u.softmax(-1)).abs().sum(-1).mean() / 2, {}),
    "ce and jsd": (hl.Objective(a=cross_entropy, b=jsd), lambda z, u, y: ce(z, y) + shannon(z, u), {}),
    "ce and forward KL": (
        hl.Objective(a=cross_entropy, b=hl.Term(forward_kl, temperature=2.0)),
        lambda z, u, y: ce(z, y) + forward(z, u, 2.0),
        {},
    ),
    "ce and reverse KL": (hl.Objective(a=cross_entropy, b=reverse_kl), lambda z, u, y: ce(z, y) + reverse(z, u), {}),
    "reverse KL at two temperatures": (
        hl.Objective(a=reverse_kl, b=hl.Term(reverse_kl, temperature=3.0)),
        lambda z, u, y: reverse(z, u) + reverse(z, u, 3.0),
        {},
    ),
    "softcap, jsd": (hl.Objective(a=jsd), lambda z, u, y: shannon(cap(z), u), {"softcap": 2.0}),
}


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_formula(name: str, kind: str, ignored: bool) -> None:
    objective, formula, how = CASES[name]
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    u, y = 2 * torch.randn(N, V, dtype=torch.float64), torch.randint(V, (N,))
    given, kept = y.clone(), torch.arange(N)
    if ignored:
        given[::3], kept = -100, kept[kept % 3 != 0]
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    if kind == "Logits":
        leaves = [(hidden @ weight.T).detach().requires_grad_()]
    z = leaves[0] if kind == "Logits" else hidden @ weight.T
    value = formula(z[kept], u[kept], y[kept])
    want = torch.autograd.grad(value, leaves)
    source = hl.Logits(leaves[0], **how) if kind == "Logits" else hl.Linear(*leaves, memory=4 * V * 8 * 2, **how)
    teacher = {"teacher": hl.Logits(u)} if any(t.fn in WITH_TEACHER for t in objective.terms.values()) else {}
    loss = objective(source, given, **teacher).loss
    got = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(loss.detach(), value.detach(), rtol=1e-9, atol=1e-11)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-11)


def test_teachers_that_are_not_as_wide_as_each_other() -> None:
    """Each has buffers of its own width: torch warns where one is stretched."""
    torch.manual_seed(0)
    z, y = torch.randn(N, V, dtype=torch.float64).requires_grad_(), torch.randint(V, (N,))
    u = {"one": torch.randn(N, V - 3, dtype=torch.float64), "two": torch.randn(N, V, dtype=torch.float64)}
    terms = {name: hl.Term(reverse_kl, teacher=name) for name in u}
    value = ce(z, y) + sum(reverse(z[:, : x.shape[1]], x) for x in u.values())
    (want,) = torch.autograd.grad(value, z)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = hl.Objective(a=cross_entropy, **terms)(
            hl.Logits(z), y, teacher={name: hl.Logits(x) for name, x in u.items()}
        ).loss
        (got,) = torch.autograd.grad(loss, z)
    torch.testing.assert_close(loss, value, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "loss, formula", [(jsd, shannon), (skew_kl, skewed), (forward_kl, forward), (reverse_kl, reverse)]
)
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_teacher_with_fewer_columns_is_compared_once(
    loss: Any, formula: Formula, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sweep keeps the gradient of a divergence, with zeros in the columns that the student alone has."""
    torch.manual_seed(0)
    z, u = torch.randn(N, V, dtype=torch.float64).requires_grad_(), torch.randn(N, V - 6, dtype=torch.float64)
    value = formula(z[:, :-6], u)  # type: ignore[call-arg]
    (want,) = torch.autograd.grad(value, z)
    again = lambda *a: pytest.fail("the divergence is computed again")
    monkeypatch.setattr(divergence.Element, "value_and_slope", again)
    source: Any = hl.Logits(z) if kind == "Logits" else hl.Linear(z, torch.eye(V, dtype=torch.float64))
    found = hl.Objective(kd=loss)(source, teacher=hl.Logits(u)).loss
    (got,) = torch.autograd.grad(found, z)
    torch.testing.assert_close(found.detach(), value.detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("far", [0.0, 60.0, 300.0])
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_tail_near_and_far(kind: str, far: float) -> None:
    """The tails of one tile are as far below its maxima as float32 goes, and further."""
    torch.manual_seed(0)
    z = torch.randn(N, V)
    ids = torch.stack([torch.randperm(V)[:4] for _ in range(N)])
    z[5] -= far
    z[5, ids[5]] += far
    ids[2, 3] = -1
    logq = torch.randn(N, 5).log_softmax(-1)[:, :4].masked_fill(ids < 0, -math.inf)
    exact = z.double().requires_grad_()
    logp = exact.log_softmax(-1)
    held = torch.zeros(N, V, dtype=torch.bool).scatter(1, ids.clamp(min=0), ids >= 0)
    held[2, 0] = 0 in ids[2, :3].tolist()
    tail = logp.masked_fill(held, -math.inf).logsumexp(-1)
    q, at = logq.double().exp(), logp.gather(-1, ids.clamp(min=0))
    left = (1 - q.sum(-1)).log()
    value = (
        torch.where(ids >= 0, q * (logq.double().clamp(min=-1e4) - at), 0).sum(-1) + left.exp() * (left - tail)
    ).mean()
    (want,) = torch.autograd.grad(value, exact)
    leaf = z.clone().requires_grad_()
    identity = torch.eye(V)
    source: Any = hl.Logits(leaf) if kind == "Logits" else hl.Linear(leaf, identity, memory=4 * V * 4 * 2)
    loss = hl.Objective(kd=hl.Term(forward_kl, tail="bucket"))(source, teacher=hl.Sparse(ids, logq)).loss
    (got,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(loss.detach().double(), value.detach(), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_bfloat16_gradient_is_rounded_once(inplace: bool) -> None:
    torch.manual_seed(0)
    z, y = (4 * torch.randn(64, V)).bfloat16(), torch.randint(V, (64,))
    exact = z.double().requires_grad_()
    (want,) = torch.autograd.grad(0.3 * F.cross_entropy(exact, y, reduction="sum"), exact)
    leaf = z.clone().requires_grad_()
    source = hl.Logits(leaf * 1 if inplace else leaf, inplace=inplace)
    loss = hl.Objective(ce=hl.Term(cross_entropy, reduction="token_sum"))(source, y).loss
    (got,) = torch.autograd.grad(0.3 * loss, leaf)
    assert ((got.double() - want).abs() <= want.abs() * 2**-8 * 1.01).all()


def test_a_second_backward_makes_the_gradient_again() -> None:
    torch.manual_seed(0)
    leaf, y = torch.randn(N, V, dtype=torch.float64).requires_grad_(), torch.randint(V, (N,))
    loss = CASES["ce and entropy"][0](hl.Logits(leaf), y).loss
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-15)


def spread(sum_p2: Tensor) -> Tensor:
    return sum_p2


def level(mean_logprob: Tensor) -> Tensor:
    return -mean_logprob


def chosen(ids_logprob: Tensor) -> Tensor:
    return -ids_logprob[:, 0]


def margin(top_logprob: Tensor) -> Tensor:
    return top_logprob[:, 0] - top_logprob[:, 1]


def scaled(logit_square: Tensor) -> Tensor:
    return logit_square / 50


TERMS: dict[str, hl.Term] = {
    "ce": hl.Term(cross_entropy),
    "warm": hl.Term(cross_entropy, temperature=3.0),
    "entropy": hl.Term(entropy_bonus),
    "spread": hl.Term(spread),
    "level": hl.Term(level),
    "own": hl.Term(cross_entropy, targets="own"),
    "chosen": hl.Term(chosen),
    "margin": hl.Term(margin, top=2),
    "bucket": hl.Term(forward_kl, teacher="few", tail="bucket"),
    "warm bucket": hl.Term(reverse_kl, teacher="few", tail="bucket", temperature=2.0),
    "no tail": hl.Term(jsd, teacher="few", tail="none"),
    "other ids": hl.Term(tvd, teacher="others", tail="bucket"),
    "renormalised": hl.Term(forward_kl, teacher="others", tail="renormalise"),
    "forward": hl.Term(forward_kl, teacher="all"),
    "reverse": hl.Term(reverse_kl, teacher="all"),
    "jsd": hl.Term(jsd, teacher="all"),
    "skew": hl.Term(skew_kl, teacher="all", temperature=2.0),
    "narrow": hl.Term(jsd, teacher="narrow"),
    "plain": hl.Term(scaled, teacher="all"),
}


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("name", TERMS)
def test_pairs_of_terms(name: str, far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is kept changes a gradient, of whichever source: in pairs of everything that may be asked of a row.

    `far`: tails that lie so far below their rows that the logits are asked for again, and a softcap.
    """
    torch.manual_seed(0)
    z, y = torch.randn(N, V, dtype=torch.float64), torch.randint(V, (N,))
    ids, others = (torch.rand(N, V).topk(4, -1).indices for _ in range(2))
    said = torch.randn(N, 5, dtype=torch.float64).log_softmax(-1)[:, :4]
    if far:
        z[3:7].scatter_add_(1, ids[3:7], torch.full((4, 4), 90.0, dtype=torch.float64))
    teachers = {
        "few": hl.Sparse(ids, said), "others": hl.Sparse(others, said.flip(0)),
        "all": hl.Logits(torch.randn(N, V, dtype=torch.float64)),
        "narrow": hl.Logits(torch.randn(N, V - 5, dtype=torch.float64)),
    }  # fmt: skip
    y[::4] = -100
    eye = torch.eye(V, dtype=torch.float64)
    backend = choose("torch", torch.device("cpu"))
    keep = backend.keep

    def gradient(other: str, kind: str, softcap: float | None, keeps: bool = True) -> Tensor:
        monkeypatch.setattr(backend, "keep", keep if keeps else lambda *how: None)
        leaf = z.clone().requires_grad_()
        made = leaf * 1
        how = {"softcap": softcap}
        source: Any = hl.Linear(made, eye, memory=4 * V * 8 * 2, **how)
        if kind != "Linear":
            source = hl.Logits(made, inplace=kind == "in place", **how)
        terms = {n.replace(" ", "_"): TERMS[n] for n in dict.fromkeys((name, other))}
        taken = {t.teacher for t in terms.values()}
        call: dict[str, Any] = {"teacher": {n: x for n, x in teachers.items() if n in taken} or None}
        call |= {"own": y.flip(0).where(y >= 0, -100)} if "own" in terms else {}
        call |= {"ids": others[:, :2]} if "chosen" in terms else {}
        loss = hl.Objective(**terms)(source, y, **call).loss
        return torch.autograd.grad(loss, leaf)[0]

    for other in [*TERMS][[*TERMS].index(name) :]:
        for softcap in (None, 70.0) if far else (None,):
            want = gradient(other, "Logits", softcap, keeps=False)
            for kind in ("Logits", "in place", "Linear"):
                told = lambda m, what=(other, kind, softcap): f"{what}: {m}"
                torch.testing.assert_close(gradient(other, kind, softcap), want, rtol=1e-9, atol=1e-11, msg=told)
