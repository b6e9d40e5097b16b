"""Train the same model with headloss and with plain torch, from one seed: `python -m proof.long_run`.

500 steps in float32, and on a GPU again with bf16 autocast.  The losses go to
benchmarks/results/long_run_<device>.json: in float32 the two may differ by the order of additions only, and in bf16
headloss may not be further from float32 than torch is.  `make plots` draws them.  With --products the head is so large
that it makes its own products where it can, on a Hopper GPU in bf16.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import headloss as hl
from examples.demo.tiny import TinyTransformer
from headloss.losses import cross_entropy, entropy_bonus, z_loss
from proof.record import command, environment, short, write

Z = 1e-4


class Model(NamedTuple):
    vocabulary: int
    length: int
    batch: int
    hidden: int
    layers: int
    chunk: str
    bonus: float  # the weight of an entropy bonus


SMALL = Model(512, 32, 16, 64, 2, "300KiB", 1e-3)  # several chunks of logits per step
PRODUCTS = Model(4096, 32, 16, 256, 2, "1GiB", 0.0)


def batches(model: Model, steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences of a random chain, in which each token has four likely successors; a third of the rows is ignored."""
    dice = torch.Generator().manual_seed(seed)
    follow = torch.randint(model.vocabulary, (model.vocabulary, 4), generator=dice)
    made = []
    for _ in range(steps):
        tokens = torch.randint(model.vocabulary, (model.batch, 1), generator=dice)
        for _ in range(model.length):
            chosen = torch.randint(4, (model.batch, 1), generator=dice)
            tokens = torch.cat([tokens, follow[tokens[:, -1]].gather(1, chosen)], 1)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=dice) < 0.33] = -100
        made.append((tokens[:, :-1], targets))
    return made


@functools.cache
def objective(bonus: float) -> hl.Objective:
    more = {"h": hl.Term(entropy_bonus, weight=bonus)} if bonus else {}
    return hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=Z), **more)


def by_headloss(model: Model, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return objective(model.bonus)(hl.Linear(hidden, weight, memory=model.chunk), targets).loss


def by_torch(model: Model, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What one would write without headloss, with float32 logits."""
    logits = F.linear(hidden, weight).float().flatten(0, 1)
    valid = targets.flatten() != -100
    ce = F.cross_entropy(logits, targets.flatten())
    logp = logits[valid].log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1).mean()
    return ce + Z * logits[valid].logsumexp(-1).square().mean() - model.bonus * entropy


HEADS = {"headloss": by_headloss, "torch": by_torch}


def curve(of: Model, head: str, precision: str, steps: int, device: str, seed: int) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(seed)
    model = TinyTransformer(of.vocabulary, of.length, of.hidden, of.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 3e-4)
    losses = []
    for tokens, targets in batches(of, steps, seed):
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = HEADS[head](of, model(tokens.to(device)), model.head.weight, targets.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).float().tolist()


def compare(
    steps: int, device: str, precisions: tuple[str, ...], seed: int = 0, model: Model = SMALL
) -> dict[str, Any]:
    curves = {f"{head}, {p}": curve(model, head, p, steps, device, seed) for p in precisions for head in HEADS}
    tensor = {name: torch.tensor(c) for name, c in curves.items()}
    apart = lambda a, b: (tensor[a] - tensor[b]).abs()
    last = max(1, steps // 10)
    return {
        "steps": steps,
        "largest difference, float32, headloss and torch": float(apart("headloss, float32", "torch, float32").amax()),
        "mean difference to torch in float32": {
            name: float(apart(name, "torch, float32").mean()) for name in curves if name != "torch, float32"
        },
        "mean loss of the last tenth": {name: float(c[-last:].mean()) for name, c in tensor.items()},
        "curves": {name: [round(x, 6) for x in c] for name, c in curves.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--products", action="store_true", help="with a head that makes its own products")
    args = parser.parse_args()
    model = PRODUCTS if args.products else SMALL
    # bf16 products are emulated on many CPUs, a hundred times slower.
    precisions = ("float32", "bf16") if args.device == "cuda" else ("float32",)
    found = compare(args.steps, args.device, precisions, model=model)
    for name, value in found.items():
        if name != "curves":
            print(f"{name}: {value}")
    about = {"command": command("proof.long_run"), **environment(args.device), "model": model._asdict()}
    write(f"long_run_{'products_' * args.products}{short(args.device)}", about | found)


if __name__ == "__main__":
    main()
