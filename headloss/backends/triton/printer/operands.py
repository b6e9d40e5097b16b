"""The operands of printed operations: values and numbers of four kinds (bool, int64, float32, float64), as text."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

KINDS = "bifd"  # bool, int64, float32, float64
TYPES = {"b": "tl.int1", "i": "tl.int64", "f": "tl.float32", "d": "tl.float64"}
# computed in a wider type, then rounded or wrapped around after every operation
NARROW = {
    torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.int32: "tl.int32", torch.int16: "tl.int16",
    torch.int8: "tl.int8", torch.uint8: "tl.uint8",
}  # fmt: skip
DTYPES = frozenset({torch.bool, torch.int64, torch.float32, torch.float64, *NARROW})


class Unprintable(Exception):  # noqa: N818, it says what cannot be done
    """An operation that cannot be part of a printed function."""

    def __init__(self, operation: str, where: str | None = None) -> None:
        super().__init__(operation if where is None else f"{operation} of {where}")
        self.operation, self.where = operation, where


def kind_of(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "d" if dtype == torch.float64 else "f"
    return "b" if dtype == torch.bool else "i"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Operand:
    """A printed value or a number, as an argument of a template; `ndim` is None for a number.

    A number with a text is an argument of the printed function: no template may depend on its value.
    """

    __slots__ = ("common", "dtype", "kind", "ndim", "number", "text")

    def __init__(self, text: str, kind: str, dtype: torch.dtype, ndim: int | None, number: Any = None) -> None:
        self.text, self.kind, self.dtype, self.ndim, self.number = text, kind, dtype, ndim, number
        self.common = kind

    @classmethod
    def of(cls, number: float, text: str = "") -> Operand:
        whole = torch.bool if isinstance(number, bool) else torch.int64
        dtype = whole if isinstance(number, int) else torch.get_default_dtype()
        return cls(text, kind_of(dtype), dtype, None, number)

    @property
    def is_one(self) -> bool:
        return not self.text and self.number == 1

    def __format__(self, spec: str) -> str:
        kind = self.common if spec == "p" else spec.lower()
        kind = "d" if kind == "f" and self.common == "d" else kind
        if self.number is not None and not self.text:
            return constant(self.number, kind) if spec == "F" or kind in "bd" else literal(self.number, kind)
        return cast(self.text, self.kind, kind)


def cast(text: str, have: str, want: str) -> str:
    if have == want:
        return text
    return f"({text} != 0)" if want == "b" else f"{text}.to({TYPES[want]})"


def narrowed(text: str, dtype: torch.dtype) -> str:
    return f"({text}).to({NARROW[dtype]}).to({TYPES[kind_of(dtype)]})" if dtype in NARROW else text


def literal(number: float, kind: str) -> str:
    """A number as a literal that keeps its value: it is rounded to float32 once, here."""
    if kind != "f":
        return _signed(str(int(number)))
    x = struct.unpack("f", struct.pack("f", float(number)))[0]  # native: beyond float32 it is infinite
    return _signed(_float(x)) if x == 0 or not abs(x) < 2.0**-126 else constant(x, "f")


def constant(number: float, kind: str) -> str:
    exact = kind == "d" or (kind == "f" and 0 < abs(number) < 2.0**-126)
    text = repr(bool(number)) if kind == "b" else _float(float(number)) if exact else literal(number, kind)
    return f"tl.full([], {text}, {TYPES[kind]})"


def _float(x: float) -> str:
    return repr(x) if math.isfinite(x) else f'float("{x}")' if x != -math.inf else '-float("inf")'


def _signed(text: str) -> str:
    return f"({text})" if text.startswith("-") else text
