"""Refuses means that a trainer's count does not normalise, since their parts would be added up wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import headloss as hl
from headloss.deferred_checks import check_later, should_defer

WEIGHTED = (
    "weighted_mean: term {name!r} divides by the weights of its own micro-batch, {why}; use reduction='token_mean', or "
    "'token_sum' with weights={{{name!r}: 1 / their sum over the whole step}}"
)
PAIRED = (
    "reduction: term {name!r} is a mean over the pairs of its own micro-batch, {why}; use reduction='token_sum' with "
    "weights={{{name!r}: 1 / the pairs of the whole step}}"
)


def values_of(term: hl.Term) -> str:
    """Whether a term has one value per "row", "segment" or "pair", as far as its function says so."""
    signature = term.call(None, {}).signature
    return signature.returns or ("pair" if any(p.name == "pairs" for p in signature.parameters) else "row")


def own_means(objective: hl.Objective) -> dict[str, str]:
    """The terms that divide by something of their own micro-batch, each with the message to raise."""
    found = {}
    for name, term in objective.terms.items():
        if term.reduction == "weighted_mean":
            found[name] = WEIGHTED
        elif term.reduction != "token_sum" and values_of(term) == "pair":
            found[name] = PAIRED
    return found


def check_means(objective: hl.Objective, call: Mapping[str, Any], why: str, instead: str, items: str) -> None:
    """Check that every mean of a call is over something that was counted for the whole step.

    `call`: the arguments.  `why`: what the trainer does with a micro-batch.  `instead`: where the number of sequences
    can be given, `items`: where the number of tokens can.
    """
    for name, message in own_means(objective).items():
        raise ValueError(message.format(name=name, why=why))
    means = {name: term for name, term in objective.terms.items() if term.reduction != "token_sum"}
    over = {name: t.reduction.startswith("seq_") or values_of(t) == "segment" for name, t in means.items()}
    sequences, tokens = [name for name in means if over[name]], [name for name in means if not over[name]]
    if sequences and call.get("num_segments") is None:
        raise ValueError(
            f"num_segments: term {sequences[0]!r} is a mean over sequences ({means[sequences[0]].reduction}), {why}; "
            f"give the number of sequences of the whole step {instead}"
        )
    if sequences and tokens and "num_items" not in call:
        raise ValueError(
            f"num_items: term {tokens[0]!r} is a mean over tokens and {sequences[0]!r} one over sequences, {why}; give "
            f"the number of tokens of the whole step too, {items}"
        )


def check_whole(objective: hl.Objective, targets: Tensor, num_items: Any) -> None:
    """If a trainer counts a step's tokens, a mean over something else of a micro-batch must cover all of them."""
    if num_items is not None:
        for name, message in own_means(objective).items():
            why = "and this is a part of a step (num_items_in_batch counts {more} more tokens)"
            refuse_part(targets, num_items, message.format(name=name, why=why))


def refuse_part(targets: Tensor, num_items: Any, message: str) -> None:
    """Check that the targets are all that `num_items` counts; on a GPU the error may come later."""
    more = torch.as_tensor(num_items, device=targets.device) - (targets != -100).sum()

    def check(more: Tensor) -> None:
        if more != 0:
            raise ValueError(message.replace("{more}", str(int(more))))

    if not torch.compiler.is_compiling() and should_defer(targets.device):
        check_later(more, check)
    else:
        check(more)
