"""Sweeps over kept columns (`support=`): how the source is read, and what differs from a sweep over whole rows.

Dimension key:  N rows   C rows of a block   E kept columns of a block   W places of its rows   V vocabulary   D hidden
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headloss.engine.arguments import Block, Chunk
from headloss.engine.budget import accumulator
from headloss.engine.heads import LogitsHead, open_source
from headloss.engine.sweeps import Sweep
from headloss.engine.teachers import DenseTeacherRows, SparseTeacherRows
from headloss.facts import Partial
from headloss.record import Grads
from headloss.rows import IGNORE, Rows
from headloss.sources import Linear, Logits, Source, parse_bytes
from headloss.support import Known, Support
from headloss.support_layout import ALIGNED, ZERO, Entries, Places, aligned, places_of, width_of
from headloss.teachers import DenseChunk, DensePartial, SparseChunk, TeacherChunk

LOGITS_BYTES = 1 << 28  # kept logits at a time of a `Logits`, which has no budget of its own


def support_chunks(known: Known, rows: Rows, source: Source, dense: int = 0) -> list[slice]:
    """Runs of the rows that count whose kept logits, and those of `dense` teachers, fit into the budget."""
    row_bytes, budget = source.fact_dtype.itemsize * (1 + dense), budget_of(source)
    widest = width(known, rows, slice(0, rows.count))
    if widest * row_bytes > budget:
        raise ValueError(
            f"memory: a row keeps {known.longest} columns, whose logits take {widest * row_bytes} bytes, the budget is "
            f"{budget}; give at least that"
        )
    if rows.count * widest * row_bytes <= budget:
        return [slice(0, rows.count)]
    if rows.keep is not None:
        step = budget // (widest * row_bytes)
        return [slice(i, min(i + step, rows.count)) for i in range(0, rows.count, step)]
    found, first, widest = [], 0, ALIGNED
    for n, length in enumerate(known.offsets.diff().tolist()):
        wide = max(widest, aligned(length + (rows.given is not None)))
        if n > first and (n + 1 - first) * wide * row_bytes > budget:
            found.append(slice(first, n))
            first, wide = n, aligned(length + (rows.given is not None))
        widest = wide
    return [*found, slice(first, rows.count)]


def width(known: Known, rows: Rows, part: slice) -> int:
    """How many places each of these rows has."""
    return width_of(known, int(rows.given is not None), rows.count, rows.keep is None, part)


def budget_of(source: Source) -> int:
    """How many bytes of kept logits may exist at a time."""
    return parse_bytes(source.memory) if isinstance(source, Linear) else LOGITS_BYTES


class SupportHead:
    """A source, open for some columns of each row.  `single_N`: rows of one column, whose logit does not matter."""

    single_chunk, makes_logits = True, False

    def __init__(self, source: Source, single_N: Tensor | None, backend: ModuleType) -> None:
        self.source, self.backend = source, backend
        self.of = None if source.shard is None else (source.shard.start, source.columns), single_N
        self.needs: tuple[bool, ...] = ()
        self.blocks = 1
        self.slope_CW: Tensor | None = None  # the softcap's slope in the block that was read last
        self.begun = False
        self.adds = False  # whether the weight's gradient is added to that of another call
        self.made: dict[str, Tensor] = {}
        if isinstance(source, Linear):
            self.hidden_ND = source.hidden.detach().reshape(-1, source.hidden.shape[-1])
            self.weight_VD = source.weight.detach()[: source.columns]
        else:
            self.logits = LogitsHead(source)

    def read(self, entries: Entries, slot: int = 0) -> Tensor:
        """The kept logits of a block, after scale, bias and softcap: a later softcap would lift the -inf of padding."""
        source, C, W = self.source, entries.rows, entries.width
        flat = torch.full((C * W + 1,), -math.inf, dtype=source.fact_dtype, device=source.device)
        column_E = entries.columns(*self.of)
        if isinstance(source, Linear):
            bias = None if source.bias is None else source.bias.detach()
            where = entries.number_E, column_E, entries.place_E
            self.backend.project(flat, *where, self.hidden_ND, self.weight_VD, bias, source.scale)
        elif source.columns:
            value_E = self.logits.logits_NV[entries.number_E, column_E.clamp(min=0)].to(source.fact_dtype)
            value_E = value_E.masked_fill(column_E < 0, 0) * source.scale
            flat.scatter_(0, entries.place_E.masked_fill(column_E < ZERO, C * W), value_E)
        raw_CW = flat[:-1].view(C, W)
        if source.softcap is not None:
            raw_CW = torch.where(raw_CW == -math.inf, raw_CW, (raw_CW / source.softcap).tanh() * source.softcap)
            self.slope_CW = 1 - (raw_CW / source.softcap) ** 2
        return raw_CW

    def wants_grad(self, needs: tuple[bool, ...]) -> None:
        self.needs = needs
        if isinstance(self.source, Logits):
            self.logits.wants_grad(needs)
            if needs[0] and not self.source.inplace:
                self.logits.all_NV.zero_()

    def grad_buffer(self, entries: Entries, raw_CW: Tensor) -> Tensor:
        return raw_CW  # a copy, whatever the source is

    def write(self, entries: Entries, grad_CW: Tensor, ignored_C1: Tensor | None) -> None:
        source, column_E = self.source, entries.columns(*self.of)
        grad_P = (grad_CW if self.slope_CW is None else grad_CW * self.slope_CW).reshape(-1)
        if isinstance(source, Logits):
            self._write_logits(entries, column_E, grad_P)
            return
        need_hidden, need_weight, *need_bias = self.needs
        if need_hidden:
            wide = source.fact_dtype if source.is_fp16 else source.hidden.dtype
            out = self._room("hidden", self.hidden_ND.shape, wide)
            where = entries.number_E, column_E, entries.place_E
            self.backend.combine(out, *where, grad_P, self.weight_VD, source.scale, False)  # a row is in one block only
        if need_weight:
            out = self._room("weight", source.weight.shape, accumulator(source, self.blocks > 1))
            self.backend.combine(out, *entries.by_column(*self.of), grad_P, self.hidden_ND, source.scale, self.begun)
        if need_bias and need_bias[0] and source.bias is not None:
            out = self._room("bias", source.bias.shape, source.fact_dtype)
            if len(out):
                out.index_put_((column_E.clamp(min=0),), self._each(entries, column_E, grad_P), accumulate=True)
        self.begun = True

    def _each(self, entries: Entries, column_E: Tensor, grad_P: Tensor) -> Tensor:
        """The gradient of each entry's raw logit; 0 if the entry is no column of this head."""
        grad_E = torch.nn.functional.pad(grad_P, (0, 1))[entries.place_E]
        return grad_E.masked_fill(column_E < 0, 0) * self.source.scale

    def _write_logits(self, entries: Entries, column_E: Tensor, grad_P: Tensor) -> None:
        grad_NV = self.logits.grad_NV
        if grad_NV is None:
            return
        if self.source.inplace:  # type: ignore[union-attr]  # this block's rows have been read
            grad_NV[entries.numbers] = 0
        if grad_NV.shape[1]:
            at = entries.number_E, column_E.clamp(min=0)
            grad_NV.index_put_(at, self._each(entries, column_E, grad_P).to(grad_NV.dtype), accumulate=True)

    def _room(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if name not in self.made:
            self.made[name] = torch.zeros(shape, dtype=dtype, device=self.source.device)
        return self.made[name]

    def skip(self, rows: Tensor) -> None:
        if isinstance(self.source, Logits):
            self.logits.skip(rows)

    def grads(self) -> Grads:
        source, made = self.source, self.made
        if isinstance(source, Logits):
            return self.logits.grads()
        shapes = {"hidden": source.hidden, "weight": source.weight, "bias": source.bias}
        found = {}
        for (name, x), need in zip(shapes.items(), self.needs, strict=False):
            if need and x is not None and not (self.adds and name == "weight"):
                found[name] = made[name].view(x.shape) if name in made else torch.zeros_like(x)
        return Grads(**found)


class SupportSweep(Sweep):
    """A sweep over the kept columns of each row."""

    places: Places
    single_N: Tensor | None

    def keep(self, support: Support) -> Tensor | None:
        """Set which columns the rows keep.  Returns, for the rows that count, whether the target is not among them."""
        self.places = places_of(support, self.rows.given, getattr(self.backend, "find_places", None))
        matters = any(f.name in ("lse", "ids_logit") for f in self.want.facts)
        self.single_N = None if matters else self.places.single_N
        self.compared = {**self.compared, "support": (self.places.keys,)}
        missing_N = self.places.missing_N
        return missing_N if missing_N is None or self.rows.keep is None else missing_N[self.rows.keep]

    def _open(self) -> Any:
        if self.want.only_ids:
            return open_source(self.source)
        self.close()
        return SupportHead(self.source, self.single_N, self.backend)

    def restored(self, tensors: Mapping[str, Tensor]) -> Sweep:
        other = super().restored(tensors)
        assert isinstance(other, SupportSweep)
        other.places, other.single_N = self.places, self.single_N
        return other

    def open_head(self, needs: tuple[bool, ...], chunks: Sequence[Chunk]) -> Any:
        head = super().open_head(needs, chunks)
        head.blocks = len(chunks)
        if self.weight_grad is not None and isinstance(head, SupportHead) and needs[1:2] == (True,):
            head.made["weight"], head.begun, head.adds, self.weight_grad = self.weight_grad, True, True, None
        return head

    def _blocks(self, head: Any) -> Iterator[Block]:
        dense = sum(isinstance(g, DenseTeacherRows) for g in self.teacher_rows.values())
        parts = support_chunks(self.places.known, self.rows, self.source, dense)
        head.blocks = len(parts)
        for part in parts:
            yield self._read(head, Chunk(part))

    def _read(self, head: Any, chunk: Chunk, slot: int = 0) -> Block:
        entries = self.places.entries(self.rows.keep, chunk.rows)
        return Block(chunk, entries, head.read(entries), self._teachers_of(chunk.rows, entries))

    def launch(self, head: Any, chunk: Chunk, arguments: Any, grad: bool) -> Any:
        block, part = self._read(head, chunk), chunk.rows
        ignored = self.rows.skipped or self.rows.valid is not None
        visited = self.backend.visit(
            block.raw_CV, self.marked_targets(part), self.want, self._temperatures(part), self.program, arguments,
            block.raw_CV if grad else None, start=0, vocab=self.source.vocab, ignore=ignored,
        )  # fmt: skip
        if grad:
            head.write(block.numbers, block.raw_CV, None)
        return visited

    def marked_targets(self, part: slice) -> Tensor | None:
        """The places of the targets; -1 where another rank has the column, -100 where the row is ignored."""
        places, shard = self.places, self.source.shard
        if places.marked_N is None or places.target_N is None:
            return None
        marked = self._of(places.marked_N, part)
        if shard is None:
            return marked
        target = self._of(places.target_N, part)
        elsewhere = (target < shard.start) | (target >= shard.start + self.source.columns)
        return marked.masked_fill(elsewhere & (marked != IGNORE), -1)

    def _targets(self, part: slice) -> Tensor | None:
        marked = self.marked_targets(part)
        return None if marked is None else marked.clamp(min=-1)

    def _teachers_of(self, part: slice, entries: Entries) -> tuple[TeacherChunk, ...]:
        found: list[TeacherChunk] = []
        for name, teacher in self.teacher_rows.items():
            if isinstance(teacher, SparseTeacherRows):
                numbers = self._of(torch.arange(self.rows.total, device=self.source.device), part)
                found.append(SparseChunk(self.places.find(numbers, teacher.ids_RK[part])))
                continue
            assert isinstance(teacher, DenseTeacherRows)
            raw_CW = SupportHead(teacher.teacher, self.single_N, self.backend).read(entries).to(self.source.fact_dtype)
            temperatures = tuple(teacher.own(key, part) for key in self.want.temperatures_of(name))
            found.append(DenseChunk(raw_CW, 1.0, None, temperatures, entries.width))
        return tuple(found)

    def _of(self, x_N: Tensor, part: slice) -> Tensor:
        """Rows `part` of a vector over all rows."""
        return x_N[self.rows.numbers(part)]

    @property
    def _start(self) -> int:
        return 0

    def _transform(self) -> dict[str, Any]:
        return {}  # the head has applied it

    def _vocab(self, part: slice) -> Any:
        return self._of(self.places.lengths_N, part).clamp(min=1).to(self.source.fact_dtype)

    def _sums(self, block: Block) -> Partial:
        partial, entries = super()._sums(block), block.numbers
        if self.want.total:
            partial = self._with_total(partial, block)
        wants_teacher_argmax = any(isinstance(t, DensePartial) and t.argmax is not None for t in partial.teachers)
        if partial.argmax is None and not wants_teacher_argmax:
            return partial
        id_CW = entries.spread(entries.id_E, 0)
        named = lambda at: None if at is None else id_CW.gather(1, at.long()[:, None])[:, 0].to(at.dtype)
        teachers = tuple(
            t._replace(argmax=named(t.argmax)) if isinstance(t, DensePartial) else t for t in partial.teachers
        )
        return partial._replace(argmax=named(partial.argmax), teachers=teachers)

    def _with_total(self, partial: Partial, block: Block) -> Partial:
        """The sum over kept columns only: a sum over the whole block would include its -inf padding."""
        entries, source = block.numbers, self.source
        start = 0 if source.shard is None else source.shard.start
        here_E = (entries.id_E >= start) & (entries.id_E < start + source.columns)
        here_CW = entries.spread(here_E.to(torch.uint8), 0).bool()
        max_C = partial.max.masked_fill(partial.max == -math.inf, 0.0)
        total = (block.raw_CV - max_C[:, None]).masked_fill(~here_CW, 0.0).sum(-1)
        return partial._replace(total=total, columns=here_CW.sum(-1).to(total.dtype))
