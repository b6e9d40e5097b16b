"""The kernels on a CUDA device: what the interpreter cannot show."""

import importlib.util
from pathlib import Path

import pytest
import torch

import headloss as hl
from headloss.facts import Fact, Want
from headloss.losses import cross_entropy, entropy_bonus, grpo, gspo, z_loss

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).parents[2] / "benchmarks" / "gpu_kernels.py"
    spec = importlib.util.spec_from_file_location("gpu_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_not_above_twice_eagers_error(bench):
    assert bench.check() == []


def test_more_than_two_to_the_31_elements(bench):
    assert bench.check_large() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", [grpo, gspo])
def test_objective_is_as_near_to_float64_as_the_torch_backend(dtype, loss):
    """Each backend against dense float64: two roundings of bf16 say little about each other."""
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(301, 64, device="cuda", dtype=dtype),
        torch.randn(50257, 64, device="cuda", dtype=dtype),
    )
    targets = torch.randint(0, 50257, (301,), device="cuda")
    targets[::3] = -100
    inputs = {"old_logprob": -5 * torch.rand(301, device="cuda"), "advantage": torch.randn(301, device="cuda")}
    segments = hl.Segments.from_cu_seqlens(torch.tensor([0, 100, 180, 301], device="cuda"))
    rounded = hidden @ weight.T

    def found(backend, kind):
        mix = hl.Objective(ce=cross_entropy, rl=loss, z=hl.Term(z_loss, weight=1e-3), backend=backend)
        h, w, logits = (x.detach().clone().to(kind).requires_grad_() for x in (hidden, weight, rounded))
        out = mix(hl.Linear(h, w, memory="16MB"), targets, segments=segments, **inputs)
        other = mix(hl.Logits(logits, temperature=1.5), targets, segments=segments, **inputs)
        (out.loss + other.loss).backward()
        return [x.detach().double() for x in (out.loss, h.grad, w.grad, other.loss, logits.grad)]

    truth, plain, ours = found("torch", torch.float64), found("torch", dtype), found("triton", dtype)
    for what, *each in zip(("loss", "dhidden", "dweight", "logits' loss", "dlogits"), truth, plain, ours, strict=True):
        right, theirs, mine = each
        error = lambda x, right=right: float((x - right).norm() / right.norm())
        assert error(mine) <= 1.5 * error(theirs) + 1e-5, (what, error(mine), error(theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_infinite_logits_and_nan_are_seen_in_any_half_of_a_word(dtype):
    """The interpreter compares words of two bfloat16 in another way than the device."""
    torch.manual_seed(0)
    x = (4 * torch.randn(400, 70003, device="cuda")).to(dtype)
    y = torch.randint(70003, (400,), device="cuda")
    for row in range(300):
        x[row, row % 7 :: 2 + row % 3] = -torch.inf
        x[row, 65500 + row] = 19.0 + row % 3
        y[row] = 65500 + row
    bad = torch.arange(300, 400, device="cuda")
    x[bad, torch.randint(70003, (100,), device="cuda")] = torch.nan
    mix = hl.Objective(ce=cross_entropy, h=hl.Term(entropy_bonus, weight=0.1), metrics=["accuracy"])
    out = mix.forward_backward(hl.Logits(x, inplace=False), y)
    assert out.facts.logprob[300:].isnan().all() and out.facts.entropy[300:].isnan().all()
    assert out.grads.logits[300:].isnan().all()
    good, wide = x[:300], x[:300].double().requires_grad_()
    logp = wide.log_softmax(-1)
    entropy = -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)
    assert torch.equal(out.facts.argmax[:300], good.float().argmax(-1))
    torch.testing.assert_close(out.facts.entropy[:300].double(), entropy, rtol=1e-4, atol=1e-5)
    loss = (-logp.gather(1, y[:300, None])[:, 0] - 0.1 * entropy).sum() / 400
    loss.backward()
    error = (out.grads.logits[:300].double() - wide.grad).norm() / wide.grad.norm()
    assert float(error) < (1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("V", [50257, 32001])
def test_an_uneven_vocabulary_is_as_right_as_an_even_one(V):
    torch.manual_seed(0)
    hidden = torch.randn(512, 256, device="cuda").bfloat16()
    weight = (torch.randn(V, 256, device="cuda") * 3 / 16).bfloat16()
    targets = torch.randint(V, (512,), device="cuda")
    targets[-1], targets[::5] = V - 1, -100

    def gradients(dtype, loss):
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        found = loss(h, w)
        return found.detach(), *torch.autograd.grad(found, (h, w))

    plain = lambda h, w: torch.nn.functional.cross_entropy(
        (h @ w.t()).to(torch.promote_types(h.dtype, torch.float32)), targets
    )
    truth, eager = gradients(torch.float64, plain), gradients(torch.bfloat16, plain)
    ce = hl.Objective(ce=cross_entropy)
    for memory in ("1GiB", "16MiB"):
        ours = gradients(torch.bfloat16, lambda h, w: ce(hl.Linear(h, w, memory=memory), targets).loss)
        for x, other, t in zip(ours, eager, truth, strict=True):
            assert float((x.double() - t).norm() / t.norm()) <= 2 * float((other.double() - t).norm() / t.norm()) + 1e-4


def test_auto_is_triton_on_cuda():
    source = hl.Logits(torch.randn(4, 100, device="cuda"))
    objective = hl.Objective(z=z_loss)
    assert "triton" in str(objective.explain(source))


def test_no_compilation_when_only_the_number_of_rows_changes():
    from headloss.backends.triton.kernels.sums import sums_kernel
    from headloss.backends.triton.sweeps import sums

    want = Want([Fact("logprob"), Fact("entropy")])
    before = None
    for n in (1, 2, 16, 17, 33, 128):
        x = torch.randn(n, 50257, device="cuda", dtype=torch.bfloat16)
        sums(x[:, 1:], torch.zeros(n, dtype=torch.long, device="cuda"), want, [1.0])
        count = sum(len(caches[0]) for caches in sums_kernel.device_caches.values())
        assert before in (None, count)
        before = count


@pytest.fixture(scope="module")
def bench_visit():
    path = Path(__file__).parents[2] / "benchmarks" / "gpu_visit.py"
    spec = importlib.util.spec_from_file_location("gpu_visit", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_launch_not_above_twice_eagers_error(bench_visit):
    assert bench_visit.check(bench_visit.mix_with_bonus(), bench_visit.cases()) == []
    assert bench_visit.check(bench_visit.sums_alone(), bench_visit.long_cases()) == []


def test_one_launch_compiles_once(bench_visit):
    """Neither rows, options nor weights that change make another kernel."""
    from headloss.backends.triton.kernels.visit import visit_kernel

    before = None
    for n, low, weight in ((300, 0.2, 1.0), (301, 0.1, 0.5), (16, 0.3, 0.0), (1, 0.2, 2.0)):
        mix = bench_visit.Mix(rl=hl.Term(grpo, low=low, weight=weight))
        x = torch.randn(n, 32000, device="cuda", dtype=torch.bfloat16)
        y = torch.zeros(n, dtype=torch.long, device="cuda")
        bench_visit.visit(x, y, mix.want, [1.0], mix.program, mix.arguments(n), x)
        count = sum(len(caches[0]) for caches in visit_kernel.device_caches.values())
        assert before in (None, count)
        before = count
