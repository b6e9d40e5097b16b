"""What the first sweep keeps for the second in the gradient's memory, so that it is not computed twice (CPU only).

Dimension key:  C rows passed in   B rows of a tile   V columns passed in   K ids

On a CPU an exponential costs as much as ten passes over memory.  Until the second sweep the gradient's memory is free,
or has logits that are not read again, so it can keep one of these:

    e      e^x at the last temperature, x = (z - max) / T: the student's pull is a multiple of it
    capped e^x times the slope of a softcap, if the pull is a multiple of that everywhere but at the target
    tanh   the tanh behind a softcap: it costs as much as three exponentials
    unit   the pull of the only fact that compares with a teacher, for a cotangent of 1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headloss.facts import FACTS, Fact, Want
from headloss.large_pages import in_large_pages
from headloss.teachers import DenseChunk, SparseChunk, TeacherChunk, TopChunk

BUFFER_BYTES = 32 << 20  # at most, of a buffer for rows whose gradient has too narrow a dtype
UNIT = ("divergence", "teacher_cross_entropy")


class Kept:
    """What was kept, and where.  `overwrites`: in place of the raw logits, which then exist in `missing` tiles only."""

    def __init__(self, kind: str, buffer_CV: Tensor, overwrites: bool, fact: Fact | None, want: Want) -> None:
        self.kind, self.buffer_CV, self.overwrites, self.fact = kind, buffer_CV, overwrites, fact
        last = want.temperatures[-1]
        # for each teacher, the index among its temperatures of the one that e is kept at
        self.number = [keys.index(last) if last in keys else None for keys in map(want.temperatures_of, want.teachers)]
        self.missing: set[int] = set()
        self.ids: dict[int, Tensor] = {}  # by tile, (B, K) e^x at the ids of a sparse teacher, where e itself is 0
        self.slopes: dict[int, Tensor] = {}  # by tile, (B, 1) the softcap's slope at the target
        self.divergences: list[Tensor] = []  # (B,) the divergence whose unit pull is kept, tile by tile

    def holds(self, kind: str, rows: slice) -> bool:
        return self.kind == kind and rows.start not in self.missing

    def tile(self, rows: slice) -> Tensor:
        return self.buffer_CV[rows]


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two matrices start at the same place in memory; works on fake tensors too."""
    same = x.untyped_storage()._cdata == y.untyped_storage()._cdata
    return same and x.storage_offset() == y.storage_offset()


def keep(
    raw_CV: Tensor,
    out_CV: Tensor,
    want: Want,
    softcap: float | None,
    teachers: Sequence[TeacherChunk | TopChunk],
    tight: bool,
    before: Kept | None = None,
) -> Kept | None:
    """What is worth keeping of these rows, and where.

    `tight`: use no memory but the gradient's.  `before`: what was kept of earlier rows, whose buffer is free again.
    """
    if raw_CV.device.type != "cpu" or not raw_CV.numel():
        return None
    dtype = torch.promote_types(raw_CV.dtype, torch.float32)
    overwrites = out_CV.dtype == dtype and same_memory(raw_CV, out_CV)
    found = _kind(want, softcap, teachers, overwrites)
    if found is None:
        return None
    if out_CV.dtype == dtype:
        return Kept(found[0], out_CV, overwrites, found[1], want)
    if tight or raw_CV.numel() * dtype.itemsize > BUFFER_BYTES:
        return None
    if before is not None and len(before.buffer_CV) >= len(raw_CV):
        return Kept(found[0], before.buffer_CV[: len(raw_CV)], False, found[1], want)
    fresh = in_large_pages(torch.empty(raw_CV.shape, dtype=dtype, device=raw_CV.device))
    return Kept(found[0], fresh, False, found[1], want)


def _kind(
    want: Want, softcap: float | None, teachers: Sequence[TeacherChunk | TopChunk], overwrites: bool
) -> tuple[str, Fact | None] | None:
    """What to keep and, for "unit", of which fact; None if keeping does not pay."""
    pulling = [f for f in want.facts if FACTS[f.name].pulls]
    comparing = [f for f in pulling if f.teacher is not None]
    if not pulling:
        return None
    one = torch.ones((), dtype=torch.float32, device="cpu")
    pulls = [FACTS[f.name].pull(one, one, one) for f in pulling if f.teacher is None]
    if softcap is not None:
        straight = all(k.b is None and k.c is None and k.e is None for k in pulls)
        return "capped" if straight and len(want.temperatures) == 1 and not teachers else "tanh", None
    if len(comparing) == 1 and comparing[0].name in UNIT and not (overwrites and len(pulling) > 1):
        chunk = teachers[want.teachers.index(comparing[0].teacher)]
        if isinstance(chunk, DenseChunk) and not chunk.tail:
            return "unit", comparing[0]
    if not overwrites:
        return None if want.only_of_logits else ("e", None)
    if len(want.temperatures) > 1 or not all(isinstance(x, SparseChunk) for x in teachers):
        return None
    return None if any(k.b is not None for k in pulls) else ("e", None)  # log p needs the logits
