"""CPU: cross-entropy + z-loss + entropy bonus, fused against the three computed separately with autograd.

    python benchmarks/cpu_losses.py                # a table, and benchmarks/results/cpu_losses.json

Every row is forward and backward, the candidates take turns inside one run, and the median of the rounds counts.  The
numbers are checked first, against float64: no speed is reported for a wrong loss or gradient.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, z_loss

Z, BONUS = 1e-4, 1e-2
MIX = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=Z), bonus=hl.Term(entropy_bonus, weight=BONUS))
CE = hl.Objective(ce=cross_entropy)

Run = Callable[..., Tensor]


class Case(NamedTuple):
    name: str
    leaves: tuple[Tensor, ...]
    targets: Tensor
    candidates: dict[str, Run]  # the first is ours, the second the one to beat
    reference: Run
    loss_rtol: float = 1e-5
    grad_rtol: float = 1e-4  # of the largest gradient


def separate(logits: Tensor, targets: Tensor) -> Tensor:
    """The three losses as one would write them apart."""
    ce = F.cross_entropy(logits, targets)
    z = torch.logsumexp(logits, -1).square().mean()
    logp = F.log_softmax(logits, -1)
    entropy = -(logp.exp() * logp).sum(-1).mean()
    return ce + Z * z - BONUS * entropy


def shared_log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """The same by hand, with one log_softmax and one logsumexp between them."""
    lse = torch.logsumexp(logits, -1)
    logp = logits - lse[:, None]
    ce = -logp.gather(-1, targets[:, None]).mean()
    entropy = -(logp.exp() * logp).sum(-1).mean()
    return ce + Z * lse.square().mean() - BONUS * entropy


def cases(rows: int, vocab: int, seed: int) -> list[Case]:
    torch.manual_seed(seed)
    logits = (3 * torch.randn(rows, vocab)).requires_grad_()
    targets = torch.randint(vocab, (rows,))
    mix = Case(
        f"CE + z-loss + entropy, logits {rows} x {vocab}",
        (logits,),
        targets,
        {
            "headloss": lambda x, y: MIX(hl.Logits(x), y).loss,
            "separate": separate,
            "separate, one softmax shared by hand": shared_log_softmax,
        },
        separate,
    )
    plain = Case(
        f"CE alone, logits {rows} x {vocab}",
        (logits,),
        targets,
        {"headloss": lambda x, y: CE(hl.Logits(x), y).loss, "F.cross_entropy": F.cross_entropy},
        F.cross_entropy,
    )
    N, D = 4 * rows, 256
    hidden = torch.randn(N, D).requires_grad_()
    weight = (torch.randn(vocab, D) * 3 / D**0.5).requires_grad_()
    eager = lambda h, w, y: F.cross_entropy(h @ w.t(), y)
    linear = Case(
        f"CE, hidden {N} x {D}, weight {vocab} x {D}",
        (hidden, weight),
        torch.randint(vocab, (N,)),
        {"headloss": lambda h, w, y: CE(hl.Linear(h, w, memory="64MiB"), y).loss, "F.cross_entropy(h @ W.T)": eager},
        eager,
    )
    return [mix, plain, linear]


def once(run: Run, case: Case) -> tuple[float, Tensor, tuple[Tensor, ...]]:
    start = time.perf_counter()
    loss = run(*case.leaves, case.targets)
    grads = torch.autograd.grad(loss, case.leaves)
    return time.perf_counter() - start, loss.detach(), grads


def errors(case: Case) -> dict[str, dict[str, float]]:
    """Largest error of each candidate against float64, on at most 256 rows; wrong numbers end the run."""
    few = min(256, len(case.targets))
    cut = (case.leaves[0][:few], *case.leaves[1:])
    leaves = tuple(x.detach().requires_grad_() for x in cut)
    small = case._replace(leaves=leaves, targets=case.targets[:few])
    exact = small._replace(leaves=tuple(x.detach().double().requires_grad_() for x in leaves))
    _, loss, grads = once(case.reference, exact)
    found = {}
    for name, run in case.candidates.items():
        _, got, gots = once(run, small)
        d_loss = float((got.double() - loss).abs() / loss.abs())
        d_grad = max(float((g.double() - e).abs().amax() / e.abs().amax()) for g, e in zip(gots, grads, strict=True))
        found[name] = {"loss_error": d_loss, "grad_error": d_grad}
        if not (d_loss <= case.loss_rtol and d_grad <= case.grad_rtol):
            sys.exit(f"wrong numbers, no speed reported: {case.name}, {name}: loss {d_loss:.1e}, gradient {d_grad:.1e}")
    return found


def measure(case: Case, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in case.candidates}
    for r in range(rounds + 1):
        for name, run in case.candidates.items():
            spent = once(run, case)[0]
            if r:  # the first round warms up
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def cpu_model() -> str:
    """The processor's name; "CPU" where the system does not tell."""
    try:
        said = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or "CPU"
    found = [line.split(":", 1)[1].strip() for line in said.splitlines() if line.startswith("Model name")]
    return found[0] if found else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="measure the cases whose name contains this")
    parser.add_argument("--write", type=Path, default=Path(__file__).parent / "results" / "cpu_losses.json")
    args = parser.parse_args()
    record = {
        "date": datetime.date.today().isoformat(),
        "device": {"cpu": cpu_model(), "architecture": platform.machine(), "threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "headloss": hl.__version__, "python": platform.python_version()},
        "command": f"python benchmarks/cpu_losses.py --rows {args.rows} --vocab {args.vocab} --rounds {args.rounds}",
        "dtype": "float32",
        "statistic": f"median of {args.rounds} interleaved rounds, forward and backward",
        "cases": [],
    }
    for case in cases(args.rows, args.vocab, args.seed):
        if args.only not in case.name:
            continue
        wrong = errors(case)
        medians = measure(case, args.rounds)
        ours = medians["headloss"]
        print(f"\n{case.name}")
        print(f"  {'':38} {'ms':>9} {'x':>6} {'loss error':>11} {'grad error':>11}")
        for name, spent in medians.items():
            loss, grad = wrong[name].values()
            print(f"  {name:38} {1e3 * spent:9.1f} {spent / ours:6.2f} {loss:11.1e} {grad:11.1e}")
        record["cases"].append(  # type: ignore[attr-defined]
            {
                "case": case.name,
                "candidates": {
                    name: {"ms": round(1e3 * t, 2), "times_headloss": round(t / ours, 3), **wrong[name]}
                    for name, t in medians.items()
                },
            }
        )
    if not args.only:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
