"""The head's own products on a Hopper GPU: no further from float64 than eager in the same dtype, within 2%."""

import pytest
import torch

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, grpo, gspo, z_loss

pytest.importorskip("triton")
from headloss.backends.triton import product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and product.able(torch.device("cuda"))), reason="needs a Hopper GPU"
    ),
]
ROWS, VOCAB, WIDTH = 1000, 33000, 512


def square(sum_p2, entropy):
    return sum_p2 * entropy


MEET = {"rl": hl.Term(gspo, reduction="seq_mean_token_mean")}
TERMS = {
    "cross-entropy": {"ce": cross_entropy},
    "smoothed": {"ce": hl.Term(lambda logprob, mean_logprob: -0.9 * logprob - 0.1 * mean_logprob)},
    "policy": {"rl": grpo, "z": hl.Term(z_loss, weight=1e-3), "metrics": ["entropy", "accuracy"]},
    "policy and entropy": {"rl": grpo, "h": hl.Term(entropy_bonus, weight=0.1)},
    "entropy alone": {"h": entropy_bonus},
    "sum_p2": {"ce": cross_entropy, "q": hl.Term(square, weight=0.3)},
    "segments and entropy": {**MEET, "h": hl.Term(entropy_bonus, weight=0.1)},
}


@pytest.mark.parametrize("memory", ["1GiB", "24MiB"])
@pytest.mark.parametrize("name", TERMS)
def test_not_above_eagers_error(name, memory):
    torch.manual_seed(4)
    hidden, weight = torch.randn(ROWS, WIDTH, device="cuda"), torch.randn(VOCAB, WIDTH, device="cuda") * 3 / WIDTH**0.5
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    targets = torch.randint(VOCAB, (ROWS,), device="cuda")
    hidden[:60] = (weight[targets[:60]] * 4).bfloat16()  # certain, and right
    hidden[60:120] = (weight[targets[:60]] * 4).bfloat16()  # certain, and wrong
    targets[3::4] = -100
    inputs = {}
    if "rl" in TERMS[name]:
        inputs = {"advantage": torch.randn(ROWS, device="cuda"), "old_logprob": -9 - torch.rand(ROWS, device="cuda")}
        inputs["advantage"][::3] = 0
    lengths = torch.tensor([0, 90, 400, 700, ROWS], device="cuda")
    more = {"segments": hl.Segments.from_cu_seqlens(lengths)} if "segments" in name else {}

    def run(backend, dtype, source):
        h, w = (x.to(dtype).detach().requires_grad_() for x in (hidden, weight))
        ours = {k: x.to(dtype) if dtype == torch.float64 else x for k, x in inputs.items()}
        objective = hl.Objective(**TERMS[name], backend=backend)
        out = objective(source(h, w), targets, **ours, **more)
        out.loss.backward()
        return objective, out.loss.detach().double(), h.grad.double(), w.grad.double()

    head = lambda h, w: hl.Linear(h, w, memory=memory)
    objective, loss, *grads = run("triton", torch.bfloat16, head)
    plan = str(objective.explain(head(hidden, weight), targets, **inputs, **more))
    if not ("segments" in name and memory == "24MiB"):
        assert "the head's own" in plan, plan
    _, true, *exact = run("torch", torch.float64, head)
    _, _, *eager = run("torch", torch.bfloat16, lambda h, w: hl.Logits(h @ w.t()))
    torch.testing.assert_close(loss, true, rtol=1e-4, atol=1e-5)
    for x, y, z in zip(grads, eager, exact, strict=True):
        assert float((x - z).norm()) <= 1.02 * float((y - z).norm())


@pytest.mark.parametrize("term", ["ce", "entropy"])
def test_rows_without_a_gradient_get_exactly_none(term):
    hidden = torch.randn(300, WIDTH, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(VOCAB, (300,), device="cuda")
    targets[::5] = -100
    by_row = torch.rand(300, device="cuda")
    by_row[1::5] = 0
    loss = {
        "ce": lambda logprob, by_row: -logprob * by_row,
        "entropy": lambda entropy, logprob, by_row: (entropy - logprob) * by_row,
    }[term]
    hl.Objective(it=loss)(hl.Linear(hidden, weight), targets, by_row=by_row).loss.backward()
    none = (targets == -100) | (by_row == 0)
    assert torch.equal(hidden.grad[none], torch.zeros_like(hidden.grad[none]))
    assert bool((hidden.grad[~none].float().norm(dim=1) > 0).all())
