"""A term with targets of its own, `hl.Term(loss, targets="nll_targets")`: one more pick in the same sweep."""

import pickle
from typing import Any

import pytest
import torch
from interpreting import BACKEND, DTYPE, TOLERANCE, interpreted
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, dpo, forward_kl, grpo, gspo, z_loss

N, V, D = 7, 19, 5


test_under_the_interpreter = interpreted(__file__, "-k", "values and token_mean")


class Batch:
    def __init__(self, dtype: torch.dtype = DTYPE) -> None:
        generator = torch.Generator().manual_seed(7)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)
        self.hidden, self.weight, self.advantage, self.old = draw(N, D), draw(V, D), draw(N), -3 + draw(N) / 4
        self.targets, self.own = (torch.randint(0, V, (N,), generator=generator) for _ in range(2))
        self.targets[2] = -100
        self.own[[2, 4, 5]] = -100
        self.teacher = draw(N, V)

    def call(self, objective: hl.Objective, source: Any, **more: Any) -> Any:
        given = {"advantage": self.advantage, "old_logprob": self.old, "nll_targets": self.own}
        return objective(source, self.targets, **given, **more)

    def truth(self, reduction: str, smoothing: float = 0.1, temperature: float = 1.0) -> tuple[Tensor, ...]:
        """Policy loss and NLL, and the gradient of the head's weight from policy + 0.3 NLL."""
        leaf = self.weight.double().clone().requires_grad_()
        logp = torch.log_softmax(self.hidden.double() @ leaf.T, -1)
        rows, own = torch.nonzero(self.targets != -100)[:, 0], torch.nonzero(self.own != -100)[:, 0]
        ratio = (logp[rows, self.targets[rows]] - self.old[rows].double()).exp()
        A = self.advantage[rows].double()
        policy = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A).mean()
        cold = torch.log_softmax(self.hidden.double() @ leaf.T / temperature, -1)
        nll = -(1 - smoothing) * cold[own, self.own[own]] - smoothing * cold[own].mean(-1)
        nll = nll.sum() / (len(own) if reduction == "weighted_mean" else len(rows))
        (grad,) = torch.autograd.grad(policy + 0.3 * nll, leaf)
        return policy.detach(), nll.detach(), grad


def objective(reduction: str = "token_mean", **more: Any) -> hl.Objective:
    term = hl.Term(cross_entropy, weight=0.3, targets="nll_targets", label_smoothing=0.1, reduction=reduction, **more)
    return hl.Objective(rl=grpo, nll=term, backend=BACKEND)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(a).double(), b.double(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("reduction", ["token_mean", "weighted_mean"])
@pytest.mark.parametrize("how", ["logits", "linear", "chunks", "prepared", "no host read"])
def test_values_and_gradients(how: str, reduction: str) -> None:
    batch = Batch()
    policy, nll, grad = batch.truth(reduction)
    weight = batch.weight.clone().requires_grad_()
    source: Any = hl.Linear(batch.hidden, weight, memory=2 * V * weight.itemsize if how == "chunks" else "1GiB")
    if how in ("logits", "no host read"):
        source = hl.Logits(batch.hidden @ weight.T)
    if how == "prepared":
        batch.targets = hl.prepare(batch.targets)  # type: ignore[assignment]
    out = batch.call(objective(reduction), source, host_read=how != "no host read")
    out.loss.backward()
    close(out.terms["rl"], policy)
    close(out.terms["nll"], nll)
    close(weight.grad, grad)
    own = Batch().own
    logp = torch.log_softmax((batch.hidden @ batch.weight.T).double(), -1)
    kept = own != -100
    close(out.metrics["nll/perplexity"].value, (-logp[kept, own[kept]].mean()).exp())


def test_a_temperature_of_its_own_and_a_teacher_beside() -> None:
    batch = Batch()
    _, nll, _ = batch.truth("token_mean", temperature=2.0)
    made = hl.Objective(
        rl=grpo, kd=forward_kl, nll=hl.Term(cross_entropy, targets="nll_targets", temperature=2.0, label_smoothing=0.1)
    )
    source, teacher = hl.Linear(batch.hidden, batch.weight), hl.Logits(batch.teacher)
    one = batch.call(made, source, teacher=teacher)
    close(one.terms["nll"], nll)
    named = batch.call(made, source, teacher={"big": teacher})
    assert named.loss == one.loss
    plain = hl.Objective(kd=forward_kl)(source, batch.targets, teacher=teacher)
    close(one.terms["kd"], plain.loss)


def test_it_is_one_sweep() -> None:
    batch = Batch()
    source = hl.Linear(batch.hidden, batch.weight)
    given = {"advantage": batch.advantage, "old_logprob": batch.old}
    plan = objective().explain(source, batch.targets, nll_targets=batch.own, **given)
    alone = hl.Objective(rl=grpo).explain(source, batch.targets, **given)
    assert (plan.sweeps, plan.gemms) == (alone.sweeps, alone.gemms)
    assert any("targets=nll_targets" in fact for fact in plan.facts)


def test_functions_that_read_targets_and_weights() -> None:
    """`targets` of the loss and `logprob` of its row weight are those of the term."""
    batch = Batch()
    table = torch.rand(V, dtype=DTYPE)
    made = hl.Objective(
        a=hl.Term(
            lambda logprob, targets, table: -logprob * table[targets],
            targets="nll_targets", row_weight=lambda logprob: logprob.exp(),
        ),
        z=z_loss,
    )  # fmt: skip
    out = made(hl.Linear(batch.hidden, batch.weight), batch.targets, nll_targets=batch.own, table=hl.Whole(table))
    logp = torch.log_softmax(batch.hidden @ batch.weight.T, -1)
    kept = torch.nonzero(batch.own != -100)[:, 0]
    own = logp[kept, batch.own[kept]]
    close(out.terms["a"], (-own * table[batch.own[kept]] * own.exp()).sum() / (N - 1))


def test_configs_copies_and_graphs() -> None:
    batch = Batch()
    made = objective()
    source = hl.Linear(batch.hidden, batch.weight)
    want = batch.call(made, source).loss
    assert made.to_config()["terms"]["nll"]["targets"] == "nll_targets"
    assert made.key != hl.Objective(rl=grpo, nll=hl.Term(cross_entropy, weight=0.3, label_smoothing=0.1)).key
    assert objective().key == made.key
    for other in (hl.Objective.from_config(made.to_config()), pickle.loads(pickle.dumps(made))):
        assert batch.call(other, source).loss == want
    weight = batch.weight.clone().requires_grad_()
    step = torch.compile(
        lambda h, w, y, own: made(
            hl.Linear(h, w), y, advantage=batch.advantage, old_logprob=batch.old, nll_targets=own
        ).loss,
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    loss = step(batch.hidden, weight, batch.targets, batch.own)
    loss.backward()
    close(loss.detach(), want)
    close(weight.grad, batch.truth("token_mean")[2])


def test_a_term_that_is_off_needs_no_targets() -> None:
    batch = Batch()
    source = hl.Linear(batch.hidden, batch.weight)
    given = {"advantage": batch.advantage, "old_logprob": batch.old}
    out = objective()(source, batch.targets, weights={"nll": 0.0}, **given)
    assert out.terms["nll"] == 0
    with pytest.raises(TypeError, match="nll_targets: missing; term 'nll' takes its targets from it"):
        objective()(source, batch.targets, **given)


def test_refused() -> None:
    batch = Batch()
    source = hl.Linear(batch.hidden, batch.weight)
    for wrong, error in ((V, r"in \[0, 19\) or -100"), (-1, r"in \[0, 19\) or -100")):
        other = Batch()
        other.own[0] = wrong
        with pytest.raises(ValueError, match=error):
            other.call(objective(), source)
    batch.own[2] = 3
    with pytest.raises(ValueError, match="nll_targets: 1 rows have one whose target is -100"):
        batch.call(objective(), source)
    batch.own = batch.own[:3]
    with pytest.raises(ValueError, match=r"nll_targets: wanted shape \(7,\)"):
        batch.call(objective(), source)
    for fn, why in ((z_loss, "reads none"), (forward_kl, "reads none"), (gspo, "takes segments"), (dpo, "segments")):
        with pytest.raises(ValueError, match=f"targets: .*{why}"):
            hl.Term(fn, targets="nll_targets")
    for name in ("", "logprob", "targets", 3):
        with pytest.raises(TypeError, match="targets: wanted the name of an input"):
            hl.Term(cross_entropy, targets=name)


@pytest.mark.parametrize("later", [False, True])
def test_what_a_term_takes_may_be_given_when_it_is_off(later: bool) -> None:
    """Its targets, and weights of classes; a name that no term has is refused all the same."""
    x, targets = torch.randn(6, 9), torch.arange(6)
    given = {"own": targets + 1, "class_weight": torch.rand(9)}
    terms = {"z": z_loss, "own": hl.Term(cross_entropy, targets="own")}
    mean = {"z": z_loss, "w": hl.Term(cross_entropy, reduction="weighted_mean")}
    for all_terms, taken in ((terms, "own"), (mean, "class_weight")):
        off = next(name for name in all_terms if name != "z")
        objective = hl.Objective(**all_terms)
        for _ in range(1 + later):
            objective(hl.Logits(x), targets, **{taken: given[taken]})
            out = objective(hl.Logits(x), targets, **{taken: given[taken]}, weights={off: 0.0})
            assert torch.equal(out.loss, hl.Objective(z=z_loss)(hl.Logits(x), targets).loss)
            with pytest.raises(TypeError, match="oown: no loss asks for this input"):
                objective(hl.Logits(x), targets, oown=targets, weights={off: 0.0})
