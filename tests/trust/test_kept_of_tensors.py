"""What is kept of a tensor (counts of segments, statistics of targets) is not believed once the tensor has changed."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import headloss as hl
from headloss.integrations import early_targets

CE = hl.Objective(ce=hl.losses.cross_entropy)


def batch(targets=(1, 2, -100, 3, 4, 5)):
    torch.manual_seed(0)
    return torch.randn(6, 9, requires_grad=True), torch.tensor(targets)


@pytest.mark.parametrize("source", ["Logits", "Linear"])
@pytest.mark.parametrize("change", ["item", "view", "copy"])
def test_targets_written_to_after_prepare(source, change):
    z, targets = batch()
    prepared = hl.prepare(targets)
    make = lambda: hl.Logits(z) if source == "Logits" else hl.Linear(z, torch.eye(9))
    torch.testing.assert_close(CE(make(), prepared).loss, F.cross_entropy(z, targets))
    if change == "item":
        targets[0] = -100
    elif change == "view":
        targets[:2].fill_(-100)
    else:
        targets.copy_(targets.flip(0))
    with pytest.raises(ValueError, match="targets: were written to after hl.prepare"):
        CE(make(), prepared)
    torch.testing.assert_close(CE(make(), hl.prepare(targets)).loss, F.cross_entropy(z, targets))


def test_segments_written_to_after_prepare():
    z, targets = batch()
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    objective = hl.Objective(ce=hl.Term(hl.losses.cross_entropy, reduction="seq_mean_token_mean"))
    prepared = hl.prepare(targets, hl.Segments.from_ids(ids))
    objective(hl.Logits(z), prepared)
    ids[1] = 1
    with pytest.raises(ValueError, match="segments: were written to after hl.prepare"):
        objective(hl.Logits(z), prepared)


def test_counts_of_segments_follow_their_ids():
    ids, x = torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(6.0)
    segments = hl.Segments.from_ids(ids)
    assert segments.counts.tolist() == [2, 2, 2]
    ids[1] = 1
    assert segments.counts.tolist() == [1, 3, 2]
    torch.testing.assert_close(segments.means(x), torch.tensor([0.0, 2.0, 4.5]))


@pytest.mark.parametrize("written", [False, True])
def test_counts_that_were_made_before_a_graph(written, monkeypatch):
    """A graph reads no version and no address: they are taken as they are, or counted in it."""
    ids, x = torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(6.0)
    if written:
        ids[1] = 1
    segments = hl.Segments.from_ids(ids)
    expected, counted = segments.means(x), []
    count = hl.Segments.local_counts
    monkeypatch.setattr(hl.Segments, "local_counts", lambda self: counted.append(self) or count(self))
    step = torch.compile(lambda x, segments: segments.means(x), backend="eager", fullgraph=True)
    torch.testing.assert_close(step(x, segments), expected)
    assert bool(counted) == written


def test_what_inference_mode_does_not_count_is_copied():
    """A buffer of ids that serves the next batch too: what was prepared stays as it was."""
    objective = hl.Objective(ce=hl.Term(hl.losses.cross_entropy, reduction="seq_mean_token_mean"))
    z, targets = batch()
    with torch.inference_mode():
        ids, route = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 1, 1, 0, 1])
        segments, prepared = hl.Segments.from_ids(ids), hl.prepare(targets, hl.Segments.from_ids(ids))
        routed = hl.Routed({"a": hl.Logits(z.clone()), "b": hl.Logits(2 * z)}, route)
        assert segments.counts.tolist() == [2, 2, 2]
        first = objective(hl.Logits(z), prepared).loss
        ids.copy_(torch.tensor([2, 0, 1, 0, 2, 0]))
        route.zero_()
        assert torch.equal(objective(hl.Logits(z), prepared).loss, first)
        assert segments.counts.tolist() == [3, 1, 2]
        assert routed.known().tolist() == [0, 0, 1, 1, 0, 1] == routed.route.tolist()


@pytest.mark.parametrize(
    "again", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.to("cpu")]
)
def test_prepared_targets_travel(again):
    z, targets = batch((1, 2, 6, 3, 4, 5))
    targets[2] = -100  # a version of its own
    segments = hl.Segments.from_ids(torch.tensor([0, 0, 1, 1, 2, 2]))
    assert again(hl.prepare(targets, segments)).segments.counts.tolist() == [2, 2, 2]
    prepared = again(hl.prepare(targets))
    torch.testing.assert_close(CE(hl.Logits(z), prepared).loss, F.cross_entropy(z, targets))


def by_numpy(x, y):
    x.numpy()[...] = y.numpy()


def by_data(x, y):
    x.data.copy_(y)


def by_moving(x, y):
    x.data = y.clone()


UNCOUNTED = pytest.mark.parametrize(
    "write", [by_numpy, by_data, by_moving]
)  # as a loader refills the buffer of a batch


@UNCOUNTED
@pytest.mark.parametrize("what", ["targets", "segments", "vocab_ids"])
def test_uncounted_writes_after_prepare(what, write):
    z, targets = batch((1, 2, 6, 3, 4, 5))
    ids, tokens = torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(9)
    given = {"targets": targets, "segments": ids, "vocab_ids": tokens}
    prepared = hl.prepare(targets, hl.Segments.from_ids(ids), vocab_ids=tokens if what == "vocab_ids" else None)
    source = hl.Logits(z, vocab_ids=tokens if what == "vocab_ids" else None)
    CE(source, prepared)
    write(given[what], given[what].flip(0))
    for use in (lambda: CE(source, prepared), lambda: prepared.to("cpu"), lambda: pickle.dumps(prepared)):
        with pytest.raises(ValueError, match=f"{what}: were written to after hl.prepare"):
            use()


@UNCOUNTED
def test_counts_of_segments_follow_uncounted_writes(write):
    ids, x = torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(6.0)
    segments = hl.Segments.from_ids(ids)
    assert segments.counts.tolist() == [2, 2, 2]
    write(ids, torch.tensor([0, 1, 1, 1, 2, 2]))
    torch.testing.assert_close(segments.means(x), torch.tensor([0.0, 2.0, 4.5]))


@UNCOUNTED
def test_kept_columns_follow_uncounted_writes_to_targets(write):
    z, targets = batch((1, 2, 6, 3, 4, 5))
    mask = torch.eye(9, dtype=torch.bool)[:6] | (torch.arange(9) % 2 == 0)
    support = hl.Support.from_mask(mask)
    CE(hl.Logits(z), targets, support=support)
    write(targets, torch.tensor([8, 7, -100, 3, 1, 0]))
    fresh = CE(hl.Logits(z), targets.clone(), support=hl.Support.from_mask(mask)).loss
    torch.testing.assert_close(CE(hl.Logits(z), targets, support=support).loss, fresh)


@UNCOUNTED
def test_a_support_notices_uncounted_writes(write):
    z, targets = batch((1, 2, 6, 3, 4, 5))
    ids = torch.arange(9).expand(6, 9)[:, ::2].clone()
    support = hl.Support.from_padded(ids)
    CE(hl.Logits(z), targets, support=support)
    write(ids, ids + (ids < 8))
    with pytest.raises(ValueError, match="ids: was written to after hl.Support"):
        CE(hl.Logits(z), targets, support=support)


def test_a_support_notices_that_its_mask_was_replaced():
    """It keeps no copy of a mask, which is large; NumPy's writes to one go unseen."""
    z, targets = batch((1, 2, 6, 3, 4, 5))
    mask = torch.ones(6, 9, dtype=torch.bool)
    support = hl.Support.from_mask(mask)
    mask.data = mask.roll(1)
    with pytest.raises(ValueError, match="mask: was written to after hl.Support"):
        CE(hl.Logits(z), targets, support=support)


@UNCOUNTED
def test_early_targets_of_labels_that_were_refilled(write, monkeypatch):
    monkeypatch.setattr(early_targets, "prepared", lambda targets, segments=None: hl.prepare(targets, segments))
    labels = torch.tensor([1, 2, -100, 3, 4, 5])
    targets = hl.shift_labels(labels)
    early = early_targets.EarlyTargets()
    early.start(targets, labels)
    assert isinstance(early.take(targets, labels), hl.Prepared)
    early.start(targets, labels)
    write(labels, labels.flip(0))
    assert early.take(targets, labels) is targets


def test_kept_columns_of_a_call_with_targets_are_not_those_of_one_without():
    z, targets = batch((1, 2, 6, 3, 4, 5))
    support = hl.Support.from_mask(torch.eye(9, dtype=torch.bool)[:6])
    CE(hl.Logits(z), targets, support=support)  # targets beside the diagonal are added to their rows
    facts = hl.row_facts(hl.Logits(z), want=("lse",), support=support)
    torch.testing.assert_close(facts.lse, z.detach()[:, :6].diagonal(), check_dtype=False)
