# mypy: ignore-errors
"""From what the lanes of a program have seen of a row, and of a teacher's, to the sums behind the facts.

Dimension key:  L lanes (threads)
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.dense import BITS, rebase
from headloss.backends.triton.kernels.logits import FLOOR, LN2
from headloss.backends.triton.kernels.pair_loops import read_pair
from headloss.backends.triton.kernels.row_loops import LOWEST, read

NOWHERE = tl.constexpr(2147483647)


@triton.jit
def plus(a, b, a_, b_):
    return a + a_, b + b_


@triton.jit
def shift(m, top, c):
    """From a lane's origin, the whole number below m c, to `top`: in bits."""
    origin = tl.floor(top * c)
    return tl.floor(m * c) - origin - tl.fma(top, c, -origin)


@triton.jit
def merge_lanes(m, top, sums, c, EACH: tl.constexpr, F: tl.constexpr):
    """S, X and Q of each temperature, from `top`, X in nats; a lane has EACH sums for each."""
    merged = ()
    for i in tl.static_range(len(c)):
        d = shift(m, top, c[i])
        k = tl.exp2(d)
        S, X, Q = sums[EACH * i], sums[EACH * i + 1], sums[EACH * i + 2]
        x, q = 0.0, 0.0
        if F.WANT_X[i]:  # both in one step: lanes wait for each other once
            s, x = tl.reduce((k * S, k * (X + d * S)), 0, plus)
            x = x * LN2
        else:
            s = tl.sum(k * S, axis=0)
        if F.WANT_Q[i]:
            q = tl.sum(k * k * Q, axis=0)
        merged = merged + (s, x, q)
    return merged


@triton.jit
def merge_teacher(m, mt, top, topt, sums, c, ct, F: tl.constexpr):
    """St, Y, F, D, G and E of each temperature, from the maxima of both, in nats; see pair_loops.py."""
    merged = ()
    for i in tl.static_range(len(c)):
        s, y, f, lost, g, lostt = tl.full([], 1.0, tl.float32), 0.0, 0.0, 0.0, 0.0, 0.0
        if F.MET[i]:
            d, dt = shift(m, top, c[i]), shift(mt, topt, ct[i])
            k, kt = tl.exp2(d), tl.exp2(dt)
            S, St = sums[9 * i], sums[9 * i + 3]
            s = tl.sum(kt * St, axis=0)
            if F.WANT_Y[i]:
                y = tl.sum(kt * (sums[9 * i + 4] + dt * St), axis=0) * LN2
            if F.WANT_F[i]:
                f, lost = rebase(sums[9 * i + 5], sums[9 * i + 6], St, d, BITS)
                f, lost = tl.sum(kt * f, axis=0) * LN2, tl.sum(kt * lost, axis=0)
            if F.WANT_G[i]:
                g, lostt = rebase(sums[9 * i + 7], sums[9 * i + 8], S, dt, BITS)
                g, lostt = tl.sum(k * g, axis=0) * LN2, tl.sum(k * lostt, axis=0)
        merged = merged + (s, y, f, lost, g, lostt)
    return merged


@triton.jit
def origin_of(top):
    """Where logits are counted from: their maximum; 0 if every logit is -inf."""
    return tl.where(top > LOWEST, top, 0.0)


@triton.jit
def sweep_row(raw, skew, end, c, how, held, ids, POLICY: tl.constexpr, F: tl.constexpr):
    """Of the student alone: maximum, argmax, sums (see `merge_lanes`), total, its last block as stored, and what is
    `around_ids`."""
    m, top, seen, sums, total, centre, tail, left = read(raw, skew, end, c, how, held, ids, POLICY, F)
    best = tl.full([], NOWHERE, tl.int32)
    if F.BEST:
        best = tl.min(seen, axis=0)
    total += (end - skew).to(tl.float32) * (centre - origin_of(top))
    return top, best, merge_lanes(m, top, sums, c, 3, F), total, tail, left


@triton.jit
def sweep_pair(raw, teacher, skew, end, c, ct, how, POLICY: tl.constexpr, F: tl.constexpr):
    """Of both: the same, and the teacher's maximum, argmax and sums (see `merge_teacher`)."""
    m, mt, seen, seent, sums, total, centre = read_pair(raw, teacher, skew, end, c, ct, how, POLICY, F)
    top, topt = tl.max(m, axis=0), tl.max(mt, axis=0)
    best, bestt = tl.full([], NOWHERE, tl.int32), tl.full([], NOWHERE, tl.int32)
    if F.BEST:
        best = tl.min(seen, axis=0)
    if F.TEACHER_BEST:
        bestt = tl.min(seent, axis=0)
    own, theirs = merge_lanes(m, top, sums, c, 9, F), merge_teacher(m, mt, top, topt, sums, c, ct, F)
    total += (end - skew).to(tl.float32) * (centre - origin_of(top))
    return top, best, own, total, topt, bestt, theirs


@triton.jit
def with_ids(tail, swept, top, z_k, c, F: tl.constexpr):
    """A row's sums from its maximum `top`: the tail's, from `swept`, joined by the ids'."""
    joined = ()
    for i in tl.static_range(len(c)):
        d = (swept - top) * c[i]
        up = tl.exp2(d)
        t = (z_k - top) * c[i]
        e = tl.exp2(t)
        x, q = 0.0, 0.0
        if F.WANT_X[i]:
            x = up * (tail[3 * i + 1] + d * LN2 * tail[3 * i]) + tl.sum(e * tl.maximum(t, FLOOR), axis=0) * LN2
        if F.WANT_Q[i]:
            q = up * up * tail[3 * i + 2] + tl.sum(e * e, axis=0)
        joined = joined + (up * tail[3 * i] + tl.sum(e, axis=0), x, q)
    return joined


@triton.jit
def column_or_start(column, top, start):
    """The lowest column that holds the maximum; of a row of -inf the first."""
    return (tl.where(top > LOWEST, column, 0) + start).to(tl.int64)
