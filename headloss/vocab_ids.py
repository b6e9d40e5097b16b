"""A head over some tokens of a larger vocabulary: column c of it is token `vocab_ids[c]`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headloss.segments import integers, readable


def check_vocab_ids(source: Any) -> None:
    """One token for each column of the vocabulary, each once."""
    ids = source.vocab_ids
    if ids is None:
        return
    ids = integers("vocab_ids", ids)
    if tuple(ids.shape) != (source.vocab,):
        raise ValueError(f"vocab_ids: wanted one token per column, shape ({source.vocab},), got {tuple(ids.shape)}")
    if ids.device != source.device:
        raise ValueError(f"vocab_ids: is on {ids.device}, but the source is on {source.device}")
    object.__setattr__(source, "vocab_ids", ids)
    if ids.device.type == "meta" or not len(ids):
        return
    in_order, order = ids.sort(stable=True)
    twice = in_order[1:] == in_order[:-1]
    if not readable(ids):
        torch._assert_async(~twice.any() & (in_order[0] >= 0), "vocab_ids: negative, or a token twice")
    elif bool(in_order[0] < 0):
        raise ValueError(f"vocab_ids: wanted tokens of the whole vocabulary, got {int(in_order[0])}")
    elif bool(twice.any()):
        at = int(twice.int().argmax())
        rows = f"rows {int(order[at])} and {int(order[at + 1])}"
        raise ValueError(f"vocab_ids: wanted each token once, but {rows} are both {int(in_order[at])}")


def to_columns(vocab_ids: Tensor, x: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """Tokens as columns; `ignore` stays, and is what a token becomes that is not among them.  And which those are."""
    if not len(vocab_ids):
        missing = x != ignore
        return torch.full_like(x, ignore), missing
    in_order, order = vocab_ids.sort()
    place = torch.searchsorted(in_order, x).clamp(max=len(in_order) - 1)
    among = in_order[place] == x
    missing = (x >= 0) & ~among
    return torch.where(among, order[place], torch.where(missing, ignore, x)), missing
