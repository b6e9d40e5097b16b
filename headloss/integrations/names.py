"""What other trainers call the metrics.  Each map goes from the name after the term, "clip_fraction" in
"rl/clip_fraction", to the trainer's; what a map leaves out keeps its name.  The numbers stay headloss's: means over
tokens, where some trainers average sequence-level losses over sequences.

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


def rename(metrics: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """The metrics under a trainer's names; where two would get the same one, the second keeps its own.

    >>> rename({"rl/clip_fraction": 0.25, "rl/ratio_std": 0.1}, TRL)
    {'clip_ratio/region_mean': 0.25, 'rl/ratio_std': 0.1}
    """
    renamed: dict[str, T] = {}
    for name, value in metrics.items():
        new = names.get(name.rpartition("/")[2], name)
        renamed[name if new in renamed else new] = value
    return renamed
