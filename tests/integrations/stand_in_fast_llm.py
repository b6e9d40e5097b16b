"""Plays the parts of Fast-LLM that its adapter meets, after its main branch of July 2026 (commit 7d61a1ba).

Fast-LLM is on no package index and wants Python 3.12.  Here are its registry of configs (`fast_llm/config.py`), its
loss configs and the arguments their layers are made with (`layers/language_model/loss/config.py`), its records of
losses (`engine/base_model/config.py`), and what its head does with `head.losses` (`layers/language_model/head.py`).
"""

from __future__ import annotations

import enum
import sys
import types
from collections import defaultdict
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Config:
    registry: ClassVar[dict[str, type] | None] = None
    dynamic_type_name: ClassVar[str | None] = None

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Any:
        """The class that `type` names, its nested configs made too; a field that is not there is an error."""
        given = dict(given)
        found: Any = LossConfig.registry[given.pop("type")]
        if "losses" in given:
            given["losses"] = {name: cls.from_dict(x) for name, x in given["losses"].items()}
        made = found(**given)
        made._validate()
        return made

    def _validate(self) -> None:
        pass


def config_class(registry: bool = False, dynamic_type: dict[type, str] | None = None) -> Any:
    def wrap(cls: Any) -> Any:
        made = dataclass(cls, kw_only=True)
        made.registry = {} if registry else made.registry
        for base, name in (dynamic_type or {}).items():
            made.dynamic_type_name = name
            assert name not in base.registry  # as Fast-LLM refuses a second class of one name
            base.registry[name] = made
        return made

    return wrap


def Field(*, desc: str, hint: str, **how: Any) -> Any:
    return field(**how)


@config_class(registry=True)
class LossConfig(Config):
    weight: float = 1.0
    logits_scale_factor: float = 1.0

    def get_layer(self, distributed_config: Any, name: str, **how: Any) -> Any:
        names = (
            "prediction_distance prediction_heads vocab_parallel num_splits logits_scale_factor weight register_loss"
        )
        assert set(how) == set(names.split())
        return self.loss_class(self, distributed_config, name=name, **how)

    def get_reference_models(self) -> set[str]:
        return {self.reference_model} if hasattr(self, "reference_model") else set()


CLIPS = [("epsilon_low", float, 0.2), ("epsilon_high", float, 0.2), ("metrics", str, "auto")]
OWN: dict[str, list[Any]] = {
    "label": [("loss_type", str, "cross_entropy")],
    "z_loss": [],
    "distillation": [
        ("loss_type", str, "cross_entropy"), ("reference_model", str, "teacher"), ("temperature", float, 1.0),
    ],
    "grpo": CLIPS,
    "gspo": CLIPS,
}  # fmt: skip
for kind, fields in OWN.items():
    config_class(dynamic_type={LossConfig: kind})(make_dataclass(kind, fields, bases=(LossConfig,), kw_only=True))


class ReductionType(enum.StrEnum):
    sum = "sum"
    average = "average"
    minimum = "minimum"
    maximum = "maximum"


@dataclass
class LossDef:
    name: str
    dtype: str = "float32"
    reduction: ReductionType = ReductionType.sum


@dataclass
class Dim:
    """Of a kind of parallelism: `group` is there once the model is."""

    size: int = 1
    rank: int = 0
    _group: Any = None

    @property
    def group(self) -> Any:
        assert self._group != "not yet"
        return self._group


@dataclass
class DistributedConfig:
    tensor: Dim = field(default_factory=Dim)
    sequence_data: Dim = field(default_factory=Dim)
    sequence_tensor_parallel: bool = False
    pipeline_parallel: int = 1

    @property
    def tensor_parallel(self) -> int:
        return self.tensor.size

    def get_distributed_dim(self, name: str) -> Dim:
        return getattr(self, name)


def install() -> None:
    """Put the parts where Fast-LLM has them."""
    names = types.SimpleNamespace(tensor="tensor", sequence_data="sequence_data")
    parts = {
        "config": {"config_class": config_class, "Field": Field, "FieldHint": types.SimpleNamespace(core="core")},
        "layers.language_model.loss.config": {"LanguageModelLossConfig": LossConfig},
        "engine.base_model.config": {"LossDef": LossDef, "ReductionType": ReductionType},
        "engine.distributed.config": {"DistributedDimNames": names},
    }
    for path, content in parts.items():
        whole = f"fast_llm.{path}".split(".")
        for i in range(1, len(whole) + 1):
            sys.modules.setdefault(".".join(whole[:i]), types.ModuleType(".".join(whole[:i])))
        vars(sys.modules[".".join(whole)]).update(content)


class LMHead(nn.Module):
    """Fast-LLM's head: its losses made from their configs, called one after another with one gradient buffer."""

    def __init__(
        self, losses: dict[str, Any], weight: Tensor, parallel: DistributedConfig | None = None, *, distance: int = 1,
        heads: int = 1, splits: int = 1, scale: float = 1.0, coefficient: float = 1.0, vocab_parallel: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.splits, self.distance = splits, distance
        self.output_weights = nn.Parameter(weight)
        configs = {name: LossConfig.from_dict(given) for name, given in losses.items()}
        weights = [config.weight for config in configs.values() if config.weight != 0]
        main = len(weights) == 1 and weights[0] * coefficient == 1.0
        self.losses = nn.ModuleList(
            config.get_layer(
                parallel or DistributedConfig(), name=self.full(name), prediction_distance=distance,
                prediction_heads=heads, vocab_parallel=vocab_parallel, num_splits=splits, logits_scale_factor=scale,
                weight=coefficient, register_loss=not (main and config.weight * coefficient == 1.0),
            )
            for name, config in configs.items()
        )  # fmt: skip
        for name, module in nn.ModuleDict({"head": self}).named_modules():
            module.module_name = name

    def full(self, name: str) -> str:
        return name if self.distance == 1 else f"{name}_{self.distance}"

    def get_loss_definitions(self) -> list[LossDef]:
        total = LossDef(name=self.full("lm_head_loss"))
        return [total, *(found for loss in self.losses for found in loss.get_loss_definitions())]

    def get_preprocessing_config(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for loss in self.losses:
            for key, value in loss.get_preprocessing_config().items():
                assert merged.setdefault(key, value) == value
        return merged

    def step(self, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
        """(loss, the hidden states' gradient, what was logged); the weight's gradient is added to its `grad`."""
        logged: dict[str, list[Tensor]] = defaultdict(list)
        known = {definition.name for definition in self.get_loss_definitions()}
        weight, totals, grads = self.output_weights.detach(), [], []
        self.output_weights.grad = torch.zeros_like(weight)
        for split, part in enumerate(hidden.chunk(self.splits)):
            logits, grad, values = part @ weight.T, None, []
            for loss in self.losses:
                value, grad = loss.forward_backward(logits, kwargs, logged, split, grad)
                values.append(value.detach())
            assert grad is not None
            totals.append(sum(values))
            grads.append(grad @ weight)
            self.output_weights.grad += grad.T @ part
        total = torch.stack(totals).sum()
        assert set(logged) <= known  # Fast-LLM's lists are made from the definitions
        return total, torch.cat(grads), logged
