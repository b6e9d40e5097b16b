# mypy: ignore-errors
"""Long rows that several programs share: each has one block, and keeps it until all know the row's maximum and sum.

Dimension key:  P parts of a row, a block and a program each

A program writes what it found to `held` (1 + 2 P), counts itself in the first of those, waits until all P are counted,
and merges them in the order of the columns, so the result does not depend on which came first.  It cannot wait in vain:
programs start in the order of their numbers, those of a row follow each other, and the device runs at least P at once.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.row_loops import LOWEST

# The interpreter runs one program after another.  Instead of waiting, all are launched twice: see `visit.fire`.
IN_TURN = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def meet(held, part, top, S, c, F: tl.constexpr):
    """The maximum and the sum of e^z of a row, from those of this part, whose sum is relative to its maximum `top`."""
    PARTS: tl.constexpr = F.PARTS
    PADDED: tl.constexpr = F.PADDED
    tl.store(held + 1 + 2 * part, top)
    tl.store(held + 2 + 2 * part, S)
    tl.debug_barrier()  # this program has read all that another may overwrite
    tl.atomic_add(held, 1.0, sem="release")
    if not IN_TURN:
        counted = tl.atomic_add(held, 0.0, sem="acquire")
        while counted < PARTS:
            counted = tl.atomic_add(held, 0.0, sem="acquire")
    n = tl.arange(0, PADDED)
    tops = tl.load(held + 1 + 2 * n, mask=n < PARTS, other=LOWEST, cache_modifier=".cg")
    sums = tl.load(held + 2 + 2 * n, mask=n < PARTS, other=0.0, cache_modifier=".cg")
    highest = tl.max(tops, axis=0)
    return highest, tl.sum(sums * tl.exp2((tops - highest) * c), axis=0)
