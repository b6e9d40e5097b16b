"""The operators `headloss::visit`, `pull` and `once`, for torch.compile, torch.export, FakeTensor and CUDA graphs.

    headloss::visit   the call: loss, terms, metrics, facts, and what its backward needs
    headloss::pull    the gradient of the source from cotangents of the facts, by another sweep
    headloss::once    ties the loss's upstream gradient to the tensors that gradients from the visit depend on, so that
                      differentiating twice raises

`visit` and `pull` take the call's tensors and its recipe, rebuild the call (`recipe`) and run the ordinary path
(`spec`), which is not traced.  A graph knows the shapes of what they return from the result spec alone.  The loss's
backward scales the gradients made in the visit (`Linear`) or pulls once with the cotangents made there (`Logits`).  A
fact's backward is another sweep, run only if a gradient reaches the fact.  Outputs never alias inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headloss.deferred_checks import check_pending
from headloss.engine.autograd_contract import TWICE, check_mark, mark_of
from headloss.engine.bound_teachers import bind_teachers
from headloss.engine.plan import backend_for
from headloss.engine.run import Result, final_grads, names_of
from headloss.engine.sweeps import NO_SOFTMAX, Sweep
from headloss.engine.teachers import name_teachers
from headloss.facts import VALUED, Want
from headloss.graph.recipe import RebuiltCall, Recipe, read_recipe
from headloss.graph.spec import (
    FinishedCall,
    ResultSpec,
    autograd_on,
    bare_facts,
    index_tensors,
    metrics_of,
    place_tensors,
    plan_of,
    prepared_targets,
    result_spec,
    run_call,
    sweep_of,
)
from headloss.options import check_temperatures
from headloss.prepared import check_prepared
from headloss.record import Grads
from headloss.rows import bind_rows
from headloss.sources import Linear, Logits

_library = torch.library.Library("headloss", "FRAGMENT")
_library.define("once(Tensor x, Tensor[] of) -> Tensor")
_library.define("visit(Tensor[] tensors, SymInt[] sizes, str recipe) -> Tensor[]")
_library.define(
    "pull(Tensor[] tensors, SymInt[] sizes, Tensor[] kept, Tensor[] cotangents, int[] which, str recipe) -> Tensor[]"
)


def _visit(tensors: Sequence[Tensor], sizes: Sequence[int], text: str) -> list[Tensor]:
    recipe = read_recipe(text)
    args, spec = RebuiltCall(recipe, tensors, sizes), result_spec(recipe, sizes)
    check_pending()
    for name, x in zip(recipe.names, tensors, strict=True):
        if name.endswith(".temperature"):
            check_temperatures(x)
    if args.numbers is not None and args.targets is not None:
        check_prepared(args.numbers, args.targets, args.segments)
    with autograd_on(), torch.enable_grad():
        finished = run_call(args, recipe.terms_of(sizes))
        sweep, loss, result = finished.sweep, finished.loss, finished.result
    _check_spec(spec, finished, any(args.needs) and not recipe.visited)
    with autograd_on(), torch.no_grad():
        dtype, device = args.source.fact_dtype, args.source.device
        put = sweep.rows.put
        empty = functools.partial(torch.empty, 0, device=device)
        out = [result.loss.to(dtype)]
        out.append(torch.stack([loss.values[n] for n in spec.terms]) if loss and spec.terms else empty(dtype=dtype))
        parts = [p for name, *_ in spec.metrics for p in loss.metrics[name].parts] if loss else []
        out.append(torch.stack(parts).to(spec.metric_dtype) if parts else empty(dtype=spec.metric_dtype))
        out += [put(result.facts[f]) for f in sweep.want.facts]
        made = any(args.needs)
        if made and recipe.visited and loss is not None:
            grads, scale = _visit_grads(sweep, result, args.needs, recipe.data["direct"])
            out += [] if recipe.data["direct"] else [scale]
            out += [x.to(_kept_dtype(args, y)) for x, y in zip(grads, args.source.tensors) if x is not None]
        if recipe.data["direct"]:
            return _unaliased(out, tensors)
        if loss is not None:
            for name in recipe.data["wanted"]:
                g, x = loss.shaped(name, result.by_input.get(name)), args.inputs[name]
                g = g if g is None or result.normaliser is None else g * result.normaliser
                out.append(torch.zeros_like(x) if g is None else g.to(x.dtype).view(x.shape))
        if made:
            out += [put(result.facts[sweep.want.facts[i]]) for i in _kept_facts(spec)]  # `_unaliased` copies them
            _, leaves = index_tensors(result.softmax) if spec.softmax_tensors else (None, [])
            out.append(torch.stack([put(x.to(dtype)) for x in leaves]) if leaves else empty(dtype=dtype))
            out += [mark_of(sweep.want.facts, args.source).cpu()] if spec.changes else []
            if recipe.host_reads:  # -1: the host read nothing after all, since a CUDA graph is being captured
                out.append(
                    finished.numbers
                    if finished.numbers.numel()
                    else torch.full((_number_count(args),), -1, dtype=torch.int64, device="cpu")
                )
        if made and not recipe.visited and loss is not None:
            zero = torch.zeros(sweep.rows.count, dtype=dtype, device=device)
            for i in spec.cotangents:
                g, width = result.by_fact.get(sweep.want.facts[i]), spec.fact_widths[i]
                out.append(put(zero.view(-1, *(1 for _ in width)).expand(-1, *width) if g is None else g.to(dtype)))
    return _unaliased(out, tensors)


def _check_spec(spec: ResultSpec, finished: FinishedCall, pulls: bool) -> None:
    """Raise if the functions now ask for, or return, something else than when the graph was made."""
    facts, metrics = finished.sweep.want.facts, metrics_of(finished.loss)
    by_fact = finished.result.by_fact if pulls else {}
    pulled = [facts[i].name for i in range(len(facts)) if facts[i] in by_fact and i not in spec.cotangents]
    for what, now, then in (
        ("asks for facts", [str(f) for f in bare_facts(facts)], [str(f) for f in spec.facts]),
        ("returns metrics", *([f"{n} per {per}" for n, _, per, _ in x] for x in (metrics, spec.metrics))),
        ("pulls on", pulled, []),
    ):
        if now != then:
            raise RuntimeError(
                f"headloss: a loss or metric {what} {now} in this call, and {then} when the graph was made: the "
                f"number of rows that it branches on, or something that it reads, has changed; make that an option or "
                f"an input, or compile again after torch.compiler.reset()"
            )


def _visit_grads(sweep: Sweep, result: Result, needs: tuple[bool, ...], final: bool) -> tuple[list[Any], Tensor]:
    """The gradients made in the visit, and the factor that they still need."""
    one = torch.ones((), dtype=sweep.source.fact_dtype, device=sweep.source.device)
    if final:
        return _in_order(final_grads(sweep, result, needs), len(needs)), one
    if isinstance(result.grads, Grads):
        return _in_order(result.grads, len(needs)), one if result.normaliser is None else result.normaliser.to(one)
    by_fact = result.by_fact
    if sweep.source.is_fp16 and by_fact:
        one = torch.stack([g.abs().amax() if g.numel() else g.sum() for g in by_fact.values()]).amax()
        one = one.masked_fill(one == 0, 1.0)
        by_fact = {f: g / one for f, g in by_fact.items()}
    grads = sweep.pull(result.facts, result.softmax, by_fact, needs)
    sweep.close()
    return _in_order(grads, len(needs)), one


def _in_order(grads: Grads, count: int) -> list[Tensor | None]:
    return [getattr(grads, name) for name in names_of(range(count))]


def _kept_dtype(args: RebuiltCall, x: Tensor) -> torch.dtype:
    return torch.float32 if args.source.is_fp16 and not args.recipe.data["direct"] else x.dtype


def _unaliased(out: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Copy outputs where needed, so that none shares memory with an input or another output."""
    seen = {x.untyped_storage().data_ptr() for x in inputs}
    for i, x in enumerate(out):
        place = x.untyped_storage().data_ptr()
        part = x.untyped_storage().nbytes() > x.numel() * x.element_size()  # a view may start unaligned
        if x.numel() and (place in seen or part or not x.is_contiguous()):
            out[i] = x = x.clone(memory_format=torch.contiguous_format)
            place = x.untyped_storage().data_ptr()
        seen.add(place)
        out[i] = x.detach()
    return out


def _visit_fake(tensors: Sequence[Tensor], sizes: Sequence[int], text: str) -> list[Tensor]:
    recipe = read_recipe(text)
    args, spec = RebuiltCall(recipe, tensors, sizes, fake=True), result_spec(recipe, sizes)
    source, data = args.source, recipe.data
    dtype, leading, loss = source.fact_dtype, tensors[0].shape[:-1], recipe.has_loss
    new = functools.partial(tensors[0].new_empty, dtype=dtype)
    out = [new(()), new(len(spec.terms)), new(sum(m[3] for m in spec.metrics), dtype=spec.metric_dtype)]
    out += [new((*leading, *w), dtype=d) for w, d in zip(spec.fact_widths, spec.fact_dtypes)]
    made = any(args.needs)
    if made and recipe.visited and loss:
        out += [] if data["direct"] else [new(())]
        for x, need in zip(source.tensors, args.needs):
            out += [new(x.shape, dtype=_kept_dtype(args, x))] if need else []
    if data["direct"]:
        return out
    if loss:
        out += [torch.empty_like(args.inputs[n], memory_format=torch.contiguous_format) for n in data["wanted"]]
    if made:
        out += [new((*leading, *spec.fact_widths[i]), dtype=spec.fact_dtypes[i]) for i in _kept_facts(spec)]
        out.append(new((spec.softmax_tensors, *leading)) if spec.softmax_tensors else new(0))
        out += [torch.empty((), dtype=torch.long, device="cpu")] if spec.changes else []
        if recipe.host_reads:
            out.append(torch.empty(_number_count(args), dtype=torch.long, device="cpu"))
    if made and not recipe.visited and loss:
        out += [new((*leading, *spec.fact_widths[i])) for i in spec.cotangents]
    return out


def _pull(
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    kept: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    which: Sequence[int],
    text: str,
) -> list[Tensor]:
    """`kept`: the facts whose pull reads their value, the softmax in one tensor, the mark of divergences, and what the
    host knows of the targets."""
    recipe = read_recipe(text)
    args, spec = RebuiltCall(recipe, tensors, sizes), result_spec(recipe, sizes)
    valued = _kept_facts(spec)
    n = len(valued)
    facts, softmax, numbers = kept[:n], kept[n], kept[-1] if recipe.host_reads else None
    args.numbers = numbers if numbers is not None and int(numbers[0]) >= 0 else None
    with autograd_on(), torch.no_grad():
        targets, host_read = prepared_targets(args, args.numbers is not None)
        if not recipe.has_loss:
            sweep = sweep_of(args, targets, host_read)
        else:
            source, want = args.source, Want(spec.facts)
            if spec.has_divergence:
                terms = recipe.terms_of(sizes)
                assert terms is not None
                want = plan_of(args, terms, targets)[0].want
                if spec.changes:
                    check_mark(kept[n + 1], [want.facts[i] for i in which], want.facts, source)
            rows = bind_rows(
                source.leading, targets, args.segments,
                vocab=source.vocab, device=source.device, host_read=host_read,
                by_segment=spec.by_segment and isinstance(source, Linear),
                skips=recipe.visited and isinstance(source, Logits),
            )  # fmt: skip
            teacher_rows = bind_teachers(name_teachers(args.teacher, source), want.teachers, source, rows)
            sweep = Sweep(source, rows, want, backend_for(recipe.data["backend"], source, want), teacher_rows)
        take, named = sweep.rows.take, sweep.want.facts
        by_fact = {named[i]: take(x) for i, x in zip(valued, facts, strict=True)}
        whole = place_tensors(spec.softmax, [take(x) for x in softmax]) if spec.softmax_tensors else NO_SOFTMAX
        pulls = {named[i]: take(g) for i, g in zip(which, cotangents, strict=True)}
        grads = _in_order(sweep.pull(by_fact, whole, pulls, args.needs), len(args.needs))
        sweep.close()
        out = [x.to(y.dtype) for x, y in zip(grads, args.source.tensors) if x is not None]
    return _unaliased(out, [*tensors, *kept, *cotangents])


def _number_count(args: RebuiltCall) -> int:
    """How many numbers the host reads about the targets; see `prepared.prepare`."""
    if args.numbers is not None:
        return args.numbers.shape[0]
    return 3 if args.segments is None else 6 + args.segments.num_segments


def _pull_fake(tensors: Any, sizes: Any, kept: Any, cotangents: Any, which: Any, text: str) -> list[Tensor]:
    needs = read_recipe(text).data["needs"]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, need in zip(tensors, needs) if need]


def _visit_context(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    tensors, sizes, text = inputs
    recipe = read_recipe(text)
    spec = result_spec(recipe, sizes)
    _check_needs(recipe, tensors)
    ctx.set_materialize_grads(False)
    n = len(spec.facts)
    live = [3 + i for i in spec.differentiable()] if any(recipe.data["needs"]) else []
    if recipe.has_loss and (any(recipe.data["needs"]) or recipe.data["wanted"]):
        live.append(0)
    ctx.mark_non_differentiable(*(x for i, x in enumerate(output) if i not in live))
    ctx.text, ctx.sizes, ctx.count = text, list(sizes), len(tensors)
    ctx.save_for_backward(*tensors, *output[3 + n :])  # not the facts: the caller may write to those


def _check_needs(recipe: Recipe, tensors: Sequence[Tensor]) -> None:
    """Raise if the backward would leave out a tensor that requires grad: an exported graph takes any."""
    needs, wanted = recipe.data["needs"], [f"inputs.{name}" for name in recipe.data["wanted"]]
    if not (any(needs) or wanted):
        return  # exported under no_grad: the result requires none either
    for i, (name, x) in enumerate(zip(recipe.names, tensors, strict=True)):
        made = needs[i] if i < recipe.source_tensors else name in wanted or not name.startswith("inputs.")
        if x.requires_grad and not made:
            name = name.split(".", 1)[1]
            raise RuntimeError(
                f"headloss: {name} requires grad, but did not when this graph was made, so there is no gradient for "
                f"it; make the graph again with {name} requiring grad, or detach it"
            )


def _visit_backward(ctx: Any, grads: list[Tensor | None]) -> Any:
    recipe = read_recipe(ctx.text)
    spec = result_spec(recipe, ctx.sizes)
    data, n = recipe.data, len(_kept_facts(spec))
    saved = list(ctx.saved_tensors)
    tensors, more = saved[: ctx.count], saved[ctx.count :]
    needs, loss = data["needs"], recipe.has_loss
    made = any(needs)
    by_source: list[Tensor | None] = [None] * recipe.source_tensors
    by_tensor: list[Tensor | None] = [None] * ctx.count
    g_loss = grads[0] if loss else None
    if g_loss is not None and (recipe.visited or data["wanted"]):  # a gradient from the visit has no graph of its own
        of = [x for x, need in zip(tensors, needs) if need]
        of += [tensors[recipe.names.index(f"inputs.{name}")] for name in data["wanted"]]
        g_loss = torch.ops.headloss.once(g_loss, of)
    pending = {i: grads[3 + i] for i in spec.differentiable() if grads[3 + i] is not None}
    if made and recipe.visited and loss:
        normaliser, more = more[0], more[1:]
        for i, need in enumerate(needs):
            if need:
                g, more = more[0], more[1:]
                by_source[i] = None if g_loss is None else _scaled(g, g_loss * normaliser, tensors[i].dtype)
    for name in data["wanted"] if loss else ():
        g, more = more[0], more[1:]
        if g_loss is not None:
            by_tensor[recipe.names.index(f"inputs.{name}")] = _scaled(g, g_loss, g.dtype)
    if made:
        few = n + 1 + spec.changes + recipe.host_reads  # facts, softmax, mark of divergences, numbers
        kept, cotangents, softmax = more[:few], more[few:], more[n]
        if g_loss is not None:
            for i, g in zip(spec.cotangents, cotangents):
                pulled = g * g_loss
                pending[i] = pulled if i not in pending else pending[i] + pulled
        if pending:
            pulls = [x.to(softmax.dtype) for x in pending.values() if x is not None]
            which = list(pending)
            found = torch.ops.headloss.pull(tensors, ctx.sizes, kept, pulls, which, ctx.text)
            places = [i for i, need in enumerate(needs) if need]
            for i, g in zip(places, found):
                before = by_source[i]
                by_source[i] = g if before is None else before + g
        elif g_loss is not None:  # all terms are off
            for i, need in enumerate(needs):
                by_source[i] = torch.zeros_like(tensors[i]) if need and by_source[i] is None else by_source[i]
    by_tensor[: recipe.source_tensors] = by_source
    return by_tensor, [] if not ctx.sizes else None, None


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale, in float32 if x is narrower."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * scale.to(wide)).to(dtype)


def _kept_facts(spec: ResultSpec) -> list[int]:
    """Indices of the facts whose pull reads their value."""
    return [i for i, fact in enumerate(spec.facts) if fact.name in VALUED]


def _once(x: Tensor, of: Sequence[Tensor]) -> Tensor:
    """x, as a function of the tensors in `of` whose derivative raises; see `autograd_contract.seal`."""
    return x.clone()


def _twice(ctx: Any, grads: Any) -> Any:
    raise RuntimeError(TWICE)


def _once_fake(x: Tensor, of: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(x)


for _name, _real, _fake in (("visit", _visit, _visit_fake), ("pull", _pull, _pull_fake), ("once", _once, _once_fake)):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"headloss::{_name}", _fake, lib=_library)
torch.library.register_autograd("headloss::visit", _visit_backward, setup_context=_visit_context, lib=_library)
for _name in ("pull", "once"):
    torch.library.register_autograd(f"headloss::{_name}", _twice, lib=_library)
