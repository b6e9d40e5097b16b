"""Calls that take one launch over logits as they lie there: what their tensors do not decide is decided once.

Two such calls are alike if everything is equal that can be seen without a number of the device: dtypes, sizes, strides,
options, and what their functions read.  The first of them is planned and checked; then it runs here, as all later ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headloss.engine.arguments import CallArguments
from headloss.engine.bind import rows_of
from headloss.engine.checks import check_count
from headloss.engine.lookup import Found, Plans
from headloss.engine.one_launch import Launched, measured
from headloss.engine.plan import Plan
from headloss.engine.saved import hold, refuse_transforms
from headloss.engine.sweeps import Sweep
from headloss.engine.teachers import DenseTeacherRows
from headloss.prepared import Prepared, Stats, check_stats
from headloss.record import Grads
from headloss.reductions import reciprocal, shared_weight
from headloss.rows import IGNORE, Rows
from headloss.sources import Logits
from headloss.term import check_weight
from headloss.trace.gradient import check_gradient
from headloss.trace.reads import defaults
from headloss.trace.signature import ONLY

_MOST = 64  # kinds of calls: more would mean that sizes change with every call


def key_of(arguments: CallArguments, grad: bool) -> tuple[Any, ...] | None:
    """What calls that are alike have in common; None: not of the kind that comes here."""
    source, targets, segments, teacher, options, inputs, support = arguments
    if type(source) is not Logits or segments is not None or support is not None:
        return None
    x, T, (num_items, num_segments, weights, grad_scale, host_read) = source.logits, source.temperature, options
    y: Any = targets
    if type(targets) is Prepared:
        y = None if targets.segments is not None else targets.targets
    if type(x) is not Tensor or type(y) is not Tensor or type(T) is not float or type(grad_scale) is not float:
        return None
    if num_segments is not None or weights is not None or isinstance(num_items, Tensor) or source.shard is not None:
        return None
    key: list[Any] = [
        grad, torch.is_grad_enabled(), x.dtype, x.device, x.shape, x.stride(), y.dtype, y.device, y.shape, y.stride(),
        y is targets, host_read, T, source.scale, source.softcap, source.inplace, source.vocab, *defaults(),
    ]  # fmt: skip
    if teacher is not None:
        if type(teacher) is not Logits or type(teacher.logits) is not Tensor or type(teacher.temperature) is not float:
            return None
        z = teacher.logits
        key += (z.dtype, z.device, z.shape, z.stride(), z.requires_grad, teacher.vocab, teacher.temperature)
        key += (teacher.scale, teacher.softcap, teacher.shard is None, teacher.vocab_ids is None)
    for name, value in inputs.items():
        if type(value) is not Tensor:
            return None
        key += (name, value.dtype, value.device, value.shape, value.stride(), value.requires_grad)
    return tuple(key)


def find_ready(plans: Plans | None, key: Any, arguments: CallArguments) -> Ready | None:
    """What an earlier call made that was alike, if one was."""
    found = None if plans is None or key is None else plans.ready.get(key)
    if found is None:
        return None
    form, by_read = found
    ready: Ready | None = by_read.get(form.read()[0])
    if ready is None or not ready.plan.backend.suits(ready.count, arguments.source.vocab):
        return None
    refuse_transforms(arguments)
    return ready


def make_ready(plans: Plans, key: Any, found: Found) -> Ready | None:
    """For calls that are alike, after the first of them was planned; None: these are not so simple."""
    plan, (source, targets, _, teachers, *_), program = found.plan, found.arguments, found.plan.program
    y = targets.targets if isinstance(targets, Prepared) else targets
    if key is None or program is None or program.by_segment or plan.by_token is None or not plan.weights:
        return None
    if plan.is_fp16 or plan.wants_grad or plan.elements or plans.divergences:
        return None
    x, given = source.logits, found.arguments.inputs  # type: ignore[union-attr]
    if source.inplace or source.vocab != x.shape[-1] or not x.numel():  # type: ignore[union-attr]
        return None
    if y.dtype is not torch.int64 or y.shape != x.shape[:-1] or y.device != x.device or x.device.type == "meta":  # type: ignore[union-attr]
        return None
    if any(isinstance(w, Tensor) for w in plan.weights.values()):
        return None
    teacher: Any = None
    if teachers:
        teacher = teachers.get(ONLY)  # type: ignore[union-attr]
        if type(teacher) is not Logits or plan.want.teachers != (ONLY,) or plan.named_teachers != (ONLY,):
            return None
        z = teacher.logits
        if z.requires_grad or z.dtype == torch.float64 or not source.vocab == teacher.vocab == z.shape[-1]:
            return None
    taken = [given.get(name) for name in program.inputs]
    if any(v is None or not v.is_contiguous() or v.device != x.device for v in taken):
        return None
    ready = Ready(plan, source, given, teacher, found.held)  # type: ignore[arg-type]
    if len(plans.ready) >= _MOST:
        plans.ready.clear()
    plans.ready.setdefault(key, (found.form, {}))[1][found.read] = ready
    return ready


class Ready:
    """What calls that are alike have in common."""

    __slots__ = (
        "backend", "count", "flat", "held", "plan", "said", "shape", "their", "used", "visits",
        "want", "weights",
    )  # fmt: skip

    def __init__(
        self, plan: Plan, source: Logits, inputs: Mapping[str, Tensor], teacher: Logits | None, held: Any
    ) -> None:
        self.plan, self.want, self.backend = plan, plan.want, plan.backend
        self.held = held  # what functions of ours read, so that nothing else takes on its identity
        self.shape, self.flat = tuple(source.logits.shape[:-1]), source.logits.ndim == 2
        self.count, self.used = math.prod(self.shape), tuple(inputs)
        self.said, self.their, theirs = _said(source), {} if teacher is None else _said(teacher), None
        if teacher is not None:
            own = tuple([float(teacher.temperature if T is None else T) for T in plan.want.temperatures_of(ONLY)])
            theirs = (float(teacher.scale), teacher.softcap, own)
        self.weights = tuple([float(w) for w in plan.weights.values()])
        temperatures = tuple([float(source.temperature if T is None else T) for T in plan.want.temperatures])
        means = tuple([name in (plan.by_token or ()) for name in plan.weights])
        self.visits = plan.backend.Visits(plan.program, temperatures, source.scale, source.softcap, means, theirs)

    def put(self, x: Tensor, held: bool) -> Tensor:
        """See `Rows.put`."""
        return x.reshape(self.shape + tuple(x.shape[1:]))


def _said(source: Logits) -> dict[str, Any]:
    return {"temperature": source.temperature, "scale": source.scale, "softcap": source.softcap}


class ReadyCall:
    """One call: its targets, and what the host knows of them."""

    __slots__ = ("arguments", "mean", "ready", "skipped", "stats", "sums", "targets", "teacher", "valid", "visited")
    sums: Tensor
    visited: Any

    def __init__(self, ready: Ready, arguments: CallArguments) -> None:
        self.ready, self.arguments = ready, arguments
        (num_items, *_, grad_scale, host_read), targets = arguments.options, arguments.targets
        if num_items is not None:
            check_count("num_items", num_items)
        if grad_scale != 1.0:
            check_weight("grad_scale", grad_scale)
        self.valid: Tensor | None = None
        teacher: Any = arguments.teacher
        if ready.their and type(teacher) is not Logits:
            teacher = teacher[ONLY]  # it was planned, and so named
        self.teacher: Tensor | None = teacher.logits if ready.their else None
        if type(targets) is Prepared:
            stats, self.targets = targets.known(), targets.targets
            self.stats: Stats | None = stats
            if stats.valid and not 0 <= stats.low <= stats.high < arguments.source.vocab:
                check_stats(stats, arguments.source.vocab)
            self.skipped = stats.valid < ready.count
            self.mean = reciprocal(stats.valid if num_items is None else num_items)
        else:
            rows = rows_of(ready.plan, arguments, host_read, "the logits exist")
            assert rows.given is not None
            self.targets, self.stats, self.skipped, self.valid = rows.given, rows.stats, rows.skipped, rows._valid
            self.mean = shared_weight("token_mean", "row", rows, num_items=num_items)

    def run(self, x: Tensor, grad: bool) -> tuple[Tensor, Tensor | None]:
        """The loss, and the gradient if it is wanted."""
        ready, (*_, scale, _), inputs = self.ready, self.arguments.options, self.arguments.inputs
        plan, targets, teacher, times = ready.plan, self.targets, self.teacher, ready.plan.times
        if not plan.has_gradient and (grad or torch.is_grad_enabled()):
            check_gradient(plan.terms, grad)
        begun = 0.0 if "compiling" in times else time.perf_counter()
        taken = tuple([inputs[name] for name in plan.program.inputs])
        out = out_NV = torch.empty_like(x, memory_format=torch.contiguous_format) if grad else None
        if not ready.flat:
            x, targets = x.reshape(ready.count, -1), targets.reshape(-1)
            out_NV = None if out is None else out.view(x.shape)
            teacher = None if teacher is None else teacher.reshape(x.shape)
            taken = tuple([v if v.ndim < 2 else v.reshape(-1) for v in taken])
        weights = ready.weights
        factors = weights if scale == 1.0 else tuple([w * scale for w in weights])
        self.visited, self.sums, loss = ready.visits(
            x, targets, taken, self.mean, factors, weights, out_NV, self.skipped, teacher
        )
        if begun:
            times["compiling"] = time.perf_counter() - begun
        return loss, out

    def forward(self, ctx: Any, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """With autograd; see `run.Head`."""
        loss, out = self.run(tensors[0], True)
        inputs, visited = self.arguments.inputs, self.visited
        used = [(name, inputs[name]) for name in self.ready.used]
        read = [("targets", self.targets)]
        if self.teacher is not None:
            read.append(("teacher.logits", self.teacher))
        hold(ctx, ("logits",), tensors, read, used)
        left = Left(self.ready, self.stats, self.skipped)
        ctx.grads, ctx.kept = Grads(out), (left, (True,), Launched(None, visited, None, None), None, False, ())
        return loss, *[x.detach() for x in visited.blocks]

    def metrics(self) -> dict[str, Any]:
        """Which rows count is noted now: the targets may be written to."""
        if not self.ready.plan.program.metrics:
            return {}
        if self.valid is None and self.skipped:
            self.valid = self.targets.reshape(-1) != IGNORE
        return measured(self.visited, self.valid)


class Left:
    """What such a call leaves for its backward."""

    __slots__ = ("ready", "skipped", "stats")

    def __init__(self, ready: Ready, stats: Stats | None, skipped: bool) -> None:
        self.ready, self.stats, self.skipped = ready, stats, skipped

    want = property(lambda self: self.ready.want)
    backend = property(lambda self: self.ready.backend)

    def whole(self, tensors: Mapping[str, Tensor]) -> Sweep:
        """The call as a sweep, where something pulls on a fact or a second time."""
        ready = self.ready
        rows = Rows(ready.shape, tensors["targets"], None, None, None, self.stats, self.skipped)
        source = Logits(tensors["logits"], **ready.said)
        guides: dict[str, Any] = {}
        if ready.their:
            guides[ONLY] = DenseTeacherRows(Logits(tensors["teacher.logits"], **ready.their), source, rows)
        return Sweep(source, rows, ready.want, ready.backend, guides, ready.plan.program)
