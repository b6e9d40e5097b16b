"""Objectives on the one-launch path against the torch backend, under Triton's interpreter in a process of its own."""

import pytest
import torch
from interpreting import inside, interpreted

import headloss as hl
from headloss.losses import cross_entropy, grpo, z_loss

pytest.importorskip("triton")
N, V, D = 9, 37, 16


test_under_the_interpreter = interpreted(__file__)


class Batch:
    def __init__(self, ignored=True, dtype=torch.float32):
        generator = torch.Generator().manual_seed(3)
        self.logits = (3 * torch.randn(N, V, generator=generator)).to(dtype)
        self.hidden, self.weight = (torch.randn(n, D, generator=generator).to(dtype) for n in (N, V))
        self.targets = torch.randint(0, V, (N,), generator=generator)
        self.inputs = {
            "advantage": torch.randn(N, generator=generator),
            "old_logprob": -3 * torch.rand(N, generator=generator),
        }
        if ignored:
            self.targets[[2, 5]] = -100
            self.logits[2] = torch.nan  # an ignored row may hold anything
            self.inputs["advantage"][5] = torch.nan

    def source(self, kind, **more):
        if kind == "Logits":
            leaves = [self.logits.clone().requires_grad_()]
            return hl.Logits(*leaves, **more), leaves
        leaves = [self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()]
        return hl.Linear(*leaves, memory=4 * 64 * 4, **more), leaves  # four rows a chunk


def mix(backend, **more):
    return hl.Objective(
        ce=hl.Term(cross_entropy, label_smoothing=0.1),
        z=hl.Term(z_loss, weight=1e-2),
        pg=hl.Term(grpo, weight=0.3, low=0.2, high=0.3),
        metrics=["entropy", "accuracy"],
        backend=backend,
        **more,
    )


def compare(ours, truth, rtol=2e-5, atol=2e-6):
    torch.testing.assert_close(ours.loss, truth.loss, rtol=rtol, atol=atol)
    assert list(ours.metrics) == list(truth.metrics) and list(ours.terms) == list(truth.terms)
    for name, metric in truth.metrics.items():
        torch.testing.assert_close(
            ours.metrics[name].value, metric.value, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name
        )
        assert ours.metrics[name].per == metric.per
    for name, value in truth.terms.items():
        torch.testing.assert_close(ours.terms[name], value, rtol=rtol, atol=atol)
    for key, fact in truth.facts.items():
        torch.testing.assert_close(ours.facts[key], fact, rtol=1e-4, atol=1e-5)


def both(kind, batch, call=lambda o, s, b: o(s, b.targets, **b.inputs), **source):
    found = []
    for backend in ("triton", "torch"):
        opened, leaves = batch.source(kind, **source)
        out = call(mix(backend), opened, batch)
        out.loss.backward()
        found.append((out, [x.grad for x in leaves]))
    (ours, grads), (truth, expected) = found
    compare(ours, truth)
    for x, y in zip(grads, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("ignored", [True, False])
@pytest.mark.parametrize("host_read", [True, False])
def test_equals_the_torch_backend(kind, ignored, host_read):
    batch = Batch(ignored)
    plan = mix("triton").explain(batch.source(kind)[0], batch.targets, **batch.inputs)
    assert plan.launches.startswith("one launch per chunk"), plan.launches
    both(kind, batch, lambda o, s, b: o(s, b.targets, host_read=host_read, **b.inputs))


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_equals_the_torch_backend_with_everything_given(kind):
    segments = hl.Segments.from_ids(torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2]))

    def call(objective, source, batch):
        terms = {n: hl.Term(t.fn, **t.options, reduction="seq_mean_token_mean") for n, t in objective.terms.items()}
        terms["w"] = hl.Term(cross_entropy, reduction="weighted_mean", row_weight="importance")
        objective = hl.Objective(**terms, metrics=["entropy"], backend=objective.backend)
        importance = torch.arange(N) / 7.0
        weights = {"z": torch.tensor(0.02), "pg": 0.4}
        return objective(
            source, batch.targets, segments=segments, weights=weights, grad_scale=torch.tensor(3.0),
            importance=importance, **batch.inputs,
        )  # fmt: skip

    both(kind, Batch(), call, scale=0.7, softcap=5.0, temperature=torch.linspace(0.5, 2.0, N))


@inside
def test_no_gradient_writes_none_and_prepared_targets_read_nothing():
    batch = Batch()
    source, leaves = batch.source("Logits")
    with torch.no_grad():
        ours, truth = (mix(b)(source, hl.prepare(batch.targets), **batch.inputs) for b in ("triton", "torch"))
    compare(ours, truth)
    assert leaves[0].grad is None and torch.equal(leaves[0].detach().nan_to_num(), batch.logits.nan_to_num())


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_facts_and_a_second_backward_are_paid_for_when_asked(kind):
    batch = Batch()
    found = []
    for backend in ("triton", "torch"):
        source, leaves = batch.source(kind)
        out = mix(backend)(source, batch.targets, **batch.inputs)
        out.loss.backward(retain_graph=True)
        (2 * out.loss + out.facts.entropy.square().sum()).backward()
        found.append([x.grad for x in leaves])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-6)


@inside
def test_in_place_overwrites_in_the_forward_pass_and_then_gives_only_the_loss():
    batch = Batch(ignored=False)
    leaf = batch.logits.clone().requires_grad_()
    logits = leaf * 1
    version = logits._version
    out = mix("triton")(hl.Logits(logits, inplace=True), batch.targets, **batch.inputs)
    assert logits._version > version and not torch.allclose(logits, batch.logits)
    out.loss.backward(retain_graph=True)
    truth = batch.logits.clone().requires_grad_()
    mix("torch")(hl.Logits(truth), batch.targets, **batch.inputs).loss.backward()
    torch.testing.assert_close(leaf.grad, truth.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="make a term of what you compute from a fact"):
        out.facts.entropy.sum().backward()


@inside
def test_fp16_logits_keep_what_a_loss_scale_saves():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 64, generator=generator).half()
    targets = torch.tensor([1, 2, 3, 4])
    grads = []
    for backend, dtype in (("triton", torch.float16), ("torch", torch.float64)):
        x = logits.detach().to(dtype, copy=True).requires_grad_()
        objective = hl.Objective(ce=cross_entropy, backend=backend)
        (objective(hl.Logits(x), targets, num_items=10**7).loss * 2.0**14).backward()  # 1e-7 / 64 is 0 in fp16
        grads.append(x.grad.double())
    torch.testing.assert_close(*grads, rtol=2e-3, atol=4e-8)


@inside
def test_inputs_that_want_a_gradient_get_it():
    def pushed(logprob, push):
        return -logprob * push.sigmoid()

    found = []
    for backend in ("triton", "torch"):
        source, leaves = Batch().source("Logits")
        push = torch.linspace(-1, 1, N).requires_grad_()
        hl.Objective(term=pushed, backend=backend)(source, Batch().targets, push=push).loss.backward()
        found.append([leaves[0].grad, push.grad])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def roll(logprob):
    return logprob.roll(1)


def gamma(logprob):
    return torch.lgamma(1 - logprob)


def noted(logprob, *, rate=0.5):
    return -rate * logprob, {"rate": rate, "likely": logprob > -1}


@inside
def test_the_likeliest_column_at_two_temperatures():
    def confident(logprob, argmax, targets):
        return torch.where(argmax == targets, 0.1, 1.0) * -logprob, {"right": argmax == targets}

    batch, found = Batch(), []
    for backend in ("triton", "torch"):
        objective = hl.Objective(
            hot=hl.Term(confident, temperature=2.0), own=confident, metrics=["accuracy"], backend=backend
        )
        source, leaves = batch.source("Logits")
        out = objective(source, batch.targets)
        out.loss.backward()
        found.append((out, leaves[0].grad))
        launches = objective.explain(source, batch.targets).launches
        assert backend == "torch" or launches.startswith("one launch per chunk")
    compare(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


@inside
@pytest.mark.parametrize(
    ("terms", "metrics", "reason"),
    [
        ({"roll": roll}, [], "roll: roll mixes rows"),
        ({"gamma": gamma}, [], "lgamma of gamma"),
        ({"ce": cross_entropy}, {"spread": lambda logprob: logprob - logprob.mean()}, "metric 'spread'"),
        ({"ce": cross_entropy}, {"share": lambda logprob: logprob / len(logprob)}, "metric 'share': its Python code"),
        ({"ce": cross_entropy}, {"share": lambda logprob: logprob / logprob.shape[0]}, "metric 'share': div of a size"),
        ({"noted": hl.Term(noted, rate=0.3)}, [], "metric 'noted/rate': not one value per row"),
        ({"noted": hl.Term(noted, rate=1)}, [], "metric 'noted/rate': not one value per row"),
    ],
)
def test_what_cannot_be_printed_takes_two_launches_and_says_why(terms, metrics, reason):
    batch = Batch(ignored=False)
    segments = hl.Segments.from_ids(torch.arange(N) // 3)
    found = []
    for backend in ("triton", "torch"):
        objective = hl.Objective(**terms, metrics=metrics, backend=backend)
        source, leaves = batch.source("Logits")
        out = objective(source, batch.targets, segments=segments)
        out.loss.backward()
        found.append((out, leaves[0].grad))
        if backend == "triton":
            plan = objective.explain(source, batch.targets, segments=segments)
            assert plan.launches.startswith("one launch for the facts, one for the gradient (") and reason in str(plan)
    compare(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


@inside
def test_changing_numbers_compiles_nothing_new():
    from headloss.backends.triton.printer import lower

    batch = Batch()
    source, _ = batch.source("Logits")
    mix("triton")(source, batch.targets, **batch.inputs)
    seen = lower.compiled.cache_info().currsize
    for i in range(3):
        low = 0.1 + i / 10
        objective = hl.Objective(
            ce=hl.Term(cross_entropy, label_smoothing=0.1),
            z=hl.Term(z_loss, weight=1e-2),
            pg=hl.Term(grpo, weight=0.3, low=low, high=0.3),
            metrics=["entropy", "accuracy"],
            backend="triton",
        )
        ours = objective(source, batch.targets, weights={"z": 0.1 * i + 0.1}, num_items=5 + i, **batch.inputs)
        other = hl.Objective(**objective.terms, metrics=["entropy", "accuracy"], backend="torch")
        compare(ours, other(source, batch.targets, weights={"z": 0.1 * i + 0.1}, num_items=5 + i, **batch.inputs))
    assert lower.compiled.cache_info().currsize == seen


@inside
def test_explain_shows_the_source_and_what_the_first_call_cost():
    batch = Batch()
    objective = mix("triton")
    source, _ = batch.source("Logits")
    before = objective.explain(source, batch.targets, source=True, **batch.inputs)
    assert "@triton.jit\ndef row(" in str(before) and before.code not in str(before._replace(code=""))
    objective(source, batch.targets, **batch.inputs)
    after = objective.explain(source, batch.targets, **batch.inputs)
    assert not after.code and set(after.first_call) == {"tracing", "printing", "compiling"}
    assert "first call" in str(after) and " s compiling" in str(after)


@inside
def test_metrics_do_not_change_with_what_is_written_to_the_targets_later():
    batch = Batch()
    objective = hl.Objective(ce=cross_entropy, metrics={"lse_min": lambda lse: lse, "lse": lambda lse: lse})
    found = []
    for backend in ("triton", "torch"):
        targets = batch.targets.clone()
        objective = hl.Objective(**objective.terms, metrics=objective.asked, backend=backend)
        out = objective(batch.source("Logits")[0], targets)
        targets.fill_(-100)  # the next batch comes into the same buffer
        found.append([float(x) for x in out.metrics.values()])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@inside
def test_while_a_graph_is_captured_metrics_are_part_of_it(monkeypatch):
    from headloss.engine import one_launch

    batch = Batch()
    source, _ = batch.source("Logits")
    for captured in (False, True):
        for module in (one_launch, hl.metrics):
            monkeypatch.setattr(module, "is_capturing", lambda captured=captured: captured)
        metric = mix("triton")(source, batch.targets, **batch.inputs).metrics["entropy"]
        group = metric._parts[0]
        assert isinstance(group, hl.metrics.MetricGroup) and (group.unreduced is None) == captured


@inside
def test_every_term_off():
    batch = Batch()
    for kind in ("Logits", "Linear"):
        ours, truth = (
            o(batch.source(kind)[0], batch.targets, weights=dict.fromkeys(o.terms, 0), **batch.inputs)
            for o in (mix("triton"), mix("torch"))
        )
        compare(ours, truth)


@inside
def test_no_rows_that_count():
    for kind in ("Logits", "Linear"):
        batch = Batch()
        batch.targets[:] = -100
        both(kind, batch)


def test_few_rows_are_cut_in_parts_only_where_that_is_allowed(monkeypatch):
    """On meta tensors: `BATCH_INVARIANT` decides whether the count of rows may change a row's bits."""
    from headloss.backends.triton import sweeps

    launches = {}
    for invariant in (True, False):
        monkeypatch.setattr(sweeps, "BATCH_INVARIANT", invariant)
        for rows, columns in ((8, 50257), (4096, 50257), (8, 4096)):
            source = hl.Logits(torch.empty(rows, columns, device="meta"))
            plan = hl.Objective(ce=cross_entropy, backend="triton").explain(
                source, torch.empty(rows, dtype=torch.long, device="meta")
            )
            launches[invariant, rows, columns] = plan.launches
    apart = launches.pop((False, 8, 50257))
    assert apart == f"{SETTLED} (so few rows are swept faster in parts)"
    assert all(x.startswith("one launch") and "in parts" not in x for x in launches.values()), launches


SETTLED = "one launch for the facts, one that settles the rows, one for the gradient"


@inside
@pytest.mark.parametrize("loss", ["forward_kl", "jsd"])
def test_few_rows_with_a_teacher_take_one_launch(loss, monkeypatch):
    """Of the student alone they are cut in parts, which takes more launches."""
    from headloss.backends.triton import sweeps, visit

    monkeypatch.setattr(sweeps, "BATCH_INVARIANT", False)
    monkeypatch.setattr(visit, "takes_one_launch", lambda C, V: False)
    logits, targets = torch.randn(5, 11), torch.arange(5)
    terms = {"ce": hl.losses.cross_entropy, "kd": hl.losses.LOSSES[loss]}
    distilled = hl.Objective(**terms, backend="triton").explain(hl.Logits(logits), targets, teacher=hl.Logits(logits))
    alone = hl.Objective(ce=hl.losses.cross_entropy, backend="triton").explain(hl.Logits(logits), targets)
    assert distilled.launches == "one launch per chunk: the loss runs inside the sweep" != alone.launches
    assert "so few rows" in alone.launches


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_facts_without_grad_take_one_launch_per_chunk(kind, monkeypatch):
    """No sums to be merged and finished in launches of their own; with grad they are, and give the same."""
    from headloss.backends.triton import backend

    batch, want = Batch(), ("logprob", "entropy", "argmax", "mean_logprob", ("entropy", 2.0))
    visit, seen = backend.visit, []
    monkeypatch.setattr(backend, "visit", lambda *a, **k: seen.append(1) or visit(*a, **k))
    source, _ = batch.source(kind)
    with_grad = hl.row_facts(source, batch.targets, want, backend="triton")
    assert not seen and with_grad.logprob.requires_grad
    monkeypatch.setattr(backend, "sums", None)
    with torch.no_grad():
        ours = hl.row_facts(source, batch.targets, want, backend="triton")
    assert len(seen) == (1 if kind == "Logits" else 3)
    for fact in ("logprob", "entropy", "argmax", "mean_logprob"):
        torch.testing.assert_close(getattr(ours, fact), getattr(with_grad, fact).detach(), rtol=2e-5, atol=2e-6)
        assert getattr(ours, fact)[batch.targets == -100].eq(0).all()


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_call_with_every_term_off_still_measures(kind, dtype):
    """In float16 a gradient has a scale of its own, which no term is there to set."""
    batch = Batch(ignored=False, dtype=dtype)
    for objective, weights in ((mix("triton"), dict.fromkeys(("ce", "z", "pg"), 0.0)), (on_nothing(), None)):
        for _ in range(2):
            source, leaves = batch.source(kind)
            more = batch.inputs if weights else {}
            out = objective(source, batch.targets, weights=weights, **more)
            assert float(out.loss.detach()) == 0 and float(out.metrics["entropy"]) > 0
            if out.loss.requires_grad:
                out.loss.backward()
            assert all(x.grad is None or not x.grad.any() for x in leaves)


def on_nothing():
    return hl.Objective(ce=hl.Term(cross_entropy, weight=0.0), metrics=["entropy"], backend="triton")


@inside
def test_float16_of_long_segments_next_to_ignored_rows():
    """An ignored row has no segment, and must not make the others' gradient the smaller: it would lose its digits."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(64, 4096, generator=generator).half(), torch.arange(64)
    targets[::4] = -100
    segments = hl.Segments.from_ids(torch.zeros(64, dtype=torch.long))
    found = []
    for backend, dtype in (("triton", torch.float16), ("torch", torch.float64)):
        leaf = logits.clone().to(dtype).requires_grad_()
        objective = hl.Objective(ce=hl.Term(cross_entropy, reduction="seq_mean_token_mean"), backend=backend)
        objective(hl.Logits(leaf * 1, inplace=True), targets, segments=segments, grad_scale=1024.0).loss.backward()
        found.append(leaf.grad.double()[:, 64:])  # without the targets, whose gradient is far larger
    got, exact = found
    rounded = (exact.half().double() - exact).norm()
    assert (got - exact).norm() < 2 * rounded, ((got - exact).norm(), rounded)


@inside
@pytest.mark.parametrize("grad_scale", [1.0, 128.0])
def test_float16_without_autograd(grad_scale):
    """The gradient has the scale of the loss, whether it is scaled or made again."""
    x, targets = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).half(), torch.arange(7)
    found = []
    for backend, dtype in (("triton", torch.float16), ("torch", torch.float64)):
        objective = hl.Objective(ce=cross_entropy, backend=backend)
        call = {"grad_scale": grad_scale}
        found.append(objective.forward_backward(hl.Logits(x.to(dtype)), targets, **call).grads.logits.double())
    torch.testing.assert_close(*found, rtol=2e-3, atol=1e-5)
