# mypy: ignore-errors
"""From what the lanes of a program have seen of a row, and of a teacher's, to the facts; see taught.py.

Dimension key:  L lanes (threads)
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.dense import BITS, NATS, rebase
from headloss.backends.triton.kernels.logits import FLOOR, LN2

TEACHER_CROSS_ENTROPY = tl.constexpr(7)
REVERSE_CROSS_ENTROPY = tl.constexpr(8)
TEACHER_ENTROPY = tl.constexpr(9)
SHARED_ENTROPY = tl.constexpr(10)
TEACHER_ARGMAX = tl.constexpr(11)
DIVERGENCE = tl.constexpr(12)
IDS_LOGPROB = tl.constexpr(13)
TAIL_LOGPROB = tl.constexpr(14)
IDS_LOGIT = tl.constexpr(15)


@triton.jit
def dense_fact(NAME: tl.constexpr, best, looked, s, log_sum, spread, sum_t, log_t, y, f, g):
    """As `teachers.finish_teacher`."""
    if NAME == TEACHER_CROSS_ENTROPY:
        value = log_sum - tl.div_rn(f, sum_t)
    elif NAME == REVERSE_CROSS_ENTROPY:
        value = log_t - tl.div_rn(g, s)
    elif NAME == TEACHER_ENTROPY:
        value = log_t - tl.div_rn(y, sum_t)
    elif NAME == SHARED_ENTROPY:
        value = log_sum - tl.div_rn(spread, s)
    elif NAME == TEACHER_ARGMAX:
        value = best
    else:
        value = looked
    return value


@triton.jit
def sparse_fact(NAME: tl.constexpr, named, z, origin, tail_top, T, log_sum, tail_log_sum):
    """As `teachers.finish_teacher`; an id that names no column counts as 0."""
    if NAME == IDS_LOGPROB:
        value = tl.where(named, tl.div_rn(z - origin, T + tl.zeros_like(z)) - log_sum, 0.0)
    elif NAME == IDS_LOGIT:
        value = tl.where(named, tl.div_rn(z, T + tl.zeros_like(z)), 0.0)
    else:
        value = tl.div_rn(tail_top - origin, T) + tail_log_sum - log_sum
    return value


@triton.jit
def row_sums(
    m, swept, top, z_k, S, X, Q, c, TAIL: tl.constexpr, WANT_X: tl.constexpr, WANT_Q: tl.constexpr
):  # fmt: skip
    """A row's sums from its maximum `top`, by temperature; TAIL: the lanes' (from `swept`) are joined by the ids'."""
    sums, log_sums, spreads, squares, tail_sums = (), (), (), (), ()
    for i in tl.static_range(len(c)):
        d = (m - swept) * c[i]
        up = tl.exp2(d)
        s = tl.sum(up * S[i], axis=0)
        x, q = 0.0, 0.0
        if WANT_X[i]:
            x = tl.sum(up * (X[i] + d * S[i]), axis=0)
        if WANT_Q[i]:
            q = tl.sum(up * up * Q[i], axis=0)
        if TAIL:
            tail_sums = tail_sums + (tl.where(s == 0, 1.0, s),)
            d = (swept - top) * c[i]
            up = tl.exp2(d)
            t = (z_k - top) * c[i]
            e = tl.exp2(t)
            if WANT_X[i]:
                x = up * (x + d * s) + tl.sum(e * tl.maximum(t, FLOOR), axis=0)
            if WANT_Q[i]:
                q = up * up * q + tl.sum(e * e, axis=0)
            s = up * s + tl.sum(e, axis=0)
        s = tl.where(s == 0, 1.0, s)
        sums = sums + (s,)
        log_sums = log_sums + (tl.log(s),)
        spreads = spreads + (x * LN2,)
        squares = squares + (q,)
    return sums, log_sums, spreads, squares, tail_sums


@triton.jit
def teacher_sums(
    m, mt, top, top_t, S, St, Y, F, D, G, E, c, ct,
    MET: tl.constexpr, WANT_Y: tl.constexpr, WANT_F: tl.constexpr, WANT_G: tl.constexpr,
):  # fmt: skip
    """A dense teacher's sums from its maximum `top_t`, and those with the student's, in nats, by temperature."""
    sums, log_sums, ys, fs, gs = (), (), (), (), ()
    for i in tl.static_range(len(c)):
        d, dt = (m - top) * c[i], (mt - top_t) * ct[i]
        up, upt = tl.exp2(d), tl.exp2(dt)
        s, y, f, g = tl.full([], 1.0, tl.float32), 0.0, 0.0, 0.0
        if MET[i]:
            s = tl.sum(upt * St[i], axis=0)
            s = tl.where(s == 0, 1.0, s)
        if WANT_Y[i]:
            y = tl.sum(upt * (Y[i] + dt * St[i]), axis=0) * LN2
        if WANT_F[i]:
            part, lost = rebase(F[i], D[i], St[i], d, BITS)
            f = tl.sum(upt * part, axis=0) * LN2 + tl.sum(upt * lost, axis=0) * NATS
        if WANT_G[i]:
            part, lost = rebase(G[i], E[i], S[i], dt, BITS)
            g = tl.sum(up * part, axis=0) * LN2 + tl.sum(up * lost, axis=0) * NATS
        sums = sums + (s,)
        log_sums = log_sums + (tl.log(s),)
        ys = ys + (y,)
        fs = fs + (f,)
        gs = gs + (g,)
    return sums, log_sums, ys, fs, gs
