"""`headloss check --objective module:name`: `hl.verify` of your own loss, on random data of the right shapes.

Dimension key:  N rows   V vocabulary   D hidden size   S segments   P pairs   K ids per row
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headloss as hl
from headloss.cli.problem import Asked, example

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(where: str) -> hl.Objective:
    """The objective at "module:name": an Objective, a Term, a loss, or a function without arguments that makes one."""
    module, colon, name = where.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"wanted module:name, as in my_losses:focal, got {where!r}")
    if module.endswith(".py"):
        raise ValueError(f"wanted a module, not a file; write {Path(module).stem}:{name}, in the folder of that file")
    sys.path.insert(0, os.getcwd())  # like python -m
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"cannot import {module!r}: {error}") from None
    except Exception as error:  # whatever the file itself raises
        raise ValueError(f"cannot import {module!r}: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {name!r}")
        found = getattr(found, part)
    if callable(found) and not isinstance(found, hl.Term) and not inspect.signature(found).parameters:
        found = found()
    if isinstance(found, hl.Objective):
        return found
    if not callable(getattr(found, "fn", found)):
        raise ValueError(f"{where}: wanted an Objective, a Term or a function, got {type(found).__name__}")
    return hl.Objective(**{part: found})


def inputs_of(objective: hl.Objective) -> str:
    """The names of the inputs that random data is made for."""
    return ", ".join(sorted(Asked.of(objective).inputs))


def raised_at(error: BaseException) -> str:
    """ " (file:line)", the last line outside of headloss and torch that an error passed through; or nothing."""
    inside = tuple(str(Path(module.__file__ or "").parent) for module in (hl, torch))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inside)]
    last = next((f for f in reversed(frames) if Path(f.filename).is_file()), None)
    return "" if last is None else f" ({Path(last.filename).name}:{last.lineno})"


def make(
    objective: hl.Objective, N: int, V: int, D: int, dtype: torch.dtype, device: str, seed: int, head: str, top_k: int
) -> tuple[Any, Tensor, dict[str, Any]]:
    """A source, targets and whatever else the signatures ask for, drawn at random."""
    random = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
    hidden, weight = normal(N, D).to(dtype), (normal(V, D) * 2 / D**0.5).to(dtype)
    targets = torch.randint(V, (N,), generator=random)
    targets[torch.rand(N, generator=random) < 0.1] = -100
    logits = hidden.double() @ weight.double().T
    logprob = logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    asked = Asked.of(objective)
    S = max(2, N // 8)
    S -= S % 2
    call: dict[str, Any] = {}
    if asked.segments or any(t.needs_segments for t in objective.terms.values()):
        bounds = torch.linspace(0, N, S + 1).round().long()
        call["segments"] = hl.Segments.from_cu_seqlens(bounds.to(device))
    for name in asked.reduced:  # two segments per pair
        call[name] = hl.Segments.from_cu_seqlens(torch.linspace(0, N, S // 2 + 1).round().long().to(device))
    call |= {name: targets.to(device) for name in asked.targets}
    K = top_k or 8 if top_k or asked.sparse else 0
    call |= asked.named({n: _teacher(normal(N, V) * 2, K, dtype, device) for n in sorted(asked.teachers)})
    for name in sorted(asked.inputs):
        call[name] = example(name, N, S, logprob, normal).to(device)
    ready = lambda x: x.to(device).requires_grad_()
    source = hl.Logits(ready(logits.to(dtype))) if head == "logits" else hl.Linear(ready(hidden), ready(weight))
    return source, targets.to(device), call


def _teacher(logits: Tensor, K: int, dtype: torch.dtype, device: str) -> Any:
    if not K:
        return hl.Logits(logits.to(dtype).to(device))
    top = logits.log_softmax(-1).topk(min(K, logits.shape[1]))
    return hl.Sparse(top.indices.to(device), top.values.float().to(device))
