"""What the preference losses share.

Dimension key:  S segments   P pairs
Symbols:        c, r a score of the chosen and of the rejected segment   m = c - r   e = label_smoothing

`pairs` is (P, 2): the numbers of the chosen and of the rejected segment.
"""

import math

import torch
from torch.nn.functional import logsigmoid

from headloss.losses._ranges import positive, share

SMOOTHED = ("sigmoid", "robust", "exo", "aot", "aot_unpaired")
OF_THE_MARGIN = ("sigmoid", "hinge", "ipo", "robust", "exo", "discopop")
OF_BOTH = ("nca", "bco", "sppo", "apo_zero", "apo_down", "aot", "aot_unpaired")
MOST = 80.0  # largest exponent: its exp is finite in float32


def chosen_rejected(y, pairs):
    """(S,) to two (P,).  By index_select, because indexing would take -1 for the last segment."""
    return y.index_select(0, pairs[:, 0]), y.index_select(0, pairs[:, 1])


def smoothed(margin, e):
    """-(1 - e) log sigmoid(m) - e log sigmoid(-m)."""
    share(label_smoothing=e)
    return (e - 1) * logsigmoid(margin) - e * logsigmoid(-margin)


def linked(link, chosen, rejected, beta, e=0.0, tau=0.05):
    """One value per pair from its two scores; for the formulas see `dpo`."""
    positive(beta=beta, tau=tau)
    if e and link not in SMOOTHED:
        raise ValueError(f"label_smoothing: link {link!r} has none, got {e}; it goes with {', '.join(SMOOTHED)}")
    margin = chosen - rejected
    if link == "sigmoid":
        return smoothed(beta * margin, e)
    if link == "hinge":
        return (1 - beta * margin).relu()
    if link == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    if link == "robust":
        if not 0 <= e < 0.5:
            raise ValueError(f"label_smoothing: link 'robust' wants 0 <= label_smoothing < 0.5, got {e}")
        return ((e - 1) * logsigmoid(beta * margin) + e * logsigmoid(-beta * margin)) / (1 - 2 * e)
    if link == "exo":
        if not 0 < e < 1:
            raise ValueError(f"label_smoothing: link 'exo' wants 0 < label_smoothing < 1, got {e}")
        won, lost = logsigmoid(beta * margin), logsigmoid(-beta * margin)
        return won.exp() * (won - math.log1p(-e)) + lost.exp() * (lost - math.log(e))
    if link == "discopop":
        mix = torch.sigmoid(beta * margin / tau)
        return -logsigmoid(beta * margin) * (1 - mix) + (-beta * margin).clamp(max=MOST).exp() * mix
    if link == "nca":
        return -logsigmoid(beta * chosen) - (logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected)) / 2
    if link == "bco":
        return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)
    if link == "sppo":
        return (chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2
    if link == "apo_zero":
        return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)
    if link == "apo_down":
        return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * margin)
    if link in ("aot", "aot_unpaired"):
        return smoothed(beta * (chosen.sort().values - rejected.sort().values), e)
    raise ValueError(f"link: wanted one of {', '.join((*OF_THE_MARGIN, *OF_BOTH))}, got {link!r}")


def counted(logprob, segments, length_weight, average):
    """A function that sums (N,) to (S,) with the tokens' weights, and the divisor of the sums: (S,), or 1."""
    totals = lambda x: segments.totals(x if length_weight is None else x * length_weight)
    return totals, segments.totals(torch.ones_like(logprob)).clamp(min=1) if average else 1


def score(gain, link, divergence, alpha):
    """f'(u) of an f-divergence, u = e^gain the ratio of policy to reference."""
    if divergence == "reverse_kl":
        return gain
    if link not in OF_THE_MARGIN:
        raise ValueError(f"divergence: link {link!r} has none, got {divergence!r}; it goes with {OF_THE_MARGIN}")
    if divergence == "forward_kl":
        return 1 - (-gain).clamp(max=MOST).exp()
    if divergence == "js":
        return math.log(2) + logsigmoid(gain)
    if divergence == "alpha":
        return ((alpha - 1) * gain).clamp(max=MOST).expm1() / (alpha - 1) if alpha != 1 else gain
    raise ValueError(f"divergence: wanted 'reverse_kl', 'forward_kl', 'js' or 'alpha', got {divergence!r}")


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
