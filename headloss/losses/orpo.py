import torch
from torch.nn.functional import logsigmoid

from headloss.losses._preference import chosen_rejected, preference_metrics
from headloss.losses._ranges import not_negative


def orpo(logprob, segments, pairs, *, beta=0.1, nll="sequence"):
    """-chosen - beta log sigmoid(odds(chosen) - odds(rejected)), on the segments' means x of logprob, with the log odds
    odds(x) = x - log(1 - e^x): fine-tuning on the chosen segment plus an odds ratio, no reference (Hong et al. 2024).
    `pairs` (P, 2) holds the chosen and the rejected segment's number.

    nll "sequence"  the mean of each chosen segment, so that all pairs have the same weight
    nll "token"     the mean over the tokens of all chosen segments of the call, as in most trainers
    nll "none"      the odds term only
    """
    not_negative(beta=beta)
    means = segments.means(logprob)
    odds = means - (-means.clamp(max=-torch.finfo(means.dtype).eps).expm1()).log()
    chosen, rejected = chosen_rejected(means, pairs)
    odds_chosen, odds_rejected = chosen_rejected(odds, pairs)
    gap = odds_chosen - odds_rejected
    loss = -beta * logsigmoid(gap)
    if nll == "sequence":
        loss = loss - chosen
    elif nll == "token":
        tokens, _ = chosen_rejected(segments.counts.to(means.dtype), pairs)
        mean = tokens.mean().clamp(min=torch.finfo(tokens.dtype).tiny)  # no chosen segment may have any
        loss = loss - chosen * tokens / mean
    elif nll != "none":
        raise ValueError(f"nll: wanted 'sequence', 'token' or 'none', got {nll!r}")
    return loss, {**preference_metrics(beta * chosen, beta * rejected, means, pairs), "log_odds": gap}


orpo.returns = "pair"
