"""Prints the terms of an objective that combine rows through segments as one function of a segment.

    segment(WALK, facts, inputs, y, numbers, seeds, vocab, earlier, count, inside)

A traced segment loss is element-wise over rows and over segments, joined by sums over the rows of a segment and by
values that a segment spreads to its rows.  A program that owns a segment walks its rows once for each level of sums:
walk k returns what is to be summed, which may use the sums of `earlier` walks; the walk after the last sum returns the
results per row, as in `program.py`, and one more walk the results per segment.  Rows are blocks here and segments
scalars, so they broadcast; rows without a segment (`inside` is False) get 0, as in `Segments.spread`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from headloss.backends.triton.printer.operands import Unprintable, constant, name_of
from headloss.backends.triton.printer.printer import Printer, Value, dtype_of, kind_of
from headloss.backends.triton.printer.program import SEGMENT, Page, Program, flat, nested, once
from headloss.derived_teachers import is_whole
from headloss.facts import Want
from headloss.teachers import SPARSE

_ARGUMENTS = "WALK: tl.constexpr, facts, inputs, y, numbers, seeds, vocab, earlier, count, inside"
_VARIABLE, _SUM = re.compile(r"\bv\d+\b"), re.compile(r"\bearlier\[(\d+)\]")


@once
def lower(
    terms: Mapping[str, tuple[Any, Any]], want: Want, inputs: Mapping[str, Any], metrics: Sequence[tuple[str, Any]]
) -> Program:
    """Like `program.lower`, for terms of which some are segment terms and the others row terms."""
    named = any(f"teacher_ids of {name}" in inputs for name in want.teachers)
    if named or any(f.name in SPARSE or is_whole(f.teacher) for f in want.facts if f.teacher is not None):
        raise Unprintable("a teacher of some ids, or of a larger vocabulary, is settled in the sweep or apart")
    page = _SegmentPage(want, inputs)
    page.write(terms, metrics)
    return page.program()


class _SegmentPrinter(Printer):
    """A printer that knows sums over segments, by the arguments `ids` and `number`, which nothing else may read."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: fx.Node | None = None
        self.number: fx.Node | None = None
        self.summed: dict[str, bool] = {}  # what is summed, and whether in float64

    def combines_rows(self, node: fx.Node, values: dict[fx.Node, Any]) -> bool:
        if node is self.ids or node is self.number:
            values[node] = None
        elif node.target is torch.ops.headloss.segment_spread.default:
            y, ids = node.args
            self._check(ids)
            found = values[y]  # type: ignore[index]
            values[node] = self.value(f"tl.where(inside, {found.text}, {constant(0, found.kind)})", found.kind)
        elif node.target is torch.ops.headloss.segment_totals.default:
            x, ids, _ = node.args
            self._check(ids)
            if dtype_of(node) not in (torch.float32, torch.float64):
                raise Unprintable(f"segments.totals in {name_of(dtype_of(node))}")
            kind = kind_of(dtype_of(node))
            text = self.line(values[x].to(kind))  # type: ignore[index]
            self.summed.setdefault(text, kind == "d")
            values[node] = self.value(f"earlier[{list(self.summed).index(text)}]", kind)
        else:
            return False
        return True

    def _check(self, ids: Any) -> None:
        if ids is not self.ids:
            raise Unprintable("sums over segments of its own")


class _SegmentPage(Page):
    kinds = ("row", "segment")
    printer: _SegmentPrinter

    def __init__(self, want: Want, inputs: Mapping[str, Any]) -> None:
        super().__init__(want, inputs)
        self.segment_metrics: dict[str, str] = {}
        self.of_segments: list[bool] = []

    def new_printer(self) -> Printer:
        return _SegmentPrinter()

    def segment_arguments(self, rest: Sequence[fx.Node], trace: Any) -> dict[fx.Node, Any]:
        *segments, row_seed, segment_seed = rest
        by_segment = trace.value == "segment"
        self.of_segments.append(by_segment)
        given = {segment_seed if by_segment else row_seed: Value(f"seeds[{len(self.values)}]", "f")}
        self.printer.ids = self.printer.number = None
        if segments:
            self.printer.ids, counts, self.printer.number = segments
            given[counts] = Value("count", "d")
        return given

    def metrics_of(self, kind: str) -> dict[str, str] | None:
        return {"row": self.metrics, "segment": self.segment_metrics}.get(kind)

    def argument(self, node: fx.Node, name: str) -> Value:
        shape = self.shapes.get(name)
        if shape is not None and shape.kind == "segment":
            if shape.requires_grad:
                raise Unprintable("a gradient for one value per segment")
            if not shape.inner:
                return self.input_value(node, name)
        return super().argument(node, name)

    def program(self) -> Program:
        of_terms = list(zip(self.values.values(), self.of_segments, strict=True))
        rows, program = self.results([x if not s else "0.0" for x, s in of_terms])
        walks = self._walks()
        segment = [[x if s else "0.0" for x, s in of_terms], [*self.segment_metrics.values()]]
        results = [*map(flat, walks), nested(rows), nested(segment)]
        return program._replace(
            source=self._source(results, walks), by_segment=True, segment_metrics=tuple(self.segment_metrics),
            of_segments=tuple(self.of_segments), input_kinds=tuple(self.shapes[n].kind for n in self.inputs),
            sums=tuple(tuple(self.printer.summed[x] for x in walk) for walk in walks),
        )  # fmt: skip

    def _walks(self) -> list[list[str]]:
        """What each walk sums: a sum that is made of other sums comes after the walk that takes those."""
        level: dict[str, int] = {}
        summed = list(self.printer.summed)
        for line in self.printer.lines:
            name, text = line.split(" = ", 1)
            after = [level.get(x, 0) for x in _VARIABLE.findall(text)]
            after += [level.get(summed[int(i)], 0) + 1 for i in _SUM.findall(text)]
            level[name] = max(after, default=0)
        walks: list[list[str]] = []
        for name in summed:
            at = level.get(name, 0)
            walks += [[] for _ in range(at + 1 - len(walks))]
            walks[at].append(name)
        return walks

    def _source(self, results: list[str], walks: list[list[str]]) -> str:
        order = [x for walk in walks for x in walk]  # in which they are summed
        number = [order.index(x) for x in self.printer.summed]
        text = f"@triton.jit\ndef {SEGMENT}({_ARGUMENTS}):\n"
        for i, result in enumerate(results):
            test = "else" if i == len(results) - 1 else f"{'elif' if i else 'if'} WALK == {i}"
            lines = [*_needed(self.printer.lines, result), f"return {result}"]
            text += f"    {test}:\n" + "".join(f"        {line}\n" for line in lines)
        return _SUM.sub(lambda m: f"earlier[{number[int(m[1])]}]", text)


def _needed(lines: Sequence[str], result: str) -> list[str]:
    """The lines that a result depends on, in order."""
    wanted, found = set(_VARIABLE.findall(result)), []
    for line in reversed(lines):
        name, text = line.split(" = ", 1)
        if name in wanted:
            found.append(line)
            wanted |= set(_VARIABLE.findall(text))
    return found[::-1]
