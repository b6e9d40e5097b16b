"""One key for every cache: two values share a key only if no function could tell them apart.

Traces, plans, divergences, printed programs and compiled graphs are all found by such keys.  A key compares type and
value, so 1, True, 1.0, -0.0, NaN and named tuples of different type are all different.  Values that cannot change are
plain: numbers, text, dtypes, enum members, and tuples, named tuples and frozen dataclasses of those.  Everything else
is itself alone.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import reprlib
import typing
import weakref
from typing import Any

import torch


class Same:
    """Hash and compare by identity, and keep the thing alive so that its identity is not used again."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def key_of(x: Any) -> Any:
    """A hashable key of any value: by type and content if it is plain, else by identity."""
    key = plain_key(x)
    return Same(x) if key is None else key


def is_plain(x: Any) -> bool:
    """Whether a value is known for good once it is read: it cannot change, and it holds no code of a user's."""
    return plain_key(x) is not None


def plain_key(x: Any) -> Any:
    """The key of a plain value; None for any other."""
    kind = type(x)
    if kind in _ATOMS:
        return (kind, x)
    if kind is float:
        return (float, x.hex())  # tells -0.0 from 0.0, and NaN is itself
    if kind is complex:
        return (complex, x.real.hex(), x.imag.hex())
    if kind is tuple or kind is frozenset or kind is torch.Size:
        return _all(kind, x)
    if isinstance(x, enum.Enum):
        return None if plain_key(x.value) is None else (kind, x.name, plain_key(x.value))
    if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and getattr(x, "shape", None) == ():
        return (kind, x.tobytes()) if getattr(x.dtype, "kind", "O") in "biufc" else None
    names = fields_of(kind)
    return None if names is None else _all(kind, (getattr(x, name) for name in names))


def fields_of(kind: type) -> tuple[str, ...] | None:
    """The fields of a named tuple or frozen dataclass that adds no code of its own to them; None for other types."""
    if kind not in _FIELDS:
        _FIELDS[kind] = _fields(kind)
    return _FIELDS[kind]


def _fields(kind: type) -> tuple[str, ...] | None:
    if kind.__mro__[1:] == (tuple, object) and isinstance(getattr(kind, "_fields", None), tuple):
        names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    elif kind.__mro__[1:] == (object,) and getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        names = tuple(f.name for f in dataclasses.fields(kind))
    else:
        return None
    own = [x for name, x in vars(kind).items() if name not in names and name not in _DATA]
    return names if all(_generated(x) for x in own) else None


def _generated(x: Any) -> bool:
    """Whether a method was written by `dataclass` or `namedtuple` themselves."""
    code = getattr(getattr(x, "__func__", x), "__code__", None)
    return code is not None and code.co_filename in _GENERATORS


def _all(kind: type, items: Any) -> Any:
    keys = [plain_key(y) for y in items]
    if any(k is None for k in keys):
        return None
    return (kind, frozenset(keys) if kind is frozenset else tuple(keys))


_ATOMS = frozenset(
    {bool, int, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.memory_format, torch.layout}
)
_FIELDS: weakref.WeakKeyDictionary[type, tuple[str, ...] | None] = weakref.WeakKeyDictionary()


# What a record's type holds that is no code.  `<string>`: where generated methods say they come from.
_DATA = frozenset(
    {
        "__annotations__", "__dataclass_fields__", "__dataclass_params__", "__dict__", "__doc__", "__firstlineno__",
        "__hash__", "__match_args__", "__module__", "__orig_bases__", "__qualname__", "__slots__",
        "__static_attributes__", "__weakref__", "__annotate__", "__annotate_func__", "__annotations_cache__",
        "_field_defaults", "_fields",
    }
)  # fmt: skip
_GENERATORS = frozenset({"<string>", *(str(m.__file__) for m in (collections, dataclasses, reprlib, typing))})
