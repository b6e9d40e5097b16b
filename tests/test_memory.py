"""Memory and work of `Linear` at a real size: the budget holds, and ignored rows save their share.

Dimension key:  N rows   V vocabulary   D hidden size
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import headloss as hl
from headloss.large_pages import LARGE, in_large_pages
from headloss.losses import cross_entropy, forward_kl, jsd, z_loss

N, V, D = 4096, 32000, 256
MiB = 1 << 20
BATCH_LOSS = lambda logprob: (logprob - logprob.mean()) ** 2


class Trace:
    """The true peak, from the allocator's own events: temporaries inside an operation count too."""

    def __enter__(self) -> Trace:
        self.profiler = torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU])
        self.profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.profiler.__exit__(*error)
        events = [e for e in self.profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        now = self.peak = self.largest = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            now += event.nbytes()
            self.largest = max(self.largest, event.nbytes())
            self.peak = max(self.peak, now)


def gemm_workspace(hidden: Tensor, weight: Tensor, rows: int) -> int:
    """What torch's own GEMM allocates beside its output: some CPU libraries repack the weight."""
    out = torch.empty(rows, len(weight), dtype=hidden.dtype)
    with torch.no_grad(), Trace() as seen:
        torch.mm(hidden[:rows], weight.t(), out=out)
    return seen.peak


WORKSPACE = 24 * MiB  # three tiles of the sweeps, facts and coefficients: it does not grow with the budget


def tensors(rows: int = N, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, D).to(dtype).requires_grad_()
    weight = (0.05 * torch.randn(V, D)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (rows,))


def test_the_tracker_sees_the_peak() -> None:
    """Eager cross-entropy holds several (N, V) buffers; the tracker must say so, or the tests below prove nothing."""
    hidden, weight, targets = tensors(128)
    with Trace() as seen:
        torch.nn.functional.cross_entropy(hidden @ weight.T, targets).backward()
    assert seen.peak > 2 * 128 * V * 4
    assert seen.largest >= 128 * V * 4


@pytest.mark.parametrize("budget", [8, 64, pytest.param(256, marks=pytest.mark.slow)])
def test_budget_holds(budget: int) -> None:
    """Peak of forward and backward: the budget, the gradients, and a workspace that does not grow with the budget."""
    hidden, weight, targets = tensors()
    objective = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=1e-4), metrics=["entropy"], backend="torch")
    source = hl.Linear(hidden, weight, memory=budget * MiB)
    plan = objective.explain(source, targets)
    objective(hl.Linear(hidden[:4], weight), targets[:4])  # tracing is not part of the step
    with Trace() as seen:
        objective(source, targets).loss.backward()
    gradients = 4 * (N * D + V * D)
    workspace = WORKSPACE + gemm_workspace(hidden, weight, budget * MiB // (4 * V))
    assert seen.peak <= budget * MiB + gradients + workspace, f"{seen.peak / MiB:.1f} MiB"
    assert seen.largest <= max(budget * MiB, 4 * V * D)
    said = sum(plan.bytes.values())
    assert seen.peak <= said + workspace, f"explain says {said / MiB:.1f} MiB, used {seen.peak / MiB:.1f} MiB"
    chunk = next(n for what, n in plan.bytes.items() if what.startswith("chunk"))
    assert budget * MiB / 2 < chunk <= budget * MiB


def test_budget_holds_for_a_batch_loss() -> None:
    hidden, weight, targets = tensors(512)
    objective = hl.Objective(b=BATCH_LOSS, backend="torch")
    with Trace() as seen:
        objective(hl.Linear(hidden, weight, memory=16 * MiB), targets).loss.backward()
    gradients, workspace = 4 * (512 * D + V * D), WORKSPACE + gemm_workspace(hidden, weight, 131)
    assert seen.peak <= 16 * MiB + gradients + workspace, f"{seen.peak / MiB:.1f} MiB"


def test_budget_counts_a_wider_chunk() -> None:
    """float32 logits of bf16 tensors: the chunk and its bf16 gradient share the budget."""
    torch.manual_seed(0)
    rows, vocab, size = 512, 8192, 32
    hidden = torch.randn(rows, size).bfloat16().requires_grad_()
    weight = torch.randn(vocab, size).bfloat16().requires_grad_()
    source = hl.Linear(hidden, weight, memory=2 * MiB, logits_dtype=torch.float32)
    with Trace() as seen:
        hl.Objective(ce=cross_entropy, backend="torch")(source, torch.randint(vocab, (rows,))).loss.backward()
    # beside the budget: a float32 accumulator and a bf16 gradient of the weight, and widened bands of the factors
    assert seen.peak <= 2 * MiB + 6 * vocab * size + 4 * rows * size + 12 * MiB, f"{seen.peak / MiB:.1f} MiB"
    assert seen.peak < rows * vocab * 4


def form(name: str, rows: int, draw: Any, size: int, memory: int) -> tuple[hl.Objective, Any, dict[str, Any]]:
    """An objective, its source and what it is called with, a third of the rows ignored."""
    guides = [hl.Linear(draw(rows, 24), draw(V, 24)) for _ in range(2)]
    columns, device = 8000 if name.startswith("draft") else V, guides[0].device
    options: dict[str, Any] = {"memory": memory}
    more: dict[str, Any] = {"teacher": guides[0], "targets": torch.arange(rows, device=device) * (V // columns) % V}
    more["targets"][::3] = -100
    terms: dict[str, Any] = {"kd": forward_kl}
    if name.startswith("draft"):
        options["vocab_ids"] = torch.arange(0, V, V // columns, device=device)
        terms = {"kd": hl.Term(forward_kl, tail=name.split()[1])}
    elif name == "two teachers":
        more["teacher"] = dict(zip("ab", guides, strict=True))
        terms = {n: hl.Term(loss, teacher=n) for n, loss in (("a", forward_kl), ("b", jsd))}
    elif name == "routed":
        more["teacher"] = hl.Routed(dict(zip("ab", guides, strict=True)), torch.arange(rows, device=device) % 2)
    elif name == "top":
        terms = {"top": hl.Term(lambda top_logprob: -top_logprob.sum(-1), top=4)}
        del more["teacher"]
    source = hl.Linear(draw(rows, size).requires_grad_(), draw(columns, size).requires_grad_(), **options)
    return hl.Objective(**terms, backend="torch"), source, more


@pytest.mark.parametrize("name", ["one teacher", "two teachers", "routed", "draft none", "draft renormalise", "top"])
def test_what_is_held_fits_the_budget(name: str) -> None:
    """By the plan, at sizes that no test could run; and what is beyond the budget is called so."""
    device = "cpu" if name == "routed" else "meta"  # the host must know a route; nobody touches the rest
    draw = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device=device)
    for rows, memory in ((8192, 1 << 30), (40000, 1 << 28), (3000, 1 << 31)):
        objective, source, more = form(name, rows, draw, 2048, memory)
        plan = objective.explain(source, **more)
        on_top = sum(n for what, n in plan.bytes.items() if what.endswith("beyond the budget"))
        assert plan.beyond - on_top - plan.bytes["facts, cotangents and coefficients"] <= memory, str(plan)
        assert on_top == 0 or on_top > memory // 2, str(plan)


@pytest.mark.parametrize("name", ["two teachers", "routed", "draft none", "draft renormalise"])
def test_what_is_held_is_what_the_plan_says(name: str) -> None:
    torch.manual_seed(0)
    objective, source, more = form(name, 1024, torch.randn, D, 16 * MiB)
    plan = objective.explain(source, **more)
    with Trace() as seen:
        objective(source, **more).loss.backward()
    workspace = 2 * WORKSPACE + gemm_workspace(source.hidden.detach(), source.weight.detach(), 128)
    assert seen.peak <= sum(plan.bytes.values()) + workspace, f"{seen.peak / MiB:.1f} MiB: {plan}"
    assert plan.beyond + workspace < 1024 * V * 4, "or the bound would say nothing"


def test_evaluation_holds_one_chunk() -> None:
    hidden, weight, targets = tensors(1024)
    objective = hl.Objective(ce=cross_entropy, backend="torch")
    objective(hl.Linear(hidden[:4], weight), targets[:4])
    with torch.no_grad(), Trace() as seen:
        objective(hl.Linear(hidden, weight, memory=16 * MiB), targets)
    assert seen.peak <= 16 * MiB + WORKSPACE + gemm_workspace(hidden, weight, 131), f"{seen.peak / MiB:.1f} MiB"


def flops(objective: hl.Objective, source: Any, targets: Tensor, grad: bool = True) -> int:
    with torch.set_grad_enabled(grad), FlopCounterMode(display=False) as counter:
        out = objective(source, targets)
        if grad:
            out.loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("loss, several", [(cross_entropy, 3), (BATCH_LOSS, 4)], ids=["row", "batch"])
def test_gemms(loss: Any, several: int) -> None:
    """Three GEMMs when gradients are made in the visit, four with recompute, one without grad; `explain` says so.

    A loss whose rows meet needs all facts before any gradient: three GEMMs too if all logits fit into one chunk.
    """
    torch.manual_seed(0)
    hidden, weight = torch.randn(60, 16, requires_grad=True), torch.randn(96, 16, requires_grad=True)
    targets = torch.randint(96, (60,))
    one = 2 * 60 * 96 * 16
    objective = hl.Objective(a=loss, backend="torch")
    for rows, gemms in ((7, several), (1000, 3)):
        source = hl.Linear(hidden, weight, memory=rows * 96 * 4)
        assert flops(objective, source, targets) == gemms * one
        assert flops(objective, source, targets, grad=False) == one
        assert objective.explain(source, targets).gemms == gemms
    frozen = hl.Linear(hidden.detach(), weight, memory=7 * 96 * 4)
    assert flops(objective, frozen, targets) == (several - 1) * one


@pytest.mark.parametrize("kept", [60, 30, 6, 0])
def test_ignored_rows_save_work(kept: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(60, 16, requires_grad=True), torch.randn(96, 16, requires_grad=True)
    targets = torch.randint(96, (60,))
    targets[torch.randperm(60)[kept:]] = -100
    objective = hl.Objective(ce=cross_entropy, backend="torch")
    source = hl.Linear(hidden, weight, memory=8 * 96 * 4)
    assert flops(objective, source, targets) == 3 * 2 * kept * 96 * 16
    assert objective.explain(source, targets).rows == kept


def test_an_upstream_gradient_of_one_costs_nothing() -> None:
    """The gradients made in the visit are handed over as they are; another factor is one pass over them."""

    class Big(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.numel() >= 96 * 16 and "detach" not in str(func):
                self.count += 1
            return out

    hidden, weight = torch.randn(200, 16, requires_grad=True), torch.randn(96, 16, requires_grad=True)
    out = hl.Objective(ce=cross_entropy, backend="torch")(hl.Linear(hidden, weight), torch.randint(96, (200,)))
    with Big() as seen:
        torch.autograd.grad(out.loss, (hidden, weight))
    assert seen.count == 0
    out = hl.Objective(ce=cross_entropy, backend="torch")(hl.Linear(hidden, weight), torch.randint(96, (200,)))
    with Big() as seen:
        torch.autograd.grad(2 * out.loss, (hidden, weight))
    assert seen.count == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gradient_at_ids_is_written_where_it_stands(dtype: torch.dtype) -> None:
    """`scatter_add_` would copy a whole gradient of 16 bits to float32."""
    logits, ids = torch.randn(200, V).to(dtype).requires_grad_(), torch.arange(800).view(200, 4)
    objective, teacher = (
        hl.Objective(kd=hl.Term(forward_kl, tail="renormalise")),
        hl.Sparse(ids, torch.zeros(200, 4) - 2),
    )
    loss = objective(hl.Logits(logits), teacher=teacher).loss
    with Trace() as seen:
        torch.autograd.grad(loss, logits)
    assert seen.peak <= logits.nbytes + MiB, f"{seen.peak / MiB:.1f} MiB"


SMAPS = Path("/proc/self/smaps")
MAY_BE_LARGE = SMAPS.exists() and "VmFlags" in SMAPS.read_text() and hasattr(mmap, "MADV_HUGEPAGE")


def asks_for_large_pages(x: Tensor) -> bool:
    """Whether the system was asked to hold the middle of this tensor in large pages."""
    place, here = x.data_ptr() + x.nbytes // 2, False
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            begin, end = (int(part, 16) for part in first.split("-"))
            here = begin <= place < end
        elif here and first == "VmFlags:":
            return "hg" in line.split()
    raise LookupError("no memory there")


@pytest.mark.skipif(not MAY_BE_LARGE, reason="the system has no large pages, or does not say where")
def test_gradients_are_in_large_pages() -> None:
    x = torch.randn(600, V).requires_grad_()  # more than the heap would hold
    y = torch.randint(V, (600,))
    (dlogits,) = torch.autograd.grad(hl.Objective(ce=cross_entropy)(hl.Logits(x), y).loss, x)
    hidden, weight = torch.randn(64, 512).requires_grad_(), torch.randn(V, 512).requires_grad_()
    _, dweight = torch.autograd.grad(
        hl.Objective(ce=cross_entropy)(hl.Linear(hidden, weight), y[:64]).loss, (hidden, weight)
    )
    assert asks_for_large_pages(dlogits) and asks_for_large_pages(dweight)
    assert not asks_for_large_pages(torch.empty(1200, V))


def test_large_pages_change_no_tensor() -> None:
    for size in (0, 1, LARGE, LARGE + 3):
        x = torch.zeros(size, dtype=torch.uint8)
        assert in_large_pages(x) is x and not x.any()
    for x in (torch.empty(LARGE, device="meta"), torch.nn.Parameter(torch.empty(LARGE))):
        assert in_large_pages(x) is x
