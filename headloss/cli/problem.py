"""The tensors that `headloss check` runs on, and their exact results from `headloss.checks.dense`.

Dimension key:  N rows   S segments   V vocabulary   D hidden size
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import headloss as hl
from headloss.checks import dense
from headloss.checks.dense_records import DenseCall
from headloss.derived_teachers import Top
from headloss.facts import FACTS
from headloss.teachers import SPARSE
from headloss.trace.call import Call
from headloss.trace.signature import TEACHER_INPUTS, UNNAMED, passed_names

ON_REQUEST = ("top_logprob", "class_weight", "class_mean", "class_cross_entropy")  # only with a Term or call that asks


class Result(NamedTuple):
    values: dict[str, Tensor]  # a loss, facts
    scales: dict[str, float]  # what errors are relative to
    grads: dict[str, Tensor]


class Problem(NamedTuple):
    """The tensors of all checks, in float64."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    segments: hl.Segments
    teacher: Tensor
    ids: Tensor
    ids_logprob: Tensor
    pulls: Tensor  # cotangents of the facts
    seed: int

    @classmethod
    def make(cls, device: str, seed: int, N: int, V: int, D: int) -> Problem:
        random = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
        hidden, weight, teacher = normal(N, D), normal(V, D) * 2 / D**0.5, normal(N, V) * 2
        hidden, weight = hidden.bfloat16().double(), weight.bfloat16().double()  # the same numbers in every type
        teacher = teacher.bfloat16().double()
        targets = torch.randint(V, (N,), generator=random)
        targets[torch.rand(N, generator=random) < 0.2] = -100
        targets[:2] = torch.tensor([0, V - 1])
        S = max(4, N // 12)
        bounds = torch.linspace(0, N, S + 1).round().int()
        top = teacher.log_softmax(-1).topk(5)
        ids = top.indices.masked_fill(torch.rand(N, 5, generator=random) < 0.1, -1)
        put = lambda x: x.to(device)
        return cls(
            put(hidden), put(weight), put(targets), hl.Segments.from_cu_seqlens(put(bounds)), put(teacher), put(ids),
            put(top.values.float()), put(normal(8, N)), seed,
        )  # fmt: skip

    @property
    def valid(self) -> Tensor:
        return self.targets != -100

    def inputs(self, fn: Callable[..., Any]) -> dict[str, Tensor]:
        """The inputs that a loss asks for besides facts; log-probabilities are the true ones plus a little noise."""
        names = [p.name for p in inspect.signature(fn).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        N, S = len(self.targets), self.segments.num_segments
        logp = (self.hidden @ self.weight.T).log_softmax(-1).gather(-1, self.targets.clamp(min=0)[:, None])[:, 0]
        asked = [n for n in names if n not in (*FACTS, *ON_REQUEST, "segments", "targets", "logp", "logq")]
        random = torch.Generator().manual_seed(self.seed)  # the same numbers each time
        normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
        return {n: example(n, N, S, logp.cpu(), normal).to(logp.device) for n in asked}

    def teacher_of(self, teacher: str | None, dtype: torch.dtype) -> Any:
        if teacher == "sparse":
            return hl.Sparse(self.ids, self.ids_logprob)
        return None if teacher is None else hl.Logits(self.teacher.to(dtype))


class Asked(NamedTuple):
    """The names of what the terms and metrics of an objective ask for."""

    inputs: set[str]
    segments: bool
    reduced: set[str]  # inputs that are segments, for a reduction
    targets: set[str]  # inputs that are targets of a term's own
    teachers: set[str]
    sparse: bool  # whether they need what only a sparse teacher has

    @classmethod
    def of(cls, objective: hl.Objective) -> Asked:
        terms = objective.terms.values()
        term_calls, metrics = [t.call(None, {}) for t in terms], [call for _, call in objective.metrics]
        calls = [*term_calls, *metrics]
        parameters = [p for call in calls for s in call.signatures for p in s.parameters]
        inputs = {p.key for p in parameters if p.kind == "input" and p.teacher is None}
        inputs |= {w for t in terms for w in t.row_weights if isinstance(w, str)}
        teachers = _teachers(term_calls) or _teachers(metrics)  # metrics use the terms' teachers
        of_teachers = [p.name for p in parameters if p.teacher in teachers or (p.fact and p.fact.teacher in teachers)]
        return cls(
            inputs, any(call.wants("segments") for call in calls),
            {t.reduction_segments for t in terms if t.reduction_segments}, {t.targets for t in terms if t.targets},
            teachers, any(name in (*TEACHER_INPUTS, *SPARSE) for name in of_teachers),
        )  # fmt: skip

    def named(self, teachers: dict[str, Any]) -> dict[str, Any]:
        """The argument `teacher` of a call, if there are any."""
        return {"teacher": teachers[UNNAMED] if [*teachers] == [UNNAMED] else teachers} if teachers else {}


def _teachers(calls: Sequence[Call]) -> set[str]:
    every = {name for call in calls for name in call.teachers}
    return {*passed_names(every), *(of for name in every if name.startswith("top=") if (of := Top.named(name).of))}


def example(name: str, N: int, S: int, logprob: Tensor, normal: Callable[..., Tensor]) -> Tensor:
    """A value for an input of this name, with N rows and S segments."""
    if name == "pairs":
        return torch.arange(max(2, S // 2 * 2)).view(-1, 2)
    if name == "desirable":
        return torch.arange(S) % 2 == 0
    if name == "optimal_advantage":
        return normal(S).float()
    if name == "kl":
        return torch.tensor(0.3)
    if name == "foreign_logprob":
        return normal(N, 5).log_softmax(-1).float()
    if name.endswith("logprob"):
        return (logprob + 0.1 * normal(N)).clamp(max=-1e-3).float()
    return normal(N).abs().float() if "weight" in name or "mask" in name else normal(N).float()


def answer(
    p: Problem, fn: Callable[..., Any], teacher: str | None, source: Any, leaves: dict[str, Tensor], dtype: torch.dtype
) -> Result:
    """The loss of one term, and its gradients, computed with every logit in memory."""
    found = dense.answer(hl.Objective(term=fn), dense_call(p, fn, teacher, source), dtype, leaves)
    return Result({"loss": found.numbers["loss"].number}, {"loss": found.numbers["loss"].scale}, found.grads)


def dense_call(p: Problem, fn: Callable[..., Any] | None, teacher: str | None, source: Any) -> DenseCall:
    """The call as the dense computation takes it."""
    inputs = {} if fn is None or teacher else p.inputs(fn)
    kinds = {n: "row" if x.ndim and len(x) == len(p.targets) else "whole" for n, x in inputs.items()}
    teacher_source = p.teacher_of(teacher, source.tensors[0].dtype)
    return DenseCall(
        source, p.targets, p.segments, {} if teacher_source is None else {"teacher": teacher_source}, inputs, kinds
    )


def leaves_of(p: Problem, kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    if kind == "Logits":
        return {"logits": (p.hidden @ p.weight.T).bfloat16().to(dtype, copy=True).requires_grad_()}
    return {n: getattr(p, n).to(dtype, copy=True).requires_grad_() for n in ("hidden", "weight")}
