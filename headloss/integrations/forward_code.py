"""Reads from a model's code what its forward does to the logits between its head and its loss.

A patched head gives the model an empty stand-in for the logits.  A factor, a softcap or another dtype may be applied to
it, for the source does the same to the real ones; anything else that the forward does would be missing from the loss.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

CASTS = {"float", "to", "type", "type_as", "half", "bfloat16", "contiguous", "clone"}
FACTS = {"shape", "dtype", "device", "size", "dim", "ndim"}
ROWS = {"slice_logits_to_keep"}  # functions that leave out rows
READS = {"getattr", "get_text_config"}  # functions that say what a config holds


def other_use(model: Any, cut: bool) -> str | None:
    """The first line of a model's forward that does to its logits what no source does; None if there is none, or the
    code cannot be read.

    `cut`: the source leaves out the last columns, so the forward may too.
    """
    code = _parsed(inspect.unwrap(type(model).forward))
    if code is None:
        return None
    above, names, known = _above(code), set(_names(code)), _known(code, model)
    for node in ast.walk(code):
        used = isinstance(node, ast.Name) and node.id in names
        if used and not _is_fine(node, names, above, cut) and not _is_off(node, above, known):  # type: ignore[arg-type]
            return ast.unparse(_statement(node, above)).splitlines()[0]
    return None


def _parsed(of: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(of)))
    except (OSError, TypeError, SyntaxError):
        return None


def mentions(model: Any, names: tuple[str, ...]) -> bool:
    """Whether the class that owns the head, or the model's, uses one of these names in its code; True where the code
    cannot be read."""
    head = model.get_output_embeddings()
    owners = {type(model), *(type(m) for m in model.modules() if any(x is head for x in m.children()))}
    return any(_written_with(kind, names) for owner in owners for kind in owner.__mro__)


@functools.lru_cache(maxsize=64)
def _written_with(kind: type, names: tuple[str, ...]) -> bool:
    if not issubclass(kind, nn.Module) or kind.__module__.startswith("torch.") or kind.__name__ == "PreTrainedModel":
        return False
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return True
    return any(name in source for name in names)


class Before(NamedTuple):
    """Something that a forward does to hidden states between the backbone and the head."""

    line: str
    factor: float | None  # None: not a factor, or not known
    named: str = ""  # what the config calls it


def before_head(model: Any) -> list[Before]:
    """All that it does there, by the model's own class, whatever replaced its forward; cutting rows does not count."""
    owner, called = _owner(model)
    head, whole = model.get_output_embeddings(), model.base_model
    around = () if called else _with_inside(owner, model, head)
    steps = [x for x in _steps(owner, called or around) if not x.module or getattr(model, x.module, None) is not whole]
    found = [Before(step.line, _factor(step, model), step.named) for step in steps]
    inside = [Before(ast.unparse(x), None) for x in _nodes(owner, ast.Call) if _of_self(x.func) in around]
    return found + inside


def _with_inside(owner: type, model: Any, head: Any) -> tuple[str, ...]:
    """The names of the modules besides the backbone that a forward calls and that hold the head among others."""
    modules = [(name, getattr(model, name, None)) for name in _called(owner)]
    held = [(name, x) for name, x in modules if isinstance(x, nn.Module) and any(y is head for y in x.modules())]
    return tuple(name for name, x in held if x is not model.base_model)


class _Step(NamedTuple):
    line: str
    by: ast.BinOp | None = None
    named: str = ""
    module: str = ""  # what is called


class After(NamedTuple):
    """What a forward does to its logits before the loss: the first line that multiplies or divides, and the first that
    does something else to each of them."""

    factor: str | None
    other: str | None


def after_head(model: Any) -> After:
    """By the model's own class, whatever replaced its forward; a function that only cuts rows or casts does not count,
    nor does what is off for this model."""
    owner, called = _owner(model)
    code, above, steps = _operations_after(owner, called)
    known = _known(code, model) if steps and code is not None else {}
    on = [(line, factor) for node, line, factor in steps if not _is_off(node, above, known)]
    return After(*(next((line for line, is_one in on if is_one is factor), None) for factor in (True, False)))


def _owner(model: Any) -> tuple[type, tuple[str, ...]]:
    """The class whose forward it is, and the names by which that calls the head."""
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    head = model.get_output_embeddings()
    return owner, tuple(name for name in _called(owner) if getattr(model, name, None) is head)


@functools.lru_cache(maxsize=64)
def _operations_after(
    owner: type, called: tuple[str, ...]
) -> tuple[ast.AST | None, dict[ast.AST, ast.AST], list[tuple[ast.AST, str, bool]]]:
    """The code of a forward, what stands above each part of it, and each operation on the logits: where, its line, and
    whether it is a factor."""
    code, found = _own_forward(owner), list[tuple[ast.AST, str, bool]]()
    if code is None:
        return None, {}, []
    names = set(_names(code))
    start = lambda x: (
        (isinstance(x, ast.Name) and x.id in names) or (isinstance(x, ast.Call) and _of_self(x.func) in called)
    )
    for node in _nodes(owner, ast.Assign, ast.AugAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        target = target.value if isinstance(target, ast.Subscript) else target
        if isinstance(target, ast.Name) and target.id in names:
            ops = [node.op] if isinstance(node, ast.AugAssign) else _operations(node.value, start)
            line = ast.unparse(node).splitlines()[0]
            found += [(node, line, isinstance(op, ast.Mult | ast.Div)) for op in ops]
    return code, _above(code), found


def _above(code: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(code) for child in ast.iter_child_nodes(node)}


def _operations(node: ast.expr, start: Callable[[ast.AST], bool]) -> Iterator[ast.AST]:
    """The operators and functions between an expression and what it starts from; none if it starts elsewhere."""
    while not start(node):
        below = [x for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr) and any(map(start, ast.walk(x)))]
        if not below:
            return
        if isinstance(node, ast.BinOp):
            yield node.op
        elif isinstance(node, ast.Call) and not _is_cast(node):
            yield node
        node = below[0]


def _is_cast(call: ast.Call) -> bool:
    named = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return named in CASTS | ROWS


def _factor(step: _Step, model: Any) -> float | None:
    if step.by is None or not isinstance(step.by.op, ast.Mult | ast.Div):
        return None
    try:
        number = float(_value(step.by.right, {"self": model}))
        return number if isinstance(step.by.op, ast.Mult) else 1 / number
    except (UnknownError, TypeError, ValueError, ZeroDivisionError):
        return None


@functools.lru_cache(maxsize=64)
def _own_forward(owner: type) -> ast.AST | None:
    """The forward that the class was written with, whatever has replaced it since."""
    now = inspect.unwrap(vars(owner)["forward"])
    code = _parsed(now if now.__module__ == owner.__module__ else owner)
    found = [] if code is None else [x for x in ast.walk(code) if isinstance(x, ast.FunctionDef)]
    return next((x for x in found if x.name == "forward"), None)


@functools.lru_cache(maxsize=64)
def _called(owner: type) -> tuple[str, ...]:
    """The names of the modules that it calls."""
    return tuple(name for node in _nodes(owner, ast.Call) if (name := _of_self(node.func)))


def _nodes(owner: type, *kinds: Any) -> list[Any]:
    code = _own_forward(owner)
    return [] if code is None else [node for node in ast.walk(code) if isinstance(node, kinds)]


def _of_self(node: ast.AST) -> str:
    """The name of an attribute of `self`."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if own and isinstance(node, ast.Attribute) else ""


@functools.lru_cache(maxsize=64)
def _steps(owner: type, called: tuple[str, ...]) -> tuple[_Step, ...]:
    """What happens to hidden states before one of these modules is called with them."""
    names, count = set[str](), -1
    while len(names) > count:  # a name may be assigned from another
        count, found = len(names), list[_Step]()
        for node in _nodes(owner, ast.Call, ast.Assign, ast.AugAssign):
            if isinstance(node, ast.Call):
                if node.args and _of_self(node.func) in called:
                    found += _steps_of(node.args[0], node, names)
                continue
            changed = isinstance(node, ast.AugAssign)
            target = node.target if changed else node.targets[0]
            if isinstance(target, ast.Name) and target.id in names:
                found += _steps_of(ast.BinOp(target, node.op, node.value) if changed else node.value, node, names)
    return tuple(found)


def _steps_of(node: ast.expr, whole: ast.AST, names: set[str]) -> Iterator[_Step]:
    """What an expression does to hidden states; the name it starts from is added to `names`."""
    line = ast.unparse(whole).splitlines()[0]
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.BinOp):
            yield _Step(line, node, node.right.attr if isinstance(node.right, ast.Attribute) else "")
        under = _under(node)
        if under is None:  # the backbone's output
            of = _of_self(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and (of or any(isinstance(x, ast.Name) and x.id in names for x in node.args)):
                yield _Step(line, module=of)
            return
        node = under
    names.add(node.id)


def _under(node: ast.expr) -> ast.expr | None:
    """What an expression scales, casts or cuts rows of; None if it does something else."""
    if isinstance(node, ast.BinOp):
        return node.left
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):  # not `outputs[0]`
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CASTS:
        return node.func.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ROWS and node.args:
        return node.args[0]
    return None


def _known(code: ast.AST, model: Any) -> dict[str, Any]:
    """`self`, and names that are assigned once, from one of its attributes or from what reads a config."""
    known = {"self": model}
    for name, value in _given_once(code):
        with contextlib.suppress(UnknownError):
            known[name] = _value(value, known)
    return known


@functools.lru_cache(maxsize=64)
def _given_once(code: ast.AST) -> list[tuple[str, ast.expr]]:
    given = [(x.targets[0], x.value) for x in ast.walk(code) if isinstance(x, ast.Assign)]
    stored = [node.id for node in ast.walk(code) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    once = lambda target: isinstance(target, ast.Name) and stored.count(target.id) == 1
    return [(t.id, x) for t, x in given if once(t) and isinstance(x, ast.Attribute | ast.Call)]  # type: ignore[attr-defined]


def _is_off(node: ast.AST, above: dict[ast.AST, ast.AST], known: Mapping[str, Any]) -> bool:
    """Whether a node is behind an `if` that is false for this model, judged by its attributes alone."""
    while node in above:
        node, child = above[node], node
        if isinstance(node, ast.If) and child in node.body:
            tests = node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else []
            for test in tests or [node.test]:
                with contextlib.suppress(UnknownError):
                    if not _value(test, known):
                        return True
    return False


class UnknownError(Exception):
    """The value depends on more than the model."""


def _value(test: ast.expr, known: Mapping[str, Any]) -> Any:
    """Evaluate an expression of names, attributes and comparisons, and of what reads a config."""
    for node in ast.walk(test):
        named = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call | ast.Await | ast.Lambda) and named not in READS:
            raise UnknownError
    try:
        code = compile(ast.Expression(test), "forward", "eval")
        return eval(code, {"__builtins__": {"getattr": getattr}}, dict(known))
    except Exception as error:
        raise UnknownError from error


def _names(code: ast.AST) -> Iterator[str]:
    """The names that `self.loss_function` gets, and those that they were scaled, cast or cut from."""
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call)]
    found = {name for name in map(_logits_of, calls) if name is not None}
    turned = [node for node in ast.walk(code) if isinstance(node, ast.Assign) and isinstance(node.value, _STEPS)]
    while found:
        yield from found
        values = [x.value for x in turned if any(isinstance(t, ast.Name) and t.id in found for t in x.targets)]
        found = {name for name in map(_beneath, values) if name is not None} - found


_STEPS = (ast.BinOp, ast.Subscript, ast.Call)


def _beneath(node: ast.expr | None) -> str | None:
    """The name that an expression starts from, under its factors, indices and casts."""
    while node is not None and not isinstance(node, ast.Name):
        node = _under(node)
    return None if node is None else node.id


def _logits_of(call: ast.Call) -> str | None:
    """The name of the logits that `self.loss_function` gets."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "loss_function":
        return None
    given = [x.value for x in call.keywords if x.arg == "logits"] or call.args[:1]
    return next((x.id for x in given if isinstance(x, ast.Name)), None)


def _is_fine(node: ast.Name, names: set[str], above: dict[ast.AST, ast.AST], cut: bool) -> bool:
    """Whether a source does the same, or the use computes nothing."""
    parent = above[node]
    if isinstance(node.ctx, ast.Store):
        return not isinstance(parent, ast.AugAssign) or isinstance(parent.op, ast.Mult | ast.Div)
    if isinstance(parent, ast.keyword):
        return parent.arg == "logits"
    if isinstance(parent, ast.Tuple | ast.Return | ast.IfExp | ast.Assign | ast.Starred):
        return True
    if isinstance(parent, ast.Compare):
        return all(isinstance(op, ast.Is | ast.IsNot) for op in parent.ops)
    if isinstance(parent, ast.Attribute) and parent.attr in FACTS:
        return True
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr == "loss_function":
        return True
    return _turned_into(names, parent, above) and (
        (isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mult | ast.Div))
        or (isinstance(parent, ast.Attribute) and parent.attr in CASTS)
        or (isinstance(parent, ast.Subscript) and parent.value is node and _of_rows(parent.slice, cut))
        or (isinstance(parent, ast.Call) and node in parent.args)  # a function: checked with a number at the first call
    )


def _turned_into(names: set[str], node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    """Whether this is part of an expression that is assigned back to the logits, or to rows of them."""
    statement = _statement(node, above)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if len(targets) == 1 and isinstance(targets[0], ast.Subscript) and _of_rows(targets[0].slice, False):
        targets = [targets[0].value]
    return len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id in names


def _of_rows(index: ast.expr, cut: bool) -> bool:
    """Whether an index selects rows and leaves the columns as they are, or selects those that the source has."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    last = parts[-1]
    whole = isinstance(last, ast.Slice) and last.lower is last.upper is last.step is None
    first = isinstance(last, ast.Slice) and last.lower is last.step is None
    if len(parts) < 3 and not (isinstance(parts[0], ast.Constant) and parts[0].value is Ellipsis):
        return isinstance(last, ast.Slice)  # batch and tokens
    return whole or (first and cut)


def _statement(node: ast.AST, above: dict[ast.AST, ast.AST]) -> ast.AST:
    while not isinstance(node, ast.stmt):
        node = above[node]
    return node
