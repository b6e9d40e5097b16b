"""An objective's content as a cache key, so that equal objectives share a graph.

A recipe contains the whole objective if all its functions are headloss's own.  One with a user's functions is looked up
by a number, for as long as it is alive.
"""

from __future__ import annotations

import itertools
import json
import secrets
import weakref
from typing import Any, NamedTuple

from torch import Tensor

from headloss.bounded_cache import store
from headloss.config import read_config, write_config
from headloss.term import Term
from headloss.terms import Terms
from headloss.trace.cache_keys import key_of
from headloss.trace.call import Call
from headloss.trace.function_reads import Reads


def portable(terms: Terms) -> Any:
    """The config of these terms if it rebuilds the same terms; None if they hold a user's functions or tensors."""
    try:
        config = write_config(terms)
        again = Terms(*read_config(json.loads(json.dumps(config))))
    except (TypeError, ValueError):
        return None
    return config if content(again).key == content(terms).key else None


class Traits(NamedTuple):
    """What a graph needs to know about an objective besides its content."""

    number: int  # its key in `_NUMBERED`
    unknown: tuple[str, ...]  # mutable state that its functions read, which keeps them out of a graph
    temperatures: tuple[str, ...]  # of its terms and facts; as text, so that no graph treats them as dynamic numbers
    weights: tuple[tuple[str, Tensor], ...]  # term weights that are tensors


_NUMBERED: weakref.WeakValueDictionary[int, Terms] = weakref.WeakValueDictionary()
_numbers = itertools.count(2 + secrets.randbits(40))  # random, so a graph from another process finds none of ours


def traits(of: Terms) -> Traits:
    number = next(_numbers)
    _NUMBERED[number] = of
    temperatures = [t.temperature for t in of.every_term] + [T for t in of.every_term for _, T in t.facts.values()]
    weights = tuple((name, t.weight) for name, t in of.terms.items() if isinstance(t.weight, Tensor))
    return Traits(number, content(of).unknown, tuple({repr(float(T)) for T in temperatures if T is not None}), weights)


def content(of: Terms) -> Reads:
    """The terms and metrics as a key, and the mutable state that their functions read."""
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
    # no "targets": a term's own targets are also a row weight, which `call.reads` covers
    names = ("weight", "reduction", "length", "temperature", "teacher", "tail", "top", "reduction_segments")
    plain = tuple(key_of(getattr(term, name)) for name in names)
    named = tuple((name, key_of(x)) for name, x in (*term.facts.items(), *term.inputs.items()))
    return found._replace(key=(found.key, plain, named), unknown=(*found.unknown, *unknown))


def _said(call: Call) -> Any:
    """What its functions declare about their results."""
    return tuple((s.per_segment, s.returns) for s in call.signatures)


_KEYS: dict[Any, str] = {}
_MOST_KEYS = 512
_count = itertools.count()


def content_key(of: Terms) -> str:
    """A key, equal for equal terms and metrics.  An objective whose functions read mutable state gets a fresh one."""
    said, unknown, _ = content(of)
    if unknown:
        return f"own {next(_count)}"
    key = _KEYS.pop(said, None)  # and last again: the first is the least recently used
    return store(_KEYS, said, key or f"own {next(_count)}", _MOST_KEYS)
