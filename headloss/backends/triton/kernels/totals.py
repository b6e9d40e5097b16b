# mypy: ignore-errors
"""Sums over rows, in one program and so in the same order every time: what the targets are, and what a visit left.

Dimension key:  T terms   P terms, padded to a power of 2   N rows   B rows of a block
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.given import number


@triton.jit(do_not_specialize=["N"])
def totals_kernel(
    found, sums, loss, weights, N, FIRST: tl.constexpr, KINDS: tl.constexpr, P: tl.constexpr, B: tl.constexpr
):
    """Each term's sum, and the loss.  The terms' values are rows FIRST and following of `found` (F, N)."""
    T: tl.constexpr = len(KINDS)
    term = tl.arange(0, P)
    row = tl.arange(0, B)
    begin = found + (FIRST + term).to(tl.int64) * N
    partial = tl.zeros([P, B], tl.float32)
    for at in range(0, N, B):
        there = (term < T)[:, None] & (at + row < N)[None, :]
        partial += tl.load(begin[:, None] + (at + row)[None, :], there, 0.0)
    each = tl.sum(partial, 1)
    weight = tl.zeros([P], tl.float32)
    for i in tl.static_range(T):
        weight = tl.where(term == i, number(weights[i], 0, KINDS[i] >= 0, False).to(tl.float32), weight)
    tl.store(sums + term, each, term < T)
    tl.store(loss, tl.sum(weight * each, 0))


@triton.jit(do_not_specialize=["N"])
def count_kernel(target, numbers, mean, valid, N, B: tl.constexpr):
    """How many targets count and their range, 1 / count, and which of them count."""
    row = tl.arange(0, B)
    count = tl.zeros([B], tl.int64)
    low = tl.full([B], 9223372036854775807, tl.int64)
    high = tl.zeros([B], tl.int64)
    for at in range(0, N, B):
        y = tl.load(target + at + row, at + row < N, -100)
        counts = y != -100
        tl.store(valid + at + row, counts, at + row < N)
        count += counts.to(tl.int64)
        low = tl.where(counts, tl.minimum(low, y), low)
        high = tl.where(counts, tl.maximum(high, y), high)
    total, least, most = tl.sum(count, 0), tl.min(low, 0), tl.max(high, 0)
    tl.store(numbers, total)
    tl.store(numbers + 1, least)
    tl.store(numbers + 2, most)
    tl.store(mean, 1.0 / tl.maximum(total, 1).to(tl.float64))
