"""One call: find its plan, bind it to the arguments, run it with or without autograd, and report."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headloss.engine.again import recall, remember
from headloss.engine.arguments import CallArguments
from headloss.engine.bind import bind
from headloss.engine.loss import TermsOnRows
from headloss.engine.plan import Plan, make_plan, plain_source
from headloss.engine.run import Head, final_grads, run
from headloss.late import check_pending
from headloss.record import Facts, Grads, Output
from headloss.sources import Source
from headloss.terms import Terms


def evaluate(terms: Terms, arguments: CallArguments, direct: bool) -> Output:
    """`Objective.__call__`, or with `direct` its `forward_backward`."""
    check_pending()
    form, known = recall(terms, arguments)
    if known is not None:
        return known.call(terms, arguments, direct)
    arguments = arguments._replace(source=plain_source(arguments.source))
    plan = make_plan(terms, arguments)
    sweep, loss = bind(terms, plan, arguments)
    remember(terms, form, plan, sweep.backend)
    source, grads = plan.source, None
    needs = tuple(direct or (x.requires_grad and torch.is_grad_enabled()) for x in source.tensors)
    if not direct and (any(needs) or loss.wants_grad):
        given = [plan.inputs[name][0] for name in loss.wants_grad]
        value, *facts = Head.apply(sweep, loss, needs, *source.tensors, *given)
        return _report(terms, plan, loss, value, facts)
    with torch.no_grad():
        result = run(sweep, loss, needs)
        if direct:
            made = zip(final_grads(sweep, result, needs), _tensors(source), strict=True)
            grads = Grads(*(g if g is None or x is None else g.to(x.dtype) for g, x in made))
    facts = [sweep.rows.put(result.facts[f]) for f in sweep.want.facts]
    return _report(terms, plan, loss, result.loss, facts, grads)


def _report(
    terms: Terms, plan: Plan, loss: TermsOnRows, value: Tensor, facts: Sequence[Tensor], grads: Grads | None = None
) -> Output:
    zero = torch.zeros((), dtype=value.dtype, device=value.device) if plan.off else value
    values = {name: zero if name in plan.off else loss.values[name] for name in terms.names}
    return Output(value, values, loss.metrics, Facts(dict(zip(plan.want.facts, facts, strict=True))), grads)


def _tensors(source: Source) -> tuple[Tensor | None, ...]:
    """The source's tensors in the order of their gradients."""
    return tuple(getattr(source, name, None) for name in Grads._fields)
