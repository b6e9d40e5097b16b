"""A chunk in hand, and what is kept of it between the two sweeps of a visit."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from headloss.engine.arguments import Chunk
from headloss.teachers import TeacherChunk, TopChunk


class Block(NamedTuple):
    """A chunk in hand: its rows, their raw logits, and what the teachers say of them."""

    chunk: Chunk
    numbers: Any  # where its rows stand among all rows
    raw_CV: Tensor
    teachers: tuple[TeacherChunk | TopChunk, ...]
    kept: Any = None  # what the first sweep leaves for the second; see `backends.torch_kept`

    @property
    def part(self) -> slice:
        """Of the rows that count."""
        return self.chunk.rows


def keeping(sweep: Any, head: Any, block: Block, before: Any = None) -> Block:
    """A block whose gradient is made in the same visit; `before`: what was kept of the last one."""
    keep = getattr(sweep.backend, "keep", None)
    if keep is None or sweep.sums_slopes:  # what is kept sums no slopes
        return block
    out_CV = head.grad_buffer(block.numbers, block.raw_CV)
    how = sweep.source.softcap, block.teachers, head.makes_logits, before
    return block._replace(kept=keep(block.raw_CV, out_CV, sweep.want, *how))
