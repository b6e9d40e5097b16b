"""`torch.set_default_device` and `torch.set_default_dtype` change nothing: what is made lies where the inputs lie."""

import ast
from pathlib import Path

import pytest
import torch

import headloss as hl
from headloss.losses import cross_entropy, forward_kl, grpo, gspo

MAKERS = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
MAKERS |= {"empty_strided", "tensor", "zeros"}
TYPED = MAKERS - {"arange", "as_tensor", "randint", "randperm", "tensor"}  # whose numbers say nothing of their type


def made_anywhere(path):
    """Calls that make a tensor and do not say where, or of which type."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            said = {k.arg for k in node.keywords}
            wanted = {"device", "dtype"} if node.func.attr in TYPED else {"device"}
            if of_torch and None not in said and not said >= wanted:
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_every_tensor_that_is_made_says_where_and_of_which_type(tmp_path):
    package = Path(hl.__file__).parent
    files = [p for p in package.rglob("*.py") if "cli" not in p.relative_to(package).parts]
    assert [line for path in files for line in made_anywhere(path)] == []
    bad = (
        "x = torch.zeros(3)\ny = torch.zeros(3, device=x.device)\nz = torch.zeros(3, dtype=x.dtype, device=x.device)\n"
    )
    (tmp_path / "bad.py").write_text(bad)
    assert len([*made_anywhere(tmp_path / "bad.py")]) == 2


@pytest.fixture(params=["device", "dtype"])
def changed(request, monkeypatch):
    """Switches the default on."""
    yield lambda: torch.set_default_device("meta") if request.param == "device" else torch.set_default_dtype(torch.half)
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def everything(device="cpu"):
    """What calls of many kinds return, from the same numbers."""
    numbers = torch.Generator("cpu").manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=numbers, dtype=torch.float32, device="cpu").to(device)
    hidden, weight = normal(12, 8).requires_grad_(), normal(40, 8).requires_grad_()
    targets = torch.randint(40, (12,), generator=numbers, device="cpu").to(device)
    targets[::5] = -100
    cuts = torch.tensor([0, 5, 12], device=device)
    segments = hl.Segments.from_cu_seqlens(cuts)
    inputs = {"advantage": normal(12), "old_logprob": normal(12) - 4}
    logits = normal(12, 40)
    top = logits.log_softmax(-1).topk(4)
    mask = normal(12, 40) > 0
    mask[:, 0] = True
    source = hl.Linear(hidden, weight, memory=5 * 40 * 4)
    prepared = hl.prepare(targets, segments)
    calls = [
        (hl.Objective(ce=cross_entropy, metrics=["entropy", "accuracy"]), hl.prepare(targets, non_blocking=True), {}),
        (hl.Objective(rl=grpo), targets, inputs),
        (hl.Objective(rl=hl.Term(gspo, reduction="seq_mean_token_mean")), prepared, inputs),
        (hl.Objective(kd=forward_kl), targets, {"teacher": hl.Logits(logits)}),
        (hl.Objective(kd=forward_kl), targets, {"teacher": hl.Sparse(top.indices, top.values)}),
        (hl.Objective(ce=cross_entropy), targets, {"support": hl.Support.from_mask(mask)}),
    ]
    found = []
    for objective, rows, given in calls:
        out = objective(source, rows, **given)
        grads = torch.autograd.grad(out.loss, (hidden, weight))
        found += [out.loss.detach(), *grads, *(x.value for x in out.metrics.values())]
        assert hl.verify(objective, source, rows, **given).ok
        str(objective.explain(source, rows, **given))
    facts = hl.row_facts(hl.Logits(logits), targets, want=("logprob", "entropy", "argmax"))
    return [*found, facts.logprob, facts.entropy, facts.argmax]


def test_a_default_changes_nothing(changed):
    before = everything()
    changed()
    for x, y in zip(before, everything(), strict=True):
        assert torch.equal(torch.as_tensor(x, device="cpu"), torch.as_tensor(y, device="cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_as_default_device():
    before = everything("cuda")
    torch.set_default_device("cuda")
    try:
        after = everything("cuda")
    finally:
        torch.set_default_device(None)
    for x, y in zip(before, after, strict=True):
        torch.testing.assert_close(torch.as_tensor(x).cpu(), torch.as_tensor(y).cpu(), rtol=1e-6, atol=1e-7)
