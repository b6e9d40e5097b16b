# mypy: ignore-errors
"""The running sums behind the facts: how a block is added to them, and how they are rebased to a higher maximum.

Dimension key:  K loads in flight   L lanes (threads)   J columns of a lane in each load

In a lane, x of the student and y of the teacher are relative to its maxima so far.  When new maxima move x and y by d
and d', both 0 or below,

    S = k S        X = k (X + d S)          Q = k^2 Q                      k = e^d, k' = e^d'
    St = k' St     Y = k' (Y + d' St)       F = k' (F + d (St - D))        D = k' D

and a column adds e^x, x e^x, e^2x, e^y, y e^y and x e^y; G and E are F and D with student and teacher exchanged.  D is
the teacher's weight on columns that the student rules out.  They count as x = FLOOR, relative to the maximum of the
whole row, which is only known at the end, so they are kept apart from F until then.  This is `facts.merge` and
`teachers.merge_teacher`, in bits (base 2) or in nats: k comes with d.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import FLOOR, LN2

NATS = tl.constexpr(-1.0e4)  # how unlikely a column can be: `teachers.FLOOR`, in nats
BITS = tl.constexpr(-1.0e4 * 1.4426950408889634)


@triton.jit
def rebase(S, X, Q, d, k, WANT_X: tl.constexpr, WANT_Q: tl.constexpr):
    """S, X and Q relative to a maximum that is -d higher; a sum that is not wanted stays as it is."""
    if WANT_X:
        X = k * (X + d * S)
    if WANT_Q:
        Q = k * k * Q
    return k * S, X, Q


@triton.jit
def rebase_product(F, D, weight, d, k, LEAST: tl.constexpr):
    """F = sum x w and D, the weight ruled out, after x moved by d and w by k; what falls below LEAST joins D."""
    gone = d < LEAST
    return k * tl.where(gone, 0.0, F + d * (weight - D)), k * tl.where(gone, weight, D)


@triton.jit
def rebase_teacher(
    S, St, Y, F, D, G, E, d, dt, k, kt,
    LEAST: tl.constexpr, WANT_Y: tl.constexpr, WANT_F: tl.constexpr, WANT_G: tl.constexpr,
):  # fmt: skip
    """St, Y, F, D, G and E after both maxima moved; S and St as they were before."""
    if WANT_Y:
        Y = kt * (Y + dt * St)
    if WANT_F:
        F, D = rebase_product(F, D, St, d, kt, LEAST)
    if WANT_G:
        G, E = rebase_product(G, E, S, dt, k, LEAST)
    return kt * St, Y, F, D, G, E


@triton.jit
def fall(m, new, c, WHOLE: tl.constexpr):
    """How far a lane's origin moves, in bits, when its maximum becomes `new`.

    WHOLE: the origin is the integer below m c, so that z c - origin is one operation, and the move is exact.
    """
    if WHOLE:
        return tl.floor(m * c) - tl.floor(new * c)
    else:
        return (m - new) * c


@triton.jit
def away(z, new, c, WHOLE: tl.constexpr):
    """z (L, J) relative to the origins of its lanes (L,), in bits."""
    if WHOLE:
        return tl.fma(z, c + tl.zeros_like(z), -tl.floor(new * c)[:, None] + tl.zeros_like(z))
    else:
        return (z - new[:, None]) * c


@triton.jit
def risen(top, m, best, place, BEST: tl.constexpr):
    """The lanes' maxima (L,), those of a block included, and where they first occurred."""
    if BEST:
        best = tl.where(top > m, place, best)  # strictly above: a tie keeps the earlier one
    return tl.maximum(m, top), best


@triton.jit
def absorb(
    z, u, m, mt, new, newt, sums, c, ct, WHOLE: tl.constexpr, TEACHER: tl.constexpr, F: tl.constexpr
):  # fmt: skip
    """Add a block z, K x (L, J), to the lanes' sums (L,), whose maxima become `new`; lanes do not wait for each other.

    `sums` has S, X, Q per temperature; TEACHER: then St, Y, F, D, G, E, with a teacher's block u.  With WHOLE, z and u
    are finite if x or y is a factor.
    """
    EACH: tl.constexpr = 9 if TEACHER else 3
    more = ()
    for i in tl.static_range(len(c)):
        d = fall(m, new, c[i], WHOLE)
        k = tl.exp2(d)
        S = sums[EACH * i]
        s, x, q = rebase(S, sums[EACH * i + 1], sums[EACH * i + 2], d, k, F.WANT_X[i], F.WANT_Q[i])
        if TEACHER:
            dt = fall(mt, newt, ct[i], WHOLE)
            st, y, f, lost, g, lostt = rebase_teacher(
                S, sums[9 * i + 3], sums[9 * i + 4], sums[9 * i + 5], sums[9 * i + 6], sums[9 * i + 7], sums[9 * i + 8],
                d, dt, k, tl.exp2(dt), BITS, F.WANT_Y[i], F.WANT_F[i], F.WANT_G[i],
            )  # fmt: skip
        for n in tl.static_range(len(z)):
            t = away(z[n], new, c[i], WHOLE)
            e = tl.exp2(t)
            s += tl.sum(e, axis=1)
            if F.WANT_X[i]:
                x += tl.sum(e * (t if WHOLE else tl.maximum(t, FLOOR)), axis=1)
            if F.WANT_Q[i]:
                q += tl.sum(e * e, axis=1)
            if TEACHER and F.COMPARED[i]:
                r = away(u[n], newt, ct[i], WHOLE)
                w = tl.exp2(r)
                st += tl.sum(w, axis=1)
                if F.WANT_Y[i]:
                    y += tl.sum(w * (r if WHOLE else tl.maximum(r, FLOOR)), axis=1)
                if F.WANT_F[i]:
                    fine = t > BITS
                    f += tl.sum(w * tl.where(fine, t, 0.0), axis=1)
                    lost += tl.sum(tl.where(fine, 0.0, w), axis=1)
                if F.WANT_G[i]:
                    fine = r > BITS
                    g += tl.sum(e * tl.where(fine, r, 0.0), axis=1)
                    lostt += tl.sum(tl.where(fine, 0.0, e), axis=1)
        more = more + (s, x, q)
        if TEACHER:
            more = more + (st, y, f, lost, g, lostt)
    return more


@triton.jit
def plus(a, b, a_, b_):
    return a + a_, b + b_


@triton.jit
def fall_to(m, top, c, WHOLE: tl.constexpr):
    """How far a lane's origin is from `top` itself, in bits."""
    if WHOLE:
        origin = tl.floor(top * c)
        return tl.floor(m * c) - origin - tl.fma(top, c, -origin)
    else:
        return (m - top) * c


@triton.jit
def merge_lanes(m, top, sums, c, EACH: tl.constexpr, WHOLE: tl.constexpr, F: tl.constexpr):
    """Merge the lanes: S, X and Q per temperature, relative to `top`, X in nats; a lane has EACH sums for each."""
    merged = ()
    for i in tl.static_range(len(c)):
        d = fall_to(m, top, c[i], WHOLE)
        X, Q = sums[EACH * i + 1], sums[EACH * i + 2]
        s, x, q = rebase(sums[EACH * i], X, Q, d, tl.exp2(d), F.WANT_X[i], F.WANT_Q[i])
        if F.WANT_X[i]:  # both in one step: lanes wait for each other once
            s, x = tl.reduce((s, x), 0, plus)
            x = x * LN2
        else:
            s, x = tl.sum(s, axis=0), 0.0
        q = tl.sum(q, axis=0) if F.WANT_Q[i] else 0.0
        merged = merged + (s, x, q)
    return merged


@triton.jit
def merge_teacher(m, mt, top, topt, sums, c, ct, WHOLE: tl.constexpr, F: tl.constexpr):
    """Merge the lanes: St, Y, F, D, G and E per temperature, relative to both maxima; Y, F and G in nats."""
    merged = ()
    for i in tl.static_range(len(c)):
        s, y, f, lost, g, lostt = tl.full([], 1.0, tl.float32), 0.0, 0.0, 0.0, 0.0, 0.0
        if F.COMPARED[i]:
            d, dt = fall_to(m, top, c[i], WHOLE), fall_to(mt, topt, ct[i], WHOLE)
            St, Y, F_, D, G, E = rebase_teacher(
                sums[9 * i], sums[9 * i + 3], sums[9 * i + 4], sums[9 * i + 5], sums[9 * i + 6], sums[9 * i + 7],
                sums[9 * i + 8], d, dt, tl.exp2(d), tl.exp2(dt), BITS, F.WANT_Y[i], F.WANT_F[i], F.WANT_G[i],
            )  # fmt: skip
            s = tl.sum(St, axis=0)
            if F.WANT_Y[i]:
                y = tl.sum(Y, axis=0) * LN2
            if F.WANT_F[i]:
                f, lost = tl.sum(F_, axis=0) * LN2, tl.sum(D, axis=0)
            if F.WANT_G[i]:
                g, lostt = tl.sum(G, axis=0) * LN2, tl.sum(E, axis=0)
        merged = merged + (s, y, f, lost, g, lostt)
    return merged


@triton.jit
def used(sums, F: tl.constexpr):
    """The sums that are wanted."""
    found = ()
    for i in tl.static_range(len(F.WANT_X)):
        found = found + (sums[9 * i],)
        if F.WANT_X[i]:
            found = found + (sums[9 * i + 1],)
        if F.WANT_Q[i]:
            found = found + (sums[9 * i + 2],)
        if F.COMPARED[i]:
            found = found + (sums[9 * i + 3],)
        if F.WANT_Y[i]:
            found = found + (sums[9 * i + 4],)
        if F.WANT_F[i]:
            found = found + sums[9 * i + 5 : 9 * i + 7]
        if F.WANT_G[i]:
            found = found + sums[9 * i + 7 : 9 * i + 9]
    return found


@triton.jit
def placed(found, F: tl.constexpr):
    """Nine sums per temperature again, 0 for those that are not wanted; and what follows them in `found`."""
    sums = ()
    for i in tl.static_range(len(F.WANT_X)):
        s, found = found[0], found[1:]
        x, q, st, y, f, lost, g, lostt = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        if F.WANT_X[i]:
            x, found = found[0], found[1:]
        if F.WANT_Q[i]:
            q, found = found[0], found[1:]
        if F.COMPARED[i]:
            st, found = found[0], found[1:]
        if F.WANT_Y[i]:
            y, found = found[0], found[1:]
        if F.WANT_F[i]:
            f, lost, found = found[0], found[1], found[2:]
        if F.WANT_G[i]:
            g, lostt, found = found[0], found[1], found[2:]
        sums = sums + (s, x, q, st, y, f, lost, g, lostt)
    return sums, found


@triton.jit
def plus_three(a, b, c, a_, b_, c_):
    return a + a_, b + b_, c + c_


@triton.jit
def plus_five(a, b, c, d, e, a_, b_, c_, d_, e_):
    return a + a_, b + b_, c + c_, d + d_, e + e_


@triton.jit
def of_lanes(sums):
    """The sums of all lanes, several in each step: lanes wait for each other less often."""
    found = ()
    for i in tl.static_range(0, len(sums), 5):
        if len(sums) - i >= 5:
            found = found + tl.reduce((sums[i], sums[i + 1], sums[i + 2], sums[i + 3], sums[i + 4]), 0, plus_five)
        else:
            if len(sums) - i >= 3:
                found = found + tl.reduce((sums[i], sums[i + 1], sums[i + 2]), 0, plus_three)
            if len(sums) - i == 2:
                found = found + tl.reduce((sums[i], sums[i + 1]), 0, plus)
            if len(sums) - i == 1:
                found = found + (tl.sum(sums[i], axis=0),)
            if len(sums) - i == 4:
                found = found + (tl.sum(sums[i + 3], axis=0),)
    return found


@triton.jit
def greater(a, b, a_, b_):
    return tl.maximum(a, a_), tl.maximum(b, b_)


@triton.jit
def one_lane(m, mt, top, topt, sums, c, ct, F: tl.constexpr):
    """The wanted sums of all lanes as those of one lane, relative to the origins of `top` and `topt`."""
    moved = ()
    for i in tl.static_range(len(c)):
        d, dt = fall(m, top, c[i], True), fall(mt, topt, ct[i], True)
        k, S = tl.exp2(d), sums[9 * i]
        moved = moved + rebase(S, sums[9 * i + 1], sums[9 * i + 2], d, k, F.WANT_X[i], F.WANT_Q[i])
        moved = moved + rebase_teacher(
            S, sums[9 * i + 3], sums[9 * i + 4], sums[9 * i + 5], sums[9 * i + 6], sums[9 * i + 7], sums[9 * i + 8],
            d, dt, k, tl.exp2(dt), BITS, F.WANT_Y[i], F.WANT_F[i], F.WANT_G[i],
        )  # fmt: skip
    return of_lanes(used(moved, F))
