# mypy: ignore-errors
"""Blocks of logits as they are stored; bfloat16 come two in a word, so that two are compared at once.

Dimension key:  K loads in flight   L lanes (threads)   J columns of a lane in each load
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import logits

LEAST = tl.constexpr(-1.0e20)  # in place of -inf if a logit is a factor: 2^LEAST is 0, and 0 * LEAST is 0, not NaN
TWO_LEAST = tl.constexpr(-525475667)  # 0xE0ADE0AD: LEAST as bfloat16, twice


if triton.knobs.runtime.interpret:  # which has no inline assembly

    @triton.jit
    def higher(x, y, NAN: tl.constexpr):
        """The maxima of two words of two bfloat16; NAN: a NaN counts as the highest, otherwise as the lowest."""
        low, high = halves(x)
        low_, high_ = halves(y)
        kept = tl.where((low >= low_) | ((low != low) if NAN else (low_ != low_)), x, y) & 65535
        return kept | (tl.where((high >= high_) | ((high != high) if NAN else (high_ != high_)), x, y) & -65536)

    @triton.jit
    def opaque(x):
        """x itself, but the compiler cannot know that: it computes again what it computed from `x` before."""
        return x

else:

    @triton.jit
    def higher(x, y, NAN: tl.constexpr):
        """The maxima of two words of two bfloat16; NAN: a NaN counts as the highest, otherwise as the lowest."""
        NAME: tl.constexpr = "max.NaN.bf16x2" if NAN else "max.bf16x2"
        return tl.inline_asm_elementwise(NAME + " $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def opaque(x):
        """x itself, but the compiler cannot know that: it computes again what it computed from `x` before."""
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=PACK)


@triton.jit
def take(raw, at, go, stop, MASKED: tl.constexpr, POLICY: tl.constexpr, K: tl.constexpr, PAIRED: tl.constexpr):
    """Load a block as it is stored, K x (L, J); PAIRED: as words of two bfloat16, which take fewer steps to `decode`.

    MASKED: only vectors from `go` to `stop`; the rest reads as -inf.
    """
    x = ()
    for k in tl.static_range(K):
        here = at + k * (at.shape[0] * at.shape[1])
        if PAIRED:
            if MASKED:
                word = tl.load(raw + here, mask=(here >= go // 2) & (here < stop // 2), other=TWO_LEAST)
            else:
                word = tl.load(raw + here, eviction_policy=POLICY)
        else:
            if MASKED:
                word = tl.load(raw + here, mask=(here >= go) & (here < stop), other=-float("inf"))
            else:
                word = tl.load(raw + here, eviction_policy=POLICY)
        x = x + (word,)
    return x


@triton.jit
def halves(x):
    """The two bfloat16 of a word."""
    return (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)


@triton.jit
def decode(
    x, scale, cap, FINITE: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, PAIRED: tl.constexpr
):  # fmt: skip
    """Logits (L, J) from a block as it is stored; FINITE: at least LEAST."""
    WORDS: tl.constexpr = PAIRED and not SCALED and not CAPPED
    if FINITE and WORDS:
        x = higher(x, tl.zeros_like(x) + TWO_LEAST, True)
    if PAIRED:
        even, odd = halves(x)
        x = tl.join(even, odd).reshape(x.shape[0], 2 * x.shape[1])
    z = logits(x, scale, cap, SCALED, CAPPED)
    if FINITE and not WORDS:
        z = finite(z)
    return z


@triton.jit
def finite(z):
    return tl.maximum(z, LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def highest(x):
    """The highest logit of each lane, (L,), from words of two, K x (L, J / 2): two are compared at a time."""
    w = x[0]
    for n in tl.static_range(1, len(x)):
        w = higher(w, x[n], False)
    a, b = tl.split(w.reshape(w.shape[0], w.shape[1] // 2, 2))
    w = higher(a, b, False)
    a, b = tl.split(w)
    even, odd = halves(higher(a, b, False))
    return tl.maximum(even, odd)
