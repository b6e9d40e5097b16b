"""`TermsOnRows`: the terms of an objective on the rows of one call, with their inputs, weights, values and gradients.

Dimension key:  R rows that count   S segments   P pairs

The loss functions see flat vectors of the rows that count, whatever shape the caller's batch has; `layout` says which
inputs go by row, by segment, or whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.engine.arguments import CallArguments, Chunk
from headloss.engine.checks import check_belongs
from headloss.engine.heads import part_of
from headloss.engine.plan import Plan, Planned
from headloss.engine.sweeps import Cotangents
from headloss.facts import CONSTANT, Fact
from headloss.metrics import Metric, dead_rows, kind_of, measure
from headloss.reductions import rows_only
from headloss.reductions import weights as reduction_weights
from headloss.rows import Rows
from headloss.segments import Segments, group_sum
from headloss.trace.call import Call, Env, WeightAndMetrics, call_function, check_metrics
from headloss.trace.classify import without_hooks
from headloss.trace.gradient import Reach, check_constants, check_gradient, leaf, reach_of
from headloss.trace.signature import Signature
from headloss.trace.trace import InputSpec, run_cotangents


class TermsOnRows:
    """The terms and metrics of one call: `chunk` makes cotangents during a visit, `whole` all results on all rows."""

    normaliser: Tensor | None = None
    visited: Any = None  # the result of a launch, which holds the facts

    def __init__(
        self,
        plan: Plan,
        arguments: CallArguments,
        rows: Rows,
        chunks: Sequence[Chunk] | None,
        taken: Mapping[str, Tensor],
    ) -> None:
        self.plan, self.rows, self.chunks = plan, rows, chunks
        source, _, self.segments, _, options, self.given, _ = arguments
        self.num_items, self.num_segments, weights, self.grad_scale, _ = options
        self.weights = {name: weights.get(name, x) for name, x in plan.weights.items()} if weights else plan.weights
        self.device, self.shapes, self.taken = source.device, plan.shapes, taken
        if taken:  # these have only the rows that count
            of_rows = {n: InputSpec("row", x.dtype, tuple(x.shape[1:])) for n, x in taken.items()}
            self.shapes = {**self.shapes, **of_rows}
        self.terms, self.dtype, self.wants_grad = plan.terms, plan.dtype, plan.wants_grad
        self.values: dict[str, Tensor] = {}
        self.metrics: dict[str, Metric] = {}
        self._weighed: dict[str, WeightAndMetrics] = {}
        self._denominators: dict[str, Tensor] = {}  # of the weighted means that were made so far
        # fp16 logits get their gradient before the loss scale is known: write order 1, and scale in float32
        self.scaled_late = source.is_fp16 or (plan.is_fp16 and plan.program is not None and not plan.waits)
        self.watched = torch.is_grad_enabled()
        if rows.segments is not None and rows.segments.group is not None:
            for t in self.terms:  # a collective: now, on all ranks alike, since a rank without rows has no chunks
                if t.sums_weights and t.trace.value == "row":
                    self._weights(t, "row", rows.count, self._env({}, None))

    def weighed(self, term: Planned, env: Env) -> WeightAndMetrics:
        """The row weight of a weighted mean on all rows, made once because a function may draw random numbers."""
        if term.name not in self._weighed:
            self._weighed[term.name] = term.call.weigh(env)
        return self._weighed[term.name]

    @functools.cached_property
    def inputs(self) -> dict[str, Tensor]:
        """Every input, on the rows that count."""
        own = {n: x.clone() if x.is_inference() else x.detach() for n, x in self.given.items()}  # for autograd
        own = {n: self.rows.take(x) if self.shapes[n].kind == "row" else x for n, x in own.items()}
        return {**own, **self.taken}

    def raw_inputs(self, part: slice) -> dict[str, Tensor]:
        """Per-row inputs and scalars, for a kernel that skips ignored rows itself."""
        if self.rows.keep is not None:
            return {n: part_of(x, part) if self.shapes[n].kind == "row" else x for n, x in self.inputs.items()}
        found: dict[str, Tensor] = {}
        whole, shapes = part.stop - part.start == self.rows.total, self.shapes
        for name, x in self.given.items():
            if shapes[name].kind == "row":
                x = x.detach() if x.requires_grad else x
                x = x if x.ndim == 1 else x.reshape(-1)
                x = x if whole else part_of(x, part)
            found[name] = x
        for name, x in self.taken.items():
            found[name] = part_of(x, part)
        return found

    @functools.cached_property
    def filler(self) -> Tensor:
        """Stands in for a fact that no term reads: if one reads it after all, the loss is NaN rather than wrong."""
        return torch.full((self.rows.count,), math.nan, dtype=self.dtype, device=self.device)

    @functools.cached_property
    def seeds(self) -> list[Tensor]:
        """For each term, the weight of its values in the gradient, without the normaliser."""
        seeds = [self._seed(t, t.trace.value or "row", self.rows.count) for t in self.terms]
        sizes = [s.abs().amax() for s in seeds if s.numel()] if self.scaled_late else []
        if sizes:
            self.normaliser = torch.stack(sizes).amax()
            self.normaliser = self.normaliser.masked_fill(self.normaliser == 0, 1.0)
            seeds = [s / self.normaliser for s in seeds]
        return seeds

    def chunk(self, chunk: Chunk, facts: Mapping[Fact, Tensor]) -> Cotangents:
        env = self._env(facts, chunk)
        by_fact: dict[Fact, Tensor] = {}
        by_input: dict[str, Tensor] = {}
        for term, seed in zip(self.terms, self.seeds, strict=True):
            part = chunk.segments if term.trace.value == "segment" else chunk.rows
            wanted = [n for n in self.wants_grad if n in term.call.input_names]
            for_facts, for_inputs = run_cotangents(term.call, term.trace, env, seed[part], wanted)
            _add_into(by_fact, for_facts)
            _add_into(by_input, for_inputs)
        return by_fact, by_input

    def whole(self, facts: Mapping[Fact, Tensor], grad: bool) -> tuple[Tensor, Cotangents]:
        leaves = {f: leaf(f, x) if grad else x.detach() for f, x in facts.items()}
        env = self._env(leaves, None)
        if grad and self.wants_grad:
            own = {n: env.inputs[n].detach().requires_grad_() for n in self.wants_grad}  # type: ignore[union-attr]
            env = env._replace(inputs={**env.inputs, **own})
        per_row = [name for name, shape in self.shapes.items() if shape.kind == "row"]
        values, seeds = [], []
        measured: dict[str, Any] = {}
        kinds: dict[str, str] = {}
        ways: dict[str, Reach] = {}
        loss = torch.zeros((), dtype=self.dtype, device=self.device)
        for term in self.terms:
            with without_hooks(), torch.set_grad_enabled(grad or (self.watched and term.trace.reach is None)):
                weighed = self.weighed(term, env) if term.reduction == "weighted_mean" else None
                value, metrics = term.call(env, per_row if term.trace.row_by_row else None, weighed)
            if term.trace.reach is None and (grad or self.watched):
                ways[term.name] = reach_of(value, leaves, [x for x in env.inputs.values() if x is not None])
            kind = term.trace.value or self._kind(term.call, value, (term.call.signature,))
            check_belongs(term.call, kind, self.shapes, len(value))
            base = self._weights(term, kind, value.shape[0], env)
            reduced = (base * self._counted(value.detach(), kind)).sum().to(self.dtype)
            self.values[term.name] = reduced
            loss = loss + reduced * self.weights[term.name]
            values.append(value)
            seeds.append((base * self._scale(term)).to(value.dtype))
            for key, x in metrics.items():
                label, traced = f"{term.name}/{key}", term.trace.value
                kinds[label] = term.trace.metrics[key] if traced else self._kind(term.call, x, term.call.signatures)
                measured[label] = x
        with torch.no_grad():
            for name, call in self.plan.metrics:
                if call.fn is dead_rows:
                    continue
                found = call_function(call.fn, call.signature.name, env.arguments(call.signature), call.options)
                check_metrics(call.signature.name, found if isinstance(found, Mapping) else {name: found})
                found = {f"{name}/{k}": x for k, x in found.items()} if isinstance(found, Mapping) else {name: found}
                kinds |= {k: self._kind(call, x, call.signatures) for k, x in found.items()}
                measured |= found
            self._measure(measured, kinds)
        by_fact: dict[Fact, Tensor] = {}
        by_input: dict[str, Tensor] = {}
        if ways:
            check_gradient(self.terms, grad, ways)
        if grad:
            targets: list[tuple[Any, Any]] = [(f, x) for f, x in leaves.items() if f.name not in CONSTANT]
            targets += [(n, env.inputs[n]) for n in self.wants_grad]
            live = [(v, s) for v, s in zip(values, seeds, strict=True) if v.requires_grad]
            if live and targets:
                grads = torch.autograd.grad(
                    [v for v, _ in live], [x for _, x in targets], [s for _, s in live], allow_unused=True
                )
                for (key, _), g in zip(targets, grads, strict=True):
                    if g is not None:
                        (by_fact if isinstance(key, Fact) else by_input)[key] = g
            check_constants([n for n in self.wants_grad if n not in by_input], [t.call for t in self.terms])
        return loss, (by_fact, by_input)

    def shaped(self, name: str, grad: Tensor | None) -> Tensor | None:
        """The gradient of an input in the input's own shape."""
        return grad if grad is None or self.shapes[name].kind != "row" else self.rows.put(grad)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every tensor of the caller's that went into the loss, by the name of its argument."""
        found = [*self.given.items()] if self.given else []
        if self.segments is not None:
            found.append(("segments", self.segments.ids))
        if self.num_items is not None or self.num_segments is not None or type(self.grad_scale) is not float:
            of_call = {"num_items": self.num_items, "num_segments": self.num_segments, "grad_scale": self.grad_scale}
            found += [(name, x) for name, x in of_call.items() if isinstance(x, Tensor)]
        for name, weight in self.weights.items():
            if isinstance(weight, Tensor):
                found.append((f"weights[{name!r}]", weight))
        return found

    def _env(self, facts: Mapping[Fact, Tensor], chunk: Chunk | None) -> Env:
        rows = self.rows
        inputs, targets, segments, filler = self.inputs, rows.targets, rows.segments, lambda: self.filler
        if chunk is not None:
            part, span = chunk.rows, chunk.segments
            cut = {"row": part, "segment": span, "scalar": None, "whole": None}
            inputs = {
                n: x if cut[self.shapes[n].kind] is None else x[cut[self.shapes[n].kind]] for n, x in inputs.items()
            }
            targets = None if targets is None else targets[part]
            filler = lambda: self.filler[part]
            if segments is not None and span is not None:
                ids, counts = segments.ids[part] - span.start, segments.counts[span]
                segments = Segments(ids, span.stop - span.start, counts)
        return Env(_Filled(facts, filler), inputs, targets, segments)

    def _scale(self, term: Planned) -> float | Tensor:
        weight = self.weights[term.name]
        weight = weight.to(self.dtype) if isinstance(weight, Tensor) else weight
        scale = self.grad_scale.to(self.dtype) if isinstance(self.grad_scale, Tensor) else self.grad_scale
        return weight * scale

    def _seed(self, term: Planned, kind: str, length: int) -> Tensor:
        if kind == "segment" and self.rows.segments is not None:
            length = self.rows.segments.num_segments
        return self._weights(term, kind, length, self._env({}, None)) * self._scale(term)

    def _weights(self, term: Planned, kind: str, length: int, env: Env) -> Tensor:
        if term.call.share is not None:
            return self.share(term, kind)
        denominator = self.denominator(term, kind, length, env) if term.reduction == "weighted_mean" else None
        return reduction_weights(
            term.reduction, kind, length, self.rows,
            num_items=self.num_items, num_segments=self.num_segments, norm=term.length, denominator=denominator,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip

    def share(self, term: Planned, kind: str) -> Tensor:
        """How much each row counts in a reduction over other segments than the call's."""
        assert term.call.share is not None
        if kind != "row":
            raise ValueError(rows_only(f"term {term.name!r}", kind))
        return self.inputs[term.call.share]

    def denominator(self, term: Planned, kind: str, length: int, env: Env | None = None) -> Tensor:
        """The sum of a weighted mean's weights, over ranks if these share segments; made once."""
        if term.name not in self._denominators:
            env = env or self._env({}, None)
            with torch.no_grad():
                weight = term.call.mean_weight(env, self.weighed(term, env))
            weight = torch.ones(length, dtype=self.dtype, device=self.device) if weight is None else weight
            total = self._counted(weight.to(self.dtype).expand(length), kind).sum()
            if kind == "row" and self.rows.segments is not None and self.rows.segments.group is not None:
                total = group_sum(total, self.rows.segments.group)
            self._denominators[term.name] = total.masked_fill(total == 0, 1.0)
        return self._denominators[term.name]

    def _counted(self, x: Tensor, kind: str) -> Tensor:
        """x, with 0 for masked rows and for segments without rows, which may yield anything."""
        if kind == "row" and self.rows.valid is not None:
            return x.masked_fill(~self.rows.valid, 0)
        if kind == "segment" and self.rows.segments is not None:
            return x.masked_fill(self.rows.segments.counts == 0, 0)
        return x

    def _kind(self, call: Call, value: Any, signatures: Sequence[Signature]) -> str:
        """What the values of an untraced function belong to: "row", "segment" or "other".

        `signatures`: those of the functions that made the values; a row weight's tell nothing about a loss's values.
        """
        if not isinstance(value, Tensor) or value.ndim != 1:
            return "other"
        length, segments = value.shape[0], self.rows.segments
        shapes = {n: self.shapes[n].kind for n in call.input_names if n in self.shapes}
        given = {*shapes.values()} | {p.kind for s in signatures for p in s.parameters}
        ways = []
        if length == self.rows.count and given & {"fact", "targets", "row", "segments"}:
            ways.append("row")
        if segments is not None and length == segments.num_segments and given & {"segment", "segments"}:
            ways.append("segment")
        if any(kind == "whole" and self.inputs[n].shape[0] == length for n, kind in shapes.items()):
            ways.append("pair")
        if len(ways) < 2:
            return ways[0].replace("pair", "other") if ways else "other"
        if call.signature.returns in ways:
            return call.signature.returns.replace("pair", "other")
        name, either = call.signature.name, " or ".join(f"{way!r}" for way in ways)
        raise ValueError(
            f"{name}: returned {length} values, which fits one per {' and one per '.join(ways)}, and is not traced; "
            f"set {name}.returns to {either}"
        )

    def _measure(self, values: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
        """Set the metrics, in the order of `values`; those of the same kind and length are reduced together."""
        numbers = {name for name, x in values.items() if not isinstance(x, Tensor)}
        batches: dict[tuple[str, int], dict[str, Tensor]] = {}
        for name, x in values.items():
            if name in numbers:
                x = torch.full((), float(x), dtype=self.dtype, device=self.device)
            kind = kinds[name]
            if x.ndim == 0 and kind_of(name) in ("std", "exp", "ess"):
                raise ValueError(
                    f"metrics: {name!r} is one number, but its name says that values are combined ({kind_of(name)}); "
                    f"return one value per row, or give a reduced number another name"
                )
            if kind == "other" and self.rows.valid is not None and name not in numbers:
                raise ValueError(
                    f"host_read: metric {name!r} is made of all rows, ignored ones too, as they were not dropped; "
                    f"return one value per row or segment, allow the host read, or give targets through hl.prepare"
                )
            batches.setdefault((kind, x.numel()), {})[name] = x
        found: dict[str, Metric] = {}
        segments = self.rows.segments
        for (kind, length), batch in batches.items():
            weights: Tensor | None = None
            if kind == "row":
                weights = self.rows.valid
            elif segments is not None:
                if kind == "segment":
                    weights = (segments.counts > 0) & segments.counts_here
                elif not segments.counts_here:
                    weights = torch.zeros(length, dtype=torch.bool, device=self.device)
            found |= measure(batch, weights, {"row": "token", "segment": "segment"}.get(kind, "call"))
        self.metrics |= {name: found[name] for name in values if name in found}


class _Filled(Mapping[Fact, Tensor]):
    """Facts, with NaN for those that no term reads according to its trace."""

    def __init__(self, facts: Mapping[Fact, Tensor], filler: Callable[[], Tensor]) -> None:
        self.facts, self.filler = facts, filler

    def __getitem__(self, fact: Fact) -> Tensor:
        found = self.facts.get(fact)
        return self.filler() if found is None else found

    def __iter__(self) -> Any:
        return iter(self.facts)

    def __len__(self) -> int:
        return len(self.facts)


def _add_into(sums: dict[Any, Tensor], more: Mapping[Any, Tensor]) -> None:
    for key, x in more.items():
        sums[key] = sums[key] + x if key in sums else x
