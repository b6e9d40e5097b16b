"""How kernels divide a matrix of logits into parts, blocks and vectors: what every launch of this backend shares.

Dimension key:  C rows passed in   V columns passed in   K ids per row

If the row stride is not a multiple of 16 bytes, rows start at different offsets in a vector, and equal rows may differ
in the last bit; a padded stride (`Linear` has one) or `PEEL = False`, which is slow, avoids that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

PEEL = True
CHAINS = "_semantic" in inspect.signature(tl.extra.cuda.gdc_wait).parameters  # triton 3.4 cannot compile it


class Shape(NamedTuple):
    """How a sweep divides a row: a part has at most `width` columns, a block has `loads` 16-byte vectors per lane."""

    width: int
    lanes: int
    loads: int
    stages: int  # blocks in flight at once, in the pull
    warps: int

    def block(self, x: Tensor) -> int:
        return self.block_of(x.element_size())

    def block_of(self, size: int) -> int:
        """Columns of a block, for elements of this many bytes."""
        block = self.lanes * self.loads * (16 // size)
        assert self.width % block == 0 and block * size >= 128, "whole blocks, none below a line"
        return block


def row_shape(table: Sequence[tuple[int, Shape]], V: int) -> Shape:
    return next(shape for most, shape in table if most >= V)


READS = (torch.bfloat16, torch.float16, torch.float32)


def check_dtype(raw_CV: Tensor) -> None:
    if raw_CV.dtype not in READS:
        raise TypeError(
            f'backend="triton" reads bfloat16, float16 and float32, got {raw_CV.dtype}; use backend="torch"'
        )


@functools.cache
def chains(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it still runs (dependent launch): Hopper and later."""
    able = CHAINS and device.type == "cuda" and torch.version.hip is None
    return able and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


class Rows(NamedTuple):
    """A matrix as the kernels see it: it starts on a boundary, and its first element is `lead` elements further."""

    x_CV: Tensor
    lead: int
    line: int  # elements from one boundary to the next
    vector: int  # elements of a 16-byte vector; 1 if rows may start anywhere

    @property
    def skew(self) -> int:
        """How far from a boundary a row can start."""
        return self.line - 1 if self.lead or self.x_CV.stride(0) % self.line else 0


def _from_its_storage(x: Tensor) -> int:
    return int(x.storage_offset()) * x.element_size()


# Where a row starts in a line of 128 bytes decides how it is divided, and so its last bits.  CUDA's allocator starts
# every tensor on a line, a CPU's at any multiple of 64 bytes: the interpreter takes a storage's start for a line's.
address = _from_its_storage if triton.knobs.runtime.interpret else Tensor.data_ptr


def rows_of(x_CV: Tensor) -> Rows:
    stride, across = x_CV.stride()
    if across != 1 and x_CV.shape[-1] > 1:
        x_CV = x_CV.contiguous()  # strided columns cannot be read 16 bytes at a time; only inputs come here
        stride, _ = x_CV.stride()
    size, first = x_CV.element_size(), address(x_CV)
    vector = 16 // size
    if not (first | stride * size) & 15:
        return Rows(x_CV, 0, vector, vector)
    lead = first % 128 // size
    if not PEEL or lead > x_CV.storage_offset():  # the second: memory from outside torch may start off a boundary
        return Rows(x_CV, 0, 1, 1)
    if lead:
        x_CV = x_CV.as_strided(x_CV.shape, x_CV.stride(), x_CV.storage_offset() - lead)
    return Rows(x_CV, lead, 128 // size, vector)


def plain_temperature(T: float | Tensor) -> float | Tensor:
    return T.contiguous() if isinstance(T, Tensor) else float(T)


def per_row(given: Sequence[Any]) -> tuple[bool, ...]:
    return tuple([isinstance(T, Tensor) for T in given])


class Transform(NamedTuple):
    scale: float
    softcap: float | None

    @property
    def numbers(self) -> tuple[float, float]:
        return float(self.scale), self.softcap or 1.0

    def flags(self, prefix: str = "") -> dict[str, bool]:
        return {f"{prefix}SCALED": self.scale != 1.0, f"{prefix}CAPPED": self.softcap is not None}

    def __call__(self, raw: Tensor) -> Tensor:
        z = raw.float() * self.scale
        return z if self.softcap is None else (z / self.softcap).tanh() * self.softcap

    def slope(self, z: Tensor) -> Tensor | float:
        return self.scale if self.softcap is None else self.scale * (1 - (z / self.softcap) ** 2)


def vector_along(rows: Any, other: Any) -> int:
    """Elements per vector of `other`, if it can be read in whole vectors alongside `rows`; else 1."""
    apart = (other.x_CV.stride(0), other.lead)
    if rows.skew:
        apart = (apart[0] - rows.x_CV.stride(0), apart[1] - rows.lead)
    return 1 if any(x % other.vector for x in apart) else other.vector


def readable(x_CV: Tensor) -> Tensor:
    return x_CV if x_CV.dtype in READS else x_CV.float()


def is_as_given(rows: Rows, x: Tensor) -> bool:
    """Whether kernels get the tensor itself, not a copy or the boundary before it."""
    return rows.x_CV.data_ptr() == x.data_ptr()
