# mypy: ignore-errors
"""The two sweeps of a visit over one row: `read` sums it up, `write` puts its gradient in its place, backwards.

Dimension key:  K loads in flight   L lanes (threads)   J columns of a lane in each load   W columns of a stored word

A block is K x (L, J) columns.  Each lane keeps its own partial, so nothing waits for another warp inside a loop; there
are many warps instead, whose loads and exponentials overlap.  The row's last block, which is cut, is read before the
loop and kept for the second sweep.  See logits.py for boundaries and sums.py and pull.py for the algebra.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import logits
from headloss.backends.triton.kernels.packed_bf16 import LEAST, TWO_LEAST, decode, finite, highest, take
from headloss.backends.triton.kernels.pull import slopes

LOWEST = tl.constexpr(-1.0e7)  # at or below is -inf: further down the rounding of z / T alone could overflow


@triton.jit
def absorb(z, top, m, best, block, S, X, Q, c, WANT_X: tl.constexpr, WANT_Q: tl.constexpr, BEST: tl.constexpr):
    """Take a block z, K x (L, J), and its maxima (L,) into the lanes' partials (L,), without a word between lanes.

    As in sums.py, but in each temperature a lane measures from the whole number below m c: t = z c - origin is then one
    operation, and differences of origins are exact.  Where t is a factor, z is finite.
    """
    if BEST:
        best = tl.where(top > m, block, best)  # strictly above: a tie keeps the earlier block
    new = tl.maximum(m, top)
    S_, X_, Q_ = (), (), ()
    for i in tl.static_range(len(c)):
        origin = tl.floor(new * c[i])
        d = tl.floor(m * c[i]) - origin
        k = tl.exp2(d)
        s, x, q = k * S[i], X[i], Q[i]
        if WANT_X[i]:
            x = k * (x + d * S[i])
        if WANT_Q[i]:
            q = k * k * q
        for n in tl.static_range(len(z)):
            t = tl.fma(z[n], c[i] + tl.zeros_like(z[n]), -origin[:, None] + tl.zeros_like(z[n]))
            e = tl.exp2(t)
            s += tl.sum(e, axis=1)
            if WANT_X[i]:
                x += tl.sum(e * t, axis=1)
            if WANT_Q[i]:
                q += tl.sum(e * e, axis=1)
        S_ = S_ + (s,)
        X_ = X_ + (x,)
        Q_ = Q_ + (q,)
    return new, best, S_, X_, Q_


@triton.jit
def gradient(
    z, origin, c, k, cap,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The dense part; `k` has four numbers for each temperature: a, b, e, c over T, as factors of 2^t, not of p.

    Where there is a `b`, z is finite.
    """
    g = tl.zeros_like(z)
    for i in tl.static_range(len(c)):
        if A[i] or B[i] or E[i]:
            t = tl.fma(z, c[i] + tl.zeros_like(z), tl.zeros_like(z) - origin[i])
            u = tl.exp2(t)
            slope = k[4 * i] + 0.0
            if B[i]:
                slope = slope + k[4 * i + 1] * t
            if E[i]:
                slope = slope + k[4 * i + 2] * u
            g += u * slope
        if C[i]:
            g += k[4 * i + 3]
    return slopes(g, z, 1.0, cap, False, CAPPED)


@triton.jit
def inner(skew, end, VEC: tl.constexpr):
    """The vectors that lie whole in a row: from where, and to where."""
    return tl.multiple_of((skew + VEC - 1) // VEC * VEC, VEC), tl.multiple_of(end // VEC * VEC, VEC)


@triton.jit
def rim(low, high, whole_low, whole_high, VEC: tl.constexpr):
    """The row's ragged ends, fewer than VEC columns each: their columns, and which of those are there."""
    v = tl.arange(0, 2 * VEC)
    at = tl.where(v < VEC, whole_low, whole_high) + v - VEC
    before = (at >= low) & (at < high)
    after = (at >= tl.maximum(whole_high, whole_low)) & (at < high)
    return at, tl.where(v < VEC, before, after)


@triton.jit
def zeros(out, skew, end, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """A row of zeros; `out` stands on a boundary."""
    whole_low, whole_high = inner(skew, end, VEC)
    kind = out.dtype.element_ty
    j = tl.arange(0, BLOCK)
    for block in range(0, tl.cdiv(end, BLOCK)):
        at = block * BLOCK + j
        tl.store(out + at, tl.zeros([BLOCK], kind), mask=(at >= whole_low) & (at < whole_high))
    ragged, ends = rim(skew, end, whole_low, whole_high, VEC)
    tl.store(out + ragged, tl.zeros([2 * VEC], kind), mask=ends)


@triton.jit
def blocks(skew, end, LINE: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks that lie whole in a row, from the first to before the last."""
    first = 0
    if LINE > VEC:  # else every row starts on a boundary
        first = (skew > 0).to(tl.int32)
    return first, tl.maximum(end // BLOCK, first)


@triton.jit
def within(at, n: tl.constexpr, low, high):
    """Which columns of load `n` of a block from column `at` (L, J) on are there."""
    here = at + n * (at.shape[0] * at.shape[1])
    return (here >= low) & (here < high)


@triton.jit
def take_in(
    x, at, skew, end, m, best, block, S, X, Q, total, centre, c, scale, cap, MASKED: tl.constexpr, EVEN: tl.constexpr,
    TOTAL: tl.constexpr, BEST: tl.constexpr, WANT_X: tl.constexpr, WANT_Q: tl.constexpr, FINITE: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """A stored block, from column `at` (L, J) on, into the lanes' partials.

    MASKED: some of its columns may not be there.  If no vector is cut (EVEN) those were loaded as -inf.
    """
    CUT: tl.constexpr = MASKED and (SCALED or CAPPED or not EVEN)
    WORDS: tl.constexpr = PAIRED and not (SCALED or CAPPED or CUT)
    z = ()
    if WORDS:
        top = highest(x)
    else:
        top = m
    for n in tl.static_range(len(x)):
        value = decode(x[n], scale, cap, FINITE and not TOTAL, SCALED, CAPPED, PAIRED)
        if TOTAL:  # of all logits as they are
            away = value - centre
            if MASKED:
                away = tl.where(within(at, n, skew, end), away, 0.0)
            total += tl.sum(away, axis=1)
            if FINITE:
                value = finite(value)
        if CUT:
            value = tl.where(within(at, n, skew, end), value, LEAST)
        if not WORDS:
            top = tl.maximum(top, tl.max(value, axis=1))
        z = z + (value,)
    m, best, S, X, Q = absorb(z, top, m, best, block, S, X, Q, c, WANT_X, WANT_Q, BEST)
    return m, best, S, X, Q, total


@triton.jit
def search(
    words, block, holds, top, low, high, go, stop, scale, cap, SKEWED: tl.constexpr, EVEN: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, PAIRED: tl.constexpr, K: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """The first column at which each lane that holds `top` has it in its `block`, (L,); elsewhere beyond all columns.

    Every lane of a row pays for every step of this, so first the load is found, then the column in that one alone.
    """
    BLOCK: tl.constexpr = K * L * J
    W: tl.constexpr = 2 if PAIRED else 1
    CUT: tl.constexpr = SCALED or CAPPED or not EVEN
    WORDS: tl.constexpr = PAIRED and not CUT
    lane, j = tl.arange(0, L), tl.arange(0, J)[None, :]
    at = (block * (BLOCK // W) + lane * (J // W))[:, None] + tl.arange(0, J // W)[None, :]
    load = tl.zeros([L], tl.int32)
    for n in tl.static_range(K - 1, -1, -1):  # backwards: the first one stays
        here = at + n * (L * J // W)
        there = holds[:, None] & (here < stop // W)
        if SKEWED:
            there = there & (here >= go // W)
        if PAIRED:
            x = tl.load(words + here, mask=there, other=TWO_LEAST)
        else:
            x = tl.load(words + here, mask=there, other=-float("inf"))
        if WORDS:
            hit = highest((x,)) == top
        else:
            x = decode(x, scale, cap, False, SCALED, CAPPED, PAIRED)
            if CUT:
                spot = (block * BLOCK + lane * J)[:, None] + j
                x = tl.where(holds[:, None] & within(spot, n, low, high), x, LEAST)
            hit = tl.max(x, axis=1) == top
        if n == K - 1:
            found = x
        else:
            found = tl.where(hit[:, None], x, found)
        load = tl.where(hit, n, load)
    if WORDS:
        found = decode(found, scale, cap, False, SCALED, CAPPED, PAIRED)
    first = tl.min(tl.where(found == top, j, J), axis=1)
    return tl.where(first < J, block * BLOCK + load * (L * J) + lane * J + first, 2147483647)


@triton.jit
def read(
    raw, skew, end, c, scale, cap,
    TOTAL: tl.constexpr, BEST: tl.constexpr, WANT_X: tl.constexpr, WANT_Q: tl.constexpr, FINITE: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, LINE: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr,
    POLICY: tl.constexpr, PAIRED: tl.constexpr, K: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """The first sweep: what each lane has seen of the row, and the row's last block as it is stored."""
    BLOCK: tl.constexpr = K * L * J
    W: tl.constexpr = 2 if PAIRED else 1  # columns of a word
    S, X, Q = (), (), ()
    for _i in tl.static_range(len(c)):
        S = S + (tl.zeros([L], tl.float32),)
        X = X + (tl.zeros([L], tl.float32),)
        Q = Q + (tl.zeros([L], tl.float32),)
    m = tl.full([L], LOWEST, tl.float32)
    best = tl.zeros([L], tl.int32)
    total = tl.zeros([L], tl.float32)
    centre = 0.0
    if TOTAL:  # any logit of the row is near enough to keep the digits of a sum
        centre = logits(tl.load(raw + skew), scale, cap, SCALED, CAPPED)
        centre = tl.where(tl.abs(centre) < -LOWEST, centre, 0.0)
    words = raw
    if PAIRED:
        words = raw.to(tl.pointer_type(tl.int32))
    j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    w = tl.arange(0, L)[:, None] * (J // W) + tl.arange(0, J // W)[None, :]
    first, last = blocks(skew, end, LINE, VEC, BLOCK)
    go = tl.multiple_of(skew // VEC * VEC, VEC)
    stop = tl.multiple_of((end + VEC - 1) // VEC * VEC, VEC)
    # The last block is cut, so it cannot be part of the loop; loaded now, it is there when its turn comes.
    # Whole vectors, masked afterwards: a 16-byte vector with one good element can be read without harm.
    tail = take(words, last * (BLOCK // W) + w, go, stop, True, POLICY, K, PAIRED)
    if LINE > VEC:
        for _head in range(0, first):
            h = take(words, w, go, stop, True, POLICY, K, PAIRED)
            m, best, S, X, Q, total = take_in(
                h, j, skew, end, m, best, 0, S, X, Q, total, centre, c, scale, cap,
                True, False, TOTAL, BEST, WANT_X, WANT_Q, FINITE, SCALED, CAPPED, PAIRED,
            )  # fmt: skip
    for block in tl.range(first, last, num_stages=1):
        x = take(words, block * (BLOCK // W) + w, 0, 0, False, POLICY, K, PAIRED)
        m, best, S, X, Q, total = take_in(
            x, j, skew, end, m, best, block, S, X, Q, total, centre, c, scale, cap,
            False, EVEN, TOTAL, BEST, WANT_X, WANT_Q, FINITE, SCALED, CAPPED, PAIRED,
        )  # fmt: skip
    if end > last * BLOCK:
        m, best, S, X, Q, total = take_in(
            tail, last * BLOCK + j, skew, end, m, best, last, S, X, Q, total, centre, c, scale, cap,
            True, EVEN, TOTAL, BEST, WANT_X, WANT_Q, FINITE, SCALED, CAPPED, PAIRED,
        )  # fmt: skip
    top = tl.max(m, axis=0)
    column = tl.zeros([L], tl.int32)
    if BEST:
        # a lane that holds the maximum knows in which block it first saw it, and reads that one once more
        column = search(
            words, best, m == top, top, skew, end, go, stop, scale, cap, LINE > VEC, EVEN, SCALED, CAPPED, PAIRED,
            K, L, J,
        )  # fmt: skip
    return m, top, column - skew, S, X, Q, tl.sum(total, axis=0), centre, tail


@triton.jit
def emit(
    x, out, at, low, high, origin, c, k, scale, cap, MASKED: tl.constexpr, PAIRED: tl.constexpr, FINITE: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The gradient of a stored block."""
    for n in tl.static_range(len(x)):
        here = at + n * (at.shape[0] * at.shape[1])
        g = gradient(decode(x[n], scale, cap, FINITE, SCALED, CAPPED, PAIRED), origin, c, k, cap, A, B, E, C, CAPPED)
        g = g.to(out.dtype.element_ty)
        if MASKED:
            tl.store(out + here, g, mask=(here >= low) & (here < high), cache_modifier=".cs")
        else:
            tl.store(out + here, g, cache_modifier=".cs")


@triton.jit
def write(
    raw, out, skew, end, tail, origin, c, k, at_target, picked, column, here, scale, cap,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, FINITE: tl.constexpr, PICK: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, LINE: tl.constexpr, VEC: tl.constexpr, SAME: tl.constexpr,
    PAIRED: tl.constexpr, K: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """The second sweep: the gradient of a row, from its end to its beginning; see pull.py."""
    BLOCK: tl.constexpr = K * L * J
    W: tl.constexpr = 2 if PAIRED else 1
    kind = out.dtype.element_ty
    words = raw
    if PAIRED:
        words = raw.to(tl.pointer_type(tl.int32))
    low, high = inner(skew, end, VEC)
    j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    w = tl.arange(0, L)[:, None] * (J // W) + tl.arange(0, J // W)[None, :]
    first, last = blocks(skew, end, LINE, VEC, BLOCK)
    ragged, ends = rim(skew, end, low, high, VEC)
    x_ends = tl.load(raw + ragged, mask=ends, other=0.0)  # early: its latency hides behind the blocks
    tl.debug_barrier()  # every warp has seen what it needs of the row before any may overwrite it
    if not SAME:
        tail = take(words, last * (BLOCK // W) + w, low, high, True, "evict_first", K, PAIRED)
    emit(
        tail, out, last * BLOCK + j, low, high, origin, c, k, scale, cap,
        True, PAIRED, FINITE, A, B, E, C, SCALED, CAPPED,
    )  # fmt: skip
    for back in tl.range(first, last, num_stages=1):
        block = last - 1 + first - back
        x = take(words, block * (BLOCK // W) + w, 0, 0, False, "evict_first", K, PAIRED)
        emit(
            x, out, block * BLOCK + j, 0, 0, origin, c, k, scale, cap, False, PAIRED, FINITE, A, B, E, C, SCALED, CAPPED
        )
    if LINE > VEC:
        for _head in range(0, first):
            h = take(words, w, low, high, True, "evict_first", K, PAIRED)
            emit(h, out, j, low, high, origin, c, k, scale, cap, True, PAIRED, FINITE, A, B, E, C, SCALED, CAPPED)
    if (low > skew) | (high < end):
        z_ends = finite(logits(x_ends, scale, cap, SCALED, CAPPED))
        tl.store(out + ragged, gradient(z_ends, origin, c, k, cap, A, B, E, C, CAPPED).to(kind), mask=ends)
    if PICK:  # noqa: SIM102, known before the kernel runs
        if here:  # one store instead of a comparison for every column
            z_y = finite(logits(picked, scale, cap, SCALED, CAPPED))
            g_y = gradient(z_y, origin, c, k, cap, A, B, E, C, CAPPED) + slopes(at_target, z_y, 1.0, cap, False, CAPPED)
            tl.debug_barrier()
            tl.store(out + column, g_y.to(kind))
