"""The recipe for a new fact, followed: the lines of docs/extending.md in the table, and nothing else, on each backend.

On Triton in a process of its own, under the interpreter, or where there is a GPU.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreting import INSIDE, interpreted
from torch import Tensor

import headloss as hl
from headloss import facts as table
from headloss.facts import FACTS, Fact, Want
from headloss.losses import cosine, cross_entropy, entropy_bonus, forward_kl, z_loss

sys.path.append(str(Path(__file__).parent / "ranks"))
from test_simulated import simulate

DEVICE = "cuda" if torch.cuda.is_available() and not INSIDE else "cpu"
N, V, D, T = 6, 37, 5, 0.7
TRUTH = {
    "target_logit": lambda s, y: s.gather(1, y[:, None])[:, 0],
    "gini": lambda s, y: 1 - s.softmax(1).square().sum(1),
    "mean_logit": lambda s, y: s.mean(1),
    "renyi": lambda s, y: -s.softmax(1).square().sum(1).log(),
}
backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("torch", marks=pytest.mark.skipif(INSIDE, reason="ran in the other process")),
        pytest.param(
            "triton", marks=pytest.mark.skipif(not INSIDE and DEVICE == "cpu", reason="runs under the interpreter")
        ),
    ],
)


test_under_the_interpreter = interpreted(__file__)


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    """The page's own lines, and two more: in the middle of the table, where a number that is typed by hand goes off."""
    page = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
    (lines,) = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    new = eval("{" + lines + "}", vars(table))
    new["mean_logit"] = table.Rule(
        lambda max, total, T, vocab: (max + total / vocab) / T, lambda g, vocab: table.Pull(c=g / vocab)
    )
    new["renyi"] = table.Rule(
        lambda S, Q: 2 * S.log() - Q.log(), lambda g, value: table.Pull(a=2 * g, e=-2 * g * value.exp())
    )
    assert set(new) == set(TRUTH) and not set(new) & set(FACTS)
    before = dict(FACTS)
    first, *rest = before.items()
    FACTS.clear()
    FACTS.update(dict([first, *new.items(), *rest]))
    yield
    FACTS.clear()
    FACTS.update(before)


def mixed(target_logit: Tensor, gini: Tensor, renyi: Tensor, *, strength: float = 0.5) -> Any:
    return -target_logit + strength * gini.square() + renyi.exp() / 30, {"gini": gini}


def pushed(mean_logit: Tensor) -> Tensor:
    return mean_logit.square()


class Batch:
    def __init__(self) -> None:
        self.logits = (3 * torch.randn(N, V, device=DEVICE)).requires_grad_()
        self.hidden, self.weight = (torch.randn(n, D, device=DEVICE, requires_grad=True) for n in (N, V))
        self.targets, self.teacher = torch.randint(V, (N,), device=DEVICE), torch.randn(N, V, device=DEVICE)
        self.targets[2] = -100

    def source(self, kind: str) -> tuple[Any, list[Tensor]]:
        if kind == "Logits":
            return hl.Logits(self.logits, temperature=T), [self.logits]
        leaves = [self.hidden, self.weight]
        return hl.Linear(*leaves, temperature=T, memory=4 * 64 * 3), leaves

    def dense(self, kind: str) -> tuple[Tensor, list[Tensor]]:
        """s = z / T in float64, and the leaves."""
        leaves = [x.detach().double().requires_grad_() for x in self.source(kind)[1]]
        return (leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].T) / T, leaves

    def kept(self, s: Tensor) -> tuple[Tensor, Tensor]:
        return s[self.targets >= 0], self.targets[self.targets >= 0]


def close(got: Any, want: Any, what: str = "") -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-5, atol=2e-5, msg=lambda m: f"{what}: {m}")


@backends
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("teacher", [False, True])
def test_an_objective_of_new_facts(backend: str, kind: str, teacher: bool) -> None:
    """Value and gradient, alone, with losses that have nothing to do with them, and with a teacher."""
    batch = Batch()
    terms = {"new": hl.Term(mixed, strength=0.3), "mean": pushed, "hot": hl.Term(mixed, temperature=2.0)}
    terms |= {"ce": hl.Term(cross_entropy, label_smoothing=0.1), "z": z_loss, "h": entropy_bonus}
    call = {}
    if teacher:
        terms["kl"], call = forward_kl, {"teacher": hl.Logits(batch.teacher, temperature=T)}
    objective = hl.Objective(**terms, metrics=["renyi", "target_logit"], backend=backend)  # type: ignore[arg-type]
    source, leaves = batch.source(kind)
    out = objective(source, batch.targets, **call)
    grads = torch.autograd.grad(out.loss, leaves)
    if backend == "triton":
        plan = objective.explain(source, batch.targets, **call)
        assert plan.launches.startswith("one launch per chunk"), plan.launches

    whole, exact = batch.dense(kind)
    s, y = batch.kept(whole)
    logp = s.log_softmax(1)
    fact = {name: fn(s, y) for name, fn in TRUTH.items()}
    hot = {name: fn(s * T / 2.0, y) for name, fn in TRUTH.items()}
    loss_of = lambda f, k: -f["target_logit"] + k * f["gini"] ** 2 + f["renyi"].exp() / 30
    want = {
        "new": loss_of(fact, 0.3),
        "mean": fact["mean_logit"] ** 2,
        "hot": loss_of(hot, 0.5),
        "ce": torch.nn.functional.cross_entropy(s, y, label_smoothing=0.1, reduction="none"),
        "z": s.logsumexp(1) ** 2,
        "h": (logp.exp() * logp).sum(1),
    }
    if teacher:
        logq = batch.kept(batch.teacher.double() / T)[0].log_softmax(1)
        want["kl"] = (logq.exp() * (logq - logp)).sum(1)
    for name, value in want.items():
        close(out.terms[name], value.mean(), name)
    close(out.metrics["renyi"].value, fact["renyi"].mean(), "renyi")
    close(out.metrics["new/gini"].value, fact["gini"].mean(), "new/gini")
    for got, true in zip(grads, torch.autograd.grad(sum(x.mean() for x in want.values()), exact)):
        close(got, true, "gradient")


@backends
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_each_new_fact_by_itself(backend: str, kind: str) -> None:
    """`row_facts`: a pull that has no coefficient of p_j is not dropped."""
    batch = Batch()
    for name, fn in TRUTH.items():
        source, leaves = batch.source(kind)
        found = hl.row_facts(source, batch.targets, want=(name,), backend=backend)[name]
        whole, exact = batch.dense(kind)
        true = fn(*batch.kept(whole))
        close(found[batch.targets >= 0], true, name)
        for got, want in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(true.sum(), exact)):
            close(got, want, f"gradient of {name}")


@backends
def test_over_shards(backend: str) -> None:
    batch = Batch()
    logits, targets = batch.logits.detach(), batch.targets.clamp(min=0)
    want = Want([Fact(name) for name in (*TRUTH, "lse", "entropy")])
    found, grad = simulate(backend, logits, targets, want, [20, 0, 17])
    exact = logits.double().requires_grad_()
    logp = exact.log_softmax(1)
    true = {name: fn(exact, targets) for name, fn in TRUTH.items()}
    true |= {"lse": exact.logsumexp(1), "entropy": -(logp.exp() * logp).sum(1)}
    for fact, value in found.items():
        close(value, true[fact.name], fact.name)
    close(grad, torch.autograd.grad(sum(x.sum() for x in true.values()), exact)[0], "gradient")


@pytest.mark.skipif(INSIDE, reason="ran in the other process")
def test_verify_knows_a_new_fact() -> None:
    """Its pull is compared with autograd through its value: a wrong one is noticed."""
    logits, targets = torch.randn(N, V, dtype=torch.float64, requires_grad=True), torch.randint(V, (N,))
    FACTS["spread"] = table.Rule(lambda max, least, T: (max - least) / T)
    metrics = {"spread": lambda spread: spread}
    report = hl.verify(hl.Objective(new=mixed, mean=pushed, metrics=metrics), hl.Logits(logits, temperature=T), targets)
    report.check()
    assert "spread" in str(report)
    rule = FACTS["gini"]
    FACTS["gini"] = table.Rule(lambda Q, S: 1 - Q / S**2, lambda g, value: table.Pull(a=2 * g * value, e=-2 * g))
    assert rule is not FACTS["gini"]
    with pytest.raises(AssertionError):
        hl.verify(hl.Objective(new=mixed), hl.Logits(logits), targets).check()


@backends
def test_a_sum_that_nobody_takes_is_refused(backend: str) -> None:
    FACTS["cubed"] = table.Rule(lambda C, S: C / S**3, lambda g: table.Pull(a=g))
    try:
        said = "backend: \"triton\" has no sum 'C'" if backend == "triton" else "asks for 'C'"
        with pytest.raises(TypeError, match=said):
            hl.row_facts(hl.Logits(torch.randn(3, 5, device=DEVICE)), want=("cubed",), backend=backend)
    finally:
        del FACTS["cubed"]


@backends
def test_facts_of_the_logits_themselves(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their minimum and their products with a narrower teacher's, through scale and softcap of both, beside a KL."""
    if backend == "triton":  # whose operations on these go by tiles of rows
        monkeypatch.setattr("headloss.backends.triton.logit_facts.TILE_BYTES", 16 * V)
    batch = Batch()
    how, theirs = {"scale": -0.7, "softcap": 3.0, "temperature": T}, {"scale": 1.2, "softcap": 4.0}
    terms = {"cos": cosine, "kl": forward_kl, "ce": cross_entropy}
    objective = hl.Objective(**terms, metrics=["min_logit"], backend=backend)  # type: ignore[arg-type]
    teacher = hl.Logits(batch.teacher[:, :30], **theirs)  # type: ignore[arg-type]
    out = objective(hl.Logits(batch.logits, **how), batch.targets, teacher=teacher)  # type: ignore[arg-type]
    x = batch.logits.detach().double().requires_grad_()
    z, u = 3 * (-0.7 * x / 3).tanh(), 4 * (1.2 * batch.teacher[:, :30].double() / 4).tanh()
    z, u, y = z[batch.targets >= 0], u[batch.targets >= 0], batch.targets[batch.targets >= 0]
    cos = 1 - torch.nn.functional.cosine_similarity(z[:, :30], u, dim=-1)
    logp, logq = (z[:, :30] / T).log_softmax(-1), u.log_softmax(-1)
    kl = (logq.exp() * (logq - logp)).sum(-1)
    ce = torch.nn.functional.cross_entropy(z / T, y)
    close(out.metrics["min_logit"].value, (z / T).amin(-1).mean(), "min_logit")
    close(out.terms["cos"], cos.mean(), "cosine")
    plan = objective.explain(hl.Logits(batch.logits, **how), batch.targets, teacher=teacher)  # type: ignore[arg-type]
    assert (plan.forward_sweeps, plan.sweeps) == ((2, 4) if backend == "triton" else (1, 2))
    assert ("in PyTorch's operations" in plan.launches) == (backend == "triton")
    got, want = (torch.autograd.grad(a, b)[0] for a, b in ((out.loss, batch.logits), (cos.mean() + kl.mean() + ce, x)))
    close(got, want, "gradient")
