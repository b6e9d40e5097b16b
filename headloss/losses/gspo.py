import torch

from headloss.losses._policy import bounded_exp, clipped, log_ratio, outside, policy_metrics


def gspo(logprob, advantage, segments, old_logprob=None, *, low=3e-4, high=4e-4):
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the segment of logprob - old), A = mean over the
    segment of the advantage: ratio and advantage of whole sequences, length-normalised (Zheng et al. 2025).  A is a
    constant.  Where tokens of a segment have advantages of their own, gspo_token is the loss.

    GSPO reduces by seq_mean_token_mean; LUSPO (arXiv:2602.05261) is seq_mean_token_sum.
    """
    ratio = bounded_exp(segments.mean(log_ratio(logprob, old_logprob)))
    advantage = segments.mean(torch.zeros_like(logprob) + advantage.detach())  # it may be one number for all rows
    under, over = outside(ratio, advantage, 1 - low, 1 + high)
    loss = clipped(ratio, advantage, low, high)
    return loss, policy_metrics(logprob, advantage, old_logprob, ratio, under, over)
