# mypy: ignore-errors
"""The columns of a row that may be among its K largest, in the order of the columns.

Dimension key:  L lanes   J columns of a lane in each load   M room for columns that are found

A program reads a row twice.  The first time each lane keeps the largest it has seen; the K-th largest of those is not
above the K-th largest of the row, and with a thousand lanes few other columns lie between the two.  The second time all
columns from there on are written down, one after another.  Where they are more than there is room for, as in a row of
equal logits, the K-th largest of the row itself is found by halving, and ties are cut at the lower columns.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import boundary, logits


@triton.jit
def ordered(z):
    """A number as an integer that is as large as it is; 0 and -0 are equal."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def number(key):
    """And back."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def keys(raw, at, skew, end, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr):
    """Some columns of a row; those that are not in it count for less than -inf."""
    if MASKED:
        here = (at >= skew) & (at < end)
        z = logits(tl.load(raw + at, mask=here, other=0.0), scale, cap, SCALED, CAPPED)
        return tl.where(here, ordered(z), -2147483648)
    else:
        return ordered(logits(tl.load(raw + at), scale, cap, SCALED, CAPPED))


@triton.jit
def is_edge(n, skew, end, BLOCK: tl.constexpr):
    """Whether a block reaches beyond the row."""
    return (n * BLOCK < skew) | ((n + 1) * BLOCK > end)


@triton.jit
def largest_of_lanes(raw, skew, end, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr,
                     L: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """What each lane has seen."""
    at = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    best = tl.full([L], -2147483648, tl.int32)
    for n in range(0, tl.cdiv(end, L * J)):
        if is_edge(n, skew, end, L * J):
            key = keys(raw, n * (L * J) + at, skew, end, scale, cap, SCALED, CAPPED, True)
        else:
            key = keys(raw, n * (L * J) + at, skew, end, scale, cap, SCALED, CAPPED, False)
        best = tl.maximum(best, tl.max(key, 1))
    return best


@triton.jit
def above(raw, least, skew, end, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr,
          L: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """How many columns are at least `least`."""
    at = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    count = tl.zeros([L], tl.int32)
    for n in range(0, tl.cdiv(end, L * J)):
        key = keys(raw, n * (L * J) + at, skew, end, scale, cap, SCALED, CAPPED, True)
        count += tl.sum((key >= least).to(tl.int32), 1)
    return tl.sum(count, 0)


@triton.jit
def place(hit):
    """How many of a block's columns are hit, and how many before each."""
    hit = hit.to(tl.int32)
    of_lane = tl.sum(hit, 1)
    before = tl.cumsum(of_lane, 0) - of_lane
    return tl.sum(of_lane, 0), before[:, None] + tl.cumsum(hit, 1) - hit


@triton.jit
def write(raw, values, columns, least, room, M, skew, end, scale, cap, CUT: tl.constexpr, SCALED: tl.constexpr,
          CAPPED: tl.constexpr, L: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """Write down all columns from `least` on, as far as there are places; with CUT, the first `room` equal to it."""
    at = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    found = 0
    equals = 0
    for n in range(0, tl.cdiv(end, L * J)):
        if is_edge(n, skew, end, L * J):
            key = keys(raw, n * (L * J) + at, skew, end, scale, cap, SCALED, CAPPED, True)
        else:
            key = keys(raw, n * (L * J) + at, skew, end, scale, cap, SCALED, CAPPED, False)
        hit = key >= least
        if CUT:
            equal = key == least
            many, before = place(equal)
            hit = hit & ((key > least) | (equals + before < room))
            equals += many
        if tl.max(tl.max(key, 1), 0) >= least:
            many, before = place(hit)
            where = found + before
            store = hit & (where < M)
            tl.store(values + where, number(key), mask=store)
            tl.store(columns + where, n * (L * J) + at - skew, mask=store)
            found += many
    return found


@triton.jit
def top_kernel(
    raw, values, columns, counts, V, stride, lead, k, scale, cap,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, LINE: tl.constexpr,
    L: tl.constexpr, J: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """`values` and `columns` (N, M) of each row: at least its k largest, in the order of the columns; and how many."""
    row = tl.program_id(0)
    first, skew = boundary(row, stride, lead, LINE)
    raw += first
    end = skew + V
    best = largest_of_lanes(raw, skew, end, scale, cap, SCALED, CAPPED, L, J)
    low = tl.maximum(tl.min(best, 0), -2147483647).to(tl.int64)  # a lane may have seen no column
    high = tl.max(best, 0).to(tl.int64) + 1
    while high - low > 1:  # the largest number that k lanes reach
        middle = (low + high) >> 1
        reached = tl.sum((best >= middle).to(tl.int32), 0) >= k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    values += row.to(tl.int64) * M
    columns += row.to(tl.int64) * M
    found = write(raw, values, columns, low.to(tl.int32), 0, M, skew, end, scale, cap, False, SCALED, CAPPED, L, J)
    tl.store(counts + row, found)


@triton.jit
def cut_kernel(
    raw, values, columns, counts, V, stride, lead, k, scale, cap,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, LINE: tl.constexpr,
    L: tl.constexpr, J: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The same of rows that had more columns than there is room for: exactly the k largest."""
    row = tl.program_id(0)
    if tl.load(counts + row) > M:
        first, skew = boundary(row, stride, lead, LINE)
        raw += first
        end = skew + V
        values += row.to(tl.int64) * M
        columns += row.to(tl.int64) * M
        low = tl.full([], -2147483648, tl.int64)
        high = tl.full([], 2147483648, tl.int64)
        while high - low > 1:
            middle = (low + high) >> 1
            reached = above(raw, middle.to(tl.int32), skew, end, scale, cap, SCALED, CAPPED, L, J) >= k
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle)
        least = low.to(tl.int32)
        room = k - above(raw, least + 1, skew, end, scale, cap, SCALED, CAPPED, L, J)
        tl.store(values + tl.arange(0, M), -float("inf"))
        tl.store(columns + tl.arange(0, M), 16777216)
        tl.debug_barrier()
        write(raw, values, columns, least, room, M, skew, end, scale, cap, True, SCALED, CAPPED, L, J)
