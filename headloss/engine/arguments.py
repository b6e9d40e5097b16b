"""What a call is given, as records: they travel through the engine as one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from headloss.rows import Prepared
from headloss.segments import Segments
from headloss.sources import Source, Teacher


class CallOptions(NamedTuple):
    """What changes how a call counts, weighs and waits, and not what its losses are."""

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

    @property
    def teachers(self) -> Mapping[str, Teacher]:
        """By name, once `find_plan` has seen to them."""
        assert isinstance(self.teacher, Mapping)
        return self.teacher
