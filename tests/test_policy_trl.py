"""TRL's own loss code on the same log-probabilities: the real methods, called with a stand-in for the trainer.

Dimension key:  B sequences   T tokens   V vocabulary
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.integrations.names import TRL, rename
from headloss.losses import (
    cispo,
    cispo_sequence,
    entropy_bonus,
    grpo,
    gspo,
    kl_to_reference,
    orpo,
    sapo,
    sapo_sequence,
    simpo,
    vespo,
)
from headloss.row_weights import off_policy_mask, top_entropy

pytest.importorskip("trl")
from transformers import TrainingArguments
from trl import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from headloss.integrations.trl import policy_objective

B, T, V, LONGEST, ITEMS = 5, 8, 11, 20, 57.0


@pytest.fixture(scope="module")
def batch() -> SimpleNamespace:
    torch.manual_seed(0)
    logits = 2 * torch.randn(B, T, V, dtype=torch.float64)
    ids = torch.randint(V, (B, T))
    mask = (torch.arange(T) < torch.tensor([8, 3, 1, 6, 5])[:, None]).long()
    mask[0, 2] = 0  # a tool's token inside a response
    logprob = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    old, ref, sampler = (logprob + 0.3 * torch.randn(B, T, dtype=torch.float64) for _ in range(3))
    return SimpleNamespace(
        logits=logits, ids=ids, mask=mask, old=old, ref=ref, sampler=sampler,
        advantage=torch.tensor([1.2, -0.7, 0.4, -1.5, 0.0], dtype=torch.float64),
        targets=ids.masked_fill(mask == 0, -100), segments=hl.Segments.from_batch(ids),
    )  # fmt: skip


def trl_loss(batch: SimpleNamespace, on_policy: bool = False, **settings) -> tuple[Tensor, Tensor, dict]:
    """Loss, gradient of the logits, and metrics of GRPOTrainer._compute_loss."""
    logits = batch.logits.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    sampler_ratio = settings.pop("sampler_ratio", None)
    args = SimpleNamespace(
        delta=settings.pop("delta", None), use_bias_correction_kl=settings.pop("use_bias_correction_kl", False),
        sapo_temperature_pos=1.0, sapo_temperature_neg=1.0625, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
        vespo_lambda_neg=2.0, steps_per_generation=1,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=False,
        pad_across_processes=lambda x, dim, pad_index: x,
    )  # fmt: skip
    trainer = SimpleNamespace(
        args=args, accelerator=accelerator, model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1, max_completion_length=LONGEST, aux_loss_enabled=False, use_vllm=False,
        vllm_importance_sampling_correction=False, use_adaptive_entropy=False, _entropy_bonus_enabled=False,
        entropy_coef=0.0, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token",
        beta=0.0, loss_type="grpo", epsilon_low=0.2, epsilon_high=0.28, _metrics={"train": defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask, get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logp.gather(-1, batch.ids[..., None])[..., 0], entropy, None
        ),
    )  # fmt: skip
    trainer.get_high_entropy_mask = lambda *a: GRPOTrainer.get_high_entropy_mask(trainer, *a)
    for name, value in settings.items():
        assert hasattr(trainer, name), name
        setattr(trainer, name, value)
    inputs = {
        "prompt_ids": batch.ids[:, :0], "prompt_mask": batch.mask[:, :0], "completion_ids": batch.ids,
        "completion_mask": batch.mask, "advantages": batch.advantage, "ref_per_token_logps": batch.ref,
        "num_items_in_batch": torch.tensor(ITEMS),
    }  # fmt: skip
    if not on_policy:
        inputs["old_per_token_logps"] = batch.old
    if sampler_ratio is not None:
        inputs["importance_sampling_ratio"] = sampler_ratio
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.detach(), logits.grad, {name: values[0] for name, values in trainer._metrics["train"].items()}


SEQUENCE = {"importance_sampling_level": "sequence"}
CASES = {
    "grpo": ({"loss_type": "grpo"}, hl.Term(grpo, low=0.2, high=0.28, reduction="seq_mean_token_mean"), {}),
    "bnpo": ({"loss_type": "bnpo"}, hl.Term(grpo, low=0.2, high=0.28), {}),
    "dapo": ({"loss_type": "dapo"}, hl.Term(grpo, low=0.2, high=0.28), {"num_items": ITEMS}),
    "dr_grpo": (
        {"loss_type": "dr_grpo"},
        hl.Term(grpo, low=0.2, high=0.28, reduction="seq_mean_token_sum_norm", length=LONGEST),
        {},
    ),
    "two_sided": ({"loss_type": "bnpo", "delta": 1.3}, hl.Term(grpo, low=0.2, high=0.28, delta=1.3), {}),
    "gspo": (
        {"loss_type": "grpo", **SEQUENCE, "epsilon_low": 0.03, "epsilon_high": 0.04},
        hl.Term(gspo, low=0.03, high=0.04, reduction="seq_mean_token_mean"),
        {},
    ),
    "luspo": (
        {"loss_type": "luspo", **SEQUENCE, "epsilon_low": 0.03, "epsilon_high": 0.04},
        hl.Term(gspo, low=0.03, high=0.04, reduction="seq_mean_token_sum"),
        {},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, hl.Term(cispo, high=1.2), {"num_items": ITEMS}),
    "sapo": ({"loss_type": "sapo"}, hl.Term(sapo, tau_neg=1.0625, reduction="seq_mean_token_mean"), {}),
    "cispo_sequence": (
        {"loss_type": "cispo", "epsilon_high": 1.02, **SEQUENCE},
        hl.Term(cispo_sequence, high=1.02),
        {"num_items": ITEMS},
    ),
    "sapo_sequence": (
        {"loss_type": "sapo", **SEQUENCE},
        hl.Term(sapo_sequence, tau_neg=1.0625, reduction="seq_mean_token_mean"),
        {},
    ),
    "two_sided_gspo": (
        {"loss_type": "grpo", **SEQUENCE, "epsilon_low": 0.01, "epsilon_high": 0.02, "delta": 1.03},
        hl.Term(gspo, low=0.01, high=0.02, delta=1.03, reduction="seq_mean_token_mean"),
        {},
    ),
    "vespo": ({"loss_type": "vespo"}, vespo, {"num_items": ITEMS}),
    "off_policy_mask": (
        {"loss_type": "bnpo", "off_policy_mask_threshold": 0.05},
        hl.Term(grpo, low=0.2, high=0.28, row_weight=off_policy_mask(0.05)),
        {},
    ),
    "top_entropy": (
        {"loss_type": "bnpo", "top_entropy_quantile": 0.3},
        hl.Term(grpo, low=0.2, high=0.28, row_weight=top_entropy(0.3)),
        {},
    ),
}


@pytest.mark.parametrize("on_policy", [False, True], ids=["old", "on_policy"])
@pytest.mark.parametrize("case", CASES)
def test_loss_types(batch: SimpleNamespace, case: str, on_policy: bool) -> None:
    settings, term, call = CASES[case]
    want, d_logits, logged = trl_loss(batch, on_policy, **settings)
    logits = batch.logits.clone().requires_grad_()
    given = {"advantage": batch.advantage[:, None].expand(B, T).contiguous()}
    if not on_policy:
        given["old_logprob"] = batch.old
    out = hl.Objective(rl=term, metrics=["entropy"])(
        hl.Logits(logits), batch.targets, segments=batch.segments, **given, **call
    )
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(logits.grad, d_logits, rtol=1e-9, atol=1e-12)
    ours = rename({name: float(m) for name, m in out.metrics.items()}, TRL)
    assert ours["entropy"] == pytest.approx(logged["entropy"])
    # TRL caps the ratio before it counts, counts sequences, or counts tokens that a mask leaves out
    if case not in ("two_sided", "gspo", "luspo", "two_sided_gspo", "top_entropy", "off_policy_mask"):
        for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
            if name in logged:
                assert ours[name] == pytest.approx(logged[name]), name


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_vespo_with_the_samplers_ratio(batch: SimpleNamespace, mode: str) -> None:
    """The ratio as TRL makes it, by its mode, is a part of vespo's own weight."""
    ratio = torch.exp((batch.old - batch.sampler) * batch.mask)
    held = ratio.clamp(0.8, 1.25) if mode == "token_truncate" else ratio.masked_fill((ratio < 0.6) | (ratio > 1.9), 0)
    assert (held != ratio).any()
    want, d_logits, _ = trl_loss(batch, loss_type="vespo", sampler_ratio=held)
    logits = batch.logits.clone().requires_grad_()
    low, high = (0.8, 1.25) if mode == "token_truncate" else (0.6, 1.9)
    term = hl.Term(vespo, sampler_low=low, sampler_high=high, sampler_mask=mode == "token_mask")
    out = hl.Objective(rl=term)(
        hl.Logits(logits), batch.targets, segments=batch.segments, num_items=ITEMS, old_logprob=batch.old,
        sampler_logprob=batch.sampler, advantage=batch.advantage[:, None].expand(B, T),
    )  # fmt: skip
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(logits.grad, d_logits, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("corrected", [False, True])
def test_a_kl_term_and_an_entropy_bonus(batch: SimpleNamespace, corrected: bool) -> None:
    want, d_logits, logged = trl_loss(
        batch, loss_type="bnpo", beta=0.3, use_bias_correction_kl=corrected, _entropy_bonus_enabled=True,
        entropy_coef=0.07,
    )  # fmt: skip
    logits = batch.logits.clone().requires_grad_()
    objective = hl.Objective(
        rl=hl.Term(grpo, low=0.2, high=0.28),
        kl=hl.Term(kl_to_reference, weight=0.3, corrected=corrected),
        ent=hl.Term(entropy_bonus, weight=0.07),
    )
    out = objective(
        hl.Logits(logits), batch.targets, old_logprob=batch.old, ref_logprob=batch.ref,
        advantage=batch.advantage[:, None].expand(B, T),
    )  # fmt: skip
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(logits.grad, d_logits, rtol=1e-9, atol=1e-12)
    assert rename(out.metrics, TRL)["kl"].item() == pytest.approx(logged["kl"])


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_preference_losses(batch: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    odds = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    pairs = torch.tensor([[0, 1], [3, 4], [1, 3]])
    logits = batch.logits.clone().requires_grad_()
    logprob = logits.log_softmax(-1).gather(-1, batch.ids[..., None])[..., 0]
    mean = (logprob * batch.mask).sum(1) / batch.mask.sum(1)
    chosen, rejected = mean[pairs[:, 0]], mean[pairs[:, 1]]
    trainer = SimpleNamespace(
        beta=0.8, alpha=0.0, loss_type="simpo", simpo_gamma=0.4, label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    if name == "simpo":
        want = cpo.CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean()
        term = hl.Term(simpo, beta=0.8, gamma=0.4)
    else:
        want = (-chosen - odds.ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]).mean()
        term = hl.Term(orpo, beta=0.8)
    (d_logits,) = torch.autograd.grad(want, logits)
    ours = batch.logits.clone().requires_grad_()
    out = hl.Objective(it=term)(hl.Logits(ours), batch.targets, segments=batch.segments, pairs=pairs)
    out.loss.backward()
    tight = {"rtol": 1e-5, "atol": 1e-6}  # TRL's ORPO is in float32
    torch.testing.assert_close(out.loss.detach(), want.detach(), **tight)
    torch.testing.assert_close(ours.grad, d_logits, **tight)


# Every setting of GRPOConfig that TrainingArguments has not, by what it does to the loss of a batch that is there.
READ = {  # into the objective
    "loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "beta", "use_bias_correction_kl",
    "max_completion_length", "entropy_coef", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos",
    "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "use_vllm", "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap",
}  # fmt: skip
REFUSED: dict[str, dict] = {  # with an example, and the argument that the error names
    "top_entropy_quantile": {"top_entropy_quantile": 0.2},
    "use_adaptive_entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.1},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.5},
    "vllm_importance_sampling_correction": {"use_vllm": True, "loss_type": "bnpo"},
}
WITH = {  # of those that are refused
    "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
}  # fmt: skip
TRAINERS = {"router_aux_loss_coef", "steps_per_generation"}  # the trainer's own, which it does around the objective
ELSEWHERE = {  # in the model, the data, the generation, the rewards and the logs: the inputs of the loss
    "model_init_kwargs", "trust_remote_code", "disable_dropout", "cast_lm_head_to_fp32", "num_generations",
    "num_generations_eval", "ds3_gather_for_generation", "shuffle_dataset", "pad_to_multiple_of",
    "generation_batch_size", "temperature", "top_p", "top_k", "min_p", "generation_kwargs", "chat_template_kwargs",
    "repetition_penalty", "cache_implementation", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode",
    "vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host", "vllm_server_port",
    "vllm_server_timeout", "vllm_group_port", "vllm_gpu_memory_utilization", "vllm_max_model_length",
    "vllm_tensor_parallel_size", "num_iterations", "reward_weights", "multi_objective_aggregation", "scale_rewards",
    "mask_truncated_completions", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "max_tool_calling_iterations", "log_completions", "log_multimodal", "num_completions_to_print",
    "log_unique_prompts", "log_completions_hub_repo", "use_transformers_continuous_batching",
    "transformers_continuous_batching_config", "use_transformers_paged",
}  # fmt: skip
LOSS_TYPES = {"grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"}


def config(**settings):
    return GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **settings)


def test_every_setting_is_decided_on() -> None:
    """A new one in a newer TRL, or one that its loss begins to read, fails here until somebody decides."""
    known = {f.name for f in dataclasses.fields(TrainingArguments)}
    own = {f.name for f in dataclasses.fields(GRPOConfig)} - known
    decided = [READ, set(REFUSED), WITH, TRAINERS, ELSEWHERE]
    assert sum(map(len, decided)) == len(set().union(*decided)), "one is in two lists"
    assert own == set().union(*decided), own ^ set().union(*decided)
    source = inspect.getsource(GRPOTrainer._compute_loss)
    read = {name.removesuffix("_low") for name in re.findall(r"self\.(?:args\.)?(\w+)", source)} & own
    assert read <= READ | set(REFUSED) | WITH | TRAINERS, read - (READ | set(REFUSED) | WITH | TRAINERS)
    types = set(re.findall(r'"(\w+)"', "".join(re.findall(r"self\.loss_type (?:==|in|!=) (.*):", source))))
    assert types == LOSS_TYPES, types ^ LOSS_TYPES


@pytest.mark.parametrize("setting", REFUSED)
def test_what_the_objective_cannot_say_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting}: .* is not read into an objective"):
        policy_objective(config(**REFUSED[setting]))


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", sorted(LOSS_TYPES))
def test_the_objective_of_a_config_is_trls(
    batch: SimpleNamespace, kind: str, level: str, beta: float, corrected: bool
) -> None:
    said = {"loss_type": kind, "importance_sampling_level": level, "beta": beta, "use_bias_correction_kl": corrected}
    want, d_logits, _ = trl_loss(batch, **said)
    as_above = {"epsilon": 0.2, "epsilon_high": 0.28, "max_completion_length": LONGEST, "sapo_temperature_neg": 1.0625}
    objective = policy_objective(config(**as_above, **said))
    logits = batch.logits.clone().requires_grad_()
    given = {"advantage": batch.advantage[:, None].expand(B, T).contiguous(), "old_logprob": batch.old}
    given |= {"ref_logprob": batch.ref} if beta else {}
    out = objective(hl.Logits(logits), batch.targets, segments=batch.segments, num_items=int(ITEMS), **given)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(logits.grad, d_logits, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", sorted(LOSS_TYPES))
def test_advantages_of_each_token(batch: SimpleNamespace, kind: str, level: str) -> None:
    """Which a subclass of TRL's trainer may give: no mean over a sequence is taken of them."""
    torch.manual_seed(2)
    own = SimpleNamespace(**{**vars(batch), "advantage": torch.randn(B, T, dtype=torch.float64)})
    said = {"loss_type": kind, "importance_sampling_level": level}
    want, d_logits, _ = trl_loss(own, **said, epsilon_low=0.01, epsilon_high=0.02)
    as_above = {"epsilon": 0.01, "epsilon_high": 0.02, "max_completion_length": LONGEST, "sapo_temperature_neg": 1.0625}
    logits = batch.logits.clone().requires_grad_()
    given = {"advantage": own.advantage, "old_logprob": batch.old, "segments": batch.segments, "num_items": int(ITEMS)}
    out = policy_objective(config(**as_above, **said))(hl.Logits(logits), batch.targets, **given)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(logits.grad, d_logits, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("kind", sorted(LOSS_TYPES - {"bnpo"}))
def test_vllms_correction_is_in_the_objective(batch: SimpleNamespace, kind: str, mode: str) -> None:
    if kind == "vespo" and mode.startswith("sequence"):
        pytest.skip("TRL refuses it")
    low, high, drift = 0.8, 1.15, (batch.old - batch.sampler) * batch.mask
    ratio = (drift.sum(-1, keepdim=True) if mode.startswith("sequence") else drift).exp()
    out_of = (ratio < low) | (ratio > high)
    ratio = ratio.masked_fill(out_of, 0.0) if mode.endswith("mask") else ratio.clamp(low, high)
    said = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    want, d_logits, _ = trl_loss(batch, **said, loss_type=kind, beta=0.3, sampler_ratio=ratio)
    plain, *_ = trl_loss(batch, loss_type=kind, beta=0.3)
    assert not torch.isclose(plain, want, rtol=1e-3)
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    as_above = {"epsilon": 0.2, "epsilon_high": 0.28, "max_completion_length": LONGEST, "sapo_temperature_neg": 1.0625}
    arguments = config(
        **as_above, **said, **bounds, vllm_importance_sampling_mode=mode, loss_type=kind, beta=0.3,
        use_bias_correction_kl=False,
    )  # fmt: skip
    logits = batch.logits.clone().requires_grad_()
    given = {"advantage": batch.advantage[:, None].expand(B, T).contiguous(), "old_logprob": batch.old}
    given |= {"ref_logprob": batch.ref, "segments": batch.segments, "num_items": int(ITEMS)}
    if kind == "vespo":
        given["sampler_logprob"] = batch.sampler
    else:
        given["importance_sampling_ratio"] = ratio.expand(B, T).contiguous()
    out = policy_objective(arguments)(hl.Logits(logits), batch.targets, **given)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(logits.grad, d_logits, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_two_sided_clipping_of_a_config(batch: SimpleNamespace, level: str) -> None:
    said = {"loss_type": "dapo", "delta": 1.3, "importance_sampling_level": level}
    want, d_logits, _ = trl_loss(batch, **said)
    objective = policy_objective(config(epsilon=0.2, epsilon_high=0.28, **said))
    logits = batch.logits.clone().requires_grad_()
    given = {"advantage": batch.advantage[:, None].expand(B, T).contiguous(), "old_logprob": batch.old}
    out = objective(hl.Logits(logits), batch.targets, segments=batch.segments, num_items=int(ITEMS), **given)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(logits.grad, d_logits, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="delta"):
        policy_objective(config(delta=1.1))
