"""A patched model computes its objective or raises: whoever replaced its forward or took its labels."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import accelerate
import tiny_models as tiny
import transformers
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments

import headloss as hl
from headloss.integrations.transformers import HeadlossCallback, loss_function, patch, unpatch
from headloss.losses import cross_entropy, z_loss

Z = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=0.1))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def lines(count: int = 4) -> list[dict[str, torch.Tensor]]:
    return [{k: x[i] for k, x in tiny.batch(count, seed=5).items()} for i in range(count)]


def trainer(model: nn.Module, folder: Path, data: Any = None, **more: Any) -> Trainer:
    own = {
        k: more.pop(k) for k in ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func") if k in more
    }
    options = {
        "max_steps": 1, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "optim": "sgd", "max_grad_norm": 0.0, "seed": 3,
    }  # fmt: skip
    data = lines() if data is None else data
    arguments = TrainingArguments(output_dir=str(folder), **{**options, **more})
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, **own)


# Something else in place of the forward ------------------------------------------------------------------------------


def plain_loss(self: Any, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
    """What Liger's forward and TRL's do: the backbone, the head's weight from outside, cross-entropy."""
    hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    logits = hidden @ self.lm_head.weight.T
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), hl.shift_labels(labels).flatten())
    return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=None)


@pytest.mark.parametrize("when", ["after", "before", "class"])
def test_a_forward_that_makes_its_own_loss_is_noticed(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny.model("llama"), tiny.batch()
    if when == "before":
        model.forward = plain_loss.__get__(model)
    patch(model, Z)
    if when == "after":
        model.forward = plain_loss.__get__(model)
    elif when == "class":
        monkeypatch.setattr(type(model), "forward", plain_loss)
    for how in (model.train(), model.eval()):
        with pytest.raises(
            RuntimeError, match=r"test_never_off\.plain_loss runs in place .* objective was not computed"
        ):
            how(**batch)
    assert unpatch(model) is model and not model._forward_hooks and not model._forward_pre_hooks


def test_a_forward_that_goes_on_to_ours_is_fine() -> None:
    model, batch = patch(tiny.model("llama"), Z), tiny.batch()
    wanted, ours = model(**batch).loss, model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)  # as accelerate's mixed precision does
    assert torch.equal(model(**batch).loss, wanted)


def test_labels_by_position() -> None:
    model, batch = patch(tiny.model("llama"), Z), tiny.batch()
    outputs = model(batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])
    assert torch.equal(outputs.loss, model(**batch).loss) and outputs.logits.shape[-1] == 0


def test_liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own forward, put there by its own function and by Trainer; its kernels are played by PyTorch."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(sys.prefix) / "stacks")])
    pytest.importorskip("liger_kernel")
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from liger_kernel.transformers.model import llama
    from transformers.integrations import liger

    def played(hidden_states: Any, lm_head_weight: Any, labels: Any, **_: Any) -> Any:
        logits = hidden_states @ lm_head_weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), hl.shift_labels(labels).flatten())

    monkeypatch.setattr(llama, "LigerForCausalLMLoss", played)
    monkeypatch.setattr(liger, "is_liger_kernel_available", lambda: True)
    rest = {"rope": False, "rms_norm": False, "swiglu": False}
    told = r"liger_kernel\.transformers\.model\.llama\.lce_forward .*'fused_linear_cross_entropy': False"
    model = patch(tiny.model("llama"), Z)
    apply_liger_kernel_to_llama(model=model, **rest)
    with pytest.raises(RuntimeError, match=told):
        model(**tiny.batch())
    with pytest.raises(RuntimeError, match=told):
        trainer(patch(tiny.model("llama"), Z), tmp_path, use_liger_kernel=True, liger_kernel_config=rest).train()
    follows = {**rest, "fused_linear_cross_entropy": False}  # the advice
    ours = patch(tiny.model("llama"), Z)
    trainer(ours, tmp_path, use_liger_kernel=True, liger_kernel_config=follows).train()
    assert ours.headloss.last.terms["z"] > 0


def uncounted() -> Any:
    """As Qwen2.5-VL and thirty others: by itself it wants no num_items_in_batch, and Trainer gives it none."""
    model = tiny.model("llama")
    model.accepts_loss_kwargs = False

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        assert "num_items_in_batch" not in kwargs

    model.model.register_forward_pre_hook(check, with_kwargs=True)
    return model


MAKES = {"counted": lambda: tiny.model("llama"), "uncounted": uncounted}
each_model = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


@each_model
@pytest.mark.parametrize("option", ["label_smoothing_factor", "compute_loss_func"])
def test_labels_that_the_trainer_takes_away(option: str, make: Any, tmp_path: Path) -> None:
    value = 0.1 if option == "label_smoothing_factor" else lambda outputs, labels, **_: outputs.logits.sum()
    with pytest.raises(ValueError, match=rf"labels: missing although num_items_in_batch is given.*{option}"):
        trainer(patch(make(), Z), tmp_path, **{option: value}).train()


def test_a_model_that_wants_no_count_is_as_it_was_when_unpatched() -> None:
    model = uncounted()
    assert patch(model).accepts_loss_kwargs and unpatch(model).accepts_loss_kwargs is False
    assert "accepts_loss_kwargs" not in vars(unpatch(patch(tiny.model("llama"))))
    patch(model)(**tiny.batch(), num_items_in_batch=7).loss.backward()


# Evaluation ----------------------------------------------------------------------------------------------------------


def test_evaluation_with_logits(tmp_path: Path) -> None:
    """The same predictions as the stock model's, of all batches, with the trainer's options that look at them."""
    start, seen = tiny.model("cohere"), {}

    def measure(found: Any) -> dict[str, float]:
        seen.setdefault("predictions", []).append((found.predictions, found.label_ids, found.inputs, found.losses))
        return {"right": float((found.predictions == found.label_ids).mean())}

    for patched in (False, True):
        model = patch(copy.deepcopy(start), eval_logits=True) if patched else copy.deepcopy(start)
        run = trainer(
            model, tmp_path, compute_metrics=measure, include_for_metrics=["inputs", "loss"],
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )  # fmt: skip
        seen.setdefault("metrics", []).append(run.evaluate())
        run.preprocess_logits_for_metrics = None
        run.compute_metrics = None
        seen.setdefault("logits", []).append(run.predict(lines()).predictions)
    stock, ours = seen["predictions"]
    for a, b in zip(ours, stock, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)
    assert seen["logits"][1].shape == (4, 9, tiny.V)
    np.testing.assert_array_equal(*seen["logits"])
    assert seen["metrics"][1]["eval_right"] == seen["metrics"][0]["eval_right"]
    assert seen["metrics"][1]["eval_loss"] == pytest.approx(seen["metrics"][0]["eval_loss"], rel=1e-6)


def test_evaluation_without_logits(tmp_path: Path) -> None:
    """The loss alone is fine; whoever wants logits is told how to get them, and never sees a probe."""
    first = patch(tiny.model("llama"))
    assert first.eval()(**tiny.batch()).logits.shape == (3, 9, 0)
    stock = trainer(tiny.model("llama"), tmp_path).evaluate()["eval_loss"]
    run = trainer(patch(tiny.model("llama")), tmp_path)
    assert run.evaluate()["eval_loss"] == pytest.approx(stock, rel=1e-6)
    assert run.predict(lines(), ignore_keys=["logits", "past_key_values"]).metrics["test_loss"] > 0
    assert trainer(patch(tiny.model("llama")), tmp_path, prediction_loss_only=True).predict(lines()).predictions is None
    for more in ({}, {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}):
        run = trainer(patch(tiny.model("llama")), tmp_path, compute_metrics=lambda found: {}, **more)
        with pytest.raises(RuntimeError, match=r"outputs.logits: .*eval_logits=True"):
            run.evaluate()
    for model in (first.eval(), first.train()):
        for outputs in (model(**tiny.batch()), dict(logits=model(**tiny.batch(), return_dict=False)[1])):
            with pytest.raises(RuntimeError, match="eval_logits=True"):
                outputs["logits"].argmax(-1)
    logits = first(**tiny.batch()).logits
    assert "eval_logits" in repr(logits) and logits.detach().to(torch.bfloat16).ndim == 3  # wrappers may do that


def test_logits_are_found_by_name_in_a_tuple() -> None:
    """Of a model with a router loss they are the third of its outputs."""
    model, batch = tiny.model("mixtral"), tiny.batch()
    stock = model(**batch, return_dict=False)
    patch(model)
    for _ in range(2):
        loss, router, logits, *rest = model(**batch, return_dict=False)
        torch.testing.assert_close((loss, router), stock[:2])
        assert logits.shape == (3, 9, 0) and len(rest) == len(stock) - 3
        with pytest.raises(RuntimeError, match="eval_logits=True"):
            logits.argmax(-1)


def test_each_model_keeps_the_signature_of_its_own_forward() -> None:
    """By which Trainer knows the columns of a dataset; and accelerate finds no way back to the forward it had."""
    models = [patch(tiny.model(name)) for name in ("llama", "gpt2")]
    for model in models:
        assert inspect.signature(model.forward) == inspect.signature(functools.partial(type(model).forward, model))
        assert model.forward.__name__ == "forward" and not hasattr(model.forward, "__wrapped__")
    AcceleratorState._reset_state(reset_partial_state=True)  # of another test's Trainer
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = patch(tiny.model("llama"), Z)
    prepared = accelerator.prepare(model)
    wanted = prepared(**tiny.batch()).loss
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    torch.testing.assert_close(plain(**tiny.batch()).loss, wanted, rtol=1e-2, atol=1e-2)
    assert plain.headloss.last.terms["z"] > 0
    AcceleratorState._reset_state(reset_partial_state=True)


# Threads, copies, graphs ---------------------------------------------------------------------------------------------


def test_threads_have_their_own_losses() -> None:
    model = patch(tiny.model("llama"), hl.Objective(ce=cross_entropy, metrics=["entropy"]))
    batches = [tiny.batch(seed=seed) for seed in range(4)]
    alone = [model(**batch).loss.item() for batch in batches]
    found: dict[int, list[float]] = {}
    inside = threading.Barrier(len(batches))

    def wait(*_: Any) -> None:
        inside.wait(timeout=60)

    model.model.register_forward_hook(wait)  # all of them stand between forward and head

    def work(i: int) -> None:
        found[i] = [model(**batches[i]).loss.item() for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: pytest.approx([alone[i]] * 3, rel=1e-6) for i in range(len(batches))}


def test_data_parallel_is_refused() -> None:
    model = patch(tiny.model("llama"), Z)
    replica = model._replicate_for_data_parallel()  # what nn.DataParallel calls on each of several GPUs
    with pytest.raises(TypeError, match=r"nn\.DataParallel.*DistributedDataParallel"):
        replica(**tiny.batch())


def test_compiled_without_breaks() -> None:
    """One graph, from the first call on; it still sees a transform of the logits that was misread."""
    torch._dynamo.reset()
    stock, batch = tiny.model("cohere"), tiny.batch()
    compiled = torch.compile(patch(copy.deepcopy(stock), Z), backend="eager", fullgraph=True)
    eager = patch(copy.deepcopy(stock), Z)
    outputs = compiled(**batch)
    torch.testing.assert_close(outputs.loss, eager(**batch).loss)
    assert outputs.logits.shape[-1] == 0
    wrong = torch.compile(patch(copy.deepcopy(stock), Z, scale=1.0), backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="turns a logit of 1.5 into 0.375"):
        wrong(**batch)


# Sequences -----------------------------------------------------------------------------------------------------------

PER_LINE = hl.Objective(ce=hl.Term(cross_entropy, reduction="seq_mean_token_mean"))


def per_line(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean of each line's loss."""
    targets = hl.shift_labels(batch["labels"])
    logits = model(**{k: x for k, x in batch.items() if k != "labels"}).logits
    rows = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    valid = targets != -100
    return rows.sum(1) / valid.sum(1).clamp(min=1)


def test_sequence_reductions_use_the_lines_of_the_batch() -> None:
    stock, batch = tiny.model("llama"), tiny.batch(seed=2)
    ours = patch(copy.deepcopy(stock), PER_LINE)
    losses = per_line(stock, batch)
    torch.testing.assert_close(ours(**batch).loss, losses.mean())
    ids = torch.randint(3, tiny.V, (1, 9))
    packed = {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5, 6]])}
    logits = stock(input_ids=ids, position_ids=packed["position_ids"]).logits
    rows = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")[0]
    wanted = torch.stack([rows[:2].mean(), rows[2:].mean()]).mean()
    torch.testing.assert_close(ours(**packed).loss, wanted)


@each_model
def test_sequence_reductions_under_accumulation(make: Any, tmp_path: Path) -> None:
    """Equal to one big batch where the callback counts the step's sequences; else an error."""
    data = lines(4)
    with pytest.raises(ValueError, match=r"num_segments: .*add_to\(trainer\)"):
        trainer(patch(make(), PER_LINE), tmp_path, gradient_accumulation_steps=2).train()
    weighted = hl.Objective(ce=hl.Term(cross_entropy, reduction="weighted_mean"))
    with pytest.raises(ValueError, match=r"weighted_mean: .* a part of a step"):
        trainer(patch(make(), weighted), tmp_path, gradient_accumulation_steps=2).train()
    found = []
    for size, steps, late in ((4, 1, False), (2, 2, False), (2, 2, True)):
        model = make()
        patch(model, PER_LINE) if not late else None
        run = trainer(
            model, tmp_path, data, gradient_accumulation_steps=steps, per_device_train_batch_size=size,
            learning_rate=0.3, logging_steps=1,
        )  # fmt: skip
        patch(model, PER_LINE) if late else None
        HeadlossCallback().add_to(run)
        run.train()
        found.append((run.state.log_history[0]["loss"], run.model.state_dict()))
    for loss, weights in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        for key, x in found[0][1].items():
            torch.testing.assert_close(weights[key], x, rtol=1e-5, atol=1e-6)


# What an evaluation counts -------------------------------------------------------------------------------------------


def test_an_evaluation_reports_its_own_data_under_its_own_name(tmp_path: Path) -> None:
    def logged(prefix: str, before: Any = None) -> float:
        model = patch(tiny.model("llama"), hl.Objective(ce=cross_entropy, metrics=["lse"]), eval_logits=True)
        run = trainer(model, tmp_path)
        HeadlossCallback().add_to(run)
        if before is not None:
            before(run)
        run.evaluate(metric_key_prefix=prefix)
        return run.state.log_history[-1][f"{prefix}_lse"]

    def forward(run: Trainer) -> None:
        with torch.no_grad():
            run.model.eval()(**tiny.batch(3, seed=8))

    other = [{k: x[i] for k, x in tiny.batch(4, seed=11).items()} for i in range(4)]
    alone = logged("eval")
    assert logged("test") == alone
    for before in (lambda run: run.evaluate(other, metric_key_prefix="test"), lambda run: run.predict(other), forward):
        assert logged("eval", before) == pytest.approx(alone, rel=1e-6)


class OwnLinear(nn.Linear):
    """A head of another class than nn.Linear."""


@pytest.mark.parametrize("kind", [nn.Linear, OwnLinear])
def test_a_patched_model_is_copied_and_not_pickled(kind: type[nn.Linear]) -> None:
    """Pickle would bring back the model's own forward: the objective would be off."""
    model, batch = tiny.model("llama"), tiny.batch()
    model.lm_head.__class__ = kind
    other = copy.deepcopy(patch(model, Z))
    assert type(other.lm_head) is type(model.lm_head) and isinstance(other.lm_head, kind)
    torch.testing.assert_close(other(**batch).loss, model(**batch).loss)
    assert other.headloss is not model.headloss and other.headloss.head is other.lm_head
    with pytest.raises(TypeError, match=r"model: it is patched, and unpickling would .* unpatch\(model\) first"):
        pickle.dumps(model)
    plain = pickle.loads(pickle.dumps(unpatch(model)))
    assert type(plain.lm_head) is type(unpatch(copy.deepcopy(other)).lm_head) is kind
    torch.testing.assert_close(patch(plain, Z)(**batch).loss, other(**batch).loss)


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_on_the_logits_of_a_patched_head_is_refused(late: bool) -> None:
    """It would get a stand-in for the logits, and change nothing; one before the head is followed."""
    model, plain, batch = tiny.model("llama"), tiny.model("llama"), tiny.batch()
    for each in (model, plain):
        each.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    patch(model)
    if late:
        torch.testing.assert_close(model(**batch).loss, plain(**batch).loss, rtol=1e-4, atol=1e-5)
    for register, hook in (
        ("register_forward_hook", lambda module, args, out: out - 5 * (torch.arange(out.shape[-1]) > 9)),
        ("register_full_backward_pre_hook", lambda module, grads: (2 * grads[0],)),
        ("register_full_backward_hook", lambda module, to_input, grads: None),
    ):
        held = getattr(model.lm_head, register)(hook)
        with pytest.raises(TypeError, match=r"model: its head has a hook \(.*lambda.*\) on its output or its gradient"):
            model(**batch)
        held.remove()
    torch.testing.assert_close(model(**batch).loss, plain(**batch).loss, rtol=1e-4, atol=1e-5)


def test_a_head_that_is_parametrized_is_refused_before_anything_changes() -> None:
    model = tiny.model("llama")
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    with pytest.raises(
        TypeError, match="the head of LlamaForCausalLM has a parametrized weight, .* patch the model before"
    ):
        patch(model)
    assert "headloss" not in vars(model) and model(**tiny.batch()).loss > 0


# A model that asks for another loss ----------------------------------------------------------------------------------


class AskingForCausalLM(transformers.LlamaForCausalLM):
    """A Llama whose forward asks for a loss as `how` says."""

    how = "as it is"

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits, loss = self.lm_head(hidden), None
        if self.how == "head twice":
            loss = 0.01 * self.lm_head(hidden.tanh()).logsumexp(-1).square().mean()
            return transformers.modeling_outputs.CausalLMOutputWithPast(
                loss=self.loss_function(logits, labels, self.vocab_size, **kwargs) + loss, logits=logits
            )
        if labels is not None:
            given, labels = self.asks(labels, kwargs)
            loss = self.loss_function(logits, labels, self.vocab_size, **given)
            if self.how == "two losses":
                loss = loss + 0.3 * self.loss_function(logits, labels.roll(1, -1), self.vocab_size, **given)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    def asks(self, labels: torch.Tensor, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        match self.how:
            case "masked":
                return kwargs, labels.masked_fill(labels == 7, -100)
            case "cut":
                return kwargs, labels[:, 2:]
            case "copied":
                return kwargs, labels.clone()
            case "not shifted":
                return {**kwargs, "shift_labels": labels}, None
            case "shift swallowed":
                return {k: x for k, x in kwargs.items() if k != "shift_labels"}, labels
            case "ignore_index":
                return {**kwargs, "ignore_index": 7}, labels
            case "count":
                return {**kwargs, "num_items_in_batch": 5}, labels
            case "tensor count":
                return {**kwargs, "num_items_in_batch": torch.tensor(5)}, labels
        return kwargs, labels


def asking(how: str) -> tuple[Any, dict[str, Any]]:
    model, batch = AskingForCausalLM(tiny.model("llama").config), tiny.batch()
    model.load_state_dict(tiny.model("llama").state_dict())
    model.how = how
    batch = {n: batch[n] for n in ("input_ids", "labels")}
    batch["labels"][:, 3] = 7
    if how == "ignore_index":
        batch["labels"].clamp_(min=0)
    return model, batch


OTHER = {
    "masked": "other labels than those of the call",
    "cut": r"other labels: some of shape \(3, 7\), where the call had some of shape \(3, 9\)",
    "not shifted": "other shift_labels: some of shape",
    "shift swallowed": "other shift_labels: none, where the call had some",
    "ignore_index": "an ignore_index of its own, 7",
    "count": "another num_items_in_batch, 5",
    "tensor count": "other num_items_in_batch",
    "two losses": "calls self.loss_function twice",
    "head twice": "calls the head twice",
}


@pytest.mark.parametrize("how", OTHER)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_asks_for_another_loss_is_refused(how: str, compiled: bool) -> None:
    if compiled and how not in ("masked", "cut", "two losses"):
        pytest.skip("the same code")
    model, batch = asking(how)
    if how == "shift swallowed":
        batch["shift_labels"] = batch["labels"].roll(-2, 1)
    stock = None if how == "cut" else model(**batch).loss
    patch(model)
    run = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(TypeError, match=f"model: its forward .*{OTHER[how]}.*keep the logits"):
        run(**batch)
    if stock is not None:
        unpatch(model)
        model.loss_function = loss_function()
        torch.testing.assert_close(model(**batch).loss, stock)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_copy_of_the_labels_is_the_same(compiled: bool) -> None:
    model, batch = asking("copied")
    stock = model(**batch, num_items_in_batch=torch.tensor(9)).loss
    run = torch.compile(patch(model), backend="aot_eager", fullgraph=True) if compiled else patch(model)
    for items in (torch.tensor(9), 9):
        torch.testing.assert_close(run(**batch, num_items_in_batch=items).loss, stock)


def test_a_loss_function_that_is_set_after_patch_is_refused() -> None:
    for other in (loss_function(Z), transformers.loss.loss_utils.ForCausalLMLoss):
        model, batch = patch(tiny.model("llama"), Z), tiny.batch()
        model.loss_function = other
        with pytest.raises(TypeError, match=r"model.loss_function: something has set it since patch\(model\)"):
            model(**batch)
        model(batch["input_ids"])
