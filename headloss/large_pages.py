"""Memory in pages of 2 MiB: on a CPU, page faults of 4 KiB each take more time than filling a gradient with numbers."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

LARGE = 4 << 20  # bytes; NumPy, too, asks for large pages from this size on


def in_large_pages(x: Tensor) -> Tensor:
    """x itself, in large pages if the system has some; nothing may have been written to x before."""
    if x.device.type == "cpu" and type(x) is Tensor and x.numel() * x.itemsize >= LARGE:
        first = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        _advise()(first, x.data_ptr() + x.numel() * x.itemsize - first, _HUGE)
    return x


_HUGE: int = getattr(mmap, "MADV_HUGEPAGE", 0)


@functools.cache
def _advise() -> Callable[[int, int, int], object]:
    """The C library's `madvise`.  It is advice: what it returns does not matter."""
    if not _HUGE:
        return lambda *advice: None
    found = ctypes.CDLL(None).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
