# mypy: ignore-errors
"""Kernels for sparse teachers: they merge repeated ids, sum the tail's own softmax, and store the gradient at the ids.

Dimension key:  N rows   K ids per row   P parts   L lanes   J columns of a lane

The tail is swept like the row (`sums.py`), without the columns that are ids: 1 - sum p would lose its digits.  The ids
are sorted, so a program walks them along with its blocks, and a block without ids costs one comparison.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import LOG2E, LOWEST, boundary, temperature
from headloss.backends.triton.kernels.running_sums import merge_lanes
from headloss.backends.triton.kernels.sums import read

ONE = tl.constexpr(1.01)  # the most that the probabilities of a row may sum to, in half precision


@triton.jit(do_not_specialize=["N", "V", "parts", "width", "stride", "lead", "start", "count"])
def tail_kernel(raw, ids, out, temperatures, N, V, parts, width, stride, lead, start, count, how, F: tl.constexpr):
    """Store the tail's maximum and, per temperature, S to `out` (F, P, N); `ids` (N, count) are sorted in each row."""
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    begin, skew = boundary(row, stride, lead, F.LINE)
    high = tl.minimum(part * width + width, skew + V)
    c = ()
    for i in tl.static_range(len(temperatures)):
        c = c + (tl.div_rn(LOG2E, temperature(temperatures[i], row, F.PER_ROW[i])),)
    named = (ids + row.to(tl.int64) * count, count, skew.to(tl.int64) - start)
    m, _best, sums, _total, _centre = read(raw + begin, skew, part * width, high, c, how, named, F)
    top = tl.max(m, axis=0)
    out += part.to(tl.int64) * N + row
    step = N.to(tl.int64) * parts
    tl.store(out, tl.where(top > LOWEST, top, -float("inf")))
    merged = merge_lanes(m, top, sums, c, 3, False, F)
    for i in tl.static_range(len(c)):
        tl.store(out + (i + 1) * step, merged[3 * i])


@triton.jit(do_not_specialize=["count", "vocab"], do_not_specialize_on_alignment=["valid", "wrong"])
def merge_ids_kernel(
    ids, logprobs, valid, out_ids, out_logprobs, out_sorted, wrong, count, vocab,
    VALID: tl.constexpr, CHECK: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """The first of several equal ids takes all their probability; the others, and the ids of ignored rows, become -1.

    `out_sorted` receives the ids as they are, in order.  CHECK: `wrong` receives an id that is neither a column nor -1,
    and how many ids there are in a row whose values must be probabilities, not logarithms.
    """
    row = tl.program_id(0).to(tl.int64)
    ids += row * count
    logprobs += row * count
    k = tl.arange(0, IDS)
    is_id = k < count
    live = tl.full([], 1, tl.int1)
    if VALID:
        live = tl.load(valid + row) != 0
    own = tl.where(live, tl.load(ids + k, mask=is_id, other=-1), -1)
    logprob = tl.load(logprobs + k, mask=is_id, other=-float("inf")).to(tl.float32)
    if CHECK:
        worst = tl.max(tl.where((own < -1) | (own >= vocab), own, -1 << 63), axis=0)
        if worst > -1 << 63:
            tl.store(wrong, worst)
        named = (own >= 0).to(tl.int32)
        inside = ((logprob > 0) & (logprob <= 1)).to(tl.int32) * named
        many, mass = tl.sum(named, axis=0), tl.sum(tl.where(named > 0, logprob, 0.0), axis=0)
        if (many > 1) & (tl.sum(inside, axis=0) == many) & (mass <= ONE):
            tl.store(wrong + 1, many.to(tl.int64))
    repeats = tl.zeros([IDS], tl.int1)
    before = tl.zeros([IDS], tl.int32)
    for i in range(count):
        other = tl.where(live, tl.load(ids + i), -1)
        same = own == other
        repeats = repeats | (same & (i < k))
        before += ((other < own) | (same & (i < k))).to(tl.int32)
    if tl.max((repeats & (own >= 0)).to(tl.int32), axis=0) > 0:  # rare: most rows name every id once
        most = logprob
        for i in range(count):
            most = tl.maximum(most, tl.where(own == tl.load(ids + i), tl.load(logprobs + i), -float("inf")))
        origin = tl.where(most == -float("inf"), 0.0, most)
        total = tl.zeros([IDS], tl.float32)
        for i in range(count):
            same = own == tl.load(ids + i)
            total += tl.where(same, tl.exp2((tl.load(logprobs + i) - origin) * LOG2E), 0.0)
        logprob = origin + tl.log(total)
    leads = (own >= 0) & (repeats == 0)
    tl.store(out_ids + row * count + k, tl.where(leads, own, -1), mask=is_id)
    tl.store(out_logprobs + row * count + k, tl.where(leads, logprob, -float("inf")), mask=is_id)
    tl.store(out_sorted + row * count + before, own, mask=is_id)


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


@triton.jit(do_not_specialize=["V", "stride", "across", "start", "count"], do_not_specialize_on_alignment=["out"])
def store_kernel(out, ids, values, V, stride, across, start, count, IDS: tl.constexpr):
    """Store values at the columns of a row that are ids; equal ids hold equal values, other shards' ids are skipped."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, IDS)
    column = tl.load(ids + row * count + k, mask=k < count, other=-1) - start
    here = (column >= 0) & (column < V)
    x = tl.load(values + row * count + k, mask=k < count, other=0.0)
    tl.store(out + row * stride + column * across, x.to(out.dtype.element_ty), mask=here)
