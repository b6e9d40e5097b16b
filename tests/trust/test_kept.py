"""Nothing is kept for ever: what an objective holds dies with it, and what a process keeps is bounded."""

from __future__ import annotations

import functools
import gc
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import headloss as hl
from headloss.graph import content, recipe, spec
from headloss.losses import cross_entropy
from headloss.trace import cache_keys
from headloss.trace import trace as plan

V = 7


class Big:
    """Something that a function may hold."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(100_000)


def over_a_tensor(held: Big) -> hl.Objective:
    return hl.Objective(l=lambda logprob, x=held: -logprob + x.tensor[0])


def over_a_closure(held: Big) -> hl.Objective:
    return hl.Objective(l=cross_entropy, metrics={"m": lambda logprob: logprob + held.tensor[0]})


def over_a_divergence(held: Big) -> hl.Objective:
    return hl.Objective(l=lambda logp, logq: logp.exp() * (logp - logq) + held.tensor[0])


def over_a_row_weight(held: Big) -> hl.Objective:
    return hl.Objective(l=hl.Term(cross_entropy, row_weight=lambda logprob: logprob.exp() + held.tensor[0]))


def over_an_option(held: Big) -> hl.Objective:
    def loss(logprob: Tensor, *, held: Any = None) -> Tensor:
        return -logprob + held.tensor[0]

    return hl.Objective(l=hl.Term(loss, held=held))


def over_a_method(held: Big) -> hl.Objective:
    held.loss = types.MethodType(lambda self, logprob: -logprob + self.tensor[0], held)  # type: ignore[attr-defined]
    return hl.Objective(l=held.loss)  # type: ignore[attr-defined]


def over_a_partial(held: Big) -> hl.Objective:
    def loss(logprob: Tensor, *, x: Any = None) -> Tensor:
        return -logprob + x.tensor[0]

    return hl.Objective(l=functools.partial(loss, x=held))


MAKERS = (
    over_a_tensor, over_a_closure, over_a_divergence, over_a_row_weight, over_an_option, over_a_method, over_a_partial,
)  # fmt: skip


def arguments(make: Callable[..., Any], rows: int = 3) -> tuple[Any, dict[str, Any]]:
    source = hl.Logits(torch.randn(rows, V, requires_grad=True))
    if make is over_a_divergence:
        return source, {"teacher": hl.Logits(torch.randn(rows, V))}
    return source, {"targets": torch.zeros(rows, dtype=torch.long)}


def eager(objective: hl.Objective, make: Callable[..., Any]) -> None:
    source, more = arguments(make)
    objective(source, **more).loss.backward()
    objective.explain(source, **more)
    objective.forward_backward(source, **more)


def fake(objective: hl.Objective, make: Callable[..., Any]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        source, more = arguments(make)
        objective(source, **more).loss.backward()


def compiled(objective: hl.Objective, make: Callable[..., Any]) -> None:
    source, more = arguments(make)
    torch.compile(lambda: objective(source, **more).loss, backend="aot_eager")().backward()
    torch._dynamo.reset()


WAYS = (eager, fake, compiled)


def made(make: Callable[[Big], hl.Objective], way: Callable[..., None]) -> list[weakref.ref[Any]]:
    held = Big()
    objective = make(held)
    way(objective, make)
    functions = [t.fn for t in objective.terms.values()] + [c.fn for _, c in objective.metrics]
    own = [f for f in functions if isinstance(f, types.FunctionType) and not f.__module__.startswith("headloss")]
    return [weakref.ref(x) for x in (held, held.tensor, objective, *own)]


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__)
def test_what_an_objective_holds_dies_with_it(make: Callable[..., Any], way: Callable[..., None]) -> None:
    refs = [ref for _ in range(2) for ref in made(make, way)]
    gc.collect()
    alive = [ref() for ref in refs if ref() is not None]
    assert not alive, f"{alive[0]} is kept by {[type(x) for x in gc.get_referrers(alive[0])]}"


def containers() -> Iterator[tuple[str, int]]:
    """Every container and cache that a module of the package has, by name."""
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] != "headloss":
            continue
        for attribute, x in vars(module).items():
            if isinstance(x, (dict, list, set, weakref.WeakValueDictionary)) and not attribute.startswith("__"):
                yield f"{name}.{attribute}", len(x)
            elif hasattr(x, "cache_info") and getattr(x, "__module__", "") == name:
                yield f"{name}.{attribute}", x.cache_info().currsize


def many(n: int) -> None:
    x, targets = torch.randn(3, V, requires_grad=True), torch.zeros(3, dtype=torch.long)
    for i in range(n):
        names = {"eager": float(i) + 0.5, "fake": -float(i) - 0.5}
        objective = hl.Objective(l=lambda logprob, c=names["eager"]: -logprob * c)
        objective(hl.Logits(x), targets).loss.backward()
        objective(hl.Logits(x, temperature=1.0 + i), targets)
        with FakeTensorMode(allow_non_fake_inputs=True):
            hl.Objective(l=lambda logprob, c=names["fake"]: -logprob * c)(
                hl.Logits(torch.randn(3, V)), torch.zeros(3, dtype=torch.long)
            )


@pytest.mark.filterwarnings("ignore:headloss. .* has been traced")
def test_hundreds_of_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small limits: each container of the package stays below its own, and none grows with every objective."""
    monkeypatch.setattr(plan, "_MOST_TRACES", 8)
    monkeypatch.setattr(spec, "_MOST", 8)
    monkeypatch.setattr(content, "_MOST_KEYS", 8)
    for known in (plan._TRACES, plan._TRACED, spec._SPECS, content._KEYS):
        known.clear()
    recipe.read_recipe.cache_clear()
    many(10)
    gc.collect()
    before = dict(containers())
    many(20)
    gc.collect()
    grown = {name: (before.get(name, 0), size) for name, size in containers() if size > max(before.get(name, 0), 10)}
    grown.pop("headloss.graph.recipe.read_recipe", None)  # strings: at most 512 of them
    assert not grown
    assert (
        recipe.read_recipe.cache_info().maxsize == 512
        and len(content._BY_NUMBER) <= before["headloss.graph.content._BY_NUMBER"] + 2
    )


def test_every_limit_is_one() -> None:
    assert recipe.read_recipe.cache_info().maxsize == 512
    assert plan._MOST_TRACES == spec._MOST == content._MOST_KEYS == 512


def test_an_objective_keeps_a_bounded_number_of_plans() -> None:
    objective = hl.Objective(l=lambda logprob: -logprob)
    source, targets = torch.randn(3, V), torch.zeros(3, dtype=torch.long)
    for i in range(200):
        objective(hl.Logits(source, temperature=1.0 + i / 100), targets)
    assert len(objective.plans.forms) <= 64 and all(len(t._calls) <= 64 for t in objective.terms.values())


def test_a_type_is_not_kept() -> None:
    def one() -> weakref.ref[Any]:
        kind = type("Own", (tuple,), {"_fields": ()})
        cache_keys.fields_of(kind)
        return weakref.ref(kind)

    ref = one()
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("container", [list, dict])
def test_a_pickle_is_what_was_made(container: type) -> None:
    names: Any = ["entropy"] if container is list else {"entropy": "entropy"}
    objective = hl.Objective(ce=cross_entropy, metrics=names)
    if container is list:
        names.append("accuracy")
    else:
        names["accuracy"] = "accuracy"
    for other in (objective, pickle.loads(pickle.dumps(objective)), hl.Objective.from_config(objective.to_config())):
        assert [n for n, _ in other.metrics] == ["entropy"]


def test_options_and_facts_are_copies() -> None:
    facts, options = {"hot": ("entropy", 2.0)}, {"levels": [1.0, 2.0]}

    def loss(logprob: Tensor, hot: Tensor, *, levels: Any = None) -> Tensor:
        return -logprob + sum(levels) * hot

    term = hl.Term(loss, facts=facts, **options)
    facts["more"] = ("entropy", 3.0)
    options["levels"].append(5.0)
    assert term.facts == {"hot": ("entropy", 2.0)} and term.options == {"levels": [1.0, 2.0]}
