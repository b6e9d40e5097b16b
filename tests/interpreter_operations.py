"""The operations of Triton's interpreter that kernels are made of, on numpy's arrays with no detour over types.

Each is a short cut for operands of plain types, and hands everything else to the interpreter's own operation.  Where
both could run, both give the same bits: see tests/kernels/test_interpreting.py.  Older versions of Triton run without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

SINGLE = {"fp32": np.dtype("float32")}
FLOATS = {"fp32": np.dtype("float32"), "fp64": np.dtype("float64")}
INTEGERS = {"int32": np.dtype("int32"), "int64": np.dtype("int64")}
PLAIN = FLOATS | INTEGERS
IN_MEMORY = PLAIN | {"fp16": np.dtype("float16"), "bf16": np.dtype("uint16"), "int8": np.dtype("int8")}
IN_MEMORY |= {"uint8": np.dtype("uint8"), "int16": np.dtype("int16")}
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARED = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
COMPARED |= {"eq": np.equal, "ne": np.not_equal}
BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
OF_ONE = {"exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "sqrt": np.sqrt}
OF_ONE |= {"floor": np.floor, "ceil": np.ceil}
BOOL = np.dtype(bool)


@functools.cache
def fit() -> bool:
    """Whether this Triton does what they do.  Before, -0.0 lost its sign, and maximum of a number and a NaN was NaN."""
    return tuple(int(x) for x in version("triton").split(".")[:2]) >= (3, 6)


class Operations:
    """`shortcut(name, slow)`: the operation that Triton calls `name`, or `slow` itself."""

    def __init__(self, core: Any, interpreter: Any) -> None:
        self.core, self.interpreter = core, interpreter
        self.spreads: dict[tuple[int, int, str], tuple[Any, Any, Any]] = {}
        self.numbers: dict[Any, Any] = {}
        self.both: dict[str, tuple[Any, Any]] = {}  # for the test that they are equal
        self.made: dict[str, Callable[[Any], Any]] = {
            "load": self.load,
            "store": self.store,
            "where": self.where,
            "full": self.full,
            "cast": self.cast,
            "tensor.to": self.cast,
            "maximum": lambda slow: self.extreme(slow, np.maximum, np.fmax),
            "minimum": lambda slow: self.extreme(slow, np.minimum, np.fmin),
            "div_rn": lambda slow: self.binary(slow, np.divide, SINGLE),
            "tensor.__truediv__": lambda slow: self.binary(slow, np.divide, FLOATS),
            "tensor.__rtruediv__": lambda slow: self.binary(slow, np.divide, FLOATS, turned=True),
            "tensor.__floordiv__": lambda slow: self.binary(slow, _quotient, INTEGERS),
            "tensor.__mod__": lambda slow: self.binary(slow, np.fmod, INTEGERS),
        }
        for name, op in ARITHMETIC.items():
            self.made[f"tensor.__{name}__"] = lambda slow, op=op: self.binary(slow, op, PLAIN)
            self.made[f"tensor.__r{name}__"] = lambda slow, op=op: self.binary(slow, op, PLAIN, turned=True)
        for name, op in COMPARED.items():
            self.made[f"tensor.__{name}__"] = lambda slow, op=op: self.binary(slow, op, PLAIN, truth=True)
        for name, op in BITS.items():
            self.made[f"tensor.__{name}__"] = lambda slow, op=op: self.bits(slow, op)
        for name, op in OF_ONE.items():
            self.made[name] = lambda slow, op=op: self.of_one(slow, op, FLOATS)
        self.made["sqrt_rn"] = lambda slow: self.of_one(slow, np.sqrt, SINGLE)

    def shortcut(self, name: str, slow: Any) -> Any:
        if name not in self.made or not fit():
            return slow
        self.both[name] = self.made[name](slow), slow
        return self.both[name][0]

    def spread(self, xt: Any, yt: Any, element: Any) -> Any:
        """The type of elements over what `xt` and `yt` are spread to; None if they do not fit, or not without Triton.

        The table keeps the types that it is asked about, or another could come to have the number of one of them.
        """
        key = id(xt), id(yt), element.name
        found = self.spreads.get(key)
        if found is None:
            shapes = [tuple(t.shape) if t.is_block() else () for t in (xt, yt)]
            left, right = shapes
            if not left or not right or left == right:
                shape: Any = left or right
            elif len(left) == len(right) and all(a == b or 1 in (a, b) for a, b in zip(left, right, strict=True)):
                shape = tuple(max(a, b) for a, b in zip(left, right, strict=True))
            else:
                shape = None
            kind = None if shape is None else self.core.block_type(element, list(shape)) if shape else element
            found = self.spreads[key] = xt, yt, kind
        return found[2]

    def number(self, x: Any, dtype: Any) -> Any:
        """A number as Triton takes it beside a tensor of a plain type: of that type.  None where it is another."""
        kind = x.__class__
        if kind is not int and kind is not float:
            return None
        key = (dtype.name, kind, x if x else repr(x))  # 0.0 is not -0.0
        found = self.numbers.get(key)
        if found is None:
            elements = PLAIN[dtype.name]
            if elements.kind != "f" and (kind is float or not -(2**31) <= x < 2**31):
                return None
            found = self.numbers[key] = self.core.tensor(
                self.interpreter.TensorHandle(np.array([x], dtype=elements), dtype), dtype
            )
        return found

    def binary(self, slow: Any, op: Any, types: Any, turned: bool = False, truth: bool = False) -> Any:
        core, tensor, constexpr, pointer = self.core, self.core.tensor, self.core.constexpr, self.core.pointer_type
        handle, builder, spread, number = (
            self.interpreter.TensorHandle, self.interpreter.interpreter_builder, self.spread, self.number,
        )  # fmt: skip
        int1, int64, adds = core.int1, core.int64, op is np.add

        def run(x: Any, y: Any, _semantic: Any = None) -> Any:
            other = y
            if y.__class__ is constexpr:
                y = y.value
            if x.__class__ is tensor:
                dtype = x.dtype
                elements = types.get(dtype.name)
                if elements is not None:
                    if y.__class__ is not tensor:
                        y = number(y, dtype)
                    if y is not None:
                        left, right = x.handle.data, y.handle.data
                        if y.dtype is not dtype:  # both integers: the wider
                            wanted = types.get(y.dtype.name)
                            if wanted is None or wanted.kind != "i" or elements.kind != "i":
                                return slow(x, other)
                            dtype = int64
                        else:
                            wanted = elements
                        if left.dtype is elements and right.dtype is wanted:
                            kind = spread(x.type, y.type, int1 if truth else dtype)
                            if kind is not None:
                                found = op(right, left) if turned else op(left, right)
                                return tensor(handle(found, int1 if truth else dtype), kind)
                elif adds and dtype.__class__ is pointer and y.__class__ is tensor and y.dtype.name in INTEGERS:
                    kind = spread(x.type, y.type, dtype)
                    if kind is not None:
                        return tensor(builder.create_addptr(x.handle, y.handle), kind)
            return slow(x, other)

        return run

    def bits(self, slow: Any, op: Any) -> Any:
        """Of truth values; integers are rare."""
        tensor, handle, int1 = self.core.tensor, self.interpreter.TensorHandle, self.core.int1

        def run(x: Any, y: Any, _semantic: Any = None) -> Any:
            if y.__class__ is tensor and x.dtype is int1 and y.dtype is int1:
                left, right = x.handle.data, y.handle.data
                kind = self.spread(x.type, y.type, int1)
                if kind is not None and left.dtype is BOOL and right.dtype is BOOL:
                    return tensor(handle(op(left, right), int1), kind)
            return slow(x, y)

        return run

    def of_one(self, slow: Any, op: Any, types: Any) -> Any:
        tensor, handle = self.core.tensor, self.interpreter.TensorHandle

        def run(x: Any, *args: Any, **kwargs: Any) -> Any:
            if x.__class__ is tensor and not args and not kwargs:
                data = x.handle.data
                if data.dtype is types.get(x.dtype.name):
                    return tensor(handle(op(data), x.dtype), x.type)
            return slow(x, *args, **kwargs)

        return run

    def extreme(self, slow: Any, strict: Any, lenient: Any) -> Any:
        """`lenient` of a number and a NaN is the number."""
        tensor, constexpr, handle = self.core.tensor, self.core.constexpr, self.interpreter.TensorHandle
        ops = {self.core.PropagateNan.ALL: strict, self.core.PropagateNan.NONE: lenient}
        usual = self.core.PropagateNan.NONE

        def run(x: Any, y: Any, propagate_nan: Any = usual, **kwargs: Any) -> Any:
            left = x.value if x.__class__ is constexpr else x
            right = y.value if y.__class__ is constexpr else y
            op = ops.get(propagate_nan.value if propagate_nan.__class__ is constexpr else propagate_nan)
            if left.__class__ is not tensor and right.__class__ is tensor and right.dtype.name in PLAIN:
                left = self.number(left, right.dtype)
            elif left.__class__ is tensor and right.__class__ is not tensor and left.dtype.name in PLAIN:
                right = self.number(right, left.dtype)
            if left.__class__ is tensor and right.__class__ is tensor and op is not None and left.dtype is right.dtype:
                elements = PLAIN.get(left.dtype.name)
                kind = self.spread(left.type, right.type, left.dtype)
                a, b = left.handle.data, right.handle.data
                if kind is not None and elements is not None and a.dtype is elements and b.dtype is elements:
                    return tensor(handle((op if elements.kind == "f" else strict)(a, b), left.dtype), kind)
            return slow(x, y, propagate_nan=propagate_nan, **kwargs)

        return run

    def where(self, slow: Any) -> Any:
        tensor, constexpr, handle, int1 = (
            self.core.tensor, self.core.constexpr, self.interpreter.TensorHandle, self.core.int1,
        )  # fmt: skip

        def run(condition: Any, x: Any, y: Any, **kwargs: Any) -> Any:
            left = x.value if x.__class__ is constexpr else x
            right = y.value if y.__class__ is constexpr else y
            if condition.__class__ is tensor and condition.dtype is int1:
                if left.__class__ is not tensor and right.__class__ is tensor and right.dtype.name in PLAIN:
                    left = self.number(left, right.dtype)
                elif left.__class__ is tensor and right.__class__ is not tensor and left.dtype.name in PLAIN:
                    right = self.number(right, left.dtype)
                if left.__class__ is tensor and right.__class__ is tensor and left.dtype is right.dtype:
                    elements = PLAIN.get(left.dtype.name)
                    c, a, b = condition.handle.data, left.handle.data, right.handle.data
                    if elements is not None and c.dtype is BOOL and a.dtype is elements and b.dtype is elements:
                        kind = self.spread(left.type, right.type, left.dtype)
                        kind = kind and self.spread(condition.type, kind, left.dtype)
                        if kind is not None:
                            return tensor(handle(np.where(c, a, b), left.dtype), kind)
            return slow(condition, x, y, **kwargs)

        return run

    def cast(self, slow: Any) -> Any:
        core, tensor, handle = self.core, self.core.tensor, self.interpreter.TensorHandle

        def run(x: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
            if x.__class__ is tensor and not args and not kwargs:
                to = dtype.value if dtype.__class__ is core.constexpr else dtype
                own, data = x.dtype, x.handle.data
                if to is own:
                    return x
                wanted = PLAIN.get(getattr(to, "name", ""))
                if wanted is not None:
                    elements = BOOL if own is core.int1 else PLAIN.get(own.name)
                    if elements is not None and data.dtype is elements:
                        return tensor(handle(data.astype(wanted), to), self.spread(x.type, x.type, to))
            return slow(x, dtype, *args, **kwargs)

        return run

    def full(self, slow: Any) -> Any:
        core, tensor, constexpr = self.core, self.core.tensor, self.core.constexpr
        handle = self.interpreter.TensorHandle

        def run(shape: Any, value: Any, dtype: Any, **kwargs: Any) -> Any:
            to = dtype.value if dtype.__class__ is constexpr else dtype
            sizes = shape.value if shape.__class__ is constexpr else shape
            number = value.value if value.__class__ is constexpr else value
            elements = PLAIN.get(getattr(to, "name", ""))
            fits = number.__class__ is int or (number.__class__ is float and to.name in FLOATS)
            if elements is not None and fits and isinstance(sizes, list | tuple | core.tuple):
                sizes = [s.value if s.__class__ is constexpr else s for s in sizes]
                kind = core.block_type(to, sizes) if sizes else to
                return tensor(handle(np.full(sizes or [1], number, elements), to), kind)
            return slow(shape, value, dtype, **kwargs)

        return run

    def _kept(self, mask: Any, pointer: Any, kind: Any, element: Any) -> Any:
        """The mask over the pointers; None where Triton must say."""
        shape = pointer.handle.data.shape
        if mask is None:
            return np.ones(shape, BOOL)
        if mask.__class__ is not self.core.tensor or mask.dtype is not self.core.int1:
            return None
        kept = mask.handle.data
        if kept.dtype is not BOOL or self.spread(pointer.type, mask.type, element) is not kind:
            return None
        return kept if kept.shape == shape else np.broadcast_to(kept, shape)

    def load(self, slow: Any) -> Any:
        core, tensor, interpreter = self.core, self.core.tensor, self.interpreter

        def run(pointer: Any, mask: Any = None, other: Any = None, **more: Any) -> Any:
            if pointer.__class__ is tensor and pointer.dtype.__class__ is core.pointer_type:
                element, at = pointer.dtype.element_ty, pointer.handle.data
                elements = IN_MEMORY.get(element.name)
                if elements is not None:
                    kind = self.spread(pointer.type, pointer.type, element)
                    m = mask.value if mask.__class__ is core.constexpr else mask
                    o = other.value if other.__class__ is core.constexpr else other
                    kept = self._kept(m, pointer, kind, element) if m is not None or o is None else None
                    rest = None
                    if o is None:
                        rest = np.zeros(at.shape, elements)
                    elif o.__class__ is tensor:
                        if o.dtype is element and self.spread(pointer.type, o.type, element) is kind:
                            rest = o.handle.data
                            rest = rest if rest.shape == at.shape else np.broadcast_to(rest, at.shape)
                    elif element.name in PLAIN and self.number(o, element) is not None:
                        rest = np.full(at.shape, o, elements)
                    if kept is not None and rest is not None:
                        found = interpreter._interpreter.load(at, kept, rest, elements)
                        return tensor(interpreter.TensorHandle(found, element), kind)
            return slow(pointer, mask, other, **more)

        return run

    def store(self, slow: Any) -> Any:
        core, tensor, interpreter = self.core, self.core.tensor, self.interpreter

        def run(pointer: Any, value: Any, mask: Any = None, **more: Any) -> Any:
            if pointer.__class__ is tensor and pointer.dtype.__class__ is core.pointer_type:
                element, at = pointer.dtype.element_ty, pointer.handle.data
                elements = IN_MEMORY.get(element.name)
                if value.__class__ is tensor and elements is not None and value.dtype is element:
                    kind = self.spread(pointer.type, pointer.type, element)
                    m = mask.value if mask.__class__ is core.constexpr else mask
                    kept, data = self._kept(m, pointer, kind, element), value.handle.data
                    fits = data.dtype is elements and self.spread(pointer.type, value.type, element) is kind
                    if kept is not None and fits and not pointer.dtype.is_const():
                        data = data if data.shape == at.shape else np.broadcast_to(data, at.shape)
                        return interpreter._interpreter.store(at, data, kept)
            return slow(pointer, value, mask, **more)

        return run


def _quotient(x: Any, y: Any) -> Any:
    """Towards zero, as the interpreter has it."""
    return (x - np.fmod(x, y)) // y
