"""`python -m headloss losses`: formula, inputs and options of each loss, read from its own file."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headloss.divergence import is_divergence
from headloss.losses import LOSSES
from headloss.teachers import COMPARING
from headloss.trace.signature import TEACHER_INPUTS, read_signature, suggest

HEADER = """\
# Losses

Made by `make docs` from docstrings and signatures; each loss is one small file in `headloss/losses/`. Every loss works
with every reduction, source and backend, alone or with others. An input with a `?` is optional. A `teacher` may be
`hl.Logits`, `hl.Linear` or `hl.Sparse`.

LEGEND
"""
LEGEND = (
    "p is the student's softmax, q the teacher's, y the target, H the entropy, A the advantage, r the ratio of new and "
    "old probability of a token, s that of a segment, sg(x) is x.detach(), logprob is log p[y]; old and ref are "
    "old_logprob and ref_logprob."
)


FAMILIES = ("Likelihood and regularisers", "Policy gradient", "Preferences", "Distillation")


class Entry(NamedTuple):
    name: str
    family: str  # one of FAMILIES
    formula: str  # the first line of the docstring
    text: str  # the docstring without that paragraph
    trainers: str  # what trainers call it: the last paragraph, if it begins "In trainers:"
    facts: tuple[str, ...]
    inputs: tuple[str, ...]
    options: tuple[str, ...]


def entries() -> Iterator[Entry]:
    for name, fn in sorted(LOSSES.items()):
        signature = read_signature(fn, top=getattr(fn, "top", None))
        text, _, trainers = (inspect.getdoc(fn) or "").partition("\n\nIn trainers: ")
        mark = lambda p: p.name + ("?" if p.optional else "")
        divergence = is_divergence(fn)
        yield Entry(
            name,
            _family(fn, {p.name for p in signature.parameters}),
            _formula(" ".join(text.split())),
            text,
            " ".join(trainers.split()),
            tuple(mark(p) for p in signature.parameters if p.kind == "fact"),
            ("teacher",) if divergence else tuple(mark(p) for p in signature.parameters if p.kind != "fact"),
            tuple(f"{k}={_default(v)}" for k, v in signature.options.items()),
        )


def by_family() -> dict[str, list[Entry]]:
    found = list(entries())
    return {family: [e for e in found if e.family == family] for family in FAMILIES}


def markdown() -> str:
    """The page docs/losses.md."""
    lines = [HEADER.replace("LEGEND", LEGEND.replace("sg(x)", "`sg(x)`").replace("x.detach()", "`x.detach()`"))]
    for family, members in by_family().items():
        lines.append(f"\n## {family}\n")
        for e in members:
            lines.append(f"\n### `{e.name}`\n\n{_prose(e)}\n\n")
            asks = (("facts", e.facts), ("inputs", e.inputs), ("options", e.options))
            lines.append("; ".join(f"*{what}* {_ticks(names)}" for what, names in asks if names) + "\n")
            lines += [f"\n*in trainers* {e.trainers}\n"] if e.trainers else []
    return "".join(lines)


def command(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Show these losses in full.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    markdown_: Annotated[bool, typer.Option("--markdown", help="Print the page docs/losses.md.")] = False,
) -> None:
    """List the losses: formulas, inputs, options."""
    for name in names or ():
        if name not in LOSSES:
            raise typer.BadParameter(f"there is no loss {name!r}{suggest(name, LOSSES)}", param_hint="NAME")
    found = [e for members in by_family().values() for e in members if not names or e.name in names]
    if markdown_ and (names or json_):
        raise typer.BadParameter("is the whole page; leave out names and --json", param_hint="--markdown")
    if markdown_:
        typer.echo(markdown(), nl=False)
    elif json_:
        typer.echo(json.dumps([e._asdict() for e in found], indent=1))
    else:
        console = Console(highlight=False)
        console.print(_table(found, whole=bool(names)))
        console.print(Text(f"{LEGEND}\n", style="dim"))


def _family(fn: Callable[..., Any], asked: set[str]) -> str:
    """A loss's family, by what it asks for: a teacher, pairs or flags of segments, advantages, or none of them."""
    if is_divergence(fn) or asked & {*COMPARING, *TEACHER_INPUTS}:
        return "Distillation"
    if asked & {"pairs", "desirable"}:
        return "Preferences"
    policy = asked & {"advantage", "optimal_advantage", "returns"}
    return "Policy gradient" if policy else "Likelihood and regularisers"


def _table(found: list[Entry], whole: bool) -> Table:
    """A loss on the left; on the right its formula (or its whole docstring), then what it asks for and its options."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("loss", style="cyan", no_wrap=True)
    table.add_column("formula; what it needs (? is optional); options", overflow="fold")
    for i, e in enumerate(found):
        if not whole and (i == 0 or e.family != found[i - 1].family):
            table.add_row(Text(e.family, style="bold"), "")
        right = Text("\n\n".join(_lines(p) for p in e.text.split("\n\n")) + "\n" if whole else e.formula)
        trainers = ("in trainers: ", (e.trainers,) if e.trainers else ())
        for label, words in (("needs: ", (*e.facts, *e.inputs)), ("options: ", e.options), trainers):
            if words:
                right.append(f"\n{label}{', '.join(words)}", style="dim")
        table.add_row(e.name, right, end_section=False)
        table.add_row("", "")
    return table


def _prose(e: Entry) -> str:
    """The docstring as Markdown: the formula in a block, and words that are explained line by line as a list."""
    text = e.text
    lead = ""
    if not re.match(r"[A-Z][a-z]+ [a-z]", e.formula):  # "One value per pair ..." is prose
        lead = f"    {e.formula}\n\n"
        rest = re.sub(r"\s+", " ", text.split("\n\n")[0])[len(e.formula) :].lstrip(" :;.")
        text = "\n\n".join([rest[:1].upper() + rest[1:], *text.split("\n\n")[1:]]).strip()
    paragraphs = []
    for paragraph in text.split("\n\n"):
        words = _words(paragraph)
        made = "\n".join(f"- `{word}` {' '.join(said.split())}" for word, said in words) if words else _lines(paragraph)
        paragraphs.append(made.replace("*", "\\*"))
    return (lead + "\n\n".join(paragraphs)).strip("\n")


def _words(paragraph: str) -> list[tuple[str, str]]:
    """The words that a paragraph explains line by line, where indented lines go on; none if it is ordinary text."""
    items: list[tuple[str, str]] = []
    for line in paragraph.split("\n"):
        m = re.match(r"(\S+(?: \"\w+\")?)\s{2,}(.+)", line)
        if m:
            items.append((m[1], m[2]))
        elif items and line.startswith("    "):
            items[-1] = (items[-1][0], f"{items[-1][1]} {line.strip()}")
        else:
            return []
    return items


def _lines(paragraph: str) -> str:
    return paragraph if _words(paragraph) else " ".join(paragraph.split())


def _formula(text: str) -> str:
    """The docstring up to the end of its first sentence."""
    for i, c in enumerate(text):
        if c in ":;" and text[i + 1 : i + 2] == " ":
            return text[:i]
    return text.rstrip(".")


def _default(value: Any) -> str:
    return getattr(value, "__name__", repr(value))


def _ticks(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{n}`" for n in names)
