# mypy: ignore-errors
"""Sums over rows in one program, so always in the same order: counts of targets, and the sums of terms after a visit.

Dimension key:  T terms   P terms, padded to a power of 2   N rows   B rows of a block
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.printed_arguments import number


@triton.jit(do_not_specialize=["N"])
def totals_kernel(
    found, sums, loss, weights, N, FIRST: tl.constexpr, KINDS: tl.constexpr, P: tl.constexpr, B: tl.constexpr
):
    """Each term's sum, and the loss.  The terms' values are the rows of `found` (F, N) from FIRST on."""
    T: tl.constexpr = len(KINDS)
    term = tl.arange(0, P)
    row = tl.arange(0, B)
    begin = found + (FIRST + term).to(tl.int64) * N
    partial = tl.zeros([P, B], tl.float32)
    for at in range(0, N, B):
        here = (term < T)[:, None] & (at + row < N)[None, :]
        partial += tl.load(begin[:, None] + (at + row)[None, :], here, 0.0)
    each = tl.sum(partial, 1)
    weight = tl.zeros([P], tl.float32)
    for i in tl.static_range(T):
        weight = tl.where(term == i, number(weights[i], 0, KINDS[i] >= 0, False).to(tl.float32), weight)
    tl.store(sums + term, each, term < T)
    tl.store(loss, tl.sum(weight * each, 0))


@triton.jit(do_not_specialize=["N"])
def count_kernel(target, ids, numbers, mean, valid, live_ids, N, SEGMENTS: tl.constexpr, B: tl.constexpr):
    """How many targets count, their range, 1 / count, and a mask of those that count.

    With segments also: how many of those rows have none, the largest id of all rows, or one below -1, and the ids,
    which are -1 in ignored rows.
    """
    row = tl.arange(0, B)
    count = tl.zeros([B], tl.int64)
    low = tl.full([B], 9223372036854775807, tl.int64)
    high = tl.zeros([B], tl.int64)
    unassigned = tl.zeros([B], tl.int64)
    first = tl.full([B], -1, tl.int64)
    last = tl.full([B], -1, tl.int64)
    for at in range(0, N, B):
        here = at + row < N
        y = tl.load(target + at + row, here, -100)
        counts = y != -100
        tl.store(valid + at + row, counts, here)
        count += counts.to(tl.int64)
        low = tl.where(counts, tl.minimum(low, y), low)
        high = tl.where(counts, tl.maximum(high, y), high)
        if SEGMENTS:
            i = tl.load(ids + at + row, here, -1)
            tl.store(live_ids + at + row, tl.where(counts, i, -1), here)
            unassigned += (counts & (i < 0)).to(tl.int64)
            first, last = tl.minimum(first, i), tl.maximum(last, i)
    total, least, most = tl.sum(count, 0), tl.min(low, 0), tl.max(high, 0)
    tl.store(numbers, total)
    tl.store(numbers + 1, least)
    tl.store(numbers + 2, most)
    tl.store(mean, 1.0 / tl.maximum(total, 1).to(tl.float64))
    if SEGMENTS:
        below = tl.min(first, 0)
        tl.store(numbers + 3, tl.sum(unassigned, 0))
        tl.store(numbers + 4, tl.where(below < -1, below, tl.max(last, 0)))
