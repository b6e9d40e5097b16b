"""The torch backend's sums that compare a tile of rows with teachers; see `headloss.teachers` for what is summed.

Dimension key:  C rows passed in   B rows of a tile   V columns passed in   U columns shared with the teacher   K ids
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from headloss.backends.torch_kept import Kept
from headloss.backends.torch_tile import Workspace, divide, floored, logits, part_of
from headloss.facts import Softmax, Want
from headloss.teachers import (
    FLOOR,
    DenseChunk,
    DensePartial,
    DenseSoftmax,
    JointMoments,
    SparseChunk,
    SparsePartial,
    TeacherChunk,
    TeacherTop,
    Temperature,
    TopChunk,
    logit_sums,
    places,
)


def _log(x_BV: Tensor, S_B1: Tensor) -> Tensor:
    return x_BV.clamp(min=FLOOR).sub_(S_B1.log())


def _dot(x_BV: Tensor, y_BV: Tensor) -> Tensor:
    return (x_BV * y_BV).sum(-1)


NEAR = 40.0  # how far below a row's maximum a tail may lie for e^x, relative to that maximum, to keep its digits


class Comparison:
    """The sums of a sweep with one teacher, collected tile by tile.  `only_T`: the temperature, if there is one."""

    def __init__(
        self,
        name: str,
        chunk: TeacherChunk | TopChunk,
        want: Want,
        dtype: torch.dtype,
        device: torch.device,
        only_T: Temperature | None,
        kept: Kept | None,
    ) -> None:
        self.name, self.chunk, self.want = name, chunk, want
        self.temperatures = want.temperatures_of(name)
        self.parts: list[dict[str, Any]] = []
        self.places: tuple[Tensor, Tensor] | None = None  # of a sparse teacher's ids, in all rows
        self.dtype, self.device, self.kept, self.workspace = dtype, device, kept, Workspace()
        # set if the ids may be removed from x, so that one exponential serves the tail and the whole row
        others = len(want.teachers) > 1 or any(want.sums(x) for x in "XQ") or device.type != "cpu"
        self.only_T = None if others else only_T

    def tile(self, rows: slice, z_BV: Tensor, x_BV: Tensor, max_B: Tensor, start: int) -> None:
        """Begin a tile with what does not depend on the temperature.  x = z - max."""
        part: dict[str, Any] = {"moments": [], "tails": []}
        if isinstance(self.chunk, DenseChunk):
            u_BU = logits(self.chunk.raw_CV[rows, : self.chunk.columns], self.chunk.scale, self.chunk.softcap)
            u_BU = u_BU.to(self.dtype)
            part |= _best(u_BU, start, self.want.sums("argmax", teacher=self.name))
            part["of_logits"] = logit_sums(
                z_BV[:, : u_BU.shape[-1]], u_BU, lambda x: self.want.sums(x, teacher=self.name)
            )
            max_B1 = part["max"].masked_fill(part["max"] == -math.inf, 0.0)[:, None]
            part["y"] = torch.sub(u_BU, max_B1, out=self.workspace("y", u_BU, self.dtype))
        elif isinstance(self.chunk, TopChunk):
            part |= {"tail_max": None, "top": None, **self._top(self.chunk, rows, x_BV, start)}
        else:
            if self.places is None:
                self.places = places(self.chunk.ids_CK, start, x_BV.shape[-1])
            column_BK, here_BK = (x[rows] for x in self.places)
            if x_BV.shape[-1]:
                ids_BK = x_BV.gather(-1, column_BK).masked_fill_(~here_BK, -math.inf)
            else:
                ids_BK = torch.full(column_BK.shape, -math.inf, dtype=self.dtype, device=self.device)
            part |= {"ids": ids_BK, "tail_max": None, "top": None, "near": None}
            if self.want.sums("top", teacher=self.name):
                K = self.chunk.ids_CK.shape[-1]
                top_BK = x_BV.topk(min(K, x_BV.shape[-1]), -1).values
                part["top"] = torch.nn.functional.pad(top_BK, (0, K - top_BK.shape[-1]), value=-math.inf)
            if self.want.sums("tail_max", teacher=self.name):
                part |= self._tail(rows, x_BV, max_B, ids_BK, column_BK, here_BK)
        self.parts.append(part)

    def _tail(
        self, rows: slice, x_BV: Tensor, max_B: Tensor, ids_BK: Tensor, column_BK: Tensor, here_BK: Tensor
    ) -> dict[str, Any]:
        """The tail's maximum, and x relative to it; or, if it is near the row's own maximum, x without the ids."""
        if self.only_T is not None and x_BV.numel():
            out_BK = torch.zeros_like(ids_BK).masked_fill_(here_BK, -math.inf)
            x_BV.scatter_add_(-1, column_BK, out_BK)
            tail_B = x_BV.amax(-1)
            unknown = isinstance(tail_B, FakeTensor)  # it has no numbers, and its results are not used
            near = lambda: bool((divide(tail_B[:, None], self.only_T, rows) > -NEAR).all())
            if unknown or (self._once(column_BK, here_BK) and near()):
                return {"tail_max": tail_B + max_B, "near": tail_B}
            row_BK = torch.arange(len(x_BV), device=x_BV.device)[:, None].expand_as(column_BK)
            x_BV[row_BK[here_BK], column_BK[here_BK]] = ids_BK[here_BK]
        if self.kept is not None and self.kept.overwrites and self.kept.kind == "e":
            self.kept.missing.add(rows.start)  # the tail's pull will need the logits
        tail_BV = x_BV.masked_fill(inside(column_BK, here_BK, x_BV.shape[-1]), -math.inf)
        tail_B = tail_BV.amax(-1) if tail_BV.shape[-1] else torch.full_like(max_B, -math.inf)
        tail_BV -= tail_B.masked_fill(tail_B == -math.inf, 0.0)[:, None]
        return {"tail_max": tail_B + max_B, "tail": tail_BV}

    def _once(self, column_BK: Tensor, here_BK: Tensor) -> bool:
        """Whether no row names a column twice; its e^x would count twice."""
        if isinstance(self.chunk, SparseChunk) and self.chunk.once:
            return True
        placed_BK = column_BK.masked_fill(~here_BK, -1).sort(-1).values
        return bool(((placed_BK[:, 1:] != placed_BK[:, :-1]) | (placed_BK[:, 1:] < 0)).all())

    def _top(self, chunk: TopChunk, rows: slice, x_BV: Tensor, start: int) -> dict[str, Any]:
        """The largest logits in order, and a teacher's logits there; padded if there are fewer than k columns."""
        k, V = min(chunk.k, x_BV.shape[-1]), x_BV.shape[-1]
        column_BK = top_columns(x_BV, k)
        fill = (0, chunk.k - k)
        ids_BK = torch.nn.functional.pad(x_BV.gather(-1, column_BK), fill, value=-math.inf)
        columns_BK = torch.nn.functional.pad((column_BK + start).to(self.dtype), fill, value=BEYOND)
        if chunk.of is None:
            return {"ids": ids_BK, "columns": columns_BK, "teacher_top": None}
        of, U = chunk.of, chunk.of.columns
        u_BU = logits(of.raw_CV[rows, :U], of.scale, of.softcap).to(self.dtype)
        max_B = _best(u_BU, start, False)["max"]
        assert max_B is not None
        cut_T = [part_of(T, rows) for T in of.temperatures]
        tails = [lse[rows].to(self.dtype) for lse in of.tail]
        for lse_B, T in zip(tails, cut_T, strict=bool(tails)):  # relative to this no sum overflows
            max_B = torch.maximum(max_B, lse_B * T)
        y_BU = torch.sub(
            u_BU, max_B.masked_fill(max_B == -math.inf, 0.0)[:, None], out=self.workspace("y", u_BU, self.dtype)
        )
        at, sums, width = [], [], max(0, V - U)
        for i, T in enumerate(of.temperatures):
            t_BU = divide(y_BU, T, rows)
            t_BV = torch.nn.functional.pad(t_BU, (0, width), value=-math.inf) if width else t_BU
            at.append(torch.nn.functional.pad(t_BV.gather(-1, column_BK), fill, value=-math.inf))
            sums.append(torch.exp(t_BU, out=self.workspace("f", t_BU, self.dtype)).sum(-1))
            if tails:
                sums[i] += (tails[i] - max_B.masked_fill(max_B == -math.inf, 0.0) / cut_T[i]).exp()
        return {"ids": ids_BK, "columns": columns_BK, "teacher_top": TeacherTop(max_B, tuple(at), tuple(sums))}

    def weighs(self, key: float | None) -> bool:
        """Whether `sums` multiplies by s, which must then be finite."""
        return any(self.want.sums(x, key, self.name) for x in "XF")

    def skip(self, S_B: Tensor) -> None:
        """In place of `sums`, at a temperature at which nothing reads a softmax."""
        self.parts[-1]["moments"].append(JointMoments(S_B, None, S_B, None, None, None))

    def sums(self, rows: slice, key: float | None, T: Temperature, s_BV: Tensor, e_BV: Tensor, S_B: Tensor) -> Tensor:
        """The sums at one temperature: s = x / T, e = exp(s), S their sum; returns S over all columns, ids included."""
        if key not in self.temperatures:
            return S_B
        part = self.parts[-1]
        if not isinstance(self.chunk, DenseChunk):
            if part["tail_max"] is None:
                return S_B
            if part["near"] is None:
                last = len(part["tails"]) == len(self.temperatures) - 1
                tail_BV = part.pop("tail") if last else part["tail"]
                part["tails"].append(divide(tail_BV, T, rows).exp().sum(-1))
                return S_B
            part["tails"].append(S_B * divide(part["near"][:, None], T, rows)[:, 0].neg().exp())
            e_BK = divide(part["ids"], T, rows).exp()
            if self.kept is not None and self.kept.kind == "e":
                self.kept.ids[rows.start] = e_BK
            return S_B + e_BK.sum(-1)
        wants = {x: self.want.sums(x, key, self.name) for x in "XYFG"}
        U, i = self.chunk.columns, self.temperatures.index(key)
        last = i == len(self.temperatures) - 1  # y may be overwritten
        y_BU = divide(part["y"], self.chunk.temperatures[i], rows, into=part["y"] if last else None)
        if last:
            del part["y"]
        if wants["Y"] or wants["G"]:
            y_BU = floored(y_BU, keep=not last and y_BU is part["y"])
        s_BU, e_BU, f_BU = s_BV[:, :U], e_BV[:, :U], torch.exp(y_BU, out=self.workspace("f", y_BU, self.dtype))
        joint = JointMoments(
            S=S_B if e_BV.shape[-1] == U else e_BU.sum(-1),
            X=_dot(e_BU, s_BU) if wants["X"] else None,
            St=f_BU.sum(-1),
            Y=_dot(f_BU, y_BU) if wants["Y"] else None,
            F=_dot(f_BU, s_BU) if wants["F"] else None,
            G=_dot(e_BU, y_BU) if wants["G"] else None,
        )
        part["moments"].append(joint)
        if self.kept is not None and self.kept.fact is not None and self.kept.fact[1:3] == (key, self.name):
            self._unit(self.kept, rows, joint, s_BU, e_BU, y_BU, f_BU)
        return S_B

    def _unit(
        self, kept: Kept, rows: slice, joint: JointMoments, s_BU: Tensor, e_BU: Tensor, y_BU: Tensor, f_BU: Tensor
    ) -> None:
        """Keep the fact's pull for a cotangent of 1 and, of a divergence, its sum, which the second read returns."""
        assert kept.fact is not None
        unit_BV, U = kept.tile(rows), e_BU.shape[-1]
        unit_BU, unit_BV[:, U:] = unit_BV[:, :U], 0.0  # the student's other columns are compared with nothing
        S_B1, St_B1 = (x.masked_fill(x == 0, 1.0)[:, None] for x in (joint.S, joint.St))
        if kept.fact.element is None:  # cross-entropy to the teacher: p - q
            torch.mul(e_BU, 1 / S_B1, out=unit_BU).addcmul_(f_BU, 1 / St_B1, value=-1)
            return
        p_BU, q_BU = torch.mul(e_BU, 1 / S_B1, out=self.workspace("p", e_BU, self.dtype)), f_BU.mul_(1 / St_B1)
        logs = (functools.partial(_log, s_BU, S_B1), functools.partial(_log, y_BU, St_B1))
        buffer = lambda name, dtype: self.workspace(f"{name} {dtype}", e_BU, dtype)
        kept.divergences.append(kept.fact.element.sum_and_pull(*logs, p_BU, q_BU, unit_BU, buffer))

    def partial(self) -> DensePartial | SparsePartial:
        tiles = self.parts
        if not isinstance(self.chunk, DenseChunk):
            tails = tuple(join(ts) for ts in zip(*(t["tails"] for t in tiles), strict=True))
            ids, tail_max, top = (join([t[n] for t in tiles]) for n in ("ids", "tail_max", "top"))
            if not isinstance(self.chunk, TopChunk):
                return SparsePartial(ids, tail_max, tails, top)
            teacher_top = None
            if self.chunk.of is not None:
                of = [t["teacher_top"] for t in tiles]
                at, sums = (tuple(map(join, zip(*x, strict=True))) for x in zip(*((x.at, x.sums) for x in of)))
                teacher_top = TeacherTop(join([x.max for x in of]), at, sums)
            return SparsePartial(ids, tail_max, tails, top, join([t["columns"] for t in tiles]), teacher_top)
        moments = tuple(
            JointMoments(*(join(xs) for xs in zip(*ms, strict=True)))
            for ms in zip(*(t["moments"] for t in tiles), strict=True)
        )
        of_logits = [join(xs) for xs in zip(*(t["of_logits"] for t in tiles), strict=True)]
        return DensePartial(join([t["max"] for t in tiles]), join([t["argmax"] for t in tiles]), moments, *of_logits)


GROUP = 16  # columns, whose largest is found in one pass
BEYOND = 1 << 24  # a column beyond any vocabulary, which float32 represents exactly


def top_columns(x_BV: Tensor, k: int) -> Tensor:
    """(B, k) the columns of the largest, in order; if equal, the lower column first, which topk does not promise."""
    if k == 0:
        return torch.zeros(len(x_BV), 0, dtype=torch.long, device=x_BV.device)
    if x_BV.device.type != "cpu" or isinstance(x_BV, FakeTensor) or k >= x_BV.shape[-1]:
        column_BK = _lowest_of_equals(x_BV, k)
    else:
        column_BK = _from_leaders(x_BV, k).sort(-1).values
    return column_BK.gather(-1, x_BV.gather(-1, column_BK).argsort(dim=-1, descending=True, stable=True))


def _from_leaders(x_BV: Tensor, k: int) -> Tensor:
    """(B, k) the columns of the largest; of equal ones the lower columns.

    Column c is in group c mod G, and one pass finds the largest of each group.  The k + 1 groups with the largest
    contain the k + 1 largest values, and twice as many contain all that equals those, unless the last of them still
    does: a `topk` of these columns alone takes a fifth of the time of one of all columns.
    """
    V = x_BV.shape[-1]
    G = V // GROUP
    if 4 * (k + 1) > G:
        column_BM, last_B = torch.arange(V, device=x_BV.device).expand(len(x_BV), -1), None
    else:
        leads = x_BV[:, : G * GROUP].unflatten(-1, (GROUP, G)).amax(1).topk(2 * (k + 1), -1)
        group_BG, last_B = leads.indices.sort(-1).values, leads.values[:, -1]
        column_BM = (torch.arange(0, G * GROUP, G, device=x_BV.device)[:, None] + group_BG[:, None]).flatten(1)
        rest_BM = torch.arange(G * GROUP, V, device=x_BV.device).expand(len(x_BV), -1)  # in no group
        column_BM = torch.cat([column_BM, rest_BM], -1)  # in the order of the columns
    x_BM = x_BV if last_B is None else x_BV.gather(-1, column_BM)
    value_BM, at_BM = x_BM.topk(k + 1, -1)
    least_B, at_BK = value_BM[:, k - 1], at_BM[:, :k]
    tied_B = ~(least_B > value_BM[:, k])  # NaN is tied too
    if not bool(tied_B.any()):
        return column_BM.gather(-1, at_BK)
    at_BK[tied_B] = _lowest_of_equals(x_BM[tied_B], k)
    column_BK = column_BM.gather(-1, at_BK)
    if last_B is not None:
        lost_B = tied_B & ~(last_B < least_B)  # others that are equal may lie in groups that were left out
        column_BK[lost_B] = _lowest_of_equals(x_BV[lost_B], k)
    return column_BK


def _lowest_of_equals(x_BV: Tensor, k: int) -> Tensor:
    """(B, k) the columns of the largest, in the order of the columns; if equal, the lower ones."""
    least_B1 = x_BV.topk(k, -1).values[:, -1:]
    above_BV, equal_BV = x_BV > least_B1, x_BV == least_B1
    remaining_B1 = k - above_BV.sum(-1, keepdim=True)
    chosen_BV = above_BV | (equal_BV & (equal_BV.cumsum(-1) <= remaining_B1))
    column_V = torch.arange(x_BV.shape[-1], device=x_BV.device)
    column_BK = torch.where(chosen_BV, column_V, x_BV.shape[-1]).topk(k, -1, largest=False).values.sort(-1).values
    return column_BK.clamp(max=x_BV.shape[-1] - 1)  # a row of NaN has none


def join(xs: Sequence[Tensor | None]) -> Any:
    return None if xs[0] is None else torch.cat([x for x in xs if x is not None])


def divergence_sums(
    z_BV: Tensor,
    rows: slice,
    chunk: DenseChunk,
    softmax_t: DenseSoftmax,
    softmax: Softmax,
    T: Temperature,
    i: int,
    divergences: Any,
    whole: bool,
) -> list[tuple[Tensor, Tensor | None]]:
    """For each divergence, its sum over these columns and, unless they are the whole row, that of its slopes."""
    logp_BU, logq_BU = logprobs(z_BV, rows, chunk, softmax_t, softmax, T, i)
    if whole:
        return [(element.value(logp_BU, logq_BU).sum(-1), None) for element in divergences]
    pairs = [element.value_and_slope(logp_BU, logq_BU) for element in divergences]
    return [(value.sum(-1), slope.sum(-1)) for value, slope in pairs]


def logprobs(
    z_BV: Tensor, rows: slice, chunk: DenseChunk, softmax_t: DenseSoftmax, softmax: Softmax, T: Temperature, i: int
) -> tuple[Tensor, Tensor]:
    """log p and log q over the shared columns; finite, because both sweeps clamp x and y at FLOOR."""
    x_BU = z_BV[:, : chunk.columns] - softmax.max[rows, None]
    y_BU = logits(chunk.raw_CV[rows, : chunk.columns], chunk.scale, chunk.softcap).to(z_BV.dtype)
    y_BU = y_BU - softmax_t.max[rows, None]
    x_BU, y_BU = divide(x_BU, T, rows, into=x_BU), divide(y_BU, chunk.temperatures[i], rows, into=y_BU)
    x_BU, y_BU = x_BU.clamp_(min=FLOOR), y_BU.clamp_(min=FLOOR)
    return x_BU.sub_(softmax_t.log_S[i][rows, None]), y_BU.sub_(softmax_t.log_St[i][rows, None])


def inside(column_BK: Tensor, here_BK: Tensor, V: int) -> Tensor:
    """(B, V) which columns are ids."""
    inside_BV = torch.zeros(len(column_BK), V + 1, dtype=torch.bool, device=column_BK.device)
    return inside_BV.scatter_(-1, torch.where(here_BK, column_BK, V), True)[:, :V]


def _best(u_BU: Tensor, start: int, argmax: bool) -> dict[str, Tensor | None]:
    if u_BU.shape[-1] == 0:
        none = torch.full((len(u_BU),), -math.inf, dtype=u_BU.dtype, device=u_BU.device)
        return {"max": none, "argmax": torch.zeros_like(none) if argmax else None}
    if not argmax:
        return {"max": u_BU.amax(-1), "argmax": None}
    max_B, argmax_B = u_BU.max(-1)
    return {"max": max_B, "argmax": (argmax_B + start).to(u_BU.dtype)}
