"""The forward and the backward pass of a call, with autograd and without.

One autograd Function serves every grade.  Its outputs are the loss and the facts.  What pulls on the loss uses the
gradients made in the visit; what pulls on a fact is paid for by another sweep, and only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headloss.facts import CONSTANT, Fact, Softmax
from headloss.heads import Grads, at_home
from headloss.one_launch import Launched, launch
from headloss.sources import with_tensors, without_tensors
from headloss.sweeps import Loss, Sweep, scaled


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
        """What a later pull needs: not the loss, which would keep the graph alive that holds it, nor the gradients."""
        return self._replace(loss=self.loss.detach(), grads=None)


@at_home
def run(sweep: Sweep, loss: Loss | None, needs: tuple[bool, ...]) -> Result | Launched:
    """The forward pass: facts, loss, and whatever of the gradient can be had in the same visit."""
    if loss is None:
        facts, softmax = sweep.facts()
        return Result(softmax.max.new_zeros(()), facts, softmax, {}, {})
    if sweep.program is not None and loss.chunks:
        return launch(sweep, loss, needs)  # type: ignore[arg-type]
    if any(needs) and loss.chunks:
        facts, softmax, by_fact, by_input, grads = sweep.visit(loss.chunks, loss.chunk, needs)
        value, _ = loss.whole(facts, grad=False)
        return Result(value, facts, softmax, by_fact, by_input, grads, loss.normaliser)
    facts, softmax = sweep.facts()
    grad = any(needs) or bool(loss.wants_grad)
    value, (by_fact_, by_input_) = loss.whole(facts, grad=grad)
    return Result(value, facts, softmax, by_fact_, by_input_)


@at_home
def settle(sweep: Sweep, result: Result | Launched, needs: tuple[bool, ...]) -> Grads:
    """The gradients of the loss, without autograd."""
    if result.grads is None:
        return sweep.pull(result.facts, result.softmax, result.by_fact, needs)
    return scaled(result.grads, result.normaliser, sweep.backend)


class Held:
    """What a forward pass leaves for the backward, beside the source's tensors, which autograd keeps."""

    def __init__(
        self,
        sweep: Sweep,
        needs: tuple[bool, ...],
        result: Result | Launched,
        grads: Grads | None,
        inputs: list[Tensor | None],
        overwritten: bool,
    ) -> None:
        self.sweep, self.needs, self.result, self.grads = sweep, needs, result, grads
        self.inputs, self.overwritten = inputs, overwritten

    def pull(
        self, tensors: tuple[Tensor, ...], g_loss: Tensor | None, g_facts: tuple[Tensor | None, ...]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the source's tensors, and of the inputs that want one."""
        sweep, result = self.sweep, self.result
        pending = {f: sweep.rows.take(g) for f, g in zip(sweep.want.facts, g_facts, strict=True) if g is not None}
        grads: Grads | None = None
        by_input: list[Tensor | None] = [None] * len(self.inputs)
        if g_loss is not None:
            scale = g_loss if result.normaliser is None else g_loss * result.normaliser
            if self.grads is not None:
                grads = scaled(self.grads, scale, sweep.backend)
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
            sweep = sweep.replace(with_tensors(sweep.source, tensors))
            more = sweep.pull(result.facts, result.softmax, pending, self.needs)
            sweep.close()
            grads = more if grads is None else Grads(*(_add(x, y) for x, y in zip(grads, more, strict=True)))
        names = ("logits",) if len(tensors) == 1 else ("hidden", "weight", "bias")
        by_tensor = [None if grads is None else getattr(grads, name) for name in names[: len(tensors)]]
        return by_tensor, by_input


class Head(torch.autograd.Function):
    """(source tensors, inputs that want a gradient) -> (loss, *facts)."""

    @staticmethod
    def forward(ctx: Any, sweep: Sweep, loss: Loss | None, needs: tuple[bool, ...], *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        result = run(sweep, loss, needs)
        sweep.close()
        facts = result.facts
        outputs = [sweep.rows.put(facts[f]) for f in sweep.want.facts]
        ctx.mark_non_differentiable(*(x for f, x in zip(sweep.want.facts, outputs, strict=True) if f.name in CONSTANT))
        ctx.save_for_backward(*tensors[: len(sweep.source.tensors)])
        inputs = [] if loss is None else [loss.shaped(n, result.by_input.get(n)) for n in loss.wants_grad]
        overwritten = result.grads is not None and getattr(sweep.source, "inplace", False)
        kept = sweep.replace(without_tensors(sweep.source))
        ctx.held = Held(kept, needs, result.rest(), result.grads, inputs, overwritten)
        return (result.loss, *outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_loss: Tensor | None, *g_facts: Tensor | None) -> Any:
        tensors = ctx.saved_tensors  # looked at in any case: they must not have been written to
        by_tensor, by_input = ctx.held.pull(tensors, g_loss, g_facts)
        return (None, None, None, *by_tensor, *by_input)


def _add(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return x if y is None else y if x is None else x.add_(y)
