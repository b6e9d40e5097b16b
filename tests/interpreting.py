"""The Triton interpreter: the tests of a file under it, in a third of its time.

It has to be chosen before triton is imported, so tests run in a process of their own, forked from one that has loaded
what all of them load.  The interpreter spends its time on the types of a kernel's values, not on the values: `quicken`.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interpreter_operations import Operations

SERVER: list[subprocess.Popen[str]] = []
INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INSIDE, reason="runs under the interpreter, in a process of its own")
BACKEND, DTYPE, TOLERANCE = ("triton", torch.float32, 2e-5) if INSIDE else ("torch", torch.float64, 1e-10)
# Of a test that needs no kernel: it ran in the process that runs the file again.
outside = pytest.mark.skipif("RUN_AGAIN" in os.environ, reason="ran in the other process")


def interpreted(path: str, *more: str) -> Any:
    """A file's test that runs the others of it, or those that `more` names, under the interpreter."""

    @pytest.mark.timeout(600)
    @pytest.mark.skipif(INSIDE, reason="this is the other process")
    def test() -> None:
        pytest.importorskip("triton")
        rerun(path, *more)

    return test


def rerun(path: str, *more: str) -> None:
    """A file's tests under the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "RUN_AGAIN": "1"}
    if not SERVER:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        SERVER.append(subprocess.Popen([sys.executable, __file__], env=environment, text=True, **pipes))  # type: ignore[call-overload]
    server = SERVER[0]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        arguments = ["-x", "-p", "no:xdist", "-p", "no:cacheprovider", *more, path]
        where = {"folder": os.getcwd(), "path": sys.path, "environment": environment, "log": str(log)}
        try:
            print(json.dumps({"arguments": arguments, **where}), file=server.stdin, flush=True)
            status = server.stdout.readline().strip()  # type: ignore[union-attr]
        except BaseException:  # out of time, say: an answer that comes later would be taken for another file's
            os.killpg(server.pid, signal.SIGKILL)
            SERVER.clear()
            raise
        said = log.read_text() if log.exists() else ""
    assert status == "0" and " passed" in said, f"exit status {status}: {said[-6000:]}"


def serve() -> None:
    """For each line that comes in: pytest in a fork, and a line with its exit status."""
    import torch._dynamo  # noqa: F401
    import triton  # noqa: F401

    quicken()
    gc.freeze()  # or the first collection of a fork copies every page
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 3
            try:
                with open(asked["log"], "w") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                os.chdir(asked["folder"])
                os.environ.clear()
                os.environ.update(asked["environment"])
                sys.path[:] = asked["path"]
                status = int(pytest.main(asked["arguments"]))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def quicken() -> None:
    """The same values from less work: the language is patched once, types are made once, equal ones are not compared.

    Only what the interpreter is made of is replaced, and only where it looks as it does in the versions we know.
    """
    from triton.language import core
    from triton.runtime import interpreter

    if getattr(core, "_quickened", False) or not hasattr(core, "block_type") or not hasattr(core, "_unwrap_shape"):
        return
    core._quickened = True
    # An overflow is looked for in 64 bits at every addition, and what was found is dropped unless debug is on.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    _types_once(core, interpreter)
    _equal_types_pass(core, type(interpreter.interpreter_semantic))
    _truth_is_spread(interpreter)
    _reduce_halves(core, interpreter)
    _plainly(core, interpreter)
    _patch_once(interpreter)


def _truth_is_spread(interpreter: Any) -> None:
    """A comparison of scalars stays a truth value when it is spread over a block; else it has its operands' type."""
    slow = interpreter.InterpreterBuilder.create_splat

    def splat(self: Any, kind: Any, x: Any) -> Any:
        found = slow(self, kind, x)
        if x.data.dtype == bool:
            found.data = found.data.astype(bool)
        return found

    interpreter.InterpreterBuilder.create_splat = splat


def fma_rounds_once() -> bool:
    """As a GPU's does; older interpreters round the product first, which costs digits where logits are large."""
    from triton.runtime import interpreter

    return hasattr(interpreter._interpreter, "fma_fp32")


def _patch_once(interpreter: Any) -> None:
    """It patches the language for every launch, and for every function that a kernel calls; here once for all."""
    language = interpreter.tl
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    done = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: done

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        rewritten = self.__dict__.get("_rewritten")
        if rewritten is None:
            rewritten = self._rewritten = self.rewrite()
        return rewritten(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _types_once(core: Any, interpreter: Any) -> None:
    """One type for each element and shape, one shape for all tensors of a type, one table of numpy's types."""
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    slow_block, slow_unwrap, slow_numpy = core.block_type.__init__, core._unwrap_if_constexpr, interpreter._get_np_dtype
    slow_equal, numpy_types = core.dtype.__eq__, {}
    own = {int, float, bool, str, core.dtype, core.tensor, type(None)}
    pointers: dict[str, Any] = {}
    semantic = type(interpreter.interpreter_semantic)
    slow_pointer, slow_to_tensor = interpreter.tl.str_to_ty, semantic.to_tensor

    def unwrap(x: Any) -> Any:
        kind = x.__class__
        if kind is core.constexpr:
            return x.value
        return x if kind in own else slow_unwrap(x)

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = element_ty.name, tuple(unwrap(s) for s in shape)
        if key not in blocks:
            blocks[key] = block = object.__new__(cls)
            slow_block(block, element_ty, shape)
            block.shape = shapes.setdefault(key[1], block.shape)
        return blocks[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_known")
        if known is None:
            sizes = list(type.shape) if type.is_block() else []
            numel = 1
            for size in sizes:
                numel *= size
            known = core.constexpr(numel), type.scalar, core.tuple([core.constexpr(s) for s in sizes])
            type._known = known
        self.handle, self.type = handle, type
        self.numel, self.dtype, self.shape = known

    def numpy_type(type: Any) -> Any:
        name = (type.element_ty if type.__class__ is core.block_type else type).name
        if name not in numpy_types:
            numpy_types[name] = slow_numpy(type)
        return numpy_types[name]

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if x.__class__ is core.tensor else slow_to_tensor(self, x, check_type)

    def pointer(name: str, *more: Any) -> Any:  # Triton 3.4 gives the name alone
        if not isinstance(name, str) or any(x is not None for x in more):
            return slow_pointer(name, *more)
        if name not in pointers:
            pointers[name] = slow_pointer(name, *more)
        return pointers[name]

    interpreter.TensorHandle.__init__ = handle  # which asked whether the elements fit; here they are of the type
    semantic.to_tensor = to_tensor
    interpreter.tl.str_to_ty = pointer
    core._unwrap_if_constexpr = unwrap
    core.block_type.__new__, core.block_type.__init__ = new, lambda self, element_ty, shape: None
    core.dtype.__eq__ = lambda self, other: self is other or slow_equal(self, other)
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = numpy_type


def _equal_types_pass(core: Any, semantic: Any) -> None:
    """Operands of one type that is not promoted need no cast, and a number beside one of them is the same each time."""
    slow_check, slow_broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    kept = {"fp32": (int, float), "fp64": (int, float), "int32": (int,), "int64": (int,), "int1": ()}
    numbers: dict[Any, Any] = {}

    def check(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        left, right = lhs.__class__, rhs.__class__
        if left is core.tensor:
            if right is core.tensor:
                if lhs.dtype is rhs.dtype and lhs.dtype.name in kept:
                    return broadcast(self, lhs, rhs)
            elif right in kept.get(lhs.dtype.name, ()):
                key = lhs.type.name, right, repr(rhs), args, *kwargs.items()  # repr: 0.0 is not -0.0
                if key not in numbers:
                    numbers[key] = slow_check(self, lhs, rhs, *args, **kwargs)[1]
                return lhs, numbers[key]
        return slow_check(self, lhs, rhs, *args, **kwargs)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        shape = getattr(lhs.type, "shape", None)
        return (lhs, rhs) if getattr(rhs.type, "shape", None) is shape else slow_broadcast(self, lhs, rhs)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = check, broadcast


def _plainly(core: Any, interpreter: Any) -> None:
    """A builtin is called with the interpreter's semantic by one function around it, not two, or is its short cut."""
    semantic = interpreter.interpreter_semantic
    core._operations = operations = Operations(core, interpreter)

    def patch(obj: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        quick = operations.shortcut(inner.__qualname__, call)
        scope[0].set_attr(obj, name, quick) if scope else setattr(obj, name, quick)

    interpreter._patch_attr = patch


def _reduce_halves(core: Any, interpreter: Any) -> None:
    """A reduction by a function of ours combines halves, as a GPU does, and not one element at a time."""
    slow = interpreter.ReduceOps.generic_reduce

    def reduce(self: Any, input: Any) -> Any:
        axis, made = self.axis, list(input)
        length = made[0].handle.data.shape[axis] if axis is not None else 0
        if axis is None or length & (length - 1):
            return slow(self, input)
        while length > 1:
            length //= 2
            halves = [np.split(x.handle.data, 2, axis) for x in made]
            left, right = ([self.to_tensor(x[i], a.dtype) for x, a in zip(halves, input, strict=True)] for i in (0, 1))
            found = self.combine_fn.fn(*left, *right)
            made = list(found) if isinstance(found, tuple) else [found]
            if not all(isinstance(x, core.tensor) for x in made):
                return slow(self, input)
        data = [x.handle.data if self.keep_dims else x.handle.data.squeeze(axis) for x in made]
        return [self.to_tensor(x, a.dtype) for x, a in zip(data, input, strict=True)]

    interpreter.ReduceOps.generic_reduce = reduce


if __name__ == "__main__":
    serve()
elif INSIDE:
    quicken()
