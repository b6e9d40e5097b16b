"""Metrics: numbers that can be combined over chunks, micro-batches and ranks, and read when it is time to log.

A `Metric` holds the sums behind a number (its `parts`), on the device, detached; one pass computes those of a call.
The ending of its name says how two of them combine:

    ..._min, ..._max           smallest, largest
    ..._std                    standard deviation
    effective_sample_size      (sum w)^2 / sum w^2
    perplexity                 exp of the mean
    anything else              mean over tokens or over segments, whichever the values belong to

`Meter` (meter.py) adds up metrics without waiting for the device and brings all of them to the host in one copy.
"""

from __future__ import annotations

import collections
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from headloss.deferred_checks import is_capturing
from headloss.divergence import is_divergence
from headloss.facts import FACTS
from headloss.losses import LOSSES
from headloss.options import shown
from headloss.sources import Sparse
from headloss.term import Term
from headloss.trace.call import Call
from headloss.trace.classify import without_modes
from headloss.trace.signature import CANDIDATES, function_name, passed_names, read_signature, suggest


def accuracy(argmax: Tensor, targets: Tensor) -> Tensor:
    """How often the likeliest column is the target."""
    return argmax == targets


def perplexity(logprob: Tensor) -> Tensor:
    """exp of the mean of -logprob."""
    return -logprob


def teacher_agreement(argmax: Tensor, teacher_argmax: Tensor) -> Tensor:
    """How often student and teacher have the same likeliest column."""
    return argmax == teacher_argmax


def _sparse_agreement(argmax: Tensor, teacher_ids: Tensor, teacher_logprob: Tensor) -> Tensor:
    best = teacher_logprob.argmax(-1, keepdim=True)
    return argmax == teacher_ids.gather(-1, best)[:, 0]


def dead_rows() -> Tensor:
    """How often a row has no gradient, as with an advantage of 0 or a clipped ratio; NaN if a call computes none."""
    raise AssertionError("computed from the gradient, in `engine.run`")


NAMED = {fn.__name__: fn for fn in (accuracy, perplexity, teacher_agreement, dead_rows)}

DIVERGENCES: Mapping[str, Callable[..., Any]] = {name: fn for name, fn in LOSSES.items() if is_divergence(fn)}


class _Kind(NamedTuple):
    parts: tuple[str, ...]  # the sums over the values that count; see `MetricGroup`
    value: Callable[..., Tensor]

    @property
    def combine(self) -> str:
        return self.parts[0] if self.parts[0] in ("min", "max") else "sum"


KINDS: dict[str, _Kind] = {
    "mean": _Kind(("sum", "count"), lambda s, n: s / n),
    "exp": _Kind(("sum", "count"), lambda s, n: (s / n).exp()),
    "std": _Kind(("sum", "squares", "count"), lambda s, q, n: (q / n - (s / n) ** 2).clamp(min=0).sqrt()),
    "ess": _Kind(("sum", "squares"), lambda s, q: s * s / q),
    "min": _Kind(("min",), lambda x: x),
    "max": _Kind(("max",), lambda x: x),
}
_ENDINGS = {"_min": "min", "_max": "max", "_std": "std"}
_NAMES = {"effective_sample_size": "ess", "perplexity": "exp"}


@functools.lru_cache(1024)
def kind_of(name: str) -> str:
    """How a metric combines, by its name."""
    last = name.rsplit("/", 1)[-1]
    return _NAMES.get(last) or next((kind for ending, kind in _ENDINGS.items() if last.endswith(ending)), "mean")


@functools.lru_cache(256)
def _kinds_of(names: tuple[str, ...]) -> dict[str, str]:
    return {name: kind_of(name) for name in names if not name.endswith("/")}


class MetricGroup:
    """Metrics of the same rows, reduced together when the first of them is read.

    Dimension key:  M metrics   R values of each
    """

    def __init__(
        self,
        names: Sequence[str],
        values_MR: Callable[[], Tensor],
        weights_R: Tensor | None,
        places: Sequence[int] | None = None,  # which row each has, if they are not in the order of the names
    ) -> None:
        self.names, self.kinds, self.places = names, _kinds_of(tuple(names)), places
        self.unreduced: tuple[Any, ...] | None = values_MR, weights_R  # dropped once reduced, not before: for threads
        self.reduced: dict[str, tuple[Tensor, ...]] = {}

    def parts(self, name: str) -> tuple[Tensor, ...]:
        self.reduce_now()
        return self.reduced[name]

    def reduce_now(self) -> None:
        unreduced = self.unreduced
        if unreduced is not None:
            self.reduced = self._reduce(*unreduced)
            self.unreduced = None

    def _reduce(self, values_MR: Callable[[], Tensor], weights_R: Tensor | None) -> dict[str, tuple[Tensor, ...]]:
        """Reduce metrics that count the same rows together: those with a mask (`term/`), and the others."""
        x_MR, places = values_MR(), dict(zip(self.names, self.places or range(len(self.names)), strict=True))
        masks = [name for name in self.names if name.endswith("/")]
        mask_of = {name: max((m for m in masks if name.startswith(m)), key=len, default=None) for name in self.kinds}
        reduced: dict[str, tuple[Tensor, ...]] = {}
        for mask in dict.fromkeys(mask_of.values()):
            counted = None if weights_R is None else weights_R.reshape(-1) > 0
            if mask is not None:
                unmasked = x_MR[places[mask]] != 0
                counted = unmasked if counted is None else counted & unmasked
            kinds = {name: kind for name, kind in self.kinds.items() if mask_of[name] == mask}
            reduced |= self._reduce_rows(x_MR, places, counted, kinds)
        return {name: reduced[name] for name in self.kinds}

    def _reduce_rows(
        self, x_MR: Tensor, places: Mapping[str, int], counted: Tensor | None, kinds: Mapping[str, str]
    ) -> dict[str, tuple[Tensor, ...]]:
        wide = _widest(x_MR.device)
        count = torch.full((), x_MR.shape[1], dtype=wide, device=x_MR.device)
        if counted is not None:
            count = counted.sum(dtype=wide)
            x_MR = torch.where(counted, x_MR, 0)  # a value that does not count may be NaN
        reduced: dict[tuple[str, int], Tensor] = {}
        for part, reduce in _REDUCE.items():
            rows = sorted({places[name] for name, kind in kinds.items() if part in KINDS[kind].parts})
            if rows:
                values = reduce(x_MR if len(rows) == len(x_MR) else torch.stack([x_MR[i] for i in rows]), counted, wide)
                reduced |= {(part, row): value for row, value in zip(rows, values.unbind(), strict=True)}
        return {
            name: tuple(count if part == "count" else reduced[part, places[name]] for part in KINDS[kind].parts)
            for name, kind in kinds.items()
        }


def _stacked(values: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """A copy of the values as rows of a matrix, and the row of each: several may be one tensor."""
    unique = {id(x): x for x in values}
    place = {key: i for i, key in enumerate(unique)}
    xs = [x.detach().reshape(-1) for x in unique.values()]
    dtypes = {x.dtype for x in xs}
    same = len(dtypes) == 1 and next(iter(dtypes)).is_floating_point
    x_MR = torch.stack([x if same else x.to(_widest(x.device)) for x in xs])
    return x_MR, [place[id(x)] for x in values]


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _extreme(x_MR: Tensor, counted: Tensor | None, fill: float) -> Tensor:
    x_MR = x_MR if counted is None else torch.where(counted, x_MR, fill)
    return x_MR if x_MR.shape[1] else x_MR.new_full((len(x_MR), 1), fill)


_REDUCE: dict[str, Callable[[Tensor, Tensor | None, torch.dtype], Tensor]] = {
    "sum": lambda x, _, wide: x.sum(1, dtype=wide),
    "squares": lambda x, _, wide: x.to(wide).square().sum(1),
    "min": lambda x, counted, wide: _extreme(x.to(wide), counted, torch.inf).amin(1),
    "max": lambda x, counted, wide: _extreme(x.to(wide), counted, -torch.inf).amax(1),
}


class Metric:
    """A number that keeps the sums it comes from.  `float(metric)` reads it; `a + b` combines two."""

    __slots__ = ("_parts", "kind", "per")
    kind: str
    per: str  # "token", "segment" or "call": what it is averaged over
    _parts: tuple[Tensor, ...] | tuple[MetricGroup, str]

    def __init__(self, kind: str, parts: tuple[Tensor, ...] | tuple[MetricGroup, str], per: str) -> None:
        self.kind, self._parts, self.per = kind, parts, per

    @classmethod
    def of(cls, name: str, values: Tensor, weights: Tensor | None, per: str) -> Metric:
        return measure({name: values}, weights, per)[name]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The sums (or extremes) behind it, on the device."""
        parts = self._parts
        if isinstance(parts[0], MetricGroup):
            group, name = parts
            self._parts = parts = group.parts(name)
        return parts

    @property
    def value(self) -> Tensor:
        """The number, on the device; NaN if nothing was counted, inf for a min and -inf for a max."""
        return KINDS[self.kind].value(*self.parts)

    def __add__(self, other: object) -> Metric:
        if not isinstance(other, Metric) or other.kind != self.kind:
            return NotImplemented
        if other.per != self.per:
            raise ValueError(f"metrics: one is per {self.per} and the other per {other.per}; they do not add up")
        joins: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
        join = joins[KINDS[self.kind].combine]
        parts = tuple(join(a, b) for a, b in zip(self.parts, other.parts, strict=True))
        return Metric(self.kind, parts, self.per)

    def __reduce__(self) -> Any:
        return Metric, (self.kind, self.parts, self.per)

    def __float__(self) -> float:
        return float(self.value)

    def item(self) -> float:
        return float(self.value)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else repr(self)

    def __repr__(self) -> str:
        return f"Metric({float(self.value):.6g}, {self.kind} per {self.per})"


def measure(values: Mapping[str, Tensor], weights: Tensor | None, per: str) -> dict[str, Metric]:
    """Metrics from values of the same rows (or segments, or pairs); values of weight 0 do not count.

    A name that ends in "/" is a mask: it says which rows count in metrics whose names start with it.  If two masks
    match, the longer name wins.
    """
    if all(name.endswith("/") for name in values):
        return {}
    x_MR, places = _stacked([*values.values()])  # copied now: they may be inputs, which the caller may overwrite
    counted = None if weights is None else weights > 0
    return measure_later(tuple(values), lambda: x_MR, counted, per, places)


def measure_later(
    names: Sequence[str],
    values_MR: Callable[[], Tensor],
    weights: Tensor | None,
    per: str,
    places: Sequence[int] | None = None,
) -> dict[str, Metric]:
    """The same for (M, R) values that nobody else can write to: they are reduced when a metric is first read, or a few
    calls later.

    While a CUDA graph is captured they are reduced now, so that its replays reduce them too.
    """
    group = MetricGroup(names, values_MR, weights, places)
    if not group.kinds:
        return {}
    if is_capturing():
        group.reduce_now()
    else:
        _reduce_later(group)
    return {name: Metric(kind, (group, name), per) for name, kind in group.kinds.items()}


def _reduce_later(group: MetricGroup) -> None:
    """Reduce it `_MOST_UNREDUCED` groups later if its metrics still exist: until they are reduced they hold values per
    row, and a list of the metrics of every step would fill the memory."""
    _UNREDUCED.append((weakref.ref(group), stream := _stream()))
    if len(_UNREDUCED) > _MOST_UNREDUCED:
        kept, of = _UNREDUCED.popleft()
        oldest = kept()
        if oldest is not None and of == stream:  # another stream may not have computed its values yet
            with without_modes(), _disable_current_modes(), torch.no_grad():  # it was another call
                oldest.reduce_now()


_UNREDUCED: collections.deque[tuple[weakref.ref[MetricGroup], Any]] = collections.deque()
_MOST_UNREDUCED = 16


def _stream() -> tuple[int, int] | None:
    """The current device and its stream."""
    if not torch.cuda.is_initialized():
        return None
    device = torch._C._cuda_getDevice()
    return device, torch._C._cuda_getCurrentRawStream(device)


def copied_metrics(metrics: Any) -> Any:
    """The requested metrics, in a container that the caller cannot change."""
    if isinstance(metrics, Mapping):
        return dict(metrics)
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        hint = "; a term cannot have this name" if callable(metrics) or isinstance(metrics, Term) else ""
        raise TypeError(f"metrics: wanted a list of names and functions, got {shown(metrics)}{hint}")
    return tuple(metrics)


def read_metrics(metrics: Any) -> Iterator[tuple[str, Call]]:
    pairs = metrics.items() if isinstance(metrics, Mapping) else [(None, m) for m in metrics]
    for name, metric in pairs:
        if name is not None and not (isinstance(name, str) and name and not name.endswith("/")):
            raise TypeError(f"metrics: wanted names as keys, got {shown(name)}")
        if isinstance(metric, str) and metric in DIVERGENCES:
            metric = DIVERGENCES[metric]
        if isinstance(metric, Term) or (callable(metric) and is_divergence(metric)):
            term = metric if isinstance(metric, Term) else Term(metric)
            yield name or function_name(term.fn), Call(term, term.call(None, {}).signature, {})  # type: ignore[arg-type]
            continue
        if isinstance(metric, str):
            if metric not in NAMED and metric not in FACTS:
                known = [*NAMED, *FACTS, *DIVERGENCES]
                near = suggest(metric, known) or f"; there are {', '.join(known)}"
                raise ValueError(f"metrics: no metric {metric!r}{near}")
            fn, label = NAMED.get(metric) or _fact_metric(metric), metric
        elif callable(metric):
            fn, label = metric, function_name(metric)
        else:
            raise TypeError(f"metrics: wanted names and functions, got {type(metric).__name__}")
        signature = read_signature(fn)
        yield name or label, Call(fn, signature, {})


def check_names(terms: Mapping[str, Any], metrics: Sequence[str]) -> None:
    """Check that no two terms or metrics share a key in the record; `term/metric` is a metric of a term's loss."""
    if "" in terms:
        raise ValueError("terms: one has an empty name; it keys terms and metrics")
    for i, name in enumerate((*terms, *metrics)):
        inside = next((t for t in terms if name.startswith(f"{t}/")), None)
        if inside is not None:
            kind = "term" if i < len(terms) else "metric"
            raise ValueError(
                f"{name}: the {kind} has a name of the form that metrics of term {inside!r} have; rename it"
            )
    twice = next((name for i, name in enumerate(metrics) if name in metrics[:i]), None)
    if twice is not None:
        raise ValueError(f"metrics: two are named {twice!r}; name each, metrics={{name: function}}")


def retarget(call: Call, source_temperature: float | None, teachers: Mapping[str, Any]) -> Call:
    """The metric bound to the call's only teacher, in the form that this kind of teacher allows."""
    if isinstance(call.fn, Term):
        term = call.fn.call(source_temperature, teachers)
        return term._replace(fn=_values_only(term.fn))
    passed, ids = passed_names(teachers), CANDIDATES if CANDIDATES in teachers else None
    teacher, fn = passed[0] if len(passed) == 1 else None, call.fn
    if not (teacher or ids) or not any(p.teacher or (p.fact and p.fact.teacher) for p in call.signature.parameters):
        return call
    if fn is teacher_agreement and isinstance(teachers.get(teacher or ""), Sparse):
        fn = _sparse_agreement
    signature = read_signature(fn, teacher=teacher, ids=ids)
    return call._replace(fn=fn, signature=signature)


def _values_only(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss's values, without the metrics that it returns."""

    def values(**arguments: Any) -> Any:
        result = fn(**arguments)
        return result[0] if isinstance(result, tuple) else result

    return values


@functools.cache
def _fact_metric(name: str) -> Callable[..., Tensor]:
    """The function `lambda <name>: <name>`."""

    def metric(**facts: Tensor) -> Tensor:
        return facts[name]

    metric.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    )
    metric.__name__ = name
    metric.fixed = True  # type: ignore[attr-defined]  # for `function_reads.ours`
    return metric
