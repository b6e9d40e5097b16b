"""A later call of a form that was seen before: straight to the launch.

Dimension key:  N rows   V vocabulary

The first call of a form takes the general path: plan, bind, sweep.  Where it ends in one launch on logits, later calls
differ in their tensors and numbers alone, so they check those and launch.  Two calls are of one form if everything is
equal that was read on the way, sizes apart.  What is done here is what the general path does, to the bit; calls with
segments, teachers, shards or gradients for inputs always take the general path.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headloss.engine.arguments import CallArguments
from headloss.engine.bind import check_count
from headloss.engine.heads import on_other_device
from headloss.engine.layout import PerRow, readings
from headloss.engine.one_launch import Launched, measured
from headloss.engine.plan import Plan, call_weights, keep
from headloss.engine.run import SavedForBackward
from headloss.engine.saved import hold, once, refuse_transforms
from headloss.engine.sweeps import Sweep, scaled
from headloss.facts import CONSTANT
from headloss.late import defers
from headloss.record import Grads, Output, facts_later, key_of
from headloss.reductions import over
from headloss.rows import IGNORE, Prepared, Rows, Stats, check_stats, check_targets_later, may_read
from headloss.sources import Logits
from headloss.term import Term, check_weight
from headloss.trace.reads import ours, own_key, reads

PLAIN = (Tensor, torch.nn.Parameter)  # and no subclass that could mean something else
EVEN = ("token_mean", "token_sum")


def form_of(objective: Any, arguments: CallArguments) -> Any:
    """The key under which `objective.known` may have a `Form` for this call; None: it has to take the general path."""
    source, targets, segments, teacher, options, inputs = arguments
    if type(source) is not Logits or segments is not None or teacher is not None or source.shard is not None:
        return None
    if isinstance(source.temperature, Tensor):
        return None
    x, y = source.logits, targets
    if type(y) is Prepared and y.segments is None:
        y = y.targets
    device, leading = x.device, x.shape[:-1]
    if type(x) not in PLAIN or type(y) is not Tensor or y.dtype != torch.long or y.device != device:
        return None
    if y.shape != leading or x.stride(-1) != 1 or not x.numel() or not y.is_contiguous():
        return None
    if x.ndim > 2 and not x.is_contiguous():
        return None
    grad = torch.is_grad_enabled()
    off, foreign, own, per_row = objective.standing
    given: list[Any] = [x.dtype, device, source.temperature]
    for name, value in inputs.items():
        given.append(name)
        if value is None:
            given.append(None)
            continue
        if type(value) is PerRow and value.value.ndim:
            value = value.value
        if type(value) is not Tensor or value.device != device or (grad and value.requires_grad) or name == "pairs":
            return None
        if value.ndim and (value.shape != leading or (leading == x.shape[-1:] and name not in per_row)):
            return None  # as many rows as columns: what it is has to be asked
        given += (value.dtype, value.ndim == 0)
    given.append(_off(call_weights(objective, options.weights)) if options.weights else off)
    given.append(torch.get_default_dtype())
    given += [reads(fn, pure=pure) for fn, pure in foreign]
    for fn in own:
        given += own_key(fn)
    return tuple(given)


def standing(objective: Any) -> tuple[tuple[str, ...], tuple[Any, ...], tuple[Any, ...], frozenset[str]]:
    """What calls need not find out again: terms that are off by themselves, functions that are not ours (what they
    read may change between calls), those of ours whose options have defaults, and inputs of which some function says
    that they have one value per row."""
    fns = [(x, t.pure) for t in objective.every_term for x in (t.fn, *t.row_weights) if callable(x)]
    fns += [(c.fn, False) for _, c in objective.metrics if not isinstance(c.fn, Term)]
    said = readings(objective.terms, objective.metrics)
    per_row = frozenset(name for name, reading in said.items() if reading.row and not reading.segment)
    off = _off({n: t.weight for n, t in objective.terms.items()})
    own = tuple(fn for fn, _ in fns if ours(fn) and fn.__kwdefaults__)
    return off, tuple(x for x in fns if not ours(x[0])), own, per_row


def _off(weights: Mapping[str, float | Tensor]) -> tuple[str, ...]:
    return tuple([n for n, weight in weights.items() if not isinstance(weight, Tensor) and weight == 0])


def recall(objective: Any, arguments: CallArguments) -> tuple[Any, Any]:
    """The form of a call, or None if it always takes the general path, and the `Form` if one is known."""
    refuse_transforms(arguments)
    form = form_of(objective, arguments)
    if form is None:
        return None, None
    known = objective.known.get(form)
    return form, known if known is not None and known.suits(arguments.source.tensors[0]) else None


def remember(objective: Any, form: Any, plan: Plan, backend: ModuleType) -> None:
    """Keep what a call of this form has come to, if it is one that can be repeated from here."""
    if form is None or plan.program is None or not plan.terms or plan.program.input_cotangents:
        return
    if any(t.reduction not in EVEN for t in plan.terms) or plan.source.tensors[0].dtype == torch.float16:
        return
    if not all(t.trace.reach.fine for t in plan.terms if t.trace.reach is not None):
        return  # something has to be said where a gradient is wanted
    keep(objective, form, Form(objective, plan, backend))


class Form:
    """What calls of one form have in common."""

    def __init__(self, objective: Any, plan: Plan, backend: ModuleType) -> None:
        self.backend = backend
        self.program, self.want, self.off = plan.program, plan.want, plan.off
        self.plan = backend.plan_of(plan.program)
        self.numbers = plan.program.numbers
        self.terms = tuple(t.name for t in plan.terms)
        self.labels = tuple(f"weights[{name!r}]" for name in self.terms)
        self.means = tuple(t.reduction == "token_mean" for t in plan.terms)
        self.weights = {name: term.weight for name, term in objective.terms.items()}
        self.facts = [key_of(f, False) for f in plan.want.facts]
        self.slots = slice(*self.plan.ends[1:3])  # of the facts, but for the argmax, in what a visit found

    def suits(self, x: Tensor) -> bool:
        V = x.shape[-1]
        return bool(self.backend.suits(x.numel() // V, V))

    def call(self, objective: Any, arguments: CallArguments, direct: bool) -> Output:
        """`Objective.__call__`, or with `direct` its `forward_backward`."""
        source, targets, _, _, options, inputs = arguments
        num_items, num_segments, weights, grad_scale, host_read = options
        assert isinstance(source, Logits) and targets is not None
        if num_items is not None or num_segments is not None:
            check_count("num_items", num_items)
            check_count("num_segments", num_segments)
        if type(grad_scale) is not float or grad_scale != 1.0:
            check_weight("grad_scale", grad_scale)
        x = source.logits
        if on_other_device(x.device):
            with torch.cuda.device(x.device):
                return self.call(objective, arguments, direct)
        targets, stats, mean = self.read(targets, x.shape[-1], host_read)
        mean = mean if num_items is None else over(num_items)
        now = call_weights(objective, weights) if weights else self.weights
        weigh = [now[name] for name in self.terms]
        again = Again(self, source, targets, stats)
        factors = weigh if type(grad_scale) is float and grad_scale == 1.0 else [w * grad_scale for w in weigh]
        taken = self.arguments(x.device, mean, factors, inputs)
        if direct:
            loss, found = again.run(x, weigh, taken, True)
        elif x.requires_grad and torch.is_grad_enabled():
            used = [(n, x.value if type(x) is PerRow else x) for n, x in ((n, inputs[n]) for n in self.program.inputs)]
            if num_items is not None or {*map(type, factors)} != {float}:
                counts = [("num_items", num_items), ("grad_scale", grad_scale), *zip(self.labels, weigh, strict=True)]
                used += [(name, y) for name, y in counts if isinstance(y, Tensor)]
            loss, found = Visit.apply(again, weigh, taken, used, x)
        else:
            with torch.no_grad():
                loss, found = again.run(x, weigh, taken, False)
        terms = dict(zip(self.terms, again.sums.unbind(), strict=True))
        if self.off:
            terms |= dict.fromkeys(self.off, torch.zeros((), dtype=loss.dtype, device=x.device))
            terms = {name: terms[name] for name in objective.terms}
        grads = Grads(again.grad) if direct else None
        best, shape = again.visited.best, x.shape[:-1]
        return Output(loss, terms, again.metrics, facts_later(lambda: self.cut(found, best, shape), self.facts), grads)

    def cut(self, found: Tensor, best: Tensor | None, shape: torch.Size) -> list[Tensor]:
        """The facts one by one, differentiable wherever they are first asked for; a student's argmax is the last."""
        with torch.inference_mode(False), torch.set_grad_enabled(found.requires_grad):
            block = found[self.slots].clone()  # the backward reads the original
            facts = [*block.view(-1, *shape).unbind(), *([] if best is None else [best.view(shape)])]
            return [x.detach() if f.name in CONSTANT else x for f, x in zip(self.want.facts, facts, strict=True)]

    def read(
        self, targets: Tensor | Prepared, vocab: int, host_read: bool
    ) -> tuple[Tensor, Stats | None, float | Tensor]:
        """The targets, what the host knows of them, and 1 / how many count."""
        stats = None
        if isinstance(targets, Prepared):
            stats, targets = targets.known(), targets.targets
        elif may_read(host_read, targets.device) and not defers(targets.device):
            stats = Stats.read(self.backend.count_targets(targets.view(-1))[0])
        if stats is None:
            numbers, mean = self.backend.count_targets(targets.view(-1))
            check_targets_later(numbers, vocab)
            return targets, None, mean
        check_stats(stats, vocab)
        return targets, stats, over(stats.valid)

    def arguments(
        self, device: torch.device, mean: float | Tensor, factors: list[float | Tensor], inputs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Inputs, bases, factors and numbers, as the kernel takes them."""
        number = self.backend.as_number
        flat = [x.value if type(x) is PerRow else x for x in map(inputs.__getitem__, self.program.inputs)]
        mean = mean if type(mean) is float else number(mean, device)
        return (
            tuple([number(v if v.ndim < 2 else v.reshape(-1), device) for v in flat]),
            tuple([mean if is_mean else 1.0 for is_mean in self.means]),
            tuple([f if type(f) is float else number(f, device) for f in factors]),
            self.numbers,
        )


class Again:
    """One call."""

    sums: Tensor
    visited: Any

    def __init__(self, form: Form, source: Logits, targets: Tensor, stats: Stats | None) -> None:
        self.form, self.targets, self.stats = form, targets, stats
        self.ignored = stats is None or stats.valid < targets.numel()  # whether some rows may be
        self.said = {"temperature": source.temperature, "scale": source.scale, "softcap": source.softcap}
        self.inplace = source.inplace
        self.grad: Tensor | None = None
        self.metrics: dict[str, Any] = {}

    def run(
        self, x: Tensor, weights: list[float | Tensor], arguments: tuple[Any, ...], grad: bool
    ) -> tuple[Tensor, Tensor]:
        """The loss, and what was found of the rows, for the facts in it; the gradient is kept."""
        form, said = self.form, self.said
        flat = self.targets if x.ndim == 2 else self.targets.view(-1)
        raw_NV = x if x.ndim == 2 else x.view(-1, x.shape[-1])
        out_NV = None
        if grad and self.inplace:
            torch.autograd.graph.increment_version(x)
            self.grad, out_NV = x.detach(), raw_NV
        elif grad:
            self.grad = torch.empty_like(x, memory_format=torch.contiguous_format)
            out_NV = self.grad if x.ndim == 2 else self.grad.view(-1, x.shape[-1])
        T = float(said["temperature"])  # type: ignore[arg-type]
        temperatures = tuple([T if t is None else float(t) for t in form.want.temperatures])
        visited = self.visited = form.backend.launch(
            form.plan, raw_NV, flat, temperatures, *arguments, out_NV,
            scale=said["scale"], softcap=said["softcap"], ignore=self.ignored,
        )  # fmt: skip
        self.sums, loss = form.backend.totals(visited, weights)
        if form.program.metrics:  # which rows count is noted now: the targets may be written to
            valid = flat != IGNORE if self.ignored else None
            self.metrics = measured(visited, valid)
        return loss, visited.found.detach()  # another tensor: the graph will hang on it

    def open(self, x: Tensor, targets: Tensor) -> Sweep:
        """The same call as the general path has it."""
        shape = tuple(x.shape[:-1])
        rows = Rows(shape, targets, None, None, None, self.stats, self.ignored)
        source = Logits(x, **self.said)  # type: ignore[arg-type]
        return Sweep(source, rows, self.form.want, self.form.backend, {}, self.form.program)


class Visit(torch.autograd.Function):
    """As `passes.Head`, which it becomes where something pulls on a fact or a second time."""

    @staticmethod
    def forward(ctx: Any, again: Again, weights: Any, arguments: Any, used: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        outputs = again.run(x, weights, arguments, True)
        hold(ctx, (("logits", x),), (("targets", again.targets),), used)
        ctx.again, ctx.grads = again, Grads(again.grad)
        again.grad = None
        return outputs

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor | None, g_found: Tensor | None) -> Any:
        return once(_pull, ctx, g_loss, g_found)


def _pull(ctx: Any, args: Any, read: Mapping[str, Tensor], g_loss: Tensor | None, g_found: Tensor | None) -> Any:
    again, (x,) = ctx.again, args
    grads, ctx.grads = ctx.grads, None  # handed over: a second backward makes them again
    if grads is not None and g_loss is not None and g_found is None:
        return None, None, None, None, scaled(grads, g_loss, again.form.backend).logits
    held = SavedForBackward((True,), Launched(again.sums, again.visited, None, None), grads, [], again.inplace)
    pulled = () if g_found is None else g_found[again.form.slots].view(-1, *x.shape[:-1]).unbind()
    nothing = (None,) * (len(again.form.facts) - len(pulled))
    again_ = functools.partial(again.open, x, read["targets"])
    by_tensor, _ = held.pull(again.form.want, again.form.backend, again_, g_loss, (*pulled, *nothing))
    return None, None, None, None, *by_tensor
