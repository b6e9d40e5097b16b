"""What surrounds a call leaves no trace in later ones: the same class, numbers and dtypes in either order."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import headloss as hl
from headloss.graph import spec
from headloss.losses import cross_entropy, jsd
from headloss.trace import trace as plan
from headloss.trace.function_reads import defaults, reads_of

V, D = 9, 4


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Sizes(TorchFunctionMode):
    """Makes numbers of sizes, as a counter of operations does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in args:
            if isinstance(x, Tensor) and x.ndim:
                int(x.shape[0])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def quietly_anomalous() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            yield


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "anomaly": quietly_anomalous,
    "anomaly, no nan": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "autograd profiler": lambda: torch.autograd.profiler.profile(record_shapes=True),
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": default_device,
    "device": lambda: torch.device("cpu"),
    "meta": lambda: torch.device("meta"),
    "dispatch mode": Dispatched,
    "function mode": Sizes,
    "flops": lambda: FlopCounterMode(display=False),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad off": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": deterministic,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x.double(), lambda x: x.float()),
    "on cpu": torch.autograd.graph.save_on_cpu,
    "no hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "dual level": forward_ad.dual_level,
}


def makes(logprob: Tensor, entropy: Tensor) -> Tensor:
    """Its tensors have the default dtype and device."""
    return -logprob - torch.full((), 0.1) * entropy


def plain(logprob: Tensor, entropy: Tensor) -> Any:
    pulled = F.softplus(-logprob) + 0.1 * entropy.exp().clamp(max=3.0)
    return pulled + F.mse_loss(logprob, entropy, reduction="none"), {"pulled": pulled}


def by_segment(logprob: Tensor, segments: hl.Segments) -> Tensor:
    return -segments.mean(logprob).exp() * logprob


def divergent(logp: Tensor, logq: Tensor) -> Tensor:
    return logp.exp() * (logp - logq).tanh()


def batch(logprob: Tensor) -> Tensor:
    return -logprob * logprob.mean().exp()


LOSSES: dict[str, tuple[Any, str]] = {
    "cross_entropy": (cross_entropy, "row"),
    "plain": (plain, "row"),
    "makes": (makes, "row"),
    "by_segment": (by_segment, "segment"),
}


def call(loss: Any) -> dict[str, Any]:
    x = torch.linspace(-2, 2, 6 * D, dtype=torch.float32, device="cpu").view(6, D).cos().requires_grad_()
    w = torch.linspace(-3, 3, V * D, dtype=torch.float32, device="cpu").view(V, D).sin().requires_grad_()
    targets, ids = (torch.arange(6, device="cpu") * 5 % V, torch.arange(6, device="cpu") // 2)
    objective, segments = hl.Objective(l=loss), hl.Segments(ids, 3)
    out = objective(hl.Linear(x, w), targets, segments=segments)
    grads = torch.autograd.grad(out.loss, (x, w)) if out.loss.requires_grad else ()
    said = str(objective.explain(hl.Linear(x, w), targets, segments=segments))
    kind = next(line for line in said.splitlines() if line.startswith("term"))
    return {"loss": out.loss.detach(), "grads": grads, "kind": kind, "facts": [y.detach() for y in out.facts.values()]}


def forget() -> None:
    for known in (plan._TRACES, plan._TRACED, spec._SPECS):
        known.clear()


def same(found: Any, want: Any) -> None:
    assert found["kind"] == want["kind"]
    torch.testing.assert_close(
        [found["loss"], *found["grads"], *found["facts"]],
        [want["loss"], *want["grads"], *want["facts"]],
        rtol=0,
        atol=0,
    )


def tried(surrounding: str, loss: Any) -> Any:
    """A call inside; one that is refused, as a function that puts its tensors elsewhere is, says so both times."""
    try:
        with SURROUNDINGS[surrounding]():
            return call(loss)
    except RuntimeError as error:
        return str(error).splitlines()[0]


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("name", LOSSES)
def test_either_order(name: str, surrounding: str) -> None:
    loss, kind = LOSSES[name]
    forget()
    want = call(loss)
    assert f": {kind}" in want["kind"]
    after = tried(surrounding, loss)
    same(call(loss), want)
    forget()
    first = tried(surrounding, loss)
    same(call(loss), want)
    if isinstance(first, str) or isinstance(after, str):
        assert first == after and name == "makes" and surrounding == "meta"
    else:
        same(first, after)


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_a_later_call_may_do_without_the_host(surrounding: str) -> None:
    """As repro 20 asks: a term that was taken for one that mixes rows would be refused."""
    forget()
    objective = hl.Objective(ce=cross_entropy)
    x, w, targets = torch.randn(6, D), torch.randn(V, D), torch.randint(V, (6,))
    with SURROUNDINGS[surrounding]():
        objective(hl.Linear(x, w), targets)
    objective(hl.Linear(x, w), targets, host_read=False)


def test_the_default_dtype_is_what_a_function_reads() -> None:
    """0.1 is another number in each, and a function that makes it gets the one of its own call."""

    def loss(entropy: Tensor) -> Tensor:
        return entropy * torch.full((), 0.1)

    forget()
    objective, source = hl.Objective(l=loss), hl.Logits(torch.randn(5, V, dtype=torch.float64))
    facts, keys = hl.row_facts(source, want=("entropy",)), set()
    for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float64):
        with default_dtype(dtype):
            found = objective(source).loss
            torch.testing.assert_close(found, loss(facts.entropy).mean(), rtol=1e-14, atol=0)
            keys.add(reads_of(loss).key)
    assert len(keys) == 3
    assert defaults() == (torch.float32, None)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_inside_torch_func(transform: str) -> None:
    """Such a call may be refused; it must not spoil others."""
    forget()
    want = call(plain)
    forget()
    objective, targets = hl.Objective(l=plain), torch.randint(V, (6,))
    z = torch.randn(2, 6, V)

    def loss(z: Tensor) -> Tensor:
        return objective(hl.Logits(z), targets).loss

    with contextlib.suppress(RuntimeError):
        if transform == "grad":
            torch.func.grad(loss)(z[0])
        elif transform == "vmap":
            torch.vmap(loss)(z)
        else:
            torch.func.jvp(loss, (z[0],), (z[1],))
    same(call(plain), want)


def test_a_checkpoint_first() -> None:
    forget()
    want = call(plain)
    forget()
    w = torch.randn(V, D, requires_grad=True)
    targets, objective = torch.randint(V, (6,)), hl.Objective(l=plain)
    for reentrant in (True, False):
        x = torch.randn(6, D, requires_grad=True)
        checkpoint(lambda x: objective(hl.Linear(x, w), targets).loss, x, use_reentrant=reentrant).backward()
    same(call(plain), want)


@pytest.mark.parametrize("loss", [plain, batch, divergent])
def test_a_checkpoint_runs_its_function_twice(loss: Any) -> None:
    """Once in the forward pass and once in the backward: a gradient made in the forward is none of its business."""
    objective, calls = hl.Objective(l=loss), []
    teacher = {"teacher": hl.Logits(torch.randn(6, V))} if loss is divergent else {}
    x, w, targets = torch.randn(6, D, requires_grad=True), torch.randn(V, D), torch.randint(V, (6,))

    def step(x: Tensor) -> Tensor:
        calls.append(None)
        return objective(hl.Linear(x.sin(), w), targets, **teacher).loss

    (want,) = torch.autograd.grad(step(x), x)
    calls.clear()
    out = checkpoint(step, x, use_reentrant=False)
    assert len(calls) == 1
    torch.testing.assert_close(torch.autograd.grad(out, x), (want,))
    assert len(calls) == 2


def test_fake_tensors_first() -> None:
    forget()
    want = call(makes)
    forget()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        hl.Objective(l=makes)(hl.Logits(torch.randn(6, V)), torch.zeros(6, dtype=torch.long))
        hl.Objective(l=makes).explain(hl.Logits(torch.randn(6, V)), torch.zeros(6, dtype=torch.long), host_read=False)
    same(call(makes), want)


def test_inference_before_a_compiled_step() -> None:
    torch._dynamo.reset()
    forget()
    objective, targets = hl.Objective(l=plain), torch.randint(V, (6,))
    z = torch.randn(6, V, requires_grad=True)
    step = torch.compile(lambda z: objective.forward_backward(hl.Logits(z), targets).grads.logits, backend="eager")
    want = objective.forward_backward(hl.Logits(z), targets).grads.logits
    forget()
    with torch.inference_mode():
        step(z.detach().clone())
    torch.testing.assert_close(step(z), want)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loss", [plain, batch])
def test_gradients_in_inference_mode(loss: Any, compiled: bool) -> None:
    """`forward_backward` differentiates the losses with autograd, which records nothing in inference mode."""
    forget()
    objective, targets = hl.Objective(l=loss), torch.randint(V, (6,))
    hidden, weight = torch.randn(6, D), torch.randn(V, D)

    def step(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = objective.forward_backward(hl.Linear(hidden, weight), targets)
        return out.loss, out.grads.hidden, out.grads.weight

    want = step(hidden, weight)
    assert all(x.abs().sum() > 0 for x in want)
    with torch.inference_mode():
        found = (torch.compile(step, backend="eager") if compiled else step)(hidden, weight)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, RecursionError, UserWarning])
def test_a_misfortune_is_not_kept(error: type[BaseException]) -> None:
    """Out of memory in the first trace: the call raises, and the next is traced."""
    forget()
    again = iter([True])
    real = plan._trace_once

    def unlucky(*args: Any) -> Any:
        if next(again, False):
            raise error("this once")
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_trace_once", unlucky)
        with pytest.raises(error, match="this once"):
            call(plain)
        assert ": row" in call(plain)["kind"]


def test_modes_stand_as_before() -> None:
    forget()
    with Sizes() as outer, torch.device("cpu"), Sizes() as inner:
        call(plain)
        stack = torch.overrides._get_current_function_mode_stack()
        assert stack[0] is outer and stack[-1] is inner and len(stack) == 3


def test_a_divergence_under_a_default_dtype() -> None:
    teacher, source = hl.Logits(torch.randn(4, V)), hl.Logits(torch.randn(4, V))
    want = hl.Objective(l=jsd)(source, teacher=teacher).loss
    for surrounding in ("default float64", "default bfloat16", "meta", "inference mode", "anomaly"):
        with SURROUNDINGS[surrounding]():
            torch.testing.assert_close(hl.Objective(l=jsd)(source, teacher=teacher).loss, want, rtol=0, atol=0)
