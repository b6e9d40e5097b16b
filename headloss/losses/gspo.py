from headloss.losses._policy import bounded_exp, clipped, log_ratio, outside, policy_metrics


def gspo(logprob, advantage, segments, old_logprob=None, *, low=3e-4, high=4e-4):
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the segment of logprob - old): the ratio of whole
    sequences, length-normalised (Zheng et al. 2025).  The paper's tokens share A; where they differ each token has its
    own clip and all of them pull on s.

    GSPO reduces by seq_mean_token_mean; LUSPO (arXiv:2602.05261) is seq_mean_token_sum.
    """
    ratio = bounded_exp(segments.mean(log_ratio(logprob, old_logprob)))
    under, over = outside(ratio, advantage, 1 - low, 1 + high)
    loss = clipped(ratio, advantage, low, high)
    return loss, policy_metrics(logprob, advantage, old_logprob, ratio, under, over)
