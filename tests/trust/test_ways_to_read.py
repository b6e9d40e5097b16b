"""Ways to read that no name in a function's code shows: operators, types of modules, states of partials, aliases."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import headloss as hl
from headloss.trace.cache_keys import key_of, plain_key
from headloss.trace.function_reads import reads_of

STATE = {"x": 1.0}
D = torch.float64


class WithProperty(types.ModuleType):
    @property
    def beta(self) -> float:
        return STATE["x"]


class WithGetattribute(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        return STATE["x"] if name == "beta" else super().__getattribute__(name)


by_property, by_getattribute, plain = WithProperty("a"), WithGetattribute("b"), types.ModuleType("c")
for module in (by_property, by_getattribute, plain):
    vars(module)["beta"] = 1.0


def of_state(x: float) -> None:
    STATE["x"] = x


def scaled(x: Any, y: Any) -> Any:
    return -x * y


held = functools.partial(scaled, 1.0)
Pair = collections.namedtuple("Pair", "x")
Pair.x = property(lambda self: 1.0)  # type: ignore[assignment, misc]
PAIR = Pair(1.0)


def of_pair(x: float) -> None:
    global PAIR  # noqa: PLW0603
    PAIR = Pair(x)


def by_function(logprob):
    other = F.softmax
    return -other.eps * logprob


def by_guard(logprob):
    other = torch.no_grad
    return -other.max * logprob


def becomes_property(x: float) -> None:
    of_state(x)
    plain.__class__ = WithProperty if x != 1.0 else types.ModuleType


OTHERS: dict[str, tuple[Any, Any]] = {
    "a property of a module": (lambda logprob: -by_property.beta * logprob, of_state),
    "a module's getattribute": (lambda logprob: -by_getattribute.beta * logprob, of_state),
    "a module that changes its class": (lambda logprob: -plain.beta * logprob, becomes_property),
    "the state of a partial": (lambda logprob: held(logprob), lambda x: held.__setstate__((scaled, (x,), {}, None))),
    "an item of a named tuple": (lambda logprob: -PAIR[0] * logprob, of_pair),
    "an attribute of a function of torch": (by_function, lambda x: setattr(F.softmax, "eps", x)),
    "an attribute of a type of torch": (by_guard, lambda x: setattr(torch.no_grad, "max", x)),
}


@pytest.fixture(autouse=True)
def torch_as_it_was():
    yield
    for owner, name in ((F.softmax, "eps"), (torch.no_grad, "max")):
        if name in vars(owner):
            delattr(owner, name)


def same(objective: hl.Objective, kind: str, want: Any) -> None:
    """Value and gradient, as dense logits give them."""
    hidden, weight, targets = torch.randn(6, 4, dtype=D), torch.randn(9, 4, dtype=D), torch.randint(9, (6,))
    x, y = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    source = hl.Linear(x, weight, memory=9 * 2 * 8) if kind == "Linear" else hl.Logits(x @ weight.T)
    got = objective(source, targets).loss
    right = want((y @ weight.T).log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)).mean()
    torch.testing.assert_close(got, right)
    torch.testing.assert_close(torch.autograd.grad(got, x)[0], torch.autograd.grad(right, y)[0])


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("name", OTHERS)
def test_read_in_every_call(name: str, kind: str) -> None:
    fn, turn = OTHERS[name]
    objective = hl.Objective(it=fn)
    for x in (1.0, 3.0, 0.5, 1.0, 3.0):
        turn(x)
        same(objective, kind, lambda logprob, x=x: -x * logprob)
    turn(1.0)


OPERATORS = {
    "__mul__": lambda logprob: -(logprob * 2.0),
    "__rmul__": lambda logprob: -(2.0 * logprob),
    "__neg__": lambda logprob: -logprob,
    "__truediv__": lambda logprob: -(logprob / 2.0),
    "__iadd__": lambda logprob: _added(logprob),
    "__abs__": lambda logprob: abs(logprob),
    "__gt__": lambda logprob: torch.where(logprob.detach() > -1.5, -logprob, -2 * logprob),
    "__lt__": lambda logprob: torch.where(-1.5 > logprob.detach(), -logprob, -2 * logprob),  # noqa: SIM300
    "__getitem__": lambda logprob: -logprob[:],
    "__pow__": lambda logprob: logprob**2,
    "__invert__": lambda logprob: torch.where(~(logprob.detach().exp().bool()), -logprob, -2 * logprob),
}


OURS = str(Path(hl.__file__).parent)


def callers() -> str:
    """The file that asks for the operator."""
    return sys._getframe(2).f_code.co_filename


def _added(logprob):
    logprob = logprob * -1.0
    logprob += 1.0
    return logprob


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_that_somebody_replaces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch.Tensor, between calls: the function as written gives another result, and so does the call."""
    fn, was = OPERATORS[name], getattr(torch.Tensor, name)
    objective = hl.Objective(it=fn)
    assert reads_of(fn).unknown == ()
    same(objective, "Linear", fn)
    with monkeypatch.context() as patch:
        turned = torch.logical_not if name in ("__gt__", "__lt__", "__invert__") else lambda x: torch.mul(x, 3.0)
        patch.setattr(torch.Tensor, name, lambda *args: turned(was(*args)) if OURS not in callers() else was(*args))
        same(objective, "Linear", fn)
        assert f"torch.Tensor.{name} (not torch's own)" in reads_of(fn).unknown
    same(objective, "Linear", fn)


def test_what_is_called_at_once_stays_traced() -> None:
    """`torch.no_grad` has a `clone` of its own, as tensors have."""

    def loss(logprob):
        with torch.no_grad():
            weight = logprob.clone().exp()
        act = F.softplus
        return -weight * act(logprob).clone()

    assert reads_of(loss).unknown == ()


@dataclasses.dataclass(frozen=True)
class Record:
    x: float = 1.0


def test_keys_of_signs_and_of_replaced_fields() -> None:
    nan = math.copysign(float("nan"), 1.0), math.copysign(float("nan"), -1.0)
    assert key_of(nan[0]) != key_of(nan[1]) and key_of(nan[0]) == key_of(float("nan"))
    assert key_of(complex(0.0, nan[0])) != key_of(complex(0.0, nan[1])) and key_of(0j) != key_of(complex(0.0, -0.0))
    assert plain_key(PAIR) is None and plain_key(Record()) is not None
    Record.x = property(lambda self: STATE["x"])  # type: ignore[assignment, misc]
    assert plain_key(Record.__new__(Record)) is None
