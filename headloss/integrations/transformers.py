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
import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

import headloss as hl
from headloss.integrations.causal_lm import (
    check_head,
    check_model,
    check_objective,
    check_shape,
    count_of,
    logits_transform,
    prepared,
    targets_of,
    unwrapped,
)

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
    objective = check_objective(objective)
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
    return LogitsLoss(check_objective(objective))


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
        log, logs = log_of(kwargs.get("model")), {} if logs is None else logs
        losses = ["loss"] if "loss" in logs else [k for k in logs if k.startswith("eval_") and k.endswith("_loss")]
        if log is None or not losses:
            return
        new: dict[str, float] = {}
        kind = losses[0].removesuffix("loss")  # "", "eval_", "eval_name_"
        for name, value in log.read(training=not kind).items():
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
        check_shape(targets, logits)
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
        self.counted[training] |= bool(metrics)

    def read(self, training: bool) -> dict[str, float]:
        """Every metric as a number, over all ranks, and start anew."""
        counted, self.counted[training] = self.counted[training], False
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        group = torch.distributed.group.WORLD if several and torch.distributed.get_world_size() > 1 else None
        return self.meters[training].compute(group) if counted else {}


class LogitsLoss(Log):
    """Takes the place of Transformers' causal loss; `last` is the record of the last call."""

    def __init__(self, objective: hl.Objective) -> None:
        super().__init__()
        self.objective = objective

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: int | Tensor | None = None,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        targets = targets_of(labels, shift_labels)
        return self.run(self.objective, logits, targets, {"num_items": count_of(num_items_in_batch)})


class Expected(NamedTuple):
    """What the head does with the hidden states when they come: `evaluate(head, hidden, targets)`.

    It returns a result, and those tensors of it that carry gradients.
    """

    targets: Tensor | hl.Prepared
    evaluate: Callable[[Head, Tensor, Any], tuple[Any, list[Tensor]]]


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
        check_shape(targets.targets if isinstance(targets, hl.Prepared) else targets, hidden)
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
            targets = targets_of(given.get("labels"), given.get("shift_labels"))
            call = self.call or {"num_items": count_of(given.get("num_items_in_batch"))}
            return self.log.run(self.objective, logits, targets, call)
        return self.collect(logits)[1][0]

    def evaluate(self, head: Head, hidden: Tensor, targets: Tensor | hl.Prepared) -> tuple[hl.Output, list[Tensor]]:
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
    check_head(self, adapter.head)
    call = {"num_items": count_of(kwargs.get("num_items_in_batch")), **(headloss or {})}
    expected = None
    if not adapter.eval_logits or self.training:
        targets = targets_of(labels, kwargs.get("shift_labels"))
        alone = "segments" not in call  # which would have to be prepared with them
        expected = Expected(prepared(targets) if alone else targets, adapter.evaluate)
    with adapter.expecting(expected, **call):
        return adapter.inner(self, *args, **kwargs)


def log_of(model: Any) -> Log | None:
    """The log of a patched model, or of one whose loss function is ours."""
    model = getattr(model, "module", model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = vars(model).get("headloss") or vars(model).get("_loss_function")
    found = getattr(found, "log", found)
    return found if isinstance(found, Log) else None
