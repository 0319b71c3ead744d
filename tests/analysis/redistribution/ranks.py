"""Steps executed rank by rank: any blocks, uneven and empty ones too."""

import numpy as np

from irpar.analysis.redistribution import Step
from irpar.sharding import Mesh, Sharding, local_region


def block(array: np.ndarray, sharding: Sharding, rank: int) -> np.ndarray:
    """What a rank holds; of a partial tensor, position p of n holds p + 1 shares of n(n+1)/2."""
    mesh = sharding.mesh
    coords = mesh.coords(rank)
    part = array[tuple(slice(*bounds) for bounds in local_region(sharding, array.shape, coords))]
    if sharding.partial:
        n = mesh.group_size(sharding.partial)
        part = part * (mesh.position(coords, sharding.partial) + 1) / (n * (n + 1) / 2)
    return part


def execute(step: Step, held: list[np.ndarray], before: Sharding, shape: tuple[int, ...]) -> list[np.ndarray]:
    """One step on all ranks."""
    mesh = before.mesh
    result: list[np.ndarray] = [np.empty(0)] * mesh.size
    for group in mesh.groups(step.axes):
        members = [held[rank] for rank in group]
        for position, rank in enumerate(group):
            result[rank] = _member(step, members, position, mesh, rank, before, shape)
    return result


def _member(
    step: Step,
    members: list[np.ndarray],
    position: int,
    mesh: Mesh,
    rank: int,
    before: Sharding,
    shape: tuple[int, ...],
) -> np.ndarray:
    after = step.after

    def own(array: np.ndarray, dim: int) -> np.ndarray:
        """The rank's block of a dim under `after`, of an array that holds the block under the axes before."""
        coords = mesh.coords(rank)
        start, stop = local_region(after, shape, coords)[dim]
        first, _ = local_region(before, shape, coords)[dim]
        return array.take(range(start - first, stop - first), axis=dim)

    match step.op:
        case "AllSlice":
            return own(members[position], step.dims[0])
        case "CollectivePermute":
            sources = dict(zip(step.pairs[1::2], step.pairs[::2], strict=True))
            return members[sources[position]]
        case "MakePartial":
            return members[position] if position == 0 else np.zeros_like(members[position])
        case "AllGather":
            return np.concatenate(members, axis=step.dims[0])
        case "AllReduce":
            return sum(members[1:], members[0])
        case "ReduceScatter":
            return own(sum(members[1:], members[0]), step.dims[0])
        case "AllToAll":
            split, concat = step.dims
            return np.concatenate([own(member, split) for member in members], axis=concat)
    raise AssertionError(step.op)
