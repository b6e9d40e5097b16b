"""A `Linear` whose head makes its own matrix products: which calls it serves, and how they run.

Dimension key:  N rows   R rows that count   C rows of a chunk   V vocabulary   D hidden size

    facts    one product; its tiles yield the sums behind the facts, and no logits exist
    visit    the same product keeps e = exp(s - reference); the gradient is two products of that with row factors
    pull     like `visit`, from cotangents that come later

The backend has the products (`backend.product`); the device leaves out rows that are ignored or have no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.engine.arguments import Chunk
from headloss.engine.budget import accumulator
from headloss.engine.heads import LinearHead, on_source_device
from headloss.engine.sweeps import Cotangents, Sweep
from headloss.engine.weight_grad_into import weight_grad_into_of
from headloss.facts import Fact, Pull, Softmax, Want, coefficients, finish
from headloss.nested import join
from headloss.parallel.shard import Gathering
from headloss.record import Grads
from headloss.sources import Linear, Source

FACTS_BYTES = 56 << 20  # tile sums and gathered rows at a time, if nothing of the products is kept


def why_chunked(source: Source, want: Want, backend: ModuleType) -> str:
    """Why a call's products are made chunk by chunk with cuBLAS; empty if the head makes its own."""
    products = backend.product
    if not isinstance(source, Linear) or products is None or not products.able(source.device):
        return "the head's own are for GPUs of compute capability 9.0, with triton 3.6 or later"
    dtypes = {source.gemm_dtype, source.chunk_dtype}
    if dtypes != {torch.bfloat16}:
        return f"the head's own are for bfloat16, got {', '.join(str(x).removeprefix('torch.') for x in dtypes)}"
    if source.bias is not None:
        return "there is a bias"
    if source.softcap is not None:
        return "the slope of a softcap is no row factor"
    if source.scale <= 0:
        return f"scale is {source.scale}"
    if want.teachers or want.only_ids:
        return "a teacher's rows are compared with whole rows of logits"
    if want.of_logits:
        return "facts of the logits themselves take a pass of their own"
    if len(want.temperatures) != 1:
        return "facts at several temperatures" if want.temperatures else "no fact is asked for"
    cast = source.weight.dtype != torch.bfloat16  # autocast makes a copy
    aligned = source.weight.shape[1] % 8 == 0 if cast or not len(source.weight) else products.fits(source.weight)
    shape, columns = tuple(source.weight.shape), source.columns
    if source.shard is not None:  # all ranks must take the same path
        columns = source.shard.even_width
    if not aligned or columns < products.TILE.columns:
        return f"the weight, {shape}, has few columns, or rows that are not whole numbers of 16 bytes"
    if columns * shape[1] < products.SMALLEST:
        return f"the weight, {shape}, is so small that launches take longer than products"
    return ""


class ProductHead(LinearHead):
    """An open `Linear`: the first product also yields the sums, and two more make the gradients."""

    def __init__(self, source: Linear, backend: ModuleType) -> None:
        super().__init__(source)
        self.products, self.over_ranks = backend.product, backend.product_ranks
        self.e_CV = torch.empty(0, dtype=torch.bfloat16, device="cpu")
        if not self.products.fits(self.hidden_ND):
            self.hidden_ND = self.hidden_ND.contiguous()

    def sums(self, sweep: Sweep, part: slice, store: bool) -> Any:
        """The sums that the first product yields for these rows; `store`: keep what the gradient needs as well."""
        rows, source = sweep.rows, self.source
        hidden_CD = self._hidden(rows.numbers(part))
        targets, ignore = None, rows.valid is not None
        if rows.given is not None:
            targets = rows.given.reshape(-1)[part] if ignore else sweep._targets(part)
        e_CV = None
        if store:
            if len(self.e_CV) < len(hidden_CD):
                most = max(len(hidden_CD), self.longest)
                self.e_CV = torch.empty(0, dtype=torch.bfloat16, device="cpu")  # free the old one first
                self.e_CV = self.products.chunk(most, len(self.weight_VD), hidden_CD.device)
            e_CV = self.e_CV
        temperature = sweep._temperatures(part)[0]
        how = {"scale": source.scale, "ignore": ignore, "store": e_CV}
        given = hidden_CD, self.weight_VD, targets, sweep.want, temperature
        if (shard := source.shard) is not None:
            return self.over_ranks.read(*given, **how, start=shard.start, vocab=shard.vocab)
        return self.products.read(*given, **how)

    def pulled(self, numbers: Any, read: Any, pull: Any) -> None:
        """Make the gradients of these rows from their coefficients."""
        need_hidden, need_weight, _ = self.needs
        into_CD, add, hidden_CD = None, self.dweight_VD is not None, self._hidden(numbers)
        if need_hidden:
            if self.dhidden_ND is None:
                self.dhidden_ND = self.products.grad_buffer(read, len(self.hidden_ND))
            if self.dhidden_ND is None:
                make = torch.empty_like if isinstance(numbers, slice) else torch.zeros_like
                self.dhidden_ND = make(self.hidden_ND, memory_format=torch.contiguous_format)
            into_CD = self.dhidden_ND[numbers] if isinstance(numbers, slice) else torch.empty_like(hidden_CD)
        if need_weight and self.dweight_VD is None:
            dtype = accumulator(self.source, not self.single_chunk)
            self.dweight_VD = torch.empty(self.source.weight.shape, dtype=dtype, device=hidden_CD.device)
            self.dweight_VD[self.source.columns :] = 0
        dweight_VD = self.dweight_VD[: self.source.columns] if need_weight and self.dweight_VD is not None else None
        into = {"dhidden_CD": into_CD, "dweight_VD": dweight_VD, "add": add}
        if len(self.weight_VD):
            self.products.write(read, hidden_CD, self.weight_VD, pull, **into)
        elif into_CD is not None:  # a rank without columns
            into_CD.zero_()
        if need_hidden and not isinstance(numbers, slice) and self.dhidden_ND is not None and into_CD is not None:
            self.dhidden_ND.index_copy_(0, numbers, into_CD)


class Pending(NamedTuple):
    """The gradient products of a call, still to be made."""

    sweep: ProductSweep
    head: ProductHead
    numbers: Any  # the indices of the rows
    read: Any
    pull: Pull

    def finish(self, scale: Tensor | None) -> Grads:
        """Make the gradients, times `scale`; if the weight's is to be added to a tensor, its product does that."""
        sweep, head, pull = self.sweep, self.head, self.pull
        if scale is not None:
            pull = Pull(*(None if x is None else x * scale for x in pull))
        into = weight_grad_into_of(head.source)
        existing = None if into is None or not head.needs[1] else into.existing
        added = existing is not None and head.products.adds(existing)
        head.dweight_VD = existing if added else None
        head.pulled(self.numbers, self.read, pull)
        grads = sweep.grads(head)
        return grads._replace(weight=None) if added else grads


class ProductSweep(Sweep):
    """A sweep whose head makes its own products."""

    def _open(self) -> Any:
        self.close()
        assert isinstance(self.source, Linear)
        return ProductHead(self.source, self.backend)

    def facts(self) -> tuple[dict[Fact, Tensor], Softmax]:
        return self._found(self.reads(), self._all) if self.rows.count else super().facts()

    def reads(self) -> list[Any]:
        """The sums that the first product yields for all rows, some at a time; nothing else of it is kept."""
        head, want = self._open(), self.want
        fields = 2 + sum(map(bool, (want.sums("X"), want.sums("Q"), want.total, want.argmax)))
        row_bytes = 4 * fields * -(-self.source.columns // self.backend.product.READ.columns)
        row_bytes += 2 * head.hidden_ND.shape[1] if self.rows.valid is not None else 0
        most = max(1, FACTS_BYTES // row_bytes // 128) * 128
        pieces = -(-self.rows.count // most)
        step = -(-self.rows.count // pieces // 128) * 128  # equal lengths, or the last wave of programs is long
        parts = [slice(i, min(i + step, self.rows.count)) for i in range(0, self.rows.count, step)]
        return [head.sums(self, part, store=False).without_hidden() for part in parts]

    def sums(self) -> Tensor:
        """(F, R): the sums of all rows."""
        return self.sums_of(self.reads(), self._all)

    def sums_of(self, reads: Sequence[Any], part: slice, number: int = 0) -> Tensor:
        """(F, C): the sums of chunk `number`; over a shard, after one collective."""
        sums, shard = [read.sums for read in reads], self.source.shard
        if shard is not None:
            nodes = sums[0] if len(sums) == 1 else torch.cat(sums, 1)
            nodes_WkC, at, sums = Gathering(nodes, shard, *self._first(number)).gathered(), part.start, []
            for read in reads:
                here = slice(at, at + read.sums.shape[1])
                own = nodes_WkC[..., here.start - part.start : here.stop - part.start], self.want
                sums.append(self.backend.product_ranks.across(read, *own, self._temperatures(here)[0], shard.vocab))
                at = here.stop
        return sums[0] if len(sums) == 1 else torch.cat(sums, 1)

    def _found(self, reads: Sequence[Any], part: slice, number: int = 0) -> tuple[dict[Fact, Tensor], Softmax]:
        """Facts and softmax of chunk `number`; ignored rows have sums of 0, and so facts of 0."""
        partial = self.backend.product.partial(self.sums_of(reads, part, number), self.want)
        return finish(partial, self.want, self._temperatures(part), self.source.vocab, guarded=True)

    @functools.cached_property
    def at_once(self) -> bool:
        """Whether the budget has room for what all rows keep: then no loss needs more than three products."""
        assert isinstance(self.source, Linear)
        return 0 < self.rows.count <= self.source.chunk_rows()

    def run_at_once(self, loss: Any, needs: tuple[bool, ...]) -> Any:
        """Value, facts, softmax, cotangents and gradients of any loss, even one that combines rows."""
        everything = self._all
        head = self.open_head(needs, [Chunk(everything)])
        read = head.sums(self, everything, store=True)
        facts, softmax = self._found([read], everything)
        value, (by_fact, by_input) = loss.whole(facts, grad=True)
        (pull,) = coefficients(facts, self._masked(by_fact, everything), self.want, self.source.vocab)
        return value, facts, softmax, by_fact, by_input, self.gradients(head, read, pull)

    def gradients(self, head: ProductHead, read: Any, pull: Pull) -> Grads | Pending:
        """The gradients of all rows; with `weight_grad_into`, left for the backward to make and add."""
        pending = Pending(self, head, self.rows.numbers(slice(0, self.rows.count)), read, pull)
        # not over ranks, which must all sum dX at the same time
        later = head.needs[1] and weight_grad_into_of(self.source) and self.source.shard is None
        return pending if later else pending.finish(None)

    def visit(
        self, chunks: Sequence[Chunk], cotangents: Callable[[Chunk, Mapping[Fact, Tensor]], Cotangents], needs: Any
    ) -> tuple[dict[Fact, Tensor], Softmax, dict[Fact, Tensor], dict[str, Tensor], Grads]:
        head, seen = self.open_head(needs, chunks), []
        for i, chunk in enumerate(chunks):
            read = head.sums(self, chunk.rows, store=True)
            facts, softmax = self._found([read], chunk.rows, i)
            by_fact, by_input = cotangents(chunk, facts)
            self._write(head, chunk.rows, read, facts, by_fact)
            seen.append((facts, softmax, by_fact, by_input))
        return *join(*seen), self.grads(head)

    @on_source_device
    def pull(
        self, facts: Mapping[Fact, Tensor], softmax: Softmax, grads: Mapping[Fact, Tensor], needs: tuple[bool, ...]
    ) -> Grads:
        if not self.rows.count:
            return super().pull(facts, softmax, grads, needs)
        head = self._open()
        head.wants_grad(needs)
        for part in head.chunks(self.rows.count, self.rows.keep is not None):
            read = head.sums(self, part, store=True)
            if self.source.shard is not None:
                lse = softmax.max[part] / self._temperatures(part)[0] + softmax.log_sums[0][part]
                self.backend.product_ranks.over_ranks(read, lse)
            at = {f: x[part] for f, x in facts.items()}, {f: g[part] for f, g in grads.items()}
            self._write(head, part, read, *at)
        return self.grads(head)

    def _write(
        self, head: Any, part: slice, read: Any, facts: Mapping[Fact, Tensor], grads: Mapping[Fact, Tensor]
    ) -> None:
        (pull,) = coefficients(facts, self._masked(grads, part), self.want, self.source.vocab)
        head.pulled(self.rows.numbers(part), read, pull)
