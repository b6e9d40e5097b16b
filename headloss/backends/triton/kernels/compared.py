# mypy: ignore-errors
"""From what the lanes of a program have seen of a row, and of a teacher's, to the sums behind the facts; see taught.py.

Dimension key:  L lanes (threads)
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.dense import BITS, NATS, rebase
from headloss.backends.triton.kernels.logits import FLOOR, LN2


@triton.jit
def row_sums(
    m, swept, top, z_k, S, X, Q, c, TAIL: tl.constexpr, WANT_X: tl.constexpr, WANT_Q: tl.constexpr
):  # fmt: skip
    """A row's sums from its maximum `top`, by temperature; TAIL: the lanes' (from `swept`) are joined by the ids'."""
    sums, spreads, squares, tail_sums = (), (), (), ()
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
            tail_sums = tail_sums + (s,)
            d = (swept - top) * c[i]
            up = tl.exp2(d)
            t = (z_k - top) * c[i]
            e = tl.exp2(t)
            if WANT_X[i]:
                x = up * (x + d * s) + tl.sum(e * tl.maximum(t, FLOOR), axis=0)
            if WANT_Q[i]:
                q = up * up * q + tl.sum(e * e, axis=0)
            s = up * s + tl.sum(e, axis=0)
        sums = sums + (s,)
        spreads = spreads + (x * LN2,)
        squares = squares + (q,)
    return sums, spreads, squares, tail_sums


@triton.jit
def teacher_sums(
    m, mt, top, top_t, S, St, Y, F, D, G, E, c, ct,
    MET: tl.constexpr, WANT_Y: tl.constexpr, WANT_F: tl.constexpr, WANT_G: tl.constexpr,
):  # fmt: skip
    """A dense teacher's sums from its maximum `top_t`, and those with the student's, in nats, by temperature."""
    sums, ys, fs, gs = (), (), (), ()
    for i in tl.static_range(len(c)):
        d, dt = (m - top) * c[i], (mt - top_t) * ct[i]
        up, upt = tl.exp2(d), tl.exp2(dt)
        s, y, f, g = tl.full([], 1.0, tl.float32), 0.0, 0.0, 0.0
        if MET[i]:
            s = tl.sum(upt * St[i], axis=0)
        if WANT_Y[i]:
            y = tl.sum(upt * (Y[i] + dt * St[i]), axis=0) * LN2
        if WANT_F[i]:
            part, lost = rebase(F[i], D[i], St[i], d, BITS)
            f = tl.sum(upt * part, axis=0) * LN2 + tl.sum(upt * lost, axis=0) * NATS
        if WANT_G[i]:
            part, lost = rebase(G[i], E[i], S[i], dt, BITS)
            g = tl.sum(up * part, axis=0) * LN2 + tl.sum(up * lost, axis=0) * NATS
        sums = sums + (s,)
        ys = ys + (y,)
        fs = fs + (f,)
        gs = gs + (g,)
    return sums, ys, fs, gs
