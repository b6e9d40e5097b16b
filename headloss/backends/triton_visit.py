"""The visit in one launch: facts, loss, metrics and gradient of each row while it is in hand.

Dimension key:  C rows handed in   V columns in hand   T terms   F numbers a row

The terms come as a `Program` (program.py): their joint graph printed as a Triton function.  It runs inside the kernel,
so logits are read once and their gradient is written once.  Nothing is tuned at run time and nothing is atomic.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.backends.kernels.visit import visit_kernel
from headloss.backends.program import Program
from headloss.backends.triton import LAUNCH, _check, _rows, _temperature
from headloss.facts import STUDENT, Fact, Softmax, Want

Number = float | Tensor


class Arguments(NamedTuple):
    """What a program is called with, beside the facts."""

    inputs: Mapping[str, Tensor]  # by name, (C,) or a scalar
    options: Mapping[str, Mapping[str, Any]]  # of each term: `Call.options`
    bases: Mapping[str, Number]  # of each term, the reduction's weight of each row, (C,), or one for all rows
    factors: Mapping[str, Number]  # of each term, what its gradient is multiplied with: weight * grad_scale


class Visited:
    """What a visit found; in ignored rows everything is 0.  The kernel's (F, C) numbers by name, cut when asked for."""

    def __init__(self, found: Tensor, best: Tensor | None, program: Program) -> None:
        self.found, self.best, self.program = found, best, program
        self.ends = _plan(program).ends

    @classmethod
    def join(cls, parts: Sequence[Visited]) -> Visited:
        """Visits of rows that follow each other, as one."""
        if len(parts) == 1:
            return parts[0]
        best = None if parts[0].best is None else torch.cat([x.best for x in parts if x.best is not None])
        return cls(torch.cat([x.found for x in parts], 1), best, parts[0].program)

    def _slots(self, which: int) -> Tensor:
        return self.found[self.ends[which] : self.ends[which + 1]]

    @property
    def softmax(self) -> Softmax:
        most, *log_sums = self._slots(0).unbind()
        return Softmax(most, tuple(log_sums))

    @property
    def facts(self) -> dict[Fact, Tensor]:
        slots = iter(self._slots(1).unbind())
        return {f: self.best if f.name == "argmax" else next(slots) for f in self.program.want.facts}  # type: ignore[misc]

    @property
    def values(self) -> Tensor:
        """(T, C), base * value."""
        return self._slots(2)

    @property
    def metric_values(self) -> Tensor:
        """(M, C), in the order of the program's metrics."""
        return self._slots(3)

    @property
    def metrics(self) -> dict[str, Tensor]:
        return dict(zip(self.program.metrics, self._slots(3).unbind(), strict=True))

    @property
    def cotangents(self) -> dict[Fact, Tensor]:
        return dict(zip(self.program.cotangents, self._slots(4).unbind(), strict=True))

    @property
    def input_cotangents(self) -> dict[str, Tensor]:
        return dict(zip(self.program.input_cotangents, self._slots(5).unbind(), strict=True))


class Shape(NamedTuple):
    """How a row is swept: a block is `loads` vectors of 16 bytes for each lane."""

    warps: int
    loads: int


# by columns in hand: the first line whose bound is not below V.  Measured on an H200; see benchmarks/gpu_visit.py.
# Second column: where more is summed than e^z, which needs registers.
SHAPES = (
    (2048, Shape(4, 1), Shape(4, 1)),
    (65536, Shape(8, 4), Shape(4, 8)),
    (1 << 31, Shape(32, 4), Shape(32, 4)),
)
FEWEST = 264  # two rows for each of an H200's processors; fewer are swept faster in parts


def suits(C: int, V: int) -> bool:
    """Whether one program a row keeps the device busy; else two launches with the row cut in parts are faster."""
    return C >= FEWEST or V <= 8192


def visit(
    raw_CV: Tensor,
    target_C: Tensor | None,
    want: Want,
    temperatures: Sequence[float | Tensor],
    program: Program,
    arguments: Arguments,
    out_CV: Tensor | None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    start: int = 0,
    vocab: int | None = None,
    valid_C: Tensor | None = None,
    ignore: bool = False,
    shape: Shape | None = None,
) -> Visited:
    """Facts, values and metrics of every row, and its gradient into `out_CV` (may be `raw_CV`; None: no gradient).

    `ignore`: a target of -100 marks a row that is not read; so does False in `valid_C`.
    """
    _check(raw_CV)
    C, V = raw_CV.shape
    assert V > 0 and want == program.want and not want.teachers
    device = raw_CV.device
    plan = _plan(program)
    found = torch.empty(plan.slots, C, dtype=torch.float32, device=device)
    best = torch.empty(C, dtype=torch.int64, device=device) if want.argmax else None
    result = Visited(found, best, program)
    if C == 0:
        return result
    if out_CV is not None and out_CV.stride(-1) != 1 and V > 1:  # rare: write beside it, then copy
        beside_CV = torch.empty_like(out_CV, memory_format=torch.contiguous_format)
        visited = visit(
            raw_CV, target_C, want, temperatures, program, arguments, beside_CV,
            scale=scale, softcap=softcap, start=start, vocab=vocab, valid_C=valid_C, ignore=ignore, shape=shape,
        )  # fmt: skip
        out_CV.copy_(beside_CV)
        return visited
    raw = _rows(raw_CV)
    out = raw if out_CV is None or out_CV is raw_CV else _rows(out_CV)
    # rows of both at the same place of a vector, or no wide loads: the stores decide
    apart = (raw.x_CV.stride(0) - out.x_CV.stride(0), raw.lead - out.lead)
    together = raw.vector == out.vector and not any(x % raw.vector for x in apart)
    same = together and raw.line == out.line and not any(x % raw.line for x in apart)
    paired = raw_CV.dtype == torch.bfloat16 and raw.vector > 1  # words of two are decoded in fewer steps
    shape = shape or next(heavy if plan.heavy else light for most, light, heavy in SHAPES if most >= V)
    given = tuple(_temperature(T) for T in temperatures)
    inputs = tuple(_number(arguments.inputs[name], device) for name in program.inputs)
    bases = tuple(_number(arguments.bases[name], device) for name in program.terms)
    factors = tuple(_number(arguments.factors[name], device) for name in program.terms)
    looks = target_C is not None and (want.target or program.target or ignore)
    target = target_C if looks else None
    valid = None if valid_C is None else valid_C.contiguous()
    visit_kernel[(C,)](
        raw.x_CV, None if out_CV is None else out.x_CV, target, valid, found, best,
        given, inputs, bases, factors, program.options(arguments.options),
        C, V, raw.x_CV.stride(0), raw.lead, out.x_CV.stride(0), out.lead,
        0 if target is None else target.stride(0), start, V if vocab is None else vocab, float(scale), softcap or 1.0,
        FN=program.function, SLOTS=plan.slots, **plan.flags,
        TARGET=target is not None, IGNORE=ignore and target is not None, VALID=valid is not None,
        GRADIENT=out_CV is not None, PER_ROW=tuple(isinstance(T, Tensor) for T in given),
        SCALED=scale != 1.0, CAPPED=softcap is not None,
        INPUT_ROWS=_kinds(inputs), BASE_KINDS=_kinds(bases), FACTOR_KINDS=_kinds(factors),
        LINE=raw.line, VEC=raw.vector, OUT_LINE=out.line, OUT_VEC=out.vector, RAW_VEC=raw.vector if together else 1,
        SAME=same, PAIRED=paired, K=shape.loads, L=32 * shape.warps, J=16 // raw_CV.element_size(),
        num_warps=shape.warps, **LAUNCH,
    )  # fmt: skip
    return result


class _Plan(NamedTuple):
    slots: int
    heavy: bool  # whether more is summed than e^z
    ends: tuple[int, ...]  # where softmax, facts, values, metrics and cotangents begin among the slots
    flags: dict[str, Any]


@functools.lru_cache(256)
def _plan(program: Program) -> _Plan:
    """What a program fixes of the kernel."""
    want = program.want
    used = [i for i, there in enumerate(program.there) if any(there)]
    flags: dict[str, Any] = {
        "NAMES": tuple(STUDENT.index(f.name) for f in want.facts),
        "PLACES": tuple(want.temperatures.index(f.temperature) for f in want.facts),
        "USED": tuple(used),
        "PICK": want.target,
        "TOTAL": want.total,
        "BEST": want.argmax,
        "WANT_X": tuple(want.at(T, "entropy") for T in want.temperatures),
        "WANT_Q": tuple(want.at(T, "sum_p2") for T in want.temperatures),
    }
    flags |= {name: tuple(program.there[i][j] for i in used) for j, name in enumerate("ABECY")}
    sizes = (
        1 + len(want.temperatures), len(want.facts) - flags["NAMES"].count(STUDENT.index("argmax")),
        len(program.terms), len(program.metrics),
        len(program.cotangents), len(program.input_cotangents),
    )  # fmt: skip
    heavy = len(want.temperatures) > 1 or want.argmax or want.total or any((*flags["WANT_X"], *flags["WANT_Q"]))
    return _Plan(sum(sizes), heavy, (0, *itertools.accumulate(sizes)), flags)


def _number(x: Number, device: torch.device) -> Number:
    """As the kernel takes it: a float, or a tensor of its device with one value or one a row, next to each other."""
    if not isinstance(x, Tensor):
        return float(x)
    if x.device != device:  # a scalar on the host
        return float(x) if x.dtype.is_floating_point else x.to(device)
    if x.ndim and x.stride(0) == 0 and x.shape[0]:
        return x[0]
    return x.contiguous() if x.ndim else x


def _kinds(xs: Sequence[Number]) -> tuple[int, ...]:
    """-1 a number, 0 one value on the device, 1 one a row."""
    return tuple(x.ndim if isinstance(x, Tensor) else -1 for x in xs)
