import torch
from torch.nn.functional import logsigmoid

from headloss.losses._preference import chosen_rejected, preference_metrics


def orpo(logprob, segments, pairs, *, beta=0.1):
    """-chosen - beta log sigmoid(odds(chosen) - odds(rejected)), on the segments' means x of logprob, with the log odds
    odds(x) = x - log(1 - e^x): fine-tuning on the chosen one and an odds ratio, without a reference (Hong et al. 2024).
    `pairs` (P, 2) holds the chosen and the rejected segment's number.
    """
    means = segments.means(logprob)
    odds = means - (-means.clamp(max=-torch.finfo(means.dtype).eps).expm1()).log()
    chosen, rejected = chosen_rejected(means, pairs)
    odds_chosen, odds_rejected = chosen_rejected(odds, pairs)
    gap = odds_chosen - odds_rejected
    loss = -chosen - beta * logsigmoid(gap)
    return loss, {**preference_metrics(beta * chosen, beta * rejected, means, pairs), "log_odds": gap}


orpo.returns = "pair"
