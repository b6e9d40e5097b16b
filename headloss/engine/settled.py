"""A call whose rows meet in segments, on a backend that settles them in one launch between its two sweeps.

Dimension key:  R rows that count   C rows of a chunk   S segments

    read     sums over the vocabulary, chunk by chunk
    settle   facts, losses, their sums and the coefficients of the gradient: one launch, a program for each segment
    write    the gradient, while the chunk is there; without chunks, in a sweep of its own
"""

from __future__ import annotations

from typing import Any

import torch

from headloss.engine.loss import TermsOnRows
from headloss.engine.one_launch import Launched, Weighed, by_length
from headloss.engine.product import ProductSweep
from headloss.engine.sweeps import Chunk, Sweep
from headloss.facts import Pull


def settle_between(sweep: ProductSweep, loss: TermsOnRows, needs: tuple[bool, ...]) -> Launched:
    """All rows at once, between the head's own products."""
    everything, grad = slice(0, sweep.rows.count), True in needs
    weighed = Weighed(loss, sweep.backend, by_segment=True)
    settling = _open(sweep, loss, weighed, grad, loss.plan.settles)
    head = sweep.open_head(needs, [Chunk(everything)])
    read = head.sums(sweep, everything, store=grad)
    rows_FC, grads = settling.settle(read.sums), None
    if grad:
        (there,) = loss.plan.settles.there
        slots = iter(rows_FC[2:])  # after the maximum and the log_sum
        grads = sweep.gradients(head, read, Pull(*(next(slots) if x else None for x in there)))
    return Launched(weighed.report(settling.settled), settling.settled, grads, weighed.normaliser)


def facts_between(sweep: ProductSweep) -> Launched:
    """The facts of all rows, by a program without terms; no gradient."""
    backend, rows, everything = sweep.backend, sweep.rows, slice(0, sweep.rows.count)
    settling = backend.Settling(
        sweep.program, None, backend.Weights({}, {}, {}, {}),
        sweep.marked_targets(everything), rows.count, sweep._temperatures(everything),
        vocab=sweep.source.vocab, device=sweep.source.device, ignore=rows.skipped or rows.valid is not None,
        gradient=False,
    )  # fmt: skip
    settling.settle(sweep.sums())
    return Launched(None, settling.settled, None, None)


def settle(sweep: Sweep, loss: TermsOnRows, needs: tuple[bool, ...]) -> Launched:
    """As `one_launch.launch`; without chunks, all rows are settled at once and no gradient is made."""
    grad = True in needs and bool(loss.chunks)
    weighed = Weighed(loss, sweep.backend, by_segment=True)
    settling = _open(sweep, loss, weighed, grad, sweep.program)
    if loss.chunks:
        head = sweep.open_head(needs, loss.chunks)
        for chunk in loss.chunks:
            _visit(sweep, head, chunk, settling, grad)
        return Launched(
            weighed.report(settling.settled), settling.settled, sweep.grads(head) if grad else None, weighed.normaliser
        )
    head = sweep._open()
    settling.settle(torch.cat([_sums(sweep, block) for block in sweep._blocks(head)], 1))
    return Launched(weighed.report(settling.settled), settling.settled, None, None)


def _open(sweep: Sweep, loss: TermsOnRows, weighed: Weighed, grad: bool, program: Any) -> Any:
    backend, rows, everything = sweep.backend, sweep.rows, slice(0, sweep.rows.count)
    segments, stats = rows.segments, rows.stats
    ignore = rows.skipped or rows.valid is not None
    rising = stats is not None and not stats.loose and rows.by_segment
    means = {t.name: by_length(t) for t in loss.terms}
    spans = None
    if segments is not None:
        assert segments.group is None
        spans = backend.spans(segments.ids, segments.num_segments, rising, whole=not ignore)
    return backend.Settling(
        program,
        spans,
        backend.Weights(loss.raw_inputs(everything), weighed.bases, means, weighed.factors),
        sweep.marked_targets(everything), rows.count, sweep._temperatures(everything),
        vocab=sweep.source.vocab, device=sweep.source.device, ignore=ignore, gradient=grad,
    )  # fmt: skip


def _visit(sweep: Sweep, head: Any, chunk: Any, settling: Any, grad: bool) -> None:
    part = chunk.rows
    block = sweep._read(head, chunk)
    rows_FC = settling.settle(_sums(sweep, block), part.start, chunk.segments)
    if not grad:
        return
    out_CV, program = head.grad_buffer(block.numbers, block.raw_CV), sweep.program
    used = [i for i, there in enumerate(program.there) if any(there)]
    temperatures = sweep._temperatures(part)
    sweep.backend.pull_rows(
        block.raw_CV, sweep.marked_targets(part), rows_FC, [program.there[i] for i in used],
        [temperatures[i] for i in used], out_CV, start=sweep._start, **sweep._transform(),
    )  # fmt: skip
    ignored_C1 = None if sweep.rows.valid is None else ~sweep.rows.valid[part, None]
    head.write(block.numbers, out_CV, ignored_C1)


def _sums(sweep: Sweep, block: Any) -> Any:
    part = block.part
    return sweep.backend.sums_matrix(
        block.raw_CV, sweep.marked_targets(part), sweep.want, sweep._temperatures(part),
        start=sweep._start, **sweep._transform(),
    )  # fmt: skip
