# mypy: ignore-errors
"""The pull: d(loss)/d(raw) from a handful of numbers per row.

    d(loss)/d(s_j) = p_j (a + b log p_j + e p_j) + c + y 1[j=y]        summed over temperatures, s = z / T

A program writes WIDTH columns of one row; `rows` (F, N) holds the row's maximum and, for each temperature, its log_sum
and those coefficients that are there.  Columns are counted from the boundary below the output's first element.  Vectors
that lie whole in the row are stored whole; the row's ragged ends, fewer than VEC columns each, are a step of their own,
because the rest of their vectors belongs to other rows.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import FLOOR, LN2, LOG2E, boundary, logits, temperature


@triton.jit
def gradient(
    raw, m, log_sum, c, k, scale, cap,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The dense part, and z; `k` has four numbers for each temperature: a, b, e, c over T, b in base 2."""
    z = logits(raw, scale, cap, SCALED, CAPPED)
    away = z - m
    g = tl.zeros_like(z)
    for i in tl.static_range(len(c)):
        if A[i] or B[i] or E[i]:
            x = away * c[i] - log_sum[i]
            p = tl.exp2(x)
            slope = k[4 * i] + 0.0
            if B[i]:
                slope = slope + k[4 * i + 1] * tl.maximum(x, FLOOR)
            if E[i]:
                slope = slope + k[4 * i + 2] * p
            g += p * slope
        if C[i]:
            g += k[4 * i + 3]
    return slopes(g, z, scale, cap, SCALED, CAPPED), z


@triton.jit
def slopes(g, z, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """From d/dz to d/d raw; `scale` is in the coefficients already."""
    if CAPPED:
        ratio = z / cap
        g = g * (1.0 - ratio * ratio)
    return g


@triton.jit(
    do_not_specialize=["N", "V", "parts", "stride", "lead", "out_stride", "out_lead", "target_stride", "start"],
    do_not_specialize_on_alignment=["target"],
)
def pull_kernel(
    raw, target, rows, out, temperatures,
    N, V, parts, stride, lead, out_stride, out_lead, target_stride, start, scale, cap,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, Y: tl.constexpr,
    TARGET: tl.constexpr, PER_ROW: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    WIDTH: tl.constexpr, LINE: tl.constexpr, VEC: tl.constexpr, RAW_VEC: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    begin, skew = boundary(row, out_stride, out_lead, LINE)
    out += begin
    raw += tl.multiple_of(row.to(tl.int64) * stride + lead - skew, RAW_VEC)
    low = part * WIDTH
    high = tl.minimum(low + WIDTH, skew + V)
    whole_low = (tl.maximum(low, skew) + VEC - 1) // VEC * VEC
    whole_low = tl.multiple_of(whole_low, VEC)
    whole_high = tl.multiple_of(high // VEC * VEC, VEC)

    rows += row
    m = tl.load(rows)
    if TARGET:
        wanted = tl.load(target + row.to(tl.int64) * target_stride)
    slot = 1
    f = 1.0
    if SCALED:
        f = scale + 0.0
    c, log_sum, k = (), (), ()
    live = tl.full([], 0, tl.int1)
    at_target = 0.0
    for i in tl.static_range(len(temperatures)):
        T = temperature(temperatures[i], row, PER_ROW[i])
        over = tl.div_rn(f, T)
        c = c + (tl.div_rn(LOG2E, T),)
        log_sum = log_sum + (tl.load(rows + slot * N) * LOG2E,)
        slot += 1
        a, b, e, const = 0.0, 0.0, 0.0, 0.0
        if A[i]:
            a = tl.load(rows + slot * N) * over
            live = live | (a != 0)
            slot += 1
        if B[i]:
            b = tl.load(rows + slot * N) * over * LN2
            live = live | (b != 0)
            slot += 1
        if E[i]:
            e = tl.load(rows + slot * N) * over
            live = live | (e != 0)
            slot += 1
        if C[i]:
            const = tl.load(rows + slot * N) * over
            live = live | (const != 0)
            slot += 1
        if Y[i]:
            y = tl.load(rows + slot * N) * over
            live = live | (y != 0)
            at_target += y
            slot += 1
        k = k + (a, b, e, const)

    kind = out.dtype.element_ty
    j = tl.arange(0, BLOCK)
    head = (low < whole_low).to(tl.int32)
    first = low // BLOCK + head
    last = tl.maximum(whole_high // BLOCK, first)
    edges = 1 + (whole_high > last * BLOCK).to(tl.int32)
    q = tl.arange(0, 2 * VEC)
    ragged = tl.where(q < VEC, whole_low, whole_high) + q - VEC
    at_low = (ragged >= tl.maximum(low, skew)) & (ragged < high)
    at_high = (ragged >= tl.maximum(whole_high, whole_low)) & (ragged < high)
    ends = tl.where(q < VEC, at_low, at_high)
    cut = (whole_low > tl.maximum(low, skew)) | (whole_high < high)
    if live:
        if TARGET:
            column = (wanted - start + skew).to(tl.int32)
            here = (column >= tl.maximum(low, skew)) & (column < high)
            picked = tl.zeros([], raw.dtype.element_ty)
            if here:
                picked = tl.load(raw + column)
                tl.debug_barrier()  # every warp has seen the target's logit before any may overwrite it
        x_ends = tl.load(raw + ragged, mask=ends, other=0.0)  # early: its latency hides behind the blocks
        for block in tl.range(first, last, num_stages=STAGES):
            x = tl.load(raw + block * BLOCK + j, eviction_policy="evict_first")
            g, _ = gradient(x, m, log_sum, c, k, scale, cap, A, B, E, C, SCALED, CAPPED)
            tl.store(out + block * BLOCK + j, g.to(kind), eviction_policy="evict_first")
        for edge in range(1 - head, edges):
            at = tl.where(edge == 0, low // BLOCK, last) * BLOCK + j
            whole = (at >= whole_low) & (at < whole_high)
            x = tl.load(raw + at, mask=whole, other=0.0)
            g, _ = gradient(x, m, log_sum, c, k, scale, cap, A, B, E, C, SCALED, CAPPED)
            tl.store(out + at, g.to(kind), mask=whole)
        if cut:
            g, _ = gradient(x_ends, m, log_sum, c, k, scale, cap, A, B, E, C, SCALED, CAPPED)
            tl.store(out + ragged, g.to(kind), mask=ends)
        if TARGET:  # noqa: SIM102, known before the kernel runs
            if here:  # one store instead of a comparison for every column
                g, z = gradient(picked, m, log_sum, c, k, scale, cap, A, B, E, C, SCALED, CAPPED)
                g += slopes(at_target, z, scale, cap, SCALED, CAPPED)
                tl.debug_barrier()
                tl.store(out + column, g.to(kind))
    else:
        zeros = tl.zeros([BLOCK], kind)
        for block in range(low // BLOCK, tl.cdiv(high, BLOCK)):
            at = block * BLOCK + j
            tl.store(out + at, zeros, mask=(at >= whole_low) & (at < whole_high))
        if cut:
            tl.store(out + ragged, tl.zeros([2 * VEC], kind), mask=ends)
