"""Starts to copy what the host must know of a step's targets before the model's forward, so that no call waits."""

from __future__ import annotations

import torch
from torch import Tensor

import headloss as hl
from headloss.writes import Snapshot, snapshot, unchanged


def prepared(targets: Tensor, segments: hl.Segments | None = None) -> Tensor | hl.Prepared:
    """The targets of a step whose model has yet to run: the numbers that the host needs travel meanwhile."""
    early = targets.device.type == "cuda" and not torch.compiler.is_compiling()
    return hl.prepare(targets, segments, non_blocking=True) if early else targets


class EarlyTargets:
    """Targets that are prepared before the model's forward, for the loss that comes after it."""

    def __init__(self) -> None:
        self.given: tuple[Tensor | None, ...] = ()
        self.snapshots: tuple[Snapshot | None, ...] = ()
        self.ready: Tensor | hl.Prepared | None = None

    def start(self, targets: Tensor, *given: Tensor | None) -> None:
        """`given`: the tensors that the targets were made from, by which the loss will recognise them."""
        self.given, self.ready = given, prepared(targets)
        self.snapshots = tuple([None if x is None else snapshot(x) for x in given])

    def take(self, targets: Tensor, *given: Tensor | None) -> Tensor | hl.Prepared:
        """The prepared targets if they were made from the same tensors, as these still are; else the targets."""
        same = len(given) == len(self.given) and all(a is b for a, b in zip(given, self.given))
        same = same and all(x is None or old is None or unchanged(old, x) for old, x in zip(self.snapshots, given))
        ready, self.ready, self.given = self.ready, None, ()
        return ready if same and ready is not None else targets
