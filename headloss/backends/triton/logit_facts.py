"""Facts of the logits themselves, which need no softmax: torch operations on tiles of rows, in separate passes.

Dimension key:  C rows passed in   B rows of a tile   V columns passed in   U columns shared with the teacher
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.backends.triton.tiles import Transform
from headloss.facts import Partial, Want
from headloss.nested import cut, join
from headloss.teachers import DenseChunk, DensePartial, DensePull, TeacherChunk, TeacherPulls, logit_pull, logit_sums

TILE_BYTES = 64 << 20  # of float32 logits at a time


def with_sums(
    partial: Partial, raw_CV: Tensor, want: Want, teachers: Sequence[TeacherChunk], scale: float, softcap: float | None
) -> Partial:
    """The partial, with the sums of the logits themselves that are asked for."""
    tiles = []
    for rows in _tiles(raw_CV):
        z_BV = Transform(scale, softcap)(raw_CV[rows])
        least = torch.nn.functional.pad(z_BV, (0, 1), value=math.inf).amin(-1) if want.sums("least") else None
        named = zip(want.teachers, teachers, strict=True)
        tiles.append([least, *(_logit_sums(z_BV, rows, want, *teacher) for teacher in named)])
    least, *found = (join(*xs) for xs in zip(*tiles, strict=True))
    partials = [
        x._replace(square=own[0], teacher_square=own[1], dot=own[2]) if isinstance(x, DensePartial) else x
        for x, own in zip(partial.teachers, found, strict=True)
    ]
    return partial._replace(least=least, teachers=tuple(partials))


def pulls_on_logits(pulls: Sequence[TeacherPulls]) -> bool:
    return any(isinstance(k, DensePull) and k.of_logits for own in pulls for k in own)


def pull(run: Callable[..., None], call: Sequence[Any], how: dict[str, Any]) -> None:
    """`run(*call, **how)`, the pull of all other facts, plus the pull on the logits themselves."""
    raw_CV, target_C, softmax, pulls, temperatures, out_CV = call
    transform = Transform(how["scale"], how["softcap"])
    for rows in _tiles(raw_CV):
        z_BV = transform(raw_CV[rows])
        grad_BV, more_BV = torch.empty_like(z_BV), torch.zeros_like(z_BV)
        here = cut((raw_CV, target_C, softmax, pulls, temperatures), rows)
        run(*here, grad_BV, **cut(how, rows))
        for chunk, ks in zip(how["teachers"], how["teacher_pulls"], strict=True):
            for k in ks:
                if isinstance(k, DensePull) and k.of_logits:
                    logit_pull(more_BV[:, : chunk.columns], z_BV[:, : chunk.columns], _logits(chunk, rows), k, rows)
        out_CV[rows] = grad_BV + more_BV * transform.slope(z_BV)


def _logit_sums(z_BV: Tensor, rows: slice, want: Want, name: str, chunk: TeacherChunk) -> Any:
    if not isinstance(chunk, DenseChunk):
        return ()
    return tuple(logit_sums(z_BV[:, : chunk.columns], _logits(chunk, rows), lambda x: want.sums(x, teacher=name)))


def _logits(chunk: DenseChunk, rows: slice) -> Tensor:
    return Transform(chunk.scale, chunk.softcap)(chunk.raw_CV[rows, : chunk.columns])


def _tiles(x_CV: Tensor) -> Iterator[slice]:
    step = max(1, TILE_BYTES // (4 * max(1, x_CV.shape[-1])))
    for i in range(0, max(1, len(x_CV)), step):  # without rows there is still one tile, which is empty
        yield slice(i, min(i + step, len(x_CV)))
