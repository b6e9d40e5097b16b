"""`python -m headloss teach`: store a model's likeliest tokens on disk, for distillation.

Dimension key:  B sequences of a batch   T tokens   K columns of each row

The dataset has axolotl's names, whose entry t is about token t, given the tokens before it; the first has none:

    input_ids (T)   target_token_ids (T, K)   target_logprobs (T, K)   target_mask (T, K)   lse (T)   entropy (T)

`hl.Sparse.from_dataset(batch)` reads it.  Finished parts are written to disk, so an interrupted run can continue.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import headloss as hl

PART = 512  # sequences that are written at a time
MODEL = typer.Option(help="A causal language model of Transformers: its folder or name.")
FORMS = "A JSON-lines, Parquet or text file, a saved dataset, or one of the Hub"
DATA = typer.Option(help=f"{FORMS}; with a column input_ids or text.")
OUT = typer.Option(help="Folder for the result; an interrupted run continues there.")


def command(
    model: Annotated[str, MODEL],
    data: Annotated[str, DATA],
    out: Annotated[Path, OUT],
    k: Annotated[int, typer.Option("--k", min=1, help="How many tokens to store per position.")] = 64,
    temperature: Annotated[float, typer.Option(help="Temperature of the stored softmax.")] = 1.0,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per batch.")] = 16384,
    max_length: Annotated[int, typer.Option(min=2, help="Maximum tokens per sequence; longer ones are cut.")] = 4096,
    split: Annotated[str, typer.Option(help="Split to read, if the dataset has several.")] = "train",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda if available.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Store a model's K likeliest tokens per position, with log-probabilities, as a dataset for distillation."""
    try:
        import datasets  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise typer.BadParameter(f"teach needs {error.name}: pip install {error.name}") from None
    args = {"model": model, "data": data, "k": k, "temperature": temperature, "max_length": max_length, "split": split}
    console = Console(stderr=json_, highlight=False)
    try:
        with _quiet():
            rows = teach(args, out, batch_tokens, device, console)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    text = f"{rows} sequences in {out}; hl.Sparse.from_dataset(batch) reads them"
    typer.echo(json.dumps({"sequences": rows, "out": str(out), **args}) if json_ else text)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Shows one progress bar, ours, without those of loading and saving."""
    import datasets
    from transformers.utils import logging

    shown = not datasets.are_progress_bars_disabled(), logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown[0]:
            datasets.enable_progress_bars()
        if shown[1]:
            logging.enable_progress_bar()


def teach(args: dict[str, Any], out: Path, batch_tokens: int, device: str | None, console: Console) -> int:
    """Run the model over the data, part by part; returns the number of sequences."""
    from datasets import concatenate_datasets, load_from_disk

    from headloss.integrations.causal_lm import check_model

    parts = out / "parts"
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: {out} is a file; wanted a folder")
    if (out / "state.json").exists():
        raise ValueError(f"--out: {out} holds a finished dataset; give another folder")
    record = parts / "said.json"
    begun = record.exists() and any(x.is_dir() for x in parts.iterdir())  # else it failed before it wrote a part
    before = json.loads(record.read_text()) if begun else {}
    weights = before.pop("weights", None)
    if begun and before != args:
        raise ValueError(f"--out: {out} was started with other arguments, {json.dumps(before)}; give another folder")
    if not 0 < args["temperature"] < float("inf"):
        raise ValueError(f"--temperature: wanted a positive number, got {args['temperature']}")
    dataset = read_data(args["data"], args["split"])
    count = len(dataset)
    if not count:
        raise ValueError(f"--data: {args['data']} has no sequences")
    made, tokenizer = _load(args["model"], device, "input_ids" not in dataset.column_names)
    vocab, most = made.get_input_embeddings().weight.shape[0], check_model(made, takes_loss=False).weight.shape[0]
    if args["k"] > most:
        raise ValueError(f"--k: wanted at most {most} columns, which the vocabulary has, got {args['k']}")
    read = lambda i: _tokens(dataset[i], i, tokenizer, args["max_length"], vocab)
    current = fingerprint(made)
    if begun and weights != current:
        raise ValueError(
            f"--model: {args['model']} has different weights from when {out} was started; give another folder"
        )
    parts.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({**args, "weights": current}))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("sequences", total=count)
        for first in range(0, count, PART):
            last, folder = min(first + PART, count), parts / f"{first:09d}"
            lines = [read(i) for i in range(first, last)]
            if not folder.exists():
                _write(made, lines, folder, args, batch_tokens)
            elif _tokens_of(load_from_disk(str(folder))) != [(line["input_ids"], line.get("labels")) for line in lines]:
                raise ValueError(
                    f"--data: sequences {first} to {last - 1} have changed since {out} was started; give another folder"
                )
            progress.update(task, completed=last)
    folders = [str(parts / f"{first:09d}") for first in range(0, count, PART)]
    concatenate_datasets([load_from_disk(x) for x in folders]).save_to_disk(str(out))
    shutil.rmtree(parts)
    return count


def _tokens_of(written: Any) -> list[tuple[list[int], list[int] | None]]:
    """The tokens and labels from which a part was made."""
    labels = written["labels"][:] if "labels" in written.column_names else [None] * len(written)
    return list(zip(written["input_ids"][:], labels, strict=True))


def fingerprint(model: Any) -> str:
    """A hash of the sum of |w| of each weight, to nine digits: the same on every device."""
    sizes = [f"{name} {x.abs().sum(dtype=torch.float64).item():.8e}" for name, x in model.state_dict().items()]
    return hashlib.sha256("\n".join(sizes).encode()).hexdigest()[:16]


def read_data(data: str, split: str) -> Any:
    """A dataset of `input_ids` or `text`, from a file, a folder or a name."""
    path = Path(data)
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}
    if path.is_file() and path.suffix not in kinds:
        raise ValueError(f"--data: wanted a file that ends in {', '.join(kinds)}, got {path.name}")
    if path.is_file() and not path.stat().st_size:
        raise ValueError(f"--data: {data} is empty")
    try:
        found = _read(path, data, split, kinds.get(path.suffix))
    except Exception as error:
        what = "is no file or folder here, and no dataset of that name was found" * (not path.exists())
        raise ValueError(f"--data: {data} {what or 'could not be read'}: {_first_line(error)}") from error
    if not {"input_ids", "text"} & set(found.column_names):
        raise ValueError(f"--data: wanted a column input_ids or text, got {', '.join(found.column_names)}")
    return found


def _read(path: Path, data: str, split: str, kind: str | None) -> Any:
    from datasets import load_dataset, load_from_disk

    if path.is_file():
        return load_dataset(kind, data_files=str(path), split="train")
    found = load_from_disk(data) if path.is_dir() else load_dataset(data, split=split)
    return found[split] if hasattr(found, "keys") else found


def _load(name: str, device: str | None, with_tokenizer: bool) -> tuple[Any, Any]:
    """The model, and the tokenizer of data that is text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
        tokenizer = AutoTokenizer.from_pretrained(name) if with_tokenizer else None
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"--model: {name} could not be loaded: {_first_line(error)}") from error
    try:
        return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")), tokenizer
    except (RuntimeError, AssertionError) as error:  # torch's own for a device that is not here
        raise ValueError(f"--device: {device} cannot be used: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """The first line of an error's deepest cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def _tokens(line: Any, number: int, tokenizer: Any, most: int, vocab: int) -> dict[str, list[int]]:
    """A sequence and, if it has them, its labels."""
    ids = list(line["input_ids"] if tokenizer is None else tokenizer(line["text"])["input_ids"])[:most]
    if not ids:
        raise ValueError(f"--data: sequence {number} has no tokens")
    wrong = [x for x in ids if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < vocab]
    if wrong:
        raise ValueError(
            f"--data: sequence {number} has token {wrong[0]!r}; wanted those of the model, in [0, {vocab})"
        )
    found = {"input_ids": ids}
    if line.get("labels") is not None:
        found["labels"] = list(line["labels"])[:most]
        if len(found["labels"]) != len(ids):
            raise ValueError(f"--data: sequence {number} has {len(ids)} tokens and {len(found['labels'])} labels")
    return found


def _write(model: Any, lines: Sequence[dict[str, list[int]]], folder: Path, args: dict[str, Any], most: int) -> None:
    """One part: sequences of similar length go through the model together, and are stored in their own order."""
    from datasets import Dataset

    rows: dict[int, dict[str, Any]] = {}
    for batch in _batches([len(line["input_ids"]) for line in lines], most):
        found = likeliest(model, [lines[i]["input_ids"] for i in batch], args["k"], args["temperature"])
        for i, row in zip(batch, found, strict=True):
            labels = lines[i].get("labels")
            if labels is not None:
                row["target_mask"] = [m if y != -100 else [0] * len(m) for m, y in zip(row["target_mask"], labels)]
            rows[i] = {**lines[i], **row}
    temporary = folder.with_suffix(".being-written")
    Dataset.from_list([rows[i] for i in range(len(lines))]).save_to_disk(str(temporary))
    temporary.rename(folder)


def _batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > most:
            yield batch
            batch = []
        batch.append(i)
    yield batch


def likeliest(model: Any, sequences: Sequence[Sequence[int]], k: int, temperature: float) -> list[dict[str, Any]]:
    """For each sequence, the columns of the dataset except its tokens."""
    from headloss.integrations.adapter import check_transform, range_of, transform_said
    from headloss.integrations.causal_lm import check_model, transform_of

    head = check_model(model, takes_loss=False, instead="teach multiplies by one plain head")
    transform = transform_of(model)
    T = max(map(len, sequences))
    ids_BT = torch.tensor([[*x, *[0] * (T - len(x))] for x in sequences], device=head.weight.device)
    mask_BT = torch.tensor([[1] * len(x) + [0] * (T - len(x)) for x in sequences], device=head.weight.device)
    with torch.no_grad(), _captured(head) as seen:
        logits = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
    (hidden,) = seen
    check_transform(range_of(logits), transform_said(**transform), "teach reads both from its config alone")
    targets = ids_BT.masked_fill(mask_BT == 0, -100).roll(-1, 1)
    targets[:, -1] = -100
    source = hl.Linear(hidden, head.weight, head.bias, temperature=temperature, **transform)
    with torch.no_grad():
        facts = hl.row_facts(source, targets, want=("top_ids", "top_logprob", "lse", "entropy"), top=k)
    found = {name: facts[name].cpu() for name in ("top_ids", "top_logprob", "lse", "entropy")}
    return [_entries({n: x[b, : len(line) - 1] for n, x in found.items()}, k) for b, line in enumerate(sequences)]


def _entries(rows: dict[str, Tensor], k: int) -> dict[str, Any]:
    """One entry per token: row t of the model is about token t + 1, and no row is about the first."""
    return {
        "target_token_ids": [list(range(k)), *rows["top_ids"].int().tolist()],
        "target_logprobs": [[-float("inf")] * k, *rows["top_logprob"].float().tolist()],
        "target_mask": [[0] * k, *([[1] * k] * len(rows["lse"]))],
        "lse": [0.0, *rows["lse"].float().tolist()],
        "entropy": [0.0, *rows["entropy"].float().tolist()],
    }


@contextlib.contextmanager
def _captured(head: Any) -> Iterator[list[Tensor]]:
    """Records a head's inputs; it returns a few numbers per row, which show what the model does to its logits."""
    from headloss.integrations.adapter import probes

    seen: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return probes(hidden)

    head.forward = forward
    try:
        yield seen
    finally:
        del head.forward
