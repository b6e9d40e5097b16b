"""Autograd's contract, for every backward here: what it reads is kept by autograd, and it is differentiable once.

A tensor of the caller's that was changed in place since the forward raises, as in torch; hooks on saved tensors
(`save_on_cpu`, activation checkpointing) get all of them.  A second derivative raises where it is used, a transform of
`torch.func` and a forward-mode tangent where the call is made, several gradients at once where they come in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad

Named = Sequence[tuple[str, Tensor]]

TWICE = (
    "headloss: tried to differentiate twice (create_graph=True, a Hessian).  The gradient of a call "
    "is made in its own sweep and is once differentiable; for a second derivative write the loss on logits in PyTorch"
)

BATCHED = (
    "headloss: several gradients come into one backward (is_grads_batched=True, jacobian(vectorize=True), vmap around "
    "autograd.grad), which a sweep cannot take; call torch.autograd.grad once for each"
)


def hold(ctx: Any, names: Sequence[str], args: Sequence[Tensor], read: Named = (), used: Named = ()) -> None:
    """Save what the backward needs: `args` of the Function, what else is `read` again, and what was only `used`.

    How often each was written to is noted for a message that names it.
    """
    named = (*read, *used)
    saved: list[Tensor | None]
    untracked = dict[str, Tensor]()
    try:
        versions = [(name, ref(x), x._version) for name, x in (*zip(names, args), *named)]
        saved = [*args, *[x.detach() if x.requires_grad else x for _, x in named]]
    except RuntimeError:  # of inference mode: autograd takes none of those, and nothing counts what is written to them
        saved = [*args]
        versions = [(name, ref(x), x._version) for name, x in zip(names, args) if not x.is_inference()]
        for name, x in named:
            if x.is_inference():
                saved.append(None)
                untracked[name] = x.clone() if name.endswith(("targets", "temperature")) else x
            else:
                versions.append((name, ref(x), x._version))
                saved.append(x.detach() if x.requires_grad else x)
    ctx.held = (len(args), [name for name, _ in read], untracked, versions)
    ctx.save_for_backward(*saved)


def once(pull: Callable[..., Sequence[Tensor | None]], ctx: Any, *grads: Tensor | None) -> Any:
    """A backward: `pull(ctx, args, read, *grads)` on what `hold` saved; its gradients cannot be differentiated."""
    if any(g is not None and _is_batched(g) for g in grads):
        raise RuntimeError(BATCHED)
    saved = _saved(ctx)
    count, names, untracked, _ = ctx.held
    args = saved[:count]
    read = dict(zip(names, saved[count:]))
    if untracked:
        read |= untracked
    if not torch.is_grad_enabled():
        return tuple(pull(ctx, args, read, *grads))
    with torch.no_grad():
        found = pull(ctx, args, read, *grads)
    return seal(found, (*args, *grads))


def _is_batched(g: Tensor) -> bool:
    wrapped = torch._C._functorch
    return wrapped.is_legacy_batchedtensor(g) or wrapped.is_functorch_wrapped_tensor(g)


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        changed = [name for name, held, version in ctx.held[3] if (x := held()) is not None and x._version != version]
        changed = ["vocab_ids" if name.endswith(".vocab_ids") else name for name in changed]
        raise RuntimeError(
            f"{', '.join(changed) or 'a tensor of the call'}: modified by an inplace operation after the forward pass; "
            f"the gradient needs what was there before.  Write to a clone, or after the backward.  ({error})"
        ) from error


def seal(grads: Sequence[Tensor | None], of: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients as a function of these tensors, which raises when it is differentiated."""
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
    """No tensor of a call is one that `torch.func` or forward mode follows: it would be lost without a word."""
    if forward_ad._current_level < 0 and torch._C._functorch.peek_interpreter_stack() is None:
        return
    source, targets, segments, teacher, options, inputs, *_ = arguments
    own = {f"the weight of term {name!r}": x for name, x in weights.items()}
    things = (source, {"targets": targets, "segments": segments}, teacher, options, inputs, own)
    for name, x in every_tensor("", things):
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise RuntimeError(
                f"{name}: is inside a transform of torch.func (vmap, grad, jvp, vjp, jacrev, ...), which cannot see "
                f"into a headloss call.  Rows need no vmap: leading dimensions are free.  For gradients use "
                f"torch.autograd or objective.forward_backward"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                f"{name}: carries a forward-mode tangent, which a headloss call would drop; only reverse mode is there "
                f"(loss.backward(), torch.autograd.grad).  Pass it detached if the tangent is not wanted"
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
