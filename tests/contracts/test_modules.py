"""Modules, configs, segments and other machinery around a call."""

from __future__ import annotations

import copy
import functools
import json
import math
import pickle
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from calls import close, objective
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headloss as hl
from headloss.losses import cross_entropy, grpo, gspo, z_loss
from headloss.trace import trace as plan


def test_activation_checkpointing() -> None:
    problem = oracle.make("Linear", bad=False)
    want = oracle.answer(objective(), problem)
    for reentrant in (False, True):
        leaves = problem.leaves()
        plan._TRACES.clear()  # a loss that is first seen inside a checkpoint

        def head(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            source = problem.source({"hidden": hidden, "weight": weight, "bias": bias}, memory=problem.budget(4))
            return objective()(source, problem.targets).loss

        loss = checkpoint(head, *leaves.values(), use_reentrant=reentrant)
        loss.backward()
        for name, x in leaves.items():
            close(x.grad, want.grads[name])


def test_fused_head_is_a_linear_layer() -> None:
    linear = nn.Linear(6, 11)
    head = hl.FusedLMHead.from_linear(linear, memory=11 * 4 * 3, softcap=5.0)
    assert head.weight is linear.weight and head.bias is linear.bias
    assert list(head.state_dict()) == list(linear.state_dict()) == ["weight", "bias"]
    head.load_state_dict(linear.state_dict())
    hidden = torch.randn(2, 5, 6)
    assert torch.equal(head(hidden), linear(hidden))
    assert isinstance(head, nn.Linear)
    fresh = hl.FusedLMHead(6, 11)
    assert fresh.bias is None and fresh(hidden).shape == (2, 5, 11)
    assert "memory" in repr(head)
    copy.deepcopy(head)(hidden)


def test_fused_head_tied_to_an_embedding() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(11, 6), "head": nn.Linear(6, 11, bias=False)})
    model["head"].weight = model["embed"].weight
    keys = list(model.state_dict())
    model["head"] = hl.FusedLMHead.from_linear(model["head"])
    assert model["head"].weight is model["embed"].weight and list(model.state_dict()) == keys
    tokens = torch.randint(11, (3, 4))
    out = model["head"](model["embed"](tokens), targets=tokens, objective=objective())
    out.loss.backward()
    eager = copy.deepcopy(model)
    eager.zero_grad()
    logits = eager["head"](eager["embed"](tokens))
    (F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + 0.1 * (logits.logsumexp(-1) ** 2).mean()).backward()
    torch.testing.assert_close(model["embed"].weight.grad, eager["embed"].weight.grad, rtol=1e-5, atol=1e-6)


def test_fused_head_with_inputs() -> None:
    problem = oracle.problem_for(gspo, "Linear", (3, 7))
    obj = hl.Objective(rl=gspo, backend="torch")
    want = oracle.answer(obj, problem)
    linear = nn.Linear(5, 37, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(problem.tensors["weight"])
        linear.bias.copy_(problem.tensors["bias"])
    head = hl.FusedLMHead.from_linear(linear, memory=problem.budget(4))
    hidden = problem.leaves()["hidden"]
    inputs = hl.Inputs(**problem.inputs, segments=problem.segments)
    out = head(hidden, targets=problem.targets, objective=obj, inputs=inputs)
    out.loss.backward()
    close(out.loss.detach(), want.loss)
    close(hidden.grad, want.grads["hidden"])
    close(linear.weight.grad, want.grads["weight"])
    close(linear.bias.grad, want.grads["bias"])
    out = head(hidden, targets=hl.prepare(problem.targets, problem.segments), objective=obj, inputs=problem.inputs)
    close(out.loss.detach(), want.loss)


def test_inputs_are_copied_and_made_anew() -> None:
    """By copy, pickle, and tools that rebuild a mapping from a dict."""
    inputs = hl.Inputs(advantage=torch.ones(3), num_items=4)
    for other in (copy.copy(inputs), copy.deepcopy(inputs), pickle.loads(pickle.dumps(inputs)), hl.Inputs(inputs)):
        assert isinstance(other, hl.Inputs) and dict(other).keys() == {"advantage", "num_items"}
        assert torch.equal(other["advantage"], inputs["advantage"]) and other["num_items"] == 4
    with pytest.raises(AttributeError, match="Inputs is immutable"):
        inputs.advantage = 1


def test_facts_are_made_anew_from_their_keys() -> None:
    """As accelerate does with every mapping in what a model returns, to cast it."""
    terms = {"ce": cross_entropy, "warm": hl.Term(z_loss, temperature=2.0)}
    out = hl.Objective(**terms)(hl.Logits(torch.randn(4, 9)), torch.arange(4))
    facts = hl.Facts({key: x.double() for key, x in out.facts.items()})
    assert list(facts) == list(out.facts) and len(facts) > 1
    assert facts.logprob.dtype is torch.float64 and torch.equal(facts["lse", 2.0].float(), out.facts["lse", 2.0])
    assert len(hl.Facts({})) == 0


def test_from_and_to_config() -> None:
    def mine(logprob, *, power=2.0):
        return logprob.abs() ** power

    config = {
        "terms": {
            "ce": {"loss": "cross_entropy", "label_smoothing": 0.1},
            "z": {"loss": "z_loss", "weight": 1e-4},
            "rl": {
                "loss": "gspo",
                "low": 3e-4,
                "reduction": "seq_mean_token_sum_norm",
                "length": 9,
                "temperature": 2.0,
            },
            "own": {"loss": "mine", "power": 3.0, "row_weight": "token_weight"},
        },
        "metrics": ["entropy", "accuracy"],
        "backend": "torch",
    }
    obj = hl.Objective.from_config(config, losses={"mine": mine})
    assert obj.to_config() == config
    again = hl.Objective.from_config(obj.to_config(), losses={"mine": mine})
    assert repr(again) == repr(obj)
    problem = oracle.make("Linear", inputs=("advantage", "old_logprob", "token_weight"))
    oracle.check(oracle.run(again, problem), oracle.answer(obj, problem))
    assert json.loads(json.dumps(obj.to_config())) == config
    short = hl.Objective.from_config({"terms": {"ce": "cross_entropy"}})
    assert short.to_config() == {"terms": {"ce": {"loss": "cross_entropy"}}}
    hot = lambda hot: hot
    several = hl.Objective(t=hl.Term(hot, facts={"hot": ("entropy", 2.0)}))
    assert several.to_config(losses={"hot": hot})["terms"]["t"]["facts"] == {"hot": ["entropy", 2.0]}


def test_shift_labels() -> None:
    labels = torch.tensor([[5, 6, 7], [-100, 8, 9]])
    assert hl.shift_labels(labels).tolist() == [[6, 7, -100], [8, 9, -100]]
    segments = hl.Segments.from_ids(torch.tensor([[0, 0, 1], [2, 3, 3]]))
    assert hl.shift_labels(labels, segments).tolist() == [[6, -100, -100], [-100, 9, -100]]
    packed = hl.shift_labels(torch.tensor([1, 2, 3, 4, 5]), hl.Segments.from_cu_seqlens(torch.tensor([0, 2, 5])))
    assert packed.tolist() == [2, -100, 4, 5, -100]


def test_ways_to_make_segments() -> None:
    same = [
        hl.Segments.from_cu_seqlens(torch.tensor([0, 2, 3, 6])),
        hl.Segments.from_ids(torch.tensor([0, 0, 1, 2, 2, 2])),
        hl.Segments.from_position_ids(torch.tensor([0, 1, 0, 0, 1, 2])),
    ]
    x = torch.arange(6.0)
    for segments in same:
        assert segments.counts.tolist() == [2, 1, 3] and len(segments) == 3
        assert segments.totals(x).tolist() == [1, 2, 12]
        assert segments.means(x).tolist() == [0.5, 2, 4]
        assert segments.mean(x).tolist() == [0.5, 0.5, 2, 4, 4, 4]
    padded = hl.Segments.from_cu_seqlens(torch.tensor([0, 2, 2, 3]), rows=5)
    assert padded.ids.tolist() == [0, 0, 2, -1, -1] and padded.counts.tolist() == [2, 0, 1]
    assert padded.means(torch.ones(5)).tolist() == [1, 0, 1]
    assert padded.spread(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1, 1, 3, 0, 0]
    batch = hl.Segments.from_batch(torch.zeros(2, 3))
    assert batch.totals(torch.arange(6.0).view(2, 3)).tolist() == [3, 12]
    assert batch.spread(torch.tensor([1.0, 2.0])).shape == (2, 3)


def test_segments_are_differentiable() -> None:
    segments = hl.Segments.from_ids(torch.tensor([2, 0, -1, 2, 0, 0]), 4)
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for fn, leaf in ((segments.totals, x), (segments.means, x), (segments.mean, x), (segments.spread, y)):
        assert torch.autograd.gradcheck(fn, (leaf,))
        assert torch.autograd.gradgradcheck(fn, (leaf,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_loss_without_a_derivative_at_zero_does_not_reach_masked_rows(dtype: torch.dtype) -> None:
    """Masked rows show the loss zeros, where this one has no derivative: nothing of that may reach a gradient."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 5).to(dtype), torch.randn(31, 5).to(dtype)
    targets = torch.randint(31, (9,)).index_fill(0, torch.tensor([2, 7]), -100)
    found = []
    for host_read in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = hl.Objective(root=lambda logprob: (-logprob).sqrt(), backend="torch")(
            hl.Linear(h, w), targets, host_read=host_read
        )
        first = torch.autograd.grad(out.loss, (h, w), retain_graph=True)  # made in the visit
        found.append((out.loss.detach(), *first, *torch.autograd.grad(out.loss, (h, w))))  # and made again
    assert all(x.isfinite().all() for x in found[1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


def test_an_objective_travels_to_other_processes() -> None:
    given = hl.Objective(
        pg=hl.Term(grpo, weight=0.5, low=0.1, reduction="token_sum"), z=z_loss, metrics=["entropy", "accuracy"]
    )
    again = pickle.loads(pickle.dumps(given))
    assert repr(again) == repr(given) and again.to_config() == given.to_config()
    logits, targets, advantage = torch.randn(4, 6), torch.arange(4), torch.randn(4)
    ours, theirs = (o(hl.Logits(logits), targets, advantage=advantage) for o in (again, given))
    assert torch.equal(ours.loss, theirs.loss) and list(ours.metrics) == list(theirs.metrics)
    moved = pickle.loads(pickle.dumps(theirs.metrics))
    assert all(float(moved[name]) == float(metric) or math.isnan(metric) for name, metric in theirs.metrics.items())


class Adapted(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def with_hook() -> torch.nn.Linear:
    linear = torch.nn.Linear(4, 9)
    linear.register_forward_hook(lambda module, given, out: 2 * out)
    return linear


@pytest.mark.parametrize(
    ("linear", "says"),
    [
        (lambda: Adapted(4, 9), r"a forward of its own \(Adapted; an adapter such as LoRA\?\)"),
        (with_hook, "it has a hook"),
        (lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 9)), "a parametrized weight"),
    ],
)
def test_a_head_of_a_layer_that_does_more_is_refused(linear: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"^linear: .*{says}"):
        hl.FusedLMHead.from_linear(linear())


@pytest.mark.parametrize("name", ["source", "targets"])
def test_inputs_leave_out_what_the_call_is_given_otherwise(name: str) -> None:
    says = f"^inputs: has '{name}', which the call is given by its own argument"
    with pytest.raises(ValueError, match=says):
        hl.Inputs({name: torch.zeros(3)})
    with pytest.raises(ValueError, match=says):
        hl.Inputs(**{name: torch.zeros(3)})
    head, objective = hl.FusedLMHead(4, 5), hl.Objective(ce=hl.losses.cross_entropy)
    with pytest.raises(ValueError, match=says):
        head(torch.zeros(3, 4), targets=torch.zeros(3, dtype=torch.long), objective=objective, inputs={name: 1})


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("temperature", 0.0, "a positive number"),
        ("scale", "x", "a number"),
        ("softcap", -1.0, "a positive number"),
        ("memory", "much", "bytes or a size"),
        ("vocab", 6, "at most 5, the number of columns, and at least 1, got 6"),
        ("vocab", 5.0, "an integer"),
        ("weight_grad_into", "gard", 'None, "grad" or "main_grad"'),
        ("logits_dtype", torch.int8, "a floating-point dtype"),
        ("weight_grad_dtype", "float32", "a floating-point dtype"),
    ],
)
def test_options_of_a_head_are_checked_when_it_is_made(option: str, value: Any, wanted: str) -> None:
    for make in (functools.partial(hl.FusedLMHead, 4, 5), functools.partial(hl.FusedLMHead.from_linear, LINEAR)):
        with pytest.raises((TypeError, ValueError), match=f"^{option}: wanted {wanted}"):
            make(**{option: value})
        make(softcap=None, temperature=torch.ones(3), vocab=3)


LINEAR = torch.nn.Linear(4, 5)


def test_sources_are_printed_by_shape() -> None:
    """Printing a source shows no values, which may be gigabytes, and leaves out what was not given."""
    head = hl.Linear(torch.randn(4, 8), torch.randn(9, 8), temperature=torch.ones(4, dtype=torch.float64), softcap=30.0)
    said = "hidden: (4, 8) float32 on cpu, weight: (9, 8) float32 on cpu, temperature: (4,) float64 on cpu"
    assert repr(head) == f"Linear({said}, softcap=30.0, vocab=9)"
    assert repr(hl.Logits(torch.randn(4, 9))) == "Logits(logits: (4, 9) float32 on cpu, vocab=9)"
    sparse = hl.Sparse(torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2))
    assert repr(sparse) == "Sparse(ids: (4, 2) int64 on cpu, logprobs: (4, 2) float32 on cpu)"
    out = objective(ce=cross_entropy)(hl.Logits(torch.randn(4, 9)), torch.arange(4))
    assert repr(hl.Meter()) == "Meter(empty)" and "entropy" in repr(hl.Meter().add(out.metrics))
