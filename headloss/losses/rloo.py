import torch

from headloss.losses._policy import bounded_exp, clipped, log_ratio, outside


def rloo(logprob, advantage, segments, old_logprob=None, *, low=0.2, high=0.2):
    """-min(w A, clip(w, 1 - low, 1 + high) A) per segment, w = exp(total over the segment of logprob - old), A = mean
    over the segment of the advantage: whole sequences as one action, not length-normalised (Ahmadian et al. 2024).
    The leave-one-out baseline is in the advantage: reward - mean reward of the others that answer the same prompt.

    In trainers: TRL RLOOTrainer.  With one step per batch its gradient is that of reinforce summed over the sequence.
    """
    ratio = bounded_exp(segments.totals(log_ratio(logprob, old_logprob)))
    advantage = segments.means(torch.zeros_like(logprob) + advantage.detach())
    under, over = outside(ratio, advantage, 1 - low, 1 + high)
    metrics = {"clip_fraction": under | over, "clip_fraction_low": under, "clip_fraction_high": over}
    metrics |= {f"ratio_{what}": ratio for what in ("mean", "min", "max")}
    return clipped(ratio, advantage, low, high), metrics


rloo.returns = "segment"
