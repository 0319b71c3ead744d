"""What is on the host and what on the device, as a module says it.

What is said stands in the metadata of the module, so that clones, text and ONNX files have it; the default pipeline
gets a pass `place` for it, which leaves on the device what nothing is said of.
"""

from dataclasses import dataclass

from irpar.ir import Module, Place

from .said import read_said, write_said

SAID = "irpar.place_said"
"""The entry of a module's metadata."""


@dataclass(frozen=True)
class PlaceSaid:
    """What is said.

    Attributes:
        host, device: scopes or nodes of the model, or globs.
    """

    host: tuple[str, ...] = ()
    device: tuple[str, ...] = ()


def place_said(module: Module) -> PlaceSaid | None:
    """What a module says; None: nothing.

    Raises:
        IrparError: its metadata cannot be read.
    """
    do = "take it out, and say anew what is where (irpar.annotations.mindspore)"
    return read_said(module, SAID, PlaceSaid, do)


def say_place(module: Module, match: str, place: Place) -> None:
    """Say of something where it is; what was said of it before is forgotten."""
    known = place_said(module) or PlaceSaid()
    host, device = (tuple(each for each in names if each != match) for names in (known.host, known.device))
    if place == "host":
        host = (*host, match)
    else:
        device = (*device, match)
    write_said(module, SAID, PlaceSaid(host, device))
