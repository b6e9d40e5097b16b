# mypy: ignore-errors
"""The facts sweep with a dense teacher: both rows are read together, and every lane keeps both partials.

Dimension key:  K loads in flight   L lanes (threads)   J columns of a lane in each load   P parts   N rows

A program sweeps one part of one row, over the columns that both have.  Results go to `out` (F, P, N): the student's
maximum, total and its count, argmax, the teacher's maximum, argmax, then for each temperature S, X, Q and, if the two
are compared at it, St, Y, F with D, G with E; those not asked for are left out.  `dense_merge.py` merges the parts.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import LOG2E, LOWEST, boundary, edges, logits, temperature
from headloss.backends.triton.kernels.running_sums import absorb, merge_lanes, merge_teacher
from headloss.backends.triton.kernels.sums import centre_of, column_of, fetch, higher, put


@triton.jit
def take_both(z, u, m, mt, best, bestt, block, sums, c, ct, F: tl.constexpr):
    """Add a block of both rows, K x (L, J), to the lanes' sums (L,)."""
    new, best = higher(z, m, best, block, F.BEST)
    newt, bestt = higher(u, mt, bestt, block, F.TEACHER_BEST)
    return new, newt, best, bestt, absorb(z, u, m, mt, new, newt, sums, c, ct, False, True, F)


@triton.jit
def read_both(raw, teacher, skew, low, high, c, ct, how, F: tl.constexpr):
    """Each lane's sums over its columns from `low` to `high` of both rows."""
    K: tl.constexpr = F.K
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    BLOCK: tl.constexpr = K * L * J
    sums = ()
    for _i in tl.static_range(9 * len(c)):
        sums = sums + (tl.zeros([L], tl.float32),)
    m = tl.full([L], LOWEST, tl.float32)
    mt = tl.full([L], LOWEST, tl.float32)
    best = tl.zeros([L], tl.int32)
    bestt = tl.zeros([L], tl.int32)
    total = tl.zeros([L], tl.float32)
    centre = 0.0
    if F.TOTAL:
        centre = centre_of(raw, skew, low, high, how, F)

    j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    head = (low < skew).to(tl.int32)
    first = low // BLOCK + head
    last = tl.maximum(high // BLOCK, first)
    for block in range(first, last):
        x = fetch(raw, block * BLOCK + j, 0, 0, False, K, "evict_first")
        y = fetch(teacher, block * BLOCK + j, 0, 0, False, K, "evict_first")
        z, u = (), ()
        for n in tl.static_range(K):
            z = z + (logits(x[n], how[0], how[1], F.SCALED, F.CAPPED),)
            u = u + (logits(y[n], how[2], how[3], F.TEACHER_SCALED, F.TEACHER_CAPPED),)
            if F.TOTAL:
                total += tl.sum(z[n] - centre, axis=1)
        m, mt, best, bestt, sums = take_both(z, u, m, mt, best, bestt, block, sums, c, ct, F)
    go, stop = edges(skew, high, F.VEC)
    got, stopt = edges(skew, high, F.TEACHER_VEC)
    for edge in range(1 - head, 1 + (high > last * BLOCK).to(tl.int32)):  # the first block if partial, and the last
        block = tl.where(edge == 0, 0, last)
        x = fetch(raw, block * BLOCK + j, go, stop, True, K, "evict_first")
        y = fetch(teacher, block * BLOCK + j, got, stopt, True, K, "evict_first")
        z, u = (), ()
        for n in tl.static_range(K):
            at = block * BLOCK + n * (L * J) + j
            good = (at >= skew) & (at < high)
            value = logits(x[n], how[0], how[1], F.SCALED, F.CAPPED)
            if F.TOTAL:
                total += tl.sum(tl.where(good, value - centre, 0.0), axis=1)
            z = z + (tl.where(good, value, -float("inf")),)
            value = logits(y[n], how[2], how[3], F.TEACHER_SCALED, F.TEACHER_CAPPED)
            u = u + (tl.where(good, value, -float("inf")),)
        m, mt, best, bestt, sums = take_both(z, u, m, mt, best, bestt, block, sums, c, ct, F)
    return m, mt, best, bestt, sums, tl.sum(total, axis=0), centre


@triton.jit(
    do_not_specialize=["N", "V", "parts", "width", "stride", "lead", "teacher_stride", "teacher_lead", "start"],
)
def dense_sums_kernel(
    raw, teacher, out, temperatures, teacher_temperatures,
    N, V, parts, width, stride, lead, teacher_stride, teacher_lead, start, how, F: tl.constexpr,
):  # fmt: skip
    TEACHER_VEC: tl.constexpr = F.TEACHER_VEC
    if F.CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    begin, skew = boundary(row, stride, lead, F.LINE)
    raw += begin
    teacher += tl.multiple_of(row.to(tl.int64) * teacher_stride + teacher_lead - skew, TEACHER_VEC)
    low = part * width
    high = tl.minimum(low + width, skew + V)
    c, ct = (), ()
    for i in tl.static_range(len(temperatures)):
        c = c + (tl.div_rn(LOG2E, temperature(temperatures[i], row, F.PER_ROW[i])),)
        ct = ct + (tl.div_rn(LOG2E, temperature(teacher_temperatures[i], row, F.TEACHER_PER_ROW[i])),)
    m, mt, best, bestt, sums, total, centre = read_both(raw, teacher, skew, low, high, c, ct, how, F)

    # merge the lanes
    top, topt = tl.max(m, axis=0), tl.max(mt, axis=0)
    some, somet = top > LOWEST, topt > LOWEST
    out += part.to(tl.int64) * N + row
    step = N.to(tl.int64) * parts
    out = put(tl.where(some, top, -float("inf")), out, step, True)
    none = tl.maximum(low, skew)
    if F.TOTAL:
        count = tl.maximum(high - none, 0).to(tl.float32)
        out = put(total + count * (centre - tl.where(some, top, 0.0)), out, step, True)
        out = put(count, out, step, True)
    if F.BEST:
        found = column_of(m, best, raw, skew, high, how[0], how[1], F.VEC, F.SCALED, F.CAPPED, F)
        out = put((tl.where(some, found, none) - skew + start).to(tl.float32), out, step, True)
    out = put(tl.where(somet, topt, -float("inf")), out, step, True)
    if F.TEACHER_BEST:
        found = column_of(
            mt, bestt, teacher, skew, high, how[2], how[3], TEACHER_VEC, F.TEACHER_SCALED, F.TEACHER_CAPPED, F
        )
        out = put((tl.where(somet, found, none) - skew + start).to(tl.float32), out, step, True)
    own, sums_t = merge_lanes(m, top, sums, c, 9, False, F), merge_teacher(m, mt, top, topt, sums, c, ct, False, F)
    for i in tl.static_range(len(c)):
        out = put(own[3 * i], out, step, True)
        out = put(own[3 * i + 1], out, step, F.WANT_X[i])
        out = put(own[3 * i + 2], out, step, F.WANT_Q[i])
        out = put(sums_t[6 * i], out, step, F.COMPARED[i])
        out = put(sums_t[6 * i + 1], out, step, F.WANT_Y[i])
        out = put(sums_t[6 * i + 2], out, step, F.WANT_F[i])
        out = put(sums_t[6 * i + 3], out, step, F.WANT_F[i])
        out = put(sums_t[6 * i + 4], out, step, F.WANT_G[i])
        out = put(sums_t[6 * i + 5], out, step, F.WANT_G[i])
