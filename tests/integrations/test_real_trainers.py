"""The adapters of torchtitan, verl, Megatron, and models under PEFT, DeepSpeed and Lightning, against those packages.

`make` puts them, without what they depend on, into .venv/stacks and .venv/launchers; what of them the adapters meet can
be imported from there, on a CPU.  verl imports ray on the way, which an empty module plays; nothing of it is called.
Fast-LLM is on no package index: its stand-in is in test_fast_llm.py.  Each check runs in processes of its own, where no
stand-in lies in wait.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tempfile
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

sys.path.append(str(Path(__file__).parent.parent / "ranks"))
from spawn import Ranks

STACKS = Path(os.environ.get("HEADLOSS_STACKS", Path(sys.prefix) / "stacks"))
LAUNCHERS = STACKS.with_name("launchers")
DOCS = Path(__file__).parents[2] / "docs"


class Nothing(MetaPathFinder, Loader):
    """Plays a package: every module of it is empty, every name in it a mock."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == self.package else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock()  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare() -> None:
    if str(STACKS) not in sys.path:
        sys.path.append(str(STACKS))
        sys.meta_path.append(Nothing("ray"))


@pytest.fixture(scope="module")
def pair() -> Any:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def check(pair: Ranks, package: str, *functions: Any, page: bool = True) -> None:
    if not any((folder / package).exists() for folder in (STACKS, LAUNCHERS)):
        pytest.skip(f"{package} is not in {STACKS.parent.name}")
    for function in functions:
        pair.run(function)
    if page:
        pair.run(the_page, f"{package}.md")


def the_page(name: str) -> None:
    """The blocks of a document that want these packages."""
    prepare()
    space: dict[str, Any] = {}
    blocks = re.findall(r"^```python stacks\n(.*?)^```", (DOCS / name).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), space)


def grads(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves, retain_graph=True)


# Megatron ------------------------------------------------------------------------------------------------------------

S, B, V, D = 5, 3, 24, 4
GPT = {
    "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "use_cpu_initialization": True, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
    "bias_dropout_fusion": False, "apply_rope_fusion": False,
}  # fmt: skip


def megatron() -> tuple[Any, Tensor, Tensor, slice]:
    prepare()
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(0)
    logits, target = 3 * torch.randn(S, B, V), torch.randint(V, (S, B))
    start = dist.get_rank() * V // 2
    return parallel_state, logits, target, slice(start, start + V // 2)


def megatrons_cross_entropy() -> None:
    parallel_state, logits, target, mine = megatron()
    from megatron.core import tensor_parallel

    from headloss.integrations import megatron as ours

    pull = torch.linspace(-1, 2, S * B).view(S, B)
    a, b = (logits[..., mine].clone().requires_grad_() for _ in range(2))
    stock, found = (
        tensor_parallel.vocab_parallel_cross_entropy(a.clone(), target),
        ours.vocab_parallel_cross_entropy(b, target),
    )
    assert_close(found, stock)
    assert_close(*(grads((x * pull).sum(), leaf)[0] for x, leaf in ((found, b), (stock, a))))

    smooth = [
        f(logits[..., mine].clone(), target, 0.1)
        for f in (tensor_parallel.vocab_parallel_cross_entropy, ours.vocab_parallel_cross_entropy)
    ]
    every = [[torch.empty_like(x) for _ in range(2)] for x in smooth]
    for parts, x in zip(every, smooth, strict=True):
        dist.all_gather(parts, x.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    assert not torch.allclose(*every[0]), "Megatron's ranks agree on a smoothed loss by now: the page says they do not"
    assert_close(*every[1])


def megatrons_language_module() -> None:
    """Its own `compute_language_model_loss`, labels [b, s], with our functions put where its own are."""
    parallel_state, logits, target, mine = megatron()
    from megatron.core import tensor_parallel
    from megatron.core.models.common.language_module import language_module

    from headloss.integrations import megatron as ours

    pg_collection = types.SimpleNamespace(tp=parallel_state.get_tensor_model_parallel_group())

    def run(fused: bool) -> Tensor:
        config = types.SimpleNamespace(cross_entropy_loss_fusion=fused, cross_entropy_fusion_impl="native")
        model = types.SimpleNamespace(config=config, pg_collection=pg_collection, tp_group=pg_collection.tp)
        here = logits[..., mine].clone()
        return language_module.LanguageModule.compute_language_model_loss(model, target.t(), here)

    stock = run(fused=False)
    with pytest.MonkeyPatch.context() as put:
        put.setattr(tensor_parallel, "vocab_parallel_cross_entropy", ours.vocab_parallel_cross_entropy)
        put.setattr(language_module, "fused_vocab_parallel_cross_entropy", ours.fused_vocab_parallel_cross_entropy)
        for found in (run(fused=False), run(fused=True)):
            assert found.shape == (B, S)
            assert_close(found, stock)
    labels = target.t().masked_fill(torch.arange(S) % 2 == 0, -1)  # as BERT's and T5's datasets do where the mask is 0
    model = types.SimpleNamespace(pg_collection=pg_collection, tp_group=pg_collection.tp)
    found = ours.compute_language_model_loss(model, labels, logits[..., mine].clone())
    assert_close(found, stock * (labels >= 0))


def megatrons_sequence_parallelism() -> None:
    """Hidden states gathered by Megatron, their gradient reduce-scattered by it, the loss in between ours."""
    _, _, target, mine = megatron()
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    import headloss as hl
    from headloss.integrations.megatron import linear_source
    from headloss.losses import cross_entropy

    torch.cuda.current_device = lambda: torch.device("cpu")  # where Megatron makes its buffers
    torch.manual_seed(1)
    hidden, weight, target = torch.randn(S + 1, B, D), torch.randn(V, D), torch.cat([target, target[:1]])
    whole, W = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    wanted = grads(torch.nn.functional.cross_entropy((whole @ W.T).flatten(0, 1), target.flatten()), whole, W)
    rows = slice(dist.get_rank() * 3, dist.get_rank() * 3 + 3)
    part, shard = hidden[rows].clone().requires_grad_(), weight[mine].clone().requires_grad_()
    source = linear_source(gather_from_sequence_parallel_region(part), shard, partial_hidden=True)
    found = grads(hl.Objective(ce=cross_entropy)(source, target).loss, part, shard)
    assert_close(found[0], wanted[0][rows])
    assert_close(found[1], wanted[1][mine])


def megatrons_gpt(sequence_parallel: bool, mup: bool) -> None:
    """A GPTModel on two ranks, two steps: its own loss and ours, as a processor of its output, and inside its own.

    Losses, gradients and weights are those of Megatron; a run is repeated bit by bit.
    """
    megatron()
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.transformer_config import TransformerConfig

    import headloss as hl
    from headloss.integrations import megatron as ours
    from headloss.losses import cross_entropy, z_loss

    if "output_processor" not in inspect.signature(gpt_model.GPTModel.forward).parameters:
        return  # before 0.19
    torch.cuda.current_device = lambda: torch.device("cpu")
    random.CudaRNGStatesTracker.fork = lambda self, *_: contextlib.nullcontext()
    norm = lambda cls, config, hidden_size, eps=1e-5, **_: torch.nn.LayerNorm(hidden_size, eps)
    torch_norm.WrappedTorchNorm.__new__ = staticmethod(norm)  # its own refuses sequence parallelism without Apex
    config = TransformerConfig(
        tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, **GPT,
        **({"use_mup": True, "mup_output_mult": 0.25} if mup else {}),
    )  # fmt: skip
    ids, labels = torch.randint(V, (2, B, 8))
    mask, loss_mask = torch.ones(1, 1, 8, 8).tril() < 0.5, (torch.rand(B, 8) > 0.3).float()
    positions = torch.arange(8).expand(B, 8)

    def train(how: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = gpt_model.GPTModel(
            config, gpt_layer_specs.get_gpt_layer_local_spec(), vocab_size=V, max_sequence_length=8,
            share_embeddings_and_output_weights=True,
        )  # fmt: skip
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.3), []
        z = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=0.1))
        processor = {"ours": ours.OutputProcessor(hl.Objective(ce=cross_entropy)), "z": ours.OutputProcessor(z)}.get(
            how
        )
        begun: list[Any] = []
        if processor is not None:
            processor.watch(model)
            processor.early.start = lambda *given: begun.append(given)  # type: ignore[method-assign]
        for _ in range(2):
            optimizer.zero_grad()
            losses = model(ids, positions, mask, labels=labels, loss_mask=loss_mask, output_processor=processor)
            assert losses.shape == (B, 8) and (processor is None or begun.pop()[1:] == (labels, loss_mask))
            loss = (losses * loss_mask).sum() / loss_mask.sum()
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
        return found

    stock = train("stock")
    assert_close(train("ours"), stock, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(train("z"), train("z")))
    assert train("z")[0] > stock[0] + 0.1  # the hook is no decoration
    native = gpt_model.GPTModel.compute_language_model_loss
    config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl = True, "te"
    try:
        ours.replace_cross_entropy()
        assert_close(train("stock"), stock, rtol=1e-4, atol=1e-6)
    finally:
        gpt_model.LanguageModule.compute_language_model_loss = native
    with pytest.raises(
        ValueError, match="num_segments: term 'ce' is a mean over sequences .* and Megatron divides by tokens"
    ):
        per_line = hl.Objective(ce=hl.Term(cross_entropy, reduction="seq_mean_token_sum"))
        hidden = torch.zeros(8, B, 16)
        ours.OutputProcessor(per_line)(hidden_states=hidden, output_layer=None, output_weight=None, labels=labels)


def megatrons_later_tokens() -> None:
    """Multi-token prediction, and gradients in `main_grad` under Megatron's own DDP, two micro-batches."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.transformer.transformer_config import TransformerConfig

    import headloss as hl
    from headloss.integrations import megatron as ours
    from headloss.losses import cross_entropy

    config = TransformerConfig(
        tensor_model_parallel_size=2, mtp_num_layers=1, mtp_loss_scaling_factor=0.3, **GPT, deterministic_mode=True
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    torch.manual_seed(1)
    ids, labels = torch.randint(V, (2, B, 8))
    mask, loss_mask = torch.ones(1, 1, 8, 8).tril() < 0.5, (torch.rand(B, 8) > 0.3).float()
    native = gpt_model.LanguageModule.compute_language_model_loss

    def train(how: str) -> list[Tensor]:
        torch.manual_seed(0)
        later = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        model = gpt_model.GPTModel(config, spec, vocab_size=V, max_sequence_length=8, mtp_block_spec=later)
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        into = {"weight_grad_into": "main_grad"} if how == "into" else {}
        processor = (
            None if how in ("stock", "replaced") else ours.OutputProcessor(hl.Objective(ce=cross_entropy), **into)
        )
        if how == "replaced":
            ours.replace_cross_entropy()
        try:
            for _ in range(2):
                losses = ddp(
                    ids, torch.arange(8).expand(B, 8), mask, labels=labels, loss_mask=loss_mask,
                    output_processor=processor,
                )  # fmt: skip
                loss = (losses * loss_mask).sum() / loss_mask.sum()
                loss.backward()
        finally:
            gpt_model.LanguageModule.compute_language_model_loss = native
        assert any("mtp" in name for name, p in model.named_parameters() if p.main_grad.any())
        return [loss.detach(), *(p.main_grad.clone() for p in model.parameters())]

    stock = train("stock")
    for how in ("ours", "into", "replaced"):
        assert_close(train(how), stock, rtol=1e-4, atol=1e-6, msg=lambda m, how=how: f"{how}: {m}")
    assert all(torch.equal(a, b) for a, b in zip(train("ours"), train("ours")))


def megatrons_contexts() -> None:
    """Context parallelism: each rank has its part of every sequence, and sequences are whole to a loss.

    Megatron's attention over ranks wants a GPU: the layers here have none.
    """
    prepare()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    import headloss as hl
    from headloss.integrations import megatron as ours
    from headloss.losses import cross_entropy, gspo

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    group = parallel_state.get_context_parallel_group()
    whole = gpt_layer_specs.get_gpt_layer_local_spec().submodules
    parts = {name: getattr(whole, name) for name in ("pre_mlp_layernorm", "mlp", "mlp_bda")}
    spec = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(**parts))
    torch.manual_seed(0)
    model = gpt_model.GPTModel(
        TransformerConfig(context_parallel_size=2, **GPT), spec, vocab_size=V, max_sequence_length=8
    )
    torch.manual_seed(1)
    ids, labels = torch.randint(V, (2, B, 8))
    loss_mask, advantage, old = (torch.rand(B, 8) > 0.3).float(), torch.randn(B, 1).expand(B, 8), torch.randn(B, 8) - 3
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    positions, lines = torch.arange(8).expand(B, 8), torch.arange(B)[:, None].expand(B, 4)

    def run(processor: Any, rows: slice = mine, **context: Any) -> list[Tensor]:
        model.zero_grad()
        losses = model(
            ids[:, rows], positions[:, rows], None, labels=labels[:, rows], loss_mask=loss_mask[:, rows],
            output_processor=processor, output_processor_context=context,
        )  # fmt: skip
        loss = (losses * loss_mask[:, rows]).sum()
        loss.backward()
        found = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        if rows is mine:
            for x in found:
                dist.all_reduce(x, group=group)  # as loss_func and Megatron's DDP do
        return found

    assert_close(run(ours.OutputProcessor(hl.Objective(ce=cross_entropy))), run(None), rtol=1e-4, atol=1e-6)
    objective = hl.Objective(rl=hl.Term(gspo, low=0.1, high=0.1, reduction="seq_mean_token_mean"))
    inputs = lambda rows: {"advantage": advantage[:, rows], "old_logprob": old[:, rows], "num_segments": B}
    across = run(
        ours.OutputProcessor(objective), **inputs(mine), segments=hl.Segments.from_ids(lines.contiguous(), B, group)
    )
    every = slice(0, 8)
    alone = run(ours.OutputProcessor(objective), every, **inputs(every), segments=hl.Segments.from_batch(labels))
    assert_close(across, alone, rtol=1e-4, atol=1e-6)
    parallel_state.destroy_model_parallel()


def megatrons_own_groups(tensor_parallel: int, sequence_parallel: bool) -> None:
    """A model whose ranks are not those of `parallel_state`: its own count, as in Megatron's loss."""
    prepare()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    import headloss as hl
    from headloss.integrations import megatron as ours
    from headloss.losses import cross_entropy

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=3 - tensor_parallel)
    groups = [dist.new_group([rank]) for rank in range(2)] if tensor_parallel == 1 else [dist.new_group([0, 1])] * 2
    owned = ProcessGroupCollection.use_mpu_process_groups()
    owned.tp = groups[dist.get_rank()]
    torch.manual_seed(1)
    (ids, labels), loss_mask = torch.randint(V, (2, B, 8)), (torch.rand(B, 8) > 0.3).float()
    found = []
    for processor in (None, ours.OutputProcessor(hl.Objective(ce=cross_entropy))):
        torch.manual_seed(0)
        model = gpt_model.GPTModel(
            TransformerConfig(
                tensor_model_parallel_size=tensor_parallel, sequence_parallel=sequence_parallel, **GPT
            ), gpt_layer_specs.get_gpt_layer_local_spec(), vocab_size=V, max_sequence_length=8, pg_collection=owned,
        )  # fmt: skip
        losses = model(
            ids, torch.arange(8).expand(B, 8), torch.ones(1, 1, 8, 8).tril() < 0.5, labels=labels, loss_mask=loss_mask,
            output_processor=processor,
        )  # fmt: skip
        loss = (losses * loss_mask).sum() / loss_mask.sum()
        loss.backward()
        found.append([loss.detach(), model.output_layer.weight.grad])
    assert_close(*found, rtol=1e-4, atol=1e-6)
    parallel_state.destroy_model_parallel()


def test_megatron(pair: Ranks) -> None:
    check(pair, "megatron", megatrons_cross_entropy, megatrons_language_module, megatrons_sequence_parallelism)
    pair.run(megatrons_gpt, False, True)
    pair.run(megatrons_gpt, True, False)
    pair.run(megatrons_later_tokens)
    pair.run(megatrons_contexts)
    pair.run(megatrons_own_groups, 1, False)
    pair.run(megatrons_own_groups, 2, True)


# torchtitan ----------------------------------------------------------------------------------------------------------


def titan() -> tuple[Any, Any, Any]:
    """A decoder of torchtitan without layers (its attention wants a GPU or a compiler), and a step of its trainer."""
    prepare()
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    config = model_registry("debugmodel", attn_backend="flex").model
    config.layers = []
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    model._skip_lm_head = True
    torch.manual_seed(1 + dist.get_rank())
    tokens, labels = torch.randint(2048, (2, 2, 12))
    labels[0, :5] = -100
    positions = torch.arange(12).expand(2, 12) % 7

    def step(loss_fn: Any, labels: Tensor = labels) -> tuple[Tensor, dict[str, Tensor]]:
        loss_fn.set_lm_head(model.lm_head)
        trainer = types.SimpleNamespace(train_context=contextlib.nullcontext, model_parts=[model], loss_fn=loss_fn)
        model.zero_grad()
        loss = Trainer._forward_backward_body(trainer, tokens, labels, torch.tensor(60.0), {"positions": positions})
        whole = lambda x: (x.full_tensor() if hasattr(x, "full_tensor") else x).clone()
        return loss.detach(), {n: whole(p.grad) for n, p in model.named_parameters()}

    return model, step, labels


def same(ours: tuple[Tensor, dict[str, Tensor]], stock: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert_close(ours[0], stock[0])
    assert ours[1].keys() == stock[1].keys()
    for name, g in ours[1].items():
        assert g.any(), name
        assert_close(g, stock[1][name])


def torchtitans_trainer() -> None:
    model, step, labels = titan()
    from torchtitan.components.loss import ChunkedLossWrapper

    from headloss.integrations.torchtitan import HeadlossLoss

    config = HeadlossLoss.Config(objective={"terms": {"ce": "cross_entropy"}, "metrics": ["entropy"]}, memory="100KB")
    assert config.to_dict()["memory"] == "100KB"
    loss_fn = config.build(compile_config=None)
    assert isinstance(loss_fn, ChunkedLossWrapper)  # so the trainer hands over the head
    stock = ChunkedLossWrapper.Config(num_chunks=4).build(compile_config=None)
    for _ in range(2):
        found = step(loss_fn)
        same(found, step(stock))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.1 * found[1][name]
    more = {"terms": {"ce": "cross_entropy", "z": {"loss": "z_loss", "weight": 0.1}}}
    assert step(HeadlossLoss.Config(objective=more).build())[0] > step(stock)[0] + 0.1  # the hook is no decoration
    with torch.no_grad():  # its validator gives no count
        hidden = model(torch.zeros(2, 12, dtype=torch.long))
        (found, metrics), (wanted, _) = loss_fn(hidden, labels), stock(hidden, labels)
        assert_close(found, wanted)
    _, metrics = loss_fn(hidden, labels, torch.tensor(60.0))
    assert {"ce/mean", "entropy/mean"} <= ChunkedLossWrapper._combine_chunk_metrics({}, metrics).keys()
    policy = HeadlossLoss.Config(
        objective={"terms": {"rl": {"loss": "cross_entropy", "reduction": "seq_mean_token_sum"}}}
    )
    with pytest.raises(
        ValueError, match="num_segments: term 'rl'"
    ):  # positions say where documents begin, not how many
        step(policy.build())


def torchtitans_rl_inputs() -> None:
    """What its RL trainer passes, against the DAPO loss that it has: loss, gradient and metrics."""
    model, _, labels = titan()
    rl = sys.modules["torchtitan.experiments.rl"] = types.ModuleType("torchtitan.experiments.rl")
    rl.__path__ = [str(STACKS / "torchtitan" / "experiments" / "rl")]  # whose own file imports vllm
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.experiments.rl.losses.dapo import DAPOLoss

    from headloss.integrations.torchtitan import HeadlossLoss

    torch.manual_seed(3)
    hidden, labels = torch.randn(2, 12, model.lm_head.weight.shape[1]), labels.clamp(min=0)
    given = {"generator_logprobs": -7 + torch.randn(2, 12), "advantages": torch.randn(2, 12)}
    given |= {"loss_mask": torch.rand(2, 12) > 0.3}
    given["generator_logprobs"][0, 3], given["loss_mask"][0, 3] = torch.nan, True
    terms = {"rl": {"loss": "grpo", "low": 0.2, "high": 0.28}}
    ours = HeadlossLoss.Config(objective={"terms": terms, "metrics": ["entropy"]}).build()
    ours.set_lm_head(model.lm_head)
    stock, found = DAPOLoss(DAPOLoss.Config(ratio_clip_low=0.2, ratio_clip_high=0.28)), []
    for name, loss_fn in (("ours", ours), ("stock", stock)):
        leaf = hidden.clone().requires_grad_()
        pred = leaf if name == "ours" else model.lm_head(leaf)
        loss, metrics = loss_fn(pred, labels, 11.0, **given)
        found.append((loss.detach(), grads(loss, leaf)[0], metrics))
    assert_close(found[0][0], found[1][0])
    assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)
    entropy = [metrics[key] for (*_, metrics), key in zip(found, ("entropy/mean", "trainer/entropy/mean"))]
    assert_close(torch.as_tensor(entropy[0]).float(), torch.as_tensor(entropy[1]).float(), rtol=1e-4, atol=1e-5)
    assert not any(key.endswith("/min") for key in found[0][2])
    for wrong in ({"num_chunks": 4}, {"loss_fn": ChunkedLossWrapper.Config()}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: HeadlossLoss has no use for it"):
            HeadlossLoss.Config(**wrong).build()


def torchtitans_trainer_under_fsdp() -> None:
    model, step, _ = titan()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.loss import ChunkedLossWrapper

    from headloss.integrations.torchtitan import HeadlossLoss

    mesh = init_device_mesh("cpu", (2,))
    for module in (model.tok_embeddings, model.lm_head, model):
        fully_shard(module, mesh=mesh)
    same(step(HeadlossLoss.Config().build()), step(ChunkedLossWrapper.Config(num_chunks=4).build()))


def torchtitans_spmd_types() -> None:
    """Its default way of tensor parallelism: shards are plain tensors, and the gradient of hidden stays partial."""
    prepare()
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh

    from headloss.integrations.torchtitan import HeadlossLoss

    vocab, mesh = 23, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(2, 6, D), torch.randn(vocab, D), torch.randint(vocab, (2, 6))
    labels[1, 2:] = -100
    head = nn.Linear(D, 12 - dist.get_rank(), bias=False)
    head.weight = nn.Parameter(weight[12 * dist.get_rank() :][:12].clone())
    found = []
    inner = CrossEntropyLoss.Config(global_vocab_size=vocab)
    with set_current_spmd_mesh(mesh):
        for config in (
            HeadlossLoss.Config(global_vocab_size=vocab),
            HeadlossLoss.Config(),
            ChunkedLossWrapper.Config(num_chunks=2, loss_fn=inner),
        ):
            loss_fn, leaf = config.build(), hidden.clone().requires_grad_()
            loss_fn.set_lm_head(head)
            head.zero_grad()
            loss, _ = loss_fn(leaf, labels, torch.tensor(9.0))
            loss.backward()
            found.append((loss.detach(), {"hidden": leaf.grad, "weight": head.weight.grad.clone()}))
    same(found[0], found[2])
    same(found[1], found[2])


def torchtitans_own_heads() -> None:
    """Those whose forward does more than a product: softcaps and casts are followed, an adapter is refused."""
    prepare()
    rl = sys.modules["torchtitan.experiments.rl"] = types.ModuleType("torchtitan.experiments.rl")
    rl.__path__ = [str(STACKS / "torchtitan" / "experiments" / "rl")]  # whose own file imports vllm
    from torchtitan.components.lora import _get_lora_cls
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.experiments.rl.models.cast_linear import CastLinear
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.muse_glimmer.model import SoftCappedLinear

    from headloss.integrations.torchtitan import HeadlossLoss

    torch.manual_seed(0)
    size = {"in_features": D, "out_features": V}
    hidden, labels = torch.randn(1, 9, D), torch.randint(V, (1, 9))
    labels[0, :2] = -100
    capped, plain = {"output_multiplier": 0.25, "output_soft_cap_temp": 3.0}, {"output_multiplier": 0.25}
    heads = [SoftCappedLinear.Config(**size, **how).build() for how in (capped, plain)]
    heads += [CastLinear.Config(**size).build().bfloat16(), Linear.Config(**size).build()]
    for head in heads:
        torch.nn.init.normal_(head.weight)
        found = []
        for config in (HeadlossLoss.Config(), ChunkedLossWrapper.Config(num_chunks=3)):
            loss_fn, leaf = config.build(), hidden.clone().to(head.weight.dtype).requires_grad_()
            loss_fn.set_lm_head(head)
            head.zero_grad()
            loss, _ = loss_fn(leaf, labels, torch.tensor(20.0))
            loss.backward()
            found.append((loss.detach(), {"hidden": leaf.grad, "weight": head.weight.grad.clone()}))
        assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)  # or the cast to float32 was left out
        for name in found[0][1]:
            near = 2e-2 if head is heads[2] else 1e-5  # its weight's gradient is added up in bfloat16
            assert_close(found[0][1][name], found[1][1][name], rtol=near, atol=near / 10)
    loss_fn = HeadlossLoss.Config().build()
    loss_fn.set_lm_head(_get_lora_cls(Linear).Config(**size, rank=2, alpha=4.0).build())
    with pytest.raises(TypeError, match=r"lm_head: it has a forward of its own \(LoRALinear; an adapter"):
        loss_fn(hidden, labels, torch.tensor(20.0))


MESHES: dict[tuple[str, str], Any] = {}


def parallelized(backend: str, over: str, checked: bool = False) -> tuple[Any, Any]:
    """A decoder as torchtitan's trainer makes it for two ranks, and a step: loss, gradients and validation."""
    prepare()
    import torchtitan.distributed.parallel_dims as dims_module
    import torchtitan.models.llama3.parallelize as recipe
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import full_dtensor
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    dims_module.device_type = "cpu"
    degrees = {"data_parallel_shard_degree": 1, f"{over}_degree": 2}
    parallelism = ParallelismConfig(**degrees, spmd_backend=backend)
    dist_utils.set_spmd_backend(backend)
    if (backend, over) not in MESHES:
        init_device_mesh("cpu", (2,), mesh_dim_names=("world",))._flatten_mapping.clear()  # one mesh for all calls
        MESHES[backend, over] = dims_module.ParallelDims.from_config(parallelism, 2)
        MESHES[backend, over].build_mesh()
    dims = MESHES[backend, over]
    config = model_registry("debugmodel", attn_backend="flex").model
    config.update_from_config(config=types.SimpleNamespace(parallelism=parallelism))
    config.layers = []
    context = dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=checked)
    training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
    with pytest.MonkeyPatch.context() as put, dist_utils.get_spmd_context(parallel_dims=dims)():
        if backend == "spmd_types":  # whose parameters torch's fully_shard does not take yet
            put.setattr(recipe, "apply_fsdp_to_decoder", lambda model, *args, **how: model)
        torch.manual_seed(0)
        model = config.build()
        model.init_states()
        args = {"parallel_dims": dims, "training": training, "parallelism": parallelism, "ac_config": None}
        model = recipe.parallelize_llama(model, **args, compile_config=CompileConfig(), dump_folder="")
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    model._skip_lm_head, parameters = True, dict(model.named_parameters())  # as an optimizer holds them
    torch.manual_seed(1 + (dist.get_rank() if over == "data_parallel_shard" else 0))
    tokens, labels = torch.randint(2048, (2, 2, 16))
    labels[0, :5] = -100
    if over == "context_parallel":
        tokens, labels = (x.chunk(2, 1)[dist.get_rank()].contiguous() for x in (tokens, labels))
    if backend == "full_dtensor":
        tokens, labels, _ = full_dtensor.parallelize_inputs(dims, tokens, labels, {})
    elif backend == "spmd_types":
        tokens, labels, _ = annotate_input_spmd_types(dims, tokens, labels, {})

    def step(loss_fn: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss_fn.set_lm_head(model.lm_head)
        trainer = types.SimpleNamespace(train_context=context, model_parts=[model], loss_fn=loss_fn)
        for parameter in parameters.values():
            parameter.grad = None
        for _ in range(2):  # micro-batches
            loss = Trainer._forward_backward_body(trainer, tokens, labels, torch.tensor(60.0), {})
        local = lambda x: (x.to_local() if hasattr(x, "to_local") else x).detach().clone()  # as its trainer adds up
        found = {n: local(p.grad) for n, p in parameters.items()}
        with torch.no_grad(), context():
            validation, _ = loss_fn(model(tokens), labels)
        return local(loss), {**found, "validation": local(validation)}

    return model, step


def torchtitans_parallelize(backend: str, over: str, checked: bool = False) -> None:
    """A model as its trainer lays it out: forwards are wrapped, and DTensors lie on one mesh or two."""
    model, step = parallelized(backend, over, checked)
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    from headloss.integrations.torchtitan import HeadlossLoss

    inner = CrossEntropyLoss.Config(global_vocab_size=2048)
    assert "forward" in vars(model.lm_head) or over != "tensor_parallel"
    ours = step(HeadlossLoss.Config().build())
    same(ours, step(ChunkedLossWrapper.Config(num_chunks=4, loss_fn=inner).build()))


def torchtitans_wrapped_adapters() -> None:
    """Under that wrapping, a head that does more is refused still, and so is one whose input changes hands."""
    import dataclasses

    model, _ = parallelized("spmd_types", "tensor_parallel")
    import spmd_types
    from torchtitan.models.common.decoder_sharding import dense_activation_placement

    from headloss.integrations.torchtitan import _only_placed, _transform

    head = model.lm_head
    assert _only_placed(head) and _transform(head) == {}
    layout, wrapped = head._sharding_config, head.forward
    for moved in ({"input": dense_activation_placement(tp=spmd_types.P)}, {}):
        head._sharding_config = dataclasses.replace(layout, in_src_shardings=moved)
        with pytest.raises(TypeError, match="lm_head: it has a forward of its own"):
            _transform(head)
    head._sharding_config, inner = layout, type(head).forward
    closed = dict(zip(wrapped.__code__.co_freevars, wrapped.__closure__, strict=True))
    closed["fn"].cell_contents = lambda x: inner(head, x) + 1  # an adapter that was there before
    with pytest.raises(TypeError, match="lm_head: it has a forward of its own"):
        _transform(head)


def torchtitans_graphs() -> None:
    """graph_trainer keeps the config as it is, and its tracer takes the loss as one operator: the same bits."""
    prepare()
    from torch import nn
    from torchtitan.experiments.graph_trainer.configs import to_graph_trainer_config
    from torchtitan.experiments.graph_trainer.llama3 import model_registry
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from headloss.integrations.torchtitan import HeadlossLoss

    terms = {"ce": "cross_entropy", "z": {"loss": "z_loss", "weight": 0.1}}
    base = llama3_debugmodel()
    base.loss = HeadlossLoss.Config(objective={"terms": terms})
    config = to_graph_trainer_config(base, model_registry).loss
    assert type(config) is HeadlossLoss.Config and config.objective == {"terms": terms}
    torch.manual_seed(0)
    head = nn.Linear(6, 20, bias=False)

    def step(hidden: Tensor, labels: Tensor) -> list[Tensor]:
        loss_fn = config.build()
        loss_fn.set_lm_head(head)
        loss, _ = loss_fn(hidden, labels, 13.0)
        return [loss, *torch.autograd.grad(loss, [hidden, *head.parameters()])]

    inputs = [(torch.randn(2, 8, 6, requires_grad=True), torch.randint(20, (2, 8))) for _ in range(2)]
    traced = minimal_fx_tracer(step, module=head)(*inputs[0])
    for hidden, labels in inputs:
        again = run_traced(traced, module=head)(hidden, labels)
        assert all(torch.equal(a, b) for a, b in zip(step(hidden, labels), again, strict=True))


def test_torchtitan(pair: Ranks) -> None:
    functions = torchtitans_trainer, torchtitans_rl_inputs, torchtitans_trainer_under_fsdp, torchtitans_spmd_types
    functions += (torchtitans_own_heads,)
    check(pair, "torchtitan", *functions, torchtitans_graphs)


LAYOUTS = {
    "spmd_types": (("tensor_parallel",), ("tensor_parallel", True), ("data_parallel_shard",)),
    "partial_dtensor": (("tensor_parallel",), ("data_parallel_shard",)),
    "full_dtensor": (("tensor_parallel",), ("data_parallel_shard",), ("context_parallel",)),
}


@pytest.mark.parametrize("backend", LAYOUTS)
def test_torchtitans_layouts(backend: str) -> None:
    ranks = Ranks(2)  # of their own: torchtitan's backend is one per process
    try:
        check(ranks, "torchtitan", *([torchtitans_wrapped_adapters] if backend == "spmd_types" else []), page=False)
        for layout in LAYOUTS[backend]:
            ranks.run(torchtitans_parallelize, backend, *layout)
    finally:
        ranks.stop()


# verl ----------------------------------------------------------------------------------------------------------------


class Older(torch.nn.Module):
    def __init__(self, chunk_size: int = 512) -> None:
        super().__init__()


def verls_workers() -> None:
    """As a Ray worker meets it: verl imports what the environment names, and knows the backend and the losses."""
    prepare()
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "headloss.integrations.verl_plugin"
    import verl.utils.experimental.torch_functional as fused
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.models.transformers import monkey_patch
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from headloss.integrations import verl as ours

    monkey_patch.is_trl_available = lambda: False  # the value head that it looks for is in older versions
    assert get_policy_loss_fn("headloss_gspo").__name__ == "headloss_gspo"
    assert isinstance(fused.FusedLinearForPPO(impl_backend="torch"), fused.native_fused_linear)
    with pytest.raises(ValueError, match="Unsupported"):
        fused.FusedLinearForPPO(impl_backend="headlos")
    from headloss.integrations.verl_plugin import HEAD

    native, fused.native_fused_linear = fused.native_fused_linear, Older  # of verl 0.9.0, which names no backend there
    assert isinstance(fused.FusedLinearForPPO(), Older)
    token = HEAD.set({})
    assert isinstance(fused.FusedLinearForPPO(), ours.FusedLinearForPPO)
    HEAD.reset(token)
    fused.native_fused_linear = native
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    ids, found, stock = torch.arange(18).view(2, 9), [], LlamaForCausalLM.forward
    for backend in ("torch", "headloss"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        how = {"use_fused_kernels": True, "fused_kernels_backend": backend}
        try:
            monkey_patch.apply_monkey_patch(model, use_remove_padding=False, **how)
            assert isinstance(fused.FusedLinearForPPO(impl_backend=backend), ours.FusedLinearForPPO) == (
                backend == "headloss"
            )
            out = model(input_ids=ids, temperature=0.7, return_dict=True)
        finally:
            LlamaForCausalLM.forward = stock
        assert model._verl_fused_kernels_backend == backend
        (out.log_probs.sum() - 0.3 * out.entropy.sum()).backward()
        found.append((out.log_probs, out.entropy, [p.grad.clone() for p in model.parameters()]))
    for a, b in zip(*found, strict=True):
        assert_close(b, a, rtol=2e-5, atol=2e-6)
    with pytest.raises(ValueError, match=r"use_fused_kernels=True, or nothing of it runs"):
        monkey_patch.apply_monkey_patch(model, use_remove_padding=False, fused_kernels_backend="headloss")
    fused.FusedLinearForPPO = fused.native_fused_linear  # for the checks after this one


def verls_heads() -> None:
    """What models do to their logits besides the product: followed or refused; verl's own kernel leaves it out."""
    prepare()
    import peft
    import transformers as tf
    import verl.utils.experimental.torch_functional as fused
    from verl.models.transformers import monkey_patch

    from headloss.integrations import verl_plugin

    monkey_patch.is_trl_available, fused.FusedLinearForPPO = lambda: False, verl_plugin.chosen
    small = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    quiet = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    models = {
        tf.Gemma2ForCausalLM: tf.Gemma2Config(**small, **quiet, head_dim=8, final_logit_softcapping=2.0),
        tf.GraniteForCausalLM: tf.GraniteConfig(**small, **quiet, logits_scaling=8.0),
        tf.CohereForCausalLM: tf.CohereConfig(**small, **quiet, logit_scale=0.0625),
        tf.PhiForCausalLM: tf.PhiConfig(**small, **quiet),
        tf.LlamaForCausalLM: tf.LlamaConfig(**small, **quiet),
    }
    ranks = {f"{name}_rank": 8 for name in ("q_lora", "kv_lora")}
    sizes = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "dim_model_base": 4}
    if hasattr(tf, "MiniCPM3Config"):  # it divides hidden states, before the head
        models[tf.MiniCPM3ForCausalLM] = tf.MiniCPM3Config(**small, **quiet, **ranks, **sizes)
    ids, how = torch.arange(18).view(2, 9), {"use_fused_kernels": True, "fused_kernels_backend": "headloss"}
    for kind, config in models.items():
        torch.manual_seed(0)
        model, stock = kind(config), kind.forward
        for x in model.lm_head.parameters():
            torch.nn.init.normal_(x)
        logits = model(input_ids=ids).logits
        want = logits.div(0.7).log_softmax(-1).gather(-1, ids.roll(-1, -1)[..., None])[..., 0]
        want.sum().backward()
        grads = [x.grad.clone() for x in model.parameters()]
        model.zero_grad()
        try:
            monkey_patch.apply_monkey_patch(model, use_remove_padding=False, **how)
            found = model(input_ids=ids, temperature=0.7, return_dict=True).log_probs
            found.sum().backward()
            assert_close(found, want, rtol=2e-5, atol=2e-5)
            assert_close([x.grad for x in model.parameters()], grads, rtol=2e-4, atol=2e-5)
            body = "o_proj" if kind.__name__ == "MiniCPM3ForCausalLM" else "q_proj"
            tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=[body], r=2))
            tuned(input_ids=ids, temperature=0.7, return_dict=True)
            tuned = peft.get_peft_model(tuned.unload(), peft.LoraConfig(target_modules=["lm_head"], r=2))
            with pytest.raises(TypeError, match=r"forward of its own.*keep adapters off the head"):
                tuned(input_ids=ids, temperature=0.7, return_dict=True)
        finally:
            kind.forward = stock

    class Banned(tf.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            logits[..., 7] = -1e9
            return logits, self.loss_function(logits, labels, self.vocab_size)

    model, stock = Banned(models[tf.LlamaForCausalLM]), Banned.forward
    with pytest.raises(TypeError, match=r"Banned.forward has `logits\[..., 7\] = .*use_fused_kernels=False"):
        verl_plugin.patched(model, **how)
    assert Banned.forward is stock and "forward" not in vars(model)
    fused.FusedLinearForPPO = fused.native_fused_linear  # for the checks after this one


def verls_engines() -> None:
    """Those that never read the backend refuse it, whenever verl loads them."""
    prepare()
    from headloss.integrations import verl_plugin

    with tempfile.TemporaryDirectory() as folder:
        text = (
            "class EngineRegistry:\n    @classmethod\n    def new(cls, *args, **kwargs):\n        return args, kwargs\n"
        )
        (Path(folder) / "later_engines.py").write_text(text)
        verl_plugin.after_import("later_engines", verl_plugin.guard_engines)
        sys.path.insert(0, folder)
        registry = importlib.import_module("later_engines").EngineRegistry
        sys.path.remove(folder)
    with_us = types.SimpleNamespace(fused_kernel_options={"impl_backend": "headloss"})
    without = types.SimpleNamespace(fused_kernel_options={"impl_backend": "torch"})
    for strategy, model in (("fsdp", with_us), ("fsdp2", with_us), ("megatron", without), ("megatron", object())):
        args, kwargs = registry.new(model_type="language_model", backend=strategy, model_config=model)
        assert args == ("language_model", strategy) and kwargs == {"model_config": model}
    for strategy in ("megatron", "veomni", "automodel", "torchtitan"):
        with pytest.raises(ValueError, match=f"impl_backend: headloss is read by verl's FSDP .*{strategy}"):
            registry.new(model_type="language_model", backend=strategy, model_config=with_us)


def verls_patch() -> None:
    """The patch for verl itself applies to verl as it is, and makes the same backend."""
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("models/transformers/monkey_patch.py", "utils/experimental/torch_functional.py"):
            target = Path(folder) / "verl" / name
            target.parent.mkdir(parents=True)
            target.write_text((STACKS / "verl" / name).read_text())
        patch = str(DOCS / "upstream" / "verl-headloss-backend.patch")
        subprocess.run(["git", "apply", "--unsafe-paths", f"--directory={folder}", patch], check=True, cwd=folder)
        assert '"liger", "headloss"]' in (Path(folder) / "verl/models/transformers/monkey_patch.py").read_text()
        spec = importlib.util.spec_from_file_location("fused_with_headloss", target)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4), torch.randint(9, (5,))
    found = [
        sum(module.FusedLinearForPPO(impl_backend=x)(hidden, weight, ids, 0.7)).sum() for x in ("torch", "headloss")
    ]
    assert_close(found[1], found[0])
    assert_close(grads(found[1], hidden), grads(found[0], hidden))


def verls_policy_losses() -> None:
    """Through verl's own registry, config and aggregation, against the losses that verl itself has."""
    prepare()
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, DistillationLossConfig

    from headloss.integrations import verl as ours

    ours.register_policy_losses()
    less = DistillationLossConfig(loss_mode="k1", use_policy_gradient=True)  # has no clip_ratio_c
    far = torch.tensor([[-3.0, -6.0, -8.0, -8.5]], requires_grad=True)
    for names in (("headloss_grpo", "vanilla"), ("headloss_dppo", "dppo_tv")):
        batch = (torch.full((1, 4), -8.0), far, -torch.ones(1, 4), torch.ones(1, 4), "token-mean", less, None)
        found, wanted = (get_policy_loss_fn(name)(*batch)[0] for name in names)
        assert_close((found, *grads(found, far)), (wanted, *grads(wanted, far)), rtol=1e-5, atol=1e-6)
    config = ActorConfig(
        strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1,
        clip_ratio=0.2, clip_ratio_low=0.15, clip_ratio_high=0.3, clip_ratio_c=1.4, tau_pos=0.8, tau_neg=1.3,
    )  # fmt: skip
    object.__setattr__(config, "policy_loss", type(config.policy_loss)(dro_beta=0.3))
    object.__setattr__(config, "global_batch_info", {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 12})
    torch.manual_seed(0)
    mask = torch.ones(4, 7)
    mask[0, 3:], mask[1, :2], mask[3] = 0, 0, 0
    log_prob = (-torch.rand(4, 7, dtype=torch.float64)).requires_grad_()
    old = log_prob.detach() + 0.4 * torch.randn(4, 7, dtype=torch.float64)
    per_token, weights = torch.randn(4, 7, dtype=torch.float64), torch.rand(4, 7, dtype=torch.float64)
    per_sequence = per_token[:, :1].expand(4, 7)
    pairs = {
        "grpo": ("vanilla", per_token, {}),
        "gspo_token": ("gspo", per_token, {}),
        "gspo": ("gspo", per_sequence, {}),
        "sapo": ("sapo", per_token, {}),
        "reinforce": ("gpg", per_token, {}),
        "kimi": ("dro", per_token, {}),
        "dppo": ("dppo_tv", per_token, {}),
        "cispo": ("cispo", per_token, {}),
    }
    for name, (verls, advantage, changed) in pairs.items():
        for key, value in changed.items():
            object.__setattr__(config, key, value)
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
            if name in ("gspo", "sapo") and mode != "seq-mean-token-mean":
                continue  # the only mode in which they are the same
            weight = weights if name != "gspo" else None  # whose tokens share a ratio
            both = [get_policy_loss_fn(n) for n in (f"headloss_{name}", verls)]
            (found, metrics), (wanted, theirs) = (f(old, log_prob, advantage, mask, mode, config, weight) for f in both)
            say = lambda m: f"{name}, {mode}: {m}"
            assert_close(found, wanted, msg=say)
            assert_close(grads(found, log_prob), grads(wanted, log_prob), msg=say)
            if name in ("grpo", "gspo", "gspo_token", "dppo"):
                assert metrics["actor/pg_clipfrac"] > 0 or name != "grpo"
                for k in ("actor/pg_clipfrac", "actor/ppo_kl"):
                    assert abs(metrics[k] - theirs[k]) < 1e-6, (name, k, metrics[k], theirs[k])


def verls_fused_linear() -> None:
    """A model of Transformers under verl's own forward, whose FusedLinearForPPO is ours."""
    prepare()
    import verl.utils.experimental.torch_functional as fused
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.models.transformers.dense_common import forward_with_torch_backend

    from headloss.integrations import verl as ours

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    )
    ids, stock = torch.randint(61, (2, 9)), fused.FusedLinearForPPO
    found = []
    for module in (stock, ours.FusedLinearForPPO):
        fused.FusedLinearForPPO = module
        model.zero_grad()
        out = forward_with_torch_backend(model, input_ids=ids, temperature=0.7, return_dict=True)
        (out.log_probs.sum() - 0.3 * out.entropy.sum()).backward()
        found.append((out.log_probs, out.entropy, [p.grad.clone() for p in model.parameters()]))
    for a, b in zip(*found, strict=True):
        assert_close(b, a, rtol=2e-5, atol=2e-6)


class Padded(dict[str, Any]):
    """Plays the TensorDict of verl's `ppo_loss`, of a batch that is padded already."""

    def select(self, *names: str) -> Padded:
        return Padded({name: self[name] for name in names})

    def to_padded_tensor(self) -> Padded:
        return self


def verls_steps() -> None:
    """Two steps: verl's forward of the model, verl's `ppo_loss` with its config; then with our head and our loss."""
    prepare()
    import verl.utils.experimental.torch_functional as fused
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.models.transformers.dense_common import forward_with_torch_backend
    from verl.workers.config import ActorConfig
    from verl.workers.utils import losses

    from headloss.integrations import verl as ours

    ours.register_policy_losses()
    losses.no_padding_2_padding = lambda x, data: x
    torch.manual_seed(0)
    ids = torch.randint(61, (4, 9))
    mask = (torch.arange(9) < torch.tensor([9, 5, 7, 3])[:, None]).float()
    old, advantages = -4 + 0.3 * torch.randn(4, 9), torch.randn(4, 1).expand(4, 9)
    size = {"dp_size": 1, "batch_num_tokens": mask.sum(), "global_batch_size": 4}
    data = Padded(response_mask=mask, old_log_probs=old, advantages=advantages, **size)
    stock = fused.FusedLinearForPPO
    shape = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}

    def train(head: Any, loss_mode: str) -> list[Any]:
        config = ActorConfig(
            strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, clip_ratio_high=0.3, entropy_coeff=0.01
        )
        object.__setattr__(config, "policy_loss", type(config.policy_loss)(loss_mode=loss_mode))
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2))
        optimizer, found, fused.FusedLinearForPPO = torch.optim.SGD(model.parameters(), lr=0.1), [], head
        for _ in range(2):
            optimizer.zero_grad()
            out = forward_with_torch_backend(model, input_ids=ids, temperature=0.8, return_dict=True)
            answer = {"log_probs": out.log_probs, "entropy": out.entropy}
            loss, metrics = losses.ppo_loss(config, answer, data)
            loss.backward()
            numbers = {name: torch.as_tensor(x.aggregate()).float().detach() for name, x in metrics.items()}
            wanted = {"actor/pg_loss", "actor/entropy_loss", "actor/pg_clipfrac", "actor/ppo_kl"}
            found += [loss.detach(), {n: numbers[n] for n in wanted}, *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
        return found

    try:
        native = train(stock, "vanilla")
        assert_close(train(ours.FusedLinearForPPO, "headloss_grpo"), native, rtol=2e-4, atol=2e-6)
        assert not torch.allclose(train(ours.FusedLinearForPPO, "headloss_cispo")[0], native[0])  # it is looked up
    finally:
        fused.FusedLinearForPPO = stock


def test_verl(pair: Ranks) -> None:
    pytest.importorskip("transformers")
    check(
        pair,
        "verl",
        verls_workers,
        verls_heads,
        verls_engines,
        verls_patch,
        verls_policy_losses,
        verls_fused_linear,
        verls_steps,
    )


# PEFT ----------------------------------------------------------------------------------------------------------------


def pefts_models() -> None:
    """LoRA beside the head, patched before and after; on the head, refused with a sentence."""
    prepare()
    sys.path.append(str(Path(__file__).parent))
    import tiny_models as tiny
    from peft import LoraConfig, get_peft_model

    from headloss.integrations.transformers import patch

    batch = tiny.batch()
    lora = lambda **how: LoraConfig(r=2, task_type="CAUSAL_LM", **{"target_modules": ["q_proj", "v_proj"], **how})
    ways = (
        lambda: get_peft_model(tiny.model("llama"), lora()),
        lambda: patch(get_peft_model(tiny.model("llama"), lora())),
        lambda: get_peft_model(patch(tiny.model("llama")), lora()),
    )
    found = []
    for make in ways:
        model = make()
        torch.manual_seed(0)
        for name, p in model.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(p, std=0.3)
        loss = model(**batch).loss
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    for ours in found[1:]:
        assert_close(ours[0], found[0][0])
        assert ours[1].keys() == found[0][1].keys() and ours[1]
        for name, g in ours[1].items():
            assert_close(g, found[0][1][name], rtol=1e-5, atol=1e-6)
    for how in ({"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}):
        with pytest.raises(TypeError, match="peft's .*without adapters"):
            patch(get_peft_model(tiny.model("llama"), lora(**how)))
        with pytest.raises(ValueError, match="wrapped by an adapter"):
            get_peft_model(patch(tiny.model("llama")), lora(**how))(**batch)


def test_peft(pair: Ranks) -> None:
    pytest.importorskip("transformers")
    check(pair, "peft", pefts_models, page=False)


# DeepSpeed -----------------------------------------------------------------------------------------------------------


def deepspeeds_engine(tied: bool) -> None:
    """ZeRO-3, two steps: parameters are empty outside of their module's forward and backward."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    sys.path += [str(LAUNCHERS), str(Path(__file__).parent)]
    import deepspeed
    import tiny_models as tiny

    import headloss as hl
    from headloss.integrations.transformers import patch
    from headloss.losses import cross_entropy, z_loss

    importlib.import_module("deepspeed.comm.torch")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # or it compiles C++
    deepspeed.init_distributed("gloo", dist_init_required=False)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    own = {k: x[2 * dist.get_rank() :][:2] for k, x in tiny.batch(4).items()}

    def train(objective: hl.Objective | None, steps: int = 2) -> list[Tensor]:
        model = tiny.model("llama_tied" if tied else "llama")
        model = model if objective is None else patch(model, objective)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        assert model.lm_head.weight.numel() == 0
        found = []
        for _ in range(steps):
            loss = engine(**own, num_items_in_batch=20).loss
            engine.backward(loss)
            found += [loss.detach(), *(deepspeed.utils.safe_get_full_grad(p) for p in model.parameters())]
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return [*found, *(p.detach().clone() for p in model.parameters())]

    stock = train(None)
    assert_close(train(hl.Objective(ce=cross_entropy)), stock, rtol=1e-5, atol=2e-6)
    if not tied:
        more = train(hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=0.1)), steps=1)
        assert more[0] > stock[0] + 0.1  # the hook is no decoration


def test_deepspeed(pair: Ranks) -> None:
    pytest.importorskip("transformers")
    check(pair, "deepspeed", page=False)
    pair.stop()  # processes in which nothing of Transformers is loaded yet
    try:
        for tied in (False, True):
            pair.run(deepspeeds_engine, tied)
    finally:
        pair.stop()


# Lightning -----------------------------------------------------------------------------------------------------------


def lightnings_trainer() -> None:
    """Its own loop, two steps, a patched model and the stock one; then the page's module."""
    sys.path += [str(LAUNCHERS), str(Path(__file__).parent)]
    import lightning
    import tiny_models as tiny

    import headloss as hl
    from headloss.integrations.transformers import patch
    from headloss.losses import cross_entropy, z_loss

    class Module(lightning.LightningModule):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model, self.seen = model, []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self.model(**batch).loss
            self.seen.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    batch = tiny.batch(4)
    data = torch.utils.data.DataLoader([{k: x[i] for k, x in batch.items()} for i in range(4)], batch_size=2)

    def train(objective: hl.Objective | None) -> list[Tensor]:
        model = tiny.model("llama")
        module = Module(model if objective is None else patch(model, objective))
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        lightning.Trainer(max_steps=2, accelerator="cpu", enable_model_summary=False, **quiet).fit(module, data)
        return [*module.seen, *(p.detach() for p in module.parameters())]

    stock = train(None)
    assert_close(train(hl.Objective(ce=cross_entropy)), stock, rtol=1e-5, atol=2e-6)
    assert train(hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=0.1)))[0] > stock[0] + 0.1
    the_page("other-trainers.md")


def test_lightning() -> None:
    pytest.importorskip("transformers")
    single = Ranks(1)
    check(single, "lightning", page=False)
    try:
        single.run(lightnings_trainer)
    finally:
        single.stop()
