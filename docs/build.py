"""Rebuild what the documents take from the code: `make docs`, or `python docs/build.py`.

docs/losses.md is made whole.  README.md has marked places, <!-- name --> to <!-- /name -->, filled from the losses,
from `explain`, and from the benchmarks' result files; no number is typed by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

import headloss as hl
from headloss.cli import losses

ROOT = Path(__file__).parent.parent


def pages() -> dict[Path, str]:
    """Each file that this script keeps, as it should be."""
    readme = (ROOT / "README.md").read_text()
    for name, made in (("explain", explain()), ("losses", table()), ("measured", measured())):
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        assert start in readme and end in readme, f"README.md has no place for {name}"
        readme = readme[: readme.index(start) + len(start)] + made + readme[readme.index(end) :]
    return {ROOT / "README.md": readme, ROOT / "docs" / "losses.md": losses.markdown()}


def explain() -> str:
    """What `explain` says of the README's own loss, on tensors without data."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    space: dict[str, object] = {}
    for block in blocks[:2]:
        exec(compile(block, "README.md", "exec"), space)
    objective = space["objective"]
    assert isinstance(objective, hl.Objective)
    made = objective.explain(
        hl.Linear(space["hidden"], space["lm_head"].weight),  # type: ignore[arg-type, attr-defined]
        space["targets"],  # type: ignore[arg-type]
        advantage=torch.zeros(4, 32),
    )
    return f"```text\n{made}\n```\n"


def table() -> str:
    rows = [f"| `{e.name}` | {_cell(e.formula)} |" for e in losses.entries()]
    return "\n".join(["| loss | |", "|---|---|", *rows]) + "\n"


def measured() -> str:
    """The CPU benchmark's last run."""
    path = ROOT / "benchmarks" / "results" / "cpu_losses.json"
    record = json.loads(path.read_text())
    device = record["device"]
    lines = [
        f"Measured with `{record['command']}` on {device['cpu']} ({device['architecture']}), {device['threads']} "
        f"threads, torch {record['versions']['torch']}, {record['dtype']}, {record['date']}; {record['statistic']}:",
        "",
        "| | ms | relative | gradient error |",
        "|---|---:|---:|---:|",
    ]
    for case in record["cases"]:
        lines.append(f"| **{case['case']}** | | | |")
        for name, found in case["candidates"].items():
            lines.append(f"| {name} | {found['ms']:.0f} | {found['times_headloss']:.2f}x | {found['grad_error']:.0e} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
