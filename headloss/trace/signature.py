"""Read what a loss asks for from its signature: the names of its parameters choose what is injected.

    positional        a fact, `segments`, `targets`, or an input of the call; with a default it is optional
    keyword-only      an option of the loss

A name that nothing provides and an input that nothing asks for raise with a suggestion: a typo must never train
silently.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from headloss.facts import FACTS, Fact
from headloss.options import parameters_of
from headloss.teachers import COMPARING as COMPARING
from headloss.teachers import SPARSE, TOP
from headloss.trace.function_reads import is_ours

# Arguments of a term, whose names no option of a loss may have.
RESERVED = frozenset((
    "weight", "reduction", "reduction_segments", "temperature", "length", "row_weight", "facts", "inputs", "targets",
    "teacher", "tail", "top", "pure", "support",
))  # fmt: skip

# Arguments of a call itself: an input with one of these names could never be passed.
CALL_NAMES = (
    "teacher", "targets", "segments", "num_items", "num_segments", "weights", "grad_scale", "host_read", "source",
    "self", "ids", "support",
)  # fmt: skip

UNNAMED = "teacher"  # the name of a teacher that was passed without one
CANDIDATES = (
    "ids="  # our name for candidates, the columns that `ids=` passes without a teacher; see `engine.derived_inputs`
)
TEACHER_INPUTS = ("teacher_ids", "teacher_logprob")  # of a sparse teacher, (rows, K)


def passed_names(teachers: Iterable[str]) -> list[str]:
    """The teachers that the caller passed, without those made for the call."""
    return [x for x in teachers if x != CANDIDATES and not x.startswith(("targets=", "top=", "whole=", "classes@"))]


CLASSES = {"class_weight": "class_weight of each target", "class_mean": "mean of class_weight"}


def classes_of(temperature: float | None) -> str:
    """The name of the teacher made from class weights, the same in every row; see `engine.derived_inputs`."""
    return f"classes@{temperature}"


def targets_of(name: str) -> str:
    """The name of the teacher made from a term's own targets; see `engine.derived_inputs`."""
    return f"targets={name}"


def top_of(k: int, teacher: str | None = None) -> str:
    """The name of the teacher made from a row's k likeliest columns, with `teacher`'s values at those."""
    return f"top={k}" if teacher is None else f"top={k} of {teacher}"


def share_of(reduction: str, length: float | None, name: str) -> str:
    """The name of the input that says how much each row counts in a reduction over other segments than the call's."""
    return f"{reduction}{'' if length is None else f' / {length}'} over {name}"


def counts_of(name: str) -> str:
    """The name of the row weight that is 0 where a term's own target is -100."""
    return f"{name} that count"


ALIASES = {  # what other libraries call our inputs
    "advantages": "advantage",
    "old_logprobs": "old_logprob",
    "old_log_prob": "old_logprob",
    "old_log_probs": "old_logprob",
    "old_per_token_logps": "old_logprob",
    "ref_logprobs": "ref_logprob",
    "ref_log_prob": "ref_logprob",
    "ref_log_probs": "ref_logprob",
    "ref_per_token_logps": "ref_logprob",
    "labels": "targets",
    "target": "targets",
    "mean": "token_mean",
    "sum": "token_sum",
    "logp": "logprob",
    "log_prob": "logprob",
    "cu_seqlens": "segments",
    "num_items_in_batch": "num_items",
}


class Parameter(NamedTuple):
    name: str
    kind: str  # "fact", "segments", "targets" or "input"
    optional: bool
    fact: Fact | None = None
    teacher: str | None = None  # the teacher whose input it is
    takes: str | None = None  # the input of the call that it takes, if that has another name

    @property
    def picked(self) -> bool:
        """Whether it is a fact at a term's own target, one id per row: (R, 1) becomes (R,)."""
        return self.name != "ids_logprob" and self.fact is not None and (self.fact.teacher or "").startswith("targets=")

    @property
    def key(self) -> str:
        return input_key(self)


def input_key(parameter: Parameter) -> str:
    """The input's name in the call; those of a teacher end in its name, so that teachers do not clash."""
    name = parameter.takes or parameter.name
    return name if parameter.teacher is None else f"{name} of {parameter.teacher}"


class Signature(NamedTuple):
    name: str
    parameters: tuple[Parameter, ...]
    options: Mapping[str, Any]  # keyword-only parameters and their defaults
    per_segment: tuple[str, ...] | None = None  # inputs with one value per segment, if declared; see `layout`
    returns: str | None = None  # "row", "segment" or "pair": what a value belongs to, if the function declares it
    real: bool = False  # whether it is ours: our formulas get real numbers, those of users what was passed

    @property
    def facts(self) -> tuple[Fact, ...]:
        return tuple(p.fact for p in self.parameters if p.fact is not None)

    def wants(self, kind: str) -> bool:
        return any(p.kind == kind for p in self.parameters)


def read_signature(
    fn: Callable[..., Any],
    *,
    temperature: float | None = None,
    facts: Mapping[str, Fact] | None = None,
    teacher: str | None = None,
    compared_at: float | None = None,
    inputs: Mapping[str, str] | None = None,
    ids: str | None = None,
    top: int | None = None,
    classes: str | None = None,
) -> Signature:
    """The signature of a loss, metric or row-weight function; `facts` names facts at other temperatures.

    `compared_at`: the temperature of facts that compare with a teacher, if it differs from that of the others.
    `inputs`: parameters that take an input of another name; they are then required.  `ids`: the teacher whose ids the
    facts at ids use, unless the function takes a sparse teacher's own inputs.  `top`: how many of the likeliest columns
    the facts of the top cover.  `classes`: the teacher made from class weights.
    """
    facts_left, inputs_left = dict(facts or {}), dict(inputs or {})
    name = function_name(fn)
    at = temperature if compared_at is None else compared_at
    parameters, options, asked, by_class = [], {}, parameters_of(fn), weighs_classes(fn)
    ids = teacher if ids is None or not {*TEACHER_INPUTS}.isdisjoint(asked) else ids
    for p in asked.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            stars = "*" if p.kind is p.VAR_POSITIONAL else "**"
            raise TypeError(
                f"{name}: {stars}{p.name} in a loss's signature says nothing about what it needs; name the inputs"
            )
        if p.kind is p.KEYWORD_ONLY:
            if p.name in RESERVED or p.name in ("self", "fn"):
                raise TypeError(f"{name}: option {p.name!r} is a name that belongs to Term; rename it")
            _check_injected(fn, name, p)
            options[p.name] = p.default
            continue
        if p.kind is p.POSITIONAL_ONLY:
            raise TypeError(f"{name}: {p.name!r} is positional-only, but losses are called with names; drop /")
        optional = p.default is not p.empty
        if by_class and p.name in (*CLASSES, "class_cross_entropy"):
            if classes is not None:
                fact = Fact("teacher_cross_entropy", at, classes)
                parameters.append(
                    Parameter(p.name, "input", False, takes=CLASSES[p.name])
                    if p.name in CLASSES
                    else Parameter(p.name, "fact", optional, fact)
                )
        elif p.name in facts_left:
            parameters.append(Parameter(p.name, "fact", optional, facts_left.pop(p.name)))
        elif p.name in ("divergence", "teacher_tail_logprob"):
            raise TypeError(f"{name}: no loss can ask for {p.name!r}; write it as a function of (logp, logq)")
        elif p.name in TOP:
            if top is None and optional:
                continue
            if top is None:
                raise TypeError(f"{name}: asks for {p.name!r}; say of how many columns, hl.Term({name}, top=K)")
            of = (teacher or UNNAMED) if "teacher_top_logprob" in asked else None
            parameters.append(Parameter(p.name, "fact", optional, Fact(p.name, at, top_of(top, of))))
        elif p.name in COMPARING:
            whose = ids if p.name in SPARSE else teacher
            parameters.append(Parameter(p.name, "fact", optional, Fact(p.name, at, whose or UNNAMED)))
        elif p.name in FACTS:
            parameters.append(Parameter(p.name, "fact", optional, Fact(p.name, temperature)))
        elif p.name in TEACHER_INPUTS:
            parameters.append(Parameter(p.name, "input", optional, teacher=teacher or UNNAMED))
        elif p.name == "ids" and p.name not in inputs_left:
            parameters.append(Parameter(p.name, "input", optional, teacher=CANDIDATES, takes="teacher_ids"))
        elif p.name in ("segments", "targets") and p.name not in inputs_left:
            parameters.append(Parameter(p.name, p.name, optional))
        elif p.name in CALL_NAMES and p.name not in inputs_left:
            raise TypeError(f"{name}: parameter {p.name!r} is a name that belongs to the call itself; rename it")
        else:
            takes = inputs_left.pop(p.name, None)
            parameters.append(Parameter(p.name, "input", optional and takes is None, takes=takes))
    for wrong in inputs_left:
        known = [p.name for p in parameters if p.kind == "input" and p.teacher is None]
        raise TypeError(
            f"inputs: {wrong!r} is none of the inputs of {name} ({', '.join(known) or 'it has none'})"
            f"{suggest(wrong, known)}"
        )
    if facts_left:
        known = [p.name for p in parameters]
        raise TypeError(f"{name}: facts={sorted(facts_left)} are not among its parameters {known}")
    per_segment, returns = _per_segment(fn, name, parameters), _returns(fn, name)
    return Signature(name, tuple(parameters), options, per_segment, returns, is_ours(_innermost(fn)))


def _check_injected(fn: Callable[..., Any], name: str, p: inspect.Parameter) -> None:
    """Raise for an option without a default that has the name of a fact or input: it was meant to be that."""
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    injected = p.name in FACTS or p.name in ("segments", *TEACHER_INPUTS)
    if injected and p.name != "divergence" and p.default in (None, p.empty) and p.name not in bound:
        raise TypeError(
            f"{name}: {p.name!r} is keyword-only, which makes it an option, but it has the name of something that is "
            f"injected; put it before the *, or rename it"
        )


def weighs_classes(fn: Callable[..., Any]) -> bool:
    """Whether a function uses class weights: the call passes one per class, and the function gets one per row."""
    return "class_cross_entropy" in parameters_of(fn)


def _per_segment(fn: Callable[..., Any], name: str, parameters: Iterable[Parameter]) -> tuple[str, ...] | None:
    names = getattr(_innermost(fn), "per_segment", None)
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(x, str) for x in (*names,)):
        raise TypeError(f"{name}.per_segment: wanted a tuple of names of its inputs, got {names!r}")
    inputs = [p.name for p in parameters if p.kind == "input" and p.teacher is None]
    for x in names:
        if x not in inputs and not isinstance(fn, functools.partial):
            known = ", ".join(inputs) or "none"
            raise ValueError(f"{name}.per_segment: {x!r} is none of its inputs ({known}){suggest(x, inputs)}")
    return tuple(names)


def _returns(fn: Callable[..., Any], name: str) -> str | None:
    kind = getattr(_innermost(fn), "returns", None)
    if kind not in (None, "row", "segment", "pair"):
        raise ValueError(f'{name}.returns: wanted "row", "segment" or "pair", got {kind!r}')
    return kind


def _innermost(fn: Any) -> Any:
    """The function inside of any `functools.partial`s."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def function_name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def suggest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """ "; did you mean 'x'?", or nothing."""
    known = list(known)
    alias = ALIASES.get(name)
    near = [alias] if alias in known else difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""
