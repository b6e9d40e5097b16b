"""`make demo`: train with a fused head, then measure what fusing was worth.  Chapters are functions of their own."""

from __future__ import annotations

import time
from typing import Annotated, NamedTuple

import torch
import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import headloss as hl
from headloss.cli import compare
from headloss.cli.text import Batches, Characters, standard_library
from headloss.cli.tiny import TinyTransformer
from headloss.losses import cross_entropy, z_loss

IDEA = """\
logits ─┐                   ┌─ facts ─► losses, metrics ─► loss
        ├─► one sweep of V ─┤                │ derivatives
hidden ─┘                   └─ d logits ◄────┘
weight"""


class Size(NamedTuple):
    """How much of everything."""

    modules: int
    steps: int
    batch: int
    length: int
    D: int
    layers: int
    head: tuple[int, int, int]  # N, V, D of the comparison
    rounds: int


FULL = Size(modules=999, steps=450, batch=24, length=48, D=96, layers=1, head=(512, 32000, 128), rounds=5)
FAST = Size(modules=3, steps=12, batch=8, length=32, D=32, layers=1, head=(64, 1000, 16), rounds=1)


def command(
    fast: Annotated[bool, typer.Option(help="A few seconds: smaller everything, same story.")] = False,
    seed: Annotated[int, typer.Option(help="Of the model, the batches and the samples.")] = 0,
) -> None:
    """Train a tiny transformer with a fused head, then compare fused with separate losses."""
    size = FAST if fast else FULL
    start = time.perf_counter()
    console = Console(highlight=False)
    console.print()
    idea = Text.assemble((IDEA, "cyan"), "\n\nThe softmax is read once; every loss is plain PyTorch on its facts.")
    panel = Panel(idea, title=f"[bold]headloss {hl.__version__}[/]", title_align="left", padding=(1, 2), expand=False)
    console.print(Padding(panel, (0, 1), expand=False))
    train(console, size, seed)
    fused_against_separate(console, size, seed)
    console.print(f"\n[dim]{time.perf_counter() - start:.0f} s in all.[/]\n")


def train(console: Console, size: Size, seed: int) -> None:
    """Chapter 1: cross-entropy and z-loss through `FusedLMHead`, metrics through `Meter`."""
    torch.manual_seed(seed)
    text = standard_library(size.modules)
    batches = Batches(text, size.length, size.batch, seed)
    model = TinyTransformer(Characters.size, size.length, size.D, size.layers, H=4)
    objective = hl.Objective(
        ce=cross_entropy,
        z=hl.Term(z_loss, weight=1e-4),
        metrics=["entropy", "accuracy", "perplexity"],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=size.steps, pct_start=0.1)
    _chapter(
        console,
        "1  Train",
        f"a transformer of {sum(p.numel() for p in model.parameters()):,} parameters reads Python's own docstrings\n"
        f"            {len(text):,} characters; CE + 1e-4 z-loss through FusedLMHead",
    )

    before, babble = _evaluate(model, objective, batches), _write(model, seed)
    meter = hl.Meter()
    with _progress(console) as bar:
        task = bar.add_task("training", total=size.steps, note="")
        for step in range(size.steps):
            tokens, targets = batches("train")
            out = model.head(model(tokens), targets=targets, objective=objective)
            assert isinstance(out, hl.Output)
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
            schedule.step()
            meter.add(out.metrics)
            if step % 10 == 9:
                now = meter.compute()
                note = f"perplexity {now['perplexity']:6.2f}   accuracy {now['accuracy']:.0%}"
                bar.update(task, advance=10, note=note)
    after, words = _evaluate(model, objective, batches), _write(model, seed)

    table = _table("held-out text", "before", "after")
    table.add_row("loss (CE + z)", f"{before['loss']:.3f}", f"{after['loss']:.3f}")
    table.add_row("perplexity", f"{before['perplexity']:.2f}", f"{after['perplexity']:.2f}")
    table.add_row("accuracy", f"{before['accuracy']:.1%}", f"{after['accuracy']:.1%}")
    table.add_row("entropy, nats", f"{before['entropy']:.3f}", f"{after['entropy']:.3f}")
    console.print(Padding(table, (0, 0, 1, 3), expand=False))
    for when, wrote in (("it wrote ", babble), ("it writes", words)):
        line = " ".join(wrote.split())
        console.print(Text.assemble("   ", (when, "dim"), f"  {line}"), soft_wrap=True)


def fused_against_separate(console: Console, size: Size, seed: int) -> None:
    """Chapter 2: the same three losses, fused and apart, on a vocabulary large enough to matter."""
    N, V, D = size.head
    _chapter(console, "2  Compare", f"CE + z-loss + entropy bonus, forward and backward, hidden size {D}")
    with _progress(console) as bar:
        task = bar.add_task("measuring", total=compare.steps(size.rounds), note="")
        rows = compare.compare(N, V, D, size.rounds, seed, tick=lambda: bar.advance(task))
    first = rows[0]
    table = _table(f"{N} rows x {V}", "ms", "", "MiB", "", "loss error", "grad error")
    for way in rows:
        table.add_row(
            way.name,
            f"{1e3 * way.seconds:.0f}",
            f"[dim]{first.seconds / way.seconds:.1f}x[/]",
            f"{way.peak / 2**20:.0f}",
            f"[dim]{first.peak / way.peak:.1f}x[/]",
            f"{way.loss_error:.0e}",
            f"{way.grad_error:.0e}",
        )
    console.print(Padding(table, (0, 0, 0, 3), expand=False))
    console.print("   [dim]errors are relative to float64; MiB is the most allocated beyond the inputs[/]")


@torch.no_grad()
def _evaluate(model: TinyTransformer, objective: hl.Objective, batches: Batches) -> dict[str, float]:
    """Metrics on held-out text: several calls, one number each."""
    meter, losses = hl.Meter(), []
    batches.random.manual_seed(1)
    for _ in range(8):
        tokens, targets = batches("held out")
        out = model.head(model(tokens), targets=targets, objective=objective)
        assert isinstance(out, hl.Output)
        meter.add(out.metrics)
        losses.append(out.loss)
    return {**meter.compute(), "loss": float(torch.stack(losses).mean())}


def _write(model: TinyTransformer, seed: int) -> str:
    random = torch.Generator().manual_seed(seed)
    return Characters.decode(model.continue_(Characters.encode("Return the "), 54, temperature=0.5, random=random))


def _chapter(console: Console, title: str, line: str) -> None:
    console.print(f"\n [bold cyan]{title}[/]   {line}\n")


def _table(*heads: str) -> Table:
    table = Table(box=box.ROUNDED, header_style="bold", border_style="dim")
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left", no_wrap=True)
    return table


def _progress(console: Console) -> Progress:
    """A bar with the time left; nothing at all when nobody is watching."""
    return Progress(
        TextColumn("   {task.description}"),
        BarColumn(bar_width=32),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(compact=True),
        TextColumn("[dim]left[/]  {task.fields[note]}"),
        console=console,
        transient=True,
        refresh_per_second=4,
        disable=not console.is_terminal,
    )
