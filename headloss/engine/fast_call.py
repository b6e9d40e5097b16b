"""A call on a fast path, which is one launch over all its logits, and what it keeps for its backward."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headloss.engine.arguments import CallArguments
from headloss.engine.autograd_contract import save_tensors
from headloss.engine.bind import reads_now
from headloss.engine.checks import check_count, check_ids
from headloss.engine.fast_path import SPARSE_INPUTS, FastPath
from headloss.engine.one_launch import Launched, measured, with_segments
from headloss.engine.sweeps import Sweep
from headloss.engine.teachers import DenseTeacherRows, SparseTeacherRows, merges, teacher_label
from headloss.prepared import Prepared, Stats, check_stats
from headloss.record import Grads
from headloss.reductions import reciprocal, shared_weight
from headloss.rows import IGNORE, Rows, count_rows
from headloss.segments import Segments
from headloss.sources import Sparse, with_tensors
from headloss.teachers import SparseChunk
from headloss.term import check_weight
from headloss.trace.gradient import check_gradient
from headloss.trace.signature import UNNAMED

SPARSE_IDS, SPARSE_LOGPROB = SPARSE_INPUTS


class FastCall(Launched):
    """One call on a fast path: its targets, what the host knows about them and, once it ran, its result."""

    sums: Tensor  # of the terms
    normaliser = None
    mean: Any  # the weight of a row, or a tuple with one for each term
    skipped: bool  # whether some rows may not count
    source: Any
    inputs: Any
    teacher: Any
    targets: Any = None  # Tensor or None
    segments: Segments | None = None
    valid: Tensor | None = None
    stats: Stats | None = None
    spans: Any = None
    dense: tuple[Any, ...] = ()  # dense teachers
    sparse_rows: SparseTeacherRows | None = None
    # `shared_weight` reads these and `stats` as it would from `Rows`
    num_items = one_token = None
    tokens = property(lambda self: self.stats.valid)
    want = property(lambda self: self.path.want)

    def __init__(self, path: FastPath, arguments: CallArguments) -> None:
        source, targets, segments, teacher, (num_items, _, weights, scale, host_read), inputs, _ = arguments
        self.path, self.backend, self.source, self.inputs = path, path.backend, source, inputs
        self.weights: tuple[Any, ...] = path.weights
        if weights:
            self.weights = tuple([weights.get(name, w) for name, w in zip(path.plan.weights, path.weights)])
        self.factors = self.weights
        if num_items is not None:
            check_count("num_items", num_items)
        if scale != 1.0:
            check_weight("grad_scale", scale)
            self.factors = tuple([w * scale for w in self.weights])
        if type(targets) is Prepared:
            self.stats = stats = targets.known()
            self.targets, segments, valid = targets.targets, targets.segments, stats.valid
            if segments is not None:
                self.segments = segments
                check_stats(stats, source.vocab, segments.num_segments, path.plan.needed)
            elif valid and not 0 <= stats.low <= stats.high < source.vocab:
                check_stats(stats, source.vocab)
            self.skipped = valid < path.count
            if path.shares:
                self.mean = self._shared(num_items, None)
            else:
                self.mean = reciprocal(valid if num_items is None else num_items)
        elif targets is None:
            self.skipped = False
            self.mean = reciprocal(path.count if num_items is None else num_items)
        else:
            assert isinstance(targets, Tensor)
            self.targets, flat = targets, targets if targets.ndim == 1 else targets.reshape(-1)
            host_read = reads_now(host_read, targets.device, path.plan.read_because)
            self.segments, ids = segments, None
            if segments is not None:
                ids = segments.ids if segments.ids.ndim == 1 else segments.ids.reshape(-1)
            self.stats, counted = count_rows(
                flat, source.vocab, host_read, path.backend.count_targets, segments, ids, path.plan.needed
            )
            if self.stats is None:
                self.mean, self.valid, self.skipped = counted.one_token, counted.valid_N, True
            else:
                self.mean, self.skipped = reciprocal(self.stats.valid), self.stats.valid < path.count
            if path.shares:
                assert segments is not None
                self.one_token = self.mean
                self.spans = spans = path.backend.spans(counted.ids_N, segments.num_segments)
                self.mean = self._shared(num_items, spans.present() if path.by_present else None)
            elif num_items is not None:
                self.mean = reciprocal(num_items)
        self.teacher = teacher
        if not teacher:
            return
        if path.dense:
            several: Any = teacher
            self.dense = tuple([several[n] for n in path.dense]) if isinstance(teacher, Mapping) else (several,)
            return
        checked: tuple[Tensor | None, int] = None, 0
        if type(teacher) is Sparse:
            checked = check_ids("teacher", teacher, source, merges(path.backend, teacher.ids))
        else:  # by name, if the call was just planned
            self.teacher = arguments.teachers[UNNAMED]
        of = Rows(path.shape, self.targets, None, self.valid, None, self.stats, self.skipped)
        self.sparse_rows = SparseTeacherRows(self.teacher, of, path.plan.dtype, path.backend, checked)
        self.sparse_rows.strip()

    def _shared(self, num_items: Any, present: Tensor | None) -> tuple[Any, ...]:
        """For each term of a call with segments, the factor that the weights of all its rows or segments share.

        `present`: how many segments have rows, if only the device knows.
        """
        counts: Any = self
        how = {"num_items": num_items, "num_segments": present}
        return tuple([shared_weight(r, kind, counts, norm=n, **how) for r, kind, n in self.path.shares])

    def run(self) -> tuple[Tensor, Grads]:
        """The loss, and the gradients that are needed."""
        path, source, inputs, targets = self.path, self.source, self.inputs, self.targets
        plan, grad, head = path.plan, path.grad, path.head
        if not plan.has_gradient and (grad or torch.is_grad_enabled()):
            check_gradient(plan.terms, grad)
        begun = 0.0 if "compiling" in plan.times else time.perf_counter()
        sparse_rows, out = self.sparse_rows, None
        if sparse_rows is None:
            named = zip(path.dense, self.dense)
            teachers = tuple([path.heads[n].read(z) if n in path.heads else z.logits for n, z in named])
        else:
            teachers = (SparseChunk(sparse_rows.ids_RK, sparse_rows.sorted_RK),)
            inputs = {**inputs, SPARSE_IDS: sparse_rows.ids_RK, SPARSE_LOGPROB: sparse_rows.logprob_RK}
        given = tuple(map(inputs.__getitem__, path.taken)) if path.taken else ()
        if head is None:
            x = source.logits
            out = out_NV = torch.empty_like(x, memory_format=torch.contiguous_format) if grad else None
        else:
            x = head.read(source)
            out_NV = x if grad else None
        if not path.flat:
            targets = None if targets is None else targets.reshape(-1)
            named = zip(path.taken, given)
            given = tuple([v if v.ndim < 2 or n in SPARSE_INPUTS else v.reshape(-1) for n, v in named])
            if head is None:
                x = x.reshape(path.count, -1)
                out_NV = None if out is None else out.view(x.shape)
            if sparse_rows is None:
                teachers = tuple([z.reshape(path.count, -1) for z in teachers])
        more = (self.spans or self._spans(targets),) if path.shares else ()
        mean = tuple([self.mean if m else 1.0 for m in path.means]) if path.each_mean else self.mean
        self.visited, self.sums, loss = path.visits(
            x, targets, given, mean, self.factors, self.weights, out_NV, self.skipped, teachers, *more
        )
        if begun:
            plan.times["compiling"] = time.perf_counter() - begun
        return loss, Grads(out) if head is None or not grad else head.write(source, x, path.needs)

    def _spans(self, targets: Tensor) -> Any:
        """Where the rows of each segment are."""
        segments, stats, skipped = self.segments, self.stats, self.skipped
        assert segments is not None and stats is not None
        ids = segments.ids
        ids = ids if ids.ndim == 1 else ids.reshape(-1)
        ids = ids.masked_fill(targets == IGNORE, -1) if skipped else ids
        rising = stats.sorted and not stats.unassigned
        return self.path.backend.spans(ids, segments.num_segments, rising, whole=not skipped)

    def forward(self, ctx: Any, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the call under autograd; see `run.HeadFunction`."""
        path, teacher, held = self.path, self.teacher, [*tensors]
        loss, grads = self.run()
        if self.targets is not None:
            held.append(self.targets)
        if self.sparse_rows is not None:
            held += (teacher.ids, teacher.logprobs)
        for dense in self.dense:
            held += dense.tensors
        if path.used:
            held += map(self.inputs.__getitem__, path.used)
        if self.segments is not None:
            held.append(self.segments.ids)
        save_tensors(ctx, path.names, held, len(tensors), path.read, True)
        ctx.grads, ctx.kept = grads, (self, path.needs, self, None, False, ())
        return loss, *map(Tensor.detach, self.visited.blocks)

    def metrics(self) -> dict[str, Any]:
        """The call's metrics.  We note now which rows count, since the targets may be written to later."""
        plan = self.path.plan
        found: dict[str, Any] = {}
        if plan.program.metrics:
            if self.valid is None and self.skipped:
                self.valid = self.targets.reshape(-1) != IGNORE
            found = measured(self.visited, self.valid)
        return with_segments(found, self.visited, plan.terms) if self.path.shares else found

    def strip(self) -> None:
        """Drop what only the forward needs: the backward gets the caller's tensors from autograd."""
        self.source = self.inputs = self.targets = self.segments = self.teacher = self.valid = self.spans = None
        self.dense = ()

    def restored(self, tensors: Mapping[str, Tensor]) -> Sweep:
        """The call as a sweep, for a gradient through a fact or for a second backward."""
        path = self.path
        rows = Rows(path.shape, tensors.get("targets"), None, None, None, self.stats, self.skipped)
        source = with_tensors(path.bare, {n: x for n, x in tensors.items() if hasattr(path.bare, n)})
        teacher_rows: dict[str, Any] = {} if self.sparse_rows is None else {UNNAMED: self.sparse_rows}
        for name, bare in path.dense.items():
            label = f"{teacher_label(name)}."
            own = {n.removeprefix(label): x for n, x in tensors.items() if n.startswith(label)}
            teacher_rows[name] = DenseTeacherRows(with_tensors(bare, own), source, rows)
        return Sweep(source, rows, path.want, path.backend, teacher_rows, path.plan.program)
