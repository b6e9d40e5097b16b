"""A patched model in Trainer, however it comes there: its metrics are logged, and the sequences of a step counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import tiny_models as tiny
import transformers
from accelerate.state import AcceleratorState
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import headloss as hl
from headloss.integrations.causal_lm import lines_of
from headloss.integrations.log import Totals
from headloss.integrations.transformers import HeadlossCallback, loss_function, patch
from headloss.losses import cross_entropy

ENTROPY = hl.Objective(ce=cross_entropy, metrics=["entropy"])
PER_SEQUENCE = hl.Objective(ce=hl.Term(cross_entropy, reduction="seq_mean_token_mean"))
LINES = [{k: x[i] for k, x in tiny.batch(8, seed=5).items()} for i in range(8)]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def trainer(model: nn.Module | None, folder: Path, **more: Any) -> Trainer:
    own = {k: more.pop(k) for k in ("model_init", "data_collator", "callbacks") if k in more}
    options = {
        "max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": True, "optim": "sgd", "max_grad_norm": 0.0, "seed": 3, "logging_steps": 1, "learning_rate": 0.1,
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **{**options, **more})
    return Trainer(model=model, args=arguments, train_dataset=more.pop("data", LINES), eval_dataset=LINES, **own)


def test_a_compiled_model(tmp_path: Path) -> None:
    """Handed over compiled: the callback finds its metrics inside."""
    compiled = torch.compile(patch(tiny.model("llama"), ENTROPY), backend="eager")
    run = trainer(compiled, tmp_path, remove_unused_columns=False, callbacks=[HeadlossCallback()], max_steps=1)
    run.train()
    plain = trainer(patch(tiny.model("llama"), ENTROPY), tmp_path, callbacks=[HeadlossCallback()], max_steps=1)
    plain.train()
    assert run.state.log_history[0]["entropy"] == pytest.approx(plain.state.log_history[0]["entropy"], rel=1e-6)


def test_a_graph_serves_all_steps(tmp_path: Path) -> None:
    """Metrics that are read and counted anew, and evaluations between, do not make it anew."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    logged = {}
    for compiles in (True, False):
        run = trainer(
            patch(tiny.model("llama"), ENTROPY), tmp_path, callbacks=[HeadlossCallback()], max_steps=6,
            gradient_accumulation_steps=3, logging_steps=2, eval_strategy="steps", eval_steps=2,
            per_device_train_batch_size=1, torch_compile=compiles, torch_compile_backend="eager",
        )  # fmt: skip
        run.train()
        logged[compiles] = [x.get("entropy", x.get("eval_entropy")) for x in run.state.log_history[:-1]]
    assert logged[True] == pytest.approx(logged[False], rel=1e-5) and len(logged[True]) == 6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # with nothing counted yet, and with something


def test_two_graphs_serve_steps_of_all_sizes() -> None:
    totals = Totals()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(backend="eager", dynamic=True, fullgraph=True)
    def step(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        out = ENTROPY(hl.Logits(x), targets)
        totals.add(out.metrics)
        return out.loss

    for rows in (2, 3, 4, 5):
        step(torch.randn(rows, 6), torch.arange(rows))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_what_graphs_count_is_taken_once() -> None:
    totals = Totals()
    metrics = lambda x: (
        hl.Objective(m=cross_entropy, metrics=["entropy"])(hl.Logits(x), torch.zeros(len(x), dtype=torch.long)).metrics
    )
    first, second = torch.randn(3, 5), torch.randn(2, 5)
    totals.add(metrics(first))
    totals.add(metrics(second))
    both = hl.Meter().add(metrics(torch.cat([first, second]))).compute()
    assert hl.Meter().add(totals.take()).compute() == pytest.approx(both, rel=1e-6)
    assert totals.take() == {}
    totals.add(metrics(second))
    assert hl.Meter().add(totals.take()).compute() == pytest.approx(hl.Meter().add(metrics(second)).compute(), rel=1e-6)


def test_a_model_that_trainer_makes(tmp_path: Path) -> None:
    """`model_init` makes another model for `train` than the one that the callback was added to."""
    make = lambda: patch(tiny.model("llama"), PER_SEQUENCE)
    run = trainer(None, tmp_path, model_init=make, gradient_accumulation_steps=2)
    HeadlossCallback().add_to(run)
    run.train()
    assert run.model.headloss.log.step is not None and "ce/perplexity" in run.state.log_history[0]


def test_what_was_called_before_is_no_part_of_a_step(tmp_path: Path) -> None:
    found = []
    for before in (False, True):
        model = patch(tiny.model("llama"), ENTROPY)
        if before:
            model.train()(**tiny.batch(seed=9)).loss.backward()
            model.zero_grad()
        run = trainer(model, tmp_path, callbacks=[HeadlossCallback()], max_steps=1)
        run.train()
        found.append(run.state.log_history[0]["entropy"])
    assert found[1] == found[0]


def test_evaluation_mode_is_an_evaluation_with_gradients_too() -> None:
    model = patch(tiny.model("llama"), ENTROPY, eval_logits=True).eval()
    model(**tiny.batch())
    assert model.headloss.log.read(True) == {} and "entropy" in model.headloss.log.read(False)


# Packed sequences ----------------------------------------------------------------------------------------------------

DOCUMENTS = [
    {name: line[name][line["attention_mask"].bool()].tolist() for name in ("input_ids", "labels")} for line in LINES[:4]
]


class Past(Trainer):
    """Makes a loss of its own, without giving the model labels."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return logits.square().mean()


def another_loss(outputs: Any, labels: Any, **_: Any) -> torch.Tensor:
    return outputs.logits.square().mean()


@pytest.mark.parametrize("how", ["label_smoothing_factor", "compute_loss_func", "compute_loss"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_step_past_the_objective_is_noticed(how: str, kept: bool, tmp_path: Path) -> None:
    model, more = tiny.model("llama"), {"label_smoothing_factor": 0.1} if how == "label_smoothing_factor" else {}
    if kept:
        model.loss_function = loss_function(ENTROPY)
    else:
        patch(model, ENTROPY)
    run = trainer(model, tmp_path, callbacks=[HeadlossCallback()], gradient_accumulation_steps=2, **more)
    if how == "compute_loss":
        run.__class__ = Past
    elif how == "compute_loss_func":
        run.compute_loss_func = another_loss
    refused = not kept and how != "compute_loss"  # by the patched forward, before the step
    says = "labels: missing" if refused else "model: a step was made without its objective"
    with pytest.raises(ValueError if refused else RuntimeError, match=says):
        run.train()


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_labels_that_a_kept_model_does_not_shift(name: str, tmp_path: Path) -> None:
    model = tiny.model("llama")
    model.loss_function = loss_function(ENTROPY)
    if name == "t5":
        model.loss_type = "ForMaskedLM"  # as T5Gemma's
    run = trainer(model, tmp_path, callbacks=[HeadlossCallback()], max_steps=1)
    if name == "llama":
        run.train()
        assert run.state.log_history[0]["entropy"] > 0
        return
    with pytest.raises(TypeError, match=r"labels of LlamaForCausalLM \(ForMaskedLM\) are not to be shifted"):
        run.train()


@pytest.mark.parametrize("marks", ["position_ids", "cu_seq_lens_q", "seq_idx"])
def test_documents_of_a_packed_line(marks: str, tmp_path: Path) -> None:
    """Whatever tells attention where a document ends tells it the reduction; counts of a step too."""
    more = {"cu_seq_lens_q": "return_flash_attn_kwargs", "seq_idx": "return_seq_idx"}.get(marks)
    collate = DataCollatorWithFlattening(return_position_ids=more is None, **({} if more is None else {more: True}))
    batch = collate(DOCUMENTS)
    assert marks in batch and len(batch["input_ids"]) == 1
    targets = hl.shift_labels(batch["labels"])
    lengths = [len(document["labels"]) for document in DOCUMENTS]
    said = hl.Segments.from_ids(torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None])
    model = patch(tiny.model("llama"), PER_SEQUENCE)
    found, wanted = model(**batch).loss, model(**batch, headloss=hl.Inputs(segments=said)).loss
    torch.testing.assert_close(found, wanted)
    line = hl.Inputs(segments=hl.Segments.from_batch(targets))
    assert (model(**batch, headloss=line).loss - wanted).abs() > 1e-3
    run = trainer(model, tmp_path, data_collator=collate, gradient_accumulation_steps=2, remove_unused_columns=False)
    HeadlossCallback().add_to(run)
    run._get_num_items_in_batch([batch, batch], torch.device("cpu"))
    assert model.headloss.log.step[1] == 2 * hl.count(targets, said).num_segments


def test_documents_of_several_packed_lines() -> None:
    """Positions that begin anew mark documents where there is no mask, as they do for attention."""
    ids = torch.randint(3, tiny.V, (2, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    model = patch(tiny.model("llama"), PER_SEQUENCE)
    call = {"input_ids": ids, "labels": ids, "position_ids": positions}
    said = hl.Inputs(segments=hl.Segments.from_position_ids(positions))
    torch.testing.assert_close(model(**call).loss, model(**call, headloss=said).loss)
    mask = torch.ones_like(ids)
    lines = hl.Inputs(segments=hl.Segments.from_batch(ids))
    torch.testing.assert_close(
        model(**call, attention_mask=mask).loss, model(**call, attention_mask=mask, headloss=lines).loss
    )


def test_documents_of_a_packed_line_with_images() -> None:
    """Each token has four positions then, of which the first is its place in its document."""
    targets, places = torch.zeros(2, 4, dtype=torch.long), torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]])
    positions = torch.cat([places[None], torch.zeros(3, 2, 4, dtype=torch.long)])
    for given, count in ((positions, 4), (positions[1:], 2), (places, 4)):
        assert lines_of(targets, {"position_ids": given}).num_segments == count


@pytest.mark.parametrize("shared", ["cp_enabled", "sp_enabled"])
def test_ranks_that_share_a_sequence_are_refused(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them has a part of every line, which would be taken for a sequence.  With `sp_enabled` Trainer counts no
    tokens, and gives the shifted labels twice."""
    ranks, batch = SimpleNamespace(**{shared: True}), tiny.batch()
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", ranks)
    targets = hl.shift_labels(batch["labels"])
    call = {"input_ids": batch["input_ids"], "labels": targets, "shift_labels": targets}
    patch(tiny.model("llama"), ENTROPY)(**call)
    model = patch(tiny.model("llama"), PER_SEQUENCE)
    with pytest.raises(ValueError, match="parallelism_config: ranks share the tokens of a sequence"):
        model(**call)
    model(**call, headloss=hl.Inputs(segments=hl.Segments.from_batch(targets)))
