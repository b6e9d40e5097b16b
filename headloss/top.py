"""A row's own likeliest columns, as a teacher that nobody has to pass; the sweep finds them."""

from __future__ import annotations

from typing import NamedTuple

from headloss.options import shown


class Top(NamedTuple):
    """The k likeliest columns of each row and, if there is one, the dense teacher that is read there too."""

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
