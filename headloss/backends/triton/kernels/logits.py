# mypy: ignore-errors
"""Turns stored values into logits, z = cap tanh(scale raw / cap) in float32, and has what all kernels share.

Rows may start anywhere.  A kernel counts columns from a boundary at or below the row's first element, so its loads are
128 bits wide for any vocabulary, stride and offset:  j = column + skew,  skew <= j < skew + V.  The boundary is that
of a 128-byte line (LINE elements) if rows may start in the middle of a 16-byte vector (VEC elements).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)  # finite, so that (max - new) * 0 is 0 on the first block; logits below count as -inf
FLOOR = tl.constexpr(-1.0e4)  # of an exponent: 2^FLOOR is 0, and 0 * FLOOR is 0 where 0 * -inf would be NaN


@triton.jit
def boundary(row, stride, lead, LINE: tl.constexpr):
    """The boundary before row `row`, a multiple of LINE elements, and how far the row's first element is from it."""
    first = row.to(tl.int64) * stride + lead
    aligned = tl.multiple_of(first // LINE * LINE, LINE)
    return aligned, (first - aligned).to(tl.int32)


@triton.jit
def tanh(x):
    """Right to 2 ulp near 0 too, where 1 - 2 / (e^2x + 1) would cancel."""
    square = x * x
    near = 1.5739e-2 * square - 5.2303e-2
    near = near * square + 1.331525e-1
    near = near * square - 3.3332768e-1
    near = x + x * (square * near)
    far = 1.0 - 2.0 / (1.0 + tl.exp2(tl.abs(x) * 2.0 * LOG2E))
    return tl.where(tl.abs(x) < 0.55, near, tl.where(x < 0, -far, far))


@triton.jit
def logits(raw, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    z = raw.to(tl.float32)
    if SCALED:
        z = z * scale
    if CAPPED:
        z = tanh(z / cap) * cap
    return z


@triton.jit
def temperature(given, row, PER_ROW: tl.constexpr):
    """One temperature, from a number or from a pointer to one value per row."""
    if PER_ROW:
        return tl.load(given + row).to(tl.float32)
    else:
        return (given + tl.zeros([], tl.float32)).to(tl.float32)  # a number may come as float64


@triton.jit
def edges(skew, high, VEC: tl.constexpr):
    """The range of whole vectors that may be read: one with a single element of the row is safe to read."""
    return tl.multiple_of(skew // VEC * VEC, VEC), tl.multiple_of((high + VEC - 1) // VEC * VEC, VEC)


@triton.jit
def inner(skew, end, VEC: tl.constexpr):
    """The range of vectors that lie entirely inside a row."""
    return tl.multiple_of((skew + VEC - 1) // VEC * VEC, VEC), tl.multiple_of(end // VEC * VEC, VEC)


@triton.jit
def rim(low, high, whole_low, whole_high, VEC: tl.constexpr):
    """The row's ragged ends, fewer than VEC columns each: their columns, and which of those exist."""
    v = tl.arange(0, 2 * VEC)
    at = tl.where(v < VEC, whole_low, whole_high) + v - VEC
    before = (at >= low) & (at < high)
    after = (at >= tl.maximum(whole_high, whole_low)) & (at < high)
    return at, tl.where(v < VEC, before, after)
