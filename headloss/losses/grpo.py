from headloss.losses._policy import bounded_exp, bounded_loss, log_ratio, outside, policy_metrics


def grpo(logprob, advantage, old_logprob=None, *, low=0.2, high=0.2, dual=None, delta=None):
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - old): clipped policy gradient with group-relative
    advantages (Schulman et al. 2017, Shao et al. 2024).  Without `old_logprob` it is on-policy.

    dual    c > 1: at most -c A where A < 0 (Ye et al. 2020)
    delta   two-sided: r is at most delta > 1 + high (INTELLECT-2, 2025)

    Its relatives are reductions: GRPO seq_mean_token_mean; BNPO token_mean; DAPO token_mean with the global
    `num_items` (Yu et al. 2025); Dr. GRPO seq_mean_token_sum_norm with length = the longest response (Liu et al. 2025).

    In trainers: TRL grpo, bnpo, dapo, dr_grpo; verl vanilla; slime, AReaL, OpenRLHF and NeMo-RL: the PPO loss.
    """
    ratio = bounded_exp(log_ratio(logprob, old_logprob))
    loss, cut = bounded_loss(ratio, advantage, low, high, dual, delta)
    under, over = outside(ratio, advantage, 1 - low, 1 + high)
    return loss, policy_metrics(logprob, advantage, old_logprob, ratio, under, over) | cut
