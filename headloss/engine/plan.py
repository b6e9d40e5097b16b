"""`Plan`: what a call will run, decided from names, layouts and traces alone.

Errors that show without reading a number are raised here, so a plan can be explained on meta tensors.  It holds for all
calls of its form (`lookup.py`), whatever their sizes and values.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from headloss.backends import choose
from headloss.derived_teachers import Top
from headloss.engine.checks import (
    check_asked,
    check_belongs,
    check_elements,
    check_gradients,
    check_inputs,
    check_spread,
    check_targets_wanted,
    check_teachers,
)
from headloss.engine.first_call import report_if_slow
from headloss.facts import Want
from headloss.metrics import dead_rows, retarget
from headloss.routed import Routed
from headloss.segments import Segments
from headloss.sources import Linear, Logits, Source, Sparse, Teacher
from headloss.teachers import TOP
from headloss.terms import Terms
from headloss.trace.call import Call
from headloss.trace.function_reads import is_ours
from headloss.trace.signature import CALL_NAMES, TEACHER_INPUTS
from headloss.trace.trace import InputSpec, Trace, trace

KEPT = "each row keeps some columns"
FEW = "so few rows are swept faster in parts"
COLLECTIVE = "a collective stands between the facts and the gradient"


class Planned(NamedTuple):
    """A term that is on: what to run, how it was traced, and how it is reduced."""

    name: str
    call: Call
    trace: Trace
    reduction: str
    length: float | None
    needs_segments: bool

    @property
    def sums_weights(self) -> bool:
        """Whether its row weights are summed before any fact is known."""
        return self.reduction == "weighted_mean" and not self.call.weighs_by_facts


class Calls(NamedTuple):
    """The terms that are on and the metrics, ready to be called."""

    terms: dict[str, Call]
    metrics: tuple[tuple[str, Call], ...]


class Plan(NamedTuple):
    """How calls of one form run."""

    terms: tuple[Planned, ...]
    weights: Mapping[str, float | Tensor]  # of the terms that are on, unless a call gives others
    off: tuple[str, ...]  # terms switched off
    metrics: tuple[tuple[str, Call], ...]
    shapes: Mapping[str, InputSpec]  # of the inputs
    wants_grad: tuple[str, ...]  # inputs that require grad
    want: Want
    kind: str  # the widest class among the terms
    program: Any  # the terms printed for one launch (`printer.program.Program`), or None
    reason: str  # why there is no program
    backend: ModuleType
    read_because: str  # why the host has to know which rows count before the work is queued; empty if it need not
    needed: str | None  # a term that needs a segment for every row
    named_teachers: tuple[str, ...]  # those that facts, losses or metrics use
    elements: tuple[Any, ...]  # divergences that sweeps run
    has_gradient: bool  # every term is known to have a gradient, and to lose no part of it
    by_token: tuple[str, ...] | None  # terms whose rows weigh 1 / tokens, if all other rows weigh 1; else None
    times: dict[str, float]  # what the first call of this form spent, in seconds
    dtype: torch.dtype  # of facts and values
    is_fp16: bool  # the gradient of logits is float16; one launch writes it before its scale is known
    in_parts: Callable[[], Plan] | None = None  # makes the plan for few rows, which separate launches sweep faster
    kept: bool = False  # the call has a support
    settles: Any = None  # the terms printed for a launch between the head's own products, if it can make those

    @property
    def waits(self) -> bool:
        """Whether the gradient must wait for the loss's scale: rows of long segments weigh too little for float16."""
        return self.is_fp16 and self.kind == "segment"

    def without_program(self, reason: str) -> Plan:
        plan = self._replace(program=None, reason=reason, in_parts=None)
        return plan if self.read_because else plan._replace(read_because=_mixing(plan))


def suited(plan: Plan, source: Source) -> Plan:
    """The plan for this number of rows: if there are few, one program per row is slower than rows cut into parts."""
    if plan.in_parts is None:
        return plan
    if isinstance(source, Linear):
        rows, columns = min(math.prod(source.leading), source.chunk_rows()), source.columns
    else:
        rows, columns = math.prod(source.logits.shape[:-1]), source.columns
    return plan if plan.backend.takes_one_launch(rows, columns) else plan.in_parts()


def make_plan(
    objective: Terms,
    calls: Calls,
    off: tuple[str, ...],
    source: Source,
    targetless: bool,
    segments: Segments | None,
    teachers: Mapping[str, Teacher],
    shapes: Mapping[str, InputSpec],
    kept: bool = False,
) -> Plan:
    """`kept`: the call has a support."""
    begun = time.perf_counter()
    with report_if_slow():
        traces, want, kind = _trace_terms(objective, calls, source, segments, teachers, shapes, targetless)
    traced = time.perf_counter()
    reason = ""
    if kept:
        check_elements(want)
        reason = _numbered(calls, want) if source.shard is None else COLLECTIVE
    program = None
    if not reason:
        program, reason = _print_terms(objective, calls, source, teachers, traces, shapes, want, kind)
    times = {"tracing": traced - begun, "printing": time.perf_counter() - traced}
    if program is not None and program.by_segment:
        apart = _apart(segments) or _alone(program, kind)
        program, reason = (None, apart) if apart else (program, reason)
    settles = program if program is not None and program.by_segment else None
    own = not kept and _own_products(objective, source)
    if program is not None and settles is None and own and not _apart(segments):
        settles, _ = _print_terms(objective, calls, source, teachers, traces, shapes, want, kind, between=True)
    terms = objective.terms
    planned = tuple(
        Planned(n, call, traces[n], terms[n].reduction, terms[n].length, terms[n].needs_segments)
        for n, call in calls.terms.items()
    )
    plan = Plan(
        planned, {name: terms[name].weight for name in calls.terms}, off, calls.metrics, shapes,
        tuple(name for name, shape in shapes.items() if shape.requires_grad), want, kind, program, reason,
        backend_for(objective.backend, source, want), why_read(source, segments, planned, kind, by_products=kept),
        next((t.name for t in planned if t.needs_segments), None), _teachers_of(planned, calls.metrics, want),
        tuple(dict.fromkeys(f.element for f in want.facts if f.element is not None)),
        all(t.trace.reach is not None and t.trace.reach.fine for t in planned), _by_token(planned), times,
        source.fact_dtype, source.tensors[0].dtype == torch.float16 and isinstance(source, Logits), kept=kept,
        settles=settles,
    )  # fmt: skip
    if not plan.read_because:
        plan = plan._replace(read_because=_mixing(plan))
    if program is not None and not program.by_segment and not kept and not want.teachers:
        asked = _to_print(calls, traces, want, {**shapes, **_ids(source, teachers)})  # no tensor of this call
        plan = plan._replace(in_parts=functools.cache(functools.partial(_in_parts, plan, asked, _apart(segments))))
    return plan


def _in_parts(plan: Plan, asked: tuple[Any, ...], apart: str) -> Plan:
    """The plan for few rows: settle them between two sweeps if possible, otherwise keep one program per row."""
    program, why = (None, apart) if apart else plan.backend.lower(*asked, True)
    if why or _alone(program, plan.kind):
        return plan._replace(in_parts=None)
    return plan._replace(program=program, reason=FEW, in_parts=None)


def _numbered(calls: Calls, want: Want) -> str:
    """Why losses on kept columns cannot run inside a kernel, which knows those by their place; empty if they can."""
    every = [*calls.terms.items(), *calls.metrics]
    if want.argmax or want.total or want.teachers:
        return f"{KEPT}, of which a fact says more than sums do"
    taking = [name for name, call in every if call.wants("targets")]
    return f"{KEPT}, and {taking[0]} takes targets by their number" if taking else ""


def _teachers_of(terms: Sequence[Planned], metrics: Sequence[tuple[str, Call]], want: Want) -> tuple[str, ...]:
    taking = [p.teacher for t in terms for s in t.call.signatures for p in s.parameters if p.teacher]
    taking += [p.teacher for _, call in metrics for p in call.signature.parameters if p.teacher]
    return tuple(dict.fromkeys((*want.teachers, *taking)))


def _by_token(terms: Sequence[Planned]) -> tuple[str, ...] | None:
    means = tuple([t.name for t in terms if t.reduction == "token_mean" and t.trace.value == "row"])
    return means if all(t.name in means or t.reduction == "token_sum" for t in terms) else None


def why_read(
    source: Source, segments: Segments | None, terms: Sequence[Planned], kind: str, by_products: bool = False
) -> str:
    if isinstance(source, Linear) and not by_products:
        return "ignored rows are left out of the products"
    if source.shard is not None or (segments is not None and segments.group is not None):
        return "ranks that share a call must refuse it together, before a collective"
    if kind == "batch":
        return f"term {next(t.name for t in terms if t.trace.kind == 'batch')!r} must not see ignored rows"
    return ""


def why_read_by_products(plan: Plan, source: Source, segments: Segments | None) -> str:
    """`Plan.read_because` for a head that makes its own products, and so leaves ignored rows out on the device."""
    rows = torch.Size(source.leading).numel()
    if plan.kind == "segment" and isinstance(source, Linear) and rows > source.chunk_rows():
        return "chunks hold whole segments"
    return why_read(source, segments, plan.terms, plan.kind, True) or _mixing(plan._replace(program=None))


def in_order(plan: Plan) -> bool:
    """Whether a metric may depend on the order of rows: a user's own metric sees all of them."""
    theirs = [t.trace for t in plan.terms if not is_ours(t.call.fn)]
    return any(not x.value or x.metrics for x in theirs) or any(not is_ours(call.fn) for _, call in plan.metrics)


def _mixing(plan: Plan) -> str:
    """Names a metric that is computed from all rows at once; empty if there is none."""
    mixing = [f"{t.name}/{name}" for t in plan.terms for name, kind in t.trace.metrics.items() if kind == "other"]
    mixing += [name for name, call in plan.metrics if plan.program is None and not is_ours(call.fn)]
    return f"metric {mixing[0]!r} may not see ignored rows" if mixing else ""


def backend_for(name: str, source: Source, want: Want) -> ModuleType:
    """The backend asked for, or a ValueError; "auto" takes one that can run every divergence wanted."""
    backend = choose(name, source.device, source.fact_dtype)
    why = backend.cannot_run(want)
    if why is not None and name != "auto":
        raise ValueError(f'backend: "{backend.NAME}" cannot run {why}; use backend="torch"')
    return backend if why is None else choose("torch", source.device, source.fact_dtype)


def choose_calls(
    objective: Terms,
    off: tuple[str, ...],
    teachers: Mapping[str, Teacher],
    inputs: Mapping[str, Any],
    source: Source,
    segments: Segments | None,
) -> Calls:
    """The terms and metrics that a call will run, after a check of the names of its inputs and teachers."""
    temperature = None if isinstance(source.temperature, Tensor) else source.temperature
    calls = {name: term.call(temperature, teachers) for name, term in objective.terms.items()}
    metrics = tuple((name, retarget(call, temperature, teachers)) for name, call in objective.metrics)
    for name, call in calls.items():
        if name not in off:
            check_teachers(f"term {name!r} ({call.signature.name})", call, teachers)
    for name, call in metrics:
        check_teachers(f"metric {name!r}", call, teachers)
        if not call.row_weights and any(isinstance(teachers.get(str(f.teacher)), Routed) for f in call.facts):
            raise ValueError(
                f"metrics: {name!r} uses a routed teacher, which some rows do not have; return it as a metric of a term"
            )
    check_asked(teachers, [*calls.values(), *(call for _, call in metrics)])
    named = {f"{i} of {n}" for n, x in teachers.items() if isinstance(x, Sparse) for i in TEACHER_INPUTS}
    check_inputs(calls.items(), inputs, CALL_NAMES, off=off, metrics=metrics, teachers=named)
    calls = {name: call for name, call in calls.items() if name not in off}
    for name in calls:
        if segments is None and objective.terms[name].needs_segments:
            term = objective.terms[name]
            asks = f"reduction {term.reduction!r}" if term.reduction.startswith("seq_") else "its loss"
            raise ValueError(f"segments: term {name!r} needs them for {asks}; pass segments=hl.Segments...")
    return Calls(calls, metrics)


def _trace_terms(
    objective: Terms,
    planned: Calls,
    source: Source,
    segments: Segments | None,
    teachers: Mapping[str, Teacher],
    given: Mapping[str, InputSpec],
    targetless: bool,
) -> tuple[dict[str, Trace], Want, str]:
    """Each term's trace, the facts that are needed, and the widest class."""
    ids, (calls, metrics) = _ids(source, teachers), planned
    traces: dict[str, Trace] = {}
    for name, call in calls.items():
        shapes = {n: shape for n, shape in given.items() if n in call.input_names}
        shapes |= {n: shape for n, shape in ids.items() if n.split(" of ", 1)[1] in call.teachers}
        found = trace(call, shapes, source.fact_dtype, source.device.type, segments is not None, targetless)
        check_spread(f"term {name!r} ({call.signature.name})", found, shapes)
        check_belongs(call, found.value, shapes)
        if objective.terms[name].reduction == "weighted_mean" and call.weighs_by_facts:
            found = found._replace(kind="batch", reason="weighted_mean sums a row_weight made of facts")
        traces[name] = found
    check_gradients(calls, given, traces)
    wanted = [f for name, call in calls.items() for f in call.facts if f not in traces[name].unused]
    wanted += [f for _, call in metrics for f in call.facts]
    if targetless:
        check_targets_wanted(wanted)
        signatures = [s for call in calls.values() for s in call.signatures] + [call.signature for _, call in metrics]
        if any(p.kind == "targets" and not p.optional for s in signatures for p in s.parameters):
            raise ValueError("targets: a loss or metric asks for them; pass each row's target")
    kinds = [found.kind for found in traces.values()]
    return traces, Want(wanted), next((k for k in ("batch", "segment") if k in kinds), "row")


def _is_narrow(teacher: Teacher, source: Source) -> bool:
    return not isinstance(teacher, Sparse) and teacher.vocab < source.vocab


def _ids(source: Source, teachers: Mapping[str, Teacher]) -> dict[str, InputSpec]:
    """The inputs that sparse teachers provide."""
    width = {n: x.ids.shape[-1] for n, x in teachers.items() if isinstance(x, Sparse)}
    width |= {n: Top.named(n).k for n, x in teachers.items() if isinstance(x, Top)}
    return {
        f"{i} of {n}": InputSpec("row", torch.long if i == "teacher_ids" else source.fact_dtype, (k,))
        for n, k in width.items()
        for i in TEACHER_INPUTS
    }


def _apart(segments: Segments | None) -> str:
    """Why rows or segments cannot be settled in one launch; empty if they can."""
    return "segments lie on several ranks" if segments is not None and segments.group is not None else ""


def _alone(program: Any, kind: str) -> str:
    """Why the rows of losses that combine none cannot be settled in runs of any length; empty if they can."""
    kinds = (*program.of_segments, *program.segment_metrics, *(x == "segment" for x in program.input_kinds))
    return "a term has values per segment, though it combines no rows" if kind == "row" and any(kinds) else ""


def _print_terms(
    objective: Terms,
    calls: Calls,
    source: Source,
    teachers: Mapping[str, Teacher],
    traces: Mapping[str, Trace],
    shapes: Mapping[str, InputSpec],
    want: Want,
    kind: str,
    between: bool = False,
) -> tuple[Any, str]:
    """The terms printed as one program, so that a visit is one launch; or None, and why.

    `between`: the program runs between two matrix products or sweeps, and settles rows as it would segments.
    """
    backend = choose(objective.backend, source.device, source.fact_dtype)
    if backend.lower is None:
        return None, f"the {backend.NAME} backend runs no kernels of ours"
    if any(f.name in TOP for f in want.facts):
        return None, "the likeliest columns of a row are found after it was read"
    if kind == "batch":
        name = next(name for name, found in traces.items() if found.kind == kind)
        return None, f"{name}: {traces[name].reason}"
    apart = "several teachers" if len(want.teachers) > 1 else ""
    if any(_is_narrow(teachers[name], source) for name in want.teachers):
        apart = "the teacher has fewer columns than the student"
    asked = _to_print(calls, traces, want, {**shapes, **_ids(source, teachers)})
    program, why = backend.lower(*asked, between or source.shard is not None or apart != "")
    return program, why or (apart if kind == "row" else "")


def _to_print(
    calls: Calls, traces: Mapping[str, Trace], want: Want, shapes: Mapping[str, InputSpec]
) -> tuple[Any, Want, Mapping[str, InputSpec], Any]:
    """The arguments of `backend.lower`."""
    terms = {name: (call, traces[name]) for name, call in calls.terms.items()}
    return terms, want, shapes, [(name, call) for name, call in calls.metrics if call.fn is not dead_rows]


def _own_products(objective: Terms, source: Source) -> bool:
    """Whether the backend has matrix products of its own for such sources."""
    products = choose(objective.backend, source.device, source.fact_dtype).product
    return isinstance(source, Linear) and products is not None and products.able(source.device)


def plain_source(source: Source) -> Source:
    """The source, checked, on plain tensors."""
    if not isinstance(source, (Logits, Linear)):
        hint = "; wrap a tensor in hl.Logits(...)" if isinstance(source, Tensor) else ""
        raise TypeError(f"source: wanted hl.Logits or hl.Linear, got {type(source).__name__}{hint}")
    for x in source.tensors:
        if type(x) is not Tensor and type(x) is not Parameter:
            tensors = sys.modules.get("torch.distributed.tensor")  # if not loaded, there are no DTensors
            if tensors is not None and any(isinstance(x, tensors.DTensor) for x in source.tensors):
                from headloss.parallel.dtensor import localize

                return localize(source)
            return source
    return source
