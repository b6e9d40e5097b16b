"""One call: find its plan, bind it to the arguments, run it with or without autograd, and report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.engine.arguments import CallArguments
from headloss.engine.bind import bind
from headloss.engine.both import merged, parts_of, weight_grad_of
from headloss.engine.guides import RoutedRows
from headloss.engine.into import check_into
from headloss.engine.lookup import find_plan
from headloss.engine.loss import TermsOnRows
from headloss.engine.plan import Plan
from headloss.engine.run import Head, facts_of, final_grads, run
from headloss.engine.sweeps import Sweep
from headloss.late import check_pending
from headloss.record import Facts, Grads, Output
from headloss.sources import Logits, Source
from headloss.terms import Terms


def evaluate(terms: Terms, arguments: CallArguments, direct: bool) -> Output:
    """`Objective.__call__`, or with `direct` its `forward_backward`."""
    check_pending()
    if arguments.support is not None and terms.on_all:
        kept, *whole = parts_of(terms, arguments)
        on_all = [_evaluate(*part, direct) for part in whole]
        return merged(terms, _evaluate(*kept, direct, weight_grad_of(on_all)), *on_all)
    return _evaluate(terms, arguments, direct)


def _evaluate(terms: Terms, arguments: CallArguments, direct: bool, weight_grad: Tensor | None = None) -> Output:
    """`weight_grad`: where a gradient of the weight that is made now may be added."""
    recorded = torch.is_grad_enabled()
    if (direct or recorded) and type(arguments.source) is not Logits:
        check_into(arguments.source)
    plan, arguments = find_plan(terms, arguments)
    sweep, loss = bind(plan, arguments)
    if weight_grad is not None:
        sweep.weight_grad = weight_grad
    tensors = sweep.source.tensors
    if direct:
        needs = (True,) * len(tensors)
    elif recorded:
        needs = tuple([x.requires_grad for x in tensors])
        if True in needs or plan.wants_grad:
            if plan.wants_grad:
                tensors += tuple([arguments.inputs[name] for name in plan.wants_grad])
            value, *blocks = Head.apply(sweep, loss, needs, *tensors)
            return _report(terms, plan, loss, value, _facts(sweep, plan, blocks, loss.visited))
    else:
        needs = (False,) * len(tensors)
    with torch.no_grad():
        result = run(sweep, loss, needs)
        grads = _cast(final_grads(sweep, result, needs), sweep.source) if direct else None
    facts = _facts(sweep, plan, result.blocks(plan.want), getattr(result, "visited", None))
    return _report(terms, plan, loss, result.loss, facts, grads)


def _facts(sweep: Sweep, plan: Plan, blocks: Sequence[Tensor], visited: Any) -> Facts:
    """The facts of a call, 0 where a teacher says nothing of a row: a kernel leaves what it found there."""
    if sweep.guides and visited is not None and any(isinstance(x, RoutedRows) for x in sweep.guides.values()):
        every, values = slice(0, sweep.rows.count), visited.of(blocks).fact_values
        hidden = [sweep.guides[f.teacher].hides(f.name, every) if f.teacher else None for f in plan.want.facts]
        blocks = [x if mask is None else x.masked_fill(mask, 0) for x, mask in zip(values, hidden, strict=True)]
        visited = None
    return facts_of(sweep.rows, plan.want, blocks, visited)


def _report(
    terms: Terms, plan: Plan, loss: TermsOnRows, value: Tensor, facts: Facts, grads: Grads | None = None
) -> Output:
    values = loss.values
    if plan.off:
        zero = torch.zeros((), dtype=value.dtype, device=value.device)
        values = {name: zero if name in plan.off else values[name] for name in terms.names}
    return Output(value, values, loss.metrics, facts, grads)


def _cast(grads: Grads, source: Source) -> Grads:
    """In the dtypes of the source's tensors."""
    if grads.logits is not None:
        return grads  # made so
    tensors = [getattr(source, name, None) for name in Grads._fields]
    return Grads(*(g if g is None or x is None else g.to(x.dtype) for g, x in zip(grads, tensors, strict=True)))
