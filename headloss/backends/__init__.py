"""Ways to run the two sweeps.  Each backend is a module with `sums` and `pull`; none imports another."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

BACKENDS = ("auto", "torch")


def check_backend(name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"backend: wanted one of {', '.join(BACKENDS)}, got {name!r}")


def choose(name: str, device: torch.device) -> ModuleType:
    """The backend asked for; it is never swapped for another."""
    check_backend(name)
    return import_module("headloss.backends.torch")
