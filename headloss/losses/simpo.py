from headloss.losses._preference import MOST, chosen_rejected, preference_metrics, smoothed
from headloss.losses._ranges import not_negative, positive


def simpo(logprob, segments, pairs, *, beta=2.0, gamma=0.5, label_smoothing=0.0, alpha=0.0):
    """-(1 - e) log sigmoid(m) - e log sigmoid(-m), m = beta (chosen - rejected) - gamma on the segments' means x of
    logprob, e = label_smoothing: no reference, a margin gamma instead (Meng et al. 2024).

    alpha   not 0: (1 - e^(-alpha x)) / alpha in place of x (AlphaPO, Gupta et al. 2025)

    `pairs` (P, 2) holds the chosen and the rejected segment's number.

    In trainers: TRL CPOConfig(loss_type="simpo" or "alphapo"), TPOConfig(loss_type="tpo-l"); axolotl rl: simpo.
    """
    positive(beta=beta)
    not_negative(gamma=gamma)
    means = segments.means(logprob)
    reward = beta * (means if alpha == 0 else -(-alpha * means).clamp(max=MOST).expm1() / alpha)
    chosen, rejected = chosen_rejected(reward, pairs)
    loss = smoothed(chosen - rejected - gamma, label_smoothing)
    return loss, preference_metrics(chosen, rejected, means, pairs)


simpo.returns = "pair"
