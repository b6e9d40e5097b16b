"""A visit in one launch: what the printed program is handed, chunk by chunk, and what it brings back.

Dimension key:  R rows that count   C rows of a chunk   T terms

The kernel reads a row, finds its facts, runs the program on them and writes the row's gradient.  It leaves the facts,
each term's weighted value and each metric of every row; sums over rows are all that is left to do.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headloss.engine.heads import part_of
from headloss.engine.loss import TermsOnRows
from headloss.engine.plan import Planned
from headloss.engine.sweeps import Chunk, Sweep
from headloss.facts import Fact, Softmax, Want
from headloss.metrics import Metric, measure_later
from headloss.reductions import lengths, shared_weight
from headloss.rows import may_read


class Launched:
    """What a visit in one launch leaves behind: a `run.Result` whose parts are cut out when something asks."""

    def __init__(self, loss: Tensor | None, visited: Any, grads: Any, normaliser: Tensor | None) -> None:
        self.loss, self.visited, self.grads, self.normaliser = loss, visited, grads, normaliser

    @functools.cached_property
    def facts(self) -> dict[Fact, Tensor]:
        return self.visited.facts

    def values(self, want: Want) -> Sequence[Tensor]:
        """The facts in their order."""
        return self.visited.fact_values

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
    """Visit every chunk: the loss, the facts, the softmax, and the gradients if any are wanted."""
    weighed = Weighed(loss, sweep.backend)
    chunks, grad, times = loss.chunks, True in needs, loss.plan.times
    assert chunks
    head = sweep.open_head(needs, chunks)
    begun = 0.0 if "compiling" in times else time.perf_counter()
    seen = []
    for chunk in chunks:
        seen.append(sweep.launch(head, chunk, weighed.arguments(chunk.rows), grad))
        if begun:
            times.setdefault("compiling", time.perf_counter() - begun)
    visited = seen[0] if len(seen) == 1 else type(seen[0]).join(seen)
    return Launched(weighed.report(visited), visited, sweep.grads(head) if grad else None, weighed.normaliser)


def read_facts(sweep: Sweep) -> Launched:
    """The facts of every row, by a program without terms: one launch per chunk, and no gradient."""
    head = sweep._open()
    parts = head.chunks(sweep.rows.count, sweep.rows.keep is not None)
    seen = [sweep.launch(head, Chunk(part), sweep.backend.Arguments({}, {}, {}), False) for part in parts]
    return Launched(None, type(seen[0]).join(seen), None, None)


class Weighed:
    """The terms of a call with the weights of their rows, as the program takes them: numbers wherever rows agree."""

    def __init__(self, loss: TermsOnRows, backend: ModuleType, by_segment: bool = False) -> None:
        self.loss, self.backend, self.by_segment = loss, backend, by_segment
        self.bases = self._bases()
        scale, weights = loss.grad_scale, {t.name: loss.weights[t.name] for t in loss.terms}
        unscaled = type(scale) is float and scale == 1.0
        self.weights = weights
        self.factors = weights if unscaled else {name: weight * scale for name, weight in weights.items()}
        self.normaliser: Tensor | None = None
        if loss.narrow:
            self._normalise()

    def _bases(self) -> dict[str, float | Tensor]:
        """Of each term, the weight of a row, or of each."""
        loss = self.loss
        if loss.plan.by_token is None:
            return {t.name: self._base(t) for t in loss.terms}
        mean: float | Tensor = 1.0
        if True in loss.plan.by_token:
            mean = shared_weight(
                "token_mean", "row", loss.rows, num_items=loss.num_items, num_segments=None, norm=None, denominator=None
            )
        return {t.name: mean if is_mean else 1.0 for t, is_mean in zip(loss.terms, loss.plan.by_token, strict=True)}

    def _base(self, term: Planned) -> float | Tensor:
        loss = self.loss
        kind = term.trace.value or "row"
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
        """Write a gradient of order 1, because fp16 cannot hold 1 / number of tokens."""
        dtype, device = self.loss.dtype, self.loss.device
        sizes = [
            _tensor(self.bases[name] * factor, dtype, device).abs().amax() for name, factor in self.factors.items()
        ]
        largest = torch.stack(sizes).amax()
        self.normaliser = largest.masked_fill(largest == 0, 1.0)
        self.factors = {name: factor / self.normaliser for name, factor in self.factors.items()}

    def arguments(self, part: slice) -> Any:
        bases = self.bases
        if self.loss.plan.by_token is None:
            bases = {name: part_of(x, part) if isinstance(x, Tensor) and x.ndim else x for name, x in bases.items()}
        return self.backend.Arguments(self.loss.raw_inputs(part) if self.loss.shapes else {}, bases, self.factors)

    def report(self, visited: Any) -> Tensor:
        """Sum over the rows: the terms' values, and the loss; metrics are summed when they are read."""
        loss = self.loss
        if visited.program.metrics:  # which rows count is noted now: the targets may be written to
            loss.metrics |= measured(visited, loss.rows.valid)
        if self.by_segment:
            self._measure_segments(visited)
        if not loss.terms:  # every term is switched off
            return torch.zeros((), dtype=loss.dtype, device=loss.device)
        sums, total = self.backend.totals(visited, [*self.weights.values()])
        loss.values = dict(zip(visited.program.terms, sums.unbind(), strict=True))
        return total

    def _measure_segments(self, settled: Any) -> None:
        """Metrics of segments too, all in the order of the terms."""
        names, metrics = settled.program.segment_metrics, self.loss.metrics
        if not names:
            return
        counts = settled.segment_counts > 0
        found = {**metrics, **measure_later(names, lambda: settled.segment_metric_values, counts, "segment")}
        if not may_read(True, counts.device):
            found[names[0]].parts  # noqa: B018, see `measured`
        order = [f"{t.name}/{key}" for t in self.loss.terms for key in t.trace.metrics]
        self.loss.metrics = {name: found[name] for name in dict.fromkeys((*order, *found)) if name in found}


def measured(visited: Any, valid: Tensor | None) -> dict[str, Metric]:
    """The metrics of a visit, to be summed when they are read."""
    metrics = measure_later(visited.program.metrics, lambda: visited.metric_values, valid, "token")
    if metrics and not may_read(True, visited.found.device):
        next(iter(metrics.values())).parts  # a graph that is replayed makes them anew  # noqa: B018
    return metrics


def by_length(term: Planned) -> bool:
    """Whether rows weigh less the longer their segment is."""
    return term.reduction == "seq_mean_token_mean" and term.trace.value == "row"


def _tensor(x: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Made on the device: a CUDA graph cannot hold a copy from the host."""
    return x.to(device, dtype) if isinstance(x, Tensor) else torch.full((), x, dtype=dtype, device=device)
