from headloss.losses._ratio import clip_metrics, clipped, ratio_to


def grpo(logprob, advantage, old_logprob=None, *, low=0.2, high=0.2):
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - old): clipped policy gradient with group-relative
    advantages (Schulman et al. 2017, Shao et al. 2024).  Without `old_logprob` it is on-policy.
    """
    ratio = ratio_to(logprob, old_logprob)
    return clipped(ratio, advantage, low, high), clip_metrics(ratio, advantage, low, high)
