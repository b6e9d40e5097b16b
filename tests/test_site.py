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

import headloss as hl

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def pages(nav: Any) -> list[str]:
    """The pages of a nav, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)]


def settings() -> Any:
    """mkdocs.yml; its tags are for mkdocs."""
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def test_every_page_is_in_the_nav_or_left_out_of_it() -> None:
    said = settings()
    found, aside = pages(said["nav"]), said["not_in_nav"].split()
    assert len(found) == len(set(found)) and not set(found) & set(aside)
    there = {p.name for p in (ROOT / "docs").glob("*.md")}
    assert {*found, *aside} == there, f"mkdocs.yml: nav and not_in_nav are off by {({*found, *aside}) ^ there}"


def test_pages_aside_can_be_reached() -> None:
    """What is for maintainers stands in no menu, and some page of the menu links to it."""
    said = settings()
    text = "".join((ROOT / "docs" / name).read_text() for name in pages(said["nav"]))
    assert [name for name in said["not_in_nav"].split() if f"]({name}" not in text] == []


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in hl.__all__ if name != "losses" and f"\n### `hl.{name}`\n" not in page]
    assert not missing, f"docs/api.md has no {missing}: run `make docs`"
    bare = [name for name in hl.__all__ if not (getattr(hl, name).__doc__ or "").strip()]
    assert not bare, f"no docstring: {bare}"


def test_every_page_begins_with_its_title() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        assert re.match(r"# \S", path.read_text()), f"{path.name} does not begin with a title"


def test_it_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "parallelism.html").read_text()
    assert "```" not in page, "a fence was not understood"
    assert 'class="highlight"' in page and 'data-md-color-scheme="slate"' in page  # colours, and a dark palette
    assert (tmp_path / "files" / "examples" / "tensor_parallel.py.txt").exists()
    html = "".join(p.read_text() for p in tmp_path.glob("*.html"))
    wanted = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', html)
    assert not wanted, f"the site wants {sorted(set(wanted))} from elsewhere"
    index = (tmp_path / "search" / "search_index.json").read_text()
    assert "seq_mean_token_mean" in index, "the search knows the pages"
    assert (tmp_path / "search" / "search_index.js").read_text() == f"var __index = {index}"  # opened from the disk


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
