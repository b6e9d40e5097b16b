# mypy: ignore-errors
"""One launch: a row's facts, the loss and its derivative, and the gradient, while the row is in hand.

Dimension key:  K loads in flight   L lanes (threads)   J columns of a lane in each load   F numbers a row   N rows

A program owns a row.  It sweeps the row once for the sums behind the facts, each lane on its own (see sums.py), calls
the printed function `FN` between the sweeps, and sweeps the row again, backwards, while the end of it is still in the
cache, to write the gradient.  `found` (F, N) takes what is known of a row: its maximum and log_sums, the facts, the
terms' values, metrics, and cotangents.  Ignored rows are not read; their numbers and their gradient are 0.
"""

import triton
import triton.language as tl

from headloss.backends.kernels.logits import LN2, LOG2E, LOWEST, boundary, logits, temperature
from headloss.backends.kernels.pull import gradient, slopes
from headloss.backends.kernels.sums import absorb

LSE = tl.constexpr(0)
LOGPROB = tl.constexpr(1)
MEAN_LOGPROB = tl.constexpr(2)
ENTROPY = tl.constexpr(3)
SUM_P2 = tl.constexpr(4)
MAX_LOGPROB = tl.constexpr(5)
ARGMAX = tl.constexpr(6)


@triton.jit
def take(raw, at, go, stop, MASKED: tl.constexpr, POLICY: tl.constexpr, K: tl.constexpr):
    """A block as it is stored, K x (L, J): see sums.fetch."""
    x = ()
    for k in tl.static_range(K):
        here = at + k * (at.shape[0] * at.shape[1])
        if MASKED:
            x = x + (tl.load(raw + here, mask=(here >= go) & (here < stop), other=0.0),)
        else:
            x = x + (tl.load(raw + here, eviction_policy=POLICY),)
    return x


@triton.jit
def number(given, row, POINTER: tl.constexpr, PER_ROW: tl.constexpr):
    """A number of a row: given as such, as one on the device, or as one a row."""
    if PER_ROW:
        return tl.load(given + row)
    elif POINTER:
        return tl.load(given)
    else:
        return given + tl.zeros([], tl.float32)


@triton.jit
def as_argument(x):
    """What a printed function takes: float32, int64 or bool."""
    if x.dtype.is_floating():
        return x.to(tl.float32)
    elif x.dtype.is_bool():
        return x
    else:
        return x.to(tl.int64)


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
def ahead(raw, at, some, POLICY: tl.constexpr, K: tl.constexpr):
    """A block that may not be there."""
    x = ()
    for k in tl.static_range(K):
        here = at + k * (at.shape[0] * at.shape[1])
        x = x + (tl.load(raw + here, mask=(here >= 0) & some, eviction_policy=POLICY),)
    return x


@triton.jit
def read(
    raw, skew, end, c, scale, cap,
    TOTAL: tl.constexpr, BEST: tl.constexpr, WANT_X: tl.constexpr, WANT_Q: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, VEC: tl.constexpr, POLICY: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The first sweep: what each lane has seen of the row, as in sums.py."""
    BLOCK: tl.constexpr = K * L * J
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
    j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    first = (skew > 0).to(tl.int32)
    last = tl.maximum(end // BLOCK, first)
    if STAGES == 0:  # the next block is under way, in registers, while this one is summed
        x = ahead(raw, first * BLOCK + j, first < last, POLICY, K)
        for block in range(first, last):
            following = ahead(raw, (block + 1) * BLOCK + j, block + 1 < last, POLICY, K)
            z = ()
            for n in tl.static_range(K):
                z = z + (logits(x[n], scale, cap, SCALED, CAPPED),)
                if TOTAL:
                    total += tl.sum(z[n] - centre, axis=1)
            m, best, S, X, Q = absorb(z, m, best, block, S, X, Q, c, WANT_X, WANT_Q, BEST)
            x = following
    else:
        for block in tl.range(first, last, num_stages=STAGES):
            x = take(raw, block * BLOCK + j, 0, 0, False, POLICY, K)
            z = ()
            for n in tl.static_range(K):
                z = z + (logits(x[n], scale, cap, SCALED, CAPPED),)
                if TOTAL:
                    total += tl.sum(z[n] - centre, axis=1)
            m, best, S, X, Q = absorb(z, m, best, block, S, X, Q, c, WANT_X, WANT_Q, BEST)
    go = tl.multiple_of(skew // VEC * VEC, VEC)
    stop = tl.multiple_of((end + VEC - 1) // VEC * VEC, VEC)
    for edge in range(1 - first, 1 + (end > last * BLOCK).to(tl.int32)):  # the row's first block if cut, and its last
        block = tl.where(edge == 0, 0, last)
        # whole vectors, masked afterwards: a 16-byte vector with one good element can be read without harm
        x = take(raw, block * BLOCK + j, go, stop, True, POLICY, K)
        z = ()
        for n in tl.static_range(K):
            at = block * BLOCK + n * (L * J) + j
            good = (at >= skew) & (at < end)
            value = logits(x[n], scale, cap, SCALED, CAPPED)
            if TOTAL:
                total += tl.sum(tl.where(good, value - centre, 0.0), axis=1)
            z = z + (tl.where(good, value, -float("inf")),)
        m, best, S, X, Q = absorb(z, m, best, block, S, X, Q, c, WANT_X, WANT_Q, BEST)
    top = tl.max(m, axis=0)
    argmax = tl.zeros([], tl.int32)
    if BEST:
        # every lane that holds the maximum knows in which load it first saw it; the lowest column is in the lowest
        load = tl.min(tl.where(m == top, best, 2147483647), axis=0)
        spot = tl.where(top > LOWEST, load, 0) * (L * J) + j
        (there,) = take(raw, spot, go, stop, True, POLICY, 1)
        match = (spot >= skew) & (spot < end) & (logits(there, scale, cap, SCALED, CAPPED) == top)
        seen = tl.min(tl.min(tl.where(match, spot, 2147483647), axis=1), axis=0)
        argmax = tl.where(top > LOWEST, seen - skew, 0)
    return m, top, argmax, S, X, Q, tl.sum(total, axis=0), centre


@triton.jit
def write(
    raw, out, skew, end, m, log_sum, c, k, at_target, picked, column, here, scale, cap,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, PICK: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The second sweep: the gradient of a row, from its end to its beginning; see pull.py."""
    kind = out.dtype.element_ty
    low, high = inner(skew, end, VEC)
    q = tl.arange(0, BLOCK)
    first = (low > 0).to(tl.int32)
    last = tl.maximum(high // BLOCK, first)
    ragged, ends = rim(skew, end, low, high, VEC)
    x_ends = tl.load(raw + ragged, mask=ends, other=0.0)  # early: its latency hides behind the blocks
    tl.debug_barrier()  # every warp has seen what it needs of the row before any may overwrite it
    for edge in range(1 - first, 1 + (high > last * BLOCK).to(tl.int32)):
        at = tl.where(edge == 0, 0, last) * BLOCK + q
        whole = (at >= low) & (at < high)
        x = tl.load(raw + at, mask=whole, other=0.0)
        g, _ = gradient(x, m, log_sum, c, k, scale, cap, A, B, E, C, SCALED, CAPPED)
        tl.store(out + at, g.to(kind), mask=whole)
    if STAGES == 0:
        x = tl.load(raw + ((last - 1) * BLOCK + q), mask=(q >= 0) & (last > first), eviction_policy="evict_first")
        for back in range(first, last):
            at = (last - 1 + first - back) * BLOCK + q
            following = tl.load(raw + (at - BLOCK), mask=(q >= 0) & (back + 1 < last), eviction_policy="evict_first")
            g, _ = gradient(x, m, log_sum, c, k, scale, cap, A, B, E, C, SCALED, CAPPED)
            tl.store(out + at, g.to(kind), cache_modifier=".cs")
            x = following
    else:
        for back in tl.range(first, last, num_stages=STAGES):
            at = (last - 1 + first - back) * BLOCK + q
            x = tl.load(raw + at, eviction_policy="evict_first")
            g, _ = gradient(x, m, log_sum, c, k, scale, cap, A, B, E, C, SCALED, CAPPED)
            tl.store(out + at, g.to(kind), cache_modifier=".cs")
    if (low > skew) | (high < end):
        g, _ = gradient(x_ends, m, log_sum, c, k, scale, cap, A, B, E, C, SCALED, CAPPED)
        tl.store(out + ragged, g.to(kind), mask=ends)
    if PICK:  # noqa: SIM102, known before the kernel runs
        if here:  # one store instead of a comparison for every column
            g, z = gradient(picked, m, log_sum, c, k, scale, cap, A, B, E, C, SCALED, CAPPED)
            g += slopes(at_target, z, scale, cap, SCALED, CAPPED)
            tl.debug_barrier()
            tl.store(out + column, g.to(kind))


@triton.jit
def visit_row(
    row, raw, out, target, valid, found, best_out, temperatures, inputs, bases, factors, numbers,
    N, V, stride, lead, out_stride, out_lead, target_stride, start, vocab, scale, cap,
    FN: tl.constexpr, NAMES: tl.constexpr, PLACES: tl.constexpr, USED: tl.constexpr, SLOTS: tl.constexpr,
    TARGET: tl.constexpr, IGNORE: tl.constexpr, VALID: tl.constexpr, GRADIENT: tl.constexpr,
    PICK: tl.constexpr, TOTAL: tl.constexpr, BEST: tl.constexpr,
    WANT_X: tl.constexpr, WANT_Q: tl.constexpr, PER_ROW: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, Y: tl.constexpr,
    INPUT_ROWS: tl.constexpr, BASE_KINDS: tl.constexpr, FACTOR_KINDS: tl.constexpr,
    LINE: tl.constexpr, VEC: tl.constexpr, OUT_LINE: tl.constexpr, OUT_VEC: tl.constexpr, RAW_VEC: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
    PULL_BLOCK: tl.constexpr, PULL_STAGES: tl.constexpr,
):  # fmt: skip
    POLICY: tl.constexpr = "evict_last" if GRADIENT else "evict_first"
    begin, skew = boundary(row, stride, lead, LINE)
    out_skew = 0
    if GRADIENT:
        out_begin, out_skew = boundary(row, out_stride, out_lead, OUT_LINE)
        out += out_begin
    found += row
    step = N.to(tl.int64)
    rows = vocab.to(tl.float32)

    live = tl.full([], 1, tl.int1)
    wanted = tl.zeros([], tl.int64)
    if TARGET:
        wanted = tl.load(target + row * target_stride).to(tl.int64)
    if IGNORE:
        live = live & (wanted != -100)
    if VALID:
        live = live & (tl.load(valid + row) != 0)

    if live:
        # everything a row needs is on its way before the sweep
        given, weights, seeds, known, T, c = (), (), (), (), (), ()
        for i in tl.static_range(len(inputs)):
            given = given + (as_argument(number(inputs[i], row, INPUT_ROWS[i] >= 0, INPUT_ROWS[i] == 1)),)
        for i in tl.static_range(len(bases)):
            weights = weights + (number(bases[i], row, BASE_KINDS[i] >= 0, BASE_KINDS[i] == 1).to(tl.float32),)
            factor = number(factors[i], row, FACTOR_KINDS[i] >= 0, False).to(tl.float32)
            seeds = seeds + (weights[i] * factor,)
        for i in tl.static_range(len(numbers)):
            known = known + (number(numbers[i], row, False, False).to(tl.float32),)
        for i in tl.static_range(len(temperatures)):
            T = T + (temperature(temperatures[i], row, PER_ROW[i]),)
            c = c + (tl.div_rn(LOG2E, T[i]),)
        column = (wanted - start).to(tl.int32)
        here = (column >= 0) & (column < V)
        picked = tl.zeros([], raw.dtype.element_ty)
        if PICK:
            picked = tl.load(raw + (row * stride + lead + column), mask=here, other=0.0)

        m, top, argmax, S, X, Q, total, centre = read(
            raw + begin, skew, skew + V, c, scale, cap,
            TOTAL, BEST, WANT_X, WANT_Q, SCALED, CAPPED, VEC, POLICY, K, L, J, STAGES,
        )  # fmt: skip

        # merge the lanes, and finish as facts.finish does
        some = top > LOWEST  # else every logit is -inf
        origin = tl.where(some, top, 0.0)
        sums, log_sums, spreads, squares = (), (), (), ()
        for i in tl.static_range(len(c)):
            d = (m - top) * c[i]
            k = tl.exp2(d)
            s = tl.sum(k * S[i], axis=0)
            s = tl.where(s == 0, 1.0, s)
            sums = sums + (s,)
            log_sums = log_sums + (tl.log(s),)
            if WANT_X[i]:
                spreads = spreads + (tl.sum(k * (X[i] + d * S[i]), axis=0) * LN2,)
            else:
                spreads = spreads + (0.0,)
            if WANT_Q[i]:
                squares = squares + (tl.sum(k * k * Q[i], axis=0),)
            else:
                squares = squares + (0.0,)
        away = -float("inf")
        if PICK:
            away = tl.where(here, logits(picked, scale, cap, SCALED, CAPPED) - origin, -float("inf"))
        facts = ()
        for i in tl.static_range(len(NAMES)):
            if NAMES[i] == LSE:
                value = tl.div_rn(tl.where(some, top, -float("inf")), T[PLACES[i]]) + log_sums[PLACES[i]]
            elif NAMES[i] == LOGPROB:
                value = tl.div_rn(away, T[PLACES[i]]) - log_sums[PLACES[i]]
            elif NAMES[i] == MEAN_LOGPROB:
                value = total + V.to(tl.float32) * (centre - origin)
                value = tl.div_rn(tl.div_rn(value, T[PLACES[i]]), rows) - log_sums[PLACES[i]]
            elif NAMES[i] == ENTROPY:
                value = log_sums[PLACES[i]] - tl.div_rn(spreads[PLACES[i]], sums[PLACES[i]])
            elif NAMES[i] == SUM_P2:
                value = tl.div_rn(squares[PLACES[i]], sums[PLACES[i]] * sums[PLACES[i]])
            elif NAMES[i] == MAX_LOGPROB:
                value = -log_sums[PLACES[i]]
            else:
                value = (argmax + start).to(tl.int64)
            facts = facts + (value,)

        if GRADIENT:
            pulls = FN(facts, given, wanted, known, seeds, rows)[4]
            f = 1.0
            if SCALED:
                f = scale + 0.0
            moves = tl.full([], 0, tl.int1)
            at_target = 0.0
            c_, log_sum, k = (), (), ()
            for i in tl.static_range(len(A)):
                over = tl.div_rn(f, T[USED[i]])
                a, b, e, const = 0.0, 0.0, 0.0, 0.0
                if A[i]:
                    a = pulls[5 * USED[i]] * over
                    moves = moves | (a != 0)
                if B[i]:
                    b = pulls[5 * USED[i] + 1] * over * LN2
                    moves = moves | (b != 0)
                if E[i]:
                    e = pulls[5 * USED[i] + 2] * over
                    moves = moves | (e != 0)
                if C[i]:
                    const = pulls[5 * USED[i] + 3] * over
                    moves = moves | (const != 0)
                if Y[i]:
                    y = pulls[5 * USED[i] + 4] * over
                    moves = moves | (y != 0)
                    at_target += y
                c_ = c_ + (c[USED[i]],)
                log_sum = log_sum + (log_sums[USED[i]] * LOG2E,)
                k = k + (a, b, e, const)
            if moves:
                write(
                    raw + tl.multiple_of(row * stride + lead - out_skew, RAW_VEC), out, out_skew, out_skew + V,
                    origin, log_sum, c_, k, at_target, picked, column + out_skew, here, scale, cap,
                    A, B, E, C, PICK, SCALED, CAPPED, OUT_VEC, PULL_BLOCK, PULL_STAGES,
                )  # fmt: skip
            else:
                zeros(out, out_skew, out_skew + V, OUT_VEC, PULL_BLOCK)

        # what is known of the row; after the sweep, so that nothing in it waits for a metric
        values, metrics, by_fact, by_input, _unused = FN(facts, given, wanted, known, seeds, rows)
        tl.store(found, origin)
        slot = 1
        for i in tl.static_range(len(log_sums)):
            tl.store(found + slot * step, log_sums[i])
            slot += 1
        for i in tl.static_range(len(NAMES)):
            if NAMES[i] == ARGMAX:
                tl.store(best_out + row, facts[i])
            else:
                tl.store(found + slot * step, facts[i])
                slot += 1
        for i in tl.static_range(len(values)):
            tl.store(found + slot * step, values[i] * weights[i])
            slot += 1
        rest = metrics + by_fact + by_input
        for i in tl.static_range(len(rest)):
            tl.store(found + slot * step, rest[i])
            slot += 1
    else:
        for i in tl.static_range(SLOTS):
            tl.store(found + i * step, 0.0)
        if BEST:
            tl.store(best_out + row, tl.zeros([], tl.int64))
        if GRADIENT:
            zeros(out, out_skew, out_skew + V, OUT_VEC, PULL_BLOCK)


@triton.jit(
    do_not_specialize=[
        "N", "programs", "V", "stride", "lead", "out_stride", "out_lead", "target_stride", "start", "vocab",
    ],
    do_not_specialize_on_alignment=["target", "valid"],
)  # fmt: skip
def visit_kernel(
    raw, out, target, valid, found, best_out, temperatures, inputs, bases, factors, numbers,
    N, programs, V, stride, lead, out_stride, out_lead, target_stride, start, vocab, scale, cap,
    FN: tl.constexpr, NAMES: tl.constexpr, PLACES: tl.constexpr, USED: tl.constexpr, SLOTS: tl.constexpr,
    TARGET: tl.constexpr, IGNORE: tl.constexpr, VALID: tl.constexpr, GRADIENT: tl.constexpr,
    PICK: tl.constexpr, TOTAL: tl.constexpr, BEST: tl.constexpr,
    WANT_X: tl.constexpr, WANT_Q: tl.constexpr, PER_ROW: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, Y: tl.constexpr,
    INPUT_ROWS: tl.constexpr, BASE_KINDS: tl.constexpr, FACTOR_KINDS: tl.constexpr,
    LINE: tl.constexpr, VEC: tl.constexpr, OUT_LINE: tl.constexpr, OUT_VEC: tl.constexpr, RAW_VEC: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
    PULL_BLOCK: tl.constexpr, PULL_STAGES: tl.constexpr,
):  # fmt: skip
    """Row after row; with as many programs as rows, one each."""
    for row in range(tl.program_id(0), N, programs):
        visit_row(
            row + tl.zeros([], tl.int64), raw, out, target, valid, found, best_out,
            temperatures, inputs, bases, factors, numbers,
            N, V, stride, lead, out_stride, out_lead, target_stride, start, vocab, scale, cap,
            FN, NAMES, PLACES, USED, SLOTS, TARGET, IGNORE, VALID, GRADIENT, PICK, TOTAL, BEST, WANT_X, WANT_Q,
            PER_ROW, SCALED, CAPPED, A, B, E, C, Y, INPUT_ROWS, BASE_KINDS, FACTOR_KINDS,
            LINE, VEC, OUT_LINE, OUT_VEC, RAW_VEC, K, L, J, STAGES, PULL_BLOCK, PULL_STAGES,
        )  # fmt: skip
