from headloss.losses._ranges import positive


def a2po(logprob, ref_logprob, segments, optimal_advantage, *, beta=1e-3):
    """(beta g - A*)^2 per segment, g = total of logprob - ref_logprob: the implicit reward is regressed onto the
    optimal advantage A* (A*-PO, Brantley et al. 2025).

    optimal_advantage   (S,): the reward minus V*, with V* = b log mean exp(reward / b) over samples of the reference

    In trainers: TRL A2POTrainer, whose beta2 is `beta` and whose beta1 is b.
    """
    positive(beta=beta)
    reward = beta * segments.totals(logprob - ref_logprob)
    loss = (reward - optimal_advantage) ** 2
    return loss, {"reward": reward, "optimal_advantage": optimal_advantage}


a2po.per_segment, a2po.returns = ("optimal_advantage",), "segment"
