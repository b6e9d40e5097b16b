"""What may be traced: a function of which all that it reads is known.  What runs is what was written."""

import math
import pickle
import random

import knobs
import pytest
import torch
import torch.nn.functional as F
from interpreting import INSIDE, interpreted
from knobs import KNOBS, TRACED

import headloss as hl
from headloss import metrics, row_weights
from headloss.losses import LOSSES
from headloss.trace.function_reads import _Walk, reads_of

BACKENDS = ("torch", "triton") if INSIDE else ("torch",)
# The interpreter is slow: some of each kind.
EVERY = (
    [*KNOBS] if not INSIDE else ["global", "cell", "keyword_default", "object", "class_handed_on", "function_attribute"]
)


def dense(x, logits, targets):
    logp = logits.log_softmax(-1)
    logprob = logp.gather(1, targets[:, None])[:, 0]
    return knobs.combine(x, logprob, -(logp.exp() * logp).sum(-1)).mean()


def sources(kind, hidden, weight):
    return hl.Linear(hidden, weight, memory=9 * 4 * 8) if kind == "Linear" else hl.Logits(hidden @ weight.T)


@pytest.mark.parametrize("name", EVERY)
def test_what_a_function_reads_is_read_in_every_call(name):
    """In random order, on both sources, with grad and without, first and later calls: value and gradient."""
    draw = random.Random(name)
    loss, turn = KNOBS[name]()
    objectives = {b: hl.Objective(it=loss, metrics={"same": loss}, backend=b) for b in BACKENDS}
    torch.manual_seed(1)
    x = 1.0
    turn(x)
    for _ in range(14):
        if draw.random() < 0.6:
            x = draw.choice([1.0, 3.0, 0.5, 2.5, 0.0, 1.0])
            turn(x)
        backend, kind, rows = draw.choice(BACKENDS), draw.choice(["Logits", "Linear"]), draw.choice([5, 7])
        dtype = torch.float64 if backend == "torch" else torch.float32
        hidden, weight = torch.randn(rows, 4, dtype=dtype), torch.randn(9, 4, dtype=dtype)
        targets = torch.randint(9, (rows,))
        leaf = hidden.clone().requires_grad_(draw.random() < 0.7)
        out = objectives[backend](sources(kind, leaf, weight), targets)
        want_leaf = hidden.double().requires_grad_()
        want = dense(x, want_leaf @ weight.double().T, targets)
        tolerance = {"rtol": 1e-9, "atol": 1e-12} if backend == "torch" else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(out.loss.detach().double(), want.detach(), **tolerance)
        torch.testing.assert_close(out.metrics["same"].value.double(), want.detach(), **tolerance)
        if leaf.requires_grad and x != 0:
            (got,) = torch.autograd.grad(out.loss, leaf)
            torch.testing.assert_close(got.double(), torch.autograd.grad(want, want_leaf)[0], **tolerance)


@pytest.mark.parametrize("name", KNOBS)
def test_row_weights_read_in_every_call_too(name):
    draw = random.Random(name)
    fn, turn = KNOBS[name]()
    objective = hl.Objective(it=hl.Term(lambda logprob: -logprob, row_weight=fn), backend="torch")
    for x in (1.0, 3.0, 0.5, 3.0):
        turn(x)
        hidden, weight = torch.randn(5, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
        targets, leaf = torch.randint(9, (5,)), hidden.clone().requires_grad_()
        out = objective(sources(draw.choice(["Logits", "Linear"]), leaf, weight), targets)
        want_leaf = hidden.clone().requires_grad_()
        logp = (want_leaf @ weight.T).log_softmax(-1)
        logprob = logp.gather(1, targets[:, None])[:, 0]
        row_weight = knobs.combine(x, logprob, -(logp.exp() * logp).sum(-1)).detach()
        want = (-logprob * row_weight).mean()
        torch.testing.assert_close(out.loss, want)
        torch.testing.assert_close(*(torch.autograd.grad(y, z)[0] for y, z in ((out.loss, leaf), (want, want_leaf))))


@pytest.mark.parametrize("name", EVERY)
def test_a_divergence_reads_in_every_call_too(name):
    """Its function is element-wise, so the knob's loss is turned into one."""
    fn, turn = KNOBS[name]()

    def divergence(logp, logq):
        return fn(logp, logq.exp()) * (logp - logq)

    objectives = {b: hl.Objective(it=divergence, backend=b) for b in ((*BACKENDS, "auto") if INSIDE else ("auto",))}
    for x in (1.0, 3.0, 1.0):
        turn(x)
        z, q, targets = torch.randn(4, 9), torch.randn(4, 9), torch.randint(9, (4,))
        logp, logq = z.log_softmax(-1), q.log_softmax(-1)
        want = (knobs.combine(x, logp, logq.exp()) * (logp - logq)).sum(-1).mean()
        for backend, objective in objectives.items():
            if backend == "triton" and name not in TRACED:
                with pytest.raises(ValueError, match=r'"triton" cannot run divergence.*what it reads'):
                    objective(hl.Logits(z), targets, teacher=hl.Logits(q))
                continue
            out = objective(hl.Logits(z), targets, teacher=hl.Logits(q))
            torch.testing.assert_close(out.loss, want, rtol=1e-4, atol=1e-5)
            ids = torch.arange(9).expand(4, 9).contiguous()
            sparse = objective(hl.Logits(z), targets, teacher=hl.Sparse(ids, logq))
            term = hl.Objective(it=hl.Term(divergence, tail="none"), backend="torch")
            torch.testing.assert_close(term(hl.Logits(z), targets, teacher=hl.Sparse(ids, logq)).loss, want)
            assert torch.isfinite(sparse.loss)


test_under_the_interpreter = interpreted(__file__, "-k", "function_reads or divergence_reads or metric_reads")


@pytest.mark.parametrize("name", KNOBS)
def test_the_class_and_its_reason(name):
    loss, _ = KNOBS[name]()
    plan = hl.Objective(it=loss).explain(hl.Logits(torch.empty(5, 9)), torch.zeros(5, dtype=torch.long))
    kind, reason = plan.terms[0].kind, plan.terms[0].reason
    assert (kind == "row") == (name in TRACED), reason
    if name not in TRACED:
        assert reason.startswith("reads ")


NAMED = {
    "class_handed_on": "Config (a class)",
    "getattr": "getattr (a built-in function)",
    "object": "held (a Mutable)",
    "dict": "held (a dict)",
    "list": "held (a list)",
    "default_list": "default of held (a list)",
    "function_attribute": "loss.x (an attribute of a function)",
    "module_handed_on": "settings (a module)",
    "method": "loss (a method of Loss)",
    "callable_object": "Loss (a Loss)",
    "tensor": "held (a tensor)",
    "optimizer": "held (a SGD)",
    "environment": "os.environ (a _Environ)",
    "import": "math (an import inside)",
    "globals": "globals (a built-in function)",
    "dtype": "torch.get_default_dtype (a built-in function)",
    "record_with_more": "held (a Frozen)",
    "attribute_of_a_type": "torch.Tensor.eps (not torch's own)",
    "attribute_of_tensors": "torch.Tensor.resolution (not torch's own)",
    "attribute_of_a_guard": "torch.no_grad.max (an attribute of a class)",
}


@pytest.mark.parametrize("name", NAMED)
def test_explain_names_what_was_read(name):
    loss, _ = KNOBS[name]()
    plan = hl.Objective(it=loss).explain(hl.Logits(torch.empty(5, 9)), torch.zeros(5, dtype=torch.long))
    assert NAMED[name] in plan.terms[0].reason


@pytest.fixture(autouse=True)
def torch_as_it_was():
    yield
    for owner, name in ((torch.Tensor, "eps"), (torch.Tensor, "resolution"), (torch.no_grad, "max")):
        if name in vars(owner):
            delattr(owner, name)


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_default_of_a_loss_of_ours_is_read_in_every_call(kind):
    """A user sets it for all of a process."""
    hidden, weight = torch.randn(6, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    targets = torch.randint(9, (6,))
    rows = {"advantage": -torch.ones(6).double(), "old_logprob": -torch.ones(6).double()}
    objective = hl.Objective(it=hl.losses.grpo)
    logprob = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    was = hl.losses.grpo.__kwdefaults__["low"]
    try:
        for low in (0.2, 0.9, 0.01, 0.2):
            hl.losses.grpo.__kwdefaults__["low"] = low
            leaf = hidden.clone().requires_grad_()
            out = objective(sources(kind, leaf, weight), targets, **rows)
            out.loss.backward()
            ratio = (logprob + 1).exp()
            want = torch.maximum(ratio, ratio.clamp(min=1 - low)).mean()
            torch.testing.assert_close(out.loss.detach(), want)
            free = (ratio >= 1 - low).double()[:, None]
            p = (hidden @ weight.T).softmax(-1)
            slope = free * ratio[:, None] * (F.one_hot(targets, 9) - p) / 6
            torch.testing.assert_close(leaf.grad, slope @ weight)
    finally:
        hl.losses.grpo.__kwdefaults__["low"] = was


def by_size(logprob, entropy):
    return entropy if isinstance(logprob.shape[0], int) else logprob


def one_row(logprob, entropy):
    return entropy if logprob.shape[0] == 1 else logprob


def by_except(logprob, entropy):
    try:
        fine = bool((logprob < 0).all())
    except RuntimeError:
        fine = False
    return entropy if fine else logprob


@pytest.mark.parametrize("fn", [by_size, one_row, by_except])
@pytest.mark.parametrize("backend", ["torch", "triton"] if INSIDE else ["torch"])
def test_a_metric_reads_as_its_function_does(fn, backend):
    objective = hl.Objective(it=lambda logprob: -logprob, metrics={"m": fn}, backend=backend)
    for rows in (6, 1, 6):
        z, targets = torch.randn(rows, 9), torch.randint(9, (rows,))
        logp = z.log_softmax(-1)
        facts = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
        got = float(objective(hl.Logits(z), targets).metrics["m"])
        torch.testing.assert_close(torch.tensor(got), fn(*facts).mean(), rtol=1e-4, atol=1e-5)


FACTOR = 0.5


def twice(x):
    return 2 * x


@pytest.mark.parametrize(
    "fn",
    [
        lambda logprob: -FACTOR * logprob * math.log(2.0),
        lambda logprob: F.softplus(-logprob) + torch.zeros_like(logprob),
        lambda logprob: torch.nn.functional.logsigmoid(logprob),
        lambda logprob: -twice(logprob).clamp(max=torch.finfo(logprob.dtype).max),
        lambda logprob: sum([logprob**k for k in range(1, 3)]),
        lambda logprob: max(logprob.detach(), logprob.detach(), key=lambda x: x.ndim) * logprob,
        lambda logprob: hl.losses.z_loss(logprob),
        lambda logprob, advantage=None: -logprob if advantage is None else -logprob * advantage,
        lambda logprob: torch.ops.aten.mul.Tensor(logprob, -1.0),
    ],
)
def test_plain_python_stays_traced(fn):
    assert reads_of(fn).unknown == ()
    plan = hl.Objective(it=fn).explain(hl.Logits(torch.empty(5, 9)), torch.zeros(5, dtype=torch.long))
    assert plan.terms[0].kind == "row", plan.terms[0].reason


def with_statements(logprob, *, mode: str | float = "a", floor=None, names=("a", "b")):
    match mode:
        case "a" | "b":
            scale = {"a": 1.0, "b": 2.0}[mode]
        case float() | int():
            scale = mode
        case _:
            raise ValueError(f"mode: {mode!r} is none of {names}")
    with torch.no_grad():
        weight = logprob.exp() if floor is None else logprob.exp().clamp(min=floor)
    parts = [scale * weight * logprob for _ in names]
    return -sum(parts), {f"mode_{mode}": weight}


@pytest.mark.parametrize("options", [{}, {"mode": "b"}, {"mode": 0.5}, {"floor": 0.1}, {"names": ("a",)}])
def test_options_reach_the_function_as_they_are(options):
    term = hl.Term(with_statements, **options)
    hidden, weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), torch.randn(9, 4, dtype=torch.float64)
    targets = torch.randint(9, (6,))
    out = hl.Objective(it=term)(hl.Linear(hidden, weight, memory=9 * 3 * 8), targets)
    (got,) = torch.autograd.grad(out.loss, hidden)
    logprob = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    want = with_statements(logprob, **options)[0].mean()
    torch.testing.assert_close(out.loss, want)
    torch.testing.assert_close(got, torch.autograd.grad(want, hidden)[0])
    plan = hl.Objective(it=term).explain(hl.Linear(hidden, weight), targets)
    assert plan.terms[0].kind == "row", plan.terms[0].reason


def typed(logprob, entropy, *, x=1.0):
    """Another branch for every type and value that compares equal to another."""
    kinds = {bool: 1.0, int: 2.0, float: 3.0}
    scale = kinds.get(type(x), 5.0)
    if isinstance(x, float) and math.copysign(1.0, x) < 0:
        return -scale * entropy
    return -scale * logprob


def test_options_that_compare_equal_are_told_apart():
    """1, True, 1.0, -0.0 and 0.0 in any order: each gets its own branch, whatever was traced before."""
    values = [1, True, 1.0, -0.0, 0.0, 1, -0.0, True, 0.0, 1.0]

    def loss(logprob, entropy, *, x=None):
        return typed(logprob, entropy, x=x)

    hidden, weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), torch.randn(9, 4, dtype=torch.float64)
    targets = torch.randint(9, (6,))
    logp = (hidden @ weight.T).log_softmax(-1)
    logprob, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    for x in values:
        out = hl.Objective(it=hl.Term(loss, x=x))(hl.Linear(hidden, weight, memory=9 * 3 * 8), targets)
        want = typed(logprob, entropy, x=x).mean()
        torch.testing.assert_close(out.loss, want)
        got, right = (torch.autograd.grad(y, hidden, retain_graph=True)[0] for y in (out.loss, want))
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize(
    "held", [[1.0], {"x": 1.0}, torch.ones(()), knobs.Mutable(), len, lambda x: x], ids=lambda x: type(x).__name__
)
def test_an_option_that_holds_an_object_is_not_traced(held):
    def loss(logprob, *, option=None):
        return -logprob

    plan = hl.Objective(it=hl.Term(loss, option=held)).explain(
        hl.Logits(torch.empty(5, 9)), torch.zeros(5, dtype=torch.long)
    )
    known = callable(held)  # a function that reads nothing is as good as a constant
    assert (plan.terms[0].kind == "row") == known, plan.terms[0].reason
    assert known or "option option" in plan.terms[0].reason


def test_pure_is_believed():
    loss, _ = KNOBS["object"]()
    logits, targets = hl.Logits(torch.empty(5, 9)), torch.zeros(5, dtype=torch.long)
    assert hl.Objective(it=loss).explain(logits, targets).terms[0].kind == "batch"
    objective = hl.Objective(it=hl.Term(loss, pure=True))
    assert objective.explain(logits, targets).terms[0].kind == "row"
    with pytest.raises(TypeError, match="pure: wanted True or False, got str"):
        hl.Term(loss, pure="yes")
    assert "pure=True" in repr(hl.Term(loss, pure=True)) and "pure" not in repr(hl.Term(loss))


def test_everything_of_ours_is_known():
    """Read as if it were a user's: nothing in this package needs the benefit of the doubt."""
    own = [
        row_weights.truncate(2.0), row_weights.truncate(2.0, level="segment"), row_weights.band(0.5, 2.0),
        row_weights.drop_segments(0.5, 2.0), row_weights.off_policy_mask(0.1), row_weights.top_entropy(0.2),
    ]  # fmt: skip
    for fn in [*LOSSES.values(), *own, *metrics.NAMED.values()]:
        found = _Walk()
        found.function(fn)
        assert found.finish() == (), (fn, found.finish())
        assert reads_of(fn).unknown == ()


def branches_on_rows(logprob, entropy):
    return -logprob if logprob.shape[0] > 6 else entropy


def branches_on_many_rows(logprob, entropy):
    return -logprob if logprob.shape[0] > 100 else entropy


def branches_on_grad(logprob, entropy):
    return -logprob if torch.is_grad_enabled() else entropy


def branches_on_requires_grad(logprob, entropy):
    return -logprob if logprob.requires_grad else entropy


@pytest.mark.parametrize("fn", [branches_on_rows, branches_on_many_rows, branches_on_grad, branches_on_requires_grad])
def test_no_fact_is_called_unused_where_another_branch_uses_it(fn):
    objective = hl.Objective(it=fn, backend="torch")
    for rows in (5, 9, 130, 5):
        for grad in (True, False):
            z = torch.randn(rows, 11, dtype=torch.float64, requires_grad=grad)
            targets = torch.randint(11, (rows,))
            logp = z.log_softmax(-1)
            first = {branches_on_rows: rows > 6, branches_on_many_rows: rows > 100}.get(fn, grad)
            want = -logp.gather(1, targets[:, None])[:, 0] if first else -(logp.exp() * logp).sum(-1)
            with torch.set_grad_enabled(grad):
                out = objective(hl.Logits(z), targets)
            torch.testing.assert_close(out.loss.detach(), want.mean().detach())


def writes_directly(logprob, advantage):
    advantage *= 2.0
    return -advantage * logprob


def writes_through_a_view(logprob, advantage):
    advantage[:2] = 0.0
    return -advantage * logprob


def writes_detached(logprob, advantage):
    advantage.detach().mul_(2.0)
    return -advantage * logprob


def writes_and_cannot_be_traced(logprob, advantage):
    if float(advantage.sum()) > -1e9:
        advantage.clamp_(max=0.5)
    return -advantage * logprob


def writes_into_a_fact(logprob, advantage):
    logprob.clamp_(max=-0.1)
    return -advantage * logprob


def writes_into_segments(logprob, advantage, segments):
    segments.ids[1:] = 0
    return -advantage * logprob * segments.mean(logprob)


def writes_into_segments_and_cannot_be_traced(logprob, advantage, segments):
    if float(advantage.sum()) > -1e9:
        segments.ids[1:] = 0
    return -advantage * logprob


def writes_into_counts(logprob, advantage, segments):
    segments.counts.mul_(2)
    return -advantage * segments.mean(logprob)


def writes_out(logprob, advantage):
    torch.mul(advantage, 2.0, out=advantage)
    return -advantage * logprob


@pytest.mark.parametrize(
    "fn",
    [
        writes_directly, writes_through_a_view, writes_detached, writes_and_cannot_be_traced,
        writes_into_a_fact, writes_into_segments, writes_into_segments_and_cannot_be_traced, writes_into_counts,
        writes_out,
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_loss_that_writes_into_what_it_is_given_is_refused(fn, kind, grad):
    hidden = torch.randn(6, 4, requires_grad=grad)
    source = sources(kind, hidden, torch.randn(9, 4))
    with pytest.raises((ValueError, RuntimeError), match=r"writes into it|in-place|doesn't support automatic"):
        segments = hl.Segments.from_ids(torch.arange(6) // 2)
        objective = hl.Objective(it=fn)
        objective(source, torch.randint(9, (6,)), segments=segments, advantage=hl.PerRow(torch.ones(6)))


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_loss_that_detaches_what_it_is_given_in_place_is_refused(kind):
    def held(logprob, entropy):
        return -logprob * entropy.detach_()

    source = sources(kind, torch.randn(6, 4, requires_grad=True), torch.randn(9, 4))
    with pytest.raises(ValueError, match="entropy: held writes into it"):
        hl.Objective(it=held)(source, torch.randint(9, (6,)))


def test_metrics_and_row_weights_that_write_are_refused_too():
    z, targets, one = torch.randn(6, 9), torch.randint(9, (6,)), torch.ones(6)
    with pytest.raises(ValueError, match="advantage: writes_directly writes into it"):
        hl.Objective(ce=hl.losses.cross_entropy, metrics=[writes_directly])(hl.Logits(z), targets, advantage=one)
    with pytest.raises(ValueError, match="advantage: writes_directly writes into it"):
        hl.Objective(ce=hl.Term(hl.losses.cross_entropy, row_weight=writes_directly))(
            hl.Logits(z), targets, advantage=one
        )


def test_work_on_a_copy_is_fine():
    def loss(logprob, advantage):
        held = advantage.clone()
        held[0] = 0.0
        held *= 2.0
        return -held * logprob

    z, targets, one = torch.randn(6, 9, requires_grad=True), torch.randint(9, (6,)), torch.ones(6)
    out = hl.Objective(it=loss)(hl.Logits(z), targets, advantage=one)
    want = F.cross_entropy(z, targets, reduction="none")
    torch.testing.assert_close(out.loss, 2 * want[1:].sum() / 6)
    assert torch.equal(one, torch.ones(6))


def test_targets_that_may_be_missing():
    def loss(lse, targets=None):
        return lse if targets is None else lse * (targets + 1)

    objective, z, targets = hl.Objective(it=loss), torch.randn(6, 9, requires_grad=True), torch.randint(9, (6,))
    for given, factor in ((None, torch.ones(6)), (targets, targets + 1), (None, torch.ones(6))):
        out = objective(hl.Linear(torch.eye(6), z.T, memory="1MiB"), given)
        want = (torch.logsumexp(z, 1) * factor).mean()
        torch.testing.assert_close(out.loss, want)
        torch.testing.assert_close(*(torch.autograd.grad(y, z, retain_graph=True)[0] for y in (out.loss, want)))


def test_terms_and_options_cannot_be_changed_behind_a_plan():
    term = hl.Term(hl.losses.focal, gamma=2.0, facts={})
    objective = hl.Objective(it=term)
    for change in (
        lambda: objective.terms.update(z=hl.losses.z_loss),
        lambda: objective.terms.__setitem__("it", term),
        lambda: term.options.__setitem__("gamma", 0.0),
        lambda: term.facts.__setitem__("hot", ("entropy", 2.0)),
    ):
        with pytest.raises((TypeError, AttributeError)):
            change()
    assert repr(hl.Term(hl.losses.focal, gamma=2.0)) == "Term(focal, gamma=2.0)"
    again = pickle.loads(pickle.dumps(objective))
    assert repr(again) == repr(objective)
