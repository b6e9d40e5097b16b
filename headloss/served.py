"""Turns prompt log-probabilities of inference servers into ids and log-probabilities of a sparse teacher.

For each token of a prompt a server returns one entry: the log-probabilities of that token and of the likeliest others,
given the tokens before it.  The first token has no entry.  A student's row t predicts token
t + 1, so the entry of token t + 1 is the teacher of row t, and the last row of a sequence has none, just as in
`hl.shift_labels`.

    server's entries   None    about token 1   about token 2   about token 3
    teacher's rows             row 0           row 1           row 2           row 3: ids -1

Both formats may hold one sequence, (T, K), or a list of them, (B, T, K) padded to the longest or to `rows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Row = list[tuple[float, int]]  # log-probability and id
HIGHEST = 1e-3  # highest log-probability accepted: 0 plus rounding


def from_vllm(
    prompt_logprobs: Sequence[Any],
    *,
    rows: int | None = None,
    k: int | None = None,
    start: int | Sequence[int] = 0,
    device: Any = None,
) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities from vLLM's `prompt_logprobs`: None, then {token id: Logprob} per token.

    Ids may be strings, as JSON has them; a Logprob may be the object, {"logprob": ...} or a number.  With
    `prompt_logprobs=K` vLLM returns K entries, and one more where the token itself is not among the K likeliest.

    rows    pad each sequence to this many rows
    k       keep the k likeliest of each row
    start   the number of the token that the first entry is about (or one number per sequence)
    """
    return _pack("prompt_logprobs", prompt_logprobs, _is_vllm_entry, _vllm_row, rows, k, start, device)


def from_sglang(
    input_top_logprobs: Sequence[Any],
    *,
    rows: int | None = None,
    k: int | None = None,
    start: int | Sequence[int] = 0,
    device: Any = None,
) -> tuple[Tensor, Tensor]:
    """The same from SGLang's `meta_info["input_top_logprobs"]`: None, then [(logprob, token id, text), ...] per token.

    `start` is the request's `logprob_start_len`; the rest as in `from_vllm`.
    """
    return _pack("input_top_logprobs", input_top_logprobs, _is_sglang_entry, _sglang_row, rows, k, start, device)


def from_dataset(batch: Mapping[str, Any], *, rows: int | None = None, device: Any = None) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities from `target_token_ids`, `target_logprobs` and `target_mask`, as `headloss teach` and
    axolotl store them: entry t is about token t.

    One sequence, (T, K), or several, (B, T, K): tensors, or lists, which are padded to the longest or to `rows`.
    """
    names = ("target_token_ids", "target_logprobs", "target_mask")
    if not hasattr(batch, "keys"):
        hint = "; of a dataset, some of its lines: dataset[:8]" if hasattr(batch, "column_names") else ""
        raise TypeError(f"batch: wanted columns by name, got {type(batch).__name__}{hint}")
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(f"batch: wanted the columns {', '.join(names)}; {missing[0]} is not there")
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int)):
        raise TypeError(f"rows: wanted how many rows each sequence is padded to, got {rows!r}")
    columns = {name: _in_lists(batch[name]) for name in names}
    if not len(columns[names[0]]):
        raise ValueError("batch: has no sequences")
    one = _is_number(next(iter(_entries(columns[names[0]])), None))
    columns = {name: [x] if one else x for name, x in columns.items()}
    for name, x in columns.items():
        if not hasattr(x, "__len__") or len(x) != len(columns[names[0]]):
            got = f"{len(x)} sequences" if hasattr(x, "__len__") else type(x).__name__
            raise ValueError(f"{name}: wanted {len(columns[names[0]])} sequences as target_token_ids has, got {got}")
    lines = [_line(b, {name: columns[name][b : b + 1] for name in names}) for b in range(len(columns[names[0]]))]
    longest, K = max(len(x) for x, _, _ in lines), lines[0][0].shape[1]
    if rows is not None and rows < longest:
        raise ValueError(f"rows: {rows}, but a sequence has {longest} tokens")
    T = rows or longest
    ids = torch.full((len(lines), T, K), -1, dtype=torch.int64, device="cpu")
    logprobs = torch.full((len(lines), T, K), -math.inf, dtype=torch.float32, device="cpu")
    for b, (line_ids, line_logprobs, mask) in enumerate(lines):
        if line_ids.shape[1] != K:
            raise ValueError(f"target_token_ids: sequence {b} has {line_ids.shape[1]} ids per token, the first has {K}")
        present = mask[1:].bool()
        ids[b, : len(line_ids) - 1] = line_ids[1:].long().masked_fill(~present, -1)
        logprobs[b, : len(line_ids) - 1] = line_logprobs[1:].masked_fill(~present, -math.inf)
    ids, logprobs = (x[0] if one else x for x in (ids, logprobs))
    return ids.to(device), logprobs.to(device)


def _in_lists(x: Any) -> Any:
    """Arrays of arrays, as pandas has them, turned into lists; anything else unchanged."""
    if str(getattr(x, "dtype", "")) != "object":
        return x
    return [_in_lists(y) if str(getattr(y, "dtype", "object")) == "object" else y.tolist() for y in x]


def _entries(tokens: Any) -> Any:
    """The entries of the first sequence or, if there is only one, of its first token."""
    return tokens[0] if getattr(tokens[0], "ndim", 1) and hasattr(tokens[0], "__iter__") else ()


def _is_number(x: Any) -> bool:
    return x is not None and getattr(x, "ndim", 0 if isinstance(x, int) else 1) == 0


def _line(number: int, columns: Mapping[str, Any]) -> list[Tensor]:
    """One sequence of a dataset: ids, log-probabilities and mask, (T, K) each."""
    found: list[Tensor] = []
    for name, x in columns.items():
        try:
            found.append(
                torch.as_tensor(x[0], dtype=torch.float32 if name == "target_logprobs" else None, device="cpu")
            )
        except (IndexError, TypeError, ValueError, RuntimeError):
            raise ValueError(f"{name}: sequence {number} has no K numbers for each of its tokens") from None
        if found[-1].ndim != 2 or found[-1].shape != found[0].shape:
            got, wanted = tuple(found[-1].shape), "(tokens, K)" if len(found) == 1 else tuple(found[0].shape)
            raise ValueError(f"{name}: sequence {number} has shape {got}, wanted {wanted} as target_token_ids has")
    ids, logs, mask = (x[1:] for x in found)  # the first token has no entry
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"target_token_ids: sequence {number} wanted whole numbers, got {ids.dtype}")
    present = mask.bool()
    if bool((present & (ids < 0)).any()):
        least = int(ids[present].min())
        raise ValueError(f"target_token_ids: sequence {number} has {least} where target_mask is not 0")
    wrong = present & ~(logs <= HIGHEST)  # NaN too
    if bool(wrong.any()):
        raise ValueError(f"target_logprobs: sequence {number} wanted log-probabilities, got {float(logs[wrong][0])}")
    return found


def _is_vllm_entry(x: Any) -> bool:
    return x is None or isinstance(x, Mapping)


def _vllm_row(entry: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(entry, Mapping):
        raise TypeError(f"wanted {{token id: log-probability}}, got {type(entry).__name__}")
    for token, x in entry.items():
        yield (x.get("logprob") if isinstance(x, Mapping) else getattr(x, "logprob", x)), token


def _is_sglang_entry(x: Any) -> bool:
    return x is None or (isinstance(x, list | tuple) and (not x or _is_triple(x[0])))


def _is_triple(x: Any) -> bool:
    return isinstance(x, list | tuple) and len(x) >= 2 and isinstance(x[0], int | float)


def _sglang_row(entry: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(entry, list | tuple):
        raise TypeError(f"wanted [(logprob, token id, text), ...], got {type(entry).__name__}")
    for x in entry:
        if not isinstance(x, list | tuple) or len(x) < 2:
            raise TypeError(f"wanted (logprob, token id, text), got {x!r}")
        yield x[0], x[1]


def _pack(
    name: str,
    answers: Sequence[Any],
    is_entry: Callable[[Any], bool],
    read: Callable[[Any], Iterator[tuple[Any, Any]]],
    rows: int | None,
    k: int | None,
    start: int | Sequence[int],
    device: Any,
) -> tuple[Tensor, Tensor]:
    if isinstance(answers, str | Mapping) or not isinstance(answers, Sequence):
        raise TypeError(
            f"{name}: wanted a list with one entry per token, or a list of those, got {type(answers).__name__}"
        )
    if not answers:
        raise ValueError(f"{name}: is empty; was the server asked for it?")
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise ValueError(f"k: wanted at least 1, got {k!r}")
    single = is_entry(answers[0])
    sequences = [answers] if single else answers
    starts = [start] * len(sequences) if isinstance(start, int) else list(start)
    for label, x in (("rows", rows), *(("start", x) for x in starts)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, int) or x < 0):
            raise TypeError(f"{label}: wanted a whole number, got {x!r}")
    if len(starts) != len(sequences):
        raise ValueError(f"start: has {len(starts)} numbers, {name} {len(sequences)} sequences")
    by_sequence: list[dict[int, Row]] = []
    longest = 0
    for i, (sequence, first) in enumerate(zip(sequences, starts, strict=True)):
        label = name if single else f"{name}: sequence {i}"
        if isinstance(sequence, str | Mapping) or not isinstance(sequence, Sequence):
            raise TypeError(f"{label}: wanted a list with one entry per token, got {type(sequence).__name__}")
        by_sequence.append(dict(_rows(label, sequence, first, read, k)))
        length = first + len(sequence)
        longest = max(longest, length)
        if rows is not None and length > rows:
            raise ValueError(f"rows: {rows}, but {label} has {length} tokens")
    T = longest if rows is None else rows
    K = max([1, *(len(row) for by_row in by_sequence for row in by_row.values())])
    ids = torch.full((len(by_sequence), T, K), -1, dtype=torch.int64, device="cpu")
    logprobs = torch.full((len(by_sequence), T, K), -math.inf, dtype=torch.float32, device="cpu")
    for b, by_row in enumerate(by_sequence):
        for t, row in by_row.items():
            ids[b, t, : len(row)] = torch.tensor([token for _, token in row], device="cpu")
            logprobs[b, t, : len(row)] = torch.tensor([x for x, _ in row], dtype=torch.float32, device="cpu")
    ids, logprobs = (x[0] if single else x for x in (ids, logprobs))
    return ids.to(device), logprobs.to(device)


def _rows(label: str, sequence: Sequence[Any], start: int, read: Any, k: int | None) -> Iterator[tuple[int, Row]]:
    """For each entry of a sequence, the student's row that it belongs to and its ids, the likeliest first."""
    for i, entry in enumerate(sequence):
        if entry is None or (i == 0 and not entry):
            if i:
                raise ValueError(f"{label}: position {i} is None; only the first token has no log-probabilities")
            continue
        if start + i == 0:
            raise ValueError(f"{label}: position 0 has log-probabilities, but the first token has nothing before it")
        try:
            row = sorted((_checked(x, token) for x, token in read(entry)), reverse=True)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{label}: position {i}: {error}") from None
        if not row:
            raise ValueError(f"{label}: position {i} has no log-probabilities")
        yield start + i - 1, row if k is None else row[:k]


def _checked(x: Any, token: Any) -> tuple[float, int]:
    if isinstance(token, str) and token.removeprefix("-").isdecimal():
        token = int(token)
    token, x = (y.item() if type(y).__module__ == "numpy" and hasattr(y, "item") else y for y in (token, x))
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"wanted a token id, got {token!r} (ask the server for ids, not for text)")
    if not 0 <= token < 1 << 63:
        raise ValueError(f"wanted a token id, got {token}")
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise TypeError(f"wanted a log-probability for token {token}, got {x!r}")
    if not x <= HIGHEST:  # NaN too
        raise ValueError(f"wanted a log-probability for token {token}, got {x}")
    return float(x), token
