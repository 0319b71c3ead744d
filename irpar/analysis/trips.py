"""What is sent in each trip of a loop, and what once, as a module says it: sums of gradients, gathers of parameters.

What is sent once is held by all trips: as a whole sum of gradients, or as whole parameters. What is said stands in the
metadata of the module; `zero` and `simplify-collectives` read it.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from irpar.analysis.training_facts import facts_of, metadata_of
from irpar.ir import Module
from irpar.units import bytes_text

from .cost.network_lookup import network_of
from .said import read_said, write_said

SAID = "irpar.trips"
"""The entry of a module's metadata."""
When = Literal["auto", "step", "micro-batch"]
"""Once a step, in each micro-batch, or what the memory of the devices allows."""
WHEN: tuple[When, ...] = get_args(When)
What = Literal["reduce", "gather"]
"""What is sent: sums of gradients, or parameters that are gathered."""
_WORDS = {"step": "once a step", "micro-batch": "in each micro-batch"}
_DONE = {"reduce": "gradients are reduced", "gather": "parameters are gathered"}


@dataclass(frozen=True)
class Trips:
    """What a module says.

    Attributes:
        reduce: when gradients are reduced of which each rank then holds a share.
        gather: when parameters are gathered that ranks hold shares of.
    """

    reduce: When = "auto"
    gather: When = "auto"


def trips_said(module: Module) -> Trips:
    """What a module says.

    Raises:
        IrparError: its metadata cannot be read.
    """
    return read_said(module, SAID, Trips, "run accumulate again, which writes it") or Trips()


def say_trips(module: Module, trips: Trips) -> None:
    """Say it, where it is not what goes without saying."""
    if trips != Trips():
        write_said(module, SAID, trips)


def memory_of(module: Module) -> int | None:
    """The bytes that a rank may hold: by the memory limit of the module, else by its network; None: nobody knows."""
    return module.memory_limit if module.memory_limit is not None else network_of(module.network).memory


def say_when(module: Module, what: What, when: When, held: int, limit: int) -> str:
    """Let a module say when something is sent, where memory was looked at; a line about it.

    Args:
        module: it.
        what: is sent.
        when: it is.
        held: the bytes that a rank holds at most where it is sent once a step.
        limit: the bytes that it may hold.
    """
    said = trips_said(module)
    say_trips(module, replace(said, reduce=when) if what == "reduce" else replace(said, gather=when))
    would = "holds" if when == "step" else "would otherwise hold"
    line = f"{_DONE[what]} {_WORDS[when]}: a rank {would} about {bytes_text(held)}, and may hold {bytes_text(limit)}"
    if when == "step" and held > limit:
        line += f"; {_WORDS['micro-batch']} it would hold no less"
    facts = facts_of(module.metadata)
    if facts is not None and "micro_batches" in facts:
        known = facts["micro_batches"]
        told = {**known, what: when, "why": f"{known['why']}; {line}" if known["why"] else line}
        module.metadata |= metadata_of({**facts, "micro_batches": told})  # type: ignore[typeddict-item]
    return line
