"""The gradient of rows that were settled, from the numbers per row that settling returned.

Dimension key:  C rows passed in   V columns passed in   F numbers per row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from headloss.backends.triton import sweeps, teacher_pulls
from headloss.backends.triton.printer.program import Program
from headloss.backends.triton.settle import divergences_of
from headloss.facts import Pull, Softmax
from headloss.teachers import DensePull, DivergencePull, TeacherChunk, Temperature


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
    """Write the gradient of these rows.  `softmax`: of the settled rows; only the pull of teachers reads it.

    `how` as in `sweeps.pull_rows`, which serves if there are no teachers, or `teacher_pulls.pull`.
    """
    if not teachers:
        used = [i for i, present in enumerate(program.present) if any(present)]
        present, own = [program.present[i] for i in used], [temperatures[i] for i in used]
        return sweeps.pull_rows(raw_CV, target_C, rows_FC, present, own, out_CV, **how)
    assert softmax is not None
    numbers, pulls = iter(rows_FC[1:]), [Pull()] * len(program.present)
    for i, own_present in enumerate(program.present):
        if any(own_present):
            next(numbers)  # the log_sum
            pulls[i] = Pull(*(next(numbers) if x else None for x in own_present))
    teacher_pulls.pull(
        raw_CV, target_C, softmax, pulls, temperatures, out_CV, teachers=teachers,
        teacher_pulls=_teacher_pulls(program, numbers, softmax), teacher_temperatures=teacher_temperatures, **how,
    )  # fmt: skip
    return None


def _teacher_pulls(program: Program, numbers: Iterator[Tensor], softmax: Softmax) -> list[tuple[DensePull, ...]]:
    """Each teacher's coefficients, per temperature of its comparison, from the numbers that the kernel wrote."""
    take = lambda present: [next(numbers) if x else None for x in present]
    own = iter([DensePull(*take(present)) for present in program.teacher_pulls])  # type: ignore[arg-type]  # a, b, c, d
    pulled, found = dict(zip(program.divergences, numbers, strict=True)), []
    for name, softmax_t in zip(program.want.teachers, softmax.teachers, strict=True):
        slopes = dict(zip(divergences_of(program.want, name), softmax_t.slopes, strict=True))  # type: ignore[union-attr]
        pulls = []
        for T in program.want.temperatures_of(name):
            divergences = [
                DivergencePull(f.element, pulled[f], slopes[f]) for f in slopes if f.temperature == T and f in pulled
            ]
            pulls.append(next(own)._replace(divergences=tuple(divergences)))
        found.append(tuple(pulls))
    return found
