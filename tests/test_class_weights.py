"""Class weights, with label smoothing too, as `F.cross_entropy(weight=, label_smoothing=)` has them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreting import INSIDE, interpreted

import headloss as hl
from headloss.losses import cross_entropy, forward_kl, grpo, z_loss

BACKEND, DTYPE = ("triton", torch.float32) if INSIDE else ("torch", torch.float64)
N, V, D, E = 9, 9, 4, 0.1  # as many rows as columns: nothing may take one for the other


def close(got: Any, want: Any) -> None:
    tolerance = 1e-4 if INSIDE else 1e-10
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


class Batch:
    def __init__(self) -> None:
        self.hidden, self.weight = (torch.randn(n, D, dtype=DTYPE) for n in (N, V))
        self.w = torch.rand(V, dtype=DTYPE)
        self.w[[2, 5]] = 0.0
        self.targets = torch.tensor([0, 2, 3, -100, 8, 1, 2, 5, 7])

    def source(self, how: str, leaf: torch.Tensor, **more: Any) -> Any:
        if how == "logits":
            return hl.Logits(self.hidden @ leaf.T, **more)
        memory = "1GiB" if how == "linear" else 5 * V * leaf.element_size()
        return hl.Linear(self.hidden, leaf, memory=memory, **more)


test_under_the_interpreter = interpreted(__file__)


@pytest.mark.parametrize("how", ["logits", "linear", "chunks"])
@pytest.mark.parametrize("smoothing", [0.0, E])
def test_as_torch_has_them(how: str, smoothing: float) -> None:
    """(1 - e) w[y] nll + e / V sum_j w_j nll_j, over the sum of w[y]; some weights are 0.  Beside a KL and at a
    temperature of the term's own; the sum and the mean over tokens too."""
    batch, T = Batch(), 1.7
    teacher = torch.randn(N, V, dtype=DTYPE)
    for reduction, temperature in (("weighted_mean", None), ("weighted_mean", T), ("token_sum", None)):
        truth, leaf = (batch.weight.clone().requires_grad_() for _ in range(2))
        z, mean = batch.hidden @ truth.T, "sum" if reduction == "token_sum" else "mean"
        ce = F.cross_entropy(
            z / (temperature or 1.0), batch.targets, batch.w, label_smoothing=smoothing, reduction=mean
        )
        kept = batch.targets >= 0
        want = ce + z[kept].logsumexp(-1).square().mean() / 10
        want = want + F.kl_div(z[kept].log_softmax(-1), teacher[kept].softmax(-1), reduction="batchmean")
        term = hl.Term(cross_entropy, label_smoothing=smoothing, reduction=reduction, temperature=temperature)
        objective = hl.Objective(ce=term, z=hl.Term(z_loss, weight=0.1), kl=forward_kl, backend=BACKEND)
        call = {"class_weight": batch.w, "teacher": hl.Logits(teacher)}
        out = objective(batch.source(how, leaf), batch.targets, **call)
        close(out.terms["ce"], ce.detach())
        close(out.loss.detach(), want.detach())
        close(torch.autograd.grad(out.loss, leaf)[0], torch.autograd.grad(want, truth)[0])


@pytest.mark.skipif(INSIDE, reason="ran in the other process")
def test_alone_prepared_compiled_and_verified() -> None:
    batch = Batch()
    truth = batch.weight.clone().requires_grad_()
    want = F.cross_entropy(batch.hidden @ truth.T, batch.targets, batch.w, label_smoothing=E)
    (grad,) = torch.autograd.grad(want, truth)
    objective = hl.Objective(ce=hl.Term(cross_entropy, label_smoothing=E, reduction="weighted_mean"), backend="torch")
    plain = hl.Objective(ce=hl.Term(cross_entropy, label_smoothing=E), backend="torch")
    for targets in (batch.targets, hl.prepare(batch.targets)):
        leaf = batch.weight.clone().requires_grad_()
        out = objective(batch.source("linear", leaf), targets, class_weight=batch.w)
        close(torch.autograd.grad(out.loss, leaf)[0], grad)
        assert plain(batch.source("linear", leaf), targets).loss.isfinite()  # and without, in the same process
    hl.verify(objective, batch.source("linear", batch.weight), batch.targets, class_weight=batch.w).check()
    run = torch.compile(
        lambda leaf: objective(hl.Linear(batch.hidden, leaf), batch.targets, class_weight=batch.w).loss,
        fullgraph=True, backend="eager",
    )  # fmt: skip
    leaf = batch.weight.clone().requires_grad_()
    close(torch.autograd.grad(run(leaf), leaf)[0], grad)


@pytest.mark.parametrize("tokens", [[8, 0, 3, 1, 2, 7, 5, 4, 6], [7, 2, 8, 0, 3]], ids=["all", "some"])
def test_on_a_head_over_some_tokens_they_are_those_of_tokens(tokens: list[int]) -> None:
    batch = Batch()
    ids, w = torch.tensor(tokens), torch.rand(V + 2, dtype=DTYPE)
    column = {token: c for c, token in enumerate(tokens)}
    targets = torch.tensor([column.get(int(t), -100) for t in batch.targets])
    truth, leaf = (batch.weight[ids].clone().requires_grad_() for _ in range(2))
    want = F.cross_entropy(batch.hidden @ truth.T, targets, w[ids], label_smoothing=E)
    term = hl.Term(cross_entropy, label_smoothing=E, reduction="weighted_mean")
    objective = hl.Objective(ce=term, backend=BACKEND)
    source = hl.Linear(batch.hidden, leaf, vocab_ids=ids)
    out = objective(source, batch.targets, class_weight=w)
    close(out.loss.detach(), want.detach())
    close(torch.autograd.grad(out.loss, leaf)[0], torch.autograd.grad(want, truth)[0])
    with pytest.raises(ValueError, match=r"class_weight: wanted one weight per token .*vocab_ids up to 8, got 5"):
        objective(source, batch.targets, class_weight=w[:5])


@pytest.mark.skipif(INSIDE, reason="ran in the other process")
def test_what_is_refused() -> None:
    batch = Batch()
    source, objective = batch.source("logits", batch.weight), hl.Objective(ce=cross_entropy)
    wrong = {
        r"shape \(9,\), got torch.float64 of shape \(4,\)": batch.w[:4],
        "floats of shape": torch.ones(V, dtype=torch.long),
        "finite and not below 0": -batch.w,
        "requires grad": batch.w.clone().requires_grad_(),
    }
    for said, w in wrong.items():
        with pytest.raises(ValueError, match=f"class_weight: .*{said}"):
            objective(source, batch.targets, class_weight=w)
    twice = hl.Objective(ce=hl.Term(cross_entropy, row_weight=lambda targets, class_weight: class_weight[targets]))
    with pytest.raises(ValueError, match="class_weight: 'ce' weighs its classes by it, and another function takes it"):
        twice(source, batch.targets, class_weight=hl.Whole(batch.w))
    own = hl.Objective(ce=hl.Term(cross_entropy, targets="other"))
    with pytest.raises(ValueError, match="class_weight: term 'ce' weighs by the targets of the call"):
        own(source, batch.targets, other=batch.targets, class_weight=batch.w)
    with pytest.raises(ValueError, match=r"advantage: has shape \(9, 1\); wanted \(9,\), one value per row, .*squeeze"):
        hl.Objective(rl=grpo)(source, batch.targets, advantage=torch.ones(N, 1))
    with pytest.raises(TypeError, match="class_weight: no loss asks for this input"):
        hl.Objective(z=z_loss)(source, batch.targets, class_weight=batch.w)
