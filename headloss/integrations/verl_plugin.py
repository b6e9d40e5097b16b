"""headloss in every worker of verl: import this module, and verl 0.9 knows it by name.

    VERL_USE_EXTERNAL_MODULES=headloss.integrations.verl_plugin        # read by each Ray worker as it imports verl
    actor_rollout_ref.model.external_lib=headloss.integrations.verl_plugin                     # or in verl's config

    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=headloss
    actor_rollout_ref.actor.policy_loss.loss_mode=headloss_gspo

Follows `verl.models.transformers.monkey_patch` and `verl.utils.experimental.torch_functional` of verl 0.9; a verl in
which they are elsewhere is refused.
"""

from __future__ import annotations

import importlib
from typing import Any

from headloss.integrations.verl import FusedLinearForPPO, register_policy_losses

BACKEND = "headloss"


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
    return register_policy_losses()


def chosen(chunk_size: int = 512, impl_backend: str = "torch") -> Any:
    """verl's `FusedLinearForPPO`, or ours where the backend is headloss."""
    if impl_backend == BACKEND:
        return FusedLinearForPPO(chunk_size, impl_backend)
    fused = importlib.import_module("verl.utils.experimental.torch_functional")
    return fused.native_fused_linear(chunk_size, impl_backend)


def patched(model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None) -> None:
    """verl's `patch_forward_with_backends`; ours goes where its torch backend does."""
    ours = fused_kernels_backend == BACKEND
    if ours and not use_fused_kernels:
        raise ValueError("impl_backend: headloss needs model.use_fused_kernels=True, or nothing of it runs")
    patches = importlib.import_module("verl.models.transformers.monkey_patch")
    patches.native_patch(model, use_fused_kernels, "torch" if ours else fused_kernels_backend)
    if ours:
        model._verl_fused_kernels_backend = BACKEND


NAMES = install()
