"""`headloss teach`: a teacher on disk is the teacher that was there, and a run that was broken off goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")

from datasets import load_from_disk
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


def test_refusals(made: dict[str, Any], tmp_path: Path) -> None:
    wide = [*made["arguments"][:5], "--k", "100", *made["arguments"][7:]]
    refused = CliRunner().invoke(main, wide)
    assert refused.exit_code == 2 and "wanted at most 61 columns" in plain(refused.output)
    other = CliRunner().invoke(main, made["arguments"])
    assert other.exit_code == 2 and "was begun with other arguments" in plain(other.output)
    with pytest.raises(ValueError, match="batch: wanted the columns .*; target_mask is not there"):
        hl.Sparse.from_dataset({"target_token_ids": [[1]], "target_logprobs": [[0.0]]})
