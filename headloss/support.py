"""`Support`: the columns that each row keeps; a row's softmax is then over these alone.

Dimension key:  N rows   E kept columns of all rows   V vocabulary

    row n keeps ids[offsets[n] : offsets[n + 1]], in any order, each once

Stored as sorted keys, `row << 32 | column`, so that one search finds the place of a column in its row.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.deferred_checks import HostCopy, check_now_or_later, should_defer
from headloss.immutable import Immutable
from headloss.segments import check_dense, check_device, integers
from headloss.writes import Snapshot, snapshot, unchanged

IGNORE = -100  # the target of a row that does not count
SHIFT = 32  # how far a key shifts its row's number
NONE = torch.iinfo(torch.int64).max  # the key of padding, which sorts behind all others


class Known(NamedTuple):
    """What the host must know of a support."""

    low: int  # smallest column
    high: int  # largest column
    repeated: bool  # whether a row names a column twice
    total: int  # kept columns of all rows
    longest: int  # columns of the row that keeps the most
    offsets: Tensor  # (N + 1,), on the CPU


class Support(Immutable):
    """The columns that each row keeps, for `support=` of a call: the softmax is over those alone.  Immutable.

    >>> support = hl.Support.from_csr(ids, offsets)          # as inference engines return the sets they sampled from
    >>> out = objective(hl.Linear(hidden, weight), targets, support=support, old_logprob=old, advantage=advantage)

    On a GPU the constructors do not wait for the device: sizes travel to the host in a copy that the first call waits
    for, and that call raises if the ids are wrong.  A support holds its tensors' values from when it was made: calls
    raise once the tensors have been written to.
    """

    __slots__ = ("_copy", "_known", "cache", "keys", "made_from", "offsets", "padded", "rows")
    keys: Tensor  # (E or more,) row << 32 | column, sorted; NONE after them
    offsets: Tensor  # (N + 1,)
    rows: int
    _copy: HostCopy
    _known: Known | None
    cache: dict[str, Any]  # `places` for the targets of the last call
    padded: bool  # whether ids came padded, so that errors fit what the caller passed
    made_from: tuple[tuple[str, Any, Snapshot], ...]  # name, tensor, snapshot

    def __init__(self, keys: Tensor, offsets: Tensor, numbers: Tensor | HostCopy, padded: bool) -> None:
        copy = numbers if isinstance(numbers, HostCopy) else HostCopy(numbers)
        self._set(keys=keys, offsets=offsets, rows=len(offsets) - 1, padded=padded, made_from=())
        self._set(_copy=copy, _known=None, cache={})
        if keys.device.type == "cpu":
            self.known()

    @classmethod
    def from_csr(cls, ids: Tensor, offsets: Tensor) -> Support:
        """Row n keeps `ids[offsets[n]:offsets[n + 1]]`."""
        tensors = {"ids": ids, "offsets": offsets}
        ids, offsets = integers("ids", ids), integers("offsets", offsets)
        if ids.ndim != 1:
            raise ValueError(f"ids: wanted the kept columns of all rows in one dimension, got shape {tuple(ids.shape)}")
        if offsets.ndim != 1 or not len(offsets):
            raise ValueError(f"offsets: wanted (rows + 1,), from 0 to {len(ids)}, got shape {tuple(offsets.shape)}")
        _check_device(ids, offsets)
        row_E = torch.searchsorted(offsets[1:].contiguous(), torch.arange(len(ids), device=ids.device), right=True)
        return cls(*_sorted(row_E, ids, offsets.clone()), False)._from(tensors)

    @classmethod
    def from_padded(cls, ids: Tensor) -> Support:
        """Row n keeps the columns `ids[n]`, (..., K); entries of -1 are padding."""
        tensors, ids = {"ids": ids}, integers("ids", ids)
        if ids.ndim < 2:
            raise ValueError(f"ids: wanted (rows, K), padded with -1, got shape {tuple(ids.shape)}")
        _check_device(ids, ids)
        flat = ids.flatten(0, -2)
        present = flat != -1
        offsets = torch.nn.functional.pad(present.sum(-1).cumsum(0), (1, 0))
        row = torch.arange(len(flat), device=ids.device)[:, None].expand_as(flat)
        return cls(*_sorted(row.reshape(-1), flat.reshape(-1), offsets, present.reshape(-1)), True)._from(tensors)

    @classmethod
    def from_mask(cls, mask: Tensor) -> Support:
        """Row n keeps the columns where `mask[n]`, (..., V), is True.  On a GPU this waits for the mask."""
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask: wanted a tensor of torch.bool, got {got}")
        check_dense("mask", mask)
        if mask.ndim < 2:
            raise ValueError(f"mask: wanted (rows, vocabulary), got shape {tuple(mask.shape)}")
        _check_device(mask, mask, "mask")
        flat = mask.flatten(0, -2)
        row_E, id_E = flat.nonzero(as_tuple=True)
        offsets = torch.nn.functional.pad(flat.sum(-1).cumsum(0), (1, 0))
        return cls(*_sorted(row_E, id_E, offsets), True)._from({"mask": mask})

    def _from(self, tensors: dict[str, Tensor]) -> Support:
        if torch.compiler.is_compiling():
            return self  # a graph counts no writes
        large = "mask" in tensors  # do not keep a mask alive, nor a copy of it
        hold: Any = weakref.ref if large else lambda x: lambda: x
        self._set(made_from=tuple((name, hold(x), snapshot(x, copied=not large)) for name, x in tensors.items()))
        return self

    def check_written(self) -> None:
        """Raise if the tensors that it was made from have been written to since."""
        for name, tensor, before in self.made_from:
            x = tensor()
            if x is not None and not unchanged(before, x):
                raise ValueError(
                    f"{name}: was written to after hl.Support was made from it; make the support again, or from a copy"
                )

    def known(self) -> Known:
        """The support's sizes; raises if its ids are wrong.  This waits for the copy of these numbers alone."""
        if self._known is None:
            if self._copy.event is not None and not should_defer(self.keys.device):
                raise ValueError(
                    "support: its sizes must be on the host before a CUDA graph is captured; make it before then, and "
                    "call support.known() once"
                )
            numbers = self._copy.wait()
            (low, high, repeated), offsets = numbers[:3].tolist(), numbers[3:]
            longest = int(offsets.diff().max()) if self.rows else 0
            known = Known(low, high, bool(repeated), int(offsets[-1]), longest, offsets)
            self._check(known)
            self._set(_known=known)
            return known
        return self._known

    def _check(self, known: Known) -> None:
        offsets, end = known.offsets, known.total if self.padded else len(self.keys)
        falls = (offsets.diff() < 0).nonzero()
        if len(falls) or offsets[0] != 0 or known.total != end:
            n = int(falls[0, 0]) if len(falls) else 0 if offsets[0] else max(0, self.rows - 1)
            raise ValueError(
                f"offsets: row {n} goes from {' to '.join(map(str, offsets[n : n + 2].tolist()))}; wanted offsets that "
                f"begin at 0, never fall and end at {end}, the number of ids"
            )
        if known.low < 0:
            self._refuse(self._columns() < 0, "wanted columns from 0 on" + (", or -1 for padding" * self.padded))
        most = torch.iinfo(torch.int32).max  # larger ids were clamped to this
        if known.high == most:
            self._refuse(self._columns() == most, "or one beyond; no vocabulary is that large")
        if known.repeated:
            again = torch.diff(self.keys, prepend=self.keys[:1] - 1) == 0
            self._refuse(again, "which it has already; wanted each once")

    def check_call(self, rows: int, vocab: int, device: torch.device) -> Known:
        """Check it against a source with this many rows and columns."""
        self.check_written()
        if self.rows != rows:
            raise ValueError(f"support: has {self.rows} rows, the source has {rows}; wanted one set per row")
        if device.type != "meta":  # meta tensors have no values
            check_device("support", self.keys, device)
        known = self.known()
        if known.high >= vocab:
            self._refuse(self._columns() >= vocab, f"wanted columns in [0, {vocab})", "support")
        return known

    def _columns(self) -> Tensor:
        """Each key's column as the caller passed it, even if it is negative or too large; 0 for padding."""
        return torch.where(self.keys == NONE, 0, (self.keys << SHIFT) >> SHIFT)

    def _refuse(self, wrong: Tensor, why: str, argument: str = "ids") -> None:
        key = self.keys[wrong.nonzero()[0, 0]]
        row, column = int(key >> SHIFT), int((key << SHIFT) >> SHIFT)
        raise ValueError(f"{argument}: row {row + (column < 0)} names column {column}, {why}")

    @property
    def lengths(self) -> Tensor:
        """(N,) how many columns each row keeps."""
        return self.offsets.diff()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Support:
        self.known()
        keys, offsets = (x.to(device, non_blocking=non_blocking) for x in (self.keys, self.offsets))
        return Support(keys, offsets, self._copy.wait(), self.padded)

    def __reduce__(self) -> Any:
        return Support, (self.keys, self.offsets, self._copy.wait(), self.padded)

    def __repr__(self) -> str:
        return f"Support({self.rows} rows, {self.keys.device})"


def check_kind(support: object) -> None:
    if not isinstance(support, Support):
        hint = "; make it with hl.Support.from_csr, from_padded or from_mask"
        raise TypeError(f"support: wanted hl.Support, got {type(support).__name__}{hint}")


def check_counted(support: Support, targets: Tensor | None) -> None:
    """Check that every row that counts keeps a column.  On a GPU nothing waits, and a later call raises."""
    if targets is None:
        empty_N = support.known().offsets.diff() == 0
        if bool(empty_N.any()):
            row = int(empty_N.int().argmax())
            raise ValueError(
                f"support: row {row} keeps no columns; wanted at least one, since without targets every row counts"
            )
        return
    if support.rows != targets.numel():
        raise ValueError(
            f"support: has {support.rows} rows, there are {targets.numel()} targets; wanted one set per row"
        )
    if support.keys.device != targets.device:
        raise ValueError(f"support: is on {support.keys.device}, but the targets are on {targets.device}")
    if not support.rows or bool((support.known().offsets.diff() > 0).all()):
        return
    empty_N = (support.lengths == 0) & (targets.reshape(-1) != IGNORE)
    first = torch.stack([empty_N.any().long(), empty_N.int().argmax()])
    check_now_or_later(first, first[:1], _check_first, "support: a row that counts keeps no columns")


def _check_first(numbers: Tensor) -> None:
    any_empty, row = numbers.tolist()
    if any_empty:
        raise ValueError(
            f"support: row {row} counts and keeps no columns; wanted at least one, or the target -100, which makes "
            f"the row ignored"
        )


def _check_device(x: Tensor, y: Tensor, name: str = "ids") -> None:
    check_device("offsets", y, x.device, "ids")
    if x.device.type == "meta":
        raise ValueError(
            f"{name}: is on meta; a support's sizes come from its values, so wanted a tensor that has some"
        )


def _sorted(
    row_E: Tensor, id_E: Tensor, offsets: Tensor, present_E: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys in order, the offsets, and the numbers that the host must know."""
    least = torch.iinfo(torch.int32)
    id_E = id_E.clamp(least.min, least.max)  # ids beyond that are out of range anyway
    keys_E = torch.add(id_E, row_E, alpha=1 << SHIFT)
    keys_E = keys_E if present_E is None else keys_E.masked_fill(~present_E, NONE)
    keys_E = keys_E.sort().values
    if len(keys_E):
        low, high = (id_E if present_E is None else id_E.masked_fill(~present_E, 0)).aminmax()
        again_E = keys_E[1:] == keys_E[:-1]
        repeated = (again_E if present_E is None else again_E & (keys_E[1:] != NONE)).any()
    else:
        low = high = repeated = offsets.new_zeros(())
    numbers = torch.cat([torch.stack([low, high, repeated.to(low.dtype)]), offsets])
    return keys_E, offsets, numbers
