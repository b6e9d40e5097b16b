"""verl's adapter.  verl itself needs a GPU stack: `core_algos` here is a stand-in of the functions that are called.

Written after verl's main branch of early 2026 (verl/trainer/ppo/core_algos.py: `register_policy_loss`, `agg_loss`,
`compute_policy_loss_vanilla`; verl/utils/experimental/torch_functional.py: `FusedLinearForPPO`).
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.integrations import verl as adapter
from headloss.losses import LOSSES

B, T, D, V = 3, 5, 4, 11


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Stand-in of verl's function: the same signature and meaning."""
    sums = (loss_mat * loss_mask).sum(-1)
    if loss_agg_mode == "token-mean":
        return sums.sum() / (batch_num_tokens or loss_mask.sum()) * dp_size
    there = loss_mask.sum(-1) > 0
    if loss_agg_mode == "seq-mean-token-mean":
        sums = sums / loss_mask.sum(-1).clamp(min=1)
    return sums[there].sum() / (global_batch_size or there.sum()) * dp_size


@pytest.fixture
def registry() -> Iterator[dict[str, Callable[..., Any]]]:
    """verl.trainer.ppo.core_algos, as far as it is called."""
    found: dict[str, Callable[..., Any]] = {}

    def register_policy_loss(name: str) -> Callable[..., Any]:
        return lambda fn: found.setdefault(name, fn)

    names = ["verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.core_algos"]
    before = {n: sys.modules.get(n) for n in names}
    for n in names:
        sys.modules[n] = types.ModuleType(n)
    sys.modules[names[-1]].agg_loss = agg_loss  # type: ignore[attr-defined]
    sys.modules[names[-1]].register_policy_loss = register_policy_loss  # type: ignore[attr-defined]
    yield found
    for n, module in before.items():
        if module is None:
            del sys.modules[n]
        else:
            sys.modules[n] = module


@pytest.fixture
def head() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(V, (B, T))


def expected(logits: Tensor, ids: Tensor, temperature: Any) -> tuple[Tensor, Tensor]:
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, ids[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("shape", [(), (1,), (B,), (B, 1), (B, T)])
def test_log_probs_and_entropy_with_a_temperature_for_each_sample(shape: tuple[int, ...], head: Any) -> None:
    hidden, weight, ids = head
    temperature = torch.rand(shape) + 0.5
    dense = (
        temperature.reshape(-1, 1, 1)
        if shape in ((B,), (B, 1))
        else temperature.reshape(*shape, *[1] * (3 - len(shape)))
    )
    truth = expected(hidden @ weight.T, ids, dense.double())
    got = adapter.FusedLinearForPPO(memory=3 * V * 8)(hidden, weight, ids, temperature)
    pull = torch.randn(2, B, T, dtype=torch.float64)
    for a, b in zip(got, truth, strict=True):
        torch.testing.assert_close(a, b)
    grads, wanted = (
        torch.autograd.grad((x[0] * pull[0] + x[1] * pull[1]).sum(), (hidden, weight), retain_graph=True)
        for x in (got, truth)
    )
    for g, w in zip(grads, wanted, strict=True):
        torch.testing.assert_close(g, w)


def test_packed_tokens_and_logits(head: Any) -> None:
    hidden, weight, ids = head
    logits = (hidden @ weight.T).reshape(-1, V)
    temperature = torch.rand(B * T) + 0.5
    truth = expected(logits, ids.reshape(-1), temperature[:, None].double())
    for a, b in zip(adapter.log_probs_and_entropy(logits, ids.reshape(-1), temperature), truth, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(
        adapter.logprobs_from_logits(hidden @ weight.T, ids), expected(hidden @ weight.T, ids, 1.0)[0]
    )


def test_over_the_columns_that_a_token_was_sampled_from(head: Any) -> None:
    hidden, weight, ids = head
    kept = torch.zeros(B, T, V, dtype=torch.bool).scatter_(
        -1, torch.cat([ids[..., None], ids[..., None] * 0], -1), True
    )
    support = hl.Support.from_mask(kept)
    truth = expected((hidden @ weight.T).masked_fill(~kept, -1e30), ids, 1.0)
    for a, b in zip(adapter.FusedLinearForPPO()(hidden, weight, ids, support=support), truth, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(adapter.logprobs_from_logits(hidden @ weight.T, ids, support=support), truth[0])


def test_options_and_temperatures_that_fit_nothing_are_refused(head: Any) -> None:
    with pytest.raises(ValueError, match="^memory: wanted bytes or a size"):
        adapter.FusedLinearForPPO(memory="much")
    with pytest.raises(TypeError, match="^chunk_size: wanted a number, .* got '256MiB'; a budget is memory="):
        adapter.FusedLinearForPPO("256MiB")
    with pytest.raises(ValueError, match="one value per sample"):
        adapter.log_probs_and_entropy(head[0].detach() @ head[1].detach().T, head[2], torch.ones(B + 1))


class Config:
    """Stand-in of verl's ActorConfig: the fields that are read."""

    clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c = 0.2, None, 0.28, 3.0
    global_batch_info: dict[str, Any] = {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 12}  # noqa: RUF012

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(B, T)
    mask[0, 3:], mask[1, :2] = 0, 0
    log_prob = -torch.rand(B, T, dtype=torch.float64)
    old = (log_prob + 0.5 * torch.randn(B, T, dtype=torch.float64)).masked_fill(mask == 0, torch.nan)
    return old, log_prob.requires_grad_(), torch.randn(B, T, dtype=torch.float64), mask


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_grpo_in_the_registry_is_verls_dual_clip(mode: str, registry: Any) -> None:
    names = adapter.register_policy_losses()
    assert set(names) == set(registry) and "headloss_gspo" in names
    old, log_prob, advantage, mask = batch()
    weights = torch.rand(B, T, dtype=torch.float64)
    loss, metrics = registry["headloss_grpo"](old, log_prob, advantage, mask, mode, Config(), weights)

    ratio = (log_prob - old.nan_to_num()).exp()
    first = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    second = torch.minimum(-advantage * 3.0, first)
    matrix = torch.where(advantage < 0, second, first) * weights
    truth = agg_loss(matrix, mask, mode, **Config.global_batch_info)
    torch.testing.assert_close(loss, truth)
    got, wanted = (torch.autograd.grad(x, log_prob)[0] for x in (loss, truth))
    torch.testing.assert_close(got, wanted)
    inside = mask.bool()
    clipped = (-advantage * ratio.clamp(0.8, 1.28) > -advantage * ratio)[inside].double().mean()
    assert metrics["actor/pg_clipfrac"] == pytest.approx(float(clipped))
    assert metrics["actor/ppo_kl"] == pytest.approx(float((old - log_prob.detach())[inside].mean()))
    assert "actor/pg_clipfrac_lower" in metrics


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_in_the_registry_has_one_ratio_a_sequence(name: str, registry: Any) -> None:
    """verl's own, which does not read clip_ratio_c: some ratios lie above it."""
    adapter.register_policy_losses([name])
    old, log_prob, _, mask = batch()
    old = old - torch.tensor([3.0, 0.0, 0.2, *[0.1] * (B - 3)], dtype=torch.float64)[:, None]
    advantage = -torch.rand(B, 1, dtype=torch.float64).expand(B, T)
    loss, _ = registry[f"headloss_{name}"](old, log_prob, advantage, mask, "seq-mean-token-mean", Config())
    mean = ((log_prob - old.nan_to_num()) * mask).sum(-1) / mask.sum(-1)
    ratio = mean[:, None].detach().exp() * (log_prob - log_prob.detach()).exp()
    assert ratio.max() > 1.5 * Config.clip_ratio_c
    matrix = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    truth = agg_loss(matrix, mask, "seq-mean-token-mean", **Config.global_batch_info)
    torch.testing.assert_close(loss, truth)
    got, wanted = (torch.autograd.grad(x, log_prob)[0] for x in (loss, truth))
    torch.testing.assert_close(got, wanted)


def test_kl_cov_reads_how_many_tokens_it_holds_and_how_firmly(registry: Any) -> None:
    adapter.register_policy_losses(["kl_cov"])
    old, log_prob, advantage, mask = batch()
    config, inside = Config(), mask.bool()
    config.policy_loss = {"kl_cov_ratio": 0.25, "ppo_kl_coef": 0.7}
    loss, _ = registry["headloss_kl_cov"](old, log_prob, advantage, mask, "token-mean", config)
    d = log_prob - old.nan_to_num()
    a, lp = advantage[inside], log_prob.detach()[inside]
    covariance = (a - a.mean()) * (lp - lp.mean())
    held = torch.zeros_like(mask, dtype=torch.bool)
    held[inside] = covariance >= covariance.topk(int(0.25 * len(a))).values[-1]
    matrix = -d.exp() * advantage + torch.where(held, 0.7 * d.abs(), 0.0)
    torch.testing.assert_close(loss, agg_loss(matrix, mask, "token-mean", **Config.global_batch_info))


def test_every_policy_loss_runs(registry: Any) -> None:
    for name in adapter.register_policy_losses():
        old, log_prob, advantage, mask = batch()
        loss, _ = registry[name](old, log_prob, advantage, mask, "token-mean", Config())
        (grad,) = torch.autograd.grad(loss, log_prob)
        assert loss.isfinite() and grad.isfinite().all() and (grad[mask == 0] == 0).all(), name


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "sapo", "reinforce"])
def test_a_batch_without_a_token_left_logs_no_nan(name: str, registry: Any) -> None:
    """verl takes the mean over micro-batches, one of which may be masked as a whole."""
    adapter.register_policy_losses([name])
    old, log_prob, advantage, mask = batch()
    loss, metrics = registry[f"headloss_{name}"](old, log_prob, advantage, 0 * mask, "token-mean", Config())
    _, some = registry[f"headloss_{name}"](old, log_prob, advantage, mask, "token-mean", Config())
    assert float(loss) == 0 and metrics.keys() == some.keys() and set(metrics.values()) == {0.0}


def test_kimi_needs_its_beta_as_verls_dro_does(registry: Any) -> None:
    old, log_prob, advantage, mask = batch()
    config = Config()
    config.policy_loss = {"dro_beta": None}
    adapter.register_policy_losses(["kimi"])
    with pytest.raises(ValueError, match=r"policy_loss.dro_beta: wanted a positive number"):
        registry["headloss_kimi"](old, log_prob, advantage, mask, "token-mean", config)
    adapter.policy_loss("kimi", beta=0.2)(old, log_prob, advantage, mask, "token-mean", config)


def test_a_loss_that_verl_cannot_feed_is_refused() -> None:
    with pytest.raises(ValueError, match="pairs"):
        adapter.policy_loss("simpo")
    with pytest.raises(ValueError, match=r"loss: no loss 'grop'; there are a2po, .*; did you mean 'grpo'\?"):
        adapter.policy_loss("grop")
    with pytest.raises(TypeError, match="losses: wanted a list of names, got 'grpo'"):
        adapter.register_policy_losses("grpo")


def test_a_loss_of_ones_own_in_the_registry(registry: Any) -> None:
    """A partial keeps what it binds, and a metric may be a number; values of another length are not scattered."""
    old, log_prob, advantage, mask = batch()
    call = (old, log_prob, advantage, mask, "token-mean", Config())
    bound = adapter.policy_loss(functools.partial(LOSSES["grpo"], low=0.01, high=0.01, dual=None))
    assert bound.__name__ == "headloss_grpo"
    want, _ = adapter.policy_loss("grpo", low=0.01, high=0.01, dual=None)(*call)
    torch.testing.assert_close(bound(*call)[0], want)

    class Own:
        def __call__(self, logprob: Tensor, advantage: Tensor) -> Any:
            return -advantage * logprob, {"bound": 0.5, "logprob": logprob}

    loss, metrics = adapter.policy_loss(Own())(*call)
    torch.testing.assert_close(loss, agg_loss(-advantage * log_prob, mask, "token-mean", **Config.global_batch_info))
    assert metrics["actor/bound"] == 0.5
    for wrong in (lambda logprob: logprob[:, None].expand(-1, 2), lambda logprob, segments: segments.means(logprob)):
        with pytest.raises(ValueError, match=r"gave values of shape .* wanted one value per token"):
            adapter.policy_loss(wrong)(*call)
    with pytest.raises(TypeError, match="hihg: not an option of grpo.*did you mean 'high'"):
        adapter.policy_loss("grpo", hihg=0.3)
