"""`hl.Linear(weight_grad_into=...)`: the backward adds the weight's gradient to a tensor itself; autograd gets none.

    "grad"        weight.grad, which is made if there is none yet
    "main_grad"   weight.main_grad, in its own dtype (float32 in Megatron), which must exist before the call

This happens in the backward, when the incoming gradient is known.  A call without a backward adds nothing, and neither
does a backward that asks only for other gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from headloss.record import Grads
from headloss.sources import Linear


class WeightGradInto(NamedTuple):
    """A weight, and the name of the attribute that its gradient is added to."""

    weight: Tensor
    name: str

    @property
    def existing(self) -> Tensor | None:
        return getattr(self.weight, self.name, None)

    def asked(self, ctx: Any) -> bool:
        """Whether the running backward is meant to reach the weight: not if its `inputs=` names only other tensors."""
        try:
            return torch._C._will_engine_execute_node(ctx.next_functions[1][0])
        except RuntimeError as error:
            if "autograd.grad" not in str(error):  # no engine is running that could tell
                return True
            raise RuntimeError(
                f"weight_grad_into={self.name!r}: torch.autograd.grad asks for the weight's gradient, which is added "
                f"to weight.{self.name} instead; use None"
            ) from error

    def take(self, grads: Grads) -> Grads:
        """Add the weight's gradient, unless a product has; the others are returned, for autograd or the caller."""
        existing, grad, weight = self.existing, grads.weight, self.weight
        with torch.no_grad():
            if grad is not None and existing is None:
                if self.name != "grad":
                    raise RuntimeError(
                        f"weight_grad_into={self.name!r}: weight.{self.name} was removed after the forward"
                    )
                weight.grad = grad.to(getattr(weight, "grad_dtype", None) or weight.dtype)  # torch 2.10 has both
            elif grad is not None and existing is not None:
                existing.add_(grad)
        # Megatron's flag `grad_added_to_main_grad` stays unset: its hook would drop what other uses of the weight send.
        return grads._replace(weight=None)


def weight_grad_into_of(source: Any) -> WeightGradInto | None:
    if not isinstance(source, Linear) or source.weight_grad_into is None:
        return None
    return WeightGradInto(source.weight, source.weight_grad_into)


def check_weight_grad_into(source: Any) -> None:
    """Raise before anything runs if the gradient could not be added."""
    into = weight_grad_into_of(source)
    if into is None:
        return
    weight, label = into.weight, f"weight_grad_into={into.name!r}"
    if type(weight).__name__ == "DTensor":
        raise TypeError(f"{label}: the weight is a DTensor, whose gradient autograd has to place; use None")
    if not weight.requires_grad or not weight.is_leaf:
        what = "is made of other tensors" if weight.requires_grad else "does not require grad"
        raise ValueError(f"{label}: wanted a Parameter, but the weight {what}; use None")
    if hooks := list((weight._backward_hooks or {}).values()):
        name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise ValueError(f"{label}: the weight has a hook ({name}), which autograd would give no gradient; use None")
    existing = into.existing
    if existing is None and into.name == "grad":
        return
    if into.name == "main_grad" and _ddp_reduces(weight):
        raise ValueError(f'{label}: DistributedDataParallel sums weight.grad over ranks, no main_grad; use "grad"')
    if not isinstance(existing, Tensor):
        raise ValueError(f'{label}: the weight has no main_grad; make one before the call, or use "grad"')
    dense = existing.layout == torch.strided and existing.dtype.is_floating_point
    if existing.shape != weight.shape or existing.device != weight.device or not dense:
        kind = "" if existing.layout == torch.strided else f"{str(existing.layout).removeprefix('torch.')} "
        got = f"{kind}{existing.dtype} of shape {tuple(existing.shape)} on {existing.device}"
        raise ValueError(f"{label}: wanted shape {tuple(weight.shape)} on {weight.device}, got {got}")


def _ddp_reduces(weight: Tensor) -> bool:
    """Whether the call is made inside the forward of a DDP wrapper that is going to sum this weight's gradient."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    return ddp is not None and ddp.require_backward_grad_sync and any(weight is x for x in ddp._module_parameters)
