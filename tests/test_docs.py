"""The documents run: every ```python block, in order, and the pages made from the code are up to date."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headloss.losses import LOSSES
from headloss.reductions import REDUCTIONS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"^<!-- needs (\w+) -->$", re.MULTILINE)  # a page whose blocks want more than torch
FILE = re.compile(r"# ((?:headloss|tests)/\S+\.py)\n")


def blocks(path: Path) -> list[str]:
    """The blocks of a document, each padded so that a traceback shows the document's own line numbers."""
    text = path.read_text()
    return ["\n" * text[: m.start(1)].count("\n") + m[1] for m in BLOCK.finditer(text)]


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if blocks(p)], ids=lambda p: p.name)
def test_blocks_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in NEEDS.findall(path.read_text()):
        pytest.importorskip(package)
    space: dict[str, object] = {"__name__": "__document__"}
    for block in blocks(path):
        exec(compile(block, str(path), "exec"), space)
    promised = re.findall(r"print\(error\)\s+# (.+)", path.read_text())
    printed = capsys.readouterr().out
    for line in promised:
        assert line in printed, f"{path.name} promises {line!r}, but it printed {printed!r}"


def test_add_a_loss_in_ten_minutes(tmp_path: Path) -> None:
    """Do what CONTRIBUTING says in a copy of the repository: write its files, run its command."""
    for name in ("headloss", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = {m[1]: block for block in BLOCK.findall(text) if (m := FILE.match(block))}
    assert len(files) == 2
    for name, block in files.items():
        assert not (ROOT / name).exists(), f"{name} exists by now; show another loss"
        (tmp_path / name).write_text(block)
    (command,) = re.findall(r"^python (-m pytest .*poly_loss)$", text, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, *command.split(), "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 5, f"the new loss was hardly tested: {done.stdout[-500:]}"


def test_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("build", ROOT / "docs" / "build.py")
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    for path, text in build.pages().items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} is out of date: run `make docs`"


def test_pages_list_every_loss_and_reduction() -> None:
    readme, guide, page = ((ROOT / name).read_text() for name in ("README.md", "docs/guide.md", "docs/losses.md"))
    missing = [name for name in LOSSES if f"#{name})" not in readme or f"### `{name}`" not in page]
    assert not missing, f"README.md or docs/losses.md lacks {missing}: run `make docs`"
    missing = [name for name in REDUCTIONS if f"`{name}`" not in guide]
    assert not missing, f"docs/guide.md does not mention {missing}: describe new reductions by hand"


def test_the_first_sentence_is_true() -> None:
    """Half the time, a third of the memory: of the workloads in the table below it."""
    told = "in roughly half the time and a third of the memory of eager PyTorch"
    assert told in (ROOT / "README.md").read_text()
    (name,) = re.findall(r"\(benchmarks/results/(suite_\w*h200\.json)\)", (ROOT / "README.md").read_text())
    record = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    found = {(w["workload"], w["way"]): w for w in record["workloads"] if w["V"] == 128256}
    names = {name for name, _ in found}
    ratio = lambda what: [found[n, "headloss"][what] / found[n, "eager"][what] for n in names]
    assert len(names) == 5 and not any(found[n, "headloss"]["wrong"] for n in names)
    assert statistics.mean(ratio("ms")) < 0.55 and max(ratio("ms")) < 0.62 and max(ratio("GiB")) < 0.35


def test_turning_it_on_in_three_lines() -> None:
    """The README's block for Transformers, on a small model: the same loss, and a gradient."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (block,) = re.findall(
        r"^```python transformers\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert len([line for line in block.splitlines() if line.strip()]) <= 3
    size = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    model, ids = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)), torch.randint(97, (2, 8))
    before = model(input_ids=ids, labels=ids).loss
    exec(compile(block, "README.md", "exec"), {"model": model})
    after = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(after.loss, before)
    assert after.logits.numel() < ids.numel() * 97
    after.loss.backward()


def places(path: Path) -> set[str]:
    """What a link can name in a page: its headings, as GitHub and mkdocs write them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for link, place in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose):
            to = path.parent / link if link else path
            assert to.exists(), f"{path.name} links to {link}"
            assert not place or place in places(to), f"{path.name} links to #{place} in {to.name}"
