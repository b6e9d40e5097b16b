"""What a table of facts says of each fact, and how the coefficients of several facts add up."""

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
    """A fact: its value from the sums of a row, and its pull on the logits.  Parameter names choose what each is given.

        value   sums over the vocabulary, by name; T, the temperature; log_S; vocab.  What a value names, a sweep sums
        pull    g, the fact's cotangent; value, the fact itself; vocab.  It returns coefficients
        share   of a fact that compares with a teacher: what its pull adds to the student's own coefficients

    Without a pull a fact has no gradient.  `moves`: whether the logits move it all the same, so that a loss that pulls
    on it is warned.  `kept`: the value is read by a pull that does not stand here.
    """

    __slots__ = ("_pull", "_share", "_value", "moves", "pulls", "sums", "valued")

    def __init__(
        self,
        value: Callable[..., Tensor] | None,
        pull: Callable[..., Any] | None = None,
        share: Callable[..., Any] | None = None,
        *,
        moves: bool = True,
        kept: bool = False,
    ) -> None:
        self._value, self._pull, self._share = _Named(value), _Named(pull), _Named(share)
        for fn in (self._pull, self._share):
            for name in {*fn.names} - {"g", "value", "vocab"}:
                raise TypeError(f"pull: wanted a function of g, value and vocab, got a parameter {name!r}")
        self.sums = frozenset(self._value.names)
        self.pulls, self.moves = pull is not None, moves
        self.valued = kept or "value" in (*self._pull.names, *self._share.names)

    def value(self, row: Mapping[str, Any]) -> Tensor:
        return self._value(row)

    def pull(self, g: Tensor, value: Tensor | None, vocab: Any = None) -> Any:
        """None where there is none."""
        return self._pull({"g": g, "value": value, "vocab": vocab})

    def share(self, g: Tensor, value: Tensor | None, vocab: Any = None) -> Pull | None:
        """None where the student's own softmax is not pulled on."""
        return self._share({"g": g, "value": value, "vocab": vocab})


class _Named:
    """A function that is given what its parameters name."""

    __slots__ = ("fn", "names")

    def __init__(self, fn: Callable[..., Any] | None) -> None:
        self.fn, self.names = fn, () if fn is None else tuple(inspect.signature(fn).parameters)

    def __call__(self, given: Mapping[str, Any]) -> Any:
        if self.fn is None:
            return None
        found = [given.get(name) for name in self.names]
        for name, x in zip(self.names, found):
            if x is None:
                known = ", ".join(k for k, x in given.items() if x is not None)
                raise TypeError(f"a rule of the table of facts asks for {name!r}; what it can be given is {known}")
        return self.fn(*found)


def summed(kind: type[K], pulls: Sequence[K | None]) -> K:
    """Coefficients add up; one that nothing feeds is None."""
    there = [k for k in pulls if k is not None]
    if len(there) == 1:
        return there[0]
    fields = ([x for x in field if x is not None] for field in zip(*there, strict=True))
    return kind(*(functools.reduce(operator.add, present) if present else None for present in fields))  # type: ignore[arg-type]
