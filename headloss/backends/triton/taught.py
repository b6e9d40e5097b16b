"""The visit with a teacher in one launch; see `visit.py`, and `headloss.teachers` for what is compared.

Dimension key:  C rows handed in   V columns in hand   K ids per row   F numbers per row   W numbers per id
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore
from torch import Tensor

from headloss.backends.triton.kernels.taught import AT_IDS, COLUMN, TEACHER_COLUMN, taught_kernel
from headloss.backends.triton.launch import by_identity, launch_kernel
from headloss.backends.triton.printer.elements import printed
from headloss.backends.triton.printer.facts import WIDE
from headloss.backends.triton.printer.program import Program
from headloss.backends.triton.tiles import (
    LAUNCH,
    Transform,
    check_dtype,
    per_row,
    plain_temperature,
    readable,
    rows_of,
    vector_along,
)
from headloss.backends.triton.visit import Arguments, Shape, Visited, as_number, kinds_of
from headloss.facts import Fact, Softmax, Want
from headloss.teachers import DenseChunk, DenseSoftmax, SparseSoftmax, TeacherChunk

# by columns in hand: beside a dense teacher; with a divergence that needs a second look; beside ids.  Measured on an
# H200; see benchmarks/gpu_teachers.py.
SHAPES = (
    (2048, Shape(4, 1), Shape(4, 1), Shape(4, 1)),
    (1 << 31, Shape(8, 2), Shape(8, 1), Shape(8, 1)),
)


KINDS = {"argmax": COLUMN.value, "teacher_argmax": TEACHER_COLUMN.value, **dict.fromkeys(WIDE, AT_IDS.value)}


class Taught(Visited):
    """What a visit with a teacher found.  `wide` (W, C, K): the facts at ids, then their cotangents."""

    def __init__(
        self, found: Tensor, best: Tensor | None, program: Program, theirs: Tensor | None, wide: Tensor | None
    ) -> None:
        self.found, self.best, self.program, self.theirs, self.wide = found, best, program, theirs, wide
        self.ends = _plan(program).ends

    @classmethod
    def join(cls, parts: Sequence[Visited]) -> Taught:
        first, *more = parts
        assert isinstance(first, Taught)
        if not more:
            return first
        cat = lambda name, dim: (
            None if getattr(first, name) is None else torch.cat([getattr(x, name) for x in parts], dim)
        )
        return cls(cat("found", 1), cat("best", 0), first.program, cat("theirs", 0), cat("wide", 1))  # type: ignore[arg-type]

    @property
    def softmax(self) -> Softmax:
        want, plan = self.program.want, _plan(self.program)
        most, *rest = self._slots(0).unbind()
        log_sums, rest = tuple(rest[: len(want.temperatures)]), rest[len(want.temperatures) :]
        met = [want.temperatures.index(T) for T in want.temperatures_of(want.teachers[0])]
        if plan.dense:
            log_St, looks = tuple(rest[1 : 1 + len(met)]), tuple(rest[1 + len(met) :])
            seen: Any = DenseSoftmax(rest[0], tuple(log_sums[i] for i in met), log_St, looks)
        else:
            seen = SparseSoftmax(rest[0] if rest else None, tuple(rest[1:]))
        return Softmax(most, log_sums, (seen,))

    @property
    def fact_values(self) -> Sequence[Tensor]:
        whole = {"argmax": self.best, "teacher_argmax": self.theirs}
        return [*self._named(self.program.want.facts, 1, 0, whole).values()]

    @property
    def cotangents(self) -> dict[Fact, Tensor]:
        before = sum(f.name in WIDE for f in self.program.want.facts)
        return self._named(self.program.cotangents, 4, before, {})

    def _named(self, facts: Sequence[Fact], which: int, skipped: int, whole: Any) -> dict[Fact, Tensor]:
        slots = iter(self._slots(which).unbind())
        wide = iter(() if self.wide is None else self.wide.unbind()[skipped:])
        take = lambda name: whole[name] if name in whole else next(wide if name in WIDE else slots)
        return {f: take(f.name) for f in facts}


class _Plan(NamedTuple):
    dense: bool
    slots: int
    wide_slots: int
    ends: tuple[int, ...]
    looks: tuple[Fact, ...]
    flags: dict[str, Any]
    look: tuple[float, ...]  # numbers of the divergences
    pulled: tuple[float, ...]


@by_identity
def _plan(program: Program) -> _Plan:
    """What a program fixes of the kernel."""
    want = program.want
    name, keys = want.teachers[0], want.temperatures
    met = want.temperatures_of(name)
    dense = program.width == 0
    used = [i for i, there in enumerate(program.there) if any(there)]
    looks = tuple(f for f in want.facts if f.element is not None)
    flags: dict[str, Any] = {
        "VALUES": program.values,
        "KINDS": tuple(KINDS.get(f.name, 0) for f in want.facts),
        "LOOK_OF": tuple(looks.index(f) if f in looks else -1 for f in want.facts),
        "MEETS": tuple(keys.index(T) for T in met),
        "USED": tuple(used),
        "WIDE_FACTS": tuple(f.name in WIDE for f in program.cotangents),
        "PICK": want.target,
        "TOTAL": want.total,
        "BEST": want.argmax,
        "TEACHER_BEST": want.sums("argmax", teacher=name),
        "MET": tuple(T in met and dense for T in keys),
        "WANT_X": tuple(want.sums("X", T) or want.sums("X", T, name) for T in keys),
        "WANT_Q": tuple(want.sums("Q", T) for T in keys),
        **{f"WANT_{x}": tuple(want.sums(x, T, name) for T in keys) for x in "YFG"},
        "DENSE": dense,
        "TAIL": want.sums("tail_max", teacher=name),
        "IDS": 0 if dense else triton.next_power_of_2(program.width),
        "LOOK_SUMS": 2 * len(looks),
        "PULLED": tuple(met.index(f.temperature) for f in program.looked),
        "PULLED_AT": tuple(looks.index(f) for f in program.looked),
    }
    flags |= {letter: tuple(program.there[i][j] for i in used) for j, letter in enumerate("ABECY")}
    tails = () if dense else tuple(tail for _, tail in program.guided)
    more = sum(tails)
    flags |= {f"ALL_{x}": flags[x] + (x == "A",) * more for x in "ABEC"}
    flags |= {"PULL_TAIL": tails, "PULL_IDS": () if dense else tuple(ids for ids, _ in program.guided)}
    flags |= {f"T{x}": tuple(k[i] for k in program.guided) if dense else () for i, x in enumerate("ABCD")}
    look: tuple[float, ...] = (0.0,)
    pulled = look
    flags["LOOK"] = flags["PULL_LOOK"] = None
    if looks:
        flags["LOOK"], look = printed(tuple((met.index(f.temperature), f.element) for f in looks), len(met))
    if program.looked:
        chosen = tuple((met.index(f.temperature), f.element) for f in program.looked)
        flags["PULL_LOOK"], pulled = printed(chosen, len(met))
    theirs = 1 + len(met) + len(looks) if dense or flags["TAIL"] else 0
    plain = [f for f in want.facts if f.name not in (*WIDE, "argmax", "teacher_argmax")]
    sizes = (
        1 + len(keys) + theirs, len(plain), len(program.terms), len(program.metrics),
        len(program.cotangents) - sum(flags["WIDE_FACTS"]), len(program.input_cotangents),
    )  # fmt: skip
    wide = sum(f.name in WIDE for f in want.facts) + sum(flags["WIDE_FACTS"])
    return _Plan(dense, sum(sizes), wide, (0, *itertools.accumulate(sizes)), looks, flags, look, pulled)


def shape_for(plan: _Plan, V: int) -> Shape:
    line = next(shapes for most, *shapes in SHAPES if most >= V)
    return line[2 if not plan.dense else 1 if plan.looks else 0]


def visit(
    raw_CV: Tensor,
    target_C: Tensor | None,
    want: Want,
    temperatures: Sequence[float | Tensor],
    program: Program,
    arguments: Arguments,
    out_CV: Tensor | None,
    teacher: TeacherChunk,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    start: int = 0,
    vocab: int | None = None,
    ignore: bool = False,
    shape: Shape | None = None,
) -> Taught:
    """As `visit.visit`; a dense teacher has every column of the student's."""
    check_dtype(raw_CV)
    C, V = raw_CV.shape
    assert V > 0 and want == program.want and len(want.teachers) == 1
    device, plan = raw_CV.device, _plan(program)
    new = functools.partial(torch.empty, device=device)
    found = new(plan.slots, C, dtype=torch.float32)
    best = new(C, dtype=torch.int64) if want.argmax else None
    theirs = new(C, dtype=torch.int64) if plan.flags["TEACHER_BEST"] else None
    wide = new(plan.wide_slots, C, program.width, dtype=torch.float32) if plan.wide_slots else None
    result = Taught(found, best, program, theirs, wide)
    if C == 0:
        return result
    if out_CV is not None and out_CV.stride(-1) != 1 and V > 1:  # rare: write beside it, then copy
        beside_CV = torch.empty_like(out_CV, memory_format=torch.contiguous_format)
        visited = visit(
            raw_CV, target_C, want, temperatures, program, arguments, beside_CV, teacher,
            scale=scale, softcap=softcap, start=start, vocab=vocab, ignore=ignore, shape=shape,
        )  # fmt: skip
        out_CV.copy_(beside_CV)
        return visited
    raw = rows_of(raw_CV)
    out = raw if out_CV is None or out_CV is raw_CV else rows_of(out_CV)
    how, other = Transform(scale, softcap), Transform(1.0, None)
    given = tuple(plain_temperature(T) for T in temperatures)
    given_theirs: tuple[Any, ...] = tuple(1.0 for _ in given)
    their_rows, ids, sorted_ids, widest = raw, None, None, raw_CV.element_size()
    if isinstance(teacher, DenseChunk):
        assert teacher.columns == V
        their_rows, other = rows_of(readable(teacher.raw_CV[:, :V])), Transform(teacher.scale, teacher.softcap)
        met = dict(zip(want.temperatures_of(want.teachers[0]), teacher.temperatures, strict=True))
        given_theirs = tuple(plain_temperature(met.get(T, 1.0)) for T in want.temperatures)
        widest = max(widest, their_rows.x_CV.element_size())
    else:
        ids = teacher.ids_CK.contiguous()
        sorted_ids = teacher.in_order() if plan.flags["TAIL"] else ids
    inputs = tuple(as_number(arguments.inputs[name], device) for name in program.inputs)
    bases = tuple(as_number(arguments.bases[name], device) for name in program.terms)
    factors = tuple(as_number(arguments.factors[name], device) for name in program.terms)
    looks = target_C is not None and (want.target or program.target or ignore)
    target = target_C if looks else None
    shape = shape or shape_for(plan, V)
    J, L = 16 // widest, 32 * shape.warps
    dense = plan.dense
    launch_kernel(
            taught_kernel, C,
        raw.x_CV, None if out_CV is None else out.x_CV, target, their_rows.x_CV if dense else None, ids, sorted_ids,
        found, wide, best, theirs, given, given_theirs, inputs, bases, factors,
        program.numbers, plan.look, plan.pulled,
        C, V, raw.x_CV.stride(0), raw.lead, out.x_CV.stride(0), out.lead, their_rows.x_CV.stride(0), their_rows.lead,
        0 if target is None else target.stride(0), start, V if vocab is None else vocab, program.width,
        *how.numbers, *other.numbers,
        FN=program.function, SLOTS=plan.slots, WIDE_SLOTS=plan.wide_slots, **plan.flags,
        TARGET=target is not None, IGNORE=ignore and target is not None, GRADIENT=out_CV is not None,
        PER_ROW=per_row(given), TEACHER_PER_ROW=per_row(given_theirs), **how.flags(), **other.flags("TEACHER_"),
        INPUT_ROWS=kinds_of(inputs), BASE_KINDS=kinds_of(bases), FACTOR_KINDS=kinds_of(factors),
        LINE=raw.line, VEC=raw.vector, TEACHER_VEC=vector_along(raw, their_rows),
        OUT_LINE=out.line, OUT_VEC=out.vector, OUT_RAW_VEC=vector_along(out, raw),
        OUT_TEACHER_VEC=vector_along(out, their_rows), K=shape.loads, L=L, J=J, BLOCK=L * J, num_warps=shape.warps,
        **LAUNCH,
    )  # fmt: skip
    return result
