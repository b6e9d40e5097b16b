"""Rebuild what the documents take from the code: `make docs`, or `python docs/build.py`.

docs/losses.md, docs/api.md, docs/faults.md and headloss/losses/__init__.pyi are made whole.  Other pages have marked
places, <!-- name --> to <!-- /name -->, filled from the losses, from `explain`, and from the result files; no number is
typed by hand.
"""

# ruff: noqa: RUF001  (the pages have multiplication signs and dashes)
from __future__ import annotations

import ast
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import headloss as hl
from headloss.cli import losses

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
import api_reference  # noqa: E402
from losses_stub import stub  # noqa: E402

from proof import tables  # noqa: E402

INDEX = ROOT / "docs" / "index.md"
GUIDE = ROOT / "docs" / "guide.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
ONE_LAUNCH = ROOT / "docs" / "one-launch.md"
CODE = ROOT / "docs" / "code.md"
TRUST = ROOT / "docs" / "trust.md"
RESULTS = ROOT / "benchmarks" / "results"
Record = dict[str, Any]


def pages() -> dict[Path, str]:
    """Each file that this script keeps, as it should be."""
    return {
        ROOT / "README.md": filled(ROOT / "README.md", {"peers": peers(), "families": families()}),
        INDEX: filled(INDEX, {"peers": peers().replace("](docs/", "](").replace("](benchmarks/", "](../benchmarks/")}),
        GUIDE: filled(GUIDE, {"explain": explain(), "first call": first_call()}),
        ROOT / "docs" / "losses.md": losses.markdown(),
        ROOT / "docs" / "api.md": api_reference.page(),
        PERFORMANCE: filled(PERFORMANCE, {**measurements(), "cpu_losses": measured(), "every_loss": every_loss()}),
        ONE_LAUNCH: filled(ONE_LAUNCH, {"overhead": overhead()}),
        CODE: filled(CODE, {"files": files()}),
        TRUST: filled(TRUST, tables.places()),
        ROOT / "docs" / "faults.md": tables.faults(),
        ROOT / "headloss" / "losses" / "__init__.pyi": stub(),
    }


def filled(path: Path, places: dict[str, str]) -> str:
    text = path.read_text()
    for name, made in places.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        assert start in text and end in text, f"{path.name} has no place for {name}"
        text = text[: text.index(start) + len(start)] + made + text[text.index(end) :]
    return text


def peers() -> str:
    """Each workload of the suite on a GPU by each way, at the vocabulary that most of them ran."""
    paths = [path for name in ("suite_h200", "suite_first_h200") if (path := RESULTS / f"{name}.json").exists()]
    path = max(paths, key=lambda p: str(json.loads(p.read_text())["date"]))
    record = json.loads(path.read_text())
    found = {(w["workload"], w["way"], w["V"]): w for w in record["workloads"]}
    V = max({v for _, _, v in found}, key=lambda v: len({way for _, way, at in found if at == v}))
    for (workload, way, v), line in [*found.items()]:
        if way == "torch.compile, kept rows":  # the better of the two where rows are ignored
            found[workload, "torch.compile", v] = line
    ways = [way for way in PEERS if any(found.get((w, way, V)) for w in {w for w, _, _ in found})]
    lines = [f"| {' | '.join(['', *(PEERS[way] for way in ways)])} |", f"|---|{'---:|' * len(ways)}"]
    for workload in dict.fromkeys(w for w, _, v in found if v == V):
        cells = [_took(found.get((workload, way, V))) for way in ways]
        lines.append(f"| {workload} | {' | '.join(cells)} |")
    one = next(w for w in record["workloads"] if w["V"] == V)
    works = dict.fromkeys(w for w, _, v in found if v == V)
    alone = {way: [found[w, way, V]["wall ms"] for w in works] for way in ("headloss", "torch.compile")}
    later = [ours - theirs for ours, theirs in zip(*alone.values(), strict=True)]
    behind = sum(x > 0 for x in later)
    by = f", by at most {max(later):.1f} ms" if behind else ""
    told = "torch.compile and QuACK get only the unmasked tokens; headloss drops the others itself. "
    told += "Steps run back to back, as in training; for single steps on an idle GPU, torch.compile "
    told += f"is ahead in {behind} of {len(works)} rows{by}. "
    for (workload, way, v), line in found.items():
        if v == V and way in ways and "failed" in line:
            told += f"{PEERS[way]} fails on {workload.partition(',')[0]} ({line['failed'].partition(':')[0]}). "
    return "\n".join(
        [
            *lines,
            "",
            f"Forward and backward of the head and its loss: {one['N']} tokens, vocabulary {V}, hidden size "
            f"{one['D']}, bfloat16, one {record['device']}. Median time, and peak memory beyond the inputs, gradients "
            f"included (the weight's alone is {V * one['D'] * 2 / 2**30:.1f} GiB); – means no such loss. {told}"
            "All are first checked against float64: *off* means a gradient error of more than twice eager's. "
            f"`{record['command']}`, torch {_torch(record)}, triton {record['versions']['triton']}, "
            f"{record['date'][:10]}: [all sizes](docs/performance.md), "
            f"[{path.name}](benchmarks/results/{path.name}).",
            "",
        ]
    )


PEERS = {"headloss": "**headloss**", "eager": "eager PyTorch", "torch.compile": "torch.compile", "Liger": "Liger"}
PEERS |= {"QuACK": "QuACK"}


def _took(found: Record | None) -> str:
    if found is None or "failed" in found:
        return "–" if found is None else "fails"
    off = ", *off*" if found["wrong"] else ""
    ms = f"{found['ms']:.1f}" if found["ms"] < 100 else f"{found['ms']:.0f}"
    return f"{ms}\N{NO-BREAK SPACE}ms, {found['GiB']:.1f}\N{NO-BREAK SPACE}GiB{off}"


def families() -> str:
    """Every loss by its family, each with a link to its formula."""
    rows = []
    for family, members in losses.by_family().items():
        rows.append(f"| {family} | {', '.join(f'[{e.name}](docs/losses.md#{e.name})' for e in members)} |")
    return "\n".join(["| | |", "|---|---|", *rows]) + "\n"


FOLDERS = {  # from the bottom up
    "losses": "The losses, one small file each: [the table of losses](losses.md)",
    "": "What a user holds, and the algebra",
    "trace": "What a loss asks for, its graph, and which rows it combines",
    "parallel": "Vocabularies on several ranks",
    "backends": "The definition in plain PyTorch",
    "backends/triton": "The Triton backend: what a call launches",
    "backends/triton/kernels": "The Triton backend: device code",
    "backends/triton/printer": "The Triton backend: losses printed as device code",
    "engine": "One call",
    "graph": "Calls under torch.compile, torch.export and CUDA graphs",
    "checks": "`hl.verify`",
    "integrations": "Adapters to trainers",
    "cli": "The command line",
}


def files() -> str:
    """Every file of the package with the first sentence of its docstring, by folder."""
    root, lines = ROOT / "headloss", list[str]()
    found = {str(path.parent.relative_to(root)).removeprefix(".") for path in root.rglob("*.py")}
    assert found == FOLDERS.keys(), f"folders without a heading, or headings without a folder: {found ^ FOLDERS.keys()}"
    for folder, heading in FOLDERS.items():
        lines += [f"### {heading}", ""]
        if folder == "losses":
            continue
        lines += ["| file | |", "|---|---|"]
        for path in sorted((root / folder).glob("*.py")):
            said = ast.get_docstring(ast.parse(path.read_text())) if not path.stem.startswith("__") else None
            if said is not None:
                first = re.split(r"(?<=\.)\s|\n\n", said)[0].replace("\n", " ").replace("|", "\\|")
                lines.append(f"| `{path.relative_to(root)}` | {first} |")
        lines.append("")
    return "\n".join(lines)


def explain() -> str:
    """What `explain` says of the guide's own loss, on tensors without data."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    space: dict[str, object] = {}
    for block in blocks[:2]:
        exec(compile(block, "guide.md", "exec"), space)
    objective = space["objective"]
    assert isinstance(objective, hl.Objective)
    made = objective.explain(
        hl.Linear(space["hidden"], space["lm_head"].weight),  # type: ignore[arg-type, attr-defined]
        space["targets"],  # type: ignore[arg-type]
        advantage=torch.zeros(4, 32),
    )
    lines = [line for line in str(made).splitlines() if not line.startswith("first call")]  # its seconds are today's
    return "\n".join(["```text", *lines, "```", ""])


def measured() -> str:
    """The CPU benchmark's last run."""
    path = RESULTS / "cpu_losses.json"
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


def every_loss() -> str:
    """All losses against eager on a CPU: of each group, the range of the ratios."""
    path = RESULTS / "every_loss_cpu.json"
    record = json.loads(path.read_text())
    groups: dict[str, list[Record]] = {}
    for line in record["lines"]:
        groups.setdefault(line["group"], []).append(line)
    lines = [
        f"Time of headloss relative to eager PyTorch on {record['N']} × {record['V']} logits, {record['dtype']}, "
        f"forward and backward, `{record['command']}` on {record['device']}, {record['threads']} threads, "
        f"torch {_torch(record)}, {record['date'][:10]}: [{path.name}](../benchmarks/results/{path.name})",
        "",
        "| | losses | best | median | worst |",
        "|---|---:|---|---:|---|",
    ]
    for group, found in groups.items():
        found.sort(key=lambda line: line["ratio"])
        best, worst = (f"{line['ratio']:.2f}×, {line['loss']}" for line in (found[0], found[-1]))
        middle = statistics.median(line["ratio"] for line in found)
        lines.append(f"| {group} | {len(found)} | {best} | {middle:.2f}× | {worst} |")
    return "\n".join(lines) + "\n"


def first_call() -> str:
    """What the first call costs a process, from the last run of the cold start on a CPU."""
    path = RESULTS / "cold_start_cpu.json"
    record = json.loads(path.read_text())
    found = record["CPU seconds alone"]
    rows = {name: row for name, row in found.items() if isinstance(row, dict)}
    most = lambda key, own: max(row[key] for name, row in rows.items() if name.startswith("own") == own)
    return (
        f"`import headloss` adds {found['import headloss, after torch']:.2f} s to `import torch`. The first call in a "
        f"process takes up to {most('first call', False):.1f} s of CPU time with headloss's own losses. A function of "
        f"yours is traced with `make_fx`, which loads torch's compiler as `torch.compile` does: up to "
        f"{most('first call', True):.1f} s, or {most('first call, compiler loaded', True):.1f} s where the compiler is "
        f"already loaded. The second call takes at most "
        f"{1000 * max(row['second call'] for row in rows.values()):.0f} ms "
        f"(`{record['command']}`, {record['device']}, torch {_torch(record)}, {record['date'][:10]}; a small batch).\n"
    )


def measurements() -> dict[str, str]:
    """A place of docs/performance.md for each result file, by its name; those without one go to the place `more`."""
    places = {"more": ""}
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        kinds = (("table", _kernels), ("rows", _ways), ("heads", _bench), ("shapes", _products))
        rows = next((rows for kind, rows in kinds if kind in record), None)
        if rows is None or "command" not in record:
            continue
        made = "\n\n".join(
            [
                f"`{record['command'].strip()}`, {record['device']}, torch {_torch(record)}, {record['date']}: "
                f"[{path.name}](../benchmarks/results/{path.name})",
                *(
                    []
                    if rows is _products
                    else [f"![The numbers of the table below as bars.](pictures/{path.stem}.svg)"]
                ),
                "\n".join(rows(record)) + "\n",
            ]
        )
        if f"<!-- {path.stem} -->" in PERFORMANCE.read_text():
            places[path.stem] = made
        else:
            places["more"] += f"\n## {path.stem}\n\n{made}"
    return places


def overhead() -> str:
    """What a later call costs the host."""
    path = RESULTS / "gpu_visit_h200.json"
    record = json.loads(path.read_text())["overhead, us"]
    lines = [
        f"`{record['command']}`, the host of an {record['device']}, torch {record['torch']}, "
        f"triton {record['triton']}, {record['date']}, {record['rows']} × {record['columns']} logits, "
        f"{record['method']}: "
        f"[{path.name}](../benchmarks/results/{path.name})",
        "",
        "| | µs | a bare Function with the same launches, µs | ratio |",
        "|---|---:|---:|---:|",
    ]
    for line in record["lines"]:
        lines.append(f"| {line['what']} | {line['us']:.0f} | {line['bare']:.0f} | {line['ratio']:.2f} |")
    waits = [f"{name}: {ms:.2f} ms" for name, ms in record["queued"].items()]
    lines += ["", f"With 20 ms of work queued on the device, a call returns after: {', '.join(waits)}."]
    return "\n".join(lines) + "\n"


def _kernels(record: Record) -> Iterator[str]:
    yield "| what | rows × vocabulary | ms | plain pass, ms | of its speed |"
    yield "|---|---|---:|---:|---:|"
    for r in record["table"]:
        shape = r["shape"].replace("x", " × ")
        yield f"| {r['what']} | {shape} | {r['ms']:.4f} | {r['floor_ms']:.4f} | {r['ratio']:.1%} |"
    long = record.get("long rows")
    if long is not None:
        yield ""
        yield f"Rows that several programs share, `{long['command']}`, {long['date']}:"
        yield ""
        yield "| cross-entropy | rows × vocabulary | ms | of a plain pass's speed |"
        yield "|---|---|---:|---:|"
        for r in long["table"]:
            shape = r["shape"].replace("x", " × ")
            yield f"| {r['what']} | {shape}, {r['dtype']} | {r['ms']:.4f} | {r['ratio']:.1%} |"


def _ways(record: Record) -> Iterator[str]:
    N, V, D = record["shape"]
    yield f"| {N} rows × {V} columns × {D} | ms | of three GEMMs | GiB | error of dW |"
    yield "|---|---:|---:|---:|---:|"
    yield f"| three GEMMs, cuBLAS | {record['three GEMMs ms']:.2f} | 1.000× | | |"
    limit = 2 * record["eager errors (loss, dH, dW)"][1]
    for r in record["rows"]:
        errors = r.get("errors (loss, dH, dW)")
        error = f"{errors[2]:.1e}" if errors else "–"
        if errors and errors[1] > limit:
            error += f" (dH off by {errors[1]:.1e})"
        name, _, other = r["what"].replace(" x ", " × ").partition(", against ")
        of = " of all rows" if "half the rows" in name else f" of those with {other}" if other else ""
        memory = f"{r['GiB']:.2f}" if "GiB" in r else "–"
        yield f"| {name} | {r['ms']:.2f} | {r['ratio']:.3f}×{of} | {memory} | {error} |"


def _bench(record: Record) -> Iterator[str]:
    yield "| way | rows × vocabulary × hidden | ms | of three GEMMs | GiB | error |"
    yield "|---|---|---:|---:|---:|---:|"
    for h in record["heads"]:
        size = f"{h['tokens']} × {h['vocab']} × {h['hidden']}"
        for w in h["ways"]:
            took = "wrong, not timed | | "
            if w["seconds"] is not None:
                took = f"{1e3 * w['seconds']:.2f} | {w['seconds'] / h['floor']:.3f}× | {w['peak'] / 2**30:.2f}"
            yield f"| {w['way']} | {size} | {took} | {w['error']:.1e} |"


def _products(record: Record) -> Iterator[str]:
    shapes = record["shapes"]
    yield f"| of three products | {' | '.join(' × '.join(map(str, x['shape'])) for x in shapes)} |"
    yield f"|---|{'---:|' * len(shapes)}"
    yield f"| three products, cuBLAS, ms | {' | '.join(format(x['ms']['three products'], '.2f') for x in shapes)} |"
    for name in list(shapes[0]["of three products"])[1:]:
        found = [x["of three products"].get(name) for x in shapes]
        yield f"| {name} | {' | '.join('' if x is None else f'{x:.3f}×' for x in found)} |"
    for name, key in (
        ("half of the rows ignored, of cross-entropy", "half ignored, of all"),
        ("half of the rows without advantage, of reinforce", "half without advantage, of all"),
        ("with z, policy, entropy and accuracy, of cross-entropy",) * 2,
        ("gspo, of grpo",) * 2,
        ("wall time of cross-entropy, of device time", "wall of device"),
        ("log-probability and entropy without grad, of one product", "of one product"),
    ):
        yield f"| {name} | {' | '.join(f'{x[key]:.3f}×' for x in shapes)} |"
    yield f"| its MiB without results | {' | '.join(format(x['facts, MiB beside results'], '.0f') for x in shapes)} |"
    for name in ("dX", "dW"):
        errors = [f"{x['errors']['ours'][name]:.1e} ({x['errors']['eager'][name]:.1e})" for x in shapes]
        yield f"| error of {name} in cross-entropy (eager's) | {' | '.join(errors)} |"


def _torch(record: Record) -> str:
    return record["torch"] if "torch" in record else record["versions"]["torch"]


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
