"""`Block`: a chunk with its logits and teachers, and what a visit keeps from reading it to writing its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from headloss.engine.arguments import Chunk
from headloss.teachers import TeacherChunk, TopChunk


class Block(NamedTuple):
    """A chunk that is being worked on: its rows, their raw logits, and the teachers' logits or ids for them."""

    chunk: Chunk
    numbers: Any  # the indices of its rows among all rows
    raw_CV: Tensor
    teachers: tuple[TeacherChunk | TopChunk, ...]
    kept: Any = None  # what the first sweep leaves for the second; see `backends.torch_kept`

    @property
    def part(self) -> slice:
        """Its rows, among those that count."""
        return self.chunk.rows


def keeping(sweep: Any, head: Any, block: Block, before: Any = None) -> Block:
    """The block with room to keep what its gradient, made in the same visit, can reuse; `before`: the last block's."""
    keep = getattr(sweep.backend, "keep", None)
    if keep is None or sweep.sums_slopes:  # what is kept has no sums of slopes
        return block
    out_CV = head.grad_buffer(block.numbers, block.raw_CV)
    how = sweep.source.softcap, block.teachers, head.makes_logits, before
    return block._replace(kept=keep(block.raw_CV, out_CV, sweep.want, *how))
