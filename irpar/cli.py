"""The command line: `irpar COMMAND ...`.

Exit codes: 0 fine; 1 the partition differs from the original (verify, demo); 2 a mistake of the user, or of the machine
(no such file, disk full); 70 a bug in irpar; 130 interrupted, 143 terminated, 129 hung up. Errors go to standard error
in one form: what, where, and what to do. `IRPAR_DEBUG=1` adds the traceback.

Little is imported before the signals have their handlers: whoever presses Ctrl-C early meets no traceback.
"""

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from . import first_signals  # noqa: F401 - before all that takes its time
from .process import INTERRUPTED, SIGNALS, end_streams, mend_streams

MISTAKE = 2
BUG = 70


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None takes those of the process, whose signals and standard streams
            are then handled too.

    Returns:
        The exit code; see above.
    """
    try:
        if arguments is not None:
            _print_any_character()
            return _run(arguments)
        SIGNALS.leave_at_once()
        mend_streams()
        from .commands import app  # noqa: F401 - imported while a signal may end the process at once

        SIGNALS.clean_up()
        code = _run(sys.argv[1:])
        SIGNALS.leave_at_once()
        end_streams()
        gc.freeze()  # The process ends: nobody needs to know which of a large graph was garbage.
        return code
    except KeyboardInterrupt:
        return SIGNALS.code or INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    import typer

    from .asked import asked_by_command
    from .commands.app import app

    try:
        words = list(arguments) or ["--help"]
        with asked_by_command():
            code = app(words, prog_name="irpar", standalone_mode=False, obj=words)
        sys.stdout.flush()
        # Typer makes an interrupt of every signal.
        return SIGNALS.code or (code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, typer.Abort):
        return SIGNALS.code or INTERRUPTED
    except BrokenPipeError:
        return 0  # Whoever read the output has seen enough.
    except Exception as error:
        # What was interrupted may have made another error of it.
        return SIGNALS.code or _tell(error)


def _tell(error: Exception) -> int:
    """Print an error in irpar's form; returns the exit code."""
    import traceback

    from irpar.pass_manager import PassFailure
    from irpar.runtime.errors import PeerError
    from irpar.runtime.launch.environment import ERROR_FILE, PEER_FAILED
    from irpar.sharding import IrparError

    from .commands.app import UsageError
    from .visible import visible

    if os.environ.get("IRPAR_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    match error:
        case PassFailure():
            code, text = BUG, str(error)
        case PeerError() if ERROR_FILE in os.environ:
            code, text = PEER_FAILED, str(error)
        case IrparError():
            code, text = MISTAKE, str(error)
        case UsageError():
            code, text = MISTAKE, _usage_text(error)
        case OSError():
            code, text = MISTAKE, _os_text(error)
        case MemoryError():
            code, text = MISTAKE, "there is not enough memory\n  do: use a machine with more memory, or a smaller model"
        case _:
            code, text = BUG, ""
    start = "error: "
    if not text:
        start, reason = "", f"{type(error).__name__}: {error}".splitlines()[0]
        text = f"internal error: {reason}, a bug in irpar; run with IRPAR_DEBUG=1 for the traceback"
    text = visible(text)
    if not _hand_over(text, os.environ.get(ERROR_FILE, "")):
        with suppress(OSError):  # The exit code tells where standard error cannot be written.
            print(f"{start}{text}", file=sys.stderr)
    return code


def _hand_over(text: str, path: str) -> bool:
    """Give an error to `irpar launch`, which tells it once for all ranks."""
    try:
        with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return False
    return True


def _usage_text(error: Exception) -> str:
    """What Typer found wrong with the arguments, and where to read more."""
    message = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "irpar"
    return f"{message[:1].lower()}{message[1:]}\n  do: {command} --help shows what there is"


def _os_text(error: OSError) -> str:
    from .system_errors import remedy

    lines = [error.strerror or str(error) or type(error).__name__]
    lines += [f"  {name}" for name in (error.filename, error.filename2) if name is not None]
    lines.append(f"  do: {remedy(error)}")
    return "\n".join(lines)


def _print_any_character() -> None:
    """Let names that the terminal's encoding lacks be printed as escapes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
