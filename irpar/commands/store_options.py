"""The option of commands that make programs whose weights, state or activations lie elsewhere than on the device."""

import re
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

_AUTO = re.compile(r'"(?:[^"\\]|\\.)*"|(?:^|(?<=,))\s*auto\s*(?=,|$)')
"""The option `auto` without a value; and quoted words, in which it is none."""


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

    options = _AUTO.sub(lambda found: found[0] if found[0].startswith('"') else "auto=true", text)
    made, *others = PassManager.parse(f"store{{{options}}}").passes
    if others:
        raise IrparError(
            f"--store {text} names more passes than one",
            do="give only the options of store, and a word with one of , { } in quotes",
        )
    return cast("StorePass", made)
