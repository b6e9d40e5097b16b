"""torch.compile: a call is one operator of a whole graph, and gives what it gives without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import headloss as hl
from headloss.losses import cross_entropy, forward_kl, grpo, gspo, jsd, reinforce, tvd, z_loss

V, D, S = 31, 5, 3
OBJECTIVE = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=0.1), metrics=["entropy", "accuracy"])
POLICY = hl.Objective(
    rl=hl.Term(gspo, low=0.2, high=0.2, reduction="seq_mean_token_mean"), z=hl.Term(z_loss, weight=0.1)
)
VALUE = hl.Objective(rl=hl.Term(reinforce, weight=0.5), ce=cross_entropy)
DENSE = hl.Objective(ce=cross_entropy, kl=hl.Term(forward_kl, weight=0.5, temperature=2.0), js=jsd)
SPARSE = hl.Objective(kl=forward_kl, ce=hl.Term(cross_entropy, weight=0.3))


def centred(logprob: Tensor, advantage: Tensor) -> Tensor:
    return -(advantage - advantage.mean()) * logprob


MIXED = hl.Objective(rl=centred, metrics=["perplexity"])


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def data(rows: int, ignored: int = 2, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(rows)
    found: dict[str, Tensor] = {
        "hidden": torch.randn(rows, D, dtype=dtype),
        "weight": torch.randn(V, D, dtype=dtype),
        "bias": torch.randn(V, dtype=dtype),
        "logits": 3 * torch.randn(rows, V, dtype=dtype),
        "advantage": torch.randn(rows, dtype=dtype),
        "old_logprob": -3 + torch.rand(rows, dtype=dtype),
        "teacher_weight": torch.randn(V + 2, D, dtype=dtype),
        "teacher_logprobs": torch.randn(rows, 4, dtype=dtype).log_softmax(-1),
    }
    for name in ("hidden", "weight", "bias", "logits", "advantage"):
        found[name].requires_grad_()
    order = torch.randperm(rows)
    found["targets"] = torch.randint(V, (rows,)).index_fill(0, order[:ignored], -100)
    found["ids"] = torch.randint(S, (rows,))
    found["teacher_ids"] = torch.randint(V, (rows, 4))
    found["beta"] = torch.tensor(0.7, dtype=dtype)
    found["items"] = torch.tensor(11.0, dtype=dtype)
    return found


def linear(x: dict[str, Tensor]) -> hl.Linear:
    return hl.Linear(x["hidden"] * 1.5, x["weight"], x["bias"], memory=V * 8 * 5, softcap=20.0)


def logits(x: dict[str, Tensor]) -> hl.Logits:
    return hl.Logits(x["logits"] * 1.5, temperature=0.8)


def segments(x: dict[str, Tensor]) -> hl.Segments:
    return hl.Segments.from_ids(x["ids"], S)


def plain(source: Any, x: dict[str, Tensor]) -> Any:
    return OBJECTIVE(source(x), x["targets"])


def counted(source: Any, x: dict[str, Tensor]) -> Any:
    return OBJECTIVE(source(x), x["targets"], num_items=9, weights={"z": 0.3}, grad_scale=2.0)


def counted_on_device(source: Any, x: dict[str, Tensor]) -> Any:
    return OBJECTIVE(source(x), x["targets"], num_items=x["items"], weights={"z": x["beta"], "ce": 0.0})


def by_segment(source: Any, x: dict[str, Tensor]) -> Any:
    inputs = {"advantage": x["advantage"].detach(), "old_logprob": x["old_logprob"]}
    return POLICY(source(x), x["targets"], segments=segments(x), num_segments=4, **inputs)


def with_gradients(source: Any, x: dict[str, Tensor]) -> Any:
    return VALUE(source(x), x["targets"], advantage=x["advantage"] * 2)


def mixed_rows(source: Any, x: dict[str, Tensor]) -> Any:
    return MIXED(source(x), x["targets"], advantage=x["advantage"])


def dense_teacher(source: Any, x: dict[str, Tensor]) -> Any:
    teacher = hl.Linear(x["hidden"].detach() * 0.5, x["teacher_weight"])
    return DENSE(source(x), x["targets"], teacher=teacher)


def sparse_teacher(source: Any, x: dict[str, Tensor]) -> Any:
    return SPARSE(source(x), x["targets"], teacher=hl.Sparse(x["teacher_ids"], x["teacher_logprobs"]))


def unread(source: Any, x: dict[str, Tensor]) -> Any:
    return POLICY(source(x), x["targets"], segments=segments(x), host_read=False, advantage=x["advantage"].detach())


def a_fact_pulled(source: Any, x: dict[str, Tensor]) -> Any:
    out = OBJECTIVE(source(x), x["targets"])
    loss = out.loss + (out.facts.entropy * x["old_logprob"]).mean()
    return hl.Output(loss, out.terms, out.metrics, out.facts)  # torch 2.8 traces no _replace


CALLS = (
    plain, counted, counted_on_device, by_segment, with_gradients, mixed_rows, dense_teacher, sparse_teacher, unread,
    a_fact_pulled,
)  # fmt: skip


def flat(out: Any) -> dict[str, Any]:
    return {
        "loss": out.loss * 2,
        "terms": dict(out.terms),
        "metrics": {name: metric.value for name, metric in out.metrics.items()},
        "facts": dict(out.facts.items()),
    }


def gradients(loss: Tensor, x: dict[str, Tensor]) -> dict[str, Tensor | None]:
    leaves = {name: t for name, t in x.items() if t.requires_grad}
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))


def same(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("source", [linear, logits])
@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_a_whole_graph_gives_what_eager_gives(call: Callable[..., Any], source: Callable[..., Any]) -> None:
    def step(x: dict[str, Tensor]) -> dict[str, Any]:
        return flat(call(source, x))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x = data(9)
    want, found = step(x), compiled(x)
    same(found, want)
    same(gradients(found["loss"], x), gradients(want["loss"], x))
    if "entropy" in want["facts"]:  # and a fact that is pulled on behind the graph
        want, found = step(x), compiled(x)
        pulled = [(out["facts"]["entropy"] ** 2).sum() + out["loss"] for out in (found, want)]
        same(gradients(pulled[0], x), gradients(pulled[1], x))


def test_compiled_to_code() -> None:
    def step(x: dict[str, Tensor]) -> dict[str, Any]:
        return flat(counted(linear, x)) | {"facts": {}}

    compiled = torch.compile(step, fullgraph=True)
    x = data(9)
    want, found = step(x), compiled(x)
    same(found, want)
    same(gradients(found["loss"], x), gradients(want["loss"], x))


def test_rows_change_without_compiling_again() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: flat(by_segment(linear, x)), backend=counter, fullgraph=True)
    for rows in (7, 12, 13, 20, 8):
        x = data(rows, rows % 5)
        want, found = flat(by_segment(linear, x)), compiled(x)
        same(found, want)
        same(gradients(found["loss"], x), gradients(want["loss"], x))
    assert counter.frame_count <= 2  # one size, then any


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_segments_that_the_graph_itself_counts() -> None:
    """Their number is read from the positions, and what an input means does not wait for it."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(x: dict[str, Tensor], advantage: Tensor, positions: Tensor) -> Any:
        segments = hl.Segments.from_position_ids(positions)
        call = {"segments": segments, "advantage": advantage, "old_logprob": x["old_logprob"]}
        return flat(POLICY(linear(x), x["targets"], **call))

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for lengths in ((3, 4), (2, 5, 5), (1, 1, 1), (8,)):
        x, positions = data(sum(lengths)), torch.cat([torch.arange(n) for n in lengths])
        advantage = x["advantage"].detach()
        want, found = step(x, advantage, positions), compiled(x, advantage, positions)
        same(found, want)
        same(gradients(found["loss"], x), gradients(want["loss"], x))
    assert counter.frame_count <= 2


def test_numbers_change_without_compiling_again() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(x: dict[str, Tensor], beta: float, items: int) -> Any:
        return OBJECTIVE(logits(x), x["targets"], weights={"z": beta}, num_items=items).loss

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for i in range(5):
        x = data(7)
        same(compiled(x, 0.1 + 0.2 * i, 9 + i), step(x, 0.1 + 0.2 * i, 9 + i))
    assert counter.frame_count <= 2


OF_PROMPTS = hl.Segments.from_ids(torch.arange(12) // 4)


@pytest.mark.parametrize(
    ("term", "more"),
    [
        (hl.Term(z_loss, temperature=2.0), {}),
        (hl.Term(forward_kl, temperature=2.0), {"teacher": hl.Logits(torch.ones(12, V).double().tril())}),
        (hl.Term(cross_entropy, temperature=2.0), {"class_weight": torch.rand(V, dtype=torch.float64)}),
        (hl.Term(cross_entropy, temperature=2.0, targets="other"), {"other": torch.arange(12)}),
        (hl.Term(z_loss, reduction="seq_mean_token_sum_norm", length=3.0, reduction_segments="prompts"),
         {"prompts": OF_PROMPTS}),
    ],
    ids=["own", "teacher", "class_weight", "targets", "length"],
)  # fmt: skip
@pytest.mark.parametrize("how", ["__call__", "forward_backward"])
def test_numbers_of_terms_may_be_symbols(term: hl.Term, more: dict[str, Any], how: str) -> None:
    run = getattr(hl.Objective(term=term), how)
    step = torch.compile(lambda z, y: run(hl.Logits(z), y, **more).loss, backend="eager", fullgraph=True, dynamic=True)
    z, y = torch.randn(12, V, dtype=torch.float64), torch.arange(12)
    torch.testing.assert_close(step(z, y), run(hl.Logits(z), y, **more).loss)


def twice(z: Tensor, y: Tensor, T: float) -> Tensor:
    """The second call finds numbers that a comparison in the first has settled, those of defaults too."""
    return OBJECTIVE(hl.Logits(z), y).loss + OBJECTIVE(hl.Logits(z), y).loss


def one_number(z: Tensor, y: Tensor, T: float) -> Tensor:
    return OBJECTIVE(hl.Logits(z, temperature=T, scale=T), y, grad_scale=T).loss


def settled(z: Tensor, y: Tensor, T: float) -> Tensor:
    return OBJECTIVE(hl.Logits(z, temperature=T, scale=T), y).loss if T == 1.0 else z.sum()


def at_temperature(z: Tensor, y: Tensor, T: float) -> Tensor:
    return hl.row_facts(hl.Logits(z), y, (("entropy", T),))["entropy", T].sum()


@pytest.mark.parametrize("step", [twice, one_number, settled, at_temperature])
@pytest.mark.parametrize("dynamic", [True, None])
def test_numbers_that_a_graph_has_settled(step: Callable[..., Tensor], dynamic: bool | None) -> None:
    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=dynamic)
    z, y = torch.randn(12, V, dtype=torch.float64), torch.arange(12)
    for T in (1.0, 2.0, 3.0):
        torch.testing.assert_close(compiled(z, y, T), step(z, y, T))


def test_evaluation_makes_no_gradients() -> None:
    compiled = torch.compile(lambda x: flat(plain(linear, x)), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        x = data(9)
        found = compiled(x)
        same(found, flat(plain(linear, x)))
    assert not found["loss"].requires_grad


def test_forward_backward() -> None:
    def step(x: dict[str, Tensor]) -> Any:
        out = OBJECTIVE.forward_backward(linear(x), x["targets"])
        return out.loss, out.grads.hidden, out.grads.weight, out.grads.bias

    x = data(9)
    same(torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(x))


@pytest.mark.parametrize("source", [linear, logits])
def test_row_facts(source: Callable[..., Any]) -> None:
    def step(x: dict[str, Tensor]) -> Tensor:
        facts = hl.row_facts(source(x), x["targets"], want=("logprob", "entropy", ("entropy", 2.0)))
        return -facts.logprob.sum() + (facts["entropy", 2.0] * facts.entropy).sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for rows in (7, 9):
        x = data(rows)
        want, found = step(x), compiled(x)
        same(found, want)
        same(gradients(found, x), gradients(want, x))


def test_two_objectives_in_one_graph() -> None:
    def step(x: dict[str, Tensor]) -> Tensor:
        source = linear(x)
        return OBJECTIVE(source, x["targets"]).loss + VALUE(source, x["targets"], advantage=x["advantage"]).loss

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x = data(9)
    want, found = step(x), compiled(x)
    same(found, want)
    same(gradients(found, x), gradients(want, x))


def test_another_objective_is_another_graph_and_an_equal_one_is_not() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(objective: hl.Objective, x: dict[str, Tensor]) -> Tensor:
        return objective(logits(x), x["targets"]).loss

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    x = data(9)
    for weight in (0.1, 0.1, 0.2, 0.1):
        objective = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=weight))
        same(compiled(objective, x), step(objective, x))
    assert counter.frame_count == 2


def test_prepared_targets_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: dict[str, Tensor], prepared: hl.Prepared) -> Any:
        return flat(POLICY(linear(x), prepared, advantage=x["advantage"].detach()))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x = data(9)
    prepared = hl.prepare(x["targets"], segments(x))
    want = step(x, prepared)
    compiled(x, prepared)
    monkeypatch.setattr("headloss.graph.spec.prepare", None)
    found = compiled(x, prepared)
    same(found, want)
    same(gradients(found["loss"], x), gradients(want["loss"], x))


def test_autocast() -> None:
    def step(x: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return OBJECTIVE(linear(x), x["targets"]).loss

    x = data(9, dtype=torch.float32)
    want, found = step(x), torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(gradients(found, x), gradients(want, x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_scale_reaches_narrow_gradients(dtype: torch.dtype) -> None:
    def step(x: dict[str, Tensor]) -> Tensor:
        return OBJECTIVE(hl.Linear(x["hidden"], x["weight"], memory=V * 2 * 4), x["targets"], num_items=1 << 20).loss

    x = data(9)
    x |= {k: t.detach().to(dtype).requires_grad_() for k, t in x.items() if t.requires_grad}
    scale = 2.0**16
    found = gradients(torch.compile(step, backend="aot_eager", fullgraph=True)(x) * scale, x)
    want = gradients(step(x) * scale, x)
    assert want["hidden"] is not None and want["hidden"].abs().max() > 0
    torch.testing.assert_close(found, want)


def at_ids(ids_logprob: Tensor) -> Tensor:
    return -ids_logprob.sum(-1)


@pytest.mark.parametrize("how", ["ids", "sparse"])
def test_a_form_that_no_call_has_had_is_made_while_the_graph_is(how: str) -> None:
    """With targets of a term's own, next to ids of each row: nothing was cached before."""
    made = lambda: hl.Objective(own=hl.Term(cross_entropy, targets="own_targets"), at=at_ids)
    x = data(9)
    ids = torch.stack([torch.randperm(V)[:3] for _ in range(9)])
    extra = {"ids": ids} if how == "ids" else {"teacher": hl.Sparse(ids, torch.full(ids.shape, -2.0))}
    call = lambda objective, x: objective(linear(x), x["targets"], own_targets=x["targets"], **extra).loss
    objective = made()
    compiled = torch.compile(lambda x: call(objective, x), backend="aot_eager", fullgraph=True)
    same(compiled(x), call(made(), x))


def test_top_next_to_ids_is_named_as_what_breaks_a_graph() -> None:
    objective, x = hl.Objective(at=at_ids, top=hl.Term(tvd, top=2, tail="none")), data(9)
    ids = torch.stack([torch.randperm(V)[:3] for _ in range(9)])
    call = lambda x: objective(linear(x), x["targets"], teacher=hl.Logits(x["logits"].detach()), ids=ids).loss
    with pytest.raises(torch._dynamo.exc.Unsupported, match="support=, top=, hl.Routed"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(x)
    same(torch.compile(call, backend="aot_eager")(x), call(x))


def test_what_overwrites_its_logits_breaks_the_graph() -> None:
    def step(x: Tensor, targets: Tensor) -> Tensor:
        return OBJECTIVE(hl.Logits(x * 2, inplace=True), targets).loss

    x = data(9)
    found = torch.compile(step, backend="eager")(x["logits"], x["targets"])
    same(found, step(x["logits"], x["targets"]))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="headloss runs this call uncompiled"):
        torch.compile(step, backend="eager", fullgraph=True)(x["logits"], x["targets"])


def test_a_missing_input_is_named() -> None:
    objective = hl.Objective(rl=grpo)
    compiled = torch.compile(lambda x: objective(logits(x), x["targets"]).loss, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="advantage: missing; term 'rl'"):
        compiled(data(7))


def test_out_of_range_targets_are_still_refused() -> None:
    compiled = torch.compile(lambda x: flat(plain(logits, x)), backend="aot_eager", fullgraph=True)
    x = data(7)
    x["targets"][0] = V
    with pytest.raises(ValueError, match="targets: wanted values in"):
        compiled(x)
