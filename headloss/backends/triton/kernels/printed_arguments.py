# mypy: ignore-errors
"""Loads the arguments of printed functions: the inputs, weights and numbers of a row."""

import triton
import triton.language as tl


@triton.jit
def number(given, row, POINTER: tl.constexpr, PER_ROW: tl.constexpr):
    """A number for a row, from a plain number, from one on the device, or from one per row."""
    if PER_ROW:
        return tl.load(given + row)
    elif POINTER:
        return tl.load(given)
    else:
        return given + tl.zeros([], tl.float32)


@triton.jit
def as_argument(x):
    """Convert to what a printed function takes: float32, float64, int64 or bool."""
    if x.dtype.is_fp64():
        return x
    elif x.dtype.is_floating():
        return x.to(tl.float32)
    elif x.dtype.is_bool():
        return x
    else:
        return x.to(tl.int64)


@triton.jit
def argument(given, row, count, k, ROWS: tl.constexpr):
    """An input of the printed function: a number, one on the device, one per row, or (ROWS = 2) one per id."""
    if ROWS == 2:
        return as_argument(tl.load(given + row * count + k, mask=k < count, other=0))
    else:
        return as_argument(number(given, row, ROWS >= 0, ROWS == 1))


@triton.jit
def arguments(given, row, count, k, F: tl.constexpr):
    """What the printed function takes besides facts, and each term's weight of the row."""
    NUMBERS: tl.constexpr = F.NUMBERS
    inputs, weights, seeds, literals = (), (), (), ()
    for i in tl.static_range(len(F.INPUT_ROWS)):
        inputs = inputs + (argument(given.inputs[i], row, count, k, F.INPUT_ROWS[i]),)
    for i in tl.static_range(len(F.BASE_KINDS)):
        base = number(given.bases[i], row, F.BASE_KINDS[i] >= 0, F.BASE_KINDS[i] == 1).to(tl.float32)
        weights = weights + (base,)
        seeds = seeds + (base * number(given.factors[i], row, F.FACTOR_KINDS[i] >= 0, False).to(tl.float32),)
    for i in tl.static_range(NUMBERS):
        literals = literals + (number(given.numbers[i], row, False, False).to(tl.float32),)
    return inputs, weights, seeds, literals
