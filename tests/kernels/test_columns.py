"""The kernels of kept columns under Triton's interpreter, against the torch backend; compiled for Hopper."""

import subprocess

import pytest
import torch
from interpreting import INSIDE, inside, interpreted

import headloss as hl
from headloss.backends import torch_columns as plain
from headloss.losses import cross_entropy, entropy_bonus, gspo, jsd, z_loss

pytest.importorskip("triton")


test_under_the_interpreter = interpreted(__file__)


@pytest.mark.skipif(INSIDE, reason="the interpreter compiles nothing")
def test_compiles_for_hopper_without_spills(tmp_path):
    from test_triton_compile import BIN, GPUTarget, triton
    from triton.compiler import ASTSource

    from headloss.backends.triton import columns
    from headloss.backends.triton.kernels.columns import combine_kernel, project_kernel

    types = dict.fromkeys(("hidden", "weight", "x", "out", "bias"), "*bf16") | {"grad": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("row", "column", "of", "into", "place"), "*i64") | dict.fromkeys(("E", "D"), "i32")
    types |= dict.fromkeys(("hidden_stride", "weight_stride", "out_stride", "x_stride"), "i32")
    cases = (project_kernel, {**columns.PROJECT, "BIAS": True}), (combine_kernel, {**columns.COMBINE, "ADD": True})
    for kernel, how in cases:
        names, warps = kernel.arg_names, how["num_warps"]
        assert len(names) <= 15
        aligned = {
            (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in types and n not in ("E", "scale")
        }
        constants = {n: x for n, x in how.items() if n in names}
        signature = {n: types.get(n, "constexpr") for n in names} | (
            {"out": "*fp32"} if kernel is project_kernel else {}
        )
        built = triton.compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget("cuda", 90, 32), options={"num_warps": warps},
        )  # fmt: skip
        path = tmp_path / "kernel.cubin"
        path.write_bytes(built.asm["cubin"])
        found = subprocess.run(
            [BIN / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
        assert "STACK:0" in found and "LOCAL:0" in found, found
        assert "ld.global.v4" in built.asm["ptx"]


@inside
@pytest.mark.parametrize("V, stride, scale, softcap", [(96, 96, 1.0, None), (83, 128, -0.5, None), (70, 71, 2.0, 3.0)])
def test_rows_at_some_tokens_and_their_log_sums(V, stride, scale, softcap, monkeypatch):
    """Parts of a row that end anywhere, rows that are padded with what must not be read, tokens in no order."""
    from headloss.backends.triton import columns

    monkeypatch.setattr(columns, "TAKE", {**columns.TAKE, "PART": 32, "BLOCK": 8})
    generator = torch.Generator().manual_seed(V)
    held = torch.full((5, stride), 900.0)
    raw = held[:, :V].copy_(torch.randn(5, V, generator=generator) * 4)
    raw[2, 5:64] = -torch.inf if scale > 0 else 0.0
    ids, T = torch.randperm(V, generator=generator)[:21], torch.rand(5, generator=generator) + 0.5
    want, got = torch.empty(2, 5, 21)
    for temperatures in ((), (2.0, T)):
        found = columns.take(raw, ids, got, temperatures, scale, softcap)
        for x, y in zip(found, plain.take(raw, ids, want, temperatures, scale, softcap), strict=True):
            torch.testing.assert_close(x, y)
        assert torch.equal(got, want) and torch.equal(want, raw[:, ids])


@inside
@pytest.mark.parametrize("targets", [None, [3, 7, -100, 0, 9, 4, 7]])
def test_where_kept_columns_stand(targets):
    """Rows of one column and of many; targets at either end of a row, in it and not; ignored ones."""
    from headloss.backends.triton import columns
    from headloss.support_layout import Places

    sets = [[3], [9, 2, 7, 5], [4, 1], [0], list(range(3, 40)), [5, 6], [2, 10]]
    offsets = torch.tensor([0, *map(len, sets)]).cumsum(0)
    support = hl.Support.from_csr(torch.tensor([x for row in sets for x in row]), offsets)
    y = None if targets is None else torch.tensor(targets)
    want, got = Places.make(support, y), Places.found(support, y, columns.find_places)
    for name in Places.TENSORS:
        a, b = getattr(want, name), getattr(got, name)
        assert a is b is None or torch.equal(a, b), name
    part = slice(0, len(sets))
    a, b = want.entries(None, part), got.entries(None, part)
    assert (a.rows, a.width, a.numbers) == (b.rows, b.width, b.numbers) and torch.equal(a.place_E, b.place_E)
    for single in (None, got.single_N):
        assert torch.equal(a.columns(None, single), b.columns(None, single))


@inside
def test_sums_of_entries():
    from headloss.backends.triton import columns

    generator = torch.Generator().manual_seed(0)
    N, V, D, E = 5, 9, 37, 21
    hidden, weight = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator)
    row = torch.randint(N, (E,), generator=generator).sort().values
    column, grad = torch.randint(-1, V, (E,), generator=generator), torch.randn(E + 4, generator=generator)
    place, bias = torch.randperm(E + 3, generator=generator)[:E], torch.randn(V, generator=generator)
    column[3] = -2  # an entry that is none
    for of in (None, bias):
        want, got = torch.full((2, E + 4), -9.0)
        columns.project(got, row, column, place, hidden, weight, of, 0.5)
        plain.project(want, row, column, place, hidden, weight, of, 0.5)
        torch.testing.assert_close(got[:-1], want[:-1])
        assert want[place[3]] == -9.0
    into, order = column.sort(stable=True)
    for add in (False, True):
        for call in ((row, column, place, grad, weight), (into, row[order], place[order], grad, hidden)):
            want = torch.full((max(N, V), D), float(add))
            got = want.clone()
            columns.combine(got, *call, 0.5, add)
            plain.combine(want, *call, 0.5, add)
            torch.testing.assert_close(got, want)


@inside
@pytest.mark.parametrize("how", ["plain", "teacher", "inside", "numbered", "segments", "both", "dropped"])
def test_an_objective(how):
    def token(logprob, targets):
        return logprob * 0 + targets

    generator = torch.Generator().manual_seed(1)
    N, V, D = 6, 40, 9
    hidden, weight, guide = (torch.randn(n, D, generator=generator) for n in (N, V, V))
    rows = [torch.randperm(V, generator=generator)[:k] for k in (3, 1, 33, 7, 2, 1)]
    targets = torch.tensor([int(x[0]) for x in rows])
    targets[2], targets[4] = -100, (int(rows[4].max()) + 1) % V
    support = hl.Support.from_csr(torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0))
    terms = {"js": jsd} if how == "teacher" else {"ce": cross_entropy, "e": hl.Term(entropy_bonus, weight=0.1)}
    terms = {"rl": gspo} if how in ("segments", "dropped") else terms
    terms |= {"z": hl.Term(z_loss, weight=0.1, support="all")} if how == "both" else {}
    metrics = {"teacher": ["teacher_agreement"], "plain": ["accuracy", "mean_logprob"], "numbered": [token]}
    metrics = metrics.get(how, ["entropy"])
    found = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        more = {"teacher": hl.Linear(hidden.to(dtype), guide.to(dtype))} if how == "teacher" else {}
        objective = hl.Objective(**terms, metrics=metrics, backend=backend)
        if how in ("segments", "dropped"):  # no kernel takes float64: rows that are ignored are dropped before
            wide = dtype if how == "segments" else torch.float64
            more = {"advantage": torch.linspace(-1, 1, N).to(wide), "old_logprob": -torch.linspace(0, 1, N).to(wide)}
            more["segments"] = hl.Segments.from_cu_seqlens(torch.tensor([0, 3, N]))
        call = {"support": support, "host_read": how == "dropped", **more}
        memory = {"inside": 400, "dropped": 400, "both": 1 << 20}.get(how, 1200) * dtype.itemsize // 4
        source = hl.Linear(*leaves, softcap=5.0, memory=memory)
        if backend == "triton":
            launches = objective.explain(source, targets, **call).launches
            inside = {"inside": "one launch per chunk", "segments": "one that settles", "both": "one launch per chunk"}
            assert inside.get(how, "each row keeps some columns") in launches or how == "dropped"
        out = objective(source, targets, **call)
        numbers = [out.loss.detach(), *(torch.as_tensor(float(m)) for m in out.metrics.values())]
        if backend == "triton" and how == "both":
            kept, whole = (node for node, _ in out.loss.grad_fn.next_functions)
            assert kept.grads.weight is None and whole.grads.weight is not None  # one of the weight's size, for both
        found.append([*numbers, *torch.autograd.grad(3 * out.loss, leaves, retain_graph=True)])
        for x, y in zip(torch.autograd.grad(3 * out.loss, leaves), found[-1][-2:], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)  # a second backward makes them again
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-5, atol=1e-6)
