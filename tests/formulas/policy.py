"""Policy and preference losses, written again from their papers: a case for each branch, a loop over segments.

A formula is called with its loss's arguments and returns the same values.  Nothing here is shared with headloss.
"""

import math

import torch
from torch import where


def _old(logprob, old_logprob):
    return logprob.detach() if old_logprob is None else old_logprob


def _ratio(logprob, old_logprob):
    return torch.exp(logprob - _old(logprob, old_logprob))


def _members(segments):
    ids = segments.ids.reshape(-1)
    return [torch.nonzero(ids == s).flatten() for s in range(segments.num_segments)]


def _per_segment(segments, x, how):
    """(S,) by a plain loop; 0 where a segment has no tokens."""
    return torch.stack([getattr(x[rows], how)() if len(rows) else x.sum() * 0 for rows in _members(segments)])


def _to_rows(segments, y):
    return y[segments.ids.reshape(-1).clamp(min=0)]


def _ppo(ratio, advantage, low, high):
    """The objective's three cases: clipped from above, clipped from below, free."""
    bound = where(advantage > 0, (1 + high) * advantage, (1 - low) * advantage)
    stopped = (advantage > 0) & (ratio > 1 + high) | (advantage < 0) & (ratio < 1 - low)
    return -where(stopped, bound, ratio * advantage)


def grpo(logprob, advantage, old_logprob=None, *, low=0.2, high=0.2, dual=None, delta=None):
    ratio = _ratio(logprob, old_logprob)
    loss = _ppo(ratio, advantage, low, high)
    if delta is not None:  # matters only for A < 0, where the ratio is not clipped from above
        loss = where((ratio > delta) & (advantage < 0), -delta * advantage, loss)
    if dual is not None:
        loss = where((advantage < 0) & (loss > -dual * advantage), -dual * advantage, loss)
    return loss


def gspo(logprob, advantage, segments, old_logprob=None, *, low=3e-4, high=4e-4):
    gap = logprob - _old(logprob, old_logprob)
    sequence_ratio = torch.exp(_per_segment(segments, gap, "mean"))
    sequence_advantage = _per_segment(segments, advantage.detach(), "mean")
    return _to_rows(segments, _ppo(sequence_ratio, sequence_advantage, low, high))


def gspo_token(logprob, advantage, segments, old_logprob=None, *, low=3e-4, high=4e-4):
    gap = logprob - _old(logprob, old_logprob)
    sequence_ratio = torch.exp(_per_segment(segments, gap.detach(), "mean"))
    ratio = _to_rows(segments, sequence_ratio) * torch.exp(logprob) / torch.exp(logprob.detach())
    return _ppo(ratio, advantage, low, high)


def cispo(logprob, advantage, old_logprob=None, *, high=5.0):
    ratio = _ratio(logprob, old_logprob).detach()
    return -where(ratio > high, high, ratio) * advantage * logprob


def sapo(logprob, advantage, old_logprob=None, *, tau_pos=1.0, tau_neg=1.05):
    ratio = _ratio(logprob, old_logprob)
    gate_pos = 4 / tau_pos / (1 + torch.exp(-tau_pos * (ratio - 1)))
    gate_neg = 4 / tau_neg / (1 + torch.exp(-tau_neg * (ratio - 1)))
    return -where(advantage > 0, gate_pos, gate_neg) * advantage


def gmpo(logprob, advantage, segments, old_logprob=None, *, low=0.4, high=0.4, signed=False):
    gap = logprob - _old(logprob, old_logprob)
    low = high if signed else low
    up = where(gap > high, high, gap)  # a good token's ratio is bounded from above only
    down = where(gap < -low, -low, gap)
    held = where(advantage > 0, up, where(advantage < 0, down, 0.0))
    return -advantage * _to_rows(segments, torch.exp(_per_segment(segments, held, "mean")))


def dppo(logprob, advantage, old_logprob=None, *, divergence="tv", low=0.2, high=0.2, cap=20.0):
    old = _old(logprob, old_logprob)
    p, q = logprob.detach().exp(), old.exp()
    if divergence == "tv":
        far = 0.5 * ((p - q).abs() + ((1 - p) - (1 - q)).abs())  # of the two-outcome distributions
    else:
        far = q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))
    leaving = (advantage > 0) & (p > q) & (far > high) | (advantage < 0) & (p < q) & (far > low)
    weight = torch.minimum(p / q, torch.tensor(cap, dtype=p.dtype))
    return where(leaving, 0.0, -advantage * weight * logprob)


def reinforce(logprob, advantage):
    return -advantage * logprob


def kimi(logprob, advantage, old_logprob=None, *, beta=0.1):
    return -(advantage * logprob - beta * (logprob - _old(logprob, old_logprob)) ** 2 / 2)


def topr(logprob, advantage, old_logprob=None):
    ratio = _ratio(logprob, old_logprob).detach()
    return -where((advantage > 0) | (ratio > 1), 1.0, ratio) * advantage * logprob


def vespo(logprob, advantage, segments, old_logprob=None, *, k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0):
    gap = (logprob - _old(logprob, old_logprob)).detach()
    w = torch.exp(_to_rows(segments, _per_segment(segments, gap, "sum")))
    phi_pos = math.exp(lam_pos) * w**k_pos * torch.exp(-lam_pos * w)
    phi_neg = math.exp(lam_neg) * w**k_neg * torch.exp(-lam_neg * w)
    return -where(advantage >= 0, phi_pos, phi_neg) * advantage * logprob


def kl_to_reference(logprob, ref_logprob, old_logprob=None, *, estimator="k3", corrected=False, bound=None):
    odds = torch.exp(ref_logprob - logprob)  # of reference to policy
    gap = torch.log(odds)
    kinds = {"k1": -gap, "k2": gap**2 / 2, "mse": gap**2 / 2, "k3": odds - 1 - gap, "abs": gap.abs()}
    kl = (kinds | {"low_var": kinds["k3"]})[estimator.strip("+")]
    kl = kl * _ratio(logprob, old_logprob) if corrected else kl
    bound = 10.0 if bound is None and "low_var" in estimator else bound
    if bound is not None:
        kl = where(kl > bound, bound, where(kl < -bound, -bound, kl))
    if estimator.endswith("+"):  # the value of one, the gradient (the gap itself) of another
        kl = kl.detach() - gap.detach() * (logprob - logprob.detach())
    return kl


def kl_to_reference_sequence(logprob, ref_logprob, segments, old_logprob=None, *, estimator="k3", bound=None):
    gap = _per_segment(segments, logprob - _old(logprob, old_logprob), "mean")
    kl = kl_to_reference(logprob, ref_logprob, estimator=estimator) * _to_rows(segments, torch.exp(gap))
    return kl if bound is None else where(kl > bound, bound, where(kl < -bound, -bound, kl))


def dpo(logprob, ref_logprob, segments, pairs, *, beta=0.1, link="sigmoid", label_smoothing=0.0, average=False):
    how = "mean" if average else "sum"
    policy, reference = _per_segment(segments, logprob, how), _per_segment(segments, ref_logprob, how)
    values = []
    for chosen, rejected in pairs.tolist():
        margin = (policy[chosen] - policy[rejected]) - (reference[chosen] - reference[rejected])
        if link == "ipo":
            values.append((margin - 0.5 / beta) ** 2)
        else:
            wins = 1 / (1 + torch.exp(-beta * margin))
            values.append(-(1 - label_smoothing) * torch.log(wins) - label_smoothing * torch.log(1 - wins))
    return torch.stack(values)


def simpo(logprob, segments, pairs, *, beta=2.0, gamma=0.5):
    means = _per_segment(segments, logprob, "mean")
    return torch.stack(
        [torch.log(1 + torch.exp(-(beta * means[c] - beta * means[r] - gamma))) for c, r in pairs.tolist()]
    )


def orpo(logprob, segments, pairs, *, beta=0.1, nll="sequence"):
    likelihood, total = torch.exp(_per_segment(segments, logprob, "mean")), _per_segment(segments, logprob, "sum")
    tokens = sum(float(segments.counts[chosen]) for chosen, _ in pairs.tolist())
    values = []
    for chosen, rejected in pairs.tolist():
        good, bad = likelihood[chosen], likelihood[rejected]
        odds_ratio = good / (1 - good) / (bad / (1 - bad))
        own = {"sequence": -torch.log(good), "token": -total[chosen] / (tokens / len(pairs)), "none": 0.0}[nll]
        values.append(own - beta * torch.log(odds_ratio / (1 + odds_ratio)))
    return torch.stack(values)


def kto(logprob, ref_logprob, segments, desirable, kl=None, *, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0):
    z0 = 0.0 if kl is None else kl
    reward = _per_segment(segments, logprob - ref_logprob, "sum")
    value_good = 1 / (1 + torch.exp(-beta * (reward - z0)))
    value_bad = 1 / (1 + torch.exp(-beta * (z0 - reward)))
    return where(desirable.bool(), desirable_weight * (1 - value_good), undesirable_weight * (1 - value_bad))


FORMULAS = {
    fn.__name__: fn
    for fn in (
        grpo, gspo, gspo_token, cispo, sapo, gmpo, dppo, reinforce, kimi, topr, vespo, kl_to_reference,
        kl_to_reference_sequence,
        dpo, simpo, orpo, kto,
    )
}  # fmt: skip
