"""A first call that takes long says so on a terminal, once; elsewhere nothing is written."""

from __future__ import annotations

import io
import time

import pytest
import torch

import headloss as hl
from headloss.engine import first_call


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def call() -> None:
    def slow(logprob):  # a new function each time, so that it is traced each time
        time.sleep(0.15)
        return -logprob

    hl.Objective(ce=hl.Term(slow, pure=True))(hl.Logits(torch.randn(3, 5)), torch.tensor([0, 1, 2]))


def test_it_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(first_call, "AFTER", 0.02)
    first_call._reported.clear()
    call()
    call()
    assert terminal.getvalue().count("\n") == 1 and terminal.getvalue().startswith("headloss: tracing the losses")


@pytest.mark.parametrize("after", [30.0, 0.02])
def test_nothing_is_told_of_a_short_call_or_without_a_terminal(monkeypatch: pytest.MonkeyPatch, after: float) -> None:
    file = Terminal() if after > 1 else io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setattr(first_call, "AFTER", after)
    first_call._reported.clear()
    call()
    assert not file.getvalue()
