"""headloss in Megatron-LM: losses over a vocabulary that tensor-parallel ranks share.

Dimension key:  s sequence   b batch   v columns of the vocabulary on this rank   V all of them   h hidden size

    loss_bs = model(ids, positions, mask, labels=labels, output_processor=OutputProcessor(objective))   # any objective
    replace_cross_entropy()                                   # or: Megatron's own loss, in every model, fused or not
    loss_sb = vocab_parallel_cross_entropy(logits_sbv, target_sb, label_smoothing=0.1)     # as Megatron calls it

One all-gather where Megatron makes three all-reduces.  Follows megatron-core 0.16 to 0.19, `models.gpt.gpt_model`,
`models.common.language_module`, `tensor_parallel.cross_entropy` and `fusions.fused_cross_entropy`.  The group is the
model's; functions on logits take it from `megatron.core.parallel_state` unless it is given, and do not need Megatron
otherwise.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import headloss as hl
from headloss.deferred_checks import check_zero
from headloss.integrations.early_targets import EarlyTargets
from headloss.integrations.reduction_checks import check_means
from headloss.module import check_objective, check_source_options, own_forward, own_hook
from headloss.record import with_fields


class OutputProcessor:
    """For `GPTModel.forward(output_processor=...)` of megatron-core 0.19: hidden states in, losses of tokens out.

    The model's logits are never stored in full.  The result is [b, s] like Megatron's own: every token that counts
    carries the objective's mean, so that Megatron's masked sum is the objective's sum over tokens, and its division by
    the number of tokens gives the mean.  A token counts if its label is not -100 and its `loss_mask` is not 0; pass
    other weights as an input of your own (`row_weight`).  Inputs of the losses come as
    `output_processor_context=hl.Inputs(advantage=..., segments=...)`, in the shape of the labels, and with them counts:
    means over sequences need `num_segments`.  `last` is the record of the last call.  `watch(model)` lets the first
    copy to the host start before the model does.

    With tensor parallelism the vocabulary is sharded, with sequence parallelism hidden states are gathered first, and
    with context parallelism each rank has its own tokens and segments carry their group.  Multi-token prediction
    computes its losses before this is called, by `compute_language_model_loss`: see `replace_cross_entropy`.
    """

    def __init__(
        self, objective: hl.Objective, *, vocab: int | None = None, tp_group: Any = None, **source_options: Any
    ) -> None:
        check_objective(objective)
        self.objective, self.vocab, self.group = objective, vocab, tp_group
        self.options = check_source_options(source_options)
        self.last: hl.Output | None = None
        self.early = EarlyTargets()

    def watch(self, model: Any) -> Any:
        """Start to copy what the host must know of the labels before the model's forward, so that the loss does not
        wait for it; returns the hook's handle.
        """

        def before(model: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
            if kwargs.get("output_processor") is self and kwargs.get("labels") is not None:
                labels, mask = kwargs["labels"], kwargs.get("loss_mask")
                self.early.start(_targets(labels, mask), labels, mask)

        return model.register_forward_pre_hook(before, with_kwargs=True)

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor | None,
        loss_mask: Tensor | None = None,
        context: Mapping[str, Any] | None = None,
        scale_logits: Any = None,
        **_: Any,
    ) -> Tensor:
        if labels is None:
            raise ValueError("labels: the objective needs targets; leave output_processor out to get logits")
        _check_mask(loss_mask)
        given = dict(context or {})
        targets, call = _targets(labels, loss_mask), {"num_items": 1, **given}
        ready = self.early.take(targets, labels, loss_mask) if "segments" not in call else targets
        check_means(
            self.objective, given, "and Megatron divides by tokens",
            "in output_processor_context, and let loss_func divide by nothing",
            "as num_items in output_processor_context",
        )  # fmt: skip
        _check_product(output_layer)
        if getattr(output_layer, "bias", None) is not None:
            raise ValueError("output_layer: it has a bias, which the objective would leave out; make it without one")
        group = self.group if self.group is not None else getattr(output_layer, "tp_group", None)
        gathered = bool(getattr(output_layer, "sequence_parallel", False))
        if gathered:
            parallel = importlib.import_module("megatron.core.tensor_parallel")
            hidden_states = parallel.gather_from_sequence_parallel_region(hidden_states, group=group)
        scale = 1.0 if scale_logits is None else _factor(scale_logits, self.options)
        source = linear_source(
            hidden_states.transpose(0, 1), output_layer.weight if output_weight is None else output_weight,
            group, vocab=self.vocab, partial_hidden=gathered, **{"scale": scale, **self.options},
        )  # fmt: skip
        out = self.objective(source, ready, **call)
        self.last = with_fields(out, loss=out.loss.detach(), facts=hl.Facts({}))
        counts = (targets != -100).to(out.loss.dtype)
        loss, sharing = out.loss, getattr(call.get("segments"), "group", None)
        if sharing is not None:
            loss = _where_counted(loss, counts, sharing)
        return loss * counts / counts.sum().clamp(min=1)


def _factor(scale_logits: Any, options: Mapping[str, Any]) -> float:
    """MuP's factor of all logits; or what the options say, if that is what the model does."""
    at = torch.tensor([0.0, 1.0, -3.0, 1e3], dtype=torch.float32, device="cpu")
    made, cap = scale_logits(at), options.get("softcap")
    scale = float(options.get("scale", 1.0 if cap is not None else made[1]))
    wanted = scale * at if cap is None else cap * (scale * at / cap).tanh()
    if not torch.allclose(made, wanted, rtol=1e-3, atol=1e-6):
        raise ValueError(
            f"scale_logits: the model turns logits {at.tolist()} into {made.tolist()}, but scale={scale} and "
            f"softcap={cap} do not; pass OutputProcessor(..., scale=, softcap=) as the model applies them"
        )
    return scale


def _check_mask(loss_mask: Tensor | None) -> None:
    """Check that a mask only says which tokens count, because Megatron's `loss_func` multiplies by it again."""
    if loss_mask is None or not loss_mask.is_floating_point():
        return
    message = (
        "loss_mask: {} tokens have a weight other than 0 or 1; pass weights as an input of the objective "
        "(row_weight=...) in output_processor_context"
    )
    check_zero("loss_mask: a weight is neither 0 nor 1", (((loss_mask != 0) & (loss_mask != 1)).sum(), message))


def _check_product(layer: Any) -> None:
    """Check that the layer only multiplies by its weight, because that is all the objective does."""
    if not isinstance(layer, nn.Module):
        return
    if getattr(getattr(layer, "config", None), "defer_embedding_wgrad_compute", False):
        raise ValueError(
            "output_layer: defer_embedding_wgrad_compute lets the layer keep its input for a later gradient, and the "
            "objective makes that gradient itself; turn it off"
        )
    more = own_forward(layer, "megatron.core.") or own_hook(layer, ("torch", "megatron"))
    if more is not None:
        raise TypeError(
            f"output_layer: it has {more}, which the objective would leave out; merge it first, or leave "
            f"output_processor out"
        )


def _where_counted(loss: Tensor, counts: Tensor, group: Any) -> Tensor:
    """This rank's part, by its tokens, of the loss of all ranks that share segments: the loss of a whole segment is
    counted on the first of them, which may have no token to report it with.  The gradient is that of `loss`."""
    both = torch.stack([loss.detach(), counts.sum()])
    dist.all_reduce(both, group=group)
    return both[0] * counts.sum() / both[1].clamp(min=1) + (loss - loss.detach())


def _targets(labels: Tensor, loss_mask: Tensor | None) -> Tensor:
    return labels if loss_mask is None else labels.masked_fill(loss_mask == 0, -100)


def replace_cross_entropy() -> None:
    """Make every language model of Megatron compute its loss here, whatever `cross_entropy_loss_fusion` and
    `cross_entropy_fusion_impl` say, "te" included; heads of multi-token prediction too.  A label below 0 gives 0.

    "linear", which some versions have, makes the loss inside the output layer: a model with it is refused when it is
    made, so call this before."""
    module = importlib.import_module("megatron.core.models.common.language_module.language_module")
    kind = module.LanguageModule
    if kind.compute_language_model_loss is not compute_language_model_loss:
        kind.compute_language_model_loss = compute_language_model_loss
        kind.__init__ = _without_linear(kind.__init__)


def _without_linear(init: Any) -> Any:
    @functools.wraps(init)
    def run(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        fused = getattr(config, "cross_entropy_loss_fusion", False)
        if fused and getattr(config, "cross_entropy_fusion_impl", "") == "linear":
            raise ValueError(
                "cross_entropy_fusion_impl: 'linear' makes the loss inside the output layer, where "
                "replace_cross_entropy() does not reach it; set 'native', or use OutputProcessor, which needs no logits"
            )
        init(self, config, *args, **kwargs)

    return run


def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
    """`LanguageModule.compute_language_model_loss`: labels [b, s] and logits [s, b, v] to losses [b, s]."""
    group = getattr(self, "tp_group", None) or self.pg_collection.tp
    targets = labels.masked_fill(labels < 0, -100).transpose(0, 1).contiguous()  # BERT and T5: -1 where the mask is 0
    return vocab_parallel_cross_entropy(logits, targets, tp_group=group).transpose(0, 1).contiguous()


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Any = None,
    *,
    vocab: int | None = None,
    inplace: bool = False,
) -> Tensor:
    """The loss of each token, [s, b], float32, from logits [s, b, v] and targets [s, b]; -100 gives 0.

    Label smoothing a spreads mass a evenly over the other V - 1 columns of the whole vocabulary; Megatron's own
    function takes the V / tp columns of its rank for the whole, so its ranks disagree.  `vocab` leaves the columns from
    there on, which are padding, out of the softmax; Megatron counts them.  `inplace=True` lets the gradient overwrite
    the logits.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing: wanted 0 <= label_smoothing < 1, got {label_smoothing}")
    source = logits_source(vocab_parallel_logits, tp_group, vocab=vocab, inplace=inplace)
    if not label_smoothing:
        return -hl.row_facts(source, target, want=("logprob",)).logprob
    facts = hl.row_facts(source, target, want=("logprob", "mean_logprob"))
    smoothing = label_smoothing * source.vocab / (source.vocab - 1)
    return -(1.0 - smoothing) * facts.logprob - smoothing * facts.mean_logprob


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
    """Megatron's function of this name, which takes the group in another position.  The gradient keeps the logits'
    dtype; Megatron's is always bfloat16."""
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)


def vocab_parallel_entropy(vocab_parallel_logits: Tensor, tp_group: Any = None, *, vocab: int | None = None) -> Tensor:
    """The entropy of each token's distribution, [s, b]; differentiable."""
    return hl.row_facts(logits_source(vocab_parallel_logits, tp_group, vocab=vocab), want=("entropy",)).entropy


def vocab_parallel_log_probs_and_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None, *, vocab: int | None = None
) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy), [s, b] each, from one sweep and one collective."""
    source = logits_source(vocab_parallel_logits, tp_group, vocab=vocab)
    facts = hl.row_facts(source, target, want=("logprob", "entropy"))
    return facts.logprob, facts.entropy


def logits_source(logits: Tensor, tp_group: Any = None, *, vocab: int | None = None, **options: Any) -> hl.Logits:
    """Megatron's logits [..., v] as a source for any objective."""
    return hl.Logits(logits, shard=vocab_shard(logits.shape[-1], tp_group, vocab=vocab), **options)


def linear_source(
    hidden: Tensor,
    weight: Tensor,
    tp_group: Any = None,
    *,
    vocab: int | None = None,
    partial_hidden: bool = False,
    **options: Any,
) -> hl.Linear:
    """Hidden states [s, b, h] and the output layer's weight [v, h]: the logits are never stored in full.

    With sequence parallelism gather the hidden states first (`gather_from_sequence_parallel_region`); its backward
    reduce-scatters, so `partial_hidden=True` then leaves out the all-reduce of their gradient.
    """
    shard = vocab_shard(weight.shape[0], tp_group, vocab=vocab, partial_hidden=partial_hidden)
    return hl.Linear(hidden, weight, shard=shard, **options)


def vocab_shard(
    columns: int, tp_group: Any = None, *, vocab: int | None = None, partial_hidden: bool = False
) -> hl.VocabShard | None:
    """This rank's columns of a vocabulary in equal parts, as Megatron lays it out; None on one rank without padding."""
    if tp_group is None:
        tp_group = importlib.import_module("megatron.core.parallel_state").get_tensor_model_parallel_group()
    ranks = dist.get_world_size(tp_group)
    whole = columns * ranks
    if vocab is not None and not 0 < vocab <= whole:
        raise ValueError(f"vocab: wanted at most {whole}, {ranks} times {columns} columns, got {vocab}")
    if ranks == 1 and vocab in (None, whole):
        return None
    start = columns * dist.get_rank(tp_group)
    return hl.VocabShard(tp_group, start, vocab or whole, width=columns, partial_hidden=partial_hidden)
