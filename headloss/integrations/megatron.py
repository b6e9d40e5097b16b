"""headloss in Megatron-LM: losses over a vocabulary that tensor-parallel ranks share.

Dimension key:  s sequence   b batch   v columns of the vocabulary on this rank   V all of them   h hidden size

    loss_sb = vocab_parallel_cross_entropy(logits_sbv, target_sb, label_smoothing=0.1)     # as Megatron calls it
    entropy_sb = vocab_parallel_entropy(logits_sbv)

One all-gather where Megatron makes three all-reduces.  Follows megatron-core 0.16, `tensor_parallel.cross_entropy` and
`fusions.fused_cross_entropy`; the group is found through `megatron.core.parallel_state` unless it is given, so nothing
here needs Megatron otherwise.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist
from torch import Tensor

import headloss as hl


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

    With label smoothing a, mass a is spread evenly over the other V - 1 columns of the whole vocabulary; Megatron's
    own function takes the V / tp columns of its rank for the whole, so its ranks disagree.  `vocab` leaves the columns
    from there on, the padding, out of the softmax; Megatron counts them.  `inplace=True` lets the gradient overwrite
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
    """Megatron's function of this name, which has the group in another place.  The gradient keeps the logits' dtype,
    where Megatron's is bfloat16 always."""
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
    """Hidden states [s, b, h] and the output layer's weight [v, h]: the logits never exist whole.

    With sequence parallelism gather the hidden states first (`gather_from_sequence_parallel_region`), whose backward
    reduce-scatters: `partial_hidden=True` then leaves out the all-reduce of their gradient.
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
