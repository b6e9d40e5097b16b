"""`headloss bench`: measures a head's cross-entropy, forward and backward, in every implementation installed here.

Dimension key:  N rows   V vocabulary   D hidden size

An implementation ("way") with wrong numbers is not timed: each is first compared with float64 on a smaller head, and
may have twice the error of plain PyTorch in the same dtype plus a few roundings.  If headloss is wrong, the exit code
is 1.  The head's three matrix products alone, on random numbers, are timed next to them.  Times are medians of rounds
in which the ways take turns; memory is the most held at one time in addition to the inputs.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import headloss as hl
from headloss.cli.explain import DTYPES
from headloss.cli.memory import peak_bytes
from headloss.losses import cross_entropy

OBJECTIVE = hl.Objective(ce=cross_entropy)
PLOTS = (".png", ".svg", ".pdf")
TOKENS, HIDDEN = "by default 8192 on CUDA, 256 on a CPU", "by default 4096 on CUDA, 128 on a CPU"
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


class Row(NamedTuple):
    """What one way took; None if its results were wrong."""

    way: str
    error: float  # the largest relative error of loss and gradients on the smaller head, against float64
    limit: float
    seconds: float | None
    peak: int | None

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


class Head(NamedTuple):
    """The results at one size."""

    tokens: int
    vocab: int
    hidden: int
    floor: float  # seconds of the three GEMMs
    ways: list[Row]

    @property
    def size(self) -> str:
        return f"{self.tokens} rows x {self.vocab} columns, hidden {self.hidden}"

    def as_data(self) -> dict[str, Any]:
        return {**self._asdict(), "ways": [{**r._asdict(), "ok": r.ok} for r in self.ways]}


def command(
    tokens: Annotated[int, typer.Option(min=0, show_default=False, help=f"Number of tokens; {TOKENS}.")] = 0,
    vocab: Annotated[list[int] | None, typer.Option(min=2, help="Vocabulary size; may be repeated.")] = None,
    hidden: Annotated[int, typer.Option(min=0, show_default=False, help=f"Hidden size; {HIDDEN}.")] = 0,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32; by default bf16 on CUDA, fp32 on a CPU.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda if available.")] = "",
    memory: Annotated[
        str, typer.Option(help="Limit for headloss's buffers; by default 1GiB on CUDA, 8MiB on a CPU.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often each implementation is timed.")] = 5,
    seed: Annotated[int, typer.Option(help="Random seed of the head and the targets.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers to this file, as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw them into this PNG, SVG or PDF; needs matplotlib.")
    ] = None,
) -> None:
    """Measure time and memory of a head's cross-entropy, in headloss and in other installed libraries."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    fast = device == "cuda"
    tokens, hidden = tokens or (8192 if fast else 256), hidden or (4096 if fast else 128)
    vocab = vocab or ([32000, 128256] if fast else [32000])
    dtype, memory = dtype or ("bf16" if fast else "fp32"), memory or ("1GiB" if fast else "8MiB")
    if device not in ("cpu", "cuda") or (fast and not torch.cuda.is_available()):
        there = "there is no CUDA device here" if fast else f"wanted cpu or cuda, got {device!r}"
        raise typer.BadParameter(there, param_hint="--device")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"wanted one of {', '.join(DTYPES)}, got {dtype!r}", param_hint="--dtype")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("a plot needs matplotlib, which is not installed", param_hint="--plot")
    if plot is not None and plot.suffix.lower() not in PLOTS:
        raise typer.BadParameter(f"wanted a name that ends in {', '.join(PLOTS)}, got {plot.name}", param_hint="--plot")
    try:
        for V in vocab:
            h, w = (torch.empty(n, hidden, dtype=DTYPES[dtype], device="meta") for n in (1, V))
            hl.Linear(h, w, memory=memory).chunk_rows()  # raises if not one row fits
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error).removeprefix("memory: "), param_hint="--memory") from None
    console = Console(highlight=False)
    ours = headloss_ways(memory)
    ways = {**other_ways(device), **ours}
    bar = Progress(
        TextColumn("[cyan]{task.description:<22}"), BarColumn(), TimeRemainingColumn(), console=console, transient=True,
        disable=json_ or not console.is_terminal,
    )  # fmt: skip
    heads = []
    with bar:
        task = bar.add_task("checking and timing", total=len(vocab) * (1 + len(ways) * (2 + rounds)))
        for V in vocab:
            size = (tokens, V, hidden)
            rows = list(measure(ways, size, DTYPES[dtype], device, rounds, seed, lambda: bar.advance(task)))
            heads.append(Head(*size, gemm_floor(*size, DTYPES[dtype], device, rounds), rows))
    about = {
        "command": "headloss bench",
        "device": torch.cuda.get_device_name() if fast else "cpu",
        "torch": torch.__version__,
        "headloss": hl.__version__,
        "date": datetime.date.today().isoformat(),
        "dtype": dtype,
        "memory": memory,
        "rounds": rounds,
        "seed": seed,
    }
    found = {**about, "heads": [h.as_data() for h in heads]}
    if json_:
        typer.echo(json.dumps(found, indent=1))
    else:
        console.print(f"\ncross-entropy of a head, forward and backward, {dtype} on {about['device']}")
        for head in heads:
            console.print(_table(head))
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(heads, plot, f"cross-entropy of a head, forward and backward, {dtype} on {about['device']}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
    for what, path in (("numbers", out), ("plot", plot)):
        if path is not None:
            typer.echo(f"{what} written to {path}", err=json_)
    if not all(r.ok for h in heads for r in h.ways if r.way in ours):
        raise typer.Exit(1)


def eager(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    return F.cross_entropy(
        (hidden_ND @ weight_VD.t()).to(torch.promote_types(hidden_ND.dtype, torch.float32)), target_N
    )


def headloss_ways(memory: str) -> dict[str, Way]:
    """headloss, on logits and on hidden states."""
    return {
        "headloss, logits": lambda h, w, y: OBJECTIVE(hl.Logits(h @ w.t()), y).loss,
        "headloss, hidden": lambda h, w, y: OBJECTIVE(hl.Linear(h, w, memory=memory), y).loss,
    }


def other_ways(device: str) -> dict[str, Way]:
    """Plain PyTorch, and on CUDA the other libraries that can be imported."""
    found: dict[str, Way] = {"eager": eager}
    if device != "cuda":
        return found
    found["torch.compile"] = torch.compile(eager, dynamic=False)
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

        liger = LigerFusedLinearCrossEntropyLoss()
        found["Liger"] = lambda h, w, y: liger(w, h, y)
    if importlib.util.find_spec("cut_cross_entropy") is not None:
        from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

        found["cut-cross-entropy"] = linear_cross_entropy
    return found


def measure(
    ways: dict[str, Way],
    size: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    rounds: int,
    seed: int,
    tick: Callable[[], Any] = lambda: None,
) -> Iterator[Row]:
    """Check every way, then time the right ones in turns."""
    N, V, D = size
    small = make(min(N, 128), min(V, 4096), min(D, 256), dtype, device, seed)
    wide = [x.detach().double().requires_grad_() for x in small[:2]]
    truth = _loss_and_grads(eager, wide[0], wide[1], small[2])
    errors: dict[str, float] = {}
    for name, way in {"eager": eager, **ways}.items():
        errors[name] = _error(_loss_and_grads(way, *small), truth)
        tick()
    few = 2 if dtype.itemsize == 2 else 16  # roundings: in half precision eager's own error is several
    limit = 2 * errors["eager"] + few * torch.finfo(dtype).eps
    head = make(N, V, D, dtype, device, seed)
    right = [name for name in ways if errors[name] <= limit]
    peaks = {}
    for name in right:
        peaks[name] = _peak(lambda name=name: _loss_and_grads(ways[name], *head), device)  # type: ignore[misc]
        tick()
    seconds: dict[str, list[float]] = {name: [] for name in right}
    for _ in range(rounds):
        for name in right:
            seconds[name].append(_seconds(lambda name=name: _loss_and_grads(ways[name], *head), device))  # type: ignore[misc]
            tick()
    for name in ways:
        took = statistics.median(seconds[name]) if name in right else None
        yield Row(name, errors[name], limit, took, peaks.get(name))


def make(N: int, V: int, D: int, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=random).to(device, dtype).requires_grad_()
    weight = (torch.randn(V, D, generator=random) * 2 / D**0.5).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (N,), generator=random).to(device)


def gemm_floor(N: int, V: int, D: int, dtype: torch.dtype, device: str, rounds: int) -> float:
    """Seconds of the three GEMMs of a head, on logits that exist."""
    with torch.no_grad():
        h, w, _ = make(N, V, D, dtype, device, 0)
        z = h @ w.t()
        return statistics.median(_seconds(lambda: (h @ w.t(), z @ w, z.t() @ h), device) for _ in range(rounds + 1))


def draw(heads: list[Head], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [[r for r in h.ways if r.seconds is not None and r.peak is not None] for h in heads]
    height = sum(0.36 * len(rows) + 1.0 for rows in timed)
    figure, grid = plt.subplots(
        len(heads), 2, figsize=(10, height + 0.5), layout="constrained", squeeze=False,
        height_ratios=[len(rows) + 1.5 for rows in timed],
    )  # fmt: skip
    for head, rows, (left, right) in zip(heads, timed, grid, strict=True):
        names = [r.way for r in rows][::-1]
        colors = ["tab:blue" if name.startswith("headloss") else "silver" for name in names]
        seconds, gib = [[f(r) for r in rows][::-1] for f in (lambda r: 1e3 * r.seconds, lambda r: r.peak / 2**20)]
        left.bar_label(left.barh(names, seconds, color=colors), fmt="%.3g", padding=3, fontsize=9)
        left.axvline(1e3 * head.floor, color="black", linestyle="--", linewidth=1)
        left.set(title=head.size, xlabel="ms (dashed: the three GEMMs alone)")
        left.set_xlim(0, 1.15 * max(*seconds, 1e3 * head.floor))
        right.bar_label(right.barh(names, gib, color=colors), fmt="%.4g", padding=3, fontsize=9)
        right.set(xlabel="MiB beyond the inputs, gradients included")
        right.set_xlim(0, 1.15 * max(gib))
        right.tick_params(labelleft=False)
        for ax in (left, right):
            ax.spines[["top", "right"]].set_visible(False)
            ax.title.set(fontsize=10)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _loss_and_grads(way: Way, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    loss = way(hidden, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def _error(got: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    errors = [float((g.double() - t).abs().amax() / t.abs().amax()) for g, t in zip(got, truth, strict=True)]
    return max(errors, key=lambda e: (e != e, e))  # NaN is the worst


def _seconds(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _peak(work: Callable[[], object], device: str) -> int:
    work()  # compiling and caching on the first call does not count
    if device == "cpu":
        return peak_bytes(work)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _table(head: Head) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, title=head.size, title_justify="left")
    table.title_style = "bold"
    table.add_column("", style="cyan", no_wrap=True)
    for name in ("ms", "x GEMMs", "MiB", "error", "allowed"):
        table.add_column(name, justify="right")
    for r in head.ways:
        if r.seconds is None or r.peak is None:
            table.add_row(r.way, "[red]wrong[/]", "", "", f"[red]{r.error:.0e}[/]", f"{r.limit:.0e}")
            continue
        ms, times = f"{1e3 * r.seconds:.2f}", f"{r.seconds / head.floor:.2f}"
        table.add_row(r.way, ms, times, f"{r.peak / 2**20:.1f}", f"{r.error:.0e}", f"{r.limit:.0e}")
    table.add_row("three GEMMs", f"{1e3 * head.floor:.2f}", "1.00", "", "", "", style="dim")
    return table
