"""headloss in TRL: its trainers, with their losses, on facts from one sweep of the head.

    from headloss.integrations.trl import SFTTrainer, DPOTrainer, GRPOTrainer, DistillationTrainer    # for trl's

TRL's trainers ask the model for log-probabilities, entropies and the like (`model(..., fused_lm_head=True)`, prepared
by its `add_fused_lm_head`).  Here the head computes them, inside its own forward, where DDP, FSDP2 and ZeRO-3 have its
weight ready.  The trainers' losses and metrics stay TRL's; `metrics=` adds more from the same sweep.  SFT and
distillation evaluate their loss as an objective, which computes its gradients in the same visit: three GEMMs where TRL
needs four.

`swap_kernels()` does the same for every trainer made inside it, including the functions on logits of the experimental
ones.  Both rely on names inside TRL and refuse versions they were not written for.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import headloss as hl
from headloss.integrations.adapter import Adapter, Expected, Head
from headloss.integrations.causal_lm import check_model, objective_or_default, transform_of, unwrapped
from headloss.integrations.early_targets import prepared
from headloss.integrations.reduction_checks import own_means, values_of
from headloss.integrations.transformers import HeadlossCallback
from headloss.integrations.trl_kernels import (
    NATIVE,
    UNSEEN,
    VERSIONS,
    Metrics,
    add_fused_lm_head,
    check_version,
    distillation_trainer,
    dpo_trainer,
    grpo_trainer,
    replaced,
    sft_trainer,
    shown,
    source_of,
    swap_kernels,
)
from headloss.integrations.trl_policy import check_policy, policy_call, policy_objective
from headloss.losses import LOSSES
from headloss.metrics import copied_metrics, read_metrics
from headloss.record import with_fields

__all__ = [
    "VERSIONS",
    "DPOTrainer",
    "DistillationTrainer",
    "GRPOTrainer",
    "SFTTrainer",
    "add_fused_lm_head",
    "policy_objective",
    "swap_kernels",
]


class _OnHeadloss:
    """A TRL trainer whose models get headloss's heads.  `metrics` and `memory` as in `add_fused_lm_head`."""

    def __init__(self, *args: Any, metrics: Metrics = (), memory: str | int = "1GiB", **kwargs: Any) -> None:
        check_version()
        self._headloss: dict[str, Any] = {"metrics": copied_metrics(metrics), "memory": memory}
        with replaced({NATIVE["add_fused_lm_head"]: functools.partial(add_fused_lm_head, **self._headloss)}):
            super().__init__(*args, **kwargs)
        HeadlossCallback().add_to(self)

    @contextmanager
    def _asking(self, model: nn.Module, wanted: tuple[hl.Objective, dict[str, Any], Tensor | None]) -> Iterator[Any]:
        """Let the head compute a loss; what the model returns holds it.  As the outermost wrapper returns it: DDP looks
        there for the parameters that are used."""
        adapter, made = unwrapped(self.model).headloss, list[Any]()  # type: ignore[attr-defined]
        hook = model.register_forward_hook(lambda model, args, outputs: made.append(outputs))
        adapter.wanted = wanted
        try:
            yield made
        finally:
            adapter.wanted = None
            hook.remove()


class SFTTrainer(_OnHeadloss, sft_trainer.SFTTrainer):
    """TRL's SFTTrainer with an objective in place of the loss: by default TRL's own, cross-entropy or DFT.

    >>> SFTTrainer(model=model, args=args, train_dataset=data, objective=hl.Objective(ce=cross_entropy, z=z_loss))
    """

    def __init__(self, *args: Any, objective: hl.Objective | None = None, **kwargs: Any) -> None:
        objective_or_default(objective)
        for name, term in () if objective is None else objective.terms.items():
            if term.needs_segments:
                raise ValueError(
                    f"objective: term {name!r} looks at whole sequences, which SFTTrainer does not tell apart; use "
                    f"patch(model, objective) of headloss.integrations.transformers with its Trainer"
                )
        super().__init__(*args, **kwargs)
        for name, given in (
            ("label_smoothing_factor", self.label_smoother), ("compute_loss_func", self.compute_loss_func)
        ):  # fmt: skip
            if objective is not None and given is not None:
                raise ValueError(
                    f"{name}: makes a loss of its own, so the objective would not be computed; put hl.Term("
                    f"cross_entropy, label_smoothing=...) into the objective instead, or leave one of the two out"
                )
        if objective is not None and self.args.loss_type == "dft":
            raise ValueError(
                "loss_type: 'dft' is TRL's own loss; put it into the objective, or leave one of the two out"
            )
        several = self.args.gradient_accumulation_steps > 1 or self.accelerator.num_processes > 1
        for name, message in own_means(objective).items() if objective is not None and several else ():
            raise ValueError(message.format(name=name, why="and TRL adds up those of a step"))
        if getattr(self.accelerator.parallelism_config, "sp_enabled", False):
            raise ValueError("parallelism_config: the loss of ranks that share sequences is TRL's; use its SFTTrainer")
        if objective is None:
            objective = _loss("dft") if self.args.loss_type == "dft" else _loss("ce", "cross_entropy")
        adapter = unwrapped(self.model).headloss
        self.objective = _extended(objective, self._headloss["metrics"], adapter.want)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: int | Tensor | None = None
    ) -> Any:
        if self.compute_loss_func is not None or self.label_smoother is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with self._asking(model, (self.objective, {"num_items": num_items_in_batch}, None)) as made:
            native = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # for TRL's metrics
        loss = made[0].loss
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        if self.aux_loss_enabled:
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * made[0].aux_loss / steps
        return (loss, native[1]) if return_outputs else loss


class DPOTrainer(_OnHeadloss, dpo_trainer.DPOTrainer):
    """TRL's DPOTrainer, with any of its losses, on log-probabilities from headloss."""


class GRPOTrainer(_OnHeadloss, grpo_trainer.GRPOTrainer):
    """TRL's GRPOTrainer: its losses and metrics on log-probabilities and entropies from headloss.

    With an `objective` (`policy_objective(args)` is TRL's loss as one) the head computes the loss in its visit; TRL's
    metrics stay.  Its terms may ask for advantage, old_logprob, ref_logprob, sampler_logprob, and for the row weight
    importance_sampling_ratio, TRL's correction for vLLM.  Arguments of TRL's own loss that no term follows are refused.
    If a batch has `support_ids`, (B, C, K) columns that each token of a completion was sampled from, -1 for none, the
    softmax is over those; TRL's old_logprob is over everything, so let terms take sampler_logprob in its place.

    `token_mean` divides by the tokens and `seq_mean_...` by the sequences of the whole accumulated batch,
    `weighted_mean` by the tokens of each micro-batch, whose means are then averaged: TRL's bnpo, and its entropy bonus.
    """

    def __init__(self, *args: Any, objective: hl.Objective | None = None, **kwargs: Any) -> None:
        objective_or_default(objective)
        super().__init__(*args, **kwargs)
        self.objective: hl.Objective | None = None
        if objective is not None:
            self.set_objective(objective)

    def set_objective(self, objective: hl.Objective) -> None:
        """Use another objective from now on."""
        check_policy(self.args, objective_or_default(objective), self.model)
        want = unwrapped(self.model).headloss.want
        self.objective = _extended(objective, self._headloss["metrics"], want)

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        if self.objective is None:
            if inputs.get("support_ids") is not None:
                raise ValueError("support_ids: TRL's own loss is over the whole vocabulary; pass objective=")
            return super()._compute_loss(model, inputs)
        training = self.model.training
        steps = self.current_gradient_accumulation_steps if training else 1
        call, keep = policy_call(self.objective, inputs)
        share = self.accelerator.num_processes * (self.args.steps_per_generation / steps if training else 1)
        call["num_items"] = inputs["num_items_in_batch"]  # counts all ranks and a whole generation; ours is one share
        alone, weights = own_means(self.objective), {}
        for name, term in self.objective.terms.items():
            if name in alone:  # a mean over each micro-batch
                weights[name] = term.weight / steps
            elif term.reduction == "token_mean" and values_of(term) == "row":  # over a whole step
                weights[name] = term.weight * share
        call |= {"weights": weights, "num_segments": len(keep) * steps}
        with self._asking(model, (self.objective, call, keep)) as made:
            super()._compute_loss(model, inputs)  # for TRL's metrics; its loss carries no gradient of the head
        loss = made[0].loss
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * made[0].aux_loss / steps
        return loss


class DistillationTrainer(_OnHeadloss, distillation_trainer.DistillationTrainer):
    """TRL's DistillationTrainer: the divergence as an objective on the student's and the teacher's hidden states."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        beta = float(self.beta)
        ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
        term = hl.Term(LOSSES[ends[beta]]) if beta in ends else hl.Term(LOSSES["jsd"], beta=beta)
        self.objective = _extended(hl.Objective(kd=term), self._headloss["metrics"], ["entropy"])
        student = unwrapped(self.model)
        options = {
            **transform_of(student, True, INSTEAD),
            "temperature": self.temperature,
            "memory": self._headloss["memory"],
        }
        Adapter(student, check_model(student, takes_loss=False, instead=INSTEAD), options).probed = True
        teacher_model = None if self.teacher_model is None else unwrapped(self.teacher_model)
        if teacher_model is not None and "headloss" not in vars(teacher_model):  # a student may teach itself
            try:
                check_model(teacher_model, takes_loss=False, instead=INSTEAD)
                transform_of(teacher_model, True, INSTEAD)
            except TypeError as error:
                raise TypeError(f"teacher_{error}") from None

    def _compute_loss(
        self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        counts = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        more = {key: inputs[key] for key in _MULTIMODAL if key in inputs}
        arguments = (ids, mask, counts.shape[1])
        targets = inputs["completion_ids"].masked_fill(counts == 0, -100)  # no divergence reads them, but metrics may
        ready = prepared(targets)
        hidden = self._get_last_hidden_state(unwrapped_student, *arguments, **more)
        self.teacher_model.eval()
        teacher_model = self.accelerator.unwrap_model(self.teacher_model)
        with torch.no_grad():
            seen = self._forward_redirection(
                self.teacher_model, teacher_model, self._get_last_hidden_state, teacher_model, *arguments, **more
            )
        adapter: Adapter = unwrapped(unwrapped_student).headloss
        call: dict[str, Any] = {}
        if num_items_in_batch is not None:  # TRL has divided the count by the ranks, and that need not be whole
            count = inputs.get("num_items_in_batch", num_items_in_batch)
            call = {"num_items": count, "weights": {"kd": count / num_items_in_batch}}

        def evaluate(
            head: Head, hidden: Tensor, targets: Tensor | hl.Prepared, inputs: Any
        ) -> tuple[Any, list[Tensor]]:
            other = teacher_model.get_output_embeddings()
            whole = types.SimpleNamespace(weight=_whole(other.weight), bias=_whole(other.bias))
            transform = {**transform_of(teacher_model, True, INSTEAD), "temperature": self.temperature}
            teacher = source_of(whole, seen.to(hidden.device), {**transform, "memory": self._headloss["memory"]})  # type: ignore[arg-type]
            out = self.objective(source_of(head, hidden, adapter.options), targets, teacher=teacher, **call)
            adapter.log.add(with_fields(out, metrics=shown(out.metrics)), self.model.training)
            return out, [out.loss]

        with adapter.expecting(Expected(ready, evaluate)) as made:
            placeholder = adapter.head(hidden.to(adapter.head.weight.device))
            out, (loss,) = adapter.collect(made, placeholder)
        return loss, out.facts.entropy.detach().sum(), (targets != -100).sum()


INSTEAD = "use TRL's own trainer"
_MULTIMODAL = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def _whole(x: Tensor | None) -> Tensor | None:
    """A teacher's parameter, gathered if FSDP has sharded it; it needs no gradient."""
    if x is None:
        return None
    gather = getattr(x.detach(), "full_tensor", x.detach)
    return gather()


def _loss(name: str, loss: str | None = None) -> hl.Objective:
    return hl.Objective(**{name: LOSSES[loss or name]})  # type: ignore[arg-type]


def _extended(objective: hl.Objective, metrics: Metrics, facts: Sequence[str]) -> hl.Objective:
    """The objective with more metrics, and with facts that someone else will read."""
    named = {name: call.fn for name, call in (*objective.metrics, *read_metrics(metrics))}
    named |= {f"{UNSEEN}{name}": next(read_metrics([name]))[1].fn for name in facts}
    return hl.Objective(metrics=named, backend=objective.backend, **objective.terms)
