"""What a loss asks for: its parameter names choose what is injected.

    positional        a fact, `segments`, `targets`, or an input of the call; with a default it is optional
    keyword-only      an option of the loss

A name that nothing provides, and an input that nothing asks for, are errors with a suggestion: a typo must never train.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.facts import FACTS, STUDENT, Fact

RESERVED = frozenset({"weight", "reduction", "temperature", "length", "row_weight", "facts", "teacher", "tail"})

# Arguments of a call itself: an input of one of these names could never be passed.
CALL = (
    "teacher", "targets", "segments", "num_items", "num_segments", "weights", "grad_scale", "host_read", "source",
    "self",
)  # fmt: skip

ONLY = "teacher"  # the name of a teacher that was given without one
COMPARING = frozenset(FACTS) - frozenset(STUDENT)
TEACHER_INPUTS = ("teacher_ids", "teacher_logprob")  # of a sparse teacher, (rows, K)

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
    teacher: str | None = None  # whose input it is

    @property
    def key(self) -> str:
        """The input's name in the call: a teacher's own inputs are kept apart from another's."""
        return self.name if self.teacher is None else f"{self.name} of {self.teacher}"


class Signature(NamedTuple):
    name: str
    parameters: tuple[Parameter, ...]
    options: Mapping[str, Any]  # keyword-only parameters and their defaults

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
) -> Signature:
    """The signature of a loss, metric or row-weight function; `facts` names facts at temperatures of their own.

    `compared_at` is the temperature of facts that look at a teacher, where it is not that of the others.
    """
    named = dict(facts or {})
    name = function_name(fn)
    at = temperature if compared_at is None else compared_at
    parameters, options = [], {}
    for p in inspect.signature(fn).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise TypeError(
                f"{name}: *{p.name} in a loss's signature says nothing about what it needs; name the inputs"
            )
        if p.kind is p.KEYWORD_ONLY:
            if p.name in RESERVED or p.name in ("self", "fn"):
                raise TypeError(f"{name}: option {p.name!r} is a name that belongs to Term; rename it")
            options[p.name] = p.default
            continue
        if p.kind is p.POSITIONAL_ONLY:
            raise TypeError(f"{name}: {p.name!r} can be given by position only, and losses get theirs by name; drop /")
        optional = p.default is not p.empty
        if p.name in named:
            parameters.append(Parameter(p.name, "fact", optional, named.pop(p.name)))
        elif p.name == "divergence":
            raise TypeError(f"{name}: no loss can ask for 'divergence'; write it as a function of (logp, logq)")
        elif p.name in COMPARING:
            parameters.append(Parameter(p.name, "fact", optional, Fact(p.name, at, teacher or ONLY)))
        elif p.name in FACTS:
            parameters.append(Parameter(p.name, "fact", optional, Fact(p.name, temperature)))
        elif p.name in TEACHER_INPUTS:
            parameters.append(Parameter(p.name, "input", optional, teacher=teacher or ONLY))
        elif p.name in ("segments", "targets"):
            parameters.append(Parameter(p.name, p.name, optional))
        elif p.name in CALL:
            raise TypeError(f"{name}: parameter {p.name!r} is a name that belongs to the call itself; rename it")
        else:
            parameters.append(Parameter(p.name, "input", optional))
    if named:
        raise TypeError(f"{name}: facts={sorted(named)} are not among its parameters {[p.name for p in parameters]}")
    return Signature(name, tuple(parameters), options)


def function_name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def suggest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?", or nothing."""
    known = list(known)
    alias = ALIASES.get(name)
    near = [alias] if alias in known else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


class _Same:
    """Hash and compare by identity, and keep the thing alive so that its identity is not reused."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_FIXED = (types.BuiltinFunctionType, enum.Enum)


def identity(fn: Callable[..., Any]) -> tuple[object, tuple[str, ...]]:
    """A key under which equal functions are equal, and the names of what it captures that may change behind our back.

    A lambda made anew each step has the same code and the same captured numbers, hence the same key.  A number read
    from a closure or a global is part of the key, because a trace would freeze it.  Tensors and other objects cannot
    be: functions that capture those are run as they are, never from a trace.
    """
    if ours(fn):
        return _Same(fn), ()
    loose: list[str] = []
    return _key(fn, loose, set()), tuple(dict.fromkeys(loose))


def ours(fn: Any) -> bool:
    """Whether a function is one of this package: nothing changes behind our own back."""
    home = fn.__module__ or "" if isinstance(fn, types.FunctionType) else ""
    return home.startswith("headloss.") and ("<locals>" not in fn.__qualname__ or hasattr(fn, "fixed"))


def _key(fn: Any, loose: list[str], seen: set[int]) -> object:
    if id(fn) in seen:
        return None
    seen.add(id(fn))
    if isinstance(fn, functools.partial):
        loose.append(f"partial({function_name(fn.func)})")
        return _Same(fn)
    if isinstance(fn, types.MethodType):
        loose.append(f"self of {fn.__name__}")
        return (_Same(fn.__self__), _Same(fn.__func__))
    if not isinstance(fn, types.FunctionType):
        if not isinstance(fn, types.BuiltinFunctionType):
            loose.append(function_name(fn))
        return _Same(fn)
    code = fn.__code__
    captured: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            captured[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            captured[name] = None
    names = _names(code)
    captured |= {name: fn.__globals__[name] for name in names if name in fn.__globals__}
    items = [(name, _value(name, x, loose, seen, names)) for name, x in sorted(captured.items())]
    defaults = [
        _value("default", x, loose, seen) for x in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
    ]
    return (code, tuple(items), tuple(defaults))


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names |= _names(inner)
    return names


def _value(name: str, x: object, loose: list[str], seen: set[int], read: Iterable[str] = ()) -> object:
    if isinstance(x, _PLAIN):
        return (type(x), x)
    if isinstance(x, tuple):
        return tuple(_value(name, y, loose, seen) for y in x)
    if isinstance(x, types.FunctionType):
        if x.__module__ and x.__module__.split(".")[0] == "torch":
            return _Same(x)
        own = [(a, _value(f"{name}.{a}", y, loose, seen)) for a, y in sorted(vars(x).items()) if a in read]
        return (_key(x, loose, seen), *own)
    if isinstance(x, types.ModuleType | type):
        home = x.__module__ if isinstance(x, type) else x.__name__
        visit = hash((id(x), tuple(sorted(read))))
        if home.split(".")[0] == "torch" or visit in seen:
            return _Same(x)
        seen.add(visit)  # `settings.beta`: what is read from a module or a class may change
        held = {a: y for k in (x.__mro__ if isinstance(x, type) else (x,)) for a, y in vars(k).items() if a in read}
        found = [(a, _value(f"{name}.{a}", getattr(x, a), loose, seen, read)) for a in sorted(held)]
        return (_Same(x), *found)
    if isinstance(x, _FIXED) or (type(x).__module__.split(".")[0] in ("torch", "typing") and not isinstance(x, Tensor)):
        return _Same(x)
    loose.append(name)
    return _Same(x)
