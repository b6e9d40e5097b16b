"""What docs/threat-model.md promises: configs are data, budgets hold whatever a config says, generated code is ours."""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import tokenize
from importlib.util import find_spec
from typing import Any

import oracle
import pytest
import torch

import headloss as hl
from headloss.cli.memory import peak_bytes
from headloss.losses import LOSSES, cross_entropy, z_loss
from headloss.trace.trace import InputSpec, trace

CODE = "__import__('os').system('touch /tmp/owned')"
WRONG: dict[str, Any] = {
    "code as a loss": {"terms": {"a": CODE}},
    "a dotted path as a loss": {"terms": {"a": "os.system"}},
    "a private name as a loss": {"terms": {"a": "__getattr__"}},
    "a module of the losses": {"terms": {"a": "_policy"}},
    "code as an option": {"terms": {"a": {"loss": "focal", "gamma": CODE}}},
    "code as a weight": {"terms": {"a": {"loss": "focal", "weight": CODE}}},
    "code as a reduction": {"terms": {"a": {"loss": "focal", "reduction": CODE}}},
    "code as a temperature": {"terms": {"a": {"loss": "focal", "temperature": CODE}}},
    "code as a fact": {"terms": {"a": {"loss": "focal", "facts": {"x": [CODE, 1.0]}}}},
    "code as a metric": {"terms": {"a": "focal"}, "metrics": [CODE]},
    "a dotted path as a backend": {"terms": {"a": "focal"}, "backend": "os.path"},
    "a key of its own": {"terms": {"a": "focal"}, "__class__": "x"},
    "memory, which is the source's": {"terms": {"a": "focal"}, "memory": "1TiB"},
    "memory of a term": {"terms": {"a": {"loss": "focal", "memory": "1TiB"}}},
    "a list for a loss": {"terms": {"a": ["focal"]}},
    "an infinite weight": {"terms": {"a": {"loss": "focal", "weight": float("inf")}}},
    "a temperature of 0": {"terms": {"a": {"loss": "focal", "temperature": 0}}},
}


@pytest.mark.parametrize("config", WRONG.values(), ids=WRONG)
def test_a_config_is_never_evaluated(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a config was evaluated")

    for place, name in ((builtins, "eval"), (builtins, "exec"), (os, "system")):
        monkeypatch.setattr(place, name, forbidden)
    with pytest.raises((TypeError, ValueError)):
        hl.Objective.from_config(config)


def test_a_config_is_plain_data_both_ways() -> None:
    for name in LOSSES:
        config = hl.Objective(term=hl.Term(LOSSES[name], weight=0.5)).to_config()
        assert json.loads(json.dumps(config)) == config
        assert hl.Objective.from_config(config).to_config() == config


def test_a_name_from_a_config_is_only_a_key() -> None:
    """The name of a term may be anything; it comes back as the key of its value and nowhere else."""
    objective = hl.Objective.from_config({"terms": {CODE: "cross_entropy"}})
    out = objective(hl.Logits(torch.randn(4, 9)), torch.arange(4))
    assert set(out.terms) == {CODE} and set(out.metrics) == {f"{CODE}/perplexity"}


N, V, D, MiB = 512, 16000, 32, 1 << 20


def peak_of(config: dict[str, Any], memory: Any) -> float:
    """MiB that a call held at most, the gradients included."""
    torch.manual_seed(0)
    hidden = torch.randn(N, D, requires_grad=True)
    weight = (0.1 * torch.randn(V, D)).requires_grad_()
    targets = torch.randint(V, (N,))
    segments = hl.Segments.from_ids(torch.arange(N) // 16)
    objective = hl.Objective.from_config(config)

    def call() -> None:
        inputs = {"advantage": torch.ones(N)} if "grpo" in str(config) else {}
        out = objective(hl.Linear(hidden, weight, memory=memory), targets, segments=segments, **inputs)
        torch.autograd.grad(out.loss, (hidden, weight))

    call()  # traces are made once, and are not what is meant here
    return peak_bytes(call) / MiB


def test_no_config_takes_more_than_the_budget() -> None:
    """Many terms at many temperatures, every reduction: more numbers per row, not more rows x vocabulary buffers."""
    plain = peak_of({"terms": {"ce": "cross_entropy"}}, "2MiB")
    many: dict[str, Any] = {
        f"t{i}": {"loss": name, "temperature": 0.5 + 0.1 * i, "reduction": reduction, "weight": 1e-3}
        for i, (name, reduction) in enumerate(
            (n, r)
            for n in ("cross_entropy", "z_loss", "entropy_bonus", "focal", "grpo")
            for r in ("token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum")
        )
    }
    mix = peak_of({"terms": many, "metrics": ["entropy", "accuracy", "sum_p2", "max_logprob"]}, "2MiB")
    logits = N * V * 4 / MiB
    assert plain < logits and mix < plain + 24 < 2 * logits  # tiles of 8 MiB: they do not grow with the terms


def test_a_budget_is_a_bound_and_not_an_order() -> None:
    """However large the budget, no more is taken than there are rows; too small a one is refused."""
    config = {"terms": {"ce": "cross_entropy"}}
    whole = peak_of(config, "1GiB")
    for silly in ("999999999999GiB", 1 << 200):
        assert peak_of(config, silly) <= whole + 1
    with pytest.raises(ValueError, match="one row of 16000 logits takes"):
        peak_of(config, 1000)
    for bad in (0, -1, "-1GiB", "1e9GiB", "lots", "1 GiB; rm", float("nan"), None, True):
        with pytest.raises((TypeError, ValueError), match="memory: wanted"):
            peak_of(config, bad)


SILLY = [
    {"loss": "cross_entropy", "temperature": 1e-30},
    {"loss": "cross_entropy", "temperature": 1e30},
    {"loss": "cross_entropy", "weight": 1e300},
    {"loss": "cross_entropy", "label_smoothing": 1.0},
    {"loss": "focal", "gamma": 1e6},
    {"loss": "focal", "gamma": 0.0},
    {"loss": "grpo", "low": 1e9, "high": 1e30},
    {"loss": "grpo", "dual": 1e30, "delta": 1e30},
    {"loss": "cross_entropy", "reduction": "seq_mean_token_sum_norm", "length": 1e-300},
    {"loss": "cross_entropy", "reduction": "seq_mean_token_sum_norm", "length": 1e300},
]


@pytest.mark.parametrize("term", SILLY, ids=str)
def test_silly_numbers_come_back_as_numbers(term: dict[str, Any]) -> None:
    """Infinite at worst where the number asks for it; nothing hangs, nothing else breaks, later calls are right."""
    problem = oracle.make("Linear", (23,), 37, inputs=("advantage",))
    objective = hl.Objective.from_config({"terms": {"silly": term}, "backend": "torch"})
    own = problem if term["loss"] == "grpo" else oracle.replace(problem, inputs={})
    oracle.run(objective, own, memory=problem.budget(4))
    plain = hl.Objective(ce=cross_entropy, z=z_loss, backend="torch")
    own = oracle.replace(problem, inputs={})
    oracle.check(oracle.run(plain, own, memory=problem.budget(4)), oracle.answer(plain, own))


@pytest.mark.skipif(find_spec("triton") is None, reason="what is printed is Triton")
def test_printed_code_has_known_names_only() -> None:
    """Of every loss that can be printed: names made by the printer, Triton's, and the device functions beside it."""
    from headloss.backends.triton.kernels import pointwise
    from headloss.backends.triton.printer import lower

    known = {n for n in vars(pointwise) if not n.startswith("_")} | {"tl", "triton", "jit", "def", "return", "float"}
    known |= {"float32", "float64", "int64", "int1", "bfloat16", "float16", "to", "where", "loss", "and", "or", "not"}
    made, printed = re.compile(r"[av]\d+"), 0
    import triton.language as tl

    for name, fn in LOSSES.items():
        if "logq" in fn.__code__.co_varnames:
            continue
        call = hl.Term(fn).call(None, {})
        inputs = {
            n: InputSpec("row", torch.float32, ()) for n in call.input_names if n not in ("pairs", "desirable", "kl")
        }
        try:
            found = trace(call, inputs, torch.float32, "cpu", False)
            source = lower.source_of(found.joint, "loss") if found.joint is not None else None
        except (lower.Unprintable, AttributeError):
            continue
        if source is None:
            continue
        printed += 1
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NAME:
                ours = token.string in known or made.fullmatch(token.string) or hasattr(tl, token.string)
                assert ours or hasattr(tl.math, token.string), f"{name}: {token.string!r} in\n{source}"
            assert token.type != tokenize.STRING or token.string in ('"nan"', '"inf"', "'nan'", "'inf'"), source
    assert printed >= 8


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_the_same_call_gives_the_same_bits(kind: str) -> None:
    names = ("cross_entropy", "z_loss", "entropy_bonus", "grpo", "gspo")
    inputs = oracle.inputs_of(*(LOSSES[n] for n in names))
    problem = oracle.make(kind, (3, 7), inputs=inputs)
    objective = hl.Objective(**{n: LOSSES[n] for n in names}, metrics=["entropy"], backend="torch")
    first, second = (oracle.run(objective, problem, dtype=torch.float32, memory=problem.budget(4)) for _ in range(2))
    assert torch.equal(first.loss, second.loss) and first.metrics == second.metrics
    assert all(torch.equal(first.grads[n], g) for n, g in second.grads.items())


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_nan_stays_in_its_row(kind: str) -> None:
    """What is wrong with one row shows in the loss, and does not touch the others' gradients."""
    problem = oracle.make(kind, (23,), 37, ignored=0.0)
    objective = hl.Objective(
        ce=cross_entropy, z=hl.Term(z_loss, weight=0.1), h=LOSSES["entropy_bonus"], backend="torch"
    )
    rows = "logits" if kind == "Logits" else "hidden"
    spoiled = {n: x.clone() for n, x in problem.tensors.items()}
    spoiled[rows][5, 0] = torch.nan
    clean = oracle.run(objective, problem, memory=problem.budget(4))
    found = oracle.run(objective, oracle.replace(problem, tensors=spoiled), memory=problem.budget(4))
    others = torch.arange(23) != 5
    assert found.loss.isnan() and found.grads[rows][5].isnan().any()
    assert torch.equal(found.grads[rows][others], clean.grads[rows][others])
