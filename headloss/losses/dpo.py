from headloss.losses._preference import chosen_rejected, counted, linked, preference_metrics, score


def dpo(
    logprob, ref_logprob, segments, pairs, length_weight=None,
    *, beta=0.1, link="sigmoid", label_smoothing=0.0, average=False, divergence="reverse_kl", alpha=0.5, tau=0.05,
):  # fmt: skip
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

    In trainers: TRL DPOTrainer: sigmoid_norm is average=True; its label_smoothing acts on robust, exo and aot alone.
    """
    totals, counts = counted(logprob, segments, length_weight, average)
    chosen, rejected = chosen_rejected(score(totals(logprob - ref_logprob), link, divergence, alpha) / counts, pairs)
    metrics = preference_metrics(beta * chosen, beta * rejected, segments.totals(logprob), pairs)
    if link == "aot":
        (c, r), (ref_c, ref_r) = (chosen_rejected(totals(x) / counts, pairs) for x in (logprob, ref_logprob))
        chosen, rejected = c - r, ref_c - ref_r
    return linked(link, chosen, rejected, beta, label_smoothing, tau), metrics


dpo.returns = "pair"
