"""A padded vocabulary on one rank: `vocab=V` on a source, and columns from V on do not exist."""

from typing import Any

import pytest
import torch
from interpreting import INSIDE, interpreted
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, forward_kl, jsd, z_loss

BACKEND, DTYPE = ("triton", torch.float32) if INSIDE else ("torch", torch.float64)
N, V, HELD, D = 7, 37, 41, 5
TERMS: dict[str, Any] = {
    "ce": hl.Term(cross_entropy, label_smoothing=0.1),
    "h": hl.Term(entropy_bonus, weight=0.3),
    "z": z_loss,
}


def close(got: Any, want: Any) -> None:
    tolerance = 1e-4 if INSIDE else 1e-10
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def heads(how: str) -> tuple[Any, list[Tensor], Any, list[Tensor]]:
    """A padded source, NaN in its padding, and the same without the padding, with their leaves."""
    logits, hidden, weight, bias = (
        torch.randn(*shape, dtype=DTYPE) for shape in ((N, HELD), (N, D), (HELD, D), (HELD,))
    )
    for x in (logits[:, V:], weight[V:], bias[V:]):
        x.fill_(torch.nan)
    long = [logits] if how == "logits" else [hidden, weight, bias]
    short = [logits[:, :V]] if how == "logits" else [hidden, weight[:V], bias[:V]]
    long, short = ([x.clone().requires_grad_() for x in xs] for xs in (long, short))
    if how == "logits":
        return hl.Logits(*long, vocab=V), long, hl.Logits(*short), short
    memory = {"memory": 2 * V * long[0].element_size() if how == "chunks" else "1GiB"}
    return hl.Linear(*long, vocab=V, **memory), long, hl.Linear(*short, **memory), short


test_under_the_interpreter = interpreted(__file__)


@pytest.mark.parametrize("how", ["logits", "linear", "chunks"])
@pytest.mark.parametrize("teacher", ["none", "padded", "sparse"])
def test_the_padding_is_not_there(how: str, teacher: str) -> None:
    """Value, metrics and gradients are those of the tensors cut off, and the padding's gradient is exactly 0."""
    terms, call, cut = dict(TERMS), {}, {}
    if teacher == "padded":
        theirs = torch.randn(N, HELD + 2, dtype=DTYPE)
        terms |= {"kl": forward_kl, "jsd": jsd}
        call, cut = {"teacher": hl.Logits(theirs, vocab=V)}, {"teacher": hl.Logits(theirs[:, :V])}
    elif teacher == "sparse":
        terms["kl"] = forward_kl
        call = cut = {"teacher": hl.Sparse(torch.randint(V, (N, 3)), torch.full((N, 3), -2.0))}
    targets = torch.randint(V, (N,))
    targets[2] = -100
    objective = hl.Objective(**terms, metrics=["entropy", "argmax"], backend=BACKEND)
    source, leaves, short, short_leaves = heads(how)
    out, want = objective(source, targets, **call), objective(short, targets, **cut)
    close(out.loss, want.loss)
    for name, metric in want.metrics.items():
        close(out.metrics[name].value, metric.value)
    out.loss.backward()
    want.loss.backward()
    for i, (x, y) in enumerate(zip(leaves, short_leaves)):
        padded = x.grad[:, V:] if how == "logits" else x.grad[V:] if i else x.grad[:0]
        kept = x.grad[:, :V] if how == "logits" else x.grad[:V] if i else x.grad
        close(kept, y.grad)
        assert padded.eq(0).all()


PLACES = {  # rows that do not follow each other in memory
    "padded": lambda: torch.full((N, HELD), torch.nan, dtype=DTYPE),
    "transposed": lambda: torch.empty(V, N, dtype=DTYPE).T,
    "every second row": lambda: torch.full((2 * N, V), 7.0, dtype=DTYPE)[::2],
}


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "tvd", "skew_kl", "soft_cross_entropy"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_divergence_alone(name: str, place: str, inplace: bool) -> None:
    """The gradient wherever it stands, where nothing but a divergence is asked of a row."""
    u, targets = torch.randn(N, V, dtype=DTYPE), torch.randint(V, (N,))
    held, z = PLACES[place](), torch.randn(N, V, dtype=DTYPE)
    held[:, :V] = z
    leaf = z.double().requires_grad_()
    logp, logq = leaf.log_softmax(-1), u.double().log_softmax(-1)
    logm = torch.logaddexp(logp, logq) - torch.tensor(2.0, dtype=torch.float64).log()
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1).mean()
    want = {
        "forward_kl": lambda: kl(logq, logp), "reverse_kl": lambda: kl(logp, logq),
        "jsd": lambda: 0.5 * kl(logq, logm) + 0.5 * kl(logp, logm),
        "tvd": lambda: 0.5 * (logp.exp() - logq.exp()).abs().sum(-1).mean(),
        "skew_kl": lambda: kl(logq, (0.1 * logq.exp() + 0.9 * logp.exp()).log()),
        "soft_cross_entropy": lambda: -(logq.exp() * logp).sum(-1).mean(),
    }[name]()  # fmt: skip
    want.backward()
    objective = hl.Objective(kd=hl.losses.LOSSES[name], backend=BACKEND)
    seen = []
    held.requires_grad_().register_hook(seen.append)
    x = torch.empty_strided(held.shape, held.stride(), dtype=DTYPE).copy_(held) if inplace else held
    source = hl.Logits(x, inplace=inplace, vocab=V if place == "padded" else None)
    out = objective(source, targets, teacher=hl.Logits(u))
    out.loss.backward()
    close(out.loss.detach().double(), want.detach())
    close(seen[0][:, :V].double(), leaf.grad)
    assert seen[0][:, V:].eq(0).all()


@pytest.mark.skipif(INSIDE, reason="ran in the other process")
def test_in_place_and_in_a_graph() -> None:
    objective, targets = hl.Objective(**TERMS, backend="torch"), torch.randint(V, (N,))
    whole = torch.randn(N, HELD, dtype=DTYPE, requires_grad=True)
    want = torch.autograd.grad(objective(hl.Logits(whole[:, :V]), targets).loss, whole)[0]
    got = torch.autograd.grad(objective(hl.Logits(whole * 1, inplace=True, vocab=V), targets).loss, whole)[0]
    close(got, want)
    compiled = torch.compile(lambda x: objective(hl.Logits(x, vocab=V), targets).loss, fullgraph=True, backend="eager")
    close(torch.autograd.grad(compiled(whole), whole)[0], want)
    hl.verify(objective, hl.Logits(whole, vocab=V), targets).check()


@pytest.mark.skipif(INSIDE, reason="ran in the other process")
def test_what_is_refused() -> None:
    logits = torch.randn(N, HELD)
    objective = hl.Objective(ce=cross_entropy)
    with pytest.raises(ValueError, match=rf"targets: wanted values in \[0, {V}\)"):
        objective(hl.Logits(logits, vocab=V), torch.full((N,), V))
    with pytest.raises(ValueError, match=rf"teacher: wanted ids in \[0, {V}\)"):
        teacher_source = hl.Objective(kl=forward_kl)
        teacher_source(hl.Logits(logits, vocab=V), teacher=hl.Sparse(torch.full((N, 1), V), torch.full((N, 1), -0.1)))
    for bad in (0, -1, HELD + 1):
        with pytest.raises(
            ValueError, match=f"vocab: wanted at most {HELD}, the number of columns, and at least 1, got {bad}"
        ):
            hl.Logits(logits, vocab=bad)
    for bad in (3.0, True, "5"):
        with pytest.raises(TypeError, match="vocab: wanted an integer"):
            hl.Linear(torch.randn(N, D), torch.randn(HELD, D), vocab=bad)  # type: ignore[arg-type]
