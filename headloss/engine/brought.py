"""What terms bring to a call themselves: other targets, as a sparse teacher of one id per row that nobody has to pass.

    hl.Term(cross_entropy, targets="nll_targets")

One more column of each row is picked in the same sweep.  The rest of the engine sees a teacher, an input of targets
and a row weight, which is 0 where that column is -100.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headloss.engine.arguments import CallArguments
from headloss.late import check_later, defers
from headloss.rows import IGNORE, Prepared
from headloss.segments import integers, readable
from headloss.sources import Sparse
from headloss.term import Term
from headloss.terms import Terms
from headloss.trace.signature import ONLY, counts_of, targets_of


def brought(terms: Terms, arguments: CallArguments) -> CallArguments:
    """The same call, with what its terms bring."""
    named = {t.targets: name for name, t in terms.terms.items() if t.targets is not None and _is_on(name, t, arguments)}
    if not named:
        return arguments
    inputs, teachers = dict(arguments.inputs), _named(arguments.teacher)
    main = arguments.targets.targets if isinstance(arguments.targets, Prepared) else arguments.targets
    for name, term in named.items():
        x = inputs.pop(name, None)
        if x is None:
            raise TypeError(f"{name}: missing; term {term!r} takes its targets from it")
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: wanted a tensor of targets, got {type(x).__name__}")
        x = integers(name, x)
        leading = arguments.source.leading
        if tuple(x.shape) != leading:
            raise ValueError(f"{name}: wanted shape {leading} to match the source, got {tuple(x.shape)}")
        _check(name, x, main, arguments.source.vocab)
        inputs[counts_of(name)] = x != IGNORE
        inputs[name] = x.masked_fill(x == IGNORE, 0)
        ids = inputs[name].unsqueeze(-1)
        teachers[targets_of(name)] = Sparse(ids, torch.zeros(ids.shape, dtype=torch.float32, device=ids.device))
    asked = {n for t in terms.every_term for n in t.call(None, teachers).input_names}
    asked |= {n for _, call in terms.metrics if not isinstance(call.fn, Term) for n in call.input_names}
    inputs = {n: x for n, x in inputs.items() if n in asked or n not in named}
    return arguments._replace(teacher=teachers, inputs=inputs)


def _is_on(name: str, term: Term, arguments: CallArguments) -> bool:
    weight = (arguments.options.weights or {}).get(name, term.weight)
    return isinstance(weight, Tensor) or weight != 0


def _named(teacher: Any) -> dict[str, Any]:
    if teacher is None:
        return {}
    return dict(teacher) if isinstance(teacher, Mapping) else {ONLY: teacher}


def _check(name: str, x: Tensor, main: Tensor | None, vocab: int) -> None:
    """In range, and -100 wherever the targets are: rows that those leave out are left out of every term."""
    alone = (x != IGNORE) & (main == IGNORE) if main is not None else torch.zeros_like(x, dtype=torch.bool)
    wrong = (x != IGNORE) & ((x < 0) | (x >= vocab))
    numbers = torch.stack([alone.sum(), wrong.sum()])

    def check(found: Tensor) -> None:
        left_out, outside = found.tolist()
        if outside:
            raise ValueError(f"{name}: wanted values in [0, {vocab}) or {IGNORE}, but {outside} are neither")
        if left_out:
            raise ValueError(
                f"{name}: {left_out} rows have one whose target is {IGNORE}, and such rows are left out of every term; "
                f"give them a target too, and leave them out of the other terms by a row weight of 0"
            )

    if readable(x):
        check(numbers)
    elif x.device.type == "cuda" and not torch.compiler.is_compiling() and defers(x.device):
        check_later(numbers, check)
    elif x.device.type != "meta":
        torch._assert_async((numbers == 0).all(), f"{name}: out of range, or in rows whose target is {IGNORE}")
