"""The Triton interpreter: the tests of a file under it, and at half the price.

It patches the language for a kernel, and again for every function that the kernel calls, which takes longer than what
those functions do.  Once for each module is enough: what is patched for a function is never taken back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def rerun(path: str, *more: str) -> None:
    """A file's tests in a process of their own: the interpreter has to be chosen before triton is imported."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *more, path]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def quicken() -> None:
    from triton.runtime import interpreter

    patched: set[str] = set()
    function: Any = getattr(interpreter, "InterpretedFunction", None)
    patch = getattr(interpreter, "_patch_lang", None)
    if function is None or patch is None or not hasattr(function, "rewrite"):
        return

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            patch(self.fn)
        return self.rewrite()(*args, **kwargs)

    function.__call__ = call
