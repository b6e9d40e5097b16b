"""A loss of your own: write it, verify it, train with it.

    python examples/own_loss.py                  # ten seconds on a CPU; on a GPU it uses that

The loss is a policy gradient with less weight on tokens that the model is sure of.  Before the first step, `hl.verify`
compares it with the same function on dense float64 logits.  Then a small model learns which token earns a reward.  A
plot needs matplotlib.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import headloss as hl
from headloss.losses import entropy_bonus

VOCAB, HIDDEN, CONTEXTS, SAMPLES = 500, 32, 16, 64


def unsure_first(logprob: Tensor, entropy: Tensor, advantage: Tensor, *, half: float = 1.0) -> Tensor:
    """-A w log p[y], w = H / (H + half): entropy H decides how much a token counts, and is not differentiated."""
    weight = entropy.detach() / (entropy.detach() + half)
    return -advantage * weight * logprob


OBJECTIVE = hl.Objective(
    rl=hl.Term(unsure_first, half=0.5),
    bonus=hl.Term(entropy_bonus, weight=1e-3),
    metrics=["entropy"],
)


def verify(device: str) -> None:
    """Values and gradients of what runs, against the function as it is written."""
    hidden = torch.randn(48, HIDDEN, device=device, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, device=device, requires_grad=True)
    targets = torch.randint(VOCAB, (48,), device=device)
    report = hl.verify(OBJECTIVE, hl.Linear(hidden, weight), targets, advantage=torch.randn(48, device=device))
    print(report)
    report.check()


def train(steps: int, device: str) -> dict[str, list[float]]:
    torch.manual_seed(0)
    embed, head = nn.Embedding(CONTEXTS, HIDDEN).to(device), hl.FusedLMHead(HIDDEN, VOCAB, device=device)
    right = torch.randint(VOCAB // 10, (CONTEXTS,), device=device)  # the token that is rewarded in each context
    optimizer = torch.optim.Adam([*embed.parameters(), *head.parameters()], lr=3e-2)
    curves: dict[str, list[float]] = {"reward": [], "entropy": []}
    context = torch.arange(CONTEXTS, device=device).repeat_interleave(SAMPLES)
    for step in range(1, steps + 1):
        with torch.no_grad():
            sampled = torch.multinomial(head(embed(context)).softmax(-1), 1)[:, 0]
            distance = (sampled - right[context]).abs()
            reward = (-distance / 20.0).exp().view(CONTEXTS, SAMPLES)  # near misses earn a little
            advantage = (reward - reward.mean(1, keepdim=True)).flatten()
        out = head(embed(context), targets=sampled, objective=OBJECTIVE, inputs=hl.Inputs(advantage=advantage))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curves["reward"].append(float(reward.mean()))
        curves["entropy"].append(float(out.metrics["entropy"]))
        if step % max(1, steps // 10) == 0:
            now = "  ".join(f"{name} {curve[-1]:.3f}" for name, curve in curves.items())
            print(f"step {step:4d} of {steps}  {now}", flush=True)
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    verify(device)
    draw(train(args.steps, device), args.out / "own_loss.png")


def draw(curves: dict[str, list[float]], path: Path) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        return print("no plot: pip install matplotlib")
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    units = {"reward": "mean reward of a sample", "entropy": "nats per token"}
    for axes, (name, unit) in zip(panels, units.items(), strict=True):
        axes.plot(range(1, len(curves[name]) + 1), curves[name])
        axes.set(title=name, xlabel="step", ylabel=unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
