# mypy: ignore-errors
"""The sweeps of a visit over a row and its dense teacher's: `read_pair` sums both, `divergence_pair` sums divergences
that need both softmaxes, and `write_pair` writes the gradient, from the row's end to its start.

Dimension key:  K loads in flight   L lanes (threads)   J columns of a lane in each load   W columns of a stored word

Like row_loops.py, with the sums of both rows (running_sums.py): x of the student and y of the teacher, each relative to
its own origin.  If programs share a row (PARTS), each sweeps SPAN blocks of it.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import LN2, edges, inner, logits, rim
from headloss.backends.triton.kernels.packed_bf16 import LEAST, decode, finite, highest, take
from headloss.backends.triton.kernels.pull import slopes
from headloss.backends.triton.kernels.row_loops import LOWEST, blocks, of_part, search, within
from headloss.backends.triton.kernels.running_sums import absorb, risen


@triton.jit
def take_pair(z, u, top, topt, m, mt, best, bestt, block, sums, c, ct, F: tl.constexpr):
    """Add a block of both rows, K x (L, J), with its maxima (L,), to the lanes' sums (L,)."""
    new, best = risen(top, m, best, block, F.BEST)
    newt, bestt = risen(topt, mt, bestt, block, F.TEACHER_BEST)
    return new, newt, best, bestt, absorb(z, u, m, mt, new, newt, sums, c, ct, True, True, F)


@triton.jit
def pair(
    words, teacher_words, block, w, wt, bounds,
    MASKED: tl.constexpr, POLICY: tl.constexpr, W: tl.constexpr, WT: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Load a block of both rows as stored; `w`, `wt`: the words of each lane.  The cache should keep the student's, and
    both of a part."""
    K: tl.constexpr = F.K
    THEIRS: tl.constexpr = POLICY if F.PARTS else "evict_first"
    BLOCK: tl.constexpr = K * F.L * F.J
    x = take(words, block * (BLOCK // W) + w, bounds[0], bounds[1], MASKED, POLICY, K, W == 2)
    y = take(teacher_words, block * (BLOCK // WT) + wt, bounds[2], bounds[3], MASKED, THEIRS, K, WT == 2)
    return x, y


@triton.jit
def words_of(raw, teacher, PAIRED: tl.constexpr, TEACHER_PAIRED: tl.constexpr, F: tl.constexpr):
    """Both rows as words, of two if paired; each lane's columns in a load (L, J), and its words in both rows."""
    J: tl.constexpr = F.J
    W: tl.constexpr = 2 if PAIRED else 1
    WT: tl.constexpr = 2 if TEACHER_PAIRED else 1
    words, teacher_words = raw, teacher
    if PAIRED:
        words = raw.to(tl.pointer_type(tl.int32))
    if TEACHER_PAIRED:
        teacher_words = teacher.to(tl.pointer_type(tl.int32))
    lane = tl.arange(0, F.L)[:, None]
    w, wt = lane * (J // W) + tl.arange(0, J // W)[None, :], lane * (J // WT) + tl.arange(0, J // WT)[None, :]
    return words, teacher_words, lane * J + tl.arange(0, J)[None, :], w, wt


@triton.jit
def top_of(x, z, WORDS: tl.constexpr):
    """The highest of each lane (L,), of a block of logits z, or of the words x that it was made of."""
    if WORDS:
        top = highest(x)
    else:
        top = tl.max(z[0], axis=1)
        for n in tl.static_range(1, len(z)):
            top = tl.maximum(top, tl.max(z[n], axis=1))
    return top


@triton.jit
def values(x, y, at, skew, end, how, total, centre, MASKED: tl.constexpr, F: tl.constexpr):
    """Logits and maxima of a stored block of both rows, from column `at` (L, J) on, and the running total."""
    CUT: tl.constexpr = MASKED
    WORDS: tl.constexpr = F.PAIRED and not (F.SCALED or F.CAPPED or CUT)
    TEACHER_WORDS: tl.constexpr = F.TEACHER_PAIRED and not (F.TEACHER_SCALED or F.TEACHER_CAPPED or CUT)
    z, u = (), ()
    for n in tl.static_range(len(x)):
        value = decode(x[n], how[0], how[1], F.FINITE and not F.TOTAL, F.SCALED, F.CAPPED, F.PAIRED)
        other = decode(y[n], how[2], how[3], F.TEACHER_FINITE, F.TEACHER_SCALED, F.TEACHER_CAPPED, F.TEACHER_PAIRED)
        if F.TOTAL:  # the sum of the logits as they are
            away = value - centre
            if MASKED:
                away = tl.where(within(at, n, skew, end), away, 0.0)
            total += tl.sum(away, axis=1)
            if F.FINITE:
                value = finite(value)
        if CUT:
            good = within(at, n, skew, end)
            value, other = tl.where(good, value, LEAST), tl.where(good, other, LEAST)
        z = z + (value,)
        u = u + (other,)
    return z, u, top_of(x, z, WORDS), top_of(y, u, TEACHER_WORDS), total


@triton.jit
def read_pair(raw, teacher, skew, end, part, c, ct, how, POLICY: tl.constexpr, F: tl.constexpr):
    """The first sweep: each lane's sums over both rows.  `how`: scale and cap, then the teacher's scale and cap."""
    K: tl.constexpr = F.K
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    W: tl.constexpr = 2 if F.PAIRED else 1
    WT: tl.constexpr = 2 if F.TEACHER_PAIRED else 1
    BLOCK: tl.constexpr = K * L * J
    sums = ()
    for _i in tl.static_range(9 * len(c)):
        sums = sums + (tl.zeros([L], tl.float32),)
    m, mt = tl.full([L], LOWEST, tl.float32), tl.full([L], LOWEST, tl.float32)
    best, bestt = tl.zeros([L], tl.int32), tl.zeros([L], tl.int32)
    total = tl.zeros([L], tl.float32)
    centre = 0.0
    if F.TOTAL:
        centre = logits(tl.load(raw + skew), how[0], how[1], F.SCALED, F.CAPPED)
        centre = tl.where(tl.abs(centre) < -LOWEST, centre, 0.0)
    words, teacher_words, j, w, wt = words_of(raw, teacher, F.PAIRED, F.TEACHER_PAIRED, F)
    first, last = blocks(skew, end, F.LINE, F.VEC, BLOCK)
    bounds = edges(skew, end, F.VEC) + edges(skew, end, F.TEACHER_VEC)
    low, high, own = of_part(first, last, part, F)
    for block in tl.range(low, high, num_stages=1):
        x, y = pair(words, teacher_words, block, w, wt, bounds, False, POLICY, W, WT, F)
        z, u, top, topt, total = values(x, y, block * BLOCK + j, skew, end, how, total, centre, False, F)
        m, mt, best, bestt, sums = take_pair(z, u, top, topt, m, mt, best, bestt, block, sums, c, ct, F)
    # the first block if partial, and the last
    for edge in range(1 - first, 1 + (own & (end > last * BLOCK)).to(tl.int32)):
        block = tl.where(edge == 0, 0, last)
        x, y = pair(words, teacher_words, block, w, wt, bounds, True, POLICY, W, WT, F)
        z, u, top, topt, total = values(x, y, block * BLOCK + j, skew, end, how, total, centre, True, F)
        m, mt, best, bestt, sums = take_pair(z, u, top, topt, m, mt, best, bestt, block, sums, c, ct, F)
    column, columnt = tl.zeros([L], tl.int32), tl.zeros([L], tl.int32)
    if F.BEST:
        top = tl.max(m, axis=0)
        column = search(
            words, best, m == top, top, skew, end, bounds[0], bounds[1], how,
            F.LINE > F.VEC, False, F.SCALED, F.CAPPED, F.PAIRED, F,
        )  # fmt: skip
    if F.TEACHER_BEST:
        topt = tl.max(mt, axis=0)
        columnt = search(
            teacher_words, bestt, mt == topt, topt, skew, end, bounds[2], bounds[3], (how[2], how[3]),
            True, False, F.TEACHER_SCALED, F.TEACHER_CAPPED, F.TEACHER_PAIRED, F,
        )  # fmt: skip
    return m, mt, column - skew, columnt - skew, sums, tl.sum(total, axis=0), centre


@triton.jit
def log_probs_of(z, u, k, AT: tl.constexpr):
    """log p, log q, p and q at one temperature, whose numbers begin at index AT of `k`."""
    t = tl.fma(z, k[AT] + tl.zeros_like(z), k[AT + 1] + tl.zeros_like(z))
    r = tl.fma(u, k[AT + 2] + tl.zeros_like(u), k[AT + 3] + tl.zeros_like(u))
    log_p, log_q = tl.maximum(t * LN2 - k[AT + 5], k[AT + 6]), tl.maximum(r * LN2 - k[AT + 7], k[AT + 8])
    return log_p, log_q, tl.exp2(t) * k[AT + 9], tl.exp2(r) * k[AT + 10]


@triton.jit
def divergences_of(z, u, k, numbers, DIVERGENCE: tl.constexpr, F: tl.constexpr):
    """The results of DIVERGENCE, which takes log p and log q at each temperature of the comparison, in nats and never
    below the floor, then p and q, then its numbers.  `k` as in `gradient_pair`."""
    logs, each = (), ()
    for n in tl.static_range(len(F.COMPARED_AT)):
        log_p, log_q, p, q = log_probs_of(z, u, k, 11 * F.COMPARED_AT[n])
        logs, each = logs + (log_p, log_q), each + (p, q)
    return DIVERGENCE(*logs, *each, *numbers)


@triton.jit
def add_divergences(
    x, y, at, skew, end, sums, k, numbers, how, MASKED: tl.constexpr, DIVERGENCE: tl.constexpr, F: tl.constexpr
):  # fmt: skip
    """Add a stored block of both rows, from column `at` (L, J) on, to the lanes' sums.  MASKED: some of its columns may
    not be in the row."""
    DIVERGENCE_SUMS: tl.constexpr = F.DIVERGENCE_SUMS
    for n in tl.static_range(len(x)):
        z = decode(x[n], how[0], how[1], False, F.SCALED, F.CAPPED, F.PAIRED)
        u = decode(y[n], how[2], how[3], False, F.TEACHER_SCALED, F.TEACHER_CAPPED, F.TEACHER_PAIRED)
        good = tl.full([F.L, F.J], True, tl.int1)
        if MASKED:
            good = within(at, n, skew, end)
            z, u = tl.where(good, z, 0.0), tl.where(good, u, 0.0)
        found = divergences_of(z, u, k, numbers, DIVERGENCE, F)
        more = ()
        for i in tl.static_range(DIVERGENCE_SUMS):
            # some results are one number for all columns; to add zeros of a block would cost an operation per column
            more = more + (sums[i] + tl.sum(tl.where(good, found[i], 0.0), axis=1),)
        sums = more
    return sums


@triton.jit
def divergence_pair(
    raw, teacher, skew, end, part, k, numbers, how, POLICY: tl.constexpr, DIVERGENCE: tl.constexpr, F: tl.constexpr
):  # fmt: skip
    """The sums of DIVERGENCE's results; `k` as in `gradient_pair`."""
    K: tl.constexpr = F.K
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    W: tl.constexpr = 2 if F.PAIRED else 1
    WT: tl.constexpr = 2 if F.TEACHER_PAIRED else 1
    DIVERGENCE_SUMS: tl.constexpr = F.DIVERGENCE_SUMS
    BLOCK: tl.constexpr = K * L * J
    sums = ()
    for _ in tl.static_range(DIVERGENCE_SUMS):
        sums = sums + (tl.zeros([L], tl.float32),)
    words, teacher_words, j, w, wt = words_of(raw, teacher, F.PAIRED, F.TEACHER_PAIRED, F)
    first, last = blocks(skew, end, F.LINE, F.VEC, BLOCK)
    bounds = edges(skew, end, F.VEC) + edges(skew, end, F.TEACHER_VEC)
    low, high, own = of_part(first, last, part, F)
    for edge in range(1 - first, 1 + (own & (end > last * BLOCK)).to(tl.int32)):
        block = tl.where(edge == 0, 0, last)
        x, y = pair(words, teacher_words, block, w, wt, bounds, True, POLICY, W, WT, F)
        sums = add_divergences(x, y, block * BLOCK + j, skew, end, sums, k, numbers, how, True, DIVERGENCE, F)
    for back in tl.range(low, high, num_stages=1):  # backwards: the end of the row is still in the cache
        block = high - 1 + low - back
        x, y = pair(words, teacher_words, block, w, wt, bounds, False, POLICY, W, WT, F)
        sums = add_divergences(x, y, block * BLOCK + j, skew, end, sums, k, numbers, how, False, DIVERGENCE, F)
    whole = ()
    for i in tl.static_range(DIVERGENCE_SUMS):
        whole = whole + (tl.sum(sums[i], axis=0),)
    return whole


@triton.jit
def gradient_pair(z, u, k, pulls, numbers, cap, DIVERGENCE: tl.constexpr, F: tl.constexpr):
    """The gradient, but for what the target adds.  `k` has eleven numbers per temperature: c and -origin of both rows,
    with t = z c - origin; the least of the teacher's t; log S and the least log p, log St and the least log q, in nats;
    1 / S and 1 / St.  `pulls` has six per temperature, divided by T: the coefficients of 2^t, t 2^t, 2^2t, 1, t' 2^t
    and 2^t', where t' is the teacher's t; and then one for each divergence that pulls.

    If t is a factor, z is finite.
    """
    g = tl.zeros_like(z)
    for i in tl.static_range(len(F.COMPARED)):
        if F.A[i] or F.B[i] or F.E[i] or F.TC[i]:
            t = tl.fma(z, k[11 * i] + tl.zeros_like(z), k[11 * i + 1] + tl.zeros_like(z))
            e = tl.exp2(t)
            slope = pulls[6 * i] + 0.0
            if F.B[i]:
                slope = slope + pulls[6 * i + 1] * t
            if F.E[i]:
                slope = slope + pulls[6 * i + 2] * e
        if F.TC[i] or F.TD[i]:
            r = tl.fma(u, k[11 * i + 2] + tl.zeros_like(u), k[11 * i + 3] + tl.zeros_like(u))
            if F.TC[i]:
                slope = slope + pulls[6 * i + 4] * tl.maximum(r, k[11 * i + 4])
            if F.TD[i]:
                g += pulls[6 * i + 5] * tl.exp2(r)
        if F.A[i] or F.B[i] or F.E[i] or F.TC[i]:
            g += e * slope
        if F.C[i]:
            g += pulls[6 * i + 3]
    if len(F.PULLED) > 0:
        found = divergences_of(z, u, k, numbers, DIVERGENCE, F)
        for n in tl.static_range(len(F.PULLED)):
            g += pulls[6 * len(F.COMPARED) + n] * found[2 * F.PULLED[n] + 1]
    return slopes(g, z, cap, F.CAPPED)


@triton.jit
def emit_pair(
    x, y, out, at, low, high, k, pulls, numbers, how,
    MASKED: tl.constexpr, PAIRED: tl.constexpr, TEACHER_PAIRED: tl.constexpr, DIVERGENCE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a stored block."""
    for n in tl.static_range(len(x)):
        here = at + n * (at.shape[0] * at.shape[1])
        z = decode(x[n], how[0], how[1], F.FINITE_OUT, F.SCALED, F.CAPPED, PAIRED)
        u = decode(y[n], how[2], how[3], False, F.TEACHER_SCALED, F.TEACHER_CAPPED, TEACHER_PAIRED)
        g = gradient_pair(z, u, k, pulls, numbers, how[1], DIVERGENCE, F).to(out.dtype.element_ty)
        if MASKED:
            tl.store(out + here, g, mask=(here >= low) & (here < high), cache_modifier=".cs")
        else:
            tl.store(out + here, g, cache_modifier=".cs")


@triton.jit
def write_pair(
    raw, teacher, out, skew, end, part, k, pulls, numbers, at_target, picked, column, how,
    DIVERGENCE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """The last sweep: write the gradient of a row, from its end to its start.  `picked`: the values at the target's
    `column` in both rows, and whether there is such a column."""
    K: tl.constexpr = F.K
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    VEC: tl.constexpr = F.OUT_VEC
    PAIRED: tl.constexpr = F.PAIRED and F.RAW_VEC > 1
    TEACHER_PAIRED: tl.constexpr = F.TEACHER_PAIRED and F.OUT_TEACHER_VEC > 1
    W: tl.constexpr = 2 if PAIRED else 1
    WT: tl.constexpr = 2 if TEACHER_PAIRED else 1
    BLOCK: tl.constexpr = K * L * J
    kind = out.dtype.element_ty
    words, teacher_words, j, w, wt = words_of(raw, teacher, PAIRED, TEACHER_PAIRED, F)
    low, high = inner(skew, end, VEC)
    first, last = blocks(skew, end, F.OUT_LINE, VEC, BLOCK)
    ragged, ends = rim(skew, end, low, high, VEC)
    x_ends, y_ends = tl.load(raw + ragged, mask=ends, other=0.0), tl.load(teacher + ragged, mask=ends, other=0.0)
    bounds = (low, high, low, high)
    tl.debug_barrier()  # every warp has read what it needs of the row before any may overwrite it
    start, stop, own = of_part(first, last, part, F)
    for edge in range(1 - first, 1 + (own & (high > last * BLOCK)).to(tl.int32)):
        block = tl.where(edge == 0, 0, last)
        x, y = pair(words, teacher_words, block, w, wt, bounds, True, "evict_first", W, WT, F)
        emit_pair(
            x, y, out, block * BLOCK + j, low, high, k, pulls, numbers, how, True, PAIRED, TEACHER_PAIRED, DIVERGENCE, F
        )
    for back in tl.range(start, stop, num_stages=1):
        block = stop - 1 + start - back
        x, y = pair(words, teacher_words, block, w, wt, bounds, False, "evict_first", W, WT, F)
        emit_pair(
            x, y, out, block * BLOCK + j, 0, 0, k, pulls, numbers, how, False, PAIRED, TEACHER_PAIRED, DIVERGENCE, F
        )
    if (low > skew) | (high < end):
        z = finite(logits(x_ends, how[0], how[1], F.SCALED, F.CAPPED))
        u = logits(y_ends, how[2], how[3], F.TEACHER_SCALED, F.TEACHER_CAPPED)
        tl.store(out + ragged, gradient_pair(z, u, k, pulls, numbers, how[1], DIVERGENCE, F).to(kind), mask=ends)
    if F.PICK:  # noqa: SIM102, known before the kernel runs
        if picked[2]:  # one store instead of a comparison for every column
            z = finite(logits(picked[0], how[0], how[1], F.SCALED, F.CAPPED))
            u = logits(picked[1], how[2], how[3], F.TEACHER_SCALED, F.TEACHER_CAPPED)
            g = gradient_pair(z, u, k, pulls, numbers, how[1], DIVERGENCE, F) + slopes(at_target, z, how[1], F.CAPPED)
            tl.debug_barrier()
            tl.store(out + column, g.to(kind))
