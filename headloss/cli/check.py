"""`headloss check`: compares every loss on every path of this machine with a dense float64 computation.

Dimension key:  N rows   V vocabulary

The reference is that of `hl.verify`: all logits in memory, the loss as its function is written.  Float64 must agree to
1e-9; a narrower dtype is off if its error is more than twice that of plain PyTorch in the same dtype on the same
numbers, plus a few roundings.
"""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import headloss as hl
from headloss.backends import resolve
from headloss.checks.dense import Dense
from headloss.checks.dense_facts import COMPARING
from headloss.cli import own
from headloss.cli.problem import Problem, Result, answer, dense_call, leaves_of
from headloss.divergence import is_divergence
from headloss.losses import LOSSES

STUDENT = ("lse", "logprob", "mean_logprob", "entropy", "sum_p2")
TEACHER = ("teacher_cross_entropy", "reverse_cross_entropy", "teacher_entropy")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16"}


class Check(NamedTuple):
    """One comparison on one path: its largest relative error, plain PyTorch's in the same dtype, and the limit."""

    what: str
    path: str
    backend: str
    dtype: str
    error: float
    eager: float | None
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # false for NaN

    @property
    def where(self) -> str:
        return f"{self.path}, {self.backend}, {self.dtype}"


def command(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda if available.")] = "",
    fast: Annotated[bool, typer.Option("--fast", help="Use fewer rows and columns.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print every single check as JSON instead of a table.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    objective: Annotated[str, typer.Option(metavar="MODULE:NAME", help="Check your own objective, term or loss.")] = "",
    rows: Annotated[int, typer.Option(min=4, help="With --objective: rows of the random data.")] = 64,
    vocab: Annotated[int, typer.Option(min=8, help="With --objective: size of the vocabulary.")] = 1003,
    hidden: Annotated[int, typer.Option(min=1, help="With --objective: hidden size.")] = 32,
    dtype: Annotated[str, typer.Option(help="With --objective: float64, float32, bfloat16 or float16.")] = "float32",
    head: Annotated[str, typer.Option(help="With --objective: linear or logits; by default both.")] = "",
    top_k: Annotated[int, typer.Option(min=0, help="With --objective: ids per row of a sparse teacher; 0: dense.")] = 0,
) -> None:
    """Compare every loss and path with float64 on this machine; exit code 1 if anything is off.

    With --objective, check your own loss instead, on random data for all its inputs.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"wanted cpu or cuda, got {device!r}", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device here", param_hint="--device")
    if objective:
        _check_users(objective, (rows, vocab, hidden), dtype, device, seed, head, top_k, json_)
        return
    for name in ("rows", "vocab", "hidden", "dtype", "head", "top_k"):
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            raise typer.BadParameter("has no effect without --objective", param_hint=f"--{name.replace('_', '-')}")
    console = Console(highlight=False)
    bar = Progress(
        TextColumn("[cyan]{task.description:<22}"), BarColumn(), TimeRemainingColumn(), console=console, transient=True,
        disable=json_ or not console.is_terminal,
    )  # fmt: skip
    done: list[Check] = []
    with bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # bfloat16 on a CPU without it is slower, but no less right
        task = bar.add_task("checking", total=len(LOSSES) + 2)
        for what, checks in run_checks(device, fast, seed):
            bar.update(task, description=what, advance=1)
            done += checks
    bad = [c for c in done if not c.ok]
    if json_:
        typer.echo(json.dumps(report(done, device, seed), indent=1))
    else:
        console.print(_table(done), *_verdict(done, bad, device), sep="\n")
    if bad:
        raise typer.Exit(1)


def _check_users(
    where: str, size: tuple[int, int, int], dtype: str, device: str, seed: int, head: str, top_k: int, json_: bool
) -> None:
    for name, value, known in (("--dtype", dtype, own.DTYPES), ("--head", head, ("", "linear", "logits"))):
        if value not in known:
            raise typer.BadParameter(f"wanted one of {', '.join(filter(None, known))}, got {value!r}", param_hint=name)
    if top_k > size[1]:
        raise typer.BadParameter(f"wanted at most {size[1]} ids, the vocabulary, got {top_k}", param_hint="--top-k")
    try:
        loaded = own.load(where)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--objective") from None
    found = {}
    try:
        for kind in (head,) if head else ("linear", "logits"):
            source, targets, call = own.make(loaded, *size, own.DTYPES[dtype], device, seed, kind, top_k)
            if top_k and "teacher" not in call:
                raise typer.BadParameter(f"{where} uses no teacher", param_hint="--top-k")
            found[kind] = hl.verify(loaded, source, targets, rows=size[0], **call)
    except typer.BadParameter:
        raise
    except Exception as error:  # whatever the function raises
        what = str(error) if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: {error}"
        drawn = own.inputs_of(loaded)
        hint = f"\nRandom data was made for the inputs {drawn}." if drawn else ""
        hint += "\nFor other data, call hl.verify(objective, source, targets, ...) from Python."
        message = f"{where}: {what}{own.raised_at(error)}{hint}"
        raise typer.BadParameter(message, param_hint="--objective") from None
    if json_:
        about = {"headloss": hl.__version__, "torch": torch.__version__, "objective": where, "device": device}
        data = {kind: v.as_data() for kind, v in found.items()}
        typer.echo(json.dumps({**about, "dtype": dtype, "seed": seed, "ok": all(v.ok for v in found.values()), **data}))
    else:
        typer.echo("\n\n".join(f"{where}, {kind}, {dtype}, {device}\n{v}" for kind, v in found.items()))
    if not all(v.ok for v in found.values()):
        raise typer.Exit(1)


def report(done: list[Check], device: str, seed: int) -> dict[str, Any]:
    """The checks as plain data."""
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    about = {"headloss": hl.__version__, "torch": torch.__version__, "device": name, "seed": seed}
    return {**about, "ok": all(c.ok for c in done), "checks": [{**c._asdict(), "ok": c.ok} for c in done]}


def run_checks(device: str, fast: bool, seed: int) -> Iterator[tuple[str, list[Check]]]:
    """Yields what is checked with the results."""
    problem = Problem.make(device, seed, *((37, 211, 16) if fast else (193, 4099, 64)))
    yield "facts", list(check_facts(problem, STUDENT, None))
    yield "facts of a teacher", list(check_facts(problem, TEACHER, "dense"))
    for name, fn in sorted(LOSSES.items()):
        checks = [c for teacher in teachers_for(fn) for c in check_loss(problem, name, fn, teacher)]
        if checks:
            yield name, checks


def teachers_for(fn: Callable[..., Any]) -> tuple[str | None, ...]:
    """The kinds of teacher to check a loss with; empty for a loss of inputs alone, which needs no head."""
    if is_divergence(fn):
        return ("dense", "sparse")
    facts = hl.Term(fn).call(None, {}).facts
    return ("dense",) if any(f.name in COMPARING for f in facts) else (None,) if facts else ()


def check_facts(p: Problem, want: tuple[str, ...], teacher: str | None) -> Iterator[Check]:
    """Check facts, and the gradients of a random combination of them."""

    @functools.cache
    def dense(kind: str, dtype: torch.dtype) -> Result:
        leaves = leaves_of(p, kind, dtype)
        source = _source(kind, leaves, {})
        made = Dense(dense_call(p, None, teacher, source), source.fact_dtype, leaves)
        zeros = lambda x: x.new_zeros(len(p.targets)).masked_scatter(p.valid, x)
        return _pulled(p, {f: zeros(made.fact(f, None, "teacher")) for f in want}, leaves)

    for path, kind, options, backend, name in _paths(p, ("float64", "float32", "bfloat16")):
        if path == "forward_backward":
            continue
        dtype = DTYPES[name]
        leaves = leaves_of(p, kind, dtype)
        call: dict[str, Any] = {"host_read": False} if path == "no host read" else {}
        source = _source(kind, leaves, options)
        try:
            got = hl.row_facts(source, p.targets, want, backend=backend, teacher=p.teacher_of(teacher, dtype), **call)
        except ValueError as error:
            if _is_refused(error):
                continue
            raise
        what = "facts" if teacher is None else "facts of a teacher"
        yield _judge(what, path, backend, name, _pulled(p, got, leaves), functools.partial(dense, kind))


def _pulled(p: Problem, facts: Mapping[Any, Tensor], leaves: dict[str, Tensor]) -> Result:
    values = {str(f): torch.where(p.valid, x, 0.0) for f, x in facts.items()}
    live = [x.double() * pull for x, pull in zip(values.values(), p.pulls) if x.requires_grad]
    grads = torch.autograd.grad(torch.stack(live).sum(), list(leaves.values()))
    kept = {f: x.detach() for f, x in values.items()}
    return Result(kept, {f: float(x.abs().max()) for f, x in kept.items()}, dict(zip(leaves, grads, strict=True)))


def check_loss(p: Problem, name: str, fn: Callable[..., Any], teacher: str | None) -> Iterator[Check]:
    """Check one loss on every path, in float64 and float32."""
    inputs = {} if teacher else p.inputs(fn)
    takes_segments = teacher is None and "segments" in inspect.signature(fn).parameters

    @functools.cache
    def dense(kind: str, dtype: torch.dtype) -> Result:
        leaves = leaves_of(p, kind, dtype)
        return answer(p, fn, teacher, _source(kind, leaves, {}), leaves, dtype)

    for path, kind, options, backend, dtype in _paths(p, ("float64", "float32")):
        leaves = leaves_of(p, kind, DTYPES[dtype])
        call: dict[str, Any] = dict(inputs)
        if takes_segments:
            call["segments"] = p.segments
        if teacher:
            call["teacher"] = p.teacher_of(teacher, DTYPES[dtype])
        if path == "no host read":
            call["host_read"] = False
        objective = hl.Objective(term=fn, backend=backend)
        source = _source(kind, leaves, options)
        run = objective.forward_backward if path == "forward_backward" else objective.__call__
        try:
            out = run(source, p.targets, **call)
        except ValueError as error:
            if _is_refused(error):
                continue
            raise
        if out.grads is not None:
            grads = {n: getattr(out.grads, n) for n in leaves}
        else:
            grads = dict(zip(leaves, torch.autograd.grad(out.loss, list(leaves.values())), strict=True))
        got = Result({"loss": out.loss.detach()}, {}, grads)
        label = name if teacher is None else f"{name} ({teacher})"
        yield _judge(label, path, backend, dtype, got, functools.partial(dense, kind))


def _paths(p: Problem, dtypes: tuple[str, ...]) -> Iterator[tuple[str, str, dict[str, Any], str, str]]:
    """(path, kind of source, its options, backend, dtype) for all that this machine can run."""
    N, V = len(p.targets), len(p.weight)
    for name in dtypes:
        dtype = DTYPES[name]
        few = -(-N // 3) * V * dtype.itemsize  # three chunks, or more if segments do not fit
        for backend in ("torch", "triton"):
            try:
                resolve(backend, p.hidden.device, dtype)
            except (RuntimeError, ValueError, TypeError):
                continue
            yield "Logits", "Logits", {}, backend, name
            yield "Linear", "Linear", {}, backend, name
            yield "Linear, chunks", "Linear", {"memory": few}, backend, name
            yield "no host read", "Linear", {"memory": few}, backend, name
            yield "forward_backward", "Linear", {}, backend, name


def _is_refused(error: ValueError) -> bool:
    """Whether this path refuses the loss: the backend lacks its facts, or ignored rows must be dropped for it."""
    return str(error).startswith(("backend:", "host_read:"))


def _source(kind: str, leaves: Mapping[str, Tensor], options: Mapping[str, Any]) -> Any:
    return hl.Logits(leaves["logits"]) if kind == "Logits" else hl.Linear(leaves["hidden"], leaves["weight"], **options)


def _judge(
    what: str, path: str, backend: str, dtype: str, got: Result, dense: Callable[[torch.dtype], Result]
) -> Check:
    truth = dense(torch.float64)
    error = _error(got, truth)
    if dtype == "float64":
        return Check(what, path, backend, dtype, error, None, 1e-9)
    eager = _error(dense(DTYPES[dtype]), truth)
    few = (2 if dtype == "bfloat16" else 16) * torch.finfo(DTYPES[dtype]).eps  # for when eager is exact by luck
    return Check(what, path, backend, dtype, error, eager, 2 * eager + few)


def _error(got: Result, truth: Result) -> float:
    """The largest error, relative to the largest value of its tensor."""
    errors = [
        float((got.values[n].double() - x.double()).abs().max()) / max(truth.scales[n], 1e-30)
        for n, x in truth.values.items()
    ]
    for n, x in truth.grads.items():
        errors.append(float((got.grads[n].double() - x.double()).abs().max()) / max(float(x.abs().max()), 1e-30))
    return max(errors, key=lambda e: (e != e, e))  # NaN is the worst


def _table(done: list[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("relative error", style="cyan", no_wrap=True)
    columns = list(dict.fromkeys((c.dtype, c.backend) for c in done))
    columns += [(dtype, "eager") for dtype in DTYPES if any(c.dtype == dtype and c.eager is not None for c in done)]
    columns.sort(key=lambda column: list(DTYPES).index(column[0]))
    for dtype, backend in columns:
        style = "dim" if backend == "eager" else None
        table.add_column(f"{SHORT[dtype]}\n{backend}", justify="right", no_wrap=True, min_width=6, style=style)
    table.add_column("", no_wrap=True, min_width=3)
    for what in dict.fromkeys(c.what for c in done):
        row = [c for c in done if c.what == what]
        cells = [_cell([c for c in row if c.dtype == dtype], backend) for dtype, backend in columns]
        table.add_row(what, *cells, "[green]ok[/]" if all(c.ok for c in row) else "[red]off[/]")
    return table


def _cell(checks: list[Check], backend: str) -> str:
    """The worst error of a backend, or of plain PyTorch."""
    if backend == "eager":
        return f"{max(c.eager for c in checks if c.eager is not None):.0e}" if checks else ""
    of_backend = [c for c in checks if c.backend == backend]
    if not of_backend:
        return ""
    worst = max(of_backend, key=lambda c: (not c.ok, c.error))
    return f"{worst.error:.0e}" if worst.ok else f"[red]{worst.error:.0e}[/]"


def _verdict(done: list[Check], bad: list[Check], device: str) -> list[str]:
    """One line for each check that is off, and a summary."""
    lines = [f"[red]off[/]  {c.what}: {c.where}: error {c.error:.1e}, allowed {c.limit:.1e}" for c in bad]
    paths = "; ".join(dict.fromkeys(c.path for c in done))
    return [
        *lines,
        f"{len(done) - len(bad)} of {len(done)} checks passed on {device}.",
        "[dim]Each number is the largest relative error of values and gradients, compared with float64, over all "
        f"paths.  eager: plain PyTorch in the same dtype.  Paths: {paths}.[/]",
        "",
    ]
