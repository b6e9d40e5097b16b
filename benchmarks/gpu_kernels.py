"""The two kernels against the speed of memory: `python benchmarks/gpu_kernels.py [--configs]`, on a CUDA device.

First the numbers are held against float64 next to eager in the same dtype; no time is reported when they are wrong.
Then, each as a ratio to a floor measured in the same run:

    facts          logprob + entropy         against a read-only sweep of the same bytes
    facts + pull   two launches, in place    against a read-only sweep and an in-place multiplication
    few rows       64 x 262144               against the bandwidth of the large read-only sweep
    odd widths     50257 and 151665          against the next multiple of 64

`--configs` times a few block shapes for each kernel instead.  The results go to
benchmarks/results, or to the folder $OUT.
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import headloss as hl
from headloss.facts import Fact, Softmax, Want, coefficients, finish

sys.path.insert(0, str(Path(__file__).parent.parent))
from proof.record import short, write

backend: Any = import_module("headloss.backends.triton.sweeps")
Shape = backend.Shape
START = time.time()
DEVICE = "cuda"
AHEAD = 2_000_000  # cycles, about 1 ms
FACTS = ("lse", "logprob", "mean_logprob", "entropy", "sum_p2", "max_logprob", "argmax")
POLICY = Want([Fact("logprob"), Fact("entropy")])
MIX = Want([Fact("lse"), Fact("logprob"), Fact("entropy")])


def say(*words: object) -> None:
    print(f"[{time.time() - START:6.1f}s]", *words, flush=True)


def save(name: str, results: dict[str, Any]) -> None:
    say("written to", write(f"{name}_{short(DEVICE)}", results).name)


# ---------------------------------------------------------------- right?


def eager(logits: torch.Tensor, targets: torch.Tensor, facts: list[Fact], scale: float, cap: float | None) -> Any:
    """Each fact by its definition, in the dtype of `logits` or float32, differentiable."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    z = z * scale
    z = z if cap is None else (z / cap).tanh() * cap
    values = {}
    for fact in facts:
        s = z / (fact.temperature or 1.0)
        logp = s.log_softmax(-1)
        p = logp.exp()
        finite = logp.clamp(min=-1e4)
        match fact.name:
            case "lse":
                values[fact] = s.logsumexp(-1)
            case "logprob":
                values[fact] = logp.gather(-1, targets[:, None])[:, 0]
            case "mean_logprob":
                values[fact] = logp.mean(-1)
            case "entropy":
                values[fact] = -(p * finite).sum(-1)
            case "sum_p2":
                values[fact] = (p * p).sum(-1)
            case "max_logprob":
                values[fact] = logp.amax(-1).detach()
            case "argmax":
                values[fact] = s.argmax(-1)
    return values


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    x, truth = x.detach().double(), truth.detach().double()
    same = (x == truth) | (x.isnan() & truth.isnan())
    return float(((x - truth).abs() / (1 + truth.abs())).masked_fill(same, 0.0).amax()) if x.numel() else 0.0


def cases() -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    def draw(n: int, v: int, dtype: torch.dtype, spread: float = 3.0) -> torch.Tensor:
        return (spread * torch.randn(n, v, device=DEVICE)).to(dtype)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for n, v in ((33, 128256), (17, 50257), (5, 151665), (3, 262144), (64, 1003), (9, 5), (7, 2048)):
            yield f"{dtype} {n}x{v}", draw(n, v, dtype), {}
        yield f"{dtype} columns 3 to 30001 of 40000", draw(9, 40000, dtype)[:, 3:30001], {}
        yield f"{dtype} softcap, scale", draw(9, 32003, dtype), {"cap": 15.0, "scale": 0.7}
        yield f"{dtype} peaked", draw(9, 50257, dtype, 30.0), {}
        yield f"{dtype} in place", draw(9, 50257, dtype), {"inplace": True}
    offset = draw(9, 32003, torch.float32)
    yield "float32 offset 1e4", offset + 1e4, {}
    yield "float32 offset -1e4", offset - 1e4, {}
    holes = draw(9, 32003, torch.bfloat16)
    holes[:, ::3] = -math.inf
    yield "bfloat16 with -inf columns", holes, {"without": ("mean_logprob",)}


def check() -> list[str]:
    """Facts and gradients against float64, at most twice eager's error in the same dtype."""
    wrong = []
    torch.manual_seed(0)
    for name, logits, options in cases():
        scale, cap, without = options.get("scale", 1.0), options.get("cap"), options.get("without", ())
        facts = [Fact(f) for f in FACTS if f not in without] + [Fact("entropy", 2.0), Fact("logprob", 0.7)]
        want = Want(facts)
        N, V = logits.shape
        targets = torch.randint(0, V, (N,), device=DEVICE)
        if "-inf" in name:
            targets = targets // 3 * 3 + 1
        temperatures = [t or 1.0 for t in want.temperatures]
        weights = {f: torch.rand(N, device=DEVICE) + 0.5 for f in want.facts if f.name not in ("argmax", "max_logprob")}
        truth, plain = {}, {}
        for dtype, into in ((torch.float64, truth), (logits.dtype, plain)):
            x = logits.detach().clone().to(dtype).requires_grad_()
            into.update(eager(x, targets, facts, scale, cap))
            sum((weights[f].to(into[f].dtype) * into[f]).sum() for f in weights).backward()
            into["grad"] = x.grad
        partial = backend.sums(logits, targets, want, temperatures, scale=scale, softcap=cap)
        got, softmax = finish(partial, want, temperatures, V)
        pulls = coefficients(got, weights, want, V)
        out = logits.clone() if options.get("inplace") else torch.full_like(logits.contiguous(), math.nan)
        read = out if options.get("inplace") else logits
        backend.pull(read, targets, softmax, pulls, temperatures, out, scale=scale, softcap=cap)
        for key, value in {**got, "grad": out}.items():
            ours, theirs = error(value, truth[key]), error(plain[key], truth[key])
            if not ours <= 2 * theirs + 2e-6 or not torch.equal(value.isfinite(), truth[key].isfinite()):
                wrong.append(f"{name} {key}: {ours:.2e}, eager {theirs:.2e}")
        again = backend.sums(logits, targets, want, temperatures, scale=scale, softcap=cap)
        if not all(torch.equal(x, y) for x, y in zip(again.moments[0], partial.moments[0], strict=True)):
            wrong.append(f"{name}: not the same bits twice")
    return wrong


def check_large() -> list[str]:
    """More than 2^31 elements: the last rows are right, in place."""
    N, V = 16500, 131077
    x = torch.empty(N, V, dtype=torch.bfloat16, device=DEVICE).normal_(std=3.0)
    targets = torch.randint(0, V, (N,), device=DEVICE)
    rows = torch.tensor([0, 1, 8191, 16383, 16384, 16385, N - 2, N - 1], device=DEVICE)
    sample = x[rows].double().requires_grad_()
    truth = eager(sample, targets[rows], list(POLICY.facts), 1.0, None)
    sum(v.sum() for v in truth.values()).backward()
    got, softmax = finish(backend.sums(x, targets, POLICY, [1.0]), POLICY, [1.0], V)
    ones = {f: torch.ones(N, device=DEVICE) for f in POLICY.facts}
    backend.pull(x, targets, softmax, coefficients(got, ones, POLICY, V), [1.0], x)
    wrong = [f"large {f}: {error(v[rows], truth[f]):.2e}" for f, v in got.items() if error(v[rows], truth[f]) > 1e-5]
    if error(x[rows], sample.grad) > 4e-3:
        wrong.append(f"large grad: {error(x[rows], sample.grad):.2e}")
    return wrong


# ---------------------------------------------------------------- fast?


@triton.jit
def read_kernel(x_ptr, out_ptr, V, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """As little as can be done with a row that is read: a lane's maximum."""
    row, part = tl.program_id(0), tl.program_id(1)
    x_ptr += row.to(tl.int64) * stride + part * WIDTH
    j = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + j
        top = tl.maximum(
            top, tl.load(x_ptr + at, mask=part * WIDTH + at < V, other=-float("inf"), eviction_policy="evict_first")
        )
    tl.store(out_ptr + row * tl.num_programs(1) + part, tl.max(top, axis=0))


def read_only(x: torch.Tensor, width: int = 32768, block: int = 8192) -> Callable[[], object]:
    N, V = x.shape
    parts = triton.cdiv(V, width)
    out = torch.empty(N, parts, device=DEVICE)
    return lambda: read_kernel[(N, parts)](x, out, V, x.stride(0), BLOCK=block, WIDTH=width, num_warps=8)


def timed(fn: Callable[[], object], before: Callable[[], object] | None = None, repeats: int = 15) -> float:
    """Median milliseconds of device time, each run after the caches were flushed and the buffers restored.

    The device sleeps first, so that the host is ahead of it: what a call costs the host is `gpu_overhead`'s.
    """
    flush = torch.empty(256 << 20, dtype=torch.int8, device=DEVICE)
    for _ in range(3):
        fn()
    marks = []
    for _ in range(repeats):
        if before is not None:
            before()
        flush.zero_()
        torch.cuda._sleep(AHEAD)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        fn()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    times = sorted(b.elapsed_time(e) for b, e in marks)
    return times[len(times) // 2]


def replayed(fns: list[Callable[[], object]], repeats: int = 20) -> float:
    """Median milliseconds of one of `fns`, which use different buffers, in a graph of many: without its own launch."""
    for fn in fns:
        fn()
    fns = fns * 8
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for fn in fns:
            fn()
    return timed(graph.replay, repeats=repeats) / len(fns)


class Problem:
    """Logits of a shape with what the sweeps need, and a copy to restore them from."""

    def __init__(self, N: int, V: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.N, self.V = N, V
        self.x = (3 * torch.randn(N, V, device=DEVICE)).to(dtype) if N * V < 1 << 28 else self._large(N, V, dtype)
        self.kept = self.x.clone()
        self.targets = torch.randint(0, V, (N,), device=DEVICE)
        self.ones = {f: torch.rand(N, device=DEVICE) for f in MIX.facts}

    @staticmethod
    def _large(N: int, V: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(N, V, dtype=dtype, device=DEVICE).normal_(std=3.0)

    @property
    def bytes(self) -> int:
        return self.x.numel() * self.x.element_size()

    def restore(self) -> None:
        self.x.copy_(self.kept)

    def facts(self, want: Want = POLICY, **options: Any) -> Any:
        return backend.sums(self.x, self.targets, want, [1.0], **options)

    def pulls(self) -> tuple[Softmax, Any]:
        got, softmax = finish(self.facts(MIX), MIX, [1.0], self.V)
        return softmax, coefficients(got, self.ones, MIX, self.V)

    def pull(self, softmax: Softmax, pulls: Any, **options: Any) -> None:
        backend.pull(self.x, self.targets, softmax, pulls, [1.0], self.x, **options)

    def read_ms(self) -> float:
        return min(timed(read_only(self.x)), timed(read_only(self.x, width=8192)), timed(lambda: self.x.amax(-1)))

    def inplace_ms(self) -> float:
        return timed(lambda: self.x.mul_(1.0), self.restore)


def table() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []

    def line(what: str, shape: str, ms: float, floor: float, target: str, good: bool, **more: Any) -> None:
        lines.append({"what": what, "shape": shape, "ms": ms, "floor_ms": floor, "ratio": floor / ms, **more})
        lines[-1].update(target=target, good=good)
        say(f"{what:34s} {shape:16s} {ms:8.4f} ms  floor {floor:8.4f} ms  {floor / ms:6.1%}  wanted {target} {good}")

    p = Problem(8192, 151936)
    read = p.read_ms()
    bandwidth = p.bytes / read
    ms = timed(p.facts)
    line("facts, logprob + entropy", "8192x151936", ms, read, ">= 85%", read / ms >= 0.85, tb_s=bandwidth / 1e9)
    source = hl.Logits(p.x)
    ms = timed(lambda: hl.row_facts(source, p.targets, want=("logprob", "entropy"), host_read=False))
    line("row_facts, the whole call", "8192x151936", ms, read, "-", True)
    ms = timed(lambda: p.facts(Want([Fact(f) for f in FACTS])))
    line("facts, all seven", "8192x151936", ms, read, "-", True)
    ms = timed(lambda: p.facts(Want([Fact(f) for f in ("logprob", "entropy")] + [Fact("lse", 2.0)])))
    line("facts, a second temperature", "8192x151936", ms, read, "-", True)

    p = Problem(8192, 128256)
    read, inplace = p.read_ms(), p.inplace_ms()
    first = timed(lambda: p.facts(MIX))
    line("facts, lse + logprob + entropy", "8192x128256", first, read, "-", True)
    softmax, pulls = p.pulls()
    second = timed(lambda: p.pull(softmax, pulls), p.restore)
    line("pull, a b y, in place", "8192x128256", second, inplace, "-", True)

    def both() -> None:
        p.facts(MIX)
        p.pull(softmax, pulls)

    ms = timed(both, p.restore)
    line("facts + pull", "8192x128256", ms, read + inplace, "<= 1.10x", ms <= 1.10 * (read + inplace))

    few = [Problem(64, 262144) for _ in range(8)]
    ideal = few[0].bytes / bandwidth
    floor = min(replayed([read_only(q.x, width) for q in few]) for width in (8192, 32768))
    ms = replayed([q.facts for q in few])
    line("facts, few rows", "64x262144", ms, ideal, ">= 60%", ideal / ms >= 0.6, read_only_ms=floor)
    ms = replayed([lambda q=q: q.facts(batch_invariant=False) for q in few])
    line("facts, few rows, rows may decide", "64x262144", ms, ideal, "-", True, read_only_ms=floor)
    line("a read-only sweep of few rows", "64x262144", floor, ideal, "-", True)

    for odd, even, N in ((50257, 50304, 16384), (151665, 151680, 8192)):
        shape = f"{N}x{odd}"
        q, r = Problem(N, odd), Problem(N, even)
        ms, floor = timed(q.facts), timed(r.facts)
        line("facts, odd width", shape, ms, floor, "<= 1.15x", ms <= 1.15 * floor)
        of_q, of_r = q.pulls(), r.pulls()
        ms = timed(lambda q=q, of=of_q: q.pull(*of), q.restore)
        floor = timed(lambda r=r, of=of_r: r.pull(*of), r.restore)
        line("pull, odd width", shape, ms, floor, "<= 1.15x", ms <= 1.15 * floor)
    return lines


SUMS = [
    Shape(16384, 128, 4, 1, 4), Shape(16384, 128, 2, 1, 4), Shape(32768, 128, 4, 1, 4), Shape(32768, 256, 2, 1, 8),
    Shape(1 << 19, 128, 4, 1, 4), Shape(16384, 64, 4, 1, 2),
]  # fmt: skip
PULL = [
    Shape(4096, 128, 4, 1, 4), Shape(8192, 128, 4, 1, 4), Shape(8192, 128, 2, 3, 4), Shape(2048, 64, 4, 1, 2),
    Shape(8192, 128, 4, 2, 4), Shape(32768, 256, 2, 3, 8),
]  # fmt: skip


def configs() -> list[dict[str, Any]]:
    """Milliseconds of each block shape, and of the floors, on a few sizes."""
    lines: list[dict[str, Any]] = []
    for N, V in ((8192, 151936), (16384, 50257), (16384, 50304), (16384, 32000)):
        p = Problem(N, V)
        read, inplace = p.read_ms(), p.inplace_ms()
        say(f"{N}x{V}: read {read:.4f} ms ({p.bytes / read / 1e9:.2f} TB/s), in place {inplace:.4f} ms")
        p.restore()
        for shape in SUMS:
            ms = timed(lambda p=p, s=shape: p.facts(shape=s))
            lines.append({"kernel": "sums", "N": N, "V": V, "shape": shape, "ms": ms, "ratio": read / ms})
        softmax, pulls = p.pulls()
        for shape in PULL:
            ms = timed(lambda p=p, s=shape: p.pull(softmax, pulls, shape=s), p.restore)  # noqa: B023
            lines.append({"kernel": "pull", "N": N, "V": V, "shape": shape, "ms": ms, "ratio": inplace / ms})
        for x in lines[-len(SUMS) - len(PULL) :]:
            say(f"{x['kernel']} {N}x{V} {tuple(x['shape'])!s:28s} {x['ms']:.4f} ms {x['ratio']:6.1%}")
    few = [Problem(64, 262144) for _ in range(8)]
    floor = min(replayed([read_only(q.x, width) for q in few]) for width in (8192, 32768))
    for shape in SUMS:
        ms = replayed([lambda q=q, s=shape: q.facts(shape=s) for q in few])
        lines.append({"kernel": "sums", "N": 64, "V": 262144, "shape": shape, "ms": ms, "ratio": floor / ms})
        say(f"sums 64x262144 {tuple(shape)!s:28s} {ms:.4f} ms {floor / ms:6.1%} of a read-only sweep {floor:.4f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", action="store_true", help="time a few block shapes for each kernel")
    parser.add_argument("--no-large", action="store_true", help="leave out the check with more than 2^31 elements")
    args = parser.parse_args()
    say(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    wrong = check()
    if not args.no_large:
        wrong += check_large()
        torch.cuda.empty_cache()
    say("all right" if not wrong else "WRONG:\n" + "\n".join(wrong))
    results: dict[str, Any] = {
        "command": " ".join(["python benchmarks/gpu_kernels.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "wrong": wrong
    }  # fmt: skip
    if not wrong:
        results["configs" if args.configs else "table"] = configs() if args.configs else table()
        save("gpu_kernels_configs" if args.configs else "gpu_kernels", results)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
