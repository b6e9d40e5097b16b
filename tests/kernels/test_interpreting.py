"""The short cuts through Triton's interpreter give what its own operations give, bit by bit and type by type."""

import itertools
import warnings

import numpy as np
import pytest
from interpreter_operations import fit
from interpreting import INSIDE, inside, interpreted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what has no number

pytest.importorskip("triton")
if not fit():
    pytest.skip("this Triton runs without the short cuts", allow_module_level=True)
test_under_the_interpreter = interpreted(__file__)

if INSIDE:
    from triton.language import core
    from triton.runtime import interpreter

    OPERATIONS = core._operations
    TYPES = [core.float32, core.float64, core.int32, core.int64, core.int1, core.float16]
NUMBERS = (2, -3, 0, 0.0, -0.0, 2.5, 1e300, float("inf"), float("nan"), 2**31, 2**40, True)
SHAPES = ((), (4,), (4, 1), (1, 4), (8,))


def tensor(dtype, shape, seed=0):
    values = np.random.RandomState(seed).randint(-4, 5, shape or (1,))
    data = (values > 0) if dtype is core.int1 else values.astype(interpreter._get_np_dtype(dtype))
    if dtype.is_floating():
        data = data + np.where(values > 2, np.nan, 0.25).astype(data.dtype)
    return core.tensor(interpreter.TensorHandle(data, dtype), core.block_type(dtype, list(shape)) if shape else dtype)


def outcome(op, *given, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = op(*given, **options)
        except Exception as error:
            return type(error).__name__
    data = found.handle.data
    return data.dtype, data.shape, data.tobytes(), str(found.type), str(found.dtype)


def same(name, *given, **options):
    quick, slow = OPERATIONS.both[name]
    one, other = outcome(quick, *given, **options), outcome(slow, *given, **options)
    assert one == other, (name, [getattr(x, "type", x) for x in given], options, one, other)
    return one.__class__ is tuple


def names(*parts):
    return [n for n in OPERATIONS.both if any(p in n for p in parts)]


@inside
def test_of_two():
    tensors = [tensor(t, s, i) for i, (t, s) in enumerate(itertools.product(TYPES, SHAPES))]
    binary = names("tensor.__", "div_rn", "imum")
    assert len(binary) >= 20
    worked = 0
    for name in binary:
        for x, y in itertools.product(tensors, [*tensors, *NUMBERS, core.constexpr(2), core.constexpr(0.5)]):
            worked += same(name, x, y)
    for name, x, y in itertools.product(names("imum", "div_rn"), NUMBERS, tensors[:20]):
        worked += same(name, x, y)
    for name, x, y in itertools.product(names("imum"), tensors[:5], tensors[:5]):
        worked += same(name, x, y, propagate_nan=core.PropagateNan.ALL)
    assert worked > 3000


@inside
def test_of_one_and_of_three():
    tensors = [tensor(t, s, i) for i, (t, s) in enumerate(itertools.product(TYPES, SHAPES))]
    for name, x in itertools.product(names("exp", "log", "sqrt", "floor", "ceil"), [*tensors, 2.0]):
        if name[:7] != "tensor.":
            same(name, x)
    casts = [*TYPES, core.bfloat16, core.int8]
    for name, x, to in itertools.product(("cast", "tensor.to"), tensors, casts):
        same(name, x, to)
        same(name, x, core.constexpr(to))
    assert same("cast", tensors[0], core.float16, fp_downcast_rounding="rtne")
    assert same("cast", tensors[0], core.int32, bitcast=True)
    some = [*tensors[:5], tensors[11], tensors[20], 0.0, -0.0, 2, core.constexpr(float("-inf"))]
    for condition, x, y in itertools.product(tensors[20:25], some, some):
        same("where", condition, x, y)
    for shape, value, to in itertools.product(((), (4,), [2, 4], core.constexpr((8,))), NUMBERS, casts):
        same("full", shape, value, to)


@inside
@pytest.mark.parametrize("element", ["float32", "float64", "int32", "int64", "float16", "bfloat16", "int1"])
@pytest.mark.parametrize("shape", [(), (4,), (1, 4)])
def test_memory(element, shape):
    element = getattr(core, element)
    held = np.arange(1, 9).astype(interpreter._get_np_dtype(element))

    def pointers():
        at = held.ctypes.data + np.arange(int(np.prod(shape))).reshape(shape or (1,)) * held.itemsize
        kind = core.pointer_type(element)
        handle = interpreter.TensorHandle(at.astype(np.uint64), kind)
        return core.tensor(handle, core.block_type(kind, list(shape)) if shape else kind)

    masks = [None, tensor(core.int1, ()), tensor(core.int1, (4,), 1), tensor(core.int1, shape, 2), core.constexpr(None)]
    others = [None, 0, 0.0, -1, 2.5, float("-inf"), core.constexpr(0.0)]
    others += [tensor(t, s) for t in TYPES for s in ((), (4,), shape)]
    for mask, other in itertools.product(masks, others):
        same("load", pointers(), mask, other)
    assert same("load", pointers(), masks[3], 0, cache_modifier=".cg", eviction_policy="evict_first")
    wrote = 0
    for mask, value in itertools.product(masks, others[1:]):
        found = []
        for op in OPERATIONS.both["store"]:
            held[:] = np.arange(1, 9).astype(held.dtype)
            try:
                op(pointers(), value, mask)
            except Exception as error:
                found.append(type(error).__name__)
            else:
                found.append(held.tobytes())
        assert found[0] == found[1], (str(element), shape, getattr(mask, "type", mask), getattr(value, "type", value))
        wrote += isinstance(found[0], bytes)
    assert wrote > 5
