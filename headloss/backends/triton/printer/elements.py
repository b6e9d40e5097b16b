"""Divergences as the Triton kernels run them: f(log p, log q) and df/d(log p), traced and printed as one function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headloss.backends.triton.printer import lower
from headloss.backends.triton.printer.lower import Unprintable as Unprintable
from headloss.bounded_cache import store
from headloss.trace.classify import without_modes
from headloss.trace.dynamic_shapes import trace_these_sizes

Divergences = tuple[tuple[int, Any], ...]  # which pair (log p, log q) each divergence takes


def printed(divergences: Divergences, pairs: int) -> tuple[Any, tuple[float, ...]]:
    """A printed function of `pairs` pairs and some numbers, which returns value and slope of each divergence; and the
    numbers.

    The numbers are the literals of the traced graphs, so other option values need no other kernel.  A divergence that
    reads something that may change is not printed: it has to run as it is.
    """
    read = [element.reads() for _, element in divergences]
    for found in read:
        if found.unknown:
            raise Unprintable(f"what it reads: {', '.join(found.unknown)}")
    key = (tuple((i, found.key) for (i, _), found in zip(divergences, read, strict=True)), pairs)
    made = _PRINTED.get(key)
    if made is None:
        made = store(_PRINTED, key, _print(divergences, pairs), 256)
    if isinstance(made, Unprintable):
        raise made
    return made


_PRINTED: dict[Any, tuple[Any, tuple[float, ...]] | Unprintable] = {}


def _print(divergences: Divergences, pairs: int) -> tuple[Any, tuple[float, ...]] | Unprintable:

    def every(*logs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for i, element in divergences for x in element.value_and_slope(logs[2 * i], logs[2 * i + 1]))

    try:
        with without_modes():
            given = [torch.full((2, 3), -1.0 - 0.1 * k, dtype=torch.float32, device="cpu") for k in range(2 * pairs)]
            graph = trace_these_sizes(every, given)
        return lower.quick(graph, "element")
    except Unprintable as error:
        return error
    except Exception as error:
        return Unprintable(f"what cannot be traced ({type(error).__name__}: {str(error).splitlines()[0]})")
