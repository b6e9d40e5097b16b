import torch

from headloss.losses._policy import bounded_exp, log_ratio, policy_metrics


def topr(logprob, advantage, old_logprob=None):
    """-A logprob where A > 0, -sg(min(r, 1)) A logprob elsewhere, r = exp(logprob - old): imitates good
    samples, and leaves bad ones alone once they have become unlikely (Le Roux et al. 2025), token by token.
    """
    ratio = bounded_exp(log_ratio(logprob, old_logprob)).detach()
    taper = torch.where(advantage > 0, torch.ones_like(ratio), ratio.clamp(max=1.0))
    metrics = {
        **policy_metrics(logprob, advantage, old_logprob, ratio),
        "clip_fraction": (advantage <= 0) & (ratio > 1),
    }
    return -taper * advantage * logprob, metrics
