import torch

from headloss.losses._policy import bounded_exp, clipped, covariance, first, log_ratio, outside, policy_metrics
from headloss.losses._ranges import bounds


def clip_cov(logprob, advantage, draw, old_logprob=None, *, low=0.2, high=0.2, fraction=2e-4, least=1.0, most=5.0):
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - old), but 0 for a few tokens drawn from those with
    least < c < most, c = (A - mean A) (logprob - mean logprob): those that most lower the entropy (Cui et al. 2025).

    draw       one random number per row, torch.rand of the targets' shape; of the candidates the smallest are taken
    fraction   of the rows of this call, how many are taken: at least one.  Tokens that the clip stops are no candidates

    In trainers: verl clip_cov, which draws within the loss.
    """
    bounds(least=least, most=most)
    ratio = bounded_exp(log_ratio(logprob, old_logprob))
    loss = clipped(ratio, advantage, low, high)
    under, over = outside(ratio, advantage, 1 - low, 1 + high)
    c = covariance(logprob, advantage)
    candidate = (c > least) & (c < most) & ~(under | over)
    taken = candidate & first(torch.where(candidate, draw, torch.inf), fraction)
    metrics = policy_metrics(logprob, advantage, old_logprob, ratio, under, over)
    return torch.where(taken, 0.0, loss), metrics | {"covariance_fraction": taken}
