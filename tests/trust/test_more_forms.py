"""Further forms of code, and of tensors, whose trace, key or copy must not be believed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import pickle
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreting import INSIDE, interpreted
from torch import Tensor

import headloss as hl
from headloss import deferred_checks
from headloss.losses import cross_entropy, dpo, forward_kl
from headloss.prepared import Stats, check_stats
from headloss.trace.function_reads import reads_of

D = torch.float64
torch.manual_seed(0)
H, W, Y = torch.randn(6, 4, dtype=D), torch.randn(9, 4, dtype=D), torch.randint(9, (6,))
BOTH = pytest.mark.parametrize("kind", ["Logits", "Linear"])


def source(kind: str, x: Tensor, memory: Any = 9 * 4 * 8) -> Any:
    return hl.Linear(x, W, memory=memory) if kind == "Linear" else hl.Logits(x @ W.T)


def dense(fn: Any, names: tuple[str, ...], y: Tensor, targets: Tensor = Y) -> Tensor:
    logp = (y @ W.T).log_softmax(-1)
    facts = {
        "logprob": logp.gather(1, targets[:, None])[:, 0],
        "entropy": -(logp.exp() * logp).sum(-1),
        "targets": targets,
    }
    value: Tensor = fn(*(facts[name] for name in names)).mean()
    return value


def same(objective: hl.Objective, fn: Any, names: tuple[str, ...], kind: str) -> None:
    x, y = H.clone().requires_grad_(), H.clone().requires_grad_()
    got, want = objective(source(kind, x), Y).loss, dense(fn, names, y)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, x)[0], torch.autograd.grad(want, y)[0])


# ---------------------------------------------------------------- a number of segments that is filled in

FILLED = {
    "full_like": lambda logprob, segments: (
        -segments.spread(segments.totals(logprob)) / torch.full_like(logprob, segments.num_segments)
    ),
    "new_full": lambda logprob, segments: (
        -segments.totals(logprob) / logprob.new_full((segments.num_segments,), segments.num_segments)
    ),
    "scalar": lambda logprob, segments: -segments.totals(logprob) / torch.scalar_tensor(segments.num_segments),
    "where": lambda logprob, segments: (
        -segments.totals(logprob) / torch.where(segments.counts > 0, segments.num_segments, 1)
    ),
}


@pytest.mark.parametrize("name", FILLED)
def test_the_number_of_segments_as_a_value(name: str) -> None:
    fn, segments = FILLED[name], hl.Segments.from_ids(torch.tensor([0, 0, 1, 1, 2, 2]))
    for memory in ("1GiB", 9 * 2 * 8):
        x, y = H.clone().requires_grad_(), H.clone().requires_grad_()
        got = hl.Objective(it=fn)(source("Linear", x, memory), Y, segments=segments).loss
        want = dense(lambda logprob: fn(logprob, segments), ("logprob",), y)
        torch.testing.assert_close(torch.autograd.grad(got, x)[0], torch.autograd.grad(want, y)[0])


# ---------------------------------------------------------------- branches that no example takes


def by_size(logprob, entropy):
    n = logprob.shape[0]
    return entropy - 2 * logprob if isinstance(n, int) and n > 5 else entropy - logprob


def by_text(logprob, entropy):
    return entropy - 2 * logprob if f"{logprob.shape[0]}" == "6" else entropy - logprob


def by_except(logprob, entropy):
    try:
        odd = bool((logprob < -1.5).any())
    except Exception:
        odd = False
    return entropy - 2 * logprob if odd else entropy - logprob


def by_target(logprob, targets):
    try:
        special = bool((targets == int(Y[0])).any())
    except RuntimeError:
        special = False
    return -2 * logprob if special else -logprob


@BOTH
@pytest.mark.parametrize("fn", [by_size, by_text, by_except, by_target])
def test_branches_that_a_trace_does_not_take(fn: Any, kind: str) -> None:
    names = tuple(fn.__code__.co_varnames[:2])
    assert reads_of(fn).unknown
    same(hl.Objective(it=fn), fn, names, kind)


def test_code_that_stays_traced() -> None:
    def with_block(logprob):
        with torch.no_grad():
            weight = logprob.exp()
        return -weight * logprob

    def with_option(logprob, *, k=1.0):
        return -logprob * (k if isinstance(k, float) else 1.0) * sum(x for x in (0.5, 0.5))

    assert reads_of(with_block).unknown == () == reads_of(with_option).unknown


# ---------------------------------------------------------------- what stands under a name of torch's


@BOTH
def test_functions_put_into_torch_and_math(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"x": 1.0}
    mine = lambda x: -config["x"] * x
    for home, name in ((F, "l1_loss"), (F, "my_loss"), (math, "beta")):
        with monkeypatch.context() as patch:
            patch.setattr(home, name, mine, raising=False)
            fn = {"l1_loss": lambda logprob: F.l1_loss(logprob), "my_loss": lambda logprob: F.my_loss(logprob)}.get(
                name, lambda logprob: math.beta(logprob)
            )
            objective = hl.Objective(it=fn)
            for x in (1.0, 3.0):
                config["x"] = x
                same(objective, mine, ("logprob",), kind)


def test_a_method_put_on_tensors_before_the_import() -> None:
    code = """
        import torch
        config = {"x": 1.0}
        torch.Tensor.softplus = lambda self: -config["x"] * self
        import math
        math.expm1 = lambda x: x
        from headloss.trace.function_reads import reads_of
        assert "softplus" in reads_of(lambda logprob: logprob.softplus()).unknown[0]
        assert reads_of(lambda logprob: math.expm1(2.0) * logprob).unknown == ()  # as its code is: it reads nothing
        assert reads_of(lambda logprob: logprob.exp()).unknown == ()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])


@dataclasses.dataclass(frozen=True)
class Config:
    beta: float = 1.0


@BOTH
def test_attributes_of_partials_and_of_types(kind: str) -> None:
    scale, config = functools.partial(torch.neg), Config()

    def by_partial(logprob):
        held = scale
        return held(logprob) * held.eps

    def by_type(logprob):
        return -type(config).beta * logprob

    for fn, turn in ((by_partial, lambda x: setattr(scale, "eps", x)), (by_type, lambda x: setattr(Config, "beta", x))):
        turn(1.0)
        objective = hl.Objective(it=fn)
        for x in (1.0, 3.0):
            turn(x)
            same(objective, fn, ("logprob",), kind)
    Config.beta = 1.0


# ---------------------------------------------------------------- prepared targets that were written to

WAYS = {
    "to": lambda p: p.to("cpu"), "pickle": lambda p: pickle.loads(pickle.dumps(p)), "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_writes_before_a_copy_of_what_was_prepared(way: str) -> None:
    targets = Y.clone()
    batch = hl.prepare(targets)
    targets[0] = -100
    with pytest.raises(ValueError, match="targets: were written to after hl.prepare"):
        WAYS[way](batch)


@BOTH
def test_prepared_in_a_graph(kind: str) -> None:
    objective = hl.Objective(ce=cross_entropy)
    targets = Y.clone()
    batch = hl.prepare(targets)
    torch._dynamo.reset()
    step = torch.compile(lambda x: objective(source(kind, x, "1GiB"), batch).loss, backend="aot_eager")
    torch.testing.assert_close(step(H), F.cross_entropy(H @ W.T, Y))
    targets[0] = -100
    with pytest.raises(ValueError, match="were written to after hl.prepare"):
        step(H)


def test_inference_targets_are_copied() -> None:
    with torch.inference_mode():
        targets = Y.clone()
        batch = hl.prepare(targets)
        targets[0] = -100
    loss = hl.Objective(ce=cross_entropy)(hl.Logits(H @ W.T), batch).loss
    torch.testing.assert_close(loss, F.cross_entropy(H @ W.T, Y))


def test_segments_given_twice_in_a_graph() -> None:
    one, two = (hl.Segments.from_ids(torch.tensor(x)) for x in ([0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1]))
    objective = hl.Objective(it=lambda logprob, segments: -segments.means(logprob))
    torch._dynamo.reset()
    step = torch.compile(
        lambda x, s: objective(hl.Logits(x @ W.T), hl.prepare(Y, one), segments=s).loss, backend="aot_eager"
    )
    with pytest.raises(Exception, match="segments: given to the call, but its targets are prepared"):
        step(H, two)


# ---------------------------------------------------------------- writes that nothing counts


def in_place(logprob):
    return -logprob.clamp_(min=-1.0)


def by_data(logprob):
    return -logprob.data.clamp_(min=-1.0) + 0 * logprob


def by_numpy(logprob):
    x = logprob.detach().numpy()
    x.clip(-1.0, None, out=x)
    return -logprob


@BOTH
@pytest.mark.parametrize("fn", [in_place, by_data, by_numpy])
def test_writes_without_a_count(fn: Any, kind: str) -> None:
    want = float(dense(torch.neg, ("logprob",), H))
    with torch.inference_mode(fn is in_place):
        x = H.clone()
        metrics = {"first": fn, "nll": lambda logprob: -logprob}
        out = hl.Objective(one=fn, ce=cross_entropy, metrics=metrics)(source(kind, x), Y)
        assert float(out.terms["ce"]) == pytest.approx(want) == float(out.metrics["nll"])


# ---------------------------------------------------------------- divergences

CENTRE = False


def by_global(logp, logq):
    gap = logp.exp() * (logp - logq)
    return gap * gap.detach().mean(0, keepdim=True) if CENTRE else gap


def by_rows(logp, logq):
    gap = logp.exp() * (logp - logq)
    return gap / logp.shape[0] if logp.shape[0] > 5 else gap


def by_many_rows(logp, logq):
    return (0.5 if logp.shape[0] > 4000 else 1.0) * logp.exp() * (logp - logq)


def by_many_columns(logp, logq):
    return (0.5 if logp.shape[-1] > 4000 else 1.0) * logp.exp() * (logp - logq)


def by_value(logp, logq):
    gap = logp.exp() * (logp - logq)
    return 2 * gap if bool((logp < -6).any()) else gap


@pytest.mark.parametrize("fn", [by_global, by_rows, by_many_rows, by_many_columns, by_value])
def test_a_divergence_that_comes_to_mix_rows(fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="wanted an element-wise function"):
        objective = hl.Objective(it=fn)
        call = lambda: objective(source("Linear", H), Y, teacher=hl.Logits((H @ W.T).flip(0)))
        call()
        monkeypatch.setattr(sys.modules[__name__], "CENTRE", True)
        call()


# ---------------------------------------------------------------- late checks


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> Any:
    deferred_checks._PENDING.clear()
    for name in ("deferred_checks", "rows", "engine.bind", "engine.row_facts", "engine.layout"):
        monkeypatch.setattr(f"headloss.{name}.should_defer", lambda device: True)
    yield
    deferred_checks._PENDING.clear()


@pytest.mark.usefixtures("deferred")
def test_a_compiled_call_says_what_an_earlier_one_left() -> None:
    objective = hl.Objective(ce=cross_entropy)
    deferred_checks.check_later(torch.tensor([1, -7, 3]), lambda x: check_stats(Stats.read(x), 9))
    torch._dynamo.reset()
    step = torch.compile(lambda x: objective(hl.Logits(x), Y).loss, backend="aot_eager")
    with pytest.raises(ValueError, match="targets: .*-7.*earlier call"):
        step(H @ W.T)


@pytest.mark.usefixtures("deferred")
def test_explain_leaves_nothing_for_a_later_call() -> None:
    objective, wrong = hl.Objective(ce=cross_entropy), Y.clone()
    wrong[1] = 77
    with pytest.raises(ValueError, match="targets: .*77"):
        objective.explain(hl.Logits(H @ W.T), wrong)
    assert not deferred_checks._PENDING and objective.explain(hl.Logits(H @ W.T), Y).rows == 6


@pytest.mark.usefixtures("deferred")
def test_pairs_are_checked_late_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from headloss.engine.layout import _check_range

    deferred_checks.check_later(torch.tensor([-1, 1]), functools.partial(_check_range, 2))
    with pytest.raises(ValueError, match=r"pairs: wanted numbers of segments, in \[0, 2\), got -1"):
        deferred_checks.check_pending(wait=True)
    with pytest.raises(ValueError, match="pairs: .*got -1"):
        hl.Objective(d=dpo)(
            hl.Logits(H @ W.T), Y, segments=hl.Segments.from_ids(torch.tensor([0, 0, 0, 1, 1, 1])),
            pairs=torch.tensor([[0, -1]]), ref_logprob=torch.zeros(6),
        )  # fmt: skip


def test_a_bool_is_no_count_in_a_graph() -> None:
    torch._dynamo.reset()
    objective = hl.Objective(ce=cross_entropy)
    step = torch.compile(lambda x: objective(hl.Logits(x), Y, num_items=True).loss, backend="aot_eager")
    with pytest.raises(Exception, match="num_items: wanted a number"):
        step(H @ W.T)


# ---------------------------------------------------------------- teachers, and the Triton backend


@BOTH
def test_a_teacher_that_requires_grad_is_said_to_get_none(kind: str) -> None:
    teacher = (H @ W.T).flip(0).requires_grad_()
    with pytest.warns(UserWarning, match="teacher: its logits require grad, but a teacher is constant"):
        hl.Objective(kl=forward_kl)(source(kind, H.clone().requires_grad_()), Y, teacher=hl.Logits(teacher))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hl.Objective(kl=forward_kl)(source(kind, H.clone().requires_grad_()), Y, teacher=hl.Logits(teacher.detach()))


@pytest.mark.skipif(not INSIDE, reason="for the interpreter")
def test_later_calls_unwrap_what_is_per_row() -> None:
    objective = hl.Objective(it=lambda logprob, a: -a * logprob, backend="triton")
    z, a = (H @ W.T).float().requires_grad_(), torch.rand(6)
    want = (-a * z.log_softmax(-1).gather(1, Y[:, None])[:, 0]).mean()
    for _ in range(3):
        torch.testing.assert_close(objective(hl.Logits(z), Y, a=hl.PerRow(a)).loss, want)


@pytest.mark.skipif(not INSIDE, reason="for the interpreter")
@pytest.mark.parametrize("grad", [True, False])
def test_compiled_without_gradients(grad: bool) -> None:
    objective = hl.Objective(ce=cross_entropy, backend="triton")
    torch._dynamo.reset()
    step = torch.compile(lambda x: objective(hl.Logits(x), Y).loss, backend="aot_eager")
    z = (H @ W.T).float().requires_grad_(grad)
    torch.testing.assert_close(step(z), F.cross_entropy(z, Y))


test_under_the_interpreter = interpreted(__file__, "-k", "per_row or without_gradients")
