"""Random objectives on random problems: against the dense oracle, and against themselves.

Every test draws what an objective is made of (losses, options, weights, reductions, temperatures), what it is run on
(source, shape, vocabulary, extreme values, masks, poison) and how (budget, way, shards, dtype).
"""

from __future__ import annotations

import inspect
import itertools
import math
import random as standard
from importlib import import_module
from typing import Any

import drawn
import oracle
import teaching
import torch
from drawn import RANDOM, memory, problem, tally, way
from hypothesis import given
from torch import Tensor

import headloss as hl
from headloss.facts import CONSTANT, FACTS, Fact, Want, coefficients, finish, merge
from headloss.losses import LOSSES
from headloss.nested import nest
from headloss.teachers import COMPARING, DenseChunk, SparseChunk, teacher_coefficients
from proof import objectives

sweep: Any = import_module("headloss.backends.torch")
STUDENT = tuple(name for name in FACTS if name not in COMPARING)
TIGHT = 1e-8  # in float64, with logits in the thousands


def close(got: Any, want: Any, tolerance: float = TIGHT, what: str = "") -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64) for x in (got, want))
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}")


def check(got: oracle.Answer, want: oracle.Answer, tolerance: float = TIGHT) -> None:
    oracle.check(drawn.spread(got), drawn.spread(want), tolerance)


def example() -> None:
    tally(examples=inspect.stack()[1].function)


# Against the oracle


@given(RANDOM)
def test_any_objective(random: standard.Random) -> None:
    example()
    wanted = drawn.objective(random, most=4)
    p = problem(random, wanted)
    want = oracle.answer(wanted, p)
    check(oracle.run(wanted, p, memory=memory(random, p), how=way(random, wanted, p)), want, TIGHT)


@given(RANDOM)
def test_any_divergence(random: standard.Random) -> None:
    """Several divergences from one teacher, dense or sparse, beside a loss of the student alone."""
    example()
    kind, teacher_source = random.choice(drawn.KINDS), random.choice(("Logits", "Linear", "Sparse"))
    vocab = random.choice((23, 9, 40))
    p = teaching.make(
        kind,
        teacher_source,
        random.choice(((13,), (2, 5), (7,))),
        vocab,
        teacher_vocab=None if teacher_source == "Sparse" else vocab + random.choice((0, 3, -2)),
        transform=drawn.transform(random),
        sharp=random.choice((1.0, 4.0)),
        seed=random.randint(0, 9999),
    )
    tail = random.choice(teaching.TAILS)
    chosen = random.sample(objectives.DIVERGENCES, random.randint(1, 3))
    temperature = random.choice((None, 2.0))
    weights = [round(random.uniform(0.1, 2.0), 2) for _ in chosen]
    tally(losses=chosen, teacher=f"{teacher_source}, {tail}" if teacher_source == "Sparse" else teacher_source)
    terms = {n: hl.Term(LOSSES[n], weight=w, tail=tail, temperature=temperature) for n, w in zip(chosen, weights)}
    out, grads = teaching.run(hl.Objective(**terms), p, rows=random.choice((2, 5, None)))

    def truth(leaves: Any) -> Tensor:
        values = [teaching.values(p, leaves, teaching.FORMULAS[n], {}, tail, temperature) for n in chosen]
        return sum(w * v for w, v in zip(weights, values))  # type: ignore[return-value]

    teaching.check(out, grads, teaching.truth(p, truth), TIGHT)


@given(RANDOM)
def test_low_precision_logits(random: standard.Random) -> None:
    """bf16 and fp16 logits are exact numbers: facts and loss to float32's digits, the gradient rounded once."""
    example()
    dtype = random.choice((torch.bfloat16, torch.float16, torch.float32))
    wanted = drawn.objective(random)
    p = problem(random, wanted, "Logits", plain=True)
    p = oracle.replace(p, tensors={n: x.to(dtype).double() for n, x in p.tensors.items()})
    tally(dtype=dtype)
    drawn.near(oracle.run(wanted, p, dtype=dtype, how=way(random, wanted, p)), oracle.answer(wanted, p), dtype)


SMOOTH = ("cross_entropy", "z_loss", "entropy_bonus", "focal", "dft", "reinforce", "kimi")


@given(RANDOM)
def test_low_precision_linear(random: standard.Random) -> None:
    """The chunk's logits are rounded once, and everything comes from the same rounded logits, whatever the budget."""
    example()
    dtype = random.choice((torch.bfloat16, torch.float16, torch.float32))
    wanted = drawn.objective(random, SMOOTH)
    p = problem(random, wanted, "Linear", plain=True, bad=False, most_ignored=0.5)
    low = {n: x.to(dtype).double() for n, x in p.tensors.items() if n != "bias"}
    p = oracle.replace(p, tensors=low)
    rounded = (low["hidden"] @ low["weight"].T).to(dtype).double()
    of_logits = oracle.answer(wanted, oracle.replace(p, kind="Logits", tensors={"logits": rounded}))
    dz = of_logits.grads["logits"].reshape(-1, p.vocab)
    got = oracle.run(wanted, p, dtype=dtype, memory=memory(random, p))
    tally(dtype=dtype)
    for name, truth in (("hidden", dz @ low["weight"]), ("weight", dz.T @ low["hidden"].reshape(len(dz), -1))):
        grad = got.grads[name].double().reshape(truth.shape)
        error, size = float((grad - truth).norm()), float(truth.norm()) + 1e-3 * float(dz.norm())
        info = torch.finfo(dtype)
        least = info.tiny * info.eps * grad.numel() ** 0.5  # what the dtype cannot tell from 0
        assert error <= (8 * info.eps + 1e-4) * size + least + 1e-6, (name, error, size)


# Invariances


@given(RANDOM)
def test_shift_of_the_logits(random: standard.Random) -> None:
    """A number added to a row's logits changes its lse and its smallest logit, and nothing else."""
    example()
    wanted = drawn.without(random, ("lse",))
    p = problem(random, wanted, "Logits", plain=True)
    shift = 100 * torch.randn(*p.shape, 1, dtype=torch.float64)
    moved = oracle.replace(p, tensors={"logits": p.tensors["logits"] + shift})
    a, b = oracle.run(wanted, p), oracle.run(wanted, moved, how=way(random, wanted, p))
    check(b, a, TIGHT)
    facts = [hl.row_facts(q.source(q.tensors), q.targets, STUDENT) for q in (p, moved)]
    for name in STUDENT:
        moves = torch.where(p.targets == -100, 0, shift[..., 0]) if name in ("lse", "min_logit") else 0
        expected = facts[0][name] + moves
        close(facts[1][name], expected, TIGHT, name)


@given(RANDOM)
def test_order_of_the_vocabulary(random: standard.Random) -> None:
    """Columns in another order: the same loss and metrics, the gradient in that order."""
    example()
    wanted = drawn.objective(random)
    p = problem(random, wanted)
    columns = torch.tensor(random.sample(range(p.vocab), p.vocab))
    a, b = oracle.run(wanted, p), oracle.run(wanted, drawn.permuted(p, columns), memory=memory(random, p))
    grads = {n: g if n in ("hidden",) or n.startswith("input:") else g[..., columns] if n == "logits" else g[columns]
             for n, g in a.grads.items()}  # fmt: skip
    # Of equal logits (a soft cap makes them) the first is the likeliest: which one that is depends on the order.
    of_order = {n for n in a.metrics if n.endswith("accuracy")}
    a, b = (x._replace(metrics={n: m for n, m in x.metrics.items() if n not in of_order}) for x in (a, b))
    check(b, a._replace(grads=grads), TIGHT)


@given(RANDOM)
def test_order_of_the_rows(random: standard.Random) -> None:
    """Rows in another order, with their inputs and segments: the same loss, the gradient in that order."""
    example()
    wanted = drawn.objective(random)
    p = problem(random, wanted, shapes=((23,), (5,), (17,)))
    rows = torch.tensor(random.sample(range(p.shape[0]), p.shape[0]))
    take = lambda n, x: x[rows] if isinstance(x, Tensor) and x.shape[:1] == p.shape and n != "pairs" else x
    other = oracle.replace(
        p,
        tensors={n: take(n, x) if n in ("logits", "hidden") else x for n, x in p.tensors.items()},
        targets=p.targets[rows],
        segments=p.segments.select(rows),
        inputs={n: take(n, x) for n, x in p.inputs.items()},
    )
    a, b = oracle.run(wanted, p), oracle.run(wanted, other, memory=memory(random, p), how=way(random, wanted, p))
    grads = {n: g[rows] if n in ("logits", "hidden") else g for n, g in a.grads.items()}
    check(b, a._replace(grads=grads), TIGHT)


@given(RANDOM)
def test_padding_rows(random: standard.Random) -> None:
    """Ignored rows more, anywhere, with anything in them: nothing changes, and their gradient is a stored 0."""
    example()
    wanted = drawn.objective(random)
    p = problem(random, wanted, shapes=((23,), (5,), (17,)), bad=False)
    N, more = p.shape[0], random.randint(1, 9)
    place = torch.tensor(sorted(random.sample(range(N + more), N)))

    def widened(x: Tensor, fill: float) -> Tensor:
        return x.new_full((N + more, *x.shape[1:]), fill).index_copy(0, place, x)

    fill = lambda: random.choice((math.nan, math.inf, -math.inf, 0.0))
    other = oracle.replace(
        p,
        tensors={n: widened(x, fill()) if n in ("logits", "hidden") else x for n, x in p.tensors.items()},
        targets=widened(p.targets, -100),
        segments=hl.Segments.from_ids(widened(p.segments.ids, random.choice((-1, 3))), p.segments.num_segments),
        inputs={
            n: widened(x, fill()) if isinstance(x, Tensor) and x.shape[:1] == p.shape and n != "pairs" else x
            for n, x in p.inputs.items()
        },
    )
    a = oracle.run(wanted, p)
    b = oracle.run(wanted, other, memory=memory(random, p), how=way(random, wanted, other))
    grads = {n: widened(g, 0.0) if n in ("logits", "hidden") else g for n, g in a.grads.items()}
    check(b, a._replace(grads=grads), TIGHT)


@given(RANDOM)
def test_padding_columns(random: standard.Random) -> None:
    """Columns of -inf more, anywhere: only the mean over the vocabulary knows, and their gradient is 0."""
    example()
    wanted = drawn.without(random, ("mean_logprob",))
    p = problem(random, wanted, plain=True)
    if p.kind == "Linear" and "bias" not in p.tensors:
        p = oracle.replace(p, tensors={**p.tensors, "bias": torch.zeros(p.vocab, dtype=torch.float64)})
    V, more = p.vocab, random.randint(1, 30)
    place = torch.tensor(sorted(random.sample(range(V + more), V)))
    widened = lambda x, dim, fill: x.new_full(
        tuple(V + more if d == dim % x.ndim else n for d, n in enumerate(x.shape)), fill
    ).index_copy(dim, place, x)
    fills = {"logits": (-1, -math.inf), "weight": (0, 0.0), "bias": (0, -math.inf)}
    other = oracle.replace(
        p,
        tensors={n: widened(x, *fills[n]) if n in fills else x for n, x in p.tensors.items()},
        targets=torch.where(p.targets == -100, -100, place[p.targets.clamp(min=0)]),
    )
    a, b = oracle.run(wanted, p), oracle.run(wanted, other, memory=memory(random, other))
    grads = {n: widened(g, fills[n][0], 0.0) if n in fills else g for n, g in a.grads.items()}
    check(b, a._replace(grads=grads), TIGHT)


@given(RANDOM)
def test_any_budget_and_any_way(random: standard.Random) -> None:
    """How much memory a call may take, and how it is run, changes no number."""
    example()
    wanted = drawn.objective(random, most=4)
    p = problem(random, wanted)
    first = oracle.run(wanted, p, memory=memory(random, p), how=way(random, wanted, p))
    for _ in range(2):
        check(oracle.run(wanted, p, memory=memory(random, p), how=way(random, wanted, p)), first, TIGHT)


@given(RANDOM)
def test_any_tile(random: standard.Random) -> None:
    """The torch sweeps walk the rows in tiles of any size, also where one row is left for the last."""
    example()
    wanted = drawn.objective(random)
    p = problem(random, wanted)
    whole = oracle.run(wanted, p)
    before, sweep.TILE_BYTES = sweep.TILE_BYTES, {"cpu": random.choice((1, 2, 3, 4, 5)) * 8 * p.vocab}
    try:
        check(oracle.run(wanted, p, memory=memory(random, p)), whole, TIGHT)
    finally:
        sweep.TILE_BYTES = before


# Splitting


@given(RANDOM)
def test_splits_of_the_batch(random: standard.Random) -> None:
    """Micro-batches with global counts add up to the batch: losses, gradients, metrics."""
    example()
    names = tuple(n for n in objectives.STUDENT if not {"segments", "pairs"} & objectives.asks(LOSSES[n]))
    names = tuple(n for n in names if n not in objectives.WHOLE)
    wanted = drawn.objective(random, names, segments=False)
    wanted = hl.Objective(
        **{
            n: hl.Term(t.fn, weight=t.weight, row_weight=t.row_weight, temperature=t.temperature, **t.options,
                       reduction="token_mean" if t.reduction == "weighted_mean" else t.reduction)
            for n, t in wanted.terms.items()
        },
        metrics=[name for name, _ in wanted.metrics],
        backend="torch",
    )  # fmt: skip
    p = problem(random, wanted, shapes=((23,), (5,), (17,)))
    whole = oracle.run(wanted, p)
    cuts = sorted(random.randint(0, p.shape[0]) for _ in range(random.randint(1, 3)))
    edges = [0, *cuts, p.shape[0]]
    counts, meter, loss = hl.count(p.targets), hl.Meter(), 0.0
    leaves = p.leaves()
    for a, b in itertools.pairwise(edges):
        part = {n: x[a:b] if n in ("logits", "hidden") else x for n, x in leaves.items()}
        inputs = {n: x[a:b] for n, x in p.inputs.items()}
        source = p.source(part, memory=memory(random, p))
        out = wanted(source, p.targets[a:b], num_items=counts.num_items, **inputs)
        out.loss.backward()
        loss += float(out.loss.detach())
        meter.add(out.metrics)
    close(loss, whole.loss, TIGHT, "loss")
    for name, x in leaves.items():
        close(x.grad, whole.grads[name], TIGHT, name)
    found = meter.compute()
    assert found.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        close(found[name], value, TIGHT, name)


@given(RANDOM)
def test_splits_at_segments(random: standard.Random) -> None:
    """The same where micro-batches hold whole segments, for segment losses and reductions."""
    example()
    names = tuple(n for n in objectives.STUDENT if not {*objectives.OF_SEGMENTS} & objectives.asks(LOSSES[n]))
    names = tuple(n for n in names if n not in objectives.WHOLE)
    wanted = objectives.objective(random, names, row_weight=False, backend="torch")
    if any(t.reduction == "weighted_mean" for t in wanted.terms.values()):
        return
    p = problem(random, wanted, shapes=((23,), (17,)))
    whole = oracle.run(wanted, p)
    counts, ids = hl.count(p.targets, p.segments), p.segments.ids
    first = set(random.sample(range(p.segments.num_segments), 3))
    here = torch.tensor([int(i) in first for i in ids])
    leaves = p.leaves()
    for mask in (here, ~here):
        rows = mask.nonzero()[:, 0]
        part = {n: x[rows] if n in ("logits", "hidden") else x for n, x in leaves.items()}
        inputs = {n: x[rows] for n, x in p.inputs.items()}
        source = p.source(part, memory=memory(random, p))
        wanted(source, p.targets[rows], segments=p.segments.select(rows), **counts, **inputs).loss.backward()
    for name, x in leaves.items():
        close(x.grad, whole.grads[name], TIGHT, name)


@given(RANDOM)
def test_splits_of_the_vocabulary(random: standard.Random) -> None:
    """Each part swept alone, the partials merged in any grouping, the gradients written apart: every fact at two
    temperatures, of the student and of a dense and a sparse teacher, under random cotangents."""
    example()
    torch.manual_seed(random.randint(0, 9999))
    N, V, K = random.choice((3, 1, 8)), random.choice((11, 1, 2, 29, 64)), random.choice((1, 4))
    spread, cap = random.choice((1.0, 30.0)), random.choice((None, 5.0))
    randn = lambda *size: spread * torch.randn(*size, dtype=torch.float64)
    z_NV, u_NV = randn(N, V) + random.choice((0.0, -900.0)) * (cap is None), randn(N, V)
    holes = random.random() < 0.3 and V > 4
    if holes:
        z_NV[:, : V // 2] = -math.inf
    targets_N = torch.randint(V // 2 if holes else 0, V, (N,))
    ids_NK = torch.stack([torch.randperm(max(V, K))[:K] for _ in range(N)])
    ids_NK = torch.where(ids_NK < V, ids_NK, -1)
    if holes:
        ids_NK = torch.where(ids_NK < V // 2, -1, ids_NK)
    student = [n for n in STUDENT if not (holes and n == "mean_logprob")]
    wanted = [Fact(n, T) for n in student for T in (None, 2.5)]
    wanted += [Fact(n, T, "dense") for n in ("teacher_cross_entropy", "reverse_cross_entropy", "shared_entropy",
               "teacher_entropy") for T in (None, 2.5) if not (holes and n == "teacher_cross_entropy")]  # fmt: skip
    wanted += [Fact(n, None, "sparse") for n in ("ids_logprob", "tail_logprob")]
    want, own = Want(wanted), round(random.uniform(0.5, 2.0), 2)
    temperatures = [own if T is None else T for T in want.temperatures]
    paired = [
        [(own if T is None else T, 1.0 if T is None else T) for T in want.temperatures_of(n)] for n in want.teachers
    ]
    cuts = sorted(random.randint(0, V) for _ in range(random.randint(0, 4)))
    torch.manual_seed(7)
    grads: dict[Fact, Tensor] = {}

    def run(cuts: list[int], nested: bool) -> tuple[dict[Fact, Tensor], Tensor]:
        edges = [0, *cuts, V]
        spans = list(itertools.pairwise(edges))
        chunks = [
            [
                DenseChunk(u_NV[:, a:b], 1.0, None, tuple(t for _, t in paired[want.teachers.index("dense")]), b - a)
                if name == "dense"
                else SparseChunk(ids_NK)
                for name in want.teachers
            ]
            for a, b in spans
        ]
        parts = [
            sweep.sums(z_NV[:, a:b], targets_N, want, temperatures, softcap=cap, start=a, teachers=chunk)
            for (a, b), chunk in zip(spans, chunks)
        ]
        stack = lambda parts: nest(parts[0], lambda *xs: torch.stack(xs), *parts[1:])
        if nested and len(parts) > 2:
            parts = [parts[0], merge(stack(parts[1:]), temperatures, paired)]
        facts, softmax = finish(merge(stack(parts), temperatures, paired), want, temperatures, V)
        if not grads:
            grads.update({f: torch.randn_like(x) for f, x in facts.items() if f.name not in CONSTANT})
        held = {f: g.masked_fill(ids_NK < 0, 0.0) if g.ndim > 1 else g for f, g in grads.items()}
        held |= {f: g.masked_fill(facts[f] == -math.inf, 0.0) for f, g in held.items()}
        more = {
            "teacher_pulls": [
                teacher_coefficients(
                    seen, want.temperatures_of(n), [f for f in want.facts if f.teacher == n], facts, held
                )
                for n, seen in zip(want.teachers, softmax.teachers)
            ],
            "teacher_temperatures": [[T for T, _ in pairs] for pairs in paired],
        }
        out_NV = torch.full_like(z_NV, math.nan)
        pulls = coefficients(facts, held, want, V)
        for (a, b), chunk in zip(spans, chunks):
            into = torch.full_like(z_NV[:, a:b], math.nan)
            sweep.pull(
                z_NV[:, a:b],
                targets_N,
                softmax,
                pulls,
                temperatures,
                into,
                softcap=cap,
                start=a,
                teachers=chunk,
                **more,
            )
            out_NV[:, a:b] = into
        return facts, out_NV

    whole, split = run([], False), run(cuts, random.random() < 0.5)
    tally(shards=len(cuts) + 1)
    for fact, x in whole[0].items():
        close(split[0][fact], x, 1e-7, str(fact))
    scale = float(whole[1].abs().amax()) + 1.0
    close(split[1] / scale, whole[1] / scale, 1e-7, "gradient")


# Metamorphic relations


@given(RANDOM)
def test_terms_are_linear(random: standard.Random) -> None:
    """The gradient of a sum of terms is the sum of theirs; a weight multiplies; a weight of 0 is no term at all."""
    example()
    wanted = drawn.objective(random, most=3, metrics=())
    p = problem(random, wanted)
    whole = oracle.run(wanted, p, memory=memory(random, p))
    factor = random.choice((2.0, 0.3, -1.7, 1e3))
    total, loss = {n: torch.zeros_like(g) for n, g in whole.grads.items()}, 0.0
    for name, t in wanted.terms.items():
        alone = hl.Objective(**{name: t}, backend="torch")
        own = oracle.replace(p, inputs={n: x for n, x in p.inputs.items() if n in objectives.inputs_wanted(alone)})
        found = oracle.run(alone, own, memory=memory(random, p))
        scaled = oracle.run(alone, own, weights={name: factor * t.weight}, memory=memory(random, p))
        close(scaled.loss, factor * found.loss, TIGHT, "a weight")
        for n, g in found.grads.items():
            close(scaled.grads[n], factor * g, TIGHT, f"{n} under a weight")
            total[n] += g
        loss += float(found.loss)
        close(whole.terms[name], found.terms[name], TIGHT, f"term {name}")
    close(loss, whole.loss, TIGHT, "loss")
    for n, g in total.items():
        close(whole.grads[n], g, TIGHT, f"gradient of {n}")
    off = oracle.run(wanted, p, weights=dict.fromkeys(list(wanted.terms)[1:], 0.0))
    first = next(iter(wanted.terms))
    close(off.loss, wanted.terms[first].weight * whole.terms[first], TIGHT, "terms that are off")


@given(RANDOM)
def test_scales_of_the_gradient(random: standard.Random) -> None:
    """grad_scale, an upstream factor and a second backward each multiply the gradient, and nothing else."""
    example()
    wanted = drawn.objective(random)
    p = problem(random, wanted)
    plain, factor = oracle.run(wanted, p), round(random.uniform(0.1, 50.0), 2)
    scaled = oracle.run(wanted, p, grad_scale=factor, memory=memory(random, p), how=way(random, wanted, p))
    check(scaled, plain._replace(grads={n: factor * g for n, g in plain.grads.items()}), TIGHT)
    leaves = p.leaves()
    out = wanted(p.source(leaves), p.targets, segments=p.segments, **oracle.call_arguments(p))
    (factor * out.loss).backward(retain_graph=True)
    out.loss.backward()
    for n, x in leaves.items():
        close(x.grad, (factor + 1) * plain.grads[n], TIGHT, n)


@given(RANDOM)
def test_transforms_of_the_logits(random: standard.Random) -> None:
    """scale and temperature are what one would have done to the logits by hand."""
    example()
    wanted = drawn.objective(random)
    if any(t.temperature is not None for t in wanted.terms.values()):
        return
    p = problem(random, wanted, "Logits", plain=True)
    scale, T = random.choice((0.25, -0.5, 3.0)), random.choice((0.5, 2.0, 1.3))
    by_us = oracle.run(wanted, oracle.replace(p, transform={"scale": scale, "temperature": T}))
    by_hand = oracle.run(wanted, oracle.replace(p, tensors={"logits": p.tensors["logits"] * scale / T}))
    grads = {n: g * scale / T if n == "logits" else g for n, g in by_hand.grads.items()}
    check(by_us, by_hand._replace(grads=grads), TIGHT)
