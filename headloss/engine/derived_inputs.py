"""Turn `ids=`, own targets, top columns, class weights and reduction segments into ordinary teachers and inputs.

The rest of the engine sees the columns that a call or a term names as a sparse teacher:

    objective(source, targets, ids=choices)            the facts `ids_logprob` and `ids_logit` of these columns
    hl.Term(cross_entropy, targets="nll_targets")      a term's own targets: one more column per row
    hl.Term(margin, top=2)                             the likeliest columns of each row, which the sweep finds

A term's own targets also become an input, and a row weight that is 0 where the target is -100.  The segments in
`hl.Term(gspo, reduction="seq_mean_token_mean", reduction_segments="prompts")` become an input that says how much each
row counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headloss.deferred_checks import check_now_or_later, check_zero
from headloss.derived_teachers import Top
from headloss.engine.arguments import CallArguments
from headloss.engine.autograd_contract import refuse_transforms
from headloss.engine.layout import Marked, PerRow
from headloss.engine.plan import plain_source
from headloss.engine.teachers import named_teachers
from headloss.prepared import Prepared
from headloss.reductions import NEEDS_SEGMENTS, shares
from headloss.rows import IGNORE
from headloss.segments import Segments, check_device, group_sum, integers
from headloss.sources import Linear, Logits, Source, Sparse
from headloss.teachers import TOP
from headloss.term import Term
from headloss.terms import Terms
from headloss.trace.call import facts_of, inputs_of
from headloss.trace.signature import CANDIDATES, CLASSES, counts_of, targets_of, weighs_classes


def with_derived_inputs(terms: Terms, arguments: CallArguments, explained: bool = False) -> CallArguments:
    """The same call with the teachers and inputs that its terms need.  `explained`: it will not run, so it makes no
    collective."""
    if "class_weight" in arguments.inputs:
        if not torch.compiler.is_compiling():
            refuse_transforms(arguments)  # now: what we make of class weights has no tangent
        arguments = _with_classes(terms, arguments)
    if any(t.reduction_segments for t in terms.every_term):
        arguments = _with_shares(terms, arguments, explained)
    named = {t.targets: name for name, t in terms.terms.items() if t.targets is not None and _is_on(name, t, arguments)}
    teachers = named_teachers(arguments.teacher)
    tops = [f.teacher for t in terms.every_term if t.top for f in facts_of(t.call(None, teachers)) if f.name in TOP]
    teachers |= {name: Top.named(name) for name in tops if name is not None}
    own = {t.targets for t in terms.terms.values() if t.targets is not None}  # those of terms that are off too
    if not named and not any(n in arguments.inputs for n in own):
        return arguments.but(teacher=teachers) if tops else arguments
    inputs = dict(arguments.inputs)
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
    asked = {n for t in terms.every_term for n in inputs_of(t.call(None, teachers))}
    asked |= {n for _, call in terms.metrics if not isinstance(call.fn, Term) for n in inputs_of(call)}
    inputs = {n: x for n, x in inputs.items() if n in asked or n not in own}
    return arguments.but(teacher=teachers, inputs=inputs)


def over_ranks(terms: Terms, arguments: CallArguments) -> int:
    """How many reduction segments are split over ranks, whose counts are then summed by a collective."""
    given = [arguments.inputs.get(t.reduction_segments) for t in reduced(terms, arguments).values()]  # type: ignore[arg-type]
    return sum(x.group is not None for x in given if isinstance(x, Segments))


def reduced(terms: Terms, arguments: CallArguments) -> dict[str, Term]:
    """The terms that are on and have reduction segments, one for each different reduction."""
    on = {n: t for n, t in terms.terms.items() if t.reduction_segments is not None and _is_on(n, t, arguments)}
    ways = {t.share: n for n, t in reversed(on.items())}
    return {n: on[n] for n in reversed(ways.values())}


def _with_shares(terms: Terms, arguments: CallArguments, explained: bool) -> CallArguments:
    """Replace reduction segments by an input that says how much each row counts."""
    found, inputs, source = reduced(terms, arguments), dict(arguments.inputs), plain_source(arguments.source)
    segments = {name: _reduction_segments(name, t, inputs, source) for name, t in found.items()}
    _check_num_segments(terms, arguments)
    inputs = {n: x for n, x in inputs.items() if n not in {t.reduction_segments for t in terms.every_term}}
    targets = arguments.targets.targets if isinstance(arguments.targets, Prepared) else arguments.targets
    for name, term in found.items():
        of, label = segments[name], str(term.reduction_segments)
        ids, num = of.ids.reshape(-1), of.num_segments
        valid = torch.ones_like(ids, dtype=torch.bool) if targets is None else (targets != IGNORE).reshape(-1)
        most = "their number" if torch.compiler.is_compiling() else num  # which may be a symbol, and has no text
        check_zero(
            f"{label}: an id is out of range, or a row that counts has none",
            (((ids >= num) | (ids < -1)).sum(), f"{label}: segment ids must lie in [-1, {most}), but {{}} do not"),
            ((valid & (ids < 0)).sum(), f"{label}: {{}} rows that are not ignored have no segment (id -1), but term "
             f"{name!r} is reduced over them"),
        )  # fmt: skip
        ids = torch.where(valid, ids.clamp(max=num - 1), -1)
        add = lambda x, group=of.group: x if group is None or explained else group_sum(x, group)
        share = shares(term.reduction, term.length, ids, num, arguments.options.num_segments, add)
        inputs[str(term.share)] = PerRow(share.to(source.fact_dtype).reshape(source.leading))
    return arguments.but(inputs=inputs)


def _reduction_segments(name: str, term: Term, inputs: Mapping[str, Any], source: Source) -> Segments:
    label = str(term.reduction_segments)
    found = inputs.get(label)
    if found is None:
        raise TypeError(f"{label}: missing; term {name!r} is reduced over these segments, pass {label}=hl.Segments...")
    if type(found) is not Segments:
        raise TypeError(f"{label}: wanted hl.Segments, which reduce term {name!r}, got {type(found).__name__}")
    found, rows = found.fitted(source.leading, source.device), torch.Size(source.leading).numel()
    check_device(label, found.ids, source.device)
    if found.ids.numel() != rows or (found.ids.ndim > 1 and tuple(found.ids.shape) != source.leading):
        raise ValueError(f"{label}: ids have shape {tuple(found.ids.shape)}, the source's rows {source.leading}")
    return found


def _check_num_segments(terms: Terms, arguments: CallArguments) -> None:
    """Raise if num_segments, which is one number, would have to count different segments."""
    if arguments.options.num_segments is None:
        return
    on = {n: t for n, t in terms.terms.items() if _is_on(n, t, arguments)}
    counted = {
        n: t for n, t in on.items() if t.reduction in NEEDS_SEGMENTS or getattr(t.fn, "returns", "") == "segment"
    }
    over = {t.reduction_segments: n for n, t in counted.items()}
    if len(over) > 1:
        one, other = list(over.values())[:2]
        raise ValueError(
            f"num_segments: is one number, but terms {one!r} and {other!r} are averaged over different segments; leave "
            f"it out, or put these terms into two objectives"
        )


def _with_classes(terms: Terms, arguments: CallArguments) -> CallArguments:
    """Replace class weights by one weight per row, its target's, and by a teacher with the same softmax in all rows.

    sum_c w_c log p_c is -(sum_c w_c) times the cross-entropy with that softmax, w / sum w.
    """
    weighing = {n: t for n, t in terms.terms.items() if weighs_classes(t.fn)}
    asking = {n: t for n, t in weighing.items() if _is_on(n, t, arguments)}
    inputs, source = dict(arguments.inputs), plain_source(arguments.source)
    calls = [*(t.call(None, {}) for t in terms.terms.values()), *(call for _, call in terms.metrics)]
    others = any("class_weight" in inputs_of(call) for call in calls)
    if not asking:
        if weighing and not others:  # every term that takes it is off
            del inputs["class_weight"]
        return arguments.but(inputs=inputs)
    if others:
        raise ValueError(
            f"class_weight: {next(iter(asking))!r} weighs its classes by it, and another function takes it too; give "
            f"that one an input of another name"
        )
    if arguments.support is not None and (kept := [n for n, t in asking.items() if t.support is None]):
        raise ValueError(
            f"class_weight: support= leaves columns out of the softmax of term {kept[0]!r}, and their weights would "
            f'count; give it support="all"'
        )
    w_V, targets = inputs.pop("class_weight"), arguments.targets
    w_V = w_V.value if isinstance(w_V, Marked) else w_V
    targets = targets.targets if isinstance(targets, Prepared) else targets
    for name, term in asking.items():
        if term.targets is not None or not isinstance(targets, Tensor):
            raise ValueError(
                f"class_weight: term {name!r} weighs by the targets of the call; pass them, without targets="
            )
    if not isinstance(w_V, Tensor) or not w_V.dtype.is_floating_point or tuple(w_V.shape) != (source.vocab,):
        got = f"{w_V.dtype} of shape {tuple(w_V.shape)}" if isinstance(w_V, Tensor) else type(w_V).__name__
        raise ValueError(f"class_weight: wanted a tensor of floats of shape ({source.vocab},), got {got}")
    check_device("class_weight", w_V, source.device)
    if w_V.requires_grad and torch.is_grad_enabled():
        raise ValueError("class_weight: requires grad, but no gradient flows to weights; pass it detached")
    w_V = w_V.detach().to(source.fact_dtype)
    wrong = "class_weight: wanted weights that are finite and not below 0"
    check_zero(wrong, ((w_V < 0).any() | ~w_V.isfinite().all(), wrong))
    start, rows = 0 if source.shard is None else source.shard.start, integers("targets", targets)  # type: ignore[arg-type]
    log_w = w_V[start : start + source.columns].log().expand(*source.leading, source.columns)
    inputs[CLASSES["class_weight"]] = PerRow(w_V[rows.clamp(0, source.vocab - 1)])
    inputs[CLASSES["class_mean"]] = w_V.mean()
    classes = {t.classes: Logits(log_w, scale=t.temperature or 1.0, shard=source.shard) for t in asking.values()}
    return arguments.but(teacher={**named_teachers(arguments.teacher), **classes}, inputs=inputs)


def _is_on(name: str, term: Term, arguments: CallArguments) -> bool:
    given = arguments.options.weights
    weight = given.get(name, term.weight) if isinstance(given, Mapping) else term.weight  # else a check raises
    return isinstance(weight, Tensor) or weight != 0


def with_candidates(teacher: Any, ids: Any, source: Source) -> Any:
    """The teachers of a call and, as one more, named `CANDIDATES`, the columns that `ids=` names in each row."""
    if ids is None or not isinstance(source, (Logits, Linear)):
        return teacher
    teachers, leading = named_teachers(teacher), source.leading
    ids = integers("ids", ids)
    if ids.ndim != len(leading) + 1 or tuple(ids.shape[:-1]) != leading or not ids.shape[-1]:
        wanted = f"({', '.join(map(str, leading))}, K), K columns of each row"
        raise ValueError(f"ids: wanted shape {wanted}, got {tuple(ids.shape)}")
    check_device("ids", ids, source.device)
    _check_candidates(ids.reshape(-1, ids.shape[-1]), source.vocab if source.vocab_ids is None else 1 << 62)
    return {**teachers, CANDIDATES: Sparse(ids, torch.zeros(ids.shape, dtype=torch.float32, device=ids.device))}


def _check_candidates(ids_NK: Tensor, vocab: int) -> None:
    """Raise if ids are out of range or repeated: the gradient of a repeated column would depend on the kernel."""
    if ids_NK.device.type == "meta" or not ids_NK.numel():
        return
    in_order_NK = ids_NK.sort(-1).values
    twice_NK = (in_order_NK[:, 1:] == in_order_NK[:, :-1]) & (in_order_NK[:, 1:] >= 0)
    wrong_N = torch.stack([((ids_NK < -1) | (ids_NK >= vocab)).any(-1), twice_NK.any(-1)])
    rows = torch.cat([wrong_N.sum(-1), wrong_N.long().argmax(-1)])  # how many rows, and the first

    def check(found: Tensor) -> None:
        outside, repeated, row, other = found.tolist()
        if outside:
            raise ValueError(f"ids: wanted columns in [0, {vocab}) or -1 for none, but row {row} has others")
        if repeated:
            raise ValueError(f"ids: wanted each column of a row once, but row {other} names one twice")

    check_now_or_later(rows, rows[:2], check, "ids: out of range, or one named twice in a row")


def _check(name: str, x: Tensor, main: Tensor | None, vocab: int) -> None:
    """Raise unless own targets are in range, and -100 where the call's are, whose rows are left out of every term."""
    alone = (x != IGNORE) & (main == IGNORE) if main is not None else torch.zeros_like(x, dtype=torch.bool)
    wrong = (x != IGNORE) & ((x < 0) | (x >= vocab))
    check_zero(
        f"{name}: out of range, or in rows whose target is {IGNORE}",
        (wrong.sum(), f"{name}: wanted values in [0, {vocab}) or {IGNORE}, but {{}} are neither"),
        (alone.sum(), f"{name}: {{}} rows have one whose target is {IGNORE}, and such rows are left out of every term; "
         f"give them a target too, and leave them out of the other terms by a row weight of 0"),
    )  # fmt: skip
