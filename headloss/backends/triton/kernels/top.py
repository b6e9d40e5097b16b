# mypy: ignore-errors
"""Kernels that find the K largest columns of a row, in order.

Dimension key:  L lanes   J columns of a lane in each load   B loads of a group   G groups, or more   M keys at most

A program reads a row once, and keeps the largest logit of each group, the columns that one lane reads in B loads.  The
K-th largest of those is not above the K-th largest of the row, and with many more groups than K few other columns lie
between the two.  So only groups that reach it are read again, and the columns in them that do are stored as keys that
sort by value and, if equal, by the lower column.  If there are more than M of those, as in a row of equal logits, the
K-th largest of the row itself is found by bisection, and ties go to the lower columns.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import boundary, logits


@triton.jit
def ordered(z):
    """A float as an integer that compares the same; 0 and -0 are equal."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def number(key):
    """The float of such an integer."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def sortable(key, column):
    """A number's key and its column as one integer: larger numbers come first and, among equals, lower columns."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)  # NaN is the largest, as it is for `ordered`


@triton.jit
def keys(raw, at, skew, end, how, MASKED: tl.constexpr, F: tl.constexpr):
    """The keys of some columns of a row; columns outside the row sort below -inf."""
    if MASKED:
        here = (at >= skew) & (at < end)
        z = logits(tl.load(raw + at, mask=here, other=0.0), how[0], how[1], F.SCALED, F.CAPPED)
        return tl.where(here, ordered(z), -2147483648)
    else:
        return ordered(logits(tl.load(raw + at), how[0], how[1], F.SCALED, F.CAPPED))


@triton.jit
def is_edge(n, skew, end, BLOCK: tl.constexpr):
    """Whether a block reaches beyond the row."""
    return (n * BLOCK < skew) | ((n + 1) * BLOCK > end)


@triton.jit
def largest_of_groups(raw, first, skew, end, how, MASKED: tl.constexpr, F: tl.constexpr):
    """The largest that each lane reads in B loads from `first` on."""
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    B: tl.constexpr = F.B
    best = tl.full([L], -float("inf"), tl.float32)
    for b in tl.static_range(B):
        at = first + b * (L * J) + tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
        if MASKED:
            here = (at >= skew) & (at < end)
            z = logits(tl.load(raw + at, mask=here, other=0.0), how[0], how[1], F.SCALED, F.CAPPED)
            z = tl.where(here, z, -float("inf"))
        else:
            z = logits(tl.load(raw + at), how[0], how[1], F.SCALED, F.CAPPED)
        best = larger(best, tl.reduce(z, 1, larger))
    return best


@triton.jit
def above(raw, least, skew, end, how, F: tl.constexpr):
    """How many columns are at least `least`."""
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    at = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    count = tl.zeros([L], tl.int32)
    for n in range(0, tl.cdiv(end, L * J)):
        key = keys(raw, n * (L * J) + at, skew, end, how, True, F)
        count += tl.sum((key >= least).to(tl.int32), 1)
    return tl.sum(count, 0)


@triton.jit
def place(hit):
    """How many of a block's columns are hits, and how many hits come before each column."""
    hit = hit.to(tl.int32)
    of_lane = tl.sum(hit, 1)
    before = tl.cumsum(of_lane, 0) - of_lane
    return tl.sum(of_lane, 0), before[:, None] + tl.cumsum(hit, 1) - hit


@triton.jit
def top_kernel(raw, found, counts, groups, V, stride, lead, k, how, F: tl.constexpr):
    """For each row, `found` (N, M) receives keys of at least its k largest columns, in any order; `counts`, how many.

    `groups`: (N, G), scratch memory for the largest of each group.  `how`: scale and cap.
    """
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    B: tl.constexpr = F.B
    G: tl.constexpr = F.G
    M: tl.constexpr = F.M
    row = tl.program_id(0)
    first, skew = boundary(row, stride, lead, F.LINE)
    raw += first
    groups += row.to(tl.int64) * G
    found += row.to(tl.int64) * M
    end = skew + V
    blocks = tl.cdiv(end, L * J * B)
    for n in range(0, blocks):
        start = n * (L * J * B)
        if is_edge(n, skew, end, L * J * B):
            best = largest_of_groups(raw, start, skew, end, how, True, F)
        else:
            best = largest_of_groups(raw, start, skew, end, how, False, F)
        tl.store(groups + n * L + tl.arange(0, L), ordered(best))
    tl.debug_barrier()
    group = tl.arange(0, G)
    most = tl.load(groups + group, group < blocks * L, -2147483648)
    low = tl.full([], -2147483647, tl.int64)
    high = tl.max(most, 0).to(tl.int64) + 1
    while high - low > 1:  # the largest number that k groups reach
        middle = (low + high) >> 1
        reached = tl.sum((most >= middle).to(tl.int32), 0) >= k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    least = low.to(tl.int32)
    reach = (most >= least).to(tl.int32)
    tl.debug_barrier()  # every warp has read the groups
    tl.store(groups + tl.cumsum(reach, 0) - 1, group, mask=reach > 0)
    tl.debug_barrier()
    W: tl.constexpr = B * J
    T: tl.constexpr = 2048 // W
    columns = tl.arange(0, W)
    total = 0
    for n in range(0, tl.sum(reach, 0), T):
        nth = n + tl.arange(0, T)
        own = nth < tl.sum(reach, 0)
        g = tl.load(groups + nth, own, 0)
        at = (g // L * (L * J * B) + g % L * J)[:, None] + (columns // J * (L * J) + columns % J)[None, :]
        key = keys(raw, at, skew, tl.where(own, end, 0)[:, None], how, True, F)
        hit = key >= least
        many, before = place(hit)
        where = total + before
        tl.store(found + where, sortable(key, at - skew), mask=hit & (where < M))
        total += many
    tl.store(counts + row, total)


@triton.jit
def cut_kernel(raw, found, counts, V, stride, lead, k, how, F: tl.constexpr):
    """The same for rows with more than M such columns: exactly the k largest."""
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    M: tl.constexpr = F.M
    row = tl.program_id(0)
    if tl.load(counts + row) > M:
        first, skew = boundary(row, stride, lead, F.LINE)
        raw += first
        end = skew + V
        found += row.to(tl.int64) * M
        low = tl.full([], -2147483648, tl.int64)
        high = tl.full([], 2147483648, tl.int64)
        while high - low > 1:
            middle = (low + high) >> 1
            reached = above(raw, middle.to(tl.int32), skew, end, how, F) >= k
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle)
        least = low.to(tl.int32)
        remaining = k - above(raw, least + 1, skew, end, how, F)
        at = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
        total = 0
        equals = 0
        for n in range(0, tl.cdiv(end, L * J)):
            key = keys(raw, n * (L * J) + at, skew, end, how, True, F)
            many_equal, before_equal = place(key == least)
            hit = (key > least) | ((key == least) & (equals + before_equal < remaining))
            equals += many_equal
            many, before = place(hit)
            tl.store(found + total + before, sortable(key, n * (L * J) + at - skew), mask=hit)
            total += many
        tl.store(counts + row, k)


@triton.jit
def order_kernel(found, counts, values, columns, k, M: tl.constexpr):
    """The k largest of a row's keys, sorted: values and columns, (N, k)."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, M)
    key = tl.load(found + row * M + m, m < tl.load(counts + row), -9223372036854775808)
    key = tl.sort(key, descending=True)
    tl.store(values + row * k + m, number((key >> 32).to(tl.int32)), mask=m < k)
    tl.store(columns + row * k + m, 0x7FFFFFFF - (key & 0x7FFFFFFF), mask=m < k)
