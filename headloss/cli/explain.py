"""`headloss explain config.json --tokens N --vocab V --hidden D`: the plan and memory of a call, without a GPU.

Dimension key:  N rows   V vocabulary   D hidden size   S segments   K ids

The objective is planned on tensors that have a shape but no memory; nothing is computed.  With `--ranks` no process
group is made: a rank's share follows from V / ranks, as for `hl.VocabShard` of even width.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import headloss as hl
from headloss.cli.problem import Asked, example
from headloss.engine.explain import Explanation, size_of
from headloss.sources import padded, parse_bytes

ASSUMED = {"tokens": 8192, "vocab": 128256, "hidden": 4096, "dtype": "bf16"}  # a common head of today
MOST = 1 << 27  # tokens, whose targets take a GiB
DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32, "float64": torch.float64,
}  # fmt: skip


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A JSON or YAML file with terms and metrics.")],
    tokens: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Tokens of a batch on one rank; by default 8192.")
    ] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Size of the vocabulary; by default 128256.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size; by default 4096.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks that share the vocabulary.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; by default bf16.")] = None,
    memory: Annotated[str, typer.Option(help="Limit for the rows x vocabulary buffers.")] = "1GiB",
    segments: Annotated[int, typer.Option(min=1, help="Number of sequences in the batch, all of the same length.")] = 8,
    top_k: Annotated[int, typer.Option(min=0, help="Ids per row of a sparse teacher; 0 for a dense teacher.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Print the plan and memory of an objective at a given size; nothing is computed."""
    given = {"tokens": tokens, "vocab": vocab, "hidden": hidden, "dtype": dtype}
    assumed = {name: value for name, value in ASSUMED.items() if given[name] is None}
    size: dict[str, Any] = {**given, **assumed}
    if size["dtype"] not in DTYPES:
        raise typer.BadParameter(f"wanted one of {', '.join(DTYPES)}, got {dtype!r}", param_hint="--dtype")
    N, V, D = size["tokens"], size["vocab"], size["hidden"]
    if top_k > V:
        raise typer.BadParameter(f"wanted at most {V} ids, the vocabulary, got {top_k}", param_hint="--top-k")
    try:
        parse_bytes(memory)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error).removeprefix("memory: "), param_hint="--memory") from None
    try:
        objective = hl.Objective.from_config(read(config))
        plan = explain(
            objective, N, V, D, ranks=ranks, dtype=DTYPES[size["dtype"]], memory=memory, segments=segments, top_k=top_k
        )
    except (TypeError, ValueError, OSError) as error:
        hint = "--memory" if str(error).startswith("memory: ") else str(config)
        raise typer.BadParameter(str(error).removeprefix("memory: "), param_hint=hint) from None
    if json_:
        found = {**plan._asdict(), "terms": [t._asdict() for t in plan.terms]}
        typer.echo(json.dumps({**found, **size, "ranks": ranks, "assumed": list(assumed)}, indent=1))
        return
    typer.echo(f"a head of {N} tokens, vocabulary {V}, hidden size {D}, {size['dtype']}")
    if assumed:
        options = ", ".join(f"--{name} {value}" for name, value in assumed.items())
        typer.echo(f"assumed, because not given: {options}")
    typer.echo(f"\n{plan._replace(first_call={})}")  # its seconds are this process's
    typer.echo(f"in all       {size_of(sum(plan.bytes.values())):>10}  on top of hidden and weight")
    if ranks > 1:
        typer.echo(f"ranks        each of {ranks} holds {columns(V, ranks)} of {V} columns; memory is one rank's")
    typer.echo(
        "on a GPU     Triton kernels run if triton is installed; a call waits once for the device, unless its targets "
        "are prepared (hl.prepare) or host_read=False"
    )


def read(path: Path) -> Any:
    """Plain data from a file; nothing in it is evaluated."""
    if not path.is_file():
        raise ValueError("wanted a file, JSON or YAML, with the terms of an objective; there is no such file")
    text = path.read_text()
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"not valid JSON: {error}") from None
    if importlib.util.find_spec("yaml") is None:
        raise ValueError("reading YAML needs PyYAML, which is not installed; install it or write the config as JSON")
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from None


def columns(vocab: int, ranks: int) -> int:
    return -(-vocab // ranks)


def explain(
    objective: hl.Objective,
    N: int,
    V: int,
    D: int,
    *,
    ranks: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    memory: str | int = "1GiB",
    segments: int = 8,
    top_k: int = 0,
) -> Explanation:
    """The plan of `objective` on a head of this size; if ranks share the vocabulary, on V / ranks columns."""
    S = min(segments, N)
    spans = hl.Segments.from_cu_seqlens(torch.linspace(0, N, S + 1).round().long())
    targets = torch.zeros(N, dtype=torch.long)
    held, budget = columns(V, ranks), parse_bytes(memory)
    # Over a shard two chunks exist at once, one being gathered while the other is made: each gets half the memory.
    source = hl.Linear(
        _shape(N, D, dtype=dtype), _shape(held, D, dtype=dtype), memory=budget if ranks == 1 else budget // 2
    )
    call: dict[str, Any] = {}
    asked = Asked.of(objective)
    call |= {name: _input(name, N, S) for name in asked.inputs}
    call |= dict.fromkeys(asked.reduced, spans) | dict.fromkeys(asked.targets, targets)
    call |= asked.named({name: _teacher(N, held, D, dtype, top_k) for name in asked.teachers})
    found = objective.explain(source, targets, segments=spans, **call)
    return found if ranks == 1 else _of_one_rank(found, V, budget, dtype)


def _of_one_rank(found: Explanation, V: int, budget: int, dtype: torch.dtype) -> Explanation:
    width = padded(found.vocab) * dtype.itemsize
    bytes_: dict[str, int] = {}
    for what, n in found.bytes.items():
        if what.startswith("chunk of"):
            bytes_[f"two chunks of {n // width} rows x {found.vocab} (budget {size_of(budget)})"] = 2 * n
        else:
            bytes_[what] = n
    visited = found.chunks if found.grade.startswith("in the same pass") else 1
    collectives = {"all-gather of partials": visited, "all-reduce of the gradient of hidden": 1}
    return found._replace(vocab=V, bytes=bytes_, collectives=found.collectives | collectives)


def _shape(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape that takes no memory."""
    return torch.zeros((), dtype=dtype).expand(*shape)


def _input(name: str, N: int, S: int) -> Tensor:
    with torch.device("meta"):
        like = example(name, N, S, torch.empty(N), torch.empty)
    return torch.zeros(like.shape, dtype=like.dtype)


def _teacher(N: int, V: int, D: int, dtype: torch.dtype, top_k: int) -> Any:
    if top_k:
        return hl.Sparse(_shape(N, top_k, dtype=torch.long), _shape(N, top_k, dtype=torch.float32))
    return hl.Linear(_shape(N, D, dtype=dtype), _shape(V, D, dtype=dtype))
