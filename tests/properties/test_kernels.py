"""Random objectives on the Triton backend, under its interpreter: one launch where rows stay apart, two elsewhere."""

from __future__ import annotations

import random as standard

import drawn
import oracle
import pytest
import torch
from drawn import RANDOM, problem, tally, way
from hypothesis import given
from interpreting import INSIDE, rerun

import headloss as hl

pytest.importorskip("triton")


@pytest.mark.timeout(900)
@pytest.mark.skipif(INSIDE, reason="this is the other process")
def test_under_the_interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROPERTIES", raising=False)  # the report is the other process's
    rerun(__file__, *(["--slow", "-o", "timeout=3000"] if request.config.getoption("--slow") else []))


@pytest.mark.skipif(not INSIDE, reason="runs under the interpreter, in a process of its own")
@given(RANDOM)
def test_any_objective(random: standard.Random) -> None:
    dtype = random.choice((torch.bfloat16, torch.float16, torch.float32))
    wanted = drawn.objective(random, most=3)
    p = problem(random, wanted, "Logits", plain=True)
    p = oracle.replace(p, tensors={n: x.to(dtype).double() for n, x in p.tensors.items()})
    tally(dtype=dtype)
    kernels = hl.Objective(**wanted.terms, metrics=wanted.asked, backend="triton")
    drawn.near(oracle.run(kernels, p, dtype=dtype, how=way(random, wanted, p)), oracle.answer(wanted, p), dtype)
