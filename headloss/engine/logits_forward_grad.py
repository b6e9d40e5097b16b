"""Visits of all rows at once; and gradients of `Logits` made in the forward pass, on a backend that keeps part of the
first sweep for the second.

Dimension key:  R rows that count   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.engine.arguments import Chunk
from headloss.engine.heads import GATHER_BYTES
from headloss.engine.plan import Plan
from headloss.engine.sweeps import Cotangents, Sweep
from headloss.engine.teachers import TeacherRows, most_rows
from headloss.facts import Fact, Softmax
from headloss.record import Grads
from headloss.rows import Rows
from headloss.sources import Logits, Source


def makes_grad_in_forward(plan: Plan, source: Source) -> bool:
    """Whether the gradient of these logits is made in the forward pass.

    Not for float16, whose gradient must be written at the caller's scale; nor for bfloat16 in place, since a gradient
    that would be rounded twice is made again from the logits, which must still be there.
    """
    if type(source) is not Logits or source.shard is not None or plan.want.only_ids or plan.kept:
        return False
    dtype, keeps = source.logits.dtype, getattr(plan.backend, "keep", None) is not None
    rounds = dtype == torch.float16 or (dtype == torch.bfloat16 and source.inplace)
    return keeps and source.device.type == "cpu" and not rounds


def logits_chunks(
    plan: Plan, source: Source, rows: Rows, teacher_rows: Mapping[str, TeacherRows]
) -> list[Chunk] | None:
    """Runs of rows that fit into a buffer, if one is needed; None: all rows at once, or in two passes."""
    made, short = most_rows(teacher_rows) if teacher_rows else None, source.fact_dtype != source.tensors[0].dtype
    if plan.kind != "row" or not (rows.keep is not None or short or made is not None):
        return None
    step = max(1, min(GATHER_BYTES, plan.backend.BUFFER_BYTES) // max(1, source.columns * source.fact_dtype.itemsize))
    step = step if made is None else max(1, min(step, made))
    return [Chunk(slice(i, min(i + step, rows.count))) for i in range(0, rows.count, step)] or None


def reads_all_rows(source: Source, rows: Rows, teacher_rows: Mapping[str, TeacherRows]) -> bool:
    """Whether all rows can be read at once, in the caller's own tensors."""
    whole = rows.count > 0 and rows.keep is None and most_rows(teacher_rows) is None
    return whole and source.fact_dtype == source.tensors[0].dtype


def fits_at_once(source: Source, rows: int = 0, most: int = 0) -> bool:
    """Whether `rows` rows of a source can be visited at once, if a chunk may have `most`.

    Not for float16, whose gradient needs its scale before the loss is known, nor over a shard.
    """
    return rows <= most and source.shard is None and not source.is_fp16


def visit_all(
    sweep: Sweep,
    chunks: Sequence[Chunk],
    settle: Callable[[Mapping[Fact, Tensor]], tuple[Tensor, Cotangents]],
    needs: tuple[bool, ...],
) -> tuple[Tensor, dict[Fact, Tensor], Softmax, Mapping[Fact, Tensor], Mapping[str, Tensor], Grads]:
    """Facts of all rows, the loss and the gradient, in one visit."""
    head: Any = sweep.open_head(needs, chunks)
    facts, softmax, block = sweep.read_all(head)
    value, (by_fact, by_input) = settle(facts)
    sweep.write(head, block, softmax, facts, by_fact)
    return value, facts, softmax, by_fact, by_input, sweep.grads(head)
