"""`python -m headloss`: check, explain and measure a head; store a teacher's tokens; run the demo; list the losses."""

from __future__ import annotations

import importlib
import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

try:
    import rich  # noqa: F401
    import typer
except ImportError as error:  # the library itself needs torch only
    raise SystemExit(f"the command line needs {error.name}: pip install 'headloss[cli]'") from None

import torch

import headloss as hl
from headloss.cli import bench, check, explain, losses, teach

main = typer.Typer(no_args_is_help=True, invoke_without_command=True, add_completion=False)
VERSION = typer.Option("--version", help="Print the versions of headloss, torch, triton and Python.")


@main.callback()
def every(version: Annotated[bool, VERSION] = False) -> None:
    """Losses of a language model's head, from one pass over the vocabulary.

    Exit codes: 0 success, 1 a check or a measurement found something wrong, 2 wrong usage.
    """
    if version:
        triton = metadata.version("triton") if find_spec("triton") is not None else "not installed"
        others = f"torch {torch.__version__}, triton {triton}, Python {platform.python_version()}"
        typer.echo(f"headloss {hl.__version__} ({others})")
        raise typer.Exit()


main.command("check")(check.command)
main.command("explain")(explain.command)
main.command("bench")(bench.command)
main.command("losses")(losses.command)
main.command("teach")(teach.command)


@main.command("demo", context_settings={"ignore_unknown_options": True, "help_option_names": []})
def demo(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    """Train, distill, reinforce and compare in two minutes; in a checkout only."""
    checkout = Path(__file__).parents[2]
    if not (checkout / "examples" / "demo").is_dir():
        sys.exit("the installed package has no demo; it is in examples/demo of a checkout: run `make demo` there")
    sys.path.insert(0, str(checkout))
    program = typer.Typer(add_completion=False)
    program.command()(importlib.import_module("examples.demo").command)
    program(arguments or [], prog_name="headloss demo")
