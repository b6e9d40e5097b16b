"""TRL's trainers on headloss: the same training as native, step by step, with our metrics beside theirs."""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("trl")
pytest.importorskip("datasets")
import tiny_models as tiny
import transformers
import trl
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import headloss as hl
from headloss.integrations.transformers import patch
from headloss.losses import LOSSES, cross_entropy, entropy_bonus, grpo, kl_to_reference, rloo, z_loss
from headloss.row_weights import truncate

try:
    from headloss.integrations import trl as adapter
    from headloss.integrations import trl_kernels as kernels
except RuntimeError as error:
    pytest.skip(str(error), allow_module_level=True)

TIMES = ("runtime", "per_second", "step_time", "flos", "mfu")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, tiny.V)}}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def lines(count: int, completions: bool = True) -> Dataset:
    generator = torch.Generator().manual_seed(4)

    def words(most: int) -> str:
        number = int(torch.randint(2, most, (), generator=generator))
        return " ".join(f"w{int(i)}" for i in torch.randint(3, tiny.V, (number,), generator=generator))

    rows = [{"prompt": words(5), "completion": " " + words(8)} for _ in range(count)]
    return Dataset.from_list(rows if completions else [{"prompt": row["prompt"]} for row in rows])


def common(folder: Path, **more: Any) -> dict[str, Any]:
    options = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "logging_steps": 1, "seed": 7,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False,
    }  # fmt: skip
    return options | more


def same_history(ours: Any, native: Any, rel: float = 2e-5) -> list[dict[str, float]]:
    """Every number TRL logged is the same; returns our lines of the history."""
    steps = list(zip(ours.state.log_history, native.state.log_history, strict=True))
    for mine, theirs in steps:
        kept = {k: x for k, x in theirs.items() if isinstance(x, float | int) and not any(t in k for t in TIMES)}
        assert {k: mine[k] for k in kept} == pytest.approx(kept, rel=rel, abs=2e-6)
    return [mine for mine, _ in steps]


def same_weights(ours: nn.Module, native: nn.Module, start: nn.Module) -> None:
    for (name, p), q in zip(ours.named_parameters(), native.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert any((p - q).abs().max() > 1e-3 for p, q in zip(ours.parameters(), start.parameters()))


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "mixtral", "dft"])
def test_sft(name: str, tokenizer: Any, tmp_path: Path) -> None:
    start = tiny.model("llama" if name == "dft" else name)
    arguments = trl.SFTConfig(
        **common(tmp_path, eval_strategy="steps", eval_steps=2),
        max_length=12,
        loss_type="dft" if name == "dft" else "nll",
    )
    runs = {}
    for kind, more in ((trl.SFTTrainer, {}), (adapter.SFTTrainer, {"metrics": ["max_logprob", "perplexity"]})):
        trainer = kind(
            model=copy.deepcopy(start), args=copy.deepcopy(arguments), train_dataset=lines(12), eval_dataset=lines(3),
            processing_class=tokenizer, **more,
        )  # fmt: skip
        trainer.train()
        runs[kind] = trainer
    native, ours = runs.values()
    history = same_history(ours, native)
    same_weights(ours.model, native.model, start)
    steps = [line for line in history if "loss" in line]
    assert len(steps) == 3 and all(
        {"max_logprob", "perplexity", "entropy", "mean_token_accuracy"} <= set(x) for x in steps
    )
    if name in ("gemma2", "qwen3"):
        assert steps[0]["perplexity"] == pytest.approx(torch.tensor(steps[0]["loss"]).exp().item(), rel=1e-4)
    assert any("eval_perplexity" in line for line in history)
    assert not any("fact" in key for line in history for key in line)


@pytest.mark.parametrize("said", [False, True])
def test_sft_of_a_model_that_takes_no_count(said: bool, tokenizer: Any, tmp_path: Path) -> None:
    """Most vision models: TRL averages the micro-batches, whose tokens it does not count, and so do we."""
    start = tiny.model("llama")
    start.accepts_loss_kwargs = False
    runs = []
    for kind, more in (
        (trl.SFTTrainer, {}),
        (adapter.SFTTrainer, {"objective": hl.Objective(ce=cross_entropy)} if said else {}),
    ):
        trainer = kind(
            model=copy.deepcopy(start), args=trl.SFTConfig(**common(tmp_path), max_length=12), train_dataset=lines(12),
            processing_class=tokenizer, **more,
        )  # fmt: skip
        trainer.train()
        runs.append(trainer)
    same_history(runs[1], runs[0])
    same_weights(runs[1].model, runs[0].model, start)


def test_sft_with_an_objective(tokenizer: Any, tmp_path: Path) -> None:
    """Cross-entropy and a z-loss: TRL's metrics stay, the loss is the objective's."""
    start, weight = tiny.model("llama"), 0.05
    objective = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=weight), metrics=["lse"])
    trainer = adapter.SFTTrainer(
        model=copy.deepcopy(start), args=trl.SFTConfig(**common(tmp_path, max_steps=1), max_length=12),
        train_dataset=lines(12), processing_class=tokenizer, objective=objective,
    )  # fmt: skip
    batches = [batch for _, batch in zip(range(2), trainer.get_train_dataloader())]
    trainer.train()
    items = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    loss = torch.zeros(())
    for batch in batches:
        logits = start(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        z = (logits.logsumexp(-1) ** 2)[labels != -100].sum()
        ce = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
        loss = loss + (ce + weight * z) / items
    loss.backward()
    line = trainer.state.log_history[0]
    assert line["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert {"lse", "entropy", "mean_token_accuracy", "ce/perplexity"} <= set(line)
    for (name, p), q in zip(start.named_parameters(), trainer.model.parameters()):
        norm = line["grad_norm"]
        step = 0.1 * p.grad / max(norm, 1.0)  # the trainer clips at 1
        torch.testing.assert_close(q, p.detach() - step, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_an_objective_that_would_not_be_computed_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    objective = hl.Objective(ce=cross_entropy)
    weighted = hl.Objective(ce=hl.Term(cross_entropy, reduction="weighted_mean"))
    by_sequence = hl.Objective(ce=hl.Term(cross_entropy, reduction="seq_mean_token_mean"))
    for says, objective_, options, more in (
        ("label_smoothing_factor: makes a loss", objective, {"label_smoothing_factor": 0.1}, {}),
        ("loss_type: 'dft' is TRL's own loss", objective, {"loss_type": "dft"}, {}),
        ("compute_loss_func: makes a loss", objective, {}, {"compute_loss_func": lambda *_, **__: None}),
        ("weighted_mean: term 'ce'", weighted, {"gradient_accumulation_steps": 2}, {}),
        ("objective: term 'ce' looks at whole sequences, .*use patch", by_sequence, {}, {}),
    ):
        arguments = {**common(tmp_path, max_steps=1), **options}
        with pytest.raises(ValueError, match=says):
            adapter.SFTTrainer(
                model=tiny.model("llama"), args=trl.SFTConfig(**arguments, max_length=12), train_dataset=lines(4),
                processing_class=tokenizer, objective=objective_, **more,
            )  # fmt: skip


def test_a_patched_model_in_a_trainer_of_trl(tokenizer: Any, tmp_path: Path) -> None:
    """Refused at the first step, at the latest: TRL's head takes the place of ours, and would train cross-entropy."""
    objective = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=0.05))
    for kind in (trl.SFTTrainer, adapter.SFTTrainer):
        with pytest.raises((RuntimeError, ValueError), match=r"headloss\.integrations\.trl|patched already"):
            kind(
                model=patch(tiny.model("llama"), objective), args=trl.SFTConfig(**common(tmp_path), max_length=12),
                train_dataset=lines(4), processing_class=tokenizer,
            ).train()  # fmt: skip


def stored(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(int(word[1:]) % 2 for word in text.split() if word[1:].isdigit())) for text in completions]


@pytest.mark.parametrize("route", ["facts", "objective"])
@pytest.mark.parametrize("loss", ["dapo", "grpo_kl"])
def test_grpo(loss: str, route: str, tokenizer: Any, tmp_path: Path) -> None:
    start = tiny.model("cohere" if loss == "dapo" else "qwen3")
    if loss != "dapo":  # with a KL penalty TRL loads the reference from where the model came
        start = stored(start, tmp_path / "start")
    arguments = trl.GRPOConfig(
        **common(tmp_path), max_completion_length=6, num_generations=2, temperature=0.8,
        loss_type="dapo" if loss == "dapo" else "grpo", beta=0.0 if loss == "dapo" else 0.1,
        num_iterations=1 if loss == "dapo" else 2, entropy_coef=0.01 if (loss, route) == ("grpo_kl", "facts") else 0.0,
        steps_per_generation=4 if loss == "dapo" else 2,
    )  # fmt: skip
    runs, added = {}, {"metrics": ["sum_p2", "perplexity"]}
    if route == "objective":
        added["objective"] = adapter.policy_objective(arguments)
    for kind, more in ((trl.GRPOTrainer, {}), (adapter.GRPOTrainer, added)):
        trainer = kind(
            model=copy.deepcopy(start), args=copy.deepcopy(arguments), train_dataset=lines(8, completions=False),
            processing_class=tokenizer, reward_funcs=reward, **more,
        )  # fmt: skip
        trainer.train()
        runs[kind] = trainer
    native, ours = runs.values()
    history = same_history(ours, native, rel=1e-4)
    same_weights(ours.model, native.model, start)
    steps = [line for line in history if "loss" in line]
    assert len(steps) == 3 and all({"sum_p2", "perplexity", "entropy"} <= set(line) for line in steps)
    assert any(line["grad_norm"] > 1e-3 for line in steps) and steps[0]["reward"] > 0
    assert all(0 < line["sum_p2"] < 1 for line in steps)
    if route == "objective":
        assert steps[1]["rl/clip_fraction"] == pytest.approx(steps[1]["clip_ratio/region_mean"], abs=1e-6)


def test_grpo_with_a_head_in_float32(tokenizer: Any, tmp_path: Path) -> None:
    """TRL gives the head of a bfloat16 model a forward of its own: it stays for `generate`."""
    start, runs = tiny.model("llama").bfloat16(), []
    arguments = trl.GRPOConfig(
        **{**common(tmp_path), "bf16": False}, max_completion_length=5, num_generations=2, cast_lm_head_to_fp32=True
    )
    for kind in (trl.GRPOTrainer, adapter.GRPOTrainer):
        trainer = kind(
            model=copy.deepcopy(start), args=copy.deepcopy(arguments), train_dataset=lines(8, completions=False),
            processing_class=tokenizer, reward_funcs=reward,
        )  # fmt: skip
        trainer.train()
        assert trainer.model.lm_head.weight.dtype == torch.float32
        runs.append([line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line])
    assert runs[1] == pytest.approx(runs[0], rel=1e-3) and max(runs[0]) > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation(beta: float, tokenizer: Any, tmp_path: Path) -> None:
    start, teacher = tiny.model("gemma2"), tiny.model("llama", seed=3, spread=2.0)
    arguments = trl.DistillationConfig(**common(tmp_path), max_completion_length=6, temperature=1.3, beta=beta)
    runs = {}
    for kind, more in (
        (trl.DistillationTrainer, {}),
        (adapter.DistillationTrainer, {"metrics": ["teacher_agreement"]}),
    ):
        trainer = kind(
            model=copy.deepcopy(start), teacher_model=copy.deepcopy(teacher), args=copy.deepcopy(arguments),
            train_dataset=lines(8, completions=False), processing_class=tokenizer, **more,
        )  # fmt: skip
        trainer.train()
        runs[kind] = trainer
    native, ours = runs.values()
    history = same_history(ours, native, rel=1e-4)
    same_weights(ours.model, native.model, start)
    assert all("teacher_agreement" in line and "entropy" in line for line in history if "loss" in line)


def completions(count: float) -> dict[str, torch.Tensor]:
    """A micro-batch of TRL's on-policy trainers, of a step with `count` tokens on all ranks."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, tiny.V, (3, 9), generator=generator)
    mask = (torch.arange(5) < torch.tensor([[5], [2], [4]])).long()
    return {
        "prompt_ids": ids[:, :4], "prompt_mask": torch.ones(3, 4).long(), "completion_ids": ids[:, 4:],
        "completion_mask": mask, "num_items_in_batch": torch.tensor(count),
    }  # fmt: skip


def test_distillation_with_a_count_that_the_ranks_do_not_divide(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL divides by the tokens per rank, 21 / 2; metrics of the target's probability are those of the tokens."""
    start, teacher = tiny.model("llama"), tiny.model("llama", seed=3, spread=2.0)
    batch, losses, grads = completions(21.0), [], []
    for kind, more in (
        (trl.DistillationTrainer, {}),
        (adapter.DistillationTrainer, {"metrics": ["logprob", "accuracy"]}),
    ):
        trainer = kind(
            model=copy.deepcopy(start), teacher_model=teacher, processing_class=tokenizer,
            args=trl.DistillationConfig(**common(tmp_path), max_completion_length=5),
            train_dataset=lines(8, completions=False), **more,
        )  # fmt: skip
        with monkeypatch.context() as several:
            several.setattr(type(trainer.accelerator), "num_processes", 2)
            loss = trainer.compute_loss(trainer.model.train(), batch)
        loss.backward()
        losses.append(float(loss.detach()))
        grads.append(trainer.model.lm_head.weight.grad)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0] > 1e-3
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-7)

    ids, keep = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1), batch["completion_mask"].bool()
    logprobs = start(ids).logits[:, 3:-1].log_softmax(-1)
    found = trainer.model.headloss.last.metrics
    wanted = logprobs.gather(-1, batch["completion_ids"][..., None])[..., 0][keep].mean()
    assert float(found["logprob"]) == pytest.approx(float(wanted), rel=1e-5)
    right = (logprobs.argmax(-1) == batch["completion_ids"])[keep].float().mean()
    assert float(found["accuracy"]) == pytest.approx(float(right))


def test_outputs_of_the_fused_head() -> None:
    """Every output, with and without shift_labels, against TRL's own head."""
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    native, batch = tiny.model("gemma2"), tiny.batch()
    ours = copy.deepcopy(native)
    trl.trainer.utils.add_fused_lm_head(native, temperature=0.7, outputs=outputs)
    adapter.add_fused_lm_head(ours, temperature=0.7, outputs=outputs)
    plain = {k: x for k, x in batch.items() if k != "labels"}
    torch.testing.assert_close(ours(**plain).logits, native(**plain).logits, rtol=0, atol=0)
    for more in ({"labels": batch["labels"]}, {"shift_labels": hl.shift_labels(batch["labels"])}):
        found, want = (m(**plain, **more, fused_lm_head=True, num_items_in_batch=11) for m in (ours, native))
        assert found.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(found[name], want[name], rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        for model, out in ((ours, found), (native, want)):
            model.zero_grad()
            (out.log_probs.sum() + 0.3 * (out.entropy**2).sum()).backward()
        for (name, p), q in zip(ours.named_parameters(), native.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_swapped_kernels() -> None:
    torch.manual_seed(1)
    utils, names = trl.trainer.utils, ("selective_log_softmax", "entropy_from_logits", "add_fused_lm_head")
    native = {name: getattr(utils, name) for name in (*names, "selective_log_softmax_and_entropy")}
    logits, index = 3 * torch.randn(2, 5, 17), torch.randint(17, (2, 5))
    mask = (torch.rand(2, 5) > 0.3).long()
    with adapter.swap_kernels():
        from trl.trainer import dpo_trainer

        assert utils.selective_log_softmax is kernels.selective_log_softmax
        assert dpo_trainer.add_fused_lm_head is not native["add_fused_lm_head"]
        for name, arguments in (
            ("selective_log_softmax", (index, 0.7, mask)),
            ("selective_log_softmax", (index[..., None].expand(2, 5, 3),)),
            ("entropy_from_logits", ()),
            ("selective_log_softmax_and_entropy", (index, True, 1.3, mask)),
        ):
            grads = []
            for fn in (getattr(utils, name), native[name]):
                leaf = logits.clone().requires_grad_()
                found = fn(leaf, *arguments)
                total = sum((x * torch.arange(1.0, x.numel() + 1).view(x.shape)).sum() for x in _tuple(found))
                total.backward()
                grads.append((total.detach(), leaf.grad))
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    assert {name: getattr(utils, name) for name in native} == native
    assert dpo_trainer.add_fused_lm_head is native["add_fused_lm_head"]


def test_a_swap_inside_a_swap() -> None:
    utils, names = trl.trainer.utils, ("selective_log_softmax", "entropy_from_logits", "add_fused_lm_head")
    native = {name: getattr(utils, name) for name in names}
    logits = torch.zeros(1, 5)
    with adapter.swap_kernels():
        outer = {name: getattr(utils, name) for name in names}
        with adapter.swap_kernels(memory="1MiB"):
            assert utils.add_fused_lm_head.keywords["memory"] == "1MiB"
            utils.entropy_from_logits(logits)
        assert {name: getattr(utils, name) for name in names} == outer
        with kernels.replaced({kernels.NATIVE["add_fused_lm_head"]: _tuple}):
            assert utils.add_fused_lm_head is _tuple
        assert {name: getattr(utils, name) for name in names} == outer and native != outer
        utils.entropy_from_logits(logits)
    assert {name: getattr(utils, name) for name in names} == native


def test_a_swap_that_nothing_uses_is_told(tokenizer: Any, tmp_path: Path) -> None:
    """A trainer that makes its softmax itself is stopped at the first step; one that runs outside is warned of."""

    class Own(trl.SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            logits = model(inputs["input_ids"]).logits
            return logits.log_softmax(-1).mean()

    train = transformers.Trainer.train
    data, arguments = Dataset.from_list(lines(4)), trl.SFTConfig(**common(tmp_path, max_steps=2))
    how = {"args": arguments, "train_dataset": data, "processing_class": tokenizer}
    with adapter.swap_kernels():
        trainer = Own(model=stored(tiny.model("llama"), tmp_path / "start"), **how)
        with pytest.raises(RuntimeError, match="swap_kernels: Own has made a step without any function of headloss"):
            trainer.train()
        own = adapter.SFTTrainer(model=stored(tiny.model("llama"), tmp_path / "start"), **how)
        own.train()
    told = "swap_kernels: nothing inside asked for a function of headloss"
    with pytest.warns(UserWarning, match=told), adapter.swap_kernels():
        pass
    assert transformers.Trainer.train is train


def _tuple(x: Any) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def test_preferences(tokenizer: Any, tmp_path: Path) -> None:
    """DPO by its class here, and as any trainer is that has none: made inside a swap."""
    start = stored(tiny.model("llama"), tmp_path / "start")
    rows = [{**row, "chosen": row["completion"], "rejected": " w9 w4 w7"} for row in lines(4)]
    data = Dataset.from_list([{k: row[k] for k in ("prompt", "chosen", "rejected")} for row in rows])

    def run(kind: Any, **more: Any) -> Any:
        trainer = kind(
            model=copy.deepcopy(start), args=trl.DPOConfig(**common(tmp_path, max_steps=2)), train_dataset=data,
            processing_class=tokenizer, **more,
        )  # fmt: skip
        trainer.train()
        return trainer

    native, ours = run(trl.DPOTrainer), run(adapter.DPOTrainer, metrics=["sum_p2"])
    with adapter.swap_kernels():
        swapped = run(trl.DPOTrainer)
    for trainer in (ours, swapped):
        assert isinstance(trainer.model.headloss, kernels.FusedHead)
        same_history(trainer, native, rel=1e-4)
        same_weights(trainer.model, native.model, start)
    assert 0 < ours.state.log_history[0]["sum_p2"] < 1


KINDS = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo", "cispo", "sapo", "vespo")


def test_every_loss_type_as_an_objective(tokenizer: Any, tmp_path: Path) -> None:
    """All of TRL's, in the middle of an accumulation over uneven micro-batches: its loss and its gradients."""
    start, generator = tiny.model("llama"), torch.Generator().manual_seed(1)
    how = {**common(tmp_path), "max_completion_length": 6, "num_generations": 2, "steps_per_generation": 4}
    configs = {
        kind: trl.GRPOConfig(
            **how, loss_type=kind, beta=0.1, entropy_coef=0.03, epsilon=0.2, epsilon_high=0.3, delta=1.5,
            sapo_temperature_pos=0.8, vespo_k_neg=2.5, vespo_lambda_pos=2.0, importance_sampling_level="token",
        )
        for kind in KINDS
    }  # fmt: skip
    made = {
        kind: kind(
            model=copy.deepcopy(start), args=trl.GRPOConfig(**how), train_dataset=lines(8, completions=False),
            processing_class=tokenizer, reward_funcs=reward, **more,
        )
        for kind, more in ((trl.GRPOTrainer, {}), (adapter.GRPOTrainer, {"objective": hl.Objective(rl=grpo)}))
    }  # fmt: skip
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]])
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    ids = torch.randint(3, tiny.V, (4, 10), generator=generator)
    inputs = {
        "prompt_ids": ids[:, :4], "prompt_mask": torch.ones_like(ids[:, :4]), "completion_ids": ids[:, 4:],
        "completion_mask": mask, "advantages": draw(4), "old_per_token_logps": -4 + draw(4, 6) / 3,
        "ref_per_token_logps": -4 + draw(4, 6) / 3, "num_items_in_batch": torch.tensor(61),
    }  # fmt: skip
    for kind, args in configs.items():
        found = []
        for trainer in made.values():
            trainer.args, trainer.loss_type, trainer.beta, trainer.entropy_coef = args, kind, 0.1, 0.03
            trainer.epsilon_low, trainer.epsilon_high, trainer._entropy_bonus_enabled = 0.2, 0.3, True
            trainer.current_gradient_accumulation_steps = 2
            if isinstance(trainer, adapter.GRPOTrainer):
                trainer.set_objective(adapter.policy_objective(args))
            trainer.model.zero_grad()
            loss = trainer._compute_loss(trainer.model, dict(inputs))
            loss.backward()
            found.append((loss.detach(), [p.grad.clone() for p in trainer.model.parameters()]))
        for wanted, got in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6, msg=lambda m, kind=kind: f"{kind}: {m}")
        assert max(float(g.abs().max()) for g in found[0][1]) > 1e-3


def test_a_loss_of_whole_completions_as_an_objective(tokenizer: Any, tmp_path: Path) -> None:
    """`rloo` has a value for each: of a new policy's, with a ratio of 1, minus its advantage."""
    how = {**common(tmp_path), "max_completion_length": 6, "num_generations": 2, "steps_per_generation": 4}
    trainer = adapter.GRPOTrainer(
        model=tiny.model("llama"), args=trl.GRPOConfig(**how), train_dataset=lines(8, completions=False),
        processing_class=tokenizer, reward_funcs=reward, objective=hl.Objective(rl=rloo),
    )  # fmt: skip
    ids, advantage = torch.randint(3, tiny.V, (4, 10)), torch.tensor([1.0, 2.0, -0.5, 0.5])
    inputs = {
        "prompt_ids": ids[:, :4], "prompt_mask": torch.ones_like(ids[:, :4]), "completion_ids": ids[:, 4:],
        "completion_mask": torch.ones_like(ids[:, 4:]), "advantages": advantage, "num_items_in_batch": torch.tensor(61),
    }  # fmt: skip
    trainer.model.train()
    for steps in (1, 2):
        trainer.current_gradient_accumulation_steps = steps
        loss = trainer._compute_loss(trainer.model, inputs)
        torch.testing.assert_close(loss.detach(), -advantage.mean() / steps)


def policy_trainer(kind: Any, tokenizer: Any, tmp_path: Path, more: dict[str, Any], **said: Any) -> Any:
    how = {**common(tmp_path), "max_completion_length": 6, "num_generations": 2, "steps_per_generation": 4}
    torch.manual_seed(0)
    trainer = kind(
        model=tiny.model("llama"), args=trl.GRPOConfig(**how, **said), train_dataset=lines(8, completions=False),
        processing_class=tokenizer, reward_funcs=reward, **more,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def test_a_samplers_correction_is_never_left_out(tokenizer: Any, tmp_path: Path) -> None:
    """TRL leaves it in the batch: an objective reads it, or is refused."""
    term = lambda **how: hl.Term(grpo, low=0.2, high=0.2, **how)
    weighed = hl.Objective(rl=term(row_weight="importance_sampling_ratio"))
    vespo = adapter.policy_objective(trl.GRPOConfig(use_cpu=True, bf16=False, loss_type="vespo"))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, tiny.V, (4, 10), generator=generator)
    inputs = {
        "prompt_ids": ids[:, :4], "prompt_mask": torch.ones_like(ids[:, :4]), "completion_ids": ids[:, 4:],
        "completion_mask": torch.ones_like(ids[:, 4:]), "advantages": torch.randn(4, generator=generator),
        "old_per_token_logps": -4 + torch.randn(4, 6, generator=generator) / 3, "num_items_in_batch": torch.tensor(24),
        "importance_sampling_ratio": 2 * torch.rand(4, 6, generator=generator),
    }  # fmt: skip
    found = []
    for kind, more in ((trl.GRPOTrainer, {}), (adapter.GRPOTrainer, {"objective": weighed})):
        trainer = policy_trainer(kind, tokenizer, tmp_path, more)
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True  # as if vLLM had sampled
        loss = trainer._compute_loss(trainer.model, dict(inputs))
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in trainer.model.parameters()]))
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)
    for objective in (hl.Objective(rl=term()), vespo):
        trainer.set_objective(objective)
        with pytest.raises(ValueError, match="importance_sampling_ratio: the batch holds TRL's correction"):
            trainer._compute_loss(trainer.model, dict(inputs))
    trainer.set_objective(hl.Objective(rl=term(row_weight=truncate(2.0))))  # one of ours, on the sampler's own numbers
    trainer._compute_loss(trainer.model, {**inputs, "sampling_per_token_logps": inputs["old_per_token_logps"]})


@pytest.mark.parametrize(
    "said",
    [
        {"top_entropy_quantile": 0.2}, {"off_policy_mask_threshold": 0.01}, {"entropy_coef": 0.1},
        {"use_adaptive_entropy": True, "entropy_coef": 0.1},
    ],
    ids=lambda said: next(iter(said)),
)  # fmt: skip
def test_arguments_that_no_term_takes_up_are_refused(said: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"{next(iter(said))}: .* is set for TRL's own loss, which the objective replaces"
    ):
        policy_trainer(adapter.GRPOTrainer, tokenizer, tmp_path, {"objective": hl.Objective(rl=grpo)}, **said)


def test_a_penalty_needs_its_term_and_rows_their_tokens(tokenizer: Any, tmp_path: Path) -> None:
    trainer = policy_trainer(adapter.GRPOTrainer, tokenizer, tmp_path, {})
    trainer.args.beta = 0.1
    with pytest.raises(ValueError, match="beta: 0.1 is set for TRL's own loss, .* add kl_to_reference"):
        trainer.set_objective(hl.Objective(rl=grpo))
    trainer.set_objective(hl.Objective(rl=grpo, kl=hl.Term(kl_to_reference, weight=0.1)))
    trainer.args.beta, trainer.args.entropy_coef = 0.0, 0.1
    trainer.set_objective(hl.Objective(rl=grpo, bonus=hl.Term(entropy_bonus, weight=0.1)))
    trainer.args.entropy_coef = 0.0
    for kind, refused in (("PROMPT_TUNING", True), ("PREFIX_TUNING", False)):
        trainer.model.active_peft_config = SimpleNamespace(is_prompt_learning=True, peft_type=kind)
        with (
            pytest.raises(ValueError, match="prompt tuning puts learned tokens")
            if refused
            else contextlib.nullcontext()
        ):
            trainer.set_objective(hl.Objective(rl=grpo))


class CappedForCausalLM(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = 2 * torch.tanh(self.lm_head(hidden) / 2)
        return self.loss_function(logits=logits, labels=labels, vocab_size=tiny.V)


def test_a_teacher_whose_head_does_more_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    """Its weight alone would be another teacher."""
    normed, capped = tiny.model("llama"), CappedForCausalLM(tiny.model("llama").config)
    nn.utils.parametrizations.weight_norm(normed.lm_head)
    arguments = trl.DistillationConfig(**common(tmp_path), max_completion_length=6)
    for teacher, says in (
        (normed, "the head of LlamaForCausalLM has a parametrized weight"),
        (capped, r"CappedForCausalLM.forward has `logits = 2 \* torch.tanh.*`, which its config does not tell"),
    ):
        with pytest.raises(TypeError, match=f"teacher_model: {says}"):
            adapter.DistillationTrainer(
                model=tiny.model("llama"), teacher_model=teacher, args=arguments,
                train_dataset=lines(8, completions=False), processing_class=tokenizer,
            )  # fmt: skip


def test_bad_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    with pytest.raises(ValueError, match="outputs: 'logits' is not known"):
        adapter.add_fused_lm_head(tiny.model("llama"), outputs=("logits",))
    with pytest.raises(ValueError, match="metrics: 'drift' asks for more"):
        adapter.add_fused_lm_head(model, metrics={"drift": lambda logprob, old_logprob: logprob - old_logprob})
    with pytest.raises(TypeError, match="outputs: wanted a list of names, got 'entropy'"):
        adapter.add_fused_lm_head(tiny.model("llama"), outputs="entropy")
    for kind in (adapter.add_fused_lm_head, adapter.SFTTrainer, adapter.DistillationTrainer):
        with pytest.raises(TypeError, match="metrics: wanted a list of names and functions, got 'entropy'"):
            kind(model=tiny.model("llama"), metrics="entropy")
    adapter.add_fused_lm_head(model)
    with pytest.raises(ValueError, match="patched already"):
        adapter.add_fused_lm_head(model)
    with pytest.raises(ValueError, match="labels: needed"):
        model(torch.ones(1, 3).long(), fused_lm_head=True)
    with pytest.raises(ValueError, match="top_entropy_quantile: 0.2 is not read"):
        adapter.policy_objective(trl.GRPOConfig(use_cpu=True, bf16=False, top_entropy_quantile=0.2))
    with pytest.raises(TypeError, match="args: wanted a GRPOConfig, got DPOConfig"):
        adapter.policy_objective(trl.DPOConfig(use_cpu=True, bf16=False))
    for kind in (adapter.SFTTrainer, adapter.GRPOTrainer):
        with pytest.raises(TypeError, match="objective: wanted hl.Objective, got function"):
            kind(model=tiny.model("llama"), objective=entropy_bonus)
    monkeypatch.setattr(trl, "__version__", "9.1.0")
    with pytest.raises(RuntimeError, match=r"trl: this is 9\.1\.0, but headloss supports only"), adapter.swap_kernels():
        pass
    with pytest.raises(RuntimeError, match=r"pip install 'trl==1.16.\*', or use Trainer of Transformers with .*patch"):
        adapter.SFTTrainer(model=tiny.model("llama"))
    for name in [name for name in sys.modules if name.startswith("headloss.integrations.trl")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match="but headloss supports only"):  # not what another version has elsewhere
        importlib.import_module("headloss.integrations.trl")


def test_columns_that_tokens_were_sampled_from():
    from headloss.integrations.trl_policy import policy_call

    inputs = {
        "prompt_ids": torch.zeros(2, 3, dtype=torch.long), "completion_ids": torch.zeros(2, 4, dtype=torch.long),
        "completion_mask": torch.ones(2, 4), "advantages": torch.ones(2),
        "support_ids": torch.tensor([[[1, 5, -1]] * 4, [[2, 3, 4]] * 4]),
    }  # fmt: skip
    call, keep = policy_call(hl.Objective(rl=LOSSES["reinforce"]), inputs)
    assert (call["support"].lengths > 0).tolist() == keep.flatten().tolist()
    assert call["support"].lengths.sum() == 4 * (2 + 3)
    wrong = inputs["support_ids"].clone()
    wrong[1, 2, 0] = 4  # in row 7 + 2 + 2
    for given, message in (
        (inputs["support_ids"][:, 1:], r"support_ids: wanted \(2, 4, K\), K columns of each token, got \(2, 3, 3\)"),
        (inputs["support_ids"][:1], r"support_ids: wanted \(2, 4, K\)"),
        (inputs["support_ids"].tolist(), r"support_ids: wanted \(2, 4, K\), K columns of each token, got list"),
        (inputs["support_ids"].float(), "support_ids: wanted an integer tensor, got torch.float32"),
        (wrong, "support_ids: row 11 names column 4, which it has already.*; row n is token n % 7 - 2 of"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            policy_call(hl.Objective(rl=LOSSES["reinforce"]), {**inputs, "support_ids": given})
