"""The scripts that prove things: every fault still applies, and each of them runs, on a small scale."""

from __future__ import annotations

import collections
import json
import math

import pytest
import torch

from benchmarks import every_loss, suite
from headloss.divergence import is_divergence
from headloss.losses import LOSSES
from proof import long_run, soak
from proof.faults import FAULTS, Fault
from proof.mutants import broken
from proof.record import RESULTS, ROOT


@pytest.mark.parametrize("file", sorted({f.file for f in FAULTS}))
def test_every_fault_applies(file: str) -> None:
    """Each text stands in its file exactly once, and the file with the fault in it still compiles."""
    text = (ROOT / "headloss" / file).read_text()
    for fault in FAULTS:
        if fault.file == file:
            assert broken(fault, text) != text
            for test in fault.first:
                assert (ROOT / test.split("::")[0]).exists(), f"{fault.what}: {test} is gone"


def test_faults_are_told_apart() -> None:
    names = collections.Counter((f.file, f.what) for f in FAULTS)
    assert not [name for name, count in names.items() if count > 1]
    assert len(FAULTS) >= 40


def test_a_fault_that_is_gone_is_reported() -> None:
    with pytest.raises(ValueError, match="found it 0 times"):
        broken(Fault("facts.py", "no such text", "", ""), "x = 1\n")
    with pytest.raises(ValueError, match="found it 2 times"):
        broken(Fault("facts.py", "x", "y", ""), "x = 1\nx = 2\n")


def test_report_is_of_this_table() -> None:
    """The committed report knows faults of the table only, and every one that was seeded was caught."""
    report = json.loads((RESULTS / "mutants.json").read_text())
    seeded = {(r["file"], r["what"]) for r in report["faults"]}
    assert seeded <= {(f.file, f.what) for f in FAULTS} and len(seeded) >= 40
    assert not [r["what"] for r in report["faults"] if not r["caught"]]
    assert report["caught"] == report["total"] == len(seeded)


def test_every_loss_is_timed_against_eager() -> None:
    """On small tensors, where the times say nothing: the gradients are the same, and no loss is missing."""
    lines = every_loss.run(16, 97, rounds=1)["lines"]
    assert {line["loss"] for line in lines} == LOSSES.keys() - set(every_loss.LEFT_OUT)
    assert not [line for line in lines if "wrong" in line]
    for loss, number in collections.Counter(line["loss"] for line in lines).items():
        assert number == (7 if is_divergence(LOSSES[loss]) else 1)


def test_a_loss_with_another_gradient_is_not_timed() -> None:
    p = every_loss.Problem(16, 97)
    case = next(every_loss.cases(p))
    found = every_loss.measure(p, case._replace(ours=lambda: 1.01 * case.ours()), 1)
    assert found["wrong"] and "ms" not in found


def test_suite_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every workload, right, with a ratio to the floor in every line."""
    monkeypatch.setattr(suite, "PEERS", {"F.linear_cross_entropy": suite.torch_linear})
    found = suite.run("cpu", tiny=True, seconds=1e9)
    assert {line["workload"] for line in found["workloads"]} == {w.name for w in suite.WORKLOADS}
    for line in found["workloads"]:
        if line["way"] in ("headloss", "eager"):
            assert not line["wrong"], line
        if "failed" not in line:
            assert line["ratio"] == pytest.approx(line["ms"] / line["floor ms"])
    assert {line["grows"] for line in found["scaling"]} == {"N", "V", "D", "losses", "simulated ranks"}
    assert all(math.isfinite(line["ratio"]) for line in found["scaling"])
    assert suite.run("cpu", tiny=True, seconds=0.0)["left out"]


def test_a_peer_that_fails_at_its_full_size_ends_nothing() -> None:
    calls = iter([True, False])

    def peer(b: suite.Batch) -> torch.Tensor:
        if not next(calls):
            raise RuntimeError("out of memory")
        return suite.WORKLOADS[1].eager(b)

    ways = {"headloss": suite.ours(suite.WORKLOADS[1], "20KiB"), "eager": suite.WORKLOADS[1].eager, "peer": peer}
    found = suite.measure(suite.WORKLOADS[1], (64, 97, 16), ways, suite.Clock("cpu", 1e9), torch.float32, 1)
    lines = {line["way"]: line for line in found}
    assert lines["peer"]["failed"] == "RuntimeError: out of memory" and lines["headloss"]["ms"] > 0


def test_suite_gives_no_time_to_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "ours", lambda work, memory: lambda b: 1.01 * work.eager(b))
    clock, work = suite.Clock("cpu", 1e9), suite.WORKLOADS[1]
    ways = {"headloss": suite.ours(work, ""), "eager": work.eager}
    lines = {line["way"]: line for line in suite.measure(work, (64, 31, 8), ways, clock, torch.float32, 1)}
    assert lines["headloss"]["wrong"] and "ms" not in lines["headloss"] and "ms" in lines["eager"]


def test_soak_runs() -> None:
    found = soak.train(0.0, "cpu", least=8)
    assert found["steps"] == 8 and found["steps with a NaN or infinity"] == 0
    assert set(found["series"]) >= {"resident MiB", "traces made", "live tensors"}


def test_soak_tells_a_leak() -> None:
    steps = list(range(0, 1000, 100))
    calm = {"steps": steps, "resident MiB": [500.0] * 10, "live tensors": [9.0] * 10, "traces made": [40.0] * 10}
    assert soak.verdict(calm, 0)["fine"]
    assert not soak.verdict(calm, 1)["fine"]
    assert not soak.verdict(calm | {"resident MiB": [500.0 + 20 * i for i in range(10)]}, 0)["fine"]
    assert not soak.verdict(calm | {"live tensors": [100.0 * i for i in range(10)]}, 0)["fine"]
    assert not soak.verdict(calm | {"traces made": [float(s) for s in steps]}, 0)["fine"]


def test_long_run_is_the_same_training() -> None:
    found = long_run.compare(4, "cpu", ("float32",))
    assert found["largest difference, float32, headloss and torch"] < 1e-5
