"""Where logits come from: `Logits` holds them, `Linear` computes them from hidden states a chunk of rows at a time.

Dimension key:  N rows   V vocabulary   D hidden size

    z = softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)        s = z / temperature

A source is a frozen record of what the user passed; `engine/heads.py` works on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from headloss.immutable import summary
from headloss.options import check_temperatures, is_number, shape_or_type, shown
from headloss.options import parse_bytes as parse_bytes
from headloss.parallel.shard import VocabShard
from headloss.segments import check_dense, check_device, integers, shallow
from headloss.served import from_dataset, from_sglang, from_vllm
from headloss.vocab_ids import check_vocab_ids


@dataclass(frozen=True, eq=False, repr=False)
class Logits:
    """Logits that are stored in full: (..., V).

    `inplace=True` lets the gradient overwrite them, even in the forward pass if that saves a sweep: there is no second
    (..., V) buffer, only one backward, and nothing else may read them after the call.  `vocab`: columns from this one
    on are padding, which does not count and has a gradient of 0.  `vocab_ids` (V,): column c is token `vocab_ids[c]` of
    a larger vocabulary, whose numbers targets and teachers keep.
    """

    logits: Tensor
    _: KW_ONLY
    temperature: float | Tensor = 1.0
    scale: float = 1.0
    softcap: float | None = None
    shard: VocabShard | None = None
    inplace: bool = False
    vocab: int = None  # type: ignore[assignment]  # of the whole vocabulary, once it is made
    vocab_ids: Tensor | None = None
    __repr__ = summary

    def __post_init__(self) -> None:
        x = self.logits
        _check_matrix("logits", x)
        _settle_vocab(self, x.shape[-1])
        _check_transform(self, x)
        if not self.inplace:
            return
        if x.requires_grad and x.is_leaf:
            raise ValueError("inplace: logits, a leaf that requires grad, cannot be overwritten; use inplace=False")
        if overlaps(x):
            raise ValueError(
                f"inplace: logits of shape {tuple(self.logits.shape)} and strides {self.logits.stride()} have elements "
                f"that share memory (an expanded tensor?), so a gradient cannot overwrite them; use inplace=False"
            )

    is_fp16 = False  # the gradient is written in the caller's own dtype, at the caller's own scale

    @property
    def leading(self) -> tuple[int, ...]:
        return tuple(self.logits.shape[:-1])

    @property
    def columns(self) -> int:
        """How many columns of the vocabulary this source holds."""
        return self.vocab if self.shard is None else self.shard.columns(self.logits.shape[-1])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.logits,)

    @property
    def device(self) -> torch.device:
        return self.logits.device

    @property
    def fact_dtype(self) -> torch.dtype:
        return torch.promote_types(self.logits.dtype, torch.float32)


@dataclass(frozen=True, eq=False, repr=False)
class Linear:
    """Logits that are never stored in full, from hidden (..., D) and the head's weight (V, D) and bias (V,).

    `memory` bounds what a call holds beyond inputs and results ("1GiB", "200MB" or bytes); the float32 accumulator of
    the weight's gradient comes on top if it takes more than half of that.  `logits_dtype` is the dtype of a
    chunk's logits (the hidden's by default), `weight_grad_dtype` that of the accumulator (at least float32).
    `weight_grad_into`, "grad" or "main_grad", makes the backward add to `weight.grad` or `weight.main_grad` itself.
    `vocab` is the size of the vocabulary if the weight has more rows: the rows from there on are padding, as in Logits.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    _: KW_ONLY
    temperature: float | Tensor = 1.0
    scale: float = 1.0
    softcap: float | None = None
    shard: VocabShard | None = None
    logits_dtype: torch.dtype | None = None
    weight_grad_dtype: torch.dtype | None = None
    memory: str | int = "1GiB"
    weight_grad_into: str | None = None
    vocab: int = None  # type: ignore[assignment]  # of the whole vocabulary, once it is made
    vocab_ids: Tensor | None = None
    __repr__ = summary

    def __post_init__(self) -> None:
        hidden, weight, bias = self.hidden, self.weight, self.bias
        _check_matrix("hidden", hidden)
        # Kept, because a backward runs outside autocast and must see the same logits as the forward.
        autocast = _autocast(hidden)
        object.__setattr__(self, "_gemm_dtype", autocast or hidden.dtype)
        _check_matrix("weight", weight)
        if weight.ndim != 2:
            hint = "; an empty or flat weight is what ZeRO-3 and FSDP leave outside its forward: use hl.FusedLMHead"
            hint *= weight.ndim == 1
            raise ValueError(f"weight: wanted (vocabulary, hidden size), got shape {tuple(weight.shape)}{hint}")
        if hidden.shape[-1] != weight.shape[-1]:
            wanted = f"(vocabulary, {hidden.shape[-1]}) to match hidden {tuple(hidden.shape)}"
            hint = "; pass weight.T" if hidden.shape[-1] == weight.shape[0] else ""
            raise ValueError(f"weight: wanted {wanted}, got {tuple(weight.shape)}{hint}")
        if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
            raise ValueError(f"bias: wanted shape ({weight.shape[0]},), got {shape_or_type(bias)}")
        if bias is not None or weight.device != hidden.device or weight.dtype != hidden.dtype:
            for name, x in (("weight", weight),) if bias is None else (("weight", weight), ("bias", bias)):
                check_dense(name, x)
                check_device(name, x, hidden.device, "hidden")
                if x.dtype != hidden.dtype and not autocast:
                    said = f"{name}: is {x.dtype}, but hidden is {hidden.dtype}"
                    raise TypeError(f"{said}; cast one, or run under torch.autocast")
        if self.logits_dtype is not None or self.weight_grad_dtype is not None:
            for name, dtype in (("logits_dtype", self.logits_dtype), ("weight_grad_dtype", self.weight_grad_dtype)):
                if dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
                    raise TypeError(f"{name}: wanted a floating-point dtype of 16 bits or more, got {dtype!r}")
        if self.weight_grad_into not in (None, "grad", "main_grad"):
            raise ValueError(f'weight_grad_into: wanted None, "grad" or "main_grad", got {self.weight_grad_into!r}')
        if self.weight_grad_into is not None and torch.compiler.is_compiling():
            raise ValueError("weight_grad_into: a compiled graph returns its gradients; use None")
        _check_transform(self, self.hidden)
        _settle_vocab(self, self.weight.shape[0])
        if self.memory != "1GiB":
            parse_bytes(self.memory)

    @property
    def leading(self) -> tuple[int, ...]:
        return tuple(self.hidden.shape[:-1])

    @property
    def columns(self) -> int:
        """How many columns of the vocabulary this source holds."""
        return self.vocab if self.shard is None else self.shard.columns(self.weight.shape[0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.hidden, self.weight) if self.bias is None else (self.hidden, self.weight, self.bias)

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def gemm_dtype(self) -> torch.dtype:
        """The dtype of the GEMMs' operands: the tensors' own, or autocast's."""
        return self._gemm_dtype  # type: ignore[attr-defined]

    @property
    def chunk_dtype(self) -> torch.dtype:
        return self.logits_dtype or self.gemm_dtype

    @property
    def fact_dtype(self) -> torch.dtype:
        return torch.promote_types(self.chunk_dtype, torch.float32)

    @property
    def is_fp16(self) -> bool:
        """Whether a chunk's gradient would underflow if it were written at its true scale."""
        return self.gemm_dtype == torch.float16

    @property
    def row_bytes(self) -> int:
        """Bytes of rows x vocabulary buffers per row of a chunk: its logits, and their gradient if it is a copy.

        Over a shard two chunks exist at once: one is gathered while the other is made.  All ranks take the same width,
        for they must walk the same chunks.
        """
        bytes_ = self.chunk_dtype.itemsize * (1 if self.shard is None else 2)
        bytes_ += self.gemm_dtype.itemsize if self.chunk_dtype != self.gemm_dtype else 0
        return bytes_ * padded(self.vocab if self.shard is None else self.shard.even_width)

    def chunk_rows(self, extra: int = 0, fixed_bytes: Sequence[int] = (), gathered: int = 0) -> int:
        """How many rows a chunk of logits may have; see `engine.budget` for what else takes memory."""
        budget, row_bytes = parse_bytes(self.memory), self.row_bytes + extra
        if row_bytes > budget:
            raise ValueError(
                f"memory: one row of {self.columns} logits takes {row_bytes} bytes, the budget is {budget}; "
                f"give at least {row_bytes}"
            )
        return max(1, self.room(fixed_bytes, row_bytes) // max(1, row_bytes + gathered))

    def room(self, fixed_bytes: Sequence[int], least: int = 0) -> int:
        """The budget left for rows.  An item of `fixed_bytes` counts only if it leaves `least` and half the budget."""
        left = budget = parse_bytes(self.memory)
        for n in fixed_bytes:
            left -= n if left - n >= max(least, budget // 2) else 0
        return left


def padded(columns: int, on_cpu: bool = False) -> int:
    """The width of a chunk's rows, padded on a GPU, which reads and multiplies aligned rows faster; on a CPU products
    over gaps are slow."""
    return columns if columns < 4096 or on_cpu else -(-columns // 64) * 64


Source = Logits | Linear


@dataclass(frozen=True, eq=False, repr=False)
class Sparse:
    """A teacher that names K columns per row: ids (..., K), padded with -1, and their log-probabilities (..., K).

    Top-K of a served model, sampled tokens, or soft labels: the log-probabilities need not sum to 1, may be -inf, and
    ids may repeat (their probabilities then add up) and come in any order.
    """

    ids: Tensor
    logprobs: Tensor
    __repr__ = summary

    def __post_init__(self) -> None:
        for name, x in (("ids", self.ids), ("logprobs", self.logprobs)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name}: wanted a tensor, got {type(x).__name__}")
        object.__setattr__(self, "ids", integers("ids", self.ids))
        if not self.logprobs.dtype.is_floating_point or self.logprobs.dtype.itemsize < 4:
            raise TypeError(f"logprobs: wanted float32 or better, got {self.logprobs.dtype}")
        check_dense("logprobs", self.logprobs)
        if self.ids.ndim < 2 or self.ids.shape != self.logprobs.shape or self.ids.shape[-1] < 1:
            raise ValueError(
                f"ids: wanted (rows, K) like logprobs, got {tuple(self.ids.shape)} and {tuple(self.logprobs.shape)}"
            )
        check_device("logprobs", self.logprobs, self.ids.device, "ids")

    @classmethod
    def from_vllm(cls, prompt_logprobs: Any, **options: Any) -> Sparse:
        """From vLLM's `prompt_logprobs`, of one sequence or of several; see `headloss.served.from_vllm`."""
        return cls(*from_vllm(prompt_logprobs, **options))

    @classmethod
    def from_sglang(cls, input_top_logprobs: Any, **options: Any) -> Sparse:
        """From SGLang's `input_top_logprobs`, of one sequence or of several; see `headloss.served.from_sglang`."""
        return cls(*from_sglang(input_top_logprobs, **options))

    @classmethod
    def from_dataset(cls, batch: Any, **options: Any) -> Sparse:
        """From the columns that `headloss teach` writes; see `headloss.served.from_dataset`."""
        return cls(*from_dataset(batch, **options))

    @property
    def leading(self) -> tuple[int, ...]:
        return tuple(self.ids.shape[:-1])

    @property
    def device(self) -> torch.device:
        return self.ids.device


Teacher = Logits | Linear | Sparse


def tensors_in(source: Source) -> dict[str, Tensor]:
    """Every tensor in a source, by name: those of `source.tensors`, and a temperature if it is one."""
    names = ("logits", "temperature") if isinstance(source, Logits) else ("hidden", "weight", "bias", "temperature")
    return {name: x for name in names if isinstance(x := getattr(source, name), Tensor)}


def without_tensors(source: Source) -> Source:
    """The same source with None in place of its tensors, while autograd keeps them."""
    other = object.__new__(type(source))
    other.__dict__.update(source.__dict__, **_WITHOUT[type(source)])
    if isinstance(source.temperature, Tensor):
        other.__dict__["temperature"] = None
    return other


_WITHOUT = {Logits: {"logits": None}, Linear: dict.fromkeys(("hidden", "weight", "bias"))}


def with_tensors(source: Source, tensors: Mapping[str, Any]) -> Source:
    """The same source with other tensors, or with None in their place while autograd keeps them."""
    if torch.compiler.is_compiling():  # torch before 2.12 knows no __dict__ of a frozen record
        other = type(source)(**({name: getattr(source, name) for name in _FIELDS[type(source)]} | dict(tensors)))
        tensors = {"_gemm_dtype": source.gemm_dtype} if isinstance(source, Linear) else {}  # as it was made
    else:
        other = shallow(source)
    for name, x in tensors.items():
        object.__setattr__(other, name, x)
    return other


_FIELDS = {kind: [f.name for f in fields(kind)] for kind in (Logits, Linear)}


def overlaps(x: Tensor) -> bool:
    """Whether two elements may share memory: some stride is within the reach of the smaller ones."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _autocast(x: Tensor) -> torch.dtype | None:
    kind = x.device.type if torch._C._is_any_autocast_enabled() else "meta"  # for which it never is
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def _settle_vocab(source: Logits | Linear, held: int) -> None:
    """Set the size of the whole vocabulary: as given, the shard's, or the number of columns held."""
    said: Any = source.vocab
    if said is None and source.shard is None and source.vocab_ids is None:
        object.__setattr__(source, "vocab", held)
        return
    if source.shard is not None and not isinstance(source.shard, VocabShard):
        raise TypeError(f"shard: wanted hl.VocabShard, got {type(source.shard).__name__}")
    if said is not None and (isinstance(said, bool) or not isinstance(said, int)):
        raise TypeError(f"vocab: wanted an integer, got {type(said).__name__}")
    if source.shard is not None and said not in (None, source.shard.vocab):
        raise ValueError(f"vocab: is {said}, but the shard's is {source.shard.vocab}; leave out vocab=")
    if source.shard is None and said is not None and not 1 <= said <= held:
        raise ValueError(f"vocab: wanted at most {held}, the number of columns, and at least 1, got {said}")
    object.__setattr__(source, "vocab", said or (held if source.shard is None else source.shard.vocab))
    check_vocab_ids(source)


def _check_matrix(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(x).__name__}{'; pass its .weight' * hasattr(x, 'weight')}")
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise TypeError(f"{name}: wanted a floating-point tensor of 16 bits or more, got {x.dtype}")
    if x.is_nested or x.layout is not torch.strided:
        check_dense(name, x)
    if x.ndim < 2 and (x.ndim < 1 or name != "weight"):
        raise ValueError(f"{name}: wanted at least two dimensions (rows, features), got shape {tuple(x.shape)}")


def _check_transform(source: Logits | Linear, x: Tensor) -> None:
    T = source.temperature
    alone = type(T) is float and source.softcap is None and not torch.compiler.is_compiling()
    if alone and T > 0 and T - T == 0 and type(source.scale) is float and source.scale == 1.0:
        return  # nothing was given but a valid temperature
    if isinstance(T, Tensor):
        check_dense("temperature", T)
        if T.requires_grad:
            raise ValueError("temperature: requires grad, but no gradient flows to a temperature; pass it detached")
        if T.dtype.is_complex or T.dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64):
            raise TypeError(f"temperature: wanted real numbers, got a tensor of {T.dtype}; pass temperature.float()")
        if T.ndim and tuple(T.shape) != tuple(x.shape[:-1]):
            raise ValueError(f"temperature: wanted a number or shape {tuple(x.shape[:-1])}, got {tuple(T.shape)}")
        if not torch.compiler.is_compiling():
            check_temperatures(T)
        if T.ndim:
            check_device("temperature", T, x.device)
    else:
        check_number("temperature", T)
    if source.softcap is not None:
        check_number("softcap", source.softcap)
    check_number("scale", source.scale)


def check_number(name: str, value: Any) -> None:
    """Check a temperature, softcap or scale.  A graph's symbol passes: the operator will check its number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: wanted a number, got {type(value).__name__}")
    if is_symbol(value):
        return
    if not is_number(value) or (value == 0 if name == "scale" else value <= 0):
        wanted = "a finite number other than 0" if name == "scale" else "a positive number"
        raise ValueError(f"{name}: wanted {wanted}, got {shown(value)}")


def is_symbol(x: Any) -> bool:
    """Whether a graph holds this number as a symbol, because the next call may bring another."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # loads sympy, as a compiler has already

    return not has_static_value(x)
