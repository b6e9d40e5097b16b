"""The records of a visit: `VisitSpec`, what a program fixes of the kernel, and `Visited`, the results by name.

Dimension key:  C rows passed in   T terms   M metrics   K ids per row   F numbers per row   W numbers per id
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore
from torch import Tensor

from headloss.backends.triton.kernels.row_outputs import AT_IDS, COLUMN, TEACHER_COLUMN
from headloss.backends.triton.launch import Launch, by_identity
from headloss.backends.triton.printer.elements import printed
from headloss.backends.triton.printer.facts import WIDE
from headloss.backends.triton.printer.program import Program
from headloss.derived_teachers import is_whole
from headloss.facts import Fact, Softmax, Want
from headloss.teachers import DenseSoftmax, SparseSoftmax

KINDS = {"argmax": COLUMN.value, "teacher_argmax": TEACHER_COLUMN.value, **dict.fromkeys(WIDE, AT_IDS.value)}


class VisitSpec(NamedTuple):
    """What a program fixes of the kernel."""

    program: Program
    slots: int
    wide_slots: int
    more: bool  # whether it has results besides `found`: columns, or numbers per id
    heavy: bool  # whether more is summed than e^z
    targets: bool  # whether it needs targets
    ends: tuple[int, ...]  # where softmax, facts, values, metrics and cotangents begin among the slots
    flags: dict[str, Any]
    divergence: Any  # the divergences of the second read, printed as one function, and its numbers
    divergence_numbers: tuple[float, ...]
    variants: dict[Any, Launch]  # by `visit.Variant`
    layouts: dict[Any, tuple[Launch, tuple[Any, ...]]]  # where rows start on a line: the launch, and its last arguments


@by_identity
def spec_of(program: Program) -> VisitSpec:
    want, keys = program.want, program.want.temperatures
    name = want.teachers[0] if want.teachers else None
    compared = () if name is None else want.temperatures_of(name)
    dense, width = name is not None and not program.width, program.width
    divergences = tuple(f for f in want.facts if f.element is not None)
    compared_at = tuple(keys.index(T) for T in compared)
    pulled_at = tuple(keys.index(f.temperature) for f in program.divergences)
    # per temperature, the coefficients that the teacher contributes to
    teacher_pulls = dict(zip(compared_at, program.teacher_pulls, strict=True)) if name is not None else {}
    dense_pull = lambda j: tuple(dense and i in teacher_pulls and teacher_pulls[i][j] for i in range(len(keys)))
    tails = tuple(not dense and i in teacher_pulls and teacher_pulls[i][1] for i in range(len(keys)))
    own = {x: tuple(present[j] for present in program.present) for j, x in enumerate("ABECY")}  # the student's pull
    sums = lambda x: tuple(name is not None and want.sums(x, T, name) for T in keys)
    wide = tuple(f.name in WIDE for f in program.cotangents)
    flags: dict[str, Any] = {
        "KINDS": tuple(KINDS.get(f.name, 0) for f in want.facts),
        "PICK": want.target, "TOTAL": want.total, "BEST": want.argmax,
        "WANT_X": tuple(want.sums("X", T) or x for T, x in zip(keys, sums("X"), strict=True)),
        "WANT_Q": tuple(want.sums("Q", T) for T in keys),
        **own,
        "A": tuple(any(x) or i in pulled_at for i, x in enumerate(zip(own["A"], dense_pull(0), tails, strict=True))),
        "B": tuple(map(any, zip(own["B"], dense_pull(1), strict=True))),
        "DENSE": dense, "COMPARED_AT": compared_at,
        "COMPARISON": tuple(compared_at.index(i) if i in compared_at else -1 for i in range(len(keys))),
        "COMPARED": tuple(dense and i in compared_at for i in range(len(keys))), "WHOLE": dense and is_whole(str(name)),
        "TEACHER_BEST": name is not None and want.sums("argmax", teacher=name),
        **{f"WANT_{x}": sums(x) for x in "YFG"},
        "TC": dense_pull(2), "TD": dense_pull(3),
        "DIVERGENCE_OF": tuple(divergences.index(f) if f in divergences else -1 for f in want.facts),
        "DIVERGENCE_SUMS": 2 * len(divergences),
        "PULLED": tuple(divergences.index(f) for f in program.divergences), "PULLED_AT": pulled_at,
        "IDS": triton.next_power_of_2(width) if width else 0,
        "TAIL": name is not None and bool(width) and want.sums("tail_max", teacher=name),
        "PULL_IDS": tuple(k[0] for k in program.teacher_pulls) if width else (),
        "PULL_TAIL": tuple(k[1] for k in program.teacher_pulls) if width else (),
        "WIDE_REST": (
            *(False,) * (len(program.terms) + len(program.metrics)), *wide, *(False,) * len(program.input_cotangents),
        ),
    }  # fmt: skip
    flags |= {
        "FINITE": any(flags["WANT_X"]), "FINITE_OUT": any(flags["B"]), "TEACHER_FINITE": any(flags["WANT_Y"]),
        "NUMBERS": len(program.numbers),
    }  # fmt: skip
    teacher_slots = 1 + len(compared) + len(divergences) if dense or flags["TAIL"] else 0
    sizes = (
        1 + len(keys) + teacher_slots, flags["KINDS"].count(0), len(program.terms), len(program.metrics),
        wide.count(False), len(program.input_cotangents),
    )  # fmt: skip
    wide_slots = sum(f.name in WIDE for f in want.facts) + sum(wide)
    flags |= {"SLOTS": sum(sizes), "WIDE_SLOTS": wide_slots}
    heavy = len(keys) > 1 or want.argmax or want.total or any((*flags["WANT_X"], *flags["WANT_Q"]))
    divergence: Any = None
    numbers: tuple[float, ...] = (0.0,)
    if divergences:
        pairs = tuple((compared.index(f.temperature), f.element) for f in divergences)
        divergence, numbers = printed(pairs, len(compared))
    ends = (0, *itertools.accumulate(sizes))
    return VisitSpec(
        program, sum(sizes), wide_slots, bool(wide_slots or flags["BEST"] or flags["TEACHER_BEST"]), heavy,
        want.target or program.target, ends, flags, divergence, numbers, {}, {},
    )  # fmt: skip


def bests_of(want: Want) -> list[str]:
    """The teachers whose likeliest column is asked for."""
    return [name for name in want.teachers if want.sums("argmax", teacher=name)]


class Visited:
    """The results of a visit; in ignored rows everything is 0.  Named results are views of what the kernel wrote:
    `found` (F, C); `wide` (W, C, K), the facts at ids and then their cotangents; and the likeliest columns, `best` (C,)
    and `teacher_best`, with a row for each teacher whose argmax is asked for."""

    __slots__ = ("best", "found", "spec", "teacher_best", "wide")

    def __init__(
        self, found: Tensor, best: Tensor | None, spec: Any, teacher_best: Tensor | None = None,
        wide: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.found, self.best, self.spec, self.teacher_best, self.wide = found, best, spec, teacher_best, wide

    @classmethod
    def empty(cls, spec: VisitSpec, C: int, device: torch.device) -> Visited:
        """Uninitialised results for a visit of C rows."""
        found = torch.empty(spec.slots, C, dtype=torch.float32, device=device)
        if not spec.more:
            return cls(found, None, spec)
        best = torch.empty(C, dtype=torch.int64, device=device) if spec.flags["BEST"] else None
        teacher_best = torch.empty(1, C, dtype=torch.int64, device=device) if spec.flags["TEACHER_BEST"] else None
        wide = None
        if spec.wide_slots:
            wide = torch.empty(spec.wide_slots, C, spec.program.width, dtype=torch.float32, device=device)
        return cls(found, best, spec, teacher_best, wide)

    @property
    def program(self) -> Any:
        return self.spec.program

    @property
    def ends(self) -> tuple[int, ...]:
        return self.spec.ends

    @property
    def blocks(self) -> list[Tensor]:
        """The tensors that facts are cut out of."""
        if self.best is self.teacher_best is self.wide:  # none of them
            return [self.found]
        return [x for x in (self.found, self.best, self.teacher_best, self.wide) if x is not None]

    def of(self, blocks: Sequence[Tensor]) -> Visited:
        """The same with other tensors for `blocks`."""
        other, given = copy.copy(self), iter(blocks)
        for name in ("found", "best", "teacher_best", "wide"):
            if getattr(self, name) is not None:
                setattr(other, name, next(given))
        return other

    @classmethod
    def join(cls, parts: Sequence[Visited]) -> Visited:
        """Visits of consecutive rows, as one."""
        first, *more = parts
        if not more:
            return first
        cat = lambda name, dim: (
            None if getattr(first, name) is None else torch.cat([getattr(x, name) for x in parts], dim)
        )
        return cls(cat("found", 1), cat("best", 0), first.spec, cat("teacher_best", 1), cat("wide", 1))  # type: ignore[arg-type]

    def _slots(self, which: int) -> Tensor:
        return self.found[self.ends[which] : self.ends[which + 1]]

    @property
    def softmax(self) -> Softmax:
        want, keys = self.program.want, self.program.want.temperatures
        most, *rest = self._slots(0).unbind()
        log_sums, rest = tuple(rest[: len(keys)]), rest[len(keys) :]
        if not want.teachers:
            return Softmax(most, log_sums)
        compared = [keys.index(T) for T in want.temperatures_of(want.teachers[0])]
        if not self.program.width:
            log_St, divergences = tuple(rest[1 : 1 + len(compared)]), tuple(rest[1 + len(compared) :])
            softmax_t: Any = DenseSoftmax(rest[0], tuple(log_sums[i] for i in compared), log_St, divergences)
        else:
            softmax_t = SparseSoftmax(rest[0] if rest else None, tuple(rest[1:]))
        return Softmax(most, log_sums, (softmax_t,))

    @property
    def block(self) -> Tensor:
        """(F, C), the facts in their order, without those that are columns or have a value per id."""
        return self._slots(1)

    @property
    def facts(self) -> dict[Fact, Tensor]:
        return dict(zip(self.program.want.facts, self.fact_values, strict=True))

    @property
    def fact_values(self) -> Sequence[Tensor]:
        """The values of the facts, in the order of the Want."""
        if self.best is self.teacher_best is self.wide:  # none of them
            slots: Sequence[Tensor] = self.block.unbind()
            return slots
        want = self.program.want
        whole: dict[tuple[str, str | None], Any] = {("argmax", None): self.best}
        if self.teacher_best is not None:
            whole |= {("teacher_argmax", n): x for n, x in zip(bests_of(want), self.teacher_best.unbind(), strict=True)}
        return [*self._named(want.facts, 1, 0, whole).values()]

    @property
    def values(self) -> Tensor:
        """(T, C), base * value."""
        return self._slots(2)

    @property
    def term_values(self) -> tuple[Tensor, int]:
        """A matrix, and the index from which on each of its rows sums to a term's value."""
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
        before = sum(f.name in WIDE for f in self.program.want.facts)
        return self._named(self.program.cotangents, 4, before, {})

    def _named(self, facts: Sequence[Fact], which: int, skipped: int, whole: Any) -> dict[Fact, Tensor]:
        slots = iter(self._slots(which).unbind())
        wide = iter(() if self.wide is None else self.wide.unbind()[skipped:])
        take = lambda f, key: whole[key] if key in whole else next(wide if f.name in WIDE else slots)
        return {f: take(f, (f.name, f.teacher)) for f in facts}

    @property
    def input_cotangents(self) -> dict[str, Tensor]:
        return dict(zip(self.program.input_cotangents, self._slots(5).unbind(), strict=True))
