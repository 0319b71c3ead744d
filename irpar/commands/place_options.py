"""Options of commands that make programs of which a part runs on the host."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from irpar.errors import IrparError

from .model_target import require_folder

if TYPE_CHECKING:
    from irpar.passes.place import Place as PlacePass

_PANEL = "Memory"
CHOICES = ("auto", "off")

Place = Annotated[
    str | None,
    typer.Option(
        "--place",
        metavar="auto|off",
        help="auto: nodes run on the host or on the device, whatever takes least time and fits. off: all on the "
        "device, whatever the model says.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Host = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="GLOB",
        help="Scopes, nodes, weights or inputs of the model that are on the host, such as tables.*; others are where a "
        "step takes least time. May be repeated.",
        rich_help_panel=_PANEL,
    ),
]
Device = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="GLOB",
        help="The same on the device.",
        rich_help_panel=_PANEL,
    ),
]
DeviceMemoryGb = Annotated[
    float | None,
    typer.Option(
        "--device-memory-gb",
        metavar="GB",
        help="What a rank may hold on its device: the rest goes to the host. If not given, what --network says.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]


def place_of(given: Mapping[str, Any]) -> "PlacePass | Literal[False] | None":
    """The pass that a command is asked for; None where nothing is said, False where it is said that there is none.

    Args:
        given: its arguments by name.

    Raises:
        IrparError: the options contradict each other, or cannot be.
    """
    from .options import choice

    asked = {
        "--place": given["place"],
        "--host": given["host"],
        "--device": given["device"],
        "--device-memory-gb": given["device_memory_gb"],
    }
    said = [option for option, value in asked.items() if value not in (None, [])]
    if not said:
        return None
    chosen = choice("--place", given["place"] or "auto", CHOICES)
    if given["pipeline"] is not None:
        do = f"write place{{limit-gb=16}} into the pipeline, after localize, and leave out {said[0]}"
        raise IrparError(
            f"{said[0]} and --pipeline both say what runs",
            do="leave out --place off: place runs where the pipeline has it" if chosen == "off" else do,
        )
    if chosen == "off":
        if len(said) > 1:
            raise IrparError(
                f"--place off leaves all on the device, and {said[1]} does not",
                do=f"leave out one of them; {said[1]} alone is as with --place auto",
            )
        return False
    size = given["device_memory_gb"]
    if size is not None and not 0 < size < math.inf:
        raise IrparError(f"--device-memory-gb {size:g}", do="give a number of GB above 0")
    require_folder(given["out"], said[0])
    from irpar.passes.place import Place

    return Place(tuple(given["host"] or ()), tuple(given["device"] or ()), limit_gb=size or 0)
