"""`Call`: a loss or metric with its options and row weights, called on facts and inputs; its results are checked.

Dimension key:  R rows that count   S segments
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headloss.facts import Fact
from headloss.segments import Segments, WrongLengthError, sizes
from headloss.trace.function_reads import Reads, defaults, is_ours, reads_of, writes_uncounted
from headloss.trace.guards import Guards, record_guards
from headloss.trace.signature import CLASSES, Signature, input_key


class Env(NamedTuple):
    """Everything that can be injected into a function, for one set of rows."""

    facts: Mapping[Fact, Tensor]
    inputs: Mapping[str, Tensor | None]
    targets: Tensor | None
    segments: Segments | None

    def arguments(self, signature: Signature) -> dict[str, Any]:
        """The arguments to call a function with; an optional input that was not passed keeps its default."""
        values: dict[str, Any] = {}
        for p in signature.parameters:
            if p.kind == "fact":
                assert p.fact is not None
                values[p.name] = self.facts[p.fact].sum(-1) if p.picked else self.facts[p.fact]
            elif p.kind == "segments":
                if self.segments is not None:
                    values[p.name] = self.segments
            elif p.kind == "targets":
                values[p.name] = self.targets
            elif p.key in self.inputs:
                x = values[p.name] = self.inputs[p.key]
                if signature.real and x is not None and p.teacher is None and p.name not in ("pairs", "targets"):
                    values[p.name] = _wide(x) if x.is_floating_point() else x.to(self.dtype)
        return values

    @property
    def dtype(self) -> torch.dtype:
        """That of the facts; float64 where there are none."""
        return next((x.dtype for x in self.facts.values() if x.is_floating_point()), torch.float64)

    def per(self, x: Tensor) -> str:
        """What a vector has one value for, in words, for an error message: sizes may be symbols or stand-ins."""
        size = str(x.shape[0])
        if size in {str(f.shape[0]) for f in self.facts.values() if f.ndim}:
            return "one per row"
        if self.segments is not None and size == str(self.segments.num_segments):
            return "one per segment"
        return "1 in all" if size == "1" else "of another number (segments.spread makes rows of segments)"


class WrongValueError(TypeError):
    """A loss returned something that is not one real value per row, segment or pair."""


class WrongWeightError(ValueError):
    """A row weight does not fit the values it weighs."""


class WritesError(ValueError):
    """A function writes into one of its arguments."""


WeightAndMetrics = tuple[Tensor | None, dict[str, dict[str, Any]]]  # see `Call.weigh`
COUNTED = ""  # among a term's metrics, the name of the mask of rows that the others count


class RowWeight(NamedTuple):
    """One factor of a term's row weight: the name of an input, or a function and what it asks for."""

    of: str | Callable[..., Any]
    signature: Signature | None = None


class Call(NamedTuple):
    """A loss or metric with its options and row weights: all that a trace depends on."""

    fn: Callable[..., Any]
    signature: Signature
    options: Mapping[str, Any]  # those that the user set; the others keep the function's defaults
    row_weights: tuple[RowWeight, ...] = ()
    pure: bool = False  # the user vouches that it reads nothing that changes
    share: str | None = None  # with reduction_segments: the input that says how much each row counts

    def __call__(
        self, env: Env, row_inputs: Container[str] | None = None, row_weight: WeightAndMetrics | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The values, each times its row weight, and the metrics.

        A row of weight 0 is left out: its value is 0 whatever the function returns there, and metrics do not count it.
        `row_inputs`: the per-row inputs of a function that combines no rows; a row of weight 0 then gets no gradient,
        not even 0 * inf.  `row_weight`: the result of `weigh`, if it is known already.
        """
        name, arguments, (weight, reported) = (
            self.signature.name,
            env.arguments(self.signature),
            row_weight or self.weigh(env),
        )
        if row_inputs is not None and weight is not None:
            by_row = {p.name for p in self.signature.parameters if p.kind == "fact" or p.key in row_inputs}
            arguments = {k: _gated(x, weight) if k in by_row else x for k, x in arguments.items()}
        try:
            result = call_function(self.fn, name, arguments, self.options)
        except (RuntimeError, WrongLengthError) as error:
            shapes = ", ".join(f"{k} {sizes(x.shape)}" for k, x in arguments.items() if isinstance(x, Tensor))
            error.add_note(
                f"{name} was called with {shapes}; segments.spread(x) makes one value per row of one value per segment"
            )
            raise
        value, metrics = _values_and_metrics(name, result)
        if weight is not None:
            if weight.shape not in ((), value.shape):
                raise WrongWeightError(
                    f"row_weight: of {name} has {weight.ndim} dimensions, and does not fit its values, one per row or "
                    f"segment"
                    if weight.ndim > 1
                    else f"row_weight: of {name}: the weights are {env.per(weight)}, the values {env.per(value)}"
                )
            value = torch.where(weight != 0, value * weight, 0.0)
            metrics |= {COUNTED: torch.where(weight != 0, torch.ones_like(value), 0.0)} if metrics else {}
            for of, own in reported.items():  # metrics of the weight itself count rows of weight 0 too
                metrics |= {f"{of}/{k}": x for k, x in own.items()} | {f"{of}/{COUNTED}": torch.ones_like(value)}
        return value, metrics

    def reads(self) -> Reads:
        """Everything that a call of the function reads besides its arguments."""
        own = reads_of(self.fn, self.options, pure=self.pure)
        elements = [f.element.reads() for f in self.signature.facts if f.element is not None]
        weights = [reads_of(w.of, pure=self.pure) for w in self.row_weights if callable(w.of)]
        names = self.weight_names
        if not weights and not elements:
            return own._replace(key=(own.key, names))
        every = (own, *weights, *elements)
        unknown = tuple(dict.fromkeys(x for r in (own, *weights) for x in r.unknown))
        return Reads((names, *(r.key for r in every)), unknown, any(r.variable_floats for r in every))

    def mean_weight(self, env: Env, row_weight: WeightAndMetrics) -> Tensor | None:
        """The weights whose sum a weighted mean divides by: row weights times class weights."""
        weight, _ = row_weight
        if CLASSES["class_weight"] not in self.input_names:
            return weight
        of_class = env.inputs[CLASSES["class_weight"]]
        assert of_class is not None
        return of_class.detach() if weight is None else _wide(weight) * _wide(of_class.detach())

    def weigh(self, env: Env) -> WeightAndMetrics:
        """The product of the row weights, detached, and the metrics that they report, by the weights' names."""
        product: Tensor | None = None
        reported: dict[str, dict[str, Any]] = {}
        names: list[str] = []
        for of, signature in self.row_weights:
            if isinstance(of, str):
                weight = env.inputs[of]
                assert weight is not None
            else:
                assert signature is not None
                weight, metrics = _with_metrics(call_function(of, signature.name, env.arguments(signature)))
                if not isinstance(weight, Tensor) or weight.dtype.is_complex:
                    wanted = "wanted one real weight per row, or that and a dict of metrics"
                    raise WrongWeightError(f"row_weight: {signature.name} returns {_got(weight)}, {wanted}")
                if metrics:
                    check_metrics(signature.name, metrics)
                    names.append(signature.name)
                    count = names.count(signature.name)
                    reported[f"{signature.name}_{count}" if count > 1 else signature.name] = dict(metrics)
            product = weight.detach() if product is None else _wide(product) * _wide(weight.detach())
        return product, reported

    @property
    def weighs_by_facts(self) -> bool:
        """Whether the row weight depends on facts."""
        return any(w.signature is not None and w.signature.facts for w in self.row_weights)

    @property
    def facts(self) -> tuple[Fact, ...]:
        return tuple(dict.fromkeys(facts_of(self)))

    def wants(self, kind: str) -> bool:
        """Whether some function takes "segments" or "targets"."""
        return any(s.wants(kind) for s in self.signatures)

    @property
    def teachers(self) -> set[str]:
        """The names of the teachers that it uses in a call."""
        pairs = [(p.teacher, p.fact and p.fact.teacher) for s in self.signatures for p in s.parameters]
        return {name for pair in pairs for name in pair if name}

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return (self.fn, *(w.of for w in self.row_weights if callable(w.of)))

    @property
    def signatures(self) -> tuple[Signature, ...]:
        return (self.signature, *(w.signature for w in self.row_weights if w.signature is not None))

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The inputs that serve as row weights directly."""
        return tuple(w.of for w in self.row_weights if isinstance(w.of, str))

    @property
    def input_names(self) -> tuple[str, ...]:
        return inputs_of(self)


def inputs_of(call: Call) -> tuple[str, ...]:
    """The names of a call's inputs.  Not a property: torch.compile of torch 2.8 reads a named tuple's fields only."""
    names = [input_key(p) for p in call.signature.parameters if p.kind == "input"]
    for w in call.row_weights:
        names += [input_key(p) for p in w.signature.parameters if p.kind == "input"] if w.signature is not None else []
    names += [w.of for w in call.row_weights if isinstance(w.of, str)]
    return tuple(dict.fromkeys(names))


def facts_of(call: Call) -> list[Fact]:
    """The facts that a call's functions ask for, in order; a function for the same reason as `inputs_of`."""
    signatures = [call.signature] + [w.signature for w in call.row_weights if w.signature is not None]
    return [p.fact for s in signatures for p in s.parameters if p.fact is not None]


class _Walk(NamedTuple):
    """A walk over what functions read; one record, so that threads that share it replace all of it at once."""

    guards: Guards
    defaults: Any
    reads: Reads
    interned: object


class CachedReads:
    """Caches what a call's functions read, and walks over them again only if a guard fails."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.last: _Walk | None = None
        self.objects: dict[Reads, object] = {}

    def reads(self) -> Reads:
        return self._walk().reads

    def interned(self) -> object:
        """An object that stands for everything that is read: the same one for equal reads, which are slow to hash."""
        return self._walk().interned

    def _walk(self) -> _Walk:
        now, last = defaults(), self.last
        if last is None or last.defaults != now or not last.guards.hold():
            with record_guards() as guards:
                reads = self.call.reads()
            if len(self.objects) >= _MOST_OBJECTS:
                self.objects.clear()
            last = self.last = _Walk(guards, now, reads, self.objects.setdefault(reads, object()))
        return last


_MOST_OBJECTS = 64


def _wide(x: Tensor) -> Tensor:
    """The same numbers in float32 or better: -1 of uint8 is 255, and 300**2 is no float16."""
    return x if x.is_floating_point() and x.dtype.itemsize >= 4 else x.to(torch.float32)


def _gated(x: Any, weight: Tensor) -> Any:
    """x with a hook that stops the gradient of rows of weight 0."""
    if not isinstance(x, Tensor) or not x.requires_grad:
        return x
    x, counts = x.clone(), weight != 0
    counts = counts[:, None] if counts.ndim and x.ndim > 1 else counts
    x.register_hook(lambda g: torch.where(counts, g, 0.0))
    return x


def _values_and_metrics(name: str, result: Any) -> tuple[Tensor, dict[str, Any]]:
    """Check and split what a loss returned: `values`, or `(values, metrics)`."""
    value, metrics = _with_metrics(result)
    if isinstance(value, tuple):
        got = ", ".join("tensor" if isinstance(x, Tensor) else type(x).__name__ for x in value)
        raise WrongValueError(f"{name}: wanted values, or (values, a dict of metrics), got a tuple of ({got})")
    if not isinstance(value, Tensor) or value.ndim != 1 or value.dtype.is_complex:
        raise WrongValueError(
            f"{name}: wanted one real value per row, segment or pair (a vector), got {_got(value)}{_hint(value)}"
        )
    check_metrics(name, metrics)
    return value, dict(metrics)


def _with_metrics(result: Any) -> tuple[Any, Mapping[str, Any]]:
    return result if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping) else (result, {})


def check_metrics(name: str, metrics: Mapping[str, Any]) -> None:
    """Check what a function returns as metrics, by name; a name that ends in "/" would be a mask, see `metrics`."""
    for key, x in metrics.items():
        if not isinstance(key, str) or not key or key.endswith("/"):
            raise WrongValueError(f"{name}: wanted names for its metrics, got {key!r}")
        if not hasattr(x, "__float__") or (isinstance(x, Tensor) and x.dtype.is_complex):
            raise WrongValueError(
                f"{name}: its metric {key!r} is {_got(x)}, wanted a tensor of real values or a number"
                f"{'; hl.Term(...) measures a loss' * isinstance(x, tuple)}"
            )


def _hint(x: Any) -> str:
    if x is None:
        return "; does it return its values?"
    return "; do not reduce in the loss, use Term(reduction=...)" if isinstance(x, Tensor) and x.ndim == 0 else ""


def _got(x: Any) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{x.dtype} values" if x.dtype.is_complex else f"shape {sizes(x.shape)}"


def call_function(
    fn: Callable[..., Any], name: str, arguments: Mapping[str, Any], options: Mapping[str, Any] = {}
) -> Any:
    """Call a function; raise if it writes to its arguments, which others read too."""
    return call_guarded(fn, name, arguments, lambda arguments: fn(**arguments, **options))


def call_guarded(fn: Callable[..., Any], name: str, arguments: Mapping[str, Any], run: Callable[[Any], Any]) -> Any:
    """The result of `run(arguments)`, which calls `fn`; raise if that writes to its arguments."""
    # no version counter sees writes to an inference tensor, or through `.data` or NumPy: pass copies
    if torch.is_inference_mode_enabled() or (not is_ours(fn) and writes_uncounted(fn)):
        arguments = {k: x.clone() if isinstance(x, Tensor) else x for k, x in arguments.items()}
    every = [(k, x.ids if isinstance(x, Segments) else x) for k, x in arguments.items()]
    state = lambda x: (x._version, x.requires_grad)  # `detach_` raises no version
    tensors = [(k, x, state(x)) for k, x in every if isinstance(x, Tensor) and not x.is_inference()]
    result = run(arguments)
    for argument, x, version in tensors:
        if state(x) != version:
            raise WritesError(writes_message(name, argument))
    if forward_ad._current_level >= 0:
        _refuse_tangents(name, result if isinstance(result, tuple) else (result,))
    return result


def _refuse_tangents(name: str, results: Iterable[Any]) -> None:
    """Raise if a result carries a forward-mode tangent: no argument does, so a captured tensor must."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in results):
        raise RuntimeError(
            f"{name}: a tensor that it captures carries a forward-mode tangent, which a headloss call would drop: "
            f"headloss has reverse mode only.  Capture torch.autograd.forward_ad.unpack_dual(x).primal"
        )


def writes_message(function: str, name: str) -> str:
    return (
        f"{name}: {function} writes into it, but other terms and later passes read it too; work on a copy "
        f"({name} = {name}.clone(), or an operation that is not in place)"
    )
