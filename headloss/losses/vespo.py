from headloss.losses._policy import bounded_exp, log_ratio, policy_metrics


def vespo(logprob, advantage, segments, old_logprob=None, *, k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0):
    """-sg(phi) A logprob, phi = exp(lam + k log w - lam w), w = exp(total over the segment of logprob - old): a smooth
    weight on the ratio of whole sequences, 1 at w = 1 (arXiv:2602.10693).  (k, lam) are the `_pos` ones where A >= 0.
    """
    d = log_ratio(logprob, old_logprob).detach().clamp(-20.0, 20.0)
    log_w = segments.spread(segments.totals(d).clamp(-18.420680743952367, 20.0))  # w >= 1e-8
    w = bounded_exp(log_w)
    rises = (advantage >= 0).to(d.dtype)
    k = k_pos * rises + k_neg * (1 - rises)
    lam = lam_pos * rises + lam_neg * (1 - rises)
    phi = (lam + k * log_w - lam * w).exp()
    return -phi * advantage * logprob, {**policy_metrics(logprob, advantage, old_logprob, w), "phi": phi}
