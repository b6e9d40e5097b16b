"""What is built and shipped: a wheel with every file, a long description without dead links, versions that agree."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import headloss as hl

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def long_description() -> ModuleType:
    spec = importlib.util.spec_from_file_location("long_description", ROOT / "docs" / "long_description.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_long_description_has_no_dead_links() -> None:
    rewritten = long_description().rewritten
    text = (ROOT / "README.md").read_text()
    assert "](docs/" in text
    for source in (None, "https://example.org/headloss/"):
        made = rewritten(text, source)
        assert not re.findall(r"\]\((?!https?:|#)", made) and "<!--" not in made
        assert ("(https://example.org/headloss/blob/main/docs/guide.md)" in made) == (source is not None)


def test_the_wheel_has_every_file(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    for name in ("headloss", "README.md", "LICENSE", "pyproject.toml", "MANIFEST.in"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        names = set(wheel.namelist())
        (about,) = [wheel.read(n).decode() for n in names if n.endswith("METADATA")]
        (entry,) = [wheel.read(n).decode() for n in names if n.endswith("entry_points.txt")]
    wanted = [p for p in (ROOT / "headloss").rglob("*") if p.suffix in (".py", ".pyi", ".typed")]
    missing = [str(p) for p in wanted if str(p.relative_to(ROOT)) not in names]
    assert not missing and "headloss/losses/__init__.pyi" in names and "headloss/py.typed" in names, missing
    assert not [n for n in names if n.startswith(("tests", "docs", "examples", "proof", "benchmarks"))]
    assert f"Version: {hl.__version__}\n" in about and "Author: headloss developers" in about
    assert {"cli", "transformers", "trl", "dev"} <= set(re.findall(r"Provides-Extra: (\w+)", about))
    assert "headloss = headloss.cli:main" in entry


def test_versions_agree() -> None:
    assert f"version: {hl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {hl.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    oldest = PROJECT["requires-python"].removeprefix(">=")
    said = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    (row,) = re.findall(r"^\| Python \|.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert said[0] == oldest and all(version in row for version in said)
