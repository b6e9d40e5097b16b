"""Print one line on a terminal, once, if a first call is slow: it traces its losses, which loads torch's compiler."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AFTER = 2.0  # seconds
_reported = threading.Event()


@contextmanager
def report_if_slow() -> Iterator[None]:
    if _reported.is_set() or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(AFTER, _report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _report() -> None:
    if not _reported.is_set():
        _reported.set()
        said = "headloss: tracing the losses of a first call, which loads torch's compiler; later calls do neither"
        print(said, file=sys.stderr, flush=True)
