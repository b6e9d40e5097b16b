"""Sums over rows in one launch: counts of targets and segments, and the sums of terms after a visit or settling.

Dimension key:  N rows   T terms
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.backends.triton.given_numbers import Number, as_number, kinds_in, specialization_of
from headloss.backends.triton.kernels.totals import count_kernel, totals_kernel
from headloss.backends.triton.launch import Launch
from headloss.backends.triton.visit_records import Visited


def totals(visited: Visited, weights: Iterable[Number]) -> tuple[Tensor, Tensor]:
    """The sum over rows of each term's value, (T,), and the loss, the sum of those times their weights: one launch."""
    found, first = visited.term_values
    device = found.device
    weights = tuple([w if type(w) is float else as_number(w, device) for w in weights])
    return launch_totals(totals_kernel_for(first, weights), found, weights)


def launch_totals(kernel: Launch, found: Tensor, weights: tuple[Number, ...]) -> tuple[Tensor, Tensor]:
    """Launch the kernel of `totals`."""
    device = found.device
    sums = torch.empty(len(weights), dtype=torch.float32, device=device)
    loss = torch.empty_strided((), (), dtype=torch.float32, device=device)  # half the time of torch.empty(())
    kernel.run(None, found.get_device(), 1, (found, sums, loss, weights, found.shape[1]))
    return sums, loss


class Counted(NamedTuple):
    """What the device knows of the targets of all rows."""

    numbers: Tensor  # as `prepared.Stats.read` takes them: (3,), with segments (5,)
    one_token: Tensor  # 1 / how many rows count
    valid_N: Tensor  # which of them count
    ids_N: Tensor | None  # the segment of each row, -1 where it is ignored


def count_targets(target_N: Tensor, ids_N: Tensor | None = None, numbers: Tensor | None = None) -> Counted:
    """Count contiguous targets and, if given, the contiguous segment ids of the rows.  `numbers`: where to write the
    counts, such as pinned memory of the host.
    """
    device, N = target_N.device, target_N.shape[0]
    if numbers is None:
        numbers = torch.empty(3 if ids_N is None else 5, dtype=torch.int64, device=device)
    mean, valid_N, live_ids_N = (
        torch.empty_strided((), (), dtype=torch.float64, device=device),
        torch.empty(N, dtype=torch.bool, device=device),
        None if ids_N is None else torch.empty_like(ids_N),
    )
    aligned = target_N.data_ptr() & 15 == 0, numbers.data_ptr() & 15 == 0, ids_N is None or ids_N.data_ptr() & 15 == 0
    key = (target_N.dtype, *aligned, N >> 31)
    launch = _COUNT if ids_N is None else _COUNT_BOTH
    launch.run(key, target_N.get_device(), 1, (target_N, ids_N, numbers, mean, valid_N, live_ids_N, N))
    return Counted(numbers, mean, valid_N, live_ids_N)


_COUNT, _COUNT_BOTH = [
    Launch(count_kernel, {"SEGMENTS": segments, "B": rows, "num_warps": 16})
    for segments, rows in ((False, 4096), (True, 2048))  # with seven sums, fewer rows per lane
]


def totals_kernel_for(first: int, weights: tuple[Number, ...]) -> Launch:
    """The kernel of `totals`.  `first`: the row of `found` that has the first term's values."""
    return _totals(first, specialization_of(weights))


@functools.lru_cache(256)
def _totals(first: int, specialization: tuple[Any, ...]) -> Launch:
    kinds = kinds_in(specialization)
    padded = 1 << (len(kinds) - 1).bit_length()
    block = max(256, 8192 // padded)
    return Launch(totals_kernel, {"FIRST": first, "KINDS": kinds, "P": padded, "B": block, "num_warps": 16})
