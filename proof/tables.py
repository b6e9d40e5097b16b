"""What the pages docs/trust.md and docs/faults.md take from the result files; `make docs` puts it there."""

# ruff: noqa: RUF001  (the pages have multiplication signs and dashes)
from __future__ import annotations

import collections
import json
from typing import Any

from proof.record import RESULTS

Record = dict[str, Any]


def places() -> dict[str, str]:
    """The marked places of docs/trust.md."""
    makers = {"faults": _faults, "properties": _properties, "soak": _soak, "cold": _cold, "long_run": _long_run}
    made = {name: make() + "\n" for name, make in makers.items()} | {"suite": _suite() + "\n"}
    return {name: text if text.strip() else "Not run yet.\n" for name, text in made.items()}


def faults() -> str:
    """docs/faults.md: every fault that was seeded, and the test that noticed it."""
    record = _read("mutants")
    lines = [
        "# Every fault",
        "",
        f"Made by `make docs` from {_link('mutants')}: each line is one small fault, put into a copy of the package, "
        "and the first test that caught it. [How we know](trust.md) says how and why.",
        "",
        _about(record),
    ]
    by_file: dict[str, list[Record]] = collections.defaultdict(list)
    for row in record["faults"]:
        by_file[row["file"]].append(row)
    for file, rows in by_file.items():
        lines += ["", f"## {file}", "", "| fault | noticed by |", "|---|---|"]
        lines += [f"| {_cell(r['what'])} | {_test(r['caught'])} |" for r in rows]
    return "\n".join(lines) + "\n"


def _faults() -> str:
    record = _read("mutants")
    groups: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for row in record["faults"]:
        name = next((what for prefix, what in GROUPS.items() if row["file"].startswith(prefix)), "everything else")
        groups[name][0] += bool(row["caught"])
        groups[name][1] += 1
    lines = [f"**{record['caught']} of {record['total']} caught.** {_about(record)}", "", "| faults in | caught | of |"]
    lines += ["|---|---:|---:|", *(f"| {name} | {a} | {b} |" for name, (a, b) in groups.items())]
    lines += ["", record["note"]] if "note" in record else []
    return "\n".join(lines)


GROUPS = {
    "facts.py": "facts, their merge and the chain rule",
    "backends/torch.py": "the torch sweeps",
    "backends/torch_teachers.py": "teachers and divergences",
    "backends/": "Triton kernels and printed code",
    "teachers.py": "teachers and divergences",
    "divergence.py": "teachers and divergences",
    "classify.py": "row, segment or batch",
    "plan.py": "row, segment or batch",
    "segments.py": "segments, rows and reductions",
    "reductions.py": "segments, rows and reductions",
    "rows.py": "segments, rows and reductions",
    "parallel.py": "ranks",
    "dtensor.py": "ranks",
    "losses/": "losses and row weights",
    "row_weights.py": "losses and row weights",
    "ops.py": "operators and compiled graphs",
    "graph.py": "operators and compiled graphs",
    "recipe.py": "operators and compiled graphs",
    "content.py": "operators and compiled graphs",
    "spec.py": "operators and compiled graphs",
    "metrics.py": "metrics",
}


def _properties() -> str:
    if not (RESULTS / "properties.json").exists():
        return ""
    record = _read("properties")
    drawn = record["drawn"]
    verdict = "none failed" if not record["failed"] else f"{record['failed']} failed"
    lines = [f"**{record['examples']:,} examples of {record['tests']} properties, {verdict}.** {_about(record)}", ""]
    lines += ["| drawn | how often |", "|---|---|"]
    for what in ("kind", "way", "values", "dtype", "teacher", "shards", "budget", "reductions", "losses"):
        if what in drawn:
            lines.append(f"| {what} | {', '.join(f'{_cell(k)} {v:,}' for k, v in drawn[what].items())} |")
    return "\n".join(lines)


def _soak() -> str:
    lines = ["| | steps | minutes | NaN or inf | host memory | device memory | traces per 100 steps | passed |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---|"]
    pictures = []
    for path in sorted(RESULTS.glob("soak_*.json")):
        record, verdict = _read(path.stem), _read(path.stem)["verdict"]
        resident, allocated = (
            f"{verdict[key]:+.1f} MiB" if key in verdict else ""
            for key in ("resident MiB, last quarter over second", "allocated MiB, end over middle")
        )
        lines.append(
            f"| {record['device']} ({_link(path.stem)}) | {record['steps']:,} | {record['minutes']:.1f} | "
            f"{record['steps with a NaN or infinity']} | {resident} | {allocated} | "
            f"{verdict['traces a hundred steps, second half']:.2f} | {'yes' if verdict['fine'] else 'no'} |"
        )
        pictures += ["", f"![Memory and traces while random objectives are trained on.](pictures/{path.stem}.svg)"]
    return "\n".join([*lines, *pictures])


def _cold() -> str:
    lines = []
    for path in sorted(RESULTS.glob("cold_start_*.json")):
        record = _read(path.stem)
        if "cold" not in record:  # one process alone: the README has it
            continue
        cold, warm = record["cold"], record["warm"]
        results = cold["different results"]
        same = "all gave the same result" if results == 1 else f"they gave {results} different results"
        most, later = (max(x["seconds of the calls"]) for x in (cold, warm))
        lines.append(
            f"Cold start: {record['processes']} processes on an empty Triton cache took at most {most:.1f} s for their "
            f"calls ({later:.1f} s with the cache filled); {len(cold['failed'])} failed, and {same}. "
            f"{_about(record)} {_link(path.stem)}"
        )
    return "\n\n".join(lines)


def _long_run() -> str:
    lines = ["| | largest difference in float32 | mean distance to torch in float32 |", "|---|---:|---|"]
    pictures = []
    for path in sorted(RESULTS.glob("long_run_*.json")):
        record = _read(path.stem)
        far = ", ".join(f"{n}: {x:.1e}" for n, x in record["mean difference to torch in float32"].items())
        largest = record["largest difference, float32, headloss and torch"]
        lines.append(f"| {record['device']} ({_link(path.stem)}) | {largest:.1e} | {far} |")
        pictures += ["", f"![Loss curves of the same training by headloss and by torch.](pictures/{path.stem}.svg)"]
    return "\n".join([*lines, *pictures])


def _suite() -> str:
    made = []
    newest = lambda path: (_read(path.stem)["date"], path.stem)
    for path in sorted(RESULTS.glob("suite_*.json"), key=newest, reverse=True):
        record = _read(path.stem)
        made += [""] if made else []
        ways = list(dict.fromkeys(r["way"] for r in record["workloads"]))
        made += [f"{_about(record)} {_link(path.stem)}", ""]
        made += [f"![Times the GEMMs alone, by workload.](pictures/{path.stem}.svg)", ""]
        made += [
            f"| workload | vocabulary | GEMMs alone, ms | {' | '.join(ways)} |",
            f"|---|---:|---:|{'---:|' * len(ways)}",
        ]
        cases = list(dict.fromkeys((r["workload"], r["V"]) for r in record["workloads"]))
        for case in sorted(cases, key=lambda c: (list(dict.fromkeys(w for w, _ in cases)).index(c[0]), c[1])):
            rows = {r["way"]: r for r in record["workloads"] if (r["workload"], r["V"]) == case}
            floor = next((f"{r['floor ms']:.2f}" for r in rows.values() if "floor ms" in r), "")
            made.append(f"| {case[0]} | {case[1]:,} | {floor} | {' | '.join(_time(rows.get(w)) for w in ways)} |")
        made += [
            "",
            "A cell: time as a multiple of the GEMMs alone, and GiB beyond the inputs; * an error of more than "
            "twice eager's.",
        ]
        if record["left out"]:
            made += ["", f"Left out to save time: {', '.join(record['left out'])}."]
        grows: dict[str, list[str]] = collections.defaultdict(list)
        for r in record["scaling"]:
            place = r.get("losses", r.get("ranks", r.get(r["grows"])))
            grows[r["grows"]].append(f"{place:,}: {r['ratio']:.3f}×")
        made += ["", "| headloss, as a multiple of the GEMMs alone, as this grows | |", "|---|---|"] if grows else []
        made += [f"| {what} | {', '.join(values)} |" for what, values in grows.items()]
    return "\n".join(made)


def _time(row: Record | None) -> str:
    if row is None:
        return ""
    if "ratio" not in row:
        return "wrong" if row.get("wrong") else "failed"
    return f"{row['ratio']:.2f}×, {row['GiB']:.1f}{' *' if row['wrong'] else ''}"


def _read(name: str) -> Record:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _link(name: str) -> str:
    return f"[{name}.json](../benchmarks/results/{name}.json)"


def _about(record: Record) -> str:
    day = record["date"][:10]
    return f"`{record['command']}`, {record['device']}, torch {record['versions']['torch']}, {day}."


def _test(text: str | None) -> str:
    return "**nothing**" if text is None else f"`{text.replace('|', '/')}`" if "::" in text else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")
