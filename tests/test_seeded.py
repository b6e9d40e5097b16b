"""What seeded faults showed missing; see `proof/faults.py`."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import headloss as hl
from headloss import meter, metrics, reductions
from headloss.losses import cross_entropy, reinforce
from headloss.parallel.shard import VocabShard, check_notes, note_of
from headloss.rows import bind_rows
from headloss.segments import Segments


def test_a_tensor_made_in_a_loss_belongs_to_its_rows() -> None:
    """One weight for each of seven rows, written in the loss: such a loss cannot be cut into chunks."""

    def weighted(logprob):
        return -logprob * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], dtype=logprob.dtype)

    torch.manual_seed(0)
    hidden = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 3, dtype=torch.float64)
    targets = torch.randint(11, (7,))
    source = hl.Linear(hidden, weight, memory=3 * 11 * 8)
    objective = hl.Objective(mine=weighted)
    assert objective.explain(source, targets).terms[0].kind == "batch"
    logp = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    want = (-logp * torch.arange(1.0, 8.0)).mean()
    got = objective(source, targets).loss
    torch.testing.assert_close(got, want)
    (a,), (b,) = torch.autograd.grad(got, hidden), torch.autograd.grad(want, hidden)
    torch.testing.assert_close(a, b)


def test_padding_ids_count_for_nothing() -> None:
    """Also in a divergence of one's own that is not 0 where both probabilities are 1."""

    def teacher_mass(logp, logq):
        return logq.exp() + 0 * logp

    logits = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 4, -1], [2, -1, -1], [0, 7, 8]])
    probabilities = torch.tensor([[0.5, 0.2, 0.9], [0.3, 0.9, 0.9], [0.1, 0.2, 0.3]], dtype=torch.float64)
    out = hl.Objective(mass=hl.Term(teacher_mass, tail="none", reduction="token_sum"))(
        hl.Logits(logits), torch.zeros(3, dtype=torch.long), teacher=hl.Sparse(ids, probabilities.log())
    )
    assert math.isclose(float(out.loss.detach()), 0.5 + 0.2 + 0.3 + 0.1 + 0.2 + 0.3)


def test_aligned_chunks_keep_the_budget() -> None:
    """Whole segments, never more rows than asked for, every row once."""
    lengths = (3, 1, 4, 1, 5, 2, 6, 5, 3)
    ids = torch.repeat_interleave(torch.arange(9), torch.tensor(lengths))
    targets = torch.zeros(len(ids), dtype=torch.long)
    rows = bind_rows((len(ids),), targets, hl.Segments.from_ids(ids), vocab=2, device=targets.device)
    for most in (6, 7, 9, 30):
        runs = rows.aligned(most)
        assert runs is not None
        assert [i for part, _ in runs for i in range(part.start, part.stop)] == list(range(len(ids)))
        for part, span in runs:
            assert part.stop - part.start <= most
            assert set(ids[part].tolist()) == set(range(span.start, span.stop))
    assert rows.aligned(5) is None  # a segment has six


def test_shards_are_as_wide_as_the_widest(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = object.__new__(VocabShard)
    for name, value in (("vocab", 10), ("width", None), ("start", 9)):
        object.__setattr__(shard, name, value)
    monkeypatch.setattr(VocabShard, "size", 3)
    assert shard.even_width == 4 and shard.columns(4) == 1


def noted(
    start: int,
    columns: int,
    targets: list[int],
    ids: list[int] | None = None,
    call: str = "",
    near: tuple[float, ...] = (0.7, 1024.0, -0.3, 0.0, 0.0),
) -> torch.Tensor:
    """What a rank with these columns says to the others, as float32 carries it."""
    shard = object.__new__(VocabShard)
    object.__setattr__(shard, "start", start)
    same: dict[str, list[torch.Tensor]] = {name: [] for name in ("targets", "segments", "support", "teacher", "inputs")}
    same |= {"targets": [torch.tensor(targets)], "teacher": [torch.tensor(ids or [])]}
    return note_of(shard, columns, same, (call, "terms"), near).float()


def test_notes_of_ranks_are_compared() -> None:
    rows, large = [3, 1, 2, -100], 1 << 40  # beyond what a float32 holds
    check_notes(torch.stack([noted(0, 4, rows), noted(4, 4, rows), noted(8, 2, rows)]), 10)
    check_notes(torch.stack([noted(0, large + 1, rows), noted(large + 1, 1, rows), noted(7, 0, rows)]), large + 2)
    for other, message in (
        (noted(4, 3, rows), "each of the 10 columns"),  # a column on no rank
        (noted(3, 4, rows), "each of the 10 columns"),  # one on two ranks, one on none
        (noted(4, 4, [3, 2, 1, -100]), "targets: they differ"),
        (noted(4, 4, [2, 3, 1, -100]), "targets: they differ"),  # 1 * 3 + 2 * 1 + 3 * 2 = 1 * 2 + 2 * 3 + 3 * 1
        (noted(4, 4, [3, 1, -100, 2]), "targets: they differ"),
        (noted(4, 4, rows, [5]), "teacher: the ids"),
        (noted(4, 4, rows, call="other"), "source: its dtype"),
        (noted(4, 4, rows, near=(0.8, 1024.0, -0.3, 0.0, 0.0)), "temperature: not the same"),
        (noted(4, 4, rows, near=(0.7, 2048.0, -0.3, 0.0, 0.0)), "grad_scale: not the same"),
        (noted(4, 4, rows, near=(0.7, 1024.0, 0.3, 0.0, 0.0)), "weights: not the same"),
        (noted(4, 4, rows, near=(0.7, 1024.0, -0.3, 7.0, 0.0)), "num_items: not the same"),
    ):
        with pytest.raises(ValueError, match=message):
            check_notes(torch.stack([noted(0, 4, rows), other, noted(8, 2, rows)]), 10)
    made_anew = noted(4, 4, rows, near=(0.7 + 1e-7, 1024.0, -0.3 - 1e-7, 0.0, 0.0))
    check_notes(torch.stack([noted(0, 4, rows), made_anew, noted(8, 2, rows)]), 10)
    with pytest.raises(ValueError, match="the ranks hold 0 to 4, 4 to 8, 8 to 9;"):  # the last column on no rank
        check_notes(torch.stack([noted(0, 4, rows), noted(4, 4, rows), noted(8, 1, rows)]), 10)
    with pytest.raises(ValueError, match="the ranks hold 8 to 10, 4 to 8, 0 to 4; shards must be in the order"):
        check_notes(torch.stack([noted(8, 2, rows), noted(4, 4, rows), noted(0, 4, rows)]), 10)


def test_every_permutation_and_exchange_changes_a_digest() -> None:
    """All arrangements of a few values, near and far, each with a note of its own."""
    for values in ([0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, -100], [1, 2, 4, 8, 16, 32], [-100, 7, 1 << 30, 5, 3, 2]):
        arranged = set(itertools.permutations(values))
        digests = {tuple(noted(0, 1, list(x)).tolist()) for x in arranged}
        assert len(digests) == len(arranged)
    torch.manual_seed(0)
    many = torch.randint(50000, (4096,)).tolist()
    for _ in range(200):  # two rows exchanged
        j, k = (int(x) for x in torch.randint(len(many), (2,)))
        other = list(many)
        other[j], other[k] = other[k], other[j]
        assert other == many or not torch.equal(noted(0, 1, other), noted(0, 1, many)), (j, k)
    moved = [0] * 64
    placed = {tuple(noted(0, 1, [*moved[:i], 1, *moved[i:]]).tolist()) for i in range(64)}
    assert len(placed) == 64


def test_a_segment_on_two_ranks_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Context parallelism inside data parallelism: two ranks hold three segments between them, one of them both."""
    held = (torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2]))
    counted = torch.tensor([2, 2, 2])
    context, data = (torch.distributed.ProcessGroup(0, size) for size in (2, 4))
    total = 0
    for rank, ids in enumerate(held):
        monkeypatch.setattr(Segments, "counts_here", property(lambda _, rank=rank: rank == 0))
        monkeypatch.setattr(reductions, "sum_counts", lambda rows_S, tokens, group: (counted, tokens))
        monkeypatch.setattr(reductions, "group_sum", lambda x, group: x)
        monkeypatch.setattr(reductions, "_ranks", lambda group: [0, 1] if group is context else [0, 1, 2, 3])
        found = reductions.count(torch.zeros(3, dtype=torch.long), Segments(ids, 3, group=context), data)
        assert found.num_items == 3 and found.num_segments is not None
        total += int(found.num_segments)
    assert total == 3


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_a_loss_on_facts_that_the_loss_uses_too(kind: str) -> None:
    """Both pull on the same fact, and the pulls add up."""
    torch.manual_seed(0)
    leaf = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    weight, targets = torch.randn(11, 7, dtype=torch.float64), torch.randint(11, (5,))
    z = leaf @ weight.T
    out = hl.Objective(ce=cross_entropy)(hl.Logits(z) if kind == "Logits" else hl.Linear(leaf, weight), targets)
    (got,) = torch.autograd.grad(out.loss + out.facts.logprob.square().sum(), leaf)
    logp = (leaf @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    (want,) = torch.autograd.grad(logp.square().sum() - logp.mean(), leaf)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
def test_inputs_hear_the_upstream_gradient(kind: str) -> None:
    leaf, weight = torch.randn(5, 7, requires_grad=True), torch.randn(11, 7)
    targets, advantage = torch.randint(11, (5,)), torch.randn(5, requires_grad=True)
    source = hl.Logits(leaf @ weight.T) if kind == "Logits" else hl.Linear(leaf, weight)
    out = hl.Objective(pg=reinforce)(source, targets, advantage=advantage)
    (3 * out.loss).backward()
    torch.testing.assert_close(advantage.grad, -3 * out.facts.logprob.detach() / 5)


def test_fp16_gradients_are_rescaled_in_float32() -> None:
    """An upstream factor that float16 cannot hold, on gradients that it can."""
    torch.manual_seed(0)
    hidden, weight = (1e-3 * torch.randn(*size) for size in ((9, 5), (11, 5)))
    targets = torch.randint(11, (9,))
    grads = []
    for dtype in (torch.float16, torch.float64):
        h, w = (x.half().to(dtype).requires_grad_() for x in (hidden, weight))
        out = hl.Objective(ce=cross_entropy)(hl.Linear(h, w, memory=4 * 11 * dtype.itemsize), targets)
        (1e7 * out.loss).backward()
        grads.append((h.grad, w.grad))
    for low, exact in zip(*grads, strict=True):
        assert low.isfinite().all()
        assert (low.double() - exact).norm() < 5e-3 * exact.norm()


def test_weighted_mean_without_weights_passes_over_ignored_rows() -> None:
    """Where ignored rows are masked and not dropped, they weigh nothing."""
    logits, targets = torch.randn(6, 9, dtype=torch.float64), torch.tensor([1, -100, 3, -100, 5, 6])
    objective = hl.Objective(ce=hl.Term(cross_entropy, reduction="weighted_mean"))
    want = torch.nn.functional.cross_entropy(logits, targets)
    for host_read in (True, False):
        torch.testing.assert_close(objective(hl.Logits(logits), targets, host_read=host_read).loss, want)


def test_sample_sizes_of_ranks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """(sum w)^2 / sum w^2 over all ranks: a mean of sums would halve it."""
    mine, theirs = torch.rand(5, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    name = "rl/effective_sample_size"
    other = metrics.Metric.of(name, theirs, None, "token").parts

    def gather(out, packed, group):
        out[0], out[1] = packed, packed
        out[1, 1 : 1 + len(other)] = torch.stack(other)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(meter, "all_gather", gather)
    whole = hl.Meter().add({name: metrics.Metric.of(name, mine, None, "token")})
    w = torch.cat([mine, theirs])
    assert math.isclose(
        whole.compute(torch.distributed.ProcessGroup(0, 2))[name], float(w.sum() ** 2 / w.square().sum()), rel_tol=1e-9
    )


def test_objectives_that_differ_have_keys_that_differ() -> None:
    """A graph made with one objective serves all of its key, so whatever changes a number is part of it."""
    length = {"reduction": "seq_mean_token_sum_norm", "length": 3.0}
    options = [{}, {"weight": 2.0}, {"reduction": "token_sum"}, length, {**length, "length": 4.0}, {"temperature": 2.0}]
    options += [{"label_smoothing": 0.1}, {"label_smoothing": 0.2}, {"row_weight": "w"}]
    keys = [hl.Objective(ce=hl.Term(cross_entropy, **more)).key for more in options]
    assert len(set(keys)) == len(keys)
    assert keys == [hl.Objective(ce=hl.Term(cross_entropy, **more)).key for more in options]


def test_keys_are_those_asked_for_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bounded forgets what was asked for longest ago, not what is in use."""
    from headloss.graph import content

    monkeypatch.setattr(content, "_MOST_KEYS", 3)
    monkeypatch.setattr(content, "_KEYS", {})
    key = lambda weight: hl.Objective(ce=hl.Term(cross_entropy, weight=weight)).key
    first = key(1.0)
    for weight in (2.0, 3.0, 4.0, 5.0):
        key(weight)
        assert key(1.0) == first
    assert len(content._KEYS) == 3


def test_a_fact_pulls_together_with_the_loss_a_second_time() -> None:
    """Its gradient is then made anew, of both."""
    logits, targets = torch.randn(6, 11, dtype=torch.float64, requires_grad=True), torch.randint(11, (6,))
    out = hl.Objective(ce=cross_entropy)(hl.Logits(logits), targets)
    logprob = logits.log_softmax(-1)[torch.arange(6), targets]
    (want,) = torch.autograd.grad(-logprob.mean() + logprob.square().sum(), logits)
    for _ in range(2):
        both = out.loss + out.facts.logprob.square().sum()
        torch.testing.assert_close(*torch.autograd.grad(both, logits, retain_graph=True), want)
