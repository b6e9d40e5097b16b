"""`vocab_ids=`, a head over some tokens of a larger vocabulary: translate a call to the head's columns, and back.

targets, ids, a sparse teacher's ids   become columns; a row whose target the head lacks is ignored, and counted
a dense teacher                        stays on the whole vocabulary, and is read at the tokens that the head has
argmax, top_ids                        become tokens again
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.deferred_checks import check_zero
from headloss.derived_teachers import AtIds, Top, is_whole, whole_of
from headloss.engine.arguments import CallArguments
from headloss.engine.layout import Marked
from headloss.engine.teachers import named_teachers
from headloss.metrics import Metric
from headloss.prepared import Prepared
from headloss.record import Facts, Output, facts_from, with_fields
from headloss.routed import Routed
from headloss.rows import IGNORE
from headloss.segments import integers
from headloss.sources import Linear, Logits, Sparse, with_tensors
from headloss.term import Term
from headloss.terms import Terms
from headloss.trace.call import facts_of
from headloss.trace.function_reads import is_ours
from headloss.trace.signature import weighs_classes
from headloss.vocab_ids import count, sorted_ids, to_columns

NUMBERS = ("targets", "argmax", "top_ids", "ids", "teacher_ids", "teacher_argmax")  # columns, not tokens


class Mapped(NamedTuple):
    """A call in terms of columns, and what maps its results back to tokens."""

    arguments: CallArguments
    vocab_ids: Tensor
    ignored: Tensor | None  # the ignored rows, including those whose target the head lacks
    missing: tuple[Tensor, Tensor] | None  # how many targets the head lacks, and out of how many

    def facts(self, facts: Facts) -> Facts:
        found = {key: self._tokens(key, x) for key, x in facts.items()}
        return facts_from(list(found.values()), list(found))

    def _tokens(self, key: Any, x: Tensor) -> Tensor:
        if (key if isinstance(key, str) else key[0]) not in NUMBERS:
            return x
        tokens = self.vocab_ids[x]
        if self.ignored is None:
            return tokens
        return tokens.masked_fill(self.ignored if x.ndim == self.ignored.ndim else self.ignored[..., None], 0)

    def output(self, out: Output) -> Output:
        metrics = dict(out.metrics)
        if self.missing is not None:
            metrics["vocab_missing"] = Metric("mean", self.missing, "token")
        return with_fields(out, facts=self.facts(out.facts), metrics=metrics)


def has_vocab_ids(source: Any) -> bool:
    return getattr(source, "vocab_ids", None) is not None


def in_columns(arguments: CallArguments, terms: Terms | None) -> Mapped:
    """The call on the head's own columns."""
    source, targets, inputs = arguments.source, arguments.targets, dict(arguments.inputs)
    ids = source.vocab_ids
    assert ids is not None
    if arguments.support is not None:
        raise ValueError("support: a head with vocab_ids has a vocabulary of its own; leave out one of the two")
    teachers = {name: _teacher(x, ids, source.shard) for name, x in named_teachers(arguments.teacher).items()}
    every = () if terms is None else terms.every_term
    for term in every:
        _check_numbers(term)
        facts = facts_of(term.call(None, teachers))
        named = [Top.named(n).of if n.startswith("top=") else n for n in (str(f.teacher) for f in facts)]
        wholly = [name.removeprefix("whole=") for name in named if name is not None and is_whole(name)]
        teachers |= {whole_of(n): AtIds(teachers[n].teacher, teachers[n].ids, True) for n in wholly if n in teachers}
    ignored = missing = lost = None
    if isinstance(targets, Prepared):
        if targets.tokens is None:
            raise ValueError("targets: were prepared without vocab_ids; use hl.prepare(targets, vocab_ids=...)")
        targets.tokens.check(ids)
        lost = targets.tokens.lost
        ignored, missing = targets.targets == IGNORE, (targets.tokens.missing, targets.tokens.counted)
        targets = targets.in_columns()
    elif targets is not None:
        tokens = integers("targets", targets)
        targets, lost = to_columns(ids, tokens, IGNORE, "targets")
        ignored, missing = targets == IGNORE, (count(lost), count(tokens != IGNORE))
    for name in {t.targets for t in every if t.targets is not None}:
        if isinstance(inputs.get(name), Tensor):
            own, _ = to_columns(ids, integers(name, inputs[name]), IGNORE, name)
            if lost is not None and own.shape == lost.shape:  # a row whose target is missing is left out of all terms
                own = own.masked_fill(lost, IGNORE)
            inputs[name] = own
    if "class_weight" in inputs and any(weighs_classes(t.fn) for t in every):
        inputs["class_weight"] = _of_columns(inputs["class_weight"], ids)
    source = with_tensors(source, {"vocab_ids": None})
    made = arguments.but(source=source, targets=targets, teacher=teachers or None, inputs=inputs)
    return Mapped(made, ids, ignored, missing)


def _of_columns(weights: Any, ids: Tensor) -> Any:
    """Class weights, which are given per token, for a head's columns."""
    w = weights.value if isinstance(weights, Marked) else weights
    if not isinstance(w, Tensor) or w.ndim != 1 or w.device != ids.device or not len(ids):
        return weights  # a later check raises
    most, there = sorted_ids(ids)[0][-1], len(w)
    wanted = "wanted one weight per token of the whole vocabulary, since the head has vocab_ids up to"
    beyond = torch.where(most >= there, most, 0)
    check_zero("class_weight: fewer weights than tokens", (beyond, f"class_weight: {wanted} {{}}, got {there}"))
    return w[ids.clamp(max=there - 1)] if there else w


def _check_numbers(term: Term) -> None:
    """Raise if a user's function asks for column numbers, which it would mistake for tokens."""
    if all(map(is_ours, (term.fn, *(w for w in term.row_weights if callable(w))))):
        return
    for signature in term.call(None, {}).signatures:
        for p in signature.parameters:
            if p.name in NUMBERS or (p.fact is not None and p.fact.name in NUMBERS):
                raise ValueError(
                    f"vocab_ids: {signature.name} asks for {p.name!r}, which would be columns of this head, not "
                    f"tokens; a function on such a head cannot use it"
                )


def _teacher(teacher: Any, ids: Tensor, shard: Any) -> Any:
    if isinstance(teacher, Sparse):
        return Sparse(to_columns(ids, teacher.ids, -1)[0], teacher.logprobs)
    if isinstance(teacher, Routed):
        raise ValueError(
            "vocab_ids: routed teachers do not work with them; pass the teachers by name, and give each a term with "
            "a row weight of 0 for rows that are not its own"
        )
    if not isinstance(teacher, (Logits, Linear)):
        return teacher  # a later check raises
    if teacher.shard is not None or shard is not None:
        whose = "a dense teacher" if teacher.shard is not None else "a dense teacher by a head"
        raise ValueError(
            f"vocab_ids: {whose} whose vocabulary is split over ranks cannot be read at them; pass the teacher's top "
            f"K, hl.topk(teacher, K), which every rank has whole"
        )
    return AtIds(teacher, ids)
