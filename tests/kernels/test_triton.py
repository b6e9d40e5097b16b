"""The Triton kernels under the interpreter, against the torch backend in float64.

TRITON_INTERPRET must be set before triton is first imported, so one test runs this file again in a process of its own.
"""

import math
import os
import subprocess
import sys
from importlib import import_module
from itertools import combinations

import pytest
import torch
from interpreting import INSIDE, inside, rerun

import headloss as hl
from headloss.backends import choose
from headloss.facts import Fact, Pull, Softmax, Want, coefficients, finish, merge
from headloss.losses import cross_entropy, grpo, gspo, z_loss

pytest.importorskip("triton")
STUDENT = ("lse", "logprob", "mean_logprob", "entropy", "sum_p2", "max_logprob", "argmax")
ALL = Want([Fact(name) for name in STUDENT])
NAN = math.nan

plain = import_module("headloss.backends.torch")
if INSIDE:
    kernels = import_module("headloss.backends.triton.backend")
    tiles = import_module("headloss.backends.triton.tiles")
    TINY = tiles.Shape(width=64, lanes=4, loads=2, stages=1, warps=1)  # 3 parts and several blocks at V near 150


HALVES = ("pull or coefficients or objective", "not (pull or coefficients or objective)")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.skipif(INSIDE, reason="this is the other process")
def test_under_the_interpreter(half):
    rerun(__file__, "-k", half)


@pytest.mark.skipif(INSIDE, reason="triton is allowed everything here")
def test_asked_for_where_it_cannot_run():
    x = torch.randn(3, 5)
    with pytest.raises(ValueError, match=r'backend: "triton" needs CUDA, got cpu; use backend="torch", or set'):
        hl.row_facts(hl.Logits(x), want=("lse",), backend="triton")
    with pytest.raises(TypeError, match=r'computes in float32, got float64; use backend="torch"'):
        choose("triton", torch.device("cuda"), torch.float64)
    assert choose("auto", torch.device("cpu")).__name__.endswith(".torch")
    assert choose("auto", torch.device("cuda"), torch.float64).__name__.endswith(".torch")


@pytest.mark.skipif(INSIDE, reason="triton interprets here")
def test_the_interpreter_is_chosen_too_late(monkeypatch):
    pytest.importorskip("triton.language")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="before triton is imported"):
        hl.row_facts(hl.Logits(torch.randn(3, 5)), want=("lse",), backend="triton")


def test_importing_headloss_does_not_import_triton():
    code = "import sys, headloss; sys.exit('triton' in sys.modules)"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def same(ours, truth, *, rtol=2e-6, atol=4e-6):
    """Partials agree, number by number; totals of a row to the digits of their terms."""
    for name in ("max", "argmax", "target", "columns", "total"):
        x, y = getattr(ours, name), getattr(truth, name)
        assert (x is None) == (y is None), name
        if x is not None:
            torch.testing.assert_close(x.double(), y.double(), rtol=rtol, atol=atol if name != "total" else 1e-3)
    for x, y in zip(ours.moments, truth.moments, strict=True):
        for mine, theirs in zip(x, y, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine.double(), theirs.double(), rtol=2e-5, atol=atol)


def draw(n=3, v=147, dtype=torch.float32, spread=4.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(n, v, generator=generator)).to(dtype), torch.randint(0, v, (n,), generator=generator)


def compare_sums(x, y, want=ALL, temperatures=(1.0,), **options):
    ours = kernels.sums(x, y, want, list(temperatures), shape=TINY, **options)
    options.pop("batch_invariant", None)
    wide = [T.double() if isinstance(T, torch.Tensor) else T for T in temperatures]
    same(ours, plain.sums(x.double(), y, want, wide, **options))
    return ours


SETS = [(name,) for name in STUDENT] + list(combinations(("logprob", "mean_logprob", "entropy", "sum_p2"), 2))


@inside
@pytest.mark.parametrize("names", SETS, ids=" ".join)
def test_any_set_of_facts(names):
    compare_sums(*draw(2, 133), Want([Fact(name) for name in names]))


@inside
@pytest.mark.parametrize("v", [1, 5, 64, 71, 128, 147])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_vocabulary(v, dtype):
    compare_sums(*draw(2, v, dtype))


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout(dtype):
    x, y = draw(3, 300, dtype)
    for view in (x[:, 3:150], x[1:, 7:8], x[:, :300:2], x[1:2, 130:].expand(3, -1)):
        compare_sums(view, y[: len(view)] % view.shape[1])
    compare_sums(x[:, 3:150], y[:, None].repeat(1, 2)[:, 1].int() % 147)  # targets strided, and int32


@inside
def test_masked_logits():
    x, y = draw(5, 147)
    x[0, ::3] = -math.inf
    x[1, :128] = -math.inf  # whole parts
    x[2, 64:] = -math.inf
    x[3] = -math.inf
    x[4, 1:] = -math.inf
    ours = compare_sums(x, y)
    assert not any(n.isnan().any() for n in (*ours.moments[0], ours.target, ours.max))
    assert ours.max[3] == -math.inf and ours.moments[0].S[3] == 0
    lowest = torch.full((2, 147), torch.finfo(torch.float32).min)  # what many use for -inf
    lowest[:, 70] = 3.0
    compare_sums(lowest, torch.tensor([70, 70]), Want([Fact(n) for n in ("logprob", "entropy", "sum_p2", "argmax")]))


@inside
@pytest.mark.parametrize("offset", [1e4, -1e4, 200.0])
def test_offsets_cost_no_digits(offset):
    x, y = draw(2, 133)
    compare_sums(x + offset, y)


@inside
def test_peaked_logits():
    x, y = draw(2, 133, spread=60.0)
    compare_sums(x, y)


@inside
def test_ties_go_to_the_lowest_column():
    x = torch.zeros(4, 147)
    x[1, [17, 18, 90, 146]] = 2.0
    x[2, [63, 64]] = 2.0
    x[3, [140, 5]] = 2.0
    ours = kernels.sums(x, None, Want([Fact("argmax")]), [1.0], shape=TINY)
    assert ours.argmax.tolist() == [0, 17, 63, 5]


@inside
def test_temperatures():
    x, y = draw(3, 147)
    facts = [Fact(n, T) for n in ("logprob", "entropy") for T in (None, 0.5, 2.0)] + [Fact("sum_p2", 2.0)]
    want = Want(facts)
    own = torch.tensor([0.7, 1.0, 3.0])
    compare_sums(x, y, want, [own if T is None else T for T in want.temperatures])


@inside
def test_softcap_and_scale():
    x, y = draw(2, 133, spread=8.0)
    compare_sums(x, y, softcap=5.0, scale=0.3)
    compare_sums(x, y, scale=-1.5)
    x = torch.linspace(-40, 40, 133).repeat(2, 1)
    compare_sums(x, y, softcap=30.0)


@inside
def test_a_shard_knows_its_own_columns():
    x, y = draw(3, 147)
    compare_sums(x, y + torch.tensor([-200, 100, 300]), start=100)
    empty = kernels.sums(x[:, :0], y, ALL, [1.0])
    same(empty, plain.sums(x[:, :0].double(), y, ALL, [1.0]))


@inside
def test_parts_are_those_of_the_merge():
    x, y = draw(2, 160)
    whole = kernels.sums(x, y, ALL, [2.0], shape=TINY._replace(width=160 * 64))
    parts = [kernels.sums(x[:, i : i + 32], y, ALL, [2.0], start=i, shape=TINY) for i in range(0, 160, 32)]
    stacked = type(whole)(
        *(torch.stack([p[k] for p in parts]) for k in range(5)),
        (type(whole.moments[0])(*(torch.stack([p.moments[0][k] for p in parts]) for k in range(3))),),
    )
    split = kernels.sums(x, y, ALL, [2.0], shape=TINY._replace(width=32))
    same(merge(stacked, [2.0]), split)
    same(whole, split)


@inside
@pytest.mark.parametrize(("V", "dtype"), [(149, torch.float32), (149, torch.bfloat16), (152, torch.float32)])
def test_bits_do_not_depend_on_where_the_allocator_put_the_rows(V, dtype):
    """CUDA starts every tensor on a line of 128 bytes; a CPU's memory may start anywhere, and must not matter."""
    x, y = draw(3, V)
    x, found = x.to(dtype), []
    for start in range(0, 128, 16):
        room = torch.empty(x.nbytes + 256, dtype=torch.uint8).numpy()
        room = room[(start - room.ctypes.data) % 128 :][: x.nbytes]
        placed = torch.from_numpy(room).view(dtype).view(x.shape).copy_(x)
        assert placed.data_ptr() % 128 == start and placed.storage_offset() == 0
        sums, out = kernels.sums(placed, y, ALL, [1.0], shape=TINY), torch.empty_like(placed)
        assert torch.equal(placed, x)
        found.append((sums.moments[0].S, sums.moments[0].X, sums.total, tiles.rows_of(out).vector))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other[:3], found[0][:3], strict=True))
        assert other[3] == found[0][3] > 1


@inside
def test_bits_do_not_depend_on_the_rows_around():
    x, y = draw(3, 152)
    every = kernels.sums(x, y, ALL, [1.0], shape=TINY)
    again = kernels.sums(x, y, ALL, [1.0], shape=TINY)
    some = kernels.sums(x[1:2], y[1:2], ALL, [1.0], shape=TINY)
    for k in range(3):
        assert torch.equal(every.moments[0][k], again.moments[0][k])
        assert torch.equal(every.moments[0][k][1:2], some.moments[0][k])
    x, y = draw(2, 149)  # rows that start anywhere: the same bits without wide loads
    tiles.PEEL = False
    try:
        every = kernels.sums(x, y, ALL, [1.0], shape=TINY)
        some = kernels.sums(x[1:2], y[1:2], ALL, [1.0], shape=TINY)
    finally:
        tiles.PEEL = True
    assert torch.equal(every.moments[0].S[1:2], some.moments[0].S) and torch.equal(every.total[1:2], some.total)
    compare_sums(x[:1], y[:1], batch_invariant=False)


# ---------------------------------------------------------------- the pull


def state(x, y, want, temperatures, seed=1, **options):
    """What the pull gets: from float64, rounded once."""
    wide = [T.double() if isinstance(T, torch.Tensor) else T for T in temperatures]
    partial = plain.sums(x.double(), y, want, wide, **options)
    facts, softmax = finish(partial, want, wide, x.shape[1])
    generator = torch.Generator().manual_seed(seed)
    grads = {f: torch.randn(len(x), generator=generator).double() for f in want.facts if facts[f].is_floating_point()}
    return softmax, coefficients(facts, grads, want, x.shape[1])


def narrow(k, by=1.0):
    return Pull(*(None if x is None else x.float() * by for x in k))


def compare_pull(x, y, names=STUDENT[:5], temperatures=(1.0,), out=None, want=None, **options):
    want = want or Want([Fact(name) for name in names])
    softmax, pulls = state(x, y, want, temperatures, **options)
    truth = torch.empty(x.shape, dtype=torch.float64)
    wide = [T.double() if isinstance(T, torch.Tensor) else T for T in temperatures]
    plain.pull(x.double(), y, softmax, pulls, wide, truth, **options)
    out = torch.full_like(x, NAN, memory_format=torch.contiguous_format) if out is None else out
    small = Softmax(softmax.max.float(), tuple(s.float() for s in softmax.log_sums))
    kernels.pull(x, y, small, [narrow(k) for k in pulls], list(temperatures), out, shape=TINY, **options)
    close = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[out.dtype]  # the interpreter truncates
    torch.testing.assert_close(out.double(), truth, rtol=close, atol=close)


@inside
@pytest.mark.parametrize("names", SETS, ids=" ".join)
def test_any_set_of_coefficients(names):
    if not set(names) & set(STUDENT[:5]):
        pytest.skip("metrics have no gradient")
    compare_pull(*draw(2, 133), names)


@inside
@pytest.mark.parametrize("v", [1, 5, 64, 71, 147])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pull_of_any_vocabulary_in_place(v, dtype):
    x, y = draw(3, v, dtype)
    compare_pull(x, y, out=x)


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pull_keeps_to_its_own_columns(dtype):
    x, y = draw(3, 300, dtype)
    room = torch.full((3, 310), NAN, dtype=dtype)
    for view, out in ((x[:, 3:150], room[:, 3:150]), (x[:, 3:150], room[:, 4:151]), (x[:, :300:2], room[:, :300:2])):
        room.fill_(NAN)
        compare_pull(view, y % view.shape[1], out=out)
        assert int(room.isnan().sum()) == room.numel() - out.numel()


@inside
def test_pull_with_temperatures_softcap_scale_and_a_shard():
    x, y = draw(3, 147)
    facts = [Fact(n, T) for n in ("logprob", "entropy") for T in (None, 0.5)] + [Fact("sum_p2", 2.0)]
    want = Want(facts)
    own = torch.tensor([0.7, 1.0, 3.0])
    temperatures = [own if T is None else T for T in want.temperatures]
    compare_pull(x, y, temperatures=temperatures, want=want, softcap=5.0, scale=0.7, out=x.clone())
    compare_pull(x, y, out=x.clone(), softcap=20.0)
    x[:, 5::7] = -math.inf
    compare_pull(x, torch.tensor([100, 250, 99]), ("lse", "logprob", "entropy", "sum_p2"), start=100)


@inside
def test_rows_without_coefficients_are_zeros_and_never_read():
    x, y = draw(3, 147)
    want = Want([Fact("logprob"), Fact("entropy")])
    softmax, (k,) = state(x, y, want, [1.0])
    k = narrow(k, by=torch.tensor([1.0, 0.0, 1.0]))
    x[1] = NAN
    softmax = Softmax(softmax.max.float(), tuple(s.float() for s in softmax.log_sums))
    out = torch.full_like(x, NAN)
    kernels.pull(x, y, softmax, [k], [1.0], out, shape=TINY)
    assert torch.equal(out[1], torch.zeros(147)) and not out.isnan().any()
    kernels.pull(x, y, softmax, [Pull(None, None, None, None, None)], [1.0], out, shape=TINY)
    assert torch.equal(out, torch.zeros_like(out))


# ---------------------------------------------------------------- the whole way


def objective(backend):
    return hl.Objective(
        ce=cross_entropy,
        z=hl.Term(z_loss, weight=1e-2),
        rl=grpo,
        sharp=hl.Term(lambda entropy, sum_p2: entropy - sum_p2, temperature=2.0),
        smooth=hl.Term(lambda mean_logprob: -mean_logprob, weight=0.1),
        metrics=["entropy", "accuracy"],
        backend=backend,
    )


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(7, 6, generator=generator), torch.randn(83, 6, generator=generator)
    targets = torch.randint(0, 83, (7,), generator=generator)
    targets[[2, 6]] = -100
    inputs = {
        "old_logprob": -torch.rand(7, generator=generator) * 5,
        "advantage": torch.randn(7, generator=generator),
    }
    return hidden.to(dtype), weight.to(dtype), targets, inputs


@inside
@pytest.mark.parametrize("host_read", [True, False])
def test_objective_on_logits(host_read):
    hidden, weight, targets, inputs = problem()
    found = {}
    for backend in ("torch", "triton"):
        logits = (hidden @ weight.T).requires_grad_()
        source = hl.Logits(logits, softcap=8.0, temperature=0.8)
        out = objective(backend)(source, targets, host_read=host_read, **inputs)
        out.loss.backward()
        found[backend] = (out.loss.detach(), logits.grad, out.facts.logprob, out.facts.entropy)
    torch.testing.assert_close(found["triton"], found["torch"], rtol=1e-5, atol=1e-6)


@inside
@pytest.mark.parametrize("reduction", ["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_objective_with_weights_and_a_scale(reduction):
    """Weights of terms, reductions and grad_scale, when the loss runs inside the sweep."""
    hidden, weight, targets, _ = problem()
    segments = hl.Segments.from_ids(torch.tensor([0, 0, 1, 1, 1, 2, 2]))
    found = {}
    for backend in ("torch", "triton"):
        logits = (hidden @ weight.T).requires_grad_()
        terms = {"ce": hl.Term(cross_entropy, weight=0.7, reduction=reduction), "z": hl.Term(z_loss, weight=1e-2)}
        out = hl.Objective(**terms, backend=backend)(hl.Logits(logits), targets, segments=segments, grad_scale=3.0)
        out.loss.backward()
        found[backend] = (out.loss.detach(), logits.grad, out.terms["ce"])
    torch.testing.assert_close(found["triton"], found["torch"], rtol=1e-5, atol=1e-6)


@inside
def test_objective_that_overwrites_logits_says_so():
    """A kernel's store is not seen by autograd: whoever kept the logits for a backward must still hear of it."""
    x = torch.randn(3, 40, requires_grad=True)
    logits = x * 1.0
    other = logits.square().sum()  # keeps the logits
    objective = hl.Objective(ce=cross_entropy, backend="triton")
    objective(hl.Logits(logits, inplace=True), torch.arange(3)).loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@inside
@pytest.mark.parametrize("loss", [grpo, gspo])
def test_objective_on_linear(loss):
    hidden, weight, targets, inputs = problem()
    segments = hl.Segments.from_cu_seqlens(torch.tensor([0, 3, 7]))
    found = {}
    for backend in ("torch", "triton"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        source = hl.Linear(h, w, memory=4 * 83 * 4)
        mix = hl.Objective(rl=loss, z=hl.Term(z_loss, weight=1e-2), backend=backend)
        out = mix(source, targets, segments=segments, **inputs)
        out.loss.backward()
        found[backend] = (out.loss.detach(), h.grad, w.grad)
    torch.testing.assert_close(found["triton"], found["torch"], rtol=1e-5, atol=1e-6)


@inside
def test_row_facts_of_half_precision_and_float64():
    hidden, weight, targets, _ = problem()
    logits = (hidden @ weight.T).bfloat16().requires_grad_()
    targets = targets.clamp(min=0)
    names = ("lse", "logprob", "entropy")
    ours = hl.row_facts(hl.Logits(logits), targets, want=names, backend="triton")
    theirs = hl.row_facts(hl.Logits(logits), targets, want=names, backend="torch")
    for name in names:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="float64"):
        hl.row_facts(hl.Logits(logits.double()), targets, want=names, backend="triton")
    with pytest.raises(TypeError, match="reads bfloat16, float16 and float32"):
        kernels.sums(logits.detach().double(), targets, ALL, [1.0])


@inside
def test_where_no_fact_is_wanted_nothing_is_launched(monkeypatch):
    """As over a vocabulary shard with every term off: the collective is there, and it carries no sums."""
    backend = import_module("headloss.backends.triton.sweeps")
    monkeypatch.setattr(backend, "launch_sums", lambda *_: pytest.fail("a sweep that nobody reads"))
    found = backend.sums(torch.randn(5, 40), None, Want([]), [])
    assert torch.equal(found.max, torch.full((5,), -math.inf)) and not found.moments
