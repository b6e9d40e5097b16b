"""Records of a call: its arguments, its options and its chunks, so that they travel through the engine together.

Dimension key:  C rows of a chunk   V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from headloss.prepared import Prepared
from headloss.segments import Segments
from headloss.sources import Source, Teacher
from headloss.support import Support
from headloss.teachers import TeacherChunk, TopChunk


class Chunk(NamedTuple):
    rows: slice  # of the rows that count
    segments: slice | None = None  # the whole segments that these rows make up
    run: slice | None = None  # the rows whose gradient goes into one matrix product; None: this chunk's

    @property
    def is_last(self) -> bool:
        return self.run is None or self.rows.stop == self.run.stop

    @property
    def whole(self) -> slice:
        return self.run or self.rows


class Block(NamedTuple):
    """A chunk in a sweep: its rows, their raw logits, and the teachers' logits or ids for them."""

    chunk: Chunk
    numbers: Any  # the indices of its rows among all rows
    raw_CV: Tensor
    teachers: tuple[TeacherChunk | TopChunk, ...]
    kept: Any = None  # what the first sweep leaves for the second; see `backends.torch_kept`

    @property
    def part(self) -> slice:
        """Its rows, among those that count."""
        return self.chunk.rows


class CallOptions(NamedTuple):
    """Options that change how a call counts, weighs and waits, but not what its losses are."""

    num_items: int | Tensor | None = None
    num_segments: int | Tensor | None = None
    weights: Mapping[str, float | Tensor] | None = None
    grad_scale: float | Tensor = 1.0
    host_read: bool = True


class CallArguments(NamedTuple):
    """A call of an objective; see `Objective.__call__`."""

    source: Source
    targets: Tensor | Prepared | None = None
    segments: Segments | None = None
    teacher: Teacher | Mapping[str, Teacher] | None = None
    options: CallOptions = CallOptions()
    inputs: Mapping[str, Any] = MappingProxyType({})
    support: Support | None = None

    def but(self, **new: Any) -> CallArguments:
        """The same call with some fields replaced; torch.compile of torch 2.8 cannot trace `_replace`."""
        fields: list[Any] = [new.get(name, old) for name, old in zip(CallArguments._fields, self, strict=True)]
        return CallArguments(*fields)

    def with_prepared(self) -> CallArguments:
        """The same call with the support that was given to `hl.prepare`."""
        if not isinstance(self.targets, Prepared):
            return self
        prepared = self.targets.support
        if self.targets.tokens is not None and getattr(self.source, "vocab_ids", None) is None:
            raise ValueError("targets: were prepared with vocab_ids, but the source has none")
        if prepared is not None and self.support is not None:
            raise ValueError("support: given both to prepare() and to the call; give it once")
        return self if prepared is None else self.but(support=prepared)

    @property
    def teachers(self) -> Mapping[str, Teacher]:
        """The teachers by name, as `find` leaves them."""
        assert isinstance(self.teacher, Mapping)
        return self.teacher
