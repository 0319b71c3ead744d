"""What a pass tells while it runs, and what is kept of it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Progress:
    """A pass starts or ends.

    Attributes:
        event: which of the two.
        name: the pass.
        index, total: its place in the pipeline, from 0, and the number of passes.
        seconds: how long it took, at its end.
    """

    event: Literal["start", "end"]
    name: str
    index: int
    total: int
    seconds: float = 0.0


@dataclass(frozen=True)
class PassRecord:
    """What one pass of a pipeline did, and how long it took.

    Attributes:
        text: the pass with its options, as in the pipeline.
        name: its name.
        changed, notes, statistics: as in its `PassResult`.
        seconds: wall-clock time of its `run`.
        nodes: nodes of all graphs after it, functions and nested graphs not counted.
    """

    text: str
    name: str
    changed: bool
    notes: tuple[str, ...]
    statistics: dict[str, int | float]
    seconds: float
    nodes: int
