"""A trace is kept only if it is the function: Python code that tells a trace from a call is run as it is."""

import dataclasses
import enum
import functools

import pytest
import torch

import headloss as hl
from headloss.losses import forward_kl, reverse_kl, z_loss
from headloss.trace import trace
from headloss.trace.function_reads import reads_of

CONFIG = {"x": 1.0}


def facts(logits, targets):
    logp = logits.log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def check(objective, fn, rows=6, names=("logprob", "entropy")):
    """Value and gradient on both sources, as the function says when it is called with dense float64 facts."""
    torch.manual_seed(rows)
    for kind in ("Logits", "Linear"):
        hidden = torch.randn(rows, 4, dtype=torch.float64)
        weight, targets = torch.randn(9, 4, dtype=torch.float64), torch.randint(9, (rows,))
        x, y = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
        source = hl.Linear(x, weight, memory=9 * 2 * 8) if kind == "Linear" else hl.Logits(x @ weight.T)
        out = objective(source, targets)
        given = dict(zip(("logprob", "entropy"), facts(y @ weight.T, targets), strict=True))
        want = fn(**{name: given[name] for name in names}).mean()
        torch.testing.assert_close(out.loss, want)
        torch.testing.assert_close(torch.autograd.grad(out.loss, x)[0], torch.autograd.grad(want, y)[0])


def by_isinstance(logprob, entropy):
    return -logprob if isinstance(logprob.shape[0], int) else entropy


def by_type(logprob, entropy):
    return -logprob if type(logprob) is torch.Tensor else entropy


def by_match(logprob, entropy):
    match logprob.shape[0]:
        case int():
            return -logprob
        case _:
            return entropy


def by_text(logprob, entropy):
    return -logprob if f"{logprob.shape[0]}".isdigit() else entropy


def by_percent(logprob, entropy):
    return -logprob if "%s" % logprob.shape[0] == "6" else entropy  # noqa: UP031


def by_format(logprob, entropy):
    return -logprob if "{}".format(logprob.shape[0]) == "6" else entropy  # noqa: UP032


SIX = 6


def by_identity(logprob, entropy):
    return -logprob if logprob.shape[0] is SIX else entropy


def by_class(logprob, entropy):
    return -logprob if logprob.shape[0].__class__ == int else entropy  # noqa: E721


def by_except(logprob, entropy):
    try:
        fine = bool((logprob < 1).all())
    except Exception:
        fine = False
    return -logprob if fine else entropy


def one_row(logprob, entropy):
    return entropy if logprob.shape[0] == 1 else -logprob


def more_rows(logprob, entropy):
    return -logprob + entropy if logprob.numel() > 1 else -2 * logprob + entropy


@pytest.mark.parametrize(
    "fn",
    [
        by_isinstance,
        by_type,
        by_match,
        by_text,
        by_percent,
        by_format,
        by_identity,
        by_class,
        by_except,
        one_row,
        more_rows,
    ],
)
def test_code_that_tells_a_trace_from_a_call(fn):
    objective = hl.Objective(it=fn, backend="torch")
    for rows in (6, 1, 3):
        check(objective, fn, rows)
    plan = objective.explain(hl.Logits(torch.empty(5, 9)), torch.zeros(5, dtype=torch.long))
    assert plan.terms[0].kind == "batch", plan.terms[0].reason


def test_one_segment():
    def loss(logprob, entropy, segments):
        return segments.means(logprob) if segments.num_segments > 1 else segments.means(entropy)

    objective, z, targets = hl.Objective(it=loss), torch.randn(6, 9, dtype=torch.float64), torch.randint(9, (6,))
    for ids in ([0, 0, 1, 1, 2, 2], [0] * 6):
        segments = hl.Segments.from_ids(torch.tensor(ids))
        logprob, entropy = facts(z, targets)
        x = logprob if len(set(ids)) > 1 else entropy
        got = objective(hl.Linear(z, torch.eye(9, dtype=torch.float64)), targets, segments=segments).loss
        torch.testing.assert_close(got, x.view(len(set(ids)), -1).mean(1).mean())


def scaled(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        found = fn(*args, **kwargs)
        return (CONFIG["x"] * found[0], found[1]) if isinstance(found, tuple) else CONFIG["x"] * found

    return wrapper


def test_a_decorated_loss_of_ours_is_not_ours():
    loss = scaled(z_loss)
    objective = hl.Objective(it=loss)
    assert "CONFIG (a dict)" in reads_of(loss).unknown
    z, targets = torch.randn(6, 9, dtype=torch.float64, requires_grad=True), torch.randint(9, (6,))
    for x in (1.0, 3.0, 0.5):
        CONFIG["x"] = x
        out = objective(hl.Linear(z, torch.eye(9, dtype=torch.float64)), targets)
        want = x * torch.logsumexp(z, 1).square().mean()
        torch.testing.assert_close(out.loss, want)
        torch.testing.assert_close(*(torch.autograd.grad(y, z, retain_graph=True)[0] for y in (out.loss, want)))
    CONFIG["x"] = 1.0


@pytest.mark.parametrize("fn", [forward_kl, reverse_kl])
def test_a_decorated_divergence_runs_its_decorator(fn):
    @functools.wraps(fn)
    def doubled(logp, logq):
        return 2.0 * fn(logp, logq)

    z, q, targets = torch.randn(6, 9), torch.randn(6, 9), torch.randint(9, (6,))
    want = (2.0 * fn(z.log_softmax(-1), q.log_softmax(-1))).sum(-1).mean()
    torch.testing.assert_close(hl.Objective(it=doubled)(hl.Logits(z), targets, teacher=hl.Logits(q)).loss, want)


@pytest.mark.parametrize("fn", [lambda p, q: p * p.detach().mean(0, keepdim=True), lambda p, q: p / p.shape[0]])
def test_a_divergence_may_not_look_at_other_rows(fn):
    def divergence(logp, logq):
        return fn(logp, logq)

    with pytest.raises(TypeError, match="element-wise function"):
        hl.Objective(it=divergence)


def test_terms_that_differ_in_their_temperature_alone():
    def loss(a, b):
        return a - 2 * b

    def weigh(entropy):
        return entropy.square()

    hidden, weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), torch.randn(9, 4, dtype=torch.float64)
    targets = torch.randint(9, (6,))
    entropy = lambda T: facts((hidden @ weight.T) / T, targets)[1]
    for T in (2.0, 3.0):
        term = hl.Term(loss, facts={"a": ("entropy", 2.0), "b": ("entropy", 3.0)}, row_weight=weigh, temperature=T)
        out = hl.Objective(it=term)(hl.Linear(hidden, weight, memory=9 * 4 * 8), targets)
        want = ((entropy(2.0) - 2 * entropy(3.0)) * entropy(T).square().detach()).mean()
        torch.testing.assert_close(out.loss, want)
        torch.testing.assert_close(*(torch.autograd.grad(y, hidden, retain_graph=True)[0] for y in (out.loss, want)))


def test_a_temperature_that_falls_step_by_step_is_traced_once(monkeypatch):
    traced, once = [], trace._trace_once
    monkeypatch.setattr(trace, "_trace_once", lambda *a: traced.append(1) or once(*a))
    monkeypatch.setattr(trace, "_TRACES", {})

    def loss(a, b, logprob, *, whole=False):
        return a - 2 * b if whole else a

    hidden, weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), torch.randn(9, 4, dtype=torch.float64)
    targets = torch.randint(9, (6,))
    entropy = lambda T: facts((hidden @ weight.T) / T, targets)[1]
    for whole in (False, True):
        for T in (4.0, 3.0, 2.5):
            term = hl.Term(loss, facts={"a": ("entropy", T), "b": ("entropy", 2.0)}, temperature=T, whole=whole)
            out = hl.Objective(it=term)(hl.Linear(hidden, weight, memory=9 * 4 * 8), targets)
            assert list(out.facts) == [("entropy", 2.0)] * whole + [("entropy", T)]
            want = (entropy(T) - 2 * entropy(2.0) * whole).mean()
            got, wanted = (torch.autograd.grad(y, hidden, retain_graph=True)[0] for y in (out.loss, want))
            torch.testing.assert_close((out.loss, got), (want, wanted))
        assert len(traced) == 1 + whole


class WithProperty(enum.Enum):
    A = 1

    @property
    def max(self):
        return CONFIG["x"]


class WithAttribute(enum.Enum):
    A = 1.0

    def __init__(self, value):
        self.eps = value


class WithCall(enum.Enum):
    A = "a"

    def __call__(self, x):
        return CONFIG["x"] * x


class Plain(enum.Enum):
    A = 2.0


space = {"CONFIG": CONFIG, "dataclasses": dataclasses}
exec(
    "@dataclasses.dataclass(frozen=True)\nclass Scale:\n    x: float = 1.0\n"
    "    def __call__(self, y): return CONFIG['x'] * y\n",
    space,
)
scale = space["Scale"]()


def helper():
    pass


helper.eps = 1.0


@pytest.mark.parametrize(
    "fn",
    [
        lambda logprob: -WithProperty.A.max * logprob,
        lambda logprob: -WithAttribute.A.eps * logprob,
        lambda logprob: -WithCall.A(logprob),
        lambda logprob: -scale(logprob),
        lambda logprob: -float("{0.eps}".format(helper)) * logprob,  # noqa: UP030, UP032
        lambda logprob: logprob if torch.is_inference(logprob) else -logprob,
    ],
)
def test_other_ways_to_read(fn):
    assert reads_of(fn).unknown


def test_plain_enums_and_attributes_of_functions_are_compared():
    assert reads_of(lambda logprob: -Plain.A.value * logprob).unknown == ()

    def loss(logprob):
        other = helper
        return -other.eps * logprob

    objective = hl.Objective(it=loss)
    for helper.eps in (1.0, 3.0, 0.5):
        check(objective, loss, names=("logprob",))


def test_a_reduced_metric_whose_name_says_how_to_combine_is_refused():
    def loss(logprob):
        return -logprob, {"ratio_std": logprob.exp().std()}

    with pytest.raises(ValueError, match="'it/ratio_std' is one number"):
        hl.Objective(it=loss)(hl.Logits(torch.randn(6, 9)), torch.randint(9, (6,)))
