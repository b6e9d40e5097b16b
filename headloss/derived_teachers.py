"""Teachers that a call derives: a dense one read at the student's tokens only, and a row's own likeliest columns."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from headloss.options import shown


class AtIds(NamedTuple):
    """A dense teacher, read only at `ids`.  Its softmax is over those or, with `whole`, over its whole vocabulary."""

    teacher: Any
    ids: Tensor
    whole: bool = False

    @property
    def vocab(self) -> int:
        return len(self.ids)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.teacher.tensors


def whole_of(name: str) -> str:
    """The name of an `AtIds` whose softmax is over its whole vocabulary."""
    return f"whole={name}"


def is_whole(name: str) -> bool:
    return name.startswith("whole=")


class Top(NamedTuple):
    """The k likeliest columns of each row, which the sweep finds; a dense teacher, if named, is read at them too."""

    k: int
    of: str | None = None

    @classmethod
    def named(cls, name: str) -> Top:
        """From a name that `trace.signature.top_of` made."""
        k, _, of = name.removeprefix("top=").partition(" of ")
        return cls(int(k), of or None)


def check_top(k: object, name: str = "top") -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"{name}: wanted a number of columns, at least 1, got {shown(k)}")
