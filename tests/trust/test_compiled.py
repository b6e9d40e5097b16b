"""The compiled form runs what was written: numbers that change, symbols for sizes, functions whose reads change."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, forward_kl, gspo, z_loss
from headloss.metrics import perplexity

V, D = 13, 5
OBJECTIVE = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=0.1), metrics=["entropy", "accuracy"])
UNSAID = "Observed exception" if torch.__version__ < "2.9" else "^$"  # torch 2.8 keeps the message to itself
MANY = [0.5 + 0.125 * i for i in range(12)]  # more than torch compiles again for one function


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def data(rows: int = 7) -> dict[str, Tensor]:
    torch.manual_seed(rows)
    return {
        "hidden": torch.randn(rows, D, dtype=torch.float64, requires_grad=True),
        "weight": torch.randn(V, D, dtype=torch.float64, requires_grad=True),
        "logits": 3 * torch.randn(rows, V, dtype=torch.float64).requires_grad_(),
        "advantage": torch.randn(rows, dtype=torch.float64),
        "teacher": torch.randn(rows, V, dtype=torch.float64),
        "targets": torch.randint(V, (rows,)).index_fill(0, torch.tensor([1]), -100),
        "ids": torch.arange(rows) // 2,
    }


def whole(fn: Callable[..., Any], **options: Any) -> Any:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, backend=counter, fullgraph=True, **options)
    compiled.counter = counter
    return compiled


def same_step(compiled: Any, step: Callable[..., Tensor], x: dict[str, Tensor], *numbers: Any) -> None:
    found, want = compiled(x, *numbers), step(x, *numbers)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
    leaves = [t for t in x.values() if t.requires_grad]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, allow_unused=True),
        torch.autograd.grad(want, leaves, allow_unused=True),
        rtol=1e-9,
        atol=1e-9,
    )


def temperature(x: Any, n: float) -> Tensor:
    return OBJECTIVE(hl.Logits(x["logits"], temperature=n), x["targets"]).loss


def scale(x: Any, n: float) -> Tensor:
    return OBJECTIVE(hl.Logits(x["logits"], scale=n), x["targets"]).loss


def softcap(x: Any, n: float) -> Tensor:
    return OBJECTIVE(hl.Linear(x["hidden"], x["weight"], softcap=n), x["targets"]).loss


def linear_temperature(x: Any, n: float) -> Tensor:
    out = OBJECTIVE(hl.Linear(x["hidden"], x["weight"], temperature=n, scale=n + 1), x["targets"])
    return out.loss + out.facts.entropy.sum()


def weights(x: Any, n: float) -> Tensor:
    return OBJECTIVE(hl.Logits(x["logits"]), x["targets"], weights={"z": n, "ce": 1.5 - n}).loss


def grad_scale(x: Any, n: float) -> Tensor:
    return OBJECTIVE(hl.Linear(x["hidden"], x["weight"]), x["targets"], grad_scale=n).loss


def num_items(x: Any, n: int) -> Tensor:
    return OBJECTIVE(hl.Logits(x["logits"]), x["targets"], num_items=n).loss


def an_input(x: Any, n: float) -> Tensor:
    return hl.Objective.__call__(SCALED, hl.Logits(x["logits"]), x["targets"], by=n).loss


def a_teachers_temperature(x: Any, n: float) -> Tensor:
    teacher = hl.Logits(x["teacher"], temperature=n, softcap=10 * n)
    return TAUGHT(hl.Logits(x["logits"]), x["targets"], teacher=teacher).loss


def of_facts(x: Any, n: float) -> Tensor:
    facts = hl.row_facts(hl.Logits(x["logits"], temperature=n), x["targets"], want=("logprob", ("entropy", 0.75)))
    return facts.logprob.sum() + facts["entropy", 0.75].sum()


def whole_temperature(x: Any, n: int) -> Tensor:
    return OBJECTIVE(hl.Logits(x["logits"], temperature=n), x["targets"]).loss


def scaled(logprob: Tensor, by: Tensor) -> Tensor:
    return -logprob * by


SCALED = hl.Objective(s=scaled)
TAUGHT = hl.Objective(kl=forward_kl)
NUMBERS = (
    temperature, scale, softcap, linear_temperature, weights, grad_scale, num_items, an_input, a_teachers_temperature,
    of_facts, whole_temperature,
)  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("step", NUMBERS, ids=lambda f: f.__name__)
def test_a_number_that_changes(step: Callable[..., Tensor], dynamic: bool | None) -> None:
    compiled, x = whole(step, dynamic=dynamic), data()
    for n in MANY:
        same_step(compiled, step, x, int(8 * n) if step in (num_items, whole_temperature) else n)
    assert compiled.counter.frame_count <= 4, "a number that changes became a constant of the graph"


def test_a_number_that_changes_compiled_to_code() -> None:
    compiled, x = torch.compile(linear_temperature, fullgraph=True), data()
    for n in (0.5, 0.75, 1.0, 1.25):
        same_step(compiled, linear_temperature, x, n)


@pytest.mark.parametrize("name", ["temperature", "scale", "softcap"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_bad_number_is_refused_in_a_graph(name: str, value: float) -> None:
    def step(z: Tensor, t: Tensor, n: float) -> Tensor:
        return OBJECTIVE(hl.Logits(z, **{name: n}), t).loss

    if name == "scale" and value == -1.0:
        return
    compiled, x = whole(step), data()
    for n in (0.5, 0.75):
        compiled(x["logits"], x["targets"], n)
    with pytest.raises(Exception, match=f"{name}: wanted|{UNSAID}"):
        compiled(x["logits"], x["targets"], value)


def test_a_bad_weight_is_refused_in_a_graph() -> None:
    compiled, x = whole(weights), data()
    for n in (0.5, 0.75):
        compiled(x, n)
    with pytest.raises(Exception, match=f"weights.*wanted a finite number|{UNSAID}"):
        compiled(x, float("nan"))


def test_a_temperature_that_meets_a_terms_own() -> None:
    """A fact at the source's own temperature goes by its name alone; which it is, is a constant of the graph."""
    objective = hl.Objective(ce=hl.Term(cross_entropy, temperature=2.0), z=z_loss)

    def step(z: Tensor, t: Tensor, T: float) -> tuple[Tensor, list[Any], list[Tensor]]:
        out = objective(hl.Logits(z, temperature=T), t)
        named = dict(out.facts.items())
        return out.loss, list(named), list(named.values())

    compiled, x = whole(step), data()
    for T in (1.0, 1.5, 2.0, 2.5, 2.0, 3.0):
        found, want = compiled(x["logits"], x["targets"], T), step(x["logits"], x["targets"], T)
        assert found[1] == want[1]
        torch.testing.assert_close((found[0], found[2]), (want[0], want[2]))


@pytest.mark.parametrize("source", ["logits", "linear"])
def test_every_size_is_a_symbol(source: str) -> None:
    objective = hl.Objective(ce=cross_entropy, rl=hl.Term(gspo, reduction="seq_mean_token_mean"), kl=forward_kl)

    def step(x: dict[str, Tensor]) -> Tensor:
        given = hl.Logits(x["logits"]) if source == "logits" else hl.Linear(x["hidden"], x["weight"], memory=1 << 12)
        segments = hl.Segments.from_ids(x["ids"], 9)
        return objective(
            given, x["targets"], segments=segments, advantage=x["advantage"], teacher=hl.Logits(x["teacher"])
        ).loss

    compiled = whole(step, dynamic=True)
    for rows in (7, 11, 16):
        same_step(compiled, step, data(rows))
    assert compiled.counter.frame_count <= 2


def test_other_sizes_compile_again() -> None:
    """What a recipe says of a shape is a constant: another number of ids, or columns, is another graph."""

    def step(x: dict[str, Tensor], ids: Tensor, logprobs: Tensor) -> Tensor:
        return TAUGHT(hl.Logits(x["logits"]), x["targets"], teacher=hl.Sparse(ids, logprobs)).loss

    compiled, x = whole(step), data()
    for k in (2, 3, 4, 5):
        ids = torch.arange(7 * k).view(7, k) % V
        logprobs = torch.randn(7, k, dtype=torch.float64).log_softmax(-1)
        same_step(compiled, step, x, ids, logprobs)


BETA = 0.5


def by_global(logprob: Tensor) -> Tensor:
    return -BETA * logprob


def test_a_global_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = hl.Objective(l=by_global)
    compiled, x = whole(lambda x: objective(hl.Logits(x["logits"]), x["targets"]).loss), data()
    for beta in (0.5, 2.0, 3, -1.0, 0.5):
        monkeypatch.setitem(globals(), "BETA", beta)
        same_step(compiled, lambda x: objective(hl.Logits(x["logits"]), x["targets"]).loss, x)


def made(beta: float) -> tuple[hl.Objective, Callable[[float], None]]:
    def loss(logprob: Tensor) -> Tensor:
        return -beta * logprob

    def change(to: float) -> None:
        nonlocal beta
        beta = to

    return hl.Objective(l=loss), change


def test_objectives_that_were_equal_once() -> None:
    """They share a graph, and each still runs its own function."""
    (one, change_one), (two, change_two) = made(1.0), made(1.0)
    assert one.key == two.key

    def step(x: dict[str, Tensor], objective: hl.Objective) -> Tensor:
        return objective(hl.Logits(x["logits"]), x["targets"]).loss

    compiled, x = whole(step), data()
    same_step(compiled, step, x, one)
    same_step(compiled, step, x, two)
    change_two(3.0)
    same_step(compiled, step, x, two)
    same_step(compiled, step, x, one)
    change_one(5.0)
    same_step(compiled, step, x, one)
    same_step(compiled, step, x, made(5.0)[0])
    assert compiled.counter.frame_count <= 3


def test_an_objective_made_for_each_step() -> None:
    def step(x: dict[str, Tensor], objective: hl.Objective) -> Tensor:
        return objective(hl.Logits(x["logits"]), x["targets"]).loss

    compiled, x = whole(step), data()
    for _ in range(12):
        same_step(compiled, step, x, hl.Objective(l=lambda logprob: -0.5 * logprob))
    assert compiled.counter.frame_count <= 2


def test_an_objective_that_is_gone_before_its_backward() -> None:
    x = data()
    compiled = whole(lambda x, o: o(hl.Logits(x["logits"]), x["targets"]).loss)
    found = compiled(x, hl.Objective(l=lambda logprob: -0.5 * logprob))
    gc.collect()
    want = hl.Objective(l=lambda logprob: -0.5 * logprob)(hl.Logits(x["logits"]), x["targets"]).loss
    torch.testing.assert_close(torch.autograd.grad(found, x["logits"]), torch.autograd.grad(want, x["logits"]))


def test_a_divergence_of_an_objective_that_is_gone() -> None:
    x = data()
    compiled = whole(lambda x, o: o(hl.Logits(x["logits"]), teacher=hl.Logits(x["teacher"])).loss)
    squares = lambda logp, logq: logp.exp() * (logp - logq) ** 2
    found = compiled(x, hl.Objective(l=squares))  # what it reads may change: its gradient is there already
    gc.collect()
    want = hl.Objective(l=squares)(hl.Logits(x["logits"]), teacher=hl.Logits(x["teacher"])).loss
    torch.testing.assert_close(torch.autograd.grad(found, x["logits"]), torch.autograd.grad(want, x["logits"]))
    found = compiled(x, hl.Objective(l=hl.Term(squares, pure=True)))
    gc.collect()
    with pytest.raises(RuntimeError, match="the objective of this graph is gone.*keep it"):
        found.backward()


FLAG = False


def branches(logprob: Tensor, entropy: Tensor) -> Any:
    return (-logprob - 0.1 * entropy, {"spread": entropy}) if FLAG else -logprob


def test_a_form_that_changes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = hl.Objective(l=branches)

    def step(x: dict[str, Tensor]) -> Tensor:
        return objective(hl.Logits(x["logits"]), x["targets"]).loss

    compiled, x = whole(step), data()
    same_step(compiled, step, x)
    monkeypatch.setitem(globals(), "FLAG", True)
    with pytest.raises(RuntimeError, match="something that it reads, has changed"):
        compiled(x)
    torch._dynamo.reset()
    same_step(whole(step), step, x)


class Settings:
    beta = 2.0


SETTINGS = Settings()
TABLE = {"beta": 2.0}
KEPT = torch.tensor([2.0])  # torch itself loses what a graph does to a scalar of the host in float64


def by_object(logprob: Tensor) -> Tensor:
    return -SETTINGS.beta * logprob


def by_table(logprob: Tensor) -> Tensor:
    return -TABLE["beta"] * logprob


def by_tensor(logprob: Tensor) -> Tensor:
    return -KEPT * logprob


@pytest.mark.parametrize("loss", [by_object, by_table, by_tensor], ids=lambda f: f.__name__)
def test_what_may_change_is_read_when_it_is_written(loss: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's side effects come after it, so such a function runs between two graphs."""
    monkeypatch.setattr(SETTINGS, "beta", 2.0)
    monkeypatch.setitem(TABLE, "beta", 2.0)
    KEPT.fill_(2.0)
    objective = hl.Objective(l=loss)

    def step(z: Tensor, t: Tensor) -> Tensor:
        SETTINGS.beta = SETTINGS.beta * 2
        TABLE["beta"] = TABLE["beta"] * 2
        KEPT.mul_(2)
        return objective(hl.Logits(z), t).loss

    x = data()
    plain = -hl.row_facts(hl.Logits(x["logits"]), x["targets"]).logprob.sum() / 6
    compiled = torch.compile(step, backend="aot_eager")
    for power in (4.0, 8.0, 16.0):
        torch.testing.assert_close(compiled(x["logits"], x["targets"]), plain * power)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="read what may change"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(x["logits"], x["targets"])


def test_a_tensor_as_weight_that_the_graph_changes() -> None:
    weight = torch.tensor(1.0)
    objective = hl.Objective(l=hl.Term(cross_entropy, weight=weight))

    def step(z: Tensor, t: Tensor) -> Tensor:
        weight.mul_(2)
        return objective(hl.Logits(z), t).loss

    x = data()
    plain = hl.Objective(l=cross_entropy)(hl.Logits(x["logits"]), x["targets"]).loss
    compiled = whole(step)
    for power in (2.0, 4.0, 8.0):
        torch.testing.assert_close(compiled(x["logits"], x["targets"]), plain * power)


def entropy(logprob: Tensor) -> Tensor:
    return logprob * 7


def mine(logp: Tensor, logq: Tensor) -> Tensor:
    return logp.exp() * (logp - logq) ** 2


mine.__name__ = "forward_kl"


@pytest.mark.parametrize(
    "metrics",
    [{"entropy": perplexity}, {"accuracy": entropy}, [entropy], {"lse": "entropy"}, {"perplexity": "perplexity"}],
    ids=["perplexity", "entropy", "a list", "a fact", "itself"],
)
def test_metrics_under_a_name_of_ours(metrics: Any) -> None:
    objective = hl.Objective(ce=cross_entropy, metrics=metrics)

    def step(x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: m.value for n, m in objective(hl.Logits(x["logits"]), x["targets"]).metrics.items()}

    x = data()
    torch.testing.assert_close(whole(step)(x), step(x))


@pytest.mark.parametrize("metrics", [{"forward_kl": mine}, {"forward_kl": hl.Term(mine)}, [hl.Term(forward_kl)]])
def test_divergences_under_a_name_of_ours(metrics: Any) -> None:
    objective = hl.Objective(ce=cross_entropy, metrics=metrics)

    def step(x: dict[str, Tensor]) -> dict[str, Tensor]:
        teacher = hl.Logits(x["teacher"])
        return {n: m.value for n, m in objective(hl.Logits(x["logits"]), x["targets"], teacher=teacher).metrics.items()}

    x = data()
    torch.testing.assert_close(whole(step)(x), step(x))


def test_a_loss_under_a_name_of_ours() -> None:
    def cross_entropy(logprob: Tensor) -> Tensor:
        return -3 * logprob

    objective = hl.Objective(ce=cross_entropy)
    compiled = whole(lambda x: objective(hl.Logits(x["logits"]), x["targets"]).loss)
    same_step(compiled, lambda x: objective(hl.Logits(x["logits"]), x["targets"]).loss, data())


@pytest.mark.parametrize("a, b", [(1.0, 1), (0.0, -0.0), (True, 1.0), (1, True)])
def test_options_that_are_equal_and_not_the_same(a: Any, b: Any) -> None:
    def loss(logprob: Tensor, *, option: Any = None) -> Tensor:
        return -logprob * (len(repr(option)) + 1)

    def step(x: dict[str, Tensor], objective: hl.Objective) -> Tensor:
        return objective(hl.Logits(x["logits"]), x["targets"]).loss

    compiled, x = whole(step), data()
    one, two = hl.Objective(l=hl.Term(loss, option=a)), hl.Objective(l=hl.Term(loss, option=b))
    assert one.key != two.key
    for objective in (one, two, one):
        same_step(compiled, step, x, objective)


def test_forms_leave_the_random_numbers_alone() -> None:
    objective = hl.Objective(l=lambda logprob: -logprob * torch.rand(()))
    torch.manual_seed(0)
    want = torch.rand(3)
    with torch._subclasses.FakeTensorMode():
        logits, targets = torch.empty(3, V), torch.zeros(3, dtype=torch.long)
        torch.manual_seed(0)
        objective(hl.Logits(logits), targets)
    assert torch.equal(torch.rand(3), want)


FACTOR = 1.0


def scaled_kl(logp: Tensor, logq: Tensor) -> Tensor:
    return FACTOR * logq.exp() * (logq - logp)


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_divergence_pulls_with_what_it_read_in_its_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches, a number that changes between them, and one backward for both."""
    objective, x = hl.Objective(kl=scaled_kl), data()

    def call(x: dict[str, Tensor]) -> Tensor:
        source = hl.Logits(x["logits"]) if kind == "Logits" else hl.Linear(x["hidden"], x["weight"])
        return objective(source, x["targets"], teacher=hl.Logits(x["teacher"])).loss

    found = []
    for fn in (call, whole(call)):
        loss = torch.zeros((), dtype=torch.float64)
        for factor in (1.0, 0.1):
            monkeypatch.setitem(globals(), "FACTOR", factor)
            loss = loss + fn(x)
        found.append(torch.autograd.grad(loss, x["logits" if kind == "Logits" else "hidden"])[0])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_fact_of_a_divergence_that_has_changed_is_not_pulled_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objective, x = hl.Objective(kl=scaled_kl), data()

    def call() -> Tensor:
        source = hl.Logits(x["logits"]) if kind == "Logits" else hl.Linear(x["hidden"], x["weight"])
        return objective(source, x["targets"], teacher=hl.Logits(x["teacher"])).facts["scaled_kl()"].sum()

    leaf = x["logits" if kind == "Logits" else "hidden"]
    (want,), (got,) = (torch.autograd.grad(fn(), leaf) for fn in (call, whole(call)))
    torch.testing.assert_close(got, want)
    loss = whole(call)()
    monkeypatch.setitem(globals(), "FACTOR", 0.1)
    with pytest.raises(RuntimeError, match="scaled_kl.* has changed"):
        torch.autograd.grad(loss, leaf)


def test_a_temperature_that_is_a_terms_own_where_numbers_vary() -> None:
    objective = hl.Objective(ce=hl.Term(cross_entropy, temperature=2.0), metrics=["entropy"])

    def step(x: dict[str, Tensor], T: float) -> Tensor:
        return objective(hl.Linear(x["hidden"], x["weight"], temperature=T), x["targets"]).loss

    compiled = whole(step, dynamic=True)
    for i, T in enumerate((0.8, 1.0, 2.0, 0.7, 2.0)):
        same_step(compiled, step, data(7 + i), T)


def test_an_input_that_requires_grad_where_no_gradient_is_made() -> None:
    log_alpha = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    objective, x = hl.Objective(ce=lambda logprob, log_alpha: -logprob * log_alpha.exp()), data()
    call = lambda: objective(hl.Linear(x["hidden"], x["weight"]), x["targets"], log_alpha=log_alpha).loss
    with torch.inference_mode():
        torch.testing.assert_close(whole(call)(), call())


@pytest.mark.parametrize("T", [-1.0, 0.0])
def test_a_temperature_that_is_no_temperature_is_refused_in_a_graph(T: float) -> None:
    def step(x: dict[str, Tensor], T: Tensor) -> Tensor:
        return OBJECTIVE(hl.Logits(x["logits"], temperature=T), x["targets"]).loss

    with pytest.raises(ValueError, match="temperature: wanted positive and finite"):
        whole(step)(data(), torch.full((7,), T, dtype=torch.float64))


def test_objectives_made_inside_a_compiled_function() -> None:
    """They are made between two graphs, and so is the plan that `explain` shows."""
    config = {"terms": {"ce": {"loss": "cross_entropy", "weight": 0.5}}, "metrics": ["entropy"]}

    def step(x: dict[str, Tensor]) -> Tensor:
        own = hl.Term(lambda logprob, advantage: -logprob * advantage, row_weight=lambda logprob: logprob.exp())
        objective = hl.Objective(ce=cross_entropy, own=own, metrics={"nats": lambda logprob: -logprob})
        source, call = hl.Logits(x["logits"]), {"advantage": x["advantage"]}
        passes = objective.explain(source, x["targets"], **call).sweeps
        out = objective(source, x["targets"], **call)
        return out.loss + hl.Objective.from_config(config)(source, x["targets"]).loss + passes

    compiled, x = torch.compile(step, backend="eager"), data()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know how to trace")
        same_step(compiled, step, x)
        same_step(compiled, step, x)


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_gradient_is_0_where_all_terms_are_off(kind: str) -> None:
    x = {name: value.detach().requires_grad_(value.requires_grad) for name, value in data().items()}
    make = lambda: hl.Logits(x["logits"]) if kind == "Logits" else hl.Linear(x["hidden"], x["weight"])
    whole(lambda: OBJECTIVE(make(), x["targets"], weights={"ce": 0.0, "z": 0.0}).loss)().backward()
    for name in ("logits",) if kind == "Logits" else ("hidden", "weight"):
        assert torch.equal(x[name].grad, torch.zeros_like(x[name]))
