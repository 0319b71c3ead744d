"""The command line's commands, put together."""

from typing import Annotated

import typer

from .calibrate import calibrate_command
from .demo import demo_command
from .explain import explain_command
from .inspect import inspect_command
from .launch import VERBATIM, launch_command
from .opt import opt_command
from .pack import pack_command
from .partition import partition_command
from .run import run_command
from .verify import verify_command

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer's error about the command line itself; its module has moved between versions of Typer."""

app = typer.Typer(
    name="irpar",
    help="Cut an ONNX model over a mesh of devices into one program for each; run and verify them.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _command in (
    inspect_command,
    partition_command,
    pack_command,
    run_command,
    verify_command,
    launch_command,
    explain_command,
    opt_command,
    calibrate_command,
    demo_command,
):
    _name = _command.__name__.removesuffix("_command")
    app.command(_name, context_settings=VERBATIM if _name == "launch" else None)(_command)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from irpar import __version__

        print(f"irpar {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass
