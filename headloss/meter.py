"""`Meter`: combines the metrics of many calls, and of many ranks, into one number each."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headloss.deferred_checks import check_pending
from headloss.metrics import KINDS, Metric
from headloss.parallel.shard import all_gather, collective, process_group

_PACKED = 1024  # ranks exchange numbers in multiples of this


class Meter:
    """Combines the metrics of many calls.

    >>> meter = hl.Meter()
    >>> meter.add(out.metrics)          # every micro-batch; nothing waits for the device
    >>> meter.compute()                 # {"entropy": 2.31, ...}; one copy, and the meter is empty again
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def __repr__(self) -> str:
        return f"Meter({', '.join(self._metrics) or 'empty'})"

    def add(self, metrics: Mapping[str, Metric]) -> Meter:
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics: wanted out.metrics, a mapping of names to metrics, got {type(metrics).__name__}")
        for name, metric in metrics.items():
            if not isinstance(metric, Metric):
                raise TypeError(f"metrics: {name!r} is {type(metric).__name__}, wanted the Metric of an output record")
            before = self._metrics.get(name, metric)
            if (before.kind, before.per) != (metric.kind, metric.per):
                was, now = (f"{x.kind} per {x.per}" for x in (before, metric))
                raise ValueError(f"metrics: {name!r} is a {now} here and was a {was} before; give them other names")
            self._metrics[name] = metric if name not in self._metrics else before + metric
        return self

    def compute(self, group: Any = None) -> dict[str, float]:
        """Every metric as a number, combined over the ranks of `group` if one is given: one collective, one copy."""
        group = process_group(group)
        check_pending(wait=True)
        metrics, self._metrics = self._metrics, {}
        differing: Tensor | None = None
        if group is not None:
            metrics, differing = _over_ranks(metrics, group)
        values = [metric.value for metric in metrics.values()]
        if differing is not None:
            values.append(differing.to(values[0] if values else differing))
        numbers = torch.stack(values).tolist() if values else []
        if differing is not None and (rank := numbers.pop()):
            own = ", ".join(metrics) or "nothing"
            raise ValueError(
                f"Meter: ranks hold different metrics: this one has {own}, rank {int(rank) - 1} of the group others; "
                f"every rank must add the same"
            )
        return dict(zip(metrics, numbers, strict=True))


def _over_ranks(metrics: Mapping[str, Metric], group: Any) -> tuple[dict[str, Metric], Tensor]:
    """The metrics combined over ranks, and 1 + the first rank that holds different metrics, or 0 if none does.

    One all-gather of all parts, padded so that its length does not depend on how many there are: ranks that hold
    different metrics, or none, can join it too.
    """
    in_order = dict(sorted(metrics.items()))  # the same order on all ranks
    names = zlib.crc32("\n".join(f"{name} {m.kind}" for name, m in in_order.items()).encode())
    parts = [p.to(torch.float64) for m in in_order.values() for p in m.parts]
    device = parts[0].device if parts else _device_of(group)
    packed = torch.zeros((1 + len(parts) + _PACKED - 1) // _PACKED * _PACKED, dtype=torch.float64, device=device)
    packed[0] = names
    if parts:
        packed[1 : 1 + len(parts)] = torch.stack(parts)
    everyone = packed.new_empty(torch.distributed.get_world_size(group), len(packed))
    with collective("gathering metrics"):
        all_gather(everyone, packed, group).wait()
    combined = {"sum": everyone.sum(0), "min": everyone.amin(0), "max": everyone.amax(0)}
    result, i = {}, 1
    for name, metric in in_order.items():
        chosen = combined[KINDS[metric.kind].combine][i : i + len(metric.parts)]
        result[name] = Metric(metric.kind, tuple(chosen.unbind()), metric.per)
        i += len(metric.parts)
    others = everyone[:, 0] != names
    return {name: result[name] for name in metrics}, torch.where(others.any(), 1 + others.to(torch.float64).argmax(), 0)


def _device_of(group: Any) -> torch.device:
    """The device for a rank that has no metrics to take it from."""
    on_gpu = torch.distributed.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
