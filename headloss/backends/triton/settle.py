"""Settling: one launch, between the sweep that reads and the one that writes, computes the losses of whole segments.

Dimension key:  R rows that count   C rows of a chunk   S segments   G = S + 1 groups: rows without a segment, segments

`Spans` says where each segment's rows are.  `Settling` is one call: it takes the sums of each chunk, keeps its facts,
metrics and cotangents, and returns what the pull reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.backends.triton.given_numbers import Number, as_number, kinds_of, specialization_of
from headloss.backends.triton.kernels.records import Given, SettleAt, SettleFlags
from headloss.backends.triton.kernels.settle import settle_kernel
from headloss.backends.triton.launch import Launch, by_identity
from headloss.backends.triton.printer.program import Program
from headloss.backends.triton.tiles import plain_temperature
from headloss.backends.triton.visit_records import KINDS, Visited, bests_of
from headloss.facts import Fact, Partial, Softmax, Want, finish
from headloss.teachers import DensePartial, DenseSoftmax, JointMoments

BLOCK, WARPS = 256, 4  # fixed, so that a segment's sums do not depend on other rows


class Spans(NamedTuple):
    """Where the rows of each group are: offsets (G + 1,) into the rows, or into `order` if there is one."""

    offsets: Tensor
    order: Tensor | None = None

    def present(self) -> Tensor:
        """How many segments have rows."""
        return (self.offsets[2:] > self.offsets[1:-1]).sum()


def spans(ids_R: Tensor, num_segments: int, rising: bool = False, whole: bool = False) -> Spans:
    """The spans of any ids, -1 for none.

    `rising`: ids other than -1 never fall, and rows without a segment are ignored, so they may lie inside a span.
    `whole`: there are no such rows.
    """
    groups = torch.arange(-1, num_segments + 1, device=ids_R.device)
    if not rising:
        placed, order = ids_R.sort(stable=True)
        return Spans(torch.searchsorted(placed, groups), order)
    filled_R = ids_R.contiguous() if whole or not ids_R.numel() else ids_R.cummax(0).values
    return Spans(torch.searchsorted(filled_R, groups))


def packed(
    partial: Partial,
    want: Want,
    temperatures: Sequence[Number],
    vocab: int,
    divergence_pass: Callable[[Softmax], Sequence[tuple[Tensor, Tensor]]],
) -> Tensor:
    """(F, C): the sums of rows, and of their dense teachers, over the whole vocabulary, in the order of the kernel.

    `divergence_pass`: see `in_order`.
    """
    divergences: Sequence[tuple[Tensor, Tensor]] = ()
    if want.divergent:
        divergences = divergence_pass(finish(partial, want, temperatures, vocab, only_softmax=True)[1])
    return torch.stack([x.to(torch.float32) for x in in_order(partial, want, divergences)])


def in_order(partial: Partial, want: Want, divergences: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The rows of `packed`, or what these records hold in place of tensors.

    `divergences`: for each divergence, in the order of `Want.all_divergences`, its value and the sum of its slopes.
    """
    found: list[Tensor | None] = [partial.max, partial.target, partial.total, partial.columns, partial.argmax]
    found += [x for moments in partial.moments for x in moments]
    dense_partials = [x for x in partial.teachers if isinstance(x, DensePartial)]
    assert len(dense_partials) == len(want.teachers)
    found += [*(x.max for x in dense_partials), *(x.argmax for x in dense_partials)]
    found += [x for dense in dense_partials for joint in dense.moments for x in joint]
    of = dict(zip(want.all_divergences, divergences, strict=True))
    found += [x for f in want.facts if f in of for x in of[f]]
    return [x for x in found if x is not None]


def divergences_of(want: Want, teacher: str) -> list[Fact]:
    return [f for f in want.facts if f.element is not None and f.teacher == teacher]


class Weights(NamedTuple):
    """The arguments of a program besides facts and segments."""

    inputs: Mapping[str, Tensor]  # by name: (R,), (S,) or a scalar
    bases: Mapping[str, Number]  # per term, the reduction's weight: of a row, of a segment, or one per row
    means: Mapping[str, bool]  # per term, whether that is to be divided by the segment's length
    factors: Mapping[str, Number]  # per term, what its gradient is multiplied by: weight * grad_scale


class Settled(Visited):
    """The results, as those of a visit, and `by_segment` (F, G): terms' sums, rows that count, metrics."""

    by_segment: Tensor

    @property
    def softmax(self) -> Softmax:
        want = self.program.want
        numbers = iter(self._slots(0).unbind())
        take = lambda count: tuple(itertools.islice(numbers, count))
        own = Softmax(next(numbers), take(len(want.temperatures)))
        maxima, logs = take(len(want.teachers)), []
        for name in want.teachers:
            compared = len(want.temperatures_of(name))
            logs.append((take(compared), take(compared)))
        slopes = dict(zip([f for f in want.facts if f.element is not None], numbers, strict=True))
        divergences = [tuple(slopes[f] for f in divergences_of(want, name)) for name in want.teachers]
        softmaxes = [DenseSoftmax(most, *log, at) for most, log, at in zip(maxima, logs, divergences, strict=True)]
        return own._replace(teachers=tuple(softmaxes))

    @property
    def term_values(self) -> tuple[Tensor, int]:
        return self.by_segment, 0

    @property
    def segment_counts(self) -> Tensor:
        return self.by_segment[len(self.program.terms), 1:]

    @property
    def segment_metric_values(self) -> Tensor:
        """(M, S), in the order of the program's metrics of segments."""
        return self.by_segment[len(self.program.terms) + 1 :, 1:]


class Settling:
    """One call.  If `ignore`, rows whose target is -100 in `targets` (R,) are ignored.

    `spans`: None if no loss combines rows; runs of BLOCK rows are then settled like segments.  `parts`: how many rows
    each call of `settle` has, if there are several.
    """

    def __init__(
        self,
        program: Program,
        spans: Spans | None,
        weights: Weights,
        targets: Tensor | None,
        rows: int,
        temperatures: Sequence[Number],
        *,
        vocab: int,
        device: torch.device,
        ignore: bool = False,
        gradient: bool = True,
        parts: Sequence[int] = (),
        ranks: int = 1,
    ) -> None:
        self.spec, self.spans, self.rows, self.gradient = _spec_of(program), spans, rows, gradient
        self.targets = None if targets is None else targets.contiguous()
        self.ranks, self.next = ranks, 0
        self.groups = sum(map(_run_count, parts or (rows,))) if spans is None else len(spans.offsets) - 1
        make = torch.empty if spans is None and rows else torch.zeros  # a call may settle only some segments
        self.settled = _empty_results(self.spec, rows, self.groups, device, make)
        given = (
            tuple([T if type(T) is float else plain_temperature(T) for T in temperatures]),
            tuple([_input(weights.inputs[name], device) for name in program.inputs]),
            tuple([as_number(weights.bases[name], device) for name in program.terms]),
            tuple([as_number(weights.factors[name], device) for name in program.terms]),
        )
        self.given = Given(given[0], (), *given[1:], program.numbers, (), float(vocab), 1.0, 1.0, 1.0, 1.0)
        means = tuple([weights.means[name] for name in program.terms])
        specialization = specialization_of((*given[0], *given[1], *given[2], *given[3]))
        variant = (specialization, means, ignore, gradient, spans and spans.order is None, targets is None, ranks > 1)
        if variant not in self.spec.variants:
            self.spec.variants[variant] = _launch_for(self.spec, given, means, spans, ignore, gradient, ranks > 1)
        self.launch = self.spec.variants[variant]

    def settle(self, sums: Tensor, first_row: int = 0, segments: slice | None = None) -> Tensor | None:
        """Settle the rows from `first_row` on: those of `segments`, or all rows that are left if None.

        `sums` is (F, C), or (W, F, C) from several ranks.  Returns what `sweeps.pull_rows` reads.
        """
        sums_FC, C = sums[0] if sums.ndim == 3 else sums, sums.shape[-1]
        first, last = (0, self.groups) if segments is None else (segments.start + 1, segments.stop + 1)
        if self.spans is None:
            first, last = self.next, self.next + _run_count(C)
            self.next = last
        sizes = (C, self.rows, first_row, first, self.groups, self.ranks, sums.stride(0))
        if C == 0 or first == last:
            return _numbers(self.spec, sums_FC) if self.gradient else None
        recorded = (self.spec, self.launch, self.gradient, last - first, sizes)
        return _launch_settle(recorded, self.settled, sums_FC, self.targets, self.spans or _NOWHERE, self.given)


_NOWHERE = (None, None)


def _run_count(rows: int) -> int:
    return -(-rows // BLOCK)


def settle_all(
    recorded: tuple[Any, ...], sums_FC: Tensor, targets: Tensor | None, spans: Spans | None, given: Given
) -> tuple[Settled, Tensor | None]:
    """Repeat a call of a `Settling` that settled all rows at once.  `recorded`: its spec, its kernel, whether it makes
    a gradient, how many groups there are, and its sizes.
    """
    spec, _, _, groups, (C, *_) = recorded
    settled = _empty_results(spec, C, groups, sums_FC.device, torch.zeros)
    return settled, _launch_settle(recorded, settled, sums_FC, targets, spans or _NOWHERE, given)


def _launch_settle(
    recorded: tuple[Any, ...], settled: Settled, sums_FC: Tensor, targets: Tensor | None, spans: Any, given: Given
) -> Tensor | None:
    spec, launch, gradient, programs, sizes = recorded
    rows, found, best, teacher_best, (offsets, order) = None, settled.found, settled.best, settled.teacher_best, spans
    if gradient:
        rows = _numbers(spec, sums_FC)
    at = SettleAt(
        sums_FC, found, found if best is None else best, found if teacher_best is None else teacher_best,
        found if rows is None else rows, settled.by_segment,
    )  # fmt: skip
    launch.run(None, sums_FC.get_device(), programs, (at, targets, order, offsets, given, *sizes))
    return rows


def _numbers(spec: SettleSpec, sums_FC: Tensor) -> Tensor:
    """Uninitialised, the numbers per row that the pull reads."""
    return torch.empty(spec.pulled, sums_FC.shape[1], dtype=torch.float32, device=sums_FC.device)


def _empty_results(spec: SettleSpec, rows: int, groups: int, device: torch.device, make: Any) -> Settled:
    found = torch.empty(spec.slots, rows, dtype=torch.float32, device=device)
    best = torch.empty(rows, dtype=torch.int64, device=device) if spec.flags.BEST else None
    bests = sum(spec.flags.TEACHER_BEST)
    teacher_best = torch.empty(bests, rows, dtype=torch.int64, device=device) if bests else None
    settled = Settled(found, best, spec, teacher_best)  # a SettleSpec has the fields of a VisitSpec that Visited uses
    settled.by_segment = make(spec.high, groups, dtype=torch.float32, device=device)
    return settled


class SettleSpec(NamedTuple):
    """What a program fixes of the kernel."""

    program: Any
    slots: int
    pulled: int  # numbers per row that the pull reads
    high: int  # numbers per segment
    ends: tuple[int, ...]  # as in `VisitSpec`
    flags: SettleFlags
    variants: dict[Any, Launch]


@by_identity
def _spec_of(program: Program) -> SettleSpec:
    want = program.want
    used = tuple(i for i, present in enumerate(program.present) if any(present))
    keys, compared = want.temperatures, [(name, T) for name in want.teachers for T in want.temperatures_of(name)]
    sums = lambda x: tuple(want.sums(x, T) for T in keys)
    bests = bests_of(want)
    divergences = sum(f.element is not None for f in want.facts)
    flags = SettleFlags(
        SUMS=tuple(map(len, program.sums)), WIDE=tuple(x for walk in program.sums for x in walk),
        KINDS=tuple(KINDS.get(f.name, 0) for f in want.facts), USED=used,
        PRESENT=tuple(x for present in program.present for x in present), OF_SEGMENTS=program.of_segments,
        PICK=want.target, TOTAL=want.total, BEST=want.argmax, BEST_SLOT=1 + want.target + 2 * want.total,
        WANT_X=sums("X"), WANT_Q=sums("Q"), TARGET=program.target, TEACHERS=bool(want.teachers),
        TEACHER_SLOT=1 + want.target + 2 * want.total + want.argmax + len(keys) + sum(sums("X")) + sum(sums("Q")),
        TEACHER_BEST=tuple(want.sums("argmax", teacher=name) for name in want.teachers),
        BEST_OF=tuple(bests.index(f.teacher) if f.teacher in bests else 0 for f in want.facts),
        JOINT=tuple(x in ("S", "St") or want.sums(x, T, name) for name, T in compared for x in JointMoments._fields),
        DIVERGENCES=divergences,
        TEACHER_PULLS=(*(x for present in program.teacher_pulls for x in present), *(True,) * len(program.divergences)),
    )  # fmt: skip
    sizes = (
        1 + len(keys) + len(want.teachers) + 2 * len(compared) + divergences, flags.KINDS.count(0), 0,
        len(program.metrics), len(program.cotangents), len(program.input_cotangents),
    )  # fmt: skip
    pulled = 1 + sum(1 + sum(program.present[i]) for i in used) + sum(flags.TEACHER_PULLS)
    high = len(program.terms) + 1 + len(program.segment_metrics)
    return SettleSpec(program, sum(sizes), pulled, high, (0, *itertools.accumulate(sizes)), flags, {})


def _launch_for(
    spec: SettleSpec, given: Any, means: Any, spans: Spans | None, ignore: bool, gradient: bool, ranks: bool
) -> Launch:
    temperatures, inputs, bases, factors = map(kinds_of, given)
    kinds = zip(inputs, spec.program.input_kinds, strict=True)
    flags = spec.flags._replace(
        GRADIENT=gradient, PER_ROW=tuple(n >= 0 for n in temperatures),
        INPUT_ROWS=tuple(2 if n == 1 and kind == "segment" else n for n, kind in kinds),
        BASE_KINDS=bases, FACTOR_KINDS=factors, MEANS=means, IGNORE=ignore, B=BLOCK,
        ORDERED=spans is not None and spans.order is not None, RUNS=spans is None, RANKS=ranks,
    )  # fmt: skip
    functions = {"FN": spec.program.function, "VALUES": spec.program.values}
    return Launch(settle_kernel, {**functions, "F": flags, "num_warps": WARPS})


def _input(x: Tensor, device: torch.device) -> Number:
    return as_number(x if x.numel() else x.new_zeros(1), device)  # without segments it still needs an address to read
