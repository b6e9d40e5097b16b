"""One launch against the two: the printed loss inside the sweep, under Triton's interpreter in a process of its own."""

import inspect
import math
import re
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from interpreting import INSIDE, inside, interpreted, outside

import headloss as hl
from headloss.facts import CONSTANT, Fact, Want, coefficients, finish
from headloss.losses import LOSSES
from headloss.metrics import read_metrics
from headloss.trace.call import Env
from headloss.trace.trace import InputSpec, _flat_arguments, trace

pytest.importorskip("triton")

plain = import_module("headloss.backends.torch")
from headloss.backends.triton.printer.lower import Unprintable  # noqa: E402
from headloss.backends.triton.printer.program import lower  # noqa: E402

visits = import_module("headloss.backends.triton.visit")

if INSIDE:
    one = import_module("headloss.backends.triton.visit")
    TINY = one.Shape(1, 1)


test_under_the_interpreter = interpreted(__file__)


class Mix:
    """Some terms, bound to inputs, lowered, and run both ways."""

    def __init__(self, metrics=(), grad=(), **terms):
        self.terms = {n: t if isinstance(t, hl.Term) else hl.Term(t) for n, t in terms.items()}
        self.calls = {n: t.call(None, {}) for n, t in self.terms.items()}
        self.metrics = list(read_metrics(list(metrics)))
        self.grad = grad

    def inputs(self, n, seed=1):
        generator = torch.Generator().manual_seed(seed)
        rand = lambda: torch.rand(n, generator=generator)
        return {
            "advantage": 2 * rand() - 1, "old_logprob": -4 * rand(), "ref_logprob": -4 * rand(), "weight_of": rand(),
            "temper": torch.tensor(0.7), "flag": rand() > 0.5, "count": torch.randint(0, 5, (n,), generator=generator),
            "draw": rand(),
        }  # fmt: skip

    def lowered(self, given, dtype=torch.float32):
        names = {n for call in self.calls.values() for n in call.input_names}
        names |= {n for _, call in self.metrics for n in call.input_names}
        shapes = {
            n: InputSpec("row" if x.ndim else "scalar", x.dtype, (), n in self.grad)
            for n, x in given.items()
            if n in names
        }
        wide = {n: s._replace(dtype=dtype) if s.dtype == torch.float32 else s for n, s in shapes.items()}
        traces = {n: trace(call, wide, dtype, "cpu", False) for n, call in self.calls.items()}
        facts = [f for n, c in self.calls.items() for f in c.facts if f not in traces[n].unused]
        want = Want([*facts, *(f for _, c in self.metrics for f in c.facts)])
        if dtype != torch.float32:
            return traces, want, None
        return traces, want, lower({n: (self.calls[n], traces[n]) for n in self.calls}, want, wide, self.metrics)

    def truth(self, x, y, given, bases, factors, temperature, keep, **options):
        """Values, metrics, gradient, facts and input gradients in float64, in two launches."""
        given = {n: v.double() if v.is_floating_point() else v for n, v in given.items()}
        traces, want, _ = self.lowered(given, torch.float64)
        T = [temperature if t is None else t for t in want.temperatures]
        x = x.double()
        facts, softmax = finish(plain.sums(x, y, want, T, **options), want, T, x.shape[1])
        filler = {f: torch.zeros(len(x)).double() for c in self.calls.values() for f in c.facts}
        env = Env({**filler, **facts}, given, y, None)
        values, metrics, grads, by_input = [], {}, {}, {}
        for name, call in self.calls.items():
            seed = (bases[name] * factors[name] * torch.ones(len(x))).double()
            value, cotangents, found = traces[name].joint(*_flat_arguments(call, env, seed))
            values.append(bases[name] * value * keep)
            metrics |= {f"{name}/{k}": m.double() * keep for k, m in found.items()}
            names = [n for n in call.input_names if n in given and n in self.grad]
            for leaf, g in zip([*(f for f in call.facts if f.name not in CONSTANT), *names], cotangents, strict=True):
                if g is not None:
                    into = grads if isinstance(leaf, Fact) else by_input
                    into[leaf] = into.get(leaf, 0) + g * keep
        for name, call in self.metrics:
            metrics[name] = call.fn(**env.arguments(call.signature), **call.options).double() * keep
        out = torch.empty_like(x)
        plain.pull(x, y, softmax, coefficients(facts, grads, want, x.shape[1]), T, out, **options)
        out = torch.where(keep[:, None].bool(), out, 0.0)
        facts = {f: v * keep for f, v in facts.items()}
        return torch.stack(values), metrics, out, facts, by_input

    def check(self, x, y, *, temperature=1.0, close=1e-5, ignore=False, where="elsewhere", shape=None, **options):
        n = len(x)
        given = self.inputs(n)
        _, want, program = self.lowered(given)
        T = [temperature if t is None else t for t in want.temperatures]
        generator = torch.Generator().manual_seed(9)
        bases = {name: torch.rand(n, generator=generator) + 0.5 for name in self.terms}
        first = next(iter(bases))
        bases[first] = 0.125
        factors = dict.fromkeys(self.terms, 0.5) | {first: torch.tensor(1.5)}
        keep = (y != -100).float() if ignore else torch.ones(n)
        arguments = one.Arguments(given, bases.values(), factors.values())
        read = x.clone() if where == "in place" else x
        out = read if where == "in place" else torch.full_like(x, math.nan) if where == "elsewhere" else None
        visited = one.visit(read, y, want, T, program, arguments, out, ignore=ignore, shape=shape or TINY, **options)
        known = y.clamp(min=0) if ignore else y
        wide = temperature.double() if isinstance(temperature, torch.Tensor) else temperature
        truth_x = torch.where(keep[:, None].bool(), x, 0.0) if ignore else x
        values, metrics, grad, facts, by_input = self.truth(
            truth_x, known, given, bases, factors, wide, keep.double(), **options
        )
        same = lambda ours, truth, what: torch.testing.assert_close(
            ours.double(), truth.double(), rtol=close, atol=close, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )
        same(visited.values, values, "values")
        assert set(visited.metrics) | {n for n, _ in program.left_out} == set(metrics)
        for name, found in visited.metrics.items():
            same(found, metrics[name], name)
        for fact, found in visited.facts.items():
            assert found.dtype == (torch.int64 if fact.name == "argmax" else torch.float32)
            same(found, facts[fact], fact)
        assert set(visited.input_cotangents) == set(by_input)
        for name, found in visited.input_cotangents.items():
            same(found, by_input[name], name)
        if out is not None:
            wide_close = close if x.dtype == torch.float32 else 8e-3
            torch.testing.assert_close(out.double(), grad, rtol=wide_close, atol=wide_close, equal_nan=True)
        return program


def draw(n=3, v=75, dtype=torch.float32, spread=4.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(n, v, generator=generator)).to(dtype), torch.randint(0, v, (n,), generator=generator)


def row_losses():
    for name, fn in LOSSES.items():
        call = hl.Term(fn).call(None, {})
        parameters = {p.kind for p in call.signature.parameters}
        if call.facts and "segments" not in parameters and not any(f.teacher for f in call.facts):
            yield name


BY_BATCH = ("clip_cov", "kl_cov")  # whose rows meet: no program of one row


@inside
@pytest.mark.parametrize("name", list(row_losses()))
def test_every_row_loss(name):
    if name in BY_BATCH:
        with pytest.raises(Unprintable, match=name):
            Mix(it=LOSSES[name]).check(*draw())
        return
    Mix(it=LOSSES[name]).check(*draw())


def focal_variant(logprob, entropy, *, gamma=1.5, floor=0.05):
    miss = (-logprob.expm1()).clamp(min=floor)
    return -(miss**gamma) * logprob - 0.1 * entropy.sqrt(), {"miss": miss, "easy": miss <= floor}


def smooth_clip(logprob, advantage, old_logprob, *, low=0.2, high=0.3, beta=8.0):
    ratio = (logprob - old_logprob).exp()
    soft = 1 - low + F.softplus(ratio - 1 + low, beta=8.0) - F.softplus(ratio - 1 - high, beta=8.0)
    return -torch.minimum(ratio * advantage, soft * advantage) / beta, {"soft": soft, "soft_max": soft}


def gated(lse, logprob, mean_logprob, sum_p2, flag, count, temper, targets, *, cut=-3.0):
    gate = torch.sigmoid(temper * (logprob - cut)) * (count + 1)
    odd = torch.where(targets > 30, 1.0, 2.0)
    value = torch.where(flag, gate * F.softplus(-logprob), F.huber_loss(lse, mean_logprob, reduction="none"))
    return value * odd + sum_p2.log1p(), {"gate": gate, "count": count}


def spread(hot_entropy, cold_logprob, max_logprob, argmax):
    return F.logsigmoid(hot_entropy - 1) * cold_logprob.tanh(), {"sure": max_logprob > -0.5, "best": argmax}


def learned(logprob, advantage, weight_of):
    return -logprob * advantage.exp() + weight_of**2


TWO = {"hot_entropy": ("entropy", 2.0), "cold_logprob": ("logprob", 0.7)}
MIXES = {
    "ce, z, policy": lambda: Mix(
        ("entropy", "accuracy", "perplexity"),
        ce=LOSSES["cross_entropy"], z=hl.Term(LOSSES["z_loss"], weight=1e-4), rl=LOSSES["grpo"],
    ),
    "smoothing, bonus": lambda: Mix(
        ce=hl.Term(LOSSES["cross_entropy"], label_smoothing=0.1), bonus=LOSSES["entropy_bonus"]
    ),
    "dual clip": lambda: Mix(it=hl.Term(LOSSES["grpo"], dual=3.0, delta=2.0)),
    "reference": lambda: Mix(
        kl=hl.Term(LOSSES["kl_to_reference"], estimator="k3", corrected=True), sg=LOSSES["cispo"], so=LOSSES["sapo"]
    ),
    "focal variant": lambda: Mix(("max_logprob",), it=focal_variant),
    "smooth clip": lambda: Mix(it=smooth_clip, other=hl.Term(smooth_clip, low=0.1, high=0.5)),
    "where, sigmoid, softplus": lambda: Mix(it=gated),
    "temperatures": lambda: Mix(it=hl.Term(spread, facts=TWO), ce=LOSSES["cross_entropy"]),
    "row weight": lambda: Mix(it=hl.Term(LOSSES["cross_entropy"], row_weight="weight_of")),
    "inputs with gradients": lambda: Mix(grad=("advantage", "weight_of"), it=learned, ce=LOSSES["cross_entropy"]),
}  # fmt: skip


@inside
@pytest.mark.parametrize("name", MIXES)
def test_mixes(name):
    MIXES[name]().check(*draw(), where="in place" if "clip" in name else "elsewhere")


def every():
    return Mix(("entropy", "accuracy"), it=gated, ce=LOSSES["cross_entropy"], bonus=LOSSES["entropy_bonus"])


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v", [1, 5, 256, 331])
def test_any_vocabulary(v, dtype):
    every().check(*draw(2, v, dtype), where="in place" if v == 331 else "elsewhere", close=3e-5)


@inside
@pytest.mark.parametrize("loads", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_several_loads_and_what_is_left_of_them(dtype, loads):
    """A load is 128 columns of float32 or 256 of bfloat16: none to five whole ones, and a cut one at either end."""
    unit = 512 // dtype.itemsize
    sizes = (
        (0, 5 * unit + 9),
        (3, 4 * unit),
        (5, unit + 11),
        (0, 3 * unit),
        (8, 2 * unit + 3),
        (8, unit + 16),
    )
    for turn, (begin, v) in enumerate(sizes, loads + (dtype == torch.bfloat16)):
        where = "in place" if turn % 2 else "elsewhere"
        x, y = draw(2, v + begin + (-v - begin) % 64, dtype, spread=2.0)
        x[:, v + begin :] = 50.0  # after the row, which nothing may read
        x = x[:, begin : begin + v] if begin else x[:, :v].contiguous()
        x[0, v - 1], y[0] = 20.0, v - 1  # the very last column counts
        x[1, 0], y[1] = 20.0, 0
        every().check(x, y % v, where=where, close=3e-5, shape=one.Shape(1, loads))


@inside
@pytest.mark.parametrize("keep", (1, 3))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_blocks_that_are_kept_change_no_bit(dtype, keep):
    """In place and elsewhere, with rows that start anywhere: a kept block's gradient is as if it were read again."""
    kept = one.Shape(1, 2, keep=keep)
    unit = kept.block // dtype.itemsize
    in_place = ((0, (keep + 2) * unit, "in place"), (3, (keep + 3) * unit + 7, "in place"))
    elsewhere = ((0, (keep + 2) * unit + 9, "elsewhere"), (3, (keep + 4) * unit - 5, "elsewhere"))
    for begin, v, where in (*in_place, *elsewhere):
        x, y = draw(2, v + begin + (-v - begin) % 64, dtype, spread=2.0)
        x = x[:, begin : begin + v]
        x[0, v - 1], y[0] = 20.0, v - 1
        x[1, -unit - 3], y[1] = 20.0, v - unit  # in a block that is kept
        every().check(x.clone() if begin == 0 else x, y % v, where=where, close=3e-5, shape=kept)
        found = []
        for shape in (kept, kept._replace(keep=0)):
            read = x.clone() if where == "in place" else x
            out = read if where == "in place" else torch.full_like(x, math.nan)
            given = every().inputs(2)
            _, want, program = every().lowered(given)
            T = [1.0 if t is None else t for t in want.temperatures]
            a = one.Arguments(given, [1.0] * len(program.terms), [1.0] * len(program.terms))
            found.append((one.visit(read, y % v, want, T, program, a, out, shape=shape).values, out))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def light():
    return Mix(ce=LOSSES["cross_entropy"], z=hl.Term(LOSSES["z_loss"], weight=1e-4), rl=LOSSES["grpo"])


@inside
@pytest.mark.parametrize("where", ("elsewhere", "in place"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rows_that_programs_share(monkeypatch, dtype, where):
    """The maximum, the target or the only finite columns may be in any of the parts, of which the last may be short."""
    monkeypatch.setattr(one, "multiprocessors", lambda device: 20)
    shape = one.Shape(1, 2, span=1)
    block = shape.block // dtype.itemsize
    for parts, short in ((1, 0), (2, block - 16), (3, 0), (5, 96)):
        v = parts * block - short
        x, y = draw(6, v, dtype, spread=2.0)
        for row in range(5):
            x[row, row * v // 5 + 3] = 30.0
            y[row] = (v - 1, 0, v // 2, row * v // 5 + 3, 7)[row]
        x[4, : v - 9] = -math.inf
        y[torch.tensor([1, 5])] = -100
        light().check(x, y, where=where, close=3e-5, shape=shape, ignore=True)
        light().check(x, y.clamp(min=0), where=where, close=3e-5, shape=shape, scale=-0.5, temperature=0.7)
    assert max(form.parts for form in forms(light())) == 5


def forms(mix):
    _, _, program = mix.lowered(mix.inputs(6))
    return one.spec_of(program).variants


def test_which_rows_are_shared():
    """Long ones of which only e^z is summed, where a gradient is made and the device runs enough programs at once."""
    plan = lambda heavy: SimpleNamespace(
        heavy=heavy, flags={"DENSE": False}, program=SimpleNamespace(want=SimpleNamespace(teachers=()))
    )
    for least, up_to, shared in visits.SHARED:
        size, shape_of = min(up_to, 2 * 262144), visits.shape_of
        needed = size // shared.part
        assert least < size and shared.span and 32 * shared.warps * shared.registers * 5 <= 65536
        assert shape_of(plan(False), size, most=needed) == shared
        for other in (
            shape_of(plan(False), size, most=needed - 1), shape_of(plan(True), size, most=needed),
            shape_of(plan(False), size, False, most=needed), shape_of(plan(False), least, most=needed),
        ):  # fmt: skip
            assert not other.span
    assert not shape_of(plan(False), 2 * 128256, most=99).span


@inside
def test_rows_that_cannot_be_shared(monkeypatch):
    """A vector of two rows, another layout of the output, float16, a softcap: each row has one program."""
    monkeypatch.setattr(one, "SHARED", ((512, 1 << 40, one.Shape(1, 1, span=1)),))
    monkeypatch.setattr(one, "multiprocessors", lambda device: 12)
    x, y = draw(3, 384)
    other = torch.empty(3, 392)[:, 8:]
    for raw, out, options, parts in (
        (x, x.clone(), {}, 3), (x[:, :252], torch.empty(3, 252), {}, 2), (x[:, :251], x[:, :251].clone(), {}, 0),
        (x, torch.empty(3, 388)[:, 3:387], {}, 0), (x.half(), x.half(), {}, 0), (x, x.clone(), {"softcap": 30.0}, 0),
        (x, None, {}, 0), (x, other, {}, 3),
    ):  # fmt: skip
        mix = light()
        given = mix.inputs(3)
        _, want, program = mix.lowered(given)
        a = one.Arguments(given, [1.0] * 3, [1.0] * 3)
        plan = one.spec_of(program)
        plan.variants.clear(), plan.layouts.clear()
        one.visit(raw, y % raw.shape[1], want, [1.0], program, a, out, **options)
        assert [form.parts for form in plan.variants] == [parts], (raw.shape, options)


def test_every_row_that_keeps_blocks_has_them():
    for table in (visits.SHAPES, visits.FORWARD, visits.WITH_TEACHER):
        below = 0
        for most, *shapes in table:
            for shape in shapes:
                assert not shape.keep or (below >= (shape.keep + 2) * shape.block and not shape.ahead), (most, shape)
                rows = 2 if shape.warps > 8 else 3  # at once on a multiprocessor
                assert 32 * shape.warps * shape.registers * rows <= 65536, (most, shape)
            below = most


def test_shapes_for_rows_that_start_anywhere():
    """They take the registers of the second column where a gradient is made, and cost nothing without one."""
    alone = SimpleNamespace(want=SimpleNamespace(teachers=()))
    plan = lambda heavy: SimpleNamespace(heavy=heavy, flags={"DENSE": False}, program=alone)
    for most, light, heavy in visits.SHAPES:
        assert visits.shape_of(plan(False), most) == light
        assert visits.shape_of(plan(False), most, skewed=True) == heavy == visits.shape_of(plan(True), most)
    for most, light, heavy in visits.FORWARD:
        assert visits.shape_of(plan(False), most, False, skewed=True) == light
        assert visits.shape_of(plan(True), most, False) == heavy


@inside
def test_any_layout():
    x, y = draw(3, 300)
    for view in (x[:, 3:150], x[1:, 7:8], x[:, :300:2], x[1:2, 130:].expand(3, -1)):
        every().check(view, y[: len(view)] % view.shape[1], close=3e-5)
    half = x.bfloat16()
    every().check(half[:, 3:150], y[:, None].repeat(1, 2)[:, 1].int() % 147, where="in place", close=3e-5)


@inside
def test_output_of_another_layout():
    x, y = draw(3, 75)
    mix = Mix(ce=LOSSES["cross_entropy"])
    _, want, program = mix.lowered({})
    a = one.Arguments({}, [1.0], [1.0])
    one.visit(x, y, want, [1.0], program, a, first := torch.empty(3, 75))
    for out in (torch.empty(3, 80)[:, 3:78], torch.empty(75, 3).T, torch.empty(3, 150)[:, ::2]):
        one.visit(x, y, want, [1.0], program, a, out, shape=TINY)
        torch.testing.assert_close(out, first, rtol=1e-6, atol=1e-7)


@inside
def test_transformed_logits():
    every().check(*draw(), scale=0.7, softcap=5.0, temperature=1.3, close=3e-5)
    every().check(*draw(), temperature=torch.tensor([0.5, 1.0, 2.0]), close=3e-5)
    MIXES["temperatures"]().check(*draw(), scale=-0.5, temperature=torch.tensor([0.5, 1.0, 2.0]), where="in place")
    for dtype in (torch.float32, torch.bfloat16):  # no vector is cut, and the last block is not full
        every().check(*draw(2, 320, dtype), scale=-0.5, close=3e-5)
        every().check(*draw(2, 320, dtype), softcap=2.0, close=3e-5)


@inside
def test_extreme_logits():
    mix = Mix(("accuracy",), ce=LOSSES["cross_entropy"], z=hl.Term(LOSSES["z_loss"]), bonus=LOSSES["entropy_bonus"])
    x, y = draw(4, 75)
    x[0, ::3], y[0] = -math.inf, 1
    x[1, :64], y[1] = -math.inf, 70
    x[2] = -1e30
    x[2, 5], y[2] = 80.0, 5
    x[3] -= 40.0
    mix.check(x, y)
    mix.check(x[3:] + 1e4, y[3:], close=2e-3)  # lse itself is 1e4
    x[1] = -math.inf  # a row of nothing but -inf
    _, want, program = mix.lowered({})
    a = one.Arguments({}, *([1.0] * len(mix.calls) for _ in "ab"))
    found = one.visit(x, y, want, [1.0], program, a, torch.empty_like(x), shape=TINY)
    truth, softmax = finish(plain.sums(x.double(), y, want, [1.0]), want, [1.0], 75)
    for fact, value in found.facts.items():
        torch.testing.assert_close(value.double(), truth[fact].double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.softmax.max.double(), softmax.max)


@inside
@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_neither_infinite_logits_nor_nan_are_lost_in_a_block(dtype, total):
    """bfloat16 is compared two at a time: each half of a word must keep to itself."""
    ce = hl.Term(LOSSES["cross_entropy"], label_smoothing=0.1 if total else 0.0)
    mix = Mix(("accuracy", "entropy"), ce=ce, bonus=LOSSES["entropy_bonus"])
    x, y = draw(12, 2 * 256 + 19, dtype)
    V = x.shape[1]
    for row in range(6):
        x[row, row::2] = -math.inf
        x[row, 300 + row] = 60.0  # in either half, in any place of a vector
        y[row] = 300 + row if row % 2 else 301 + row
    x[6], x[7] = -x[6].abs(), x[7].abs()
    x[8, 2 * torch.arange(V // 2)] = -math.inf
    y[8] = 7
    mix.check(x[:9], y[:9], close=3e-4)
    x[9, 5], x[10, 4], x[11, V - 1] = math.nan, math.nan, math.nan
    _, want, program = mix.lowered({})
    a = one.Arguments({}, *([1.0] * len(mix.calls) for _ in "ab"))
    x, y = x[8:], y[8:]
    out = torch.zeros_like(x)
    found = one.visit(x, y, want, [1.0], program, a, out, shape=TINY)
    assert found.values[:, 1:].isnan().all() and out[1:].isnan().all()
    assert found.facts[Fact("entropy")][1:].isnan().all()
    assert not found.values[:, :1].isnan().any()


@inside
@pytest.mark.parametrize("where", ["elsewhere", "in place", "nowhere"])
def test_ignored_rows(where):
    x, y = draw(5, 75)
    x[1], x[3] = math.nan, math.nan
    y[1], y[3] = -100, -100
    mix = MIXES["ce, z, policy"]()
    mix.check(x, y, ignore=True, where=where)


@inside
def test_rows_without_gradient_are_written_too():
    x, y = draw(4, 75)
    mix = Mix(it=lambda logprob, count: -logprob * (count > 2))
    given = mix.inputs(4)
    given["count"] = torch.tensor([0, 3, 1, 4])
    _, want, program = mix.lowered(given)
    a = one.Arguments(given, [1.0], [1.0])
    out = torch.full_like(x, math.nan)
    one.visit(x, y, want, [1.0], program, a, out, shape=TINY)
    assert (out[[0, 2]] == 0).all() and (out[[1, 3]] != 0).all()


@inside
def test_no_rows():
    mix = MIXES["ce, z, policy"]()
    _, want, program = mix.lowered(mix.inputs(3))
    a = one.Arguments(mix.inputs(0), *([1.0] * len(mix.calls) for _ in "ab"))
    found = one.visit(torch.empty(0, 75), torch.empty(0, dtype=torch.long), want, [1.0], program, a, None)
    assert found.values.shape == (3, 0)


def lowered(**terms):
    return Mix(**terms).lowered(Mix().inputs(7))[2]


def scaled(logprob, *, by=2.0, power=2.0, low=-1.0, high=1.0, eps=1e-3, fill=0.5, alpha=1.0):
    held = logprob.abs().add(eps, alpha=alpha) ** power
    value = (by * held + torch.full_like(logprob, fill)).clamp(low, high)
    return value + torch.where(logprob > low, logprob, high).nan_to_num(nan=fill), {"gate": (logprob > -eps) * by}


@outside
@pytest.mark.parametrize(
    "fn, options",
    [
        ("grpo", {"low": 0.3}),
        ("grpo", {"low": 0.3, "high": 1e-9}),
        ("grpo", {"low": 0.0, "high": 1.0}),
        ("focal", {"gamma": 1.0}),
        *((scaled, {"power": x}) for x in (1.0, 2.0, 0.5, -1.0, 3.0)),  # of x^0 torch has another derivative
        *((scaled, {name: x}) for name in ("by", "fill", "alpha") for x in (0.0, 1.0, 2.0, 0.5, -1.0, 3.0)),
        *((scaled, {name: x}) for name in ("low", "high", "eps") for x in (0.0, -0.0, 1.0, 1e-40, 1e30)),
    ],
)
def test_another_value_of_an_option_compiles_nothing(fn, options):
    """Whatever the value, the printed function is the same, and takes the float literals as arguments."""
    fn = LOSSES.get(fn, fn)
    plain, other = lowered(it=fn), lowered(it=hl.Term(fn, **options))
    assert plain.source == other.source and plain.function is other.function
    assert len(plain.numbers) == len(other.numbers)
    defaults = {k: p.default for k, p in inspect.signature(fn).parameters.items()}
    if any(defaults[k] != x for k, x in options.items()):
        assert plain.numbers != other.numbers


@outside
def test_a_loss_without_numbers_of_its_own_is_handed_none():
    assert lowered(it=LOSSES["z_loss"]).numbers == ()
    assert lowered(it=lambda logprob: -2.5 * logprob.clamp(min=-3.0)).numbers == ()
    factor = 2.5
    assert lowered(it=lambda logprob: -factor * logprob).numbers == (-2.5, -2.5)


@outside
def test_a_metric_that_cannot_be_printed_is_left_out():
    def mixed(logprob):
        return -logprob, {"rank": logprob.argsort(), "plain": logprob.exp()}

    program = lowered(it=mixed)
    assert program.metrics == ("it/plain",) and program.left_out == (("it/rank", "sort"),)
    program = Mix((lambda logprob: logprob - logprob.mean(), "accuracy"), it=mixed).lowered({})[2]
    assert program.metrics == ("it/plain", "accuracy")


DISGUISED = {
    "sum": lambda logprob: logprob * logprob.sum(), "view": lambda logprob: (logprob.view(1, -1) * 2).view(-1),
    "expand": lambda logprob: logprob.expand(2, logprob.shape[0])[0], "cumsum": lambda logprob: logprob.cumsum(0),
    "softmax": lambda logprob: logprob.softmax(0), "roll": lambda logprob: logprob.roll(1),
    "size": lambda logprob: logprob / logprob.shape[0], "rand": lambda logprob: logprob * torch.rand_like(logprob),
}  # fmt: skip


@outside
@pytest.mark.parametrize("name", DISGUISED)
def test_functions_that_mix_rows_never_lower(name):
    with pytest.raises(Unprintable):
        lowered(it=DISGUISED[name])


@outside
def test_the_loss_and_the_operation_are_named():
    def angular(logprob):
        return torch.atan2(logprob, logprob)

    with pytest.raises(Unprintable, match="atan2 of angular"):
        lowered(it=angular)


if INSIDE:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    KNOWN = ("logprob", "lse", "entropy", "advantage", "old_logprob", "low")
    UNARY = (
        "x.exp()", "x.tanh()", "x.sigmoid()", "x.abs()", "-x", "F.softplus(x)", "F.logsigmoid(x)", "x**2", "F.relu(x)",
        "x.clamp(-1.5, 2.0)", "(x * x + 1).log()", "(x * x + 0.5).sqrt()", "(x.abs() + 1) ** 1.7", "x.detach()",
        "1 / (1 + x * x)", "x.expm1()", "F.silu(x)", "torch.round(x)",
    )  # fmt: skip
    BINARY = (
        "x + y", "x - y", "x * y", "torch.minimum(x, y)", "torch.maximum(x, y)", "torch.where(x > y, x, 2 * y)",
        "x / (1 + y * y)", "x.clamp(max=y)", "x * (y < 0.3)", "x.masked_fill(y > 1, 0.25)", "torch.logaddexp(x, y)",
        "F.huber_loss(x, y, reduction='none')",
    )  # fmt: skip
    trees = st.recursive(
        st.sampled_from(KNOWN) | st.floats(-3, 3, width=16).map(lambda x: f"torch.full_like(lse, {x})"),
        lambda inner: st.tuples(st.sampled_from(UNARY), inner) | st.tuples(st.sampled_from(BINARY), inner, inner),
        max_leaves=8,
    )

    def written(tree):
        """A random function as text; `tanh` holds what an operation sees, so that nothing overflows."""
        if isinstance(tree, str):
            return tree
        form, *inner = tree
        for name, x in zip("xy", inner, strict=False):
            form = re.sub(rf"\b{name}\b", f"(torch.tanh(({written(x)}) / 4) * 4)", form)
        return form

    X, TARGETS = draw(2, 19)

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(trees)
    def test_random_functions(tree):
        code = f"""
def loss(logprob, lse, entropy, advantage, old_logprob, *, low=0.3):
    low = low + torch.zeros_like(lse)
    value = {written(tree)}
    return value + 0 * logprob, {{"twice": 2 * value, "over": value > 0.1234}}
"""
        namespace = {"torch": torch, "F": F}
        exec(code, namespace)
        Mix(it=namespace["loss"]).check(X, TARGETS, close=5e-5)
