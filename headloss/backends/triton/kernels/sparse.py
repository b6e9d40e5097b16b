# mypy: ignore-errors
"""What a sparse teacher needs: each id once, the tail's own softmax, and the gradient at the ids.

Dimension key:  N rows   K ids per row   P parts   L lanes   J columns of a lane

The tail is swept like the row (`sums.py`), without the columns that are ids: 1 - sum p would lose its digits.  The ids
come sorted, so a program walks them along with its blocks, and a block that has none pays one comparison.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import LOG2E, LOWEST, boundary, logits, temperature
from headloss.backends.triton.kernels.sums import absorb, fetch


@triton.jit
def next_id(ids, k, count, offset):
    """Where the k-th id stands, counted as columns are here; beyond the last: nowhere."""
    return tl.load(ids + k, mask=k < count, other=4611686018427387904) + offset


@triton.jit
def without_ids(z, at, block_end, ids, k, count, offset):
    """A block z, K x (L, J) from column `at` on, -inf at the ids, and the first id beyond it."""
    column = next_id(ids, k, count, offset)
    while column < block_end:
        here = column.to(tl.int32)
        left = ()
        for n in tl.static_range(len(z)):
            left = left + (tl.where(at + n * (at.shape[0] * at.shape[1]) == here, -float("inf"), z[n]),)
        z = left
        k += 1
        column = next_id(ids, k, count, offset)
    return z, k


@triton.jit
def read_without(
    raw, ids, count, offset, skew, low, high, c, scale, cap, TAIL: tl.constexpr,
    TOTAL: tl.constexpr, ARGMAX: tl.constexpr, WANT_X: tl.constexpr, WANT_Q: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, VEC: tl.constexpr, IDS: tl.constexpr, POLICY: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """What each lane has seen of the columns from `low` to `high`; with TAIL, of those that are no ids.

    `ids` (count,) are sorted; `offset` leads from an id to its column.  The total is that of all columns.
    """
    BLOCK: tl.constexpr = K * L * J
    S, X, Q = (), (), ()
    for _i in tl.static_range(len(c)):
        S = S + (tl.zeros([L], tl.float32),)
        X = X + (tl.zeros([L], tl.float32),)
        Q = Q + (tl.zeros([L], tl.float32),)
    m = tl.full([L], LOWEST, tl.float32)
    best = tl.zeros([L], tl.int32)
    total = tl.zeros([L], tl.float32)
    centre = 0.0
    if TOTAL:  # any logit of the row is near enough to keep the digits of a sum
        centre = logits(tl.load(raw + tl.maximum(low, skew), mask=low < high, other=0.0), scale, cap, SCALED, CAPPED)
        centre = tl.where(tl.abs(centre) < -LOWEST, centre, 0.0)
    j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    head = (low < skew).to(tl.int32)
    first = low // BLOCK + head
    last = tl.maximum(high // BLOCK, first)
    k = 0
    if TAIL:
        all_k = tl.arange(0, IDS)
        columns = tl.load(ids + all_k, mask=all_k < count, other=4611686018427387904) + offset
        k = tl.sum((columns < first * BLOCK).to(tl.int32), axis=0)
    for block in range(first, last):
        at = block * BLOCK + j
        x = fetch(raw, at, 0, 0, False, K, POLICY)
        z = ()
        for n in tl.static_range(K):
            z = z + (logits(x[n], scale, cap, SCALED, CAPPED),)
            if TOTAL:
                total += tl.sum(z[n] - centre, axis=1)
        if TAIL:
            z, k = without_ids(z, at, (block + 1) * BLOCK, ids, k, count, offset)
        m, best, S, X, Q = absorb(z, m, best, block, S, X, Q, c, WANT_X, WANT_Q, ARGMAX)
    go = tl.multiple_of(skew // VEC * VEC, VEC)
    stop = tl.multiple_of((high + VEC - 1) // VEC * VEC, VEC)
    for edge in range(1 - head, 1 + (high > last * BLOCK).to(tl.int32)):
        block = tl.where(edge == 0, 0, last)
        at = block * BLOCK + j
        x = fetch(raw, at, go, stop, True, K, "evict_first")
        z = ()
        for n in tl.static_range(K):
            here = at + n * (L * J)
            good = (here >= skew) & (here < high)
            value = logits(x[n], scale, cap, SCALED, CAPPED)
            if TOTAL:
                total += tl.sum(tl.where(good, value - centre, 0.0), axis=1)
            z = z + (tl.where(good, value, -float("inf")),)
        if TAIL:
            k = tl.sum((columns < block * BLOCK).to(tl.int32), axis=0)
            z, k = without_ids(z, at, (block + 1) * BLOCK, ids, k, count, offset)
        m, best, S, X, Q = absorb(z, m, best, block, S, X, Q, c, WANT_X, WANT_Q, ARGMAX)
    return m, best, S, X, Q, tl.sum(total, axis=0), centre


@triton.jit(do_not_specialize=["N", "V", "parts", "width", "stride", "lead", "start", "count"])
def tail_kernel(
    raw, ids, out, temperatures,
    N, V, parts, width, stride, lead, start, count, scale, cap,
    PER_ROW: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, LINE: tl.constexpr, VEC: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, J: tl.constexpr, IDS: tl.constexpr, OFF: tl.constexpr,
):  # fmt: skip
    """The tail's maximum and, for each temperature, S, to `out` (F, P, N); `ids` (N, count) are sorted in each row."""
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    begin, skew = boundary(row, stride, lead, LINE)
    high = tl.minimum(part * width + width, skew + V)
    c = ()
    for i in tl.static_range(len(temperatures)):
        c = c + (tl.div_rn(LOG2E, temperature(temperatures[i], row, PER_ROW[i])),)
    m, _best, S, _X, _Q, _total, _centre = read_without(
        raw + begin, ids + row.to(tl.int64) * count, count, skew.to(tl.int64) - start, skew, part * width, high, c,
        scale, cap, True, False, False, OFF, OFF, SCALED, CAPPED, VEC, IDS, "evict_first", K, L, J,
    )  # fmt: skip
    top = tl.max(m, axis=0)
    out += part.to(tl.int64) * N + row
    step = N.to(tl.int64) * parts
    tl.store(out, tl.where(top > LOWEST, top, -float("inf")))
    for i in tl.static_range(len(c)):
        tl.store(out + (i + 1) * step, tl.sum(tl.exp2((m - top) * c[i]) * S[i], axis=0))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["valid"])
def merge_ids_kernel(
    ids, logprobs, valid, out_ids, out_logprobs, out_sorted, count, VALID: tl.constexpr, IDS: tl.constexpr
):  # fmt: skip
    """The first place of a repeated id takes all its probability; the others, and ignored rows, name none.

    `out_sorted` takes the ids as they are, in order.
    """
    row = tl.program_id(0).to(tl.int64)
    ids += row * count
    logprobs += row * count
    k = tl.arange(0, IDS)
    there = k < count
    live = tl.full([], 1, tl.int1)
    if VALID:
        live = tl.load(valid + row) != 0
    own = tl.where(live, tl.load(ids + k, mask=there, other=-1), -1)
    most = tl.full([IDS], -float("inf"), tl.float32)
    repeats = tl.zeros([IDS], tl.int1)
    before = tl.zeros([IDS], tl.int32)
    for i in range(count):
        other = tl.where(live, tl.load(ids + i), -1)
        same = own == other
        most = tl.maximum(most, tl.where(same, tl.load(logprobs + i), -float("inf")))
        repeats = repeats | (same & (i < k))
        before += ((other < own) | (same & (i < k))).to(tl.int32)
    origin = tl.where(most == -float("inf"), 0.0, most)
    total = tl.zeros([IDS], tl.float32)
    for i in range(count):
        same = own == tl.where(live, tl.load(ids + i), -1)
        total += tl.where(same, tl.exp2((tl.load(logprobs + i) - origin) * LOG2E), 0.0)
    leads = (own >= 0) & (repeats == 0)
    tl.store(out_ids + row * count + k, tl.where(leads, own, -1), mask=there)
    tl.store(out_logprobs + row * count + k, tl.where(leads, origin + tl.log(total), -float("inf")), mask=there)
    tl.store(out_sorted + row * count + before, own, mask=there)


@triton.jit(do_not_specialize=["count", "others"])
def gather_kernel(at, ids, values, out, inside, count, others, IDS: tl.constexpr):
    """For each of `count` columns of a row, the sum of the values at the ids equal to it, and whether there are any."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, IDS)
    column = tl.load(at + row * count + k, mask=k < count, other=-1)
    total = tl.zeros([IDS], tl.float32)
    found = tl.zeros([IDS], tl.int1)
    for i in range(others):
        same = column == tl.load(ids + row * others + i)
        total += tl.where(same, tl.load(values + row * others + i), 0.0)
        found = found | same
    tl.store(out + row * count + k, total, mask=k < count)
    tl.store(inside + row * count + k, found, mask=k < count)


@triton.jit(do_not_specialize=["V", "stride", "apart", "start", "count"], do_not_specialize_on_alignment=["out"])
def store_kernel(out, ids, values, V, stride, apart, start, count, IDS: tl.constexpr):
    """Values to the columns of a row that are ids; equal ids hold equal values, and those of other shards are left."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, IDS)
    column = tl.load(ids + row * count + k, mask=k < count, other=-1) - start
    here = (column >= 0) & (column < V)
    x = tl.load(values + row * count + k, mask=k < count, other=0.0)
    tl.store(out + row * stride + column * apart, x.to(out.dtype.element_ty), mask=here)
