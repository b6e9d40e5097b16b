import torch


def jsd(logp, logq, *, beta=0.5):
    """beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p, for 0 < beta < 1: generalised Jensen-Shannon
    (Agarwal et al. 2024).  At beta = 0 and 1 this is 0, neither of the two KLs, so both raise ValueError."""
    if not 0 < beta < 1:
        raise ValueError(f"beta: wanted 0 < beta < 1, got {beta}; use forward_kl or reverse_kl for the ends")
    p, beta_q = logp.exp(), beta * logq.exp()
    logm = (beta_q + (1 - beta) * p).clamp(min=torch.finfo(p.dtype).tiny).log()
    # the slopes of the logarithms add 0 to the gradient in all: d(m log m) = (1 + log m) dm
    return (logq - logm).detach() * beta_q + (1 - beta) * (logp - logm).detach() * p
