"""Calls whose only fact is `ids_logit`: some logits of each row and their gradient, without softmax or full GEMM.

Dimension key:  R rows that count   K ids per row
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from headloss.engine.heads import Head, open_source
from headloss.engine.teachers import SparseTeacherRows, TeacherRows
from headloss.facts import Fact, Want
from headloss.parallel.shard import max_over
from headloss.rows import Rows
from headloss.sources import Source
from headloss.teachers import Temperature, column


def ids_facts(
    source: Source,
    rows: Rows,
    want: Want,
    teacher_rows: Mapping[str, TeacherRows],
    temperatures: list[Temperature],
    said: Tensor | None,
) -> dict[Fact, Tensor]:
    """The facts `ids_logit`: some logits of each row, without a softmax and without the full GEMM."""
    head = open_source(source)
    facts: dict[Fact, Tensor] = {}
    for name, teacher in teacher_rows.items():
        assert isinstance(teacher, SparseTeacherRows)
        column_RK, here_RK = teacher.places(source)
        raw_RK = head.gather(rows.numbers(slice(0, rows.count)), column_RK).to(source.fact_dtype)
        z_RK = raw_RK if source.scale == 1.0 else raw_RK * source.scale
        if source.softcap is not None:
            z_RK = (z_RK / source.softcap).tanh() * source.softcap
        z_RK = max_over(z_RK.masked_fill(~here_RK, -math.inf), source.shard, said, rows.total)
        said = None  # ranks exchange the note once
        z_RK = z_RK if rows.valid is None else z_RK.masked_fill(~rows.valid[:, None], 0.0)  # ignored rows
        for T, key in zip(temperatures, want.temperatures, strict=True):
            if want.at(key, "ids_logit", name):
                plain = type(T) is float and T == 1.0
                facts[Fact("ids_logit", key, name)] = z_RK if plain else z_RK / column(T)
    return facts


def ids_pull(
    head: Head,
    rows: Rows,
    teacher_rows: Mapping[str, TeacherRows],
    facts: Mapping[Fact, Tensor],
    grads: Mapping[Fact, Tensor],
    temperatures: Mapping[float | None, Temperature],
) -> None:
    """Write the gradient of `ids_logit`: at the ids, and nowhere else."""
    source, columns, totals = head.source, [], []
    for name, teacher in teacher_rows.items():
        assert isinstance(teacher, SparseTeacherRows)
        column_RK, here_RK = teacher.places(source)
        pulled = []
        for fact, g_RK in grads.items():
            if fact.teacher == name:
                T = column(temperatures[fact.temperature])
                slope = source.scale / T
                if source.softcap is not None:
                    slope = slope * (1 - (facts[fact] * T / source.softcap) ** 2)
                pulled.append(g_RK * slope)
        total_RK = functools.reduce(Tensor.add_, pulled) if pulled else torch.zeros_like(teacher.logprob_RK)
        columns.append(column_RK)
        totals.append(total_RK.masked_fill_(~here_RK, 0.0))
    ignored_R1 = None if rows.valid is None else ~rows.valid[:, None]
    column_RM, total_RM = (xs[0] if len(xs) == 1 else torch.cat(xs, -1) for xs in (columns, totals))
    head.scatter(rows.numbers(slice(0, rows.count)), column_RM, total_RM, ignored_R1)
