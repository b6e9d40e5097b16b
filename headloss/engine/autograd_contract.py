"""Autograd's contract for every backward here: autograd saves what it reads, and it is differentiable once.

As in torch, the backward raises if a tensor of the caller's was changed in place since the forward, and hooks on saved
tensors (`save_on_cpu`, activation checkpointing) see all of them.  A second derivative raises when it is used, a
`torch.func` transform or a forward-mode tangent raises in the call, and batched gradients raise in the backward.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headloss.deferred_checks import check_now_or_later
from headloss.trace.function_reads import is_ours

TWICE = (
    "headloss: tried to differentiate twice (create_graph=True, a Hessian).  The gradient of a call "
    "is made in its own sweep and is once differentiable; for a second derivative write the loss on logits in PyTorch"
)

TRACED = (
    "headloss: torch.jit.trace (torch.onnx.export with dynamo=False) would keep what this call reads of its targets, "
    "whatever later calls are given; use torch.export or torch.compile, which keep a call as one operator"
)

BATCHED = (
    "headloss: several gradients come into one backward (is_grads_batched=True, jacobian(vectorize=True), vmap around "
    "autograd.grad), which a sweep cannot take; call torch.autograd.grad once for each"
)


def save_tensors(ctx: Any, names: Sequence[str], tensors: Sequence[Tensor], args: int, read: int, made: bool) -> None:
    """Save what the backward needs.  The first `args` tensors are inputs of the Function, the backward may read those
    up to `read` again, and the forward used the rest.  We note each version, so that an error can name what changed.

    `made`: the gradient of the loss exists already; only a pull on a fact, or a second backward, reads anything again.
    """
    untracked: dict[int, tuple[Tensor, Tensor | None]] = {}  # not `dict[int, ...]()`: every call would make the type
    saved: list[Tensor | None] = [*tensors]
    if True in map(_requires_grad, tensors[args:]):
        saved[args:] = [x.detach() for x in tensors[args:]]
    try:
        versions = [*map(_version, tensors)]
    except RuntimeError:  # inference tensors: autograd cannot save them, and they have no version counter
        for name, x in zip(names[:args], tensors):
            if x.is_inference():
                raise RuntimeError(
                    f"{name}: was made under torch.inference_mode(), and autograd cannot save it for the backward; "
                    f"pass {name}.clone(), or make it under torch.no_grad()"
                ) from None
        versions = [0 if x.is_inference() else x._version for x in tensors]
        for i, (name, x) in enumerate(zip(names, tensors)):
            if i >= args and x.is_inference():
                saved[i] = None
                small = name.endswith(("targets", "temperature"))
                untracked[i] = (x.clone() if small else x, None if small or i >= read else _fingerprint(x, not made))
    ctx.held = names, args, read, untracked, versions
    if not _TELLS:
        ctx.refs = [*map(weakref.ref, tensors)]
    ctx.save_for_backward(*saved)


def differentiable_once(pull: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """A backward that runs `pull(ctx, saved, *grads)` on what `save_tensors` saved; differentiating it again raises."""

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        for g in grads:
            if g is not None and (_is_legacy_batched(g) or _is_wrapped(g)):
                raise RuntimeError(BATCHED)
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise RuntimeError(_changed(ctx, error)) from error
        if not torch.is_grad_enabled():
            return pull(ctx, saved, *grads)
        with torch.no_grad():
            found = pull(ctx, saved, *grads)
        return seal(found, (*saved[: ctx.held[1]], *grads))

    return backward


_TELLS = hasattr(torch._C._autograd.SavedTensor, "data")  # False in torch 2.8
_version, _requires_grad = operator.attrgetter("_version"), operator.attrgetter("requires_grad")
_transform = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def read_again(ctx: Any, saved: Sequence[Tensor], own: int) -> dict[str, Tensor]:
    """The saved tensors that the backward reads again, by name: the source's first `own`, and those up to `read`."""
    names, args, read, untracked, _ = ctx.held
    for i, (x, before) in untracked.items():
        if before is not None:
            _refuse_change((_fingerprint(x, before.ndim < x.ndim) != before).sum(), CHANGED.format(name=names[i]))
    return {names[i]: untracked[i][0] if i in untracked else saved[i] for i in (*range(own), *range(args, read))}


def _fingerprint(x: Tensor, whole: bool) -> Tensor:
    """Shows whether a tensor was written to: the sum of the bits of each row or, if not `whole`, about 64 columns."""
    x = x if whole or not x.ndim else x[..., :: max(1, x.shape[-1] // 64)]
    bits = x.contiguous().view(_BITS[x.itemsize])
    return bits.sum(-1, dtype=torch.int64) if whole and x.ndim else bits.clone()


def changing(facts: Iterable[Any]) -> list[Any]:
    """The divergences among these facts that may read something else by the time a pull calls them again."""
    elements = dict.fromkeys(f.element for f in facts if f.element is not None)
    return [e for e in elements if not (e.pure or is_ours(e.fn))]


def mark_of(facts: Iterable[Any], source: Any) -> Tensor:
    """A number that changes if those divergences read something else."""
    marks = [e.mark(source.columns, source.fact_dtype, source.device) for e in changing(facts)]
    return sum(marks[1:], marks[0])


def check_mark(before: Tensor, pulled: Iterable[Any], facts: Iterable[Any], source: Any) -> None:
    """Raise if such a divergence gets a gradient but reads something else than in the forward pass."""
    if names := [str(e) for e in changing(pulled)]:
        _refuse_change(mark_of(facts, source) != before, f"{', '.join(names)}: {READS_ANEW}")


def _refuse_change(found: Tensor, message: str) -> None:
    def check(found: Tensor) -> None:
        if int(found):
            raise RuntimeError(message)

    check_now_or_later(found, found, check, message)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHANGED = (
    "{name}: modified by an inplace operation after the forward pass; the gradient needs what was there before.  It "
    "was made under torch.inference_mode(), where torch counts no writes: write to a clone, or after the backward"
)

READS_ANEW = (
    "reads something that has changed since the forward pass, or is random, and this gradient calls it again; run the "
    "backward before the change, or make what changes an option of the term"
)


def _changed(ctx: Any, error: RuntimeError) -> str:
    names, _, _, _, versions = ctx.held
    now = [x.data for x in ctx._raw_saved_tensors] if _TELLS else [ref() for ref in ctx.refs]
    held = zip(names, now, versions)
    changed = [name for name, x, version in held if x is not None and not x.is_inference() and x._version != version]
    changed = ["vocab_ids" if name.endswith(".vocab_ids") else name for name in changed]
    return (
        f"{', '.join(changed) or 'a tensor of the call'}: modified by an inplace operation after the forward pass; "
        f"the gradient needs what was there before.  Write to a clone, or after the backward.  ({error})"
    )


def seal(grads: Sequence[Tensor | None], of: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients as a function of the tensors in `of`; differentiating them raises."""
    there = [g for g in grads if g is not None]
    leads = [x for x in of if x is not None and x.requires_grad]
    if not there or not leads:
        return tuple(grads)
    sealed = iter(_Sealed.apply(len(there), *there, *leads))
    return tuple(None if g is None else next(sealed) for g in grads)


class _Sealed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(TWICE)


def refuse_transforms(arguments: Any, weights: Mapping[str, Any] = {}) -> None:
    """Raise if `torch.func` or forward mode tracks a tensor of a call: the derivative would be silently lost.

    And if `torch.jit.trace` does, whose graph would have this call's numbers in it.
    """
    if _is_tracing():
        raise RuntimeError(TRACED)
    if forward_ad._current_level < 0 and _transform() is None:
        return
    source, targets, segments, teacher, options, inputs, *_ = arguments
    own = {f"the weight of term {name!r}": x for name, x in weights.items()}
    things = (source, {"targets": targets, "segments": segments}, teacher, options, inputs, own)
    for name, x in every_tensor("", things):
        if _is_wrapped(x):
            raise RuntimeError(
                f"{name}: is inside a transform of torch.func (vmap, grad, jvp, vjp, jacrev, ...), which cannot see "
                f"into a headloss call.  Rows need no vmap: leading dimensions are free.  For gradients use "
                f"torch.autograd or objective.forward_backward"
            )
        if x.requires_grad and torch.is_grad_enabled() and _transform() is not None:
            raise RuntimeError(
                f"{name}: requires grad and the call is made inside a transform of torch.func (vmap, grad, ...), which "
                f"follows none of its tensors; make the call outside and pass the result in, or pass {name} detached"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                f"{name}: carries a forward-mode tangent, which a headloss call would drop; headloss has reverse mode "
                f"only (loss.backward(), torch.autograd.grad).  Pass it detached if the tangent is not wanted"
            )


def every_tensor(name: str, x: Any) -> Iterable[tuple[str, Tensor]]:
    """Every tensor in the arguments of a call, with a name."""
    if isinstance(x, Tensor):
        yield name or "an argument", x
    elif isinstance(x, Mapping):
        for key, y in x.items():
            yield from every_tensor(str(key), y)
    elif isinstance(x, tuple | list):
        for y in x:
            yield from every_tensor(name, y)
    elif type(x).__module__.startswith("headloss."):
        slots = {n: getattr(x, n, None) for kind in type(x).__mro__ for n in vars(kind).get("__slots__", ())}
        fields = {**slots, **getattr(x, "__dict__", {})}
        for key, y in fields.items():
            yield from every_tensor(name if key == "value" else key, y)
