def eaft(logprob, entropy, *, alpha=1.0, unit=1.0):
    """-sg((H / unit)^alpha) log p[y], H = the entropy: tokens of which the model is sure count less, whether they are
    easy or contradict it (Diao et al. 2026).

    unit   the entropy that counts as 1; the paper's is log K, with H over the K likeliest columns alone

    In trainers: axolotl use_eaft, which takes H over the 20 likeliest columns where we take all.
    """
    gate = (entropy.detach().clamp(min=0.0) / unit) ** alpha
    return -gate * logprob, {"gate": gate}
