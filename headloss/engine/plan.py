"""From a call's arguments to a plan: what will run, decided from names, shapes and traces alone.

Everything that can be wrong about a call without looking at a number is said here, so a plan can be explained on meta
tensors.  Plans are kept with their objective: a later call of the same form finds its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.backends import choose
from headloss.engine.arguments import CallArguments
from headloss.engine.layout import Reading, lay_out, readings
from headloss.engine.loss import Planned, check_belongs, check_inputs
from headloss.engine.teachers import name_teachers
from headloss.facts import NEEDS_TARGET, Fact, Want
from headloss.metrics import retarget
from headloss.rows import Prepared
from headloss.segments import Segments
from headloss.sources import Linear, Logits, Source, Sparse, Teacher
from headloss.teachers import SPARSE
from headloss.term import check_weight
from headloss.terms import Terms
from headloss.trace.call import Call
from headloss.trace.gradient import check_constants
from headloss.trace.signature import CALL, ONLY, TEACHER_INPUTS, suggest
from headloss.trace.trace import Shape, Trace, trace


class Plan(NamedTuple):
    """How one call will run."""

    source: Source
    segments: Segments | None
    teachers: dict[str, Teacher]
    terms: tuple[Planned, ...]
    off: tuple[str, ...]  # terms switched off
    metrics: tuple[tuple[str, Call], ...]
    inputs: dict[str, tuple[Tensor, Shape]]
    want: Want
    kind: str  # the widest class among the terms
    program: Any  # the terms printed for one launch (`backends.program.Program`), or None
    reason: str  # why there is none
    times: dict[str, float]  # what the first call of this form spent, in seconds


def make_plan(objective: Terms, arguments: CallArguments) -> Plan:
    source, targets, segments, teacher, options, inputs = arguments
    if isinstance(targets, Prepared):
        segments = targets.segments if segments is None else segments
    if segments is not None and type(segments) is not Segments:
        hint = "; make them with hl.Segments.from_cu_seqlens, from_ids, from_position_ids or from_batch"
        raise TypeError(f"segments: wanted hl.Segments, got {type(segments).__name__}{hint}")
    if segments is not None and not isinstance(targets, Prepared):
        segments = segments.fitted(source.leading, source.device)
    now = call_weights(objective, options.weights or {})
    off = tuple(name for name, weight in now.items() if not isinstance(weight, Tensor) and weight == 0)
    teachers = name_teachers(teacher, source)
    asked = (
        source.temperature if isinstance(source.temperature, int | float) else None,
        tuple((n, type(x), x.ids.shape[-1] if isinstance(x, Sparse) else None) for n, x in teachers.items()),
        tuple((n, x is None) for n, x in inputs.items()),
        off,
        tuple(term.content() for term in objective.every_term),
    )
    if asked not in objective.known:
        keep(objective, asked, _calls(objective, off, teachers, inputs, asked[0]))
    calls, metrics, said = objective.known[asked]
    for name in calls:
        if segments is None and objective.terms[name].needs_segments:
            term = objective.terms[name]
            asks = f"reduction {term.reduction!r}" if term.reduction.startswith("seq_") else "its loss"
            raise ValueError(f"segments: term {name!r} needs them for {asks}; pass segments=hl.Segments...")
    laid = lay_out(said, inputs, source, segments)
    key: Any = (
        asked,
        source.fact_dtype,
        source.device.type,
        targets is None,
        segments is None,
        source.shard is None,
        tuple((n, shape) for n, (_, shape) in laid.items()),
        tuple(call.reads() for call in (*calls.values(), *(c for _, c in metrics))),
    )
    found = objective.known.get(key)
    if found is None:
        begun = time.perf_counter()
        found = _trace_terms(objective, calls, metrics, source, segments, teachers, laid, targets is None)
        traced = time.perf_counter()
        found = (*found, *_print_terms(objective, calls, metrics, source, teachers, *found))
        found = (*found, {"tracing": traced - begun, "printing": time.perf_counter() - traced})
        keep(objective, key, found)
    traces, shapes, want, kind, program, reason, times = found
    if program is not None and program.by_segment:
        apart = _apart(source, segments)
        program, reason = (None, apart) if apart else (program, reason)
    elif program is not None and not _suits(source, objective.backend):
        program, reason = None, "so few rows are swept faster in parts"
    if program is not None and any(_is_narrow(teachers[name], source) for name in want.teachers):
        program, reason = None, "the teacher has fewer columns than the student"
    terms = objective.terms
    planned = tuple(
        Planned(n, call, traces[n], now[n], terms[n].reduction, terms[n].length, terms[n].needs_segments)
        for n, call in calls.items()
    )
    laid = {n: (x, shapes[n]) for n, (x, _) in laid.items()}
    return Plan(source, segments, teachers, planned, off, metrics, laid, want, kind, program, reason, times)


_MOST_KNOWN = 64  # plans of an objective: more would mean that something changes with every call


def keep(objective: Terms, key: Any, found: Any) -> None:
    if len(objective.known) > _MOST_KNOWN:
        objective.known.clear()
    objective.known[key] = found


def _calls(
    objective: Terms,
    off: tuple[str, ...],
    teachers: Mapping[str, Teacher],
    inputs: Mapping[str, Any],
    temperature: float | None,
) -> tuple[dict[str, Call], tuple[tuple[str, Call], ...], dict[str, Reading]]:
    """The terms that are on and the metrics, ready to be called, once names are known to fit; and their readings."""
    calls = {name: term.call(temperature, teachers) for name, term in objective.terms.items()}
    metrics = tuple((name, retarget(call, temperature, teachers)) for name, call in objective.metrics)
    for name, call in calls.items():
        if name not in off:
            check_teachers(f"term {name!r} ({call.signature.name})", call, teachers)
    for name, call in metrics:
        check_teachers(f"metric {name!r}", call, teachers)
    check_asked(teachers, [*calls.values(), *(call for _, call in metrics)])
    named = {f"{i} of {n}" for n, x in teachers.items() if isinstance(x, Sparse) for i in TEACHER_INPUTS}
    check_inputs(calls.items(), inputs, CALL, off=off, metrics=metrics, teachers=named)
    said = readings(objective.terms, metrics)
    return {name: call for name, call in calls.items() if name not in off}, metrics, said


def _trace_terms(
    objective: Terms,
    calls: Mapping[str, Call],
    metrics: Sequence[tuple[str, Call]],
    source: Source,
    segments: Segments | None,
    teachers: Mapping[str, Teacher],
    laid: Mapping[str, tuple[Tensor, Shape]],
    targetless: bool,
) -> tuple[dict[str, Trace], dict[str, Shape], Want, str]:
    """Each term's trace, the inputs' shapes as the traces take them, the facts wanted, and the widest class."""
    ids = _ids(source, teachers)
    given = {n: shape for n, (_, shape) in laid.items()}
    traces: dict[str, Trace] = {}
    for name, call in calls.items():
        shapes = {n: shape for n, shape in given.items() if n in call.input_names}
        looked = {f.teacher for f in call.facts} | {p.teacher for s in call.signatures for p in s.parameters}
        shapes |= {n: shape for n, shape in ids.items() if n.split(" of ", 1)[1] in looked}
        found = trace(call, shapes, source.fact_dtype, source.device.type, segments is not None, targetless)
        _check_spread(f"term {name!r} ({call.signature.name})", found, shapes)
        check_belongs(call, found.value, shapes)
        if objective.terms[name].reduction == "weighted_mean" and call.weighs_by_facts:
            found = found._replace(kind="batch", reason="weighted_mean sums a row_weight made of facts")
        traces[name] = found
    _check_gradients(calls, given, traces)
    wanted = [f for name, call in calls.items() for f in call.facts if f not in traces[name].unused]
    wanted += [f for _, call in metrics for f in call.facts]
    if targetless:
        check_targets_wanted(wanted)
        signatures = [s for call in calls.values() for s in call.signatures] + [call.signature for _, call in metrics]
        if any(p.kind == "targets" and not p.optional for s in signatures for p in s.parameters):
            raise ValueError("targets: a loss or metric asks for them; pass each row's target")
    kinds = [found.kind for found in traces.values()]
    return traces, given, Want(wanted), next((k for k in ("batch", "segment") if k in kinds), "row")


def _is_narrow(teacher: Teacher, source: Source) -> bool:
    return not isinstance(teacher, Sparse) and teacher.vocab < source.vocab


def _ids(source: Source, teachers: Mapping[str, Teacher]) -> dict[str, Shape]:
    """What sparse teachers bring as inputs."""
    return {
        f"{i} of {n}": Shape("row", torch.long if i == "teacher_ids" else source.fact_dtype, (x.ids.shape[-1],))
        for n, x in teachers.items()
        if isinstance(x, Sparse)
        for i in TEACHER_INPUTS
    }


def _suits(source: Source, backend: str) -> bool:
    """Whether one program per row is as fast as rows cut in parts."""
    rows = torch.Size(source.leading).numel()
    rows = min(rows, source.chunk_rows()) if isinstance(source, Linear) else rows
    suits: bool = choose(backend, source.device, source.fact_dtype).suits(rows, source.columns)
    return suits


def _apart(source: Source, segments: Segments | None) -> str:
    """Why segments cannot be settled in one launch."""
    if segments is not None and segments.group is not None:
        return "segments lie on several ranks"
    if source.narrow or source.tensors[0].dtype == torch.float16:
        return "in float16 the gradient is scaled by the largest cotangent"
    return ""


def _print_terms(
    objective: Terms,
    calls: Mapping[str, Call],
    metrics: Sequence[tuple[str, Call]],
    source: Source,
    teachers: Mapping[str, Teacher],
    traces: Mapping[str, Trace],
    shapes: Mapping[str, Shape],
    want: Want,
    kind: str,
) -> tuple[Any, str]:
    """The terms as one printed program, so that a visit is one launch; or None, and why."""
    backend = choose(objective.backend, source.device, source.fact_dtype)
    if backend.lower is None:
        return None, f"the {backend.NAME} backend runs no kernels of ours"
    if source.shard is not None:
        return None, "a collective stands between the facts and the gradient"
    if kind == "batch":
        name = next(name for name, found in traces.items() if found.kind == kind)
        return None, f"{name}: {traces[name].reason}"
    shapes = {**shapes, **_ids(source, teachers)}
    program: tuple[Any, str] = backend.lower(
        {name: (call, traces[name]) for name, call in calls.items()}, want, shapes, metrics
    )
    return program


def check_teachers(label: str, call: Call, teachers: Mapping[str, Teacher]) -> None:
    """Every teacher a call looks at is there, and of the kind it needs."""
    asked = [(f.name, f.teacher, f.name in SPARSE) for f in call.facts if f.teacher is not None]
    asked += [(p.name, p.teacher, True) for s in call.signatures for p in s.parameters if p.teacher is not None]
    for what, name, sparse in asked:
        there = ", ".join(map(repr, teachers)) or "none"
        if name not in teachers:
            if name != ONLY:
                near = suggest(str(name), teachers)
                raise ValueError(f"teacher: {label} looks at {name!r}, which was not passed (there are: {there}){near}")
            which = "Term(teacher=...) must name one" if len(teachers) > 1 else "pass teacher=..."
            raise ValueError(f"teacher: {label} needs one for {what!r}; {which} (there are: {there})")
        if isinstance(teachers[name], Sparse) != sparse:
            kind = "a sparse teacher (hl.Sparse)" if sparse else "a dense teacher (hl.Logits or hl.Linear)"
            got = type(teachers[name]).__name__
            raise ValueError(f"teacher: {label} asks for {what!r}, which needs {kind}, got hl.{got}")


def check_asked(teachers: Mapping[str, Teacher], calls: Sequence[Call]) -> None:
    """Every teacher is one that some term or metric looks at, if only one that is switched off."""
    asked = {f.teacher for call in calls for f in call.facts if f.teacher}
    asked |= {p.teacher for call in calls for s in call.signatures for p in s.parameters if p.teacher}
    for name in teachers:
        if name not in asked:
            which = "one was passed" if name == ONLY else f"{name!r} was passed"
            seen = ", ".join(sorted(map(repr, asked))) or "none"
            raise ValueError(f"teacher: {which}, but terms and metrics look at {seen}{suggest(name, asked)}")


def check_targets_wanted(wanted: list[Fact]) -> None:
    for fact in wanted:
        if fact.name in NEEDS_TARGET:
            raise ValueError(f"targets: needed by the fact {fact.name!r}; pass each row's target")


def plain_source(source: Source) -> Source:
    """The source, checked, on plain tensors."""
    if not isinstance(source, Logits | Linear):
        hint = "; wrap a tensor in hl.Logits(...)" if isinstance(source, Tensor) else ""
        raise TypeError(f"source: wanted hl.Logits or hl.Linear, got {type(source).__name__}{hint}")
    tensors = sys.modules.get("torch.distributed.tensor")  # not loaded: there are no DTensors either
    if tensors is not None and any(isinstance(x, tensors.DTensor) for x in source.tensors):
        from headloss.parallel.dtensor import localize

        source = localize(source)
    return source


def call_weights(objective: Terms, weights: Mapping[str, float | Tensor]) -> dict[str, float | Tensor]:
    """The terms' weights for this call."""
    terms = objective.terms
    for name, weight in weights.items():
        if name not in terms:
            raise ValueError(f"weights: no term {name!r}; there are {', '.join(terms)}{suggest(name, terms)}")
        check_weight(f"weights[{name!r}]", weight)
    return {name: weights.get(name, term.weight) for name, term in terms.items()}


def _check_spread(label: str, found: Trace, shapes: Mapping[str, Shape]) -> None:
    """Values of segments where values of rows are wanted: by chance there may be as many of both."""
    per_segment = [name for name, shape in shapes.items() if shape.kind == "segment"]
    mismatch = "must match" in found.reason or "to broadcast" in found.reason  # torch has two ways to say it
    if per_segment and found.joint is None and mismatch:
        name = per_segment[0]
        raise ValueError(
            f"{name}: has one value per segment, where {label} meets it with one per row; pass segments.spread({name})"
        )


def _check_gradients(calls: Mapping[str, Call], shapes: Mapping[str, Shape], traces: Mapping[str, Trace]) -> None:
    """An input that wants a gradient is one that some loss gives it; without a trace, `TermsOnRows.whole` finds out."""
    seen = {p.key for call in calls.values() for p in call.signature.parameters}
    given: dict[str, bool] = {}
    for term, call in calls.items():
        for name in call.input_names:
            if name in shapes and shapes[name].requires_grad:
                if name not in seen:
                    raise ValueError(f"{name}: requires grad, but no gradient flows to a row weight; pass it detached")
                given[name] = given.get(name, False) or name not in _constants(call, shapes, traces[term])
    check_constants([name for name, has in given.items() if not has], calls.values())


def _constants(call: Call, shapes: Mapping[str, Shape], found: Trace) -> set[str]:
    """Inputs that want a gradient and, by the trace, get none."""
    if found.joint is None:
        return set()
    wanted = [n for n in call.input_names if n in shapes and shapes[n].requires_grad]
    outputs: Any = found.joint.graph.output_node().args[0]  # value, cotangents of facts and then inputs, metrics
    of_inputs = outputs[1][len(outputs[1]) - len(wanted) :]
    return {n for n, g in zip(wanted, of_inputs, strict=True) if g is None}
