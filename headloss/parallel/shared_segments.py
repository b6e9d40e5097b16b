"""Counts of segments that lie on several ranks, and a check that these ranks speak of the same segments.

Dimension key:  S segments   m marks

Ranks that share segments talk once before anything else, to count rows.  What they must agree on travels along as a few
marks, each a whole number below 2^20 with its square: a rank whose own mark times the number of ranks is the sum, and
likewise for the square, knows that all marks are equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from headloss.deferred_checks import readable
from headloss.parallel.shard import hashed, together

ALIKE = (  # what each mark stands for; each text below 255 bytes, the most that CUDA takes
    "num_segments: differs between ranks that share segments; give every rank the segments of the whole batch, and "
    "take its rows with segments.select(rows)",
    "objective: the terms or metrics that go by segments, their reductions, the dtype, or whether there is a gradient, "
    "differ between ranks that share segments",
    "inputs: pairs, or whole numbers given one per segment, differ between ranks that share segments; give every rank "
    "those of the whole batch",
)
_MOST = 1 << 20  # squares over 8192 ranks are exact in float64


def sum_counts(
    counts_S: Tensor, more: Tensor, group: dist.ProcessGroup, said: str = "", same: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """The sums over the ranks of `counts_S` and of the scalar `more`, in one collective that also checks that all ranks
    give as many segments, say the same and hold the same numbers in `same`."""
    S, wide = len(counts_S), counts_S.double()
    marks = wide.new_full((len(ALIKE),), zlib.crc32(said.encode()) % _MOST if said else 0)
    marks[0] = S % _MOST
    numbers = [x.reshape(-1).long() for x in same]
    marks[2] = hashed(torch.cat(numbers)).sum() % _MOST if numbers else 0
    room = 1 << max(10, (S - 1).bit_length())  # as much on ranks that disagree on S, unless they disagree by a lot
    held = torch.cat([marks, marks.square(), more.to(wide)[None], wide, wide.new_zeros(room - S)])
    with together("summing over the ranks that share segments or counts"):
        dist.all_reduce(held, group=group)
    first, second, total, sums_S = held[: 7 + S].split([3, 3, 1, S])
    ranks = dist.get_world_size(group)
    equal = (first == marks * ranks) & (second == marks.square() * ranks)
    for holds, text in zip(equal, ALIKE, strict=True):
        if not readable(holds):
            torch._assert_async(holds, text)
        elif not holds:
            raise ValueError(text)
    return sums_S, total[0]
