"""Losses of ours are noted, not traced with symbols: the same trace, soon, and without torch's compiler."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import oracle
import pytest
import torch
from torch.fx.experimental import proxy_tensor

import headloss as hl
from headloss.losses import LOSSES
from headloss.trace import dynamic_shapes
from headloss.trace import trace as traces
from headloss.trace.classify import subgraph


def traced(name: str, kind: str = "Logits", **options: Any) -> list[Any]:
    """All that is kept of the traces of a loss but their graphs, and the operations of those."""
    compares = "logq" in inspect.signature(LOSSES[name]).parameters
    problem = oracle.make(kind, (9,), teacher=True) if compares else oracle.problem_for(LOSSES[name], kind, (9,))
    traces._TRACES.clear()
    oracle.run(hl.Objective(x=hl.Term(LOSSES[name], **options)), problem)
    found = []
    for kept in traces._TRACES.values():
        graph = None if kept.joint is None else subgraph(kept.joint, lambda out: out).graph
        called = [] if graph is None else [str(n.target) for n in graph.nodes if n.op == "call_function"]
        same = ("detach", "alias", "slice", "sym_size")  # `x[:, 0]` may slice first, or not; a size may be read twice
        called = sorted(x for x in called if not any(name in x for name in same))
        reason = "" if kept.kind == "batch" else kept.reason
        found.append((kept._replace(joint=None, cotangents=None, reason=reason), called))
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_both_ways_show_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, make = [], proxy_tensor.make_fx
    monkeypatch.setattr(proxy_tensor, "make_fx", lambda *a, **k: loaded.append(1) or make(*a, **k))  # type: ignore[func-returns-value]
    quick = traced(name)
    assert not loaded

    def refuse(*call: Any) -> Any:
        raise dynamic_shapes._NotPlainError

    monkeypatch.setattr(dynamic_shapes, "_record", refuse)
    assert quick == traced(name) and loaded


def test_a_first_call_loads_no_compiler() -> None:
    """Which takes two seconds; and a backward of the gradients that are wanted does not either."""
    code = """
import sys, torch, headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, grpo, z_loss
x, y = torch.randn(6, 11, requires_grad=True), torch.randint(0, 11, (6,))
terms = {"ce": cross_entropy, "z": hl.Term(z_loss, weight=1e-4), "rl": grpo, "more": entropy_bonus}
objective = hl.Objective(**terms, metrics=["accuracy", "entropy"])
out = objective(hl.Logits(x), y, advantage=torch.randn(6), old_logprob=-torch.rand(6))
out.loss.backward()
assert x.grad.isfinite().all() and float(out.metrics["entropy"]) > 0
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]", said.stdout


def test_kernels_are_printed_without_a_compiler() -> None:
    """Of facts and divergences, as a first call on a GPU prints them."""
    pytest.importorskip("triton")
    code = """
import sys
from headloss.backends.triton.printer import elements, facts
from headloss.divergence import Element
from headloss.facts import FACTS, Fact, Want
from headloss.losses import jsd
assert "def facts(" in facts.values_source(Want([Fact("logprob"), Fact("entropy")]))
elements.printed(((0, Element(jsd, {})),), 1)
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]", said.stdout


def test_what_is_not_plain_is_traced_by_torch() -> None:
    given = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    fn = lambda x, y: x * torch.tensor(7.0) + 0 * y
    with pytest.raises(dynamic_shapes._NotPlainError):
        dynamic_shapes._record(fn, given, "cpu")
    torch.testing.assert_close(dynamic_shapes.trace_these_sizes(fn, given)(*given), torch.tensor([7.0, 14.0]))
    with pytest.raises(RuntimeError):  # and what torch cannot trace is still an error
        dynamic_shapes.trace_these_sizes(lambda x, y: x * float(y.sum()), given)


def test_nothing_is_drawn_for_a_trace() -> None:
    traces._TRACES.clear()
    state = torch.random.get_rng_state()
    graph = dynamic_shapes.trace_any_size(
        lambda x: x * torch.rand_like(x), lambda i, device: [torch.zeros(3 + i)], "cpu", True
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert any("rand_like" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize("fn", [lambda x: x - x.mean(), lambda x: x * x.shape[0], lambda x: x + x.new_ones(x.shape)])
def test_a_size_that_is_part_of_it_is_seen(fn: Any) -> None:
    """And the graph then takes any."""
    graph = dynamic_shapes.trace_any_size(
        lambda x: torch.autograd.grad(fn(x.requires_grad_()).sum(), x)[0] + fn(x).detach(),
        lambda i, device: [torch.zeros(5 + 2 * i, device=device)], "cpu", True,
    )  # fmt: skip
    for n in (2, 9):
        x = torch.randn(n)
        want = torch.autograd.grad(fn(x.requires_grad_()).sum(), x)[0] + fn(x).detach()
        torch.testing.assert_close(graph(x.detach()), want)


SUMS = [lambda x: x.exp().sum(1), lambda x: (x * x.shape[0]).sum(1), lambda x: x.sum(0).expand(x.shape[0], -1).sum(1)]


@pytest.mark.parametrize("fn", SUMS)
def test_a_size_of_an_argument_is_read_off_it(fn: Any) -> None:
    """As the gradient of a sum over each row's columns is expanded to the number of rows."""
    joint = lambda x: torch.autograd.grad(fn(x.requires_grad_()).sum(), x)[0] + fn(x).detach()[:, None]
    examples = lambda i, device: [torch.zeros(5 + 2 * i, 3, device=device)]
    notes = [dynamic_shapes._record(joint, examples(i, "cpu"), "cpu") for i in (0, 1)]
    assert dynamic_shapes._independent_of_sizes(*notes)
    for n in (2, 9):
        x = torch.randn(n, 3)
        torch.testing.assert_close(notes[0](x), joint(x.clone()))
    twice = [dynamic_shapes._record(lambda x: x * (2 * len(x)), examples(i, "cpu"), "cpu") for i in (0, 1)]
    assert not dynamic_shapes._independent_of_sizes(*twice)


@pytest.mark.parametrize("options", [{}, {"tail": "none"}, {"tail": "renormalise"}])
@pytest.mark.parametrize("name", ["forward_kl", "jsd", "skew_kl", "tvd"])
def test_a_sparse_teacher_loads_no_compiler(name: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And both ways show the same."""
    loaded, make, found = [], proxy_tensor.make_fx, []
    monkeypatch.setattr(proxy_tensor, "make_fx", lambda *a, **k: loaded.append(1) or make(*a, **k))  # type: ignore[func-returns-value]
    ids = torch.tensor([[1, 4], [0, 2], [6, -1]])
    teacher = hl.Sparse(ids, torch.tensor([[0.5, 0.2], [0.1, 0.7], [0.9, 0.0]]).log())
    for _ in range(2):
        traces._TRACES.clear()
        torch.manual_seed(0)
        x = torch.randn(3, 8, requires_grad=True)
        out = hl.Objective(kd=hl.Term(LOSSES[name], **options))(hl.Logits(x), torch.tensor([1, 2, 3]), teacher=teacher)
        out.loss.backward()
        kept = list(traces._TRACES.values())
        found.append((out.loss.detach(), x.grad, [t._replace(joint=None, cotangents=None) for t in kept]))
        if not loaded and len(found) == 1:

            def refuse(*call: Any) -> Any:
                raise dynamic_shapes._NotPlainError

            monkeypatch.setattr(dynamic_shapes, "_record", refuse)
    assert len(found) == 2 and loaded
    torch.testing.assert_close(found[0][:2], found[1][:2], rtol=0, atol=0)
    assert found[0][2] == found[1][2]


def test_a_value_that_it_branches_on_is_not_plain() -> None:
    def branches(x: Any) -> Any:
        return -x if bool(x.sum() > 0) else x

    with pytest.raises(dynamic_shapes._NotPlainError):
        dynamic_shapes._record(branches, [torch.zeros(3)], "cpu")


def test_a_device_is_that_of_the_call() -> None:
    graph = dynamic_shapes._record(lambda x: x + torch.zeros((), device=x.device), [torch.zeros(3)], "cuda")
    devices = [v for node in graph.graph.nodes for v in node.kwargs.values() if isinstance(v, torch.device)]
    assert devices == [torch.device("cuda")]


def test_recordings_that_take_unlike_arguments_differ() -> None:
    notes = [
        dynamic_shapes._record(lambda x, y, i=i: (x, y)[i] * 2, [torch.zeros(5 + 2 * i), torch.zeros(5 + 2 * i)], "cpu")
        for i in (0, 1)
    ]
    assert not dynamic_shapes._independent_of_sizes(*notes)
