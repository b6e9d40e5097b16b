from headloss.losses._policy import FLOOR, bounded_exp, log_ratio, policy_metrics, sampler_log_ratio
from headloss.losses._ranges import not_negative


def vespo(
    logprob, advantage, segments, old_logprob=None, sampler_logprob=None,
    *, k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0, sampler_high=None, sampler_low=0.0, sampler_mask=False,
):  # fmt: skip
    """-sg(phi) A logprob, phi = exp(lam + k log w - lam w), w = exp(total over the segment of logprob - old): a smooth
    weight on the ratio of whole sequences, 1 at w = 1 (arXiv:2602.10693).  (k, lam) are the `_pos` ones where A >= 0.

    sampler_high   makes the sampler's ratio a part of w: each token's exp(old - sampler_logprob), at most this
    sampler_low    and at least this
    sampler_mask   a token's ratio outside of the two counts as 1e-8, which nearly leaves its sequence out

    In trainers: TRL vespo; vllm_importance_sampling_clip_max, _clip_min and mode "token_mask" are the last three.
    """
    not_negative(k_pos=k_pos, lam_pos=lam_pos, k_neg=k_neg, lam_neg=lam_neg)
    d = log_ratio(logprob, old_logprob).detach().clamp(-20.0, 20.0)
    if sampler_high is not None:
        d = d + sampler_log_ratio(logprob, old_logprob, sampler_logprob, sampler_low, sampler_high, sampler_mask)
    log_w = segments.spread(segments.totals(d).clamp(FLOOR, 20.0))
    w = bounded_exp(log_w)
    rises = (advantage >= 0).to(d.dtype)
    k = k_pos * rises + k_neg * (1 - rises)
    lam = lam_pos * rises + lam_neg * (1 - rises)
    phi = (lam + k * log_w - lam * w).exp()
    return -phi * advantage * logprob, {**policy_metrics(logprob, advantage, old_logprob, w), "phi": phi}
