"""`headloss teach`: a teacher on disk is the teacher that was there, and a run that was broken off goes on."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")

import transformers
from datasets import Dataset, load_from_disk
from typer.testing import CliRunner

import headloss as hl
from headloss.cli import main, teach
from headloss.losses import forward_kl

sys.path.insert(0, str(Path(__file__).parent / "integrations"))
import tiny_models

K = 5


def plain(output: str) -> str:
    """What is inside the frame around an error."""
    return " ".join(output.replace("│", " ").split())


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Any]:
    model = tiny_models.model("gemma2")  # with a softcap
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    lines = [torch.randint(3, tiny_models.V, (n,), generator=generator).tolist() for n in (6, 9, 1, 4, 7)]
    labels = [[-100 if i == 1 else x for i, x in enumerate(line)] for line in lines]
    with (tmp_path / "data.jsonl").open("w") as file:
        file.writelines(json.dumps({"input_ids": x, "labels": y}) + "\n" for x, y in zip(lines, labels, strict=True))
    arguments = ["teach", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl"), "--k", str(K)]
    arguments += ["--out", str(tmp_path / "out"), "--temperature", "1.5", "--batch-tokens", "16", "--device", "cpu"]
    return {"model": model.eval(), "lines": lines, "arguments": arguments, "out": tmp_path / "out"}


def test_a_student_learns_the_same_from_the_files(made: dict[str, Any]) -> None:
    found = CliRunner().invoke(main, made["arguments"])
    assert found.exit_code == 0, found.output
    stored = load_from_disk(str(made["out"]))
    columns = {"input_ids", "labels", "target_token_ids", "target_logprobs", "target_mask", "lse", "entropy"}
    assert set(stored.column_names) == columns and [len(x) for x in stored["input_ids"]] == [6, 9, 1, 4, 7]
    batch = stored[[0, 1, 3, 4]]
    lines = batch["input_ids"]
    T = max(map(len, lines))
    ids = torch.tensor([[*x, *[0] * (T - len(x))] for x in lines])
    mask = torch.tensor([[1] * len(x) + [0] * (T - len(x)) for x in lines])
    targets = torch.tensor([[*x[1:], *[-100] * (T - len(x) + 1)] for x in batch["labels"]])
    with torch.no_grad():
        logits = made["model"](input_ids=ids, attention_mask=mask).logits.float()
    live = hl.topk(hl.Logits(logits, temperature=1.5), K)
    live = hl.Sparse(live.ids.masked_fill((targets == -100)[..., None], -1), live.logprobs)
    files = hl.Sparse.from_dataset(batch)
    torch.manual_seed(1)
    hidden, weight = torch.randn(*ids.shape, 8), torch.randn(tiny_models.V, 8)
    results = []
    for teacher in (live, files):
        leaf = weight.clone().requires_grad_()
        out = hl.Objective(kl=hl.Term(forward_kl, temperature=1.5))(hl.Linear(hidden, leaf), targets, teacher=teacher)
        out.loss.backward()
        results.append((out.loss.detach(), leaf.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)  # of float32
    logp = (logits / 1.5).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(torch.tensor(batch["entropy"][1][1:]), entropy[1, :8], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(batch["lse"][1][1:]), (logits / 1.5).logsumexp(-1)[1, :8])


def test_what_is_written_is_what_the_model_says() -> None:
    """A scale of the config that the model leaves out is left out; one that only the model knows is refused."""
    size = {"d_model": 16, "n_heads": 2, "n_layers": 1, "max_seq_len": 64, "vocab_size": tiny_models.V}
    torch.manual_seed(0)
    model = transformers.MptForCausalLM(transformers.MptConfig(**size, logit_scale=0.25)).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
        ids = torch.randint(3, tiny_models.V, (1, 7))
        (found,) = teach.likeliest(model, ids.tolist(), K, 1.0)
        wanted = model(ids).logits[0, :-1].log_softmax(-1).topk(K).values
    torch.testing.assert_close(torch.tensor(found["target_logprobs"])[1:], wanted)

    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        def forward(self, **kwargs: Any) -> Any:
            outputs = super().forward(**kwargs)
            outputs.logits = outputs.logits * 2
            return outputs

    with pytest.raises(ValueError, match=r"turns a logit of 1\.5 into 3, but scale=1\.0 .*teach reads both"):
        teach.likeliest(LlamaForCausalLM(tiny_models.model("llama").config), ids.tolist(), K, 1.0)


def test_a_run_goes_on(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teach, "PART", 2)
    whole, seen = teach.likeliest, list[int]()

    def broken(model: Any, sequences: Any, *rest: Any) -> Any:
        if len(seen) == 2:
            raise RuntimeError("the machine went away")
        seen.append(len(sequences))
        return whole(model, sequences, *rest)

    monkeypatch.setattr(teach, "likeliest", broken)
    assert isinstance(CliRunner().invoke(main, made["arguments"]).exception, RuntimeError) and seen == [1, 1]
    monkeypatch.setattr(teach, "likeliest", lambda *call: (seen.append(len(call[1])), whole(*call))[1])
    assert CliRunner().invoke(main, made["arguments"]).exit_code == 0
    assert sum(seen) == 5  # those that were written before were not made again
    assert load_from_disk(str(made["out"]))["input_ids"][:] == made["lines"]
    again = CliRunner().invoke(main, made["arguments"])
    assert again.exit_code == 2 and "holds a finished dataset" in plain(again.output)


def test_a_run_goes_on_with_the_same_data_alone(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teach, "PART", 2)
    whole = teach._write

    def broken(model: Any, lines: Any, folder: Path, *rest: Any) -> None:
        if folder.name != "000000000":
            raise RuntimeError("the machine went away")
        whole(model, lines, folder, *rest)

    monkeypatch.setattr(teach, "_write", broken)
    assert isinstance(CliRunner().invoke(main, made["arguments"]).exception, RuntimeError)
    data = Path(made["arguments"][4])
    told = data.read_text()
    data.write_text("".join(reversed(told.splitlines(keepends=True))))
    refused = CliRunner().invoke(main, made["arguments"])
    assert refused.exit_code == 2 and "--data: sequences 0 to 1 have changed since" in plain(refused.output)
    other = CliRunner().invoke(main, [*made["arguments"], "--temperature", "2"])
    assert other.exit_code == 2 and "was started with other arguments" in plain(other.output)
    data.write_text(told.replace("-100", "3"))
    refused = CliRunner().invoke(main, made["arguments"])
    assert refused.exit_code == 2 and "--data: sequences 0 to 1 " in plain(refused.output)
    data.write_text(told)
    monkeypatch.setattr(teach, "fingerprint", lambda model: "another")
    refused = CliRunner().invoke(main, made["arguments"])
    assert refused.exit_code == 2 and "has different weights from when" in plain(refused.output)
    monkeypatch.undo()
    monkeypatch.setattr(teach, "PART", 2)
    assert CliRunner().invoke(main, made["arguments"]).exit_code == 0
    assert load_from_disk(str(made["out"]))["input_ids"][:] == made["lines"]


def test_refusals(made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says which option was wrong, and leaves nothing behind that the right command would have to agree with."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, text in {
        "beyond": '{"input_ids": [3, 4]}\n{"input_ids": [3, 61]}\n', "float": '{"input_ids": [3.5]}\n', "empty": "",
        "broken": "{not json\n", "other": '{"tokens": [3]}\n', "none": '{"input_ids": [3]}\n{"input_ids": []}\n',
    }.items():  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "file").write_text("")
    data = lambda name: ["--data", str(tmp_path / f"{name}.jsonl")]
    for options, message in (
        (["--k", "100"], "--k: wanted at most 61 columns, which the vocabulary has, got 100"),
        (["--model", str(tmp_path / "nowhere")], "--model: .* could not be loaded"),
        (["--temperature", "0"], "--temperature: wanted a positive number, got 0.0"),
        (["--device", "nowhere"], "--device: nowhere cannot be used"),
        (["--out", str(tmp_path / "file")], "--out: .* is a file; wanted a folder"),
        (data("nowhere"), "--data: .* is no file or folder here, and no dataset of that name was found"),
        (data("beyond"), "--data: sequence 1 has token 61; wanted those of the model, in .0, 61."),
        (data("float"), "--data: sequence 0 has token 3.5"),
        (data("empty"), "--data: .* is empty"),
        (data("broken"), "--data: .* could not be read: .*JSON parse error"),
        (data("other"), "--data: wanted a column input_ids or text, got tokens"),
        (data("none"), "--data: sequence 1 has no tokens"),
    ):
        refused = CliRunner().invoke(main, [*made["arguments"], *options])
        assert refused.exit_code == 2 and re.search(message, plain(refused.output)), (options, refused.output)
        assert "0%" not in refused.output and "it/s" not in refused.output
    assert CliRunner().invoke(main, made["arguments"]).exit_code == 0


BATCH = {
    "target_token_ids": [[[0, 1], [7, 9], [4, 2]], [[0, 1], [5, 3]]],
    "target_logprobs": [[[-9.0, -9.0], [-0.1, -2.5], [-0.5, -1.1]], [[-9.0, -9.0], [-0.2, -2.0]]],
    "target_mask": [[[0, 0], [1, 1], [1, 0]], [[0, 0], [1, 1]]],
}


def changed(batch: dict[str, Any], name: str, x: Any) -> None:
    """With another number in the second token of the first sequence."""
    line = [list(y) for y in batch[name][0]]
    line[1][0] = x
    batch[name] = [line, *batch[name][1:]]


def test_what_a_dataset_returns() -> None:
    """Lists, arrays or tensors, of one line or of several."""
    want = hl.Sparse.from_dataset(BATCH)
    assert want.ids.tolist() == [[[7, 9], [4, -1], [-1, -1]], [[5, 3], [-1, -1], [-1, -1]]]
    stored = Dataset.from_dict(BATCH)
    for kind in (None, "numpy", "torch"):
        lines = stored.with_format(kind)
        assert torch.equal(hl.Sparse.from_dataset(lines[:2]).ids, want.ids), kind
        assert torch.equal(hl.Sparse.from_dataset(lines[1], rows=3).logprobs, want.logprobs[1]), kind
    frame = stored.to_pandas()
    assert torch.equal(hl.Sparse.from_dataset(frame).logprobs, want.logprobs)
    assert torch.equal(hl.Sparse.from_dataset(frame[1:], rows=3).ids[0], want.ids[1])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda b: b.pop("target_mask"), "batch: wanted the columns .*; target_mask is not there"),
        (lambda b: b.update(target_token_ids=[]), "batch: has no sequences"),
        (lambda b: b.update(target_logprobs=b["target_logprobs"][:1]), "target_logprobs: wanted 2 sequences .* got 1"),
        (
            lambda b: b.update(target_mask=[x[1:] for x in b["target_mask"]]),
            r"target_mask: sequence 0 has shape \(2, 2\)",
        ),
        (lambda b: b.update(target_mask=b["target_mask"] * 2), "target_mask: wanted 2 sequences .* got 4"),
        (lambda b: b.update(target_mask=None), "target_mask: wanted 2 sequences .* got NoneType"),
        (lambda b: b.update(target_token_ids=[[[1], [2, 3]], []]), "target_token_ids: sequence 0 has no K numbers"),
        (lambda b: changed(b, "target_token_ids", 7.5), "target_token_ids: sequence 0 wanted whole numbers"),
        (
            lambda b: changed(b, "target_token_ids", -5),
            "target_token_ids: sequence 0 has -5 where target_mask is not 0",
        ),
        (lambda b: changed(b, "target_logprobs", 0.3), "target_logprobs: sequence 0 wanted log-probabilities, got 0.3"),
        (lambda b: changed(b, "target_logprobs", float("nan")), "target_logprobs: .* got nan"),
        (lambda b: b.update(target_token_ids=[[], []]), r"target_token_ids: sequence 0 has shape \(0,\), wanted"),
        (lambda b: b.update(target_token_ids=[3, 4]), r"target_token_ids: sequence 0 has shape \(\), wanted"),
        (
            lambda b: b.update({n: [x[0], [[y[0]] for y in x[1]]] for n, x in b.items()}),
            "sequence 1 has 1 ids per token",
        ),
    ],
)
def test_what_a_dataset_may_not_return(change: Any, message: str) -> None:
    batch = {name: list(x) for name, x in BATCH.items()}
    change(batch)
    with pytest.raises((TypeError, ValueError), match=message):
        hl.Sparse.from_dataset(batch)


def test_a_dataset_is_no_batch() -> None:
    with pytest.raises(TypeError, match=r"batch: wanted columns by name, got Dataset; .* dataset\[:8\]"):
        hl.Sparse.from_dataset(Dataset.from_dict(BATCH))
    for rows, kind in (("3", TypeError), (2, ValueError)):
        with pytest.raises(kind, match="rows: "):
            hl.Sparse.from_dataset(BATCH, rows=rows)
