"""What a graph says of a call before there are numbers: made from the plan, and the same as the call then returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreting import inside, interpreted
from torch import Tensor

import headloss as hl
from headloss.graph import compiled as compiled_calls
from headloss.graph import recipe, spec
from headloss.losses import cross_entropy, forward_kl, gspo, jsd, reverse_kl, z_loss

N, V, D, S, K = 12, 34, 5, 3, 4  # as many columns as a form would have rows


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    spec._SPECS.clear()


@pytest.fixture
def without_numbers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Forms are made of tensors without numbers alone; the modes that they were made in."""
    modes, found = [], spec._spec_of

    def form_of(recipe: Any, terms: Any, mode: Any) -> Any:
        modes.append(mode)
        assert isinstance(mode, spec.FakeTensorMode), "a form asked for numbers"
        return found(recipe, terms, mode)

    monkeypatch.setattr(spec, "_spec_of", form_of)
    return modes


def data(rows: int = N) -> dict[str, Tensor]:
    torch.manual_seed(rows)
    x = {
        "hidden": torch.randn(rows, D).double(), "weight": torch.randn(V, D).double(),
        "logits": torch.randn(rows, V).double(), "targets": torch.randint(V, (rows,)),
        "taught": torch.randn(rows, V).double(), "ids": torch.rand(rows, V).argsort(-1)[:, :K],
        "advantage": torch.randn(rows).double(), "old_logprob": -3 + torch.rand(rows).double(),
        "segments": torch.arange(rows) * S // rows, "table": torch.rand(V).double(), "by_segment": torch.rand(S),
    }  # fmt: skip
    x["targets"][::5] = -100
    for name in ("hidden", "weight", "logits"):
        x[name].requires_grad_()
    return x


def logits(x: dict[str, Tensor]) -> hl.Logits:
    return hl.Logits(x["logits"] * 1.0)


def linear(x: dict[str, Tensor]) -> hl.Linear:
    return hl.Linear(x["hidden"] * 1.0, x["weight"], memory=V * 8 * 7)


def unusual(logprob: Tensor, entropy: Tensor, argmax: Tensor) -> tuple[Tensor, dict[str, Any]]:
    found = {
        "whole": argmax, "mask": logprob > -2, "half": entropy.half(), "wide": entropy.float(), "number": 3,
        "deep/entropy": entropy, "entropy_std": entropy, "logprob_min": logprob,
    }  # fmt: skip
    return -logprob, found


def sizes(logprob: Tensor) -> dict[str, Tensor]:
    return {"rows": torch.full((), logprob.numel()), "all": logprob.sum(), "spread_max": logprob - logprob.mean()}


def by_segment(logprob: Tensor, segments: hl.Segments, by_segment: Tensor) -> dict[str, Tensor]:
    return {"mean": segments.totals(logprob), "own_std": segments.totals(logprob) * by_segment, "row": logprob}


def bins(logprob: Tensor) -> Tensor:
    return torch.histc(logprob.float(), V).to(torch.int32)


def table(logprob: Tensor, table: Tensor) -> dict[str, Tensor]:
    return {"each": table * logprob.mean(), "top_max": table.amax()}


def square(logp: Tensor, logq: Tensor) -> Tensor:
    return logp.exp() * (logp - logq) ** 2


def branches(logprob: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    if float(entropy.detach().mean()) > 1e9:
        return -logprob, {}
    return -logprob, {"entropy": entropy}


def draws(logprob: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return branches(logprob * torch.rand(()), entropy)


Step = Callable[[hl.Objective, Any, dict[str, Tensor]], Any]
CALLS: dict[str, tuple[hl.Objective, Step]] = {
    "dtypes": (hl.Objective(l=unusual, metrics=["dead_rows", "entropy"]), lambda o, s, x: o(s, x["targets"])),
    "rows": (hl.Objective(ce=cross_entropy, metrics=[sizes, bins]), lambda o, s, x: o(s, x["targets"])),
    "table": (
        hl.Objective(ce=cross_entropy, metrics=[table]), lambda o, s, x: o(s, x["targets"], table=hl.Whole(x["table"]))
    ),
    "segments": (
        hl.Objective(rl=gspo, z=hl.Term(z_loss, weight=1e-3), metrics=[by_segment, "accuracy"]),
        lambda o, s, x: o(
            s, x["targets"], segments=hl.Segments(x["segments"], S), advantage=x["advantage"],
            old_logprob=x["old_logprob"], by_segment=x["by_segment"],
        ),
    ),
    "teacher": (
        hl.Objective(kl=forward_kl, r=reverse_kl, js=jsd, own=square, metrics=["teacher_agreement", forward_kl]),
        lambda o, s, x: o(s, teacher=hl.Logits(x["taught"])),
    ),
    "sparse": (
        hl.Objective(kl=hl.Term(forward_kl, tail="bucket"), metrics=["teacher_agreement", "ids_logprob"]),
        lambda o, s, x: o(s, x["targets"], teacher=hl.Sparse(x["ids"], -1 - x["taught"].gather(1, x["ids"]).exp())),
    ),
    "off": (
        hl.Objective(ce=cross_entropy, z=z_loss), lambda o, s, x: o(s, x["targets"], weights={"z": 0.0})
    ),
}  # fmt: skip


def flat(out: hl.Output) -> list[Tensor]:
    return [out.loss, *out.terms.values(), *(p for m in out.metrics.values() for p in m.parts), *out.facts.values()]


def same(found: hl.Output, want: hl.Output, x: dict[str, Tensor]) -> None:
    said = [[(n, m.kind, m.per, len(m.parts)) for n, m in out.metrics.items()] for out in (found, want)]
    assert said[0] == said[1]
    assert list(found.terms) == list(want.terms) and list(found.facts) == list(want.facts)
    assert [(y.dtype, y.shape) for y in flat(found)] == [(y.dtype, y.shape) for y in flat(want)]
    torch.testing.assert_close(flat(found), flat(want), equal_nan=True)
    leaves = [x[n] for n in ("hidden", "weight", "logits")]
    pulled = [out.loss + sum(f.sum() for f in out.facts.values() if f.requires_grad) for out in (found, want)]
    grads = [torch.autograd.grad(y, leaves, allow_unused=True) for y in pulled]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("source", [logits, linear], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", CALLS)
def test_a_form_is_that_of_the_call(name: str, source: Any, without_numbers: list[Any]) -> None:
    objective, call = CALLS[name]
    compiled = torch.compile(lambda x: call(objective, source(x), x), backend="aot_eager", fullgraph=True)
    for rows in (N, 2 * N):
        x = data(rows)
        same(compiled(x), call(objective, source(x), x), x)
    assert without_numbers


@pytest.mark.parametrize("source", [logits, linear], ids=lambda f: f.__name__)
def test_row_facts(source: Any, without_numbers: list[Any]) -> None:
    asked = ("logprob", "argmax", ("entropy", 2.0), "teacher_argmax", "reverse_cross_entropy")
    step = lambda x: [*hl.row_facts(source(x), x["targets"], asked, teacher=hl.Logits(x["taught"])).values()]
    x = data()
    found, want = torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(x)
    assert [y.dtype for y in found] == [y.dtype for y in want] and without_numbers
    torch.testing.assert_close(found, want)
    ids = lambda x: hl.row_facts(source(x), want=("ids_logprob", "ids_logit"), ids=x["ids"]).ids_logit
    torch.testing.assert_close(torch.compile(ids, backend="aot_eager", fullgraph=True)(x), ids(x))


def test_a_function_that_branches_on_values_takes_zeros() -> None:
    """The one thing that no plan knows; it draws nothing of the caller's random numbers."""
    torch.manual_seed(0)
    want = torch.rand(3)
    with torch._subclasses.FakeTensorMode():
        torch.manual_seed(0)
        out = hl.Objective(l=draws)(hl.Logits(torch.empty(3, V)), torch.zeros(3, dtype=torch.long))
    assert torch.equal(torch.rand(3), want) and list(out.metrics) == ["l/entropy"]
    objective, x = hl.Objective(l=branches), data()
    step = lambda x: objective(logits(x), x["targets"])
    same(torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(x), x)


def few(logprob: Tensor) -> Tensor:
    return logprob if logprob.numel() < 20 else logprob.mean()


def test_a_metric_of_other_things_than_when_the_graph_was_made_is_refused() -> None:
    objective, x = hl.Objective(ce=cross_entropy, metrics=[few]), data(30)
    x["targets"] = x["targets"].clamp(min=0)
    compiled = torch.compile(
        lambda z, t: objective(hl.Logits(z), t).metrics["few"].value, backend="aot_eager", fullgraph=True, dynamic=True
    )
    torch.testing.assert_close(
        compiled(x["logits"], x["targets"]), objective(logits(x), x["targets"]).metrics["few"].value
    )
    with pytest.raises(RuntimeError, match="few per token.*few per call"):
        compiled(x["logits"][:12], x["targets"][:12])


def test_a_call_that_is_wrong_says_so() -> None:
    with torch._subclasses.FakeTensorMode(), pytest.raises(TypeError, match="^advantage: missing"):
        segments = hl.Segments(torch.zeros(3, dtype=torch.long), 1)
        hl.Objective(rl=gspo)(hl.Logits(torch.empty(3, V)), torch.zeros(3, dtype=torch.long), segments=segments)


def mixed(logprob: Tensor, entropy: Tensor) -> Tensor:
    return -logprob * entropy / entropy.sum()


@inside
@pytest.mark.parametrize("rows", [5, 50])
@pytest.mark.parametrize(
    "terms", [{"js": jsd}, {"own": hl.Term(square, pure=True), "mixed": mixed}], ids=["in one launch", "in two"]
)
def test_kernels(terms: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan says whether the gradient is made in the launch, whatever the rows; those are told at the call."""
    from headloss.backends.triton import backend

    monkeypatch.setattr(backend, "takes_one_launch", lambda rows, columns: rows > 40)
    torch.manual_seed(0)
    logits, teacher_source, targets = (
        torch.randn(rows, 7, requires_grad=True),
        torch.randn(rows, 7),
        torch.randint(7, (rows,)),
    )
    targets[::4] = -100
    objective = hl.Objective(**terms, metrics=["entropy"], backend="triton")

    def step(z: Tensor) -> list[Tensor]:
        out = objective(hl.Logits(z), targets, teacher=hl.Logits(teacher_source))
        pulled = sum(y.sum() for y in out.facts.values() if y.requires_grad)
        return [2 * out.loss + pulled, out.loss, *out.metrics["entropy"].parts]

    found, want = torch.compile(step, backend="aot_eager", fullgraph=True)(logits), step(logits)
    torch.testing.assert_close(found, want)
    for a, b in zip(found[:2], want[:2]):
        torch.testing.assert_close(
            torch.autograd.grad(a, logits, retain_graph=True), torch.autograd.grad(b, logits, retain_graph=True)
        )
    (text,) = spec._SPECS
    assert recipe.read_recipe(text).visited == ("js" in terms)


@inside
def test_kernels_of_float16_segments() -> None:
    """Settled in a launch, and written in the backward, when the scale of the loss is known."""
    torch.manual_seed(0)
    plain, targets = torch.randn(12, 7).half(), torch.randint(7, (12,))
    segments = hl.Segments.from_ids(torch.arange(12) // 6)
    objective = hl.Objective(it=lambda logprob, segments: -segments.mean(logprob) * 1e-3, backend="triton")

    def step(z: Tensor) -> Tensor:
        return objective(hl.Logits(z), targets, segments=segments, num_items=10**4).loss

    half, exact = plain.clone().requires_grad_(), plain.double().requires_grad_()
    loss = torch.compile(step, backend="aot_eager", fullgraph=True)(half)
    want = -exact.log_softmax(-1)[torch.arange(12), targets].sum() * 1e-7
    torch.testing.assert_close(loss.double(), want, rtol=1e-4, atol=0)
    (loss * 2**16).backward()
    (want * 2**16).backward()
    assert exact.grad is not None and half.grad is not None
    torch.testing.assert_close(half.grad.double(), exact.grad, rtol=4e-3, atol=4e-6)
    (text,) = spec._SPECS
    assert not recipe.read_recipe(text).visited


@inside
def test_kernels_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a graph is made with: they are cut in parts where columns are many, and have their gradient too."""
    seen, plain = [], compiled_calls.in_one_launch
    monkeypatch.setattr(compiled_calls, "in_one_launch", lambda *a: seen.append(plain(*a)) or seen[-1])
    objective = hl.Objective(ce=cross_entropy, backend="triton")
    x, targets = torch.randn(3, 9000, requires_grad=True), torch.tensor([0, 8999, 5])
    step = torch.compile(lambda z: objective(hl.Logits(z), targets).loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(x), torch.nn.functional.cross_entropy(x, targets))
    assert seen == [True]


test_under_the_interpreter = interpreted(__file__, "-k", "test_kernels")
