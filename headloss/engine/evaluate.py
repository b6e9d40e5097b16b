"""Run one call: find its plan, bind it to the arguments, run it with or without autograd, and return the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.deferred_checks import check_pending
from headloss.engine import heads
from headloss.engine.arguments import CallArguments
from headloss.engine.bind import bind
from headloss.engine.bound_teachers import RoutedRows
from headloss.engine.fast_call import FastCall
from headloss.engine.fast_path import FastPath, find_fast_path, key_of, make_fast_path, needs_of
from headloss.engine.inplace_check import check_inplace
from headloss.engine.lookup import find
from headloss.engine.mixed_support import calls_of, merged, weight_grad_of
from headloss.engine.one_launch import later_values
from headloss.engine.plan import Plan
from headloss.engine.run import HeadFunction, SweptCall, facts_of, final_grads, run
from headloss.engine.sweeps import Sweep
from headloss.engine.weight_grad_into import check_weight_grad_into
from headloss.record import Facts, Grads, Output
from headloss.sources import Logits, Source
from headloss.terms import Terms


def evaluate(terms: Terms, arguments: CallArguments, direct: bool) -> Output:
    """`Objective.__call__`, or with `direct` its `forward_backward`."""
    if direct and torch.is_inference_mode_enabled():  # autograd runs through the losses, and makes no graph there
        with torch.inference_mode(False), torch.no_grad():
            return evaluate(terms, arguments, direct)
    check_pending()
    if arguments.support is not None and terms.on_all:
        kept, *whole = calls_of(terms, arguments)
        on_all = [_evaluate(*part, direct) for part in whole]
        return merged(terms, _evaluate(*kept, direct, weight_grad_of(on_all)), *on_all)
    return _evaluate(terms, arguments, direct)


def _evaluate(terms: Terms, arguments: CallArguments, direct: bool, weight_grad: Tensor | None = None) -> Output:
    """`weight_grad`: another call's gradient of the weight, to which this call may add its own."""
    recorded = torch.is_grad_enabled()
    key = key_of(arguments, direct)
    path = find_fast_path(terms.plans, key, arguments)
    if path is None:
        if (direct or recorded) and type(arguments.source) is not Logits:
            check_weight_grad_into(arguments.source)
        found = find(terms, arguments)
        plan, arguments = found.plan, found.arguments
        path = make_fast_path(terms.plans, key, found)
    if path is not None:
        return _run_fast_path(terms, path, arguments, direct)
    wanted = True in needs_of(arguments.source.tensors, direct)
    if wanted:
        check_inplace(arguments)  # before any collective
    sweep, loss = bind(plan, arguments, wanted or (recorded and bool(plan.wants_grad)))
    if weight_grad is not None:
        sweep.weight_grad = weight_grad
    tensors = sweep.source.tensors
    needs = needs_of(tensors, direct)
    if not direct and (True in needs or (recorded and plan.wants_grad)):
        if plan.wants_grad:
            tensors += tuple([arguments.inputs[name] for name in plan.wants_grad])
        value, *blocks = HeadFunction.apply(SweptCall(sweep, loss, needs), *tensors)
        facts = _facts(sweep, plan, blocks, loss.visited)
        return Output(value, _every(terms, plan, loss.values, value), loss.metrics, facts)
    with torch.no_grad():
        result = run(sweep, loss, needs)
        grads = _cast(final_grads(sweep, result, needs), sweep.source) if direct else None
    facts = _facts(sweep, plan, result.blocks(plan.want), getattr(result, "visited", None))
    assert result.loss is not None
    return Output(result.loss, _every(terms, plan, loss.values, result.loss), loss.metrics, facts, grads)


def _run_fast_path(terms: Terms, path: FastPath, arguments: CallArguments, direct: bool) -> Output:
    """Run a call on its fast path: one launch over all its logits."""
    if heads.on_other_device(path.device):
        with torch.cuda.device(path.device):
            return _run_fast_path(terms, path, arguments, direct)
    call, made = FastCall(path, arguments), None
    if not direct and path.grad:
        loss, *blocks = HeadFunction.apply(call, *arguments.source.tensors)
    else:
        with torch.no_grad():
            loss, made = call.run()
        blocks = [x.detach() for x in call.visited.blocks]
    plan, metrics = path.plan, call.metrics()
    values = later_values(plan.weights, call.sums)
    if plan.off:
        values = _every(terms, plan, values, loss)
    call.strip()
    return Output(loss, values, metrics, facts_of(path, plan.want, blocks, call.visited), made if direct else None)


def _facts(sweep: Sweep, plan: Plan, blocks: Sequence[Tensor], visited: Any) -> Facts:
    """The facts of a call, with 0 in rows that have no routed teacher: a kernel leaves some value there."""
    if (
        sweep.teacher_rows
        and visited is not None
        and any(isinstance(x, RoutedRows) for x in sweep.teacher_rows.values())
    ):
        every, values = slice(0, sweep.rows.count), visited.of(blocks).fact_values
        hidden = [sweep.teacher_rows[f.teacher].hides(f.name, every) if f.teacher else None for f in plan.want.facts]
        blocks = [x if mask is None else x.masked_fill(mask, 0) for x, mask in zip(values, hidden, strict=True)]
        visited = None
    return facts_of(sweep.rows, plan.want, blocks, visited)


def _every(terms: Terms, plan: Plan, values: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    """The terms' values, with 0 for those that are switched off."""
    if not plan.off:
        return values
    zero = torch.zeros((), dtype=loss.dtype, device=loss.device)
    return {name: zero if name in plan.off else values[name] for name in terms.names}


def _cast(grads: Grads, source: Source) -> Grads:
    """The gradients in the dtypes of the source's tensors."""
    if grads.logits is not None:
        return grads  # already in that dtype
    tensors = [getattr(source, name, None) for name in Grads._fields]
    return Grads(*(g if g is None or x is None else g.to(x.dtype) for g, x in zip(grads, tensors, strict=True)))
