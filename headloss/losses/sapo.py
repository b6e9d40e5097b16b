import torch

from headloss.losses._policy import bounded_exp, log_ratio, policy_metrics, shared
from headloss.losses._ranges import positive


def sapo(logprob, advantage, old_logprob=None, *, tau_pos=1.0, tau_neg=1.05):
    """-A sigmoid(tau (r - 1)) 4 / tau, r = exp(logprob - old), tau = tau_pos where A > 0, else tau_neg: a soft gate in
    place of the clip, whose slope at r = 1 is 1 (Gao et al. 2025).

    In trainers: TRL, verl sapo; AReaL use_sapo_loss.
    """
    ratio = bounded_exp(log_ratio(logprob, old_logprob))
    return _gated(ratio, advantage, tau_pos, tau_neg), policy_metrics(logprob, advantage, old_logprob, ratio)


def sapo_sequence(logprob, advantage, segments, old_logprob=None, *, tau_pos=1.0, tau_neg=1.05, own=False):
    """-A sigmoid(tau (s - 1)) 4 / tau, s = exp(mean over the segment of logprob - old), A = mean over the segment of
    the advantage: sapo with the ratio and the advantage of the whole sequence.  With `own`, A is each token's own, as
    TRL has it.

    In trainers: TRL sapo, AReaL use_sapo_loss, with importance_sampling_level="sequence".
    """
    ratio = bounded_exp(segments.mean(log_ratio(logprob, old_logprob)))
    advantage = advantage if own else shared(logprob, advantage, segments)
    return _gated(ratio, advantage, tau_pos, tau_neg), policy_metrics(logprob, advantage, old_logprob, ratio)


def _gated(ratio, advantage, tau_pos, tau_neg):
    positive(tau_pos=tau_pos, tau_neg=tau_neg)
    rises = (advantage > 0).to(ratio.dtype)
    tau = tau_pos * rises + tau_neg * (1 - rises)
    return -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
