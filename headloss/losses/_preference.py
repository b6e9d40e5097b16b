"""Pieces that the preference losses share.

Dimension key:  S segments   P pairs

`pairs` is (P, 2): the numbers of the chosen and of the rejected segment.
"""


def chosen_rejected(y, pairs):
    """(S,) to two (P,).  index_select, because indexing would take -1 for the last segment."""
    return y.index_select(0, pairs[:, 0]), y.index_select(0, pairs[:, 1])


def preference_metrics(chosen, rejected, logprob_S, pairs):
    """What trainers log: implicit rewards, how often and by how much the chosen one wins, and log-probabilities."""
    logprob_chosen, logprob_rejected = chosen_rejected(logprob_S, pairs)
    return {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": chosen > rejected,
        "logprob_chosen": logprob_chosen,
        "logprob_rejected": logprob_rejected,
    }
