"""First mistakes: each error says what to write instead."""

from __future__ import annotations

import functools
import importlib
import pickle
import re
from typing import Any

import pytest
import torch

import headloss as hl
from headloss.losses import cross_entropy, grpo, gspo

LOGITS, TARGETS = torch.randn(2, 5, 11), torch.randint(11, (2, 5))


def test_a_term_without_a_name() -> None:
    with pytest.raises(TypeError, match=r"each needs a name, as in Objective\(ce=cross_entropy\)"):
        hl.Objective(cross_entropy)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_one_advantage_a_line(shape: tuple[int, ...]) -> None:
    advantage = torch.ones(shape)
    with pytest.raises(ValueError, match=r"advantage\.view\(-1, 1\)\.expand\(2, 5\)"):
        hl.Objective(rl=grpo)(hl.Logits(LOGITS), TARGETS, advantage=advantage)
    hl.Objective(rl=grpo)(hl.Logits(LOGITS), TARGETS, advantage=advantage.view(-1, 1).expand(2, 5))


def test_one_advantage_a_segment() -> None:
    segments, advantage = hl.Segments.from_batch(TARGETS), torch.ones(2)
    with pytest.raises(ValueError, match=r"advantage: has one value (a|per) segment.*segments.spread\(advantage\)"):
        hl.Objective(rl=gspo)(hl.Logits(LOGITS), TARGETS, segments=segments, advantage=advantage)


def test_a_loss_that_fails_says_what_it_was_called_with() -> None:
    with pytest.raises(RuntimeError) as error:
        hl.Objective(mine=lambda logprob: logprob + torch.ones(3))(hl.Logits(LOGITS), TARGETS)
    (note,) = error.value.__notes__
    assert "was called with logprob (10,)" in note


def test_offsets_instead_of_segments() -> None:
    with pytest.raises(TypeError, match="from_cu_seqlens"):
        hl.Objective(rl=gspo)(hl.Logits(LOGITS), TARGETS, advantage=torch.ones(2, 5), segments=torch.tensor([0, 5, 10]))


class Scaled(torch.nn.Module):
    """A loss as a module: its forward says what it asks for."""

    def __init__(self, learned: bool = False) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0)) if learned else 2.0

    def forward(self, logprob: torch.Tensor, *, power: float = 1.0) -> torch.Tensor:
        return self.scale * (-logprob) ** power


def test_a_module_is_read_through_its_forward() -> None:
    logits, targets = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.tensor([1, 2, -100, 3])
    objective = hl.Objective(a=hl.Term(Scaled(), power=2.0))
    out = objective(hl.Logits(logits), targets)
    wanted = (2 * logits.log_softmax(-1)[[0, 1, 3], [1, 2, 3]] ** 2).mean()
    torch.testing.assert_close(out.loss, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in (out.loss, wanted)))
    assert hl.verify(objective, hl.Logits(logits.detach()), targets).ok
    with pytest.raises((TypeError, ValueError), match="requires grad"):
        hl.Objective(a=Scaled(learned=True))(hl.Logits(logits), targets)


def test_what_was_meant_is_suggested() -> None:
    logits, targets = torch.randn(4, 6), torch.tensor([1, 2, -100, 3])

    def call(*functions: object, **given: object) -> None:
        hl.Objective(**{f"t{i}": fn for i, fn in enumerate(functions)})(hl.Logits(logits), targets, **given)

    with pytest.raises(TypeError, match="log_prob: missing; term 't0'.*did you mean 'logprob'"):
        call(lambda log_prob: -log_prob)
    with pytest.raises(TypeError, match=r"old_lp: missing.*did you mean 'old_lps'"):
        call(lambda logprob, old_lp, old_lps=None: logprob - old_lp, old_lps=torch.zeros(4))
    with pytest.raises(TypeError, match=r"advantage: missing; .*passed: none$"):
        call(grpo)
    with pytest.raises(TypeError, match=r"w: missing; .*mean_logprob, w \(row weight\); inputs passed: none"):
        call(hl.Term(cross_entropy, row_weight="w"))
    with pytest.raises(TypeError, match="labels: missing; .*did you mean 'targets'"):
        call(lambda logprob, labels: -logprob)
    with pytest.raises(TypeError, match="logits: missing; .*a loss gets facts such as logprob, not logits"):
        call(lambda logits, targets: -logits)
    with pytest.raises((TypeError, ValueError), match=r"got shape \(\); do not reduce in the loss, use Term\("):
        call(lambda logprob: -logprob.mean())
    with pytest.raises((TypeError, ValueError), match=r"got NoneType; does it return its values\?"):
        call(lambda logprob: None)
    for said, meant in (("mean", "did you mean 'token_mean'"), ("none", "values per row are in out.facts")):
        with pytest.raises(ValueError, match=meant):
            hl.Term(cross_entropy, reduction=said)
    for make in (
        lambda: hl.Objective.from_config({"terms": {"ce": "cros_entropy"}}),
        lambda: hl.Objective(ce=cross_entropy, metrics=["entorpy"]),
        lambda: hl.row_facts(hl.Logits(logits), targets, want=["logprobs"]),
    ):
        with pytest.raises(ValueError, match="did you mean") as raised:
            make()
        assert len(str(raised.value)) < 120, "a suggestion comes without the whole list"
    with pytest.raises(ValueError, match=r"got \(4, 11\); pass weight\.T"):
        hl.Linear(torch.ones(3, 4), torch.ones(4, 11))
    with pytest.raises(TypeError, match=r"low: an option of term 't1'.*: hl\.Term\(grpo, low=\.\.\.\)"):
        call(cross_entropy, grpo, advantage=torch.zeros(4), low=0.1)
    with pytest.raises(TypeError, match=r"\*\*more in a loss's signature"):
        call(lambda logprob, **more: logprob)
    with pytest.raises(TypeError, match=r"\(values, a dict of metrics\), got a tuple of \(tensor, tensor\)"):
        call(lambda logprob: (-logprob, logprob))
    with pytest.raises(ValueError, match=r"is 'lss' the loss\? \(at terms\.ce\)"):
        hl.Objective.from_config({"terms": {"ce": {"lss": "cross_entropy"}}})


def test_sizes_of_a_trace_go_by_what_they_are() -> None:
    """Its numbers stand for any, and its symbols mean nothing to a reader."""
    segments, logits, targets = hl.Segments.from_batch((2, 3)), hl.Logits(torch.randn(6, 7)), torch.arange(6)
    for fn, said in (
        (lambda logprob, segments: segments.spread(logprob), r"per segment, shape \(segments,\), got shape \(rows,\)"),
        (lambda logprob, segments: segments.mean(logprob[1:]), r"per row, shape \(rows,\), got shape \(n,\)"),
        (lambda logprob, segments: logprob[:, None], r"\(a vector\), got shape \(n, 1\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=said) as raised:
            hl.Objective(a=fn)(logits, targets, segments=segments)
        assert not re.search(r"\bs\d+", str(raised.value) + " ".join(getattr(raised.value, "__notes__", ())))


def test_metrics_of_other_things_do_not_add_up() -> None:
    values = torch.rand(4)
    per_token, per_segment = (hl.Metric.of("entropy", values, None, per) for per in ("token", "segment"))
    with pytest.raises(ValueError, match="one is per token and the other per segment"):
        per_token + per_segment
    meter = hl.Meter().add({"entropy": per_token})
    with pytest.raises(ValueError, match="'entropy' is a mean per segment here and was a mean per token before"):
        meter.add({"entropy": per_segment})
    with pytest.raises(ValueError, match="'entropy' is a max per token here and was a mean per token before"):
        meter.add({"entropy": hl.Metric.of("entropy_max", values, None, "token")})


def with_entropy(logprob: torch.Tensor, *, entropy: torch.Tensor | None = None) -> torch.Tensor:
    return -logprob if entropy is None else -logprob - entropy


def with_segments(logprob: torch.Tensor, *, segments: hl.Segments | None = None) -> torch.Tensor:
    return -logprob if segments is None else -segments.mean(logprob)


@pytest.mark.parametrize(("loss", "name"), [(with_entropy, "entropy"), (with_segments, "segments")])
def test_what_is_injected_stands_before_the_star(loss: Any, name: str) -> None:
    """As an option it would be None in every call, without a word."""
    for make in (
        lambda: hl.Objective(it=loss),
        lambda: hl.Term(cross_entropy, row_weight=loss),
        lambda: hl.Objective(ce=cross_entropy, metrics=[loss]),
    ):
        with pytest.raises(TypeError, match=f"'{name}' is keyword-only.*put it before the"):
            make()
    hl.Objective(it=lambda logprob, *, entropy=0.5: -entropy * logprob)  # an option may have the name


def test_an_input_that_is_given_as_an_option() -> None:
    with pytest.raises(TypeError, match=r"no option 'beta'; it is an input of the call; .* write it after a \*"):
        hl.Term(lambda logprob, beta=0.1: -beta * logprob, beta=0.5)


def mixed(logprob: torch.Tensor, coefficient: float = 0.1, entropy: torch.Tensor | None = None) -> torch.Tensor:
    assert entropy is not None
    return -logprob + coefficient * entropy


def test_a_partial_leaves_its_other_parameters_what_they_are() -> None:
    """Python calls all that follow a bound one keyword-only; here they would have become options."""
    bound = functools.partial(mixed, coefficient=2.0)
    want = hl.Objective(it=mixed)(hl.Logits(LOGITS), TARGETS, coefficient=2.0).loss
    torch.testing.assert_close(hl.Objective(it=bound)(hl.Logits(LOGITS), TARGETS).loss, want)
    again = hl.Term(functools.partial(mixed, coefficient=1.0), coefficient=2.0)
    torch.testing.assert_close(hl.Objective(it=again)(hl.Logits(LOGITS), TARGETS).loss, want)
    fixed, old = functools.partial(grpo, advantage=torch.tensor(2.0)), torch.full((2, 5), -2.0)
    out = hl.Objective(it=fixed)(hl.Logits(LOGITS), TARGETS, old_logprob=old)
    full = torch.full((2, 5), 2.0)
    assert out.loss == hl.Objective(it=grpo)(hl.Logits(LOGITS), TARGETS, old_logprob=old, advantage=full).loss


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "its metric 'm' is NoneType"),
        ("text", "its metric 'm' is str"),
        ((torch.ones(10), {"x": torch.ones(10)}), r"its metric 'm' is tuple.*hl\.Term\(\.\.\.\) measures a loss"),
        (torch.ones(10, dtype=torch.complex64), "its metric 'm' is torch.complex64 values"),
        ({"": torch.ones(10)}, "wanted names for its metrics, got ''"),
        ({"a/": torch.ones(10), "a/b": torch.ones(10)}, "wanted names for its metrics, got 'a/'"),
        ({1: torch.ones(10)}, "wanted names for its metrics, got 1"),
    ],
)
def test_metrics_that_are_none(found: Any, message: str) -> None:
    objective = hl.Objective(ce=cross_entropy, metrics={"m": lambda logprob: found})
    with pytest.raises(TypeError, match=message):
        objective(hl.Logits(LOGITS), TARGETS)


def test_a_name_of_a_metric_that_would_be_a_mask() -> None:
    with pytest.raises(TypeError, match="wanted names as keys, got 'm/'"):
        hl.Objective(ce=cross_entropy, metrics={"m/": lambda logprob: logprob})


def test_a_single_fact_with_its_temperature() -> None:
    with pytest.raises(TypeError, match=r"got 2\.0; a single one goes into a list, \[\('entropy', 2\.0\)\]"):
        hl.row_facts(hl.Logits(LOGITS), want=("entropy", 2.0))
    for want in (None, [("lse", 2.0, "teacher", "more")]):
        with pytest.raises(TypeError, match="want: wanted names of facts"):
            hl.row_facts(hl.Logits(LOGITS), want=want)


def test_numbers_that_are_too_large_or_too_narrow() -> None:
    with pytest.raises(ValueError, match="num_items: wanted a count"):
        hl.Objective(ce=cross_entropy)(hl.Logits(LOGITS), TARGETS, num_items=10**400)
    hidden, weight = torch.randn(2, 4), torch.randn(5, 4)
    for name in ("logits_dtype", "weight_grad_dtype"):
        with pytest.raises(TypeError, match=f"{name}: wanted a floating-point dtype of 16 bits or more"):
            hl.Linear(hidden, weight, **{name: torch.float8_e4m3fn})


@pytest.mark.parametrize("wrap", [lambda x: x, hl.PerRow], ids=["plain", "PerRow"])
def test_forward_backward_makes_no_gradient_of_an_input(wrap: Any) -> None:
    objective, advantage = hl.Objective(rl=grpo, metrics=[watched]), torch.ones(2, 5, requires_grad=True)
    call = {"watch": advantage, "advantage": advantage.detach()}
    objective.forward_backward(hl.Logits(LOGITS), TARGETS, **call)
    with pytest.raises(ValueError, match=r"advantage: requires grad, but forward_backward.*or pass advantage\.detach"):
        objective.forward_backward(hl.Logits(LOGITS), TARGETS, **{**call, "advantage": wrap(advantage)})
    with torch.no_grad():
        objective.forward_backward(hl.Logits(LOGITS), TARGETS, **{**call, "advantage": wrap(advantage)})


def watched(watch: torch.Tensor) -> torch.Tensor:
    return watch


class Named(hl.Objective):
    """A class of the user's own."""


def test_a_pickled_objective_keeps_its_class() -> None:
    assert type(pickle.loads(pickle.dumps(Named(ce=cross_entropy)))) is Named


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hl.Linear(torch.ones(3, 4), torch.ones(11, 4), True), r"bias: wanted shape \(11,\), got bool"),
        (lambda: hl.Linear(torch.ones(3, 4), torch.ones(11, 4), torch.ones(3)), r"bias: wanted .*\(11,\), got \(3,\)"),
        (lambda: hl.prepare(TARGETS, TARGETS), "segments: wanted hl.Segments, got Tensor"),
        (lambda: hl.Segments.from_batch(3), r"like: wanted a \(B, T\) tensor or shape, got int"),
        (lambda: hl.Segments.from_batch([2, 5, 1]), r"like: wanted a \(B, T\) tensor or shape, got shape \(2, 5, 1\)"),
        (lambda: hl.Inputs(3), r"inputs: wanted hl\.Inputs\(name=\.\.\.\) or a mapping of names, got int"),
        (
            lambda: hl.FusedLMHead(4, 11)(
                torch.ones(2, 5, 4), targets=TARGETS, objective=hl.Objective(ce=cross_entropy), inputs=[TARGETS]
            ),
            r"inputs: wanted hl\.Inputs\(name=\.\.\.\) or a mapping of names, got list",
        ),
        (
            lambda: hl.Objective(rl=grpo)(hl.Logits(LOGITS), TARGETS, advantage=None),
            r"advantage: missing; .*inputs passed: advantage \(None\)",
        ),
    ],
)  # fmt: skip
def test_a_thing_of_another_kind_is_named(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


def test_row_weights_come_with_the_package() -> None:
    """Pages write `headloss.row_weights.truncate(2.0)`, and nobody imports a module to try a name."""
    assert hl.row_weights.truncate is importlib.import_module("headloss.row_weights").truncate
