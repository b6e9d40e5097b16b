"""Measures the memory that a piece of work allocates on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of tensors that `work` holds at one time, by its allocations and releases on the CPU."""
    with _no_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Silences the file descriptor, not sys.stderr, because the profiler writes there."""
    saved = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
