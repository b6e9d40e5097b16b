"""Configs and arguments: of the right type or an error that names the place, and a config is its objective again."""

from __future__ import annotations

import functools
import json
import math
import pickle
from typing import Any

import pytest
import torch

import headloss as hl
from headloss import losses
from headloss.metrics import perplexity
from headloss.row_weights import top_entropy

Z = torch.randn(6, 9, generator=torch.Generator().manual_seed(3))
TARGETS = torch.arange(6)
HUGE = 10**400


def entry(loss: str, **options: Any) -> dict[str, Any]:
    return {"terms": {"a": {"loss": loss, **options}}}


def flagged(logprob, *, flag=True, count=2, name="x", ratio=0.5, free=None, span=(1, 2), limit=math.inf):  # type: ignore[no-untyped-def]
    return -logprob


def said(logprob, *, flag: bool, count: int = 1, half: float | None = None, text: str | None = None):  # type: ignore[no-untyped-def]
    return -logprob


OWN: dict[str, Any] = {"flagged": flagged, "said": said}

WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    # booleans
    "bool is 'false'": (
        entry("kl_to_reference", corrected="false"),
        TypeError,
        r"True or False, got 'false'.*\(at terms.a.corrected\)",
    ),
    "bool is 'no'": (entry("kl_to_reference", corrected="no"), TypeError, r"terms\.a\.corrected"),
    "bool is 0": (entry("kl_to_reference", corrected=0), TypeError, r"terms\.a\.corrected"),
    "bool is 1.0": (entry("dpo", average=1.0), TypeError, r"terms\.a\.average"),
    "bool is None": (entry("dpo", average=None), TypeError, r"terms\.a\.average"),
    "bool is a list": (entry("dpo", average=[]), TypeError, r"terms\.a\.average"),
    "bool of one's own": (entry("flagged", flag="off"), TypeError, r"terms\.a\.flag"),
    "annotated bool": (entry("said", flag=1), TypeError, r"terms\.a\.flag"),
    # numbers
    "weight of 401 digits": (
        entry("cross_entropy", weight=HUGE),
        ValueError,
        r"weight: wanted a finite.*terms\.a\.weight",
    ),
    "weight of 5001 digits": (entry("cross_entropy", weight=10**5000), ValueError, r"terms\.a\.weight"),
    "weight is a bool": (entry("cross_entropy", weight=True), TypeError, r"terms\.a\.weight"),
    "weight is None": (entry("cross_entropy", weight=None), TypeError, r"terms\.a\.weight"),
    "weight is text": (entry("cross_entropy", weight="1e-4"), TypeError, r"terms\.a\.weight"),
    "temperature of 401 digits": (entry("cross_entropy", temperature=HUGE), ValueError, r"terms\.a\.temperature"),
    "temperature is a bool": (entry("cross_entropy", temperature=True), ValueError, r"terms\.a\.temperature"),
    "length of 401 digits": (
        entry("cross_entropy", reduction="seq_mean_token_sum_norm", length=HUGE),
        ValueError,
        r"terms\.a\.length",
    ),
    "length is a bool": (
        entry("cross_entropy", reduction="seq_mean_token_sum_norm", length=True),
        ValueError,
        r"terms\.a\.length",
    ),
    "option of 401 digits": (entry("cross_entropy", label_smoothing=HUGE), ValueError, r"terms\.a\.label_smoothing"),
    "option is NaN": (entry("focal", gamma=math.nan), ValueError, r"terms\.a\.gamma"),
    "option is infinite": (entry("focal", gamma=-math.inf), ValueError, r"terms\.a\.gamma"),
    "option is a bool": (entry("focal", gamma=True), TypeError, r"terms\.a\.gamma"),
    "option is None": (entry("focal", gamma=None), TypeError, r"terms\.a\.gamma"),
    "option is a list": (entry("grpo", low=[0.2]), TypeError, r"terms\.a\.low"),
    "option is a mapping": (entry("grpo", low={}), TypeError, r"terms\.a\.low"),
    "option is text": (entry("grpo", low="3e-4"), TypeError, r"3\.0e-4 as a number.*terms\.a\.low"),
    "optional number is text": (entry("grpo", dual="3e0"), TypeError, r"terms\.a\.dual"),
    "optional number is NaN": (entry("grpo", delta=math.nan), ValueError, r"terms\.a\.delta"),
    "optional number of 401 digits": (entry("grpo", delta=HUGE), ValueError, r"terms\.a\.delta"),
    "a tensor": (entry("grpo", low=torch.tensor(0.2)), TypeError, r"input of the call.*terms\.a\.low"),
    "whole number is text": (entry("flagged", count="2"), TypeError, r"terms\.a\.count"),
    "annotated whole number": (entry("said", flag=True, count=1.5), TypeError, r"whole number.*terms\.a\.count"),
    "annotated number": (entry("said", flag=True, half="0.5"), TypeError, r"terms\.a\.half"),
    # names
    "choice is a number": (
        entry("kl_to_reference", estimator=3),
        TypeError,
        r"wanted text, got 3.*terms\.a\.estimator",
    ),
    "choice is a bool": (entry("dpo", link=True), TypeError, r"terms\.a\.link"),
    "choice is None": (entry("dppo", divergence=None), TypeError, r"terms\.a\.divergence"),
    "annotated text": (entry("said", flag=True, text=7), TypeError, r"terms\.a\.text"),
    "out of range, checked by the loss": (entry("jsd", beta=2.0), ValueError, r"0 < beta < 1.*terms\.a\.beta"),
    "reduction is a list": (entry("focal", reduction=[]), ValueError, r"terms\.a\.reduction"),
    "reduction is None": (entry("focal", reduction=None), ValueError, r"terms\.a\.reduction"),
    "tail is a list": (entry("jsd", tail=[]), ValueError, r"terms\.a\.tail"),
    "teacher is a number": (entry("jsd", teacher=3), TypeError, r"terms\.a\.teacher"),
    "teacher is empty": (entry("jsd", teacher=""), TypeError, r"terms\.a\.teacher"),
    "row_weight is a number": (entry("focal", row_weight=3), TypeError, r"terms\.a\.row_weight"),
    "row_weight is empty": (entry("focal", row_weight=""), ValueError, r"terms\.a\.row_weight"),
    "row_weight is an argument of the call": (
        entry("focal", row_weight="weights"),
        ValueError,
        r"terms\.a\.row_weight",
    ),
    # facts
    "facts is a list": (entry("cross_entropy", facts=[1]), TypeError, r"terms\.a\.facts"),
    "facts is text": (entry("cross_entropy", facts="x"), TypeError, r"terms\.a\.facts"),
    "facts with a number": (entry("cross_entropy", facts={"logprob": 2.0}), TypeError, r"terms\.a\.facts"),
    "facts with three": (entry("cross_entropy", facts={"logprob": ["logprob", 2.0, 3]}), TypeError, r"terms\.a\.facts"),
    "facts with a key that is no text": (
        entry("cross_entropy", facts={1: ["logprob", 2.0]}),
        TypeError,
        r"terms\.a\.facts",
    ),
    "facts with a list for a name": (
        entry("cross_entropy", facts={"logprob": [[], 2.0]}),
        ValueError,
        r"terms\.a\.facts",
    ),
    "facts at a temperature of 401 digits": (
        entry("cross_entropy", facts={"logprob": ["logprob", HUGE]}),
        ValueError,
        r"terms\.a\.facts",
    ),
    "facts at a temperature that is a bool": (
        entry("cross_entropy", facts={"logprob": ["logprob", True]}),
        ValueError,
        r"terms\.a\.facts",
    ),
    "facts that are no parameters": (entry("focal", facts={"hot": ["logprob", 2.0]}), TypeError, r"at terms\.a"),
    "facts of a divergence": (entry("focal", facts={"logprob": ["divergence", 2.0]}), ValueError, r"terms\.a\.facts"),
    # the shape of a config
    "loss is a list": (entry([]), ValueError, r"terms\.a\.loss"),  # type: ignore[arg-type]
    "loss is None": (entry(None), ValueError, r"terms\.a\.loss"),  # type: ignore[arg-type]
    "loss is a function": (entry(losses.focal), ValueError, r"terms\.a\.loss"),
    "term is None": ({"terms": {"a": None}}, ValueError, r"terms\.a"),
    "term is a number": ({"terms": {"a": 3}}, ValueError, r"terms\.a"),
    "key that is no text": ({"terms": {"a": {"loss": "focal", 3: 4}}}, TypeError, r"terms\.a"),
    "option named self": (entry("focal", self=1), TypeError, r"'self'.*terms\.a"),
    "option named fn": (entry("focal", fn=1), TypeError, r"'fn'.*terms\.a"),
    "terms is a list": ({"terms": ["focal"]}, ValueError, "terms"),
    "terms is None": ({"terms": None}, ValueError, "terms"),
    "term named 3": ({"terms": {3: "focal"}}, ValueError, "3 cannot be the name"),
    "term named metrics": ({"terms": {"metrics": "focal"}}, ValueError, "'metrics' cannot be the name"),
    "term named backend": ({"terms": {"backend": "focal"}}, ValueError, "'backend' cannot be the name"),
    "term of no name": ({"terms": {"": "focal"}}, ValueError, "empty name"),
    "a key of no text": ({"terms": {"a": "focal"}, 3: 4}, ValueError, "unknown key 3"),
    "metrics is None": ({"terms": {"a": "focal"}, "metrics": None}, TypeError, "metrics"),
    "metrics is a mapping": ({"terms": {"a": "focal"}, "metrics": {"a": "entropy"}}, TypeError, "metrics"),
    "a metric is a number": ({"terms": {"a": "focal"}, "metrics": ["entropy", 3]}, TypeError, r"metrics\[1\]"),
    "a metric is a list": ({"terms": {"a": "focal"}, "metrics": [["entropy"]]}, TypeError, r"metrics\[0\]"),
    "a metric is unknown": ({"terms": {"a": "focal"}, "metrics": ["entropi"]}, ValueError, r"'entropy'.*metrics\[0\]"),
    "a metric twice": ({"terms": {"a": "focal"}, "metrics": ["entropy", "entropy"]}, ValueError, r"metrics\[1\]"),
    "backend is a list": ({"terms": {"a": "focal"}, "backend": []}, ValueError, r"at backend"),
    "backend is None": ({"terms": {"a": "focal"}, "backend": None}, ValueError, r"at backend"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_what_is_wrong_in_a_config(case: tuple[Any, type[Exception], str]) -> None:
    config, kind, message = case
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        hl.Objective.from_config(config, losses=OWN)
    assert type(raised.value) is kind and len(str(raised.value)) < 1500


@pytest.mark.parametrize(
    "wrong",
    [[flagged], "flagged", {"f": 3}, {3: flagged}, {"": flagged}],
    ids=["a list", "text", "no function", "no name", "an empty name"],
)
def test_losses_is_a_table_of_functions(wrong: Any) -> None:
    for use in (
        lambda: hl.Objective.from_config({"terms": {"a": "focal"}}, losses=wrong),
        lambda: hl.Objective(a=losses.focal).to_config(losses=wrong),
    ):
        with pytest.raises(TypeError, match="losses: wanted a mapping from names to functions"):
            use()


RIGHT: dict[str, Any] = {
    "everything": entry("flagged", flag=False, count=2.5, name="y", ratio=1, free="text", span=[3, 4], limit=math.inf),
    "required": entry("said", flag=True, half=1, text=None),
    "an optional number": entry("grpo", dual=3, delta=None),
    "a bool": entry("kl_to_reference", corrected=True, estimator="k2"),
    "facts": {"terms": {"a": {"loss": "cross_entropy", "facts": {"logprob": ["logprob", 2]}}}},
    "an input for a row weight": entry("focal", row_weight="reinforce"),  # which is a loss's name too
    "everything of a term": {
        "terms": {
            "a": {"loss": "cross_entropy", "weight": 2, "reduction": "token_sum", "temperature": 2, "row_weight": "w"},
            "b": {"loss": "jsd", "beta": 0.25, "teacher": "big", "tail": "none", "weight": -0.5},
        },
        "metrics": ["entropy", "accuracy", "forward_kl", "perplexity"],
        "backend": "torch",
    },
}


@pytest.mark.parametrize("config", RIGHT.values(), ids=RIGHT)
def test_a_config_is_its_objective_again(config: Any) -> None:
    first = hl.Objective.from_config(config, losses=OWN)
    written = first.to_config()
    assert json.loads(json.dumps(written, allow_nan=True)) == written
    again = hl.Objective.from_config(written, losses=OWN)
    assert repr(again) == repr(first) and again.to_config() == written
    assert pickle.loads(pickle.dumps(again)).to_config() == written
    for name, term in first.terms.items():
        assert again.terms[name].fn is term.fn and dict(again.terms[name].options) == dict(term.options)
        kinds = [(k, type(v)) for k, v in term.options.items()]
        assert kinds == [(k, type(v)) for k, v in again.terms[name].options.items()]


def test_options_reach_the_function_as_what_they_are() -> None:
    made = hl.Term(flagged, flag=False, count=3, ratio=1, span=[3, 4], free=[1], limit=5)
    assert made.options == {"flag": False, "count": 3, "ratio": 1.0, "span": (3, 4), "free": [1], "limit": 5.0}
    assert {k: type(v) for k, v in made.options.items()} == {
        "flag": bool,
        "count": int,
        "ratio": float,
        "span": tuple,
        "free": list,
        "limit": float,
    }


def cross_entropy(logprob):  # type: ignore[no-untyped-def]  # not ours
    return -2 * logprob


def hinge(logprob, *, at=1.0):  # type: ignore[no-untyped-def]
    return (at - logprob).relu()


def score(argmax, targets):  # type: ignore[no-untyped-def]
    return (argmax == targets) * 100.0


def by_entropy(entropy):  # type: ignore[no-untyped-def]
    return entropy


def accuracy(argmax, targets):  # type: ignore[no-untyped-def]  # not ours
    return (argmax == targets) * 100.0


class Holder:
    def loss(self, logprob):  # type: ignore[no-untyped-def]
        return -3 * logprob


HOLDER, PARTIAL = Holder(), functools.partial(hinge, at=3.0)
REFUSED: dict[str, tuple[Any, str]] = {
    "a loss named like ours": (lambda: hl.Objective(ce=cross_entropy), "term 'ce': loss: 'cross_entropy'.*another"),
    "a loss of one's own": (lambda: hl.Objective(h=hinge), "term 'h': loss: 'hinge'"),
    "a lambda": (lambda: hl.Objective(h=lambda logprob: -logprob), "term 'h': loss: '<lambda>'"),
    "a partial of ours": (
        lambda: hl.Objective(f=functools.partial(losses.focal, gamma=3.0)),
        "term 'f': loss: 'partial'",
    ),
    "a method": (lambda: hl.Objective(f=HOLDER.loss), "term 'f': loss: 'loss'"),
    "a weight that is a tensor": (
        lambda: hl.Objective(f=hl.Term(losses.focal, weight=torch.tensor(2.0))),
        "weight is a tensor",
    ),
    "a row weight": (lambda: hl.Objective(f=hl.Term(losses.focal, row_weight=by_entropy)), "row_weight: 'by_entropy'"),
    "a row weight with numbers": (
        lambda: hl.Objective(f=hl.Term(losses.focal, row_weight=top_entropy(0.5))),
        "row_weight: 'high_entropy', which captures values",
    ),
    "a row weight that is a loss of ours": (
        lambda: hl.Objective(f=hl.Term(losses.focal, row_weight=losses.entropy_bonus)),
        "row_weight: 'entropy_bonus'",
    ),
    "an option that is no data": (lambda: hl.Objective(f=hl.Term(flagged, free=torch.zeros(2))), "option 'free'"),
    "an option that is a function": (lambda: hl.Objective(f=hl.Term(flagged, free=hinge)), "option 'free'"),
    "an option that would come back as a list": (
        lambda: hl.Objective(f=hl.Term(flagged, free=(1, 2))),
        "option 'free'",
    ),
    "an option with keys that are numbers": (lambda: hl.Objective(f=hl.Term(flagged, free={1: 2})), "option 'free'"),
    "a metric of one's own": (lambda: hl.Objective(a=losses.focal, metrics=[score]), "metrics: 'score'"),
    "a metric with a name of ours": (
        lambda: hl.Objective(a=losses.focal, metrics={"accuracy": score}),
        "metrics: 'accuracy'",
    ),
    "a metric named like ours": (lambda: hl.Objective(a=losses.focal, metrics=[accuracy]), "metrics: 'accuracy'"),
    "one of our metrics under another's name": (
        lambda: hl.Objective(a=losses.focal, metrics={"entropy": perplexity}),
        "metrics: 'entropy'",
    ),
    "one of our metrics under a new name": (
        lambda: hl.Objective(a=losses.focal, metrics={"ppl": perplexity}),
        "metrics: 'ppl'",
    ),
    "a fact under another's name": (lambda: hl.Objective(a=losses.focal, metrics={"lse": "entropy"}), "metrics: 'lse'"),
    "a divergence under another's name": (
        lambda: hl.Objective(a=losses.focal, metrics={"jsd": losses.forward_kl}),
        "metrics: 'jsd'",
    ),
    "a metric with options": (
        lambda: hl.Objective(a=losses.focal, metrics=[hl.Term(losses.jsd, beta=0.3)]),
        "metrics: 'jsd'",
    ),
}
TABLE = {"flagged": flagged}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_a_config_would_not_find_again_is_refused(case: tuple[Any, str]) -> None:
    make, message = case
    with pytest.raises(ValueError, match=message):
        make().to_config(losses=TABLE)


FOUND: dict[str, tuple[Any, dict[str, Any]]] = {
    "a loss named like ours": (lambda: hl.Objective(ce=cross_entropy), {"cross_entropy": cross_entropy}),
    "a loss named like ours, by a new name": (lambda: hl.Objective(ce=cross_entropy), {"twice": cross_entropy}),
    "both": (lambda: hl.Objective(a=cross_entropy, b=losses.cross_entropy), {"twice": cross_entropy}),
    "a partial": (lambda: hl.Objective(a=PARTIAL), {"f": PARTIAL}),
    "a method": (lambda: hl.Objective(f=HOLDER.loss), {"hold": HOLDER.loss}),
    "metrics": (lambda: hl.Objective(a=losses.focal, metrics={"accuracy": score}), {"accuracy": score}),
    "a row weight": (lambda: hl.Objective(a=hl.Term(losses.focal, row_weight=by_entropy)), {"e": by_entropy}),
}


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_what_losses_names_is_found_again(case: tuple[Any, dict[str, Any]]) -> None:
    make, table = case
    objective = make()
    again = hl.Objective.from_config(objective.to_config(losses=table), losses=table)
    assert again.to_config() == objective.to_config(losses=table)  # the table is known by then
    want, got = (o(hl.Logits(Z), TARGETS) for o in (objective, again))
    assert torch.equal(want.loss, got.loss)
    assert {k: float(v) for k, v in want.metrics.items()} == {k: float(v) for k, v in got.metrics.items()}


def test_an_input_named_like_a_function_of_losses() -> None:
    objective = hl.Objective(a=hl.Term(losses.focal, row_weight="e"))
    assert objective.to_config()["terms"]["a"]["row_weight"] == "e"
    with pytest.raises(ValueError, match="row_weight is the input 'e'"):
        objective.to_config(losses={"e": by_entropy})


def test_an_option_named_loss() -> None:
    def mine(logprob, *, loss=1.0):  # type: ignore[no-untyped-def]
        return -logprob * loss

    with pytest.raises(ValueError, match="option 'loss'"):
        hl.Objective(a=hl.Term(mine, loss=2.0)).to_config(losses={"mine": mine})


AWKWARD = [
    "self",
    "source",
    "targets",
    "num_items",
    "weights",
    "grad_scale",
    "teacher",
    "loss",
    "terms",
    "facts",
    "logprob",
    "entropy",
    "cls",
    "unnamed",
    "a b",
    "a.b",
    "1",
    "__init__",
    "__dict__",
    "x/y",
    "ä",
    "None",
    "losses",
    "config",
]


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_names_of_terms_and_metrics(name: str) -> None:
    out = hl.Objective(**{name: losses.cross_entropy}, metrics={name: perplexity})(hl.Logits(Z), TARGETS)
    assert list(out.terms) == [name] and set(out.metrics) == {name, f"{name}/perplexity"}
    objective = hl.Objective.from_config({"terms": {name: "cross_entropy"}})
    assert pickle.loads(pickle.dumps(objective)).to_config() == {"terms": {name: {"loss": "cross_entropy"}}}
    again = objective(hl.Logits(Z.clone().requires_grad_()), TARGETS, weights={name: 2.0})
    assert torch.equal(again.loss.detach(), 2 * out.loss) and list(again.terms) == [name]
    assert torch.equal(objective.forward_backward(hl.Logits(Z), TARGETS).loss, out.loss)
    assert name in str(objective.explain(hl.Logits(Z), TARGETS))


CROSSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a term named metrics": (
        lambda: hl.Objective(a=losses.focal, metrics=losses.z_loss),
        TypeError,
        "metrics: .*a term cannot",
    ),
    "a Term named metrics": (
        lambda: hl.Objective(a=losses.focal, metrics=hl.Term(losses.z_loss)),
        TypeError,
        "metrics: .*a term",
    ),
    "a term named backend": (
        lambda: hl.Objective(a=losses.focal, backend=losses.z_loss),
        ValueError,
        "backend: .*a term cannot",
    ),
    "a term of no name": (lambda: hl.Objective(**{"": losses.focal}), ValueError, "terms: one has an empty name"),
    "a term inside another": (
        lambda: hl.Objective(**{"a": losses.focal, "a/b": losses.z_loss}),
        ValueError,
        "a/b: the term .*'a'",
    ),
    "a metric inside a term": (
        lambda: hl.Objective(ce=losses.cross_entropy, metrics={"ce/perplexity": "entropy"}),
        ValueError,
        "ce/perplexity: the metric",
    ),
    "two metrics of one name": (
        lambda: hl.Objective(a=losses.focal, metrics=[lambda lse: lse, lambda entropy: entropy]),
        ValueError,
        "two are named '<lambda>'",
    ),
    "a metric of no name": (
        lambda: hl.Objective(a=losses.focal, metrics={"": "entropy"}),
        TypeError,
        "metrics: wanted names",
    ),
    "a metric named 3": (
        lambda: hl.Objective(a=losses.focal, metrics={3: "entropy"}),
        TypeError,
        "metrics: wanted names",
    ),
    "metrics is a number": (lambda: hl.Objective(a=losses.focal, metrics=3), TypeError, "metrics: wanted a list"),
    "metrics is None": (lambda: hl.Objective(a=losses.focal, metrics=None), TypeError, "metrics: wanted a list"),
    "a loss without a signature": (lambda: hl.Objective(a=torch.exp), TypeError, "a: fn: .*no signature"),
    "a loss that is a type": (lambda: hl.Objective(a=dict), TypeError, "a: fn: .*no signature"),
    "a parameter by position only": (
        lambda: hl.Objective(a=lambda lse, /: lse),
        TypeError,
        "a: <lambda>: 'lse' is positional-only.*drop /",
    ),
    "a parameter named divergence": (
        lambda: hl.Objective(a=lambda divergence: divergence),
        TypeError,
        r"a: .*\(logp, logq\)",
    ),
    "an option named self": (lambda: hl.Objective(a=lambda lse, *, self=1: lse), TypeError, "a: .*option 'self'"),
    "an option named fn": (lambda: hl.Objective(a=lambda lse, *, fn=1: lse), TypeError, "a: .*option 'fn'"),
}


@pytest.mark.parametrize("case", CROSSED.values(), ids=CROSSED)
def test_names_that_cannot_be(case: tuple[Any, type[Exception], str]) -> None:
    make, kind, message = case
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    "name", ["source", "self", "num_items", "num_segments", "weights", "grad_scale", "host_read", "teacher"]
)
@pytest.mark.parametrize("default", ["", "=None"])
def test_inputs_that_no_call_could_take(name: str, default: str) -> None:
    """They would be the call's own arguments, and the loss would never see them."""
    fn = eval(f"lambda logprob, {name}{default}: -logprob")
    for make in (
        lambda: hl.Objective(a=fn),
        lambda: hl.Objective(a=hl.Term(losses.focal, row_weight=fn)),
        lambda: hl.Objective(a=losses.focal, metrics={"m": fn}),
        lambda: hl.Objective.from_config({"terms": {"a": "f"}}, losses={"f": fn}),
    ):
        with pytest.raises(TypeError, match=f"parameter '{name}' is a name that belongs to the call itself"):
            make()


@pytest.mark.parametrize(
    "name", ["targets_", "sources", "on", "weight", "temperature", "reduction", "inputs", "objective", "rest"]
)
def test_inputs_of_other_names_work(name: str) -> None:
    fn = eval(f"lambda logprob, {name}: -logprob * {name}")
    x = torch.arange(6.0)
    out = hl.Objective(a=fn)(hl.Logits(Z), TARGETS, **{name: x})
    want = (torch.nn.functional.cross_entropy(Z, TARGETS, reduction="none") * x).mean()
    torch.testing.assert_close(out.loss, want)
    assert "a" in str(hl.Objective(a=fn).explain(hl.Logits(Z), TARGETS, **{name: x}))


def test_nothing_follows_what_the_caller_changes_later() -> None:
    metrics: list[Any] = ["entropy"]
    named: dict[str, Any] = {"e": "entropy"}
    facts: dict[str, Any] = {"logprob": ["logprob", 2.0]}
    free: list[Any] = [1, {"k": [2]}]
    table: dict[str, Any] = {"flagged": flagged}
    config = entry("flagged", free=free, span=free)
    first, second = hl.Objective(a=losses.focal, metrics=metrics), hl.Objective(a=losses.focal, metrics=named)
    term, fourth = hl.Term(losses.focal, facts=facts), hl.Term(flagged, free=free)
    fifth = hl.Objective.from_config(config, losses=table)
    metrics.append("accuracy")
    named["f"] = "lse"
    facts["logprob"][1] = 3.0
    facts.clear()
    free[1]["k"].append(3)
    free.append(4)
    table.clear()
    config["terms"]["a"]["name"] = "z"
    assert [n for n, _ in first.metrics] == ["entropy"] and first.asked == ("entropy",)
    assert second.asked == {"e": "entropy"} and term.facts == {"logprob": ("logprob", 2.0)}
    assert fourth.options == {"free": [1, {"k": [2]}]}
    assert fifth.terms["a"].options == {"free": [1, {"k": [2]}], "span": (1, {"k": [2]})}
    assert fifth.to_config()["terms"]["a"]["loss"] == "flagged"
    assert [n for n, _ in pickle.loads(pickle.dumps(first)).metrics] == ["entropy"]
    assert [n for n, _ in hl.Objective(a=losses.focal, metrics=iter(["entropy"])).metrics] == ["entropy"]


@pytest.mark.parametrize("value", [HUGE, True, math.nan, "1", [1.0]], ids=["huge", "bool", "nan", "text", "list"])
def test_numbers_of_a_source(value: Any) -> None:
    for name, make in {
        "temperature": lambda: hl.Logits(Z, temperature=value),
        "softcap": lambda: hl.Linear(Z, Z, softcap=value),
        "scale": lambda: hl.Logits(Z, scale=value),
        "want": lambda: hl.row_facts(hl.Logits(Z), TARGETS, [("entropy", value)]),
    }.items():
        with pytest.raises((TypeError, ValueError), match=f"{name}: wanted"):
            make()
