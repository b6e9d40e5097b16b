"""A patched model under DDP, FSDP1 and FSDP2, two ranks: the gradients and metrics of one process."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent.parent / "ranks"))
import tiny_models as tiny
from spawn import Ranks

import headloss as hl
from headloss.integrations.transformers import HeadlossCallback, patch, unpatch
from headloss.losses import cross_entropy

OBJECTIVE = hl.Objective(ce=cross_entropy, metrics=["entropy"])


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(how: str, name: str) -> None:
    whole = tiny.batch(5)
    items = int((whole["labels"][:, 1:] != -100).sum())
    stock = tiny.model(name)
    net: Any = patch(copy.deepcopy(stock), OBJECTIVE)
    adapter = net.headloss
    parameters = dict(net.named_parameters())
    if how.startswith("ddp"):
        net = DistributedDataParallel(net, **dict.fromkeys(how.split()[1:], True))
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in net.model.layers:
            fully_shard(layer, mesh=mesh)
        if how == "alone":  # the head is unsharded in its own forward only
            fully_shard(net.lm_head, mesh=mesh)
        fully_shard(net, mesh=mesh)
        parameters = dict(net.named_parameters())
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, 5)
    own = {k: x[mine] for k, x in whole.items()}
    stock(**whole, num_items_in_batch=items).loss.backward()
    for _ in range(2):  # with the probe, and without
        net.zero_grad()
        loss = net(**own, num_items_in_batch=items).loss
        (2 * loss).backward()  # the wrapper averages, and the shares must be summed: Trainer scales alike
    for key, p in stock.named_parameters():
        torch.testing.assert_close(
            full(parameters[key].grad), p.grad, rtol=1e-5, atol=2e-6, msg=lambda m: f"{key}: {m}"
        )
    state, logs = SimpleNamespace(log_history=[{}]), {"loss": 1.0}
    HeadlossCallback().on_log(None, state, None, logs=logs, model=net)
    with torch.no_grad():
        want = patch(stock, OBJECTIVE)(**whole) and stock.headloss.last.metrics["entropy"]
    assert (
        logs["entropy"] == pytest.approx(float(want), rel=1e-5) and state.log_history[0]["entropy"] == logs["entropy"]
    )
    assert adapter.last is not None


@pytest.mark.parametrize("name", ["gemma2", "llama"])
@pytest.mark.parametrize("how", ["ddp", "ddp find_unused_parameters", "ddp static_graph", "alone", "root"])
def test_two_ranks(pair: Ranks, how: str, name: str) -> None:
    if (how, name) == ("alone", "gemma2"):
        pytest.skip("a tied head cannot be a group of its own")
    pair.run(step, how, name)


def sharded_before() -> None:
    """A model that was sharded when it was loaded: FSDP2 is told about its head as before, while it is patched."""
    mesh, whole, stock = init_device_mesh("cpu", (2,)), tiny.batch(4), tiny.model("llama")
    net: Any = copy.deepcopy(stock)
    fully_shard(net.lm_head, mesh=mesh)
    fully_shard(net, mesh=mesh)
    wrapped = type(net.lm_head)
    patch(net, OBJECTIVE)
    assert isinstance(net.lm_head, FSDPModule)
    for line, last in ((0, False), (1, True)):
        net.set_requires_gradient_sync(last)
        own = {k: x[2 * dist.get_rank() + line][None] for k, x in whole.items()}
        (2 * net(**own, num_items_in_batch=20).loss).backward()
        assert (net.lm_head.weight.grad is not None) == last  # until then whole, as FSDP2 keeps it
    stock(**whole, num_items_in_batch=20).loss.backward()
    for p, q in zip(net.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=2e-6)
    assert type(unpatch(net).lm_head) is wrapped
    later = patch(copy.deepcopy(stock), OBJECTIVE)
    fully_shard(later.lm_head, mesh=mesh)
    with pytest.raises(ValueError, match="^model: the class of its head is FSDPHead since it was patched"):
        unpatch(later)


def test_patched_after_fsdp2(pair: Ranks) -> None:
    pair.run(sharded_before)


def accelerates(name: str) -> None:
    """Two steps under accelerate's own FSDP2 wrapping: head and last norm are a group, or head, norm and embedding."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    found = []
    for patched in (False, True):
        net: Any = tiny.model(name)
        net = patch(net, OBJECTIVE) if patched else net
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
            transformer_cls_names_to_wrap=[type(net.model.layers[0]).__name__], reshard_after_forward=True,
        )  # fmt: skip
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        accelerator = SimpleNamespace(  # whose Accelerator has FSDP on GPUs alone
            state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", is_main_process=False, device="cpu",
            torch_device_mesh=mesh, parallelism_config=SimpleNamespace(fsdp_dim_names=["dp_shard"]),
        )  # fmt: skip
        net = fsdp2_prepare_model(accelerator, net)
        assert isinstance(net.get_output_embeddings().weight, DTensor)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        own = {k: x[2 * dist.get_rank() :][:2] for k, x in tiny.batch(4).items()}
        numbers = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = net(**own, num_items_in_batch=20).loss
            loss.backward()
            numbers += [loss.detach(), *(full(p.grad) for p in net.parameters())]
            optimizer.step()
        found.append([*numbers, *(full(p.detach()) for p in net.parameters())])
        assert not patched or float(net.headloss.last.metrics["entropy"]) > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=2e-6)


def older_fsdp(name: str) -> None:
    """FSDP1, whose policies by size wrap a large head in a module of its own, unlike FSDP2."""
    found = []
    for patched in (False, True):
        net: Any = tiny.model(name)
        net = patch(net, OBJECTIVE) if patched else net
        kinds = (type(net.model.layers[0]), *(() if name == "gemma2" else (type(net.lm_head),)))  # that is tied
        wraps = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, kinds))
        sharded = FullyShardedDataParallel(
            net, auto_wrap_policy=wraps, use_orig_params=True, device_id=torch.device("cpu")
        )
        assert isinstance(net.lm_head, FullyShardedDataParallel) == (name != "gemma2")
        optimizer, numbers = torch.optim.SGD(net.parameters(), lr=0.05), []
        own = {k: x[2 * dist.get_rank() :][:2] for k, x in tiny.batch(4).items()}
        for _ in range(2):
            optimizer.zero_grad()
            loss = sharded(**own, num_items_in_batch=20).loss
            loss.backward()
            optimizer.step()
            with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
                numbers += [loss.detach(), *(x.clone() for p in net.parameters() for x in (p.detach(), p.grad))]
        found.append(numbers)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_older_fsdp(pair: Ranks, name: str) -> None:
    pair.run(older_fsdp, name)


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_accelerates_fsdp2(pair: Ranks, name: str) -> None:
    pytest.importorskip("accelerate")
    pair.run(accelerates, name)


def fused(how: str) -> None:
    """TRL's fused head, answered by ours: log-probabilities and entropies pull on a sharded head as on a whole one."""
    from headloss.integrations.trl import add_fused_lm_head

    whole, stock = tiny.batch(5), tiny.model("llama")
    net: Any = copy.deepcopy(stock)
    add_fused_lm_head(net, outputs=("log_probs", "entropy"))
    mesh = init_device_mesh("cpu", (2,))
    layer = fully_shard(net.model.layers[0], mesh=mesh)
    if how == "alone":
        fully_shard(net.lm_head, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net.set_modules_to_backward_prefetch([layer])  # nobody but the head's own hook brings its weight back
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, 5)
    own = {k: x[mine] for k, x in whole.items()}
    for _ in range(2):
        net.zero_grad()
        out = net(**own, fused_lm_head=True)
        (2 * (out.log_probs.sum() + out.entropy.sum() / 3)).backward()
    plain = {k: x for k, x in whole.items() if k != "labels"}
    facts = hl.row_facts(
        hl.Logits(stock(**plain).logits), hl.shift_labels(whole["labels"]), want=("logprob", "entropy")
    )
    (facts.logprob.sum() + facts.entropy.sum() / 3).backward()
    found = dict(net.named_parameters())
    for key, p in stock.named_parameters():
        torch.testing.assert_close(
            full(found[key].grad), p.grad, rtol=1e-4, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("how", ["alone", "root"])
def test_fused_head_on_two_ranks(pair: Ranks, how: str) -> None:
    pytest.importorskip("trl")
    pair.run(fused, how)


def asked(flags: str) -> None:
    """The loss that a trainer of TRL asks for, with all that DDP does to what a model returns."""
    from headloss.integrations import trl

    whole, stock = tiny.batch(5), tiny.model("llama")
    items = int((whole["labels"][:, 1:] != -100).sum())
    net: Any = copy.deepcopy(stock)
    trl.add_fused_lm_head(net, outputs=("log_probs", "entropy"))
    objective = trl._extended(OBJECTIVE, (), net.headloss.want)
    trainer, wrapped = SimpleNamespace(model=net), DistributedDataParallel(net, **dict.fromkeys(flags.split(), True))
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, 5)
    own = {k: x[mine] for k, x in whole.items()}
    for _ in range(2):
        wrapped.zero_grad()
        with trl.SFTTrainer._asking(trainer, wrapped, (objective, {"num_items": items}, None)) as made:
            wrapped(**own, fused_lm_head=True)
        (2 * made[0].loss).backward()
    stock(**whole, num_items_in_batch=items).loss.backward()
    for (key, p), q in zip(stock.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=2e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("flags", ["", "find_unused_parameters", "static_graph"])
def test_an_objective_in_a_trainer_of_trl_on_two_ranks(pair: Ranks, flags: str) -> None:
    pytest.importorskip("trl")
    pair.run(asked, flags)
