# mypy: ignore-errors
"""Multiplies in place by a number on the device; if that is 1, as in most backward passes, no data is read."""

import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, scale_ptr, N, BLOCK: tl.constexpr):
    scale = tl.load(scale_ptr).to(tl.float32)
    if scale != 1.0:
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, N, tl.num_programs(0) * BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + i, i < N)
            tl.store(x_ptr + i, x.to(tl.float32) * scale, i < N)
