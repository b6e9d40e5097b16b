"""Prints a graph of element-wise operations line by line; no text from a user ever reaches the source."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from headloss.backends.triton.printer.operands import DTYPES, Operand, Unprintable, name_of, narrowed
from headloss.backends.triton.printer.operands import cast as cast
from headloss.backends.triton.printer.operands import constant as constant
from headloss.backends.triton.printer.operands import kind_of as kind_of
from headloss.backends.triton.printer.operations import (
    ALONG,
    COPIES,
    FILLS,
    RESHAPES,
    RULES,
    SAME,
    check_shown,
    written,
)
from headloss.trace.classify import changed_under_another_name, is_whole_slice


class Value:
    """A printed name and its kind: "f" float32, "d" float64, "i" int64, "b" bool."""

    __slots__ = ("kind", "text")

    def __init__(self, text: str, kind: str) -> None:
        self.text, self.kind = text, kind

    def to(self, kind: str) -> str:
        return cast(self.text, self.kind, kind)


class Printer:
    """Straight-line code.  An expression printed twice is one line, so terms share what they have in common.

    `width`: the number of ids per row, if a sparse teacher names some.  What is (R, K) in the graph is then a block.
    `lifted`: the text of the i-th float literal, if literals are passed in: other values then give the same source.
    """

    def __init__(self, width: int = 0, lifted: Callable[[int], str] | None = None, but: Container[str] = ()) -> None:
        self.width, self.lifted, self.but = width, lifted, but
        self.lines: list[str] = []
        self.numbers: list[float] = []  # the literals that were lifted
        self._names: dict[str, str] = {}
        self._places: dict[tuple[fx.Node, str], int] = {}  # the literal of each argument; the same if printed again

    def line(self, text: str) -> str:
        if text.isidentifier():
            return text
        if text not in self._names:
            self._names[text] = f"v{len(self._names)}"
            self.lines.append(f"{self._names[text]} = {text}")
        return self._names[text]

    def mark(self) -> tuple[int, int, int]:
        return len(self.lines), len(self._names), len(self.numbers)

    def back(self, mark: tuple[int, int, int]) -> None:
        """Remove what was printed since `mark`."""
        del self.lines[mark[0] :], self.numbers[mark[2] :]
        for name in list(self._names)[mark[1] :]:
            del self._names[name]
        self._places = {key: i for key, i in self._places.items() if i < mark[2]}

    def value(self, text: str, kind: str) -> Value:
        return Value(self.line(text), kind)

    def graph(self, graph: fx.Graph, given: dict[fx.Node, Value], outputs: Iterable[fx.Node]) -> dict[fx.Node, Value]:
        """Print what these outputs need; `given` has the arguments, and other nodes that have values already."""
        shown = changed_under_another_name(graph, SAME)
        if shown:
            raise Unprintable(shown)
        outputs = list(outputs)
        needed = reach(outputs, given)
        values: dict[fx.Node, Any] = dict(given)
        roots: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node in values or node not in needed or self.combines_rows(node, values):
                continue
            if node.op != "call_function":
                raise Unprintable({"get_attr": "a captured tensor", "placeholder": "an unknown argument"}[node.op])
            name, changes = operation(node)
            if name == "getitem":
                source, place = node.args
                if place != 0:
                    values[node] = None  # log_sigmoid's buffer, which nothing here reads
                    continue
                values[node] = values[source]
            elif name in SAME or is_whole_slice(node) or (name in RESHAPES and self._reshapes(name, node)):
                values[node], roots[node] = values[node.args[0]], _root(node.args[0], roots)
            elif name in ALONG and self.width:
                values[node] = self._along(name, node, values)
            elif name in ("sym_size", "sym_numel", "sym_stride"):
                continue  # the size of a new tensor; as a number it has no value and is refused
            else:
                values[node] = self._operation(name, node, values)
                if changes:
                    root = _root(node.args[0], roots)
                    if root in given:
                        raise Unprintable(f"{name}_ on an argument")
                    roots[node] = root
                    for other in list(values):
                        if _root(other, roots) is root:
                            values[other] = values[node]
        return {node: values[node] for node in outputs}

    def combines_rows(self, node: fx.Node, values: dict[fx.Node, Any]) -> bool:
        """Print an operation that combines rows, if this printer can; whether it did.  See `segments.py`."""
        return False

    def _reshapes(self, name: str, node: fx.Node) -> bool:
        """Whether a reshape leaves rows where they are: (R,) to (R, 1) and back, (R, 1) to (R, K)."""
        if not self.width:
            return False
        before, after = _sizes(node.args[0]), _sizes(node)
        self._fits(name, node)
        moved = name == "expand" or node.args[1:2] in ((1,), (-1,))
        return moved and before[:1] == after[:1] and (name != "expand" or len(before) == len(after))

    def _fits(self, name: str, node: fx.Node) -> None:
        sizes = _sizes(node)
        if len(sizes) > 1 and (len(sizes) > 2 or sizes[1] not in (1, self.width)):
            raise Unprintable(f"{name} of a table")

    def _along(self, name: str, node: fx.Node, values: dict[fx.Node, Any]) -> Value:
        """A sum, or a softmax, over the ids of each row."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        place = 2 if name.endswith("_backward_data") else 1
        dims = node.args[place] if len(node.args) > place else None
        dims = list(dims) if isinstance(dims, list | tuple) else [dims]
        if len(_sizes(source)) != 2 or _sizes(source)[1] != self.width or dims not in ([1], [-1]):
            raise Unprintable(name)
        self._fits(name, node)
        check_shown(name, _given(node))
        dtype = dtype_of(node)
        if dtype != torch.float32 and (dtype != torch.int64 or name != "sum"):
            raise Unprintable(f"{name} in {name_of(dtype)}")
        if dtype == torch.int64:
            return self.value(f"tl.sum(tl.where(is_id, {values[source].to('i')}, 0), axis=0)", "i")
        other = values[node.args[1]].to("f") if place == 2 else ""  # type: ignore[index]
        return self.value(ALONG[name].format(x=values[source].to("f"), y=other), "f")

    def _operation(self, name: str, node: fx.Node, values: dict[fx.Node, Any]) -> Value:
        if self.width:
            self._fits(name, node)
        dtype = dtype_of(node)
        if dtype not in DTYPES:
            raise Unprintable(f"{name} in {name_of(dtype)}")
        own = kind_of(dtype)
        arguments = self._bound(node, values, name)
        if name in RULES:
            text, kind = written(name, arguments, _given(node), dtype)
        elif name in FILLS:
            check_shown(name, _given(node))
            fill = FILLS[name]
            filled: Any = arguments.get(fill) if isinstance(fill, str) else Operand.of(fill)
            if not isinstance(filled, Operand) or filled.number is None:
                raise Unprintable(f"{name} of a size")
            text, kind = (filled.text, "f") if filled.text else (constant(filled.number, own), own)
        elif name in COPIES:
            check_shown(name, _given(node))
            source = arguments["self"]
            text, kind = source.text, source.kind
            if source.dtype == dtype:
                return self.value(text, kind)
        else:
            raise Unprintable(name)
        text = cast(f"({text})" if kind != own and not text.isidentifier() else text, kind, own)
        return self.value(narrowed(text, dtype), own)

    def _bound(self, node: fx.Node, values: dict[fx.Node, Any], name: str) -> dict[str, Any]:
        """The operation's arguments by name, with its defaults."""
        bound: dict[str, Any] = {}
        lift = self.lifted if name not in self.but and _in_float32(node) else None
        for argument in node.target._schema.arguments:  # type: ignore[union-attr]
            given = _given(node).get(argument.name, argument.default_value)
            if isinstance(given, fx.Node):
                found = values.get(given)
                if found is None:
                    if name in FILLS or argument.name == "buffer":
                        continue
                    raise Unprintable(f"{name} of a size")
                bound[argument.name] = Operand(found.text, found.kind, dtype_of(given), len(_sizes(given)))
            elif type(given) is float and lift is not None:
                at = self._places.setdefault((node, argument.name), len(self.numbers))
                self.numbers += [given] if at == len(self.numbers) else []
                bound[argument.name] = Operand.of(given, lift(at))
            elif isinstance(given, bool | int | float):
                bound[argument.name] = Operand.of(given)
            else:
                bound[argument.name] = given
        return bound


def _in_float32(node: fx.Node) -> bool:
    """Whether PyTorch converts an operation's literals to float32, as a kernel does with its arguments."""
    operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]  # the others are sizes
    floats = {d for d in (*map(dtype_of, operands), torch.get_default_dtype()) if d.is_floating_point}
    return floats == {torch.float32} and dtype_of(node) in (torch.float32, torch.bool)


def _sizes(node: Any) -> list[int]:
    found = node.meta.get("val")
    found = found[0] if isinstance(found, tuple | list) else found
    return [int(d.node.hint) if isinstance(d, torch.SymInt) else int(d) for d in found.shape]


def _root(node: Any, roots: dict[fx.Node, fx.Node]) -> Any:
    return roots.get(node, node)


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operation that differ from their defaults."""
    given: dict[str, Any] = {}
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        default = argument.default_value if argument.has_default_value() else node  # which no argument is
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, default)
        if type(value) is not type(default) or value != default:
            given[argument.name] = value
    return given


def operation(node: fx.Node) -> tuple[str, bool]:
    """An operation's plain name, and whether it changes its first argument."""
    target = node.target
    if target is operator.getitem:
        return "getitem", False
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.name.startswith("aten::"):
        raise Unprintable(getattr(target, "__name__", str(target)))
    name = target._schema.name.removeprefix("aten::")
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1], True
    if target._schema.is_mutable:
        raise Unprintable(f"{name} with out")
    return name.strip("_") if name.startswith("__") else name, False


def reach(outputs: Sequence[fx.Node], given: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """The nodes that these outputs need, without going past those in `given`."""
    needed: set[fx.Node] = set()
    given, stack = set(given), list(outputs)
    while stack:
        node = stack.pop()
        if node in needed or node in given:
            continue
        needed.add(node)
        stack += node.all_input_nodes
        stack += [user for user in node.users if user not in needed and _changes(user, node)]
    return needed


def _changes(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` is `node` changed in place, or another name of it, through which it may be."""
    schema = getattr(user.target, "_schema", None)
    if user.op != "call_function" or schema is None:
        return False
    if user.args and user.args[0] is node and schema.name.removeprefix("aten::") in SAME:
        return True
    written = [
        (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    return any(node is user.kwargs.get(name) or node in user.args[i : i + 1] for i, name in written)


def dtype_of(node: fx.Node) -> torch.dtype:
    found = node.meta.get("val", node.meta.get("tensor_meta"))
    found = found[0] if isinstance(found, tuple | list) and not hasattr(found, "dtype") else found
    dtype = getattr(found, "dtype", None)
    if dtype is None:
        raise Unprintable(f"{node.name} without a dtype")
    return dtype
