"""A teacher on a whole vocabulary, for a student that has some tokens of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Draft(NamedTuple):
    """A dense teacher, read at `ids`.  Its softmax is over those alone or, `whole`, over all of its vocabulary."""

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
    """The name of such a teacher with a softmax over all of its vocabulary."""
    return f"whole={name}"


def is_whole(name: str) -> bool:
    return name.startswith("whole=")
