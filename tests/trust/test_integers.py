"""Integers of every width, and counts: they work as int64 does, or the call says what is wrong."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as dense

import headloss as hl
from headloss.engine.checks import check_count
from headloss.losses import clip_cov, cross_entropy, dpo, forward_kl, grpo, gspo, reinforce
from headloss.segments import integers

SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32)
WRONG = (torch.uint64, torch.bool, torch.float32, torch.bfloat16, torch.complex64)
fits = pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=str)
wrong = pytest.mark.parametrize("dtype", WRONG, ids=str)
CE = hl.Objective(ce=cross_entropy, metrics=["accuracy"])
V = 256
# 156 is what -100 becomes in eight bits without a sign
TOKENS = {dtype: [1, 100, 99, 3, 100, 7, 9, 100] for dtype in SIGNED} | {
    dtype: [1, 156, 156, 3, 156, 7, 9, 100] for dtype in UNSIGNED
}


def tokens(dtype: torch.dtype, ignored: bool = True) -> tuple[Tensor, Tensor]:
    """The targets in this dtype, and in int64; some are ignored where the dtype can say it."""
    wide = torch.tensor(TOKENS[dtype])
    if ignored and dtype.is_signed:
        wide[[1, 4]] = -100
    return wide.to(dtype), wide


def sources(rows: int = 8) -> list[Any]:
    hidden, weight = torch.randn(rows, 5).double(), torch.randn(V, 5).double()
    return [hl.Logits(hidden @ weight.T), hl.Linear(hidden, weight)]


def selects_rows(dtype: torch.dtype) -> bool:
    """Whether PyTorch can: before 2.9, not of every unsigned one."""
    try:
        torch.zeros(1, dtype=dtype)[torch.tensor([True])]
    except NotImplementedError:
        return False
    return True


@fits
@pytest.mark.parametrize("host_read", [True, False])
def test_targets(dtype: torch.dtype, host_read: bool) -> None:
    narrow, wide = tokens(dtype)
    for on in sources():
        logits = on.logits if isinstance(on, hl.Logits) else on.hidden @ on.weight.T
        for targets in (narrow, hl.prepare(narrow)):
            out = CE(on, targets, host_read=host_read)
            torch.testing.assert_close(out.loss, dense(logits, wide))
            assert out.metrics["accuracy"].value.item() == pytest.approx(
                (logits.argmax(-1) == wide)[wide >= 0].double().mean().item()
            )
        facts = hl.row_facts(on, narrow, ("logprob",), host_read=host_read)
        torch.testing.assert_close(-facts.logprob.sum(), dense(logits, wide, reduction="sum"))
        torch.testing.assert_close(CE.forward_backward(on, narrow).loss, dense(logits, wide))


@fits
def test_targets_in_a_graph(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    narrow, wide = tokens(dtype)
    logits = sources()[0].logits.requires_grad_()
    step = torch.compile(lambda z, t: CE(hl.Logits(z), t).loss, backend="eager", fullgraph=True)
    ours, truth = step(logits, narrow), dense(logits, wide)
    torch.testing.assert_close(ours, truth)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits) for loss in (ours, truth)))


@fits
def test_count_prepare_and_shift(dtype: torch.dtype) -> None:
    narrow, wide = tokens(dtype)
    segments = hl.Segments.from_ids(torch.tensor([0, 0, 0, 1, 1, 1, 3, 3]), 4)
    for more in ((), (segments,)):
        assert dict(hl.count(narrow, *more)) == dict(hl.count(wide, *more))
        ours, truth = hl.prepare(narrow, *more), hl.prepare(wide, *more)
        assert ours.stats == truth.stats and torch.equal(ours.targets, truth.targets)
        shifted = hl.shift_labels(narrow, *more)
        assert torch.equal(shifted.long(), hl.shift_labels(wide, *more)) and shifted[-1] == -100
        on = sources()[0]
        torch.testing.assert_close(CE(on, shifted).loss, dense(on.logits, hl.shift_labels(wide, *more)))
    assert hl.shift_labels(narrow).dtype == (dtype if dtype.is_signed else torch.int64)


@fits
def test_segments(dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 0, 2, 1, 2], dtype=dtype)
    assert torch.equal(hl.Segments.from_ids(ids).ids, ids.long()) and len(hl.Segments.from_ids(ids)) == 3
    high = torch.iinfo(dtype).max if dtype.itemsize == 1 else 200
    offsets = torch.tensor([0, 5, 5, high], dtype=dtype)
    made = hl.Segments.from_cu_seqlens(offsets, rows=high + 2)
    assert torch.bincount(made.ids + 1).tolist() == [2, 5, 0, high - 5]
    positions = torch.tensor([high - 1, high, 0, 1, 0], dtype=dtype)  # above the highest number nothing wraps to 0
    assert hl.Segments.from_position_ids(positions).ids.tolist() == [0, 0, 1, 1, 2]


@fits
def test_pairs_and_teachers(dtype: torch.dtype) -> None:
    on, segments = sources()[1], hl.Segments.from_ids(torch.arange(8) // 2)
    targets, ref = torch.arange(8), torch.randn(8).double()
    pairs = torch.tensor([[0, 1], [3, 2]])
    of = lambda p: hl.Objective(p=dpo)(on, targets, segments=segments, ref_logprob=ref, pairs=p).loss
    torch.testing.assert_close(of(pairs.to(dtype)), of(pairs))
    ids = torch.arange(8)[:, None] + torch.tensor([3, 99 if dtype.itemsize == 1 else 200])
    of = lambda i: hl.Objective(p=forward_kl)(on, targets, teacher=hl.Sparse(i, torch.full((8, 2), -1.0))).loss
    torch.testing.assert_close(of(ids.to(dtype)), of(ids))


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED, torch.bool], ids=str)
def test_rewards(dtype: torch.dtype) -> None:
    """Whole numbers as advantages: -1 is -1 in our formulas, and the mean of a few is a number."""
    on, targets = sources()[0], torch.arange(8)
    reward = (torch.arange(8) % 2).to(dtype)
    objective = hl.Objective(a=reinforce, b=functools.partial(grpo, low=0.1), c=clip_cov)
    of = lambda x: objective(on, targets, advantage=x, draw=torch.linspace(0, 1, 8))
    got, want = of(reward), of(reward.double())
    torch.testing.assert_close(got.terms, want.terms)
    assert float(got.metrics["a/advantage_mean"]) == 0.5
    if selects_rows(dtype):
        hl.verify(objective, on, targets, advantage=reward, draw=torch.linspace(0, 1, 8)).check()
    names: dict[str, Any] = {}
    exec("def own(logprob, reward): return -logprob * reward", names)  # which is of no module
    hl.verify(hl.Objective(own=names["own"]), on, targets, reward=reward.double()).check()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.uint16, torch.float16, torch.bfloat16], ids=str)
def test_row_weights_multiply(dtype: torch.dtype) -> None:
    """The product of several narrow weights neither wraps around nor overflows nor loses digits."""
    on, targets, a = sources()[0], torch.arange(8), torch.full((8,), 125).to(dtype)
    b = torch.full((8,), 1e4).half() if dtype == torch.float16 else a
    objective = hl.Objective(ce=hl.Term(cross_entropy, row_weight=("a", "b"), reduction="token_sum"))
    want = a.double()[0] * b.double()[0] * CE(on, targets, num_items=1).loss
    torch.testing.assert_close(objective(on, targets, a=a, b=b).loss, want)
    if selects_rows(dtype):
        hl.verify(objective, on, targets, a=a, b=b).check()


@wrong
def test_refused(dtype: torch.dtype) -> None:
    x = torch.ones(8).to(dtype)
    message = r"{}: (wanted an integer tensor, got " + str(dtype) + r"|torch.uint64 holds.*pass {}.long\(\))"
    segments = hl.Segments.from_ids(torch.arange(8) // 2)
    calls = {
        "targets": [
            lambda: CE(sources()[0], x), lambda: CE(sources()[1], x, host_read=False), lambda: hl.prepare(x),
            lambda: hl.count(x), lambda: hl.row_facts(sources()[0], x), lambda: CE.forward_backward(sources()[0], x),
            lambda: CE.explain(sources()[0], x),
        ],
        "labels": [lambda: hl.shift_labels(x)],
        "ids": [
            lambda: hl.Segments.from_ids(x), lambda: hl.Segments.from_ids(x, 4),
            lambda: hl.Sparse(x.view(4, 2), torch.zeros(4, 2)),
        ],
        "cu_seqlens": [lambda: hl.Segments.from_cu_seqlens(x), lambda: hl.Segments.from_cu_seqlens(x, rows=9)],
        "position_ids": [lambda: hl.Segments.from_position_ids(x)],
        "pairs": [
            lambda: hl.Objective(p=dpo)(
                sources()[0], torch.arange(8), segments=segments, ref_logprob=torch.zeros(8), pairs=x.view(4, 2)
            )
        ],
    }  # fmt: skip
    for name, forms in calls.items():
        for call in forms:
            with pytest.raises(TypeError, match=message.format(name, name)):
                call()


@pytest.mark.parametrize("x", [[1, 2], 3, None, "ids"], ids=repr)
def test_no_tensors(x: Any) -> None:
    with pytest.raises(TypeError, match=f"targets: wanted an integer tensor, got {type(x).__name__}"):
        hl.prepare(x)
    with pytest.raises(TypeError, match="ids: wanted an integer tensor"):
        hl.Segments.from_ids(x)


OFFSETS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "rows below the last": ([0, 5, 12], {"rows": 8}, "rows: wanted at least 12, got 8"),
    "no rows": ([0, 5], {"rows": 0}, "rows: wanted at least 5, got 0"),
    "rows below the last, unsigned": (torch.tensor([0, 5], dtype=torch.uint8), {"rows": 4}, "rows: wanted at least 5"),
    "rows below 0": ([0, 5], {"rows": -1}, "rows: wanted at least 0, got -1"),
    "rows are a float": ([0, 5], {"rows": 8.0}, "rows: wanted an int, got float"),
    "rows are a flag": ([0, 1], {"rows": True}, "rows: wanted an int, got bool"),
    "falling": ([0, 5, 3], {}, r"cu_seqlens: wanted 0 and then rising offsets, got \[0, 5, 3\]"),
    "falling, unsigned": (torch.tensor([0, 5, 3], dtype=torch.uint8), {}, "cu_seqlens: wanted 0 and then rising"),
    "falling, with rows": ([0, 5, 3], {"rows": 9}, "cu_seqlens: wanted 0 and then rising offsets"),
    "not from 0": ([1, 5], {}, "cu_seqlens: wanted 0"),
    "below 0": ([-1, 5], {"rows": 9}, "cu_seqlens: wanted 0"),
    "two dimensions": ([[0, 5]], {}, "cu_seqlens: wanted a vector"),
    "empty": (torch.empty(0, dtype=torch.long), {}, "cu_seqlens: wanted a vector"),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_offsets(name: str) -> None:
    offsets, options, message = OFFSETS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        hl.Segments.from_cu_seqlens(torch.as_tensor(offsets), **options)


def test_offsets_in_a_graph() -> None:
    """No host looks there: the graph's own check says so."""
    torch._dynamo.reset()
    ids = torch.compile(lambda c: hl.Segments.from_cu_seqlens(c, rows=8).ids, backend="eager", fullgraph=True)
    assert ids(torch.tensor([0, 5, 7])).tolist() == [0] * 5 + [1, 1, -1]
    for offsets in ([0, 5, 12], [0, 5, 3], [1, 5, 7]):
        with pytest.raises(RuntimeError, match="cu_seqlens: wanted 0 and then rising offsets"):
            ids(torch.tensor(offsets))


IDS: dict[str, tuple[Any, Any, str]] = {
    "below -1": ([0, -2], None, r"ids: segment ids must lie in \[-1, 1\), got -2 to 0"),
    "all below -1": ([-7, -2], None, r"ids: segment ids must lie in \[-1, 0\), got -7 to -2"),
    "below -1, counted": ([0, -2], 3, r"ids: segment ids must lie in \[-1, 3\)"),
    "too high": ([0, 3], 3, r"ids: segment ids must lie in \[-1, 3\), got 0 to 3"),
    "too high, unsigned": (torch.tensor([0, 3], dtype=torch.uint16), 3, "ids: segment ids must lie"),
    "a fraction of segments": ([0, 1], 2.0, "num_segments: wanted an int, got float"),
    "a flag for their number": ([0, 0], True, "num_segments: wanted an int, got bool"),
    "fewer than none": ([-1, -1], -2, "num_segments: wanted at least 0, got -2"),
}


@pytest.mark.parametrize("name", IDS)
def test_ids(name: str) -> None:
    ids, number, message = IDS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        hl.Segments.from_ids(torch.as_tensor(ids), number)


def test_ids_where_only_the_call_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, where `from_ids` reads nothing: the call does, on the host or in its own check."""
    for bad in (-2, 3):
        segments = hl.Segments(torch.tensor([0, 1, 2, bad, 1, 0, 2, 2]), 3)
        objective = hl.Objective(g=gspo)
        call = lambda **more: objective(
            sources()[0], torch.arange(8), segments=segments, advantage=torch.ones(8), **more
        )
        with pytest.raises(ValueError, match=rf"segments: id {bad} is outside \[-1, 3\)"):
            call()
        with pytest.raises(ValueError, match=rf"segments: id {bad} is outside \[-1, 3\)"):
            call(host_read=False)
        with monkeypatch.context() as captured:  # as while a CUDA graph is
            captured.setattr("headloss.prepared.readable", lambda x: False)
            with pytest.raises(RuntimeError, match="segments: an id is out of range"):
                call(host_read=False)
    monkeypatch.setattr("headloss.prepared.readable", lambda x: False)
    rows = {"advantage": torch.ones(3), "host_read": False}
    with pytest.raises(RuntimeError, match="segments: rows that are not ignored have no segment"):
        objective(
            hl.Logits(torch.randn(3, 9)), torch.arange(3), segments=hl.Segments(torch.tensor([0, -1, 1]), 2), **rows
        )
    with pytest.raises(RuntimeError, match="targets: out of range"):
        objective(
            hl.Logits(torch.randn(3, 9)), torch.arange(3) + 7, segments=hl.Segments(torch.zeros(3).long(), 1), **rows
        )
    with pytest.raises(ValueError, match="position_ids: wanted one per row, got a scalar"):
        hl.Segments.from_position_ids(torch.tensor(3))


LENGTHS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "spread of rows": ("spread", (4,), r"spread: wanted one value per segment, shape \(2,\), got shape \(4,\)"),
    "spread of one": ("spread", (1,), r"spread: .*\(2,\), got shape \(1,\)"),
    "spread of a scalar": ("spread", (), r"spread: .*\(2,\), got shape \(\)"),
    "spread of a matrix": ("spread", (2, 2), r"spread: .*got shape \(2, 2\)"),
    "totals of segments": ("totals", (2,), r"totals: wanted one value per row, shape \(4,\), got shape \(2,\)"),
    "totals of one": ("totals", (1,), "totals: wanted one value per row"),
    "totals of a matrix": ("totals", (4, 2), "totals: wanted one value per row"),
    "means of one": ("means", (1,), "means: wanted one value per row"),
    "mean of more": ("mean", (5,), "means: wanted one value per row"),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("way", ["by hand", "graph", "traced", "untraced"])
def test_lengths(name: str, way: str) -> None:
    method, shape, message = LENGTHS[name]
    segments, x = hl.Segments.from_ids(torch.tensor([0, 0, 1, 1])), torch.ones(shape)
    call = lambda x: getattr(segments, method)(x)
    if way == "graph":
        if torch.__version__ < "2.9":
            pytest.skip("torch 2.8 says that something was raised, and not what")
        torch._dynamo.reset()
        call = torch.compile(call, backend="eager", fullgraph=True)
    if way == "traced":
        fn = {
            "spread": lambda logprob, segments, x: logprob + segments.spread(x).sum(),
            "totals": lambda logprob, segments, x: logprob + segments.totals(x).sum(),
            "means": lambda logprob, segments, x: logprob + segments.means(x).sum(),
            "mean": lambda logprob, segments, x: logprob + segments.mean(x).sum(),
        }[method]
        call = lambda x: hl.Objective(l=fn)(sources(4)[0], torch.arange(4), segments=segments, x=hl.Whole(x))
    if way == "untraced":
        held = [x]
        fn = lambda logprob, segments: logprob + getattr(segments, method)(held[0]).sum()
        call = lambda x: hl.Objective(l=fn)(sources(4)[0], torch.arange(4), segments=segments)
    if way in ("traced", "untraced") and not shape:
        message = f"{method}: wanted one value per "
    with pytest.raises(Exception, match=message if way == "by hand" else message.split(r"\(")[0]):
        call(x)


def test_lengths_that_fit() -> None:
    ids = torch.tensor([[0, 0], [1, 1]])
    for segments in (hl.Segments.from_ids(ids), hl.Segments.from_ids(ids.view(-1))):
        for x in (torch.arange(4.0), torch.arange(4.0).view(2, 2)):
            assert segments.totals(x).tolist() == [1.0, 5.0] and segments.means(x).tolist() == [0.5, 2.5]
    with pytest.raises(ValueError, match="totals: wanted one value per row"):
        hl.Segments.from_ids(torch.zeros(2, 3).long()).totals(torch.ones(3, 2))


nothing = math.nan
COUNTS = [nothing, math.inf, -math.inf, -1, -1.0, 0.5, 6.5, 1e-9]
COUNTED = {
    "Logits": lambda **n: hl.Objective(l=gspo)(sources()[0], *ARGS, segments=DOCUMENTS, advantage=torch.ones(8), **n),
    "Linear": lambda **n: hl.Objective(l=hl.Term(gspo, reduction="seq_mean_token_sum"))(
        sources()[1], *ARGS, segments=DOCUMENTS, advantage=torch.ones(8), **n
    ),
    "forward_backward": lambda **n: CE.forward_backward(sources()[1], *ARGS, **n),
    "no host read": lambda **n: CE(sources()[0], *ARGS, host_read=False, **n),
}
ARGS, DOCUMENTS = (torch.arange(8),), hl.Segments.from_ids(torch.arange(8) // 2)


@pytest.mark.parametrize("way", COUNTED)
@pytest.mark.parametrize("name", ["num_items", "num_segments"])
@pytest.mark.parametrize("count", COUNTS)
def test_counts(count: float, name: str, way: str) -> None:
    forms = [count, torch.tensor(count)]
    forms += [torch.tensor(count, dtype=torch.float64)] if isinstance(count, float) else [torch.tensor(count).int()]
    for form in forms:
        with pytest.raises(ValueError, match=f"{name}: wanted a count .a whole number, at least 0., got "):
            COUNTED[way](**{name: form})


@pytest.mark.parametrize("name", ["num_items", "num_segments"])
@pytest.mark.parametrize(
    "count", [True, "6", [6], torch.tensor(True), torch.ones(2), torch.ones((), requires_grad=True)]
)
def test_what_is_no_count(count: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: wanted a number or a scalar tensor"):
        CE(sources()[0], *ARGS, **{name: count})


@pytest.mark.parametrize("count", [6, 6.0, torch.tensor(6), torch.tensor(6.0), torch.tensor(6, dtype=torch.uint8)])
def test_counts_that_fit(count: Any) -> None:
    for on in sources():
        whole = CE(on, *ARGS, num_items=8).loss
        torch.testing.assert_close(CE(on, *ARGS, num_items=count).loss, whole * 8 / 6)
        torch.testing.assert_close(
            CE(on, *ARGS, num_items=type(count)(0) if not isinstance(count, Tensor) else count * 0).loss, whole * 8
        )


@pytest.mark.parametrize("count", [nothing, -3, 0.5, torch.tensor(-3), torch.tensor(nothing)])
def test_counts_in_a_graph(count: Any) -> None:
    torch._dynamo.reset()
    step = torch.compile(lambda z, n: CE(hl.Logits(z), *ARGS, num_items=n).loss, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="num_items: wanted a count"):
        step(sources()[0].logits, count)


def test_counts_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There nothing is read: a check goes into the queue."""
    monkeypatch.setattr("headloss.engine.checks.readable", lambda x: False)
    for count in COUNTS:
        with pytest.raises(RuntimeError, match="num_items: wanted a whole number, at least 0"):
            check_count("num_items", torch.tensor(count))
    for good in (torch.tensor(0), torch.tensor(6.0), torch.tensor(6)):
        check_count("num_items", good)
        check_count("num_items", good.to("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    narrow, wide = tokens(dtype)
    logits = torch.randn(8, V, device="cuda")
    torch.testing.assert_close(CE(hl.Logits(logits), narrow.cuda()).loss, dense(logits, wide.cuda()))
    assert (
        hl.Segments.from_cu_seqlens(torch.tensor([0, 5], dtype=dtype).cuda(), rows=7).ids.tolist() == [0] * 5 + [-1] * 2
    )


def test_widened_once() -> None:
    x = torch.arange(3)
    assert integers("x", x) is x


def test_targets_of_another_shape() -> None:
    for targets in (torch.zeros(7).long(), torch.zeros(8, 1).long(), torch.zeros(4, 2).to(torch.uint8)):
        with pytest.raises(ValueError, match=r"targets: wanted shape \(8,\)"):
            CE(sources()[0], targets)
    with pytest.raises(ValueError, match=r"advantage: has shape \(7,\); wanted \(8,\)"):
        hl.Objective(g=grpo)(sources()[0], *ARGS, advantage=torch.ones(7))
