"""A call under torch.compile: it becomes the operator of `ops`, whose tensors are put together as an `Output`.

torch.compile traces this file.  Planning and naming, which it must not trace, happen in `constants_of`, whose result
(a recipe and names from its result spec) is a constant of the graph; so nothing here may depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from headloss.derived_teachers import AtIds, Top
from headloss.engine.arguments import CallArguments
from headloss.engine.run import names_of
from headloss.graph import ops  # noqa: F401  registers the operators
from headloss.graph.content import Traits
from headloss.graph.recipe import CallParts, read_recipe, split_call, write_recipe
from headloss.graph.spec import in_one_launch, result_spec
from headloss.metrics import Metric
from headloss.record import Grads, Output, facts_from
from headloss.routed import Routed
from headloss.sources import Linear, Logits, Source, Teacher
from headloss.terms import Terms


class Constants(NamedTuple):
    """The recipe of a call and the names of the parts of its result, which are constants of a graph."""

    recipe: str
    facts: tuple[Any, ...]  # their keys in the record
    terms: tuple[str, ...]  # those that are not switched off
    metrics: tuple[tuple[str, str, str, int], ...]  # see `spec.ResultSpec`


class Compilable(Protocol):
    """What a graph needs from an objective.  The methods' results are constants of the graph, one per `key`."""

    names: tuple[str, ...]
    key: str
    traits: Traits

    def constants_of(self, key: str, constants: tuple[Any, ...], host_read: bool, direct: bool) -> Constants: ...
    def is_portable(self, key: str) -> bool: ...


def constants_of(of: Terms | None, constants: tuple[Any, ...], **more: Any) -> Constants:
    # a user's own divergence may read something else by the time the backward runs
    changes = of is not None and any(t.has_foreign_divergence for t in of.every_term)
    visited = constants[0][0] == "Linear" or more["direct"] or changes
    recipe = read_recipe(write_recipe(of, constants, **more, visited=visited))
    if not visited and in_one_launch(recipe, of):
        recipe = read_recipe(write_recipe(of, constants, **more, visited=True))
    spec = result_spec(recipe, terms=of)
    return Constants(recipe.text, spec.fact_keys, spec.terms, spec.metrics)


def is_operator(source: Any, teacher: Any, unknown: tuple[str, ...] = ()) -> bool:
    """Whether a call becomes an operator: it can, and a graph is being traced or the tensors are fake.

    Under torch.compile, functions that read mutable state (`unknown`) rule it out: a graph applies side effects last,
    so such a function could read a value from before an update.
    """
    if not isinstance(source, (Logits, Linear)):
        return False
    first = source.logits if isinstance(source, Logits) else source.hidden
    if not (torch.compiler.is_compiling() or isinstance(first, FakeTensor)):
        return False
    return not (unknown and torch.compiler.is_dynamo_compiling()) and _fits(source, teacher)


def _fits(source: Source, teacher: Teacher | Mapping[str, Teacher] | None) -> bool:
    """Whether a call can be an operator: one that overwrites its logits or takes DTensors runs uncompiled."""
    for x in [source, *(teacher.values() if isinstance(teacher, Mapping) else [teacher])]:
        if isinstance(x, (Top, AtIds, Routed)):
            return False
        for y in getattr(x, "tensors", ()):
            if hasattr(y, "device_mesh"):
                return False
    return not getattr(source, "inplace", False)


def call(objective: Compilable, arguments: CallArguments, direct: bool) -> Output:
    """`Objective.__call__`, or with `direct` its `forward_backward`, as an operator."""
    number = None if objective.is_portable(objective.key) else objective.traits.number
    parts, constants = split_call(arguments, direct, objective.traits, number)
    known = objective.constants_of(objective.key, constants, arguments.options.host_read, direct)
    loss, terms, numbers, *more = torch.ops.headloss.visit(parts.tensors, parts.sizes, known.recipe)
    values = dict(zip(known.terms, terms.detach().unbind()))
    for name in objective.names:
        if name not in values:
            values[name] = torch.zeros_like(loss, requires_grad=False)  # switched off
    sums = list(numbers.detach().unbind()) if known.metrics else []
    metrics, i = {}, 0
    for name, kind, per, count in known.metrics:
        metrics[name] = Metric(kind, tuple(sums[i : i + count]), per)
        i += count
    n = len(known.facts)
    grads = Grads(**dict(zip(names_of(arguments.source.tensors), more[n:]))) if direct else None
    facts = facts_from(list(more[:n]), list(known.facts))
    return Output(loss, {name: values[name] for name in objective.names}, metrics, facts, grads)


def read_facts(known: Constants, parts: CallParts) -> Any:
    """`row_facts` as an operator."""
    _, _, _, *more = torch.ops.headloss.visit(parts.tensors, parts.sizes, known.recipe)
    return facts_from(list(more[: len(known.facts)]), list(known.facts))
