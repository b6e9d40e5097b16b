from headloss.losses._policy import in_rows


def reinforce(logprob, advantage):
    """-A logprob (Williams 1992); with group-relative advantages this is GPG (Chu et al. 2025).

    In trainers: verl gpg and bypass_mode's reinforce; NeMo-RL disable_ppo_ratio.
    """
    advantages = {f"advantage_{what}": in_rows(advantage, logprob) for what in ("mean", "min", "max")}
    return -advantage * logprob, {"logprob": logprob, **advantages}
