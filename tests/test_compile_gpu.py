"""Graphs on a CUDA device: compiled whole, captured and replayed on new data, and the same bits each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, forward_kl, gspo, z_loss

pytestmark = pytest.mark.gpu

N, V, D, S = 96, 1531, 64, 5
PLAIN = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=1e-2), metrics=["entropy", "accuracy"])
POLICY = hl.Objective(rl=hl.Term(gspo, low=0.2, high=0.2), z=hl.Term(z_loss, weight=1e-2), metrics=["entropy"])
TEACHER = hl.Objective(ce=cross_entropy, kl=forward_kl)


def data(rows: int = N, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    x = {
        "hidden": torch.randn(rows, D, device="cuda"),
        "weight": torch.randn(V, D, device="cuda") / 4,
        "logits": 3 * torch.randn(rows, V, device="cuda"),
        "targets": torch.randint(V, (rows,), device="cuda"),
        "advantage": torch.randn(rows, device="cuda"),
        "old_logprob": -7 + torch.rand(rows, device="cuda"),
        "ids": torch.randint(S, (rows,), device="cuda"),
        "taught": torch.randn(rows, V, device="cuda"),
    }
    x["targets"][torch.rand(rows, device="cuda") < 0.3] = -100
    for name in ("hidden", "weight", "logits"):
        x[name].requires_grad_()
    return x


def linear(x: dict[str, Tensor]) -> hl.Linear:
    return hl.Linear(x["hidden"] * 1.0, x["weight"], memory=V * 8 * 40)


def logits(x: dict[str, Tensor]) -> hl.Logits:
    return hl.Logits(x["logits"] * 1.0)


def plain(source: Any, x: dict[str, Tensor], **how: Any) -> Any:
    return PLAIN(source(x), x["targets"], **how)


def policy(source: Any, x: dict[str, Tensor], **how: Any) -> Any:
    segments = hl.Segments.from_ids(x["ids"], S)
    return POLICY(
        source(x), x["targets"], segments=segments, advantage=x["advantage"], old_logprob=x["old_logprob"], **how
    )


def teacher_source(source: Any, x: dict[str, Tensor], **how: Any) -> Any:
    return TEACHER(source(x), x["targets"], teacher=hl.Logits(x["taught"]), **how)


def step(call: Callable[..., Any], source: Callable[..., Any], x: dict[str, Tensor], **how: Any) -> list[Tensor]:
    """Loss, a metric, a fact, and the gradients of a loss that pulls on the fact too."""
    out = call(source, x, **how)
    loss = out.loss * 2 + 0.1 * out.facts.logprob.mean()
    return [loss, *(m.value for m in out.metrics.values()), out.facts.logprob]


def gradients(loss: Tensor, x: dict[str, Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, [x["hidden"], x["weight"], x["logits"]], allow_unused=True)
    return [g for g in found if g is not None]


def close(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=2e-4, atol=2e-5, check_dtype=False)


@pytest.mark.parametrize("call", [plain, policy, teacher_source], ids=lambda f: f.__name__)
@pytest.mark.parametrize("source", [linear, logits], ids=lambda f: f.__name__)
@pytest.mark.parametrize("host_read", [True, False])
def test_a_whole_graph(call: Callable[..., Any], source: Callable[..., Any], host_read: bool) -> None:
    torch._dynamo.reset()
    backend = "inductor" if call is plain else "aot_eager"
    compiled = torch.compile(
        lambda x: step(call, source, x, host_read=host_read), fullgraph=True, backend=backend, dynamic=False
    )
    x = data()
    found, want = compiled(x), step(call, source, x, host_read=host_read)
    close(found, want)
    close(gradients(found[0], x), gradients(want[0], x))


@pytest.mark.parametrize("call", [plain, policy, teacher_source], ids=lambda f: f.__name__)
@pytest.mark.parametrize("source", [linear, logits], ids=lambda f: f.__name__)
@pytest.mark.parametrize("host_read", [True, False])  # True: capture asks nothing either way
def test_captured_and_replayed(call: Callable[..., Any], source: Callable[..., Any], host_read: bool) -> None:
    static = data()

    def run() -> list[Tensor]:
        out = step(call, source, static, host_read=host_read)
        return [*out, *gradients(out[0], static)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for seed in (1, 2):
        fresh = data(seed=seed)
        with torch.no_grad():
            for name, x in fresh.items():
                static[name].copy_(x)
        graph.replay()
        out = step(call, source, fresh)
        close(found, [*out, *gradients(out[0], fresh)])


@pytest.mark.parametrize("source", [linear, logits], ids=lambda f: f.__name__)
def test_reduce_overhead(source: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: step(plain, source, x, host_read=False), fullgraph=True, mode="reduce-overhead", dynamic=False
    )
    for seed in range(4):
        x = data(seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        found = compiled(x)
        grads = [g.clone() for g in gradients(found[0], x)]
        want = step(plain, source, x)
        close([y.clone() for y in found], want)
        close(grads, gradients(want[0], x))


def test_rows_change_without_compiling_again() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda x: step(plain, linear, x), fullgraph=True, backend=counter)
    for rows in (40, 96, 77, 130):
        x = data(rows)
        found, want = compiled(x), step(plain, linear, x)
        close(found, want)
        close(gradients(found[0], x), gradients(want[0], x))
    assert counter.frame_count <= 2


def test_segment_sums_repeat_bit_by_bit() -> None:
    torch.manual_seed(0)
    n = 200_000
    ids = torch.randint(-1, 37, (n,), device="cuda")
    segments = hl.Segments.from_ids(ids, 37)
    x = torch.randn(n, device="cuda")
    first = segments.totals(x)
    for _ in range(20):
        assert torch.equal(segments.totals(x), first)
    y = torch.randn(37, device="cuda").requires_grad_()
    pulled = [torch.autograd.grad(segments.spread(y), y, x)[0] for _ in range(10)]
    assert all(torch.equal(g, pulled[0]) for g in pulled)
    wide = x.double()
    want = torch.stack([wide[ids == s].sum() for s in range(37)])
    torch.testing.assert_close(first.double(), want, rtol=1e-4, atol=1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = segments.totals(x)
    x.neg_()
    graph.replay()
    assert torch.equal(captured, -first)


def test_a_number_as_an_input_meets_the_device() -> None:
    def bounded(logprob: Tensor, floor: Tensor) -> Tensor:
        return -torch.clamp(logprob, min=floor)

    x = data()
    found = hl.Objective(b=bounded)(logits(x), x["targets"], floor=-6.5).loss
    logprob = torch.log_softmax(x["logits"].double(), -1).gather(1, x["targets"].clamp(min=0)[:, None])[:, 0]
    want = -logprob[x["targets"] != -100].clamp(min=-6.5).mean()
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
