"""What a patched model remembers of its calls: the last record, and the metrics since they were last asked for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import headloss as hl
from headloss.integrations.causal_lm import check_shape
from headloss.record import with_fields

COUNTED = threading.Lock()


class Log:
    """The record of the last call, detached, and the metrics of all calls since they were last asked for."""

    def __init__(self) -> None:
        self.last: hl.Output | None = None
        self.meters = {True: hl.Meter(), False: hl.Meter()}  # in training, in evaluation
        self.graphs = {True: Totals(), False: Totals()}
        self.counted = {True: False, False: False}
        self.step: tuple[Any, Tensor] | None = None  # num_items and num_segments of a whole step, if someone counts

    def run(
        self,
        objective: hl.Objective,
        logits: Tensor,
        targets: Tensor,
        call: Mapping[str, Any],
        training: bool,
        **how: Any,
    ) -> Tensor:
        """The objective on logits that exist; `how`: what of `hl.Logits` the model has not done to them."""
        check_shape(targets, logits)
        out = objective(hl.Logits(logits, **how), targets.to(logits.device), **call)
        self.add(out, training)
        return out.loss

    def add(self, out: hl.Output, training: bool) -> None:
        facts = torch.utils._pytree.tree_map(torch.Tensor.detach, out.facts)
        self.last = with_fields(out, loss=out.loss.detach(), facts=facts)
        self.meter(out.metrics, training)

    def meter(self, metrics: Mapping[str, hl.Metric], training: bool) -> None:
        if training and not torch.is_grad_enabled():
            return  # scoring: neither a step nor an evaluation
        if torch.compiler.is_compiling():
            self.graphs[training].add(metrics)
        else:
            with COUNTED:
                self.meters[training].add(metrics)
        if len(metrics) > 0:  # torch before 2.12 compiles no bool of a dict
            self.counted[training] = True

    def forget(self, training: bool) -> None:
        """Count anew: what came before belongs to something else."""
        self.meters[training], self.counted[training] = hl.Meter(), False
        self.graphs[training].take()

    def restart(self, training: bool) -> None:
        """Count from the last call on."""
        self.forget(training)
        if self.last is not None:
            self.meter(self.last.metrics, training)

    def read(self, training: bool) -> dict[str, float]:
        """Every metric as a number, over all ranks, and start anew."""
        counted, self.counted[training] = self.counted[training], False
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        group = torch.distributed.group.WORLD if several and torch.distributed.get_world_size() > 1 else None
        meter = self.meters[training].add(self.graphs[training].take())
        return meter.compute(group) if counted else {}


class Totals:
    """The metrics of a graph's calls.  There are two graphs at most: for the first call after a reading, and others."""

    def __init__(self) -> None:
        self.held: dict[str, hl.Metric] = {}

    def add(self, metrics: Mapping[str, hl.Metric]) -> None:
        for name, metric in metrics.items():
            # Copies: of views the next graph would read the shapes of their bases, and a third be made without those.
            whole = hl.Metric(metric.kind, tuple(x.clone() for x in metric.parts), metric.per)
            self.held[name] = self.held[name] + whole if name in self.held else whole

    def take(self) -> dict[str, hl.Metric]:
        taken, self.held = self.held, {}
        return taken
