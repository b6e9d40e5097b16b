from torch.nn.functional import logsigmoid

from headloss.losses._preference import chosen_rejected, preference_metrics


def simpo(logprob, segments, pairs, *, beta=2.0, gamma=0.5):
    """-log sigmoid(beta (chosen - rejected) - gamma) on the segments' means of logprob: no reference, a margin gamma
    instead (Meng et al. 2024).  `pairs` (P, 2) holds the chosen and the rejected segment's number.
    """
    means = segments.means(logprob)
    chosen, rejected = chosen_rejected(beta * means, pairs)
    return -logsigmoid(chosen - rejected - gamma), preference_metrics(chosen, rejected, means, pairs)


simpo.returns = "pair"
