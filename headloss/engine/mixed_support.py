"""Calls with `support=` in which some terms use the whole vocabulary: two calls on a source, merged into one record."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from headloss.engine.arguments import CallArguments
from headloss.engine.checks import call_weights
from headloss.engine.lookup import plans_of, switched_off
from headloss.engine.teachers import name_teachers
from headloss.record import Grads, Output, add_grads
from headloss.terms import Terms


def calls_of(terms: Terms, arguments: CallArguments) -> Iterator[tuple[Terms, CallArguments]]:
    """The call on kept columns, with all metrics, and the one on the whole vocabulary if any of its terms is on."""
    options, weights = arguments.options, call_weights(terms, arguments.options.weights or {})
    off = switched_off(weights)
    kept = {**weights, **dict.fromkeys(terms.on_all, 0.0)}
    yield terms, arguments._replace(options=options._replace(weights=kept))
    if all(name in off for name in terms.on_all):
        return
    bare = terms.without_metrics()
    known, asked = plans_of(terms).readings, plans_of(bare).readings
    teachers = None if arguments.teacher is None else name_teachers(arguments.teacher, arguments.source)
    if teachers is not None:
        named = {name for term in bare.terms.values() for name in term.call(None, teachers).teachers}
        teachers = {name: x for name, x in teachers.items() if name in named}
    whole = {name: x if name in terms.on_all else 0.0 for name, x in weights.items()}
    yield (
        bare,
        arguments._replace(
            options=options._replace(weights=whole),
            teacher=teachers,
            inputs={n: x for n, x in arguments.inputs.items() if n in asked or n not in known},
            support=None,
        ),
    )


def weight_grad_of(outputs: list[Output]) -> Tensor | None:
    """The weight's gradient that the call on the whole vocabulary has made, and no backward has scaled yet.

    A backward starts from the sum of both losses, so the call on kept columns can add its gradient to this one: there
    is no second gradient of the weight's size, and none that autograd would add.
    """
    node = outputs[0].loss.grad_fn if outputs else None
    made = getattr(node, "grads", None)
    if not isinstance(made, Grads):
        return None
    _, _, result, into, *_ = node.kept  # type: ignore[union-attr]  # see `run.HeadFunction`
    return None if result.normaliser is not None or into is not None else made.weight


def merged(terms: Terms, kept: Output, whole: Output | None = None) -> Output:
    """Both records as one: facts and metrics of the kept columns, terms and their metrics of both."""
    if whole is None:
        return kept
    values = {name: (whole if name in terms.on_all else kept).terms[name] for name in terms.names}
    grads = None
    if kept.grads is not None and whole.grads is not None:
        grads = add_grads(whole.grads, kept.grads)
    return Output(kept.loss + whole.loss, values, {**kept.metrics, **whole.metrics}, kept.facts, grads)
