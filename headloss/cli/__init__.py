"""`python -m headloss`: check, explain and measure a head; a demo; the table of losses."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated

try:
    import rich  # noqa: F401
    import typer
except ImportError as error:  # the library itself needs torch only
    raise SystemExit(f"the command line needs {error.name}: pip install 'headloss[cli]'") from None

from headloss.cli import bench, check, explain, losses

main = typer.Typer(
    help="headloss: from hidden states to a loss, with the softmax read once.",
    no_args_is_help=True,
    add_completion=False,
)
main.command("check")(check.command)
main.command("explain")(explain.command)
main.command("bench")(bench.command)
main.command("losses")(losses.command)


@main.command("demo", context_settings={"ignore_unknown_options": True, "help_option_names": []})
def demo(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    """Teach, distill from a top-K teacher, reinforce with GSPO, compare: examples/demo of a checkout."""
    checkout = Path(__file__).parents[2]
    if not (checkout / "examples" / "demo").is_dir():
        sys.exit("the demo is in examples/demo of a checkout, not in the installed package: run `make demo` there")
    sys.path.insert(0, str(checkout))
    program = typer.Typer(add_completion=False)
    program.command()(importlib.import_module("examples.demo").command)
    program(arguments or [], prog_name="headloss demo")
