"""An element-wise function of (log p, log q), traced once with its slope and then run without autograd.

Its steps write to a few buffers, in place where nothing reads the operand again: on a CPU fresh memory costs more than
the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from headloss.trace.classify import without_modes
from headloss.trace.dynamic_shapes import trace_these_sizes

Buffer = Callable[[str, torch.dtype], Tensor]  # one as large as the arguments, by name
aten = torch.ops.aten


class Step(NamedTuple):
    result: str
    run: Any
    arguments: tuple[Any, ...]  # a string is the name of an argument or of an earlier result
    options: dict[str, Any]
    out: tuple[str, str, torch.dtype] | None  # its name for the output, and the buffer; None: it makes one


class InPlace(NamedTuple):
    steps: tuple[Step, ...]
    reads: tuple[str, ...]  # which of logp, logq, p and q it reads
    total: str  # the sum over columns
    slope: str | None  # df/d(log p), or df/dp if `by_p`; None if p has no influence
    by_p: bool

    def __call__(self, arguments: Mapping[str, Callable[[], Tensor]], buffer: Buffer) -> tuple[Tensor, Tensor | None]:
        """The sum and the slope; `arguments` makes each argument that is read."""
        values: dict[str, Any] = {name: arguments[name]() for name in self.reads}
        for step in self.steps:
            operands = [values[x] if type(x) is str else x for x in step.arguments]
            out = {} if step.out is None else {step.out[0]: buffer(*step.out[1:])}
            values[step.result] = step.run(*operands, **step.options, **out)
        return values[self.total], None if self.slope is None else values[self.slope]


def in_place(fn: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> InPlace | None:
    """The steps of a function of ours; None if one of its operations cannot write to a buffer."""

    def total_and_slope(logp: Tensor, logq: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaf = logp.detach().requires_grad_()
            total = fn(leaf, logq).sum(-1)
            if not total.requires_grad:
                return (total,)
            return total.detach(), *torch.autograd.grad(total, leaf, torch.ones_like(total))

    with without_modes():
        logs = [torch.full((2, 3), x, dtype=dtype, device="cpu") for x in (-1.0, -1.1)]
        graph = trace_these_sizes(total_and_slope, logs).graph
        arguments = _simplified(graph)
        return _steps_of(graph, dict(zip(arguments, [*logs, *(x.exp() for x in logs)], strict=True)))


def _simplified(graph: fx.Graph) -> list[fx.Node]:
    """Read p and q where their logarithms are exponentiated, and make scalars of constants.  Returns the arguments."""
    logs = [x for x in graph.nodes if x.op == "placeholder"]
    with graph.inserting_after(logs[-1]):
        arguments = [graph.placeholder(name) for name in ("q", "p")][::-1]
    constants: dict[fx.Node, Tensor] = {}
    for node in [x for x in graph.nodes if x.op == "call_function"]:
        run: Any = node.target
        ones = run is aten.ones_like.default
        if ones or all(x in constants for x in node.all_input_nodes):
            one = torch.ones((), dtype=torch.float64, device="cpu")
            constants[node] = one if ones else run(*_mapped(node, constants), **node.kwargs)
            continue
        node.args = _mapped(node, {x: y.flatten()[0] for x, y in constants.items()})
        first, *more = node.args
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(first)
        elif node.target is aten.exp.default and first in logs:
            node.replace_all_uses_with(arguments[logs.index(first)])
        elif node.target is aten.mul.Tensor and 1.0 in node.args:
            node.replace_all_uses_with(more[0] if first == 1.0 else first)
    graph.eliminate_dead_code()
    return [*logs, *arguments]


def _steps_of(graph: fx.Graph, values: dict[fx.Node, Tensor]) -> InPlace | None:
    """`values`: the arguments with an example of each."""
    names = dict(zip(values, ("logp", "logq", "p", "q"), strict=True))
    nodes = [x for x in graph.nodes if x.op == "call_function"]
    outputs: Any = list(graph.nodes)[-1].args[0]
    total, p = outputs[0], list(values)[2]
    slope: Any = outputs[1] if len(outputs) > 1 else None
    by_p = isinstance(slope, fx.Node) and slope.target is aten.mul.Tensor and p in slope.args and slope.args != (p, p)
    if by_p:
        nodes = [x for x in nodes if x is not slope]
        slope = slope.args[slope.args[0] is p]
    if not isinstance(slope, fx.Node | None):
        return None
    last = {x: node for node in nodes for x in node.all_input_nodes}  # where each is read last
    steps, of, free = list[Step](), dict[fx.Node, tuple[str, torch.dtype]](), list[tuple[str, torch.dtype]]()  # buffers
    for node in nodes:
        run: Any = node.target
        example = run(*_mapped(node, values), **node.kwargs)
        values[node], names[node] = example, node.name
        out = None
        if example.shape == (2, 3):
            writing = _writes(run)
            if writing is None:
                return None
            free += [of.pop(x) for x in node.all_input_nodes if last[x] is node and x is not slope and x in of]
            fits = [buffer for buffer in free if buffer[1] == example.dtype]
            of[node] = fits[-1] if fits else (f"step {len(steps)}", example.dtype)
            free = [buffer for buffer in free if buffer != of[node]]
            run, out = writing[0], (writing[1], *of[node])
        steps.append(Step(node.name, run, _mapped(node, names), dict(node.kwargs), out))
    reads = {x for node in nodes for x in node.all_input_nodes} | {slope}
    return InPlace(
        tuple(steps),
        tuple(names[x] for x in list(values)[:4] if x in reads),
        total.name,
        None if slope is None else names[slope],
        by_p,
    )


def _mapped(node: fx.Node, to: Mapping[fx.Node, Any]) -> Any:
    """A node's arguments, with those that are nodes replaced."""
    return fx.map_arg(node.args, lambda x: to.get(x, x))


def _writes(operation: Any) -> tuple[Any, str] | None:
    """The overload of an operation that writes to a tensor, and the name of that argument."""
    wanted = [(a.name, str(a.type)) for a in operation._schema.arguments]
    packet = operation.overloadpacket
    for other in (getattr(packet, name) for name in packet.overloads()):
        outs = [a.name for a in other._schema.arguments if a.is_out]
        if len(outs) == 1 and wanted == [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]:
            return other, outs[0]
    return None
