import torch

from headloss.losses._policy import bounded_exp, clipped, log_ratio, outside, policy_metrics


def grpo(logprob, advantage, old_logprob=None, *, low=0.2, high=0.2, dual=None, delta=None):
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - old): clipped policy gradient with group-relative
    advantages (Schulman et al. 2017, Shao et al. 2024).  Without `old_logprob` it is on-policy.

    dual    c > 1: at most -c A where A < 0 (Ye et al. 2020)
    delta   two-sided: r is at most delta > 1 + high (INTELLECT-2, 2025)

    Its relatives are reductions: GRPO seq_mean_token_mean; BNPO token_mean; DAPO token_mean with the global
    `num_items` (Yu et al. 2025); Dr. GRPO seq_mean_token_sum_norm with length = the longest response (Liu et al. 2025).
    """
    ratio = bounded_exp(log_ratio(logprob, old_logprob))
    held = ratio if delta is None else ratio.clamp(max=delta)
    loss = clipped(held, advantage, low, high)
    under, over = outside(ratio, advantage, 1 - low, 1 + high)
    metrics = policy_metrics(logprob, advantage, old_logprob, ratio, under, over)
    if dual is not None:
        most = -dual * advantage
        metrics["dual_clip_fraction"] = (loss > most) & (advantage < 0)
        loss = torch.where(advantage < 0, torch.minimum(loss, most), loss)
    return loss, metrics
