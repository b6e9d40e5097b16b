"""A vocabulary that is no multiple of what a GEMM likes: its last few columns go by themselves, and nothing changes."""

import pytest
import torch
import torch.distributed as dist

import headloss as hl
from headloss.engine import heads
from headloss.engine.heads import aligned_parts
from headloss.losses import cross_entropy, gspo, jsd, z_loss

N, D = 24, 12


def test_which_columns_go_by_themselves(monkeypatch):
    whole = lambda V: (slice(0, V),)
    weight = lambda V, dtype=torch.bfloat16: torch.empty(V, 2, dtype=dtype)
    assert aligned_parts(weight(50257)) == whole(50257)  # a CPU does not mind
    monkeypatch.setattr(heads, "UNEVEN_IS_SLOW", {"cpu": 1024})
    assert aligned_parts(weight(50257)) == (slice(0, 50256), slice(50256, 50257))
    assert aligned_parts(weight(1031)) == (slice(0, 1024), slice(1024, 1031))
    assert aligned_parts(weight(50256)) == whole(50256) and aligned_parts(weight(1001)) == whole(1001)
    assert aligned_parts(weight(32002, torch.float32)) == (slice(0, 32000), slice(32000, 32002))


@pytest.fixture(scope="module")
def group():
    """A vocabulary of one rank, which may be padded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("V", [97, 98, 103])
@pytest.mark.parametrize("memory", ["1MiB", 1 << 14])
@pytest.mark.parametrize("kind", ["plain", "bias", "segments", "teacher", "padded"])
def test_the_same_loss_and_gradients(kind, memory, V, group, monkeypatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, N // 4, D), torch.randn(V, D)
    bias = torch.randn(V) if kind == "bias" else None
    targets = torch.randint(V, (4, N // 4))
    targets[1, 2], targets[:, 0] = V - 1, -100
    more, terms = {}, {"ce": cross_entropy, "z": hl.Term(z_loss, weight=0.1)}
    if kind == "segments":
        terms["rl"] = hl.Term(gspo, low=0.5, high=0.5)
        more = {"segments": hl.Segments.from_batch(targets), "old_logprob": -4.0 * torch.rand(4, N // 4)}
        more["advantage"] = torch.randn(4, 1).expand(4, N // 4).contiguous()
    if kind == "teacher":
        terms["kd"] = jsd
        more = {"teacher": hl.Linear(torch.randn(4, N // 4, D), torch.randn(V, D))}
    shard = hl.VocabShard(group, 0, V) if kind == "padded" else None
    objective = hl.Objective(**terms)

    def run():
        tensors = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        tensors += [] if bias is None else [bias.clone().requires_grad_()]
        if shard is not None:
            tensors[1] = torch.cat([weight, torch.randn(5, D)]).requires_grad_()
        out = objective(hl.Linear(*tensors, memory=memory, shard=shard), targets, **more)
        return out.loss.detach(), *torch.autograd.grad(out.loss, tensors)

    whole = run()
    products = []
    real = heads.product
    monkeypatch.setattr(
        heads, "product", lambda x, y, **rest: products.append((x.shape, y.shape)) or real(x, y, **rest)
    )
    monkeypatch.setattr(heads, "UNEVEN_IS_SLOW", {"cpu": 16})
    parted = run()
    assert any(V % 4 in x + y for x, y in products) and not any(V in x + y for x, y in products)
    for x, y in zip(parted, whole, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
