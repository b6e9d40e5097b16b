"""Random objectives: any mix of the package's losses, with random weights, options, reductions and temperatures.

The `random` passed in decides everything, so a seed (or hypothesis) can repeat it.  With `numbers` another one draws
the weights and the numerical options: the same structure comes back with other numbers.
"""

from __future__ import annotations

import inspect
import random as standard
from collections.abc import Callable, Sequence
from typing import Any

import headloss as hl
from headloss.divergence import TAILS, is_divergence
from headloss.facts import FACTS
from headloss.losses import LOSSES
from headloss.reductions import REDUCTIONS
from headloss.teachers import COMPARING

DIVERGENCES = tuple(name for name, fn in LOSSES.items() if is_divergence(fn))
STUDENT = tuple(name for name, fn in LOSSES.items() if {*inspect.signature(fn).parameters} & {*FACTS} - {*COMPARING})
WHOLE = ("clip_cov", "kl_cov")  # look at all rows of a call, so that micro-batches do not add up
OF_SEGMENTS = ("pairs", "desirable", "optimal_advantage")  # inputs that are not one value per row
TEMPERATURES = (2.0, 0.7)
METRICS = ("entropy", "accuracy", "perplexity", "lse", "sum_p2", "max_logprob")
CHOICES: dict[tuple[str, str], tuple[Any, ...]] = {  # options that are no floats
    ("kl_to_reference", "estimator"): ("k1", "k2", "k3"),
    ("kl_to_reference", "corrected"): (False, True),
    ("dppo", "divergence"): ("tv", "kl"),
    ("dppo", "form"): ("score", "ratio"),
    ("dppo", "one_sided"): (False, True),
    ("dpo", "link"): ("sigmoid", "robust", "aot", "aot_unpaired"),  # those that take label_smoothing
    ("cpo", "average"): (False, True),
    ("kto", "average"): (False, True),
    ("gspo", "dual"): (None, 3.0),
    ("dpo", "average"): (False, True),
    ("grpo", "dual"): (None, 3.0),
    ("grpo", "delta"): (None, 1.7),
}
BRANCHED = ("beta", "alpha", "label_smoothing")  # some loss looks at it in Python, so each value has its own trace


CLASSES = ("class_weight", "class_mean", "class_cross_entropy")  # of a call that weighs its classes


def asks(fn: Callable[..., Any]) -> set[str]:
    """The names a loss wants injected."""
    return {p.name for p in inspect.signature(fn).parameters.values() if p.kind is not p.KEYWORD_ONLY}


def inputs_of(fn: Callable[..., Any]) -> set[str]:
    return asks(fn) - {*FACTS, "segments", "targets", "logp", "logq", "teacher_ids", "teacher_logprob", *CLASSES}


def options(random: standard.Random, name: str, numbers: standard.Random) -> dict[str, Any]:
    """Each option at its default or somewhere near."""
    found: dict[str, Any] = {}
    for p in inspect.signature(LOSSES[name]).parameters.values():
        if p.kind is not p.KEYWORD_ONLY or random.random() < 0.5:
            continue
        if (name, p.name) in CHOICES:
            found[p.name] = random.choice(CHOICES[name, p.name])
        elif isinstance(p.default, float):
            source = random if p.name in BRANCHED else numbers
            found[p.name] = round(p.default * source.uniform(0.5, 1.5), 6) if p.default else 0.1
    return found


def term(
    random: standard.Random,
    name: str,
    *,
    segments: bool,
    row_weight: bool = True,
    numbers: standard.Random | None = None,
) -> hl.Term:
    numbers = numbers or random
    reductions = [r for r in REDUCTIONS if segments or not r.startswith("seq_")]
    more: dict[str, Any] = options(random, name, numbers)
    reduction = random.choice(reductions)
    if reduction == "seq_mean_token_sum_norm":
        more["length"] = 7.0
    of_rows = LOSSES[name].returns == "row"  # type: ignore[attr-defined]
    if row_weight and of_rows and (reduction == "weighted_mean" or random.random() < 0.2):
        more["row_weight"] = "token_weight"
    if name in DIVERGENCES:
        more["tail"] = random.choice(TAILS)
    if random.random() < 0.2:
        more["temperature"] = random.choice(TEMPERATURES)
    return hl.Term(LOSSES[name], weight=round(numbers.uniform(0.05, 1.5), 3), reduction=reduction, **more)


def objective(
    random: standard.Random,
    names: Sequence[str] = STUDENT,
    *,
    most: int = 3,
    segments: bool = True,
    row_weight: bool = True,
    metrics: Sequence[str] = METRICS,
    numbers: standard.Random | None = None,
    **more: Any,
) -> hl.Objective:
    """Between one and `most` of the named losses; those that need segments only where there are some."""
    able = [n for n in names if segments or "segments" not in asks(LOSSES[n])]
    chosen = random.sample(able, random.randint(1, min(most, len(able))))
    terms = {name: term(random, name, segments=segments, row_weight=row_weight, numbers=numbers) for name in chosen}
    return hl.Objective(**terms, metrics=random.sample(list(metrics), random.randint(0, min(2, len(metrics)))), **more)


def inputs_wanted(objective: hl.Objective) -> set[str]:
    names = {n for t in objective.terms.values() for n in inputs_of(t.fn)}
    return names | {t.row_weight for t in objective.terms.values() if isinstance(t.row_weight, str)}


def needs_segments(objective: hl.Objective) -> bool:
    return any(t.needs_segments for t in objective.terms.values())
