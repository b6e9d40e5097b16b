"""Losses: plain functions of facts, one small file each; this module finds the files of its folder.

A file here that defines `def my_loss(logprob, ...)` makes `headloss.losses.my_loss` and a name for configs.  Files that
begin with an underscore hold code that several losses share.  A loss whose inputs or values are not all per row
declares it: `kto.per_segment`, `kto.returns` (see `headloss.engine.layout`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

LOSSES: dict[str, Callable[..., Any]] = {}

for _found in sorted(iter_modules(__path__), key=lambda m: m.name):
    if not _found.name.startswith("_"):
        _module = import_module(f"{__name__}.{_found.name}")
        for _name, _fn in inspect.getmembers(_module, inspect.isfunction):
            if _fn.__module__ == _module.__name__ and not _name.startswith("_"):
                LOSSES[_name] = _fn
                _fn.__dict__.setdefault("per_segment", ())
                _fn.__dict__.setdefault("returns", "row")

globals().update(LOSSES)
__all__ = ["LOSSES", *LOSSES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    raise AttributeError(f"headloss.losses has no loss {name!r}; there are {', '.join(sorted(LOSSES))}")
