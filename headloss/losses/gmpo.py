import torch

from headloss.losses._policy import bounded_exp, log_ratio, outside, policy_metrics


def gmpo(logprob, advantage, segments, old_logprob=None, *, low=0.4, high=0.4):
    """-A exp(mean over the segment of c), c = sgn(A) min(sgn(A) d, sgn(A) clip(d, -low, high)), d = logprob - old: the
    geometric mean of token ratios that were clipped one by one (Zhao et al. 2025).  The paper's tokens share A.
    """
    d = log_ratio(logprob, old_logprob)
    sign = advantage.sign()
    held = sign * torch.minimum(sign * d, sign * d.clamp(-low, high))
    ratio = bounded_exp(segments.mean(held))
    under, over = outside(d, advantage, -low, high)
    return -advantage * ratio, policy_metrics(logprob, advantage, old_logprob, ratio, under, over)
