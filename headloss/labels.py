"""`shift_labels`: targets from Hugging Face labels."""

from __future__ import annotations

import torch
from torch import Tensor

from headloss.prepared import segment_ids
from headloss.rows import IGNORE
from headloss.segments import Segments, integers


def shift_labels(labels: Tensor, segments: Segments | None = None) -> Tensor:
    """Targets from Hugging Face labels: row t's target is label t+1, and the last row of a line or segment has none.

    >>> shift_labels(torch.tensor([[5, 6, 7]]))
    tensor([[   6,    7, -100]])
    """
    as_int64 = integers("labels", labels)
    labels = labels if labels.dtype.is_signed else as_int64  # an unsigned dtype cannot hold -100
    if labels.ndim < 1:
        raise ValueError("labels: wanted at least one dimension, got a scalar")
    targets = torch.full_like(labels, IGNORE)
    targets[..., :-1] = labels[..., 1:]
    if segments is not None:
        ids = segment_ids(segments, labels).view(labels.shape)
        targets[..., :-1].masked_fill_(ids[..., 1:] != ids[..., :-1], IGNORE)
    return targets
