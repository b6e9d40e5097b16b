"""An objective's content as a cache key, so that equal objectives share a graph.

A recipe contains the whole objective if all its functions are headloss's own.  An objective with a user's functions is
found by a number instead, for as long as it is alive.
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


def portable_config(terms: Terms) -> Any:
    """The config of these terms if it rebuilds the same terms; None if they hold a user's functions or tensors."""
    try:
        config = write_config(terms)
        rebuilt = Terms(*read_config(json.loads(json.dumps(config))))
    except (TypeError, ValueError):
        return None
    return config if content(rebuilt).key == content(terms).key else None


class Traits(NamedTuple):
    """What a graph needs to know about an objective in addition to its content."""

    number: int  # its key in `_BY_NUMBER`
    unknown: tuple[str, ...]  # mutable state that its functions read, which keeps them out of a graph
    temperatures: tuple[str, ...]  # of its terms and facts; as text, so that no graph treats them as dynamic numbers
    weights: tuple[tuple[str, Tensor], ...]  # term weights that are tensors


_BY_NUMBER: weakref.WeakValueDictionary[int, Terms] = weakref.WeakValueDictionary()
_numbers = itertools.count(2 + secrets.randbits(40))  # random, so that a graph from another process finds none of them


def traits(of: Terms) -> Traits:
    number = next(_numbers)
    _BY_NUMBER[number] = of
    temperatures = [t.temperature for t in of.every_term] + [T for t in of.every_term for _, T in t.facts.values()]
    weights = tuple((name, t.weight) for name, t in of.terms.items() if isinstance(t.weight, Tensor))
    return Traits(number, content(of).unknown, tuple({repr(float(T)) for T in temperatures if T is not None}), weights)


def content(of: Terms) -> Reads:
    """The terms and metrics as a key, and the mutable state that their functions read."""
    terms = [(name, _term_content(x)) for name, x in of.terms.items()]
    metrics = [(n, _term_content(c.fn) if isinstance(c.fn, Term) else c.reads()) for n, c in of.metrics]
    calls = [*(t.call(None, {}) for t in of.terms.values()), *(c for _, c in of.metrics)]
    keys = [(name, reads.key, _declared(c)) for (name, reads), c in zip((*terms, *metrics), calls, strict=True)]
    unknown = [x for _, reads in (*terms, *metrics) for x in reads.unknown]
    return Reads((of.backend, len(terms), tuple(keys)), tuple(dict.fromkeys(unknown)))


def _term_content(term: Term) -> Reads:
    call = term.call(None, {})
    reads = call.reads()
    unknown = [x for f in call.facts if f.element is not None for x in f.element.reads().unknown]
    # no "targets": a term's own targets are also a row weight, which `call.reads` covers
    names = ("weight", "reduction", "length", "temperature", "teacher", "tail", "top", "reduction_segments")
    plain = tuple(key_of(getattr(term, name)) for name in names)
    named = tuple((name, key_of(x)) for name, x in (*term.facts.items(), *term.inputs.items()))
    return reads._replace(key=(reads.key, plain, named), unknown=(*reads.unknown, *unknown))


def _declared(call: Call) -> Any:
    """What its functions declare about their inputs and values."""
    return tuple((s.per_segment, s.returns) for s in call.signatures)


_KEYS: dict[Any, str] = {}
_MOST_KEYS = 512
_count = itertools.count()


def content_key(of: Terms) -> str:
    """A key, equal for equal terms and metrics.  An objective whose functions read mutable state gets a new one."""
    read, unknown, _ = content(of)
    if unknown:
        return f"own {next(_count)}"
    key = _KEYS.pop(read, None)  # stored again as the last: the first is the least recently used
    return store(_KEYS, read, key or f"own {next(_count)}", _MOST_KEYS)
