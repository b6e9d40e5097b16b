"""`python -m headloss losses`: what each loss computes, asks for and can be told; from its own file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headloss.divergence import is_divergence
from headloss.losses import LOSSES
from headloss.signature import read_signature

HEADER = """\
# Losses

Made by `make docs` from the losses' own docstrings and signatures; each is one small file in `headloss/losses/`.
Every loss works with every reduction, source and backend, alone or with others.  An input with a `?` may be left out.
A loss that asks for a `teacher` takes any: `hl.Logits`, `hl.Linear` or `hl.Sparse`.
"""


class Entry(NamedTuple):
    name: str
    formula: str  # the first line of the docstring
    text: str  # all of it
    facts: tuple[str, ...]
    inputs: tuple[str, ...]
    options: tuple[str, ...]


def entries() -> Iterator[Entry]:
    for name, fn in sorted(LOSSES.items()):
        signature = read_signature(fn)
        text = " ".join(inspect.getdoc(fn).split()) if fn.__doc__ else ""  # type: ignore[union-attr]
        mark = lambda p: p.name + ("?" if p.optional else "")
        divergence = is_divergence(fn)
        yield Entry(
            name,
            _formula(text),
            text,
            tuple(mark(p) for p in signature.parameters if p.kind == "fact"),
            ("teacher",) if divergence else tuple(mark(p) for p in signature.parameters if p.kind != "fact"),
            tuple(f"{k}={_default(v)}" for k, v in signature.options.items()),
        )


def markdown() -> str:
    """The page docs/losses.md."""
    lines = [HEADER]
    for e in entries():
        lines.append(f"\n## `{e.name}`\n\n{e.text.replace('*', chr(92) + '*')}\n\n")
        lines.append(f"- facts: {_ticks(e.facts)}\n")
        lines.append(f"- inputs: {_ticks(e.inputs)}\n")
        lines.append(f"- options: {_ticks(e.options)}\n")
    return "".join(lines)


def command(
    markdown_: Annotated[bool, typer.Option("--markdown", help="The page docs/losses.md, on standard output.")] = False,
) -> None:
    """The table of losses: formula, facts, inputs, options."""
    if markdown_:
        typer.echo(markdown(), nl=False)
        return
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_lines=False, pad_edge=False)
    table.add_column("loss", style="cyan", no_wrap=True)
    for head in ("formula", "facts and inputs", "options"):
        table.add_column(head, overflow="fold")
    for e in entries():
        table.add_row(e.name, Text(e.formula), Text(", ".join((*e.facts, *e.inputs))), Text(", ".join(e.options)))
    Console(highlight=False).print(table)


def _formula(text: str) -> str:
    """The docstring up to the first sentence's end."""
    for i, c in enumerate(text):
        if c in ":;" and text[i + 1 : i + 2] == " ":
            return text[:i]
    return text.rstrip(".")


def _default(value: Any) -> str:
    return value.__name__ if isinstance(value, Callable) else repr(value)


def _ticks(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{n}`" for n in names) or "none"
