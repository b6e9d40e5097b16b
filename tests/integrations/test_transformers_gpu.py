"""Patched models of Transformers, and its Trainer, on a GPU: losses and gradients as the stock model has them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import tiny_models as tiny
import transformers
from transformers import Trainer, TrainingArguments

from headloss.integrations.transformers import HeadlossCallback, patch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def grads(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    loss = model(**batch).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize("name", [name for name in tiny.CONFIGS if name != "mixtral"])  # whose experts want no float64
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    """As far from float64 as the stock model, twice, and a rounding."""
    model, batch = tiny.model(name).cuda(), {k: x.cuda() for k, x in tiny.batch().items()}
    truth = grads(copy.deepcopy(model).double(), batch)
    stock, ours = (grads(f(copy.deepcopy(model).to(dtype)), batch) for f in (lambda m: m, patch))
    few = 64 * torch.finfo(dtype).eps
    for key, x in truth.items():
        size = float(x.norm()) + 1e-3
        lost, found = (float((y[key].double() - x).norm()) / size for y in (stock, ours))
        assert found <= 2 * lost + few, f"{key}: {found:.1e} from float64, the stock model {lost:.1e}"


HOW = {
    "plain": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "checkpointed": {"bf16": True, "gradient_checkpointing": True},
    "compiled": {"bf16": True, "torch_compile": True},
}


@pytest.mark.parametrize("how", HOW)
def test_trainer(how: str, tmp_path: Path) -> None:
    data = [{k: x[i] for k, x in tiny.batch(32, seed=5).items()} for i in range(32)]
    losses = []
    for patched in (False, True):
        model = patch(tiny.model("llama")) if patched else tiny.model("llama")
        arguments = TrainingArguments(
            str(tmp_path), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1,
            report_to=[], disable_tqdm=True, save_strategy="no", learning_rate=1e-2, optim="sgd", seed=3, **HOW[how],
        )  # fmt: skip
        run = Trainer(model=model, args=arguments, train_dataset=data)
        _ = HeadlossCallback().add_to(run) if patched else None
        run.train()
        assert next(model.parameters()).is_cuda
        losses.append([x["loss"] for x in run.state.log_history if "loss" in x])
    assert len(losses[0]) == 6 and losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
