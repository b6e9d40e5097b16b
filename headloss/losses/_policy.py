"""What the policy losses share: the ratio to the old policy, its clipping, and what trainers log.

Symbols:  d = logprob - old_logprob   r = exp(d)   A = advantage   sg = no gradient
"""

import math

import torch

from headloss.losses._ranges import above, bounds, not_negative, positive, share

FLOOR = math.log(1e-8)  # least log of a ratio, which then counts as 0


def log_ratio(logprob, old_logprob=None):
    """d.  Without `old_logprob` the old policy is this one: d is 0, and its gradient is that of logprob."""
    return logprob - (logprob.detach() if old_logprob is None else old_logprob)


def bounded_exp(d):
    """exp(d), with d clamped to +-20 so that nothing overflows; outside there is no gradient."""
    return d.clamp(-20.0, 20.0).exp()


def sampler_log_ratio(logprob, old_logprob, sampler_logprob, low, high, mask):
    """log exp(old - sampler), clamped to [low, high] or, with `mask`, 1e-8 outside; 0 if the sampler gave no score."""
    if sampler_logprob is None:
        raise ValueError(f"sampler_high: {high} bounds the sampler's ratio; pass sampler_logprob")
    bounds(sampler_low=low, sampler_high=high)
    positive(sampler_high=high)
    old = logprob.detach() if old_logprob is None else old_logprob
    drift = (old - sampler_logprob).nan_to_num(nan=0.0)
    low, high = max(FLOOR, math.log(low) if low > 0 else FLOOR), min(20.0, math.log(high))
    return torch.where((drift < low) | (drift > high), FLOOR, drift) if mask else drift.clamp(low, high)


def clipped(ratio, advantage, low, high):
    """-min(r A, clip(r, 1 - low, 1 + high) A), the pessimistic of the two."""
    not_negative(low=low, high=high)
    plain, capped = ratio * advantage, ratio.detach().clamp(1 - low, 1 + high) * advantage
    return -torch.where(capped < plain, capped, plain)  # torch versions differ in the gradient of a clamp at its bounds


def bounded_loss(ratio, advantage, low, high, dual=None, delta=None):
    """The clipped loss with both further bounds, and what trainers log about them: see `grpo`."""
    above(1, dual=dual, delta=delta)
    loss = clipped(ratio if delta is None else ratio.clamp(max=delta), advantage, low, high)
    if dual is None:
        return loss, {}
    most = -dual * advantage
    cut = (loss > most) & (advantage < 0)
    return torch.where(advantage < 0, torch.minimum(loss, most), loss), {"dual_clip_fraction": cut}


def shared(logprob, advantage, segments):
    """The advantage of a whole segment: the mean over its tokens, a constant."""
    return segments.mean(torch.zeros_like(logprob) + advantage.detach())  # it may be one number for all rows


def covariance(logprob, advantage):
    """(A - mean A) (logprob - mean logprob), each mean over the rows of this call; without a gradient."""
    logprob = logprob.detach()
    return (advantage - advantage.mean()) * (logprob - logprob.mean())


def first(order, fraction):
    """Where `order` is among the smallest: this fraction of the rows, at least one row."""
    share(fraction=fraction)
    count = (fraction * torch.ones_like(order, dtype=torch.float64).sum()).floor().clamp(min=1)
    return order.argsort().argsort() < count


def outside(x, advantage, low, high):
    """Where x has left [low, high] on the side that A pushes to: the clip then stops the gradient."""
    return (x < low) & (advantage < 0), (x > high) & (advantage > 0)


def in_rows(x, logprob):
    """One value per row, from one per row or one for all."""
    return x if x.ndim else x + torch.zeros_like(logprob)


def policy_metrics(logprob, advantage, old_logprob, ratio, under=None, over=None):
    """What trainers log.  `ratio` is that of the loss; `under` and `over` mark where clipping stops the gradient.

    kl is the k3 estimate of KL(old || new) from tokens that the old policy drew, kl_k1 the plain one.
    """
    d = log_ratio(logprob, old_logprob).detach().clamp(-20.0, 20.0)
    advantage = in_rows(advantage, logprob)
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
