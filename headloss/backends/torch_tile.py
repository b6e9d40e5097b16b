"""A tile of rows in the torch backend: its logits, its temperatures, and what the first sweep kept of it.

Dimension key:  B rows of a tile   V columns passed in
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from headloss.backends.torch_kept import Kept
from headloss.facts import Softmax
from headloss.teachers import FLOOR, SparseChunk, Temperature, places

GONE = "the logits are needed, but the exponentials that were kept have overwritten them"


class Workspace:
    """Buffers that the tiles of a sweep share: new memory costs as much as a pass over it."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.places_by_teacher: dict[int, tuple[SparseChunk, tuple[Tensor, Tensor]]] = {}  # of all rows

    def __call__(self, name: str, like_BV: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised buffer of this size; no later tile is larger than the first."""
        key = name, like_BV.shape[-1]  # teachers may have different widths
        if key not in self.buffers:
            self.buffers[key] = torch.empty(like_BV.shape, dtype=dtype, device=like_BV.device)
        return self.buffers[key][: len(like_BV)]


class Tile:
    """Some rows in the second sweep."""

    def __init__(
        self,
        raw_BV: Tensor,
        rows: slice,
        scale: float,
        softcap: float | None,
        softmax: Softmax,
        kept: Kept | None,
        workspace: Workspace,
    ) -> None:
        self.workspace = workspace
        self.raw_BV, self.rows, self.scale, self.softcap, self.softmax = raw_BV, rows, scale, softcap, softmax
        self.kept = kept if kept is not None and rows.start not in kept.missing else None
        self.kept_BV = None if self.kept is None else self.kept.tile(rows)
        self.gone = self.kept is not None and self.kept.overwrites and self.kept.kind != "tanh"
        # e at the ids, which the kept e leaves out
        self.ids_BK = None if self.kept is None else self.kept.ids.get(rows.start)

    def kept_as(self, kind: str) -> Tensor | None:
        """What the first sweep kept of these rows, if it is of this kind."""
        return self.kept_BV if self.kept is not None and self.kept.kind == kind else None

    @functools.cached_property
    def t_BV(self) -> Tensor:
        """tanh(scale raw / softcap)."""
        t_BV = self.kept_as("tanh")
        assert not self.gone, GONE
        return bounded(self.raw_BV, self.scale, self.softcap or 1.0) if t_BV is None else t_BV

    @functools.cached_property
    def z_BV(self) -> Tensor:
        assert not self.gone, GONE
        return logits(self.raw_BV, self.scale, None) if self.softcap is None else self.t_BV * self.softcap

    def x_BV(self, T: Temperature, name: str) -> Tensor:
        """(z - max) / T, in the buffer of this name."""
        max_B1 = self.softmax.max[self.rows, None]
        x_BV = torch.sub(self.z_BV, max_B1, out=self.workspace(name, self.raw_BV, max_B1.dtype))
        return divide(x_BV, T, self.rows, into=x_BV)

    def places(self, chunk: SparseChunk, start: int) -> tuple[Tensor, Tensor]:
        """See `teachers.places`."""
        cached = self.workspace.places_by_teacher
        if id(chunk) not in cached:
            cached[id(chunk)] = chunk, places(chunk.ids_CK, start, self.raw_BV.shape[-1])
        column_CK, here_CK = cached[id(chunk)][1]
        return column_CK[self.rows], here_CK[self.rows]

    def zeros(self) -> Tensor:
        return torch.zeros(self.raw_BV.shape, dtype=self.softmax.max.dtype, device=self.raw_BV.device)


def logits(raw_BV: Tensor, scale: float, softcap: float | None, into: Tensor | None = None) -> Tensor:
    """z = cap tanh(scale raw / cap), in float32 or better; the tanh goes `into` a buffer if one is given."""
    if softcap is not None:
        return bounded(raw_BV, scale, softcap, into) * softcap
    z_BV = raw_BV.to(torch.promote_types(raw_BV.dtype, torch.float32))
    return z_BV if scale == 1.0 else z_BV * scale


def bounded(raw_BV: Tensor, scale: float, softcap: float, into: Tensor | None = None) -> Tensor:
    return torch.div(logits(raw_BV, scale, None), softcap, out=into).tanh_()


def part_of(T: Temperature, rows: slice) -> Temperature:
    """The temperature of these rows."""
    return T[rows] if isinstance(T, Tensor) else T


def divide(x_BV: Tensor, T: Temperature, rows: slice, into: Tensor | None = None) -> Tensor:
    """x / T, `into` a buffer if one is given; x itself if T is 1."""
    if isinstance(T, Tensor):
        return torch.div(x_BV, T[rows, None], out=into)
    if T == 1.0:
        return x_BV
    if math.frexp(T)[0] == 0.5:  # a power of two: the product is as exact, and takes a fifth of the time
        return torch.mul(x_BV, 1 / T, out=into)
    return torch.div(x_BV, T, out=into)


def floored(s_BV: Tensor, keep: bool) -> Tensor:
    """s clamped at FLOOR, in place unless `keep`: e^FLOOR is 0, and 0 * FLOOR is 0 where 0 * -inf would be NaN."""
    return s_BV.clamp(min=FLOOR) if keep else s_BV.clamp_(min=FLOOR)
