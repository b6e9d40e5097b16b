import math

import torch


def skew_kl(logp, logq, *, alpha=0.1):
    """KL(q || alpha q + (1 - alpha) p), 0 <= alpha < 1: a forward KL that stays finite (Ko et al. 2024)."""
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha: wanted 0 <= alpha < 1, got {alpha}")
    if alpha == 0:
        return logq.exp() * (logq - logp)
    mixed = torch.logaddexp(logq + math.log(alpha), logp + math.log1p(-alpha))
    return logq.exp() * (logq - mixed)
