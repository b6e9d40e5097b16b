from headloss.losses._policy import bounded_exp, log_ratio, policy_metrics
from headloss.losses._ranges import not_negative, positive


def dppo(
    logprob, advantage, old_logprob=None,
    *, divergence="tv", low=0.2, high=0.2, cap: float | None = 20.0, form="score", one_sided=True,
):  # fmt: skip
    """-A sg(min(r, cap)) logprob on tokens whose probability p has not left the trust region on the side that A pushes
    to, 0 elsewhere (arXiv:2602.04879).  Out means p > old and D > high where A > 0, p < old and D > low
    where A < 0.

    divergence   "tv": D = |p - old|; "kl": D = old log(old / p) + (1 - old) log((1 - old) / (1 - p))
    cap          None: no cap
    form         "ratio": -A min(r, cap), which has the same gradient below the cap
    one_sided    False: out means p > old and D > high, or p < old and D > low, for any A

    In trainers: verl dppo_tv, dppo_kl; prime-rl's default loss is form="ratio", cap=None, its ipo also one_sided=False.
    """
    not_negative(low=low, high=high)
    positive(cap=cap)
    old = logprob.detach() if old_logprob is None else old_logprob
    d, p_old = log_ratio(logprob, old), old.exp()
    ratio, moved = bounded_exp(d), logprob.detach().exp() - p_old
    if divergence == "tv":
        far = moved.abs()
    elif divergence == "kl":
        rest, rest_old = ((-x.expm1()).clamp(min=1e-8).log() for x in (logprob.detach(), old))  # log(1 - p)
        far = -p_old * d.detach() + (1 - p_old) * (rest_old - rest)
    else:
        raise ValueError(f"divergence: wanted 'tv' or 'kl', got {divergence!r}")
    under, over = (moved < 0) & (far > low), (moved > 0) & (far > high)
    if one_sided:
        under, over = under & (advantage < 0), over & (advantage > 0)
    if form not in ("score", "ratio"):
        raise ValueError(f"form: wanted 'score' or 'ratio', got {form!r}")
    capped = ratio if cap is None else ratio.clamp(max=cap)
    moving = capped if form == "ratio" else capped.detach() * logprob
    loss = -advantage * moving * (~(under | over)).to(ratio.dtype)
    return loss, policy_metrics(logprob, advantage, old_logprob, ratio, under, over)
