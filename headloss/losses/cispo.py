from headloss.losses._policy import bounded_exp, log_ratio, outside, policy_metrics


def cispo(logprob, advantage, old_logprob=None, *, high=5.0):
    """-sg(min(r, high)) A logprob, r = exp(logprob - old): the weight is clipped, no token loses its gradient
    (MiniMax-M1, 2025; high = 5 as in Khatri et al. 2025).  Here `high` bounds r itself, not r - 1.
    """
    ratio = bounded_exp(log_ratio(logprob, old_logprob)).detach()
    under, over = outside(ratio, advantage, 0.0, high)
    loss = -ratio.clamp(max=high) * advantage * logprob
    return loss, policy_metrics(logprob, advantage, old_logprob, ratio, under, over)
