from headloss.losses._ratio import clip_metrics, clipped, ratio_to


def gspo(logprob, advantage, segments, old_logprob=None, *, low=3e-4, high=4e-4):
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the segment of logprob - old): the ratio of whole
    sequences, length-normalised (Zheng et al. 2025).  Tokens may differ in advantage; the paper's do not.
    """
    old = logprob.detach() if old_logprob is None else old_logprob
    ratio = ratio_to(segments.mean(logprob - old), 0.0)
    return clipped(ratio, advantage, low, high), clip_metrics(ratio, advantage, low, high)
