"""The recipe for a backend, followed: a module with the names that docs/extending.md lists, and no others."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import headloss as hl
from headloss import backends
from headloss.losses import cross_entropy, forward_kl, gspo, jsd, z_loss

torch_backend = import_module("headloss.backends.torch")  # `headloss.backends` has torch itself under that name


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
    section = page.split("## A backend")[1].split("## ")[0]
    listed = re.findall(r"^    ([^(\n]+?)(?:\(| {2,})", section, re.MULTILINE)
    names = {name for entry in listed for name in re.findall(r"\b(?!None)\w+", entry)}
    assert {"NAME", "sums", "pull", "lower"} <= names
    module = ModuleType("headloss.backends.mine")
    vars(module).update({name: getattr(torch_backend, name) for name in names} | {"NAME": "mine"})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backends, "BACKENDS", (*backends.BACKENDS, "mine"))
    monkeypatch.setitem(backends.MODULES, "mine", module.__name__)


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("terms", ["row", "segment", "teacher", "ids"])
def test_a_backend_needs_no_more_names(kind: str, terms: str) -> None:
    hidden, weight = torch.randn(6, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    targets, call = torch.tensor([0, 3, -100, 10, 2, 2]), {}
    losses = {"ce": cross_entropy, "z": z_loss}
    if terms == "segment":
        losses = {"rl": gspo}
        call = {"segments": hl.Segments.from_ids(torch.tensor([0, 0, 0, 1, 1, 1])), "advantage": torch.randn(6)}
        call["old_logprob"] = torch.full((6,), -2.0)
    elif terms == "teacher":
        losses |= {"kl": forward_kl, "js": jsd}
        call = {"teacher": hl.Logits(torch.randn(6, 11))}
    elif terms == "ids":
        losses |= {"ids": lambda ids_logit: ids_logit.sum(1)}
        call = {"ids": torch.tensor([[1, 4]] * 6)}
    results = []
    for backend in ("mine", "torch"):
        source = hl.Logits(hidden @ weight.T) if kind == "Logits" else hl.Linear(hidden, weight, memory=4 * 11 * 6)
        objective = hl.Objective(**losses, backend=backend)  # type: ignore[arg-type]
        loss = objective(source, targets, **call).loss  # type: ignore[arg-type]
        results.append((loss, *torch.autograd.grad(0.3 * loss, (hidden, weight))))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
