"""Pictures of the result files: `python benchmarks/plots.py`, or `make plots`.

Every file of benchmarks/results is drawn by what is in it, as docs/pictures/<name>.svg:

    table   kernels against a floor       one bar each, how much of the floor's speed
    rows    ways to a loss, at one size   time and memory, with the three GEMMs
    heads   `headloss bench --json`       the same at several sizes
    cases   losses on a CPU               time
    workloads   `benchmarks.suite`        times the floor, over vocabularies, and scaling
    series      `proof.soak`              what must not grow
    curves  a long training run           its losses

A picture carries the digest of its file, so that a test can tell an old one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"
OURS, THEIRS, LINE = "#2f6db5", "#b9bec8", "#c2571a"


def digest(record: dict[str, Any]) -> str:
    """Of what is drawn; a note in the file may change."""
    kind = kind_of(record)
    assert kind is not None
    drawn = {key: record.get(key) for key in (kind, "device", "date")}
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()[:16]


def kernels(record: dict[str, Any]) -> Figure:
    """How much of the floor's speed each sweep has."""
    rows = record["table"]
    figure, ax = _figure(len(rows))
    labels = [f"{r['what']}   {r['shape'].replace('x', ' x ')}" for r in rows]
    shares = [100 * r["ratio"] for r in rows]
    others = ("torch", "Liger", "read-only")
    colors = [THEIRS if any(o in r["what"] for o in others) and "triton" not in r["what"] else OURS for r in rows]
    _bars(ax, labels, shares, colors, [""] * len(rows))
    for place, share, color, row in zip(reversed(range(len(rows))), shares, colors, rows, strict=True):
        wide = share > 22  # of the text
        style = {"va": "center", "fontsize": 9, "color": "white" if wide and color == OURS else "black"}
        ax.text(1.5 if wide else share + 1.5, place, f"{share:.0f}%,  {_ms(row['ms'])}", **style)
    ax.axvline(100, color=LINE, linestyle="--", linewidth=1.2)
    ax.set(
        xlabel="% of the speed of a plain pass over the same bytes (dashed), measured in the same run",
        xlim=(0, 1.08 * max(shares)),
    )
    return _titled(figure, f"against a plain pass over the same bytes, {_where(record)}")


def linear(record: dict[str, Any]) -> Figure:
    """Time and memory of a head, by every way."""
    N, V, D = record["shape"]
    rows = [r for r in record["rows"] if "half the rows" not in r["what"]]
    figure = _ways(
        [
            (
                f"{N} rows x {V} columns, hidden {D}",
                record["three GEMMs ms"],
                [(r["what"], r["ms"], r["GiB"]) for r in rows if "against" not in r["what"]],  # other sizes
            )
        ]
    )
    return _titled(figure, f"cross-entropy of a head, forward and backward, bf16, {_where(record)}")


def bench(record: dict[str, Any]) -> Figure:
    """What `headloss bench` found."""
    sizes = []
    for h in record["heads"]:
        rows = [(w["way"], 1e3 * w["seconds"], w["peak"] / 2**30) for w in h["ways"] if w["seconds"] is not None]
        sizes.append((f"{h['tokens']} rows x {h['vocab']} columns, hidden {h['hidden']}", 1e3 * h["floor"], rows))
    return _titled(_ways(sizes), f"headloss bench, cross-entropy, {record['dtype']}, {_where(record)}")


def cpu(record: dict[str, Any]) -> Figure:
    """Time of the same losses by other means, on a CPU."""
    cases = record["cases"]
    figure, axes = plt.subplots(
        len(cases), 1, figsize=(9, sum(0.36 * len(c["candidates"]) + 0.9 for c in cases)), layout="constrained",
        height_ratios=[len(c["candidates"]) + 1.5 for c in cases], squeeze=False,
    )  # fmt: skip
    for case, ax in zip(cases, axes[:, 0], strict=True):
        found = case["candidates"]
        times = [c["ms"] for c in found.values()]
        _bars(ax, list(found), times, [_color(n) for n in found], [_ms(t) for t in times])
        ax.set_title(case["case"], fontsize=10, loc="left")
        ax.set_xlim(0, 1.2 * max(times))
    axes[-1, 0].set_xlabel("ms")
    device = record["device"]
    return _titled(figure, f"{device['cpu']}, {device['threads']} threads, torch {record['versions']['torch']}")


def curves(record: dict[str, Any]) -> Figure:
    """Losses of one training run by several ways: plain PyTorch's broad, headloss's on top of it."""
    figure, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
    broad = {name: c for name, c in record["curves"].items() if not name.startswith("headloss")}
    for name, c in broad.items():
        ax.plot(c, color=THEIRS, linewidth=5, label=name)
    for i, (name, c) in enumerate((n, c) for n, c in record["curves"].items() if n not in broad):
        ax.plot(c, color=(OURS, LINE, "black")[i % 3], linewidth=1, label=name)
    ax.set(xlabel="step", ylabel="loss, nats a token")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    apart = [f", at most {x:.0e} apart" for k, x in record.items() if k.startswith("largest difference, float32")]
    return _titled(figure, f"{record['steps']} steps from one seed, {record['device']}{''.join(apart[:1])}")


def suite(record: dict[str, Any]) -> Figure:
    """Of every workload and vocabulary, how many times the floor each way takes; and how headloss scales."""
    workloads = list(dict.fromkeys(r["workload"] for r in record["workloads"]))
    if len({r["V"] for r in record["workloads"]}) == 1:
        return _one_vocabulary(record, workloads)
    lines = 2 if record["scaling"] else 1
    figure, grid = plt.subplots(lines, 5, figsize=(15, 3.4 * lines), layout="constrained", squeeze=False)
    ways = list(dict.fromkeys(r["way"] for r in record["workloads"]))
    marks = dict(zip(ways, "os^vDPX*", strict=False))
    for ax, work in zip(grid[0], workloads, strict=True):
        for way in ways:
            rows = [r for r in record["workloads"] if (r["workload"], r["way"]) == (work, way) and "ratio" in r]
            rows.sort(key=lambda r: r["V"])
            shade = {"color": OURS, "zorder": 3} if way == "headloss" else {"alpha": 0.7}
            ax.plot([r["V"] / 1e3 for r in rows], [r["ratio"] for r in rows], f"{marks[way]}-", label=way, **shade)
        ax.axhline(1, color=LINE, linestyle="--", linewidth=1.2)
        ax.set(title=work, xlabel="vocabulary, thousands", yscale="log")
        low, high = ax.get_ylim()
        ticks = [x for x in (0.2, 0.5, 1, 2, 5, 10, 20, 50) if low <= x <= high]
        ax.minorticks_off()
        ax.set_yticks(ticks, [f"{x:g}" for x in ticks])
    grid[0][0].set_ylabel("times the GEMMs alone (dashed)")
    figure.legend(*grid[0][1].get_legend_handles_labels(), loc="outside lower center", ncols=len(ways), frameon=False)
    for ax, what in zip(grid[-1], ("N", "V", "D", "losses", "simulated ranks"), strict=True):
        if not record["scaling"]:
            break
        rows = [r for r in record["scaling"] if r["grows"] == what]
        place = [r[{"simulated ranks": "ranks"}.get(what, what)] for r in rows]
        ax.plot(place, [r["ratio"] for r in rows], "o-", color=OURS)
        ax.axhline(1, color=LINE, linestyle="--", linewidth=1.2)
        ax.set(xlabel=what, xscale="log", ylim=(min(0.9, 0.8 * min(r["ratio"] for r in rows)), None))
        ax.set_xticks(place, [f"{x:,}" for x in place], fontsize=7, rotation=30)
        ax.minorticks_off()
    if record["scaling"]:
        grid[1][0].set_ylabel("headloss, times the GEMMs alone")
    for ax in grid.flat:
        ax.spines[["top", "right"]].set_visible(False)
    return _titled(
        figure,
        f"forward and backward of a head against its GEMMs, {record['dtype'].removeprefix('torch.')}, {_where(record)}",
    )


def _one_vocabulary(record: dict[str, Any], workloads: list[str]) -> Figure:
    """Bars: how many times the floor each way takes, cut where one is far beyond the others."""
    figure, axes = plt.subplots(1, len(workloads), figsize=(15, 2.6), layout="constrained")
    for ax, work in zip(axes, workloads, strict=True):
        rows = [r for r in record["workloads"] if r["workload"] == work and "ratio" in r][::-1]
        most = 1.25 * min(max(r["ratio"] for r in rows), 4.0)
        shades = [OURS if r["way"] == "headloss" else THEIRS for r in rows]
        ax.barh([r["way"] for r in rows], [min(r["ratio"], most) for r in rows], color=shades)
        for place, r in enumerate(rows):
            ax.text(min(r["ratio"], most * 0.8) + 0.03 * most, place, f"{r['ratio']:.2f}", va="center", fontsize=8)
        ax.axvline(1, color=LINE, linestyle="--", linewidth=1.2)
        ax.set(title=work, xlim=(0, most))
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlabel("times the GEMMs alone (dashed)")
    size = f"{record['workloads'][0]['N']} x {record['workloads'][0]['V']} x {record['workloads'][0]['D']}"
    return _titled(
        figure, f"forward and backward of a head, {size}, {record['dtype'].removeprefix('torch.')}, {_where(record)}"
    )


def soak(record: dict[str, Any]) -> Figure:
    """What must stay level while random objectives are trained on."""
    series = record["series"]
    names = [n for n in series if n not in ("seconds", "steps", "traces kept")]
    figure, axes = plt.subplots(1, len(names), figsize=(3.2 * len(names), 2.8), layout="constrained", squeeze=False)
    for ax, name in zip(axes[0], names, strict=True):
        ax.plot([s / 60 for s in series["seconds"]], series[name], color=OURS)
        ax.set(title=name, xlabel="minutes", ylim=(0, 1.1 * max(*series[name], 1)))
        ax.spines[["top", "right"]].set_visible(False)
    return _titled(figure, f"{record['steps']:,} steps, each with another random objective, {_where(record)}")


KINDS = {
    "table": kernels,
    "rows": linear,
    "heads": bench,
    "cases": cpu,
    "curves": curves,
    "workloads": suite,
    "series": soak,
}


def kind_of(record: dict[str, Any]) -> str | None:
    return next((kind for kind in KINDS if kind in record), None)


def _ways(sizes: list[tuple[str, float, list[tuple[str, float, float]]]]) -> Figure:
    figure, grid = plt.subplots(
        len(sizes), 2, figsize=(10.5, sum(0.34 * len(rows) + 1.1 for _, _, rows in sizes)), layout="constrained",
        squeeze=False, width_ratios=[1.25, 1], height_ratios=[len(rows) + 1.5 for _, _, rows in sizes],
    )  # fmt: skip
    for (size, floor, rows), (left, right) in zip(sizes, grid, strict=True):
        names, times, memory = zip(*rows)
        colors = [_color(n) for n in names]
        _bars(left, names, times, colors, [f"{t:.1f}" for t in times])
        left.axvline(floor, color=LINE, linestyle="--", linewidth=1.2)
        left.set_title(size, fontsize=10, loc="left")
        left.set(xlabel=f"ms (dashed: the three GEMMs alone, {floor:.1f})", xlim=(0, 1.13 * max(times)))
        _bars(right, names, memory, colors, [f"{m:.2f}" for m in memory])
        right.set(xlabel="GiB beyond the inputs, gradients included", xlim=(0, 1.15 * max(memory)))
        right.tick_params(labelleft=False)
    return figure


def _figure(rows: int) -> tuple[Figure, Axes]:
    return plt.subplots(figsize=(9.5, 0.36 * rows + 1.1), layout="constrained")


def _bars(ax: Axes, labels: Any, values: Any, colors: Any, texts: Any) -> None:
    places = range(len(labels))[::-1]  # the first on top, and two of one name stay two
    ax.bar_label(ax.barh(places, values, color=colors, height=0.72), texts, padding=4, fontsize=9)
    ax.set_yticks(places, labels, fontsize=9.5)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _color(name: str) -> str:
    return OURS if name.startswith("headloss") else THEIRS


def _ms(x: float) -> str:
    return f"{x:.3g} ms" if x < 100 else f"{x:.0f} ms"


def _where(record: dict[str, Any]) -> str:
    return f"{record['device']}, {record['date']}"


def _titled(figure: Figure, title: str) -> Figure:
    figure.suptitle(title, fontsize=11)
    return figure


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "headloss"
    PICTURES.mkdir(exist_ok=True)
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        kind = kind_of(record)
        if kind is None:
            print(f"{path.name}: no picture for what is in it")
            continue
        picture = PICTURES / f"{path.stem}.svg"
        figure = KINDS[kind](record)
        figure.savefig(picture, metadata={"Date": None, "Description": f"{path.name} {digest(record)}"})
        plt.close(figure)
        print(picture.relative_to(ROOT))


if __name__ == "__main__":
    main()
