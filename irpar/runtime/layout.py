"""From full tensors to the blocks of ranks, and back."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from irpar.ir import UNKNOWN, Dim, DType, Type, dtype_of_numpy
from irpar.ops.collectives.reduced_arrays import reduce_arrays
from irpar.sharding import Mesh, Sharding, block_range, filled_blocks, local_region, spelled

from .errors import ReplicaError, RunError

Array = np.ndarray[Any, Any]

OUTLIERS = 2.0**16
"""Elements so many times as large as the median magnitude (masks) say nothing of the rounding of the others."""


@dataclass(frozen=True)
class TensorSpec:
    """What is known of an input or output of the whole program.

    Attributes:
        name: its name outside.
        dtype: element type; None where it is not a tensor.
        shape: the global shape; None where it is not a tensor or its rank is not known.
        sharding: how it is sharded on the mesh; None: whole on every rank.
        other: the type of what is no tensor, where it is known.
    """

    name: str
    dtype: DType | None
    shape: tuple[Dim, ...] | None
    sharding: Sharding | None = None
    other: Type = UNKNOWN

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{self.name} (not a tensor)" if self.other == UNKNOWN else f"{self.name} {self.other}"
        dims = "*" if self.shape is None else ", ".join("_" if dim is None else str(dim) for dim in self.shape)
        return f"{self.name} {self.dtype}[{dims}]"


def scatter(array: Array, sharding: Sharding | None, coords: Sequence[int]) -> Array:
    """The block of a full tensor that the rank at `coords` holds, as a view.

    Raises:
        RunError: the sharding is partial: a full tensor does not say how it is a sum.
    """
    if sharding is None or sharding.is_replicated:
        return array
    if sharding.partial:
        raise RunError(f"an input cannot be partial over {', '.join(map(str, sharding.partial))}")
    return array[tuple(slice(start, stop) for start, stop in local_region(sharding, array.shape, coords))]


def gather(blocks: Mapping[int, Any], sharding: Sharding | None, shape: Sequence[int] | None) -> Any:
    """The full tensor from the blocks of ranks.

    Args:
        blocks: rank to its block; where several ranks hold the same one, the first counts.
        sharding: how the tensor is sharded on the mesh; None: every rank holds it in full.
        shape: the global shape; None: that of the block.

    Returns:
        The tensor, partial values reduced. A block that is the full tensor comes back as it is.

    Raises:
        RunError: the blocks do not make up the tensor.
    """
    first = blocks[min(blocks)]
    if sharding is None or sharding.is_replicated or shape is None:
        return first
    if math.prod(sharding.dim_parts(dim) for dim in range(sharding.rank)) == 1:
        return _reduced(blocks, sharding, shape)[(0,) * sharding.rank]
    whole = np.empty(tuple(shape), first.dtype)
    for place, block in _reduced(blocks, sharding, shape).items():
        region = [
            block_range(size, sharding.dim_parts(dim), index)
            for dim, (size, index) in enumerate(zip(shape, place, strict=True))
        ]
        target = whole[tuple(slice(start, stop) for start, stop in region)]
        if target.shape != block.shape:
            raise RunError(f"a block of {list(block.shape)} where the sharding {sharding} has {list(target.shape)}")
        target[...] = block
    return whole


def makes_whole(ranks: Iterable[int], sharding: Sharding | None, shape: Sequence[int]) -> bool:
    """Whether the blocks of these ranks make up the full tensor: all that have elements, and all terms of sums."""
    return sharding is None or sharding.is_replicated or _missing(_places(ranks, sharding), sharding, shape) is None


def _missing(
    held: Mapping[tuple[tuple[int, ...], int], Any], sharding: Sharding, shape: Sequence[int]
) -> tuple[int, ...] | None:
    """The first block that has elements, and that no rank holds, or not all of its terms."""
    terms = range(sharding.mesh.group_size(sharding.partial))
    return next((place for place in _filled(sharding, shape) if any((place, term) not in held for term in terms)), None)


def _filled(sharding: Sharding, shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The blocks that have elements, by their index in each dim; one where none has any."""
    counts = (max(1, filled_blocks(size, sharding.dim_parts(dim))) for dim, size in enumerate(shape))
    return product(*map(range, counts))


def _places(ranks: Iterable[int], sharding: Sharding) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """Which ranks hold which block: (index of the block in each dim, position along the partial axes) to ranks."""
    mesh = sharding.mesh
    found: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for rank in sorted(ranks):
        coords = mesh.coords(rank)
        place = tuple(mesh.position(coords, axes) for axes in sharding.axes)
        found.setdefault((place, mesh.position(coords, sharding.partial)), []).append(rank)
    return found


def _reduced(blocks: Mapping[int, Any], sharding: Sharding, shape: Sequence[int]) -> dict[tuple[int, ...], Array]:
    """Every block that has elements once, reduced over the partial axes in order of position."""
    held = _places(blocks, sharding)
    terms = range(sharding.mesh.group_size(sharding.partial))
    missing = _missing(held, sharding, shape)
    if missing is not None:
        raise RunError(f"no rank holds block {list(missing)} of a tensor that is sharded as {sharding}")
    return {
        place: reduce_arrays([blocks[held[place, term][0]] for term in terms], sharding.reduce)
        for place in _filled(sharding, shape)
    }


def is_first_holder(sharding: Sharding | None, mesh: Mesh, rank: int) -> bool:
    """Whether no lower rank holds the same block: one whose coordinates differ only in axes that it is not cut over."""
    if sharding is None:
        return rank == 0
    names = {axis.name for axes in (*sharding.axes, sharding.partial) for axis in axes}
    coords = zip(mesh.axis_names, mesh.coords(rank), strict=True)
    return all(coordinate == 0 for name, coordinate in coords if name not in names)


def check_replicas(name: str, blocks: Mapping[int, Any], sharding: Sharding | None) -> None:
    """Refuse copies of one block that differ between ranks: bitwise, or for floats by more than rounding.

    Sequences are compared entry by entry, an absent optional with another.

    Raises:
        ReplicaError: naming the value, two ranks and the largest difference.
    """
    ranks = sorted(blocks)
    copies = [ranks] if sharding is None else list(_places(blocks, sharding).values())
    for first, *others in copies:
        for other in others:
            difference = _difference(blocks[first], blocks[other])
            if difference:
                raise ReplicaError(
                    f"{name} should be equal on ranks {first} and {other}, but {difference}",
                    value=name,
                    do=find_first("is wrong"),
                )


def _difference(a: Any, b: Any) -> str:
    if a is b:
        return ""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        entries = ((place, _difference(one, other)) for place, (one, other) in enumerate(zip(a, b, strict=True)))
        return next((f"of entry {place} {found}" for place, found in entries if found), "")
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return "" if a is None and b is None else f"is {kind_text(a)} on one and {kind_text(b)} on the other"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"is {a.dtype}{list(a.shape)} on one and {b.dtype}{list(b.shape)} on the other"
    kind = dtype_of_numpy(a.dtype)
    if not kind.is_float and a.dtype.kind != "c":
        count = int(np.count_nonzero(a != b))
        return f"{count} of {a.size} elements differ" if count else ""
    wide = a.dtype if a.dtype.itemsize >= 4 else np.dtype(np.float32)
    left, right = a.astype(wide, copy=False), b.astype(wide, copy=False)
    if np.array_equal(left, right, equal_nan=True):
        return ""
    # Threads may sum in another order: allow the rounding of a few dozen operations.
    tolerance = 64 * _epsilon(a.dtype)
    if np.allclose(left, right, rtol=tolerance, atol=tolerance * _scale(left), equal_nan=True):
        return ""
    with np.errstate(all="ignore"):
        worst = np.nanmax(np.abs(left - right), initial=0.0)
    return f"the largest difference is {worst:.3g}"


def typical_bound(sizes: Array) -> float:
    """The magnitude above which elements are outliers, such as those of a mask; inf where there are none.

    That is `OUTLIERS` times the median of the magnitudes, each counted once: most elements may be masked.
    """
    counted = sizes[np.isfinite(sizes) & (sizes > 0)].astype(np.float64)
    if not counted.size or counted.max() <= OUTLIERS * counted.min():
        return np.inf
    different = np.unique(counted)
    return OUTLIERS * float(different[(different.size - 1) // 2])


def _scale(array: Array) -> float:
    """The largest magnitude of finite elements that are no outliers."""
    sizes = np.abs(array)
    return float(np.max(sizes, where=np.isfinite(sizes) & (sizes <= typical_bound(sizes)), initial=0.0))


def kind_text(held: Any) -> str:
    """What kind of value an array, a list of arrays or None is, in words."""
    if held is None:
        return "an absent optional"
    return f"a sequence of {len(held)}" if isinstance(held, (list, tuple)) else "a tensor"


def _epsilon(dtype: np.dtype[Any]) -> float:
    import ml_dtypes

    if dtype.kind == "c":
        return float(np.finfo(dtype).eps)
    return float(ml_dtypes.finfo(dtype).eps)


def find_first(what: str) -> str:
    """What to do where results differ; `what` says of the tensor that it differs."""
    bisect = spelled("`irpar verify OUT --bisect`", "partition.bisect()")
    return f"find the first tensor that {what} with {bisect}, and report it"
