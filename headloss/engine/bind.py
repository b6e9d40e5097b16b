"""Bind a plan to a call's tensors: read the targets, find the rows that count, lay the inputs out by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from headloss.deferred_checks import should_defer
from headloss.engine.arguments import CallArguments, Chunk
from headloss.engine.bound_teachers import bind_teachers, restrict_teachers
from headloss.engine.budget import chunk_rows, row_chunks
from headloss.engine.checks import check_count
from headloss.engine.logits_forward_grad import fits_at_once, logits_chunks, makes_grad_in_forward
from headloss.engine.loss import TermsOnRows
from headloss.engine.plan import KEPT, Plan, in_order, why_read_by_products
from headloss.engine.product import ProductSweep, why_chunked
from headloss.engine.support_sweep import SupportSweep, support_chunks
from headloss.engine.sweeps import Sweep
from headloss.engine.teachers import SparseTeacherRows, TeacherRows, cost_of, most_rows, sums_hidden
from headloss.metrics import measure_later
from headloss.routed import Routed
from headloss.rows import Rows, bind_rows, may_read
from headloss.segments import Segments, shallow
from headloss.sources import Linear, Logits, Source
from headloss.term import check_weight
from headloss.trace.cache_keys import as_text
from headloss.trace.signature import TEACHER_INPUTS


def bind(plan: Plan, arguments: CallArguments, wanted: bool = True) -> tuple[Sweep, TermsOnRows]:
    """`wanted`: whether the call makes a gradient."""
    source, (num_items, num_segments, _, grad_scale, host_read) = arguments.source, arguments.options
    if num_items is not None or num_segments is not None:
        check_count("num_items", num_items)
        check_count("num_segments", num_segments)
    if type(grad_scale) is not float or grad_scale != 1.0:
        check_weight("grad_scale", grad_scale)
    for element in plan.elements:
        element.check_again()
    chunked = "the logits exist"
    if isinstance(source, Linear) and not plan.kept:
        source.chunk_rows()  # raises if the budget is below one row
        if source.shard is not None:
            source.shard.check_width(source.weight.shape[0])
        chunked = chunked_because(plan, source)
    support = arguments.support
    rows = rows_of(plan, arguments, host_read, chunked)
    teacher_rows: dict[str, Any] = {}
    taken: dict[str, Tensor] = {}
    if arguments.teacher:
        if support is not None:
            named = {n: x for n, x in arguments.teachers.items() if n in plan.named_teachers}  # of active terms
            arguments = arguments._replace(teacher=restrict_teachers(named, support, rows.given, source, plan.backend))
        rows = _by_route(rows, plan, arguments)
        teacher_rows = bind_teachers(arguments.teachers, plan.named_teachers, source, rows, plan.backend)
        for n, teacher in teacher_rows.items():
            if isinstance(teacher, SparseTeacherRows):
                mine = (teacher.ids_RK, teacher.logprob_RK)
                taken |= {f"{i} of {n}": x for i, x in zip(TEACHER_INPUTS, mine, strict=True)}
    chunks = chunks_of(plan, arguments, rows, teacher_rows)
    if rows.segments is not None and rows.segments.group is not None:
        rows.join(*_compared_by_segment(plan, arguments, wanted))
    loss = TermsOnRows(plan, arguments, rows, chunks, taken)
    kind = SupportSweep if support is not None else Sweep if chunked else ProductSweep
    sweep = kind(source, rows, plan.want, plan.backend, teacher_rows, plan.program)
    if source.shard is not None:
        sweep.compared = _compared(plan, arguments, loss)
        sweep.terms = f"{kind.__name__}: {_terms_in_words(plan, arguments, loss)}"
    if support is not None and isinstance(sweep, SupportSweep):
        missing = sweep.keep(support)
        if missing is not None:
            loss.metrics |= measure_later(("support_missing",), lambda: missing[None], rows.valid, "token")
    return sweep, loss


def _by_route(rows: Rows, plan: Plan, arguments: CallArguments) -> Rows:
    """Rows sorted by their routed teacher, if the order of rows is free: each head then writes its logits in place."""
    routed = [x for x in (arguments.teacher or {}).values() if isinstance(x, Routed)]  # type: ignore[union-attr]
    free = isinstance(arguments.source, Linear) and plan.kind == "row" and rows.segments is None and rows.valid is None
    if len(routed) != 1 or not free:
        return rows
    other, order = shallow(rows), rows.take(routed[0].route).argsort(stable=True)
    if rows.keep is None:
        other.keep, other.by_route = order, routed[0].known().sort().values
    else:
        other.keep = rows.keep[order]
    other.__dict__.pop("targets", None)
    return other


def _compared_by_segment(plan: Plan, arguments: CallArguments, wanted: bool) -> tuple[str, list[Tensor]]:
    """What ranks that share segments must agree on: what decides their collectives, and numbers of the whole batch."""
    combining = [t for t in plan.terms if t.trace.kind != "row" or t.sums_weights or any(t.trace.sums)]
    terms = [(t.name, t.call.signature.name, t.reduction, t.trace.kind, t.trace.value, t.trace.sums) for t in combining]
    metrics = [name for name, call in plan.metrics if call.wants("segments")]
    of_segments = [x for n, x in arguments.inputs.items() if n == "pairs" or plan.shapes[n].kind == "segment"]
    whole = [x for x in of_segments if not x.dtype.is_floating_point]
    return str((terms, metrics, (plan.dtype, wanted) if terms else None)), whole


def _compared(plan: Plan, arguments: CallArguments, loss: TermsOnRows) -> dict[str, Any]:
    """The tensors that ranks sharing a vocabulary must agree on: integers exactly, other numbers in magnitude."""
    num_items, num_segments, _, grad_scale, _ = arguments.options
    floats: Callable[[Any], bool] = lambda x: isinstance(x, Tensor) and x.dtype.is_floating_point
    given = [*[x for x in arguments.inputs.values() if x.ndim], num_items, num_segments]
    integers = [x.to(loss.device) for x in given if isinstance(x, Tensor) and not floats(x)]
    numbers: tuple[Any, ...] = (grad_scale, num_items, num_segments)
    scale, *counts = (x.detach() if floats(x) else 0.0 for x in numbers)
    weighed = [(i, loss.weights[t.name]) for i, t in enumerate(plan.terms, 1)]
    weights = sum((i * w.detach().to(loss.device) for i, w in weighed if isinstance(w, Tensor)), 0.0)
    return {"inputs": integers, "support": (), "near": (scale, weights, *counts)}


def _terms_in_words(plan: Plan, arguments: CallArguments, loss: TermsOnRows) -> str:
    """Everything but tensors that decides values and collectives: ranks that share a vocabulary must agree on it."""
    number = lambda x: "a tensor" if isinstance(x, Tensor) else x
    weights = [number(loss.weights[t.name]) for t in plan.terms]
    terms = [(t.name, as_text(t.call.reads().key), t.reduction, t.length, t.call.share) for t in plan.terms]
    options, source = arguments.options, arguments.source
    counts = [number(x) for x in (options.num_items, options.num_segments, options.grad_scale)]
    chunks = None if loss.chunks is None else [chunk.rows.stop for chunk in loss.chunks]
    return str((terms, weights, sorted(arguments.inputs), counts, chunks, sums_hidden(source)))


def chunked_because(plan: Plan, source: Source) -> str:
    """Why a call does not use the head's own matrix products, empty if it does; see `product.why_chunked`."""
    return KEPT if plan.kept else why_chunked(source, plan.want, plan.backend)


def read_because(plan: Plan, source: Source, segments: Segments | None, chunked: str) -> str:
    """Why the host has to know which rows count before the work is queued; empty if it need not."""
    return plan.read_because if chunked or source.shard is not None else why_read_by_products(plan, source, segments)


def reads_now(host_read: bool, device: torch.device, because: str) -> bool:
    """Whether the host reads the targets before the work is queued: if it may, and it must or reading costs no wait."""
    return host_read and (because != "" or not should_defer(device)) and may_read(host_read, device)


def rows_of(plan: Plan, arguments: CallArguments, host_read: bool, chunked: str) -> Rows:
    """The rows of a call that count."""
    source, targets, segments, _, _, _, support = arguments
    linear, device, count = isinstance(source, Linear), source.device, None
    if isinstance(targets, Tensor):
        if plan.kind == "batch" and not may_read(host_read, device):
            names = [t.name for t in plan.terms if t.trace.kind == "batch"]
            raise ValueError(
                f"host_read: term {names[0]!r} mixes rows and must not see ignored ones, so they have to be dropped; "
                f"allow the host read, or give targets through hl.prepare"
            )
        host_read = reads_now(host_read, device, read_because(plan, source, segments, chunked))
        count = getattr(plan.backend, "count_targets", None)
    return bind_rows(
        source.leading, targets, segments,
        vocab=source.vocab, device=device, host_read=host_read, needed=plan.needed, count=count,
        by_segment=plan.kind == "segment" and linear and support is None and not in_order(plan),
        skips=plan.program is not None and (plan.kept or not linear),
    )  # fmt: skip


def chunks_of(
    plan: Plan, arguments: CallArguments, rows: Rows, teacher_rows: Mapping[str, TeacherRows]
) -> list[Chunk] | None:
    """The chunks of a visit; None if all facts must be known before the first cotangent."""
    source, segments, support, program = arguments.source, arguments.segments, arguments.support, plan.program
    if support is not None:
        if program is None:
            return None  # kept columns are so few that making them again costs less than going by chunks
        parts = support_chunks(support.known(), rows, source)
        return [Chunk(part) for part in parts] if rows.count and (len(parts) == 1 or plan.kind == "row") else None
    if program is not None and type(source) is Logits:
        most = most_rows(teacher_rows) if teacher_rows else None  # how many rows of teachers' logits fit at a time
        if most is None:
            return [Chunk(slice(0, rows.count))] if rows.count else None
        if plan.kind == "segment":
            return None  # a teacher's logits are made for some rows at a time, and segments may be longer
        step = max(1, most)
        return [Chunk(slice(i, min(i + step, rows.count))) for i in range(0, rows.count, step)] or None
    if makes_grad_in_forward(plan, source):
        return logits_chunks(plan, source, rows, teacher_rows)
    if not isinstance(source, Linear) or plan.want.only_ids:
        return None
    cost = cost_of(teacher_rows, source, rows)
    if plan.kind == "row":
        return row_chunks(source, cost, rows.count)
    most, runs = chunk_rows(source, cost, rows.count), None
    over_ranks = segments is not None and segments.group is not None  # a sum over ranks must see all rows
    # interleaved segments are not sorted if a metric may depend on the order of rows
    if plan.kind == "segment" and not over_ranks and rows.by_segment:
        runs = rows.aligned(most) if rows.stats is not None and not rows.stats.unassigned else None
    if runs is None and program is None and fits_at_once(source, rows.count, most):
        return [Chunk(slice(0, rows.count))] if rows.count else None
    return None if runs is None else [Chunk(*run) for run in runs]
