"""Trace a function into a graph that holds for tensors of any size.

With symbolic sizes, torch's own tracer shows every use of a size; it takes 10 ms per operation, and two seconds when it
is first loaded.  Functions of headloss branch on no size and no value, so we only record the operations they call,
twice, with different sizes: if both recordings are equal, no size is part of them but those of arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_LOCK = threading.RLock()
Examples = Callable[[int, str], Sequence[Any]]  # the arguments for one of two choices of sizes (0 or 1), on a device


def trace_any_size(function: Callable[..., Any], examples: Examples, device: str, ours: bool) -> fx.GraphModule:
    """The graph of a function, made with the arguments of choice 0.  `ours`: it is known to branch on no size."""
    if ours:
        try:
            other, graph = (_note(function, examples(i, "cpu"), device) for i in (1, 0))
            if _hold_for_any_size(graph, other):
                return graph
        except _NotPlainError:
            pass
    return _trace_by_torch(function, examples(0, device), "symbolic")


def trace_these_sizes(function: Callable[..., Any], given: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of a function of tensors, which may hold for no other sizes than theirs."""
    try:
        return _note(function, given, "cpu")
    except _NotPlainError:
        return _trace_by_torch(function, given, "real")


def _trace_by_torch(
    function: Callable[..., Any], given: Sequence[Any], mode: Literal["real", "symbolic"]
) -> fx.GraphModule:
    """By torch's own tracer, in one thread at a time: it patches what the whole process shares."""
    from torch._dynamo import convert_frame  # two seconds, which only such a trace should pay
    from torch.fx.experimental.proxy_tensor import make_fx

    with getattr(convert_frame, "compile_lock", _LOCK):  # torch.compile patches the same, and holds the first
        return make_fx(function, tracing_mode=mode)(*given)


def unlike(taken: Container[int]) -> list[int]:
    """Sizes that nothing else has, so that a dimension's size tells which dimension it is."""
    return [n for n in (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47) if n not in taken]


class _NotPlainError(Exception):
    """The function does more than compute tensors from its arguments."""


_OTHER = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}


class _Notes(TorchDispatchMode):
    """Records every operation, run on the host, as a node of a graph for `device`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.graph, self.device = fx.Graph(), torch.device(device)
        self.known: dict[int, tuple[fx.Node, Tensor]] = {}  # holds the tensor, so that its id is not reused
        self.numbers: dict[int, fx.Node] = {}  # by size: the arguments that are sizes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is nothing to skip, and torch would load its compiler to do it

    def know(self, x: Tensor, node: fx.Node) -> None:
        node.meta["val"] = x.detach()
        self.known[id(x)] = node, x

    def node_of(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return self.device
        if type(x) is int:
            return self.numbers.get(x, x)  # an accidental match differs in the second recording
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.known:
            raise _NotPlainError
        return self.known[id(x)][0]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _OTHER.isdisjoint(op.tags):
            raise _NotPlainError
        node = self.graph.call_function(op, *tree_map(self.node_of, (args, kwargs)))
        found = op(*args, **kwargs)
        if isinstance(found, Tensor):
            self.know(found, node)
        elif isinstance(found, tuple | list) and all(isinstance(x, Tensor) for x in found):
            node.meta["val"] = type(found)(x.detach() for x in found)
            for i, x in enumerate(found):
                self.know(x, self.graph.call_function(getitem, (node, i)))
        else:
            raise _NotPlainError
        return found


def _note(function: Callable[..., Any], given: Sequence[Any], device: str) -> fx.GraphModule:
    notes = _Notes(device)
    for i, x in enumerate(given):
        node = notes.graph.placeholder(f"arg{i}")
        if isinstance(x, Tensor):
            notes.know(x, node)
        elif type(x) is int:
            notes.numbers[x] = node
    with notes:
        out = function(*given)
    flat, form = tree_flatten(out)
    notes.graph.output(tree_unflatten([notes.node_of(x) for x in flat], form))
    notes.graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), notes.graph)


def _hold_for_any_size(graph: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether two recordings with different sizes do the same.

    A number that is one of an argument's sizes in both, as a sum's gradient is expanded to, becomes that size.
    """
    pairs = list(zip(graph.graph.nodes, other.graph.nodes, strict=False))
    if len(graph.graph.nodes) != len(other.graph.nodes):
        return False
    twins = dict(pairs)
    sizes: dict[tuple[int, int], tuple[fx.Node, int]] = {}
    for x, y in pairs:
        if x.op == "placeholder" and "val" in x.meta and "val" in y.meta:
            for d, found in enumerate(zip(x.meta["val"].shape, y.meta["val"].shape, strict=False)):
                if found[0] != found[1]:
                    sizes.setdefault(found, (x, d))
    changed: list[tuple[fx.Node, Any, list[Any]]] = []
    for x, y in pairs:
        (flat, form), (others, other_form) = tree_flatten((x.args, x.kwargs)), tree_flatten((y.args, y.kwargs))
        if (x.op, x.target, form) != (y.op, y.target, other_form):
            return False
        for i, (a, b) in enumerate(zip(flat, others, strict=True)):
            if isinstance(a, fx.Node):
                if twins[a] is not b:
                    return False
            elif repr(a) != repr(b):
                if type(a) is not int or type(b) is not int or (a, b) not in sizes:
                    return False
                flat[i] = a, sizes[a, b]
                if not changed or changed[-1][0] is not x:
                    changed.append((x, form, flat))
    if changed:
        _read_sizes(graph, changed)
    return True


def _read_sizes(graph: fx.GraphModule, changed: list[tuple[fx.Node, Any, list[Any]]]) -> None:
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    made: dict[int, fx.Node] = {}
    for node, form, flat in changed:
        for i, x in enumerate(flat):
            if isinstance(x, tuple):
                n, source = x
                if n not in made:
                    with graph.graph.inserting_before(first):
                        made[n] = graph.graph.call_function(torch.ops.aten.sym_size.int, source)
                    made[n].meta["val"] = n
                flat[i] = made[n]
        node.args, node.kwargs = tree_unflatten(flat, form)
    graph.recompile()
