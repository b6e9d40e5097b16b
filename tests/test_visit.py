"""One launch against the two: the printed loss inside the sweep, under Triton's interpreter in a process of its own."""

import math
import os
import subprocess
import sys
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

import headloss as hl
from headloss.facts import CONSTANT, Fact, Want, coefficients, finish
from headloss.losses import LOSSES
from headloss.metrics import read_metrics
from headloss.plan import Env, Shape, _flat_arguments, trace

pytest.importorskip("triton")
INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INSIDE, reason="runs under the interpreter, in a process of its own")

plain = import_module("headloss.backends.torch")
from headloss.backends.program import lower  # noqa: E402

if INSIDE:
    one = import_module("headloss.backends.triton_visit")
    TINY = one.Shape(1, 1, 1, 1, 1)


@pytest.mark.timeout(300)
@pytest.mark.skipif(INSIDE, reason="this is the other process")
def test_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


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
        }  # fmt: skip

    def lowered(self, given, dtype=torch.float32):
        names = {n for call in self.calls.values() for n in call.input_names}
        names |= {n for _, call in self.metrics for n in call.input_names}
        shapes = {
            n: Shape("row" if x.ndim else "scalar", x.dtype, (), n in self.grad) for n, x in given.items() if n in names
        }
        wide = {n: s._replace(dtype=dtype) if s.dtype == torch.float32 else s for n, s in shapes.items()}
        traces = {n: trace(call, wide, dtype, "cpu", False) for n, call in self.calls.items()}
        facts = [f for n, c in self.calls.items() for f in c.facts if f not in traces[n].unused]
        want = Want([*facts, *(f for _, c in self.metrics for f in c.facts)])
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
            value, cotangents, found = traces[name].joint(*_flat_arguments(call, env, seed, traces[name].frozen))
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

    def check(self, x, y, *, temperature=1.0, close=1e-5, valid=None, ignore=False, where="beside", **options):
        n = len(x)
        given = self.inputs(n)
        _, want, program = self.lowered(given)
        T = [temperature if t is None else t for t in want.temperatures]
        generator = torch.Generator().manual_seed(9)
        bases = {name: torch.rand(n, generator=generator) + 0.5 for name in self.terms}
        first = next(iter(bases))
        bases[first] = 0.125
        factors = dict.fromkeys(self.terms, 0.5) | {first: torch.tensor(1.5)}
        keep = torch.ones(n) if valid is None else valid.float()
        keep = keep * (y != -100) if ignore else keep
        arguments = one.Arguments(given, {k: c.options for k, c in self.calls.items()}, bases, factors)
        read = x.clone() if where == "in place" else x
        out = read if where == "in place" else torch.full_like(x, math.nan) if where == "beside" else None
        visited = one.visit(
            read, y, want, T, program, arguments, out, valid_C=valid, ignore=ignore, shape=TINY, **options
        )
        known = y.clamp(min=0) if ignore else y
        wide = temperature.double() if isinstance(temperature, torch.Tensor) else temperature
        truth_x = torch.where(keep[:, None].bool(), x, 0.0) if (ignore or valid is not None) else x
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
        parameters = {p.kind for p in hl.Term(fn).call(None, {}).signature.parameters}
        teacher = any(f.teacher for f in hl.Term(fn).call(None, {}).facts)
        if "segments" not in parameters and not teacher:
            yield name


@inside
@pytest.mark.parametrize("name", list(row_losses()))
def test_every_row_loss(name):
    Mix(it=LOSSES[name]).check(*draw())
