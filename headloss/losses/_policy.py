"""Pieces that the policy losses share: the ratio to the old policy, its clipping, and what trainers log.

Symbols:  d = logprob - old_logprob   r = exp(d)   A = advantage   sg = no gradient
"""

import torch


def log_ratio(logprob, old_logprob=None):
    """d.  Without `old_logprob` the policy is its own old one: d is 0, and its gradient is that of logprob."""
    return logprob - (logprob.detach() if old_logprob is None else old_logprob)


def bounded_exp(d):
    """exp(d), with d held within +-20 so that nothing overflows; beyond that there is no gradient."""
    return d.clamp(-20.0, 20.0).exp()


def clipped(ratio, advantage, low, high):
    """-min(r A, clip(r, 1 - low, 1 + high) A), the pessimistic of the two."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def outside(x, advantage, low, high):
    """Where x has left [low, high] on the side that A pushes to: the clip then stops the gradient."""
    return (x < low) & (advantage < 0), (x > high) & (advantage > 0)


def policy_metrics(logprob, advantage, old_logprob, ratio, under=None, over=None):
    """What trainers log.  `ratio` is the loss's own; `under` and `over` mark where clipping stops the gradient.

    kl is the k3 estimate of KL(old || new) from tokens that the old policy drew, kl_k1 the plain one.
    """
    d = log_ratio(logprob, old_logprob).detach().clamp(-20.0, 20.0)
    metrics = {
        "ratio_mean": ratio,
        "ratio_min": ratio,
        "ratio_max": ratio,
        "ratio_std": ratio,
        "effective_sample_size": ratio,
        "kl": d.expm1() - d,
        "kl_k1": -d,
        "advantage_mean": advantage,
        "advantage_min": advantage,
        "advantage_max": advantage,
        "logprob": logprob,
        "old_logprob": logprob if old_logprob is None else old_logprob,
    }
    if under is not None:
        metrics |= {"clip_fraction": under | over, "clip_fraction_low": under, "clip_fraction_high": over}
    return metrics
