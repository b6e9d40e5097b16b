"""Printed functions: every operation against PyTorch in float32, under Triton's interpreter in a process of its own."""

import math

import pytest
import torch
import torch.nn.functional as F
from interpreting import INSIDE, inside, interpreted, outside, quicken
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

if INSIDE:
    import triton
    import triton.language as tl

    quicken()

    @triton.jit
    def run_kernel(arguments, outs, FN: tl.constexpr, N: tl.constexpr):
        i = tl.arange(0, N)
        given = ()
        for k in tl.static_range(len(arguments)):
            given = given + (tl.load(arguments[k] + i),)  # noqa: RUF005
        found = FN(*given)
        for k in tl.static_range(len(outs)):
            tl.store(outs[k] + i, found[k].to(tl.float32) + tl.zeros([N], tl.float32))


from headloss.backends.triton.printer import lower
from headloss.backends.triton.printer.lower import Unprintable, compiled, pointwise, source_of

test_under_the_interpreter = interpreted(__file__)


SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, math.inf, -math.inf, math.nan, 1e-30, -1e-30, 1e30, 20.5]
LINE = torch.cat([torch.tensor(SPECIAL), 3 * torch.randn(96, generator=torch.Generator().manual_seed(0))])
LINE = torch.cat([LINE, 0.01 * torch.randn(16, generator=torch.Generator().manual_seed(1))])  # 128 numbers
OTHER = LINE.roll(37)
WHOLE = torch.randint(-5, 6, (128,), generator=torch.Generator().manual_seed(2))
FLAG = OTHER > 0


def printed(fn, *arguments, mode="symbolic"):
    graph = make_fx(fn, tracing_mode=mode)(*(x[:7].clone() for x in arguments))
    outs = [torch.empty(128) for _ in graph.graph.output_node().args[0]]
    run_kernel[(1,)](tuple(arguments), tuple(outs), FN=pointwise(graph), N=128)
    return outs


def same(fn, *arguments, rtol=3e-6, atol=1e-7, mode="symbolic"):
    truth = fn(*arguments)
    for ours, theirs in zip(printed(fn, *arguments, mode=mode), truth, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=rtol, atol=atol, equal_nan=True)


def graded(fn):
    """The values of a function and their gradients, as a trace of a loss has them."""

    def joint(*arguments):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in arguments]
            value = fn(*leaves)
            wanted = [x for x in leaves if x.requires_grad]
            grads = torch.autograd.grad([value], wanted, [torch.full_like(value, 0.7)], allow_unused=True)
        return (value.detach(), *(g for g in grads if g is not None))

    return joint


UNARY = {
    "neg": lambda x: -x, "abs": torch.abs, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1,
    "log": torch.log, "log1p": torch.log1p, "log2": torch.log2, "log10": torch.log10, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "square": torch.square, "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "softplus": F.softplus, "softplus 3 5": lambda x: F.softplus(x, 3.0, 5.0),
    "logsigmoid": F.logsigmoid, "relu": F.relu, "silu": F.silu, "elu": lambda x: F.elu(x, 0.7),
    "leaky_relu": F.leaky_relu, "hardtanh": F.hardtanh, "relu6": F.relu6, "sign": torch.sign, "floor": torch.floor,
    "ceil": torch.ceil, "trunc": torch.trunc, "round": torch.round, "nan_to_num": torch.nan_to_num,
    "pow 2": lambda x: x**2, "pow 3": lambda x: x**3, "pow 0": lambda x: x**0, "pow 1": lambda x: x**1,
    "pow 0.5": lambda x: x**0.5, "pow -1": lambda x: x**-1, "pow -2": lambda x: x**-2, "pow 2.5": lambda x: x**2.5,
    "pow 5": lambda x: x**5, "pow -3": lambda x: x**-3.0, "2 ** x": lambda x: 2.0**x, "1 / x": lambda x: 1 / x,
    "1 - x": lambda x: 1 - x, "clamp": lambda x: x.clamp(-1, 2), "clamp min": lambda x: x.clamp(min=0.1),
    "clamp max": lambda x: x.clamp(max=-0.1), "clamp empty": lambda x: x.clamp(2, -1),
    "detach": lambda x: x.detach() * x, "clone": lambda x: x.clone(), "ones_like": lambda x: x * torch.ones_like(x),
    "full_like": lambda x: x + torch.full_like(x, 1e-40), "new": lambda x: x + x.new_full((1,), 1e30) * x.new_ones(1),
    "scalar": lambda x: x * torch.scalar_tensor(0.1), "huge": lambda x: x * 1e300, "tiny": lambda x: x + 1e-300,
    "nan": lambda x: torch.where(x > 0, x, math.nan), "-inf": lambda x: torch.where(x > 0, x, -math.inf),
    "alpha": lambda x: torch.add(x, x, alpha=0.3) * torch.sub(x, 2.0, alpha=0.5), "rsub": lambda x: torch.rsub(x, 2.0),
    "half": lambda x: (x.to(torch.float16) * 1.1).float(), "double": lambda x: (x.double() * 1.1).float(),
    "to int": lambda x: x * x.clamp(-9, 9).nan_to_num().to(torch.int64).to(x.dtype),
}  # fmt: skip
SMOOTH = {"sin": torch.sin, "cos": torch.cos, "erf": torch.erf, "gelu": F.gelu}
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "minimum": torch.minimum,
    "maximum": torch.maximum, "clamp": lambda x, y: x.clamp(y - 1, y + 1), "clamp min": lambda x, y: x.clamp(min=y),
    "clamp max": lambda x, y: x.clamp(max=y), "where": lambda x, y: torch.where(x > y, x, y * 2),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 1.5), "logaddexp": torch.logaddexp, "xlogy": torch.xlogy,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3), "lerp 0.7": lambda x, y: torch.lerp(x, y, 0.7),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x.detach(), y.detach(), value=2),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.5),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.5),
    "mse": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "bce with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
    "in place": lambda x, y: (x * 2).masked_fill_(y > 0, 3.0).mul_(y).add_(1),
}  # fmt: skip
FLAGS = {
    "compare": lambda x, y: (x < y, x <= y, x > y, x >= y, x == y, x != y, x > 0, x == 0.5, x != 1),
    "logic": lambda x, y: ((x > 0) & (y > 0), (x > 0) | (y > 0), ~(x > 0), (x > 0) ^ (y > 0), torch.logical_not(x)),
    "logical": lambda x, y: (torch.logical_and(x, y > 0), torch.logical_or(x, y), torch.logical_xor(x, y)),
    "finite": lambda x, y: (x.isnan(), x.isinf(), x.isfinite(), torch.isfinite(y) & x.isnan()),
    "bool arithmetic": lambda x, y: ((x > 0) * (y > 0), (x > 0) + (y > 0), (x > 0) * y, 2 * (x > 0), (x > 0) + 0.5),
    "bool compare": lambda x, y: ((x > 0) == (y > 0), (x > 0) != (y > 0), (x > 0) < (y > 0)),
    "bool where": lambda x, y: (torch.where(x > 0, x > 1, y > 0), (x > 0).masked_fill(y > 0, True)),
    "bool casts": lambda x, y: ((x > 0).to(x.dtype) - (y > 0).float(), (x > 0).long() * 3, x.bool()),
}


@inside
@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    if name == "silu" and torch.__version__ < "2.9":
        pytest.skip("torch 2.8 makes silu's derivative in memory of its own (empty_like), which is not printed")
    same(graded(UNARY[name]), LINE)


@inside
@pytest.mark.parametrize("name", SMOOTH)
def test_smooth(name):
    same(graded(SMOOTH[name]), LINE.nan_to_num(0.0, 2.0, -2.0).clamp(-9, 9), atol=4e-7)


@inside
@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    same(graded(BINARY[name]), LINE, OTHER)


@inside
def test_powers():
    x, y = LINE.abs(), OTHER.clamp(-4, 4)
    same(lambda x, y: (x**y,), x, y)
    same(lambda x, y: (x**y,), LINE, WHOLE.float())
    same(graded(lambda x, y: x**y), x.clamp(0.01, 100.0), y)


@inside
def test_binary_cross_entropy():
    p = LINE.nan_to_num().sigmoid()
    same(graded(lambda x, y: F.binary_cross_entropy(x, y.detach(), reduction="none")), p, p.roll(1))


@inside
@pytest.mark.parametrize("name", FLAGS)
def test_flags(name):
    same(FLAGS[name], LINE, OTHER)


@inside
def test_integers():
    same(lambda n, x: (n + 1, n * n, -n, n.abs(), n / 2, n * 0.5, n == 3, n > x, n * x, n.sign(), n**2), WHOLE, LINE)
    same(lambda n, x: (n & 3, n | 1, ~n, n.clamp(-1, 2), n.minimum(n + 1), n.float(), n.bool(), n.round()), WHOLE, LINE)
    same(lambda n, b: (n * b, b.long() + n, torch.where(b, n, 0), n.masked_fill(b, 7)), WHOLE, FLAG)


@inside
def test_in_place_reaches_every_name_of_a_value():
    def fn(x, y):
        a = x * 2
        b = a.detach()
        a.add_(y)
        c = b * 3
        b.mul_(0.5)
        return a, b, c

    same(fn, LINE, OTHER)


@inside
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_any_trace(mode):
    same(lambda x, n: (x.exp() * n, (x > 0) | (n == 2)), LINE, WHOLE, mode=mode)


@inside
def test_half_inputs_round_after_every_operation():
    def fn(x, y):
        return (x * y, (x * y).float() - x.float() * y.float(), x + 1.0)

    x, y = LINE.half(), OTHER.half()  # the interpreter does not round to bfloat16 as devices do
    graph = make_fx(fn, tracing_mode="symbolic")(x[:7], y[:7])
    outs = [torch.empty(128) for _ in range(3)]
    run_kernel[(1,)]((x.float(), y.float()), tuple(outs), FN=pointwise(graph), N=128)
    for ours, theirs in zip(outs, fn(x, y), strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=0, equal_nan=True)


REFUSED = {
    "sum": lambda x: x - x.sum(), "mean": lambda x: x - x.mean(), "view": lambda x: x.view(1, -1) + x,
    "expand": lambda x: x.expand(3, x.shape[0])[0] * x, "cumsum": lambda x: x.cumsum(0), "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1), "rand_like": lambda x: x * torch.rand_like(x), "arange": lambda x: x * torch.arange(7),
    "atan2": lambda x: torch.atan2(x, x), "div with rounding_mode": lambda x: torch.div(x, 2, rounding_mode="floor"),
    "reduction=1": lambda x: x * F.mse_loss(x, 2 * x), "size": lambda x: x / x.shape[0],
    "a captured tensor": lambda x: x * LINE[:7], "mul_ on an argument": lambda x: x.mul_(2),
}  # fmt: skip


@outside
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    mode = "real" if "captured" in name else "symbolic"
    graph = make_fx(lambda x: (REFUSED[name](x),), tracing_mode=mode)(torch.rand(7))
    with pytest.raises(Unprintable, match=name.split(" ")[0]):
        source_of(graph)


@outside
def test_what_is_not_needed_is_not_printed():
    graph = make_fx(lambda x, y: (x * 2 + 0 * y, (x * 2).exp()))(torch.rand(7), torch.rand(7))
    assert source_of(graph).count("* 2") == 1  # said once
    graph = make_fx(lambda x: (x.cumsum(0), x * 2)[1:])(torch.rand(7))
    assert "cumsum" not in source_of(graph)


@outside
def test_only_our_own_words():
    graph = make_fx(lambda evil_name: (evil_name * 2,))(torch.rand(7))
    assert "evil" not in source_of(graph)
    with pytest.raises(ValueError, match="identifier"):
        source_of(graph, "f(): pass #")
    assert compiled(source_of(graph), "pointwise") is compiled(source_of(graph), "pointwise")


def test_an_exponential_is_shared_only_where_nothing_else_reads_it():
    """1 / (1 + e^d) becomes one function; e^d, or the sum, that is used again has to stay."""
    lines = ["def f(a0, a1):", "x0 = a0 - a1", "x1 = quick_exp(x0)", "x2 = x1 + 1.0", "x3 = quick_div(a0, x2)"]
    for more, shared in (("x3", True), ("x3 + x1", False), ("x3 + x2", False)):
        source = "\n    ".join([*lines, f"return ({more},)\n"])
        assert ("quick_falling(x0)" in lower._share(source)) == shared, more
        assert shared or lower._share(source) == source
