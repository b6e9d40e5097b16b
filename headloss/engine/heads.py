"""Heads, which are open sources as flat (N, ...) tensors: `read` makes raw logits of some rows, `write` their gradient.

Dimension key:  N rows   C rows of a chunk   V vocabulary   D hidden size
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.deferred_checks import is_cuda
from headloss.engine.budget import NO_COST, Cost, accumulator, chunk_rows, pieces
from headloss.large_pages import in_large_pages
from headloss.record import Grads
from headloss.sources import Linear, Logits, Source, padded, parse_bytes

GATHER_BYTES = 32 << 20  # logits copied at a time if ignored rows are left out

# From how many columns on we avoid a width that is not a multiple of 16 bytes: cuBLAS takes four to eight times as long
# (50257 columns of bfloat16 on an H200, against 50304).
UNEVEN_IS_SLOW = {"cuda": 1024}

Rows = slice | Tensor  # a run of rows, or their indices


def part_of(x: Tensor, rows: slice) -> Tensor:
    """x[rows], or x itself if that is all of it: making a view costs as much as a small kernel."""
    return x if rows.start == 0 and rows.stop == x.shape[0] else x[rows]


def columns_of(x_CV: Tensor, part: slice) -> Tensor:
    return x_CV if part.start == 0 and part.stop == x_CV.shape[1] else x_CV[:, part]


class LogitsHead:
    """An open `Logits`: the raw logits are rows of the tensor itself."""

    single_chunk, makes_logits = True, False
    grad_NV: Tensor | None = None

    def __init__(self, source: Logits, most: int | None = None) -> None:
        self.source, self.most = source, most
        all_NV = source.logits.detach()
        if all_NV.ndim != 2:
            all_NV = all_NV.reshape(torch.Size(source.leading).numel(), all_NV.shape[-1])
        self.all_NV = self.logits_NV = all_NV
        self.is_padded = source.columns != all_NV.shape[1]
        if self.is_padded:
            self.logits_NV = self._unpadded(all_NV)

    def _unpadded(self, x_NV: Tensor) -> Tensor:
        """x without the columns that pad the vocabulary."""
        return x_NV[:, : self.source.columns]

    def chunks(self, count: int, gathered: bool) -> list[slice]:
        """All rows at once, or runs small enough that a copy of them does not matter."""
        row_bytes = max(1, self.source.columns * self.logits_NV.element_size())
        step = max(1, GATHER_BYTES // row_bytes) if gathered else max(1, count)
        step = step if self.most is None else min(step, self.most)
        return [slice(i, min(i + step, count)) for i in range(0, count, step)]

    def read(self, rows: Rows, slot: int = 0) -> Tensor:
        return part_of(self.logits_NV, rows) if type(rows) is slice else self.logits_NV.index_select(0, rows)

    def wants_grad(self, needs: tuple[bool, ...]) -> None:
        if not needs[0]:
            return
        if self.source.inplace:
            torch.autograd.graph.increment_version(self.source.logits)
        else:
            self.all_NV = in_large_pages(torch.empty_like(self.all_NV, memory_format=torch.contiguous_format))
        self.grad_NV = self.all_NV
        if self.is_padded:
            self.grad_NV = self._unpadded(self.all_NV)
            self.all_NV[:, self.source.columns :] = 0

    def grad_buffer(self, rows: Rows, raw_CV: Tensor) -> Tensor:
        """The buffer for the gradient of these rows' raw logits."""
        assert self.grad_NV is not None
        return part_of(self.grad_NV, rows) if type(rows) is slice else raw_CV

    def write(self, rows: Rows, grad_CV: Tensor, ignored_C1: Tensor | None) -> None:
        if not isinstance(rows, slice):
            assert self.grad_NV is not None
            self.grad_NV.index_copy_(0, rows, grad_CV)

    def gather(self, rows: Rows, column_RK: Tensor) -> Tensor:
        """Some raw logits of each row."""
        if self.source.columns == 0:
            return self.logits_NV.new_zeros(column_RK.shape)
        if isinstance(rows, slice):
            return self.logits_NV[rows].gather(-1, column_RK)
        return self.logits_NV[rows[:, None], column_RK]

    def scatter(self, rows: Rows, column_RK: Tensor, grad_RK: Tensor, ignored_R1: Tensor | None) -> None:
        """Write the gradient of those logits into a gradient of zeros."""
        assert self.grad_NV is not None
        self.grad_NV.zero_()
        if self.source.columns:
            own_RK, device = grad_RK.to(self.grad_NV.dtype), column_RK.device
            # a quarter of the time, but for narrow dtypes torch copies all of it to float32; on GPUs its order varies
            if isinstance(rows, slice) and device.type == "cpu" and own_RK.itemsize >= 4:
                self.grad_NV[rows].scatter_add_(-1, column_RK, own_RK)
                return
            numbers = torch.arange(len(self.grad_NV), device=device)[rows] if isinstance(rows, slice) else rows
            self.grad_NV.index_put_((numbers[:, None], column_RK), own_RK, accumulate=True)

    def skip(self, rows: Tensor) -> None:
        """Write zeros to ignored rows."""
        if self.grad_NV is not None:
            self.grad_NV.index_fill_(0, rows, 0)

    def grads(self) -> Grads:
        if self.grad_NV is None:
            return Grads()
        return Grads(self.all_NV if self.source.logits.ndim == 2 else self.all_NV.view(self.source.logits.shape))


class LinearHead:
    """An open `Linear`: one GEMM makes a chunk's raw logits, and their gradient goes into two more."""

    makes_logits = True

    def __init__(self, source: Linear, cost: Cost = NO_COST, single_chunk: bool = False) -> None:
        self.source, self.cost = source, cost
        dtype, columns = source.gemm_dtype, source.columns
        hidden, weight = source.hidden.detach(), source.weight.detach()
        hidden = hidden if hidden.ndim == 2 else hidden.reshape(-1, hidden.shape[-1])
        weight = weight if weight.shape[0] == columns else weight[:columns]  # without the rows that pad a vocabulary
        self.hidden_ND = hidden if hidden.dtype == dtype else hidden.to(dtype)
        self.weight_VD = weight if weight.dtype == dtype else weight.to(dtype)
        self.bias_V = None if source.bias is None else source.bias.detach()[: source.columns]
        self.parts = aligned_parts(self.weight_VD)
        self.needs = (False, False, False)
        self.buffers_CV: dict[int, Tensor] = {}
        self.dhidden_ND: Tensor | None = None
        self.dweight_VD: Tensor | None = None
        self.dbias_V: Tensor | None = None
        self.later: tuple[Tensor, Tensor] | None = None  # factors of the weight's gradient; see `should_defer`
        self.single_chunk = single_chunk
        self.longest = 0  # rows of the longest chunk, if known: a buffer that grows would exist twice for a moment

    def chunks(self, count: int, gathered: bool) -> list[slice]:
        """Equal runs of the rows that count, as long as the budget allows."""
        parts = pieces(count, chunk_rows(self.source, self.cost, count))
        self.single_chunk, self.longest = len(parts) == 1, max([x.stop - x.start for x in parts], default=0)
        return parts

    def _hidden(self, rows: Rows) -> Tensor:
        return part_of(self.hidden_ND, rows) if isinstance(rows, slice) else self.hidden_ND.index_select(0, rows)

    def read(self, rows: Rows, slot: int = 0) -> Tensor:
        """Make these rows' logits in buffer `slot`: the last chunk's, in the other, may still be needed."""
        hidden_CD = self._hidden(rows)
        C, V, dtype = len(hidden_CD), len(self.weight_VD), self.source.chunk_dtype
        if slot not in self.buffers_CV or len(self.buffers_CV[slot]) < C:
            self.buffers_CV.pop(slot, None)  # free the old one first
            size = max(C, self.longest), padded(V, hidden_CD.is_cpu)
            self.buffers_CV[slot] = in_large_pages(torch.empty(size, dtype=dtype, device=hidden_CD.device))[:, :V]
        raw_CV = self.buffers_CV[slot][:C]
        at_once = self.bias_V is not None and self.bias_V.dtype == dtype == hidden_CD.dtype
        if at_once and self.bias_V is not None:  # rounded once: the product alone may overflow float16
            for part in self.parts:
                bias_V, weight_DV = part_of(self.bias_V, part), part_of(self.weight_VD, part).t()
                torch.addmm(bias_V, hidden_CD, weight_DV, out=columns_of(raw_CV, part))
        else:
            make_logits(hidden_CD, self.weight_VD, self.parts, raw_CV)
        if self.bias_V is not None and not at_once:
            raw_CV += self.bias_V
        return raw_CV

    def gather(self, rows: Rows, column_RK: Tensor) -> Tensor:
        """Some raw logits of each row: K products per row instead of V."""
        out_RK = torch.zeros(column_RK.shape, dtype=self.source.fact_dtype, device=column_RK.device)
        for part, hidden_CD, weight_CKD in self._pairs_of_rows(rows, column_RK):
            out_RK[part] = torch.einsum("cd,ckd->ck", hidden_CD, weight_CKD)
        if self.bias_V is not None and len(self.bias_V):
            out_RK += self.bias_V[column_RK]
        return out_RK

    def scatter(self, rows: Rows, column_RK: Tensor, grad_RK: Tensor, ignored_R1: Tensor | None) -> None:
        """Write the gradient of those logits to the hidden rows and to the rows of the weight that they name."""
        need_hidden, need_weight, need_bias = self.needs
        dtype, device = self.source.fact_dtype, column_RK.device
        if need_hidden:
            self.dhidden_ND = self._new_dhidden()
        if need_weight:
            self.dweight_VD = in_large_pages(torch.empty(self.source.weight.shape, dtype=dtype, device=device)).zero_()
        for part, hidden_CD, weight_CKD in self._pairs_of_rows(rows, column_RK):
            grad_CK = grad_RK[part]
            if need_hidden and self.dhidden_ND is not None:
                numbers = torch.arange(len(self.hidden_ND), device=device)[rows] if isinstance(rows, slice) else rows
                part_CD = torch.einsum("ck,ckd->cd", grad_CK, weight_CKD).to(self.dhidden_ND.dtype)
                self.dhidden_ND.index_copy_(0, numbers[part], part_CD)
            if need_weight and self.dweight_VD is not None:
                if ignored_R1 is not None:
                    hidden_CD = hidden_CD.masked_fill(ignored_R1[part], 0)  # it may hold NaN, and 0 * NaN is not 0
                part_CKD = grad_CK[..., None] * hidden_CD[:, None]
                self.dweight_VD.index_add_(0, column_RK[part].flatten(), part_CKD.flatten(0, 1))
        if need_bias and self.bias_V is not None:
            self.dbias_V = torch.zeros(self.source.columns, dtype=dtype, device=device)
            if self.source.columns:  # in an empty shard there is no column to add to
                self.dbias_V.index_add_(0, column_RK.flatten(), grad_RK.flatten().to(dtype))

    def _pairs_of_rows(self, rows: Rows, column_RK: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Runs of hidden rows with the rows of the weight that each of them names, in float32 or better."""
        dtype = self.source.fact_dtype
        row_bytes = column_RK.shape[-1] * self.weight_VD.shape[-1] * dtype.itemsize * 2
        step = max(1, parse_bytes(self.source.memory) // max(1, row_bytes))
        for i in range(0, len(column_RK) if len(self.weight_VD) else 0, step):
            part = slice(i, min(i + step, len(column_RK)))
            here = slice(part.start, part.stop) if isinstance(rows, slice) else rows[part]
            yield part, self._hidden(here).to(dtype), self.weight_VD[column_RK[part]].to(dtype)

    def wants_grad(self, needs: tuple[bool, ...]) -> None:
        self.needs = (needs[0], needs[1], len(needs) > 2 and needs[2])

    def grad_buffer(self, rows: Rows, raw_CV: Tensor) -> Tensor:
        return raw_CV  # the chunk's gradient overwrites its logits

    def write(self, rows: Rows, grad_CV: Tensor, ignored_C1: Tensor | None) -> None:
        need_hidden, need_weight, need_bias = self.needs
        if need_bias:
            part_V = grad_CV.sum(0, dtype=self.source.fact_dtype)
            self.dbias_V = part_V if self.dbias_V is None else self.dbias_V.add_(part_V)
        if not (need_hidden or need_weight):
            return
        grad_CV, D = grad_CV.to(self.weight_VD.dtype), self.weight_VD.shape[1]
        if need_hidden:
            if self.dhidden_ND is None:
                self.dhidden_ND = self._new_dhidden()
            into_CD = self.dhidden_ND
            into_CD = part_of(into_CD, rows) if isinstance(rows, slice) else into_CD.new_empty(len(grad_CV), D)
            pull_hidden(grad_CV, self.weight_VD, self.parts, into_CD)
            if not isinstance(rows, slice):
                self.dhidden_ND.index_copy_(0, rows, into_CD)
        if need_weight:
            hidden_CD = self._hidden(rows)
            if ignored_C1 is not None:
                hidden_CD = hidden_CD.masked_fill(ignored_C1, 0)  # it may hold NaN, and 0 * NaN is not 0
            if self.dweight_VD is None and self.should_defer:
                self.later = grad_CV, hidden_CD
            else:
                self._write_weight(grad_CV, hidden_CD)

    def _write_weight(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        first = self.dweight_VD is None
        if self.dweight_VD is None:
            dtype = accumulator(self.source, not self.single_chunk)
            self.dweight_VD = in_large_pages(torch.empty(self.source.weight.shape, dtype=dtype, device=grad_CV.device))
            if self.source.columns < self.source.weight.shape[0]:
                self.dweight_VD[self.source.columns :] = 0
        pull_weight(grad_CV, hidden_CD, self.parts, self.dweight_VD, add=not first)

    @property
    def should_defer(self) -> bool:
        """Whether the weight's gradient is made in the backward, which knows its scale and what it is added to."""
        return self.single_chunk and self.source.weight_grad_into is not None and not self.source.is_fp16

    def weight_later(self, scale: Tensor | None, existing: Tensor | None) -> Tensor | None:
        """Make the weight's gradient, times `scale`, and add it to `existing`; if that is None, return it."""
        assert self.later is not None
        grad_CV, hidden_CD = self.later
        self.dweight_VD = existing
        with torch.autocast(grad_CV.device.type, enabled=False):
            self._write_weight(grad_CV, hidden_CD if scale is None else (hidden_CD * scale).to(hidden_CD.dtype))
        return self.dweight_VD if existing is None else None

    def _new_dhidden(self) -> Tensor:
        """Zeros for dhidden.  For fp16 they are float32: before it is normalised, dhidden may overflow float16."""
        dtype = self.source.fact_dtype if self.source.is_fp16 else self.hidden_ND.dtype
        return torch.zeros_like(self.hidden_ND, dtype=dtype, memory_format=torch.contiguous_format)

    def skip(self, rows: Tensor) -> None:
        """Nothing to do: dhidden starts as zeros."""

    def grads(self) -> Grads:
        need_hidden, need_weight, need_bias = self.needs
        source, zeros = self.source, torch.zeros_like
        dhidden, dweight, dbias = self.dhidden_ND, self.dweight_VD, self.dbias_V
        if need_bias and source.bias is not None:
            padding = source.bias.shape[0] - source.columns
            dbias = zeros(source.bias) if dbias is None else torch.nn.functional.pad(dbias, (0, padding))
        return Grads(
            hidden=None
            if not need_hidden
            else zeros(source.hidden)
            if dhidden is None
            else dhidden.view_as(source.hidden),
            weight=None if not need_weight or self.later else zeros(source.weight) if dweight is None else dweight,
            bias=dbias,
        )


class Deferred(NamedTuple):
    """Gradients without the weight's, which is still to be made; see `LinearHead.should_defer`."""

    made: Grads
    head: LinearHead


def scale_grads(grads: Grads, scale: Tensor | None, backend: ModuleType) -> Grads:
    """Scale gradients in place, in float32 even if they are narrower; a scale of 1 costs nothing."""
    if scale is None or (scale.is_cpu and float(scale) == 1.0):
        return grads
    for x in grads:
        if x is not None:
            backend.scale_(x, scale)
    return grads


def aligned_parts(weight_VD: Tensor) -> tuple[slice, ...]:
    """The vocabulary in runs that a GEMM takes at full speed; the last few columns may need a run of their own."""
    V, vector = len(weight_VD), 16 // weight_VD.element_size()
    last = V % vector if UNEVEN_IS_SLOW.get(weight_VD.device.type, V + 1) <= V else 0
    return (slice(0, V - last), slice(V - last, V)) if last else (slice(0, V),)


Head = LogitsHead | LinearHead


def open_source(source: Source, cost: Cost = NO_COST, most: int | None = None) -> Head:
    """`most`: the most rows per chunk of `Logits`, if a teacher's logits have to be made for them."""
    return LogitsHead(source, most) if isinstance(source, Logits) else LinearHead(source, cost)


def on_source_device(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Run a sweep's function with its device as the current one, on which Triton launches, and with autocast off.

    Autocast would round products that must be float32.
    """

    @functools.wraps(fn)
    def call(sweep: Any, *args: Any) -> Any:
        device = sweep.source.device
        elsewhere, autocast = on_other_device(device), torch.is_autocast_enabled(device.type)
        if not elsewhere and not autocast:
            return fn(sweep, *args)
        with contextlib.ExitStack() as stack:
            if elsewhere:
                stack.enter_context(torch.cuda.device(device))
            if autocast:
                stack.enter_context(torch.autocast(device.type, enabled=False))
            return fn(sweep, *args)

    return call


def on_other_device(device: torch.device) -> bool:
    """Whether Triton would launch a kernel on another device than this one."""
    return is_cuda(device) and device.index != torch._C._cuda_getDevice()


def make_logits(hidden_CD: Tensor, weight_VD: Tensor, parts: Sequence[slice], out_CV: Tensor) -> None:
    for part in parts:
        product(hidden_CD, part_of(weight_VD, part).t(), out=columns_of(out_CV, part))


def pull_hidden(grad_CV: Tensor, weight_VD: Tensor, parts: Sequence[slice], out_CD: Tensor) -> None:
    for i, part in enumerate(reversed(parts)):  # the few columns first: what is rounded twice is small
        product(columns_of(grad_CV, part), part_of(weight_VD, part), out=out_CD, add=i > 0)


def pull_weight(grad_CV: Tensor, hidden_CD: Tensor, parts: Sequence[slice], out_VD: Tensor, add: bool = False) -> None:
    for part in parts:
        product(columns_of(grad_CV, part).t(), hidden_CD, out=part_of(out_VD, part), add=add)


def product(x: Tensor, y: Tensor, out: Tensor, add: bool = False) -> None:
    """out (+)= x @ y, accumulated in float32 or better whatever the dtype of x and y."""
    if out.dtype == x.dtype:
        torch.addmm(out, x, y, out=out) if add else torch.mm(x, y, out=out)
    elif x.device.type == "cuda" and out.dtype == torch.float32:
        torch.addmm(out, x, y, out_dtype=torch.float32, out=out) if add else torch.mm(
            x, y, out_dtype=torch.float32, out=out
        )
    else:  # widen a band of the larger factor at a time: a whole copy may be as large as the weight
        wide = torch.promote_types(out.dtype, torch.promote_types(x.dtype, torch.float32))
        if x.shape[0] < y.shape[1]:
            x, y, out = y.t(), x.t(), out.t()
        y = y.to(wide)
        band = max(1, (16 << 20) // (8 * max(1, x.shape[1], y.shape[1])))
        for i in range(0, x.shape[0], band):
            rows = slice(i, i + band)
            part = x[rows].to(wide) @ y
            out[rows] = out[rows] + part if add else part


def beyond_fp16(by_fact: Mapping[Any, Tensor], before: Tensor | None) -> Tensor:
    """The divisor of cotangents that makes a chunk's gradient fit into float16: 1 unless they are too large."""
    largest = torch.stack([g.abs().amax() if g.numel() else g.sum() for g in by_fact.values()]).amax() / 4096
    bound = largest.masked_fill(~largest.isfinite(), 1.0).clamp(min=1.0)
    return bound if before is None else torch.maximum(before, bound)
