from headloss.losses._ranges import not_negative, positive


def eaft(logprob, entropy, top_logprob=None, *, alpha=1.0, unit=1.0):
    """-sg((H / unit)^alpha) log p[y], H = the entropy: tokens count less if the model is sure, right or wrong
    (Diao et al. 2026).  With `hl.Term(eaft, top=K)`, H is the entropy of a softmax over the K likeliest columns.

    unit   the entropy that counts as 1; the paper's is log K

    In trainers: axolotl use_eaft, with eaft_k as `top`.
    """
    not_negative(alpha=alpha)
    positive(unit=unit)
    if top_logprob is not None:
        inside = top_logprob.detach().log_softmax(-1)
        entropy = -(inside.exp() * inside).sum(-1)
    gate = (entropy.detach().clamp(min=0.0) / unit) ** alpha
    return -gate * logprob, {"gate": gate}
