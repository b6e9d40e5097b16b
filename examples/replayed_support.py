"""Top-p sampling, and a trainer that knows which columns were kept: the two agree.

    python examples/replayed_support.py          # half a minute on a CPU; on a GPU it uses that

A small model is sampled with top-p 0.9 and trained with GRPO twice: once with the softmax over the whole vocabulary, as
in most trainers, and once over the columns that the sampler kept, `support=`.  The first gives every token a lower
probability than the sampler did, before the first step.  A plot needs matplotlib.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import headloss as hl
from headloss.losses import grpo

VOCAB, HIDDEN, CONTEXTS, SAMPLES, TOP_P = 500, 32, 16, 64, 0.9
OBJECTIVE = hl.Objective(rl=grpo, metrics=["entropy"])


def sample(logits: Tensor) -> tuple[Tensor, Tensor, hl.Support]:
    """A token per row, its log-probability where it was drawn, and the columns that it was drawn from."""
    p, order = logits.softmax(-1).sort(-1, descending=True)
    kept = p.cumsum(-1) - p < TOP_P  # the fewest that reach top-p
    q = torch.where(kept, p, 0.0)
    q = q / q.sum(-1, keepdim=True)
    place = torch.multinomial(q, 1)
    support = hl.Support.from_csr(order[kept], nn.functional.pad(kept.sum(-1).cumsum(0), (1, 0)))
    return order.gather(1, place)[:, 0], q.gather(1, place)[:, 0].log(), support


def train(steps: int, device: str, replay: bool) -> dict[str, list[float]]:
    torch.manual_seed(0)
    embed, head = nn.Embedding(CONTEXTS, HIDDEN).to(device), hl.FusedLMHead(HIDDEN, VOCAB, device=device)
    right = torch.randint(VOCAB // 10, (CONTEXTS,), device=device)  # the token that is rewarded in each context
    optimizer = torch.optim.Adam([*embed.parameters(), *head.parameters()], lr=3e-2)
    curves: dict[str, list[float]] = {"mismatch": [], "reward": []}
    context = torch.arange(CONTEXTS, device=device).repeat_interleave(SAMPLES)
    for step in range(1, steps + 1):
        with torch.no_grad():
            sampled, sampler_logprob, support = sample(head(embed(context)))
            reward = (-(sampled - right[context]).abs() / 20.0).exp().view(CONTEXTS, SAMPLES)
            advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-3)).flatten()
        inputs = {"old_logprob": sampler_logprob, "advantage": advantage}
        inputs = hl.Inputs(support=support, **inputs) if replay else hl.Inputs(**inputs)
        out = head(embed(context), targets=sampled, objective=OBJECTIVE, inputs=inputs)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mismatch = (sampler_logprob - out.facts.logprob.detach()).mean()  # KL(sampler || trainer), by its samples
        curves["mismatch"].append(float(mismatch))
        curves["reward"].append(float(reward.mean()))
        if step % max(1, steps // 5) == 0:
            how = "with the support   " if replay else "without the support"
            now = f"mismatch {abs(curves['mismatch'][-1]):.1e}  reward {curves['reward'][-1]:.4f}"
            print(f"{how}  step {step:4d} of {steps}  {now}", flush=True)
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    curves = {replay: train(args.steps, device, replay) for replay in (False, True)}
    worst = max(map(abs, curves[True]["mismatch"]))
    print(f"largest mismatch: {max(curves[False]['mismatch']):.4f} nats without the support, {worst:.1e} with it")
    draw(curves, args.out / "replayed_support.png")


def draw(curves: dict[bool, dict[str, list[float]]], path: Path) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        return print("no plot: pip install matplotlib")
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    units = {"mismatch": "KL(sampler || trainer), nats per token", "reward": "mean reward of a sample"}
    for axes, (name, unit) in zip(panels, units.items(), strict=True):
        for replay, label in ((False, "whole vocabulary"), (True, "replayed support")):
            axes.plot(range(1, len(curves[replay][name]) + 1), curves[replay][name], label=label)
        axes.set(title=name, xlabel="step", ylabel=unit)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
