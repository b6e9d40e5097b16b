"""Objectives as plain data.

    terms:
      ce: cross_entropy
      z:  {loss: z_loss, weight: 1.0e-4}
      rl: {loss: gspo, low: 3.0e-4, high: 4.0e-4, reduction: seq_mean_token_mean}
    metrics: [entropy, accuracy]

A config is data: names are looked up in a table, nothing is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headloss.losses import LOSSES
from headloss.signature import RESERVED, function_name, suggest
from headloss.term import Term

if TYPE_CHECKING:
    from headloss.objective import Objective

_KEYS = ("terms", "metrics", "backend")


def read_config(config: Mapping[str, Any], losses: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """The arguments of `Objective` from a config."""
    if not isinstance(config, Mapping):
        raise TypeError(f"config: wanted a mapping with {', '.join(_KEYS)}, got {type(config).__name__}")
    for key in config:
        if key not in _KEYS:
            raise ValueError(f"config: unknown key {key!r}; there are {', '.join(_KEYS)}{suggest(str(key), _KEYS)}")
    terms = config.get("terms")
    if not isinstance(terms, Mapping) or not terms:
        raise ValueError("config: wanted terms: a mapping from names to losses")
    known = {**LOSSES, **losses}
    read: dict[str, Any] = {}
    for name, entry in terms.items():
        if name in ("metrics", "backend") or not isinstance(name, str):
            raise ValueError(f"config: {name!r} cannot be the name of a term")
        read[name] = _read_term(name, entry, known)
    metrics = config.get("metrics", ())
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise TypeError(f"config: wanted metrics: a list of names, got {metrics!r}")
    metrics = [known.get(m, m) if isinstance(m, str) and m not in LOSSES else m for m in metrics]
    return {**read, "metrics": metrics, "backend": config.get("backend", "auto")}


def _read_term(name: str, entry: Any, known: Mapping[str, Callable[..., Any]]) -> Term:
    if isinstance(entry, str):
        entry = {"loss": entry}
    if not isinstance(entry, Mapping) or "loss" not in entry:
        raise ValueError(f"config: term {name!r} wants a loss's name or a mapping with 'loss', got {entry!r}")
    options = dict(entry)
    loss = options.pop("loss")
    if loss not in known:
        there = ", ".join(sorted(known))
        raise ValueError(f"config: term {name!r} names loss {loss!r}; there are {there}{suggest(str(loss), known)}")
    if isinstance(options.get("row_weight"), str):
        options["row_weight"] = known.get(options["row_weight"], options["row_weight"])
    try:
        return Term(known[loss], **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"config: term {name!r}: {error}") from None


def write_config(objective: Objective) -> dict[str, Any]:
    """The config of an objective; functions go by their names."""
    terms: dict[str, Any] = {}
    for name, term in objective.terms.items():
        entry: dict[str, Any] = {"loss": function_name(term.fn)}
        plain = {"weight": 1.0, "reduction": "token_mean", "facts": {}, "tail": "bucket"}
        for key in sorted(RESERVED & set(Term.__slots__)):
            value = getattr(term, key)
            if isinstance(value, Tensor):
                value = float(value)
            if callable(value):
                if getattr(value, "__closure__", None):
                    raise ValueError(
                        f"row_weight: {function_name(value)!r} of term {name!r} was made with numbers of its own, "
                        f"which a config cannot hold; name a function that has none"
                    )
                value = function_name(value)
            if key == "facts":
                value = {k: list(v) for k, v in value.items()}
            if value is not None and value != plain.get(key):
                entry[key] = value
        terms[name] = {**entry, **term.options}
    config: dict[str, Any] = {"terms": terms}
    for name, call in objective.metrics:
        if isinstance(call.fn, Term) and repr(call.fn) != repr(Term(call.fn.fn)):
            raise ValueError(f"metrics: {name!r} is {call.fn!r}, and a config holds a metric's name only")
    if objective.metrics:
        config["metrics"] = [name for name, _ in objective.metrics]
    if objective.backend != "auto":
        config["backend"] = objective.backend
    return config
