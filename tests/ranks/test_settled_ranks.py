"""Row and segment programs over a sharded vocabulary: settled in one launch after the collective, under Triton's
interpreter, against the dense oracle in float64."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from interpreting import inside, interpreted, quicken
from spawn import Calls
from test_shards import V, cut, shard_of, whole_grads

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, focal, grpo, gspo, z_loss

pytest.importorskip("triton")
test_under_the_interpreter = interpreted(__file__)

ROWS = "one launch for the facts, one that settles the rows, one for the gradient"
SEGMENTS = ROWS.replace("rows", "segments")
WIDE = torch.linspace(0.5, 1.5, 23)


def terms_of(name: str) -> dict[str, Any]:
    everything = lambda max_logprob, sum_p2, entropy, mean_logprob: (
        sum_p2 * entropy - mean_logprob + max_logprob.detach()
    )
    many = ["entropy", "accuracy", "argmax"]
    return {
        "facts": {"ce": hl.Term(cross_entropy, label_smoothing=0.1), "all": hl.Term(everything), "metrics": many},
        "temperatures": {"ce": cross_entropy, "warm": hl.Term(entropy_bonus, temperature=2.0, weight=0.3)},
        "reductions": {
            "rl": hl.Term(grpo, reduction="seq_mean_token_mean"),
            "z": hl.Term(z_loss, weight=1e-2, reduction="token_sum"),
            "f": hl.Term(focal, reduction="weighted_mean", row_weight="token_weight"),
            "metrics": ["entropy"],
        },
        "segments": {"rl": hl.Term(gspo, reduction="seq_mean_token_mean"), "z": hl.Term(z_loss, weight=1e-2)},
    }[name]


class Kernels:
    """Counts launches, by the kernel's name."""

    def __enter__(self) -> Counter[str]:
        from headloss.backends.triton.launch import Launch

        self.kept, seen = Launch.run, Counter[str]()

        def run(launch: Any, *arguments: Any) -> None:
            seen[launch.kernel.__name__] += 1
            self.kept(launch, *arguments)

        Launch.run = run  # type: ignore[method-assign]
        return seen

    def __exit__(self, *_: object) -> None:
        from headloss.backends.triton.launch import Launch

        Launch.run = self.kept  # type: ignore[method-assign]


def problem_of(name: str, kind: str, split: str) -> oracle.Problem:
    fns = [t.fn if isinstance(t, hl.Term) else t for n, t in terms_of(name).items() if n != "metrics"]
    inputs = (*oracle.inputs_of(*fns), *(["token_weight"] if name == "reductions" else []))
    peaked = split == "uneven"  # of two that a softcap makes equal in float32, float64 may know the larger
    transform: dict[str, Any] = {"temperature": WIDE} if name == "temperatures" else {"scale": 0.7}
    transform |= {} if peaked else {"softcap": 5.0}
    problem = oracle.make(kind, (23,), V, transform=transform, inputs=inputs, peaked=peaked)
    narrow = lambda x: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
    tensors = {n: x.float().double() for n, x in problem.tensors.items()}
    return oracle.replace(problem, tensors=tensors, inputs={n: narrow(x) for n, x in problem.inputs.items()})


def small() -> None:
    """Runs and segments of several blocks."""
    quicken()
    from headloss.backends.triton import settle

    if settle.BLOCK != 4:
        settle.BLOCK, settle._spec_of = 4, settle.by_identity(settle._spec_of.__wrapped__)  # type: ignore[misc]


def settled(name: str, split: str) -> None:
    small()
    objective = hl.Objective(**terms_of(name), backend="triton")
    for kind in ("Logits", "Linear"):
        problem = problem_of(name, kind, split)
        mine, shard, width = cut(problem, split)
        want, rows = oracle.answer(objective, problem), 9 if name == "segments" else 5
        memory = 2 * 4 * shard.even_width * rows if kind == "Linear" and split != "empty first" else None
        how = "forward_backward" if split == "padded" else "autograd"
        source = problem.source(mine.leaves(torch.float32), shard=shard, **({"memory": memory} if memory else {}))
        call = {"segments": problem.segments, **oracle.call_arguments(mine)}
        said = objective.explain(source, problem.targets, **call)
        assert said.launches == (SEGMENTS if name == "segments" else ROWS), said.launches
        with Kernels() as seen, Calls() as calls:
            got = oracle.run(objective, mine, memory=memory, how=how, dtype=torch.float32, source={"shard": shard})
        oracle.check(whole_grads(got, split), want, 5e-5, what=f"{name}, {kind}, {split}")
        chunks = said.chunks if name != "segments" or kind == "Logits" else seen["settle_kernel"]
        assert seen["settle_kernel"] == chunks == calls.count["all_gather"], (seen, said.chunks, calls.count)
        assert not memory or chunks > 1
        assert seen["sums_kernel"] == (chunks if shard.columns(width) else 0) and seen["totals_kernel"] == 1, seen


@inside
@pytest.mark.parametrize("split", ["even", "uneven", "empty first", "padded"])
@pytest.mark.parametrize("name", ["facts", "temperatures", "reductions", "segments"])
def test_settled_in_one_launch_after_the_collective(ranks: Any, name: str, split: str) -> None:
    ranks(2, settled, name, split)


@inside
def test_on_four_ranks_two_of_which_hold_padding(ranks: Any) -> None:
    ranks(4, settled, "facts", "four padded")


def extremes() -> None:
    """Equal maxima on two ranks, a shard of -inf, and a row of -inf."""
    small()
    shard, mine = shard_of("even")
    logits = torch.randn(6, V + 1)
    logits[0, [3, 30]] = 9.0
    logits[1, 19:] = logits[2, :19] = logits[3] = -math.inf
    targets = torch.tensor([3, 4, 25, 7, -100, 36])
    objective = hl.Objective(ce=lambda logprob, lse: -logprob + lse, metrics=["argmax", "accuracy"], backend="triton")
    x = logits[:, mine].clone().requires_grad_()
    source = hl.Logits(x, shard=shard)
    keep = torch.tensor([0, 1, 2, 4, 5])
    out = objective(source, targets)
    assert out.facts.argmax[[0, 1, 2]].tolist() == [3, int(logits[1, :19].argmax()), 19 + int(logits[2, 19:V].argmax())]
    assert out.facts.argmax[3] == 0 and out.facts.argmax[4] == 0
    y = logits[keep, :V].double().requires_grad_()
    log_p, at = y.log_softmax(-1), targets[keep].clamp(min=0)
    counted = torch.tensor([True, True, True, False, True])
    loss = (y.logsumexp(-1) - log_p.gather(1, at[:, None])[:, 0])[counted].sum()
    loss.backward()
    x.grad = None
    out = hl.Objective(ce=hl.Term(lambda logprob, lse: -logprob + lse, reduction="token_sum"), backend="triton")(
        hl.Logits(x, shard=shard), targets.masked_fill(torch.arange(6) == 3, -100)
    )
    out.loss.backward()
    torch.testing.assert_close(out.loss.double(), loss, rtol=1e-5, atol=1e-5)
    whole = torch.cat([y.grad, torch.zeros(5, 1).double()], 1)[:, mine]
    torch.testing.assert_close(x.grad[keep].double(), whole, rtol=1e-5, atol=1e-5)


@inside
def test_equal_maxima_and_rows_of_minus_infinity(ranks: Any) -> None:
    ranks(2, extremes)


def evaluated() -> None:
    """Without a gradient the sums of all chunks travel together, and are settled together."""
    small()
    problem = problem_of("facts", "Linear", "even")
    objective = hl.Objective(**terms_of("facts"), backend="triton")
    mine, shard, _ = cut(problem, "even")
    source = problem.source(mine.leaves(torch.float32), shard=shard, memory=2 * 4 * shard.even_width * 5)
    with torch.no_grad(), Kernels() as seen, Calls() as calls:
        out = objective(source, problem.targets, segments=problem.segments, **oracle.call_arguments(mine))
    assert seen["settle_kernel"] == calls.count["all_gather"] == 1 < seen["sums_kernel"], (seen, calls.count)
    want = oracle.answer(objective, problem)
    oracle.check(oracle.Answer(out.loss, out.terms, {n: float(m) for n, m in out.metrics.items()}, {}), want, 5e-5)


@inside
def test_without_a_gradient_there_is_one_collective(ranks: Any) -> None:
    ranks(2, evaluated)


def halves() -> None:
    """float16 gradients are written at order 1, and scaled in float32."""
    small()
    generator = torch.Generator().manual_seed(4)
    shard, mine = shard_of("even")
    targets, logits = torch.arange(6), torch.randn(6, V + 1, generator=generator).half()
    hidden, weight = (torch.randn(n, 8, generator=generator).half() for n in (6, V + 1))
    dense = lambda z: z[:, :V].log_softmax(-1)[torch.arange(6), targets].sum() * -(2**16 / 1e6)
    apart = hl.Objective(ce=cross_entropy, backend="triton")
    meeting = hl.Objective(ce=lambda logprob, segments: -segments.mean(logprob), backend="triton")
    ids = hl.Segments.from_ids(torch.tensor([0, 0, 0, 1, 1, 1]))
    for kind, objective in itertools.product(("Logits", "Linear"), (apart, meeting)):
        call = {} if objective is apart else {"segments": ids}  # of equal lengths, which change nothing
        raw = [logits] if kind == "Logits" else [hidden, weight]
        whole = [x.double().requires_grad_() for x in raw]
        dense(whole[0] if kind == "Logits" else whole[0] @ whole[1].T).backward()
        cut_ = lambda x: x[:, mine] if kind == "Logits" else x[mine] if len(x) > 6 else x
        leaves = [cut_(x).clone().requires_grad_() for x in raw]
        more = {} if kind == "Logits" else {"memory": 2 * 4 * 19 * 3}
        source = getattr(hl, kind)(*leaves, shard=shard, **more)
        assert objective.explain(source, targets, **call).launches == (ROWS if objective is apart else SEGMENTS)
        (objective(source, targets, **call, num_items=10**6).loss * 2**16).backward()
        for x, y in zip(leaves, whole, strict=True):
            torch.testing.assert_close(x.grad.double(), cut_(y.grad), rtol=4e-3, atol=2e-4)


@inside
def test_float16_is_scaled_when_the_loss_scale_is_known(ranks: Any) -> None:
    ranks(2, halves)


def wrong_targets() -> str:
    """Ranks that count different rows hear of it, whatever the program makes of the numbers."""
    small()
    shard, mine = shard_of("even")
    targets = torch.arange(6)
    if dist.get_rank():
        targets[2] = -100
    logits = torch.randn(6, V + 1)[:, mine].clone().requires_grad_()
    try:
        hl.Objective(ce=cross_entropy, backend="triton")(hl.Logits(logits, shard=shard), targets)
    except ValueError as error:
        return str(error)
    return ""


@inside
def test_ranks_that_differ_are_refused(ranks: Any) -> None:
    for said in ranks(2, wrong_targets):
        assert "targets: they differ" in said


def refused() -> None:
    """One rank has more chunks than the other: both hear of it, and the next call finds no collective of that one."""
    small()
    shard, mine = shard_of("even")
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(9, 4), torch.randn(V + 1, 4)[mine].contiguous(), torch.arange(9)
    objective, found = hl.Objective(ce=cross_entropy, backend="triton"), []
    for rows in (3, 9 if dist.get_rank() else 3, 3):
        source = hl.Linear(hidden.clone().requires_grad_(), weight, shard=shard, memory=rows * 2 * 4 * shard.even_width)
        try:
            found.append(float(objective(source, targets).loss.detach()))
        except ValueError as error:
            found.append(str(error))
    assert "differ between ranks" in str(found[1]) and found[0] == found[2], found


@inside
def test_a_call_after_a_refusal(ranks: Any) -> None:
    ranks(2, refused)


def left_out() -> str:
    """What leaves the program, and why."""
    shard, mine = shard_of("even")
    targets, logits = torch.arange(6), torch.randn(6, V + 1)[:, mine].clone().requires_grad_()
    source, teacher = hl.Logits(logits, shard=shard), hl.Sparse(torch.zeros(6, 1).long(), torch.zeros(6, 1))
    return hl.Objective(kd=hl.losses.jsd, backend="triton").explain(source, targets, teacher=teacher).launches


@inside
def test_what_leaves_the_program_says_why(ranks: Any) -> None:
    assert "a teacher of some ids, or of a larger vocabulary, is settled in the sweep" in ranks(2, left_out)[0]


def teacher_source(split: str) -> None:
    """Dense teachers in the student's shards, of rows alone and next to segments; without a gradient too.

    Two of them, one with a divergence that takes a second read.
    """
    small()
    terms = {"f": hl.Term(hl.losses.forward_kl, teacher="a"), "j": hl.Term(hl.losses.jsd, teacher="b", weight=0.6)}
    terms |= {"r": hl.Term(hl.losses.reverse_kl, teacher="a", temperature=2.0, weight=0.3)}
    terms |= {"ce": hl.Term(cross_entropy, label_smoothing=0.1)}
    shard, columns = shard_of(split)
    generator = torch.Generator().manual_seed(3)
    said = {name: torch.randn(23, V, generator=generator).double() for name in "ab"}
    padding = torch.full((23, columns.stop), torch.nan).double()
    theirs = {name: torch.cat([x, padding], 1)[:, columns].float() for name, x in said.items()}
    for kind, name in itertools.product(("Logits", "Linear"), ("facts", "segments")):
        more = {"rl": terms_of("segments")["rl"]} if name == "segments" else {}
        objective = hl.Objective(**terms, **more, metrics=["entropy", "argmax"], backend="triton")
        problem = problem_of(name, kind, split)
        true = hl.Objective(**terms, **more, metrics=["entropy", "argmax"], backend="torch")
        want = oracle.run(true, problem, teacher={n: hl.Logits(x.float().double()) for n, x in said.items()})
        mine, shard, _ = cut(problem, split)
        memory = 2 * 4 * 2 * shard.even_width * 11 if kind == "Linear" else None
        teacher = {n: hl.Logits(x, shard=shard) for n, x in theirs.items()}
        call = {"teacher": teacher, "source": {"shard": shard}, "memory": memory}
        with Kernels() as seen:
            got = oracle.run(objective, mine, dtype=torch.float32, **call)
        oracle.check(whole_grads(got, split), want, 5e-5, what=f"{name}, {kind}, {split}")
        assert seen["settle_kernel"] >= 1 == seen["totals_kernel"], seen
        if kind == "Logits":
            source = problem.source(mine.leaves(torch.float32), shard=shard)
            with torch.no_grad(), Calls() as calls:
                inputs = {"segments": problem.segments, **oracle.call_arguments(mine)}
                out = objective(source, problem.targets, teacher=call["teacher"], **inputs)
            torch.testing.assert_close(out.loss.double(), want.loss, rtol=5e-5, atol=5e-5)
            assert calls.count["all_gather"] == calls.count["all_reduce"] == 1


@inside
@pytest.mark.parametrize("split", ["even", "uneven", "empty first", "padded"])
def test_dense_teachers_are_settled_after_the_merge(ranks: Any, split: str) -> None:
    ranks(2, teacher_source, split)
