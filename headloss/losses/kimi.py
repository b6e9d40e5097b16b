from headloss.losses._policy import bounded_exp, log_ratio, policy_metrics
from headloss.losses._ranges import not_negative


def kimi(logprob, advantage, old_logprob=None, *, beta=0.1):
    """-A logprob + beta / 2 d^2, d = logprob - old: a squared step in place of a clip (Kimi k1.5, 2025; DRO, Richemond
    et al. 2024), token by token.
    """
    not_negative(beta=beta)
    d = log_ratio(logprob, old_logprob)  # not bounded: the square is what brings a token back
    loss = -advantage * logprob + beta / 2 * d * d
    return loss, policy_metrics(logprob, advantage, old_logprob, bounded_exp(d))
