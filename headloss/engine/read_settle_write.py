"""Calls whose losses run in one launch between two sweeps: rows are combined in segments, or ranks share a vocabulary.

Dimension key:  R rows that count   C rows of a chunk   S segments

    read     sums over the vocabulary, chunk by chunk
    settle   merge ranks, find facts, losses, their sums and the coefficients of the gradient: one launch, with a
             program for each segment or, if no rows are combined, for each run of rows
    write    the gradient, while the chunk's logits exist; without chunks, in a sweep of its own
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.engine.arguments import Block, Chunk
from headloss.engine.heads import scale_grads
from headloss.engine.loss import TermsOnRows
from headloss.engine.one_launch import Launched, Weighed, by_length
from headloss.engine.product import ProductSweep
from headloss.engine.sweeps import Sweep
from headloss.facts import Partial, Pull, Softmax
from headloss.nested import cut, join
from headloss.parallel.shard import Gathering, sum_pairs


def settle_between(sweep: ProductSweep, loss: TermsOnRows, needs: tuple[bool, ...]) -> Launched:
    """Settle a call between the head's own products: all rows at once or, beyond the budget, chunk by chunk.

    Without a gradient or without chunks, the sums of all rows are settled together and no gradient is made.
    """
    everything, program = [Chunk(slice(0, sweep.rows.count))], loss.plan.settles
    chunks = (everything if sweep.at_once else loss.chunks) if True in needs else None
    weighed, grads = _weighed(sweep, loss, bool(chunks)), None
    settling: Any = None
    if chunks:
        head, (present,) = sweep.open_head(needs, chunks), program.present
        for i, chunk in enumerate(chunks):
            read = head.sums(sweep, chunk.rows, store=True)
            if settling is None:  # prepared while the device multiplies
                settling = _open(sweep, weighed, True, program, chunks)
            rows_FC = settling.settle(sweep.sums_of([read], chunk.rows, i), chunk.rows.start, chunk.segments)
            slots = iter(rows_FC[2:])  # after the maximum and the log_sum
            pull = Pull(*(next(slots) if x else None for x in present))
            if sweep.at_once:
                grads = sweep.gradients(head, read, pull)
            else:
                head.pulled(sweep.rows.numbers(chunk.rows), read, pull)
        grads = grads if sweep.at_once else sweep.grads(head)
    else:
        sums = sweep.sums()
        settling = _open(sweep, weighed, False, program, everything)
        settling.settle(sums)
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
    """Like `one_launch.launch`, between two sweeps; without chunks, all rows are settled at once, without a gradient.

    So is a call without a gradient over a shard: its sums then take one collective.
    """
    shard, grad = sweep.source.shard, True in needs and bool(loss.chunks) and not loss.plan.waits
    chunks = loss.chunks if grad or shard is None else None
    weighed = _weighed(sweep, loss, grad)
    settling = _open(sweep, weighed, grad, sweep.program, chunks or ())
    if chunks:
        head, bound = sweep.open_head(needs, chunks), None
        for block, sums in _ahead(sweep, head, chunks):
            bound = _visit(sweep, head, block, settling, sums, grad, bound)
        grads = scale_grads(sweep.grads(head), bound, sweep.backend) if grad else None
        return Launched(weighed.report(settling.settled), settling.settled, grads, weighed.normaliser)
    head = sweep._open()
    if sweep.teacher_rows:
        partial = sweep.partial(sweep._blocks(head))
        sums = _packed(sweep, partial, lambda: sweep._blocks(head), slice(0, sweep.rows.count))
    else:
        sums = torch.cat([_sums(sweep, block) for block in sweep._blocks(head)], 1)
        if shard is not None:
            sums = Gathering(sums, shard, sweep._note(), sweep.rows.total).gathered()
    settling.settle(sums)
    return Launched(weighed.report(settling.settled), settling.settled, None, weighed.normaliser)


def _weighed(sweep: Sweep, loss: TermsOnRows, grad: bool) -> Weighed:
    return Weighed(loss, sweep.backend, by_segment=loss.plan.kind == "segment", grad=grad)


def _open(sweep: Sweep, weighed: Weighed, grad: bool, program: Any, chunks: Sequence[Chunk]) -> Any:
    backend, rows, everything, loss = sweep.backend, sweep.rows, slice(0, sweep.rows.count), weighed.loss
    segments, stats, shard = rows.segments, rows.stats, sweep.source.shard
    ignore = rows.skipped or rows.valid is not None
    rising = stats is not None and not stats.unassigned and rows.by_segment
    means = {t.name: weighed.by_segment and by_length(t) for t in loss.terms}
    spans = None
    if segments is not None and weighed.by_segment:
        assert segments.group is None
        spans = backend.spans(segments.ids, segments.num_segments, rising, whole=not ignore)
    return backend.Settling(
        program, spans,
        backend.Weights(loss.raw_inputs(everything), weighed.bases, means, weighed.factors),
        sweep.marked_targets(everything), rows.count, sweep._temperatures(everything),
        vocab=sweep.source.vocab, device=sweep.source.device, ignore=ignore, gradient=grad,
        parts=[chunk.rows.stop - chunk.rows.start for chunk in chunks],
        ranks=1 if shard is None or sweep.teacher_rows or type(sweep) is ProductSweep else shard.size,
    )  # fmt: skip


def _ahead(sweep: Sweep, head: Any, chunks: Sequence[Chunk]) -> Iterator[tuple[Block, Tensor]]:
    """Each chunk and its sums; over a shard, those of all ranks."""
    if sweep.teacher_rows:  # with a teacher, ranks are merged first
        for block, partial in sweep._ahead(head, chunks):
            yield block, _packed(sweep, partial, functools.partial(iter, [block]), block.part)
    elif sweep.source.shard is None:
        for chunk in chunks:
            block = sweep._read(head, chunk)
            yield block, _sums(sweep, block)
    else:
        for block, gathering in sweep.gathered(head, chunks, functools.partial(_sums, sweep)):
            yield block, gathering.gathered()


def _packed(sweep: Sweep, partial: Partial, blocks: Callable[[], Iterable[Block]], part: slice) -> Tensor:
    """The sums of these rows and of their teachers, with those of divergences, which read the blocks again."""
    within = lambda block: slice(block.part.start - part.start, block.part.stop - part.start)

    def divergence_pass(softmax: Softmax) -> Sequence[tuple[Tensor, Any]]:
        divergences = join(*[sweep._divergence_pass(block, cut(softmax, within(block))) for block in blocks()])
        return sum_pairs(divergences, sweep.source.shard)

    return sweep.backend.packed(partial, sweep.want, sweep._temperatures(part), sweep.source.vocab, divergence_pass)


def _visit(
    sweep: Sweep, head: Any, block: Block, settling: Any, sums: Tensor, grad: bool, bound: Tensor | None
) -> Tensor | None:
    """Settle a chunk and write its gradient; `bound`: the divisor of the gradients before it, returned updated."""
    part = block.part
    rows_FC = settling.settle(sums, part.start, block.chunk.segments)
    if not grad:
        return None
    out_CV, program = head.grad_buffer(block.numbers, block.raw_CV), sweep.program
    used = [i for i, present in enumerate(program.present) if any(present)]
    if sweep.source.is_fp16 and settling.spans is not None:
        bound = sweep.bounded(head, {f: x[part] for f, x in settling.settled.cotangents.items()}, bound)
        first = 2  # after the maximum and the first log_sum
        for i in used:
            last = first + sum(program.present[i])
            rows_FC[first:last] /= bound
            first = last + 1
        rows_FC[first - 1 :] /= bound  # the teachers' coefficients
    more: dict[str, Any] = {"start": sweep._start, **sweep._transform()}
    softmax = cut(settling.settled.softmax, part) if sweep.teacher_rows else None
    if sweep.teacher_rows:
        more["teachers"] = block.teachers
        more["teacher_temperatures"] = [[T for T, _ in pairs] for pairs in sweep._paired(part)]
    targets, temperatures = sweep.marked_targets(part), sweep._temperatures(part)
    sweep.backend.pull_settled(program, softmax, rows_FC, block.raw_CV, targets, temperatures, out_CV, **more)
    sweep.pass_gradient(head, block.chunk, block.numbers, out_CV)
    return bound


def _sums(sweep: Sweep, block: Block) -> Tensor:
    part = block.part
    found: Tensor = sweep.backend.sums_matrix(
        block.raw_CV, sweep.marked_targets(part), sweep.want, sweep._temperatures(part),
        start=sweep._start, **sweep._transform(),
    )  # fmt: skip
    return found
