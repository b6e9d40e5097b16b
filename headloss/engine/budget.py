"""How many rows of logits exist at a time, so that what a call holds beyond inputs and results fits `memory=`.

    each row of a chunk    its logits, its teachers', and the hidden rows that are gathered for it
    besides                a copy of the weight in another dtype, rows of a teacher's weight that were gathered and,
                           where rows come in several chunks, the accumulator of the weight's gradient

What is held besides counts if it leaves the rows half of the budget.  Otherwise it comes on top, and `explain` says so:
a head of 128256 x 4096 accumulates 2 GiB, and a chunk of the rest of 1 GiB would be none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headloss.engine.arguments import Chunk
from headloss.sources import Linear

ACCUMULATOR, COPIES = "accumulator of the weight's gradient", "copies in the dtype of the products"
FEWEST = 512  # rows of a teacher's logits that are made at a time; fewer would read its weight more often than needed


EVEN = 256  # of which a chunk of teachers' logits is a multiple: cuBLAS makes whole tiles


class Cost(NamedTuple):
    """Bytes beyond the student's logits."""

    row: int = 0  # of each row of a chunk, for its teachers
    gathered: int = 0  # of each row, where hidden rows are gathered
    besides: int = 0


NO_COST = Cost()


def accumulator(source: Linear, several: bool) -> torch.dtype:
    """Of the weight's gradient.  In a single chunk nothing is accumulated and the weight's own dtype will do."""
    wide = source.weight_grad_dtype or torch.promote_types(source.gemm_dtype, torch.float32)
    if source.narrow:  # not yet normalised: the sum over many rows is beyond float16
        return torch.promote_types(wide, torch.float32)
    return wide if several or source.weight_grad_dtype is not None else source.weight.dtype


def held_besides(source: Linear, several: bool) -> dict[str, int]:
    """What the student's head holds, however many rows a chunk has."""
    wide, size = accumulator(source, several), source.weight.shape[1]
    columns = source.columns if source.shard is None else source.shard.even_width  # ranks walk the same chunks
    cast = columns * size * (source.weight.dtype != source.gemm_dtype)
    cast += source.hidden.numel() * (source.hidden.dtype != source.gemm_dtype)
    return {
        ACCUMULATOR: columns * size * wide.itemsize * (wide != source.weight.dtype),
        COPIES: cast * source.gemm_dtype.itemsize,
    }


def besides(source: Linear, cost: Cost, several: bool) -> list[int]:
    """What else is held, what cannot be helped first."""
    own = held_besides(source, several)
    return [cost.besides, own[COPIES], own[ACCUMULATOR]]


def chunk_rows(source: Linear, cost: Cost, count: int) -> int:
    """How many of so many rows a chunk may have."""
    most = source.chunk_rows(cost.row, besides(source, cost, several=False), cost.gathered)
    if most >= count:
        return most
    return min(most, source.chunk_rows(cost.row, besides(source, cost, several=True), cost.gathered))


def pieces(count: int, most: int) -> list[slice]:
    """Equal runs of at most so many rows."""
    n = -(-count // most)
    return [slice(count * i // n, count * (i + 1) // n) for i in range(n)]


def row_chunks(source: Linear, cost: Cost, count: int) -> list[Chunk]:
    """How rows that need not meet are walked.

    Teachers' logits are dropped as soon as a row is compared, so they may come in shorter chunks than those whose
    gradient goes into one product: the fewer of these there are, the less is accumulated.
    """
    parts = pieces(count, chunk_rows(source, cost, count))
    if cost.row and source.shard is None and not source.narrow:
        for n in range(1, len(parts)):
            longest = -(-count // n)
            room = source.room(besides(source, cost, n > 1)) - longest * (source.row_bytes + cost.gathered)
            most = room // cost.row
            if most >= min(longest, FEWEST):
                step = most // EVEN * EVEN or most
                return [
                    Chunk(slice(i, min(i + step, run.stop)), None, run)
                    for run in pieces(count, longest)
                    for i in range(run.start, run.stop, step)
                ]
    return [Chunk(part) for part in parts]


def gathered_bytes(source: Linear) -> int:
    """Of each row of a chunk, where some rows are left out: its hidden row, and the gradient of that."""
    return 2 * source.hidden.shape[-1] * source.gemm_dtype.itemsize
