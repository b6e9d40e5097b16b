"""Whether a tensor was written to since something was made of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def is_uncounted(x: Tensor) -> bool:
    """Whether writes to a tensor go uncounted, as in inference mode."""
    return not torch.compiler.is_compiling() and x.is_inference()  # in this order: a graph cannot evaluate the second


def lasting(x: Tensor) -> Tensor:
    """The tensor itself, or a copy if later writes to it could not be noticed."""
    return x.clone() if is_uncounted(x) else x


class Stamp(NamedTuple):
    """What a tensor was when something was made of it.

    Versions miss `x.data = y` and writes by NumPy or another process: the first moves a tensor, and on the CPU, where
    alone the others happen, a comparison with a copy finds them.
    """

    version: int | None  # None where writes go uncounted
    place: int | None
    copy: Tensor | None


def stamp(x: Tensor, copied: bool = True) -> Stamp:
    """`copied`: False for a large tensor, or one that lives no longer than the call."""
    if torch.compiler.is_compiling():
        return Stamp(0, None, None)
    plain = type(x) in (Tensor, torch.nn.Parameter) and torch._C._functorch.peek_interpreter_stack() is None
    copy = x.detach().clone() if copied and plain and x.is_cpu else None
    return Stamp(None if x.is_inference() else x._version, x.data_ptr() if plain else None, copy)


def holds(was: Stamp, x: Tensor) -> bool:
    """Whether a tensor still is what it was."""
    written, place, copy = was
    if torch.compiler.is_compiling():  # a graph knows nothing of these
        return not written
    if (written is not None and written != x._version) or (place is not None and place != x.data_ptr()):
        return False
    return copy is None or torch.equal(copy, x)
