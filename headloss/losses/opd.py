from headloss.losses._policy import bounded_exp, log_ratio, policy_metrics
from headloss.losses._ranges import not_negative


def opd(logprob, ref_logprob, old_logprob=None, *, low=None):
    """-sg(ref_logprob - logprob) r, r = exp(logprob - old): on-policy distillation: the advantage of a
    token is how much likelier the teacher finds it (Lu et al. 2025).  Its gradient is that of KL(policy || teacher).

    low   leaves out tokens whose probability has fallen by more than this since `old_logprob`; None: none

    In trainers: prime-rl's ref_kl component with low=0.2, next to its squared log-ratio.
    """
    not_negative(low=low)
    ratio, gap = bounded_exp(log_ratio(logprob, old_logprob)), (ref_logprob - logprob).detach()
    metrics = policy_metrics(logprob, gap, old_logprob, ratio) | {"reference_kl": -gap}
    if low is None:
        return -gap * ratio, metrics
    old = logprob.detach() if old_logprob is None else old_logprob
    fallen = logprob.detach().exp() - old.exp() < -low
    return -gap * ratio * (~fallen).to(ratio.dtype), metrics | {"clip_fraction": fallen}
