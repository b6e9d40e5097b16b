"""What type checkers see of the package, in a user's file with the README's blocks: mypy and pyright, both strict."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headloss as hl

ROOT = Path(__file__).parent.parent
TYPES = """
from typing import assert_type
from headloss.losses import gspo

objective = hl.Objective(ce=cross_entropy, rl=hl.Term(gspo, low=0.1), metrics=["entropy", hl.Term(cross_entropy)])
hidden, targets = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
head = hl.FusedLMHead(8, 16)
assert_type(head(hidden), Tensor)
assert_type(head(hidden, targets=targets, objective=objective), hl.Output)
assert_type(head(hidden, targets=targets, objective=objective).facts.logprob, Tensor)
assert_type(hl.row_facts(hl.Logits(hidden), want=("entropy",))["entropy"], Tensor)
assert_type(hl.HeadParallel(), hl.HeadParallel)
assert_type(cross_entropy(hidden, hidden, label_smoothing=0.1), tuple[Tensor, dict[str, Tensor]])
assert_type(hl.losses.forward_kl(hidden, hidden), Tensor)
"""
WRONG = {  # each line is an error for both
    "head(hidden, targets=targets)": "an objective is missing",
    "cross_entropy(hidden, hidden, smoothing=0.1)": "no such option",
    "hl.losses.cros_entropy": "no such loss",
    "wrong: Tensor = head(hidden, objective=objective)": "a record, not a tensor",
}


def readme() -> str:
    """The README's blocks as one file, as a user would paste them."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a_users_file.py"
    path.write_text(readme() + TYPES + "".join(f"{line}  # wrong: {why}\n" for line, why in WRONG.items()))
    return path


def wrong_lines(text: str) -> set[int]:
    return {n for n, line in enumerate(text.splitlines(), 1) if "# wrong:" in line}


def test_mypy(file: Path) -> None:
    """With our own cache, so torch is not read again; a_users_file is strict in pyproject.toml."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--output", "json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {f["line"] for f in found if f["severity"] == "error"} == wrong_lines(file.read_text()), done.stdout


def test_pyright(file: Path) -> None:
    pytest.importorskip("pyright")
    settings = {"include": [file.name], "typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (file.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(file.parent)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        found = json.loads(done.stdout)["generalDiagnostics"]
    except (subprocess.TimeoutExpired, json.JSONDecodeError, KeyError):
        pytest.skip("pyright is installed and does not start here: it wants node, and once the network")
    found = [f for f in found if f["severity"] == "error" and 'of "backward" is' not in f["message"]]  # torch's own
    lines = {f["range"]["start"]["line"] + 1 for f in found}
    assert lines == wrong_lines(file.read_text()), "\n".join(f["message"] for f in found)


def test_the_stub_says_what_the_functions_do() -> None:
    """`make docs` writes it; here, that a loss returns what the stub says it returns."""
    stub = (Path(inspect.getfile(hl.losses)).parent / "__init__.pyi").read_text()
    for name in hl.losses.LOSSES:
        assert f"\ndef {name}(" in stub, f"{name} is not in headloss/losses/__init__.pyi: run `make docs`"
