def focal(logprob, *, gamma=2.0):
    """-(1 - p[y])^gamma log p[y]: easy tokens count less (Lin et al. 2017)."""
    miss = -logprob.expm1()  # 1 - p[y], exact for confident tokens
    return -(miss**gamma) * logprob, {"focus": miss**gamma}
