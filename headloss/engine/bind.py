"""From a plan to a sweep and a loss: look at the targets, find the rows that count, lay everything out along them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headloss.backends import choose
from headloss.engine.arguments import CallArguments
from headloss.engine.loss import TermsOnRows
from headloss.engine.plan import Plan
from headloss.engine.sweeps import Chunk, Sweep
from headloss.engine.teachers import SparseTeacherRows, bind_teachers, most_rows, teacher_bytes
from headloss.facts import Want
from headloss.late import defers
from headloss.rows import Prepared, Rows, bind_rows, may_read
from headloss.segments import readable
from headloss.sources import Linear, Logits, Source
from headloss.term import check_weight
from headloss.terms import Terms
from headloss.trace.reads import ours
from headloss.trace.signature import TEACHER_INPUTS


def rows_of(plan: Plan, targets: Tensor | Prepared | None, host_read: bool) -> Rows:
    """The rows of a call that count."""
    unread = not host_read and isinstance(targets, Tensor)
    if plan.kind == "batch" and unread:
        names = [t.name for t in plan.terms if t.trace.kind == "batch"]
        raise ValueError(
            f"host_read: term {names[0]!r} mixes rows and must not see ignored ones, so they have to be dropped; "
            f"allow the host read, or give targets through hl.prepare"
        )
    source, needed = plan.source, [t.name for t in plan.terms if t.needs_segments]
    return bind_rows(
        source.leading, targets, plan.segments,
        vocab=source.vocab, device=source.device, by_segment=plan.kind == "segment" and isinstance(source, Linear),
        host_read=host_read and (not defers(source.device) or why_read(plan) != ""),
        skips=plan.program is not None and isinstance(source, Logits), needed=needed[0] if needed else None,
    )  # fmt: skip


def why_read(plan: Plan) -> str:
    """Why the host has to know which rows count before the work is queued; empty: it need not."""
    if isinstance(plan.source, Linear):
        return "ignored rows are left out of the products"
    if plan.source.shard is not None or (plan.segments is not None and plan.segments.group is not None):
        return "ranks that share a call must refuse it together, before a collective"
    if plan.kind == "batch":
        return f"term {next(t.name for t in plan.terms if t.trace.kind == 'batch')!r} must not see ignored rows"
    mixing = [f"{t.name}/{name}" for t in plan.terms for name, kind in t.trace.metrics.items() if kind == "other"]
    mixing += [name for name, call in plan.metrics if plan.program is None and not ours(call.fn)]
    return f"metric {mixing[0]!r} may not see ignored rows" if mixing else ""


def bind(objective: Terms, plan: Plan, arguments: CallArguments) -> tuple[Sweep, TermsOnRows]:
    num_items, num_segments, _, grad_scale, host_read = arguments.options
    for name, x in (("num_items", num_items), ("num_segments", num_segments)):
        check_count(name, x)
    check_weight("grad_scale", grad_scale)
    for element in dict.fromkeys(f.element for f in plan.want.facts if f.element is not None):
        element.check_again()
    source = plan.source
    backend = backend_for(objective.backend, source, plan.want)
    if isinstance(source, Linear):
        source.chunk_rows()  # refuses a budget below one row
        if source.shard is not None:
            source.shard.check_width(source.weight.shape[0])
    rows = rows_of(plan, arguments.targets, may_read(host_read, source.device))
    guides = _guides(plan, rows, backend) if plan.teachers else {}
    chunks = chunks_of(plan, rows, teacher_bytes(guides, source), most_rows(guides))
    rows.join()
    taken = {
        f"{i} of {n}": x
        for n, guide in guides.items()
        if isinstance(guide, SparseTeacherRows)
        for i, x in zip(TEACHER_INPUTS, (guide.ids_RK, guide.logprob_RK), strict=True)
    }
    loss = TermsOnRows(
        plan.terms, plan.metrics, rows, plan.inputs,
        chunks=chunks, num_items=num_items, num_segments=num_segments, grad_scale=grad_scale,
        dtype=source.fact_dtype, device=source.device, narrow=source.narrow or _too_early(plan), taken=taken,
        segments=plan.segments,
    )  # fmt: skip
    integers: list[Tensor] = []
    if source.shard is not None:
        integers = [x for x, _ in plan.inputs.values() if x.ndim and not x.dtype.is_floating_point]
    return Sweep(source, rows, plan.want, backend, guides, plan.program, plan.times, integers), loss


def _guides(plan: Plan, rows: Rows, backend: Any) -> dict[str, Any]:
    inputs_of = [p.teacher for t in plan.terms for s in t.call.signatures for p in s.parameters if p.teacher]
    inputs_of += [p.teacher for _, call in plan.metrics for p in call.signature.parameters if p.teacher]
    names = tuple(dict.fromkeys((*plan.want.teachers, *inputs_of)))
    return bind_teachers(plan.teachers, names, plan.source, rows, backend)


def _too_early(plan: Plan) -> bool:
    """Whether fp16 logits get their gradient before the loss scale is known: write order 1, and scale in float32."""
    return plan.program is not None and isinstance(plan.source, Logits) and plan.source.logits.dtype == torch.float16


def chunks_of(plan: Plan, rows: Rows, beside: int, taught: int | None = None) -> list[Chunk] | None:
    """How a visit walks the rows; None if every fact must be there before the first cotangent.

    `beside` is what a row costs for its teachers; `taught`, of how many rows their logits may be made at a time.
    """
    source = plan.source
    if isinstance(source, Logits) and plan.program is not None:
        if plan.program.by_segment:
            return [Chunk(slice(0, rows.count))] if rows.count else None
        step = max(1, rows.count if taught is None else taught)
        return [Chunk(slice(i, min(i + step, rows.count))) for i in range(0, rows.count, step)] or None
    if not isinstance(source, Linear) or plan.kind == "batch" or plan.want.only_ids:
        return None
    if plan.kind == "segment" and plan.segments is not None and plan.segments.group is not None:
        return None  # a sum over ranks must see all rows
    most = source.chunk_rows(beside)
    if plan.kind == "row":
        pieces = -(-rows.count // most)
        return [Chunk(slice(rows.count * i // pieces, rows.count * (i + 1) // pieces)) for i in range(pieces)]
    runs = rows.aligned(most) if rows.stats is not None and not rows.stats.loose else None
    return None if runs is None else [Chunk(*run) for run in runs]


def backend_for(name: str, source: Source, want: Want) -> ModuleType:
    """The backend asked for, or a ValueError; "auto" takes one that can run every divergence wanted."""
    backend = choose(name, source.device, source.fact_dtype)
    why = backend.cannot_run(want)
    if why is not None and name != "auto":
        raise ValueError(f'backend: "{backend.NAME}" cannot run {why}; use backend="torch"')
    return backend if why is None else choose("torch", source.device, source.fact_dtype)


def check_count(name: str, x: object) -> None:
    """A whole number, at least 0; on a device it is checked there, and nothing waits."""
    if x is None:
        return
    if isinstance(x, Tensor):
        if x.ndim or x.requires_grad or x.dtype == torch.bool or x.dtype.is_complex:
            got = f"one of shape {tuple(x.shape)}" if x.ndim else f"{x.dtype}" + ", requires grad" * x.requires_grad
            raise TypeError(f"{name}: wanted a number or a scalar tensor without grad, got {got}")
        if not readable(x):
            if x.device.type != "meta":
                good = x >= 0 if not x.dtype.is_floating_point else (x >= 0) & (x.frac() == 0)
                torch._assert_async(good, f"{name}: wanted a whole number, at least 0")
            return
        x = x.item()
    elif isinstance(x, bool) or not isinstance(x, int | float):
        raise TypeError(f"{name}: wanted a number or a scalar tensor, got {type(x).__name__}")
    if not (x >= 0 and x % 1 == 0):
        raise ValueError(f"{name}: wanted a count (a whole number, at least 0), got {x}")
