"""Numbers on their way from a device to the host, and checks that come late so that no call has to wait for them.

A call that reads its targets from the host waits for all work that was queued before it: in a training step that is
the whole forward pass.  So the numbers travel by a copy that nothing waits for, or a kernel writes them where the host
reads.  The next call, or the meter when it is read, raises if they are wrong.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

MOST_PENDING = 64  # checks; one more waits for the oldest


class Copy:
    """A small tensor of any device, on its way to the host."""

    __slots__ = ("event", "host")

    def __init__(self, x: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        device = x.device
        if device.type != "cuda":
            self.host = x.cpu()
        elif device.index == torch._C._cuda_getDevice():
            self._start(x)
        else:
            with torch.cuda.device(device):
                self._start(x)

    def _start(self, x: Tensor) -> None:
        self.host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
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


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured; a build for CUDA on a machine without a driver has no answer."""
    return torch.cuda._initialized and not torch.cuda._is_in_bad_fork() and torch._C._cuda_isCurrentStreamCapturing()


@functools.cache
def is_cuda(device: torch.device) -> bool:
    """Asked once: `device.type` makes its string anew, and that costs a third of an allocation."""
    return device.type == "cuda"


def defers(device: torch.device) -> bool:
    """Whether a read from the host would wait, and a late check is possible: not while a CUDA graph is captured."""
    return is_cuda(device) and not is_capturing()


def may_read(host_read: bool, device: torch.device) -> bool:
    """Whether the host may look: not where it was told not to, and not while a CUDA graph is being captured."""
    return host_read and not (is_cuda(device) and is_capturing())


class Landing:
    """A few whole numbers that a kernel writes into memory of the host: less work than a copy and an event.

    A kernel's stores to pinned memory are seen at the latest when it ends, each of them whole.
    """

    __slots__ = ("device", "host", "seen")

    def __init__(self, device: torch.device, count: int) -> None:
        self.device, self.host = (
            device,
            torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"),
        )
        self.seen = (ctypes.c_int64 * count).from_address(self.host.data_ptr())

    def is_here(self) -> bool:
        return _UNSET not in self.seen[:]

    def wait(self) -> Tensor:
        while not self.is_here():
            if torch.cuda.current_stream(self.device).query():  # which raises if the device has failed
                torch.cuda.synchronize(self.device)  # the kernel may be in another stream
                break
            time.sleep(2e-5)
        return self.host


_UNSET = -(1 << 62) - 25_847  # no count, and no target that a tokenizer gives; one that is equal comes late, not never
_FREE: dict[tuple[torch.device, int], list[Landing]] = {}  # to ask for pinned memory anew costs as much as a launch


def landing(device: torch.device, count: int = 3) -> Landing:
    """For a kernel on this device to write so many numbers to; `check_later` takes it and frees it."""
    try:
        found = _FREE[device, count].pop()
    except (KeyError, IndexError):  # there is none, or another thread was faster
        found = Landing(device, count)
    found.seen[:] = [_UNSET] * count
    return found


class Alarm:
    """Whole numbers in memory of the host, each for kernels to write to when one thing is wrong; nothing waits."""

    __slots__ = ("armed", "device", "host", "messages", "seen")

    def __init__(self, device: torch.device, messages: tuple[str, ...]) -> None:
        self.device, self.messages, self.armed = device, messages, False
        pin, count = device.type == "cuda", len(messages)
        self.host = torch.full((count,), _UNSET, dtype=torch.int64, device="cpu", pin_memory=pin)
        self.seen = (ctypes.c_int64 * count).from_address(self.host.data_ptr())

    def ring(self, wait: bool) -> None:
        """Raise if something was wrong; with `wait`, in anything that was launched."""
        if wait and self.armed and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.armed = False
        found = self.seen[:]
        for number, message in zip(found, self.messages, strict=True):
            if number != _UNSET:
                self.seen[:] = [_UNSET] * len(found)
                raise ValueError(f"{message.replace('{}', str(number))}{_LATE}")  # a name in it may have braces


_ALARMS: dict[Any, Alarm] = {}


def alarm(device: torch.device, *messages: str) -> Tensor:
    """Memory for a kernel on this device to write wrong numbers to, one place for each message, which may show it."""
    found = _ALARMS.get((device, messages))
    if found is None:
        found = _ALARMS[device, messages] = Alarm(device, messages)
    found.armed = True
    return found.host


_LATE = ".  Found after an earlier call had returned: the loss and gradients of that call are wrong"
Check = Callable[[Tensor], None]  # raises ValueError
_PENDING: collections.deque[tuple[Copy | Landing, Check]] = collections.deque()


def check_later(x: Tensor | Landing, check: Check) -> None:
    """Run a check on these numbers of a device once they have reached the host; fake ones are none."""
    if isinstance(x, FakeTensor):
        return
    _PENDING.append((x if isinstance(x, Landing) else Copy(x), check))  # first: a kernel may yet write to its memory
    if len(_PENDING) > MOST_PENDING:
        _settle()


def check_pending(wait: bool = False) -> None:
    """Run the checks whose numbers are here; with `wait`, all of them."""
    if (_PENDING or _ALARMS) and (torch.cuda._is_in_bad_fork() or is_capturing()):
        return  # those of the process that this one was forked from; or nothing may ask whether an event has happened
    while _PENDING and (wait or _PENDING[0][0].is_here()):
        _settle()
    for rung in tuple(_ALARMS.values()):
        rung.ring(wait)


def _settle() -> None:
    try:
        copy, check = _PENDING.popleft()
    except IndexError:  # another thread was faster
        return
    try:
        check(copy.wait())
        if isinstance(copy, Landing):
            _FREE.setdefault((copy.device, len(copy.host)), []).append(copy)
    except ValueError as error:
        raise ValueError(f"{error}{_LATE}") from error


@atexit.register
def _at_the_end() -> None:
    try:
        check_pending(wait=True)
    except ValueError as error:
        warnings.warn(f"headloss: {error}", stacklevel=1)
