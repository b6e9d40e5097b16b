"""Row weights for policy terms: corrections and masks that use several rows, or another policy.

    hl.Term(grpo, row_weight=hl.row_weights.truncate(2.0))  # sampler correction, token by token
    hl.Term(gspo, row_weight=drop_segments(0.5, 2.0))       # drop sequences on which the two policies differ too much
    hl.Term(grpo, row_weight=[truncate(2.0), off_policy_mask(0.1), "loss_mask"])  # several multiply

Each factory returns a plain function with the parameters of a loss; it is never differentiated.  Its numbers are
captured floats, so equal weights share one trace.  It returns the weight and metrics, which come back under names such
as `rl/truncated/cut_fraction`; your own functions may return the weight alone.

The sampler weight of a token is w = exp(old_logprob - sampler_logprob): `sampler_logprob` comes from the engine that
generated the text, `old_logprob` from the trainer's copy of the same policy (by default, the policy of this call).
`level` says which w is used:

    "token"          the token's own
    "segment"        that of its whole segment: the product of its tokens' w
    "segment_mean"   the same, length-normalised: their geometric mean

A token that the sampler could not score (NaN) counts as w = 1.  A weight of 0 leaves a token out: no NaN or inf in its
loss reaches the sum, a gradient or the term's metrics.  It still counts in the normaliser (except with
`reduction="weighted_mean"`), and in sums that the loss itself takes over segments; a target of -100 removes it from
everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from headloss.segments import Segments

T = TypeVar("T")
WeightAndMetrics = tuple[Tensor, dict[str, Tensor]]
LEVELS = ("token", "segment", "segment_mean")


def truncate(high: float, low: float = 0.0, *, level: str = "token") -> Callable[..., WeightAndMetrics]:
    """min(w, high), and at least `low`: truncated importance sampling (Yao et al. 2025)."""
    low, high = _range(low, high)

    def truncated(drift: Tensor, segments: Segments | None) -> WeightAndMetrics:
        w = _ratio(drift, segments, level)
        return _reported(w.clamp(low, high), w, low, high, drift)

    return _of_drift(truncated, _check_level(level) != "token")


def band(low: float, high: float, *, level: str = "token") -> Callable[..., WeightAndMetrics]:
    """w inside [low, high], 0 outside: masked importance sampling (IcePop, 2025)."""
    low, high = _range(low, high)

    def banded(drift: Tensor, segments: Segments | None) -> WeightAndMetrics:
        w = _ratio(drift, segments, level)
        return _reported(w * ((w >= low) & (w <= high)).to(w.dtype), w, low, high, drift)

    return _of_drift(banded, _check_level(level) != "token")


def drop_segments(low: float, high: float, *, level: str = "segment_mean") -> Callable[..., WeightAndMetrics]:
    """1 for every token of a segment whose w lies in [low, high], 0 for the others: rejection of whole sequences.

    With level "token", one token whose w lies outside drops its segment.
    """
    low, high = _range(low, high)
    _check_level(level)

    def kept(drift: Tensor, segments: Segments) -> WeightAndMetrics:
        w = _ratio(drift, segments, level)
        out = ((w < low) | (w > high)).to(w.dtype)
        kept = 1 - out if level != "token" else (segments.mean(out) == 0).to(w.dtype)
        return kept, {"cut_fraction": kept == 0, **_mismatch(drift, w)}

    return _of_drift(kept, True)


def reject(
    high: float, low: float = -math.inf, *, estimator: str = "k1", level: str = "token", reverse: bool = False
) -> Callable[..., WeightAndMetrics]:
    """1 where the estimate of KL(sampler || trainer) lies in [low, high], 0 elsewhere: a hard trust region.

    With d = log w, token by token:

    estimator   "k1" is -d, "k2" d^2 / 2, "k3" e^d - 1 - d
    reverse     estimate KL(trainer || sampler): -d in place of d
    level       "token": each token's own; or one for all tokens of a segment: "segment" its sum, "segment_mean" its
                mean, "segment_max" its largest
    """
    if math.isnan(high) or not low <= high:
        raise ValueError(f"low, high: wanted low <= high, got {low} and {high}")
    if estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"estimator: wanted 'k1', 'k2' or 'k3', got {estimator!r}")
    _check_level(level, (*LEVELS, "segment_max"))
    low, high, sign = float(low), float(high), -1.0 if reverse else 1.0

    def kept(drift: Tensor, segments: Segments) -> WeightAndMetrics:
        d = sign * drift
        kl = -d if estimator == "k1" else d * d / 2 if estimator == "k2" else d.expm1() - d
        if level == "segment_max":
            above, below = segments.mean((kl > high).to(kl.dtype)), segments.mean((kl < low).to(kl.dtype))
            return _mask((above == 0) & (below < 1), drift)
        if level != "token":
            kl = segments.spread(segments.totals(kl) if level == "segment" else segments.means(kl))
        return _mask((kl >= low) & (kl <= high), drift)

    return _of_drift(kept, level != "token")


def second_moment(most: float) -> Callable[..., WeightAndMetrics]:
    """1 for as many tokens of this call with the smallest (log w)^2 as keep its mean below `most`, 0 for the others:
    the second moment of the ratio as a trust region (M2PO, Zheng et al. 2025).  Keeps at least one token.
    """
    if not most > 0:
        raise ValueError(f"most: wanted most > 0, got {most}")
    most = float(most)

    def calm(drift: Tensor, segments: None) -> WeightAndMetrics:
        square = drift**2
        if square.numel() == 0:
            return _mask(square == 0, drift)
        rising = square.sort().values
        means = rising.cumsum(0) / torch.ones_like(rising).cumsum(0)  # rising too
        last = ((means < most).sum() - 1).clamp(min=0)
        return _mask(square <= rising.gather(0, last[None]), drift)

    return _of_drift(calm, False)


def wpo() -> Callable[..., Tensor]:
    """For each pair, w of its chosen times w of its rejected segment, w = exp(mean of logprob - log sum_j p_j^2).
    Pairs that the policy would rarely sample count less (WPO, Zhou et al. 2024).  For losses of pairs, such as dpo.
    """

    def likely_pairs(logprob: Tensor, sum_p2: Tensor, segments: Segments, pairs: Tensor) -> Tensor:
        w = segments.means((logprob - sum_p2.log()).detach()).exp()
        return w.index_select(0, pairs[:, 0]) * w.index_select(0, pairs[:, 1])

    likely_pairs.__dict__["per_segment"] = ()
    return likely_pairs


def off_policy_mask(most: float) -> Callable[..., WeightAndMetrics]:
    """0 for tokens of negative advantage in segments where mean(sampler_logprob - logprob) > most, else 1: do not
    learn from bad samples that the policy now rarely produces (DeepSeek-V3.2, 2025).

    Without `sampler_logprob`, `old_logprob` is used.
    """
    if not most >= 0:
        raise ValueError(f"most: wanted most >= 0, got {most}")
    most = float(most)

    @_by_row
    def on_policy(
        logprob: Tensor,
        advantage: Tensor,
        segments: Segments,
        old_logprob: Tensor | None = None,
        sampler_logprob: Tensor | None = None,
    ) -> WeightAndMetrics:
        first = sampler_logprob if sampler_logprob is not None else old_logprob
        drift = torch.zeros_like(logprob) if first is None else (first - logprob.detach()).nan_to_num(nan=0.0)
        out = (advantage < 0) & (segments.mean(drift) > most)
        return 1 - out.to(logprob.dtype), {"cut_fraction": out}

    return on_policy


def top_entropy(fraction: float) -> Callable[..., WeightAndMetrics]:
    """1 for the given fraction of this call's tokens with the highest entropy, 0 for the others (Wang et al. 2025)."""
    fraction = float(fraction)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction: wanted a number in (0, 1], got {fraction}")

    @_by_row
    def high_entropy(entropy: Tensor) -> WeightAndMetrics:
        if entropy.numel() == 0:
            return torch.ones_like(entropy), {"cut_fraction": torch.zeros_like(entropy)}
        kept = (entropy >= entropy.detach().quantile(1 - fraction)).to(entropy.dtype)
        return kept, {"cut_fraction": kept == 0}

    return high_entropy


def likely(low: float, high: float = 1.0) -> Callable[..., WeightAndMetrics]:
    """1 for tokens whose probability lies in [low, high], 0 for the others: fine-tuning without tokens that
    the model finds unlikely (ProFit, Liu et al. 2026), or with `high` without those it already finds likely.
    """
    low, high = _range(low, high)

    @_by_row
    def likely_tokens(logprob: Tensor) -> WeightAndMetrics:
        p = logprob.detach().exp()
        out = (p < low) | (p > high)
        return 1 - out.to(p.dtype), {"cut_fraction": out}

    return likely_tokens


def settled(fraction: float, *, by: str = "either") -> Callable[..., WeightAndMetrics]:
    """0 for the given fraction of this call's tokens with the highest entropy, and for as many with the highest KL(p ||
    q) from the teacher, else 1: fine-tuning that skips tokens where the model is unsure or has moved away from its
    reference (EKSFT, Liu et al. 2026).

    by   "either": leave out tokens in either group; "both": only tokens in both
    """
    fraction = float(fraction)
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction: wanted a number in [0, 1], got {fraction}")
    if by not in ("either", "both"):
        raise ValueError(f"by: wanted 'either' or 'both', got {by!r}")

    @_by_row
    def settled_tokens(entropy: Tensor, reverse_cross_entropy: Tensor, shared_entropy: Tensor) -> WeightAndMetrics:
        rows = torch.ones_like(entropy, dtype=torch.float64).sum()
        unsure, moved = (
            x.detach().argsort(descending=True).argsort() < (fraction * rows).floor()
            for x in (entropy, reverse_cross_entropy - shared_entropy)
        )
        out = unsure | moved if by == "either" else unsure & moved
        return 1 - out.to(entropy.dtype), {"cut_fraction": out}

    return settled_tokens


def _by_row(fn: Callable[..., T]) -> Callable[..., T]:
    """Declare that all inputs of `fn` have one value per row; see `headloss.engine.layout`."""
    fn.__dict__["per_segment"] = ()
    return fn


def _of_drift(make: Callable[[Tensor, Any], WeightAndMetrics], by_segment: bool) -> Callable[..., WeightAndMetrics]:
    """The row weight that `make` computes from log w and, if `by_segment`, from the segments."""

    @_by_row
    def of_tokens(logprob: Tensor, sampler_logprob: Tensor, old_logprob: Tensor | None = None) -> WeightAndMetrics:
        return make(_drift(logprob, sampler_logprob, old_logprob), None)

    @_by_row
    def of_segments(
        logprob: Tensor, sampler_logprob: Tensor, segments: Segments, old_logprob: Tensor | None = None
    ) -> WeightAndMetrics:
        return make(_drift(logprob, sampler_logprob, old_logprob), segments)

    weight = of_segments if by_segment else of_tokens
    weight.__name__ = f"{make.__name__}_segments" if by_segment else make.__name__  # its metrics' names begin with it
    return weight


def _reported(weight: Tensor, w: Tensor, low: float, high: float, drift: Tensor) -> WeightAndMetrics:
    """A weight computed from w and its bounds, and the metrics that trainers log about it."""
    metrics = {
        "weight_mean": weight,
        "weight_min": weight,
        "weight_max": weight,
        "effective_sample_size": weight,
        "cut_fraction": (w < low) | (w > high),
    }
    return weight, metrics | _mismatch(drift, w)


def _mask(kept: Tensor, drift: Tensor) -> WeightAndMetrics:
    return kept.to(drift.dtype), {"cut_fraction": ~kept, **_mismatch(drift, drift.exp())}


def _mismatch(drift: Tensor, w: Tensor) -> dict[str, Tensor]:
    """How far apart sampler and trainer are: w before it is cut, and what trainers log per token
    (`integrations.names`).

    k1 and k3 estimate KL(sampler || trainer), k3_reverse KL(trainer || sampler), and js the Jensen-Shannon divergence,
    from k3 of both to their mean; chi2 is the mean of w^2 - 1.
    """
    mean = math.log(2) - (-drift).exp().log1p()  # log(trainer's probability / mean of both)
    return {
        "sampler_ratio_mean": w,
        "sampler_ratio_min": w,
        "sampler_ratio_max": w,
        "gap_mean": drift.abs(),
        "gap_max": drift.abs(),
        "gap_factor": drift.abs().exp(),
        "off_by": drift.expm1().abs(),
        "drift": drift,
        "k1": -drift,
        "k3": drift.expm1() - drift,
        "k3_reverse": (-drift).expm1() + drift,
        "js": ((mean.expm1() - mean) + ((mean - drift).expm1() - (mean - drift))) / 2,
        "chi2": (2 * drift).expm1(),
    }


def _drift(logprob: Tensor, sampler_logprob: Tensor, old_logprob: Tensor | None) -> Tensor:
    """log w, clamped to +-20 like the ratios of policies."""
    old = logprob.detach() if old_logprob is None else old_logprob
    return (old - sampler_logprob).nan_to_num(nan=0.0).clamp(-20.0, 20.0)


def _ratio(drift: Tensor, segments: Segments | None, level: str) -> Tensor:
    """w at this level."""
    if level == "token" or segments is None:
        return drift.exp()
    whole = segments.totals(drift) if level == "segment" else segments.means(drift)
    return segments.spread(whole.clamp(-20.0, 20.0)).exp()


def _check_level(level: str, known: tuple[str, ...] = LEVELS) -> str:
    if level not in known:
        raise ValueError(f"level: wanted one of {', '.join(known)}, got {level!r}")
    return level


def _range(low: float, high: float) -> tuple[float, float]:
    if not 0 <= low <= high:
        raise ValueError(f"low, high: wanted 0 <= low <= high, got {low} and {high}")
    return float(low), float(high)
