"""Hidden states and a weight in, loss and gradients out: `python benchmarks/gpu_linear.py`, on a CUDA device.

The floor is the three matrix products that any head must do, through cuBLAS on the same shapes in the same run.  Every
line is checked against float64 first, next to eager in the same dtype, and a line whose numbers are wrong has no time.
Peers are compared where they can be imported (PYTHONPATH=peers): Liger, cut-cross-entropy, torch's own.
The results go to benchmarks/results, or to the folder $OUT.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, gspo, z_loss

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import save

DEVICE = "cuda"
Step = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # loss, gradient of hidden, of weight


def milliseconds(step: Callable[[], Any], repeats: int = 12) -> float:
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def peak(step: Callable[[], Any]) -> float:
    """GiB above what was there before, the gradients included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def floor(N: int, V: int, H: int) -> float:
    h = torch.randn(N, H, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(V, H, device=DEVICE, dtype=torch.bfloat16)
    z = torch.empty(N, V, device=DEVICE, dtype=torch.bfloat16)
    dh, dw = torch.empty_like(h), torch.empty_like(w)

    def three() -> None:
        torch.mm(h, w.t(), out=z)
        torch.mm(z, w, out=dh)
        torch.mm(z.t(), h, out=dw)

    return milliseconds(three)


class Case:
    """One shape, with its tensors and the truth in float64."""

    def __init__(self, N: int, V: int, H: int, ignored: float = 0.0) -> None:
        torch.manual_seed(0)
        self.N, self.V, self.H = N, V, H
        self.h = torch.randn(N, H, device=DEVICE, dtype=torch.bfloat16)
        self.w = (torch.randn(V, H, device=DEVICE) * 3 / H**0.5).bfloat16()
        self.y = torch.randint(V, (N,), device=DEVICE)
        if ignored:
            self.y[torch.rand(N, device=DEVICE) < ignored] = -100
        self.truth = self._truth()

    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.h.detach().requires_grad_(), self.w.detach().requires_grad_()

    def _truth(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h, w = self.h.double(), self.w.double()
        keep = self.y != -100
        z = h @ w.t()
        loss = F.cross_entropy(z, self.y)
        dz = z.softmax(-1)
        dz[torch.arange(self.N, device=DEVICE)[keep], self.y[keep]] -= 1
        dz.mul_(keep[:, None] / keep.sum())
        return loss, dz @ w, dz.t() @ h

    def error(self, found: tuple[torch.Tensor, ...]) -> list[float]:
        pairs = zip(found, self.truth, strict=True)
        return [float((x.double() - t).norm() / t.norm()) for x, t in pairs]


def ours(case: Case, **more: Any) -> Step:
    objective = hl.Objective(ce=cross_entropy)
    batch = hl.prepare(case.y)

    def step() -> Any:
        h, w = case.leaves()
        out = objective(hl.Linear(h, w, **more), batch)
        return out.loss.detach(), *torch.autograd.grad(out.loss, (h, w))

    return step


def eager(case: Case) -> Step:
    def step() -> Any:
        h, w = case.leaves()
        loss = F.cross_entropy((h @ w.t()).float(), case.y)
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    return step


def compiled(case: Case) -> Step:
    fn = torch.compile(lambda h, w, y: F.cross_entropy((h @ w.t()).float(), y))

    def step() -> Any:
        h, w = case.leaves()
        loss = fn(h, w, case.y)
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    return step


def peers(case: Case) -> dict[str, Step]:
    found: dict[str, Step] = {"eager, float32 logits": eager(case), "torch.compile": compiled(case)}
    if hasattr(F, "linear_cross_entropy"):

        def torch_step() -> Any:
            h, w = case.leaves()
            loss = F.linear_cross_entropy(h, w, case.y)
            return loss.detach(), *torch.autograd.grad(loss, (h, w))

        found["F.linear_cross_entropy"] = torch_step
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        def liger(*more: Any) -> Step:
            def step() -> Any:
                h, w = case.leaves()
                out = Liger.apply(h, w, case.y, None, None, -100, 0.0, 0.0, "mean", None, False, *more)
                loss = out[0] if isinstance(out, tuple) else out
                return loss.detach(), *torch.autograd.grad(loss, (h, w))

            return step

        found["Liger"] = liger()
        found["Liger, float32 weight gradient"] = liger(torch.float32)
        found["Liger, float32, larger chunks"] = liger(torch.float32, False, False, False, None, None, 8)
    except Exception as e:
        print("Liger:", type(e).__name__, str(e)[:100])
    try:
        from cut_cross_entropy import linear_cross_entropy

        def cce() -> Any:
            h, w = case.leaves()
            loss = linear_cross_entropy(h, w, case.y)
            return loss.detach(), *torch.autograd.grad(loss, (h, w))

        found["cut-cross-entropy"] = cce
    except Exception as e:
        print("cut-cross-entropy:", type(e).__name__, str(e)[:100])
    return found


def gspo_step(N: int, V: int, H: int, documents: int, memory: str) -> Callable[[], Any]:
    torch.manual_seed(1)
    h = torch.randn(N, H, device=DEVICE, dtype=torch.bfloat16)
    w = (torch.randn(V, H, device=DEVICE) * 3 / H**0.5).bfloat16()
    y = torch.randint(V, (N,), device=DEVICE)
    cu = torch.linspace(0, N, documents + 1, device=DEVICE).round().long()
    batch = hl.prepare(y, hl.Segments.from_cu_seqlens(cu, rows=N))
    old = -12 - torch.rand(N, device=DEVICE)
    advantage = torch.randn(N, device=DEVICE)
    objective = hl.Objective(rl=hl.Term(gspo, low=0.5, high=0.5), z=hl.Term(z_loss, weight=1e-4))

    def step() -> Any:
        a, b = h.detach().requires_grad_(), w.detach().requires_grad_()
        out = objective(hl.Linear(a, b, memory=memory), batch, old_logprob=old, advantage=advantage)
        return out.loss.detach(), *torch.autograd.grad(out.loss, (a, b))

    return step


def uneven(line: Callable[..., float], rows: list[dict[str, Any]], N: int, H: int) -> None:
    """A vocabulary that is no multiple of 8 against the GEMMs of the next one that is."""
    odd, even = 50257, 50304
    against = floor(N, even, H)
    plain = floor(N, odd, H)
    rows.append({"what": f"three GEMMs, {N} x {odd}, against {even}", "ms": plain, "ratio": plain / against})
    print(f"three GEMMs {N} x {odd} x {H}: {plain:.2f} ms, with {even} columns {against:.2f} ms", flush=True)
    case = Case(N, odd, H)
    line(f"headloss, {N} x {odd}, against {even}", ours(case, memory="1GiB"), over=case, against=against)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="8192,128256,4096")
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()
    N, V, H = map(int, args.shape.split(","))
    case = Case(N, V, H)
    base = floor(N, V, H)
    reference = case.error(eager(case)())
    rows: list[dict[str, Any]] = []

    def line(name: str, step: Step, over: Case = case, against: float = base, check: bool = True) -> float:
        errors = over.error(step()) if check else []
        limit = [2 * e + 1e-4 for e in reference]
        wrong = check and not all(e <= m for e, m in zip(errors, limit, strict=True))
        row: dict[str, Any] = {"what": name, "errors (loss, dH, dW)": errors}
        ours_wrong = wrong and name.startswith("headloss")
        if not ours_wrong:
            row |= {"ms": milliseconds(step), "GiB": peak(step)}
            row["ratio"] = row["ms"] / against
        row["wrong"] = bool(wrong)
        rows.append(row)
        told = " ".join(f"{e:.1e}" for e in errors)
        print(
            f"{name:44s} {row.get('ms', float('nan')):8.2f} ms {row.get('ratio', float('nan')):6.3f}x "
            f"{row.get('GiB', float('nan')):6.2f} GiB  {told}{'  WRONG' if wrong else ''}",
            flush=True,
        )
        return float(row.get("ms", float("nan")))

    print(f"three GEMMs {N} x {V} x {H}: {base:.2f} ms")
    full = line("headloss, 2 GiB", ours(case, memory="2GiB"))
    line("headloss, 1 GiB", ours(case, memory="1GiB"))
    line("headloss, 0.5 GiB", ours(case, memory="512MiB"))
    line("headloss, 2 GiB, bf16 weight gradient", ours(case, memory="2GiB", weight_grad_dtype=torch.bfloat16))
    mix = hl.Objective(
        ce=cross_entropy,
        z=hl.Term(z_loss, weight=1e-4),
        h=hl.Term(entropy_bonus, weight=1e-3),
        metrics=["accuracy", "entropy"],
    )

    def mixed() -> Any:
        h, w = case.leaves()
        out = mix(hl.Linear(h, w, memory="2GiB"), case.y)
        return out.loss.detach(), *torch.autograd.grad(out.loss, (h, w))

    line("headloss, CE + z + entropy + metrics, 2 GiB", mixed, check=False)
    line("headloss, GSPO, 4 documents, 2 GiB", gspo_step(N, V, H, 4, "2GiB"), check=False)
    half = Case(N, V, H, ignored=0.5)
    line("headloss, half the rows ignored, 2 GiB", ours(half, memory="2GiB"), over=half, against=full)
    del half
    torch.cuda.empty_cache()
    uneven(line, rows, N // 2, H)
    if not args.no_peers:
        for name, step in peers(case).items():
            try:
                line(name, step)
            except Exception as e:
                print(f"{name}: {type(e).__name__} {str(e)[:120]}", flush=True)
            torch.cuda.empty_cache()
    result = {
        "command": " ".join(["python benchmarks/gpu_linear.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "headloss": hl.__version__},
        "shape": [N, V, H],
        "three GEMMs ms": base,
        "eager errors (loss, dH, dW)": reference,
        "rows": rows,
    }
    save("gpu_linear" if args.shape == parser.get_default("shape") else f"gpu_linear_{N}_{V}_{H}", result)


if __name__ == "__main__":
    main()
