"""`make demo`: train, distill, reinforce, compare, all with headloss.  Each chapter is a function."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

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
from examples.demo import compare, page
from examples.demo.phases import K, Tick, Trained, Training, distill, examine, reinforce, teach
from examples.demo.sorting import Sorting
from examples.demo.tiny import TinyTransformer

IDEA = """\
logits ─┐                   ┌─ facts ─► losses, metrics ─► loss
        ├─► one sweep of V ─┤                │ derivatives
hidden ─┘                   └─ d logits ◄────┘
weight"""


class Size(NamedTuple):
    """How much of everything."""

    digits: int
    teacher: tuple[int, int]  # D, layers
    student: tuple[int, int]
    teach: Training
    distill: Training
    reinforce: Training
    group: int  # answers to a prompt
    head: tuple[int, int, int]  # N, V, D of the comparison
    rounds: int
    costs: tuple[float, float, float, float]  # of a step of each phase, in any unit: for the time left
    timed: bool = True  # whether the head is large enough for its times to say anything


FULL = Size(
    digits=6,
    teacher=(96, 2),
    student=(64, 1),
    teach=Training(steps=200, batch=96, lr=3e-3, every=10),
    distill=Training(steps=70, batch=96, lr=3e-3, every=5),
    reinforce=Training(steps=100, batch=48, lr=1e-3, every=5),
    group=8,
    head=(512, 32000, 128),
    rounds=3,
    costs=(0.27, 0.16, 0.85, 1.5),
)
FAST = Size(
    digits=3,
    teacher=(48, 1),
    student=(32, 1),
    teach=Training(steps=120, batch=64, lr=6e-3, every=20),
    distill=Training(steps=45, batch=64, lr=6e-3, every=5),
    reinforce=Training(steps=36, batch=32, lr=3e-3, every=4),
    group=8,
    head=(64, 1000, 16),
    rounds=1,
    costs=(0.04, 0.03, 0.12, 0.05),
    timed=False,
)
NOISE = 0.15


class Results(NamedTuple):
    task: Sorting
    teacher: Trained
    students: dict[str, Trained]
    policy: Trained
    ways: list[compare.Way]


def command(
    fast: Annotated[bool, typer.Option("--fast", help="Smaller models and no timing: half a minute, not two.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed of models, prompts and samples.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the page and the picture.")] = Path("out/demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print only the final numbers, as JSON.")] = False,
) -> None:
    """Train a teacher, distill its top K into a student, improve that with GSPO, compare fused with separate losses."""
    size = FAST if fast else FULL
    start = time.perf_counter()
    console = Console(highlight=False, stderr=as_json)
    console.quiet = as_json and not console.is_terminal
    _opening(console, size)
    with _progress(console, size) as bar:
        results = _run(console, size, seed, bar)
    console.print()
    tables = (_models(results), _ways(results, size))
    for table in tables:
        console.print(Padding(_rich(table), (0, 0, 0, 1), expand=False))
    console.print(" [dim]speed and memory compare with separate losses, errors with float64;[/]")
    untimed = "" if size.timed else "; no times with --fast"
    console.print(f" [dim]MiB is the peak beyond the inputs{untimed}[/]\n")
    seconds = time.perf_counter() - start
    story = _story(results, tables, size, f"seed {seed}, {seconds:.0f} s")
    files = _write(console, out, story)
    console.print(f" [dim]{seconds:.0f} s in all[/]\n")
    if as_json:
        typer.echo(json.dumps({"fast": fast, "seed": seed, "seconds": seconds, **_numbers(results), **files}, indent=2))


def _run(console: Console, size: Size, seed: int, bar: _Bar) -> Results:
    task = Sorting(size.digits, NOISE)

    tick = bar.phase(f"1/4 teaching, {size.teach.steps} steps", 0)
    torch.manual_seed(seed)
    teacher = teach(task, _model(task, size.teacher), size.teach, seed, tick)
    teacher.model.requires_grad_(False)
    _chapter(console, "1  Teach", f"CE + 1e-4 z-loss, {teacher.model.size:,} parameters, {size.teach.steps} steps")

    torch.manual_seed(seed + 1)
    blank = _model(task, size.student)
    students = {}
    for kind, (name, _) in page.KINDS.items():
        tick = bar.phase(f"2/4 distilling: {name}", 1)
        students[kind] = distill(task, teacher.model, copy.deepcopy(blank), kind, size.distill, seed + 1, tick)
    _chapter(console, "2  Distill", f"forward KL, {blank.size:,} parameters, {size.distill.steps} steps each")

    tick = bar.phase(f"3/4 GSPO, {size.reinforce.steps} iterations", 2)
    policy = reinforce(task, students["top-K"].model, size.reinforce, size.group, seed + 2, tick)
    answers = size.reinforce.batch * size.group
    _chapter(console, "3  Reinforce", f"GSPO + exact KL, {size.reinforce.steps} iterations of {answers} answers")

    N, V, D = size.head
    tick = bar.phase("4/4 fused against separate", 3)
    ways = compare.compare(N, V, D, size.rounds, seed, tick)
    _chapter(console, "4  Compare", f"CE + z-loss + entropy bonus, {N} rows x {V}, hidden size {D}")
    return Results(task, teacher, students, policy, ways)


def _model(task: Sorting, size: tuple[int, int]) -> TinyTransformer:
    return TinyTransformer(task.vocab, task.T, *size)


def _models(results: Results) -> list[list[str]]:
    """The final table: every model on held-out prompts."""
    rows = [["held-out prompts", "losses", "exact match", "accuracy", "entropy"]]
    for name, losses, model in (
        ("teacher", "CE + z", results.teacher.model),
        (f"student, top {K}", "forward KL", results.students["top-K"].model),
        ("student, dense", "forward KL", results.students["dense"].model),
        ("student, labels", "CE", results.students["labels"].model),
        (f"top {K}, then GSPO", "GSPO + KL", results.policy.model),
    ):
        found = examine(results.task, model)
        numbers = [f"{found['exact_match']:.3f}", f"{found['accuracy']:.3f}", f"{found['entropy']:.3f}"]
        rows.append([name, losses, *numbers])
    return rows


def _ways(results: Results, size: Size) -> list[list[str]]:
    N, V, _ = size.head
    rows = [[f"{N} rows x {V}", "ms", "speed", "MiB", "memory", "loss err", "grad err"]]
    first = results.ways[0]
    for way in results.ways:
        speed, less = f"{first.seconds / way.seconds:.1f}x", f"{way.peak / first.peak:.0%}"
        times = [f"{1e3 * way.seconds:.0f}", speed] if size.timed else ["-", "-"]
        errors = [f"{way.loss_error:.0e}", f"{way.grad_error:.0e}"]
        rows.append([way.name, *times, f"{way.peak / 2**20:.3g}", less, *errors])
    return rows


def _numbers(results: Results) -> dict[str, Any]:
    gspo = results.policy.curves
    return {
        "teacher": examine(results.task, results.teacher.model),
        "students": {kind: examine(results.task, s.model) for kind, s in results.students.items()},
        "gspo": {
            "before": examine(results.task, results.students["top-K"].model),
            "after": examine(results.task, results.policy.model),
            "reward": [y for _, y in gspo.points["reward"]],
            "sampled_exact_match": [y for _, y in gspo.points["sampled"]],
            "kl_to_student": gspo.last("kl"),
            "clip_fraction": gspo.last("rl/clip_fraction"),
        },
        "compare": [way._asdict() for way in results.ways],
    }


def _story(results: Results, tables: Sequence[list[list[str]]], size: Size, run: str) -> page.Story:
    threads = torch.get_num_threads()
    return page.Story(
        version=hl.__version__,
        digits=size.digits,
        noise=NOISE,
        teacher=results.teacher.curves,
        students={kind: s.curves for kind, s in results.students.items()},
        gspo=results.policy.curves,
        ways=results.ways,
        timed=size.timed,
        tables=tables,
        footer=f"headloss demo, {run}, torch {torch.__version__}, {threads} CPU thread{'s' * (threads != 1)}. "
        "Speed and memory compare with separate losses, errors with float64; MiB is the peak beyond the inputs.",
    )


def _write(console: Console, out: Path, story: page.Story) -> dict[str, str | None]:
    """The page and the picture, or how to get them."""
    try:
        files = page.write_page(out, story)
    except ImportError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        console.print(" no page: it needs matplotlib, pip install 'headloss\\[plot]'")
        return {"page": None, "png": None}
    for name, file in zip(("page   ", "picture"), files, strict=True):
        console.print(f" [bold]{name}[/]  {file}", soft_wrap=True)
    return {"page": str(files[0]), "png": str(files[1])}


def _opening(console: Console, size: Size) -> None:
    console.print()
    idea = Text.assemble((IDEA, "cyan"), "\n\nThe softmax is read once; every loss is plain PyTorch on its facts.")
    panel = Panel(idea, title=f"[bold]headloss {hl.__version__}[/]", title_align="left", padding=(1, 2), expand=False)
    console.print(Padding(panel, (0, 1), expand=False))
    example = Sorting(size.digits).prompts(1, torch.Generator().manual_seed(5))
    shown, ordered = (" ".join(map(str, x.tolist())) for x in (example[0, 1:-1], example[0, 1:-1].sort().values))
    console.print(
        f"\n [bold cyan]The task[/]      sort {shown} -> {ordered}; {NOISE:.0%} of the training digits are random"
    )


def _chapter(console: Console, title: str, line: str) -> None:
    console.print(f" [bold cyan]{title:<12}[/]  {line}")


def _rich(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.ROUNDED, header_style="bold", border_style="dim")
    for i, head in enumerate(rows[0]):
        table.add_column(head, justify="right" if i and head != "losses" else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    return table


class _Bar:
    """One bar for the whole demo: a step counts what it costs, so the time left is that of everything."""

    def __init__(self, progress: Progress, costs: tuple[float, ...]) -> None:
        self.progress, self.costs = progress, costs

    def phase(self, name: str, number: int) -> Tick:
        task = self.progress.task_ids[0]
        self.progress.update(task, description=name)
        return lambda: self.progress.advance(task, self.costs[number])

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()


def _progress(console: Console, size: Size) -> _Bar:
    """A bar with the time left; nothing at all when nobody is watching."""
    progress = Progress(
        TextColumn(" {task.description:<38}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(compact=True),
        TextColumn("[dim]left[/]"),
        console=console,
        transient=True,
        refresh_per_second=4,
        disable=not console.is_terminal,
    )
    steps = (size.teach.steps, len(page.KINDS) * size.distill.steps, size.reinforce.steps, compare.steps(size.rounds))
    progress.add_task("", total=sum(n * cost for n, cost in zip(steps, size.costs, strict=True)))
    return _Bar(progress, size.costs)
