"""The visit in one launch: facts, loss, metrics and gradient of each row while it is in hand.

Dimension key:  C rows handed in   V columns in hand   T terms   F numbers per row

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

from headloss.backends.triton.kernels.totals import count_kernel, totals_kernel
from headloss.backends.triton.kernels.visit import visit_kernel
from headloss.backends.triton.launch import Launch, by_identity, place
from headloss.backends.triton.printer.program import Program
from headloss.backends.triton.tiles import LAUNCH, check_dtype, plain_temperature, rows_of
from headloss.facts import Fact, Softmax, Want

Number = float | Tensor
Kinds = tuple[int, ...]  # see `kinds_of`


class Arguments(NamedTuple):
    """What a program is called with, beside the facts."""

    inputs: Mapping[str, Tensor]  # by name, (C,) or a scalar
    bases: Mapping[str, Number]  # of each term, the reduction's weight of each row, (C,), or one for all rows
    factors: Mapping[str, Number]  # of each term, what its gradient is multiplied with: weight * grad_scale


class Visited:
    """What a visit found; in ignored rows everything is 0.  The kernel's (F, C) numbers by name, cut when asked for."""

    def __init__(self, found: Tensor, best: Tensor | None, plan: Plan) -> None:
        self.found, self.best, self.program, self.ends = found, best, plan.program, plan.ends

    @classmethod
    def join(cls, parts: Sequence[Visited]) -> Visited:
        """Visits of rows that follow each other, as one."""
        if len(parts) == 1:
            return parts[0]
        best = None if parts[0].best is None else torch.cat([x.best for x in parts if x.best is not None])
        return cls(torch.cat([x.found for x in parts], 1), best, plan_of(parts[0].program))

    def _slots(self, which: int) -> Tensor:
        return self.found[self.ends[which] : self.ends[which + 1]]

    @property
    def softmax(self) -> Softmax:
        most, *log_sums = self._slots(0).unbind()
        return Softmax(most, tuple(log_sums))

    @property
    def block(self) -> Tensor:
        """(F, C), the facts in their order, without the argmax."""
        return self._slots(1)

    @property
    def facts(self) -> dict[Fact, Tensor]:
        return dict(zip(self.program.want.facts, self.fact_values, strict=True))

    @property
    def fact_values(self) -> Sequence[Tensor]:
        """In the order of the facts."""
        slots: Sequence[Tensor] = self.found[self.ends[1] : self.ends[2]].unbind()
        if self.best is None:
            return slots
        rest = iter(slots)
        return [self.best if f.name == "argmax" else next(rest) for f in self.program.want.facts]

    @property
    def values(self) -> Tensor:
        """(T, C), base * value."""
        return self._slots(2)

    @property
    def term_values(self) -> tuple[Tensor, int]:
        """Numbers that sum to the terms' values, and where among them the first term's are."""
        return self.found, self.ends[2]

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
# without a gradient no row has to stay in the cache, so that more of them can be under way
FORWARD = (
    (2048, Shape(4, 1), Shape(4, 1)),
    (1 << 31, Shape(8, 4), Shape(4, 4)),
)
FEWEST = 264  # two rows for each of an H200's processors; fewer are swept faster in parts


def suits(C: int, V: int) -> bool:
    """Whether one program a row keeps the device busy; else two launches with the row cut in parts are faster."""
    return C >= FEWEST or V <= 8192


def shape_of(plan: Plan, V: int, gradient: bool = True) -> Shape:
    for most, light, heavy in SHAPES if gradient else FORWARD:
        if most >= V:
            return heavy if plan.heavy else light
    raise AssertionError(V)


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
    device, plan = raw_CV.device, plan_of(program)
    assert (want is program.want or want == program.want) and not want.teachers
    if out_CV is not None and out_CV.stride(-1) != 1 and raw_CV.shape[1] > 1:  # rare: write beside it, then copy
        beside_CV = torch.empty_like(out_CV, memory_format=torch.contiguous_format)
        visited = visit(
            raw_CV, target_C, want, temperatures, program, arguments, beside_CV,
            scale=scale, softcap=softcap, start=start, vocab=vocab, valid_C=valid_C, ignore=ignore, shape=shape,
        )  # fmt: skip
        out_CV.copy_(beside_CV)
        return visited
    return launch(
        plan, raw_CV, target_C,
        tuple([plain_temperature(T) for T in temperatures]),
        *numbers_of(program, arguments, device), program.numbers, out_CV,
        scale=scale, softcap=softcap, start=start, vocab=vocab,
        valid_C=None if valid_C is None else valid_C.contiguous(), ignore=ignore, shape=shape,
    )  # fmt: skip


def launch(
    plan: Plan,
    raw_CV: Tensor,
    target_C: Tensor | None,
    temperatures: tuple[Number, ...],
    inputs: tuple[Number, ...],
    bases: tuple[Number, ...],
    factors: tuple[Number, ...],
    numbers: tuple[float, ...],
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
    """`visit` with everything in the form that the kernel takes."""
    check_dtype(raw_CV)
    C, V = raw_CV.shape
    assert V > 0
    vocab = V if vocab is None else vocab
    found = torch.empty(plan.slots, C, dtype=torch.float32, device=raw_CV.device)
    best = torch.empty(C, dtype=torch.int64, device=raw_CV.device) if plan.best else None
    if C == 0:
        return Visited(found, best, plan)
    raw = rows_of(raw_CV)
    out = raw if out_CV is None or out_CV is raw_CV else rows_of(out_CV)
    stride, out_stride = raw.x_CV.stride(0), out.x_CV.stride(0)
    shape = shape or shape_of(plan, V, out_CV is not None)
    target = target_C if plan.looks or ignore else None
    # rows of both at the same place of a vector, or no wide loads: the stores decide
    apart, lead_apart = stride - out_stride, raw.lead - out.lead
    together = raw.vector == out.vector and not apart % raw.vector and not lead_apart % raw.vector
    same = together and raw.line == out.line and not apart % raw.line and not lead_apart % raw.line
    even = raw.line == raw.vector and V % raw.vector == 0  # no vector belongs to two rows
    assert C >> 31 == 0 == vocab >> 31
    # all that a compiled kernel depends on, read once: see launch.py
    form = (
        shape, raw_CV.dtype, raw.line, raw.vector, out.line, out.vector, together, same, even,
        stride >> 31, out_stride >> 31, raw.x_CV.data_ptr() & 15 == 0, out.x_CV.data_ptr() & 15 == 0,
        ignore, out_CV is None, scale != 1.0, None if target is None else target.dtype,
        None if valid_C is None else valid_C.dtype, softcap is None,
        _forms((*temperatures, *inputs, *bases, *factors)),  # how many of each, the plan knows
    )  # fmt: skip
    kernel = plan.variants.get(form)
    if kernel is None:
        kernel = plan.variants[form] = _variant(
            plan, raw_CV.dtype, target is None, ignore, valid_C is None, out_CV is None, scale != 1.0, softcap is None,
            kinds_of(temperatures), kinds_of(inputs), kinds_of(bases), kinds_of(factors),
            raw.line, raw.vector, out.line, out.vector, together, same, even, shape,
        )  # fmt: skip
    arguments = (
        raw.x_CV, None if out_CV is None else out.x_CV, target, valid_C, found, best,
        temperatures, inputs, bases, factors, numbers,
        C, V, stride, raw.lead, out_stride, out.lead, 0 if target is None else target.stride(0), start, vocab,
        float(scale), 1.0 if softcap is None else float(softcap),
    )  # fmt: skip
    kernel.run(None, place(raw_CV), C, arguments)
    return Visited(found, best, plan)


def _variant(
    plan: Plan, dtype: torch.dtype, targetless: bool, ignore: bool, unmasked: bool, forward: bool,
    scaled: bool, uncapped: bool, temperatures: Kinds, inputs: Kinds, bases: Kinds, factors: Kinds,
    line: int, vector: int, out_line: int, out_vector: int, together: bool, same: bool, even: bool, shape: Shape,
) -> Launch:  # fmt: skip
    """The kernel with its constants, for calls of this form."""
    constants = {
        **plan.flags, **LAUNCH, "FN": plan.program.function, "SLOTS": plan.slots,
        "TARGET": not targetless, "IGNORE": ignore and not targetless, "VALID": not unmasked, "GRADIENT": not forward,
        "SCALED": scaled, "CAPPED": not uncapped, "PER_ROW": tuple(n >= 0 for n in temperatures),
        "INPUT_ROWS": inputs, "BASE_KINDS": bases, "FACTOR_KINDS": factors,
        "LINE": line, "VEC": vector, "OUT_LINE": out_line, "OUT_VEC": out_vector, "RAW_VEC": vector if together else 1,
        "SAME": same, "EVEN": even, "PAIRED": dtype == torch.bfloat16 and vector > 1 and _pairs(),
        "K": shape.loads, "L": 32 * shape.warps, "J": 16 // dtype.itemsize, "num_warps": shape.warps,
    }  # fmt: skip
    return Launch(visit_kernel, constants)


@functools.cache
def _pairs() -> bool:
    """Whether the device compares two bfloat16 in a word at once."""
    return not torch.cuda.is_available() or (torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0))


def totals(visited: Visited, weights: Sequence[Number]) -> tuple[Tensor, Tensor]:
    """The sum over rows of each term's value, (T,), and the loss, the sum of those times their weights: one launch."""
    found, first = visited.term_values
    weights = tuple([w if type(w) is float else as_number(w, found.device) for w in weights])
    sums = torch.empty(len(weights), dtype=torch.float32, device=found.device)
    loss = torch.empty((), dtype=torch.float32, device=found.device)
    kernel = _totals(first, _forms(weights))
    kernel.run(None, place(found), 1, (found, sums, loss, weights, found.shape[1]))
    return sums, loss


def count_targets(target_N: Tensor) -> tuple[Tensor, Tensor]:
    """How many of them count, the smallest and the largest of those; and 1 / how many."""
    numbers = torch.empty(3, dtype=torch.int64, device=target_N.device)
    mean = torch.empty((), dtype=torch.float64, device=target_N.device)
    _COUNT(1, target_N, numbers, mean, len(target_N))
    return numbers, mean


_COUNT = Launch(count_kernel, {"B": 4096, "num_warps": 16, **LAUNCH})


@functools.lru_cache(256)
def _totals(first: int, forms: tuple[Any, ...]) -> Launch:
    kinds = tuple(form if form == -1 else form[0] for form in forms)
    padded = 1 << (len(kinds) - 1).bit_length()
    block = max(256, 8192 // padded)
    return Launch(totals_kernel, {"FIRST": first, "KINDS": kinds, "P": padded, "B": block, "num_warps": 16, **LAUNCH})


class Plan(NamedTuple):
    """What a program fixes of the kernel."""

    program: Program
    slots: int
    heavy: bool  # whether more is summed than e^z
    looks: bool  # whether at the targets
    best: bool
    ends: tuple[int, ...]  # where softmax, facts, values, metrics and cotangents begin among the slots
    flags: dict[str, Any]
    variants: dict[Any, Launch]  # by the form of a call


@by_identity
def plan_of(program: Program) -> Plan:
    want = program.want
    used = [i for i, there in enumerate(program.there) if any(there)]
    flags: dict[str, Any] = {
        "VALUES": program.values,
        "WHOLE": tuple(f.name == "argmax" for f in want.facts),
        "USED": tuple(used),
        "PICK": want.target,
        "TOTAL": want.total,
        "BEST": want.argmax,
        "WANT_X": tuple(want.sums("X", T) for T in want.temperatures),
        "WANT_Q": tuple(want.sums("Q", T) for T in want.temperatures),
    }
    flags |= {name: tuple(program.there[i][j] for i in used) for j, name in enumerate("ABECY")}
    flags |= {"FINITE": any(flags["WANT_X"]), "FINITE_OUT": any(flags["B"])}
    sizes = (
        1 + len(want.temperatures), flags["WHOLE"].count(False),
        len(program.terms), len(program.metrics),
        len(program.cotangents), len(program.input_cotangents),
    )  # fmt: skip
    heavy = len(want.temperatures) > 1 or want.argmax or want.total or any((*flags["WANT_X"], *flags["WANT_Q"]))
    looks, ends = want.target or program.target, (0, *itertools.accumulate(sizes))
    return Plan(program, sum(sizes), heavy, looks, want.argmax, ends, flags, {})


def numbers_of(
    program: Any, arguments: Any, device: torch.device
) -> tuple[tuple[Number, ...], tuple[Number, ...], tuple[Number, ...]]:
    """Inputs, bases and factors as the kernel takes them, in the program's order."""
    inputs, bases, factors = arguments
    terms = program.terms
    return (
        tuple([as_number(inputs[name], device) for name in program.inputs]),
        tuple([x if type(x := bases[name]) is float else as_number(x, device) for name in terms]),
        tuple([x if type(x := factors[name]) is float else as_number(x, device) for name in terms]),
    )


def as_number(x: Number, device: torch.device) -> Number:
    """As the kernel takes it: a float, or a tensor of its device with one value or one a row, next to each other."""
    if not isinstance(x, Tensor):
        return float(x)
    if x.device != device:  # a scalar on the host; as a number it would be a float32
        return float(x) if x.dtype.is_floating_point and x.dtype != torch.float64 else x.to(device)
    if x.ndim and x.stride(0) == 0 and x.shape[0]:
        return x[0]
    return x.contiguous() if x.ndim else x


def _forms(xs: Sequence[Number]) -> tuple[Any, ...]:
    """Of a number -1; of a tensor all that a compiled kernel depends on."""
    return tuple([(x.ndim, x.dtype, x.data_ptr() & 15 == 0) if isinstance(x, Tensor) else -1 for x in xs])


def kinds_of(xs: Sequence[Number]) -> Kinds:
    """-1 a number, 0 one value on the device, 1 one a row."""
    return tuple([x.ndim if isinstance(x, Tensor) else -1 for x in xs])
