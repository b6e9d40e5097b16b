def cross_entropy(logprob, mean_logprob, *, label_smoothing=0.0):
    """-log p[y]; with label smoothing e, -(1 - e) log p[y] - e mean_j log p[j] (Szegedy et al. 2016)."""
    if label_smoothing == 0:
        return -logprob, {"perplexity": -logprob}
    return (label_smoothing - 1) * logprob - label_smoothing * mean_logprob, {"perplexity": -logprob}
