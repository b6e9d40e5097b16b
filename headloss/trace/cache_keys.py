"""One key for every cache: two values share a key only if no function could tell them apart.

Traces, plans, divergences, printed programs and compiled graphs are all cached under such keys.  A key compares type
and value, so 1, True, 1.0, -0.0, NaN and named tuples of different type are all different.  Values that cannot change
are "plain": numbers, text, dtypes, enum members, and tuples, named tuples and frozen dataclasses of those.  All other
values are compared by identity.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import reprlib
import struct
import types
import typing
from typing import Any

import torch


class ByIdentity:
    """Hash and compare by identity, and keep the object alive so that its `id` is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(x: Any) -> Any:
    """A hashable key for any value: type and content if it is plain, identity otherwise."""
    key = plain_key(x)
    return ByIdentity(x) if key is None else key


def is_plain(x: Any) -> bool:
    """Whether reading a value once is enough: it cannot change and holds no code of a user's."""
    return plain_key(x) is not None


def plain_key(x: Any) -> Any:
    """The key of a plain value; None for any other."""
    kind = type(x)
    if kind in _ATOMS:
        return (kind, x)
    if kind is float:
        return (float, x.hex() if x == x else struct.pack("d", x))  # distinguishes -0.0 from 0.0; NaN has a sign too
    if kind is complex:
        return (complex, struct.pack("dd", x.real, x.imag))
    if kind is tuple or kind is torch.Size:
        return _key_of_items(kind, x)
    if kind is range:
        return (range, x.start, x.stop, x.step)  # equal ranges may differ in `stop`
    if isinstance(x, enum.Enum):
        value = plain_key(x.value) if _is_bare(kind) and set(vars(x)) <= _OF_MEMBERS else None
        return None if value is None else (kind, x.name, value)
    if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and getattr(x, "shape", None) == ():
        return (kind, x.tobytes()) if getattr(x.dtype, "kind", "O") in "biufc" else None
    names = fields_of(kind)
    if names is None or not set(getattr(x, "__dict__", ())).issubset(names):
        return None  # not a record, or one with attributes besides its fields
    return _key_of_items(kind, (getattr(x, name) for name in names))


def as_text(key: Any) -> str:
    """A key as text, which is the same in every process: it has no identities, addresses or device indices."""
    if isinstance(key, tuple | list | frozenset):
        texts = [as_text(x) for x in key]
        return f"({', '.join(sorted(texts) if isinstance(key, frozenset) else texts)})"
    if isinstance(key, types.CodeType):
        return f"{key.co_name} {key.co_code.hex()} {as_text(key.co_consts)} {key.co_names}"
    if isinstance(key, torch.device):
        return key.type
    value = key.value if isinstance(key, ByIdentity) else key
    name = getattr(value, "__qualname__", None)
    return repr(key) if type(key) in _ATOMS or isinstance(key, float | complex) else str(name or type(value).__name__)


def fields_of(kind: type) -> tuple[str, ...] | None:
    """The fields of a named tuple or frozen dataclass that adds no code; None for other types."""
    if kind.__mro__[1:] == (tuple, object) and isinstance(getattr(kind, "_fields", None), tuple):
        names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    elif kind.__mro__[1:] == (object,) and getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        names = tuple(f.name for f in dataclasses.fields(kind))
    else:
        return None
    if any(hasattr(x := vars(kind).get(name), "__set__") and type(x) not in _SLOTS for name in names):
        return None  # a property in place of a field
    code = [(name, x) for name, x in vars(kind).items() if name not in names and name not in _CLASS_DATA]
    return names if all(_is_generated(name, x) for name, x in code) else None


def _is_generated(name: str, x: Any) -> bool:
    """Whether `dataclass` or `namedtuple` generated a method."""
    code = getattr(getattr(x, "__func__", x), "__code__", None)
    return code is not None and code.co_filename in _GENERATED_IN and name in _GENERATED_METHODS


def _is_bare(kind: Any) -> bool:
    """Whether an enum has only names and values, no code and no other attributes."""
    for name, x in vars(kind).items():
        code = getattr(getattr(x, "fget", None) or getattr(x, "__func__", x), "__code__", None)
        added = code is None or code.co_filename != enum.__file__
        if added and name not in kind.__members__ and (code is not None or not name.startswith("_")):
            return False
    return all(x in (kind, int, str, float, object) or x.__module__ == "enum" for x in kind.__mro__)


def _key_of_items(kind: type, items: Any) -> Any:
    keys = [plain_key(y) for y in items]
    if any(k is None for k in keys):
        return None
    return (kind, tuple(keys))


_ATOMS = frozenset(
    {bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout}
)


# Entries of a record's class that are not code.  `<string>`: the file that generated methods claim to come from.
_CLASS_DATA = frozenset(
    {
        "__annotations__", "__dataclass_fields__", "__dataclass_params__", "__dict__", "__doc__", "__firstlineno__",
        "__hash__", "__match_args__", "__module__", "__orig_bases__", "__qualname__", "__slotnames__", "__slots__",
        "__static_attributes__", "__weakref__", "__annotate__", "__annotate_func__", "__annotations_cache__",
        "_field_defaults", "_fields",
    }
)  # fmt: skip
_GENERATED_IN = frozenset({"<string>", *(str(m.__file__) for m in (collections, dataclasses, reprlib, typing))})
_GENERATED_METHODS = frozenset(
    {
        "__delattr__", "__eq__", "__ge__", "__getnewargs__", "__getstate__", "__gt__", "__hash__", "__init__", "__le__",
        "__lt__", "__new__", "__replace__", "__repr__", "__setattr__", "__setstate__", "_asdict", "_make", "_replace",
    }
)  # fmt: skip
_SLOTS = (types.MemberDescriptorType, type(vars(collections.namedtuple("_", "x"))["x"]))  # slots and items
_OF_MEMBERS = frozenset({"__objclass__", "_name_", "_sort_order_", "_value_"})  # the attributes of an enum member
