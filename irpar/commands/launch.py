"""irpar launch: a command once for each rank, one process each, on this machine."""

import json
import math
import os
import shutil
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer

from irpar.sharding import IrparError, nearest_names

RANKED = ("run", "verify")
"""The commands of irpar that several ranks run together."""

Ranks = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--ranks",
        metavar="N",
        min=1,
        help="How many ranks; where it is left out, as many as the mesh of OUT has.",
        show_default=False,
    ),
]
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND",
        help="run or verify with all that belongs to it, or any program with its arguments.",
        show_default=False,
    ),
]


def launch_command(command: Words, ranks: Ranks = None) -> None:
    """Run a command once for each rank, one process each, on this machine.

    irpar launch -n 4 run OUT --inputs in.npz (or verify; or any program).

    The ranks get the environment of torchrun: RANK, WORLD_SIZE, MASTER_ADDR ...
    Lines that they print have the rank before them, but for rank 0's output.
    Where a rank fails all are ended, and the exit code is that of the first.
    """
    _check_not_launched()
    launch_ranks(command, ranks)


def launch_ranks(command: list[str], ranks: int | None = None) -> NoReturn:
    """Run a command once for each rank, and end as it does.

    Args:
        command: `run` or `verify` with all that belongs to it, or a program with its arguments.
        ranks: how many; None: as many as the mesh of the partition has.

    Raises:
        Exit: with the exit code of the rank that failed first; 0 where none did.
        IrparError: there is no such command, or the ranks cannot be started.
    """
    from irpar.runtime.launch.environment import checked_timeout
    from irpar.runtime.launch.processes import launch

    words, is_irpar = _command_line(command)
    size = _size(command, ranks, is_irpar)
    seconds = checked_timeout(_timeout(command) if is_irpar else None)
    ending = launch(words, size, stdout=_raw(sys.stdout), stderr=_raw(sys.stderr), is_irpar=is_irpar, seconds=seconds)
    if ending.text:
        with suppress(OSError):  # The exit code tells where standard error cannot be written.
            print(f"error: {ending.text}", file=sys.stderr)
    raise typer.Exit(ending.code)


def _raw(stream: TextIO) -> Any:
    """What a stream writes its bytes to in the end."""
    stream.flush()
    return getattr(stream.buffer, "raw", stream.buffer)


def _check_not_launched() -> None:
    """Refuse to launch ranks from ranks.

    Raises:
        IrparError: this process is a rank already.
    """
    from irpar.runtime.launch.environment import LAUNCHER_MARK, World

    world = World.of_environment()
    if world is not None and (world.size > 1 or LAUNCHER_MARK in os.environ):
        raise IrparError(
            f"irpar launch was itself started as {world}",
            do=f"start irpar launch once; or leave it out, and let {world.launcher} start `irpar run OUT` as each rank",
        )


def _command_line(words: list[str]) -> tuple[list[str], bool]:
    """The program and its arguments, and whether it is irpar.

    Raises:
        IrparError: there is no such command or program.
    """
    from .app import COMMANDS

    name = words[0]
    if name in RANKED:
        return [sys.executable, "-P", "-m", "irpar", *words], True
    if name in COMMANDS:
        raise IrparError(
            f"irpar {name} is not for several ranks", do=f"launch {' or '.join(RANKED)}; run irpar {name} by itself"
        )
    if shutil.which(name) is None:
        raise IrparError(
            f'there is no command and no program "{name}" to launch',
            notes=nearest_names(name, RANKED),
            do="write irpar launch -n 4 run OUT, or irpar launch -n 4 PROGRAM with its arguments",
        )
    return words, False


def _timeout(words: list[str]) -> float | None:
    """The seconds that a command line gives ranks to wait for each other, as far as it can be read."""
    texts = [word.removeprefix("--timeout=") for word in words if word.startswith("--timeout=")]
    texts += [after for word, after in pairwise(words) if word == "--timeout"]
    try:
        return float(texts[-1]) if texts else None
    except ValueError:
        return None  # That is for the ranks to tell.


def _size(words: list[str], ranks: int | None, is_irpar: bool) -> int:
    """How many ranks to start.

    Raises:
        IrparError: it is neither given nor known, or does not fit the mesh.
    """
    mesh = _mesh(words) if is_irpar else None
    if mesh is None:
        if ranks is None and is_irpar:
            raise IrparError(
                "no folder that `irpar partition` wrote is given, from which the number of ranks would be known",
                where=" ".join(words),
                do=f"check the folder: irpar launch {words[0]} OUT ...",
            )
        if ranks is None:
            raise IrparError("the number of ranks is not given", do=f"write irpar launch -n 4 {words[0]} ...")
        return ranks
    size = math.prod(mesh.values())
    if ranks not in (None, size):
        axes = ",".join(f"{name}={count}" for name, count in mesh.items())
        raise IrparError(f"-n {ranks}, and the mesh {axes} has {size} ranks", do=f"write -n {size}, or leave it out")
    return size


def _mesh(words: list[str]) -> dict[str, int] | None:
    """The axes of the mesh of the first folder in a command line that has a plan.json; None where it cannot be read.

    That is for the ranks to tell: they read all of it.
    """
    plans = (Path(word) / "plan.json" for word in words[1:])
    try:
        path = next((path for path in plans if path.is_file()), None)
        axes = None if path is None else json.loads(path.read_bytes())["mesh"]["axes"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    if isinstance(axes, dict) and all(type(count) is int and count > 0 for count in axes.values()):
        return axes
    return None
