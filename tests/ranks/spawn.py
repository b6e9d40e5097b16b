"""Ranks for tests: processes that stay alive and run one function after another, gloo on the CPU.

A process with torch in it takes seconds to start: ranks are forked from one that has loaded it and done nothing else,
and a `Ranks` of 2 and one of 4 serve all tests.  A function must be importable (a top-level function of a test module).
Results come back in rank order; if any rank fails, the error carries every rank's traceback and the processes are
started anew for the next test.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GROUP_TIMEOUT = 20.0  # of a collective; a rank that fails leaves the others waiting for this long
CALL_TIMEOUT = 150.0
# What a rank would load anyway, torch's tracing included; nothing of ours, which each imports from where its test is.
LOADED = ["torch", "torch.distributed.tensor", "torch._dynamo", "torch._functorch.aot_autograd", "numpy", "pytest"]


class RankError(AssertionError):
    """At least one rank raised; `errors` has each rank's traceback, or None."""

    def __init__(self, errors: list[str | None]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"--- rank {i} ---\n{e}" for i, e in enumerate(errors) if e is not None))


class Ranks:
    """Processes 0 to size - 1, in one gloo group.

    >>> Ranks(2).run(function, 1, 2)        # calls function(1, 2) on both; [result of rank 0, result of rank 1]
    """

    def __init__(self, size: int, group_timeout: float = GROUP_TIMEOUT) -> None:
        self.size, self.group_timeout = size, group_timeout
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(LOADED)
        port = free_port()
        with _environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME=None):
            for rank in range(self.size):
                here, there = context.Pipe()
                arguments = (rank, self.size, port, self.group_timeout, there)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                there.close()
                self.processes.append(process)
                self.pipes.append(here)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = CALL_TIMEOUT) -> list[Any]:
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__qualname__, arguments))
        answers = self._collect(time.monotonic() + timeout)
        errors = [None if ok else text for ok, text in answers]
        if any(e is not None for e in errors):
            self.stop()
            raise RankError(errors)
        return [result for _, result in answers]

    def _collect(self, deadline: float) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.size and time.monotonic() < deadline:
            open_ = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for ready in wait(open_, timeout=max(0.0, deadline - time.monotonic())):
                rank = self.pipes.index(ready)  # type: ignore[arg-type]
                try:
                    answers[rank] = ready.recv()  # type: ignore[union-attr]
                except EOFError:
                    self.processes[rank].join(5)
                    answers[rank] = False, f"the process died (exit code {self.processes[rank].exitcode})"
        return [answers.get(rank, (False, "no answer in time")) for rank in range(self.size)]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


def _serve(rank: int, size: int, port: int, timeout: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    _keep_meshes()
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((True, getattr(importlib.import_module(module), name)(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        while OWN:
            dist.destroy_process_group(OWN.pop())


OWN: list[Any] = []


def own_group(**options: Any) -> Any:
    """A group of all ranks that ends with the function: its threads poll all the time."""
    OWN.append(dist.new_group(**options))
    return OWN[-1]


def _keep_meshes() -> None:
    """One mesh of each shape: the threads of hundreds of groups fill two cores."""
    from torch.distributed import device_mesh, tensor

    slow, known = device_mesh.init_device_mesh, {}

    def init_device_mesh(*args: Any, **kwargs: Any) -> Any:
        key = args, *sorted(kwargs.items())
        if key not in known:
            known[key] = slow(*args, **kwargs)
        return known[key]

    for place in (device_mesh, tensor, dist):
        if hasattr(place, "init_device_mesh"):
            place.init_device_mesh = init_device_mesh  # type: ignore[attr-defined]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def _environment(**values: str | None) -> Any:
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


class Calls:
    """Counts collectives: `with Calls() as calls: ...; calls.count`, and in which order things happened.

    Every function of torch.distributed that talks is replaced where it is looked up, and so are `Work.wait` and
    `torch.mm`, which serve to tell what overlaps with what.
    """

    NAMES = (
        "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_gather_coalesced",
        "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
        "broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
        "scatter", "send", "recv", "isend", "irecv", "batch_isend_irecv",
    )  # fmt: skip

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sizes: list[tuple[str, int]] = []
        self._depth = 0

    def __enter__(self) -> Calls:
        self._saved: list[tuple[Any, str, Any]] = []
        c10d = dist.distributed_c10d
        for name in self.NAMES:
            if hasattr(c10d, name):
                counted = self._counted(name, getattr(c10d, name))
                for place in (dist, c10d):
                    if hasattr(place, name):
                        self._replace(place, name, counted)
        for name in ("mm", "addmm"):
            self._replace(torch, name, self._noted("gemm", getattr(torch, name)))
        return self

    def _replace(self, place: Any, name: str, new: Any) -> None:
        self._saved.append((place, name, getattr(place, name)))
        setattr(place, name, new)

    def _noted(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.events.append(label)
            return function(*args, **kwargs)

        return call

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:  # one may be written in terms of another
                self.events.append(name)
                self.sizes.append((name, next((a.numel() for a in args[:1] if isinstance(a, torch.Tensor)), 0)))
            self._depth += 1
            try:
                work = function(*args, **kwargs)
            finally:
                self._depth -= 1
            return _Waited(work, self.events) if kwargs.get("async_op") and work is not None else work

        return call

    def __exit__(self, *_: object) -> None:
        for place, name, old in reversed(self._saved):
            setattr(place, name, old)

    @property
    def count(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for event in self.events:
            kind = next((k for k in ("all_gather", "all_reduce", "reduce_scatter") if event.startswith(k)), event)
            if event not in ("gemm", "wait"):
                found[kind] = found.get(kind, 0) + 1
        return found


class _Waited:
    def __init__(self, work: Any, events: list[str]) -> None:
        self.work, self.events = work, events

    def wait(self) -> Any:
        self.events.append("wait")
        return self.work.wait()
