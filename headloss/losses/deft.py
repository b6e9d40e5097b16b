def deft(logprob, sum_p2, *, alpha=None):
    """(1 - p[y]^a) / a, a = sg(sum_j p_j^2): like -log p[y] where the model is unsure, like 1 - p[y] where it is sure
    (Wang et al. 2026).

    alpha   a fixed a, 0 < alpha <= 1; near 0 it is cross-entropy, 1 is 1 - p[y]
    """
    if alpha is None:
        a = sum_p2.detach()
    elif 0 < alpha <= 1:
        a = alpha
    else:
        raise ValueError(f"alpha: wanted 0 < alpha <= 1, or None for the sum of p^2, got {alpha}")
    return -(a * logprob).expm1() / a, {"concentration": sum_p2}
