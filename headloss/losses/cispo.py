from headloss.losses._policy import bounded_exp, log_ratio, outside, policy_metrics
from headloss.losses._ranges import bounds, positive


def cispo(logprob, advantage, old_logprob=None, *, low=0.0, high=5.0):
    """-sg(clip(r, low, high)) A logprob, r = exp(logprob - old): the weight is clipped, no token loses its gradient
    (MiniMax-M1, 2025; high = 5 as in Khatri et al. 2025).  Here `low` and `high` bound r itself, not r - 1.

    In trainers: TRL cispo; verl cispo, slime cispo and NeMo-RL use_cispo, whose bounds are 1 - low and 1 + high.
    """
    ratio = bounded_exp(log_ratio(logprob, old_logprob)).detach()
    return _weighted(ratio, logprob, advantage, old_logprob, low, high)


def cispo_sequence(logprob, advantage, segments, old_logprob=None, *, low=0.0, high=5.0):
    """-sg(clip(s, low, high)) A logprob, s = exp(mean over the segment of logprob - old): cispo with the ratio of the
    whole sequence.

    In trainers: TRL cispo with importance_sampling_level="sequence".
    """
    ratio = bounded_exp(segments.mean(log_ratio(logprob, old_logprob))).detach()
    return _weighted(ratio, logprob, advantage, old_logprob, low, high)


def _weighted(ratio, logprob, advantage, old_logprob, low, high):
    bounds(low=low, high=high)
    positive(high=high)
    under, over = outside(ratio, advantage, low, high)
    loss = -ratio.clamp(low, high) * advantage * logprob
    return loss, policy_metrics(logprob, advantage, old_logprob, ratio, under, over)
