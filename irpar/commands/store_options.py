"""The option of commands that make programs whose weights, state or activations lie elsewhere than on the device."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from irpar.errors import IrparError

from .model_target import require_folder

if TYPE_CHECKING:
    from irpar.passes.store import Store as StorePass

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="OPTIONS",
        help="Where weights, state and activations lie: `auto, limit-gb=16`, or as a pipeline says it: `weights=disk, "
        "state=host, prefetch=2` (docs/storage.md).",
        rich_help_panel="Memory",
        show_default=False,
    ),
]


def store_of(given: Mapping[str, Any]) -> "StorePass | None":
    """The pass that a command is asked for; None where all lies on the device.

    Args:
        given: its arguments by name.

    Raises:
        IrparError: the options cannot be read, or contradict each other.
    """
    text = given["store"]
    if text is None:
        return None
    if given["pipeline"] is not None:
        raise IrparError(
            "--store and --pipeline both say what runs",
            do="write store{weights=host} into the pipeline, after localize, and leave out --store",
        )
    require_folder(given["out"], "--store")
    from irpar.pass_manager import PassManager

    options = ["auto=true" if option.strip() == "auto" else option for option in text.split(",")]
    (made,) = PassManager.parse(f"store{{{','.join(options)}}}").passes
    return cast("StorePass", made)
