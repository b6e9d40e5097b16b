"""Prints the terms of an objective as one function of a row.

Dimension key:  C rows passed in   T terms

    row(facts, inputs, y, numbers, seeds, vocab) -> values, metrics, cotangents, input cotangents, pull coefficients

The cotangents are summed over the terms and folded into the five coefficients of `facts.Pull`, for each temperature.
With a teacher it takes `is_id` and `is_column` as well, and returns the coefficients of `teachers.DensePull` or
`SparsePull` too.  Facts at the ids of a sparse teacher are padded blocks: `is_id` says which elements are ids, and
`is_column` which of those name a column.
The float literals of a loss are arguments too, so that another clip range is traced anew but compiles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from headloss.backends.triton.printer.elements import printed
from headloss.backends.triton.printer.facts import WIDE, Texts, chain_rule, values, values_between
from headloss.backends.triton.printer.lower import compiled, function
from headloss.backends.triton.printer.operands import Unprintable, constant
from headloss.backends.triton.printer.printer import Printer, Value, dtype_of, kind_of, reach
from headloss.bounded_cache import store
from headloss.facts import CONSTANT, Fact, Want
from headloss.trace.cache_keys import ByIdentity
from headloss.trace.call import check_metrics
from headloss.trace.classify import counts_rows, size, without_modes
from headloss.trace.dynamic_shapes import distinct_sizes, trace_any_size
from headloss.trace.function_reads import is_all_ours
from headloss.trace.trace_check import SIZES, agrees, random_like

MOST_IDS = 1024  # of a row, in the registers of one program
ROW, SEGMENT = "row", "segment"  # whether a printed function is of a row or of a segment; also its name


class Program(NamedTuple):
    """A printed objective, of a row or `by_segment`.  Equal sources are one function, compiled once."""

    source: str
    want: Want
    terms: tuple[str, ...]
    inputs: tuple[str, ...]  # of the rows, in the function's order
    target: bool  # whether it reads the targets
    numbers: tuple[float, ...]  # float literals of the losses, which are passed to the function
    metrics: tuple[str, ...]  # of rows: "term/metric" and the objective's own
    cotangents: tuple[Fact, ...]
    input_cotangents: tuple[str, ...]
    present: tuple[tuple[bool, ...], ...]  # which of a, b, e, c, y are present, per temperature
    left_out: tuple[tuple[str, str], ...]  # metrics that are not printed, and the operation that prevents it
    width: int = 0  # ids that a sparse teacher names
    # which of a, b, c, d (a dense teacher) or of ids, tail (a sparse one) are present, for each teacher and temperature
    # of its comparison
    teacher_pulls: tuple[tuple[bool, ...], ...] = ()
    divergences: tuple[Fact, ...] = ()  # the divergences that pull
    by_segment: bool = False  # see `segments.py`; the fields below are only for such a program
    segment_metrics: tuple[str, ...] = ()
    of_segments: tuple[bool, ...] = ()  # per term, whether its values belong to segments
    input_kinds: tuple[str, ...] = ()  # per input: "row", "segment" or "scalar"
    sums: tuple[tuple[bool, ...], ...] = ()  # per walk, for each of its sums: whether in float64

    @property
    def function(self) -> Any:
        return compiled(self.source, SEGMENT if self.by_segment else ROW)

    @property
    def values(self) -> Any:
        """The facts of a row from its sums."""
        return values_between(self.want) if self.by_segment else values(self.want, self.width)


_PROGRAMS: dict[Any, Program] = {}


def once(make: Callable[..., Program]) -> Callable[..., Program]:
    """The same function, whose programs are cached by the content of its arguments."""

    @functools.wraps(make)
    def lower(terms: Any, want: Want, inputs: Mapping[str, Any], metrics: Sequence[tuple[str, Any]] = ()) -> Program:
        parts = [(name, ByIdentity(trace.joint), call.facts, call.input_names) for name, (call, trace) in terms.items()]
        own = [(n, call.reads(), call.signature.parameters) for n, call in metrics]
        key = (make, tuple(parts), want, tuple(sorted(inputs.items())), tuple(own))
        return _PROGRAMS.get(key) or store(_PROGRAMS, key, make(terms, want, inputs, metrics), 512)

    return lower


@once
def lower(
    terms: Mapping[str, tuple[Any, Any]], want: Want, inputs: Mapping[str, Any], metrics: Sequence[tuple[str, Any]]
) -> Program:
    """The program of some row terms, each a `Call` and its `Trace`, and of an objective's own metrics.

    Raises `Unprintable`, with the operation and the loss, if a value or a cotangent cannot be printed; a metric that
    cannot is left out.
    """
    if len(want.teachers) > 1:
        raise Unprintable("more than one teacher")
    if want.only_ids:
        raise Unprintable("no softmax: only some logits are read")
    if any(f.name == "topk_overlap" for f in want.facts):
        raise Unprintable("topk_overlap")
    for fact in want.facts:
        if fact.element is not None:
            printed(((0, fact.element),), 1)
    page = Page(want, inputs)
    page.write(terms, metrics)
    return page.program()


class Page:
    """A function being written."""

    kinds: tuple[str, ...] = ("row",)  # what a term's values may belong to

    def __init__(self, want: Want, inputs: Mapping[str, Any]) -> None:
        self.want, self.shapes = want, inputs
        self.teacher = want.teachers[0] if want.teachers else None
        named = inputs.get(f"teacher_ids of {self.teacher}")
        self.width = named.inner[0] if named is not None else 0
        if self.width > MOST_IDS:
            raise Unprintable(f"more than {MOST_IDS} ids per row")
        self.printer = self.new_printer()
        self.inputs: dict[str, Value] = {}
        self.target = False
        self.values: dict[str, str] = {}
        self.metrics: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.by_fact: dict[Fact, str] = {}
        self.by_input: dict[str, str] = {}

    def new_printer(self) -> Printer:
        return Printer(self.width)

    def segment_arguments(self, rest: Sequence[fx.Node], trace: Any) -> dict[fx.Node, Any]:
        """The arguments of a graph after facts, inputs and targets: the seeds come last."""
        return {rest[-2]: Value(f"seeds[{len(self.values)}]", "f")}

    def metrics_of(self, kind: str) -> dict[str, str] | None:
        """Where metrics per row, or per segment, are kept; None if such metrics are not printed."""
        return self.metrics if kind == "row" else None

    def write(self, terms: Mapping[str, tuple[Any, Any]], metrics: Sequence[tuple[str, Any]]) -> None:
        for name, (call, trace) in terms.items():
            try:
                self.term(name, call, trace)
            except Unprintable as error:
                raise Unprintable(error.operation, call.signature.name) from None
        for name, call in metrics:
            self.metric(name, call)

    def term(self, name: str, call: Any, trace: Any) -> None:
        if trace.joint is None or trace.kind not in self.kinds or trace.value not in self.kinds:
            raise Unprintable(trace.reason)
        graph = trace.joint.graph
        rest = [n for n in graph.nodes if n.op == "placeholder"]
        given: dict[fx.Node, Any] = {rest.pop(0): self._fact(f) for f in call.facts}
        names = [n for n in call.input_names if n in self.shapes]
        given |= {rest.pop(0): n for n in names}
        if any(s.wants("targets") for s in call.signatures):
            given[rest.pop(0)] = "targets"
        given |= self.segment_arguments(rest, trace)
        value, grads, metrics = graph.output_node().args[0]
        wanted = [g for g in grads if g is not None]
        self.printer.lifted = _number if trace.variable_floats else None
        found = self._print(graph, given, [value, *wanted])
        self.values[name] = found[value].to("f")
        facts = [f for f in call.facts if f.name not in CONSTANT]
        leaves: list[Any] = [*facts, *(n for n in names if self.shapes[n].requires_grad)]
        for leaf, g in zip(leaves, grads, strict=True):
            if g is not None:
                sums: dict[Any, str] = self.by_fact if isinstance(leaf, Fact) else self.by_input
                text = self.printer.line(found[g].to("f"))
                if isinstance(leaf, Fact) and leaf.name in WIDE:
                    text = self.printer.line(f"tl.where(is_column, {text}, 0.0)")
                sums[leaf] = self.printer.line(f"{sums[leaf]} + {text}") if leaf in sums else text
        for key, kind in trace.metrics.items():
            into = self.metrics_of(kind)
            if into is not None:
                self._metric(f"{name}/{key}", graph, given, metrics[key], into)
            else:  # a number, or a scalar: counted once per call, not once per row
                self.left_out[f"{name}/{key}"] = "not one value per row"

    def metric(self, name: str, call: Any) -> None:
        """A function of facts that returns one value per row, or several by name."""
        read = call.reads()
        parameters = [p for p in call.signature.parameters if p.kind != "input" or p.key in self.shapes]
        if read.unknown or any(p.kind == "segments" for p in parameters):
            self.left_out[name] = f"reads {', '.join(read.unknown)}" if read.unknown else "segments"
            return
        self.printer.lifted = _number if read.variable_floats else None
        asked: dict[str, Any] = {p.name: "targets" if p.kind == "targets" else p.fact or p.key for p in parameters}
        given_shapes = [self.shapes[x] for x in asked.values() if isinstance(x, str) and x in self.shapes]
        taken = {d for shape in given_shapes for d in shape.inner} | {self.width}
        choices = distinct_sizes(taken)
        names: list[str] = []
        sizes = choices[:1]

        def values(*arguments: Tensor) -> tuple[Tensor, ...]:
            found = call.fn(**dict(zip(asked, arguments, strict=True)), **call.options)
            check_metrics(name, found if isinstance(found, Mapping) else {name: found})
            found = {f"{name}/{k}": x for k, x in found.items()} if isinstance(found, Mapping) else {name: found}
            names.extend(found)
            if any(not isinstance(x, Tensor) or [size(d) for d in x.shape] != sizes for x in found.values()):
                raise TypeError("not one value per row")
            return tuple(found.values())

        def examples(choice: int, device: str) -> list[Tensor]:
            names.clear()
            sizes[:] = [choices[choice]]
            return [self._example(x, choices[choice]) for x in asked.values()]

        try:
            with torch.no_grad(), without_modes():
                module = trace_any_size(values, examples, "cpu", is_all_ours(call.fn))
        except Exception as error:  # a function may raise anything under a tracer
            self.left_out[name] = f"{type(error).__name__}: {error}"[:120]
            return
        if counts_rows(module):
            self.left_out[name] = "its Python code looks at the number of rows"
            return
        if not is_all_ours(call.fn) and not self._trace_agrees(module, values, list(asked.values()), sizes):
            self.left_out[name] = "its trace does not do what it does itself"
            return
        del names[len(module.graph.output_node().args[0]) :]  # type: ignore[arg-type]
        graph = module.graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        given = {
            n: self._fact(x) if isinstance(x, Fact) else x for n, x in zip(placeholders, asked.values(), strict=True)
        }
        for key, node in zip(names, graph.output_node().args[0], strict=True):  # type: ignore[arg-type]
            self._metric(key, graph, given, node, self.metrics)

    def _trace_agrees(self, module: Any, values: Any, asked: Sequence[Any], sizes: list[int]) -> bool:
        """See `trace_check.agrees`."""
        generator = torch.Generator("cpu").manual_seed(0)
        for R, _ in SIZES:
            sizes[:] = [R]
            like = [self._example(what, R) for what in asked]
            try:
                with torch.no_grad(), without_modes():
                    if not agrees(module, values, [[random_like(x, x.shape, generator) for x in like]]):
                        return False
            except Exception:  # a function may raise anything for numbers that it does not accept
                return False
        return True

    def _example(self, what: Any, R: int) -> Tensor:
        if isinstance(what, Fact) or what == "targets":
            whole = what == "targets" or what.name in ("argmax", "teacher_argmax")
            size = (R, self.width) if what != "targets" and what.name in WIDE else (R,)
            return torch.zeros(size, dtype=torch.long if whole else torch.float32, device="cpu")
        shape = self.shapes[what]
        return torch.zeros(shape.sizes(R, 1, 2), dtype=shape.dtype, device="cpu")

    def _fact(self, fact: Fact) -> Value:
        kind = "i" if fact.name in ("argmax", "teacher_argmax") else "f"
        if fact not in self.want.facts:
            return Value(constant(0, kind), kind)  # a trace showed that nothing reads it
        return Value(f"facts[{self.want.facts.index(fact)}]", kind)

    def _metric(
        self, name: str, graph: fx.Graph, given: Mapping[fx.Node, Any], node: fx.Node, into: dict[str, str]
    ) -> None:
        mark = self.printer.mark()
        try:
            text = self._print(graph, given, [node])[node].to("f")
        except Unprintable as error:
            self.printer.back(mark)
            self.left_out[name] = error.operation
        else:
            into[name] = self.printer.line(text)

    def _print(self, graph: fx.Graph, given: Mapping[fx.Node, Any], outputs: Sequence[fx.Node]) -> dict[fx.Node, Value]:
        needed = reach(outputs)
        arguments = {n: x if isinstance(x, Value) else self.argument(n, x) for n, x in given.items() if n in needed}
        arguments = {n: Value(self.printer.line(x.text), x.kind) for n, x in arguments.items()}
        found = self.printer.graph(graph, arguments, outputs)
        return {n: self._of_row(n, x) for n, x in found.items()} if self.width == 1 else found

    def _of_row(self, node: fx.Node, value: Value) -> Value:
        """With one id per row, (R, 1) may have become (R,) without a sum: make the block of one a number."""
        if node.meta["val"].ndim != 1:
            return value
        kind = "i" if value.kind == "b" else value.kind
        text = f"tl.sum(tl.where(is_id, {value.to(kind)}, {constant(0, kind)}), axis=0)"
        return Value(self.printer.line(f"{text} != 0" if value.kind == "b" else text), value.kind)

    def argument(self, node: fx.Node, name: str) -> Value:
        if name == "targets":
            self.target = True
            return Value("y", "i")
        shape = self.shapes[name]
        of_ids = name == f"teacher_ids of {self.teacher}" or name == f"teacher_logprob of {self.teacher}"
        if shape.kind not in ("row", "scalar") or (shape.inner and not of_ids):
            raise Unprintable(
                f"an input of one value a {shape.kind}" if not shape.inner else "an input of several columns"
            )
        return self.input_value(node, name)

    def input_value(self, node: fx.Node, name: str) -> Value:
        if name not in self.inputs:
            kind = kind_of(dtype_of(node))
            text = f"inputs[{len(self.inputs)}]"
            self.inputs[name] = Value(f"{text}.to(tl.float64)" if kind == "d" else text, kind)
        return self.inputs[name]

    def pulls(self) -> tuple[list[Texts], list[Texts]]:
        """See `facts.chain_rule`."""
        self.printer.lifted = None
        return chain_rule(self.printer, self.want, self.by_fact, self.width, lambda fact: self._fact(fact).text)

    def program(self) -> Program:
        results, program = self.results([*self.values.values()])
        arguments = ["facts", "inputs", "y", "numbers", "seeds", "vocab"]
        if self.teacher is None:
            results.pop()
        else:
            arguments += ["is_id", "is_column"]
        return program._replace(source=function(ROW, arguments, self.printer.lines, nested(results)))

    def results(self, values: list[str]) -> tuple[list[list[str]], Program]:
        """The function's results for a row, of which `values` are the first, and the program without its source."""
        own, teacher_pulls = self.pulls()
        divergences = tuple(f for f in self.by_fact if f.element is not None)
        named = [[*texts.values()] for texts in (self.metrics, self.by_fact, self.by_input)]
        coefficients = [[x or "0.0" for k in pulls for x in k] for pulls in (own, teacher_pulls)]
        program = Program(
            "", self.want, tuple(self.values), tuple(self.inputs), self.target, tuple(self.printer.numbers),
            tuple(self.metrics), tuple(self.by_fact), tuple(self.by_input), fed(own), tuple(self.left_out.items()),
            self.width, fed(teacher_pulls), divergences,
        )  # fmt: skip
        return [values, *named, coefficients[0], coefficients[1] + [self.by_fact[f] for f in divergences]], program


def flat(texts: Iterable[str]) -> str:
    """A tuple, printed."""
    return f"({''.join(f'{x}, ' for x in texts).rstrip()})"


def nested(results: Iterable[Iterable[str]]) -> str:
    """A tuple of tuples, printed."""
    return f"({', '.join(map(flat, results))})"


def fed(pulls: list[Texts]) -> tuple[tuple[bool, ...], ...]:
    """Which coefficients there are, per temperature."""
    return tuple(tuple(x is not None for x in k) for k in pulls)


def _number(i: int) -> str:
    return f"numbers[{i}]"
