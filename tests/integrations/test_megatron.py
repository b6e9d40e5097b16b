"""Megatron's adapter on two gloo ranks, against the dense loss in float64.

Megatron-LM needs a GPU stack.  What it is asked for, `parallel_state.get_tensor_model_parallel_group`, is played by a
stand-in; signatures follow its main branch of early 2026 (megatron/core/tensor_parallel/cross_entropy.py).
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import test_recipes
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "ranks"))
from spawn import Ranks

from headloss.integrations import megatron

S, B, V, D = 5, 3, 24, 4


def problem() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, B, D, generator=random, dtype=torch.float64)
    weight = torch.randn(V, D, generator=random, dtype=torch.float64)
    return hidden, weight, torch.randint(V - 5, (S, B), generator=random)


def stand_in_for_megatron() -> None:
    names = ["megatron", "megatron.core", "megatron.core.parallel_state"]
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[-1]].get_tensor_model_parallel_group = lambda: dist.group.WORLD  # type: ignore[attr-defined]


def dense(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Mass 1 - a on the target and a on the others, evenly."""
    logp = logits.log_softmax(-1)
    q = torch.full_like(logp, smoothing / (logits.shape[-1] - 1)).scatter(-1, target[..., None], 1 - smoothing)
    return -(q * logp).sum(-1)


def both_losses(smoothing: float, vocab: int | None) -> None:
    stand_in_for_megatron()
    hidden, weight, target = problem()
    rank, size = dist.get_rank(), dist.get_world_size()
    columns = slice(rank * V // size, (rank + 1) * V // size)
    whole = (hidden @ weight.T)[..., :vocab].requires_grad_()
    pull = torch.linspace(-1, 2, S * B, dtype=torch.float64).view(S, B)
    truth = dense(whole, target, smoothing)
    entropy = -(whole.softmax(-1) * whole.log_softmax(-1)).sum(-1)
    (wanted,) = torch.autograd.grad(((truth - 0.1 * entropy) * pull).sum(), whole)
    wanted = torch.nn.functional.pad(wanted, (0, V - (vocab or V)))[..., columns]

    logits = (hidden @ weight.T)[..., columns].contiguous().requires_grad_()
    loss = megatron.vocab_parallel_cross_entropy(logits, target, smoothing, vocab=vocab)
    found = megatron.vocab_parallel_entropy(logits, dist.group.WORLD, vocab=vocab)
    assert loss.shape == (S, B)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(found, entropy)
    (grad,) = torch.autograd.grad(((loss - 0.1 * found) * pull).sum(), logits)
    torch.testing.assert_close(grad, wanted)
    log_probs, again = megatron.vocab_parallel_log_probs_and_entropy(logits, target, vocab=vocab)
    torch.testing.assert_close(log_probs, -dense(whole, target, 0.0))
    torch.testing.assert_close(again, entropy)


def an_objective_on_the_head() -> None:
    import headloss as hl
    from headloss.losses import cross_entropy, z_loss

    hidden, weight, target = problem()
    rank, size = dist.get_rank(), dist.get_world_size()
    columns = slice(rank * V // size, (rank + 1) * V // size)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = leaves[0] @ leaves[1].T
    truth = dense(logits, target, 0.0).mean() + 1e-2 * logits.logsumexp(-1).square().mean()
    wanted = torch.autograd.grad(truth, leaves)
    mine = hidden.clone().requires_grad_(), weight[columns].clone().requires_grad_()
    source = megatron.linear_source(*mine, dist.group.WORLD, memory=8 * V * 8)
    out = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=1e-2))(source, target)
    grads = torch.autograd.grad(out.loss, mine)
    torch.testing.assert_close(out.loss, truth)
    torch.testing.assert_close(grads[0], wanted[0])
    torch.testing.assert_close(grads[1], wanted[1][columns])


def partial_hidden_sums_to_the_gradient() -> None:
    import headloss as hl
    from headloss.losses import cross_entropy

    hidden, weight, target = problem()
    leaf = hidden.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(dense(leaf @ weight.T, target, 0.0).mean(), leaf)
    part = weight.chunk(dist.get_world_size())[dist.get_rank()].clone()
    mine = hidden.clone().requires_grad_()
    source = megatron.linear_source(mine, part, dist.group.WORLD, partial_hidden=True)
    (grad,) = torch.autograd.grad(hl.Objective(ce=cross_entropy)(source, target).loss, mine)
    assert not torch.allclose(grad, wanted)
    dist.all_reduce(grad)
    torch.testing.assert_close(grad, wanted)


def a_pair_without_tokens_on_the_first_rank() -> None:
    """Context parallel: the first rank holds the prompt alone, and the loss of a pair stands on it."""
    import headloss as hl

    alone = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
    g = torch.Generator().manual_seed(3)
    hidden, weight, ref = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((2, 8, 4), (11, 4), (2, 8)))
    labels, mask = torch.randint(11, (2, 8), generator=g), torch.ones(2, 8, dtype=torch.float64)
    mask[:, :4] = 0
    leaf = hidden.clone().requires_grad_()
    gains = ((-dense(leaf @ weight.T, labels, 0.0) - ref) * mask).sum(1)
    wanted = -torch.nn.functional.logsigmoid(0.1 * (gains[0] - gains[1]))
    wanted.backward()
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    x = hidden[:, mine].transpose(0, 1).clone().requires_grad_()
    layer = types.SimpleNamespace(weight=weight, bias=None, sequence_parallel=False)
    lines = hl.Segments.from_ids(torch.arange(2)[:, None].expand(2, 4), 2, group=dist.group.WORLD)
    process = megatron.OutputProcessor(hl.Objective(dpo=hl.Term(hl.losses.dpo, reduction="token_sum")), tp_group=alone)
    found = process(
        hidden_states=x, output_layer=layer, output_weight=None, labels=labels[:, mine], loss_mask=mask[:, mine],
        context=hl.Inputs(segments=lines, pairs=torch.tensor([[0, 1]]), ref_logprob=hl.PerRow(ref[:, mine])),
    )  # fmt: skip
    total = (found * mask[:, mine]).sum()
    total.backward()
    reported = total.detach().clone()
    dist.all_reduce(reported)
    torch.testing.assert_close(reported, wanted.detach())
    torch.testing.assert_close(x.grad.transpose(0, 1), leaf.grad[:, mine])


@pytest.fixture(scope="module")
def pair() -> Any:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(("smoothing", "vocab"), [(0.0, None), (0.1, None), (0.1, V - 5)])
def test_loss_and_entropy_over_shards(pair: Ranks, smoothing: float, vocab: int | None) -> None:
    pair.run(both_losses, smoothing, vocab)


def test_an_objective_on_hidden_states(pair: Ranks) -> None:
    pair.run(an_objective_on_the_head)
    pair.run(partial_hidden_sums_to_the_gradient)


def test_the_loss_of_a_pair_is_reported_where_its_tokens_are(pair: Ranks) -> None:
    pair.run(a_pair_without_tokens_on_the_first_rank)


def test_slimes_log_probs(pair: Ranks) -> None:
    """The recipe of docs/other-trainers.md, on logits whose vocabulary ranks share."""
    pair.run(test_recipes.slimes_log_probs)


def test_wrong_smoothing_is_refused() -> None:
    with pytest.raises(ValueError, match="label_smoothing"):
        megatron.vocab_parallel_cross_entropy(torch.zeros(1, 1, 4), torch.zeros(1, 1).long(), 1.0)


def test_a_loss_inside_the_output_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions of Megatron with cross_entropy_fusion_impl="linear" make it."""

    class LanguageModule:
        def __init__(self, config: Any, more: int = 0) -> None:
            self.config, self.more = config, more

        compute_language_model_loss = None

    name = "megatron.core.models.common.language_module.language_module"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(LanguageModule=LanguageModule))  # type: ignore[arg-type]
    for _ in range(2):
        megatron.replace_cross_entropy()
    assert LanguageModule.compute_language_model_loss is megatron.compute_language_model_loss
    config = types.SimpleNamespace(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    assert LanguageModule(config=config, more=2).more == 2
    config.cross_entropy_fusion_impl = "linear"
    with pytest.raises(ValueError, match="cross_entropy_fusion_impl: 'linear' makes the loss inside the output layer"):
        LanguageModule(config)
    config.cross_entropy_loss_fusion = False
    assert LanguageModule(config).config is config


class Adapted(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("loss", "reduction", "says"),
    [
        ("cross_entropy", "seq_mean_token_sum", "num_segments: term 'it'"),
        ("cross_entropy", "weighted_mean", "its own micro-batch"),
        ("rloo", "token_mean", "num_segments: term 'it'"),
        ("simpo", "token_mean", "pairs of its own micro-batch"),
    ],
)
def test_means_that_megatron_does_not_count_are_refused(loss: str, reduction: str, says: str) -> None:
    """It divides what comes back by its tokens."""
    import headloss as hl
    from headloss.losses import LOSSES

    head = megatron.OutputProcessor(hl.Objective(it=hl.Term(LOSSES[loss], reduction=reduction)))
    given: dict[str, Any] = {"hidden_states": torch.zeros(3, 2, 4), "output_weight": None}
    given |= {"labels": torch.zeros(2, 3).long(), "context": {"segments": hl.Segments.from_batch((2, 3))}}
    with pytest.raises(ValueError, match=says):
        head(output_layer=torch.nn.Linear(4, 8, bias=False), **given)
    both = hl.Objective(it=hl.Term(LOSSES["cross_entropy"], reduction="seq_mean_token_mean"), z=LOSSES["z_loss"])
    more = {**given, "context": {**given["context"], "num_segments": 2}}
    with pytest.raises(ValueError, match="num_items: term 'z' is a mean over tokens and 'it' one over sequences"):
        megatron.OutputProcessor(both)(output_layer=torch.nn.Linear(4, 8, bias=False), **more)
    ce = megatron.OutputProcessor(hl.Objective(it=LOSSES["cross_entropy"]))
    for option in ({"weight_grad_into": "main"}, {"softcaps": 2.0}):
        with pytest.raises((TypeError, ValueError), match=f"^{next(iter(option))}: "):
            megatron.OutputProcessor(ce.objective, **option)
    adapted, hooked = Adapted(4, 8, bias=False), torch.nn.Linear(4, 8, bias=False)
    hooked.register_forward_hook(lambda module, args, out: 2 * out)
    for layer, more in ((adapted, r"a forward of its own \(Adapted"), (hooked, "a hook")):
        with pytest.raises(TypeError, match=f"output_layer: it has {more}.*, which the objective would leave out"):
            ce(output_layer=layer, **given)
    later = torch.nn.Linear(4, 8, bias=False)
    later.config = types.SimpleNamespace(defer_embedding_wgrad_compute=True)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="output_layer: defer_embedding_wgrad_compute .*; turn it off"):
        ce(output_layer=later, **given)
    layer, capped = torch.nn.Linear(4, 8, bias=False), lambda x: 2 * (x / 2).tanh()
    for how in ({}, {"scale": 0.5}, {"softcap": 3.0}):
        process = megatron.OutputProcessor(hl.Objective(it=LOSSES["cross_entropy"]), **how)
        with pytest.raises(ValueError, match="scale_logits: the model turns logits .* into .*, but scale="):
            process(output_layer=layer, scale_logits=capped, **given)
    assert megatron._factor(capped, {"softcap": 2.0}) == 1.0 and megatron._factor(lambda x: 0.25 * x, {}) == 0.25
    with pytest.raises(ValueError, match="loss_mask: 2 tokens have a weight other than 0 or 1"):
        ce(output_layer=layer, loss_mask=torch.tensor([[1.0, 0.5, 0.0], [1.0, 1.0, 2.0]]), **given)
    with pytest.raises(ValueError, match="output_layer: it has a bias"):
        ce(output_layer=torch.nn.Linear(4, 8), **given)
