from headloss.losses._policy import bounded_exp, log_ratio


def kl_to_reference(logprob, ref_logprob, old_logprob=None, *, estimator="k3", corrected=False):
    """An estimate of KL(policy || reference) from the sampled tokens (Schulman 2020), with x = ref_logprob - logprob:

    estimator   "k1": -x    "k2": x^2 / 2    "k3": e^x - x - 1
    corrected   multiplies by r = exp(logprob - old), which makes the gradient that of the KL itself (DeepSeek-V3.2)

    As a loss, plain k1 has a gradient of mean 0 and plain k3 a biased one; k2's is right on-policy.
    """
    x = ref_logprob - logprob
    if estimator == "k1":
        kl = -x
    elif estimator == "k2":
        kl = x * x / 2
    elif estimator == "k3":
        x = x.clamp(-20.0, 20.0)
        kl = x.expm1() - x
    else:
        raise ValueError(f"estimator: wanted 'k1', 'k2' or 'k3', got {estimator!r}")
    if corrected:
        kl = kl * bounded_exp(log_ratio(logprob, old_logprob))
    return kl, {"reference_kl": kl, "ref_logprob": ref_logprob}
