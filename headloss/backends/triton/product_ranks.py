"""The head's matrix products when ranks share a vocabulary: the numbers they exchange, and the sums made from them.

Dimension key:  C rows of a chunk   V columns of this rank   D hidden size   W ranks   k numbers of a row that travel

The tiles of all ranks are merged in the same tree as on one rank.  So if the vocabulary is cut at multiples of a tile,
the facts of a row have the same bits on any number of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton  # type: ignore
from torch import Tensor

from headloss.backends.triton import product
from headloss.backends.triton.kernels.product_ranks import across_kernel, nodes_kernel
from headloss.backends.triton.kernels.product_records import RanksFlags
from headloss.backends.triton.launch import launch_kernel
from headloss.backends.triton.product import Gathered, Read
from headloss.backends.triton.tiles import plain_temperature
from headloss.facts import Want


def read(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    target_C: Tensor | None,
    want: Want,
    temperature: float | Tensor,
    *,
    start: int,
    vocab: int,
    scale: float = 1.0,
    ignore: bool = False,
    store: Tensor | None = None,
) -> Read:
    """Like `product.read`, for the columns from `start` on; its sums are the (k, C) numbers that `across` takes.

    These are indexed by places, not by rows: ranks that have the same targets have the same places.
    """
    given, C, V = plain_temperature(temperature), len(hidden_CD), len(weight_VD)
    rows = product.gather(hidden_CD, weight_VD, target_C, given, scale=scale, start=start, ignore=ignore)
    parts = rows.numbers[0].new_empty(_fields(want), 1, len(rows.targets))  # not read if there are no columns
    if V:
        parts = product.tile_sums(rows, weight_VD, want, start=start, store=store)
        product.merge(parts, rows.live, want, start // product.READ.columns)
    levels, (_, tiles, high) = _levels(vocab), parts.shape
    nodes_kC = rows.numbers[0].new_empty(2 * levels * _fields(want) + 4, C)
    launch_kernel(
        nodes_kernel, triton.cdiv(C, 128) * (2 * levels + 1),
        parts, rows.live, rows.targets, rows.numbers[1], nodes_kC, tiles if V else 0, high, C, V, start, levels,
        **_constants(rows, want),
    )  # fmt: skip
    far = rows.live
    if store is not None and V:  # the maximum over the columns here tells if a row is far from its reference
        own, totals = _joined(rows, nodes_kC[None], want, vocab)
        far = product.finish(own, totals, want, given, rows=C, columns=V, store=store, whole=False).far
    return Read(rows, nodes_kC, store, far)


def across(read: Read, nodes_WkC: Tensor, want: Want, temperature: float | Tensor, vocab: int) -> Tensor:
    """(F, C): the sums of each row over the columns of all ranks; the softmax in `read` is then over these too."""
    rows, totals = _joined(read.rows, nodes_WkC, want, vocab)
    given, C = plain_temperature(temperature), nodes_WkC.shape[2]
    return product.finish(rows, totals, want, given, rows=C, columns=vocab).sums


def over_ranks(read: Read, lse_C: Tensor) -> None:
    """Set the log-sum-exp of rows whose softmax over all ranks is already known."""
    listed, (*_, lse, logprob, _) = read.rows.listed, read.rows.numbers
    found = lse_C.to(torch.float32) / math.log(2)  # in base 2, as in the kernels
    found = found if listed is None else found[listed.long()]
    logprob[: len(found)] += (lse[: len(found)] - found) * math.log(2)
    lse[: len(found)] = found


def _joined(rows: Gathered, nodes_WkC: Tensor, want: Want, vocab: int) -> tuple[Gathered, Tensor]:
    """The rows, with their targets' columns in the whole vocabulary and logits, and the sums over all columns."""
    (W, _, C), levels, high = nodes_WkC.shape, _levels(vocab), len(rows.targets)
    numbers = rows.numbers
    new_empty = numbers[0].new_empty
    scratch, totals = new_empty(levels + 1, _fields(want), high), new_empty(_fields(want), 1, high)
    targets = torch.empty_like(rows.targets)
    launch_kernel(
        across_kernel, triton.cdiv(C, 128),
        nodes_WkC, rows.live, scratch, totals, targets, numbers[1], W, *nodes_WkC.stride()[:2], C, high, levels,
        **_constants(rows, want),
    )  # fmt: skip
    return rows._replace(targets=targets), totals


def _levels(vocab: int) -> int:
    """Levels of a tree over the tiles of a vocabulary; a cut inside a tile makes one more tile."""
    return (-(-vocab // product.READ.columns) + 1).bit_length()


def _fields(want: Want) -> int:
    return 2 + sum(product.sums_of(want))


def _constants(rows: Gathered, want: Want) -> dict[str, Any]:
    flags = RanksFlags(rows.has_target, _fields(want), product.READ.columns, product.LEVELS, 128)
    return {"SUMS": product.sums_of(want), "F": flags, "num_warps": 4}
