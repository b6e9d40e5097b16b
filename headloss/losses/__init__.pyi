"""Losses: plain functions of facts.  Made by `make docs` from the files in this folder; do not edit."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headloss.segments import Segments

LOSSES: dict[str, Callable[..., Any]]

def a2po(logprob: Tensor, ref_logprob: Tensor, segments: Segments, optimal_advantage: Tensor, *, beta: float = 0.001) -> tuple[Tensor, dict[str, Tensor]]:
    """(beta g - A*)^2 per segment, g = total of logprob - ref_logprob: the implicit reward is regressed onto the
    optimal advantage A* (A*-PO, Brantley et al. 2025).

    optimal_advantage   (S,): the reward minus V*, with V* = b log mean exp(reward / b) over samples of the reference

    In trainers: TRL A2POTrainer, whose beta2 is `beta` and whose beta1 is b."""

def cispo(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None, *, low: float = 0.0, high: float = 5.0) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(r, low, high)) A logprob, r = exp(logprob - old): the weight is clipped, no token loses its gradient
    (MiniMax-M1, 2025; high = 5 as in Khatri et al. 2025).  Here `low` and `high` bound r itself, not r - 1.

    In trainers: TRL cispo; verl cispo, slime cispo and NeMo-RL use_cispo, whose bounds are 1 - low and 1 + high."""

def cispo_sequence(logprob: Tensor, advantage: Tensor, segments: Segments, old_logprob: Tensor | None = None, *, low: float = 0.0, high: float = 5.0) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(s, low, high)) A logprob, s = exp(mean over the segment of logprob - old): cispo with the ratio of the
    whole sequence.

    In trainers: TRL cispo with importance_sampling_level="sequence"."""

def clip_cov(logprob: Tensor, advantage: Tensor, draw: Tensor, old_logprob: Tensor | None = None, *, low: float = 0.2, high: float = 0.2, fraction: float = 0.0002, least: float = 1.0, most: float = 5.0) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - old), but 0 for a few tokens drawn from those with
    least < c < most, c = (A - mean A) (logprob - mean logprob): these lower the entropy most (Cui et al. 2025).

    draw       one random number per row, torch.rand of the targets' shape; the candidates with the smallest are taken
    fraction   the share of this call's rows that is taken, at least one row; clipped rows are no candidates

    In trainers: verl clip_cov, which samples inside the loss."""

def cosine(logit_dot: Tensor, logit_square: Tensor, teacher_logit_square: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """1 - cos(z, u): the angle between the student's and the teacher's logits, over the columns that both have.  A
    temperature does not change it, one number added to all logits does; a logit of -inf makes it NaN.

    In trainers: Liger LigerFusedLinearCosineSimilarityLoss, whose beta is the weight."""

def cpo(logprob: Tensor, segments: Segments, pairs: Tensor, *, beta: float = 0.1, link: str = 'sigmoid', label_smoothing: float = 0.0, average: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), m = chosen - rejected on the segments' totals of logprob,
    e = label_smoothing: preference without a reference (Xu et al. 2024).

    link      "hinge": max(0, 1 - beta m); "ipo": (m - 1 / (2 beta))^2; and the others of `dpo` that take m
    average   the segments' means in place of their totals

    Its likelihood of the chosen is another term, cross_entropy with a row weight of 1 on the chosen segments' tokens.
    `pairs` (P, 2) holds the chosen and the rejected segment's number.

    In trainers: TRL CPOTrainer and TPOTrainer: sigmoid, hinge, ipo (with average=True); axolotl rl: cpo."""

def cross_entropy(logprob: Tensor, mean_logprob: Tensor, class_weight: Tensor | None = None, class_mean: Tensor | None = None, class_cross_entropy: Tensor | None = None, *, label_smoothing: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """-log p[y]; with label smoothing e, -(1 - e) log p[y] - e mean_j log p[j] (Szegedy et al. 2016).

    class_weight   w (V,), an input of the call: -(1 - e) w[y] log p[y] - e mean_j w[j] log p[j], as in torch; for
                   torch's mean, which divides by the sum of w[y], use `reduction="weighted_mean"`

    In trainers: torch.nn.functional.cross_entropy(weight=, label_smoothing=); Liger ce_weight."""

def deft(logprob: Tensor, sum_p2: Tensor, *, alpha: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """(1 - p[y]^a) / a, a = sg(sum_j p_j^2): like -log p[y] where the model is unsure, like 1 - p[y] where it is sure
    (Wang et al. 2026).

    alpha   a fixed a, 0 < alpha <= 1; near 0 it is cross-entropy, 1 is 1 - p[y]"""

def dft(logprob: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(p[y]) log p[y]: cross-entropy weighted by the token's probability, dynamic fine-tuning (Wu et al. 2025)."""

def dpo(logprob: Tensor, ref_logprob: Tensor, segments: Segments, pairs: Tensor, length_weight: Tensor | None = None, *, beta: float = 0.1, link: str = 'sigmoid', label_smoothing: float = 0.0, average: bool = False, divergence: str = 'reverse_kl', alpha: float = 0.5, tau: float = 0.05) -> tuple[Tensor, dict[str, Tensor]]:
    """One value per pair, from the gains c, r of its chosen and rejected segment, m = c - r, e = label_smoothing:

    link "sigmoid"    -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m) (Rafailov et al. 2023)
    link "hinge"      max(0, 1 - beta m) (SLiC, Zhao et al. 2023)
    link "ipo"        (m - 1 / (2 beta))^2 (Azar et al. 2024)
    link "robust"     (-(1 - e) log sigmoid(beta m) + e log sigmoid(-beta m)) / (1 - 2 e) (Chowdhury et al. 2024)
    link "exo"        KL of (sigmoid(beta m), sigmoid(-beta m)) to (1 - e, e), e > 0 (Ji et al. 2024)
    link "discopop"   -(1 - w) log sigmoid(beta m) + w exp(-beta m), w = sigmoid(beta m / tau) (Lu et al. 2024)
    link "nca"        -log sigmoid(beta c) - (log sigmoid(-beta c) + log sigmoid(-beta r)) / 2 (Chen et al. 2024)
    link "bco"        -log sigmoid(beta c) - log sigmoid(-beta r) (Jung et al. 2024, without its shift)
    link "sppo"       (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2 (Wu et al. 2024, hard labels)
    link "apo_zero"   sigmoid(-beta c) + sigmoid(beta r); "apo_down": sigmoid(beta c) + sigmoid(-beta m) (APO, 2024)
    link "aot"        "sigmoid" of sorted policy margins minus sorted reference margins; "aot_unpaired": c and r

    A gain is the segment's total of logprob - ref_logprob; `pairs` (P, 2) holds the two segments' numbers.  WPO is
    `row_weights.wpo()`.

    length_weight   an input: how much each token counts in its total (LD-DPO, Liu et al. 2024)
    divergence      "forward_kl", "js", "alpha": f'(e^gain) in place of a gain, for the first six (Wang et al. 2024)
    average         gains are divided by the number of tokens, which is how IPO is usually run

    In trainers: TRL DPOTrainer: sigmoid_norm is average=True; its label_smoothing acts on robust, exo and aot alone."""

def dppo(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None, *, divergence: str = 'tv', low: float = 0.2, high: float = 0.2, cap: float | None = 20.0, form: str = 'score', one_sided: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """-A sg(min(r, cap)) logprob on tokens whose probability p has not left the trust region on the side that A pushes
    to, 0 elsewhere (arXiv:2602.04879).  Out means p > old and D > high where A > 0, p < old and D > low
    where A < 0.

    divergence   "tv": D = |p - old|; "kl": D = old log(old / p) + (1 - old) log((1 - old) / (1 - p))
    cap          None: no cap
    form         "ratio": -A min(r, cap), which has the same gradient below the cap
    one_sided    False: out means p > old and D > high, or p < old and D > low, for any A

    In trainers: verl dppo_tv, dppo_kl; prime-rl's default loss is form="ratio", cap=None, its ipo also one_sided=False."""

def eaft(logprob: Tensor, entropy: Tensor, top_logprob: Tensor | None = None, *, alpha: float = 1.0, unit: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg((H / unit)^alpha) log p[y], H = the entropy: tokens count less if the model is sure, right or wrong
    (Diao et al. 2026).  With `hl.Term(eaft, top=K)`, H is the entropy of a softmax over the K likeliest columns.

    unit   the entropy that counts as 1; the paper's is log K

    In trainers: axolotl use_eaft, with eaft_k as `top`."""

def entropy_bonus(entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-H(p): a positive weight rewards entropy (Williams & Peng 1991)."""

def focal(logprob: Tensor, *, gamma: float = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
    """-(1 - p[y])^gamma log p[y]: easy tokens count less (Lin et al. 2017)."""

def forward_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(q || p) = sum_j q_j (log q_j - log p_j): the student covers what the teacher does (Hinton et al. 2015)."""

def gmpo(logprob: Tensor, advantage: Tensor, segments: Segments, old_logprob: Tensor | None = None, *, low: float = 0.4, high: float = 0.4, signed: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """-A exp(mean over the segment of c), c = sgn(A) min(sgn(A) d, sgn(A) clip(d, -low, high)), d = logprob - old: the
    geometric mean of individually clipped token ratios (Zhao et al. 2025).  In the paper, tokens share A.

    signed   clip as the authors do, sgn(A) clip(sgn(A) d, -low, high): where A < 0, d is bounded by -high; by default
             it is bounded by -low there, as in verl

    Both take the mean over sequences: reduce by seq_mean_token_mean."""

def grpo(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None, *, low: float = 0.2, high: float = 0.2, dual: float | None = None, delta: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - old): clipped policy gradient with group-relative
    advantages (Schulman et al. 2017, Shao et al. 2024).  Without `old_logprob` it is on-policy.

    dual    c > 1: at most -c A where A < 0 (Ye et al. 2020)
    delta   two-sided: r is at most delta > 1 + high (INTELLECT-2, 2025)

    Its relatives are reductions: GRPO seq_mean_token_mean; BNPO token_mean; DAPO token_mean with the global
    `num_items` (Yu et al. 2025); Dr. GRPO seq_mean_token_sum_norm with length = the longest response (Liu et al. 2025).

    In trainers: TRL grpo, bnpo, dapo, dr_grpo; verl vanilla; slime, AReaL, OpenRLHF and NeMo-RL: the PPO loss."""

def gspo(logprob: Tensor, advantage: Tensor, segments: Segments, old_logprob: Tensor | None = None, *, low: float = 0.0003, high: float = 0.0004, dual: float | None = None, delta: float | None = None, own: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the segment of logprob - old), A = mean over the
    segment of the advantage: ratio and advantage of whole sequences, length-normalised (Zheng et al. 2025).  A is a
    constant.  Where tokens of a segment have advantages of their own, gspo_token is the paper's loss.

    dual    c > 1: at most -c A where A < 0
    delta   two-sided: s is at most delta > 1 + high
    own     A is each token's own, as TRL and NeMo-RL have it; AReaL takes the mean.  Where tokens share A, all agree

    GSPO reduces by seq_mean_token_mean; LUSPO (arXiv:2602.05261) is seq_mean_token_sum.

    In trainers: TRL, AReaL importance_sampling_level="sequence"; NeMo-RL sequence_level_importance_ratios; verl gspo is
    gspo_token."""

def gspo_token(logprob: Tensor, advantage: Tensor, segments: Segments, old_logprob: Tensor | None = None, *, low: float = 0.0003, high: float = 0.0004) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(logprob - sg(logprob) + sg(segment mean of logprob - old)): the
    value of gspo where tokens share A, while each token's advantage moves that token alone (Zheng et al. 2025, eq. 14)."""

def jsd(logp: Tensor, logq: Tensor, *, beta: float = 0.5) -> Tensor:
    """beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p, for 0 < beta < 1: generalised Jensen-Shannon
    (Agarwal et al. 2024).  At beta = 0 and 1 this is 0, neither of the two KLs, so both raise ValueError."""

def kimi(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None, *, beta: float = 0.1) -> tuple[Tensor, dict[str, Tensor]]:
    """-A logprob + beta / 2 d^2, d = logprob - old: a squared step in place of a clip (Kimi k1.5, 2025; DRO, Richemond
    et al. 2024), token by token."""

def kl_cov(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None, *, fraction: float = 0.0002, beta: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """-r A, r = exp(logprob - old), plus beta |logprob - old| on the few tokens of the largest
    (A - mean A) (logprob - mean logprob): these lower the entropy most and are held back (Cui et al. 2025).

    fraction   the share of this call's rows that is held back, at least one row

    In trainers: verl kl_cov, whose ppo_kl_coef is `beta`."""

def kl_to_reference(logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None, *, estimator: str = 'k3', corrected: bool = False, bound: float | None = None) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """An estimate of KL(policy || reference) from the sampled tokens (Schulman 2020), with x = ref_logprob - logprob:

    estimator "k1"       -x
    estimator "k2"       x^2 / 2; "mse" is the same
    estimator "k3"       e^x - x - 1
    estimator "abs"      |x|
    estimator "low_var"  k3 with bound 10
    estimator            a "+" after one of these, as in "k1+", keeps the value but has the gradient of k2
    corrected            multiplies by r = exp(logprob - old); its gradient is that of the KL itself (DeepSeek-V3.2)
    bound                clamps the estimate to [-bound, bound]; there is no gradient outside

    As a loss, plain k1 has a gradient of mean 0 and plain k3 a biased one; k2's is right on-policy."""

def kl_to_reference_sequence(logprob: Tensor, ref_logprob: Tensor, segments: Segments, old_logprob: Tensor | None = None, *, estimator: str = 'k3', bound: float | None = None) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """kl_to_reference, corrected by the ratio of the whole sequence: s kl, s = exp(mean over the segment of
    logprob - old).

    In trainers: TRL use_bias_correction_kl with importance_sampling_level="sequence"."""

def kto(logprob: Tensor, ref_logprob: Tensor, segments: Segments, desirable: Tensor, kl: Tensor | None = None, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0, average: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """One value per segment, with g = total of logprob - ref_logprob: w_d (1 - sigmoid(beta (g - kl))) if the segment
    is `desirable`, else w_u (1 - sigmoid(beta (kl - g))) (Ethayarajh et al. 2024).

    desirable   (S,) flags: no pairs are needed
    kl          a scalar: the batch's estimate of KL(policy || reference), at least 0; 0 if it is not given
    average     g is the mean in place of the total

    In trainers: TRL kto; apo_zero_unpaired is the same without `kl`; axolotl rl: kto."""

def opd(logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None, *, low: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(ref_logprob - logprob) r, r = exp(logprob - old): on-policy distillation: the advantage of a
    token is how much likelier the teacher finds it (Lu et al. 2025).  Its gradient is that of KL(policy || teacher).

    low   leaves out tokens whose probability has fallen by more than this since `old_logprob`; None: none

    In trainers: prime-rl's ref_kl component with low=0.2, next to its squared log-ratio."""

def orpo(logprob: Tensor, segments: Segments, pairs: Tensor, *, beta: float = 0.1, nll: str = 'sequence') -> tuple[Tensor, dict[str, Tensor]]:
    """-chosen - beta log sigmoid(odds(chosen) - odds(rejected)), on the segments' means x of logprob, with the log odds
    odds(x) = x - log(1 - e^x): fine-tuning on the chosen segment plus an odds ratio, no reference (Hong et al. 2024).
    `pairs` (P, 2) holds the chosen and the rejected segment's number.

    nll "sequence"  the mean of each chosen segment, so that all pairs have the same weight
    nll "token"     the mean over the tokens of all chosen segments of the call, as in most trainers
    nll "none"      the odds term only"""

def reinforce(logprob: Tensor, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-A logprob (Williams 1992); with group-relative advantages this is GPG (Chu et al. 2025).

    In trainers: verl gpg and bypass_mode's reinforce; NeMo-RL disable_ppo_ratio."""

def reverse_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(p || q) = sum_j p_j (log p_j - log q_j): the student seeks the teacher's modes (Gu et al. 2024).  With a
    reference policy as the teacher it is the exact KL penalty of reinforcement learning."""

def rloo(logprob: Tensor, advantage: Tensor, segments: Segments, old_logprob: Tensor | None = None, *, low: float = 0.2, high: float = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(w A, clip(w, 1 - low, 1 + high) A) per segment, w = exp(total over the segment of logprob - old), A = mean
    over the segment of the advantage: whole sequences as one action, not length-normalised (Ahmadian et al. 2024).
    The leave-one-out baseline is in the advantage: reward - mean reward of the others that answer the same prompt.

    In trainers: TRL RLOOTrainer.  With one step per batch its gradient is that of reinforce summed over the sequence."""

def sapo(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> tuple[Tensor, dict[str, Tensor]]:
    """-A sigmoid(tau (r - 1)) 4 / tau, r = exp(logprob - old), tau = tau_pos where A > 0, else tau_neg: a soft gate in
    place of the clip, whose slope at r = 1 is 1 (Gao et al. 2025).

    In trainers: TRL, verl sapo; AReaL use_sapo_loss."""

def sapo_sequence(logprob: Tensor, advantage: Tensor, segments: Segments, old_logprob: Tensor | None = None, *, tau_pos: float = 1.0, tau_neg: float = 1.05, own: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """-A sigmoid(tau (s - 1)) 4 / tau, s = exp(mean over the segment of logprob - old), A = mean over the segment of
    the advantage: sapo with the ratio and the advantage of the whole sequence.  With `own`, A is each token's own, as
    TRL has it.

    In trainers: TRL sapo, AReaL use_sapo_loss, with importance_sampling_level="sequence"."""

def simpo(logprob: Tensor, segments: Segments, pairs: Tensor, *, beta: float = 2.0, gamma: float = 0.5, label_smoothing: float = 0.0, alpha: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """-(1 - e) log sigmoid(m) - e log sigmoid(-m), m = beta (chosen - rejected) - gamma on the segments' means x of
    logprob, e = label_smoothing: no reference, a margin gamma instead (Meng et al. 2024).

    alpha   not 0: (1 - e^(-alpha x)) / alpha in place of x (AlphaPO, Gupta et al. 2025)

    `pairs` (P, 2) holds the chosen and the rejected segment's number.

    In trainers: TRL CPOConfig(loss_type="simpo" or "alphapo"), TPOConfig(loss_type="tpo-l"); axolotl rl: simpo."""

def skew_kl(logp: Tensor, logq: Tensor, *, alpha: float = 0.1) -> Tensor:
    """KL(q || alpha q + (1 - alpha) p), 0 <= alpha < 1: a forward KL that stays finite (Ko et al. 2024)."""

def soft_cross_entropy(logp: Tensor, logq: Tensor) -> Tensor:
    """-sum_j q_j log p_j: cross-entropy to the teacher's distribution, or to weighted or sampled labels, whose weights
    need not sum to 1 (tail="none")."""

def topr(logprob: Tensor, advantage: Tensor, old_logprob: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """-A logprob where A > 0, -sg(min(r, 1)) A logprob elsewhere, r = exp(logprob - old): imitate good
    answers, and leave bad ones alone once they are unlikely (Le Roux et al. 2025), token by token."""

def tvd(logp: Tensor, logq: Tensor) -> Tensor:
    """sum_j |p_j - q_j| / 2: total variation distance (Wen et al. 2023)."""

def uld(top_logprob: Tensor, foreign_logprob: Tensor, *, rest: str = 'bucket') -> tuple[Tensor, dict[str, Tensor]]:
    """sum_k |p_(k) - q_(k)|, the probabilities of student and teacher sorted, the largest first: tokens need
    not match, so the teacher may have another tokenizer (universal logit distillation, Boizard et al. 2024).

    `foreign_logprob` (rows, J) is an input, the teacher's J largest log-probabilities in any order, -inf for none:
    `hl.topk(teacher, J).logprobs`.  The student's K are set by `hl.Term(uld, top=K)`, 8 by default.

    rest "bucket"  what is beyond min(K, J) is one more outcome on each side, |sum p - sum q|
    rest "none"    it is left out

    Row n of the teacher is compared with row n of the student: if the tokenizers split the text differently there,
    leave the row out with a target of -100 or a row weight of 0.

    In trainers: TRL GOLDTrainer, use_uld_loss without use_extended_uld, which merges tokens."""

def value_loss(value: Tensor, returns: Tensor, old_value: Tensor | None = None, *, clip: float | None = None, huber: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """(v - R)^2 / 2 of a critic's value v and the return R; with `clip` c, the larger of that and of the same with v
    held within c of `old_value` (Schulman et al. 2017).

    `value` is an input that requires grad, one number per row.  A value head of one column needs no input: its logit is
    the fact lse, so `hl.Term(value_loss, facts={"value": ("lse", 1.0)})` on `hl.Linear(hidden, value_head.weight)`.

    huber   beyond this distance from R the error counts linearly, not squared: huber (|v - R| - huber / 2)

    In trainers: verl compute_value_loss, OpenRLHF ValueLoss, AReaL ppo_critic_loss_fn, whose
    "huber" is huber=10; slime's has no 1/2."""

def vespo(logprob: Tensor, advantage: Tensor, segments: Segments, old_logprob: Tensor | None = None, sampler_logprob: Tensor | None = None, *, k_pos: float = 2.0, lam_pos: float = 3.0, k_neg: float = 3.0, lam_neg: float = 2.0, sampler_high: float | None = None, sampler_low: float = 0.0, sampler_mask: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(phi) A logprob, phi = exp(lam + k log w - lam w), w = exp(total over the segment of logprob - old): a smooth
    weight on the ratio of whole sequences, 1 at w = 1 (arXiv:2602.10693).  (k, lam) are k_pos, lam_pos where A >= 0.

    sampler_high   also multiplies w by each token's exp(old - sampler_logprob), clamped to at most this
    sampler_low    and to at least this
    sampler_mask   a token's ratio outside these bounds counts as 1e-8, which nearly removes its sequence

    In trainers: TRL vespo; vllm_importance_sampling_clip_max, _clip_min and mode "token_mask" are the last three."""

def z_loss(lse: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """lse^2: keeps the softmax's normaliser near 1 (Chowdhery et al. 2022)."""
