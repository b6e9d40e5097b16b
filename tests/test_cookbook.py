"""Every Python block of the cookbook runs, in order, in one namespace."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import headloss as hl

PAGE = Path(__file__).parents[1] / "docs" / "cookbook.md"
BLOCKS = [(m.start(), m[1]) for m in re.finditer(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)]


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """The namespace after each block."""
    namespace: dict[str, Any] = {}
    after = []
    for start, code in BLOCKS:
        line = PAGE.read_text()[:start].count("\n") + 1
        exec(compile("\n" * line + code, str(PAGE), "exec"), namespace)
        after.append(dict(namespace))
    return after


def find(runs: list[dict[str, Any]], term: str) -> list[hl.Output]:
    """Each record that has this term, once."""
    records = {id(n["out"]): n["out"] for n in runs if "out" in n}
    return [out for out in records.values() if term in out.terms]


def test_every_block_ran(runs: list[dict[str, Any]]) -> None:
    assert len(runs) == PAGE.read_text().count("```python") > 8
    for namespace in runs:
        if "out" in namespace:
            assert namespace["out"].loss.isfinite()
    assert all(p.grad is not None and p.grad.any() for p in runs[-1]["depths"].parameters())


def test_the_numbers_mean_what_the_page_says(runs: list[dict[str, Any]]) -> None:
    end = runs[-1]
    valid = end["targets"] != -100
    logits = end["reference_head"](end["reference_trunk"](end["tokens"]))
    dense = logits.log_softmax(-1).gather(-1, end["targets"].clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(end["ref"][valid], dense[valid].detach())
    assert not end["ref"].requires_grad
    assert len(find(runs, "dpo")) == len(find(runs, "kto")) == len(find(runs, "mtp")) == 1
    assert all(math.isfinite(float(m)) for out in find(runs, "rl") for m in out.metrics.values())


def test_the_depths_add_up(runs: list[dict[str, Any]]) -> None:
    end = runs[-1]
    weight, count = end["head"].weight, int((end["targets"] != -100).sum())
    total = 0.0
    for hidden, targets, share in zip(end["stacked"], end["shifted"], (1.0, 0.3, 0.1)):
        loss = torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum")
        total += share * float(loss.detach()) / count
    assert float(find(runs, "mtp")[0].loss.detach()) == pytest.approx(total, rel=1e-5)


def test_the_renamed_metrics(runs: list[dict[str, Any]]) -> None:
    from headloss.integrations.names import VERL, rename

    assert {"actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy"} <= set(rename(runs[-1]["numbers"], VERL))
