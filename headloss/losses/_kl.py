"""The estimates of KL(policy || reference) from sampled tokens; see `kl_to_reference`."""

from headloss.losses._ranges import positive


def kl_estimate(logprob, ref_logprob, estimator, ratio, bound):
    x = ref_logprob - logprob
    kind = estimator.removesuffix("+")
    if kind == "k1":
        kl = -x
    elif kind in ("k2", "mse"):
        kl = x * x / 2
    elif kind in ("k3", "low_var"):
        x_max = x.clamp(max=20.0)  # e^x must not overflow; on the other side k3 is a line, and needs no bound
        kl = x_max.expm1() - x_max
    elif kind == "abs":
        kl = x.abs()
    else:
        known = "'k1', 'k2', 'mse', 'k3', 'low_var', 'abs', or one of them with a '+'"
        raise ValueError(f"estimator: wanted {known}, got {estimator!r}")
    positive(bound=bound)
    bound = 10.0 if bound is None and kind == "low_var" else bound
    kl = kl * ratio
    kl = kl if bound is None else kl.clamp(-bound, bound)
    if estimator.endswith("+"):
        square = x * x / 2
        kl = kl.detach() + square - square.detach()
    return kl, {"reference_kl": kl, "ref_logprob": ref_logprob}
