"""Metrics under the names that seven trainers log: each number is what that trainer's source computes.

Symbols:  n new, o old, s sampler, r reference log-probabilities   A advantages   h entropies, by row
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_policy import Batch
from torch import Tensor

import headloss as hl
from headloss.integrations import names
from headloss.losses import dppo, grpo, kl_to_reference
from headloss.row_weights import truncate

LOW, HIGH, DUAL, CUT, FLOOR = 0.1, 0.15, 1.2, 1.2, 0.8
NEAR = 0.01  # of probabilities
Formula = Callable[[SimpleNamespace], Tensor]


def k3(x: Tensor) -> Tensor:
    return torch.exp(x) - 1 - x


def ratio(x: SimpleNamespace) -> Tensor:
    return torch.exp(x.n - x.o)


def weight(x: SimpleNamespace) -> Tensor:
    return torch.exp(x.o - x.s)


def clip_mask(x: SimpleNamespace) -> Tensor:
    return (-x.A * ratio(x) < -x.A * ratio(x).clamp(1 - LOW, 1 + HIGH)).double()


def dual_mask(x: SimpleNamespace) -> Tensor:
    loss = torch.max(-x.A * ratio(x), -x.A * ratio(x).clamp(1 - LOW, 1 + HIGH))
    return ((loss > -DUAL * x.A) & (x.A < 0)).double()


def cut(x: SimpleNamespace) -> Tensor:
    return (weight(x).clamp(FLOOR, CUT) != weight(x)).double()


def js(x: SimpleNamespace) -> Tensor:
    mixture = torch.log(0.5 * torch.exp(x.o) + 0.5 * torch.exp(x.s))
    return 0.5 * k3(x.o - mixture) + 0.5 * k3(x.s - mixture)


def kept(x: SimpleNamespace) -> Tensor:
    return weight(x).clamp(FLOOR, CUT)


# Numbers of one vector: its mean, or where the name ends so, its smallest or largest.
FORMULAS: dict[str, dict[str, Formula]] = {
    "TRL": {
        "clip_ratio/region_mean": clip_mask,
        "clip_ratio/low_mean": lambda x: ((ratio(x) < 1 - LOW) & (x.A < 0)).double(),
        "clip_ratio/high_mean": lambda x: ((ratio(x) > 1 + HIGH) & (x.A > 0)).double(),
        "kl": lambda x: k3(x.r - x.n),
        "sampling/sampling_logp_difference/mean": lambda x: (x.o - x.s).abs(),
        "sampling/sampling_logp_difference/max": lambda x: (x.o - x.s).abs(),
        "sampling/importance_sampling_ratio/mean": kept,
        "sampling/importance_sampling_ratio/min": kept,
        "sampling/importance_sampling_ratio/max": kept,
        "entropy": lambda x: x.h,
    },
    "VERL": {
        "actor/pg_clipfrac": clip_mask,
        "actor/pg_clipfrac_lower": dual_mask,
        "actor/ppo_kl": lambda x: x.o - x.n,
        "actor/kl_loss": lambda x: k3(x.r - x.n),
        "rollout_corr/rollout_is_mean": weight,
        "rollout_corr/rollout_is_min": weight,
        "rollout_corr/rollout_is_max": weight,
        "rollout_corr/kl": lambda x: x.s - x.o,
        "rollout_corr/k3_kl": lambda x: torch.exp(x.o - x.s) - (x.o - x.s) - 1,
        "rollout_corr/chi2_token": lambda x: weight(x).square() - 1,
        "actor/entropy": lambda x: x.h,
        "critic/advantages/mean": lambda x: x.A,
        "critic/advantages/min": lambda x: x.A,
        "critic/advantages/max": lambda x: x.A,
    },
    "NEMO_RL": {
        "train/probs_ratio": ratio,
        "train/probs_ratio_min": ratio,
        "train/probs_ratio_max": ratio,
        "train/kl_penalty": lambda x: k3(x.r - x.n),
        "train/token_mult_prob_error": lambda x: torch.exp(torch.abs(x.s - x.o)),
        "train/gen_kl_error": lambda x: k3(x.o - x.s),
        "train/policy_kl_error": lambda x: k3(x.s - x.o),
        "train/js_divergence_error": js,
        "train/sampling_importance_ratio": kept,
        "train/is_oob_ratio": cut,
    },
    "SLIME": {
        "train/pg_clipfrac": clip_mask,
        "train/ppo_kl": lambda x: x.o - x.n,
        "train/kl_loss": lambda x: k3(x.r - x.n),
        "train/entropy_loss": lambda x: x.h,
        "train/ois": ratio,
        "train/tis": weight,
        "train/tis_abs": lambda x: (weight(x) - 1).abs(),
        "train/tis_clipfrac": cut,
        "train/train_rollout_logprob_abs_diff": lambda x: (x.o - x.s).abs(),
    },
    "OPENRLHF": {
        "train/ppo_clip_ratio": clip_mask,
        "train/ppo_kl": lambda x: -(x.n - x.o),
        "train/kl": lambda x: k3(x.r - x.n),
        "train/entropy_loss": lambda x: x.h,
        "train/vllm_kl": lambda x: x.s - x.o,
    },
    "AREAL": {
        **{f"ppo_actor/update/importance_weight/{x}": ratio for x in ("avg", "min", "max")},
        "ppo_actor/update/clip_ratio/avg": clip_mask,
        "ppo_actor/update/dual_clip_ratio/avg": dual_mask,
        "ppo_actor/update/entropy/avg": lambda x: x.h,
        "ppo_actor/update/new_logp/avg": lambda x: x.n,
        **{f"ppo_actor/update/behave_imp_weight/{x}": kept for x in ("avg", "min", "max")},
        "ppo_actor/update/behave_approx_kl/avg": lambda x: x.o - x.s,
        "ppo_actor/update/rs_filtered_fraction": cut,
    },
    "PRIME_RL": {
        "mismatch_kl/all/mean": lambda x: ratio(x) - (x.n - x.o) - 1,
        "is_masked/mean": lambda x: torch.where(x.A > 0, far(x) > NEAR, far(x) < -NEAR).double(),
        "is_masked_low/mean": lambda x: ((far(x) < -NEAR) & (x.A < 0)).double(),
        "is_masked_high/mean": lambda x: ((far(x) > NEAR) & (x.A > 0)).double(),
        "entropy/all/mean": lambda x: x.h,
    },
}  # fmt: skip
ELSEWHERE = {"TRL": {"vespo/", "mean_token", "rewards/", "logps/"}}  # of other losses, which other tests look at


def far(x: SimpleNamespace) -> Tensor:
    return torch.exp(x.n) - torch.exp(x.o)


@pytest.mark.parametrize("trainer", FORMULAS)
def test_each_name_has_the_trainers_number(trainer: str) -> None:
    batch, given = Batch(seed=3), {}
    own: dict[str, Any] = {"dual": DUAL, "row_weight": truncate(CUT, FLOOR)}
    policy = hl.Term(grpo, low=LOW, high=HIGH, **own)
    if trainer == "PRIME_RL":
        policy, own = hl.Term(dppo, low=NEAR, high=NEAR), {}
    objective = hl.Objective(rl=policy, kl=hl.Term(kl_to_reference), metrics=["entropy"])
    asked = ["advantage", "old_logprob", "ref_logprob", *(["sampler_logprob"] if own else [])]
    given = {n: batch.inputs[n] for n in asked}
    out = objective(hl.Linear(batch.hidden, batch.weight), batch.targets, **given)
    table: Mapping[str, str] = getattr(names, trainer)
    found = names.rename(hl.Meter().add(out.metrics).compute(), table)
    rows = {n: batch.inputs[f"{n}_logprob"][batch.valid] for n in ("old", "ref", "sampler")}
    logp = (batch.hidden @ batch.weight.T).log_softmax(-1)[batch.valid]
    x = SimpleNamespace(
        n=logp.gather(1, batch.targets[batch.valid][:, None])[:, 0], o=rows["old"], s=rows["sampler"], r=rows["ref"],
        A=batch.inputs["advantage"][batch.valid], h=-(logp.exp() * logp).sum(-1),
    )  # fmt: skip
    for name, formula in FORMULAS[trainer].items():
        vector = formula(x)
        how = {"min": Tensor.min, "max": Tensor.max}.get(name.replace("_", "/").split("/")[-1], Tensor.mean)
        assert found[name] == pytest.approx(float(how(vector)), rel=1e-9), name
        assert float(vector.abs().max()) > 0, f"{name}: the batch shows nothing"
    elsewhere = tuple(ELSEWHERE.get(trainer, ()))
    assert {n for n in table.values() if not (elsewhere and n.startswith(elsewhere))} == set(FORMULAS[trainer])
