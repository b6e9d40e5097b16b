"""Find the plan of a call in the cache, or make a new one.

Two calls share a plan if everything except sizes and values is equal; we say that they have the same form.  The lookup
takes two steps, because we must know which functions a call runs before we can compare what those functions read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.bounded_cache import store
from headloss.derived_teachers import Top
from headloss.engine.arguments import CallArguments
from headloss.engine.autograd_contract import refuse_transforms
from headloss.engine.checks import call_weights, check_support
from headloss.engine.layout import PerRow, Reading, count_pairs, lay_out, layout, readings
from headloss.engine.plan import Calls, Plan, choose_calls, make_plan, plain_source, suited
from headloss.engine.teachers import name_teachers
from headloss.prepared import Prepared
from headloss.routed import Routed, routes_of
from headloss.segments import Segments, check_dense, check_device
from headloss.sources import Logits, Source, Sparse, Teacher
from headloss.terms import Terms
from headloss.trace.cache_keys import is_plain
from headloss.trace.call import CachedReads
from headloss.trace.function_reads import defaults, is_ours
from headloss.trace.signature import CLASSES

_MOST = 64  # forms of an objective: more would mean that something changes with every call


class Form(NamedTuple):
    """What calls of one form share, and their plans, keyed by what their functions read."""

    calls: Calls
    foreign: tuple[CachedReads, ...]  # those with users' functions, which may read something else in every call
    own: tuple[Any, ...]  # functions of ours, of which only the defaults of options can change
    plans: dict[Any, tuple[Plan, Any]]  # with those defaults, kept alive so that no id is reused

    def read(self) -> tuple[tuple[Any, ...], Any]:
        """A key of what its functions read now, and the defaults of options that the key stands for."""
        held = [x for fn in self.own for x in (fn.__kwdefaults__ or {}).values()]
        marks = [call.interned() for call in self.foreign] if self.foreign else ()
        return (*marks, *map(id, held)), held


class FoundPlan(NamedTuple):
    """The plan of a call, and how it was found."""

    plan: Plan
    arguments: CallArguments  # checked: plain tensors, teachers by name, inputs laid out
    form: Form
    read: Any
    held: Any


class Plans:
    """The plans of an objective, and facts about it that calls need again and again."""

    def __init__(self, terms: Terms) -> None:
        self.forms: dict[Any, Form] = {}
        self.fast_paths: dict[Any, tuple[Form, dict[Any, Any]]] = {}  # see `fast_path.py`
        self.readings = dict.fromkeys(CLASSES.values(), Reading()) | readings(terms.terms, terms.metrics)
        # inputs that some function declares to have one value per row
        self.per_row = frozenset(n for n, r in self.readings.items() if r.row and not r.segment)
        self.weights = {name: term.weight for name, term in terms.terms.items()}
        self.off = switched_off(self.weights)
        # temperatures of terms and of their facts
        temperatures = {T for t in terms.every_term for T in (t.temperature, *(T for _, T in t.facts.values()))}
        self.temperatures = temperatures - {None}
        self.divergences = tuple(t for t in terms.every_term if t.has_foreign_divergence)


def plans_of(terms: Terms) -> Plans:
    if terms.plans is None:
        terms._set(plans=Plans(terms))
    found: Plans = terms.plans
    return found


def switched_off(weights: Mapping[str, float | Tensor]) -> tuple[str, ...]:
    return tuple([name for name, weight in weights.items() if not isinstance(weight, Tensor) and weight == 0])


def find(terms: Terms, arguments: CallArguments) -> FoundPlan:
    """The plan of a call, its arguments checked, and how the plan was found."""
    plans = terms.plans or plans_of(terms)
    refuse_transforms(arguments, plans.weights)
    source, targets, segments, teacher, options, inputs, support = arguments
    if type(source) is not Logits or type(source.logits) is not Tensor:
        source = plain_source(source)
    if segments is None and type(targets) is Prepared:
        segments = targets.segments
    if support is not None:
        check_support(support, source, terms)
    if segments is not None:
        if type(segments) is not Segments:
            hint = "; make them with hl.Segments.from_cu_seqlens, from_ids, from_position_ids or from_batch"
            raise TypeError(f"segments: wanted hl.Segments, got {type(segments).__name__}{hint}")
        if type(targets) is not Prepared:
            segments = segments.fitted(source.leading, source.device)
            if isinstance(targets, Tensor) and targets.device == source.device:
                check_device("segments", segments.ids, source.device)
    if type(options.host_read) is not bool:
        raise TypeError(f"host_read: wanted True or False, got {type(options.host_read).__name__}")
    off = switched_off(call_weights(terms, options.weights)) if options.weights else plans.off
    teachers: Mapping[str, Teacher] = {}
    if teacher is not None:
        teachers = name_teachers(teacher, source)
        if any(isinstance(x, Routed) for x in teachers.values()):
            inputs = {**inputs, **_routes(teachers, plans)}
    key, given = form_of(terms, plans, source, (targets is None, support is None), segments, teachers, inputs, off)
    form = plans.forms.get(key)
    if form is None:
        form = _new_form(choose_calls(terms, off, teachers, inputs, source, segments))
    read, held = form.read()
    found = form.plans.get(read)
    if found is None:
        laid = {n: shape for n, (_, shape) in lay_out(plans.readings, inputs, source, segments).items()}
        plan = make_plan(terms, form.calls, off, source, targets is None, segments, teachers, laid, support is not None)
        if form.read()[0] != read:  # another thread changed it: the plan may be of either, and serves this call
            read = (object(),)
        found = store(form.plans, read, (plan, held), _MOST)
        store(plans.forms, key, form, _MOST)
    plan = found[0]
    if plan.in_parts is not None:
        plan = suited(plan, source)
    laid_out = CallArguments(source, targets, segments, teachers, options, given, support)
    return FoundPlan(plan, laid_out, form, read, held)


def _routes(teachers: Mapping[str, Any], plans: Plans) -> dict[str, Any]:
    """A row weight for each routed teacher, for terms that use it: 0 in rows that have none."""
    found = {routes_of(n): PerRow(x.route >= 0) for n, x in teachers.items() if isinstance(x, Routed)}
    for name in found:
        plans.readings.setdefault(name, Reading(row=(name,)))
    return found


def form_of(
    terms: Terms,
    plans: Plans,
    source: Source,
    without: tuple[bool, ...],  # whether there are no targets, and no support
    segments: Segments | None,
    teachers: Mapping[str, Teacher],
    inputs: Mapping[str, Any],
    off: tuple[str, ...],
) -> tuple[Any, dict[str, Tensor]]:
    """The key of a call's form, and its inputs as tensors."""
    logits = type(source) is Logits
    x = source.logits if logits else source.hidden  # type: ignore[union-attr]
    device = x.device
    key: list[Any] = [
        logits, x.dtype, device, source.shard is None, without, off, *defaults(),
        None if segments is None else segments.group is None,
    ]  # fmt: skip
    if not logits:
        key += (source.gemm_dtype, source.logits_dtype)  # type: ignore[union-attr]
    if plans.temperatures:  # a term's temperature that equals the source's counts as none
        T = source.temperature
        key.append(T if not isinstance(T, Tensor) and T in plans.temperatures else None)
    for term in plans.divergences:
        key.append(term.content())
    for name, teacher in teachers.items():
        if isinstance(teacher, Top):
            key.append(name)
        elif isinstance(teacher, Sparse):
            key += (name, Sparse, teacher.ids.shape[-1])
        else:
            key += (name, type(teacher), teacher.vocab < source.vocab)
    given: dict[str, Tensor] = {}
    if not inputs:
        return tuple(key), given
    grad, leading = torch.is_grad_enabled(), x.shape[:-1]
    # If an input could be per row only by its number of values, a function or the caller has to declare its layout.
    unambiguous = len(leading) > 1 or not (
        leading[0] == source.vocab
        or (segments is not None and (leading[0] == segments.num_segments or segments.group is not None))
    )
    plain, known = "pairs" not in inputs, plans.readings
    for name, value in inputs.items():
        if value is None or name not in known:
            key += (name, value is None)
            continue
        marked = type(value) is PerRow
        value_ = value.value if marked else value
        if plain and type(value_) is Tensor:
            check_dense(name, value_)
            of_rows = value_.shape == leading and value_.device == device
            if (of_rows and (unambiguous or marked or name in plans.per_row)) or (not value_.ndim and not marked):
                key += (name, marked, value_.dtype, not value_.ndim, grad and value_.requires_grad)
                given[name] = value_
                continue
        try:
            pairs = count_pairs(inputs)
            laid = layout(name, value, source.leading, segments, source.vocab, pairs, known[name], source.device)
        except (TypeError, ValueError):
            choose_calls(terms, off, teachers, inputs, source, segments)  # raises first if something is missing
            raise
        given[name], shape = laid
        key += (name, type(value), shape)
    return tuple(key), given


def _new_form(calls: Calls) -> Form:
    foreign: list[CachedReads] = []
    own: list[Any] = []
    for call in (*calls.terms.values(), *(call for _, call in calls.metrics)):
        elements = [f.element for f in call.signature.facts if f.element is not None]
        functions = [*call.functions, *(x.fn for x in elements)]
        options = [*call.options.values(), *(x for e in elements for x in e.options.values())]
        if all(map(is_ours, functions)) and all(map(is_plain, options)):
            own += [fn for fn in functions if fn.__code__.co_kwonlyargcount]
        else:
            foreign.append(CachedReads(call))
    return Form(calls, tuple(foreign), tuple(dict.fromkeys(own)), {})
