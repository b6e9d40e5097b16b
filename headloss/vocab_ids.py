"""Heads over some tokens of a larger vocabulary: column c is token `vocab_ids[c]`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from headloss.deferred_checks import check_now_or_later, check_zero, is_capturing, readable
from headloss.segments import check_device, integers
from headloss.writes import snapshot, unchanged


def check_vocab_ids(source: Any) -> None:
    """Check that there is one token for each column of the vocabulary, and each only once."""
    ids = source.vocab_ids
    if ids is None:
        return
    ids = integers("vocab_ids", ids)
    if tuple(ids.shape) != (source.vocab,):
        raise ValueError(f"vocab_ids: wanted one token per column, shape ({source.vocab},), got {tuple(ids.shape)}")
    check_device("vocab_ids", ids, source.device)
    object.__setattr__(source, "vocab_ids", ids)
    check_tokens(ids)


def check_tokens(ids: Tensor) -> None:
    """Check that each token occurs only once; a tensor that passed is checked again only after a write to it."""
    if ids.device.type == "meta" or not len(ids) or _is_cached(ids):
        return
    in_order, order = ids.sort(stable=True)
    twice = torch.cat([in_order[1:] == in_order[:-1], in_order.new_zeros(1, dtype=torch.bool)])
    at = twice.int().argmax()  # the first of two equal tokens
    both = [x.take(at) for x in (in_order, order, order.roll(-1))]  # x[at] would wait for the device
    numbers = torch.stack([(in_order[0] < 0).long(), twice.any().long(), in_order[0], order[0], *both])
    check_now_or_later(numbers, numbers[:2], _check_numbers, "vocab_ids: negative, or a token twice")
    if _is_cacheable(ids):
        _SORTED[ids] = snapshot(ids), (in_order, order)


def _check_numbers(numbers: Tensor) -> None:
    negative, repeated, least, row, token, one, other = numbers.tolist()
    if negative:
        raise ValueError(f"vocab_ids: wanted tokens of the whole vocabulary, got {least} in row {row}")
    if repeated:
        raise ValueError(f"vocab_ids: wanted each token once, but rows {one} and {other} are both {token}")


# for each tensor that passed: its snapshot, its tokens in order and their columns
_SORTED: Any = WeakIdKeyDictionary()


def sorted_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens in order, and their columns; computed once for a tensor that nothing writes to."""
    check_tokens(ids)
    found: tuple[Tensor, Tensor] = _SORTED[ids][1] if _is_cached(ids) else ids.sort(stable=True)
    return found


def _is_cached(ids: Tensor) -> bool:
    return _is_cacheable(ids) and ids in _SORTED and unchanged(_SORTED[ids][0], ids)


def _is_cacheable(ids: Tensor) -> bool:
    """Whether a later call may use what is computed from it now."""
    if torch.compiler.is_compiling():  # first: a graph cannot evaluate `is_inference`
        return False
    plain = type(ids) in (Tensor, torch.nn.Parameter) and not ids.is_inference()
    return plain and not (ids.is_cuda and is_capturing())


def to_columns(vocab_ids: Tensor, x: Tensor, ignore: int, name: str = "") -> tuple[Tensor, Tensor]:
    """Tokens as columns, and which tokens have none: these become `ignore`.  `ignore` itself stays."""
    wrong = (x < 0) & (x != ignore) if name and readable(x) else None
    if wrong is not None and bool(wrong.any()):
        row = int(wrong.reshape(-1).int().argmax())
        got = f"row {row} has {int(x.reshape(-1)[row])}"
        raise ValueError(f"{name}: wanted tokens of the whole vocabulary or {ignore}, but {got}")
    if not len(vocab_ids):
        missing = x != ignore
        return torch.full_like(x, ignore), missing
    in_order, order = sorted_ids(vocab_ids)
    place = torch.searchsorted(in_order, x).clamp(max=len(in_order) - 1)
    among = in_order[place] == x
    missing = (x >= 0) & ~among
    return torch.where(among, order[place], torch.where(missing, ignore, x)), missing


def count(x: Tensor) -> Tensor:
    """How many are True, in the dtype that metrics count in."""
    return x.sum(dtype=torch.float32 if x.device.type == "mps" else torch.float64)


class Tokens(NamedTuple):
    """Targets turned into columns of these tokens: how many targets have no column, and out of how many."""

    vocab_ids: Tensor
    missing: Tensor
    counted: Tensor
    lost: Tensor  # per row, whether its target is missing
    as_prepared: Tensor  # a copy of `vocab_ids`, for graphs, where nothing notices writes to a tensor

    def to(self, device: torch.device | str, non_blocking: bool) -> Tokens:
        return Tokens(*(x.to(device, non_blocking=non_blocking) for x in self))

    def check(self, vocab_ids: Tensor) -> None:
        """Check that a head has these tokens.  On a GPU nothing waits, and a later call raises."""
        message = "targets: were prepared with vocab_ids other than those of the source"
        prepared = self.as_prepared if torch.compiler.is_compiling() else self.vocab_ids
        if prepared is vocab_ids:
            return
        if self.vocab_ids.shape != vocab_ids.shape or self.vocab_ids.device != vocab_ids.device:
            got, wanted = (f"{tuple(x.shape)} on {x.device}" for x in (self.vocab_ids, vocab_ids))
            raise ValueError(f"{message}: {got}, those of the source are {wanted}")
        check_zero(message, ((prepared != vocab_ids).any(), message))
