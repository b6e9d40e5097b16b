# mypy: ignore-errors
"""Long rows that several programs share: each sweeps a part, and waits for the numbers that the others found.

Dimension key:  P parts of a row, a program each

A program writes its numbers to the row's `board`, where all are missing at first, and reads those of all P until none
is missing; it merges them in the order of the columns, so the result does not depend on which came first.  A number is
written and read atomically, and programs read nothing else that others write, so no memory barrier is needed, which
would empty the caches.  No program waits forever: programs start in the order of their numbers, those of a row are
consecutive, and the device runs at least P at once.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.row_loops import LOWEST

# The interpreter runs one program after another.  Instead of waiting, all are launched again: see `launch_visit`.
IN_TURN = tl.constexpr(bool(triton.knobs.runtime.interpret))
MISSING = tl.constexpr(-1)  # a number that is not there yet: the bits of one of many NaNs
NAN = tl.constexpr(2147483647)  # another NaN, written where a number has the bits of MISSING


@triton.jit
def read_words(board, n, COUNT: tl.constexpr, F: tl.constexpr):
    """The numbers of every part as words, COUNT x (P,), and how many of them are missing so far."""
    PARTS: tl.constexpr = F.PARTS
    PADDED: tl.constexpr = F.PADDED
    found = ()
    missing = tl.zeros([PADDED], tl.int32)
    for i in tl.static_range(COUNT):
        word = tl.load(board + (i * PARTS + n), mask=n < PARTS, other=0, volatile=True)
        missing += (word == MISSING).to(tl.int32)
        found = found + (word,)
    return found, tl.sum(missing, axis=0)


@triton.jit
def exchange(board, part, numbers, F: tl.constexpr):
    """The numbers of every part of a row, (P,) each, from those of this part; 0 beyond the last part."""
    COUNT: tl.constexpr = len(numbers)
    PADDED: tl.constexpr = F.PADDED
    for i in tl.static_range(COUNT):
        word = (numbers[i] + 0.0).to(tl.float32).to(tl.int32, bitcast=True)
        tl.atomic_xchg(board + (i * F.PARTS + part), tl.where(word == MISSING, NAN, word), sem="relaxed")
    n = tl.arange(0, PADDED)
    words, missing = read_words(board, n, COUNT, F)
    if not IN_TURN:
        while missing > 0:
            words, missing = read_words(board, n, COUNT, F)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (words[i].to(tl.float32, bitcast=True),)
    return found


@triton.jit
def highest_of(tops, F: tl.constexpr):
    """The parts' maxima, LOWEST beyond the last part, and the highest."""
    PADDED: tl.constexpr = F.PADDED
    tops = tl.where(tl.arange(0, PADDED) < F.PARTS, tops, LOWEST)
    return tops, tl.max(tops, axis=0)


@triton.jit
def sum_of_parts(found):
    """The sums of all parts."""
    whole = ()
    for i in tl.static_range(len(found)):
        whole = whole + (tl.sum(found[i], axis=0),)
    return whole
