"""No call waits for work that was queued before it unless it has to; wrong targets are then named late."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import pickle
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreting import BACKEND, INSIDE, interpreted
from torch.nn.functional import cross_entropy as dense

import headloss as hl
from headloss import deferred_checks
from headloss.engine import one_launch
from headloss.engine.plan import why_read
from headloss.losses import cross_entropy, forward_kl, grpo, gspo
from headloss.prepared import Stats, check_stats

CE = hl.Objective(ce=cross_entropy, metrics=["accuracy"])
V = 29


@pytest.fixture(autouse=True)
def nothing_pending() -> Any:
    deferred_checks._PENDING.clear()
    yield
    deferred_checks._PENDING.clear()


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU as if a read from it would wait."""
    for name in ("deferred_checks", "prepared", "rows", "engine.bind", "engine.row_facts"):
        monkeypatch.setattr(f"headloss.{name}.should_defer", lambda device: True)


def problem(rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets = torch.randn(rows, V, dtype=torch.float32 if INSIDE else torch.float64), torch.randint(V, (rows,))
    targets[::4] = -100
    return logits, targets


def ways(logits: torch.Tensor) -> dict[str, Any]:
    segments = hl.Segments.from_ids(torch.arange(len(logits)) // 3)
    device = logits.device
    rows = {
        "advantage": torch.randn(len(logits), device=device),
        "old_logprob": -torch.rand(len(logits), device=device),
    }
    return {
        "ce": lambda y: CE(hl.Logits(logits), y),
        "grpo": lambda y: hl.Objective(rl=grpo)(hl.Logits(logits), y, **rows),
        "gspo": lambda y: hl.Objective(rl=gspo)(
            hl.Logits(logits), y, segments=None if isinstance(y, hl.Prepared) else segments, **rows
        ),
        "kl": lambda y: hl.Objective(kl=forward_kl)(hl.Logits(logits), y, teacher=hl.Logits(logits.flip(0))),
        "direct": lambda y: CE.forward_backward(hl.Logits(logits), y),
    }


NAMES = ("ce", "grpo", "gspo", "kl", "direct")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("deferred")
def test_the_same_as_with_targets_that_were_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = problem()
    call = ways(logits)[name]
    for _ in range(2):  # a later call goes the same way
        with monkeypatch.context() as reading:
            reading.setattr("headloss.prepared.prepare", None)  # nothing reads
            got = call(targets)
        assert deferred_checks._PENDING or not INSIDE
        segments = hl.Segments.from_ids(torch.arange(12) // 3) if name == "gspo" else None
        want = call(hl.prepare(targets, segments))
        torch.testing.assert_close(got.loss, want.loss)
        for key, metric in want.metrics.items():
            assert math.isclose(float(got.metrics[key]), float(metric), rel_tol=1e-5, abs_tol=1e-6), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [V, -7, 1 << 40])
@pytest.mark.usefixtures("deferred")
def test_a_wrong_target_is_named_by_the_next_call(name: str, bad: int) -> None:
    logits, targets = problem()
    call = ways(logits)[name]
    wrong = targets.clone()
    wrong[5] = bad
    try:
        call(wrong)
    except IndexError:
        pytest.skip("PyTorch on a CPU reads a column that is not there, and says so")
    with pytest.raises(ValueError, match=rf"targets: wanted values in \[0, {V}\).*{bad}.*earlier call"):
        call(targets)
    assert torch.isfinite(call(targets).loss)  # once is enough


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("more", [{}, {"num_segments": 4}])  # found as a call before it, or not
def test_a_row_without_a_segment_is_named_late(more: dict[str, Any]) -> None:
    logits, targets = problem()
    rows = {"advantage": torch.randn(12), "old_logprob": -torch.rand(12), **more}
    objective = hl.Objective(rl=gspo, backend=BACKEND)
    for ids, message in ((-1, "1 rows that are not ignored have no segment.*'rl'"), (9, "id 9 is outside")):
        numbers = torch.arange(12) // 3
        numbers[5] = ids
        segments = hl.Segments(numbers, 4)
        with contextlib.suppress(IndexError, RuntimeError):  # on a CPU it is noticed at once
            objective(hl.Logits(logits), targets, segments=segments, **rows)
        with pytest.raises(ValueError, match=message):
            deferred_checks.check_pending(wait=True)
    numbers[4:6] = torch.tensor([-1, 1])  # an ignored row needs none
    assert torch.isfinite(objective(hl.Logits(logits), targets, segments=hl.Segments(numbers, 4), **rows).loss)
    assert deferred_checks._PENDING
    deferred_checks.check_pending(wait=True)


@pytest.mark.usefixtures("deferred")
def test_a_meter_and_facts_say_it_too() -> None:
    logits, targets = problem()
    for ask in (lambda: hl.Meter().compute(), lambda: hl.row_facts(hl.Logits(logits), targets)):
        deferred_checks.check_later(torch.tensor([1, 99, 99]), lambda x: check_stats(Stats.read(x), V))
        with pytest.raises(ValueError, match="targets: .*99.*earlier call"):
            ask()


def test_checks_do_not_pile_up() -> None:
    for _ in range(3 * deferred_checks.MOST_PENDING):
        deferred_checks.check_later(torch.zeros(3), lambda x: None)
    assert len(deferred_checks._PENDING) <= deferred_checks.MOST_PENDING


def test_numbers_that_a_kernel_writes_are_read_when_all_are_there() -> None:
    """And their memory serves the next call, as if nothing had been written to it."""
    spot, seen = deferred_checks.host_slots(torch.device("cpu")), []
    deferred_checks.check_later(spot, lambda x: seen.append(x.tolist()))
    for i, number in enumerate((1, 5, 7)):
        deferred_checks.check_pending()
        assert not seen and not spot.arrived()
        spot.host[i] = number
    deferred_checks.check_pending()
    assert seen == [[1, 5, 7]] and not deferred_checks._PENDING
    again = deferred_checks.host_slots(torch.device("cpu"))
    assert again is spot and not again.arrived()


def test_what_a_kernel_finds_wrong_is_said_once_by_the_next_call() -> None:
    messages = ("teacher: wanted ids in [0, 7), but {} is among them", "teacher {a}: {} are probabilities")
    spot = deferred_checks.alarm(torch.device("cpu"), *messages)
    assert deferred_checks.alarm(torch.device("cpu"), *messages) is spot and len(spot) == 2
    deferred_checks.check_pending(wait=True)
    for i, said in enumerate((r"in \[0, 7\), but 9 is among them", "9 are probabilities")):
        spot[i] = 9
        with pytest.raises(ValueError, match=rf"{said}\.  Found after an earlier"):
            hl.Objective(ce=cross_entropy)(hl.Logits(torch.randn(3, 5)), torch.tensor([0, 1, 2]))
        deferred_checks.check_pending(wait=True)


@pytest.mark.parametrize("late_", [False, True])
def test_targets_with_gaps_are_counted_without_what_lies_in_them(late_: bool, request: pytest.FixtureRequest) -> None:
    if late_:
        request.getfixturevalue("deferred")
    logits, targets = problem()
    gaps = torch.stack([targets, torch.full_like(targets, -100)], 1)[:, 0]
    objective = hl.Objective(ce=cross_entropy, metrics=["accuracy"], backend="triton" if INSIDE else "auto")
    first, whole, later = (objective(hl.Logits(logits), y) for y in (gaps, targets, gaps))
    for apart in (first, later):
        assert float(whole.loss) == float(apart.loss)
        assert [float(x) for x in whole.metrics.values()] == [float(x) for x in apart.metrics.values()]


def test_at_the_end_of_a_process_it_is_still_said() -> None:
    code = """
        import torch, headloss as hl
        from headloss.deferred_checks import check_later
        from headloss.prepared import Stats, check_stats
        check_later(torch.tensor([1, 99, 99]), lambda x: check_stats(Stats.read(x), 9))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True)
    assert "targets: wanted values in [0, 9)" in done.stderr and "earlier call" in done.stderr


@pytest.mark.usefixtures("deferred")
def test_rows_are_read_where_they_have_to_be() -> None:
    """A loss over the batch, a metric that mixes rows, the products of Linear."""
    logits, targets = problem()
    mixing = hl.Objective(it=lambda logprob: -logprob / logprob.detach().abs().max())
    metric = hl.Objective(ce=cross_entropy, metrics={"most": lambda logprob: logprob.max()})
    valid = targets != -100
    logp = logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0][valid]
    torch.testing.assert_close(mixing(hl.Logits(logits), targets).loss, (-logp / logp.abs().max()).mean())
    assert float(metric(hl.Logits(logits), targets).metrics["most"]) == pytest.approx(float(logp.max()), rel=1e-5)
    assert not deferred_checks._PENDING
    meta = torch.empty(12, V, device="meta"), torch.zeros(12, dtype=torch.long, device="meta")
    linear = hl.Linear(torch.empty(12, 4, device="meta"), torch.empty(V, 4, device="meta"))
    for objective, source, because in (
        (CE, hl.Logits(meta[0]), ""),
        (mixing, hl.Logits(meta[0]), "term 'it' must not see ignored rows"),
        (metric, hl.Logits(meta[0]), "metric 'most'"),
        (CE, linear, "left out of the products"),
    ):
        plan = objective.explain(source, meta[1])
        assert plan.host_reads == (because != "") and because in plan.read_because
        assert plan.read_because in str(plan)
        assert objective.explain(source, meta[1], host_read=plan.terms[0].kind == "batch").host_reads in (0, 1)


def test_ranks_that_share_a_call_read() -> None:
    """One that raised late, alone, would leave the others waiting in a collective."""
    whole, shard = types.SimpleNamespace(shard=None), types.SimpleNamespace(shard="a shard")
    group = types.SimpleNamespace(group="a group")
    for source, segments, because in ((whole, None, ""), (shard, None, "together"), (whole, group, "together")):
        found = why_read(source, segments, (), "row")  # type: ignore[arg-type]
        assert because in found and bool(found) == bool(because)


def test_prepared_without_blocking() -> None:
    logits, targets = problem()
    segments = hl.Segments.from_ids(torch.arange(12) // 3)
    slow, quick = hl.prepare(targets, segments), hl.prepare(targets, segments, non_blocking=True)
    assert quick.stats == slow.stats and torch.equal(quick.numbers, slow.numbers)
    again = pickle.loads(pickle.dumps(quick))
    assert again.stats == slow.stats
    torch.testing.assert_close(
        CE(hl.Logits(logits), hl.prepare(targets, non_blocking=True)).loss, dense(logits, targets)
    )
    targets[0] = 3
    with pytest.raises(ValueError, match="written to after hl.prepare"):
        quick.known()


test_under_the_interpreter = interpreted(__file__, "-k", "same_as or wrong_target or named_late or have_to_be or gaps")


# ---------------------------------------------------------------- on a GPU


def busy(ms: float) -> None:
    torch.cuda._sleep(int(ms * 1.5e6))


@pytest.mark.gpu
def test_logits_never_wait() -> None:
    logits, targets = (x.cuda() for x in problem(512))
    logits = logits.float().requires_grad_()
    for name, call in ways(logits).items():
        if name in ("gspo", "kl"):
            continue  # their segments and teachers are made on the host
        call(targets), call(targets)
        torch.cuda.synchronize()
        busy(50)
        begun = time.perf_counter()
        call(targets)
        assert time.perf_counter() - begun < 0.02, name
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_linear_waits_for_the_copy_alone() -> None:
    _, targets = (x.cuda() for x in problem(512))
    hidden, weight = torch.randn(512, 64, device="cuda").bfloat16(), torch.randn(V, 64, device="cuda").bfloat16()
    CE(hl.Linear(hidden, weight), targets)
    torch.cuda.synchronize()
    prepared = hl.prepare(targets, non_blocking=True)
    busy(50)
    begun = time.perf_counter()
    got = CE(hl.Linear(hidden, weight), prepared).loss
    assert time.perf_counter() - begun < 0.02
    torch.testing.assert_close(got, CE(hl.Linear(hidden, weight), targets).loss)


@pytest.mark.gpu
def test_a_wrong_target_on_a_gpu_does_not_kill_the_context() -> None:
    logits, targets = (x.cuda() for x in problem(512))
    wrong = targets.clone()
    wrong[5] = V + 3
    CE(hl.Logits(logits), wrong)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=rf"targets: .*{V + 3}.*earlier call"):
        CE(hl.Logits(logits), targets)
    torch.testing.assert_close(CE(hl.Logits(logits), targets).loss, dense(logits.float(), targets), check_dtype=False)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x["a"] == 1, lambda x: len(x) == 2, lambda x: "b" in x, lambda x: x == {"a": 1, "b": 2}, list, bool,
        lambda x: {**x} == {"a": 1, "b": 2}, lambda x: {"c": 3} | x == {"c": 3, "a": 1, "b": 2}, lambda x: x.get("b"),
        lambda x: dict(x) == {"a": 1, "b": 2}, lambda x: pickle.loads(pickle.dumps(x)) == {"a": 1, "b": 2},
        lambda x: copy.deepcopy(x) == {"a": 1, "b": 2}, lambda x: repr(x) == "{'a': 1, 'b': 2}",
        lambda x: json.dumps(x) == '{"a": 1, "b": 2}', lambda x: x.pop("a") and list(x) == ["b"],
        lambda x: [*x.values()] == [1, 2], lambda x: (lambda a, b: a + b)(**x) == 3,
    ],
)  # fmt: skip
def test_a_dict_that_is_filled_later_is_a_dict(ask):
    made = []
    assert (
        ask(one_launch.LazyDict({"a": made, "b": made}, lambda: made.append(1) or {"a": 1, "b": 2})) and len(made) < 2
    )


def test_a_build_for_cuda_without_a_driver_captures_nothing(monkeypatch):
    """Such a build raises when it is asked about a stream."""
    from headloss.deferred_checks import is_capturing

    def no_driver():
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", no_driver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not is_capturing()
