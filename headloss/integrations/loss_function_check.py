"""Checks that a model calls its loss function with the arguments that the model itself was called with.

A patched head has computed the loss from the labels of the call before the model gets to its loss function.  A model
that changes them on the way (masks images, shifts by two, adds a loss of its own) would train on something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.deferred_checks import check_later, should_defer
from headloss.integrations.causal_lm import KEEP_LOGITS

NAMES = ("labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")  # after the logits


class LossCall(NamedTuple):
    """The arguments of a model's call that determine its loss."""

    labels: Tensor
    shift_labels: Tensor | None
    ignore_index: int
    num_items: Any


def by_name(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a loss function besides the logits, by name."""
    return {**dict(zip(NAMES, args)), **kwargs}


def check_loss_call(said: LossCall, given: Mapping[str, Any]) -> Tensor | float:
    """0, or an error if the model asks for another loss than the call did; add the 0 to something that is kept."""
    shifted = given.get("shift_labels")
    if shifted is not None or said.shift_labels is not None:
        zero = _same("shift_labels", said.shift_labels, shifted)
    else:
        zero = _same("labels", said.labels, given.get("labels"))
    ignored = given.get("ignore_index", said.ignore_index)
    if ignored != said.ignore_index:
        raise _another(f"an ignore_index of its own, {ignored}")
    counted = given.get("num_items_in_batch")
    if isinstance(counted, Tensor):
        counts = isinstance(said.num_items, Tensor)
        own = said.num_items if counts or said.num_items is None else torch.full_like(counted, said.num_items)
        zero = zero + _same("num_items_in_batch", own, counted)
    elif counted is not None and counted != said.num_items:
        raise _another(f"another num_items_in_batch, {counted}")
    return zero


def _another(what: str) -> TypeError:
    return TypeError(
        f"model: its forward gives self.loss_function {what}, but a patched head makes the loss from the arguments of "
        f"the call; {KEEP_LOGITS}"
    )


def _same(name: str, own: Tensor | None, got: Tensor | None) -> Tensor | float:
    if got is own:
        return 0.0
    if own is None or got is None or own.shape != got.shape:
        shown = "none" if got is None else f"some of shape {tuple(got.shape)}"
        wanted = "had none" if own is None else f"had some of shape {tuple(own.shape)}"
        raise _another(f"other {name}: {shown}, where the call {wanted}")
    return _same_numbers(got.detach(), own.detach(), name)


def _check_apart(apart: Tensor, name: str) -> None:
    if bool(apart):
        raise _another(f"other {name} than those of the call")


@torch.library.custom_op("headloss::same_numbers", mutates_args=())
def _same_numbers(got: Tensor, own: Tensor, name: str) -> Tensor:
    apart = (got != own.to(got.device)).any()
    if apart.device.type != "cuda":
        _check_apart(apart, name)
    elif should_defer(apart.device):
        check_later(apart, lambda flag: _check_apart(flag, name))
    return torch.zeros((), dtype=torch.float32, device=got.device)


@_same_numbers.register_fake
def _(got: Tensor, own: Tensor, name: str) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=got.device)
