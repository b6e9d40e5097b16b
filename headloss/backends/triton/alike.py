"""Visits that are alike: of a later one nothing is looked at but where its tensors begin.

Dimension key:  C rows handed in   V columns in hand
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headloss.backends.triton.kernels.records import Given
from headloss.backends.triton.printer.program import Program
from headloss.backends.triton.tiles import address
from headloss.backends.triton.visit import Arguments, Number, fire, fire_totals, plan_of, totals_launch, visit
from headloss.backends.triton.visited import Visited


class Visits:
    """Visits in which the program, and dtypes, sizes, strides and devices agree, with the sums of their terms.

    There is no teacher, and what is given is contiguous and of the logits' device.
    """

    __slots__ = ("how", "known", "means", "plan", "temperatures")

    def __init__(
        self,
        program: Program,
        temperatures: tuple[float, ...],
        scale: float,
        softcap: float | None,
        means: tuple[bool, ...],  # of each term, whether its rows weigh `mean`; those of the others weigh 1
    ) -> None:
        self.plan, self.temperatures, self.how = plan_of(program), temperatures, (scale, softcap)
        self.means = None if all(means) else means
        self.known: dict[Any, tuple[Any, ...]] = {}  # kernels and their numbers

    def __call__(
        self,
        raw_CV: Tensor,
        target_C: Tensor,
        inputs: tuple[Tensor, ...],
        mean: Number,
        factors: tuple[Number, ...],
        weights: tuple[Number, ...],
        out_CV: Tensor | None,
        ignore: bool,
    ) -> tuple[Visited, Tensor, Tensor]:
        """What was found, each term's sum over the rows, and the loss; see `visit`."""
        plan, y = self.plan, raw_CV if out_CV is None else out_CV
        begin = address(raw_CV) | address(y) | target_C.data_ptr() << 3  # a line of 128 bytes, a vector of 16
        for x in inputs:
            begin |= x.data_ptr() << 3
        bases = (mean,) * len(weights) if self.means is None else tuple([mean if m else 1.0 for m in self.means])
        key = (ignore, out_CV is None, type(mean))
        known = self.known.get(key)
        if known is None or begin & 127:
            return self._look(raw_CV, target_C, inputs, bases, factors, weights, out_CV, ignore, key, begin)
        kernel, places, sums_kernel, numbers = known
        given = Given(self.temperatures, (), inputs, bases, factors, *numbers)
        target = target_C if plan.targets or ignore else None
        visited = fire(plan, kernel, places, raw_CV.shape[0], given, raw_CV, y, target)
        return visited, *fire_totals(sums_kernel, visited.found, weights)

    def _look(
        self,
        raw_CV: Tensor,
        target_C: Tensor,
        inputs: tuple[Tensor, ...],
        bases: tuple[Number, ...],
        factors: tuple[Number, ...],
        weights: tuple[Number, ...],
        out_CV: Tensor | None,
        ignore: bool,
        key: Any,
        begin: int,
    ) -> tuple[Visited, Tensor, Tensor]:
        """The same, with a look at everything."""
        plan, program, noted = self.plan, self.plan.program, list[Any]()
        arguments = Arguments(dict(zip(program.inputs, inputs, strict=True)), bases, factors)
        scale, cap = self.how
        visited = visit(
            raw_CV, target_C, program.want, self.temperatures, program, arguments, out_CV,
            scale=scale, softcap=cap, ignore=ignore, noted=noted,
        )  # fmt: skip
        found, first = visited.term_values
        kernel = totals_launch(first, weights)
        if noted and not begin & 127:
            last = (float(raw_CV.shape[1]), float(scale), 1.0 if cap is None else float(cap), 1.0, 1.0)
            self.known[key] = (*noted, kernel, (program.numbers, plan.look_numbers, *last))
        return visited, *fire_totals(kernel, found, weights)
