"""Train a small model for a while with another random objective at every step: `python -m proof.soak --minutes 10`.

Losses, options, reductions, temperatures, teachers, sources, memory budgets, batch shapes and masks change from step to
step: 150 structures (--structures) in any order, each time with other numbers, shapes and budgets, half of them as a
new Objective.  On a GPU each structure is a few kernels to compile, so fewer of them leave time for what comes after.
What must not happen: memory that grows, a trace or a compilation for every step, a NaN.  The figures go to
benchmarks/results/soak_<device>.json; the exit status says whether they are fine.
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headloss as hl
from examples.demo.tiny import TinyTransformer
from headloss.trace import trace as plan
from proof.objectives import DIVERGENCES, STUDENT, inputs_wanted, objective
from proof.record import command, environment, short, write

VOCAB, LENGTH, D = 211, 24, 32
STRUCTURES = 150  # which terms, reductions and kinds of source and teacher; numbers are new at every step
GPU_STRUCTURES = 32


class Traces:
    """Counts the traces that are made, not those that are found in the cache."""

    def __init__(self) -> None:
        self.made = 0
        self._trace = plan._trace
        plan._trace = self._counted

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.made += 1
        return self._trace(*args, **kwargs)


def compilations() -> int:
    """Triton kernels compiled so far: the binaries in its cache."""
    return sum(1 for _ in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))


def resident() -> float:
    """MiB of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def given(name: str, logprob_BT: Tensor, segments: hl.Segments) -> Any:
    """An input of the kind that its name promises."""
    noise = torch.randn_like(logprob_BT)
    if name.endswith("logprob"):
        return logprob_BT + 0.3 * noise
    if name == "pairs":
        return torch.stack([torch.arange(0, len(segments) - 1, 2), torch.arange(1, len(segments), 2)], 1).to(
            noise.device
        )
    if name == "desirable":
        return torch.arange(len(segments), device=noise.device) % 2 == 0
    if name == "kl":
        return torch.tensor(0.1, device=noise.device)
    if name == "optimal_advantage":
        return torch.randn(len(segments), device=noise.device)
    return noise.sigmoid() if name == "token_weight" else noise


def teacher_for(dice: random.Random, names: set[str], tokens: Tensor, hidden: Tensor) -> Any:
    if not names & set(DIVERGENCES):
        return None
    device, shape = tokens.device, tuple(tokens.shape)
    if dice.random() < 0.4:
        logits = 2 * torch.randn(*shape, VOCAB, device=device)
        logprobs, ids = logits.log_softmax(-1).topk(dice.randint(1, 8), -1)
        return hl.Sparse(ids, logprobs.float())
    if dice.random() < 0.5:
        return hl.Logits(2 * torch.randn(*shape, VOCAB, device=device))
    return hl.Linear(hidden.detach(), torch.randn(VOCAB, D, device=device) / D**0.5)


Kept = dict[int, hl.Objective]


def step(
    number: int, seed: int, structures: int, model: TinyTransformer, device: str, kept: Kept
) -> tuple[hl.Objective, hl.Output]:
    """One random call, with its gradients in the model."""
    dice = random.Random(f"{seed} {number}")
    structure = dice.randrange(structures)
    shape = random.Random(f"{seed} structure {structure}")
    B, T = 2 * dice.randint(1, 4), dice.randint(2, LENGTH)
    tokens = (torch.arange(T) * torch.randint(1, 7, (B, 1)) + torch.randint(VOCAB, (B, 1))).remainder(VOCAB).to(device)
    targets = torch.where(torch.rand(B, T, device=device) < dice.choice((0.0, 0.3, 0.6)), -100, tokens.roll(-1, 1))
    targets[:, 0] = tokens[:, 0]
    segments = hl.Segments.from_batch(targets)
    hidden = model(tokens)
    wanted = objective(shape, STUDENT if shape.random() < 0.7 else (*STUDENT, *DIVERGENCES), numbers=dice)
    weights = None
    if number % 2:
        weights = {name: t.weight for name, t in wanted.terms.items()}
        wanted = kept.setdefault(structure, wanted)
    transform = {"temperature": dice.uniform(0.7, 1.3), "softcap": dice.choice((None, None, 20.0))}
    if shape.random() < 0.7:
        row = 8 * VOCAB
        source: Any = hl.Linear(hidden, model.head.weight, memory=dice.randint(8 * row, 200 * row), **transform)
    else:
        source = hl.Logits(model.head(hidden), **transform)
    logprob = hl.row_facts(source, targets, ("logprob",)).logprob.detach()
    inputs = {name: given(name, logprob, segments) for name in sorted(inputs_wanted(wanted))}
    for name in ("old_logprob", "kl"):
        if name in inputs and shape.random() < 0.3:
            del inputs[name]
    teacher = teacher_for(shape, set(wanted.terms), tokens, hidden)
    batch: Any = {"targets": targets, "segments": segments}
    if shape.random() < 0.3:
        batch = {"targets": hl.prepare(targets, segments)}
    out = wanted(source, **batch, teacher=teacher, weights=weights, **inputs)
    out.loss.backward()
    return wanted, out


def train(
    seconds: float,
    device: str,
    seed: int = 0,
    report: float = 5.0,
    least: int = 20,
    structures: int = STRUCTURES,
    told: Sequence[int] = (),
) -> dict[str, Any]:
    """`told`: not empty any more when it is to stop; what there is then is reported."""
    torch.manual_seed(seed)
    model = TinyTransformer(VOCAB, LENGTH, D, layers=1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    traces, seen, classes = Traces(), collections.Counter[str](), collections.Counter[str]()
    begin = last = time.monotonic()
    series: dict[str, list[float]] = collections.defaultdict(list)
    steps = bad = 0
    kept: Kept = {}
    while (time.monotonic() - begin < seconds or steps < least) and not told:
        optimizer.zero_grad(set_to_none=True)
        wanted, out = step(steps, seed, structures, model, device, kept)
        seen.update(list(wanted.terms))
        classes[f"{len(wanted.terms)} terms"] += 1
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not (torch.isfinite(out.loss) and torch.isfinite(norm)):
            bad += 1
            print(f"step {steps}: loss {float(out.loss)}, gradient {float(norm)}: {wanted}", flush=True)
        optimizer.step()
        steps += 1
        if time.monotonic() - last >= report or steps == least:
            last = time.monotonic()
            gc.collect()
            series["seconds"].append(round(last - begin, 1))
            series["steps"].append(steps)
            series["resident MiB"].append(round(resident(), 1))
            series["live tensors"].append(sum(issubclass(type(x), Tensor) for x in gc.get_objects()))
            series["traces made"].append(traces.made)
            series["traces kept"].append(len(plan._TRACES))
            if device == "cuda":
                series["allocated MiB"].append(round(torch.cuda.memory_allocated() / 2**20, 2))
                series["reserved MiB"].append(round(torch.cuda.memory_reserved() / 2**20, 1))
                series["Triton binaries"].append(compilations())
    result = {"minutes": round((time.monotonic() - begin) / 60, 2), "structures": structures, "steps": steps}
    result |= {"steps with a NaN or infinity": bad}
    result |= {"losses met": dict(sorted(seen.items())), "terms a step": dict(sorted(classes.items()))}
    return result | {"series": dict(series), "verdict": verdict(dict(series), bad)}


def verdict(series: dict[str, list[float]], bad: int) -> dict[str, Any]:
    """The second half against the first: what was made early must be enough."""
    half = len(series["steps"]) // 2
    late = max(1, series["steps"][-1] - series["steps"][half])
    first, second = series["resident MiB"][half // 2 : half + 1], series["resident MiB"][-max(1, half // 2) :]
    growth = statistics.median(second) - statistics.median(first)
    found: dict[str, Any] = {
        "resident MiB, last quarter over second": round(growth, 1),
        "live tensors, end over middle": series["live tensors"][-1] - series["live tensors"][half],
        "traces a hundred steps, second half": round(
            100 * (series["traces made"][-1] - series["traces made"][half]) / late, 3
        ),
    }
    fine = not bad and growth < 32 and found["traces a hundred steps, second half"] < 2
    fine = fine and found["live tensors, end over middle"] < 200
    if "allocated MiB" in series:
        grown = series["allocated MiB"][-1] - series["allocated MiB"][half]
        built = series["Triton binaries"][-1] - series["Triton binaries"][half]
        found |= {"allocated MiB, end over middle": round(grown, 2), "Triton binaries, second half": built}
        fine = fine and grown < 1 and 100 * built / late < 5
    return found | {"fine": bool(fine)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--structures", type=int, help=f"{STRUCTURES}, on a GPU {GPU_STRUCTURES}")
    args = parser.parse_args()
    if args.device == "cuda":  # an empty cache, whose files can be counted
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="soak-")
    structures = args.structures or (GPU_STRUCTURES if args.device == "cuda" else STRUCTURES)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    found = train(60 * args.minutes, args.device, args.seed, structures=structures, told=told)
    result = {"command": command("proof.soak"), **environment(args.device), **found}
    print(f"{found['steps']} steps in {found['minutes']} minutes;", found["verdict"])
    write(f"soak_{short(args.device)}", result)
    sys.exit(0 if found["verdict"]["fine"] else 1)


if __name__ == "__main__":
    main()
