"""What an input is: said by its shape, by the function or by the caller, and never guessed.

Dimension key:  N rows   V vocabulary   S segments   P pairs
"""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import headloss as hl
from headloss.losses import LOSSES, cross_entropy, dpo, grpo, gspo, kto, reverse_kl
from headloss.row_weights import off_policy_mask, truncate

N, D = 6, 5
IDS = torch.tensor([4, 0, 0, 2, 5, 2])  # six segments for six rows, some of them empty
TARGETS = torch.tensor([1, -100, 3, 5, 2, 0])
KEEP = TARGETS >= 0
SEGMENTS = hl.Segments.from_ids(IDS, N)
REWARD = torch.tensor([1.0, 10.0, 100.0, 1000.0, 1e4, 1e5])
PAIRS = torch.tensor([[0, 2], [2, 4], [4, 5], [5, 0], [2, 0], [4, 0]])


def spreads(logprob, segments, reward):
    return -logprob * segments.spread(reward)


def by_row(logprob, segments, reward):
    return -segments.mean(logprob) * reward


def by_table(logprob, targets, table):
    return -logprob * table[targets]


def by_table_in_segments(logprob, targets, segments, table):
    return -segments.mean(logprob) * table[targets]


def by_pair(logprob, segments, pairs, margin):
    chosen, rejected = segments.totals(logprob)[pairs].unbind(1)
    return (rejected - chosen) * margin


def of_groups(logprob, segments, groups):
    return segments.totals(logprob)[groups].sum(-1)


def source(kind: str, V: int = 9, rows: int = N) -> tuple[Any, Tensor, list[Tensor]]:
    """A source, its log-probabilities in float64, and the tensors that want a gradient."""
    generator = torch.Generator().manual_seed(V + rows)
    hidden = torch.randn(rows, D, generator=generator, dtype=torch.float64).requires_grad_()
    weight = (2 * torch.randn(V, D, generator=generator, dtype=torch.float64)).requires_grad_()
    if kind == "Linear":
        return hl.Linear(hidden, weight, memory=V * 8 * 2), (hidden @ weight.T).log_softmax(-1), [hidden, weight]
    logits = (hidden @ weight.T).detach().requires_grad_()
    return hl.Logits(logits), logits.log_softmax(-1), [logits]


def close(out: hl.Output, truth: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(out.loss, truth.to(out.loss.dtype))
    ours = torch.autograd.grad(out.loss, leaves, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(truth, leaves, retain_graph=True))


def of_targets(logp: Tensor) -> Tensor:
    return logp[KEEP].gather(-1, TARGETS[KEEP][:, None])[:, 0]


sources = pytest.mark.parametrize("kind", ["Logits", "Linear"])


@sources
def test_one_per_segment(kind: str) -> None:
    on, logp, leaves = source(kind)
    truth = (-of_targets(logp) * REWARD.double()[IDS[KEEP]]).mean()
    out = hl.Objective(l=spreads)(on, TARGETS, segments=SEGMENTS, reward=hl.PerSegment(REWARD.double()))
    close(out, truth, leaves)
    said = functools.update_wrapper(lambda logprob, segments, reward: spreads(logprob, segments, reward), spreads)
    said.per_segment = ("reward",)
    close(hl.Objective(l=said)(on, TARGETS, segments=SEGMENTS, reward=REWARD.double()), truth, leaves)


@sources
def test_one_per_row(kind: str) -> None:
    on, logp, leaves = source(kind)
    mean = SEGMENTS.select(KEEP).mean(of_targets(logp))
    truth = (-mean * REWARD.double()[KEEP]).mean()
    close(hl.Objective(l=by_row)(on, TARGETS, segments=SEGMENTS, reward=hl.PerRow(REWARD.double())), truth, leaves)


@sources
@pytest.mark.parametrize("rows", [N, 9])
def test_whole(kind: str, rows: int) -> None:
    """A table as long as there are rows, on heads that walk two rows at a time."""
    on, logp, leaves = source(kind, V=rows, rows=rows)
    targets = torch.arange(rows).flip(0).masked_fill(torch.arange(rows) == 1, -100)
    keep, table = targets >= 0, torch.arange(1.0, rows + 1).double()
    logprob = logp[keep].gather(-1, targets[keep][:, None])[:, 0]
    close(
        hl.Objective(l=by_table)(on, targets, table=hl.Whole(table)), (-logprob * table[targets[keep]]).mean(), leaves
    )


def test_pairs_as_many_as_segments() -> None:
    on, logp, leaves = source("Linear")
    totals = torch.zeros(N).double().index_add(0, IDS[KEEP], of_targets(logp))
    chosen, rejected = totals[PAIRS].unbind(1)
    margin = torch.arange(1.0, 7.0).double()
    out = hl.Objective(l=by_pair)(on, TARGETS, segments=SEGMENTS, pairs=PAIRS, margin=hl.Whole(margin))
    close(out, ((rejected - chosen) * margin).mean(), leaves)


ROW, SEGMENT, WHOLE = r"hl\.PerRow\({}\)", r"hl\.PerSegment\({}\)", r"hl\.Whole\({}\)"
ASKED: dict[str, tuple[Any, int, dict[str, Any], tuple[str, str]]] = {
    # the loss, the vocabulary, the inputs, and the two readings that the message names
    "rows and segments": (spreads, 9, {"reward": REWARD}, (ROW, SEGMENT)),
    "rows and segments, and more dimensions": (
        lambda logprob, segments, reward: segments.mean(logprob) * reward.sum(-1), 9,
        {"reward": torch.ones(N, 3)}, (ROW, SEGMENT),
    ),
    "flags": (by_row, 9, {"reward": REWARD > 5}, (ROW, SEGMENT)),
    "rows and a table": (by_table, N, {"table": REWARD}, (ROW, WHOLE)),
    "rows, segments and a table": (by_table_in_segments, N, {"table": REWARD}, (ROW, WHOLE)),
    "rows and a matrix": (lambda logprob, table: logprob * table.sum(), N, {"table": torch.ones(N, 2)}, (ROW, WHOLE)),
    "pairs, segments and rows": (by_pair, 9, {"pairs": PAIRS, "margin": REWARD}, (SEGMENT, WHOLE)),
    "an integer table": (of_groups, 9, {"groups": PAIRS}, (SEGMENT, WHOLE)),
    "an integer table and rows": (lambda logprob, groups: logprob * groups.sum(), 9, {"groups": PAIRS}, (ROW, WHOLE)),
    "a row weight": (
        hl.Term(lambda logprob, segments: segments.totals(logprob), row_weight="mask"), 9,
        {"mask": REWARD}, (ROW, SEGMENT),
    ),
    "a row weight that is a function": (
        hl.Term(cross_entropy, row_weight=lambda segments, mask: segments.spread(mask)), 9,
        {"mask": REWARD}, (ROW, SEGMENT),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("way", ["call", "forward_backward", "explain", "compiled", "untraced"])
def test_asked(name: str, way: str) -> None:
    loss, V, inputs, readings = ASKED[name]
    if way == "untraced":
        fn, held = loss.fn if isinstance(loss, hl.Term) else loss, [1.0]
        wrapped = functools.wraps(fn)(lambda *a, **k: fn(*a, **k) * held[0])
        loss = hl.Term(wrapped, row_weight=loss.row_weight) if isinstance(loss, hl.Term) else wrapped
    objective, on = hl.Objective(l=loss), source("Logits", V)[0]
    call = {"explain": objective.explain, "forward_backward": objective.forward_backward}.get(way, objective)
    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(lambda on, *a, **k: objective(on, *a, **k).loss, backend="eager", fullgraph=True)
    asked = next(x for x in inputs if x != "pairs")
    with pytest.raises(Exception, match=f"{asked}: .*fits.*{readings[0].format(asked)}.*{readings[1].format(asked)}"):
        call(on, TARGETS, segments=SEGMENTS, **inputs)


def test_asked_in_a_later_call() -> None:
    """A plan of an earlier call is no answer: there may be as many rows as segments in this one alone."""
    objective = hl.Objective(l=spreads)
    for rows in (5, 7):
        segments = hl.Segments.from_ids(torch.arange(rows) % 3, N)
        objective(source("Logits", rows=rows)[0], torch.zeros(rows).long(), segments=segments, reward=REWARD)
    with pytest.raises(ValueError, match="reward: .*hl.PerRow.*hl.PerSegment.*spreads.per_segment"):
        objective(source("Logits")[0], TARGETS, segments=SEGMENTS, reward=REWARD)


def test_later_calls_ask_too() -> None:
    """A call that says nothing is not taken for an earlier one of another size, or for one that says it."""
    objective = hl.Objective(l=lambda logprob, reward: -logprob * reward.mean())

    def call(V: int, reward: Any) -> torch.Tensor:
        return objective(hl.Logits(torch.zeros(N, V)), torch.zeros(N).long(), reward=reward).loss

    call(9, REWARD), call(N, hl.PerRow(REWARD)), call(N, hl.Whole(REWARD)), call(9, REWARD[0])
    with pytest.raises(ValueError, match="reward: shape .* fits one value per row"):
        call(N, REWARD)
    with pytest.raises(ValueError, match="reward: hl.PerRow of a scalar"):
        call(9, hl.PerRow(REWARD[0]))


@sources
def test_nothing_to_ask(kind: str) -> None:
    """Only one reading fits: no segments are taken, or the rows stand in lines."""
    on, logp, leaves = source(kind)
    reward = REWARD.double()
    out = hl.Objective(l=lambda logprob, reward: -logprob * reward)(on, TARGETS, segments=SEGMENTS, reward=reward)
    close(out, (-of_targets(logp) * reward[KEEP]).mean(), leaves)
    hidden, weight = torch.randn(3, 2, D), torch.randn(9, D)
    lines = hl.Segments.from_batch((3, 2))
    on = hl.Linear(hidden, weight) if kind == "Linear" else hl.Logits(hidden @ weight.T)
    targets = torch.zeros(3, 2).long()
    rows = hl.Objective(l=by_row)(on, targets, segments=lines, reward=torch.arange(6.0).view(3, 2))
    logprob = (hidden @ weight.T).log_softmax(-1)[..., 0]
    torch.testing.assert_close(rows.loss, (-logprob.mean(-1, keepdim=True) * torch.arange(6.0).view(3, 2)).mean())
    some = hl.Objective(l=spreads)(on, targets, segments=lines, reward=torch.arange(3.0))
    torch.testing.assert_close(some.loss, (-logprob * torch.arange(3.0)[:, None]).mean())


ELSEWHERE = {
    "logp",
    "teacher_cross_entropy",
    "logit_dot",
    "value",
    "foreign_logprob",
}  # of a teacher, or of inputs alone
OURS = [n for n, fn in LOSSES.items() if not ELSEWHERE & set(fn.__code__.co_varnames[: fn.__code__.co_argcount])]


@pytest.mark.parametrize("name", OURS)
@sources
def test_ours_are_never_asked_about(name: str, kind: str) -> None:
    """Rows, segments, pairs and columns, all six: the same numbers as with two more rows that are ignored."""
    fn = LOSSES[name]
    parameters = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    named = ("advantage", "old_logprob", "ref_logprob", "sampler_logprob", "draw")
    rows = {n: REWARD.log().double() - 3 for n in named}
    given: dict[str, Any] = {**rows, "desirable": torch.arange(N) % 2 == 0, "kl": REWARD.double(), "pairs": PAIRS}
    given["optimal_advantage"] = REWARD.double()
    inputs = {n: x for n, x in given.items() if n in parameters}
    reward = inputs.keys() & rows.keys()
    on, _, leaves = source(kind, V=N)
    objective = hl.Objective(l=fn)
    segments = {"segments": SEGMENTS} if "segments" in parameters else {}
    out = objective(on, TARGETS, **segments, **inputs)
    ours = torch.autograd.grad(out.loss, leaves)
    more = [
        torch.cat([x, x[:2]]).detach().requires_grad_() if len(x) == N and i == 0 else x for i, x in enumerate(leaves)
    ]
    wide = hl.Linear(*more) if kind == "Linear" else hl.Logits(*more)
    inputs |= {n: torch.cat([inputs[n], inputs[n][:2]]) for n in reward}
    if segments:
        segments = {"segments": hl.Segments.from_ids(torch.cat([IDS, IDS[:2]]), N)}
    again = objective(wide, torch.cat([TARGETS, TARGETS.new_full((2,), -100)]), **segments, **inputs)
    torch.testing.assert_close(out.loss, again.loss)
    torch.testing.assert_close(ours[0], torch.autograd.grad(again.loss, more)[0][:N])
    assert {k: m.per for k, m in out.metrics.items()} == {k: m.per for k, m in again.metrics.items()}
    for k, m in out.metrics.items():
        assert float(m) == pytest.approx(float(again.metrics[k]), nan_ok=True), k


@pytest.mark.parametrize("weight", [truncate(2.0, level="segment"), off_policy_mask(0.5)])
def test_our_row_weights_are_never_asked_about(weight: Any) -> None:
    rows = {"advantage": REWARD.log(), "old_logprob": -REWARD.log(), "sampler_logprob": -REWARD.log()}
    wants = weight.__code__.co_varnames[: weight.__code__.co_argcount]
    inputs = {n: x for n, x in rows.items() if n in (*wants, "advantage", "old_logprob")}
    objective = hl.Objective(l=hl.Term(grpo, row_weight=weight))
    objective(source("Logits", N)[0], TARGETS, segments=SEGMENTS, **inputs)


def kto_truth(logp: Tensor, ref: Tensor, desirable: Tensor) -> Tensor:
    gain = torch.zeros(N).double().index_add(0, IDS[KEEP], of_targets(logp) - ref[KEEP])
    good = torch.where(desirable, 1.0, -1.0).double()
    present = torch.bincount(IDS[KEEP], minlength=N) > 0
    return torch.sigmoid(-good * 0.1 * gain)[present].mean()


@sources
@pytest.mark.parametrize("way", ["eager", "compiled", "compiled, dynamic"])
@pytest.mark.parametrize("wrap", [lambda x: x, hl.PerSegment])
def test_kto_with_as_many_rows_as_segments(kind: str, way: str, wrap: Any) -> None:
    on, logp, leaves = source(kind)
    ref, desirable, objective = REWARD.log().double() - 5, torch.arange(N) > 2, hl.Objective(k=kto)

    def step(on: Any, ref: Tensor, desirable: Tensor) -> Tensor:
        return objective(on, TARGETS, segments=SEGMENTS, ref_logprob=ref, desirable=wrap(desirable)).loss

    if way != "eager":
        torch._dynamo.reset()
        step = torch.compile(step, backend="eager", fullgraph=True)
    if way == "compiled, dynamic":
        for x in (ref, desirable, *leaves[:1]):
            torch._dynamo.maybe_mark_dynamic(x, 0)
    loss = step(on, ref, desirable)
    truth = kto_truth(logp, ref, desirable)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_verified(kind: str) -> None:
    """What a user's own check makes of it."""
    flags, ref = torch.arange(N) > 2, REWARD.log().double() - 5
    call = {"segments": SEGMENTS, "ref_logprob": ref}
    hl.verify(hl.Objective(k=kto), source(kind)[0], TARGETS, desirable=flags, **call).check()
    said = {"segments": SEGMENTS, "reward": hl.PerSegment(REWARD.double())}
    hl.verify(hl.Objective(l=spreads), source(kind)[0], TARGETS, **said).check()
    with pytest.raises(ValueError, match="reward: .*hl.PerSegment"):
        hl.verify(hl.Objective(l=spreads), source(kind)[0], TARGETS, segments=SEGMENTS, reward=REWARD)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("V", [N, 9, 2])
def test_said_in_a_graph(way: str, V: int) -> None:
    """All three, with gradients for the inputs, whatever the vocabulary and the sizes that a form is made with."""
    on, logp, leaves = source("Linear", V)
    targets = TARGETS.clamp(max=V - 1)
    inputs = [x.double().requires_grad_() for x in (REWARD.log(), REWARD.log() + 1, torch.arange(1.0, 1 + V))]

    def loss(logprob, targets, segments, a, b, c):
        return -logprob * segments.spread(a) * b * c[targets]

    objective = hl.Objective(l=loss)

    def step(on: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        kinds = {"a": hl.PerSegment(a), "b": hl.PerRow(b), "c": hl.Whole(c)}
        return objective(on, targets, segments=SEGMENTS, **kinds).loss

    if way == "compiled":
        torch._dynamo.reset()
        step = torch.compile(step, backend="eager", fullgraph=True)
    a, b, c = inputs
    logprob = logp[KEEP].gather(-1, targets[KEEP][:, None])[:, 0]
    truth = (-logprob * a[IDS[KEEP]] * b[KEEP] * c[targets[KEEP]]).mean()
    ours = step(on, a, b, c)
    torch.testing.assert_close(ours, truth)
    leaves = [*leaves, *inputs]
    torch.testing.assert_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(truth, leaves))


def test_graphs_are_told_apart_by_what_functions_say() -> None:
    """Equal code, other declarations: one graph must not serve both."""

    def make(per_segment: tuple[str, ...]) -> Any:
        def loss(logprob, segments, reward):
            return -logprob * reward.sum()

        loss.per_segment = per_segment
        return hl.Objective(l=loss)

    assert make(("reward",)).key != make(()).key
    assert make(()).key == make(()).key


def test_through_the_module_and_a_pickle() -> None:
    head = hl.FusedLMHead(D, 9)
    hidden = torch.randn(N, D)
    objective = hl.Objective(l=spreads)
    inputs = hl.Inputs(segments=SEGMENTS, reward=hl.PerSegment(REWARD))
    first = head(hidden, targets=TARGETS, objective=objective, inputs=inputs).loss
    for wrapper in (hl.PerSegment, hl.PerRow, hl.Whole):
        copied = pickle.loads(pickle.dumps(wrapper(REWARD)))
        assert type(copied) is wrapper and torch.equal(copied.value, REWARD)
        with pytest.raises(AttributeError, match=f"{wrapper.__name__} is immutable"):
            copied.value = REWARD
        assert type(copied.to(torch.float64)) is wrapper and copied.to(torch.float64).value.dtype == torch.float64
        assert f"{wrapper.__name__}((6,), torch.float32)" == repr(copied)
        with pytest.raises(TypeError, match=f"{wrapper.__name__}: wanted a tensor, got list"):
            wrapper([1.0])
        with pytest.raises(TypeError, match=f"{wrapper.__name__}: wanted a tensor, got PerRow"):
            wrapper(hl.PerRow(REWARD))
    loose = tree_map_only(Tensor, lambda x: x.bfloat16(), {"inputs": inputs, "own": hl.PerSegment(REWARD)})
    assert loose["own"].value.dtype == torch.float32  # what casts loose tensors does not look into them
    torch.testing.assert_close(head(hidden, targets=TARGETS, objective=objective, inputs=loose["inputs"]).loss, first)


def no_inputs(logprob, segments, reward):
    return segments.totals(logprob) * reward


def other_rows(logprob, segments, reward):
    return logprob * reward


no_inputs.per_segment, other_rows.per_segment = ("reward",), ()


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "PerSegment of another length": (
        hl.Objective(l=spreads), {"reward": hl.PerSegment(REWARD[:4])},
        r"reward: hl.PerSegment means.*\(4,\) does not fit"),
    "PerRow of another length": (
        hl.Objective(l=by_row), {"reward": hl.PerRow(REWARD[:4])}, r"reward: hl.PerRow means.*\(4,\) does not fit"),
    "PerRow of a scalar": (hl.Objective(l=by_row), {"reward": hl.PerRow(REWARD[0])}, "reward: hl.PerRow of a scalar"),
    "PerRow where a function says per segment": (
        hl.Objective(k=kto), {"ref_logprob": REWARD, "desirable": hl.PerRow(REWARD > 5)},
        r"desirable: term 'k' \(kto\) takes one value per segment, \(S,\), got hl.PerRow"),
    "Whole where a function says per segment": (
        hl.Objective(k=kto), {"ref_logprob": REWARD, "desirable": hl.Whole(REWARD > 5)}, "desirable: .*got hl.Whole"),
    "PerSegment where a function says per row": (
        hl.Objective(l=gspo), {"advantage": hl.PerSegment(REWARD)},
        r"advantage: has one value per segment, where term 'l' \(gspo\).*segments.spread\(advantage\)"),
    "two functions, two readings": (
        hl.Objective(a=no_inputs, b=other_rows), {"reward": REWARD},
        r"reward: term 'b' \(other_rows\) takes one value per row, and term 'a' \(no_inputs\) one per segment"),
    "two functions, two readings, and a wrapper": (
        hl.Objective(a=no_inputs, b=other_rows), {"reward": hl.PerRow(REWARD)}, "reward: .*two names"),
    "rows are spread": (hl.Objective(l=spreads), {"reward": hl.PerRow(REWARD)}, "spread: wanted one value per segment"),
    "segments are summed": (
        hl.Objective(l=lambda logprob, segments, reward: logprob * segments.mean(reward)),
        {"reward": hl.PerSegment(REWARD)}, "means: wanted one value per row"),
    "pairs as rows": (
        hl.Objective(l=dpo), {"ref_logprob": REWARD, "pairs": hl.PerRow(PAIRS)}, "pairs: hl.PerRow means"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_refused(name: str, way: str) -> None:
    objective, inputs, message = REFUSED[name]
    step = lambda on: objective(on, TARGETS, segments=SEGMENTS, **inputs).loss
    if way == "compiled":
        torch._dynamo.reset()
        step = torch.compile(step, backend="eager", fullgraph=True)
        message = message.replace(r"\(4,\)", "(shape|its shape)")
    with pytest.raises(Exception, match=message):
        step(source("Logits")[0])


@pytest.mark.parametrize("way", ["spread", "totals"])
def test_rows_are_no_segments_where_there_are_as_many(way: str) -> None:
    """No length is wrong in this call: the trace knows better, as its rows and segments differ in number."""
    said, fn = {
        "spread": (hl.PerRow(REWARD), lambda logprob, segments, reward: logprob * segments.spread(reward)),
        "totals": (hl.PerSegment(REWARD), lambda logprob, segments, reward: logprob * segments.totals(reward).sum()),
    }[way]
    objective = hl.Objective(l=fn)
    with pytest.raises(ValueError, match=f"{way}: wanted one value per"):
        objective(source("Logits")[0], TARGETS.clamp(min=0), segments=SEGMENTS, reward=said)


def test_two_functions_agree() -> None:
    """What one function says holds for another that says nothing, and for a metric without segments."""
    on, logp, _ = source("Logits")
    reward = REWARD.double()
    objective = hl.Objective(a=no_inputs, b=hl.Term(spreads, weight=2.0), metrics={"reward": lambda reward: reward})
    out = objective(on, TARGETS, segments=SEGMENTS, reward=reward)
    logprob, ids = of_targets(logp), IDS[KEEP]
    present = torch.bincount(ids, minlength=N) > 0
    a = (torch.zeros(N).double().index_add(0, ids, logprob) * reward)[present].mean()
    torch.testing.assert_close(out.loss, a + 2 * (-logprob * reward[ids]).mean())
    metric = out.metrics["reward"]
    assert metric.per == "segment" and float(metric) == pytest.approx(float(reward[present].mean()))


WRONG_WORDS: dict[str, tuple[str, Any, str]] = {
    "a string": ("per_segment", "reward", r"spreading.per_segment: wanted a tuple of names.*'reward'"),
    "no names": ("per_segment", (1,), "spreading.per_segment: wanted a tuple of names"),
    "a number": ("per_segment", 3, "spreading.per_segment: wanted a tuple of names"),
    "a typo": ("per_segment", ("rewards",), r"spreading.per_segment: 'rewards' is none.*did you mean 'reward'"),
    "a fact": ("per_segment", ("logprob",), "spreading.per_segment: 'logprob' is none of its inputs"),
    "no such thing": ("returns", "token", 'spreading.returns: wanted "row", "segment" or "pair", got .token'),
}


@pytest.mark.parametrize("name", WRONG_WORDS)
def test_wrong_declarations(name: str) -> None:
    attribute, value, message = WRONG_WORDS[name]

    def spreading(logprob, segments, reward):
        return -logprob * segments.spread(reward)

    setattr(spreading, attribute, value)
    with pytest.raises((TypeError, ValueError), match=message):
        hl.Objective(l=spreading)


class SavedForBackward:
    factor = 1.0


HELD = SavedForBackward()  # what is read from it may change, so nothing below is traced


def untraced_totals(logprob, segments):
    total = segments.totals(logprob) * HELD.factor
    return total, {"total": total}


def untraced_rows(logprob, segments):
    return segments.mean(logprob) * HELD.factor


def untraced_pairs(logprob, segments, pairs):
    return segments.totals(logprob)[pairs][:, 0] * HELD.factor


UNTRACED = {"segment": untraced_totals, "row": untraced_rows, "pair": untraced_pairs}


@pytest.mark.parametrize("what", UNTRACED)
def test_values_that_no_trace_has_seen(what: str) -> None:
    """As many values as rows, segments and pairs: the function says whose they are, or is asked."""
    targets = TARGETS.clamp(min=0)
    on, logp, leaves = source("Logits")
    inputs = {"pairs": PAIRS} if what == "pair" else {}
    fn = UNTRACED[what]
    with pytest.raises(ValueError, match=rf"{fn.__name__}: .*fits one per row.*{fn.__name__}.returns to 'row' or"):
        hl.Objective(l=fn)(on, targets, segments=SEGMENTS, **inputs)
    said = functools.wraps(fn)(lambda *args, **kwargs: fn(*args, **kwargs))
    said.returns = what
    out = hl.Objective(l=said)(on, targets, segments=SEGMENTS, num_segments=10, num_items=20, **inputs)
    logprob = logp.gather(-1, targets[:, None])[:, 0]
    totals, counts = torch.zeros(N).double().index_add(0, IDS, logprob), torch.bincount(IDS, minlength=N)
    truth = {
        "segment": totals[counts > 0].sum() / 10,
        "row": (totals / counts.clamp(min=1))[IDS].sum() / 20,
        "pair": totals[PAIRS[:, 0]].mean(),
    }[what]
    close(out, truth, leaves)
    if what == "segment":
        assert out.metrics["l/total"].per == "segment"
        assert float(out.metrics["l/total"]) == pytest.approx(totals[counts > 0].mean().item())


@pytest.mark.parametrize("traced", [True, False])
def test_a_function_that_returns_something_else(traced: bool) -> None:
    fn = (
        (lambda logprob, segments: segments.totals(logprob))
        if traced
        else (lambda *a, **k: untraced_totals(*a, **k)[0])
    )
    fn = fn if traced else functools.wraps(untraced_totals)(fn)
    fn.returns = "row"
    segments = hl.Segments.from_ids(torch.arange(N) % 4)
    with pytest.raises(TypeError, match=r".returns: is 'row', but it returns one value per segment"):
        hl.Objective(l=fn)(source("Logits")[0], TARGETS, segments=segments)


def test_metrics_of_as_many_segments_as_rows() -> None:
    targets = TARGETS.clamp(min=0)
    metric = lambda logprob, segments: segments.totals(logprob)
    with pytest.raises(ValueError, match=r"fits one per row and one per segment.*returns"):
        hl.Objective(ce=cross_entropy, metrics={"total": metric})(source("Logits")[0], targets, segments=SEGMENTS)
    metric.returns = "segment"
    on, logp, _ = source("Logits")
    out = hl.Objective(ce=cross_entropy, metrics={"total": metric})(on, targets, segments=SEGMENTS)
    present = torch.bincount(IDS, minlength=N) > 0
    totals = torch.zeros(N).double().index_add(0, IDS, logp.gather(-1, targets[:, None])[:, 0])
    assert float(out.metrics["total"]) == pytest.approx(totals[present].mean().item())


SWITCH = {"factor": 2.0}


def switched(entropy: Tensor, segments: hl.Segments) -> Tensor:
    return SWITCH["factor"] * segments.mean(entropy)


@pytest.mark.parametrize("teacher", [None, "dense", "sparse"])
def test_segments_of_a_row_weight_say_nothing_of_a_loss(teacher: str | None) -> None:
    """As many rows as segments, and a weight that is not traced: the loss has one value per row all the same."""
    torch.manual_seed(0)
    z, segments = torch.randn(3, 7, dtype=torch.float64), hl.Segments.from_ids(torch.tensor([0, 1, 1]), 3)
    logp = z.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    weight = 2 * torch.stack([entropy[0], entropy[1:].mean(), entropy[1:].mean()])
    ids, other = torch.arange(7).expand(3, 7), torch.randn(3, 7, dtype=torch.float64).log_softmax(-1)
    told = {} if teacher is None else {"teacher": hl.Logits(other) if teacher == "dense" else hl.Sparse(ids, other)}
    each = -logp[:, 1] if teacher is None else (logp.exp() * (logp - other)).sum(-1)
    term = hl.Term((lambda logprob: -logprob) if teacher is None else reverse_kl, row_weight=switched)
    for _ in range(2):
        out = hl.Objective(it=term)(hl.Logits(z), torch.ones(3).long(), segments=segments, **told)
        torch.testing.assert_close(out.loss, (each * weight).mean(), rtol=1e-6, atol=1e-8)


def test_a_loss_of_rows_takes_no_value_per_segment() -> None:
    segments, given = hl.Segments.from_ids(torch.tensor([0, 0, 1, 1, 2, 2])), torch.randn(3)
    for advantage in (given, hl.PerSegment(given)):
        with pytest.raises(ValueError, match=r"grpo\) takes one per row; pass segments.spread\(advantage\)"):
            hl.Objective(rl=hl.losses.grpo)(
                hl.Logits(torch.randn(6, 9)), torch.arange(6), segments=segments, advantage=advantage
            )


def test_a_row_weight_per_segment_is_refused_without_a_number_of_the_trace() -> None:
    segments, call = hl.Segments.from_ids(torch.tensor([0, 0, 1, 1, 2, 2])), hl.Term(plain, row_weight="weight")
    with pytest.raises(ValueError, match=r"row_weight: of plain: the weights are of another number \(segments.spread"):
        hl.Objective(a=call)(hl.Logits(torch.randn(6, 9)), torch.arange(6), segments=segments, weight=torch.ones(3))


RETURNS: dict[str, tuple[Any, str]] = {
    "a weight of float": (lambda: hl.Term(plain, row_weight=lambda logprob: 2.0), "row_weight: <lambda> returns float"),
    "no weight": (lambda: hl.Term(plain, row_weight=lambda logprob: None), "row_weight: <lambda> returns NoneType"),
    "a weight and more": (lambda: hl.Term(plain, row_weight=lambda logprob: (logprob, logprob)), "returns tuple"),
    "a complex weight": (lambda: hl.Term(plain, row_weight=lambda logprob: logprob * 1j), "complex128 values"),
    "a wide weight": (lambda: hl.Term(plain, row_weight=lambda logprob: logprob[:, None]), "has 2 dimensions"),
    "a short weight": (
        lambda: hl.Term(plain, row_weight=lambda logprob: logprob[:1]),
        "weights are 1 in all, the values one per row",
    ),
    "three things": (lambda: hl.Term(lambda logprob: (logprob, {}, 1)), r"a tuple of \(tensor, dict, int\)"),
    "one in a tuple": (lambda: hl.Term(lambda logprob: (logprob,)), r"a tuple of \(tensor\)"),
    "metrics in a list": (lambda: hl.Term(lambda logprob: (logprob, [logprob])), "tensor, list"),
    "no metrics": (lambda: hl.Term(lambda logprob: (logprob, None)), "tensor, NoneType"),
    "no metric": (lambda: hl.Term(lambda logprob: (logprob, {"a": None})), "its metric 'a' is NoneType"),
    "text": (lambda: hl.Term(lambda logprob: (logprob, {"a": "x"})), "its metric 'a' is str"),
    "complex values": (lambda: hl.Term(lambda logprob: logprob * 1j), "<lambda>: wanted one real value"),
    "a complex metric": (lambda: hl.Term(lambda logprob: (logprob, {"a": logprob * 1j})), "'a' is torch.complex128"),
}


def plain(logprob: torch.Tensor) -> torch.Tensor:
    return -logprob


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("name", RETURNS)
def test_what_a_function_returns(name: str, kind: str) -> None:
    make, message = RETURNS[name]
    h, w = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), torch.randn(9, 4, dtype=torch.float64)
    source = hl.Linear(h, w) if kind == "Linear" else hl.Logits(h @ w.T)
    with pytest.raises((TypeError, ValueError), match=message):
        hl.Objective(it=make())(source, torch.randint(9, (6,)))


def test_weights_of_rows_for_values_of_segments() -> None:
    objective = hl.Objective(it=hl.Term(lambda logprob, segments: -segments.means(logprob), row_weight="w"))
    segments = hl.Segments.from_ids(torch.tensor([0, 0, 1, 1, 2, 2]))
    with pytest.raises(
        ValueError, match="row_weight: of <lambda>: the weights are one per row, the values one per seg"
    ):
        objective(hl.Logits(torch.randn(6, 9)), torch.zeros(6).long(), segments=segments, w=hl.PerRow(torch.ones(6)))


class Doubled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Five(hl.Segments):
    pass


class Named(torch.Tensor):
    """One that changes nothing."""


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_subclasses_with_code_of_their_own(kind: str) -> None:
    h, w, y = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4), torch.randint(9, (6,))
    source = hl.Linear(h, w) if kind == "Linear" else hl.Logits(h @ w.T)
    weighed = hl.Objective(it=lambda logprob, a: -a * logprob)
    with pytest.raises(TypeError, match=r"a: is a Doubled.*as_subclass"):
        weighed(source, y, a=torch.rand(6).as_subclass(Doubled))
    plain = weighed(source, y, a=torch.ones(6)).loss
    assert float(weighed(source, y, a=torch.ones(6).as_subclass(Named)).loss) == float(plain)  # type: ignore[arg-type]
    assert float(weighed(source, y, a=torch.nn.Parameter(torch.ones(6), requires_grad=False)).loss) == float(plain)
    with pytest.raises(TypeError, match=r"segments: wanted hl.Segments, got Five"):
        segments = Five(torch.tensor([0, 0, 1, 1, 2, 2]), 3)
        hl.Objective(it=lambda logprob, segments: -segments.mean(logprob))(source, y, segments=segments)
    with pytest.raises(ValueError, match="beta: .* does not fit 64 bits"):
        hl.Objective(it=lambda logprob, beta: -beta * logprob)(source, y, beta=10**30)
