"""One launch with a teacher against float64, under Triton's interpreter in a process of its own."""

import math

import pytest
import torch
from interpreting import fma_rounds_once, inside, interpreted

import headloss as hl
from headloss.engine.arguments import CallArguments
from headloss.engine.lookup import find
from headloss.losses import (
    cross_entropy,
    entropy_bonus,
    forward_kl,
    grpo,
    jsd,
    reverse_kl,
    skew_kl,
    soft_cross_entropy,
    tvd,
    z_loss,
)

pytest.importorskip("triton")
N, V, D, K = 7, 37, 16, 5


test_under_the_interpreter = interpreted(__file__)


class Batch:
    """Rows of a student and of a teacher; one is ignored and holds NaN."""

    def __init__(self, n=N, v=V, dtype=torch.float32, k=K, seed=3):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *size: torch.randn(*size, generator=generator)
        self.logits, self.teacher_logits = ((3 * draw(n, v)).to(dtype) for _ in range(2))
        self.hidden, self.weight, self.teacher_hidden, self.teacher_weight = (
            draw(m, D).to(dtype) for m in (n, v, n, v)
        )
        self.targets = torch.randint(0, v, (n,), generator=generator)
        logq, self.ids = self.teacher_logits.float().log_softmax(-1).topk(min(k, v), -1)
        self.logq = logq - 0.3  # some mass is left for the rest
        self.inputs = {"advantage": draw(n), "old_logprob": -3 * torch.rand(n, generator=generator)}
        if n > 4:
            self.ids[1, -2:] = -1
            self.ids[3] = -1
            self.ids[4, 1] = self.ids[4, 0]
            self.targets[0] = self.ids[0, 2]  # the target is one of the ids
            self.targets[2] = -100
            self.logits[2], self.inputs["advantage"][2] = torch.nan, torch.nan

    def source(self, kind, dtype, **more):
        raw = [self.logits] if kind == "Logits" else [self.hidden, self.weight]
        leaves = [x.to(dtype).clone().requires_grad_() for x in raw]
        if kind == "Logits":
            return hl.Logits(*leaves, **more), leaves
        few = 4 * 8 * max(64, len(self.weight))  # bytes, for some rows a chunk
        return hl.Linear(*leaves, memory=few, **more), leaves

    def teacher(self, kind, dtype, **more):
        if kind == "ids":
            return hl.Sparse(self.ids, self.logq.to(torch.promote_types(dtype, torch.float32)))
        if kind == "Linear":
            return hl.Linear(self.teacher_hidden.to(dtype), self.teacher_weight.to(dtype), **more)
        return hl.Logits(self.teacher_logits.to(dtype), **more)


def both(batch, terms, kind="Logits", teacher="Logits", metrics=(), transform=None, tolerance=1e-4, **source):
    """One launch in float32, and the torch backend in float64."""
    asked = {n for t in terms.values() if getattr(t, "fn", t) is grpo for n in batch.inputs}
    found = []
    for backend, dtype in (("triton", batch.logits.dtype), ("torch", torch.float64)):
        inputs = {n: batch.inputs[n] for n in asked}
        opened, leaves = batch.source(kind, dtype, **source)
        objective = hl.Objective(**terms, metrics=list(metrics), backend=backend)
        inputs["teacher"] = batch.teacher(teacher, dtype, **(transform or {}))
        if backend == "triton":
            plan = objective.explain(opened, batch.targets, **inputs)
            assert plan.launches.startswith("one launch per chunk"), plan.launches
        out = objective(opened, batch.targets, **inputs)
        out.loss.backward()
        found.append((out, [x.grad for x in leaves]))
    (ours, grads), (truth, expected) = found
    close = lambda x, y, **more: torch.testing.assert_close(
        x.double(), y.double(), rtol=tolerance, atol=more.pop("atol", tolerance / 10), equal_nan=True, **more
    )
    close(ours.loss, truth.loss)
    for name, value in truth.terms.items():
        close(ours.terms[name], value)
    for name, metric in truth.metrics.items():
        close(ours.metrics[name].value, metric.value, msg=name)
    for key, fact in truth.facts.items():
        close(ours.facts[key], fact)
    for x, y in zip(grads, expected, strict=True):
        close(x, y, atol=tolerance / 10 * float(y.abs().nan_to_num().amax()) + 1e-9)
    return ours


DIVERGENCES = {f.__name__: f for f in (forward_kl, reverse_kl, jsd, skew_kl, tvd, soft_cross_entropy)}


@inside
@pytest.mark.parametrize("teacher", ["Logits", "ids"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_divergence(name, teacher):
    for kind in ("Logits", "Linear"):
        both(Batch(), {"kd": DIVERGENCES[name]}, kind, teacher)


def alpha(logp, logq, *, alpha=0.5):
    return ((alpha * logq + (1 - alpha) * logp).exp() - logp.exp()) / (alpha * (alpha - 1))


def weighed(ids_logprob, teacher_ids, teacher_logprob, tail_logprob, entropy):
    """Sums and a softmax over the ids of a row, and facts of the row itself."""
    held = teacher_ids >= 0
    share = torch.where(held, teacher_logprob, -20.0).softmax(-1)
    spread = (share * (ids_logprob - ids_logprob.sum(-1, keepdim=True) / 5) ** 2).sum(-1)
    count = held.sum(-1)
    value = spread / (1 + count) + torch.logsumexp(ids_logprob, -1) * entropy + 0.1 * tail_logprob.clamp(min=-30.0)
    return value, {"named": count.float()}


def mix():
    return {
        "kd": hl.Term(forward_kl, weight=0.7),
        "j": hl.Term(jsd, beta=0.3, temperature=2.0),
        "mine": hl.Term(alpha, weight=0.5, alpha=0.3),
        "ce": hl.Term(cross_entropy, label_smoothing=0.1),
        "z": hl.Term(z_loss, weight=1e-2),
        "h": hl.Term(entropy_bonus, temperature=0.5),
        "pg": grpo,
    }


@inside
@pytest.mark.parametrize("teacher", ["Logits", "Linear", "ids"])
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_mix(kind, teacher):
    both(Batch(), mix(), kind, teacher, ["entropy", "accuracy"])


@inside
@pytest.mark.parametrize("teacher", ["Logits", "ids"])
def test_transformed_logits(teacher):
    transform = {} if teacher == "ids" else {"scale": 1.3, "softcap": 8.0, "temperature": 0.8}
    T = torch.linspace(0.5, 2.0, N)
    both(Batch(), mix(), "Logits", teacher, ["entropy"], transform, scale=0.7, softcap=5.0, temperature=T)
    if teacher != "ids":
        transform["temperature"] = T.flip(0)
        both(Batch(), mix(), "Logits", teacher, ["entropy"], transform, scale=-0.7)


@inside
@pytest.mark.parametrize("teacher", ["Logits", "ids"])
@pytest.mark.parametrize(
    ("v", "dtype"), [(2, torch.float32), (5, torch.bfloat16), (256, torch.float16), (331, torch.bfloat16)]
)
def test_any_vocabulary(v, dtype, teacher):
    terms = {"kd": forward_kl, "j": jsd, "ce": cross_entropy}
    tolerance = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    both(Batch(3, v, dtype), terms, "Logits", teacher, ["accuracy"], tolerance=tolerance)


@inside
def test_any_layout():
    """Rows apart, and starting anywhere: of the student, of the teacher, of both."""
    for i, strides in enumerate([(41, 37), (40, 43), (37, 64)]):
        batch = Batch()
        for name, stride in zip(("logits", "teacher_logits"), strides, strict=True):
            memory = torch.zeros(N * stride + 9)
            view = memory[i : i + N * stride].view(N, stride)[:, :V]
            view.copy_(getattr(batch, name))
            setattr(batch, name, view)
        terms = {"kd": forward_kl, "ce": cross_entropy}
        grads = []
        for backend in ("triton", "torch"):
            source = hl.Logits(batch.logits.detach().requires_grad_())
            out = hl.Objective(**terms, backend=backend)(source, batch.targets, teacher=hl.Logits(batch.teacher_logits))
            grads.append(torch.autograd.grad(out.loss, source.logits)[0])
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


@inside
def test_a_teacher_with_more_columns():
    batch = Batch()
    batch.teacher_logits = torch.cat([batch.teacher_logits, torch.full((N, 5), 9.0)], 1)
    both(batch, {"kd": forward_kl, "j": jsd})


@inside
@pytest.mark.parametrize("teacher", ["Logits", "ids"])
def test_columns_that_are_ruled_out(teacher):
    batch = Batch()
    batch.logits[0, ::2], batch.logits[5, 3:] = -math.inf, -math.inf
    if teacher == "Logits":
        batch.teacher_logits[1, ::3], batch.teacher_logits[5, 30:] = -math.inf, -math.inf
    batch.targets[5] = 1
    both(batch, {"kd": tvd, "r": reverse_kl, "f": hl.Term(forward_kl, weight=1e-3)}, "Logits", teacher, ["accuracy"])


@inside
@pytest.mark.parametrize("offset", [-3e4, 200.0])
def test_offsets_cost_no_digits(offset):
    if not fma_rounds_once():
        pytest.skip("a GPU's fma rounds once, this interpreter's twice")
    for teacher in ("Logits", "ids"):
        batch = Batch()
        batch.logits += offset
        batch.teacher_logits -= offset
        batch.logits = batch.logits.to(torch.bfloat16).float()  # so that float64 sees the same
        both(batch, {"kd": reverse_kl, "j": jsd, "ce": cross_entropy}, "Logits", teacher, ["entropy"])


@inside
def test_the_tail_keeps_its_digits():
    """The ids hold all but a billionth: one minus their sum would say nothing of the rest."""
    batch = Batch()
    batch.logits = 0.1 * torch.randn(N, V, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(N)
    for k in range(K):
        batch.ids[:, k] = (5 * rows + 3 * k) % V
    batch.logits.scatter_(1, batch.ids, 21.0)
    batch.targets[2] = 1
    ours = both(batch, {"kd": forward_kl, "ce": cross_entropy}, "Logits", "ids", ["entropy"])
    (tail,) = [x for f, x in ours.facts.items() if "tail_logprob" in str(f)]
    assert -21 < float(tail.detach().amax()) < -15


@inside
def test_ids_side_by_side_in_a_long_row(monkeypatch):
    """They share vectors, stand at both ends, and beyond what 32 loads of a lane reach."""
    from headloss.backends.triton import visit

    monkeypatch.setattr(visit, "WITH_TEACHER", ((1 << 31, *[visit.Shape(1, 1)] * 3),))
    batch = Batch(3, 4500, k=40)
    batch.ids[:, :7] = torch.tensor([0, 1, 3, 4499, 4498, 4096, 4400])
    both(batch, {"kd": forward_kl, "ce": cross_entropy}, "Logits", "ids", ["accuracy", "entropy"])


@inside
def test_what_only_this_test_writes_on_ids():
    both(Batch(), {"mine": weighed, "ce": cross_entropy}, "Logits", "ids")
    both(Batch(), {"kd": hl.Term(forward_kl, tail="none")}, "Logits", "ids")
    both(Batch(), {"kd": hl.Term(jsd, tail="renormalise"), "ce": cross_entropy}, "Linear", "ids", ["accuracy"])


def flat(ids_logprob, teacher_logprob, teacher_ids, tail_logprob, entropy):
    """The one id of a row as a number of the row, by ways that need no sum, and as a column."""
    own, logq = ids_logprob.squeeze(-1), teacher_logprob.squeeze(1)
    held = teacher_ids.squeeze(-1) >= 0
    gap = torch.where(held, logq.exp() * (logq - own), 0.0)
    value = gap + 0.1 * entropy * (ids_logprob - tail_logprob[:, None].clamp(min=-30.0)).squeeze(-1).clamp(min=-40.0)
    return value + 0.2 * ids_logprob.clamp(min=-9.0).sum(-1), {"held": held, "gap": gap, "own": own.clamp(min=-9.0)}


@inside
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("v", [37, 2100])
def test_a_single_id_per_row(kind, v):
    batch = Batch(v=v)
    batch.ids, batch.logq = batch.ids[:, :1].clone(), batch.logq[:, :1].clone()
    batch.targets[0] = batch.ids[0, 0]
    terms = {n: hl.Term(f, weight=0.3) for n, f in DIVERGENCES.items()}
    terms |= {"flat": hl.Term(flat), "warm": hl.Term(forward_kl, temperature=2.0), "ce": cross_entropy}
    both(batch, terms, kind, "ids", metrics=["entropy"], scale=0.7, softcap=20.0)
    both(batch, {"flat": flat}, kind, "ids")
    both(batch, {"kd": forward_kl}, kind, "ids")


def agreement(argmax, teacher_argmax):
    return (argmax == teacher_argmax).float()


@inside
def test_the_likeliest_columns():
    batch = Batch()
    batch.teacher_logits[0] = batch.logits[0]
    batch.teacher_logits[1] = 0.0  # ties: the first
    batch.logits[1] = 0.0
    both(batch, {"kd": forward_kl}, metrics=[agreement, "accuracy"])
    batch.ids[1] = torch.tensor([3, 0, 9, -1, -1])  # the first of equal columns is an id
    batch.ids[4] = torch.tensor([30, 31, 32, 33, 34])
    batch.logits[4] = 1.0  # the first of equal columns is in the tail
    both(batch, {"kd": forward_kl, "ce": cross_entropy}, "Logits", "ids", ["accuracy"])


@inside
@pytest.mark.parametrize("teacher", ["Logits", "ids"])
def test_in_place_and_without_a_gradient(teacher):
    batch = Batch()
    terms = {"kd": forward_kl, "j": jsd, "ce": cross_entropy}
    objective = hl.Objective(**terms, metrics=["entropy"], backend="triton")
    source_t = batch.teacher(teacher, torch.float32)
    leaf = batch.logits.clone().requires_grad_()
    out = objective(hl.Logits(leaf), batch.targets, teacher=source_t)
    (want,) = torch.autograd.grad(out.loss, leaf)
    given = batch.logits.clone().requires_grad_()
    moved = given * 1.0
    objective(hl.Logits(moved, inplace=True), batch.targets, teacher=source_t).loss.backward()
    torch.testing.assert_close(given.grad, want, rtol=1e-6, atol=1e-8)
    with torch.no_grad():
        quiet = objective(hl.Logits(batch.logits), batch.targets, teacher=source_t)
    torch.testing.assert_close(quiet.loss, out.loss.detach())
    assert (
        objective.forward_backward(hl.Logits(batch.logits.clone()), batch.targets, teacher=source_t).grads is not None
    )


@inside
@pytest.mark.parametrize("teacher", ["Logits", "ids"])
def test_facts_and_a_second_backward(teacher):
    """Pulled in the backward, from the softmaxes that the launch left behind."""
    grads = []
    for backend in ("triton", "torch"):
        batch = Batch()
        leaf = batch.logits.clone().requires_grad_()
        source_t = batch.teacher(teacher, torch.float32)
        objective = hl.Objective(kd=forward_kl, j=hl.Term(jsd, temperature=2.0), ce=cross_entropy, backend=backend)
        out = objective(hl.Logits(leaf), batch.targets, teacher=source_t)
        first = torch.autograd.grad(out.loss, leaf, retain_graph=True)[0]
        second = torch.autograd.grad(2 * out.loss, leaf, retain_graph=True)[0]
        torch.testing.assert_close(second, 2 * first, rtol=1e-4, atol=1e-6)
        compared = [x for f, x in out.facts.items() if x.requires_grad]
        total = sum((x.nan_to_num() ** 2).sum() for x in compared) + out.loss
        grads.append(torch.autograd.grad(total, leaf)[0])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@inside
def test_rows_that_do_not_count():
    for host_read in (True, False):
        for teacher in ("Logits", "ids"):
            batch = Batch()
            batch.targets[:] = -100
            leaf = batch.logits.clone().requires_grad_()
            source_t = batch.teacher(teacher, torch.float32)
            objective = hl.Objective(kd=forward_kl, backend="triton")
            out = objective(hl.Logits(leaf), batch.targets, teacher=source_t, host_read=host_read)
            out.loss.backward()
            assert not leaf.grad.any()


@inside
@pytest.mark.parametrize(
    ("why", "terms", "teacher", "metrics"),
    [
        ("fewer columns", {"kd": forward_kl}, "narrow", ()),
        ("several teachers", {"a": hl.Term(forward_kl, teacher="a"), "b": hl.Term(jsd, teacher="b")}, "two", ()),
        (
            "a teacher of some ids",
            {"a": hl.Term(forward_kl, teacher="a"), "b": hl.Term(jsd, teacher="b")},
            "ids too",
            (),
        ),
        ("no softmax", {"kd": hl.Term(forward_kl, tail="renormalise")}, "ids", ()),
        ("topk_overlap", {"kd": forward_kl}, "ids", ("topk_overlap",)),
    ],
)
def test_what_takes_more_launches_says_why(why, terms, teacher, metrics):
    batch = Batch()
    full = batch.teacher("Logits", torch.float32)
    source_t = {
        "narrow": hl.Logits(batch.teacher_logits[:, :30]),
        "two": {"a": full, "b": hl.Logits(batch.teacher_logits.flip(0))},
        "ids too": {"a": full, "b": batch.teacher("ids", torch.float32)},
        "ids": batch.teacher("ids", torch.float32),
    }[teacher]  # fmt: skip
    found = []
    for backend in ("triton", "torch"):
        leaf = batch.logits.clone().requires_grad_()
        objective = hl.Objective(**terms, metrics=list(metrics), backend=backend)
        if backend == "triton":
            assert why in objective.explain(hl.Logits(leaf), batch.targets, teacher=source_t).launches
        out = objective(hl.Logits(leaf), batch.targets, teacher=source_t)
        found.append((out.loss.detach(), torch.autograd.grad(out.loss, leaf)[0]))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def rank(logprob):
    return (logprob.unsqueeze(1) < logprob).sum(1).float()


def squeezed(ids_logprob):
    return ids_logprob.sum(-1, keepdim=True).squeeze()


def whole(ids_logprob):
    return (ids_logprob[:] * ids_logprob[:, :]).sum(-1)


@inside
@pytest.mark.parametrize("k", [5, 7, 11])
def test_metrics_on_ids_that_mix_rows_are_no_part_of_the_program(k):
    batch = Batch(9, k=k)
    for metric, printed in ((rank, False), (squeezed, None), (whole, True)):
        found = {}
        for backend in ("triton", "torch"):
            objective = hl.Objective(kd=forward_kl, metrics=[metric], backend=backend)
            source, source_t = hl.Logits(batch.logits.clone().requires_grad_()), batch.teacher("ids", torch.float32)
            if backend == "triton" and printed is not None:
                plan = objective.explain(source, batch.targets, teacher=source_t)
                assert plan.launches.startswith("one launch per chunk") == printed, plan.launches
            found[backend] = objective(source, batch.targets, teacher=source_t).metrics[metric.__name__].value
        torch.testing.assert_close(found["triton"], found["torch"], rtol=1e-4, atol=1e-5)


def test_a_plan_on_meta_tensors_has_the_gradient_at_ids():
    ids = torch.empty(8, 5, dtype=torch.long, device="meta")
    source_t = hl.Sparse(ids, torch.empty(8, 5, device="meta"))
    source = hl.Logits(torch.empty(8, 64, device="meta"))
    objective = hl.Objective(kd=forward_kl, backend="triton")
    plan = find(objective, CallArguments(source, torch.empty(8, dtype=torch.long, device="meta"), None, source_t)).plan
    assert {f.name for f in plan.program.cotangents} == {"ids_logprob", "tail_logprob"}


@inside
def test_a_teacher_that_no_term_looks_at_decides_nothing():
    batch = Batch()
    terms = {"a": hl.Term(forward_kl, teacher="a"), "b": hl.Term(jsd, teacher="b", weight=0.0)}
    source_t = {"a": hl.Logits(batch.teacher_logits), "b": hl.Logits(batch.teacher_logits[:, :30])}
    objective = hl.Objective(**terms, backend="triton")
    plan = objective.explain(hl.Logits(batch.logits), batch.targets, teacher=source_t)
    assert plan.launches.startswith("one launch per chunk")


def bessel(logp, logq):
    return torch.special.bessel_j0(logp) * logq.exp()


@inside
def test_a_divergence_that_cannot_be_printed_is_refused():
    """Where this backend was asked for; "auto" takes the torch backend."""
    batch = Batch()
    source = hl.Logits(batch.logits.clone().requires_grad_())
    objective = hl.Objective(kd=bessel, backend="triton")
    for call in (objective, objective.explain):
        with pytest.raises(ValueError, match='backend: "triton" cannot run bessel'):
            call(source, batch.targets, teacher=batch.teacher("Logits", torch.float32))


@inside
@pytest.mark.parametrize("k", [1, 2, 5, 33])
def test_repeated_ids_are_merged_in_one_launch(k):
    from headloss.backends.triton.teachers import merge_repeated
    from headloss.engine.teachers import merge_repeated as plain

    generator = torch.Generator().manual_seed(k)
    ids = torch.randint(-1, 7, (6, k), generator=generator)
    logprobs = torch.randn(6, k, generator=generator)
    logprobs[0], logprobs[1, 0] = -math.inf, -math.inf
    valid = torch.tensor([True, True, False, True, True, True])
    for mask in (None, valid):
        own = ids if mask is None else ids.masked_fill(~mask[:, None], -1)
        want_ids, want = plain(own, logprobs)
        got_ids, got, in_order = merge_repeated(ids, logprobs, mask)
        assert torch.equal(got_ids, want_ids) and torch.equal(in_order, own.sort(-1).values)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    logprobs[2] = torch.nan  # of an ignored row
    assert not merge_repeated(ids, logprobs, valid)[1].isnan().any()


@inside
@pytest.mark.parametrize("wrong", [7, 1 << 40, -2, -(1 << 62)])
def test_an_id_that_is_no_column_is_told_by_the_launch(wrong):
    from headloss.backends.triton.teachers import merge_repeated

    ids, logprobs = torch.randint(-1, 7, (5, 3)), torch.zeros(5, 3)
    valid = torch.tensor([True, True, False, True, True])
    report = torch.full((2,), 99)
    merge_repeated(ids, logprobs, valid, (report, 7))
    ids[2, 1] = wrong  # of an ignored row
    merge_repeated(ids, logprobs, valid, (report, 7))
    assert report.tolist() == [99, 99]
    merge_repeated(ids, logprobs, None, (report, 7))
    assert report.tolist() == [wrong, 99]


@inside
def test_probabilities_are_told_by_the_launch():
    from headloss.backends.triton.teachers import merge_repeated

    ids = torch.tensor([[3, 1, 5, -1], [4, -1, -1, -1], [2, 0, 6, 1]])
    valid, report = torch.tensor([True, True, False]), torch.full((2,), 99)
    logprobs = torch.tensor([[-0.7, 0.2, -3.0, 0.5], [0.5, 0.1, 0.1, 0.1], [0.5, 0.2, 0.2, 0.1]])
    for values in (logprobs, logprobs.abs() + 0.9):  # logarithms; and weights above 1
        merge_repeated(ids, values, valid, (report, 7))
        assert report.tolist() == [99, 99]
    merge_repeated(ids, logprobs, None, (report, 7))
    assert report.tolist() == [99, 4]
    merge_repeated(ids, torch.tensor([[0.6, 0.3, 0.1, 7.0], *logprobs[1:].tolist()]), valid, (report, 7))
    assert report.tolist() == [99, 3]
