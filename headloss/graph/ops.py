"""The operators `headloss::visit`, `pull` and `once`, for torch.compile, torch.export, FakeTensor and CUDA graphs.

    headloss::visit   the call: loss, terms, metrics, facts, and what its backward needs
    headloss::pull    the gradient of the source from cotangents of the facts, by another sweep
    headloss::once    ties the loss's upstream gradient to the tensors that gradients from the visit depend on, so that
                      differentiating twice raises

`visit` and `pull` take the call's tensors and its recipe, rebuild the call and run the ordinary path; nothing of it is
traced.  The loss's backward scales the gradients made in the visit (`Linear`) or pulls once with the cotangents made
there (`Logits`).  A fact's backward is another sweep, run only if a gradient reaches the fact.  Outputs never alias
inputs.

A graph needs the form of the result before the call runs: see `spec`.
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
from headloss.graph.recipe import Call, Recipe, read
from headloss.graph.spec import (
    Done,
    Form,
    bare,
    filled,
    form,
    known_of,
    measured,
    numbered,
    perform,
    plan_of,
    recording,
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
    recipe = read(text)
    args, known = Call(recipe, tensors, sizes), form(recipe, sizes)
    check_pending()
    for name, x in zip(recipe.names, tensors, strict=True):
        if name.endswith(".temperature"):
            check_temperatures(x)
    if args.numbers is not None and args.targets is not None:
        check_prepared(args.numbers, args.targets, args.segments)
    with recording(), torch.enable_grad():
        done = perform(args, recipe.terms_of(sizes))
        sweep, loss, result = done.sweep, done.loss, done.result
    _check_form(known, done, any(args.needs) and not recipe.visited)
    with recording(), torch.no_grad():
        dtype, device = args.source.fact_dtype, args.source.device
        put = sweep.rows.put
        empty = functools.partial(torch.empty, 0, device=device)
        out = [result.loss.to(dtype)]
        out.append(torch.stack([loss.values[n] for n in known.terms]) if loss and known.terms else empty(dtype=dtype))
        parts = [p for name, *_ in known.metrics for p in loss.metrics[name].parts] if loss else []
        out.append(torch.stack(parts).to(known.wide) if parts else empty(dtype=known.wide))
        out += [put(result.facts[f]) for f in sweep.want.facts]
        made = any(args.needs)
        if made and recipe.visited and loss is not None:
            grads, scale = _made(sweep, result, args.needs, recipe.data["direct"])
            out += [] if recipe.data["direct"] else [scale]
            out += [x.to(_kept_dtype(args, y)) for x, y in zip(grads, args.source.tensors) if x is not None]
        if recipe.data["direct"]:
            return _apart(out, tensors)
        if loss is not None:
            for name in recipe.data["wanted"]:
                g, x = loss.shaped(name, result.by_input.get(name)), args.inputs[name]
                g = g if g is None or result.normaliser is None else g * result.normaliser
                out.append(torch.zeros_like(x) if g is None else g.to(x.dtype).view(x.shape))
        if made:
            out += [put(result.facts[sweep.want.facts[i]]) for i in _valued(known)]  # `_apart` makes copies of them
            _, leaves = numbered(result.softmax) if known.tensors else (None, [])
            out.append(torch.stack([put(x.to(dtype)) for x in leaves]) if leaves else empty(dtype=dtype))
            out += [mark_of(sweep.want.facts, args.source).cpu()] if known.changes else []
            if recipe.reads:  # -1: the host read nothing after all, since a CUDA graph is being captured
                out.append(
                    done.numbers
                    if done.numbers.numel()
                    else torch.full((_numbers(args),), -1, dtype=torch.int64, device="cpu")
                )
        if made and not recipe.visited and loss is not None:
            zero = torch.zeros(sweep.rows.count, dtype=dtype, device=device)
            for i in known.cotangents:
                g, width = result.by_fact.get(sweep.want.facts[i]), known.widths[i]
                out.append(put(zero.view(-1, *(1 for _ in width)).expand(-1, *width) if g is None else g.to(dtype)))
    return _apart(out, tensors)


def _check_form(known: Form, done: Done, pulls: bool) -> None:
    """Raise if the functions now ask for, or return, something else than when the graph was made."""
    facts = done.sweep.want.facts
    by_fact = done.result.by_fact if pulls else {}
    pulled = [facts[i].name for i in range(len(facts)) if facts[i] in by_fact and i not in known.cotangents]
    for what, now, then in (
        ("asks for facts", [str(f) for f in bare(facts)], [str(f) for f in known.facts]),
        ("returns metrics", *([f"{n} per {per}" for n, _, per, _ in x] for x in (measured(done.loss), known.metrics))),
        ("pulls on", pulled, []),
    ):
        if now != then:
            raise RuntimeError(
                f"headloss: a loss or metric {what} {now} in this call, and {then} when the graph was made: the "
                f"number of rows that it branches on, or something that it reads, has changed; make that an option or "
                f"an input, or compile again after torch.compiler.reset()"
            )


def _made(sweep: Sweep, result: Result, needs: tuple[bool, ...], final: bool) -> tuple[list[Tensor | None], Tensor]:
    """The gradients made in the visit, and the factor that they still need."""
    one = torch.ones((), dtype=sweep.source.fact_dtype, device=sweep.source.device)
    if final:
        return _listed(final_grads(sweep, result, needs), len(needs)), one
    if isinstance(result.grads, Grads):
        return _listed(result.grads, len(needs)), one if result.normaliser is None else result.normaliser.to(one)
    by_fact = result.by_fact
    if sweep.source.is_fp16 and by_fact:
        one = torch.stack([g.abs().amax() if g.numel() else g.sum() for g in by_fact.values()]).amax()
        one = one.masked_fill(one == 0, 1.0)
        by_fact = {f: g / one for f, g in by_fact.items()}
    grads = sweep.pull(result.facts, result.softmax, by_fact, needs)
    sweep.close()
    return _listed(grads, len(needs)), one


def _listed(grads: Grads, count: int) -> list[Tensor | None]:
    return [getattr(grads, name) for name in names_of(range(count))]


def _kept_dtype(args: Call, x: Tensor) -> torch.dtype:
    return torch.float32 if args.source.is_fp16 and not args.recipe.data["direct"] else x.dtype


def _apart(out: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
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
    recipe = read(text)
    args, known = Call(recipe, tensors, sizes, fake=True), form(recipe, sizes)
    source, data = args.source, recipe.data
    dtype, leading, loss = source.fact_dtype, tensors[0].shape[:-1], recipe.has_loss
    new = functools.partial(tensors[0].new_empty, dtype=dtype)
    out = [new(()), new(len(known.terms)), new(sum(m[3] for m in known.metrics), dtype=known.wide)]
    out += [new((*leading, *w), dtype=d) for w, d in zip(known.widths, known.dtypes)]
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
        out += [new((*leading, *known.widths[i]), dtype=known.dtypes[i]) for i in _valued(known)]
        out.append(new((known.tensors, *leading)) if known.tensors else new(0))
        out += [torch.empty((), dtype=torch.long, device="cpu")] if known.changes else []
        if recipe.reads:
            out.append(torch.empty(_numbers(args), dtype=torch.long, device="cpu"))
    if made and not recipe.visited and loss:
        out += [new((*leading, *known.widths[i])) for i in known.cotangents]
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
    recipe = read(text)
    args, known = Call(recipe, tensors, sizes), form(recipe, sizes)
    valued = _valued(known)
    n = len(valued)
    facts, softmax, numbers = kept[:n], kept[n], kept[-1] if recipe.reads else None
    args.numbers = numbers if numbers is not None and int(numbers[0]) >= 0 else None
    with recording(), torch.no_grad():
        targets, host_read = known_of(args, args.numbers is not None)
        if not recipe.has_loss:
            sweep = sweep_of(args, targets, host_read)
        else:
            source, want = args.source, Want(known.facts)
            if known.divergences:
                terms = recipe.terms_of(sizes)
                assert terms is not None
                want = plan_of(args, terms, targets)[0].want
                if known.changes:
                    check_mark(kept[n + 1], [want.facts[i] for i in which], want.facts, source)
            rows = bind_rows(
                source.leading, targets, args.segments,
                vocab=source.vocab, device=source.device, host_read=host_read,
                by_segment=known.by_segment and isinstance(source, Linear),
                skips=recipe.visited and isinstance(source, Logits),
            )  # fmt: skip
            teacher_rows = bind_teachers(name_teachers(args.teacher, source), want.teachers, source, rows)
            sweep = Sweep(source, rows, want, backend_for(recipe.data["backend"], source, want), teacher_rows)
        take, named = sweep.rows.take, sweep.want.facts
        by_fact = {named[i]: take(x) for i, x in zip(valued, facts, strict=True)}
        whole = filled(known.softmax, [take(x) for x in softmax]) if known.tensors else NO_SOFTMAX
        pulls = {named[i]: take(g) for i, g in zip(which, cotangents, strict=True)}
        grads = _listed(sweep.pull(by_fact, whole, pulls, args.needs), len(args.needs))
        sweep.close()
        out = [x.to(y.dtype) for x, y in zip(grads, args.source.tensors) if x is not None]
    return _apart(out, [*tensors, *kept, *cotangents])


def _numbers(args: Call) -> int:
    """How many numbers the host reads about the targets; see `prepared.prepare`."""
    if args.numbers is not None:
        return args.numbers.shape[0]
    return 3 if args.segments is None else 6 + args.segments.num_segments


def _pull_fake(tensors: Any, sizes: Any, kept: Any, cotangents: Any, which: Any, text: str) -> list[Tensor]:
    needs = read(text).data["needs"]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, need in zip(tensors, needs) if need]


def _visit_context(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    tensors, sizes, text = inputs
    recipe = read(text)
    known = form(recipe, sizes)
    _check_needs(recipe, tensors)
    ctx.set_materialize_grads(False)
    n = len(known.facts)
    live = [3 + i for i in known.differentiable()] if any(recipe.data["needs"]) else []
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
        made = needs[i] if i < recipe.sources else name in wanted or not name.startswith("inputs.")
        if x.requires_grad and not made:
            name = name.split(".", 1)[1]
            raise RuntimeError(
                f"headloss: {name} requires grad, but did not when this graph was made, so there is no gradient for "
                f"it; make the graph again with {name} requiring grad, or detach it"
            )


def _visit_backward(ctx: Any, grads: list[Tensor | None]) -> Any:
    recipe = read(ctx.text)
    known = form(recipe, ctx.sizes)
    data, n = recipe.data, len(_valued(known))
    saved = list(ctx.saved_tensors)
    tensors, more = saved[: ctx.count], saved[ctx.count :]
    needs, loss = data["needs"], recipe.has_loss
    made = any(needs)
    by_source: list[Tensor | None] = [None] * recipe.sources
    by_tensor: list[Tensor | None] = [None] * ctx.count
    g_loss = grads[0] if loss else None
    if g_loss is not None and (recipe.visited or data["wanted"]):  # a gradient from the visit has no graph of its own
        of = [x for x, need in zip(tensors, needs) if need]
        of += [tensors[recipe.names.index(f"inputs.{name}")] for name in data["wanted"]]
        g_loss = torch.ops.headloss.once(g_loss, of)
    pending = {i: grads[3 + i] for i in known.differentiable() if grads[3 + i] is not None}
    if made and recipe.visited and loss:
        normaliser, more = more[0], more[1:]
        for i, need in enumerate(needs):
            if need:
                g, more = more[0], more[1:]
                by_source[i] = None if g_loss is None else _times(g, g_loss * normaliser, tensors[i].dtype)
    for name in data["wanted"] if loss else ():
        g, more = more[0], more[1:]
        if g_loss is not None:
            by_tensor[recipe.names.index(f"inputs.{name}")] = _times(g, g_loss, g.dtype)
    if made:
        few = n + 1 + known.changes + recipe.reads  # facts, softmax, mark of divergences, numbers
        kept, cotangents, softmax = more[:few], more[few:], more[n]
        if g_loss is not None:
            for i, g in zip(known.cotangents, cotangents):
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
    by_tensor[: recipe.sources] = by_source
    return by_tensor, [] if not ctx.sizes else None, None


def _times(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale, in float32 if x is narrower."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * scale.to(wide)).to(dtype)


def _valued(known: Form) -> list[int]:
    """Indices of the facts whose pull reads their value."""
    return [i for i, fact in enumerate(known.facts) if fact.name in VALUED]


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
