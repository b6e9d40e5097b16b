"""headloss in torchtitan: an objective as the loss that takes the head.

    loss=HeadlossLoss.Config(objective={"terms": {"ce": "cross_entropy", "z": {"loss": "z_loss", "weight": 1e-4}}})

torchtitan gives its head to a `ChunkedLossWrapper`, and calls that with hidden states, labels and the global number of
valid tokens; this is one, without chunks of its own: `hl.Linear` makes them under `memory`.  A head that tensor
parallelism has sharded over the vocabulary is used as it is, DTensor or not; one that FSDP2 has sharded computes the
loss inside its own forward.

Follows `torchtitan.components.loss` and the trainer of torchtitan 0.3.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.loss import (  # type: ignore[import-not-found,unused-ignore]
    BaseLoss,
    ChunkedLossWrapper,
)

import headloss as hl
from headloss.deferred_checks import check_zero
from headloss.integrations.early_targets import EarlyTargets
from headloss.integrations.reduction_checks import check_means
from headloss.module import own_forward, own_hook
from headloss.record import with_fields

logger = logging.getLogger(__name__)


class HeadlossLoss(ChunkedLossWrapper):  # type: ignore[misc,unused-ignore]
    """(hidden, labels, global_valid_tokens, **inputs) -> (loss, metrics); labels are each row's target, -100 ignored.

    Token means divide by `global_valid_tokens`, without it by nothing, as torchtitan's losses do; means over sequences
    need `num_segments`, their global number.  Inputs of the losses (`advantage`, `old_logprob`, `segments`, `teacher`
    ...) are passed by name.  The trainer passes `positions` along; they say where documents begin, and become the
    segments of an objective that needs some.  The arguments of its RL trainer are read as its own losses read them:
    `advantages`, `generator_logprobs` as the old policy's, and `loss_mask`; tokens whose `generator_logprobs` are not
    finite are left out.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):  # type: ignore[misc,unused-ignore]
        # Not ChunkedLossWrapper's: graph_trainer makes a loss of its own from every config of that class.

        objective: dict[str, Any] = field(default_factory=lambda: {"terms": {"ce": "cross_entropy"}})
        """Terms and metrics, as `hl.Objective.from_config` reads them."""

        memory: str = "1GiB"
        """Budget of the rows x vocabulary buffers."""

        global_vocab_size: int | None = None
        """Of a head that spmd_types has sharded; by default its shards are taken to be of one width."""

        num_chunks: int | None = None
        loss_fn: Any = None
        """ChunkedLossWrapper's, refused: `memory` bounds the chunks, `objective` is the loss."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        for name, instead in (("num_chunks", "memory= bounds the chunks"), ("loss_fn", "objective= is the loss")):
            if getattr(config, name) is not None:
                raise ValueError(f"{name}: HeadlossLoss has no use for it; {instead}")
        if "loss" in getattr(compile_config, "components", ()) and getattr(compile_config, "enable", False):
            logger.info("compile.components: 'loss' has no effect on HeadlossLoss, whose sweeps are kernels already")
        self.objective = hl.Objective.from_config(config.objective)
        self.memory, self.vocab = config.memory, config.global_vocab_size
        self.lm_head: nn.Module | None = None
        self.last: hl.Output | None = None  # the record of the last call, without facts
        self.early = EarlyTargets()

    def before(self, labels: Tensor) -> None:
        """Start to copy what the host must know of the labels; called before the model's forward, so the loss does not
        wait.
        """
        self.early.start(_local(labels), labels)

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        **inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        checker = _type_checker()
        if checker is None:
            return self._evaluate(pred, labels, global_valid_tokens, **inputs)
        with checker.no_typecheck():  # plain local tensors, and collectives of our own
            loss, metrics = self._evaluate(pred, labels, global_valid_tokens, **inputs)
        checker.assert_type(loss, {"dp": checker.P, "cp": checker.P, "tp": checker.I})  # like torchtitan's own loss
        return loss, metrics

    def _evaluate(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None, **inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        head = self.lm_head
        if head is None:
            raise RuntimeError("lm_head: not set; call set_lm_head(model.lm_head) and let the model skip its head")
        transform = _transform(head)
        if not isinstance(pred, Tensor) or not isinstance(labels, Tensor):
            raise TypeError("pred: wanted one tensor of hidden states; several predictions are not supported")
        num_items: Any = 1 if global_valid_tokens is None else global_valid_tokens
        whole, labels = labels, _local(labels)
        rl = "generator_logprobs" in inputs
        if rl:
            old, mask = _local(inputs.pop("generator_logprobs")), _local(inputs.pop("loss_mask"))
            labels = labels.masked_fill(~(mask.bool() & old.isfinite()), -100)
            given = {"old_logprob": old, "advantage": _local(inputs.pop("advantages"))}
            inputs |= {name: x for name, x in given.items() if self._asks_for(name)}
        if "positions" in inputs and not self._asks_for("positions"):
            positions = _local(inputs.pop("positions"))
            if "segments" not in inputs and any(t.needs_segments for t in self.objective.terms.values()):
                inputs["segments"] = _documents(positions.expand_as(labels))

        counted = {} if global_valid_tokens is None else {"num_items": num_items}
        check_means(
            self.objective,
            {**inputs, **counted},
            "and torchtitan adds up micro-batches",
            "as the input num_segments, or use a reduction over tokens",
            "as global_valid_tokens",
        )
        targets = labels if rl or "segments" in inputs else self.early.take(labels, whole)

        def evaluate(hidden: Tensor) -> hl.Output:
            return self.objective(self._source(head, hidden, transform), targets, num_items=num_items, **inputs)

        out = _inside(head, evaluate, pred) if _is_fsdp(head) else evaluate(pred)
        self.last = with_fields(out, loss=out.loss.detach(), facts=hl.Facts({}))
        found = summable(out, global_valid_tokens, inputs.get("num_segments"))
        if rl:  # its trainer adds up all metrics but /max
            least = [name for name in found if name.endswith("/min")]
            found |= {f"minus_{name.removesuffix('/min')}/max": -found.pop(name) for name in least}
        return out.loss, found

    def _asks_for(self, name: str) -> bool:
        calls = [t.call(None, {}) for t in self.objective.terms.values()] + [c for _, c in self.objective.metrics]
        return any(name in call.input_names for call in calls)

    def _source(self, head: nn.Module, hidden: Tensor, transform: Mapping[str, Any]) -> hl.Linear:
        weight: Any = head.weight
        bias: Any = getattr(head, "bias", None)
        options, shard = {"memory": self.memory, **transform}, None
        dtype = options.pop("dtype", None)
        if dtype is not None:
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if hasattr(weight, "device_mesh"):
            from headloss.parallel.dtensor import shard_of, spread_source

            # Not FSDP's, whose forward would have made it whole: what is left is tensor parallelism.
            if hasattr(hidden, "device_mesh"):
                return spread_source(hidden, weight, bias, **options)
            shard = shard_of(weight.device_mesh, weight.shape[0], options.get("vocab"))
        elif (group := _spmd_types_group()) is not None:
            # Plain local tensors: hidden is R, so the gradient wanted of it is P, each rank's own part of the sum.
            vocab = self.vocab = self.vocab or _columns_of_all(group, weight)
            width = -(-vocab // group.size())
            shard = hl.VocabShard(group, min(vocab, width * group.rank()), vocab, width=width, partial_hidden=True)
        return hl.Linear(hidden, weight, bias, shard=shard, **options)


def _transform(head: nn.Module) -> dict[str, Any]:
    """What a head does besides its product, as options of `hl.Linear`; "dtype": the one that it multiplies in."""
    forward: Any = type(head).forward
    more = own_hook(head, ("torch", "torchtitan"))  # FSDP2's and tensor parallelism's pass
    placed = _only_placed(head)
    if more is None and forward.__module__.startswith("torchtitan.") and (placed or "forward" not in vars(head)):
        if forward.__qualname__ == "SoftCappedLinear.forward":
            return {"scale": head.output_multiplier, "softcap": head.output_soft_cap_temp}
        if forward.__qualname__ == "CastLinear.forward":
            return {"dtype": head.compute_dtype}
    more = more or own_forward(head, around=placed)
    if more is not None:
        raise TypeError(
            f"lm_head: it has {more}, which HeadlossLoss would leave out, since it multiplies by the weight itself; "
            f"merge it first, or use torchtitan's own loss"
        )
    return head.source_options if isinstance(head, hl.FusedLMHead) else {}


def _only_placed(head: nn.Module) -> bool:
    """Whether a forward set on the module is the one that `Module.parallelize` wraps around that of its class: it only
    declares layouts and, with an input that stays in its layout, computes nothing."""
    own = vars(head).get("forward")
    if not inspect.isfunction(own) or not own.__module__.startswith("torchtitan."):
        return False
    inner = inspect.getclosurevars(own).nonlocals.get("fn")
    layout = getattr(head, "_sharding_config", None)
    given, wanted = (getattr(layout, name, None) for name in ("in_src_shardings", "in_dst_shardings"))
    return getattr(inner, "__func__", None) is type(head).forward and wanted in (None, given)


def summable(out: hl.Output, tokens: Tensor | None, segments: Any = None) -> dict[str, Tensor]:
    """The record's metrics in the form that torchtitan adds up: a rank's share of a global mean ends in /mean, extremes
    in /min and /max.  Metrics that are neither (a standard deviation, a perplexity) are left out."""
    found = {f"{name}/mean": value.detach() for name, value in out.terms.items()}
    for name, metric in out.metrics.items():
        if metric.kind in ("min", "max"):
            found[f"{name.removesuffix(f'_{metric.kind}')}/{metric.kind}"] = metric.value.float()
        elif metric.kind == "mean":
            count = {"token": tokens, "segment": segments}.get(metric.per)
            if count is not None:
                found[f"{name.removesuffix('_mean')}/mean"] = (metric.parts[0] / count).float()
    return found


def _documents(positions: Tensor) -> hl.Segments:
    """torchtitan's lines begin with position 0, unless context parallelism has cut them."""
    message = (
        "positions: {} lines begin inside a document, the rest of which other ranks have (context parallelism), and a "
        "term is over whole ones; pass segments=hl.Segments.from_ids(ids, num_segments, group) of all ranks"
    )
    check_zero("positions: a line begins inside a document", ((positions[..., :1] != 0).sum(), message))
    return hl.Segments.from_position_ids(positions)


def _local(x: Any) -> Any:
    return x.to_local() if type(x) is not Tensor and hasattr(x, "to_local") else x


def _spmd_types_group() -> Any:
    """The tensor-parallel group of torchtitan's spmd_types backend, under which shards are plain tensors."""
    try:
        from torchtitan.distributed.spmd_types import (  # type: ignore[import-not-found,unused-ignore]
            current_spmd_mesh,
            spmd_mesh_size,
        )
    except ImportError:
        return None
    return current_spmd_mesh().get_group("tp") if spmd_mesh_size("tp") > 1 else None


def _type_checker() -> Any:
    """The package spmd_types, if it is checking (`debug.spmd_typechecking`)."""
    checker = sys.modules.get("spmd_types")
    return checker if checker is not None and checker.is_type_checking() else None


def _columns_of_all(group: Any, weight: Tensor) -> int:
    """How many columns all ranks hold together; shards may have different widths."""
    columns = torch.tensor(len(weight), dtype=torch.int64, device=weight.device)
    dist.all_reduce(columns, group=group)
    return int(columns)


def _is_fsdp(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _inside(head: nn.Module, evaluate: Any, hidden: Tensor) -> Any:
    """Run `evaluate(hidden)` as the head's own forward, in which FSDP2's hooks have gathered its weight."""
    own = vars(head).get("forward")
    head.forward = evaluate
    try:
        return head(hidden)
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own
