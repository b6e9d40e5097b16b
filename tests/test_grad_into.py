"""`weight_grad_into`: what is added where, on every way a call can run, and what is refused before it runs."""

import pytest
import torch

import headloss as hl
from headloss.engine.heads import LinearHead
from headloss.losses import cross_entropy, dpo, gspo

ROWS, VOCAB, WIDTH = 12, 20, 8


class Batch:
    def __init__(self):
        self.hidden = torch.randn(ROWS, WIDTH, dtype=torch.float64)
        self.weight = torch.nn.Parameter(torch.randn(VOCAB, WIDTH, dtype=torch.float64))
        self.targets = torch.randint(VOCAB, (ROWS,))
        self.targets[2] = -100
        self.segments = hl.Segments.from_cu_seqlens(torch.tensor([0, 3, 6, 9, 12]))
        self.pairs = torch.tensor([[0, 1], [2, 3]])
        self.calls = {
            "row": (hl.Objective(ce=cross_entropy), {}),
            "segment": (hl.Objective(rl=gspo), {"segments": self.segments, "advantage": torch.randn(ROWS)}),
            "batch": (
                hl.Objective(d=dpo),
                {"segments": self.segments, "pairs": self.pairs, "ref_logprob": torch.randn(ROWS)},
            ),
        }

    def loss(self, kind, **options):
        objective, given = self.calls[kind]
        self.moving = self.hidden.clone().requires_grad_()
        return objective(hl.Linear(self.moving, self.weight, **options), self.targets, **given).loss

    def gradient(self, kind):
        loss = self.loss(kind)
        return torch.autograd.grad(loss, (self.moving, self.weight))


@pytest.mark.parametrize("memory", ["1GiB", 8 * VOCAB * 6])
@pytest.mark.parametrize("into", ["grad", "main_grad"])
@pytest.mark.parametrize("kind", ["row", "segment", "batch"])
def test_the_gradient_is_added_to_what_is_there(kind, into, memory):
    batch = Batch()
    by_hidden, by_weight = batch.gradient(kind)
    there = torch.randn(VOCAB, WIDTH, dtype=torch.float64 if into == "grad" else torch.float32)
    setattr(batch.weight, into, there.clone())
    (3 * batch.loss(kind, weight_grad_into=into, memory=memory)).backward()
    found = getattr(batch.weight, into)
    torch.testing.assert_close(found.double(), there.double() + 3 * by_weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(batch.moving.grad, 3 * by_hidden)
    assert into == "grad" or batch.weight.grad is None


@pytest.mark.parametrize("kind", ["row", "segment"])
def test_one_chunk_adds_by_its_own_product(kind, monkeypatch):
    """In the backward, and no gradient of the weight's size is made."""
    batch, seen, write = Batch(), [], LinearHead._write_weight

    def watched(head, *factors):
        seen.append(head.dweight_VD is batch.weight.main_grad)
        write(head, *factors)

    monkeypatch.setattr(LinearHead, "_write_weight", watched)
    batch.weight.main_grad = torch.zeros(VOCAB, WIDTH)
    loss = batch.loss(kind, weight_grad_into="main_grad")
    assert seen == [] and not batch.weight.main_grad.any()
    loss.backward()
    assert seen == [True]


def test_a_first_grad_is_made_and_a_second_backward_adds():
    batch = Batch()
    _, true = batch.gradient("row")
    loss = batch.loss("row", weight_grad_into="grad")
    assert batch.weight.grad is None  # a call without a backward adds nothing
    loss.backward(retain_graph=True)
    torch.testing.assert_close(batch.weight.grad, true)
    loss.backward()
    torch.testing.assert_close(batch.weight.grad, 2 * true)


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.8 has gradients of the weight's dtype alone"
)
def test_a_first_grad_has_the_dtype_that_the_weight_says():
    batch = Batch()
    batch.hidden, batch.weight = batch.hidden.bfloat16(), torch.nn.Parameter(batch.weight.detach().bfloat16())
    for dtype, made in ((torch.float32, torch.float32), (None, torch.bfloat16)):
        batch.weight.grad, batch.weight.grad_dtype = None, dtype
        batch.loss("row", weight_grad_into="grad").backward()
        assert batch.weight.grad.dtype == made


def test_what_another_use_of_the_weight_sends_is_added_by_megatrons_hook():
    """A head for later tokens, an embedding that is tied: their part comes by autograd."""
    batch = Batch()
    _, true = batch.gradient("row")
    weight = batch.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(VOCAB, WIDTH), False

    def hook(*_):
        if weight.grad is not None and not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    leaf = weight.expand_as(weight).grad_fn.next_functions[0][0]  # where Megatron's is
    leaf.register_hook(hook)
    (batch.loss("row", weight_grad_into="main_grad") + 0.5 * weight.sum()).backward()
    torch.testing.assert_close(weight.main_grad.double(), true + 0.5, rtol=1e-5, atol=1e-5)


def test_without_autograd_too():
    batch = Batch()
    _, true = batch.gradient("row")
    batch.weight.main_grad = torch.zeros(VOCAB, WIDTH)
    source = hl.Linear(batch.hidden, batch.weight, weight_grad_into="main_grad")
    out = batch.calls["row"][0].forward_backward(source, batch.targets)
    assert out.grads.weight is None
    torch.testing.assert_close(batch.weight.main_grad.double(), true, rtol=1e-5, atol=1e-5)


def test_a_module_passes_it_on():
    linear = torch.nn.Linear(WIDTH, VOCAB, bias=False)
    linear.weight.main_grad = torch.zeros(VOCAB, WIDTH)
    head = hl.FusedLMHead.from_linear(linear, weight_grad_into="main_grad")
    head(torch.randn(ROWS, WIDTH), targets=torch.arange(ROWS), objective=hl.Objective(ce=cross_entropy)).loss.backward()
    assert linear.weight.grad is None and linear.weight.main_grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: None, "no main_grad"),
        (lambda w: setattr(w, "main_grad", torch.zeros(VOCAB, 1)), r"wanted shape \(20, 8\)"),
        (lambda w: setattr(w, "main_grad", torch.zeros(VOCAB, WIDTH, dtype=torch.long)), "torch.int64"),
        (lambda w: setattr(w, "main_grad", torch.zeros(VOCAB, WIDTH).to_sparse()), "sparse_coo"),
        (lambda w: w.requires_grad_(False), "does not require grad"),
        (lambda w: w.register_hook(torch.neg), r"hook \(.*neg\), which autograd would give no gradient"),
    ],
)
def test_what_nothing_can_be_added_to_is_refused(change, message):
    batch = Batch()
    change(batch.weight)
    with pytest.raises(ValueError, match=f"weight_grad_into='main_grad': .*{message}"):
        batch.loss("row", weight_grad_into="main_grad")


def test_a_weight_made_of_others_and_other_words_are_refused():
    batch = Batch()
    with pytest.raises(ValueError, match="made of other tensors"):
        batch.calls["row"][0](hl.Linear(batch.hidden, batch.weight * 2, weight_grad_into="grad"), batch.targets)
    with pytest.raises(ValueError, match='wanted None, "grad" or "main_grad", got True'):
        hl.Linear(batch.hidden, batch.weight, weight_grad_into=True)


@pytest.mark.parametrize("kind", ["row", "segment", "batch"])
@pytest.mark.parametrize("into", ["grad", "main_grad"])
def test_a_backward_that_asks_for_others_adds_nothing(kind, into):
    batch = Batch()
    wanted, gradient = batch.gradient(kind)
    batch.weight.main_grad = torch.zeros(VOCAB, WIDTH, dtype=torch.float64)
    loss = batch.loss(kind, weight_grad_into=into)
    for _ in range(2):
        (found,) = torch.autograd.grad(loss, [batch.moving], retain_graph=True)
        torch.testing.assert_close(found, wanted)
    loss.backward(inputs=[batch.moving], retain_graph=True)
    assert batch.weight.grad is None and not batch.weight.main_grad.any()
    with pytest.raises(RuntimeError, match=f"weight_grad_into='{into}': torch.autograd.grad asks for the weight's"):
        torch.autograd.grad(loss, [batch.moving, batch.weight], retain_graph=True)
    assert batch.weight.grad is None and not batch.weight.main_grad.any()
    loss.backward(inputs=[batch.weight], retain_graph=True)
    torch.testing.assert_close(getattr(batch.weight, into), gradient)
    loss.backward()
    torch.testing.assert_close(getattr(batch.weight, into), 2 * gradient)
    torch.testing.assert_close(batch.moving.grad, 2 * wanted)


def test_facts_by_themselves_and_what_is_gone_by_the_backward():
    batch = Batch()
    facts = lambda weight, into: hl.row_facts(hl.Linear(batch.hidden, weight, weight_grad_into=into), batch.targets)
    with pytest.raises(ValueError, match="made of other tensors"):
        facts(batch.weight * 2, "grad")
    with pytest.raises(ValueError, match="the weight has no main_grad"):
        facts(batch.weight, "main_grad")
    batch.weight.main_grad = torch.zeros(VOCAB, WIDTH, dtype=torch.float64)
    for loss in (facts(batch.weight, "main_grad").logprob.sum(), batch.loss("row", weight_grad_into="main_grad")):
        there = batch.weight.main_grad
        del batch.weight.main_grad
        with pytest.raises(RuntimeError, match="weight.main_grad was removed after the forward"):
            loss.backward()
        assert batch.weight.grad is None
        batch.weight.main_grad = there


@pytest.mark.parametrize("into", ["grad", "main_grad"])
def test_verify_compares_gradients_all_the_same(into):
    batch = Batch()
    batch.weight.main_grad = torch.zeros(VOCAB, WIDTH, dtype=torch.float64)
    source = hl.Linear(batch.hidden, batch.weight, weight_grad_into=into)
    report = hl.verify(hl.Objective(ce=cross_entropy), source, batch.targets)
    assert report.ok and "gradient of weight" in str(report)
    assert batch.weight.grad is None and not batch.weight.main_grad.any()


def test_without_grad_mode_nothing_is_asked():
    batch = Batch()
    with torch.no_grad():
        assert batch.loss("row", weight_grad_into="main_grad").isfinite()


def test_a_weight_that_lies_on_ranks_is_refused():
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    batch = Batch()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        weight = torch.nn.Parameter(distribute_tensor(batch.weight.detach(), mesh, [Replicate()]))
        hidden = distribute_tensor(batch.hidden, mesh, [Replicate()])
        source = hl.Linear(hidden, weight, weight_grad_into="grad")
        with pytest.raises(TypeError, match="weight_grad_into='grad': the weight is a DTensor"):
            hl.Objective(ce=cross_entropy)(source, batch.targets)
        assert weight.grad is None
    finally:
        dist.destroy_process_group()
