"""TRL's GRPO loss as an objective: made from its arguments, with the contents of its batches as rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

import headloss as hl
from headloss.losses import LOSSES

RATIO = "importance_sampling_ratio"


def policy_objective(args: Any) -> hl.Objective:
    """The loss that a `GRPOConfig` describes, as an objective; a loss that cannot be described so is refused.

    With `use_vllm` it includes the sampler correction: TRL's `importance_sampling_ratio` weighs the rows.
    """
    if not hasattr(args, "importance_sampling_level"):
        raise TypeError(f"args: wanted a GRPOConfig, got {type(args).__name__}")
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    corrected = args.use_vllm and args.vllm_importance_sampling_correction
    sequence = args.importance_sampling_level == "sequence"
    own = {"own": True} if sequence else {}  # a subclass may pass advantages of shape (B, T)
    clipped = "gspo" if sequence else "grpo", {"low": args.epsilon, "high": high, **own}
    if args.delta is not None:
        clipped[1]["delta"] = args.delta
    taus = {"tau_pos": args.sapo_temperature_pos, "tau_neg": args.sapo_temperature_neg, **own}
    gammas = {f"{ours}_{sign}": getattr(args, f"vespo_{theirs}_{sign}")
              for ours, theirs in (("k", "k"), ("lam", "lambda")) for sign in ("pos", "neg")}  # fmt: skip
    kinds: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {  # a loss, and how it is reduced
        "grpo": (clipped, {"reduction": "seq_mean_token_mean"}),
        "dr_grpo": (clipped, {"reduction": "seq_mean_token_sum_norm", "length": args.max_completion_length}),
        "dapo": (clipped, {"reduction": "token_mean"}),
        "bnpo": (clipped, {"reduction": "weighted_mean"}),
        "luspo": (clipped, {"reduction": "seq_mean_token_sum"}),
        "cispo": (("cispo_sequence" if sequence else "cispo", {"high": high}), {"reduction": "token_mean"}),
        "sapo": (("sapo_sequence" if sequence else "sapo", taus), {"reduction": "seq_mean_token_mean"}),
        "vespo": (("vespo", gammas), {"reduction": "token_mean"}),
    }
    unknown = {
        "loss_type": args.loss_type not in kinds,
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "top_entropy_quantile": args.top_entropy_quantile < 1,
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
        "vllm_importance_sampling_correction": corrected and args.loss_type == "bnpo",  # a mean over weights differs
        "delta": args.delta is not None and args.delta < 1 + high,  # where TRL's bounds nothing on the other side
    }
    for name, is_so in unknown.items():
        if is_so:
            raise ValueError(
                f"{name}: {getattr(args, name)!r} is not read into an objective; write one with headloss.losses, or "
                f"leave `objective` out to run TRL's loss"
            )
    (loss, options), how = kinds[args.loss_type]
    weighed: dict[str, Any] = {}
    if corrected and loss == "vespo":  # its ratio includes the sampler's
        bounds = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        options |= {"sampler_low": bounds[0] or 0.0, "sampler_high": math.exp(20.0) if bounds[1] is None else bounds[1]}
        options["sampler_mask"] = args.vllm_importance_sampling_mode == "token_mask"
    elif corrected:
        weighed["row_weight"] = RATIO
    terms = {"rl": hl.Term(LOSSES[loss], **options, **how, **weighed)}
    if args.beta and sequence and args.use_bias_correction_kl:  # TRL corrects by the ratio that it clips
        terms["kl"] = hl.Term(LOSSES["kl_to_reference_sequence"], weight=args.beta, **how)
    elif args.beta:
        terms["kl"] = hl.Term(LOSSES["kl_to_reference"], weight=args.beta, corrected=args.use_bias_correction_kl, **how)
    if args.entropy_coef:  # a mean over each micro-batch, whatever the loss uses
        terms["entropy"] = hl.Term(LOSSES["entropy_bonus"], weight=args.entropy_coef, reduction="weighted_mean")
    return hl.Objective(**terms)  # type: ignore[arg-type]


def check_policy(args: Any, objective: hl.Objective, model: Any) -> None:
    """Refuse to leave out silently anything that TRL's loss would have done."""
    asked = _asked(objective)
    left_out = {
        "beta": (args.beta and "ref_logprob" not in asked, "add kl_to_reference"),
        "use_adaptive_entropy": (args.use_adaptive_entropy, "add entropy_bonus with a weight of your own"),
        "entropy_coef": (args.entropy_coef and "entropy" not in asked, "add entropy_bonus"),
        "top_entropy_quantile": (args.top_entropy_quantile < 1, "give its terms row_weights.top_entropy"),
        "off_policy_mask_threshold": (
            args.off_policy_mask_threshold is not None, "give its terms row_weights.off_policy_mask"
        ),
    }  # fmt: skip
    for name, (is_so, instead) in left_out.items():
        if is_so:
            raise ValueError(
                f"{name}: {getattr(args, name)!r} is set for TRL's own loss, which the objective replaces, and no term "
                f"does the same; {instead}, or leave the argument at its default"
            )
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False) and getattr(config, "peft_type", None) != "PREFIX_TUNING":
        raise ValueError(
            "objective: prompt tuning puts learned tokens before each sequence, and TRL's inputs have no rows for "
            "them; leave `objective` out to run TRL's loss"
        )


def _asked(objective: hl.Objective) -> set[str]:
    """The inputs and facts that terms and metrics ask for."""
    calls = [term.call(None, {}) for term in objective.terms.values()] + [call for _, call in objective.metrics]
    facts = {fact.name for term in calls[: len(objective.terms)] for fact in term.facts}
    return facts | {name for call in calls for name in call.input_names}


def _corrects(term: hl.Term) -> bool:
    """Whether a term reads the sampler's log-probabilities; vespo does if it has a bound for them."""
    reads = not {RATIO, "sampler_logprob"}.isdisjoint(term.call(None, {}).input_names)
    bounded = term.fn is not LOSSES["vespo"] or term.options.get("sampler_high") is not None
    return reads and (bounded or bool(term.row_weights))


def policy_call(objective: hl.Objective, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """TRL's (B, C) inputs as (B, T) rows, of which row t predicts token t + 1; and which rows count.

    Only the inputs that the objective asks for are included.
    """
    start, (batch, length) = inputs["prompt_ids"].shape[1] - 1, inputs["completion_ids"].shape

    def rows(x: Tensor) -> Tensor:
        wide = x.new_zeros(batch, start + length + 1)
        wide[:, start:-1] = x
        return wide

    advantage = inputs["advantages"]
    given = {
        "advantage": advantage[:, None] if advantage.ndim == 1 else advantage,
        "old_logprob": inputs.get("old_per_token_logps"),
        "ref_logprob": inputs.get("ref_per_token_logps"),
        "sampler_logprob": inputs.get("sampling_per_token_logps"),
        RATIO: inputs.get(RATIO),
    }
    asked = _asked(objective)
    if given[RATIO] is not None and not any(map(_corrects, objective.terms.values())):
        raise ValueError(
            f"{RATIO}: the batch holds TRL's correction for the sampler, and no term reads it; "
            f'give the policy term row_weight="{RATIO}", or one of headloss.row_weights on sampler_logprob, or set '
            f"vllm_importance_sampling_correction=False"
        )
    call: dict[str, Any] = {n: rows(x) for n, x in given.items() if n in asked and x is not None}
    keep = rows(inputs["completion_mask"] * inputs.get("tool_mask", 1)) != 0
    if inputs.get("support_ids") is not None:
        call["support"] = _support(inputs["support_ids"], start, batch, length)
    return {**call, "segments": hl.Segments.from_batch(keep)}, keep


def _support(ids: Any, start: int, batch: int, length: int) -> hl.Support:
    """The sampled-from columns of a batch's completions, as columns of its rows."""
    if not isinstance(ids, Tensor) or ids.ndim != 3 or ids.shape[:2] != (batch, length):
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"support_ids: wanted ({batch}, {length}, K), K columns of each token, got {got}")
    total = start + length + 1
    wide = ids.new_full((batch, total, ids.shape[2]), -1)
    wide[:, start:-1] = ids
    try:
        return hl.Support.from_padded(wide)
    except (TypeError, ValueError) as error:
        where = f"; row n is token n % {total} - {start} of completion n // {total}" if "row" in str(error) else ""
        raise type(error)(f"support_{error}{where}") from None
