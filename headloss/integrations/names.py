"""Maps from the names of metrics to what other trainers call them.

Each goes from the name after the term, "clip_fraction" in "rl/clip_fraction", to the trainer's; a metric that a map
leaves out keeps its name.  The numbers stay headloss's: means over tokens, where some trainers average sequence-level
losses over sequences.

    log(rename(meter.compute(), TRL))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

TRL: Mapping[str, str] = {
    "clip_fraction": "clip_ratio/region_mean",
    "clip_fraction_low": "clip_ratio/low_mean",
    "clip_fraction_high": "clip_ratio/high_mean",
    "phi": "vespo/phi_seq_mean",
    "reference_kl": "kl",
    "gap_mean": "sampling/sampling_logp_difference/mean",
    "gap_max": "sampling/sampling_logp_difference/max",
    "weight_min": "sampling/importance_sampling_ratio/min",
    "weight_mean": "sampling/importance_sampling_ratio/mean",
    "weight_max": "sampling/importance_sampling_ratio/max",
    "entropy": "entropy",
    "accuracy": "mean_token_accuracy",
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "reward_accuracy": "rewards/accuracies",
    "logprob_chosen": "logps/chosen",
    "logprob_rejected": "logps/rejected",
}

VERL: Mapping[str, str] = {
    "clip_fraction": "actor/pg_clipfrac",
    "dual_clip_fraction": "actor/pg_clipfrac_lower",
    "kl_k1": "actor/ppo_kl",  # verl logs k1, the mean of old - new
    "reference_kl": "actor/kl_loss",
    "sampler_ratio_mean": "rollout_corr/rollout_is_mean",  # before they are cut
    "sampler_ratio_min": "rollout_corr/rollout_is_min",
    "sampler_ratio_max": "rollout_corr/rollout_is_max",
    "k1": "rollout_corr/kl",
    "k3": "rollout_corr/k3_kl",
    "chi2": "rollout_corr/chi2_token",
    "entropy": "actor/entropy",
    "advantage_mean": "critic/advantages/mean",
    "advantage_min": "critic/advantages/min",
    "advantage_max": "critic/advantages/max",
}

TORCHTITAN: Mapping[str, str] = {
    "ratio_mean": "loss/ratio_mean",
    "clip_fraction": "loss/ratio_clipped_frac",
    "entropy": "trainer/entropy/mean",
}


NEMO_RL: Mapping[str, str] = {
    "ratio_mean": "train/probs_ratio",
    "ratio_min": "train/probs_ratio_min",
    "ratio_max": "train/probs_ratio_max",
    "reference_kl": "train/kl_penalty",
    "gap_factor": "train/token_mult_prob_error",
    "k3": "train/gen_kl_error",  # with reference_policy_kl_type "k3", as is policy_kl_error
    "k3_reverse": "train/policy_kl_error",
    "js": "train/js_divergence_error",
    "weight_mean": "train/sampling_importance_ratio",  # after they are cut
    "cut_fraction": "train/is_oob_ratio",
}

SLIME: Mapping[str, str] = {
    "clip_fraction": "train/pg_clipfrac",
    "kl_k1": "train/ppo_kl",
    "reference_kl": "train/kl_loss",
    "entropy": "train/entropy_loss",
    "ratio_mean": "train/ois",
    "sampler_ratio_mean": "train/tis",  # before they are cut
    "off_by": "train/tis_abs",
    "cut_fraction": "train/tis_clipfrac",
    "gap_mean": "train/train_rollout_logprob_abs_diff",
}

OPENRLHF: Mapping[str, str] = {
    "clip_fraction": "train/ppo_clip_ratio",
    "kl_k1": "train/ppo_kl",
    "reference_kl": "train/kl",
    "entropy": "train/entropy_loss",
    "k1": "train/vllm_kl",
}

AREAL: Mapping[str, str] = {
    "ratio_mean": "ppo_actor/update/importance_weight/avg",
    "ratio_min": "ppo_actor/update/importance_weight/min",
    "ratio_max": "ppo_actor/update/importance_weight/max",
    "clip_fraction": "ppo_actor/update/clip_ratio/avg",
    "dual_clip_fraction": "ppo_actor/update/dual_clip_ratio/avg",
    "entropy": "ppo_actor/update/entropy/avg",
    "logprob": "ppo_actor/update/new_logp/avg",
    "weight_mean": "ppo_actor/update/behave_imp_weight/avg",  # action="clamp"; with "mask" AReaL leaves masked ones out
    "weight_min": "ppo_actor/update/behave_imp_weight/min",
    "weight_max": "ppo_actor/update/behave_imp_weight/max",
    "drift": "ppo_actor/update/behave_approx_kl/avg",
    "cut_fraction": "ppo_actor/update/rs_filtered_fraction",
}

PRIME_RL: Mapping[str, str] = {  # its inference_logprobs are `old_logprob`
    "kl": "mismatch_kl/all/mean",
    "clip_fraction": "is_masked/mean",
    "clip_fraction_low": "is_masked_low/mean",
    "clip_fraction_high": "is_masked_high/mean",
    "entropy": "entropy/all/mean",
}


def rename(metrics: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """The metrics under a trainer's names; if two would get the same name, the second keeps its own.

    >>> rename({"rl/clip_fraction": 0.25, "rl/ratio_std": 0.1}, TRL)
    {'clip_ratio/region_mean': 0.25, 'rl/ratio_std': 0.1}
    """
    renamed: dict[str, T] = {}
    for name, value in metrics.items():
        new = names.get(name.rpartition("/")[2], name)
        renamed[name if new in renamed else new] = value
    return renamed
