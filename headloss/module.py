"""`FusedLMHead`: an `nn.Linear` that can return the loss instead of the logits."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch
from torch import Tensor, nn

from headloss.immutable import Immutable
from headloss.objective import Objective
from headloss.prepared import Prepared
from headloss.record import Output
from headloss.sources import Linear


class Inputs(Immutable, Mapping[str, Any]):
    """Inputs of an objective's call, carried through module boundaries untouched.

    Wrappers such as FSDP2's mixed precision cast loose float tensors to bfloat16 on their way into a module; they do
    not look into this.  Immutable.

    >>> head(hidden, targets=targets, objective=objective, inputs=hl.Inputs(old_logprob=old, advantage=adv))
    """

    __slots__ = ("_values",)
    _values: dict[str, Any]

    def __init__(self, values: Mapping[str, Any] = {}, /, **named: Any) -> None:
        check_inputs(values)
        check_inputs(named)
        self._set(_values={**values, **named})

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> Any:
        return Inputs, (self._values,)

    def __repr__(self) -> str:
        return f"Inputs({', '.join(self._values)})"


class _Head(Protocol):
    """What a call of the module returns: the record if an objective came with it, otherwise logits."""

    @overload
    def __call__(self, hidden: Tensor) -> Tensor: ...
    @overload
    def __call__(
        self,
        hidden: Tensor,
        *,
        targets: Tensor | Prepared | None = None,
        objective: Objective,
        inputs: Mapping[str, Any] | None = None,
    ) -> Output: ...


class FusedLMHead(nn.Linear):
    """A linear layer that, given targets and an objective, returns the objective's record instead of logits.

    It computes the loss inside the module's own forward, so the hooks of DDP, FSDP2 and ZeRO-3 fire as for any layer.
    `temperature`, `scale`, `softcap`, `logits_dtype`, `weight_grad_dtype`, `weight_grad_into`, `memory` and `vocab` are
    those of `hl.Linear`; they apply to the loss only, since a model that softcaps its logits does so itself.
    """

    source_options: dict[str, Any]
    parallel: tuple[Any, Any] | None = None  # mesh and layout of hidden, set by HeadParallel
    if TYPE_CHECKING:
        __call__: _Head  # nn.Module's own says Any

    def __init__(
        self,
        in_features: int,
        out_features: int | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **source_options: Any,
    ) -> None:
        if out_features is None or isinstance(in_features, nn.Module):
            given = f"got {type(in_features).__name__}" if isinstance(in_features, nn.Module) else "got one size"
            raise TypeError(
                f"in_features and out_features: wanted two sizes, {given}; over the parameters of a layer that exists, "
                f"hl.FusedLMHead.from_linear(layer) makes a head"
            )
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.source_options = check_source_options(source_options, out_features)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **source_options: Any) -> FusedLMHead:
        """The same head over the same Parameters: ties, state-dict keys and optimizers keep working."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: wanted an nn.Linear, got {type(linear).__name__}")
        _check_plain(linear)
        head = cls.__new__(cls)
        nn.Module.__init__(head)
        head.in_features, head.out_features = linear.in_features, linear.out_features
        head.weight = linear.weight
        head.register_parameter("bias", linear.bias)
        head.train(linear.training)
        head.source_options = check_source_options(source_options, linear.out_features)
        return head

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        *,
        targets: Tensor | Prepared | None = None,
        objective: Objective | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> Tensor | Output:
        """Logits, or with `objective` (and its targets and `hl.Inputs`) the objective's record."""
        if objective is None:
            if targets is not None or inputs is not None:
                raise ValueError("objective: needed with targets or inputs; without it the head is a linear layer")
            if self.parallel is None:
                return super().forward(hidden)
            from headloss.parallel.dtensor import sharded_logits

            return sharded_logits(hidden, self)
        objective = check_objective(objective)
        if inputs is not None:
            check_inputs(inputs)
        return objective(self._source(hidden, targets), targets, **(inputs or {}))

    def _source(self, hidden: Tensor, targets: Tensor | Prepared | None = None) -> Linear:
        if self.parallel is None:
            return Linear(hidden, self.weight, self.bias, **self.source_options)
        from headloss.parallel.dtensor import sharded_source

        known = targets.targets if isinstance(targets, Prepared) else targets
        leading = tuple(known.shape) if isinstance(known, Tensor) else None
        return sharded_source(hidden, self, leading, **self.source_options)

    def extra_repr(self) -> str:
        more = "".join(f", {k}={v!r}" for k, v in self.source_options.items())
        return super().extra_repr() + more


def check_objective(objective: object) -> Objective:
    if not isinstance(objective, Objective):
        raise TypeError(f"objective: wanted hl.Objective, got {type(objective).__name__}")
    return objective


def check_inputs(inputs: object, name: str = "inputs") -> None:
    if isinstance(inputs, Inputs):
        return  # checked when it was made
    if not isinstance(inputs, Mapping):
        raise TypeError(f"{name}: wanted hl.Inputs(name=...) or a mapping of names, got {type(inputs).__name__}")
    for own in ("source", "targets"):
        if own in inputs:
            raise ValueError(f"{name}: has {own!r}, which the call is given by its own argument; leave it out here")


_SOURCE_OPTIONS = (
    "temperature", "scale", "softcap", "logits_dtype", "weight_grad_dtype", "weight_grad_into", "memory", "vocab",
)  # fmt: skip


def own_forward(linear: nn.Module, plain: str | None = None, around: bool = False) -> str | None:
    """What a layer does beyond a product with its weight, in words; None if nothing.

    `plain`: a package whose layers' forwards are such plain products too.  `around`: a forward set on the layer itself
    only wraps that of its class.
    """
    if isinstance(linear, nn.LazyLinear):
        return "no weight yet (LazyLinear)"
    if hasattr(linear, "parametrizations"):
        return "a parametrized weight"
    forward: Any = type(linear).forward
    known = forward in (nn.Linear.forward, FusedLMHead.forward)
    known = known or (plain is not None and forward.__module__.startswith(plain))
    if not known or ("forward" in vars(linear) and not around):
        return f"a forward of its own ({type(linear).__name__}; an adapter such as LoRA?)"
    return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def own_hook(linear: nn.Module, passed: tuple[str, ...] = (), kinds: tuple[str, ...] = _HOOKS) -> str | None:
    """A hook of a layer, by name, except hooks of the packages in `passed`; None if there is none."""
    for hook in (hook for kind in kinds for hook in getattr(linear, kind).values()):
        fn = hook.func if isinstance(hook, functools.partial) else hook
        owner = getattr(fn, "__module__", None) or type(fn).__module__
        if owner.partition(".")[0] not in passed:
            return f"a hook ({getattr(fn, '__qualname__', type(fn).__name__)})"
    return None


def _check_plain(linear: nn.Linear) -> None:
    """Refuse a layer that does more than a product: a head over its Parameters alone would leave that out."""
    more = own_forward(linear) or own_hook(linear)
    if more is not None:
        raise TypeError(
            f"linear: it has {more}, which a head over its Parameters would leave out; do the same to the new head, or "
            f"merge it into the weight first"
        )


def check_source_options(options: Mapping[str, Any], columns: int | None = None) -> dict[str, Any]:
    """A copy of the options, checked by a source without data; `columns`: the rows of the weight, where known."""
    for name in options:
        if name not in _SOURCE_OPTIONS:
            raise TypeError(f"{name}: not an option of the head; there are {', '.join(_SOURCE_OPTIONS)}")
    vocab = options.get("vocab")
    columns = columns or (max(1, vocab) if isinstance(vocab, int) else 1)
    row = torch.empty(1, 1, dtype=torch.float32, device="meta")
    Linear(row, row.expand(columns, 1), **{k: x for k, x in options.items() if not isinstance(x, Tensor)})
    return dict(options)
