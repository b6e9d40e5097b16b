"""A head whose vocabulary is split over ranks, trained next to the same head unsplit.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Every rank holds a part of the head's rows and sees the same batch.  Cross-entropy with label smoothing, z-loss, an
entropy bonus and the metrics share one all-gather per chunk.  Each rank also trains an unsharded copy of the model, and
the two losses must agree at every step.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, z_loss

VOCAB, HIDDEN, BATCH, LENGTH, STEPS = 101, 32, 8, 16, 20

objective = hl.Objective(
    ce=hl.Term(cross_entropy, label_smoothing=0.1),
    z=hl.Term(z_loss, weight=1e-4),
    entropy=hl.Term(entropy_bonus, weight=1e-3),
    metrics=["accuracy"],
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.mix = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = hl.FusedLMHead(HIDDEN, VOCAB, memory="64KiB")

    def forward(self, tokens: Tensor, targets: Tensor) -> hl.Output:
        hidden, _ = self.mix(self.embed(tokens))
        return self.head(hidden, targets=targets, objective=objective)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Count upwards from a random start: the next token is this one plus one."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    tokens = (start + torch.arange(LENGTH + 1)) % VOCAB
    return tokens[:, :-1], tokens[:, 1:]


def train(model: Model) -> list[hl.Output]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    outputs = []
    for step in range(STEPS):
        out = model(*batch(step))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(out)
    return outputs


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("start it on two processes: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    say = print if dist.get_rank() == 0 else lambda *_: None

    torch.manual_seed(0)
    whole = train(Model())
    torch.manual_seed(0)
    sharded = train(parallelize_module(Model(), mesh, {"head": hl.HeadParallel()}))

    say("step   whole head   sharded head   accuracy")
    for step in (0, STEPS // 2, STEPS - 1):
        a, b = whole[step], sharded[step]
        say(f"{step:4d} {a.loss.item():12.6f} {b.loss.item():14.6f} {b.metrics['accuracy'].item():10.2f}")
    largest = max(abs(a.loss.item() - b.loss.item()) for a, b in zip(whole, sharded))
    assert largest < 1e-3, largest
    say(f"the losses of {STEPS} steps are equal, within {largest:.0e}, on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
