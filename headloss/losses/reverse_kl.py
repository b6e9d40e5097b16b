def reverse_kl(logp, logq):
    """KL(p || q) = sum_j p_j (log p_j - log q_j): the student seeks the teacher's modes (Gu et al. 2024).  With a
    reference policy as the teacher it is the exact KL penalty of reinforcement learning."""
    return logp.exp() * (logp - logq)


def _one_pass(reverse_cross_entropy, shared_entropy):
    return reverse_cross_entropy - shared_entropy


reverse_kl.one_pass = _one_pass
