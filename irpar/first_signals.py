"""Ctrl-C while the command has hardly begun: imported before anything that takes its time, and lighter than that.

`process` takes over, which needs modules that take some 30 ms. In a program that imports irpar nothing changes.
"""

import os
import signal
import sys

_COMMANDS = ("irpar", "irpar.exe")


def _leave(number: int, _: object) -> None:
    os._exit(128 + number)


def _is_command() -> bool:
    """Whether this process was started as `irpar`, or as `python -m irpar` or `irpar.cli`."""
    folder, name = os.path.split(sys.argv[0] if sys.argv else "")
    return name in _COMMANDS or os.path.abspath(folder) == os.path.dirname(os.path.abspath(__file__))


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
