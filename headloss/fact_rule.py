"""`Rule`, an entry in the table of facts: a fact's value and its pull (gradient); and how coefficients add up."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

K = TypeVar("K", bound=tuple[Any, ...])


class Pull(NamedTuple):
    """Coefficients of the gradient at one temperature; None where no fact needs the term.  Each is (N,)."""

    a: Tensor | None = None  # p_j
    b: Tensor | None = None  # p_j log p_j
    e: Tensor | None = None  # p_j^2
    c: Tensor | None = None  # 1
    y: Tensor | None = None  # 1[j=y]


class Rule:
    """A fact: three functions, each of which is passed what its parameter names ask for.

        value          takes sums over the vocabulary, T (the temperature), log_S and vocab; a sweep computes those sums
        pull           takes g (the fact's cotangent), value (the fact itself) and vocab, and returns coefficients
        student_pull   for a fact that compares with a teacher: what to add to the student's own coefficients

    A fact without a pull has no gradient.  `moves`: its value depends on the logits all the same, so a loss that
    differentiates it gets a warning.  `reads_value`: the fact's value is needed for the pull, though `pull` here does
    not take it.
    """

    __slots__ = ("_pull", "_student_pull", "_value", "moves", "pulls", "sums", "valued")

    def __init__(
        self,
        value: Callable[..., Tensor] | None,
        pull: Callable[..., Any] | None = None,
        student_pull: Callable[..., Any] | None = None,
        *,
        moves: bool = True,
        reads_value: bool = False,
    ) -> None:
        self._value, self._pull, self._student_pull = _ByName(value), _ByName(pull), _ByName(student_pull)
        for fn in (self._pull, self._student_pull):
            for name in {*fn.names} - {"g", "value", "vocab"}:
                raise TypeError(f"pull: wanted a function of g, value and vocab, got a parameter {name!r}")
        self.sums = frozenset(self._value.names)
        self.pulls, self.moves = pull is not None, moves
        self.valued = reads_value or "value" in (*self._pull.names, *self._student_pull.names)

    def value(self, row: Mapping[str, Any]) -> Tensor:
        return self._value(row)

    def pull(self, g: Tensor, value: Tensor | None, vocab: Any = None) -> Any:
        """The coefficients; None for a fact without a gradient."""
        return self._pull({"g": g, "value": value, "vocab": vocab})

    def student_pull(self, g: Tensor, value: Tensor | None, vocab: Any = None) -> Pull | None:
        """What to add to the student's own coefficients; None if nothing."""
        return self._student_pull({"g": g, "value": value, "vocab": vocab})


class _ByName:
    """A function that is called with the arguments that its parameters name."""

    __slots__ = ("fn", "names")

    def __init__(self, fn: Callable[..., Any] | None) -> None:
        self.fn, self.names = fn, () if fn is None else tuple(inspect.signature(fn).parameters)

    def __call__(self, given: Mapping[str, Any]) -> Any:
        if self.fn is None:
            return None
        found = [given.get(name) for name in self.names]
        for name, x in zip(self.names, found):
            if x is None:
                available = ", ".join(k for k, x in given.items() if x is not None)
                raise TypeError(f"a rule of the table of facts asks for {name!r}; available are {available}")
        return self.fn(*found)


def sum_pulls(kind: type[K], pulls: Sequence[K | None]) -> K:
    """Add coefficients field by field; a field that no fact contributes to is None."""
    present = [k for k in pulls if k is not None]
    if len(present) == 1:
        return present[0]
    fields = ([x for x in field if x is not None] for field in zip(*present, strict=True))
    return kind(*(functools.reduce(operator.add, present) if present else None for present in fields))  # type: ignore[arg-type]
