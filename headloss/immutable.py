"""`Immutable`: a record whose attributes are set once, when it is made."""

from __future__ import annotations

from typing import Any


class Immutable:
    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; make a new one to change {name!r}")

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)
