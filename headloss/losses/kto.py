import torch

from headloss.losses._ranges import not_negative, positive


def kto(
    logprob, ref_logprob, segments, desirable, kl=None,
    *, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0, average=False,
):  # fmt: skip
    """One value per segment, with g = total of logprob - ref_logprob: w_d (1 - sigmoid(beta (g - kl))) if the segment
    is `desirable`, else w_u (1 - sigmoid(beta (kl - g))) (Ethayarajh et al. 2024).

    desirable   (S,) flags: no pairs are needed
    kl          a scalar: the batch's estimate of KL(policy || reference), at least 0; 0 if it is not given
    average     g is the mean in place of the total

    In trainers: TRL kto; apo_zero_unpaired is the same without `kl`; axolotl rl: kto.
    """
    positive(beta=beta)
    not_negative(desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    gain = logprob - ref_logprob
    gain = segments.means(gain) if average else segments.totals(gain)
    behind = gain if kl is None else gain - kl
    good = desirable.to(gain.dtype)
    scale = desirable_weight * good + undesirable_weight * (1 - good)
    loss = scale * torch.sigmoid((1 - 2 * good) * beta * behind)
    return loss, {"reward": beta * gain, "reward_accuracy": (2 * good - 1) * behind > 0}


kto.per_segment, kto.returns = ("desirable", "kl"), "segment"
