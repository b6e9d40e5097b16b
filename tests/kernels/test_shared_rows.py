"""Rows with a dense teacher that several programs share, in one launch, against float64; under Triton's interpreter."""

import math
from types import SimpleNamespace

import pytest
import torch
from interpreting import inside, interpreted

import headloss as hl
from headloss.losses import cross_entropy, forward_kl, jsd, reverse_kl

pytest.importorskip("triton")
from test_visit_teachers import DIVERGENCES, Batch, agreement, both, mix

from headloss.backends.triton import visit as one

test_under_the_interpreter = interpreted(__file__)
SMALL = one.Shape(1, 1, span=2)  # 256 columns of float32 a program, or 512 of bfloat16


@pytest.fixture
def parts(monkeypatch):
    """How many programs shared a row, for each visit; each has two blocks."""
    monkeypatch.setattr(one, "SHARED_WITH_TEACHER", ((64, SMALL), (64, SMALL)))
    monkeypatch.setattr(one, "multiprocessors", lambda device: 64)
    found, launch_visit = [], one.launch_visit
    note = lambda plan, kernel, *more: (found.append(kernel.constants["F"].PARTS), launch_visit(plan, kernel, *more))[1]
    monkeypatch.setattr(one, "launch_visit", note)
    return found


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_divergence(parts, name, dtype):
    both(Batch(v=648, dtype=dtype), {"kd": DIVERGENCES[name]}, tolerance=1e-4 if dtype == torch.float32 else 2e-2)
    assert parts == [3 if dtype == torch.float32 else 2]


@inside
def test_a_mix(parts):
    """Sums at several temperatures, a mean over the row, both likeliest columns, and a target in any part."""
    T = torch.linspace(0.5, 2.0, 7)
    for v, source in ((648, {}), (652, {"scale": -0.7, "temperature": T})):
        batch = Batch(v=v)
        batch.targets = torch.tensor([0, 255, -100, 256, 300, 511, v - 1])
        both(batch, mix(), "Logits", "Logits", ["entropy", "accuracy", agreement], {"scale": 1.3}, **source)
    assert parts == [3, 3]


@inside
def test_the_first_of_equal_columns(parts):
    batch = Batch(v=656)
    for row, columns in enumerate([(5, 6), (5, 300), (3, 9), (255, 256), (640, 655), (511, 512), (0, 655)]):
        batch.logits[row, list(columns)] = batch.teacher_logits[row, list(columns)] = 30.0
        batch.targets[row] = columns[0]
    batch.targets[2] = -100
    found = both(batch, {"ce": cross_entropy, "kd": forward_kl}, metrics=["accuracy", agreement])
    assert float(found.metrics["accuracy"].value) == 1.0 and parts == [3]


@inside
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_columns_that_are_ruled_out(parts, name):
    """By either, in a part, in all of them but one, or in a whole row of the teacher's."""
    batch = Batch(v=664)
    batch.logits[0, :400], batch.logits[1, 300:], batch.logits[3, 250:260] = -math.inf, -math.inf, -math.inf
    batch.teacher_logits[4, 40:], batch.teacher_logits[5, :600], batch.teacher_logits[1, 290:310] = (
        -math.inf,
        -math.inf,
        -math.inf,
    )
    batch.logits[6, 600], batch.teacher_logits[6, 10] = 9e3, 2e4
    batch.targets[:2] = torch.tensor([500, 8])
    both(batch, {"kd": DIVERGENCES[name], "ce": cross_entropy})
    assert parts == [3]


@inside
def test_a_teacher_with_more_columns(parts):
    batch = Batch(v=672)
    batch.teacher_logits = torch.cat([batch.teacher_logits, 2 * batch.teacher_logits[:, :96]], 1)
    both(batch, {"kd": forward_kl, "j": jsd})
    assert parts == [3]


@inside
def test_rows_that_are_not_shared(parts):
    """Another dtype, rows that start elsewhere, a softcap; and where nothing is written."""
    batch = Batch(v=680)
    plain, wide = {"kd": reverse_kl}, torch.zeros(7, 681)
    wide[:, 1:] = batch.teacher_logits
    for teacher in (
        hl.Logits(batch.teacher_logits), hl.Logits(batch.teacher_logits.double().bfloat16()), hl.Logits(wide[:, 1:]),
        hl.Logits(batch.teacher_logits, softcap=30.0),
    ):  # fmt: skip
        objective = hl.Objective(**plain, backend="triton")
        objective(hl.Logits(batch.logits.clone().requires_grad_()), batch.targets, teacher=teacher).loss.backward()
    with torch.no_grad():
        objective(hl.Logits(batch.logits), batch.targets, teacher=hl.Logits(batch.teacher_logits))
    assert parts == [3, 0, 0, 0, 0]


def test_which_rows_are_shared():
    """Long ones, where a gradient is made and the device runs enough programs at once."""
    teacher = SimpleNamespace(want=SimpleNamespace(teachers=("t",)))
    plan = lambda divergence=None, T=1: SimpleNamespace(
        heavy=False, program=teacher, divergence=divergence, flags={"DENSE": True, "A": (True,) * T}
    )
    (least, shape), (rest_least, rest) = one.SHARED_WITH_TEACHER
    size = 2 * 128256
    assert one.shape_of(plan(), size, most=33) == shape
    assert one.shape_of(plan(object()), size, most=33) == one.shape_of(plan(T=2), size, most=33) == rest
    for row, how in ((least, {}), (size, {"gradient": False}), (33 * shape.part + 2, {})):
        assert not one.shape_of(plan(), row, most=33, **how).span
    assert not one.shape_of(plan(), size, most=size // shape.part).span
    assert one.shape_of(plan(), size, most=size // shape.part + 1).span
    assert not one.shape_of(plan(object()), rest_least, most=33).span
    for each in (shape, rest):  # what the programs of a multiprocessor read stays in the first cache
        programs = 65536 // (32 * each.warps * each.registers)
        assert programs >= 5 and programs * 2 * each.part <= 240 * 1024
