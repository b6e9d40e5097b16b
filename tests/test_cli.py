"""The commands `check`, `explain`, `bench`: what they say, and that they notice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import headloss as hl
from headloss.cli import bench, check, explain, main
from headloss.losses import LOSSES, cross_entropy, forward_kl, gspo, simpo
from headloss.row_weights import likely

FEW = {fn.__name__: fn for fn in (cross_entropy, gspo, simpo, forward_kl)}
CONFIG = {
    "terms": {"ce": "cross_entropy", "rl": {"loss": "gspo", "reduction": "seq_mean_token_mean"}},
    "metrics": ["entropy"],
}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LOSSES", FEW)


def test_check_is_green_and_counts_every_path() -> None:
    found = CliRunner().invoke(main, ["check", "--fast", "--device", "cpu", "--json"])
    assert found.exit_code == 0, found.exception or found.output
    report = json.loads(found.stdout)
    assert report["ok"]
    names = {c["what"] for c in report["checks"]}
    assert names >= {"facts", "facts of a teacher", "forward_kl (dense)", "forward_kl (sparse)"}
    assert {n.split(" (")[0] for n in names} >= {*LOSSES} - {"value_loss"}  # which is of inputs alone
    paths = {c["path"] for c in report["checks"] if c["what"] == "gspo"}
    assert paths == {"Logits", "Linear", "Linear, chunks", "no host read", "forward_backward"}
    assert {c["dtype"] for c in report["checks"]} == {"float64", "float32", "bfloat16"}


@pytest.mark.usefixtures("few")
def test_check_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = hl.Objective.__call__

    def wrong(self: hl.Objective, source: object, *args: object, **kwargs: object) -> hl.Output:
        out = right(self, source, *args, **kwargs)  # type: ignore[arg-type]
        return out._replace(loss=out.loss * (1 + 1e-4))

    monkeypatch.setattr(hl.Objective, "__call__", wrong)
    found = CliRunner().invoke(main, ["check", "--fast", "--device", "cpu"])
    assert found.exit_code == 1
    assert "cross_entropy: Logits, torch, float64" in found.stdout.replace("\n", "")


def test_every_loss_gets_what_it_asks_for() -> None:
    problem = check.Problem.make("cpu", 0, 24, 31, 4)
    for name, fn in hl.losses.LOSSES.items():
        for teacher in check.teachers_for(fn):
            leaves = check.leaves_of(problem, "Linear", torch.float64)
            found = check.answer(problem, fn, teacher, hl.Linear(**leaves), leaves, torch.float64)
            assert found.values["loss"].isfinite() and found.grads["weight"].abs().sum() > 0, name
        assert check.teachers_for(fn) or name == "value_loss"  # of inputs alone


def test_check_refuses_a_device_that_is_not_there() -> None:
    assert CliRunner().invoke(main, ["check", "--device", "tpu"]).exit_code == 2


def test_explain_from_json(tmp_path: Path) -> None:
    path = tmp_path / "objective.json"
    path.write_text(json.dumps(CONFIG))
    size = ["--tokens", "4096", "--vocab", "151936", "--hidden", "512"]
    found = CliRunner().invoke(main, ["explain", str(path), *size])
    assert found.exit_code == 0, found.output
    assert "4096 of 4096 rows x 151936 columns" in found.stdout and "gradients    in the same pass" in found.stdout
    plan = json.loads(CliRunner().invoke(main, ["explain", str(path), *size, "--json"]).stdout)
    assert plan["gemms"] == 3 and plan["terms"][1]["kind"] == "segment"


def test_explain_gives_every_loss_what_it_asks_for() -> None:
    own = {"own_targets": hl.Term(cross_entropy, targets="own"), "weighed": hl.Term(gspo, row_weight=likely(0.5))}
    for name, term in {**LOSSES, **own}.items():
        plan = explain.explain(hl.Objective(own=term), 24, 31, 4, segments=4)
        assert "cannot be traced" not in plan.terms[0].reason, name


def test_wrong_sizes_are_wrong_commands(tmp_path: Path) -> None:
    path = tmp_path / "kd.json"
    path.write_text('{"terms": {"kd": "jsd"}}')
    for words, said in (
        (["explain", str(path), "--vocab", "10", "--top-k", "11"], "wanted at most 10 ids"),
        (["explain", str(path), "--tokens", str(10**12)], "Invalid value for '--tokens'"),
        (["explain", str(path), "--memory", "lots"], "Invalid value for --memory: wanted bytes"),
        (["explain", str(path), "--memory", "12"], "Invalid value for --memory: one row of"),
        (["bench", "--memory", "0", "--tokens", "8", "--hidden", "4", "--vocab", "16"], "memory"),
        (["bench", "--memory", "10", "--tokens", "8", "--hidden", "4", "--vocab", "16"], "one row of 16 logits"),
        (["check", "--rows", "8"], "has no effect without --objective"),
        (["check", "--top-k", "8"], "has no effect without --objective"),
        (["losses", "gspo", "--markdown"], "is the whole page"),
        (["losses", "--json", "--markdown"], "is the whole page"),
    ):
        found = CliRunner().invoke(main, words)
        assert found.exit_code == 2 and said in " ".join(found.output.replace("│", " ").split()), found.output


def test_explain_assumes_a_size_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "objective.json"
    path.write_text(json.dumps({"terms": {"ce": "cross_entropy"}}))
    found = CliRunner().invoke(main, ["explain", str(path), "--tokens", "64"])
    assert found.exit_code == 0, found.output
    assert "a head of 64 tokens, vocabulary 128256, hidden size 4096, bf16" in found.stdout
    assert "assumed, because not given: --vocab 128256, --hidden 4096, --dtype bf16\n" in found.stdout
    for word in ("grade", "printing", "specialised", "visit", "first call"):
        assert word not in found.stdout
    told = json.loads(CliRunner().invoke(main, ["explain", str(path), "--tokens", "64", "--json"]).stdout)
    assert told["dtype"] == "bf16" and told["assumed"] == ["vocab", "hidden", "dtype"] and told["vocab"] == 128256


def test_version() -> None:
    found = CliRunner().invoke(main, ["--version"])
    assert found.exit_code == 0 and found.stdout.startswith(f"headloss {hl.__version__} (torch {torch.__version__}, ")
    nothing = CliRunner().invoke(main, [])
    assert "Usage" in nothing.output and "Exit codes" in nothing.output
    assert CliRunner().invoke(main, ["no-such-command"]).exit_code == 2


def test_explain_of_a_rank_is_what_a_shard_says(tmp_path: Path) -> None:
    """A share computed from V / ranks equals the plan of the shard itself, on a group of as many ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    objective = hl.Objective(ce=cross_entropy)
    N, V, D, ranks = 4096, 32000, 64, 4
    found = explain.explain(objective, N, V, D, ranks=ranks, memory="32MiB")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        shard = hl.VocabShard(torch.distributed.group.WORLD, 0, V)
        hidden, weight = (torch.empty(n, D, dtype=torch.bfloat16, device="meta") for n in (N, V // ranks))
        targets = torch.empty(N, dtype=torch.long, device="meta")
        whole = objective.explain(hl.Linear(hidden, weight, shard=shard, memory="32MiB"), targets)
    finally:
        torch.distributed.destroy_process_group()
    assert found.collectives == whole.collectives
    assert list(found.bytes.values()) == list(whole.bytes.values())
    assert found.chunks == whole.chunks > 1


def test_explain_reads_yaml_and_never_evaluates_it(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    size = ["--tokens", "64", "--vocab", "1000", "--hidden", "8", "--top-k", "4"]
    path = tmp_path / "objective.yaml"
    path.write_text("terms:\n  kd: {loss: forward_kl, weight: 0.5}\n  ce: cross_entropy\n")
    found = CliRunner().invoke(main, ["explain", str(path), *size])
    assert found.exit_code == 0, found.output
    assert "tail_logprob of teacher" in found.stdout
    path.write_text("terms: !!python/object/apply:os.system ['true']\n")
    found = CliRunner().invoke(main, ["explain", str(path), *size])
    assert found.exit_code == 2 and "could not determine a constructor" in found.output.replace("\n", " ")


def test_explain_says_what_is_wrong_with_a_config(tmp_path: Path) -> None:
    path = tmp_path / "objective.json"
    path.write_text(json.dumps({"terms": {"ce": "cros_entropy"}}))
    found = CliRunner().invoke(main, ["explain", str(path), "--tokens", "8", "--vocab", "8", "--hidden", "8"])
    assert found.exit_code == 2 and "cross_entropy" in found.output
    found = CliRunner().invoke(main, ["explain", "cross_entropy", "--tokens", "8", "--vocab", "8", "--hidden", "8"])
    assert found.exit_code == 2 and "wanted a file, JSON or YAML" in " ".join(found.output.replace("│", " ").split())
    path.write_text('{"terms": ')
    found = CliRunner().invoke(main, ["explain", str(path)])
    assert found.exit_code == 2 and "not valid JSON" in found.output


SMALL = ["bench", "--device", "cpu", "--tokens", "32", "--vocab", "300", "--hidden", "8", "--rounds", "1"]


def test_bench_times_what_is_right(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = ["--plot", str(tmp_path / "bench.png"), "--out", str(tmp_path / "new" / "bench.json")]
    found = CliRunner().invoke(main, [*SMALL, "--json", *paths])
    assert found.exit_code == 0, found.output
    assert f"numbers written to {paths[3]}\nplot written to {paths[1]}\n" in found.stderr
    assert json.loads(Path(paths[3]).read_text()) == json.loads(found.stdout)
    (head,) = json.loads(found.stdout)["heads"]
    assert {"eager", "headloss, logits", "headloss, hidden"} <= {w["way"] for w in head["ways"]}
    assert all(w["seconds"] > 0 and w["peak"] > 0 for w in head["ways"]) and head["floor"] > 0
    assert (tmp_path / "bench.png").stat().st_size > 1000
    table = CliRunner().invoke(main, [*SMALL, "--vocab", "101"]).stdout
    assert table.count("three GEMMs") == 2 and "32 rows x 101 columns" in table and "wrong" not in table


def test_bench_wants_a_plot_that_can_be_drawn(tmp_path: Path) -> None:
    found = CliRunner().invoke(main, [*SMALL, "--plot", str(tmp_path / "bench.txt")])
    assert found.exit_code == 2 and "wanted a name that ends in .png, .svg, .pdf" in found.output


def test_bench_refuses_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.headloss_ways("1MiB")["headloss, hidden"]
    monkeypatch.setattr(bench, "headloss_ways", lambda memory: {"off": lambda h, w, y: right(h, w, y) * 1.001})
    found = CliRunner().invoke(main, [*SMALL, "--json"])
    assert found.exit_code == 1
    off = next(w for w in json.loads(found.stdout)["heads"][0]["ways"] if w["way"] == "off")
    assert off["seconds"] is None and not off["ok"]


OWN = """
import torch
import headloss as hl
from headloss.losses import cross_entropy, dpo, forward_kl, gspo, kto, uld

beta = 1.0

def right(logprob, entropy, advantage, old_logprob=None, *, power=2.0):
    ratio = (logprob - (logprob.detach() if old_logprob is None else old_logprob)).exp()
    return -ratio * advantage - 0.1 * entropy**power, {"ratio": ratio}

def wrong(logp, logq):
    return logq.exp() * (logq - logp)

wrong.one_pass = lambda teacher_cross_entropy: teacher_cross_entropy

def noisy(logprob):
    return -logprob * torch.rand_like(logprob)

def sparse(ids_logprob, teacher_ids, teacher_logprob):
    held = teacher_ids >= 0
    return -torch.where(held, torch.where(held, ids_logprob, 0.0) * teacher_logprob.exp(), 0.0).sum(-1)

likeliest = hl.Term(lambda top_logprob: top_logprob[:, 0] - top_logprob[:, 1], top=2)
own_targets = hl.Term(cross_entropy, targets="nll_targets")
term = hl.Term(right, row_weight="token_weight", reduction="weighted_mean", power=3.0)

def factory():
    return hl.Objective(
        ce=cross_entropy, rl=gspo, d=dpo, k=kto, kd=hl.Term(forward_kl, temperature=2.0),
        metrics=["entropy", "accuracy", "teacher_agreement", "reverse_kl"],
    )

def fails(logprob):
    return logprob * (1 / 0)

def misspelt(logprobs):
    return -logprobs


number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_losses_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("right", ["--seed", "3"]),
        ("term", ["--dtype", "bfloat16", "--head", "linear"]),
        ("factory", []),
        ("factory", ["--top-k", "5", "--dtype", "float64"]),
        ("sparse", ["--head", "logits"]),
        ("likeliest", ["--dtype", "float64"]),
        ("uld", []),
        ("own_targets", ["--head", "linear"]),
    ],
)
def test_check_of_an_objective_of_ones_own(own: str, name: str, more: list[str]) -> None:
    size = ["--rows", "48", "--vocab", "61", "--hidden", "8", "--device", "cpu"]
    found = CliRunner().invoke(main, ["check", "--objective", f"{own}:{name}", *size, *more])
    assert found.exit_code == 0, found.output
    heads = ["linear", "logits"] if "--head" not in more else [more[-1]]
    assert found.stdout.count("all right") == len(heads)
    assert all(f"{own}:{name}, {head}, " in found.stdout for head in heads)


@pytest.mark.parametrize("name", ["wrong", "noisy"])
def test_check_notices_an_objective_that_is_off(own: str, name: str) -> None:
    size = ["--rows", "40", "--vocab", "61", "--hidden", "8", "--device", "cpu"]
    found = CliRunner().invoke(main, ["check", "--objective", f"{own}:{name}", *size, "--json"])
    assert found.exit_code == 1
    told = json.loads(found.stdout)
    assert not told["ok"] and not told["linear"]["ok"]
    off = [c["what"] for c in told["linear"]["compared"] if not c["ok"]]
    assert ("loss" if name == "wrong" else "the functions, called twice") in off


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("{}", "wanted module:name"),
        ("{}:nothing", "has no 'nothing'"),
        ("no_such_module:a", "cannot import 'no_such_module'"),
        ("{}.py:right", "wanted a module, not a file; write"),
        ("{}:number", "wanted an Objective, a Term or a function, got int"),
        ("{}:right --dtype int8", "wanted one of float64"),
        ("{}:right --head both", "wanted one of linear, logits"),
        ("{}:right --top-k 3", "uses no teacher"),
        ("{}:factory --top-k 100000", "wanted at most 1003 ids, the vocabulary, got 100000"),
        ("{}:fails", "ZeroDivisionError: division by zero (own_losses_"),
        ("{}:misspelt", "Random data was made for the inputs logprobs."),
    ],
)
def test_check_says_what_is_wrong_with_an_objective(own: str, said: str, message: str) -> None:
    found = CliRunner().invoke(main, ["check", "--device", "cpu", "--objective", *said.format(own).split()])
    assert found.exit_code == 2
    words = " ".join(found.output.replace("│", " ").split())
    assert message in words, words


@pytest.mark.parametrize("text", ["def (", "nobody", "1 / 0"])
def test_check_says_that_a_file_is_broken(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"broken_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(main, ["check", "--device", "cpu", "--objective", f"{name}:loss"])
    assert found.exit_code == 2 and "cannot import" in found.output and "Error" in found.output
