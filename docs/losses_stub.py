"""The types of `headloss.losses`, for checkers and editors: they do not see names that a package finds when it runs.

`make docs` writes headloss/losses/__init__.pyi; tests/test_docs.py says when it is out of date.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from headloss.losses import LOSSES

HEADER = '''\
"""Losses: plain functions of facts.  Made by `make docs` from the files in this folder; do not edit."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headloss.segments import Segments

LOSSES: dict[str, Callable[..., Any]]
'''
WITH_METRICS = "tuple[Tensor, dict[str, Tensor]]"


def stub() -> str:
    return HEADER + "".join(f"\n{_function(name, fn)}" for name, fn in sorted(LOSSES.items()))


def _function(name: str, fn: Callable[..., Any]) -> str:
    text = textwrap.indent(f'"""{inspect.getdoc(fn)}"""', "    ").strip()
    return f"def {name}({_parameters(fn)}) -> {_returns(fn)}:\n    {text}\n"


def _parameters(fn: Callable[..., Any]) -> str:
    made, starred = [], False
    for p in inspect.signature(fn).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            made, starred = [*made, "*"], True
        made.append(f"{p.name}: {_type(p)}" + ("" if p.default is p.empty else f" = {_default(p.default)}"))
    return ", ".join(made)


def _type(p: inspect.Parameter) -> str:
    """What the loss says itself; else a tensor, or an option of its default's type."""
    if p.annotation is not p.empty:
        return p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)
    if p.kind is not p.KEYWORD_ONLY:
        said = "Segments" if p.name == "segments" else "Tensor"
        return f"{said} | None" if p.default is None else said
    if p.default is None:
        return "float | None"
    return next((t.__name__ for t in (bool, int, float, str) if type(p.default) is t), "Any")


def _default(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else "..."


def _returns(fn: Callable[..., Any]) -> str:
    """One value per row, with a dict of metrics if its return statements have one."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    pairs = {isinstance(value, ast.Tuple) for value in returned}
    if any(isinstance(value, ast.Call) and isinstance(value.func, ast.Name) for value in returned):
        pairs = {False, True}  # what another function makes of it
    return f"Tensor | {WITH_METRICS}" if len(pairs) > 1 else WITH_METRICS if True in pairs else "Tensor"
