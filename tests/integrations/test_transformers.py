"""A patched model trains as the stock one does: forward, backward, Trainer, evaluation, generation."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import tiny_models as tiny
import transformers
from transformers import Trainer, TrainingArguments

import headloss as hl
from headloss.integrations.transformers import HeadlossCallback, loss_function, patch, unpatch
from headloss.losses import cross_entropy, grpo, simpo

CLOSE = {"rtol": 1e-6, "atol": 1e-6}
OBJECTIVE = hl.Objective(ce=cross_entropy, metrics=["entropy", "accuracy"])


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == stock.keys() and stock
    for name, x in stock.items():
        scale = float(x.abs().max())
        torch.testing.assert_close(ours[name], x, rtol=1e-6, atol=1e-6 * max(scale, 1.0), msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("name", list(tiny.CONFIGS))
def test_forward_backward_and_generate(name: str) -> None:
    stock = tiny.model(name)
    ours = patch(copy.deepcopy(stock), OBJECTIVE)
    batch = tiny.batch()
    prompt = {"input_ids": batch["input_ids"][:, :3], "max_new_tokens": 4, "do_sample": False}
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert torch.equal(ours.generate(**prompt), stock.generate(**prompt))
    torch.testing.assert_close(ours(batch["input_ids"]).logits, stock(batch["input_ids"]).logits, rtol=0, atol=0)
    targets = hl.shift_labels(batch["labels"])
    for more in ({}, {"num_items_in_batch": 29}, {"num_items_in_batch": torch.tensor(29)}, {"shift_labels": targets}):
        for model in (ours, stock):
            model.zero_grad()
            model(**batch, **more).loss.backward()
        torch.testing.assert_close(ours(**batch, **more).loss, stock(**batch, **more).loss, **CLOSE)
        same(grads(ours), grads(stock))
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch).loss, stock(**batch).loss, **CLOSE)
        logits = stock(**{k: x for k, x in batch.items() if k != "labels"}).logits
    assert ours(**batch).logits.shape == (3, 9, 0)
    valid, logp = targets != -100, logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)[valid].mean()
    assert float(ours.headloss.last.metrics["entropy"]) == pytest.approx(float(entropy), rel=1e-5)
    assert float(ours.headloss.last.metrics["accuracy"]) == float((logits.argmax(-1) == targets)[valid].double().mean())


class Collected(Trainer):
    """Keeps what every micro-batch's loss was."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), float((found[0] if isinstance(found, tuple) else found).detach())]
        return found


def train(model: nn.Module, folder: Path, callbacks: Any = None, **options: Any) -> Collected:
    """Two steps of two micro-batches of two ragged lines, and an evaluation."""
    lines = [{k: x[i] for k, x in tiny.batch(8, seed=5).items()} for i in range(8)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        per_device_eval_batch_size=3, optim="sgd", learning_rate=0.3, lr_scheduler_type="constant", max_grad_norm=0.0,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=3, **options,
    )  # fmt: skip
    trainer = Collected(
        model=model, args=arguments, train_dataset=lines, eval_dataset=lines[:5], callbacks=callbacks or []
    )
    trainer.train()
    trainer.evaluate()
    return trainer


@pytest.fixture(autouse=True)
def _quiet(capsys: pytest.CaptureFixture[str]) -> None:
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("name", list(tiny.CONFIGS))
def test_trainer(name: str, tmp_path: Path) -> None:
    start = tiny.model(name)
    stock = train(copy.deepcopy(start), tmp_path)
    ours = train(patch(copy.deepcopy(start)), tmp_path)
    assert len(ours.losses) == 6
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(stock.losses), **CLOSE)
    same(ours.model.state_dict(), stock.model.state_dict())
    assert any((p - q).abs().max() > 1e-3 for p, q in zip(ours.model.parameters(), start.parameters()))
    keys = ("loss", "eval_loss")
    for a, b in zip(ours.state.log_history, stock.state.log_history, strict=True):
        assert {k: a[k] for k in keys if k in a} == pytest.approx({k: b[k] for k in keys if k in b}, rel=1e-5)


@pytest.mark.parametrize("route", ["fused", "logits"])
def test_metrics_are_logged(route: str, tmp_path: Path) -> None:
    model = tiny.model("llama")
    if route == "fused":
        patch(model, OBJECTIVE)
    else:
        model.loss_function = loss_function(OBJECTIVE)
    trainer = train(model, tmp_path, callbacks=[HeadlossCallback()])
    steps = [line for line in trainer.state.log_history if "loss" in line]
    assert len(steps) == 2 and all({"entropy", "accuracy", "ce/perplexity"} <= set(line) for line in steps)
    (evaluation,) = [line for line in trainer.state.log_history if "eval_loss" in line]
    log = model.headloss.log if route == "fused" else model.loss_function
    assert evaluation["eval_ce/perplexity"] != steps[-1]["ce/perplexity"]
    assert not log.counted[True] and not log.counted[False]
    for line in steps:  # over both micro-batches: the perplexity of all tokens, not a mean of two perplexities
        assert line["ce/perplexity"] == pytest.approx(math.exp(line["loss"]), rel=1e-4)


def test_callback_reaches_reporters(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    class Early(Collected):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(Reporter())
            HeadlossCallback(prefix="head/").add_to(self)

    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=1, logging_steps=1, report_to=[],
                                  disable_tqdm=True, use_cpu=True, save_strategy="no")  # fmt: skip
    lines = [{k: x[i] for k, x in tiny.batch(8).items()} for i in range(8)]
    Early(model=patch(tiny.model("llama"), OBJECTIVE), args=arguments, train_dataset=lines).train()
    assert "head/entropy" in seen[0] and "train_loss" in seen[-1] and "head/entropy" not in seen[-1]


def test_logits_route_equals_stock() -> None:
    stock, batch = tiny.model("gemma2"), tiny.batch()
    ours = copy.deepcopy(stock)
    ours.loss_function = loss_function()
    for model in (ours, stock):
        model(**batch, num_items_in_batch=13).loss.backward()
    same(grads(ours), grads(stock))
    assert ours(**batch).logits.shape[-1] == tiny.V
    assert transformers.loss.loss_utils.LOSS_MAPPING["ForCausalLM"] is transformers.loss.loss_utils.ForCausalLMLoss


def test_eval_logits() -> None:
    stock, batch = tiny.model("cohere").eval(), tiny.batch()
    ours = patch(copy.deepcopy(stock), eval_logits=True)
    out, wanted = ours(**batch), stock(**batch)
    assert torch.equal(out.logits, wanted.logits)
    torch.testing.assert_close(out.loss, wanted.loss, **CLOSE)
    assert ours.train()(**batch).logits.shape[-1] <= 1
    unpatch(ours)
    halved = torch.nn.functional.cross_entropy(
        (wanted.logits / 2.0).transpose(1, 2), hl.shift_labels(batch["labels"])
    )  # fmt: skip
    patch(ours, eval_logits=True, temperature=2.0)
    for training in (False, True):  # as hl.Linear divides in training, so must an evaluation
        torch.testing.assert_close(ours.train(training)(**batch).loss, halved, **CLOSE)


def test_another_label_is_ignored() -> None:
    """`ignore_index` goes to Transformers' own loss too."""
    stock, batch = tiny.model("llama"), tiny.batch()
    batch["labels"] = batch["labels"].clamp(min=0)
    fused, kept = patch(copy.deepcopy(stock)), copy.deepcopy(stock)
    kept.loss_function = loss_function()
    wanted = stock(**batch, ignore_index=0).loss
    assert not torch.isclose(wanted, stock(**batch).loss)
    for model in (fused, kept, patch(copy.deepcopy(stock), eval_logits=True).eval()):
        torch.testing.assert_close(model(**batch, ignore_index=0).loss, wanted, **CLOSE)
    logits = stock(batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
    by_place = loss_function()(logits, batch["labels"], tiny.V, None, 0)  # in Transformers' order
    torch.testing.assert_close(by_place, wanted, **CLOSE)


def test_a_weighted_mean_of_a_part_of_a_step_is_refused() -> None:
    """Trainer adds up what micro-batches return: their own means would count as often as there are micro-batches."""
    objective = hl.Objective(ce=hl.Term(cross_entropy, reduction="weighted_mean"))
    batch, kept = tiny.batch(), tiny.model("llama")
    kept.loss_function = loss_function(objective)
    tokens = int((hl.shift_labels(batch["labels"]) != -100).sum())
    for model in (patch(tiny.model("llama"), objective), kept):
        wanted = model(**batch).loss
        torch.testing.assert_close(model(**batch, num_items_in_batch=tokens).loss, wanted)
        with pytest.raises(ValueError, match="weighted_mean: term 'ce' .* counts 7 more tokens"):
            model(**batch, num_items_in_batch=tokens + 7)
    pairs = hl.Inputs(pairs=torch.tensor([[0, 1]]), num_segments=6)
    with pytest.raises(ValueError, match="reduction: term 'it' is a mean over the pairs of its own .* 7 more tokens"):
        patch(tiny.model("llama"), hl.Objective(it=simpo))(**batch, num_items_in_batch=tokens + 7, headloss=pairs)
    lines = hl.Inputs(segments=hl.Segments.from_batch(batch["labels"]))  # of one's own, and nobody counts them
    means = patch(tiny.model("llama"), hl.Objective(ce=hl.Term(cross_entropy, reduction="seq_mean_token_mean")))
    items = torch.tensor(tokens + 7)
    means.headloss.log.step = items, torch.tensor(5)  # as the callback counts lines
    assert means(**batch, num_items_in_batch=items).loss.isfinite()
    with pytest.raises(ValueError, match="num_segments: this batch is a part of a step"):
        means(**batch, num_items_in_batch=items, headloss=lines)


def test_unpatch_restores_everything() -> None:
    model = tiny.model("llama_tied")
    head, members, state = model.get_output_embeddings(), set(vars(model)), model.state_dict()
    members_of_head = set(vars(head))
    patch(model, memory="64KiB")
    assert model.get_output_embeddings() is head and head.weight is model.get_input_embeddings().weight
    model(**tiny.batch()).loss.backward()
    assert unpatch(model) is model
    assert type(head) is nn.Linear and set(vars(head)) == members_of_head
    assert set(vars(model)) == members and model.forward.__func__ is type(model).forward
    assert model.state_dict().keys() == state.keys()
    with pytest.raises(ValueError, match="not patched"):
        unpatch(model)
    patch(model)


def test_policy_inputs_travel_with_the_call() -> None:
    """Inputs line up with the shifted labels; the same numbers as an objective on the logits."""
    torch.manual_seed(2)
    batch, objective = tiny.batch(), hl.Objective(rl=hl.Term(grpo, reduction="seq_mean_token_mean"))
    stock = tiny.model("gemma2")
    ours = patch(copy.deepcopy(stock), objective)
    targets = hl.shift_labels(batch["labels"])
    inputs = hl.Inputs(
        old_logprob=-3 + torch.randn(3, 9),
        advantage=torch.randn(3, 1).expand(3, 9),
        segments=hl.Segments.from_batch(targets),
    )
    ours(**batch, headloss=inputs).loss.backward()
    found = ours.headloss.last
    plain = {k: x for k, x in batch.items() if k != "labels"}
    out = objective(hl.Logits(stock(**plain).logits), targets, **inputs)
    out.loss.backward()
    torch.testing.assert_close(found.loss, out.loss.detach(), **CLOSE)
    same(grads(ours), grads(stock))
    assert float(found.metrics["rl/clip_fraction"]) == pytest.approx(float(out.metrics["rl/clip_fraction"]))
    with pytest.raises(ValueError, match="without labels"):
        ours(**plain, headloss=inputs)
    with pytest.raises((ValueError, TypeError), match="advantage"):
        ours(**batch)


def test_a_failed_call_leaves_nothing_behind() -> None:
    model, batch = patch(tiny.model("llama")), tiny.batch()
    with pytest.raises(ValueError, match=r"labels: wanted shape \(3, 9\).*got \(3, 8\)"):
        model(**{**batch, "labels": batch["labels"][:, :8]})
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(**batch, logits_to_keep=2)
    assert model(batch["input_ids"]).logits.shape[-1] == tiny.V


def test_frozen_head_bfloat16_and_autocast() -> None:
    batch = tiny.batch()
    frozen = patch(tiny.model("llama"))
    frozen.get_output_embeddings().weight.requires_grad_(False)
    frozen(**batch).loss.backward()
    assert frozen.get_output_embeddings().weight.grad is None and grads(frozen)
    exact = tiny.model("llama")
    exact(**batch).loss.backward()
    want = grads(exact)
    for cast in (True, False):
        stock = tiny.model("llama") if cast else tiny.model("llama").bfloat16()
        errors = []
        for model in (patch(copy.deepcopy(stock)), stock):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                loss = model(**batch).loss
            assert loss.dtype == torch.float32
            loss.backward()
            got = grads(model)
            errors.append(max(float((got[k].float() - x).norm() / x.norm()) for k, x in want.items()))
        assert errors[0] <= 2 * errors[1] + 1e-3, errors


def test_a_copy_is_a_patched_model_of_its_own() -> None:
    model = patch(tiny.model("llama"), OBJECTIVE)
    other, batch = copy.deepcopy(model), tiny.batch()
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(2)
    assert other(**batch).loss != model(**batch).loss
    assert other.headloss is not model.headloss and other.headloss.head is other.get_output_embeddings()


@pytest.mark.slow
def test_compiled_model() -> None:
    stock, batch = tiny.model("llama"), tiny.batch()
    ours = patch(copy.deepcopy(stock))
    compiled = torch.compile(ours, backend="eager")
    for _ in range(2):
        ours.zero_grad()
        compiled(**batch).loss.backward()
    stock(**batch).loss.backward()
    same(grads(ours), grads(stock))


class Wrapped(nn.Module):
    """Stands in for a PEFT model: calls the base model's forward, not the model."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def get_base_model(self) -> nn.Module:
        return self.base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.forward(*args, **kwargs)


class LoraLinear(nn.Module):
    """Stands in for peft.tuners.lora.Linear: a base layer and a low-rank update."""

    def __init__(self, base_layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = nn.Linear(base_layer.in_features, rank), nn.Linear(rank, base_layer.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_adapters() -> None:
    batch = tiny.batch()
    wrapped = Wrapped(tiny.model("llama"))
    assert patch(wrapped) is wrapped
    assert wrapped(**batch).logits.shape[-1] <= 1
    wrapped.base.set_output_embeddings(LoraLinear(wrapped.base.get_output_embeddings()))
    with pytest.raises(ValueError, match="LoRA"):
        wrapped(**batch)
    with pytest.raises(TypeError, match="patched|LoraLinear"):
        patch(Wrapped(_with_head("llama", LoraLinear)))
    kept = _with_head("llama", LoraLinear)  # the way that is left: the logits
    kept.loss_function = loss_function()
    want = _with_head("llama", LoraLinear)
    torch.testing.assert_close(kept(**batch).loss, want(**batch).loss, **CLOSE)


def _with_head(name: str, make: Any) -> nn.Module:
    model = tiny.model(name)
    torch.manual_seed(9)
    model.set_output_embeddings(make(model.get_output_embeddings()))
    return model


class Linear4bit(nn.Linear):
    """Stands in for a quantised layer: an nn.Linear with a forward of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.round())


def test_bad_use() -> None:
    model = patch(tiny.model("llama"))
    with pytest.raises(TypeError, match="prefix: wanted text to put before each name, got LlamaForCausalLM"):
        HeadlossCallback(model)
    with pytest.raises(ValueError, match="patched already"):
        patch(model)
    with pytest.raises(TypeError, match="LlamaModel is not a causal"):
        patch(model.model)
    with pytest.raises(TypeError, match="wanted a Transformers model, got Linear"):
        patch(nn.Linear(2, 2))
    bert = transformers.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                                   intermediate_size=8)  # fmt: skip
    with pytest.raises(TypeError, match="BertForMaskedLM is not a causal"):
        patch(transformers.BertForMaskedLM(bert))
    t5 = transformers.T5Config(vocab_size=20, d_model=8, num_layers=1, num_heads=1, d_ff=8, d_kv=8)
    with pytest.raises(TypeError, match="not a causal"):
        patch(transformers.T5ForConditionalGeneration(t5))
    with pytest.raises(TypeError, match="several heads"):
        patch(_with_head("llama", lambda head: nn.ModuleList([head])))
    with pytest.raises(TypeError, match=r"Linear4bit.*quantisation"):
        patch(_with_head("llama", Linear4bit))
    two = lambda head: nn.Parameter(TwoTensor(head.weight.data, head.weight.data))  # as torchao's quantised tensors
    packed = tiny.model("llama")
    packed.lm_head.weight = two(packed.lm_head)
    with pytest.raises(TypeError, match=r"TwoTensor weights .*quantisation"):
        patch(packed)
    headless = tiny.model("llama")
    headless.get_output_embeddings = lambda: None
    with pytest.raises(TypeError, match="no output embedding"):
        patch(headless)
    hooked = tiny.model("llama")
    hooked.lm_head.forward = hooked.lm_head.forward
    with pytest.raises(TypeError, match="device map"):
        patch(hooked)
    with pytest.raises(TypeError, match="objective: wanted hl.Objective, got function"):
        patch(tiny.model("llama"), cross_entropy)
    with pytest.raises(TypeError, match="softcaps"):
        patch(tiny.model("llama"), softcaps=3.0)
    with pytest.raises(ValueError, match="memory"):
        patch(tiny.model("llama"), memory="much")
    for option, value in (("softcap", 0.0), ("scale", "2"), ("temperature", -1.0)):
        with pytest.raises(TypeError if value == "2" else ValueError, match=f"^{option}: wanted a .*number"):
            patch(tiny.model("llama"), **{option: value})
    for option, value in (("vocab", 10**6), ("weight_grad_into", "gard"), ("logits_dtype", "bf16")):
        with pytest.raises((TypeError, ValueError), match=f"^{option}: wanted"):  # not at the first step
            patch(tiny.model("llama"), **{option: value})
    plain = patch(tiny.model("llama"))
    with pytest.raises(TypeError, match=r"^headloss: wanted hl.Inputs\(name=...\) or a mapping of names, got int"):
        plain(**tiny.batch(), headloss=3)
    with pytest.raises(ValueError, match="^headloss: has 'targets', which the call is given by its own argument"):
        plain(**tiny.batch(), headloss={"targets": tiny.batch()["labels"]})
    capped, ids = patch(tiny.model("gemma2")), torch.arange(8)[None]
    capped(input_ids=ids, labels=ids)
    capped.config.final_logit_softcapping = None  # after the first call, at which the model's softcap was looked at
    with pytest.raises(ValueError, match=r"turns a logit of 1.5 into 1.5, but scale=1.0 and softcap=1.5 give"):
        capped(input_ids=ids, labels=ids)


def test_a_transform_of_the_logits_that_is_not_known_is_noticed() -> None:
    model = patch(tiny.model("cohere"), scale=1.0)
    with pytest.raises(ValueError, match=r"turns a logit of 1.5 into 0.375, but scale=1.0"):
        model(**tiny.batch())


def capped(logits: torch.Tensor) -> torch.Tensor:
    return 30 * torch.tanh(logits / 30)


def clamped(logits: torch.Tensor) -> torch.Tensor:
    return torch.clamp(logits, -100, 100)


def by_place(logits: torch.Tensor) -> torch.Tensor:
    return logits * (1 + torch.arange(logits.shape[1])[:, None])


def cut_below(logits: torch.Tensor) -> torch.Tensor:
    return torch.relu(logits)


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    """Does something to its logits that only its code says, and that leaves small ones as they are."""

    turn: Any = None

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        turn = self.turn
        logits = self.lm_head(hidden)
        logits = turn(logits)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("turn", [capped, clamped, by_place, cut_below])
def test_a_function_of_the_logits_that_leaves_small_ones_alone_is_noticed(turn: Any) -> None:
    model, batch = LlamaForCausalLM(tiny.model("llama").config), tiny.batch()
    model.turn = torch.positive
    torch.testing.assert_close(patch(copy.deepcopy(model))(**batch).loss, model(**batch).loss, **CLOSE)
    model.turn = turn
    with pytest.raises(ValueError, match=r"model: it turns a logit of (1\.5|-30|300) into .*, but scale=1\.0"):
        patch(model)(**batch)


def test_a_softcap_that_is_only_in_the_code_can_be_given() -> None:
    stock, batch = LlamaForCausalLM(tiny.model("llama").config), tiny.batch()
    stock.turn = capped
    torch.nn.init.normal_(stock.lm_head.weight, 0, 10)
    model = patch(copy.deepcopy(stock), softcap=30.0)
    torch.testing.assert_close(model(**batch).loss, stock(**batch).loss, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"turns a logit of -30 into -22\.85, but scale=1\.0 and softcap=50\.0"):
        patch(copy.deepcopy(stock), softcap=50.0)(**batch)


def test_a_scale_of_the_config_that_the_model_leaves_out() -> None:
    """As Transformers' MPT, Aya Vision, Cohere2 Vision and Gemma3 with images do; so does the loss."""
    size = {"d_model": tiny.D, "n_heads": 2, "n_layers": 1, "max_seq_len": 64, "vocab_size": tiny.V}
    torch.manual_seed(0)
    stock, batch = transformers.MptForCausalLM(transformers.MptConfig(**size, logit_scale=0.25)), tiny.batch()
    with torch.no_grad():
        stock.get_output_embeddings().weight.normal_(0, 4 / tiny.D)
    ours = patch(copy.deepcopy(stock))
    for model in (ours, stock):
        model(**batch).loss.backward()
    torch.testing.assert_close(ours(**batch).loss, stock(**batch).loss, **CLOSE)
    same(grads(ours), grads(stock))


@pytest.mark.parametrize("said", ["inv_sqrt_d_model", 0.5, None])
def test_a_scale_that_mpt_leaves_out(said: Any) -> None:
    config = transformers.MptConfig(d_model=16, n_heads=2, n_layers=1, max_seq_len=32, vocab_size=61, logit_scale=said)
    model = transformers.MptForCausalLM(config)
    wanted = model(**tiny.batch()).loss
    torch.testing.assert_close(patch(model)(**tiny.batch()).loss, wanted)


def test_resized_head() -> None:
    model = patch(tiny.model("llama"))
    model.resize_token_embeddings(tiny.V + 3)
    batch = tiny.batch()
    if model.get_output_embeddings() is model.headloss.head:
        model(**batch)
    else:
        with pytest.raises(ValueError, match="its head has changed since it was patched"):
            model(**batch)


def test_all_ignored() -> None:
    model, batch = patch(tiny.model("llama")), tiny.batch()
    loss = model(**{**batch, "labels": torch.full_like(batch["labels"], -100)}).loss
    loss.backward()
    assert loss == 0 and all(not p.grad.any() for p in model.parameters())
