def dft(logprob):
    """-sg(p[y]) log p[y]: cross-entropy weighted by the token's probability, dynamic fine-tuning (Wu et al. 2025)."""
    p = logprob.detach().exp()
    return -p * logprob, {"probability": p}
