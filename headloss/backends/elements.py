"""Divergences as the Triton kernels run them: f(log p, log q) and df/d(log p), traced and printed as one function."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from headloss.backends import lower
from headloss.backends.lower import Unprintable as Unprintable

Looks = tuple[tuple[int, Any], ...]  # which pair (log p, log q) each divergence looks at


def printed(looks: Looks, pairs: int) -> tuple[Any, tuple[float, ...]]:
    """A function of `pairs` pairs and of some numbers, giving value and slope of each divergence; and the numbers.

    The numbers are the constants of the traced graphs, so options of other values need no other kernel.
    """
    found = _printed(looks, pairs)
    if isinstance(found, Unprintable):
        raise found
    return found


@functools.lru_cache(256)
def _printed(looks: Looks, pairs: int) -> tuple[Any, tuple[float, ...]] | Unprintable:

    def every(*logs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for i, element in looks for x in _value_and_slope(element, logs[2 * i], logs[2 * i + 1]))

    try:
        with torch.inference_mode(False):
            graph = make_fx(every)(*(torch.full((2, 3), -1.0 - 0.1 * k) for k in range(2 * pairs)))
        numbers = _lift(graph)
        return lower.pointwise(graph, "element", quick=True), numbers
    except Unprintable as error:
        return error
    except Exception as error:
        return Unprintable(f"what cannot be traced ({type(error).__name__}: {str(error).splitlines()[0]})")


def _value_and_slope(element: Any, logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        value = element.value(leaf, logq)
        slope = torch.zeros_like(logp)
        if value.requires_grad:
            slope = torch.autograd.grad(value, leaf, torch.ones_like(value))[0]
    return value.detach(), slope


_ATEN = torch.ops.aten
_LIFTED = (_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor)


def _lift(module: fx.GraphModule) -> tuple[float, ...]:
    """Constants of the arithmetic become arguments, after one that is always there: Triton has no empty tuples."""
    graph = module.graph
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    numbers: list[float] = []

    def argument(value: float) -> fx.Node:
        nonlocal last
        with graph.inserting_after(last):
            last = graph.placeholder(f"number_{len(numbers)}")
        last.meta["val"] = torch.zeros(())
        numbers.append(value)
        return last

    argument(0.0)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _LIFTED and any(type(x) is float for x in node.args):
            node.args = tuple(argument(x) if type(x) is float else x for x in node.args)
    return tuple(numbers)
