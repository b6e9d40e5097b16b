"""DTensors in: when a sharded weight counts as a vocabulary shard, and what is said when it does not."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, focal, z_loss
from headloss.parallel.dtensor import spread_source

V = 37
OBJECTIVE = hl.Objective(
    ce=hl.Term(cross_entropy, label_smoothing=0.1),
    h=hl.Term(entropy_bonus, weight=0.3),
    z=hl.Term(z_loss, weight=0.1),
    f=focal,
)


def spread(x: torch.Tensor, mesh: Any, placement: Any) -> DTensor:
    return distribute_tensor(x.detach().clone(), mesh, [placement]).requires_grad_()


def linear_rule() -> None:
    mesh = init_device_mesh("cpu", (2,))
    problem = oracle.make("Linear", (3, 7), V)
    want = oracle.answer(OBJECTIVE, problem)
    t, targets = problem.tensors, problem.targets
    for weight_at in (Shard(0), Replicate()):
        hidden = spread(t["hidden"], mesh, Replicate())
        weight, bias = spread(t["weight"], mesh, weight_at), spread(t["bias"], mesh, weight_at)
        for memory in (2 * 8 * 37 * 3, 10**6):
            out = OBJECTIVE(hl.Linear(hidden, weight, bias, memory=memory), targets)
            out.loss.backward()
            grads = {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
            got = oracle.Answer(
                out.loss.detach(), out.terms, {n: float(m) for n, m in out.metrics.items()},
                {n: g.full_tensor() for n, g in grads.items()},
            )  # fmt: skip
            oracle.check(got, want, what=str(weight_at))
            assert grads["weight"].placements == (weight_at,)
            for x in (hidden, weight, bias):
                x.grad = None
    few, padding = targets.clamp(max=4), {"vocab": 5}  # the second rank holds nothing but padding
    alone = t["weight"].clone().requires_grad_()
    want = OBJECTIVE(hl.Linear(t["hidden"], alone, t["bias"], **padding), few).loss
    hidden, weight, bias = (
        spread(t[n], mesh, at) for n, at in (("hidden", Replicate()), ("weight", Shard(0)), ("bias", Shard(0)))
    )
    got = OBJECTIVE(hl.Linear(hidden, weight, bias, **padding), few).loss
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    (mine,) = torch.autograd.grad(got, weight)
    torch.testing.assert_close(mine.full_tensor(), *torch.autograd.grad(want, alone), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="vocab: is 5, but the shard's is 37"):
        hl.Linear(t["hidden"], t["weight"][:19], shard=hl.VocabShard(mesh, 0, V), **padding)
    sharded = spread(t["weight"], mesh, Shard(0))
    plain = t["hidden"].clone()
    with pytest.raises(ValueError, match=r"(?s)FSDP.*hl.FusedLMHead.*HeadParallel.*VocabShard.*Replicate"):
        OBJECTIVE(hl.Linear(plain, sharded), targets)
    with pytest.raises(ValueError, match=r"(?s)FSDP.*hl.FusedLMHead"):
        OBJECTIVE.forward_backward(hl.Linear(plain, sharded), targets)
    with pytest.raises(ValueError, match="not one on the same mesh"):
        OBJECTIVE(hl.Linear(spread(t["hidden"], mesh, Replicate()), t["weight"]), targets)
    with pytest.raises(ValueError, match="hidden: .*HeadParallel"):
        OBJECTIVE(hl.Linear(spread(t["hidden"], mesh, Shard(1)), sharded), targets)
    with pytest.raises(ValueError, match=r"Shard\(0\), the vocabulary"):
        OBJECTIVE(hl.Linear(spread(t["hidden"], mesh, Replicate()), spread(t["weight"], mesh, Shard(1))), targets)


def test_linear(ranks: Any) -> None:
    ranks(2, linear_rule)


def explicit() -> None:
    """`shard=` beside DTensors is taken at its word only if they are split over the same ranks."""
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    problem = oracle.make("Linear", (21,), V, bias=False)
    want = oracle.answer(OBJECTIVE, problem)
    t, targets = problem.tensors, problem.targets
    shard = hl.VocabShard(mesh, 19 * rank, V)
    weight = spread(t["weight"], mesh, Shard(0))
    for hidden in (t["hidden"].clone().requires_grad_(), spread(t["hidden"], mesh, Replicate())):
        OBJECTIVE(hl.Linear(hidden, weight, shard=shard), targets).loss.backward()
        torch.testing.assert_close(tiny.full(hidden.grad), want.grads["hidden"], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(weight.grad.full_tensor(), want.grads["weight"], rtol=1e-10, atol=1e-10)
        weight.grad = None
    with pytest.raises(ValueError, match="hidden: .*see the same rows"):
        OBJECTIVE(hl.Linear(spread(t["hidden"], mesh, Shard(0)), weight, shard=shard), targets)
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="weight: .*share the vocabulary"):
        other = hl.VocabShard(alone["b"].get_group(), 0, V)
        OBJECTIVE(hl.Linear(t["hidden"], weight, shard=other), targets)
    with pytest.raises(ValueError, match="weight: .*share the vocabulary"):
        OBJECTIVE(hl.Linear(t["hidden"], spread(t["weight"], mesh, Shard(1)), shard=shard), targets)


def test_explicit_shard(ranks: Any) -> None:
    ranks(2, explicit)


def logits_rule() -> None:
    mesh = init_device_mesh("cpu", (2,))
    problem = oracle.make("Logits", (3, 7), V)
    want = oracle.answer(OBJECTIVE, problem)
    x, targets = problem.tensors["logits"], problem.targets
    for placement in (Shard(2), Shard(-1), Replicate()):
        logits = spread(x, mesh, placement)
        out = OBJECTIVE(hl.Logits(logits), targets)
        out.loss.backward()
        torch.testing.assert_close(out.loss, want.loss, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(logits.grad.full_tensor(), want.grads["logits"], rtol=1e-10, atol=1e-10)
    for placement in (Shard(0), Shard(1)):
        with pytest.raises(ValueError, match="logits: .*not a vocabulary shard"):
            OBJECTIVE(hl.Logits(spread(x, mesh, placement)), targets)
    with pytest.raises(ValueError, match="logits: .*not a vocabulary shard"):
        shard = hl.VocabShard(mesh, 19 * dist.get_rank(), V)
        OBJECTIVE(hl.Logits(spread(x, mesh, Replicate()), shard=shard), targets)


def test_logits(ranks: Any) -> None:
    ranks(2, logits_rule)


def in_loss_parallel() -> None:
    """`loss_parallel()` gives wrong gradients for any loss but its own; ours never pass through it."""
    mesh = init_device_mesh("cpu", (2,))
    problem = oracle.make("Linear", (3, 7), 38, bias=False, bad=False)
    want = oracle.answer(OBJECTIVE, problem)
    for how in ("logits", "facts", "linear"):
        hidden = spread(problem.tensors["hidden"], mesh, Replicate())
        weight = spread(problem.tensors["weight"], mesh, Shard(0))
        with loss_parallel():
            if how == "linear":
                out = OBJECTIVE(hl.Linear(hidden, weight), problem.targets)
                loss = out.loss
            elif how == "logits":
                logits = torch.nn.functional.linear(hidden, weight)
                assert logits.placements == (Shard(2),)
                loss = OBJECTIVE(hl.Logits(logits), problem.targets).loss
            else:
                logits = torch.nn.functional.linear(hidden, weight)
                facts = hl.row_facts(hl.Logits(logits), problem.targets, want=("lse", "entropy"))
                keep = problem.targets != -100
                loss = (0.1 * facts.lse**2 - 0.3 * facts.entropy)[keep].mean()
            loss.backward()
        truth = want
        if how == "facts":
            truth = oracle.answer(hl.Objective(h=OBJECTIVE.terms["h"], z=OBJECTIVE.terms["z"]), problem)
        torch.testing.assert_close(loss.detach(), truth.loss, rtol=1e-10, atol=1e-10)
        for x, name in ((hidden, "hidden"), (weight, "weight")):
            torch.testing.assert_close(x.grad.full_tensor(), truth.grads[name], rtol=1e-10, atol=1e-10)


def test_loss_parallel(ranks: Any) -> None:
    ranks(2, in_loss_parallel)


def head_parallel(kind: str, size: int) -> None:
    """`HeadParallel`, hidden plain or a DTensor, replicated or split over the sequence."""
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(3)
    rank = dist.get_rank()
    whole = tiny.batch()
    x = torch.randn(tiny.B, tiny.T + 2, tiny.D).double()
    targets = torch.nn.functional.pad(whole.targets, (0, 2), value=5)
    inputs = hl.Inputs(
        old_logprob=torch.nn.functional.pad(whole.old_logprob, (0, 2)),
        advantage=torch.nn.functional.pad(whole.advantage, (0, 2), value=1.0),
    )
    alone = tiny.model(bias=True)
    reference = x.clone().requires_grad_()
    want = alone.head(reference, targets=targets, objective=tiny.OBJECTIVE, inputs=inputs)
    want.loss.backward()
    sequence = kind.endswith("sequence")
    layout = Shard(1) if sequence else Replicate()
    net = parallelize_module(tiny.model(bias=True), mesh, {"head": hl.HeadParallel(input_layouts=layout)})
    assert net.head.weight.placements == (Shard(0),)
    local = x.tensor_split(size, 1)[rank] if sequence else x
    leaf = local.clone().requires_grad_()
    given: Any = leaf
    if kind.startswith("dtensor"):
        given = DTensor.from_local(leaf, mesh, [layout], run_check=False)
    out = net.head(given, targets=targets, objective=tiny.OBJECTIVE, inputs=inputs)
    torch.testing.assert_close(out.loss, want.loss, rtol=1e-10, atol=1e-10)
    out.loss.backward()
    mine = reference.grad.tensor_split(size, 1)[rank] if sequence else reference.grad
    torch.testing.assert_close(leaf.grad, mine, rtol=1e-10, atol=1e-10)
    for name in ("weight", "bias"):
        found, truth = getattr(net.head, name).grad.full_tensor(), getattr(alone.head, name).grad
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-10)
    for module in (net, alone):
        module.zero_grad()
    leaf.grad = reference.grad = None
    logits, true_logits = net.head(given), alone.head(reference)  # without an objective: an ordinary layer
    torch.testing.assert_close(logits, true_logits, rtol=1e-10, atol=1e-10)
    logits.square().sum().backward()
    true_logits.square().sum().backward()
    mine = reference.grad.tensor_split(size, 1)[rank] if sequence else reference.grad
    torch.testing.assert_close(leaf.grad, mine, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(net.head.weight.grad.full_tensor(), alone.head.weight.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["plain", "dtensor", "plain sequence", "dtensor sequence"])
def test_head_parallel(ranks: Any, kind: str) -> None:
    ranks(2, head_parallel, kind, 2)


def test_head_parallel_on_four_ranks(ranks: Any) -> None:
    ranks(4, head_parallel, "plain", 4)
    ranks(4, head_parallel, "dtensor sequence", 4)


def one_mesh() -> None:
    """Rows over one dimension of a mesh, the vocabulary over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    problem = oracle.make("Linear", (4, 7), V)
    t, targets = problem.tensors, problem.targets
    objective = hl.Objective(ce=hl.Term(cross_entropy, reduction="token_sum"), z=hl.Term(z_loss, reduction="token_sum"))
    leaves = [t[n].clone().requires_grad_() for n in ("hidden", "weight", "bias")]
    want = objective(hl.Linear(*leaves), targets).loss
    grads = torch.autograd.grad(want, leaves)
    for over in ([Shard(0), Replicate()], [Shard(1), Replicate()], [Replicate(), Replicate()]):
        for weight_at in ([Replicate(), Shard(0)], [Replicate(), Replicate()]):
            places = (over, weight_at, weight_at)
            spread = [distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in zip(leaves, places)]
            own = distribute_tensor(targets, mesh, over).to_local()
            out = objective(spread_source(*spread, memory=10 * 8 * V), own)
            summed = [Partial() if over[0].is_shard() else Replicate(), Replicate()]
            total = DTensor.from_local(out.loss.detach(), mesh, summed)
            torch.testing.assert_close(total.full_tensor(), want.detach(), rtol=1e-10, atol=1e-10)
            for x, g in zip(torch.autograd.grad(out.loss, spread), grads, strict=True):
                torch.testing.assert_close(x.full_tensor(), g, rtol=1e-10, atol=1e-10)
    at = lambda x, *p: distribute_tensor(x.detach(), mesh, p)
    for h, w in (
        ((Shard(0), Replicate()), (Shard(0), Replicate())),
        ((Replicate(), Replicate()), (Replicate(), Shard(1))),
        ((Shard(2), Replicate()), (Replicate(), Replicate())),
        ((Replicate(), Replicate()), (Shard(0), Shard(0))),
    ):
        with pytest.raises(ValueError, match="hidden: a DTensor placed .* wanted one mesh"):
            spread_source(at(t["hidden"], *h), at(t["weight"], *w), None)


def test_rows_and_vocabulary_over_one_mesh(ranks: Any) -> None:
    ranks(4, one_mesh)


def refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(TypeError, match=r"FusedLMHead.from_linear"):
        parallelize_module(torch.nn.Sequential(torch.nn.Linear(4, 6)), mesh, {"0": hl.HeadParallel()})
    net = torch.nn.Sequential(hl.FusedLMHead(4, 6, weight_grad_into="grad"))
    parallelize_module(net, mesh, {"0": hl.HeadParallel()})
    with pytest.raises(ValueError, match="weight_grad_into='grad': under HeadParallel the weight is a DTensor"):
        net[0](torch.zeros(3, 4), targets=torch.zeros(3).long(), objective=hl.Objective(ce=hl.losses.cross_entropy))
    for placement in (Replicate(), Shard(1)):
        head = hl.FusedLMHead(4, 6)
        head.weight = torch.nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [placement]))
        with pytest.raises(ValueError, match=r"weight: a DTensor placed .* wanted a plain tensor, or one placed Shard"):
            parallelize_module(head, mesh, hl.HeadParallel())
    with pytest.raises(ValueError, match="module: fully_shard has sharded it already"):
        parallelize_module(fully_shard(hl.FusedLMHead(4, 6), mesh=mesh), mesh, hl.HeadParallel())
    for bad, error, match in (
        (dict(group="tp", start=0, vocab=5), TypeError, "group"),
        (dict(group=mesh, start=-1, vocab=5), ValueError, "start"),
        (dict(group=mesh, start=0, vocab=0), ValueError, "vocab"),
        (dict(group=mesh, start=0.0, vocab=5), TypeError, "start"),
        (dict(group=mesh, start=0, vocab=5, width=0), ValueError, "width"),
    ):
        with pytest.raises(error, match=match):
            hl.VocabShard(**bad)
    split = parallelize_module(tiny.model(bias=True), mesh, {"head": hl.HeadParallel(input_layouts=Shard(1))})
    own = torch.randn(tiny.B, 3 - dist.get_rank(), tiny.D).double()  # of 5: the ranks would wait for each other
    with pytest.raises(ValueError, match=f"hidden: this rank has {own.shape[1]} of the targets' 5 positions"):
        split.head(own, targets=torch.zeros(tiny.B, 5).long(), objective=OBJECTIVE)
    hidden, weight = torch.randn(4, 3), torch.randn(6, 3)
    with pytest.raises(ValueError, match="width: this rank holds 6 columns"):
        said = hl.Linear(hidden, weight, shard=hl.VocabShard(mesh, 6 * dist.get_rank(), 12, width=5))
        OBJECTIVE(said, torch.zeros(4).long())
    with pytest.raises(TypeError, match="shard: wanted hl.VocabShard"):
        hl.Linear(hidden, weight, shard=mesh)


def test_refusals(ranks: Any) -> None:
    ranks(2, refusals)
