"""The likeliest columns, draft heads and routed teachers against their matrix products: `python benchmarks/gpu_top.py`.

On a GPU.  Numbers are checked first, against float64 or against calls that do the same in another way; a wrong one ends
the run.  The products are cuBLAS's, in the same run; the results go to benchmarks/results, or to the folder $OUT.

    top      64 likeliest columns, lse and entropy of a head, without grad    against one product and one read
    draft    forward KL of 32000 tokens from a teacher over 128256, trained   against its four products
    routed   forward KL from two teachers with half of the rows each          against the same with one
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headloss as hl
from headloss.backends.triton import top as kernels
from headloss.backends.triton.tiles import Transform
from headloss.losses import forward_kl

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import DEVICE, read_only, save, say, timed
from gpu_product import turns, wall

K = 64
ROUNDS = 7
AHEAD = 4e7  # cycles that the device waits, so that the host gets ahead


def draw(rows: int, size: int, spread: float = 1.0) -> Tensor:
    return (spread * torch.randn(rows, size, device=DEVICE)).bfloat16()


def head(V: int, D: int) -> Tensor:
    return draw(V, D, 3 / D**0.5)


def check(what: str, holds: bool) -> None:
    if not holds:
        sys.exit(f"{what}: wrong numbers, and so no times")


def products(*sizes: tuple[int, int, int]) -> Callable[[], None]:
    """(M, K) x (K, N) each, one after another."""
    pairs = [(draw(M, k), draw(k, n)) for M, k, n in sizes]
    outs = [torch.empty(len(x), y.shape[1], dtype=x.dtype, device=DEVICE) for x, y in pairs]

    def run() -> None:
        for (x, y), out in zip(pairs, outs, strict=True):
            torch.mm(x, y, out=out)

    return run


def peak(call: Callable[[], Any]) -> int:
    """The most bytes held beyond what was there before, and beyond what is there after."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())


def top(N: int, V: int, D: int) -> dict[str, Any]:
    hidden, weight = draw(N, D), head(V, D)
    source = hl.Linear(hidden, weight)
    call = lambda: hl.row_facts(source, want=("top_ids", "top_logprob", "lse", "entropy"), top=K)
    with torch.no_grad():
        facts, some = call(), slice(0, min(N, 512))
        logits = hidden[some] @ weight.T
        order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :K]
        logp = logits.double().log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        same = float((facts.top_ids[some] == order).float().mean())
        say(f"top: {same:.6f} of the columns are those of a stable sort of a product of fewer rows, rounded otherwise")
        check("top", same > 0.99 and bool(((facts.entropy[some] - entropy).abs() < 1e-2).all()))
        own = kernels.largest(logits, K, Transform(1.0, None))[1]  # of the very same logits
        check("top of the same logits", torch.equal(own, order))
        whole = torch.empty(N, V, dtype=torch.bfloat16, device=DEVICE)
        steps = {"gemm_ms": lambda: torch.mm(hidden, weight.T, out=whole), "read_ms": read_only(whole), "call_ms": call}
        found: dict[str, Any] = turns(steps, ROUNDS, queued=AHEAD)
        found["kernel_ms"] = timed(lambda: kernels.largest(whole, K, Transform(1.0, None)))
        found["torch_topk_ms"] = timed(lambda: whole.topk(K, -1), repeats=5)
        plain = lambda: hl.row_facts(source, want=("lse", "entropy"))
        found["without_top_ms"] = timed(plain)
    return found | {"wall_ms": wall(call, 10), "ratio": found["call_ms"] / (found["gemm_ms"] + found["read_ms"])}


def stepped(objective: hl.Objective, hidden: Tensor, weight: Tensor, teacher: Any, **options: Any) -> Callable[[], Any]:
    targets = torch.zeros(len(hidden), dtype=torch.long, device=DEVICE)
    ids = options.get("vocab_ids")
    targets = hl.prepare(targets if ids is None else ids[targets], vocab_ids=ids)

    def step() -> Any:
        hidden.grad = weight.grad = None
        out = objective(hl.Linear(hidden, weight, **options), targets, teacher=teacher)
        out.loss.backward()
        return out

    return step


def apart(x: Tensor | None, want: Tensor) -> float:
    return torch.inf if x is None else float((x.double() - want).norm() / want.norm())


def dense(dtype: torch.dtype, few: slice, tensors: tuple[Tensor, ...], tail: str, ids: Tensor) -> tuple[Tensor, ...]:
    """Loss and gradients of some rows in plain PyTorch."""
    h, w, guide, other = (x.detach()[few if i % 2 == 0 else slice(None)].to(dtype) for i, x in enumerate(tensors))
    h, w = h.requires_grad_(), w.requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    logq = (guide @ other.T).to(wide).log_softmax(-1)[:, ids]
    left = (-logq.exp().sum(-1)).log1p()
    logq = logq.log_softmax(-1) if tail == "renormalise" else logq
    loss = (logq.exp() * (logq - (h @ w.T).to(wide).log_softmax(-1))).sum(-1)
    loss = (loss + left.exp() * (left + 1e4) if tail == "bucket" else loss).mean()  # no other token is the student's
    return loss.detach(), *torch.autograd.grad(loss, (h, w))


def draft(N: int, V: int, U: int, D: int) -> dict[str, Any]:
    hidden, weight = draw(N, D).requires_grad_(), head(U, D).requires_grad_()
    anyhow = torch.randperm(V, device=DEVICE)[:U]
    guide, other = draw(N, D), head(V, D)
    found: dict[str, Any] = {"memory_bytes": 1 << 30}
    rising = anyhow.sort().values  # as draft heads have them
    for name, tail, ids in (
        ("none", "none", rising), ("none, tokens in no order", "none", anyhow), ("bucket", "bucket", rising),
        ("renormalise", "renormalise", rising),
    ):  # fmt: skip
        objective = hl.Objective(kl=hl.Term(forward_kl, tail=tail))
        few = slice(0, min(N, 128))
        given = (hidden, weight, guide, other), tail, ids
        truth, eager = dense(torch.float64, few, *given), dense(torch.bfloat16, few, *given)
        first = hidden[few].detach().requires_grad_()
        weight.grad = None
        out = objective(
            hl.Linear(first, weight, vocab_ids=ids),
            ids[torch.zeros(len(first), dtype=torch.long, device=DEVICE)],
            teacher=hl.Linear(guide[few], other),
        )
        out.loss.backward()
        errors = [apart(x, want) for x, want in zip((out.loss.detach(), first.grad, weight.grad), truth, strict=True)]
        theirs = [apart(x, want) for x, want in zip(eager, truth, strict=True)]
        say(f"draft, {name}: loss, dhidden, dweight {errors}, eager {theirs}")
        check(f"draft, {name}", all(a < 1.1 * b + 1e-3 for a, b in zip(errors, theirs, strict=True)))
        step = stepped(objective, hidden, weight, hl.Linear(guide, other), vocab_ids=ids)
        teacher_head = (N, D, U if tail == "renormalise" else V)
        floor = products(teacher_head, (N, D, U), (N, U, D), (U, N, D))
        times: dict[str, Any] = turns({"call_ms": step, "products_ms": floor}, ROUNDS, queued=AHEAD)
        times |= {"ratio": times["call_ms"] / times["products_ms"], "wall_ms": wall(step, 10)}
        found[name] = times | {"beyond_bytes": peak(step)}
        say(name, found[name])
        check(f"draft, {name}, memory", found[name]["beyond_bytes"] <= found["memory_bytes"])
    return found


def routed(N: int, V: int, D: int) -> dict[str, Any]:
    hidden, weight = draw(N, D).requires_grad_(), head(V, D).requires_grad_()
    guides = [(draw(N, D), head(V, D)) for _ in range(2)]
    route = torch.randint(0, 2, (N,), device=DEVICE)
    teachers = [hl.Linear(*x) for x in guides]
    objective = hl.Objective(kl=forward_kl)
    both = hl.Routed(dict(zip("ab", teachers, strict=True)), route)
    whole, parts = stepped(objective, hidden, weight, teachers[0]), stepped(objective, hidden, weight, both)
    loss, grad = parts().loss, hidden.grad
    want = torch.zeros((), device=DEVICE)
    for i, teacher in enumerate(teachers):
        alone = objective(hl.Linear(hidden, weight), torch.where(route == i, 0, -100), teacher=teacher, num_items=N)
        want = want + alone.loss.detach()
    check("routed", grad is not None and abs(float(loss.detach() - want)) < 1e-3 * float(want))
    found: dict[str, Any] = turns({"one_teacher_ms": whole, "two_routed_ms": parts}, ROUNDS, queued=AHEAD)
    return found | {"ratio": found["two_routed_ms"] / found["one_teacher_ms"], "wall_ms": wall(parts, 10)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    tiny = parser.parse_args().tiny
    N, D = (256, 256) if tiny else (8192, 4096)
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    results: dict[str, Any] = {**about, "k": K, "tokens": N, "hidden": D}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "top": lambda: top(N, 5000 if tiny else 151936, D),
        "draft": lambda: draft(N, 5000 if tiny else 128256, 1024 if tiny else 32000, D),
        "routed": lambda: routed(N // 2, 5000 if tiny else 128256, D),
    }
    for name, part in parts.items():
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        results[name] = part()
        say(name, results[name])
    save("gpu_top", results)


if __name__ == "__main__":
    main()
