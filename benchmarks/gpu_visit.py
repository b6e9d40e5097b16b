"""One launch against the speed of memory: `python benchmarks/gpu_visit.py`, on CUDA.

First values, metrics and gradients are held against float64 next to eager in the same dtype; no time is reported when
they are wrong.  Then, each as a ratio to the floor, one read and one write of the logits (an in-place multiplication),
measured in the same run:

    ce     cross-entropy alone, gradient in place
    mix    cross-entropy + z-loss + clipped policy gradient, entropy and accuracy measured, all policy metrics
    peers  Liger's and torch.compile's cross-entropy, forward and backward, on the same rows

`--check` stops before the clock starts, `--configs` times block shapes instead, `--overhead` what a call costs the host
(gpu_overhead.py), `--long` rows that several programs share, against one program per row.  The latter two add to the
results that are there already.  The results go to benchmarks/results, or to the folder $OUT.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

import headloss as hl
from headloss.backends.triton.printer.program import lower
from headloss.backends.triton.visit import SHAPES, SHARED, Arguments, Shape, visit
from headloss.facts import Want
from headloss.losses import cross_entropy, entropy_bonus, grpo, z_loss
from headloss.metrics import read_metrics
from headloss.trace.trace import InputSpec as Layout
from headloss.trace.trace import trace

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import DEVICE, save, say, timed
from gpu_overhead import overhead

from proof.record import RESULTS, short


class Mix:
    """An objective of row terms, lowered."""

    def __init__(self, metrics: tuple[str, ...] = (), **terms: hl.Term) -> None:
        self.terms = terms
        self.calls = {name: term.call(None, {}) for name, term in terms.items()}
        own = list(read_metrics(metrics))
        self.names = sorted({n for call in self.calls.values() for n in call.input_names})
        layouts = {n: Layout("row", torch.float32, ()) for n in self.names}
        traces = {n: trace(call, layouts, torch.float32, DEVICE, False) for n, call in self.calls.items()}
        facts = [f for n, call in self.calls.items() for f in call.facts if f not in traces[n].unused]
        self.want = Want([*facts, *(f for _, call in own for f in call.facts)])
        self.program = lower({n: (self.calls[n], traces[n]) for n in terms}, self.want, layouts, own)

    def arguments(self, N: int) -> Arguments:
        generator = torch.Generator(DEVICE).manual_seed(7)
        draw = lambda: torch.rand(N, generator=generator, device=DEVICE)
        known = {"advantage": 2 * draw() - 1, "old_logprob": -6 * draw() - 3, "ref_logprob": -6 * draw() - 3}
        return Arguments(
            {n: known[n] for n in self.names},
            [1.0 / N] * len(self.terms),
            [float(t.weight) for t in self.terms.values()],
        )


def ce() -> Mix:
    return Mix(ce=hl.Term(cross_entropy))


def mix() -> Mix:
    return Mix(
        ("entropy", "accuracy"),
        ce=hl.Term(cross_entropy), z=hl.Term(z_loss, weight=1e-4), rl=hl.Term(grpo),
    )  # fmt: skip


def sums_alone() -> Mix:
    """Nothing but e^z is summed."""
    return Mix(ce=hl.Term(cross_entropy), z=hl.Term(z_loss, weight=1e-4), rl=hl.Term(grpo))


def mix_with_bonus() -> Mix:
    return Mix(
        ("entropy", "accuracy"),
        ce=hl.Term(cross_entropy), z=hl.Term(z_loss, weight=1e-4), rl=hl.Term(grpo),
        bonus=hl.Term(entropy_bonus, weight=1e-2),
    )  # fmt: skip


# ---------------------------------------------------------------- right?


def eager(x: torch.Tensor, y: torch.Tensor, mix: Mix, a: Arguments, scale: float, cap: float | None) -> dict[str, Any]:
    """Each term by definition, in the dtype of `x` or float32, and the gradient by autograd."""
    x = x.detach().clone().requires_grad_()
    z = (x if x.dtype == torch.float64 else x.float()) * scale
    z = z if cap is None else (z / cap).tanh() * cap
    logp = z.log_softmax(-1)
    p = logp.exp()
    known = {
        "lse": z.logsumexp(-1),
        "logprob": logp.gather(-1, y[:, None])[:, 0],
        "mean_logprob": logp.mean(-1),
        "entropy": -(p * logp.clamp(min=-1e4)).sum(-1),
        "argmax": z.argmax(-1),
    }
    inputs = {n: v.to(z.dtype) for n, v in a.inputs.items()}
    values, metrics, loss = [], {}, torch.zeros((), dtype=z.dtype, device=DEVICE)
    for (name, call), base, factor in zip(mix.calls.items(), a.bases, a.factors, strict=True):
        given = {q.name: known[q.name] if q.kind == "fact" else inputs[q.name] for q in call.signature.parameters}
        value, found = call.fn(**given, **call.options)
        values.append(base * value)
        metrics |= {f"{name}/{k}": m for k, m in found.items()}
        loss = loss + (factor * values[-1]).sum()
    loss.backward()
    metrics |= {"entropy": known["entropy"], "accuracy": known["argmax"] == y}
    return {"values": torch.stack(values), "gradient": x.grad, **metrics}


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative to the largest of the truth: gradients are far below 1."""
    x, truth = x.detach().double(), truth.detach().double()
    same = (x == truth) | (x.isnan() & truth.isnan())
    return float((x - truth).abs().masked_fill(same, 0.0).amax() / truth.abs().amax().clamp(min=1e-30))


def draw(n: int, v: int, dtype: torch.dtype, spread: float = 3.0) -> torch.Tensor:
    return (spread * torch.randn(n, v, device=DEVICE)).to(dtype)


def long_cases() -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    for dtype, n, v in ((torch.bfloat16, 200, 262144), (torch.bfloat16, 9, 256008), (torch.float32, 40, 128256)):
        yield f"{dtype} {n}x{v}", draw(n, v, dtype), {}
        yield f"{dtype} {n}x{v} in place, scale", draw(n, v, dtype), {"inplace": True, "scale": 0.7}


def cases() -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    for dtype in (torch.bfloat16, torch.float32):
        for n, v in ((33, 128256), (17, 50257), (5, 262144), (64, 1003), (9, 5)):
            yield f"{dtype} {n}x{v}", draw(n, v, dtype), {}
        yield f"{dtype} columns 3 to 30001 of 40000", draw(9, 40000, dtype)[:, 3:30001], {}
    yield "bfloat16 softcap, scale", draw(9, 32003, torch.bfloat16), {"cap": 15.0, "scale": 0.7}
    yield "float16 in place", draw(9, 50257, torch.float16), {"inplace": True}
    yield "bfloat16 in place", draw(400, 32000, torch.bfloat16), {"inplace": True}
    yield "float32 offset 1e4", draw(9, 32003, torch.float32) + 1e4, {}


def check(objective: Mix, cases: Iterator[tuple[str, torch.Tensor, dict[str, Any]]]) -> list[str]:
    wrong = []
    torch.manual_seed(0)
    for name, logits, options in cases:
        N, V = logits.shape
        y = torch.randint(0, V, (N,), device=DEVICE)
        a = objective.arguments(N)
        scale, cap = options.get("scale", 1.0), options.get("cap")
        truth = eager(logits.double(), y, objective, a, scale, cap)
        plain = eager(logits, y, objective, a, scale, cap)
        again = []
        for _ in range(2):
            read = logits.clone() if options.get("inplace") else logits
            out = read if options.get("inplace") else torch.full_like(logits.contiguous(), math.nan)
            got = visit(read, y, objective.want, [1.0], objective.program, a, out, scale=scale, softcap=cap)
            again.append(out)
        for key, value in {"values": got.values, "gradient": out, **got.metrics}.items():
            ours, theirs = error(value, truth[key]), error(plain[key], truth[key])
            if not ours <= 2 * theirs + 1e-5:
                wrong.append(f"{name} {key}: {ours:.2e}, eager {theirs:.2e}")
        if not torch.equal(*again):
            wrong.append(f"{name}: not the same bits twice")
    return wrong


# ---------------------------------------------------------------- fast?


class Problem:
    def __init__(self, N: int, V: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.N, self.V = N, V
        self.x = torch.empty(N, V, dtype=dtype, device=DEVICE).normal_(std=3.0)
        self.kept = self.x.clone()
        self.y = torch.randint(0, V, (N,), device=DEVICE)

    def restore(self) -> None:
        self.x.copy_(self.kept)

    def floor(self) -> float:
        return timed(lambda: self.x.mul_(1.0), self.restore)

    def ms(self, mix: Mix, out: bool = True, **options: Any) -> float:
        a = mix.arguments(self.N)
        target = self.x if out else None
        return timed(lambda: visit(self.x, self.y, mix.want, [1.0], mix.program, a, target, **options), self.restore)


def table(peers: bool) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []

    def line(what: str, shape: str, ms: float, floor: float, target: str, good: bool) -> None:
        lines.append({"what": what, "shape": shape, "ms": ms, "floor_ms": floor, "ratio": floor / ms})
        lines[-1].update(target=target, good=good)
        say(f"{what:40s} {shape:14s} {ms:8.4f} ms  floor {floor:8.4f} ms  {floor / ms:6.1%}  wanted {target} {good}")

    sizes = ((8192, 128256, 0.77), (8192, 151936, 0.0), (16384, 32000, 0.85), (4096, 262144, 0.68))
    for N, V, least in (*sizes, (8192, 102400, 0.0), (16384, 64000, 0.0), (32768, 8192, 0.0)):
        p, shape = Problem(N, V), f"{N}x{V}"
        floor = p.floor()
        alone = p.ms(ce())
        line("ce", shape, alone, floor, f">= {least:.0%}" if least else "-", floor / alone >= least)
        if V != 128256:
            continue
        ms = p.ms(mix())
        line("ce + z + policy, entropy and accuracy", shape, ms, floor, "<= 1.08x ce", ms <= 1.08 * alone)
        ms = p.ms(mix_with_bonus())
        line("the same, entropy differentiable too", shape, ms, floor, "-", True)
        ms = p.ms(mix(), out=False)
        line("the same without a gradient", shape, ms, floor, "-", True)
        y = p.y
        p.y = torch.where(torch.rand(N, device=DEVICE) < 0.5, y, -100)
        ms = p.ms(ce(), ignore=True)
        line("ce, half the rows ignored", shape, ms, floor, "-", True)
        p.y = y
        for name, step in (other(p) if peers else {}).items():
            ms = timed(step, p.restore, repeats=9)
            line(f"{name} ce", shape, ms, floor, "ours 1.6x faster", ms >= 1.6 * alone)
    for odd, even, N in ((50257, 50304, 16384), (151665, 151680, 8192)):
        q, r = Problem(N, odd), Problem(N, even)
        ms, floor = q.ms(ce()), r.ms(ce())
        line("ce, odd width, against the next even", f"{N}x{odd}", ms, floor, "<= 1.15x", ms <= 1.15 * floor)
    return lines


def other(p: Problem) -> dict[str, Callable[[], object]]:
    """Peers that are installed: forward and backward, to d logits."""
    found: dict[str, Callable[[], object]] = {}

    def step(loss: Callable[..., torch.Tensor]) -> Callable[[], object]:
        def run() -> None:
            x = p.x.detach().requires_grad_()
            loss(x, p.y).backward()

        return run

    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as Liger

        found["Liger"] = step(lambda x, y: Liger.apply(x, y, None)[0])
    compiled = torch.compile(lambda x, y: torch.nn.functional.cross_entropy(x.float(), y))
    found["torch.compile"] = step(compiled)
    return found


WIDE = [Shape(32, 4), Shape(32, 4, keep=1), Shape(16, 4, registers=64), Shape(8, 4, registers=80), Shape(32, 2)]
NARROW = [Shape(8, 4, registers=80), Shape(16, 4, registers=64), Shape(16, 2, registers=64), Shape(4, 4), Shape(4, 2)]


OBJECTIVES = {"ce": ce, "mix": mix}


def configs() -> list[dict[str, Any]]:
    """Milliseconds of each block shape on a few sizes."""
    lines: list[dict[str, Any]] = []
    for what, N, V, shapes in (
        ("ce", 8192, 128256, WIDE),
        ("mix", 8192, 128256, WIDE),
        ("ce", 4096, 262144, WIDE),
        ("ce", 8192, 102400, WIDE),
        ("mix", 8192, 102400, WIDE),
        ("ce", 8192, 64000, NARROW),
        ("mix", 8192, 64000, NARROW),
        ("ce", 16384, 32000, NARROW),
        ("mix", 16384, 32000, NARROW),
        ("ce", 16384, 12288, NARROW),
        ("mix", 16384, 12288, NARROW),
    ):
        objective = OBJECTIVES[what]()
        p = Problem(N, V)
        floor = p.floor()
        say(f"{N}x{V}: floor {floor:.4f} ms")
        for shape in shapes:
            ms = timed(lambda p=p: visit_ce(p, objective, shape), p.restore, repeats=9)  # noqa: B023
            lines.append({"what": what, "N": N, "V": V, "shape": shape, "ms": ms, "ratio": floor / ms})
            say(f"{what} {N}x{V} {tuple(shape)!s:24s} {ms:.4f} ms {floor / ms:6.1%}")
    return lines


def long_rows() -> list[dict[str, Any]]:
    """Cross-entropy of rows that programs share, against one program per row."""
    lines: list[dict[str, Any]] = []
    shapes = ((4096, 262144, torch.bfloat16), (4096, 256000, torch.bfloat16), (2048, 128256, torch.float32))
    for N, V, dtype in shapes:
        p = Problem(N, V, dtype)
        floor = p.floor()
        for what, shape in (("shared", SHARED[-1][2]), ("one program per row", SHAPES[-1][1])):
            ms = p.ms(ce(), shape=shape)
            lines.append({"what": what, "shape": f"{N}x{V}", "dtype": short_name(dtype), "ms": ms, "ratio": floor / ms})
            say(f"{what:20s} {N}x{V} {dtype} {ms:.4f} ms, floor {floor:.4f} ms, {floor / ms:6.1%}")
    return lines


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def two_streams() -> list[str]:
    """Programs that wait for each other, while others of their kind and products do so at the same time."""
    objective, found, wrong = sums_alone(), [], []
    x, y, m = (
        draw(512, 262144, torch.bfloat16),
        torch.randint(0, 262144, (512,), device=DEVICE),
        draw(4096, 4096, torch.bfloat16),
    )
    a = objective.arguments(512)
    run = lambda: visit(x, y, objective.want, [1.0], objective.program, a, torch.empty_like(x)).values
    alone = run()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                m @ m
                found.append(run())
    torch.cuda.synchronize()
    if not all(torch.equal(alone, x) for x in found):
        wrong.append("other bits on several streams at once")
    return wrong


def visit_ce(p: Problem, objective: Mix, shape: Shape) -> None:
    visit(p.x, p.y, objective.want, [1.0], objective.program, objective.arguments(p.N), p.x, shape=shape)


def warm(shapes: list[Shape], part: int, parts: int) -> None:
    """Compile some of the shapes, into Triton's own cache."""
    p = Problem(132, 32000)
    for shape, what in [(shape, what) for shape in shapes for what in OBJECTIVES][part::parts]:
        visit_ce(p, OBJECTIVES[what](), shape)
    torch.cuda.synchronize()


def circumstances() -> dict[str, str]:
    return {
        "command": " ".join(["python benchmarks/gpu_visit.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip


def add(what: str, found: dict[str, Any]) -> None:
    """Put measurements into the results there are."""
    path = Path(os.environ.get("OUT") or RESULTS, f"gpu_visit_{short(DEVICE)}.json")
    results = json.loads(path.read_text()) if path.exists() else {}
    results[what] = {**circumstances(), **found}
    save("gpu_visit", results)


def add_long() -> None:
    wrong = check(sums_alone(), long_cases()) + two_streams()
    say("all right" if not wrong else "WRONG:\n" + "\n".join(wrong))
    if not wrong:
        add("long rows", {"table": long_rows()})
    sys.exit(bool(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", action="store_true", help="time block shapes")
    parser.add_argument("--check", action="store_true", help="only hold the numbers against float64")
    parser.add_argument("--overhead", action="store_true", help="time what a call costs the host")
    parser.add_argument("--long", action="store_true", help="time rows that programs share")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--warm", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = list(dict.fromkeys([*WIDE, *NARROW]))
    if args.warm:
        return warm(shapes, *args.warm)
    if args.overhead:
        return add("overhead, us", overhead(say))
    if args.long:
        return add_long()
    if args.configs:
        jobs = [subprocess.Popen([sys.executable, __file__, "--warm", str(i), "10"]) for i in range(10)]
        say("compiled", [job.wait() for job in jobs])
    say(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    wrong = [] if args.configs else check(mix_with_bonus(), cases()) + check(sums_alone(), long_cases())
    say("all right" if not wrong else "WRONG:\n" + "\n".join(wrong))
    results: dict[str, Any] = {**circumstances(), "wrong": wrong, "shapes": SHAPES}
    if not wrong and not args.check:
        results["configs" if args.configs else "table"] = configs() if args.configs else table(not args.no_peers)
        save("gpu_visit_configs" if args.configs else "gpu_visit", results)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
