"""Functions that torch.compile leaves uncompiled: calls that cannot be part of a graph, and making objectives."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

WHY = (
    "headloss runs this call uncompiled, between two graphs: logits that are overwritten (inplace=True), DTensors, an "
    "objective made inside the compiled function, losses or metrics that read what may change (objective.explain "
    "names it; pass it as an input or an option), support=, top=, hl.Routed and a teacher of a head with vocab_ids "
    "cannot be part of one"
)


# the hook with which torch.compile looks at frames, if there is one
_compiles = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: "torch._dynamo" in sys.modules)
Made = TypeVar("Made", bound=Callable[..., Any])


def uncompiled(fn: Made) -> Made:
    """Under torch.compile `fn` runs uncompiled, between two compiled graphs: its kernels are fused already.

    Like `torch.compiler.disable`, but only where something compiles: that is slow, and imports the compiler and triton.
    """
    disabled: list[Callable[..., Any]] = []

    def call(*args: Any, **named: Any) -> Any:
        if not _compiles():
            return fn(*args, **named)
        if not disabled:
            disabled.append(torch.compiler.disable(fn, reason=WHY))
        return disabled[0](*args, **named)

    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # else it would look at this frame, find its own hook there, and warn
        frames.set_code_exec_strategy(
            call.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        )
    made: Any = functools.wraps(fn)(call)
    made.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_recursive=True, _torchdynamo_disable_msg=WHY)
    return made
