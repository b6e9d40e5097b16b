"""The sweeps: read the vocabulary for facts, read it again to write the gradient, or do both in one visit.

Dimension key:  N rows   R rows that count   C rows of a chunk   V vocabulary

    facts   read each chunk's logits, keep the facts
    pull    read each chunk's logits again and write their gradient from the facts' cotangents
    visit   read a chunk once, get its facts, their cotangents and its gradient, go to the next: on `Linear` the logits
            are then made once, three GEMMs in all instead of four
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headloss.engine.arguments import Block, Chunk
from headloss.engine.heads import Deferred, beyond_fp16, on_source_device, open_source, part_of, scale_grads
from headloss.engine.ids_logit import ids_facts, ids_pull
from headloss.engine.teachers import TeacherRows, cost_of, most_rows, note, teacher_label
from headloss.facts import Fact, Partial, Softmax, Want, coefficients, finish, with_tails
from headloss.nested import cut, join
from headloss.parallel.shard import Gathering, gather_each, reduce_hidden, sum_pairs
from headloss.record import Grads
from headloss.rows import Rows
from headloss.sources import Source, with_tensors, without_tensors
from headloss.teachers import (
    DenseChunk,
    DenseSoftmax,
    SparseChunk,
    TeacherChunk,
    Temperature,
    TopChunk,
    teacher_coefficients,
)

Cotangents = tuple[Mapping[Fact, Tensor], Mapping[str, Tensor]]  # of the facts, and of inputs that require grad
NOT_COMPARED: Mapping[str, Sequence[Any]] = {"inputs": (), "support": (), "near": (0.0,) * 4}


class Sweep:
    """A source, its rows that count, the facts to find, the teachers, and the backend that reads and writes."""

    compared: Mapping[str, Sequence[Any]] = NOT_COMPARED  # what ranks that share a vocabulary compare
    terms = ""
    sums_slopes = False  # whether `divergence_pass` sums slopes even if the pull could
    weight_grad: Tensor | None = None  # see `evaluate`; only kept columns use it

    def __init__(
        self,
        source: Source,
        rows: Rows,
        want: Want,
        backend: ModuleType,
        teacher_rows: Mapping[str, TeacherRows] | None = None,
        program: Any = None,
    ) -> None:
        self.source, self.rows, self.want, self.backend, self.program = source, rows, want, backend, program
        self.teacher_rows = {name: teacher_rows[name] for name in want.teachers} if teacher_rows else {}
        T = self.temperature = source.temperature
        if isinstance(T, Tensor):
            T = T.detach().to(source.fact_dtype)
            T = rows.take(T) if T.ndim else T.expand(rows.count)
            self.temperature = T if rows.valid is None else T.masked_fill(~rows.valid, 1.0)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The caller's tensors that a pull reads again, by argument name, except `source.tensors`."""
        T, given = self.source.temperature, self.rows.given
        found = [] if given is None else [("targets", given)]
        if isinstance(T, Tensor):
            found.append(("temperature", T))
        for name, teacher in self.teacher_rows.items():
            found += [(f"{teacher_label(name)}.{field}", x) for field, x in teacher.tensors().items()]
        return found

    def strip(self) -> None:
        """Drop those tensors, which autograd has saved; `restored` puts them back."""
        self.source = without_tensors(self.source)
        self.rows.strip()
        self.temperature, self.compared = 1.0, NOT_COMPARED
        for teacher in self.teacher_rows.values():
            teacher.strip()

    def restored(self, tensors: Mapping[str, Tensor]) -> Sweep:
        """A stripped sweep with its tensors put back."""
        source = with_tensors(self.source, {n: x for n, x in tensors.items() if hasattr(self.source, n)})
        rows, teacher_rows = self.rows.with_targets(tensors.get("targets")), {}
        for name, teacher in self.teacher_rows.items():
            own = {n.rsplit(".", 1)[1]: x for n, x in tensors.items() if n.startswith(f"{teacher_label(name)}.")}
            teacher_rows[name] = teacher.restored(own, source, rows)
        return type(self)(source, rows, self.want, self.backend, teacher_rows)

    def facts(self) -> tuple[dict[Fact, Tensor], Softmax]:
        """All facts of all rows: over a shard, one collective, and one more if a divergence needs a second read."""
        if self.want.only_ids:
            temperatures = self._temperatures(self._all)
            found = ids_facts(self.source, self.rows, self.want, self.teacher_rows, temperatures, self._note())
            return found, NO_SOFTMAX
        head, shard = self._open(), self.source.shard
        if shard is None:
            return join(*[self._finish_block(self._sums(block), block) for block in self._blocks(head)])
        facts, softmax = self._finish(self.partial(self._blocks(head)), self._all)
        if not self.want.divergent:
            return facts, softmax
        divergences = [self._divergence_pass(block, cut(softmax, block.part)) for block in self._blocks(head)]
        return self._with_divergences(facts, softmax, join(*divergences))

    def partial(self, blocks: Iterator[Block]) -> Partial:
        """The partial of all rows; over a shard, after one collective."""
        partial, shard = join(*(self._sums(block) for block in blocks)), self.source.shard
        sent = None if shard is None else Gathering(partial, shard, self._note(), self.rows.total)
        return partial if sent is None else self._merged(sent, self._all)

    def close(self) -> None:
        """Free the teachers' buffers between passes."""
        for teacher in self.teacher_rows.values():
            teacher.close()

    @on_source_device
    def pull(
        self, facts: Mapping[Fact, Tensor], softmax: Softmax, grads: Mapping[Fact, Tensor], needs: tuple[bool, ...]
    ) -> Grads:
        head = self._open()
        head.wants_grad(needs)
        grads, normaliser = self._masked(grads, self._all), None
        if self.source.is_fp16 and grads:  # 1 / number of tokens underflows in fp16: write order 1, rescale in float32
            normaliser = torch.stack([g.abs().amax() if g.numel() else g.sum() for g in grads.values()]).amax()
            normaliser = normaliser.masked_fill(normaliser == 0, 1.0)
            grads = {f: g / normaliser for f, g in grads.items()}
        if self.want.only_ids:
            temperatures = dict(zip(self.want.temperatures, self._temperatures(self._all), strict=True))
            ids_pull(head, self.rows, self.teacher_rows, facts, grads, temperatures)
        else:
            for block in self._blocks(head):
                at = {f: x[block.part] for f, x in facts.items()}, {f: g[block.part] for f, g in grads.items()}
                self.write(head, block, cut(softmax, block.part), *at)
        return scale_grads(self.grads(head), normaliser, self.backend)

    def visit(
        self, chunks: Sequence[Chunk], cotangents: Callable[[Chunk, Mapping[Fact, Tensor]], Cotangents], needs: Any
    ) -> tuple[dict[Fact, Tensor], Softmax, dict[Fact, Tensor], dict[str, Tensor], Grads]:
        head = self.open_head(needs, chunks)
        chunk_results: list[tuple[dict[Fact, Tensor], Softmax, Mapping[Fact, Tensor], Mapping[str, Tensor]]] = []
        bound: Tensor | None = None
        for block, partial in self._ahead(head, chunks):
            facts, softmax = self._finish_block(partial, block)
            by_fact, by_input = cotangents(block.chunk, facts)
            pulled = by_fact
            if self.source.is_fp16 and by_fact:
                bound = self.bounded(head, by_fact, bound)
                pulled = {f: g / bound for f, g in by_fact.items()}
            self.write(head, block, softmax, facts, pulled)
            chunk_results.append((facts, softmax, by_fact, by_input))
        return *join(*chunk_results), scale_grads(self.grads(head), bound, self.backend)

    def bounded(self, head: Any, by_fact: Mapping[Fact, Tensor], before: Tensor | None) -> Tensor:
        """The divisor of a chunk's cotangents, see `beyond_fp16`; gradients made before it are rescaled to match."""
        bound = beyond_fp16(by_fact, before)
        if before is not None:
            scale_grads(Grads(None, head.dhidden_ND, head.dweight_VD, head.dbias_V), before / bound, self.backend)
        return bound

    def open_head(self, needs: tuple[bool, ...], chunks: Sequence[Chunk]) -> Any:
        """Open the source for a visit of these chunks."""
        head = self._open()
        if True in needs:
            head.wants_grad(needs)
        if head.makes_logits:
            runs = [c.whole for c in chunks if c.is_last]
            head.single_chunk, head.longest = len(runs) == 1, max([run.stop - run.start for run in runs])
        return head

    def launch(self, head: Any, chunk: Chunk, arguments: Any, grad: bool) -> Any:
        """Facts, values, metrics and gradient of a chunk in one launch of the printed program."""
        rows, part, source = self.rows, chunk.rows, self.source
        numbers = part if rows.keep is None else rows.keep[part]
        raw_CV, teachers = self._logits(head, chunk, numbers, 0), self._teachers(part, 0)
        out_CV = head.grad_buffer(numbers, raw_CV) if grad else None
        ignored, targets = rows.skipped or rows.valid is not None, self.marked_targets(part)
        visited = self.backend.visit(
            raw_CV, targets, self.want, self._temperatures(part), self.program, arguments, out_CV, teachers=teachers,
            vocab=source.vocab, ignore=ignored, scale=source.scale, softcap=source.softcap,
        )  # fmt: skip
        if grad and (head.makes_logits or numbers is not part):
            self.pass_gradient(head, chunk, numbers, out_CV)
        return visited

    def read_all(self, head: Any) -> tuple[dict[Fact, Tensor], Softmax, Block]:
        """The first half of a visit of all rows, which reads the caller's own logits."""
        block = self._keeping(head, self._read(head, Chunk(self._all)))
        return *self._finish_block(self._sums(block), block), block

    def pass_gradient(self, head: Any, chunk: Chunk, numbers: Any, out_CV: Any) -> None:
        """Pass a chunk's gradient to the head; if it is part of a run, pass the whole run's after its last chunk."""
        if not chunk.is_last:
            return
        valid, part = self.rows.valid, chunk.whole
        if chunk.run is not None:
            numbers, out_CV = self.rows.numbers(part), head.buffers_CV[0][: part.stop - part.start]
        head.write(numbers, out_CV, None if valid is None else ~valid[part, None])

    def _ahead(self, head: Any, chunks: Sequence[Chunk]) -> Iterator[tuple[Block, Partial]]:
        """Each chunk and its partial; over a shard, that of all ranks."""
        if self.source.shard is not None:
            for block, gathering in self.gathered(head, chunks, self._sums):
                yield block, self._merged(gathering, block.part)
            return
        kept = None
        for chunk in chunks:
            block = self._keeping(head, self._read(head, chunk), kept)
            kept = block.kept
            yield block, self._sums(block)

    def gathered(
        self, head: Any, chunks: Sequence[Chunk], sums: Callable[[Block], Any]
    ) -> Iterator[tuple[Block, Gathering]]:
        """Over a shard: each chunk and its `sums`; the next chunk is made while these are gathered."""
        assert self.source.shard is not None
        blocks = (self._read(head, chunk, slot=i % 2) for i, chunk in enumerate(chunks))
        return gather_each(((block, sums(block)) for block in blocks), self.source.shard, self._first)

    def _first(self, number: int) -> tuple[Tensor | None, int]:
        """The `note` and `rows` that go with a chunk's partial; see `Gathering`."""
        return self._note() if number == 0 else None, self.rows.total if number < 2 else 0

    def _note(self) -> Tensor | None:
        return note(self.source, self.rows, self.want, self.teacher_rows, self.compared, self.terms)

    @property
    def _all(self) -> slice:
        return slice(0, self.rows.count)

    def _open(self) -> Any:
        self.close()
        source, teachers = self.source, self.teacher_rows
        return open_source(source, cost_of(teachers, source, self.rows), most_rows(teachers))

    def _blocks(self, head: Any) -> Iterator[Block]:
        for part in head.chunks(self.rows.count, self.rows.keep is not None) or [slice(0, 0)]:
            yield self._read(head, Chunk(part))

    def _read(self, head: Any, chunk: Chunk, slot: int = 0) -> Block:
        numbers = self.rows.numbers(chunk.rows)
        return Block(chunk, numbers, self._logits(head, chunk, numbers, slot), self._teachers(chunk.rows, slot))

    def _keeping(self, head: Any, block: Block, before: Any = None) -> Block:
        """The block with room to keep what its gradient can reuse; `before`: what was kept of the last one."""
        keep = getattr(self.backend, "keep", None)
        if keep is None or self.sums_slopes:  # what is kept has no sums of slopes
            return block
        out_CV = head.grad_buffer(block.numbers, block.raw_CV)
        how = self.source.softcap, block.teachers, head.makes_logits, before
        return block._replace(kept=keep(block.raw_CV, out_CV, self.want, *how))

    def _logits(self, head: Any, chunk: Chunk, numbers: Any, slot: int) -> Tensor:
        """A chunk's logits, made together with those of its whole run."""
        if chunk.run is None:
            return head.read(numbers, slot)
        if chunk.rows.start == chunk.run.start:
            head.read(self.rows.numbers(chunk.run), slot)
        first = chunk.run.start
        return head.buffers_CV[slot][chunk.rows.start - first : chunk.rows.stop - first]

    def _teachers(self, part: slice, slot: int) -> tuple[TeacherChunk | TopChunk, ...]:
        if not self.teacher_rows:
            return ()
        keys = self.want.temperatures_of
        return tuple([teacher.chunk(part, keys(name), slot) for name, teacher in self.teacher_rows.items()])

    def _temperatures(self, part: slice) -> list[Temperature]:
        own = part_of(self.temperature, part) if isinstance(self.temperature, Tensor) else self.temperature
        return [own if T is None else T for T in self.want.temperatures]

    def _paired(self, part: slice) -> list[list[tuple[Temperature, Temperature]]]:
        """For each teacher, pairs of the student's temperature and its own at which the two are compared."""
        student = dict(zip(self.want.temperatures, self._temperatures(part), strict=True))
        keys = self.want.temperatures_of
        return [[(student[T], teacher.own(T, part)) for T in keys(name)] for name, teacher in self.teacher_rows.items()]

    def _targets(self, part: slice) -> Tensor | None:
        return None if self.rows.targets is None else part_of(self.rows.targets, part)

    def marked_targets(self, part: slice) -> Tensor | None:
        """The targets; as they were given, -100 included, if kernels skip ignored rows."""
        given = self.rows.given
        if self.rows.keep is not None or given is None:
            return self._targets(part)
        return part_of(given if given.ndim == 1 else given.reshape(-1), part)

    def _transform(self) -> dict[str, Any]:
        return {"scale": self.source.scale, "softcap": self.source.softcap}

    @property
    def _start(self) -> int:
        return 0 if self.source.shard is None else self.source.shard.start

    def _vocab(self, part: slice) -> Any:  # how many columns a row's softmax has
        return self.source.vocab

    def _sums(self, block: Block) -> Partial:
        more = {"teachers": block.teachers} if block.teachers else {}
        more |= {} if block.kept is None else {"kept": block.kept}
        temperatures, targets = self._temperatures(block.part), self._targets(block.part)
        transform = self._transform()
        return self.backend.sums(block.raw_CV, targets, self.want, temperatures, start=self._start, **transform, **more)

    def _merged(self, partial: Gathering, part: slice) -> Partial:
        return partial.merged(self._temperatures(part), self._paired(part))

    def _finish_block(self, partial: Partial, block: Block) -> tuple[dict[Fact, Tensor], Softmax]:
        """Facts from a partial of the whole vocabulary, including the second read."""
        facts, softmax = self._finish(partial, block.part, block.teachers)
        return self._with_divergences(
            facts, softmax, self._divergence_pass(block, softmax) if self.want.divergent else []
        )

    def _finish(self, partial: Partial, part: slice, chunks: Any = ()) -> tuple[dict[Fact, Tensor], Softmax]:
        facts, softmax = finish(partial, self.want, self._temperatures(part), self._vocab(part))
        tails: dict[str, Any] = {
            name: [lse - known.max / T for lse, T in zip(chunk.tail, chunk.temperatures, strict=True)]
            for name, chunk, known in zip(self.teacher_rows, chunks, softmax.teachers, strict=False)
            if isinstance(chunk, DenseChunk) and isinstance(known, DenseSoftmax) and chunk.tail
        }
        facts, softmax = with_tails(self.want, facts, softmax, tails)
        return self._masked(facts, part, -math.inf), softmax

    def _divergence_pass(self, block: Block, softmax: Softmax) -> list[tuple[Tensor, Any]]:
        student = [[T for T, _ in pairs] for pairs in self._paired(block.part)]
        how = {"whole": self.source.shard is None and not self.sums_slopes, **self._transform()}
        how |= {} if block.kept is None else {"kept": block.kept}
        return self.backend.divergence_pass(block.raw_CV, self.want, softmax, block.teachers, student, **how)

    def _with_divergences(
        self, facts: dict[Fact, Tensor], softmax: Softmax, divergences: Sequence[tuple[Tensor, Any]]
    ) -> tuple[dict[Fact, Tensor], Softmax]:
        """Facts and softmax with the divergences added, after a sum over the ranks of a shard."""
        if not divergences:
            return facts, softmax
        found = dict(zip(self.want.all_divergences, sum_pairs(divergences, self.source.shard), strict=True))
        teachers = []
        for name, known in zip(self.want.teachers, softmax.teachers, strict=True):
            slopes = tuple(found[f][1] for f in self.want.facts if f in found and f.teacher == name)
            teachers.append(known._replace(slopes=slopes) if isinstance(known, DenseSoftmax) else known)
        values = {fact: value for fact, (value, _) in found.items()}
        return facts | values, softmax._replace(teachers=tuple(teachers))

    def _masked(self, values: Mapping[Fact, Tensor], part: slice, none: float = 0.0) -> dict[Fact, Tensor]:
        """Facts or cotangents, with 0 in ignored rows and rows without a teacher, and `none` where an id is -1."""
        ignored = None if self.rows.valid is None else ~self.rows.valid[part]
        for fact, x in (values := dict(values)).items():
            teacher = None if fact.teacher is None else self.teacher_rows.get(fact.teacher)
            hidden = None if teacher is None else teacher.hides(fact.name, part)
            x = x if hidden is None else x.masked_fill(hidden, none if hidden.ndim == 2 else 0)
            values[fact] = x if ignored is None else x.masked_fill(ignored if x.ndim == 1 else ignored[:, None], 0)
        return values

    def write(
        self, head: Any, block: Block, softmax: Softmax, facts: Mapping[Fact, Tensor], grads: Mapping[Fact, Tensor]
    ) -> None:
        grads = self._masked(grads, block.part)
        pulls = coefficients(facts, grads, self.want, self._vocab(block.part))
        more: dict[str, Any] = {}
        if self.teacher_rows:
            asked = [[f for f in self.want.facts if f.teacher == name] for name in self.teacher_rows]
            found = {f.teacher: x for f, x in facts.items() if f.name == "top_ids"}
            chunks = zip(self.teacher_rows, block.teachers, strict=True)
            more = {
                "teachers": [SparseChunk(found[name]) if isinstance(x, TopChunk) else x for name, x in chunks],
                "teacher_pulls": [
                    teacher_coefficients(known, self.want.temperatures_of(name), of_teacher, facts, grads)
                    for name, known, of_teacher in zip(self.teacher_rows, softmax.teachers, asked, strict=True)
                ],
                "teacher_temperatures": [[T for T, _ in pairs] for pairs in self._paired(block.part)],
            }
        out_CV = head.grad_buffer(block.numbers, block.raw_CV)
        temperatures, targets = self._temperatures(block.part), self._targets(block.part)
        more |= {"start": self._start, **self._transform()} | ({} if block.kept is None else {"kept": block.kept})
        self.backend.pull(block.raw_CV, targets, softmax, pulls, temperatures, out_CV, **more)
        if self.rows.valid is not None:
            out_CV.masked_fill_(~self.rows.valid[block.part, None], 0)  # the logits there may be anything
        self.pass_gradient(head, block.chunk, block.numbers, out_CV)

    def grads(self, head: Any) -> Any:
        ignored = None if self.rows.keep is None else self.rows.ignored()
        if ignored is not None:
            head.skip(ignored)
        grads: Grads = head.grads()
        if self.source.shard is not None:
            reduce_hidden(grads.hidden, self.source.shard)
        return grads if getattr(head, "later", None) is None else Deferred(grads, head)


NO_SOFTMAX = Softmax(torch.empty(0, dtype=torch.float32, device="cpu"), ())
