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
from typing import Any

import numpy as np
import pytest
import torch

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
    _patch_once(interpreter)
    # An overflow is looked for in 64 bits at every addition, and what was found is dropped unless debug is on.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    _types_once(core, interpreter)
    _equal_types_pass(core, type(interpreter.interpreter_semantic))
    _truth_is_spread(interpreter)
    _straight_to_numpy(core, interpreter)
    _called_once(interpreter)
    _reduce_halves(core, interpreter)


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
    """It patches the language for every function that a kernel calls; what is patched is never taken back."""
    patched: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _types_once(core: Any, interpreter: Any) -> None:
    """One type for each element and shape, one shape for all tensors of a type, one table of numpy's types."""
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    slow_block, slow_unwrap, slow_numpy = core.block_type.__init__, core._unwrap_if_constexpr, interpreter._get_np_dtype
    slow_equal, numpy_types = core.dtype.__eq__, {}

    def unwrap(x: Any) -> Any:
        kind = x.__class__
        if kind is core.constexpr:
            return x.value
        return x if kind is int or kind is float or kind is core.dtype else slow_unwrap(x)

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


def _straight_to_numpy(core: Any, interpreter: Any) -> None:
    """Sums, differences and products of one type are numpy's, which spreads scalars too; the rest goes on as it did."""
    handle, semantic, builder = (
        interpreter.TensorHandle,
        interpreter.interpreter_semantic,
        interpreter.interpreter_builder,
    )
    plain = {"fp32": np.dtype("float32"), "fp64": np.dtype("float64")}
    plain |= {"int32": np.dtype("int32"), "int64": np.dtype("int64")}
    handle.__post_init__ = lambda self: None  # which asks whether the elements fit; here they are of the type

    def wide(x: Any, y: Any) -> Any:
        """The type of a result with the elements of `x`; None if neither is spread over the other."""
        if not y.type.is_block() or x.type is y.type:
            return x.type
        if not x.type.is_block():
            return core.block_type(x.dtype, y.type.shape)
        return x.type if x.type.shape == y.type.shape else None

    def quick(slow: Any, op: Any, turned: bool) -> Any:
        slow = getattr(slow, "__wrapped__", slow)

        def run(self: Any, other: Any, _semantic: Any = None) -> Any:
            y = other.value if other.__class__ is core.constexpr else other
            elements = plain.get(self.dtype.name)
            if elements is not None and (y.__class__ is int or (y.__class__ is float and elements.kind == "f")):
                y = semantic.binary_op_type_checking_impl(self, y, True, True)[1]
            if y.__class__ is core.tensor:
                if elements is not None and y.dtype is self.dtype:
                    left, right, kind = self.handle.data, y.handle.data, wide(self, y)
                    if kind is not None and left.dtype is elements and right.dtype is elements:
                        return core.tensor(handle(op(right, left) if turned else op(left, right), self.dtype), kind)
                elif op is np.add and self.dtype.__class__ is core.pointer_type and y.dtype.name in ("int32", "int64"):
                    kind = wide(self, y)
                    if kind is not None:
                        return core.tensor(builder.create_addptr(self.handle, y.handle), kind)
            return slow(self, other, _semantic=semantic)

        return run

    for name, op in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        for member, turned in ((f"__{name}__", False), (f"__r{name}__", True)):
            setattr(core.tensor, member, quick(getattr(core.tensor, member), op, turned))


def _called_once(interpreter: Any) -> None:
    """A builtin is called with the interpreter's semantic by one function, not by two around it."""
    semantic = interpreter.interpreter_semantic

    def patch(obj: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope[0].set_attr(obj, name, call) if scope else setattr(obj, name, call)

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
