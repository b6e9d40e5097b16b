"""A term's parameter takes another input of the call: `hl.Term(loss, inputs={"old_logprob": "sampler_logprob"})`."""

import pickle

import pytest
import torch
from interpreting import BACKEND, DTYPE, TOLERANCE, interpreted
from torch import Tensor

import headloss as hl
from headloss.losses import forward_kl, grpo, kl_to_reference, kto, z_loss

N, V, D = 6, 17, 5


test_under_the_interpreter = interpreted(__file__, "-k", "two_terms")


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE)


def objective() -> hl.Objective:
    return hl.Objective(
        rl=hl.Term(grpo, inputs={"old_logprob": "sampler_logprob"}),
        kl=hl.Term(kl_to_reference, weight=0.3, inputs={"ref_logprob": "old_logprob"}),
        own=hl.Term(grpo, weight=0.5),
        backend=BACKEND,
    )


@pytest.mark.parametrize("how", ["logits", "chunks"])
def test_two_terms_read_one_parameter_from_two_inputs(how: str) -> None:
    hidden, weight, targets = draw(N, D), draw(V, D).requires_grad_(), torch.randint(0, V, (N,))
    sampler, old, advantage = -3 + draw(N) / 4, -3 + draw(N) / 4, draw(N)
    if how == "logits":
        source = hl.Logits(hidden @ weight.T)
    else:
        source = hl.Linear(hidden, weight, memory=2 * V * weight.itemsize)
    out = objective()(source, targets, sampler_logprob=sampler, old_logprob=old, advantage=advantage)
    out.loss.backward()

    leaf = weight.detach().double().requires_grad_()
    logprob = torch.log_softmax(hidden.double() @ leaf.T, -1)[range(N), targets]

    def clipped(of: Tensor) -> Tensor:
        ratio, A = (logprob - of.double()).exp(), advantage.double()
        return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A).mean()

    gap = old.double() - logprob
    terms = {"rl": clipped(sampler), "kl": (gap.exp() - 1 - gap).mean(), "own": clipped(old)}
    want = terms["rl"] + 0.3 * terms["kl"] + 0.5 * terms["own"]
    want.backward()
    for name, x in terms.items():
        torch.testing.assert_close(out.terms[name].double(), x.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(weight.grad.double(), leaf.grad, rtol=TOLERANCE, atol=TOLERANCE)
    ratio = (logprob - sampler.double()).exp().detach().mean()
    assert float(out.metrics["rl/ratio_mean"]) == pytest.approx(float(ratio), rel=TOLERANCE)


def test_configs_copies_and_plans_keep_it() -> None:
    made = objective()
    given = {n: torch.zeros(N) for n in ("sampler_logprob", "old_logprob", "advantage")}
    source, targets = hl.Logits(torch.randn(N, V)), torch.randint(0, V, (N,))
    want = made(source, targets, **given | {"sampler_logprob": torch.ones(N)}).loss
    config = made.to_config()
    assert config["terms"]["rl"]["inputs"] == {"old_logprob": "sampler_logprob"}
    assert "inputs" not in config["terms"]["own"]
    for other in (hl.Objective.from_config(config), pickle.loads(pickle.dumps(made))):
        assert repr(other) == repr(made)
        assert other(source, targets, **given | {"sampler_logprob": torch.ones(N)}).loss == want
    assert objective().key == made.key
    keys = {hl.Objective(a=hl.Term(grpo, inputs={"old_logprob": name})).key for name in ("one", "two", "one")}
    assert len(keys | {hl.Objective(a=grpo).key}) == 3
    plan = str(made.explain(source, targets, **given))
    assert "rl (grpo, old_logprob from sampler_logprob): row" in plan


def test_compiled() -> None:
    made = objective()
    targets = torch.randint(0, V, (N,))
    given = {n: -3 + draw(N) / 4 for n in ("sampler_logprob", "old_logprob", "advantage")}
    logits = draw(N, V)
    step = torch.compile(lambda x: made(hl.Logits(x), targets, **given).loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(logits), made(hl.Logits(logits), targets, **given).loss)


def test_an_input_of_segments() -> None:
    """`desirable` of kto has one value per segment, whatever it is called in the call."""
    segments = hl.Segments.from_cu_seqlens(torch.tensor([0, 2, 6]))
    source, targets, ref = hl.Logits(torch.randn(N, V)), torch.randint(0, V, (N,)), torch.randn(N)
    good = torch.tensor([True, False])
    plain = hl.Objective(a=kto)(source, targets, segments=segments, ref_logprob=ref, desirable=good)
    other = hl.Objective(a=hl.Term(kto, inputs={"desirable": "liked"}))
    assert other(source, targets, segments=segments, ref_logprob=ref, liked=good).loss == plain.loss
    with pytest.raises(ValueError, match="liked: term 'a' .kto. takes one value per segment"):
        other(source, targets, segments=segments, ref_logprob=ref, liked=torch.ones(N))


def test_verify_follows() -> None:
    given = {n: -3 + torch.randn(N) / 4 for n in ("sampler_logprob", "old_logprob", "advantage")}
    report = hl.verify(objective(), hl.Logits(torch.randn(N, V).requires_grad_()), torch.randint(0, V, (N,)), **given)
    assert report.ok, str(report)


WRONG = {
    "no such parameter": (lambda: hl.Term(grpo, inputs={"old_logprobs": "x"}), TypeError, "did you mean 'old_logprob'"),
    "a fact": (lambda: hl.Term(grpo, inputs={"logprob": "x"}), TypeError, "'logprob' is none of the inputs of grpo"),
    "takes a fact": (lambda: hl.Term(grpo, inputs={"advantage": "entropy"}), ValueError, "which is a fact"),
    "takes the targets": (lambda: hl.Term(grpo, inputs={"advantage": "targets"}), ValueError, "argument of the call"),
    "not a mapping": (lambda: hl.Term(grpo, inputs=["advantage"]), TypeError, "inputs: wanted"),
    "not a name": (lambda: hl.Term(grpo, inputs={"advantage": 1}), TypeError, "inputs: wanted"),
    "a divergence": (lambda: hl.Term(forward_kl, inputs={"logq": "x"}), TypeError, "takes no inputs"),
    "no inputs": (lambda: hl.Term(z_loss, inputs={"a": "b"}), TypeError, "it has none"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refused(what: str) -> None:
    make, error, pattern = WRONG[what]
    with pytest.raises(error, match=pattern):
        make()


def test_a_parameter_that_takes_another_input_is_not_optional() -> None:
    source, targets = hl.Logits(torch.randn(N, V)), torch.randint(0, V, (N,))
    made = hl.Objective(rl=hl.Term(grpo, inputs={"old_logprob": "sampler_logprob"}))
    with pytest.raises(TypeError, match="sampler_logprob: missing; term 'rl' .grpo. asks for"):
        made(source, targets, advantage=torch.zeros(N))
    with pytest.raises(TypeError, match="old_logprob: no loss asks for this input"):
        made(source, targets, advantage=torch.zeros(N), sampler_logprob=torch.zeros(N), old_logprob=torch.zeros(N))
