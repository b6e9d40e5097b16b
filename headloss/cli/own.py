"""`headloss check --objective module:name`: `hl.verify` of a loss of your own, on random data of the right shapes.

Dimension key:  N rows   V vocabulary   D hidden size   S segments   P pairs   K ids per row
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headloss as hl
from headloss.cli.problem import example
from headloss.divergence import is_divergence
from headloss.facts import FACTS
from headloss.losses import LOSSES
from headloss.teachers import COMPARING, SPARSE
from headloss.trace.signature import TEACHER_INPUTS, read_signature

_THEIRS = {*TEACHER_INPUTS, *COMPARING} - {"top_ids", "top_logprob"}  # facts that only a teacher has
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(where: str) -> hl.Objective:
    """The objective at "module:name": an Objective, a Term, a loss, or a function without arguments that makes one."""
    module, colon, name = where.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"wanted module:name, as in my_losses:focal, got {where!r}")
    if module.endswith(".py"):
        raise ValueError(f"wanted a module and no file; write {Path(module).stem}:{name}, in the folder of that file")
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
    asked = set(_asked(objective))
    S = max(2, N // 8)
    S -= S % 2
    call: dict[str, Any] = {}
    if "segments" in asked or any(t.needs_segments for t in objective.terms.values()):
        bounds = torch.linspace(0, N, S + 1).round().long()
        call["segments"] = hl.Segments.from_cu_seqlens(bounds.to(device))
    over = {t.reduction_segments for t in objective.terms.values() if t.reduction_segments}
    for name in over:  # two segments per pair
        call[name] = hl.Segments.from_cu_seqlens(torch.linspace(0, N, S // 2 + 1).round().long().to(device))
    call |= {t.targets: targets.to(device) for t in objective.terms.values() if t.targets}
    names = {t.teacher or "teacher" for t in objective.terms.values() if looks(t)}
    names |= {"teacher"} if not names and any(n in _THEIRS for n in asked) else set()
    sparse = top_k or any(n in TEACHER_INPUTS or n in SPARSE for n in asked)
    if names:
        made = {n: _teacher(normal(N, V) * 2, top_k or 8 if sparse else 0, dtype, device) for n in sorted(names)}
        call["teacher"] = made["teacher"] if names == {"teacher"} else made
    for name in sorted(asked - {*FACTS, *TEACHER_INPUTS, "segments", "targets"}):
        call[name] = example(name, N, S, logprob, normal).to(device)
    ready = lambda x: x.to(device).requires_grad_()
    source = hl.Logits(ready(logits.to(dtype))) if head == "logits" else hl.Linear(ready(hidden), ready(weight))
    return source, targets.to(device), call


_ANY = "teacher_cross_entropy"  # stands for anything that needs a teacher of either kind


def _functions(objective: hl.Objective) -> Iterator[Callable[..., Any]]:
    for term in objective.terms.values():
        yield term.fn
        yield from (w for w in term.row_weights if callable(w))
    asked = objective.asked
    for metric in asked.values() if hasattr(asked, "values") else asked:
        if isinstance(metric, str) and metric in LOSSES and is_divergence(LOSSES[metric]):
            yield LOSSES[metric]
        elif callable(metric):
            yield metric
        elif isinstance(metric, hl.Term):
            yield metric.fn


def _asked(objective: hl.Objective) -> Iterator[str]:
    """What losses, row weights and metrics ask for, by name."""
    named = {name: fact for term in objective.terms.values() for name, (fact, _) in term.facts.items()}
    for fn in _functions(objective):
        own = [_ANY] if is_divergence(fn) else [p.name for p in read_signature(fn, top=1).parameters]
        yield from (named.get(name, name) for name in own)
    yield from (taken for term in objective.terms.values() for taken in term.inputs.values())
    for term in objective.terms.values():
        yield from (w for w in term.row_weights if isinstance(w, str))
    asked = objective.asked
    for metric in asked.values() if hasattr(asked, "values") else asked:
        if metric == "teacher_agreement":
            yield _ANY
        elif isinstance(metric, str) and metric in FACTS:
            yield metric


def looks(term: hl.Term) -> bool:
    """Whether a term uses a teacher."""
    names = [p.name for p in read_signature(term.fn, top=1).parameters] + [fact for fact, _ in term.facts.values()]
    return is_divergence(term.fn) or any(n in _THEIRS for n in names)


def _teacher(logits: Tensor, K: int, dtype: torch.dtype, device: str) -> Any:
    if not K:
        return hl.Logits(logits.to(dtype).to(device))
    top = logits.log_softmax(-1).topk(min(K, logits.shape[1]))
    return hl.Sparse(top.indices.to(device), top.values.float().to(device))
