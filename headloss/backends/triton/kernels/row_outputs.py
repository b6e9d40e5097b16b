# mypy: ignore-errors
"""Stores the results of a visit for one row; see visit.py.

Dimension key:  F numbers per row   N rows
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.sums import put

# the kinds of facts: a column of the student's, of the teacher's, or a value per id; 0: one value
COLUMN = tl.constexpr(1)
TEACHER_COLUMN = tl.constexpr(2)
AT_IDS = tl.constexpr(3)


@triton.jit
def store_row(at, row, step, numbers, facts, rest, count, k, F: tl.constexpr):
    """Store `numbers` of the row's softmax, its facts, and `rest`, of which cotangents may have a value per id."""
    IDS: tl.constexpr = F.IDS
    found = at.found + row
    wide = at.wide + row * count + k
    for i in tl.static_range(len(numbers)):
        found = put(numbers[i], found, step, True)
    for i in tl.static_range(len(F.KINDS)):
        if F.KINDS[i] == COLUMN:
            tl.store(at.best + row, facts[i])
        elif F.KINDS[i] == TEACHER_COLUMN:
            tl.store(at.teacher_best + row, facts[i])
        elif F.KINDS[i] == AT_IDS:
            wide = put(facts[i], wide, step * count, True, k < count)
        else:
            found = put(facts[i], found, step, True)
    for i in tl.static_range(len(rest)):
        if F.WIDE_REST[i]:
            wide = put(rest[i] + tl.zeros([IDS], tl.float32), wide, step * count, True, k < count)
        else:
            found = put(rest[i], found, step, True)


@triton.jit
def skip_row(at, row, step, count, k, F: tl.constexpr):
    SLOTS: tl.constexpr = F.SLOTS
    WIDE_SLOTS: tl.constexpr = F.WIDE_SLOTS
    IDS: tl.constexpr = F.IDS
    for i in tl.static_range(SLOTS):
        tl.store(at.found + row + i * step, 0.0)
    for i in tl.static_range(WIDE_SLOTS):
        tl.store(at.wide + row * count + k + i * (step * count), tl.zeros([IDS], tl.float32), mask=k < count)
    if F.BEST:
        tl.store(at.best + row, tl.zeros([], tl.int64))
    if F.TEACHER_BEST:
        tl.store(at.teacher_best + row, tl.zeros([], tl.int64))
