from headloss.losses._preference import OF_THE_MARGIN, chosen_rejected, linked, preference_metrics


def cpo(logprob, segments, pairs, *, beta=0.1, link="sigmoid", label_smoothing=0.0, average=False):
    """-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), m = chosen - rejected on the segments' totals of logprob,
    e = label_smoothing: preference without a reference (Xu et al. 2024).

    link      "hinge": max(0, 1 - beta m); "ipo": (m - 1 / (2 beta))^2; and the others of `dpo` that take m
    average   the segments' means in place of their totals

    Its likelihood of the chosen is another term, cross_entropy with a row weight of 1 on the chosen segments' tokens.
    `pairs` (P, 2) holds the chosen and the rejected segment's number.

    In trainers: TRL CPOTrainer and TPOTrainer: sigmoid, hinge, ipo (with average=True); axolotl rl: cpo.
    """
    if link not in OF_THE_MARGIN:
        raise ValueError(f"link: wanted one of {', '.join(OF_THE_MARGIN)}, got {link!r}")
    totals = segments.totals(logprob)
    chosen, rejected = chosen_rejected(segments.means(logprob) if average else totals, pairs)
    loss = linked(link, chosen, rejected, beta, label_smoothing)
    return loss, preference_metrics(beta * chosen, beta * rejected, totals, pairs)


cpo.returns = "pair"
