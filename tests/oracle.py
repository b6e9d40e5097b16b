"""Problems, the truth about them, and what headloss says.

Dimension key:  N rows   R rows that count   S segments   P pairs   V vocabulary   D hidden size   K ids

A `Problem` holds the tensors of one call.  `answer` is the truth about an objective on it: that of the dense oracle of
`hl.verify`, in float64, from logits and facts that are written down here once more.  `run` is what headloss says;
`check` compares the two.  A teacher, a backend and a tolerance are arguments, so that the same problems serve every way
of running them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import headloss as hl
from headloss.checks import dense
from headloss.checks.dense_records import DenseCall
from headloss.trace.signature import UNNAMED

IGNORE = -100

# Losses of the student alone.  Divergences need a teacher; tests/distill holds them to the same.
LOSSES: dict[str, Callable[..., Any]] = {
    name: fn for name, fn in hl.losses.LOSSES.items() if "logq" not in inspect.signature(fn).parameters
}


class Dense(NamedTuple):
    """One softmax of the rows that count, at one temperature: all that a fact can be made of."""

    s_RV: Tensor  # logits / T
    targets_R: Tensor | None
    teacher_s_RV: Tensor | None = None
    ids_RK: Tensor | None = None

    @property
    def logp_RV(self) -> Tensor:
        return self.s_RV.log_softmax(-1)

    @property
    def logq_RV(self) -> Tensor:
        assert self.teacher_s_RV is not None
        return self.teacher_s_RV.log_softmax(-1)


def _weighted(p: Tensor, x: Tensor) -> Tensor:
    return torch.where(p == 0, 0.0, p * x).sum(-1)  # 0 log 0 = 0


def _tail(d: Dense) -> Tensor:
    assert d.ids_RK is not None
    inside = torch.zeros_like(d.s_RV, dtype=torch.bool)
    rows = torch.arange(len(inside))[:, None].expand_as(d.ids_RK)
    inside[rows[d.ids_RK >= 0], d.ids_RK[d.ids_RK >= 0]] = True
    return d.logp_RV.masked_fill(inside, -math.inf).logsumexp(-1)


FACTS: dict[str, Callable[[Dense], Tensor]] = {
    "lse": lambda d: d.s_RV.logsumexp(-1),
    "logprob": lambda d: d.logp_RV.gather(-1, d.targets_R[:, None])[:, 0],
    "mean_logprob": lambda d: d.logp_RV.mean(-1),
    "entropy": lambda d: -_weighted(d.logp_RV.exp(), d.logp_RV),
    "sum_p2": lambda d: d.logp_RV.exp().square().sum(-1),
    "max_logprob": lambda d: d.logp_RV.detach().amax(-1),
    "argmax": lambda d: d.s_RV.detach().argmax(-1),
    "min_logit": lambda d: d.s_RV.detach().amin(-1),
    "teacher_cross_entropy": lambda d: -_weighted(d.logq_RV.exp(), d.logp_RV),
    "reverse_cross_entropy": lambda d: -_weighted(d.logp_RV.exp(), d.logq_RV),
    "teacher_entropy": lambda d: -_weighted(d.logq_RV.exp(), d.logq_RV),
    # of s and not of z: all three are, so that what does not know the temperature is the same
    "logit_dot": lambda d: (d.s_RV * d.teacher_s_RV).sum(-1),
    "logit_square": lambda d: d.s_RV.square().sum(-1),
    "teacher_logit_square": lambda d: d.teacher_s_RV.square().sum(-1),
    "ids_logprob": lambda d: d.logp_RV.gather(-1, d.ids_RK.clamp(min=0)).masked_fill(d.ids_RK < 0, -math.inf),
    "tail_logprob": _tail,
}
APART = ("top_logprob", "class_weight", "class_mean", "class_cross_entropy")  # with tests of their own
DENSE_TEACHER = {"teacher_cross_entropy", "reverse_cross_entropy", "teacher_entropy"}
DENSE_TEACHER |= {"logit_dot", "logit_square", "teacher_logit_square"}
SPARSE_TEACHER = {"ids_logprob", "tail_logprob", "teacher_ids", "teacher_logprob"}


@dataclass(frozen=True)
class Problem:
    """The tensors of one call.  `tensors` are logits, or hidden, weight and perhaps bias, in float64."""

    kind: str  # "Logits" or "Linear"
    tensors: dict[str, Tensor]
    targets: Tensor  # in the caller's shape
    segments: hl.Segments | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    transform: dict[str, Any] = field(default_factory=dict)  # temperature, scale, softcap
    teacher: Tensor | None = None  # teacher logits, (..., V)
    ids: Tensor | None = None  # (..., K)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.targets.shape)

    @property
    def vocab(self) -> int:
        return self.tensors["logits"].shape[-1] if self.kind == "Logits" else self.tensors["weight"].shape[0]

    def leaves(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Tensor]:
        return {n: x.detach().to(device, dtype, copy=True).requires_grad_() for n, x in self.tensors.items()}

    def source(self, leaves: Mapping[str, Tensor], **more: Any) -> Any:
        if self.kind == "Logits":
            more.pop("memory", None)
            return hl.Logits(leaves["logits"], **self.transform, **more)
        return hl.Linear(leaves["hidden"], leaves["weight"], leaves.get("bias"), **self.transform, **more)

    def budget(self, rows: int, itemsize: int = 8) -> int:
        return rows * self.vocab * itemsize * (1 if self.teacher is None else 2)

    def logits(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """z: after bias, scale and softcap, before the temperature."""
        if self.kind == "Logits":
            z = leaves["logits"]
        else:
            z = leaves["hidden"] @ leaves["weight"].T
            z = z + leaves["bias"] if "bias" in leaves else z
        z = z * self.transform.get("scale", 1.0)
        cap = self.transform.get("softcap")
        return z if cap is None else cap * torch.tanh(z / cap)


class Answer(NamedTuple):
    loss: Tensor
    terms: dict[str, Tensor]
    metrics: dict[str, float]
    grads: dict[str, Tensor]  # of the source's tensors and of inputs that require grad
    facts: dict[Any, Tensor] = {}  # noqa: RUF012


class View(dense.Dense):
    """The rows of a problem that count, with its logits and the facts of this file."""

    def __init__(self, problem: Problem, given: DenseCall, dtype: torch.dtype, leaves: Mapping[str, Tensor]) -> None:
        self.problem = problem
        super().__init__(given, dtype, leaves)

    def logits(self, source: Any, leaves: Mapping[str, Tensor]) -> Tensor:
        if not leaves:  # a teacher's
            return super().logits(source, leaves)
        return self.problem.logits({n: self.rows(x) if n in ("logits", "hidden") else x for n, x in leaves.items()})

    def softmax(self, temperature: float | None) -> Dense:
        p = self.problem
        both = [self.z_RV] if p.teacher is None else [self.z_RV, self.rows(p.teacher)]
        s, *teacher = (self.at(z, p.transform.get("temperature", 1.0), temperature) for z in both)
        return Dense(s, self.targets, *(teacher or [None]), None if p.ids is None else self.rows(p.ids))

    def fact(self, name: str, temperature: float | None, teacher: str) -> Tensor:
        return FACTS[name](self.softmax(temperature)) if name in FACTS else super().fact(name, temperature, teacher)

    def reduced(self, term: hl.Term, values: Tensor, weight: Tensor | None = None) -> Tensor:
        self.show_to(term)
        values = values if weight is None else values * weight
        return (self.coefficients(term, len(values), weight) * values)[self.counts(len(values))].sum()


def given(problem: Problem, leaves: Mapping[str, Tensor], inputs: Mapping[str, Any], **options: Any) -> DenseCall:
    lead = len(problem.shape)
    per_row = lambda n, x: n != "pairs" and isinstance(x, Tensor) and x.ndim and tuple(x.shape[:lead]) == problem.shape
    kinds = {n: "row" if per_row(n, x) else "whole" for n, x in inputs.items()}
    teachers = {} if problem.teacher is None else {UNNAMED: hl.Logits(problem.teacher)}
    return DenseCall(problem.source(leaves), problem.targets, problem.segments, teachers, inputs, kinds, **options)


def view(problem: Problem, leaves: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> View:
    """Only rows that count go on: what stands in the others cannot matter."""
    return View(problem, given(problem, leaves, inputs), torch.float64, leaves)


def answer(objective: hl.Objective, problem: Problem, **options: Any) -> Answer:
    """The truth: loss, terms, metrics and gradients of an objective on a problem, called with these options."""
    leaves = problem.leaves()
    known = given(problem, leaves, problem.inputs, **options)
    for name, x in problem.inputs.items():
        if isinstance(x, Tensor) and x.requires_grad:
            leaves[f"input {name}"] = x.detach().double().requires_grad_()
    found = dense.answer(objective, known, torch.float64, leaves, functools.partial(View, problem))
    of = lambda kind: {n.removeprefix(kind): x.number for n, x in found.numbers.items() if n.startswith(kind)}
    metrics = {n: float(x) for n, x in of("metric ").items()}
    grads = {n.replace("input ", "input:"): x for n, x in found.grads.items()}
    return Answer(found.numbers["loss"].number, of("term "), metrics, grads)


def call_arguments(problem: Problem, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Keyword arguments of the call: inputs, and a teacher where the problem has one."""
    found = {
        n: x.detach().to(dtype or x.dtype).requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for n, x in problem.inputs.items()
    }
    if problem.teacher is not None:
        found["teacher"] = hl.Logits(problem.teacher)
    return found


def run(
    objective: hl.Objective,
    problem: Problem,
    *,
    memory: int | None = None,
    how: str = "autograd",
    dtype: torch.dtype = torch.float64,
    source: Mapping[str, Any] | None = None,
    **call: Any,
) -> Answer:
    """What headloss says.  `how` is autograd, prepared, masked (host_read=False) or forward_backward."""
    leaves = problem.leaves(dtype)
    said = problem.source(leaves, **({} if memory is None else {"memory": memory}), **(source or {}))
    arguments = call_arguments(problem) | call
    targets: Any = problem.targets
    if how == "prepared":
        targets = hl.prepare(problem.targets, problem.segments)
    else:
        arguments["segments"] = problem.segments
    if how == "masked":
        arguments["host_read"] = False
    if how == "forward_backward":
        out = objective.forward_backward(said, targets, **arguments)
        grads = {n: getattr(out.grads, n) for n in leaves}
    else:
        out = objective(said, targets, **arguments)
        out.loss.backward()
        grads = {n: x.grad for n, x in leaves.items()}
        for n, x in arguments.items():
            if isinstance(x, Tensor) and x.requires_grad:
                grads[f"input:{n}"] = x.grad
    if not any(p in FACTS for t in objective.terms.values() for p in inspect.signature(t.fn).parameters):
        grads |= {n: torch.zeros_like(x) for n, x in leaves.items() if grads[n] is None}  # nothing pulls on the logits
    missing = [n for n, g in grads.items() if g is None]
    assert not missing, f"no gradient for {missing}"
    return Answer(out.loss.detach(), out.terms, {n: float(m) for n, m in out.metrics.items()}, grads, dict(out.facts))


def run_by_facts(
    fn: Callable[..., Any], term: hl.Term, problem: Problem, *, memory: int | None = None, backend: str = "auto"
) -> Answer:
    """One term by hand: `row_facts`, then the function and the reduction as ordinary PyTorch."""
    leaves = problem.leaves()
    said = problem.source(leaves, **({} if memory is None else {"memory": memory}))
    v = view(problem, {n: x.detach() for n, x in leaves.items()}, problem.inputs)
    wanted = [p for p in inspect.signature(fn).parameters if p in FACTS and p not in problem.inputs]
    teacher = call_arguments(problem).get("teacher")
    arguments, top = v.arguments(fn, term), getattr(fn, "top", None)
    wanted += ["top_logprob"] if "top_logprob" in arguments else []
    facts = hl.row_facts(said, problem.targets, want=wanted, backend=backend, teacher=teacher, top=top)
    arguments |= {name: facts[name].flatten(0, len(problem.shape) - 1)[v.valid] for name in wanted}
    result = fn(**arguments, **term.options)
    values, own = result if isinstance(result, tuple) else (result, {})
    loss = v.reduced(term, values, None if term.row_weight is None else v.inputs[term.row_weight])
    loss.backward()
    metrics = {f"term/{k}": float(v.metric(k, x, None, v.returns).number) for k, x in own.items()}
    grads = {n: x.grad for n, x in leaves.items()}
    return Answer(loss.detach(), {"term": loss.detach()}, metrics, grads, dict(facts))


def check(got: Answer, want: Answer, tolerance: float = 1e-10, *, what: str = "") -> None:
    def close(name: str, a: Any, b: Any) -> None:
        a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
        if a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return  # quicker than the careful comparison below
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what} {name}: {m}"
        )

    close("loss", got.loss, want.loss)
    assert got.terms.keys() == want.terms.keys()
    for name, x in want.terms.items():
        close(f"term {name}", got.terms[name], x)
    assert got.metrics.keys() == want.metrics.keys(), (what, got.metrics.keys(), want.metrics.keys())
    for name, m in want.metrics.items():
        close(f"metric {name}", got.metrics[name], m)
    for name, g in want.grads.items():
        if name in got.grads:
            close(f"gradient of {name}", got.grads[name], g)


# Problems


def logprob_of(problem: Problem) -> Tensor:
    """The true log-probability of every row, in the caller's shape; 0 in ignored rows."""
    v = view(problem, problem.tensors, {})
    out = torch.zeros(problem.targets.numel(), dtype=torch.float64)
    out[v.valid] = FACTS["logprob"](v.softmax(None))
    return out.view(problem.shape)


def _pairs(problem: Problem) -> Tensor:
    assert problem.segments is not None
    ids = problem.segments.ids.reshape(-1)[problem.targets.reshape(-1) != IGNORE]
    alive = ids[ids >= 0].unique()
    return torch.stack([alive[:3], alive[-3:].flip(0)], 1) if len(alive) >= 3 else alive[[0, -1]][None]


# Inputs by name; any other name is one normal number per row.
INPUTS: dict[str, Callable[[Problem], Any]] = {
    "old_logprob": lambda p: logprob_of(p) + 0.2 * torch.randn(p.shape, dtype=torch.float64),
    "sampler_logprob": lambda p: logprob_of(p) + 0.3 * torch.randn(p.shape, dtype=torch.float64),
    "ref_logprob": lambda p: logprob_of(p) + 0.5 * torch.randn(p.shape, dtype=torch.float64),
    "token_weight": lambda p: torch.rand(p.shape, dtype=torch.float64) + 0.1,
    "pairs": _pairs,
    "desirable": lambda p: torch.arange(p.segments.num_segments) % 2 == 0,
    "kl": lambda p: torch.tensor(0.3, dtype=torch.float64),
    "optimal_advantage": lambda p: torch.randn(p.segments.num_segments, dtype=torch.float64),
    "value": lambda p: torch.randn(p.shape, dtype=torch.float64).requires_grad_(),
    "draw": lambda p: torch.rand(p.shape, dtype=torch.float64),
    "foreign_logprob": lambda p: torch.randn(*p.shape, 23, dtype=torch.float64).mul(2).log_softmax(-1)[..., :9],
}


def input_for(name: str, problem: Problem) -> Any:
    if name in INPUTS:
        return INPUTS[name](problem)
    if name.endswith("logprob"):
        return INPUTS["ref_logprob"](problem)
    return torch.randn(problem.shape, dtype=torch.float64)


def poison(problem: Problem) -> Problem:
    """Ignored rows hold NaN and infinities wherever the caller could have put them."""
    gone = problem.targets == IGNORE
    bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64).repeat(problem.targets.numel())
    lead = len(problem.shape)

    def spoil(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and tuple(x.shape[:lead]) == problem.shape:
            mask = gone.view(gone.shape + (1,) * (x.ndim - lead))
            filler = bad[: problem.targets.numel()].to(x.dtype).view(mask.shape)
            return torch.where(mask, filler, x.detach()).requires_grad_(x.requires_grad)
        return x

    return replace(
        problem,
        tensors={n: spoil(x) for n, x in problem.tensors.items()},
        inputs={n: spoil(x) for n, x in problem.inputs.items()},
        teacher=spoil(problem.teacher),
    )


def make(
    kind: str = "Logits",
    shape: tuple[int, ...] = (23,),
    vocab: int = 37,
    *,
    hidden: int = 5,
    peaked: bool = False,
    ignored: float = 0.3,
    num_segments: int = 6,
    loose: bool = False,
    bias: bool = True,
    transform: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | tuple[str, ...] = (),
    teacher: bool = False,
    ids: int = 0,
    seed: int = 0,
    bad: bool = True,
) -> Problem:
    """A problem where nothing divides anything: odd sizes, unsorted segments, one of them empty, one of one token."""
    torch.manual_seed(seed)
    N = math.prod(shape)
    randn = lambda *size: torch.randn(*size, dtype=torch.float64)
    sharp = 9.0 if peaked else 1.0
    if kind == "Logits":
        tensors = {"logits": sharp * randn(*shape, vocab) + (150.0 if peaked else 0.0)}
    else:
        tensors = {"hidden": sharp * randn(*shape, hidden), "weight": randn(vocab, hidden)}
        if bias:
            tensors["bias"] = randn(vocab)
    targets = torch.randint(vocab, (N,))
    if peaked and kind == "Logits":
        sure = torch.rand(N) < 0.3  # confident tokens: logprob near 0
        targets = torch.where(sure, tensors["logits"].reshape(N, vocab).argmax(-1), targets)
    gone = torch.rand(N) < ignored
    # Segment 0 has one row, segment 1 none, segment 2 only ignored rows; the ids come in no order.
    segment_ids = torch.randint(3, num_segments, (N,)) if num_segments > 3 else torch.zeros(N, dtype=torch.long)
    if num_segments > 3 and N > 3:
        segment_ids[N // 2] = 0
        gone[N // 2] = False
        if ignored:
            segment_ids[1], gone[1] = 2, True
    if loose:
        segment_ids[2], gone[2] = -1, False
    targets[gone] = IGNORE
    problem = Problem(
        kind=kind,
        tensors=tensors,
        targets=targets.view(shape),
        segments=hl.Segments.from_ids(segment_ids.view(shape), num_segments),
        transform=dict(transform or {}),
        teacher=sharp * randn(*shape, vocab) if teacher else None,
        ids=torch.rand(*shape, vocab).argsort(-1)[..., :ids] if ids else None,
    )
    given = dict(inputs) if isinstance(inputs, Mapping) else {name: input_for(name, problem) for name in inputs}
    problem = replace(problem, inputs=given)
    return poison(problem) if bad else problem


def inputs_of(*functions: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the inputs that some functions ask for, the optional ones too."""
    names = [
        p.name
        for fn in functions
        for p in inspect.signature(fn).parameters.values()
        if p.kind is not p.KEYWORD_ONLY and p.name not in (*FACTS, *APART, "segments", "targets")
    ]
    return tuple(dict.fromkeys(names))


def problem_for(fn: Callable[..., Any], kind: str = "Logits", shape: tuple[int, ...] = (23,), **more: Any) -> Problem:
    """A problem with everything that a loss's signature asks for."""
    asked = set(inspect.signature(fn).parameters)
    more.setdefault("teacher", bool(asked & DENSE_TEACHER))
    more.setdefault("ids", 4 if asked & SPARSE_TEACHER else 0)
    extra = more.pop("extra_inputs", ())
    return make(kind, shape, inputs=(*inputs_of(fn), *extra), **more)
