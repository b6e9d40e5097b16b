"""A term of an objective: a loss with its weight, its reduction and its options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headloss.bounded_cache import store
from headloss.derived_teachers import AtIds, check_top, whole_of
from headloss.divergence import TAILS, Element, bucket_loss, is_divergence, sparse_loss, summed, top_loss
from headloss.facts import FACTS, NEEDS_TARGET, Fact
from headloss.immutable import Immutable
from headloss.options import check_option, is_number, parameters_of, shown
from headloss.reductions import NEEDS_SEGMENTS, REDUCTIONS, check_reduced
from headloss.routed import Routed, routes_of
from headloss.sources import Sparse, Teacher, is_symbol
from headloss.teachers import SPARSE, TOP
from headloss.trace.call import Call, RowWeight
from headloss.trace.function_reads import is_ours, reads_of
from headloss.trace.signature import (
    CALL_NAMES,
    CANDIDATES,
    COMPARING,
    RESERVED,
    UNNAMED,
    classes_of,
    counts_of,
    function_name,
    passed_names,
    read_signature,
    share_of,
    suggest,
    targets_of,
    top_of,
)
from headloss.uncompiled import uncompiled

RowWeights = str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None


class Term(Immutable):
    """`weight * reduction(row_weight * fn(facts, inputs, **options))`.  Immutable.

    fn           a loss of `headloss.losses` or any function of facts and inputs
    weight       a number or a scalar tensor; a literal 0 switches the term off, and it then costs nothing
    reduction    see `headloss.reductions.REDUCTIONS`
    length       the constant that `seq_mean_token_sum_norm` divides by
    reduction_segments   the name of an input, `hl.Segments`, that a `seq_...` reduction uses in place of the
                 call's segments: for a loss of responses that is averaged by prompt
    row_weight   an input's name, a function with the parameters of a loss, or a list, which multiply; never
                 differentiated.  A row of weight 0 is left out
    temperature  replaces the source's temperature for this term, and the teacher's; it adds no factor T^2
    facts        facts at temperatures of their own, {"hot_entropy": ("entropy", 2.0)}
    inputs       inputs of the call that parameters of `fn` take under other names, {"old_logprob": "sampler_logprob"}
    targets      the name of an input that holds this term's own targets: another column of each row, read in the same
                 sweep.  Rows where it is -100 have weight 0 in this term
    teacher      the name of the teacher that this term uses, if there are several
    tail         for a divergence with a sparse teacher: "bucket", "none" or "renormalise"
    top          K, how many of the likeliest columns `top_ids` and `top_logprob` have per row; a divergence is then
                 summed over those alone (tail="none" or "renormalise") and reads a dense teacher at them
    support      "all": its facts are over the whole vocabulary even if a call has `support=`
    pure         True: `fn` and `row_weight` read nothing that changes, so they may be traced whatever they read
    options      the keyword-only parameters of `fn`

    >>> Term(grpo, low=0.2, high=0.28, reduction="seq_mean_token_mean")
    """

    fn: Callable[..., Any]
    weight: float | Tensor
    reduction: str
    length: float | None
    reduction_segments: str | None
    row_weight: RowWeights
    temperature: float | None
    facts: Mapping[str, tuple[str, float]]
    inputs: Mapping[str, str]
    targets: str | None
    teacher: str | None
    tail: str
    top: int | None
    support: str | None
    pure: bool
    options: Mapping[str, Any]
    needs_segments: bool  # its loss or its reduction cannot do without them
    classes: str  # `classes_of` its temperature, made here: a graph that is traced may take that for a symbol
    share: str | None  # `share_of` its reduction segments
    _calls: dict[Any, Call]
    _foreign_divergence: bool
    __slots__ = (
        "_calls", "_foreign_divergence", "classes", "facts", "fn", "inputs", "length", "needs_segments", "options",
        "pure", "reduction", "reduction_segments", "row_weight", "share", "support", "tail", "targets", "teacher",
        "temperature", "top", "weight",
    )  # fmt: skip

    @uncompiled
    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        weight: float | Tensor = 1.0,
        reduction: str = "token_mean",
        length: float | None = None,
        reduction_segments: str | None = None,
        row_weight: RowWeights = None,
        temperature: float | None = None,
        facts: Mapping[str, tuple[str, float]] | None = None,
        inputs: Mapping[str, str] | None = None,
        targets: str | None = None,
        teacher: str | None = None,
        tail: str = "bucket",
        top: int | None = None,
        support: str | None = None,
        pure: bool = False,
        **options: Any,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn: wanted a loss function, got {shown(fn)}")
        try:
            parameters_of(fn)
        except (TypeError, ValueError):
            raise TypeError(f"fn: {shown(fn)} has no signature to say what it needs; wrap it in a function") from None
        check_weight("weight", weight)
        if not isinstance(reduction, str) or reduction not in REDUCTIONS:
            known = ", ".join(REDUCTIONS)
            near = suggest(str(reduction), REDUCTIONS)
            near = "; values per row are in out.facts" if reduction in ("none", None) else near
            raise ValueError(f"reduction: wanted one of {known}, got {shown(reduction)}{near}")
        if (length is not None) != (reduction == "seq_mean_token_sum_norm"):
            why = "which divides by it" if length is None else "which does not use it; 'seq_mean_token_sum_norm' does"
            raise ValueError(f"length: got {shown(length)} with reduction={reduction!r}, {why}")
        if reduction_segments is not None:
            check_reduced(fn, function_name(fn), reduction, reduction_segments, (*CALL_NAMES, *FACTS))
        for name, value in (("length", length), ("temperature", temperature)):
            if value is not None and not (is_number(value) and value > 0):
                raise ValueError(f"{name}: wanted a positive number, got {shown(value)}")
        row_weight = (tuple(row_weight) or None) if isinstance(row_weight, list | tuple) else row_weight
        for w in _several(row_weight):
            if not (isinstance(w, str) or callable(w)):
                raise TypeError(f"row_weight: wanted an input's name, a function, or a list of them, got {shown(w)}")
            if isinstance(w, str) and (not w or w in CALL_NAMES):
                raise ValueError(f"row_weight: no input of a call can be named {w!r}; rename it")
        if teacher is not None and not (isinstance(teacher, str) and teacher):
            got = "an empty one" if teacher == "" else type(teacher).__name__
            raise TypeError(f"teacher: wanted a teacher's name, got {got}; pass the teacher itself to the call")
        if targets is not None and not (isinstance(targets, str) and targets and targets not in (*CALL_NAMES, *FACTS)):
            raise TypeError(f"targets: wanted the name of an input that holds them, got {shown(targets)}")
        if tail not in TAILS:
            raise ValueError(f"tail: wanted one of {', '.join(TAILS)}, got {shown(tail)}{suggest(str(tail), TAILS)}")
        if tail != "bucket" and not is_divergence(fn):
            raise ValueError(f"tail: {function_name(fn)} is not a divergence of (logp, logq), so it has no tail")
        top = getattr(fn, "top", None) if top is None else top
        if top is not None:
            check_top(top)
            if is_divergence(fn) and tail == "bucket":
                raise ValueError('tail: with top=, the columns left out are not counted; use "none" or "renormalise"')
        if support not in (None, "all"):
            hint = "; give columns to the call" if not isinstance(support, str) else ""
            raise ValueError(f'support: wanted "all", or None for that of the call, got {shown(support)}{hint}')
        if not isinstance(pure, bool):
            raise TypeError(f"pure: wanted True or False, got {type(pure).__name__}")
        self._set(
            fn=fn, weight=weight, reduction=reduction, length=length, reduction_segments=reduction_segments,
            row_weight=row_weight, temperature=temperature, facts=MappingProxyType(_check_facts(facts)),
            inputs=MappingProxyType(_check_input_names(inputs)), targets=targets, teacher=teacher, tail=tail, top=top,
            support=support, pure=pure, _calls={}, _foreign_divergence=is_divergence(fn) and not is_ours(fn),
        )  # fmt: skip
        share = None if reduction_segments is None else share_of(reduction, length, reduction_segments)
        self._set(options=MappingProxyType(_check_options(fn, options)), classes=classes_of(temperature), share=share)
        if is_divergence(fn):
            Element(fn, self.options, pure).check_again(first=True)
        signatures = self.call(None, {}).signatures
        if top is not None and not any(p.fact and p.fact.name in TOP for s in signatures for p in s.parameters):
            raise ValueError(f"top: {function_name(fn)} asks for none of {', '.join(TOP)}; leave it out")
        asked = any(p.kind == "segments" and not p.optional for s in signatures for p in s.parameters)
        self._set(needs_segments=asked or (reduction in NEEDS_SEGMENTS and reduction_segments is None))

    def __reduce__(self) -> Any:
        return functools.partial(Term, **self._arguments(), **self.options), (self.fn,)

    def __repr__(self) -> str:
        said = {k: v for k, v in self._arguments().items() if v is not None and v != {} and v != DEFAULTS[k]}
        said |= self.options
        return f"Term({', '.join([function_name(self.fn), *(f'{k}={v!r}' for k, v in said.items())])})"

    def _arguments(self) -> dict[str, Any]:
        """What it was made with, apart from its function and options."""
        return {name: getattr(self, name) for name in sorted(RESERVED)} | {
            "facts": dict(self.facts),
            "inputs": dict(self.inputs),
        }

    def call(self, source_temperature: float | None, teachers: Mapping[str, Teacher]) -> Call:
        """The function ready to be called: its facts named, and a divergence in the form that suits its teacher."""
        given = passed_names(teachers)
        name = self.teacher or (given[0] if len(given) == 1 else UNNAMED)
        sparse, at_ids, routed = (isinstance(teachers.get(name), kind) for kind in (Sparse, AtIds, Routed))
        ids = CANDIDATES if CANDIDATES in teachers and self.teacher is None else name
        classes = self.classes if self.classes in teachers else None
        key = (source_temperature, name, sparse, at_ids, routed, ids, classes, self.content())
        made = self._calls.get(key)
        if made is None:
            made = self._build_call(source_temperature, name, sparse, at_ids, ids, classes, routed)
            if not torch.compiler.is_compiling():  # under which no mapping may change
                store(self._calls, key, made, _MOST_CALLS)
        return made

    def _build_call(
        self, T: float | None, name: str, sparse: bool, at_ids: bool, ids: str, classes: str | None, routed: bool
    ) -> Call:
        made = self._build(T, name, sparse, at_ids, ids, classes)
        if routed and any(str(f.teacher).split(" of ")[-1] == name for f in made.facts):
            made = made._replace(row_weights=(*made.row_weights, RowWeight(routes_of(name))))
        return made if self.share is None else made._replace(share=self.share)

    _build_call._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while a graph is traced, not in it

    def content(self) -> Any:
        """What a divergence reads now, if that can change; the fact that it becomes depends on it."""
        return reads_of(self.fn).key if self.has_foreign_divergence else None

    @property
    def has_foreign_divergence(self) -> bool:
        return self._foreign_divergence and not self.pure

    def _build(
        self, source_temperature: float | None, teacher: str, sparse: bool, at_ids: bool, ids: str, classes: str | None
    ) -> Call:
        T = None if self.temperature == source_temperature else self.temperature
        own_facts = {
            name: Fact(
                fact,
                None if temperature == source_temperature and fact not in COMPARING else temperature,
                self._compared_with(fact, teacher, ids),
            )
            for name, (fact, temperature) in self.facts.items()
        }
        keywords: dict[str, Any] = {"teacher": teacher, "ids": ids, "top": self.top}
        weighed = tuple(
            RowWeight(w, self._signature(w, {}, {}, temperature=T, **keywords) if callable(w) else None)
            for w in self.row_weights
        )
        if self.targets is not None:
            self._check_targets()
            weighed += (RowWeight(counts_of(self.targets)),)
        fn = self.fn
        if is_divergence(fn):
            if self.inputs:
                raise TypeError(f"inputs: {function_name(fn)} is a divergence of (logp, logq), and takes no inputs")
            if self.top is not None:
                fn = top_loss(fn, self.tail)
                keywords["teacher"] = whole_of(teacher) if at_ids and self.tail == "none" else teacher
            elif sparse:
                fn = sparse_loss(fn, self.tail)
            elif at_ids and self.tail != "renormalise":
                fact = Fact("divergence", self.temperature, whole_of(teacher), Element(fn, self.options, self.pure))
                asked, loss, options = {"divergence": fact}, summed, {}
                if self.tail == "bucket":
                    asked["teacher_tail_logprob"] = fact._replace(name="teacher_tail_logprob", element=None)
                    loss, options = bucket_loss(fn), dict(self.options)
                signature = read_signature(loss, facts=asked)._replace(name=function_name(fn), returns="row")
                return Call(loss, signature, options, weighed, self.pure)
            elif hasattr(fn, "one_pass") and not hasattr(fn, "__wrapped__"):  # decorators copy attributes
                fn = fn.one_pass
            else:
                fact = Fact("divergence", self.temperature, teacher, Element(fn, self.options, self.pure))
                signature = read_signature(summed, facts={"divergence": fact})
                return Call(summed, signature._replace(name=function_name(fn), returns="row"), {}, weighed, self.pure)
        keywords["classes"] = classes
        signature = self._signature(fn, own_facts, self.inputs, temperature=T, compared_at=self.temperature, **keywords)
        returns, name = "row" if is_divergence(self.fn) else signature.returns, function_name(self.fn)
        return Call(fn, signature._replace(name=name, returns=returns), self.options, weighed, self.pure)

    def _compared_with(self, fact: str, teacher: str, ids: str) -> str | None:
        """The teacher, or the ids, that a fact compares with; None if it does not compare."""
        if fact in TOP:
            if self.top is None:
                raise TypeError(f"facts: {fact!r} needs a number of columns; say how many, hl.Term(..., top=K)")
            return top_of(self.top, teacher if "teacher_top_logprob" in (fact, *parameters_of(self.fn)) else None)
        return (ids if fact in SPARSE else teacher) if fact in COMPARING else None

    def _signature(
        self, fn: Callable[..., Any], facts: Mapping[str, Fact], inputs: Mapping[str, str], **more: Any
    ) -> Any:
        """The signature of a function, with the facts at this term's own targets."""
        if self.targets is not None:
            own, asked = targets_of(self.targets), parameters_of(fn)
            facts = {
                n: Fact("ids_logprob", f.temperature, own) if f.name in NEEDS_TARGET else f for n, f in facts.items()
            }
            if "logprob" in asked and "logprob" not in facts:
                facts = {**facts, "logprob": Fact("ids_logprob", self.temperature, own)}
            inputs = {**inputs, "targets": self.targets} if "targets" in asked else inputs
        return read_signature(fn, facts=facts, inputs=inputs, **more)

    def _check_targets(self) -> None:
        name, asked = function_name(self.fn), parameters_of(self.fn)
        facts = [*asked, *(fact for fact, _ in self.facts.values())]
        if not any(x in NEEDS_TARGET or x == "targets" for x in facts):
            raise ValueError(f"targets: {name} reads none; leave targets={self.targets!r} out")
        if "segments" in asked:
            raise ValueError(f"targets: {name} takes segments, whose sums would count rows that have none of their own")

    @property
    def row_weights(self) -> tuple[str | Callable[..., Any], ...]:
        """The factors of the term's row weight."""
        return _several(self.row_weight)


DEFAULTS = {name: p.default for name, p in parameters_of(Term.__init__).items() if p.kind is p.KEYWORD_ONLY}


def as_term(name: str, x: Callable[..., Any] | Term) -> Term:
    """A term of an objective, made from the value of its keyword."""
    if isinstance(x, Term):
        return x
    if isinstance(x, str):
        raise TypeError(f"{name}: wanted a loss function or a Term, got {x!r}; names belong in Objective.from_config")
    if not callable(x):
        raise TypeError(f"{name}: wanted a loss function or a Term, got {type(x).__name__}")
    try:
        return Term(x)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


_MOST_CALLS = 64  # per term; more means that the source's temperature changes with every call


def _several(row_weight: RowWeights) -> tuple[str | Callable[..., Any], ...]:
    alone = () if row_weight is None else (row_weight,)
    return tuple(row_weight) if isinstance(row_weight, list | tuple) else alone  # type: ignore[return-value]


def check_weight(name: str, weight: object) -> None:
    if isinstance(weight, Tensor):
        if weight.ndim != 0:
            raise ValueError(f"{name}: wanted a number or a scalar tensor, got shape {tuple(weight.shape)}")
        if weight.requires_grad:
            raise ValueError(f"{name}: requires grad, but no gradient flows to a term's weight; pass it detached")
        if weight.dtype.is_complex or weight.dtype == torch.bool:
            raise TypeError(f"{name}: wanted a real number, got a tensor of {weight.dtype}")
    elif isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise TypeError(f"{name}: wanted a number or a scalar tensor, got {type(weight).__name__}")
    elif not (is_symbol(weight) or is_number(weight)):
        raise ValueError(f"{name}: wanted a finite number, got {shown(weight)}")


def _check_facts(facts: Mapping[str, tuple[str, float]] | None) -> dict[str, tuple[str, float]]:
    if facts is not None and not isinstance(facts, Mapping):
        raise TypeError(f"facts: wanted {{name: (fact, temperature)}}, got {shown(facts)}")
    checked = {}
    for name, pair in (facts or {}).items():
        if not (isinstance(name, str) and isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"facts: wanted {{name: (fact, temperature)}}, got {shown(name)}: {shown(pair)}")
        fact, temperature = pair
        if not isinstance(fact, str) or fact not in FACTS or fact == "divergence":
            names = [f for f in FACTS if f != "divergence"]
            near = suggest(str(fact), names) or f"; the facts are {', '.join(names)}"
            raise ValueError(f"facts: {shown(fact)} is not a fact{near}")
        if not (is_number(temperature) and temperature > 0):
            raise ValueError(f"facts: wanted a positive temperature for {name!r}, got {shown(temperature)}")
        checked[name] = (fact, float(temperature))
    return checked


def _check_input_names(inputs: Mapping[str, str] | None) -> dict[str, str]:
    if inputs is not None and not isinstance(inputs, Mapping):
        raise TypeError(f"inputs: wanted {{parameter: name of an input}}, got {shown(inputs)}")
    for name, taken in (inputs or {}).items():
        if not (isinstance(name, str) and isinstance(taken, str) and taken):
            raise TypeError(f"inputs: wanted {{parameter: name of an input}}, got {shown(name)}: {shown(taken)}")
        if taken in CALL_NAMES or taken in FACTS or "pairs" in (name, taken):
            of_call = "an argument of the call" if taken in CALL_NAMES else "checked by its name"
            what = "a fact" if taken in FACTS else of_call
            raise ValueError(f"inputs: {name!r} cannot take {taken!r}, which is {what}")
    return dict(inputs or {})


def _check_options(fn: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    name = function_name(fn)
    known = {p.name: p for p in parameters_of(fn).values() if p.kind is p.KEYWORD_ONLY}
    for option in options:
        if option not in known:
            about = f"its options are {', '.join(known)}" if known else "it has none"
            if option in parameters_of(fn):
                about = f"it is an input of the call; for an option, write it after a *: def {name}(..., *, {option})"
            raise TypeError(f"{name}: no option {option!r}; {about}{suggest(option, [*known, *RESERVED])}")
    missing = [k for k, p in known.items() if p.default is p.empty and k not in options]
    if missing:
        raise TypeError(f"{name}: option {missing[0]!r} has no default; pass it to Term")
    return {k: check_option(f"{name}: option {k!r}", known[k], v) for k, v in options.items()}
