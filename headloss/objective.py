"""The objective: named terms, each a plain function of facts, weighted and reduced into one loss.

    objective = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=1e-4), metrics=["entropy"])
    out = objective(hl.Linear(hidden, weight), targets)
    out.loss.backward()

A call goes through three steps.  Plan: trace each term (from a cache), read off its class, choose the grade.  Bind:
check and lay out what was passed, find the rows that count.  Sweep: facts, loss and gradients by the cheapest way the
classes allow.  The same record comes back whatever was asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.backends import check_backend, choose
from headloss.bound import BoundLoss, Planned, check_inputs, layout
from headloss.config import read_config, write_config
from headloss.explain import Explanation, explain
from headloss.facts import FACTS, NEEDS_TARGET, Fact, Want
from headloss.heads import Grads
from headloss.metrics import read_metrics
from headloss.plan import Call, Shape, trace
from headloss.record import Facts, Output
from headloss.rows import Prepared, Rows, bind_rows
from headloss.segments import Segments
from headloss.signature import suggest
from headloss.sources import Linear, Logits, Source
from headloss.sweeps import Chunk, Head, Sweep, run, settle
from headloss.term import Term, check_weight

CALL = ("targets", "segments", "num_items", "num_segments", "weights", "grad_scale", "host_read")


class _Plan(NamedTuple):
    """How one call will run: decided before anything is computed."""

    source: Source
    segments: Segments | None
    terms: tuple[Planned, ...]
    off: tuple[str, ...]  # terms switched off
    metrics: tuple[tuple[str, Call], ...]
    inputs: dict[str, tuple[Tensor, Shape]]
    want: Want
    kind: str  # the widest class among the terms


class Objective:
    """Named terms over one softmax.  Immutable.

    A keyword is a term: a loss function, or a `Term` with weight, reduction and options.  `metrics` are names (a fact,
    "accuracy", "perplexity") or functions injected like a loss.  Call it with a source and targets; see `__call__`.
    """

    __slots__ = ("backend", "metrics", "terms")
    terms: dict[str, Term]
    metrics: tuple[tuple[str, Call], ...]
    backend: str

    def __init__(
        self,
        *,
        metrics: Sequence[str | Callable[..., Any]] | Mapping[str, Callable[..., Any]] = (),
        backend: str = "auto",
        **terms: Callable[..., Any] | Term,
    ) -> None:
        if not terms:
            raise ValueError("terms: wanted at least one loss, as in Objective(ce=cross_entropy)")
        check_backend(backend)
        object.__setattr__(self, "terms", {name: _as_term(name, x) for name, x in terms.items()})
        object.__setattr__(self, "metrics", tuple(read_metrics(metrics)))
        object.__setattr__(self, "backend", backend)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Objective is immutable; make a new one to change {name!r}")

    def __call__(
        self,
        source: Source,
        targets: Tensor | Prepared | None = None,
        *,
        segments: Segments | None = None,
        num_items: int | Tensor | None = None,
        num_segments: int | Tensor | None = None,
        weights: Mapping[str, float | Tensor] | None = None,
        grad_scale: float | Tensor = 1.0,
        host_read: bool = True,
        **inputs: Any,
    ) -> Output:
        """Evaluate the terms on a source; `out.loss` and `out.facts` are differentiable.

        targets       each row's target, in the source's leading shape; -100 is ignored
        segments      which rows belong together, for losses and reductions that ask
        num_items     global number of tokens, for `token_mean`; by default those of this call
        num_segments  global number of segments, for the `seq_mean_...` reductions; by default those of this call
        weights       weights of terms for this call only, {"kl": beta}
        grad_scale    multiplies every gradient, not the loss: a loss scale that is known now costs nothing
        host_read     False: never look at the targets from the host; ignored rows are then masked, not dropped
        inputs        whatever the losses' signatures ask for, in the targets' shape, (S,) or scalar
        """
        source = plain_source(source)
        plan = self._plan(source, targets, segments, weights, inputs)
        sweep, loss = self._bind(plan, targets, num_items, num_segments, grad_scale, host_read)
        needs = tuple(x.requires_grad and torch.is_grad_enabled() for x in source.tensors)
        if not any(needs) and not loss.wants_grad:
            with torch.no_grad():
                result = run(sweep, loss, needs)
            shaped = [sweep.rows.put(result.facts[f]) for f in sweep.want.facts]
            return self._report(plan, loss, result.loss, shaped)
        given = [plan.inputs[name][0] for name in loss.wants_grad]
        value, *facts = Head.apply(sweep, loss, needs, *source.tensors, *given)
        return self._report(plan, loss, value, facts)

    def forward_backward(
        self,
        source: Source,
        targets: Tensor | Prepared | None = None,
        *,
        segments: Segments | None = None,
        num_items: int | Tensor | None = None,
        num_segments: int | Tensor | None = None,
        weights: Mapping[str, float | Tensor] | None = None,
        grad_scale: float | Tensor = 1.0,
        host_read: bool = True,
        **inputs: Any,
    ) -> Output:
        """The same record with `.grads` (logits, or hidden, weight and bias), without autograd."""
        with torch.no_grad():
            source = plain_source(source)
            plan = self._plan(source, targets, segments, weights, inputs)
            sweep, loss = self._bind(plan, targets, num_items, num_segments, grad_scale, host_read)
            needs = tuple(True for _ in source.tensors)
            result = run(sweep, loss, needs)
            grads = settle(sweep, result, needs)
            grads = Grads(
                *(g if g is None or x is None else g.to(x.dtype) for g, x in zip(grads, _by_name(source), strict=True))
            )
            shaped = [sweep.rows.put(result.facts[f]) for f in sweep.want.facts]
            return self._report(plan, loss, result.loss, shaped)._replace(grads=grads)

    def explain(
        self,
        source: Source,
        targets: Tensor | Prepared | None = None,
        *,
        segments: Segments | None = None,
        num_items: int | Tensor | None = None,
        num_segments: int | Tensor | None = None,
        weights: Mapping[str, float | Tensor] | None = None,
        grad_scale: float | Tensor = 1.0,
        host_read: bool = True,
        **inputs: Any,
    ) -> Explanation:
        """What a call with these arguments would do: facts, classes, sweeps, GEMMs, bytes.  Takes meta tensors."""
        source = plain_source(source)
        plan = self._plan(source, targets, segments, weights, inputs)
        rows = self._rows(plan, targets, host_read)
        backend = choose(self.backend, source.device).__name__.split(".")[-1]
        return explain(plan, rows, _chunks(plan, rows), backend, host_read)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], losses: Mapping[str, Callable[..., Any]] | None = None
    ) -> Objective:
        """An objective from plain data; `losses` adds functions of your own to those of `headloss.losses`.

        >>> Objective.from_config({"terms": {"ce": "cross_entropy", "z": {"loss": "z_loss", "weight": 1e-4}}})
        """
        return cls(**read_config(config, losses or {}))

    def to_config(self) -> dict[str, Any]:
        """Plain data that `from_config` turns into this objective again."""
        return write_config(self)

    def __repr__(self) -> str:
        parts = [f"{name}={term!r}" for name, term in self.terms.items()]
        if self.metrics:
            parts.append(f"metrics={[name for name, _ in self.metrics]}")
        return f"Objective({', '.join(parts)})"

    def _plan(
        self,
        source: Source,
        targets: Tensor | Prepared | None,
        segments: Segments | None,
        weights: Mapping[str, float | Tensor] | None,
        inputs: Mapping[str, Any],
    ) -> _Plan:
        if isinstance(targets, Prepared):
            segments = targets.segments if segments is None else segments
        if segments is not None and not isinstance(segments, Segments):
            raise TypeError(f"segments: wanted hl.Segments, got {type(segments).__name__}")
        weights = dict(weights or {})
        for name, weight in weights.items():
            if name not in self.terms:
                raise ValueError(
                    f"weights: no term {name!r}; there are {', '.join(self.terms)}{suggest(name, self.terms)}"
                )
            check_weight(f"weights[{name!r}]", weight)
        own = source.temperature if isinstance(source.temperature, int | float) else None
        calls = {name: term.call(own) for name, term in self.terms.items()}
        now = {name: weights.get(name, term.weight) for name, term in self.terms.items()}
        off = tuple(name for name, weight in now.items() if not isinstance(weight, Tensor) and weight == 0)
        check_inputs(calls.items(), inputs, CALL, off=off, metrics=self.metrics)
        tables = {"vocabulary": source.vocab, "pairs": len(inputs["pairs"]) if inputs.get("pairs") is not None else -1}
        laid = {
            name: layout(name, x, source.leading, segments, tables, source.device)
            for name, x in inputs.items()
            if x is not None
        }
        planned = []
        for name, term in self.terms.items():
            if name in off:
                continue
            if term.needs_segments and segments is None:
                asks = f"reduction {term.reduction!r}" if term.reduction.startswith("seq_") else "its loss"
                raise ValueError(f"segments: term {name!r} needs them for {asks}; pass segments=hl.Segments...")
            call = calls[name]
            shapes = {n: shape for n, (_, shape) in laid.items() if n in call.input_names}
            found = trace(call, shapes, source.fact_dtype, source.device.type, segments is not None)
            if term.reduction == "weighted_mean" and call.row_weight_signature and call.row_weight_signature.facts:
                found = found._replace(kind="batch", reason="weighted_mean sums a row_weight made of facts")
            planned.append(Planned(name, call, found, now[name], term.reduction, term.length))
        wanted = [f for t in planned for f in t.call.facts if f not in t.trace.unused]
        wanted += [f for _, call in self.metrics for f in call.facts]
        if targets is None:
            for fact in wanted:
                if fact.name in NEEDS_TARGET:
                    raise ValueError(f"targets: needed by the fact {fact.name!r}; pass each row's target")
            if any(s.wants("targets") for t in planned for s in t.call.signatures):
                raise ValueError("targets: a loss asks for them; pass each row's target")
        kinds = [t.trace.kind for t in planned]
        kind = next((k for k in ("batch", "segment") if k in kinds), "row")
        return _Plan(source, segments, tuple(planned), off, self.metrics, laid, Want(wanted), kind)

    def _rows(self, plan: _Plan, targets: Tensor | Prepared | None, host_read: bool) -> Rows:
        if plan.kind == "batch" and not host_read:
            names = [t.name for t in plan.terms if t.trace.kind == "batch"]
            raise ValueError(
                f"host_read: term {names[0]!r} mixes rows and must not see ignored ones, so they have to be dropped; "
                f"allow the host read, or give targets through hl.prepare"
            )
        by_segment = plan.kind == "segment" and isinstance(plan.source, Linear)
        source = plan.source
        return bind_rows(
            source.leading, targets, plan.segments,
            vocab=source.vocab, device=source.device, host_read=host_read, by_segment=by_segment,
        )  # fmt: skip

    def _bind(
        self,
        plan: _Plan,
        targets: Tensor | Prepared | None,
        num_items: int | Tensor | None,
        num_segments: int | Tensor | None,
        grad_scale: float | Tensor,
        host_read: bool,
    ) -> tuple[Sweep, BoundLoss]:
        for name, x in (("num_items", num_items), ("num_segments", num_segments)):
            _check_count(name, x)
        check_weight("grad_scale", grad_scale)
        source = plan.source
        backend = choose(self.backend, source.device)
        if isinstance(source, Linear):
            source.chunk_rows()  # refuses a budget below one row
            if source.shard is not None:
                source.shard.check_width(source.weight.shape[0])
        rows = self._rows(plan, targets, host_read)
        if rows.stats is not None and rows.stats.loose:
            for term in plan.terms:
                if self.terms[term.name].needs_segments:
                    raise ValueError(
                        f"segments: {rows.stats.loose} rows that are not ignored have no segment (id -1), "
                        f"but term {term.name!r} needs one for each"
                    )
        rows.join()
        loss = BoundLoss(
            plan.terms, plan.metrics, rows, plan.inputs,
            chunks=_chunks(plan, rows), num_items=num_items, num_segments=num_segments, grad_scale=grad_scale,
            dtype=source.fact_dtype, device=source.device, narrow=source.narrow,
        )  # fmt: skip
        return Sweep(source, rows, plan.want, backend), loss

    def _report(self, plan: _Plan, loss: BoundLoss, value: Tensor, facts: Sequence[Tensor]) -> Output:
        zero = torch.zeros_like(loss.filler, requires_grad=False).sum()
        terms = {name: zero if name in plan.off else loss.values[name] for name in self.terms}
        named = Facts(dict(zip(plan.want.facts, facts, strict=True)))
        return Output(value, terms, loss.metrics, named)


def row_facts(
    source: Source,
    targets: Tensor | Prepared | None = None,
    want: Sequence[str | tuple[str, float]] = ("logprob",),
    *,
    backend: str = "auto",
    host_read: bool = True,
) -> Facts:
    """Differentiable facts of every row, in the targets' shape; then any PyTorch you like.

    >>> facts = hl.row_facts(hl.Logits(logits), targets, want=("logprob", "entropy"))
    >>> (-facts.logprob.mean() - 0.01 * facts.entropy.mean()).backward()
    """
    source = plain_source(source)
    wanted = []
    for name in [want] if isinstance(want, str) else want:
        fact = Fact(name) if isinstance(name, str) else Fact(name[0], float(name[1]))
        if fact.name not in FACTS:
            there = ", ".join(FACTS)
            raise ValueError(f"want: {fact.name!r} is not a fact; there are {there}{suggest(str(fact.name), FACTS)}")
        if fact.temperature is not None and not fact.temperature > 0:
            raise ValueError(f"want: wanted a positive temperature for {fact.name!r}, got {fact.temperature}")
        if targets is None and fact.name in NEEDS_TARGET:
            raise ValueError(f"targets: needed by the fact {fact.name!r}; pass each row's target")
        wanted.append(fact)
    if not wanted:
        raise ValueError(f"want: wanted at least one of {', '.join(FACTS)}")
    chosen = choose(backend, source.device)
    rows = bind_rows(source.leading, targets, None, vocab=source.vocab, device=source.device, host_read=host_read)
    sweep = Sweep(source, rows, Want(wanted), chosen)
    needs = tuple(x.requires_grad and torch.is_grad_enabled() for x in source.tensors)
    if any(needs):
        _, *facts = Head.apply(sweep, None, needs, *source.tensors)
    else:
        with torch.no_grad():
            result = run(sweep, None, needs)
            facts = [rows.put(result.facts[f]) for f in sweep.want.facts]
    return Facts(dict(zip(sweep.want.facts, facts, strict=True)))


def plain_source(source: Source) -> Source:
    """The source, checked, on plain tensors."""
    if not isinstance(source, Logits | Linear):
        hint = "; wrap a tensor in hl.Logits(...)" if isinstance(source, Tensor) else ""
        raise TypeError(f"source: wanted hl.Logits or hl.Linear, got {type(source).__name__}{hint}")
    tensors = sys.modules.get("torch.distributed.tensor")  # not loaded: there are no DTensors either
    if tensors is not None and any(isinstance(x, tensors.DTensor) for x in source.tensors):
        from headloss.dtensor import localize

        source = localize(source)
    return source


def _chunks(plan: _Plan, rows: Rows) -> list[Chunk] | None:
    """How a visit walks the rows; None if every fact must be there before the first cotangent."""
    if not isinstance(plan.source, Linear) or plan.kind == "batch":
        return None
    if plan.kind == "segment" and plan.segments is not None and plan.segments.group is not None:
        return None  # a sum over ranks must see all rows
    most = plan.source.chunk_rows()
    if plan.kind == "row":
        pieces = -(-rows.count // most)
        return [Chunk(slice(rows.count * i // pieces, rows.count * (i + 1) // pieces)) for i in range(pieces)]
    runs = rows.aligned(most) if rows.stats is not None and not rows.stats.loose else None
    return None if runs is None else [Chunk(*run) for run in runs]


def _as_term(name: str, x: Callable[..., Any] | Term) -> Term:
    if isinstance(x, Term):
        return x
    if isinstance(x, str):
        raise TypeError(f"{name}: wanted a loss function or a Term, got {x!r}; names belong in Objective.from_config")
    if not callable(x):
        raise TypeError(f"{name}: wanted a loss function or a Term, got {type(x).__name__}")
    return Term(x)


def _by_name(source: Source) -> tuple[Tensor | None, ...]:
    return tuple(getattr(source, name, None) for name in Grads._fields)


def _check_count(name: str, x: object) -> None:
    if x is None or (isinstance(x, Tensor) and x.ndim == 0 and not x.requires_grad):
        return
    if isinstance(x, Tensor | bool) or not isinstance(x, int | float):
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: wanted a number or a scalar tensor, got {got}")
    if x < 0:
        raise ValueError(f"{name}: wanted a count, got {x}")
