"""A check for `hl.Logits(inplace=True)`: nothing else that the call reads may share memory with the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from headloss.engine.arguments import CallArguments
from headloss.engine.autograd_contract import every_tensor
from headloss.engine.teachers import named_teachers, teacher_label
from headloss.sources import Logits


def check_inplace(arguments: CallArguments) -> None:
    """Raise if another argument is a view of logits that the gradient overwrites while the call still reads it."""
    source, targets, segments, _, options, inputs, support = arguments
    if not isinstance(source, Logits) or not source.inplace:
        return
    teachers = {teacher_label(name): x for name, x in named_teachers(arguments.teacher).items()}
    given = {"temperature": source.temperature, "targets": targets, "segments": segments, "support": support}
    for name, thing in {**given, **teachers, **options._asdict(), **inputs}.items():
        if any(_overlap(source.logits, x) for _, x in every_tensor(name, thing)):
            raise ValueError(
                f"inplace: {name} lies in the memory of the logits, which their gradient overwrites while it is still "
                f"needed; pass a clone of it, or use inplace=False"
            )


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share bytes, given that no two elements of x do."""
    if not x.numel() or not y.numel() or x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    (start_N, size), (start_M, other) = _runs(x), _runs(y)
    start_N = start_N.sort().values
    before_M = torch.searchsorted(start_N, start_M + other) - 1  # x's last run that begins before this one ends
    return bool(((before_M >= 0) & (start_N[before_M.clamp(min=0)] + size > start_M)).any())


def _runs(x: Tensor) -> tuple[Tensor, int]:
    """Where each row begins in the storage, and how many bytes it spans."""
    *leading, columns = x.shape or (1,)
    *strides, step = x.stride() or (1,)
    if step != 1:  # one run per element: its neighbours may be another tensor's
        leading, strides, columns = [*leading, columns], [*strides, step], 1
    start = torch.tensor([x.storage_offset()], device="cpu")
    for size, stride in zip(leading, strides, strict=True):
        start = (start[:, None] + torch.arange(size, device="cpu") * stride).flatten()
    return start * x.element_size(), columns * x.element_size()
