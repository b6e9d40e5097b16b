"""Checks of where a term's gradient goes: to facts and inputs, to a fact that has none, or to a captured tensor.

If a gradient would be lost, we raise or warn: a call gives no gradient to a tensor that a function captures,
`max_logprob` has none, and a loss without a path to any fact or input would train nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from headloss.bounded_cache import store
from headloss.facts import CONSTANT, LOST, Fact
from headloss.trace.classify import creates


class Reach(NamedTuple):
    """What the gradient of a term's values reaches."""

    path: bool  # whether it reaches a fact that has a gradient, or an input that requires grad
    lost: tuple[Fact, ...] = ()  # facts that have no gradient
    captured: str = ""  # a captured tensor that requires grad
    idle: bool = False  # whether the values depend on no fact and no input: an option makes them constant

    @property
    def fine(self) -> bool:
        return self.path and not self.lost and not self.captured


def leaf(fact: Fact, x: Tensor) -> Tensor:
    """A fact as a function gets it when gradients are needed: a leaf, which shows whether a gradient reaches it."""
    return x.detach().requires_grad_() if fact.name not in CONSTANT or fact.name in LOST else x


def reach_of(value: Tensor, facts: Mapping[Fact, Tensor], inputs: Sequence[Tensor]) -> Reach:
    """Walk from the values back to the leaves."""
    fact_of: dict[int, Fact | None] = {id(x): fact for fact, x in facts.items()}
    fact_of |= {id(x): None for x in inputs}
    path, captured, lost = False, "", []
    for x in _leaves(value):
        if id(x) not in fact_of:
            captured = f"a tensor of shape {tuple(x.shape)}"
            break
        fact = fact_of[id(x)]
        if fact is not None and fact.name in LOST:
            lost.append(fact)
        else:
            path = True
    return Reach(path, tuple(lost), captured)


def _leaves(value: Tensor) -> Any:
    """Each leaf that a gradient of `value` reaches."""
    if value.grad_fn is None:
        if value.requires_grad:
            yield value
        return
    stack, seen = [value.grad_fn], {value.grad_fn}
    while stack:
        node: Any = stack.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                stack.append(other)


def is_idle(values: fx.Node, arguments: Sequence[fx.Node]) -> bool:
    """Whether traced values depend on none of these arguments, except for their sizes."""
    stack, seen = [values], {values}
    while stack:
        node = stack.pop()
        if not creates(node):
            new = [x for x in node.all_input_nodes if x not in seen]
            seen.update(new)
            stack += new
    return seen.isdisjoint(arguments)


def check_gradient(terms: Sequence[Any], grad: bool, untraced: Mapping[str, Reach] | None = None) -> None:
    """Raise or warn if a gradient would be lost silently; `untraced`: what the gradients of untraced terms reached."""
    if all(t.trace.reach is not None and t.trace.reach.fine for t in terms):
        return
    reaches = {t.name: t.trace.reach for t in terms if t.trace.reach is not None} | dict(untraced or {})
    if len(reaches) < len(terms):
        return
    for t in terms:
        _check_captured(_label(t), reaches[t.name], t.trace.reason)
    if grad:
        _check_paths(terms, reaches)


def check_elements(terms: Sequence[Any], device: torch.device) -> None:
    """Raise if a divergence captures a tensor that requires grad: a sweep runs it outside autograd."""
    for t in terms:
        for element in [f.element for f in t.call.facts if f.element is not None]:
            if captured := element.captured(device):
                _check_captured(_label(t), Reach(True, captured=captured), f"the divergence {element}")


def check_constants(names: Iterable[str], calls: Iterable[Any]) -> None:
    """Raise if an input requires grad but a function takes it as a constant; metrics may read it freely."""
    calls = list(calls)
    for name in names:
        takers = [call.signature.name for call in calls if name in call.input_names]
        if takers:
            raise ValueError(
                f"{name}: requires grad, but no gradient flows to it: {' and '.join(dict.fromkeys(takers))} takes it "
                f"as a constant; pass {name}.detach()"
            )


def _check_captured(label: str, reach: Reach, reason: str) -> None:
    if reach.captured:
        raise ValueError(
            f"{label}: {reach.captured} that it captures requires grad ({reason}), but gets no gradient from a call.  "
            f"Make it a parameter of the function and pass it as an input, which does get one; or detach it, if it is "
            f"meant to be constant"
        )


def _check_paths(terms: Sequence[Any], reaches: Mapping[str, Reach]) -> None:
    """Raise for a term that has no gradient, and warn about one that loses part of it.

    A term that an option makes constant is fine as long as another term has a gradient.  An untraced function may be
    constant in one call and not in the next, so we only warn about it.
    """
    some = any(reach.path for reach in reaches.values())
    for t in terms:
        label, fn, reach = _label(t), t.call.fn, reaches[t.name]
        for fact in reach.lost if reach.path else ():
            _warn_once(
                (fn, fact),
                f"{label}: its gradient reaches {fact.name!r}, which has none, and that part is lost.  Write "
                f"{fact.name}.detach() if it is meant to be constant",
            )
        if reach.path or (some and reach.idle):
            continue
        if some and t.trace.reach is None and not reach.lost:
            _warn_once((fn, None), f"{label}: has no gradient in this call; it reads facts detached, or none")
            continue
        what = f"it reaches {reach.lost[0].name!r}, which has none" if reach.lost else "it reaches no fact and no input"
        raise ValueError(
            f"{label}: has no gradient: {what}.  A number to log belongs in metrics=...; weight=0 switches a term off"
        )


def _label(term: Any) -> str:
    return f"term {term.name!r} ({term.call.signature.name})"


def _warn_once(key: tuple[Any, Fact | None], message: str) -> None:
    key = (getattr(key[0], "__code__", None) or type(key[0]), key[1])
    if key not in _WARNED:
        store(_WARNED, key, None, _MOST_WARNED)
        warnings.warn(f"headloss: {message}", stacklevel=2)


_WARNED: dict[Any, None] = {}
_MOST_WARNED = 512
