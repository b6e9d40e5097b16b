"""Snapshots that tell whether a tensor was written to after something was made from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def is_untracked(x: Tensor) -> bool:
    """Whether nothing counts the writes to a tensor, as in inference mode."""
    return not torch.compiler.is_compiling() and x.is_inference()  # in this order: a graph cannot evaluate the second


def tracked(x: Tensor) -> Tensor:
    """The tensor itself, or a copy if nothing would notice later writes to it."""
    return x.clone() if is_untracked(x) else x


class Snapshot(NamedTuple):
    """A tensor's version, address and, on the CPU, a copy of its values.

    The version misses `x.data = y`, which changes the address, and writes by NumPy or another process, which only
    happen on the CPU, where a comparison with the copy finds them.
    """

    version: int | None  # None where writes are not counted
    address: int | None
    copy: Tensor | None


def snapshot(x: Tensor, copied: bool = True) -> Snapshot:
    """`copied`: False for a large tensor, or for one that lives no longer than the call."""
    if torch.compiler.is_compiling():
        return Snapshot(0, None, None)
    plain = type(x) in (Tensor, torch.nn.Parameter) and torch._C._functorch.peek_interpreter_stack() is None
    copy = x.detach().clone() if copied and plain and x.is_cpu else None
    return Snapshot(None if x.is_inference() else x._version, x.data_ptr() if plain else None, copy)


def unchanged(before: Snapshot, x: Tensor) -> bool:
    """Whether a tensor is as it was when the snapshot was taken."""
    version, address, copy = before
    if torch.compiler.is_compiling():  # a graph has neither
        return not version
    if (version is not None and version != x._version) or (address is not None and address != x.data_ptr()):
        return False
    return copy is None or torch.equal(copy, x)
