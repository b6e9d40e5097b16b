"""Counts of segments that lie on several ranks, and a check that these ranks mean the same segments.

Dimension key:  S segments   m marks

Ranks that share segments have one collective before anything else, to count rows.  What they must agree on travels
along as a few marks, each a whole number below 2^20 with its square: if a rank's own mark times the number of ranks is
the sum, and likewise for the square, all marks are equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from headloss.deferred_checks import readable
from headloss.parallel.shard import collective, hashed

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
    counts_S: Tensor, scalar: Tensor, group: dist.ProcessGroup, text: str = "", tensors: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """The sums over the ranks of `counts_S` and of `scalar`, in one collective that also checks that all ranks have the
    same number of segments, the same `text` and the same numbers in `tensors`."""
    S, wide = len(counts_S), counts_S.double()
    marks = wide.new_full((len(ALIKE),), zlib.crc32(text.encode()) % _MOST if text else 0)
    marks[0] = S % _MOST
    numbers = [x.reshape(-1).long() for x in tensors]
    marks[2] = hashed(torch.cat(numbers)).sum() % _MOST if numbers else 0
    length = 1 << max(10, (S - 1).bit_length())  # equal on ranks that disagree on S, unless they disagree by a lot
    packed = torch.cat([marks, marks.square(), scalar.to(wide)[None], wide, wide.new_zeros(length - S)])
    with collective("summing over the ranks that share segments or counts"):
        dist.all_reduce(packed, group=group)
    sums, squares, total, sums_S = packed[: 7 + S].split([3, 3, 1, S])
    ranks = dist.get_world_size(group)
    equal = (sums == marks * ranks) & (squares == marks.square() * ranks)
    for holds, message in zip(equal, ALIKE, strict=True):
        if not readable(holds):
            torch._assert_async(holds, message)
        elif not holds:
            raise ValueError(message)
    return sums_S, total[0]
