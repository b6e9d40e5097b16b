"""Policy and preference losses through the objective, against formulas written apart from them, in float64.

Dimension key:  N rows   R rows that count   S segments   V vocabulary   D hidden size
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from formulas.policy import FORMULAS
from torch import Tensor

import headloss as hl
from headloss.losses import LOSSES, entropy_bonus, gspo, z_loss

V, D, S = 13, 5, 7
LONG, EMPTY, SINGLE, MASKED = 2, 3, 0, 5  # segments: one spans several chunks, one has no row, one has one, ...

CASES = [
    ("grpo", {}),
    ("grpo", {"low": 0.1, "high": 0.3, "dual": 1.5}),
    ("grpo", {"delta": 1.6}),
    ("grpo", {"dual": 1.7, "delta": 1.5}),
    ("gspo", {}),
    ("gspo", {"low": 0.05, "high": 0.1}),
    ("gspo", {"low": 0.01, "high": 0.02, "own": True}),
    ("gspo_token", {"low": 0.05, "high": 0.1}),
    ("gspo", {"low": 0.01, "high": 0.02, "delta": 1.05, "dual": 1.03}),
    ("cispo", {"low": 0.8, "high": 1.3}),
    ("cispo_sequence", {"low": 0.95, "high": 1.05}),
    ("sapo", {}),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 0.5}),
    ("sapo_sequence", {"tau_pos": 2.0, "tau_neg": 0.5}),
    ("sapo_sequence", {"tau_pos": 2.0, "tau_neg": 0.5, "own": True}),
    ("rloo", {}),
    ("a2po", {"beta": 0.3}),
    ("clip_cov", {"fraction": 0.2, "least": -5.0, "low": 0.01, "high": 0.01}),  # clipped tokens are no candidates
    ("kl_cov", {"fraction": 0.2, "beta": 0.7}),
    ("gmpo", {}),
    ("gmpo", {"low": 0.1, "high": 0.2}),
    ("gmpo", {"low": 0.1, "high": 0.2, "signed": True}),
    ("dppo", {"low": 0.02, "high": 0.03}),
    ("dppo", {"divergence": "kl", "low": 0.02, "high": 0.01, "cap": 1.2}),
    ("dppo", {"low": 0.02, "high": 0.03, "form": "ratio", "cap": None}),
    ("dppo", {"low": 0.02, "high": 0.03, "form": "ratio", "cap": 1.2, "one_sided": False}),
    ("reinforce", {}),
    ("kimi", {"beta": 0.4}),
    ("topr", {}),
    ("vespo", {}),
    ("vespo", {"k_pos": 1.0, "lam_neg": 0.7}),
    ("vespo", {"sampler_high": 1.3, "sampler_low": 0.7}),
    ("vespo", {"sampler_high": 3.0, "sampler_low": 0.2, "sampler_mask": True}),
    ("opd", {}),
    ("opd", {"low": 0.02}),
    ("kl_to_reference", {}),
    ("kl_to_reference", {"estimator": "k1", "corrected": True}),
    ("kl_to_reference", {"estimator": "k2"}),
    ("kl_to_reference", {"corrected": True}),
    ("kl_to_reference", {"corrected": True, "bound": 0.05}),
    ("kl_to_reference_sequence", {}),
    ("kl_to_reference_sequence", {"estimator": "k1", "bound": 0.3}),
    ("kl_to_reference", {"estimator": "abs"}),
    ("kl_to_reference", {"estimator": "mse", "bound": 0.1}),
    ("kl_to_reference", {"estimator": "low_var"}),
    ("kl_to_reference", {"estimator": "k1+"}),
    ("kl_to_reference", {"estimator": "k2+", "bound": 0.02}),
    ("kl_to_reference", {"estimator": "k3+"}),
    ("dpo", {}),
    ("dpo", {"label_smoothing": 0.2, "beta": 0.3}),
    ("dpo", {"link": "ipo"}),
    ("dpo", {"link": "ipo", "average": True, "beta": 0.6}),
    *(("dpo", {"link": link}) for link in ("hinge", "discopop", "nca", "bco", "sppo", "apo_zero", "apo_down")),
    *(("dpo", {"link": link, "label_smoothing": 0.2}) for link in ("robust", "exo", "aot", "aot_unpaired")),
    *(("dpo", {"divergence": name, "alpha": 0.3}) for name in ("forward_kl", "js", "alpha")),
    ("dpo", {"divergence": "alpha", "alpha": 1.0, "link": "ipo", "average": True}),
    ("cpo", {}),
    ("cpo", {"link": "hinge", "average": True, "beta": 0.4}),
    ("simpo", {}),
    ("simpo", {"label_smoothing": 0.1, "alpha": 0.1}),
    ("orpo", {"beta": 0.7}),
    ("orpo", {"nll": "token"}),
    ("orpo", {"nll": "none"}),
    ("kto", {}),
    ("kto", {"desirable_weight": 1.3, "undesirable_weight": 0.6, "average": True}),
]
POLICY = sorted({name for name, _ in CASES if "advantage" in inspect.signature(LOSSES[name]).parameters})
SEGMENT = (
    "gspo",
    "gspo_token",
    "gmpo",
    "vespo",
    "kto",
    "kl_to_reference_sequence",
    "cispo_sequence",
    "sapo_sequence",
    "rloo",
    "a2po",
)
KINDS = dict.fromkeys(SEGMENT, "segment") | dict.fromkeys(
    ("dpo", "cpo", "simpo", "orpo", "clip_cov", "kl_cov"), "batch"
)


def named(case: tuple[str, dict]) -> str:
    return "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())])


class Batch:
    """Unsorted segment ids, ignored rows that hold NaN and -inf, peaked logits, an old policy nearby."""

    def __init__(self, rows: int = 30, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.hidden, self.weight = normal(rows, D), 1.5 * normal(V, D)
        others = torch.tensor([s for s in range(S) if s not in (EMPTY, SINGLE, LONG)])
        ids = others[torch.randint(len(others), (rows,), generator=g)]
        ids[torch.randperm(rows, generator=g)[: rows // 2]] = LONG
        ids[rows // 3] = SINGLE
        ids[rows - 1] = MASKED
        self.targets = torch.randint(V, (rows,), generator=g)
        self.targets[ids == MASKED] = -100
        self.targets[torch.tensor([1, 4])] = -100
        self.targets[rows // 3] = 0
        ids[4] = -1
        self.valid = self.targets != -100
        self.ids = ids
        self.segments = hl.Segments.from_ids(ids, S)
        dense = (self.hidden @ self.weight.T).log_softmax(-1)
        logprob = dense.gather(1, self.targets.clamp(min=0)[:, None])[:, 0]
        self.inputs = {
            "advantage": normal(rows),
            "old_logprob": torch.minimum(logprob + 0.4 * normal(rows), torch.tensor(-1e-3)),
            "ref_logprob": torch.minimum(logprob + 0.5 * normal(rows), torch.tensor(-1e-3)),
            "sampler_logprob": torch.minimum(logprob + 0.6 * normal(rows), torch.tensor(-1e-3)),
        }
        self.inputs["draw"] = normal(rows)
        for x in self.inputs.values():
            x[~self.valid] = torch.tensor([math.nan, -math.inf, math.inf])[
                torch.arange(int((~self.valid).sum())) % 3
            ].double()
        self.inputs["pairs"] = torch.tensor([[2, 1], [4, 2], [0, 6], [1, 4]])
        self.inputs["desirable"] = torch.tensor([True, False, True, True, False, False, True])
        self.inputs["optimal_advantage"] = normal(S)
        self.inputs["kl"] = torch.tensor(0.3, dtype=torch.float64)

    def given(self, *functions, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
        asked = {name for fn in functions for name in inspect.signature(fn).parameters}
        return {name: x for name, x in self.inputs.items() if name in asked and name not in without}

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()

    def rows(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: x[self.valid] if x.shape == self.targets.shape else x for n, x in given.items()}

    def dense(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """log p of each row that counts, from the whole softmax."""
        logprob = (hidden @ weight.T).log_softmax(-1)[self.valid]
        return logprob.gather(1, self.targets[self.valid][:, None])[:, 0]

    def present(self) -> Tensor:
        ids = self.ids[self.valid]
        return torch.tensor([bool((ids == s).any()) for s in range(S)])

    def expected(
        self, name: str, options: dict, reduce, *, without: tuple[str, ...] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = self.leaves()
        given = self.rows(self.given(LOSSES[name], without=without))
        if "segments" in inspect.signature(LOSSES[name]).parameters:
            given["segments"] = hl.Segments.from_ids(self.ids[self.valid], S)
        value = reduce(FORMULAS[name](self.dense(hidden, weight), **given, **options))
        return value.detach(), *torch.autograd.grad(value, (hidden, weight))

    def mean(self, values: Tensor) -> Tensor:
        """Over rows or pairs, or over the segments that have rows."""
        return values[self.present()].mean() if len(values) == S else values.mean()


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def sources(batch: Batch, hidden: Tensor, weight: Tensor) -> dict[str, hl.Logits | hl.Linear]:
    by_budget = {f"linear{n}": hl.Linear(hidden, weight, memory=n * V * 8) for n in (1, 4, 16, 1000)}
    return {"logits": hl.Logits(hidden @ weight.T), **by_budget}


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


def test_the_batch_has_the_odd_segments(batch: Batch) -> None:
    counts = torch.bincount(batch.ids[batch.valid], minlength=S)
    assert counts[EMPTY] == 0 and not (batch.ids == EMPTY).any()
    assert counts[MASKED] == 0 and (batch.ids == MASKED).any()
    assert counts[SINGLE] == 1
    assert counts[LONG] > 2 * 4, "at a budget of 4 rows it spans three chunks"
    assert (batch.ids[batch.valid].diff() < 0).any()


def test_every_formula_has_a_loss_and_a_case() -> None:
    assert set(FORMULAS) == {name for name, _ in CASES}
    for name, formula in FORMULAS.items():
        assert inspect.signature(formula) == inspect.signature(LOSSES[name])


@pytest.mark.parametrize("case", CASES, ids=named)
def test_value_and_gradient(batch: Batch, case: tuple[str, dict]) -> None:
    name, options = case
    value, d_hidden, d_weight = batch.expected(name, options, batch.mean)
    assert d_weight.abs().max() > 1e-4 or name == "gspo"
    objective = hl.Objective(it=hl.Term(LOSSES[name], **options))
    for where in sources(batch, *batch.leaves()):
        hidden, weight = batch.leaves()
        source = sources(batch, hidden, weight)[where]
        out = objective(source, batch.targets, segments=batch.segments, **batch.given(LOSSES[name]))
        out.loss.backward()
        close(out.loss.detach(), value)
        close(hidden.grad, d_hidden)
        close(weight.grad, d_weight)
        assert all(math.isfinite(float(m)) for m in out.metrics.values()), out.metrics


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=named)
def test_on_a_gpu(batch: Batch, case: tuple[str, dict]) -> None:
    name, options = case
    value, d_hidden, _ = batch.expected(name, options, batch.mean)
    hidden, weight = (x.cuda().requires_grad_() for x in (batch.hidden, batch.weight))
    given = {n: x.cuda() if x.ndim else x for n, x in batch.given(LOSSES[name]).items()}
    segments = hl.Segments.from_ids(batch.ids.cuda(), S)
    objective = hl.Objective(it=hl.Term(LOSSES[name], **options), backend="torch")
    out = objective(hl.Linear(hidden, weight, memory=16 * V * 8), batch.targets.cuda(), segments=segments, **given)
    out.loss.backward()
    close(out.loss.detach().cpu(), value)
    close(hidden.grad.cpu(), d_hidden)


@pytest.mark.parametrize("name", [n for n in POLICY if "old_logprob" in inspect.signature(LOSSES[n]).parameters])
def test_on_policy_without_old_logprob(batch: Batch, name: str) -> None:
    value, d_hidden, _ = batch.expected(name, {}, batch.mean, without=("old_logprob",))
    hidden, weight = batch.leaves()
    given = batch.given(LOSSES[name], without=("old_logprob",))
    out = hl.Objective(it=LOSSES[name])(hl.Linear(hidden, weight), batch.targets, segments=batch.segments, **given)
    out.loss.backward()
    close(out.loss.detach(), value)
    close(hidden.grad, d_hidden)
    assert d_hidden.abs().max() > 1e-4


@pytest.mark.parametrize("name", FORMULAS)
def test_class(batch: Batch, name: str) -> None:
    plan = hl.Objective(it=LOSSES[name]).explain(
        hl.Logits(batch.hidden @ batch.weight.T), batch.targets, segments=batch.segments, **batch.given(LOSSES[name])
    )
    assert plan.terms[0].kind == KINDS.get(name, "row"), plan.terms[0].reason
    assert plan.facts == ("logprob",)


@pytest.mark.parametrize("name", FORMULAS)
def test_padding_is_masked_where_it_cannot_be_dropped(batch: Batch, name: str) -> None:
    if KINDS.get(name) == "batch":
        pytest.skip("a batch loss needs the rows dropped")
    value, d_hidden, _ = batch.expected(name, {}, batch.mean)
    hidden, weight = batch.leaves()
    source = hl.Linear(hidden, weight, memory=4 * V * 8)
    given = batch.given(LOSSES[name])
    out = hl.Objective(it=LOSSES[name])(source, batch.targets, segments=batch.segments, host_read=False, **given)
    out.loss.backward()
    close(out.loss.detach(), value)
    close(hidden.grad, d_hidden)


@pytest.mark.parametrize("name", POLICY)
def test_one_advantage_for_all_rows(batch: Batch, name: str) -> None:
    """Metrics of it too are of the rows, so that nothing asks which of them count."""
    if KINDS.get(name) == "batch":
        pytest.skip("a batch loss needs the rows dropped")
    given = {**batch.given(LOSSES[name]), "advantage": torch.tensor(0.7, dtype=torch.float64)}
    each = {**given, "advantage": torch.full(batch.targets.shape, 0.7, dtype=torch.float64)}
    source = hl.Logits(batch.hidden @ batch.weight.T)
    one, all_ = (
        hl.Objective(it=LOSSES[name])(source, batch.targets, segments=batch.segments, host_read=False, **x)
        for x in (given, each)
    )
    close(one.loss, all_.loss)
    assert {k: float(m) for k, m in one.metrics.items()} == pytest.approx(
        {k: float(m) for k, m in all_.metrics.items()}
    )


@pytest.mark.parametrize("name", FORMULAS)
def test_a_batch_without_a_token_that_counts(batch: Batch, name: str) -> None:
    hidden, weight = batch.leaves()
    objective = hl.Objective(it=LOSSES[name])
    targets = torch.full_like(batch.targets, -100)
    out = objective(hl.Linear(hidden, weight), targets, segments=batch.segments, **batch.given(LOSSES[name]))
    out.loss.backward()
    assert out.loss.isfinite()
    assert hidden.grad is not None and not hidden.grad.any()


# The relatives that are only another normaliser, each against its own paper's sum.


def _segment_rows(batch: Batch) -> list[Tensor]:
    ids = batch.ids[batch.valid]
    return [torch.nonzero(ids == s).flatten() for s in range(S) if (ids == s).any()]


def grpo_paper(batch, x):
    return sum(x[rows].sum() / len(rows) for rows in _segment_rows(batch)) / len(_segment_rows(batch))


def bnpo_paper(batch, x):
    return x.sum() / len(x)


def dapo_paper(batch, x):
    return x.sum() / 100  # tokens of the whole batch


def dr_grpo_paper(batch, x):
    return sum(x[rows].sum() for rows in _segment_rows(batch)) / (len(_segment_rows(batch)) * 64)


def luspo_paper(batch, x):
    return sum(len(rows) * x[rows].mean() for rows in _segment_rows(batch)) / len(_segment_rows(batch))


@pytest.mark.parametrize(
    ("loss", "paper", "term", "call"),
    [
        ("grpo", grpo_paper, {"reduction": "seq_mean_token_mean"}, {}),
        ("grpo", bnpo_paper, {"reduction": "token_mean"}, {}),
        ("grpo", dapo_paper, {"reduction": "token_mean"}, {"num_items": 100}),
        ("grpo", dr_grpo_paper, {"reduction": "seq_mean_token_sum_norm", "length": 64}, {}),
        ("gspo", grpo_paper, {"reduction": "seq_mean_token_mean"}, {}),
        ("gspo", luspo_paper, {"reduction": "seq_mean_token_sum"}, {}),
    ],
    ids=["grpo", "bnpo", "dapo", "dr_grpo", "gspo", "luspo"],
)
def test_relatives_are_reductions(batch: Batch, loss: str, paper, term: dict, call: dict) -> None:
    options = {"low": 0.2, "high": 0.28}
    value, d_hidden, _ = batch.expected(loss, options, lambda x: paper(batch, x))
    hidden, weight = batch.leaves()
    objective = hl.Objective(rl=hl.Term(LOSSES[loss], **options, **term))
    source = hl.Linear(hidden, weight, memory=16 * V * 8)
    out = objective(source, batch.targets, segments=batch.segments, **batch.given(LOSSES[loss]), **call)
    out.loss.backward()
    close(out.loss.detach(), value)
    close(hidden.grad, d_hidden)


@pytest.mark.parametrize("shared", [True, False], ids=["tokens share the advantage", "tokens differ"])
def test_gspo_is_its_definition(batch: Batch, shared: bool) -> None:
    """J = mean over sequences of min(s A, clip(s) A), s = (pi(y) / pi_old(y))^(1/|y|): one number a sequence."""
    advantage_S = torch.randn(S, dtype=torch.float64)
    advantage = batch.segments.spread(advantage_S).masked_fill(~batch.valid, math.nan)
    if not shared:
        advantage = advantage + torch.randn(len(batch.ids), dtype=torch.float64)
        for s in torch.nonzero(batch.present()).flatten():
            advantage_S[s] = advantage[batch.valid & (batch.ids == s)].mean()
    hidden, weight = batch.leaves()
    logprob, old = batch.dense(hidden, weight), batch.inputs["old_logprob"][batch.valid]
    ids = batch.ids[batch.valid]
    total = torch.zeros((), dtype=torch.float64)
    for s in torch.nonzero(batch.present()).flatten():
        rows = ids == s
        ratio = (logprob[rows].sum().exp() / old[rows].sum().exp()) ** (1 / int(rows.sum()))
        A = advantage_S[s]
        total = total - torch.min(ratio * A, ratio.clamp(0.9, 1.2) * A)
    value = total / batch.present().sum()
    want = torch.autograd.grad(value, (hidden, weight))
    for name in ("gspo", "gspo_token")[: 1 + shared]:  # with a shared advantage the token variant has this gradient
        h, w = batch.leaves()
        term = hl.Term(LOSSES[name], low=0.1, high=0.2, reduction="seq_mean_token_mean")
        out = hl.Objective(rl=term)(
            hl.Linear(h, w, memory=4 * V * 8), batch.targets, segments=batch.segments,
            advantage=advantage, old_logprob=batch.inputs["old_logprob"],
        )  # fmt: skip
        out.loss.backward()
        close(out.loss.detach(), value.detach())
        close(h.grad, want[0])
        close(w.grad, want[1])


def test_gspo_and_its_token_variant_differ_where_advantages_do(batch: Batch) -> None:
    found = []
    for name in ("gspo", "gspo_token"):
        hidden, weight = batch.leaves()
        objective = hl.Objective(rl=hl.Term(LOSSES[name], low=0.3, high=0.3))
        given = batch.given(LOSSES[name])
        out = objective(hl.Linear(hidden, weight), batch.targets, segments=batch.segments, **given)
        out.loss.backward()
        found.append((out.loss.detach(), hidden.grad))
    assert (found[0][0] - found[1][0]).abs() > 1e-3 and (found[0][1] - found[1][1]).abs().max() > 1e-3


@pytest.mark.parametrize("where", ["logits", "linear4", "linear1000"])
@pytest.mark.parametrize(
    ("said", "plain"),
    [
        (lambda rows: torch.tensor(0.5), 0.5),
        (lambda rows: -1.5, -1.5),
        (lambda rows: torch.full((rows,), 2, dtype=torch.long), 2.0),
        (lambda rows: torch.full((rows,), -0.25, dtype=torch.bfloat16), -0.25),
    ],
    ids=["a scalar", "a number", "integers", "bfloat16"],
)
def test_one_advantage_for_all_rows_of_gspo(batch: Batch, where: str, said, plain: float) -> None:
    found = []
    for advantage in (said(len(batch.ids)), torch.full((len(batch.ids),), plain, dtype=torch.float64)):
        hidden, weight = batch.leaves()
        source = sources(batch, hidden, weight)[where]
        objective = hl.Objective(rl=hl.Term(gspo, low=0.1, high=0.1))
        given = {"advantage": advantage, "old_logprob": batch.inputs["old_logprob"]}
        out = objective(source, batch.targets, segments=batch.segments, **given)
        out.loss.backward()
        found.append((out.loss.detach(), hidden.grad))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("name", "term"),
    [
        ("grpo", {"reduction": "token_mean"}),
        ("gspo", {"reduction": "seq_mean_token_mean", "low": 0.2, "high": 0.2}),
        ("gmpo", {"reduction": "seq_mean_token_sum_norm", "length": 32}),
        ("kto", {}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_gradient_accumulation_equals_one_batch(batch: Batch, name: str, term: dict) -> None:
    objective = hl.Objective(rl=hl.Term(LOSSES[name], **term), metrics=["logprob"])
    counts = hl.count(batch.targets, batch.segments)
    whole_h, whole_w = batch.leaves()
    given = batch.given(LOSSES[name])
    whole = objective(hl.Linear(whole_h, whole_w), batch.targets, segments=batch.segments, **given)
    whole.loss.backward()
    hidden, weight = batch.leaves()
    meter, total = hl.Meter(), 0.0
    for part in ([0, 1, 4], [2, 3], [5, 6]):  # segments of each micro-batch
        keep = torch.isin(batch.ids, torch.tensor(part)) | (batch.ids < 0)
        ids = batch.ids[keep]
        cut = {n: x[keep] if x.shape == batch.targets.shape else x for n, x in given.items()}
        source = hl.Linear(hidden[keep], weight, memory=4 * V * 8)
        out = objective(source, batch.targets[keep], segments=hl.Segments.from_ids(ids, S), **cut, **counts)
        out.loss.backward()
        meter.add(out.metrics)
        total += out.loss.detach()
    close(total, whole.loss.detach())
    close(hidden.grad, whole_h.grad)
    close(weight.grad, whole_w.grad)
    for key, value in meter.compute().items():
        assert value == pytest.approx(float(whole.metrics[key]), rel=1e-9, nan_ok=True), key


def test_a_mix_costs_one_sweep(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    from headloss.backends import torch as backend

    calls = []
    sums = backend.sums
    monkeypatch.setattr(backend, "sums", lambda *a, **k: calls.append(1) or sums(*a, **k))
    kl = LOSSES["kl_to_reference"]
    alone = hl.Objective(rl=gspo, backend="torch")
    mix = hl.Objective(
        rl=gspo, z=hl.Term(z_loss, weight=1e-3), ent=hl.Term(entropy_bonus, weight=1e-2), kl=hl.Term(kl, weight=0.1),
        metrics=["entropy", "accuracy", "perplexity"], backend="torch",
    )  # fmt: skip
    for where in ("logits", "linear4", "linear1000"):
        counted = []
        for objective, functions in ((alone, [gspo]), (mix, [gspo, kl])):
            calls.clear()
            hidden, weight = batch.leaves()
            given = batch.given(*functions)
            source = sources(batch, hidden, weight)[where]
            out = objective(source, batch.targets, segments=batch.segments, **given)
            out.loss.backward()
            plan = objective.explain(source, batch.targets, segments=batch.segments, **given)
            counted.append((len(calls), plan.sweeps, plan.gemms, plan.collectives))
        assert counted[0] == counted[1]
        assert where == "linear4" or counted[1][0] == 1
    want = 0.0
    for name, weight_, reduce in (("gspo", 1.0, batch.mean), ("kl_to_reference", 0.1, batch.mean)):
        want += weight_ * batch.expected(name, {}, reduce)[0]
    logp = (batch.hidden @ batch.weight.T)[batch.valid]
    entropy = torch.distributions.Categorical(logits=logp).entropy()
    want += 1e-3 * logp.logsumexp(-1).square().mean() - 1e-2 * entropy.mean()
    close(out.loss.detach(), want)
    assert float(out.metrics["entropy"]) == pytest.approx(float(entropy.mean()))


# Corners: what happens at the edge of the clip, at advantage 0, and far away.


def _loss_and_gradient(name: str, logprob: Tensor, options: dict | None = None, **given) -> tuple[Tensor, Tensor]:
    leaf = logprob.clone().requires_grad_()
    if "segments" in inspect.signature(LOSSES[name]).parameters:
        given["segments"] = hl.Segments.from_ids(torch.arange(len(logprob)), len(logprob))
    loss, _ = LOSSES[name](leaf, **given, **(options or {}))
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token"])
def test_at_the_edge_of_the_clip_the_gradient_is_whole(name: str) -> None:
    """A ratio of exactly 1 + high is not yet clipped, whatever gradient torch gives a clamp there."""
    logprob = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    old = logprob - torch.tensor([0.3, 0.3, -0.3, -0.3], dtype=torch.float64)
    ratio = (logprob - old).exp()
    advantage = torch.tensor([2.0, -2.0, -2.0, 2.0], dtype=torch.float64)
    edges = {"high": float(ratio[0] - 1), "low": float(1 - ratio[2])}
    assert 1 + edges["high"] == float(ratio[0]) and 1 - edges["low"] == float(ratio[2])
    _, grad = _loss_and_gradient(name, logprob, edges, advantage=advantage, old_logprob=old)
    close(grad, -advantage * ratio)
    inside = {"high": math.nextafter(edges["high"], 0), "low": math.nextafter(edges["low"], 0)}
    inside = {k: v * (1 - 1e-12) for k, v in inside.items()}
    _, grad = _loss_and_gradient(name, logprob, inside, advantage=advantage, old_logprob=old)
    close(grad, -advantage * ratio * torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("name", POLICY)
def test_zero_advantage_teaches_nothing(name: str) -> None:
    logprob = -torch.rand(6, dtype=torch.float64) * 5
    given = {"advantage": torch.zeros(6, dtype=torch.float64)}
    if name == "clip_cov":
        given["draw"] = torch.rand(6, dtype=torch.float64)
    if "old_logprob" in inspect.signature(LOSSES[name]).parameters:
        given["old_logprob"] = logprob + (0 if name in ("kimi", "kl_cov") else 1) * torch.randn(6, dtype=torch.float64)
    loss, grad = _loss_and_gradient(name, logprob, **given)
    assert not loss.any() and not grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*POLICY, "kl_to_reference"])
def test_far_away_policies_stay_finite(name: str, dtype: torch.dtype) -> None:
    logprob = torch.tensor([-1.0, -1.0, -1e4, -1e4, 0.0, -1e-9], dtype=dtype)
    other = torch.tensor([-1e4, -1e4, -1.0, -1.0, -1e4, 0.0], dtype=dtype)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, -1.0], dtype=dtype)
    names = inspect.signature(LOSSES[name]).parameters
    others = dict.fromkeys(("old_logprob", "ref_logprob", "sampler_logprob", "draw"), other)
    given = {n: x for n, x in {"advantage": advantage, **others}.items() if n in names}
    variants = {
        "dppo": [{}, {"divergence": "kl"}, {"form": "ratio", "cap": None}],
        "vespo": [{}, {"sampler_high": 2.0}],
    }
    variants["grpo"] = variants["gspo"] = [{}, {"dual": 3.0, "delta": 4.0}]
    variants["kl_to_reference"] = [{"estimator": e, "corrected": c} for e in ("k1", "k2", "k3") for c in (False, True)]
    for options in variants.get(name, [{}]):
        loss, grad = _loss_and_gradient(name, logprob, options, **given)
        assert loss.dtype == grad.dtype == dtype
        assert loss.isfinite().all() and grad.isfinite().all(), (options, loss, grad)


@pytest.mark.parametrize("name", ["dpo", "cpo", "simpo", "orpo", "kto"])
def test_far_away_preferences_stay_finite(name: str) -> None:
    names = inspect.signature(LOSSES[name]).parameters
    everything = {
        "ref_logprob": torch.tensor([-1e4, -1.0, 0.0, -1e4]),
        "pairs": torch.tensor([[0, 1], [1, 0], [2, 3], [3, 2]]),
        "desirable": torch.tensor([1, 0, 1, 0]),
    }
    given = {n: x for n, x in everything.items() if n in names}
    variants = [{}]
    if name == "dpo":
        variants += [{"link": x} for x in ("discopop", "nca", "bco", "apo_zero", "apo_down", "aot", "aot_unpaired")]
        variants += [{"link": x, "label_smoothing": 0.2} for x in ("robust", "exo")]
        variants += [{"divergence": x} for x in ("forward_kl", "js", "alpha")]
    for options in variants if name != "simpo" else [{}, {"alpha": 0.3}]:
        loss, grad = _loss_and_gradient(name, torch.tensor([-1.0, -1e4, 0.0, -1e-9]), options, **given)
        assert loss.isfinite().all() and grad.isfinite().all(), (options, loss, grad)


@pytest.mark.parametrize("nll", ["sequence", "token", "none"])
def test_orpo_is_finite_where_no_chosen_segment_has_a_token(nll: str) -> None:
    hidden, weight = torch.randn(4, 5, requires_grad=True), torch.randn(7, 5)
    objective = hl.Objective(it=hl.Term(LOSSES["orpo"], nll=nll))
    call = {"segments": hl.Segments.from_ids(torch.tensor([0, 0, 1, 1])), "pairs": torch.tensor([[0, 1]])}
    for targets in ([-100, -100, 3, 4], [-100] * 4):
        loss = objective(hl.Linear(hidden, weight), torch.tensor(targets), **call).loss
        (grad,) = torch.autograd.grad(loss, hidden)
        assert loss.isfinite() and grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dpo", {"link": "hinge", "label_smoothing": 0.1}, "label_smoothing"),
        ("dpo", {"link": "exo"}, "label_smoothing"),
        ("dpo", {"link": "robust", "label_smoothing": 0.5}, "label_smoothing"),
        ("dpo", {"link": "nca", "divergence": "js"}, "divergence"),
        ("dpo", {"divergence": "tv"}, "divergence"),
        ("cpo", {"link": "nca"}, "link"),
        ("dppo", {"form": "x"}, "form"),
        ("vespo", {"sampler_high": 2.0}, "sampler_logprob"),
        ("clip_cov", {}, "draw"),
    ],
)
def test_what_an_option_cannot_go_with_is_refused(batch: Batch, name: str, options: dict, said: str) -> None:
    given = batch.given(LOSSES[name], without=("sampler_logprob", "draw"))
    with pytest.raises((ValueError, TypeError), match=said):
        hl.Objective(it=hl.Term(LOSSES[name], **options))(
            hl.Linear(batch.hidden, batch.weight), batch.targets, segments=batch.segments, **given
        )


def test_a_pair_must_name_segments(batch: Batch) -> None:
    given = batch.given(LOSSES["simpo"]) | {"pairs": torch.tensor([[0, -1]])}
    with pytest.raises(ValueError, match="pairs: .*-1"):
        hl.Objective(it=LOSSES["simpo"])(
            hl.Linear(batch.hidden, batch.weight), batch.targets, segments=batch.segments, **given
        )
    with pytest.raises(IndexError):  # by hand, where nothing is checked: -1 is not the last one
        LOSSES["simpo"](torch.zeros(4), hl.Segments.from_ids(torch.tensor([0, 0, 1, 1])), given["pairs"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dppo", {"divergence": "js"}),
        ("kl_to_reference", {"estimator": "k4"}),
        ("dpo", {"link": "x"}),
        ("kl_to_reference", {"bound": -1.0}),
        ("kl_to_reference", {"corrected": True, "estimator": "k3+"}),
        ("orpo", {"nll": "tokens"}),
    ],
)
def test_an_unknown_choice_is_refused(batch: Batch, name: str, options: dict) -> None:
    objective = hl.Objective(it=hl.Term(LOSSES[name], **options))
    with pytest.raises(ValueError, match=next(iter(options))):
        objective(
            hl.Linear(batch.hidden, batch.weight), batch.targets, segments=batch.segments, **batch.given(LOSSES[name])
        )


def test_metrics_of_a_policy_term(batch: Batch) -> None:
    objective = hl.Objective(rl=hl.Term(LOSSES["grpo"], low=0.1, high=0.15, dual=1.2))
    out = objective(
        hl.Linear(batch.hidden, batch.weight, memory=4 * V * 8), batch.targets, **batch.given(LOSSES["grpo"])
    )
    logprob, old = batch.dense(batch.hidden, batch.weight), batch.inputs["old_logprob"][batch.valid]
    A = batch.inputs["advantage"][batch.valid]
    r = (logprob - old).exp()
    low, high = (r < 0.9) & (A < 0), (r > 1.15) & (A > 0)
    want = {
        "ratio_mean": r.mean(), "ratio_min": r.min(), "ratio_max": r.max(), "ratio_std": r.std(correction=0),
        "effective_sample_size": r.sum() ** 2 / (r * r).sum(),
        "kl": (r - 1 - r.log()).mean(), "kl_k1": (old - logprob).mean(),
        "advantage_mean": A.mean(), "advantage_min": A.min(), "advantage_max": A.max(),
        "logprob": logprob.mean(), "old_logprob": old.mean(),
        "clip_fraction": (low | high).double().mean(), "clip_fraction_low": low.double().mean(),
        "clip_fraction_high": high.double().mean(),
        "dual_clip_fraction": ((A < 0) & (r > 1.2)).double().mean(),
    }  # fmt: skip
    assert {f"rl/{name}" for name in want} == set(out.metrics)
    for name, value in want.items():
        assert float(out.metrics[f"rl/{name}"]) == pytest.approx(float(value)), name
        assert out.metrics[f"rl/{name}"].per == "token"
    assert 0 < want["clip_fraction_low"] < want["clip_fraction"] and want["dual_clip_fraction"] > 0


def test_metrics_of_a_preference_term(batch: Batch) -> None:
    given = batch.given(LOSSES["dpo"])
    out = hl.Objective(dpo=hl.Term(LOSSES["dpo"], beta=0.2))(
        hl.Linear(batch.hidden, batch.weight), batch.targets, segments=batch.segments, **given
    )
    gain = batch.dense(batch.hidden, batch.weight) - batch.inputs["ref_logprob"][batch.valid]
    ids = batch.ids[batch.valid]
    total = torch.stack([gain[ids == s].sum() for s in range(S)])
    chosen, rejected = total[given["pairs"].T]
    assert float(out.metrics["dpo/reward_chosen"]) == pytest.approx(0.2 * float(chosen.mean()))
    assert float(out.metrics["dpo/reward_margin"]) == pytest.approx(0.2 * float((chosen - rejected).mean()))
    assert float(out.metrics["dpo/reward_accuracy"]) == pytest.approx(float((chosen > rejected).double().mean()))


def test_k3_is_a_line_where_the_reference_gives_far_less() -> None:
    """logprob -1 against -30: e^-29 + 29 - 1, slope 1 - e^-29."""
    kl = LOSSES["kl_to_reference"]
    logprob = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-30.0, -500.0, -1.5], dtype=torch.float64)
    value, _ = kl(logprob, reference)
    (slope,) = torch.autograd.grad(value.sum(), logprob)
    close(value.detach(), torch.tensor([28.0, 498.0, math.exp(-0.5) - 0.5], dtype=torch.float64))
    close(slope, torch.tensor([1.0, 1.0, 1 - math.exp(-0.5)], dtype=torch.float64))
    value, _ = kl(logprob, reference, bound=10.0)
    (slope,) = torch.autograd.grad(value.sum(), logprob)
    assert value.tolist()[:2] == [10.0, 10.0] and slope.tolist()[:2] == [0.0, 0.0]
    assert kl(logprob, reference, estimator="k1", bound=10.0)[0][0] == 10
    assert kl(logprob - 100, reference, estimator="k1", bound=10.0)[0][0] == -10


def test_straight_through_kinds_have_the_gradient_of_k2() -> None:
    kl = LOSSES["kl_to_reference"]
    logprob = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-30.0, -2.0], dtype=torch.float64)
    for kind in ("k1", "k3", "abs", "low_var"):
        value, _ = kl(logprob, reference, estimator=f"{kind}+")
        close(value.detach(), kl(logprob, reference, estimator=kind)[0].detach())
        (slope,) = torch.autograd.grad(value.sum(), logprob)
        close(slope, (logprob - reference).detach())


def test_gmpo_over_sequences_is_verls() -> None:
    """verl: one ratio and one advantage per sequence, and their mean over sequences."""
    d = torch.tensor([0.3, -0.2, 0.05, -0.5, 0.4], dtype=torch.float64)
    lengths, advantage = [2, 3], torch.tensor([1.0, 1.0, -0.5, -0.5, -0.5], dtype=torch.float64)
    want = []
    for own, A in zip(d.split(lengths), (1.0, -0.5)):
        capped = torch.tensor([min(x, 0.1) if A > 0 else max(x, -0.2) for x in own.tolist()], dtype=torch.float64)
        want.append(-A * capped.mean().exp())
    logits = torch.randn(5, 7, dtype=torch.float64)
    targets = torch.arange(5)
    old = torch.log_softmax(logits, -1)[range(5), targets] - d
    objective = hl.Objective(rl=hl.Term(LOSSES["gmpo"], low=0.2, high=0.1, reduction="seq_mean_token_mean"))
    segments = hl.Segments.from_cu_seqlens(torch.tensor([0, 2, 5]))
    out = objective(hl.Logits(logits), targets, segments=segments, advantage=advantage, old_logprob=old)
    close(out.loss, torch.stack(want).mean())


@pytest.mark.parametrize("kind", ["logits", "linear"])
def test_dead_rows_are_those_without_a_gradient(kind: str) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(12, 7, requires_grad=True), torch.randn(9, 7, requires_grad=True)]
    source = hl.Logits(tensors[0]) if kind == "logits" else hl.Linear(*tensors)
    targets, advantage = torch.arange(12) % 7, torch.ones(12)
    targets[0], advantage[:4] = -100, 0  # three rows that count, of eleven
    objective = hl.Objective(rl=LOSSES["reinforce"], metrics=["dead_rows"])
    out = objective(source, targets, advantage=advantage)
    assert float(out.metrics["dead_rows"]) == pytest.approx(3 / 11)
    assert hl.verify(objective, source, targets, advantage=advantage).ok
    with torch.no_grad():
        assert math.isnan(float(objective(source, targets, advantage=advantage).metrics["dead_rows"]))
    both = hl.Objective(rl=LOSSES["reinforce"], ce=LOSSES["cross_entropy"], metrics=["dead_rows"])
    assert float(both(source, targets, advantage=advantage).metrics["dead_rows"]) == 0
    nobody = both(source, torch.full_like(targets, -100), advantage=advantage)
    assert math.isnan(float(nobody.metrics["dead_rows"])) and nobody.loss == 0
    off = hl.Objective(rl=hl.Term(LOSSES["reinforce"], weight=0.0), metrics=["dead_rows"])
    assert float(off(source, targets, advantage=advantage).metrics["dead_rows"]) == 1
    assert hl.verify(off, source, targets, advantage=advantage).ok
