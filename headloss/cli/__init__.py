"""`python -m headloss`: check, explain and measure a head; a demo; the table of losses."""

from __future__ import annotations

try:
    import rich  # noqa: F401
    import typer
except ImportError as error:  # the library itself needs torch only
    raise SystemExit(f"the command line needs {error.name}: pip install 'headloss[cli]'") from None

from headloss.cli import bench, check, demo, explain, losses

main = typer.Typer(
    help="headloss: from hidden states to a loss, with the softmax read once.",
    no_args_is_help=True,
    add_completion=False,
)
main.command("demo")(demo.command)
main.command("check")(check.command)
main.command("explain")(explain.command)
main.command("bench")(bench.command)
main.command("losses")(losses.command)
