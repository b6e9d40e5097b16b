"""Checks of options: the option of a loss must have the type that its annotation or its default implies.

Options often come from YAML or JSON, where "no", "3e-4" and 1 easily mean something else than was intended.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headloss.bounded_cache import store

_NAMES: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str, "None": types.NoneType}
_LARGEST = sys.float_info.max
_BY_DEFAULT: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int, float), float: (float,), str: (str,)}
_WORDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text", types.NoneType: "None"}


def parameters_of(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function; for a module, those of its forward.

    To Python, parameters after one that a `functools.partial` has bound are keyword-only; here they keep their kind.
    """
    found = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    if not isinstance(fn, functools.partial):
        return found
    own = parameters_of(fn.func)
    return {name: p if name in fn.keywords else p.replace(kind=own[name].kind) for name, p in found.items()}


def is_number(x: object) -> bool:
    """Whether it is a finite number: neither a bool, nor NaN, nor an integer that no float can hold."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):  # the only form that torch 2.8 compiles
        return False
    return bool(-_LARGEST <= x <= _LARGEST)  # a graph may hold a symbol, of which `math.isfinite` says nothing


def constant(x: Any) -> Any:
    """A number that the graph being traced may hold as a symbol, as a constant; anything else unchanged."""
    if not torch.compiler.is_compiling() or not isinstance(x, (int, float)):
        return x
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # loads sympy, which a compiler has loaded already

    return guard_scalar(x)


def shown(x: object) -> str:
    """A value as short text for a message; never raises."""
    try:
        text = repr(x)
    except Exception:  # an integer of more than 4300 digits has no text
        return f"a value of type {type(x).__name__}"
    return text if len(text) <= 100 else f"{text[:80]}..."


def shape_or_type(x: object) -> str:
    """A tensor's shape, or the type of anything else, for a message."""
    return f"{tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def check_option(label: str, parameter: inspect.Parameter, value: Any) -> Any:
    """The value as the function gets it; raises an error that begins with `label` if its type is wrong."""
    default = parameter.default
    kinds = _kinds(parameter)
    if not kinds:
        return _check_unknown(label, default, value)
    wanted = " or ".join(_WORDS[kind] for kind in kinds if not (kind is int and float in kinds))
    if value is None or isinstance(value, (bool, str)):
        kind = next(k for k in (types.NoneType, bool, str) if isinstance(value, k))
        if kind in kinds:
            return value
        hint = "; YAML reads 3e-4 as text and 3.0e-4 as a number" if kind is str and float in kinds else ""
        hint = "; YAML 1.2 reads no and off as text" if kind is str and bool in kinds else hint
        raise TypeError(f"{label}: wanted {wanted}, got {shown(value)}{hint}")
    if not isinstance(value, numbers.Real) or not (int in kinds or float in kinds):
        got = shown(value) if isinstance(value, numbers.Real) else type(value).__name__
        hint = "; a value that changes belongs in an input of the call" if hasattr(value, "dtype") else ""
        raise TypeError(f"{label}: wanted {wanted}, got {got}{hint}")
    whole = isinstance(value, numbers.Integral)
    if float not in kinds and not whole:
        raise TypeError(f"{label}: wanted {wanted}, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    unbounded = isinstance(default, float) and not math.isfinite(default)
    if not math.isfinite(number) and (whole or not unbounded):
        raise ValueError(f"{label}: wanted {wanted}, got {shown(value)}")
    return int(value) if isinstance(value, numbers.Integral) and int in kinds else number


def _check_unknown(label: str, default: Any, value: Any) -> Any:
    """Check an option of unknown type: raise only for what is surely wrong, such as inf, or text for a number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not is_number(value):
        raise ValueError(f"{label}: wanted a finite number, got {shown(value)}")
    if default is None and isinstance(value, str) and _reads_as_number(value):
        hint = "YAML reads 3e-4 as text and 3.0e-4 as a number"
        raise TypeError(f"{label}: wanted a number, got the text {value!r}; {hint}")
    return _copy(tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value)


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _kinds(parameter: inspect.Parameter) -> tuple[type, ...]:
    """The plain types that an option may have; empty if unknown."""
    default, annotation = parameter.default, parameter.annotation
    if annotation is parameter.empty:
        return _BY_DEFAULT.get(type(default), ())
    if isinstance(annotation, str):
        kinds = [_NAMES.get(part.strip()) for part in annotation.split("|")]
    else:
        parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        kinds = [types.NoneType if part is None else part for part in parts]
    if default is None:
        kinds.append(types.NoneType)
    if any(kind not in _NAMES.values() for kind in kinds) or not (
        default is parameter.empty or default is None or isinstance(default, tuple(kinds))  # type: ignore[arg-type]
        or (isinstance(default, int) and float in kinds)
    ):  # fmt: skip
        return ()
    return tuple(dict.fromkeys(kinds))  # type: ignore[arg-type]


def _copy(x: Any) -> Any:
    """Copies of Python containers, so that later changes by the caller have no effect."""
    if type(x) in (list, tuple, set, frozenset):
        return type(x)(_copy(y) for y in x)
    return {k: _copy(y) for k, y in x.items()} if type(x) is dict else x


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_bytes(memory: str | int) -> int:
    """A size in bytes from an int or a string such as "1GiB"."""
    if isinstance(memory, bool) or not isinstance(memory, (int, str)):
        raise TypeError(f'memory: wanted bytes or a size such as "1GiB", got {memory!r}')
    size = _size(memory) if isinstance(memory, str) else memory
    if size <= 0:
        raise ValueError(f"memory: wanted a positive size, got {size}")
    return size


def _size(memory: str) -> int:
    if memory in _BYTES:
        return _BYTES[memory]
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", memory)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f'memory: wanted bytes or a size such as "1GiB" or "200MB", got {memory!r}')
    return store(_BYTES, memory, int(float(match[1]) * _UNITS[match[2].lower()]), 64)


_BYTES: dict[str, int] = {}
_size._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch 2.8 cannot trace `re`


def check_temperatures(T: Any) -> None:
    """Check one temperature, or one per row, if the host can read it without waiting."""
    if isinstance(T, Tensor) and T.is_cpu and not bool((T > 0).all() and T.isfinite().all()):
        raise ValueError(f"temperature: wanted positive and finite, got a smallest value of {float(T.min())}")
