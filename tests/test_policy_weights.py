"""Row weights of policy terms, and the names other trainers give the metrics."""

from __future__ import annotations

import math
import random

import pytest
import torch
from formulas.policy import FORMULAS
from test_policy import LONG, Batch, S, V, close
from torch import Tensor

import headloss as hl
from headloss.integrations.names import TORCHTITAN, TRL, VERL, rename
from headloss.losses import cispo, dpo, grpo, gspo
from headloss.row_weights import band, drop_segments, off_policy_mask, reject, second_moment, top_entropy, truncate, wpo


@pytest.fixture(scope="module")
def batch() -> Batch:
    batch = Batch(seed=3)
    unscored = torch.nonzero(batch.valid & (batch.ids == LONG)).flatten()[2]
    batch.inputs["sampler_logprob"][unscored] = math.nan
    return batch


def rows_of(batch: Batch) -> list[Tensor]:
    ids = batch.ids[batch.valid]
    return [torch.nonzero(ids == s).flatten() for s in range(S) if (ids == s).any()]


def sampler_ratio(batch: Batch, old: Tensor) -> Tensor:
    ratio = torch.exp(old - batch.inputs["sampler_logprob"][batch.valid])
    return torch.where(ratio.isnan(), 1.0, ratio)


def of_segments(batch: Batch, w: Tensor, normalised: bool) -> Tensor:
    w = w.clone()
    for rows in rows_of(batch):
        product = w[rows].prod()
        w[rows] = product ** (1 / len(rows)) if normalised else product
    return w


def expect_truncate(batch, logprob, entropy, w):
    return w.clamp(max=1.2)


def expect_truncate_segment(batch, logprob, entropy, w):
    return of_segments(batch, w, False).clamp(0.5, 1.5)


def expect_band(batch, logprob, entropy, w):
    return torch.where((w < 0.7) | (w > 1.4), 0.0, w)


def expect_band_mean(batch, logprob, entropy, w):
    return expect_band(batch, logprob, entropy, of_segments(batch, w, True))


def expect_drop(batch, logprob, entropy, w):
    w = of_segments(batch, w, True)
    return ((w >= 0.85) & (w <= 1.1)).double()


def expect_drop_token(batch, logprob, entropy, w):
    keep = torch.zeros_like(w)
    for rows in rows_of(batch):
        keep[rows] = float(all(0.4 <= x <= 2.2 for x in w[rows].tolist()))
    return keep


def expect_off_policy(batch, logprob, entropy, w):
    gap = batch.inputs["sampler_logprob"][batch.valid] - logprob
    gap = torch.where(gap.isnan(), 0.0, gap)
    keep = torch.ones_like(w)
    for rows in rows_of(batch):
        for row in rows:
            if batch.inputs["advantage"][batch.valid][row] < 0 and gap[rows].mean() > 0.02:
                keep[row] = 0
    return keep


def expect_top_entropy(batch, logprob, entropy, w):
    return (entropy >= torch.quantile(entropy, 0.7)).double()


def expect_reject(batch, logprob, entropy, w):
    return ((torch.log(1 / w) >= -0.2) & (torch.log(1 / w) <= 0.4)).double()


def expect_reject_max(batch, logprob, entropy, w):
    keep = torch.zeros_like(w)
    for rows in rows_of(batch):
        keep[rows] = float(max(float(x - 1 - math.log(x)) for x in w[rows]) <= 0.25)
    return keep


def expect_second_moment(batch, logprob, entropy, w):
    square = torch.log(w) ** 2
    keep, order = torch.ones_like(w), square.argsort(descending=True).tolist()
    while len(order) > 1 and square[order].mean() >= 0.1:  # the largest go until the mean of the rest is small
        keep[order.pop(0)] = 0
    return keep


WEIGHTS = {
    "reject": (reject(0.4, -0.2), expect_reject, "row"),
    "reject_max": (reject(0.25, estimator="k3", level="segment_max"), expect_reject_max, "segment"),
    "second_moment": (second_moment(0.1), expect_second_moment, "batch"),
    "truncate": (truncate(1.2), expect_truncate, "row"),
    "truncate_segment": (truncate(1.5, 0.5, level="segment"), expect_truncate_segment, "segment"),
    "band": (band(0.7, 1.4), expect_band, "row"),
    "band_mean": (band(0.7, 1.4, level="segment_mean"), expect_band_mean, "segment"),
    "drop": (drop_segments(0.85, 1.1), expect_drop, "segment"),
    "drop_token": (drop_segments(0.4, 2.2, level="token"), expect_drop_token, "segment"),
    "off_policy": (off_policy_mask(0.02), expect_off_policy, "segment"),
    "top_entropy": (top_entropy(0.3), expect_top_entropy, "batch"),
}


@pytest.mark.parametrize("with_old", [True, False], ids=["old", "on_policy"])
@pytest.mark.parametrize("reduction", ["token_mean", "weighted_mean"])
@pytest.mark.parametrize("case", WEIGHTS)
def test_row_weight(batch: Batch, case: str, reduction: str, with_old: bool) -> None:
    weight_fn, expect, kind = WEIGHTS[case]
    hidden, weight = batch.leaves()
    logprob = batch.dense(hidden, weight)
    logits = (hidden @ weight.T)[batch.valid]
    old = batch.inputs["old_logprob"][batch.valid] if with_old else None
    w = sampler_ratio(batch, logprob.detach() if old is None else old)
    entropy = torch.distributions.Categorical(logits=logits.detach()).entropy()
    weights = expect(batch, logprob.detach(), entropy, w)
    assert (weights != weights[0]).any(), "the case must tell rows apart"
    values = weights * FORMULAS["grpo"](logprob, batch.inputs["advantage"][batch.valid], old)
    value = values.sum() / (weights.sum() if reduction == "weighted_mean" else len(values))
    want = torch.autograd.grad(value, (hidden, weight))

    term = hl.Term(grpo, row_weight=weight_fn, reduction=reduction)
    given = batch.given(grpo, weight_fn, without=() if with_old else ("old_logprob",))
    objective = hl.Objective(rl=term)
    for memory in (4 * V * 8, 1000 * V * 8):
        h, w = batch.leaves()
        out = objective(hl.Linear(h, w, memory=memory), batch.targets, segments=batch.segments, **given)
        out.loss.backward()
        close(out.loss.detach(), value.detach())
        close(h.grad, want[0])
        close(w.grad, want[1])
    if reduction == "token_mean":
        plan = objective.explain(hl.Linear(h, w), batch.targets, segments=batch.segments, **given)
        assert plan.terms[0].kind == kind, plan.terms[0].reason


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("level", ["token", "segment", "segment_mean", "segment_max"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_rejection_by_an_estimate(batch: Batch, estimator: str, level: str, reverse: bool) -> None:
    """Sum, mean or maximum of the estimates, by a loop; bounds that tell segments apart."""
    old, w = batch.inputs["old_logprob"][batch.valid], sampler_ratio(batch, batch.inputs["old_logprob"][batch.valid])
    w = 1 / w if reverse else w
    kl = {"k1": -torch.log(w), "k2": torch.log(w) ** 2 / 2, "k3": w - 1 - torch.log(w)}[estimator]
    how = {"segment": torch.sum, "segment_mean": torch.mean, "segment_max": torch.amax}.get(level)
    if how is not None:
        for rows in rows_of(batch):
            kl[rows] = how(kl[rows]).expand(len(rows)).clone()
    found = kl.unique()
    low, high = float((found[0] + found[1]) / 2), float((found[-2] + found[-1]) / 2)
    args = [old, batch.inputs["sampler_logprob"][batch.valid]]
    args += [] if how is None else [hl.Segments.from_ids(batch.ids[batch.valid], S)]
    for bound in ({}, {"low": low}):
        kept = reject(high, **bound, estimator=estimator, level=level, reverse=reverse)(*args, old)[0]
        want = (kl <= high) & (kl >= bound.get("low", -math.inf))
        assert torch.equal(kept, want.double()) and want.any() and not want.all()


def test_pairs_weighted_by_how_likely_they_are(batch: Batch) -> None:
    hidden, weight = batch.leaves()
    logp = (hidden @ weight.T).log_softmax(-1)[batch.valid]
    logprob = batch.dense(hidden, weight)
    off = (logprob - logp.exp().square().sum(-1).log()).detach()
    ids, pairs = batch.ids[batch.valid], batch.inputs["pairs"]
    w = [off[ids == s].mean().exp() for s in range(S)]
    held = hl.Segments.from_ids(ids, S)
    values = FORMULAS["dpo"](logprob, **batch.rows(batch.given(dpo)), segments=held)
    value = torch.stack([v * w[c] * w[r] for v, (c, r) in zip(values, pairs.tolist())]).mean()
    want = torch.autograd.grad(value, (hidden, weight))
    for memory in (4 * V * 8, 1000 * V * 8):
        h, u = batch.leaves()
        objective = hl.Objective(it=hl.Term(dpo, row_weight=wpo()))
        out = objective(hl.Linear(h, u, memory=memory), batch.targets, segments=batch.segments, **batch.given(dpo))
        out.loss.backward()
        close(out.loss.detach(), value.detach())
        close(h.grad, want[0])
        close(u.grad, want[1])


def test_equal_weights_share_a_trace_and_others_do_not(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    from headloss.trace import trace as plan

    traced = []
    trace_once = plan._trace_once
    monkeypatch.setattr(plan, "_trace_once", lambda *a: traced.append(1) or trace_once(*a))
    monkeypatch.setattr(plan, "_TRACES", {})  # other tests trace the same loss
    losses = []
    for high in (1.01, 1.01, 1.02):
        term = hl.Term(cispo, row_weight=truncate(high))
        given = batch.given(cispo, term.row_weight)
        losses.append(float(hl.Objective(rl=term)(hl.Linear(batch.hidden, batch.weight), batch.targets, **given).loss))
    assert len(traced) == 3, "the loss alone, and with each of two weights"
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("how", ["a list", "a list with an input", "a function"])
def test_two_weights_multiply(batch: Batch, how: str) -> None:
    correction, mask = truncate(1.2), off_policy_mask(0.02)

    def both(logprob, advantage, sampler_logprob, segments, old_logprob):
        kept, _ = mask(logprob, advantage, segments, old_logprob, sampler_logprob)
        return correction(logprob, sampler_logprob, old_logprob)[0] * kept

    given = batch.given(gspo, both)
    row_weight = {"a list": [correction, mask], "a function": both}.get(how, [correction, mask, "more"])
    given |= {"more": torch.ones(len(batch.targets), dtype=torch.float64)} if how == "a list with an input" else {}
    objective = hl.Objective(rl=hl.Term(gspo, row_weight=row_weight, low=0.1, high=0.1))
    source = hl.Linear(batch.hidden, batch.weight, memory=4 * V * 8)
    out = objective(source, batch.targets, segments=batch.segments, **given)
    logprob = batch.dense(batch.hidden, batch.weight)
    w = sampler_ratio(batch, batch.inputs["old_logprob"][batch.valid])
    weights = expect_truncate(batch, logprob, None, w) * expect_off_policy(batch, logprob, None, w)
    held = hl.Segments.from_ids(batch.ids[batch.valid], S)
    values = FORMULAS["gspo"](logprob, **batch.rows(batch.given(gspo)), segments=held, low=0.1, high=0.1)
    close(out.loss, (weights * values).mean())
    assert objective.explain(source, batch.targets, segments=batch.segments, **given).terms[0].kind == "segment"


REPORTS = {
    "truncated": (truncate(1.2, 0.8), lambda w: w.clamp(0.8, 1.2)),
    "banded": (band(0.7, 1.4), lambda w: torch.where((w < 0.7) | (w > 1.4), 0.0, w)),
}


@pytest.mark.parametrize("where", ["logits", "chunks"])
def test_row_weights_report(batch: Batch, where: str) -> None:
    """Each under the term's name, over all rows that count, the dropped ones too; the loss's own over those kept."""
    given = batch.given(grpo, *(fn for fn, _ in REPORTS.values()))
    row_weight = [fn for fn, _ in REPORTS.values()] + [truncate(1.2, 0.8)]
    objective = hl.Objective(rl=hl.Term(grpo, row_weight=row_weight), plain=grpo)
    source = hl.Logits(batch.hidden @ batch.weight.T)
    if where == "chunks":
        source = hl.Linear(batch.hidden, batch.weight, memory=4 * V * 8)
    out = objective(source, batch.targets, **given)
    d = (batch.inputs["old_logprob"] - batch.inputs["sampler_logprob"])[batch.valid]
    d = torch.where(d.isnan(), 0.0, d)
    w = d.exp()
    product = torch.ones_like(w)
    for name, (_, expect) in REPORTS.items():
        weight = expect(w)
        product = product * weight
        want = {
            "weight_mean": weight.mean(), "weight_min": weight.min(), "weight_max": weight.max(),
            "effective_sample_size": weight.sum() ** 2 / (weight * weight).sum(),
            "cut_fraction": (weight != w).double().mean(), "k1": (-d).mean(), "k3": (w - 1 - d).mean(),
            "sampler_ratio_mean": w.mean(), "sampler_ratio_min": w.min(), "sampler_ratio_max": w.max(),
            "gap_mean": d.abs().mean(), "gap_max": d.abs().max(), "drift": d.mean(),
            "gap_factor": torch.maximum(w, 1 / w).mean(), "off_by": (w - 1).abs().mean(), "chi2": (w * w - 1).mean(),
            "k3_reverse": (1 / w - 1 + d).mean(),
            "js": -(0.5 * torch.log(2 * w / (w + 1)) + 0.5 * torch.log(2 / (w + 1))).mean(),
        }  # fmt: skip
        assert 0 < want["cut_fraction"] < 1
        for metric, number in want.items():
            close(out.metrics[f"rl/{name}/{metric}"].value, number)
        assert {k.rpartition("/")[2] for k in out.metrics if k.startswith(f"rl/{name}/")} == set(want)
    assert float(out.metrics["rl/truncated_2/k1"]) == float(out.metrics["rl/truncated/k1"])
    ratio = (batch.dense(batch.hidden, batch.weight) - batch.inputs["old_logprob"][batch.valid]).exp()
    close(out.metrics["rl/ratio_mean"].value, ratio[product != 0].mean())
    close(out.metrics["plain/ratio_mean"].value, ratio.mean())


def test_a_weight_of_ones_own_reports_too(batch: Batch) -> None:
    def halved(logprob):
        return torch.full_like(logprob, 0.5), {"low": logprob < -3}

    objective = hl.Objective(rl=hl.Term(grpo, row_weight=halved))
    source = hl.Linear(batch.hidden, batch.weight)
    out = objective(source, batch.targets, **batch.given(grpo))
    close(out.metrics["rl/halved/low"].value, (batch.dense(batch.hidden, batch.weight) < -3).double().mean())
    report = hl.verify(objective, hl.Linear(*batch.leaves()), batch.targets, **batch.given(grpo))
    assert report.ok, str(report)
    objective = hl.Objective(rl=hl.Term(grpo, row_weight=lambda logprob: (logprob, {"x": "y"})))
    with pytest.raises(TypeError, match="its metric 'x'"):
        objective(source, batch.targets, **batch.given(grpo))


def test_far_away_samplers_stay_finite() -> None:
    logprob = torch.tensor([-1.0, -1e4, 0.0])
    sampler = torch.tensor([-1e4, -1.0, -math.inf])
    segments = hl.Segments.from_ids(torch.tensor([0, 0, 1]))
    for level in ("segment", "segment_mean"):
        for fn in (truncate(2.0, level=level), band(0.0, 1e9, level=level), drop_segments(0.1, 2.0, level=level)):
            weight, metrics = fn(logprob, sampler, segments)
            assert weight.isfinite().all() and all(x.isfinite().all() for x in metrics.values())
    assert truncate(2.0)(logprob, sampler)[0].tolist() == [2.0, pytest.approx(math.exp(-20)), 2.0]
    assert band(0.5, 2.0)(logprob, sampler)[0].tolist() == [0.0, 0.0, 0.0]


def test_a_wrong_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="level: wanted one of token"):
        truncate(2.0, level="sequence")
    with pytest.raises(ValueError, match="low, high"):
        band(2.0, 0.5)
    with pytest.raises(ValueError, match="fraction"):
        top_entropy(0.0)
    for wrong in ({"low": 3.0}, {"estimator": "k4"}, {"level": "sequence"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            reject(2.0, **wrong)


def test_top_entropy_of_no_tokens(batch: Batch) -> None:
    hidden, weight = batch.leaves()
    objective = hl.Objective(rl=hl.Term(grpo, row_weight=top_entropy(0.2)))
    out = objective(hl.Linear(hidden, weight), torch.full_like(batch.targets, -100), **batch.given(grpo))
    out.loss.backward()
    assert float(out.loss.detach()) == 0 and not hidden.grad.any()


def test_rename(batch: Batch) -> None:
    objective = hl.Objective(rl=hl.Term(grpo, dual=3.0), again=grpo, metrics=["entropy"])
    out = objective(hl.Linear(batch.hidden, batch.weight), batch.targets, **batch.given(grpo))
    numbers = hl.Meter().add(out.metrics).compute()
    for names, known in (
        (TRL, ["clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "entropy"]),
        (VERL, ["actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "critic/advantages/max"]),
        (TORCHTITAN, ["loss/ratio_mean", "loss/ratio_clipped_frac", "trainer/entropy/mean"]),
    ):
        renamed = rename(numbers, names)
        assert set(known) <= set(renamed) and len(renamed) == len(numbers)
        assert "again/clip_fraction" in renamed, "the second term's keeps its own name"
    assert rename(numbers, VERL)["actor/ppo_kl"] == numbers["rl/kl_k1"]


def test_every_map_speaks_of_metrics_that_exist() -> None:
    known = {"entropy", "accuracy"}
    rows = torch.rand(6, dtype=torch.float64)
    segments = hl.Segments.from_ids(torch.tensor([0, 0, 1, 1, 2, 2]))
    given = {
        "logprob": -rows, "old_logprob": -rows, "ref_logprob": -rows, "advantage": rows, "segments": segments,
        "pairs": torch.tensor([[0, 1]]),
    }  # fmt: skip
    for name in ("grpo", "vespo", "kl_to_reference", "dpo"):
        fn = hl.losses.LOSSES[name]
        asked = {n: x for n, x in given.items() if n in fn.__code__.co_varnames[: fn.__code__.co_argcount]}
        known |= set(fn(**asked, **({"dual": 3.0} if name == "grpo" else {}))[1])
    known |= set(truncate(2.0)(-rows, -rows)[1])
    for names in (TRL, VERL, TORCHTITAN):
        assert set(names) <= known, set(names) - known


def drawn_of_facts(logprob):
    return torch.rand_like(logprob) * logprob.exp()


def drawn_of_inputs(advantage):
    return torch.rand_like(advantage)


def drawn_by_python(advantage):
    return advantage * 0 + random.random()


@pytest.mark.parametrize("rows", [40, 7])
@pytest.mark.parametrize("weight", [drawn_of_facts, drawn_of_inputs, drawn_by_python])
def test_a_row_weight_that_draws_is_drawn_once(weight, rows):
    """The weighted mean of ones is 1 whatever was drawn: the sum below the line is that of the same numbers."""
    objective = hl.Objective(it=hl.Term(lambda lse: torch.ones_like(lse), row_weight=weight, reduction="weighted_mean"))
    hidden, head = torch.randn(40, 5).double(), torch.randn(13, 5).double()
    inputs = {} if weight is drawn_of_facts else {"advantage": torch.rand(40).double()}
    for _ in range(3):
        out = objective(hl.Linear(hidden, head, memory=rows * 13 * 8), torch.randint(13, (40,)), **inputs)
        torch.testing.assert_close(out.loss, torch.ones_like(out.loss))
