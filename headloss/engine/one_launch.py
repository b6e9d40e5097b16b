"""A visit in one launch: what each chunk passes to the printed program, and what comes back.

Dimension key:  R rows that count   C rows of a chunk   T terms

The kernel reads a row, finds its facts, runs the program on them and writes the row's gradient.  It returns the facts,
each term's weighted value and each metric of every row, so that only sums over rows remain to be done.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headloss.deferred_checks import is_capturing
from headloss.engine.arguments import Chunk
from headloss.engine.heads import part_of
from headloss.engine.loss import TermsOnRows
from headloss.engine.plan import Planned
from headloss.engine.sweeps import Sweep
from headloss.facts import Fact, Softmax, Want
from headloss.metrics import Metric, measure_later
from headloss.reductions import lengths, shared_weight


class Launched:
    """The result of a visit in one launch: like `run.Result`, but each part is made only when something asks for it."""

    __slots__ = ("grads", "loss", "normaliser", "visited")

    def __init__(self, loss: Tensor | None, visited: Any, grads: Any, normaliser: Tensor | None) -> None:
        self.loss, self.visited, self.grads, self.normaliser = loss, visited, grads, normaliser

    @property
    def facts(self) -> dict[Fact, Tensor]:
        return self.visited.facts

    def blocks(self, want: Want) -> Sequence[Tensor]:
        """The few tensors that hold all facts, for autograd; each fact is cut out when something asks for it."""
        return [x.detach() for x in self.visited.blocks]

    def pulled(self, want: Want, cotangents: Sequence[Tensor | None]) -> dict[Fact, Tensor]:
        """The facts' cotangents from those of `blocks`."""
        blocks = [torch.zeros_like(x) if g is None else g for g, x in zip(cotangents, self.visited.blocks, strict=True)]
        found = self.visited.of(blocks).facts
        return {f: g for i, (f, g) in enumerate(found.items()) if i not in want.constant}

    def rest(self) -> Launched:
        """See `run.Result.rest`."""
        return Launched(None, self.visited, None, self.normaliser)

    @property
    def softmax(self) -> Softmax:
        return self.visited.softmax

    @property
    def by_fact(self) -> dict[Fact, Tensor]:
        return self.visited.cotangents

    @property
    def by_input(self) -> dict[str, Tensor]:
        return self.visited.input_cotangents


def launch(sweep: Sweep, loss: TermsOnRows, needs: tuple[bool, ...]) -> Launched:
    """Visit every chunk: the loss, the facts, the softmax, and the gradients if any are needed."""
    weighed = Weighed(loss, sweep.backend)
    chunks, times = loss.chunks, loss.plan.times
    assert chunks
    begun = 0.0 if "compiling" in times else time.perf_counter()
    head, grad = sweep.open_head(needs, chunks), True in needs
    seen = [sweep.launch(head, chunk, weighed.arguments(chunk.rows), grad) for chunk in chunks]
    visited, grads = type(seen[0]).join(seen), sweep.grads(head) if grad else None
    if begun:
        times["compiling"] = time.perf_counter() - begun
    return Launched(weighed.report(visited), visited, grads, weighed.normaliser)


def read_facts(sweep: Sweep) -> Launched:
    """The facts of every row, by a program without terms: one launch per chunk, and no gradient."""
    head = sweep._open()
    parts = head.chunks(sweep.rows.count, sweep.rows.keep is not None)
    seen = [sweep.launch(head, Chunk(part), sweep.backend.Arguments({}, {}, {}), False) for part in parts]
    return Launched(None, type(seen[0]).join(seen), None, None)


class Weighed:
    """The terms of a call with the weights of their rows, as a program takes them: one number if all rows agree."""

    normaliser: Tensor | None = None
    bases: dict[str, float | Tensor]  # for each term, one weight for all rows, or one per row

    def __init__(self, loss: TermsOnRows, backend: ModuleType, by_segment: bool = False, grad: bool = True) -> None:
        """`grad`: whether the program writes a gradient."""
        self.loss, self.backend, self.by_segment = loss, backend, by_segment
        scale, weights, by_token = loss.grad_scale, loss.weights, loss.plan.by_token
        if by_token is None:
            self.bases = {t.name: self._base(t) for t in loss.terms}
        else:
            mean = shared_weight("token_mean", "row", loss.rows, num_items=loss.num_items) if by_token else 1.0
            self.bases = dict.fromkeys(weights, mean)
            if len(by_token) < len(weights):
                self.bases |= {name: 1.0 for name in weights if name not in by_token}
        self.factors = weights
        if type(scale) is not float or scale != 1.0:
            self.factors = {name: weight * scale for name, weight in weights.items()}
        if loss.scaled_late and grad and weights:
            self._normalise()

    def _base(self, term: Planned) -> float | Tensor:
        loss = self.loss
        kind = term.trace.value or "row"
        if term.call.share is not None:
            return loss.share(term, kind)
        denominator = None
        if term.reduction == "weighted_mean":
            length = loss.rows.count if kind == "row" else len(loss.rows.segments or ())
            denominator = loss.denominator(term, kind, length)
        shared = shared_weight(
            term.reduction, kind, loss.rows,
            num_items=loss.num_items, num_segments=loss.num_segments, norm=term.length, denominator=denominator,
        )  # fmt: skip
        return shared if self.by_segment or not by_length(term) else shared / lengths(loss.rows, loss.dtype)

    def _normalise(self) -> None:
        """Rescale so that the gradient is of order 1, because fp16 cannot hold 1 / number of tokens."""
        dtype, device, valid = self.loss.dtype, self.loss.device, self.loss.rows.valid
        weights = [_tensor(self.bases[name] * factor, dtype, device).abs() for name, factor in self.factors.items()]
        if valid is not None:  # an ignored row has no segment, so its length is taken as 1
            weights = [x.masked_fill(~valid, 0) if x.ndim else x for x in weights]
        largest = torch.stack([x.amax() for x in weights]).amax()
        self.normaliser = largest.masked_fill(largest == 0, 1.0)
        self.factors = {name: factor / self.normaliser for name, factor in self.factors.items()}

    def arguments(self, part: slice) -> Any:
        bases, loss = self.bases.values(), self.loss
        if loss.plan.by_token is None:
            bases = [part_of(x, part) if isinstance(x, Tensor) and x.ndim else x for x in bases]  # type: ignore[assignment]
        inputs = loss.raw_inputs(part) if loss.shapes else {}
        return self.backend.Arguments(inputs, bases, self.factors.values())

    def report(self, visited: Any) -> Tensor:
        """Sum over the rows: the terms' values, and the loss; metrics are summed when they are read."""
        loss = self.loss
        if visited.program.metrics:  # note now which rows count: the targets may be written to later
            found = measured(visited, loss.rows.valid)
            loss.metrics = {**loss.metrics, **found} if loss.metrics else found
        if self.by_segment:
            loss.metrics = with_segments(loss.metrics, visited, loss.terms)
        weights = loss.weights
        if not weights:  # every term is switched off
            return torch.zeros((), dtype=loss.dtype, device=loss.device)
        sums, total = self.backend.totals(visited, weights.values())
        loss.values = later_values(weights, sums)
        return total


def with_segments(metrics: dict[str, Metric], settled: Any, terms: Sequence[Planned]) -> dict[str, Metric]:
    """The metrics together with those per segment, in the order of the terms."""
    names = settled.program.segment_metrics
    if not names:
        return metrics
    counts = settled.segment_counts > 0
    found = {**metrics, **measure_later(names, lambda: settled.segment_metric_values, counts, "segment")}
    order = [f"{t.name}/{key}" for t in terms for key in t.trace.metrics]
    return {name: found[name] for name in dict.fromkeys((*order, *found)) if name in found}


def later_values(weights: Mapping[str, object], sums: Tensor) -> dict[str, Tensor]:
    """The terms' values, made when one is first read."""
    return LazyDict(weights, lambda: dict(zip(weights, sums.unbind())))


def measured(visited: Any, valid: Tensor | None) -> dict[str, Metric]:
    """The metrics of a visit, to be summed when they are read."""
    names = visited.program.metrics
    make = lambda: measure_later(names, lambda: visited.metric_values, valid, "token")
    return make() if is_capturing() else LazyDict(_unread(names), make)


@functools.lru_cache(256)
def _unread(names: tuple[str, ...]) -> dict[str, object]:
    """Placeholders for metrics that nobody has read yet, without the masks."""
    return dict.fromkeys([name for name in names if not name.endswith("/")], object())


def by_length(term: Planned) -> bool:
    """Whether rows weigh less the longer their segment is."""
    return term.reduction == "seq_mean_token_mean" and term.call.share is None and term.trace.value == "row"


def _tensor(x: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """x as a tensor, made on the device: a CUDA graph cannot hold a copy from the host."""
    return x.to(device, dtype) if isinstance(x, Tensor) else torch.full((), x, dtype=dtype, device=device)


class LazyDict(dict[str, Any]):
    """A dict whose values are made when something first asks for one; `unread` has its keys."""

    __slots__ = ("_make",)

    def __init__(self, unread: Mapping[str, object], make: Callable[[], Mapping[str, Any]]) -> None:
        dict.__init__(self, unread)
        self._make: Callable[[], Mapping[str, Any]] | None = make

    def __reduce__(self) -> Any:
        return dict, ({**self},)


def _filled(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(self: LazyDict, *args: Any, **kwargs: Any) -> Any:
        if self._make is not None:
            dict.update(self, self._make())  # first: another thread must not see placeholders
            self._make = None
        return plain(self, *args, **kwargs)

    return method


for _name in (
    "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__ne__", "__or__", "__repr__", "__reversed__",
    "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "update",
    "values",
):  # fmt: skip
    setattr(LazyDict, _name, _filled(getattr(dict, _name)))
