# mypy: ignore-errors
"""Merges the sums of tiles when ranks share a vocabulary: one tree over all ranks' tiles, so no cut changes a bit.

Dimension key:  C rows of a chunk   L levels of the tree

A node of level k has the sums of 2^k tiles, the first of which is a multiple of 2^k in the numbering of the whole
vocabulary.  The tiles of a rank are covered by the fewest such nodes, in the order of their tiles: levels that rise,
then levels that fall.  So a node has one of 2 L slots, and the rank's first tile and its number of tiles say which
slots are taken.

    nodes     the nodes of this rank's tiles, and the range of its columns
    across    the nodes of all ranks, joined as one rank would have joined them
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.product_rows import NONE, joined, loaded, stored


@triton.jit
def level_of(slot, levels):
    return tl.where(slot < levels, slot, 2 * levels - 1 - slot)


@triton.jit
def taken(slot, levels, tile, end):
    """Whether the node of a slot starts at `tile`, if all slots before it end there."""
    k = level_of(slot, levels)
    return (tile + (1 << k) <= end) & ((slot >= levels) | ((tile >> k) % 2 == 1))


@triton.jit(
    do_not_specialize=["tiles", "rows", "wide", "columns", "start", "levels"], do_not_specialize_on_alignment=["count"]
)
def nodes_kernel(
    parts, count, targets, logit, out, tiles, rows, wide, columns, start, levels,
    SUMS: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """One program per slot and B rows; whole groups of 2^LEVELS tiles, and of such groups, are already merged in place.

    `out` (2 L FIELDS + 4, wide): the nodes, the target's logit and column if it is here, the first column, how many.
    """
    B: tl.constexpr = F.B
    FIELDS: tl.constexpr = F.FIELDS
    LEVELS: tl.constexpr = F.LEVELS
    slots = 2 * levels
    at, slot = tl.program_id(0) // (slots + 1) * B, tl.program_id(0) % (slots + 1)
    row = at + tl.arange(0, B)
    if at >= tl.load(count):
        return
    here = row < wide
    if slot == slots:
        out += slots.to(tl.int64) * FIELDS * wide
        found, own = tl.full([B], -float("inf"), tl.float32), tl.full([B], -1, tl.int32)
        if F.TARGET:
            own = tl.load(targets + row, mask=here, other=-1)
            found = tl.where(own >= 0, tl.load(logit + row, mask=here, other=0.0), found)
        tl.store(out + row, found, mask=here)
        tl.store(out + wide + row, tl.where(own >= 0, start + own, -1).to(tl.float32), mask=here)
        tl.store(out + 2 * wide + row, start + tl.zeros([B], tl.float32), mask=here)
        tl.store(out + 3 * wide + row, columns + tl.zeros([B], tl.float32), mask=here)
        return
    first = start // F.TILE
    tile, end = first, first + tiles
    for before in range(0, slot):
        if taken(before, levels, tile, end):
            tile += 1 << level_of(before, levels)
    if taken(slot, levels, tile, end):
        k = level_of(slot, levels)
        number, step = 1 << (k % LEVELS), 1 << (k // LEVELS * LEVELS)
        nodes = ()
        for i in tl.static_range(1 << (LEVELS - 1)):
            inside = row < tl.where(i < number, rows, 0)
            part = parts + (tile - first + i * step).to(tl.int64) * rows + row
            nodes += (loaded(part, tiles.to(tl.int64) * rows, inside, SUMS),)
        for _level in tl.static_range(LEVELS - 1):
            halved = ()
            for i in tl.static_range(len(nodes) // 2):
                halved += (joined(nodes[2 * i], nodes[2 * i + 1]),)
            nodes = halved
        stored(out + slot.to(tl.int64) * FIELDS * wide + row, wide, here, nodes[0], SUMS)


@triton.jit(
    do_not_specialize=["ranks", "rank_stride", "stride", "wide", "rows", "levels"],
    do_not_specialize_on_alignment=["gathered", "count"],
)
def across_kernel(
    gathered, count, scratch, out, targets, logit, ranks, rank_stride, stride, wide, rows, levels,
    SUMS: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Sums over all columns, the target's column and its logit, from what `nodes` stored on each rank.

    Nodes come in the order of their tiles, so those that wait for their other half are the binary digits of the number
    of tiles so far: `scratch` has one per level.  If a rank's columns do not start at a tile (not `whole`), no single
    rank has such a tree, and nodes are joined one after the other.
    """
    B: tl.constexpr = F.B
    FIELDS: tl.constexpr = F.FIELDS
    TILE: tl.constexpr = F.TILE
    row = tl.program_id(0) * B + tl.arange(0, B)
    if tl.program_id(0) * B >= tl.load(count):
        return
    here, slots = row < wide, 2 * levels
    level, node_stride, rank_stride = rows.to(tl.int64) * FIELDS, stride.to(tl.int64) * FIELDS, rank_stride.to(tl.int64)
    about = gathered + slots * node_stride  # per rank: the target's logit and column, the first column, how many
    whole, own, found = 1, tl.full([B], -1.0, tl.float32), tl.full([B], -float("inf"), tl.float32)
    for rank in range(0, ranks):
        at = about + rank * rank_stride
        start, columns = tl.load(at + 2 * stride).to(tl.int32), tl.load(at + 3 * stride).to(tl.int32)
        whole = tl.where((columns > 0) & (start % TILE != 0), 0, whole)
        if F.TARGET:
            found = tl.maximum(found, tl.load(at + row, mask=here, other=-float("inf")))
            own = tl.maximum(own, tl.load(at + stride + row, mask=here, other=-1.0))
    if F.TARGET:
        tl.store(targets + row, own.to(tl.int32), mask=here)
        tl.store(logit + row, found, mask=here)
    waiting = whole * 0  # how many tiles the nodes in the scratch cover
    for rank in range(0, ranks):
        base = gathered + rank * rank_stride
        at = about + rank * rank_stride
        start, columns = tl.load(at + 2 * stride).to(tl.int32), tl.load(at + 3 * stride).to(tl.int32)
        tile = start // TILE
        end = tile + tl.cdiv(columns, TILE)
        for slot in range(0, slots):
            if taken(slot, levels, tile, end):
                k = level_of(slot, levels)
                tile += 1 << k
                node = base + slot * node_stride + row
                most, S, total, best, X, Q = loaded(node, stride, here, SUMS)
                k = k * whole
                while (waiting >> k) % 2 == 1:
                    left = loaded(scratch + k * level + row, rows, here, SUMS)
                    most, S, total, best, X, Q = joined(left, (most, S, total, best, X, Q))
                    waiting -= 1 << k
                    k += whole
                stored(scratch + k * level + row, rows, here, (most, S, total, best, X, Q), SUMS)
                tl.debug_barrier()  # one thread may load what another stores
                waiting += 1 << k
    most, S = tl.full([B], NONE, tl.float32), tl.zeros([B], tl.float32)
    total, best, X, Q = S, S, S, S
    for k in range(0, levels + 1):
        if (waiting >> k) % 2 == 1:
            left = loaded(scratch + k * level + row, rows, here, SUMS)
            most, S, total, best, X, Q = joined(left, (most, S, total, best, X, Q))
    stored(out + row, rows, here, (most, S, total, best, X, Q), SUMS)
