"""The command line: `irpar COMMAND ...`.

Exit codes: 0 fine; 1 the partition differs from the original (verify, demo); 2 a mistake of the user, or of the machine
(no such file, disk full); 70 a bug in irpar; 130 interrupted. Errors go to standard error in one form: what, where, and
what to do. `IRPAR_DEBUG=1` adds the traceback.
"""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from irpar.sharding import IrparError

from .commands.demo import demo_command
from .commands.explain import explain_command
from .commands.inspect import inspect_command
from .commands.opt import opt_command
from .commands.partition import partition_command
from .commands.run import run_command
from .commands.verify import verify_command

MISTAKE = 2
BUG = 70
INTERRUPTED = 130

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer's error about the command line itself; its module has moved between versions of Typer."""

_REMEDIES = {
    errno.ENOSPC: "free some room, or write to another disk",
    errno.EDQUOT: "free some of your quota, or write to another disk",
    errno.EACCES: "give a place that you may read and write",
    errno.EPERM: "give a place that you may read and write",
    errno.EROFS: "give a place that can be written",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "give a file, not a folder",
    errno.EEXIST: "give another place: there is a file of that name",
    errno.EMFILE: "allow more open files: ulimit -n",
}

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
    run_command,
    verify_command,
    explain_command,
    opt_command,
    demo_command,
):
    app.command(_command.__name__.removesuffix("_command"))(_command)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None takes those of the process.

    Returns:
        The exit code; see above.
    """
    _print_any_character()
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        code = app(words or ["--help"], prog_name="irpar", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except typer.Abort:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough; nothing must be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _tell(error)


def _tell(error: Exception) -> int:
    """Print an error in irpar's form; returns the exit code."""
    from irpar.pass_manager import PassFailure

    if os.environ.get("IRPAR_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    match error:
        case PassFailure():
            code, text = BUG, str(error)
        case IrparError():
            code, text = MISTAKE, str(error)
        case _UsageError():
            code, text = MISTAKE, _usage_text(error)
        case OSError():
            code, text = MISTAKE, _os_text(error)
        case MemoryError():
            code, text = MISTAKE, "there is not enough memory\n  do: use a machine with more memory, or a smaller model"
        case _:
            code, text = BUG, ""
    if not text:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        text = f"{reason}, a bug in irpar; run with IRPAR_DEBUG=1 for the traceback"
        print(f"internal error: {text}", file=sys.stderr)
    else:
        print(f"error: {text}", file=sys.stderr)
    return code


def _usage_text(error: Exception) -> str:
    """What Typer found wrong with the arguments, and where to read more."""
    message = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "irpar"
    return f"{message[:1].lower()}{message[1:]}\n  do: {command} --help shows what there is"


def _os_text(error: OSError) -> str:
    lines = [error.strerror or str(error) or type(error).__name__]
    lines += [f"  {name}" for name in (error.filename, error.filename2) if name is not None]
    lines.append(f"  do: {_REMEDIES.get(error.errno or 0, 'check the file and the disk')}")
    return "\n".join(lines)


def _print_any_character() -> None:
    """Let names that the terminal's encoding lacks be printed as escapes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
