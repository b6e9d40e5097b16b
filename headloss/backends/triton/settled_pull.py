"""The gradient of rows that were settled, from the numbers per row that settling left.

Dimension key:  C rows handed in   V columns in hand   F numbers per row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from headloss.backends.triton import sweeps, teacher_pulls
from headloss.backends.triton.printer.program import Program
from headloss.backends.triton.settle import looks_of
from headloss.facts import Pull, Softmax
from headloss.teachers import DensePull, Look, TeacherChunk, Temperature


def pull_settled(
    program: Program,
    softmax: Softmax | None,
    rows_FC: Tensor,
    raw_CV: Tensor,
    target_C: Tensor | None,
    temperatures: Sequence[Temperature],
    out_CV: Tensor,
    *,
    teachers: Sequence[TeacherChunk] = (),
    teacher_temperatures: Sequence[Sequence[Temperature]] = (),
    **how: Any,
) -> None:
    """Write the gradient of these rows.  `softmax`: what was settled; only the pull of teachers reads it.

    `how` as in `sweeps.pull_rows`, which serves if there are no teachers, or `teacher_pulls.pull`.
    """
    if not teachers:
        used = [i for i, there in enumerate(program.there) if any(there)]
        there, own = [program.there[i] for i in used], [temperatures[i] for i in used]
        return sweeps.pull_rows(raw_CV, target_C, rows_FC, there, own, out_CV, **how)
    assert softmax is not None
    numbers, pulls = iter(rows_FC[1:]), [Pull()] * len(program.there)
    for i, there_i in enumerate(program.there):
        if any(there_i):
            next(numbers)  # the log_sum
            pulls[i] = Pull(*(next(numbers) if x else None for x in there_i))
    teacher_pulls.pull(
        raw_CV, target_C, softmax, pulls, temperatures, out_CV, teachers=teachers,
        teacher_pulls=_guided_by(program, numbers, softmax), teacher_temperatures=teacher_temperatures, **how,
    )  # fmt: skip
    return None


def _guided_by(program: Program, numbers: Iterator[Tensor], softmax: Softmax) -> list[tuple[DensePull, ...]]:
    """Each teacher's coefficients, per temperature of its comparison, from the numbers that the kernel wrote."""
    take = lambda there: [next(numbers) if x else None for x in there]
    own = iter([DensePull(*take(there)) for there in program.guided])  # type: ignore[arg-type]  # a, b, c, d
    pulled, found = dict(zip(program.looked, numbers, strict=True)), []
    for name, seen in zip(program.want.teachers, softmax.teachers, strict=True):
        slopes = dict(zip(looks_of(program.want, name), seen.looks, strict=True))  # type: ignore[union-attr]
        pulls = []
        for T in program.want.temperatures_of(name):
            mine = [Look(f.element, pulled[f], slopes[f]) for f in slopes if f.temperature == T and f in pulled]
            pulls.append(next(own)._replace(looks=tuple(mine)))
        found.append(tuple(pulls))
    return found
