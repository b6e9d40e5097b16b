# mypy: ignore-errors
"""The facts sweep: each lane keeps a partial, and lanes merge once, at the end.

Dimension key:  K loads in flight   L lanes (threads)   J columns of a lane in each load   P parts   N rows

A block of K x L x J columns is reduced inside the thread to (L,) vectors, so nothing in the loop waits for another
warp; see running_sums.py.

A program sweeps one part of one row, `width` columns, a multiple of the block.  Its results go to `out` (F, P, N):
maximum, target, total and its count, argmax, then S, X, Q for each temperature; those not asked for are left out.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import FLOOR, LOG2E, LOWEST, boundary, edges, logits, temperature
from headloss.backends.triton.kernels.running_sums import absorb, merge_lanes, rebase, risen


@triton.jit
def fetch(raw, at, go, stop, MASKED: tl.constexpr, K: tl.constexpr, POLICY: tl.constexpr):
    """Load a block as it is stored, K x (L, J) from column `at` (L, J) on; MASKED: only vectors from `go` to `stop`."""
    x = ()
    for k in tl.static_range(K):
        here = at + k * (at.shape[0] * at.shape[1])
        if MASKED:
            x = x + (tl.load(raw + here, mask=(here >= go) & (here < stop), other=0.0),)
        else:
            x = x + (tl.load(raw + here, eviction_policy=POLICY),)
    return x


@triton.jit
def higher(z, m, best, block, BEST: tl.constexpr):
    """The lanes' maxima (L,), those of a block z, K x (L, J), included, and the load in which they first occurred."""
    for n in tl.static_range(len(z)):
        m, best = risen(tl.max(z[n], axis=1), m, best, block * len(z) + n, BEST)
    return m, best


@triton.jit
def take_in(z, m, best, block, sums, c, F: tl.constexpr):
    """Add a block z, K x (L, J), to the lanes' sums (L,)."""
    new, best = higher(z, m, best, block, F.BEST)
    return new, best, absorb(z, z, m, m, new, new, sums, c, c, False, False, F)


@triton.jit
def id_column(ids, k):
    """The column of the k-th id, counted as columns are here; beyond the last id, no column at all."""
    return tl.load(ids[0] + k, mask=k < ids[1], other=4611686018427387904) + ids[2]


@triton.jit
def without_ids(z, at, block_end, ids, k):
    """A block z, K x (L, J) from column `at` on, -inf at the ids, and the first id beyond it."""
    column = id_column(ids, k)
    while column < block_end:
        here = column.to(tl.int32)
        left = ()
        for n in tl.static_range(len(z)):
            left = left + (tl.where(at + n * (at.shape[0] * at.shape[1]) == here, -float("inf"), z[n]),)
        z = left
        k += 1
        column = id_column(ids, k)
    return z, k


@triton.jit
def centre_of(raw, skew, low, high, how, F: tl.constexpr):
    """What a total is relative to: any logit of the row is near enough to keep the digits of a sum."""
    z = logits(tl.load(raw + tl.maximum(low, skew), mask=low < high, other=0.0), how[0], how[1], F.SCALED, F.CAPPED)
    return tl.where(tl.abs(z) < -LOWEST, z, 0.0)


@triton.jit
def read(raw, skew, low, high, c, how, ids, F: tl.constexpr):
    """Each lane's sums over its columns from `low` to `high`; with IDS, over those that are not ids.

    `ids`: a pointer to the row's ids, which are sorted; how many there are; and the offset from an id to its column.
    The total is over all columns.
    """
    K: tl.constexpr = F.K
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    IDS: tl.constexpr = F.IDS
    BLOCK: tl.constexpr = K * L * J
    sums = ()
    for _i in tl.static_range(3 * len(c)):
        sums = sums + (tl.zeros([L], tl.float32),)
    m = tl.full([L], LOWEST, tl.float32)
    best = tl.zeros([L], tl.int32)
    total = tl.zeros([L], tl.float32)
    centre = 0.0
    if F.TOTAL:
        centre = centre_of(raw, skew, low, high, how, F)

    j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    head = (low < skew).to(tl.int32)
    first = low // BLOCK + head
    last = tl.maximum(high // BLOCK, first)
    k = 0
    if IDS:
        all_k = tl.arange(0, IDS)
        columns = id_column(ids, all_k)
        k = tl.sum((columns < first * BLOCK).to(tl.int32), axis=0)
    for block in range(first, last):
        at = block * BLOCK + j
        x = fetch(raw, at, 0, 0, False, K, "evict_first")
        z = ()
        for n in tl.static_range(K):
            z = z + (logits(x[n], how[0], how[1], F.SCALED, F.CAPPED),)
            if F.TOTAL:
                total += tl.sum(z[n] - centre, axis=1)
        if IDS:
            z, k = without_ids(z, at, (block + 1) * BLOCK, ids, k)
        m, best, sums = take_in(z, m, best, block, sums, c, F)
    go, stop = edges(skew, high, F.VEC)
    for edge in range(1 - head, 1 + (high > last * BLOCK).to(tl.int32)):  # the first block if partial, and the last
        block = tl.where(edge == 0, 0, last)
        at = block * BLOCK + j
        x = fetch(raw, at, go, stop, True, K, "evict_first")
        z = ()
        for n in tl.static_range(K):
            here = at + n * (L * J)
            good = (here >= skew) & (here < high)
            value = logits(x[n], how[0], how[1], F.SCALED, F.CAPPED)
            if F.TOTAL:
                total += tl.sum(tl.where(good, value - centre, 0.0), axis=1)
            z = z + (tl.where(good, value, -float("inf")),)
        if IDS:
            k = tl.sum((columns < block * BLOCK).to(tl.int32), axis=0)
            z, k = without_ids(z, at, (block + 1) * BLOCK, ids, k)
        m, best, sums = take_in(z, m, best, block, sums, c, F)
    return m, best, sums, tl.sum(total, axis=0), centre


@triton.jit
def column_of(
    m, best, raw, skew, high, scale, cap,
    VEC: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """The lowest column with the maximum of all lanes: it is in the lowest of the loads in which they found it."""
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    top = tl.max(m, axis=0)
    load = tl.min(tl.where(m == top, best, 2147483647), axis=0)
    at = tl.where(top > LOWEST, load, 0) * (L * J) + (tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :])
    go, stop = edges(skew, high, VEC)
    (x,) = fetch(raw, at, go, stop, True, 1, "evict_first")
    match = (at >= skew) & (at < high) & (logits(x, scale, cap, SCALED, CAPPED) == top)
    return tl.min(tl.min(tl.where(match, at, 2147483647), axis=1), axis=0)


@triton.jit
def put(x, out, step, WANTED: tl.constexpr, here=None):
    """Store a number, or those `here`, if WANTED; returns the pointer to the next place."""
    if WANTED:
        tl.store(out, x, mask=here)
        out += step
    return out


@triton.jit(
    do_not_specialize=["N", "V", "parts", "width", "stride", "lead", "target_stride", "start"],
    do_not_specialize_on_alignment=["target"],
)
def sums_kernel(
    raw, target, out, temperatures, N, V, parts, width, stride, lead, target_stride, start, how, F: tl.constexpr
):  # fmt: skip
    if F.CHAINED:  # launched while the kernel before still ran; the same goes for the merge
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    begin, skew = boundary(row, stride, lead, F.LINE)
    raw += begin
    low = part * width
    high = tl.minimum(low + width, skew + V)

    if F.TARGET:
        wanted = tl.load(target + row.to(tl.int64) * target_stride)
    c = ()
    for i in tl.static_range(len(temperatures)):
        c = c + (tl.div_rn(LOG2E, temperature(temperatures[i], row, F.PER_ROW[i])),)
    m, best, sums, total, centre = read(raw, skew, low, high, c, how, (), F)

    if F.TARGET:  # not before the loop, whose loads would wait for the target's index
        column = (wanted - start + skew).to(tl.int32)
        here = (column >= tl.maximum(low, skew)) & (column < high)
        picked = tl.load(raw + column, mask=here, other=-float("inf"))

    # merge the lanes
    top = tl.max(m, axis=0)
    some = top > LOWEST  # else every column is -inf: the identity, except for `total`
    out += part.to(tl.int64) * N + row
    step = N.to(tl.int64) * parts
    out = put(tl.where(some, top, -float("inf")), out, step, True)
    origin = tl.where(some, top, 0.0)
    if F.TARGET:
        z = logits(picked, how[0], how[1], F.SCALED, F.CAPPED)
        out = put(tl.where(here, z - origin, -float("inf")), out, step, True)
    if F.TOTAL:
        count = tl.maximum(high - tl.maximum(low, skew), 0).to(tl.float32)
        out = put(total + count * (centre - origin), out, step, True)
        out = put(count, out, step, True)
    if F.BEST:
        found = column_of(m, best, raw, skew, high, how[0], how[1], F.VEC, F.SCALED, F.CAPPED, F)
        out = put((tl.where(some, found, tl.maximum(low, skew)) - skew + start).to(tl.float32), out, step, True)
    merged = merge_lanes(m, top, sums, c, 3, False, F)
    for i in tl.static_range(len(c)):
        out = put(merged[3 * i], out, step, True)
        out = put(merged[3 * i + 1], out, step, F.WANT_X[i])
        out = put(merged[3 * i + 2], out, step, F.WANT_Q[i])


@triton.jit
def moved(m):
    """The maximum of all parts, and how far each part's own (P, R) is from it; a part without columns moves no sums."""
    top = tl.max(m, axis=0)
    return top, tl.where(m == -float("inf"), -float("inf"), m - top[None, :])


@triton.jit
def rebased(shift, T, S, X, Q):
    """`facts.merge`: the sums of a part, relative to the maximum of all; `shift` is its own maximum minus that."""
    d = tl.maximum(shift / T, FLOOR)
    return rebase(S, X, Q, d, tl.exp2(d * LOG2E), True, True)


@triton.jit
def rebased_total(shift, total, count):
    return tl.where(count > 0, total + count * shift, 0.0)


@triton.jit
def row_temperature(given, row, good, PER_ROW: tl.constexpr):
    """One temperature of rows (R,), for parts (P, R) of each."""
    if PER_ROW:
        return tl.load(given + row, mask=good, other=1.0).to(tl.float32)[None, :]
    else:
        return temperature(given, row, False)


@triton.jit
def part_sums(partial, step, here, WANTED: tl.constexpr):
    """Load the next sum of each part, or 0 if it is not WANTED; also returns the pointer to the one after it."""
    x = tl.zeros(here.shape, tl.float32)
    if WANTED:
        x = tl.load(partial, mask=here, other=0.0)
        partial += step
    return x, partial


@triton.jit(
    do_not_specialize=["N", "V", "parts", "stride", "lead", "target_stride", "start"],
    do_not_specialize_on_alignment=["raw", "target"],
)
def merge_kernel(
    raw, target, partial, out, temperatures, N, V, parts, stride, lead, target_stride, start, how, F: tl.constexpr
):  # fmt: skip
    """`facts.merge` in one launch: (F, P, N) -> (F, N), for parts that follow each other in the vocabulary.

    The target's logit is picked here and not in the sweep, because it can be picked while the sweep still runs.
    """
    PADDED: tl.constexpr = F.PADDED
    ROWS: tl.constexpr = F.ROWS
    part = tl.arange(0, PADDED)[:, None]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    good = row < N
    here = (part < parts) & good[None, :]
    partial += part * N + row[None, :]
    out += row
    step = N.to(tl.int64) * parts
    if F.TARGET:
        column = tl.load(target + row * target_stride, mask=good, other=-1) - start
        has_target = (column >= 0) & (column < V) & good
        x = tl.load(raw + row * stride + lead + column, mask=has_target, other=0.0)
        z = logits(x, how[0], how[1], F.SCALED, F.CAPPED)
    if F.CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # every load before the first store, so that they do not wait for each other
    m = tl.load(partial, mask=here, other=-float("inf"))
    partial += step
    if F.TOTAL:
        total, partial = part_sums(partial, step, here, True)
        count, partial = part_sums(partial, step, here, True)
    if F.BEST:
        best = tl.load(partial, mask=here, other=float("inf"))
        partial += step
    T, sums = (), ()
    for i in tl.static_range(len(temperatures)):
        T = T + (row_temperature(temperatures[i], row, good, F.PER_ROW[i]),)
        S, partial = part_sums(partial, step, here, True)
        X, partial = part_sums(partial, step, here, F.WANT_X[i])
        Q, partial = part_sums(partial, step, here, F.WANT_Q[i])
        sums = sums + (S, X, Q)

    top, shift = moved(m)
    out = put(top, out, N, True, good)
    if F.TARGET:
        origin = tl.where(top == -float("inf"), 0.0, top)
        out = put(tl.where(has_target, z - origin, -float("inf")), out, N, True, good)
    if F.TOTAL:
        out = put(tl.sum(rebased_total(shift, total, count), axis=0), out, N, True, good)
        out = put(tl.sum(count, axis=0), out, N, True, good)
    if F.BEST:
        out = put(tl.min(tl.where(m == top[None, :], best, float("inf")), axis=0), out, N, True, good)
    for i in tl.static_range(len(temperatures)):
        s, x, q = rebased(shift, T[i], sums[3 * i], sums[3 * i + 1], sums[3 * i + 2])
        out = put(tl.sum(s, axis=0), out, N, True, good)
        out = put(tl.sum(x, axis=0), out, N, F.WANT_X[i], good)
        out = put(tl.sum(q, axis=0), out, N, F.WANT_Q[i], good)
