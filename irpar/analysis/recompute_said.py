"""What is to be computed again, as a module says it.

What is said stands in the metadata of the module, so that clones, text and ONNX files have it; the default pipeline
gets a pass `recompute` for each.
"""

from dataclasses import dataclass

from irpar.ir import Module

from .said import read_said, write_said

SAID = "irpar.recompute_said"
"""The entry of a module's metadata."""


@dataclass(frozen=True)
class RecomputeSaid:
    """One thing that is said.

    Attributes:
        match: scope, node or value of the model, or a glob.
        mp_comm_recompute, parallel_optimizer_comm_recompute: as of the pass.
    """

    match: str
    mp_comm_recompute: bool = True
    parallel_optimizer_comm_recompute: bool = False


@dataclass(frozen=True)
class _All:
    said: tuple[RecomputeSaid, ...] = ()


def recompute_said(module: Module) -> tuple[RecomputeSaid, ...]:
    """What a module says, in the order in which it was said.

    Raises:
        IrparError: its metadata cannot be read.
    """
    do = "take it out, and say anew what is computed again (irpar.annotations.mindspore)"
    found = read_said(module, SAID, _All, do)
    return () if found is None else found.said


def say_recompute(module: Module, said: RecomputeSaid, is_on: bool) -> None:
    """Say of something that it is computed again, or that it is not; what was said of it before is forgotten."""
    kept = tuple(each for each in recompute_said(module) if each.match != said.match)
    write_said(module, SAID, _All((*kept, said) if is_on else kept))
