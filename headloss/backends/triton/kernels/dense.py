# mypy: ignore-errors
"""The facts sweep with a dense teacher: both rows are read together, and every lane keeps both partials.

Dimension key:  K loads in flight   L lanes (threads)   J columns of a lane in each load   P parts   N rows

The algebra is that of `teachers.merge_teacher` in base 2, x of the student and y of the teacher, each from its own
maximum.  When the maxima move by d and d',

    St = 2^d' St + sum 2^y      Y = 2^d' (Y + d' St) + sum y 2^y      F = 2^d' (F + d (St - D)) + sum x 2^y

and G, E are F, D with the two exchanged.  D is the teacher's weight on columns that the student rules out.  They count
as x = FLOOR from the maximum of the whole row, which is known at the end only, so they are kept next to F until then.

A program sweeps one part of one row, over the columns that both have.  Numbers go to `out` (F, P, N): the student's
maximum, total and its count, argmax, the teacher's maximum, argmax, then for each temperature S, X, Q and, where the
two meet, St, Y, F with D, G with E, without those not wanted.  `meeting.py` makes one part of all.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import LN2, LOG2E, LOWEST, boundary, logits, temperature
from headloss.backends.triton.kernels.sums import fetch

NATS = tl.constexpr(-1.0e4)  # how unlikely a column can count: `teachers.FLOOR`, in nats
BITS = tl.constexpr(-1.0e4 * 1.4426950408889634)


@triton.jit
def higher(z, m, best, block, ARGMAX: tl.constexpr):
    """The lanes' maxima (L,) with a block z, K x (L, J), and in which load they were first seen."""
    for n in tl.static_range(len(z)):
        top = tl.max(z[n], axis=1)
        if ARGMAX:
            best = tl.where(top > m, block * len(z) + n, best)
        m = tl.maximum(m, top)
    return m, best


@triton.jit
def rebase(F, D, weight, d, LEAST: tl.constexpr):
    """sum x w after its maximum moved by d; columns so far below that they are ruled out now join those that were."""
    gone = d < LEAST
    return tl.where(gone, 0.0, F + d * (weight - D)), tl.where(gone, weight, D)


@triton.jit
def absorb_both(
    z, u, m, mt, best, bestt, block, S, X, Q, St, Y, F, D, G, E, c, ct,
    MET: tl.constexpr, WANT_X: tl.constexpr, WANT_Q: tl.constexpr, WANT_Y: tl.constexpr, WANT_F: tl.constexpr,
    WANT_G: tl.constexpr, ARGMAX: tl.constexpr, ARGMAXT: tl.constexpr,
):  # fmt: skip
    """Take a block of both, K x (L, J), into the lanes' partials (L,); every reduction here is within a thread."""
    new, best = higher(z, m, best, block, ARGMAX)
    newt, bestt = higher(u, mt, bestt, block, ARGMAXT)
    S_, X_, Q_, St_, Y_, F_, D_, G_, E_ = (), (), (), (), (), (), (), (), ()
    for i in tl.static_range(len(c)):
        d = (m - new) * c[i]
        dt = (mt - newt) * ct[i]
        k, kt = tl.exp2(d), tl.exp2(dt)
        s, x, q, st, y, f, lost, g, lostt = k * S[i], X[i], Q[i], kt * St[i], Y[i], F[i], D[i], G[i], E[i]
        if WANT_X[i]:
            x = k * (x + d * S[i])
        if WANT_Q[i]:
            q = k * k * q
        if WANT_Y[i]:
            y = kt * (y + dt * St[i])
        if WANT_F[i]:
            f, lost = rebase(f, lost, St[i], d, BITS)
            f, lost = kt * f, kt * lost
        if WANT_G[i]:
            g, lostt = rebase(g, lostt, S[i], dt, BITS)
            g, lostt = k * g, k * lostt
        for n in tl.static_range(len(z)):
            t = (z[n] - new[:, None]) * c[i]
            e = tl.exp2(t)
            s += tl.sum(e, axis=1)
            if WANT_X[i]:
                x += tl.sum(e * tl.maximum(t, BITS), axis=1)
            if WANT_Q[i]:
                q += tl.sum(e * e, axis=1)
            if MET[i]:
                r = (u[n] - newt[:, None]) * ct[i]
                w = tl.exp2(r)
                st += tl.sum(w, axis=1)
                if WANT_Y[i]:
                    y += tl.sum(w * tl.maximum(r, BITS), axis=1)
                if WANT_F[i]:
                    fine = t > BITS
                    f += tl.sum(w * tl.where(fine, t, 0.0), axis=1)
                    lost += tl.sum(tl.where(fine, 0.0, w), axis=1)
                if WANT_G[i]:
                    fine = r > BITS
                    g += tl.sum(e * tl.where(fine, r, 0.0), axis=1)
                    lostt += tl.sum(tl.where(fine, 0.0, e), axis=1)
        S_ = S_ + (s,)
        X_ = X_ + (x,)
        Q_ = Q_ + (q,)
        St_ = St_ + (st,)
        Y_ = Y_ + (y,)
        F_ = F_ + (f,)
        D_ = D_ + (lost,)
        G_ = G_ + (g,)
        E_ = E_ + (lostt,)
    return new, newt, best, bestt, S_, X_, Q_, St_, Y_, F_, D_, G_, E_


@triton.jit
def column_of(m, best, raw, j, skew, high, go, stop, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """The lowest column that holds the lanes' maximum: it is in the lowest of the loads where they saw it."""
    top = tl.max(m, axis=0)
    load = tl.min(tl.where(m == top, best, 2147483647), axis=0)
    at = tl.where(top > LOWEST, load, 0) * (j.shape[0] * j.shape[1]) + j
    (x,) = fetch(raw, at, go, stop, True, 1, "evict_first")
    match = (at >= skew) & (at < high) & (logits(x, scale, cap, SCALED, CAPPED) == top)
    return tl.min(tl.min(tl.where(match, at, 2147483647), axis=1), axis=0)


@triton.jit
def edges(skew, high, VEC: tl.constexpr):
    """From where to where whole vectors may be read: one with a single good element can be, without harm."""
    return tl.multiple_of(skew // VEC * VEC, VEC), tl.multiple_of((high + VEC - 1) // VEC * VEC, VEC)


@triton.jit
def read_both(
    raw, teacher, skew, low, high, c, ct, scale, cap, teacher_scale, teacher_cap,
    TOTAL: tl.constexpr, ARGMAX: tl.constexpr, ARGMAXT: tl.constexpr, MET: tl.constexpr,
    WANT_X: tl.constexpr, WANT_Q: tl.constexpr, WANT_Y: tl.constexpr, WANT_F: tl.constexpr, WANT_G: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, TEACHER_SCALED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    VEC: tl.constexpr, TEACHER_VEC: tl.constexpr, POLICY: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """What each lane has seen of the columns from `low` to `high` of both rows."""
    BLOCK: tl.constexpr = K * L * J
    S, X, Q, St, Y, F, D, G, E = (), (), (), (), (), (), (), (), ()
    for _i in tl.static_range(len(c)):
        S = S + (tl.zeros([L], tl.float32),)
        X = X + (tl.zeros([L], tl.float32),)
        Q = Q + (tl.zeros([L], tl.float32),)
        St = St + (tl.zeros([L], tl.float32),)
        Y = Y + (tl.zeros([L], tl.float32),)
        F = F + (tl.zeros([L], tl.float32),)
        D = D + (tl.zeros([L], tl.float32),)
        G = G + (tl.zeros([L], tl.float32),)
        E = E + (tl.zeros([L], tl.float32),)
    m = tl.full([L], LOWEST, tl.float32)
    mt = tl.full([L], LOWEST, tl.float32)
    best = tl.zeros([L], tl.int32)
    bestt = tl.zeros([L], tl.int32)
    total = tl.zeros([L], tl.float32)
    centre = 0.0
    if TOTAL:  # any logit of the row is near enough to keep the digits of a sum
        centre = logits(tl.load(raw + tl.maximum(low, skew), mask=low < high, other=0.0), scale, cap, SCALED, CAPPED)
        centre = tl.where(tl.abs(centre) < -LOWEST, centre, 0.0)

    j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    head = (low < skew).to(tl.int32)
    first = low // BLOCK + head
    last = tl.maximum(high // BLOCK, first)
    for block in range(first, last):
        x = fetch(raw, block * BLOCK + j, 0, 0, False, K, POLICY)
        y = fetch(teacher, block * BLOCK + j, 0, 0, False, K, POLICY)
        z, u = (), ()
        for n in tl.static_range(K):
            z = z + (logits(x[n], scale, cap, SCALED, CAPPED),)
            u = u + (logits(y[n], teacher_scale, teacher_cap, TEACHER_SCALED, TEACHER_CAPPED),)
            if TOTAL:
                total += tl.sum(z[n] - centre, axis=1)
        m, mt, best, bestt, S, X, Q, St, Y, F, D, G, E = absorb_both(
            z, u, m, mt, best, bestt, block, S, X, Q, St, Y, F, D, G, E, c, ct,
            MET, WANT_X, WANT_Q, WANT_Y, WANT_F, WANT_G, ARGMAX, ARGMAXT,
        )  # fmt: skip
    go, stop = edges(skew, high, VEC)
    got, stopt = edges(skew, high, TEACHER_VEC)
    for edge in range(1 - head, 1 + (high > last * BLOCK).to(tl.int32)):  # the row's first block if cut, and its last
        block = tl.where(edge == 0, 0, last)
        x = fetch(raw, block * BLOCK + j, go, stop, True, K, "evict_first")
        y = fetch(teacher, block * BLOCK + j, got, stopt, True, K, "evict_first")
        z, u = (), ()
        for n in tl.static_range(K):
            at = block * BLOCK + n * (L * J) + j
            good = (at >= skew) & (at < high)
            value = logits(x[n], scale, cap, SCALED, CAPPED)
            if TOTAL:
                total += tl.sum(tl.where(good, value - centre, 0.0), axis=1)
            z = z + (tl.where(good, value, -float("inf")),)
            value = logits(y[n], teacher_scale, teacher_cap, TEACHER_SCALED, TEACHER_CAPPED)
            u = u + (tl.where(good, value, -float("inf")),)
        m, mt, best, bestt, S, X, Q, St, Y, F, D, G, E = absorb_both(
            z, u, m, mt, best, bestt, block, S, X, Q, St, Y, F, D, G, E, c, ct,
            MET, WANT_X, WANT_Q, WANT_Y, WANT_F, WANT_G, ARGMAX, ARGMAXT,
        )  # fmt: skip
    return m, mt, best, bestt, S, X, Q, St, Y, F, D, G, E, tl.sum(total, axis=0), centre


@triton.jit(
    do_not_specialize=["N", "V", "parts", "width", "stride", "lead", "teacher_stride", "teacher_lead", "start"],
)
def dense_sums_kernel(
    raw, teacher, out, temperatures, teacher_temperatures,
    N, V, parts, width, stride, lead, teacher_stride, teacher_lead, start, scale, cap, teacher_scale, teacher_cap,
    TOTAL: tl.constexpr, ARGMAX: tl.constexpr, ARGMAXT: tl.constexpr, MET: tl.constexpr,
    WANT_X: tl.constexpr, WANT_Q: tl.constexpr, WANT_Y: tl.constexpr, WANT_F: tl.constexpr, WANT_G: tl.constexpr,
    PER_ROW: tl.constexpr, TEACHER_PER_ROW: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, TEACHER_SCALED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    LINE: tl.constexpr, VEC: tl.constexpr, TEACHER_VEC: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, J: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    begin, skew = boundary(row, stride, lead, LINE)
    raw += begin
    teacher += tl.multiple_of(row.to(tl.int64) * teacher_stride + teacher_lead - skew, TEACHER_VEC)
    end = skew + V
    low = part * width
    high = tl.minimum(low + width, end)
    c, ct = (), ()
    for i in tl.static_range(len(temperatures)):
        c = c + (tl.div_rn(LOG2E, temperature(temperatures[i], row, PER_ROW[i])),)
        ct = ct + (tl.div_rn(LOG2E, temperature(teacher_temperatures[i], row, TEACHER_PER_ROW[i])),)
    m, mt, best, bestt, S, X, Q, St, Y, F, D, G, E, total, centre = read_both(
        raw, teacher, skew, low, high, c, ct, scale, cap, teacher_scale, teacher_cap,
        TOTAL, ARGMAX, ARGMAXT, MET, WANT_X, WANT_Q, WANT_Y, WANT_F, WANT_G,
        SCALED, CAPPED, TEACHER_SCALED, TEACHER_CAPPED, VEC, TEACHER_VEC, "evict_first", K, L, J,
    )  # fmt: skip
    j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    go, stop = edges(skew, high, VEC)
    got, stopt = edges(skew, high, TEACHER_VEC)

    # merge the lanes
    top, topt = tl.max(m, axis=0), tl.max(mt, axis=0)
    some, somet = top > LOWEST, topt > LOWEST
    out += part.to(tl.int64) * N + row
    step = N.to(tl.int64) * parts
    tl.store(out, tl.where(some, top, -float("inf")))
    slot = 1
    none = tl.maximum(low, skew)
    if TOTAL:
        count = tl.maximum(high - none, 0).to(tl.float32)
        tl.store(out + slot * step, total + count * (centre - tl.where(some, top, 0.0)))
        tl.store(out + (slot + 1) * step, count)
        slot += 2
    if ARGMAX:
        found = column_of(m, best, raw, j, skew, high, go, stop, scale, cap, SCALED, CAPPED)
        tl.store(out + slot * step, (tl.where(some, found, none) - skew + start).to(tl.float32))
        slot += 1
    tl.store(out + slot * step, tl.where(somet, topt, -float("inf")))
    slot += 1
    if ARGMAXT:
        found = column_of(
            mt, bestt, teacher, j, skew, high, got, stopt, teacher_scale, teacher_cap, TEACHER_SCALED, TEACHER_CAPPED
        )
        tl.store(out + slot * step, (tl.where(somet, found, none) - skew + start).to(tl.float32))
        slot += 1
    for i in tl.static_range(len(c)):
        d = (m - top) * c[i]
        dt = (mt - topt) * ct[i]
        k, kt = tl.exp2(d), tl.exp2(dt)
        tl.store(out + slot * step, tl.sum(k * S[i], axis=0))
        slot += 1
        if WANT_X[i]:
            tl.store(out + slot * step, tl.sum(k * (X[i] + d * S[i]), axis=0) * LN2)
            slot += 1
        if WANT_Q[i]:
            tl.store(out + slot * step, tl.sum(k * k * Q[i], axis=0))
            slot += 1
        if MET[i]:
            tl.store(out + slot * step, tl.sum(kt * St[i], axis=0))
            slot += 1
        if WANT_Y[i]:
            tl.store(out + slot * step, tl.sum(kt * (Y[i] + dt * St[i]), axis=0) * LN2)
            slot += 1
        if WANT_F[i]:
            f, lost = rebase(F[i], D[i], St[i], d, BITS)
            tl.store(out + slot * step, tl.sum(kt * f, axis=0) * LN2)
            tl.store(out + (slot + 1) * step, tl.sum(kt * lost, axis=0))
            slot += 2
        if WANT_G[i]:
            g, lost = rebase(G[i], E[i], S[i], dt, BITS)
            tl.store(out + slot * step, tl.sum(k * g, axis=0) * LN2)
            tl.store(out + (slot + 1) * step, tl.sum(k * lost, axis=0))
            slot += 2
