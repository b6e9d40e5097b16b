"""The `memory=` budget: how many rows of logits may exist at a time, given what else a call holds.

    each row of a chunk    its logits, its teachers' logits, and the hidden rows that are gathered for it
    however many rows      a copy of the weight in another dtype, gathered rows of a teacher's weight and, if rows come
                           in several chunks, the accumulator of the weight's gradient

The latter count against the budget if they leave half of it to the rows.  Otherwise they come on top, and
`explain` says so: a head of 128256 x 4096 accumulates 2 GiB, which would leave nothing of 1 GiB for a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headloss.engine.arguments import Chunk
from headloss.sources import Linear

ACCUMULATOR, COPIES = "accumulator of the weight's gradient", "copies in the dtype of the products"
FEWEST = 512  # rows of a teacher's logits to make at a time; with fewer, its weight is read more often than needed


TILE_ROWS = 256  # chunks of teachers' logits are a multiple of this many rows: cuBLAS makes whole tiles


class Cost(NamedTuple):
    """Bytes beyond the student's logits."""

    row: int = 0  # per row of a chunk, for its teachers
    gathered: int = 0  # per row, if hidden rows are gathered
    fixed_bytes: int = 0  # however many rows a chunk has


NO_COST = Cost()


def accumulator(source: Linear, several: bool) -> torch.dtype:
    """The dtype that accumulates the weight's gradient.  A single chunk needs no more than the weight's own dtype."""
    wide = source.weight_grad_dtype or torch.promote_types(source.gemm_dtype, torch.float32)
    if source.is_fp16:  # not yet normalised: a sum over many rows overflows float16
        return torch.promote_types(wide, torch.float32)
    return wide if several or source.weight_grad_dtype is not None else source.weight.dtype


def fixed_bytes_of(source: Linear, several: bool) -> dict[str, int]:
    """Bytes that the student's head holds, however many rows a chunk has."""
    wide, size = accumulator(source, several), source.weight.shape[1]
    columns = source.columns if source.shard is None else source.shard.even_width  # all ranks make the same chunks
    cast = columns * size * (source.weight.dtype != source.gemm_dtype)
    cast += source.hidden.numel() * (source.hidden.dtype != source.gemm_dtype)
    return {
        ACCUMULATOR: columns * size * wide.itemsize * (wide != source.weight.dtype),
        COPIES: cast * source.gemm_dtype.itemsize,
    }


def fixed_bytes(source: Linear, cost: Cost, several: bool) -> list[int]:
    """Bytes that do not depend on the number of rows; those that cannot be avoided come first."""
    own = fixed_bytes_of(source, several)
    return [cost.fixed_bytes, own[COPIES], own[ACCUMULATOR]]


def chunk_rows(source: Linear, cost: Cost, count: int) -> int:
    """How many rows a chunk may have, if `count` rows count."""
    most = source.chunk_rows(cost.row, fixed_bytes(source, cost, several=False), cost.gathered)
    if most >= count:
        return most
    return min(most, source.chunk_rows(cost.row, fixed_bytes(source, cost, several=True), cost.gathered))


def pieces(count: int, most: int) -> list[slice]:
    """`count` rows cut into equal runs of at most `most`."""
    n = -(-count // most)
    return [slice(count * i // n, count * (i + 1) // n) for i in range(n)]


def row_chunks(source: Linear, cost: Cost, count: int) -> list[Chunk]:
    """The chunks of a call whose losses combine no rows.

    Teachers' logits are dropped as soon as a row is compared, so they may come in shorter chunks than the runs of rows
    whose gradient goes into one matrix product: the fewer such runs, the less is accumulated.
    """
    parts = pieces(count, chunk_rows(source, cost, count))
    if cost.row and source.shard is None and not source.is_fp16:
        for n in range(1, len(parts)):
            longest = -(-count // n)
            room = source.room(fixed_bytes(source, cost, n > 1)) - longest * (source.row_bytes + cost.gathered)
            most = room // cost.row
            if most >= min(longest, FEWEST):
                step = most // TILE_ROWS * TILE_ROWS or most
                return [
                    Chunk(slice(i, min(i + step, run.stop)), None, run)
                    for run in pieces(count, longest)
                    for i in range(run.start, run.stop, step)
                ]
    return [Chunk(part) for part in parts]


def gathered_bytes(source: Linear) -> int:
    """Bytes per row of a chunk if some rows are left out: its hidden row, and the gradient of that."""
    return 2 * source.hidden.shape[-1] * source.gemm_dtype.itemsize
