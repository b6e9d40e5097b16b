"""The forward and the backward pass of a call, with autograd and without.

One autograd Function serves every kind of call.  Its outputs are the loss and the facts.  A gradient through the loss
uses what the visit made; a gradient through a fact costs another sweep, which runs only then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from headloss.engine.autograd_contract import (
    changing,
    check_mark,
    differentiable_once,
    mark_of,
    read_again,
    save_tensors,
)
from headloss.engine.heads import Deferred, on_source_device, scale_grads
from headloss.engine.logits_forward_grad import fits_at_once, makes_grad_in_forward, reads_all_rows, visit_all
from headloss.engine.loss import TermsOnRows
from headloss.engine.one_launch import Launched, launch, read_facts
from headloss.engine.product import Pending, ProductSweep
from headloss.engine.read_settle_write import facts_between, settle_between
from headloss.engine.read_settle_write import settle as settle_segments
from headloss.engine.sweeps import Sweep
from headloss.engine.weight_grad_into import weight_grad_into_of
from headloss.facts import VALUED, Fact, Softmax, Want
from headloss.metrics import Metric, dead_rows, measure_later
from headloss.record import Facts, Grads, add_grads, facts_later
from headloss.sources import Logits
from headloss.trace.gradient import check_elements, check_gradient


class Result(NamedTuple):
    """The result of a forward pass."""

    loss: Tensor
    facts: Mapping[Fact, Tensor]  # (R,)
    softmax: Softmax
    by_fact: Mapping[Fact, Tensor]  # cotangents of the loss
    by_input: Mapping[str, Tensor]
    grads: Grads | Pending | Deferred | None = None  # made in the visit
    normaliser: Tensor | None = None  # the factor that grads and cotangents from a visit still need

    def blocks(self, want: Want) -> Sequence[Tensor]:
        """The tensors that hold the facts, for autograd: here one per fact, and no views.  Users get copies."""
        return [self.facts[f].data for f in want.facts]

    def pulled(self, want: Want, cotangents: Sequence[Tensor | None]) -> dict[Fact, Tensor]:
        """The facts' cotangents from those of `blocks`."""
        return {f: g for f, g in zip(want.facts, cotangents, strict=True) if g is not None}

    def rest(self) -> Result:
        """What a later pull needs: not the gradients, and not the loss's graph, which would keep itself alive.

        Of the facts, only those whose pull reads their value: the caller has the others, and may write to them.
        """
        facts = {f: x for f, x in self.facts.items() if f.name in VALUED}
        return self._replace(loss=self.loss.detach(), facts=facts, grads=None)


def run(sweep: Sweep, loss: TermsOnRows | None, needs: tuple[bool, ...]) -> Any:
    """The forward pass: facts, loss, and those parts of the gradient that the same visit can make."""
    result = _run(sweep, loss, needs)
    for name, call in () if loss is None else loss.plan.metrics:
        if loss is not None and call.fn is dead_rows:
            made = True in needs or bool(loss.wants_grad)
            loss.metrics = {**loss.metrics, **_dead_rows(name, sweep, result, made)}
    return result


def _dead_rows(name: str, sweep: Sweep, result: Result | Launched, made: bool) -> dict[str, Metric]:
    """The metric `dead_rows`: rows whose facts all have a gradient of 0; `made`: whether there is a gradient."""
    rows, device = sweep.rows, sweep.source.device
    visited: Any = result.visited if isinstance(result, Launched) else None  # `result` holds the gradients
    by_fact = {} if visited or not made else result.by_fact

    def values() -> Tensor:
        dead = torch.ones(rows.count, dtype=torch.bool, device=device)
        for pull in (visited.cotangents if visited and made else by_fact).values():
            none = pull == 0
            dead &= none if none.ndim == 1 else none.all(1)
        return dead[None].to(torch.float32)

    counted = rows.valid if made else torch.zeros(rows.count, dtype=torch.bool, device=device)
    return measure_later([name], values, counted, "token")


@on_source_device
def _run(sweep: Sweep, loss: TermsOnRows | None, needs: tuple[bool, ...]) -> Result | Launched:
    if loss is None:
        if sweep.program is not None and True not in needs and sweep.rows.count:
            return facts_between(sweep) if type(sweep) is ProductSweep else read_facts(sweep)
        facts, softmax = sweep.facts()
        return Result(softmax.max.new_zeros(()), facts, softmax, {}, {})
    plan, wanted = loss.plan, True in needs or bool(loss.wants_grad)
    if wanted or loss.watched:
        if not plan.has_gradient:
            check_gradient(loss.terms, wanted)
        if plan.want.divergent:
            check_elements(loss.terms, sweep.source.device)
    program = plan.program
    if type(sweep) is ProductSweep:
        if plan.settles is not None and not sweep.teacher_rows and sweep.rows.count:
            return settle_between(sweep, loss, needs)
        if True in needs and sweep.at_once:
            return Result(*sweep.run_at_once(loss, needs))
        program = None
    if program is not None and program.by_segment and sweep.rows.count:
        return settle_segments(sweep, loss, needs)
    if program is not None and loss.chunks:
        return launch(sweep, loss, needs)
    chunks, source = loss.chunks or (), sweep.source
    if True in needs and (len(chunks) > 1 or (chunks and not visits_at_once(sweep))):
        facts, softmax, by_fact, by_input, grads = sweep.visit(chunks, loss.chunk, needs)
        value, _ = loss.whole(facts, grad=False)
        return Result(value, facts, softmax, by_fact, by_input, grads, loss.normaliser)
    if True in needs and (
        chunks or (makes_grad_in_forward(plan, source) and reads_all_rows(source, sweep.rows, sweep.teacher_rows))
    ):
        return Result(*visit_all(sweep, chunks, functools.partial(loss.whole, grad=True), needs))
    facts, softmax = sweep.facts()
    value, (by_fact_, by_input_) = loss.whole(facts, grad=wanted)
    return Result(value, facts, softmax, by_fact_, by_input_)


def visits_at_once(sweep: Sweep) -> bool:
    """Whether a visit of one chunk may settle all of its rows before it writes their gradient."""
    return type(sweep) is Sweep and fits_at_once(sweep.source)


@on_source_device
def final_grads(sweep: Sweep, result: Result | Launched, needs: tuple[bool, ...]) -> Grads:
    """The gradients of the loss, without autograd."""
    into, made, scale = weight_grad_into_of(sweep.source), result.grads, result.normaliser
    overwritten = isinstance(sweep.source, Logits) and sweep.source.inplace
    if made is None or (not overwritten and _rounded_twice(made, scale)):
        by_fact = result.by_fact if scale is None else {f: scale * g for f, g in result.by_fact.items()}
        made, scale = sweep.pull(result.facts, result.softmax, by_fact, needs), None
    grads = _finished(made, scale, sweep)
    return grads if into is None else into.take(grads)


def _rounded_twice(made: Any, scale: Tensor | None) -> bool:
    """Whether a gradient of logits is narrow and scaling would round it a second time; it is then made again.

    It is scaled all the same if the host would have to wait for the number, or if it has overwritten the logits.
    """
    if scale is None or not scale.is_cpu or not isinstance(made, Grads) or made.logits is None:
        return False
    return made.logits.dtype.itemsize < 4 and math.frexp(abs(float(scale)))[0] not in (0.5, 0.0)


def _finished(made: Grads | Pending | Deferred, scale: Tensor | None, sweep: Sweep) -> Grads:
    """Gradients times a number.  A weight's gradient that waited for it is made now and added by its own product."""
    if type(made) is Grads:
        return scale_grads(made, scale, sweep.backend)
    if isinstance(made, Pending):
        return made.finish(scale)
    assert isinstance(made, Deferred)
    into = weight_grad_into_of(made.head.source)
    weight = made.head.weight_later(scale, None if into is None else into.existing)
    return scale_grads(made.made, scale, sweep.backend)._replace(weight=weight)


class SweptCall(NamedTuple):
    """A call that runs as a sweep and a loss."""

    sweep: Sweep
    loss: TermsOnRows | None
    needs: tuple[bool, ...]

    def forward(self, ctx: Any, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        sweep, loss, needs = self
        result = run(sweep, loss, needs)
        if sweep.teacher_rows:
            sweep.close()
        want, grads, source = sweep.want, result.grads, sweep.source
        blocks = result.blocks(want)
        read, names, inputs = sweep.tensors(), names_of(needs), []
        used: list[tuple[str, Tensor]] = []
        if loss is not None:
            used = loss.tensors()
            if loss.wants_grad:
                names += loss.wants_grad
                used = [x for x in used if x[0] not in names]
                inputs = [loss.shaped(n, result.by_input.get(n)) for n in loss.wants_grad]
        if type(result) is Launched:
            if loss is not None:
                loss.visited = result.visited
        elif want.constant:
            ctx.mark_non_differentiable(*[blocks[i] for i in want.constant])
        count = len(tensors)
        save_tensors(
            ctx, (*names, *[n for n, _ in read], *[n for n, _ in used]),
            (*tensors, *[x for _, x in read], *[x for _, x in used]), count, count + len(read), grads is not None,
        )  # fmt: skip
        overwritten = grads is not None and getattr(source, "inplace", False)
        into = None if type(source) is Logits else weight_grad_into_of(source)
        ctx.grads, ctx.kept = grads, (sweep, needs, result.rest(), into, overwritten, inputs)
        if True in needs and changing(want.facts):
            ctx.mark = mark_of(want.facts, source)
        sweep.strip()
        return (result.loss, *blocks)


_NOTHING = (None,) * 64


def _pull(ctx: Any, saved: Sequence[Tensor], g_loss: Any, *g_facts: Any) -> tuple[Any, ...]:
    """Gradients of the source's tensors and of the inputs that require grad; the sweep is opened again if needed."""
    sweep, needs, result, into, overwritten, inputs = ctx.kept
    grads, made = None, ctx.grads
    if into is not None and needs[1] and not into.asked(ctx):  # `made` includes the weight's gradient
        made, into, needs = None, None, (needs[0], False, *needs[2:])
    by_input: Sequence[Tensor | None] = (None,) * len(inputs)
    pending = result.pulled(sweep.want, g_facts) if g_facts != _NOTHING[: len(g_facts)] else {}
    if g_loss is not None:
        scale = g_loss if result.normaliser is None else g_loss * result.normaliser
        if made is not None and not (scale.is_cpu and not overwritten and _rounded_twice(made, scale)):
            grads = _finished(made, scale, sweep)
            ctx.grads = None  # handed over: a second backward makes them again
        else:
            for fact, cotangent in result.by_fact.items():
                pulled = scale * cotangent
                pending[fact] = pending[fact] + pulled if fact in pending else pulled
        if inputs:
            by_input = [None if g is None else scale * g for g in inputs]
    if pending and overwritten:
        raise RuntimeError(
            "inplace: the logits have been modified by an inplace operation, since their gradient overwrote them: only "
            "the loss has a gradient, and only once; use inplace=False, or make a term of what you compute from a fact"
        )
    if pending and True in needs:
        restored = sweep.restored(read_again(ctx, saved, len(needs)))
        if hasattr(ctx, "mark"):
            check_mark(ctx.mark, pending, sweep.want.facts, restored.source)
        facts = {  # where the cotangent is 0, an infinite value must not reach the gradient as 0 * inf
            f: torch.where(pending[f] == 0, 0.0, x) if f in pending else x for f, x in result.facts.items()
        }
        more = _finished(restored.pull(facts, result.softmax, pending, needs), None, restored)
        restored.close()
        grads = more if grads is None else add_grads(grads, more)
    if grads is None and g_loss is not None:  # no term reaches a fact: 0, as where a visit made the gradient
        zeros = [torch.zeros_like(x) if need else None for x, need in zip(saved, needs)]
        grads = Grads(*zeros) if len(needs) == 1 else Grads(None, *zeros)
    if grads is not None and into is not None and needs[1]:
        grads = into.take(grads)
    by_tensor = (None,) * len(needs) if grads is None else grads[:1] if len(needs) == 1 else grads[1 : 1 + len(needs)]
    return (None, *by_tensor, *by_input)


class HeadFunction(_SingleLevelFunction):  # `Function` without torch.func support, see `refuse_transforms`
    """(source tensors, inputs that require grad) -> (loss, *tensors that hold the facts of the rows that count)."""

    apply: Any  # autograd's own

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Tensor) -> Any:
        """`call`: a `SweptCall` or a `fast_call.FastCall`."""
        ctx.set_materialize_grads(False)
        return call.forward(ctx, tensors)

    backward = staticmethod(differentiable_once(_pull))

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        raise RuntimeError(
            "headloss: compiled autograd cannot trace this backward; turn it off (torch._dynamo.config."
            "compiled_autograd = False), or compile the function that makes the loss"
        )


def names_of(tensors: Sequence[Any]) -> tuple[str, ...]:
    """The names of the source's tensors; any sequence with one item per tensor will do."""
    return ("logits",) if len(tensors) == 1 else ("hidden", "weight", "bias")[: len(tensors)]


def facts_of(rows: Any, want: Want, blocks: Sequence[Tensor], visited: Any = None) -> Facts:
    """The facts of a call, in the targets' shape, made when one is first read; see `Result.blocks`."""

    def make() -> dict[Fact, Tensor]:
        recorded = any(x.requires_grad for x in blocks)
        with torch.inference_mode(False), torch.set_grad_enabled(recorded):  # whatever the reader's mode is
            found = blocks if visited is None else visited.of(blocks).fact_values
            found = [x.detach() if i in want.constant else x for i, x in enumerate(found)]
            return {f: rows.put(x.clone(), visited is not None) for f, x in zip(want.facts, found, strict=True)}

    return facts_later(make)
