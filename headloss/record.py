"""What a call returns: one record, always with the same fields."""

from __future__ import annotations

from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.facts import Fact
from headloss.metrics import Metric
from headloss.trace.signature import passed_names

Key = str | tuple[str, float] | tuple[str, float | None, str]


class Grads(NamedTuple):
    """Gradients with respect to the source's tensors; None where not wanted."""

    logits: Tensor | None = None
    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


def add_grads(grads: Grads, more: Grads) -> Grads:
    """The sum of both, in the first one's memory where both have a gradient."""
    pairs = zip(grads, more, strict=True)
    return Grads(*(x if y is None else y if x is None else x.add_(y) for x, y in pairs))


class Facts(Mapping[Key, Tensor]):
    """The facts of a call, in the targets' shape, 0 in ignored rows: `facts.entropy`, `facts["entropy", 2.0]`.

    With several teachers, a fact about one is at (name, temperature or None, teacher); a divergence at `"tvd()"`.
    """

    _values: dict[Key, Tensor]
    _later: Callable[[], Mapping[Fact, Tensor]] | None

    def __init__(self, values: Mapping[Fact, Tensor] | Mapping[Key, Tensor]) -> None:
        self._values = _by_key(values)

    def __getitem__(self, key: Key) -> Tensor:
        return self._values[key]

    def __getattr__(self, name: str) -> Tensor:
        if name == "_values":  # cut out of blocks on first access; another thread may be doing the same
            later = self._later
            if later is not None:
                self._values, self._later = _by_key(later()), None
            return self.__dict__["_values"]
        if name.startswith("_") or name not in self._values:
            known = ", ".join(map(str, self._values)) or "none"
            raise AttributeError(f"fact {name!r} was not asked for by any loss or metric; there are {known}")
        return self._values[name]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    # the views of a dict: torch before 2.12 compiles no others
    def keys(self) -> KeysView[Key]:
        return self._values.keys()

    def values(self) -> ValuesView[Tensor]:
        return self._values.values()

    def items(self) -> ItemsView[Key, Tensor]:
        return self._values.items()

    def __reduce__(self) -> Any:
        return facts_from, (list(self._values.values()), list(self._values))

    def __repr__(self) -> str:
        return f"Facts({', '.join(f'{k}: {tuple(x.shape)}' for k, x in self._values.items())})"


torch.utils._pytree.register_pytree_node(  # so that wrappers (FSDP) find the tensors that the loss depends on
    Facts,
    lambda facts: (list(facts._values.values()), list(facts._values)),
    lambda values, keys: facts_from(list(values), keys),
)


def _by_key(values: Mapping[Any, Tensor]) -> dict[Key, Tensor]:
    """By key, from facts or from the keys of other `Facts`: tools that cast a record rebuild it from these."""
    keys = keys_of(values) if all(isinstance(fact, Fact) for fact in values) else values
    return dict(zip(keys, values.values(), strict=True))


def keys_of(facts: Collection[Fact]) -> tuple[Key, ...]:
    """Each fact's key: its name, with its temperature if it has one, and its teacher if there are several or two would
    clash.
    """
    several = len(passed_names({f.teacher for f in facts} - {None})) > 1  # type: ignore[arg-type]
    keys: list[Key] = []
    for fact in facts:
        name = fact.name if fact.element is None else str(fact.element)
        alike = sum(f.name == fact.name and f.temperature == fact.temperature for f in facts if f.element is None) > 1
        if fact.teacher is not None and (several or (alike and fact.element is None)):
            keys.append((name, fact.temperature, fact.teacher))
        else:
            keys.append(name if fact.temperature is None else (name, fact.temperature))
    return tuple(keys)


def facts_from(values: list[Tensor], keys: list[Any]) -> Facts:
    facts = Facts({})
    facts._values = dict(zip(keys, values, strict=True))
    return facts


def facts_later(make: Callable[[], Mapping[Fact, Tensor]]) -> Facts:
    """Facts that are computed on first access."""
    facts = Facts.__new__(Facts)
    facts._later = make
    return facts


class Output(NamedTuple):
    """What a call returns, always with the same fields."""

    loss: Tensor  # scalar, float32 or better
    terms: dict[str, Tensor]  # each term's value before its weight, detached; 0 for a term that is switched off
    metrics: dict[str, Metric]  # "term/name" for a loss's own, "name" for those of the objective
    facts: Facts  # differentiable
    grads: Grads | None = None  # from forward_backward only


def with_fields(out: Output, **new: Any) -> Output:
    """The record with some fields replaced.  Graphs compiled by torch before 2.12 cannot use `_replace`."""
    fields: list[Any] = [new.get(name, old) for name, old in zip(Output._fields, out, strict=True)]
    return Output(*fields)
