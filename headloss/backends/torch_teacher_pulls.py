"""The torch backend's gradient of facts that compare with teachers, for a tile of rows; see `headloss.teachers`.

Dimension key:  B rows of a tile   V columns passed in   U columns shared with the teacher   K ids
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.backends.torch_teachers import inside, logprobs
from headloss.backends.torch_tile import Tile, divide, logits, part_of
from headloss.teachers import (
    FLOOR,
    DenseChunk,
    DensePull,
    DenseSoftmax,
    SparseChunk,
    SparsePull,
    SparseSoftmax,
    TeacherChunk,
    TeacherPulls,
    Temperature,
    column,
    logit_pull,
)


def pull_tile(
    grad_BV: Tensor | None,
    tile: Tile,
    number: int,
    chunk: TeacherChunk,
    softmax_t: Any,
    pulls: TeacherPulls,
    temperatures: Sequence[Temperature],
    start: int,
) -> Tensor | None:
    """Add one teacher's pull to a tile's gradient; a gradient of None is all zeros.  `number`: the teacher's index."""
    rows = tile.rows
    for i, (pull, T) in enumerate(zip(pulls, temperatures, strict=True)):
        if isinstance(pull, DensePull):
            assert isinstance(chunk, DenseChunk)
            if pull.of_logits:
                z_BU = tile.z_BV[:, : chunk.columns]
                u_BU = logits(chunk.raw_CV[rows, : chunk.columns], chunk.scale, chunk.softcap).to(z_BU.dtype)
                grad_BV = tile.zeros() if grad_BV is None else grad_BV
                logit_pull(grad_BV[:, : chunk.columns], z_BU, u_BU, pull, rows)
            if not pull.divergences and all(x is None for x in pull[:4]):
                continue
            unit_BV = tile.kept_as("unit")
            if unit_BV is not None:
                g = pull.divergences[0].g if pull.divergences else pull.a
                assert g is not None
                g_BU = unit_BV.mul_((g / T)[rows, None])
            elif pull.divergences:
                g_BU = _pull_divergences(pull, tile, chunk, softmax_t, T, i)
                g_BU = divide(g_BU, T, rows, into=g_BU)
            else:
                kept = None if tile.kept is None or tile.kept.number[number] != i else tile.kept_as("e")
                g_BU = _pull_dense(pull, tile, chunk, softmax_t, T, i, kept, "first" if grad_BV is None else "next")
        elif isinstance(pull, SparsePull) and isinstance(chunk, SparseChunk):
            grad_BV = _pull_sparse(grad_BV, pull, tile, chunk, softmax_t, T, i, start)
            continue
        if grad_BV is None and g_BU.shape == tile.raw_BV.shape:
            grad_BV = g_BU
        else:
            grad_BV = tile.zeros() if grad_BV is None else grad_BV
            grad_BV[:, : g_BU.shape[-1]] += g_BU
    return grad_BV


def _pull_divergences(pull: DensePull, tile: Tile, chunk: DenseChunk, softmax_t: Any, T: Any, i: int) -> Tensor:
    """The pull of divergences, and of other facts at this temperature, with respect to s."""
    rows = tile.rows
    logp_BU, logq_BU = logprobs(tile.z_BV, rows, chunk, softmax_t, tile.softmax, T, i)
    p_BU = logp_BU.exp()
    g_BU = None
    for element, g, C in pull.divergences:
        _, slope_BU = element.value_and_slope(logp_BU, logq_BU)
        C_B = slope_BU.sum(-1) if C is None else C[rows]
        own_BU = torch.addcmul(slope_BU, p_BU, C_B[:, None], value=-1).mul_(g[rows, None])
        g_BU = own_BU if g_BU is None else g_BU.add_(own_BU)
    assert g_BU is not None
    weight_BU: Tensor | None = None
    for k, log_BU in ((pull.b, logp_BU), (pull.c, logq_BU)):
        if k is not None:
            weight_BU = log_BU * k[rows, None] if weight_BU is None else weight_BU.addcmul_(log_BU, k[rows, None])
    if pull.a is not None:
        weight_BU = pull.a[rows, None] if weight_BU is None else weight_BU.add_(pull.a[rows, None])
    g_BU = g_BU if weight_BU is None else g_BU.addcmul_(p_BU, weight_BU)
    return g_BU if pull.d is None else g_BU.addcmul_(logq_BU.exp_(), pull.d[rows, None])


def _pull_dense(
    pull: DensePull,
    tile: Tile,
    chunk: DenseChunk,
    softmax_t: DenseSoftmax,
    T: Any,
    i: int,
    kept_BV: Tensor | None,
    name: str,
) -> Tensor:
    """The pull by z.  As in `torch.pull`, coefficients of p = e^x / S and q = e^y / St become those of e^x and e^y:

    p (a + b log p + c log q) + d q = e^x (a - b log S - c log St + b x + c y) / S + e^y d / St
    """
    rows, U = tile.rows, chunk.columns
    log_S, log_St = softmax_t.log_S[i][rows], softmax_t.log_St[i][rows]
    T_B: Any = part_of(T, rows)
    over_S, over_St = (-log_S).exp() / T_B, (-log_St).exp() / T_B
    a, b, c, d = (None if k is None else k[rows] for k in pull[:4])
    finite = b is not None or c is not None
    g_BU: Tensor | None = None
    x_BU: Tensor | None = None
    y_BU: Tensor | None = None
    if c is not None or d is not None:
        u_BU = logits(chunk.raw_CV[rows, :U], chunk.scale, chunk.softcap).to(log_S.dtype)
        y_BU = torch.sub(u_BU, softmax_t.max[rows, None], out=tile.workspace(f"y of {name}", u_BU, log_S.dtype))
        y_BU = divide(y_BU, chunk.temperatures[i], rows, into=y_BU)
        y_BU = y_BU.clamp_(min=FLOOR) if finite else y_BU
    if a is not None or finite:
        if kept_BV is None or b is not None:
            x_BU = tile.x_BV(T, f"x of {name}")[:, :U]
            x_BU = x_BU.clamp_(min=FLOOR) if finite else x_BU
        e_BU = kept_BV[:, :U] if kept_BV is not None else x_BU.exp() if b is not None else x_BU.exp_()  # type: ignore[union-attr]
        own_B = torch.zeros_like(log_S) if a is None else a
        own_B = own_B if b is None else own_B - b * log_S
        own_B = own_B if c is None else own_B - c * log_St
        slope: Tensor = (own_B * over_S)[:, None]
        if b is not None and x_BU is not None:
            slope = x_BU.mul_((b * over_S)[:, None]).add_(slope)
        if c is not None and y_BU is not None:
            own_BU = y_BU * (c * over_S)[:, None] if d is not None else y_BU.mul_((c * over_S)[:, None])
            slope = own_BU.add_(slope)
        g_BU = e_BU * slope if slope.shape != e_BU.shape else slope.mul_(e_BU)
    if d is not None and y_BU is not None:
        q_BU, d_B1 = y_BU.exp_(), (d * over_St)[:, None]
        g_BU = q_BU.mul_(d_B1) if g_BU is None else g_BU.addcmul_(q_BU, d_B1)
    assert g_BU is not None
    return g_BU


def tail_slope(tile: Tile, softmax_t: Any, pull: Any, T: Temperature) -> Tensor | float:
    """(B, 1) what the tail's pull adds to the coefficient of e^x, by z, where the tail's maximum is near the row's."""
    rows, k = tile.rows, pull.tail
    if k is None or softmax_t.tail_max is None:
        return 0.0
    T_B = part_of(T, rows)
    below_B = (tile.softmax.max[rows] - softmax_t.tail_max[rows]) / T_B - softmax_t.tail_log_sums[0][rows]
    return (k[rows] * below_B.exp() / T_B)[:, None]


def add_at_ids(grad_BV: Tensor, tile: Tile, chunk: Any, start: int, own_BK: Tensor) -> None:
    column_BK, here_BK = tile.places(chunk, start)
    grad_BV.scatter_add_(-1, column_BK, own_BK.masked_fill(~here_BK, 0.0))


def _pull_sparse(
    grad_BV: Tensor | None,
    pull: SparsePull,
    tile: Tile,
    chunk: SparseChunk,
    softmax_t: SparseSoftmax,
    T: Temperature,
    i: int,
    start: int,
) -> Tensor:
    rows = tile.rows
    T_B1 = column(part_of(T, rows))
    if pull.tail is not None and softmax_t.tail_max is not None and tile.ids_BK is None:
        x_BV = tile.z_BV - softmax_t.tail_max[rows, None]
        x_BV = divide(x_BV, T, rows, into=x_BV).sub_(softmax_t.tail_log_sums[i][rows, None])
        inside_BV = inside(*tile.places(chunk, start), x_BV.shape[-1])
        g_BV = x_BV.masked_fill_(inside_BV, -math.inf).exp_().mul_(pull.tail[rows, None] / T_B1)
        grad_BV = g_BV if grad_BV is None else grad_BV.add_(g_BV)
    grad_BV = tile.zeros() if grad_BV is None else grad_BV
    if pull.ids is not None and grad_BV.shape[-1]:
        add_at_ids(grad_BV, tile, chunk, start, pull.ids[rows] / T_B1)
    return grad_BV
