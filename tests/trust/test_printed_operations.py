"""Every printed operation with every argument of its schema, in every dtype: PyTorch's number, or it is not printed.

The table is walked, not listed: each overload of each rule, each argument with values other than its default, rows and
scalars of all dtypes against each other, in place, with `out=`, with the gradient.
"""

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.append(str(Path(__file__).parents[1]))
from interpreting import INSIDE, inside, interpreted, outside

import headloss as hl

pytest.importorskip("triton")
import triton
import triton.language as tl

from headloss.backends.triton.printer.lower import Unprintable, compiled, function, source_of
from headloss.backends.triton.printer.operands import DTYPES, kind_of
from headloss.backends.triton.printer.operations import RULES
from headloss.backends.triton.printer.printer import Printer, Value

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where a number is not finite
N = 64
ATEN = torch.ops.aten


test_under_the_interpreter = interpreted(__file__)


@triton.jit
def run_kernel(arguments, outs, FN: tl.constexpr, SCALARS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    given = ()
    for k in tl.static_range(len(arguments)):
        given = given + (tl.load(arguments[k] + (i * 0 if SCALARS[k] else i)),)  # noqa: RUF005
    found = FN(*given)
    for k in tl.static_range(len(outs)):
        tl.store(outs[k] + i, found[k].to(outs[k].dtype.element_ty) + tl.zeros([N], outs[k].dtype.element_ty))


HELD = {"b": torch.int64, "i": torch.int64, "f": torch.float32, "d": torch.float64}


def attempt(fn, *arguments):
    """Nothing where PyTorch has no such operation, or no gradient of it."""
    try:
        return fn(*arguments)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return ()


def trace(fns, arguments):
    """A graph of all these functions' outputs, and how many each has."""
    sizes = []

    def every(*tensors):
        found = [attempt(fn, *tensors) for fn in fns]
        sizes.extend(map(len, found))
        return tuple(x for values in found for x in values)

    return make_fx(every, tracing_mode="fake")(*arguments).graph, sizes


class Written:
    """Some functions of the same arguments in one printed function, and for each its outputs or why it is not in it."""

    def __init__(self, traced, arguments, lifted=False):
        graph, sizes = traced
        nodes = iter(graph.output_node().args[0])
        given = {
            n: Value(f"a{i}", kind_of(x.dtype)) for i, (n, x) in enumerate(zip(graph.nodes, arguments, strict=False))
        }
        printer, results = Printer(lifted=(lambda i: f"n{i}") if lifted else None), []
        self.outs = []
        for size in sizes:
            wanted = [next(nodes) for _ in range(size)]
            mark = printer.mark()
            try:
                values = printer.graph(graph, given, wanted)
            except Unprintable as error:
                printer.back(mark)
                self.outs.append(error)
            else:
                self.outs.append([torch.zeros(N, dtype=HELD[kind_of(n.meta["val"].dtype)]) for n in wanted])
                results += [values[n].text for n in wanted]
        self.flat = tuple(x for found in self.outs if isinstance(found, list) for x in found)
        self.numbers = [torch.tensor(x, dtype=torch.float32) for x in printer.numbers]
        arguments = [*arguments, *self.numbers]
        self.held = tuple(x if x.dtype == torch.bool else x.to(HELD[kind_of(x.dtype)]) for x in arguments)
        result = f"({', '.join(results)}, )" if results else "()"
        names = [*(v.text for v in given.values()), *(f"n{i}" for i in range(len(self.numbers)))]
        source = function("each", names, printer.lines, result)
        self.constants = {"FN": compiled(source, "each"), "SCALARS": tuple(x.ndim == 0 for x in arguments), "N": N}


def printed(fns, arguments):
    """What the printed forms of some functions give, in one launch, or why one has none."""
    return run(trace(fns, arguments), arguments)


def run(traced, arguments, lifted=False):
    written = Written(traced, arguments, lifted)
    if written.flat:
        run_kernel[(1,)](written.held, written.flat, **written.constants)
    return written.outs


RTOL = {torch.float64: 1e-13, torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
ATOL = {torch.float64: 1e-15, torch.float32: 2e-7, torch.float16: 1e-6, torch.bfloat16: 1e-6}


def check(ours, theirs, what):
    for one, other in zip(ours, theirs, strict=True):
        dtype = other.dtype
        assert other.shape in ((), (N,)), f"{what}: {tuple(other.shape)}"
        other = other.to(one.dtype).expand(N)
        if not dtype.is_floating_point:
            assert torch.equal(one, other), f"{what}: {one} for {other}"
            continue
        if dtype == torch.float16:
            assert torch.equal(one.half().float().nan_to_num(), one.nan_to_num()), f"{what}: not rounded"
        torch.testing.assert_close(
            one,
            other,
            rtol=RTOL[dtype],
            atol=1e-6 if "gelu" in what else ATOL[dtype],
            equal_nan=True,
            msg=lambda m, w=what: f"{w}: {m}",
        )


def graded(fn):
    """A function with the gradients of what it returns, as a trace of a loss has them."""

    def joint(*arguments):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in arguments]
            values = fn(*leaves)
            ends = [v for v in values if v.requires_grad]
            if not ends:
                return values
            seeds = [torch.full_like(v, 0.7) for v in ends]
            grads = torch.autograd.grad(ends, [x for x in leaves if x.requires_grad], seeds, allow_unused=True)
        return (*(v.detach() for v in values), *(g for g in grads if g is not None))

    return joint


# ---------------------------------------------------------------- the walk

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, -1.5, math.inf, -math.inf, math.nan, 1e-30, 1e30, 0.1]
DTYPE = sorted(DTYPES - {torch.bfloat16}, key=str)  # to which the interpreter does not round as devices do
SOME = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool]


def values(dtype, turn=0, name=""):
    g = torch.Generator().manual_seed(5 + turn)
    if dtype == torch.bool:
        x = torch.rand(N, generator=g) < 0.5
    elif dtype.is_floating_point:
        x = torch.cat([torch.tensor(SPECIAL), 3 * torch.randn(N - 16, generator=g)]).roll(5 * turn)
        x = (x + 1e-9 if dtype == torch.float64 else x).to(dtype)
    else:
        top = torch.iinfo(dtype)
        x = torch.randint(-5, 6, (N,), generator=g).to(dtype)
        x[::7], x[3::7] = top.max - turn, top.min + turn
    if name.startswith("gelu") and dtype.is_floating_point:
        x = x.nan_to_num(0.0, 2.0, -2.0)  # PyTorch's own of infinity is not a number on every CPU
    if name.startswith("binary_cross_entropy") and "logits" not in name and dtype.is_floating_point:
        x = x.float().nan_to_num().sigmoid().to(dtype)
    return x.roll(turn)


def overloads(name):
    """Those of tensors, in place too; with `out=` they are refused as a whole."""
    for form in (name, name + "_"):
        packet = getattr(ATEN, form, None)
        for each in packet.overloads() if packet is not None else ():
            schema = getattr(packet, each)._schema
            if schema.is_mutable and not form.endswith("_"):
                continue
            tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
            if tensors and str(schema.returns[0].type) == "Tensor" and not any("[]" in str(a.type) for a in tensors):
                yield getattr(packet, each)


NUMBERS = (2, 0.7, -1.5, 0, True)
OTHERS = {
    "reduction": (0, 1, 2), "approximate": ("none", "tanh"), "rounding_mode": (None, "trunc", "floor"),
    "decimals": (0, 1), "is_result": (False, True), "self_is_result": (False, True), "delta": (1.0, 0.3),
    "beta": (1.0, 0.3), "threshold": (20, 0.5), "nan": (None, 1.5), "posinf": (None, 7.5), "neginf": (None, -7.5),
    "min": (0.1, None, -1, math.nan), "max": (1.5, None, -2, 3), "min_val": (-1, 0.1), "max_val": (1, 0.7),
    "alpha": (1, 0.3, 2, -1), "scale": (1, 0.5), "input_scale": (1, 0.5), "negative_slope": (0.01, 0.3),
    "value": (1, 0.3, 2), "weight": (0.3, 0.7), "exponent": (2, 3, 0, 1, -1, 0.5, -0.5, 2.0, 5, 2.3, -2),
}  # fmt: skip


def choices(argument):
    """What an argument that is no tensor takes: first its usual value."""
    return OTHERS.get(argument.name, NUMBERS)


def calls(op):
    """Which arguments are tensors, and the other ones: all usual, then each with each of its other values."""
    arguments = [a for a in op._schema.arguments if not (a.kwarg_only and "Tensor" in str(a.type))]
    plain = [a for a in arguments if "Tensor" not in str(a.type)]
    usual = {a.name: choices(a)[0] for a in plain}
    needed = [a.name for a in arguments if "Tensor" in str(a.type) and "Optional" not in str(a.type)]
    optional = [a.name for a in arguments if "Tensor" in str(a.type) and "Optional" in str(a.type)]
    for count in range(len(optional) + 1):
        for some in itertools.combinations(optional, count):
            yield (*needed, *some), usual
    for a in plain:
        for other in choices(a)[1:]:
            yield (*needed, *optional), {**usual, a.name: other}


def dtypes(names, few):
    """Dtypes of the tensors, and which of them is a scalar: alike, then each beside float32, then as a scalar."""
    flags = {"condition", "mask"} & set(names)
    rows = [n for n in names if n not in flags]
    fixed = dict.fromkeys(flags, (torch.bool, 1))
    for d in [d for d in SOME if d.is_floating_point or "grad_output" not in names] if few else DTYPE:
        yield {**fixed, **dict.fromkeys(rows, (d, 1))}
    if few or len(rows) < 2:
        return
    for d, n in itertools.product(DTYPE, rows):
        if d != torch.float32:
            yield {**fixed, **dict.fromkeys(rows, (torch.float32, 1)), n: (d, 1)}
    for d, e in itertools.product((torch.float32, torch.float16, torch.int32), SOME):
        yield {**fixed, **dict.fromkeys(rows, (d, 1)), rows[-1]: (e, 0)}


def function_of(op, names, others):
    order = op._schema.arguments

    def fn(*tensors):
        given = {**dict(zip(names, tensors, strict=True)), **others}
        if op._schema.name.endswith("_"):
            given["self"] = given["self"].clone()
        if "buffer" in given:
            given["buffer"] = (-given["self"].abs()).exp()
        positional = [given.get(a.name, a.default_value) for a in order if not a.kwarg_only]
        found = op(*positional, **{a.name: given[a.name] for a in order if a.kwarg_only and a.name in given})
        return (found[0],) if isinstance(found, tuple) else (found,)

    return fn


def cases(name):
    """Every call of an operation that PyTorch knows: what it is, a function of rows, and the rows by their places."""
    places = {}
    for op in overloads(name):
        for k, (names, others) in enumerate(calls(op)):
            for dtype in dtypes(names, few=k > 0 or name.endswith("backward") or op._schema.name.endswith("_")):
                which = [(dtype[n][0], list(dtype).index(n), dtype[n][1]) for n in names]
                places |= {x: len(places) for x in which if x not in places}
                what = f"{op} {others} " + " ".join(f"{n}:{d}{'' if ndim else '()'}" for n, (d, ndim) in dtype.items())
                yield what, function_of(op, names, others), [places[x] for x in which], places


def calls_of(name):
    """Every call that PyTorch knows: what it is, a function of all rows, PyTorch's values and gradients; the rows."""
    found = list(cases(name))
    rows = [values(d, i, name) if ndim else values(d, i, name)[20] for d, i, ndim in found[-1][-1]]
    known = []
    for what, fn, where, _ in found:
        for form in (graded(fn), fn) if not name.endswith("backward") else (fn,):
            theirs = attempt(form, *(rows[i].clone() for i in where))
            if theirs:
                known.append((what, lambda *tensors, f=form, at=where: f(*(tensors[i] for i in at)), theirs))
                break
    return known, rows


def compare(name):
    """Which calls are printed, which refused, and what is wrong; with literals in the text, and handed in."""
    known, rows = calls_of(name)
    count, wrong = {"printed": [], "refused": []}, []
    fns = [fn for _, fn, _ in known]
    traced = trace(fns, rows)
    every = [(x, y) for lifted in (False, True) for x, y in zip(known, run(traced, rows, lifted), strict=True)]
    for (what, _, theirs), ours in every:
        if isinstance(ours, Unprintable):
            count["refused"].append(f"{what}: {ours}")
        elif ours:  # a trace of it may fail
            count["printed"].append(what)
            try:
                check(ours, theirs, what)
            except AssertionError as error:
                wrong.append(str(error))
    return count, wrong


@inside
@pytest.mark.parametrize("name", RULES)
def test_every_overload_argument_and_dtype(name):
    count, wrong = compare(name)
    assert not wrong, "\n".join(wrong)
    plain = [x for x in count["printed"] if "int" not in x.partition("self:")[2] and "float64" not in x]
    in_memory = name.startswith("silu") and torch.__version__ < "2.9"  # there its formula allocates
    assert plain or name.startswith("bitwise") or in_memory, count  # what was always printed still is
    for optional in ("weight", "pos_weight") if name.startswith("binary") else ():
        there = any(a.name == optional for op in overloads(name) for a in op._schema.arguments)
        assert not there or any(f" {optional}:" in x for x in count["printed"]), (optional, count)


@outside
def test_every_rule_is_walked():
    """No rule without an overload, and no optional tensor that the walk leaves out."""
    for name in RULES:
        assert list(overloads(name)), name
        for op in overloads(name):
            tensors = {a.name for a in op._schema.arguments if "Tensor" in str(a.type) and not a.kwarg_only}
            assert tensors == {n for names, _ in calls(op) for n in names}, op


# ---------------------------------------------------------------- other than rules

X, Y = values(torch.float32), values(torch.float32, 1)
COUNTS = values(torch.int32, 1)
NEWS = {
    "full": lambda x: torch.full((1,), 1.7) + x, "full int": lambda x: torch.full((1,), 7) + x,
    "full float64": lambda x: torch.full((1,), 0.1, dtype=torch.float64) + x.double(),
    "full half": lambda x: torch.full((1,), 0.1, dtype=torch.float16) + x.half() * 0,
    "full uint8": lambda x: torch.full((1,), 255, dtype=torch.uint8) + x.nan_to_num().clamp(0, 9).to(torch.uint8),
    "full bool": lambda x: torch.full((1,), 3, dtype=torch.bool) | (x > 0),
    "full_like int": lambda x: torch.full_like(x, 2.7, dtype=torch.int32) + (x > 0),
    "full_like double": lambda x: torch.full_like(x, 0.1, dtype=torch.float64) * x,
    "new_full": lambda x: x.new_full((1,), 0.1, dtype=torch.float64) * x.double(),
    "scalar_tensor": lambda x: torch.scalar_tensor(0.1, dtype=torch.float64) * x,
    "zeros": lambda x: torch.zeros_like(x, dtype=torch.int64) + (x > 0), "ones": lambda x: x / x.new_ones(1),
    "to double": lambda x: (x.double() + 1e-12) - x.double(), "to float": lambda x: x.double().mul(1 / 3).float(),
    "to half": lambda x: x.half().float() - x, "to int32": lambda x: (x.nan_to_num() % 1).add(1).int(),
    "clone": lambda x: x.clone(memory_format=torch.contiguous_format) * 2,
    "double scalar": lambda x: x * (torch.scalar_tensor(1.0, dtype=torch.float64) / 3),
    "sgn of double": lambda x: (x.double() + 1e-12).sign() + x.double(),
    "default": lambda x: torch.where(x > 0, 1, 0) / 3 + torch.where(x > 0, 0.1, 2),
}  # fmt: skip


@inside
@pytest.mark.parametrize("name", NEWS)
def test_new_tensors_and_copies(name):
    fn = lambda x: (NEWS[name](x),)
    (ours,) = printed([fn], [X])
    if name in ("to int32",):
        assert isinstance(ours, Unprintable)  # remainder has no rule
    else:
        check(ours, fn(X), name)


def into(x, y, fn):
    out = torch.zeros_like(x)
    fn(x, y, out=out)
    return out * 2


def into_another_name(x, y):
    out = torch.zeros_like(x)
    shown = out.detach()
    torch.mul(x, y, out=out)
    return shown * 2


REFUSED = {
    "mul with out": into_another_name,
    "add with out": lambda x, y: into(x, y, torch.add), "maximum with out": lambda x, y: into(x, y, torch.maximum),
    "div with rounding_mode": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "gelu with approximate": lambda x, y: F.gelu(x, approximate="tanh"),
    "mse_loss with reduction": lambda x, y: x * F.mse_loss(x, y),
    "round with decimals": lambda x, y: x.round(decimals=2),
    "log1p in float64": lambda x, y: x.double().log1p(), "tanh in float64": lambda x, y: torch.tanh(x.double() * y),
    "huber_loss in float64": lambda x, y: F.huber_loss(x.double(), y.double(), reduction="none"),
    "ge of float16 and 0.1": lambda x, y: x.half() >= 0.1, "add of float16 and 0.7": lambda x, y: x.half() + 0.7,
    "remainder": lambda x, y: x % y, "fmod": lambda x, y: torch.fmod(x, y), "floor_divide": lambda x, y: x // y,
    "pow of int64": lambda x, y: (x > 0).long() ** 7, "lshift": lambda x, y: (x > 0).long() << 2,
    "_to_copy in complex64": lambda x, y: x.to(torch.complex64).real, "mul in complex64": lambda x, y: (x * 1j).real,
    "fill": lambda x, y: (x * 2).fill_(1.0), "copy": lambda x, y: (x * 2).copy_(y),
}  # fmt: skip


@outside
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_stated_is_not_printed(name):
    graph = make_fx(lambda x, y: (REFUSED[name](x, y),), tracing_mode="symbolic")(torch.rand(7), torch.rand(7))
    with pytest.raises(Unprintable, match=name.replace(" and ", ".*")):
        source_of(graph)


ZEROS = {
    "neg": lambda x: -x, "mul": lambda x: x * -1, "abs": abs, "round": torch.round, "trunc": torch.trunc,
    "ceil": torch.ceil, "floor": torch.floor, "sqrt": torch.sqrt, "where": lambda x: torch.where(x == 0, x, 1.0),
    "copy": lambda x: x.clone(), "sin": torch.sin, "expm1": torch.expm1, "log1p": torch.log1p, "tanh": torch.tanh,
    "pow 3": lambda x: x**3, "pow -1": lambda x: x**-1, "double": lambda x: -x.double(), "rsub": lambda x: 0.0 - x,
    "add": lambda x: x + -0.0, "div": lambda x: x / -3, "nan_to_num": lambda x: x.nan_to_num(),
}  # fmt: skip


@inside
@pytest.mark.parametrize("name", ZEROS)
def test_signs_of_zeros(name):
    if name == "add" and triton.__version__ < "3.5":
        pytest.skip("triton 3.4 takes the literal -0.0 for 0.0")
    x = torch.tensor([0.0, -0.0, 0.3, -0.3, 1.0, -1.0, 0.5, -0.5]).repeat(8)
    fn = lambda x: (ZEROS[name](x), 1 / ZEROS[name](x))
    check(printed([fn], [x])[0], fn(x), name)


# ---------------------------------------------------------------- objectives


def weighed(logprob, y, w):
    return F.binary_cross_entropy_with_logits(logprob, y, weight=w, reduction="none")


def positive(logprob, y, w):
    return F.binary_cross_entropy_with_logits(logprob, y, pos_weight=w, reduction="none")


def both(logprob, y, w, p):
    return F.binary_cross_entropy_with_logits(logprob, y, weight=w, pos_weight=p, reduction="none")


def of_probabilities(logprob, y, w):
    return F.binary_cross_entropy(logprob.exp(), y, weight=w, reduction="none")


def in_double(logprob, x):
    return ((logprob.double() * 1e9 + x) - logprob.double() * 1e9).float() + logprob


def double_rows(logprob, wide):
    return logprob * (wide - 1e9)


def double_scalar(logprob, beta):
    return logprob * (beta - 1e9)


def double_constants(logprob):
    third = torch.full_like(logprob, 1 / 3, dtype=torch.float64)
    return logprob * (third * 3e7 - torch.full_like(third, 1e7)).float() + logprob


def wrapping(logprob, n):
    return logprob * (n * n + 7).float() * 1e-9


def wrapping_bytes(logprob, few):
    return logprob * (few + few).float()


def whole_division(logprob, n):
    return logprob * (n / 7) + logprob * (n > 0.5)


def narrow(logprob):
    return logprob.half().float() * logprob


def flags(logprob, mask):
    return logprob * torch.maximum(mask, ~mask & (logprob < -2)) + (mask + mask) * logprob


def written_out(logprob, x):
    held = torch.zeros_like(x)
    torch.mul(logprob.detach(), x, out=held)
    return held * logprob


def cube(logprob, n):
    low = n.clamp(-3, -1).float()
    return logprob * (n**3).float() * 1e-9 + logprob * torch.clamp(logprob, min=low, max=low + 1)


R = 6
GIVEN = {
    "y": torch.tensor([1.0, 0, 1, 0, 1, 0.5]), "w": torch.tensor([1.5, 2, 0, 10, 0.25, 3]),
    "p": torch.tensor([0.5, 4, 2, 1, 3, 0.1]), "x": torch.linspace(-1, 1, R),
    "wide": 1e9 + torch.linspace(-1, 1, R, dtype=torch.float64) / 3, "beta": 1e9 + 0.123,
    "n": torch.tensor([50000, -70000, 3, 0, 65536, 2**31 - 1], dtype=torch.int32),
    "few": torch.tensor([200, 255, 3, 0, 127, 128], dtype=torch.uint8), "mask": torch.arange(R) % 2 == 0,
}  # fmt: skip
LOSSES = [weighed, positive, both, of_probabilities, in_double, double_rows, double_scalar, double_constants, wrapping,
          wrapping_bytes, whole_division, narrow, flags, written_out, cube]  # fmt: skip


@inside
@pytest.mark.parametrize("fn", LOSSES, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("source", ["Logits", "Linear"])
def test_objectives(fn, source):
    """Both backends against the function itself in autograd."""
    names = fn.__code__.co_varnames[1 : fn.__code__.co_argcount]
    inputs = {n: GIVEN[n] for n in names}
    targets = torch.tensor([1, 2, 3, 4, 5, 6])
    z = 2 * torch.randn(R, 16)
    weight = torch.eye(16)
    one = z.clone().requires_grad_()
    scalars = {n: torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else x for n, x in inputs.items()}
    truth = fn(one.log_softmax(-1).gather(1, targets[:, None])[:, 0], **scalars).float().mean()
    truth.backward()
    for backend in ("torch", "triton"):
        leaf = z.clone().requires_grad_()
        given = hl.Logits(leaf) if source == "Logits" else hl.Linear(leaf, weight)
        objective = hl.Objective(term=fn, backend=backend)
        out = objective(given, targets, **inputs)
        out.loss.backward()
        torch.testing.assert_close(out.loss.detach(), truth.detach(), rtol=2e-5, atol=1e-5)
        torch.testing.assert_close(leaf.grad, one.grad, rtol=2e-4, atol=1e-5)


# ---------------------------------------------------------------- the compiler, which differs from the interpreter

POINTERS = {torch.int64: "*i64", torch.float32: "*fp32", torch.float64: "*fp64", torch.bool: "*i1"}


@pytest.mark.skipif(INSIDE, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("part", range(4))
def test_every_form_compiles_for_hopper(part):
    """Each rule in every dtype, bfloat16 as well, and with a float64 scalar."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name in list(RULES)[part::4]:
        places, fns = {}, []
        for op in overloads(name):
            names, others = next(iter(calls(op)))
            flags = {"condition", "mask"} & set(names)
            for d, last in [*((d, (d, 1)) for d in DTYPES), (torch.float32, (torch.float64, 0))]:
                kinds = {**{n: (torch.bool, 1) if n in flags else (d, 1) for n in names}, names[-1]: last}
                which = [(*kinds[n], i) for i, n in enumerate(names)]
                places |= {x: len(places) for x in which if x not in places}
                fn = function_of(op, names, others)
                fns.append(lambda *rows, f=fn, at=[places[x] for x in which]: f(*(rows[i] for i in at)))
        if name.startswith("silu") and torch.__version__ < "2.9":
            continue  # not printed there
        rows = [values(d, i, name) if ndim else values(d, i, name)[20] for d, ndim, i in places]
        written = Written(trace(fns, rows), rows)
        types = {"arguments": tuple(POINTERS[x.dtype] for x in written.held)}
        types |= {"outs": tuple(POINTERS[x.dtype] for x in written.flat)}
        signature = {n: types.get(n, "constexpr") for n in run_kernel.arg_names}
        source = ASTSource(run_kernel, signature, written.constants)
        assert written.flat and triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"], name
