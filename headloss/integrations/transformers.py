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
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

import headloss as hl
from headloss.integrations.adapter import HERE, Adapter, Expected, without_logits
from headloss.integrations.causal_lm import (
    bypassed,
    check_head,
    check_kept,
    check_model,
    count_of,
    lines_of,
    objective_or_default,
    targets_of,
    transform_of,
    unwrapped,
)
from headloss.integrations.early_targets import prepared
from headloss.integrations.log import Log
from headloss.integrations.loss_function_check import LossCall
from headloss.integrations.reduction_checks import check_whole, refuse_part
from headloss.module import check_inputs


def patch(
    model: nn.Module,
    objective: hl.Objective | None = None,
    *,
    memory: str | int = "1GiB",
    eval_logits: bool = False,
    **source_options: Any,
) -> nn.Module:
    """Let the model's head compute `objective` (cross-entropy by default) whenever labels are given.

    `memory`, `logits_dtype`, `weight_grad_dtype`, `temperature` are those of `hl.Linear`; `scale`, `softcap` and the
    `vocab` of a padded head come from the config unless given.  A model whose forward does anything else to its logits
    is refused.  With a loss `outputs.logits` is empty and raises when it is used; `eval_logits=True` keeps the logits
    in evaluation mode, for `compute_metrics`.  Inputs of the losses travel as `model(..., headloss=hl.Inputs(...))`, in
    the shape of the shifted labels; losses and reductions over segments take the lines of the batch unless told
    otherwise.  Something that replaces the model's forward or its head afterwards is noticed at the next call.
    Returns the model; `model.headloss` has `.last` and `.objective`.
    """
    base = unwrapped(model)
    objective = objective_or_default(objective)
    head = check_model(base, vocab=source_options.get("vocab"))
    options = {"memory": memory, **transform_of(base), **source_options}
    adapter = Patched(base, head, options, objective, eval_logits)
    base.loss_function = adapter.loss_function
    base.accepts_loss_kwargs = True  # Trainer: give num_items_in_batch, whatever the model itself does with it
    adapter.take_forward(base, _forward)
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """The model as it was before `patch`: the same head, Parameters, forward and loss function."""
    base = unwrapped(model)
    adapter = vars(base).get("headloss")
    if not isinstance(adapter, Adapter):
        raise ValueError(f"model: {type(base).__name__} is not patched")
    adapter.restore(base)
    return model


def loss_function(objective: hl.Objective | None = None) -> LogitsLoss:
    """An objective for those who keep the logits: `model.loss_function = loss_function(objective)`.

    It shifts labels, as that of a causal language model does; `HeadlossCallback` checks that, and that it is called.
    """
    return LogitsLoss(objective_or_default(objective))


class HeadlossCallback(TrainerCallback):
    """Logs the objective's metrics next to the Trainer's own, over all micro-batches and ranks since the last time.

    `callbacks=[HeadlossCallback()]` writes to the log history and to what is printed;
    `HeadlossCallback().add_to(trainer)` runs before the reporters, so that they see the metrics too.  A name that
    is taken becomes "headloss/name".  A step that was made without the objective raises.
    """

    def __init__(self, prefix: str = "") -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix: wanted text to put before each name, got {type(prefix).__name__}")
        self.prefix = prefix
        self.evaluating = False
        self.before: hl.Output | None = None  # the last record when a step began

    def add_to(self, trainer: Any) -> HeadlossCallback:
        trainer.callback_handler.callbacks.insert(0, self)
        count = getattr(trainer, "_get_num_items_in_batch", None)
        if log_of(trainer.model) is not None and count is not None:
            # Patched after it was handed over; a trainer of TRL, whose heads are no `Patched`, counts as TRL does
            trainer.model_accepts_loss_kwargs |= isinstance(_patched(trainer.model), Patched)
            trainer._get_num_items_in_batch = functools.partial(_count, trainer, count)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        log = log_of(kwargs.get("model"))
        if log is not None:
            log.forget(training=True)
        if isinstance(_patched(kwargs.get("model")), LogitsLoss):
            check_kept(_inside(kwargs["model"]))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = _patched(kwargs.get("model"))
        self.before = found.last if isinstance(found, Patched | LogitsLoss) else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found, before, self.before = _patched(kwargs.get("model")), self.before, None
        if isinstance(found, Patched | LogitsLoss) and found.last is before:
            raise RuntimeError(
                "model: a step was made without its objective, by a loss from elsewhere: label_smoothing_factor or "
                "compute_loss_func of Trainer (put hl.Term(cross_entropy, label_smoothing=...) into the objective "
                "instead), Liger's fused_linear_cross_entropy, a trainer of TRL (use headloss.integrations.trl), or a "
                "compute_loss that gives the model no labels"
            )

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        log = log_of(kwargs.get("model"))
        if log is not None and not self.evaluating:  # the first of an evaluation: nobody else's calls are part of it
            log.restart(training=False)
        self.evaluating = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluating = False

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.evaluating = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        log, logs = log_of(kwargs.get("model")), {} if logs is None else logs
        losses = ["loss"] if "loss" in logs else [k for k in logs if k.endswith("_loss") and _is_evaluation(k, logs)]
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


def _is_evaluation(loss: str, logs: Mapping[str, Any]) -> bool:
    """Whether Trainer logs an evaluation, whose name it was told; it ends with how long that took, as training does."""
    name = loss.removesuffix("_loss")
    return name.startswith("eval") or (name != "train" and f"{name}_runtime" in logs)


def _count(trainer: Any, count: Any, batches: Any, device: Any) -> Any:
    """Trainer's count of a step's tokens; and its sequences, which Trainer does not count."""
    items, adapter = count(batches, device), _patched(trainer.model)  # which model_init makes anew
    if items is None or not getattr(adapter, "needs_segments", False):
        return items
    sequences = torch.zeros((), dtype=torch.long, device=device)
    for batch in batches:
        targets = targets_of(batch.get("labels"), batch.get("shift_labels"))
        counted = hl.count(targets, lines_of(targets, batch)).num_segments
        assert counted is not None
        sequences += counted.to(device)
    if trainer.args.average_tokens_across_devices and trainer.args.world_size > 1:
        sequences = trainer.accelerator.gather(sequences).sum()
    adapter.log.step = items, sequences
    return items


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
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        targets, items = targets_of(labels, shift_labels, ignore_index), count_of(num_items_in_batch)
        check_whole(self.objective, targets, items)
        return self.run(self.objective, logits, targets, {"num_items": items}, torch.is_grad_enabled())


class Patched(Adapter):
    """The adapter of a model whose loss is an objective."""

    def __init__(
        self, model: Any, head: nn.Linear, options: Mapping[str, Any], objective: hl.Objective, eval_logits: bool
    ) -> None:
        taken = inspect.signature(type(model).forward).parameters
        names, others = list(taken)[1:], any(p.kind is p.VAR_KEYWORD for p in taken.values())
        super().__init__(model, head, options)
        self.objective, self.eval_logits = objective, eval_logits
        self.needs_segments = any(term.needs_segments for term in objective.terms.values())
        self.names, self.labels_at = names, names.index("labels")
        self.takes_count = getattr(model, "accepts_loss_kwargs", others)  # as Trainer asks

    def num_segments(self, targets: Tensor, num_items: Any, lines: bool) -> Any:
        """Of the whole step, where this batch is a part of it; None where it is all of it.  `lines` can be counted."""
        if num_items is None:
            return None
        if lines and self.log.step is not None and self.log.step[0] is num_items:
            return self.log.step[1].to(targets.device)
        refuse_part(
            targets, num_items,
            "num_segments: this batch is a part of a step (num_items_in_batch counts {more} more tokens), and nobody "
            "says how many sequences the step has; HeadlossCallback().add_to(trainer) does, or "
            "model(..., headloss=hl.Inputs(num_segments=...))",
        )  # fmt: skip
        return None


def _check_no_loss(inputs: object, shifted: object, num_items: object) -> None:
    """A call without labels wants no loss, or someone has taken the labels away."""
    if inputs is not None or shifted is not None:
        name = "headloss: inputs of a loss were" if shifted is None else "shift_labels: they were"
        raise ValueError(f"{name} given without labels, and the model makes no loss without them")
    if num_items is not None:
        raise ValueError(
            "labels: missing although num_items_in_batch is given, so the objective would not be computed; Trainer's "
            "label_smoothing_factor and compute_loss_func take the labels away: put hl.Term(cross_entropy, "
            "label_smoothing=...) into the objective instead, or unpatch(model)"
        )


def _forward(self: Any, *args: Any, headloss: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """The patched model's forward; see `patch`."""
    adapter: Patched = self.headloss
    if headloss is not None:
        check_inputs(headloss, "headloss")
    if len(args) > adapter.labels_at:  # labels by position
        args, kwargs = (), {**kwargs, **dict(zip(adapter.names, args))}
    labels, shifted, items = kwargs.get("labels"), kwargs.get("shift_labels"), kwargs.get("num_items_in_batch")
    if not adapter.takes_count:
        kwargs.pop("num_items_in_batch", None)
    if labels is None:
        _check_no_loss(headloss, shifted, items)
        outputs = adapter.inner(self, *args, **kwargs)
        HERE.now.ran = True
        return outputs
    check_head(self, adapter.head)
    if not torch.compiler.is_compiling() and vars(self).get("_loss_function") != adapter.loss_function:
        raise TypeError(
            "model.loss_function: something has set it since patch(model), so the objective would not be computed; "
            "unpatch(model) first, or patch(model) with the objective that you want"
        )
    targets = targets_of(labels, shifted, kwargs.get("ignore_index"))
    call = {"num_items": count_of(items), **(headloss or {})}
    check_whole(adapter.objective, targets, call["num_items"])
    if adapter.needs_segments:
        lines = "segments" not in call
        if lines:
            call["segments"] = lines_of(targets, kwargs)
        if "num_segments" not in call:
            call["num_segments"] = adapter.num_segments(targets, call["num_items"], lines)
    expected = None
    if not adapter.eval_logits or self.training:
        ready = prepared(targets, call.get("segments"))
        if isinstance(ready, hl.Prepared):
            call.pop("segments", None)
        ignored = kwargs.get("ignore_index")
        asked = LossCall(labels, shifted, -100 if ignored is None else ignored, items)
        expected = Expected(ready, adapter.evaluate, asked)
    returns_dict = kwargs.get("return_dict")
    as_tuple = expected is not None and not (self.config.return_dict if returns_dict is None else returns_dict)
    if as_tuple:
        kwargs["return_dict"] = True  # by name: the logits' place in a tuple differs between models
    with adapter.expecting(expected, **call) as made:
        outputs = adapter.inner(self, *args, **kwargs)
    if not made.collected:
        raise bypassed(adapter.before.get("forward", type(self).forward))
    HERE.now.ran = True
    outputs = outputs if expected is None else without_logits(outputs)
    return outputs.to_tuple() if as_tuple else outputs


def _inside(model: Any) -> Any:
    """The model inside wrappers of DDP, torch.compile and PEFT."""
    outer = None
    while model is not outer:
        outer, model = model, getattr(model, "module", getattr(model, "_orig_mod", model))
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model


def _patched(model: Any) -> Any:
    """What a patched model carries, or a loss function of ours."""
    inside = vars(_inside(model)) if model is not None else {}
    return inside.get("headloss") or inside.get("_loss_function")


def log_of(model: Any) -> Log | None:
    """The log of a patched model, or of one whose loss function is ours."""
    found = _patched(model)
    found = getattr(found, "log", found)
    return found if isinstance(found, Log) else None
