from torch.nn.functional import logsigmoid

from headloss.losses._preference import chosen_rejected, preference_metrics


def dpo(logprob, ref_logprob, segments, pairs, *, beta=0.1, link="sigmoid", label_smoothing=0.0, average=False):
    """One value a pair of segments, m = how much more than the reference the policy prefers the chosen one:

    link "sigmoid"   -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), e = label_smoothing (Rafailov et al. 2023)
    link "ipo"       (m - 1 / (2 beta))^2 (Azar et al. 2024)

    m is the difference of the segments' totals of logprob - ref_logprob; with `average`, of their means (which is how
    IPO is usually run).  `pairs` (P, 2) holds the chosen and the rejected segment's number.
    """
    gain = logprob - ref_logprob
    chosen, rejected = chosen_rejected(segments.means(gain) if average else segments.totals(gain), pairs)
    margin = chosen - rejected
    if link == "sigmoid":
        loss = (label_smoothing - 1) * logsigmoid(beta * margin) - label_smoothing * logsigmoid(-beta * margin)
    elif link == "ipo":
        loss = (margin - 1 / (2 * beta)) ** 2
    else:
        raise ValueError(f"link: wanted 'sigmoid' or 'ipo', got {link!r}")
    return loss, preference_metrics(beta * chosen, beta * rejected, segments.totals(logprob), pairs)


dpo.returns = "pair"
