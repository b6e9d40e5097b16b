"""A function is walked over again as soon as anything that it reads is something else."""

import builtins
import enum
import functools
import math
import types

import pytest
import torch

from headloss.trace.call import CachedReads, Call
from headloss.trace.signature import read_signature

HOME = types.ModuleType("home")
FACTOR = 2.0


def made():
    """A function that reads in every way, and its parts."""
    beta = 0.5

    def turn(x):
        nonlocal beta
        beta = x

    inner = lambda x: x * FACTOR + math.pi

    def loss(logprob, scale=1.5, *, power=2.0):
        return -(inner(logprob).exp() * beta * scale**power * HOME.number).abs() * abs(-1) * max(1.0, 0.5)

    loss.note = 1.0
    return loss, turn, inner


def test_a_change_anywhere_is_seen(monkeypatch):
    loss, turn, inner = made()
    monkeypatch.setattr(HOME, "number", 1.0, raising=False)
    watched, seen = CachedReads(Call(loss, read_signature(loss), {})), []

    def same():
        found = watched.reads()
        assert found == watched.call.reads()
        seen.append(found.key)

    changes = {
        "a cell": lambda: turn(0.25),
        "its type": lambda: turn(1),
        "a global of an inner function": lambda: monkeypatch.setitem(inner.__globals__, "FACTOR", 3.0),
        "a module's attribute": lambda: monkeypatch.setattr(HOME, "number", 2.0),
        "a default": lambda: monkeypatch.setattr(loss, "__defaults__", (2.5,)),
        "a keyword's default": lambda: loss.__kwdefaults__.update(power=3.0),
        "the code": lambda: monkeypatch.setattr(inner, "__code__", (lambda x: x + 1.0).__code__),
        "an attribute of its own": lambda: setattr(loss, "note", 2.0),
        "one more": lambda: setattr(loss, "other", 2.0),
        "a global in place of a built-in": lambda: monkeypatch.setitem(loss.__globals__, "max", min),
        "the other back": lambda: monkeypatch.delitem(loss.__globals__, "max"),
    }
    same()
    for change in changes.values():
        same()
        change()
        same()
    assert len(set(seen)) == len(changes)  # the last is as it was before


def test_a_method_of_tensors_and_a_built_in_that_are_replaced_are_seen(monkeypatch):
    fn = lambda logprob: -logprob.sigmoid() * abs(-2.0)
    watched = CachedReads(Call(fn, read_signature(fn), {}))
    assert not watched.reads().unknown
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "sigmoid", lambda x: x, raising=False)
        assert watched.reads() == watched.call.reads() and watched.reads().unknown
    assert not watched.reads().unknown
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "abs", lambda x: x)
        assert watched.reads() == watched.call.reads()
    assert not watched.reads().unknown


def test_what_did_not_change_is_not_walked_over(monkeypatch):
    loss, _, _ = (lambda b: (lambda logprob: -logprob * b, None, None))(0.5)
    watched, walks = CachedReads(Call(loss, read_signature(loss), {})), []
    monkeypatch.setattr(Call, "reads", lambda self, plain=Call.reads: walks.append(1) or plain(self))
    for _ in range(3):
        watched.reads()
    assert walks == [1]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        watched.reads()
    finally:
        torch.set_default_dtype(before)
    assert walks == [1, 1]


def test_a_member_of_an_enum_that_is_written_to_is_seen():
    class Kind(enum.Enum):
        A = 1.0

    fn = lambda logprob: -logprob * Kind.A.value
    watched = CachedReads(Call(fn, read_signature(fn), {}))
    first = watched.reads()
    Kind.A._value_ = 2.0
    assert watched.reads() == watched.call.reads() != first


@pytest.mark.parametrize("part", ["keywords", "options", "record"])
def test_things_that_hold_values(part):
    class Record:
        beta = 1.0

    frozen, options = Record(), {"power": 2.0}
    fn = functools.partial(lambda logprob, by, *, power=1.0: -logprob * by**power, by=1.0)
    if part == "record":
        fn = lambda logprob: -logprob * frozen.beta
        options = {}
    call = Call(fn, read_signature(lambda logprob, *, power=1.0: logprob), options)
    watched = CachedReads(call)
    first = watched.reads()
    if part == "keywords":
        fn.keywords["by"] = 2.0
    elif part == "options":
        options["power"] = 3.0
    else:
        frozen.beta = 2.0
    assert watched.reads() == call.reads()
    assert (watched.reads() == first) == (part == "record")  # which is unknown in any case
