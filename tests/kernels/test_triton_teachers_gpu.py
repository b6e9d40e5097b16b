"""Teachers' kernels on a CUDA device: what the interpreter cannot show."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

import headloss as hl
from headloss import deferred_checks
from headloss.losses import cross_entropy, forward_kl, jsd, reverse_kl, soft_cross_entropy, tvd

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).parents[2] / "benchmarks" / "gpu_teachers.py"
    spec = importlib.util.spec_from_file_location("gpu_teachers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_divergence_and_teacher_beside_eager(bench):
    assert bench.check(few=True) == []


def relative(ours, theirs):
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def sparse(n, v, k=33):
    ids = torch.randint(0, v, (n, k), device="cuda")
    ids[:, 2], ids[:, 5] = -1, ids[:, 7]
    return hl.Sparse(ids, torch.randn(n, k, device="cuda").log_softmax(-1) - 0.2)


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("id", [3001, -7])
def test_an_id_that_is_no_column_is_told_by_the_next_call(calls, id):
    x = torch.randn(300, 3000, device="cuda", requires_grad=True)
    objective = hl.Objective(kd=forward_kl, backend="triton")
    for _ in range(calls):
        objective(hl.Logits(x), teacher=sparse(300, 3000)).loss.backward()
    source_t = sparse(300, 3000)
    source_t.ids[257, 11] = id
    objective(hl.Logits(x), teacher=source_t).loss.backward()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"teacher: wanted ids in \[0, 3000\) or -1 for none, but (1 are|3001|-7)"):
        objective(hl.Logits(x), teacher=sparse(300, 3000))
    objective(hl.Logits(x), teacher=sparse(300, 3000)).loss.backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_student_and_teachers(dtype):
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)
    hidden, weight, big, big_weight = draw(301, 64), draw(50257, 64) / 2, draw(301, 96), draw(50304, 96) / 3
    targets = torch.randint(0, 50257, (301,), device="cuda")
    targets[::3] = -100
    teachers = {"big": hl.Linear(big, big_weight), "served": sparse(301, 50257)}
    found = {}
    for backend in ("torch", "triton"):
        objective = hl.Objective(
            ce=cross_entropy,
            f=hl.Term(forward_kl, teacher="big", temperature=2.0),
            j=hl.Term(jsd, teacher="big", beta=0.2),
            s=hl.Term(reverse_kl, teacher="served"),
            backend=backend,
        )
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = objective(hl.Linear(h, w, memory="32MB"), targets, teacher=teachers)
        out.loss.backward()
        found[backend] = (out.loss.detach(), h.grad, w.grad)
    for ours, theirs in zip(found["triton"], found["torch"], strict=True):
        assert relative(ours, theirs) < (2e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("v", [1, 7, 129, 2051])
def test_small_and_odd(v):
    """Every kernel at sizes where nothing divides anything; the selection that compute-sanitizer looks at."""
    torch.manual_seed(v)
    x, u = torch.randn(5, v + 3, device="cuda"), torch.randn(5, v + 9, device="cuda")[:, 2 : v + 2]
    for dtype in (torch.float32, torch.bfloat16):
        found = {}
        for backend in ("torch", "triton"):
            objective = hl.Objective(
                a=hl.Term(forward_kl, teacher="a"), b=hl.Term(tvd, teacher="a"), c=hl.Term(jsd, teacher="b"),
                d=hl.Term(soft_cross_entropy, teacher="s"), metrics=["entropy"], backend=backend,
            )  # fmt: skip
            torch.manual_seed(1)
            teachers = {"a": hl.Logits(u.to(dtype)), "b": hl.Logits(u.flip(-1)), "s": sparse(5, v, 9)}
            leaf = x.to(dtype)[:, 1 : v + 1].detach().requires_grad_()
            out = objective(hl.Logits(leaf), teacher=teachers)
            out.loss.backward()
            found[backend] = (out.loss.detach(), leaf.grad.float())
        close = 3e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found["triton"], found["torch"], rtol=close, atol=close)


@pytest.mark.parametrize("v", [2, 7, 129, 2051, 40003])
@pytest.mark.parametrize("kind", ["dense", "ids"])
def test_one_launch_small_and_odd(kind, v):
    torch.manual_seed(v)
    x, u = torch.randn(5, v + 3, device="cuda"), torch.randn(5, v + 9, device="cuda")[:, 2 : v + 2]
    targets = torch.randint(0, v, (5,), device="cuda")
    targets[3] = -100
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = {}
        for backend in ("torch", "triton"):
            torch.manual_seed(1)
            source_t = hl.Logits(u.to(dtype), temperature=0.7, softcap=9.0) if kind == "dense" else sparse(5, v, 9)
            objective = hl.Objective(
                ce=hl.Term(cross_entropy, label_smoothing=0.1), a=forward_kl, b=hl.Term(jsd, temperature=2.0),
                c=hl.Term(reverse_kl, weight=0.1), metrics=["entropy", "accuracy"], backend=backend,
            )  # fmt: skip
            leaf = x.to(torch.float64 if backend == "torch" else dtype)
            leaf = (x.to(dtype).to(leaf.dtype))[:, 1 : v + 1].detach().requires_grad_()
            source = hl.Logits(leaf, softcap=20.0)
            if backend == "triton":
                assert objective.explain(source, targets, teacher=source_t).launches.startswith("one launch per chunk")
            elif kind == "dense":
                source_t = hl.Logits(u.to(dtype).double(), temperature=0.7, softcap=9.0)
            else:
                source_t = hl.Sparse(source_t.ids, source_t.logprobs.double())
            out = objective(source, targets, teacher=source_t)
            out.loss.backward()
            found[backend] = (out.loss.detach().double(), leaf.grad.double(), out.metrics["entropy"].value.double())
        close = {torch.float32: 5e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
        for ours, truth in zip(found["triton"], found["torch"], strict=True):
            torch.testing.assert_close(ours, truth, rtol=close, atol=close * float(truth.abs().max()))


def test_more_than_two_to_the_31_elements():
    N, V = 16500, 131077
    x, u = (torch.empty(N, V, dtype=torch.bfloat16, device="cuda").normal_(std=2.0) for _ in range(2))
    rows = torch.tensor([0, 8191, 16383, 16384, N - 1], device="cuda")
    few_x, few_u = x[rows].double().requires_grad_(), u[rows].double()
    logp, logq = few_x.log_softmax(-1), few_u.log_softmax(-1)
    ((logp.exp() * (logp - logq)).sum(-1) + jsd(logp, logq).sum(-1)).sum().backward()
    objective = hl.Objective(r=hl.Term(reverse_kl, reduction="token_sum"), j=hl.Term(jsd, reduction="token_sum"))
    leaf = x.requires_grad_()
    out = objective(hl.Logits(leaf), teacher=hl.Logits(u))
    out.loss.backward()
    assert relative(leaf.grad[rows], few_x.grad) < 4e-3


def test_no_compilation_when_only_the_number_of_rows_changes():
    from headloss.backends.triton.kernels import dense, dense_merge, divergence_sums, pull, visit
    from headloss.backends.triton.kernels import sparse as ids

    kernels = (
        dense.dense_sums_kernel, dense_merge.dense_merge_kernel, pull.pull_kernel, divergence_sums.divergence_kernel,
        ids.tail_kernel, ids.gather_kernel, ids.store_kernel, ids.merge_ids_kernel, visit.visit_kernel,
    )  # fmt: skip
    before = None
    for n in (1, 2, 16, 17, 33, 128):
        for beta in (0.3, 0.6) if before else (0.3,):
            leaf = torch.randn(n, 5003, device="cuda", requires_grad=True)
            teachers = {"a": hl.Logits(torch.randn(n, 5003, device="cuda")), "s": sparse(n, 5003)}
            objective = hl.Objective(
                a=hl.Term(forward_kl, teacher="a"), j=hl.Term(jsd, teacher="a", beta=beta), s=hl.Term(tvd, teacher="s")
            )
            objective(hl.Logits(leaf), teacher=teachers).loss.backward()
            for source_t in teachers.values():  # one launch
                kd = hl.Term(jsd, beta=beta) if isinstance(source_t, hl.Logits) else forward_kl
                one = hl.Objective(kd=kd, ce=cross_entropy)
                targets = torch.randint(0, 5003, (n,), device="cuda")
                one(hl.Logits(leaf), targets, teacher=source_t).loss.backward()
            count = [sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in kernels]
            assert before in (None, count)
            before = count


def test_captured_in_a_graph():
    torch.manual_seed(0)
    x, u = torch.randn(9, 3001, device="cuda"), torch.randn(9, 3001, device="cuda")
    targets = torch.randint(0, 3001, (9,), device="cuda")
    served = sparse(9, 3001)
    objective = hl.Objective(ce=cross_entropy, j=hl.Term(jsd, teacher="a"), s=hl.Term(forward_kl, teacher="s"))

    def step():
        return objective.forward_backward(
            hl.Logits(x), targets, teacher={"a": hl.Logits(u), "s": served}, host_read=False
        )

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    x.normal_()
    u.normal_()
    graph.replay()
    torch.cuda.synchronize()
    loss, grad = out.loss.clone(), out.grads.logits.clone()
    again = step()
    assert torch.equal(loss, again.loss) and torch.equal(grad, again.grads.logits)


def bessel(logp, logq):
    return torch.special.bessel_j0(logp) * logq.exp()


@pytest.mark.parametrize("kind", ["dense", "ids"])
def test_one_launch_captured_in_a_graph(kind):
    torch.manual_seed(0)
    x, u = torch.randn(9, 3001, device="cuda"), torch.randn(9, 3001, device="cuda")
    targets = torch.randint(0, 3001, (9,), device="cuda")
    source_t = hl.Logits(u) if kind == "dense" else sparse(9, 3001)
    objective = hl.Objective(ce=cross_entropy, j=jsd)
    step = lambda: objective.forward_backward(hl.Logits(x), targets, teacher=source_t, host_read=False)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(3):
        torch.manual_seed(10 + seed)
        x.normal_(), u.normal_()
        graph.replay()
        want = step()
        assert torch.equal(out.loss, want.loss) and torch.equal(out.grads.logits, want.grads.logits)


def test_auto_is_triton_unless_a_divergence_cannot_be_printed():
    x, u = torch.randn(4, 100, device="cuda"), torch.randn(4, 100, device="cuda")
    assert hl.Objective(kd=jsd).explain(hl.Logits(x), teacher=hl.Logits(u)).backend == "triton"
    explained = hl.Objective(kd=bessel).explain(hl.Logits(x), teacher=hl.Logits(u))
    assert explained.backend == "torch" and "special_bessel_j0" in str(explained)
    assert math.isfinite(float(hl.Objective(kd=bessel)(hl.Logits(x), teacher=hl.Logits(u)).loss))
    with pytest.raises(ValueError, match="special_bessel_j0"):
        hl.Objective(kd=bessel, backend="triton")(hl.Logits(x), teacher=hl.Logits(u))


@pytest.mark.parametrize("calls", [1, 3])  # the first, and one that finds what earlier ones launched
def test_probabilities_in_place_of_their_logarithms_are_told_by_the_next_call(calls):
    x, targets = torch.randn(9, 300, device="cuda"), torch.randint(0, 300, (9,), device="cuda")
    ids = torch.rand(9, 300, device="cuda").argsort(-1)[:, :8]
    objective, probabilities = hl.Objective(kd=forward_kl), torch.rand(9, 8, device="cuda").softmax(-1)
    call = lambda probabilities: objective(hl.Logits(x), targets, teacher=hl.Sparse(ids, probabilities))
    for _ in range(calls - 1):
        call(probabilities.log())
    deferred_checks.check_pending(wait=True)
    call(probabilities)
    with pytest.raises(ValueError, match=r"teacher: .*all .* are these probabilities\?.*earlier call"):
        deferred_checks.check_pending(wait=True)
    call(probabilities.log())
    deferred_checks.check_pending(wait=True)
