"""Numbers on their way from a device to the host, and checks that come late so that no call has to wait for them.

A call that reads its targets from the host waits for all work that was queued before it: in a training step that is
the whole forward pass.  So the numbers travel by a copy that nothing waits for.  The next call, or the meter when it is
read, raises if they are wrong.
"""

from __future__ import annotations

import atexit
import collections
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

MOST_PENDING = 64  # checks; one more waits for the oldest


class Copy:
    """A small tensor of any device, on its way to the host."""

    __slots__ = ("event", "host")

    def __init__(self, x: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        if x.device.type != "cuda":
            self.host = x.cpu()
            return
        with torch.cuda.device(x.device):
            self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.host.copy_(x, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def is_here(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> Tensor:
        """The numbers; this waits for the copy alone, not for work that was queued after it."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None
        return self.host


def defers(device: torch.device) -> bool:
    """Whether a read from the host would wait, and a late check is possible: not while a CUDA graph is captured."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def may_read(host_read: bool, device: torch.device) -> bool:
    """Whether the host may look: not where it was told not to, and not while a CUDA graph is being captured."""
    return host_read and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


Check = Callable[[Tensor], None]  # raises ValueError
_PENDING: collections.deque[tuple[Copy, Check]] = collections.deque()


def check_later(x: Tensor, check: Check) -> None:
    """Run a check on these numbers of a device once they have reached the host."""
    if len(_PENDING) >= MOST_PENDING:
        _settle()
    _PENDING.append((Copy(x), check))


def check_pending(wait: bool = False) -> None:
    """Run the checks whose numbers are here; with `wait`, all of them."""
    if _PENDING and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return  # where nothing may ask whether an event has happened
    while _PENDING and (wait or _PENDING[0][0].is_here()):
        _settle()


def _settle() -> None:
    try:
        copy, check = _PENDING.popleft()
    except IndexError:  # another thread was faster
        return
    try:
        check(copy.wait())
    except ValueError as error:
        raise ValueError(
            f"{error}.  Found after an earlier call had returned: the loss and gradients of that call are wrong"
        ) from error


@atexit.register
def _at_the_end() -> None:
    try:
        check_pending(wait=True)
    except ValueError as error:
        warnings.warn(f"headloss: {error}", stacklevel=1)
