# mypy: ignore-errors
"""Sums over rows of what a visit left: each term's value, and the loss.

Dimension key:  T terms   P terms, padded to a power of 2   N rows   B rows of a block
"""

import triton
import triton.language as tl

from headloss.backends.kernels.visit import number


@triton.jit(do_not_specialize=["N"])
def totals_kernel(
    found, sums, loss, weights, N, FIRST: tl.constexpr, KINDS: tl.constexpr, P: tl.constexpr, B: tl.constexpr
):
    """One program: in this order every time.  The terms' values are rows FIRST and following of `found` (F, N)."""
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
