"""A function ready to be called: what is injected into it, what it reads otherwise, and what it may return.

Dimension key:  R rows that count   S segments
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.facts import Fact
from headloss.segments import Segments, WrongLengthError
from headloss.trace.reads import Reads, ours, reads, writes_unseen
from headloss.trace.signature import Signature


class Env(NamedTuple):
    """All that can be injected, for one set of rows."""

    facts: Mapping[Fact, Tensor]
    inputs: Mapping[str, Tensor | None]
    targets: Tensor | None
    segments: Segments | None

    def arguments(self, signature: Signature) -> dict[str, Any]:
        """What to call the function with; an optional input that was not passed keeps its default."""
        values: dict[str, Any] = {}
        for p in signature.parameters:
            if p.kind == "fact":
                assert p.fact is not None
                values[p.name] = self.facts[p.fact]
            elif p.kind == "segments":
                if self.segments is not None:
                    values[p.name] = self.segments
            elif p.kind == "targets":
                values[p.name] = self.targets
            elif p.key in self.inputs:
                values[p.name] = self.inputs[p.key]
        return values


class WrongValueError(TypeError):
    """A loss returned something that is not one real value per row, segment or pair."""


class WrongWeightError(ValueError):
    """A row weight does not fit the values it weighs."""


class WritesError(ValueError):
    """A function writes into what it was handed."""


class Call(NamedTuple):
    """A term's function with its options, and its row weight if it has one: all that a trace depends on."""

    fn: Callable[..., Any]
    signature: Signature
    options: Mapping[str, Any]  # those that were given; the others keep the function's own defaults
    row_weight: str | Callable[..., Any] | None = None
    row_weight_signature: Signature | None = None
    pure: bool = False  # the user vouches that it reads nothing that changes

    def __call__(self, env: Env) -> tuple[Tensor, dict[str, Tensor]]:
        """The values, weighted row by row, and the metrics."""
        given = env.arguments(self.signature)
        try:
            result = evaluate(self.fn, self.signature.name, given, self.options)
        except (RuntimeError, WrongLengthError) as error:
            shapes = ", ".join(f"{k} {tuple(x.shape)}" for k, x in given.items() if isinstance(x, Tensor))
            error.add_note(
                f"{self.signature.name} was called with {shapes}; "
                f"segments.spread(x) makes one value a row of one value per segment"
            )
            raise
        name = self.signature.name
        value, metrics = _values_and_metrics(name, result)
        weight = self.weight(env)
        if weight is not None:
            if weight.shape not in ((), value.shape):
                raise WrongWeightError(
                    f"row_weight: of {name} has {weight.ndim} dimensions, and does not fit its values, one per row or "
                    f"segment"
                    if weight.ndim > 1
                    else f"row_weight: of {name} has {weight.shape[0]} weights for {value.shape[0]} values"
                )
            value = value * weight
        return value, metrics

    def reads(self) -> Reads:
        """All that a call of the function reads apart from its arguments."""
        own = reads(self.fn, self.options, pure=self.pure)
        elements = [f.element.reads() for f in self.signature.facts if f.element is not None]
        weighed = Reads(self.row_weight, (), False)
        if callable(self.row_weight):
            weighed = reads(self.row_weight, pure=self.pure)
        elif not elements:
            return own._replace(key=(own.key, self.row_weight))
        every = (own, weighed, *elements)
        unknown = tuple(dict.fromkeys(x for r in (own, weighed) for x in r.unknown))
        return Reads(tuple([r.key for r in every]), unknown, any(r.floats for r in every))

    def weight(self, env: Env) -> Tensor | None:
        if self.row_weight is None:
            return None
        if isinstance(self.row_weight, str):
            weight = env.inputs[self.row_weight]
            assert weight is not None
        else:
            assert self.row_weight_signature is not None
            given = env.arguments(self.row_weight_signature)
            name = self.row_weight_signature.name
            weight = evaluate(self.row_weight, name, given)
            if not isinstance(weight, Tensor) or weight.dtype.is_complex:
                raise WrongWeightError(f"row_weight: {name} returns {_got(weight)}, wanted one real weight per row")
        return weight.detach()

    @property
    def facts(self) -> tuple[Fact, ...]:
        more = self.row_weight_signature.facts if self.row_weight_signature is not None else ()
        return tuple(dict.fromkeys((*self.signature.facts, *more)))

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return (self.fn, self.row_weight) if callable(self.row_weight) else (self.fn,)

    @property
    def signatures(self) -> tuple[Signature, ...]:
        return (self.signature,) if self.row_weight_signature is None else (self.signature, self.row_weight_signature)

    @property
    def input_names(self) -> tuple[str, ...]:
        names = [p.key for s in self.signatures for p in s.parameters if p.kind == "input"]
        return tuple(dict.fromkeys([*names, *([self.row_weight] if isinstance(self.row_weight, str) else [])]))


def _values_and_metrics(name: str, result: Any) -> tuple[Tensor, dict[str, Any]]:
    """What a loss returned: `values`, or `(values, metrics)`."""
    if isinstance(result, tuple) and not (len(result) == 2 and isinstance(result[1], Mapping)):
        got = ", ".join("tensor" if isinstance(x, Tensor) else type(x).__name__ for x in result)
        raise WrongValueError(f"{name}: wanted values, or (values, a dict of metrics), got a tuple of ({got})")
    value, metrics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(value, Tensor) or value.ndim != 1 or value.dtype.is_complex:
        raise WrongValueError(
            f"{name}: wanted one real value per row, segment or pair (a vector), got {_got(value)}; "
            f"leave the reduction to Term(reduction=...)"
        )
    for key, x in metrics.items():
        if not hasattr(x, "__float__") or (isinstance(x, Tensor) and x.dtype.is_complex):
            raise WrongValueError(
                f"{name}: its metric {key!r} is {_got(x)}, wanted a tensor of real values or a number"
            )
    return value, dict(metrics)


def _got(x: Any) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{x.dtype} values" if x.dtype.is_complex else f"shape {tuple(x.shape)}"


def evaluate(fn: Callable[..., Any], name: str, given: Mapping[str, Any], options: Mapping[str, Any] = {}) -> Any:
    """What a function returns.  It must leave its arguments as they are: others read them too."""
    # nothing counts what is written to an inference tensor, nor what is written through `.data` or NumPy
    if torch.is_inference_mode_enabled() or (not ours(fn) and writes_unseen(fn)):
        given = {k: x.clone() if isinstance(x, Tensor) else x for k, x in given.items()}
    tensors = [(k, x, x._version) for k, x in given.items() if isinstance(x, Tensor) and not x.is_inference()]
    result = fn(**given, **options)
    for argument, x, before in tensors:
        if x._version != before:
            raise WritesError(writes_message(name, argument))
    return result


def writes_message(function: str, name: str) -> str:
    return (
        f"{name}: {function} writes into it, but other terms and later passes read it too; work on a copy "
        f"({name} = {name}.clone(), or an operation that is not in place)"
    )
