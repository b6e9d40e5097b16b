"""The dense oracle: what an objective means, written down once more in float64 with every logit in memory.

Dimension key:  N rows   R rows that count   S segments   P pairs   V vocabulary   D hidden size   K ids

Nothing here calls headloss to compute a number.  A `Problem` holds the tensors of one call.  `answer` is the truth
about an objective on it; `run` is what headloss says; `check` compares the two.  A teacher, a backend and a tolerance
are arguments, so that the same problems serve every way of running them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import headloss as hl

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


class DenseSegments:
    """`hl.Segments` as a matrix: member_SR is 1 where row r is in segment s."""

    def __init__(self, ids_R: Tensor, num_segments: int, dtype: torch.dtype = torch.float64) -> None:
        self.ids, self.num_segments = ids_R, num_segments
        self.member_SR = (ids_R[None] == torch.arange(num_segments)[:, None]).to(dtype)
        self.counts = self.member_SR.sum(1)

    def totals(self, x: Tensor) -> Tensor:
        return self.member_SR.to(x.dtype) @ x

    def means(self, x: Tensor) -> Tensor:
        return self.totals(x) / self.counts.clamp(min=1)

    def spread(self, y: Tensor) -> Tensor:
        return self.member_SR.to(y.dtype).T @ y

    def mean(self, x: Tensor) -> Tensor:
        return self.spread(self.means(x))

    def __len__(self) -> int:
        return self.num_segments


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


class View(NamedTuple):
    """The rows of a problem that count, ready to be injected."""

    problem: Problem
    z_RV: Tensor
    valid_N: Tensor
    targets_R: Tensor
    segments: DenseSegments | None
    inputs: dict[str, Any]

    def dense(self, temperature: float | None) -> Dense:
        T = self.problem.transform.get("temperature", 1.0) if temperature is None else temperature
        if isinstance(T, Tensor):
            T = T.double().expand(self.problem.shape).reshape(-1)[self.valid_N][:, None]
        p = self.problem
        teacher = None if p.teacher is None else p.teacher.reshape(-1, p.vocab)[self.valid_N]
        ids = None if p.ids is None else p.ids.reshape(-1, p.ids.shape[-1])[self.valid_N]
        return Dense(self.z_RV / T, self.targets_R, None if teacher is None else teacher / T, ids)

    def arguments(self, fn: Callable[..., Any], temperature: float | None, named: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for p in inspect.signature(fn).parameters.values():
            if p.kind is p.KEYWORD_ONLY:
                continue
            if p.name in named:
                name, own = named[p.name]
                found[p.name] = FACTS[name](self.dense(own))
            elif p.name in FACTS and p.name not in self.inputs:
                found[p.name] = FACTS[p.name](self.dense(temperature))
            elif p.name == "top_logprob":  # where it may be left out, it is
                found |= {p.name: self.dense(temperature).logp_RV.topk(fn.top).values} if p.default is p.empty else {}  # type: ignore[attr-defined]
            elif p.name == "segments":
                found[p.name] = self.segments
            elif p.name == "targets":
                found[p.name] = self.targets_R
            elif self.inputs.get(p.name) is not None:
                found[p.name] = self.inputs[p.name]
        return found


def view(problem: Problem, leaves: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> View:
    """Only rows that count go on: what stands in the others cannot matter."""
    valid_N = problem.targets.reshape(-1) != IGNORE
    raw = {n: x.reshape(-1, x.shape[-1])[valid_N] if n in ("logits", "hidden") else x for n, x in leaves.items()}
    segments = None
    if problem.segments is not None:
        ids = problem.segments.ids.reshape(-1)[valid_N]
        segments = DenseSegments(ids, problem.segments.num_segments)
    lead = len(problem.shape)
    laid = {}
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.ndim and tuple(x.shape[:lead]) == problem.shape and name != "pairs":
            x = x.reshape(-1, *x.shape[lead:])[valid_N]
        laid[name] = x.double() if isinstance(x, Tensor) and x.dtype.is_floating_point else x
    return View(problem, problem.logits(raw), valid_N, problem.targets.reshape(-1)[valid_N].long(), segments, laid)


def reduce(
    values: Tensor,
    reduction: str,
    segments: DenseSegments | None,
    rows: int,
    *,
    length: float | None = None,
    weight: Tensor | None = None,
    num_items: Any = None,
    num_segments: Any = None,
    returns: str = "row",
) -> Tensor:
    """The definition of each reduction, in loops.  `weight` is the row weight, already multiplied into `values`."""
    per_row = len(values) == rows and returns == "row"  # there may be as many segments
    present = [] if segments is None else [s for s in range(segments.num_segments) if segments.counts[s] > 0]
    if not per_row and returns != "pair" and segments is not None and len(values) == segments.num_segments:
        values = values[present]
        weight = weight if weight is None or weight.ndim == 0 else weight[present]
        per_segment = True
    else:
        per_segment = False
    at_least_1 = lambda n: max(float(n), 1.0)
    total = sum((v for v in values), values.new_zeros(()))
    if reduction == "weighted_mean":
        mass = len(values) if weight is None else float(weight.detach().expand(len(values)).sum())
        return total / mass if mass else total
    if reduction == "token_sum":
        return total
    if per_segment:
        return total / at_least_1(len(present) if num_segments is None else num_segments)
    if not per_row:
        return total / at_least_1(len(values))
    if reduction == "token_mean":
        return total / at_least_1(rows if num_items is None else num_items)
    assert segments is not None
    total = values.new_zeros(())
    for s in present:
        inside = values[segments.ids == s]
        total = total + {
            "seq_mean_token_mean": lambda x: x.mean(),
            "seq_mean_token_sum": lambda x: x.sum(),
            "seq_mean_token_sum_norm": lambda x: x.sum() / length,
        }[reduction](inside)
    return total / at_least_1(len(present) if num_segments is None else num_segments)


def metric(
    name: str,
    x: Any,
    rows: int,
    segments: DenseSegments | None,
    row_weight: Tensor | None = None,
    returns: str = "row",
) -> float:
    """What a metric's number is, from its name's ending; rows of weight 0 do not count."""
    x = torch.as_tensor(x).detach().double().reshape(-1)
    other = returns == "segment" or (returns == "row" and len(x) != rows)
    if row_weight is not None and row_weight.shape == x.shape == (rows,) and returns == "row":
        x = x[row_weight != 0]
    elif other and segments is not None and len(x) == segments.num_segments:
        x = x[segments.counts > 0]
    if name.endswith(("_min", "_max")) and len(x) == 0:
        return math.inf if name.endswith("_min") else -math.inf
    if name.endswith("_min"):
        return float(x.min())
    if name.endswith("_max"):
        return float(x.max())
    if name.endswith("_std"):
        return float(x.std(correction=0)) if len(x) else math.nan
    if name.endswith("effective_sample_size"):
        return float(x.sum() ** 2 / x.square().sum())
    if name.endswith("perplexity"):
        return float(x.mean().exp())
    return float(x.mean())


def answer(
    objective: hl.Objective,
    problem: Problem,
    *,
    weights: Mapping[str, Any] | None = None,
    grad_scale: float = 1.0,
    num_items: Any = None,
    num_segments: Any = None,
) -> Answer:
    """The truth: loss, terms, metrics and gradients of an objective on a problem."""
    leaves = problem.leaves()
    inputs = dict(problem.inputs)
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.requires_grad:
            leaves[f"input:{name}"] = inputs[name] = x.detach().double().requires_grad_()
    source_leaves = {n: x for n, x in leaves.items() if not n.startswith("input:")}
    v = view(problem, source_leaves, inputs)
    R = len(v.targets_R)
    loss, terms, metrics = torch.zeros((), dtype=torch.float64), {}, {}
    for name, term in objective.terms.items():
        w = (weights or {}).get(name, term.weight)
        if not isinstance(w, Tensor) and w == 0:
            terms[name] = torch.zeros((), dtype=torch.float64)
            continue
        result = term.fn(**v.arguments(term.fn, term.temperature, term.facts), **term.options)
        values, own = result if isinstance(result, tuple) else (result, {})
        row_weight, reported, returns = None, {}, getattr(term.fn, "returns", "row")
        if isinstance(term.row_weight, str):
            row_weight = v.inputs[term.row_weight].detach()
        elif term.row_weight is not None:
            row_weight = term.row_weight(**v.arguments(term.row_weight, term.temperature, {}))
            row_weight, reported = row_weight if isinstance(row_weight, tuple) else (row_weight, {})
            reported = {
                f"{name}/{term.row_weight.__name__}/{k}": metric(k, x, R, v.segments) for k, x in reported.items()
            }
            row_weight = row_weight.detach()
        if row_weight is not None:
            values = torch.where(row_weight != 0, values * row_weight, 0.0)
        terms[name] = reduce(
            values, term.reduction, v.segments, R,
            length=term.length, weight=row_weight, num_items=num_items, num_segments=num_segments, returns=returns,
        )  # fmt: skip
        loss = loss + w * terms[name]
        metrics |= {f"{name}/{k}": metric(k, x, R, v.segments, row_weight, returns) for k, x in own.items()} | reported
    for name, call in objective.metrics:
        found = call.fn(**v.arguments(call.fn, None, {}))
        many = found.items() if isinstance(found, Mapping) else [("", found)]
        for k, x in many:
            label = f"{name}/{k}" if k else name
            metrics[label] = metric(label, x, R, v.segments)
    grads = {n: torch.zeros_like(x) for n, x in leaves.items()}
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        grads = {n: torch.zeros_like(x) if g is None else g * grad_scale for (n, x), g in zip(leaves.items(), found)}
    return Answer(loss.detach(), {n: t.detach() for n, t in terms.items()}, metrics, grads)


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
    arguments, top = v.arguments(fn, None, {}), getattr(fn, "top", None)
    wanted += ["top_logprob"] if "top_logprob" in arguments else []
    facts = hl.row_facts(said, problem.targets, want=wanted, backend=backend, teacher=teacher, top=top)
    arguments |= {name: facts[name].flatten(0, len(problem.shape) - 1)[v.valid_N] for name in wanted}
    result = fn(**arguments, **term.options)
    values, own = result if isinstance(result, tuple) else (result, {})
    R = len(v.targets_R)
    weight = None if term.row_weight is None else v.inputs[term.row_weight]
    values = values if weight is None else values * weight
    returns = getattr(fn, "returns", "row")
    loss = reduce(values, term.reduction, v.segments, R, length=term.length, weight=weight, returns=returns)
    loss.backward()
    metrics = {f"term/{k}": metric(k, x, R, v.segments, None, returns) for k, x in own.items()}
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
    out[v.valid_N] = FACTS["logprob"](v.dense(None))
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
