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


def gspo(logprob, advantage, segments, old_logprob=None, *, low=3e-4, high=4e-4, dual=None, delta=None, own=False):
    gap = logprob - _old(logprob, old_logprob)
    log_sequence_ratio = _per_segment(segments, gap, "mean")
    if own:
        rows = _to_rows(segments, log_sequence_ratio)
        return grpo(rows, advantage, torch.zeros_like(rows), low=low, high=high, dual=dual, delta=delta)
    A = _per_segment(segments, advantage.detach(), "mean")
    zero = torch.zeros_like(log_sequence_ratio)
    return _to_rows(segments, grpo(log_sequence_ratio, A, zero, low=low, high=high, dual=dual, delta=delta))


def gspo_token(logprob, advantage, segments, old_logprob=None, *, low=3e-4, high=4e-4):
    gap = logprob - _old(logprob, old_logprob)
    sequence_ratio = torch.exp(_per_segment(segments, gap.detach(), "mean"))
    ratio = _to_rows(segments, sequence_ratio) * torch.exp(logprob) / torch.exp(logprob.detach())
    return _ppo(ratio, advantage, low, high)


def cispo(logprob, advantage, old_logprob=None, *, low=0.0, high=5.0):
    return _cispo(_ratio(logprob, old_logprob).detach(), logprob, advantage, low, high)


def cispo_sequence(logprob, advantage, segments, old_logprob=None, *, low=0.0, high=5.0):
    gap = (logprob - _old(logprob, old_logprob)).detach()
    ratio = _to_rows(segments, torch.exp(_per_segment(segments, gap, "mean")))
    return _cispo(ratio, logprob, advantage, low, high)


def _cispo(ratio, logprob, advantage, low, high):
    return -where(ratio > high, high, where(ratio < low, low, ratio)) * advantage * logprob


def sapo(logprob, advantage, old_logprob=None, *, tau_pos=1.0, tau_neg=1.05):
    return _sapo(_ratio(logprob, old_logprob), advantage, tau_pos, tau_neg)


def sapo_sequence(logprob, advantage, segments, old_logprob=None, *, tau_pos=1.0, tau_neg=1.05, own=False):
    gap = logprob - _old(logprob, old_logprob)
    ratio = torch.exp(_per_segment(segments, gap, "mean"))
    if own:
        return _sapo(_to_rows(segments, ratio), advantage, tau_pos, tau_neg)
    A = _per_segment(segments, advantage.detach(), "mean")
    return _to_rows(segments, _sapo(ratio, A, tau_pos, tau_neg))


def _sapo(ratio, advantage, tau_pos, tau_neg):
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


def dppo(
    logprob, advantage, old_logprob=None,
    *, divergence="tv", low=0.2, high=0.2, cap: float | None = 20.0, form="score", one_sided=True,
):  # fmt: skip
    old = _old(logprob, old_logprob)
    p, q = logprob.detach().exp(), old.exp()
    if divergence == "tv":
        far = 0.5 * ((p - q).abs() + ((1 - p) - (1 - q)).abs())  # of the two-outcome distributions
    else:
        far = q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))
    leaving = (p > q) & (far > high) & ((advantage > 0) | (not one_sided))
    leaving |= (p < q) & (far > low) & ((advantage < 0) | (not one_sided))
    if form == "ratio":
        live = logprob.exp() / q
        return where(leaving, 0.0, -advantage * (live if cap is None else where(live > cap, cap, live)))
    weight = p / q if cap is None else torch.minimum(p / q, torch.tensor(cap, dtype=p.dtype))
    return where(leaving, 0.0, -advantage * weight * logprob)


def rloo(logprob, advantage, segments, old_logprob=None, *, low=0.2, high=0.2):
    new, old = (_per_segment(segments, x, "sum") for x in (logprob, _old(logprob, old_logprob)))
    return _ppo(torch.exp(new - old), _per_segment(segments, advantage.detach(), "mean"), low, high)


def a2po(logprob, ref_logprob, segments, optimal_advantage, *, beta=1e-3):
    gaps = []
    for rows, A in zip(_members(segments), optimal_advantage):
        policy, reference = logprob[rows].sum(), ref_logprob[rows].sum()
        gaps.append(torch.square(A - beta * policy + beta * reference))
    return torch.stack(gaps)


def _few(scores, fraction):
    """The rows of the largest scores, by a loop: as many as the fraction says, at least one."""
    order = sorted(range(len(scores)), key=lambda i: -float(scores[i]))
    few = torch.zeros(len(scores), dtype=torch.bool)
    few[order[: max(1, int(fraction * len(scores)))]] = True
    return few


def _cov(logprob, advantage):
    x, A = logprob.detach(), advantage
    return (A - A.sum() / len(A)) * (x - x.sum() / len(x))


def clip_cov(logprob, advantage, draw, old_logprob=None, *, low=0.2, high=0.2, fraction=2e-4, least=1.0, most=5.0):
    ratio = _ratio(logprob, old_logprob)
    plain, bound = -ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage
    cov = _cov(logprob, advantage)
    allowed = (cov > least) & (cov < most) & (bound <= plain)
    lots = torch.tensor([-float(d) if ok else -math.inf for d, ok in zip(draw, allowed)])
    return where(_few(lots, fraction) & allowed, 0.0, torch.max(plain, bound))


def kl_cov(logprob, advantage, old_logprob=None, *, fraction=2e-4, beta=1.0):
    old = _old(logprob, old_logprob)
    loss = -advantage * _ratio(logprob, old_logprob)
    return where(_few(_cov(logprob, advantage), fraction), loss + beta * torch.abs(logprob - old), loss)


def reinforce(logprob, advantage):
    return -advantage * logprob


def kimi(logprob, advantage, old_logprob=None, *, beta=0.1):
    return -(advantage * logprob - beta * (logprob - _old(logprob, old_logprob)) ** 2 / 2)


def topr(logprob, advantage, old_logprob=None):
    ratio = _ratio(logprob, old_logprob).detach()
    return -where((advantage > 0) | (ratio > 1), 1.0, ratio) * advantage * logprob


def vespo(
    logprob, advantage, segments, old_logprob=None, sampler_logprob=None,
    *, k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0, sampler_high=None, sampler_low=0.0, sampler_mask=False,
):  # fmt: skip
    old = _old(logprob, old_logprob)
    gap = (logprob - old).detach()
    if sampler_high is not None:
        ratio = torch.exp(old - sampler_logprob)
        if sampler_mask:
            ratio = where((ratio >= sampler_low) & (ratio <= sampler_high), ratio, 1e-8)
        gap = gap + torch.log(ratio.clamp(1e-8 if sampler_mask else sampler_low, sampler_high))
    w = torch.exp(_to_rows(segments, _per_segment(segments, gap, "sum")))
    phi_pos = math.exp(lam_pos) * w**k_pos * torch.exp(-lam_pos * w)
    phi_neg = math.exp(lam_neg) * w**k_neg * torch.exp(-lam_neg * w)
    return -where(advantage >= 0, phi_pos, phi_neg) * advantage * logprob


def opd(logprob, ref_logprob, old_logprob=None, *, low=None):
    gain = torch.log(torch.exp(ref_logprob) / torch.exp(logprob)).detach()
    loss = -gain * _ratio(logprob, old_logprob)
    if low is None:
        return loss
    fall = torch.exp(_old(logprob, old_logprob)) - torch.exp(logprob)
    return where(fall > low, torch.zeros_like(loss), loss)


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


def dpo(
    logprob, ref_logprob, segments, pairs, length_weight=None,
    *, beta=0.1, link="sigmoid", label_smoothing=0.0, average=False, divergence="reverse_kl", alpha=0.5, tau=0.05,
):  # fmt: skip
    """Pair by pair, from the ratio u of whole sequences; each link as its paper has it."""
    count = _per_segment(segments, torch.ones_like(logprob), "sum")
    counts = count.clamp(min=1) if average else torch.ones_like(count)
    part = torch.ones_like(logprob) if length_weight is None else length_weight
    policy, reference = (_per_segment(segments, x * part, "sum") for x in (logprob, ref_logprob))
    u = torch.exp(policy - reference)
    gain = {
        "reverse_kl": torch.log(u),
        "forward_kl": 1 - 1 / u,
        "js": torch.log(2 * u / (1 + u)),
        "alpha": (u ** (alpha - 1) - 1) / (alpha - 1) if alpha != 1 else torch.log(u),
    }[divergence] / counts
    if link in ("aot", "aot_unpaired"):
        c, r = gain[pairs[:, 0]], gain[pairs[:, 1]]
        if link == "aot":
            ahead, before = ((x / counts)[pairs[:, 0]] - (x / counts)[pairs[:, 1]] for x in (policy, reference))
            c, r = ahead, before
        order = lambda x: torch.stack([x[i] for i in sorted(range(len(x)), key=x.tolist().__getitem__)])
        scores = [(a, b) for a, b in zip(order(c), order(r))]
    else:
        scores = [(gain[chosen], gain[rejected]) for chosen, rejected in pairs.tolist()]
    return torch.stack([_link(link, c, r, beta, label_smoothing, tau) for c, r in scores])


def _link(link, c, r, beta, e, tau):
    s = lambda x: 1 / (1 + torch.exp(-x))
    m = beta * (c - r)
    if link in ("sigmoid", "aot", "aot_unpaired"):
        return -(1 - e) * torch.log(s(m)) - e * torch.log(1 - s(m))
    if link == "robust":
        return (-(1 - e) * torch.log(s(m)) + e * torch.log(1 - s(m))) / (1 - 2 * e)
    if link == "exo":
        return s(m) * torch.log(s(m) / (1 - e)) + (1 - s(m)) * torch.log((1 - s(m)) / e)
    if link == "discopop":
        return torch.log(1 + torch.exp(-m)) * (1 - s(m / tau)) + torch.exp(-m) * s(m / tau)
    return {
        "hinge": lambda: where(m < 1, 1 - m, 0.0),
        "ipo": lambda: (c - r - 0.5 / beta) ** 2,
        "nca": lambda: -torch.log(s(beta * c)) - 0.5 * torch.log(1 - s(beta * c)) - 0.5 * torch.log(s(-beta * r)),
        "bco": lambda: -torch.log(s(beta * c)) - torch.log(1 - s(beta * r)),
        "sppo": lambda: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - s(beta * c) + s(beta * r),
        "apo_down": lambda: s(beta * c) + 1 - s(m),
    }[link]()


def cpo(logprob, segments, pairs, *, beta=0.1, link="sigmoid", label_smoothing=0.0, average=False):
    x = _per_segment(segments, logprob, "mean" if average else "sum")
    return torch.stack([_link(link, x[c], x[r], beta, label_smoothing, 0.05) for c, r in pairs.tolist()])


def simpo(logprob, segments, pairs, *, beta=2.0, gamma=0.5, label_smoothing=0.0, alpha=0.0):
    p = torch.exp(_per_segment(segments, logprob, "mean"))
    reward = beta * ((1 - p ** (-alpha)) / alpha if alpha else torch.log(p))
    wins = torch.stack([1 / (1 + torch.exp(gamma - reward[c] + reward[r])) for c, r in pairs.tolist()])
    return -(1 - label_smoothing) * torch.log(wins) - label_smoothing * torch.log(1 - wins)


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


def kto(
    logprob, ref_logprob, segments, desirable, kl=None,
    *, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0, average=False,
):  # fmt: skip
    z0 = 0.0 if kl is None else kl
    reward = _per_segment(segments, logprob - ref_logprob, "mean" if average else "sum")
    value_good = 1 / (1 + torch.exp(-beta * (reward - z0)))
    value_bad = 1 / (1 + torch.exp(-beta * (z0 - reward)))
    return where(desirable.bool(), desirable_weight * (1 - value_good), undesirable_weight * (1 - value_bad))


FORMULAS = {
    fn.__name__: fn
    for fn in (
        grpo, gspo, gspo_token, cispo, cispo_sequence, sapo, sapo_sequence, gmpo, dppo, rloo, a2po, clip_cov, kl_cov,
        reinforce, kimi, topr, vespo, opd, kl_to_reference,
        kl_to_reference_sequence, dpo, cpo, simpo, orpo, kto,
    )
}  # fmt: skip
