"""Check a trace against its function: run both once on small tensors of real numbers and compare.

Python code can tell a tracer's tensors and sizes from real ones (`isinstance(x.shape[0], int)`, a `try` around what a
tracer refuses), treat one row differently from many, or change in place what it reads under another name.  Its
trace then computes something else and must not be used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from headloss.trace.classify import subgraph

SIZES = ((5, 3), (1, 2), (4, 1))  # rows and segments: several of both, one row, one segment


def agrees(graph: fx.GraphModule, function: Callable[..., Any], examples: Iterable[Sequence[Any]]) -> bool:
    """Whether a graph and the function that it was made from agree on each of these arguments.

    The graph as it will run, cut down to what its outputs need: a change in place may not be part of that.
    """
    graph = subgraph(graph, lambda out: out)
    with _disable_current_modes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about numbers that we made up
        return all(_same(graph(*x), function(*x)) for x in examples)


def random_like(like: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Numbers like those that losses get: floats negative like log-probabilities, integers 0 like ids, bools mixed."""
    if like.dtype == torch.bool:
        x = torch.rand(tuple(shape), generator=generator, dtype=torch.float32, device="cpu") < 0.5
    elif like.dtype.is_floating_point:
        x = -0.1 - 2 * torch.rand(tuple(shape), generator=generator, device="cpu", dtype=torch.float64)
    else:
        x = torch.zeros(tuple(shape), dtype=torch.float32, device="cpu")
    return x.to(like.device, like.dtype)


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        exact = not x.dtype.is_floating_point
        return torch.equal(x, y) if exact else torch.allclose(x, y, rtol=1e-3, atol=1e-5, equal_nan=True)
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(_same(x[k], y[k]) for k in x)
    if isinstance(x, tuple | list) and isinstance(y, tuple | list):
        return len(x) == len(y) and all(_same(a, b) for a, b in zip(x, y, strict=True))
    return x is None and y is None
