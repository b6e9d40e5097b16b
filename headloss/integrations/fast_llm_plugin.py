"""`type: headloss` among the losses of a head of Fast-LLM: its children share one sweep, each loss as Fast-LLM has it.

    head:
      losses:
        all:
          type: headloss
          losses: {ce: {type: label, weight: 0.1}, z: {type: z_loss, weight: 1.0e-4}, rl: {type: gspo}}

    python -m headloss.integrations.fast_llm_cli train gpt --config train.yaml        # in place of `fast-llm`

Fast-LLM has no plugin hook, so this module must be imported before Fast-LLM starts; the command above does that.
Follows its main branch of July 2026.
"""

import functools
import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

import headloss as hl
from headloss.integrations.fast_llm import FastLLMLosses
from headloss.integrations.fast_llm_terms import KEYS

_config: Any = importlib.import_module("fast_llm.config")
_losses: Any = importlib.import_module("fast_llm.layers.language_model.loss.config")
_parallel: Any = importlib.import_module("fast_llm.engine.distributed.config")
REDUCE = {"sum": dist.ReduceOp.SUM, "maximum": dist.ReduceOp.MAX, "minimum": dist.ReduceOp.MIN}


class HeadlossLoss(FastLLMLosses):
    """A loss of Fast-LLM's head, made from its config as Fast-LLM makes its own."""

    def __init__(
        self,
        config: Any,
        distributed_config: Any,
        *,
        name: str,
        prediction_distance: int = 1,
        prediction_heads: int = 1,
        vocab_parallel: bool = False,
        num_splits: int = 1,
        logits_scale_factor: float = 1.0,
        weight: float = 1.0,
        register_loss: bool = False,
    ) -> None:
        blocks = {child: block_of(child, loss, distributed_config) for child, loss in config.losses.items()}
        alone = len(blocks) == 1 and next(iter(blocks.values()))["weight"] == 1.0  # then the loss is the head's total
        super().__init__(
            blocks,
            logits_scale_factor=logits_scale_factor * config.logits_scale_factor,
            weight=weight * config.weight,
            prediction_distance=prediction_distance,
            num_splits=num_splits,
            register=register_loss or not alone,
        )
        self.config = config
        dim = lambda name: distributed_config.get_distributed_dim(getattr(_parallel.DistributedDimNames, name))
        self._tensor, self._sequence_data = dim("tensor"), dim("sequence_data")
        self._vocab_parallel = distributed_config.tensor_parallel > 1 and vocab_parallel
        self._sequence_parallel = distributed_config.sequence_tensor_parallel and not self._vocab_parallel
        if self._sequence_parallel and self._sequence_data.size > 1 and _has(self.blocks, "gspo"):
            raise ValueError(
                "sequence_tensor_parallel: gspo's documents would cross two groups of ranks; set "
                "embeddings.vocab_parallel, or sequence_data_parallel = 1"
            )
        if _has(self.blocks, "dpo") and (self._sequence_parallel or self._sequence_data.size > 1):
            name = "sequence_tensor_parallel" if self._sequence_parallel else "sequence_data_parallel"
            instead = "set embeddings.vocab_parallel" if self._sequence_parallel else "use 1"
            raise ValueError(f"{name}: dpo's spans are those of whole sequences, and ranks have parts; {instead}")

    # Groups exist only after the model: they are looked up when a loss is computed.

    def _shard(self, logits: Tensor) -> hl.VocabShard | None:
        if not self._vocab_parallel:
            return None
        columns, ranks = logits.shape[-1], self._tensor.size
        return hl.VocabShard(torchs(self._tensor.group), columns * self._tensor.rank, columns * ranks, width=columns)

    def _documents_group(self) -> Any:
        if self._sequence_parallel:
            return torchs(self._tensor.group)
        return torchs(self._sequence_data.group) if self._sequence_data.size > 1 else None

    def _local_rows(self, x: Tensor) -> Tensor:
        return x.chunk(self._tensor.size)[self._tensor.rank] if self._sequence_parallel else x

    def _over_rows(self, name: str, x: Tensor) -> Tensor:
        x = x.detach()
        if self._sequence_parallel:
            x = x.clone()
            dist.all_reduce(x, op=REDUCE[self._reductions().get(name, "sum")], group=self._tensor.group)
        return x


@functools.cache
def torchs(group: Any) -> dist.ProcessGroup:
    """Fast-LLM's groups are bare backends that torch knows nothing of; its collectives want a `ProcessGroup`."""
    if isinstance(group, dist.ProcessGroup):
        return group
    kind = getattr(dist.ProcessGroup.BackendType, group.name().upper())
    whole = dist.ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]
    whole._register_backend(torch.device("cuda" if group.name() == "nccl" else "cpu"), kind, group)
    whole._set_default_backend(kind)
    return whole


def block_of(name: str, loss: Any, distributed_config: Any) -> dict[str, Any]:
    """A loss of Fast-LLM's config, in the form that `FastLLMLosses` reads."""
    kind = loss.dynamic_type_name
    if kind not in KEYS:
        raise ValueError(f"losses.{name}: headloss does not know the type {kind!r}; there are {', '.join(KEYS)}")
    plain = lambda x: getattr(x, "value", x)  # an enum's value
    block = {
        key: plain(getattr(loss, key)) for key in ("weight", "logits_scale_factor", *KEYS[kind]) if hasattr(loss, key)
    }
    if "metrics" in block and distributed_config.pipeline_parallel > 1:
        if block["metrics"] not in ("none", "auto"):
            raise ValueError(f"losses.{name}.metrics: not with pipeline_parallel > 1, as Fast-LLM has it; use none")
        block["metrics"] = "none"
    return {"type": kind, **block}


def _has(blocks: Mapping[str, Mapping[str, Any]], kind: str) -> bool:
    return any(block["type"] == kind for block in blocks.values())


@_config.config_class(dynamic_type={_losses.LanguageModelLossConfig: "headloss"})
class HeadlossLossConfig(_losses.LanguageModelLossConfig):
    """Losses of Fast-LLM that headloss computes in one sweep."""

    _abstract: ClassVar[bool] = False

    losses: dict[str, _losses.LanguageModelLossConfig] = _config.Field(
        default_factory=dict,
        desc="The losses that share the sweep, in any combination and each with its own `logits_scale_factor`.",
        hint=_config.FieldHint.core,
    )

    def _validate(self) -> None:
        super()._validate()
        if not self.losses:
            raise ValueError("losses: headloss needs at least one, such as {ce: {type: label}}")

    @property
    def loss_class(self) -> type[HeadlossLoss]:
        return HeadlossLoss

    def get_reference_models(self) -> set[str]:
        return {name for loss in self.losses.values() for name in loss.get_reference_models()}
