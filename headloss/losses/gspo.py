from headloss.losses._policy import bounded_exp, bounded_loss, log_ratio, outside, policy_metrics, shared


def gspo(logprob, advantage, segments, old_logprob=None, *, low=3e-4, high=4e-4, dual=None, delta=None, own=False):
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the segment of logprob - old), A = mean over the
    segment of the advantage: ratio and advantage of whole sequences, length-normalised (Zheng et al. 2025).  A is a
    constant.  Where tokens of a segment have advantages of their own, gspo_token is the paper's loss.

    dual    c > 1: at most -c A where A < 0
    delta   two-sided: s is at most delta > 1 + high
    own     A is each token's own, as TRL and NeMo-RL have it; AReaL takes the mean.  Where tokens share A, all agree

    GSPO reduces by seq_mean_token_mean; LUSPO (arXiv:2602.05261) is seq_mean_token_sum.

    In trainers: TRL, AReaL importance_sampling_level="sequence"; NeMo-RL sequence_level_importance_ratios; verl gspo is
    gspo_token.
    """
    ratio = bounded_exp(segments.mean(log_ratio(logprob, old_logprob)))
    advantage = advantage if own else shared(logprob, advantage, segments)
    under, over = outside(ratio, advantage, 1 - low, 1 + high)
    loss, cut = bounded_loss(ratio, advantage, low, high, dual, delta)
    return loss, policy_metrics(logprob, advantage, old_logprob, ratio, under, over) | cut
