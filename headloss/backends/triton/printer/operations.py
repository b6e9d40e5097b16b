"""The table of element-wise PyTorch operations, each with its text in Triton.

A rule has a template for each kind of number that PyTorch computes the operation in, over the operation's own argument
names.  `{self:p}` is the argument in that kind, `:f` as a float of its width, `:i` as an int64, `:b` as a bool, `:F` as
a float tensor even where it is a number.  Nothing else is printed: no operation without a rule, no kind without a
template, no argument that the caller gave and the template does not read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from headloss.backends.triton.printer.operands import (
    KINDS,
    NARROW,
    TYPES,
    Operand,
    Unprintable,
    constant,
    kind_of,
    name_of,
)

Arguments = Mapping[str, Any]  # an Operand, or another argument of the operation
Template = str | Callable[[Arguments], str]


class Rule(NamedTuple):
    result: str  # "b" flags, "f" floats, "p" the kind that it is computed in
    templates: Mapping[str, Template]  # by kind
    only: Mapping[str, Any] = {}  # arguments with the only value that is printed
    unread: tuple[str, ...] = ()  # arguments that change nothing


class _Read(dict[str, Any]):
    """Arguments, and which of them a template has read."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


def written(name: str, arguments: Arguments, given: Collection[str], dtype: torch.dtype) -> tuple[str, str]:
    """An operation as text, and the text's kind.  `given`: arguments that differ from their defaults; `dtype`: the
    result's.
    """
    rule = RULES[name]
    for key, value in rule.only.items():
        found = arguments.get(key)
        found = found.number if isinstance(found, Operand) else found
        if type(found) is not type(value) or found != value:
            raise Unprintable(f"{name} with {key}={found}")
    operands = {k: x for k, x in arguments.items() if isinstance(x, Operand)}
    promoting = [x for k, x in operands.items() if _promotes(name, k, x)]
    work = promoted(promoting)
    if rule.result == "f":
        if not dtype.is_floating_point:
            raise Unprintable(f"{name} in {name_of(dtype)}")
        work = work if work.is_floating_point else dtype
    if ("reduction" in rule.only or name.endswith("_backward")) and any(x.dtype != work for x in promoting):
        raise Unprintable(f"{name} of several dtypes")
    _check_narrow(name, work, [*promoting, *(x for k, x in operands.items() if k == "alpha")])
    common = kind_of(work)
    if common not in rule.templates:
        raise Unprintable(f"{name} in {name_of(work)}")
    for x in operands.values():
        x.common = common
    template, read = rule.templates[common], _Read(arguments)
    text = template.format_map(read) if isinstance(template, str) else template(read)
    for key in given:
        if key not in read.read and key not in rule.only and key not in rule.unread:
            raise Unprintable(f"{name} with {key}")
    return text, common if rule.result == "p" else kind_of(work) if rule.result == "f" else "b"


_PROMOTING = ("self", "other", "exponent", "min", "max")  # numbers that take part in promotion; others are parameters
_APART = {"where": ("condition",), "masked_fill": ("mask", "value")}  # operands that do not


def _promotes(name: str, key: str, x: Operand) -> bool:
    return (x.number is None or key in _PROMOTING) and key not in _APART.get(name, ())


def promoted(operands: Iterable[Operand]) -> torch.dtype:
    """The dtype that PyTorch computes these in: rows decide; scalars, then numbers, only if of a higher kind."""
    groups: tuple[list[torch.dtype], ...] = ([], [], [])
    for x in operands:
        groups[2 if x.ndim is None else int(x.ndim == 0)].append(x.dtype)
    found = [functools.reduce(torch.promote_types, group) for group in groups if group]
    return functools.reduce(lambda a, b: torch.promote_types(a, b) if _rank(b) > _rank(a) else a, found)


def _rank(dtype: torch.dtype) -> int:
    return "bif".index(kind_of(dtype).replace("d", "f"))


# operations on half-precision floats in which PyTorch uses a number unrounded, or in which it does not matter when it
# is rounded
_ROUNDED_LATER = frozenset({"mul", "div", "where", "clamp", "clamp_min", "clamp_max"})


def _check_narrow(name: str, work: torch.dtype, operands: Iterable[Operand]) -> None:
    """Check that every operand is a value of the narrow type that PyTorch first converts it to.

    PyTorch does not do so in every operation, nor on every device in the same way.
    """
    for x in operands if work in NARROW else ():
        if x.number is None:
            fits = x.dtype == work or (torch.promote_types(x.dtype, work) == work and x.dtype.itemsize == 1)
        elif work.is_floating_point:
            fits = name in _ROUNDED_LATER or float(torch.tensor(x.number, dtype=work, device="cpu")) == x.number
        else:
            fits = torch.iinfo(work).min <= x.number <= torch.iinfo(work).max
        if not fits:
            what = f"a {name_of(x.dtype)} operand" if x.number is None else str(x.number)
            raise Unprintable(f"{name} of {name_of(work)} and {what}")


# ---------------------------------------------------------------- templates


def _rule(text: Template, kinds: str = "ifd", **more: Template) -> Rule:
    """Computed in the kind that the operands are promoted to."""
    return Rule("p", dict.fromkeys(kinds, text) | more)


def _floats(text: Template, d: Template | None = None, **only: Any) -> Rule:
    """Computed in floats, whatever the operands are."""
    return Rule("f", {"f": text} if d is None else {"f": text, "d": d}, only)


def _flags(text: str, **more: str) -> Rule:
    return Rule("b", dict.fromkeys(KINDS, text) | more)


def _linear(sign: str) -> Template:
    def text(a: Arguments) -> str:
        scaled = "{other:p}" if a["alpha"].is_one else "{alpha:p} * {other:p}"
        return ("{self:p} " + sign + " " + scaled).format_map(a)

    return text


def _rsub(a: Arguments) -> str:
    return ("{other:p} - {self:p}" if a["alpha"].is_one else "{other:p} - {alpha:p} * {self:p}").format_map(a)


_POWERS = {
    1.0: "{self:f}", 2.0: "{self:f} * {self:f}", 3.0: "{self:f} * {self:f} * {self:f}",
    0.5: "tl.sqrt_rn({self:F})", -0.5: "tl.div_rn(1.0, tl.sqrt_rn({self:F}))", -1.0: "tl.div_rn(1.0, {self:F})",
    -2.0: "tl.div_rn(1.0, {self:f} * {self:f})",
}  # fmt: skip
_WIDE_POWERS = {**_POWERS, 0.5: "tl.sqrt({self:F})", -0.5: "1.0 / tl.sqrt({self:F})", -1.0: "1.0 / {self:F}",
                -2.0: "1.0 / ({self:F} * {self:F})"}  # fmt: skip
_WHOLE_POWERS = {1.0: "{self:i}", 2.0: "{self:i} * {self:i}", 3.0: "{self:i} * {self:i} * {self:i}"}


def _pow(powers: Mapping[float, str], kind: str) -> Template:
    def text(a: Arguments) -> str:
        exponent = a["exponent"]
        if exponent.text and exponent.number is not None:
            return "power_by({self:F}, {exponent:F})".format_map(a)
        if exponent.number == 0:
            return constant(1, kind)
        if (exponent.number not in powers and kind != "f") or (
            exponent.number in (0.5, -0.5) and a["self"].dtype in NARROW
        ):
            raise Unprintable(f"pow of {name_of(a['self'].dtype)} to {exponent.number or 'a tensor'}")
        return powers.get(exponent.number, "power({self:F}, {exponent:F})").format_map(a)

    return text


def _clamp(low: str, high: str) -> Template:
    def text(a: Arguments) -> str:
        clamped = "{self:p}"
        if low in a and a[low] is not None:
            clamped = f"highest({clamped}, {{{low}:p}})"
        if high in a and a[high] is not None:
            clamped = f"lowest({clamped}, {{{high}:p}})"
        return clamped.format_map(a)

    return text


def _compare(sign: str) -> Rule:
    return _flags("({self:p} " + sign + " {other:p})", b="({self:i} " + sign + " {other:i})")


def _bits(sign: str) -> Rule:
    return _rule("({self:p} " + sign + " {other:p})", "bi")


def _whole(template: str, kinds: str = "fd") -> Rule:
    """Rounding, which leaves integers as they are."""
    return _rule(template, kinds, i="{self:p}")


def _unary(call: str, d: str | None = None) -> Rule:
    return _floats(call + "({self:F})", d and d + "({self:F})")


def _nan_to_num(a: Arguments) -> str:
    most = torch.finfo(a["self"].dtype).max
    fill = {"nan": 0.0, "posinf": most, "neginf": -most}
    kind = a["self"].common
    nan, up, down = (constant(v, kind) if a[k] is None else f"{a[k]:F}" for k, v in fill.items())
    x = f"{a['self']:p}"
    return f"tl.where({x} == {x}, tl.where({x} == INF, {up}, tl.where({x} == -INF, {down}, {x})), {nan})"


def _weighted(text: str) -> Template:
    """A loss with an optional weight per element.  With half-precision floats PyTorch rounds between its steps."""

    def weighted(a: Arguments) -> str:
        if a["self"].dtype in NARROW:
            raise Unprintable(f"binary_cross_entropy in {name_of(a['self'].dtype)}")
        return (text if a["weight"] is None else f"({text}) * {{weight:f}}").format_map(a)

    return weighted


def _binary_cross_with_logits(a: Arguments) -> str:
    positive = "" if a["pos_weight"] is None else "(({pos_weight:f} - 1.0) * {target:f} + 1.0) * "
    return _weighted("(1.0 - {target:f}) * {self:f} - " + positive + "log_sigmoid({self:F})")(a)  # type: ignore[operator]


def _elu_backward(a: Arguments) -> str:
    return (
        "elu_backward({grad_output:F}, {alpha:F}, {scale:F}, {input_scale:F}, "
        + f"{bool(a['is_result'].number)}, "
        + "{self_or_result:F})"
    ).format_map(a)


_SIGN = "({self:p} > 0).to(TYPE) - ({self:p} < 0).to(TYPE)"
_LERP = (
    "tl.where(tl.abs({weight:F}) < 0.5, {self:f} + {weight:f} * ({end:f} - {self:f}), "
    "{end:f} - ({end:f} - {self:f}) * (1.0 - {weight:f}))"
)
_SQUARED = "({self:f} - {target:f}) * ({self:f} - {target:f})"
_SQUARED_BACKWARD = "2.0 * ({self:f} - {target:f}) * {grad_output:f}"
_SIGMOID_BACKWARD = "{grad_output:f} * (1.0 - {output:f}) * {output:f}"
_TANH_BACKWARD = "{grad_output:f} * (1.0 - {output:f} * {output:f})"
_THRESHOLD_BACKWARD = "tl.where({self:f} <= {threshold:f}, 0.0, {grad_output:f})"
_HARDTANH_BACKWARD = "tl.where(({self:f} > {min_val:f}) & ({self:f} < {max_val:f}), {grad_output:f}, 0.0)"
_LEAKY = "tl.where({self:f} > 0, {self:f}, {self:f} * {negative_slope:f})"
_LEAKY_BACKWARD = "tl.where({self:f} > 0, {grad_output:f}, {grad_output:f} * {negative_slope:f})"

RULES: dict[str, Rule] = {
    "add": _rule(_linear("+"), b="({self:b} | {other:b})"),
    "sub": _rule(_linear("-")),
    "rsub": _rule(_rsub),
    "mul": _rule("{self:p} * {other:p}", b="({self:b} & {other:b})"),
    "div": _floats("tl.div_rn({self:f}, {other:f})", "{self:f} / {other:f}"),
    "neg": _rule("{self:p} * (-1.0)", "fd", i="-{self:p}"),  # 0 - x would lose the sign of a zero
    "abs": _rule("tl.abs({self:p})"),
    "reciprocal": _floats("tl.div_rn(1.0, {self:F})", "1.0 / {self:F}"),
    "pow": Rule(
        "p", {"f": _pow(_POWERS, "f"), "d": _pow(_WIDE_POWERS, "d"), "i": _pow(_WHOLE_POWERS, "i")}, unread=("self",)
    ),
    "exp": _unary("exp", "tl.exp"),
    "exp2": _unary("tl.exp2", "tl.exp2"),
    "expm1": _unary("expm1"),
    "log": _unary("tl.log", "tl.log"),
    "log2": _unary("tl.log2", "tl.log2"),
    "log10": _floats("tl.log({self:F}) * 0.4342944819032518"),
    "log1p": _unary("log1p"),
    "sqrt": _unary("tl.sqrt_rn", "tl.sqrt"),
    "rsqrt": _floats("tl.div_rn(1.0, tl.sqrt_rn({self:F}))", "1.0 / tl.sqrt({self:F})"),
    "sin": _unary("tl.sin", "tl.sin"),
    "cos": _unary("tl.cos", "tl.cos"),
    "erf": _unary("tl.erf", "tl.erf"),
    "sigmoid": _floats("sigmoid({self:F})", "1.0 / (1.0 + tl.exp(-{self:F}))"),
    "tanh": _unary("tanh"),
    "silu": _floats("{self:f} * sigmoid({self:F})"),
    "relu": _rule("highest({self:p}, 0)"),
    "gelu": _floats("gelu({self:F})", approximate="none"),
    "elu": _floats("elu({self:F}, {alpha:F}, {scale:F}, {input_scale:F})"),
    "hardtanh": _rule(_clamp("min_val", "max_val"), "fd"),
    "leaky_relu": _floats(_LEAKY, _LEAKY),
    "softplus": _floats("softplus({self:F}, {beta:F}, {threshold:F})"),
    "log_sigmoid_forward": _unary("log_sigmoid"),
    "sign": _rule("sign({self:f})", "f", b="{self:b}", **{k: _SIGN.replace("TYPE", TYPES[k]) for k in "id"}),
    "floor": _whole("tl.floor({self:f})"),
    "ceil": _whole("tl.ceil({self:f})"),
    "trunc": _whole("tl.where({self:f} < 0, tl.ceil({self:f}), tl.floor({self:f}))"),
    "round": _whole("nearest({self:f})", "f"),
    "nan_to_num": _rule(_nan_to_num, "fd", i="{self:p}"),
    "minimum": _rule("lowest({self:p}, {other:p})", b="({self:b} & {other:b})"),
    "maximum": _rule("highest({self:p}, {other:p})", b="({self:b} | {other:b})"),
    "clamp": _rule(_clamp("min", "max")),
    "clamp_min": _rule(_clamp("min", "max")),
    "clamp_max": _rule(_clamp("min", "max")),
    "where": _rule("tl.where({condition:b}, {self:p}, {other:p})", KINDS),
    "masked_fill": _rule("tl.where({mask:b}, {value:p}, {self:p})", KINDS),
    "logaddexp": _floats("logaddexp({self:F}, {other:F})"),
    "xlogy": _floats("xlogy({self:F}, {other:F})"),
    "lerp": _floats(_LERP, _LERP),
    "addcmul": _rule("{self:p} + {value:p} * {tensor1:p} * {tensor2:p}"),
    "addcdiv": _floats(
        "{self:f} + {value:f} * tl.div_rn({tensor1:f}, {tensor2:f})",
        "{self:f} + {value:f} * ({tensor1:f} / {tensor2:f})",
    ),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "eq": _compare("=="),
    "ne": _compare("!="),
    "logical_and": _flags("({self:b} & {other:b})"),
    "logical_or": _flags("({self:b} | {other:b})"),
    "logical_xor": _flags("({self:b} ^ {other:b})"),
    "logical_not": _flags("({self:p} == 0)", b="({self:i} == 0)"),
    "bitwise_and": _bits("&"),
    "bitwise_or": _bits("|"),
    "bitwise_xor": _bits("^"),
    "bitwise_not": _rule("(-1 - {self:p})", "i", b="({self:i} == 0)"),
    "isnan": _flags("({self:p} != {self:p})", b="({self:i} != {self:i})"),
    "isinf": _flags("(tl.abs({self:f}) == INF)"),
    "isfinite": _flags("(tl.abs({self:f}) < INF)"),
    "huber_loss": _floats("huber({self:F}, {target:F}, {delta:F})", reduction=0),
    "smooth_l1_loss": _floats("smooth_l1({self:F}, {target:F}, {beta:F})", reduction=0),
    "mse_loss": _floats(_SQUARED, _SQUARED, reduction=0),
    "binary_cross_entropy": _floats(_weighted("binary_cross({self:F}, {target:F})"), reduction=0),
    "binary_cross_entropy_with_logits": _floats(_binary_cross_with_logits, reduction=0),
    "sigmoid_backward": _floats(_SIGMOID_BACKWARD, _SIGMOID_BACKWARD),
    "tanh_backward": _floats(_TANH_BACKWARD, _TANH_BACKWARD),
    "threshold_backward": _floats(_THRESHOLD_BACKWARD, _THRESHOLD_BACKWARD),
    "softplus_backward": _floats("softplus_backward({grad_output:F}, {self:F}, {beta:F}, {threshold:F})"),
    "log_sigmoid_backward": Rule("f", {"f": "log_sigmoid_backward({grad_output:F}, {self:F})"}, unread=("buffer",)),
    "silu_backward": _floats("silu_backward({grad_output:F}, {self:F})"),
    "gelu_backward": _floats("gelu_backward({grad_output:F}, {self:F})", approximate="none"),
    "elu_backward": _floats(_elu_backward),
    "hardtanh_backward": _floats(_HARDTANH_BACKWARD, _HARDTANH_BACKWARD),
    "leaky_relu_backward": _floats(_LEAKY_BACKWARD, _LEAKY_BACKWARD, self_is_result=False),
    "huber_loss_backward": _floats("huber_backward({grad_output:F}, {self:F}, {target:F}, {delta:F})", reduction=0),
    "smooth_l1_loss_backward": _floats(
        "smooth_l1_backward({grad_output:F}, {self:F}, {target:F}, {beta:F})", reduction=0
    ),
    "mse_loss_backward": _floats(_SQUARED_BACKWARD, _SQUARED_BACKWARD, reduction=0),
    "binary_cross_entropy_backward": _floats(
        _weighted("binary_cross_backward({grad_output:F}, {self:F}, {target:F})"), reduction=0
    ),
}  # fmt: skip
RULES["true_divide"], RULES["sgn"] = RULES["div"], RULES["sign"]


SAME = frozenset({"detach", "alias", "lift_fresh"})  # another name for the same storage
COPIES = frozenset({"clone", "_to_copy", "lift_fresh_copy"})
FILLS: dict[str, str | float] = {  # which argument fills a new tensor, or the number that does
    "full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "scalar_tensor": "s",
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1,
}  # fmt: skip
# Along the ids of a row, (R, K): `is_id` says which of a padded block of ids are ids.
ALONG: dict[str, str] = {
    "sum": "sum_along({x}, is_id)",
    "logsumexp": "logsumexp_along({x}, is_id)",
    "_log_softmax": "log_softmax_along({x}, is_id)",
    "_softmax": "softmax_along({x}, is_id)",
    "_log_softmax_backward_data": "log_softmax_backward_along({x}, {y}, is_id)",
    "_softmax_backward_data": "softmax_backward_along({x}, {y}, is_id)",
}
RESHAPES = frozenset({"unsqueeze", "squeeze", "expand"})  # between (R,), (R, 1) and (R, K): a block, or what it repeats
# arguments that these may have: the result's shape and dtype say it all, or they do not change values
_SHOWN = {
    "self", "dim", "keepdim", "dtype", "half_to_float", "input_dtype", "grad_output", "output", "size", "implicit",
    "fill_value", "s", "device", "pin_memory", "non_blocking", "memory_format",
}  # fmt: skip


def check_shown(name: str, given: Mapping[str, Any]) -> None:
    """Check that no argument of an operation without a rule is lost; `given`: those that differ from their defaults."""
    for key, value in given.items():
        if key not in _SHOWN and not (key == "layout" and value is torch.strided):
            raise Unprintable(f"{name} with {key}")
