from headloss.losses._policy import bounded_exp, log_ratio, policy_metrics


def dppo(logprob, advantage, old_logprob=None, *, divergence="tv", low=0.2, high=0.2, cap=20.0):
    """-A sg(min(r, cap)) logprob on the tokens whose probability p has not left the trust region on the side A pushes
    to; the rest give nothing (arXiv:2602.04879).  Out means p > old and D > high where A > 0, p < old and D > low
    where A < 0.

    divergence   "tv": D = |p - old|; "kl": D = old log(old / p) + (1 - old) log((1 - old) / (1 - p))
    """
    old = logprob.detach() if old_logprob is None else old_logprob
    d = log_ratio(logprob, old).detach()
    ratio = bounded_exp(d)
    p_old = old.exp()
    moved = logprob.detach().exp() - p_old
    if divergence == "tv":
        far = moved.abs()
    elif divergence == "kl":
        rest, rest_old = ((-x.expm1()).clamp(min=1e-8).log() for x in (logprob.detach(), old))  # log(1 - p)
        far = -p_old * d + (1 - p_old) * (rest_old - rest)
    else:
        raise ValueError(f"divergence: wanted 'tv' or 'kl', got {divergence!r}")
    under = (advantage < 0) & (moved < 0) & (far > low)
    over = (advantage > 0) & (moved > 0) & (far > high)
    inside = (~(under | over)).to(ratio.dtype)
    loss = -advantage * ratio.clamp(max=cap) * inside * logprob
    return loss, policy_metrics(logprob, advantage, old_logprob, ratio, under, over)
