"""Trace a function into a graph that holds for tensors of any size.

With symbolic sizes, torch's own tracer shows every use of a size, but it takes 10 ms per operation, and two seconds to
load.  Functions of headloss branch on no size and no value, so for them we record the operations that they call, twice,
with different sizes: if both recordings are equal, they contain no sizes but those of arguments.
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


def trace_any_size(function: Callable[..., Any], examples: Examples, device: str, is_ours: bool) -> fx.GraphModule:
    """The graph of a function, made with the arguments of choice 0.  `is_ours`: it branches on no size."""
    if is_ours:
        try:
            other, graph = (_record(function, examples(i, "cpu"), device) for i in (1, 0))
            if _independent_of_sizes(graph, other):
                return graph
        except _NotPlainError:
            pass
    return _trace_by_torch(function, examples(0, device), "symbolic")


def trace_these_sizes(function: Callable[..., Any], arguments: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of a function of tensors, which may hold for no other sizes than theirs."""
    try:
        return _record(function, arguments, "cpu")
    except _NotPlainError:
        return _trace_by_torch(function, arguments, "real")


def _trace_by_torch(
    function: Callable[..., Any], arguments: Sequence[Any], mode: Literal["real", "symbolic"]
) -> fx.GraphModule:
    """Trace with torch's own tracer, in one thread at a time: it patches what the whole process shares."""
    from torch._dynamo import convert_frame  # two seconds, which only such a trace should pay
    from torch.fx.experimental.proxy_tensor import make_fx

    with getattr(convert_frame, "compile_lock", _LOCK):  # torch.compile patches the same, and holds the first
        return make_fx(function, tracing_mode=mode)(*arguments)


def distinct_sizes(used: Container[int]) -> list[int]:
    """Sizes that nothing else has, so that a dimension's size tells which dimension it is."""
    return [n for n in (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47) if n not in used]


class _NotPlainError(Exception):
    """The function does more than compute tensors from its arguments."""


_UNSUITABLE = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Recorder(TorchDispatchMode):
    """Records every operation, run on the host, as a node of a graph for `device`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.graph, self.device = fx.Graph(), torch.device(device)
        self.nodes: dict[int, tuple[fx.Node, Tensor]] = {}  # holds the tensor, so that its id is not reused
        self.size_nodes: dict[int, fx.Node] = {}  # by size: the arguments that are sizes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is nothing to skip, and torch would load its compiler to do it

    def add(self, x: Tensor, node: fx.Node) -> None:
        node.meta["val"] = x.detach()
        self.nodes[id(x)] = node, x

    def node_of(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return self.device
        if type(x) is int:
            return self.size_nodes.get(x, x)  # an accidental match differs in the second recording
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.nodes:
            raise _NotPlainError
        return self.nodes[id(x)][0]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _UNSUITABLE.isdisjoint(op.tags):
            raise _NotPlainError
        node = self.graph.call_function(op, *tree_map(self.node_of, (args, kwargs)))
        result = op(*args, **kwargs)
        if isinstance(result, Tensor):
            self.add(result, node)
        elif isinstance(result, tuple | list) and all(isinstance(x, Tensor) for x in result):
            node.meta["val"] = type(result)(x.detach() for x in result)
            for i, x in enumerate(result):
                self.add(x, self.graph.call_function(getitem, (node, i)))
        else:
            raise _NotPlainError
        return result


def _record(function: Callable[..., Any], arguments: Sequence[Any], device: str) -> fx.GraphModule:
    recorder = _Recorder(device)
    for i, x in enumerate(arguments):
        node = recorder.graph.placeholder(f"arg{i}")
        if isinstance(x, Tensor):
            recorder.add(x, node)
        elif type(x) is int:
            recorder.size_nodes[x] = node
    with recorder:
        out = function(*arguments)
    flat, structure = tree_flatten(out)
    recorder.graph.output(tree_unflatten([recorder.node_of(x) for x in flat], structure))
    recorder.graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), recorder.graph)


def _independent_of_sizes(graph: fx.GraphModule, other: fx.GraphModule) -> bool:
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
            for d, both in enumerate(zip(x.meta["val"].shape, y.meta["val"].shape, strict=False)):
                if both[0] != both[1]:
                    sizes.setdefault(both, (x, d))
    changed: list[tuple[fx.Node, Any, list[Any]]] = []
    for x, y in pairs:
        flat, structure = tree_flatten((x.args, x.kwargs))
        others, other_structure = tree_flatten((y.args, y.kwargs))
        if (x.op, x.target, structure) != (y.op, y.target, other_structure):
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
                    changed.append((x, structure, flat))
    if changed:
        _read_sizes(graph, changed)
    return True


def _read_sizes(graph: fx.GraphModule, changed: list[tuple[fx.Node, Any, list[Any]]]) -> None:
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    size_of: dict[int, fx.Node] = {}
    for node, structure, flat in changed:
        for i, x in enumerate(flat):
            if isinstance(x, tuple):
                n, source = x
                if n not in size_of:
                    with graph.graph.inserting_before(first):
                        size_of[n] = graph.graph.call_function(torch.ops.aten.sym_size.int, source)
                    size_of[n].meta["val"] = n
                flat[i] = size_of[n]
        node.args, node.kwargs = tree_unflatten(flat, structure)
    graph.recompile()
