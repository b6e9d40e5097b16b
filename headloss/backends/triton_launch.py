"""A kernel with its constants, launched again and again.

Triton looks at every argument of every launch to find the kernel that was compiled for such arguments: 40 us for the
57 of a visit.  What it looks at is little, so a later launch with arguments of the same kinds takes the compiled kernel
straight away: 10 us.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel  # type: ignore

MOST_KNOWN = 64


class Launch:
    """`launch(programs, *arguments)`; the arguments come first in the kernel's signature, the constants after them."""

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        self.kernel, self.constants = kernel, dict(constants)
        self.known: dict[Any, Any] = {}
        self.rest: tuple[Any, ...] = ()

    def __call__(self, programs: int, *arguments: Any) -> None:
        key = [kind(x) for x in arguments]
        if arguments[0].is_cuda:
            key.append(torch.cuda.current_device())
        place = tuple(key)
        compiled = self.known.get(place)
        if compiled is not None:
            compiled[programs, 1, 1](*arguments, *self.rest)
            return
        compiled = self.kernel[(programs,)](*arguments, **self.constants)
        if isinstance(compiled, CompiledKernel) and torch.version.hip is None:  # the interpreter compiles nothing
            self.rest = tuple(self.constants[name] for name in self.kernel.arg_names[len(arguments) :])
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            self.known[place] = compiled


def kind(x: Any) -> Any:
    """All that Triton's choice of a compiled kernel depends on, and more: equal kinds, same kernel (on CUDA)."""
    of = type(x)
    if of is float:
        return "f"
    if of is int:
        return (x == 1) + 2 * (x % 16 == 0) + 4 * (x.bit_length() > 31)
    if of is tuple:
        return tuple([kind(y) for y in x])
    if x is None:
        return None
    assert isinstance(x, Tensor), f"no kernel takes {of.__name__}"
    return x.dtype, x.data_ptr() % 16 == 0
