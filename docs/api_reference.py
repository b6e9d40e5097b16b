"""docs/api.md: every public name with its signature and its docstring, from the source files; `make docs` writes it."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import headloss as hl

ROOT = Path(__file__).parent.parent
GROUPS = {
    "The objective": ("Objective", "Term", "Output", "Facts", "Grads"),
    "Where the logits come from": ("Linear", "Logits", "Sparse", "Routed", "VocabShard", "Support"),
    "Facts without an objective": ("row_facts", "topk"),
    "Rows, sequences, counts": ("shift_labels", "Segments", "count", "prepare", "Prepared"),
    "Inputs": ("Inputs", "PerRow", "PerSegment", "Whole"),
    "Metrics": ("Metric", "Meter"),
    "Modules": ("FusedLMHead", "HeadParallel"),
    "Checks": ("verify", "Verification"),
}
STACKS = {
    "transformers": ("Transformers", "huggingface.md"),
    "trl": ("TRL", "trl.md"),
    "torchtitan": ("torchtitan", "torchtitan.md"),
    "verl": ("verl", "verl.md"),
    "megatron": ("Megatron", "megatron.md"),
    "fast_llm": ("Fast-LLM", "fast_llm.md"),
}
INNER = {  # methods that the package itself needs
    "Objective.constants_of", "Objective.is_portable", "Term.call", "Term.content", "Term.row_weights",
    "Linear.gemm_dtype", "Linear.is_fp16", "Linear.room", "VocabShard.columns", "Prepared.in_columns", "Routed.known",
    "Support.known", "Support.check_written", "Support.check_call", "FastLLMLosses.name", "FastLLMLosses.metrics",
    "Linear.row_bytes", "Linear.chunk_rows", "Linear.columns", "Logits.columns", "Segments.fitted",
    "Segments.local_counts", "Segments.counts_here", "Prepared.numbers", "Prepared.known", "Metric.parts",
}  # fmt: skip
HEADER = (
    "# API\n\nMade by `make docs` from the docstrings. `import headloss as hl`; only names on this page are stable. "
    "The losses are on [another page](losses.md): `from headloss.losses import cross_entropy`, or "
    "`hl.losses.LOSSES` for all of them by name.\n"
)
Node = ast.ClassDef | ast.FunctionDef


def page() -> str:
    lines = [HEADER]
    placed = {name for names in GROUPS.values() for name in names} | {"losses"}
    more = tuple(name for name in hl.__all__ if name not in placed)
    for group, names in {**GROUPS, **({"More": more} if more else {})}.items():
        lines.append(f"\n## {group}\n")
        for name in names:
            found = getattr(hl, name)
            lines += _entry(f"hl.{name}", found.__name__, Path(inspect.getfile(found)))
    weights = ROOT / "headloss" / "row_weights.py"
    lines.append("\n## Row weights\n\nFor `hl.Term(row_weight=...)`, as `hl.row_weights.truncate(2.0)`.\n")
    lines.append(prose(ast.get_docstring(ast.parse(weights.read_text()), clean=False) or ""))
    for name in _nodes(weights):
        lines += [] if name.startswith("_") else _entry(name, name, weights)
    lines.append("\n## Integrations\n\nWhat the pages of [your stack](huggingface.md) import.\n")
    for module, (title, link) in STACKS.items():
        lines.append(f"\n### {title}\n\n`from headloss.integrations.{module} import ...`; [its page]({link}).\n")
        for name in sorted(_imported(module)):
            lines += _entry(name, name, *_places(module), level=4)
    return "".join(lines)


def _entry(title: str, name: str, *files: Path, level: int = 3) -> Iterator[str]:
    """A heading, the signature, the docstring; then the public methods of a class in the same form."""
    node = next((node for file in files if (node := _nodes(file).get(name)) is not None), None)
    if node is None:
        return
    yield f"\n{'#' * level} `{title}`\n\n"
    if isinstance(node, ast.FunctionDef):
        yield _signature(title, node) + prose(ast.get_docstring(node) or "")
        return
    own = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and not n.target.id.startswith("_")]  # type: ignore[union-attr]
    if "__init__" in own:
        yield _signature(title, own["__init__"])
    elif fields and _is_record(node):
        text = next(file for file in files if name in _nodes(file)).read_text()
        text = re.sub(r"  # type: ignore.*", "", text).splitlines()
        said = [re.sub(r"(?=  #|$)", ",", text[n.lineno - 1].strip(), count=1) for n in fields]
        yield _fence("python", [f"{title}(", *(f"    {line}" for line in said), ")"])
    yield prose(ast.get_docstring(node) or "")
    for method in own.values():
        public = method.name == "__call__" or not method.name.startswith("_")
        if public and ast.get_docstring(method) and f"{name}.{method.name}" not in INNER:
            marks = {ast.unparse(d) for d in method.decorator_list}
            called = f"{title}.{method.name}"
            if marks & {"property", "cached_property", "functools.cached_property"}:
                yield f"\n**`{called}`** {prose(ast.get_docstring(method) or '').lstrip()}"
            else:
                yield f"\n**`{called}`**\n\n{_signature(called, method)}{prose(ast.get_docstring(method) or '')}"


@functools.cache
def _nodes(file: Path) -> dict[str, Node]:
    return {n.name: n for n in ast.parse(file.read_text()).body if isinstance(n, Node)}


def _places(module: str) -> list[Path]:
    folder = ROOT / "headloss" / "integrations"
    return [folder / f"{module}.py", *sorted(folder.glob(f"{module}_*.py")), folder / "names.py"]


def _imported(module: str) -> set[str]:
    """The names that documents import from an integration."""
    form = re.compile(rf"from headloss\.integrations\.{module} import (\([^)]*\)|[^\n]*)")
    pages = [ROOT / "README.md", *(p for p in (ROOT / "docs").glob("*.md") if p.name != "api.md")]
    found = [m[1] for p in pages for m in form.finditer(p.read_text())]
    return {name for names in found for name in re.findall(r"\b(\w+)\b(?! as)", re.sub(r"#.*", "", names))}


def _is_record(node: ast.ClassDef) -> bool:
    said = {ast.unparse(x) for x in (*node.bases, *node.decorator_list)}
    return any(x == "NamedTuple" or x.startswith("dataclass") for x in said)


def _signature(title: str, node: ast.FunctionDef) -> str:
    """One line if it fits, otherwise a parameter per line."""
    back = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    given = ["*" if a == "*unnamed: Any" else a for a in _arguments(node.args) if a not in ("self", "cls")]
    given = given[1:] if given[:1] == ["/"] else given
    line = f"{title}({', '.join(given)}){back}"
    return _fence("python", [line] if len(line) <= 100 else [f"{title}(", *(f"    {a}," for a in given), f"){back}"])


def _arguments(args: ast.arguments) -> Iterator[str]:
    def shown(a: ast.arg, default: ast.expr | None) -> str:
        said = a.arg if a.annotation is None else f"{a.arg}: {ast.unparse(a.annotation)}"
        return said if default is None else f"{said}{' = ' if a.annotation else '='}{ast.unparse(default)}"

    before = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(before) - len(args.defaults)) + list(args.defaults)
    for i, (a, default) in enumerate(zip(before, defaults, strict=True)):
        yield shown(a, default)
        if args.posonlyargs and i == len(args.posonlyargs) - 1:
            yield "/"
    if args.vararg is not None:
        yield f"*{shown(args.vararg, None)}"
    elif args.kwonlyargs:
        yield "*"
    yield from (shown(a, default) for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True))
    if args.kwarg is not None:
        yield f"**{shown(args.kwarg, None)}"


def prose(text: str) -> str:
    """A docstring as Markdown: examples and lists of words keep their columns, the rest is text."""
    made = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = paragraph.split("\n")
        if lines[0].startswith(">>>"):
            made.append(_fence("pycon", lines))
        elif any(re.match(r"\s*\S+( \S+)?\s{2,}\S", line) and not re.match(r"\S.*\.  \S", line) for line in lines):
            made.append(_fence("text", lines))
        else:
            made.append(re.sub(r"`[^`]*`|[|*]", _escaped, " ".join(line.strip() for line in lines)) + "\n")
    return "\n" + "\n".join(made)


def _escaped(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith("`") else f"\\{found[0]}"


def _fence(kind: str, lines: list[str]) -> str:
    return "\n".join([f"```{kind} signature" if kind == "python" else f"```{kind}", *lines, "```", ""])


if __name__ == "__main__":
    sys.stdout.write(page())
