"""A head that makes its own matrix products, by the public API: `python benchmarks/gpu_product.py`, on a Hopper GPU.

The floor is the products through cuBLAS on the same shapes in the same run.  What is compared alternates, with the host
ahead, and each round is compared with its neighbours; a line is the median of its rounds.  Every shape is checked
against float64 before the clock starts, next to eager in the same dtype, and a wrong number ends the run.  Peers are
compared where they can be imported; where not, the table says so.  The results go to benchmarks/results, or to $OUT.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import headloss as hl
from headloss.backends.triton import product, product_ranks
from headloss.facts import Fact, Want, finish
from headloss.losses import cross_entropy, entropy_bonus, forward_kl, grpo, gspo, reinforce, z_loss

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import save

DEVICE = "cuda"
SHAPES = {  # rows x vocabulary x hidden size: the most that the step may take of three products
    (8192, 128256, 4096): 1.00,
    (2048, 128256, 4096): 1.00,
    (8192, 128256, 2048): 1.04,
    (8192, 151936, 1024): 1.07,
    (4096, 32000, 4096): 1.02,
}
Step = Callable[[], Any]


def turns(steps: dict[str, Step], rounds: int, repeats: int = 2, queued: float = 6e6) -> dict[str, float]:
    """Milliseconds on the device, the steps by turns, each so many times in a row."""
    for step in steps.values():
        step(), step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in random.sample(list(steps.items()), len(steps)):  # what ran before has warmed the chip
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(int(queued))  # about 3 ms: the host gets ahead
            start.record()
            for _ in range(repeats):
                step()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / repeats)
    return {name: statistics.median(x) for name, x in times.items()}


def against(base: Step, steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, float]]:
    """Of each step, milliseconds on the device and their ratio to the base's.

    A step and the base alternate, each for about 120 ms, and every round of the step is compared with the mean of the
    rounds of the base before and after it: a chip that warms or cools takes no side.  Medians.
    """
    base(), base()
    base_calls, found = max(3, round(120 / wall(base, 2))), {}
    for name, step in steps.items():
        step(), step()
        both = (base, base_calls), (step, max(3, round(120 / wall(step, 2))))
        times: tuple[list[float], list[float]] = [], []
        for i in range(2 * rounds + 1):
            now, calls = both[i % 2]
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(max(2, calls // 4)):  # the host gets ahead, and the chip is at this step's clocks
                now()
            start.record()
            for _ in range(calls):
                now()
            end.record()
            end.synchronize()
            times[i % 2].append(start.elapsed_time(end) / calls)
        floors = [(a + b) / 2 for a, b in itertools.pairwise(times[0])]
        ratios = [x / floor for x, floor in zip(times[1], floors, strict=True)]
        found[name] = statistics.median(times[1]), statistics.median(ratios)
    return found


def wall(step: Step, repeats: int) -> float:
    """Milliseconds of a call as a loop of calls sees it."""
    step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1000 / repeats


def wall_of_device(step: Step, rounds: int, repeats: int = 12) -> float:
    """Of a loop of calls from an idle GPU, the time that a clock shows, as a ratio to that on the device with the host
    ahead; by turns, each after the same work, so that the chip's clocks are the same."""
    seen, busy = [], []
    for _ in range(rounds):
        seen.append(wall(step, repeats))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        step(), step(), step()
        start.record()
        for _ in range(repeats):
            step()
        end.record()
        end.synchronize()
        busy.append(start.elapsed_time(end) / repeats)
    return statistics.median(seen) / statistics.median(busy)


def peak(step: Step) -> float:
    """MiB above what was there before and what is left after."""
    step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = step()
    torch.cuda.synchronize()
    results = sum(x.numel() * x.element_size() for x in kept if isinstance(x, torch.Tensor))
    return (torch.cuda.max_memory_allocated() - before - results) / 2**20


class Case:
    """One shape and its tensors."""

    def __init__(self, N: int, V: int, D: int) -> None:
        torch.manual_seed(0)
        self.shape = N, V, D
        self.h = torch.randn(N, D, device=DEVICE, dtype=torch.bfloat16)
        self.w = (torch.randn(V, D, device=DEVICE) * 3 / D**0.5).bfloat16()
        self.y = torch.randint(V, (N,), device=DEVICE)
        self.memory = 2 * N * V + (64 << 20)
        self.advantage, self.old = torch.randn(N, device=DEVICE), -12 - torch.rand(N, device=DEVICE)
        self.segments = hl.Segments.from_cu_seqlens(torch.arange(0, N + 1, N // 16, device=DEVICE), rows=N)

    def step(self, objective: hl.Objective, y: torch.Tensor | None = None, memory: Any = None, **inputs: Any) -> Step:
        targets = self.y if y is None else y

        def step() -> Any:
            h, w = self.h.detach().requires_grad_(), self.w.detach().requires_grad_()
            out = objective(hl.Linear(h, w, memory=memory or self.memory), targets, **inputs)
            return out.loss.detach(), *torch.autograd.grad(out.loss, (h, w))

        return step

    def distilled(self) -> tuple[Step, Step]:
        """The four products of a step with a teacher's head of the same size, and the step."""
        head = hl.Linear(torch.randn_like(self.h), torch.randn_like(self.w) * 3 / self.shape[2] ** 0.5)
        z = torch.empty(len(self.h), len(self.w), device=DEVICE, dtype=torch.bfloat16)
        _, three = self.floors()

        def four() -> None:
            three()
            torch.mm(head.hidden, head.weight.t(), out=z)

        return four, self.step(hl.Objective(kl=forward_kl), memory=2 * self.memory, teacher=head)

    def into_main_grad(self, objective: hl.Objective) -> Step:
        weight = torch.nn.Parameter(self.w)
        weight.main_grad = torch.zeros(weight.shape, device=DEVICE)  # type: ignore[attr-defined]

        def step() -> Any:
            h = self.h.detach().requires_grad_()
            source = hl.Linear(h, weight, memory=self.memory, weight_grad_into="main_grad")
            objective(source, self.y).loss.backward()
            return (h.grad,)

        return step

    def floors(self) -> tuple[Step, Step]:
        z = torch.empty(len(self.h), len(self.w), device=DEVICE, dtype=torch.bfloat16)
        dh, dw = torch.empty_like(self.h), torch.empty_like(self.w)

        def one() -> None:
            torch.mm(self.h, self.w.t(), out=z)

        def three() -> None:
            one()
            torch.mm(z, self.w, out=dh)
            torch.mm(z.t(), self.h, out=dw)

        return one, three

    def eager(self, compile: bool = False) -> Step:
        fn = lambda h, w, y: F.cross_entropy((h @ w.t()).float(), y)
        fn = torch.compile(fn) if compile else fn

        def step() -> Any:
            h, w = self.h.detach().requires_grad_(), self.w.detach().requires_grad_()
            loss = fn(h, w, self.y)
            return loss.detach(), *torch.autograd.grad(loss, (h, w))

        return step

    def errors(self, found: tuple[torch.Tensor, ...]) -> dict[str, float]:
        """Of the loss, of the gradient of some rows and of some columns, against float64."""
        N, V, _ = self.shape
        loss, dh, dw = found
        some, columns = slice(0, 256), torch.arange(0, V, V // 64, device=DEVICE)
        lse = torch.cat([(h.double() @ self.w.double().t()).logsumexp(-1) for h in self.h.split(256)])
        z = self.h[some].double() @ self.w.double().t()
        p = z.softmax(-1)
        p[torch.arange(256, device=DEVICE), self.y[some]] -= 1
        pc = (self.h.double() @ self.w[columns].double().t() - lse[:, None]).exp()
        pc -= (self.y[:, None] == columns).double()
        true_loss = (lse - (self.h.double() * self.w[self.y].double()).sum(-1)).mean()
        apart = lambda x, t: float((x.double() - t).norm() / t.norm())
        return {
            "loss": apart(loss, true_loss),
            "dX": apart(dh[some], p @ self.w.double() / N),
            "dW": apart(dw[columns], pc.t() @ self.h.double() / N),
        }


def chunked(step: Step) -> Step:
    """The same call without the head's own products."""

    def without() -> Any:
        able, product.able = product.able, lambda device: False
        try:
            return step()
        finally:
            product.able = able

    return without


def checked(case: Case, objective: hl.Objective) -> dict[str, Any]:
    """Errors of the step next to eager's; a worse one ends the run."""
    ours, theirs = case.errors(case.step(objective)()), case.errors(case.eager()())
    for name, x in ours.items():
        if not x <= theirs[name] + 1e-6:
            raise SystemExit(
                f"{case.shape}: {name} is off by {x:.1e}, eager by {theirs[name]:.1e}; no speed is reported"
            )
    return {"ours": ours, "eager": theirs}


def facts_step(case: Case, rows: slice = slice(None), y: torch.Tensor | None = None, memory: Any = "1GiB") -> Any:
    with torch.no_grad():
        source = hl.Linear(case.h[rows], case.w, memory=memory)
        targets = (case.y if y is None else y)[rows]
        found = hl.row_facts(source, targets, want=("logprob", "entropy", "lse"))
        return found.logprob, found.entropy, found.lse


def same_bits(case: Case) -> dict[str, bool]:
    """Facts of a row, whatever stands around it."""
    whole = facts_step(case)
    N = len(case.h)
    equal = lambda found, rows: all(torch.equal(x, t[rows]) for x, t in zip(found, whole, strict=True))
    checks = {}
    for n in (1, 7, 128, 1000, N):
        for offset in {0, 1, min(777, N - n), N - n}:
            if offset + n <= N:
                rows = slice(offset, offset + n)
                checks[f"{n} rows from {offset}"] = equal(facts_step(case, rows), rows)
    dropped = case.y.clone()
    dropped[torch.rand(N, device=DEVICE) < 0.4] = -100
    checks["dropped rows"] = all(
        torch.equal(x[dropped >= 0], t[dropped >= 0]) for x, t in zip(facts_step(case, y=dropped), whole, strict=True)
    )
    wanted = Want([Fact("logprob"), Fact("entropy"), Fact("lse")])
    for count in (2, 4, 8):  # simulated: the columns in parts that are cut at tiles, and what each leaves put together
        tiles, parts = len(case.w) // product.READ.columns, []
        ends = [tiles * i // count * product.READ.columns for i in range(count)] + [len(case.w)]
        for start, end in itertools.pairwise(ends):
            shard = {"start": start, "vocab": len(case.w)}
            parts.append(product_ranks.read(case.h, case.w[start:end], case.y, wanted, 1.0, **shard))
        sums = product_ranks.across(parts[0], torch.stack([x.sums for x in parts]), wanted, 1.0, len(case.w))
        facts, _ = finish(product.partial(sums, wanted), wanted, [1.0], len(case.w))
        checks[f"{count} shards"] = equal([facts[Fact(x)] for x in ("logprob", "entropy", "lse")], slice(None))
    want = {"ce": cross_entropy, "z": hl.Term(z_loss, weight=1e-4), "metrics": ["entropy"]}
    for memory in ("64MiB", case.memory):
        h, w = case.h.detach().requires_grad_(), case.w.detach().requires_grad_()
        facts = hl.Objective(**want)(hl.Linear(h, w, memory=memory), case.y).facts
        found = (facts.logprob.detach(), facts.entropy.detach(), facts.lse.detach())
        checks[f"in training, memory={memory}"] = equal(found, slice(None))
    return checks


def measure(shape: tuple[int, int, int], limit: float, rounds: int, alone: bool) -> dict[str, Any]:
    case, ce = Case(*shape), hl.Objective(ce=cross_entropy)
    mix = hl.Objective(
        ce=cross_entropy, z=hl.Term(z_loss, weight=1e-4), rl=hl.Term(grpo, weight=0.1), metrics=["entropy", "accuracy"]
    )
    bonus = hl.Objective(ce=cross_entropy, h=hl.Term(entropy_bonus, weight=0.01))
    errors = checked(case, ce)
    one, three = case.floors()
    chosen = torch.randperm(len(case.y), device=DEVICE)[::2]  # exactly half of the rows, anywhere
    half, dead = case.y.index_fill(0, chosen, -100), case.advantage.index_fill(0, chosen, 0.0)
    rl = {"advantage": case.advantage, "old_logprob": case.old}
    step, rewarded = case.step(ce), case.step(hl.Objective(rl=reinforce), advantage=case.advantage)
    policy, grouped = (
        case.step(hl.Objective(rl=grpo), **rl),
        case.step(hl.Objective(rl=gspo), segments=case.segments, **rl),
    )
    together, some = case.step(mix, **rl), case.step(ce, half)
    without = case.step(hl.Objective(rl=reinforce), advantage=dead)
    steps: dict[str, Step] = {
        "three products": three,
        "cross-entropy": step,
        "cross-entropy, chunk by chunk with cuBLAS": chunked(case.step(hl.Objective(ce=cross_entropy))),
        "with z, policy, entropy and accuracy": together,
        "with an entropy term": case.step(bonus),
        "half of the rows ignored": some,
        "reinforce": rewarded,
        "reinforce, half of the rows without advantage": without,
        "grpo": policy,
        "gspo": grouped,
    }
    if not alone:
        steps |= {"torch.compile": case.eager(compile=True), **peers(case)}
    four, kl = case.distilled()
    found: dict[str, Any] = {"shape": shape, "limit": limit, "errors": errors, "ms": {}}

    def compare(base: Step, what: dict[str, Step]) -> dict[str, float]:
        times = against(base, what, rounds)
        found["ms"] |= {name: ms for name, (ms, _) in times.items()}
        return {name: x for name, (_, x) in times.items()}

    def one_to(base: Step, it: Step) -> float:
        return against(base, {"": it}, rounds)[""][1]

    found["of three products"] = compare(three, steps)
    facts = compare(one, {"one product": one, "log-probability and entropy": lambda: facts_step(case)})
    found["of one product"] = facts["log-probability and entropy"]
    distilled = compare(four, {"four products": four, "forward KL to another head": kl})
    found["forward KL, of four products"] = distilled["forward KL to another head"]
    found["half ignored, of all"] = one_to(step, some)
    found["half without advantage, of all"] = one_to(rewarded, without)
    found["with z, policy, entropy and accuracy, of cross-entropy"] = one_to(step, together)
    found["gspo, of grpo"] = one_to(policy, grouped)
    found["wall of device"] = wall_of_device(step, rounds)
    found["facts, MiB beside results"] = peak(lambda: facts_step(case))
    found["step, MiB beside gradients"] = peak(step)
    found["step into main_grad, MiB beside the gradient of hidden"] = peak(case.into_main_grad(ce))
    found["E, MiB"] = 2 * shape[0] * shape[1] / 2**20
    return found


def peers(case: Case) -> dict[str, Step]:
    """Those that can be imported and run."""

    def on(fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Step:
        def step() -> Any:
            h, w = case.h.detach().requires_grad_(), case.w.detach().requires_grad_()
            loss = fn(h, w)
            return loss.detach(), *torch.autograd.grad(loss, (h, w))

        return step

    def liger() -> Step:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        def loss(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            out = Liger.apply(h, w, case.y, None, None, -100, 0.0, 0.0, "mean", None, False)
            return out[0] if isinstance(out, tuple) else out

        return on(loss)

    def quack() -> Step:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        size = 4096 if case.shape[2] == 2048 else 2048  # it refuses chunks of as many rows as the hidden size
        return on(lambda h, w: chunked_linear_cross_entropy(h, w, case.y, chunk_size=size))

    found: dict[str, Step] = {}
    for name, make in {"Liger": liger, "QuACK": quack}.items():
        try:
            step = make()
            errors = case.errors(step())
            print(f"{name}: errors", {k: f"{x:.1e}" for k, x in errors.items()})
            found[name] = step
        except Exception as error:
            print(f"{name}: not in the table: {type(error).__name__}: {str(error)[:200]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--peers", type=int, default=len(SHAPES), help="how many of them are measured with peers")
    given = parser.parse_args()
    results = []
    for i, (shape, limit) in enumerate(list(SHAPES.items())[: given.shapes]):
        found = measure(shape, limit, given.rounds, alone=i >= given.peers)
        results.append(found)
        print(f"\n{' x '.join(map(str, shape))}: three products {found['ms']['three products']:.2f} ms, limit {limit}")
        for name, x in found["of three products"].items():
            print(f"    {x:6.3f}  {name}")
        print(f"    {found['of one product']:6.3f}  log-probability and entropy without grad, of one product")
        for name in (
            "half ignored, of all",
            "half without advantage, of all",
            "with z, policy, entropy and accuracy, of cross-entropy",
            "gspo, of grpo",
            "forward KL, of four products",
            "wall of device",
            *(name for name in found if "MiB" in name),
        ):
            print(f"    {found[name]:8.3f}  {name}")
        print("    errors", {k: f"{x:.1e}" for k, x in found["errors"]["ours"].items()}, flush=True)
        torch.cuda.empty_cache()
        keep(given, results, {})  # a run that is cut short has measured something
    bits = same_bits(Case(8192, 128256, 4096))
    print("bits:", "all the same" if all(bits.values()) else {k for k, x in bits.items() if not x})
    keep(given, results, bits)


def keep(given: argparse.Namespace, results: list[dict[str, Any]], bits: dict[str, bool]) -> None:
    save("gpu_product", {
        "date": datetime.date.today().isoformat(), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "command": f"python benchmarks/gpu_product.py --rounds {given.rounds} --peers {given.peers}",
        "shapes": results, "bits": bits,
    })  # fmt: skip


if __name__ == "__main__":
    main()
