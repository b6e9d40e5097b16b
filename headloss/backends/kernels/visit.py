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
def as_float(x):
    return x.to(tl.float32)


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


@triton.jit(
    do_not_specialize=[
        "N", "V", "stride", "lead", "out_stride", "out_lead", "target_stride", "start", "vocab",
    ],
    do_not_specialize_on_alignment=["target", "valid"],
)  # fmt: skip
def visit_kernel(
    raw, out, target, valid, found, best_out, temperatures, inputs, bases, factors, numbers,
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
    BLOCK: tl.constexpr = K * L * J
    row = tl.program_id(0).to(tl.int64)
    begin, skew = boundary(row, stride, lead, LINE)
    above = raw
    raw += begin
    end = skew + V
    found += row
    step = N.to(tl.int64)
    POLICY: tl.constexpr = "evict_last" if GRADIENT else "evict_first"
    if GRADIENT:
        out_begin, out_skew = boundary(row, out_stride, out_lead, OUT_LINE)
        out += out_begin
        out_end = out_skew + V

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
        given, weights, seeds, c, T = (), (), (), (), ()
        S, X, Q = (), (), ()
        for i in tl.static_range(len(inputs)):
            given = given + (as_argument(number(inputs[i], row, INPUT_ROWS[i] >= 0, INPUT_ROWS[i] == 1)),)
        for i in tl.static_range(len(bases)):
            weights = weights + (as_float(number(bases[i], row, BASE_KINDS[i] >= 0, BASE_KINDS[i] == 1)),)
            factor = as_float(number(factors[i], row, FACTOR_KINDS[i] >= 0, False))
            seeds = seeds + (weights[i] * factor,)
        for i in tl.static_range(len(temperatures)):
            T = T + (temperature(temperatures[i], row, PER_ROW[i]),)
            c = c + (tl.div_rn(LOG2E, T[i]),)
            S = S + (tl.zeros([L], tl.float32),)
            X = X + (tl.zeros([L], tl.float32),)
            Q = Q + (tl.zeros([L], tl.float32),)
        known = ()
        for i in tl.static_range(len(numbers)):
            known = known + (as_float(number(numbers[i], row, False, False)),)
        column = (wanted - start + skew).to(tl.int32)
        here = (column >= skew) & (column < end)
        picked = tl.zeros([], raw.dtype.element_ty)
        if PICK:
            picked = tl.load(raw + column, mask=here, other=0.0)

        # the first sweep
        m = tl.full([L], LOWEST, tl.float32)
        best = tl.zeros([L], tl.int32)
        total = tl.zeros([L], tl.float32)
        centre = 0.0
        if TOTAL:  # any logit of the row is near enough to keep the digits of a sum
            centre = logits(tl.load(raw + skew), scale, cap, SCALED, CAPPED)
            centre = tl.where(tl.abs(centre) < -LOWEST, centre, 0.0)
        j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
        head = (skew > 0).to(tl.int32)
        first = head
        last = tl.maximum(end // BLOCK, first)
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
        for edge in range(1 - head, 1 + (end > last * BLOCK).to(tl.int32)):
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

        # merge the lanes, and finish as facts.finish does
        top = tl.max(m, axis=0)
        some = top > LOWEST  # else every logit is -inf
        origin = tl.where(some, top, 0.0)
        argmax = tl.zeros([], tl.int64)
        if BEST:
            # every lane that holds the maximum knows in which load it first saw it; the lowest column is in the lowest
            load = tl.min(tl.where(m == top, best, 2147483647), axis=0)
            at = tl.where(some, load, 0) * (L * J) + j
            (x,) = take(raw, at, go, stop, True, POLICY, 1)
            value = logits(x, scale, cap, SCALED, CAPPED)
            match = (at >= skew) & (at < end) & (value == top)
            seen = tl.min(tl.min(tl.where(match, at, 2147483647), axis=1), axis=0)
            argmax = (tl.where(some, seen, skew) - skew + start).to(tl.int64)
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
        mean = 0.0
        if TOTAL:
            mean = tl.sum(total, axis=0) + V.to(tl.float32) * (centre - origin)
        facts = ()
        for i in tl.static_range(len(NAMES)):
            t = PLACES[i]
            if NAMES[i] == LSE:
                facts = facts + (tl.div_rn(tl.where(some, top, -float("inf")), T[t]) + log_sums[t],)
            elif NAMES[i] == LOGPROB:
                facts = facts + (tl.div_rn(away, T[t]) - log_sums[t],)
            elif NAMES[i] == MEAN_LOGPROB:
                facts = facts + (tl.div_rn(tl.div_rn(mean, T[t]), vocab.to(tl.float32)) - log_sums[t],)
            elif NAMES[i] == ENTROPY:
                facts = facts + (log_sums[t] - tl.div_rn(spreads[t], sums[t]),)
            elif NAMES[i] == SUM_P2:
                facts = facts + (tl.div_rn(squares[t], sums[t] * sums[t]),)
            elif NAMES[i] == MAX_LOGPROB:
                facts = facts + (-log_sums[t],)
            else:
                facts = facts + (argmax,)

        if GRADIENT:
            _, _, _, _, pulls = FN(facts, given, wanted, known, seeds, vocab.to(tl.float32))
            f = 1.0
            if SCALED:
                f = scale + 0.0
            moves = tl.full([], 0, tl.int1)
            at_target = 0.0
            c_, log_, k = (), (), ()
            for i in tl.static_range(len(A)):
                t = USED[i]
                over = tl.div_rn(f, T[t])
                a, b, e, const = 0.0, 0.0, 0.0, 0.0
                if A[i]:
                    a = pulls[5 * t] * over
                    moves = moves | (a != 0)
                if B[i]:
                    b = pulls[5 * t + 1] * over * LN2
                    moves = moves | (b != 0)
                if E[i]:
                    e = pulls[5 * t + 2] * over
                    moves = moves | (e != 0)
                if C[i]:
                    const = pulls[5 * t + 3] * over
                    moves = moves | (const != 0)
                if Y[i]:
                    y = pulls[5 * t + 4] * over
                    moves = moves | (y != 0)
                    at_target += y
                c_ = c_ + (c[t],)
                log_ = log_ + (log_sums[t] * LOG2E,)
                k = k + (a, b, e, const)

            # the second sweep, on the output's boundaries
            kind = out.dtype.element_ty
            again = above + tl.multiple_of(row * stride + lead - out_skew, RAW_VEC)
            whole_low, whole_high = inner(out_skew, out_end, OUT_VEC)
            if moves:
                q = tl.arange(0, PULL_BLOCK)
                pull_head = (whole_low > 0).to(tl.int32)
                pull_last = tl.maximum(whole_high // PULL_BLOCK, pull_head)
                ragged, ends = rim(out_skew, out_end, whole_low, whole_high, OUT_VEC)
                cut = (whole_low > out_skew) | (whole_high < out_end)
                x_ends = tl.load(again + ragged, mask=ends, other=0.0)
                tl.debug_barrier()  # every warp has seen what it needs of the row before any may overwrite it
                for edge in range(1 - pull_head, 1 + (whole_high > pull_last * PULL_BLOCK).to(tl.int32)):
                    at = tl.where(edge == 0, 0, pull_last) * PULL_BLOCK + q
                    whole = (at >= whole_low) & (at < whole_high)
                    x = tl.load(again + at, mask=whole, other=0.0)
                    g, _ = gradient(x, origin, log_, c_, k, scale, cap, A, B, E, C, SCALED, CAPPED)
                    tl.store(out + at, g.to(kind), mask=whole)
                for step_back in tl.range(pull_head, pull_last, num_stages=PULL_STAGES):
                    at = (pull_last - 1 + pull_head - step_back) * PULL_BLOCK + q
                    x = tl.load(again + at, eviction_policy="evict_first")
                    g, _ = gradient(x, origin, log_, c_, k, scale, cap, A, B, E, C, SCALED, CAPPED)
                    tl.store(out + at, g.to(kind), cache_modifier=".cs")
                if cut:
                    g, _ = gradient(x_ends, origin, log_, c_, k, scale, cap, A, B, E, C, SCALED, CAPPED)
                    tl.store(out + ragged, g.to(kind), mask=ends)
                if PICK:  # noqa: SIM102, known before the kernel runs
                    if here:  # one store instead of a comparison for every column
                        g, z_y = gradient(picked, origin, log_, c_, k, scale, cap, A, B, E, C, SCALED, CAPPED)
                        g += slopes(at_target, z_y, scale, cap, SCALED, CAPPED)
                        tl.debug_barrier()
                        tl.store(out + (column - skew + out_skew), g.to(kind))
            else:
                zeros(out, out_skew, out_end, OUT_VEC, PULL_BLOCK)

        # what is known of the row; after the sweep, so that nothing in it waits for a metric
        values, metrics, by_fact, by_input, _ = FN(facts, given, wanted, known, seeds, vocab.to(tl.float32))
        tl.store(found, origin)
        for i in tl.static_range(len(log_sums)):
            tl.store(found + (1 + i) * step, log_sums[i])
        slot = 1 + len(log_sums)
        for i in tl.static_range(len(NAMES)):
            if NAMES[i] == ARGMAX:
                tl.store(best_out + row, argmax)
            else:
                tl.store(found + slot * step, facts[i])
                slot += 1
        for i in tl.static_range(len(values)):
            tl.store(found + slot * step, values[i] * weights[i])
            slot += 1
        for i in tl.static_range(len(metrics)):
            tl.store(found + slot * step, metrics[i])
            slot += 1
        for i in tl.static_range(len(by_fact)):
            tl.store(found + slot * step, by_fact[i])
            slot += 1
        for i in tl.static_range(len(by_input)):
            tl.store(found + slot * step, by_input[i])
            slot += 1
    else:
        for i in tl.static_range(SLOTS):
            tl.store(found + i * step, 0.0)
        if BEST:
            tl.store(best_out + row, tl.zeros([], tl.int64))
        if GRADIENT:
            zeros(out, out_skew, out_end, OUT_VEC, PULL_BLOCK)
