"""Keys: two values share one only if no function could tell them apart."""

import collections
import dataclasses
import enum
import itertools
import typing

import numpy as np
import pytest
import torch

from headloss.trace.cache_keys import is_plain, key_of, plain_key

Pair = collections.namedtuple("Pair", "a b")
Other = collections.namedtuple("Other", "a b")


class Typed(typing.NamedTuple):
    a: int = 1
    b: int = 2


class WithMethod(typing.NamedTuple):
    a: int = 1

    def scale(self):
        return 2.0


@dataclasses.dataclass(frozen=True)
class Record:
    a: int = 1


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Slotted:
    a: int = 1


@dataclasses.dataclass(frozen=True)
class WithProperty:
    a: int = 1

    @property
    def b(self):
        return 2.0


@dataclasses.dataclass(frozen=True)
class WithRepr:
    a: int = 1

    def __repr__(self):
        return "one"


@dataclasses.dataclass
class Mutable:
    a: int = 1


class Mode(enum.Enum):
    ONE = 1
    LIST = [1]  # noqa: RUF012


class IntMode(enum.IntEnum):
    ONE = 1


class Number(float):
    pass


DIFFERENT = [
    1, True, 1.0, 0.0, -0.0, float("nan"), float("inf"), 1j, -1j, "1", b"1", None, (1,), (1.0,), (True,), (1, 2),
    Pair(1, 2), Other(1, 2), Typed(), Record(), Record(2), Record(1.0), Slotted(), Mode.ONE, IntMode.ONE,
    np.float64(1), np.float32(1), np.int64(1), torch.float32, torch.float64, torch.device("cpu"), torch.device("meta"),
    torch.Size([1, 2]), range(2), range(0, 3, 2), range(0, 4, 2), ..., torch.contiguous_format, ((1, 2), 3),
    (1, (2, 3)),
]  # fmt: skip


def test_what_differs_has_different_keys():
    for x, y in itertools.combinations(DIFFERENT, 2):
        assert key_of(x) != key_of(y), (x, y)


@pytest.mark.parametrize("x", DIFFERENT, ids=repr)
def test_what_is_equal_has_one_key(x):
    import copy

    assert is_plain(x)
    assert key_of(x) == key_of(copy.deepcopy(x))
    assert hash(key_of(x)) == hash(key_of(copy.deepcopy(x)))


@pytest.mark.parametrize(
    "x",
    [
        [1], {1: 2}, {1}, torch.zeros(()), np.zeros(()), len, int, Record, lambda: 0, Mutable(), WithMethod(),
        WithProperty(), WithRepr(), Mode.LIST, Number(1.0), (1, [2]), Record([1]), Pair(1, {}), torch, object(),
    ],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_what_may_change_is_itself_alone(x):
    assert plain_key(x) is None
    assert key_of(x) == key_of(x)
    assert key_of(x) != key_of([1])
