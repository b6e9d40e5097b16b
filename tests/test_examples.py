"""The examples run as they stand, with fewer steps; the notebook cell by cell."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS = {
    "fine_tuning": ["transformers", "accelerate"],
    "grpo_trl": ["trl"],
    "own_loss": [],
    "distill_top_k": [],
    "replayed_support": [],
}


def run(name: str, *arguments: str) -> None:
    before = sys.argv
    sys.argv = [f"{name}.py", *arguments]
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = before


@pytest.mark.parametrize("name", NEEDS)
def test_it_runs_and_draws(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("matplotlib", *NEEDS[name]):
        pytest.importorskip(package)
    if name == "grpo_trl":
        importlib.import_module("headloss.integrations.trl_kernels").check_version()
    monkeypatch.setenv("MPLBACKEND", "Agg")
    run(name, "--steps", "2", "--out", str(tmp_path))
    told = capsys.readouterr().out
    assert (tmp_path / f"{name}.png").stat().st_size > 5000 and f"plot: {tmp_path}" in told
    assert told.count("step") >= 2, "it tells of its progress"
    if name == "replayed_support":
        without, with_it = told.split("largest mismatch: ")[1].split()[0], told.split(" with it")[0].split()[-1]
        assert float(without) > 0.05 and float(with_it) < 1e-5
    if name == "fine_tuning":
        assert "differ by" in told and float(told.split("differ by ")[1].split()[0]) < 1e-4


def test_the_plan_for_torchtitan(capsys: pytest.CaptureFixture[str]) -> None:
    run("torchtitan_config", "--tokens", "64", "--vocab", "1000", "--hidden", "16")
    told = capsys.readouterr().out
    assert "64 of 64 rows x 1000 columns" in told and "torchtitan" in told


def test_the_notebook_runs() -> None:
    book = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    cells = ["".join(c["source"]) for c in book["cells"] if c["cell_type"] == "code"]
    assert len(cells) >= 8 and not any(c["outputs"] for c in book["cells"] if c["cell_type"] == "code")
    if importlib.util.find_spec("matplotlib") is not None:
        import matplotlib

        matplotlib.use("Agg")
    space: dict[str, object] = {}
    for n, cell in enumerate(cells):
        exec(compile(cell, f"first_steps.ipynb, cell {n}", "exec"), space)


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    names = [p.name for p in EXAMPLES.glob("*.[pi][yp]*") if p.name != "__init__.py"]
    assert names and not [name for name in names if f"({name})" not in listed]
