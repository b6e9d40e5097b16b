"""`hl.verify`: right objectives pass on every source, wrong ones are caught, and what it cannot check it says."""

import json
import math
import types

import oracle
import pytest
import torch

import headloss as hl
from headloss.losses import (
    LOSSES,
    cross_entropy,
    dpo,
    entropy_bonus,
    forward_kl,
    grpo,
    gspo,
    jsd,
    kto,
    reverse_kl,
    z_loss,
)
from headloss.trace import trace as plan

N, V, D = 50, 37, 5
SEGMENTS = hl.Segments.from_cu_seqlens(torch.tensor([0, 7, 8, 20, 31, 42, 50]))


def data(dtype=torch.float32, lead=(N,)):
    targets = torch.randint(V, lead)
    targets.view(-1)[::9] = -100
    draw = lambda *shape: torch.randn(*lead, *shape)
    return targets, {
        "logits": (3 * draw(V)).to(dtype).requires_grad_(),
        "hidden": draw(D).to(dtype).requires_grad_(),
        "weight": (2 * torch.randn(V, D)).to(dtype).requires_grad_(),
        "bias": torch.randn(V).to(dtype).requires_grad_(),
        "advantage": draw(),
        "old_logprob": -3 * torch.rand(lead),
    }


def sources(x, **more):
    return {
        "logits": hl.Logits(x["logits"], **more),
        "linear": hl.Linear(x["hidden"], x["weight"], x["bias"], **more),
        "chunks": hl.Linear(x["hidden"], x["weight"], memory=5 * V * 8, **more),
    }


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("name", sorted(oracle.LOSSES.keys() - {"value_loss"}))  # which is of inputs alone
def test_every_loss_passes(name, kind):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        problem = oracle.problem_for(oracle.LOSSES[name], kind, (40,))
        objective = hl.Objective(it=oracle.LOSSES[name], metrics=["entropy", "accuracy", "perplexity"])
        leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in problem.tensors.items()}
        given = oracle.call_arguments(problem, torch.float32)
        report = hl.verify(objective, problem.source(leaves), problem.targets, segments=problem.segments, **given)
        assert report.check() is report and report.ok
        names = [c.what for c in report.compared]
        assert {"loss", "term it", "metric entropy", "metric accuracy", "metric perplexity"} <= set(names)
        assert {f"gradient of {n}" for n in leaves} <= set(names)


@pytest.mark.parametrize("where", ["logits", "linear", "chunks"])
@pytest.mark.parametrize(
    "said",
    [
        {"temperature": 0.5},
        {"scale": 0.7, "softcap": 5.0},
        {"temperature": torch.linspace(0.5, 2.0, N), "softcap": 8.0},
    ],
    ids=["temperature", "softcap", "per row"],
)
def test_what_a_source_says(where, said):
    targets, x = data()
    objective = hl.Objective(
        ce=hl.Term(cross_entropy, label_smoothing=0.1), z=hl.Term(z_loss, weight=0.01, temperature=2.0),
        h=hl.Term(lambda entropy, hot: -entropy * hot, facts={"hot": ("sum_p2", 3.0)}), metrics=["lse", "max_logprob"],
    )  # fmt: skip
    hl.verify(objective, sources(x, **said)[where], targets).check()


@pytest.mark.parametrize("where", ["logits", "linear", "chunks"])
@pytest.mark.parametrize("reduction", ["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_reductions_weights_counts(where, reduction):
    targets, x = data()
    length = {"length": 20.0} if reduction.endswith("norm") else {}
    objective = hl.Objective(
        rl=hl.Term(gspo, low=0.1, high=0.1, reduction=reduction, **length),
        ce=hl.Term(cross_entropy, row_weight="w", reduction="weighted_mean"),
        h=hl.Term(entropy_bonus, row_weight=lambda logprob, segments: (segments.mean(logprob) < -2).to(logprob.dtype)),
        off=hl.Term(z_loss, weight=0),
    )
    report = hl.verify(
        objective, sources(x)[where], targets, segments=SEGMENTS, advantage=x["advantage"], w=torch.rand(N),
        weights={"ce": torch.tensor(0.3), "h": 2.0}, num_items=77, num_segments=torch.tensor(9), grad_scale=8.0,
    )  # fmt: skip
    report.check()
    assert report.rows == "50 of 50 rows, 6 of 6 segments"


TEACHERS = {
    "dense": lambda: hl.Logits(2 * torch.randn(N, V), temperature=1.5),
    "narrow": lambda: hl.Logits(2 * torch.randn(N, V - 4), softcap=4.0),
    "linear": lambda: hl.Linear(torch.randn(N, 3), torch.randn(V, 3)),
    "sparse": lambda: hl.Sparse(torch.randint(-1, V, (N, 6)), torch.randn(N, 8).log_softmax(-1)[:, :6]),
}


@pytest.mark.parametrize("where", ["logits", "linear", "chunks"])
@pytest.mark.parametrize("teacher", TEACHERS)
def test_teachers(where, teacher):
    targets, x = data()
    objective = hl.Objective(
        kd=forward_kl, rk=hl.Term(reverse_kl, temperature=2.0), js=hl.Term(jsd, beta=0.3),
        ce=hl.Term(cross_entropy, weight=0.1), metrics=["tvd", "teacher_agreement"],
    )  # fmt: skip
    hl.verify(objective, sources(x)[where], targets, teacher=TEACHERS[teacher]()).check()
    if teacher == "sparse":
        for tail in ("none", "renormalise"):
            tailed = hl.Objective(kd=hl.Term(forward_kl, tail=tail), js=hl.Term(jsd, tail=tail))
            hl.verify(tailed, sources(x)[where], targets, teacher=TEACHERS[teacher]()).check()
    named = hl.Objective(a=hl.Term(forward_kl, teacher="a"), b=hl.Term(jsd, teacher="b"))
    two = {"a": TEACHERS[teacher](), "b": TEACHERS["dense"]()}
    hl.verify(named, sources(x)[where], targets, teacher=two, rows=20).check()


def ids_loss(ids_logprob, tail_logprob, teacher_ids, teacher_logprob):
    held = teacher_ids >= 0
    each = torch.where(held, torch.where(held, teacher_logprob, 0.0).exp() * torch.where(held, ids_logprob, 0.0), 0.0)
    return -each.sum(-1) - 0.1 * tail_logprob


def test_losses_of_teachers_facts():
    targets, x = data()
    mine = hl.Objective(a=ids_loss, metrics=["topk_overlap"])
    hl.verify(mine, hl.Logits(x["logits"]), targets, teacher=TEACHERS["sparse"]()).check()
    dense = hl.Objective(
        a=lambda teacher_cross_entropy, reverse_cross_entropy, teacher_entropy: (
            teacher_cross_entropy * reverse_cross_entropy - teacher_entropy
        )
    )
    hl.verify(dense, hl.Logits(x["logits"]), targets, teacher=TEACHERS["narrow"]()).check()


def test_a_gradient_that_is_0_is_said_to_be():
    """Loss and gradient of a floor that no row is above agree whatever they are."""
    targets, x = data()
    report = hl.verify(hl.Objective(a=lambda logprob: (logprob - 1).relu()), hl.Logits(x["logits"]), targets).check()
    assert report.unchecked == ("more than that the gradient of logits is 0",)


def test_lines_prepared_masked_in_place_frozen_and_learned_inputs():
    lead = (5, 10)
    targets, x = data(lead=lead)
    segments = hl.Segments.from_batch(targets)
    objective = hl.Objective(rl=grpo, h=entropy_bonus, metrics=["accuracy"])
    given = {"advantage": x["advantage"].requires_grad_(), "old_logprob": x["old_logprob"]}
    linear = hl.Linear(x["hidden"], x["weight"].detach())
    report = hl.verify(objective, linear, targets, **given).check()
    assert "gradient of advantage" in [c.what for c in report.compared]
    assert report.unchecked == ("the gradient of weight, which does not require grad",)
    assert "not checked: the gradient of weight" in str(report)
    hl.verify(objective, linear, hl.prepare(targets, segments), **given, rows=20).check()
    hl.verify(objective, linear, targets, host_read=False, **given).check()
    hl.verify(objective, hl.Logits(x["logits"] * 1.0, inplace=True), targets, **given).check()
    hl.verify(objective, hl.Logits(x["logits"].detach()), targets, advantage=0.5).check()  # then all of its tensors
    hl.verify(hl.Objective(z=z_loss), hl.Logits(x["logits"])).check()  # no targets


def test_whole_segments_and_pairs_are_taken():
    targets, x = data()
    source = hl.Linear(x["hidden"], x["weight"])
    pairs = torch.tensor([[5, 0], [2, 3], [4, 1]])
    report = hl.verify(hl.Objective(a=dpo), source, targets, segments=SEGMENTS, pairs=pairs, rows=20,
                       ref_logprob=x["old_logprob"]).check()  # fmt: skip
    assert report.rows == "15 of 50 rows, 2 of 6 segments"
    flags = torch.tensor([True, False, False, True, True, False])
    report = hl.verify(hl.Objective(a=kto), source, targets, segments=SEGMENTS, desirable=flags, rows=9,
                       ref_logprob=x["old_logprob"]).check()  # fmt: skip
    assert report.rows == "8 of 50 rows, 2 of 6 segments"
    assert (
        hl.verify(hl.Objective(a=cross_entropy), source, targets, rows=V).rows == "36 of 50 rows"
    )  # V would be unclear


class Settings:
    beta = 1.0


TABLE, LIST, OBJECT = {"beta": 1.0}, [1.0], types.SimpleNamespace(beta=1.0)


def by_class(logprob):
    return -Settings.beta * logprob


def by_dict(logprob):
    return -TABLE["beta"] * logprob


def by_list(logprob):
    return -sum(LIST) * logprob


def by_object(logprob):
    return -OBJECT.beta * logprob


CHANGES = {
    by_class: lambda: setattr(Settings, "beta", 1.01),
    by_dict: lambda: TABLE.update(beta=1.01),
    by_list: lambda: LIST.append(0.01),
    by_object: lambda: setattr(OBJECT, "beta", 1.01),
}


@pytest.mark.parametrize("where", ["linear", "chunks"])
@pytest.mark.parametrize("loss", CHANGES, ids=lambda fn: fn.__name__)
def test_a_stale_value_is_caught(loss, where, monkeypatch):
    """A term that is said to be pure and is not: its trace has the value that it read first."""
    monkeypatch.setattr(Settings, "beta", 1.0)
    TABLE["beta"] = 1.0
    LIST[:] = [1.0]
    OBJECT.beta = 1.0
    targets, x = data()
    objective = hl.Objective(a=hl.Term(loss, pure=True), b=hl.Term(cross_entropy, weight=0.1))
    source = sources(x)[where]
    objective(source, targets)
    CHANGES[loss]()
    report = hl.verify(objective, source, targets)
    off = {c.what for c in report.compared if not c.ok}
    assert off >= {"gradient of hidden", "gradient of weight"} and not report.ok
    with pytest.raises(AssertionError, match="gradient of .*off, "):
        report.check()
    hl.verify(
        hl.Objective(a=loss, b=hl.Term(cross_entropy, weight=0.1)), source, targets
    ).check()  # not pure: it is right


def mixing(logprob):
    return -((logprob - logprob.mean()) ** 2)


def across_segments(logprob, segments):
    return -segments.mean(logprob) * logprob.mean()


@pytest.mark.parametrize("loss", [mixing, across_segments])
def test_a_wrong_class_is_caught(loss, monkeypatch):
    targets, x = data()
    source = hl.Linear(x["hidden"], x["weight"])
    call = {"segments": SEGMENTS} if loss is across_segments else {}
    hl.verify(hl.Objective(a=loss), source, targets, **call).check()
    monkeypatch.setattr(plan, "_TRACES", {})
    monkeypatch.setattr(plan, "classify", lambda *_: ("segment" if call else "row", "so it is said"))
    report = hl.verify(hl.Objective(a=loss), source, targets, **call)
    assert [c.run for c in report.compared if c.what == "gradient of hidden" and not c.ok] == ["in chunks"]


def wrong_kl(logp, logq):
    return logq.exp() * (logq - logp)


wrong_kl.one_pass = lambda teacher_cross_entropy, teacher_entropy: teacher_cross_entropy - 1.01 * teacher_entropy


def test_a_wrong_one_pass_is_caught():
    targets, x = data()
    report = hl.verify(hl.Objective(a=wrong_kl), hl.Logits(x["logits"]), targets, teacher=TEACHERS["dense"]())
    assert {"loss", "term a"} <= {c.what for c in report.compared if not c.ok}


def drops(logprob):
    return -logprob * torch.rand_like(logprob)


class Counting:
    def __init__(self):
        self.calls = 0
        self.__name__ = "counting"

    def __call__(self, logprob):
        self.calls += 1
        return -logprob * self.calls


@pytest.mark.parametrize("loss", [drops, Counting(), lambda logprob: logprob + torch.randn(()).item()])
def test_what_is_not_deterministic_is_said(loss):
    targets, x = data()
    report = hl.verify(hl.Objective(a=loss), hl.Logits(x["logits"]), targets)
    assert not report.ok and "the functions, called twice" in [c.what for c in report.compared if not c.ok]
    assert "not deterministic" in str(report)


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        ("headloss.reductions.reciprocal", lambda count: 1.0 / (count + 1)),
        ("headloss.engine.loss.TermsOnRows._scale", lambda self, term: 1.1 * self.weights[term.name]),
    ],
)
def test_a_wrong_engine_is_caught(where, wrong, monkeypatch):
    targets, x = data()
    objective = hl.Objective(a=cross_entropy, b=hl.Term(entropy_bonus, weight=0.5))
    monkeypatch.setattr(where, wrong)
    assert not hl.verify(objective, hl.Linear(x["hidden"], x["weight"]), targets).ok


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_never_right(bad, monkeypatch):
    targets, x = data()
    plain = hl.Objective.__call__

    def spoiled(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        return out._replace(loss=out.loss * bad)

    monkeypatch.setattr(hl.Objective, "__call__", spoiled)
    report = hl.verify(hl.Objective(ce=cross_entropy), hl.Logits(x["logits"]), targets)
    assert {c.what for c in report.compared if not c.ok} >= {"loss", "gradient of logits"}


def steep(logprob):
    return -1e6 * logprob


def never_there(logprob, kept):
    return -logprob, {"share": torch.where(kept > 0, logprob, float("nan")).mean()}


def test_a_gradient_beyond_float16_is_not_checked_and_says_so():
    targets, x = data()
    logits = x["logits"].half()
    report = hl.verify(hl.Objective(a=steep), hl.Logits(logits), targets, grad_scale=1e5)
    assert report.ok and report.unchecked == ("the gradient of logits, which overflows in plain PyTorch too",)


def sharp(logprob):
    return (100 * (logprob + 2)).exp()


def test_what_a_rounding_of_the_inputs_moves_is_allowed():
    """Plain PyTorch may hit the truth by luck; then its own error says nothing."""
    logits, targets = torch.full((1, 8), 3.0), torch.tensor([1])
    narrow = hl.Linear(torch.ones(1, 3, dtype=torch.bfloat16), torch.ones(8, 3, dtype=torch.bfloat16))
    for source, least in ((hl.Logits(logits), 5e-5), (narrow, 0.1)):
        report = hl.verify(hl.Objective(a=sharp), source, targets)
        value = math.exp(100 * (2 - math.log(8)))
        assert report.ok and next(c.allowed for c in report.compared if c.what == "loss") > least * value


def test_a_metric_that_is_no_number_as_written_is_none_here_either():
    targets, x = data()
    kept = hl.PerRow(torch.zeros(targets.shape))
    assert hl.verify(hl.Objective(a=never_there), hl.Logits(x["logits"]), targets, kept=kept).ok


def only_float32(logprob):
    return -torch.zeros(len(logprob)).index_add(0, torch.arange(len(logprob)), logprob)


def test_what_cannot_run_in_float64_is_compared_as_it_can_be_and_says_so():
    targets, x = data()
    report = hl.verify(hl.Objective(a=only_float32), hl.Logits(x["logits"]), targets).check()
    assert len(report.unchecked) == 1 and "in place of float64, in which a function cannot run" in report.unchecked[0]


def test_nothing_of_the_callers_changes():
    targets, x = data()
    source, advantage = hl.Linear(x["hidden"], x["weight"]), x["advantage"]
    before = [t.detach().clone() for t in (*source.tensors, targets, advantage)]
    state = torch.random.get_rng_state()

    def writes(logprob, advantage):
        noise = torch.rand_like(logprob) * 0
        return -logprob * advantage.clone().mul_(2.0) + noise

    with torch.no_grad():  # it takes gradients by itself
        hl.verify(hl.Objective(a=writes), source, targets, advantage=advantage).check()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, (*source.tensors, targets, advantage), strict=True))
    assert x["hidden"].grad is None and x["weight"].grad is None


def test_the_report():
    targets, x = data()
    report = hl.verify(hl.Objective(ce=cross_entropy), hl.Logits(x["logits"]), targets, rows=16)
    lines = str(report).splitlines()
    assert lines[0].split() == ["quantity", "difference", "allowed"]
    assert lines[-1].startswith("all right; 16 of 50 rows; ce: row; backend torch; gradients in the same pass")
    told = json.loads(json.dumps(report.as_data()))
    assert told["ok"] and told["rows"] == "16 of 50 rows" and all(c["ok"] for c in told["compared"])
    slope = hl.Objective(nan=lambda logprob: (logprob - logprob).sqrt() - logprob)  # whose slope at 0 is no number
    assert "NaN in plain PyTorch too" in str(hl.verify(slope, hl.Logits(x["logits"]), targets, rows=16))


def test_refusals():
    targets, x = data()
    objective, source = hl.Objective(ce=cross_entropy), hl.Logits(x["logits"])
    for rows in (0, -1, True, 2.5):
        with pytest.raises(ValueError, match="rows: wanted a number of rows"):
            hl.verify(objective, source, targets, rows=rows)
    with pytest.raises(TypeError, match="advantages: no loss asks for this input"):
        hl.verify(objective, source, targets, advantages=x["advantage"])
    with pytest.raises(ValueError, match="segments: lie on several ranks"):
        hl.verify(hl.Objective(a=gspo), source, targets, advantage=x["advantage"],
                  segments=hl.Segments(SEGMENTS.ids, 6, group=torch.distributed.ProcessGroup(0, 2)))  # fmt: skip


def test_every_loss_of_the_package_is_one_that_verify_knows():
    assert set(oracle.LOSSES) <= set(LOSSES)
    targets, x = data()
    for name in sorted(set(LOSSES) - set(oracle.LOSSES)):  # the divergences
        hl.verify(hl.Objective(a=LOSSES[name]), hl.Logits(x["logits"]), targets, teacher=TEACHERS["dense"]()).check()


@pytest.mark.parametrize("rows", [64, 6])
@pytest.mark.parametrize("how", ["support", "prepared", "both", "sparse", "draft", "draft, whole", "routed", "own"])
def test_columns_and_teachers_of_each_row(how: str, rows: int) -> None:
    """Kept columns, a head over some tokens, routed teachers and a term's own targets: each once more, dense."""
    N, V, U, g = 13, 19, 7, torch.Generator().manual_seed(3)
    drawn = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    hidden, weight, y = drawn(N, 5), drawn(V, 5), torch.randint(V, (N,), generator=g)
    kept = torch.rand(N, V, generator=g) < 0.2
    kept[torch.arange(N), y], kept[5, y[5]], kept[5, y[5] - 1], y[3] = True, False, True, -100
    teacher, more = (
        hl.Linear(drawn(N, 5), drawn(V, 5), temperature=1.3),
        {"advantage": drawn(N), "old_logprob": drawn(N)},
    )
    objective, call = (
        hl.Objective(rl=grpo, metrics=["entropy", "accuracy", "mean_logprob"]),
        {"support": hl.Support.from_mask(kept)},
    )
    source, targets = hl.Linear(hidden, weight, softcap=4.0), y
    if how == "prepared":
        call, targets = {}, hl.prepare(y, support=call["support"])
    elif how == "both":
        objective, more = hl.Objective(kl=forward_kl, z=hl.Term(jsd, support="all")), {"teacher": teacher}
    elif how == "sparse":
        ids = torch.rand(N, V, generator=g).topk(4).indices
        objective, more = hl.Objective(kl=forward_kl), {"teacher": hl.Sparse(ids, drawn(N, 4).log_softmax(-1) - 0.1)}
    elif how.startswith("draft"):
        ids, fn = torch.randperm(V, generator=g)[:U], reverse_kl if "whole" in how else forward_kl
        term = hl.Term(fn, tail="bucket" if "whole" in how else "renormalise")
        objective, call, more = hl.Objective(ce=cross_entropy, kl=term, metrics=["accuracy"]), {}, {"teacher": teacher}
        source = hl.Linear(hidden, weight[:U], vocab_ids=ids)
    elif how == "routed":
        each = {"a": teacher, "b": hl.Linear(drawn(N, 5), drawn(V, 5))}
        more = {"teacher": hl.Routed(each, torch.randint(-1, 2, (N,), generator=g))}
        objective, call = hl.Objective(ce=cross_entropy, kl=forward_kl), {}
    elif how == "own":
        more = {"others": torch.where(y < 0, -100, y.roll(1).clamp(min=0)).masked_fill(torch.arange(N) % 4 == 0, -100)}
        objective = hl.Objective(ce=cross_entropy, own=hl.Term(cross_entropy, targets="others", support="all"))
    found = hl.verify(objective, source, targets, rows=rows, **call, **more).check()
    missing = {"draft": "vocab_missing", "routed": None}.get(how.split(",")[0], "support_missing")
    assert missing is None or f"metric {missing}" in [c.what for c in found.compared]
