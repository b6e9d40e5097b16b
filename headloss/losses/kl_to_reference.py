from headloss.losses._kl import kl_estimate
from headloss.losses._policy import bounded_exp, log_ratio


def kl_to_reference(logprob, ref_logprob, old_logprob=None, *, estimator="k3", corrected=False, bound=None):
    """An estimate of KL(policy || reference) from the sampled tokens (Schulman 2020), with x = ref_logprob - logprob:

    estimator "k1"       -x
    estimator "k2"       x^2 / 2; "mse" is the same
    estimator "k3"       e^x - x - 1
    estimator "abs"      |x|
    estimator "low_var"  k3 with bound 10
    estimator            a "+" after one of these, as in "k1+", keeps the value but has the gradient of k2
    corrected            multiplies by r = exp(logprob - old); its gradient is that of the KL itself (DeepSeek-V3.2)
    bound                clamps the estimate to [-bound, bound]; there is no gradient outside

    As a loss, plain k1 has a gradient of mean 0 and plain k3 a biased one; k2's is right on-policy.
    """
    if corrected and estimator.endswith("+"):
        raise ValueError(f"corrected: {estimator!r} has the right gradient already; choose one of the two")
    ratio = bounded_exp(log_ratio(logprob, old_logprob)) if corrected else 1.0
    return kl_estimate(logprob, ref_logprob, estimator, ratio, bound)


def kl_to_reference_sequence(logprob, ref_logprob, segments, old_logprob=None, *, estimator="k3", bound=None):
    """kl_to_reference, corrected by the ratio of the whole sequence: s kl, s = exp(mean over the segment of
    logprob - old).

    In trainers: TRL use_bias_correction_kl with importance_sampling_level="sequence".
    """
    if estimator.endswith("+"):
        raise ValueError(f"estimator: {estimator!r} has the right gradient already, and this one corrects it")
    return kl_estimate(
        logprob, ref_logprob, estimator, bounded_exp(segments.mean(log_ratio(logprob, old_logprob))), bound
    )
