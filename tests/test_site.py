"""The documents as a site: every page in its order, every picture up to date, and a strict build."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def pages(nav: Any) -> list[str]:
    """The pages of a nav, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)]


def test_every_page_is_in_the_nav() -> None:
    yaml = pytest.importorskip("yaml")
    found = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(found) == len(set(found))
    there = {p.name for p in (ROOT / "docs").glob("*.md")}
    assert set(found) == there, f"mkdocs.yml: nav is off by {set(found) ^ there}"


def test_every_page_begins_with_its_title() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        assert re.match(r"# \S", path.read_text()), f"{path.name} does not begin with a title"


def test_it_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "parallelism.html").read_text()
    assert "```" not in page, "a fence was not understood"
    assert (tmp_path / "files" / "examples" / "tensor_parallel.py.txt").exists()
    html = "".join(p.read_text() for p in tmp_path.glob("*.html"))
    outside = [u for u in re.findall(r'(?:src|href)="(https?://[^"]+)"', html) if "mkdocs.org" not in u]
    assert not outside, f"the site wants {sorted(set(outside))} from elsewhere"


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_pictures_are_up_to_date(path: Path) -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("plots", ROOT / "benchmarks" / "plots.py")
    assert spec is not None and spec.loader is not None
    plots = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plots)
    record = json.loads(path.read_text())
    if plots.kind_of(record) is None:
        pytest.skip("not something to draw")
    picture = ROOT / "docs" / "pictures" / f"{path.stem}.svg"
    assert picture.exists(), f"{picture.name}: run `make plots`"
    fresh = f"{path.name} {plots.digest(record)}" in picture.read_text()
    assert fresh, f"{picture.name} is not of this {path.name}: run `make plots`"
    shown = any(f"pictures/{path.stem}.svg" in p.read_text() for p in (ROOT / "docs").glob("*.md"))
    assert shown, f"no page shows {picture.name}: run `make docs`"
