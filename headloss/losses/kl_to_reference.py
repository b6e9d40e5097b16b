from headloss.losses._policy import bounded_exp, log_ratio


def kl_to_reference(logprob, ref_logprob, old_logprob=None, *, estimator="k3", corrected=False, bound=None):
    """An estimate of KL(policy || reference) from the sampled tokens (Schulman 2020), with x = ref_logprob - logprob:

    estimator   "k1": -x    "k2", "mse": x^2 / 2    "k3": e^x - x - 1    "abs": |x|    "low_var": k3 with bound 10
                "k1+", "k2+", "k3+", "abs+", "low_var+": that value, with the gradient of k2
    corrected   multiplies by r = exp(logprob - old), which makes the gradient that of the KL itself (DeepSeek-V3.2)
    bound       clamps the estimate to [-bound, bound]; there is no gradient outside

    As a loss, plain k1 has a gradient of mean 0 and plain k3 a biased one; k2's is right on-policy.
    """
    x = ref_logprob - logprob
    kind = estimator.removesuffix("+")
    if kind == "k1":
        kl = -x
    elif kind in ("k2", "mse"):
        kl = x * x / 2
    elif kind in ("k3", "low_var"):
        held = x.clamp(max=20.0)  # e^x must not overflow; on the other side k3 is a line, and needs no bound
        kl = held.expm1() - held
    elif kind == "abs":
        kl = x.abs()
    else:
        known = "'k1', 'k2', 'mse', 'k3', 'low_var', 'abs', or one of them with a '+'"
        raise ValueError(f"estimator: wanted {known}, got {estimator!r}")
    if bound is not None and not bound > 0:
        raise ValueError(f"bound: wanted a positive number, got {bound}")
    if corrected:
        if estimator.endswith("+"):
            raise ValueError(f"corrected: {estimator!r} has the right gradient already; choose one of the two")
        kl = kl * bounded_exp(log_ratio(logprob, old_logprob))
    bound = 10.0 if bound is None and kind == "low_var" else bound
    kl = kl if bound is None else kl.clamp(-bound, bound)
    if estimator.endswith("+"):
        square = x * x / 2
        kl = kl.detach() + square - square.detach()
    return kl, {"reference_kl": kl, "ref_logprob": ref_logprob}
