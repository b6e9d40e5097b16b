# mypy: ignore-errors
"""Kernels for a linear head at a few columns per row: the logits there, and the sums of rows that are the gradients.

An entry is a row and one of its columns.  Entries of one sum are adjacent, so one program adds them, in a fixed order.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import LN2, LOG2E, LOWEST, logits, temperature


@triton.jit
def project_kernel(
    out, row, column, place, hidden, weight, bias, scale, E, D, hidden_stride, weight_stride,
    BIAS: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[place[e]] = scale (hidden[row[e]] . weight[column[e]] + bias); 0 for a column of -1; -2 stores nothing."""
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
    """out[into[e]] = sum of scale grad[place[e]] x[of[e]] over the run of entries with that `into`; the program of the
    run's first entry adds them all."""
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
def places_kernel(keys, offsets, target, entries, rows, flags, E, N, width, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row finds the places of the row's kept columns and of its target; `keys` are sorted.

    `entries` (5, E): row, column, place in the row, place among all, column to be read; `rows` (2, N): how many columns
    a row has, the place of its target; `flags` (2, N): whether it has one column, whether its target was not kept.
    """
    n = tl.program_id(0).to(tl.int64)
    go, stop = tl.load(offsets + n), tl.load(offsets + n + 1)
    wanted = tl.full([], -1, tl.int64)
    counts = tl.full([], 1, tl.int1)
    missing = tl.zeros([], tl.int64)
    before = tl.zeros([], tl.int64)
    at = go
    if TARGET:
        wanted = tl.load(target + n).to(tl.int64)
        counts = wanted != -100
        found = tl.zeros([], tl.int64)
        for first in range(go, stop, BLOCK):
            e = first + tl.arange(0, BLOCK)
            column = tl.load(keys + e, e < stop, -1) & 0xFFFFFFFF
            before += tl.sum(((column < wanted) & (e < stop)).to(tl.int64), 0)
            found += tl.sum(((column == wanted) & (e < stop)).to(tl.int64), 0)
        missing = (counts & (found == 0)).to(tl.int64)
        at += n
        own = entries + stop + n  # a row's target follows its set
        tl.store(own, n)
        tl.store(own + E, tl.where(missing > 0, wanted, -1))
        tl.store(own + 2 * E, before)
        tl.store(own + 3 * E, tl.where(missing > 0, n * width + before, N * width))
        single = stop - go + missing == 1
        tl.store(own + 4 * E, tl.where(missing == 0, -2, tl.where(single, -1, wanted)))
        tl.store(rows + N + n, tl.where(counts, before, -100))
        tl.store(flags + N + n, missing)
    length = stop - go + missing
    tl.store(rows + n, length)
    tl.store(flags + n, length == 1)
    for first in range(go, stop, BLOCK):
        e = first + tl.arange(0, BLOCK)
        here = e < stop
        column = tl.load(keys + e, here, 0) & 0xFFFFFFFF
        place = e - go + tl.where(column > wanted, missing, 0)
        to = entries + at + (e - go)
        tl.store(to, n + tl.zeros_like(e), here)
        tl.store(to + E, tl.where(counts, column, -1), here)
        tl.store(to + 2 * E, place, here)
        tl.store(to + 3 * E, tl.where(counts, n * width + place, N * width), here)
        tl.store(to + 4 * E, tl.where(counts, tl.where(length == 1, -1, column), -2), here)


@triton.jit
def take_kernel(
    raw, ids, others, out, sums, temperatures, how, C, V, U, raw_stride, out_stride, limit, parts, width,
    F: tl.constexpr,
):  # fmt: skip
    """out[:, u] = raw[:, ids[u]] for `width` columns u of a few rows, and log2 of the sum of exponentials over those of
    PART columns that are `others`.  Programs that share rows run together, so that rows are read from memory once.
    `limit`: how far a row may be read."""
    VEC: tl.constexpr = F.VEC
    ROWS: tl.constexpr = F.ROWS
    PART: tl.constexpr = F.PART
    BLOCK: tl.constexpr = F.BLOCK
    part = tl.program_id(0) % parts
    first = tl.program_id(0) // parts * ROWS
    column = part * PART + tl.arange(0, PART)
    if len(temperatures) > 0:
        counts = tl.load(others + column, mask=column < V, other=0) != 0
        for i in tl.static_range(ROWS):
            n = tl.minimum(first + i, C - 1).to(tl.int64)
            row = raw + tl.multiple_of(n * raw_stride, VEC)
            x = tl.load(row + column, mask=column < tl.multiple_of(limit // VEC * VEC, VEC), other=-float("inf"))
            z = logits(x, how[0], how[1], F.SCALED, F.CAPPED)
            z = tl.where(counts, z, -float("inf"))
            top = tl.max(z, axis=0)
            origin = tl.where(top > LOWEST, top, 0.0)
            for k in tl.static_range(len(temperatures)):
                c = tl.div_rn(LOG2E, temperature(temperatures[k], n, F.PER_ROW[k]))
                whole = tl.floor(origin * c)  # an integer, so that a difference from it is not rounded again
                total = tl.sum(tl.exp2(tl.fma(z, c + tl.zeros_like(z), -whole + tl.zeros_like(z))), axis=0)
                tl.store(sums + (k * parts + part).to(tl.int64) * C + n, whole + tl.log2(total))
    stop = tl.minimum((part + 1) * width, U)
    for start in range(part * width, stop, BLOCK):
        u = start + tl.arange(0, BLOCK)
        at = tl.load(ids + u, mask=u < stop, other=0)
        for i in tl.static_range(ROWS):
            n = (first + i).to(tl.int64)
            here = u < tl.where(n < C, stop, 0)
            tl.store(out + n * out_stride + u, tl.load(raw + n * raw_stride + at, mask=here), mask=here)


@triton.jit
def merge_kernel(sums, out, C, parts, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """The log-sum-exp of each row, in nats, from those of its parts, in base 2: (T, P, C) to (T, C)."""
    n = tl.program_id(0) % tl.cdiv(C, ROWS) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(0) // tl.cdiv(C, ROWS)
    part = tl.arange(0, PADDED)
    here = (part < parts)[:, None] & (n < C)[None, :]
    found = tl.load(sums + (at * parts + part).to(tl.int64)[:, None] * C + n[None, :], here, -float("inf"))
    top = tl.max(found, axis=0)
    top = tl.where(top > LOWEST, top, 0.0)
    total = tl.sum(tl.exp2(found - top[None, :]), axis=0)
    tl.store(out + at * C + n, (top + tl.log2(total)) * LN2, n < C)
