"""What vLLM and SGLang return, by hand: entry i is about token i, and teaches the student's row i - 1."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import teaching
import torch

import headloss as hl
from headloss.losses import forward_kl


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# Tokens 7 3 5 2, K = 2: token 3 was third likeliest after 7, hence three entries there.
VLLM: list[Any] = [
    None,
    {3: Logprob(-3.0, 3, "c"), 9: Logprob(-0.2, 1, "i"), 4: Logprob(-1.9, 2, "d")},
    {5: Logprob(-0.1, 1, "e"), 8: Logprob(-2.5, 2, "h")},
    {2: Logprob(-1.0, 2, "b"), 6: Logprob(-0.6, 1, "f")},
]
SGLANG: list[Any] = [
    None,
    [(-0.2, 9, None), (-1.9, 4, None), (-3.0, 3, None)],
    [(-0.1, 5, "e"), (-2.5, 8, "h")],
    [[-0.6, 6, "f"], [-1.0, 2, "b"]],
]
IDS = torch.tensor([[9, 4, 3], [5, 8, -1], [6, 2, -1], [-1, -1, -1]])
INF = math.inf
LOGPROBS = torch.tensor([[-0.2, -1.9, -3.0], [-0.1, -2.5, -INF], [-0.6, -1.0, -INF], [-INF, -INF, -INF]])


def as_json(entries: list[Any]) -> list[Any]:
    """As it comes over HTTP: string ids, Logprobs as mappings."""
    plain = [None if e is None else {t: vars(x) for t, x in e.items()} for e in entries]
    return json.loads(json.dumps(plain))


def as_numbers(entries: list[Any]) -> list[Any]:
    return [None if e is None else {t: x.logprob for t, x in e.items()} for e in entries]


def same(got: hl.Sparse, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
    assert got.ids.dtype == torch.long and got.logprobs.dtype == torch.float32
    assert torch.equal(got.ids, ids) and torch.equal(got.logprobs, logprobs)


@pytest.mark.parametrize(
    "entries", [VLLM, as_json(VLLM), as_numbers(VLLM), tuple(VLLM)], ids=["object", "json", "number", "tuple"]
)
def test_vllm(entries: list[Any]) -> None:
    same(hl.Sparse.from_vllm(entries), IDS, LOGPROBS)
    same(hl.Sparse.from_vllm(entries, k=2), IDS[:, :2], LOGPROBS[:, :2])
    same(hl.Sparse.from_vllm(entries, k=1), IDS[:, :1], LOGPROBS[:, :1])


@pytest.mark.parametrize("entries", [SGLANG, json.loads(json.dumps(SGLANG))], ids=["tuple", "json"])
def test_sglang(entries: list[Any]) -> None:
    same(hl.Sparse.from_sglang(entries), IDS, LOGPROBS)
    same(hl.Sparse.from_sglang(entries, k=2), IDS[:, :2], LOGPROBS[:, :2])


@pytest.mark.parametrize("make, entries", [(hl.Sparse.from_vllm, VLLM), (hl.Sparse.from_sglang, SGLANG)])
def test_a_batch(make: Any, entries: list[Any]) -> None:
    got = make([entries, entries[:2]])
    none = torch.full((3,), -1)
    same(
        got,
        torch.stack([IDS, torch.stack([IDS[0], none, none, none])]),
        torch.stack([LOGPROBS, torch.stack([LOGPROBS[0], *[none * INF] * 3])]),
    )
    assert make([entries], rows=6).ids.shape == (1, 6, 3)
    assert (make([entries], rows=6).ids[0, 3:] == -1).all()
    assert make([entries]).ids.shape == (1, 4, 3) and make(entries, rows=5).ids.shape == (5, 3)


def test_entries_that_begin_later() -> None:
    """SGLang's logprob_start_len: entries from token 5 on, with and without an empty first one."""
    late = hl.Sparse.from_sglang(SGLANG, start=5)
    assert late.ids.shape == (9, 3) and (late.ids[:5] == -1).all()
    same(hl.Sparse(late.ids[5:], late.logprobs[5:]), IDS, LOGPROBS)
    full = hl.Sparse.from_sglang(SGLANG[1:], start=5)
    assert torch.equal(full.ids[4:8], IDS)
    both = hl.Sparse.from_sglang([SGLANG, SGLANG], start=[0, 2])
    assert torch.equal(both.ids[0, :4], IDS) and torch.equal(both.ids[1, 2:], IDS)


def test_rows_meet_shifted_labels() -> None:
    """The teacher of row t is about the token that the row's target is."""
    tokens = torch.tensor([[7, 3, 5, 2]])
    targets = hl.shift_labels(tokens)
    teacher = hl.Sparse.from_vllm([VLLM])
    for t, target in enumerate(targets[0].tolist()):
        assert (target in teacher.ids[0, t].tolist()) == (target != -100)
    logits = torch.randn(1, 4, 11, requires_grad=True)
    out = hl.Objective(kd=forward_kl)(hl.Logits(logits), targets, teacher=teacher)
    problem = teaching.Problem(
        teaching.Model({"logits": logits.detach().double()}), targets, None, teacher.ids, teacher.logprobs.double()
    )
    want, _ = teaching.truth(problem, lambda leaves: teaching.values(problem, leaves, teaching.forward_kl, {}))
    assert float(out.loss.detach()) == pytest.approx(float(want), rel=1e-5)
    assert float(out.metrics["kd/teacher_mass"]) == pytest.approx(float(teacher.logprobs[0, :3].exp().sum(-1).mean()))


def test_ruled_out_tokens_are_kept() -> None:
    """vLLM's server writes -inf as -9999; both weigh nothing and neither makes a NaN."""
    for x in (-9999.0, -math.inf):
        teacher = hl.Sparse.from_vllm([None, {"1": x, "2": -0.5}])
        logits = torch.randn(2, 5, requires_grad=True)
        objective = hl.Objective(kd=forward_kl)
        objective(hl.Logits(logits), torch.tensor([1, -100]), teacher=teacher).loss.backward()
        assert logits.grad.isfinite().all() and logits.grad[0].abs().sum() > 0


BAD: list[tuple[Any, Any, dict[str, Any], str]] = [
    (hl.Sparse.from_vllm, [], {}, "prompt_logprobs: is empty"),
    (hl.Sparse.from_vllm, {"1": -0.5}, {}, "prompt_logprobs: wanted a list"),
    (hl.Sparse.from_vllm, None, {}, "prompt_logprobs: wanted a list"),
    (hl.Sparse.from_vllm, [{1: -0.5}], {}, "position 0 has log-probabilities"),
    (hl.Sparse.from_vllm, [None, {1: -0.5}, None], {}, "position 2 is None"),
    (hl.Sparse.from_vllm, [None, {}], {}, "position 1 has no log-probabilities"),
    (hl.Sparse.from_vllm, [None, {"the": -0.5}], {}, "position 1: wanted a token id, got 'the'"),
    (hl.Sparse.from_vllm, [None, {-1: -0.5}], {}, "position 1: wanted a token id, got -1"),
    (hl.Sparse.from_vllm, [None, {"-3": -0.5}], {}, "position 1: wanted a token id, got -3"),
    (hl.Sparse.from_vllm, [None, {1: "x"}], {}, "position 1: wanted a log-probability for token 1, got 'x'"),
    (hl.Sparse.from_vllm, [None, {1: math.nan}], {}, "position 1: wanted a log-probability for token 1, got nan"),
    (hl.Sparse.from_vllm, [None, {1: 12.5}], {}, "position 1: wanted a log-probability for token 1, got 12.5"),
    (hl.Sparse.from_vllm, [None, {1: {"rank": 1}}], {}, "position 1: wanted a log-probability for token 1, got None"),
    (hl.Sparse.from_vllm, [None, [(-0.5, 1, "a")]], {}, "position 1: wanted {token id"),
    (hl.Sparse.from_vllm, [[None, {1: -0.5}], [None, {1: "x"}]], {}, "sequence 1: position 1: wanted a log-prob"),
    (hl.Sparse.from_vllm, [[None, {1: -0.5}], 3], {}, "sequence 1: wanted a list"),
    (hl.Sparse.from_vllm, VLLM, {"k": 0}, "k: wanted at least 1"),
    (hl.Sparse.from_vllm, VLLM, {"rows": 3}, "rows: 3, but prompt_logprobs has 4 tokens"),
    (hl.Sparse.from_vllm, [VLLM, VLLM], {"start": [1]}, "start: has 1 numbers"),
    (hl.Sparse.from_sglang, [None, {1: -0.5}], {}, "position 1: wanted"),
    (hl.Sparse.from_sglang, [None, [(-0.5,)]], {}, "position 1: wanted (logprob, token id, text)"),
    (hl.Sparse.from_sglang, [None, [(None, 5, "a")]], {}, "position 1: wanted a log-probability for token 5"),
    (hl.Sparse.from_sglang, [None, []], {}, "position 1 has no log-probabilities"),
]


@pytest.mark.parametrize("make, entries, options, message", BAD, ids=range(len(BAD)))
def test_bad_entries(make: Any, entries: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        make(entries, **options)
    assert message in str(error.value)
