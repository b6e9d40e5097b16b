"""Checks of numbers on a device for which no call waits: the numbers reach the host later, and are checked then.

A call that reads its targets on the host waits for all work queued before it: in a training step, the whole forward
pass.  So the numbers travel in a copy that nothing waits for, or a kernel writes them straight into host memory.  If
they are wrong, the next call raises, or the meter when it is read.
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

MOST_PENDING = 64  # checks; adding one more waits for the oldest


class HostCopy:
    """A copy of a small tensor to the host, started but not waited for."""

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

    def arrived(self) -> bool:
        event = self.event
        return event is None or event.query()

    def wait(self) -> Tensor:
        """The numbers.  This waits for the copy alone, not for work queued after it."""
        event = self.event
        if event is not None:
            event.synchronize()
            self.event = None
        return self.host


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured.  A CUDA build without a driver cannot answer, so we ask it last."""
    return torch.cuda._initialized and not torch.cuda._is_in_bad_fork() and torch._C._cuda_isCurrentStreamCapturing()


@functools.cache
def is_cuda(device: torch.device) -> bool:
    """Cached, because `device.type` builds a new string each time, at a third of the cost of an allocation."""
    return device.type == "cuda"


def should_defer(device: torch.device) -> bool:
    """Whether a host read would wait and the check can come later: on CUDA, except while a graph is captured."""
    return is_cuda(device) and not is_capturing()


def may_read(host_read: bool, device: torch.device) -> bool:
    """Whether the host may read the device: not if the caller forbade it, nor while a CUDA graph is captured."""
    return host_read and not (is_cuda(device) and is_capturing())


class HostSlots:
    """A few integers that a kernel writes straight into host memory, which costs less than a copy and an event.

    A kernel's stores to pinned memory are visible to the host when it ends, if not before, and each arrives whole.
    """

    __slots__ = ("device", "host", "slots")

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.host = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.slots = (ctypes.c_int64 * count).from_address(self.host.data_ptr())

    def arrived(self) -> bool:
        return _UNSET not in self.slots[:]

    def wait(self) -> Tensor:
        while not self.arrived():
            if torch.cuda.current_stream(self.device).query():  # which raises if the device has failed
                torch.cuda.synchronize(self.device)  # the kernel may run on another stream
                break
            time.sleep(2e-5)
        return self.host


_UNSET = -(1 << 62) - 25_847  # neither a count nor a token; an equal number would be noticed late, but not lost
_FREE: dict[tuple[torch.device, int], list[HostSlots]] = {}  # allocating pinned memory costs as much as a launch


def host_slots(device: torch.device, count: int = 3) -> HostSlots:
    """Host memory that a kernel on this device writes `count` integers to; `check_later` takes it and reuses it."""
    try:
        found = _FREE[device, count].pop()
    except (KeyError, IndexError):  # none is free, or another thread took it
        found = HostSlots(device, count)
    found.slots[:] = [_UNSET] * count
    return found


class Alarm:
    """Integers in host memory, one per kind of error, that kernels write to when they find one; nothing waits."""

    __slots__ = ("armed", "device", "host", "messages", "slots")

    def __init__(self, device: torch.device, messages: tuple[str, ...]) -> None:
        self.device, self.messages, self.armed = device, messages, False
        pin, count = device.type == "cuda", len(messages)
        self.host = torch.full((count,), _UNSET, dtype=torch.int64, device="cpu", pin_memory=pin)
        self.slots = (ctypes.c_int64 * count).from_address(self.host.data_ptr())

    def check(self, wait: bool) -> None:
        """Raise if a kernel found an error; with `wait`, after everything launched so far has run."""
        if wait and self.armed and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.armed = False
        found = self.slots[:]
        if found.count(_UNSET) == len(found):
            return
        for number, message in zip(found, self.messages, strict=True):
            if number != _UNSET:
                self.slots[:] = [_UNSET] * len(found)
                raise ValueError(f"{message.replace('{}', str(number))}{_LATE}")  # not `format`: names may have braces


_ALARMS: dict[Any, Alarm] = {}


def alarm(device: torch.device, *messages: str) -> Tensor:
    """Host memory for kernels on this device: one slot per message, for the wrong number that the message shows."""
    found = _ALARMS.get((device, messages))
    if found is None:
        found = _ALARMS[device, messages] = Alarm(device, messages)
    found.armed = True
    return found.host


_LATE = ".  Found after an earlier call had returned: the loss and gradients of that call are wrong"
Check = Callable[[Tensor], None]  # raises ValueError
_PENDING: collections.deque[tuple[HostCopy | HostSlots, Check]] = collections.deque()


def check_later(x: Tensor | HostSlots, check: Check) -> None:
    """Run a check on these device numbers once they have reached the host; fake tensors have none, and are skipped."""
    if isinstance(x, FakeTensor):
        return
    _PENDING.append((x if isinstance(x, HostSlots) else HostCopy(x), check))  # first: a kernel may still write to it
    if len(_PENDING) > MOST_PENDING:
        _check_oldest()


def readable(x: Tensor) -> bool:
    """Whether the host can read it without waiting; while a graph is traced, there are no numbers yet."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)


def check_now_or_later(numbers: Tensor, zeros: Tensor, check: Callable[[Tensor], None], message: str) -> None:
    """Check now if the host can read the numbers, else once they reach it or on the device, where `zeros` must be 0."""
    if readable(numbers):
        check(numbers)
    elif numbers.device.type == "cuda" and not torch.compiler.is_compiling() and should_defer(numbers.device):
        check_later(numbers, check)
    elif numbers.device.type != "meta":
        torch._assert_async((zeros == 0).all(), message)


def check_zero(message: str, *wrong: tuple[Tensor, str]) -> None:
    """Raise with the text of the first number that is not 0, which replaces its {}; `message` is for the device."""
    numbers, texts = torch.stack([number.long() for number, _ in wrong]), [text for _, text in wrong]

    def check(found: Tensor) -> None:
        for number, text in zip(found.tolist(), texts, strict=True):
            if number:
                raise ValueError(text.replace("{}", str(number)))

    check_now_or_later(numbers, numbers, check, message)


def check_pending(wait: bool = False) -> None:
    """Run the checks whose numbers have arrived; with `wait`, all of them."""
    if (_PENDING or _ALARMS) and (torch.cuda._is_in_bad_fork() or is_capturing()):
        return  # after a fork the checks are the parent's; during capture no event may be queried
    while _PENDING and (wait or _PENDING[0][0].arrived()):
        _check_oldest()
    for each in tuple(_ALARMS.values()):
        each.check(wait)


def _check_oldest() -> None:
    try:
        copy, check = _PENDING.popleft()
    except IndexError:  # another thread was faster
        return
    try:
        check(copy.wait())
        if isinstance(copy, HostSlots):
            _FREE.setdefault((copy.device, len(copy.host)), []).append(copy)
    except ValueError as error:
        raise ValueError(f"{error}{_LATE}") from error


@atexit.register
def _check_at_exit() -> None:
    try:
        check_pending(wait=True)
    except ValueError as error:
        warnings.warn(f"headloss: {error}", stacklevel=1)
