"""headloss in verl: log-probabilities and entropies from one sweep of the head, and policy losses in its registry.

    log_probs, entropy = FusedLinearForPPO()(hidden_states, vocab_weights, input_ids, temperature)   # as verl calls it
    register_policy_losses()                            # then policy_loss.loss_mode: headloss_gspo in verl's config

Follows verl 0.9: `verl.utils.experimental.torch_functional.FusedLinearForPPO`,
`verl.utils.torch_functional.logprobs_from_logits`, `verl.trainer.ppo.core_algos.register_policy_loss`.  The first part
needs no verl.  A policy loss reduces by verl's own `agg_loss`, so that its global batch information counts.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import headloss as hl
from headloss.losses import LOSSES
from headloss.module import check_source_options
from headloss.trace.signature import function_name, suggest

POLICY = ("cispo", "dppo", "gmpo", "grpo", "gspo", "gspo_token", "kimi", "reinforce", "sapo", "topr", "vespo")
INPUTS = ("logprob", "advantage", "segments", "old_logprob")
NAMES = {"clip_fraction": "pg_clipfrac", "dual_clip_fraction": "pg_clipfrac_lower", "kl_k1": "ppo_kl"}  # verl's own


def log_probs_and_entropy(
    source: Tensor | hl.Logits | hl.Linear,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    inplace: bool = False,
    support: hl.Support | None = None,
) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy) in the labels' shape, float32, both differentiable; from logits (..., V) or a source.

    `temperature` is a number, one value per sample ((B,) or (B, 1) for (B, T) labels) or one value per token.
    `inplace=True` lets the gradient overwrite the logits.  `support`: the columns that each token was sampled from.
    """
    if isinstance(source, Tensor):
        source = hl.Logits(source, temperature=per_token(temperature, labels), inplace=inplace)
    elif not (isinstance(temperature, float) and temperature == 1.0):
        raise ValueError("temperature: a source has its own; give it there")
    facts = hl.row_facts(source, labels.long(), want=("logprob", "entropy"), support=support)
    return facts.logprob, facts.entropy


def logprobs_from_logits(
    logits: Tensor, labels: Tensor, inplace_backward: bool = True, support: hl.Support | None = None
) -> Tensor:
    """verl's function of this name.  A leaf is never overwritten."""
    inplace = inplace_backward and logits.requires_grad and not logits.is_leaf
    source = hl.Logits(logits, inplace=inplace)
    return hl.row_facts(source, labels.long(), want=("logprob",), support=support).logprob


class FusedLinearForPPO(nn.Module):
    """verl's module of this name: (hidden_states, vocab_weights, input_ids, temperature) -> (log_probs, entropy).

    hidden_states is (tokens, D) or (B, T, D).  At most `memory` of the head's logits exists at a time; `chunk_size` and
    `impl_backend` are accepted for verl's sake and ignored; `bias`, `scale`, `softcap` and `vocab` are those of
    `hl.Linear`.  The entropy is float32, where verl's has the hidden's dtype.
    """

    def __init__(
        self,
        chunk_size: int = 512,
        impl_backend: str = "torch",
        *,
        memory: str | int = "1GiB",
        bias: Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(chunk_size, int):
            raise TypeError(f"chunk_size: wanted a number, which is ignored, got {chunk_size!r}; a budget is memory=")
        self.chunk_size, self.impl_backend = chunk_size, impl_backend
        self.options = {"bias": bias, **check_source_options({"memory": memory, **options})}

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float | Tensor = 1.0,
        support: hl.Support | None = None,
    ) -> tuple[Tensor, Tensor]:
        per_row = per_token(temperature, input_ids)
        source = hl.Linear(hidden_states, vocab_weights, temperature=per_row, **self.options)
        return log_probs_and_entropy(source, input_ids, support=support)


def per_token(temperature: float | Tensor, labels: Tensor) -> float | Tensor:
    """A temperature as headloss takes it: a number, or one value per label."""
    if not isinstance(temperature, Tensor):
        return float(temperature)
    T, shape = temperature.detach(), tuple(labels.shape)
    if T.numel() == 1:
        return T.reshape(()).to(labels.device)
    if tuple(T.shape) == shape:
        return T.to(labels.device)
    if len(shape) == 2 and tuple(T.shape) in ((shape[0],), (shape[0], 1)):
        return T.reshape(-1, 1).expand(shape).contiguous().to(labels.device)
    raise ValueError(
        f"temperature: wanted a number, one value per sample or one per token of {shape}, got {tuple(T.shape)}"
    )


def policy_loss(loss: str | Callable[..., Any], **options: Any) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """A loss of headloss in the form that verl's registry wants.

    Options that are not given come from verl's config, with the meaning that they have there: see `settings`.

    >>> register_policy_loss("mine")(policy_loss("grpo", delta=4.0))
    """
    if isinstance(loss, str) and loss not in LOSSES:
        raise ValueError(f"loss: no loss {loss!r}; there are {', '.join(sorted(LOSSES))}{suggest(loss, LOSSES)}")
    fn: Any = LOSSES[loss] if isinstance(loss, str) else loss
    while isinstance(fn, functools.partial):  # what it binds was given, and verl's config does not replace it
        fn, options = fn.func, {**fn.keywords, **options}
    label = function_name(fn)
    parameters = inspect.signature(fn).parameters.values()
    asked = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    unknown = [p.name for p in parameters if p.name in asked and p.name not in INPUTS and p.default is p.empty]
    if unknown:
        raise ValueError(f"loss: {label} asks for {unknown[0]}; verl gives {', '.join(INPUTS)}")
    known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name in options:
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise TypeError(f"{name}: not an option of {label}; there are {there}{suggest(name, known)}")

    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = response_mask.bool()
        given: dict[str, Any] = {
            "logprob": log_prob[mask],
            "advantage": advantages[mask],
            "old_logprob": old_log_prob[mask],
            "segments": hl.Segments.from_batch(mask).select(mask),
        }
        said = {k: v for k, v in settings(label, config).items() if k in known} | options
        if fn is LOSSES["kimi"] and "beta" not in said and _get("policy_loss", config) is not None:
            raise ValueError("policy_loss.dro_beta: wanted a positive number, as verl's dro does, got None")
        found = fn(**{k: v for k, v in given.items() if k in asked}, **said)
        values, metrics = found if isinstance(found, tuple) else (found, {})
        if tuple(values.shape) != tuple(given["logprob"].shape):
            wanted = f"wanted one value per token, {tuple(given['logprob'].shape)}"
            raise ValueError(f"loss: {label} gave values of shape {tuple(values.shape)}, {wanted}")
        losses = torch.zeros_like(log_prob, dtype=values.dtype).masked_scatter(mask, values)
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        batch = getattr(config, "global_batch_info", None) or {}
        reduced = _core_algos().agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **batch)
        return reduced, _numbers(metrics, log_prob.device)

    compute.__name__ = f"headloss_{label}"
    compute.__doc__ = fn.__doc__
    return compute


def register_policy_losses(losses: Iterable[str] = POLICY, prefix: str = "headloss_") -> list[str]:
    """Put losses into verl's registry; returns the names for `actor.policy_loss.loss_mode`."""
    if isinstance(losses, str):
        raise TypeError(f"losses: wanted a list of names, got {losses!r}")
    names = {f"{prefix}{name}": name for name in losses}
    for registered, name in names.items():
        _core_algos().register_policy_loss(registered)(policy_loss(name))
    return list(names)


def _core_algos() -> Any:
    return importlib.import_module("verl.trainer.ppo.core_algos")


def settings(loss: str, config: Any) -> dict[str, float]:
    """The options of a loss that verl's config holds, under our names.

    clip_ratio_low, clip_ratio_high (or clip_ratio)   low, high; 1 - low, 1 + high for cispo
    clip_ratio_c                                      grpo's dual (without it 3, as verl has it), dppo's cap
    tau_pos, tau_neg, policy_loss.dro_beta            those of sapo; kimi's beta
    policy_loss.kl_cov_ratio, policy_loss.ppo_kl_coef  kl_cov's fraction and beta
    """
    if config is None:
        return {}
    get = lambda name, of=config: _get(name, of)
    low, high, c = (get(f"clip_ratio_{x}") for x in ("low", "high", "c"))
    low, high = (get("clip_ratio") if x is None else x for x in (low, high))
    if loss.startswith("cispo"):
        low, high = None if low is None else 1 - low, None if high is None else 1 + high
    found = {"low": low, "high": high, "tau_pos": get("tau_pos"), "tau_neg": get("tau_neg")}
    found |= {"dual": 3.0 if c is None else c} if loss == "grpo" else {"cap": c} if loss == "dppo" else {}
    own = {"kimi": {"beta": "dro_beta"}, "kl_cov": {"fraction": "kl_cov_ratio", "beta": "ppo_kl_coef"}}
    if get("policy_loss") is not None:
        found |= {ours: get(theirs, get("policy_loss")) for ours, theirs in own.get(loss, {}).items()}
    return {k: float(v) for k, v in found.items() if v is not None}


def _get(name: str, config: Any) -> Any:
    return config.get(name) if hasattr(config, "get") else getattr(config, name, None)


def _numbers(metrics: Mapping[str, Any], device: torch.device) -> dict[str, float]:
    """The metrics under verl's names, in one copy from the device."""
    metrics = {name: torch.as_tensor(x, device=device) for name, x in metrics.items()}
    if not metrics:
        return {}
    names = [f"actor/{NAMES.get(name, name)}" for name in metrics]
    if any(x.ndim and not len(x) for x in metrics.values()):  # no token is left: 0, as in verl, whose means include all
        return dict.fromkeys(names, 0.0)
    values = [hl.Metric.of(name, x, None, "token").value for name, x in metrics.items()]
    return dict(zip(names, torch.stack(values).tolist(), strict=True))
