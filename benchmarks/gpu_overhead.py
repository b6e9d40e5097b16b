"""What a later call costs the host: microseconds of forward and backward where the device has next to nothing to do.

Dimension key:  N rows   V columns

The kernels are small and the queue never fills, so the clock sees Python, torch and Triton alone.  The measure is a
bare autograd Function: one Triton kernel and a sum forward, one Triton kernel backward, and nothing else.  The mix is
cross-entropy + z-loss + clipped policy gradient + entropy bonus with accuracy and all policy metrics.
`python benchmarks/gpu_visit.py --overhead` runs this, on a CUDA device.
"""

from __future__ import annotations

import cProfile
import importlib.util
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import headloss as hl
from headloss.backends.triton.kernels.scale import scale_kernel
from headloss.losses import cross_entropy, entropy_bonus, grpo, z_loss

N, V = 1024, 1024
CALLS, ROUNDS = 40, 25
PROFILED = ("ce", "mix", "mix, forward_backward")


@triton.jit
def narrow_kernel(x, out, target, losses, stride, V, BLOCK: tl.constexpr):
    """Cross-entropy of a row that fits in a block, and its gradient."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    z = tl.load(x + row * stride + j, j < V, -float("inf")).to(tl.float32)
    y = tl.load(target + row)
    e = tl.exp(z - tl.max(z, 0))
    s = tl.sum(e, 0)
    tl.store(losses + row, tl.log(s) + tl.max(z, 0) - tl.sum(tl.where(j == y, z, 0.0), 0))
    tl.store(out + row * stride + j, e / s - tl.where(j == y, 1.0, 0.0), j < V)


@triton.jit
def wide_kernel(
    x, out, target, losses, a, b, temperatures, inputs, bases, factors, numbers,
    N, V, stride, c, d, e_, f, g, h, i, k,
    BLOCK: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr, A3: tl.constexpr, A4: tl.constexpr, A5: tl.constexpr,
    A6: tl.constexpr, A7: tl.constexpr, A8: tl.constexpr, A9: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr,
    B2: tl.constexpr, B3: tl.constexpr, B4: tl.constexpr, B5: tl.constexpr, B6: tl.constexpr, B7: tl.constexpr,
    B8: tl.constexpr, B9: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr,
    C4: tl.constexpr, C5: tl.constexpr, C6: tl.constexpr, C7: tl.constexpr, C8: tl.constexpr, C9: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, D4: tl.constexpr,
):  # fmt: skip
    """The same with as many arguments as the kernel of a visit."""
    narrow_kernel(x, out, target, losses, stride, V, BLOCK)


WIDE = [name for name in wide_kernel.arg_names if len(name) == 2 and name[0] in "ABCD"]


class Bare(torch.autograd.Function):
    """The least that can be done."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, wide: bool) -> torch.Tensor:
        out, losses = torch.empty_like(x), torch.empty(len(x), dtype=torch.float32, device=x.device)
        if wide:
            wide_kernel[(len(x),)](
                x, out, y, losses, None, None, (1.0,), (), (1.0,), (1.0,), (),
                len(x), x.shape[1], x.stride(0), 1, 2, 3, 4, 5, 6, 1.0, 1.0,
                BLOCK=1024, **dict.fromkeys(WIDE, (True, False)), num_warps=4,
            )  # fmt: skip
        else:
            narrow_kernel[(len(x),)](x, out, y, losses, x.stride(0), x.shape[1], BLOCK=1024, num_warps=4)
        ctx.out = out
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        scale_kernel[(triton.cdiv(ctx.out.numel(), 8192),)](ctx.out, grad, ctx.out.numel(), BLOCK=8192, num_warps=8)
        return ctx.out, None, None


def ways() -> Iterator[tuple[str, Callable[[], object]]]:
    """Steps by name; the first two are the measure."""
    x = torch.randn(N, V, device="cuda").bfloat16().requires_grad_()
    fixed = x.detach()
    y = torch.randint(0, V, (N,), device="cuda")
    prepared = hl.prepare(y)
    rows = {"advantage": torch.randn(N, device="cuda"), "old_logprob": -torch.rand(N, device="cuda")}

    def step(loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            x.grad = None
            loss().backward()

        return run

    ce = hl.Objective(ce=cross_entropy)
    mix = hl.Objective(
        ce=cross_entropy, z=hl.Term(z_loss, weight=1e-4), rl=grpo, bonus=hl.Term(entropy_bonus, weight=1e-2),
        metrics=["accuracy"],
    )  # fmt: skip
    yield "bare Function, a kernel of 7 arguments", step(lambda: Bare.apply(x, y, False))
    yield "bare Function, a kernel of 57 arguments", step(lambda: Bare.apply(x, y, True))
    yield "ce", step(lambda: ce(hl.Logits(x), prepared).loss)
    yield "mix", step(lambda: mix(hl.Logits(x), prepared, **rows).loss)
    yield "ce, forward_backward", lambda: ce.forward_backward(hl.Logits(fixed), prepared)
    yield "mix, forward_backward", lambda: mix.forward_backward(hl.Logits(fixed), prepared, **rows)
    yield "bare Function of 57, forward alone", lambda: Bare.apply(x, y, True)
    yield "ce, forward alone", lambda: ce(hl.Logits(x), prepared)
    yield "mix, forward alone", lambda: mix(hl.Logits(x), prepared, **rows)
    yield "ce, targets read by the host", step(lambda: ce(hl.Logits(x), y).loss)
    yield "ce, host_read=False", step(lambda: ce(hl.Logits(x), y, host_read=False).loss)
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as Liger

        yield "Liger ce", step(lambda: Liger.apply(x.clone(), y, None)[0])  # it overwrites what it is given


def microseconds(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Of one call: medians over rounds in which the steps take turns, because a host is slower at times."""
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(CALLS):
                step()
            rounds[name].append(1e6 * (time.perf_counter() - begun) / CALLS)
    torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in rounds.items()}


def profile(step: Callable[[], object], most: int = 12) -> list[dict[str, Any]]:
    """Where a step spends its time: own microseconds a call, as a profiler sees them that itself costs as much again.

    What the backward pass does in its own thread is not seen, only that it takes long.
    """
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(CALLS):
        step()
    profiler.disable()
    torch.cuda.synchronize()
    lines = []
    for (path, line, name), (_, count, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        where = name if path == "~" else f"{'/'.join(Path(path).parts[-2:])}:{line} {name}"
        lines.append({"function": where, "us": round(1e6 * own / CALLS, 2), "calls": count / CALLS})
    return sorted(lines, key=lambda x: -x["us"])[:most]


def overhead(say: Callable[..., None]) -> dict[str, Any]:
    steps = dict(ways())
    for step in steps.values():  # compile
        step()
    say("compiled")
    found = microseconds(steps)
    few, many, *_ = found.values()
    lines = []
    for name, us in found.items():
        lines.append({"what": name, "us": round(us, 1), "over_7": round(us - few, 1), "over_57": round(us - many, 1)})
        say(f"{name:44s} {us:8.1f} us  over the bare ones {us - few:+8.1f} {us - many:+8.1f}")
    profiles = {name: profile(steps[name]) for name in PROFILED}
    for name, top in profiles.items():
        say(f"{name}, own time under a profiler")
        for line in top:
            say(f"    {line['us']:8.2f} us {line['calls']:6.1f} calls  {line['function']}")
    method = f"steps that take turns, median of {ROUNDS} rounds of {CALLS} calls"
    return {"rows": N, "columns": V, "method": method, "lines": lines, "profile": profiles}
