from headloss.losses._ranges import share


def cross_entropy(
    logprob, mean_logprob, class_weight=None, class_mean=None, class_cross_entropy=None, *, label_smoothing=0.0
):
    """-log p[y]; with label smoothing e, -(1 - e) log p[y] - e mean_j log p[j] (Szegedy et al. 2016).

    class_weight   w (V,), an input of the call: -(1 - e) w[y] log p[y] - e mean_j w[j] log p[j], as in torch; for
                   torch's mean, which divides by the sum of w[y], use `reduction="weighted_mean"`

    In trainers: torch.nn.functional.cross_entropy(weight=, label_smoothing=); Liger ce_weight.
    """
    share(label_smoothing=label_smoothing)
    if class_weight is not None:
        loss = (label_smoothing - 1) * class_weight * logprob
        loss = loss if label_smoothing == 0 else loss + label_smoothing * class_mean * class_cross_entropy
        return loss, {"perplexity": -logprob}
    if label_smoothing == 0:
        return -logprob, {"perplexity": -logprob}
    return (label_smoothing - 1) * logprob - label_smoothing * mean_logprob, {"perplexity": -logprob}
