"""headloss in Hugging Face Transformers: one adapter for any causal language model.

    patch(model, hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=1e-4)))
    model(input_ids, labels=labels).loss.backward()          # and Trainer, as before

The output embedding keeps its Parameters and its name and learns to compute the loss inside its own forward, where the
hooks of DDP, FSDP2 and ZeRO-3 have the weight ready.  It hands the model an empty placeholder in place of the logits;
`model.loss_function` exchanges that for the loss.  Softcap and scale, which a model applies to its logits, are read
from the config, and the first placeholder carries a number through the model that shows whether they were read right.
Without labels nothing changes: logits as before, `generate` as before.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import headloss as hl

PROBE = 1.5  # sent through the model once, where its logits would go


def patch(
    model: nn.Module,
    objective: hl.Objective | None = None,
    *,
    memory: str | int = "1GiB",
    eval_logits: bool = False,
    **source_options: Any,
) -> nn.Module:
    """Let the model's head compute `objective` (cross-entropy by default) whenever labels are given.

    `memory`, `logits_dtype`, `weight_grad_dtype`, `temperature` are those of `hl.Linear`; `scale` and `softcap` come
    from the config unless given.  `outputs.logits` is then empty beside a loss; `eval_logits=True` keeps the logits in
    evaluation mode, for `compute_metrics`.  Inputs of the losses travel as `model(..., headloss=hl.Inputs(...))`, in
    the shape of the shifted labels.  Returns the model; `model.headloss` has `.last` and `.objective`.
    """
    base = unwrapped(model)
    objective = _check_objective(objective)
    head = check_model(base)
    options = {"memory": memory, **logits_transform(base.config), **source_options}
    adapter = Adapter(base, head, options)
    adapter.objective, adapter.eval_logits = objective, eval_logits
    base.loss_function = adapter.loss_function
    base.forward = types.MethodType(functools.wraps(type(base).forward)(_forward), base)
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """The model as it was before `patch`: the same head, Parameters, forward and loss function."""
    base = unwrapped(model)
    if not isinstance(vars(base).get("headloss"), Adapter):
        raise ValueError(f"model: {type(base).__name__} is not patched")
    base.headloss.restore(base)
    return model


def loss_function(objective: hl.Objective | None = None) -> LogitsLoss:
    """An objective for those who keep the logits: `model.loss_function = loss_function(objective)`."""
    return LogitsLoss(_check_objective(objective))


class LogitsLoss:
    """Takes the place of Transformers' causal loss; `last` is the record of the last call."""

    def __init__(self, objective: hl.Objective) -> None:
        self.objective, self.log = objective, Log()

    @property
    def last(self) -> hl.Output | None:
        return self.log.last

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: int | Tensor | None = None,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        targets = _targets(labels, shift_labels)
        return self.log.run(self.objective, logits, targets, {"num_items": _count(num_items_in_batch)})


class HeadlossCallback(TrainerCallback):
    """Logs the objective's metrics beside the Trainer's own, over all micro-batches and ranks since the last time.

    `callbacks=[HeadlossCallback()]` writes to the log history and to what is printed;
    `HeadlossCallback().add_to(trainer)` stands before the reporters, so that they see the metrics too.  A name that
    is taken becomes "headloss/name".
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    def add_to(self, trainer: Any) -> HeadlossCallback:
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        log = log_of(kwargs.get("model"))
        loss = next((key for key in logs or {} if key == "loss" or key.endswith("_loss")), None)
        if log is None or loss is None or logs is None or not (loss == "loss" or loss.startswith("eval_")):
            return
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        group = torch.distributed.group.WORLD if several and torch.distributed.get_world_size() > 1 else None
        kind = loss.removesuffix("loss")
        found = log.meters[loss == "loss"].compute(group) if log.counted[loss == "loss"] else {}
        log.counted[loss == "loss"] = False
        new: dict[str, float] = {}
        for name, value in found.items():
            key = f"{kind}{self.prefix}{name}"
            new[f"{kind}headloss/{name}" if key in logs else key] = value
        logs.update(new)
        if state.log_history:
            state.log_history[-1].update(new)


class Log:
    """The record of the last call, detached, and the metrics of all calls since they were last asked for."""

    def __init__(self) -> None:
        self.last: hl.Output | None = None
        self.meters = {True: hl.Meter(), False: hl.Meter()}  # in training, in evaluation
        self.counted = {True: False, False: False}

    def run(self, objective: hl.Objective, logits: Tensor, targets: Tensor, call: Mapping[str, Any]) -> Tensor:
        """The objective on logits that exist."""
        _check_shape(targets, logits)
        out = objective(hl.Logits(logits), targets.to(logits.device), **call)
        self.add(out, torch.is_grad_enabled())
        return out.loss

    def add(self, out: hl.Output, training: bool) -> None:
        facts = torch.utils._pytree.tree_map(torch.Tensor.detach, out.facts)
        self.last = out._replace(loss=out.loss.detach(), facts=facts)
        self.meter(out.metrics, training)

    def meter(self, metrics: Mapping[str, hl.Metric], training: bool) -> None:
        if training and not torch.is_grad_enabled():
            return  # scoring: neither a step nor an evaluation
        self.meters[training].add(metrics)
        self.counted[training] = self.counted[training] or bool(metrics)


class Expected(NamedTuple):
    """What the head does with the hidden states when they come: `evaluate(head, hidden, targets)`."""

    targets: Tensor
    evaluate: Callable[
        [Head, Tensor, Tensor], tuple[Any, list[Tensor]]
    ]  # a result, and the tensors that carry gradients


class Head(hl.FusedLMHead):
    """The output embedding of a patched model; a linear layer unless its model expects a loss."""

    adapter: Adapter

    def forward(self, hidden: Tensor, **call: Any) -> Any:  # type: ignore[override]
        expected = self.adapter.expected
        return super().forward(hidden, **call) if expected is None or call else self.adapter.visit(hidden, expected)


class Adapter:
    """Between a model and its head: what is expected of the head, what it found, and how to undo it all."""

    objective: hl.Objective
    eval_logits = False

    def __init__(self, model: nn.Module, head: nn.Linear, options: Mapping[str, Any]) -> None:
        self.head, self.head_class = head, type(head)
        self.before: dict[str, Any] = {k: x for k, x in vars(model).items() if k in ("forward", "_loss_function")}
        self.head_options = vars(head).get("source_options")
        self.options = hl.FusedLMHead.from_linear(head, **{**(self.head_options or {}), **options}).source_options
        self.log = Log()
        self.expected: Expected | None = None
        self.found: tuple[Any, list[Tensor]] | None = None
        self.call: dict[str, Any] = {}
        self.probed = False
        head.__class__ = Head
        head.source_options, head.adapter = self.options, self  # type: ignore[assignment]
        model.headloss = self  # type: ignore[assignment]

    @property
    def last(self) -> hl.Output | None:
        """The record of the last call that had labels, detached."""
        return self.log.last

    def restore(self, model: nn.Module) -> None:
        for name in ("forward", "_loss_function", "headloss"):
            vars(model).pop(name, None)
        vars(model).update(self.before)
        self.head.__class__ = self.head_class
        for name in ("source_options", "adapter"):
            vars(self.head).pop(name, None)
        if self.head_options is not None:
            self.head.source_options = self.head_options

    def inner(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The forward that was there before."""
        before = self.before.get("forward")
        return type(model).forward(model, *args, **kwargs) if before is None else before(*args, **kwargs)

    @contextmanager
    def expecting(self, expected: Expected | None, **call: Any) -> Iterator[None]:
        self.expected, self.found, self.call = expected, None, call
        try:
            yield
        finally:
            self.expected, self.found, self.call = None, None, {}

    def visit(self, hidden: Tensor, expected: Expected) -> Tensor:
        """Inside the head's forward: evaluate, and return a placeholder for gradients to pass on their way back."""
        targets = expected.targets.to(hidden.device)
        _check_shape(targets, hidden)
        result, live = expected.evaluate(self.head, hidden, targets)  # type: ignore[arg-type]
        placeholder, *tied = _Tie.apply(hidden.detach(), int(not self.probed), *live)
        self.found = result, tied
        return placeholder

    def collect(self, logits: Tensor) -> tuple[Any, list[Tensor]]:
        """What the head found, in exchange for the placeholder as it left the model."""
        if self.found is None:
            raise RuntimeError("headloss: the model made its loss without calling its head; unpatch(model)")
        if logits.shape[-1]:
            self._check_probe(logits.detach())
        result, tied = self.found
        anchor = (logits * 0).sum()  # what pulls on the loss pulls on the head's output: FSDP waits for that
        return result, [x + anchor.to(x.dtype) for x in tied]

    def loss_function(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.expected is None:  # the logits were kept
            names = ("labels", "vocab_size", "num_items_in_batch", "shift_labels")
            given = {**dict(zip(names, args)), **kwargs}
            targets = _targets(given.get("labels"), given.get("shift_labels"))
            call = self.call or {"num_items": _count(given.get("num_items_in_batch"))}
            return self.log.run(self.objective, logits, targets, call)
        return self.collect(logits)[1][0]

    def evaluate(self, head: Head, hidden: Tensor, targets: Tensor) -> tuple[hl.Output, list[Tensor]]:
        out = hl.FusedLMHead.forward(head, hidden, targets=targets, objective=self.objective, inputs=self.call)
        assert isinstance(out, hl.Output)
        self.log.add(out, head.training)
        return out, [out.loss]

    def _check_probe(self, logits: Tensor) -> None:
        """The model does to its logits what the source does: seen on one number, at the first call."""
        self.probed = True
        scale, cap = self.options.get("scale", 1.0), self.options.get("softcap")
        wanted = scale * PROBE
        wanted = wanted if cap is None else cap * math.tanh(wanted / cap)
        got = float(logits.reshape(-1)[0]) if logits.numel() else wanted
        if abs(got - wanted) > 0.02 * abs(wanted):
            raise ValueError(
                f"model: it turns a logit of {PROBE} into {got:.4g}, but scale={scale} and softcap={cap} give "
                f"{wanted:.4g}; pass patch(model, ..., scale=, softcap=) as the model applies them, or keep the logits "
                f"with model.loss_function = loss_function(objective)"
            )


class _Tie(torch.autograd.Function):
    """tensors -> (placeholder, tensors): their gradients wait for the placeholder's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, width: int, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return (hidden.new_full((*hidden.shape[:-1], width), PROBE), *(x.view_as(x) for x in tensors))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> Any:
        return (None, None, *grads)


def _forward(self: Any, *args: Any, headloss: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """The patched model's forward; see `patch`."""
    adapter: Adapter = self.headloss
    labels = kwargs.get("labels")
    if labels is None:
        if headloss is not None:
            raise ValueError("headloss: inputs of a loss were given without labels")
        return adapter.inner(self, *args, **kwargs)
    check_head(self, adapter)
    call = {"num_items": _count(kwargs.get("num_items_in_batch")), **(headloss or {})}
    expected = Expected(_targets(labels, kwargs.get("shift_labels")), adapter.evaluate)
    keep = adapter.eval_logits and not self.training
    with adapter.expecting(None if keep else expected, **call):
        return adapter.inner(self, *args, **kwargs)


def unwrapped(model: Any) -> Any:
    """The model inside a PEFT wrapper."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"model: wanted a Transformers model, got {type(base).__name__}; patch it before it is wrapped")
    return base


def log_of(model: Any) -> Log | None:
    """The log of a patched model, or of one whose loss function is ours."""
    model = getattr(model, "module", model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = vars(model).get("headloss") or vars(model).get("_loss_function")
    return found.log if isinstance(found, Adapter | LogitsLoss) else None


def check_head(model: Any, adapter: Adapter) -> None:
    if model.get_output_embeddings() is not adapter.head:
        raise ValueError(
            f"model: its head is another than when it was patched ({type(model.get_output_embeddings()).__name__}): "
            f"resized, or wrapped by an adapter such as LoRA, which the loss would leave out; unpatch(model) "
            f"and patch it again, or keep adapters off the head"
        )


def logits_transform(config: Any) -> dict[str, Any]:
    """scale and softcap, as the models of Transformers call them."""
    text = config.get_text_config()
    found: dict[str, Any] = {}
    multipliers = [getattr(text, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    scale = next((x for x in multipliers if x is not None), None)
    divisor = getattr(text, "logits_scaling", None)
    if scale is None and divisor is not None:
        scale = divisor if text.model_type == "hyperclovax" else 1 / divisor
    if scale is not None:
        found["scale"] = float(scale)
    if getattr(text, "final_logit_softcapping", None) is not None:
        found["softcap"] = float(text.final_logit_softcapping)
    return found


def check_model(model: Any, *, takes_loss: bool = True) -> nn.Linear:
    """The head of a causal language model that can be patched, or a sentence."""
    name = type(model).__name__
    if "headloss" in vars(model):
        raise ValueError(f"model: {name} is patched already; unpatch(model) first")
    kind = getattr(model, "loss_type", None)
    causal = LOSS_MAPPING.get(kind) is ForCausalLMLoss or (
        kind is None and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )
    if not causal or getattr(model.config, "is_encoder_decoder", False):
        raise TypeError(f"model: {name} is not a causal language model; headloss shifts labels for those alone")
    head = model.get_output_embeddings()
    if head is None:
        raise TypeError(f"model: {name} has no output embedding (get_output_embeddings() is None)")
    if takes_loss and "loss_function" not in inspect.unwrap(type(model).forward).__code__.co_names:
        raise TypeError(
            f"model: {name}.forward does not go through self.loss_function, so its loss cannot be taken over; "
            f"call hl.Objective on hl.Logits(outputs.logits) instead"
        )
    instead = "keep the logits: model.loss_function = loss_function(objective)"
    if not isinstance(head, nn.Linear):
        one = "several heads" if isinstance(head, nn.ModuleList | list | tuple) else f"a {type(head).__name__}"
        raise TypeError(f"model: the head of {name} is {one}, wanted one nn.Linear without adapters; {instead}")
    if type(head).forward not in (nn.Linear.forward, hl.FusedLMHead.forward) or not head.weight.is_floating_point():
        raise TypeError(
            f"model: the head of {name} is a {type(head).__name__} with {head.weight.dtype} weights (quantised?), "
            f"wanted a plain nn.Linear; leave the head out of quantisation, or {instead}"
        )
    if "forward" in vars(head):
        raise TypeError(
            f"model: something replaced the forward of the head of {name} (a device map?); patch before, or {instead}"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise TypeError(
            f"model: {name} is tensor parallel; its head holds a part of the vocabulary: use hl.HeadParallel"
        )
    return head


def _check_objective(objective: object) -> hl.Objective:
    if objective is None:
        return hl.Objective(ce=hl.losses.cross_entropy)
    if not isinstance(objective, hl.Objective):
        raise TypeError(f"objective: wanted hl.Objective, got {type(objective).__name__}")
    return objective


def _targets(labels: Tensor | None, shift_labels: Tensor | None) -> Tensor:
    if shift_labels is not None:
        return shift_labels
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels: wanted an integer tensor, got {type(labels).__name__}")
    return hl.shift_labels(labels)


def _check_shape(targets: Tensor, rows: Tensor) -> None:
    if tuple(targets.shape) != tuple(rows.shape[:-1]):
        raise ValueError(
            f"labels: wanted shape {tuple(rows.shape[:-1])}, one for each position of the model's output, got "
            f"{tuple(targets.shape)}; with logits_to_keep the labels must be cut too"
        )


def _count(num_items: int | Tensor | None) -> int | Tensor | None:
    if isinstance(num_items, Tensor) and num_items.ndim:
        return num_items.reshape(-1)[0]
    return num_items
