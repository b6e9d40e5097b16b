# mypy: ignore-errors
"""The two sweeps of a visit over one row: `read` sums it, and `write` writes its gradient, from its end to its start.

Dimension key:  K loads in flight   L lanes (threads)   J columns of a lane in each load   W columns of a stored word

A block is K x (L, J) columns.  Each lane keeps its own partial, so no warp waits for another inside a loop; the loads
and exponentials of many warps overlap instead.  The row's last block, which is partial, is read before the loop and
kept for the second sweep, and so are the KEEP blocks before it.  AHEAD: a block is loaded while the one before it is
summed.  If programs share a row (PARTS), each has only block `part`, and treats it as the last.  See logits.py for
boundaries and sums.py and pull.py for the algebra.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import inner, logits, rim
from headloss.backends.triton.kernels.packed_bf16 import LEAST, TWO_LEAST, decode, finite, highest, opaque, take
from headloss.backends.triton.kernels.pull import slopes
from headloss.backends.triton.kernels.running_sums import absorb, risen
from headloss.backends.triton.kernels.sums import id_column

LOWEST = tl.constexpr(-1.0e7)  # at or below counts as -inf: further down the rounding of z / T alone could overflow


@triton.jit
def gradient(z, origin, c, k, cap, F: tl.constexpr):
    """The gradient, but for what the target adds.  `k` has four numbers per temperature: a, b, e, c over T, as factors
    of 2^t, not of p.  If there is a `b`, z is finite.
    """
    g = tl.zeros_like(z)
    for i in tl.static_range(len(c)):
        if F.A[i] or F.B[i] or F.E[i]:
            t = tl.fma(z, c[i] + tl.zeros_like(z), tl.zeros_like(z) - origin[i])
            u = tl.exp2(t)
            slope = k[4 * i] + 0.0
            if F.B[i]:
                slope = slope + k[4 * i + 1] * t
            if F.E[i]:
                slope = slope + k[4 * i + 2] * u
            g += u * slope
        if F.C[i]:
            g += k[4 * i + 3]
    return slopes(g, z, cap, F.CAPPED)


@triton.jit
def zeros(out, skew, end, part, VEC: tl.constexpr, F: tl.constexpr):
    """Write a row, or a part of one, of zeros; `out` is on a boundary."""
    BLOCK: tl.constexpr = F.K * F.L * F.J
    whole_low, whole_high = inner(skew, end, VEC)
    kind = out.dtype.element_ty
    j = tl.arange(0, BLOCK)
    first, last, _ = of_part(0, tl.cdiv(end, BLOCK), part, F)
    for block in range(first, last):
        at = block * BLOCK + j
        tl.store(out + at, tl.zeros([BLOCK], kind), mask=(at >= whole_low) & (at < whole_high))
    ragged, ends = rim(skew, end, whole_low, whole_high, VEC)
    tl.store(out + ragged, tl.zeros([2 * VEC], kind), mask=ends)


@triton.jit
def blocks(skew, end, LINE: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """The range of blocks that lie entirely inside a row: the first, and one past the last."""
    first = 0
    if LINE > VEC:  # else every row starts on a boundary
        first = (skew > 0).to(tl.int32)
    return first, tl.maximum(end // BLOCK, first)


@triton.jit
def of_part(first, last, part, F: tl.constexpr):
    """The range of blocks that this program has of those from `first` to `last`, and whether it has `last` itself."""
    own = True
    if F.PARTS:
        own = last // F.SPAN == part
        first, last = tl.maximum(first, part * F.SPAN), tl.minimum(last, (part + 1) * F.SPAN)
    return first, last, own


@triton.jit
def within(at, n: tl.constexpr, low, high):
    """Which columns of load `n` of a block, from column `at` (L, J) on, are in the row."""
    here = at + n * (at.shape[0] * at.shape[1])
    return (here >= low) & (here < high)


@triton.jit
def hide_ids(marks, low, high, ids, F: tl.constexpr):
    """Mark the vectors that contain an id, in `marks`, which is all zeros: a word per lane for every 32 loads, a bit
    per load.

    `ids`: a pointer to the row's ids, which are sorted; how many there are; and the offset from an id to its column.
    """
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    IDS: tl.constexpr = F.IDS
    column = id_column(ids, tl.arange(0, IDS))
    here = (column >= low) & (column < high)
    vector = tl.where(here, column, 0).to(tl.int32) // J
    tl.atomic_or(marks + (vector // (32 * L) * L + vector % L), 1 << (vector // L % 32), mask=here, sem="relaxed")


@triton.jit
def load_marks(marks, word, block, F: tl.constexpr):
    """The lanes' words (L,) for a block; new ones are loaded after every 32 loads."""
    L: tl.constexpr = F.L
    if block * F.K % 32 == 0:
        word = tl.load(marks + (block * F.K // 32 * L + tl.arange(0, L)), cache_modifier=".cg")
    return word


@triton.jit
def hidden(word, block, n: tl.constexpr, F: tl.constexpr):
    """Which lanes' vectors of load `n` contain an id, (L, 1), by their words."""
    return ((word >> (block * F.K % 32 + n)) & 1)[:, None] != 0


@triton.jit
def around_ids(raw, low, high, ids, F: tl.constexpr):
    """The columns that share a vector with an id, as stored; which of them are not ids; and where they are.

    A sweep without the ids leaves out their whole vectors: finding each id's column would cost eight times as much.
    """
    IDS: tl.constexpr = F.IDS
    J: tl.constexpr = F.J
    k = tl.arange(0, IDS)
    column, before = id_column(ids, k), id_column(ids, tl.maximum(k, 1) - 1)
    first = (column >= low) & (column < high) & ((k == 0) | (before < low) | (before // J != column // J))
    at = (tl.where(first, column, 0).to(tl.int32) // J * J)[:, None] + tl.arange(0, J)[None, :]
    below = tl.zeros([IDS, J], tl.int32)  # how many ids are, by bisection
    for s in tl.static_range(10):
        if IDS >> (s + 1):
            more = below + (IDS >> (s + 1))
            below = tl.where(id_column(ids, more - 1) < at, more, below)
    good = first[:, None] & (at >= low) & (at < high) & (id_column(ids, below) != at)
    x = tl.load(raw + at, mask=good, other=0.0)
    return x.reshape(IDS * J), good.reshape(IDS * J), (at - low).reshape(IDS * J)


@triton.jit
def take_in(
    x, at, skew, end, m, best, block, sums, total, centre, c, how, word,
    MASKED: tl.constexpr, UNCUT: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Add a stored block, from column `at` (L, J) on, to the lanes' partials; with TAIL, without the vectors that
    contain ids, by the bits of `word` (L,).

    MASKED: some of its columns may not be in the row.  If no vector is cut (UNCUT), those were loaded as -inf.
    """
    CUT: tl.constexpr = MASKED and (F.SCALED or F.CAPPED or not UNCUT)
    HIDE_WORDS: tl.constexpr = F.TAIL and F.PAIRED and not (F.SCALED or F.CAPPED or F.TOTAL)
    WORDS: tl.constexpr = F.PAIRED and not (F.SCALED or F.CAPPED or CUT or (F.TAIL and not HIDE_WORDS))
    if HIDE_WORDS:  # two columns at once
        open_words = ()
        for n in tl.static_range(len(x)):
            open_words = open_words + (tl.where(hidden(word, block, n, F), TWO_LEAST, x[n]),)
        x = open_words
    z = ()
    for n in tl.static_range(len(x)):
        value = decode(x[n], how[0], how[1], F.FINITE and not F.TOTAL, F.SCALED, F.CAPPED, F.PAIRED)
        if F.TOTAL:  # the sum of the logits as they are
            away = value - centre
            if MASKED:
                away = tl.where(within(at, n, skew, end), away, 0.0)
            total += tl.sum(away, axis=1)
            if F.FINITE:
                value = finite(value)
        if CUT:
            value = tl.where(within(at, n, skew, end), value, LEAST)
        z = z + (value,)
    if F.TAIL and not HIDE_WORDS:
        left = ()
        for n in tl.static_range(len(z)):
            left = left + (tl.where(hidden(word, block, n, F), LEAST, z[n]),)
        z = left
    if WORDS:
        top = highest(x)
    else:
        top = m
        for n in tl.static_range(len(z)):
            top = tl.maximum(top, tl.max(z[n], axis=1))
    new, best = risen(top, m, best, block, F.BEST)
    return new, best, absorb(z, z, m, m, new, new, sums, c, c, True, False, F), total


@triton.jit
def search(
    words, block, holds, top, low, high, go, stop, how, SKEWED: tl.constexpr, UNCUT: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, PAIRED: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """For each lane that has `top`, the first column in its `block` with that value, (L,); for others one beyond all
    columns.

    Every lane of a row pays for every step of this, so it first finds the load, and then the column in that load alone.
    """
    K: tl.constexpr = F.K
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    BLOCK: tl.constexpr = K * L * J
    W: tl.constexpr = 2 if PAIRED else 1
    CUT: tl.constexpr = SCALED or CAPPED or not UNCUT
    WORDS: tl.constexpr = PAIRED and not CUT
    lane, j = tl.arange(0, L), tl.arange(0, J)[None, :]
    at = (block * (BLOCK // W) + lane * (J // W))[:, None] + tl.arange(0, J // W)[None, :]
    load = tl.zeros([L], tl.int32)
    for n in tl.static_range(K - 1, -1, -1):  # backwards, so that the first one stays
        here = at + n * (L * J // W)
        mask = holds[:, None] & (here < stop // W)
        if SKEWED:
            mask = mask & (here >= go // W)
        if PAIRED:
            x = tl.load(words + here, mask=mask, other=TWO_LEAST)
        else:
            x = tl.load(words + here, mask=mask, other=-float("inf"))
        if WORDS:
            hit = highest((x,)) == top
        else:
            x = decode(x, how[0], how[1], False, SCALED, CAPPED, PAIRED)
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
        found = decode(found, how[0], how[1], False, SCALED, CAPPED, PAIRED)
    first = tl.min(tl.where(found == top, j, J), axis=1)
    return tl.where(first < J, block * BLOCK + load * (L * J) + lane * J + first, 2147483647)


@triton.jit
def read(raw, skew, end, part, c, how, marks, ids, POLICY: tl.constexpr, F: tl.constexpr):
    """The first sweep: each lane's sums over the row, the blocks that are kept, as stored, the last one first, and the
    results of `around_ids`.

    `how`: scale and cap; `marks`, `ids`: see `hide_ids`.
    """
    K: tl.constexpr = F.K
    KEEP: tl.constexpr = F.KEEP
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    VEC: tl.constexpr = F.VEC
    PAIRED: tl.constexpr = F.PAIRED
    AHEAD: tl.constexpr = F.AHEAD
    BLOCK: tl.constexpr = K * L * J
    W: tl.constexpr = 2 if PAIRED else 1  # columns of a word
    sums = ()
    for _i in tl.static_range(3 * len(c)):
        sums = sums + (tl.zeros([L], tl.float32),)
    m = tl.full([L], LOWEST, tl.float32)
    best = tl.zeros([L], tl.int32)
    total = tl.zeros([L], tl.float32)
    centre = 0.0
    if F.TOTAL:  # any logit of the row is near enough to keep the digits of a sum
        centre = logits(tl.load(raw + skew), how[0], how[1], F.SCALED, F.CAPPED)
        centre = tl.where(tl.abs(centre) < -LOWEST, centre, 0.0)
    words = raw
    if PAIRED:
        words = raw.to(tl.pointer_type(tl.int32))
    j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    w = tl.arange(0, L)[:, None] * (J // W) + tl.arange(0, J // W)[None, :]
    first, last = blocks(skew, end, F.LINE, VEC, BLOCK)
    if F.PARTS:
        first, last = part, part
    go = tl.multiple_of(skew // VEC * VEC, VEC)
    stop = tl.multiple_of((end + VEC - 1) // VEC * VEC, VEC)
    # The last block is partial, so it is not part of the loop; loaded now, it has arrived by the time it is used.
    # Whole vectors, masked afterwards: a 16-byte vector with one element of the row is safe to read.
    tail = take(words, last * (BLOCK // W) + w, go, stop, True, POLICY, K, PAIRED)
    if AHEAD:
        x = take(words, first * (BLOCK // W) + w, go, stop, True, POLICY, K, PAIRED)  # there may be no such block
    word, left = tl.zeros([L], tl.int32), ()
    if F.TAIL:  # while the first columns are being loaded
        hide_ids(marks, skew, end, ids, F)
        left = around_ids(raw, skew, end, ids, F)
        tl.debug_barrier()  # every id is marked
        word = load_marks(marks, word, 0, F)
    if F.LINE > VEC:
        for _head in range(0, first):
            h = take(words, w, go, stop, True, POLICY, K, PAIRED)
            m, best, sums, total = take_in(
                h, j, skew, end, m, best, 0, sums, total, centre, c, how, word, True, False, F
            )
    for block in tl.range(first, last - KEEP, num_stages=1):
        if AHEAD:
            following = take(words, tl.minimum(block + 1, last - 1) * (BLOCK // W) + w, 0, 0, False, POLICY, K, PAIRED)
        else:
            x = take(words, block * (BLOCK // W) + w, 0, 0, False, POLICY, K, PAIRED)
        if F.TAIL:
            word = load_marks(marks, word, block, F)
        m, best, sums, total = take_in(
            x, block * BLOCK + j, skew, end, m, best, block, sums, total, centre, c, how, word, False, F.UNCUT, F
        )
        if AHEAD:
            x = following
    kept = ()
    for n in tl.static_range(KEEP):
        block = last - KEEP + n
        x = take(words, block * (BLOCK // W) + w, 0, 0, False, "evict_first", K, PAIRED)
        m, best, sums, total = take_in(
            x, block * BLOCK + j, skew, end, m, best, block, sums, total, centre, c, how, word, False, F.UNCUT, F
        )
        kept = kept + x
    if end > last * BLOCK:
        if F.TAIL:
            word = load_marks(marks, word, last, F)
        m, best, sums, total = take_in(
            tail, last * BLOCK + j, skew, end, m, best, last, sums, total, centre, c, how, word, True, F.UNCUT, F
        )
    top = tl.max(m, axis=0)
    column = tl.zeros([L], tl.int32)
    if F.BEST:
        # a lane that has the maximum knows in which block it found it first, and reads that block again
        column = search(
            words, best, m == top, top, skew, end, go, stop, how,
            F.LINE > VEC, F.UNCUT, F.SCALED, F.CAPPED, PAIRED, F,
        )  # fmt: skip
    return m, top, column - skew, sums, tl.sum(total, axis=0), centre, tail + kept, left


@triton.jit
def emit(x, out, at, low, high, origin, c, k, how, MASKED: tl.constexpr, PAIRED: tl.constexpr, F: tl.constexpr):
    """Write the gradient of a stored block."""
    for n in tl.static_range(len(x)):
        here = at + n * (at.shape[0] * at.shape[1])
        z = decode(x[n], how[0], how[1], F.FINITE_OUT, F.SCALED, F.CAPPED, PAIRED)
        g = gradient(z, origin, c, k, how[1], F).to(out.dtype.element_ty)
        if MASKED:
            tl.store(out + here, g, mask=(here >= low) & (here < high), cache_modifier=".cs")
        else:
            tl.store(out + here, g, cache_modifier=".cs")


@triton.jit
def kept_block(kept, n: tl.constexpr, K: tl.constexpr):
    """Block `n` of those that were kept, to be decoded again: decoded, it would take twice the registers."""
    x = ()
    for i in tl.static_range(K):
        x = x + (opaque(kept[n * K + i]),)
    return x


@triton.jit
def write(raw, out, skew, end, part, kept, origin, c, k, at_target, picked, column, here, how, F: tl.constexpr):
    """The second sweep: write the gradient of a row, from its end to its start; see pull.py."""
    K: tl.constexpr = F.K
    KEEP: tl.constexpr = F.KEEP
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    VEC: tl.constexpr = F.OUT_VEC
    PAIRED: tl.constexpr = F.PAIRED and F.RAW_VEC > 1
    BLOCK: tl.constexpr = K * L * J
    W: tl.constexpr = 2 if PAIRED else 1
    kind = out.dtype.element_ty
    words = raw
    if PAIRED:
        words = raw.to(tl.pointer_type(tl.int32))
    low, high = inner(skew, end, VEC)
    j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    w = tl.arange(0, L)[:, None] * (J // W) + tl.arange(0, J // W)[None, :]
    first, last = blocks(skew, end, F.OUT_LINE, VEC, BLOCK)
    if F.PARTS:
        first, last = part, part
    ragged, ends = rim(skew, end, low, high, VEC)
    x_ends = tl.load(raw + ragged, mask=ends, other=0.0)  # early: its latency hides behind the blocks
    tl.debug_barrier()  # every warp has read what it needs of the row before any may overwrite it
    if F.SAME:
        tail = kept_block(kept, 0, K)
    else:
        tail = take(words, last * (BLOCK // W) + w, low, high, True, "evict_first", K, PAIRED)
    emit(tail, out, last * BLOCK + j, low, high, origin, c, k, how, True, PAIRED, F)
    for n in tl.static_range(KEEP):
        x = kept_block(kept, KEEP - n, K)
        emit(x, out, (last - 1 - n) * BLOCK + j, 0, 0, origin, c, k, how, False, PAIRED, F)
    for back in tl.range(first, last - KEEP, num_stages=1):
        block = last - KEEP - 1 + first - back
        x = take(words, block * (BLOCK // W) + w, 0, 0, False, "evict_first", K, PAIRED)
        emit(x, out, block * BLOCK + j, 0, 0, origin, c, k, how, False, PAIRED, F)
    if F.OUT_LINE > VEC:
        for _head in range(0, first):
            h = take(words, w, low, high, True, "evict_first", K, PAIRED)
            emit(h, out, j, low, high, origin, c, k, how, True, PAIRED, F)
    if (low > skew) | (high < end):
        z_ends = finite(logits(x_ends, how[0], how[1], F.SCALED, F.CAPPED))
        tl.store(out + ragged, gradient(z_ends, origin, c, k, how[1], F).to(kind), mask=ends)
    if F.PICK:  # noqa: SIM102, known before the kernel runs
        if here:  # one store instead of a comparison for every column
            z_y = finite(logits(picked, how[0], how[1], F.SCALED, F.CAPPED))
            g_y = gradient(z_y, origin, c, k, how[1], F) + slopes(at_target, z_y, how[1], F.CAPPED)
            tl.debug_barrier()
            tl.store(out + column, g_y.to(kind))
