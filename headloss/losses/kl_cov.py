import torch

from headloss.losses._policy import bounded_exp, covariance, first, log_ratio, policy_metrics
from headloss.losses._ranges import not_negative


def kl_cov(logprob, advantage, old_logprob=None, *, fraction=2e-4, beta=1.0):
    """-r A, r = exp(logprob - old), plus beta |logprob - old| on the few tokens of the largest
    (A - mean A) (logprob - mean logprob): these lower the entropy most and are held back (Cui et al. 2025).

    fraction   the share of this call's rows that is held back, at least one row

    In trainers: verl kl_cov, whose ppo_kl_coef is `beta`.
    """
    not_negative(beta=beta)
    d = log_ratio(logprob, old_logprob)
    ratio = bounded_exp(d)
    penalised = first(-covariance(logprob, advantage), fraction)
    loss = -ratio * advantage + torch.where(penalised, beta * d.abs(), 0.0)
    return loss, policy_metrics(logprob, advantage, old_logprob, ratio) | {"covariance_fraction": penalised}
