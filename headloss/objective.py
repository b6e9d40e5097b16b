"""The objective: named terms, each a plain function of facts, weighted and reduced into one loss.

    objective = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=1e-4), metrics=["entropy"])
    out = objective(hl.Linear(hidden, weight), targets)
    out.loss.backward()

A call has three steps.  Plan: trace each term (cached), and classify it by the rows that it combines.  Bind: check and
lay out the arguments, and find the rows that count (those not ignored).  Sweep: compute facts, loss and gradients in
the cheapest way that the classes allow.  Every call returns the same record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.config import check_losses, read_config, write_config
from headloss.deferred_checks import check_pending
from headloss.derived_teachers import check_top
from headloss.engine.arguments import CallArguments, CallOptions
from headloss.engine.autograd_contract import refuse_transforms
from headloss.engine.bind import chunked_because, chunks_of, read_because, rows_of
from headloss.engine.bound_teachers import bind_teachers
from headloss.engine.checks import check_no_lost_gradient
from headloss.engine.columns import has_vocab_ids, in_columns
from headloss.engine.derived_inputs import over_ranks, with_candidates, with_derived_inputs
from headloss.engine.evaluate import evaluate
from headloss.engine.explain import Explanation, explain
from headloss.engine.inplace_check import check_inplace
from headloss.engine.lookup import find
from headloss.engine.mixed_support import calls_of
from headloss.engine.plan import plain_source
from headloss.engine.row_facts import facts_sweep
from headloss.engine.run import HeadFunction, SweptCall, facts_of, run
from headloss.engine.weight_grad_into import check_weight_grad_into
from headloss.graph import compiled as graph
from headloss.graph.content import Traits, content_key, portable_config, traits
from headloss.graph.recipe import split_call
from headloss.options import constant
from headloss.prepared import Prepared, prepare
from headloss.record import Facts, Output
from headloss.rows import may_read
from headloss.segments import Segments
from headloss.sources import Linear, Logits, Source, Sparse, Teacher
from headloss.support import Support, check_counted
from headloss.term import Term
from headloss.terms import Terms
from headloss.uncompiled import uncompiled


class Objective(Terms):
    """Named terms over one softmax.  Immutable.

    A keyword is a term: a loss function, or a `Term` with weight, reduction and options.  `metrics` are names (a fact,
    "accuracy", "perplexity", "dead_rows") or functions like a loss.  Call it with a source and targets; see
    `__call__`.
    """

    __slots__ = ("key", "losses", "traits")
    losses: Mapping[str, Callable[..., Any]]  # that `from_config` was given, for `to_config`
    key: str  # made from its content: a graph made with one objective serves all equal ones
    traits: Traits  # what a compiled graph must know

    @uncompiled
    def __init__(
        self,
        /,
        *unnamed: Any,
        metrics: Sequence[str | Callable[..., Any] | Term] | Mapping[str, str | Callable[..., Any] | Term] = (),
        backend: str = "auto",
        **terms: Callable[..., Any] | Term,
    ) -> None:
        if unnamed:
            raise TypeError("terms: each needs a name, as in Objective(ce=cross_entropy); it keys terms and metrics")
        if not terms:
            raise ValueError("terms: wanted at least one loss, as in Objective(ce=cross_entropy)")
        super().__init__(terms, metrics, backend)
        self._set(losses={}, key=content_key(self), traits=traits(self))

    def __reduce__(self) -> Any:
        return _made, (dict(self.terms), self.asked, self.backend, self.losses, type(self))

    def __deepcopy__(self, memo: object) -> Objective:
        return self  # immutable: a copied model keeps its objective

    def __call__(
        self,
        source: Source,
        targets: Tensor | Prepared | None = None,
        *,
        segments: Segments | None = None,
        num_items: int | Tensor | None = None,
        num_segments: int | Tensor | None = None,
        weights: Mapping[str, float | Tensor] | None = None,
        grad_scale: float | Tensor = 1.0,
        host_read: bool = True,
        teacher: Teacher | Mapping[str, Teacher] | None = None,
        ids: Tensor | None = None,
        support: Support | None = None,
        **inputs: Any,
    ) -> Output:
        """Evaluate the terms on a source; `out.loss` and `out.facts` are differentiable.

        targets       each row's target, in the source's leading shape; -100 is ignored
        segments      which rows belong together, for losses and reductions that need it
        num_items     global number of tokens, for `token_mean`; by default those of this call.  0 counts as 1.
                      `weighted_mean` divides by its own weights: over micro-batches use `token_sum` and
                      `weights={name: 1 / their global sum}`
        num_segments  global number of segments, for the `seq_mean_...` reductions; by default those of this call
        weights       weights of terms for this call only, {"kl": beta}
        grad_scale    multiplies all gradients but not the loss; a loss scale that is passed here costs nothing
        host_read     False: never wait for the targets; ignored rows are then masked, not dropped.  The same happens
                      while a CUDA graph is captured, and on Logits unless a loss needs the valid rows only
        teacher       Logits, Linear or Sparse to compare with, or several in a dict by name; gets no gradient
        ids           (rows, K) columns per row, padded with -1, for the facts `ids_logprob` and `ids_logit`
        support       the columns that each row keeps: the softmax is over those only, except in terms with
                      `support="all"`.  A target that its row does not keep is added, and counted in `support_missing`
        inputs        what the losses ask for: of the targets' shape, (S,), scalar, or in PerRow, PerSegment or Whole
        """
        options = CallOptions(num_items, num_segments, weights, grad_scale, host_read)
        if ids is not None:
            teacher = with_candidates(teacher, ids, source)
        return self._evaluate(CallArguments(source, targets, segments, teacher, options, inputs, support), False)

    def forward_backward(
        self,
        source: Source,
        targets: Tensor | Prepared | None = None,
        *,
        segments: Segments | None = None,
        num_items: int | Tensor | None = None,
        num_segments: int | Tensor | None = None,
        weights: Mapping[str, float | Tensor] | None = None,
        grad_scale: float | Tensor = 1.0,
        host_read: bool = True,
        teacher: Teacher | Mapping[str, Teacher] | None = None,
        ids: Tensor | None = None,
        support: Support | None = None,
        **inputs: Any,
    ) -> Output:
        """The same record with `.grads` (logits, or hidden, weight and bias), without autograd."""
        if torch.is_grad_enabled():
            check_no_lost_gradient(self, inputs)
        options = CallOptions(num_items, num_segments, weights, grad_scale, host_read)
        teacher = with_candidates(teacher, ids, source)
        with torch.no_grad():
            arguments = CallArguments(source, targets, segments, teacher, options, inputs, support)
            return self._evaluate(arguments, True)

    def _evaluate(self, arguments: CallArguments, direct: bool) -> Output:
        source, targets, _, _, _, inputs, _ = arguments
        if type(targets) is Prepared and (targets.support is not None or targets.tokens is not None):
            arguments = arguments.with_prepared()
        if has_vocab_ids(source):
            in_graph = arguments.teacher is None or not torch.compiler.is_compiling()
            return (_on_columns if in_graph else _on_columns_uncompiled)(self, arguments, direct)
        if self.derives_inputs or "class_weight" in inputs:
            arguments = with_derived_inputs(self, arguments)
        if arguments.support is None and graph.is_operator(arguments.source, arguments.teacher, self.traits.unknown):
            return graph.call(self, arguments, direct)
        return _uncompiled(self, arguments, direct)

    @uncompiled
    def explain(
        self,
        on: Source,
        /,
        targets: Tensor | Prepared | None = None,
        *,
        segments: Segments | None = None,
        num_items: int | Tensor | None = None,
        num_segments: int | Tensor | None = None,
        weights: Mapping[str, float | Tensor] | None = None,
        grad_scale: float | Tensor = 1.0,
        host_read: bool = True,
        teacher: Teacher | Mapping[str, Teacher] | None = None,
        ids: Tensor | None = None,
        support: Support | None = None,
        source: bool = False,
        **inputs: Any,
    ) -> Explanation:
        """What a call with these arguments would do: facts, classes, sweeps, GEMMs, bytes.  Takes meta tensors.

        source   True: also show the Triton source made from the losses, if they run inside the sweep
        """
        options = CallOptions(num_items, num_segments, weights, grad_scale, host_read)
        teacher = with_candidates(teacher, ids, on)
        given = CallArguments(on, targets, segments, teacher, options, inputs, support).with_prepared()
        whole = in_columns(given, self).arguments if has_vocab_ids(on) else given
        asked = with_derived_inputs(self, whole, explained=True)
        both = asked.support is not None and self.on_all
        found = [_explain(*part, source) for part in (calls_of(self, asked) if both else [(self, asked)])]
        if counts := over_ranks(self, given):
            found[0].collectives["all-reduce of the counts of reduction segments"] = counts
        return found[0] if len(found) == 1 else found[0]._replace(whole=found[1])

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], losses: Mapping[str, Callable[..., Any]] | None = None
    ) -> Objective:
        """An objective from plain data; `losses` adds functions of your own to those of `headloss.losses`.

        >>> Objective.from_config({"terms": {"ce": "cross_entropy", "z": {"loss": "z_loss", "weight": 1e-4}}})
        """
        losses = check_losses(losses)
        return _made(*read_config(config, losses), losses, cls)

    def to_config(self, losses: Mapping[str, Callable[..., Any]] | None = None) -> dict[str, Any]:
        """Plain data that `from_config` turns into this objective again, or an error.

        A function of your own is found by its name in `losses`; those that `from_config` was given are known already.
        """
        return write_config(self, {**self.losses, **check_losses(losses)})

    def __repr__(self) -> str:
        parts = [f"{name}={term!r}" for name, term in self.terms.items()]
        if self.metrics:
            parts.append(f"metrics={[name for name, _ in self.metrics]}")
        return f"Objective({', '.join(parts)})"

    def constants_of(self, key: str, constants: tuple[Any, ...], host_read: bool, direct: bool) -> graph.Constants:
        """The recipe of a call and the names of its results: a constant of the graph being traced."""
        return graph.constants_of(self, constants, host_read=host_read, direct=direct)

    def is_portable(self, key: str) -> bool:
        """Whether a recipe can describe all of it."""
        return portable_config(self) is not None

    constants_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler would mark it
    is_portable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _on_columns(objective: Objective, arguments: CallArguments, direct: bool) -> Output:
    """A call on a head over some tokens of a larger vocabulary (`vocab_ids`)."""
    mapped = in_columns(arguments, objective)
    return mapped.output(objective._evaluate(mapped.arguments, direct))


_uncompiled = uncompiled(evaluate)
_on_columns_uncompiled = uncompiled(_on_columns)


def _explain(terms: Terms, arguments: CallArguments, source: bool) -> Explanation:
    plan, arguments, *_ = find(terms, arguments)
    targets, host_read = arguments.targets, arguments.options.host_read
    chunked = chunked_because(plan, arguments.source)
    may_read = host_read and isinstance(targets, Tensor)
    reads = read_because(plan, arguments.source, arguments.segments, chunked) if may_read else ""
    if isinstance(targets, Tensor) and targets.device.type != "meta" and arguments.support is not None:
        check_counted(arguments.support, targets)
    if isinstance(targets, Tensor) and targets.device.type != "meta" and host_read:
        prepared = prepare(targets, arguments.segments)  # raise now, not in a later call
        arguments = arguments._replace(targets=prepared, segments=prepared.segments)
    rows = rows_of(plan, arguments, host_read, chunked)
    teacher_rows = bind_teachers(arguments.teachers, plan.want.teachers, arguments.source, rows)
    chunks = chunks_of(plan, arguments, rows, teacher_rows)
    return explain(plan, arguments, rows, chunks, teacher_rows, terms.backend, reads, source)


def row_facts(
    source: Source,
    targets: Tensor | Prepared | None = None,
    want: Sequence[str | tuple[str, float]] = ("logprob",),
    *,
    teacher: Teacher | Mapping[str, Teacher] | None = None,
    ids: Tensor | None = None,
    top: int | None = None,
    support: Support | None = None,
    backend: str = "auto",
    host_read: bool = True,
) -> Facts:
    """Differentiable facts per row, in the targets' shape, for use in any PyTorch code.

    `want` has names, or (name, temperature); with several teachers, (name, temperature or None, teacher's name).
    `ids`: (rows, K) columns per row, -1 for none, at which `ids_logprob` and `ids_logit` can be asked for.
    `top`: K, how many of the likeliest columns `top_ids` and `top_logprob` return per row.
    With `support`, the softmax behind the facts is over the columns that each row keeps.

    >>> facts = hl.row_facts(hl.Logits(logits), targets, want=("logprob", "entropy"))
    >>> (-facts.logprob.mean() - 0.01 * facts.entropy.mean()).backward()
    """
    teacher = with_candidates(teacher, ids, source)
    if isinstance(targets, Prepared):
        support = CallArguments(source, targets, support=support).with_prepared().support
    if has_vocab_ids(source):
        mapped = in_columns(CallArguments(source, targets, None, teacher, CallOptions(), {}, support), None)
        source, targets, _, teacher, *_ = mapped.arguments
        how: dict[str, Any] = {"teacher": teacher, "top": top, "backend": backend, "host_read": host_read}
        return mapped.facts(row_facts(source, targets, want, **how))
    if top is None and support is None and graph.is_operator(source, teacher):
        call = CallArguments(source, targets, None, teacher, CallOptions(host_read=host_read), {})  # 2.8 wraps a dict
        found, constants = split_call(call)
        wanted = (want,) if isinstance(want, str) else want
        asked = tuple(x if isinstance(x, str) else tuple(map(constant, x)) for x in wanted)
        return graph.read_facts(_constants(constants, asked, backend, host_read), found)
    return _row_facts(source, targets, want, teacher, backend, host_read, top, support)


def _constants(constants: tuple[Any, ...], want: tuple[Any, ...], backend: str, host_read: bool) -> graph.Constants:
    return graph.constants_of(None, constants, want=want, backend=backend, host_read=host_read, direct=False)


_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]


@uncompiled
def _row_facts(
    source: Source,
    targets: Any,
    want: Any,
    teacher: Any,
    backend: str,
    host_read: bool,
    top: int | None,
    support: Support | None = None,
) -> Facts:
    check_pending()
    refuse_transforms(CallArguments(source, targets, None, teacher))
    reads, source = may_read(host_read, source.device), plain_source(source)
    if torch.is_grad_enabled() and any(x.requires_grad for x in source.tensors):
        check_inplace(CallArguments(source, targets, None, teacher, support=support))
        check_weight_grad_into(source)
    sweep = facts_sweep(source, targets, want, teacher, backend, reads, top, support)
    needs = tuple(x.requires_grad and torch.is_grad_enabled() for x in sweep.source.tensors)
    facts: Sequence[Tensor]
    visited = None
    if any(needs):
        _, *facts = HeadFunction.apply(SweptCall(sweep, None, needs), *sweep.source.tensors)
    else:
        with torch.no_grad():
            result = run(sweep, None, needs)
            facts, visited = result.blocks(sweep.want), getattr(result, "visited", None)
    return facts_of(sweep.rows, sweep.want, facts, visited)


def topk(source: Source, k: int, *, backend: str = "auto") -> Sparse:
    """The k likeliest columns of each row, the likeliest first, and their log-probabilities; no gradient.

    >>> teacher = hl.topk(hl.Linear(hidden, weight), 64)        # to store, to send, or to compare with
    """
    check_top(k, "k")
    if isinstance(source, (Logits, Linear)) and k > source.vocab:
        raise ValueError(f"k: wanted at most {source.vocab} columns, which the vocabulary has, got {k}")
    with torch.no_grad():
        facts = row_facts(source, want=("top_ids", "top_logprob"), top=k, backend=backend)
    return Sparse(facts.top_ids, facts.top_logprob)


def _made(
    terms: Mapping[str, Term], metrics: Any, backend: str, losses: Mapping[str, Any], cls: type[Objective] = Objective
) -> Objective:
    made = cls(**terms, metrics=metrics, backend=backend)
    made._set(losses=losses)
    return made
