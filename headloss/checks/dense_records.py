"""Records of `hl.verify`'s dense reference: a call's arguments, the logits that a term uses, and the answer.

Dimension key:  N rows   R rows that count   V vocabulary   K ids per row
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.routed import Routed
from headloss.segments import Segments
from headloss.sources import Linear, Logits, Source, Teacher
from headloss.support import SHIFT, Support

IGNORE = -100
NOWHERE = -1.0e30  # the logit of a column that is not kept; finite, since 0 * -inf would be NaN in a gradient


class DenseCall(NamedTuple):
    """The arguments of one call.  `kinds` gives the kind of each input: "row", "segment" or another."""

    source: Source
    targets: Tensor | None
    segments: Segments | None
    teachers: Mapping[str, Teacher]
    inputs: Mapping[str, Any]
    kinds: Mapping[str, str]
    num_items: Any = None
    num_segments: Any = None
    weights: Mapping[str, Any] | None = None
    grad_scale: Any = 1.0
    support: Support | None = None


class Part(NamedTuple):
    """A number and the parts it is made of, so that errors in the parts bound the error in the number."""

    number: Tensor
    parts: Tensor
    scale: float  # how large it would be if nothing cancelled
    step: float = 0.0  # for boolean values: how much one row can change it
    summed: bool = True  # it is the sum of its parts; if False, their minimum or maximum

    def error(self, other: Part) -> float:
        """A bound on the error of the number from the errors of all parts, as if none of them cancelled."""
        if self.parts.shape != other.parts.shape or not len(self.parts):
            same = bool(self.number.eq(other.number) | (self.number.isnan() & other.number.isnan()))  # no rows
            return 0.0 if same else float((self.number - other.number).abs())
        errors = (self.parts.double() - other.parts.double()).abs().nan_to_num(nan=0.0, posinf=0.0)
        return float(errors.sum() if self.summed else errors.max())


def measured(name: str, x: Tensor, is_bool: bool) -> Part:
    """A metric's number from its values on the rows that count; the suffix of its name says how they combine."""
    n, last = max(1, len(x)), name.rsplit("/", 1)[-1]
    largest = float(x.abs().max()) if len(x) else 0.0
    if last.endswith(("_min", "_max")):
        sign = -1.0 if last.endswith("_min") else 1.0
        number = sign * (sign * x).max() if len(x) else x.new_full((), -sign * math.inf)
        return Part(number, x, largest, float(is_bool), summed=False)
    mean = x.mean()
    if last == "perplexity":
        return Part(mean.exp(), x * mean.exp() / n, float(mean.exp().nan_to_num()) * max(1.0, largest))
    if last.endswith("_std"):
        std = x.std(correction=0) if len(x) else mean  # torch warns if there are none
        return Part(std, x, 32 * largest, summed=False)  # from two sums, which nearly cancel
    if last == "effective_sample_size":
        number = x.sum() ** 2 / x.square().sum()
        return Part(number, 4 * x * number / x.abs().sum().clamp(min=1e-30), float(number.nan_to_num()))
    return Part(mean, x / n, float(x.abs().mean()) if len(x) else 0.0, is_bool / n)


class Answer(NamedTuple):
    numbers: dict[str, Part]  # "loss", "term ce", "metric ce/perplexity"
    grads: dict[str, Tensor]  # by the name of a leaf: "hidden", "weight", "input advantage"


class View(NamedTuple):
    """What a term uses: logits, dense teachers' logits, sparse teachers' ids and log-probabilities."""

    z_RV: Tensor
    teacher_z: Mapping[str, Tensor]
    sparse: Mapping[str, tuple[Tensor, Tensor]]

    def restricted(self, mask_RV: Tensor) -> View:
        """The view restricted to the columns that each row keeps."""
        keep = lambda z: z[:, : mask_RV.shape[1]].masked_fill(~mask_RV, NOWHERE)
        sparse = {}
        for name, (ids, logq) in self.sparse.items():
            outside = (ids < 0) | ~mask_RV.gather(1, ids.clamp(min=0))
            sparse[name] = ids.masked_fill(outside, -1), logq.masked_fill(outside, -torch.inf)
        return View(keep(self.z_RV), {n: keep(z) for n, z in self.teacher_z.items()}, sparse)


def mask_of(support: Support, vocab: int) -> Tensor:
    """A boolean mask (N, V): whether a row keeps a column."""
    keys = support.keys[: support.known().total]
    mask = torch.zeros(support.rows, vocab, dtype=torch.bool, device=keys.device)
    mask[keys >> SHIFT, keys & ((1 << SHIFT) - 1)] = True
    return mask


def rows_of(support: Support, keep: Tensor) -> Support:
    """The support of the rows in `keep`."""
    keys, offsets = support.keys, support.known().offsets.to(support.keys.device)
    sets = [keys[a:b] & ((1 << SHIFT) - 1) for a, b in zip(offsets[keep].tolist(), offsets[keep + 1].tolist())]
    lengths = torch.tensor([0, *map(len, sets)], device=keys.device)
    return Support.from_csr(torch.cat(sets), lengths.cumsum(0))


def to_columns(vocab_ids: Tensor | None, x: Tensor, none: int) -> Tensor:
    """Tokens as columns of a head over `vocab_ids`; a token that is not among those becomes `none`."""
    if vocab_ids is None:
        return x
    same = x[..., None] == vocab_ids
    return torch.where(same.any(-1), same.int().argmax(-1), none)


def z_and_T(teacher: Any, logits: Callable[[Any], Tensor], rows: Callable[[Tensor], Tensor]) -> tuple[Tensor, Any]:
    """A dense teacher's logits on the rows that count, and its temperature; if routed, both per row."""
    if not isinstance(teacher, Routed):
        return logits(teacher), teacher.temperature
    route = rows(teacher.route)
    temperature = torch.ones(teacher.route.shape, dtype=torch.float64, device=route.device)
    found = torch.zeros((), dtype=torch.float32, device=route.device)
    for i, t in enumerate(teacher.teachers.values()):
        found = torch.where((route == i)[:, None], logits(t), found)
        own = torch.as_tensor(t.temperature, dtype=torch.float64, device=route.device)
        temperature = torch.where(teacher.route == i, own, temperature)
    return found, temperature


def of_rows(source: Source, rows: Any) -> Source:
    name = "logits" if isinstance(source, Logits) else "hidden"
    T = source.temperature
    return replaced(source, **{name: rows(getattr(source, name)), "temperature": rows(T) if _per_row(T) else T})


def _per_row(T: object) -> bool:
    return isinstance(T, Tensor) and T.ndim > 0


def replaced(source: Source, **changed: Any) -> Source:
    """The source with other tensors, which then get the gradients; the rest, such as autocast's dtype, stays."""
    other = copy.copy(source)
    changed |= {"weight_grad_into": None} if isinstance(source, Linear) else {}
    for name, x in changed.items():
        object.__setattr__(other, name, x)
    return other
