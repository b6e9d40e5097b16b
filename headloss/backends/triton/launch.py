"""`Launch`: a kernel with its constants, which can be launched again at little cost to the host.

At every launch Triton inspects every argument to find the kernel that was compiled for such arguments: 40 us for the 57
of a visit.  It inspects little of each, so a later launch with arguments of the same kinds uses the compiled kernel at
once: 10 us, and less if nobody has asked Triton to report launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from triton import knobs  # type: ignore
from triton.compiler import CompiledKernel  # type: ignore
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore

from headloss.bounded_cache import store

MOST_KNOWN = 64
OPTIONS = {"enable_fp_fusion": True}  # the default differs between versions of triton, and with it the last bits
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)  # as Triton's


def by_identity(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache a function of one immutable argument: looked up by identity first, then by value.

    A program is a record of many strings and flags, and hashing it costs as much as half a launch.
    """
    by_value = functools.lru_cache(256)(fn)
    cache: dict[int, tuple[Any, Any]] = {}  # keeps the argument alive, so that no other object gets its id

    @functools.wraps(fn)
    def call(x: Any) -> Any:
        found = cache.get(id(x)) or store(cache, id(x), (x, by_value(x)), 256)
        return found[1]

    return call


class Launch:
    """`launch(programs, *arguments)`; the arguments come first in the kernel's signature, the constants after them."""

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        self.kernel, self.constants = kernel, {**OPTIONS, **constants}
        self.compiled: dict[Any, Any] = {}
        self.rest: tuple[Any, ...] = ()

    def __call__(self, programs: int, *arguments: Any) -> None:
        key: list[Any] = []
        append_kinds(arguments, key)
        self.run(tuple(key), place(arguments[0]), programs, arguments)

    def run(self, key: Any, where: int, programs: int, arguments: tuple[Any, ...]) -> None:
        """For a caller that has a key: equal keys must mean equal keys of `append_kinds`.  `where`: see `place`."""
        if where >= 0 and where != torch._C._cuda_getDevice():  # Triton launches on the current device
            with torch.cuda.device(where):
                return self.run(key, where, programs, arguments)
        compiled = self.compiled.get((key, where))
        if compiled is None:
            self.rest = tuple([self.constants[name] for name in self.kernel.arg_names[len(arguments) :]])
            compiled = self.kernel[(programs,)](*arguments, **self.constants)
            if isinstance(compiled, CompiledKernel) and torch.version.hip is None:  # the interpreter compiles nothing
                made = compiled, compiled.run, compiled.function, compiled.packed_metadata
                store(self.compiled, (key, where), made, MOST_KNOWN)
        elif where < 0 or _watched():
            compiled[0][programs, 1, 1](*arguments, *self.rest)
        else:  # the same without the hooks
            _, run, function, metadata = compiled
            run(programs, 1, 1, current_stream(where), function, metadata, None, None, None, *arguments, *self.rest)
        return None


def launch_kernel(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """`kernel[(programs,)](*arguments, **constants)`; from the second time on without Triton's search for it."""
    launch_of(kernel, **constants)(programs, *arguments)


def launch_of(kernel: Any, **constants: Any) -> Launch:
    """The `Launch` of a kernel with these constants, made once."""
    key = (id(kernel), *constants, *constants.values())  # `_STARTED` keeps it alive; its own hash is slow
    return _STARTED.get(key) or store(_STARTED, key, Launch(kernel, constants), 1024)


_STARTED: dict[Any, Launch] = {}


def _watched() -> bool:
    """Whether something, such as a profiler, wants a report of every launch."""
    before, after = (
        knobs.runtime.launch_enter_hook,
        knobs.runtime.launch_exit_hook,
    )  # chains, or functions
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def place(x: Any) -> int:
    """The index of the device that a kernel over `x` must run on; -1: the host."""
    while not isinstance(x, Tensor):  # the first of a record, or a descriptor's
        x = x[0] if isinstance(x, tuple) else x.base
    return x.get_device()


def append_kinds(arguments: tuple[Any, ...], key: list[Any]) -> None:
    """Append to `key` all that Triton's choice of a compiled kernel depends on: equal keys mean the same kernel (on
    CUDA).

    One loop and no function call per argument, because it runs at every launch.
    """
    for x in arguments:
        of = type(x)
        if of is Tensor:
            key.append(x.dtype)
            key.append(x.data_ptr() & 15 == 0)
        elif of is float:
            key.append("f")
        elif of is int:
            key.append((x == 1) + 2 * (x & 15 == 0) + 4 * (x.bit_length() > 31))
        elif isinstance(x, tuple):
            key.append(-1 - len(x))  # no number adds that to a key
            append_kinds(x, key)
        elif x is None:
            key.append(None)
        elif of is TensorDescriptor:
            key.append((x.base.dtype, *x.block_shape))
        else:
            assert isinstance(x, Tensor), f"no kernel takes {of.__name__}"
            key += (x.dtype, x.data_ptr() & 15 == 0)  # such as a Parameter
