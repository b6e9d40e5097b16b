"""How each element-wise operation of PyTorch reads in Triton.

A rule is the kind of its result and a template over the operation's own argument names.  `{self:f}` is the argument as
a float32, `:i` as an int64, `:b` as a bool, `:p` in the kind that PyTorch promotes the operands to, `:F` as a float32
tensor even where it is a number.  An operation without a rule is not printed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

KINDS = "bif"  # bool, int64, float32: each promotes to the next
TYPES = {"b": "tl.int1", "i": "tl.int64", "f": "tl.float32"}


class Unprintable(Exception):  # noqa: N818, it says what cannot be done
    """An operation that cannot be part of a printed function."""

    def __init__(self, operation: str, where: str | None = None) -> None:
        super().__init__(operation if where is None else f"{operation} of {where}")
        self.operation, self.where = operation, where


class Operand:
    """A printed value or a number, as an argument of a template.

    A number that has a text is one that the function is handed: no template may depend on what it is.
    """

    __slots__ = ("common", "kind", "number", "text")

    def __init__(self, text: str, kind: str, number: float | None = None) -> None:
        self.text, self.kind, self.number = text, kind, number
        self.common = kind

    @classmethod
    def of(cls, number: float) -> Operand:
        kind = "b" if isinstance(number, bool) else "i" if isinstance(number, int) else "f"
        return cls("", kind, number)

    @property
    def is_one(self) -> bool:
        return not self.text and self.number == 1

    def __format__(self, spec: str) -> str:
        kind = self.common if spec == "p" else spec.lower()
        if self.number is not None and not self.text:
            return constant(self.number, kind) if spec == "F" or kind == "b" else literal(self.number, kind)
        return cast(self.text, self.kind, kind)


def cast(text: str, have: str, want: str) -> str:
    if have == want:
        return text
    return f"({text} != 0)" if want == "b" else f"{text}.to({TYPES[want]})"


def literal(number: float, kind: str) -> str:
    """A number so that it survives: rounded to float32 once, here."""
    if kind != "f":
        return _signed(str(int(number)))
    x = struct.unpack("f", struct.pack("f", float(number)))[0]  # native: beyond float32 it is infinite
    if math.isnan(x) or math.isinf(x):
        return 'float("nan")' if math.isnan(x) else 'float("inf")' if x > 0 else '(-float("inf"))'
    return _signed(repr(x)) if x == 0 or abs(x) >= 2.0**-126 else constant(x, "f")


def constant(number: float, kind: str) -> str:
    subnormal = kind == "f" and 0 < abs(number) < 2.0**-126
    text = repr(bool(number)) if kind == "b" else repr(float(number)) if subnormal else literal(number, kind)
    return f"tl.full([], {text}, {TYPES[kind]})"


def _signed(text: str) -> str:
    return f"({text})" if text.startswith("-") else text


Arguments = Mapping[str, Any]  # Operand, or whatever else the operation was called with
Rule = tuple[str, str | Callable[[Arguments], str]]


def _linear(sign: str) -> Callable[[Arguments], str]:
    def text(a: Arguments) -> str:
        if a["self"].common == "b":
            return "({self:b} | {other:b})".format_map(a)
        plain = a["alpha"].is_one
        return (
            "{self:p} " + sign + " {other:p}" if plain else "{self:p} " + sign + " {alpha:p} * {other:p}"
        ).format_map(a)

    return text


def _mul(a: Arguments) -> str:
    return ("({self:b} & {other:b})" if a["self"].common == "b" else "{self:p} * {other:p}").format_map(a)


def _rsub(a: Arguments) -> str:
    return ("{other:p} - {self:p}" if a["alpha"].is_one else "{other:p} - {alpha:p} * {self:p}").format_map(a)


def _div(a: Arguments) -> str:
    if a.get("rounding_mode") is not None:
        raise Unprintable("div with rounding_mode")
    return "tl.div_rn({self:f}, {other:f})".format_map(a)


_POWERS = {
    0.0: "{self:f} * 0.0 + 1.0", 1.0: "{self:f}", 2.0: "{self:f} * {self:f}", 3.0: "{self:f} * {self:f} * {self:f}",
    0.5: "tl.sqrt_rn({self:F})", -0.5: "tl.div_rn(1.0, tl.sqrt_rn({self:F}))", -1.0: "tl.div_rn(1.0, {self:F})",
    -2.0: "tl.div_rn(1.0, {self:f} * {self:f})",
}  # fmt: skip


def _pow(a: Arguments) -> str:
    base, exponent = a["self"], a["exponent"].number
    if a["exponent"].text:
        return "power({self:F}, {exponent:F})".format_map(a)
    if base.common != "f":
        if exponent in (1, 2):
            return ("{self:i}" if exponent == 1 else "{self:i} * {self:i}").format_map(a)
        raise Unprintable("pow of integers")
    if exponent == 0.0:
        return constant(1.0, "f")
    return _POWERS.get(exponent, "power({self:F}, {exponent:F})").format_map(a)


def _clamp(low: str, high: str) -> Callable[[Arguments], str]:
    def text(a: Arguments) -> str:
        held = "{self:p}"
        if isinstance(a.get(low), Operand):
            held = f"highest({held}, {{{low}:p}})"
        if isinstance(a.get(high), Operand):
            held = f"lowest({held}, {{{high}:p}})"
        return held.format_map(a)

    return text


def _compare(sign: str) -> Rule:
    def text(a: Arguments) -> str:
        form = "({self:i} " + sign + " {other:i})" if a["self"].common == "b" else "({self:p} " + sign + " {other:p})"
        return form.format_map(a)

    return "b", text


def _bits(sign: str) -> Callable[[Arguments], str]:
    return ("({self:p} " + sign + " {other:p})").format_map


def _whole(template: str) -> Rule:
    """Rounding, which leaves integers as they are."""
    return "p", lambda a: (template if a["self"].common == "f" else "{self:p}").format_map(a)


def _plain(template: str, **must: Any) -> Rule:
    """A float operation of which only one form is printed: not reduced, not weighted."""

    def text(a: Arguments) -> str:
        for name, value in must.items():
            found = a.get(name)
            if (found.number if isinstance(found, Operand) else found) != value:
                raise Unprintable(f"{name}={found.number if isinstance(found, Operand) else found}")
        return template.format_map(a)

    return "f", text


def _nan_to_num(a: Arguments) -> str:
    most = struct.unpack("f", struct.pack("f", 3.4028234663852886e38))[0]
    fill = {"nan": 0.0, "posinf": most, "neginf": -most}
    nan, up, down = (f"{a[k]:f}" if isinstance(a.get(k), Operand) else literal(v, "f") for k, v in fill.items())
    x = f"{a['self']:f}"
    return f"tl.where({x} == {x}, tl.where({x} == INF, {up}, tl.where({x} == -INF, {down}, {x})), {nan})"


def _unary(call: str) -> Rule:
    return "f", call + "({self:F})"


def _round(a: Arguments) -> str:
    if isinstance(a.get("decimals"), Operand) and a["decimals"].number:
        raise Unprintable("round with decimals")
    return ("nearest({self:f})" if a["self"].common == "f" else "{self:p}").format_map(a)


def _sign(a: Arguments) -> str:
    return ("sign({self:f})" if a["self"].common == "f" else "sign({self:f}).to(tl.int64)").format_map(a)


RULES: dict[str, Rule] = {
    "add": ("p", _linear("+")),
    "sub": ("p", _linear("-")),
    "rsub": ("p", _rsub),
    "mul": ("p", _mul),
    "div": ("f", _div),
    "true_divide": ("f", _div),
    "neg": ("p", "-{self:p}"),
    "abs": ("p", "tl.abs({self:p})"),
    "reciprocal": ("f", "tl.div_rn(1.0, {self:F})"),
    "square": ("p", "{self:p} * {self:p}"),
    "pow": ("p", _pow),
    "exp": _unary("exp"),
    "exp2": _unary("tl.exp2"),
    "expm1": _unary("expm1"),
    "log": _unary("tl.log"),
    "log2": _unary("tl.log2"),
    "log10": ("f", "tl.log({self:F}) * 0.4342944819032518"),
    "log1p": _unary("log1p"),
    "sqrt": _unary("tl.sqrt_rn"),
    "rsqrt": ("f", "tl.div_rn(1.0, tl.sqrt_rn({self:F}))"),
    "sin": _unary("tl.sin"),
    "cos": _unary("tl.cos"),
    "erf": _unary("tl.erf"),
    "sigmoid": _unary("sigmoid"),
    "tanh": _unary("tanh"),
    "silu": ("f", "{self:f} * sigmoid({self:F})"),
    "relu": ("p", "highest({self:p}, 0)"),
    "gelu": _plain("gelu({self:F})", approximate="none"),
    "elu": ("f", "elu({self:F}, {alpha:F}, {scale:F}, {input_scale:F})"),
    "hardtanh": ("p", _clamp("min_val", "max_val")),
    "leaky_relu": ("f", "tl.where({self:f} > 0, {self:f}, {self:f} * {negative_slope:f})"),
    "softplus": ("f", "softplus({self:F}, {beta:F}, {threshold:F})"),
    "log_sigmoid_forward": _unary("log_sigmoid"),
    "sign": ("p", _sign),
    "sgn": ("p", _sign),
    "floor": _whole("tl.floor({self:f})"),
    "ceil": _whole("tl.ceil({self:f})"),
    "trunc": _whole("tl.where({self:f} < 0, tl.ceil({self:f}), tl.floor({self:f}))"),
    "round": ("p", _round),
    "nan_to_num": ("f", _nan_to_num),
    "minimum": ("p", "lowest({self:p}, {other:p})"),
    "maximum": ("p", "highest({self:p}, {other:p})"),
    "clamp": ("p", _clamp("min", "max")),
    "clamp_min": ("p", _clamp("min", "max")),
    "clamp_max": ("p", _clamp("min", "max")),
    "where": ("p", "tl.where({condition:b}, {self:p}, {other:p})"),
    "masked_fill": ("p", "tl.where({mask:b}, {value:p}, {self:p})"),
    "logaddexp": ("f", "logaddexp({self:F}, {other:F})"),
    "xlogy": ("f", "xlogy({self:F}, {other:F})"),
    "lerp": ("f", "tl.where(tl.abs({weight:F}) < 0.5, {self:f} + {weight:f} * ({end:f} - {self:f}), "
                  "{end:f} - ({end:f} - {self:f}) * (1.0 - {weight:f}))"),
    "addcmul": ("f", "{self:f} + {value:f} * {tensor1:f} * {tensor2:f}"),
    "addcdiv": ("f", "{self:f} + {value:f} * tl.div_rn({tensor1:f}, {tensor2:f})"),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "eq": _compare("=="),
    "ne": _compare("!="),
    "logical_and": ("b", "({self:b} & {other:b})"),
    "logical_or": ("b", "({self:b} | {other:b})"),
    "logical_xor": ("b", "({self:b} ^ {other:b})"),
    "logical_not": ("b", "({self:f} == 0)"),
    "bitwise_and": ("p", _bits("&")),
    "bitwise_or": ("p", _bits("|")),
    "bitwise_xor": ("p", _bits("^")),
    "bitwise_not": ("p", lambda a: ("({self:f} == 0)" if a["self"].common == "b" else "(-1 - {self:p})").format_map(a)),
    "isnan": ("b", "({self:f} != {self:f})"),
    "isinf": ("b", "(tl.abs({self:f}) == INF)"),
    "isfinite": ("b", "(tl.abs({self:f}) < INF)"),
    "huber_loss": _plain("huber({self:F}, {target:F}, {delta:F})", reduction=0),
    "smooth_l1_loss": _plain("smooth_l1({self:F}, {target:F}, {beta:F})", reduction=0),
    "mse_loss": _plain("({self:f} - {target:f}) * ({self:f} - {target:f})", reduction=0),
    "binary_cross_entropy": _plain("binary_cross({self:F}, {target:F})", reduction=0, weight=None),
    "binary_cross_entropy_with_logits": _plain(
        "(1.0 - {target:f}) * {self:f} - log_sigmoid({self:F})", reduction=0, weight=None, pos_weight=None
    ),
    "sigmoid_backward": ("f", "{grad_output:f} * (1.0 - {output:f}) * {output:f}"),
    "tanh_backward": ("f", "{grad_output:f} * (1.0 - {output:f} * {output:f})"),
    "threshold_backward": ("f", "tl.where({self:f} <= {threshold:f}, 0.0, {grad_output:f})"),
    "softplus_backward": ("f", "softplus_backward({grad_output:F}, {self:F}, {beta:F}, {threshold:F})"),
    "log_sigmoid_backward": ("f", "log_sigmoid_backward({grad_output:F}, {self:F})"),
    "silu_backward": ("f", "silu_backward({grad_output:F}, {self:F})"),
    "gelu_backward": _plain("gelu_backward({grad_output:F}, {self:F})", approximate="none"),
    "elu_backward": (
        "f",
        lambda a: f"elu_backward({a['grad_output']:F}, {a['alpha']:F}, {a['scale']:F}, {a['input_scale']:F}, "
        f"{bool(a['is_result'].number)}, {a['self_or_result']:F})",
    ),
    "hardtanh_backward": (
        "f",
        "tl.where(({self:f} > {min_val:f}) & ({self:f} < {max_val:f}), {grad_output:f}, 0.0)",
    ),
    "leaky_relu_backward": ("f", "tl.where({self:f} > 0, {grad_output:f}, {grad_output:f} * {negative_slope:f})"),
    "huber_loss_backward": _plain("huber_backward({grad_output:F}, {self:F}, {target:F}, {delta:F})", reduction=0),
    "smooth_l1_loss_backward": _plain(
        "smooth_l1_backward({grad_output:F}, {self:F}, {target:F}, {beta:F})", reduction=0
    ),
    "mse_loss_backward": _plain("2.0 * ({self:f} - {target:f}) * {grad_output:f}", reduction=0),
    "binary_cross_entropy_backward": _plain(
        "binary_cross_backward({grad_output:F}, {self:F}, {target:F})", reduction=0, weight=None
    ),
}  # fmt: skip


SAME = frozenset({"detach", "alias", "lift_fresh"})  # another name for the same storage
COPIES = frozenset({"clone", "_to_copy", "lift_fresh_copy"})
FILLS: dict[str, str | float] = {  # which argument fills a new tensor, or the number that does
    "full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "scalar_tensor": "s",
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1,
}  # fmt: skip
# Along the ids of a row, (R, K): `there` says which of a padded block of ids are ids.
ALONG: dict[str, str] = {
    "sum": "sum_along({x}, there)",
    "logsumexp": "logsumexp_along({x}, there)",
    "_log_softmax": "log_softmax_along({x}, there)",
    "_softmax": "softmax_along({x}, there)",
    "_log_softmax_backward_data": "log_softmax_backward_along({x}, {y}, there)",
    "_softmax_backward_data": "softmax_backward_along({x}, {y}, there)",
}
RESHAPES = frozenset({"unsqueeze", "squeeze", "expand"})  # between (R,), (R, 1) and (R, K): a block or what it repeats
# which operands decide on the common kind; for others, all of them
PROMOTED = {"where": ("self", "other"), "masked_fill": ("self",), "pow": ("self", "exponent")}
