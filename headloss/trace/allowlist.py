"""The allowlist of what traced functions may read: parts of torch and math, and attributes of tensors and builtins."""

from __future__ import annotations

import builtins
import dis
import functools
import math
import types
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket


def is_immutable(x: Any) -> bool:
    return isinstance(x, type) and bool(x.__flags__ & _IMMUTABLE)


def is_unpatched(name: str) -> bool:
    """Whether this attribute of torch.Tensor is the one that it had when this module was imported."""
    return getattr(torch.Tensor, name, None) is _TORCHS.get(name)


def is_aten(x: OpOverload | OpOverloadPacket) -> bool:
    name = x._qualified_op_name if isinstance(x, OpOverloadPacket) else x.name()
    return name.startswith(("aten::", "headloss::"))


_IMMUTABLE = 1 << 8  # flag of a type whose attributes cannot be set (Py_TPFLAGS_IMMUTABLETYPE)
_TORCH_FILES = str(Path(torch.__file__).parent)


def _is_original(x: Any) -> bool:
    """Whether a function or descriptor comes from torch or Python, not from a user who replaced theirs."""
    x = getattr(x, "fget", None) or getattr(x, "__func__", x)
    if isinstance(x, types.FunctionType):
        return x.__code__.co_filename.startswith(_TORCH_FILES)
    return isinstance(x, _IN_C) or x is None


_IN_C = (
    type, types.BuiltinFunctionType, types.MethodDescriptorType, types.GetSetDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.MemberDescriptorType, types.MethodWrapperType,
)  # fmt: skip
_TORCHS = {x: y if _is_original(y := getattr(torch.Tensor, x, None)) else object() for x in dir(torch.Tensor)}

_BUILTINS = (
    abs, all, any, bool, complex, dict, divmod, enumerate, filter, float, format, frozenset, int, isinstance,
    issubclass, iter, len, list, map, max, min, next, pow, range, repr, reversed, round, set, slice, sorted, str, sum,
    tuple, type, zip,
)  # fmt: skip
# Functions that make or describe a tensor without taking one; `get_overridable_functions` lists the others.
_TORCH = (
    "arange", "as_tensor", "broadcast_shapes", "can_cast", "empty", "enable_grad", "eye", "finfo", "full", "iinfo",
    "is_tensor", "linspace", "logspace", "no_grad", "ones", "promote_types", "result_type", "scalar_tensor",
    "set_grad_enabled", "tensor", "zeros", "Tensor", "Size",
)  # fmt: skip
_IS_ALLOWED = ("is_complex", "is_floating_point", "is_signed")  # other `is_*` functions report the state of a tensor
_FUNCTIONAL = ("elu_", "hardsigmoid", "hardswish", "hardtanh_", "leaky_relu_", "relu_", "selu_", "sigmoid", "tanh")


@functools.cache
def allowed() -> dict[int, Any]:
    """Functions and types that read nothing but their arguments, by `id`."""
    from torch.nn import functional
    from torch.overrides import get_overridable_functions

    found = [*_BUILTINS, *(x for x in vars(math).values() if isinstance(x, types.BuiltinFunctionType))]
    found += [x for x in vars(builtins).values() if isinstance(x, type) and issubclass(x, Exception)]
    functions = get_overridable_functions().items()
    listed = [x for module, xs in functions if isinstance(module, types.ModuleType) for x in xs if _is_original(x)]
    found += [x for x in listed if name_of(x) in _IS_ALLOWED or not name_of(x).startswith(("is_", "get_"))]
    found += [getattr(torch, name) for name in _TORCH]
    found += [x for name in _FUNCTIONAL if _is_original(x := getattr(functional, name, None)) and x is not None]
    return {id(x): x for x in found}


def original_attribute(x: Any, name: str) -> Any:
    """An attribute that an allowed type had when it was listed, not one that a user set."""
    return _original_attributes().get(id(x), {}).get(name)


@functools.cache
def _original_attributes() -> dict[int, dict[str, Any]]:
    return {i: dict(vars(x)) for i, x in allowed().items() if isinstance(x, type)}


# Attributes of tensors about size and dtype; the other allowed ones are ATen operators that return tensors.
_OF_TENSORS = (
    "T", "bfloat16", "bool", "byte", "char", "device", "dim", "double", "dtype", "element_size", "float", "half", "int",
    "is_complex", "is_cpu", "is_cuda", "is_floating_point", "is_meta", "is_signed", "item", "itemsize", "long", "mT",
    "ndim", "ndimension", "nelement", "new_tensor", "numel", "polygamma", "shape", "short", "size", "tolist", "type",
    "where",
)  # fmt: skip
_OF_SEGMENTS = ("counts", "ids", "maxima", "mean", "means", "minima", "num_segments", "spread", "totals")
_OF_FINFO = ("bits", "eps", "max", "min", "resolution", "smallest_normal", "tiny")  # of torch.finfo


@functools.cache
def allowed_attributes() -> frozenset[str]:
    """Attributes that depend on nothing but the value of their owner: of tensors, segments and Python's builtins."""
    names = {*_OF_TENSORS, *_OF_SEGMENTS, *_OF_FINFO}
    for name in dir(torch.Tensor):
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
            first = schema.arguments[0] if schema.arguments else None
            if first is not None and first.name == "self" and any("Tensor" in str(r.type) for r in schema.returns):
                names.add(name)
    for kind in (dict, list, tuple, str, set, frozenset, int, float, complex, range, slice):
        names.update(name for name in dir(kind) if not name.startswith("_"))
    return frozenset(names - {"format", "format_map"})  # these read any attribute that the text names


def name_of(x: Any) -> str:
    return str(getattr(x, "__name__", type(x).__name__))


def operators_of(step: dis.Instruction) -> tuple[str, ...]:
    """The methods of tensors that a bytecode instruction calls without naming them."""
    if step.opname == "BINARY_OP":
        name = _OPERATORS.get(step.argrepr.rstrip("="), "getitem")  # indexing is a BINARY_OP from 3.14 on
        sides = ("", "r", "i") if step.argrepr.endswith("=") else ("", "r")
        return tuple([f"__{side}{name}__" for side in sides])
    if step.opname == "COMPARE_OP":
        return next((names for sign, names in _COMPARISONS.items() if sign in step.argrepr), ())
    return _UNNAMED.get(step.opname, ())


_OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip
_COMPARISONS = {
    "<=": ("__le__", "__ge__"), ">=": ("__le__", "__ge__"), "<": ("__lt__", "__gt__"), ">": ("__lt__", "__gt__"),
    "==": ("__eq__",), "!=": ("__ne__",),
}  # fmt: skip
_UNNAMED = {
    "UNARY_NEGATIVE": ("__neg__",), "UNARY_INVERT": ("__invert__",), "UNARY_POSITIVE": ("__pos__",),
    "BINARY_SUBSCR": ("__getitem__",), "BINARY_SLICE": ("__getitem__",), "STORE_SUBSCR": ("__setitem__",),
    "GET_ITER": ("__iter__",), "UNPACK_SEQUENCE": ("__iter__",), "CONTAINS_OP": ("__contains__",),
}  # fmt: skip
