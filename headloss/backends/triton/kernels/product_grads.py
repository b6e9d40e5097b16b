# mypy: ignore-errors
"""Prepares the products of the gradient: finds the rows that have a gradient, and computes their factors.

Dimension key:  C rows of a chunk   V columns of this rank   D hidden size

    live      count the rows whose coefficients are not all 0      move      move their rows of E to the front
    factor    the numbers per row that the products need           bend      turn E into p (a + b log p + e p)
    rank      sort their targets                                   scatter   add their share to the weight's gradient
    blank     write zeros for rows without a gradient

OVERLAP: a launch starts while the product before it still runs, as it needs nothing from it.  One extra program waits
for that product, so that later launches come after both.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import LN2
from headloss.backends.triton.kernels.pointwise import quick_log2
from headloss.backends.triton.kernels.product import whole_vectors


@triton.jit
def expm1(x):
    """e^x - 1 for x <= 0, exact to the last digits if x is small."""
    near = x * (1 / 9) + 1.0
    near = near * x * (1 / 8) + 1.0
    near = near * x * (1 / 7) + 1.0
    near = near * x * (1 / 6) + 1.0
    near = near * x * (1 / 5) + 1.0
    near = near * x * (1 / 4) + 1.0
    near = near * x * (1 / 3) + 1.0
    near = near * x * (1 / 2) + 1.0
    return tl.where(x > -0.5, near * x, tl.exp(x) - 1.0)


@triton.jit
def coefficients(a, b, e, c, y, row, here, F: tl.constexpr):
    """The coefficients of the gradient by logits / T: p_j (a + b log p_j + e p_j) + c + y 1[j = target]."""
    pull = tl.where(here, 0.0, 0.0)
    slant, square, constant, share = pull, pull, pull, pull
    if F.A:
        pull = tl.load(a + row, mask=here, other=0.0)
    if F.B:
        slant = tl.load(b + row, mask=here, other=0.0)
    if F.E:
        square = tl.load(e + row, mask=here, other=0.0)
    if F.C:
        constant = tl.load(c + row, mask=here, other=0.0)
    if F.Y:
        share = tl.load(y + row, mask=here, other=0.0)
    some = here & ((pull != 0) | (slant != 0) | (square != 0) | (constant != 0) | (share != 0))
    return pull, slant, square, constant, share, some


@triton.jit
def some_of(begin, first, end, listed, a, b, e, c, y, B: tl.constexpr, F: tl.constexpr):
    """The places from `begin` on that lie before `end`, which of them have a gradient, and how many before `first`."""
    place = begin + tl.arange(0, B)
    here = place < end
    row = place
    if F.LISTED:
        row = tl.load(listed + place, mask=here, other=0).to(tl.int32)
    _, _, _, _, _, some = coefficients(a, b, e, c, y, row, here, F)
    return place, here, some, tl.sum((some & (place < first)).to(tl.int32), 0)


@triton.jit(do_not_specialize_on_alignment=["listed", "count", "a", "b", "e", "c", "y"])
def live_kernel(count, listed, a, b, e, c, y, at, BM: tl.constexpr, B: tl.constexpr, R: tl.constexpr, F: tl.constexpr):
    """`counts`: rows with a gradient, rows of E to move, marked tiles.

    The rows with a gradient are to be the first of E: those further back move into gaps in front, from `sources` to
    `gaps`; `ranks` numbers them.  One program per B places, which counts over all places itself.
    """
    live, own = tl.load(count), tl.program_id(0) * B
    if own == 0:
        marked = 0
        for first in range(0, tl.cdiv(live, BM), R):
            i = first + tl.arange(0, R)
            bad = tl.load(at.far + i, mask=i < tl.cdiv(live, BM), other=0)
            tl.store(at.tiles + marked + tl.cumsum(bad, 0) - 1, i, mask=bad > 0)
            marked += tl.sum(bad, 0)
        tl.store(at.counts + 2, marked)
    alive, before, front = 0, 0, 0  # of all places, of those before `own`, of those that are to be the front
    for first in range(0, live, R):
        _, _, some, number = some_of(first, own, live, listed, a, b, e, c, y, R, F)
        alive += tl.sum(some.to(tl.int32), 0)
        before += number
    for first in range(0, alive, R):
        _, _, _, number = some_of(first, alive, live, listed, a, b, e, c, y, R, F)
        front += number
    place, here, some, _ = some_of(own, own, live, listed, a, b, e, c, y, B, F)
    gap = (here & (some == 0) & (place < alive)).to(tl.int32)
    tl.store(at.gaps + (own - before) + tl.cumsum(gap, 0) - 1, place, mask=gap > 0)
    back = (some & (place >= alive)).to(tl.int32)
    rank = tl.maximum(before - front, 0) + tl.cumsum(back, 0) - 1
    tl.store(at.sources + rank, place, mask=back > 0)
    tl.store(at.ranks + place, rank, mask=back > 0)
    if own == 0:
        tl.store(at.counts, alive)
        tl.store(at.counts + 1, alive - front)


@triton.jit(do_not_specialize=["stride"])
def move_kernel(e, counts, gaps, sources, stride, PROGRAMS: tl.constexpr, B: tl.constexpr):
    """Moves whole rows with their few columns of padding: whole vectors move five times as fast."""
    stride = whole_vectors(stride)
    V = stride
    parts = tl.cdiv(V, B)
    for i in tl.range(tl.program_id(0), tl.load(counts + 1) * parts, PROGRAMS):
        column = i % parts * B + tl.arange(0, B)
        source, gap = tl.load(sources + i // parts).to(tl.int64), tl.load(gaps + i // parts).to(tl.int64)
        x = tl.load(e + source * stride + column, mask=column < V)
        tl.store(e + gap * stride + column, x, mask=column < V)


@triton.jit(
    do_not_specialize=["D", "stride", "scaled_stride"],
    do_not_specialize_on_alignment=["listed", "count", "a", "b", "e", "c", "y"],
)
def factor_kernel(
    at, listed, count, a, b, e, c, y, scaled, D, stride, scaled_stride,
    TARGET: tl.constexpr, SCALED: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """One program per row that counts stores what the gradient products need of it, at the row's place in E."""
    D, stride, scaled_stride = whole_vectors(D), whole_vectors(stride), whole_vectors(scaled_stride)
    place = tl.program_id(0)
    live, alive = tl.load(count), tl.load(at.counts)
    if TARGET and place >= alive:
        tl.store(at.columns + place, 2147483647)
    pad = (place >= alive) & (place < tl.cdiv(alive, BK) * BK)  # rows are always read BK at a time
    if SCALED and pad:
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            zero = tl.zeros([BD], scaled.dtype.element_ty)
            tl.store(scaled + place.to(tl.int64) * scaled_stride + d, zero, mask=d < D)
    if place >= live:
        return
    row = place
    if F.LISTED:
        row = tl.load(listed + place).to(tl.int32)
    pull, slant, square, constant, share, some = coefficients(a, b, e, c, y, row, place >= 0, F)
    if some == 0:
        return
    to = place
    if place >= alive:
        to = tl.load(at.gaps + tl.load(at.ranks + place))
    slope = tl.load(at.multiplier + place) * LN2
    away = tl.load(at.reference + place) - tl.load(at.lse + place)
    factor = slope * pull * tl.exp2(away)
    if F.B or F.E:  # `bend` leaves the gradient itself in E
        into = at.bends + 5 * to
        tl.store(into, slope * pull)
        tl.store(into + 1, slope * slant * LN2)
        tl.store(into + 2, slope * square)
        tl.store(into + 3, away)
        tl.store(into + 4, tl.load(at.top + place) - tl.load(at.lse + place))
        factor = tl.full([], 1.0, tl.float32)
    tl.store(at.factors + to, factor)
    tl.store(at.constants + to, slope * constant)
    tl.store(at.numbers + to, row)
    if TARGET:
        own = tl.load(at.targets + place)
        log_p = tl.load(at.logprob + place)
        p = expm1(log_p)
        tl.store(at.columns + to, own)
        full = (share + pull) + pull * p
        if F.B or F.E:
            full += tl.exp(log_p) * (slant * log_p + square * tl.exp(log_p))
        tl.store(at.shares + to, tl.where(own >= 0, slope * full, 0.0))
    if SCALED:
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            x = tl.load(at.hidden + row.to(tl.int64) * stride + d, mask=d < D, other=0.0).to(tl.float32) * factor
            tl.store(scaled + to.to(tl.int64) * scaled_stride + d, x.to(scaled.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["stride"])
def bend_kernel(e, bends, counts, stride, PROGRAMS: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr):
    """E becomes the gradient by the logits, p (a + b log p + e p), in the rows that have one; if e is 0, p log p is 0.

    The largest e uses a log p from before e was rounded: if p is near 1, the gradient would be nothing but rounding.
    """
    stride = whole_vectors(stride)
    parts = tl.cdiv(stride, B)
    for i in tl.range(tl.program_id(0), tl.load(counts) * parts, PROGRAMS):
        at, column = i // parts, i % parts * B + tl.arange(0, B)
        pull, slant = tl.load(bends + 5 * at), tl.load(bends + 5 * at + 1)
        away, top = tl.load(bends + 5 * at + 3), tl.load(bends + 5 * at + 4)
        spot = e + at.to(tl.int64) * stride + column
        x = tl.load(spot, mask=column < stride, other=0.0).to(tl.float32)
        p = x * tl.exp2(away)
        log_e = tl.where(x >= 0.995 * tl.exp2(top - away), top - away, quick_log2(tl.maximum(x, 1.2e-38)))
        slope = tl.fma(slant, log_e, tl.fma(slant, away, pull))
        if SQUARE:
            slope += tl.load(bends + 5 * at + 2) * p
        tl.store(spot, (p * slope).to(tl.bfloat16), mask=column < stride)


@triton.jit(do_not_specialize=["rows"])
def rank_kernel(columns, keys, order, rows, B: tl.constexpr, R: tl.constexpr, OVERLAP: tl.constexpr):
    """Sort the columns, equal ones in the order of their rows: each row counts those that come before it.

    That is one comparison per pair of rows, which is nothing next to the product that runs at the same time.
    """
    if OVERLAP and tl.program_id(0) == tl.num_programs(0) - 1:
        tl.extra.cuda.gdc_wait()
        return
    first = tl.program_id(0) * B
    i = first + tl.arange(0, B)
    own = tl.load(columns + i, mask=i < rows, other=2147483647)
    near = first // R * R
    j = near + tl.arange(0, R)
    other = tl.load(columns + j, mask=j < rows, other=2147483647)
    earlier = (other[None, :] < own[:, None]) | ((other[None, :] == own[:, None]) & (j[None, :] < i[:, None]))
    before = earlier.to(tl.int32)  # summed once, at the end
    for at in range(0, near, R):
        other = tl.load(columns + at + tl.arange(0, R))
        before += (other[None, :] <= own[:, None]).to(tl.int32)
    for at in range(near + R, rows, R):
        j = at + tl.arange(0, R)
        other = tl.load(columns + j, mask=j < rows, other=2147483647)
        before += (other[None, :] < own[:, None]).to(tl.int32)
    place = tl.sum(before, 1)
    tl.store(keys + place, own, mask=i < rows)
    tl.store(order + place, i, mask=i < rows)


@triton.jit(do_not_specialize=["D", "stride", "out_stride", "rows", "V"])
def scatter_kernel(
    keys, order, numbers, shares, hidden, out, rows, V, D, stride, out_stride,
    R: tl.constexpr, BD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[key] += sum of share * hidden over the rows of that key: keys are sorted, and the first row of a run adds up
    the run.

    Most runs are one row; frequent tokens have hundreds, so the rest of a run is taken R rows at a time.
    """
    if OVERLAP and tl.program_id(0) == tl.num_programs(0) - 1:
        tl.extra.cuda.gdc_wait()
        return
    D, stride, out_stride = whole_vectors(D), whole_vectors(stride), whole_vectors(out_stride)
    parts = tl.cdiv(D, BD)
    i = tl.program_id(0) // parts
    key, place = tl.load(keys + i), tl.load(order + i)
    before = tl.load(keys + i - 1, mask=i > 0, other=-1)
    after = tl.load(keys + i + 1, mask=i + 1 < rows, other=-1)
    if (key >= V) | (key == before):
        return
    d = tl.program_id(0) % parts * BD + tl.arange(0, BD)
    into = out + key.to(tl.int64) * out_stride + d
    sums = tl.load(into, mask=d < D, other=0.0).to(tl.float32)
    row, share = tl.load(numbers + place).to(tl.int64), tl.load(shares + place)
    sums += tl.load(hidden + row * stride + d, mask=d < D, other=0.0).to(tl.float32) * share
    end = i + 1
    while after == key:
        end += R
        after = tl.load(keys + end, mask=end < rows, other=-1)
    for first in range(i + 1, end, R):
        rest = first + tl.arange(0, R)
        same = tl.load(keys + rest, mask=rest < rows, other=-1) == key
        places = tl.load(order + rest, mask=same, other=0)
        many, weights = tl.load(numbers + places, mask=same, other=0), tl.load(shares + places, mask=same, other=0.0)
        at = hidden + many.to(tl.int64)[:, None] * stride + d[None, :]
        x = tl.load(at, mask=same[:, None] & (d < D)[None, :], other=0.0)
        sums += tl.sum(x.to(tl.float32) * weights[:, None], 0)
    tl.store(into, sums.to(out.dtype.element_ty), mask=d < D)


@triton.jit(
    do_not_specialize=["D", "stride"], do_not_specialize_on_alignment=["count", "listed", "a", "b", "e", "c", "y"]
)
def blank_kernel(
    count, listed, a, b, e, c, y, out, D, stride, BD: tl.constexpr, OVERLAP: tl.constexpr, F: tl.constexpr
):
    """out[row] = 0 for rows that are ignored or whose coefficients are all 0; other rows are not touched."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP and tl.program_id(0) == tl.num_programs(0) - 1:
        tl.extra.cuda.gdc_wait()
        return
    D, stride = whole_vectors(D), whole_vectors(stride)
    place = tl.program_id(0)
    row = place
    if F.LISTED:
        row = tl.load(listed + place).to(tl.int32)
    _, _, _, _, _, some = coefficients(a, b, e, c, y, row, place < tl.load(count), F)
    if some == 0:
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            zero = tl.zeros([BD], out.dtype.element_ty)
            tl.store(out + row.to(tl.int64) * stride + d, zero, mask=d < D)


@triton.jit(do_not_specialize=["D", "stride"], do_not_specialize_on_alignment=["hidden"])
def total_kernel(hidden, numbers, constants, counts, out, D, stride, R: tl.constexpr, BD: tl.constexpr):
    """sum_n constant_n X_n, which is added to every row of the weight's gradient."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    live = tl.load(counts)
    sums = tl.zeros([R, BD], tl.float32)
    for first in range(0, live, R):
        i = first + tl.arange(0, R)
        row = tl.load(numbers + i, mask=i < live, other=0).to(tl.int64)
        k = tl.load(constants + i, mask=i < live, other=0.0)
        x = tl.load(hidden + row[:, None] * stride + d[None, :], mask=(i < live)[:, None] & (d < D)[None, :], other=0.0)
        sums += x.to(tl.float32) * k[:, None]
    tl.store(out + d, tl.sum(sums, 0), mask=d < D)
