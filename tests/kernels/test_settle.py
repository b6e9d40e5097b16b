"""Segment objectives that settle in one launch, under Triton's interpreter, against the dense oracle in float64."""

import re
from importlib import import_module

import oracle
import pytest
import torch
from interpreting import INSIDE, inside, interpreted
from test_contract import needs_inputs, term_for
from torch.utils._python_dispatch import TorchDispatchMode

import headloss as hl
from headloss.engine import run
from headloss.losses import (
    cross_entropy,
    forward_kl,
    gmpo,
    gspo,
    gspo_token,
    jsd,
    kto,
    reverse_kl,
    skew_kl,
    vespo,
    z_loss,
)

pytest.importorskip("triton")
SETTLES = "one launch for the facts, one that settles the segments, one for the gradient"


test_under_the_interpreter = interpreted(__file__)


def with_agreement(teacher_cross_entropy, teacher_argmax, argmax):
    return teacher_cross_entropy, {"same": (argmax == teacher_argmax).float()}


@pytest.mark.skipif(INSIDE, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("ranks", "teacher_count"), [(1, 0), (8, 0), (1, 1), (1, 2)])
@pytest.mark.parametrize("how", [(False, False), (True, True), (False, True)])
def test_compiles_for_hopper_without_spills(how, ranks, teacher_count, tmp_path):
    from test_triton_compile import ROWS, TARGETS, Built, empty

    from headloss.backends.triton import settle
    from headloss.backends.triton.printer.segments import lower
    from headloss.facts import Want
    from headloss.trace.trace import InputSpec, trace

    shapes = {n: InputSpec("row", torch.float32, ()) for n in ("advantage", "old_logprob", "ref_logprob")}
    shapes["desirable"] = InputSpec("segment", torch.bool, ())
    terms = {"rl": gspo, "kto": kto, "ce": cross_entropy}
    terms |= {"kd": hl.Term(reverse_kl, teacher="a")} if teacher_count else {}
    terms |= {"j": hl.Term(jsd, teacher="b"), "same": hl.Term(with_agreement, teacher="b")} if teacher_count > 1 else {}
    teachers = {name: hl.Logits(empty(ROWS, 8)) for name in "ab"[:teacher_count]}
    terms = {n: x if isinstance(x, hl.Term) else hl.Term(x) for n, x in terms.items()}
    calls = {n: term.call(None, teachers) for n, term in terms.items()}
    own = lambda call: {n: x for n, x in shapes.items() if n in call.input_names}
    traces = {n: trace(call, own(call), torch.float32, "cpu", True) for n, call in calls.items()}
    want = Want([f for call in calls.values() for f in call.facts])
    program = lower({n: (calls[n], traces[n]) for n in calls}, want, shapes)
    ordered, ignore = how
    inputs = {n: empty(8, kind=torch.bool) if n == "desirable" else empty(ROWS) for n in program.inputs}
    each = lambda x: dict.fromkeys(program.terms, x)
    weights = settle.Weights(inputs, each(1.0), each(False) | {"rl": True}, each(empty()))
    spans = settle.Spans(empty(9, kind=torch.int64), empty(ROWS, kind=torch.int64) if ordered else None)
    how = {"vocab": 1000, "device": TARGETS.device, "ignore": ignore, "ranks": ranks}
    call = settle.Settling(program, spans, weights, TARGETS, ROWS, [1.0], **how)
    resources = Built(lambda: call.settle(empty(ranks, 12, ROWS) if ranks > 1 else empty(12, ROWS))).dump(
        "--dump-resource-usage", tmp_path
    )
    usage = re.search(r"REG:(\d+) STACK:(\d+)", resources)
    assert usage is not None and int(usage[2]) == 0, usage


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch):
    """Segments of several blocks, without long segments."""
    if INSIDE:
        settle = import_module("headloss.backends.triton.settle")
        monkeypatch.setattr(settle, "BLOCK", 4)
        monkeypatch.setattr(
            settle, "_spec_of", settle.by_identity(settle._spec_of.__wrapped__)
        )  # which knows no plan yet


def in_float32(problem):
    """The same numbers in both: inputs are float32 here and not float64."""
    narrow = lambda x: x.detach().float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
    inputs = {n: narrow(x).requires_grad_(getattr(x, "requires_grad", False)) if isinstance(narrow(x), torch.Tensor)
              and narrow(x).is_floating_point() else x for n, x in problem.inputs.items()}  # fmt: skip
    return oracle.replace(problem, tensors={n: narrow(x).double() for n, x in problem.tensors.items()}, inputs=inputs)


def launches(objective, problem, **more):
    source = problem.source(problem.leaves(torch.float32), **more)
    return objective.explain(
        source, problem.targets, segments=problem.segments, **oracle.call_arguments(problem)
    ).launches


def check(objective, problem, *, rows=None, how="autograd", settles=True, tolerance=5e-5, **call):
    memory = None if rows is None or problem.kind == "Logits" else problem.budget(rows, itemsize=4)
    assert (launches(objective, problem) == SETTLES) == settles
    got = oracle.run(objective, problem, memory=memory, how=how, dtype=torch.float32, **call)
    said = {k: x for k, x in call.items() if k in ("weights", "grad_scale", "num_items", "num_segments")}
    oracle.check(got, oracle.answer(objective, problem, **said), tolerance, what=f"{problem.kind}, {how}, {rows}")
    return got


# ---------------------------------------------------------------- every segment loss, every way

WAYS = ("autograd", "prepared", "masked", "forward_backward")
REDUCTIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "token_sum", "weighted_mean")


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("fn", [gspo, gspo_token, gmpo, vespo, kto])
def test_every_segment_loss(fn, kind):
    """Ways, budgets and reductions take turns; segments are in no order, one is empty, one has ignored rows only."""
    turn = len(fn.__name__) + len(kind)
    for reduction in REDUCTIONS:
        turn += 1
        shape = ((17,), (3, 5))[turn % 2]  # as many rows that count as segments would be told apart by nothing
        problem = in_float32(oracle.problem_for(fn, kind, shape, peaked=turn % 3 == 0, extra_inputs=("token_weight",)))
        term = term_for(fn, reduction, problem)
        own = needs_inputs(term, problem)
        objective = hl.Objective(term=term, z=hl.Term(z_loss, weight=1e-2), metrics=["entropy"], backend="triton")
        check(objective, own, rows=(None, 9, 3)[turn % 3], how=WAYS[turn % 4])


@inside
@pytest.mark.parametrize("ids", [
    [0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 4, 4],  # in order, one empty
    [0] * 12,  # one for all
    list(range(12)),  # of one row each
    [5, 1, 1, 3, 5, 0, 0, 0, 3, 5, 1, 2],  # in no order
])  # fmt: skip
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_where_segments_lie(ids, ignored, kind):
    problem = in_float32(oracle.problem_for(gspo, kind, (12,), ignored=0.0))
    targets = problem.targets.clone()
    if ignored:
        targets[[0, 4, 5, 11]] = -100
    problem = oracle.replace(problem, segments=hl.Segments.from_ids(torch.tensor(ids), max(ids) + 2), targets=targets)
    problem = oracle.poison(problem)
    objective = hl.Objective(rl=hl.Term(gspo, reduction="seq_mean_token_mean"), backend="triton")
    for how in ("autograd", "masked"):
        check(objective, problem, rows=7, how=how)


# ---------------------------------------------------------------- terms of several kinds


def lagging(logprob, segments=None):
    """Rows without a segment are allowed: they get 0 from it."""
    ratio = (logprob - segments.mean(logprob.detach())).exp()
    return ratio, {"ratio": ratio, "longest_max": segments.totals(torch.ones_like(logprob))}


def nested(logprob, advantage, segments, bonus):
    """Three levels of sums, a value of each segment, and one that a caller gives for each."""
    mean = segments.mean(logprob)
    apart = segments.mean((logprob - mean) ** 2)
    third = segments.totals((logprob - mean) ** 3 / (1 + apart)) * bonus
    return third + segments.means(advantage), {"third": third, "apart": apart, "bonus": bonus}


nested.per_segment = ("bonus",)


@inside
def test_terms_of_several_kinds_and_the_order_of_their_metrics():
    problem = in_float32(oracle.make("Logits", (17,), inputs=("advantage", "old_logprob", "token_weight")))
    bonus = torch.rand(problem.segments.num_segments)
    problem = oracle.replace(problem, inputs={**problem.inputs, "bonus": bonus})
    terms = {
        "ce": hl.Term(cross_entropy, label_smoothing=0.1, row_weight="token_weight"),
        "deep": hl.Term(nested, weight=0.3),
        "rl": hl.Term(gspo, weight=0.5, reduction="seq_mean_token_mean"),
    }
    objective = hl.Objective(**terms, metrics=["accuracy", "entropy"], backend="triton")
    call = {"bonus": hl.PerSegment(bonus), "weights": {"rl": torch.tensor(0.7)}, "grad_scale": 3.0}
    call |= {"num_items": 40, "num_segments": torch.tensor(9)}
    for how in ("autograd", "masked"):
        got = check(objective, problem, how=how, **call)
    torch_ = hl.Objective(**terms, metrics=["accuracy", "entropy"], backend="torch")
    truth = oracle.run(torch_, problem, dtype=torch.float32, **call)
    assert list(got.metrics) == list(truth.metrics)


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_targets_with_gaps(kind):
    problem = in_float32(oracle.problem_for(gspo, kind, (12,), ignored=0.3))
    gaps = torch.stack([problem.targets, problem.targets.flip(0)], 1)[:, 0]
    for how in ("autograd", "prepared"):
        check(hl.Objective(term=gspo, backend="triton"), oracle.replace(problem, targets=gaps), how=how)


@inside
def test_rows_without_a_segment():
    problem = in_float32(oracle.make("Logits", (14,)))
    ids = torch.tensor([-1, 0, 0, -1, 2, 2, 2, -1, 1, 0, 0, -1, 2, 2])
    problem = oracle.replace(problem, segments=hl.Segments.from_ids(ids, 4))
    objective = hl.Objective(it=lagging, ce=cross_entropy, backend="triton")
    for how in ("autograd", "masked"):
        check(objective, problem, how=how)


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_inputs_that_want_a_gradient(kind):
    problem = in_float32(oracle.problem_for(gspo_token, kind, (17,)))
    value = torch.randn(17, requires_grad=True)
    problem = oracle.replace(problem, inputs={**problem.inputs, "value": value})

    def with_critic(logprob, value, segments):
        return segments.mean(logprob) * value + value**2 + value  # its slope is not 0 in ignored rows either

    objective = hl.Objective(rl=gspo_token, critic=hl.Term(with_critic, weight=0.5), backend="triton")
    for rows in (None, 4):
        check(objective, problem, rows=rows)
    per = torch.randn(problem.segments.num_segments, requires_grad=True)
    problem = oracle.replace(problem, inputs={"bonus": per, "advantage": torch.randn(17)})
    check(hl.Objective(deep=nested, backend="triton"), problem, settles=False)


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_transforms_and_facts_at_two_temperatures(kind):
    T = 0.5 + torch.rand(13)
    problem = in_float32(oracle.make(kind, (13,), transform={"temperature": T, "scale": 0.7, "softcap": 5.0}))

    def warm(logprob, hot_entropy, mean_logprob, sum_p2, segments):
        return segments.mean(hot_entropy) * logprob + segments.totals(mean_logprob)[0:].sum() * 0 + sum_p2 * logprob

    def calm(logprob, hot_entropy, mean_logprob, sum_p2, segments):
        return segments.mean(hot_entropy) * logprob + segments.mean(mean_logprob) + sum_p2 * logprob

    term = hl.Term(calm, facts={"hot_entropy": ("entropy", 2.0)})
    check(hl.Objective(it=term, metrics=["accuracy", "lse"], backend="triton"), problem, rows=5)
    batch = hl.Objective(it=hl.Term(warm, facts={"hot_entropy": ("entropy", 2.0)}), backend="triton")
    assert "mixes rows" in launches(batch, problem)


# ---------------------------------------------------------------- what is not settled, and what does not run


@inside
def test_reasons():
    problem = in_float32(oracle.problem_for(gspo, "Logits", (11,)))
    explain = lambda o, source, **more: (
        o.explain(source, problem.targets, segments=problem.segments, **problem.inputs, **more).launches
    )
    whole = hl.Logits(problem.tensors["logits"].float())
    named = hl.Sparse(torch.arange(3).expand(11, 3), torch.full((11, 3), -2.0))
    teacher_count = hl.Objective(rl=gspo, kd=forward_kl, backend="triton")
    why = "(a teacher of some ids, or of a larger vocabulary, is settled in the sweep or apart)"
    assert explain(teacher_count, whole, teacher=named).endswith(why)

    def lengthy(logprob, segments):
        return logprob - segments.mean(logprob), {"long": segments.spread((segments.counts > 2).double())}

    def counted(logprob, segments):
        return logprob - segments.mean(logprob), {"rows": (segments.ids > 0).float()}

    assert launches(hl.Objective(it=lengthy, backend="triton"), oracle.replace(problem, inputs={})) == SETTLES
    reason = launches(hl.Objective(it=counted, backend="triton"), oracle.replace(problem, inputs={}))
    assert "metric 'it/rows'" in reason


def meeting(logprob, warm, slope, segments):
    return -segments.mean(logprob) * slope + segments.mean(warm) * slope / 9


@inside
@pytest.mark.parametrize("way", ["scaler", "direct"])
def test_float16_next_to_far_larger_rows(way, monkeypatch):
    """Segments that weigh 1e-6 of others: written before the scale of the loss is known, their gradient would be 0."""
    monkeypatch.setattr(run, "_rounded_twice", lambda *_: False)  # a GPU's numbers nobody reads
    N, V, up = 16, 17, 2.0**15
    ids = torch.arange(N) // 4
    targets, segments, slope = torch.arange(N), hl.Segments.from_ids(ids, 4), 10.0 ** (-2.0 * ids)
    objective = hl.Objective(it=hl.Term(meeting, facts={"warm": ("lse", 2.0)}), backend="triton")
    raw = torch.randn(N, V).half()
    leaf, z = raw.clone().requires_grad_(), raw.double().requires_grad_()
    call = {"segments": segments, "slope": slope, "num_items": 10}
    logp = z.log_softmax(-1)[torch.arange(N), targets] - (z / 2).logsumexp(-1) / 9
    mean = torch.zeros(4).double().index_add(0, ids, logp) / 4
    ((-mean[ids] * slope.double()).sum() / 10 * up).backward()
    if way == "direct":
        found = objective.forward_backward(hl.Logits(leaf), targets, grad_scale=up, **call).grads.logits
    else:
        (objective(hl.Logits(leaf), targets, **call).loss * up).backward()
        found = leaf.grad
    for rows in torch.arange(N).split(4):
        error = (found[rows].double() - z.grad[rows]).norm() / z.grad[rows].norm()
        assert error < 4e-3, (int(rows[0]), float(error))


@inside
@pytest.mark.parametrize("way", ["scaler", "direct", "known", "again"])
@pytest.mark.parametrize("kind", ["Logits", "chunks", "one chunk", "longer than a chunk"])
def test_float16(kind, way):
    """A mean over many rows underflows, and slopes overflow, unless scaled; later chunks have larger ones."""
    N, V = 24, 33
    ids = torch.arange(N) // 6
    targets, segments = torch.arange(N), hl.Segments.from_ids(ids, 4)
    targets[[1, 8, 9]] = -100
    it = hl.Term(meeting, facts={"warm": ("lse", 2.0)})
    objective = hl.Objective(it=it, z=hl.Term(z_loss, weight=1e-3), backend="triton")
    small = torch.full((N,), 1e-3)
    large = 10.0 ** (2.0 + ids)  # beyond what float16 holds
    for slope, items, up in ((small, 10**5, 2.0**16), (large, 10, 1.0)):
        raw = [torch.randn(N, V)] if kind == "Logits" else [torch.randn(N, 8), torch.randn(V, 8)]
        raw = [x.half() for x in raw]
        leaves, exact = ([x.detach().to(d).requires_grad_() for x in raw] for d in (torch.float16, torch.float64))
        rows = {"chunks": 13, "longer than a chunk": 4}.get(kind, N)
        more = {} if kind == "Logits" else {"memory": rows * (2 * 40 + 32 + 16)}
        source = (hl.Logits if kind == "Logits" else hl.Linear)(*leaves, **more)
        call = {"segments": segments, "slope": slope, "num_items": items}
        assert objective.explain(source, targets, segments=segments, slope=slope).launches == SETTLES
        z = exact[0] if kind == "Logits" else exact[0] @ exact[1].T
        live = targets >= 0
        logp = z.log_softmax(-1)[torch.arange(N), targets.clamp(min=0)]
        logp = (logp - (z / 2).logsumexp(-1) / 9).masked_fill(~live, 0)
        mean = torch.zeros(4).double().index_add(0, ids, logp) / torch.zeros(4).double().index_add(
            0, ids, live.double()
        )
        value = (-mean[ids] * slope.double() + 1e-3 * z.logsumexp(-1) ** 2)[live].sum() / items
        (value * up).backward()
        if way == "direct":
            out = objective.forward_backward(source, targets, grad_scale=up, **call)
            grads = [x for x in out.grads if x is not None]
        else:
            out = objective(source, targets, grad_scale=up if way == "known" else 1.0, **call)
            (out.loss * (1.0 if way == "known" else up)).backward(retain_graph=way == "again")
            if way == "again":
                leaves[0].grad = None
                (out.loss * up).backward()
                for x in leaves[1:]:
                    x.grad /= 2
            grads = [x.grad for x in leaves]
        torch.testing.assert_close(out.loss.double(), value.detach(), rtol=1e-3, atol=1e-9)
        for x, y in zip(grads, exact, strict=True):
            assert float((x.double() - y.grad).norm()) <= 4e-3 * float(y.grad.norm()), (kind, items)


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_later_call_runs_no_sums_over_segments_of_its_own(kind):
    problem = in_float32(oracle.problem_for(gspo, kind, (11,), ignored=0.0))
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3])
    problem = oracle.replace(problem, segments=hl.Segments.from_ids(ids, 4))
    objective = hl.Objective(rl=hl.Term(gspo, reduction="seq_mean_token_mean"), backend="triton")
    targets = hl.prepare(problem.targets, problem.segments)
    source = problem.source(problem.leaves(torch.float32))
    with Dispatched() as seen:
        objective.forward_backward(source, targets, **problem.inputs)
    assert not [n for n in seen.names if "segment" in n or "index" in n], seen.names


@inside
def test_facts_and_a_second_backward():
    problem = in_float32(oracle.problem_for(gspo, "Logits", (11,)))
    found = []
    for backend in ("triton", "torch"):
        leaves = problem.leaves(torch.float32)
        out = hl.Objective(rl=gspo, backend=backend)(
            problem.source(leaves), problem.targets, segments=problem.segments, **problem.inputs
        )
        (2 * out.loss + out.facts.logprob.sum()).backward(retain_graph=True)
        out.loss.backward()
        found.append((leaves["logits"].grad, out.facts.logprob.detach()))
    torch.testing.assert_close(found[0], found[1], rtol=2e-5, atol=2e-6)


@inside
def test_without_gradients_and_without_rows():
    problem = in_float32(oracle.problem_for(gspo, "Linear", (11,)))
    objective = hl.Objective(rl=gspo, backend="triton")
    call = {"segments": problem.segments, **problem.inputs}
    source = problem.source(problem.leaves(torch.float32))
    with torch.no_grad():
        out = objective(source, problem.targets, **call)
    torch.testing.assert_close(out.loss.double(), oracle.answer(objective, problem).loss, rtol=5e-5, atol=5e-5)
    empty = objective(source, torch.full_like(problem.targets, -100), **call)
    empty.loss.backward()
    assert float(empty.loss) == 0.0


# ---------------------------------------------------------------- rows that do not meet, where they are few

FEW = f"{SETTLES.replace('segments', 'rows')} (so few rows are swept faster in parts)"


def everything(logprob, lse, entropy, sum_p2, mean_logprob, advantage):
    return advantage * (logprob + 0.1 * lse) - entropy * sum_p2 - mean_logprob, {"high": entropy.detach() > 1}


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("how", WAYS)
def test_few_rows_are_settled_in_one_launch(kind, how, monkeypatch):
    """Rows in parts, and chunks that are no whole number of runs; a later call is no other."""
    from headloss.backends.triton import sweeps, visit
    from headloss.backends.triton.launch import Launch

    monkeypatch.setattr(sweeps, "BATCH_INVARIANT", False)
    monkeypatch.setattr(visit, "takes_one_launch", lambda C, V: False)
    monkeypatch.setattr(sweeps, "_width_for", lambda C, V, block: block)
    run, seen = Launch.run, []
    monkeypatch.setattr(Launch, "run", lambda *call: seen.append(call[0].kernel.__name__) or run(*call))
    problem = in_float32(oracle.problem_for(everything, kind, (17,), vocab=1100, extra_inputs=("token_weight",)))
    if kind == "Logits" and how == "autograd":
        problem.inputs["advantage"].requires_grad_()
    terms = {
        "all": hl.Term(everything, reduction="seq_mean_token_mean"),
        "warm": hl.Term(cross_entropy, temperature=2.0, reduction="weighted_mean", row_weight="token_weight"),
        "z": hl.Term(z_loss, weight=1e-2, reduction="token_sum"),
    }
    objective = hl.Objective(**terms, metrics=["argmax", "entropy"], backend="triton")
    memory = problem.budget(6, itemsize=4) if kind == "Linear" else None
    assert launches(objective, problem) == FEW
    want = oracle.answer(objective, problem)
    for _ in range(2):
        seen.clear()
        got = oracle.run(objective, problem, memory=memory, how=how, dtype=torch.float32)
        oracle.check(got, want, 5e-5, what=f"{kind}, {how}")
        chunks = seen.count("sums_kernel")
        assert seen.count("settle_kernel") == seen.count("merge_kernel") == chunks and "visit_kernel" not in seen, seen
        assert (chunks > 1) == (kind == "Linear") and seen.count("totals_kernel") == 1


def entropy_gap(teacher_entropy, reverse_cross_entropy, shared_entropy):
    return (reverse_cross_entropy - shared_entropy) * teacher_entropy


def agreed(argmax, teacher_argmax):
    return (argmax == teacher_argmax).float()


WITH_TEACHER = {
    "f": forward_kl,
    "r": hl.Term(reverse_kl, temperature=2.0, weight=0.3),
    "e": hl.Term(entropy_gap, weight=0.2),
    "ce": hl.Term(cross_entropy, label_smoothing=0.1),
}


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("meet", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_a_dense_teacher(kind, meet, how, monkeypatch):
    """Of few rows, which one program each sweeps, and next to losses of segments; later calls too."""
    from headloss.backends.triton import sweeps, visit
    from headloss.backends.triton.launch import Launch

    monkeypatch.setattr(sweeps, "BATCH_INVARIANT", False)
    monkeypatch.setattr(visit, "takes_one_launch", lambda C, V: False)
    run, seen = Launch.run, []
    monkeypatch.setattr(Launch, "run", lambda *call: seen.append(call[0].kernel.__name__) or run(*call))
    more = {"rl": hl.Term(gspo, reduction="seq_mean_token_mean")} if meet else {}
    names = oracle.inputs_of(gspo) if meet else ()
    problem = in_float32(oracle.make(kind, (17,), vocab=41, inputs=names, teacher=True))
    problem = oracle.replace(problem, teacher=problem.teacher.float().double())
    objective = hl.Objective(**WITH_TEACHER, **more, metrics=["entropy", agreed], backend="triton")
    assert (launches(objective, problem) == SETTLES) == meet
    want, memory = oracle.answer(objective, problem), problem.budget(12, itemsize=4) if kind == "Linear" else None
    for _ in range(2):
        seen.clear()
        got = oracle.run(objective, problem, memory=memory, how=how, dtype=torch.float32)
        oracle.check(got, want, 5e-5, what=f"{kind}, {how}")
        assert ("settle_kernel" in seen) == meet != ("visit_kernel" in seen), seen


@inside
@pytest.mark.parametrize("tail", ["bucket", "none", "renormalise"])
def test_ids_of_few_rows(tail, monkeypatch):
    """One launch, however few the rows are; later calls too."""
    from headloss.backends.triton import sweeps, visit
    from headloss.backends.triton.launch import Launch

    monkeypatch.setattr(sweeps, "BATCH_INVARIANT", False)
    monkeypatch.setattr(visit, "takes_one_launch", lambda C, V: False)
    run, seen = Launch.run, []
    monkeypatch.setattr(Launch, "run", lambda *call: seen.append(call[0].kernel.__name__) or run(*call))
    x, targets = torch.randn(9, 41), torch.arange(9)
    logprobs, ids = torch.randn(9, 41).log_softmax(-1).topk(5)
    terms = {"ce": cross_entropy, "kd": hl.Term(forward_kl, tail=tail)}
    both = {name: hl.Objective(**terms, backend=name) for name in ("triton", "torch")}
    found = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32), ("triton", torch.float32)):
        seen.clear()
        leaf = x.clone().to(dtype).requires_grad_()
        both[backend](hl.Logits(leaf), targets, teacher=hl.Sparse(ids, logprobs)).loss.backward()
        found.append(leaf.grad)
        assert seen.count("visit_kernel") == (backend == "triton") and "settle_kernel" not in seen, seen
    torch.testing.assert_close(found[1].double(), found[0], rtol=5e-5, atol=5e-6)
    assert torch.equal(found[1], found[2])


@inside
@pytest.mark.parametrize("meet", [False, True])
def test_a_teachers_head(meet, monkeypatch):
    """Whose logits are made of some rows at a time; columns that one of the two rules out, and a second backward."""
    from headloss.backends.triton import sweeps, visit

    monkeypatch.setattr(sweeps, "BATCH_INVARIANT", False)
    monkeypatch.setattr(visit, "takes_one_launch", lambda C, V: False)
    more = {"rl": hl.Term(gspo, reduction="seq_mean_token_mean")} if meet else {}
    problem = in_float32(oracle.make("Logits", (17,), vocab=41, inputs=oracle.inputs_of(gspo) if meet else ()))
    problem.tensors["logits"][4, 5:9] = -torch.inf
    hidden, weight = torch.randn(17, 5), torch.randn(41, 5)
    found = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        teacher = hl.Linear(hidden.to(dtype), weight.to(dtype), memory=4 * 41 * 5, temperature=0.7)
        leaves = problem.leaves(dtype)
        call = {"segments": problem.segments, "teacher": teacher, **problem.inputs}
        out = hl.Objective(**WITH_TEACHER, **more, backend=backend)(problem.source(leaves), problem.targets, **call)
        (2 * out.loss + out.facts.logprob.sum()).backward(retain_graph=True)
        out.loss.backward()
        found.append((out.loss.detach().double(), leaves["logits"].grad.double()))
    torch.testing.assert_close(*found, rtol=5e-5, atol=5e-5)


def half_square(logp, logq):
    return (0.5 * logp).exp() * logq


SEVERAL = {
    "a": hl.Term(forward_kl, teacher="a"),
    "b": hl.Term(reverse_kl, teacher="b", temperature=2.0, weight=0.3),
    "j": hl.Term(jsd, teacher="b", weight=0.7),
    "s": hl.Term(skew_kl, teacher="a", temperature=2.0, weight=0.2),
    "v": hl.Term(half_square, teacher="a", weight=0.1),
    "ce": hl.Term(cross_entropy, label_smoothing=0.1),
}


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("meet", [False, True])
@pytest.mark.parametrize("columns", [(41, 41), (41, 29), (30, 29)])
def test_several_teachers(kind, meet, columns, monkeypatch):
    """Of as many columns as the student or fewer, with second reads; rows that do not count, and a second backward."""
    from headloss.backends.triton.launch import Launch

    run, seen = Launch.run, []
    monkeypatch.setattr(Launch, "run", lambda *call: seen.append(call[0].kernel.__name__) or run(*call))
    more = {"rl": hl.Term(gspo, reduction="seq_mean_token_mean")} if meet else {}
    names = oracle.inputs_of(gspo) if meet else ()
    problem = in_float32(oracle.make(kind, (10,), vocab=41, inputs=names, ignored=0.3))
    logits_t = {name: 2 * torch.randn(10, width) for name, width in zip("ab", columns, strict=True)}
    found, launched = [], []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32), ("triton", torch.float32)):
        seen.clear()
        teachers = {name: hl.Logits(x.to(dtype), temperature=1.3) for name, x in logits_t.items()}
        leaves = problem.leaves(dtype)
        memory = {"memory": problem.budget(6, itemsize=4)} if kind == "Linear" else {}
        call = {"segments": problem.segments if meet else None, "teacher": teachers, **problem.inputs}
        objective = hl.Objective(**SEVERAL, **more, metrics=["entropy", "argmax"], backend=backend)
        source = problem.source(leaves, **memory)
        out = objective(source, problem.targets, **call)
        launched.append([x for x in seen if x in ("settle_kernel", "visit_kernel")])
        (2 * out.loss + out.facts.logprob.sum()).backward(retain_graph=True)
        out.loss.backward()
        parts = {
            **out.terms,
            **{n: m.value for n, m in out.metrics.items()},
            **{n: leaf.grad for n, leaf in leaves.items()},
        }
        found.append({n: x.detach().double() for n, x in {**parts, "loss": out.loss}.items()})
    for name, x in found[0].items():
        torch.testing.assert_close(
            found[1][name], x, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert torch.equal(found[1][name], found[2][name]), name
    assert not launched[0] and set(launched[1]) == {"settle_kernel"} and launched[1] == launched[2]
    assert meet or (len(launched[1]) > 1) == (kind == "Linear")  # a segment may not fit


@inside
def test_facts_of_several_teachers():
    """Each by its name, their likeliest columns too, as the losses and metrics read them."""
    x, a, b = torch.randn(9, 41), torch.randn(9, 41), torch.randn(9, 33)
    targets = torch.arange(9)
    terms = {name: hl.Term(with_agreement, teacher=name) for name in "ab"}
    found, facts = [], []
    for backend in ("torch", "triton"):
        out = hl.Objective(**terms, backend=backend)(
            hl.Logits(x.clone().requires_grad_()), targets, teacher={"a": hl.Logits(a), "b": hl.Logits(b)}
        )
        found.append({n: float(m.value) for n, m in out.metrics.items()})
        facts.append({str(fact): x.detach().double() for fact, x in out.facts.items()})
    for name, fact in facts[0].items():
        torch.testing.assert_close(facts[1][name], fact, rtol=1e-4, atol=1e-5)
    assert sum("argmax" in name for name in facts[0]) == 3
    wanted = {"a/same": (x.argmax(1) == a.argmax(1)), "b/same": x.argmax(1) == b.argmax(1)}
    for name, same in wanted.items():
        assert found[0][name] == pytest.approx(found[1][name]) == pytest.approx(float(same.float().mean()))


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("shape", [(9,), (2, 3)])
def test_later_calls_of_few_rows(kind, shape, monkeypatch):
    """They find what they launch, with the weights of their rows on the host or the device, and notice what changed."""
    from headloss.backends.triton import sweeps, visit
    from headloss.backends.triton.launch import Launch
    from headloss.engine.fast_call import FastCall

    few = [True]
    monkeypatch.setattr(sweeps, "BATCH_INVARIANT", False)
    monkeypatch.setattr(visit, "takes_one_launch", lambda C, V: not few[0])
    monkeypatch.setattr(sweeps, "_width_for", lambda C, V, block: block)
    run, ready_run, seen = Launch.run, FastCall.run, []
    monkeypatch.setattr(Launch, "run", lambda *call: seen.append(call[0].kernel.__name__) or run(*call))
    monkeypatch.setattr(FastCall, "run", lambda *call: seen.append("ready") or ready_run(*call))
    terms = {"all": everything, "z": hl.Term(z_loss, weight=1e-2, reduction="token_sum")}
    objective = hl.Objective(**terms, metrics=["argmax", "entropy"], backend="triton")
    for ignored, how in ((0.0, "prepared"), (0.3, "autograd"), (0.3, "masked"), (0.0, "forward_backward")):
        problem = in_float32(oracle.problem_for(everything, kind, shape, vocab=1100, ignored=ignored))
        tensors = {n: x for n, x in problem.tensors.items() if n != "bias"}
        problem = oracle.replace(problem, segments=None, tensors=tensors)
        want = oracle.answer(objective, problem)
        for few[0] in (True, True, False, True, True):
            seen.clear()
            oracle.check(
                oracle.run(objective, problem, how=how, dtype=torch.float32), want, 5e-5, what=f"{kind}, {how}"
            )
            assert ("settle_kernel" in seen) == few[0] != ("visit_kernel" in seen), seen
            assert ("ready" in seen) == (kind == "Logits" or (how == "prepared" and not ignored)), (seen, how, ignored)


@inside
def test_many_rows_after_few(monkeypatch):
    """Both plans of one form, by turns; a loss with values per segment has none for few rows."""
    from headloss.backends.triton import sweeps, visit

    monkeypatch.setattr(sweeps, "BATCH_INVARIANT", False)
    monkeypatch.setattr(visit, "takes_one_launch", lambda C, V: C > 6)
    objective = hl.Objective(ce=cross_entropy, backend="triton")
    for rows in (5, 9, 5, 9):
        problem = in_float32(oracle.problem_for(cross_entropy, "Logits", (rows,)))
        assert (launches(objective, problem) == FEW) == (rows == 5)
        got = oracle.run(objective, problem, dtype=torch.float32)
        oracle.check(got, oracle.answer(objective, problem), 5e-5)
    plain, targets = torch.randn(5, 9), torch.arange(5)
    for _ in range(3):  # alike, so that the third would be a later call of a visit
        leaf, truth = plain.clone().requires_grad_(), plain.double().requires_grad_()
        loss, want = objective(hl.Logits(leaf), targets).loss, -truth.log_softmax(-1).diagonal().mean()
        pulled = torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(want, truth)[0]
        for x, y in ((loss, want), pulled):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-6)
    whole = torch.randn(5, 9).half()
    half, exact = whole.clone().requires_grad_(), whole.double().requires_grad_()
    assert objective.explain(hl.Logits(half), torch.arange(5)).launches == FEW
    (objective(hl.Logits(half), torch.arange(5), num_items=10**6).loss * 2**16).backward()
    (exact.log_softmax(-1).diagonal().sum() * -(2**16 / 1e6)).backward()
    torch.testing.assert_close(half.grad.double(), exact.grad, rtol=2e-3, atol=1e-6)
