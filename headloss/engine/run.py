"""The forward and the backward pass of a call, with autograd and without.

One autograd Function serves every grade.  Its outputs are the loss and the facts.  What pulls on the loss uses the
gradients made in the visit; what pulls on a fact is paid for by another sweep, and only then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.engine.heads import on_source_device
from headloss.engine.one_launch import Launched, launch
from headloss.engine.saved import hold, once
from headloss.engine.settled import settle as settle_segments
from headloss.engine.sweeps import Loss, Sweep, scaled
from headloss.facts import CONSTANT, VALUED, Fact, Softmax, Want
from headloss.record import Grads
from headloss.trace.gradient import check_elements, check_gradient


class Result(NamedTuple):
    """What a forward pass leaves behind."""

    loss: Tensor
    facts: Mapping[Fact, Tensor]  # (R,)
    softmax: Softmax
    by_fact: Mapping[Fact, Tensor]  # cotangents of the loss
    by_input: Mapping[str, Tensor]
    grads: Grads | None = None  # made in the visit
    normaliser: Tensor | None = None  # what grads and cotangents from a visit still have to be multiplied with

    def rest(self) -> Result:
        """What a later pull needs: not the loss, which would keep the graph alive that holds it, nor the gradients.

        Of the facts, those that their own pull reads: the caller has the others, and may write to them.
        """
        facts = {f: x for f, x in self.facts.items() if f.name in VALUED}
        return self._replace(loss=self.loss.detach(), facts=facts, grads=None)


@on_source_device
def run(sweep: Sweep, loss: Loss | None, needs: tuple[bool, ...]) -> Result | Launched:
    """The forward pass: facts, loss, and whatever of the gradient can be had in the same visit."""
    if loss is None:
        facts, softmax = sweep.facts()
        return Result(softmax.max.new_zeros(()), facts, softmax, {}, {})
    wanted = any(needs) or bool(loss.wants_grad)
    if wanted or loss.watched:
        check_gradient(loss.terms, wanted)
        if sweep.want.divergent:
            check_elements(loss.terms, sweep.source.device)
    if sweep.program is not None and sweep.program.by_segment and sweep.rows.count:
        return settle_segments(sweep, loss, needs)  # type: ignore[arg-type]
    if sweep.program is not None and loss.chunks:
        return launch(sweep, loss, needs)  # type: ignore[arg-type]
    if any(needs) and loss.chunks:
        facts, softmax, by_fact, by_input, grads = sweep.visit(loss.chunks, loss.chunk, needs)
        value, _ = loss.whole(facts, grad=False)
        return Result(value, facts, softmax, by_fact, by_input, grads, loss.normaliser)
    facts, softmax = sweep.facts()
    value, (by_fact_, by_input_) = loss.whole(facts, grad=wanted)
    return Result(value, facts, softmax, by_fact_, by_input_)


@on_source_device
def final_grads(sweep: Sweep, result: Result | Launched, needs: tuple[bool, ...]) -> Grads:
    """The gradients of the loss, without autograd."""
    if result.grads is None:
        return sweep.pull(result.facts, result.softmax, result.by_fact, needs)
    return scaled(result.grads, result.normaliser, sweep.backend)


class SavedForBackward:
    """What a forward pass leaves for the backward, apart from the caller's tensors, which autograd keeps."""

    def __init__(
        self,
        needs: tuple[bool, ...],
        result: Result | Launched,
        grads: Grads | None,
        inputs: list[Tensor | None],
        overwritten: bool,
    ) -> None:
        self.needs, self.result, self.grads = needs, result, grads
        self.inputs, self.overwritten = inputs, overwritten

    def pull(
        self,
        want: Want,
        backend: ModuleType,
        reopen: Callable[[], Sweep],
        g_loss: Tensor | None,
        g_facts: Sequence[Tensor | None],
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the source's tensors, and of the inputs that want one; `reopen` the sweep if it is needed."""
        result = self.result
        by_fact = {f: g for f, g in zip(want.facts, g_facts, strict=True) if g is not None}
        sweep = reopen() if by_fact else None
        pending = {} if sweep is None else {f: sweep.rows.take(g) for f, g in by_fact.items()}
        grads: Grads | None = None
        by_input: list[Tensor | None] = [None] * len(self.inputs)
        if g_loss is not None:
            scale = g_loss if result.normaliser is None else g_loss * result.normaliser
            if self.grads is not None:
                grads = scaled(self.grads, scale, backend)
                self.grads = None  # handed over: a second backward makes them again
            else:
                for fact, cotangent in result.by_fact.items():
                    pulled = scale * cotangent
                    pending[fact] = pending[fact] + pulled if fact in pending else pulled
            by_input = [None if g is None else scale * g for g in self.inputs]
        if pending and self.overwritten:
            raise RuntimeError(
                "inplace: the logits have been modified by an inplace operation, their own gradient: nothing but the "
                "loss can be pulled on, and only once; use inplace=False, or make the fact's part a term"
            )
        if pending and any(self.needs):
            sweep = sweep or reopen()
            more = sweep.pull(result.facts, result.softmax, pending, self.needs)
            sweep.close()
            grads = more if grads is None else Grads(*(_add(x, y) for x, y in zip(grads, more, strict=True)))
        names = ("logits",) if len(self.needs) == 1 else ("hidden", "weight", "bias")
        by_tensor = [None if grads is None else getattr(grads, name) for name in names[: len(self.needs)]]
        return by_tensor, by_input


class Head(torch.autograd.Function):
    """(source tensors, inputs that want a gradient) -> (loss, *facts)."""

    @staticmethod
    def forward(ctx: Any, sweep: Sweep, loss: Loss | None, needs: tuple[bool, ...], *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        result = run(sweep, loss, needs)
        sweep.close()
        facts, wanted = result.facts, () if loss is None else loss.wants_grad
        outputs = [sweep.rows.put(facts[f]) for f in sweep.want.facts]
        # no memory that a pull reads, and no views, which could not be written to
        outputs = [x.clone() if f.name in VALUED else x.data for f, x in zip(sweep.want.facts, outputs, strict=True)]
        ctx.mark_non_differentiable(*(x for f, x in zip(sweep.want.facts, outputs, strict=True) if f.name in CONSTANT))
        read, count = sweep.tensors(), len(needs)
        ctx.own = tuple(read)[:count]  # the names of the source's tensors
        used = [] if loss is None else [(n, x) for n, x in loss.tensors().items() if n not in wanted]
        hold(ctx, zip((*ctx.own, *wanted), tensors, strict=True), list(read.items())[count:], used)
        inputs = [] if loss is None else [loss.shaped(n, result.by_input.get(n)) for n in wanted]
        overwritten = result.grads is not None and getattr(sweep.source, "inplace", False)
        ctx.sweep, ctx.held = sweep.bare(), SavedForBackward(needs, result.rest(), result.grads, inputs, overwritten)
        return (result.loss, *outputs)

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor | None, *g_facts: Tensor | None) -> Any:
        return once(_pull, ctx, g_loss, *g_facts)


def _pull(ctx: Any, args: Sequence[Tensor], read: Mapping[str, Tensor], g_loss: Any, *g_facts: Any) -> list[Any]:
    sweep = ctx.sweep
    reopen = functools.partial(sweep.whole, {**dict(zip(ctx.own, args, strict=False)), **read})
    by_tensor, by_input = ctx.held.pull(sweep.want, sweep.backend, reopen, g_loss, g_facts)
    return [None, None, None, *by_tensor, *by_input]


def _add(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return x if y is None else y if x is None else x.add_(y)
