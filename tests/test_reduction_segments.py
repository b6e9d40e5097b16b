"""A reduction over other segments than the loss's: a loss of responses, averaged by prompt."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from interpreting import BACKEND, DTYPE, TOLERANCE, interpreted, outside
from torch import Tensor

import headloss as hl
from headloss.checks import dense
from headloss.checks.dense_records import DenseCall
from headloss.losses import cross_entropy, grpo, gspo, kto, z_loss

N, V, D = 13, 19, 5
RESPONSES = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 5, 5, 5])  # 4 has no rows
PROMPTS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 3, 3, 3])  # 2 has none; 3 is all ignored
REDUCTIONS = {"seq_mean_token_mean": {}, "seq_mean_token_sum": {}, "seq_mean_token_sum_norm": {"length": 7.0}}


test_under_the_interpreter = interpreted(
    __file__,
    "-k",
    "by_prompt and seq_mean_token_mean and (logits or chunks) or float16",
)


class Batch:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=DTYPE)
        self.hidden, self.weight, self.advantage = draw(N, D), draw(V, D), draw(N)
        self.targets = torch.randint(0, V, (N,), generator=generator)
        logp = torch.log_softmax(self.hidden @ self.weight.T, -1)
        self.old = logp[range(N), self.targets] + draw(N) / 4
        self.targets[[2, 6, 10, 11, 12]] = -100
        self.prompts = hl.Segments.from_ids(PROMPTS)

    def call(self, objective: hl.Objective, source: Any, **more: Any) -> Any:
        given = {"segments": hl.Segments.from_ids(RESPONSES, 6), "prompts": self.prompts, **more}
        return objective(source, self.targets, advantage=self.advantage, old_logprob=self.old, **given)

    def truth(
        self, loss: str, reduction: str, ids: Tensor = PROMPTS, number: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """The term, and the gradient of the head's weight: group by group, from the definition."""
        leaf = self.weight.double().clone().requires_grad_()
        logp = torch.log_softmax(self.hidden.double() @ leaf.T, -1)
        rows = [n for n in range(N) if self.targets[n] != -100]
        d = {n: logp[n, self.targets[n]] - self.old[n].double() for n in rows}
        values = {}
        for n in rows:
            mates = [m for m in rows if RESPONSES[m] == RESPONSES[n]] if loss == "gspo" else [n]
            ratio = torch.stack([d[m] for m in mates]).mean().exp()
            A = torch.stack([self.advantage[m].double() for m in mates]).mean()
            values[n] = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
        groups = [[values[n] for n in rows if ids[n] == g] for g in range(int(ids.max()) + 1)]
        each = [
            torch.stack(x).sum() / {"seq_mean_token_mean": len(x), "seq_mean_token_sum_norm": 7.0}.get(reduction, 1)
            for x in groups
            if x
        ]
        total = torch.stack(each).sum() / (number or len(each))
        (grad,) = torch.autograd.grad(total, leaf)
        return total.detach(), grad


def term(loss: Any, reduction: str = "seq_mean_token_mean", **more: Any) -> hl.Term:
    clip = {"low": 0.2, "high": 0.2}
    return hl.Term(loss, reduction=reduction, reduction_segments="prompts", **clip, **REDUCTIONS[reduction], **more)


def close(a: Any, b: Any, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(torch.as_tensor(a).double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("how", ["logits", "linear", "chunks", "prepared", "no host read"])
@pytest.mark.parametrize("loss", [grpo, gspo])
def test_by_prompt(loss: Any, how: str, reduction: str) -> None:
    batch = Batch()
    value, grad = batch.truth(loss.__name__, reduction)
    weight = batch.weight.clone().requires_grad_()
    source: Any = hl.Linear(batch.hidden, weight, memory=4 * V * weight.itemsize if how == "chunks" else "1GiB")
    more: dict[str, Any] = {} if loss is gspo else {"segments": None}  # a row loss then needs no others
    if how in ("logits", "no host read"):
        source = hl.Logits(batch.hidden @ weight.T)
    if how == "prepared":
        batch.targets, more["segments"] = hl.prepare(batch.targets, hl.Segments.from_ids(RESPONSES)), None  # type: ignore[assignment]
    out = batch.call(
        hl.Objective(rl=term(loss, reduction), backend=BACKEND), source, host_read=how != "no host read", **more
    )
    out.loss.backward()
    close(out.terms["rl"], value)
    close(weight.grad, grad)


def test_float16_keeps_small_shares() -> None:
    """1 / (prompts * tokens) is in the scale that half-precision gradients are written with, not in their values."""
    batch = Batch()
    logits = (batch.hidden @ batch.weight.T).half().requires_grad_()
    out = batch.call(hl.Objective(rl=term(gspo), backend=BACKEND), hl.Logits(logits), num_segments=2**24)
    out.loss.backward(torch.tensor(2.0**24, dtype=out.loss.dtype))
    want = batch.call(hl.Objective(rl=term(gspo)), hl.Logits(logits.detach().double().requires_grad_()), num_segments=1)
    want_grad = torch.autograd.grad(want.loss, want.loss.grad_fn.next_functions[0][0].variable)[0]
    close(logits.grad, want_grad, 2e-3)


@outside
def test_global_numbers_and_terms_beside() -> None:
    """`num_segments` counts prompts; another term keeps the reduction and the segments of its own."""
    batch = Batch()
    source = hl.Linear(batch.hidden, batch.weight)
    count = hl.count(batch.targets, batch.prompts)
    assert int(count.num_segments) == 2  # type: ignore[arg-type]
    value, _ = batch.truth("gspo", "seq_mean_token_mean", number=5)
    close(batch.call(hl.Objective(rl=term(gspo)), source, num_segments=5).loss, value)
    other = hl.Term(grpo, reduction="seq_mean_token_mean", weight=0.5)
    both = hl.Objective(rl=term(gspo), by_response=other, z=hl.Term(z_loss, weight=0.0), again=term(gspo, weight=2.0))
    out = batch.call(both, source)
    close(out.terms["rl"], batch.truth("gspo", "seq_mean_token_mean")[0])
    close(out.terms["by_response"], batch.truth("grpo", "seq_mean_token_mean", RESPONSES)[0])
    assert out.terms["again"] == out.terms["rl"]
    with pytest.raises(ValueError, match="num_segments: is one number, but terms 'again' and 'by_response'"):
        batch.call(both, source, num_segments=5)
    off = batch.call(both, source, weights={"rl": 0, "again": 0.0}, num_segments=5)  # then it is one
    assert off.terms["by_response"] != out.terms["by_response"]
    ignored = batch.targets.clone().fill_(-100)
    batch.targets = ignored
    assert float(batch.call(hl.Objective(rl=term(gspo)), source).loss) == 0.0


@outside
def test_configs_copies_graphs_and_plans() -> None:
    batch = Batch()
    made = hl.Objective(rl=term(gspo, "seq_mean_token_sum_norm"))
    source = hl.Linear(batch.hidden, batch.weight)
    want = batch.call(made, source).loss
    assert made.to_config()["terms"]["rl"]["reduction_segments"] == "prompts"
    for other in (hl.Objective.from_config(made.to_config()), pickle.loads(pickle.dumps(made))):
        assert batch.call(other, source).loss == want
        assert other.key == made.key
    plain = {"reduction": "seq_mean_token_sum_norm", "length": 7.0, "low": 0.2, "high": 0.2}
    assert made.key != hl.Objective(rl=hl.Term(gspo, **plain)).key
    step = torch.compile(
        lambda w, ids: batch.call(made, hl.Linear(batch.hidden, w), prompts=hl.Segments(ids, 4)).loss,
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    weight = batch.weight.clone().requires_grad_()
    loss = step(weight, PROMPTS)
    loss.backward()
    close(loss.detach(), want)
    close(weight.grad, batch.truth("gspo", "seq_mean_token_sum_norm")[1])
    given = {"segments": hl.Segments.from_ids(RESPONSES), "advantage": batch.advantage, "old_logprob": batch.old}
    plan = str(made.explain(source, batch.targets, prompts=batch.prompts, **given))
    assert "seq_mean_token_sum_norm / 7.0 over prompts" in plan


@outside
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_verify_follows_them(reduction: str) -> None:
    batch = Batch()
    given = {"segments": hl.Segments.from_ids(RESPONSES), "advantage": batch.advantage, "old_logprob": batch.old}
    made = hl.Objective(rl=term(gspo, reduction))
    source = hl.Linear(batch.hidden, batch.weight)
    for rows in (64, 6):
        found = hl.verify(made, source, batch.targets, prompts=batch.prompts, rows=rows, **given)
        assert found.ok, found
    other = hl.Objective(rl=hl.Term(gspo, reduction=reduction, low=0.2, high=0.2, **REDUCTIONS[reduction]))
    same = {n: x for n, x in given.items() if n != "segments"}
    truth = dense.answer(
        made, DenseCall(source, batch.targets, given["segments"], {}, {**same, "prompts": batch.prompts},
                    {**dict.fromkeys(same, "row"), "prompts": "whole"}),
        torch.float64, {"hidden": batch.hidden, "weight": batch.weight},
    )  # fmt: skip
    close(truth.numbers["loss"].number, batch.truth("gspo", reduction)[0])
    assert other(source, batch.targets, **given).loss != truth.numbers["loss"].number  # over responses instead


@outside
def test_what_is_refused() -> None:
    batch, source = Batch(), hl.Linear(torch.zeros(N, D), torch.zeros(V, D))
    seq: dict[str, Any] = {"reduction": "seq_mean_token_mean"}
    with pytest.raises(ValueError, match="reduction_segments: goes with seq_mean_token_mean, .*'token_mean' does not"):
        hl.Term(grpo, reduction_segments="prompts")
    for name in ("", 3, "segments", "logprob", hl.Segments.from_ids(PROMPTS)):
        with pytest.raises(TypeError, match="reduction_segments: wanted the name of an input"):
            hl.Term(grpo, reduction_segments=name, **seq)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reduction_segments: kto has one value per segment"):
        hl.Term(kto, reduction_segments="prompts", **seq)

    def mine(logprob: Tensor, segments: hl.Segments) -> Tensor:
        return segments.totals(logprob)

    made = hl.Objective(rl=hl.Term(mine, reduction_segments="prompts", **seq))
    with pytest.raises(ValueError, match="reduction_segments: term 'rl' has one value per segment"):
        made(source, batch.targets, prompts=batch.prompts, segments=hl.Segments.from_ids(RESPONSES))
    made = hl.Objective(ce=hl.Term(cross_entropy, reduction_segments="prompts", **seq))
    with pytest.raises(TypeError, match="prompts: missing; term 'ce' is reduced over these segments"):
        made(source, batch.targets)
    with pytest.raises(TypeError, match="prompts: wanted hl.Segments, which reduce term 'ce', got Tensor"):
        made(source, batch.targets, prompts=PROMPTS)
    with pytest.raises(ValueError, match=r"prompts: ids have shape \(3,\), the source's rows \(13,\)"):
        made(source, batch.targets, prompts=hl.Segments.from_ids(PROMPTS[:3]))
    with pytest.raises(ValueError, match="prompts: 4 rows that are not ignored have no segment"):
        made(source, batch.targets, prompts=hl.Segments.from_ids(PROMPTS.masked_fill(PROMPTS == 0, -1)[:N]))
    with pytest.raises(TypeError, match="prompts: no loss asks for this input"):
        hl.Objective(ce=cross_entropy)(source, batch.targets, prompts=batch.prompts)


def by_reward(logprob, segments, reward):
    return reward * (1.0 - segments.means(logprob))  # not 0 where a segment has no rows


@pytest.mark.parametrize("rows", [None, 4, 9])
@pytest.mark.parametrize("reduction", ["token_mean", "token_sum"])
def test_values_of_segments_by_hand(reduction, rows):
    """Whatever the chunks, and with a segment that has no rows: no formula of ours on the other side."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(24, 5, dtype=torch.float64), torch.randn(17, 5, dtype=torch.float64)
    ids = torch.tensor([0, 0, 1, 1, 1, 1, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 6, -1])  # none in 2
    targets, reward = torch.randint(17, (24,)), torch.randn(7, dtype=torch.float64)
    targets[[3, 23]] = -100
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, reward)]
    memory = {} if rows is None else {"memory": rows * 17 * 8 + 64}
    objective = hl.Objective(it=hl.Term(by_reward, reduction=reduction), backend="torch")
    segments = hl.Segments.from_ids(ids, 7)
    out = objective(hl.Linear(*leaves[:2], **memory), targets, segments=segments, reward=leaves[2])
    own = [x.clone().requires_grad_() for x in (hidden, weight, reward)]
    logp = (own[0] @ own[1].t()).log_softmax(-1)
    here = lambda s: [logp[n, targets[n]] for n in range(24) if ids[n] == s and targets[n] >= 0]
    values = [own[2][s] * (1 - torch.stack(here(s)).mean()) for s in (0, 1, 3, 4, 5, 6)]
    want = torch.stack(values).mean() if reduction == "token_mean" else torch.stack(values).sum()
    torch.testing.assert_close(out.loss, want)
    for ours, truth in zip(torch.autograd.grad(out.loss, leaves), torch.autograd.grad(want, own), strict=True):
        torch.testing.assert_close(ours, truth)
