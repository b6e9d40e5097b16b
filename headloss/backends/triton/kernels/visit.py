# mypy: ignore-errors
"""One launch: a row's facts, the loss and its derivative, and the gradient, while the row is in hand.

Dimension key:  K loads in flight   L lanes (threads)   J columns of a lane in each load   F numbers per row   N rows

A program owns a row.  It sweeps the row once for the sums behind the facts, each lane on its own (see sums.py), calls
two printed functions, `VALUES` (sums to facts) and `FN` (facts to losses and coefficients), and sweeps the row again,
backwards, while the end of it is still in the cache, to write the gradient.  `found` (F, N) takes what is known of a
row: its maximum and log_sums, the facts, the terms' values, metrics, and cotangents.  Ignored rows are not read; their
numbers and their gradient are 0.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import LN2, LOG2E, boundary, logits, temperature
from headloss.backends.triton.kernels.row_loops import LOWEST, read, write, zeros


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
    """What a printed function takes: float32, float64, int64 or bool."""
    if x.dtype.is_fp64():
        return x
    elif x.dtype.is_floating():
        return x.to(tl.float32)
    elif x.dtype.is_bool():
        return x
    else:
        return x.to(tl.int64)


@triton.jit
def argument(given, row, count, k, ROWS: tl.constexpr):
    """An input of the printed function: a number, one on the device, one a row, or (ROWS = 2) one an id of the row."""
    if ROWS == 2:
        return as_argument(tl.load(given + row * count + k, mask=k < count, other=0))
    else:
        return as_argument(number(given, row, ROWS >= 0, ROWS == 1))


@triton.jit
def arguments(
    inputs, bases, factors, numbers, row, count, k,
    INPUT_ROWS: tl.constexpr, BASE_KINDS: tl.constexpr, FACTOR_KINDS: tl.constexpr,
):  # fmt: skip
    """What the printed function takes beside facts, and each term's weight of the row."""
    given, weights, seeds, known = (), (), (), ()
    for i in tl.static_range(len(inputs)):
        given = given + (argument(inputs[i], row, count, k, INPUT_ROWS[i]),)
    for i in tl.static_range(len(bases)):
        weights = weights + (number(bases[i], row, BASE_KINDS[i] >= 0, BASE_KINDS[i] == 1).to(tl.float32),)
        factor = number(factors[i], row, FACTOR_KINDS[i] >= 0, False).to(tl.float32)
        seeds = seeds + (weights[i] * factor,)
    for i in tl.static_range(len(numbers)):
        known = known + (number(numbers[i], row, False, False).to(tl.float32),)
    return given, weights, seeds, known


@triton.jit
def plus(a, b, a_, b_):
    return a + a_, b + b_


@triton.jit(
    do_not_specialize=[
        "N", "V", "stride", "lead", "out_stride", "out_lead", "target_stride", "start", "vocab",
    ],
    do_not_specialize_on_alignment=["target", "valid"],
)  # fmt: skip
def visit_kernel(
    raw, out, target, valid, found, best_out, temperatures, inputs, bases, factors, numbers,
    N, V, stride, lead, out_stride, out_lead, target_stride, start, vocab, scale, cap,
    FN: tl.constexpr, VALUES: tl.constexpr, WHOLE: tl.constexpr, USED: tl.constexpr, SLOTS: tl.constexpr,
    TARGET: tl.constexpr, IGNORE: tl.constexpr, VALID: tl.constexpr, GRADIENT: tl.constexpr,
    PICK: tl.constexpr, TOTAL: tl.constexpr, BEST: tl.constexpr,
    WANT_X: tl.constexpr, WANT_Q: tl.constexpr, FINITE: tl.constexpr,
    PER_ROW: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, Y: tl.constexpr, FINITE_OUT: tl.constexpr,
    INPUT_ROWS: tl.constexpr, BASE_KINDS: tl.constexpr, FACTOR_KINDS: tl.constexpr,
    LINE: tl.constexpr, VEC: tl.constexpr, OUT_LINE: tl.constexpr, OUT_VEC: tl.constexpr, RAW_VEC: tl.constexpr,
    SAME: tl.constexpr, EVEN: tl.constexpr, PAIRED: tl.constexpr, K: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
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
        given, weights, seeds, known = arguments(
            inputs, bases, factors, numbers, row, 0, 0, INPUT_ROWS, BASE_KINDS, FACTOR_KINDS
        )
        T, c = (), ()
        for i in tl.static_range(len(temperatures)):
            T = T + (temperature(temperatures[i], row, PER_ROW[i]),)
            c = c + (tl.div_rn(LOG2E, T[i]),)
        column = (wanted - start).to(tl.int32)
        here = (column >= 0) & (column < V)
        picked = tl.zeros([], raw.dtype.element_ty)
        if PICK:
            picked = tl.load(raw + (row * stride + lead + column), mask=here, other=0.0)

        m, top, seen, S, X, Q, total, centre, tail = read(
            raw + begin, skew, skew + V, c, scale, cap,
            TOTAL, BEST, WANT_X, WANT_Q, FINITE, SCALED, CAPPED, LINE, VEC, EVEN, POLICY, PAIRED, K, L, J,
        )  # fmt: skip

        # merge the lanes
        some = top > LOWEST  # else every logit is -inf
        origin = tl.where(some, top, 0.0)
        sums, spreads, squares, origins, offs = (), (), (), (), ()
        for i in tl.static_range(len(c)):
            origin_i = tl.floor(top * c[i])
            off = tl.fma(top, c[i], -origin_i)  # from there to the maximum itself
            d = tl.floor(m * c[i]) - origin_i - off
            k = tl.exp2(d)
            if WANT_X[i]:  # both in one step: lanes wait for each other once
                s, spread = tl.reduce((k * S[i], k * (X[i] + d * S[i])), 0, plus)
                spreads = spreads + (spread * LN2,)
            else:
                s = tl.sum(k * S[i], axis=0)
                spreads = spreads + (0.0,)
            origins = origins + (origin_i,)
            offs = offs + (off,)
            sums = sums + (s,)
            if WANT_Q[i]:
                squares = squares + (tl.sum(k * k * Q[i], axis=0),)
            else:
                squares = squares + (0.0,)
        away = -float("inf")
        if PICK:
            away = tl.where(here, logits(picked, scale, cap, SCALED, CAPPED) - origin, -float("inf"))
        total = total + V.to(tl.float32) * (centre - origin)
        best = tl.zeros([], tl.int64)
        if BEST:
            best = tl.where(some, tl.min(seen, axis=0) + start, start).to(tl.int64)
        most = tl.where(some, top, -float("inf"))
        facts, log_sums = VALUES(most, away, total, best, T, sums, spreads, squares, rows)

        if GRADIENT:
            pulls = FN(facts, given, wanted, known, seeds, rows)[4]
            f = 1.0
            if SCALED:
                f = scale + 0.0
            moves = tl.full([], 0, tl.int1)
            at_target = 0.0
            c_, origin_, k = (), (), ()
            for i in tl.static_range(len(A)):
                over = tl.div_rn(f, T[USED[i]])
                # p = 2^t / s with t measured from `origins`, so that 2^t needs no further constant
                log_s = log_sums[USED[i]] * LOG2E + offs[USED[i]]
                r = tl.exp2(-log_s)
                a, b, e, const = 0.0, 0.0, 0.0, 0.0
                if A[i]:
                    a = pulls[5 * USED[i]] * over
                    moves = moves | (a != 0)
                if B[i]:
                    b = pulls[5 * USED[i] + 1] * over * LN2
                    moves = moves | (b != 0)
                    a = a - b * log_s
                if E[i]:
                    e = pulls[5 * USED[i] + 2] * over
                    moves = moves | (e != 0)
                if C[i]:
                    const = pulls[5 * USED[i] + 3] * over
                    moves = moves | (const != 0)
                if Y[i]:
                    at_y = pulls[5 * USED[i] + 4] * over
                    moves = moves | (at_y != 0)
                    at_target += at_y
                c_ = c_ + (c[USED[i]],)
                origin_ = origin_ + (origins[USED[i]],)
                k = k + (a * r, b * r, e * r * r, const)
            if moves:
                write(
                    raw + tl.multiple_of(row * stride + lead - out_skew, RAW_VEC), out, out_skew, out_skew + V,
                    tail, origin_, c_, k, at_target, picked, column + out_skew, here, scale, cap,
                    A, B, E, C, FINITE_OUT, PICK, SCALED, CAPPED, OUT_LINE, OUT_VEC, SAME, PAIRED and RAW_VEC > 1,
                    K, L, J,
                )  # fmt: skip
            else:
                zeros(out, out_skew, out_skew + V, OUT_VEC, K * L * J)

        # what is known of the row; after the sweep, so that nothing in it waits for a metric
        values, metrics, by_fact, by_input, _unused = FN(facts, given, wanted, known, seeds, rows)
        tl.store(found, origin)
        slot = 1
        for i in tl.static_range(len(log_sums)):
            tl.store(found + slot * step, log_sums[i])
            slot += 1
        for i in tl.static_range(len(WHOLE)):
            if WHOLE[i]:
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
            zeros(out, out_skew, out_skew + V, OUT_VEC, K * L * J)
