from headloss.losses._policy import bounded_exp, clipped, log_ratio, outside, policy_metrics


def gspo_token(logprob, advantage, segments, old_logprob=None, *, low=3e-4, high=4e-4):
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(logprob - sg(logprob) + sg(segment mean of logprob - old)): the
    value of gspo where tokens share A, while each token's advantage moves that token alone (Zheng et al. 2025, eq. 14).
    """
    whole = bounded_exp(segments.mean(log_ratio(logprob, old_logprob))).detach()
    ratio = whole * log_ratio(logprob).exp()
    under, over = outside(ratio, advantage, 1 - low, 1 + high)
    loss = clipped(ratio, advantage, low, high)
    return loss, policy_metrics(logprob, advantage, old_logprob, ratio, under, over)
