"""Trace a term once into a graph of its values and gradients, and read off that graph which rows it combines.

Dimension key:  R rows that count   S segments

Each term becomes one joint graph `(facts, inputs, seed) -> (value, cotangents, metrics)`; `seed` is the reduction's
weight on each value, and the cotangents are those of the facts and of inputs that require grad.  Options are constants
of the trace.  The graph runs chunk by chunk in the visit, and it shows the term's class:

    row       every operation is element-wise over rows        any chunk of rows will do
    segment   combines rows only through `segments`            chunks must hold whole segments
    batch     anything else                                    all rows' facts first, then the loss once

A function that we may not trace (it reads something that can change, see `function_reads.py`) or cannot trace (it
branches on values) is batch: it is called untraced, under ordinary autograd.  Metrics are evaluated once on all rows
and never change the class.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from headloss.bounded_cache import store
from headloss.facts import CONSTANT, Fact
from headloss.segments import Segments, WrongLengthError
from headloss.teachers import TOP
from headloss.trace.call import Call, Env, WritesError, WrongValueError, WrongWeightError, writes_message
from headloss.trace.classify import ancestors, classify, counts_rows, size, subgraph, without_modes, written_arguments
from headloss.trace.dynamic_shapes import distinct_sizes, trace_any_size
from headloss.trace.function_reads import is_all_ours, is_ours
from headloss.trace.gradient import Reach, is_idle, leaf, reach_of
from headloss.trace.trace_check import SIZES, agrees, random_like

PAIRS = -1  # in a shape: the number of pairs, on which no trace depends


class InputSpec(NamedTuple):
    """What a trace needs to know about an input: its layout, and whether it requires grad."""

    kind: str  # "row", "segment", "scalar" or "whole"
    dtype: torch.dtype
    inner: tuple[int, ...]  # the dimensions after the first (row, segment) or all of them (whole)
    requires_grad: bool = False

    def sizes(self, rows: int, segments: int, pairs: int) -> tuple[int, ...]:
        """The shape of an example with these numbers of rows, segments and pairs."""
        lead = {"row": (rows,), "segment": (segments,)}.get(self.kind, ())
        return (*lead, *[pairs if n == PAIRS else n for n in self.inner])


InputSpecs = Mapping[str, InputSpec]


class Trace(NamedTuple):
    """A term's class, the reason for it, and the graph of its cotangents if it has one."""

    kind: str  # "row", "segment" or "batch"
    reason: str
    value: str | None = None  # the values belong to a "row", a "segment" or "other"; None if untraced
    cotangents: fx.GraphModule | None = None
    joint: fx.GraphModule | None = None
    variable_floats: bool = True  # whether literals may differ in other calls: a kernel then takes them as arguments
    unused: frozenset[Fact] = frozenset()  # facts that it asks for but, with these options, never reads
    metrics: Mapping[str, str] = {}  # "row", "segment" or "other" for each of its metrics
    sums: tuple[int, int] = (0, 0)  # how often it sums over segments, forward and backward
    reach: Reach | None = None  # where its gradient goes; None if untraced
    row_by_row: bool = False  # whether the loss combines no rows, so that a row of weight 0 gets no gradient at all


def trace(
    call: Call, inputs: InputSpecs, dtype: torch.dtype, device: str, segmented: bool, targetless: bool = False
) -> Trace:
    """The trace of a term, from a cache keyed by everything that the function reads and by the shape of the call."""
    device = "cpu" if device == "meta" else device  # on meta, some operations lose their derivative
    how, row_by_row = (dtype, device, segmented, targetless), False
    if call.row_weights:
        unweighted = call._replace(row_weights=())
        its_inputs = {n: s for n, s in inputs.items() if n in unweighted.input_names}
        row_by_row = trace(unweighted, its_inputs, *how).kind == "row"
    reads = call.reads()
    if reads.unknown:
        return Trace("batch", f"reads {', '.join(reads.unknown)}", row_by_row=row_by_row)
    alike = _alike(call.facts)
    plain = lambda p: p if p.fact is None else p._replace(fact=alike[p.fact])
    shape = (tuple([tuple(map(plain, s.parameters)) for s in call.signatures]), tuple(sorted(inputs.items())), how)
    elements = [f.element for f in call.facts if f.element is not None and not is_ours(f.element.fn)]
    if any(e.pure or e.reads().unknown for e in elements):  # a key would keep what they read alive
        return _trace(call, row_by_row, inputs, *how)
    cached = _TRACES.get((reads.key, shape))
    if cached is not None:
        return _renamed(cached, {y: x for x, y in alike.items()})
    _count_trace(call, (shape, *[getattr(e.fn, "__code__", None) for e in elements]))
    made = _trace(call, row_by_row, inputs, *how)._replace(variable_floats=reads.variable_floats)
    if call.reads().key == reads.key:  # else another thread changed it meanwhile, so the trace may be of either
        store(_TRACES, (reads.key, shape), _renamed(made, alike), _MOST_TRACES)
    return made


def _alike(facts: Sequence[Fact]) -> dict[Fact, Fact]:
    """Facts for a key: without temperatures, except for which are the same, since no trace depends on more, and without
    a user's divergence, whose own reads are in the key already."""
    at = {T: float(i) for i, T in enumerate(dict.fromkeys(f.temperature for f in facts))}
    plain = lambda e: None if e is None or not is_ours(e.fn) else e
    return {f: f._replace(temperature=at[f.temperature], element=plain(f.element)) for f in facts}


def _renamed(trace: Trace, facts: Mapping[Fact, Fact]) -> Trace:
    reach = trace.reach and trace.reach._replace(lost=tuple([facts[f] for f in trace.reach.lost]))
    return trace._replace(unused=frozenset([facts[f] for f in trace.unused]), reach=reach)


def _count_trace(call: Call, shape: tuple[Any, ...]) -> None:
    """Warn if a function is traced again and again although only a number that it reads can have changed."""
    key = (getattr(call.fn, "__code__", None), *shape)
    if store(_TRACED, key, _TRACED.get(key, 0) + 1, _MOST_TRACES) == _TOO_OFTEN:
        warnings.warn(
            f"headloss: {call.signature.name} has been traced {_TOO_OFTEN} times, which costs time whenever it "
            f"happens: an option, or a number that it captures, keeps changing; make it an input (inputs may be "
            f"numbers) or a term's weight (weights={{...}})",
            stacklevel=2,
        )


_TRACED: dict[Any, int] = {}
_TOO_OFTEN = 20
_TRACES: dict[Any, Trace] = {}
_MOST_TRACES = 512


def run_cotangents(
    call: Call, trace: Trace, env: Env, seed: Tensor, wants_grad: Sequence[str]
) -> tuple[dict[Fact, Tensor], dict[str, Tensor]]:
    """Cotangents of the facts, and of the inputs that require grad, from a traced term."""
    assert trace.cotangents is not None
    outputs = trace.cotangents(*_flat_arguments(call, env, seed))
    facts = _differentiable(call)
    by_fact = {f: g for f, g in zip(facts, outputs[: len(facts)], strict=True) if g is not None}
    by_input = {n: g for n, g in zip(wants_grad, outputs[len(facts) :], strict=True) if g is not None}
    return by_fact, by_input


def _differentiable(call: Call) -> list[Fact]:
    return [f for f in call.facts if f.name not in CONSTANT]


def _flat_arguments(call: Call, env: Env, seed: Tensor) -> list[Any]:
    """The graph's arguments in their fixed order; `_rebuild` is the inverse."""
    flat: list[Any] = [env.facts[f] for f in call.facts]
    flat += [env.inputs[n] for n in call.input_names if env.inputs.get(n) is not None]
    if env.targets is not None and call.wants("targets"):
        flat.append(env.targets)
    if env.segments is not None and call.wants("segments"):
        flat += [env.segments.ids, env.segments.counts, env.segments.num_segments]
    return [*flat, seed, seed]  # one per row and one per segment: a graph reads the one that fits its values


class _Tallied(Segments):
    """Segments that count their sums during a trace: each sum is a collective if segments are split over ranks."""

    __slots__ = ("tally",)
    tally: list[int]

    def __init__(self, ids: Tensor, num_segments: int, counts: Tensor, tally: list[int]) -> None:
        super().__init__(ids, num_segments, counts)
        object.__setattr__(self, "tally", tally)

    def totals(self, x: Tensor) -> Tensor:
        sums = super().totals(x)
        self.tally[0] += 1
        if sums.requires_grad:
            sums.register_hook(self._pulled)
        return sums

    def _largest(self, x: Tensor) -> Tensor:
        self.tally[0] += 1
        return super()._largest(x)

    def _pulled(self, grad: Tensor) -> None:
        self.tally[1] += 1


def _rebuild(
    call: Call, names: Sequence[str], segmented: bool, targetless: bool, tally: list[int], flat: Sequence[Any]
) -> tuple[Env, dict[str, Any]]:
    """The function's environment, and the seeds, from the flat arguments of the graph."""
    remaining = list(flat)
    facts = {f: remaining.pop(0) for f in call.facts}
    inputs = {n: remaining.pop(0) for n in names}
    targets = remaining.pop(0) if not targetless and call.wants("targets") else None
    segments = None
    if segmented and call.wants("segments"):
        ids, counts, num_segments = remaining.pop(0), remaining.pop(0), remaining.pop(0)
        segments = _Tallied(ids, num_segments, counts, tally)
    return Env(facts, inputs, targets, segments), {"row": remaining.pop(0), "segment": remaining.pop(0)}


def _trace(call: Call, row_by_row: bool, *how: Any) -> Trace:
    try:
        with torch.no_grad(), without_modes():
            return _trace_once(call, row_by_row, *how)
    except (WrongValueError, WrongWeightError, WrongLengthError, WritesError):
        raise
    except (MemoryError, RecursionError, torch.OutOfMemoryError, Warning):
        raise  # not the function's fault: another call may succeed
    except Exception as error:  # whatever a user's function raises under a tracer: we then call it untraced
        return Trace("batch", f"cannot be traced ({_first_line(error)})", row_by_row=row_by_row)


def _fact_shape(fact: Fact, R: int, inputs: InputSpecs) -> tuple[int, ...]:
    """(R,), or (R, K) for a fact at ids or at the likeliest columns."""
    wide = fact.name in ("ids_logprob", "ids_logit") or fact.name in TOP
    return (R, *inputs[f"teacher_ids of {fact.teacher}"].inner) if wide else (R,)


def _fact_dtype(fact: Fact, dtype: torch.dtype) -> torch.dtype:
    return torch.long if fact.name in ("argmax", "teacher_argmax", "top_ids") else dtype


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:120]


def _trace_once(
    call: Call,
    row_by_row: bool,
    inputs: InputSpecs,
    dtype: torch.dtype,
    device: str,
    segmented: bool,
    targetless: bool,
) -> Trace:
    names = [n for n in call.input_names if n in inputs]
    wanted = [n for n in names if inputs[n].requires_grad]
    R, S, P, *others = distinct_sizes({d for spec in inputs.values() for d in spec.inner})[:6]
    found: dict[str, Any] = {}  # what the last run of `joint` found
    kinds: dict[str, str] = {}
    tally = [0, 0]

    row_inputs = [n for n in names if inputs[n].kind == "row"] if row_by_row else None
    sizes = {R: "row", S: "segment"}

    def kind_of(x: Tensor) -> str:
        return sizes.get(size(x.shape[0]), "other") if x.ndim == 1 else "other"

    def joint(*flat: Any) -> tuple[Any, ...]:
        env, seeds = _rebuild(call, names, segmented, targetless, tally, flat)
        with torch.enable_grad():
            facts = {f: leaf(f, x) for f, x in env.facts.items()}
            x_of: dict[str, Any] = {
                n: x.detach().requires_grad_() if x is not None and n in wanted else x for n, x in env.inputs.items()
            }
            value, metrics = call(env._replace(facts=facts, inputs=x_of), row_inputs)
            leaves = [facts[f] for f in _differentiable(call)] + [x_of[n] for n in wanted]
            found["value"] = kind_of(value)
            found["reach"] = reach_of(value, facts, [x_of[n] for n in wanted])
            kinds.update({k: kind_of(m) if isinstance(m, Tensor) else "other" for k, m in metrics.items()})
            seed = seeds.get(found["value"], torch.ones_like(value)).to(value.dtype)
            grads: Sequence[Tensor | None] = [None] * len(leaves)
            if value.requires_grad and leaves:
                grads = torch.autograd.grad([value], leaves, [seed], allow_unused=True)
        return value.detach(), tuple(grads), {k: m.detach() for k, m in metrics.items() if isinstance(m, Tensor)}

    def example(
        R: int, S: int, P: int, draw: Callable[[Tensor, tuple[int, ...]], Tensor], device: str = device
    ) -> list[Any]:
        """The graph's arguments for R rows, S segments and P pairs."""

        def make(shape: tuple[int, ...], dtype: torch.dtype = dtype) -> Tensor:
            return draw(torch.empty(0, dtype=dtype, device=device), shape)

        flat: list[Any] = [make(_fact_shape(f, R, inputs), _fact_dtype(f, dtype)) for f in call.facts]
        flat += [make(inputs[n].sizes(R, S, P), inputs[n].dtype) for n in names]
        if takes_targets:
            flat.append(make((R,), torch.long))
        if ids_at is not None:
            ids = make((R,), torch.long)
            counts = make((S,), torch.float64)
            counts = torch.where(torch.arange(S, device=counts.device) == 0, float(R), 0.0).to(counts.dtype)
            flat += [ids, counts, S]  # all rows are in the first segment
        return [*flat, make((R,)), make((S,))]

    takes_targets, takes_segments = not targetless and call.wants("targets"), segmented and call.wants("segments")
    ids_at = len(call.facts) + len(names) + takes_targets if takes_segments else None  # index among the arguments
    all_ours = all(is_all_ours(fn) for fn in call.functions)

    def zeros(choice: int, device: str) -> list[Any]:
        r, s, p = others if choice else (R, S, P)
        sizes.clear()
        sizes.update({r: "row", s: "segment"})
        tally[:] = 0, 0
        return example(r, s, p, lambda like, shape: like.new_zeros(shape), device)

    graph = trace_any_size(joint, zeros, device, all_ours)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    parameters = [*map(str, call.facts), *names]  # in the graph's order
    if takes_targets:
        parameters.append("targets")
    for node in written_arguments(graph.graph):
        at = placeholders.index(node)
        raise WritesError(writes_message(call.signature.name, parameters[at] if at < len(parameters) else "segments"))
    kind, reason = classify(graph, R, S, ids_at)
    if found["value"] == "other" and kind != "batch":
        kind, reason = "batch", "its values belong to neither rows nor segments"
    value_kind, reach, sums = found["value"], found["reach"], (tally[0], tally[1])
    if kind != "batch" and not all_ours:
        generator = torch.Generator("cpu").manual_seed(0)

        def examples() -> Iterator[list[Any]]:
            for r, s in SIZES:
                sizes.clear()
                sizes.update({r: "row", s: "segment"})
                yield example(r, s, 2, lambda like, shape: random_like(like, shape, generator))

        traced_kinds = dict(kinds)
        if not agrees(graph, joint, examples()):
            kind, reason = "batch", "its trace does not do what it does itself"
        kinds = traced_kinds
    cotangents = subgraph(graph, lambda out: tuple(out[1])) if kind != "batch" else None
    outputs: Any = graph.graph.output_node().args[0]
    reach = reach._replace(idle=is_idle(outputs[0], placeholders[:-2]))
    needed = ancestors(outputs)
    unused = frozenset(f for f, node in zip(call.facts, placeholders, strict=False) if node not in needed)
    if kind == "batch":
        unused = frozenset()  # it is called untraced, and may take another branch than here
    if counts_rows(graph):
        reach = None
    return Trace(kind, reason, value_kind, cotangents, graph, True, unused, kinds, sums, reach, row_by_row)
