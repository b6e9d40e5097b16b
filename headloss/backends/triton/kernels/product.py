# mypy: ignore-errors
"""The head's three matrix products, with the softmax in their epilogues.

Dimension key:  C rows of a chunk   V columns of this rank   D hidden size   BM, BN, BK a tile: rows, columns, depth

    read     t = multiplier * X W^T, in units of log 2.  Each tile stores sums of its rows, without the target and
             relative to its own maximum; if asked, also e = 2^(t - reference) in bf16
    hidden   dX = factor * (E W) + share * W[target] + constant * sum_j W_j
    weight   dW = E^T X' (+ what `out` has) + sum_n constant_n X_n, where X' are the rows of X times their factors

Persistent programs over tiles of one size: a tile's values do not depend on which program computes it, on the rows in
other tiles, nor on how many there are.  The number of rows that count is read on the device.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.2676506002282294e30)  # -2^100: 0 * LOWEST is 0, and LOWEST * multiplier is exact
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # which multiplies the bits of bf16


@triton.jit
def dot(x, y, acc):
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), acc)
    else:
        return tl.dot(x, y, acc)


@triton.jit
def whole_vectors(x):
    """Tells the compiler that a width or a stride is a multiple of 16 bytes, which `product.fits` has checked."""
    return x // 8 * 8


@triton.jit
def tile_of(t, tall, wide, GROUP: tl.constexpr):
    """The row and column of tile t, in groups of about GROUP rows of tiles, so that operands stay in the cache.

    No group is much smaller than the others.  Past the last tile, the result lies outside the matrix.
    """
    groups = tl.where(tall <= GROUP + GROUP // 2, 1, tl.cdiv(tall, GROUP))
    size = tl.maximum(tl.cdiv(tall, groups), 1)
    inside = size * wide
    first = t // inside * size
    high = tl.maximum(tl.minimum(tall - first, size), 1)
    return first + t % inside % high, t % inside // high


@triton.jit
def halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of a tile: a whole one does not fit next to the operands in flight."""
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def along(x, like):
    """One number per row, as a tile."""
    return x[:, None] + tl.zeros_like(like)


@triton.jit
def own_column(target, pm, pn, live, TARGET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """For each row of a tile, which of the tile's columns is the row's target."""
    row = pm * BM + tl.arange(0, BM)
    if TARGET:
        return tl.load(target + row, mask=row < live, other=-1) - pn * BN
    else:
        return row


@triton.jit
def begun(own, pn, V, TARGET: tl.constexpr, RAGGED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """What a tile's accumulator starts from: LOWEST in the columns that are left out, 0 in the others."""
    acc = tl.zeros((BM, BN), tl.float32)
    column = tl.arange(0, BN)
    if TARGET:
        acc = tl.where(column[None, :] == own[:, None], LOWEST, acc)
    if RAGGED:
        acc = tl.where((column >= V - pn * BN)[None, :], LOWEST, acc)
    return acc


@triton.jit
def half_sums(acc, times, most, shift, e, first_row, first, F: tl.constexpr):
    """Sums of the rows of half a tile, relative to `most`; stores their e, relative to the reference."""
    away = tl.fma(acc, along(times, acc), along(-most, acc))
    p = tl.exp2(away)
    in_x, in_q = most, most
    if F.WANT_X:  # first: it is the last use of `away`, and registers are short
        in_x = tl.sum(p * away, 1)
    S = tl.sum(p, 1)
    if F.WANT_Q:
        in_q = tl.sum(p * p, 1)
    if F.STORE:
        e.store([first_row, first], (p * shift[:, None]).to(tl.bfloat16))
    return S, in_x, in_q


@triton.jit
def sum_tile(acc, pm, pn, live, at, out, e, rows, start, tiles, F: tl.constexpr):
    """Store the sums of the rows of a tile, or of one of its pieces, and if asked their e."""
    BM: tl.constexpr = F.BM
    BN: tl.constexpr = F.BN // F.PIECES
    row = pm * BM + tl.arange(0, BM)
    here = row < live
    times = tl.load(at.multiplier + row, mask=here, other=0.0)
    field, into = tiles.to(tl.int64) * rows, out + pn.to(tl.int64) * rows + row
    if F.TOTAL:
        tl.store(into + 2 * field, tl.sum(tl.where(acc > 0.5 * LOWEST, acc, 0.0), 1) * times, mask=here)
    top = tl.max(acc, 1)
    most = top * times
    if F.BEST:
        column = pn * BN + tl.arange(0, BN)
        best = tl.min(tl.where(acc == top[:, None], column[None, :], 2147483647), 1)
        tl.store(into + (2 + F.TOTAL) * field, (start + best).to(tl.float32), mask=here)
    shift = most
    if F.STORE:
        shift = tl.exp2(most - tl.load(at.reference + row, mask=here, other=0.0))
    left, right = halves(acc, BM, BN)
    S, X, Q = half_sums(left, times, most, shift, e, pm * BM, pn * BN, F)
    more_S, more_X, more_Q = half_sums(right, times, most, shift, e, pm * BM, pn * BN + BN // 2, F)
    tl.store(into, most, mask=here)
    tl.store(into + field, S + more_S, mask=here)
    if F.WANT_X:
        tl.store(into + (2 + F.TOTAL + F.BEST) * field, X + more_X, mask=here)
    if F.WANT_Q:
        tl.store(into + (2 + F.TOTAL + F.BEST + F.WANT_X) * field, Q + more_Q, mask=here)


@triton.jit(
    do_not_specialize=["V", "D", "rows", "start", "first", "wide", "tiles"], do_not_specialize_on_alignment=["count"]
)
def read_kernel(x, w, e, count, at, out, V, D, rows, start, first, wide, tiles, F: tl.constexpr):
    """`wide` columns of tiles from `first` on.  `out` (fields, tiles, rows): maximum, S, [total], [best], [X], [Q].

    A tile is multiplied whole and summed in one or two pieces, which are the tiles of `out`.

    One loop over the depths of all tiles: the loads of the next tile are in flight while this one is summed.  Columns
    that are left out start the accumulator at LOWEST, which costs no more than the zeros would: at D = 1024 the product
    is 8% faster than with a mask at its end.
    """
    BM: tl.constexpr = F.BM
    BN: tl.constexpr = F.BN
    BK: tl.constexpr = F.BK
    GROUP: tl.constexpr = F.GROUP
    PROGRAMS: tl.constexpr = F.PROGRAMS
    live = tl.load(count)
    tall, deep = tl.cdiv(live, BM), tl.cdiv(D, BK)
    t = tl.program_id(0)
    steps = tl.maximum(tl.cdiv(tall * wide - t, PROGRAMS), 0) * deep
    ahead, k = t - PROGRAMS, deep - 1  # the tile whose operands are loaded
    km, kn = t, t
    pm, pn = tile_of(t, tall, wide, GROUP)
    pn += first
    acc = begun(own_column(at.target, pm, pn, live, F.TARGET, BM, BN), pn, V, F.TARGET, F.RAGGED, BM, BN)
    for _ in tl.range(0, steps):
        k = tl.where(k == deep - 1, 0, k + 1)
        if k == 0:
            ahead += PROGRAMS
            km, kn = tile_of(ahead, tall, wide, GROUP)
            kn += first
        acc = dot(x.load([km * BM, k * BK]), w.load([kn * BN, k * BK]).T, acc)
        if k == deep - 1:
            t += PROGRAMS
            next_m, next_n = tile_of(t, tall, wide, GROUP)
            next_n += first
            own = own_column(at.target, next_m, next_n, live, F.TARGET, BM, BN)  # early: its load takes a while
            if F.PIECES == 1:
                sum_tile(acc, pm, pn, live, at, out, e, rows, start, tiles, F)
            else:
                left, right = halves(acc, BM, BN)
                sum_tile(left, pm, 2 * pn, live, at, out, e, rows, start, tiles, F)
                sum_tile(right, pm, 2 * pn + 1, live, at, out, e, rows, start, tiles, F)
            pm, pn = next_m, next_n
            acc = begun(own, pn, V, F.TARGET, F.RAGGED, BM, BN)


@triton.jit(do_not_specialize=["V", "D"], do_not_specialize_on_alignment=["count", "far", "tiles"])
def repair_kernel(x, w, e, count, far, tiles, at, V, D, F: tl.constexpr):
    """Compute e again in rows of tiles with a row too far from its reference, which has been replaced since."""
    BM: tl.constexpr = F.BM
    BN: tl.constexpr = F.BN
    BK: tl.constexpr = F.BK
    live, wide, deep = tl.load(count), tl.cdiv(V, BN), tl.cdiv(D, BK)
    bad = tl.load(far)
    for t in tl.range(tl.program_id(0), bad * wide, F.PROGRAMS):
        pm, pn = tl.load(tiles + t // wide), t % wide
        acc = begun(own_column(at.target, pm, pn, live, F.TARGET, BM, BN), pn, V, F.TARGET, True, BM, BN)
        for k in range(deep):
            acc = dot(x.load([pm * BM, k * BK]), w.load([pn * BN, k * BK]).T, acc)
        row = pm * BM + tl.arange(0, BM)
        here = row < live
        times = tl.load(at.multiplier + row, mask=here, other=0.0)
        base = tl.load(at.reference + row, mask=here, other=0.0)
        found = tl.exp2(tl.fma(acc, along(times, acc), along(-base, acc)))
        left, right = halves(found, BM, BN)
        e.store([pm * BM, pn * BN], left.to(tl.bfloat16))
        e.store([pm * BM, pn * BN + BN // 2], right.to(tl.bfloat16))


@triton.jit
def hidden_part(
    acc, number, here, column, factor, share, constant, own, at, total, weight_stride, out_stride, D, F: tl.constexpr
):
    keep = here[:, None]
    if not F.WHOLE_TILES:
        keep = keep & (column < D)[None, :]
    x = acc * factor[:, None]
    if F.CONSTANT:
        x += constant[:, None] * tl.load(total + column, mask=column < D, other=0.0)[None, :]
    if F.TARGET:
        spot = at.weight + own.to(tl.int64)[:, None] * weight_stride + column[None, :]
        x += share[:, None] * tl.load(spot, mask=keep & (own >= 0)[:, None], other=0.0).to(tl.float32)
    into = at.out + number.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(into, x.to(at.out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["V", "D"], do_not_specialize_on_alignment=["count", "numbers", "target"])
def hidden_kernel(e, w, at, numbers, target, total, count, V, D, weight_stride, out_stride, F: tl.constexpr):
    """dX for the rows of E; `numbers` says where in `at.out` each goes, and `total` (D,) is the weight's sum."""
    BM: tl.constexpr = F.BM
    BN: tl.constexpr = F.BN
    BK: tl.constexpr = F.BK
    if F.OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    live = tl.load(count)
    tall, wide, deep = tl.cdiv(live, BM), tl.cdiv(D, BN), tl.cdiv(V, BK)
    for t in tl.range(tl.program_id(0), tall * wide, F.PROGRAMS, flatten=True):
        pm, pn = tile_of(t, tall, wide, F.GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(deep):
            acc = dot(e.load([pm * BM, k * BK]), w.load([k * BK, pn * BN]), acc)
        row = pm * BM + tl.arange(0, BM)
        here = row < live
        number = tl.load(numbers + row, mask=here, other=0)
        factor = tl.load(at.factors + row, mask=here, other=0.0)
        share, constant, own = factor, factor, number
        if F.TARGET:
            share = tl.load(at.shares + row, mask=here, other=0.0)
            own = tl.load(target + row, mask=here, other=-1)
        if F.CONSTANT:
            constant = tl.load(at.constants + row, mask=here, other=0.0)
        left, right = halves(acc, BM, BN)
        parts = halves(left, BM, BN // 2) + halves(right, BM, BN // 2)
        for i in tl.static_range(4):
            column = pn * BN + i * (BN // 4) + tl.arange(0, BN // 4)
            hidden_part(
                parts[i], number, here, column, factor, share, constant, own, at, total, weight_stride, out_stride, D, F
            )


@triton.jit
def weight_part(acc, out, total, first_row, first, D, WIDTH: tl.constexpr, F: tl.constexpr):
    if F.CONSTANT:
        column = first + tl.arange(0, WIDTH)
        acc += tl.load(total + column, mask=column < D, other=0.0)[None, :]
    if F.ADD:
        acc += out.load([first_row, first]).to(tl.float32)
    out.store([first_row, first], acc.to(out.dtype))


@triton.jit(do_not_specialize=["V", "D"], do_not_specialize_on_alignment=["count"])
def weight_kernel(e, x, out, total, count, V, D, F: tl.constexpr):
    """dW; `total` (D,) is added to each of its rows.  Rows from `count` on are 0 in `x` and finite in `e`."""
    BM: tl.constexpr = F.BM
    BN: tl.constexpr = F.BN
    BK: tl.constexpr = F.BK
    PARTS: tl.constexpr = F.PARTS
    if F.OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    live = tl.load(count)
    tall, wide, deep = tl.cdiv(V, BM), tl.cdiv(D, BN), tl.cdiv(live, BK)
    for t in tl.range(tl.program_id(0), tall * wide, F.PROGRAMS, flatten=True):
        pm, pn = tile_of(t, tall, wide, F.GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(deep):
            acc = dot(e.load([k * BK, pm * BM]).T, x.load([k * BK, pn * BN]), acc)
        parts = halves(acc, BM, BN)
        if PARTS == 4:
            parts = halves(parts[0], BM, BN // 2) + halves(parts[1], BM, BN // 2)
        for i in tl.static_range(PARTS):
            weight_part(parts[i], out, total, pm * BM, pn * BN + i * (BN // PARTS), D, BN // PARTS, F)
