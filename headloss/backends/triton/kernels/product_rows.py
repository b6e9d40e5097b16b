# mypy: ignore-errors
"""The kernels around the first product: they gather rows before it, and merge and finish the sums of its tiles after.

Dimension key:  C rows of a chunk   V columns of this rank   D hidden size

    order     number the rows that count
    gather    their hidden rows, targets and a reference logit
    merge     sums of tiles, 32 at a time, in one tree: tiles 2i and 2i + 1, then pairs of those, ...
    finish    the sums of a row, in the order of `sweeps.named`
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import LN2, LOG2E, temperature
from headloss.backends.triton.kernels.product import whole_vectors
from headloss.backends.triton.kernels.sums import part_sums, put

NONE = tl.constexpr(-1.0e30)  # the maximum of no columns: finite, because NONE - NONE must be 0
FAR = tl.constexpr(86.0)  # most powers of 2 between a row's reference and its maximum: bf16 ends at 2^127


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["target"])
def order_kernel(target, rows, count, N, B: tl.constexpr, R: tl.constexpr):
    """List the rows whose target is not -100 and, from the end, the others.

    One program per B rows, which counts the rows before its own itself: a single program for all takes 16 us.
    """
    at, found = tl.program_id(0) * B, 0
    for first in range(0, at, R):
        i = first + tl.arange(0, R)
        found += tl.sum((tl.load(target + i, mask=i < at, other=-100) != -100).to(tl.int32), 0)
    i = at + tl.arange(0, B)
    keep = (i < N) & (tl.load(target + i, mask=i < N, other=-100) != -100)
    number, other = keep.to(tl.int32), ((i < N) & (keep == 0)).to(tl.int32)
    tl.store(rows + found + tl.cumsum(number, 0) - 1, i, mask=keep)
    tl.store(rows + N - (at - found) - tl.cumsum(other, 0), i, mask=other > 0)
    if at + B >= N:
        tl.store(count, found + tl.sum(number, 0))


@triton.jit(
    do_not_specialize=["C", "V", "D", "start", "stride", "weight_stride"],
    do_not_specialize_on_alignment=["rows", "count", "target"],
)
def gather_kernel(at, rows, count, target, temperatures, scale, C, V, D, start, stride, weight_stride, F: tl.constexpr):
    """One program per place: its row, its target's column here (-1: none), and the logit there or else in column 0."""
    BD: tl.constexpr = F.BD
    D, stride, weight_stride = whole_vectors(D), whole_vectors(stride), whole_vectors(weight_stride)
    place = tl.program_id(0)
    live = C
    if F.LISTED:
        live = tl.load(count)
    elif place == 0:
        tl.store(count, C)
    if place >= tl.cdiv(live, F.BM) * F.BM:
        return
    here = place < live
    row = place
    if F.LISTED:
        row = tl.load(rows + place, mask=here, other=0).to(tl.int32)
    row = tl.where(here, row, 0)
    own = -1
    if F.TARGET:
        column = tl.load(target + row, mask=here, other=-1).to(tl.int64) - start
        own = tl.where(here & (column >= 0) & (column < V), column, -1).to(tl.int32)
    near = tl.maximum(own, 0)
    width = whole_vectors(tl.where(here, D, 0))
    sums = tl.zeros([BD], tl.float32)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        x = tl.load(at.hidden + row.to(tl.int64) * stride + d, mask=d < width, other=0.0)
        w = tl.load(at.weight + near.to(tl.int64) * weight_stride + d, mask=d < width, other=0.0)
        sums += x.to(tl.float32) * w.to(tl.float32)
        if F.COPY:
            tl.store(at.copy + place.to(tl.int64) * D + d, x, mask=d < D)
    times = scale * LOG2E / temperature(temperatures, row, F.PER_ROW)
    found = tl.sum(sums, 0) * times
    tl.store(at.targets + place, own)
    tl.store(at.multiplier + place, times)
    tl.store(at.logit + place, found)
    tl.store(at.reference + place, found)


@triton.jit
def loaded(at, field, here, F: tl.constexpr):
    """Load the sums of some columns: maximum, S, total, best, X, Q; where not `here`, those of no columns."""
    most = tl.load(at, mask=here, other=NONE)
    S = tl.load(at + field, mask=here, other=0.0)
    at += 2 * field
    total, at = part_sums(at, field, here, F.TOTAL)
    best, at = part_sums(at, field, here, F.BEST)
    X, at = part_sums(at, field, here, F.WANT_X)
    Q, _ = part_sums(at, field, here, F.WANT_Q)
    return (most, S, total, best, X, Q)


@triton.jit
def joined(a, b):
    """The sums of two adjacent runs of columns, the left one first.  Every rounding is spelled out."""
    most = tl.maximum(a[0], b[0])
    away, off = a[0] - most, b[0] - most
    k, j = tl.exp2(away), tl.exp2(off)
    X = tl.fma(k, tl.fma(away, a[1], a[4]), j * tl.fma(off, b[1], b[4]))
    return (
        most,
        tl.fma(k, a[1], j * b[1]),
        a[2] + b[2],
        tl.where(b[0] > a[0], b[3], a[3]),
        X,
        tl.fma(k * k, a[5], j * j * b[5]),
    )


@triton.jit
def stored(at, field, here, node, F: tl.constexpr):
    """Store what `loaded` loads."""
    at = put(node[0], at, field, True, here)
    at = put(node[1], at, field, True, here)
    at = put(node[2], at, field, F.TOTAL, here)
    at = put(node[3], at, field, F.BEST, here)
    at = put(node[4], at, field, F.WANT_X, here)
    put(node[5], at, field, F.WANT_Q, here)


@triton.jit(do_not_specialize=["tiles", "rows", "step", "begin", "groups"], do_not_specialize_on_alignment=["count"])
def merge_kernel(
    parts, count, tiles, rows, step, begin, groups, LEVELS: tl.constexpr, B: tl.constexpr, F: tl.constexpr
):
    """Every `step`-th tile has the sums of `step` tiles: merge 2^LEVELS such into the first, from tile `begin` on."""
    RADIX: tl.constexpr = 1 << LEVELS
    at, group = tl.program_id(0) // groups * B, tl.program_id(0) % groups
    row = at + tl.arange(0, B)
    if at >= tl.load(count):
        return
    first, field = begin + group.to(tl.int64) * RADIX * step, tiles.to(tl.int64) * rows
    nodes = ()
    for i in tl.static_range(RADIX):
        tile = first + i * step
        here = row < tl.where(tile < tiles, rows, 0)
        nodes += (loaded(parts + tile * rows + row, field, here, F),)
    for _level in tl.static_range(LEVELS):
        halved = ()
        for i in tl.static_range(len(nodes) // 2):
            halved += (joined(nodes[2 * i], nodes[2 * i + 1]),)
        nodes = halved
    stored(parts + first * rows + row, field, row < rows, nodes[0], F)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0, exact to the last digits if x is small: 2 artanh(x / (2 + x))."""
    s = tl.div_rn(x, 2.0 + x)
    r = s * s
    near = r * (1 / 15) + 1 / 13
    near = near * r + 1 / 11
    near = near * r + 1 / 9
    near = near * r + 1 / 7
    near = near * r + 1 / 5
    near = near * r + 1 / 3
    near = 2.0 * tl.fma(near * r, s, s)
    return tl.where(x < 1.0, near, tl.log(1.0 + x))


@triton.jit(
    do_not_specialize=["tiles", "rows", "wide", "columns"],
    do_not_specialize_on_alignment=["listed", "count", "temperatures"],
)
def finish_kernel(at, listed, count, temperatures, tiles, rows, wide, columns, SUMS: tl.constexpr, F: tl.constexpr):
    """Sums over all columns, the target's included, to `at.out` (sums, wide), by the rows of the chunk.

    REBASED: relative to lse instead of the maximum, which keeps the digits of a log p near 0.  A row whose maximum is
    far from its reference gets a new reference, and its tile of rows a mark in `far`.  Ignored rows: 0, and S = 1.
    """
    B: tl.constexpr = F.B
    place = tl.program_id(0) * B + tl.arange(0, B)
    here, inside = place < tl.load(count), place < wide
    most, S, total, best, X, Q = loaded(at.node + place, tiles.to(tl.int64) * rows, here, SUMS)
    row = place.to(tl.int64)
    if F.LISTED:
        row = tl.load(listed + place, mask=inside, other=0).to(tl.int64)
    T = temperature(temperatures, tl.where(inside, row, 0), F.PER_ROW)
    gap = tl.full([B], -float("inf"), tl.float32)
    tl.store(at.top + place, most, mask=here)
    if F.TARGET:  # its column was left out: put it back, relative to the maximum of both
        own = tl.load(at.targets + place, mask=here, other=-1)
        logits = tl.where(own >= 0, tl.load(at.logit + place, mask=here, other=0.0), gap)
        total += tl.where(own >= 0, logits, 0.0)
        if SUMS.BEST:
            first = (logits > most) | ((logits == most) & (own < best))
            best = tl.where(first, own.to(tl.float32), best)
        top = tl.maximum(most, logits)
        away, gap = most - top, logits - top
        k = tl.exp2(away)
        X = k * tl.fma(away, S, X)
        S, Q, most = k * S, k * k * Q, top
    p = tl.exp2(gap)
    whole = S + p
    close = gap > -20.0
    near = -log1p(S * tl.exp2(tl.where(close, -gap, 0.0)))
    width = tl.where(close, gap - near * LOG2E, tl.log2(whole))
    own_logprob = tl.where(close, near, (gap - width) * LN2)
    tl.store(at.lse + place, most + width, mask=here)
    tl.store(at.logprob + place, own_logprob, mask=here)
    if F.STORED:
        base = tl.load(at.reference + place, mask=here, other=0.0)
        bad = here & (tl.abs(most - base) > FAR)
        tl.store(at.reference + place, most, mask=bad)
        tl.store(at.far + tl.program_id(0), tl.max(bad.to(tl.int32), 0))
    X += tl.where(p > 0, p * gap, 0.0)
    shift = most
    if F.REBASED:
        shift = most + width
    into = put(tl.where(here, shift * LN2 * T, 0.0), at.out + row, wide, True, inside)
    if F.OUT:
        aside = gap * LN2
        if F.REBASED:
            aside = own_logprob
        into = put(tl.where(here, aside * T, 0.0), into, wide, True, inside)
    if SUMS.TOTAL:
        into = put(tl.where(here, (total - columns * shift) * LN2 * T, 0.0), into, wide, True, inside)
        into = put(columns + tl.zeros([B], tl.float32), into, wide, True, inside)
    if SUMS.BEST:
        into = put(tl.where(here, best, 0.0), into, wide, True, inside)
    scale = whole
    if F.REBASED:
        scale = tl.full([B], 1.0, tl.float32)
    into = put(tl.where(here, scale, 1.0), into, wide, True, inside)
    if SUMS.WANT_X:
        X *= LN2
        if F.REBASED:
            X = tl.div_rn(X, whole) - width * LN2
        into = put(tl.where(here, X, 0.0), into, wide, True, inside)
    if SUMS.WANT_Q:
        Q += p * p
        if F.REBASED:
            Q = tl.div_rn(Q, whole * whole)
        put(tl.where(here, Q, 0.0), into, wide, True, inside)
