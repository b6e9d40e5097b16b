import torch

from headloss.losses._policy import bounded_exp, log_ratio, outside, policy_metrics
from headloss.losses._ranges import not_negative


def gmpo(logprob, advantage, segments, old_logprob=None, *, low=0.4, high=0.4, signed=False):
    """-A exp(mean over the segment of c), c = sgn(A) min(sgn(A) d, sgn(A) clip(d, -low, high)), d = logprob - old: the
    geometric mean of individually clipped token ratios (Zhao et al. 2025).  In the paper, tokens share A.

    signed   clip as the authors do, sgn(A) clip(sgn(A) d, -low, high): where A < 0, d is bounded by -high; by default
             it is bounded by -low there, as in verl

    Both take the mean over sequences: reduce by seq_mean_token_mean.
    """
    not_negative(low=low, high=high)
    d = log_ratio(logprob, old_logprob)
    sign = advantage.sign()
    floor, ceiling = -(high if signed else low), high
    clipped_d = sign * torch.minimum(sign * d, sign * d.clamp(floor, ceiling))
    ratio = bounded_exp(segments.mean(clipped_d))
    under, over = outside(d, advantage, floor, ceiling)
    return -advantage * ratio, policy_metrics(logprob, advantage, old_logprob, ratio, under, over)
