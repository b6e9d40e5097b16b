def entropy_bonus(entropy):
    """-H(p): a positive weight rewards entropy (Williams & Peng 1991)."""
    return -entropy, {"entropy": entropy}
