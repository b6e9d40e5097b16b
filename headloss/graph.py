"""The way into a graph: a call, taken apart into tensors and a recipe, and its record put together around the operator.

torch.compile traces what is here.  What it must not trace, planning and naming, is a constant of the graph, made by
`labels` from constants alone; so nothing here may depend on how many rows there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from headloss import ops  # noqa: F401  registers the operators
from headloss.heads import Grads
from headloss.keys import key_of
from headloss.metrics import Metric
from headloss.reads import Reads
from headloss.recipe import Described, describe, write
from headloss.record import Output, facts_from
from headloss.record import key_of as fact_key
from headloss.rehearsal import form, one_launch
from headloss.rows import Prepared
from headloss.segments import Segments
from headloss.sources import Linear, Logits, Source, Teacher
from headloss.term import Term

if TYPE_CHECKING:
    from headloss.objective import Objective


class Labels(NamedTuple):
    """All that names the parts of a result: constants of a graph."""

    recipe: str
    facts: tuple[Any, ...]  # their keys in the record
    terms: tuple[str, ...]  # those that are on
    metrics: tuple[tuple[str, str, str, int], ...]


def labels(objective: Objective | None, constants: tuple[Any, ...], **more: Any) -> Labels:
    visited = constants[0][0] == "Linear" or more["direct"]
    text = write(objective, constants, **more, visited=visited)
    if one_launch(text) and not visited:
        text = write(objective, constants, **more, visited=True)
    known = form(text)
    several = len({f.teacher for f in known.facts} - {None}) > 1
    return Labels(text, tuple(fact_key(f, several) for f in known.facts), known.terms, known.metrics)


def wanted(source: Any, teacher: Any) -> bool:
    """Whether a call becomes an operator: something traces, or there are shapes and no numbers, and it can."""
    if not isinstance(source, Logits | Linear):
        return False
    return (torch.compiler.is_compiling() or isinstance(source.tensors[0], FakeTensor)) and _fits(source, teacher)


def _fits(source: Source, teacher: Teacher | Mapping[str, Teacher] | None) -> bool:
    """Whether a call can be an operator: one that overwrites its logits, or looks into DTensors, runs as it is."""
    teachers = list(teacher.values()) if isinstance(teacher, Mapping) else [] if teacher is None else [teacher]
    for x in [source, *teachers]:
        for y in getattr(x, "tensors", ()):
            if hasattr(y, "device_mesh"):
                return False
    return not getattr(source, "inplace", False)


def call(
    objective: Objective,
    source: Source,
    targets: Tensor | Prepared | None,
    segments: Segments | None,
    teacher: Teacher | Mapping[str, Teacher] | None,
    rest: tuple[Any, ...],
    inputs: Mapping[str, Any],
    direct: bool,
) -> Output:
    """`Objective.__call__`, or with `direct` its `forward_backward`, as an operator."""
    found, constants = describe(source, targets, segments, teacher, rest, inputs, direct)
    known = objective.labels(objective.key, constants, rest[-1], direct)
    loss, terms, parts, *more = torch.ops.headloss.visit(found.tensors, found.sizes, known.recipe)
    values = dict(zip(known.terms, terms.detach().unbind()))
    for name in objective.names:
        if name not in values:
            values[name] = torch.zeros_like(loss, requires_grad=False)  # switched off
    numbers = list(parts.detach().unbind()) if known.metrics else []
    metrics, i = {}, 0
    for name, kind, per, count in known.metrics:
        metrics[name] = Metric(kind, tuple(numbers[i : i + count]), per)
        i += count
    n = len(known.facts)
    grads = Grads(**dict(zip(_gradients(source), more[n:]))) if direct else None
    facts = facts_from(list(more[:n]), list(known.facts))
    return Output(loss, {name: values[name] for name in objective.names}, metrics, facts, grads)


def _gradients(source: Source) -> tuple[str, ...]:
    return ("logits",) if len(source.tensors) == 1 else ("hidden", "weight", "bias")[: len(source.tensors)]


def read_facts(known: Labels, found: Described) -> Any:
    """`row_facts` as an operator."""
    _, _, _, *more = torch.ops.headloss.visit(found.tensors, found.sizes, known.recipe)
    return facts_from(list(more[: len(known.facts)]), list(known.facts))


_KEYS: dict[Any, str] = {}
_count = itertools.count()


def content_key(objective: Objective) -> str:
    """Equal for equal terms and metrics; one of its own for an objective whose functions read what may change."""
    said: list[Any] = [objective.backend]
    unknown: list[str] = []
    for name, call in objective.metrics:
        known = _term_key(call.fn) if isinstance(call.fn, Term) else call.reads()
        said.append((name, known.key))
        unknown += known.unknown
    calls = [c for _, c in objective.metrics] + [t.call(None, {}) for t in objective.terms.values()]
    said.append(tuple([(s.per_segment, s.returns) for c in calls for s in c.signatures]))
    for name, term in objective.terms.items():
        known = _term_key(term)
        said.append((name, known.key))
        unknown += known.unknown
    if unknown:
        return str(next(_count))
    if tuple(said) not in _KEYS:
        if len(_KEYS) >= 512:
            _KEYS.clear()
        _KEYS[tuple(said)] = str(next(_count))
    return _KEYS[tuple(said)]


def _term_key(term: Term) -> Reads:
    call = term.call(None, {}).reads()
    plain = tuple(
        [key_of(getattr(term, name)) for name in ("weight", "reduction", "length", "temperature", "teacher", "tail")]
    )
    facts = tuple([(name, key_of(x)) for name, x in term.facts.items()])
    return call._replace(key=(call.key, plain, facts))
