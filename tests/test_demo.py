"""The command line: the demo in its fast form, its parts, and the table of losses."""

from __future__ import annotations

import re

import torch
from typer.testing import CliRunner

from headloss.cli import compare, main
from headloss.cli.losses import entries
from headloss.cli.text import Batches, Characters, standard_library
from headloss.cli.tiny import TinyTransformer
from headloss.losses import LOSSES


def test_demo_tells_its_story_without_control_codes() -> None:
    result = CliRunner().invoke(main, ["demo", "--fast", "--seed", "3"])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output and "\r" not in result.output
    before, after = re.search(r"perplexity\s*│\s*([\d.]+)\s*│\s*([\d.]+)", result.output).groups()  # type: ignore[union-attr]
    assert float(after) < 0.8 * float(before)
    for name in compare.WAYS:
        assert name in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_every_way_of_the_comparison_gives_the_same_numbers() -> None:
    ticks: list[None] = []
    ways = compare.compare(N=24, V=300, D=8, rounds=2, seed=0, tick=lambda: ticks.append(None))
    assert [w.name for w in ways] == list(compare.WAYS) and len(ticks) == compare.steps(2)
    for way in ways:
        assert way.loss_error < 1e-5 and way.grad_error < 1e-4 and way.seconds > 0


def test_peak_bytes_counts_what_lives_at_the_same_time() -> None:
    def work() -> None:
        for _ in range(3):
            x = torch.empty(1000, dtype=torch.float64)  # 8000 bytes, one after the other
            x.fill_(0)
            del x

    assert 8000 <= compare.peak_bytes(work) < 8000 + 1000
    both = compare.peak_bytes(lambda: (torch.empty(1000), torch.empty(500)))
    assert 6000 <= both < 6000 + 1000


def test_text_round_trip_and_windows() -> None:
    text = standard_library(2)
    assert len(text) > 10_000 and int(text.max()) < Characters.size
    assert Characters.decode(Characters.encode("Zen é of\nPython")) == "Zen  of\nPython"
    tokens, targets = Batches(text, length=16, size=5, seed=0)("train")
    assert tokens.shape == targets.shape == (5, 16) and torch.equal(tokens[:, 1:], targets[:, :-1])


def test_the_tiny_transformer_does_not_look_ahead() -> None:
    model = TinyTransformer(Characters.size, length=12, D=16, layers=2, H=4).eval()
    tokens = torch.randint(Characters.size, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % Characters.size
    torch.testing.assert_close(model(tokens)[:, :7], model(changed)[:, :7])


def test_losses_prints_every_loss() -> None:
    result = CliRunner().invoke(main, ["losses"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for name in LOSSES:
        assert name in result.output
    for entry in entries():
        assert entry.formula and (entry.facts or entry.inputs), entry
