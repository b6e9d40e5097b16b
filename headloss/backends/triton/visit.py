"""The visit: one launch that computes facts, loss, metrics and gradient of each row while the row is in the cache.

Dimension key:  C rows passed in   V columns passed in   T terms   F numbers per row

The terms come as a `Program` (program.py): their joint graph printed as a Triton function.  It runs inside the kernel,
so logits are read once and their gradient is written once; a teacher's logits are read along with them.  Nothing is
tuned at run time, and results do not depend on the order in which programs run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore
from torch import Tensor

from headloss.backends.triton.given_numbers import Number, as_number, kinds_in, specialization_of
from headloss.backends.triton.kernels.records import At, Flags, Given
from headloss.backends.triton.kernels.shared_rows import IN_TURN, MISSING
from headloss.backends.triton.kernels.visit import visit_kernel
from headloss.backends.triton.launch import MOST_KNOWN, Launch
from headloss.backends.triton.printer.program import Program
from headloss.backends.triton.tiles import (
    address,
    check_dtype,
    multiprocessors,
    plain_temperature,
    readable,
    rows_of,
    vector_along,
)
from headloss.backends.triton.visit_records import Visited, VisitSpec
from headloss.backends.triton.visit_records import spec_of as spec_of
from headloss.bounded_cache import store
from headloss.facts import Want
from headloss.teachers import DenseChunk, TeacherChunk


class Arguments(NamedTuple):
    """What a program is called with, besides the facts."""

    inputs: Mapping[str, Tensor]  # by name, (C,) or a scalar
    bases: Iterable[Number]  # per term, the reduction's weight of each row, (C,), or one for all rows
    factors: Iterable[Number]  # per term, what its gradient is multiplied by: weight * grad_scale


class Shape(NamedTuple):
    """How a row is swept.  `loads`: 16-byte vectors of a block, per lane.  `ahead`: load the next block while one is
    summed.  `registers`: the most that a lane may have, so that more rows run at once.  `keep`: how many of the last
    whole blocks stay in registers from the first sweep to the second.  `span`: how many blocks of a shared row a
    program has; 0: no row is shared.
    """

    warps: int
    loads: int
    ahead: bool = False
    registers: int = 0
    keep: int = 0
    span: int = 0

    @property
    def block(self) -> int:
        """In bytes."""
        return 32 * self.warps * self.loads * 16

    @property
    def part(self) -> int:
        """How many bytes of a shared row a program has."""
        return self.span * self.block


# By the bytes of a row: the first entry whose bound is not below them.  The second shape is for sums besides that of
# e^z and for rows that start anywhere, which need registers.  Measured on an H200: `benchmarks/gpu_visit.py --configs`.
# A long row has a multiprocessor to itself, with 64 registers per lane; of shorter ones, two or three run at once.
KIB = 1024
SHAPES = (
    (2 * KIB, Shape(2, 1), Shape(2, 1)),
    (8 * KIB, Shape(4, 2), Shape(4, 2)),
    (32 * KIB, Shape(4, 4), Shape(4, 4)),
    (80 * KIB, Shape(8, 4, registers=80), Shape(8, 4, registers=80)),
    (112 * KIB, Shape(16, 4, registers=64), Shape(8, 4, registers=80)),
    (224 * KIB, Shape(16, 4, registers=64), Shape(16, 4, registers=64)),
    (1 << 40, Shape(32, 4, keep=1), Shape(32, 4)),
)
# without a gradient no row has to stay in the cache, so that more of them can run at once; rows may start anywhere
FORWARD = (
    (2 * KIB, Shape(2, 1), Shape(2, 1)),
    (8 * KIB, Shape(4, 2), Shape(4, 2)),
    (48 * KIB, Shape(4, 4), Shape(4, 4)),
    (128 * KIB, Shape(8, 4), Shape(4, 4)),
    (1 << 40, Shape(8, 4), Shape(8, 4, True)),
)
# If only e^z is summed, programs share rows of more than the first number of bytes, up to the second, and read each
# block once.  Several run at once on a multiprocessor: some load or store while others wait for the rest of their row.
SHARED = (
    (160 * KIB, 224 * KIB, Shape(2, 16, registers=96, span=1)),
    (400 * KIB, 1 << 40, Shape(4, 16, registers=96, span=1)),
)
# Rows with a dense teacher are shared too, so that what programs read twice is still in the L1 cache, up to 240 KiB of
# 256.  Second: if lanes keep more numbers, for a divergence that needs a second read or at several temperatures.
SHARED_WITH_TEACHER = (
    (48 * KIB, Shape(4, 4, registers=96, span=3)),
    (96 * KIB, Shape(4, 2, registers=72, span=4)),
)
# With a dense teacher; if a divergence needs a second read; with a sparse teacher.  See benchmarks/gpu_teachers.py.
WITH_TEACHER = (
    (16 * KIB, Shape(4, 2), Shape(4, 2), Shape(4, 2)),
    (32 * KIB, Shape(8, 2), Shape(4, 2), Shape(4, 2)),
    (80 * KIB, Shape(8, 2), Shape(8, 2), Shape(8, 4, registers=80)),
    (136 * KIB, Shape(16, 2, registers=64), Shape(16, 2, registers=64), Shape(8, 4, registers=80)),
    (224 * KIB, Shape(16, 2, registers=64), Shape(16, 2, registers=64), Shape(16, 4, registers=64)),
    (1 << 40, Shape(32, 2), Shape(32, 2), Shape(16, 4, registers=64)),
)
FEWEST = 264  # two rows per multiprocessor of an H200; fewer are swept faster in parts


def takes_one_launch(C: int, V: int) -> bool:
    """Whether one program per row keeps the device busy; if not, two launches over parts of rows are faster."""
    return C >= FEWEST or V <= 8192


def shape_of(spec: VisitSpec, row: int, gradient: bool = True, skewed: bool = False, most: int = 0) -> Shape:
    """For rows of `row` bytes; `skewed`: they may start anywhere; `most`: how many programs may share a row."""
    shared = [shape for least, up_to, shape in shared_shapes(spec) if least < row <= min(up_to, most * shape.part)]
    if gradient and shared:
        return shared[0]
    if spec.program.want.teachers:
        dense, divergent, ids = next(shapes for up_to, *shapes in WITH_TEACHER if up_to >= row)
        return divergent if spec.divergence is not None else dense if spec.flags["DENSE"] else ids
    light, heavy = next(shapes for up_to, *shapes in (SHAPES if gradient else FORWARD) if up_to >= row)
    return heavy if spec.heavy or (skewed and gradient) else light


def shared_shapes(spec: VisitSpec) -> Sequence[tuple[int, int, Shape]]:
    """Entries as in SHARED, for rows of this program."""
    if spec.flags["DENSE"]:
        least, shape = SHARED_WITH_TEACHER[spec.divergence is not None or len(spec.flags["A"]) > 1]
        return ((least, 1 << 40, shape),)
    return () if spec.heavy or spec.program.want.teachers else SHARED


def visit(
    raw_CV: Tensor,
    target_C: Tensor | None,
    want: Want,
    temperatures: Sequence[float | Tensor],
    program: Program,
    arguments: Arguments,
    out_CV: Tensor | None,
    *,
    teachers: Sequence[TeacherChunk] = (),
    scale: float = 1.0,
    softcap: float | None = None,
    start: int = 0,
    vocab: int | None = None,
    ignore: bool = False,
    shape: Shape | None = None,
    recorded: list[Any] | None = None,
) -> Visited:
    """Facts, values and metrics of every row, and its gradient into `out_CV` (may be `raw_CV`; None: no gradient).

    `ignore`: a target of -100 marks a row that is not read.  A dense teacher has every column of the student's.
    `recorded` receives the kernel and its last arguments, if every row starts on a line: see `cached_launches.py`.
    """
    spec = spec_of(program)
    C, V = raw_CV.shape
    assert (want is program.want or want == program.want) and len(teachers) == len(want.teachers) <= 1 and V
    device = raw_CV.device
    vocab = V if vocab is None else vocab
    target = target_C if spec.targets or ignore else None
    if C == 0:
        check_dtype(raw_CV)
        return Visited.empty(spec, 0, device)
    inputs = tuple([as_number(arguments.inputs[name], device) for name in program.inputs])
    bases = tuple([w if type(w) is float else as_number(w, device) for w in arguments.bases])
    factors = tuple([w if type(w) is float else as_number(w, device) for w in arguments.factors])
    given_T = tuple([T if type(T) is float else plain_temperature(T) for T in temperatures])
    teacher = teacher_arguments(spec, V, teachers[0]) if teachers else NO_TEACHER
    x, y, z = raw_CV, raw_CV if out_CV is None else out_CV, raw_CV if teacher.x_CV is None else teacher.x_CV
    copied_CV = None
    if out_CV is not None and V > 1 and y.stride(1) != 1:  # rare: write to another tensor, then copy
        y = copied_CV = torch.empty_like(y, memory_format=torch.contiguous_format)
    kernel = layout = None
    if not (address(x) | address(y) | address(z)) & 127:
        layout = (
            x.dtype, V, x.stride(), None if out_CV is None else y.stride(), y is x, vocab,
            None if target is None else (target.dtype, target.stride(), target.data_ptr() & 15), ignore, scale, softcap,
            start, shape, specialization_of((*given_T, *inputs, *bases, *factors)),
            (teacher.variant, z.dtype, z.stride(), teacher.aligned) if teachers else None,
        )  # fmt: skip
        kernel, places = spec.layouts.get(layout, (None, ()))
    if kernel is None:
        check_dtype(raw_CV)
        assert C >> 31 == 0 == vocab >> 31
        raw = rows_of(x)
        out = raw if y is x else rows_of(y)
        rows_t = raw if z is x else rows_of(z)
        stride, out_stride = raw.x_CV.stride(0), out.x_CV.stride(0)
        # wide loads only if both rows have the same offset in a vector: the stores decide
        apart, lead_apart = stride - out_stride, raw.lead - out.lead
        together = raw.vector == out.vector and not apart % raw.vector and not lead_apart % raw.vector
        same = together and raw.line == out.line and not apart % raw.line and not lead_apart % raw.line
        uncut = raw.line == raw.vector and V % raw.vector == 0  # no vector belongs to two rows
        pointers = (raw.x_CV, out.x_CV, target, rows_t.x_CV, teacher.ids, teacher.sorted_ids)
        # all that a compiled kernel depends on, read once: see launch.py
        most = most_parts(x) if same and uncut and softcap is None else 0
        along = teacher.variant and (vector_along(raw, rows_t), vector_along(out, rows_t))
        if along and (teacher.variant[2] or not along[0] == along[1] == raw.vector):
            most = 0
        size = V * x.itemsize
        shape = shape or shape_of(spec, size, out_CV is not None, raw.line > raw.vector, most)
        assert not shape.keep or (size >= (shape.keep + 2) * shape.block and not shape.ahead)
        parts = -(-size // shape.part) if shape.span else 0
        assert parts <= most and not (parts and (out_CV is None or not shared_shapes(spec)))
        variant = Variant(
            shape, parts, x.dtype, y.dtype, raw.line, raw.vector, out.line,
            out.vector, together, same, uncut, (stride >> 31, out_stride >> 31, rows_t.x_CV.stride(0) >> 31),
            tuple([(raw.x_CV if p is None else p).data_ptr() & 15 == 0 for p in pointers]),
            None if target is None else target.dtype, ignore, out_CV is None, scale != 1.0, softcap is not None,
            specialization_of(given_T), specialization_of(inputs), specialization_of(bases), specialization_of(factors),
            teacher.variant and (*teacher.variant, z.dtype, *along),
        )  # fmt: skip
        kernel = spec.variants.get(variant)
        if kernel is None:
            kernel = spec.variants[variant] = _launch_for(spec, variant)
        places = (
            V, stride, raw.lead, out_stride, out.lead, 0 if target is None else target.stride(0), start,
            rows_t.x_CV.stride(0), rows_t.lead, program.width,
        )  # fmt: skip
        if layout is not None and raw.x_CV is x and out.x_CV is y and rows_t.x_CV is z:
            store(spec.layouts, layout, (kernel, places), MOST_KNOWN)
        x, y, z = raw.x_CV, out.x_CV, rows_t.x_CV
    if recorded is not None:
        recorded += spec.layouts.get(layout, ())  # another thread may drop it at any time
    given = Given(
        given_T, teacher.temperatures, inputs, bases, factors, program.numbers, spec.divergence_numbers, float(vocab),
        float(scale), 1.0 if softcap is None else float(softcap), teacher.scale, teacher.cap, teacher.tails,
    )  # fmt: skip
    visited = launch_visit(spec, kernel, places, C, given, x, y, target, z, teacher.ids, teacher.sorted_ids)
    if copied_CV is not None:
        out_CV.copy_(copied_CV)  # type: ignore[union-attr]
    return visited


def launch_visit(
    spec: VisitSpec,
    kernel: Launch,
    places: tuple[Any, ...],
    C: int,
    given: Given,
    x: Tensor,
    y: Tensor,
    target: Tensor | None,
    z: Tensor | None = None,
    ids: Tensor | None = None,
    sorted_ids: Tensor | None = None,
) -> Visited:
    """Launch the kernel of a visit.  `x`: the student's logits; `y`: the gradient; `z`: a dense teacher's logits."""
    visited = Visited.empty(spec, C, x.device)
    best, teacher_best, wide, scratch = visited.best, visited.teacher_best, visited.wide, x
    F, V = kernel.constants["F"], places[0]
    if F.TAIL:
        words = F.L * -(-(V + F.LINE) // (32 * F.L * F.J))
        scratch = torch.zeros(C, words, dtype=torch.int32, device=x.device)
    if F.PARTS:
        scratch = torch.full((C, F.EXCHANGED), MISSING.value, dtype=torch.int32, device=x.device)
    at = At(
        x, y, x if target is None else target, visited.found,
        x if best is None else best, x if z is None else z, x if teacher_best is None else teacher_best,
        x if ids is None else ids, x if sorted_ids is None else sorted_ids, x if wide is None else wide, scratch,
    )  # fmt: skip
    if F.PARTS and IN_TURN.value:  # no program may overwrite what the next one reads
        apart = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        for _ in range(1 + bool(F.DIVERGENCE_SUMS)):
            kernel.run(None, -1, C * F.PARTS, (at._replace(out=apart(y)), given, *places))
        at = at._replace(raw=apart(x).copy_(x)) if y is x else at
    kernel.run(None, x.get_device(), C * (F.PARTS or 1), (at, given, *places))
    return visited


class Variant(NamedTuple):
    """All that the compiled kernel of a visit depends on, besides the `VisitSpec`."""

    shape: Shape
    parts: int  # programs that share a row
    dtype: torch.dtype
    out_dtype: torch.dtype
    line: int
    vector: int
    out_line: int
    out_vector: int
    together: bool
    same: bool
    uncut: bool
    long: tuple[int, ...]  # strides that need 64 bits
    aligned: tuple[bool, ...]
    target: torch.dtype | None
    ignore: bool
    forward: bool
    scaled: bool
    capped: bool
    temperatures: tuple[Any, ...]  # see `specialization_of`
    inputs: tuple[Any, ...]
    bases: tuple[Any, ...]
    factors: tuple[Any, ...]
    teacher: tuple[Any, ...]


class TeacherArguments(NamedTuple):
    """A teacher as the kernel takes it."""

    x_CV: Tensor | None = None
    ids: Tensor | None = None
    sorted_ids: Tensor | None = None
    temperatures: tuple[Number, ...] = ()
    scale: float = 1.0
    cap: float = 1.0
    variant: tuple[Any, ...] = ()  # its part of a `Variant`, but for how its rows lie in memory
    tails: tuple[Tensor, ...] = ()

    @property
    def aligned(self) -> tuple[bool, ...]:
        return tuple([x.data_ptr() & 15 == 0 for x in (self.ids, self.sorted_ids) if x is not None])


NO_TEACHER = TeacherArguments()


def teacher_arguments(spec: VisitSpec, V: int, teacher: TeacherChunk) -> TeacherArguments:
    if not isinstance(teacher, DenseChunk):
        ids = teacher.ids_CK.contiguous()
        return TeacherArguments(None, ids, teacher.in_order() if spec.flags["TAIL"] else ids)
    assert teacher.columns == V
    x_CV, own = teacher.raw_CV, teacher.temperatures
    x_CV = readable(x_CV if x_CV.shape[1] == V else x_CV[:, :V])
    given = tuple([1.0 if i < 0 else plain_temperature(own[i]) for i in spec.flags["COMPARISON"]])
    cap = 1.0 if teacher.softcap is None else float(teacher.softcap)
    tails = tuple([teacher.tail[i] for i in spec.flags["COMPARISON"]]) if spec.flags["WHOLE"] else ()  # -1: any
    return TeacherArguments(
        x_CV, None, None, given, float(teacher.scale), cap,
        (specialization_of(given), teacher.scale != 1.0, teacher.softcap is not None, specialization_of(tails)), tails,
    )  # fmt: skip


def _launch_for(spec: VisitSpec, v: Variant) -> Launch:
    """The kernel with its constants, for this variant."""
    shape, itemsize = v.shape, v.dtype.itemsize
    kinds, scaled, capped, _, kind, along, out_along = v.teacher or ((), False, False, (), v.dtype, 1, 1)
    J = 16 // max(itemsize, kind.itemsize)
    paired = lambda dtype, vector: dtype == torch.bfloat16 and vector > 1 and J == 8 and _pairs()
    flags = Flags(
        **spec.flags,
        TARGET=v.target is not None, IGNORE=v.ignore and v.target is not None,
        GRADIENT=not v.forward, PER_ROW=kinds_in(v.temperatures, True), TEACHER_PER_ROW=kinds_in(kinds, True),
        INPUT_ROWS=kinds_in(v.inputs), BASE_KINDS=kinds_in(v.bases), FACTOR_KINDS=kinds_in(v.factors),
        SCALED=v.scaled, CAPPED=v.capped, TEACHER_SCALED=scaled, TEACHER_CAPPED=capped,
        LINE=v.line, VEC=v.vector, OUT_LINE=v.out_line, OUT_VEC=v.out_vector,
        RAW_VEC=v.vector if v.together else 1, TEACHER_VEC=along, OUT_TEACHER_VEC=out_along,
        SAME=v.same, UNCUT=v.uncut, PAIRED=paired(v.dtype, v.vector), TEACHER_PAIRED=paired(kind, along),
        K=shape.loads, L=32 * shape.warps, J=J, AHEAD=shape.ahead,
        KEEP=shape.keep if v.same else 0,  # else a lane writes other columns than it reads
        PARTS=v.parts, PADDED=triton.next_power_of_2(max(v.parts, 1)), SPAN=shape.span,
        EXCHANGED=exchanged(spec, v.parts),
    )  # fmt: skip
    program = spec.program
    functions = {"FN": program.function, "VALUES": program.values, "DIVERGENCE": spec.divergence}
    limited = shape.registers and not v.capped and torch.version.hip is None  # a softcap's tanh would spill
    most = {"maxnreg": shape.registers} if limited else {}
    return Launch(visit_kernel, {**functions, "F": flags, "num_warps": shape.warps, **most})


def exchanged(spec: VisitSpec, parts: int) -> int:
    """How many numbers, at most, the programs of a row exchange: see `lanes.sweep_row` and `sweep_pair`."""
    flags = spec.flags
    return ((6 + 9 * len(flags["A"]) if flags["DENSE"] else 3) + flags["DIVERGENCE_SUMS"]) * parts


def most_parts(x: Tensor) -> int:
    """How many programs may share a row.  They wait for each other, so all of them must run at once, even if other
    kernels occupy three quarters of the device."""
    return multiprocessors(x.device) // 4 if x.dtype != torch.float16 and torch.version.hip is None else 0


@functools.cache
def _pairs() -> bool:
    """Whether the device can compare both bfloat16 in a word at once."""
    return not torch.cuda.is_available() or (torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0))
