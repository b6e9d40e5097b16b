"""The reference for `hl.verify`: an objective on dense logits, with every function called as the user wrote it.

Dimension key:  R rows that count   S segments   V vocabulary   U columns that both have   K ids per row

Nothing here is traced, cached or shared with the code that runs a call: the formulas are written a second time, and a
divergence is summed over the whole vocabulary even if it has a `one_pass`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from headloss.checks import dense_facts
from headloss.checks.dense_facts import CLASSES, COMPARING, FLOOR, DenseSegments
from headloss.checks.dense_records import IGNORE, Answer, DenseCall, Part, View, mask_of, measured, to_columns, z_and_T
from headloss.facts import FACTS
from headloss.losses import LOSSES
from headloss.options import parameters_of
from headloss.routed import Routed
from headloss.segments import Segments
from headloss.sources import Logits, Source, Sparse
from headloss.teachers import TOP
from headloss.term import Term
from headloss.trace.signature import CANDIDATES, weighs_classes

if TYPE_CHECKING:
    from headloss.objective import Objective


def answer(
    objective: Objective, call: DenseCall, dtype: torch.dtype, leaves: Mapping[str, Tensor], rows: Any = None
) -> Answer:
    """Loss, terms, metrics and gradients.  `leaves` are the source's tensors and inputs in the dtype to compute in:
    float64 for the reference, the caller's for what plain PyTorch would get.  `rows`: a class in place of `Dense`."""
    own_targets = {t.targets for t in objective.terms.values() if t.targets is not None}
    columns = lambda x: to_columns(call.source.vocab_ids, x, IGNORE)
    call = call._replace(inputs={n: columns(x) if n in own_targets else x for n, x in call.inputs.items()})
    dense = (rows or Dense)(call, dtype, leaves)
    numbers: dict[str, Part] = {}
    loss, parts, scale = torch.zeros((), dtype=dtype, device=call.source.device), [], 0.0
    metric_values: dict[str, Any] = {}
    weight_of: dict[str, tuple[Tensor | None, str]] = {}  # a metric's row weight, and what it has one value for
    for name, term in objective.terms.items():
        weight = (call.weights or {}).get(name, term.weight)
        if not isinstance(weight, Tensor) and weight == 0:
            zero = torch.zeros((), dtype=dtype, device=call.source.device)
            numbers[f"term {name}"] = Part(zero, zero[None], 0.0)
            continue
        dense.show_to(term)
        values, metrics = dense.values(term)
        row_weight, reported = dense.row_weight(term)
        values = values if row_weight is None else torch.where(row_weight != 0, values * row_weight, 0.0)
        each = dense.coefficients(term, len(values), row_weight) * values
        each = each[dense.counts(len(values))]
        numbers[f"term {name}"] = Part(each.sum().detach(), each.detach(), float(each.detach().abs().sum()))
        loss = loss + weight * each.sum()
        parts.append(each.detach() * weight)
        scale += abs(float(weight)) * numbers[f"term {name}"].scale
        metric_values |= {f"{name}/{k}": x for k, x in metrics.items()}
        weight_of |= dict.fromkeys([f"{name}/{k}" for k in metrics], (row_weight, dense.returns))
        metric_values |= {f"{name}/{k}": x for k, x in reported.items()}
    dense.show_to(None)
    dense.loss = loss
    metric_values |= dict(dense.metrics(objective.asked))
    if dense.missing_R is not None:
        metric_values["support_missing"] = dense.missing_R
    numbers["loss"] = Part(loss.detach(), torch.cat([*parts, loss.detach()[None] * 0]), scale)
    for name, x in metric_values.items():
        numbers[f"metric {name}"] = dense.metric(name, x, *weight_of.get(name, (None, "row")))
    if call.source.vocab_ids is not None and call.targets is not None:
        tokens = call.targets[call.targets != IGNORE]
        lost = (to_columns(call.source.vocab_ids, tokens, IGNORE) == IGNORE).to(dtype).mean()
        numbers["metric vocab_missing"] = Part(lost, lost[None], 1.0)
    wanted = {n: x for n, x in leaves.items() if x.requires_grad}
    grads = {n: torch.zeros_like(x) for n, x in wanted.items()}
    if loss.requires_grad and wanted:
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        grads |= {n: g * call.grad_scale for n, g in zip(wanted, found, strict=True) if g is not None}
    return Answer(numbers, grads)


class Dense:
    """Facts, inputs and segments of the rows that count, and the functions' values on them."""

    loss: Tensor  # once its terms are summed

    def __init__(self, call: DenseCall, dtype: torch.dtype, leaves: Mapping[str, Tensor]) -> None:
        self.call, self.dtype, source = call, dtype, call.source
        self.lead, ids = source.leading, source.vocab_ids
        y = None if call.targets is None else to_columns(ids, call.targets, IGNORE)
        valid = torch.ones(self.lead, dtype=torch.bool, device=source.device) if y is None else y.ne(IGNORE)
        self.valid, self.R = valid.reshape(-1), int(valid.sum())
        self.targets = self.main = None if y is None else self.rows(y).long()
        z_RV = self.logits(source, {n: leaves[n] for n in ("logits", "hidden", "weight", "bias") if n in leaves})
        each = {n: t for n, t in call.teachers.items() if not isinstance(t, Sparse)}
        both = {n: z_and_T(t, lambda t: self.logits(t, {}), self.rows) for n, t in each.items()}
        self.whole_z, self.teacher_T = ({n: pair[i] for n, pair in both.items()} for i in (0, 1))
        self.routes = {n: self.rows(t.route) >= 0 for n, t in each.items() if isinstance(t, Routed)}
        logq = lambda t: self.rows(t.logprobs.detach()).to(dtype)
        few = {n: t for n, t in call.teachers.items() if isinstance(t, Sparse)}
        sparse = {n: dense_facts.merged(to_columns(ids, self.rows(t.ids).long(), -1), logq(t)) for n, t in few.items()}
        self.all = View(z_RV, {n: z if ids is None else z[:, ids] for n, z in self.whole_z.items()}, sparse)
        self.kept, self.mask_RV, self.missing_R = self.all, None, None
        if call.support is not None:
            mask_RV = mask_of(call.support, source.vocab)[self.valid]
            if self.main is not None:
                self.missing_R = ~mask_RV.gather(1, self.main[:, None])[:, 0]
                mask_RV = mask_RV.scatter(1, self.main[:, None], True)
            self.kept, self.mask_RV = self.all.restricted(mask_RV), mask_RV
        self.show_to(None)
        self.segments: DenseSegments | None = None
        if call.segments is not None:
            self.segments = DenseSegments(self.rows(call.segments.ids).long(), call.segments.num_segments)
        inputs = {n: leaves.get(f"input {n}", x) for n, x in call.inputs.items() if x is not None}
        self.inputs = {n: self.input(n, x) for n, x in inputs.items()}

    def show_to(self, term: Term | None) -> None:
        """Select what this term uses: its targets, and either all columns or those that each row keeps."""
        self.z_RV, self.teacher_z, self.sparse = self.all if term is not None and term.support else self.kept
        self.targets, self.returns = self.main, "row" if term is None else getattr(term.fn, "returns", "row")
        if term is not None and term.targets is not None:
            self.targets = self.inputs[term.targets].clamp(min=0)

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *x.shape[len(self.lead) :])[self.valid]

    def input(self, name: str, x: Any) -> Any:
        if isinstance(x, Segments):
            return DenseSegments(self.rows(x.ids).long(), x.num_segments)
        if not isinstance(x, Tensor):
            kind = self.dtype if isinstance(x, float) else None
            return torch.full((), x, dtype=kind, device=self.call.source.device)
        x = self.rows(x) if self.call.kinds[name] == "row" else x.clone()
        return x.to(self.dtype) if x.is_floating_point() and x.dtype.itemsize < self.dtype.itemsize else x

    def logits(self, source: Source, leaves: Mapping[str, Tensor]) -> Tensor:
        """z of the rows that count.  A teacher has no leaves: its logits are constant, in the dtype to compute in."""
        wide = torch.float64 if self.dtype == torch.float64 else None
        if isinstance(source, Logits):
            raw = self.rows(leaves.get("logits", source.logits.detach()))
        else:
            held = {"hidden": source.hidden, "weight": source.weight, "bias": source.bias}
            h, w, b = (
                leaves[n] if n in leaves else None if x is None else x.detach().to(wide or source.gemm_dtype)
                for n, x in held.items()
            )
            assert h is not None and w is not None
            if wide is None:  # the dtype that autocast or the tensors give
                h, w, b = (None if x is None else x.to(source.gemm_dtype) for x in (h, w, b))
            raw = linear(self.rows(h), w, b).to(wide or source.chunk_dtype)  # type: ignore[arg-type]
        z = raw[:, : source.vocab].to(self.dtype) * source.scale  # columns from vocab on are padding
        return z if source.softcap is None else source.softcap * torch.tanh(z / source.softcap)

    def at(self, z: Tensor, source_temperature: Any, temperature: float | None) -> Tensor:
        """z / T, with the term's temperature, or the source's if the term has none."""
        T = source_temperature if temperature is None else temperature
        if isinstance(T, Tensor):
            T = self.rows(T.detach().expand(self.lead)).to(self.dtype)[:, None]
        return z / T

    def fact(self, name: str, temperature: float | None, teacher: str) -> Tensor:
        s = self.at(self.z_RV, self.call.source.temperature, temperature)
        if name == "mean_logprob" and self.z_RV is self.kept.z_RV and self.mask_RV is not None:
            return torch.where(self.mask_RV, s.log_softmax(-1), 0.0).sum(-1) / self.mask_RV.sum(-1)
        if name not in COMPARING:
            return dense_facts.student_fact(name, s, self.targets)
        if teacher in self.sparse:
            return dense_facts.sparse_fact(name, s, *self.sparse[teacher])
        if teacher not in self.teacher_z:
            raise ValueError(f"teacher: {name!r} needs one")
        logp, logq = self.both(s, temperature, teacher)
        z, u = (x[:, : logq.shape[1]] for x in (self.z_RV, self.teacher_z[teacher]))
        return dense_facts.dense_fact(name, z, u, logp, logq)

    def top_fact(self, term: Term | None, name: str, temperature: float | None) -> Tensor:
        """A fact at the likeliest columns; among equal logits, the lower column comes first."""
        assert term is not None and term.top is not None
        s = self.at(self.z_RV, self.call.source.temperature, temperature)
        ids = self.z_RV.detach().sort(dim=-1, descending=True, stable=True).indices[:, : term.top]
        if name == "top_ids":
            return ids
        if name == "top_logprob":
            return s.log_softmax(-1).gather(1, ids)
        logq, tokens = self.both(s, temperature, self.teacher_of(term))[1], self.call.source.vocab_ids
        if tokens is not None and _is_divergence(term.fn) and term.tail == "none":
            logq = self.whole_logq(term)[:, tokens]
        logq = torch.nn.functional.pad(logq, (0, s.shape[1] - logq.shape[1]), value=FLOOR)
        return logq.gather(1, ids).clamp(min=FLOOR)

    def whole_logq(self, term: Term) -> Tensor:
        """log q of a teacher with a larger vocabulary, normalised over all of it."""
        teacher = self.teacher_of(term)
        return self.at(self.whole_z[teacher], self.teacher_T[teacher], term.temperature).log_softmax(-1)

    def both(self, s: Tensor, temperature: float | None, teacher: str) -> tuple[Tensor, Tensor]:
        """log p and log q, normalised over the columns that student and teacher share."""
        U = min(s.shape[1], self.teacher_z[teacher].shape[1])
        u = self.at(self.teacher_z[teacher][:, :U], self.teacher_T[teacher], temperature)
        return s[:, :U].log_softmax(-1), u.log_softmax(-1)

    def teacher_of(self, term: Term | None) -> str:
        if term is not None and term.teacher is not None:
            return term.teacher
        return next((n for n in self.call.teachers if n != CANDIDATES), CANDIDATES)

    def ids_of(self, fn: Callable[..., Any], term: Term | None) -> str:
        """The name of the teacher whose ids the `ids_*` facts use, or IDS for the call's own ids."""
        without_ids = {"teacher_ids", "teacher_logprob"}.isdisjoint(parameters_of(fn))
        unnamed = without_ids and CANDIDATES in self.sparse and (term is None or term.teacher is None)
        return CANDIDATES if unnamed else self.teacher_of(term)

    def values(self, term: Term) -> tuple[Tensor, Mapping[str, Any]]:
        """A term's values and its own metrics, from the function as the user wrote it."""
        if _is_divergence(term.fn):
            return self.divergence(term)
        result = term.fn(**self.arguments(term.fn, term), **term.options)
        return result if isinstance(result, tuple) else (result, {})

    def divergence(self, term: Term) -> tuple[Tensor, Mapping[str, Any]]:
        teacher = self.teacher_of(term)
        f = lambda p, q: term.fn(p.clamp(min=FLOOR), q.clamp(min=FLOOR), **term.options)
        s = self.at(self.z_RV, self.call.source.temperature, term.temperature)
        if term.top is not None:
            logp, logq = (self.top_fact(term, n, term.temperature) for n in ("top_logprob", "teacher_top_logprob"))
            masses = {"student_mass": logp.exp().sum(-1), "teacher_mass": logq.exp().sum(-1)}
            if term.tail == "renormalise":
                logp, logq = logp.log_softmax(-1), logq.log_softmax(-1)
            return f(logp, logq).sum(-1), masses
        tokens = self.call.source.vocab_ids
        if teacher not in self.sparse and tokens is not None and term.tail != "renormalise":
            u = self.whole_logq(term)  # of which the head has some tokens
            value, others = f(s.log_softmax(-1), u[:, tokens]).sum(-1), u.index_fill(1, tokens, -math.inf).logsumexp(-1)
            return (value + f(torch.full_like(others, FLOOR), others) if term.tail == "bucket" else value), {}
        if teacher not in self.sparse:
            return f(*self.both(s, term.temperature, teacher)).sum(-1), {}
        ids, logq = self.sparse[teacher]
        present = ids >= 0
        if term.tail == "renormalise":
            logp = s.gather(1, ids.clamp(min=0)).masked_fill(~present, -math.inf).log_softmax(-1).nan_to_num(nan=FLOOR)
            norm = logq.logsumexp(-1, keepdim=True)
            return torch.where(present, f(logp, logq - torch.where(norm > -math.inf, norm, 0.0)), 0.0).sum(-1), {}
        at_ids = dense_facts.sparse_fact("ids_logprob", s, ids, logq)
        value = torch.where(present, f(torch.where(present, at_ids, 0.0), torch.where(present, logq, 0.0)), 0.0).sum(-1)
        p, q = (torch.where(present, x.exp(), 0.0).sum(-1) for x in (at_ids, logq))
        if term.tail == "bucket":
            tail, left = dense_facts.sparse_fact("tail_logprob", s, ids, logq), torch.log1p(-q.clamp(max=1.0))
            rounding = math.log(torch.finfo(self.call.source.fact_dtype).eps)  # a call's mass of 1 leaves so much
            value = value + f(tail, torch.where(tail > FLOOR, left.clamp(min=rounding), left))
        return value, {"student_mass": p, "teacher_mass": q}

    def arguments(self, fn: Callable[..., Any], term: Term | None) -> dict[str, Any]:
        """The arguments that the parameter names ask for; an optional input that was not passed keeps its default."""
        found: dict[str, Any] = {}
        temperature, teacher = None if term is None else term.temperature, self.teacher_of(term)
        facts, input_of = ({}, {}) if term is None or fn is not term.fn else (term.facts, term.inputs)
        at_ids, ids = ("ids_logprob", "ids_logit", "tail_logprob", "topk_overlap"), self.ids_of(fn, term)
        for p in parameters_of(fn).values():
            if p.kind is p.KEYWORD_ONLY:
                continue
            if p.name in CLASSES and weighs_classes(fn):
                if (w := self.inputs.get("class_weight")) is not None:
                    s = self.at(self.z_RV, self.call.source.temperature, temperature)
                    found[p.name] = dense_facts.class_fact(p.name, w, s, self.targets)
            elif p.default is None and p.name in TOP and (term is None or term.top is None):
                continue
            elif facts.get(p.name, (p.name,))[0] in TOP:
                found[p.name] = self.top_fact(term, *facts.get(p.name, (p.name, temperature)))
            elif p.name in facts:
                found[p.name] = self.fact(*facts[p.name], ids if facts[p.name][0] in at_ids else teacher)
            elif p.name in FACTS or p.name in COMPARING:
                found[p.name] = self.fact(p.name, temperature, ids if p.name in at_ids else teacher)
            elif p.name in ("ids", "targets"):
                found[p.name] = self.targets if p.name == "targets" else self.sparse[CANDIDATES][0]
            elif p.name == "segments":
                found |= {} if self.segments is None else {"segments": self.segments}
            elif input_of.get(p.name, p.name) in self.inputs:
                found[p.name] = dense_facts.as_passed(fn, p.name, self.inputs[input_of.get(p.name, p.name)])
        return found

    def row_weight(self, term: Term) -> tuple[Tensor | None, dict[str, Any]]:
        """The product of the row weights, and the metrics that they report."""
        product: Tensor | None = None
        reported: dict[str, Any] = {}
        names: list[str] = []
        for w in term.row_weights:
            weight = self.inputs[w] if isinstance(w, str) else w(**self.arguments(w, term))
            if not isinstance(w, str) and isinstance(weight, tuple):
                weight, metrics = weight
                names.append(_name(w))
                number = f"_{names.count(names[-1])}" if names.count(names[-1]) > 1 else ""
                reported |= {f"{names[-1]}{number}/{k}": x for k, x in metrics.items()}
            product = weight.detach() if product is None else product.double() * weight.detach().double()
        has_target = None if term.targets is None else self.inputs[term.targets] != IGNORE
        for counts in (has_target, self.routes.get(self.teacher_of(term)) if self.uses_teacher(term) else None):
            if counts is not None:
                product = counts.to(self.dtype) if product is None else product * counts
        return product, reported

    def uses_teacher(self, term: Term) -> bool:
        names = {*parameters_of(term.fn), *(fact for fact, _ in term.facts.values())}
        names |= {p for w in term.row_weights if callable(w) for p in parameters_of(w)}
        return _is_divergence(term.fn) or bool(names & {*COMPARING, "teacher_top_logprob"})

    def kind(self, length: int) -> str:
        if length == self.R and self.returns == "row":  # even if there are as many segments or pairs
            return "row"
        of_segments = self.segments is not None and self.returns != "pair" and length == self.segments.num_segments
        return "segment" if of_segments else "other"

    def counts(self, length: int) -> Tensor:
        """Which of a term's values count: all but those of segments without rows."""
        if self.kind(length) == "segment" and self.segments is not None:
            return self.segments.counts > 0
        return torch.ones(length, dtype=torch.bool, device=self.valid.device)

    def coefficients(self, term: Term, length: int, row_weight: Tensor | None) -> Tensor:
        """The factor of each value in the term's sum: the definition of its reduction."""
        kind, present = self.kind(length), self.counts(length)
        ones = torch.ones(length, dtype=self.dtype, device=self.valid.device)
        at_least_1 = lambda x, counted: max(1.0, float(counted if x is None else x))
        if term.reduction == "weighted_mean":
            w = self.inputs["class_weight"][self.targets] if "class_weight" in self.inputs else 1.0
            mass = ones if row_weight is None else row_weight.to(self.dtype).expand(length)
            mass = (mass * w if weighs_classes(term.fn) else mass)[present].sum()
            return ones / (mass if float(mass) else 1.0)
        if term.reduction == "token_sum":
            return ones
        if kind == "other":
            return ones / max(1, length)
        if kind == "segment":
            return ones / at_least_1(self.call.num_segments, present.sum())
        if term.reduction == "token_mean":
            return ones / at_least_1(self.call.num_items, self.R)
        segments = self.segments if term.reduction_segments is None else self.inputs[term.reduction_segments]
        assert segments is not None
        sizes = segments.counts
        ones = ones / at_least_1(self.call.num_segments, (sizes > 0).sum())
        if term.reduction == "seq_mean_token_mean":
            return ones / sizes.to(self.dtype)[segments.ids.clamp(min=0)]
        return ones if term.length is None else ones / term.length

    def metrics(self, asked: Any) -> Iterator[tuple[str, Any]]:
        """The values of the objective's `metrics=`, by name."""
        for label, metric in asked.items() if isinstance(asked, Mapping) else [(None, m) for m in asked]:
            fn: Any = metric
            if isinstance(fn, str) and fn in LOSSES and _is_divergence(LOSSES[fn]):
                fn = Term(LOSSES[fn])
            elif callable(fn) and not isinstance(fn, Term) and _is_divergence(fn):
                fn = Term(fn)
            name = label or (metric if isinstance(metric, str) else _name(fn.fn if isinstance(fn, Term) else fn))
            if isinstance(fn, Term):
                result = self.values(fn)[0]
            elif isinstance(fn, str):
                result = self.named(fn)
            else:
                result = fn(**self.arguments(fn, None))
            items = result.items() if isinstance(result, Mapping) else [("", result)]
            yield from ((f"{name}/{k}" if k else name, x) for k, x in items)

    def named(self, name: str) -> Tensor:
        fact = lambda fact: self.fact(fact, None, self.teacher_of(None))
        if name == "accuracy":
            assert self.targets is not None
            return fact("argmax").eq(self.targets)
        if name == "perplexity":
            return -fact("logprob")
        if name == "dead_rows":
            z_RV = self.all.z_RV  # the loss may not depend on it: terms can be switched off
            return torch.autograd.grad(self.loss + 0 * z_RV.sum(), z_RV, retain_graph=True)[0].eq(0).all(-1)
        if name == "teacher_agreement":
            if self.teacher_of(None) in self.sparse:
                ids, logq = self.sparse[self.teacher_of(None)]
                return fact("argmax") == ids.gather(1, logq.argmax(-1, keepdim=True))[:, 0]
            return fact("argmax") == fact("teacher_argmax")
        return fact(name)

    def metric(self, name: str, x: Any, row_weight: Tensor | None, returns: str) -> Part:
        """A metric's number over the rows whose weight is not 0; the suffix of its name says how they combine."""
        self.returns, x = returns, torch.as_tensor(x, device=self.valid.device).detach()
        is_bool = not x.is_floating_point()
        counts = self.counts(len(x)) if x.ndim == 1 else None
        if counts is not None and row_weight is not None and row_weight.shape in ((), x.shape):
            counts = counts & (row_weight != 0)
        x = x.double().reshape(-1) if counts is None else x.double()[counts]
        return measured(name, x, is_bool)


def _is_divergence(fn: Callable[..., Any]) -> bool:
    parameters = parameters_of(fn).values()
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["logp", "logq"]


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
