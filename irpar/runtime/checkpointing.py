"""What a rank does for a checkpoint: it writes the blocks of state that no rank before it holds, and reads its own."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irpar.output.checkpoint import Checkpoint, block_name, write_blocks
from irpar.sharding import Mesh, local_region

from .held_state import StateSpec
from .layout import is_first_holder

Array = np.ndarray[Any, Any]


def save_blocks(
    path: str | os.PathLike[str], rank: int, states: Sequence[StateSpec], mesh: Mesh, held: Mapping[str, Array]
) -> dict[str, Array]:
    """Write the blocks that a rank is the first to hold.

    Args:
        path: the folder of the checkpoint.
        rank: which.
        states: of the program.
        mesh: of the ranks.
        held: name of a state to the rank's block.

    Returns:
        The name of each block that was written, with nothing.

    Raises:
        CheckpointError: the system refuses.
    """
    blocks = {}
    for state in states:
        spec = state.spec
        if is_first_holder(spec.sharding, mesh, rank) and (held[spec.name].size or spec.sharding is None):
            shape = _shape(state)
            blocks[block_name(spec.name, _region(state, mesh.coords(rank)), shape)] = held[spec.name]
    if blocks:
        write_blocks(Path(path), rank, blocks)
    return {name: np.empty(0) for name in blocks}


def load_blocks(path: str | os.PathLike[str], states: Sequence[StateSpec], coords: Sequence[int]) -> dict[str, Array]:
    """The blocks of the rank at some coordinates, whatever mesh wrote them.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    regions = {state.spec.name: _region(state, coords) for state in states}
    return Checkpoint.open(Path(path)).read(list(regions), regions)


def _shape(state: StateSpec) -> tuple[int, ...]:
    assert state.spec.shape is not None
    return tuple(int(dim) for dim in state.spec.shape)  # type: ignore[arg-type]  # State is static.


def _region(state: StateSpec, coords: Sequence[int]) -> tuple[tuple[int, int], ...]:
    shape, sharding = _shape(state), state.spec.sharding
    if sharding is None or sharding.is_replicated:
        return tuple((0, size) for size in shape)
    return tuple(local_region(sharding, shape, coords))
