"""A traced loss printed as a Triton function, so that it runs inside a kernel.

    pointwise   any graph of element-wise operations -> a function of its arguments

Only known operations (`operations.py`) on names made here are printed; anything else raises `Unprintable`.  The source
lives in memory only, where tracebacks and `inspect` find it.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import re
from typing import Any

from torch import fx

from headloss.backends.triton.printer.operands import Unprintable as Unprintable
from headloss.backends.triton.printer.printer import Printer, Value, dtype_of, kind_of


def pointwise(graph: fx.GraphModule, name: str = "pointwise") -> Any:
    """`graph` as a `@triton.jit` function: one argument for each placeholder, a tuple of its outputs.

    Arguments are float32 (float64, int64 and bool where the graph has those), scalars or blocks that broadcast; so are
    the results.
    """
    return compiled(source_of(graph, name), name)


def quick(graph: fx.GraphModule, name: str) -> tuple[Any, tuple[float, ...]]:
    """The same for a function of logarithms that runs for every column, not once per row; and the numbers that it
    takes.

    Its arguments are those of the graph, e to the power of each, and the numbers.  Exponentials and quotients are as
    exact as Triton's own.  Float literals become numbers, after one that is always there because Triton has no empty
    tuples; an exponent stays a literal, because a known one is far cheaper.
    """
    printer = Printer(lifted=lambda i: f"n{i + 1}", but=("pow",))
    source = _QUICK.sub(lambda m: f"quick_{m[1]}(", source_of(graph, name, printer, exponentials=True))
    source = re.sub(r"quick_exp\(a(\d+)\)", r"e\1", source)
    return compiled(_share(source), name), (0.0, *printer.numbers)


def _share(source: str) -> str:
    """Compute 1 / (1 + e^d), the slope of logaddexp, from the exponential of -|d|, which its value needs too."""
    for found in list(_FALLING.finditer(source)):
        e, _, one = found.group(1, 2, 3)
        if len(re.findall(rf"\b{e}\b", source)) == 2 == len(re.findall(rf"\b{one}\b", source)):
            source = source.replace(found[0], f"{found[4]} = {found[5]} * quick_falling({found[2]})")
    return source


_QUICK = re.compile(r"(?:tl\.(?=div_rn|log\()|(?<![.\w]))(exp|div|log|logaddexp|sigmoid)(?:_rn)?\(")
_FALLING = re.compile(r"(\w+) = quick_exp\((\w+)\)\n\s+(\w+) = \1 \+ 1\.0\n\s+(\w+) = quick_div\((\w+), \3\)")


def source_of(
    graph: fx.GraphModule, name: str = "pointwise", printer: Printer | None = None, exponentials: bool = False
) -> str:
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    given = {n: Value(f"a{i}", kind_of(dtype_of(n))) for i, n in enumerate(placeholders)}
    outputs: list[fx.Node] = []
    fx.map_arg(graph.graph.output_node().args[0], outputs.append)
    printer = printer or Printer()
    values = printer.graph(graph.graph, given, outputs)
    results = "".join(f"{values[node].text}, " for node in outputs)
    lifted = printer.lifted
    numbers = [] if lifted is None else [lifted(i) for i in range(-1, len(printer.numbers))]
    if exponentials:
        numbers = [f"e{i}" for i in range(len(given))] + numbers
    return function(name, [*(v.text for v in given.values()), *numbers], printer.lines, f"({results.rstrip()})")


def function(name: str, arguments: list[str], lines: list[str], result: str) -> str:
    if not name.isidentifier():
        raise ValueError(f"name: wanted an identifier, got {name!r}")
    body = "".join(f"    {line}\n" for line in [*lines, f"return {result}"])
    return f"@triton.jit\ndef {name}({', '.join(arguments)}):\n{body}"


@functools.lru_cache(1024)
def compiled(source: str, name: str) -> Any:
    """The function that this source defines; the same object for the same source."""
    import triton  # type: ignore
    import triton.language as tl  # type: ignore

    from headloss.backends.triton.kernels import pointwise as device

    place = f"<headloss {name} {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[place] = (len(source), None, source.splitlines(True), place)
    namespace: dict[str, Any] = {k: x for k, x in vars(device).items() if not k.startswith("_")}
    namespace |= {"triton": triton, "tl": tl, "__name__": "headloss.backends.triton.printer.lower"}
    exec(compile(source, place, "exec"), namespace)
    return namespace[name]
