"""Calls whose head makes its own products, end to end under Triton's interpreter, against float64."""

from importlib import import_module

import pytest
import torch
from interpreting import inside, interpreted

import headloss as hl
from headloss.engine.arguments import CallArguments, CallOptions
from headloss.engine.bind import chunked_because, read_because
from headloss.engine.lookup import find
from headloss.losses import cross_entropy, dpo, entropy_bonus, grpo, gspo, z_loss

pytest.importorskip("triton")
from headloss.backends.triton import product

if not product.TESTED:
    pytest.skip("the products need triton 3.6", allow_module_level=True)


# numpy says that 2^-x overflows where the result is not used
test_under_the_interpreter = interpreted(__file__, "-W", "ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def pretend(monkeypatch):
    """CPU tensors are a Hopper GPU's, and tiles are small."""
    monkeypatch.setattr(product, "PRETEND", True)
    monkeypatch.setattr(product, "TILE", product.Tile(16, 32, 16, 2, 4, 2, 1))
    monkeypatch.setattr(product, "READ", product.Tile(16, 32, 16, 2, 4, 2, 2))
    monkeypatch.setattr(product, "NUMBERED", {"B": 8, "R": 16})
    monkeypatch.setattr(product, "SORTED", {"B": 4, "R": 8})
    monkeypatch.setattr(product, "SMALLEST", 0)
    settle = import_module("headloss.backends.triton.settle")
    monkeypatch.setattr(settle, "BLOCK", 4)
    monkeypatch.setattr(settle, "_spec_of", settle.by_identity(settle._spec_of.__wrapped__))  # which knows no plan yet


@pytest.fixture
def settled(monkeypatch):
    """The launches that settled, and the calls of losses in torch."""
    from headloss.backends.triton.launch import Launch
    from headloss.engine.loss import TermsOnRows

    run, seen = Launch.run, []
    monkeypatch.setattr(Launch, "run", lambda *call: seen.append(call[0].kernel.__name__) or run(*call))
    for name in ("chunk", "whole"):
        there = getattr(TermsOnRows, name)
        monkeypatch.setattr(TermsOnRows, name, lambda *a, __=there, **more: seen.append("torch") or __(*a, **more))
    return lambda: [name for name in seen if name in ("settle_kernel", "torch")]


@pytest.fixture
def reads(monkeypatch):
    """How many rows each first product of a call was given and took, and whether it kept what a gradient needs."""
    seen, read = [], product.read

    def watched(hidden, *args, store=None, **more):
        found = read(hidden, *args, store=store, **more)
        seen.append((len(hidden), int(found.rows.live), store is not None))
        return found

    monkeypatch.setattr(product, "read", watched)
    return seen


ROWS, LIVE, VOCAB, WIDTH = 37, 31, 70, 24


class Batch:
    def __init__(self, ignored=True):
        self.hidden, self.weight = torch.randn(ROWS, WIDTH).bfloat16(), (torch.randn(VOCAB, WIDTH) / 2).bfloat16()
        self.targets = torch.randint(VOCAB, (ROWS,))
        self.targets[3::6] = -100 if ignored else 0
        self.inputs = {"advantage": torch.randn(ROWS), "old_logprob": torch.randn(ROWS) - 4}
        self.segments = hl.Segments.from_cu_seqlens(torch.tensor([0, 10, 19, 29, 37]))

    def run(self, objective, dtype=None, inputs=("advantage", "old_logprob"), **options):
        """The record, and the gradients of hidden and weight."""
        tensors = [x.to(dtype or x.dtype).clone().requires_grad_() for x in (self.hidden, self.weight)]
        source = hl.Linear(*tensors, **{k: options.pop(k) for k in ("memory", "temperature") if k in options})
        out = objective(source, self.targets, **{n: self.inputs[n] for n in inputs}, **options)
        out.loss.backward()
        return out, [x.grad for x in tensors]


def on(backend, **terms):
    return hl.Objective(**terms, backend=backend)


def same(batch, within=6e-3, digits=1e-4, **call):
    """By products, in bf16, against torch in float64."""
    terms = {k: call.pop(k) for k in list(call) if callable(call[k]) or isinstance(call[k], hl.Term) or k == "metrics"}
    out, grads = batch.run(on("triton", **terms), **call)
    options = {k: x for k, x in call.items() if k not in ("memory", "host_read")}
    true, true_grads = batch.run(on("torch", **terms), dtype=torch.float64, **options)
    torch.testing.assert_close(out.loss.double(), true.loss, rtol=digits, atol=1e-5)
    for name, x in out.metrics.items():
        assert float(x) == pytest.approx(float(true.metrics[name]), rel=20 * digits, abs=1e-5), name
    for x, y in zip(grads, true_grads, strict=True):
        assert float((x.double() - y).norm() / y.norm()) < within
    return out


ROW = {"ce": cross_entropy, "z": hl.Term(z_loss, weight=1e-2), "rl": grpo, "metrics": ["entropy", "accuracy"]}


@inside
@pytest.mark.parametrize("host_read", [True, False])
def test_a_row_objective_takes_three_products(host_read, reads):
    """Ignored rows are dropped where the host may look, and else left out on the device."""
    batch = Batch()
    same(batch, **ROW, host_read=host_read)
    assert reads == [(LIVE if host_read else ROWS, LIVE, True)]


@inside
def test_rows_without_a_gradient_are_counted(reads):
    batch = Batch()
    batch.inputs["advantage"][::2] = 0
    out = same(batch, rl=grpo, metrics=["dead_rows"], host_read=False)
    assert 0.4 < float(out.metrics["dead_rows"]) < 1
    dead, logits = on("triton", rl=grpo, metrics=["dead_rows"]), torch.randn(ROWS, VOCAB, requires_grad=True)
    for _ in range(3):  # later calls on logits take a shorter way
        found = dead(hl.Logits(logits), batch.targets, **batch.inputs)
        assert float(found.metrics["dead_rows"]) >= 0.4


@inside
@pytest.mark.parametrize("host_read", [True, False])
def test_a_small_budget_cuts_the_rows(host_read, reads, settled):
    """Each chunk is settled in one launch of its own."""
    same(Batch(), **ROW, memory=11 * (140 + 96) if host_read else 16 * 140, host_read=host_read)
    assert [rows for rows, _, _ in reads] == ([10, 10, 11] if host_read else [12, 12, 13])
    assert settled()[:4] == [*["settle_kernel"] * 3, "torch"]  # and the truth


@inside
@pytest.mark.parametrize("host_read", [True, False])
def test_chunks_of_rows_that_segments_only_weigh(host_read, reads, settled):
    """Cut within segments; an input wants a gradient, temperatures differ from row to row, a metric is of all rows."""
    batch, each = Batch(), {}
    batch.inputs["advantage"].requires_grad_()
    mean = hl.Term(lambda logprob, advantage: -logprob * advantage**2, reduction="seq_mean_token_mean")
    terms = {"it": mean, "z": hl.Term(z_loss, reduction="token_sum", weight=1e-2), "metrics": ["dead_rows", "argmax"]}
    for memory, backend, dtype in ((16 * 140, "triton", None), ("1GiB", "torch", torch.float64)):
        batch.inputs["advantage"].grad = None
        call = {"segments": batch.segments, "temperature": torch.linspace(0.5, 2, ROWS), "host_read": host_read}
        out, grads = batch.run(on(backend, **terms), dtype=dtype, memory=memory, inputs=("advantage",), **call)
        found = [*grads, out.loss, out.facts.lse, *out.terms.values(), batch.inputs["advantage"].grad]
        each[backend] = [x.detach().double() for x in found], {n: float(x) for n, x in out.metrics.items()}
    assert len(reads) > 1 and settled()[: len(reads) + 1] == [*["settle_kernel"] * len(reads), "torch"]
    for i, (x, y) in enumerate(zip(each["triton"][0], each["torch"][0], strict=True)):
        assert float((x - y).norm()) <= (1e-2 if i < 2 else 1e-5) * float(y.norm()), i
    assert each["triton"][1] == pytest.approx(each["torch"][1], rel=1e-3)


@inside
def test_a_segment_objective_takes_three_products(reads):
    batch = Batch()
    same(batch, rl=hl.Term(gspo, reduction="seq_mean_token_mean"), segments=batch.segments, host_read=False)
    assert reads == [(ROWS, LIVE, True)]


@inside
def test_beyond_the_budget_chunks_hold_whole_segments(reads, settled):
    """Three products still, for which the host has to know the segments' lengths."""
    batch, term = Batch(), hl.Term(gspo, reduction="seq_mean_token_mean")
    few = 17 * (140 + 96)  # of logits, of gathered hidden rows and their gradient
    z = hl.Term(z_loss, weight=1e-2, reduction="token_sum")
    same(batch, rl=term, z=z, metrics=["entropy"], segments=batch.segments, memory=few, within=1e-2)
    assert [(rows, store) for rows, _, store in reads] == [(16, True), (15, True)]
    assert settled()[:3] == ["settle_kernel", "settle_kernel", "torch"]  # and the truth
    for memory, because in (("1GiB", ""), (few, "chunks hold whole segments")):
        source = hl.Linear(batch.hidden, batch.weight, memory=memory)
        call = CallArguments(source, batch.targets, batch.segments, None, CallOptions(), batch.inputs)
        plan, call, *_ = find(on("triton", rl=term), call)
        assert read_because(plan, call.source, call.segments, chunked_because(plan, call.source)) == because


@inside
def test_segments_longer_than_a_chunk_are_settled_together(reads, settled):
    """All sums first, one launch, and the products again for the gradient; without one, sums are all."""
    batch, term = Batch(), hl.Term(gspo, reduction="seq_mean_token_mean")
    for host_read in (True, False):
        reads.clear()
        before = len(settled())
        same(batch, rl=term, segments=batch.segments, memory=7 * (140 + 96), host_read=host_read)
        assert settled()[before : before + 2] == ["settle_kernel", "torch"]
        assert [store for _, _, store in reads][:2] == [False, True]
    tensors = [x.clone().requires_grad_() for x in (batch.hidden, batch.weight)]
    call = {"segments": batch.segments, **batch.inputs}
    for memory in ("1GiB", 17 * (140 + 96)):
        before = len(settled())
        with torch.no_grad():
            out = on("triton", rl=term)(hl.Linear(*tensors, memory=memory), batch.targets, **call)
        assert settled()[before:] == ["settle_kernel"]
        true = on("torch", rl=term)(hl.Linear(*(x.double() for x in tensors)), batch.targets, **call)
        torch.testing.assert_close(out.loss.double(), true.loss.detach(), rtol=1e-4, atol=1e-5)


@inside
def test_a_batch_objective_takes_three_products(reads):
    batch, pairs = Batch(), torch.tensor([[0, 1], [2, 3]])
    batch.inputs["ref_logprob"] = torch.randn(ROWS) - 4
    batch.inputs["pairs"] = pairs
    same(batch, d=dpo, segments=batch.segments, inputs=("ref_logprob", "pairs"))
    assert reads == [(LIVE, LIVE, True)]  # the loss may not see ignored rows: they are dropped


@inside
def test_without_grad_nothing_of_the_vocabularys_size_is_kept(reads):
    batch = Batch()
    with torch.no_grad():
        facts = hl.row_facts(
            hl.Linear(batch.hidden, batch.weight), batch.targets, want=("logprob", "entropy"), backend="triton",
            host_read=False,
        )  # fmt: skip
    assert reads == [(ROWS, LIVE, False)]
    true = hl.row_facts(hl.Linear(batch.hidden.double(), batch.weight.double()), batch.targets, want=("logprob",))
    torch.testing.assert_close(facts.logprob.double(), true.logprob, rtol=1e-5, atol=1e-5)


@inside
@pytest.mark.parametrize("want", ["logprob", "entropy", "sum_p2"])
def test_facts_are_differentiable(want, reads):
    batch, grads = Batch(), []
    for dtype in (torch.bfloat16, torch.float64):
        hidden, weight = (x.to(dtype).clone().requires_grad_() for x in (batch.hidden, batch.weight))
        backend = "triton" if dtype == torch.bfloat16 else "torch"
        facts = hl.row_facts(hl.Linear(hidden, weight), batch.targets, want=(want,), backend=backend)
        (getattr(facts, want) * batch.inputs["advantage"]).sum().backward()
        grads.append((hidden.grad, weight.grad))
    assert [store for _, _, store in reads] == [False, True]
    for x, y in zip(*grads, strict=True):
        assert float((x.double() - y).norm() / y.norm()) < 2e-2


@inside
@pytest.mark.parametrize("memory", ["1GiB", 16 * 140])
def test_terms_of_entropy_and_sum_p2_take_three_products(memory, reads):
    """E becomes the gradient where it stands: no logits are kept."""
    square = lambda sum_p2, entropy: sum_p2 * entropy
    terms = {"rl": grpo, "h": hl.Term(entropy_bonus, weight=0.1), "q": hl.Term(square, weight=0.3)}
    same(Batch(), **terms, memory=memory, within=2e-2, host_read=False)
    assert {store for _, _, store in reads} == {True}
    assert [rows for rows, _, _ in reads] == ([ROWS] if memory == "1GiB" else [12, 12, 13])


@inside
def test_segments_with_an_entropy_term_take_three_products(reads):
    batch, terms = Batch(), {"rl": hl.Term(gspo, reduction="seq_mean_token_mean"), "h": entropy_bonus}
    same(batch, **terms, segments=batch.segments, host_read=False, within=2e-2)
    assert reads == [(ROWS, LIVE, True)]


@inside
@pytest.mark.parametrize("memory", ["1GiB", 16 * 140])
def test_the_weights_gradient_is_added_by_the_product(memory):
    batch, objective = Batch(), on("triton", ce=cross_entropy)
    _, (_, true) = batch.run(on("torch", ce=cross_entropy), dtype=torch.float64, inputs=())
    weight = torch.nn.Parameter(batch.weight.clone())
    there = weight.main_grad = torch.randn(VOCAB, WIDTH)
    before = there.clone()
    hidden = batch.hidden.clone().requires_grad_()
    out = objective(hl.Linear(hidden, weight, memory=memory, weight_grad_into="main_grad"), batch.targets)
    assert torch.equal(there, before)
    (first,) = torch.autograd.grad(2 * out.loss, [hidden], retain_graph=True)  # which leaves the weight's alone
    assert torch.equal(there, before)
    (2 * out.loss).backward()
    torch.testing.assert_close(hidden.grad, first)
    assert weight.grad is None and weight.main_grad is there
    assert float(((there - before).double() - 2 * true).norm() / (2 * true).norm()) < 6e-3


@inside
def test_explain_says_whose_products_run(monkeypatch):
    batch, objective = Batch(), on("triton", ce=cross_entropy)
    text = str(objective.explain(hl.Linear(batch.hidden, batch.weight), batch.targets))
    assert "products     the head's own" in text and "3 GEMMs" in text and "0 passes" in text
    assert "between the products one launch settles facts and losses" in text
    few = str(objective.explain(hl.Linear(batch.hidden, batch.weight, memory=16 * 140), batch.targets))
    assert "between the products one launch per chunk settles facts and losses" in few
    meets = on("triton", it=lambda logprob: -logprob / logprob.sum())
    text = str(meets.explain(hl.Linear(batch.hidden, batch.weight), batch.targets))
    assert "between the products the losses run in torch" in text
    for term in (entropy_bonus, lambda sum_p2: -sum_p2 / sum_p2.sum()):  # printed, and one that is not
        text = str(on("triton", it=term).explain(hl.Linear(batch.hidden, batch.weight), batch.targets))
        assert "a term moves entropy or sum_p2" in text and "1 pass over the vocabulary (0 without grad)" in text, text
    bound = lambda logprob, entropy: -logprob * entropy.detach()
    text = str(on("triton", it=bound).explain(hl.Linear(batch.hidden, batch.weight), batch.targets))
    assert "0 passes" in text, text
    bias = torch.zeros(VOCAB).bfloat16()
    reasons = {
        "there is a bias": (on("triton", ce=cross_entropy), hl.Linear(batch.hidden, batch.weight, bias)),
        "softcap": (on("triton", ce=cross_entropy), hl.Linear(batch.hidden, batch.weight, softcap=9.0)),
        "float32": (on("triton", ce=cross_entropy), hl.Linear(batch.hidden.float(), batch.weight.float())),
        "several temperatures": (
            on("triton", ce=cross_entropy, hot=hl.Term(cross_entropy, temperature=2.0)),
            hl.Linear(batch.hidden, batch.weight),
        ),
        "(70, 21)": (
            on("triton", ce=cross_entropy), hl.Linear(batch.hidden[:, :21], batch.weight[:, :21].contiguous())
        ),
        "(70, 20), has few columns, or rows that are not whole numbers of 16 bytes": (
            on("triton", ce=cross_entropy), hl.Linear(batch.hidden[:, :20], batch.weight[:, :20])  # strides of 24
        ),
    }  # fmt: skip
    for reason, (which, source) in reasons.items():
        text = str(which.explain(source, batch.targets))
        assert "products     cuBLAS, chunk by chunk: " in text and reason in text, text
    monkeypatch.setattr(product, "SMALLEST", VOCAB * WIDTH + 1)
    text = str(objective.explain(hl.Linear(batch.hidden, batch.weight), batch.targets))
    assert "(70, 24), is so small that launches take longer than products" in text


@inside
def test_nothing_to_read_and_nothing_that_counts():
    batch = Batch()
    batch.targets[:] = -100
    out, grads = batch.run(on("triton", ce=cross_entropy), inputs=(), host_read=False)
    assert out.loss == 0 and all(torch.equal(x, torch.zeros_like(x)) for x in grads)
    off = on("triton", ce=cross_entropy)(hl.Linear(batch.hidden, batch.weight), batch.targets, weights={"ce": 0.0})
    assert off.loss == 0
