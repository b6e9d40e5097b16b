"""What a call would do, in words and numbers, before it does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from headloss.rows import Rows
from headloss.sources import Linear, parse_bytes
from headloss.sweeps import Chunk

if TYPE_CHECKING:
    from headloss.objective import _Plan


class TermPlan(NamedTuple):
    name: str
    loss: str
    kind: str  # "row", "segment" or "batch"
    reason: str  # the operation that decided it
    frozen: tuple[str, ...]  # options the trace had to take as constants


class Explanation(NamedTuple):
    """The plan of a call.  `print` it."""

    source: str
    backend: str
    facts: tuple[str, ...]
    terms: tuple[TermPlan, ...]
    off: tuple[str, ...]
    grade: str
    rows: int
    rows_total: int
    vocab: int
    chunks: int
    forward_sweeps: int  # over the vocabulary, without grad mode
    sweeps: int  # forward and backward
    gemms: int  # forward and backward; 1 without grad mode
    host_reads: int
    collectives: int
    bytes: dict[str, int]  # by purpose

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {self.rows} of {self.rows_total} rows x {self.vocab} columns, backend {self.backend}",
            f"facts        {', '.join(self.facts) or 'none'}",
        ]
        for t in self.terms:
            frozen = f"; specialised on {', '.join(t.frozen)}" if t.frozen else ""
            lines.append(f"term         {t.name} ({t.loss}): {t.kind}, {t.reason}{frozen}")
        for name in self.off:
            lines.append(f"term         {name}: switched off, costs nothing")
        lines.append(f"grade        {self.grade}")
        gemms = f", {self.gemms} GEMMs over {self.chunks} chunks (1 without grad)" if self.gemms else ""
        lines.append(
            f"work         {self.sweeps} sweeps over the vocabulary ({self.forward_sweeps} without grad){gemms}"
        )
        lines.append(f"host reads   {self.host_reads}")
        lines.append(f"collectives  {self.collectives}")
        lines += [f"bytes        {_size(n):>10}  {what}" for what, n in self.bytes.items()]
        return "\n".join(lines)


def explain(plan: _Plan, rows: Rows, chunks: Sequence[Chunk] | None, backend: str, host_read: bool) -> Explanation:
    source = plan.source
    linear = isinstance(source, Linear)
    terms = tuple(
        TermPlan(t.name, t.call.signature.name, t.trace.kind, t.trace.reason, t.trace.frozen) for t in plan.terms
    )
    small = rows.count * source.fact_dtype.itemsize * (2 * len(plan.want.facts) + 2)
    if isinstance(source, Linear):
        most = source.chunk_rows()
        pieces = len(chunks) if chunks else -(-rows.count // most)
        longest = (
            max((c.rows.stop - c.rows.start for c in chunks), default=0) if chunks else -(-rows.count // max(1, pieces))
        )
        sizes = {
            f"chunk of {longest} rows x {source.vocab} (budget {_size(parse_bytes(source.memory))})": longest
            * source.row_bytes,
            "gradient of hidden": source.hidden.numel() * source.gemm_dtype.itemsize,
            "weight gradient": _weight_grad(source, pieces),
            "gathered hidden rows": longest * source.hidden.shape[-1] * source.gemm_dtype.itemsize
            if rows.keep is not None
            else 0,
        }
        if chunks is not None:
            grade = "gradients in the same visit: each chunk's logits are made once"
            sweeps, gemms = 2, 3
        else:
            why = next((t for t in terms if t.kind == "batch"), None) or next(
                (t for t in terms if t.kind == "segment"), None
            )
            because = f"{why.name}: {why.reason}" if why and why.kind == "batch" else "a segment is longer than a chunk"
            if why and why.kind == "segment" and rows.stats is None:
                because = "segment lengths are not known to the host"
            grade = f"facts of all rows first, logits made again for the gradient ({because})"
            sweeps, gemms = 2, 4
    else:
        pieces = 1
        written = 0 if source.inplace else source.logits.numel() * source.logits.element_size()
        sizes = {"gradient of logits" + (" (in place)" if source.inplace else ""): written}
        grade = "read for the facts, then read and write for the gradient"
        sweeps, gemms = 2, 0
    sizes["facts, cotangents and coefficients"] = small
    reads = int(source.device.type not in ("cpu", "meta") and host_read and rows.targets is not None)
    return Explanation(
        source="Linear" if linear else "Logits",
        backend="torch" if backend == "auto" else backend,
        facts=tuple(map(str, plan.want.facts)),
        terms=terms,
        off=plan.off,
        grade=grade,
        rows=rows.count,
        rows_total=rows.total,
        vocab=source.vocab,
        chunks=pieces,
        forward_sweeps=1,
        sweeps=sweeps,
        gemms=gemms,
        host_reads=reads,
        collectives=0,
        bytes={what: n for what, n in sizes.items() if n},
    )


def _weight_grad(source: Linear, pieces: int) -> int:
    wide = source.weight_grad_dtype or torch.promote_types(source.gemm_dtype, torch.float32)
    narrow = pieces == 1 and source.weight_grad_dtype is None and not source.narrow
    return source.weight.numel() * (source.weight.dtype if narrow else wide).itemsize


def _size(n: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024  # type: ignore[assignment]
    return f"{n:.2f} GiB"
