"""What is built and shipped: a wheel with every file, a long description without dead links, versions that agree."""

from __future__ import annotations

import importlib.util
import os
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


def script(name: str) -> ModuleType:
    """One of the scripts in docs/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_long_description_has_no_dead_links() -> None:
    rewritten = script("long_description").rewritten
    text = (ROOT / "README.md").read_text()
    home = PROJECT["urls"]["Source"]
    made = rewritten(text, home)
    assert "](docs/" in text and not re.findall(r"\]\((?!https?:|#)", made) and "<!--" not in made
    inside = {*re.findall(rf"{home}/blob/main/([^)#]+)", made), *PROJECT["urls"].values()}
    paths = {path.removeprefix(f"{home}/blob/main/") for path in inside} - {home, f"{home}/issues"}
    assert len(paths) > 10 and not [path for path in paths if not (ROOT / path).exists()]
    assert f"repository-code: {home}\n" in (ROOT / "CITATION.cff").read_text()


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


LOADED = """
import importlib, importlib.util, json, sys
from pathlib import Path
import torch

folder = Path(sys.argv[1])
if importlib.util.find_spec("kernels"):
    from kernels import get_local_kernel
    hl = get_local_kernel(folder.parent.parent)
else:  # as the loader does it
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    hl = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hl)
losses = importlib.import_module(hl.__name__ + ".losses")
assert "headloss" not in sys.modules and hl.__name__.startswith("_headloss_cpu_")

torch.manual_seed(0)
x, y = torch.randn(6, 11, dtype=torch.float64, requires_grad=True), torch.arange(6)
segments = hl.Segments.from_cu_seqlens(torch.tensor([0, 4, 6]))
mix = hl.Objective(ce=losses.cross_entropy, dpo=hl.Term(losses.gspo, weight=0.0), metrics=["entropy"])
given = {"segments": segments, "old_logprob": torch.zeros(6), "advantage": torch.ones(6)}
out = mix(hl.Logits(x), y, **given)
out.loss.backward()
torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(x, y), atol=1e-12, rtol=0)
assert "batch" not in str(mix.explain(hl.Logits(x), y, **given))  # its losses are its own: traced, not run as they are

sys.path.insert(0, sys.argv[2])
import headloss  # beside the installed one: neither takes the other's operators
other = headloss.Objective(ce=headloss.losses.cross_entropy)(headloss.Logits(x), y)
assert other.loss.item() == mix(hl.Logits(x), y, **given).terms["ce"].item()
print("loaded")
"""


def test_the_layout_of_hugging_face_kernels(tmp_path: Path) -> None:
    """A copy under another name: no import, operator or trace of it needs the name `headloss`."""
    cuda, cpu = script("hub_kernel").export(tmp_path)
    assert (cuda.name, cpu.name) == ("torch-cuda", "torch-cpu") and not (cpu / "cli").exists()
    run = [sys.executable, "-P", "-c", LOADED, str(cpu), str(ROOT)]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False, env=without_the_checkout())
    assert done.returncode == 0 and "loaded" in done.stdout, done.stderr[-2000:]


def without_the_checkout() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
