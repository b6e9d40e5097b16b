"""Checks of a call that need not wait for the device: names of inputs and teachers, counts, ids, values."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.deferred_checks import alarm, check_zero, readable
from headloss.derived_teachers import Top
from headloss.engine.layout import Marked
from headloss.facts import FACTS, LOGIT_SUMS, NEEDS_TARGET, Fact, Want
from headloss.options import is_number, shown
from headloss.sources import Source, Sparse, Teacher
from headloss.support import check_kind
from headloss.teachers import SPARSE, TOP
from headloss.term import Term, check_weight
from headloss.terms import Terms
from headloss.trace.call import Call, WrongValueError, inputs_of
from headloss.trace.function_reads import is_ours
from headloss.trace.gradient import check_constants
from headloss.trace.signature import CANDIDATES, UNNAMED, passed_names, suggest
from headloss.trace.trace import InputSpec, Trace

MORE = ("targets", "segments")  # what a loss may ask for besides facts and inputs


def check_inputs(
    terms: Iterable[tuple[str, Call]],
    given: Mapping[str, Any],
    reserved: Iterable[str],
    *,
    off: Iterable[str],
    metrics: Iterable[tuple[str, Call]],
    teachers: Container[str] = (),
) -> None:
    """Raise if a loss lacks an input that it needs, or if an input was passed that no loss asks for."""
    everything = [*((f"term {n!r}", n, c) for n, c in terms), *((f"metric {n!r}", None, c) for n, c in metrics)]
    known = [name for _, _, call in everything for name in (*call.input_names, call.share) if name]
    for name in given:
        if name not in known:
            for label, term, call in everything:
                if term is not None and name in call.signature.options:
                    made = f"hl.Term({call.signature.name}, {name}=...)"
                    raise TypeError(f"{name}: an option of {label}, which goes into the objective: {made}")
            asked = f"; they ask for {', '.join(dict.fromkeys(known)) or 'no inputs'}"
            near = suggest(name, [*known, *reserved])
            raise TypeError(f"{name}: no loss asks for this input{near or asked}")
    for label, term, call in everything:
        if term is not None and term in off:
            continue
        required = [p.key for s in call.signatures for p in s.parameters if p.kind == "input" and not p.optional]
        required += call.weight_names
        for wanted in required:
            if given.get(wanted) is None and wanted not in teachers:
                names = {p.takes or p.name: p.optional for s in call.signatures for p in s.parameters}
                every = [f"{name} (optional)" if optional else name for name, optional in names.items()]
                what = ", ".join([*every, *(f"{name} (row weight)" for name in call.weight_names)])
                passed = ", ".join(f"{n} (None)" if x is None else n for n, x in given.items()) or "none"
                others = [name for name in (*given, *FACTS, *MORE) if name != wanted]  # it may have been passed as None
                near = suggest(wanted, others, cutoff=0.8)  # old_logprob is not a misspelt logprob
                near = "; a loss gets facts such as logprob, not logits" if wanted in ("logits", "hidden") else near
                raise TypeError(
                    f"{wanted}: missing; {label} ({call.signature.name}) asks for {what}; inputs passed: {passed}{near}"
                )


def check_teachers(label: str, call: Call, teachers: Mapping[str, Teacher]) -> None:
    """Raise if a teacher that a call uses is missing, or of the wrong kind."""
    asked = [(f.name, f.teacher, f.name in SPARSE) for f in call.facts if f.teacher is not None]
    asked += [(p.name, p.teacher, True) for s in call.signatures for p in s.parameters if p.teacher is not None]
    asked = [(w, n, s) for w, n, s in asked if w not in TOP] + [
        (w, str(Top.named(n).of), False) for w, n, _ in asked if w == "teacher_top_logprob"
    ]
    for what, name, sparse in asked:
        if name == CANDIDATES and what == "teacher_logprob":
            raise ValueError(f"ids: {label} asks for {what!r}, which a sparse teacher provides but ids= does not")
        if name == CANDIDATES and name not in teachers:
            raise ValueError(f"ids: {label} asks for them; pass ids=, (rows, K) columns of each row")
        there = ", ".join(map(repr, passed_names(teachers))) or "none"
        if name not in teachers:
            if name != UNNAMED:
                near = suggest(str(name), teachers)
                raise ValueError(f"teacher: {label} uses {name!r}, which was not passed (passed: {there}){near}")
            which = "Term(teacher=...) must name one" if len(passed_names(teachers)) > 1 else "pass teacher=..."
            which += " or, for columns of your own, ids=..." * (what in ("ids_logprob", "ids_logit"))
            raise ValueError(f"teacher: {label} needs one for {what!r}; {which} (passed: {there})")
        if isinstance(teachers[name], Sparse) != sparse:
            kind = "a sparse teacher (hl.Sparse)" if sparse else "a dense teacher (hl.Logits or hl.Linear)"
            got = type(teachers[name]).__name__
            raise ValueError(f"teacher: {label} asks for {what!r}, which needs {kind}, got hl.{got}")


def check_asked(teachers: Mapping[str, Teacher], calls: Sequence[Call]) -> None:
    """Raise if a teacher was passed that no term or metric uses; terms that are switched off count too."""
    asked = {name for call in calls for name in call.teachers}
    asked |= {Top.named(name).of or name for name in asked if name.startswith("top=")}
    asked |= {name.removeprefix("whole=") for name in asked}
    for name in teachers:
        if name not in asked:
            if name == CANDIDATES:
                raise ValueError("ids: passed, but no term or metric asks for ids_logprob, ids_logit or ids")
            which = "one was passed" if name == UNNAMED else f"{name!r} was passed"
            seen = ", ".join(sorted(map(repr, asked))) or "none"
            raise ValueError(f"teacher: {which}, but terms and metrics use {seen}{suggest(name, asked)}")


def check_targets_wanted(wanted: list[Fact]) -> None:
    for fact in wanted:
        if fact.name in NEEDS_TARGET:
            raise ValueError(f"targets: needed by the fact {fact.name!r}; pass each row's target")


def call_weights(objective: Terms, weights: Mapping[str, float | Tensor]) -> dict[str, float | Tensor]:
    """The terms' weights for this call."""
    terms = objective.terms
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights: wanted weights by the names of terms, a dict, got {type(weights).__name__}")
    for name, weight in weights.items():
        if name not in terms:
            raise ValueError(f"weights: no term {name!r}; there are {', '.join(terms)}{suggest(name, terms)}")
        check_weight(f"weights[{name!r}]", weight)
    return {name: weights.get(name, term.weight) for name, term in terms.items()}


def check_no_lost_gradient(terms: Terms, inputs: Mapping[str, Any]) -> None:
    """`forward_backward` makes the gradients of the source's tensors alone."""
    asked = {name for term in terms.terms.values() for name in inputs_of(term.call(None, {}))}
    for name, x in inputs.items():
        x = x.value if isinstance(x, Marked) else x
        if name in asked and isinstance(x, Tensor) and x.requires_grad:
            raise ValueError(
                f"{name}: requires grad, but forward_backward makes gradients of the source's tensors alone; call the "
                f"objective and use loss.backward(), or pass {name}.detach()"
            )


def check_count(name: str, x: object) -> None:
    """Check for a whole number, at least 0.  A tensor on a device is checked there, so that nothing waits."""
    if x is None:
        return
    if isinstance(x, Tensor):
        if x.dtype in (torch.uint16, torch.uint32, torch.uint64):
            raise TypeError(f"{name}: {x.dtype} has few operations in torch; pass {name}.long()")
        if x.ndim or x.requires_grad or x.dtype == torch.bool or x.dtype.is_complex:
            got = f"one of shape {tuple(x.shape)}" if x.ndim else f"{x.dtype}" + ", requires grad" * x.requires_grad
            raise TypeError(f"{name}: wanted a number or a scalar tensor without grad, got {got}")
        if not readable(x):
            if x.device.type != "meta":
                good = x >= 0 if not x.dtype.is_floating_point else (x >= 0) & (x.frac() == 0)
                torch._assert_async(good, f"{name}: wanted a whole number, at least 0")
            return
        x = x.item()
    elif isinstance(x, bool) or not isinstance(x, int | float):
        raise TypeError(f"{name}: wanted a number or a scalar tensor, got {type(x).__name__}")
    if not (is_number(x) and x >= 0 and x % 1 == 0):
        raise ValueError(f"{name}: wanted a count (a whole number, at least 0), got {shown(x)}")


def check_belongs(call: Call, kind: str | None, shapes: Mapping[str, InputSpec], length: int | None = None) -> None:
    """Raise if values belong to neither rows nor segments, unless the function takes segments or a table: it must have
    dropped rows, so that the counts would be wrong."""
    apart = call.wants("segments") or any(shapes[n].kind == "whole" for n in call.input_names if n in shapes)
    if kind == "other" and not apart:
        got = "its values" if length is None else f"its {length} values"
        raise WrongValueError(
            f"{call.signature.name}: wanted one value per row, segment or pair; {got} belong to none of them.  "
            f"Give a row that should not count the value 0, or its target -100"
        )
    declared, found = call.signature.returns, "pair" if kind == "other" else kind
    if declared is not None and found is not None and declared != found:
        raise WrongValueError(f"{call.signature.name}.returns: is {declared!r}, but it returns one value per {found}")


def check_elements(want: Want) -> None:
    """With a support, a fact must be one of the softmax, and a divergence must be 0 where both probabilities are."""
    for fact in want.facts:
        if LOGIT_SUMS & set(FACTS[fact.name].sums):
            raise ValueError(
                f"support: {fact.name!r} is a fact of logits themselves, not of their softmax over kept columns; leave "
                f'it out, or give its term support="all"'
            )
    low = torch.full((1,), -2.0e4, dtype=torch.float64, device="cpu")
    for element in dict.fromkeys(f.element for f in want.facts if f.element is not None):
        if not is_ours(element.fn) and bool((element.value(low, low / 2) != 0).any()):
            raise ValueError(
                f"support: the divergence {element} is not 0 where both probabilities are, so columns that a row does "
                f'not keep would count; use hl.Term(..., support="all")'
            )


_FEWER = "top=, but a row may keep fewer columns"


def check_support(support: Any, source: Source, terms: Terms | None = None) -> None:
    """Check that a support fits the source, and that the terms of the call work with one."""
    check_kind(support)
    support.check_call(torch.Size(source.leading).numel(), source.vocab, source.device)
    if terms is None:
        return
    for name, term in terms.terms.items():
        if (term.targets is not None or term.top is not None) and term.support is None:
            what = "targets of its own, which a row may not keep" if term.targets is not None else _FEWER
            raise ValueError(f'support: term {name!r} has {what}; give it support="all"')
    for name, call in terms.metrics:
        if isinstance(call.fn, Term) and call.fn.top is not None:
            raise ValueError(
                f"support: metric {name!r} has {_FEWER}; leave it out of calls with a support (hl.row_facts has top= "
                f"without one)"
            )
    if terms.on_all and getattr(source, "inplace", False):
        raise ValueError(
            "inplace: the gradient of kept columns and that of the whole vocabulary cannot both overwrite the logits; "
            "use inplace=False"
        )


def check_spread(label: str, found: Trace, shapes: Mapping[str, InputSpec]) -> None:
    """Raise if a loss combines values per segment with values per row, even if there happen to be as many of both."""
    per_segment = [name for name, shape in shapes.items() if shape.kind == "segment"]
    mismatch = "must match" in found.reason or "to broadcast" in found.reason  # torch has two ways to say it
    if per_segment and found.joint is None and mismatch:
        name = per_segment[0]
        raise ValueError(
            f"{name}: has one value per segment, where {label} combines it with one per row; "
            f"pass segments.spread({name})"
        )


def check_gradients(calls: Mapping[str, Call], shapes: Mapping[str, InputSpec], traces: Mapping[str, Trace]) -> None:
    """Raise if an input requires grad but no loss gives it one; of untraced losses, `TermsOnRows.whole` finds out."""
    seen = {p.key for call in calls.values() for p in call.signature.parameters}
    given: dict[str, bool] = {}
    for term, call in calls.items():
        for name in call.input_names:
            if name in shapes and shapes[name].requires_grad:
                if name not in seen:
                    raise ValueError(f"{name}: requires grad, but no gradient flows to a row weight; pass it detached")
                given[name] = given.get(name, False) or name not in _constants(call, shapes, traces[term])
    check_constants([name for name, has in given.items() if not has], calls.values())


def _constants(call: Call, shapes: Mapping[str, InputSpec], found: Trace) -> set[str]:
    """Inputs that require grad but, going by the trace, get no gradient."""
    if found.joint is None:
        return set()
    wanted = [n for n in call.input_names if n in shapes and shapes[n].requires_grad]
    outputs: Any = found.joint.graph.output_node().args[0]  # value, cotangents of facts and then inputs, metrics
    of_inputs = outputs[1][len(outputs[1]) - len(wanted) :]
    return {n for n, g in zip(wanted, of_inputs, strict=True) if g is None}


@functools.lru_cache(64)
def _wanted_ids(label: str, vocab: int) -> str:
    return f"{label}: wanted ids in [0, {vocab}) or -1 for none"


@functools.lru_cache(64)
def _wrong_ids(label: str, vocab: int) -> tuple[str, str]:
    """The two errors that a kernel may report: wrong ids, and probabilities in place of their logarithms."""
    return (
        f"{_wanted_ids(label, vocab)}, but {{}} is among them",
        f"{label}: in a row with {{}} ids all {_PROBABILITIES}",
    )


def _are_probabilities(sparse: Sparse) -> Tensor:
    """Whether all log-probabilities at ids, padding excluded, lie in (0, 1], where no log-probability can.

    A kernel, which knows the rows that count, needs to find this in one of them: two or more ids whose values sum to 1.
    """
    held = sparse.ids >= 0
    here = held & (sparse.logprobs > 0) & (sparse.logprobs <= 1)
    return held.any() & (here == held).all()


_PROBABILITIES = (
    "log-probabilities are above 0, and none above 1; are these probabilities? pass their logarithms (weights of "
    "labels that are all above 1 can be a row_weight)"
)


def check_ids(label: str, sparse: Sparse, source: Source, launches: bool = False) -> tuple[Tensor | None, int]:
    """Raise for ids that are not columns, and for probabilities passed as log-probabilities.

    If the next launch reads all ids anyway (`launches`), it checks them on the GPU, with what this returns.
    """
    ids, vocab = sparse.ids, source.vocab
    if launches and ids.is_cuda:
        return alarm(ids.device, *_wrong_ids(label, vocab)), vocab
    wanted = _wanted_ids(label, vocab)
    if readable(ids):
        low, high = map(int, ids.aminmax()) if ids.numel() else (-1, -1)
        if low < -1 or high >= vocab:
            n, k = ((ids < -1) | (ids >= vocab)).flatten(0, -2).nonzero()[0].tolist()
            got = f"row {n} has {int(ids.flatten(0, -2)[n, k])}"
            raise ValueError(f"{wanted}, but {got}")
        if ids.numel() and float(sparse.logprobs.detach().max()) > 0 and bool(_are_probabilities(sparse)):
            raise ValueError(f"{label}: all {_PROBABILITIES}")
    elif ids.device.type != "meta":
        check_zero(
            f"{label}: an id is out of range, or log-probabilities are probabilities",
            (((ids < -1) | (ids >= vocab)).sum(), f"{wanted}, but {{}} are neither"),
            (_are_probabilities(sparse), f"{label}: all {_PROBABILITIES}"),
        )
    return None, vocab
