"""The backends that run a call.  Each is a module that offers the engine the same names; none imports another."""

from __future__ import annotations

import functools
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import float32, float64

if TYPE_CHECKING:
    import torch  # not at run time, where `torch` in this module becomes the backend of that name

BACKENDS = ("auto", "torch", "triton")
MODULES = {"torch": "headloss.backends.torch", "triton": "headloss.backends.triton.backend"}


def check_backend(name: str) -> None:
    if not isinstance(name, str) or name not in BACKENDS:
        hint = "; a term cannot have this name" if callable(name) else ""
        raise ValueError(f"backend: wanted one of {', '.join(BACKENDS)}, got {name!r}{hint}")


def choose(name: str, device: torch.device, dtype: torch.dtype = float32) -> ModuleType:
    """The backend asked for, never swapped for another; "auto" means triton on CUDA if it can run, else torch."""
    return import_module(MODULES[resolve(name, device, dtype)])


@functools.lru_cache(64)
def resolve(name: str, device: torch.device, dtype: torch.dtype = float32) -> str:
    """The name of the backend that `name` means for tensors of this device and dtype; an error if there is none."""
    check_backend(name)
    if name == "auto":
        able = device.type == "cuda" and dtype != float64 and find_spec("triton") is not None
        return "triton" if able else "torch"
    if name == "triton":
        if find_spec("triton") is None:
            raise RuntimeError('backend: "triton" needs the package triton, not installed here; use backend="torch"')
        if device.type not in ("cuda", "meta") and not _interprets():
            raise ValueError(
                f'backend: "triton" needs CUDA, got {device.type}; use backend="torch", or set TRITON_INTERPRET=1 in '
                f"the environment before triton is imported (torch.compile imports it)"
            )
        if dtype == float64:
            raise TypeError('backend: "triton" computes in float32, got float64; use backend="torch"')
    return name


def _interprets() -> bool:
    """Whether Triton interprets its kernels: it decides when it is imported."""
    language: Any = sys.modules.get("triton.language")
    if language is None:
        return os.environ.get("TRITON_INTERPRET") == "1"
    return type(language.cdiv).__name__ == "InterpretedFunction"
