"""Seed the faults of `proof.faults` one at a time, and see which test notices: `python -m proof.mutants`.

Each fault is put into a copy of the repository in a temporary folder, never into the tree itself.  The tests likely to
notice run first, then, if they are all green, the whole suite.  A fault that nothing notices is a missing test.  The
report goes to benchmarks/results/mutants.json, and the table of docs/trust.md is made from it.

    python -m proof.mutants --only facts.py      # faults of files whose names begin so
    python -m proof.mutants --check              # do they all still apply?
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from proof.faults import FAULTS, Fault
from proof.record import RESULTS, ROOT, command, environment, write

COPIED = ("headloss", "tests", "docs", "benchmarks", "examples", "proof", "pyproject.toml", "README.md")
COPIED += ("CONTRIBUTING.md", "Makefile")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def broken(fault: Fault, text: str) -> str:
    """The file with the fault in it; an error if the place is gone or not the only one."""
    found = text.count(fault.old)
    if found != 1:
        raise ValueError(f"{fault.file}: wanted this text exactly once, found it {found} times: {fault.old!r}")
    changed = text.replace(fault.old, fault.new)
    compile(changed, fault.file, "exec")
    return changed


def copy(folder: Path) -> Path:
    """The repository as it stands, without what others may change under our feet."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


def pytest(folder: Path, tests: tuple[str, ...], seconds: float) -> tuple[int | None, str]:
    """The exit status (None: out of time) and the output of some tests in the copy."""
    there = [t for t in tests if (folder / t.split("::")[0]).exists()]
    arguments = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *there]
    environ = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    # Hypothesis would shrink for minutes what only has to be noticed.
    environ["HEADLOSS_NO_SHRINK"] = "1"
    process = subprocess.Popen(
        arguments, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # its own session: nobody else's process is in it
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


def seed(folder: Path, fault: Fault, seconds: float, wide: bool) -> dict[str, Any]:
    path = folder / "headloss" / fault.file
    text = path.read_text()
    path.write_text(broken(fault, text))
    begin = time.monotonic()
    row: dict[str, Any] = {"file": fault.file, "what": fault.what, "caught": None}
    try:
        for tests, limit in ((fault.first, seconds), (("tests",), 6 * seconds)) if wide else ((fault.first, seconds),):
            status, output = pytest(folder, tests, limit)
            if status is None:
                row["caught"] = "a test that did not end"
            elif status != 0:
                failed = FAILED.findall(output)
                row["caught"] = failed[0] if failed else f"exit status {status}: {output.strip().splitlines()[-1]}"
            if row["caught"]:
                break
    finally:
        path.write_text(text)
    return row | {"seconds": round(time.monotonic() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="files whose names begin so")
    parser.add_argument("--check", action="store_true", help="only see whether each fault still applies")
    parser.add_argument("--narrow", action="store_true", help="only the tests likely to notice, not the whole suite")
    parser.add_argument("--seconds", type=float, default=240.0, help="for the tests that run first")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th fault, from the i-th on")
    parser.add_argument("--name", default="mutants", help="of the results file")
    args = parser.parse_args()
    i, n = map(int, args.part.split("/"))
    faults = [f for f in FAULTS if f.file.startswith(args.only)][i::n]
    for fault in faults:
        broken(fault, (ROOT / "headloss" / fault.file).read_text())
    print(f"{len(faults)} faults apply", flush=True)
    if args.check:
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = copy(Path(temporary))
        firsts = tuple(dict.fromkeys(t for f in faults for t in f.first))
        status, output = pytest(folder, firsts, 3600)
        if status != 0:
            sys.exit(f"without any fault the tests are not green:\n{output[-3000:]}")
        print(f"green without a fault: {' '.join(firsts)}", flush=True)
        for fault in faults:
            rows.append(seed(folder, fault, args.seconds, not args.narrow))
            row = rows[-1]
            print(
                f"{row['seconds']:6.1f}s  {fault.file}: {fault.what}\n         {row['caught'] or 'SURVIVED'}",
                flush=True,
            )
            save(args.name, rows)
    survivors = [row for row in rows if not row["caught"]]
    print(f"caught {len(rows) - len(survivors)} of {len(rows)}")
    sys.exit(bool(survivors))


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """With what an earlier run found of other faults: a run may cover a part of the table."""
    path = Path(os.environ.get("OUT") or RESULTS) / f"{name}.json"
    key = lambda row: (row["file"], row["what"])
    before = {key(row): row for row in (json.loads(path.read_text())["faults"] if path.exists() else [])}
    every = before | {key(row): row for row in rows}
    faults = [every[f.file, f.what] for f in FAULTS if (f.file, f.what) in every]
    caught = sum(bool(row["caught"]) for row in faults)
    result = {"command": command("proof.mutants"), **environment(), "caught": caught, "total": len(faults)}
    write(name, result | {"faults": faults})


if __name__ == "__main__":
    main()
