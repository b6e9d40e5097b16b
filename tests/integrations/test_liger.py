"""The page on migrating from Liger: its pairs of blocks give the same loss and gradients, Liger's run by Liger.

Liger's chunked losses are plain PyTorch and run on a CPU (without torch.compile); its Triton kernels are compared by
`headloss bench` on a GPU.  `make` puts Liger into .venv/stacks.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "migrating-from-liger.md"
BLOCK = re.compile(r"^```python( liger)?\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_every_pair_of_blocks_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(sys.prefix) / "stacks")])
    pytest.importorskip("liger_kernel.chunked_loss")
    monkeypatch.setattr(torch, "compile", lambda fn=None, **_: fn if fn is not None else lambda f: f)
    space: dict[str, Any] = {}
    compared, liger = 0, None
    for is_liger, code in BLOCK.findall(PAGE.read_text()):
        if is_liger:
            liger = code  # it speaks of tensors that the block after it makes
            continue
        exec(compile(code, str(PAGE), "exec"), space)
        if liger is None:
            continue
        exec(compile(liger, str(PAGE), "exec"), space)
        leaves = space["hidden"], space["weight"]
        ours, theirs = space["ours"], space["theirs"]
        torch.testing.assert_close(ours, theirs, msg=lambda m: f"{liger}\n{m}")
        for a, b in zip(*(torch.autograd.grad(x, leaves) for x in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        compared, liger = compared + 1, None
    assert compared == 3
