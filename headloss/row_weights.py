"""Row weights for policy terms: corrections and masks that need more than one row, or another policy's opinion.

    hl.Term(grpo, row_weight=truncate(2.0))            # sampler correction, token by token
    hl.Term(gspo, row_weight=drop_segments(0.5, 2.0))  # leave out sequences the sampler saw too differently
    hl.Term(grpo, row_weight=[truncate(2.0), off_policy_mask(0.1), "loss_mask"])  # several multiply

Each factory returns a plain function that is injected like a loss and never differentiated.  Its numbers are captured
floats, so equal weights share one trace.

The sampler's weight of a token is w = exp(old_logprob - sampler_logprob): `sampler_logprob` comes from the engine that
generated, `old_logprob` from the trainer's copy of the same policy (without it, the policy of this call).  `level` says
whose w is meant:

    "token"          the token's own
    "segment"        that of its whole segment: the product of its tokens' w
    "segment_mean"   the same, length-normalised: their geometric mean

A token the sampler could not score (NaN) counts as w = 1.  A weight of 0 leaves a token out: no NaN or inf that the
loss makes of it reaches the sum, a gradient or the term's metrics.  It still counts in the normaliser (with
`reduction="weighted_mean"` it does not), and in sums that the loss itself takes over segments; target -100 takes it
out of everything.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headloss.segments import Segments

LEVELS = ("token", "segment", "segment_mean")


def truncate(high: float, low: float = 0.0, *, level: str = "token") -> Callable[..., Tensor]:
    """min(w, high), and at least `low`: truncated importance sampling (Yao et al. 2025)."""
    low, high = _range(low, high)
    if _level(level) == "token":

        @_by_row
        def truncated(logprob: Tensor, sampler_logprob: Tensor, old_logprob: Tensor | None = None) -> Tensor:
            return _drift(logprob, sampler_logprob, old_logprob).exp().clamp(low, high)

        return truncated

    @_by_row
    def truncated_segments(
        logprob: Tensor, sampler_logprob: Tensor, segments: Segments, old_logprob: Tensor | None = None
    ) -> Tensor:
        return _of_segment(_drift(logprob, sampler_logprob, old_logprob), segments, level).exp().clamp(low, high)

    return truncated_segments


def band(low: float, high: float, *, level: str = "token") -> Callable[..., Tensor]:
    """w inside [low, high], 0 outside: masked importance sampling (IcePop, 2025)."""
    low, high = _range(low, high)
    if _level(level) == "token":

        @_by_row
        def banded(logprob: Tensor, sampler_logprob: Tensor, old_logprob: Tensor | None = None) -> Tensor:
            w = _drift(logprob, sampler_logprob, old_logprob).exp()
            return w * ((w >= low) & (w <= high)).to(w.dtype)

        return banded

    @_by_row
    def banded_segments(
        logprob: Tensor, sampler_logprob: Tensor, segments: Segments, old_logprob: Tensor | None = None
    ) -> Tensor:
        w = _of_segment(_drift(logprob, sampler_logprob, old_logprob), segments, level).exp()
        return w * ((w >= low) & (w <= high)).to(w.dtype)

    return banded_segments


def drop_segments(low: float, high: float, *, level: str = "segment_mean") -> Callable[..., Tensor]:
    """1 for every token of a segment whose w lies in [low, high], 0 for the others: rejection of whole sequences.

    With level "token" a segment falls as soon as one of its tokens' w lies outside.
    """
    low, high = _range(low, high)
    _level(level)

    @_by_row
    def kept_segments(
        logprob: Tensor, sampler_logprob: Tensor, segments: Segments, old_logprob: Tensor | None = None
    ) -> Tensor:
        drift = _drift(logprob, sampler_logprob, old_logprob)
        w = (drift if level == "token" else _of_segment(drift, segments, level)).exp()
        out = ((w < low) | (w > high)).to(w.dtype)
        return 1 - out if level != "token" else (segments.mean(out) == 0).to(w.dtype)

    return kept_segments


def off_policy_mask(most: float) -> Callable[..., Tensor]:
    """0 for tokens of negative advantage in segments where mean(sampler_logprob - logprob) > most, else 1: bad samples
    that the policy would hardly give any more are not learned from (DeepSeek-V3.2, 2025).

    Without `sampler_logprob` the old policy stands for the sampler.
    """
    most = float(most)

    @_by_row
    def on_policy(
        logprob: Tensor,
        advantage: Tensor,
        segments: Segments,
        old_logprob: Tensor | None = None,
        sampler_logprob: Tensor | None = None,
    ) -> Tensor:
        first = sampler_logprob if sampler_logprob is not None else old_logprob
        drift = torch.zeros_like(logprob) if first is None else (first - logprob.detach()).nan_to_num(nan=0.0)
        return 1 - ((advantage < 0) & (segments.mean(drift) > most)).to(logprob.dtype)

    return on_policy


def top_entropy(fraction: float) -> Callable[..., Tensor]:
    """1 for the given fraction of this call's tokens with the highest entropy, 0 for the others (Wang et al. 2025)."""
    fraction = float(fraction)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction: wanted a number in (0, 1], got {fraction}")

    @_by_row
    def high_entropy(entropy: Tensor) -> Tensor:
        if entropy.numel() == 0:
            return torch.ones_like(entropy)
        return (entropy >= entropy.detach().quantile(1 - fraction)).to(entropy.dtype)

    return high_entropy


def _by_row(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """All its inputs have one value per row; see `headloss.engine.layout`."""
    fn.__dict__["per_segment"] = ()
    return fn


def _drift(logprob: Tensor, sampler_logprob: Tensor, old_logprob: Tensor | None) -> Tensor:
    """log w, held within +-20 as the policies' ratios are."""
    old = logprob.detach() if old_logprob is None else old_logprob
    return (old - sampler_logprob).nan_to_num(nan=0.0).clamp(-20.0, 20.0)


def _of_segment(drift: Tensor, segments: Segments, level: str) -> Tensor:
    whole = segments.totals(drift) if level == "segment" else segments.means(drift)
    return segments.spread(whole.clamp(-20.0, 20.0))


def _level(level: str) -> str:
    if level not in LEVELS:
        raise ValueError(f"level: wanted one of {', '.join(LEVELS)}, got {level!r}")
    return level


def _range(low: float, high: float) -> tuple[float, float]:
    if not 0 <= low <= high:
        raise ValueError(f"low, high: wanted 0 <= low <= high, got {low} and {high}")
    return float(low), float(high)
