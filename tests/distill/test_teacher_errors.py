"""A wrong teacher is refused with the argument's name before anything is computed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import headloss as hl
import headloss.backends.torch as engine
from headloss.losses import cross_entropy, forward_kl, jsd, skew_kl, soft_cross_entropy, tvd

N, V, D = 4, 9, 3
LOGITS, HIDDEN, WEIGHT = torch.randn(N, V), torch.randn(N, D), torch.randn(V, D)
TARGETS = torch.zeros(N, dtype=torch.long)
IDS, LOGPROBS = torch.zeros(N, 2, dtype=torch.long), torch.full((N, 2), -1.0)
DENSE, SPARSE = hl.Logits(LOGITS), hl.Sparse(IDS, LOGPROBS)
KD = hl.Objective(kd=forward_kl)


def on_ids(ids_logprob: Tensor, teacher_ids: Tensor) -> Tensor:
    return -ids_logprob.sum(-1)


def on_teacher(teacher_cross_entropy: Tensor) -> Tensor:
    return teacher_cross_entropy


BAD: list[tuple[hl.Objective, Any, str]] = [
    (KD, None, "teacher: term 'kd' (forward_kl) needs one"),
    (KD, LOGITS, "teacher: wanted hl.Logits, hl.Linear or hl.Sparse, got Tensor; wrap a tensor in hl.Logits"),
    (KD, (IDS, LOGPROBS), "teacher: wanted hl.Logits, hl.Linear or hl.Sparse, got tuple"),
    (KD, {"a": 3}, "teacher['a']: wanted hl.Logits"),
    (KD, hl.Logits(LOGITS[:3]), "teacher: has rows of shape (3,), the student's are (4,)"),
    (KD, hl.Logits(LOGITS[None]), "teacher: has rows of shape (1, 4), the student's are (4,)"),
    (KD, hl.Linear(HIDDEN[:3], WEIGHT), "teacher: has rows of shape (3,)"),
    (KD, hl.Sparse(IDS[:3], LOGPROBS[:3]), "teacher: has rows of shape (3,)"),
    (KD, hl.Sparse(IDS + V, LOGPROBS), "teacher: wanted ids in [0, 9) or -1 for none, but row 0 has 9"),
    (KD, hl.Sparse(IDS - 2, LOGPROBS), "teacher: wanted ids in [0, 9) or -1 for none, but row 0 has -2"),
    (KD, {"x": hl.Sparse(IDS - 2, LOGPROBS)}, "teacher['x']: wanted ids"),
    (KD, {"a": DENSE, "b": DENSE}, "Term(teacher=...) must name one (passed: 'a', 'b')"),
    (hl.Objective(kd=hl.Term(forward_kl, teacher="big")), DENSE, "term 'kd' (forward_kl) uses 'big'"),
    (hl.Objective(kd=hl.Term(forward_kl, teacher="big")), {"bag": DENSE}, "did you mean 'bag'?"),
    (hl.Objective(ce=cross_entropy), DENSE, "teacher: one was passed, but terms and metrics use none"),
    (hl.Objective(kd=on_ids), DENSE, "which needs a sparse teacher (hl.Sparse), got hl.Logits"),
    (hl.Objective(kd=on_teacher), SPARSE, "which needs a dense teacher (hl.Logits or hl.Linear), got hl.Sparse"),
    (hl.Objective(ce=cross_entropy, metrics=["topk_overlap"]), DENSE, "metric 'topk_overlap' asks for"),
    (hl.Objective(ce=cross_entropy, metrics=["forward_kl"]), None, "teacher: metric 'forward_kl' needs one"),
]  # fmt: skip


@pytest.fixture
def nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the sweep began")

    monkeypatch.setattr(engine, "sums", fail)


@pytest.mark.parametrize("objective, teacher, message", BAD, ids=range(len(BAD)))
@pytest.mark.usefixtures("nothing_is_computed")
def test_bad_teachers(objective: hl.Objective, teacher: Any, message: str) -> None:
    for call in (objective, objective.explain, objective.forward_backward):
        with pytest.raises((TypeError, ValueError)) as error:
            call(hl.Logits(LOGITS), TARGETS, teacher=teacher)
        assert message in str(error.value)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: hl.Sparse(IDS, LOGPROBS.bfloat16()), "logprobs: wanted float32 or better, got torch.bfloat16"),
        (lambda: hl.Sparse(IDS.float(), LOGPROBS), "ids: wanted an integer tensor, got torch.float32"),
        (lambda: hl.Sparse(IDS.tolist(), LOGPROBS), "ids: wanted a tensor, got list"),
        (lambda: hl.Sparse(IDS[:, :1], LOGPROBS), "ids: wanted (rows, K) like logprobs"),
        (lambda: hl.Sparse(IDS[:, :0], LOGPROBS[:, :0]), "ids: wanted (rows, K)"),
        (lambda: hl.Sparse(IDS[:, 0], LOGPROBS[:, 0]), "ids: wanted (rows, K)"),
        (lambda: hl.Term(forward_kl, tail="buckets"), "tail: wanted one of bucket, none, renormalise, got 'buckets'"),
        (lambda: hl.Term(cross_entropy, tail="none"), "tail: cross_entropy is not a divergence"),
        (lambda: hl.Term(jsd, beta=0.0), "beta: wanted 0 < beta < 1, got 0.0; use forward_kl"),
        (lambda: hl.Term(jsd, beta=1.0), "beta: wanted 0 < beta < 1"),
        (lambda: hl.Term(skew_kl, alpha=1.0), "alpha: wanted 0 <= alpha < 1, got 1.0"),
        (lambda: hl.Term(tvd, beta=0.5), "tvd: no option 'beta'"),
        (lambda: hl.Term(tvd, teacher=DENSE), "teacher: wanted a teacher's name, got Logits"),
        (lambda: hl.Term(forward_kl, temperature=0.0), "temperature: wanted a positive number"),
        (lambda: hl.Term(forward_kl, temperature=math.inf), "temperature: wanted a positive number"),
        (
            lambda: hl.Term(lambda logp, logq: logp - logq.mean(-1, keepdim=True)),
            "wanted an element-wise function of log p and log q",
        ),
        (lambda: hl.Term(lambda logp, logq: logp - logq.clamp_(min=-2.0)), "logq: <lambda> writes into it"),
        (lambda: hl.Term(lambda logp, logq: logp.clamp_(max=0.0) - logq), "logp: <lambda> writes into it"),
        (lambda: hl.Term(lambda logp, logq: (logp - logq).sum(-1)), "wanted one value per element of log p"),
        (lambda: hl.row_facts(DENSE, want=["teacher_entropy"]), "teacher: want needs one for 'teacher_entropy'"),
        (lambda: hl.row_facts(DENSE, want=["ids_logprob"], teacher=DENSE), "which needs a sparse teacher"),
        (lambda: hl.row_facts(DENSE, want=["divergence"], teacher=DENSE), "want: 'divergence' is not a fact"),
        (lambda: hl.row_facts(DENSE, want=[("lse", None, "a")], teacher=DENSE), "want: 'lse' is the student's alone"),
        (lambda: hl.row_facts(DENSE, want=[("teacher_entropy", 0.0)], teacher=DENSE), "wanted a positive temperature"),
    ],
)  # fmt: skip
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize("grad", [False, True])
def test_a_divergence_that_writes_once_it_is_told_to(grad: bool) -> None:
    """What it is handed is another divergence's too."""
    state = {"writes": False}

    def clipped(logp: Tensor, logq: Tensor) -> Tensor:
        return logp.exp() * (logp - (logq.clamp_(min=-2.0) if state["writes"] else logq))

    objective = hl.Objective(a=clipped, b=tvd)
    call = lambda: objective(hl.Logits(LOGITS.clone().requires_grad_(grad)), TARGETS, teacher=DENSE)
    call()
    state["writes"] = True
    with pytest.raises(ValueError, match="logq: clipped writes into it"):
        call()


def test_an_input_called_like_the_teachers_is_refused() -> None:
    with pytest.raises(TypeError, match="teacher_ids: no loss asks for this input"):
        hl.Objective(ce=cross_entropy)(hl.Logits(LOGITS), TARGETS, teacher_ids=IDS)


def test_a_teacher_of_another_device() -> None:
    with pytest.raises(ValueError, match="teacher: is on meta, but the source is on cpu"):
        KD(hl.Logits(LOGITS), TARGETS, teacher=hl.Logits(LOGITS.to("meta")))


def test_a_budget_below_a_row_counts_the_teacher() -> None:
    with pytest.raises(ValueError, match="memory: one row of 9 logits takes 72 bytes"):
        KD(hl.Linear(HIDDEN, WEIGHT, memory=40), TARGETS, teacher=hl.Linear(HIDDEN, WEIGHT))


def test_a_plan_needs_no_numbers() -> None:
    meta = lambda *size: torch.empty(*size, device="meta")
    teachers = {"a": hl.Linear(meta(N, D), meta(V, D)), "b": hl.Sparse(IDS.to("meta"), LOGPROBS.to("meta"))}
    objective = hl.Objective(a=hl.Term(jsd, teacher="a"), b=hl.Term(jsd, teacher="b"))
    plan = objective.explain(hl.Linear(meta(N, D), meta(V, D)), TARGETS.to("meta"), teacher=teachers)
    assert plan.gemms == 3 and plan.teacher_gemms == 1 and plan.bytes["teachers' logits"] == N * V * 4


def test_probabilities_in_place_of_their_logarithms() -> None:
    with pytest.raises(ValueError, match="teacher: all log-probabilities are above 0"):
        KD(hl.Logits(LOGITS), TARGETS, teacher=hl.Sparse(IDS, torch.rand(IDS.shape).clamp(1e-3, 1.0)))
    padded, probabilities = IDS.clone(), torch.rand(IDS.shape).clamp(1e-3, 1.0)
    padded[-1], probabilities[-1] = -1, -math.inf
    with pytest.raises(ValueError, match="teacher: all log-probabilities are above 0"):
        KD(hl.Logits(LOGITS), TARGETS, teacher=hl.Sparse(padded, probabilities))
    weights = torch.full(IDS.shape, 3.0).log()  # above 1, and so no probabilities
    hl.Objective(ce=hl.Term(soft_cross_entropy, tail="none"))(
        hl.Logits(LOGITS), TARGETS, teacher=hl.Sparse(IDS, weights)
    )
