"""Distill from stored top-K log-probabilities: how much the K likeliest tokens per position are worth.

    python examples/distill_top_k.py             # half a minute on a CPU; on a GPU it uses that

A teacher's K likeliest tokens per position are written to a file and read back, as you would do with a large model that
reads a corpus once.  Students learn from K = 1, 4 and 16 of them, and from the teacher's whole softmax.
A plot needs matplotlib.
"""

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor, nn

import headloss as hl
from headloss.losses import forward_kl

VOCAB, HIDDEN, CONTEXTS, BATCH = 2000, 64, 512, 256
OBJECTIVE = hl.Objective(kd=forward_kl, metrics=["entropy", "teacher_agreement"])


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CONTEXTS, HIDDEN)
        self.mix = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))
        self.head = hl.FusedLMHead(HIDDEN, VOCAB)

    def forward(self, contexts: Tensor, teacher: hl.Sparse | hl.Logits) -> hl.Output:
        hidden = self.mix(self.embed(contexts))
        return self.head(hidden, objective=OBJECTIVE, inputs=hl.Inputs(teacher=teacher))


def store(logits: Tensor, k: int, path: Path) -> int:
    """The K likeliest ids and their log-probabilities of every context: the file on disk.  Its size in bytes."""
    logprobs, ids = logits.log_softmax(-1).topk(k)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"ids": ids.to(torch.int32), "logprobs": logprobs}, path)
    return path.stat().st_size


def train(student: Student, logits: Tensor, stored: dict[str, Tensor] | None, steps: int, title: str) -> list[float]:
    """A student that sees what was stored, or the whole softmax; its exact KL to the teacher after each step."""
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    generator, curve = torch.Generator().manual_seed(0), []
    for step in range(1, steps + 1):
        rows = torch.randint(CONTEXTS, (BATCH,), generator=generator).to(logits.device)
        seen = hl.Logits(logits[rows]) if stored is None else hl.Sparse(stored["ids"][rows], stored["logprobs"][rows])
        student(rows, seen).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            curve.append(float(student(rows, hl.Logits(logits[rows])).terms["kd"]))
        if step % max(1, steps // 5) == 0:
            print(f"{title:<14} step {step:4d} of {steps}  exact KL {curve[-1]:.4f} nats", flush=True)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    logits = (torch.randn(CONTEXTS, 12) @ torch.randn(12, VOCAB)).to(device)  # a teacher with some structure
    blank = Student().to(device)
    curves = {}
    for k in (1, 4, 16, None):
        stored, title = None, "whole softmax"
        if k is not None:
            path = args.out / f"top_{k}.pt"
            size = store(logits, k, path)
            stored, title = torch.load(path, map_location=device, weights_only=True), f"top {k}"
            print(f"{title:<14} {size / CONTEXTS:.0f} bytes per position on disk, against {4 * VOCAB} for all logits")
        curves[title] = train(copy.deepcopy(blank), logits, stored, args.steps, title)
    draw(curves, args.out / "distill_top_k.png")


def draw(curves: dict[str, list[float]], path: Path) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        return print("no plot: pip install matplotlib")
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for title, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve, label=title, linestyle="--" if "whole" in title else "-")
    axes.set(xlabel="step", ylabel="KL(teacher || student), nats per row", title="Students of stored top-K tokens")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
