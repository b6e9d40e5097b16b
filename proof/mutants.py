"""Seed the faults of `proof.faults` one at a time, and see which test notices: `python -m proof.mutants`.

Each fault is put into a copy of the repository in a temporary folder, never into the tree itself.  The tests likely to
notice run first, then, if they are all green, the whole suite.  A fault that nothing notices is a missing test.  The
report goes to benchmarks/results/mutants.json, and the table of docs/trust.md is made from it.

    python -m proof.mutants --only facts.py      # faults of files whose names begin so
    python -m proof.mutants --check              # do they all still apply?
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proof.faults import FAULTS, Fault
from proof.record import RESULTS, ROOT, command, environment, write

COPIED = ("headloss", "tests", "docs", "benchmarks", "examples", "proof", "pyproject.toml", "README.md")
COPIED += ("CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "Makefile", "mkdocs.yml")
ONE_BY_ONE = ("-x", "-p", "no:xdist")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


def broken(fault: Fault, text: str) -> str:
    """The file with the fault in it; an error if the place is gone or not the only one."""
    found = text.count(fault.old)
    if found != 1:
        raise ValueError(f"{fault.file}: wanted this text exactly once, found it {found} times: {fault.old!r}")
    changed = text.replace(fault.old, fault.new)
    compile(changed, fault.file, "exec")
    return changed


def digest(fault: Fault, text: str) -> str:
    """Of a fault and the file it is put into: a line of the report counts for as long as neither changes."""
    return hashlib.sha256("\n".join([text, fault.old, fault.new]).encode()).hexdigest()[:12]


def copy(folder: Path) -> Path:
    """The repository as it stands, without what others may change under our feet."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


def pytest(
    folder: Path, arguments: Sequence[str], seconds: float, interpreted: bool = False, how: Sequence[str] = ONE_BY_ONE
) -> tuple[int | None, str]:
    """The exit status (None: out of time) and the output of pytest in the copy.

    A child of this process runs it: torch is loaded already, which would take longer than most of the tests.
    """
    log = folder / "pytest.log"
    child = os.fork()
    if child == 0:
        status = 3
        try:
            status = _inside(folder, [*how, *arguments], log, interpreted)
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), log.read_text()
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)  # its own session: nobody else's process is in it
            os.waitpid(child, 0)
            return None, log.read_text()
        time.sleep(0.1)


def _inside(folder: Path, arguments: Sequence[str], log: Path, interpreted: bool) -> int:
    os.setsid()
    os.chdir(folder)
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    # Hypothesis would shrink for minutes what only has to be noticed.
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "HEADLOSS_NO_SHRINK": "1"}
    os.environ |= {"OMP_NUM_THREADS": "1", "HOME": str(folder)}
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    sys.dont_write_bytecode = True
    for name in [n for n in sys.modules if n.split(".")[0] in ("proof", "headloss")]:
        del sys.modules[name]
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    import pytest as runner

    return int(runner.main(["-q", "-p", "no:cacheprovider", *arguments]))


def seed(folder: Path, fault: Fault, seconds: float, wide: bool, without: Sequence[str]) -> dict[str, Any]:
    path = folder / "headloss" / fault.file
    text = path.read_text()
    path.write_text(broken(fault, text))
    begin = time.monotonic()
    row: dict[str, Any] = {"file": fault.file, "what": fault.what, "digest": digest(fault, text), "caught": None}
    runs = [(arguments(fault), seconds, fault.interpreted), *([(["tests"], 6 * seconds, False)] if wide else [])]
    try:
        for chosen, limit, interpreted in runs:
            status, output = pytest(folder, [*chosen, *without], limit, interpreted)
            failed = FAILED.findall(output)
            if status is None:
                row["error"] = f"out of time after {limit:.0f} s"  # not caught: the machine may be slow
            elif status == 1 and failed:
                row["caught"] = failed[0]
            elif status == -signal.SIGSEGV:  # a write beyond a tensor's end
                row["caught"] = f"{chosen[0]}, which crashed"
            elif status not in (0, 5):  # 5: nothing was selected
                row["error"] = f"exit status {status}: {output.strip()[-400:]}"
            if row["caught"]:
                break
    finally:
        path.write_text(text)
    return row | {"seconds": round(time.monotonic() - begin, 1)}


def arguments(fault: Fault) -> list[str]:
    """The tests likely to notice; of a loss's own file those that carry its name."""
    loss = Path(fault.file).stem if fault.file.startswith("losses/") else "_"
    return [*fault.first, *(["-k", loss] if not loss.startswith("_") else [])]


def work(faults: Any, rows: Any, folder: Path, seconds: float, wide: bool, without: Sequence[str]) -> None:
    """One worker, with a copy of its own."""
    copy(folder)
    for i in iter(faults.get, None):
        rows.put(seed(folder, FAULTS[i], seconds, wide, without))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="files whose names begin so")
    parser.add_argument("--check", action="store_true", help="only see whether each fault still applies")
    parser.add_argument("--narrow", action="store_true", help="only the tests likely to notice, not the whole suite")
    parser.add_argument("--seconds", type=float, default=240.0, help="for the tests that run first")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--unchecked", action="store_true", help="do not see first whether the tests are green")
    parser.add_argument("--again", action="store_true", help="only those not yet caught in their file as it is now")
    parser.add_argument("--new", action="store_true", help="only those that no earlier run has caught, in any state")
    parser.add_argument("--name", default="mutants", help="of the results file")
    args = parser.parse_args()
    faults = [f for f in FAULTS if f.file.startswith(args.only)]
    if args.again:
        caught = {row.get("digest") for row in earlier(args.name)["faults"] if row["caught"]}
        faults = [f for f in faults if digest(f, (ROOT / "headloss" / f.file).read_text()) not in caught]
    if args.new:
        known = {(row["file"], row["what"]) for row in earlier(args.name)["faults"] if row["caught"]}
        faults = [f for f in faults if (f.file, f.what) not in known]
    for fault in faults:
        broken(fault, (ROOT / "headloss" / fault.file).read_text())
    print(f"{len(faults)} faults apply", flush=True)
    if args.check:
        return
    import pytest  # noqa: F401  (loaded before the workers part, as torch is)

    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("fork")
    todo, done = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        red = [] if args.unchecked else failing(Path(temporary) / "green", faults, args.jobs)
        without = [x for name in red for x in ("--deselect", name)]
        for fault in faults:
            todo.put(FAULTS.index(fault))
        folders = [Path(temporary) / str(i) for i in range(args.jobs)]
        how = (args.seconds, not args.narrow, without)
        workers = [context.Process(target=work, args=(todo, done, folder, *how)) for folder in folders]
        for worker in workers:
            todo.put(None)
            worker.start()
        for _ in faults:
            rows.append(row := done.get())
            told = row["caught"] or f"SURVIVED {row.get('error', '')}"
            print(f"{row['seconds']:6.1f}s  {row['file']}: {row['what']}\n         {told}", flush=True)
            save(args.name, rows, red)
        for worker in workers:
            worker.join()
    survivors = [row for row in rows if not row["caught"]]
    print(f"caught {len(rows) - len(survivors)} of {len(rows)}")
    sys.exit(bool(survivors))


def failing(folder: Path, faults: Sequence[Fault], jobs: int) -> list[str]:
    """Tests that are red without a fault, with other versions of PyTorch, say: what they say of one means nothing."""
    copy(folder)
    firsts = sorted({t for f in faults for t in f.first})  # folders whole: an older pytest loses their fixtures else
    how = ("-n", str(jobs)) if jobs > 1 and importlib.util.find_spec("xdist") is not None else ("-p", "no:xdist")
    status, output = pytest(folder, firsts, 3600, how=how)
    red = FAILED.findall(output)
    if status not in (0, 1) or len(red) > 20:
        sys.exit(f"without any fault the tests are not green:\n{output[-3000:]}")
    print(f"without a fault, {len(red)} are red: {' '.join(red)}", flush=True)
    return red


def save(name: str, rows: list[dict[str, Any]], red: list[str]) -> None:
    """With what an earlier run found of other faults: a run may cover a part of the table."""
    before = earlier(name)
    every = {(row["file"], row["what"]): row for row in [*before["faults"], *rows]}
    faults = [every[f.file, f.what] for f in FAULTS if (f.file, f.what) in every]
    caught = sum(bool(row["caught"]) for row in faults)
    result = {"command": command("proof.mutants"), **({"note": before["note"]} if "note" in before else {})}
    result |= {**environment(), "caught": caught, "total": len(faults)}
    result |= {"left out, red without a fault": red} if red else {}
    write(name, result | {"faults": faults})


def earlier(name: str) -> dict[str, Any]:
    path = Path(os.environ.get("OUT") or RESULTS) / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"faults": []}


if __name__ == "__main__":
    main()
