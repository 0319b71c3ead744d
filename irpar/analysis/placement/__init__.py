"""Placement: which nodes run on the host and which on the device, and what is copied between their memories.

On an abstract graph: units that have one place each, with a cost on either side, and values that lie where their unit
is, are read at times by units, and are copied once in each direction in which anybody reads them.
"""

from .graph import PlacedValue, PlacementGraph, Unit
from .simulation import Outcome, simulate
from .solution import NoRoomError, Placement, solve

__all__ = [
    "NoRoomError",
    "Outcome",
    "PlacedValue",
    "Placement",
    "PlacementGraph",
    "Unit",
    "simulate",
    "solve",
]
