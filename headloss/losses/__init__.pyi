"""Losses: plain functions of facts.  Made by `make docs` from the files in this folder; do not edit."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headloss.segments import Segments

LOSSES: dict[str, Callable[..., Any]]

def cispo(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None, *, high: float = 5.0) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(min(r, high)) A logprob, r = exp(logprob - old): the weight is clipped, no token loses its gradient
    (MiniMax-M1, 2025; high = 5 as in Khatri et al. 2025).  Here `high` bounds r itself, not r - 1."""

def cross_entropy(logprob: Tensor, mean_logprob: Tensor, *, label_smoothing: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """-log p[y]; with label smoothing e, -(1 - e) log p[y] - e mean_j log p[j] (Szegedy et al. 2016)."""

def dft(logprob: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(p[y]) log p[y]: cross-entropy weighted by the token's probability, dynamic fine-tuning (Wu et al. 2025)."""

def dpo(logprob: Tensor, ref_logprob: Tensor, segments: Segments, pairs: Tensor, *, beta: float = 0.1, link: str = 'sigmoid', label_smoothing: float = 0.0, average: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """One value a pair of segments, m = how much more than the reference the policy prefers the chosen one:

    link "sigmoid"   -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), e = label_smoothing (Rafailov et al. 2023)
    link "ipo"       (m - 1 / (2 beta))^2 (Azar et al. 2024)

    m is the difference of the segments' totals of logprob - ref_logprob; with `average`, of their means (which is how
    IPO is usually run).  `pairs` (P, 2) holds the chosen and the rejected segment's number."""

def dppo(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None, *, divergence: str = 'tv', low: float = 0.2, high: float = 0.2, cap: float = 20.0) -> tuple[Tensor, dict[str, Tensor]]:
    """-A sg(min(r, cap)) logprob on the tokens whose probability p has not left the trust region on the side A pushes
    to; the rest give nothing (arXiv:2602.04879).  Out means p > old and D > high where A > 0, p < old and D > low
    where A < 0.

    divergence   "tv": D = |p - old|; "kl": D = old log(old / p) + (1 - old) log((1 - old) / (1 - p))"""

def entropy_bonus(entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-H(p): a positive weight rewards entropy (Williams & Peng 1991)."""

def focal(logprob: Tensor, *, gamma: float = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
    """-(1 - p[y])^gamma log p[y]: easy tokens count less (Lin et al. 2017)."""

def forward_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(q || p) = sum_j q_j (log q_j - log p_j): the student covers what the teacher does (Hinton et al. 2015)."""

def gmpo(logprob: Tensor, advantage: Tensor, segments: Segments, old_logprob: Tensor | None = None, *, low: float = 0.4, high: float = 0.4, signed: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """-A exp(mean over the segment of c), c = sgn(A) min(sgn(A) d, sgn(A) clip(d, -low, high)), d = logprob - old: the
    geometric mean of token ratios that were clipped one by one (Zhao et al. 2025).  The paper's tokens share A.

    signed   the authors' caps, sgn(A) clip(sgn(A) d, -low, high): `high` then bounds d where A < 0 too, as -high.
             verl's, the default, bounds it there by -low.  They differ where low and high do

    Both take the mean over sequences: reduce by seq_mean_token_mean."""

def grpo(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None, *, low: float = 0.2, high: float = 0.2, dual: float | None = None, delta: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - old): clipped policy gradient with group-relative
    advantages (Schulman et al. 2017, Shao et al. 2024).  Without `old_logprob` it is on-policy.

    dual    c > 1: at most -c A where A < 0 (Ye et al. 2020)
    delta   two-sided: r is at most delta > 1 + high (INTELLECT-2, 2025)

    Its relatives are reductions: GRPO seq_mean_token_mean; BNPO token_mean; DAPO token_mean with the global
    `num_items` (Yu et al. 2025); Dr. GRPO seq_mean_token_sum_norm with length = the longest response (Liu et al. 2025)."""

def gspo(logprob: Tensor, advantage: Tensor, segments: Segments, old_logprob: Tensor | None = None, *, low: float = 0.0003, high: float = 0.0004) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the segment of logprob - old), A = mean over the
    segment of the advantage: ratio and advantage of whole sequences, length-normalised (Zheng et al. 2025).  A is a
    constant.  Where tokens of a segment have advantages of their own, gspo_token is the loss.

    GSPO reduces by seq_mean_token_mean; LUSPO (arXiv:2602.05261) is seq_mean_token_sum."""

def gspo_token(logprob: Tensor, advantage: Tensor, segments: Segments, old_logprob: Tensor | None = None, *, low: float = 0.0003, high: float = 0.0004) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(logprob - sg(logprob) + sg(segment mean of logprob - old)): the
    value of gspo where tokens share A, while each token's advantage moves that token alone (Zheng et al. 2025, eq. 14)."""

def jsd(logp: Tensor, logq: Tensor, *, beta: float = 0.5) -> Tensor:
    """beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p, for 0 < beta < 1: generalised Jensen-Shannon
    (Agarwal et al. 2024).  Its ends are 0, not the two KLs, so they are refused."""

def kimi(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None, *, beta: float = 0.1) -> tuple[Tensor, dict[str, Tensor]]:
    """-A logprob + beta / 2 d^2, d = logprob - old: a squared step in place of a clip (Kimi k1.5, 2025; DRO, Richemond
    et al. 2024), token by token."""

def kl_to_reference(logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None, *, estimator: str = 'k3', corrected: bool = False, bound: float | None = None) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """An estimate of KL(policy || reference) from the sampled tokens (Schulman 2020), with x = ref_logprob - logprob:

    estimator   "k1": -x    "k2", "mse": x^2 / 2    "k3": e^x - x - 1    "abs": |x|    "low_var": k3 with bound 10
                "k1+", "k2+", "k3+", "abs+", "low_var+": that value, with the gradient of k2
    corrected   multiplies by r = exp(logprob - old), which makes the gradient that of the KL itself (DeepSeek-V3.2)
    bound       clamps the estimate to [-bound, bound]; there is no gradient outside

    As a loss, plain k1 has a gradient of mean 0 and plain k3 a biased one; k2's is right on-policy."""

def kl_to_reference_sequence(logprob: Tensor, ref_logprob: Tensor, segments: Segments, old_logprob: Tensor | None = None, *, estimator: str = 'k3', bound: float | None = None) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """kl_to_reference, corrected by the ratio of the whole sequence: s kl, s = exp(mean over the segment of
    logprob - old).

    In trainers: TRL use_bias_correction_kl with importance_sampling_level="sequence"."""

def kto(logprob: Tensor, ref_logprob: Tensor, segments: Segments, desirable: Tensor, kl: Tensor | None = None, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """One value per segment, with g = total of logprob - ref_logprob: w_d (1 - sigmoid(beta (g - kl))) if the segment
    is `desirable`, else w_u (1 - sigmoid(beta (kl - g))) (Ethayarajh et al. 2024).

    desirable   (S,) flags: no pairs are needed
    kl          a scalar: the batch's estimate of KL(policy || reference), at least 0; 0 if it is not given"""

def orpo(logprob: Tensor, segments: Segments, pairs: Tensor, *, beta: float = 0.1, nll: str = 'sequence') -> tuple[Tensor, dict[str, Tensor]]:
    """-chosen - beta log sigmoid(odds(chosen) - odds(rejected)), on the segments' means x of logprob, with the log odds
    odds(x) = x - log(1 - e^x): fine-tuning on the chosen one and an odds ratio, without a reference (Hong et al. 2024).
    `pairs` (P, 2) holds the chosen and the rejected segment's number.

    nll   "sequence": the mean of each chosen segment, so that pairs count alike    "token": the mean over the tokens of
          all chosen segments of the call, as most trainers have it    "none": the odds term alone"""

def reinforce(logprob: Tensor, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-A logprob (Williams 1992); with group-relative advantages this is GPG (Chu et al. 2025)."""

def reverse_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(p || q) = sum_j p_j (log p_j - log q_j): the student seeks the teacher's modes (Gu et al. 2024).  With a
    reference policy as the teacher it is the exact KL penalty of reinforcement learning."""

def sapo(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> tuple[Tensor, dict[str, Tensor]]:
    """-A sigmoid(tau (r - 1)) 4 / tau, r = exp(logprob - old), tau = tau_pos where A > 0, else tau_neg: a soft gate in
    place of the clip, whose slope at r = 1 is 1 (Gao et al. 2025)."""

def simpo(logprob: Tensor, segments: Segments, pairs: Tensor, *, beta: float = 2.0, gamma: float = 0.5) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigmoid(beta (chosen - rejected) - gamma) on the segments' means of logprob: no reference, a margin gamma
    instead (Meng et al. 2024).  `pairs` (P, 2) holds the chosen and the rejected segment's number."""

def skew_kl(logp: Tensor, logq: Tensor, *, alpha: float = 0.1) -> Tensor:
    """KL(q || alpha q + (1 - alpha) p), 0 <= alpha < 1: a forward KL that stays finite (Ko et al. 2024)."""

def soft_cross_entropy(logp: Tensor, logq: Tensor) -> Tensor:
    """-sum_j q_j log p_j: cross-entropy to the teacher's distribution, or to weighted or sampled labels, whose weights
    need not sum to 1 (tail="none")."""

def topr(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """-A logprob where A > 0, -sg(min(r, 1)) A logprob elsewhere, r = exp(logprob - old): what was good is imitated,
    what was bad is left alone once it has become unlikely (Le Roux et al. 2025), token by token."""

def tvd(logp: Tensor, logq: Tensor) -> Tensor:
    """sum_j |p_j - q_j| / 2: total variation distance (Wen et al. 2023)."""

def vespo(logprob: Tensor, advantage: Tensor, segments: Segments, old_logprob: Tensor | None = None, *, k_pos: float = 2.0, lam_pos: float = 3.0, k_neg: float = 3.0, lam_neg: float = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(phi) A logprob, phi = exp(lam + k log w - lam w), w = exp(total over the segment of logprob - old): a smooth
    weight on the ratio of whole sequences, 1 at w = 1 (arXiv:2602.10693).  (k, lam) are the `_pos` ones where A >= 0."""

def z_loss(lse: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """lse^2: keeps the softmax's normaliser near 1 (Chowdhery et al. 2022)."""
