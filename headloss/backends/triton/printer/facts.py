"""Prints the table of facts: values by tracing `facts.finish`, coefficients by tracing `facts.coefficients`.

    facts(most, target, total, argmax, T, S, X, Q, vocab)        -> values, log_sums
    with a teacher, also (teacher_argmax, St, Y, F, G, ids, tail_most, tails, teacher_tails) -> also its log_sums
    between sweeps, with dense teachers, (teacher_argmax, joint, divergences) -> values, log_sums, log_S, log_St of each

`teacher_tails`: see `facts.with_tails`; `joint`: the six sums per teacher and temperature of its comparison.

Values are in the order of the Want.  A divergence's value comes from the second read: between sweeps it is passed in,
elsewhere it is 0 here.  No kernel and no other file of this backend knows the formula or the index of a fact.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from headloss.backends.triton.printer.lower import compiled, function
from headloss.backends.triton.printer.operands import kind_of
from headloss.backends.triton.printer.printer import Printer, Value, reach
from headloss.derived_teachers import is_whole
from headloss.facts import FACTS, LOGIT_SUMS, VALUED, Fact, Moments, Partial, Want, coefficients, finish, with_tails
from headloss.teachers import (
    DensePartial,
    DenseSoftmax,
    JointMoments,
    SparsePartial,
    SparseSoftmax,
    teacher_coefficients,
)
from headloss.trace.classify import without_modes
from headloss.trace.dynamic_shapes import trace_these_sizes

NAME = "facts"
WIDE = ("ids_logprob", "ids_logit")  # one value per id
SUMS = {  # what the kernels of this backend sum, and what is made of these sums
    "max", "target", "total", "columns", "argmax", "S", "X", "Q", "St", "Y", "F", "G", "ids", "tail_max", "top",
    "T", "vocab", "log_S", "log_St", "tail_log_sum", "teacher_at", "teacher_log_sum", *LOGIT_SUMS,
}  # fmt: skip
OWN = ("most", "target", "total", "argmax", "T", "S", "X", "Q", "vocab")
TEACHER = ("teacher_argmax", "St", "Y", "F", "G", "ids", "tail_most", "tails", "teacher_tails")
BETWEEN = ("teacher_argmax", "joint", "divergences")
ROWS = 3
Texts = list[str | None]


class Given(NamedTuple):
    """An argument of a traced function, and its text in the printed function."""

    text: str
    width: int = 0
    dtype: torch.dtype = torch.float32
    scalar: bool = False

    def example(self) -> Tensor:
        shape = () if self.scalar else (ROWS, self.width) if self.width else (ROWS,)
        return torch.ones(shape, dtype=self.dtype, device="cpu")


def check_sums(want: Want) -> None:
    """Refuse a fact that needs a sum which the kernels do not take."""
    for fact in want.facts:
        for name in sorted(FACTS[fact.name].sums - SUMS):
            raise TypeError(f'backend: "triton" has no sum {name!r}, which {fact} is made of; use backend="torch"')


def values(want: Want, width: int = 0) -> Any:
    """`facts.finish` as a `@triton.jit` function of a row's sums; `width`: how many ids a sparse teacher names."""
    return compiled(values_source(want, width), NAME)


def values_between(want: Want) -> Any:
    """The same between two sweeps, where there may be several dense teachers, with other columns than the student."""
    return compiled(_between_source(want) if want.teachers else values_source(want), NAME)


@functools.lru_cache(256)
def _between_source(want: Want) -> str:
    check_sums(want)
    keys, whole, each = range(len(want.temperatures)), torch.int64, len(JointMoments._fields)
    keys_of = {name: want.temperatures_of(name) for name in want.teachers}
    divergences = [f for f in want.facts if f.element is not None]
    names = [f"{x}[{i}]" for x in ("T", "S", "X", "Q") for i in keys]
    names += [f"joint[{i}]" for i in range(each * sum(map(len, keys_of.values())))]
    names += [f"divergences[{i}]" for i in range(len(divergences))]
    given = [Given(x) for x in ("most", "target", "total", *names)]
    given += [Given(f"teacher_argmax[{i}]", dtype=whole) for i in range(len(keys_of))]
    given += [Given("argmax", dtype=whole), Given("vocab", scalar=True)]

    def settle(at: Mapping[str, Tensor]) -> list[list[Tensor | None]]:
        moments = tuple(Moments(*(at[f"{x}[{i}]"] for x in Moments._fields)) for i in keys)
        sums, teachers = iter(x for name, x in at.items() if name.startswith("joint[")), []
        for i, Ts in enumerate(keys_of.values()):
            joint = tuple(JointMoments(*itertools.islice(sums, each)) for _ in Ts)
            teachers.append(DensePartial(at["most"], at[f"teacher_argmax[{i}]"], joint))
        partial = Partial(at["most"], at["argmax"], at["target"], at["total"], None, moments, tuple(teachers))
        facts, softmax = finish(partial, want, [at[f"T[{i}]"] for i in keys], at["vocab"])  # type: ignore[arg-type]
        facts |= {f: at[f"divergences[{i}]"] for i, f in enumerate(divergences)}
        logs = [x for softmax_t in softmax.teachers for x in (*softmax_t.log_S, *softmax_t.log_St)]  # type: ignore[union-attr]
        return [[facts[f] for f in want.facts], [*softmax.log_sums], [*logs]]

    return _values_source(settle, given, (*OWN, *BETWEEN))


@functools.lru_cache(256)
def values_source(want: Want, width: int = 0) -> str:
    check_sums(want)
    keys, whole = range(len(want.temperatures)), torch.int64
    many = [
        f"{x}[{i}]"
        for x in ("T", "S", "X", "Q", *(("St", "Y", "F", "G", "tails", "teacher_tails") if want.teachers else ()))
        for i in keys
    ]
    given = [Given(x) for x in ("most", "target", "total", "tail_most", *many)]
    given += [Given("argmax", dtype=whole), Given("teacher_argmax", dtype=whole), Given("vocab", scalar=True)]
    given += [Given("ids", width=width)] if width else []
    compared = [want.temperatures.index(T) for name in want.teachers for T in want.temperatures_of(name)]

    def settle(at: Mapping[str, Tensor]) -> list[list[Tensor | None]]:
        moments = tuple(Moments(*(at[f"{x}[{i}]"] for x in Moments._fields)) for i in keys)
        teachers: tuple[Any, ...] = ()
        if width:
            tail = want.sums("tail_max", teacher=want.teachers[0])
            tails = tuple(at[f"tails[{i}]"] for i in compared) if tail else ()
            teachers = (SparsePartial(at["ids"], at["tail_most"] if tail else None, tails, None),)
        elif want.teachers:
            joint = tuple(JointMoments(*(at[f"{x}[{i}]"] for x in JointMoments._fields)) for i in compared)
            teachers = (DensePartial(at["most"], at["teacher_argmax"], joint),)
        partial = Partial(at["most"], at["argmax"], at["target"], at["total"], None, moments, teachers)
        facts, softmax = finish(partial, want, [at[f"T[{i}]"] for i in keys], at["vocab"])  # type: ignore[arg-type]
        beyond = {name: [at[f"teacher_tails[{i}]"] for i in compared] for name in want.teachers if is_whole(name)}
        facts, softmax = with_tails(want, facts, softmax, beyond)
        found: list[list[Tensor | None]] = [[facts.get(f) for f in want.facts], [*softmax.log_sums]]
        for softmax_t in softmax.teachers:
            logs = softmax_t.log_St if isinstance(softmax_t, DenseSoftmax) else softmax_t.tail_log_sums
            found.append([logs[compared.index(i)] if logs and i in compared else None for i in keys])
        return found

    return _values_source(settle, given, (*OWN, *(TEACHER if want.teachers else ())), width)


def _values_source(settle: Any, given: Sequence[Given], arguments: Sequence[str], width: int = 0) -> str:
    printer = Printer(width)
    results = _printed(printer, settle, given)
    text = ", ".join(f"({''.join(f'{x or 0.0}, ' for x in group).rstrip()})" for group in results)
    return function(NAME, [*arguments], printer.lines, f"({text})")


def chain_rule(
    printer: Printer, want: Want, cotangents: Mapping[Fact, str], width: int, value: Callable[[Fact], str]
) -> tuple[list[Texts], list[Texts]]:
    """Print `facts.coefficients` and `teachers.teacher_coefficients` of these cotangents.

    Returns, per temperature, the fields of `Pull`; and, per teacher and temperature of its comparison, those of
    `DensePull` without its divergences, or of `SparsePull`; None for fields that no fact contributes to.
    """
    wide = lambda f: width if f.name in WIDE else 0
    given = {f: Given(x, wide(f)) for f, x in cotangents.items()}
    own = {f: Given(printer.line(value(f)), wide(f)) for f in cotangents if f.name in VALUED}

    def pulls(at: Mapping[str, Tensor]) -> list[list[Tensor | None]]:
        grads, facts = ({f: at[x.text] for f, x in named.items()} for named in (given, own))
        found = [list(k) for k in coefficients(facts, grads, want, at["vocab"])]  # type: ignore[arg-type]
        for name in want.teachers:
            asked = [f for f in want.facts if f.teacher == name]
            divergences = tuple(at["vocab"] for f in asked if f.element is not None)  # which are read elsewhere
            softmax_t: Any = SparseSoftmax(None, ()) if width else DenseSoftmax(at["vocab"], (), (), divergences)
            more: Any = teacher_coefficients(softmax_t, want.temperatures_of(name), asked, facts, grads)
            found += [list(k if width else k[:4]) for k in more]
        return found

    found = _printed(printer, pulls, [*given.values(), *own.values(), Given("vocab", scalar=True)])
    count = len(want.temperatures)
    return found[:count], found[count:]


def _printed(
    printer: Printer, fn: Callable[[Mapping[str, Tensor]], list[list[Tensor | None]]], given: Sequence[Given]
) -> list[Texts]:
    """Trace and print a function of named rows; returns the texts of its results."""
    named = {x.text: x for x in given}
    present: list[list[bool]] = []

    def traced(*tensors: Tensor) -> list[Tensor]:
        found = fn(dict(zip(named, tensors, strict=True)))
        present[:] = [[x is not None for x in group] for group in found]
        return [x for group in found for x in group if x is not None]

    with torch.no_grad(), without_modes():
        graph = trace_these_sizes(traced, [x.example() for x in named.values()]).graph
    outputs: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    needed = reach(outputs)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    arguments = {
        n: Value(printer.line(x.text), kind_of(x.dtype)) for n, x in zip(placeholders, named.values()) if n in needed
    }
    values = printer.graph(graph, arguments, outputs)
    texts = iter([values[n].text for n in outputs])
    return [[next(texts) if x else None for x in group] for group in present]
