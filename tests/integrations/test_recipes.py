"""docs/other-trainers.md: its functions against formulas written after the trainers' source of August 2026.

prime_rl/trainer/models/layers/lm_head.py and rl/loss.py, slime/utils/ppo_utils.py, openrlhf/models/{loss,utils}.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "other-trainers.md"
B, T, V, D = 3, 5, 12, 4


def page(**more: Any) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "page", **more}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, PAGE.name, "exec"), space)
    return space


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def dense(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logp = logits.log_softmax(-1)
    return logp.gather(-1, labels[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def test_prime_rls_head() -> None:
    torch.manual_seed(0)
    head = page()["HeadlossOutputLinear"](D, V, chunk_size=2).double()
    hidden, labels, temperature = normal(B, T, D).requires_grad_(), torch.randint(V, (B, T)), torch.rand(B, T) + 0.5
    found = head(hidden, labels, temperature=temperature)
    wanted = dense(hidden @ head.weight.T / temperature[..., None].double(), labels)
    pull = normal(2, B, T)
    for a, b in zip((found["logprobs"], found["entropy"]), wanted, strict=True):
        torch.testing.assert_close(a, b)
    pulled = [(p[0] * pull[0] + p[1] * pull[1]).sum() for p in (list(found.values()), wanted)]
    grads = [torch.autograd.grad(x, (hidden, head.weight)) for x in pulled]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("weighted", [False, True])
def test_prime_rls_loss(weighted: bool) -> None:
    torch.manual_seed(1)
    logprob, old = (-2 + 0.1 * normal(T)).requires_grad_(), -2 + 0.1 * normal(T)
    mask, weights = torch.tensor([1, 0, 1, 1, 1]) > 0, torch.rand(T).double()
    inputs = SimpleNamespace(
        trainer_logprobs=logprob, inference_logprobs=old, advantages=torch.full((T,), -0.7, dtype=torch.float64),
        loss_mask=mask, loss_weights=weights if weighted else None, ref_logprobs=None,
    )  # fmt: skip
    out = page(LossOutputs=SimpleNamespace)["sequence_loss"](inputs, low=0.01, high=0.02)
    s = (logprob - old)[mask].mean().exp()
    each = -torch.minimum(s * -0.7, s.clamp(0.99, 1.02) * -0.7)
    wanted = each * (weights[mask].sum() if weighted else mask.sum())
    torch.testing.assert_close(out.loss, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x, logprob, retain_graph=True)[0] for x in (out.loss, wanted)))
    assert out.metrics and all(x.ndim == 0 for x in out.metrics.values())


def slimes_log_probs() -> None:
    """Run on two ranks by test_megatron.py, whose ranks are there already."""
    torch.manual_seed(2)
    fn = page()["calculate_log_probs_and_entropy"]
    whole, tokens, pull = normal(T, V), torch.randint(V, (T,)), normal(2, T)
    columns = slice(V // 2 * dist.get_rank(), V // 2 * (dist.get_rank() + 1))
    leaf, mine = whole.clone().requires_grad_(), whole[:, columns].clone().requires_grad_()
    wanted, found = dense(leaf, tokens), fn(mine, tokens, dist.group.WORLD, with_entropy=True)
    torch.testing.assert_close(found, wanted)
    grads = [
        torch.autograd.grad((p[0] * pull[0] + p[1] * pull[1]).sum(), x)[0] for p, x in ((wanted, leaf), (found, mine))
    ]
    torch.testing.assert_close(grads[1], grads[0][:, columns])
    assert fn(mine, tokens, dist.group.WORLD)[1] is None
    assert not fn(mine, tokens, dist.group.WORLD, with_entropy=True, with_entropy_grad=False)[1].requires_grad
    with pytest.raises(ValueError, match="log_prob_keep_mask"):
        fn(mine, tokens, dist.group.WORLD, log_prob_keep_mask=torch.ones(T, V))


def test_openrlhfs_loss() -> None:
    torch.manual_seed(3)
    space = page()
    logits, labels = normal(B, T, V).requires_grad_(), torch.randint(V, (B, T))
    before = logits.detach().clone()
    logprob = space["log_probs_from_logits"](logits, labels, temperature=0.7)
    torch.testing.assert_close(logprob, dense(logits / 0.7, labels)[0])
    assert torch.equal(logits.detach(), before)
    old, A, mask = logprob.detach() + 0.4 * normal(B, T), normal(B, 1).expand(B, T), (torch.rand(B, T) > 0.3).double()
    for counts, tokens in (({}, mask.sum()), ({"batch_num_tokens": 40.0, "dp_size": 2}, 20.0)):
        loss, clipped, kl, _ = space["CispoLoss"]()(logprob, old, A, mask, **counts)
        ratio = (logprob - old).exp().detach()
        wanted = (-ratio.clamp(0.8, 1.28) * A * logprob * mask).sum() / tokens
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, wanted)))
        torch.testing.assert_close(kl.double(), ((old - logprob.detach()) * mask).sum() / mask.sum())
        assert 0 < clipped < 1
