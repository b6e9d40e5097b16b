"""Objectives in several threads: each loss is traced as it is in one, and what another thread changes is seen."""

import sys
import threading

import torch

import headloss as hl
from headloss.bounded_cache import store
from headloss.metrics import measure_later
from headloss.trace import trace
from headloss.trace.call import CachedReads, Call
from headloss.trace.signature import read_signature

FACTOR = 2.0
N, V, THREADS = 6, 9, 6


def scaled(logprob):
    return -FACTOR * logprob


def made(i):
    """A loss of code that nothing has traced before, and what a call of it takes."""
    kinds = [
        ("logprob, segments", "(logprob - segments.mean(logprob)) ** 2"),
        ("logprob, entropy", "entropy - logprob"),
        ("logp, logq", "(logp.exp() - logq.exp()) ** 2"),
    ]
    names, value = kinds[i % 3]
    scope = {}
    exec(f"def loss({names}): return {i + 1}.0 * ({value})", scope)
    segments, teacher = hl.Segments.from_ids(torch.arange(N) // 2), hl.Logits(torch.randn(N, V))
    return scope["loss"], ({"segments": segments}, {}, {"teacher": teacher})[i % 3]


def test_losses_that_several_threads_trace_at_once(monkeypatch):
    monkeypatch.setattr(trace, "_TRACES", {})
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    start, failed = threading.Barrier(THREADS), []

    def work(objective, call):
        start.wait()
        try:
            objective(hl.Logits(torch.randn(N, V)), torch.arange(N), **call)
        except Exception as error:
            failed.append(error)

    try:
        for turn in range(2):
            losses = [made(turn * THREADS + i) for i in range(THREADS)]
            threads = [threading.Thread(target=work, args=(hl.Objective(a=fn), call)) for fn, call in losses]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed
    assert {(t.kind, t.reason) for t in trace._TRACES.values() if t.kind == "batch"} == set()


def test_a_walk_that_another_thread_has_begun_is_not_believed(monkeypatch):
    watched, marks = CachedReads(Call(scaled, read_signature(scaled), {})), []
    before = watched.interned()
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)

    def reads(call, plain=Call.reads):
        if not marks:
            marks.append(None)
            marks.append(watched.interned())  # as another thread might, just now
        return plain(call)

    monkeypatch.setattr(Call, "reads", reads)
    assert watched.interned() is marks[1] is not before


def test_a_change_while_a_loss_is_traced(monkeypatch):
    monkeypatch.setattr(trace, "_TRACES", {})
    home = sys.modules[__name__]
    hidden, targets = torch.randn(N, V, requires_grad=True), torch.arange(N)
    objective, source = hl.Objective(a=scaled), hl.Linear(hidden, torch.eye(V))

    def traced(*given, plain=trace.trace_any_size):
        monkeypatch.setattr(home, "FACTOR", 5.0)  # as another thread might, just now
        return plain(*given)

    with monkeypatch.context() as patch:
        patch.setattr(trace, "trace_any_size", traced)
        objective(source, targets)
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(hidden, targets), hidden)
    for factor in (2.0, 5.0, 2.0):
        monkeypatch.setattr(home, "FACTOR", factor)
        (found,) = torch.autograd.grad(objective(source, targets).loss, hidden)
        torch.testing.assert_close(found, factor * expected)


class Busy(dict):
    """A cache from which another thread drops what this one is about to."""

    def __iter__(self):
        first = next(super().__iter__())
        if len(self) > 2:
            del self[first]
        return iter([first])


def test_threads_fill_a_cache_at_once():
    kept = Busy({"a": 0, "b": 1, "c": 2})
    assert store(kept, "d", 3, 3) == 3
    assert dict(kept.items()) == {"b": 1, "c": 2, "d": 3}
    assert store(kept, "d", 4, 3) == 4
    assert list(kept.values()) == [1, 2, 4]


def begun_twice(work):
    """The same work, which waits until two threads have begun it."""
    both = threading.Barrier(2)

    def waiting():
        both.wait(10)
        return work()

    return waiting


def in_two_threads(read):
    found = []
    threads = [threading.Thread(target=lambda: found.append(read())) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


def test_facts_and_metrics_that_two_threads_read_first():
    logits, targets = torch.randn(N, V), torch.arange(N).index_fill(0, torch.tensor(1), -100)
    want = hl.Objective(a=scaled, metrics=["entropy"])(hl.Logits(logits), targets)
    out = hl.Objective(a=scaled, metrics=["entropy"])(hl.Logits(logits), targets)
    out.facts._later = begun_twice(out.facts._later)
    found = in_two_threads(lambda: out.facts.entropy)
    assert len(found) == 2 and all(torch.equal(x, want.facts.entropy) for x in found)
    rows = torch.tensor([1.0, 2.0, torch.nan])
    metric = measure_later(["x_std"], begun_twice(lambda: rows[None]), ~rows.isnan(), "token")["x_std"]
    assert in_two_threads(lambda: float(metric)) == [0.5, 0.5]
