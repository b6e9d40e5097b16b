"""`FusedLMHead` under DDP, FSDP2 and tensor parallelism: the same loss and gradients as one process.

The rule for wrappers that average: DDP and FSDP divide the sum of gradients by the number of data-parallel ranks.  The
loss of a rank is its share, divided by the global count (`hl.count`), so the gradients have to be summed: pass
`grad_scale=` the number of data-parallel ranks, and the average becomes the sum.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import headloss as hl
from headloss.losses import cross_entropy

OLD = torch.__version__ < "2.9"
twice = pytest.mark.skipif(OLD, reason="torch 2.8 on gloo does not divide gradients of reduce_dtype, nor eager ones")
uneven = pytest.mark.skipif(OLD, reason="torch 2.8 puts uneven shards of a 2D mesh together wrongly, eager ones too")


def mine(whole: tiny.Batch, rank: int, ranks: int) -> tiny.Batch:
    """Ragged on purpose: the first rank has more lines than the others."""
    ends = {2: [5], 4: [3, 5, 6]}[ranks]
    return whole.rows(torch.arange(tiny.B).tensor_split(ends)[rank])


def step(net: nn.Module, own: tiny.Batch, group: Any, **call: Any) -> hl.Output:
    """One training step: global counts, gradients summed whatever the wrapper does."""
    counts = hl.count(own.targets, group=group)
    inputs = own.inputs(**counts, grad_scale=dist.get_world_size(group), **call)
    out = net(own.tokens, targets=own.targets, objective=tiny.OBJECTIVE, inputs=inputs)
    out.loss.backward()
    return out


def under_ddp(options: dict[str, Any]) -> None:
    whole = tiny.batch()
    loss, grads = tiny.reference(whole)
    net = DistributedDataParallel(tiny.model(), **options)
    for _ in range(2):
        net.zero_grad()
        out = step(net, mine(whole, dist.get_rank(), dist.get_world_size()), dist.group.WORLD)
        torch.testing.assert_close(tiny.summed(out.loss), loss, rtol=1e-10, atol=1e-10)
        tiny.same_gradients(net, grads)
    # With local counts and no scale, the wrapper's average is not the gradient of the batch: the rule is needed.
    net.zero_grad()
    own = mine(whole, dist.get_rank(), dist.get_world_size())
    net(own.tokens, targets=own.targets, objective=tiny.OBJECTIVE, inputs=own.inputs()).loss.backward()
    with pytest.raises(AssertionError):
        tiny.same_gradients(net, grads)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_ddp(ranks: Any, options: dict[str, Any]) -> None:
    ranks(2, under_ddp, options)


def ddp_and_weight_grad_into(tied: bool) -> None:
    """DDP's hooks find what is added to weight.grad; of a main_grad they know nothing."""
    whole = tiny.batch()
    _, grads = tiny.reference(whole, tied=tied)
    own, head = mine(whole, dist.get_rank(), 2), tiny.model(tied=tied)
    head.head.source_options["weight_grad_into"] = "grad"
    net = DistributedDataParallel(head, gradient_as_bucket_view=True)
    for _ in range(2):
        net.zero_grad()
        step(net, own, dist.group.WORLD)
        tiny.same_gradients(net, grads)
    head.head.source_options["weight_grad_into"] = "main_grad"
    head.head.weight.main_grad = torch.zeros_like(head.head.weight)
    with pytest.raises(ValueError, match="^weight_grad_into='main_grad': DistributedDataParallel sums weight.grad"):
        step(net, own, dist.group.WORLD)
    with net.no_sync():  # where whoever calls sums by himself
        step(net, own, dist.group.WORLD)
    if not tied:
        total = tiny.summed(head.head.weight.main_grad) / 2
        torch.testing.assert_close(total, grads["head.weight"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_ddp_and_weight_grad_into(ranks: Any, tied: bool) -> None:
    ranks(2, ddp_and_weight_grad_into, tied)


def ddp_accumulates() -> None:
    """Two micro-batches, the first without sync, with the count of both, equal one batch."""
    whole = tiny.batch()
    _, grads = tiny.reference(whole)
    net = DistributedDataParallel(tiny.model())
    own = mine(whole, dist.get_rank(), 2)
    counts = hl.count(own.targets, group=dist.group.WORLD)
    parts = [own.rows(slice(0, 1)), own.rows(slice(1, None))]
    for part, sync in zip(parts, (False, True)):
        inputs = part.inputs(**counts, grad_scale=2)
        with contextlib.nullcontext() if sync else net.no_sync():
            net(part.tokens, targets=part.targets, objective=tiny.OBJECTIVE, inputs=inputs).loss.backward()
    tiny.same_gradients(net, grads)


def test_ddp_accumulation(ranks: Any) -> None:
    ranks(2, ddp_accumulates)


def wrap(net: tiny.Tiny, how: str, mesh: Any, **options: Any) -> Any:
    """`alone`: the head is an FSDP group of its own.  `grouped`: with the norm.  `root`: with everything."""
    fully_shard(net.layer, mesh=mesh, **options)
    if how == "alone":
        fully_shard(net.head, mesh=mesh, **options)
    elif how == "grouped":
        fully_shard([net.norm, net.head], mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def under_fsdp(how: str, reshard: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = tiny.batch()
    tied = how == "tied"
    loss, grads = tiny.reference(whole, tied=tied, bias=True)
    net = wrap(tiny.model(tied=tied, bias=True), "root" if tied else how, mesh, reshard_after_forward=reshard)
    for _ in range(2):
        net.zero_grad()
        out = step(net, mine(whole, dist.get_rank(), dist.get_world_size()), mesh.get_group())
        torch.testing.assert_close(tiny.summed(out.loss), loss, rtol=1e-10, atol=1e-10)
        tiny.same_gradients(net, grads)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("how", ["alone", "grouped", "tied", "root"])
def test_fsdp(ranks: Any, how: str, reshard: bool) -> None:
    ranks(2, under_fsdp, how, reshard)


def fsdp_accumulates(how: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = tiny.batch()
    _, grads = tiny.reference(whole)
    net = wrap(tiny.model(), how, mesh)
    own = mine(whole, dist.get_rank(), 2)
    counts = hl.count(own.targets, group=mesh.get_group())
    for part, last in ((own.rows(slice(0, 2)), False), (own.rows(slice(2, None)), True)):
        net.set_requires_gradient_sync(last)
        inputs = part.inputs(**counts, grad_scale=2)
        net(part.tokens, targets=part.targets, objective=tiny.OBJECTIVE, inputs=inputs).loss.backward()
    tiny.same_gradients(net, grads)


@pytest.mark.parametrize("how", ["alone", "root"])
def test_fsdp_accumulation_without_sync(ranks: Any, how: str) -> None:
    ranks(2, fsdp_accumulates, how)


def mixed_precision(tensor_parallel: bool) -> None:
    """bfloat16 parameters and activations; what travels in `hl.Inputs` stays float32, a loose tensor would not."""
    mesh = init_device_mesh("cpu", (2, 2) if tensor_parallel else (2, 1), mesh_dim_names=("dp", "tp"))
    whole = tiny.batch(torch.float32)
    _, grads = tiny.reference(whole)
    own = mine(whole, mesh["dp"].get_local_rank(), 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = tiny.model(torch.float32)
    if tensor_parallel:
        parallelize_module(net, mesh["tp"], {"head": hl.HeadParallel()})
    wrap(net, "alone", mesh["dp"], mp_policy=policy)
    seen: dict[str, torch.dtype] = {}

    def watch(logprob, old_logprob, advantage):
        seen.update(logprob=logprob.dtype, old=old_logprob.dtype, advantage=advantage.dtype)
        return -(logprob - old_logprob).exp() * advantage

    objective = hl.Objective(watch=watch)
    net(own.tokens, targets=own.targets, objective=objective, inputs=own.inputs())
    assert set(seen.values()) == {torch.float32}, seen
    out = step(net, own, mesh["dp"].get_group())
    assert out.loss.dtype == torch.float32
    found = {n: tiny.full(p.grad) for n, p in net.named_parameters()}
    plain = tiny.model(torch.bfloat16)  # the same model in bfloat16, in one process
    inputs = whole.inputs()
    plain(whole.tokens, targets=whole.targets, objective=tiny.OBJECTIVE, inputs=inputs).loss.backward()
    for name, p in plain.named_parameters():
        ours, eager = ((x.float() - grads[name]).norm() / grads[name].norm() for x in (found[name], p.grad))
        assert ours <= 2 * eager + 1e-3, (name, float(ours), float(eager))


@twice
@pytest.mark.parametrize("tensor_parallel", [False, True], ids=["", "and tensor parallel"])
def test_mixed_precision(ranks: Any, tensor_parallel: bool) -> None:
    ranks(4 if tensor_parallel else 2, mixed_precision, tensor_parallel)


class Loose(hl.FusedLMHead):
    """A head that takes its inputs loose, as keyword tensors: what FSDP casts on the way in."""

    def forward(self, hidden, *, old_logprob, advantage, **more):  # type: ignore[override]
        return super().forward(hidden, inputs={"old_logprob": old_logprob, "advantage": advantage}, **more)


def loose_inputs() -> None:
    mesh = init_device_mesh("cpu", (2,))
    own = tiny.batch(torch.float32)
    torch.manual_seed(0)
    head = Loose(tiny.D, tiny.V)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(head, mesh=mesh, mp_policy=policy)
    hidden = torch.randn(tiny.B, tiny.T, tiny.D)
    with pytest.raises(TypeError, match=r"old_logprob: is torch.bfloat16.*hl.Inputs"):
        head(
            hidden, targets=own.targets, objective=tiny.OBJECTIVE, old_logprob=own.old_logprob, advantage=own.advantage
        )


def test_loose_inputs_cast_to_bfloat16_raise(ranks: Any) -> None:
    ranks(2, loose_inputs)


def fsdp_and_tp(sequence: bool, accumulate: bool) -> None:
    """2 data-parallel x 2 tensor-parallel ranks, through `parallelize_module` and `fully_shard`, equal one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = tiny.batch()
    loss, grads = tiny.reference(whole, bias=True)
    net = tiny.model(bias=True)
    layout = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {"head": hl.HeadParallel(input_layouts=layout)}
    if sequence:  # the norm's output is split over the sequence, as a DTensor
        plan["norm"] = SequenceParallel()
        net.norm.register_forward_pre_hook(lambda _, x: _scatter(x[0], mesh["tp"]))
    parallelize_module(net, mesh["tp"], plan)
    wrap(net, "alone", mesh["dp"])
    own = mine(whole, mesh["dp"].get_local_rank(), 2)
    if accumulate:
        counts = hl.count(own.targets, group=mesh["dp"].get_group())
        for part, last in ((own.rows(slice(0, 2)), False), (own.rows(slice(2, None)), True)):
            net.set_requires_gradient_sync(last)
            inputs = part.inputs(**counts, grad_scale=2)
            net(part.tokens, targets=part.targets, objective=tiny.OBJECTIVE, inputs=inputs).loss.backward()
    else:
        out = step(net, own, mesh["dp"].get_group())
        torch.testing.assert_close(tiny.summed(out.loss, mesh["dp"].get_group()), loss, rtol=1e-10, atol=1e-10)
    tiny.same_gradients(net, grads)
    weight = net.head.weight
    with pytest.raises(ValueError, match=r"FSDP.*hl.FusedLMHead"):  # outside its forward it is a piece of a piece
        hl.Objective(ce=cross_entropy)(hl.Linear(torch.randn(3, tiny.D).double(), weight), torch.zeros(3).long())


def _scatter(x: torch.Tensor, mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(1)])


@uneven
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence parallel"])
def test_fsdp_and_tensor_parallel(ranks: Any, sequence: bool, accumulate: bool) -> None:
    ranks(4, fsdp_and_tp, sequence, accumulate)


def weight_outside() -> None:
    """The trap: an FSDP weight looks like a vocabulary shard.  Taken for one it would train on a wrong loss."""
    mesh = init_device_mesh("cpu", (2,))
    net = wrap(tiny.model(), "alone", mesh)
    own = tiny.batch()
    hidden = torch.randn(tiny.B, tiny.T, tiny.D).double()
    objective = hl.Objective(ce=cross_entropy)
    with pytest.raises(ValueError, match=r"FSDP.*hl.FusedLMHead"):
        objective(hl.Linear(hidden, net.head.weight), own.targets)
    with pytest.raises(ValueError, match=r"FSDP.*hl.FusedLMHead"):
        hl.row_facts(hl.Linear(hidden, net.head.weight), own.targets)
    for left in (0, 7):  # of a rank's piece, as ZeRO-3 and FSDP1 leave it
        with pytest.raises(ValueError, match=r"^weight: .* \(.,\); .* ZeRO-3 and FSDP leave .* hl.FusedLMHead"):
            hl.Linear(hidden, torch.empty(left).double())


def test_fsdp_weight_outside_its_forward_raises(ranks: Any) -> None:
    ranks(2, weight_outside)


def separately_wrapped() -> None:
    """The trap: `head.weight.full_tensor()` outside the head's forward gets a gradient that nobody sums over ranks."""
    mesh = init_device_mesh("cpu", (2,))
    whole = tiny.batch()
    _, grads = tiny.reference(whole)
    net = wrap(tiny.model(), "alone", mesh)
    own = mine(whole, dist.get_rank(), 2)
    seen: list[torch.Tensor] = []
    net.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    step(net, own, mesh.get_group())
    torch.testing.assert_close(tiny.full(net.head.weight.grad), grads["head.weight"], rtol=1e-10, atol=1e-10)
    net.zero_grad()
    counts = hl.count(own.targets, group=mesh.get_group())
    taken = hl.Linear(seen[0], net.head.weight.full_tensor())
    tiny.OBJECTIVE(taken, own.targets, **own.inputs(**counts, grad_scale=2)).loss.backward()
    error = (tiny.full(net.head.weight.grad) - grads["head.weight"]).norm() / grads["head.weight"].norm()
    assert error > 0.3, float(error)


def test_head_wrapped_alone(ranks: Any) -> None:
    ranks(2, separately_wrapped)


def colwise() -> None:
    """ColwiseParallel's hook drops positional arguments after the first: the head takes none."""
    mesh = init_device_mesh("cpu", (2,))
    own = tiny.batch()
    net = parallelize_module(tiny.model(), mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    hidden = torch.randn(tiny.B, tiny.T, tiny.D).double()
    with pytest.raises(TypeError, match="positional"):
        net.head.forward(hidden, own.targets)
    net = parallelize_module(tiny.model(), mesh, {"head": hl.HeadParallel()})
    with pytest.raises(TypeError, match="positional"):
        net.head(hidden, own.targets)
    out = net.head(hidden, targets=own.targets, objective=tiny.OBJECTIVE, inputs=own.inputs())
    alone = tiny.model().head(hidden, targets=own.targets, objective=tiny.OBJECTIVE, inputs=own.inputs())
    torch.testing.assert_close(out.loss, alone.loss, rtol=1e-10, atol=1e-10)


def test_no_argument_is_dropped(ranks: Any) -> None:
    ranks(2, colwise)
