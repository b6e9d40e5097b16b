"""`HeadParallel` splits the vocabulary of a `FusedLMHead` over ranks.  It loads DTensor; `import headloss` does not."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from headloss.module import FusedLMHead


class HeadParallel(ParallelStyle):
    """Shards a `FusedLMHead` over the vocabulary, for `parallelize_module`.

    `input_layouts` says how hidden arrives: `Replicate()`, or `Shard(1)` under sequence parallelism, which gathers it
    before the head and reduce-scatters its gradient afterwards.  Shard a tied embedding the same way, and tie it again.

    >>> parallelize_module(model, tp_mesh, {"lm_head": hl.HeadParallel()})
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if not isinstance(module, FusedLMHead):
            raise TypeError(
                f"HeadParallel: wanted a hl.FusedLMHead, got {type(module).__name__}; "
                f"replace the layer by hl.FusedLMHead.from_linear(...) first"
            )
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh: wanted one dimension (the tensor-parallel one), got {device_mesh.ndim}")
        if isinstance(module, FSDPModule):
            raise ValueError("module: fully_shard has sharded it already; call parallelize_module before fully_shard")
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                if parameter.device_mesh != device_mesh or tuple(parameter.placements) != (Shard(0),):
                    raise ValueError(
                        f"{name}: a DTensor placed {tuple(parameter.placements)} on {parameter.device_mesh}; wanted a "
                        f"plain tensor, or one placed Shard(0) on {device_mesh}"
                    )
            else:
                sharded = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
                module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        module.parallel = (device_mesh, self.input_layouts)
        return module
