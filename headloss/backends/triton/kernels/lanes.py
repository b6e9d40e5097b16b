# mypy: ignore-errors
"""Merges what the lanes of a program summed of a row, and of a teacher's row, into the sums behind the facts.

Dimension key:  L lanes (threads)
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import FLOOR, LN2
from headloss.backends.triton.kernels.pair_loops import read_pair
from headloss.backends.triton.kernels.row_loops import LOWEST, read
from headloss.backends.triton.kernels.running_sums import greater, merge_lanes, merge_teacher, one_lane, placed, rebase
from headloss.backends.triton.kernels.shared_rows import exchange, highest_of

NOWHERE = tl.constexpr(2147483647)
BEYOND = tl.constexpr(16777216)  # no column, in a row that is shared; a float32 represents every integer up to here


@triton.jit
def origin_of(top):
    """What logits are measured from: their maximum; 0 if every logit is -inf."""
    return tl.where(top > LOWEST, top, 0.0)


@triton.jit
def sweep_row(raw, skew, end, part, picked, c, how, scratch, ids, POLICY: tl.constexpr, F: tl.constexpr):
    """Sweep the student's row.  Returns maximum, argmax, sums (see `merge_lanes`), total, the last block as stored, and
    the results of `around_ids`.
    """
    m, top, columns, sums, total, centre, tail, left = read(raw, skew, end, part, c, how, scratch, ids, POLICY, F)
    best = tl.full([], NOWHERE, tl.int32)
    if F.BEST:
        best = tl.min(columns, axis=0)
    total += (end - skew).to(tl.float32) * (centre - origin_of(top))
    own = merge_lanes(m, top, sums, c, 3, True, F)
    if F.PARTS:
        found = exchange(scratch, part, (top, own[0]) + ((picked,) if F.PICK else ()), F)
        tops, top = highest_of(found[0], F)
        own = merge_lanes(tops, top, (found[1], 0.0, 0.0), c, 3, False, F)
        if F.PICK:
            picked = tl.sum(found[2], axis=0)
    return top, best, own, total, picked, tail, left


@triton.jit
def sweep_pair(raw, teacher, skew, end, part, picked, c, ct, how, scratch, POLICY: tl.constexpr, F: tl.constexpr):
    """Sweep both rows.  Returns maximum, argmax, sums and total, the teacher's maximum, argmax and sums (see
    `merge_teacher`), and `picked` of the program that has it.
    """
    m, mt, columns, columnst, sums, total, centre = read_pair(raw, teacher, skew, end, part, c, ct, how, POLICY, F)
    top, topt = tl.reduce((m, mt), 0, greater)
    best, bestt = tl.full([], NOWHERE, tl.int32), tl.full([], NOWHERE, tl.int32)
    if F.BEST:
        best = tl.min(columns, axis=0)
    if F.TEACHER_BEST:
        bestt = tl.min(columnst, axis=0)
    if F.PARTS:  # parts of a row are merged like lanes
        numbers = (top, topt) + one_lane(m, mt, top, topt, sums, c, ct, F)
        if F.PICK:
            numbers = numbers + (picked,)
        if F.TOTAL:
            numbers = numbers + (total,)
        if F.BEST:
            numbers = numbers + (tl.minimum(best, BEYOND),)
        if F.TEACHER_BEST:
            numbers = numbers + (tl.minimum(bestt, BEYOND),)
        found = exchange(scratch, part, numbers, F)
        m, top = highest_of(found[0], F)
        mt, topt = highest_of(found[1], F)
        sums, found = placed(found[2:], F)
        if F.PICK:
            picked, found = tl.sum(found[0], axis=0), found[1:]
        if F.TOTAL:
            total, found = tl.sum(found[0], axis=0), found[1:]
        if F.BEST:
            best, found = tl.min(tl.where(m == top, found[0], BEYOND), axis=0).to(tl.int32), found[1:]
        if F.TEACHER_BEST:
            bestt = tl.min(tl.where(mt == topt, found[0], BEYOND), axis=0).to(tl.int32)
    own, teacher_sums = merge_lanes(m, top, sums, c, 9, True, F), merge_teacher(m, mt, top, topt, sums, c, ct, True, F)
    total += (end - skew).to(tl.float32) * (centre - origin_of(top))
    return top, best, own, total, topt, bestt, teacher_sums, picked


@triton.jit
def with_ids(tail, swept, top, z_k, c, F: tl.constexpr):
    """A row's sums relative to its maximum `top`: those of the tail, which are relative to `swept`, plus the ids'."""
    joined = ()
    for i in tl.static_range(len(c)):
        d = (swept - top) * c[i]
        t = (z_k - top) * c[i]
        e = tl.exp2(t)
        X, Q = tail[3 * i + 1], tail[3 * i + 2]
        s, x, q = rebase(tail[3 * i], X, Q, d * LN2, tl.exp2(d), F.WANT_X[i], F.WANT_Q[i])
        if F.WANT_X[i]:
            x += tl.sum(e * tl.maximum(t, FLOOR), axis=0) * LN2
        if F.WANT_Q[i]:
            q += tl.sum(e * e, axis=0)
        joined = joined + (s + tl.sum(e, axis=0), x, q)
    return joined


@triton.jit
def column_or_start(column, top, start):
    """The lowest column with the maximum; the first column for a row of -inf."""
    return (tl.where(top > LOWEST, column, 0) + start).to(tl.int64)
