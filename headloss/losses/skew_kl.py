import torch


def skew_kl(logp, logq, *, alpha=0.1):
    """KL(q || alpha q + (1 - alpha) p), 0 <= alpha < 1: a forward KL that stays finite (Ko et al. 2024)."""
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha: wanted 0 <= alpha < 1, got {alpha}")
    if alpha == 0:
        return logq.exp() * (logq - logp)
    p, q = logp.exp(), logq.exp()
    mixed = (alpha * q + (1 - alpha) * p).clamp(min=torch.finfo(p.dtype).tiny).log()
    return q * (logq - mixed)
