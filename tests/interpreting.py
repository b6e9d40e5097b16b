"""The Triton interpreter, at half the price.

It patches the language for a kernel, and again for every function that the kernel calls, which takes longer than what
those functions do.  Once for each module is enough: what is patched for a function is never taken back.
"""

from __future__ import annotations

from typing import Any


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
