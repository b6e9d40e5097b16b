"""Teachers on the rows of a call: their checks, and the logits or ids that each gives to a chunk of the sweep.

Dimension key:  N rows   R rows that count   C rows of a chunk   K ids per row
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headloss.deferred_checks import readable
from headloss.derived_teachers import AtIds, Top
from headloss.engine.budget import COPIES, NO_COST, Cost, fixed_bytes_of, gathered_bytes
from headloss.engine.checks import check_ids
from headloss.engine.heads import Head, open_source
from headloss.engine.plan import plain_source
from headloss.facts import Want
from headloss.parallel.shard import note_of
from headloss.routed import Routed
from headloss.rows import Rows
from headloss.segments import check_device
from headloss.sources import (
    Linear,
    Logits,
    Source,
    Sparse,
    Teacher,
    padded,
    parse_bytes,
    tensors_in,
    with_tensors,
    without_tensors,
)
from headloss.teachers import DenseChunk, SparseChunk, TeacherChunk, Temperature, TopChunk, places
from headloss.trace.signature import UNNAMED


def named_teachers(teacher: Any) -> dict[str, Any]:
    """The teachers of a call by name."""
    if not isinstance(teacher, Mapping):
        return {} if teacher is None else {UNNAMED: teacher}
    for name in teacher:
        if not isinstance(name, str):
            raise TypeError(f"teacher: wanted teachers by name, got {name!r} of type {type(name).__name__} for a name")
    return dict(teacher)


def name_teachers(teacher: Teacher | Mapping[str, Teacher] | None, source: Source) -> dict[str, Teacher]:
    """Teachers by name, on plain tensors, checked against the student."""
    named = named_teachers(teacher)
    for name, x in named.items():
        label = teacher_label(name)
        if isinstance(x, Top):
            if x.k > source.vocab:
                raise ValueError(f"top: wanted at most {source.vocab} columns, which the vocabulary has, got {x.k}")
            continue
        if isinstance(x, Routed):
            for t in x.teachers.values():
                name_teachers({name: t}, source)
            continue
        if isinstance(x, AtIds):
            name_teachers({name: x.teacher}, source)
            _check_at_ids(label, x)
            continue
        if not isinstance(x, Logits | Linear | Sparse):
            hint = "; wrap a tensor in hl.Logits(...)" if isinstance(x, Tensor) else ""
            if isinstance(x, torch.nn.Module):
                hint = f" of {type(x).__module__}; run it, and pass hl.Logits(logits) or hl.Linear(hidden, weight)"
            raise TypeError(f"{label}: wanted hl.Logits, hl.Linear or hl.Sparse, got {type(x).__name__}{hint}")
        if not isinstance(x, Sparse):
            if x.vocab_ids is not None:
                raise ValueError(
                    f"{label}: has vocab_ids, but a dense teacher is on the whole vocabulary; give its top K, "
                    f"hl.topk(teacher, K), which names tokens"
                )
            named[name] = x = plain_source(x)
        if torch.is_grad_enabled() and _first(x).requires_grad:
            warnings.warn(
                f"headloss: {label}: its {'logits' if isinstance(x, Logits) else 'hidden states or log-probabilities'} "
                f"require grad, but a teacher is constant and gets none; make it under torch.no_grad() or detach it",
                stacklevel=2,
            )
        if x.leading != source.leading:
            raise ValueError(f"{label}: has rows of shape {x.leading}, the student's are {source.leading}")
        check_device(label, x, source.device)
        if isinstance(x, Sparse):
            check_ids(label, x, source)
        else:
            _check_columns(label, x, source)
    return named


def _check_at_ids(label: str, at_ids: AtIds) -> None:
    """Raise if the teacher lacks a token of the student."""
    ids, vocab = at_ids.ids, at_ids.teacher.vocab
    if readable(ids) and len(ids) and int(ids.max()) >= vocab:
        row = int((ids >= vocab).int().argmax())
        raise ValueError(f"vocab_ids: row {row} is token {int(ids[row])}, but {label} has {vocab} tokens")
    if ids.device.type == "cuda":
        torch._assert_async((ids < vocab).all(), f"vocab_ids: a token that {label} does not have")


def _first(teacher: Teacher) -> Tensor:
    """The tensor that the teacher's model made."""
    return teacher.logprobs if isinstance(teacher, Sparse) else teacher.tensors[0]


def teacher_label(name: str) -> str:
    return "teacher" if name == UNNAMED else f"teacher[{name!r}]"


def _check_columns(label: str, teacher: Source, source: Source) -> None:
    """Raise unless this rank holds, of the columns that student and teacher share, the same ones of both."""
    mine, theirs = source.shard, teacher.shard
    if (mine is None) != (theirs is None):
        whole, split = ("the student", "the teacher") if mine is None else ("the teacher", "the student")
        raise ValueError(f"{label}: {split} has a vocabulary shard, {whole} has none; shard both alike, or neither")
    if mine is None or theirs is None:
        return
    ranks = dist.get_process_group_ranks
    if theirs.group is not mine.group and ranks(theirs.group) != ranks(mine.group):
        raise ValueError(f"{label}: its vocabulary is shared by a different group from the student's")
    shared = min(source.vocab, teacher.vocab)
    held = [(min(s.start, shared), min(s.start + x.columns, shared)) for s, x in ((mine, source), (theirs, teacher))]
    if held[0] != held[1]:
        (a, b), (c, d) = held
        raise ValueError(
            f"{label}: of the {shared} columns that both have, this rank holds {c} to {d} of the teacher's and {a} to "
            f"{b} of the student's; a rank must hold the same columns of both"
        )


class DenseTeacherRows:
    """A dense teacher: its logits are read, or made, for the same rows as the student's."""

    def __init__(self, teacher: Logits | Linear, source: Source, rows: Rows) -> None:
        self.teacher, self.rows = teacher, rows
        self.head: Head | None = None  # open during a sweep
        self.made: tuple[slice, int, Tensor] | None = None  # the last chunk: two passes may need it
        shared = min(teacher.vocab, source.vocab)
        start = 0 if source.shard is None else source.shard.start
        self.columns = max(0, min(source.columns, teacher.columns, shared - start))
        T = teacher.temperature
        if isinstance(T, Tensor):
            T = rows.take(T.detach().expand(rows.shape).to(source.fact_dtype))
            T = T if rows.valid is None else T.masked_fill(~rows.valid, 1.0)
        self.temperature: Temperature = T

    @property
    def width(self) -> int:
        """The columns of its logits' rows, the same number on all ranks, which must make the same chunks."""
        teacher = self.teacher
        return padded(teacher.vocab if teacher.shard is None else teacher.shard.even_width)

    @property
    def row_bytes(self) -> int:
        """Bytes per row of a chunk: a linear teacher's logits are made, others are copied if rows are left out."""
        teacher = self.teacher
        if isinstance(teacher, Linear):
            return self.width * teacher.chunk_dtype.itemsize
        return 0 if self.rows.keep is None else self.width * teacher.logits.element_size()

    @property
    def gathered_bytes(self) -> int:
        """Bytes per row of a chunk for hidden rows, if those are gathered."""
        teacher = self.teacher
        gathers = isinstance(teacher, Linear) and self.rows.keep is not None
        return teacher.hidden.shape[-1] * teacher.gemm_dtype.itemsize if gathers else 0  # type: ignore[union-attr]

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are held however many rows a chunk has."""
        teacher = self.teacher
        return fixed_bytes_of(teacher, False)[COPIES] if isinstance(teacher, Linear) else 0

    def own(self, key: float | None, part: slice) -> Temperature:
        if key is not None:
            return key
        return self.temperature[part] if isinstance(self.temperature, Tensor) else self.temperature

    def chunk(self, part: slice, keys: tuple[float | None, ...], slot: int) -> TeacherChunk:
        self.head = self.head or self._open()
        if self.made is None or self.made[:2] != (part, slot):
            self.made = part, slot, self.head.read(self.rows.numbers(part), slot)
        raw_CV = self.made[2]
        temperatures = tuple(self.own(key, part) for key in keys)
        return DenseChunk(raw_CV, self.teacher.scale, self.teacher.softcap, temperatures, self.columns)

    def _open(self) -> Head:
        return open_source(self.teacher)

    def hides(self, fact: str, part: slice) -> Tensor | None:
        """A mask of where a fact is 0 because there is nothing to compare with."""
        return None

    def close(self) -> None:
        self.head = self.made = None  # and so the chunk's buffer

    def tensors(self) -> dict[str, Tensor]:
        """The caller's tensors, which a pull reads again."""
        return tensors_in(self.teacher)

    def strip(self) -> None:
        """Drop those tensors; `restored` puts them back."""
        self.close()
        self.teacher, self.temperature = without_tensors(self.teacher), 1.0

    def restored(self, tensors: Mapping[str, Tensor], source: Source, rows: Rows) -> DenseTeacherRows:
        return DenseTeacherRows(with_tensors(self.teacher, tensors), source, rows)


MOST_COMPARED = 512  # ids per row, at most, that one kernel compares with each other


def merges(backend: Any, ids: Tensor) -> bool:
    """Whether one launch can merge the ids that a row names twice."""
    return hasattr(backend, "merge_repeated") and ids.shape[-1] <= MOST_COMPARED


class SparseTeacherRows:
    """A sparse teacher: K columns per row, each named once."""

    row_bytes = gathered_bytes = fixed_bytes = 0

    def __init__(
        self, teacher: Sparse, rows: Rows, dtype: torch.dtype, backend: Any = None, checked: tuple[Any, int] = (None, 0)
    ) -> None:
        ids, logprobs = teacher.ids, teacher.logprobs
        if logprobs.requires_grad:
            logprobs = logprobs.detach()
        self.teacher: Sparse | None = teacher
        self.sorted_RK: Tensor | None = None
        if merges(backend, ids):
            if ids.ndim > 2:  # the kernel skips ignored rows
                ids, logprobs = [x.reshape(rows.total, x.shape[-1]) for x in (ids, logprobs)]
            if rows.keep is not None:
                ids, logprobs = [x.index_select(0, rows.keep) for x in (ids, logprobs)]
            merged = backend.merge_repeated(ids, logprobs.to(dtype), rows.valid, checked)
            self.ids_RK, self.logprob_RK, self.sorted_RK = merged
            return
        self.ids_RK, self.logprob_RK = merge_repeated(rows.take(ids).long(), rows.take(logprobs).to(dtype))
        if rows.valid is not None:
            self.ids_RK = self.ids_RK.masked_fill(~rows.valid[:, None], -1)

    def places(self, source: Source) -> tuple[Tensor, Tensor]:
        """Each id as a column of the source's own, and whether it is one (if not, the column is arbitrary)."""
        return places(self.ids_RK, 0 if source.shard is None else source.shard.start, source.columns)

    def own(self, key: float | None, part: slice) -> Temperature:
        return 1.0  # unused: its log-probabilities are taken as they are

    def chunk(self, part: slice, keys: tuple[float | None, ...], slot: int) -> TeacherChunk:
        return SparseChunk(self.ids_RK[part], None if self.sorted_RK is None else self.sorted_RK[part], once=True)

    def hides(self, fact: str, part: slice) -> Tensor | None:
        return self.ids_RK[part] < 0 if fact in ("ids_logprob", "ids_logit") else None

    def close(self) -> None:
        pass

    def tensors(self) -> dict[str, Tensor]:
        """The caller's tensors."""
        return {} if self.teacher is None else {"ids": self.teacher.ids, "logprobs": self.teacher.logprobs}

    def strip(self) -> None:
        """Drop those tensors: a pull reads only the merged ids, which are a copy."""
        self.teacher = None

    def restored(self, tensors: Mapping[str, Tensor], source: Source, rows: Rows) -> SparseTeacherRows:
        return self


class TopRows:
    """The likeliest columns of each row, which a sweep finds, and optionally a dense teacher to read at those."""

    def __init__(self, k: int, of: DenseTeacherRows | None, row_bytes: int) -> None:
        self.k, self.of = k, of
        self.row_bytes = row_bytes  # of the teacher, unless the call has that teacher anyway
        self.gathered_bytes, self.fixed_bytes = (
            (of.gathered_bytes, of.fixed_bytes) if of is not None and row_bytes else (0, 0)
        )

    def own(self, key: float | None, part: slice) -> Temperature:
        return 1.0 if self.of is None else self.of.own(key, part)

    def chunk(self, part: slice, keys: tuple[float | None, ...], slot: int) -> TopChunk:
        of = None if self.of is None else self.of.chunk(part, keys, slot)
        return TopChunk(self.k, of if isinstance(of, DenseChunk) else None)

    def hides(self, fact: str, part: slice) -> Tensor | None:
        return None

    def close(self) -> None:
        if self.of is not None:
            self.of.close()

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def strip(self) -> None:
        """Drop the teacher: a pull reads only the columns that were found."""
        self.of, self.row_bytes = None, 0

    def restored(self, tensors: Mapping[str, Tensor], source: Source, rows: Rows) -> TopRows:
        return self


TeacherRows = DenseTeacherRows | SparseTeacherRows | TopRows


def merge_repeated(ids_RK: Tensor, logprob_RK: Tensor) -> tuple[Tensor, Tensor]:
    """The first occurrence of a repeated id takes all its probability; the others become padding (-1, -inf)."""
    K = ids_RK.shape[-1]
    sorted_RK, order_RK = ids_RK.sort(dim=-1, stable=True)
    again_RK = sorted_RK[:, 1:] == sorted_RK[:, :-1]
    if readable(ids_RK) and not bool(again_RK.any()) and not bool((sorted_RK[:, 0] < 0).any()):
        return ids_RK.clone(), logprob_RK.clone()  # nothing is repeated, and nothing is padding
    logprob_RK = logprob_RK.masked_fill(ids_RK < 0, -math.inf)
    if readable(ids_RK) and not bool((again_RK & (sorted_RK[:, 1:] >= 0)).any()):
        return ids_RK.masked_fill(ids_RK < 0, -1), logprob_RK
    starts_RK = torch.nn.functional.pad(~again_RK, (1, 0), value=True)
    place = torch.arange(K, device=ids_RK.device).expand_as(ids_RK)
    first_RK = torch.where(starts_RK, place, 0).cummax(-1).values  # where in the sorted row this id's run begins
    leader_RK = torch.empty_like(order_RK).scatter_(-1, order_RK, order_RK.gather(-1, first_RK))
    best_RK = logprob_RK.new_full(logprob_RK.shape, -math.inf).scatter_reduce(-1, leader_RK, logprob_RK, "amax")
    safe_RK = best_RK.masked_fill(best_RK == -math.inf, 0.0)
    sums_RK = torch.zeros_like(logprob_RK).scatter_add_(
        -1, leader_RK, (logprob_RK - safe_RK.gather(-1, leader_RK)).exp()
    )
    leads_RK = (leader_RK == place) & (ids_RK >= 0)
    merged_RK = torch.where(leads_RK, safe_RK + sums_RK.log(), -math.inf)
    return ids_RK.masked_fill(~leads_RK, -1), merged_RK


def cost_of(teacher_rows: Mapping[str, TeacherRows], source: Source, rows: Rows) -> Cost:
    """What a chunk costs beyond the student's logits; over a shard, two chunks exist at once."""
    own = gathered_bytes(source) if isinstance(source, Linear) and rows.keep is not None else 0
    if not teacher_rows:
        return Cost(0, own) if own else NO_COST
    every = teacher_rows.values()
    row, gathered = sum([g.row_bytes for g in every]), sum([g.gathered_bytes for g in every])
    return Cost(row * (1 if source.shard is None else 2), gathered + own, sum([g.fixed_bytes for g in every]))


def heads_of(teacher_rows: Mapping[str, TeacherRows]) -> list[DenseTeacherRows]:
    """The dense teachers whose logits are made by a GEMM."""
    dense = {id(g): g for g in (getattr(g, "of", g) for g in teacher_rows.values()) if isinstance(g, DenseTeacherRows)}
    return [g for g in dense.values() if isinstance(g.teacher, Linear)]


def most_rows(teacher_rows: Mapping[str, TeacherRows]) -> int | None:
    """How many rows of teachers' logits may be made at a time if the student's exist; None if none are made."""
    made = heads_of(teacher_rows)
    if not made:
        return None
    least = min((g.teacher for g in made if isinstance(g.teacher, Linear)), key=lambda x: parse_bytes(x.memory))
    row_bytes = sum(g.row_bytes for g in made)
    room = least.room([sum(g.fixed_bytes for g in made)], row_bytes)
    return max(1, room // max(1, row_bytes + sum(g.gathered_bytes for g in made)))


def note(
    source: Source, rows: Rows, want: Want, teacher_rows: Mapping[str, TeacherRows], more: Mapping[str, Any], terms: str
) -> Tensor | None:
    """What ranks that share a vocabulary must agree on, sent along with a call's first partial; `more`: integers, and
    numbers that must be `near`.

    Float inputs are left out: if each rank computes its own, they may differ in the last bits.
    """
    if source.shard is None:
        return None
    nothing = torch.empty(0, dtype=torch.long, device=source.device)
    same = {
        "targets": [nothing if rows.given is None else rows.given],
        "segments": [] if rows.segments is None else [rows.segments.ids],
        "support": more["support"],
        "teacher": [teacher.ids_RK for teacher in teacher_rows.values() if isinstance(teacher, SparseTeacherRows)],
        "inputs": more["inputs"],
    }
    T, mean = source.temperature, 0.0
    if isinstance(T, Tensor):
        T, mean = None, T.detach().double().mean()  # type: ignore[assignment]
    facts = [(f.name, f.temperature, f.teacher) for f in want.facts]
    sizes = rows.shape, source.shard.vocab
    call = (type(source), [x.dtype for x in source.tensors], sizes, T, source.scale, source.softcap, facts)
    return note_of(source.shard, source.columns, same, (str(call), terms), (mean, *more["near"]))


def sums_hidden(source: Source) -> bool:
    """Whether the backward will sum hidden's gradient over ranks that share a vocabulary."""
    if not isinstance(source, Linear) or source.shard is None or source.shard.partial_hidden:
        return False
    return source.hidden.requires_grad and torch.is_grad_enabled()
