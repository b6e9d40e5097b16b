"""torchtitan's adapter, whole, sharded over the vocabulary, and under FSDP2 on two ranks.

`torchtitan.components.loss` needs packages that are not here.  A stand-in plays what is inherited from it, after
torchtitan's main branch of 2026: `Configurable` (a Config with slots that builds its owner) and `ChunkedLossWrapper`.
"""

from __future__ import annotations

import functools
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.append(str(Path(__file__).parent.parent / "ranks"))
from spawn import Ranks

import headloss as hl


class Configurable:
    """Stand-in of torchtitan.config.Configurable: `Config.build(**kwargs)` makes the owner."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        owner: ClassVar[Any] = None

        def build(self, **kwargs: Any) -> Any:
            return type(self).owner(config=self, **kwargs)

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            cls.Config.owner = cls


class BaseLoss(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass


class ChunkedLossWrapper(BaseLoss):
    """Stand-in of torchtitan's class: what the trainer calls on it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        num_chunks: int = 8

    def set_lm_head(self, lm_head: nn.Module) -> None:
        self.lm_head = lm_head


def adapter() -> Any:
    if "torchtitan.components.loss" not in sys.modules:
        for name in ("torchtitan", "torchtitan.components", "torchtitan.components.loss"):
            sys.modules[name] = types.ModuleType(name)
        vars(sys.modules["torchtitan.components.loss"]).update(ChunkedLossWrapper=ChunkedLossWrapper, BaseLoss=BaseLoss)
    from headloss.integrations import torchtitan

    return torchtitan


N, V, D, TOKENS = 12, 23, 6, 40
OBJECTIVE = {
    "terms": {"ce": "cross_entropy", "z": {"loss": "z_loss", "weight": 0.01}},
    "metrics": ["entropy", "perplexity"],
}


def problem(seed: int = 0) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(7)
    head = nn.Linear(D, V, bias=False, dtype=torch.float64)
    torch.manual_seed(seed)
    labels = torch.randint(V, (N,))
    labels[::4] = -100
    return head, torch.randn(N, D, dtype=torch.float64, requires_grad=True), labels


def dense(hidden: Tensor, weight: Tensor, labels: Tensor, tokens: float = TOKENS) -> Tensor:
    logits = (hidden @ weight.T)[labels != -100]
    ce = nn.functional.cross_entropy(logits, labels[labels != -100], reduction="sum")
    return (ce + 0.01 * logits.logsumexp(-1).square().sum()) / tokens


def build(**config: Any) -> Any:
    return (
        adapter().HeadlossLoss.Config(objective=OBJECTIVE, memory=f"{5 * V * 8}B", **config).build(compile_config=None)
    )


@pytest.mark.parametrize("tokens", [TOKENS, None])
def test_loss_gradients_and_metrics(tokens: int | None) -> None:
    head, hidden, labels = problem()
    loss_fn = build()
    loss_fn.set_lm_head(head)
    loss, metrics = loss_fn(hidden, labels, None if tokens is None else torch.tensor(tokens))
    truth = dense(hidden, head.weight, labels, tokens or 1)
    torch.testing.assert_close(loss, truth)
    got, wanted = (torch.autograd.grad(x, (hidden, head.weight), retain_graph=True) for x in (loss, truth))
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w)
    assert "perplexity/mean" not in metrics
    if tokens:
        logp = (hidden @ head.weight.T)[labels != -100].log_softmax(-1)
        entropy = -(logp.exp() * logp).sum() / tokens
        torch.testing.assert_close(metrics["entropy/mean"].double(), entropy, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "transform"),
    [
        ({"softcap": 0.5}, lambda z: 0.5 * (z / 0.5).tanh()),
        ({"scale": 0.25, "temperature": 2.0}, lambda z: z * 0.125),
        ({"vocab": V - 3}, lambda z: z[:, : V - 3]),
    ],
)
def test_a_fused_head_keeps_its_options(options: dict[str, Any], transform: Any) -> None:
    plain, hidden, labels = problem()
    labels = labels.clamp(max=V - 4)
    loss_fn = adapter().HeadlossLoss.Config().build()
    loss_fn.set_lm_head(hl.FusedLMHead.from_linear(plain, **options))
    loss, _ = loss_fn(hidden, labels, torch.tensor(TOKENS))
    logits = transform(hidden @ plain.weight.T)
    truth = nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100) / TOKENS
    torch.testing.assert_close(loss, truth)
    for g, w in zip(*(torch.autograd.grad(x, (hidden, plain.weight)) for x in (loss, truth)), strict=True):
        torch.testing.assert_close(g, w)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledHead(hl.FusedLMHead):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*args, **kwargs)


def test_a_head_that_does_more_than_a_product_is_refused() -> None:
    _, hidden, labels = problem()
    own, replaced, normed = Doubled(D, V), nn.Linear(D, V), nn.utils.parametrizations.weight_norm(nn.Linear(D, V))
    replaced.forward = lambda x: 2 * x  # type: ignore[method-assign]
    hooked, before, fused = nn.Linear(D, V), nn.Linear(D, V), DoubledHead(D, V)
    hooked.register_forward_hook(lambda module, args, out: 2 * out)
    before.register_forward_pre_hook(functools.partial(lambda k, module, args: k * args[0], 2.0))
    loss_fn = build()
    for head, said in (
        (own, r"Doubled; an adapter"), (replaced, "a forward of its own"), (normed, "parametrized"),
        (hooked, "a hook"), (before, "a hook"), (fused, "DoubledHead"),
    ):  # fmt: skip
        loss_fn.set_lm_head(head)
        with pytest.raises(TypeError, match=rf"lm_head: it has .*{said}.*, which HeadlossLoss would leave out"):
            loss_fn(hidden, labels, torch.tensor(TOKENS))


def test_inputs_go_by_name_and_a_validation_needs_no_gradient() -> None:
    loss_fn = adapter().HeadlossLoss.Config(objective={"terms": {"rl": "reinforce"}}).build()
    head, hidden, labels = problem()
    loss_fn.set_lm_head(head)
    with torch.no_grad():
        loss, metrics = loss_fn(hidden, labels, torch.tensor(TOKENS), advantage=torch.ones(N))
    assert not loss.requires_grad and metrics["rl/advantage/max"] == 1
    with pytest.raises(TypeError, match="advantages"):
        loss_fn(hidden, labels, torch.tensor(TOKENS), advantages=torch.ones(N))


def test_the_rl_trainers_inputs_go_to_those_who_take_them() -> None:
    """By the input's name, which need not be that of the parameter, and to row weights and metrics as well."""
    term = {"loss": "reinforce", "inputs": {"advantage": "reward"}, "row_weight": "old_logprob"}
    loss_fn = adapter().HeadlossLoss.Config(objective={"terms": {"rl": term}}).build()
    head, hidden, labels = problem()
    loss_fn.set_lm_head(head)
    old, reward = torch.rand(N).to(hidden.dtype), torch.randn(N).to(hidden.dtype)
    given = {"generator_logprobs": old, "loss_mask": torch.ones(N), "advantages": torch.zeros(N), "reward": reward}
    loss, _ = loss_fn(hidden, labels, torch.tensor(TOKENS), **given)
    logprob = (hidden @ head.weight.T).log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    torch.testing.assert_close(loss, -(logprob * reward * old)[labels != -100].sum() / TOKENS)


def test_a_part_of_a_document_is_not_taken_for_one() -> None:
    """Positions of lines that context parallelism has cut do not begin with 0, as torchtitan's data does."""
    by_document = {"ce": {"loss": "cross_entropy", "reduction": "seq_mean_token_mean"}}
    loss_fn = adapter().HeadlossLoss.Config(objective={"terms": by_document}).build()
    head, hidden, labels = problem()
    loss_fn.set_lm_head(head)
    hidden, labels = hidden.view(2, 6, D), labels.view(2, 6)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]])
    more = {"num_segments": torch.tensor(3)}
    loss, _ = loss_fn(hidden, labels, torch.tensor(TOKENS), positions=positions, **more)
    logp = (hidden @ head.weight.T).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    mine = [logp[0, :4][labels[0, :4] != -100], logp[0, 4:][labels[0, 4:] != -100], logp[1][labels[1] != -100]]
    torch.testing.assert_close(loss, -sum(x.mean() for x in mine) / 3)
    with pytest.raises(ValueError, match="^positions: 1 lines begin inside a document.*pass segments="):
        loss_fn(hidden, labels, torch.tensor(TOKENS), positions=positions + torch.tensor([[0], [6]]), **more)
    cut = hl.Segments.from_position_ids(positions)
    loss_fn(hidden, labels, torch.tensor(TOKENS), positions=positions + 6, segments=cut, **more)


def test_labels_that_were_prepared_before_the_model_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Used where they are the same tensor, once; on a CPU nothing needs to travel, so a stand-in does."""
    from headloss.integrations import early_targets

    seen: list[hl.Prepared] = []
    monkeypatch.setattr(
        early_targets, "prepared", lambda targets, segments=None: seen.append(hl.prepare(targets)) or seen[-1]
    )
    head, hidden, labels = problem()
    loss_fn = build()
    loss_fn.set_lm_head(head)
    taken: list[Any] = []
    inner = loss_fn.objective

    def objective(source: Any, targets: Any, **call: Any) -> Any:
        taken.append(targets)
        return inner(source, targets, **call)

    objective.terms = inner.terms
    loss_fn.objective = objective
    loss_fn.before(labels)
    losses = [loss_fn(hidden, x, torch.tensor(TOKENS))[0] for x in (labels, labels)]
    loss_fn.before(labels.clone())  # of another batch
    losses.append(loss_fn(hidden, labels, torch.tensor(TOKENS))[0])
    assert taken[0] is seen[0] and taken[1] is labels and taken[2] is labels
    for loss in losses:
        torch.testing.assert_close(loss, dense(hidden, head.weight, labels))
    loss_fn.before(labels)
    labels[0] = -100  # by the model's forward
    torch.testing.assert_close(loss_fn(hidden, labels, torch.tensor(TOKENS))[0], dense(hidden, head.weight, labels))
    assert taken[3] is labels


def test_a_head_that_was_not_set_is_named() -> None:
    with pytest.raises(RuntimeError, match="set_lm_head"):
        build()(*problem()[1:])


def over_the_vocabulary() -> None:
    head, hidden, labels = problem()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    wanted = torch.autograd.grad(dense(hidden, head.weight, labels), (hidden, head.weight))
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    loss_fn = build()
    loss_fn.set_lm_head(head)
    loss, _ = loss_fn(hidden, labels, torch.tensor(TOKENS))
    loss.backward()
    torch.testing.assert_close(hidden.grad, wanted[0])
    assert head.weight.grad.placements == (Shard(0),)  # type: ignore[attr-defined,union-attr]
    torch.testing.assert_close(head.weight.grad.full_tensor(), wanted[1])  # type: ignore[attr-defined,union-attr]


def under_fsdp() -> None:
    mesh = init_device_mesh("cpu", (2,))
    every = [problem(seed) for seed in range(2)]
    weight = every[0][0].weight
    whole = [dense(hidden, weight, labels) for _, hidden, labels in every]
    (wanted,) = torch.autograd.grad(sum(whole), weight)
    head, hidden, labels = problem(dist.get_rank())
    fully_shard(head, mesh=mesh)
    head.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    loss_fn = build()
    loss_fn.set_lm_head(head)
    loss, _ = loss_fn(hidden, labels, torch.tensor(TOKENS))
    loss.backward()
    torch.testing.assert_close(loss, whole[dist.get_rank()])
    torch.testing.assert_close(head.weight.grad.full_tensor(), wanted)  # type: ignore[union-attr,attr-defined]
    assert "forward" not in vars(head)


@pytest.fixture(scope="module")
def pair() -> Any:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("how", [over_the_vocabulary, under_fsdp])
def test_on_two_ranks(pair: Ranks, how: Any) -> None:
    pair.run(how)


@pytest.mark.parametrize(
    ("loss", "reduction", "says"),
    [
        ("cross_entropy", "seq_mean_token_mean", "num_segments: term 'it'"),
        ("cross_entropy", "weighted_mean", "its own micro-batch"),
        ("rloo", "token_mean", "num_segments: term 'it'"),
    ],
)
def test_means_that_micro_batches_do_not_add_up_to_are_refused(loss: str, reduction: str, says: str) -> None:
    """torchtitan adds up the losses of micro-batches: two halves have to be the whole."""
    objective = {"terms": {"it": {"loss": loss, "reduction": reduction}}}
    loss_fn = adapter().HeadlossLoss.Config(objective=objective).build(compile_config=None)
    head, hidden, labels = problem()
    loss_fn.set_lm_head(head)
    lines = (hidden.view(4, 3, D), labels.view(4, 3), torch.tensor(TOKENS))
    positions = torch.arange(3).expand(4, 3)
    more = {"advantage": torch.tensor([[1.0], [2.0], [-1.0], [0.5]]).expand(4, 3)} if loss == "rloo" else {}
    with pytest.raises(ValueError, match=says):
        loss_fn(*lines, positions=positions, **more)
    if reduction != "weighted_mean":
        whole = loss_fn(*lines, positions=positions, num_segments=4, **more)[0]
        halves = [
            loss_fn(
                lines[0][i : i + 2], lines[1][i : i + 2], lines[2], positions=positions[:2], num_segments=4,
                **{name: x[i : i + 2] for name, x in more.items()},
            )[0]
            for i in (0, 2)
        ]  # fmt: skip
        torch.testing.assert_close(halves[0] + halves[1], whole)
