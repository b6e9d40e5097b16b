"""Objectives as plain data, such as YAML or JSON: reads and writes configs.

    terms:
      ce: cross_entropy
      z:  {loss: z_loss, weight: 1.0e-4}
      rl: {loss: gspo, low: 3.0e-4, high: 4.0e-4, reduction: seq_mean_token_mean}
    metrics: [entropy, accuracy]

A config is data: names are looked up in a table, nothing is evaluated.  An error names the place: `terms.rl.low`.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from headloss.backends import check_backend
from headloss.losses import LOSSES
from headloss.metrics import read_metrics
from headloss.options import parameters_of, shown
from headloss.term import DEFAULTS, Term
from headloss.terms import Terms
from headloss.trace.signature import RESERVED, function_name, suggest

_KEYS = ("terms", "metrics", "backend")
Losses = Mapping[str, Callable[..., Any]]


def check_losses(losses: Any) -> dict[str, Callable[..., Any]]:
    """The functions that a caller adds, by name."""
    if losses is not None and not isinstance(losses, Mapping):
        raise TypeError(f"losses: wanted a mapping from names to functions, got {type(losses).__name__}")
    for name, fn in (losses or {}).items():
        if not (isinstance(name, str) and name and callable(fn)):
            raise TypeError(f"losses: wanted a mapping from names to functions, got {shown(name)}: {shown(fn)}")
    return dict(losses or {})


def read_config(
    config: Mapping[str, Any], losses: Losses = types.MappingProxyType({})
) -> tuple[dict[str, Term], dict[str, Any], str]:
    """The terms, the metrics and the backend of a config."""
    if not isinstance(config, Mapping):
        raise TypeError(f"config: wanted a mapping with {', '.join(_KEYS)}, got {type(config).__name__}")
    for key in config:
        if key not in _KEYS:
            near = suggest(str(key), _KEYS)
            raise ValueError(f"config: unknown key {shown(key)}; there are {', '.join(_KEYS)}{near}")
    terms = config.get("terms")
    if not isinstance(terms, Mapping) or not terms:
        raise ValueError(f"config: wanted terms: a mapping from names to losses, got {shown(terms)}")
    read: dict[str, Term] = {}
    for name, entry in terms.items():
        if name in ("metrics", "backend") or not isinstance(name, str):
            raise ValueError(f"config: {shown(name)} cannot be the name of a term (at terms)")
        read[name] = _read_term(name, entry, losses)
    metrics = config.get("metrics", ())
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise TypeError(f"config: wanted metrics: a list of names, got {shown(metrics)}")
    requested: dict[str, Any] = {}
    for i, metric in enumerate(metrics):
        at = f"(at metrics[{i}])"
        if not isinstance(metric, str):
            raise TypeError(f"config: metrics: wanted names, got {shown(metric)} {at}")
        if metric in requested:
            raise ValueError(f"config: metrics: {metric!r} is listed twice {at}")
        requested[metric] = losses.get(metric, metric)
        _with_place(functools.partial(list, read_metrics({metric: requested[metric]})), "config", f"metrics[{i}]")
    backend = config.get("backend", "auto")
    _with_place(lambda: check_backend(backend), "config", "backend")
    return read, requested, backend


def _read_term(name: str, entry: Any, losses: Losses) -> Term:
    path = f"terms.{name}"
    if isinstance(entry, str):
        entry = {"loss": entry}
    if not isinstance(entry, Mapping) or "loss" not in entry:
        keys = [key for key in entry if isinstance(key, str)] if isinstance(entry, Mapping) else []
        near = "".join(f"; is {key!r} the loss?" for key in keys if suggest(key, ["loss"]))
        raise ValueError(
            f"config: term {name!r} wants a loss's name or a mapping with 'loss', got {shown(entry)}{near} (at {path})"
        )
    options = dict(entry)
    loss = options.pop("loss")
    known = {**LOSSES, **losses}
    if not isinstance(loss, str) or loss not in known:
        near = suggest(str(loss), known) or f"; there are {', '.join(sorted(known))}"
        raise ValueError(f"config: term {name!r}: there is no loss {shown(loss)}{near} (at {path}.loss)")
    for key in options:
        if not isinstance(key, str) or key in ("self", "fn"):
            raise TypeError(f"config: term {name!r}: {shown(key)} is not an option of a term (at {path})")
    weight = options.get("row_weight")
    if isinstance(weight, str | list | tuple):
        named = [weight] if isinstance(weight, str) else weight
        found = [losses.get(w, w) if isinstance(w, str) else w for w in named]
        options["row_weight"] = found[0] if isinstance(weight, str) else found
    return _with_place(lambda: Term(known[loss], **options), f"config: term {name!r}", path, options)


def _with_place(make: Callable[[], Any], label: str, path: str, keys: Mapping[str, Any] | None = None) -> Any:
    """The result of `make`; an error gets the place in the config, down to the key if it names one of the `keys`."""
    try:
        return make()
    except Exception as error:
        name = re.match(r"(?:.*?: (?:no )?option ')?(\w+)", str(error))
        path += f".{name[1]}" if name is not None and keys and name[1] in keys else ""
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{label}: {error} (at {path})") from (None if isinstance(error, kind) else error)


def write_config(of: Terms, losses: Losses | None = None) -> dict[str, Any]:
    """The config of an objective; functions are written under the names that `from_config` finds them by."""
    losses = losses or {}
    terms: dict[str, Any] = {}
    for name, term in of.terms.items():
        label = f"config: term {name!r}"
        entry: dict[str, Any] = {"loss": _name_of(f"{label}: loss", term.fn, {**LOSSES, **losses})}
        for key in sorted(RESERVED & set(Term.__slots__)):
            value = getattr(term, key)
            if isinstance(value, Tensor):
                raise ValueError(
                    f"{label}: {key} is a tensor, which a config cannot hold; pass it as weights= to the call"
                )
            if key == "row_weight" and value is not None:
                names = [_weight_name(f"{label}: row_weight", w, losses) for w in term.row_weights]
                value = names if isinstance(value, tuple) else names[0]
            if key == "facts":
                value = {k: list(v) for k, v in value.items()} or None
            if key == "inputs":
                value = dict(value) or None
            if value != DEFAULTS[key]:
                entry[key] = value
        for option, value in term.options.items():
            if option in entry:
                raise ValueError(f"{label}: option {option!r} has the name of a key that a config needs; rename it")
            default = parameters_of(term.fn)[option].default
            entry[option] = _data(f"{label}: option {option!r}", value, isinstance(default, tuple))
        terms[name] = entry
    config: dict[str, Any] = {"terms": terms}
    for name, call in of.metrics:
        if not _is_found(name, call.fn, losses):
            what = repr(call.fn) if isinstance(call.fn, Term) else function_name(call.fn)
            raise ValueError(
                f"metrics: {name!r} is {what}, which from_config does not find under this name, and a config holds a "
                f"metric's name only; pass losses={{{name!r}: ...}} to to_config and from_config"
            )
    if of.metrics:
        config["metrics"] = [name for name, _ in of.metrics]
    if of.backend != "auto":
        config["backend"] = of.backend
    return config


def _name_of(label: str, fn: Callable[..., Any], table: Losses) -> str:
    """The name under which a table has this function."""
    own = function_name(fn)
    for name in (own, *table):
        if name in table and _same(table[name], fn):
            return name
    clash = " (its name is that of another function)" if own in table else ""
    numbers = ", which captures values," if getattr(fn, "__closure__", None) else ""
    raise ValueError(
        f"{label}: {own!r}{numbers} is a function that from_config cannot find again{clash}; name it, "
        f"to_config(losses={{name: function}}), and pass the same losses= to from_config"
    )


def _weight_name(label: str, weight: str | Callable[..., Any], losses: Losses) -> str:
    if callable(weight):
        return _name_of(label, weight, losses)
    if weight in losses:
        raise ValueError(f"{label} is the input {weight!r}, but losses= has a function of that name")
    return weight


def _same(x: Any, y: Any) -> bool:
    """Whether these are one function.  Each lookup of a bound method makes a new object, so we compare those by ==."""
    return x is y or (isinstance(y, types.MethodType) and x == y)


def _is_found(name: str, fn: Any, losses: Losses) -> bool:
    """Whether `from_config` would turn this name in `metrics` into this function."""
    try:
        [(_, call)] = read_metrics({name: losses.get(name, name)})
    except (TypeError, ValueError):
        return False
    if isinstance(fn, Term) and isinstance(call.fn, Term):
        return _same(call.fn.fn, fn.fn) and repr(call.fn) == repr(fn)
    return _same(call.fn, fn)


def _data(label: str, value: Any, as_tuple: bool = False) -> Any:
    """An option as plain data that reads back as itself."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list or (as_tuple and type(value) is tuple):
        return [_data(label, x) for x in value]
    if type(value) is dict and all(type(k) is str for k in value):
        return {k: _data(label, x) for k, x in value.items()}
    raise ValueError(f"{label} is {shown(value)}, a {type(value).__name__}, which a config cannot hold")
