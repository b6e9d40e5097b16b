"""The facts of a row: their values, how partial sums over the vocabulary merge, and their gradients by the logits.

Dimension key:  N rows   V vocabulary columns (a shard, a block, or all)   R parts to be merged   K ids per row
Symbols:        z logits after scale, bias and softcap   T temperature   s = z / T   p = softmax(s)   y target column

A fact is one number per row.  Each has a value and a pull, its gradient d(fact)/d(s_j) with respect to the logits:

    lse            log sum_j e^s_j            p_j
    logprob        s_y - lse                  1[j=y] - p_j
    mean_logprob   mean_j log p_j             1/V - p_j
    entropy        -sum_j p_j log p_j         -p_j (log p_j + entropy)
    sum_p2         sum_j p_j^2                2 p_j (p_j - sum_p2)
    max_logprob    max_j log p_j              none: a metric
    min_logit      min_j s_j                  none: a metric
    argmax         the column of the maximum  none: a metric

The table `FACTS` below says the same in code, and is the only place that does: backends either call `finish` and
`coefficients` or print them into their kernels.

A loss is plain PyTorch on facts, so d(loss)/d(fact) is ordinary autograd on (N,) vectors.  `coefficients` folds those
into five numbers per row, and the gradient of any loss is

    d(loss)/d(s_j) = p_j (a + b log p_j + e p_j) + c + y 1[j=y]

Facts that compare a row with a teacher are in `teachers.py`, organised the same way: sums, merge, value, pull.

The sums behind the facts are a monoid.  A `Partial` covers any subset of the columns; `merge` combines the partials of
blocks, vocabulary splits or ranks; a part that is empty or all -inf is the identity.  All sums are relative to the
part's own maximum, x = (z - max) / T, because sums of uncentred logits lose digits: at V=128k in float32 with logits
offset by 200 the centred entropy is right to 3e-7, the uncentred one to 1.5e-5.  All temperatures share one maximum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.fact_rule import Pull as Pull
from headloss.fact_rule import Rule, sum_pulls
from headloss.teachers import (
    COMPARING,
    TOP,
    TeacherPartial,
    TeacherSoftmax,
    Temperature,
    finish_teacher,
    how_far,
    merge_teacher,
)
from headloss.teachers import FLOOR as FLOOR

# The table.  Values are computed from fields of `Partial` and `Moments`, and from T, log_S and vocab; see
# `fact_rule.Rule`.
FACTS: dict[str, Rule] = {
    "lse": Rule(lambda max, T, log_S: max / T + log_S, lambda g: Pull(a=g)),
    "logprob": Rule(lambda target, T, log_S: target / T - log_S, lambda g: Pull(a=-g, y=g)),
    "mean_logprob": Rule(
        lambda total, T, vocab, log_S: total / T / vocab - log_S, lambda g, vocab: Pull(a=-g, c=g / vocab)
    ),
    "entropy": Rule(lambda log_S, X, S: log_S - X / S, lambda g, value: Pull(a=-g * value, b=-g)),
    "sum_p2": Rule(lambda Q, S: Q / S**2, lambda g, value: Pull(a=-2 * g * value, e=2 * g)),
    "max_logprob": Rule(lambda log_S: -log_S),
    "min_logit": Rule(lambda least, T: least / T),
    "argmax": Rule(lambda argmax: argmax.long(), moves=False),
    **COMPARING,
}


class _FactsThat(Set[str]):
    """The facts whose rule passes a test, also those that are added to the table later."""

    def __init__(self, passes: Callable[[Rule], bool]) -> None:
        self.passes = passes

    def __contains__(self, name: object) -> bool:
        return name in FACTS and self.passes(FACTS[name])

    def __iter__(self) -> Iterator[str]:
        return (name for name in FACTS if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


CONSTANT = _FactsThat(lambda rule: not rule.pulls)  # no gradient
LOST = _FactsThat(lambda rule: not rule.pulls and rule.moves)  # no gradient, although it depends on the logits
VALUED = _FactsThat(lambda rule: rule.valued)  # the pull reads the value
LOGIT_SUMS = {"least", "square", "teacher_square", "dot"}  # of the logits, not of their softmax
NEEDS_TARGET = _FactsThat(lambda rule: "target" in rule.sums)


class Fact(NamedTuple):
    """A fact: its name, its temperature (None: the source's) and, if it compares the row with a teacher, which one."""

    name: str
    temperature: float | None = None
    teacher: str | None = None
    element: Any = None  # for a divergence: the function of (log p, log q) that is summed over the vocabulary

    def __str__(self) -> str:
        name = self.name if self.element is None else f"{self.name} {self.element}"
        name = name if self.temperature is None else f"{name}@T={self.temperature:g}"
        return f"{name} of {self.teacher}" if self.teacher else name


ANY = "any"


class Want:
    """The facts that a sweep is asked for; it computes nothing else."""

    def __init__(self, facts: Sequence[Fact]) -> None:
        facts = [*facts, *(f._replace(name="top_ids") for f in facts if f.name in TOP)]  # every pull needs these
        order, table = {f: i for i, f in enumerate(dict.fromkeys(facts))}, list(FACTS)
        self.facts = tuple(sorted(order, key=lambda f: (table.index(f.name), f.temperature or 0.0, order[f])))
        self.temperatures = tuple(dict.fromkeys(f.temperature for f in self.facts))
        self.teachers = tuple(dict.fromkeys(f.teacher for f in self.facts if f.teacher is not None))
        names = {f.name for f in self.facts}
        self.of_logits = any(FACTS[name].sums & LOGIT_SUMS for name in names)
        self.only_of_logits = all(
            FACTS[name].sums and FACTS[name].sums <= LOGIT_SUMS | {"T"} for name in names
        )  # no softmax is needed
        self.only_ids = names == {"ids_logit"}  # only logits at given ids, no softmax
        self._sums = frozenset(
            (x, T, f.teacher) for f in self.facts for x in FACTS[f.name].sums for T in (f.temperature, ANY)
        )
        self.target, self.argmax, self.total = (self.sums(x) for x in ("target", "argmax", "total"))
        self.divergent = any(f.element is not None for f in self.facts)
        self.constant = tuple(i for i, f in enumerate(self.facts) if f.name in CONSTANT)  # the facts without a gradient
        self._hash = hash(self.facts)
        self._at = frozenset((f.temperature, f.name, f.teacher) for f in self.facts)
        self._compared = {
            name: tuple(T for T in self.temperatures if any(f[1:3] == (T, name) for f in self.facts))
            for name in self.teachers
        }

    def at(self, temperature: float | None, name: str, teacher: str | None = None) -> bool:
        return (temperature, name, teacher) in self._at

    def sums(self, name: str, temperature: float | str | None = ANY, teacher: str | None = None) -> bool:
        """Whether a fact that is asked for (at this temperature, of this teacher) needs this sum."""
        return (name, temperature, teacher) in self._sums

    def temperatures_of(self, teacher: str) -> tuple[float | None, ...]:
        """The temperatures at which the row is compared with this teacher."""
        return self._compared.get(teacher, ())

    def divergences(self, teacher: str, temperature: float | None) -> tuple[Fact, ...]:
        """The divergences of this teacher, whose sum over the vocabulary needs a second read of the row."""
        if not self.divergent:
            return ()
        return tuple(f for f in self.facts if f.element is not None and f[1:3] == (temperature, teacher))

    @functools.cached_property
    def all_divergences(self) -> tuple[Fact, ...]:
        """All divergences, in the order in which a second read finds them."""
        return tuple(f for name in self.teachers for T in self.temperatures_of(name) for f in self.divergences(name, T))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Want) and self.facts == other.facts

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Want({', '.join(map(str, self.facts))})"


class Moments(NamedTuple):
    """Sums over the columns of one part at one temperature, with x = (z - max) / T.  Each is (N,)."""

    S: Tensor  # sum e^x
    X: Tensor | None  # sum x e^x
    Q: Tensor | None  # sum e^2x


class Partial(NamedTuple):
    """The sums of a sweep over some of the columns.  Each tensor is (N,), or None if nothing asked for it."""

    max: Tensor  # -inf for a part with no columns
    argmax: Tensor | None  # column of the maximum, in the whole vocabulary
    target: Tensor | None  # z_y - max, -inf when column y is not in this part
    total: Tensor | None  # sum of z - max
    columns: Tensor | None  # how many columns `total` covers
    moments: tuple[Moments, ...]  # one per temperature of the Want
    teachers: tuple[TeacherPartial, ...] = ()  # one per teacher of the Want
    least: Tensor | None = None  # min z, inf for a part with no columns


class Softmax(NamedTuple):
    """The numbers that give p again: log p_j = (z_j - max) / T - log_sum."""

    max: Tensor
    log_sums: tuple[Tensor, ...]  # one per temperature
    teachers: tuple[TeacherSoftmax, ...] = ()


def merge(
    parts: Partial,
    temperatures: Sequence[Temperature],
    paired: Sequence[Sequence[tuple[Temperature, Temperature]]] = (),
) -> Partial:
    """Combine R partials, stacked as (R, N) tensors, into one.  `paired`: see `teachers.merge_teacher`.

    Each part is rebased from its own maximum to the common one: with d = (max_r - max) / T,

        S = sum_r e^d S_r      X = sum_r e^d (X_r + d S_r)      Q = sum_r e^2d Q_r      total = sum_r total_r + n_r d
    """
    best = parts.max.amax(0)
    shift = how_far(parts.max, best)
    argmax = target = total = columns = None
    if parts.argmax is not None:
        argmax = parts.argmax.gather(0, parts.max.argmax(0, keepdim=True))[0]
    if parts.target is not None:
        target = (parts.target + shift).amax(0)
    if parts.total is not None and parts.columns is not None:
        moved = torch.where(parts.columns > 0, parts.total + parts.columns * shift, 0.0)
        total, columns = moved.sum(0), parts.columns.sum(0)
    moments = []
    for (S, X, Q), temperature in zip(parts.moments, temperatures, strict=True):
        d = (shift / temperature).clamp(min=FLOOR)
        k = d.exp()
        moments.append(
            Moments(
                S=(k * S).sum(0),
                X=None if X is None else (k * (X + d * S)).sum(0),
                Q=None if Q is None else (k * k * Q).sum(0),
            )
        )
    teachers = tuple(merge_teacher(t, shift, pairs) for t, pairs in zip(parts.teachers, paired, strict=True))
    least = None if parts.least is None else parts.least.amin(0)
    return Partial(best, argmax, target, total, columns, tuple(moments), teachers, least)


def finish(
    partial: Partial,
    want: Want,
    temperatures: Sequence[Temperature],
    vocab: int,
    *,
    guarded: bool = False,
    only_softmax: bool = False,
) -> tuple[dict[Fact, Tensor], Softmax]:
    """The facts asked for, and the softmax that their pull needs, from a partial that covers the whole vocabulary.

    `guarded`: the caller guarantees that every row has a finite maximum.  `only_softmax`: compute no facts.
    """
    moments, best = partial.moments, partial.max
    if not guarded:  # S = 0: every logit is -inf
        moments = tuple(m._replace(S=m.S.masked_fill(m.S == 0, 1.0)) for m in moments)
        best = best.masked_fill(best == -math.inf, 0.0)
    log_sums = tuple(m.S.log() for m in moments)
    facts: dict[Fact, Tensor] = {}
    softmax = Softmax(best, log_sums)
    rows = [
        {**partial._asdict(), **m._asdict(), "T": T, "log_S": log_S, "vocab": vocab}
        for m, T, log_S in zip(moments, temperatures, log_sums, strict=True)
    ]
    made = () if only_softmax else want.facts
    for fact in made:
        if fact.teacher is None:
            facts[fact] = FACTS[fact.name].value(rows[want.temperatures.index(fact.temperature)])
    softmaxes = []
    student = dict(zip(want.temperatures, zip(temperatures, log_sums, strict=True), strict=True))
    for name, teacher in zip(want.teachers, partial.teachers, strict=True):
        asked = [f for f in made if f.teacher == name]
        values, teacher_softmax = finish_teacher(teacher, asked, want.temperatures_of(name), softmax.max, student)
        facts |= values
        softmaxes.append(teacher_softmax)
    return facts, softmax._replace(teachers=tuple(softmaxes))


def with_tails(
    want: Want, facts: dict[Fact, Tensor], softmax: Softmax, tails: Mapping[str, Sequence[Tensor]]
) -> tuple[dict[Fact, Tensor], Softmax]:
    """For a teacher on a larger vocabulary, normalise log q over all of its columns, not only those it shares.

    `tails`: for each such teacher, log sum e^((u - max) / T) over the columns that the student lacks, per temperature.
    """
    if not tails:
        return facts, softmax
    softmaxes = list(softmax.teachers)
    for i, name in enumerate(want.teachers):
        if name in tails:
            shared = softmaxes[i].log_St  # type: ignore[union-attr]
            wholes = tuple([torch.logaddexp(x, tail) for x, tail in zip(shared, tails[name], strict=True)])
            for key, whole, tail in zip(want.temperatures_of(name), wholes, tails[name], strict=True):
                facts[Fact("teacher_tail_logprob", key, name)] = (tail - whole).clamp(min=FLOOR)
            softmaxes[i] = softmaxes[i]._replace(log_St=wholes)  # type: ignore[call-arg]
    return {f: facts[f] for f in facts if f in want.facts}, softmax._replace(teachers=tuple(softmaxes))


def coefficients(
    facts: Mapping[Fact, Tensor], grads: Mapping[Fact, Tensor], want: Want, vocab: int
) -> tuple[Pull, ...]:
    """The chain rule, once for all losses: fold the cotangents of the facts into five numbers per row.

    A missing or None cotangent counts as zero, and a coefficient that no fact contributes to stays None.
    """
    pulls = []
    for T in want.temperatures:
        found = []
        for fact in want.facts:
            g = grads.get(fact) if fact.temperature == T else None
            if g is not None:
                rule = FACTS[fact.name]
                found.append((rule.pull if fact.teacher is None else rule.student_pull)(g, facts.get(fact), vocab))
        pulls.append(sum_pulls(Pull, found))
    return tuple(pulls)
