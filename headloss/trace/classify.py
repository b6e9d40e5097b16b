"""Classify a traced loss as row, segment or batch, by which operations of its graph combine rows.

The trace was made with R rows and S segments, sizes that nothing else in it has, so a size tells what a dimension is.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Switch the caller's modes off during a trace, since the trace is cached and serves calls without them.

    These are a checkpoint's hooks, modes that see operations, anomaly detection, inference mode, autocast, torch.func.
    A mode that asks for sizes (a flop counter, a memory profiler) would turn symbols into numbers, which makes the term
    "batch"; in inference mode the trace would have no gradient.  Fake tensors stay fake.  The default dtype and device
    stay too: a function may make tensors with them, so they are part of its key (`function_reads.defaults`).
    """
    with ExitStack() as stack:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch.inference_mode(False))
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(without_hooks())
        if not all(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
            stack.enter_context(_disable_current_modes())
        stack.enter_context(_without_function_modes())
        yield


def without_hooks() -> AbstractContextManager[Any]:
    """For graphs that a call makes and uses up: a checkpoint's hooks would run all of its function once more."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    """Without torch-function modes, except those that set the device of new tensors."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    kept = [mode for mode in reversed(modes) if isinstance(mode, DeviceContext)]
    for mode in kept:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)


def subgraph(graph: fx.GraphModule, choose: Callable[[Any], Any]) -> fx.GraphModule:
    """The part of a graph that the chosen outputs need."""
    output = graph.graph.output_node()
    chosen = choose(output.args[0])
    needed = ancestors(chosen)
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = part.node_copy(node, lambda n: copies[n])
    part.output(fx.map_arg(chosen, lambda n: copies[n]))
    return fx.GraphModule(graph, part)


def ancestors(outputs: Any) -> set[fx.Node]:
    """Every node that these outputs depend on."""
    stack: list[fx.Node] = []
    fx.map_arg(outputs, stack.append)
    needed: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    return needed


def written_arguments(graph: fx.Graph) -> list[fx.Node]:
    """The arguments that an operation changes in place, directly or through a view."""
    found = []
    for _, x in _writes(graph):
        while _is_view(x):
            x = x.args[0]  # type: ignore[assignment]
        if x.op == "placeholder":
            found.append(x)
    return found


# Element-wise operations that carry no pointwise tag.
_POINTWISE = {
    "alias", "clone", "detach", "lift_fresh_copy", "_to_copy", "huber_loss", "huber_loss_backward", "smooth_l1_loss",
    "smooth_l1_loss_backward", "softplus_backward", "log_sigmoid_forward", "log_sigmoid_backward", "elu_backward",
    "hardtanh_backward", "leaky_relu_backward", "threshold_backward", "masked_fill_", "binary_cross_entropy",
    "binary_cross_entropy_backward", "binary_cross_entropy_with_logits", "mse_loss", "mse_loss_backward",
    "floor_divide",
}  # fmt: skip
# Operations that make a tensor of a given size: they may use the number of rows, since only the size depends on it.
_CREATION = {
    "full", "zeros", "ones", "empty", "scalar_tensor", "full_like", "zeros_like", "ones_like", "new_zeros", "new_ones",
    "new_full",
}  # fmt: skip


def creates(node: fx.Node) -> bool:
    """Whether an operation takes nothing but sizes from its arguments."""
    return _name_of(node) in _CREATION or _name_of(node).startswith(("empty", "new_empty", "sym_"))


# Operations along a dimension: they stay within a row if that dimension is not the first.
_ALONG_A_DIMENSION = {
    "sum", "mean", "amax", "amin", "logsumexp", "_softmax", "_log_softmax", "_softmax_backward_data",
    "_log_softmax_backward_data", "unsqueeze", "squeeze", "expand", "argmax", "gather", "select", "select_backward",
    "slice", "slice_backward", "sort",
}  # fmt: skip
_FILL = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # position of the fill value
_RESIZED = {"expand", "select_backward", "slice_backward"}
_SIZES = {"sym_size", "sym_numel"}
_SEGMENT = {"segment_totals": "totals", "segment_spread": "spread", "segment_largest": "maxima"}


def classify(graph: fx.GraphModule, R: int, S: int, ids_at: int | None = None) -> tuple[str, str]:
    """Row, segment or batch, and the operation that decided it; `ids_at` is the index of the segment ids' argument."""
    if counts_rows(graph):
        return "batch", "its Python code looks at the number of rows"
    if why := changed_under_another_name(graph.graph):
        return "batch", why
    value, grads, _ = graph.graph.output_node().args[0]  # type: ignore[misc, str-unpack]
    needed = ancestors((value, grads))
    ids: fx.Node | None = None
    if ids_at is not None:  # a chunk renumbers its segments, so ids mean nothing in it
        ids = [node for node in graph.graph.nodes if node.op == "placeholder"][ids_at]
        if any(user in needed and _name_of(user) not in {*_SEGMENT, *_SIZES} for user in ids.users):
            return "batch", "looks at segments.ids"
    through = None
    for node in graph.graph.nodes:
        if node not in needed or node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr":
            return "batch", "captures a tensor"
        name = _name_of(node)
        if name in _SEGMENT:
            if node.args[1] is not ids:
                return "batch", "sums over segments of its own"
            through = through or f"segments.{_SEGMENT[name]}"
        elif name in _SIZES:
            if name == "sym_size" and size(node.meta["val"]) not in (R, S):  # the number of ids per row
                continue
            if any(not _is_size_of(user, node) for user in node.users if user in needed):
                return "batch", "uses the number of rows"
        elif name in _CREATION and isinstance(_filled_with(node), fx.Node):
            return "batch", "uses the number of rows or segments"
        elif name == "getitem" or name in _CREATION:
            continue
        elif not any(check(node, name, R, S) for check in (_is_elementwise, _is_in_rows, _is_lookup)):
            return "batch", f"{name} mixes rows"
    return ("segment", f"combines rows through {through}") if through else ("row", "element-wise")


def changed_under_another_name(graph: fx.Graph, allowed: Iterable[str] = ()) -> str | None:
    """An in-place operation on memory that a view shares: cutting a graph down to its outputs would lose it.

    `allowed`: views that the caller handles itself.
    """
    for node, x in _writes(graph):
        names = [_name_of(n) for n in (x, *x.users) if _is_view(n)]
        if any(name not in allowed for name in names):
            return f"{_name_of(node)} changes what {names[0]} shows"
    return None


def _writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each operation that works in place, with each argument that it writes to."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
            for x, wrote in zip(node.args, writes, strict=False):
                if wrote and isinstance(x, fx.Node):
                    yield node, x


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and not alias.is_write


def counts_rows(graph: fx.GraphModule) -> bool:
    """Whether the trace holds only for the number of rows that it was made with.

    A loss may read the number of ids per row, which is part of a trace's key.
    """
    symbols_of: Any = getattr(graph, "shape_env", None)  # None if no size is part of the graph: see dynamic_shapes.py
    guards = [] if symbols_of is None else [guard.expr for guard in symbols_of.guards if not _harmless(guard.expr)]
    if not guards:
        return False
    values = [n.meta.get("val") for n in graph.graph.nodes if n.op == "placeholder"]
    inner: list[Any] = [d for x in values if isinstance(x, Tensor) for d in x.shape[1:] if isinstance(d, torch.SymInt)]
    symbols = {symbol for d in inner for symbol in d.node.expr.free_symbols}
    return any(not expr.free_symbols or not expr.free_symbols <= symbols for expr in guards)


def _name_of(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return "getitem" if target is operator.getitem else getattr(target, "__name__", str(target))


def _is_size_of(user: fx.Node, size: fx.Node) -> bool:
    """Whether an operation uses a size as a tensor's size, not as a number to compute with."""
    fits = _name_of(user) in _CREATION | _RESIZED
    return fits and size is not _filled_with(user) and size not in user.kwargs.values()


def _filled_with(node: fx.Node) -> Any:
    """The value that a new tensor is filled with, a number or a size of the trace."""
    position = _FILL.get(_name_of(node))
    value = node.args[position] if position is not None and len(node.args) > position else None
    return node.kwargs.get("fill_value", value)


def _is_elementwise(node: fx.Node, name: str, R: int, S: int) -> bool:
    """Whether this is an element-wise operation whose rows (or segments) stay in the first dimension."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise not in tags and name not in _POINTWISE:
        return False
    outs = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
    ndim = max(len(x.shape) for x in outs)
    for x in [*outs, *(n.meta["val"] for n in node.all_input_nodes)]:
        if not isinstance(x, Tensor):  # a size used as a number
            if size(x) in (R, S):
                return False
            continue
        sizes = [size(d) for d in x.shape]
        if any(d in (R, S) for d in sizes[1:]) or (sizes[:1] in ([R], [S]) and len(sizes) != ndim):
            return False
    return True


def _is_lookup(node: fx.Node, name: str, R: int, S: int) -> bool:
    """Whether this is `table[index_R]` on a table with neither row nor segment dimension, such as class weights."""
    if name != "index" or not isinstance(node.args[1], list | tuple) or len(node.args[1]) != 1:
        return False
    table, index = node.args[0].meta["val"], node.args[1][0]  # type: ignore[union-attr]
    if not isinstance(index, fx.Node) or index.meta["val"].ndim != 1 or size(index.meta["val"].shape[0]) != R:
        return False
    return index.meta["val"].dtype != torch.bool and all(size(d) not in (R, S) for d in table.shape)


def _is_in_rows(node: fx.Node, name: str, R: int, S: int) -> bool:
    """Whether this operation runs along the ids of each row: (R, K) in, the first dimension untouched."""
    if name not in _ALONG_A_DIMENSION or not isinstance(node.args[0], fx.Node):
        return False
    x, out = node.args[0].meta["val"], node.meta["val"]
    out = out[0] if name == "sort" else out
    if not isinstance(x, Tensor) or not isinstance(out, Tensor) or x.ndim < 1 or out.ndim < 1:
        return False
    if any(size(y.shape[0]) != R or any(size(d) in (R, S) for d in y.shape[1:]) for y in (x, out)):
        return False
    if name == "expand":
        return x.ndim == out.ndim  # (R, 1) to (R, K); a new leading dimension would shift the rows' dimension
    if is_whole_slice(node):
        return True
    dims = _dimensions(node, name)
    return bool(dims) and all(d % max(x.ndim, out.ndim) != 0 for d in dims)


def is_whole_slice(node: fx.Node) -> bool:
    """Whether this is `x[:]`, which is `x`, or its backward."""
    name = _name_of(node)
    if name not in ("slice", "slice_backward"):
        return False
    bounds: list[Any] = [*node.args, None, None, None, None][2 if name == "slice" else 3 :]
    start, end, step = bounds[0] or 0, bounds[1], bounds[2] or 1
    return bool(start == 0 and step == 1 and (end is None or (isinstance(end, int) and end >= 1 << 62)))


def _dimensions(node: fx.Node, name: str) -> list[int]:
    """The dimensions an operation runs along."""
    position = 2 if name.endswith("_backward_data") or name in ("select_backward", "slice_backward") else 1
    dims = node.kwargs.get("dim", node.args[position] if len(node.args) > position else None)
    return [d for d in (dims if isinstance(dims, list | tuple) else [dims]) if isinstance(d, int)]


def size(x: Any) -> int:
    """A dimension's size in the example that the trace was made with."""
    return int(x.node.hint) if isinstance(x, torch.SymInt) else int(x)


def _harmless(expr: Any) -> bool:
    """Whether a guard is one that torch puts on every dynamic size, such as `s >= 2`."""
    import sympy  # type: ignore[import-untyped]  # takes a third of a second, which only a trace should pay

    if isinstance(expr, sympy.Ge | sympy.Gt) and expr.lhs.is_Symbol and expr.rhs.is_Integer:
        return int(expr.rhs) <= 2
    if isinstance(expr, sympy.Ne) and expr.lhs.is_Symbol and expr.rhs.is_Integer:
        return int(expr.rhs) in (0, 1)
    if isinstance(expr, sympy.Le) and expr.lhs.is_Symbol and expr.rhs.is_Integer:
        return int(expr.rhs) >= 1 << 24  # the limit of torch.quantile
    return bool(expr == sympy.true)
