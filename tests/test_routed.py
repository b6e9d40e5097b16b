"""A teacher for each row, `hl.Routed`: every head runs on its own rows, and a row may have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreting import BACKEND, DTYPE, TOLERANCE, interpreted
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, forward_kl, jsd, reverse_kl

N, V, D = 9, 19, 5


test_under_the_interpreter = interpreted(__file__, "-k", "gradients and chunks")


class Batch:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=DTYPE)
        self.hidden, self.weight = draw(N, D), draw(V, D)
        self.guides = [(draw(N, D), draw(V, D)) for _ in range(2)]
        self.route = torch.tensor([1, 0, 1, -1, 0, 1, 0, 1, 0])
        self.guides[0][0][self.route != 0] = torch.nan  # nobody looks there
        self.guides[1][0][self.route != 1] = torch.nan
        self.targets = torch.randint(0, V, (N,), generator=generator)
        self.targets[4] = -100

    def teacher(self, logits: bool = False) -> hl.Routed:
        few = 8 * V * self.weight.itemsize  # four rows at a time, where the student has logits
        made = [hl.Logits(h @ w.T) if logits else hl.Linear(h, w, memory=few) for h, w in self.guides]
        return hl.Routed(dict(zip(("math", "code"), made, strict=True)), self.route)

    def truth(self) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = (x.double().clone().requires_grad_() for x in (self.hidden, self.weight))
        s = hidden @ weight.T
        total = torch.zeros((), dtype=torch.float64)
        for n in range(N):
            if n == 4:
                continue
            logp = s[n].log_softmax(-1)
            total = total - logp[self.targets[n]]
            if self.route[n] < 0:
                continue
            h, w = self.guides[int(self.route[n])]
            u = h[n].double() @ w.double().T
            logq, hot, cold = u.log_softmax(-1), (s[n] / 2).log_softmax(-1), (u / 2).log_softmax(-1)
            total = total + (logq.exp() * (logq - logp)).sum() + 0.5 * (hot.exp() * (hot - cold)).sum()
            logm = torch.logaddexp(logp, logq) - torch.log(torch.tensor(2.0, dtype=torch.float64))
            total = total + 0.5 * (logq.exp() * (logq - logm) + logp.exp() * (logp - logm)).sum()
        loss = total / (N - 1)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


OBJECTIVE = hl.Objective(
    ce=cross_entropy,
    kl=forward_kl,
    hot=hl.Term(reverse_kl, temperature=2.0, weight=0.5),
    jsd=jsd,
    backend=BACKEND,
)


@pytest.mark.parametrize("how", ["logits", "linear", "chunks", "backward", "no host read"])
def test_values_and_gradients(how: str) -> None:
    batch = Batch()
    loss, dhidden, dweight = batch.truth()
    hidden, weight = batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()
    source: Any = hl.Linear(hidden, weight, memory=10 * V * weight.itemsize if how == "chunks" else "1GiB")
    if how in ("logits", "backward", "no host read"):
        source = hl.Logits(hidden @ weight.T)
    teacher = batch.teacher(how in ("logits", "linear"))
    out = OBJECTIVE(source, batch.targets, teacher=teacher, host_read=how != "no host read")
    if how == "backward":  # a pull of facts, after the call
        (out.loss + 0 * out.facts.teacher_cross_entropy.sum()).backward()
    else:
        out.loss.backward()
    torch.testing.assert_close(out.loss.detach().double(), loss, rtol=TOLERANCE, atol=TOLERANCE)
    assert hidden.grad is not None and weight.grad is not None
    torch.testing.assert_close(hidden.grad.double(), dhidden, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(weight.grad.double(), dweight, rtol=TOLERANCE, atol=TOLERANCE)
    assert out.facts.teacher_entropy[3] == 0 and (out.facts.teacher_entropy[[0, 1, 2]] > 0).all()


def test_each_head_runs_on_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the teachers, so that each makes its rows of a chunk with one product."""
    from headloss.engine import heads

    made: list[tuple[int, int]] = []
    whole = heads.product
    monkeypatch.setattr(heads, "product", lambda x, y, out, **how: (made.append(out.shape), whole(x, y, out, **how)))
    batch = Batch()
    with torch.no_grad():
        objective = hl.Objective(kl=forward_kl, backend="torch")
        objective(hl.Linear(batch.hidden, batch.weight), batch.targets, teacher=batch.teacher())
    assert sorted(rows for rows, _ in made) == [3, 4, 8]  # math, code, the student: row 4 is ignored


def test_temperatures_of_their_own_and_segments() -> None:
    batch = Batch()
    teachers = [hl.Linear(h, w, temperature=T) for (h, w), T in zip(batch.guides, (0.5, 2.0), strict=True)]
    routed = hl.Routed(dict(zip("ab", teachers, strict=True)), batch.route)
    segments = hl.Segments.from_cu_seqlens(torch.tensor([0, 4, 9]))
    objective = hl.Objective(kl=hl.Term(forward_kl, reduction="seq_mean_token_sum"), backend="torch")
    out = objective(hl.Linear(batch.hidden, batch.weight), batch.targets, teacher=routed, segments=segments)
    want = torch.zeros((), dtype=DTYPE)
    for n in range(N):
        if n != 4 and batch.route[n] >= 0:
            h, w = batch.guides[int(batch.route[n])]
            logq = (h[n] @ w.T / (0.5, 2.0)[int(batch.route[n])]).log_softmax(-1)
            want = want + (logq.exp() * (logq - (batch.hidden[n] @ batch.weight.T).log_softmax(-1))).sum()
    torch.testing.assert_close(out.loss, want / 2, rtol=1e-6, atol=1e-6)


def test_refusals() -> None:
    batch = Batch()
    teachers = batch.teacher().teachers
    wrong = batch.route.clone()
    wrong[6] = 2
    with pytest.raises(
        ValueError, match="route: row 6 has teacher 2, but there are 2, numbered from 0, and -1 for none"
    ):
        hl.Routed(teachers, wrong)
    with pytest.raises(ValueError, match=r"route: wanted one number per row, shape \(9,\).*, got \(8,\)"):
        hl.Routed(teachers, wrong[:-1])
    narrow = {**teachers, "code": hl.Linear(batch.guides[1][0], batch.guides[1][1][:7])}
    with pytest.raises(ValueError, match=r"teachers\['code'\]: its vocab is 7, that of the first 19"):
        hl.Routed(narrow, batch.route)
    with pytest.raises(ValueError, match="metrics: 'teacher_agreement' uses a routed teacher"):
        hl.Objective(kl=forward_kl, metrics=["teacher_agreement"])(
            hl.Linear(batch.hidden, batch.weight), batch.targets, teacher=batch.teacher()
        )


def test_the_host_knows_the_route() -> None:
    """It travels when the teachers are made; a call that drops no row waits for nothing else, and sees later writes."""
    batch = Batch()
    batch.targets[4] = 3
    teacher, objective = batch.teacher(), hl.Objective(kl=forward_kl)
    for route in (batch.route, batch.route.flip(0)):
        batch.route.copy_(route)
        for guide in (0, 1):
            batch.guides[guide][0].nan_to_num_(0.5)
        got = objective(hl.Linear(batch.hidden, batch.weight), batch.targets, teacher=teacher)
        want = objective(hl.Linear(batch.hidden, batch.weight), batch.targets, teacher=batch.teacher())
        alone = [
            objective(hl.Linear(batch.hidden, batch.weight), torch.where(batch.route == i, batch.targets, -100),
                      teacher=hl.Linear(*batch.guides[i]), num_items=N).loss for i in (0, 1)
        ]  # fmt: skip
        torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=0)
        torch.testing.assert_close(got.loss, sum(alone), rtol=TOLERANCE, atol=TOLERANCE)
    batch.route[3] = 2
    with pytest.raises(ValueError, match="route: row 3 has teacher 2, but there are 2"):
        objective(hl.Linear(batch.hidden, batch.weight), batch.targets, teacher=teacher)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")])
def test_teachers_of_several_types(dtypes: tuple[str, str]) -> None:
    """Each as exact as it came; and a temperature is no number of the default type."""
    generator = torch.Generator().manual_seed(3)
    z, u, v = (3 * torch.randn(N, V, generator=generator) for _ in range(3))
    route = torch.tensor([0, 1, 0, 1, 1, 0, 0, 1, 1])
    u, v = (x.to(getattr(torch, dtype)) for x, dtype in zip((u, v), dtypes, strict=True))
    said = torch.where((route == 0)[:, None], u.double() / 0.7, v.double() / 1.3).log_softmax(-1)
    want = (said.exp() * (said - z.double().log_softmax(-1))).sum(-1).mean()
    teacher = hl.Routed({"u": hl.Logits(u, temperature=0.7), "v": hl.Logits(v, temperature=1.3)}, route)
    torch.set_default_dtype(torch.bfloat16)
    try:
        loss = hl.Objective(kd=forward_kl)(hl.Logits(z), route, teacher=teacher).loss
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("student", ["Logits", "Linear"])
@pytest.mark.parametrize("columns", [40, 5000])  # rows of the shared chunk that follow each other, and that do not
def test_rows_that_stand_together_in_one_chunk_and_apart_in_the_next(columns: int, student: str) -> None:
    """Each teacher's product goes to its own rows, whatever the last chunk's were."""
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
        hidden, weight = draw(24, D).requires_grad_(), draw(columns, D).requires_grad_()
        chunk = columns * 8 * 2 * 6
        heads = [hl.Linear(draw(24, D), draw(columns, D), memory=chunk) for _ in range(2)]
        route = torch.randint(2, (24,), generator=g)
        source = (
            hl.Linear(hidden, weight, memory=chunk * 3 // 2) if student == "Linear" else hl.Logits(hidden @ weight.T)
        )
        segments = hl.Segments.from_ids(torch.arange(24) // 8)
        objective = hl.Objective(kd=hl.Term(forward_kl, reduction="seq_mean_token_mean"))
        routed = hl.Routed(dict(zip(("a", "b"), heads, strict=True)), route)
        loss = objective(source, torch.zeros(24).long(), segments=segments, teacher=routed).loss
        logits = torch.stack([h.hidden @ h.weight.T for h in heads])[route, torch.arange(24)]
        logp, logq = (hidden @ weight.T).log_softmax(-1), logits.log_softmax(-1)
        truth = (logq.exp() * (logq - logp)).sum(-1).mean()
        torch.testing.assert_close(loss, truth)
        for got, wanted in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (loss, truth)), strict=True):
            torch.testing.assert_close(got, wanted)
