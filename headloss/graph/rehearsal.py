"""A call put together from its recipe, run as always, or rehearsed to learn the form of its result.

A graph needs that form before there are numbers.  A rehearsal is the call itself on a few rows of zeros, outside
whatever is being traced.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from headloss.engine.arguments import CallArguments, CallOptions
from headloss.engine.bind import bind
from headloss.engine.lookup import find_plan
from headloss.engine.loss import TermsOnRows
from headloss.engine.plan import Plan
from headloss.engine.row_facts import facts_sweep
from headloss.engine.run import Result, run
from headloss.engine.sweeps import Sweep
from headloss.facts import CONSTANT, Fact
from headloss.graph.recipe import Call, Recipe
from headloss.prepared import Prepared, prepare
from headloss.record import keys_of
from headloss.rows import may_read
from headloss.terms import Terms
from headloss.trace.classify import unwatched


class Done(NamedTuple):
    """A call that ran."""

    sweep: Sweep
    loss: TermsOnRows | None
    result: Result
    numbers: Tensor  # what the host knows of the targets
    kind: str  # of the plan


def perform(args: Call, terms: Terms | None) -> Done:
    """The ordinary path."""
    recipe = args.recipe.data
    targets, host_read = known_of(args, recipe["host_read"])
    loss: TermsOnRows | None = None
    kind = "row"
    if terms is None:
        sweep = sweep_of(args, targets, host_read)
    else:
        plan, arguments = plan_of(args, terms, targets, host_read)
        kind = plan.kind
        sweep, loss = bind(plan, arguments)
        loss.watched = any(args.needs) or bool(recipe["wanted"])  # not as it is inside the operator
    with torch.no_grad():
        result = run(sweep, loss, args.needs)
        sweep.close()
    numbers = targets.numbers if isinstance(targets, Prepared) else torch.empty(0, dtype=torch.long, device="cpu")
    return Done(sweep, loss, result, numbers, kind)


def plan_of(
    args: Call, terms: Terms, targets: Tensor | Prepared | None, host_read: bool = True
) -> tuple[Plan, CallArguments]:
    plan, arguments = find_plan(terms, arguments_of(args, targets, host_read))
    later = any(args.needs) and not args.recipe.visited  # pulled in the backward: what one launch made would be scaled
    return plan.without_program("the gradient is made in the backward") if later else plan, arguments


def arguments_of(args: Call, targets: Tensor | Prepared | None, host_read: bool) -> CallArguments:
    options = CallOptions(args.num_items, args.num_segments, args.weights, args.grad_scale, host_read)
    return CallArguments(args.source, targets, args.segments, args.teacher, options, args.laid)


def known_of(args: Call, host_read: bool) -> tuple[Tensor | Prepared | None, bool]:
    """The targets, with what the host must know of them; a graph that is being captured cannot ask."""
    if args.targets is None:
        return None, host_read
    known = args.prepared()
    if known is None and may_read(host_read, args.targets.device):
        known = prepare(args.targets, args.segments)
    return (args.targets, False) if known is None else (known, host_read)


def sweep_of(args: Call, targets: Tensor | Prepared | None, host_read: bool) -> Sweep:
    want = [tuple(x) if isinstance(x, list) else x for x in args.recipe.data["want"]]
    return facts_sweep(args.source, targets, want, args.teacher, args.recipe.data["backend"], host_read)


class Form(NamedTuple):
    """What a call returns, apart from sizes; nothing in it belongs to a user."""

    facts: tuple[Fact, ...]  # in order; a divergence without its function
    keys: tuple[Any, ...]  # under which they stand in the record
    dtypes: tuple[torch.dtype, ...]  # of the facts
    widths: tuple[tuple[int, ...], ...]  # their dimensions after the rows
    terms: tuple[str, ...]
    metrics: tuple[tuple[str, str, str, int], ...]  # name, kind, per, and of how many numbers it is made
    cotangents: tuple[int, ...]  # places of the facts that the loss pulls on
    by_segment: bool  # chunks hold whole segments
    divergences: bool  # some fact is the sum of a function
    softmax: Any  # a nest of tuples with a number for each tensor in it
    tensors: int  # how many those are
    wide: torch.dtype  # of the metrics' numbers

    def differentiable(self) -> list[int]:
        """Places of the facts that can be pulled on."""
        return [i for i, fact in enumerate(self.facts) if fact.name not in CONSTANT]


def stand_in(place: Sequence[Any], leading: tuple[int, ...], segments: int) -> tuple[int, ...]:
    """The shape of a tensor in a rehearsal."""
    kind, *rest = place
    rows = {"row": leading, "flat": (torch.Size(leading).numel(),), "segment": (segments,), "whole": (), "number": ()}
    return (*rows[kind], *rest)


def numbered(nest: Any, start: int = 0) -> tuple[Any, list[Tensor]]:
    """A nest of tuples with numbers in place of its tensors, and those tensors."""
    if isinstance(nest, Tensor):
        return start, [nest]
    if not isinstance(nest, tuple):
        return nest, []
    items: list[Any] = []
    tensors: list[Tensor] = []
    for x in nest:
        item, more = numbered(x, start + len(tensors))
        items.append(item)
        tensors += more
    return type(nest)(*items) if hasattr(nest, "_fields") else tuple(items), tensors


def filled(nest: Any, tensors: Sequence[Tensor]) -> Any:
    """`numbered`, undone."""
    if isinstance(nest, int):
        return tensors[nest]
    if not isinstance(nest, tuple):
        return nest
    items = [filled(x, tensors) for x in nest]
    return type(nest)(*items) if hasattr(nest, "_fields") else tuple(items)


_FORMS: dict[str, Form] = {}
_LAUNCHES: dict[str, bool] = {}
_MOST = 512


def form(recipe: Recipe, sizes: Sequence[int] = (), terms: Terms | None = None) -> Form:
    """The form of a call's result, from a rehearsal on the host."""
    if recipe.text not in _FORMS:
        found = _form(recipe, terms or recipe.terms_of(sizes))
        if len(_FORMS) >= _MOST:
            _FORMS.pop(next(iter(_FORMS)))
        _FORMS[recipe.text] = found
    return _FORMS[recipe.text]


def _form(recipe: Recipe, terms: Terms | None) -> Form:
    try:
        done = _rehearse(recipe, terms, torch.device("cpu"))
    except RuntimeError:  # a loss that holds tensors of the device, say
        done = _rehearse(recipe, terms, torch.device(recipe.data["device"]))
    facts, loss = done.sweep.want.facts, done.loss
    values = [done.result.facts[f] for f in facts]
    softmax, leaves = numbered(done.result.softmax) if not done.sweep.want.only_ids else (None, [])
    metrics = () if loss is None else tuple((n, m.kind, m.per, len(m.parts)) for n, m in loss.metrics.items())
    return Form(
        bare(facts),
        keys_of(facts),
        tuple(x.dtype for x in values),
        tuple(tuple(x.shape[1:]) for x in values),
        () if loss is None else tuple(loss.values),
        metrics,
        tuple(i for i, f in enumerate(facts) if f in done.result.by_fact),
        done.kind == "segment",
        any(f.element is not None for f in facts),
        softmax,
        len(leaves),
        torch.float32 if recipe.data["device"] == "mps" else torch.float64,
    )


def bare(facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """Facts without the functions that they are sums of."""
    return tuple(f._replace(element=None) for f in facts)


def one_launch(recipe: Recipe, terms: Terms | None) -> bool:
    """Whether a call on logits makes their gradient in its only launch; found on the device, where there is one.

    Traces, kernels and constants that calls share are made on the way: not later, in the memory of a CUDA graph.
    """
    if recipe.data["device"] != "cuda" or terms is None or not torch.cuda.is_available():
        return False
    if recipe.text not in _LAUNCHES:
        printed = False
        for host_read in (recipe.data["host_read"], False):
            with contextlib.suppress(Exception):  # what fails will fail again, in the call itself
                done = _rehearse(recipe, terms, torch.device("cuda"), host_read=host_read, visited=True)
                printed = printed or done.sweep.program is not None
        if len(_LAUNCHES) >= _MOST:
            _LAUNCHES.pop(next(iter(_LAUNCHES)))
        _LAUNCHES[recipe.text] = printed
    return _LAUNCHES[recipe.text]


def _rehearse(recipe: Recipe, terms: Terms | None, device: torch.device, **changes: Any) -> Done:
    """The call on a few rows of zeros: on the host always with the torch backend."""
    data = {**recipe.data, "host_read": True, "group": None, **changes}
    leading = ((6,), (2, 3), *((2, 3, *(1 for _ in range(n))) for n in range(1, 9)))[data["ndim"] - 1]
    split = data["source"][3]
    data["source"] = [*data["source"][:3], None]
    data["teachers"] = [[*x[:-1], None] for x in data["teachers"]]
    data["tensors"] = [x for x in data["tensors"] if x[0] != "numbers"]
    if device.type == "cpu":
        data["backend"] = "torch"
        terms = None if terms is None else terms.on("torch")
    with _outside():
        given = []
        for name, dtype, *place in data["tensors"]:
            if split is not None and name in ("source.weight", "source.bias", "source.logits"):
                place[1] = split[2]
            shape = stand_in(place, leading, 2)
            one = name.endswith(("temperature", "num_items", "num_segments")) or name.startswith("weights")
            x = torch.full(shape, int(one), dtype=getattr(torch, dtype[len("torch.") :]), device=device)
            if place[0] == "number":
                x = torch.full((), _ODD, dtype=torch.float64, device="cpu")
            if name == "segments":
                x = (torch.arange(x.numel(), device=device) % 2).view(shape)
            given.append(x)
        sizes = [2 if name == "segments" else 6 for name in data["sizes"]]
        args = Call(Recipe(recipe.text, data, None, tuple(x[0] for x in data["tensors"])), given, sizes)
        with torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else []):
            return perform(args, terms)


_ODD = 3**0.5  # a temperature, scale or cap that no term has as its own


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Ordinary tensors and autograd, whatever is being traced around."""
    with unwatched(), _disable_current_modes(), torch._C.DisableTorchFunction(), recording(), torch.enable_grad():
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
def recording() -> Iterator[None]:
    """Dispatch as outside an operator, where autograd and tracing work: a loss's cotangents may need either."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude & _AUTOCAST):
        yield
