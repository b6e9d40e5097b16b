"""Pieces that the policy losses share."""

import torch


def ratio_to(logprob, old_logprob=None):
    """exp(logprob - old), with the difference held within +-20 so that it cannot overflow.

    Without `old_logprob` the policy is its own old one: the ratio is 1, its gradient is that of logprob.
    """
    old = logprob.detach() if old_logprob is None else old_logprob
    return (logprob - old).clamp(-20.0, 20.0).exp()


def clipped(ratio, advantage, low, high):
    """-min(r A, clip(r, 1 - low, 1 + high) A), the pessimistic of the two."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def clip_metrics(ratio, advantage, low, high):
    """What trainers log about the ratio and its clipping; a clip counts where it stops the gradient."""
    under = (ratio < 1 - low) & (advantage < 0)
    over = (ratio > 1 + high) & (advantage > 0)
    return {
        "ratio_mean": ratio,
        "ratio_min": ratio,
        "ratio_max": ratio,
        "clip_fraction": under | over,
        "clip_fraction_low": under,
        "clip_fraction_high": over,
    }
