"""The sweeps: read the vocabulary for facts, read it again to write the gradient, or do both in one visit.

Dimension key:  N rows   R rows that count   C rows of a chunk   V vocabulary

    facts   read each chunk's logits, keep the facts
    pull    read each chunk's logits again and write their gradient from the facts' cotangents
    visit   read a chunk once, get its facts, their cotangents and its gradient, go to the next: on `Linear` the logits
            are then made once, three GEMMs in all instead of four

One autograd Function serves every grade.  Its outputs are the loss and the facts.  What pulls on the loss uses the
gradients made in the visit; what pulls on a fact is paid for by another sweep, and only then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headloss.facts import CONSTANT, Fact, Moments, Partial, Pull, Softmax, Want, coefficients, finish
from headloss.heads import Grads, open_source
from headloss.parallel import Gathering, reduce_hidden
from headloss.rows import Rows
from headloss.sources import Source, with_tensors, without_tensors

Cotangents = tuple[Mapping[Fact, Tensor], Mapping[str, Tensor]]  # of the facts, and of inputs that want a gradient


class Chunk(NamedTuple):
    rows: slice  # of the rows that count
    segments: slice | None = None  # that they make up whole


class Loss(Protocol):
    """What a sweep must know of an objective."""

    chunks: Sequence[Chunk] | None  # how to visit the rows; None if all facts must come first
    normaliser: Tensor | None  # what the gradients made in a visit still have to be multiplied with
    wants_grad: tuple[str, ...]  # inputs that require grad

    def chunk(self, chunk: Chunk, facts: Mapping[Fact, Tensor]) -> Cotangents: ...
    def whole(self, facts: Mapping[Fact, Tensor], grad: bool) -> tuple[Tensor, Cotangents]: ...
    def shaped(self, name: str, grad: Tensor | None) -> Tensor | None: ...


class Sweep:
    """A source, the rows of it that count, the facts wanted of them, and the backend that reads them."""

    def __init__(self, source: Source, rows: Rows, want: Want, backend: ModuleType) -> None:
        self.source, self.rows, self.want, self.backend = source, rows, want, backend
        T = source.temperature
        if isinstance(T, Tensor):
            T = T.detach().to(source.fact_dtype)
            T = rows.take(T) if T.ndim else T.expand(rows.count)
            if rows.valid is not None:
                T = T.masked_fill(~rows.valid, 1.0)
        self.temperature = T

    def replace(self, source: Source) -> Sweep:
        other = object.__new__(Sweep)
        other.__dict__.update(self.__dict__, source=source)
        return other

    def facts(self) -> tuple[dict[Fact, Tensor], Softmax]:
        head = open_source(self.source)
        parts = []
        for part in head.chunks(self.rows.count, self.rows.keep is not None):
            parts.append(self._sums(head.read(self.rows.numbers(part)), part))
        if not parts:
            parts.append(self._sums(head.read(slice(0, 0)), slice(0, 0)))
        everything = slice(0, self.rows.count)
        return self._finish(self._merged(_concatenate(parts), everything), everything)

    def pull(
        self, facts: Mapping[Fact, Tensor], softmax: Softmax, grads: Mapping[Fact, Tensor], needs: tuple[bool, ...]
    ) -> Grads:
        head = open_source(self.source)
        head.wants_grad(needs)
        normaliser = None
        if self.source.narrow and grads:  # 1 / number of tokens underflows in fp16: write order 1, rescale in float32
            normaliser = torch.stack([g.abs().amax() if g.numel() else g.sum() for g in grads.values()]).amax()
            normaliser = normaliser.masked_fill(normaliser == 0, 1.0)
            grads = {f: g / normaliser for f, g in grads.items()}
        pulls = coefficients(facts, grads, self.want, self.source.vocab)
        for part in head.chunks(self.rows.count, self.rows.keep is not None):
            numbers = self.rows.numbers(part)
            self._pull(head, numbers, head.read(numbers), _at(softmax, part), _at(pulls, part), part)
        return _scaled(self._grads(head), normaliser)

    def visit(
        self, chunks: Sequence[Chunk], cotangents: Callable[[Chunk, Mapping[Fact, Tensor]], Cotangents], needs: Any
    ) -> tuple[dict[Fact, Tensor], Softmax, dict[Fact, Tensor], dict[str, Tensor], Grads]:
        head = open_source(self.source)
        head.wants_grad(needs)
        head.single_chunk = len(chunks) == 1
        seen: list[tuple[dict[Fact, Tensor], Softmax, Mapping[Fact, Tensor], Mapping[str, Tensor]]] = []
        for chunk, numbers, raw_CV, partial in self._chunks(head, chunks):
            facts, softmax = self._finish(partial, chunk.rows)
            by_fact, by_input = cotangents(chunk, facts)
            pulls = coefficients(facts, by_fact, self.want, self.source.vocab)
            self._pull(head, numbers, raw_CV, softmax, pulls, chunk.rows)
            seen.append((facts, softmax, by_fact, by_input))
        facts_, softmax_, by_fact_, by_input_ = zip(*seen, strict=True)
        log_sums = tuple(torch.cat(x) for x in zip(*(s.log_sums for s in softmax_), strict=True))
        return (
            _concatenate_each(facts_),
            Softmax(torch.cat([s.max for s in softmax_]), log_sums),
            _concatenate_each(by_fact_),
            _concatenate_each(by_input_),
            self._grads(head),
        )

    def _chunks(self, head: Any, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Any, Tensor, Partial]]:
        """Each chunk's logits and partial.  Over a shard, the next chunk is made while this one's partial travels."""
        ahead: list[tuple[Chunk, Any, Tensor, Any]] = []
        for i, chunk in enumerate(chunks):
            numbers = self.rows.numbers(chunk.rows)
            raw_CV = head.read(numbers, slot=i % 2 if self.source.shard is not None else 0)
            partial = self._sums(raw_CV, chunk.rows)
            if self.source.shard is None:
                yield chunk, numbers, raw_CV, partial
                continue
            ahead.append((chunk, numbers, raw_CV, Gathering(partial, self.source.shard)))
            if len(ahead) == 2:
                yield self._arrived(*ahead.pop(0))
        if ahead:
            yield self._arrived(*ahead.pop(0))

    def _arrived(self, chunk: Chunk, numbers: Any, raw_CV: Tensor, partial: Gathering) -> Any:
        return chunk, numbers, raw_CV, partial.merged(self._temperatures(chunk.rows))

    def _merged(self, partial: Partial, part: slice) -> Partial:
        shard = self.source.shard
        return partial if shard is None else Gathering(partial, shard).merged(self._temperatures(part))

    def _temperatures(self, part: slice) -> list[float | Tensor]:
        own = self.temperature[part] if isinstance(self.temperature, Tensor) else self.temperature
        return [own if T is None else T for T in self.want.temperatures]

    def _sums(self, raw_CV: Tensor, part: slice) -> Partial:
        targets = None if self.rows.targets is None else self.rows.targets[part]
        return self.backend.sums(raw_CV, targets, self.want, self._temperatures(part), **self._transform())

    def _transform(self) -> dict[str, Any]:
        shard = self.source.shard
        start = 0 if shard is None else shard.start
        return {"scale": self.source.scale, "softcap": self.source.softcap, "start": start}

    def _finish(self, partial: Partial, part: slice) -> tuple[dict[Fact, Tensor], Softmax]:
        facts, softmax = finish(partial, self.want, self._temperatures(part), self.source.vocab)
        if self.rows.valid is not None:
            ignored = ~self.rows.valid[part]
            facts = {f: x.masked_fill(ignored, 0) for f, x in facts.items()}
        return facts, softmax

    def _pull(self, head: Any, numbers: Any, raw_CV: Tensor, softmax: Softmax, pulls: Any, part: slice) -> None:
        targets = None if self.rows.targets is None else self.rows.targets[part]
        out_CV = head.room(numbers, raw_CV)
        self.backend.pull(raw_CV, targets, softmax, pulls, self._temperatures(part), out_CV, **self._transform())
        ignored_C1 = None if self.rows.valid is None else ~self.rows.valid[part, None]
        if ignored_C1 is not None:
            out_CV.masked_fill_(ignored_C1, 0)  # the logits there may be anything
        head.write(numbers, out_CV, ignored_C1)

    def _grads(self, head: Any) -> Grads:
        ignored = self.rows.ignored()
        if ignored is not None:
            head.skip(ignored)
        grads = head.grads()
        reduce_hidden(grads.hidden, self.source.shard)
        return grads


class Result(NamedTuple):
    """What a forward pass leaves behind."""

    loss: Tensor
    facts: Mapping[Fact, Tensor]  # (R,)
    softmax: Softmax
    by_fact: Mapping[Fact, Tensor]  # cotangents of the loss
    by_input: Mapping[str, Tensor]
    grads: Grads | None = None  # made in the visit
    normaliser: Tensor | None = None  # what grads and cotangents from a visit still have to be multiplied with


def run(sweep: Sweep, loss: Loss | None, needs: tuple[bool, ...]) -> Result:
    """The forward pass: facts, loss, and whatever of the gradient can be had in the same visit."""
    if loss is None:
        facts, softmax = sweep.facts()
        return Result(softmax.max.new_zeros(()), facts, softmax, {}, {})
    if any(needs) and loss.chunks:
        facts, softmax, by_fact, by_input, grads = sweep.visit(loss.chunks, loss.chunk, needs)
        value, _ = loss.whole(facts, grad=False)
        return Result(value, facts, softmax, by_fact, by_input, grads, loss.normaliser)
    facts, softmax = sweep.facts()
    grad = any(needs) or bool(loss.wants_grad)
    value, (by_fact_, by_input_) = loss.whole(facts, grad=grad)
    return Result(value, facts, softmax, by_fact_, by_input_)


def settle(sweep: Sweep, result: Result, needs: tuple[bool, ...]) -> Grads:
    """The gradients of the loss, without autograd."""
    if result.grads is None:
        return sweep.pull(result.facts, result.softmax, result.by_fact, needs)
    return _scaled(result.grads, result.normaliser)


class Head(torch.autograd.Function):
    """(source tensors, inputs that want a gradient) -> (loss, *facts)."""

    @staticmethod
    def forward(ctx: Any, sweep: Sweep, loss: Loss | None, needs: tuple[bool, ...], *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        result = run(sweep, loss, needs)
        outputs = [sweep.rows.put(result.facts[f]) for f in sweep.want.facts]
        ctx.mark_non_differentiable(*(x for f, x in zip(sweep.want.facts, outputs, strict=True) if f.name in CONSTANT))
        ctx.count = len(sweep.source.tensors)
        ctx.save_for_backward(*tensors[: ctx.count])
        ctx.sweep, ctx.needs = sweep.replace(without_tensors(sweep.source)), needs
        ctx.facts = {f: x.detach() for f, x in result.facts.items()}
        ctx.softmax, ctx.by_fact, ctx.grads = result.softmax, result.by_fact, result.grads
        ctx.inputs = [] if loss is None else [loss.shaped(n, result.by_input.get(n)) for n in loss.wants_grad]
        ctx.normaliser = result.normaliser
        return (result.loss, *outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_loss: Tensor | None, *g_facts: Tensor | None) -> Any:
        sweep: Sweep = ctx.sweep.replace(with_tensors(ctx.sweep.source, ctx.saved_tensors))
        pending = {f: sweep.rows.take(g) for f, g in zip(sweep.want.facts, g_facts, strict=True) if g is not None}
        grads, by_input = None, [None] * len(ctx.inputs)
        if g_loss is not None:
            scale = g_loss if ctx.normaliser is None else g_loss * ctx.normaliser
            if ctx.grads is not None:
                grads, ctx.grads = _scaled(ctx.grads, scale), None  # handed over: a second backward makes them again
            else:
                for fact, cotangent in ctx.by_fact.items():
                    pulled = scale * cotangent
                    pending[fact] = pending[fact] + pulled if fact in pending else pulled
            by_input = [None if g is None else scale * g for g in ctx.inputs]
        if pending and any(ctx.needs):
            more = sweep.pull(ctx.facts, ctx.softmax, pending, ctx.needs)
            grads = more if grads is None else Grads(*(_add(x, y) for x, y in zip(grads, more, strict=True)))
        names = ("logits",) if ctx.count == 1 else ("hidden", "weight", "bias")
        by_tensor = [None if grads is None else getattr(grads, name) for name in names[: ctx.count]]
        return (None, None, None, *by_tensor, *by_input)


def _scaled(grads: Grads, scale: Tensor | None) -> Grads:
    """Times a number, in place, and in float32 where the gradient itself is narrower; times 1 costs nothing."""
    if scale is None or (scale.device.type == "cpu" and float(scale) == 1.0):
        return grads
    for x in grads:
        if x is not None:
            x.mul_(scale) if x.dtype.itemsize >= 4 else x.copy_(x.float() * scale)
    return grads


def _add(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return x if y is None else y if x is None else x.add_(y)


def _at(x: Any, part: slice) -> Any:
    """Rows `part` of every tensor in a nest of tuples."""
    if isinstance(x, Tensor):
        return x[part]
    if isinstance(x, Softmax | Pull):
        return type(x)(*(_at(y, part) for y in x))
    return tuple(_at(y, part) for y in x) if isinstance(x, tuple) else x


def _concatenate(parts: Sequence[Partial]) -> Partial:
    def join(*xs: Any) -> Any:
        if isinstance(xs[0], Tensor):
            return torch.cat(xs)
        if isinstance(xs[0], Moments):
            return Moments(*map(join, *xs))
        return tuple(map(join, *xs)) if isinstance(xs[0], tuple) else None

    return parts[0] if len(parts) == 1 else Partial(*map(join, *parts))


def _concatenate_each(parts: Sequence[Mapping[Any, Tensor]]) -> dict[Any, Tensor]:
    return {key: torch.cat([p[key] for p in parts]) for key in parts[0]}
