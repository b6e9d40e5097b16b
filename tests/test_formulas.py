"""Each loss against a formula written apart from it.

A module in `tests/formulas` has a dict FORMULAS from a loss's name to a function with the loss's inputs and options.
A loss that no module knows makes this file red.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from oracle import LOSSES

import headloss as hl
from headloss.losses import cross_entropy

FORMULAS: dict[str, Callable[..., Any]] = {}
for _path in sorted((Path(__file__).parent / "formulas").glob("*.py")):
    _spec = importlib.util.spec_from_file_location(f"formulas_{_path.stem}", _path)
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    for _name, _formula in _module.FORMULAS.items():
        assert _name not in FORMULAS, f"{_name} has two formulas"
        FORMULAS[_name] = _formula

OPTIONS: dict[str, list[dict[str, Any]]] = {  # beside the defaults
    "cross_entropy": [{"label_smoothing": 0.1}, {"label_smoothing": 1.0}],
    "focal": [{"gamma": 0.5}, {"gamma": 0.0}, {"gamma": 1.0}],
    "grpo": [{"low": 0.05, "high": 0.3}],
    "gspo": [{"low": 0.02, "high": 0.05}],
    "eaft": [{"alpha": 0.3, "unit": 3.0}],
    "deft": [{"alpha": 0.3}],
    "uld": [{"rest": "none"}],
    "value_loss": [{"clip": 0.3}, {"huber": 0.5}],
}
CASES = [(name, options) for name in LOSSES for options in [{}, *OPTIONS.get(name, [])]]


def test_every_loss_has_a_formula() -> None:
    missing = sorted(set(LOSSES) - set(FORMULAS))
    assert not missing, f"write formulas for {missing} in tests/formulas"
    assert not set(FORMULAS) - set(LOSSES), "a formula of no loss"


@pytest.mark.parametrize("transform", [{}, {"temperature": 1.7, "softcap": 5.0}], ids=["plain", "transformed"])
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("name, options", CASES, ids=[f"{n}{o or ''}" for n, o in CASES])
def test_formula(name: str, options: dict[str, Any], kind: str, transform: dict[str, Any]) -> None:
    loss, formula = LOSSES[name], FORMULAS[name]
    problem = oracle.problem_for(loss, kind, (19,), vocab=31, transform=transform)
    leaves = problem.leaves()
    v = oracle.view(problem, leaves, problem.inputs)
    term = hl.Term(loss, **options)
    arguments = v.arguments(formula, term)
    if "logits" in inspect.signature(formula).parameters:
        arguments["logits"] = v.softmax(None).s_RV
    if "teacher_logits" in inspect.signature(formula).parameters:
        arguments["teacher_logits"] = v.softmax(None).teacher_s_RV
    values = formula(**arguments, **options)
    torch.manual_seed(5)
    want = v.reduced(term, values)
    want.backward()
    got = oracle.run(hl.Objective(term=term, backend="torch"), problem, memory=problem.budget(4))
    torch.testing.assert_close(got.loss, want.detach(), rtol=1e-10, atol=1e-10)
    for tensor, x in leaves.items():
        wanted = torch.zeros_like(x) if x.grad is None else x.grad
        torch.testing.assert_close(got.grads[tensor], wanted, rtol=1e-10, atol=1e-10)
    for given, x in problem.inputs.items():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            assert x.grad is not None and x.grad.any()
            torch.testing.assert_close(got.grads[f"input:{given}"], x.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["token_mean", "token_sum"])
@pytest.mark.parametrize("peaked", [False, True])
def test_torch_cross_entropy(smoothing: float, reduction: str, peaked: bool) -> None:
    problem = oracle.make("Linear", (21,), 43, peaked=peaked, bad=False)
    how = reduction.split("_")[1]
    eager, fused, ours = problem.leaves(), problem.leaves(), problem.leaves()
    F.cross_entropy(
        problem.logits(eager), problem.targets, reduction=how, label_smoothing=smoothing, ignore_index=-100
    ).backward()
    objective = hl.Objective(ce=hl.Term(cross_entropy, label_smoothing=smoothing, reduction=reduction))
    objective(problem.source(ours, memory=problem.budget(5)), problem.targets).loss.backward()
    for name, x in eager.items():
        torch.testing.assert_close(ours[name].grad, x.grad, rtol=1e-11, atol=1e-11)
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    F.linear_cross_entropy(
        fused["hidden"], fused["weight"], problem.targets,
        linear_bias=fused["bias"], reduction=how, label_smoothing=smoothing, ignore_index=-100,
    ).backward()  # fmt: skip
    for name, x in fused.items():
        torch.testing.assert_close(ours[name].grad, x.grad, rtol=1e-11, atol=1e-11)


def test_class_weights() -> None:
    """torch's weight= is a row weight made from the targets, with the weighted mean."""
    problem = oracle.make("Logits", (21,), 11, bad=False)
    class_weight = torch.rand(11, dtype=torch.float64)
    term = hl.Term(cross_entropy, row_weight=lambda targets: class_weight[targets], reduction="weighted_mean")
    got = oracle.run(hl.Objective(ce=term), problem)
    logits = problem.leaves()["logits"]
    want = F.cross_entropy(logits, problem.targets, weight=class_weight)
    want.backward()
    torch.testing.assert_close(got.loss, want.detach())
    torch.testing.assert_close(got.grads["logits"], logits.grad)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_confident_tokens_have_finite_gradients(gamma: float) -> None:
    """p[y] = 1 to the last digit: 0 ** gamma and its derivative must not give NaN."""
    logits = torch.tensor([[200.0, 0.0, -5.0], [0.0, 1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    out = hl.Objective(f=hl.Term(LOSSES["focal"], gamma=gamma))(hl.Logits(logits), torch.tensor([0, 1]))
    out.loss.backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert out.loss.isfinite()
