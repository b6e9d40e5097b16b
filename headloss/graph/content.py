"""What an objective says, as a key.  Equal objectives share a graph; a recipe holds one that is all headloss's own.

An objective with functions of a user's own is found again by its number, for as long as it lives.
"""

from __future__ import annotations

import itertools
import json
import secrets
import weakref
from typing import Any, NamedTuple

from torch import Tensor

from headloss.config import read_config, write_config
from headloss.term import Term
from headloss.terms import Terms
from headloss.trace.cache_keys import key_of
from headloss.trace.call import Call
from headloss.trace.function_reads import Reads


def portable(terms: Terms) -> Any:
    """Their config, if that gives the same terms again; None if they have functions or tensors of their own."""
    try:
        config = write_config(terms)
        again = Terms(*read_config(json.loads(json.dumps(config))))
    except (TypeError, ValueError):
        return None
    return config if content(again).key == content(terms).key else None


class Traits(NamedTuple):
    """What a graph must know of an objective apart from its content."""

    number: int  # its place in `_NUMBERED`
    unknown: tuple[str, ...]  # what its functions read that may change: they do not run in a graph
    temperatures: tuple[str, ...]  # its own, of terms and facts; as text, which no graph takes for a number that varies
    weights: tuple[tuple[str, Tensor], ...]  # those that are tensors


_NUMBERED: weakref.WeakValueDictionary[int, Terms] = weakref.WeakValueDictionary()
_numbers = itertools.count(2 + secrets.randbits(40))  # a graph of another process finds none of ours


def traits(of: Terms) -> Traits:
    number = next(_numbers)
    _NUMBERED[number] = of
    temperatures = [t.temperature for t in of.every_term] + [T for t in of.every_term for _, T in t.facts.values()]
    weights = tuple((name, t.weight) for name, t in of.terms.items() if isinstance(t.weight, Tensor))
    return Traits(number, content(of).unknown, tuple({repr(float(T)) for T in temperatures if T is not None}), weights)


def content(of: Terms) -> Reads:
    """What terms and metrics say, as a key, and what their functions read that may change behind them."""
    terms = [(name, _term_content(x)) for name, x in of.terms.items()]
    metrics = [(n, _term_content(c.fn) if isinstance(c.fn, Term) else c.reads()) for n, c in of.metrics]
    calls = [*(t.call(None, {}) for t in of.terms.values()), *(c for _, c in of.metrics)]
    said = [(name, found.key, _said(c)) for (name, found), c in zip((*terms, *metrics), calls, strict=True)]
    unknown = [x for _, found in (*terms, *metrics) for x in found.unknown]
    return Reads((of.backend, len(terms), tuple(said)), tuple(dict.fromkeys(unknown)))


def _term_content(term: Term) -> Reads:
    call = term.call(None, {})
    found = call.reads()
    unknown = [x for f in call.facts if f.element is not None for x in f.element.reads().unknown]
    # own targets are a row weight too
    names = ("weight", "reduction", "length", "temperature", "teacher", "tail", "top", "reduction_segments")
    plain = tuple(key_of(getattr(term, name)) for name in names)
    named = tuple((name, key_of(x)) for name, x in (*term.facts.items(), *term.inputs.items()))
    return found._replace(key=(found.key, plain, named), unknown=(*found.unknown, *unknown))


def _said(call: Call) -> Any:
    """What its functions say of themselves."""
    return tuple((s.per_segment, s.returns) for s in call.signatures)


_KEYS: dict[Any, str] = {}
_MOST_KEYS = 512
_count = itertools.count()


def content_key(of: Terms) -> str:
    """Equal for equal terms and metrics; one of its own for an objective whose functions read what may change."""
    said, unknown, _ = content(of)
    if unknown:
        return f"own {next(_count)}"
    key = _KEYS.pop(said, None)
    if key is None and len(_KEYS) >= _MOST_KEYS:
        _KEYS.pop(next(iter(_KEYS)))  # the one that was asked for longest ago
    _KEYS[said] = key or f"own {next(_count)}"
    return _KEYS[said]
