"""A model of four layers, and one step of it in one process: what every wrapper and mesh has to reproduce."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, grpo, z_loss

B, T, D, V = 8, 6, 8, 38


class Tiny(nn.Module):
    """Embedding, one layer, norm, head.  `tied` shares the embedding's weight with the head."""

    def __init__(self, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.layer = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)
        self.head = hl.FusedLMHead(D, V, bias=bias, memory=4 * V * 8 * 7)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, **head: Any) -> Any:
        x = self.embed(tokens)
        return self.head(self.norm(x + self.layer(x).tanh()), **head)


def model(dtype: torch.dtype = torch.float64, **options: bool) -> Tiny:
    torch.manual_seed(7)
    return Tiny(**options).to(dtype)


class Batch(NamedTuple):
    tokens: Tensor
    targets: Tensor
    old_logprob: Tensor
    advantage: Tensor

    def rows(self, part: Any) -> Batch:
        return Batch(*(x[part] for x in self))

    def inputs(self, **more: Any) -> hl.Inputs:
        return hl.Inputs(old_logprob=self.old_logprob, advantage=self.advantage, **more)


def batch(dtype: torch.dtype = torch.float64) -> Batch:
    torch.manual_seed(8)
    targets = torch.randint(V, (B, T))
    targets[torch.rand(B, T) < 0.3] = -100
    return Batch(torch.randint(V, (B, T)), targets, torch.randn(B, T).to(dtype).sub(3), torch.randn(B, T).to(dtype))


OBJECTIVE = hl.Objective(
    ce=hl.Term(cross_entropy, label_smoothing=0.1),
    rl=hl.Term(grpo, weight=0.5),
    z=hl.Term(z_loss, weight=1e-2),
    h=hl.Term(entropy_bonus, weight=0.1),
    metrics=["accuracy"],
)


def reference(whole: Batch, tied: bool = False, bias: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole batch in this process."""
    net = model(whole.advantage.dtype, tied=tied, bias=bias)
    out = net(whole.tokens, targets=whole.targets, objective=OBJECTIVE, inputs=whole.inputs())
    out.loss.backward()
    return out.loss.detach(), {n: p.grad for n, p in net.named_parameters()}


def full(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def same_gradients(net: nn.Module, want: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    found = {n.removeprefix("module."): full(p.grad) for n, p in net.named_parameters()}
    assert found.keys() == want.keys()
    for name, g in want.items():
        assert g.abs().max() > 0, name
        torch.testing.assert_close(found[name], g, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def summed(x: Tensor, group: Any = None) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x
