"""The torch backend's part in comparing a tile of rows with teachers; see `headloss.teachers` for what is summed.

Dimension key:  C rows handed in   B rows of a tile   V columns in hand   U columns shared with the teacher   K ids
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.facts import Softmax, Want
from headloss.teachers import (
    FLOOR,
    DenseChunk,
    DensePartial,
    DensePull,
    DenseSoftmax,
    Meeting,
    SparseChunk,
    SparsePartial,
    SparsePull,
    SparseSoftmax,
    TeacherChunk,
    TeacherPulls,
    Temperature,
    Theirs,
    TopChunk,
    plain_pull,
    plain_sums,
)


class Comparison:
    """A sweep's sums with one teacher, filled tile by tile."""

    def __init__(
        self, name: str, chunk: TeacherChunk | TopChunk, want: Want, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name, self.chunk, self.want = name, chunk, want
        self.temperatures = want.temperatures_of(name)
        self.parts: list[dict[str, Any]] = []
        self.dtype, self.device = dtype, device

    def tile(self, rows: slice, z_BV: Tensor, x_BV: Tensor, max_B: Tensor, start: int) -> None:
        """Begin a tile: whatever does not depend on the temperature.  x = z - max."""
        part: dict[str, Any] = {"meetings": [], "tails": []}
        if isinstance(self.chunk, DenseChunk):
            u_BU = logits(self.chunk.raw_CV[rows, : self.chunk.columns], self.chunk.scale, self.chunk.softcap)
            u_BU = u_BU.to(self.dtype)
            part |= _best(u_BU, start, self.want.sums("argmax", teacher=self.name))
            part["plain"] = plain_sums(z_BV[:, : u_BU.shape[-1]], u_BU, lambda x: self.want.sums(x, teacher=self.name))
            part["y"] = u_BU - part["max"].masked_fill(part["max"] == -math.inf, 0.0)[:, None]
        elif isinstance(self.chunk, TopChunk):
            part |= {"tail_max": None, "top": None, **self._top(self.chunk, rows, x_BV, start)}
        else:
            column_BK, here_BK, inside_BV = _places(self.chunk.ids_CK[rows], start, x_BV.shape[-1])
            if x_BV.shape[-1]:
                ids_BK = x_BV.gather(-1, column_BK).masked_fill_(~here_BK, -math.inf)
            else:
                ids_BK = torch.full(column_BK.shape, -math.inf, dtype=self.dtype, device=self.device)
            part["ids"] = ids_BK
            part["tail_max"] = part["top"] = None
            if self.want.sums("tail_max", teacher=self.name):
                tail_BV = x_BV.masked_fill(inside_BV, -math.inf)
                tail_B = tail_BV.amax(-1) if tail_BV.shape[-1] else torch.full_like(max_B, -math.inf)
                part["tail_max"] = tail_B + max_B
                part["tail"] = tail_BV - tail_B.masked_fill(tail_B == -math.inf, 0.0)[:, None]
            if self.want.sums("top", teacher=self.name):
                K = self.chunk.ids_CK.shape[-1]
                top_BK = x_BV.topk(min(K, x_BV.shape[-1]), -1).values
                part["top"] = torch.nn.functional.pad(top_BK, (0, K - top_BK.shape[-1]), value=-math.inf)
        self.parts.append(part)

    def _top(self, chunk: TopChunk, rows: slice, x_BV: Tensor, start: int) -> dict[str, Any]:
        """The largest, in order, and what a teacher says there; a part of few columns is filled up with none."""
        k, V = min(chunk.k, x_BV.shape[-1]), x_BV.shape[-1]
        column_BK = top_columns(x_BV, k)
        fill = (0, chunk.k - k)
        ids_BK = torch.nn.functional.pad(x_BV.gather(-1, column_BK), fill, value=-math.inf)
        columns_BK = torch.nn.functional.pad((column_BK + start).to(self.dtype), fill, value=BEYOND)
        if chunk.of is None:
            return {"ids": ids_BK, "columns": columns_BK, "theirs": None}
        of, U = chunk.of, chunk.of.columns
        u_BU = logits(of.raw_CV[rows, :U], of.scale, of.softcap).to(self.dtype)
        max_B = _best(u_BU, start, False)["max"]
        assert max_B is not None
        y_BU = u_BU - max_B.masked_fill(max_B == -math.inf, 0.0)[:, None]
        at, sums = [], []
        for T in of.temperatures:
            y_BV = torch.nn.functional.pad(divide(y_BU, T, rows), (0, V - U), value=-math.inf)
            at.append(torch.nn.functional.pad(y_BV.gather(-1, column_BK), fill, value=-math.inf))
            sums.append(y_BV.exp().sum(-1))
        return {"ids": ids_BK, "columns": columns_BK, "theirs": Theirs(max_B, tuple(at), tuple(sums))}

    def weighs(self, key: float | None) -> bool:
        """Whether `meet` multiplies with s: it must then be finite."""
        return any(self.want.sums(x, key, self.name) for x in "XF")

    def meet(self, rows: slice, key: float | None, T: Temperature, s_BV: Tensor, e_BV: Tensor, S_B: Tensor) -> None:
        """At one temperature: s = x / T, e = exp(s), S their sum over all columns in hand."""
        if key not in self.temperatures:
            return
        part = self.parts[-1]
        if not isinstance(self.chunk, DenseChunk):
            if part["tail_max"] is not None:
                part["tails"].append(divide(part["tail"], T, rows).exp().sum(-1))
            return
        wants = {x: self.want.sums(x, key, self.name) for x in "XYFG"}
        U, i = self.chunk.columns, self.temperatures.index(key)
        last = i == len(self.temperatures) - 1  # y may be overwritten
        y_BU = divide(part["y"], self.chunk.temperatures[i], rows, into=part["y"] if last else None)
        if wants["Y"] or wants["G"]:
            y_BU = floored(y_BU, keep=y_BU is part["y"] and not last)
        s_BU, e_BU, f_BU = s_BV[:, :U], e_BV[:, :U], y_BU.exp()
        part["meetings"].append(
            Meeting(
                S=S_B if e_BV.shape[-1] == U else e_BU.sum(-1),
                X=torch.linalg.vecdot(e_BU, s_BU) if wants["X"] else None,
                St=f_BU.sum(-1),
                Y=torch.linalg.vecdot(f_BU, y_BU) if wants["Y"] else None,
                F=torch.linalg.vecdot(f_BU, s_BU) if wants["F"] else None,
                G=torch.linalg.vecdot(e_BU, y_BU) if wants["G"] else None,
            )
        )

    def partial(self) -> DensePartial | SparsePartial:
        tiles = self.parts
        if not isinstance(self.chunk, DenseChunk):
            tails = tuple(join(ts) for ts in zip(*(t["tails"] for t in tiles), strict=True))
            ids, tail_max, top = (join([t[n] for t in tiles]) for n in ("ids", "tail_max", "top"))
            if not isinstance(self.chunk, TopChunk):
                return SparsePartial(ids, tail_max, tails, top)
            theirs = None
            if self.chunk.of is not None:
                of = [t["theirs"] for t in tiles]
                at, sums = (tuple(map(join, zip(*x, strict=True))) for x in zip(*((x.at, x.sums) for x in of)))
                theirs = Theirs(join([x.max for x in of]), at, sums)
            return SparsePartial(ids, tail_max, tails, top, join([t["columns"] for t in tiles]), theirs)
        meetings = tuple(
            Meeting(*(join(xs) for xs in zip(*ms, strict=True)))
            for ms in zip(*(t["meetings"] for t in tiles), strict=True)
        )
        plain = [join(xs) for xs in zip(*(t["plain"] for t in tiles), strict=True)]
        return DensePartial(join([t["max"] for t in tiles]), join([t["argmax"] for t in tiles]), meetings, *plain)


BEYOND = 1 << 24  # a column that no vocabulary has, and float32 holds


def top_columns(x_BV: Tensor, k: int) -> Tensor:
    """(B, k) the columns of the largest, in order; of equals, the lower one first, which topk does not say."""
    if k == 0:
        return torch.zeros(len(x_BV), 0, dtype=torch.long, device=x_BV.device)
    least_B1 = x_BV.topk(k, -1).values[:, -1:]
    above_BV, equal_BV = x_BV > least_B1, x_BV == least_B1
    room_B1 = k - above_BV.sum(-1, keepdim=True)
    held_BV = above_BV | (equal_BV & (equal_BV.cumsum(-1) <= room_B1))
    place_V = torch.arange(x_BV.shape[-1], device=x_BV.device)
    column_BK = torch.where(held_BV, place_V, x_BV.shape[-1]).topk(k, -1, largest=False).values.sort(-1).values
    column_BK = column_BK.clamp(max=x_BV.shape[-1] - 1)  # a row of NaN holds none
    return column_BK.gather(-1, x_BV.gather(-1, column_BK).argsort(dim=-1, descending=True, stable=True))


def join(xs: Sequence[Tensor | None]) -> Any:
    return None if xs[0] is None else torch.cat([x for x in xs if x is not None])


def second_look(
    z_BV: Tensor,
    rows: slice,
    chunk: DenseChunk,
    seen: DenseSoftmax,
    softmax: Softmax,
    T: Temperature,
    i: int,
    looks: Any,
    whole: bool,
) -> list[tuple[Tensor, Tensor | None]]:
    """Of each divergence, its sum over these columns and, unless they are the whole row, that of its slopes."""
    logp_BU, logq_BU = _logprobs(z_BV, rows, chunk, seen, softmax, T, i)
    if whole:
        return [(element.value(logp_BU, logq_BU).sum(-1), None) for element in looks]
    pairs = [element.value_and_slope(logp_BU, logq_BU) for element in looks]
    return [(value.sum(-1), slope.sum(-1)) for value, slope in pairs]


def pull_tile(
    grad_BV: Tensor | None,
    z_BV: Tensor,
    rows: slice,
    chunk: TeacherChunk,
    seen: Any,
    softmax: Softmax,
    pulls: TeacherPulls,
    temperatures: Sequence[Temperature],
    start: int,
) -> Tensor | None:
    """A tile's gradient with one teacher's pull in it; None is a gradient of zeros."""
    for i, (pull, T) in enumerate(zip(pulls, temperatures, strict=True)):
        if isinstance(pull, DensePull):
            assert isinstance(chunk, DenseChunk)
            if pull.plain:
                u_BU = logits(chunk.raw_CV[rows, : chunk.columns], chunk.scale, chunk.softcap).to(z_BV.dtype)
                grad_BV = torch.zeros_like(z_BV) if grad_BV is None else grad_BV
                plain_pull(grad_BV[:, : chunk.columns], z_BV[:, : chunk.columns], u_BU, pull, rows)
            if not pull.looks and all(x is None for x in pull[:4]):
                continue
            g_BU = _pull_dense(pull, z_BV, rows, chunk, seen, softmax, T, i)
        elif isinstance(pull, SparsePull) and isinstance(chunk, SparseChunk):
            g_BU = _pull_sparse(pull, z_BV, rows, chunk, seen, T, i, start)
        g_BU = divide(g_BU, T, rows, into=g_BU)
        if grad_BV is None and g_BU.shape == z_BV.shape:
            grad_BV = g_BU
        else:
            grad_BV = torch.zeros_like(z_BV) if grad_BV is None else grad_BV
            grad_BV[:, : g_BU.shape[-1]] += g_BU
    return grad_BV


def _pull_dense(
    pull: DensePull, z_BV: Tensor, rows: slice, chunk: DenseChunk, seen: DenseSoftmax, softmax: Softmax, T: Any, i: int
) -> Tensor:
    finite = pull.b is not None or pull.c is not None or bool(pull.looks)
    logp_BU, logq_BU = _logprobs(z_BV, rows, chunk, seen, softmax, T, i, finite)
    p_BU = logp_BU.exp()
    g_BU = None
    for element, g, C in pull.looks:
        _, slope_BU = element.value_and_slope(logp_BU, logq_BU)
        C_B = slope_BU.sum(-1) if C is None else C[rows]
        own_BU = torch.addcmul(slope_BU, p_BU, C_B[:, None], value=-1).mul_(g[rows, None])
        g_BU = own_BU if g_BU is None else g_BU.add_(own_BU)
    weight_BU = None
    if pull.b is not None:
        weight_BU = logp_BU.mul_(pull.b[rows, None])
    if pull.c is not None:
        own_BU = logq_BU * pull.c[rows, None]
        weight_BU = own_BU if weight_BU is None else weight_BU.add_(own_BU)
    if pull.a is not None:
        weight_BU = pull.a[rows, None] if weight_BU is None else weight_BU.add_(pull.a[rows, None])
    if weight_BU is not None:
        g_BU = p_BU.mul_(weight_BU) if g_BU is None else g_BU.addcmul_(p_BU, weight_BU)
    if pull.d is not None:
        q_BU, d_B1 = logq_BU.exp_(), pull.d[rows, None]
        g_BU = q_BU.mul_(d_B1) if g_BU is None else g_BU.addcmul_(q_BU, d_B1)
    assert g_BU is not None
    return g_BU


def _pull_sparse(
    pull: SparsePull, z_BV: Tensor, rows: slice, chunk: SparseChunk, seen: SparseSoftmax, T: Any, i: int, start: int
) -> Tensor:
    column_BK, here_BK, inside_BV = _places(chunk.ids_CK[rows], start, z_BV.shape[-1])
    g_BV = torch.zeros_like(z_BV)
    if pull.tail is not None and seen.tail_max is not None:
        x_BV = divide(z_BV - seen.tail_max[rows, None], T, rows) - seen.tail_log_sums[i][rows, None]
        g_BV = x_BV.masked_fill_(inside_BV, -math.inf).exp_() * pull.tail[rows, None]
    if pull.ids is not None and z_BV.shape[-1]:
        g_BV.scatter_add_(-1, column_BK, pull.ids[rows].masked_fill(~here_BK, 0.0))
    return g_BV


def _logprobs(
    z_BV: Tensor,
    rows: slice,
    chunk: DenseChunk,
    seen: DenseSoftmax,
    softmax: Softmax,
    T: Temperature,
    i: int,
    finite: bool = True,
) -> tuple[Tensor, Tensor]:
    """log p and log q over the shared columns; finite where asked: both sweeps hold x and y above FLOOR."""
    x_BU = z_BV[:, : chunk.columns] - softmax.max[rows, None]
    y_BU = logits(chunk.raw_CV[rows, : chunk.columns], chunk.scale, chunk.softcap).to(z_BV.dtype) - seen.max[rows, None]
    x_BU, y_BU = divide(x_BU, T, rows, into=x_BU), divide(y_BU, chunk.temperatures[i], rows, into=y_BU)
    if finite:
        x_BU.clamp_(min=FLOOR)
        y_BU.clamp_(min=FLOOR)
    return x_BU.sub_(seen.log_S[i][rows, None]), y_BU.sub_(seen.log_St[i][rows, None])


def _places(ids_BK: Tensor, start: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each id as a column in hand, whether it is one (if not, the column is any), and which columns are ids."""
    column_BK = ids_BK - start
    here_BK = (ids_BK >= 0) & (column_BK >= 0) & (column_BK < V)
    inside_BV = torch.zeros(len(ids_BK), V + 1, dtype=torch.bool, device=ids_BK.device)
    inside_BV.scatter_(-1, torch.where(here_BK, column_BK, V), True)
    return column_BK.clamp(0, max(0, V - 1)), here_BK, inside_BV[:, :V]


def _best(u_BU: Tensor, start: int, argmax: bool) -> dict[str, Tensor | None]:
    if u_BU.shape[-1] == 0:
        none = torch.full((len(u_BU),), -math.inf, dtype=u_BU.dtype, device=u_BU.device)
        return {"max": none, "argmax": torch.zeros_like(none) if argmax else None}
    if not argmax:
        return {"max": u_BU.amax(-1), "argmax": None}
    max_B, argmax_B = u_BU.max(-1)
    return {"max": max_B, "argmax": (argmax_B + start).to(u_BU.dtype)}


def logits(raw_BV: Tensor, scale: float, softcap: float | None) -> Tensor:
    """z = cap tanh(scale raw / cap), in float32 or better."""
    z_BV = raw_BV.to(torch.promote_types(raw_BV.dtype, torch.float32))
    if scale != 1.0:
        z_BV = z_BV * scale
    return z_BV if softcap is None else (z_BV / softcap).tanh() * softcap


def divide(x_BV: Tensor, T: Temperature, rows: slice, into: Tensor | None = None) -> Tensor:
    """x / T, `into` a buffer if there is one; x itself where T is 1."""
    if not isinstance(T, Tensor):
        return x_BV if T == 1.0 else torch.div(x_BV, T, out=into)
    return torch.div(x_BV, T[rows, None], out=into)


def floored(s_BV: Tensor, keep: bool) -> Tensor:
    """s with FLOOR for -inf, in place unless it is to be kept: e^FLOOR is 0, and 0 times FLOOR is no NaN."""
    return s_BV.clamp(min=FLOOR) if keep else s_BV.clamp_(min=FLOOR)
