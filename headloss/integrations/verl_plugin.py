"""headloss in every worker of verl: import this module, and verl 0.9 knows it by name.

    VERL_USE_EXTERNAL_MODULES=headloss.integrations.verl_plugin        # read by each Ray worker as it imports verl
    actor_rollout_ref.model.external_lib=headloss.integrations.verl_plugin                     # or in verl's config

    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=headloss
    actor_rollout_ref.actor.policy_loss.loss_mode=headloss_gspo

Follows `verl.models.transformers.monkey_patch` and `verl.utils.experimental.torch_functional` of verl 0.9; a verl in
which they are elsewhere is refused.  Whatever a model does to its logits besides the product (bias, factor, softcap,
padded columns) is applied too, or refused if it cannot be; verl's own kernels leave it out.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from headloss.integrations.causal_lm import transform_of
from headloss.integrations.forward_code import other_use
from headloss.integrations.verl import FusedLinearForPPO, register_policy_losses
from headloss.module import own_forward, own_hook

BACKEND = "headloss"
INSTEAD = "set model.use_fused_kernels=False, so that verl computes whole logits"
HEAD: ContextVar[Mapping[str, Any] | None] = ContextVar("HEAD", default=None)  # for the model whose forward runs


def install() -> list[str]:
    """Make `impl_backend: headloss` and the policy losses known to verl; returns the names of the losses."""
    fused: Any = importlib.import_module("verl.utils.experimental.torch_functional")
    patches: Any = importlib.import_module("verl.models.transformers.monkey_patch")
    for module, name in ((fused, "FusedLinearForPPO"), (patches, "patch_forward_with_backends")):
        if not hasattr(module, name):
            raise RuntimeError(f"verl: {module.__name__} has no {name}; headloss knows verl 0.9")
    if getattr(fused, "native_fused_linear", None) is None:
        fused.native_fused_linear, fused.FusedLinearForPPO = fused.FusedLinearForPPO, chosen
        patches.native_patch, patches.patch_forward_with_backends = patches.patch_forward_with_backends, patched
        after_import("verl.workers.engine.base", guard_engines)
    return register_policy_losses()


def chosen(*args: Any, **kwargs: Any) -> Any:
    """verl's `FusedLinearForPPO`, or ours inside a model of ours: verl 0.9.0 does not pass the backend on here."""
    head = HEAD.get()
    if head is not None or BACKEND in (*args, *kwargs.values()):
        return FusedLinearForPPO(*args, **kwargs, **(head or {}))  # type: ignore[misc]
    fused = importlib.import_module("verl.utils.experimental.torch_functional")
    return fused.native_fused_linear(*args, **kwargs)


def patched(model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None) -> None:
    """verl's `patch_forward_with_backends`; our backend takes the place of its torch backend."""
    ours = fused_kernels_backend == BACKEND
    if ours and not use_fused_kernels:
        raise ValueError("impl_backend: headloss needs model.use_fused_kernels=True, or nothing of it runs")
    if ours:
        options = head_of(model)
        own = not type(model).forward.__module__.startswith("verl.")  # a class that verl has patched was read before
        if line := other_use(model, "vocab" in options) if own else None:
            raise TypeError(
                f"model: {type(model).__name__}.forward has `{line}`, which impl_backend: headloss would leave out; "
                f"{INSTEAD}"
            )
    patches = importlib.import_module("verl.models.transformers.monkey_patch")
    patches.native_patch(model, use_fused_kernels, "torch" if ours else fused_kernels_backend)
    if ours:
        model._verl_fused_kernels_backend = BACKEND
        model.forward = types.MethodType(_following(type(model).forward), model)


def _following(forward: Any) -> Any:
    """verl's forward; each call inspects the head again, since adapters may be added after the patch."""

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = HEAD.set(head_of(self))
        try:
            return type(self).forward(self, *args, **kwargs)
        finally:
            HEAD.reset(token)

    return run


def head_of(model: Any) -> dict[str, Any]:
    """What a model does to its logits besides the product, as options of `hl.Linear`; or an error."""
    head = model.lm_head
    more = own_forward(head) or own_hook(head, ("torch",))
    if more is not None:
        raise TypeError(
            f"model: the head of {type(model).__name__} has {more}, which impl_backend: headloss would leave out; "
            f"keep adapters off the head, or {INSTEAD}"
        )
    return {"bias": head.bias, **transform_of(model, True, INSTEAD)}


def guard_engines(module: Any) -> None:
    """Refuse the backend in verl's engines other than FSDP's, since those never read it."""
    native = module.EngineRegistry.new

    def new(cls: Any, model_type: str, backend: str, *args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("model_config", args[0] if args else None)
        said = (getattr(model, "fused_kernel_options", None) or {}).get("impl_backend")
        if said == BACKEND and not str(backend).startswith("fsdp"):
            raise ValueError(
                f"impl_backend: headloss is read by verl's FSDP engines alone, and the strategy is {backend!r}; use "
                f"strategy=fsdp2, or leave impl_backend as it is"
            )
        return native(model_type, backend, *args, **kwargs)

    module.EngineRegistry.new = classmethod(new)


def after_import(name: str, then: Callable[[Any], None]) -> None:
    """Call `then(module)` once it is loaded; do not load it here, since verl's engines have an order of their own."""
    if name in sys.modules:
        then(sys.modules[name])
        return

    class Finder:
        @staticmethod
        def find_spec(asked: str, path: Any = None, target: Any = None) -> Any:
            if asked != name:
                return None
            sys.meta_path.remove(Finder)
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                load = spec.loader.exec_module

                def exec_module(module: Any) -> None:
                    load(module)
                    then(module)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder)


NAMES = install()
