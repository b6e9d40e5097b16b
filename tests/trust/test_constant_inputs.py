"""An input that requires grad gets its gradient or a refusal that names it, never silence."""

import pytest
import torch

import headloss as hl
from headloss.losses import cispo, cross_entropy, dppo, grpo, gspo, gspo_token

N, V = 6, 7
SEGMENTS = hl.Segments.from_ids(torch.tensor([0, 0, 0, 1, 1, 1]))


def detached(logprob, value):
    return -logprob * value.detach()


def without_grad(logprob, value):
    with torch.no_grad():
        held = value * 2
    return -logprob * held


def compared(logprob, value):
    return torch.where(value > 0, -logprob, 0.0)


def untraced(logprob, value):
    return -logprob * value.detach() * (1.0 if logprob.sum().item() < 1e9 else 2.0)


def mixing(logprob, value):
    return -(logprob - logprob.mean()) * value.detach()


def learned(logprob, value):
    return -logprob * value


SOURCES = {
    "logits": lambda: hl.Logits(torch.randn(N, V, requires_grad=True)),
    "linear": lambda: hl.Linear(torch.randn(N, 4, requires_grad=True), torch.randn(V, 4)),
    "chunks": lambda: hl.Linear(torch.randn(N, 4, requires_grad=True), torch.randn(V, 4), memory=3 * V * 4),
    "no gradient of its own": lambda: hl.Logits(torch.randn(N, V)),
}


def call(objective, where, **inputs):
    targets = torch.arange(N) % V
    targets[1] = -100
    return objective(SOURCES[where](), targets, segments=SEGMENTS, **inputs)


@pytest.mark.parametrize("where", SOURCES)
@pytest.mark.parametrize(
    ("loss", "name", "others"),
    [
        (gspo, "advantage", ()),
        (gspo, "advantage", ("old_logprob",)),
        (cispo, "old_logprob", ("advantage",)),
        (dppo, "old_logprob", ("advantage",)),
        (detached, "value", ()),
        (without_grad, "value", ()),
        (compared, "value", ()),
        (untraced, "value", ()),
        (mixing, "value", ()),
    ],
    ids=lambda x: x.__name__ if callable(x) else str(x),
)
def test_a_constant_is_refused(loss, name, others, where):
    inputs = {other: torch.randn(N) for other in others} | {name: torch.randn(N, requires_grad=True)}
    with pytest.raises(ValueError, match=rf"{name}: requires grad, .*{loss.__name__} takes it as a constant; pass"):
        call(hl.Objective(it=loss), where, **inputs)
    inputs[name] = inputs[name].detach()
    assert call(hl.Objective(it=loss), where, **inputs).loss.isfinite()


@pytest.mark.parametrize("where", SOURCES)
def test_one_loss_that_gives_a_gradient_is_enough(where):
    value = torch.randn(N, requires_grad=True)
    out = call(hl.Objective(a=detached, b=hl.Term(learned, weight=2.0)), where, value=value)
    out.loss.backward()
    torch.testing.assert_close(value.grad, -2.0 * out.facts.logprob.detach() / 5)


@pytest.mark.parametrize("loss", [grpo, gspo_token])
def test_a_learned_advantage(loss):
    value = torch.randn(N, requires_grad=True)
    call(hl.Objective(a=loss), "linear", advantage=value).loss.backward()
    assert value.grad[0] != 0 and value.grad[1] == 0


def test_where_no_gradient_is_wanted_nothing_is_refused():
    value = torch.randn(N, requires_grad=True)
    with torch.no_grad():
        assert call(hl.Objective(a=gspo), "logits", advantage=value).loss.isfinite()
    objective = hl.Objective(ce=cross_entropy, off=hl.Term(gspo, weight=0.0), metrics={"value": lambda value: value})
    assert call(objective, "logits", advantage=value, value=value).loss.isfinite()  # read by metrics alone, or by none
