"""A tiny transformer in plain PyTorch, with a `FusedLMHead` where its last linear layer would be.

Dimension key:  B batch   T time   D model size   H heads   V vocabulary
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headloss as hl


class Block(nn.Module):
    def __init__(self, D: int, H: int) -> None:
        super().__init__()
        self.H = H
        self.norm_in, self.norm_mid = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.mix = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(self.norm_in(x_BTD)).view(B, T, 3, self.H, D // self.H).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.mix(seen.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.down(F.gelu(self.up(self.norm_mid(x_BTD))))


class TinyTransformer(nn.Module):
    """Tokens (B, T) to hidden states (B, T, D); `head` makes logits or the loss of them."""

    def __init__(self, vocab: int, length: int, D: int, layers: int, H: int = 4) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, D), nn.Embedding(length, D)
        self.blocks = nn.ModuleList(Block(D, H) for _ in range(layers))
        self.norm = nn.LayerNorm(D)
        self.head = hl.FusedLMHead(D, vocab)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.3)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.token(tokens_BT) + self.place.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.norm(x_BTD)

    def source(self, tokens_BT: Tensor) -> hl.Linear:
        """What an objective or a student reads of this model."""
        return hl.Linear(self(tokens_BT), self.head.weight)

    @torch.no_grad()
    def sample(self, tokens_BT: Tensor, count: int, random: torch.Generator) -> Tensor:
        """(B, count): what the model says after `tokens_BT`, drawn one at a time."""
        start = tokens_BT.shape[1]
        for _ in range(count):
            logits_BV = self.head(self(tokens_BT)[:, -1])
            drawn_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=random)
            tokens_BT = torch.cat([tokens_BT, drawn_B1], 1)
        return tokens_BT[:, start:]

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())
