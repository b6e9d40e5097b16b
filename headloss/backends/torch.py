"""The two passes over the vocabulary in plain PyTorch, on any device: the definition that every kernel must match.

Dimension key:  C rows passed in   B rows of a tile   V columns passed in

`sums` reads the logits and `pull` writes their gradient, both in float32 or better.  They walk the rows in tiles, so
that temporaries stay small: on a CPU a tile fits the cache, and element-wise steps run at the speed of arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.backends.torch_columns import combine as combine
from headloss.backends.torch_columns import project as project
from headloss.backends.torch_columns import take as take
from headloss.backends.torch_kept import BUFFER_BYTES as BUFFER_BYTES
from headloss.backends.torch_kept import Kept, same_memory
from headloss.backends.torch_kept import keep as keep
from headloss.backends.torch_teacher_pulls import add_at_ids, pull_tile, tail_slope
from headloss.backends.torch_teachers import Comparison, divergence_sums, join
from headloss.backends.torch_tile import Tile, Workspace, divide, floored, logits
from headloss.facts import FLOOR, Moments, Partial, Pull, Softmax, Want
from headloss.teachers import DenseChunk, DensePull, DenseSoftmax, TeacherChunk, TeacherPulls, Temperature, places

NAME = "torch"

TILE_BYTES = {"cpu": 1 << 23}  # with 1 MiB, a fifth of the time goes into calling torch and waiting for threads
TILE_BYTES_ELSEWHERE = 64 << 20
lower = product = product_ranks = None  # no programs and no matrix products: this backend has no kernels
DIVERGENCE_BUFFERS = 8  # a divergence and its slope need about 20 buffers of a tile's size
# Next to a dense teacher buffers of 1 MiB fit the cache together, which saves a quarter of the time.  The pass over its
# divergences looks up what the sums kept by a tile's first row, so both use the same tiles.
DENSE_BUFFERS = {"cpu": DIVERGENCE_BUFFERS}


def sums(
    raw_CV: Tensor,
    target_C: Tensor | None,
    want: Want,
    temperatures: Sequence[float | Tensor],
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    start: int = 0,
    teachers: Sequence[TeacherChunk] = (),
    kept: Kept | None = None,
) -> Partial:
    """The partial of these columns; `start` is the first column's index in the whole vocabulary.

    `kept`: where to keep what the pull can reuse, if these are all columns of the rows.
    """
    C, V = raw_CV.shape
    dtype = torch.promote_types(raw_CV.dtype, torch.float32)
    fresh = lambda: torch.empty(C, dtype=dtype, device=raw_CV.device)
    out = Partial(
        max=fresh(),
        argmax=fresh() if want.argmax else None,
        target=fresh() if want.target else None,
        total=fresh() if want.total else None,
        columns=fresh().fill_(V) if want.total else None,
        moments=tuple(
            Moments(fresh(), *(fresh() if want.sums(x, T) else None for x in Moments._fields[1:]))
            for T in want.temperatures
        ),
        least=fresh() if want.sums("least") else None,
    )
    column_C, here_C = (None, None) if target_C is None else places(target_C, start, V)
    only_T, workspace = temperatures[0] if len(temperatures) == 1 else None, Workspace()
    comparisons = [
        Comparison(*named, want, dtype, raw_CV.device, only_T, kept)
        for named in zip(want.teachers, teachers, strict=True)
    ]
    for rows in _tiles(raw_CV, _buffers(raw_CV, teachers, kept)):
        t_BV = None
        if kept is not None and softcap is not None:
            t_BV = kept.tile(rows) if kept.kind == "tanh" else workspace("t", raw_CV[rows], dtype)
        z_BV = logits(raw_CV[rows], scale, softcap, t_BV)
        if V == 0:
            _identity(out, rows)
            _compare_empty(comparisons, rows, z_BV, out.max[rows], start, want, temperatures)
            continue
        if out.argmax is not None:
            max_B, argmax_B = z_BV.max(-1)
            out.argmax[rows] = (argmax_B + start).to(dtype)
        else:
            max_B = z_BV.amax(-1)
        out.max[rows] = max_B
        if out.least is not None:
            out.least[rows] = z_BV.amin(-1)
        max_B.masked_fill_(max_B == -math.inf, 0.0)
        x_BV = torch.sub(z_BV, max_B[:, None], out=workspace("x", z_BV, dtype))
        if out.target is not None:
            assert column_C is not None
            out.target[rows] = x_BV.gather(-1, column_C[rows, None])[:, 0]
        if out.total is not None:
            out.total[rows] = x_BV.sum(-1)
        for comparison in comparisons:
            comparison.tile(rows, z_BV, x_BV, max_B, start)
        for i, (moments, T) in enumerate(zip(out.moments, temperatures, strict=True)):
            if want.only_of_logits:
                moments.S[rows] = 1.0
                for comparison in comparisons:
                    comparison.skip(moments.S[rows])
                continue
            key, last = want.temperatures[i], i == len(out.moments) - 1  # x may then be overwritten
            s_BV = divide(x_BV, T, rows, into=x_BV if last else None)
            weighs = moments.X is not None or any(comparison.weighs(key) for comparison in comparisons)
            if weighs:
                s_BV = floored(s_BV, keep=s_BV is x_BV and not last)
            weighs = weighs or (kept is not None and kept.kind == "unit")
            keeps = last and kept is not None and kept.holds("e", rows)
            if keeps and kept is not None:
                e_BV = torch.exp(s_BV, out=kept.tile(rows))
            else:
                e_BV = s_BV.exp_() if last and not weighs else torch.exp(s_BV, out=workspace("e", s_BV, dtype))
            S_B = e_BV.sum(-1)
            if moments.Q is not None:
                moments.Q[rows] = (e_BV * e_BV).sum(-1)
            for comparison in comparisons:
                S_B = comparison.sums(rows, key, T, s_BV, e_BV, S_B)
            moments.S[rows] = S_B
            if kept is not None and kept.kind == "capped" and t_BV is not None:
                torch.addcmul(e_BV, e_BV * t_BV, t_BV, value=-1, out=kept.tile(rows))
                if column_C is not None:
                    kept.slopes[rows.start] = 1 - t_BV.gather(-1, column_C[rows, None]) ** 2
            if moments.X is not None:
                moments.X[rows] = (s_BV if keeps else e_BV).mul_(e_BV if keeps else s_BV).sum(-1)
    if out.target is not None and here_C is not None:
        out.target.masked_fill_(~here_C, -math.inf)
    return out._replace(teachers=tuple(comparison.partial() for comparison in comparisons))


def pull(
    raw_CV: Tensor,
    target_C: Tensor | None,
    softmax: Softmax,
    pulls: Sequence[Pull],
    temperatures: Sequence[float | Tensor],
    out_CV: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    start: int = 0,
    teachers: Sequence[TeacherChunk] = (),
    teacher_pulls: Sequence[TeacherPulls] = (),
    teacher_temperatures: Sequence[Sequence[Temperature]] = (),
    kept: Kept | None = None,
) -> None:
    """Write the gradient with respect to the raw logits into `out_CV`, which may be `raw_CV` itself."""
    V = raw_CV.shape[-1]
    column_C, here_C = (None, None) if target_C is None else places(target_C, start, V)
    parts: list[tuple[Any, ...]] = [
        (T, i == len(pulls) - 1, *_of_exp(k, log_sum, T), k.y if k.y is None or here_C is None else k.y * here_C)
        for i, (T, log_sum, k) in enumerate(zip(temperatures, softmax.log_sums, pulls, strict=True))
        if any(x is not None for x in k)
    ]
    divergent = kept is None and any(isinstance(k, DensePull) and k.divergences for own in teacher_pulls for k in own)
    workspace = Workspace()
    in_place = kept is not None and same_memory(kept.buffer_CV, out_CV)
    shared = kept is not None and any(isinstance(chunk, DenseChunk) for chunk in teachers)  # its pull needs e again
    # the same tiles as in `sums`
    for rows in _tiles(raw_CV, DIVERGENCE_BUFFERS if divergent else _buffers(raw_CV, teachers, kept)):
        tile = Tile(raw_CV[rows], rows, scale, softcap, softmax, kept, workspace)
        capped = tile.kept_as("capped") is not None
        grad_BV = None
        for T, last, a, b, e, c, y in parts:
            if a is None:  # no softmax in it
                ds_BV = tile.zeros()
            else:
                e_BV = tile.kept_BV if capped else tile.kept_as("e") if last else None
                x_BV = tile.x_BV(T, "first" if grad_BV is None else "next") if e_BV is None or b is not None else None
                if e_BV is None and x_BV is not None:
                    e_BV = x_BV.exp_() if b is None else x_BV.exp()
                slope = a[rows, None]
                if last and tile.ids_BK is not None:
                    slope = slope + tail_slope(tile, softmax.teachers[0], teacher_pulls[0][0], T)
                if b is not None and x_BV is not None:
                    slope = x_BV.clamp_(min=FLOOR).mul_(b[rows, None]).add_(slope)
                if e is not None:
                    slope = slope + e_BV * e[rows, None]
                assert e_BV is not None
                ds_BV = e_BV * slope if last and shared else e_BV.mul_(slope)
                if last and tile.ids_BK is not None:
                    add_at_ids(ds_BV, tile, teachers[0], start, tile.ids_BK * a[rows, None])
            if c is not None:
                ds_BV += c[rows, None]
            if y is not None and column_C is not None and V:
                y_B1 = (y / T)[rows, None]
                ds_BV.scatter_add_(
                    -1, column_C[rows, None], y_B1 * kept.slopes[rows.start] if capped and kept else y_B1
                )
            grad_BV = ds_BV if grad_BV is None else grad_BV.add_(ds_BV)
        for number, own in enumerate(zip(teachers, softmax.teachers, teacher_pulls, teacher_temperatures, strict=True)):
            grad_BV = pull_tile(grad_BV, tile, number, *own, start)
        if grad_BV is None:
            out_CV[rows] = 0
            continue
        if softcap is not None and not capped:
            grad_BV.addcmul_(grad_BV * tile.t_BV, tile.t_BV, value=-1)  # 1 - tanh^2
        if scale != 1.0:
            grad_BV *= scale
        if not (in_place and grad_BV is tile.kept_BV):
            out_CV[rows] = grad_BV


def divergence_pass(
    raw_CV: Tensor,
    want: Want,
    softmax: Softmax,
    teachers: Sequence[TeacherChunk],
    teacher_temperatures: Sequence[Sequence[Temperature]],
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    whole: bool = False,
    kept: Kept | None = None,
) -> list[tuple[Tensor, Tensor | None]]:
    """The second read: for every divergence asked for, in order, its sum over these columns and that of its slopes.

    `whole`: these are all the columns; the pull will have them all too, and sums the slopes itself.
    """
    if kept is not None and kept.divergences:  # `sums` has computed it already
        return [(torch.cat(kept.divergences), None)]
    tiles: list[list[tuple[Tensor, Tensor | None]]] = []
    for rows in _tiles(raw_CV, DIVERGENCE_BUFFERS):
        z_BV = Tile(raw_CV[rows], rows, scale, softcap, softmax, kept, Workspace()).z_BV
        found: list[tuple[Tensor, Tensor | None]] = []
        teacher_rows = zip(want.teachers, teachers, softmax.teachers, teacher_temperatures, strict=True)
        for name, chunk, softmax_t, Ts in teacher_rows:
            if isinstance(chunk, DenseChunk):
                assert isinstance(softmax_t, DenseSoftmax)
                for i, key in enumerate(want.temperatures_of(name)):
                    elements = [f.element for f in want.divergences(name, key)]
                    found += divergence_sums(z_BV, rows, chunk, softmax_t, softmax, Ts[i], i, elements, whole)
        tiles.append(found)
    return [tuple(join(xs) for xs in zip(*pair, strict=True)) for pair in zip(*tiles, strict=True)]


def scale_(x: Tensor, scale: Tensor) -> None:
    """x *= scale in place, in float32 where x is narrower."""
    x.mul_(scale) if x.dtype.itemsize >= 4 else x.copy_(x.float() * scale)


def cannot_run(want: Want) -> None:
    """None: every divergence can run, as it is made of torch's own operations."""


def _compare_empty(comparisons: Sequence[Comparison], rows: slice, *tile: Any) -> None:
    """The sums of a part without columns."""
    z_BV, max_B, start, want, temperatures = tile
    for comparison in comparisons:
        comparison.tile(rows, z_BV, z_BV, max_B, start)
        for key, T in zip(want.temperatures, temperatures, strict=True):
            comparison.sums(rows, key, T, z_BV, z_BV, max_B.new_zeros(len(max_B)))


def _of_exp(
    k: Pull, log_sum: Tensor, T: Temperature
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """From coefficients of p = e^x / S, by s = z / T, to those of e^x, by z: divisions of vectors here save passes.

    p (a + b log p + e p) + c = e^x (a - b log S + b x + e/S e^x) / S + c        a is None: no term has a p
    """
    c = None if k.c is None else k.c / T
    if k.a is None and k.b is None and k.e is None:
        return None, None, None, c
    inverse = (-log_sum).exp()
    a = torch.zeros_like(log_sum) if k.a is None else k.a
    a, inverse_T = a if k.b is None else a - k.b * log_sum, inverse / T
    b, e = None if k.b is None else k.b * inverse_T, None if k.e is None else k.e * inverse_T * inverse
    return a * inverse_T, b, e, c


def _buffers(raw_CV: Tensor, teachers: Sequence[TeacherChunk], kept: Kept | None) -> int:
    """How many buffers of a tile's size exist at once; the sums and the pull must use the same tiles."""
    if any(isinstance(chunk, DenseChunk) for chunk in teachers):
        return DENSE_BUFFERS.get(raw_CV.device.type, 2)
    return 1 if not teachers or kept is not None else 2


def _tiles(raw_CV: Tensor, buffers: int = 1) -> Iterator[slice]:
    """Slices of rows: the more `buffers` of their size, the shorter, so that together they take no more memory."""
    row_bytes = max(1, raw_CV.shape[-1]) * max(4, raw_CV.element_size()) * buffers
    step = max(1, TILE_BYTES.get(raw_CV.device.type, TILE_BYTES_ELSEWHERE) // row_bytes)
    for i in range(0, max(1, raw_CV.shape[0]), step):  # without rows there is still one tile, which is empty
        yield slice(i, min(i + step, raw_CV.shape[0]))


def _identity(out: Partial, rows: slice) -> None:
    """A part without columns: the identity of the merge."""
    out.max[rows] = -math.inf
    for x, value in ((out.argmax, 0.0), (out.target, -math.inf), (out.total, 0.0), (out.least, math.inf)):
        if x is not None:
            x[rows] = value
    for moments in out.moments:
        for x in moments:
            if x is not None:
                x[rows] = 0.0
