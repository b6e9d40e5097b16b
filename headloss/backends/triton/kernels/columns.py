# mypy: ignore-errors
"""Some columns of each row of a linear head: their logits, and the sums of rows that their gradients are.

An entry is a row and one of its columns.  Entries of one sum stand together, so a sum is one program's, in one order.
"""

import triton
import triton.language as tl


@triton.jit
def project_kernel(
    out, row, column, place, hidden, weight, bias, scale, E, D, hidden_stride, weight_stride,
    BIAS: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[place[e]] = scale (hidden[row[e]] . weight[column[e]] + bias); 0 for a column of -1, and nothing for -2."""
    e = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    at = tl.load(column + e, e < E, -2).to(tl.int64)
    n = tl.load(row + e, at >= 0, 0).to(tl.int64)
    total = tl.zeros([ENTRIES, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        here = (at >= 0)[:, None] & (d < D)[None, :]
        h = tl.load(hidden + n[:, None] * hidden_stride + d[None, :], here, 0.0).to(tl.float32)
        w = tl.load(weight + at[:, None] * weight_stride + d[None, :], here, 0.0).to(tl.float32)
        total += h * w
    value = tl.sum(total, 1)
    if BIAS:
        value += tl.load(bias + at, at >= 0, 0.0).to(tl.float32)
    to = tl.load(place + e, at >= -1, 0).to(tl.int64)
    tl.store(out + to, value * scale, at >= -1)


@triton.jit
def combine_kernel(
    out, into, of, place, grad, x, scale, E, D, out_stride, x_stride, ADD: tl.constexpr, ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[into[e]] = sum of scale grad[place[e]] x[of[e]] over the run of entries with that `into`, by the program of
    its first."""
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
            g = tl.load(grad + tl.load(place + e, own & (at >= 0), 0), own & (at >= 0), 0.0)
            here = (at >= 0)[:, None] & (d < D)[None, :]
            rows = tl.load(x + at[:, None] * x_stride + d[None, :], here, 0.0).to(tl.float32)
            total += tl.sum(rows * g[:, None], 0)
            e += ENTRIES
            own = tl.load(into + e, e < E, -1) == to
            go = tl.sum(own.to(tl.int32), 0)
        total *= scale
        target = out + to.to(tl.int64) * out_stride + d
        if ADD:
            total += tl.load(target, d < D, 0.0).to(tl.float32)
        tl.store(target, total, d < D)


@triton.jit
def take_kernel(raw, ids, out, C, U, raw_stride, out_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[:, u] = raw[:, ids[u]]: some columns of a few rows, one after another so that the rows stay in the cache."""
    blocks = tl.cdiv(U, BLOCK)
    row = tl.program_id(0) // blocks * ROWS
    u = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(ids + u, u < U, 0)
    for i in tl.static_range(ROWS):
        n = (row + i).to(tl.int64)
        here = u < tl.where(n < C, U, 0)
        tl.store(out + n * out_stride + u, tl.load(raw + n * raw_stride + at, mask=here), mask=here)
