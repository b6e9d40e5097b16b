"""Result files: what was measured, by which command, on what device, with which versions, and when."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def environment(device: str = "cpu") -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "headloss": _version()}
    if "triton" in sys.modules:
        versions["triton"] = sys.modules["triton"].__version__
    name = torch.cuda.get_device_name() if device == "cuda" else _cpu()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "device": name,
        "architecture": platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def short(device: str) -> str:
    """What to call results of this device: "cpu", or the last word of a GPU's name, such as "h200"."""
    return torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else device


def command(module: str) -> str:
    """How this run was started, as one would type it."""
    return " ".join([f"python -m {module}", *sys.argv[1:]])


def write(name: str, result: dict[str, Any]) -> Path:
    """To `benchmarks/results`, or to the folder $OUT."""
    path = Path(os.environ.get("OUT") or RESULTS) / f"{name}.json"
    text = json.dumps(result, indent=1)
    flat = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")  # a list of numbers on one line
    path.write_text(flat.sub(lambda m: "[" + re.sub(r"\s*\n\s*", " ", m[1]) + "]", text) + "\n")
    return path


def _version() -> str:
    """Read, not imported: a script that seeds faults into the package must not have it loaded."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "headloss" / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None, "headloss/__init__.py says no version"
    return found[1]


def _cpu() -> str:
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or "CPU"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")]
    return next((name for name in names if name and name != "-"), "CPU")
