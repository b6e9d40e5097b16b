import torch

from headloss.losses._policy import bounded_exp, log_ratio, policy_metrics


def sapo(logprob, advantage, old_logprob=None, *, tau_pos=1.0, tau_neg=1.05):
    """-A sigmoid(tau (r - 1)) 4 / tau, r = exp(logprob - old), tau = tau_pos where A > 0, else tau_neg: a soft gate in
    place of the clip, whose slope at r = 1 is 1 (Gao et al. 2025).
    """
    ratio = bounded_exp(log_ratio(logprob, old_logprob))
    rises = (advantage > 0).to(ratio.dtype)
    tau = tau_pos * rises + tau_neg * (1 - rises)
    loss = -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return loss, policy_metrics(logprob, advantage, old_logprob, ratio)
