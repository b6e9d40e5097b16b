def tvd(logp, logq):
    """sum_j |p_j - q_j| / 2: total variation distance (Wen et al. 2023)."""
    return 0.5 * (logp.exp() - logq.exp()).abs()
