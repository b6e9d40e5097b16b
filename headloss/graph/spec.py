"""Runs the call that a recipe describes, and says beforehand what it will return: its `ResultSpec`.

A graph needs shapes, dtypes and names before there are numbers.  The plan says which facts, terms and classes there
are; shapes, dtypes and the kinds of metrics come from running the plan's own sweep and loss on fake tensors.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from headloss.backends import choose
from headloss.bounded_cache import store
from headloss.engine.arguments import CallArguments, CallOptions
from headloss.engine.autograd_contract import changing
from headloss.engine.bind import bind
from headloss.engine.lookup import find
from headloss.engine.loss import TermsOnRows
from headloss.engine.plan import Plan, backend_for
from headloss.engine.row_facts import facts_sweep
from headloss.engine.run import Result, run
from headloss.engine.sweeps import Sweep
from headloss.facts import CONSTANT, Fact
from headloss.graph.recipe import RebuiltCall, Recipe
from headloss.prepared import Prepared, prepare
from headloss.record import keys_of
from headloss.rows import may_read
from headloss.segments import Segments
from headloss.terms import Terms
from headloss.trace.classify import without_modes


class FinishedCall(NamedTuple):
    """A call that ran."""

    sweep: Sweep
    loss: TermsOnRows | None
    result: Result
    numbers: Tensor  # what the host knows about the targets


def run_call(args: RebuiltCall, terms: Terms | None) -> FinishedCall:
    """Run the call on the ordinary path."""
    recipe = args.recipe.data
    targets, host_read = prepared_targets(args, recipe["host_read"])
    loss: TermsOnRows | None = None
    if terms is None:
        sweep = sweep_of(args, targets, host_read)
    else:
        plan, arguments = plan_of(args, terms, targets, host_read)
        wanted = any(args.needs) or bool(recipe["wanted"])
        sweep, loss = bind(plan, arguments, wanted)
        loss.watched = wanted  # grad mode is different in the operator
    with torch.no_grad():
        result = run(sweep, loss, args.needs)
        sweep.close()
    numbers = targets.numbers if isinstance(targets, Prepared) else torch.empty(0, dtype=torch.long, device="cpu")
    return FinishedCall(sweep, loss, result, numbers)


def plan_of(
    args: RebuiltCall, terms: Terms, targets: Tensor | Prepared | None, host_read: bool = True
) -> tuple[Plan, CallArguments]:
    plan, arguments, *_ = find(terms, arguments_of(args, targets, host_read))
    later = any(args.needs) and not args.recipe.visited  # the backward pulls; one launch's gradient would need scaling
    return plan.without_program("the gradient is made in the backward") if later else plan, arguments


def arguments_of(args: RebuiltCall, targets: Tensor | Prepared | None, host_read: bool) -> CallArguments:
    options = CallOptions(args.num_items, args.num_segments, args.weights, args.grad_scale, host_read)
    return CallArguments(args.source, targets, args.segments, args.teacher, options, args.marked_inputs)


def prepared_targets(args: RebuiltCall, host_read: bool) -> tuple[Tensor | Prepared | None, bool]:
    """The targets with the numbers that the host needs.  While a CUDA graph is captured, the host cannot read them."""
    if args.targets is None:
        return None, host_read
    known = args.prepared()
    if known is None and may_read(host_read, args.targets.device):
        known = prepare(args.targets, args.segments)
    return (args.targets, False) if known is None else (known, host_read)


def sweep_of(args: RebuiltCall, targets: Tensor | Prepared | None, host_read: bool, backend: str = "") -> Sweep:
    want = [tuple(x) if isinstance(x, list) else x for x in args.recipe.data["want"]]
    return facts_sweep(args.source, targets, want, args.teacher, backend or args.recipe.data["backend"], host_read)


class ResultSpec(NamedTuple):
    """What a call returns, apart from sizes.  It holds no function or tensor of a user's."""

    facts: tuple[Fact, ...]  # in order; a divergence without its function
    fact_keys: tuple[Any, ...]  # in the record
    fact_dtypes: tuple[torch.dtype, ...]
    fact_widths: tuple[tuple[int, ...], ...]  # dimensions after the rows
    terms: tuple[str, ...]
    metrics: tuple[tuple[str, str, str, int], ...]  # name, kind, per, and how many numbers it consists of
    cotangents: tuple[int, ...]  # indices of the facts that get a gradient from the loss
    by_segment: bool  # whether chunks hold whole segments
    has_divergence: bool  # whether a fact is the sum of a function over the vocabulary
    changes: bool  # and that function is a user's, which may read something else by the time it is pulled on
    softmax: Any  # the softmax's nested tuples with an index in place of each tensor
    softmax_tensors: int  # how many the softmax has
    metric_dtype: torch.dtype  # of the metrics' numbers

    def differentiable(self) -> list[int]:
        """Indices of the facts that have a gradient."""
        return [i for i, fact in enumerate(self.facts) if fact.name not in CONSTANT]


def index_tensors(nest: Any) -> tuple[Any, list[Tensor]]:
    """Nested tuples with an index in place of each tensor, and the list of those tensors."""
    tensors: list[Tensor] = []
    number = lambda x: tensors.append(x) or len(tensors) - 1  # type: ignore[func-returns-value]
    return tree_map_only(Tensor, number, nest), tensors


def place_tensors(nest: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `index_tensors`: put the tensors back."""
    return tree_map_only(int, lambda i: tensors[i], nest)


_SPECS: dict[str, ResultSpec] = {}
_MOST = 512


def result_spec(recipe: Recipe, sizes: Sequence[int] = (), terms: Terms | None = None) -> ResultSpec:
    """What a call returns, from a cache keyed by its recipe."""
    spec = _SPECS.get(recipe.text)
    return spec or store(_SPECS, recipe.text, _make_spec(recipe, terms or recipe.terms_of(sizes)), _MOST)


def _make_spec(recipe: Recipe, terms: Terms | None) -> ResultSpec:
    with _untraced():
        try:
            return _spec_of(recipe, terms, FakeTensorMode(allow_non_fake_inputs=True))
        except Exception:  # a function that branches on values: use real zeros; an error of the call is raised again
            with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
                return _spec_of(recipe, terms, contextlib.nullcontext())


def _spec_of(recipe: Recipe, terms: Terms | None, mode: Any) -> ResultSpec:
    """`mode`: the context that makes the stand-in tensors, fake or real."""
    data, by_segment, loss = recipe.data, False, None
    args, targets, terms = _stand_in(recipe, terms, mode)
    backend = choose("torch", args.source.device)
    if terms is None:
        sweep = sweep_of(args, targets, True, backend.NAME)
    else:
        plan, arguments, *_ = find(terms, arguments_of(args, targets, True))
        by_segment = plan.kind == "segment"
        wanted = any(args.needs) or bool(data["wanted"])
        sweep, loss = bind(plan.without_program("")._replace(backend=backend), arguments, wanted)
        loss.chunks, loss.watched = None, wanted
    facts = sweep.want.facts
    own = backend_for(args.recipe.data["backend"], args.source, sweep.want)
    sweep.sums_slopes = data["source"][3] is not None or own is not backend
    with torch.no_grad(), mode:
        result = run(sweep, loss, args.needs)
    values = [result.facts[f] for f in facts]
    softmax, leaves = index_tensors(result.softmax) if not sweep.want.only_ids else (None, [])
    return ResultSpec(
        bare_facts(facts),
        keys_of(facts),
        tuple(x.dtype for x in values),
        tuple(tuple(x.shape[1:]) for x in values),
        () if loss is None else tuple(loss.values),
        metrics_of(loss),
        tuple(i for i, f in enumerate(facts) if f in result.by_fact),
        by_segment,
        any(f.element is not None for f in facts),
        bool(changing(facts)),
        softmax,
        len(leaves),
        torch.float32 if data["device"] == "mps" else torch.float64,
    )


def bare_facts(facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """Facts without the functions of divergences."""
    return tuple(f._replace(element=None) for f in facts)


def metrics_of(loss: TermsOnRows | None) -> tuple[tuple[str, str, str, int], ...]:
    """The metrics, as `ResultSpec.metrics` describes them."""
    return () if loss is None else tuple((n, m.kind, m.per, len(m.parts)) for n, m in loss.metrics.items())


def in_one_launch(recipe: Recipe, terms: Terms | None) -> bool:
    """Whether one of our kernels makes the gradient of the logits along with the loss."""
    if terms is None or recipe.data["source"][3] is not None or recipe.data["group"]:
        return False
    with _untraced():
        args, targets, of = _stand_in(recipe, terms, FakeTensorMode())
        plan = find(of or terms, arguments_of(args, targets, True)).plan
    return plan.program is not None and not plan.waits


_SIZES = tuple(2 * n for n in (17, 19, 23, 29, 31, 37, 41, 43))  # all different, and rare as real sizes


def _stand_in(recipe: Recipe, terms: Terms | None, mode: Any) -> tuple[RebuiltCall, Prepared | None, Terms | None]:
    """A stand-in for the call, on this rank alone, whose numbers of rows and segments equal no other size in it."""
    data, split = {**recipe.data, "group": None}, recipe.data["source"][3]
    available = data["device"] == "cpu" or (data["device"] == "cuda" and torch.cuda.is_available())
    device = torch.device(data["device"] if available else "cpu")
    data["backend"] = data["backend"] if available else "torch"
    data["source"] = [*data["source"][:3], None]
    data["teachers"] = [[*x[:-1], None] for x in data["teachers"]]
    data["tensors"] = [x for x in data["tensors"] if x[0] != "numbers"]
    used = {n for x in data["tensors"] for n in x[3:]}
    R, S = [n for n in _SIZES if n not in used][:2]
    leading = (R,) if data["ndim"] == 1 else (2, R // 2, *(1 for _ in range(data["ndim"] - 2)))
    lead = {"row": leading, "flat": (R,), "segment": (S,), "whole": (), "number": ()}
    tensors = []
    for name, dtype, kind, *inner in data["tensors"]:
        if split is not None and name in ("source.weight", "source.bias", "source.logits"):
            inner[0] = split[2]
        one = name.endswith(("temperature", "num_items", "num_segments")) or name.startswith("weights")
        with mode if kind != "number" else contextlib.nullcontext():
            x = torch.full((*lead[kind], *inner), int(one), dtype=getattr(torch, dtype[len("torch.") :]), device=device)
        tensors.append(x if kind != "number" else torch.full((), _UNUSED, dtype=torch.float64, device="cpu"))
    args = RebuiltCall(
        Recipe(recipe.text, data, None, tuple(x[0] for x in data["tensors"])),
        tensors,
        [S if name == "segments" else R for name in data["sizes"]],
    )
    targets = None
    if args.targets is not None:
        zeros = torch.zeros(R, dtype=torch.long, device="cpu")
        numbers = prepare(zeros, None if args.segments is None else Segments(zeros, S)).numbers
        targets = Prepared(args.targets, args.segments, numbers)
    return args, targets, terms if available or terms is None else terms.on("torch")


_UNUSED = 3**0.5  # stands in for a symbolic temperature, scale or softcap; no term uses this value


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Ordinary tensors and autograd, whatever tracing is active around this."""
    with without_modes(), _disable_current_modes(), torch._C.DisableTorchFunction(), autograd_on(), torch.enable_grad():
        yield


_AUTOCAST = functools.reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(key)
        for name, key in torch._C.DispatchKey.__members__.items()
        if name.startswith("Autocast")
    ),
)


@contextlib.contextmanager
def autograd_on() -> Iterator[None]:
    """Dispatch as outside an operator, with autograd and tracing on: a loss's cotangents may need both."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude & _AUTOCAST), torch.inference_mode(False):
        yield
