"""What a later call costs the host: microseconds of forward and backward where the device has next to nothing to do.

Dimension key:  N rows   V columns   D hidden size   K ids

The kernels are small and the queue never fills, so the clock sees Python, torch and Triton alone.  The measure of each
call is a bare autograd Function that makes the same launches, products and allocations with the same arguments, taken
down from the call itself, and does nothing else.  The mix is cross-entropy + z-loss + clipped policy gradient + entropy
bonus with accuracy and all policy metrics.  Then 20 ms of work are queued on the device: a call that returns sooner has
not waited for it.  `python benchmarks/gpu_visit.py --overhead` runs this, on a CUDA device.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headloss as hl
from headloss.backends.triton.launch import Launch
from headloss.losses import cross_entropy, entropy_bonus, forward_kl, grpo, gspo, jsd, reverse_kl, z_loss

N, V, D, K = 1024, 1040, 64, 64
CALLS, ROUNDS = 20, 101
QUEUED_MS = 20.0
PROFILED = ("Logits CE", "GSPO")

# what torch does without a launch and without memory
FREE = ("view", "detach", "alias", "t", "slice", "select", "unbind", "as_strided", "expand", "transpose", "unsqueeze")
NEW = ("empty", "empty_like", "empty_strided", "new_empty")

Loss = Callable[[], torch.Tensor]


class Made(NamedTuple):
    """A launch, product or allocation, to be made once more."""

    name: str
    make: Callable[[], object]
    result: Any = None


class Notes(TorchDispatchMode):
    """Takes down every launch of ours and every operation of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Made] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__
        if name not in FREE:
            self.made.append(Made(name, lambda: op(*args, **(kwargs or {})), found))
        return found

    def __enter__(self) -> Notes:
        run, made = Launch.run, self.made

        def noted(launch: Launch, *told: Any) -> None:
            made.append(Made("launch", lambda: run(launch, *told)))
            run(launch, *told)

        self.run = run
        Launch.run = noted  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Launch.run = self.run  # type: ignore[method-assign]


class Bare(torch.autograd.Function):
    """The least that can be done."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.make, ctx.grads = backward, [torch.empty_like(x) for x in tensors]
        for make in forward:
            make()
        return torch.empty((), dtype=torch.float32, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018, this sees whether they were written to
        for make in ctx.make:
            make()
        grads, ctx.grads = ctx.grads, None
        return None, None, *grads


def bare(loss: Loss, leaves: list[torch.Tensor]) -> Loss:
    """What makes all that this loss and its gradient make; the gradients are allocated by the Function itself."""
    with Notes() as forward:
        out = loss()
    with Notes() as backward:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    own = [(x.shape, x.dtype) for x in leaves]
    kept = []
    for made in forward.made:
        shape = (made.result.shape, made.result.dtype) if made.name in NEW else None
        own.remove(shape) if shape in own else kept.append(made.make)
    later = [made.make for made in backward.made if made.name != "ones_like"]
    return lambda: Bare.apply(kept, later, *leaves)


def losses() -> Iterator[tuple[str, Loss, list[torch.Tensor]]]:
    """Calls by name, and the tensors that their gradients are of."""
    make = lambda *shape: torch.randn(*shape, device="cuda")
    x, hidden, weight = (make(*s).bfloat16().requires_grad_() for s in ((N, V), (N, D), (V, D)))
    y = torch.randint(0, V, (N,), device="cuda")
    segments = hl.Segments.from_ids(torch.arange(N, device="cuda") // 64, N // 64)
    prepared, with_segments = hl.prepare(y), hl.prepare(y, segments)
    rows = {"advantage": make(N), "old_logprob": -make(N).abs()}
    dense, second = hl.Logits(make(N, V).bfloat16()), make(N, V).bfloat16()
    ids = hl.Sparse(torch.randint(0, V, (N, K), device="cuda"), make(N, K) - 8)
    ce, policy, sequences = (hl.Objective(it=loss) for loss in (cross_entropy, grpo, gspo))
    distill, between = hl.Objective(kl=forward_kl), hl.Objective(js=jsd)
    mix = hl.Objective(
        ce=cross_entropy, z=hl.Term(z_loss, weight=1e-4), rl=grpo, bonus=hl.Term(entropy_bonus, weight=1e-2),
        metrics=["accuracy"],
    )  # fmt: skip
    yield "Logits CE", lambda: ce(hl.Logits(x), prepared).loss, [x]
    yield "Linear CE, one chunk", lambda: ce(hl.Linear(hidden, weight), prepared).loss, [hidden, weight]
    yield "GRPO", lambda: policy(hl.Logits(x), prepared, **rows).loss, [x]
    yield "GSPO", lambda: sequences(hl.Logits(x), with_segments, **rows).loss, [x]
    yield "forward KL, a dense teacher", lambda: distill(hl.Logits(x), prepared, teacher=dense).loss, [x]
    both = hl.Objective(f=hl.Term(forward_kl, teacher="a"), r=hl.Term(reverse_kl, teacher="b"))
    pair = lambda: {"a": hl.Logits(dense.logits), "b": hl.Logits(second)}
    yield "forward and reverse KL, two dense teachers", lambda: both(hl.Logits(x), prepared, teacher=pair()).loss, [x]
    yield "forward KL, 64 ids", lambda: distill(hl.Logits(x), prepared, teacher=ids).loss, [x]
    yield "mix", lambda: mix(hl.Logits(x), prepared, **rows).loss, [x]
    yield "Logits CE, plain targets", lambda: ce(hl.Logits(x), y).loss, [x]
    # as a step that distils does it: no targets, and a teacher that is new in every call
    newly = lambda: hl.Logits(dense.logits)
    yield "forward KL, a dense teacher, no targets", lambda: distill(hl.Logits(x), teacher=newly()).loss, [x]
    yield "JSD, a dense teacher, no targets", lambda: between(hl.Logits(x), teacher=newly()).loss, [x]
    sparse = lambda: hl.Sparse(ids.ids, ids.logprobs)
    yield "forward KL, 64 ids, no targets", lambda: distill(hl.Logits(x), teacher=sparse()).loss, [x]
    yield "GSPO, plain targets", lambda: sequences(hl.Logits(x), y, segments=segments, **rows).loss, [x]


def stepped(loss: Loss, leaves: list[torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        for x in leaves:
            x.grad = None
        loss().backward()

    return step


def timed(step: Callable[[], object]) -> float:
    """Microseconds of one call among a few."""
    step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(CALLS):
        step()
    return 1e6 * (time.perf_counter() - begun) / CALLS


def against(ours: Callable[[], object], least: Callable[[], object]) -> tuple[float, float, float]:
    """Microseconds of a call and of the bare one, and their ratio.

    A host is slower at times, by up to a half and for longer than a round: both are timed in turns, and the ratio is
    the median of those of neighbours, not the ratio of two medians.
    """
    rounds = []
    for i in range(ROUNDS):
        first, second = (ours, least) if i % 2 else (least, ours)
        pair = timed(first), timed(second)
        rounds.append(pair if i % 2 else pair[::-1])
    torch.cuda.synchronize()
    times = [statistics.median(x) for x in zip(*rounds, strict=True)]
    return times[0], times[1], statistics.median([x / y for x, y in rounds])


def returns_after() -> Iterator[tuple[str, float]]:
    """Milliseconds until a call returns while the device has 20 ms of other work before it."""
    x = torch.randn(N, V, device="cuda").bfloat16().requires_grad_()
    hidden, weight = torch.randn(N, D, device="cuda").bfloat16(), torch.randn(V, D, device="cuda").bfloat16()
    y, ce = torch.randint(0, V, (N,), device="cuda"), hl.Objective(ce=cross_entropy)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(1_000_000)
    end.record()
    torch.cuda.synchronize()
    cycles = int(1_000_000 * QUEUED_MS / begin.elapsed_time(end))
    for name, prepared, call in (
        ("Logits, plain targets", False, lambda y: ce(hl.Logits(x), y)),
        ("Linear, targets prepared without blocking", True, lambda y: ce(hl.Linear(hidden, weight), y)),
    ):
        best = float("inf")
        for _ in range(5):
            targets = hl.prepare(y, non_blocking=True) if prepared else y
            torch.cuda._sleep(cycles)
            begun = time.perf_counter()
            call(targets)
            best = min(best, 1e3 * (time.perf_counter() - begun))
            torch.cuda.synchronize()
        yield name, best


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
    steps: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for name, loss, leaves in losses():
        for _ in range(3):  # compile, and come to the form of a later call
            stepped(loss, leaves)()
        steps[name] = stepped(loss, leaves), stepped(bare(loss, leaves), leaves)
    say("compiled")
    lines = []
    for name, pair in steps.items():
        us, least, ratio = against(*pair)
        lines.append({"what": name, "us": round(us, 1), "bare": round(least, 1), "ratio": round(ratio, 2)})
        say(f"{name:40s} {us:8.1f} us, bare {least:8.1f} us, {ratio:5.2f} times")
    queued = {name: round(ms, 3) for name, ms in returns_after()}
    for name, ms in queued.items():
        say(f"{name:44s} returns after {ms:.3f} ms, with {QUEUED_MS:.0f} ms queued")
    profiles = {name: profile(steps[name][0]) for name in PROFILED}
    method = f"a step and the bare one in turns, {ROUNDS} rounds of {CALLS} calls: medians, and the median of ratios"
    return {"rows": N, "columns": V, "method": method, "lines": lines, "queued": queued, "profile": profiles}
