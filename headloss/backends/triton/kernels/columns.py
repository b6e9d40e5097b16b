# mypy: ignore-errors
"""Some columns of each row of a linear head: their logits, and the sums of rows that their gradients are.

An entry is a row and one of its columns.  Entries of one sum stand together, so a sum is one program's, in one order.
"""

import triton
import triton.language as tl


@triton.jit
def project_kernel(
    hidden, weight, row, column, out, E, D, hidden_stride, weight_stride, ENTRIES: tl.constexpr, BLOCK: tl.constexpr
):
    """out[e] = hidden[row[e]] . weight[column[e]], 0 where the column is -1."""
    e = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    at = tl.load(column + e, e < E, -1).to(tl.int64)
    n = tl.load(row + e, at >= 0, 0).to(tl.int64)
    total = tl.zeros([ENTRIES, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        here = (at >= 0)[:, None] & (d < D)[None, :]
        h = tl.load(hidden + n[:, None] * hidden_stride + d[None, :], here, 0.0).to(tl.float32)
        w = tl.load(weight + at[:, None] * weight_stride + d[None, :], here, 0.0).to(tl.float32)
        total += h * w
    tl.store(out + e, tl.sum(total, 1), e < E)


@triton.jit
def combine_kernel(
    out, into, of, grad, x, E, D, out_stride, x_stride, ADD: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr
):
    """out[into[e]] = sum of grad[e] x[of[e]] over the run of entries with that `into`, by the program of its first."""
    blocks = tl.cdiv(D, BLOCK)
    first = tl.program_id(0) // blocks
    to = tl.load(into + first)
    before = tl.load(into + tl.maximum(first, 1) - 1)
    if (to >= 0) & ((first == 0) | (before != to)):
        d = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        e = first + tl.arange(0, ENTRIES)
        own = tl.load(into + e, e < E, -1) == to
        go = 1
        while go > 0:
            at = tl.load(of + e, own, -1).to(tl.int64)
            g = tl.load(grad + e, own & (at >= 0), 0.0)
            here = (at >= 0)[:, None] & (d < D)[None, :]
            rows = tl.load(x + at[:, None] * x_stride + d[None, :], here, 0.0).to(tl.float32)
            total += tl.sum(rows * g[:, None], 0)
            e += ENTRIES
            own = tl.load(into + e, e < E, -1) == to
            go = tl.sum(own.to(tl.int32), 0)
        place = out + to.to(tl.int64) * out_stride + d
        if ADD:
            total += tl.load(place, d < D, 0.0).to(tl.float32)
        tl.store(place, total, d < D)
